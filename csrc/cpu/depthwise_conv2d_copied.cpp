// depthwise_conv2d on the CPU, square kernels of 3, 5 or 7: y, dx, dw and db by the kernels of channels_last images, on
// copies of a few channels in cache, [pixel][channel].
// A band of rows of a group of contiguous planes is transposed; what the kernels write there is transposed back.
// Vectors then lie along channels, and planes may be of any width. Of channels_last images whose pixels collide in the
// first cache a run of each pixel is copied, where vectors are no whole lines: up to twice as fast
// (benchmarks/LOG.md, 2026-11-30).
#include "cpu/depthwise_direct.h"

namespace fusedtrain::cpu {
namespace {

// A vector of 32-bit words as wide as a pixel of a group.
template <class T>
struct Words {
  using Int = int32_t;
  static constexpr int kLanes = Group<T>::kChannels * int(sizeof(T)) / 4;
  RawVec<uint32_t, 4 * kLanes> v;
};

// put(j, out) for every out[i] = in(i)[j], i and j < kChannels.
template <class T, class In, class Put>
[[gnu::always_inline]] inline void transpose_square(const In& in, const Put& put) {
  using W = Words<T>;
  const auto transposed = [&](W * words, auto row) __attribute__((always_inline)) {
    unroll<W::kLanes>([&](auto i) __attribute__((always_inline)) { std::memcpy(&words[i].v, in(row(i)), sizeof(W)); });
    transpose(words);
  };
  W words[W::kLanes];
  if constexpr (sizeof(T) == 4) {
    transposed(words, [](int i) { return i; });
    unroll<W::kLanes>([&](auto i) __attribute__((always_inline)) { put(i, words[i].v); });
  } else {
    // Words hold an even column and the odd one behind it, of the even rows first, then of the odd ones.
    W even[W::kLanes];
    transposed(even, [](int i) { return 2 * i; });
    transposed(words, [](int i) { return 2 * i + 1; });
    unroll<W::kLanes>([&](auto i) __attribute__((always_inline)) {
      put(2 * i, (even[i].v & 0xffff) | (words[i].v << 16));
      put(2 * i + 1, (even[i].v >> 16) | (words[i].v & 0xffff0000));
    });
  }
}

constexpr int64_t kAheadBytes = 256;

// Some rows of a group of planes; the last plane stands for those that are missing.
template <class T>
class Planes {
 public:
  static constexpr int64_t kChannels = Group<std::remove_const_t<T>>::kChannels;

  Planes(const DepthwiseSizes& s, T* images, DepthwisePart group, int64_t h, int64_t w, Span rows)
      : pixels_(std::max<int64_t>(0, rows.size()) * w),
        ahead_(rows.size() == h ? kChannels * h * w : kAheadBytes / int64_t(sizeof(T))) {
    for (int64_t i = 0; i < kChannels; ++i) {
      planes_[i] = images + ((group.image * s.c + std::min(group.begin * kChannels + i, s.c - 1)) * h + rows.begin) * w;
    }
    // Not where a plane is written several times.
    streams_ = kGroupsOfLine<std::remove_const_t<T>> == 1 && group.end * kChannels <= s.c && pixels_ % kChannels == 0 &&
               streams<std::remove_const_t<T>>(s, planes_[0], h * w, h * w);
  }

  // tile[pixel][channel] = the planes.
  void read(std::remove_const_t<T>* tile) const {
    each_square(
        [&](int64_t at) {
          for (const T* plane : planes_) __builtin_prefetch(plane + at + ahead_);
          transpose_square<std::remove_const_t<T>>(
              [&](int i) __attribute__((always_inline)) { return planes_[i] + at; },
              [&](int j, auto pixel)
                  __attribute__((always_inline)) { std::memcpy(tile + (at + j) * kChannels, &pixel, sizeof pixel); });
        },
        [&](int64_t channel, int64_t pixel) { tile[pixel * kChannels + channel] = planes_[channel][pixel]; });
  }

  // The planes = tile[pixel][channel].
  void write(const T* tile) const {
    visit_bool(streams_, [&]<bool kStream>() { write_by<kStream>(tile); });
  }

 private:
  template <bool kStream>
  void write_by(const T* tile) const {
    each_square(
        [&](int64_t at) {
          for (const T* plane : planes_) {
            if (!kStream) fetch_for_store(plane + at + ahead_);
          }
          transpose_square<T>(
              [&](int j) __attribute__((always_inline)) { return tile + (at + j) * kChannels; },
              [&](int i, auto run) __attribute__((always_inline)) {
                if constexpr (kStream && sizeof run == 64) {
                  stream_raw(planes_[i] + at, run);
                } else {
                  std::memcpy(planes_[i] + at, &run, sizeof run);
                }
              });
        },
        [&](int64_t channel, int64_t pixel) { planes_[channel][pixel] = tile[pixel * kChannels + channel]; });
  }

  // square(pixel) for as many pixels as channels at a time, the last of which may overlap; each(channel, pixel) where
  // there are too few.
  template <class Square, class Each>
  void each_square(const Square& square, const Each& each) const {
    if (pixels_ < kChannels) {
      for (int64_t pixel = 0; pixel < pixels_; ++pixel) {
        for (int64_t channel = 0; channel < kChannels; ++channel) each(channel, pixel);
      }
      return;
    }
    for (int64_t pixel = 0; pixel < pixels_; pixel += kChannels) square(std::min(pixel, pixels_ - kChannels));
  }

  T* planes_[kChannels];
  int64_t pixels_;
  int64_t ahead_;  // to what is read or written next: the next group, if planes are short
  bool streams_;   // whether they are written past the caches
};

// Some rows of channels_last images: of each pixel a run of channels, which is some groups.
template <class T>
class Runs {
 public:
  using Element = std::remove_const_t<T>;
  static constexpr int64_t kChannels = kRunBytes / sizeof(T);
  static_assert(kChunkChannels % kChannels == 0);  // a part is whole runs

  Runs(const DepthwiseSizes& s, T* images, DepthwisePart groups, int64_t h, int64_t w, Span rows)
      : first_(images + (groups.image * h + rows.begin) * w * s.c + groups.begin * Group<Element>::kChannels),
        pixels_(std::max<int64_t>(0, rows.size()) * w),
        pitch_(s.c),
        streams_(streams<Element>(s, images, h * w, s.c)) {}

  // copy[pixel][channel] = the runs.
  void read(Element* copy) const {
    for (int64_t i = 0; i < pixels_; ++i) {
      const T* const run = first_ + i * pitch_;
      for (int64_t k = 0; k < kChannels; k += kLine) __builtin_prefetch(run + kChannels + k, 0, 2);  // the next part's
      std::memcpy(copy + i * kChannels, run, kRunBytes);
    }
  }

  // The runs = copy[pixel][channel].
  void write(const T* copy) const {
    constexpr int64_t kSoon = 2;  // pixels: more lines would not fit into their sets
    for (int64_t i = 0; i < pixels_; ++i) {
      T* const run = first_ + i * pitch_;
      for (int64_t k = 0; k < kChannels; k += kLine) {
        if (!streams_) fetch_for_store(run + kSoon * pitch_ + k);
        RawVec<uint32_t, 32> halves[2];
        std::memcpy(halves, copy + i * kChannels + k, sizeof halves);
        for (int half = 0; half < 2; ++half) {
          T* const to = run + k + half * kLine / 2;
          streams_ ? stream_raw(to, halves[half]) : void(std::memcpy(to, &halves[half], sizeof halves[half]));
        }
      }
    }
  }

 private:
  static constexpr int64_t kLine = kLineBytes / sizeof(T);

  T* first_;
  int64_t pixels_, pitch_;
  bool streams_;
};

// The rows of x that rows of y read, and the rows of dy that rows of dx read; with a group as a whole image.
inline Span rows_of_x(const DepthwiseSizes& s, Span y) {
  const int64_t begin = std::clamp<int64_t>(y.begin * s.sh - s.top, 0, s.h);
  return {begin, std::clamp((y.end - 1) * s.sh - s.top + s.kh, begin, s.h)};
}
inline Span rows_of_dy(const DepthwiseSizes& s, Span x) {
  const int64_t begin = std::clamp<int64_t>(ceil_div(x.begin + s.top - s.kh + 1, s.sh), 0, s.ho);
  return {begin, std::clamp((x.end - 1 + s.top) / s.sh + 1, begin, s.ho)};
}

// Sizes of a copy: as the size of what is written counts no image, as it stays in cache and is not streamed.
inline DepthwiseSizes copy_sizes(DepthwiseSizes s, int64_t channels) {
  s.n = 0;
  s.c = channels;
  s.layout = Layout::kChannelsLast;
  return s;
}

template <class T, template <class> class Copy>
void forward_by(const DepthwiseConv2d& a, const void* taps, void* scratch, DepthwisePart part) {
  constexpr int64_t kChannels = Copy<T>::kChannels, kGroup = Group<T>::kChannels, kGroups = kChannels / kGroup;
  const DepthwiseSizes& s = a.sizes;
  const int64_t k = s.kh * s.kw;
  const Span y_rows = band_rows(part, s.ho), x_rows = rows_of_x(s, y_rows);
  Arena arena(scratch);
  auto* weights = arena.take<Acc<T>>(k * kChannels);
  T* x = arena.take<T>(x_rows.size() * s.w * kChannels);
  T* y = arena.take<T>(y_rows.size() * s.wo * kChannels);
  T bias[kChannels];
  Acc<T> moments[3 * kChannels];  // as those of one band
  DepthwiseConv2d copy{.sizes = copy_sizes(s, kChannels),
                       .act = a.act,
                       .x = x - x_rows.begin * s.w * kChannels,
                       .weight = nullptr,
                       .bias = a.bias ? bias : nullptr,
                       .y = y - y_rows.begin * s.wo * kChannels,
                       .moments = nullptr};
  if constexpr (std::is_same_v<T, float>) {
    if (a.moments) copy.moments = moments - part.band * 3 * kChannels;
  }
  for (int64_t block = part.begin; block < part.end; block += kGroups) {
    const int64_t groups = std::min(kGroups, part.end - block), first = block * kGroup;
    const DepthwisePart now{part.image, part.band, part.bands, block, block + groups};
    Copy<const T>(s, static_cast<const T*>(a.x), now, s.h, s.w, x_rows).read(x);
    for (int64_t i = 0; a.bias && i < kChannels; ++i) {
      bias[i] = static_cast<const T*>(a.bias)[std::min(first + i, s.c - 1)];
    }
    depthwise_direct_forward<Isa::FUSEDTRAIN_ISA>(copy, static_cast<const Acc<T>*>(taps) + first * k, weights,
                                                  {0, part.band, part.bands, 0, groups});
    for (int64_t i = 0; a.moments && i < 3; ++i) {
      float* to = a.moments + ((part.image * part.bands + part.band) * 3 + i) * s.c + first;
      std::copy_n(moments + i * kChannels, std::min(groups * kGroup, s.c - first), to);
    }
    Copy<T>(s, static_cast<T*>(a.y), now, s.ho, s.wo, y_rows).write(y);
  }
  stream_fence();
}

template <class T, template <class> class Copy>
void backward_by(const DepthwiseConv2dBackward& a, const void* taps, void* scratch, DepthwisePart part, void* partial,
                 bool begins) {
  constexpr Isa I = Isa::FUSEDTRAIN_ISA;
  constexpr int64_t kChannels = Copy<T>::kChannels, kGroup = Group<T>::kChannels, kGroups = kChannels / kGroup;
  const DepthwiseSizes& s = a.sizes;
  const int64_t k = s.kh * s.kw;
  const Span dx_rows = band_rows(part, s.h), dw_rows = band_rows(part, s.ho), x_rows = rows_of_x(s, dw_rows);
  Span dy_rows = dw_rows;
  if (a.dx) {
    const Span reached = rows_of_dy(s, dx_rows);
    dy_rows = {std::min(reached.begin, dw_rows.begin), std::max(reached.end, dw_rows.end)};
  }
  Arena arena(scratch);
  auto* weights = arena.take<Acc<T>>(k * kChannels);
  T* dy = arena.take<T>(dy_rows.size() * s.wo * kChannels);
  T* x = arena.take<T>(std::max(dx_rows.size(), x_rows.size()) * s.w * kChannels);  // dx, then x
  const DepthwiseConv2dBackward copy{.sizes = copy_sizes(s, kChannels),
                                     .dy = dy - dy_rows.begin * s.wo * kChannels,
                                     .x = x - x_rows.begin * s.w * kChannels,
                                     .weight = nullptr,
                                     .dx = x - dx_rows.begin * s.w * kChannels,
                                     .dw = a.dw,
                                     .db = a.db,
                                     .partial = partial};
  for (int64_t block = part.begin; block < part.end; block += kGroups) {
    const int64_t groups = std::min(kGroups, part.end - block);
    const DepthwisePart now{part.image, part.band, part.bands, block, block + groups};
    const DepthwisePart of_copy{0, part.band, part.bands, 0, groups};
    Copy<const T>(s, static_cast<const T*>(a.dy), now, s.ho, s.wo, dy_rows).read(dy);
    if (a.dx) {
      depthwise_direct_dx<I>(copy, static_cast<const Acc<T>*>(taps) + block * k * kGroup, weights, of_copy);
      Copy<T>(s, static_cast<T*>(a.dx), now, s.h, s.w, dx_rows).write(x);
    }
    if (a.partial == nullptr) continue;
    if (a.dw) Copy<const T>(s, static_cast<const T*>(a.x), now, s.h, s.w, x_rows).read(x);
    depthwise_direct_dw<I>(copy, of_copy, static_cast<Acc<T>*>(partial) + block * (k + 1) * kGroup, begins);
  }
  stream_fence();
}

}  // namespace

template <>
void depthwise_copied_forward<Isa::FUSEDTRAIN_ISA>(const DepthwiseConv2d& a, const void* taps, void* scratch,
                                                   DepthwisePart part) {
  visit_direct_dtype(a.sizes.dtype, [&]<class T>() {
    if (a.sizes.layout == Layout::kContiguous) return forward_by<T, Planes>(a, taps, scratch, part);
    if constexpr (kVecBytes == 32) forward_by<T, Runs>(a, taps, scratch, part);
  });
}

template <>
void depthwise_copied_backward<Isa::FUSEDTRAIN_ISA>(const DepthwiseConv2dBackward& a, const void* taps, void* scratch,
                                                    DepthwisePart part, void* partial, bool begins) {
  visit_direct_dtype(a.sizes.dtype, [&]<class T>() {
    if (a.sizes.layout == Layout::kContiguous) return backward_by<T, Planes>(a, taps, scratch, part, partial, begins);
    if constexpr (kVecBytes == 32) backward_by<T, Runs>(a, taps, scratch, part, partial, begins);
  });
}

}  // namespace fusedtrain::cpu

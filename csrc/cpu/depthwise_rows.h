#pragma once
// What the depthwise kernels share: rows of images, unpacked to lanes.
//
// A block of as many channels as a vector has lanes is worked on at a time. Its rows are copied, widened to the
// accumulation type, into a small buffer [row][column][lane] that stays in L1, with zeros for the padding: the kernels
// proper then know neither layout nor dtype nor borders. Internal linkage, as in core/simd.h.
#include <algorithm>

#include "cpu/vectors.h"
#include "depthwise_conv2d.h"

namespace fusedtrain::cpu {
namespace {

// f(lanes) with AllLanes for a full block of channels.
template <class V, class F>
inline void visit_lanes(int64_t count, F&& f) {
  count >= V::kLanes ? f(AllLanes{}) : f(FirstLanes{int(count)});
}

// Results that are written past the caches one after the other, at most kMost at a time, though these are no whole
// lines: the end waits for the rest of its line. No std::optional of it, which g++ fills with zeros.
template <class T, int64_t kMost>
class Lines {
 public:
  void begin(T* first) {
    line_ = first - offset(first);
    foreign_ = waiting_ = offset(first);
  }
  explicit operator bool() const { return line_ != nullptr; }  // whether they were begun

  // Where the next results are to be put, then how many were; at the end `close`. No destructor does that: it would
  // need the runtime of exceptions.
  T* next() { return buffer_ + waiting_; }
  void put(int64_t count) {
    waiting_ += count;
    T* line = buffer_;
    for (; waiting_ >= kLine; waiting_ -= kLine, line += kLine, line_ += kLine) {
      if (foreign_ > 0) {
        store_own(kLine);
        continue;
      }
      for (int64_t i = 0; i < kLine; i += kStore) stream_raw(line_ + i, load_raw(line + i));
    }
    if (line != buffer_) std::memcpy(buffer_, line, kLineBytes);
  }
  void close() { store_own(waiting_); }

 private:
  using Raw = RawVec<uint32_t>;
  static constexpr int64_t kLine = kLineBytes / sizeof(T), kStore = sizeof(Raw) / sizeof(T);

  static int64_t offset(const T* p) { return reinterpret_cast<uintptr_t>(p) % kLineBytes / sizeof(T); }
  static Raw load_raw(const T* p) {
    Raw raw;
    std::memcpy(&raw, p, sizeof raw);
    return raw;
  }
  // Up to `end` of the first line in the buffer, of which the part before is others'.
  void store_own(int64_t end) {
    if (end > foreign_) std::memcpy(line_ + foreign_, buffer_ + foreign_, (end - foreign_) * sizeof(T));
    foreign_ = 0;
  }

  T* line_ = nullptr;                  // where the buffer goes
  int64_t foreign_ = 0, waiting_ = 0;  // elements of the buffer: others', and those before the next
  alignas(kLineBytes) T buffer_[kMost + 2 * kLine];
};

// With AVX2 images of few columns are walked down, a vector of columns at a time (walk_strip). These bounds and those
// of keeps_columns_well are where that was measured faster (benchmarks/LOG.md, 2026-11-26, 27 and 30).
constexpr bool kHasStrips = kVecBytes == 32;
template <class T>
bool walks_strips(int64_t w) {
  return kHasStrips && w <= (sizeof(T) == 4 ? 28 : std::is_same_v<T, BFloat16> ? 64 : 32);
}

// Whether images of 5x5 kernels are, forward and for dx, while they are transposed for dw.
inline bool walks_strips_of_5x5(const DepthwiseSizes& s) {
  return kHasStrips && (s.dtype == DType::kFloat32 || s.dtype == DType::kBFloat16) && is_usual(s) &&
         s.layout == Layout::kContiguous && s.kh == 5 && s.sh == 1 && s.left == 2 && s.wo == s.w && s.w >= 7 &&
         s.w <= 32;
}

// Whether keeps_columns is made use of, also for dw.
template <class T>
bool keeps_columns_well(const DepthwiseSizes& s) {
  if (!keeps_columns(s)) return false;
  if (s.sh == 1 && walks_strips<T>(s.w)) return s.wo >= (sizeof(T) == 4 ? 5 : 7);
  if constexpr (sizeof(T) == 4) return s.wo >= (s.sh == 2 ? 7 : 9);
  // Loads of a part of a vector of 16-bit elements are slow without masks.
  if (kVecBytes < 64 && (s.kw == 5 || s.w % (Vec<float>::kLanes * s.sw) != 0)) return false;
  return s.wo >= (s.sh == 1 ? 12 : s.kw == 3 ? 7 : 10);
}

// Whether images have so few pixels that their products are listed (cpu/depthwise_tiny.h). With AVX2 that is also
// faster than the direct kernels, which take rows of four columns and more; with AVX-512 that was not measured
// (benchmarks/LOG.md, 2026-12-01).
constexpr int64_t kTinyPixels = 16, kLeastWide = 4, kMostTinyChannels = 1 << 26;  // distances in them are of 32 bits
inline bool is_tiny(const DepthwiseSizes& s) {
  if (s.m != 1 || std::max(s.h * s.w, s.ho * s.wo) > kTinyPixels || s.c > kMostTinyChannels) return false;
  return !is_usual(s) || std::min(s.w, s.wo) < kLeastWide || kVecBytes == 32;
}

// A block of channels of one image: lane l is channel first + l * step of [channels, h, w] or [h, w, channels].
template <class T>
struct Block {
  T* image;
  Layout layout;
  int64_t h, w, channels;
  int64_t first, step, lanes;
};

template <class V, class T>
Block<T> block_of(const DepthwiseSizes& s, T* image, int64_t h, int64_t w, int64_t multiplier, int64_t block) {
  const int64_t first = block * V::kLanes, lanes = std::min<int64_t>(V::kLanes, s.c - first);
  return {image, s.layout, h, w, s.c * multiplier, first * multiplier, multiplier, lanes};
}

// The blocks of a chunk of channels, of `blocks` in all: f(block).
inline int64_t first_block(const DepthwiseSizes& s, int64_t blocks, int64_t chunk) {
  return blocks * chunk / chunks(s);
}
template <class F>
void each_block(const DepthwiseSizes& s, int64_t blocks, int64_t chunk, F&& f) {
  const int64_t last = first_block(s, blocks, chunk + 1);
  for (int64_t block = first_block(s, blocks, chunk); block < last; ++block) f(block);
}

// out[col][lane] = row `row`, columns [begin, end) of the block, which lie inside the image.
template <class V, class T>
void read_row(const Block<const T>& block, int64_t row, int64_t begin, int64_t end, typename V::Lane* out) {
  constexpr int64_t L = V::kLanes;
  if (block.layout == Layout::kContiguous) {
    const int64_t hw = block.h * block.w;
    const T* p = block.image + block.first * hw + row * block.w;
    for (int64_t col = begin; col < end; col += L) {
      V rows[L];
      const int64_t cols = std::min(L, end - col);
      visit_lanes<V>(cols, [&](auto lanes) {
        for (int64_t l = 0; l < L; ++l) {
          rows[l] = l < block.lanes ? load<V>(p + l * block.step * hw + col, lanes) : V(0);
        }
      });
      transpose(rows);
      for (int64_t i = 0; i < cols; ++i) store(out + (col - begin + i) * L, rows[i]);
    }
  } else if (block.step == 1) {
    const T* p = block.image + (row * block.w + begin) * block.channels + block.first;
    visit_lanes<V>(block.lanes, [&](auto lanes) {
      for (int64_t i = 0; i < end - begin; ++i) store(out + i * L, load<V>(p + i * block.channels, lanes));
    });
  } else {
    const T* p = block.image + (row * block.w + begin) * block.channels + block.first;
    for (int64_t i = 0; i < end - begin; ++i, p += block.channels) {
      T gathered[L] = {};
      for (int64_t l = 0; l < block.lanes; ++l) gathered[l] = p[l * block.step];
      store(out + i * L, load<V>(gathered));
    }
  }
}

// Row `row`, columns [begin, begin + cols) of the block = in[col][lane].
template <class V, class T>
void write_row(const Block<T>& block, int64_t row, int64_t begin, int64_t cols, const typename V::Lane* in) {
  constexpr int64_t L = V::kLanes;
  if (block.layout == Layout::kContiguous) {
    const int64_t hw = block.h * block.w;
    T* p = block.image + block.first * hw + row * block.w + begin;
    for (int64_t col = 0; col < cols; col += L) {
      V rows[L];
      const int64_t count = std::min(L, cols - col);
      for (int64_t i = 0; i < L; ++i) rows[i] = i < count ? load<V>(in + (col + i) * L) : V(0);
      transpose(rows);
      visit_lanes<V>(count, [&](auto lanes) {
        for (int64_t l = 0; l < block.lanes; ++l) store(p + l * block.step * hw + col, rows[l], lanes);
      });
    }
  } else if (block.step == 1) {
    T* p = block.image + (row * block.w + begin) * block.channels + block.first;
    visit_lanes<V>(block.lanes, [&](auto lanes) {
      for (int64_t i = 0; i < cols; ++i) store(p + i * block.channels, load<V>(in + i * L), lanes);
    });
  } else {
    T* p = block.image + (row * block.w + begin) * block.channels + block.first;
    for (int64_t i = 0; i < cols; ++i, p += block.channels) {
      T spread[L];
      store(spread, load<V>(in + i * L));
      for (int64_t l = 0; l < block.lanes; ++l) p[l * block.step] = spread[l];
    }
  }
}

// How many rows of output to make at a time, so that the rows they read, `span` for the first and `stride` more for
// each further one, fit.
inline int64_t row_steps(int64_t wanted, int64_t span, int64_t stride, int64_t row_bytes) {
  const int64_t fitting = (kRowBytes / std::max<int64_t>(1, row_bytes) - span) / stride + 1;
  return std::clamp<int64_t>(std::min(wanted, fitting), 1, kMostSteps);
}

// How many rows of the kernel the weight gradient takes at a time: as many accumulators as the registers hold beside a
// few vectors of x and dy.
#if defined(__AVX512F__)
constexpr int kSums = 28;
#else
constexpr int kSums = 12;
#endif

constexpr int tap_rows(int taps) {
  return taps == 7 && kSums >= 28 ? 4 : std::clamp(kSums / taps, 1, taps < 3 ? 8 : taps);
}

// Apart, so that it takes no registers from where there is no activation.
template <class V>
[[gnu::noinline]] V activated(Activation act, V x) {
  visit<Activation::kRelu, Activation::kSilu, Activation::kGelu, Activation::kHardSwish, Activation::kRelu6>(
      act, [&]<Activation A>() { x = Act<A>::value(x); });
  return x;
}

// Rows [begin, end).
struct Span {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// Hands out parts of a thread's working memory, each aligned to a cache line.
class Arena {
 public:
  explicit Arena(void* memory) : next_(static_cast<char*>(memory)) {}
  template <class T>
  T* take(int64_t count) {
    T* part = reinterpret_cast<T*>(next_);
    next_ += ceil_div(count * int64_t(sizeof(T)), 64) * 64;
    return part;
  }

 private:
  char* next_;
};

// The rows of a block that a kernel slides over, each unpacked once. Rows above and below the image are zero.
template <class V, class T>
class RowRing {
 public:
  using Lane = typename V::Lane;

  // Columns [col, col + cols) of `block`, and room for `slack` more that are never used; `capacity` rows at once.
  RowRing(Arena& arena, const Block<const T>& block, int64_t col, int64_t cols, int64_t slack, int64_t capacity)
      : block_(block),
        left_(std::clamp<int64_t>(-col, 0, cols)),
        begin_(col + left_),
        end_(std::clamp<int64_t>(block.w, begin_, std::max(begin_, col + cols))),
        pitch_((cols + slack) * V::kLanes),
        capacity_(capacity),
        zeros_(arena.take<Lane>(pitch_)),
        data_(arena.take<Lane>(capacity * pitch_)),
        rows_(arena.take<const Lane*>(capacity)) {
    std::fill_n(zeros_, pitch_, Lane(0));
    const int64_t right = left_ + (end_ - begin_);
    for (int64_t i = 0; i < capacity; ++i) {
      std::fill_n(data_ + i * pitch_, left_ * V::kLanes, Lane(0));
      std::fill_n(data_ + i * pitch_ + right * V::kLanes, (cols - right) * V::kLanes, Lane(0));
    }
  }

  // Makes rows() first, ..., first + count - 1, as [column][lane] each. `first` must not decrease.
  void advance(int64_t first, int64_t count) {
    if (packed_ < first) packed_ = first;
    slot_ = (slot_ + (started_ ? first - first_ : 0)) % capacity_;
    first_ = first;
    started_ = true;
    int64_t slot = slot_;
    for (int64_t i = 0; i < count; ++i, slot = slot + 1 == capacity_ ? 0 : slot + 1) {
      const int64_t row = first + i;
      const bool inside = row >= 0 && row < block_.h;
      Lane* data = data_ + slot * pitch_;
      rows_[i] = inside ? data : zeros_;
      if (row < packed_) continue;
      packed_ = row + 1;
      if (inside && begin_ < end_) read_row<V>(block_, row, begin_, end_, data + left_ * V::kLanes);
    }
  }

  // The rows of the last advance.
  const Lane* const* rows() const { return rows_; }
  const Lane* zeros() const { return zeros_; }

 private:
  Block<const T> block_;
  int64_t left_, begin_, end_, pitch_, capacity_;
  Lane* zeros_;
  Lane* data_;
  const Lane** rows_;
  int64_t packed_ = INT64_MIN, first_ = 0, slot_ = 0;
  bool started_ = false;
};

}  // namespace

// A block of channels of a band of rows of one image.
struct DepthwiseUnit {
  int64_t image, band, block;
};

// Writes dx of a unit; the rows of x are shared out over as many bands as those of y.
template <Isa I>
void depthwise_dx(const DepthwiseConv2dBackward& a, const void* taps, void* scratch, DepthwiseUnit unit);

// The kernels of the usual square kernels, which need no blocks of lanes. Blocks are the groups of channels of
// cpu/depthwise_direct.h, or the planes of cpu/depthwise_planes.h.
struct DepthwiseDirect {
  int64_t blocks;  // 0: not for these sizes
  int64_t size;    // of a block of partial sums [kh * kw + 1][vector][lane]
  bool planes;     // whether each block is a plane
};
template <Isa I>
DepthwiseDirect depthwise_direct(const DepthwiseSizes& s);
template <Isa I>
void depthwise_direct_taps(const DepthwiseSizes& s, const void* weight, void* taps, int64_t begin, int64_t end);
// Blocks [begin, end) of one of the bands of an image.
struct DepthwisePart {
  int64_t image, band, bands, begin, end;
};
namespace {
// Of `count` rows, those in the band.
inline Span band_rows(const DepthwisePart& part, int64_t count) {
  return {count * part.band / part.bands, count * (part.band + 1) / part.bands};
}
}  // namespace
template <Isa I>
void depthwise_direct_forward(const DepthwiseConv2d& a, const void* taps, void* scratch, DepthwisePart part);
// Writes dx and adds to the partial sums of all blocks, or begins them; each where wanted.
template <Isa I>
void depthwise_direct_backward(const DepthwiseConv2dBackward& a, const void* taps, void* scratch, DepthwisePart part,
                               void* partial, bool begins);
template <Isa I>
void depthwise_direct_dx(const DepthwiseConv2dBackward& a, const void* taps, void* scratch, DepthwisePart part);
template <Isa I>
void depthwise_direct_dw(const DepthwiseConv2dBackward& a, DepthwisePart part, void* partial, bool begins);
template <Isa I>
void depthwise_direct_finish(const DepthwiseConv2dBackward& a, int64_t begin, int64_t end);

// The same on copies of a few channels: of contiguous images, which are transposed on the way, or where pixels collide.
template <Isa I>
void depthwise_copied_forward(const DepthwiseConv2d& a, const void* taps, void* scratch, DepthwisePart part);
template <Isa I>
void depthwise_copied_backward(const DepthwiseConv2dBackward& a, const void* taps, void* scratch, DepthwisePart part,
                               void* partial, bool begins);

// The same for contiguous images, each block a plane.
template <Isa I>
DepthwiseDirect depthwise_planes(const DepthwiseSizes& s);
template <Isa I>
void depthwise_planes_taps(const DepthwiseSizes& s, const void* weight, void* taps, int64_t begin, int64_t end);
template <Isa I>
void depthwise_planes_forward(const DepthwiseConv2d& a, const void* taps, void* scratch, DepthwisePart part);
template <Isa I>
void depthwise_planes_dx(const DepthwiseConv2dBackward& a, const void* taps, void* scratch, DepthwisePart part);
template <Isa I>
void depthwise_planes_dw(const DepthwiseConv2dBackward& a, void* scratch, DepthwisePart part, void* partial,
                         bool begins);
template <Isa I>
void depthwise_planes_finish(const DepthwiseConv2dBackward& a, int64_t begin, int64_t end);

}  // namespace fusedtrain::cpu

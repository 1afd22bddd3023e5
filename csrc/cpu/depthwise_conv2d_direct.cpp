// depthwise_conv2d on the CPU, channels_last images and square kernels of 3, 5 or 7: y and dx without unpacked rows.
//   y[oy, ox]  = act(bias + sum_{ky, kx} weight[ky, kx] * x[oy * s + ky - top, ox * s + kx - left])
//   dx[iy, ix] = sum_{ky, kx: oy * s + ky - top = iy, ...} weight[ky, kx] * dy[oy, ox]
// A tile of neighbouring pixels of a row stays in registers; of every input row it reads each input vector once and the
// weights of one kernel row once. Columns outside the image are skipped.
// dx at stride 1 is the forward pass with mirrored weights. At stride 2 each dy is spread over its k outputs of the
// row.
// Rows of bfloat16 are multiplied in pairs where an instruction does that.
#include <bit>

#include "cpu/depthwise_direct.h"

namespace fusedtrain::cpu {
namespace {

// out[t] = sum over taps of tap * in: which tap links output t and input column j of a tile.
// A tile moves by kInStep input columns where it moves by kOutStep outputs. Forward: in[t * kStride + tap].
template <int kTaps, int kStride>
struct Gathered {
  static constexpr int kSize = kTaps, kOutStep = 1, kInStep = kStride;
  static constexpr int kAhead = kTaps - kStride;  // columns that the tile before has read too
  static constexpr int columns(int wide) { return (wide - 1) * kStride + kTaps; }
  static constexpr int tap(int t, int j) { return j - t * kStride; }
  // Whether all vectors of a group are taken by one load: their weights and sums fit the registers, and few columns are
  // read for each output.
  static constexpr bool kAtOnce = kTaps * kStride <= 6;
};
// Stride 2, backward: out[2 * j + tap], where column 0 is the first that reaches the tile.
template <int kTaps>
struct Spread {
  static constexpr int kSize = kTaps, kOutStep = 2, kInStep = 1;
  static constexpr int kAhead = (kTaps - 1) / 2;
  static constexpr int columns(int wide) { return (wide - 1) / 2 + (kTaps - 1) / 2 + 1; }
  static constexpr int tap(int t, int j) { return t - 2 * (j - (kTaps - 1) / 2); }
  static constexpr bool kAtOnce = kTaps <= 3;
};

// The input rows of one row of output, or pairs of them.
template <class T>
struct Rows {
  const T* in;  // column 0 of the first row
  int64_t in_step;
  const Acc<T>* taps;  // [column of the kernel][vector][lane] for the first row or pair
  int64_t tap_step;
  int64_t count;
  int64_t from = 0, to = 0;  // of pairs: the rows inside the image, counted from the first
};

template <class T>
struct Tile {
  Rows<T> rows;
  const T* ahead;         // column 0 of the first row that the next row of output is the first to read
  int64_t column, width;  // the first input column, may be outside of [0, width)
  int64_t pitch;          // channels per pixel of the input
  const T* bias;          // [channels] or null
  const Acc<T>* init;     // [vector][lane] or null
  Activation act;
  bool streams;        // out is written past the caches
  T* out;              // of output 0
  int64_t out_pitch;   // to the next output
  int64_t out_step;    // to the next row of output, which is asked for; or 0
  int64_t begin, end;  // the outputs to be stored
  float* moments;      // [Moments::kSums][lane] of the group, or null
  bool opens;          // the moments begin here
};

// Sums about a shift near the mean, of the outputs of a band: those of a row are added up first.
// [group][kSums][lane]: shift, sum and squares of the row, sum and squares of the band.
class Moments {
 public:
  using V = Vec<float>;
  static constexpr int64_t kSums = 5;

  // Adds the outputs of a tile. The shift is the mean of the first.
  template <int kWide, int kVecs>
  [[gnu::always_inline]] static void add(float* of, bool opens, const V (&out)[kWide][kVecs]) {
    const auto each = [&](auto f) __attribute__((always_inline)) { return sum_in_pairs<kWide>(f); };
    V shift(0), sum(0), squares(0);
    if (opens) {
      shift = each([&](auto t) __attribute__((always_inline)) { return out[t][0]; }) * V(1.f / kWide);
      store(of, shift);
    } else {
      shift = load<V>(of);
      sum = load<V>(of + V::kLanes);
      squares = load<V>(of + 2 * V::kLanes);
    }
    const auto distance = [&](auto t) __attribute__((always_inline)) { return out[t][0] - shift; };
    const auto square = [&](auto t) __attribute__((always_inline)) { return distance(t) * distance(t); };
    store(of + V::kLanes, sum + each(distance));
    store(of + 2 * V::kLanes, squares + each(square));
  }
  float* data() { return sums_; }
  // Adds a row to the band.
  void end_row(int64_t groups, bool first) {
    for (float* row = sums_ + V::kLanes; row < sums_ + groups * kSums * V::kLanes; row += kSums * V::kLanes) {
      for (int k = 0; k < 2; ++k) {
        float *from = row + k * V::kLanes, *to = from + 2 * V::kLanes;
        store(to, first ? load<V>(from) : load<V>(to) + load<V>(from));
        store(from, V(0));
      }
    }
  }
  // Writes shift, sum and squares of a group to rows c apart.
  void put(int64_t group, float* to, int64_t c) const {
    const float* from = sums_ + group * kSums * V::kLanes;
    for (int64_t k : {0, 3, 4}) {
      store(to, load<V>(from + k * V::kLanes));
      to += c;
    }
  }

 private:
  alignas(64) float sums_[kSums * (kMostUnitChannels + kMostLanes)];
};

// kWide outputs of a row, from kDeep input rows at a time.
template <class T, class Form, int kDeep, int kWide, bool kInside>
void run_tile(const Tile<T>& tile) {
  using G = Group<T>;
  using V = typename G::V;
  using In = std::conditional_t<kDeep == 1, V, Pairs>;
  constexpr int kColumns = Form::columns(kWide);
  V acc[kWide][G::kVecs];
#pragma GCC unroll 32
  for (int v = 0; v < G::kVecs; ++v) {
    const V init = tile.init ? load<V>(tile.init + v * V::kLanes) : V(0);
#pragma GCC unroll 32
    for (int t = 0; t < kWide; ++t) acc[t][v] = init;
  }
  // What the next row of output will be the first to read is on its way meanwhile: hardware does not see rows coming.
  const T* ahead = tile.ahead + tile.column * tile.pitch;
  for (int64_t i = 0; i < Form::kInStep; ++i, ahead += tile.width * tile.pitch) {
#pragma GCC unroll 32
    for (int j = 0; j < kWide / Form::kOutStep * Form::kInStep; ++j) {
      __builtin_prefetch(ahead + (j + Form::kAhead) * tile.pitch, 0, 2);
    }
  }
  if (tile.out_step != 0) {
#pragma GCC unroll 32
    for (int t = 0; t < kWide; ++t) fetch_for_store(tile.out + tile.out_step + t * tile.out_pitch);
  }
  for (int64_t i = 0; i < tile.rows.count; ++i) {
    const T* first = tile.rows.in + i * tile.rows.in_step + tile.column * tile.pitch;
    const auto* taps = tile.rows.taps + i * tile.rows.tap_step;
    const auto tap_at = [&](int k, int v) __attribute__((always_inline)) {
      return std::bit_cast<In>(load<V>(taps + (k * G::kVecs + v) * V::kLanes));
    };
    const auto in_image = [&](int row) __attribute__((always_inline)) {
      return kDeep == 1 || (i * kDeep + row >= tile.rows.from && i * kDeep + row < tile.rows.to);
    };
    const Column<T, kDeep> columns(first, tile.rows.in_step / kDeep, tile.pitch, in_image);
    if constexpr (Form::kAtOnce) {
      In tap[Form::kSize][G::kVecs];
#pragma GCC unroll 32
      for (int k = 0; k < Form::kSize; ++k) {
#pragma GCC unroll 32
        for (int v = 0; v < G::kVecs; ++v) tap[k][v] = tap_at(k, v);
      }
      auto column = columns;
#pragma GCC unroll 32
      for (int j = 0; j < kColumns; ++j, column.next()) {
        if (!kInside && uint64_t(tile.column + j) >= uint64_t(tile.width)) continue;
        In x[G::kVecs];
        column.get_all(x);
#pragma GCC unroll 32
        for (int t = 0; t < kWide; ++t) {
          const int k = Form::tap(t, j);
          if (k < 0 || k >= Form::kSize) continue;
#pragma GCC unroll 32
          for (int v = 0; v < G::kVecs; ++v) acc[t][v] = multiply_add(acc[t][v], tap[k][v], x[v]);
        }
      }
      continue;
    }
    unroll<G::kVecs>([&](auto v) __attribute__((always_inline)) {
      In tap[Form::kSize];
#pragma GCC unroll 32
      for (int k = 0; k < Form::kSize; ++k) tap[k] = tap_at(k, v);
      auto column = columns;
#pragma GCC unroll 32
      for (int j = 0; j < kColumns; ++j, column.next()) {
        if (!kInside && uint64_t(tile.column + j) >= uint64_t(tile.width)) continue;
        const In x = column.template get<v>();
#pragma GCC unroll 32
        for (int t = 0; t < kWide; ++t) {
          const int k = Form::tap(t, j);
          if (k >= 0 && k < Form::kSize) acc[t][v] = multiply_add(acc[t][v], tap[k], x);
        }
      }
    });
  }
  if (tile.act != Activation::kIdentity) {
#pragma GCC unroll 32
    for (int t = 0; t < kWide; ++t) {
#pragma GCC unroll 32
      for (int v = 0; v < G::kVecs; ++v) acc[t][v] = activated(tile.act, acc[t][v]);
    }
  }
  if constexpr (std::is_same_v<T, float>) {
    if (tile.moments != nullptr) Moments::add(tile.moments, tile.opens, acc);
  }
  T* out = tile.out;
#pragma GCC unroll 32
  for (int t = 0; t < kWide; ++t) {
    if (!kInside && (t < tile.begin || t >= tile.end)) continue;
    tile.streams ? G::stream(out + t * tile.out_pitch, acc[t]) : G::put(out + t * tile.out_pitch, acc[t]);
  }
}

// Results of whole pixels, of which a tile is no whole lines.
template <class T>
using PixelLines = Lines<T, kMostWide * kMostWholeChannels>;

// A range of groups of channels, of one row of outputs.
template <class T>
struct Row {
  const DepthwiseSizes& s;
  int64_t begin, end;    // groups
  Tile<T> tile;          // of channel 0 and group 0
  int64_t tap_group;     // distance of the weights of neighbouring groups
  PixelLines<T>& lines;  // that the outputs go through if they were begun
};

// Whether results of large images are written past the caches. Halves of lines gain where there is little arithmetic.
template <class T, int kTaps>
[[maybe_unused]] constexpr bool kStreams = kGroupsOfLine<T> == 1 || (kGroupsOfLine<T> == 2 && kTaps == 3);

// Results of a tile, of groups of channels that are parts of cache lines: they go past the caches once a line is whole.
template <class T>
class TileLines {
 public:
  static constexpr int kGroups = kGroupsOfLine<T>;
  static constexpr int64_t kPitch = kLineBytes / sizeof(T);

  // Where a group's results are to be put.
  T* of(int64_t group) { return data_ + group % kGroups * Group<T>::kChannels; }
  // Outputs [first, last), `pitch` apart.
  void stream(T* out, int64_t pitch, int64_t first, int64_t last) const {
    using Raw = RawVec<uint16_t, Group<T>::kChannels * sizeof(T)>;  // as it was stored
    for (int64_t t = first; t < last; ++t) {
      unroll<kGroups>([&](auto i) __attribute__((always_inline)) {
        Raw raw;
        std::memcpy(&raw, data_ + t * kPitch + i * Group<T>::kChannels, sizeof raw);
        stream_raw(out + t * pitch + i * Group<T>::kChannels, raw);
      });
    }
  }

 private:
  alignas(kLineBytes) T data_[kMostWide * kPitch];
};

// Tiles of nearly equal width from left to right, all groups of each, so that memory is read and written in long runs.
// Tiles begin at multiples of kOutStep outputs, `skip` of which are before the row. `column` is that of the first tile.
template <class T, class Form, int kDeep>
void run_row(const Row<T>& row, int64_t count, int64_t skip, int64_t column) {
  constexpr int kIn = Form::kInStep, kOut = Form::kOutStep, kGroups = TileLines<T>::kGroups;
  const int64_t units = ceil_div(count + skip, kOut), tiles = ceil_div(units, kMostWide / kOut);
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t from = units * i / tiles * kOut, wide = units * (i + 1) / tiles * kOut - from;
    visit<4, 5, 6, 7, 8>(wide, [&]<int kWide>() {
      if constexpr (kWide % kOut == 0) {
        Tile<T> tile = row.tile;
        tile.column = column + from / kOut * kIn;
        tile.begin = skip - from;
        tile.end = count + skip - from;
        const bool inside = tile.column >= 0 && tile.column + Form::columns(kWide) <= tile.width && tile.begin <= 0 &&
                            tile.end >= kWide;
        const int64_t first = std::max<int64_t>(tile.begin, 0), last = std::min<int64_t>(tile.end, kWide);
        T* out = row.tile.out + (from - skip) * tile.out_pitch;
        if (row.lines) out = row.lines.next() - first * tile.out_pitch;
        [[maybe_unused]] TileLines<T> tile_lines;
        for (int64_t group = row.begin; group < row.end; ++group) {
          const int64_t channel = first_channel<T>(row.s, group);
          const int64_t line = group / kGroups * kGroups;  // the first of its groups
          const bool waits = kGroups > 1 && row.tile.streams && line >= row.begin && line + kGroups <= row.end;
          tile.rows.in = row.tile.rows.in + channel;
          tile.ahead = row.tile.ahead + channel;
          tile.rows.taps = row.tile.rows.taps + group * row.tap_group;
          tile.out = waits ? tile_lines.of(group) : out + channel;
          tile.out_pitch = waits ? tile_lines.kPitch : row.tile.out_pitch;
          tile.streams = row.tile.streams && kGroups == 1;
          tile.opens = row.tile.opens && i == 0;
          if (row.tile.moments != nullptr) {
            tile.moments = row.tile.moments + (group - row.begin) * Moments::kSums * Moments::V::kLanes;
          }
          Acc<T> init[Group<T>::kChannels];
          if (row.tile.bias) load_group(row.tile.bias + channel, init);
          tile.init = row.tile.bias ? init : nullptr;
          inside ? run_tile<T, Form, kDeep, kWide, true>(tile) : run_tile<T, Form, kDeep, kWide, false>(tile);
          if (waits && group + 1 == line + kGroups) {
            tile_lines.stream(out + line * Group<T>::kChannels, row.tile.out_pitch, first, last);
          }
        }
        if (row.lines) row.lines.put((last - first) * row.tile.out_pitch);
      }
    });
  }
}

template <class T>
bool goes_through_lines(const DepthwiseSizes& s, int64_t pixels) {
  return stores_past_caches && !s.whole_pixels && has_whole_pixels(s) &&
         s.n * s.c * pixels * int64_t(sizeof(T)) >= kStreamBytes;
}

// The weights of the groups of a part as Rows::taps. In pairs, two rows of the kernel share one: the first is the lower
// half of each lane, the second, or 0 beyond the last, the upper one.
template <class T>
struct Weights {
  const Acc<T>* taps;  // of group 0
  bool pairs;
};

// With a stride pairs were measured slower (benchmarks/LOG.md, 2026-11-25).
template <class T, int kStride>
[[maybe_unused]] constexpr bool kPairsRows = Group<T>::kPairs && kStride == 1;

// Those of the forward pass, or mirrored, for dx. What is not in `taps` is put into scratch.
template <class T, int kTaps, int kStride>
Weights<T> arrange(const void* taps, bool mirrored, DepthwisePart part, void* scratch) {
  constexpr int64_t kTap = Group<T>::kChannels, kCount = kTaps * kTaps, kSize = kCount * kTap;
  const bool pairs = kPairsRows<T, kStride> && rounds_to_bf16_by_instruction;
  const auto* all = static_cast<const Acc<T>*>(taps);
  if (!pairs && !mirrored) return {all, false};
  auto* arranged = static_cast<Acc<T>*>(scratch) - part.begin * kSize;
  for (int64_t group = part.begin; group < part.end; ++group) {
    const Acc<T>* from = all + group * kSize;
    const auto of = [&](int64_t tap) { return from + (mirrored ? kCount - 1 - tap : tap) * kTap; };
    Acc<T>* to = arranged + group * kSize;
    for (int64_t tap = 0; tap < kCount; ++tap) {
      if (!pairs) {
        std::copy_n(of(tap), kTap, to + tap * kTap);
      } else if constexpr (kPairsRows<T, kStride>) {
        const int64_t row = tap / kTaps, below = tap + kTaps;
        if (row % 2 != 0) continue;
        pair(of(tap), below < kCount ? of(below) : nullptr, to + (tap - row / 2 * kTaps) * kTap);
      }
    }
  }
  return {arranged, pairs};
}

// A row of y, or of dx at stride 1, from the kTaps rows of `in` whose first is `top`.
template <class T, int kTaps, int kStride>
void gather_row(Row<T>& row, const Weights<T>& weights, const T* in, int64_t h, int64_t top, int64_t count,
                int64_t column) {
  constexpr int64_t kTapRow = kTaps * Group<T>::kChannels;
  const int64_t step = row.tile.width * row.tile.pitch;
  const int64_t from = std::clamp<int64_t>(-top, 0, kTaps), to = std::clamp<int64_t>(h - top, from, kTaps);
  if constexpr (kPairsRows<T, kStride>) {
    if (weights.pairs) {
      const int64_t first = from / 2 * 2;
      row.tile.rows = {.in = in + (top + first) * step,
                       .in_step = 2 * step,
                       .taps = weights.taps + first / 2 * kTapRow,
                       .tap_step = kTapRow,
                       .count = ceil_div(to - first, 2),
                       .from = from - first,
                       .to = to - first};
      return run_row<T, Gathered<kTaps, kStride>, 2>(row, count, 0, column);
    }
  }
  row.tile.rows = {.in = in + (top + from) * step,
                   .in_step = step,
                   .taps = weights.taps + from * kTapRow,
                   .tap_step = kTapRow,
                   .count = to - from};
  run_row<T, Gathered<kTaps, kStride>, 1>(row, count, 0, column);
}

}  // namespace

template <>
DepthwiseDirect depthwise_direct<Isa::FUSEDTRAIN_ISA>(const DepthwiseSizes& s) {
  DepthwiseDirect direct{0, 0, false};
  const bool contiguous = s.layout == Layout::kContiguous;
  if (is_tiny(s)) return direct;
  const bool usual = is_usual(s) && std::min(s.w, s.wo) >= kLeastWide;
  visit_direct_dtype(s.dtype, [&]<class T>() {
    if (!usual || (contiguous ? keeps_columns_well<T>(s) || !is_worth_transposing<T>(s) : s.c < Group<T>::kChannels))
      return;
    visit_kernel(s, [&]<int kTaps, int kStride>() {
      direct = {ceil_div(s.c, Group<T>::kChannels), (kTaps * kTaps + 1) * Group<T>::kChannels, false};
    });
  });
  return contiguous && direct.blocks == 0 ? depthwise_planes<Isa::FUSEDTRAIN_ISA>(s) : direct;
}

namespace {

// Whether channels_last images are copied, a few channels at a time.
inline bool works_on_copies(const DepthwiseSizes& s) { return kVecBytes == 32 && pixels_collide(s); }

// How the kernels of planes take a part: its blocks as planes, or none where they do not.
DepthwisePart planes_of(const DepthwiseSizes& s, DepthwisePart part) {
  if (depthwise_direct<Isa::FUSEDTRAIN_ISA>(s).planes) return part;
  constexpr int64_t kChannels = Group<float>::kChannels;
  static_assert(kVecBytes != 32 || kChannels == Group<BFloat16>::kChannels);
  part.begin *= kChannels;
  part.end = walks_strips_of_5x5(s) ? std::min(part.end * kChannels, s.c) : part.begin;
  return part;
}

}  // namespace

template <>
void depthwise_direct_taps<Isa::FUSEDTRAIN_ISA>(const DepthwiseSizes& s, const void* weight, void* taps, int64_t begin,
                                                int64_t end) {
  const DepthwisePart planes = planes_of(s, {0, 0, 1, begin, end});
  if (planes.begin < planes.end) {
    return depthwise_planes_taps<Isa::FUSEDTRAIN_ISA>(s, weight, taps, planes.begin, planes.end);
  }
  visit_direct_dtype(s.dtype, [&]<class T>() {
    using G = Group<T>;
    const int64_t k = s.kh * s.kw;
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = first_channel<T>(s, block);
      auto* out = static_cast<Acc<T>*>(taps) + block * k * G::kChannels;
      for (int64_t tap = 0; tap < k; ++tap, out += G::kChannels) {
        T channels[G::kChannels];
        for (int i = 0; i < G::kChannels; ++i)
          channels[i] = static_cast<const T*>(weight)[std::min(first + i, s.c - 1) * k + tap];
        load_group(channels, out);
      }
    }
  });
}

template <>
void depthwise_direct_forward<Isa::FUSEDTRAIN_ISA>(const DepthwiseConv2d& a, const void* taps, void* scratch,
                                                   DepthwisePart part) {
  const DepthwiseSizes& s = a.sizes;
  if (s.layout == Layout::kContiguous) {
    const DepthwisePart planes = planes_of(s, part);
    return planes.begin < planes.end ? depthwise_planes_forward<Isa::FUSEDTRAIN_ISA>(a, taps, scratch, planes)
                                     : depthwise_copied_forward<Isa::FUSEDTRAIN_ISA>(a, taps, scratch, part);
  }
  if (works_on_copies(s)) return depthwise_copied_forward<Isa::FUSEDTRAIN_ISA>(a, taps, scratch, part);
  visit_direct_dtype(s.dtype, [&]<class T>() {
    visit_kernel(s, [&]<int kTaps, int kStride>() {
      constexpr int64_t kTapRow = kTaps * Group<T>::kChannels;
      const T* x = static_cast<const T*>(a.x) + part.image * s.h * s.w * s.c;
      T* y = static_cast<T*>(a.y) + part.image * s.ho * s.wo * s.c;
      PixelLines<T> lines;
      Row<T> row{s, part.begin, part.end, {}, kTaps * kTapRow, lines};
      Tile<T>& tile = row.tile;
      tile.width = s.w;
      tile.pitch = tile.out_pitch = s.c;
      tile.bias = static_cast<const T*>(a.bias);
      tile.act = a.act;
      tile.streams = kStreams<T, kTaps> && streams(s, y, s.ho * s.wo, s.c);
      Moments moments;
      tile.moments = a.moments == nullptr ? nullptr : moments.data();
      const Span rows = band_rows(part, s.ho);
      const int64_t groups = part.end - part.begin;
      if (goes_through_lines<T>(s, s.ho * s.wo)) lines.begin(y + rows.begin * s.wo * s.c);
      const Weights<T> weights = arrange<T, kTaps, kStride>(taps, false, part, scratch);
      for (int64_t oy = rows.begin; oy < rows.end; ++oy) {
        const int64_t top = oy * kStride - s.top;
        tile.ahead = x + (top + kTaps) * s.w * s.c;
        tile.out = y + oy * s.wo * s.c;
        tile.out_step = lines || tile.streams ? 0 : s.wo * s.c;
        tile.opens = oy == rows.begin;
        gather_row<T, kTaps, kStride>(row, weights, x, s.h, top, s.wo, -s.left);
        if (tile.moments != nullptr) moments.end_row(groups, tile.opens);
      }
      for (int64_t group = 0; a.moments != nullptr && group < groups; ++group) {
        float* to = a.moments + (part.image * part.bands + part.band) * 3 * s.c;
        moments.put(group, to + first_channel<T>(s, part.begin + group), s.c);
      }
      if (lines) lines.close();
      stream_fence();
    });
  });
}

template <>
void depthwise_direct_dx<Isa::FUSEDTRAIN_ISA>(const DepthwiseConv2dBackward& a, const void* taps, void* scratch,
                                              DepthwisePart part) {
  const DepthwiseSizes& s = a.sizes;
  visit_direct_dtype(s.dtype, [&]<class T>() {
    visit_kernel(s, [&]<int kTaps, int kStride>() {
      constexpr int64_t kTapRow = kTaps * Group<T>::kChannels;
      const T* dy = static_cast<const T*>(a.dy) + part.image * s.ho * s.wo * s.c;
      PixelLines<T> lines;
      Row<T> row{s, part.begin, part.end, {}, kTaps * kTapRow, lines};
      Tile<T>& tile = row.tile;
      tile.width = s.wo;
      tile.pitch = tile.out_pitch = s.c;
      tile.act = Activation::kIdentity;
      tile.streams = kStreams<T, kTaps> && streams(s, static_cast<const T*>(a.dx), s.h * s.w, s.c);
      // At stride 2 each row of dx meets a half of the kernel's rows.
      const Weights<T> weights = arrange<T, kTaps, kStride>(taps, kStride == 1, part, scratch);
      const Span rows = band_rows(part, s.h);
      T* dx = static_cast<T*>(a.dx) + part.image * s.h * s.w * s.c;
      if (goes_through_lines<T>(s, s.h * s.w)) lines.begin(dx + rows.begin * s.w * s.c);
      for (int64_t iy = rows.begin; iy < rows.end; ++iy) {
        tile.out = dx + iy * s.w * s.c;
        tile.out_step = lines || tile.streams ? 0 : s.w * s.c;
        if constexpr (kStride == 1) {
          const int64_t top = iy + s.top - (kTaps - 1);
          tile.ahead = dy + (top + kTaps) * s.wo * s.c;
          gather_row<T, kTaps, kStride>(row, weights, dy, s.ho, top, s.w, s.left - (kTaps - 1));
        } else {
          // oy = (iy + top - ky) / 2 for the ky of one parity, downwards from the first.
          const int64_t odd = (iy + s.top) % 2, most = (iy + s.top - odd) / 2, count = (kTaps - odd + 1) / 2;
          const int64_t from = std::clamp<int64_t>(most - s.ho + 1, 0, count);
          const int64_t to = std::clamp<int64_t>(most + 1, from, count);
          tile.rows = {.in = dy + (most - from) * s.wo * s.c,
                       .in_step = -s.wo * s.c,
                       .taps = weights.taps + (odd + 2 * from) * kTapRow,
                       .tap_step = 2 * kTapRow,
                       .count = to - from};
          tile.ahead = dy + (most + 1) * s.wo * s.c;
          run_row<T, Spread<kTaps>, 1>(row, s.w, s.left % 2, s.left / 2 - (kTaps - 1) / 2);
        }
      }
      if (lines) lines.close();
      stream_fence();
    });
  });
}

template <>
void depthwise_direct_backward<Isa::FUSEDTRAIN_ISA>(const DepthwiseConv2dBackward& a, const void* taps, void* scratch,
                                                    DepthwisePart part, void* partial, bool begins) {
  constexpr Isa I = Isa::FUSEDTRAIN_ISA;
  if (works_on_copies(a.sizes)) {
    depthwise_copied_backward<I>(a, taps, scratch, part, partial, begins);
  } else if (a.sizes.layout == Layout::kChannelsLast) {
    if (a.dx) depthwise_direct_dx<I>(a, taps, scratch, part);  // first: dw then finds dy in cache
    if (a.partial) depthwise_direct_dw<I>(a, part, partial, begins);
  } else if (depthwise_direct<I>(a.sizes).planes) {
    if (a.dx) depthwise_planes_dx<I>(a, taps, scratch, part);
    if (a.partial) depthwise_planes_dw<I>(a, scratch, part, partial, begins);
  } else {
    DepthwiseConv2dBackward transposed = a;
    const DepthwisePart planes = planes_of(a.sizes, part);
    if (planes.begin < planes.end) {
      if (a.dx) depthwise_planes_dx<I>(a, taps, scratch, planes);
      transposed.dx = nullptr;
    }
    if (transposed.dx || a.partial) depthwise_copied_backward<I>(transposed, taps, scratch, part, partial, begins);
  }
}

}  // namespace fusedtrain::cpu

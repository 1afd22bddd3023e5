// depthwise_conv2d on the CPU: y and dx, both as correlations of rows.
//   y[co, oy, ox]  = act(bias[co] + sum_{ky, kx} weight[co, ky, kx] * x[ci, oy * sh + ky * dil_h - top, ...])
//   dx[ci, iy, ix] = sum_j sum_{ky, kx: oy * sh + ky * dil_h - top = iy, ...} weight[co, ky, kx] * dy[co, oy, ox]
// dx with stride s falls apart into s phases per axis (iy mod s). Each is a correlation of dy with stride 1 and every
// s-th tap in reverse order, so nothing is divided or skipped in the loops.
#include "depthwise_conv2d.h"

#include <new>
#include <numeric>

#include "cpu/depthwise_tiny.h"

namespace fusedtrain::cpu {
namespace {

// One phase of one axis: out[q * phases + phase] = sum_{t < taps} tap[first_tap + t * tap_step] * in[q * stride + t *
// dil - pad], q < count.
struct Axis {
  int64_t count, taps, dil, pad, first_tap, tap_step;
};

Axis forward_axis(int64_t out_size, int64_t k, int64_t pad, int64_t dil) { return {out_size, k, dil, pad, 0, 1}; }

// Tap k of the forward pass links x[i] and y[o] where i = o * s + k * dil - pad. For i = q * s + phase these are the k
// with phase + pad - k * dil divisible by s: every (s / g)-th from the first one, g = gcd(s, dil), at
// o = q + (phase + pad - k * dil) / s.
Axis dx_axis(int64_t phase, int64_t x_size, int64_t k, int64_t s, int64_t pad, int64_t dil) {
  const int64_t g = std::gcd(s, dil), step = s / g;
  const int64_t count = ceil_div(x_size - phase, s);
  int64_t first = 0;
  while (first < std::min(k, step) && (phase + pad - first * dil) % s != 0) ++first;
  if (first >= std::min(k, step)) return {count, 0, 1, 0, 0, 0};
  const int64_t taps = (k - 1 - first) / step + 1, last = first + (taps - 1) * step;
  return {count, taps, dil / g, -((phase + pad - last * dil) / s), last, -step};
}

// The input columns or rows that any phase reads for output q: q * stride + low, ..., + span - 1.
struct Axes {
  const Axis* phases;
  int64_t count, stride, low, span;
};

template <class MakeAxis>
Axes make_axes(Arena& arena, int64_t count, int64_t stride, const MakeAxis& make_axis) {
  Axis* phases = arena.take<Axis>(count);
  int64_t low = INT64_MAX, high = INT64_MIN;
  for (int64_t phase = 0; phase < count; ++phase) {
    const Axis a = phases[phase] = make_axis(phase);
    if (a.taps == 0) continue;
    low = std::min(low, -a.pad);
    high = std::max(high, (a.taps - 1) * a.dil - a.pad);
  }
  if (low > high) low = high = 0;
  return {phases, count, stride, low, high - low + 1};
}

// One row of output: out[i * out_pitch + lane] = (add ? out : init) + sum_{t, u} taps * rows.
template <class Lane>
struct RowTask {
  const Lane* const* rows;  // [kh] at distance dil_h; each [column][lane]
  const Lane* zeros;        // the row that stands for one outside the image
  int64_t kh, dil_h;
  int64_t col;            // of the first tap of the first output
  int64_t stride, dil_w;  // of columns
  const Lane* taps;       // [kh][kw][lane] at the two steps
  int64_t tap_row, tap_col;
  const Lane* init;  // [lane] or null
  bool add;
  Lane* out;
  int64_t out_pitch, count;
};

// kWide outputs of a row. kStride is 1 or 2 without dilation, or 0 for any stride and dilation.
template <class V, int kTaps, int kStride, int kWide>
[[gnu::always_inline]] inline void correlate_tile(const RowTask<typename V::Lane>& task, int64_t first) {
  constexpr int L = V::kLanes;
  const int64_t valid = task.count - first;
  auto* out = task.out + first * task.out_pitch;
  V acc[kWide];
  const V init = task.init && !task.add ? load<V>(task.init) : V(0);
#pragma GCC unroll 32
  for (int t = 0; t < kWide; ++t) acc[t] = init;
  for (int64_t ky = 0; ky < task.kh; ++ky) {
    const auto* row = task.rows[ky * task.dil_h];
    if (row == task.zeros) continue;
    const auto* taps = task.taps + ky * task.tap_row;
    V tap[kTaps];
#pragma GCC unroll 32
    for (int kx = 0; kx < kTaps; ++kx) tap[kx] = load<V>(taps + kx * task.tap_col);
    if constexpr (kStride == 0) {
      row += (task.col + first * task.stride) * L;
#pragma GCC unroll 32
      for (int kx = 0; kx < kTaps; ++kx) {
        const auto* p = row + kx * task.dil_w * L;
#pragma GCC unroll 32
        for (int t = 0; t < kWide; ++t) acc[t] += tap[kx] * load<V>(p + t * task.stride * L);
      }
    } else {
      row += (task.col + first * kStride) * L;
#pragma GCC unroll 32
      for (int column = 0; column < (kWide - 1) * kStride + kTaps; ++column) {
        const V x = load<V>(row + column * L);
#pragma GCC unroll 32
        for (int t = 0; t < kWide; ++t) {
          const int kx = column - t * kStride;
          if (kx >= 0 && kx < kTaps) acc[t] += tap[kx] * x;
        }
      }
    }
  }
#pragma GCC unroll 32
  for (int t = 0; t < kWide; ++t) {
    // At the end: the error of a sum grows with the length of its chains.
    if (t < valid) store(out + t * task.out_pitch, task.add ? load<V>(out + t * task.out_pitch) + acc[t] : acc[t]);
  }
}

template <class V, int kTaps, int kStride>
void correlate_row(const RowTask<typename V::Lane>& task) {
  constexpr int kLastTile = kStride == 0 ? 8 : 7;  // 7: maps of 7 and 14 pixels are common
  int64_t first = 0;
  for (; first + 8 <= task.count; first += 8) correlate_tile<V, kTaps, kStride, 8>(task, first);
  if (first + 4 < task.count) {
    correlate_tile<V, kTaps, kStride, kLastTile>(task, first);
  } else if (first < task.count) {
    correlate_tile<V, kTaps, kStride, 4>(task, first);
  }
}

// How far the last tile reaches over the end of a row, at most.
constexpr int64_t overshoot(int64_t count) {
  const int64_t rest = count % 8;
  return rest == 0 ? 0 : rest <= 4 ? 4 - rest : 8 - rest;
}

// A row of a kernel is taken in parts of at most this many taps, whose weights stay in registers.
constexpr int64_t kMostTaps = 8;

// Strides of 1, and of 2 with the usual kernels, have their own code; float64 is not worth it.
template <class V>
void correlate_part(int64_t taps, const RowTask<typename V::Lane>& task) {
  visit<1, 2, 3, 4, 5, 6, 7, 8>(taps, [&]<int kTaps>() {
    if constexpr (std::is_same_v<typename V::Lane, float>) {
      if (task.dil_w == 1 && task.stride == 1) return correlate_row<V, kTaps, 1>(task);
      if constexpr (kTaps == 3 || kTaps == 5 || kTaps == 7) {
        if (task.dil_w == 1 && task.stride == 2) return correlate_row<V, kTaps, 2>(task);
      }
    }
    correlate_row<V, kTaps, 0>(task);
  });
}

template <class V>
void activate(Activation act, typename V::Lane* values, int64_t count) {
  visit<Activation::kRelu, Activation::kSilu, Activation::kGelu, Activation::kHardSwish, Activation::kRelu6>(
      act, [&]<Activation A>() {
        for (int64_t i = 0; i < count; i += V::kLanes) store(values + i, Act<A>::value(load<V>(values + i)));
      });
}

// out = act(init + the sum over `inputs` of their correlations with their taps).
template <class V, class T>
struct Correlation {
  using Lane = typename V::Lane;
  Axes rows, cols;
  Block<const T> in;
  int64_t inputs;  // input i starts at channel in.first + i
  Block<T> out;
  const Lane* taps;  // [inputs][kh][kw][lane]
  int64_t kh, kw;
  const Lane* init;  // [lane] or null
  Activation act;

  // Rows q in [begin, end) of each phase.
  void run(Arena arena, int64_t begin, int64_t end) const {
    const int64_t width = cols.phases[0].count, tiles = ceil_div(width, kTileCols);
    for (int64_t tile = 0; tile < tiles; ++tile)
      run_tile(arena, begin, end, width * tile / tiles, width * (tile + 1) / tiles);
  }

 private:
  void run_tile(Arena arena, int64_t begin, int64_t end, int64_t left, int64_t right) const {
    const int64_t needed = (right - left - 1) * cols.stride + cols.span;
    const int64_t slack = most_overshoot(left, right) * cols.stride;
    const int64_t row_bytes = (needed + slack) * kVecBytes * inputs;
    const int64_t steps = row_steps(end - begin, rows.span, rows.stride, row_bytes);
    const int64_t capacity = (steps - 1) * rows.stride + rows.span;
    using Ring = RowRing<V, T>;
    Ring* rings = arena.template take<Ring>(inputs);
    for (int64_t i = 0; i < inputs; ++i) {
      Block<const T> block = in;
      block.first += i;
      new (rings + i) Ring(arena, block, left * cols.stride + cols.low, needed, slack, capacity);
    }
    Lane* buffer = arena.template take<Lane>((right - left) * cols.count * V::kLanes);
    for (int64_t q = begin; q < end; q += steps) {
      const int64_t now = std::min(steps, end - q);
      const int64_t first_row = q * rows.stride + rows.low;
      for (int64_t i = 0; i < inputs; ++i) rings[i].advance(first_row, (now - 1) * rows.stride + rows.span);
      for (int64_t phase = 0; phase < rows.count; ++phase) {
        const int64_t stop = std::min(now, rows.phases[phase].count - q);
        for (int64_t step = 0; step < stop; ++step) write_out(rings, buffer, phase, q, step, left, right);
      }
    }
  }

  int64_t most_overshoot(int64_t left, int64_t right) const {
    int64_t most = 0;
    for (int64_t phase = 0; phase < cols.count; ++phase) {
      most = std::max(most, overshoot(std::max<int64_t>(0, std::min(right, cols.phases[phase].count) - left)));
    }
    return most;
  }

  // Row q + step of a phase, columns [left, right) of all phases.
  void write_out(const RowRing<V, T>* rings, Lane* buffer, int64_t row_phase, int64_t q, int64_t step, int64_t left,
                 int64_t right) const {
    const int64_t row = (q + step) * rows.count + row_phase, begin = left * cols.count;
    Lane* target = buffer;
    int64_t pitch = V::kLanes;
    // Without act and conversion, results go to their place at once.
    const bool direct = std::is_same_v<T, Lane> && act == Activation::kIdentity && out.step == 1 &&
                        out.lanes == V::kLanes && out.layout == Layout::kChannelsLast;
    if constexpr (std::is_same_v<T, Lane>) {
      if (direct) {
        target = out.image + (row * out.w + begin) * out.channels + out.first;
        pitch = out.channels;
      }
    }
    for (int64_t phase = 0; phase < cols.count; ++phase) {
      const int64_t count = std::min(right, cols.phases[phase].count) - left;
      if (count > 0) {
        write_phase(rings, rows.phases[row_phase], cols.phases[phase], step, target + phase * pitch, pitch * cols.count,
                    count);
      }
    }
    if (direct) return;
    const int64_t columns = std::min(out.w - begin, (right - left) * cols.count);
    activate<V>(act, buffer, columns * V::kLanes);
    write_row<V>(out, row, begin, columns, buffer);
  }

  void write_phase(const RowRing<V, T>* rings, const Axis& y, const Axis& x, int64_t step, Lane* target, int64_t pitch,
                   int64_t count) const {
    RowTask<Lane> task{.rows = nullptr,
                       .zeros = nullptr,
                       .kh = x.taps == 0 ? 0 : y.taps,
                       .dil_h = y.dil,
                       .col = 0,
                       .stride = cols.stride,
                       .dil_w = x.dil,
                       .taps = nullptr,
                       .tap_row = y.tap_step * kw * V::kLanes,
                       .tap_col = x.tap_step * V::kLanes,
                       .init = init,
                       .add = false,
                       .out = target,
                       .out_pitch = pitch,
                       .count = count};
    const int64_t parts = std::max<int64_t>(1, ceil_div(x.taps, kMostTaps));
    for (int64_t i = 0; i < inputs; ++i) {
      task.rows = rings[i].rows() + step * rows.stride - y.pad - rows.low;
      task.zeros = rings[i].zeros();
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t from = x.taps * part / parts, to = x.taps * (part + 1) / parts;
        task.col = from * x.dil - x.pad - cols.low;
        task.taps = taps + (i * kh * kw + y.first_tap * kw + x.first_tap + from * x.tap_step) * V::kLanes;
        correlate_part<V>(std::max<int64_t>(1, to - from), task);
        task.add = true;
      }
    }
  }
};

// Lane l of block b of a [blocks][m][count][lane] array is channel b * kLanes + l.
template <class V>
const typename V::Lane* taps_of(const DepthwiseSizes& s, const void* taps, int64_t block, int64_t j) {
  return static_cast<const typename V::Lane*>(taps) + (block * s.m + j) * s.kh * s.kw * V::kLanes;
}

}  // namespace

template <>
int64_t depthwise_conv2d_blocks<Isa::FUSEDTRAIN_ISA>(const DepthwiseSizes& s) {
  const DepthwiseDirect direct = depthwise_direct<Isa::FUSEDTRAIN_ISA>(s);
  if (direct.blocks > 0) return direct.blocks;
  return ceil_div(s.c, s.dtype == DType::kFloat64 ? Vec<double>::kLanes : Vec<float>::kLanes);
}

template <>
void depthwise_conv2d_taps<Isa::FUSEDTRAIN_ISA>(const DepthwiseSizes& s, const void* weight, void* taps, int64_t begin,
                                                int64_t end) {
  if (depthwise_direct<Isa::FUSEDTRAIN_ISA>(s).blocks > 0) {
    return depthwise_direct_taps<Isa::FUSEDTRAIN_ISA>(s, weight, taps, begin, end);
  }
  visit_dtype(s.dtype, [&]<class T>() {
    using V = Vec<Acc<T>>;
    const int64_t k = s.kh * s.kw;
    for (int64_t i = begin * s.m; i < end * s.m; ++i) {
      const int64_t block = i / s.m, j = i % s.m;
      auto* out = static_cast<Acc<T>*>(taps) + i * k * V::kLanes;
      // The k weights of each channel are a row of k columns of an image of channels.
      const Block<const T> rows{static_cast<const T*>(weight),
                                Layout::kContiguous,
                                1,
                                k,
                                s.c * s.m,
                                block * V::kLanes * s.m + j,
                                s.m,
                                std::min<int64_t>(V::kLanes, s.c - block * V::kLanes)};
      read_row<V>(rows, 0, 0, k, out);
    }
  });
}

template <>
bool depthwise_conv2d_gathers_moments<Isa::FUSEDTRAIN_ISA>(const DepthwiseSizes& s) {
  const DepthwiseDirect direct = depthwise_direct<Isa::FUSEDTRAIN_ISA>(s);
  return s.dtype == DType::kFloat32 && direct.blocks > 0 && (!direct.planes || keeps_columns_well<float>(s));
}

template <>
void depthwise_conv2d<Isa::FUSEDTRAIN_ISA>(const DepthwiseConv2d& a, const void* taps, void* scratch, int64_t begin,
                                           int64_t end) {
  constexpr Isa I = Isa::FUSEDTRAIN_ISA;
  const DepthwiseSizes& s = a.sizes;
  const int64_t blocks = depthwise_conv2d_blocks<I>(s);
  const bool direct = depthwise_direct<I>(s).blocks > 0, tiny = is_tiny(s);
  visit_dtype(s.dtype, [&]<class T>() {
    using V = Vec<Acc<T>>;
    Arena arena(scratch);
    const Axes rows = make_axes(arena, 1, s.sh, [&](int64_t) { return forward_axis(s.ho, s.kh, s.top, s.dil_h); });
    const Axes cols = make_axes(arena, 1, s.sw, [&](int64_t) { return forward_axis(s.wo, s.kw, s.left, s.dil_w); });
    Acc<T>* bias = arena.take<Acc<T>>(V::kLanes);
    const TinyPairs<&TinyPair::out> pairs(s, V::kLanes, has_tiny_planes(s) ? V::kLanes : s.c);
    const int64_t of_image = bands(s), of_pixel = chunks(s);
    for (int64_t item = begin; tiny && item < std::min(end, s.n * of_pixel);) {
      const int64_t chunk = item / s.n, first = item % s.n, last = std::min(s.n, first + end - item);
      each_tiny<V>(s, chunk, of_pixel, first, last, [&](auto tiny, int64_t n, int64_t block) {
        tiny.forward(pairs, static_cast<const T*>(a.x) + n * s.c * s.h * s.w,
                     static_cast<T*>(a.y) + n * s.c * s.ho * s.wo, taps_of<V>(s, taps, block, 0),
                     static_cast<const T*>(a.bias), a.act);
      });
      item += last - first;
    }
    for (int64_t item = begin; !tiny && item < end; ++item) {
      const int64_t band = item % of_image, chunk = item / of_image % of_pixel, n = item / of_image / of_pixel;
      if (direct) {
        depthwise_direct_forward<I>(
            a, taps, scratch, {n, band, of_image, first_block(s, blocks, chunk), first_block(s, blocks, chunk + 1)});
        continue;
      }
      each_block(s, blocks, chunk, [&](int64_t block) {
        const auto x = block_of<V>(s, static_cast<const T*>(a.x) + n * s.c * s.h * s.w, s.h, s.w, 1, block);
        auto y = block_of<V>(s, static_cast<T*>(a.y) + n * s.c * s.m * s.ho * s.wo, s.ho, s.wo, s.m, block);
        for (int64_t j = 0; j < s.m; ++j, ++y.first) {
          for (int64_t l = 0; a.bias != nullptr && l < y.lanes; ++l) {
            bias[l] = load<V>(static_cast<const T*>(a.bias) + y.first + l * s.m, FirstLanes{1}).v[0];
          }
          const Correlation<V, T> correlation{.rows = rows,
                                              .cols = cols,
                                              .in = x,
                                              .inputs = 1,
                                              .out = y,
                                              .taps = taps_of<V>(s, taps, block, j),
                                              .kh = s.kh,
                                              .kw = s.kw,
                                              .init = a.bias ? bias : nullptr,
                                              .act = a.act};
          correlation.run(arena, s.ho * band / bands(s), s.ho * (band + 1) / bands(s));
        }
      });
    }
  });
}

template <>
void depthwise_dx<Isa::FUSEDTRAIN_ISA>(const DepthwiseConv2dBackward& a, const void* taps, void* scratch,
                                       DepthwiseUnit unit) {
  const DepthwiseSizes& s = a.sizes;
  visit_dtype(s.dtype, [&]<class T>() {
    using V = Vec<Acc<T>>;
    Arena arena(scratch);
    const Axes rows =
        make_axes(arena, s.sh, 1, [&](int64_t phase) { return dx_axis(phase, s.h, s.kh, s.sh, s.top, s.dil_h); });
    const Axes cols =
        make_axes(arena, s.sw, 1, [&](int64_t phase) { return dx_axis(phase, s.w, s.kw, s.sw, s.left, s.dil_w); });
    const auto dy =
        block_of<V>(s, static_cast<const T*>(a.dy) + unit.image * s.c * s.m * s.ho * s.wo, s.ho, s.wo, s.m, unit.block);
    const auto dx = block_of<V>(s, static_cast<T*>(a.dx) + unit.image * s.c * s.h * s.w, s.h, s.w, 1, unit.block);
    const Correlation<V, T> correlation{
        rows, cols, dy, s.m, dx, taps_of<V>(s, taps, unit.block, 0), s.kh, s.kw, nullptr, Activation::kIdentity};
    const int64_t count = rows.phases[0].count;
    correlation.run(arena, count * unit.band / bands(s), count * (unit.band + 1) / bands(s));
  });
}

}  // namespace fusedtrain::cpu

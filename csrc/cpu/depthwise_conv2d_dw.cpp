// depthwise_conv2d on the CPU: dw and db, and the order of the backward pass.
//   dw[co, ky, kx] = sum_{n, oy, ox} dy[co, oy, ox] * x[ci, oy * sh + ky * dil_h - top, ox * sw + kx * dil_w - left]
//   db[co]         = sum_{n, oy, ox} dy[co, oy, ox]
// Sums are made in registers over a few rows, then over a unit, then over a group of units, then over the groups.
#include "cpu/depthwise_tiny.h"
#include "depthwise_conv2d.h"

namespace fusedtrain::cpu {
namespace {

// One axis: output o meets x[o * stride + tap * dil - pad], of `size`.
struct Axis {
  int64_t size, stride, dil, pad;

  // Those of `outputs` that meet x inside the image with any of the taps [from, to).
  Span meet(Span outputs, int64_t from, int64_t to) const {
    const int64_t first = ceil_div(std::max<int64_t>(0, pad - (to - 1) * dil), stride);
    const int64_t last = size - 1 + pad - from * dil;
    const int64_t begin = std::max(outputs.begin, first);
    return {begin, std::max(begin, std::min(outputs.end, last < 0 ? 0 : last / stride + 1))};
  }
};

// Rows of dy against rows of x, for some of the taps.
template <class Lane>
struct DotTask {
  const Lane* const* x;  // rows of x: that of tap row 0 and row 0 of dy first; each [column][lane]
  int64_t sh, dil_h;
  int64_t col;  // of tap column 0 and column 0 of dy
  int64_t sw, dil_w;
  const Lane* dy;  // [rows][cols][lane]
  int64_t rows, cols;
  int64_t count;  // columns to be taken
  Lane* sums;     // [kh][kw][lane] at distance sums_row
  int64_t sums_row;
};

constexpr int kMostTaps = 8;

// kRows x kTaps sums; kStride is 1 or 2 without dilation, or 0 for any stride and dilation.
template <class V, int kRows, int kTaps, int kStride>
void dot_rows(const DotTask<typename V::Lane>& task) {
  using Lane = typename V::Lane;
  constexpr int L = V::kLanes;
  constexpr int kPixels = kStride == 0 ? 1 : kRows * kTaps <= kSums - 6 && kStride == 1 ? 4 : 2;
  V sums[kRows][kTaps];
#pragma GCC unroll 32
  for (int ky = 0; ky < kRows; ++ky) {
#pragma GCC unroll 32
    for (int kx = 0; kx < kTaps; ++kx) sums[ky][kx] = V(0);
  }
  for (int64_t row = 0; row < task.rows; ++row) {
    const Lane* x[kRows];
#pragma GCC unroll 32
    for (int ky = 0; ky < kRows; ++ky) x[ky] = task.x[row * task.sh + ky * task.dil_h];
    const Lane* dy = task.dy + row * task.cols * L;
    int64_t col = 0;
    const auto step = [&]<int kNow>() __attribute__((always_inline)) {
      V g[kNow];
#pragma GCC unroll 32
      for (int i = 0; i < kNow; ++i) g[i] = load<V>(dy + (col + i) * L);
#pragma GCC unroll 32
      for (int ky = 0; ky < kRows; ++ky) {
        if constexpr (kStride == 0) {
          const Lane* p = x[ky] + (task.col + col * task.sw) * L;
#pragma GCC unroll 32
          for (int kx = 0; kx < kTaps; ++kx) sums[ky][kx] += g[0] * load<V>(p + kx * task.dil_w * L);
        } else {
          const Lane* p = x[ky] + (task.col + col * kStride) * L;
#pragma GCC unroll 32
          for (int column = 0; column < (kNow - 1) * kStride + kTaps; ++column) {
            const V v = load<V>(p + column * L);
#pragma GCC unroll 32
            for (int i = 0; i < kNow; ++i) {
              const int kx = column - i * kStride;
              if (kx >= 0 && kx < kTaps) sums[ky][kx] += g[i] * v;
            }
          }
        }
      }
    };
    for (; col + kPixels <= task.count; col += kPixels) step.template operator()<kPixels>();
    for (; col < task.count; ++col) step.template operator()<1>();
  }
#pragma GCC unroll 32
  for (int ky = 0; ky < kRows; ++ky) {
#pragma GCC unroll 32
    for (int kx = 0; kx < kTaps; ++kx) {
      Lane* total = task.sums + ky * task.sums_row + kx * L;
      store(total, load<V>(total) + sums[ky][kx]);
    }
  }
}

// Strides of 1, and of 2 with the usual kernels, have their own code; float64 is not worth it.
template <class V, int kRows, int kTaps>
void dot_part(const DotTask<typename V::Lane>& task) {
  if constexpr (std::is_same_v<typename V::Lane, float>) {
    if (task.dil_w == 1 && task.sw == 1) return dot_rows<V, kRows, kTaps, 1>(task);
    if constexpr (kTaps == 3 || kTaps == 5 || kTaps == 7) {
      if (task.dil_w == 1 && task.sw == 2) return dot_rows<V, kRows, kTaps, 2>(task);
    }
  }
  dot_rows<V, kRows, kTaps, 0>(task);
}

// All kh x kw sums of `rows` and `cols` of dy, in parts that fit the registers. What meets nothing but padding is left
// out: large kernels reach far beyond their maps.
template <class V>
void dot(const DotTask<typename V::Lane>& whole, const Axis& y, Span rows, const Axis& x, Span cols, int64_t kh,
         int64_t kw) {
  const int64_t parts = ceil_div(kw, kMostTaps);
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t from = kw * part / parts, to = kw * (part + 1) / parts;
    const Span met_cols = x.meet(cols, from, to);
    visit<1, 2, 3, 4, 5, 6, 7, 8>(to - from, [&]<int kTaps>() {
      constexpr int kRows = tap_rows(kTaps);
      for (int64_t ky = 0, now = 0; ky < kh; ky += now) {
        now = kh - ky >= kRows ? kRows : 1;
        const Span met_rows = y.meet(rows, ky, ky + now);
        if (met_rows.size() * met_cols.size() == 0) continue;
        const int64_t row = met_rows.begin - rows.begin, col = met_cols.begin - cols.begin;
        DotTask<typename V::Lane> task = whole;
        task.x += row * task.sh + ky * task.dil_h;
        task.col += col * task.sw + from * task.dil_w;
        task.dy += (row * task.cols + col) * V::kLanes;
        task.rows = met_rows.size();
        task.count = met_cols.size();
        task.sums += ky * task.sums_row + from * V::kLanes;
        now == kRows ? dot_part<V, kRows, kTaps>(task) : dot_part<V, 1, kTaps>(task);
      }
    });
  }
}

// sum[lane] += the sum over row [cols][lane].
template <class V>
void add_row(const typename V::Lane* row, int64_t cols, typename V::Lane* sum) {
  V parts[4] = {V(0), V(0), V(0), V(0)};
  for (int64_t i = 0; i < cols; ++i) parts[i % 4] += load<V>(row + i * V::kLanes);
  store(sum, load<V>(sum) + ((parts[0] + parts[1]) + (parts[2] + parts[3])));
}

// Adds to sums [m][kh * kw + 1][lane], the last being db, what rows [begin, end) of dy give.
template <class V, class T>
void unit_sums(const DepthwiseSizes& s, Block<const T> x, Block<const T> dy, bool with_dw, int64_t begin, int64_t end,
               Arena arena, typename V::Lane* sums) {
  using Lane = typename V::Lane;
  const int64_t span_h = (s.kh - 1) * s.dil_h + 1, span_w = (s.kw - 1) * s.dil_w + 1;
  const int64_t tiles = ceil_div(s.wo, kTileCols), k = s.kh * s.kw;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    Arena local = arena;
    const int64_t left = s.wo * tile / tiles, cols = s.wo * (tile + 1) / tiles - left;
    const int64_t width = (cols - 1) * s.sw + span_w;
    const int64_t steps = row_steps(end - begin, span_h, s.sh, width * kVecBytes);
    RowRing<V, T> ring(local, x, left * s.sw - s.left, width, 0, (steps - 1) * s.sh + span_h);
    Lane* gradient = local.template take<Lane>(steps * cols * V::kLanes);
    for (int64_t row = begin; row < end; row += steps) {
      const int64_t now = std::min(steps, end - row);
      if (with_dw) ring.advance(row * s.sh - s.top, (now - 1) * s.sh + span_h);
      for (int64_t j = 0; j < s.m; ++j) {
        Block<const T> part = dy;
        part.first += j;
        for (int64_t i = 0; i < now; ++i) {
          read_row<V>(part, row + i, left, left + cols, gradient + i * cols * V::kLanes);
        }
        Lane* out = sums + j * (k + 1) * V::kLanes;
        // float64 is there for accuracy: it closes its sums row by row. Without fused multiplications sums are short.
        const int64_t most = std::is_same_v<Lane, double> ? 1 : kVecBytes == 16 ? 512 / cols : now;
        const int64_t at_once = std::clamp<int64_t>(most, 1, now);
        for (int64_t i = 0; with_dw && i < now; i += at_once) {
          dot<V>({.x = ring.rows() + i * s.sh,
                  .sh = s.sh,
                  .dil_h = s.dil_h,
                  .col = 0,
                  .sw = s.sw,
                  .dil_w = s.dil_w,
                  .dy = gradient + i * cols * V::kLanes,
                  .rows = std::min(at_once, now - i),
                  .cols = cols,
                  .count = cols,
                  .sums = out,
                  .sums_row = s.kw * V::kLanes},
                 {s.h, s.sh, s.dil_h, s.top}, {row + i, row + std::min(i + at_once, now)}, {s.w, s.sw, s.dil_w, s.left},
                 {left, left + cols}, s.kh, s.kw);
        }
        for (int64_t i = 0; i < now; ++i) add_row<V>(gradient + i * cols * V::kLanes, cols, out + k * V::kLanes);
      }
    }
  }
}

// out[co][from of count taps] = the sum over groups of the partial sums [blocks][m][k + 1][lane], rounded.
template <class V, class T>
void write_sums(const DepthwiseSizes& s, const typename V::Lane* partial, int64_t blocks, int64_t block, int64_t from,
                int64_t count, T* out) {
  constexpr int64_t L = V::kLanes;
  const int64_t k1 = s.kh * s.kw + 1, lanes = std::min<int64_t>(L, s.c - block * L), parts = groups(s);
  for (int64_t j = 0; j < s.m; ++j) {
    for (int64_t tap = 0; tap < count; ++tap) {
      V total(0);
      for (int64_t group = 0; group < parts; ++group) {
        total += load<V>(partial + (((group * blocks + block) * s.m + j) * k1 + from + tap) * L);
      }
      T rounded[L];
      store(rounded, total);
      for (int64_t l = 0; l < lanes; ++l) out[((block * L + l) * s.m + j) * count + tap] = rounded[l];
    }
  }
}

}  // namespace

template <>
void depthwise_conv2d_backward<Isa::FUSEDTRAIN_ISA>(const DepthwiseConv2dBackward& a, const void* taps, void* scratch,
                                                    int64_t begin, int64_t end) {
  constexpr Isa I = Isa::FUSEDTRAIN_ISA;
  const DepthwiseSizes& s = a.sizes;
  const bool tiny = is_tiny(s);
  const int64_t blocks = depthwise_conv2d_blocks<I>(s), units = tiny ? s.n : s.n * bands(s);
  const DepthwiseDirect direct = depthwise_direct<I>(s);
  visit_dtype(s.dtype, [&]<class T>() {
    using V = Vec<Acc<T>>;
    const int64_t size = direct.blocks > 0 ? direct.size : s.m * (s.kh * s.kw + 1) * V::kLanes;
    Arena arena(scratch);
    Acc<T>* sums = arena.take<Acc<T>>(size);
    const int64_t k = s.kh * s.kw, pitch = has_tiny_planes(s) ? V::kLanes : s.c;
    const TinyPairs<&TinyPair::in> of_dx(s, V::kLanes, pitch);
    const TinyPairs<&TinyPair::tap> of_dw(s, V::kLanes, pitch);
    const int64_t of_image = bands(s), of_pixel = chunks(s);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t group = item / of_pixel, chunk = item % of_pixel;
      const int64_t first = units * group / groups(s), last = units * (group + 1) / groups(s);
      if (first == last && a.partial) {  // no images
        std::fill_n(static_cast<Acc<T>*>(a.partial) + group * blocks * size, blocks * size, Acc<T>(0));
      }
      if (tiny) {
        each_tiny<V>(s, chunk, of_pixel, first, last, [&](auto tiny, int64_t n, int64_t block) {
          const T* const dy = static_cast<const T*>(a.dy) + n * s.c * s.ho * s.wo;
          const int64_t at = n * s.c * s.h * s.w;
          const auto* weight = static_cast<const Acc<T>*>(taps) + block * k * V::kLanes;
          if (a.dx) tiny.dx(of_dx, dy, static_cast<T*>(a.dx) + at, weight);
          if (a.partial == nullptr) return;
          auto* partial = static_cast<Acc<T>*>(a.partial) + (group * blocks + block) * size;
          tiny.dw(of_dw, dy, static_cast<const T*>(a.x) + at, partial, n == first, a.db != nullptr);
        });
        continue;
      }
      for (int64_t unit = first; unit < last; ++unit) {
        const int64_t image = unit / of_image, band = unit % of_image;
        // dx first: dw then finds dy in cache.
        if (direct.blocks > 0) {
          const DepthwisePart part{image, band, of_image, first_block(s, blocks, chunk),
                                   first_block(s, blocks, chunk + 1)};
          auto* partial = static_cast<Acc<T>*>(a.partial) + group * blocks * size;
          depthwise_direct_backward<I>(a, taps, scratch, part, partial, unit == first);
          continue;
        }
        each_block(s, blocks, chunk, [&](int64_t block) {
          if (a.dx) depthwise_dx<I>(a, taps, scratch, {image, band, block});
          if (a.partial == nullptr) return;
          Acc<T>* partial = static_cast<Acc<T>*>(a.partial) + (group * blocks + block) * size;
          const auto x = block_of<V>(s, static_cast<const T*>(a.x) + image * s.c * s.h * s.w, s.h, s.w, 1, block);
          const auto dy =
              block_of<V>(s, static_cast<const T*>(a.dy) + image * s.c * s.m * s.ho * s.wo, s.ho, s.wo, s.m, block);
          std::fill_n(sums, size, Acc<T>(0));
          unit_sums<V>(s, x, dy, a.dw != nullptr, s.ho * band / of_image, s.ho * (band + 1) / of_image, arena, sums);
          for (int64_t i = 0; i < size; i += V::kLanes) {
            store(partial + i, unit == first ? load<V>(sums + i) : load<V>(partial + i) + load<V>(sums + i));
          }
        });
      }
    }
  });
}

template <>
void depthwise_conv2d_backward_finish<Isa::FUSEDTRAIN_ISA>(const DepthwiseConv2dBackward& a, int64_t begin,
                                                           int64_t end) {
  const DepthwiseSizes& s = a.sizes;
  if (depthwise_direct<Isa::FUSEDTRAIN_ISA>(s).blocks > 0) {
    return depthwise_direct_finish<Isa::FUSEDTRAIN_ISA>(a, begin, end);
  }
  const int64_t blocks = depthwise_conv2d_blocks<Isa::FUSEDTRAIN_ISA>(s), k = s.kh * s.kw;
  visit_dtype(s.dtype, [&]<class T>() {
    using V = Vec<Acc<T>>;
    const auto* partial = static_cast<const Acc<T>*>(a.partial);
    for (int64_t block = begin; block < end; ++block) {
      if (a.dw) write_sums<V>(s, partial, blocks, block, 0, k, static_cast<T*>(a.dw));
      if (a.db) write_sums<V>(s, partial, blocks, block, k, 1, static_cast<T*>(a.db));
    }
  });
}

}  // namespace fusedtrain::cpu

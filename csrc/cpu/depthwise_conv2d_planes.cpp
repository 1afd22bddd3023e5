// depthwise_conv2d on the CPU, contiguous images and square kernels of 3, 5 or 7: y and dx, plane by plane.
//   y[oy, ox]  = act(bias + sum_{ky, kx} weight[ky, kx] * x[oy * s + ky - top, ox * s + kx - left])
//   dx[iy, ix] = sum_{ky, kx: oy * s + ky - top = iy, ...} weight[ky, kx] * dy[oy, ox]
// A few rows of outputs by a vector of columns stay in registers; each vector of inputs is read once for all of them.
// dx falls apart into s phases per axis, each a correlation of dy at stride 1 with every s-th tap in reverse order.
#include <tuple>

#include "cpu/depthwise_planes.h"

namespace fusedtrain::cpu {
namespace {

// Planes of wide rows, in float32, are written past the caches: the rows of a tile then are too long for the processor
// to see what is written next. Narrower ones and those of 16 bits were measured slower that way.
constexpr int64_t kLeastStreamedCols = 80;

// out[t][col] = init + sum_{ky, kx} taps[ky][kx] * rows[t * kStride + ky][column at + col * kStride + kx], whole
// vectors
template <int kKh, int kKw, int kStride, int kRows>
[[gnu::noinline]] void correlate_rows(const float* const* rows, int64_t at, int64_t half, const float* taps, float init,
                                      float* out, int64_t width) {
  using V = PlaneVec;
  for (int64_t col = 0; col < width; col += kPlaneLanes) {
    V acc[kRows];
#pragma GCC unroll 32
    for (V& sum : acc) sum = V(init);
#pragma GCC unroll 32
    for (int row = 0; row < (kRows - 1) * kStride + kKh; ++row) {
      const float* p = rows[row] + at + col;
#pragma GCC unroll 32
      for (int kx = 0; kx < kKw; ++kx) {
        const V x = load<V>(p + kx % kStride * half + kx / kStride);
#pragma GCC unroll 32
        for (int t = 0; t < kRows; ++t) {
          const int ky = row - t * kStride;
          if (ky >= 0 && ky < kKh) acc[t] += V(taps[ky * kKw + kx]) * x;
        }
      }
    }
#pragma GCC unroll 32
    for (int t = 0; t < kRows; ++t) store(out + t * width + col, acc[t]);
  }
}

template <int kTaps>
void load_taps(const float* from, PlaneVec (&taps)[kTaps][kTaps]) {
  unroll<kTaps>([&](auto ky) __attribute__((always_inline)) {
    unroll<kTaps>([&](auto kx) __attribute__((always_inline)) { taps[ky][kx] = PlaneVec(from[ky * kTaps + kx]); });
  });
}

// Outputs of the kernels that keep the columns, past the caches.
template <class T>
using PlaneLines = Lines<T, kMostTile * kMostPlaneCols>;

// out[row][col] = f(row, col), a vector. Whole vectors may reach into the next row, which is written after.
template <class T, class F>
void put_rows(T* out, int64_t rows, int64_t cols, F&& f) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; col += kPlaneLanes) {
      T* to = out + row * cols + col;
      fetch_ahead(to);
      if (row * cols + col + kPlaneLanes <= rows * cols) {
        store(to, f(row, col));
      } else {
        visit_lanes<PlaneVec>(cols - col, [&](auto lanes) { store(to, f(row, col), lanes); });
      }
    }
  }
}

// Sums about a shift near the mean, of one channel's outputs of a band. The shift is the mean of the first.
struct PlaneMoments {
  PlaneVec shift{0}, sum{0}, squares{0};
  bool begun = false;

  template <int kRows, class Lanes>
  [[gnu::always_inline]] void add(const PlaneVec (&out)[kRows], Lanes lanes, int count) {
    if (!begun) {
      shift = PlaneVec(lane_sum(keep(out[0], lanes)) / float(count));
      begun = true;
    }
    const auto distance = [&](auto t) __attribute__((always_inline)) { return keep(out[t] - shift, lanes); };
    const auto square = [&](auto t) __attribute__((always_inline)) { return distance(t) * distance(t); };
    sum += sum_in_pairs<kRows>(distance);
    squares += sum_in_pairs<kRows>(square);
  }
  void put(float* to, int64_t c) const {
    to[0] = shift.v[0];
    to[c] = lane_sum(sum);
    to[2 * c] = lane_sum(squares);
  }
};

// Correlations of planes [h, w] whose number of columns they keep, or halve.
template <class T, int kTaps, int kStride>
struct KeptColumns {
  static constexpr bool kInOrder = kTaps == 3;  // outputs are written in

  int64_t h, w;
  int64_t above;  // rows of zeros
  T* zeros;
  PlaneLines<T> lines;  // that the outputs go through

  KeptColumns(Arena& arena, int64_t h, int64_t w, int64_t above) : h(h), w(w), above(above), zeros(arena.take<T>(w)) {
    std::fill_n(zeros, w, T{});
  }

  // Rows `band` of out = init + ...; before a vector of each row is stored: finish(rows, lanes, count).
  template <class Finish>
  void run(const T* plane, const float* taps, float init, T* out, Span band, bool at_end, const Finish& finish) {
    const PlaneRows<T> in{plane, h, w, band.begin * kStride - above, zeros};
    if constexpr (kHasStrips && kStride == 1) {
      if (kTaps == 5 || walks_strips<T>(w)) {
        const auto strip = [&](int64_t col, auto lanes) {
          run_strip(in, taps, init, out + band.begin * w + col, band.size(), col, lanes, finish);
        };
        return at_end ? each_strip<true>(w, strip) : each_strip<false>(w, strip);
      }
    }
    if constexpr (kTaps == 3) {
      run_along(in, taps, init, out, band, finish);
    } else if constexpr (kStride == 2) {
      each_way_down(w, [&]<bool kLeftmost>(int64_t col, auto lanes) {
        run_down<kLeftmost>(in, taps, init, out + band.begin * ceil_div(w, 2) + col, band.size(), col, lanes, finish);
      });
    }
  }

 private:
  template <class Finish>
  [[gnu::noinline]] void run_along(const PlaneRows<T>& in, const float* taps, float init, T* out, Span band,
                                   const Finish& finish) {
    PlaneVec tap[kTaps][kTaps];
    load_taps(taps, tap);
    const int64_t width = ceil_div(w, kStride);
    each_tile(band.size(), [&]<int kRows>(int64_t first) {
      const T *rows[(kRows - 1) * kStride + kTaps], *ahead = in.ahead(first * kStride, kStride);
      in.find(first * kStride, rows);
      T* to = lines ? lines.next() : out + (band.begin + first) * width;
      const auto step = [&](int64_t col, auto lanes, const auto& each_row) __attribute__((always_inline)) {
        fetch_rows<kRows * kStride * kStride>(ahead, col);
        PlaneVec acc[kRows];
        unroll<kRows>([&](auto t) __attribute__((always_inline)) { acc[t] = PlaneVec(init); });
        each_row([&](auto row, const PlaneVec(&x)[kTaps]) __attribute__((always_inline)) {
          unroll<kRows>([&](auto t) __attribute__((always_inline)) {
            constexpr int ky = row - t * kStride;
            if constexpr (ky >= 0 && ky < kTaps) {
              unroll<kTaps>([&](auto kx) __attribute__((always_inline)) { acc[t] += tap[ky][kx] * x[kx]; });
            }
          });
        });
        finish(acc, lanes, int(std::min(width - col, kPlaneLanes)));
        unroll<kRows>([&](auto t) __attribute__((always_inline)) { store(to + t * width + col, acc[t], lanes); });
      };
      walk_rows<kStride>(rows, w, step);
      if (lines) lines.put(kRows * width);
    });
  }

  // Of a vector of columns. Whole vectors may reach into the next row, which is written after: strips go from right to
  // left.
  template <class Lanes, class Finish>
  [[gnu::noinline]] void run_strip(const PlaneRows<T>& in, const float* taps, float init, T* out, int64_t count,
                                   int64_t col, Lanes lanes, const Finish& finish) {
    constexpr int kLast = kTaps - 1;
    PlaneVec tap[kTaps][kTaps];
    load_taps(taps, tap);
    const int lanes_stored = int(std::min(w - col, kPlaneLanes));
    PlaneVec acc[kTaps];  // of outputs j - kLast, ..., j
    unroll<kTaps>([&](auto i) __attribute__((always_inline)) { acc[i] = PlaneVec(0); });
    const auto each_row = [&](int64_t j, bool inside, const auto& column) __attribute__((always_inline)) {
      unroll<kLast>([&](auto i) __attribute__((always_inline)) { acc[i] = acc[i + 1]; });
      acc[kLast] = PlaneVec(init);
      if (inside) {
        unroll<kTaps>([&](auto kx) __attribute__((always_inline)) {
          const PlaneVec x = column(kx);
          unroll<kTaps>([&](auto i) __attribute__((always_inline)) { acc[i] += tap[kLast - i][kx] * x; });
        });
      }
      if (j < kLast) return;
      PlaneVec row[1] = {acc[0]};
      finish(row, lanes, lanes_stored);
      T* to = out + (j - kLast) * w;
      j < count + kLast - 1 ? store(to, row[0]) : store(to, row[0], lanes);
    };
    walk_strip<kTaps, false>(in, count + kLast, col, lanes, each_row);
  }

  template <bool kLeftmost, class Lanes, class Finish>
  [[gnu::noinline]] void run_down(const PlaneRows<T>& in, const float* taps, float init, T* out, int64_t count,
                                  int64_t col, Lanes lanes, const Finish& finish) {
    PlaneVec tap[kTaps][kTaps];
    load_taps(taps, tap);
    const int64_t width = ceil_div(w, kStride);
    const int lanes_stored = int(std::min(width - col, kPlaneLanes));
    PlaneVec last(0), before(0), now(0);  // outputs j - 2, j - 1 and j
    const auto add =
        [](PlaneVec & acc, const PlaneVec(&taps)[5], const PlaneVec(&x)[5]) __attribute__((always_inline)) {
      // Along the row first: a sum that all taps are added to one by one would be waited for.
      PlaneVec sum = taps[0] * x[0];
      unroll<4>([&](auto i) __attribute__((always_inline)) { sum += taps[i + 1] * x[i + 1]; });
      acc += sum;
    };
    walk_down<kLeftmost>(
        in, count, col, lanes, [&](int64_t j, const auto& even, const auto& odd) __attribute__((always_inline)) {
          even([&](const PlaneVec(&x)[5]) __attribute__((always_inline)) {
            if (j >= 2) add(last, tap[4], x);
            if (j >= 1 && j <= count) add(before, tap[2], x);
            now = PlaneVec(init);
            if (j < count) add(now, tap[0], x);
          });
          if (j <= count) {
            odd([&](const PlaneVec(&x)[5]) __attribute__((always_inline)) {
              if (j >= 1) add(before, tap[3], x);
              if (j < count) add(now, tap[1], x);
            });
          }
          if (j >= 2) {
            PlaneVec acc[1] = {last};
            finish(acc, lanes, lanes_stored);
            store(out + (j - 2) * width, acc[0], lanes);
          }
          last = before;
          before = now;
        });
  }
};

// dx [h, w] from dy [ho, wo], which has half the columns: dx[2 q + a][2 p + b] is the sum over i, j in {-1, 0, 1} of
// weight[a + pad - 2 i][b + pad - 2 j] * dy[q + i][p + j] where there are such taps.
template <class T, int kTaps>
struct DoubledColumns {
  static constexpr bool kInOrder = true;
  static constexpr int kPad = kTaps / 2, kAbove = kPad / 2;  // rows of dy above that of q

  int64_t h, w, ho, wo;
  T* zeros;
  PlaneLines<T> lines;

  DoubledColumns(Arena& arena, const DepthwiseSizes& s)
      : h(s.h), w(s.w), ho(s.ho), wo(s.wo), zeros(arena.take<T>(s.wo)) {
    std::fill_n(zeros, wo, T{});
  }

  // Of rows q in `band`.
  [[gnu::noinline]] void run(const T* dy, const float* taps, T* dx, Span band) {
    PlaneVec tap[kTaps][kTaps];
    load_taps(taps, tap);
    const auto tile = [&]<int kRows>(std::integral_constant<int, kRows>, int64_t q) __attribute__((always_inline)) {
      const PlaneRows<T> in{dy, ho, wo, q - kAbove, zeros};
      const T *rows[kAbove + kRows + 1], *ahead = in.ahead(0);
      in.find(0, rows);
      T* to = lines ? lines.next() : dx + 2 * q * w;
      const bool ends_even = 2 * (q + kRows) > h;  // the last row is not there
      const auto step = [&](int64_t col, auto, const auto& each_row) __attribute__((always_inline)) {
        fetch_rows<kRows>(ahead, col);
        PlaneVec acc[2 * kRows][2];
        unroll<2 * kRows>([&](auto t) __attribute__((always_inline)) { acc[t][0] = acc[t][1] = PlaneVec(0); });
        each_row([&](auto row, const PlaneVec(&x)[3]) __attribute__((always_inline)) {
          unroll<2 * kRows>([&](auto t) __attribute__((always_inline)) {
            constexpr int ky = t % 2 + kPad - 2 * (row - kAbove - t / 2);
            if constexpr (ky >= 0 && ky < kTaps) {
              unroll<6>([&](auto i) __attribute__((always_inline)) {
                constexpr int j = i / 2, b = i % 2, kx = b + kPad - 2 * (j - 1);
                if constexpr (kx >= 0 && kx < kTaps) acc[t][b] += tap[ky][kx] * x[j];
              });
            }
          });
        });
        unroll<2 * kRows>([&](auto t) __attribute__((always_inline)) {
          if (t == 2 * kRows - 1 && ends_even) return;
          store_halves(to + t * w + 2 * col, acc[t][0], acc[t][1], w - 2 * col);
        });
      };
      walk_rows<1>(rows, wo, step);
      if (lines) lines.put((2 * kRows - ends_even) * w);
    };
    int64_t q = band.begin;
    for (; q + 2 <= band.end; q += 2) tile(std::integral_constant<int, 2>{}, q);
    for (; q < band.end; ++q) tile(std::integral_constant<int, 1>{}, q);
  }
};

constexpr auto leave = [](const auto&, auto, int) {};  // as run's finish

// f(channel, plane) for the outputs [n, c, h, w] of a part, from row `first` on. Those of several planes follow each
// other where they are written past the caches: such planes are whole (has_whole_planes).
template <class Kept, class T, class F>
void each_kept(Kept& kept, const DepthwiseSizes& s, T* out, int64_t h, int64_t w, int64_t first, DepthwisePart part,
               const F& f) {
  const auto plane = [&](int64_t channel) { return out + (part.image * s.c + channel) * h * w; };
  const bool streams = stores_past_caches && Kept::kInOrder && sizeof(T) == 4 && w >= kLeastStreamedCols &&
                       s.n * s.c * h * w * 4 >= kStreamBytes;
  if (streams) kept.lines.begin(plane(part.begin) + first * w);
  for (int64_t channel = part.begin; channel < part.end; ++channel) f(channel, plane(channel));
  if (kept.lines) kept.lines.close();
  stream_fence();
}

// dx[q * kStride + phase] = sum_{u < taps} weight[odd + kStride * (taps - 1 - u)] * dy[q + base + u], along one axis.
template <int kTaps, int kStride>
struct Phase {
  int64_t odd, taps, base;
  Phase(int64_t phase, int64_t pad)
      : odd((phase + pad) % kStride),
        taps((kTaps - odd + kStride - 1) / kStride),
        base((phase + pad - odd) / kStride - (taps - 1)) {}
};

// How far all phases of an axis reach before and behind q.
template <int kTaps, int kStride>
struct Reach {
  int64_t before = 0, behind = 0;
  explicit Reach(int64_t pad) {
    for (int phase = 0; phase < kStride; ++phase) {
      const Phase<kTaps, kStride> p(phase, pad);
      before = std::max(before, -p.base);
      behind = std::max(behind, p.base + p.taps - 1);
    }
  }
};

// f<kh, kw>() for the taps of a phase.
template <int kTaps, int kStride, class F>
void visit_phase(int64_t kh, int64_t kw, F&& f) {
  if constexpr (kStride == 1) {
    f.template operator()<kTaps, kTaps>();
  } else {
    constexpr int kMore = (kTaps + 1) / 2, kLess = kTaps / 2;
    visit<kMore, kLess>(
        kh, [&]<int kKh>() { visit<kMore, kLess>(kw, [&]<int kKw>() { f.template operator()<kKh, kKw>(); }); });
  }
}

// dx from dy.
template <int kTaps, int kStride>
struct PlaneGradient {
  const DepthwiseSizes& s;
  Span q;
  Reach<kTaps, kStride> above, before;  // row above.before of dy belongs to q.begin, column before.before to q = 0
  int64_t width = round_up(ceil_div(s.w, kStride), kPlaneLanes);
  float* buffer;  // [kStride][kStride][kMostTile][width] and a vector

  PlaneGradient(Arena& arena, const DepthwiseSizes& sizes, DepthwisePart part)
      : s(sizes),
        q(band_rows(part, ceil_div(s.h, kStride))),
        above(s.top),
        before(s.left),
        buffer(arena.take<float>(kStride * kStride * kMostTile * width + kPlaneLanes)) {}

  template <class T>
  void write(const PaddedRows<1>& dy, const float* weight, T* dx) const {
    float taps[kStride * kStride][kTaps * kTaps];
    for (int64_t phase = 0; phase < kStride * kStride; ++phase) {
      const Phase<kTaps, kStride> y(phase / kStride, s.top), x(phase % kStride, s.left);
      for (int64_t v = 0; v < y.taps; ++v) {
        for (int64_t u = 0; u < x.taps; ++u) {
          taps[phase][v * x.taps + u] =
              weight[(y.odd + kStride * (y.taps - 1 - v)) * kTaps + x.odd + kStride * (x.taps - 1 - u)];
        }
      }
    }
    each_tile(q.size(), [&]<int kRows>(int64_t first) {
      for (int64_t phase = 0; phase < kStride * kStride; ++phase) {
        const Phase<kTaps, kStride> y(phase / kStride, s.top), x(phase % kStride, s.left);
        visit_phase<kTaps, kStride>(y.taps, x.taps, [&]<int kKh, int kKw>() {
          correlate_rows<kKh, kKw, 1, kRows>(dy.rows() + first + above.before + y.base, before.before + x.base, 0,
                                             taps[phase], 0.f, buffer + phase * kRows * width, width);
        });
      }
      const int64_t row = (q.begin + first) * kStride;
      put_rows(dx + row * s.w, std::min<int64_t>(kRows * kStride, s.h - row), s.w, [&](int64_t t, int64_t col) {
        const float* p = buffer + (t % kStride * kStride * kRows + t / kStride) * width + col / kStride;
        if constexpr (kStride == 1) {
          return load<PlaneVec>(p);
        } else {
          return interleave(load<PlaneVec>(p), load<PlaneVec>(p + kRows * width));
        }
      });
    });
  }
};

// The forward pass of kernels that keep the columns.
template <class T, int kTaps, int kStride>
void forward_kept(const DepthwiseConv2d& a, const void* taps, void* scratch, DepthwisePart part) {
  const DepthwiseSizes& s = a.sizes;
  const Span span = band_rows(part, s.ho);
  Arena arena(scratch);
  KeptColumns<T, kTaps, kStride> kept(arena, s.h, s.w, s.top);
  each_kept(kept, s, static_cast<T*>(a.y), s.ho, s.wo, span.begin, part, [&](int64_t channel, T* y) {
    const T* x = static_cast<const T*>(a.x) + (part.image * s.c + channel) * s.h * s.w;
    const float* weight = static_cast<const float*>(taps) + channel * kTaps * kTaps;
    const float bias = a.bias ? load<PlaneVec>(static_cast<const T*>(a.bias) + channel, FirstLanes{1}).v[0] : 0.f;
    const bool at_end = is_at_end(s, channel);
    if constexpr (std::is_same_v<T, float>) {
      if (a.moments != nullptr) {
        PlaneMoments moments;
        const auto add = [&](const auto& rows, auto lanes, int count) __attribute__((always_inline)) {
          moments.add(rows, lanes, count);
        };
        kept.run(x, weight, bias, y, span, at_end, add);
        return moments.put(a.moments + (part.image * part.bands + part.band) * 3 * s.c + channel, s.c);
      }
    }
    if (a.act != Activation::kIdentity) {
      kept.run(x, weight, bias, y, span, at_end, [&](auto& rows, auto, int) {
        for (PlaneVec& row : rows) row = activated(a.act, row);
      });
    } else {
      kept.run(x, weight, bias, y, span, at_end, leave);
    }
  });
}

// dx of kernels that keep the columns.
template <class T, int kTaps, int kStride>
void dx_kept(const DepthwiseConv2dBackward& a, const void* taps, void* scratch, DepthwisePart part) {
  const DepthwiseSizes& s = a.sizes;
  const Span band = band_rows(part, ceil_div(s.h, kStride));
  Arena arena(scratch);
  const auto run = [&](auto& kept, const auto& plane) {
    each_kept(kept, s, static_cast<T*>(a.dx), s.h, s.w, band.begin * kStride, part, [&](int64_t channel, T* dx) {
      plane(static_cast<const T*>(a.dy) + (part.image * s.c + channel) * s.ho * s.wo,
            static_cast<const float*>(taps) + channel * kTaps * kTaps, dx, channel);
    });
  };
  if constexpr (kStride == 2) {
    DoubledColumns<T, kTaps> kept(arena, s);
    run(kept, [&](const T* dy, const float* weight, T* dx, int64_t) { kept.run(dy, weight, dx, band); });
  } else {
    KeptColumns<T, kTaps, 1> kept(arena, s.ho, s.w, kTaps - 1 - s.top);
    run(kept, [&](const T* dy, const float* weight, T* dx, int64_t channel) {
      float mirrored[kTaps * kTaps];
      std::reverse_copy(weight, weight + kTaps * kTaps, mirrored);
      kept.run(dy, mirrored, 0.f, dx, band, is_at_end(s, channel), leave);
    });
  }
}

}  // namespace

template <>
DepthwiseDirect depthwise_planes<Isa::FUSEDTRAIN_ISA>(const DepthwiseSizes& s) {
  DepthwiseDirect direct{0, 0, true};
  const bool usual = s.layout == Layout::kContiguous && s.m == 1 && s.kh == s.kw && s.sh == s.sw && s.dil_h == 1 &&
                     s.dil_w == 1 && std::max(s.w, s.wo) <= kMostPlaneCols;
  visit_plane_dtype(s.dtype, [&]<class T>() {
    if (!usual) return;
    visit_plane_kernel(s, [&]<int kTaps, int kStride>() { direct = {s.c, kTaps * kTaps + 1, true}; });
  });
  return direct;
}

template <>
void depthwise_planes_taps<Isa::FUSEDTRAIN_ISA>(const DepthwiseSizes& s, const void* weight, void* taps, int64_t begin,
                                                int64_t end) {
  const int64_t k = s.kh * s.kw;
  visit_plane_dtype(s.dtype, [&]<class T>() {
    const T* from = static_cast<const T*>(weight) + begin * k;
    float* out = static_cast<float*>(taps) + begin * k;
    for_each_vector<PlaneVec>((end - begin) * k,
                              [&](int64_t i, auto lanes) { store(out + i, load<PlaneVec>(from + i, lanes), lanes); });
  });
}

template <>
void depthwise_planes_forward<Isa::FUSEDTRAIN_ISA>(const DepthwiseConv2d& a, const void* taps, void* scratch,
                                                   DepthwisePart part) {
  const DepthwiseSizes& s = a.sizes;
  const Span span = band_rows(part, s.ho);
  visit_plane_dtype(s.dtype, [&]<class T>() {
    if (walks_strips_of_5x5(s) || keeps_columns_well<T>(s)) {
      return visit_kept_kernel(
          s, [&]<int kTaps, int kStride>() { forward_kept<T, kTaps, kStride>(a, taps, scratch, part); });
    }
    visit_plane_kernel(s, [&]<int kTaps, int kStride>() {
      Arena arena(scratch);
      const int64_t first = span.begin * kStride - s.top, count = (span.size() - 1) * kStride + kTaps;
      const int64_t width = round_up(s.wo, kPlaneLanes);
      PaddedRows<kStride> rows[2] = {{arena, s.w, s.left, width + kTaps / kStride, count},
                                     {arena, s.w, s.left, width + kTaps / kStride, count}};
      float* buffer = arena.take<float>(kMostTile * width);
      const auto fill = [&](PaddedRows<kStride>& x, int64_t channel) {
        x.fill(static_cast<const T*>(a.x) + (part.image * s.c + channel) * s.h * s.w, s.h, first, count);
      };
      each_plane(rows, part.begin, part.end, fill, [&](const PaddedRows<kStride>& x, int64_t channel) {
        const float* weight = static_cast<const float*>(taps) + channel * kTaps * kTaps;
        const float bias = a.bias ? load<PlaneVec>(static_cast<const T*>(a.bias) + channel, FirstLanes{1}).v[0] : 0.f;
        T* y = static_cast<T*>(a.y) + ((part.image * s.c + channel) * s.ho + span.begin) * s.wo;
        each_tile(span.size(), [&]<int kRows>(int64_t row) {
          correlate_rows<kTaps, kTaps, kStride, kRows>(x.rows() + row * kStride, 0, x.half(), weight, bias, buffer,
                                                       width);
          put_rows(y + row * s.wo, kRows, s.wo, [&](int64_t t, int64_t col) {
            const PlaneVec value = load<PlaneVec>(buffer + t * width + col);
            return a.act == Activation::kIdentity ? value : activated(a.act, value);
          });
        });
      });
    });
  });
}

template <>
void depthwise_planes_dx<Isa::FUSEDTRAIN_ISA>(const DepthwiseConv2dBackward& a, const void* taps, void* scratch,
                                              DepthwisePart part) {
  const DepthwiseSizes& s = a.sizes;
  visit_plane_dtype(s.dtype, [&]<class T>() {
    if (walks_strips_of_5x5(s) || keeps_columns_well<T>(s)) {
      return visit_kept_kernel(s,
                               [&]<int kTaps, int kStride>() { dx_kept<T, kTaps, kStride>(a, taps, scratch, part); });
    }
    visit_plane_kernel(s, [&]<int kTaps, int kStride>() {
      Arena arena(scratch);
      const PlaneGradient<kTaps, kStride> gradient(arena, s, part);
      const auto& [above, before] = std::tie(gradient.above, gradient.before);
      const int64_t count = gradient.q.size() + above.before + above.behind;
      const int64_t needed = gradient.width + before.before + before.behind;
      PaddedRows<1> rows[2] = {{arena, s.wo, before.before, needed, count},
                               {arena, s.wo, before.before, needed, count}};
      const auto fill = [&](PaddedRows<1>& dy, int64_t channel) {
        dy.fill(static_cast<const T*>(a.dy) + (part.image * s.c + channel) * s.ho * s.wo, s.ho,
                gradient.q.begin - above.before, count);
      };
      each_plane(rows, part.begin, part.end, fill, [&](const PaddedRows<1>& dy, int64_t channel) {
        gradient.write(dy, static_cast<const float*>(taps) + channel * kTaps * kTaps,
                       static_cast<T*>(a.dx) + (part.image * s.c + channel) * s.h * s.w);
      });
    });
  });
}

}  // namespace fusedtrain::cpu

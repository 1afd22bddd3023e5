// depthwise_conv2d on the CPU, contiguous images and square kernels of 3, 5 or 7: dw and db, plane by plane.
//   dw[ky, kx] = sum_{n, oy, ox} dy[oy, ox] * x[oy * s + ky - top, ox * s + kx - left]
//   db         = sum_{n, oy, ox} dy[oy, ox]
// Each lane sums its own columns; the lanes of all sums are added together at the end of a band.
#include "cpu/depthwise_planes.h"

namespace fusedtrain::cpu {
namespace {

using V = PlaneVec;

// Lane i = the sum over the lanes of v[i]: v[i] and v[i + distance] are folded into one vector, half each.
template <int kDistance = V::kLanes / 2>
V lane_sums(V* v) {
  if constexpr (kDistance > 0) {
    unroll<kDistance>([&](auto i) {
      const auto a = v[i].v, b = v[i + kDistance].v;
      v[i].v = first_blocks<V::kLanes, kDistance>(a, b) + second_blocks<V::kLanes, kDistance>(a, b);
    });
    return lane_sums<kDistance / 2>(v);
  } else {
    return v[0];
  }
}

// A band of rows of dy against the rows of x it meets, for kRows rows of the kernel: sums[ky][kx] in place.
template <int kTaps, int kStride, int kRows>
[[gnu::noinline]] void dot_rows(const float* dy, int64_t wo, int64_t count, const float* const* rows, int64_t half,
                                V* out) {
  constexpr int kTile = kRows * kTaps <= kSums - 12 ? 4 : 2;  // rows of dy at a time
  V sums[kRows][kTaps];
  const auto each_sum = [&](auto f) __attribute__((always_inline)) {
    unroll<kRows>([&](auto ky) __attribute__((always_inline)) {
      unroll<kTaps>([&](auto kx) __attribute__((always_inline)) { f(ky, kx); });
    });
  };
  each_sum([&](auto ky, auto kx) __attribute__((always_inline)) { sums[ky][kx] = V(0); });
  const int64_t whole = wo / kPlaneLanes * kPlaneLanes;
  const auto tile = [&]<int kNow>(std::integral_constant<int, kNow>, int64_t first) __attribute__((always_inline)) {
    const auto step = [&](int64_t col, auto lanes) __attribute__((always_inline)) {
      V g[kNow];
      unroll<kNow>([&](auto t) __attribute__((always_inline)) {
        fetch_ahead(dy + (first + t) * wo + col);
        g[t] = load<V>(dy + (first + t) * wo + col, lanes);
      });
      unroll<(kNow - 1) * kStride + kRows>([&](auto row) __attribute__((always_inline)) {
        const float* p = rows[first * kStride + row] + col;
        unroll<kTaps>([&](auto kx) __attribute__((always_inline)) {
          // What stands behind a row may be NaN: it must not meet the zeros behind dy.
          const V x = keep(load<V>(p + kx % kStride * half + kx / kStride), lanes);
          unroll<kNow>([&](auto t) __attribute__((always_inline)) {
            constexpr int ky = row - t * kStride;
            if constexpr (ky >= 0 && ky < kRows) sums[ky][kx] += g[t] * x;
          });
        });
      });
    };
    for (int64_t col = 0; col < whole; col += kPlaneLanes) step(col, AllLanes{});
    if (whole < wo) step(whole, FirstLanes{int(wo - whole)});
  };
  int64_t row = 0;
  for (; row + kTile <= count; row += kTile) tile(std::integral_constant<int, kTile>{}, row);
  for (; row < count; ++row) tile(std::integral_constant<int, 1>{}, row);
  each_sum([&](auto ky, auto kx) __attribute__((always_inline)) { out[ky * kTaps + kx] = sums[ky][kx]; });
}

// As dot, of 3x3 kernels that keep the columns or halve them.
template <int kStride, class T>
[[gnu::noinline]] void dot_along(const PlaneRows<T>& dy, int64_t count, const PlaneRows<T>& x, V* out) {
  V sums[9];
  unroll<9>([&](auto i) __attribute__((always_inline)) { sums[i] = V(0); });
  const auto tile = [&]<int kNow>(std::integral_constant<int, kNow>, int64_t row) __attribute__((always_inline)) {
    const T *rows[(kNow - 1) * kStride + 3], *ahead = x.ahead(row * kStride, kStride);
    const T *dy_rows[kNow], *dy_ahead = dy.ahead(row);
    x.find(row * kStride, rows);
    dy.find(row, dy_rows);
    const auto step = [&](int64_t col, auto lanes, const auto& each_row) __attribute__((always_inline)) {
      fetch_rows<kNow * kStride * kStride>(ahead, col);
      fetch_rows<kNow>(dy_ahead, col);
      V g[kNow];
      unroll<kNow>([&](auto t) __attribute__((always_inline)) { g[t] = load<V>(dy_rows[t] + col, lanes); });
      each_row([&](auto r, const V(&columns)[3]) __attribute__((always_inline)) {
        unroll<3>([&](auto kx) __attribute__((always_inline)) {
          // Behind a row stand zeros, but for its last column: that must not meet the zeros behind dy, it may be NaN.
          const V column = kx == 0 ? keep(columns[kx], lanes) : columns[kx];
          unroll<kNow>([&](auto t) __attribute__((always_inline)) {
            constexpr int ky = r - t * kStride;
            if constexpr (ky >= 0 && ky < 3) sums[ky * 3 + kx] += g[t] * column;
          });
        });
      });
    };
    walk_rows<kStride>(rows, x.w, step);
  };
  int64_t row = 0;  // loops one after the other: in one, the sums would go through memory
  for (; row + 4 <= count; row += 4) tile(std::integral_constant<int, 4>{}, row);
  for (; row + 3 <= count; row += 3) tile(std::integral_constant<int, 3>{}, row);
  for (; row < count; ++row) tile(std::integral_constant<int, 1>{}, row);
  unroll<9>([&](auto i) __attribute__((always_inline)) { out[i] = sums[i]; });
}

// As dot, of 5x5 kernels that halve the columns: what one vector of columns of dy gives, added to that of those before.
template <bool kLeftmost, class T, class Lanes>
[[gnu::noinline]] void dot_down(const PlaneRows<T>& dy, int64_t count, const PlaneRows<T>& x, int64_t col, Lanes lanes,
                                V* out) {
  V sums[5][5];
  const auto each_sum = [&](auto f) __attribute__((always_inline)) {
    unroll<5>([&](auto ky) __attribute__((always_inline)) {
      unroll<5>([&](auto kx) __attribute__((always_inline)) { f(sums[ky][kx], out[ky * 5 + kx]); });
    });
  };
  each_sum([](V & sum, V&) __attribute__((always_inline)) { sum = V(0); });
  V last(0), before(0), now(0);  // rows j - 2, j - 1 and j of dy
  const auto add = [](V(&row)[5], V g, const V(&columns)[5]) __attribute__((always_inline)) {
    unroll<5>([&](auto kx) __attribute__((always_inline)) { row[kx] += g * columns[kx]; });
  };
  walk_down<kLeftmost>(
      x, count, col, lanes, [&](int64_t j, const auto& even, const auto& odd) __attribute__((always_inline)) {
        if (j < count) now = load<V>(dy.at(j) + col, lanes);
        even([&](V(&columns)[5]) __attribute__((always_inline)) {
          columns[0] = keep(columns[0], lanes);  // see dot_along
          columns[1] = keep(columns[1], lanes);
          if (j < count) add(sums[0], now, columns);
          if (j >= 1 && j <= count) add(sums[2], before, columns);
          if (j >= 2) add(sums[4], last, columns);
        });
        if (j <= count) {
          odd([&](V(&columns)[5]) __attribute__((always_inline)) {
            columns[0] = keep(columns[0], lanes);
            columns[1] = keep(columns[1], lanes);
            if (j < count) add(sums[1], now, columns);
            if (j >= 1) add(sums[3], before, columns);
          });
        }
        last = before;
        before = now;
      });
  each_sum([](V & sum, V & total) __attribute__((always_inline)) { total = kLeftmost ? sum : total + sum; });
}

// As dot, of 3x3 kernels at stride 1, a vector of columns at a time.
template <bool kAtEnd, class T>
[[gnu::noinline]] void dot_strips(const PlaneRows<T>& dy, int64_t count, const PlaneRows<T>& x, V* out) {
  V sums[3][3];
  unroll<9>([&](auto i) __attribute__((always_inline)) { sums[i / 3][i % 3] = V(0); });
  each_strip<kAtEnd>(
      x.w, [&](int64_t col, auto lanes) __attribute__((always_inline)) {
        V last(0), before(0), now(0);  // rows j - 2, j - 1 and j of dy
        const auto each = [&](int64_t j, bool inside, const auto& column) __attribute__((always_inline)) {
          last = before;
          before = now;
          if (j < count) {
            const T* p = dy.at(j) + col;
            __builtin_prefetch(reinterpret_cast<const char*>(p) + 2 * kAheadBytes, 0, 2);
            now = kAtEnd ? load<V>(p, lanes) : keep(load<V>(p), lanes);
          }
          if (!inside) return;
          const auto add = [&]<bool kNow, bool kBefore, bool kLast>() __attribute__((always_inline)) {
            unroll<3>([&](auto kx) __attribute__((always_inline)) {
              const V x = column(kx);
              if (kNow) sums[0][kx] += now * x;
              if (kBefore) sums[1][kx] += before * x;
              if (kLast) sums[2][kx] += last * x;
            });
          };
          // What is not there of dy must not meet what may be NaN.
          if (j >= 2 && j < count) return add.template operator()<true, true, true>();
          if (j < count) add.template operator()<true, false, false>();
          if (j >= 1 && j <= count) add.template operator()<false, true, false>();
          if (j >= 2) add.template operator()<false, false, true>();
        };
        walk_strip<3, true>(x, count + 2, col, lanes, each);
      });
  unroll<9>([&](auto i) __attribute__((always_inline)) { out[i] = sums[i / 3][i % 3]; });
}

template <int kTaps, int kStride, class T>
void dot_kept(const PlaneRows<T>& dy, int64_t count, const PlaneRows<T>& x, bool at_end, V* out) {
  if constexpr (kHasStrips && kTaps == 3 && kStride == 1) {
    if (walks_strips<T>(x.w) && (sizeof(T) == 2 || x.w < 2 * kPlaneLanes)) {
      return at_end ? dot_strips<true>(dy, count, x, out) : dot_strips<false>(dy, count, x, out);
    }
  }
  if constexpr (kTaps == 3) {
    dot_along<kStride>(dy, count, x, out);
  } else {
    each_way_down(x.w,
                  [&]<bool kLeftmost>(int64_t col, auto lanes) { dot_down<kLeftmost>(dy, count, x, col, lanes, out); });
  }
}

// The sums of a band for all rows of the kernel, in parts that fit the registers.
template <int kTaps, int kStride>
void dot(const float* dy, int64_t wo, int64_t count, const float* const* rows, int64_t half, V* out) {
  constexpr int kRows = tap_rows(kTaps), kRest = kTaps % kRows;
  int ky = 0;
  for (; ky + kRows <= kTaps; ky += kRows) {
    dot_rows<kTaps, kStride, kRows>(dy, wo, count, rows + ky, half, out + ky * kTaps);
  }
  if constexpr (kRest > 0) dot_rows<kTaps, kStride, kRest>(dy, wo, count, rows + ky, half, out + ky * kTaps);
}

template <class T>
V sum_of(const T* p, int64_t count) {
  V parts[4] = {V(0), V(0), V(0), V(0)};
  for_each_vector<V>(count, [&](int64_t i, auto lanes) { parts[i / kPlaneLanes % 4] += load<V>(p + i, lanes); });
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

// The sums over the lanes of kSize vectors, added to `total`, or its beginning.
template <int64_t kSize>
void add_lane_sums(const V* sums, float* total, bool begins) {
  constexpr int64_t kRest = kSize % kPlaneLanes, kTogether = kRest <= 2 ? kSize - kRest : kSize;
  for_each_vector<V>(kTogether, [&](int64_t i, auto lanes) {
    V parts[kPlaneLanes];
    std::copy_n(sums + i, kPlaneLanes, parts);
    const V sum = lane_sums(parts);
    store(total + i, begins ? sum : load<V>(total + i, lanes) + sum, lanes);
  });
  for (int64_t i = kTogether; i < kSize; ++i) total[i] = (begins ? 0.f : total[i]) + lane_sum(sums[i]);
}

}  // namespace

template <>
void depthwise_planes_dw<Isa::FUSEDTRAIN_ISA>(const DepthwiseConv2dBackward& a, void* scratch, DepthwisePart part,
                                              void* partial, bool begins) {
  const DepthwiseSizes& s = a.sizes;
  const Span span = band_rows(part, s.ho);
  visit_plane_dtype(s.dtype, [&]<class T>() {
    const auto plane = [&](const void* images, int64_t channel, int64_t size) {
      return static_cast<const T*>(images) + (part.image * s.c + channel) * size;
    };
    visit_plane_kernel(s, [&]<int kTaps, int kStride>() {
      constexpr int64_t kSize = kTaps * kTaps + 1;
      const int64_t first = span.begin * kStride - s.top, count = (span.size() - 1) * kStride + kTaps;
      Arena arena(scratch);
      V sums[round_up(kSize, kPlaneLanes)];
      for (V& sum : sums) sum = V(0);
      const auto finish = [&](int64_t channel) {
        const T* dy = plane(a.dy, channel, s.ho * s.wo) + span.begin * s.wo;
        if (a.db) sums[kSize - 1] = sum_of(dy, span.size() * s.wo);
        add_lane_sums<kSize>(sums, static_cast<float*>(partial) + channel * kSize, begins);
      };
      if constexpr (kTaps == 3 || (kTaps == 5 && kStride == 2)) {
        if (keeps_columns_well<T>(s)) {
          T* zeros = arena.take<T>(s.w);
          std::fill_n(zeros, s.w, T{});
          for (int64_t channel = part.begin; channel < part.end; ++channel) {
            const PlaneRows<T> dy{plane(a.dy, channel, s.ho * s.wo), s.ho, s.wo, span.begin, zeros};
            const PlaneRows<T> x{plane(a.x, channel, s.h * s.w), s.h, s.w, first, zeros};
            if (a.dw) dot_kept<kTaps, kStride>(dy, span.size(), x, is_at_end(s, channel), sums);
            finish(channel);
          }
          return;
        }
      }
      const int64_t needed = round_up(s.wo, kPlaneLanes) + kTaps / kStride;
      PaddedRows<kStride> rows[2] = {{arena, s.w, s.left, needed, count}, {arena, s.w, s.left, needed, count}};
      float* gradient = arena.take<float>(span.size() * s.wo + kPlaneLanes);
      const auto fill = [&](PaddedRows<kStride>& x, int64_t channel) {
        if (a.dw) x.fill(plane(a.x, channel, s.h * s.w), s.h, first, count);
      };
      each_plane(rows, part.begin, part.end, fill, [&](const PaddedRows<kStride>& x, int64_t channel) {
        const auto dot_with = [&](const float* dy) {
          dot<kTaps, kStride>(dy, s.wo, span.size(), x.rows(), x.half(), sums);
        };
        const T* dy = plane(a.dy, channel, s.ho * s.wo) + span.begin * s.wo;
        if (a.dw) {
          if constexpr (std::is_same_v<T, float>) {
            dot_with(dy);
          } else {
            for_each_vector<V>(span.size() * s.wo, [&](int64_t i, auto lanes) {
              fetch_ahead(dy + i);
              store(gradient + i, load<V>(dy + i, lanes));
            });
            dot_with(gradient);
          }
        }
        finish(channel);
      });
    });
  });
}

template <>
void depthwise_planes_finish<Isa::FUSEDTRAIN_ISA>(const DepthwiseConv2dBackward& a, int64_t begin, int64_t end) {
  const DepthwiseSizes& s = a.sizes;
  const int64_t k = s.kh * s.kw, size = k + 1, parts = groups(s);
  visit_plane_dtype(s.dtype, [&]<class T>() {
    const auto* partial = static_cast<const float*>(a.partial);
    for (int64_t channel = begin; channel < end; ++channel) {
      for_each_vector<V>(size, [&](int64_t i, auto lanes) {
        V total(0);
        for (int64_t group = 0; group < parts; ++group) {
          total += load<V>(partial + (group * s.c + channel) * size + i, lanes);
        }
        const int64_t taps = std::min(k - i, kPlaneLanes);
        if (a.dw && taps > 0) {
          T* dw = static_cast<T*>(a.dw) + channel * k + i;
          visit_lanes<V>(taps, [&](auto some) { store(dw, total, some); });
        }
        if (a.db && k - i < kPlaneLanes) {
          const V db(total.v[k - i]);
          store(static_cast<T*>(a.db) + channel, db, FirstLanes{1});
        }
      });
    }
  });
}

}  // namespace fusedtrain::cpu

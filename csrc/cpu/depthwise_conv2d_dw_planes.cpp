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
    using Index = RawVec<V::Int>;
    [&]<int... e>(std::integer_sequence<int, e...>) {
      const Index low{(e / kDistance % 2 ? V::kLanes + e - kDistance : e)...};
      const Index high{(e / kDistance % 2 ? V::kLanes + e : e + kDistance)...};
      unroll<kDistance>([&](auto i) {
        const auto a = v[i].v, b = v[i + kDistance].v;
        v[i].v = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
      });
    }(std::make_integer_sequence<int, V::kLanes>{});
    return lane_sums<kDistance / 2>(v);
  } else {
    return v[0];
  }
}

// x with zeros in the lanes that a load of dy left out.
inline V keep(V x, AllLanes) { return x; }
inline V keep(V x, FirstLanes lanes) {
  RawVec<V::Int> index;
  for (int i = 0; i < V::kLanes; ++i) index[i] = i;
  return V(index < lanes.count ? x.v : V(0).v);
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

}  // namespace

template <>
void depthwise_planes_dw<Isa::FUSEDTRAIN_ISA>(const DepthwiseConv2dBackward& a, void* scratch, DepthwisePart part,
                                              void* partial, bool begins) {
  const DepthwiseSizes& s = a.sizes;
  const Span span = band_rows(part, s.ho);
  visit_plane_dtype(s.dtype, [&]<class T>() {
    visit_plane_kernel(s, [&]<int kTaps, int kStride>() {
      constexpr int64_t kSize = kTaps * kTaps + 1;
      Arena arena(scratch);
      const int64_t first = span.begin * kStride - s.top, count = (span.size() - 1) * kStride + kTaps;
      const int64_t needed = round_up(s.wo, kPlaneLanes) + kTaps / kStride;
      PaddedRows<kStride> rows[2] = {{arena, s.w, s.left, needed, count}, {arena, s.w, s.left, needed, count}};
      float* gradient = arena.take<float>(span.size() * s.wo + kPlaneLanes);
      V sums[round_up(kSize, kPlaneLanes)];
      for (V& sum : sums) sum = V(0);
      const auto fill = [&](PaddedRows<kStride>& x, int64_t channel) {
        if (a.dw) x.fill(static_cast<const T*>(a.x) + (part.image * s.c + channel) * s.h * s.w, s.h, first, count);
      };
      each_plane(rows, part.begin, part.end, fill, [&](const PaddedRows<kStride>& x, int64_t channel) {
        const T* dy = static_cast<const T*>(a.dy) + ((part.image * s.c + channel) * s.ho + span.begin) * s.wo;
        const auto dot_with = [&](const float* widened) {
          dot<kTaps, kStride>(widened, s.wo, span.size(), x.rows(), x.half(), sums);
        };
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
        if (a.db) sums[kSize - 1] = sum_of(dy, span.size() * s.wo);
        float* total = static_cast<float*>(partial) + channel * kSize;
        for_each_vector<V>(kSize, [&](int64_t i, auto lanes) {
          V parts[kPlaneLanes];
          std::copy_n(sums + i, kPlaneLanes, parts);
          const V sum = lane_sums(parts);
          store(total + i, begins ? sum : load<V>(total + i, lanes) + sum, lanes);
        });
      });
    });
  });
}

template <>
void depthwise_planes_finish<Isa::FUSEDTRAIN_ISA>(const DepthwiseConv2dBackward& a, int64_t begin, int64_t end) {
  const DepthwiseSizes& s = a.sizes;
  const int64_t k = s.kh * s.kw, size = k + 1;
  visit_plane_dtype(s.dtype, [&]<class T>() {
    const auto* partial = static_cast<const float*>(a.partial);
    for (int64_t channel = begin; channel < end; ++channel) {
      for_each_vector<V>(size, [&](int64_t i, auto lanes) {
        V total(0);
        for (int64_t group = 0; group < groups(s); ++group) {
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

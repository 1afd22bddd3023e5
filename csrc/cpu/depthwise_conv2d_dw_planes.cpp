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

// Zeros in all lanes but the first `count`: what stands behind a row must not meet the zeros behind dy, it may be NaN.
struct KeepAll {
  V operator()(V x) const { return x; }
};
struct KeepFirst {
  RawVec<V::Int> mask{};
  explicit KeepFirst(int64_t count) {
    for (int i = 0; i < V::kLanes; ++i) mask[i] = i < count ? -1 : 0;
  }
  V operator()(V x) const { return V(reinterpret_cast<V::Raw>(reinterpret_cast<RawVec<V::Int>>(x.v) & mask)); }
};

// A band of rows of dy against the rows of x it meets, for kRows rows of the kernel: sums[ky][kx] in place.
template <int kTaps, int kStride, int kRows>
[[gnu::noinline]] void dot_rows(const float* dy, int64_t pitch, int64_t wo, int64_t count, const float* const* rows,
                                int64_t half, V* out) {
  constexpr int kTile = kRows * kTaps <= kSums - 12 ? 4 : 2;  // rows of dy at a time
  V sums[kRows][kTaps];
  const auto each_sum = [&](auto f) __attribute__((always_inline)) {
    unroll<kRows>([&](auto ky) __attribute__((always_inline)) {
      unroll<kTaps>([&](auto kx) __attribute__((always_inline)) { f(ky, kx); });
    });
  };
  each_sum([&](auto ky, auto kx) __attribute__((always_inline)) { sums[ky][kx] = V(0); });
  const int64_t whole = wo / kPlaneLanes * kPlaneLanes;
  const KeepFirst keep_rest(wo - whole);
  const auto tile = [&]<int kNow>(std::integral_constant<int, kNow>, int64_t first) __attribute__((always_inline)) {
    const auto step = [&](int64_t col, auto lanes, auto keep) __attribute__((always_inline)) {
      V g[kNow];
      unroll<kNow>([&](auto t)
                       __attribute__((always_inline)) { g[t] = load<V>(dy + (first + t) * pitch + col, lanes); });
      unroll<(kNow - 1) * kStride + kRows>([&](auto row) __attribute__((always_inline)) {
        const float* p = rows[first * kStride + row] + col;
        unroll<kTaps>([&](auto kx) __attribute__((always_inline)) {
          const V x = keep(load<V>(p + kx % kStride * half + kx / kStride));
          unroll<kNow>([&](auto t) __attribute__((always_inline)) {
            constexpr int ky = row - t * kStride;
            if constexpr (ky >= 0 && ky < kRows) sums[ky][kx] += g[t] * x;
          });
        });
      });
    };
    for (int64_t col = 0; col < whole; col += kPlaneLanes) step(col, AllLanes{}, KeepAll{});
    if (whole < wo) step(whole, FirstLanes{int(wo - whole)}, keep_rest);
  };
  int64_t row = 0;
  for (; row + kTile <= count; row += kTile) tile(std::integral_constant<int, kTile>{}, row);
  for (; row < count; ++row) tile(std::integral_constant<int, 1>{}, row);
  each_sum([&](auto ky, auto kx) __attribute__((always_inline)) { out[ky * kTaps + kx] = sums[ky][kx]; });
}

// The sums of a band for all rows of the kernel, in parts that fit the registers.
template <int kTaps, int kStride>
void dot(const float* dy, int64_t pitch, int64_t wo, int64_t count, const float* const* rows, int64_t half, V* out) {
  constexpr int kRows = tap_rows(kTaps), kRest = kTaps % kRows;
  int ky = 0;
  for (; ky + kRows <= kTaps; ky += kRows) {
    dot_rows<kTaps, kStride, kRows>(dy, pitch, wo, count, rows + ky, half, out + ky * kTaps);
  }
  if constexpr (kRest > 0) dot_rows<kTaps, kStride, kRest>(dy, pitch, wo, count, rows + ky, half, out + ky * kTaps);
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
  const Span span = band_rows(s, s.ho, part.band);
  visit_plane_dtype(s.dtype, [&]<class T>() {
    visit_plane_kernel(s, [&]<int kTaps, int kStride>() {
      constexpr int64_t kSize = kTaps * kTaps + 1;
      Arena arena(scratch);
      const int64_t first = span.begin * kStride - s.top, count = (span.size() - 1) * kStride + kTaps;
      PaddedRows<kStride> rows(arena, s.w, s.left, round_up(s.wo, kPlaneLanes) + kTaps / kStride, count);
      float* gradient = arena.take<float>(span.size() * s.wo + kPlaneLanes);
      V sums[round_up(kSize, kPlaneLanes)];
      for (V& sum : sums) sum = V(0);
      for (int64_t channel = part.begin; channel < part.end; ++channel) {
        const int64_t plane = part.image * s.c + channel;
        const T* dy = static_cast<const T*>(a.dy) + (plane * s.ho + span.begin) * s.wo;
        if (a.dw) {
          rows.fill(static_cast<const T*>(a.x) + plane * s.h * s.w, s.h, first, count);
          const auto dot_with = [&](const float* widened, int64_t pitch) {
            dot<kTaps, kStride>(widened, pitch, s.wo, span.size(), rows.rows(), rows.half(), sums);
          };
          if constexpr (std::is_same_v<T, float>) {
            dot_with(dy, s.wo);
          } else {
            for_each_vector<V>(span.size() * s.wo,
                               [&](int64_t i, auto lanes) { store(gradient + i, load<V>(dy + i, lanes)); });
            dot_with(gradient, s.wo);
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
      }
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

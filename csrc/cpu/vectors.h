#pragma once
// What the kernels of convolutions share beyond core/simd.h: vectors by the dozen, and products. Internal linkage, as
// there.
#include <utility>

#include "core/simd.h"

namespace fusedtrain::cpu {
namespace {

// f(integral_constant<int, 0>), ..., f(integral_constant<int, N - 1>). An expansion of a pack would be one function
// more for the compiler to inline, which in nested loops is a fifth of its time.
template <int N, class F>
[[gnu::always_inline]] inline void unroll(F&& f) {
  static_assert(N <= 16);
  if constexpr (N > 0) f(std::integral_constant<int, 0>{});
  if constexpr (N > 1) f(std::integral_constant<int, 1>{});
  if constexpr (N > 2) f(std::integral_constant<int, 2>{});
  if constexpr (N > 3) f(std::integral_constant<int, 3>{});
  if constexpr (N > 4) f(std::integral_constant<int, 4>{});
  if constexpr (N > 5) f(std::integral_constant<int, 5>{});
  if constexpr (N > 6) f(std::integral_constant<int, 6>{});
  if constexpr (N > 7) f(std::integral_constant<int, 7>{});
  if constexpr (N > 8) f(std::integral_constant<int, 8>{});
  if constexpr (N > 9) f(std::integral_constant<int, 9>{});
  if constexpr (N > 10) f(std::integral_constant<int, 10>{});
  if constexpr (N > 11) f(std::integral_constant<int, 11>{});
  if constexpr (N > 12) f(std::integral_constant<int, 12>{});
  if constexpr (N > 13) f(std::integral_constant<int, 13>{});
  if constexpr (N > 14) f(std::integral_constant<int, 14>{});
  if constexpr (N > 15) f(std::integral_constant<int, 15>{});
}

// Of a and b in blocks of kSize elements: the first, third, ... blocks, in turn from a and from b, and the other ones.
template <int kLanes, int kSize, class R>
[[gnu::always_inline]] inline R first_blocks(R a, R b) {
  return [&]<int... e>(std::integer_sequence<int, e...>) __attribute__((always_inline)) {
    return shuffle<(e / kSize % 2 ? kLanes + e - kSize : e)...>(a, b);
  }
  (std::make_integer_sequence<int, kLanes>{});
}
template <int kLanes, int kSize, class R>
[[gnu::always_inline]] inline R second_blocks(R a, R b) {
  return [&]<int... e>(std::integer_sequence<int, e...>) __attribute__((always_inline)) {
    return shuffle<(e / kSize % 2 ? kLanes + e : e + kSize)...>(a, b);
  }
  (std::make_integer_sequence<int, kLanes>{});
}

// Transposes kLanes vectors in place: blocks of half the size are exchanged, then quarters, ...
template <class V, int kDistance = V::kLanes / 2>
[[gnu::always_inline]] inline void transpose(V* rows) {
  if constexpr (kDistance > 0) {
    unroll<V::kLanes>([&](auto i) __attribute__((always_inline)) {
      if constexpr (i / kDistance % 2 == 0) {
        const auto a = rows[i].v, b = rows[i + kDistance].v;
        rows[i].v = first_blocks<V::kLanes, kDistance>(a, b);
        rows[i + kDistance].v = second_blocks<V::kLanes, kDistance>(a, b);
      }
    });
    transpose<V, kDistance / 2>(rows);
  }
}

// sum + a * b, rounded once where there is an instruction for it. Left to the compiler, g++ 12 takes two in large
// tiles.
template <class V>
[[gnu::always_inline]] inline V multiply_add(V sum, V a, V b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<typename V::Lane, float>) return V{_mm512_fmadd_ps(a.v, b.v, sum.v)};
  if constexpr (std::is_same_v<typename V::Lane, double>) return V{_mm512_fmadd_pd(a.v, b.v, sum.v)};
#elif defined(__FMA__)
  if constexpr (std::is_same_v<typename V::Lane, float>) return V{_mm256_fmadd_ps(a.v, b.v, sum.v)};
  if constexpr (std::is_same_v<typename V::Lane, double>) return V{_mm256_fmadd_pd(a.v, b.v, sum.v)};
#endif
  return sum + a * b;
}

// The sum of f(integral_constant<int, i>) for i in [begin, begin + N), in pairs, pairs of pairs, ...
template <int N, int begin = 0, class F>
[[gnu::always_inline]] inline auto sum_in_pairs(const F& f) {
  if constexpr (N == 1) {
    return f(std::integral_constant<int, begin>{});
  } else {
    return sum_in_pairs<N / 2, begin>(f) + sum_in_pairs<N - N / 2, begin + N / 2>(f);
  }
}

// Two bfloat16 per lane, the first in the lower half.
struct Pairs {
  RawVec<uint32_t> v;
};
#if defined(__AVX512F__)
// Where rounds_to_bf16_by_instruction, one instruction adds both products to the float of the lane. It takes subnormal
// numbers for 0, as torch's kernels do, which use it too. Not as an intrinsic, which the flags of this variant forbid.
// The check must stand before the loops that load a and b: then nothing of it can be executed early.
[[gnu::always_inline]] inline Vec<float> multiply_add(Vec<float> sum, Pairs a, Pairs b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "vm"(b.v));
  return sum;
}
// Such sums as bfloat16: unlike narrow() it has no code for subnormal numbers, which they are not.
[[gnu::always_inline]] inline Half narrow_sums(Vec<float> sums) {
  Half bits;
  asm volatile("vcvtneps2bf16 %1, %0" : "=v"(bits) : "v"(sums.v));
  return bits;
}
#endif

}  // namespace
}  // namespace fusedtrain::cpu

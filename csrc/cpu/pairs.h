#pragma once
// Steps of products whose sums stay in registers: one number of a channel, or a pair. Internal linkage, as in
// core/simd.h.
#include "cpu/vectors.h"

namespace fusedtrain::cpu {
namespace {

// What a step holds of one channel: float, double, or two bfloat16.
struct Pair {
  uint32_t bits;
};
template <class E>
using Sum = std::conditional_t<std::is_same_v<E, double>, double, float>;
template <class E>
constexpr int kLanes = kVecBytes / int(sizeof(E));

template <class E>
[[gnu::always_inline]] inline auto broadcast(E x) {
  if constexpr (std::is_same_v<E, Pair>) {
    return Pairs{RawVec<uint32_t>{} + x.bits};
  } else {
    return Vec<E>(x);
  }
}

}  // namespace
}  // namespace fusedtrain::cpu

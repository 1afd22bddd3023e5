#pragma once
// core/visit.h for compilers of tests, with fewer kernels, by macros:
//
//   OWN_KERNELS  the activations that keep kernels of their own; the others are left to the kernels for any activation
//   ANY_HALF     the element type that stands for both of 16 bits, where their values do not matter
#include <type_traits>

#include "core/types.h"

namespace fusedtrain {

template <class T>
constexpr bool is_left_out(T value) {
  if constexpr (std::is_same_v<T, Activation>) {
    using enum Activation;
    for (T own : {OWN_KERNELS}) {
      if (value == own) return false;
    }
    return true;
  }
  return false;
}

template <class T>
constexpr T stand_in(T value) {
#ifdef ANY_HALF
  if constexpr (std::is_same_v<T, DType>) {
    using enum DType;
    if (value == kBFloat16 || value == kFloat16) return ANY_HALF;
  }
#endif
  return value;
}

template <auto V, class F>
bool visit_one(auto value, F& f) {
  if constexpr (is_left_out(V))
    return false;
  else
    return value == V ? (f.template operator()<stand_in(V)>(), true) : false;
}

template <auto... Vs, class F>
bool visit(auto value, F&& f) {
  return (visit_one<Vs>(value, f) || ...);
}

template <class F>
void visit_bool(bool value, F&& f) {
  value ? f.template operator()<true>() : f.template operator()<false>();
}

}  // namespace fusedtrain

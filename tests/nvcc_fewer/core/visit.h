#pragma once
// core/visit.h for the gates on registers and machine code: silu, which takes most registers, stands for every
// activation with kernels of its own, and float16 for bfloat16, which is as large. That is a third of the kernels.
#include <type_traits>

#include "core/types.h"

namespace fusedtrain {

template <class T>
constexpr T stand_in(T value) {
  if constexpr (std::is_same_v<T, Activation>) return T::kSilu;
  if constexpr (std::is_same_v<T, DType>) return value == T::kBFloat16 ? T::kFloat16 : value;
  return value;
}

template <auto... Vs, class F>
bool visit(auto value, F&& f) {
  return ((value == Vs ? (f.template operator()<stand_in(Vs)>(), true) : false) || ...);
}

template <class F>
void visit_bool(bool value, F&& f) {
  value ? f.template operator()<true>() : f.template operator()<false>();
}

}  // namespace fusedtrain

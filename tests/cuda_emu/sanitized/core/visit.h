#pragma once
// core/visit.h for the sanitizers, which follow memory and not values: relu stands for every activation but the
// identity, which may read less, and bfloat16 for float16, which is as large. That is half of the kernels.
#include <type_traits>

#include "core/types.h"

namespace fusedtrain {

template <class T>
constexpr T stand_in(T value) {
  if constexpr (std::is_same_v<T, Activation>) return value == T::kIdentity ? value : T::kRelu;
  if constexpr (std::is_same_v<T, DType>) return value == T::kFloat16 ? T::kBFloat16 : value;
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

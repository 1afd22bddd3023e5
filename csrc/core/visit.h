#pragma once
// Run-time values become template arguments here and nowhere else:
//   visit<Activation::kRelu, Activation::kSilu>(a.act, [&]<Activation A>() { ... });
namespace fusedtrain {

// Calls f.template operator()<V>() for the V that equals `value`; returns false when none does.
template <auto... Vs, class F>
bool visit(auto value, F&& f) {
  return ((value == Vs ? (f.template operator()<Vs>(), true) : false) || ...);
}

template <class F>
void visit_bool(bool value, F&& f) {
  value ? f.template operator()<true>() : f.template operator()<false>();
}

}  // namespace fusedtrain

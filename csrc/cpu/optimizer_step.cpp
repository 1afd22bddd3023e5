// optimizer_step on the CPU: parameter, gradient and states are read and written once, a vector at a time.
#include "optimizer_step.h"

#include "cpu/lists.h"

namespace fusedtrain::cpu {
namespace {

template <class R>
R rule_of(const OptimizerStep& a, const StepTensor& t) {
  const double ratio = R::kNorms && a.ratio != nullptr ? a.ratio[&t - a.tensors] : 1.0;
  return R(a.hyper, t.step != nullptr ? *t.step + 1.0 : 1.0, ratio);
}

// Elements [first, last) of one parameter: the two sums of the rule's first pass.
template <class T, class R>
void norms(const OptimizerStep& a, const StepTensor& t, double factor, int64_t first, int64_t last, double* result) {
  using V = Vec<Acc<T>>;
  const R rule = rule_of<R>(a, t);
  const V f{Acc<T>(factor)};
  T *param = static_cast<T*>(t.param), *grad = static_cast<T*>(t.grad), *states[kMaxStates];
  for (int k = 0; k < R::kStates; ++k) states[k] = static_cast<T*>(t.states[k]);
  constexpr int64_t kBlock = 32 * V::kLanes;  // of elements that are summed in the accumulation type
  result[0] = result[1] = 0;
  for (; first < last; first += kBlock) {
    V sums[2] = {V(0), V(0)};
    for_each_vector<V>(std::min(kBlock, last - first), [&](int64_t offset, auto lanes) {
      const int64_t i = first + offset;
      const V p = load<V>(param + i, lanes), g = load<V>(grad + i, lanes) * f;
      V s[kMaxStates], squares[2] = {V(0), V(0)};
      for (int k = 0; k < R::kStates; ++k) s[k] = load<V>(states[k] + i, lanes);
      if constexpr (R::kStatesFirst) {
        rule.advance(g, s);
        for (int k = 0; k < R::kStates; ++k) store(states[k] + i, s[k], lanes);
        for (int k = 0; k < R::kStates; ++k) s[k] = round_to<T>(s[k]);  // as the second pass reads them
      }
      rule.norms(p, g, s, squares);
      for (int k = 0; k < 2; ++k) sums[k] += squares[k];
    });
    for (int k = 0; k < 2; ++k) result[k] += lane_sum(sums[k]);
  }
}

// Elements [first, last) of one parameter.
template <class T, class R>
void update(const OptimizerStep& a, const StepTensor& t, double factor, int64_t first, int64_t last) {
  using A = Acc<T>;
  using V = Vec<A>;
  const R rule = rule_of<R>(a, t);
  const V f{A(factor)}, ema_rate{A(1 - a.ema_decay)};
  T *param = static_cast<T*>(t.param), *grad = static_cast<T*>(t.grad), *states[kMaxStates];
  for (int k = 0; k < R::kStates; ++k) states[k] = static_cast<T*>(t.states[k]);
  A* ema = static_cast<A*>(t.ema);
  const bool zero_grads = a.zero_grads;
  for_each_vector<V>(last - first, [=](int64_t offset, auto lanes) {
    const int64_t i = first + offset;
    V s[kMaxStates];
    for (int k = 0; k < R::kStates; ++k) s[k] = load<V>(states[k] + i, lanes);
    const V p = rule(load<V>(param + i, lanes), load<V>(grad + i, lanes) * f, s);
    store(param + i, p, lanes);
    for (int k = 0; !R::kStatesFirst && k < R::kStates; ++k) store(states[k] + i, s[k], lanes);
    if (ema != nullptr) {
      const V mean = load<V>(ema + i, lanes);
      store(ema + i, mean + ema_rate * (round_to<T>(p) - mean), lanes);
    }
    if (zero_grads) store(grad + i, V(0), lanes);
  });
}

template <class T>
void zero(const StepTensor& t, int64_t first, int64_t last) {
  std::memset(static_cast<T*>(t.grad) + first, 0, (last - first) * sizeof(T));
}

}  // namespace

template <>
void optimizer_step_norms<Isa::FUSEDTRAIN_ISA>(const OptimizerStep& a, int64_t begin, int64_t end) {
  const double factor = grad_factor(a);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    for_each_tensor(a, chunk, chunk + 1, [&](const StepTensor& t, int64_t first, int64_t last) {
      visit_dtype(t.dtype, [&]<class T>() {
        visit_rule<Acc<T>>(a.rule, [&]<class R>() {
          if constexpr (R::kNorms) norms<T, R>(a, t, factor, first, last, a.partial + 2 * chunk);
        });
      });
    });
  }
}

template <>
void optimizer_step<Isa::FUSEDTRAIN_ISA>(const OptimizerStep& a, int64_t begin, int64_t end) {
  const double factor = grad_factor(a);
  const bool skipped = is_skipped(a);
  if (skipped && !a.zero_grads) return;
  for_each_tensor(a, begin, end, [&](const StepTensor& t, int64_t first, int64_t last) {
    visit_dtype(t.dtype, [&]<class T>() {
      if (skipped) return zero<T>(t, first, last);
      visit_rule<Acc<T>>(a.rule, [&]<class R>() { update<T, R>(a, t, factor, first, last); });
    });
  });
}

}  // namespace fusedtrain::cpu

// optimizer_step on the CPU: parameter, gradient and states are read and written once, a vector at a time.
#include "optimizer_step.h"

#include "cpu/lists.h"

namespace fusedtrain::cpu {
namespace {

// Elements [first, last) of one parameter.
template <class T, class R>
void update(const OptimizerStep& a, const StepTensor& t, double factor, int64_t first, int64_t last) {
  using A = Acc<T>;
  using V = Vec<A>;
  const R rule(a.hyper, t.step != nullptr ? *t.step + 1.0 : 1.0);
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
    for (int k = 0; k < R::kStates; ++k) store(states[k] + i, s[k], lanes);
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

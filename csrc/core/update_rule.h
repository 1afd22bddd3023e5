#pragma once
// Update rules of the optimizers, one text for g++ (on vectors) and nvcc (on scalars).
//
//   const Adam<float> rule(h, step);          what is the same for all elements of a parameter, computed in double
//   V q = rule(p, g, s);                      the new parameter; s holds kStates values and becomes the new state
//
// A is the accumulation type, V is A or cpu::Vec<A>. h.c holds the coefficients of the rule, `step` counts from 1.
// The states stand in the order in which fusedtrain/ops/optimizer_step.py lists them.
#include <cmath>

#include "core/activation.h"

namespace fusedtrain {

// The values are part of the operator schemas; fusedtrain/ops/_codes.py holds the same list.
enum class Rule : int32_t { kAdam, kAmsgrad, kSgd, kMomentum, kLion };

constexpr int kMaxStates = 3;
constexpr int kCoefficients = 3;

struct Hyper {
  double lr, weight_decay;
  bool decoupled;  // weight decay shrinks the parameter by 1 - lr * weight_decay; else it is added to the gradient
  double c[kCoefficients];
};

FUSEDTRAIN_HD float vsqrt(float x) { return ::sqrtf(x); }
FUSEDTRAIN_HD double vsqrt(double x) { return ::sqrt(x); }

template <class A>
struct WeightDecay {
  A shrink, l2;
  FUSEDTRAIN_HD explicit WeightDecay(const Hyper& h)
      : shrink(h.decoupled ? A(1 - h.lr * h.weight_decay) : A(1)), l2(h.decoupled ? A(0) : A(h.weight_decay)) {}
  // Without weight decay an infinite parameter must not turn its gradient into NaN.
  template <class V>
  FUSEDTRAIN_HD void operator()(V& p, V& g) const {
    if (l2 != A(0)) g += V(l2) * p;
    if (shrink != A(1)) p = p * V(shrink);
  }
};

// Kingma, Ba: Adam, https://arxiv.org/abs/1412.6980; decoupled: AdamW, https://arxiv.org/abs/1711.05101;
// kAmsgrad: https://arxiv.org/abs/1904.09237. c = {beta1, beta2, eps}.
//   m = m + (1 - beta1) (g - m)          v = beta2 v + (1 - beta2) g^2          vmax = max(vmax, v)
//   p = p - lr / (1 - beta1^t) * m / (sqrt(v or vmax) / sqrt(1 - beta2^t) + eps)
template <class A, bool kAmsgrad = false>
struct Adam {
  static constexpr int kStates = kAmsgrad ? 3 : 2;
  WeightDecay<A> decay;
  A rate1, beta2, rate2, step_size, scale, eps;
  FUSEDTRAIN_HD Adam(const Hyper& h, double step)
      : decay(h),
        rate1(A(1 - h.c[0])),
        beta2(A(h.c[1])),
        rate2(A(1 - h.c[1])),
        step_size(A(h.lr / (1 - ::pow(h.c[0], step)))),
        scale(A(1 / ::sqrt(1 - ::pow(h.c[1], step)))),
        eps(A(h.c[2])) {}
  template <class V>
  FUSEDTRAIN_HD V operator()(V p, V g, V* s) const {
    decay(p, g);
    s[0] = s[0] + V(rate1) * (g - s[0]);
    s[1] = V(beta2) * s[1] + V(rate2) * g * g;
    V v = s[1];
    if constexpr (kAmsgrad) v = s[2] = at_least(v, s[2]);
    return p - V(step_size) * (s[0] / (vsqrt(v) * V(scale) + V(eps)));
  }
};
template <class A>
using Amsgrad = Adam<A, true>;

// Stochastic gradient descent: p = p - lr g. No coefficients.
template <class A>
struct Sgd {
  static constexpr int kStates = 0;
  WeightDecay<A> decay;
  A lr;
  FUSEDTRAIN_HD Sgd(const Hyper& h, double) : decay(h), lr(A(h.lr)) {}
  template <class V>
  FUSEDTRAIN_HD V operator()(V p, V g, V*) const {
    decay(p, g);
    return p - V(lr) * g;
  }
};

// With momentum, as torch.optim.SGD has it. c = {momentum, dampening, nesterov: 0 or 1}.
//   b = momentum b + (1 - dampening) g          p = p - lr b, or p - lr (g + momentum b) for nesterov
template <class A>
struct Momentum {
  static constexpr int kStates = 1;
  WeightDecay<A> decay;
  A lr, momentum, rate;
  bool nesterov;
  FUSEDTRAIN_HD Momentum(const Hyper& h, double)
      : decay(h), lr(A(h.lr)), momentum(A(h.c[0])), rate(A(1 - h.c[1])), nesterov(h.c[2] != 0) {}
  template <class V>
  FUSEDTRAIN_HD V operator()(V p, V g, V* s) const {
    decay(p, g);
    s[0] = V(momentum) * s[0] + V(rate) * g;
    return p - V(lr) * (nesterov ? g + V(momentum) * s[0] : s[0]);
  }
};

// Chen et al.: Symbolic Discovery of Optimization Algorithms, https://arxiv.org/abs/2302.06675. c = {beta1, beta2}.
//   p = p - lr sign(beta1 m + (1 - beta1) g)          m = beta2 m + (1 - beta2) g          sign(NaN) = 0, as in torch
template <class A>
struct Lion {
  static constexpr int kStates = 1;
  WeightDecay<A> decay;
  A lr, beta1, rate1, beta2, rate2;
  FUSEDTRAIN_HD Lion(const Hyper& h, double)
      : decay(h), lr(A(h.lr)), beta1(A(h.c[0])), rate1(A(1 - h.c[0])), beta2(A(h.c[1])), rate2(A(1 - h.c[1])) {}
  template <class V>
  FUSEDTRAIN_HD V operator()(V p, V g, V* s) const {
    decay(p, g);
    const V u = V(beta1) * s[0] + V(rate1) * g;
    s[0] = V(beta2) * s[0] + V(rate2) * g;
    return p - vselect(u > V(A(0)), V(lr), vselect(u < V(A(0)), V(-lr), V(A(0))));
  }
};

// f.template operator()<R>() with the rule's type R<A>.
template <class A, class F>
void visit_rule(Rule rule, F&& f) {
  switch (rule) {
    case Rule::kAdam:
      return f.template operator()<Adam<A>>();
    case Rule::kAmsgrad:
      return f.template operator()<Amsgrad<A>>();
    case Rule::kSgd:
      return f.template operator()<Sgd<A>>();
    case Rule::kMomentum:
      return f.template operator()<Momentum<A>>();
    case Rule::kLion:
      return f.template operator()<Lion<A>>();
  }
}

}  // namespace fusedtrain

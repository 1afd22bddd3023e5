#pragma once
// Update rules of the optimizers, one text for g++ (on vectors) and nvcc (on scalars).
//
//   const Adam<float> rule(h, step, ratio);   what is the same for all elements of a parameter, computed in double
//   V q = rule(p, g, s);                      the new parameter; s holds kStates values and becomes the new state
//
// A is the accumulation type, V is A or cpu::Vec<A>. h.c holds the coefficients of the rule, `step` counts from 1.
// The states stand in the order in which fusedtrain/ops/optimizer_step.py lists them.
//
// A rule with kNorms needs sums over the whole parameter, so a pass goes before this one:
//   rule.advance(g, s)                        with kStatesFirst: s becomes the new state here, and not in the last pass
//   rule.norms(p, g, s, squares)              what is to be summed; with kShare the last of kSums is the number of
//                                             elements
//   ratio = R::ratio(h, sums, scalars)        once per parameter; scalars: kScalars numbers that it keeps
#include <cmath>
#include <type_traits>

#include "core/activation.h"

namespace fusedtrain {

// The values are part of the operator schemas; fusedtrain/ops/_codes.py holds the same list.
enum class Rule : int32_t {
  kAdam,
  kAmsgrad,
  kSgd,
  kMomentum,
  kLion,
  kRmsprop,
  kRmspropMomentum,
  kRmspropCentered,
  kRmspropCenteredMomentum,
  kAdan,
  kLamb,
  kNovograd,
  kNovogradAmsgrad,
  kLionCautious,
  kRmspropMomentumCautious,
  kRmspropCenteredMomentumCautious,
  kAdanCautious,
  kLambCautious,
};

constexpr int kRules = int(Rule::kLambCautious) + 1;
constexpr int kMaxStates = 4;
constexpr int kMaxScalars = 2;
constexpr int kCoefficients = 7;
constexpr int kMaxSums = 5;

// What a rule makes of the sums over a parameter: the factor on its step, and on a direction without what caution
// leaves out.
struct Ratio {
  double step = 1, direction = 1;
};

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

// `kUnsigned` is a set of bits: the states that are squares or averages of squares.
struct OnePass {
  static constexpr bool kNorms = false, kStatesFirst = false, kShare = false;
  static constexpr int kScalars = 0, kSums = 0;
  static constexpr unsigned kUnsigned = 0;
};

// Liang et al.: Cautious Optimizers, https://arxiv.org/abs/2411.16085, as in timm: of a direction u what has another
// sign than the gradient is left out, and the rest is divided by its share of the parameter, 1/1000 at least.
struct Cautious {
  static constexpr bool kNorms = true, kStatesFirst = false, kShare = true;
  static constexpr int kScalars = 0, kSums = 2;
  static constexpr unsigned kUnsigned = 0;
  FUSEDTRAIN_HD static double over_share(double agreeing, double numel) {
    const double share = agreeing / numel;
    return 1 / (share > 1e-3 ? share : 1e-3);
  }
  FUSEDTRAIN_HD static Ratio ratio(const Hyper&, const double* sums, float* const*) {
    return {1, over_share(sums[0], sums[1])};
  }
};

// The sums that a first pass adds up.
template <class R>
constexpr int kSummed = R::kSums - R::kShare;

template <bool kCautious>
using MaybeCautious = std::conditional_t<kCautious, Cautious, OnePass>;

// 1 where u points as g does, else 0.
template <class V>
FUSEDTRAIN_HD V agreeing(V u, V g) {
  return vselect(u * g > V(0), V(1), V(0));
}

// Kingma, Ba: Adam, https://arxiv.org/abs/1412.6980; decoupled: AdamW, https://arxiv.org/abs/1711.05101;
// kAmsgrad: https://arxiv.org/abs/1904.09237. c = {beta1, beta2, eps}.
//   m = m + (1 - beta1) (g - m)          v = beta2 v + (1 - beta2) g^2          vmax = max(vmax, v)
//   p = p - lr / (1 - beta1^t) * m / (sqrt(v or vmax) / sqrt(1 - beta2^t) + eps)
template <class A, bool kAmsgrad = false>
struct Adam : OnePass {
  static constexpr int kStates = kAmsgrad ? 3 : 2;
  static constexpr unsigned kUnsigned = 0b110;
  WeightDecay<A> decay;
  A rate1, beta2, rate2, step_size, scale, eps;
  FUSEDTRAIN_HD Adam(const Hyper& h, double step, Ratio)
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
struct Sgd : OnePass {
  static constexpr int kStates = 0;
  WeightDecay<A> decay;
  A lr;
  FUSEDTRAIN_HD Sgd(const Hyper& h, double, Ratio) : decay(h), lr(A(h.lr)) {}
  template <class V>
  FUSEDTRAIN_HD V operator()(V p, V g, V*) const {
    decay(p, g);
    return p - V(lr) * g;
  }
};

// With momentum, as torch.optim.SGD has it. c = {momentum, dampening, nesterov: 0 or 1}.
//   b = momentum b + (1 - dampening) g          p = p - lr b, or p - lr (g + momentum b) for nesterov
template <class A>
struct Momentum : OnePass {
  static constexpr int kStates = 1;
  WeightDecay<A> decay;
  A lr, momentum, rate;
  bool nesterov;
  FUSEDTRAIN_HD Momentum(const Hyper& h, double, Ratio)
      : decay(h), lr(A(h.lr)), momentum(A(h.c[0])), rate(A(1 - h.c[1])), nesterov(h.c[2] != 0) {}
  template <class V>
  FUSEDTRAIN_HD V operator()(V p, V g, V* s) const {
    decay(p, g);
    s[0] = V(momentum) * s[0] + V(rate) * g;
    return p - V(lr) * (nesterov ? g + V(momentum) * s[0] : s[0]);
  }
};

// Chen et al.: Symbolic Discovery of Optimization Algorithms, https://arxiv.org/abs/2302.06675. c = {beta1, beta2}.
//   p = p - lr sign(m + (1 - beta1) (g - m))          m = m + (1 - beta2) (g - m)          sign(NaN) = 0, as in torch
// In this form, timm's, what an infinite gradient has left in m is NaN at the next step, which moves p no more.
template <class A, bool kCautious = false>
struct Lion : MaybeCautious<kCautious> {
  static constexpr int kStates = 1;
  WeightDecay<A> decay;
  A lr, rate1, rate2;
  FUSEDTRAIN_HD Lion(const Hyper& h, double, Ratio ratio)
      : decay(h), lr(A(h.lr * ratio.direction)), rate1(A(1 - h.c[0])), rate2(A(1 - h.c[1])) {}
  template <class V>
  FUSEDTRAIN_HD void norms(V p, V g, const V* s, V* squares) const {
    decay(p, g);
    squares[0] = agreeing(s[0] + V(rate1) * (g - s[0]), g);
  }
  template <class V>
  FUSEDTRAIN_HD V operator()(V p, V g, V* s) const {
    decay(p, g);
    V u = s[0] + V(rate1) * (g - s[0]);
    s[0] = s[0] + V(rate2) * (g - s[0]);
    if constexpr (kCautious) u = u * agreeing(u, g);
    return p - vselect(u > V(A(0)), V(lr), vselect(u < V(A(0)), V(-lr), V(A(0))));
  }
};
template <class A>
using LionCautious = Lion<A, true>;

// Hinton: lecture 6e, https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf; centered: Graves,
// https://arxiv.org/abs/1308.0850. c = {alpha, eps, eps in the root: 0 or 1, momentum, lr in the momentum: 0 or 1}; the
// flags are 0 in torch.optim.RMSprop and 1 in TensorFlow.
//   v = alpha v + (1 - alpha) g^2          a = a + (1 - alpha) (g - a)          u = g / (sqrt(v - a^2) + eps)
//   p = p - lr u, or b = momentum b + u, p = p - lr b          states: v, b, a, as many as there are
template <class A, bool kMomentum = false, bool kCentered = false, bool kCautious = false>
struct Rmsprop : MaybeCautious<kCautious> {
  static constexpr int kStates = 1 + kMomentum + kCentered;
  static constexpr unsigned kUnsigned = 0b1;
  WeightDecay<A> decay;
  A alpha, rate, eps, eps_in_root, momentum, into_buffer, from_buffer;
  FUSEDTRAIN_HD Rmsprop(const Hyper& h, double, Ratio ratio)
      : decay(h),
        alpha(A(h.c[0])),
        rate(A(1 - h.c[0])),
        eps(A(h.c[2] != 0 ? 0 : h.c[1])),
        eps_in_root(A(h.c[2] != 0 ? h.c[1] : 0)),
        momentum(A(h.c[3])),
        into_buffer(A(h.c[4] != 0 ? h.lr : 1)),
        from_buffer(A((h.c[4] != 0 ? 1 : h.lr) * ratio.direction)) {}
  // The states become the new ones; returns the direction without the momentum.
  template <class V>
  FUSEDTRAIN_HD V advance(V g, V* s) const {
    V v = s[0] = V(alpha) * s[0] + V(rate) * g * g;
    if constexpr (kCentered) {
      V& mean = s[1 + kMomentum];
      mean = mean + V(rate) * (g - mean);
      v = at_least(v - mean * mean, V(A(0)));  // a constant gradient has no variance, whatever the rounding
    }
    const V u = g / (vsqrt(v + V(eps_in_root)) + V(eps));
    if constexpr (kMomentum) s[1] = V(momentum) * s[1] + V(into_buffer) * u;
    return u;
  }
  template <class V>
  FUSEDTRAIN_HD void norms(V p, V g, const V* s, V* squares) const {
    V own[kStates];
    for (int k = 0; k < kStates; ++k) own[k] = s[k];
    decay(p, g);
    advance(g, own);
    squares[0] = agreeing(own[1], g);
  }
  template <class V>
  FUSEDTRAIN_HD V operator()(V p, V g, V* s) const {
    decay(p, g);
    const V u = advance(g, s);
    if constexpr (!kMomentum) return p - V(into_buffer * from_buffer) * u;
    if constexpr (kCautious) return p - V(from_buffer) * (s[1] * agreeing(s[1], g));
    return p - V(from_buffer) * s[1];
  }
};

// Xie et al.: Adan, https://arxiv.org/abs/2208.06677. c = {beta1, beta2, beta3, eps}; states m, v, d and the negative
// gradient of the step before, NaN where there was none. Decoupled decay shrinks first, else the step is proximal.
//   d' = g - g_before (0 at first)          m = m + (1 - beta1) (g - m)          d = beta2 d + (1 - beta2) d'
//   v = beta3 v + (1 - beta3) (g + beta2 d')^2
//   p = (p - lr (m / (1 - beta1^t) + beta2 d / (1 - beta2^t)) / (sqrt(v) / sqrt(1 - beta3^t) + eps)) / (1 + lr decay)
template <class A, bool kCautious = false>
struct Adan : MaybeCautious<kCautious> {
  static constexpr int kStates = 4;
  static constexpr unsigned kUnsigned = 0b10;
  A shrink, prox, rate1, beta2, rate2, beta3, rate3, size_m, size_d, scale, eps;
  FUSEDTRAIN_HD Adan(const Hyper& h, double step, Ratio ratio)
      : shrink(A(h.decoupled ? 1 - h.lr * h.weight_decay : 1)),
        prox(A(h.decoupled ? 1 : 1 / (1 + h.lr * h.weight_decay))),
        rate1(A(1 - h.c[0])),
        beta2(A(h.c[1])),
        rate2(A(1 - h.c[1])),
        beta3(A(h.c[2])),
        rate3(A(1 - h.c[2])),
        size_m(A(h.lr * ratio.direction / (1 - ::pow(h.c[0], step)))),
        size_d(A(h.lr * h.c[1] / (1 - ::pow(h.c[1], step)))),
        scale(A(1 / ::sqrt(1 - ::pow(h.c[2], step)))),
        eps(A(h.c[3])) {}
  template <class V>
  FUSEDTRAIN_HD void norms(V, V g, const V* s, V* squares) const {
    squares[0] = agreeing(s[0] + V(rate1) * (g - s[0]), g);
  }
  template <class V>
  FUSEDTRAIN_HD V operator()(V p, V g, V* s) const {
    const V difference = vselect(s[3] == s[3], s[3] + g, V(A(0)));
    s[0] = s[0] + V(rate1) * (g - s[0]);
    s[2] = V(beta2) * s[2] + V(rate2) * difference;
    const V ahead = g + V(beta2) * difference;
    s[1] = V(beta3) * s[1] + V(rate3) * ahead * ahead;
    s[3] = -g;
    const V m = kCautious ? s[0] * agreeing(s[0], g) : s[0];
    const V u = (V(size_m) * m + V(size_d) * s[2]) / (vsqrt(s[1]) * V(scale) + V(eps));
    return (p * V(shrink) - u) * V(prox);
  }
};
template <class A>
using AdanCautious = Adan<A, true>;

// You et al.: LAMB, https://arxiv.org/abs/1904.00962, as in timm. c = {beta1, beta2, eps, rate of the gradient in m,
// bias correction: 0 or 1, trust ratio: 0 or 1, ratio at most 1: 0 or 1}. Decoupled decay shrinks p first.
//   m = beta1 m + rate g          v = beta2 v + (1 - beta2) g^2
//   u = m / (1 - beta1^t) / (sqrt(v) / sqrt(1 - beta2^t) + eps) + decay p          p = p - lr |p| / |u| u
// With caution m / ... is what it leaves of that, a / share, so that |u|^2 = |a|^2 / share^2 + 2 decay a p / share +
// decay^2 |p|^2.
template <class A, bool kCautious = false>
struct Lamb {
  static constexpr bool kNorms = true, kStatesFirst = true, kShare = kCautious;
  static constexpr int kStates = 2, kScalars = 0, kSums = kCautious ? 5 : 2;
  static constexpr unsigned kUnsigned = 0b10;
  A shrink, l2, beta1, rate1, beta2, rate2, correction, scale, eps, step_size;
  FUSEDTRAIN_HD Lamb(const Hyper& h, double step, Ratio ratio)
      : shrink(A(h.decoupled ? 1 - h.lr * h.weight_decay : 1)),
        l2(A(h.decoupled ? 0 : h.weight_decay)),
        beta1(A(h.c[0])),
        rate1(A(h.c[3])),
        beta2(A(h.c[1])),
        rate2(A(1 - h.c[1])),
        correction(A((h.c[4] != 0 ? 1 / (1 - ::pow(h.c[0], step)) : 1) * ratio.direction)),
        scale(A(h.c[4] != 0 ? 1 / ::sqrt(1 - ::pow(h.c[1], step)) : 1)),
        eps(A(h.c[2])),
        step_size(A(h.lr * ratio.step)) {}
  // Without weight decay.
  template <class V>
  FUSEDTRAIN_HD V direction(V g, const V* s) const {
    const V u = V(correction) * s[0] / (vsqrt(s[1]) * V(scale) + V(eps));
    return kCautious ? u * agreeing(u, g) : u;
  }
  template <class V>
  FUSEDTRAIN_HD V decayed(V u, V p) const {
    return l2 != A(0) ? u + V(l2) * p : u;
  }
  template <class V>
  FUSEDTRAIN_HD void advance(V g, V* s) const {
    s[0] = V(beta1) * s[0] + V(rate1) * g;
    s[1] = V(beta2) * s[1] + V(rate2) * g * g;
  }
  template <class V>
  FUSEDTRAIN_HD void norms(V p, V g, const V* s, V* squares) const {
    p = p * V(shrink);
    const V u = direction(g, s);
    squares[0] = p * p;
    if constexpr (kCautious) {
      squares[1] = u * u;
      squares[2] = u * p;
      squares[3] = agreeing(u, g);
    } else {
      squares[1] = decayed(u, p) * decayed(u, p);
    }
  }
  FUSEDTRAIN_HD static Ratio ratio(const Hyper& h, const double* sums, float* const*) {
    Ratio ratio;
    double square = sums[1];
    if constexpr (kCautious) {
      const double over = ratio.direction = Cautious::over_share(sums[3], sums[4]),
                   l2 = h.decoupled ? 0 : h.weight_decay;
      square = over * over * sums[1] + 2 * over * l2 * sums[2] + l2 * l2 * sums[0];
    }
    if (h.c[5] == 0 || !(sums[0] > 0) || !(square > 0)) return ratio;
    ratio.step = ::sqrt(sums[0]) / ::sqrt(square);
    if (h.c[6] != 0 && ratio.step > 1) ratio.step = 1;
    return ratio;
  }
  template <class V>
  FUSEDTRAIN_HD V operator()(V p, V g, V* s) const {
    p = p * V(shrink);
    return p - V(step_size) * decayed(direction(g, s), p);
  }
};
template <class A>
using LambCautious = Lamb<A, true>;

// Ginsburg et al.: NovoGrad, https://arxiv.org/abs/1905.11286, as in timm; kAmsgrad divides by the largest v so far.
// c = {beta1, beta2, eps, rate of the gradient in m}; v and its maximum are numbers, one for each parameter.
//   v = |g|^2 at first, then beta2 v + (1 - beta2) |g|^2          m = beta1 m + rate (g / (sqrt(v) + eps) + decay p)
//   p = p - lr m
template <class A, bool kAmsgrad = false>
struct Novograd {
  static constexpr bool kNorms = true, kStatesFirst = false, kShare = false;
  static constexpr int kStates = 1, kScalars = kAmsgrad ? 2 : 1, kSums = 1;
  static constexpr unsigned kUnsigned = 0;
  WeightDecay<A> decay;
  A lr, beta1, rate, over;
  FUSEDTRAIN_HD Novograd(const Hyper& h, double, Ratio ratio)
      : decay(h), lr(A(h.lr)), beta1(A(h.c[0])), rate(A(h.c[3])), over(A(ratio.direction)) {}
  template <class V>
  FUSEDTRAIN_HD void norms(V, V g, const V*, V* squares) const {
    squares[0] = g * g;
  }
  FUSEDTRAIN_HD static Ratio ratio(const Hyper& h, const double* sums, float* const* scalars) {
    float& v = *scalars[0];
    v = float(v == 0 ? sums[0] : h.c[1] * v + (1 - h.c[1]) * sums[0]);
    double largest = v;
    if constexpr (kAmsgrad) largest = *scalars[1] = !(*scalars[1] > v) ? v : *scalars[1];
    return {1, 1 / (::sqrt(largest) + h.c[2])};
  }
  template <class V>
  FUSEDTRAIN_HD V operator()(V p, V g, V* s) const {
    V u = g * V(over);
    decay(p, u);
    s[0] = V(beta1) * s[0] + V(rate) * u;
    return p - V(lr) * s[0];
  }
};

// f.template operator()<R>() with the rule's type R<A>.
#ifdef __CUDACC__
#pragma nv_exec_check_disable  // f is for the side that calls
#endif
template <class A, class F>
FUSEDTRAIN_HD void visit_rule(Rule rule, F&& f) {
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
    case Rule::kRmsprop:
      return f.template operator()<Rmsprop<A>>();
    case Rule::kRmspropMomentum:
      return f.template operator()<Rmsprop<A, true>>();
    case Rule::kRmspropCentered:
      return f.template operator()<Rmsprop<A, false, true>>();
    case Rule::kRmspropCenteredMomentum:
      return f.template operator()<Rmsprop<A, true, true>>();
    case Rule::kAdan:
      return f.template operator()<Adan<A>>();
    case Rule::kLamb:
      return f.template operator()<Lamb<A>>();
    case Rule::kNovograd:
      return f.template operator()<Novograd<A>>();
    case Rule::kNovogradAmsgrad:
      return f.template operator()<Novograd<A, true>>();
    case Rule::kLionCautious:
      return f.template operator()<LionCautious<A>>();
    case Rule::kRmspropMomentumCautious:
      return f.template operator()<Rmsprop<A, true, false, true>>();
    case Rule::kRmspropCenteredMomentumCautious:
      return f.template operator()<Rmsprop<A, true, true, true>>();
    case Rule::kAdanCautious:
      return f.template operator()<AdanCautious<A>>();
    case Rule::kLambCautious:
      return f.template operator()<LambCautious<A>>();
  }
}

}  // namespace fusedtrain

#pragma once
// Activations and their derivatives, one text for g++ (on vectors) and nvcc (on scalars).
//
//   Act<A>::value(x) = a(x)        Act<A>::slope(x) = da/dx
//
// V is float, double or cpu::Vec. Vectors bring their own v* functions, found by argument-dependent lookup.
// Derivatives at kinks follow torch: relu'(0) = 0, hard_sigmoid'(+-3) = 0, hard_swish'(-3) = 0, hard_swish'(3) = 1;
// of NaN: relu' = 1, hard_sigmoid' = 0, NaN for the others.
#include <cmath>

#include "core/types.h"

#ifdef __CUDACC__
#define FUSEDTRAIN_HD __host__ __device__ __forceinline__
#else
#define FUSEDTRAIN_HD inline
#endif

namespace fusedtrain {

FUSEDTRAIN_HD float vexp(float x) { return ::expf(x); }
FUSEDTRAIN_HD double vexp(double x) { return ::exp(x); }
FUSEDTRAIN_HD float vtanh(float x) { return ::tanhf(x); }
FUSEDTRAIN_HD double vtanh(double x) { return ::tanh(x); }
FUSEDTRAIN_HD float verf(float x) { return ::erff(x); }
FUSEDTRAIN_HD double verf(double x) { return ::erf(x); }
template <class V>
FUSEDTRAIN_HD V vdivide(V a, V b) {
  return a / b;
}
#ifdef __CUDA_ARCH__
FUSEDTRAIN_HD float vdivide(float a, float b) { return __fdividef(a, b); }  // 2 ulp, 0 for b > 2^126: no slow path
#endif
template <class T>
FUSEDTRAIN_HD T vselect(bool condition, T yes, T no) {
  return condition ? yes : no;
}

template <class V>
FUSEDTRAIN_HD V magnitude(V x) {
  return vselect(x < V(0), -x, x);
}

// max(x, low) and min(x, high) that keep NaN, as torch.clamp does.
template <class V>
FUSEDTRAIN_HD V at_least(V x, V low) {
  return vselect(x < low, low, x);
}
template <class V>
FUSEDTRAIN_HD V at_most(V x, V high) {
  return vselect(x > high, high, x);
}

template <Activation A>
struct Act;

template <>
struct Act<Activation::kIdentity> {
  template <class V>
  FUSEDTRAIN_HD static V value(V x) {
    return x;
  }
  template <class V>
  FUSEDTRAIN_HD static V slope(V) {
    return V(1);
  }
};

template <>
struct Act<Activation::kRelu> {
  template <class V>
  FUSEDTRAIN_HD static V value(V x) {
    return at_least(x, V(0));
  }
  template <class V>
  FUSEDTRAIN_HD static V slope(V x) {
    return vselect(x <= V(0), V(0), V(1));
  }
};

template <>
struct Act<Activation::kSigmoid> {
  template <class V>
  FUSEDTRAIN_HD static V value(V x) {
    return vdivide(V(1), V(1) + vexp(-x));
  }
  template <class V>
  FUSEDTRAIN_HD static V slope(V x) {
    const V e = vexp(-magnitude(x));  // e / (1 + e)^2 = s (1 - s), without the cancellation of 1 - s
    const V s = vdivide(V(1), V(1) + e);
    return e * s * s;
  }
};

template <>
struct Act<Activation::kSilu> {
  template <class V>
  FUSEDTRAIN_HD static V value(V x) {
    return vdivide(x, V(1) + vexp(-x));
  }
  template <class V>
  FUSEDTRAIN_HD static V slope(V x) {
    const V s = Act<Activation::kSigmoid>::value(x);
    return s * (V(1) + x * (V(1) - s));
  }
};

template <>
struct Act<Activation::kGelu> {
  static constexpr double kSqrtHalf = 0.70710678118654752440;      // sqrt(1/2)
  static constexpr double kInvSqrtTwoPi = 0.39894228040143267794;  // 1 / sqrt(2 pi)
  template <class V>
  FUSEDTRAIN_HD static V cdf(V x) {
    return V(0.5) * (V(1) + verf(x * V(kSqrtHalf)));
  }
  template <class V>
  FUSEDTRAIN_HD static V value(V x) {
    return x * cdf(x);
  }
  template <class V>
  FUSEDTRAIN_HD static V slope(V x) {
    return cdf(x) + x * V(kInvSqrtTwoPi) * vexp(V(-0.5) * x * x);
  }
};

template <>
struct Act<Activation::kHardSigmoid> {
  template <class V>
  FUSEDTRAIN_HD static V value(V x) {
    return at_most(at_least(x + V(3), V(0)), V(6)) * V(1.0 / 6.0);
  }
  template <class V>
  FUSEDTRAIN_HD static V slope(V x) {
    return vselect(x > V(-3), vselect(x < V(3), V(1.0 / 6.0), V(0)), V(0));
  }
};

template <>
struct Act<Activation::kHardSwish> {
  template <class V>
  FUSEDTRAIN_HD static V value(V x) {
    return x * Act<Activation::kHardSigmoid>::value(x);
  }
  template <class V>
  FUSEDTRAIN_HD static V slope(V x) {
    return vselect(x <= V(-3), V(0), vselect(x >= V(3), V(1), x * V(1.0 / 3.0) + V(0.5)));
  }
};

template <>
struct Act<Activation::kTanh> {
  template <class V>
  FUSEDTRAIN_HD static V value(V x) {
    return vtanh(x);
  }
  template <class V>
  FUSEDTRAIN_HD static V slope(V x) {
    return V(4) * Act<Activation::kSigmoid>::slope(x + x);  // = 1 - tanh(x)^2
  }
};

template <>
struct Act<Activation::kHalfTanh> {
  template <class V>
  FUSEDTRAIN_HD static V value(V x) {
    return Act<Activation::kSigmoid>::value(x + x);
  }
  template <class V>
  FUSEDTRAIN_HD static V slope(V x) {
    return V(2) * Act<Activation::kSigmoid>::slope(x + x);
  }
};

}  // namespace fusedtrain

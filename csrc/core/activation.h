#pragma once
// Activations and their derivatives, one text for g++ (on vectors) and nvcc (on scalars).
//
//   Act<A>::value(x) = a(x)        Act<A>::slope(x) = da/dx
//   Act<A, T>                      the same, good enough for elements of type T, which may be less work
//
// V is float, double or cpu::Vec. Vectors bring their own v* functions, found by argument-dependent lookup.
// Derivatives at kinks follow torch: relu'(0) = 0, hard_sigmoid'(+-3) = 0, hard_swish'(-3) = 0, hard_swish'(3) = 1,
// relu6'(0) = relu6'(6) = 0; of NaN: relu' = relu6' = 1, hard_sigmoid' = 0, NaN for the others.
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
template <class V>
FUSEDTRAIN_HD V vdivide(V a, V b) {
  return a / b;
}
// 1 + e^x, the divisor of the logistic function, for elements of type T.
template <class T, class V>
FUSEDTRAIN_HD V one_plus_exp(V x) {
  return V(1) + vexp(x);
}
#ifdef __CUDA_ARCH__
// 2 ulp and no slow path: 0 for b > 2^126, and 0 for what is below 2^-126.
FUSEDTRAIN_HD float vdivide(float a, float b) {
#ifdef __CUDACC__
  asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(a) : "f"(a), "f"(b));
  return a;
#else
  return __fdividef(a, b);
#endif
}
// For 16-bit elements e^x is one instruction behind a multiplication: its error, |x| 2^-24, is far below their
// rounding.
template <class T>
  requires requires { requires sizeof(T) == 2; }
FUSEDTRAIN_HD float one_plus_exp(float x, float one = 1.f) {
  x *= 1.44269504088896341f;
#ifdef __CUDACC__
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
#else
  x = ::exp2f(x);
#endif
  return one + one * x;
}
template <class T>
FUSEDTRAIN_HD float one_plus_exp(float x, float one = 1.f) {
  return one + one * vexp(x);
}
#endif
// y / (1 + e^-x), for elements of type T.
template <class T, class V>
[[gnu::always_inline]] FUSEDTRAIN_HD V times_logistic(V y, V x) {
  return vdivide(y, one_plus_exp<T>(-x));
}
// The same where s = 1 / (1 + e^-x) is known.
template <class T, class V>
[[gnu::always_inline]] FUSEDTRAIN_HD V times_known_logistic(V y, V s, V /*x*/) {
  return y * s;
}
#ifdef __CUDA_ARCH__
// A quarter of both: a divisor that vdivide takes as long as e^-x is finite.
template <class T>
FUSEDTRAIN_HD float times_logistic(float y, float x) {
  return vdivide(0.25f * y, one_plus_exp<T>(-x, 0.25f));
}
// There s is 0 below 2^-126, where large y make it count.
template <class T>
FUSEDTRAIN_HD float times_known_logistic(float y, float /*s*/, float x) {
  return times_logistic<T>(y, x);
}
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

// Phi(x), the normal distribution, given bell = e^(-x^2 / 2); small values keep their digits, which 1 + erf cancels.
// Phi(-|x|) = bell * P(|x|) / Q(|x|): a minimax fit on [0, 14], where bell underflows (error 6e-9 before rounding).
template <class V>
FUSEDTRAIN_HD V vnormal_cdf(V x, V bell) {
  const V a = at_most(magnitude(x), V(14));
  V p = V(0.0040776446f);
  p = p * a + V(0.04037278f);
  p = p * a + V(0.18246248f);
  p = p * a + V(0.43725178f);
  p = p * a + V(0.5f);
  V q = V(0.010221011f);
  q = q * a + V(0.10120636f);
  q = q * a + V(0.46743086f);
  q = q * a + V(1.1992934f);
  q = q * a + V(1.6723886f);
  q = q * a + V(1.f);
  const V tail = bell * vdivide(p, q);
  return vselect(x < V(0), tail, V(1) - tail);
}
FUSEDTRAIN_HD double vnormal_cdf(double x, double /*bell*/) { return 0.5 * ::erfc(x * -0.70710678118654752440); }
// Both, for elements of type T.
template <class T, class V>
FUSEDTRAIN_HD V bell_of(V x) {
  return vexp(V(-0.5) * x * x);
}
template <class T, class V>
FUSEDTRAIN_HD V normal_cdf_of(V x, V bell) {
  return vnormal_cdf(x, bell);
}

// Act<A, T> also has through(x, dy) = dy a'(x). Where a is flat nothing passes, not even infinity, as in torch.
template <class Self>
struct Through {
  template <class V>
  FUSEDTRAIN_HD static V through(V x, V dy) {
    return dy * Self::slope(x);
  }
};
// Of those with flat parts, that is what they have.
template <class Self>
struct Slope {
  template <class V>
  FUSEDTRAIN_HD static V slope(V x) {
    return Self::through(x, V(1));
  }
};

template <Activation A, class T = void>
struct Act;

template <class T>
struct Act<Activation::kIdentity, T> {
  template <class V>
  FUSEDTRAIN_HD static V value(V x) {
    return x;
  }
  template <class V>
  FUSEDTRAIN_HD static V slope(V) {
    return V(1);
  }
  template <class V>
  FUSEDTRAIN_HD static V through(V, V dy) {
    return dy;
  }
};

template <class T>
struct Act<Activation::kRelu, T> : Slope<Act<Activation::kRelu, T>> {
  template <class V>
  FUSEDTRAIN_HD static V value(V x) {
    return at_least(x, V(0));
  }
  template <class V>
  FUSEDTRAIN_HD static V through(V x, V dy) {
    return vselect(x <= V(0), V(0), dy);
  }
};

template <class T>
struct Act<Activation::kSigmoid, T> : Through<Act<Activation::kSigmoid, T>> {
  template <class V>
  FUSEDTRAIN_HD static V value(V x) {
    return times_logistic<T>(V(1), x);
  }
  template <class V>
  FUSEDTRAIN_HD static V slope(V x) {
    const V e = vexp(-magnitude(x));  // e / (1 + e)^2 = s (1 - s), without the cancellation of 1 - s
    const V s = vdivide(V(1), V(1) + e);
    return e * s * s;
  }
};

template <class T>
struct Act<Activation::kSilu, T> : Through<Act<Activation::kSilu, T>> {
  template <class V>
  FUSEDTRAIN_HD static V value(V x) {
    return times_logistic<T>(x, x);
  }
  template <class V>
  FUSEDTRAIN_HD static V slope(V x) {
    return slope(x, Act<Activation::kSigmoid, T>::value(x));
  }
  // Where s = 1 / (1 + e^-x) is known.
  template <class V>
  FUSEDTRAIN_HD static V slope(V x, V s) {
    return times_known_logistic<T>(V(1) + x * (V(1) - s), s, x);
  }
};

template <class T>
struct Act<Activation::kGelu, T> : Through<Act<Activation::kGelu, T>> {
  static constexpr double kInvSqrtTwoPi = 0.39894228040143267794;  // 1 / sqrt(2 pi)
  template <class V>
  FUSEDTRAIN_HD static V value(V x) {
    return x * normal_cdf_of<T>(x, bell_of<T>(x));
  }
  template <class V>
  FUSEDTRAIN_HD static V slope(V x) {
    const V bell = bell_of<T>(x);
    return normal_cdf_of<T>(x, bell) + x * V(kInvSqrtTwoPi) * bell;
  }
  // value(x) and through(x, dy), which share most of their work.
  template <class V>
  FUSEDTRAIN_HD static void both(V x, V dy, V& value, V& dx) {
    const V bell = bell_of<T>(x), cdf = normal_cdf_of<T>(x, bell);
    value = x * cdf;
    dx = dy * (cdf + x * V(kInvSqrtTwoPi) * bell);
  }
};

template <class T>
struct Act<Activation::kHardSigmoid, T> : Slope<Act<Activation::kHardSigmoid, T>> {
  template <class V>
  FUSEDTRAIN_HD static V value(V x) {
    return at_most(at_least(x + V(3), V(0)), V(6)) * V(1.0 / 6.0);
  }
  template <class V>
  FUSEDTRAIN_HD static V through(V x, V dy) {
    return vselect(x > V(-3), vselect(x < V(3), dy * V(1.0 / 6.0), V(0)), V(0));
  }
};

template <class T>
struct Act<Activation::kHardSwish, T> : Slope<Act<Activation::kHardSwish, T>> {
  template <class V>
  FUSEDTRAIN_HD static V value(V x) {
    return x * Act<Activation::kHardSigmoid, T>::value(x);
  }
  template <class V>
  FUSEDTRAIN_HD static V through(V x, V dy) {
    return vselect(x <= V(-3), V(0), dy * vselect(x >= V(3), V(1), x * V(1.0 / 3.0) + V(0.5)));
  }
};

template <class T>
struct Act<Activation::kRelu6, T> : Slope<Act<Activation::kRelu6, T>> {
  template <class V>
  FUSEDTRAIN_HD static V value(V x) {
    return at_most(at_least(x, V(0)), V(6));
  }
  template <class V>
  FUSEDTRAIN_HD static V through(V x, V dy) {
    return vselect(x <= V(0), V(0), vselect(x >= V(6), V(0), dy));
  }
};

template <class T>
struct Act<Activation::kTanh, T> : Through<Act<Activation::kTanh, T>> {
  template <class V>
  FUSEDTRAIN_HD static V value(V x) {
    return vtanh(x);
  }
  template <class V>
  FUSEDTRAIN_HD static V slope(V x) {
    return V(4) * Act<Activation::kSigmoid, T>::slope(x + x);  // = 1 - tanh(x)^2
  }
};

template <class T>
struct Act<Activation::kHalfTanh, T> : Through<Act<Activation::kHalfTanh, T>> {
  template <class V>
  FUSEDTRAIN_HD static V value(V x) {
    return Act<Activation::kSigmoid, T>::value(x + x);
  }
  template <class V>
  FUSEDTRAIN_HD static V slope(V x) {
    return V(2) * Act<Activation::kSigmoid, T>::slope(x + x);
  }
};

}  // namespace fusedtrain

#pragma once
// Several vectors, on which every operation is done in turn.
//
// An activation is a chain of some twenty operations. Of one vector after the other those that wait for their
// predecessor fill the queues of a processor before it has seen many chains: it idles half of the time. Of four in turn
// the next operation is one that can begin.
//
//   auto x = load<V>(p, Apart<4>{step});      4 vectors, `step` elements apart, as a Several<V, 4>
//   store(p, x, Apart<4>{step});
//
// Internal linkage, as in core/simd.h.
#include "cpu/vectors.h"

namespace fusedtrain::cpu {
namespace {

// Fewer leave the processor waiting, more do not fit into its queues.
constexpr int kTogether = 4;

// As lanes of load and store: N whole vectors, `step` elements apart.
template <int N>
struct Apart {
  int64_t step;
};

template <class V, int N>
struct Several {
  struct Mask {
    typename V::Mask v[N];
  };

  V v[N];

  Several() = default;
  // Vector by vector: g++ would copy the whole through memory, in halves, for which the next load of a vector waits.
  [[gnu::always_inline]] Several(const Several& x) {
    unroll<N>([&](auto k) __attribute__((always_inline)) { v[k] = x.v[k]; });
  }
  [[gnu::always_inline]] Several& operator=(const Several& x) {
    unroll<N>([&](auto k) __attribute__((always_inline)) { v[k] = x.v[k]; });
    return *this;
  }
  // What they all share.
  [[gnu::always_inline]] Several(V x) {
    unroll<N>([&](auto k) __attribute__((always_inline)) { v[k] = x; });
  }
  template <class Number>
    requires std::is_arithmetic_v<Number>
  [[gnu::always_inline]] explicit Several(Number x) : Several(V(x)) {}
  // f(k) for every k.
  template <class F>
  [[gnu::always_inline]] static Several of(const F& f) {
    Several made;
    unroll<N>([&](auto k) __attribute__((always_inline)) { made.v[k] = f(k); });
    return made;
  }
  template <class F>
  [[gnu::always_inline]] static Mask mask(const F& f) {
    Mask made;
    unroll<N>([&](auto k) __attribute__((always_inline)) { made.v[k] = f(k); });
    return made;
  }

  [[gnu::always_inline]] friend Several operator+(const Several& a, const Several& b) {
    return of([&](auto k) __attribute__((always_inline)) { return a.v[k] + b.v[k]; });
  }
  [[gnu::always_inline]] friend Several operator-(const Several& a, const Several& b) {
    return of([&](auto k) __attribute__((always_inline)) { return a.v[k] - b.v[k]; });
  }
  [[gnu::always_inline]] friend Several operator*(const Several& a, const Several& b) {
    return of([&](auto k) __attribute__((always_inline)) { return a.v[k] * b.v[k]; });
  }
  [[gnu::always_inline]] friend Several operator/(const Several& a, const Several& b) {
    return of([&](auto k) __attribute__((always_inline)) { return a.v[k] / b.v[k]; });
  }
  [[gnu::always_inline]] friend Several operator-(const Several& a) {
    return of([&](auto k) __attribute__((always_inline)) { return -a.v[k]; });
  }
  [[gnu::always_inline]] Several& operator+=(const Several& b) { return *this = *this + b; }
  [[gnu::always_inline]] friend Mask operator<(const Several& a, const Several& b) {
    return mask([&](auto k) __attribute__((always_inline)) { return a.v[k] < b.v[k]; });
  }
  [[gnu::always_inline]] friend Mask operator>(const Several& a, const Several& b) {
    return mask([&](auto k) __attribute__((always_inline)) { return a.v[k] > b.v[k]; });
  }
  [[gnu::always_inline]] friend Mask operator<=(const Several& a, const Several& b) {
    return mask([&](auto k) __attribute__((always_inline)) { return a.v[k] <= b.v[k]; });
  }
  [[gnu::always_inline]] friend Mask operator>=(const Several& a, const Several& b) {
    return mask([&](auto k) __attribute__((always_inline)) { return a.v[k] >= b.v[k]; });
  }
  [[gnu::always_inline]] friend Several vselect(const Mask& m, const Several& yes, const Several& no) {
    return of([&](auto k) __attribute__((always_inline)) { return vselect(m.v[k], yes.v[k], no.v[k]); });
  }
};

template <class V, int N>
[[gnu::always_inline]] inline Several<V, N> at_least(const Several<V, N>& x, const Several<V, N>& low) {
  using fusedtrain::at_least;
  return x.of([&](auto k) __attribute__((always_inline)) { return at_least(x.v[k], low.v[k]); });
}
template <class V, int N>
[[gnu::always_inline]] inline Several<V, N> at_most(const Several<V, N>& x, const Several<V, N>& high) {
  using fusedtrain::at_most;
  return x.of([&](auto k) __attribute__((always_inline)) { return at_most(x.v[k], high.v[k]); });
}
#if defined(__AVX2__) && !defined(__AVX512F__)
template <class F, class V, int N, class... More>
[[gnu::always_inline]] inline Several<V, N> apply(const F& f, const Several<V, N>& x, const More&... more) {
  return x.of([&](auto k) __attribute__((always_inline)) { return f(x.v[k], more.v[k]...); });
}
template <class T, class V, int N>
[[gnu::always_inline]] inline Several<V, N> times_logistic(const Several<V, N>& y, const Several<V, N>& x) {
  return y * V(0.5f) / half_one_plus_exp_minus<T>(x);
}
#endif
template <class T, class V, int N>
[[gnu::always_inline]] inline Several<V, N> one_plus_exp(const Several<V, N>& x) {
  using fusedtrain::one_plus_exp;
  return x.of([&](auto k) __attribute__((always_inline)) { return one_plus_exp<T>(x.v[k]); });
}

template <class V, int N>
[[gnu::always_inline]] inline Several<V, N> rounded(const Several<V, N>& x) {
  return x.of([&](auto k) __attribute__((always_inline)) { return rounded(x.v[k]); });
}

// sum + x[0] + x[1] + ..., of one vector or several.
template <class V>
[[gnu::always_inline]] inline void add_to(V& sum, V x) {
  sum += x;
}
template <class V, int N>
[[gnu::always_inline]] inline void add_to(V& sum, const Several<V, N>& x) {
  unroll<N>([&](auto k) __attribute__((always_inline)) { sum += x.v[k]; });
}

template <class V, class T, int N>
[[gnu::always_inline]] inline Several<V, N> load(const T* p, Apart<N> lanes) {
  return Several<V, N>::of([&](auto k) __attribute__((always_inline)) { return load<V>(p + k * lanes.step); });
}

// write(k, half or vector) for every k, rounded to T: one look for subnormal numbers serves all.
template <class T, class V, int N, class F>
[[gnu::always_inline]] inline void each_rounded(const Several<V, N>& x, const F& write) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, BFloat16>) {
    constexpr int kSubnormal = 0x20;
    unsigned subnormal = 0;
    unroll<N>([&](auto k)
                  __attribute__((always_inline)) { subnormal |= _mm512_fpclass_ps_mask(x.v[k].v, kSubnormal); });
    if (rounds_to_bf16_by_instruction && subnormal == 0) [[likely]] {
      unroll<N>([&](auto k) __attribute__((always_inline)) { write(k, narrow_sums(x.v[k])); });
      return;
    }
  }
#endif
  unroll<N>([&](auto k) __attribute__((always_inline)) {
    if constexpr (std::is_same_v<T, typename V::Lane>) {
      write(k, x.v[k].v);
    } else {
      write(k, narrow(x.v[k], T{}));
    }
  });
}

template <class T, class V, int N>
[[gnu::always_inline]] inline Several<V, N> round_to(const Several<V, N>& x) {
  Several<V, N> rounded;
  each_rounded<T>(
      x, [&](auto k, const auto& raw)
             __attribute__((always_inline)) { rounded.v[k] = load<V>(reinterpret_cast<const T*>(&raw)); });
  return rounded;
}

template <class T, class V, int N>
[[gnu::always_inline]] inline void store(T* p, const Several<V, N>& x, Apart<N> lanes) {
  each_rounded<T>(
      x, [&](auto k, const auto& raw)
             __attribute__((always_inline)) { std::memcpy(p + k * lanes.step, &raw, sizeof raw); });
}

template <class T, class V, int N>
[[gnu::always_inline]] inline void stream(T* p, const Several<V, N>& x, Apart<N> lanes) {
#if defined(__AVX2__)
  each_rounded<T>(
      x, [&](auto k, const auto& raw) __attribute__((always_inline)) { stream_raw(p + k * lanes.step, raw); });
#else
  store(p, x, lanes);
#endif
}

template <class V, int N>
[[gnu::always_inline]] inline Several<V, N> keep(const Several<V, N>& x, Apart<N>) {
  return x;
}

}  // namespace
}  // namespace fusedtrain::cpu

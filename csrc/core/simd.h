#pragma once
// Vectors for the CPU kernels, on the vector extension of g++ and clang: one source, compiled once per instruction set.
//
//   Vec<float> v = load<Vec<float>>(p);                  p is float*, BFloat16* or Float16*; Vec<double> loads double*
//   Vec<float> v = load<Vec<float>>(p, FirstLanes{3});   the first 3 elements, zeros behind
//   store(p, v);  store(p, v, FirstLanes{3});            one rounding to the element type, to nearest even
//
// for_each_vector drives a loop with the right one of the two.
// Everything here has internal linkage: the linker must never merge code compiled for AVX-512 into the portable
// variant.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "core/activation.h"
#include "core/isa.h"
#include "core/types.h"
#include "core/visit.h"

namespace fusedtrain::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kVecBytes = 64;
#elif defined(__AVX2__)
constexpr int kVecBytes = 32;
#else
constexpr int kVecBytes = 16;
#endif
// Few processors take this variant: that it is small is worth more than its speed.
#if defined(__x86_64__) && !defined(__AVX2__)
constexpr bool kRareVariant = true;
#else
constexpr bool kRareVariant = false;
#endif

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// How many elements a load or store touches: a whole vector, or the first `count`, fewer than a vector has.
struct AllLanes {};
struct FirstLanes {
  int count;
};

// The accumulation type of an element type.
template <class T>
using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class F>
void visit_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f.template operator()<float>();
    case DType::kBFloat16:
      return f.template operator()<BFloat16>();
    case DType::kFloat16:
      return f.template operator()<Float16>();
    case DType::kFloat64:
      return f.template operator()<double>();
  }
}

template <class T, int kBytes = kVecBytes>
using RawVec [[gnu::vector_size(kBytes)]] = T;

template <class T>
struct Vec {
  using Lane = T;
  using Raw = RawVec<T>;
  using Int = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  static constexpr int kLanes = kVecBytes / int(sizeof(T));
  struct Mask {
    RawVec<Int> v;
  };

  Raw v;

  // Even where g++ finds a function too large already: it would pass them through memory.
  Vec() = default;
  [[gnu::always_inline]] explicit Vec(Raw raw) : v(raw) {}
  [[gnu::always_inline]] explicit Vec(double x) : v(T(x) - Raw{}) {}  // unlike 0 + x, x - 0 costs nothing
  [[gnu::always_inline]] explicit Vec(float x) : v(T(x) - Raw{}) {}
  [[gnu::always_inline]] explicit Vec(int x) : v(T(x) - Raw{}) {}

  [[gnu::always_inline]] friend Vec operator+(Vec a, Vec b) { return Vec(a.v + b.v); }
  [[gnu::always_inline]] friend Vec operator-(Vec a, Vec b) { return Vec(a.v - b.v); }
  [[gnu::always_inline]] friend Vec operator*(Vec a, Vec b) { return Vec(a.v * b.v); }
  [[gnu::always_inline]] friend Vec operator/(Vec a, Vec b) { return Vec(a.v / b.v); }
  [[gnu::always_inline]] friend Vec operator-(Vec a) { return Vec(-a.v); }
  [[gnu::always_inline]] Vec& operator+=(Vec b) {
    v += b.v;
    return *this;
  }
  [[gnu::always_inline]] friend Mask operator<(Vec a, Vec b) { return {a.v < b.v}; }
  [[gnu::always_inline]] friend Mask operator>(Vec a, Vec b) { return {a.v > b.v}; }
  [[gnu::always_inline]] friend Mask operator<=(Vec a, Vec b) { return {a.v <= b.v}; }
  [[gnu::always_inline]] friend Mask operator>=(Vec a, Vec b) { return {a.v >= b.v}; }
  [[gnu::always_inline]] friend Mask operator==(Vec a, Vec b) { return {a.v == b.v}; }
  [[gnu::always_inline]] friend Mask operator!=(Vec a, Vec b) { return {a.v != b.v}; }
  [[gnu::always_inline]] friend Vec vselect(Mask m, Vec yes, Vec no) { return Vec(m.v ? yes.v : no.v); }
};

// The elements kFrom of two vectors, counted from the first element of a.
template <int... kFrom, class R>
[[gnu::always_inline]] inline R shuffle(R a, R b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kFrom...);
#else  // g++ has that from 12 on
  using Index = std::conditional_t<sizeof(R) / sizeof...(kFrom) == 4, int32_t, int64_t>;
  return __builtin_shuffle(a, b, RawVec<Index, sizeof(R)>{kFrom...});
#endif
}

// ---- loads and stores ----

using Half = RawVec<uint16_t, kVecBytes / 2>;

// 16 bits to 32 and, of words below 65536, back. Left to g++ 12, each takes up to four instructions.
using Wide = RawVec<uint32_t>;
#if defined(__AVX512F__)
inline Wide words_of(Half bits) {
  return reinterpret_cast<Wide>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(bits)));
}
inline Half halves_of(Wide words) {
  return reinterpret_cast<Half>(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(words)));
}
#elif defined(__AVX2__)
inline Wide words_of(Half bits) {
  return reinterpret_cast<Wide>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(bits)));
}
inline Half halves_of(Wide words) {
  const __m256i w = reinterpret_cast<__m256i>(words);
  return reinterpret_cast<Half>(_mm_packus_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
#else
inline Wide words_of(Half bits) { return __builtin_convertvector(bits, Wide); }
inline Half halves_of(Wide words) { return __builtin_convertvector(words, Half); }
#endif

inline Vec<float> widen(Half bits, BFloat16) {
  return Vec<float>(reinterpret_cast<RawVec<float>>(words_of(bits) << 16));
}

inline Half narrow(Vec<float> x, BFloat16) {
#if defined(__AVX512F__)
  // The instruction takes subnormal numbers for 0. Not as an intrinsic, which the flags of this variant forbid;
  // volatile, or the compiler may execute it before the check.
  constexpr int kSubnormal = 0x20;
  if (rounds_to_bf16_by_instruction && _mm512_fpclass_ps_mask(x.v, kSubnormal) == 0) [[likely]] {
    Half bits;
    asm volatile("vcvtneps2bf16 %1, %0" : "=v"(bits) : "v"(x.v));
    return bits;
  }
#endif
  const Wide u = reinterpret_cast<Wide>(x.v);
  const Wide rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const auto is_nan = x.v != x.v;
  return halves_of(is_nan ? Wide{} + 0x7fc0 : rounded);
}

#if defined(__AVX512F__)
inline Vec<float> widen(Half bits, Float16) { return Vec<float>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(bits))); }
inline Half narrow(Vec<float> x, Float16) {
  return reinterpret_cast<Half>(_mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(__AVX2__)
inline Vec<float> widen(Half bits, Float16) { return Vec<float>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(bits))); }
inline Half narrow(Vec<float> x, Float16) {
  return reinterpret_cast<Half>(_mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
// Half precision without instructions for it: the exponent is moved by a multiplication, which also scales subnormals.
inline Vec<float> widen(Half bits, Float16) {
  const Wide u = words_of(bits);
  const Wide magnitude = (u & 0x7fff) << 13;
  const RawVec<float> value = reinterpret_cast<RawVec<float>>(magnitude) * 0x1p112f;
  const Wide special = reinterpret_cast<Wide>((u & 0x7c00) == 0x7c00);
  const Wide finite_bits = reinterpret_cast<Wide>(value);
  const Wide result = (special & (magnitude | 0x7f800000)) | (~special & finite_bits);
  return Vec<float>(reinterpret_cast<RawVec<float>>(result | ((u & 0x8000) << 16)));
}
inline uint16_t narrow_one(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  const uint32_t sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to 65536 or more
  if (magnitude < 0x38800000) {                                 // subnormal: adding 0.5 aligns the last bit with 2^-24
    float aligned;
    std::memcpy(&aligned, &magnitude, 4);
    aligned += 0.5f;
    uint32_t bits;
    std::memcpy(&bits, &aligned, 4);
    return uint16_t(sign | (bits - 0x3f000000));
  }
  return uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}
inline Half narrow(Vec<float> x, Float16) {
  Half bits;
  for (int i = 0; i < Vec<float>::kLanes; ++i) bits[i] = narrow_one(x.v[i]);
  return bits;
}
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
// Less than 16 bytes, an even number, of which there are masked instructions for none (16-bit elements), or some that
// take AMD's processors a dozen cycles and more (stores).
inline __m128i load_pieces(const void* from, int bytes) {
  const char* p = static_cast<const char*>(from);
  uint64_t first = 0, last = 0;
  if (bytes & 8) std::memcpy(&first, p, 8);
  p += bytes & 8;
  if (bytes & 4) std::memcpy(&last, p, 4);
  p += bytes & 4;
  if (bytes & 2) {
    uint16_t element;
    std::memcpy(&element, p, 2);
    last |= uint64_t(element) << 8 * (bytes & 4);
  }
  return bytes & 8 ? _mm_set_epi64x(int64_t(last), int64_t(first)) : _mm_cvtsi64_si128(int64_t(last));
}
inline void store_pieces(void* to, __m128i x, int bytes) {
  char* p = static_cast<char*>(to);
  if (bytes & 8) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), x);
    x = _mm_unpackhi_epi64(x, x);
    p += 8;
  }
  if (bytes & 4) {
    _mm_storeu_si32(p, x);
    x = _mm_srli_epi64(x, 32);
    p += 4;
  }
  if (bytes & 2) _mm_storeu_si16(p, x);
}
#endif

// The first `count` elements of a raw vector, zeros behind; masked instructions where the ISA has them.
template <class Raw, class T>
inline Raw load_raw(const T* p, int count) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    return reinterpret_cast<Raw>(_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p));
  } else if constexpr (sizeof(T) == 8) {
    return reinterpret_cast<Raw>(_mm512_maskz_loadu_pd(__mmask8((1u << count) - 1), p));
  } else {
    return reinterpret_cast<Raw>(_mm256_maskz_loadu_epi16(__mmask16((1u << count) - 1), p));
  }
#else
#if defined(__AVX2__)
  if constexpr (sizeof(Raw) == 32 && sizeof(T) >= 4) {
    alignas(64) static constexpr int kMask[16] = {-1, -1, -1, -1, -1, -1, -1, -1};  // and zeros
    const auto* mask = reinterpret_cast<const __m256i*>(kMask + 8 - count * (sizeof(T) / 4));
    return reinterpret_cast<Raw>(_mm256_maskload_ps(reinterpret_cast<const float*>(p), _mm256_loadu_si256(mask)));
  } else if constexpr (sizeof(Raw) == 16 && sizeof(T) == 2) {
    if (count < 8) return reinterpret_cast<Raw>(load_pieces(p, 2 * count));
    return reinterpret_cast<Raw>(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
#endif
  alignas(kVecBytes) T buffer[sizeof(Raw) / sizeof(T)] = {};
  for (int i = 0; i < count; ++i) buffer[i] = p[i];
  Raw raw;
  std::memcpy(&raw, buffer, sizeof raw);
  return raw;
#endif
}

template <class Raw, class T>
inline void store_raw(T* p, Raw raw, int count) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    _mm512_mask_storeu_ps(p, __mmask16((1u << count) - 1), reinterpret_cast<__m512>(raw));
  } else if constexpr (sizeof(T) == 8) {
    _mm512_mask_storeu_pd(p, __mmask8((1u << count) - 1), reinterpret_cast<__m512d>(raw));
  } else {
    _mm256_mask_storeu_epi16(p, __mmask16((1u << count) - 1), reinterpret_cast<__m256i>(raw));
  }
#else
#if defined(__AVX2__)
  const int bytes = count * int(sizeof(T));
  char* const to = reinterpret_cast<char*>(p);
  if (bytes >= int(sizeof raw)) {
    std::memcpy(to, &raw, sizeof raw);
    return;
  }
  if constexpr (sizeof raw == 16) {
    return store_pieces(to, reinterpret_cast<__m128i>(raw), bytes);
  } else if constexpr (sizeof raw == 32) {
    const __m256i both = reinterpret_cast<__m256i>(raw);
    const __m128i low = _mm256_castsi256_si128(both);
    if (bytes < 16) return store_pieces(to, low, bytes);
    std::memcpy(to, &low, sizeof low);
    return store_pieces(to + 16, _mm256_extracti128_si256(both, 1), bytes - 16);
  }
#endif
  alignas(kVecBytes) T buffer[sizeof(Raw) / sizeof(T)];
  std::memcpy(buffer, &raw, sizeof raw);
  for (int i = 0; i < count; ++i) p[i] = buffer[i];
#endif
}

// A store that bypasses the caches and so skips the read for ownership: for results that would not stay in cache
// anyway. p must be aligned to what is written. Call stream_fence() before other threads read. Portable code stores as
// usual.
template <class Raw>
inline void stream_raw(void* p, Raw raw) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Raw) == 64) return _mm512_stream_si512(static_cast<__m512i*>(p), reinterpret_cast<__m512i>(raw));
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(Raw) == 32) return _mm256_stream_si256(static_cast<__m256i*>(p), reinterpret_cast<__m256i>(raw));
  if constexpr (sizeof(Raw) == 16) return _mm_stream_si128(static_cast<__m128i*>(p), reinterpret_cast<__m128i>(raw));
#endif
  std::memcpy(p, &raw, sizeof raw);
}
inline void stream_fence() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

template <class V, class T>
inline V load(const T* p, AllLanes = {}) {
  if constexpr (std::is_same_v<T, typename V::Lane>) {
    V x;
    std::memcpy(&x.v, p, sizeof x.v);
    return x;
  } else {
    Half bits;
    std::memcpy(&bits, p, sizeof bits);
    return widen(bits, T{});
  }
}

template <class V, class T>
inline V load(const T* p, FirstLanes lanes) {
  if constexpr (std::is_same_v<T, typename V::Lane>) {
    return V(load_raw<typename V::Raw>(p, lanes.count));
  } else {
    return widen(load_raw<Half>(reinterpret_cast<const uint16_t*>(p), lanes.count), T{});
  }
}

template <class V, class T>
inline void store(T* p, V x, AllLanes = {}) {
  if constexpr (std::is_same_v<T, typename V::Lane>) {
    std::memcpy(p, &x.v, sizeof x.v);
  } else {
    const Half bits = narrow(x, T{});
    std::memcpy(p, &bits, sizeof bits);
  }
}

template <class V, class T>
inline void store(T* p, V x, FirstLanes lanes) {
  if constexpr (std::is_same_v<T, typename V::Lane>) {
    store_raw(p, x.v, lanes.count);
  } else {
    store_raw(reinterpret_cast<uint16_t*>(p), narrow(x, T{}), lanes.count);
  }
}

// As stream_raw.
template <class V, class T>
inline void stream(T* p, V x, AllLanes = {}) {
  if constexpr (std::is_same_v<T, typename V::Lane>) {
    stream_raw(p, x.v);
  } else {
    stream_raw(p, narrow(x, T{}));
  }
}

// f(i, lanes) for each vector of `count` consecutive elements; lanes is AllLanes but for a short last vector, of which
// there is none where `count` is known to be kWhole vectors.
template <class V, bool kWhole = false, class F>
inline void for_each_vector(int64_t count, F&& f) {
  int64_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) f(i, AllLanes{});
  if constexpr (!kWhole) {
    if (i < count) f(i, FirstLanes{int(count - i)});
  }
}

// x with zeros in the lanes that a load left out.
template <class V>
inline V keep(V x, AllLanes) {
  return x;
}
template <class V>
inline V keep(V x, FirstLanes lanes) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<V, Vec<float>>) return V(_mm512_maskz_mov_ps(__mmask16((1u << lanes.count) - 1), x.v));
  if constexpr (std::is_same_v<V, Vec<double>>) return V(_mm512_maskz_mov_pd(__mmask8((1u << lanes.count) - 1), x.v));
#endif
  using Int = typename V::Int;
  RawVec<Int> index;
  for (int i = 0; i < V::kLanes; ++i) index[i] = Int(i);
  return V(index < Int(lanes.count) ? x.v : V(0).v);
}

// A value as it reads back from an array of T.
template <class T, class V>
inline V round_to(V x) {
  if constexpr (std::is_same_v<T, typename V::Lane>) {
    return x;
  } else {
    return widen(narrow(x, T{}), T{});
  }
}

// x, rounded: where x is a product, the compiler does not make one instruction of it and a sum behind it. So it is the
// same wherever it is computed.
template <class T>
[[gnu::always_inline]] inline Vec<T> rounded(Vec<T> x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x.v));
#elif defined(__x86_64__)
  asm("" : "+x"(x.v));
#endif
  return x;
}

// ---- reductions over lanes ----

// Sums the lanes as a balanced tree: halves onto each other until one is left.
template <class T>
inline T lane_sum(Vec<T> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_reduce_add_ps(x.v);
  if constexpr (sizeof(T) == 8) return _mm512_reduce_add_pd(x.v);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
#endif
  T lanes[Vec<T>::kLanes];
  std::memcpy(lanes, &x.v, sizeof lanes);
  for (int width = Vec<T>::kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// ---- elementary functions ----

// |x|: one instruction where g++ takes three for the formula of core/activation.h.
template <class T>
inline Vec<T> magnitude(Vec<T> x) {
  using Int = RawVec<typename Vec<T>::Int>;
  return Vec<T>(
      reinterpret_cast<RawVec<T>>(reinterpret_cast<Int>(x.v) & std::numeric_limits<typename Vec<T>::Int>::max()));
}

// max(x, low) and min(x, high) that keep NaN: the instructions return their second operand then. See core/activation.h.
using fusedtrain::at_least, fusedtrain::at_most;
#if defined(__AVX512F__)
inline Vec<float> at_least(Vec<float> x, Vec<float> low) { return Vec<float>(_mm512_max_ps(low.v, x.v)); }
inline Vec<float> at_most(Vec<float> x, Vec<float> high) { return Vec<float>(_mm512_min_ps(high.v, x.v)); }
#elif defined(__AVX2__)
inline Vec<float> at_least(Vec<float> x, Vec<float> low) { return Vec<float>(_mm256_max_ps(low.v, x.v)); }
inline Vec<float> at_most(Vec<float> x, Vec<float> high) { return Vec<float>(_mm256_min_ps(high.v, x.v)); }
#endif

// Whether a function of elements of type T may have an error of 1e-4, far below their rounding.
template <class T>
constexpr bool kHasFewDigits = std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>;

#if defined(__AVX512F__)
// e^x = 2^floor(n) 2^(n - floor(n)) e^r. n is x / ln 2 rounded to sixteenths, so the second factor is one of 16, and
// e^r a polynomial of degree 3 (9e-9; 1 ulp with rounding). Infinite where float is, 0 below e^-104; keeps NaN.
inline Vec<float> vexp(Vec<float> x) {
  using V = Vec<float>;
  x = at_most(at_least(x, V(-104)), V(89));
  const V rounder(786432.f);  // 1.5 * 2^19: the low bits of the sum are those of 16 n
  const V k = x * V(1.44269504088896341f) + rounder, n = k - rounder;
  V r(_mm512_fnmadd_ps(n.v, V(0.693147182f).v, x.v));
  r.v = _mm512_fmadd_ps(n.v, V(1.90465432e-9f).v, r.v);  // the rest of ln 2
  const __m512 powers = _mm512_setr_ps(1.f, 1.04427373f, 1.09050775f, 1.13878858f, 1.18920708f, 1.24185777f,
                                       1.29683959f, 1.35425556f, 1.41421354f, 1.47682619f, 1.54221082f, 1.61049032f,
                                       1.68179286f, 1.75625217f, 1.83400810f, 1.91520655f);
  const V power(_mm512_permutexvar_ps(_mm512_castps_si512(k.v), powers));
  const V p = (V(0.166670084f) * r + V(0.5f)) * r + V(1);
  return V(_mm512_scalef_ps((power * r * p + power).v, n.v));
}

// For 16-bit elements 2^t is 2^floor(t) times a polynomial of the fraction: error 7.5e-5, with that of t = x log2(e)
// 8e-5, far below their rounding.
inline Vec<float> short_exp2(Vec<float> t) {
  using V = Vec<float>;
  const V r(_mm512_reduce_ps(t.v, 1));
  const V p = ((V(0.0780245233f) * r + V(0.226067159f)) * r + V(0.695833537f)) * r + V(0.999925219f);
  return V(_mm512_scalef_ps(p.v, t.v));
}
template <class T>
inline Vec<float> one_plus_exp(Vec<float> x) {
  using V = Vec<float>;
  if constexpr (kHasFewDigits<T>) {
    return V(1) + short_exp2(x * V(1.44269504088896341f));
  } else {
    return V(1) + vexp(x);
  }
}
template <class T>
  requires kHasFewDigits<T>
inline Vec<float> bell_of(Vec<float> x) {
  return short_exp2(x * x * Vec<float>(-0.721347520444481704f));
}
// A shorter fit (2.4e-5), and the reciprocal's estimate (6e-5).
template <class T>
  requires kHasFewDigits<T>
inline Vec<float> normal_cdf_of(Vec<float> x, Vec<float> bell) {
  using V = Vec<float>;
  const V a = at_most(magnitude(x), V(14));
  const V p = (V(0.0625118688f) * a + V(0.278240174f)) * a + V(0.50001204f);
  const V q = ((V(0.156517491f) * a + V(0.702528536f)) * a + V(1.35511422f)) * a + V(1);
  const V tail = bell * p * V(_mm512_rcp14_ps(q.v));
  return vselect(x < V(0), tail, V(1) - tail);
}
#else
// 2^n p for integers n in [-150, 128] and p near 1; 0 for n <= -126.
inline Vec<float> times_power_of_two(Vec<float> p, Vec<float> n) {
  using V = Vec<float>;
  using Int = RawVec<int32_t>;
  // 2^(n-1), 0 for n = -126: the low bits of 1.5 * 2^23 + n hold n. Twice that, 2^128, is no float.
  const Int half_scale = (reinterpret_cast<Int>((at_least(n, V(-126)) + V(12582912.f)).v) << 23) + (126 << 23);
  return V(p.v * reinterpret_cast<RawVec<float>>(half_scale) * 2.f);
}

// e^x = 2^n e^r, r in [-ln2/2, ln2/2], polynomial of degree 6 (minimax, 3e-9; 1 ulp with rounding).
// Infinite where float is, 0 below e^-87; keeps NaN.
inline Vec<float> vexp(Vec<float> x) {
  using V = Vec<float>;
  x = at_most(at_least(x, V(-104)), V(89));
  const V rounder(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const V n = x * V(1.44269504088896341f) + rounder - rounder;
  const V r = x - n * V(0.693359375f) + n * V(2.12194440e-4f), r2 = r * r;
  const V c12 = V(0.50000006f) * r + V(1.00000012f);
  const V c34 = V(0.0416647755f) * r + V(0.166663647f);
  const V c56 = V(0.00140612409f) * r + V(0.00837901141f);
  return times_power_of_two(((c56 * r2 + c34) * r2 + c12) * r + V(1), n);
}
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
// f(x, more...), of vectors; of several in turn (cpu/several.h) one after the other.
template <class F, class... More>
[[gnu::always_inline]] inline Vec<float> apply(const F& f, Vec<float> x, More... more) {
  return f(x, more...);
}

// Without AVX-512 a shorter (1 + e^-x) / 2: e^-x is 2^n times a polynomial of degree 6 in f = t - n, where
// t = -x log2(e). For 16-bit elements of degree 3 (error 7.5e-5). Finite below t = 128.5, where 2^n overflows. In steps
// of a few operations, so that several vectors in turn need few registers.
template <class T, class W>
[[gnu::always_inline]] inline W half_one_plus_exp_minus(W x) {
  using V = Vec<float>;
  const V log2e(1.44269502f), rounder(12582912.f);  // 1.5 * 2^23: the low bits of the sum are those of an integer
  x = apply([&](V x) __attribute__((always_inline)) { return at_most(at_least(x, V(-89.3f)), V(87.3f)); }, x);
  const W k = apply([&](V x) __attribute__((always_inline)) { return rounder - x * log2e; }, x);
  W f = apply([&](V x, V k) __attribute__((always_inline)) { return (rounder - k) - x * log2e; }, x, k), p;
  if constexpr (kHasFewDigits<T>) {
    p = apply(
        [&](V f) __attribute__((always_inline)) {
          return ((V(0.0551716611f) * f + V(0.242611125f)) * f + V(0.693260968f)) * f + V(0.999928057f);
        },
        f);
  } else {
    const V rest(1.92596303e-8f);  // of log2(e)
    f = apply([&](V x, V f) __attribute__((always_inline)) { return f - x * rest; }, x, f);
    p = apply(
        [&](V f) __attribute__((always_inline)) {
          const V c34 = V(0.00961843692f) * f + V(0.0555033237f);
          return (V(0.000153533605f) * f + V(0.0013398875f)) * (f * f) + c34;
        },
        f);
    p = apply(
        [&](V p, V f) __attribute__((always_inline)) { return p * (f * f) + (V(0.240226477f) * f + V(0.693147182f)); },
        p, f);
    p = apply([&](V p, V f) __attribute__((always_inline)) { return p * f + V(1); }, p, f);
  }
  return apply(
      [&](V p, V k) __attribute__((always_inline)) {
        const auto half = (reinterpret_cast<RawVec<int32_t>>(k.v) << 23) + (126 << 23);  // 2^(n-1)
        return V(0.5f) + p * V(reinterpret_cast<RawVec<float>>(half));
      },
      p, k);
}
template <class T>
inline Vec<float> times_logistic(Vec<float> y, Vec<float> x) {
  return Vec<float>(0.5f) * y / half_one_plus_exp_minus<T>(x);
}
#endif

// tanh: odd polynomial below 0.625 (Cephes tanhf), 1 - 2 / (e^2x + 1) above.
inline Vec<float> vtanh(Vec<float> x) {
  using V = Vec<float>;
  const V z = x * x;
  V p = V(-5.70498872745e-3f);
  p = p * z + V(2.06390887954e-2f);
  p = p * z + V(-5.37397155531e-2f);
  p = p * z + V(1.33314422036e-1f);
  p = p * z + V(-3.33332819422e-1f);
  const V small = x + x * z * p;
  const V large = V(1) - V(2) / (vexp(x + x) + V(1));
  return vselect(z < V(0.390625f), small, large);
}

#if defined(__AVX512F__)
inline Vec<float> vsqrt(Vec<float> x) { return Vec<float>(_mm512_sqrt_ps(x.v)); }
inline Vec<double> vsqrt(Vec<double> x) { return Vec<double>(_mm512_sqrt_pd(x.v)); }
#elif defined(__AVX2__)
inline Vec<float> vsqrt(Vec<float> x) { return Vec<float>(_mm256_sqrt_ps(x.v)); }
inline Vec<double> vsqrt(Vec<double> x) { return Vec<double>(_mm256_sqrt_pd(x.v)); }
#else
template <class T>
inline Vec<T> vsqrt(Vec<T> x) {
  for (int i = 0; i < Vec<T>::kLanes; ++i) x.v[i] = std::sqrt(x.v[i]);
  return x;
}
#endif

// Double precision serves gradient checks and references, not speed: the C library, lane by lane.
template <class F>
inline Vec<double> each_lane(Vec<double> x, F f) {
  for (int i = 0; i < Vec<double>::kLanes; ++i) x.v[i] = f(x.v[i]);
  return x;
}
inline Vec<double> vexp(Vec<double> x) {
  return each_lane(x, [](double lane) { return ::exp(lane); });
}
inline Vec<double> vtanh(Vec<double> x) {
  return each_lane(x, [](double lane) { return ::tanh(lane); });
}
inline Vec<double> vnormal_cdf(Vec<double> x, Vec<double> /*bell*/) {
  return each_lane(x, [](double lane) { return fusedtrain::vnormal_cdf(lane, 0.0); });
}

}  // namespace
}  // namespace fusedtrain::cpu

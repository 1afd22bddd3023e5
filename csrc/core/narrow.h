#pragma once
// How numbers computed in float32 are stored in fewer bits, one text for g++ (on vectors) and nvcc (on scalars).
//
// Stochastic rounding takes one of the two neighbours, the nearer one more often, so that the mean is the number
// itself: an average with a rate of 1/1000 would never move in steps of 1/256. The random bits are a function of the
// seed, the tensor's count of steps, its place in its list and the place of the element in memory, and of nothing else.
//
// "Blocks of 8 bits": codes uint8 [numel] and the largest magnitude of each 256 elements, float [blocks]. A code holds
// the leading bits of a float32, |x| / largest * 1.875: three of the mantissa and five of the exponent, or four and the
// sign. Relative errors are alike for small and large numbers, which second moments ask for: they stand below a root in
// a divisor. 0 is 0; a positive second moment never becomes 0.
#include <bit>

#include "core/activation.h"

namespace fusedtrain {

enum class Rounding : int32_t { kNearest, kStochastic, kKahan };  // fusedtrain/ops/_codes.py holds the same list

constexpr int64_t kCodeBlock = 256;
constexpr float kCodeTop = 1.875f;  // 0x3ff00000, whose leading 12 bits are the code 255, or 127
constexpr int kCodeShift = 20;
constexpr uint32_t kCodeBase = 0x3ff - 255, kSignedCodeBase = 0x3ff - 127;
constexpr float kSmallestLargest = 0x1p-120f;  // blocks below count as zeros

FUSEDTRAIN_HD constexpr int64_t code_blocks(int64_t numel) { return (numel + kCodeBlock - 1) / kCodeBlock; }

// Steele, Vigna: SplitMix, https://doi.org/10.1145/2660193.2660195
FUSEDTRAIN_HD uint64_t split_mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Wellons: lowbias32, https://nullprogram.com/blog/2018/07/31. U is uint32_t or a vector of them.
template <class U>
FUSEDTRAIN_HD U mix(U x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// The random bits of one tensor: 16 for each element and use, 0, 1, ... for its states and kParamUse for the parameter.
// Two uses share a word.
struct RandomBits {
  static constexpr int kParamUse = 4;
  uint32_t low, high;
  FUSEDTRAIN_HD RandomBits(uint64_t seed, int64_t step, int64_t tensor) {
    const uint64_t key = split_mix(split_mix(seed) + uint64_t(tensor) + (uint64_t(step) << 32));
    low = uint32_t(key);
    high = uint32_t(key >> 32);
  }
  // For elements whose places have these bits above the low 32.
  FUSEDTRAIN_HD RandomBits at(int64_t element) const {
    RandomBits bits = *this;
    bits.high += uint32_t(element >> 32);
    return bits;
  }
  // `element`: the low 32 bits of the places.
  template <class U>
  FUSEDTRAIN_HD U word(U element, int use) const {
    return mix((element ^ low) + (high + uint32_t(use / 2) * 0x9e3779b9u));
  }
  template <class U>
  FUSEDTRAIN_HD static U half(U word, int use) {
    return use % 2 == 0 ? word & 0xffffu : word >> 16;
  }
};

// The bits of numbers, by the type V of the numbers; cpu/narrow.h has those of vectors.
template <class V>
struct Bits;
template <>
struct Bits<float> {
  using Word = uint32_t;
#ifdef __CUDA_ARCH__
  FUSEDTRAIN_HD static uint32_t of(float x) { return __float_as_uint(x); }
  FUSEDTRAIN_HD static float to(uint32_t u) { return __uint_as_float(u); }
#else
  FUSEDTRAIN_HD static uint32_t of(float x) { return std::bit_cast<uint32_t>(x); }
  FUSEDTRAIN_HD static float to(uint32_t u) { return std::bit_cast<float>(u); }
#endif
  FUSEDTRAIN_HD static float number(uint32_t u) { return float(int32_t(u)); }  // of words below 2^31
};
template <class V>
using Word = typename Bits<V>::Word;

// 16 random bits in front of the place where `dropped` bits are cut off. Where more are, they stand for the middle of
// what they leave open: a number that rounding in float32 has moved by a few units keeps its code.
template <class U>
FUSEDTRAIN_HD U random_tail(U random, int dropped) {
  return dropped > 16 ? (random << (dropped - 16)) + (1u << (dropped - 17)) : random >> (16 - dropped);
}

// x as one of the two neighbours that bfloat16 or float16 has, by 16 random bits; x comes out of an operation, and so
// is no signaling NaN. Of bfloat16 the upper halves of the words are what counts.
template <class V>
FUSEDTRAIN_HD Word<V> bfloat16_above(V x, Word<V> random) {
  return Bits<V>::of(vselect(x - x == V(0), Bits<V>::to(Bits<V>::of(x) + random_tail(random, 16)), x));
}
template <class V>
FUSEDTRAIN_HD V round_to_bfloat16(V x, Word<V> random) {
  return Bits<V>::to(bfloat16_above(x, random) & ~0xffffu);
}
template <class V>
FUSEDTRAIN_HD V round_to_float16(V x, Word<V> random) {
  using B = Bits<V>;
  const Word<V> sign = B::of(x) & 0x80000000u;
  const V a = B::to(B::of(x) ^ sign), normal = B::to((B::of(a) + random_tail(random, 13)) & ~0x1fffu);
  // Below 2^-14 the numbers of float16 are the multiples of 2^-24, to which adding 0.5 rounds.
  const V tail = (B::number(random >> 4) + V(0.5f)) * V(0x1p-36f) - V(0x1p-25f);
  const V small = magnitude((a + tail + V(0.5f)) - V(0.5f));  // of 0 it may be -2^-25, which is stored as 0
  const V rounded = vselect(a < V(0x1p-14f), small, normal);
  return vselect(x - x == V(0), B::to(B::of(rounded) | sign), x);
}

// The number of a code of 8 bits; scale: largest / kCodeTop.
template <bool kSigned, class V>
FUSEDTRAIN_HD V decode(Word<V> code, V scale) {
  using B = Bits<V>;
  const Word<V> sign = kSigned ? (code & 0x80u) << 24 : code & 0u, digits = kSigned ? code & 0x7fu : code;
  const V x = B::to((digits + (kSigned ? kSignedCodeBase : kCodeBase)) << kCodeShift);
  return B::to(B::of(vselect(B::number(digits) == V(0), V(0), x) * scale) ^ sign);
}

// The code of a number; scale: kCodeTop / largest; random: 16 bits, 0x8000 for the nearest code.
template <bool kSigned, class V>
FUSEDTRAIN_HD Word<V> encode(V x, V scale, Word<V> random) {
  using B = Bits<V>;
  constexpr uint32_t kBase = kSigned ? kSignedCodeBase : kCodeBase;
  const V smallest = B::to((random & 0u) + ((kBase + 1) << kCodeShift)), y = at_most(magnitude(x) * scale, V(kCodeTop));
  const Word<V> code = ((B::of(y) + random_tail(random, kCodeShift)) >> kCodeShift) - kBase;
  const V least = kSigned ? B::number(random) * (smallest * V(0x1p-16f)) : V(0);
  const V one_or_none = vselect(y > least, B::to((random & 0u) + 1u), V(0));
  const Word<V> digits = B::of(vselect(y < smallest, one_or_none, B::to(code)));
  return kSigned ? digits | ((B::of(x) >> 24) & 0x80u) : digits;
}

}  // namespace fusedtrain

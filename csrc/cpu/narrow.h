#pragma once
// csrc/core/narrow.h on vectors: numbers in 16 or 8 bits to float32 and back. Internal linkage, as in core/simd.h.
#include <cstring>

#include "core/narrow.h"
#include "core/simd.h"

namespace fusedtrain {

template <>
struct Bits<cpu::Vec<float>> {
  using Word = cpu::RawVec<uint32_t>;
  static Word of(cpu::Vec<float> x) { return reinterpret_cast<Word>(x.v); }
  static cpu::Vec<float> to(Word u) { return cpu::Vec<float>(reinterpret_cast<cpu::RawVec<float>>(u)); }
  static cpu::Vec<float> number(Word u) {
    return cpu::Vec<float>(__builtin_convertvector(reinterpret_cast<cpu::RawVec<int32_t>>(u), cpu::RawVec<float>));
  }
};

namespace cpu {
namespace {

using Words = RawVec<uint32_t>;
using Bytes = RawVec<uint8_t, kVecBytes / 4>;

#if defined(__AVX512F__)  // g++ 12 would convert the bytes one by one
inline Words widen(Bytes b) { return reinterpret_cast<Words>(_mm512_cvtepu8_epi32(reinterpret_cast<__m128i>(b))); }
inline Bytes narrow(Words u) { return reinterpret_cast<Bytes>(_mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(u))); }
#elif defined(__AVX2__)
inline Words widen(Bytes b) {
  return reinterpret_cast<Words>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(std::bit_cast<int64_t>(b))));
}
inline Bytes narrow(Words u) {  // of words below 256
  const __m256i words = reinterpret_cast<__m256i>(u);
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  return std::bit_cast<Bytes>(_mm_cvtsi128_si64(_mm_packus_epi16(halves, halves)));
}
#else
inline Words widen(Bytes b) { return __builtin_convertvector(b, Words); }
inline Bytes narrow(Words u) { return __builtin_convertvector(u, Bytes); }
#endif

// The words of random bits of elements first, first + 1, ... for one use and the one that shares its words; `bits`: of
// these places.
inline Words random_words(const RandomBits& bits, int64_t first, int use) {
  Words numbers;
  for (int i = 0; i < Vec<float>::kLanes; ++i) numbers[i] = uint32_t(i);
  return bits.word(numbers + uint32_t(first), use);
}

template <class T>
void store_bits(T* p, Half bits, AllLanes) {
  std::memcpy(p, &bits, sizeof bits);
}
template <class T>
void store_bits(T* p, Half bits, FirstLanes lanes) {
  store_raw(reinterpret_cast<uint16_t*>(p), bits, lanes.count);
}

// Stores the upper halves of words.
template <class Lanes>
void store_upper(BFloat16* p, Words words, Lanes lanes) {
  store_bits(p, halves_of(words >> 16), lanes);
}

// Stores x; returns what stands there then.
template <class T, class Lanes>
Vec<float> store_rounded(T* p, Vec<float> x, Lanes lanes) {
  const Half bits = narrow(x, T{});
  store_bits(p, bits, lanes);
  return widen(bits, T{});
}

inline Words load_codes(const uint8_t* p, AllLanes) {
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return widen(bytes);
}
inline Words load_codes(const uint8_t* p, FirstLanes lanes) {
  Bytes bytes{};
  std::memcpy(&bytes, p, lanes.count);
  return widen(bytes);
}

inline void store_codes(uint8_t* p, Words codes, AllLanes) {
  const Bytes bytes = narrow(codes);
  std::memcpy(p, &bytes, sizeof bytes);
}
inline void store_codes(uint8_t* p, Words codes, FirstLanes lanes) {
  const Bytes bytes = narrow(codes);
  std::memcpy(p, &bytes, lanes.count);
}

// The largest magnitude of a block as its codes are to be read: 0 where all count as zeros, NaN where a number is not
// finite. `block` has zeros behind `count` up to a whole vector.
inline float largest_of(const float* block, int64_t count) {
  using V = Vec<float>;
  Words most{};  // of the bits of magnitudes, which are in the order of these, with infinities and NaN last
  for (int64_t i = 0; i < count; i += V::kLanes) {
    const Words bits = Bits<V>::of(load<V>(block + i)) & 0x7fffffffu;
    most = most < bits ? bits : most;
  }
  uint32_t top = 0;
  for (int lane = 0; lane < V::kLanes; ++lane) top = top < most[lane] ? most[lane] : top;
  const float largest = Bits<float>::to(top);
  if (!(largest - largest == 0)) return Bits<float>::to(0x7fc00000u);
  return largest >= kSmallestLargest ? largest : 0.f;
}

}  // namespace
}  // namespace cpu
}  // namespace fusedtrain

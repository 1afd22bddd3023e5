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
#else
inline Words widen(Bytes b) { return __builtin_convertvector(b, Words); }
inline Bytes narrow(Words u) { return __builtin_convertvector(u, Bytes); }
#endif

// The random bits of elements first, first + 1, ... for one use.
class Draw {
 public:
  Draw(const RandomBits& bits, int64_t first, int use) : bits_(bits), first_(first), use_(use) {}
  Words operator()(int64_t offset) const {
    const int64_t element = first_ + offset;
    return bits_(lanes() + uint32_t(element), uint32_t(element >> 32), use_);
  }

 private:
  static Words lanes() {
    Words numbers;
    for (int i = 0; i < Vec<float>::kLanes; ++i) numbers[i] = uint32_t(i);
    return numbers;
  }
  RandomBits bits_;
  int64_t first_;
  int use_;
};

inline Vec<float> round_randomly(Vec<float> x, Words /*random*/, float) { return x; }
inline Vec<float> round_randomly(Vec<float> x, Words random, BFloat16) { return round_to_bfloat16(x, random); }
inline Vec<float> round_randomly(Vec<float> x, Words random, Float16) { return round_to_float16(x, random); }

// `count` elements of 16 or 32 bits; `to` has room for whole vectors and gets zeros behind.
template <class T>
void expand(const T* from, int64_t count, float* to) {
  for_each_vector<Vec<float>>(count, [=](int64_t i, auto lanes) { store(to + i, load<Vec<float>>(from + i, lanes)); });
}

template <class T>
void contract(const float* from, int64_t count, T* to, const Draw* draw) {
  using V = Vec<float>;
  for_each_vector<V>(count, [=](int64_t i, auto lanes) {
    const V x = load<V>(from + i);
    store(to + i, draw != nullptr ? round_randomly(x, (*draw)(i), T{}) : x, lanes);
  });
}

// One block of codes, see core/narrow.h.
template <bool kSigned>
void decode(const uint8_t* codes, float largest, int64_t count, float* to) {
  using V = Vec<float>;
  alignas(kVecBytes) uint8_t padded[kCodeBlock] = {};
  std::memcpy(padded, codes, count);
  const V scale{largest / kCodeTop};
  for (int64_t i = 0; i < count; i += V::kLanes) {
    Bytes bytes;
    std::memcpy(&bytes, padded + i, sizeof bytes);
    store(to + i, fusedtrain::decode<kSigned>(widen(bytes), scale));
  }
}

// Returns the largest magnitude; NaN where a number is not finite. `from` has zeros behind `count` up to a whole
// vector.
template <bool kSigned>
float encode(const float* from, int64_t count, uint8_t* codes, const Draw* draw) {
  using V = Vec<float>;
  V most(0), broken(0);
  for (int64_t i = 0; i < count; i += V::kLanes) {
    const V x = load<V>(from + i);
    most = at_least(most, magnitude(x));
    broken += x - x;
  }
  float largest = lane_sum(broken);  // 0 or NaN
  for (int lane = 0; lane < V::kLanes; ++lane) largest = largest < most.v[lane] ? most.v[lane] : largest;
  if (!(largest >= kSmallestLargest)) {
    std::memset(codes, 0, count);
    return largest == largest ? 0.f : largest;
  }
  const V scale{kCodeTop / largest};
  alignas(kVecBytes) uint8_t padded[kCodeBlock];
  for (int64_t i = 0; i < count; i += V::kLanes) {
    const Words random = draw != nullptr ? (*draw)(i) : Words{} + 0x8000u;
    const Bytes bytes = narrow(fusedtrain::encode<kSigned>(load<V>(from + i), scale, random));
    std::memcpy(padded + i, &bytes, sizeof bytes);
  }
  std::memcpy(codes, padded, count);
  return largest;
}

}  // namespace
}  // namespace cpu
}  // namespace fusedtrain

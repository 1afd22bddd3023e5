#pragma once
// __nv_bfloat16 for cuda_emu.h: the upper half of a float.
#include <cmath>
#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 b) {
  const uint32_t bits = uint32_t{b.bits} << 16;
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}
inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  if (std::isnan(f)) return {0x7fff};
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof(bits));
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};  // to nearest, ties to even
}

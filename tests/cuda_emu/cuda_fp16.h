#pragma once
// __half for cuda_emu.h, on the compiler's own 16-bit type.
struct __half {
  _Float16 value;
};

inline float __half2float(__half h) { return static_cast<float>(h.value); }
inline __half __float2half_rn(float f) { return {static_cast<_Float16>(f)}; }

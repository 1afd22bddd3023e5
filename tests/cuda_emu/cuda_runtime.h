#pragma once
// What kernels use of CUDA's own language and headers, for cuda_emu.h. A name that is missing here is a compile error:
// add it with the semantics of the CUDA programming guide.
#include <bit>
#include <cmath>

#include "cuda_emu.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (::cuda_emu::thread->index)
#define blockIdx (::cuda_emu::block->index)
#define blockDim (::cuda_emu::block->threads)
#define gridDim (::cuda_emu::block->blocks)

inline cudaError_t cudaGetLastError() { return std::exchange(cuda_emu::last_error, cudaSuccess); }

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  cuda_emu::barrier(file, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu) { cuda_emu::warp_operation(cuda_emu::WarpOp::kSync, mask); }

// A source outside the group of `width` lanes is the lane itself.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return cuda_emu::shuffle(mask, value, (cuda_emu::lane() & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int lane = cuda_emu::lane(), source = lane ^ bits;
  return cuda_emu::shuffle(mask, value, (source & ~(width - 1)) > (lane & ~(width - 1)) ? lane : source);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = cuda_emu::lane(), source = lane + static_cast<int>(delta);
  return cuda_emu::shuffle(mask, value, (lane & (width - 1)) + static_cast<int>(delta) < width ? source : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = cuda_emu::lane(), source = lane - static_cast<int>(delta);
  return cuda_emu::shuffle(mask, value, (lane & (width - 1)) >= static_cast<int>(delta) ? source : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) { return cuda_emu::vote(mask, predicate != 0); }
inline int __any_sync(unsigned mask, int predicate) { return cuda_emu::vote(mask, predicate != 0) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return cuda_emu::vote(mask, predicate == 0) == 0; }

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
void __stwb(T* p, T value) {
  *p = value;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline float __fdividef(float a, float b) {  // of div.approx.ftz
  const float q = std::fabs(b) > 0x1p126f && std::isfinite(b) ? 0 * a : a / b;
  return std::fabs(q) < 0x1p-126f ? 0 * q : q;
}
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline float __uint_as_float(uint32_t u) { return std::bit_cast<float>(u); }

#pragma once
// What every CUDA kernel file shares: launching, element types, 16-byte packs, sums over a warp.
// Outside nvcc this is the kernels' source on the CPU, under tests/cuda_emu.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/activation.h"
#include "core/types.h"
#include "core/visit.h"

namespace fusedtrain::cuda {

constexpr int kThreads = 256;
// Blocks per multiprocessor that registers must allow: up to 128 of them a thread. 512 threads with 64 bytes on their
// way each hide the latency of any GPU's memory; without this bound ptxas aims at 64 registers and spills to get there.
constexpr int kMinBlocks = 2;
constexpr int kWarp = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

constexpr int64_t kMaxGrid = 0x7fffffff;

template <class T>
FUSEDTRAIN_HD constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// Runs kernel(args...) on a row of blocks; returns the error code. No blocks, no launch.
template <class... P, class... A>
[[nodiscard]] int launch(void (*kernel)(P...), int64_t blocks, int threads, size_t shared_bytes, void* stream,
                         A... args) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMaxGrid) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks));
  const dim3 block(static_cast<unsigned>(threads));
#ifdef __CUDACC__
  if (shared_bytes > 48 << 10) {
    const int code =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (code != cudaSuccess) return code;
  }
  kernel<<<grid, block, shared_bytes, static_cast<cudaStream_t>(stream)>>>(args...);
#else
  cuda_emu::launch(kernel, grid, block, shared_bytes, stream, args...);
#endif
  return cudaGetLastError();
}

// The block's dynamic shared memory.
template <class T>
__device__ __forceinline__ T* shared_memory() {
#ifdef __CUDACC__
  extern __shared__ __align__(16) unsigned char memory[];
#else
  void* memory = cuda_emu::dynamic_shared_memory();
#endif
  return reinterpret_cast<T*>(memory);
}

// Act<a>::value(x), Act<a>::slope(x) and Act<a>::through(x, dy) for an `a` known at run time.
template <Activation... As>
struct AnyAct {
  template <class V>
  static __device__ V value(Activation a, V x) {
    V y = x;
    ((a == As ? (y = Act<As>::value(x), 0) : 0), ...);
    return y;
  }
  template <class V>
  static __device__ V slope(Activation a, V x) {
    return through(a, x, V(1));
  }
  template <class V>
  static __device__ V through(Activation a, V x, V dy) {
    V dx = dy;
    ((a == As ? (dx = Act<As>::through(x, dy), 0) : 0), ...);
    return dx;
  }
};

// T is the element type of the large tensors, Acc<T> that of sums and small vectors.
template <DType>
struct ElementOf;
template <>
struct ElementOf<DType::kFloat32> {
  using Type = float;
};
template <>
struct ElementOf<DType::kBFloat16> {
  using Type = __nv_bfloat16;
};
template <>
struct ElementOf<DType::kFloat16> {
  using Type = __half;
};
template <>
struct ElementOf<DType::kFloat64> {
  using Type = double;
};

template <class T>
struct AccOf {
  using Type = float;
};
template <>
struct AccOf<double> {
  using Type = double;
};
template <class T>
using Acc = typename AccOf<T>::Type;

__device__ __forceinline__ float to_acc(float v) { return v; }
__device__ __forceinline__ float to_acc(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_acc(__half v) { return __half2float(v); }
__device__ __forceinline__ double to_acc(double v) { return v; }
__device__ __forceinline__ void from_acc(float v, float& out) { out = v; }
__device__ __forceinline__ void from_acc(float v, __nv_bfloat16& out) { out = __float2bfloat16_rn(v); }
__device__ __forceinline__ void from_acc(float v, __half& out) { out = __float2half_rn(v); }
__device__ __forceinline__ void from_acc(double v, double& out) { out = v; }

// Returns f.template operator()<T>() for the element type of `dtype`.
template <class F>
[[nodiscard]] int visit_element(DType dtype, F&& f) {
  int code = cudaErrorInvalidValue;
  visit<DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64>(
      dtype, [&]<DType D>() { code = f.template operator()<typename ElementOf<D>::Type>(); });
  return code;
}

// The N consecutive elements that a thread moves at a time: kPack<T> in one 16-byte access, or a single one.
constexpr int kVectorBytes = 16;
template <class T>
constexpr int kPack = kVectorBytes / sizeof(T);

template <class T, int N>
struct alignas(sizeof(T) * N < kVectorBytes ? sizeof(T) * N : kVectorBytes) Pack {
  T v[N];
};

// Through uint4, and stores by an intrinsic, since the compiler takes structs apart.
template <int N, class T>
__device__ __forceinline__ Pack<T, N> load(const T* p) {
  Pack<T, N> pack;
  if constexpr (sizeof(pack) >= sizeof(uint4)) {
    uint4 words[sizeof(pack) / sizeof(uint4)];
#pragma unroll
    for (size_t i = 0; i < sizeof(pack) / sizeof(uint4); ++i) words[i] = reinterpret_cast<const uint4*>(p)[i];
    memcpy(&pack, words, sizeof(pack));
  } else {
    pack = *reinterpret_cast<const Pack<T, N>*>(p);
  }
  return pack;
}
template <int N, class T>
__device__ __forceinline__ void store(T* p, const Pack<T, N>& pack) {
  if constexpr (sizeof(pack) >= sizeof(uint4)) {
    uint4 words[sizeof(pack) / sizeof(uint4)];
    memcpy(words, &pack, sizeof(pack));
#pragma unroll
    for (size_t i = 0; i < sizeof(pack) / sizeof(uint4); ++i) __stwb(reinterpret_cast<uint4*>(p) + i, words[i]);
  } else {
    *reinterpret_cast<Pack<T, N>*>(p) = pack;
  }
}

// Pairs of 16-bit elements by their common word, which the compiler would take apart where it is loaded.
template <class T, int N>
__device__ __forceinline__ Pack<Acc<T>, N> to_acc(const Pack<T, N>& pack) {
  Pack<Acc<T>, N> out;
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      unsigned word;
      memcpy(&word, &pack.v[j], sizeof(word));
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const unsigned low = word << 16, high = word & 0xffff0000u;
        memcpy(&out.v[j], &low, sizeof(low));
        memcpy(&out.v[j + 1], &high, sizeof(high));
      } else {
        T pair[2];
        memcpy(pair, &word, sizeof(word));
        out.v[j] = to_acc(pair[0]);
        out.v[j + 1] = to_acc(pair[1]);
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) out.v[j] = to_acc(pack.v[j]);
  }
  return out;
}
template <class A, int N>
__device__ __forceinline__ Pack<A, N> operator*(Pack<A, N> a, const Pack<A, N>& b) {
#pragma unroll
  for (int j = 0; j < N; ++j) a.v[j] *= b.v[j];
  return a;
}
template <class A, int N>
__device__ __forceinline__ Pack<A, N> operator*(Pack<A, N> a, A b) {
#pragma unroll
  for (int j = 0; j < N; ++j) a.v[j] *= b;
  return a;
}

// Packs that a thread loads before it uses the first; float64 is not worth the registers.
template <class T>
constexpr int kUnrollOf = sizeof(T) == 8 ? 1 : 4;

template <class... P>
FUSEDTRAIN_HD bool is_aligned(const P*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % kVectorBytes == 0) && ...);
}

// Sum over a warp, in a fixed order; every lane gets it.
template <class A>
__device__ __forceinline__ A warp_sum(A v) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) v += __shfl_xor_sync(kFullWarp, v, step);
  return v;
}

}  // namespace fusedtrain::cuda

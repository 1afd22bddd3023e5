// Kernels with one fault each, and a right one: test_cuda_emu.py asserts that the emulator notices.
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 64;

float* shared() { return static_cast<float*>(cuda_emu::dynamic_shared_memory()); }

// out[i] = in[63 - i] through shared memory
__global__ void right(const float* in, float* out) {
  shared()[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = shared()[kThreads - 1 - threadIdx.x];
}

__global__ void missing_barrier(const float* in, float* out) {
  shared()[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = shared()[kThreads - 1 - threadIdx.x];
}

__global__ void divergent_barrier(const float* in, float* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = in[threadIdx.x];
}

__global__ void shuffle_from_nobody(const float* in, float* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, in[threadIdx.x], 20);
}

__global__ void lane_outside_mask(const float* in, float* out) {
  out[threadIdx.x] = __shfl_xor_sync(0xffffu, in[threadIdx.x], 1);
}

__global__ void barrier_inside_warp_operation(const float* in, float* out) {
  if (threadIdx.x % 32 == 0) __syncthreads();
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, in[threadIdx.x], 1);
}

__global__ void shared_out_of_bounds(const float* in, float* out) {
  shared()[threadIdx.x + 1] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = shared()[threadIdx.x + 1];
}

__global__ void index_out_of_bounds(const float* in, float* out) {
  float own[2] = {in[0], in[1]};
  out[threadIdx.x] = own[threadIdx.x];
}

__global__ void misaligned(const float* in, float* out) {
  const auto bytes = reinterpret_cast<const char*>(in);
  out[threadIdx.x] = *reinterpret_cast<const float*>(bytes + threadIdx.x);
}

template <void (*kKernel)(const float*, float*)>
int run(const float* in, float* out) {
  cuda_emu::launch(kKernel, 1, kThreads, kThreads * sizeof(float), nullptr, in, out);
  return cudaGetLastError();
}

}  // namespace

extern "C" {
int run_right(const float* in, float* out) { return run<right>(in, out); }
int run_missing_barrier(const float* in, float* out) { return run<missing_barrier>(in, out); }
int run_divergent_barrier(const float* in, float* out) { return run<divergent_barrier>(in, out); }
int run_shuffle_from_nobody(const float* in, float* out) { return run<shuffle_from_nobody>(in, out); }
int run_lane_outside_mask(const float* in, float* out) { return run<lane_outside_mask>(in, out); }
int run_barrier_inside_warp_operation(const float* in, float* out) {
  return run<barrier_inside_warp_operation>(in, out);
}
int run_shared_out_of_bounds(const float* in, float* out) { return run<shared_out_of_bounds>(in, out); }
int run_index_out_of_bounds(const float* in, float* out) { return run<index_out_of_bounds>(in, out); }
int run_misaligned(const float* in, float* out) { return run<misaligned>(in, out); }
int launch_right(unsigned blocks, unsigned threads, uint64_t shared_bytes) {
  cuda_emu::launch(right, blocks, threads, shared_bytes, nullptr, static_cast<const float*>(nullptr),
                   static_cast<float*>(nullptr));
  return cudaGetLastError();
}
}

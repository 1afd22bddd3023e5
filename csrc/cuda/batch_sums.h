#pragma once
// What the directions of batch_norm_act share on CUDA: the vectors of a channel, and two sums per channel over the
// batch. The first stage of the sums is a walk of core/cuda_images.h in the accumulation type, which leaves parts; the
// second adds those up in double precision. Both run in an order that depends on shape and alignment alone.
#include "batch_norm_act.h"
#include "core/cuda_images.h"

namespace fusedtrain::cuda {

// The channel of a plane.
struct Channels {
  int64_t c;
  Divisor divisor;

  explicit Channels(int64_t c) : c(c), divisor(c) {}
  __device__ int64_t operator()(int64_t plane) const { return divisor.remainder(plane); }
};

// K factors of N channels from `channel` and N planes from `plane` on: Derived::channel(channel, plane, factors).
template <class Derived, class A, int K>
struct ChannelFactors {
  template <int N>
  using Factors = FactorPack<A, K, N>;
  Channels channels;

  template <int N>
  __device__ void factors(int64_t plane, Factors<N>& out) const {
    static_cast<const Derived*>(this)->channel(channels(plane), plane, out);
  }
  __device__ void factor(int64_t plane, Factors<1>& out) const { factors(plane, out); }
};

// The factors mean, weight rstd and bias.
template <class A, int K, int N>
__device__ __forceinline__ void load_affine(const A* mean, const A* rstd, const A* weight, const A* bias,
                                            int64_t channel, FactorPack<A, K, N>& out) {
  out.f[0] = load<N>(mean + channel);
  out.f[1] = load<N>(weight + channel) * load<N>(rstd + channel);
  out.f[2] = load<N>(bias + channel);
}

template <class A, int K>
struct Sums {
  static constexpr int kParts = K;
  A part[kParts] = {};

  __device__ void merge(const Sums& o) {
#pragma unroll
    for (int k = 0; k < K; ++k) part[k] += o.part[k];
  }
};

// Where a Term leaves sums of a plane: partial [n, K, c]; and the two of part p of a channel.
template <int K, class A>
__device__ __forceinline__ void store_part(A* partial, const Channels& channels, int64_t plane, const A* sums) {
  const int64_t channel = channels(plane), at = K * (plane - channel) + channel;
#pragma unroll
  for (int k = 0; k < K; ++k) partial[at + k * channels.c] = sums[k];
}
template <class A>
__device__ __forceinline__ void load_part(const A* partial, const Channels& channels, int64_t p, int64_t channel,
                                          double (&sums)[2]) {
  sums[0] += static_cast<double>(partial[2 * p * channels.c + channel]);
  sums[1] += static_cast<double>(partial[(2 * p + 1) * channels.c + channel]);
}

constexpr int kFinishChannels = 8;  // one 32-byte access; the other threads of a block split the parts
constexpr int kMostFinishThreads = 1024;

// term.finish_channel(channel, sum, sum) with the totals of what term.add_part(part, channel, sums) adds.
template <class Term>
__global__ void __launch_bounds__(kMostFinishThreads) finish_batch_kernel(Term term, int64_t parts, int64_t c) {
  const int threads = static_cast<int>(blockDim.x);
  const int64_t channel = int64_t{blockIdx.x} * kFinishChannels + threadIdx.x % kFinishChannels;
  double sums[2] = {0, 0};
#pragma unroll 8
  for (int64_t p = threadIdx.x / kFinishChannels; p < parts && channel < c; p += threads / kFinishChannels) {
    term.add_part(p, channel, sums);
  }
  double* shared = shared_memory<double>();  // [2, threads]
  for (int half = threads / 2; half >= kFinishChannels; half /= 2) {
    const int at = static_cast<int>(threadIdx.x);
    if (at >= half && at < 2 * half) shared[at] = sums[0], shared[threads + at] = sums[1];
    __syncthreads();
    if (at < half) sums[0] += shared[at + half], sums[1] += shared[threads + at + half];
    __syncthreads();
  }
  if (threadIdx.x < kFinishChannels && channel < c) term.finish_channel(channel, sums[0], sums[1]);
}

template <class Term>
[[nodiscard]] int finish_batch(const Term& term, int64_t parts, int64_t c, void* stream) {
  constexpr int kPartsOfLane = 4;
  int threads = kThreads;  // a power of two
  while (threads < kMostFinishThreads && parts > threads / kFinishChannels * kPartsOfLane) threads *= 2;
  return launch(finish_batch_kernel<Term>, ceil_div<int64_t>(c, kFinishChannels), threads, 2 * threads * sizeof(double),
                stream, term, parts, c);
}

template <class Term>
[[nodiscard]] int reduce_batch(const Images& images, const Term& term, bool aligned, void* stream) {
  // The samples of channels_last are one image, whose chunks may be of any size.
  constexpr int64_t kMostParts = 2048;
  Images batch = images;
  int64_t parts = std::min(kMostParts, std::max<int64_t>(1, images.n * reduce_chunks(images)));
  if (images.layout == Layout::kChannelsLast && images.n > 0) batch.n = 1, batch.hw *= images.n;
  const int code = reduce(batch, term, aligned, ceil_div(batch.hw, parts), term.partial, stream, &parts);
  return code != cudaSuccess ? code : finish_batch(at_run_time(term), parts, images.c, stream);
}

}  // namespace fusedtrain::cuda

// grad_norm on CUDA: one launch over the chunks of all gradients, one that adds what they sum up to.
#include "core/cuda_lists.h"
#include "grad_norm.h"

namespace fusedtrain::cuda {
namespace {

template <class T>
__device__ double sum_of_squares(const T* g, int count) {
  Acc<T> sum = 0;  // of kListChunk / kThreads elements
  for_each_pack<T>(count, is_aligned(g), [&]<int N>(int i) {
    const Pack<T, N> pack = load<N>(g + i);
#pragma unroll
    for (int j = 0; j < N; ++j) sum += to_acc(pack.v[j]) * to_acc(pack.v[j]);
  });
  return sum;
}

__global__ void __launch_bounds__(kThreads, kMinBlocks)
    grad_norm_partial_kernel(const __grid_constant__ SegmentOf<GradNorm> s) {
  const Chunk chunk = chunk_of_block(s);
  const NormTensor& t = s.rows[chunk.row];
  double sum = 0;
  visit_row(t.dtype,
            [&]<class T>() { sum = sum_of_squares(static_cast<const T*>(t.grad) + chunk.begin, chunk.count); });
  sum = block_sum(sum, shared_memory<double>());
  if (threadIdx.x == 0) s.list.partial[s.chunks_before + blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) grad_norm_finish_kernel(const double* partial,  // [chunks]
                                                                    double* norm,           // [1]
                                                                    int64_t chunks) {
  double sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < chunks; i += kThreads) sum += partial[i];
  sum = block_sum(sum, shared_memory<double>());
  if (threadIdx.x == 0) *norm = ::sqrt(sum);
}

}  // namespace

int grad_norm(const GradNorm& a, void* stream) {
  const int error = for_each_segment(a, [&](const SegmentOf<GradNorm>& s) {
    return launch(grad_norm_partial_kernel, s.first[s.count], kThreads, kBlockSumBytes, stream, s);
  });
  if (error != cudaSuccess) return error;
  return launch(grad_norm_finish_kernel, 1, kThreads, kBlockSumBytes, stream, a.partial, a.norm,
                a.first_chunk[a.count]);
}

}  // namespace fusedtrain::cuda

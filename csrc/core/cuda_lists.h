#pragma once
// Walking over lists of tensors on CUDA: a block to each chunk of kListChunk elements, whatever tensor it lies in.
//
// The list travels as the kernel's argument, in segments of as many rows as fit there. A launch so needs no table on
// the device, no copy to it and no memory that must outlive the launch, and a CUDA graph keeps the addresses it was
// captured with.
#include "core/cuda.h"
#include "grad_norm.h"

namespace fusedtrain::cuda {

#if CUDART_VERSION >= 12010
constexpr size_t kArgumentBytes = 32764;
#else
constexpr size_t kArgumentBytes = 4096;
#endif

// Rows [begin, begin + count) of a list.
template <class List, class Row>
struct Segment {
  static constexpr int kRows = (kArgumentBytes - sizeof(List) - 32) / (sizeof(Row) + sizeof(int));
  List list;
  int64_t begin, chunks_before;  // rows and chunks of the list before the segment
  int count;
  int first[kRows + 1];  // chunks of the segment before each row; the last is their total
  Row rows[kRows];
};

template <class List>
using SegmentOf = Segment<List, std::remove_cvref_t<decltype(*List::tensors)>>;

// f(segment) for all segments of a list until one returns an error code.
template <class List, class F>
[[nodiscard]] int for_each_segment(const List& a, F&& f) {
  SegmentOf<List> s;
  static_assert(sizeof(s) <= kArgumentBytes);
  s.list = a;
  for (s.begin = 0; s.begin < a.count; s.begin += s.count) {
    s.count = static_cast<int>(std::min<int64_t>(s.kRows, a.count - s.begin));
    s.chunks_before = a.first_chunk[s.begin];
    for (int i = 0; i <= s.count; ++i) s.first[i] = static_cast<int>(a.first_chunk[s.begin + i] - s.chunks_before);
    std::copy_n(a.tensors + s.begin, s.count, s.rows);
    if (const int error = f(s)) return error;
  }
  return cudaSuccess;
}

// What a block works on: elements [begin, begin + count) of a row.
struct Chunk {
  int row;
  int64_t begin;
  int count;
};

template <class S>
__device__ __forceinline__ Chunk chunk_of_block(const S& s) {
  const int chunk = static_cast<int>(blockIdx.x);
  int row = 0;
  for (int end = s.count; end - row > 1;) {  // first[row] <= chunk < first[end]
    const int middle = (row + end) / 2;
    if (s.first[middle] <= chunk) {
      row = middle;
    } else {
      end = middle;
    }
  }
  const int64_t begin = (chunk - s.first[row]) * kListChunk, rest = s.rows[row].numel - begin;
  return {row, begin, static_cast<int>(rest < kListChunk ? rest : kListChunk)};
}

// f.template operator()<N>(i) by the threads of a block for all packs of elements [0, count): 16 bytes at a time where
// the tensors are aligned to that, single elements behind and elsewhere.
template <class T, class F>
__device__ __forceinline__ void for_each_pack(int count, bool aligned, F&& f) {
  constexpr int N = kPack<T>;
  const int whole = aligned ? count / N * N : 0;
  for (int i = threadIdx.x * N; i < whole; i += kThreads * N) f.template operator()<N>(i);
  for (int i = whole + threadIdx.x; i < count; i += kThreads) f.template operator()<1>(i);
}

// f.template operator()<T>() for the element type of `dtype`, in a kernel.
template <class F>
__device__ __forceinline__ void visit_row(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f.template operator()<float>();
    case DType::kBFloat16:
      return f.template operator()<__nv_bfloat16>();
    case DType::kFloat16:
      return f.template operator()<__half>();
    case DType::kFloat64:
      return f.template operator()<double>();
  }
}

// Sum over a block, in a fixed order; thread 0 gets it. shared: [kThreads / kWarp], used by nothing else.
__device__ __forceinline__ double block_sum(double v, double* shared) {
  v = warp_sum(v);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = v;
  __syncthreads();
  v = 0;
  for (int i = 0; threadIdx.x == 0 && i < kThreads / kWarp; ++i) v += shared[i];
  return v;
}
constexpr size_t kBlockSumBytes = kThreads / kWarp * sizeof(double);

}  // namespace fusedtrain::cuda

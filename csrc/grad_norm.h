#pragma once
// grad_norm: the L2 norm of a list of gradients, as if they were one vector.
//
//   partial[k] = sum of g^2 over chunk k          norm = sqrt(sum_k partial[k])
//
// The chunks lie inside one tensor and are added in order: the result does not depend on the number of threads.
#include "core/isa.h"
#include "core/types.h"

namespace fusedtrain {

// Lists of tensors are cut into chunks of this many elements; the last one of a tensor is shorter.
constexpr int64_t kListChunk = 8192;

struct NormTensor {
  int64_t numel;
  DType dtype;
  const void* grad;  // dtype [numel]
};

struct GradNorm {
  int64_t count;
  const NormTensor* tensors;   // [count]
  const int64_t* first_chunk;  // [count + 1]: chunks of the tensors before; the last is their total
  double* partial;             // [chunks]
  double* norm;                // [1]
};

namespace cpu {
// Items: chunks. Writes partial.
template <Isa I>
void grad_norm_partial(const GradNorm& a, int64_t begin, int64_t end);
}  // namespace cpu

namespace cuda {
[[nodiscard]] int grad_norm(const GradNorm& a, void* stream);
}  // namespace cuda

}  // namespace fusedtrain

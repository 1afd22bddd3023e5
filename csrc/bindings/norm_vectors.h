#pragma once
// The small tensors of batch_norm_act as its kernels read them.
#include "bindings/common.h"

namespace fusedtrain::bindings {

// Dense copies, which live as long as the kernels run.
struct NormVectors {
  Tensor mean, rstd, weight, bias;
};

// For rows of `fold` times the channels of x, over which they are repeated.
NormVectors norm_vectors(const Tensor& x, int64_t fold, const Tensor& mean, const Tensor& rstd,
                         const std::optional<Tensor>& weight, const std::optional<Tensor>& bias);

// The values of a dense [C], `fold` times.
Tensor repeated(const Tensor& t, int64_t fold);

}  // namespace fusedtrain::bindings

#pragma once
// The small tensors of batch_norm_act as its kernels read them.
#include "bindings/common.h"

namespace fusedtrain::bindings {

// Dense copies, which live as long as the kernels run.
struct NormVectors {
  Tensor mean, rstd, weight, bias;
};

// In which order columns that belong to channels stand: all channels, again and again, or the columns of one together.
enum class Fold { kRows, kPlanes };

// For rows of `fold` times the channels of x, over which they are repeated.
NormVectors norm_vectors(const Tensor& x, int64_t fold, Fold order, const Tensor& mean, const Tensor& rstd,
                         const std::optional<Tensor>& weight, const std::optional<Tensor>& bias);

// The values of a dense [C], `fold` times.
Tensor repeated(const Tensor& t, int64_t fold, Fold order);

}  // namespace fusedtrain::bindings

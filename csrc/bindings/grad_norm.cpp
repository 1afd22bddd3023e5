// Tensors -> GradNorm -> kernels.
#include "grad_norm.h"

#include <cmath>
#include <numeric>

#include "bindings/lists.h"

namespace fusedtrain::bindings {
namespace {

// `like` lends its device to the result.
Tensor norm_of(const std::vector<NormTensor>& tensors, const Tensor& like) {
  const std::vector<int64_t> first = first_chunks(tensors.data(), int64_t(tensors.size()));
  const Tensor partial = torch::stable::new_empty(like, {first.back()}, ScalarType::Double);
  const Tensor norm = torch::stable::new_empty(like, {}, ScalarType::Double);
  const GradNorm a{.count = int64_t(tensors.size()),
                   .tensors = tensors.data(),
                   .first_chunk = first.data(),
                   .partial = static_cast<double*>(partial.mutable_data_ptr()),
                   .norm = static_cast<double*>(norm.mutable_data_ptr())};
  if (!like.is_cuda()) {
    parallel_items(0, first.back(), kListChunk,
                   [&]<Isa I>(int64_t begin, int64_t end) { cpu::grad_norm_partial<I>(a, begin, end); });
    *a.norm = std::sqrt(std::accumulate(a.partial, a.partial + first.back(), 0.0));
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("grad_norm", like);
    launch(cuda::grad_norm(a, launch.stream));
  }
  return norm;
}

Tensor grad_norm(Tensors grads) {
  STD_TORCH_CHECK(!grads.empty(), "fusedtrain: grad_norm needs at least one gradient");
  std::vector<NormTensor> tensors;
  tensors.reserve(grads.size());
  for (const Tensor& g : grads) {
    check_device("grads", g, grads[0]);
    check_dense("grads", g);
    tensors.push_back({.numel = g.numel(), .dtype = dtype_of(g), .grad = g.const_data_ptr()});
  }
  return norm_of(tensors, grads[0]);
}

Tensor grad_norm_table(Tensors tables, Tensor like) {
  STD_TORCH_CHECK(!tables.empty(), "fusedtrain: grad_norm needs at least one table");
  std::vector<NormTensor> tensors;
  for (const Tensor& table : tables) {
    const StepTensor* rows = static_cast<const StepTensor*>(table.const_data_ptr());
    for (int64_t i = 0; i < rows_of(table); ++i) {
      tensors.push_back({.numel = rows[i].numel, .dtype = rows[i].dtype, .grad = rows[i].grad});
    }
  }
  return norm_of(tensors, like);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CPU, m) {
  m.impl("grad_norm", TORCH_BOX(&grad_norm));
  m.impl("grad_norm_table", TORCH_BOX(&grad_norm_table));
}
#ifdef FUSEDTRAIN_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CUDA, m) {
  m.impl("grad_norm", TORCH_BOX(&grad_norm));
  m.impl("grad_norm_table", TORCH_BOX(&grad_norm_table));
}
#endif

}  // namespace fusedtrain::bindings

// Tensors -> GradNorm -> kernels.
#include "grad_norm.h"

#include <cmath>

#include "bindings/lists.h"

namespace fusedtrain::bindings {
namespace {

Tensor grad_norm(Tensors grads) {
  STD_TORCH_CHECK(!grads.empty(), "fusedtrain: grad_norm needs at least one gradient");
  std::vector<NormTensor> tensors;
  tensors.reserve(grads.size());
  for (const Tensor& g : grads) {
    check_dense("grads", g);
    tensors.push_back({.numel = g.numel(), .dtype = dtype_of(g), .grad = g.const_data_ptr()});
  }
  const std::vector<int64_t> first = first_chunks(grads);
  std::vector<double> partial(first.back());
  const GradNorm a{.count = int64_t(grads.size()),
                   .tensors = tensors.data(),
                   .first_chunk = first.data(),
                   .partial = partial.data()};
  parallel_items(0, first.back(), kListChunk,
                 [&]<Isa I>(int64_t begin, int64_t end) { cpu::grad_norm_partial<I>(a, begin, end); });
  double sum = 0;
  for (const double p : partial) sum += p;
  const Tensor norm = torch::stable::new_empty(grads[0], {}, ScalarType::Double);
  *static_cast<double*>(norm.mutable_data_ptr()) = std::sqrt(sum);
  return norm;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CPU, m) { m.impl("grad_norm", TORCH_BOX(&grad_norm)); }

}  // namespace fusedtrain::bindings

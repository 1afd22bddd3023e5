// Tensors -> GlobalResponseNorm -> kernels.
#include "global_response_norm.h"

#include "bindings/channels.h"

namespace fusedtrain::bindings {
namespace {

std::tuple<Tensor, Tensor> global_response_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                                                int64_t in_act) {
  const Images m = images_of(x, in_act);
  const Tensor w = small_input("weight", weight, x, m.c), b = small_input("bias", bias, x, m.c);
  const Tensor y = torch::stable::empty_like(x), norm = empty_acc(x, {m.n, m.c}), factor = empty_acc(x, {m.n, m.c});
  const Tensor partial = empty_acc(x, {m.n, reduce_chunks(m), m.c});
  const GlobalResponseNorm a{.images = m,
                             .eps = eps,
                             .x = x.const_data_ptr(),
                             .weight = w.const_data_ptr(),
                             .bias = b.const_data_ptr(),
                             .partial = partial.mutable_data_ptr(),
                             .norm = norm.mutable_data_ptr(),
                             .factor = factor.mutable_data_ptr(),
                             .y = y.mutable_data_ptr()};
  if (!x.is_cuda()) {
    for_sample_groups(m, 2, [&](int64_t first, int64_t last) {
      parallel_samples(m, reduce_items(m), first, last,
                       [&]<Isa I>(int64_t i, int64_t j) { cpu::global_response_norm_partial<I>(a, i, j); });
      parallel_items(first, last, m.c * reduce_chunks(m),
                     [&]<Isa I>(int64_t i, int64_t j) { cpu::global_response_norm_finish<I>(a, i, j); });
      parallel_samples(m, map_items(m), first, last,
                       [&]<Isa I>(int64_t i, int64_t j) { cpu::global_response_norm<I>(a, i, j); });
    });
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("global_response_norm", x);
    launch(cuda::global_response_norm(a, launch.stream));
  }
  return {y, norm};
}

std::tuple<Tensor, Tensor, Tensor> global_response_norm_backward(const Tensor& dy, const Tensor& x,
                                                                 const Tensor& weight, const Tensor& norm, double eps,
                                                                 int64_t in_act, bool need_dx) {
  const Images m = images_of(x, in_act);
  check_same("dy", dy, x);
  const Tensor w = small_input("weight", weight, x, m.c), l2 = small_input("norm", norm, x, m.n * m.c);
  const Tensor dx = need_dx ? torch::stable::empty_like(x) : torch::stable::new_empty(x, {0});
  const Tensor dweight = empty_acc(x, {m.c}), dbias = empty_acc(x, {m.c});
  const Tensor partial = empty_acc(x, {m.n, reduce_chunks(m), GlobalResponseNormBackward::kSums, m.c});
  const Tensor rows = empty_acc(x, {4, m.n, m.c});
  const auto row = [&](int64_t k) { return torch::stable::select(rows, 0, k).mutable_data_ptr(); };
  const GlobalResponseNormBackward a{.images = m,
                                     .eps = eps,
                                     .dy = dy.const_data_ptr(),
                                     .x = x.const_data_ptr(),
                                     .weight = w.const_data_ptr(),
                                     .norm = l2.const_data_ptr(),
                                     .partial = partial.mutable_data_ptr(),
                                     .factor = row(0),
                                     .slope = row(1),
                                     .dweights = row(2),
                                     .dbiases = row(3),
                                     .dx = data_or_null(dx),
                                     .dweight = dweight.mutable_data_ptr(),
                                     .dbias = dbias.mutable_data_ptr()};
  if (!x.is_cuda()) {
    for_sample_groups(m, 3, [&](int64_t first, int64_t last) {
      parallel_samples(m, reduce_items(m), first, last,
                       [&]<Isa I>(int64_t i, int64_t j) { cpu::global_response_norm_backward_partial<I>(a, i, j); });
      parallel_items(first, last, m.c * reduce_chunks(m),
                     [&]<Isa I>(int64_t i, int64_t j) { cpu::global_response_norm_backward_finish<I>(a, i, j); });
      if (!need_dx) return;
      parallel_samples(m, map_items(m), first, last,
                       [&]<Isa I>(int64_t i, int64_t j) { cpu::global_response_norm_backward<I>(a, i, j); });
    });
    parallel_items(0, m.c, m.n,
                   [&]<Isa I>(int64_t i, int64_t j) { cpu::global_response_norm_backward_params<I>(a, i, j); });
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("global_response_norm_backward", x);
    launch(cuda::global_response_norm_backward(a, launch.stream));
  }
  return {dx, dweight, dbias};
}

template <class Library>
void implement(Library& m) {
  m.impl("global_response_norm", TORCH_BOX(&global_response_norm));
  m.impl("global_response_norm_backward", TORCH_BOX(&global_response_norm_backward));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CPU, m) { implement(m); }
#ifdef FUSEDTRAIN_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CUDA, m) { implement(m); }
#endif

}  // namespace fusedtrain::bindings

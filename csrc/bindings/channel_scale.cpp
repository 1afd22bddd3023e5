// Tensors -> ChannelScale -> kernels.
#include "channel_scale.h"

#include "bindings/channels.h"

namespace fusedtrain::bindings {
namespace {

Tensor channel_scale(const Tensor& x, const Tensor& gate, int64_t in_act) {
  const Images m = images_of(x, in_act);
  const Tensor g = small_input("gate", gate, x, m.n * m.c);
  const Tensor y = torch::stable::empty_like(x);
  const ChannelScale a{.images = m, .x = x.const_data_ptr(), .gate = g.const_data_ptr(), .y = y.mutable_data_ptr()};
  if (!x.is_cuda()) {
    scale_samples(a, 0, m.n);
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("channel_scale", x);
    launch(cuda::channel_scale(a, launch.stream));
  }
  return y;
}

std::tuple<Tensor, Tensor> channel_scale_backward(const Tensor& dy, const Tensor& x, const Tensor& gate, int64_t in_act,
                                                  bool need_dx, bool need_dgate) {
  const Images m = images_of(x, in_act);
  check_same("dy", dy, x);
  const Tensor g = small_input("gate", gate, x, m.n * m.c);
  const Tensor dx = need_dx ? torch::stable::empty_like(x) : torch::stable::new_empty(x, {0});
  const Tensor dgate = need_dgate ? empty_acc(x, {m.n, m.c}) : empty_acc(x, {0});
  const Tensor partial = empty_acc(x, {m.n, need_dgate ? reduce_chunks(m) : 0, m.c});
  const ChannelScaleDot dot{.images = m,
                            .dy = dy.const_data_ptr(),
                            .x = x.const_data_ptr(),
                            .partial = partial.mutable_data_ptr(),
                            .dgate = dgate.mutable_data_ptr(),
                            .gate = g.const_data_ptr(),
                            .dx = need_dx ? dx.mutable_data_ptr() : nullptr};
  const ChannelScaleBackward back{.images = m,
                                  .pool = Pool::kAvg,
                                  .dy = dy.const_data_ptr(),
                                  .x = x.const_data_ptr(),
                                  .gate = g.const_data_ptr(),
                                  .dpooled = nullptr,
                                  .peak = nullptr,
                                  .ties = nullptr,
                                  .dx = dx.mutable_data_ptr()};
  if (!x.is_cuda()) {
    for_sample_groups(m, 2, [&](int64_t n, int64_t end) {
      if (need_dgate) dot_samples(dot, n, end);
      if (need_dx) backward_samples(back, n, end);
    });
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("channel_scale_backward", x);
    if (need_dgate) launch(cuda::channel_scale_dot(dot, launch.stream));
    if (need_dx && !need_dgate) launch(cuda::channel_scale_backward(back, launch.stream));
  }
  return {dx, dgate};
}

template <class Library>
void implement(Library& m) {
  m.impl("channel_scale", TORCH_BOX(&channel_scale));
  m.impl("channel_scale_backward", TORCH_BOX(&channel_scale_backward));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CPU, m) { implement(m); }
#ifdef FUSEDTRAIN_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CUDA, m) { implement(m); }
#endif

}  // namespace fusedtrain::bindings

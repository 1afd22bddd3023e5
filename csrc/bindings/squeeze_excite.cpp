// Tensors -> ChannelPool, SqueezeExcite, ChannelScale -> kernels.
#include "squeeze_excite.h"

#include "bindings/channels.h"
#include "bindings/gate_network.h"

namespace fusedtrain::bindings {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> squeeze_excite(
    const Tensor& x, const Tensor& w1, const std::optional<Tensor>& b1, const Tensor& w2,
    const std::optional<Tensor>& b2, int64_t act, int64_t gate_act, int64_t pool, int64_t in_act) {
  const Images m = images_of(x, in_act);
  const GateNetwork excite =
      gate_network(x, w1, b1, w2, b2, activation_of("act", act), activation_of("gate_act", gate_act));
  const bool with_peak = pool_of(pool) == Pool::kAvgMax;
  const Tensor partial = empty_acc(x, {m.n, reduce_chunks(m), 3, m.c});
  const Tensor peak = with_peak ? empty_acc(x, {m.n, m.c}) : empty_acc(x, {0});
  const Tensor ties = with_peak ? empty_acc(x, {m.n, m.c}) : empty_acc(x, {0});
  const Tensor y = torch::stable::empty_like(x);
  const ChannelPool squeeze{.images = m,
                            .pool = pool_of(pool),
                            .x = x.const_data_ptr(),
                            .partial = partial.mutable_data_ptr(),
                            .pooled = excite.pooled.mutable_data_ptr(),
                            .peak = data_or_null(peak),
                            .ties = data_or_null(ties)};
  const ChannelScale scale{
      .images = m, .x = x.const_data_ptr(), .gate = excite.gate.const_data_ptr(), .y = y.mutable_data_ptr()};
  if (!x.is_cuda()) {
    for_sample_groups(m, 1, [&](int64_t n, int64_t end) {
      pool_samples(squeeze, n, end);
      excite_samples(excite.args, n, end);
      scale_samples(scale, n, end);
    });
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("squeeze_excite", x);
    launch(cuda::channel_pool(squeeze, launch.stream));
    launch(cuda::squeeze_excite(excite.args, launch.stream));
    launch(cuda::channel_scale(scale, launch.stream));
  }
  return {y, excite.pooled, excite.hidden, excite.logits, peak, ties};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> squeeze_excite_backward(
    const Tensor& dy, const Tensor& x, const Tensor& w1, const Tensor& w2, const Tensor& pooled, const Tensor& hidden,
    const Tensor& logits, const Tensor& kept_peak, const Tensor& kept_ties, int64_t act, int64_t gate_act, int64_t pool,
    int64_t in_act, bool need_dx, bool need_dw) {
  const Images m = images_of(x, in_act);
  check_same("dy", dy, x);
  const GateGradients excite = gate_gradients(x, w1, w2, pooled, hidden, logits, activation_of("act", act),
                                              activation_of("gate_act", gate_act), need_dw);
  const Tensor peak = kept_of_peaks("peak", kept_peak, x, pool_of(pool));
  const Tensor ties = kept_of_peaks("ties", kept_ties, x, pool_of(pool));
  const Tensor partial = empty_acc(x, {m.n, reduce_chunks(m), m.c});
  const Tensor dx = need_dx ? torch::stable::empty_like(x) : torch::stable::new_empty(x, {0});
  const ChannelScaleDot dot{.images = m,
                            .dy = dy.const_data_ptr(),
                            .x = x.const_data_ptr(),
                            .partial = partial.mutable_data_ptr(),
                            .dgate = excite.dgate.mutable_data_ptr(),
                            .gate = nullptr,
                            .dx = nullptr};
  const ChannelScaleBackward back{.images = m,
                                  .pool = pool_of(pool),
                                  .dy = dy.const_data_ptr(),
                                  .x = x.const_data_ptr(),
                                  .gate = excite.gate.const_data_ptr(),
                                  .dpooled = excite.dpooled.const_data_ptr(),
                                  .peak = data_or_null(peak),
                                  .ties = data_or_null(ties),
                                  .dx = dx.mutable_data_ptr()};
  if (!x.is_cuda()) {
    for_sample_groups(m, 2, [&](int64_t n, int64_t end) {
      dot_samples(dot, n, end);
      excite_backward_samples(excite.args, n, end);
      if (need_dx) backward_samples(back, n, end);
    });
    if (need_dw) excite_weight_backward(excite.args);
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("squeeze_excite_backward", x);
    launch(cuda::channel_scale_dot(dot, launch.stream));
    launch(cuda::squeeze_excite_backward(excite.args, launch.stream));
    if (need_dx) launch(cuda::channel_scale_backward(back, launch.stream));
    if (need_dw) launch(cuda::squeeze_excite_weight_backward(excite.args, launch.stream));
  }
  return {dx, as_weight(excite.dw1, w1), as_weight(excite.db1, w1), as_weight(excite.dw2, w1),
          as_weight(excite.db2, w1)};
}

template <class Library>
void implement(Library& m) {
  m.impl("squeeze_excite", TORCH_BOX(&squeeze_excite));
  m.impl("squeeze_excite_backward", TORCH_BOX(&squeeze_excite_backward));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CPU, m) { implement(m); }
#ifdef FUSEDTRAIN_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CUDA, m) { implement(m); }
#endif

}  // namespace fusedtrain::bindings

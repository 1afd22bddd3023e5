// Tensors -> ChannelPool, SqueezeExcite, ChannelScale -> kernels.
#include "squeeze_excite.h"

#include "bindings/channels.h"

namespace fusedtrain::bindings {
namespace {

struct Weights {
  int64_t r;
  Tensor w1, w2;  // acc [r, c], [c, r]
};

Weights weights_of(const Tensor& x, const Tensor& w1, const Tensor& w2) {
  const int64_t c = x.size(1), r = w1.size(0);
  return {r, small_input("w1", w1, x, r * c), small_input("w2", w2, x, c * r)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> squeeze_excite(
    const Tensor& x, const Tensor& w1, const std::optional<Tensor>& b1, const Tensor& w2,
    const std::optional<Tensor>& b2, int64_t act, int64_t gate_act, int64_t pool, int64_t in_act) {
  const Images m = images_of(x, in_act);
  const auto [r, first, second] = weights_of(x, w1, w2);
  const std::optional<Tensor> bias1 = b1 ? std::optional(small_input("b1", *b1, x, r)) : std::nullopt;
  const std::optional<Tensor> bias2 = b2 ? std::optional(small_input("b2", *b2, x, m.c)) : std::nullopt;
  const bool with_peak = pool_of(pool) == Pool::kAvgMax;
  const Tensor partial = empty_acc(x, {m.n, reduce_chunks(m), 3, m.c}), gate = empty_acc(x, {m.n, m.c});
  const Tensor pooled = empty_acc(x, {m.n, m.c}), hidden = empty_acc(x, {m.n, r}), logits = empty_acc(x, {m.n, m.c});
  const Tensor peak = with_peak ? empty_acc(x, {m.n, m.c}) : empty_acc(x, {0});
  const Tensor ties = with_peak ? empty_acc(x, {m.n, m.c}) : empty_acc(x, {0});
  const Tensor y = torch::stable::empty_like(x);
  const ChannelPool squeeze{.images = m,
                            .pool = pool_of(pool),
                            .x = x.const_data_ptr(),
                            .partial = partial.mutable_data_ptr(),
                            .pooled = pooled.mutable_data_ptr(),
                            .peak = data_or_null(peak),
                            .ties = data_or_null(ties)};
  const SqueezeExcite excite{.n = m.n,
                             .c = m.c,
                             .r = r,
                             .dtype = dtype_of(pooled),
                             .act = activation_of("act", act),
                             .gate_act = activation_of("gate_act", gate_act),
                             .pooled = pooled.const_data_ptr(),
                             .w1 = first.const_data_ptr(),
                             .b1 = bias1 ? bias1->const_data_ptr() : nullptr,
                             .w2 = second.const_data_ptr(),
                             .b2 = bias2 ? bias2->const_data_ptr() : nullptr,
                             .hidden = hidden.mutable_data_ptr(),
                             .logits = logits.mutable_data_ptr(),
                             .gate = gate.mutable_data_ptr()};
  const ChannelScale scale{
      .images = m, .x = x.const_data_ptr(), .gate = gate.const_data_ptr(), .y = y.mutable_data_ptr()};
  if (!x.is_cuda()) {
    for_sample_groups(m, 1, [&](int64_t n, int64_t end) {
      pool_samples(squeeze, n, end);
      parallel_items(n, end, m.c * r, [&]<Isa I>(int64_t b, int64_t e) { cpu::squeeze_excite<I>(excite, b, e); });
      scale_samples(scale, n, end);
    });
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("squeeze_excite", x);
    launch(cuda::channel_pool(squeeze, launch.stream));
    launch(cuda::squeeze_excite(excite, launch.stream));
    launch(cuda::channel_scale(scale, launch.stream));
  }
  return {y, pooled, hidden, logits, peak, ties};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> squeeze_excite_backward(
    const Tensor& dy, const Tensor& x, const Tensor& w1, const Tensor& w2, const Tensor& pooled, const Tensor& hidden,
    const Tensor& logits, const Tensor& peak, const Tensor& ties, int64_t act, int64_t gate_act, int64_t pool,
    int64_t in_act, bool need_dx, bool need_dw) {
  const Images m = images_of(x, in_act);
  check_same("dy", dy, x);
  const auto [r, first, second] = weights_of(x, w1, w2);
  const Tensor partial = empty_acc(x, {m.n, reduce_chunks(m), m.c}), dgate = empty_acc(x, {m.n, m.c});
  const Tensor gate = empty_acc(x, {m.n, m.c}), activated = empty_acc(x, {m.n, r});
  const Tensor dlogits = empty_acc(x, {m.n, m.c}), dhidden = empty_acc(x, {m.n, r}), dpooled = empty_acc(x, {m.n, m.c});
  const Tensor dx = need_dx ? torch::stable::empty_like(x) : torch::stable::new_empty(x, {0});
  const auto weight_gradient = [&](const Tensor& w) {
    return need_dw ? torch::stable::new_empty(w, w.sizes(), acc_type(x)) : empty_acc(x, {0});
  };
  const auto bias_gradient = [&](int64_t size) { return empty_acc(x, {need_dw ? size : 0}); };
  const Tensor dw1 = weight_gradient(w1), db1 = bias_gradient(r), dw2 = weight_gradient(w2), db2 = bias_gradient(m.c);
  const ChannelScaleDot dot{.images = m,
                            .dy = dy.const_data_ptr(),
                            .x = x.const_data_ptr(),
                            .partial = partial.mutable_data_ptr(),
                            .dgate = dgate.mutable_data_ptr()};
  const SqueezeExciteBackward excite{.n = m.n,
                                     .c = m.c,
                                     .r = r,
                                     .dtype = dtype_of(pooled),
                                     .act = activation_of("act", act),
                                     .gate_act = activation_of("gate_act", gate_act),
                                     .dgate = dgate.const_data_ptr(),
                                     .pooled = pooled.const_data_ptr(),
                                     .hidden = hidden.const_data_ptr(),
                                     .logits = logits.const_data_ptr(),
                                     .w1 = first.const_data_ptr(),
                                     .w2 = second.const_data_ptr(),
                                     .gate = gate.mutable_data_ptr(),
                                     .activated = activated.mutable_data_ptr(),
                                     .dlogits = dlogits.mutable_data_ptr(),
                                     .dhidden = dhidden.mutable_data_ptr(),
                                     .dpooled = dpooled.mutable_data_ptr(),
                                     .dw1 = dw1.mutable_data_ptr(),
                                     .db1 = db1.mutable_data_ptr(),
                                     .dw2 = dw2.mutable_data_ptr(),
                                     .db2 = db2.mutable_data_ptr()};
  const ChannelScaleBackward back{.images = m,
                                  .pool = pool_of(pool),
                                  .dy = dy.const_data_ptr(),
                                  .x = x.const_data_ptr(),
                                  .gate = gate.const_data_ptr(),
                                  .dpooled = dpooled.const_data_ptr(),
                                  .peak = data_or_null(peak),
                                  .ties = data_or_null(ties),
                                  .dx = dx.mutable_data_ptr()};
  if (!x.is_cuda()) {
    for_sample_groups(m, 2, [&](int64_t n, int64_t end) {
      dot_samples(dot, n, end);
      parallel_items(n, end, m.c * r,
                     [&]<Isa I>(int64_t b, int64_t e) { cpu::squeeze_excite_backward<I>(excite, b, e); });
      if (need_dx) backward_samples(back, n, end);
    });
    if (need_dw) {
      parallel_items(0, r + m.c, m.n * std::max(r, m.c),
                     [&]<Isa I>(int64_t b, int64_t e) { cpu::squeeze_excite_weight_backward<I>(excite, b, e); });
    }
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("squeeze_excite_backward", x);
    launch(cuda::channel_scale_dot(dot, launch.stream));
    launch(cuda::squeeze_excite_backward(excite, launch.stream));
    if (need_dx) launch(cuda::channel_scale_backward(back, launch.stream));
    if (need_dw) launch(cuda::squeeze_excite_weight_backward(excite, launch.stream));
  }
  const auto as_weight = [&](const Tensor& t) {
    return t.scalar_type() == w1.scalar_type() ? t : torch::stable::to(t, w1.scalar_type());
  };
  return {dx, as_weight(dw1), as_weight(db1), as_weight(dw2), as_weight(db2)};
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

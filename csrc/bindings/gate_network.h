#pragma once
// The gate network of squeeze_excite, which depthwise_bn_act_se has too: tensors -> SqueezeExcite,
// SqueezeExciteBackward, and these on samples [begin, end) of a batch, on torch's CPU threads.
#include "bindings/common.h"
#include "squeeze_excite.h"

namespace fusedtrain::bindings {

// The type in which kernels take the weights of x, of which w1 is one: on CUDA that which they have.
inline ScalarType weight_type(const Tensor& x, const Tensor& w1) {
  return x.is_cuda() && acc_type(w1) == acc_type(x) ? w1.scalar_type() : acc_type(x);
}

// Dense copies of the weights, which live as long as the kernels run, and what is computed; pooled is to be filled.
struct GateNetwork {
  Tensor w1, w2;                                   // weights [r, c], [c, r]
  std::optional<Tensor> b1, b2;                    // weights [r], [c]
  Tensor pooled, hidden, activated, logits, gate;  // acc [n, c], but for hidden and activated: [n, r]
  SqueezeExcite args;
};

inline GateNetwork gate_network(const Tensor& x, const Tensor& w1, const std::optional<Tensor>& b1, const Tensor& w2,
                                const std::optional<Tensor>& b2, Activation act, Activation gate_act) {
  const int64_t n = x.size(0), c = x.size(1), r = w1.size(0);
  const ScalarType type = weight_type(x, w1);
  GateNetwork g{.w1 = small_input("w1", w1, x, r * c, type),
                .w2 = small_input("w2", w2, x, c * r, type),
                .b1 = b1 ? std::optional(small_input("b1", *b1, x, r, type)) : std::nullopt,
                .b2 = b2 ? std::optional(small_input("b2", *b2, x, c, type)) : std::nullopt,
                .pooled = empty_acc(x, {n, c}),
                .hidden = empty_acc(x, {n, r}),
                .activated = empty_acc(x, {n, r}),
                .logits = empty_acc(x, {n, c}),
                .gate = empty_acc(x, {n, c}),
                .args = {}};
  g.args = {.n = n,
            .c = c,
            .r = r,
            .dtype = dtype_of(g.pooled),
            .weights = dtype_of(g.w1),
            .act = act,
            .gate_act = gate_act,
            .pooled = g.pooled.const_data_ptr(),
            .w1 = g.w1.const_data_ptr(),
            .b1 = g.b1 ? g.b1->const_data_ptr() : nullptr,
            .w2 = g.w2.const_data_ptr(),
            .b2 = g.b2 ? g.b2->const_data_ptr() : nullptr,
            .hidden = g.hidden.mutable_data_ptr(),
            .activated = g.activated.mutable_data_ptr(),
            .logits = g.logits.mutable_data_ptr(),
            .gate = g.gate.mutable_data_ptr()};
  return g;
}

inline void excite_samples(const SqueezeExcite& a, int64_t begin, int64_t end) {
  parallel_items(begin, end, a.c * a.r, [&]<Isa I>(int64_t b, int64_t e) { cpu::squeeze_excite<I>(a, b, e); });
}

// The same for the backward pass; dgate is to be filled, and the gradients of the weights are empty unless needed.
struct GateGradients {
  Tensor w1, w2;                                             // weights [r, c], [c, r]
  Tensor pooled, hidden, logits;                             // acc [n, c], [n, r], [n, c]: of the forward pass
  Tensor dgate, gate, activated, dlogits, dhidden, dpooled;  // acc [n, c], but for activated and dhidden: [n, r]
  Tensor dw1, db1, dw2, db2;                                 // weights
  SqueezeExciteBackward args;
};

inline GateGradients gate_gradients(const Tensor& x, const Tensor& w1, const Tensor& w2, const Tensor& pooled,
                                    const Tensor& hidden, const Tensor& logits, Activation act, Activation gate_act,
                                    bool need_dw) {
  const int64_t n = x.size(0), c = x.size(1), r = w1.size(0);
  const ScalarType type = weight_type(x, w1);
  const auto weight_gradient = [&](const Tensor& w) {
    return need_dw ? torch::stable::new_empty(w, w.sizes(), type) : torch::stable::new_empty(w, {0}, type);
  };
  const auto bias_gradient = [&](int64_t size) { return torch::stable::new_empty(w1, {need_dw ? size : 0}, type); };
  GateGradients g{.w1 = small_input("w1", w1, x, r * c, type),
                  .w2 = small_input("w2", w2, x, c * r, type),
                  .pooled = small_input("pooled", pooled, x, n * c),
                  .hidden = small_input("hidden", hidden, x, n * r),
                  .logits = small_input("logits", logits, x, n * c),
                  .dgate = empty_acc(x, {n, c}),
                  .gate = empty_acc(x, {n, c}),
                  .activated = empty_acc(x, {n, r}),
                  .dlogits = empty_acc(x, {n, c}),
                  .dhidden = empty_acc(x, {n, r}),
                  .dpooled = empty_acc(x, {n, c}),
                  .dw1 = weight_gradient(w1),
                  .db1 = bias_gradient(r),
                  .dw2 = weight_gradient(w2),
                  .db2 = bias_gradient(c),
                  .args = {}};
  g.args = {.n = n,
            .c = c,
            .r = r,
            .dtype = dtype_of(g.pooled),
            .weights = dtype_of(g.w1),
            .act = act,
            .gate_act = gate_act,
            .dgate = g.dgate.const_data_ptr(),
            .pooled = g.pooled.const_data_ptr(),
            .hidden = g.hidden.const_data_ptr(),
            .logits = g.logits.const_data_ptr(),
            .w1 = g.w1.const_data_ptr(),
            .w2 = g.w2.const_data_ptr(),
            .gate = g.gate.mutable_data_ptr(),
            .activated = g.activated.mutable_data_ptr(),
            .dlogits = g.dlogits.mutable_data_ptr(),
            .dhidden = g.dhidden.mutable_data_ptr(),
            .dpooled = g.dpooled.mutable_data_ptr(),
            .dw1 = g.dw1.mutable_data_ptr(),
            .db1 = g.db1.mutable_data_ptr(),
            .dw2 = g.dw2.mutable_data_ptr(),
            .db2 = g.db2.mutable_data_ptr()};
  return g;
}

inline void excite_backward_samples(const SqueezeExciteBackward& a, int64_t begin, int64_t end) {
  parallel_items(begin, end, a.c * a.r, [&]<Isa I>(int64_t b, int64_t e) { cpu::squeeze_excite_backward<I>(a, b, e); });
}

inline void excite_weight_backward(const SqueezeExciteBackward& a) {
  parallel_items(0, a.r + a.c, a.n * std::max(a.r, a.c),
                 [&]<Isa I>(int64_t b, int64_t e) { cpu::squeeze_excite_weight_backward<I>(a, b, e); });
}

// A gradient in the dtype of the weights.
inline Tensor as_weight(const Tensor& gradient, const Tensor& w) {
  return gradient.scalar_type() == w.scalar_type() ? gradient : torch::stable::to(gradient, w.scalar_type());
}

}  // namespace fusedtrain::bindings

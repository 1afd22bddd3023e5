// Tensors -> BnActPool, SqueezeExcite, BnActScale; BnActReduce, SqueezeExciteBackward, BnActCombine; BnActBackward ->
// kernels.
#include "depthwise_bn_act_se.h"

#include "bindings/channels.h"
#include "bindings/depthwise_gradients.h"
#include "bindings/gate_network.h"
#include "bindings/norm_vectors.h"
#include "bindings/operators.h"

namespace fusedtrain::bindings {
namespace {

BnAct input_of(const Tensor& z, const NormVectors& v, int64_t act) {
  BnAct in{.images = images_of(z, act),
           .z = z.const_data_ptr(),
           .mean = v.mean.const_data_ptr(),
           .rstd = v.rstd.const_data_ptr(),
           .weight = v.weight.const_data_ptr(),
           .bias = v.bias.const_data_ptr()};
  if (in.images.hw == 1) in.images.layout = Layout::kChannelsLast;  // the same memory, in longer rows
  return in;
}

std::tuple<Tensor, Tensor, Tensor> depthwise_bn_act_se_conv(const Tensor& x, const Tensor& weight,
                                                            const std::optional<Tensor>& bias, const Ints& stride,
                                                            const Ints& padding, const Ints& dilation) {
  if constexpr (kWithCuda) {
    if (x.is_cuda()) {
      const DepthwiseSizes s = depthwise_sizes(x, weight, bias, stride, padding, dilation);
      const Tensor z = empty_images(x, s.layout, s.c * s.m, s.ho, s.wo);
      const Tensor mean = empty_acc(x, {s.c * s.m}), m2 = empty_acc(x, {s.c * s.m});
      const Tensor partial = empty_acc(x, {cuda::bn_act_conv_partial_size(s)});
      const BnActConv a{.sizes = s,
                        .x = x.const_data_ptr(),
                        .weight = weight.const_data_ptr(),
                        .bias = bias ? bias->const_data_ptr() : nullptr,
                        .z = z.mutable_data_ptr(),
                        .partial = partial.mutable_data_ptr(),
                        .mean = mean.mutable_data_ptr(),
                        .m2 = m2.mutable_data_ptr()};
      const CudaLaunch launch("depthwise_bn_act_se_conv", x);
      launch(cuda::bn_act_conv(a, launch.stream));
      return {z, mean, m2};
    }
  }
  return depthwise_conv2d_stats(x, weight, bias, stride, padding, dilation);
}

// What follows the convolution: y, and of the gate what backward keeps, and itself.
struct Gated {
  Tensor y, pooled, hidden, logits, gate;
};

Gated gated(const Tensor& z, const Tensor& mean, const Tensor& rstd, const std::optional<Tensor>& weight,
            const std::optional<Tensor>& bias, const Tensor& w1, const std::optional<Tensor>& b1, const Tensor& w2,
            const std::optional<Tensor>& b2, int64_t act, int64_t se_act, int64_t gate_act,
            const std::optional<Tensor>& residual, bool relu) {
  if (residual) check_same("residual", *residual, z);
  STD_TORCH_CHECK(residual || !relu, "fusedtrain: relu follows the sum with a residual, which is missing");
  const NormVectors norm = norm_vectors(z, 1, Fold::kRows, mean, rstd, weight, bias);
  const BnAct in = input_of(z, norm, act);
  const Images& m = in.images;
  const GateNetwork excite =
      gate_network(z, w1, b1, w2, b2, activation_of("se_act", se_act), activation_of("gate_act", gate_act));
  const Tensor partial = empty_acc(z, {m.n, reduce_chunks(m), m.c});
  const Tensor y = torch::stable::empty_like(z);
  const BnActPool squeeze{.in = in, .partial = partial.mutable_data_ptr(), .pooled = excite.pooled.mutable_data_ptr()};
  const BnActScale scale{.in = in,
                         .gate = excite.gate.const_data_ptr(),
                         .residual = residual ? residual->const_data_ptr() : nullptr,
                         .relu = relu,
                         .y = y.mutable_data_ptr()};
  if constexpr (kWithCuda) {
    if (z.is_cuda()) {
      const CudaLaunch launch("depthwise_bn_act_se", z);
      launch(cuda::bn_act_pool(squeeze, launch.stream));
      launch(cuda::squeeze_excite(excite.args, launch.stream));
      launch(cuda::bn_act_scale(scale, launch.stream));
      return {y, excite.pooled, excite.hidden, excite.logits, excite.gate};
    }
  }
  for_sample_groups(m, 1, [&](int64_t n, int64_t end) {
    parallel_samples(m, reduce_items(m), n, end,
                     [&]<Isa I>(int64_t b, int64_t e) { cpu::bn_act_pool_partial<I>(squeeze, b, e); });
    parallel_items(n, end, m.c * reduce_chunks(m),
                   [&]<Isa I>(int64_t b, int64_t e) { cpu::bn_act_pool_finish<I>(squeeze, b, e); });
    excite_samples(excite.args, n, end);
    parallel_samples(m, map_items(m), n, end, [&]<Isa I>(int64_t b, int64_t e) { cpu::bn_act_scale<I>(scale, b, e); });
  });
  return {y, excite.pooled, excite.hidden, excite.logits, excite.gate};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> depthwise_bn_act_se(const Tensor& z, const Tensor& mean, const Tensor& rstd,
                                                               const std::optional<Tensor>& weight,
                                                               const std::optional<Tensor>& bias, const Tensor& w1,
                                                               const std::optional<Tensor>& b1, const Tensor& w2,
                                                               const std::optional<Tensor>& b2, int64_t act,
                                                               int64_t se_act, int64_t gate_act,
                                                               const std::optional<Tensor>& residual, bool relu) {
  const Gated to = gated(z, mean, rstd, weight, bias, w1, b1, w2, b2, act, se_act, gate_act, residual, relu);
  return {to.y, to.pooled, to.hidden, to.logits};
}

// y once more.
Tensor depthwise_bn_act_se_scale(const Tensor& z, const Tensor& mean, const Tensor& rstd,
                                 const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                                 const Tensor& gate, int64_t act) {
  const NormVectors norm = norm_vectors(z, 1, Fold::kRows, mean, rstd, weight, bias);
  const BnAct in = input_of(z, norm, act);
  const Images& m = in.images;
  const Tensor g = small_input("gate", gate, z, m.n * m.c), y = torch::stable::empty_like(z);
  const BnActScale scale{
      .in = in, .gate = g.const_data_ptr(), .residual = nullptr, .relu = false, .y = y.mutable_data_ptr()};
  if (!z.is_cuda()) {
    parallel_samples(m, map_items(m), 0, m.n, [&]<Isa I>(int64_t b, int64_t e) { cpu::bn_act_scale<I>(scale, b, e); });
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("depthwise_bn_act_se_scale", z);
    launch(cuda::bn_act_scale(scale, launch.stream));
  }
  return y;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> depthwise_bn_act_se_reduce(
    const Tensor& dy, const Tensor& z, const Tensor& mean, const Tensor& rstd, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, const Tensor& w1, const Tensor& w2, const Tensor& pooled, const Tensor& hidden,
    const Tensor& logits, int64_t act, int64_t se_act, int64_t gate_act, bool need_dw) {
  check_same("dy", dy, z);
  const NormVectors norm = norm_vectors(z, 1, Fold::kRows, mean, rstd, weight, bias);
  const BnAct in = input_of(z, norm, act);
  const Images& m = in.images;
  const GateGradients excite = gate_gradients(z, w1, w2, pooled, hidden, logits, activation_of("se_act", se_act),
                                              activation_of("gate_act", gate_act), need_dw);
  const Tensor partial = empty_acc(z, {m.n, reduce_chunks(m), BnActReduce::kSums, m.c});
  const Tensor sums = empty_acc(z, {m.n, BnActReduce::kSums - 1, m.c});
  const Tensor sum_du = empty_acc(z, {m.c}), sum_du_xhat = empty_acc(z, {m.c});
  const BnActReduce reduce{.in = in,
                           .dy = dy.const_data_ptr(),
                           .partial = partial.mutable_data_ptr(),
                           .sums = sums.mutable_data_ptr(),
                           .dgate = excite.dgate.mutable_data_ptr()};
  const BnActCombine combine{.n = m.n,
                             .c = m.c,
                             .hw = m.hw,
                             .dtype = dtype_of(sums),
                             .sums = sums.const_data_ptr(),
                             .rstd = norm.rstd.const_data_ptr(),
                             .gate = excite.gate.const_data_ptr(),
                             .dpooled = excite.dpooled.const_data_ptr(),
                             .sum_du = sum_du.mutable_data_ptr(),
                             .sum_du_xhat = sum_du_xhat.mutable_data_ptr()};
  if (!z.is_cuda()) {
    parallel_samples(m, reduce_items(m), 0, m.n,
                     [&]<Isa I>(int64_t b, int64_t e) { cpu::bn_act_reduce_partial<I>(reduce, b, e); });
    parallel_items(0, m.n, BnActReduce::kSums * m.c * reduce_chunks(m),
                   [&]<Isa I>(int64_t b, int64_t e) { cpu::bn_act_reduce_finish<I>(reduce, b, e); });
    excite_backward_samples(excite.args, 0, m.n);
    if (need_dw) excite_weight_backward(excite.args);
    parallel_items(0, m.c, 4 * m.n, [&]<Isa I>(int64_t b, int64_t e) { cpu::bn_act_combine<I>(combine, b, e); });
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("depthwise_bn_act_se_reduce", z);
    launch(cuda::bn_act_reduce(reduce, launch.stream));
    launch(cuda::squeeze_excite_backward(excite.args, launch.stream));
    if (need_dw) launch(cuda::squeeze_excite_weight_backward(excite.args, launch.stream));
    launch(cuda::bn_act_combine(combine, launch.stream));
  }
  return {sum_du,
          sum_du_xhat,
          excite.gate,
          excite.dpooled,
          as_weight(excite.dw1, w1),
          as_weight(excite.db1, w1),
          as_weight(excite.dw2, w1),
          as_weight(excite.db2, w1)};
}

// What dz is made of, and the dense copies of the small tensors that it points to; dz itself is still to be set.
struct Backward {
  NormVectors norm;
  std::optional<Tensor> gate, dpooled, sum_du, sum_du_xhat;
  BnActBackward args;
};

Backward backward_of(const Tensor& dy, const Tensor& z, const Tensor& mean, const Tensor& rstd,
                     const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                     const std::optional<Tensor>& gate, const std::optional<Tensor>& dpooled,
                     const std::optional<Tensor>& sum_du, const std::optional<Tensor>& sum_du_xhat, double count,
                     int64_t act) {
  check_same("dy", dy, z);
  STD_TORCH_CHECK(sum_du.has_value() == sum_du_xhat.has_value(), "fusedtrain: both sums or none expected");
  STD_TORCH_CHECK(gate.has_value() == dpooled.has_value(), "fusedtrain: gate and dpooled or none of them expected");
  const int64_t n = z.size(0), c = z.size(1);
  const auto small = [&](const char* name, const std::optional<Tensor>& t, int64_t size) {
    return t ? std::optional(small_input(name, *t, z, size)) : std::nullopt;
  };
  const auto pointer = [](const std::optional<Tensor>& t) { return t ? t->const_data_ptr() : nullptr; };
  Backward b{norm_vectors(z, 1, Fold::kRows, mean, rstd, weight, bias),
             small("gate", gate, n * c),
             small("dpooled", dpooled, n * c),
             small("sum_du", sum_du, c),
             small("sum_du_xhat", sum_du_xhat, c),
             {}};
  b.args = {.in = input_of(z, b.norm, act),
            .count = count,
            .dy = dy.const_data_ptr(),
            .gate = pointer(b.gate),
            .dpooled = pointer(b.dpooled),
            .sum_du = pointer(b.sum_du),
            .sum_du_xhat = pointer(b.sum_du_xhat),
            .dz = nullptr};
  return b;
}

void write_dz(const BnActBackward& a, const Tensor& z) {
  if constexpr (kWithCuda) {
    if (z.is_cuda()) {
      const CudaLaunch launch("depthwise_bn_act_se_backward", z);
      return launch(cuda::bn_act_backward(a, launch.stream));
    }
  }
  const Images& m = a.in.images;
  parallel_samples(m, map_items(m), 0, m.n, [&]<Isa I>(int64_t b, int64_t e) { cpu::bn_act_backward<I>(a, b, e); });
}

Tensor depthwise_bn_act_se_backward(const Tensor& dy, const Tensor& z, const Tensor& mean, const Tensor& rstd,
                                    const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                                    const std::optional<Tensor>& gate, const std::optional<Tensor>& dpooled,
                                    const std::optional<Tensor>& sum_du, const std::optional<Tensor>& sum_du_xhat,
                                    double count, int64_t act) {
  Backward b = backward_of(dy, z, mean, rstd, weight, bias, gate, dpooled, sum_du, sum_du_xhat, count, act);
  const Tensor dz = torch::stable::empty_like(z);
  b.args.dz = dz.mutable_data_ptr();
  write_dz(b.args, z);
  return dz;
}

std::tuple<Tensor, Tensor, Tensor> depthwise_bn_act_se_conv_backward(
    const Tensor& dy, const Tensor& z, const Tensor& mean, const Tensor& rstd, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& gate, const std::optional<Tensor>& dpooled,
    const std::optional<Tensor>& sum_du, const std::optional<Tensor>& sum_du_xhat, double count, int64_t act,
    const Tensor& x, const Tensor& kernel, const Ints& stride, const Ints& padding, const Ints& dilation, bool need_dx,
    bool need_dw, bool need_db) {
  if (z.is_cuda()) {
    const Tensor dz =
        depthwise_bn_act_se_backward(dy, z, mean, rstd, weight, bias, gate, dpooled, sum_du, sum_du_xhat, count, act);
    return depthwise_conv2d_backward(dz, x, kernel, stride, padding, dilation, need_dx, need_dw, need_db);
  }
  const Backward whole = backward_of(dy, z, mean, rstd, weight, bias, gate, dpooled, sum_du, sum_du_xhat, count, act);
  const Images& m = whole.args.in.images;
  STD_TORCH_CHECK(x.size(0) == m.n && kernel.size(0) == m.c && x.scalar_type() == z.scalar_type() &&
                      (m.hw == 1 || images_of(x, 0).layout == m.layout),
                  "fusedtrain: x must have the batch, dtype and memory format of z, and the kernels its channels");
  const int64_t image = m.c * m.hw * z.element_size(), vector = m.c * whole.norm.mean.element_size();
  const auto shifted = [](const void* p, int64_t bytes) { return p ? static_cast<const char*>(p) + bytes : nullptr; };
  const WriteImages write = [&](int64_t begin, int64_t end, void* dz) {
    BnActBackward part = whole.args;
    part.in.images.n = end - begin;
    part.in.z = shifted(part.in.z, begin * image);
    part.dy = shifted(part.dy, begin * image);
    part.gate = shifted(part.gate, begin * vector);
    part.dpooled = shifted(part.dpooled, begin * vector);
    part.dz = dz;
    write_dz(part, z);
  };
  return depthwise_conv2d_backward_from(write, x, kernel, stride, padding, dilation, need_dx, need_dw, need_db);
}

using Optional = std::optional<Tensor>;

std::tuple<Tensor, Tensor, Tensor, Tensor, Optional, Optional, Optional, Optional> depthwise_bn_act_se_train_(
    const Tensor& x, const Tensor& kernel, const Optional& bias, const Optional& running_mean,
    const Optional& running_var, const Optional& batches, const Optional& norm_weight, const Optional& norm_bias,
    const Optional& w1, const Optional& b1, const Optional& w2, const Optional& b2, double momentum, double eps,
    const Ints& stride, const Ints& padding, const Ints& dilation, int64_t act, int64_t se_act, int64_t gate_act) {
  STD_TORCH_CHECK(w1.has_value() == w2.has_value(), "fusedtrain: both weights of the gate or none expected");
  const auto [z, mean, m2] = depthwise_bn_act_se_conv(x, kernel, bias, stride, padding, dilation);
  const Tensor rstd =
      batch_norm_act_update(mean, m2, running_mean, running_var, batches, batch_norm_act_count(z), momentum, eps);
  if (!w1)
    return {batch_norm_act(z, mean, rstd, norm_weight, norm_bias, {}, act, false), z, mean, rstd, {}, {}, {}, {}};
  const Gated to = gated(z, mean, rstd, norm_weight, norm_bias, *w1, b1, *w2, b2, act, se_act, gate_act, {}, false);
  return {to.y, z, mean, rstd, to.pooled, to.hidden, to.logits, to.gate};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Optional, Optional, Optional, Optional>
depthwise_bn_act_se_train_backward(const Tensor& dy, const Tensor& x, const Tensor& kernel, const Tensor& z,
                                   const Tensor& mean, const Tensor& rstd, const Optional& norm_weight,
                                   const Optional& norm_bias, const Optional& w1, const Optional& w2,
                                   const Optional& pooled, const Optional& hidden, const Optional& logits,
                                   const Ints& stride, const Ints& padding, const Ints& dilation, int64_t act,
                                   int64_t se_act, int64_t gate_act, bool need_dx, bool need_dw, bool need_db,
                                   bool need_dse) {
  const double count = batch_norm_act_count(z);
  const auto convolution = [&](const Optional& gate, const Optional& dpooled, const Tensor& sum,
                               const Tensor& sum_xhat) {
    return depthwise_bn_act_se_conv_backward(dy, z, mean, rstd, norm_weight, norm_bias, gate, dpooled, sum, sum_xhat,
                                             count, act, x, kernel, stride, padding, dilation, need_dx, need_dw,
                                             need_db);
  };
  if (!w1) {
    const auto [sum, sum_xhat] = batch_norm_act_reduce(dy, z, mean, rstd, norm_weight, norm_bias, {}, act, false);
    return std::tuple_cat(convolution({}, {}, sum, sum_xhat),
                          std::tuple(sum_xhat, sum, Optional(), Optional(), Optional(), Optional()));
  }
  STD_TORCH_CHECK(w2 && pooled && hidden && logits, "fusedtrain: what the forward pass kept of its gate expected");
  const auto [sum, sum_xhat, gate, dpooled, dw1, db1, dw2, db2] = depthwise_bn_act_se_reduce(
      dy, z, mean, rstd, norm_weight, norm_bias, *w1, *w2, *pooled, *hidden, *logits, act, se_act, gate_act, need_dse);
  return std::tuple_cat(convolution(gate, dpooled, sum, sum_xhat),
                        std::tuple(sum_xhat, sum, Optional(dw1), Optional(db1), Optional(dw2), Optional(db2)));
}

template <class Library>
void implement(Library& m) {
  m.impl("depthwise_bn_act_se_scale", TORCH_BOX(&depthwise_bn_act_se_scale));
  m.impl("depthwise_bn_act_se_train_", TORCH_BOX(&depthwise_bn_act_se_train_));
  m.impl("depthwise_bn_act_se_train_backward", TORCH_BOX(&depthwise_bn_act_se_train_backward));
  m.impl("depthwise_bn_act_se", TORCH_BOX(&depthwise_bn_act_se));
  m.impl("depthwise_bn_act_se_backward", TORCH_BOX(&depthwise_bn_act_se_backward));
  m.impl("depthwise_bn_act_se_conv", TORCH_BOX(&depthwise_bn_act_se_conv));
  m.impl("depthwise_bn_act_se_conv_backward", TORCH_BOX(&depthwise_bn_act_se_conv_backward));
  m.impl("depthwise_bn_act_se_reduce", TORCH_BOX(&depthwise_bn_act_se_reduce));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CPU, m) { implement(m); }
#ifdef FUSEDTRAIN_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CUDA, m) { implement(m); }
#endif

}  // namespace fusedtrain::bindings

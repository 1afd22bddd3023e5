// Tensors -> BatchNormStats, BatchNormUpdate, BatchNormAct, BatchNormReduce, BatchNormBackward -> kernels.
#include "batch_norm_act.h"

#include "bindings/common.h"

namespace fusedtrain::bindings {
namespace {

// The images as statistics over the batch see them: rows of channels, or planes, in as few samples as the memory
// allows.
Images batch_of(const Tensor& x) {
  Images m = images_of(x, 0);
  if (m.layout == Layout::kChannelsLast || m.hw == 1) return {1, m.c, m.n * m.hw, m.dtype, Layout::kChannelsLast, {}};
  if (m.c == 1) return {1, 1, m.n * m.hw, m.dtype, Layout::kContiguous, {}};
  return m;
}

int64_t reduce_items(const Images& m) { return m.layout == Layout::kContiguous ? m.n * m.c : m.n * reduce_chunks(m); }
int64_t map_items(const Images& m) { return m.n * (m.layout == Layout::kContiguous ? m.c : m.hw); }

template <class F>
void parallel_images(const Images& m, int64_t items, F&& f) {
  parallel_items(0, items, m.n * m.c * m.hw / std::max<int64_t>(1, items), f);
}

void check_on_cpu(const Tensor& x) {
  STD_TORCH_CHECK(x.is_cpu(), "fusedtrain: batch_norm_act has no CUDA kernels yet");
}

// A [c] vector in the accumulation type; `value` repeated where there is none.
Tensor channel_vector(const char* name, const std::optional<Tensor>& t, const Tensor& x, double value) {
  if (t) return small_input(name, *t, x, x.size(1));
  Tensor repeated = empty_acc(x, {x.size(1)});
  return torch::stable::fill_(repeated, value);
}

// Dense copies of the small tensors, which live as long as the kernels run.
struct Vectors {
  Tensor mean, rstd, weight, bias;
};

Vectors vectors_of(const Tensor& x, const Tensor& mean, const Tensor& rstd, const std::optional<Tensor>& weight,
                   const std::optional<Tensor>& bias) {
  return {small_input("mean", mean, x, x.size(1)), small_input("rstd", rstd, x, x.size(1)),
          channel_vector("weight", weight, x, 1), channel_vector("bias", bias, x, 0)};
}

const void* images_or_null(const char* name, const std::optional<Tensor>& t, const Tensor& x) {
  if (t) check_same(name, *t, x);
  return t ? t->const_data_ptr() : nullptr;
}

BatchNormInputs inputs_of(const Tensor& x, const std::optional<Tensor>& residual, const Vectors& v, int64_t act,
                          bool residual_after) {
  const void* added = images_or_null("residual", residual, x);
  return {.images = batch_of(x),
          .act = static_cast<Activation>(act),
          .x = x.const_data_ptr(),
          .before = residual_after ? nullptr : added,
          .mean = v.mean.const_data_ptr(),
          .rstd = v.rstd.const_data_ptr(),
          .weight = v.weight.const_data_ptr(),
          .bias = v.bias.const_data_ptr()};
}

std::tuple<Tensor, Tensor> batch_norm_act_stats(const Tensor& x) {
  check_on_cpu(x);
  const Images m = batch_of(x);
  const Tensor mean = empty_acc(x, {m.c}), m2 = empty_acc(x, {m.c});
  const Tensor partial = empty_acc(x, {m.n * reduce_chunks(m), 3, m.c});
  const BatchNormStats a{.images = m,
                         .x = x.const_data_ptr(),
                         .partial = partial.mutable_data_ptr(),
                         .mean = mean.mutable_data_ptr(),
                         .m2 = m2.mutable_data_ptr()};
  parallel_images(m, reduce_items(m),
                  [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act_stats_partial<I>(a, b, e); });
  parallel_items(0, m.c, 3 * m.n * reduce_chunks(m),
                 [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act_stats_finish<I>(a, b, e); });
  return {mean, m2};
}

Tensor batch_norm_act_update_(const Tensor& mean, const Tensor& m2, const std::optional<Tensor>& running_mean,
                              const std::optional<Tensor>& running_var, double count, double momentum, double eps) {
  check_on_cpu(mean);
  const int64_t c = mean.numel();
  const auto dense = [&](const char* name, const Tensor& t) {
    STD_TORCH_CHECK(t.numel() == c && t.is_contiguous() && t.is_cpu(), "fusedtrain: ", name, " must be a dense [C]");
  };
  dense("mean", mean);
  dense("m2", m2);
  if (running_mean) dense("running_mean", *running_mean);
  if (running_var) dense("running_var", *running_var);
  STD_TORCH_CHECK(mean.scalar_type() == acc_type(mean) && m2.scalar_type() == mean.scalar_type(),
                  "fusedtrain: mean and m2 must be float32 or float64");
  const std::optional<Tensor>& running = running_mean ? running_mean : running_var;
  STD_TORCH_CHECK(!running_mean || !running_var || running_mean->scalar_type() == running_var->scalar_type(),
                  "fusedtrain: running_mean and running_var must have one dtype");
  STD_TORCH_CHECK(!running || (dtype_of(*running) == DType::kFloat64) == (dtype_of(mean) == DType::kFloat64),
                  "fusedtrain: running statistics in float64 go with images in float64");
  const Tensor rstd = torch::stable::empty_like(mean);
  const BatchNormUpdate a{.c = c,
                          .dtype = dtype_of(mean),
                          .running_dtype = running ? dtype_of(*running) : dtype_of(mean),
                          .count = count,
                          .momentum = momentum,
                          .eps = eps,
                          .mean = mean.const_data_ptr(),
                          .m2 = m2.const_data_ptr(),
                          .running_mean = running_mean ? running_mean->mutable_data_ptr() : nullptr,
                          .running_var = running_var ? running_var->mutable_data_ptr() : nullptr,
                          .rstd = rstd.mutable_data_ptr()};
  parallel_items(0, c, 5, [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act_update<I>(a, b, e); });
  return rstd;
}

Tensor batch_norm_act(const Tensor& x, const Tensor& mean, const Tensor& rstd, const std::optional<Tensor>& weight,
                      const std::optional<Tensor>& bias, const std::optional<Tensor>& residual, int64_t act,
                      bool residual_after) {
  check_on_cpu(x);
  const Vectors v = vectors_of(x, mean, rstd, weight, bias);
  const Tensor y = torch::stable::empty_like(x);
  const BatchNormAct a{.in = inputs_of(x, residual, v, act, residual_after),
                       .after = residual_after ? images_or_null("residual", residual, x) : nullptr,
                       .y = y.mutable_data_ptr()};
  parallel_images(a.in.images, map_items(a.in.images),
                  [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act<I>(a, b, e); });
  return y;
}

std::tuple<Tensor, Tensor> batch_norm_act_reduce(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                                 const Tensor& rstd, const std::optional<Tensor>& weight,
                                                 const std::optional<Tensor>& bias,
                                                 const std::optional<Tensor>& residual, int64_t act,
                                                 bool residual_after) {
  check_on_cpu(x);
  check_same("dy", dy, x);
  const Vectors v = vectors_of(x, mean, rstd, weight, bias);
  const BatchNormInputs in = inputs_of(x, residual, v, act, residual_after);
  const Images& m = in.images;
  const Tensor sum_dz = empty_acc(x, {m.c}), sum_dz_xhat = empty_acc(x, {m.c});
  const Tensor partial = empty_acc(x, {m.n * reduce_chunks(m), 2, m.c});
  const BatchNormReduce a{.in = in,
                          .dy = dy.const_data_ptr(),
                          .partial = partial.mutable_data_ptr(),
                          .sum_dz = sum_dz.mutable_data_ptr(),
                          .sum_dz_xhat = sum_dz_xhat.mutable_data_ptr()};
  parallel_images(m, reduce_items(m),
                  [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act_reduce_partial<I>(a, b, e); });
  parallel_items(0, m.c, 2 * m.n * reduce_chunks(m),
                 [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act_reduce_finish<I>(a, b, e); });
  return {sum_dz, sum_dz_xhat};
}

std::tuple<Tensor, Tensor> batch_norm_act_backward(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                                   const Tensor& rstd, const std::optional<Tensor>& weight,
                                                   const std::optional<Tensor>& bias,
                                                   const std::optional<Tensor>& residual,
                                                   const std::optional<Tensor>& sum_dz,
                                                   const std::optional<Tensor>& sum_dz_xhat, double count, int64_t act,
                                                   bool residual_after, bool need_dx, bool need_dresidual) {
  check_on_cpu(x);
  check_same("dy", dy, x);
  STD_TORCH_CHECK(sum_dz.has_value() == sum_dz_xhat.has_value(), "fusedtrain: both sums or none expected");
  const Vectors v = vectors_of(x, mean, rstd, weight, bias);
  const auto sum_of = [&](const char* name, const std::optional<Tensor>& t) {
    return t ? std::optional(small_input(name, *t, x, x.size(1))) : std::nullopt;
  };
  const std::optional<Tensor> s1 = sum_of("sum_dz", sum_dz), s2 = sum_of("sum_dz_xhat", sum_dz_xhat);
  const Tensor dx = need_dx ? torch::stable::empty_like(x) : torch::stable::new_empty(x, {0});
  const Tensor dresidual = need_dresidual ? torch::stable::empty_like(x) : torch::stable::new_empty(x, {0});
  const BatchNormBackward a{.in = inputs_of(x, residual, v, act, residual_after),
                            .count = count,
                            .dy = dy.const_data_ptr(),
                            .sum_dz = s1 ? s1->const_data_ptr() : nullptr,
                            .sum_dz_xhat = s2 ? s2->const_data_ptr() : nullptr,
                            .dx = need_dx ? dx.mutable_data_ptr() : nullptr,
                            .dbefore = need_dresidual ? dresidual.mutable_data_ptr() : nullptr};
  if (need_dx || need_dresidual) {
    parallel_images(a.in.images, map_items(a.in.images),
                    [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act_backward<I>(a, b, e); });
  }
  return {dx, dresidual};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CPU, m) {
  m.impl("batch_norm_act", TORCH_BOX(&batch_norm_act));
  m.impl("batch_norm_act_backward", TORCH_BOX(&batch_norm_act_backward));
  m.impl("batch_norm_act_reduce", TORCH_BOX(&batch_norm_act_reduce));
  m.impl("batch_norm_act_stats", TORCH_BOX(&batch_norm_act_stats));
  m.impl("batch_norm_act_update_", TORCH_BOX(&batch_norm_act_update_));
}

}  // namespace fusedtrain::bindings

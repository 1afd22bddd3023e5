// Tensors -> BatchNormStats, BatchNormUpdate, BatchNormAct, BatchNormReduce, BatchNormBackward -> kernels.
#include "batch_norm_act.h"

#include <cstring>

#include "bindings/norm_vectors.h"
#include "bindings/operators.h"

namespace fusedtrain::bindings {
namespace {

// The images as statistics over the batch see them: rows of channels, or planes, in as few samples as the memory
// allows; on the CPU with several rows as one where that makes them whole vectors, and long ones.
struct Batch {
  Images images;
  int64_t fold = 1;
};

// Elements of a row whose sums fill the registers of AVX-512, as 6 or 8 vectors.
constexpr int64_t kRegisterColumns = 128;

Batch batch_of(const Tensor& x) {
  constexpr int64_t kVector = 16, kLarge = 1 << 17;  // elements
  const Images m = images_of(x, 0);
  if (x.numel() == 0) return {{0, m.c, m.hw, m.dtype, Layout::kContiguous, {}}};  // without parts, of no mean
  if (m.c == 1) return {{1, 1, m.n * m.hw, m.dtype, Layout::kContiguous, {}}};
  if (m.layout == Layout::kContiguous && m.hw > 1) return {m};
  int64_t columns = m.c;
  while (2 * columns <= kRegisterColumns) columns *= 2;
  const bool registers = active_isa() >= Isa::kAvx512 && m.dtype != DType::kFloat64 &&
                         (columns == kRegisterColumns || columns == kRegisterColumns / 4 * 3);
  const int64_t wanted = registers ? columns : 256;
  Batch b{{1, m.c, m.n * m.hw, m.dtype, Layout::kChannelsLast, {}}};
  while (x.is_cpu() && b.images.hw % 2 == 0 && b.images.hw > 0 &&
         ((b.images.c < wanted && x.numel() >= kLarge) || (b.images.c % kVector != 0 && b.fold < kVector))) {
    b.fold *= 2, b.images.c *= 2, b.images.hw /= 2;
  }
  return b;
}

int64_t reduce_items(const Images& m) { return m.layout == Layout::kContiguous ? m.n * m.c : m.n * reduce_chunks(m); }
int64_t map_items(const Images& m) { return m.n * (m.layout == Layout::kContiguous ? m.c : m.hw); }

template <class F>
void parallel_images(const Images& m, int64_t items, F&& f) {
  parallel_items(0, items, m.n * m.c * m.hw / std::max<int64_t>(1, items), f);
}

// A [c] vector in the accumulation type; `value` repeated where there is none.
Tensor channel_vector(const char* name, const std::optional<Tensor>& t, const Tensor& x, double value) {
  if (t) return small_input(name, *t, x, x.size(1));
  Tensor repeated = empty_acc(x, {x.size(1)});
  return torch::stable::fill_(repeated, value);
}

const void* images_or_null(const char* name, const std::optional<Tensor>& t, const Tensor& x) {
  if (t) check_same(name, *t, x);
  return t ? t->const_data_ptr() : nullptr;
}

BatchNormInputs inputs_of(const Tensor& x, const Images& images, const std::optional<Tensor>& residual,
                          const NormVectors& v, int64_t act, bool residual_after) {
  const void* added = images_or_null("residual", residual, x);
  return {.images = images,
          .act = activation_of("act", act),
          .x = x.const_data_ptr(),
          .before = residual_after ? nullptr : added,
          .mean = v.mean.const_data_ptr(),
          .rstd = v.rstd.const_data_ptr(),
          .weight = v.weight.const_data_ptr(),
          .bias = v.bias.const_data_ptr()};
}

}  // namespace

Tensor repeated(const Tensor& t, int64_t fold) {
  if (fold == 1) return t;
  const Tensor out = torch::stable::new_empty(t, {fold * t.numel()});
  const size_t bytes = t.numel() * t.element_size();
  for (int64_t k = 0; k < fold; ++k)
    std::memcpy(static_cast<char*>(out.mutable_data_ptr()) + k * bytes, t.const_data_ptr(), bytes);
  return out;
}

NormVectors norm_vectors(const Tensor& x, int64_t fold, const Tensor& mean, const Tensor& rstd,
                         const std::optional<Tensor>& weight, const std::optional<Tensor>& bias) {
  return {repeated(small_input("mean", mean, x, x.size(1)), fold),
          repeated(small_input("rstd", rstd, x, x.size(1)), fold),
          repeated(channel_vector("weight", weight, x, 1), fold), repeated(channel_vector("bias", bias, x, 0), fold)};
}

std::tuple<Tensor, Tensor> batch_norm_act_stats(const Tensor& x) {
  const auto [m, fold] = batch_of(x);
  const Tensor mean = empty_acc(x, {x.size(1)}), m2 = empty_acc(x, {x.size(1)});
  const Tensor partial = empty_acc(x, {m.n * reduce_chunks(m), 3, m.c});
  const BatchNormStats a{.images = m,
                         .fold = fold,
                         .x = x.const_data_ptr(),
                         .partial = partial.mutable_data_ptr(),
                         .mean = mean.mutable_data_ptr(),
                         .m2 = m2.mutable_data_ptr()};
  if (!x.is_cuda()) {
    parallel_images(m, reduce_items(m),
                    [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act_stats_partial<I>(a, b, e); });
    parallel_items(0, x.size(1), 3 * m.n * reduce_chunks(m) * fold,
                   [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act_stats_finish<I>(a, b, e); });
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("batch_norm_act_stats", x);
    launch(cuda::batch_norm_act_stats(a, launch.stream));
  }
  return {mean, m2};
}

double batch_norm_act_count(const Tensor& x) { return double(x.size(0) * x.size(2) * x.size(3)); }

std::tuple<Tensor, Tensor> batch_norm_act_stats_of(const Tensor& partial, const std::vector<int64_t>& sizes) {
  STD_TORCH_CHECK(partial.dim() == 3 && partial.size(0) == int64_t(sizes.size()) && partial.is_contiguous() &&
                      partial.scalar_type() == ScalarType::Float,
                  "fusedtrain: partial must be a dense float32 [parts, 3, C], with as many sizes");
  const int64_t c = partial.size(2);
  const Tensor mean = torch::stable::new_empty(partial, {c}), m2 = torch::stable::new_empty(partial, {c});
  const BatchNormMoments a{.c = c,
                           .parts = partial.size(0),
                           .partial = static_cast<const float*>(partial.const_data_ptr()),
                           .sizes = sizes.data(),
                           .mean = static_cast<float*>(mean.mutable_data_ptr()),
                           .m2 = static_cast<float*>(m2.mutable_data_ptr())};
  parallel_items(0, c, 3 * a.parts,
                 [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act_moments_finish<I>(a, b, e); });
  return {mean, m2};
}

Tensor batch_norm_act_update(const Tensor& mean, const Tensor& m2, const std::optional<Tensor>& running_mean,
                             const std::optional<Tensor>& running_var, const std::optional<Tensor>& batches,
                             double count, double momentum, double eps) {
  const int64_t c = mean.numel();
  const auto dense = [&](const char* name, const Tensor& t) {
    STD_TORCH_CHECK(t.numel() == c && t.is_contiguous() && t.is_cuda() == mean.is_cuda(), "fusedtrain: ", name,
                    " must be a dense [C] on the device of mean");
  };
  dense("mean", mean);
  dense("m2", m2);
  if (running_mean) dense("running_mean", *running_mean);
  if (running_var) dense("running_var", *running_var);
  STD_TORCH_CHECK(mean.scalar_type() == acc_type(mean) && m2.scalar_type() == mean.scalar_type(),
                  "fusedtrain: mean and m2 must be float32 or float64");
  STD_TORCH_CHECK(!batches || (batches->scalar_type() == ScalarType::Long && batches->numel() == 1 &&
                               batches->is_cuda() == mean.is_cuda()),
                  "fusedtrain: num_batches_tracked must be one int64 on the device of mean");
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
                          .batches = batches ? static_cast<int64_t*>(batches->mutable_data_ptr()) : nullptr,
                          .rstd = rstd.mutable_data_ptr()};
  if (!mean.is_cuda()) {
    if (a.batches != nullptr) ++*a.batches;
    parallel_items(0, c, 5, [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act_update<I>(a, b, e); });
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("batch_norm_act_update_", mean);
    launch(cuda::batch_norm_act_update(a, launch.stream));
  }
  return rstd;
}

Tensor batch_norm_act(const Tensor& x, const Tensor& mean, const Tensor& rstd, const std::optional<Tensor>& weight,
                      const std::optional<Tensor>& bias, const std::optional<Tensor>& residual, int64_t act,
                      bool residual_after) {
  const auto [m, fold] = batch_of(x);
  const NormVectors v = norm_vectors(x, fold, mean, rstd, weight, bias);
  const Tensor y = torch::stable::empty_like(x);
  const BatchNormAct a{.in = inputs_of(x, m, residual, v, act, residual_after),
                       .after = residual_after ? images_or_null("residual", residual, x) : nullptr,
                       .y = y.mutable_data_ptr()};
  if (!x.is_cuda()) {
    parallel_images(m, map_items(m), [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act<I>(a, b, e); });
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("batch_norm_act", x);
    launch(cuda::batch_norm_act(a, launch.stream));
  }
  return y;
}

namespace {

// What both passes of backward read.
struct Gradients {
  const Tensor &dy, &x, &mean, &rstd;
  const std::optional<Tensor>&weight, &bias, &residual;
  int64_t act;
  bool residual_after;
};

std::tuple<Tensor, Tensor> sums_of(const Gradients& g, void* dz) {
  check_same("dy", g.dy, g.x);
  const Tensor& x = g.x;
  const auto [m, fold] = batch_of(x);
  const NormVectors v = norm_vectors(x, fold, g.mean, g.rstd, g.weight, g.bias);
  const Tensor sum_dz = empty_acc(x, {x.size(1)}), sum_dz_xhat = empty_acc(x, {x.size(1)});
  const Tensor partial = empty_acc(x, {m.n * reduce_chunks(m), 2, m.c});
  const BatchNormReduce a{.in = inputs_of(x, m, g.residual, v, g.act, g.residual_after),
                          .fold = fold,
                          .dy = g.dy.const_data_ptr(),
                          .partial = partial.mutable_data_ptr(),
                          .sum_dz = sum_dz.mutable_data_ptr(),
                          .sum_dz_xhat = sum_dz_xhat.mutable_data_ptr(),
                          .dz = dz};
  if (!x.is_cuda()) {
    parallel_images(m, reduce_items(m),
                    [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act_reduce_partial<I>(a, b, e); });
    parallel_items(0, x.size(1), 2 * m.n * reduce_chunks(m) * fold,
                   [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act_reduce_finish<I>(a, b, e); });
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("batch_norm_act_reduce", x);
    launch(cuda::batch_norm_act_reduce(a, launch.stream));
  }
  return {sum_dz, sum_dz_xhat};
}

void write_gradients(const Gradients& g, const std::optional<Tensor>& sum_dz, const std::optional<Tensor>& sum_dz_xhat,
                     double count, void* dx, void* dbefore) {
  check_same("dy", g.dy, g.x);
  STD_TORCH_CHECK(sum_dz.has_value() == sum_dz_xhat.has_value(), "fusedtrain: both sums or none expected");
  const Tensor& x = g.x;
  const auto [m, fold] = batch_of(x);
  const NormVectors v = norm_vectors(x, fold, g.mean, g.rstd, g.weight, g.bias);
  const auto sum_of = [&](const char* name, const std::optional<Tensor>& t) {
    return t ? std::optional(repeated(small_input(name, *t, x, x.size(1)), fold)) : std::nullopt;
  };
  const std::optional<Tensor> s1 = sum_of("sum_dz", sum_dz), s2 = sum_of("sum_dz_xhat", sum_dz_xhat);
  const BatchNormBackward a{.in = inputs_of(x, m, g.residual, v, g.act, g.residual_after),
                            .count = count,
                            .dy = g.dy.const_data_ptr(),
                            .sum_dz = s1 ? s1->const_data_ptr() : nullptr,
                            .sum_dz_xhat = s2 ? s2->const_data_ptr() : nullptr,
                            .dx = dx,
                            .dbefore = dbefore};
  if (dx == nullptr && dbefore == nullptr) return;
  if (!x.is_cuda()) {
    parallel_images(m, map_items(m), [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act_backward<I>(a, b, e); });
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("batch_norm_act_backward", x);
    launch(cuda::batch_norm_act_backward(a, launch.stream));
  }
}

}  // namespace

std::tuple<Tensor, Tensor> batch_norm_act_reduce(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                                 const Tensor& rstd, const std::optional<Tensor>& weight,
                                                 const std::optional<Tensor>& bias,
                                                 const std::optional<Tensor>& residual, int64_t act,
                                                 bool residual_after) {
  return sums_of({dy, x, mean, rstd, weight, bias, residual, act, residual_after}, nullptr);
}

std::tuple<Tensor, Tensor> batch_norm_act_backward(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                                   const Tensor& rstd, const std::optional<Tensor>& weight,
                                                   const std::optional<Tensor>& bias,
                                                   const std::optional<Tensor>& residual,
                                                   const std::optional<Tensor>& sum_dz,
                                                   const std::optional<Tensor>& sum_dz_xhat, double count, int64_t act,
                                                   bool residual_after, bool need_dx, bool need_dresidual) {
  const Tensor dx = need_dx ? torch::stable::empty_like(x) : torch::stable::new_empty(x, {0});
  const Tensor dresidual = need_dresidual ? torch::stable::empty_like(x) : torch::stable::new_empty(x, {0});
  write_gradients({dy, x, mean, rstd, weight, bias, residual, act, residual_after}, sum_dz, sum_dz_xhat, count,
                  need_dx ? dx.mutable_data_ptr() : nullptr, need_dresidual ? dresidual.mutable_data_ptr() : nullptr);
  return {dx, dresidual};
}

namespace {

Tensor batch_norm_act_update_(const Tensor& mean, const Tensor& m2, const std::optional<Tensor>& running_mean,
                              const std::optional<Tensor>& running_var, double count, double momentum, double eps) {
  return batch_norm_act_update(mean, m2, running_mean, running_var, {}, count, momentum, eps);
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_act_train_(
    const Tensor& x, const std::optional<Tensor>& running_mean, const std::optional<Tensor>& running_var,
    const std::optional<Tensor>& batches, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, double momentum, double eps, int64_t act, bool residual_after) {
  const auto [mean, m2] = batch_norm_act_stats(x);
  const Tensor rstd =
      batch_norm_act_update(mean, m2, running_mean, running_var, batches, batch_norm_act_count(x), momentum, eps);
  return {batch_norm_act(x, mean, rstd, weight, bias, residual, act, residual_after), mean, rstd};
}

// Whether dz, which may be a result itself, is written while it is summed and read again: on the CPU, where that costs
// less than computing a'(z) twice (benchmarks/LOG.md, 2026-11-26).
bool keeps_dz(const Tensor& x, Activation act, bool is_result) {
  constexpr int64_t kOutgrows = 16 << 20;  // bytes: memory bounds SiLU in float32 from here on
  const bool is_short = x.element_size() == 2;
  if (!x.is_cpu() || act == Activation::kIdentity) return false;
  if (act == Activation::kRelu || is_result) return is_result;
  if (act == Activation::kRelu6 || act == Activation::kHardSwish) return is_short;
  return act != Activation::kSilu || is_short || x.numel() * x.element_size() < kOutgrows;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_act_train_backward(
    const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& rstd, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& residual, int64_t act, bool residual_after,
    bool need_dresidual) {
  const double count = batch_norm_act_count(x);
  const Gradients g{dy, x, mean, rstd, weight, bias, residual, act, residual_after};
  const Tensor dx = torch::stable::empty_like(x);
  const Tensor dresidual = need_dresidual ? torch::stable::empty_like(x) : torch::stable::new_empty(x, {0});
  if (!keeps_dz(x, activation_of("act", act), need_dresidual)) {
    const auto [sum_dz, sum_dz_xhat] = sums_of(g, nullptr);
    write_gradients(g, sum_dz, sum_dz_xhat, count, dx.mutable_data_ptr(),
                    need_dresidual ? dresidual.mutable_data_ptr() : nullptr);
    return {dx, dresidual, sum_dz_xhat, sum_dz};
  }
  const Tensor& dz = need_dresidual ? dresidual : dx;
  const auto [sum_dz, sum_dz_xhat] = sums_of(g, dz.mutable_data_ptr());
  const std::optional<Tensor> none;
  const Gradients of_dz{dz, x, mean, rstd, weight, bias, none, int64_t(Activation::kIdentity), false};
  write_gradients(of_dz, sum_dz, sum_dz_xhat, count, dx.mutable_data_ptr(), nullptr);
  return {dx, dresidual, sum_dz_xhat, sum_dz};
}

template <class Library>
void implement(Library& m) {
  m.impl("batch_norm_act_train_", TORCH_BOX(&batch_norm_act_train_));
  m.impl("batch_norm_act_train_backward", TORCH_BOX(&batch_norm_act_train_backward));
  m.impl("batch_norm_act", TORCH_BOX(&batch_norm_act));
  m.impl("batch_norm_act_backward", TORCH_BOX(&batch_norm_act_backward));
  m.impl("batch_norm_act_reduce", TORCH_BOX(&batch_norm_act_reduce));
  m.impl("batch_norm_act_stats", TORCH_BOX(&batch_norm_act_stats));
  m.impl("batch_norm_act_update_", TORCH_BOX(&batch_norm_act_update_));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CPU, m) { implement(m); }
#ifdef FUSEDTRAIN_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CUDA, m) { implement(m); }
#endif

}  // namespace fusedtrain::bindings

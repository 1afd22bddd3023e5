// Tensors -> MlpAct, MlpScale and their backward -> kernels.
#include "mlp.h"

#include "bindings/channels.h"

namespace fusedtrain::bindings {
namespace {

// Rows [R, C], or images.
Images rows_or_images(const Tensor& t, int64_t act) {
  if (t.dim() != 2) return images_of(t, act);
  STD_TORCH_CHECK(t.is_contiguous(), "fusedtrain: contiguous rows [R, C] expected");
  return {1, t.size(1), t.size(0), dtype_of(t), Layout::kChannelsLast, input_activation_of("act", act)};
}

constexpr int64_t kIdentity = static_cast<int64_t>(Activation::kIdentity);

// Like z, but in the accumulation type where `wide`.
Tensor empty_sum(const Tensor& z, const Images& m, bool wide) {
  const ScalarType type = wide ? acc_type(z) : z.scalar_type();
  if (z.dim() == 2) return torch::stable::new_empty(z, {z.size(0), z.size(1)}, type);
  return empty_images(z, m.layout, m.c, z.size(2), z.size(3), type);
}

// Raises unless `t` is like z, but for its dtype, which may be that of sums; returns whether it is.
bool is_wide(const char* name, const Tensor& t, const Tensor& z) {
  const bool wide = t.scalar_type() != z.scalar_type();
  bool same = t.dim() == z.dim() && t.get_device() == z.get_device() && t.is_cuda() == z.is_cuda();
  for (int64_t d = 0; same && d < z.dim(); ++d) {
    same = t.size(d) == z.size(d) && (z.size(d) == 1 || t.stride(d) == z.stride(d) || z.numel() == 0);
  }
  STD_TORCH_CHECK(same && (!wide || t.scalar_type() == acc_type(z)), "fusedtrain: ", name,
                  " must have the shape and strides of z, and its dtype or that of sums");
  return wide;
}

template <class F>
void parallel_rows(const Images& m, F&& f) {
  parallel_samples(m, map_items(m), 0, m.n, f);
}
template <class F>
void parallel_sums(const Images& m, F&& f) {
  parallel_samples(m, reduce_items(m), 0, m.n, f);
}
template <class F>
void parallel_channels(const Images& m, F&& f) {
  parallel_items(0, m.c, m.n * reduce_chunks(m), f);
}

void act_into(const Tensor& g, const Tensor& h, int64_t act) {
  const Images m = rows_or_images(h, act);
  const MlpAct a{.images = m, .h = h.const_data_ptr(), .g = g.mutable_data_ptr()};
  parallel_rows(m, [&]<Isa I>(int64_t i, int64_t j) { cpu::mlp_act<I>(a, i, j); });
}

Tensor mlp_act(const Tensor& h, int64_t act) {
  const Tensor g = torch::stable::empty_like(h);
  act_into(g, h, act);
  return g;
}

void mlp_act_(const Tensor& h, int64_t act) { act_into(h, h, act); }

std::tuple<Tensor, Tensor> mlp_act_backward_(const Tensor& dg, const Tensor& h, int64_t act, bool need_g) {
  const Images m = rows_or_images(h, act);
  check_same("dg", dg, h);
  const Tensor g = need_g ? torch::stable::empty_like(h) : torch::stable::new_empty(h, {0});
  const Tensor db = empty_acc(h, {m.c}), partial = empty_acc(h, {m.n, reduce_chunks(m), MlpActBackward::kSums, m.c});
  const MlpActBackward a{.images = m,
                         .dg = dg.mutable_data_ptr(),
                         .h = h.const_data_ptr(),
                         .g = data_or_null(g),
                         .partial = partial.mutable_data_ptr(),
                         .db = db.mutable_data_ptr()};
  parallel_sums(m, [&]<Isa I>(int64_t i, int64_t j) { cpu::mlp_act_backward_partial<I>(a, i, j); });
  parallel_channels(m, [&]<Isa I>(int64_t i, int64_t j) { cpu::mlp_act_backward_finish<I>(a, i, j); });
  return {g, db};
}

Tensor mlp_scale(const Tensor& z, const Tensor& scale, const std::optional<Tensor>& residual, bool wide) {
  const Images m = rows_or_images(z, kIdentity);
  wide = wide && acc_type(z) != z.scalar_type();
  STD_TORCH_CHECK(!residual || is_wide("residual", *residual, z) == wide,
                  "fusedtrain: residual must have the dtype of y");
  const Tensor s = small_input("scale", scale, z, m.c), y = empty_sum(z, m, wide);
  const MlpScale a{.images = m,
                   .wide = wide,
                   .z = z.const_data_ptr(),
                   .scale = s.const_data_ptr(),
                   .residual = residual ? residual->const_data_ptr() : nullptr,
                   .y = y.mutable_data_ptr()};
  parallel_rows(m, [&]<Isa I>(int64_t i, int64_t j) { cpu::mlp_scale<I>(a, i, j); });
  return y;
}

std::tuple<Tensor, Tensor, Tensor> mlp_scale_backward(const Tensor& dy, const Tensor& z, const Tensor& scale) {
  const Images m = rows_or_images(z, kIdentity);
  const bool wide = is_wide("dy", dy, z);
  const Tensor s = small_input("scale", scale, z, m.c), dz = torch::stable::empty_like(z);
  const Tensor dscale = empty_acc(z, {m.c}), db = empty_acc(z, {m.c});
  const Tensor partial = empty_acc(z, {m.n, reduce_chunks(m), MlpScaleBackward::kSums, m.c});
  const MlpScaleBackward a{.images = m,
                           .wide = wide,
                           .dy = dy.const_data_ptr(),
                           .z = z.const_data_ptr(),
                           .scale = s.const_data_ptr(),
                           .partial = partial.mutable_data_ptr(),
                           .dz = dz.mutable_data_ptr(),
                           .dscale = dscale.mutable_data_ptr(),
                           .db = db.mutable_data_ptr()};
  parallel_sums(m, [&]<Isa I>(int64_t i, int64_t j) { cpu::mlp_scale_backward_partial<I>(a, i, j); });
  parallel_channels(m, [&]<Isa I>(int64_t i, int64_t j) { cpu::mlp_scale_backward_finish<I>(a, i, j); });
  return {dz, dscale, db};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CPU, m) {
  m.impl("mlp_act", TORCH_BOX(&mlp_act));
  m.impl("mlp_act_", TORCH_BOX(&mlp_act_));
  m.impl("mlp_act_backward_", TORCH_BOX(&mlp_act_backward_));
  m.impl("mlp_scale", TORCH_BOX(&mlp_scale));
  m.impl("mlp_scale_backward", TORCH_BOX(&mlp_scale_backward));
}

}  // namespace fusedtrain::bindings

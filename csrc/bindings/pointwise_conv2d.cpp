// Tensors -> PointwiseConv2d, PointwiseConv2dDw -> kernels.
#include "pointwise_conv2d.h"

#include <tuple>
#include <vector>

#include "bindings/operators.h"
#include "bindings/scratch.h"

namespace fusedtrain::bindings {
namespace {

PixelStrides strides_of(const Tensor& t, int64_t row, int64_t col) {
  return {.image = t.stride(0), .row = t.stride(2) * row, .col = t.stride(3) * col, .channel = t.stride(1)};
}

PointwiseConv2d contract_of(const Tensor& x, const Tensor& weight, const std::vector<int64_t>& stride) {
  STD_TORCH_CHECK(stride.size() == 2 && stride[0] > 0 && stride[1] > 0, "fusedtrain: two strides expected");
  STD_TORCH_CHECK(x.dim() == 4 && weight.dim() == 4 && weight.size(1) == x.size(1) && weight.size(2) == 1 &&
                      weight.size(3) == 1 && weight.scalar_type() == x.scalar_type() &&
                      weight.get_device() == x.get_device(),
                  "fusedtrain: weight must have the shape [D, C, 1, 1], and the dtype and device of x");
  const PointwiseConv2d a{.n = x.size(0),
                          .c = x.size(1),
                          .o = weight.size(0),
                          .h = (x.size(2) + stride[0] - 1) / stride[0],
                          .w = (x.size(3) + stride[1] - 1) / stride[1],
                          .dtype = dtype_of(x),
                          .x_strides = strides_of(x, stride[0], stride[1]),
                          .x = x.const_data_ptr(),
                          .weight = weight.const_data_ptr(),
                          .weight_strides = {weight.stride(0), weight.stride(1)},
                          .bias = nullptr,
                          .packed = nullptr,
                          .y = nullptr,
                          .moments = nullptr};
  STD_TORCH_CHECK(a.dtype == DType::kFloat32 || (a.dtype == DType::kBFloat16 && active_isa() >= Isa::kAvx512Bf16),
                  "fusedtrain: float32 expected, or bfloat16 on a CPU that multiplies it");
  return a;
}

// Computes y, and moments where a.moments is set.
Tensor multiply(PointwiseConv2d a, const Tensor& x, const std::optional<Tensor>& bias) {
  const Tensor y = empty_images(x, Layout::kChannelsLast, a.o, a.h, a.w);
  if (y.numel() == 0) return y;
  const std::optional<Tensor> sums = bias ? std::optional(small_input("bias", *bias, x, a.o)) : std::nullopt;
  const Tensor packed = torch::stable::new_empty(x, {cpu::packed_size(a) / 4}, ScalarType::Float);
  a.bias = sums ? static_cast<const float*>(sums->const_data_ptr()) : nullptr;
  a.packed = packed.mutable_data_ptr();
  a.y = y.mutable_data_ptr();
  parallel_items(0, cpu::chunks(a.o, cpu::kWideLanes), a.c * cpu::kWideLanes,
                 [&]<Isa I>(int64_t begin, int64_t end) { cpu::pointwise_conv2d_pack<I>(a, begin, end); });
  parallel_items(0, cpu::pixel_blocks(a), cpu::block_pixels(a) * (a.c + a.o), [&]<Isa I>(int64_t begin, int64_t end) {
    const Scratch scratch(cpu::pointwise_conv2d_scratch(a));
    cpu::pointwise_conv2d<I>(a, scratch.data(), begin, end);
  });
  return y;
}

Tensor pointwise_conv2d(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                        const std::vector<int64_t>& stride) {
  return multiply(contract_of(x, weight, stride), x, bias);
}

std::tuple<Tensor, Tensor, Tensor> pointwise_conv2d_stats(const Tensor& x, const Tensor& weight,
                                                          const std::optional<Tensor>& bias,
                                                          const std::vector<int64_t>& stride) {
  PointwiseConv2d a = contract_of(x, weight, stride);
  STD_TORCH_CHECK(a.dtype == DType::kFloat32, "fusedtrain: statistics are gathered in float32 only");
  if (a.n * a.h * a.w < cpu::kTilePixels) {  // no tile's mean to begin with
    const Tensor y = multiply(a, x, bias);
    return std::tuple_cat(std::tuple(y), batch_norm_act_stats(y));
  }
  const int64_t parts = cpu::pixel_blocks(a);
  const Tensor partial = empty_acc(x, {parts, 3, a.o});
  a.moments = static_cast<float*>(data_or_null(partial));
  const Tensor y = multiply(a, x, bias);
  std::vector<int64_t> sizes(parts, cpu::block_pixels(a));
  sizes.back() = a.n * a.h * a.w - (parts - 1) * cpu::block_pixels(a);
  const auto [mean, m2] = batch_norm_act_stats_of(partial, sizes);
  return {y, mean, m2};
}

Tensor pointwise_conv2d_dw(const Tensor& dy, const Tensor& x, const std::vector<int64_t>& stride) {
  STD_TORCH_CHECK(stride.size() == 2 && stride[0] > 0 && stride[1] > 0, "fusedtrain: two strides expected");
  STD_TORCH_CHECK(x.dim() == 4 && dy.dim() == 4 && dy.size(0) == x.size(0) &&
                      dy.size(2) == (x.size(2) + stride[0] - 1) / stride[0] &&
                      dy.size(3) == (x.size(3) + stride[1] - 1) / stride[1] && dy.scalar_type() == x.scalar_type() &&
                      dy.get_device() == x.get_device(),
                  "fusedtrain: dy must have the shape of y, and the dtype and device of x");
  PointwiseConv2dDw a{.n = x.size(0),
                      .c = x.size(1),
                      .o = dy.size(1),
                      .h = dy.size(2),
                      .w = dy.size(3),
                      .dtype = dtype_of(x),
                      .dy_strides = strides_of(dy, 1, 1),
                      .x_strides = strides_of(x, stride[0], stride[1]),
                      .dy = dy.const_data_ptr(),
                      .x = x.const_data_ptr(),
                      .dw = nullptr,
                      .partial = nullptr};
  const Tensor dw = torch::stable::new_empty(x, {a.o, a.c, 1, 1});
  if (dw.numel() == 0) return dw;
  const Tensor partial = empty_acc(x, {cpu::partial_size(a)});
  a.dw = dw.mutable_data_ptr();
  a.partial = data_or_null(partial);
  parallel_items(0, cpu::units(a), kGrain, [&]<Isa I>(int64_t begin, int64_t end) {
    const Scratch scratch(cpu::pointwise_conv2d_dw_scratch(a));
    cpu::pointwise_conv2d_dw<I>(a, scratch.data(), begin, end);
  });
  const int64_t rows = cpu::round_up(cpu::narrow_channels(a), cpu::kWideLanes) / cpu::kWideLanes;
  parallel_items(0, rows, cpu::partial_size(a) / rows,
                 [&]<Isa I>(int64_t begin, int64_t end) { cpu::pointwise_conv2d_dw_finish<I>(a, begin, end); });
  return dw;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CPU, m) {
  m.impl("pointwise_conv2d", TORCH_BOX(&pointwise_conv2d));
  m.impl("pointwise_conv2d_dw", TORCH_BOX(&pointwise_conv2d_dw));
  m.impl("pointwise_conv2d_stats", TORCH_BOX(&pointwise_conv2d_stats));
}

}  // namespace fusedtrain::bindings

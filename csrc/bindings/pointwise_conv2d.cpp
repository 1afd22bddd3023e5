// Tensors -> PointwiseConv2d, PointwiseConv2dDw -> kernels; and BatchNormBackward, where dy is made on the way.
#include "pointwise_conv2d.h"

#include <tuple>
#include <vector>

#include "batch_norm_act.h"
#include "bindings/norm_vectors.h"
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
  PointwiseConv2d a{.n = x.size(0),
                    .c = x.size(1),
                    .o = weight.size(0),
                    .h = (x.size(2) + stride[0] - 1) / stride[0],
                    .w = (x.size(3) + stride[1] - 1) / stride[1],
                    .dtype = dtype_of(x),
                    .layout = Layout::kChannelsLast,
                    .x_strides = strides_of(x, stride[0], stride[1]),
                    .x = x.const_data_ptr(),
                    .weight = weight.const_data_ptr(),
                    .weight_strides = {weight.stride(0), weight.stride(1)},
                    .bias = nullptr,
                    .packed = nullptr,
                    .y = nullptr,
                    .moments = nullptr,
                    .large = false};
  STD_TORCH_CHECK(a.dtype == DType::kFloat32 || (a.dtype == DType::kBFloat16 && active_isa() >= Isa::kAvx512Bf16),
                  "fusedtrain: float32 expected, or bfloat16 on a CPU that multiplies it");
  a.large = a.n * a.h * a.w * a.o * x.element_size() >= cpu::kLargeBytes;
  return a;
}

// The weight as the kernel reads it.
Tensor packed_weight(PointwiseConv2d& a, const Tensor& x) {
  const Tensor packed = torch::stable::new_empty(x, {cpu::packed_size(a, a.o) / 4}, ScalarType::Float);
  a.packed = packed.mutable_data_ptr();
  parallel_items(0, cpu::chunks(a.o, cpu::kWideLanes), a.c * cpu::kWideLanes,
                 [&]<Isa I>(int64_t begin, int64_t end) { cpu::pointwise_conv2d_pack<I>(a, begin, end); });
  return packed;
}

// Computes y, and moments where a.moments is set.
Tensor multiply(PointwiseConv2d a, const Tensor& x, const std::optional<Tensor>& bias) {
  const Tensor y = empty_images(x, a.layout, a.o, a.h, a.w);
  if (y.numel() == 0) return y;
  const std::optional<Tensor> sums = bias ? std::optional(small_input("bias", *bias, x, a.o)) : std::nullopt;
  const auto packed = a.layout == Layout::kContiguous ? std::nullopt : std::optional(packed_weight(a, x));
  a.bias = sums ? static_cast<const float*>(sums->const_data_ptr()) : nullptr;
  a.y = y.mutable_data_ptr();
  const int64_t items = cpu::pointwise_conv2d_items(a);
  parallel_items(0, items, (x.numel() + y.numel()) / items, [&]<Isa I>(int64_t begin, int64_t end) {
    const Scratch scratch(cpu::pointwise_conv2d_scratch(a));
    cpu::pointwise_conv2d<I>(a, scratch.data(), begin, end);
  });
  return y;
}

Tensor pointwise_conv2d(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                        const std::vector<int64_t>& stride) {
  return multiply(contract_of(x, weight, stride), x, bias);
}

Tensor pointwise_conv2d_contiguous(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(x.is_contiguous(), "fusedtrain: contiguous images expected");
  const Tensor dense = torch::stable::contiguous(weight);
  PointwiseConv2d a = contract_of(x, dense, {1, 1});
  a.layout = Layout::kContiguous;
  a.x_strides = {.image = a.c * a.h * a.w, .row = a.w, .col = 1, .channel = a.h * a.w};
  return multiply(a, x, bias);
}

std::tuple<Tensor, Tensor, Tensor> pointwise_conv2d_stats(const Tensor& x, const Tensor& weight,
                                                          const std::optional<Tensor>& bias,
                                                          const std::vector<int64_t>& stride) {
  PointwiseConv2d a = contract_of(x, weight, stride);
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

PointwiseConv2dDw dw_contract_of(const Tensor& dy, const Tensor& x, const std::vector<int64_t>& stride) {
  STD_TORCH_CHECK(stride.size() == 2 && stride[0] > 0 && stride[1] > 0, "fusedtrain: two strides expected");
  STD_TORCH_CHECK(x.dim() == 4 && dy.dim() == 4 && dy.size(0) == x.size(0) &&
                      dy.size(2) == (x.size(2) + stride[0] - 1) / stride[0] &&
                      dy.size(3) == (x.size(3) + stride[1] - 1) / stride[1] && dy.scalar_type() == x.scalar_type() &&
                      dy.get_device() == x.get_device(),
                  "fusedtrain: dy must have the shape of y, and the dtype and device of x");
  return {.n = x.size(0),
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
          .partial = nullptr,
          .adds = false};
}

void finish_dw(const PointwiseConv2dDw& a) {
  const int64_t items = cpu::finish_rows(a) * cpu::wide_parts(a);
  parallel_items(0, items, cpu::partial_size(a) / items,
                 [&]<Isa I>(int64_t begin, int64_t end) { cpu::pointwise_conv2d_dw_finish<I>(a, begin, end); });
}

Tensor pointwise_conv2d_dw(const Tensor& dy, const Tensor& x, const std::vector<int64_t>& stride) {
  PointwiseConv2dDw a = dw_contract_of(dy, x, stride);
  const Tensor dw = torch::stable::new_empty(x, {a.o, a.c, 1, 1});
  if (dw.numel() == 0) return dw;
  const Tensor partial = empty_acc(x, {cpu::partial_size(a)});
  a.dw = dw.mutable_data_ptr();
  a.partial = data_or_null(partial);
  // A vector of products is an element's work.
  const int64_t products = a.n * a.h * a.w * a.o * a.c, units = cpu::units(a);
  parallel_items(0, units, products / cpu::kWideLanes / std::max<int64_t>(1, units),
                 [&]<Isa I>(int64_t begin, int64_t end) {
                   const Scratch scratch(cpu::pointwise_conv2d_dw_scratch(a));
                   cpu::pointwise_conv2d_dw<I>(a, scratch.data(), begin, end);
                 });
  finish_dw(a);
  return dw;
}

// Whether pixels lie one after the other, each with its channels side by side.
bool is_matrix(const Tensor& t) {
  const Images images = images_of(t, 0);
  return images.layout == Layout::kChannelsLast || images.c == 1 || images.hw == 1;
}

std::tuple<Tensor, Tensor> pointwise_conv2d_norm_backward(const Tensor& dy, const Tensor& z, const Tensor& mean,
                                                          const Tensor& rstd, const std::optional<Tensor>& norm_weight,
                                                          const std::optional<Tensor>& norm_bias,
                                                          const std::optional<Tensor>& sum_dz,
                                                          const std::optional<Tensor>& sum_dz_xhat, double count,
                                                          int64_t act, const Tensor& x, const Tensor& weight,
                                                          bool need_dx) {
  check_same("dy", dy, z);
  STD_TORCH_CHECK(sum_dz.has_value() == sum_dz_xhat.has_value(), "fusedtrain: both sums or none expected");
  PointwiseConv2dDw whole = dw_contract_of(z, x, {1, 1});
  PointwiseConv2d product = contract_of(z, torch::stable::transpose(weight, 0, 1), {1, 1});
  STD_TORCH_CHECK((z.numel() == 0 || (is_matrix(z) && is_matrix(x))) && product.o == whole.c,
                  "fusedtrain: x and z in channels_last expected, and a weight for their channels");
  const Tensor dx =
      need_dx ? empty_images(x, Layout::kChannelsLast, whole.c, whole.h, whole.w) : torch::stable::new_empty(x, {0});
  const Tensor dw = torch::stable::new_empty(x, {whole.o, whole.c, 1, 1});
  const int64_t pixels = whole.n * whole.h * whole.w;
  if (dw.numel() == 0 || pixels == 0) return {torch::stable::fill_(dx, 0), torch::stable::fill_(dw, 0)};
  const Tensor packed = packed_weight(product, x), partial = empty_acc(x, {cpu::partial_size(whole)});
  whole.dw = dw.mutable_data_ptr();
  whole.partial = partial.mutable_data_ptr();

  const int64_t size = z.element_size(), most = cpu::made_pixels(product), groups = cpu::groups(whole);
  int64_t fold = 1;  // rows as one, in whole vectors
  while (fold < most / 2 && (whole.o * fold < 256 || whole.o * fold % cpu::kWideLanes != 0)) fold *= 2;
  const NormVectors v = norm_vectors(z, fold, Fold::kRows, mean, rstd, norm_weight, norm_bias);
  const auto sum_of = [&](const char* name, const std::optional<Tensor>& t) {
    return t ? std::optional(repeated(small_input(name, *t, z, whole.o), fold, Fold::kRows)) : std::nullopt;
  };
  const std::optional<Tensor> s1 = sum_of("sum_dz", sum_dz), s2 = sum_of("sum_dz_xhat", sum_dz_xhat);
  const Activation activation = activation_of("act", act);
  const auto at = [](const void* p, int64_t bytes) { return static_cast<const char*>(p) + bytes; };
  const auto make_dz = [&]<Isa I>(int64_t begin, int64_t end, int64_t rows, char* dz) {
    BatchNormBackward a{
        .in = {.images = {1, rows * whole.o, (end - begin) / rows, whole.dtype, Layout::kChannelsLast, {}},
               .act = activation,
               .x = at(z.const_data_ptr(), begin * whole.o * size),
               .before = nullptr,
               .mean = v.mean.const_data_ptr(),
               .rstd = v.rstd.const_data_ptr(),
               .weight = v.weight.const_data_ptr(),
               .bias = v.bias.const_data_ptr()},
        .count = count,
        .dy = at(dy.const_data_ptr(), begin * whole.o * size),
        .sum_dz = s1 ? s1->const_data_ptr() : nullptr,
        .sum_dz_xhat = s2 ? s2->const_data_ptr() : nullptr,
        .dx = dz,
        .dbefore = nullptr};
    cpu::batch_norm_act_backward<I>(a, 0, a.in.images.hw);
  };

  // A group's pixels in blocks, each of which is made and then read by both products.
  const auto bound = [&](int64_t group) {
    return group == groups ? pixels : pixels * group / groups / cpu::kMostPixels * cpu::kMostPixels;
  };
  parallel_items(0, groups, pixels / groups * (whole.c + whole.o), [&]<Isa I>(int64_t first, int64_t last) {
    const Scratch room(most * whole.o * size), product_room(cpu::pointwise_conv2d_scratch(product)),
        dw_room(cpu::pointwise_conv2d_dw_scratch(whole));
    auto* const dz = static_cast<char*>(room.data());
    for (int64_t group = first; group < last; ++group) {
      PointwiseConv2dDw sums = whole;
      sums.n = sums.h = 1;
      sums.dy = dz;
      sums.dy_strides = {.image = 0, .row = 0, .col = whole.o, .channel = 1};
      sums.x_strides = {.image = 0, .row = 0, .col = whole.c, .channel = 1};
      sums.partial = static_cast<char*>(whole.partial) +
                     group * cpu::partial_size(whole) / groups * int64_t(partial.element_size());
      PointwiseConv2d part = product;
      part.n = part.h = 1;
      part.x = dz;
      part.x_strides = sums.dy_strides;
      for (int64_t begin = bound(group); begin < bound(group + 1); begin += most) {
        const int64_t end = std::min(begin + most, bound(group + 1)), folded = begin + (end - begin) / fold * fold;
        make_dz.template operator()<I>(begin, folded, fold, dz);
        if (folded < end) make_dz.template operator()<I>(folded, end, 1, dz + (folded - begin) * whole.o * size);
        sums.w = part.w = end - begin;
        sums.x = at(whole.x, begin * whole.c * size);
        sums.adds = begin > bound(group);
        cpu::pointwise_conv2d_dw<I>(sums, dw_room.data(), 0, cpu::units(sums));
        if (!need_dx) continue;
        part.y = static_cast<char*>(dx.mutable_data_ptr()) + begin * whole.c * size;
        cpu::pointwise_conv2d<I>(part, product_room.data(), 0, cpu::pointwise_conv2d_items(part));
      }
    }
  });
  finish_dw(whole);
  return {dx, dw};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CPU, m) {
  m.impl("pointwise_conv2d", TORCH_BOX(&pointwise_conv2d));
  m.impl("pointwise_conv2d_contiguous", TORCH_BOX(&pointwise_conv2d_contiguous));
  m.impl("pointwise_conv2d_dw", TORCH_BOX(&pointwise_conv2d_dw));
  m.impl("pointwise_conv2d_norm_backward", TORCH_BOX(&pointwise_conv2d_norm_backward));
  m.impl("pointwise_conv2d_stats", TORCH_BOX(&pointwise_conv2d_stats));
}

}  // namespace fusedtrain::bindings

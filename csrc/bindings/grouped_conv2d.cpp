// Tensors -> GroupedConv2d, GroupedConv2dDw -> kernels.
#include "grouped_conv2d.h"

#include <vector>

#include "bindings/common.h"
#include "bindings/scratch.h"

namespace fusedtrain::bindings {
namespace {

using Ints = std::vector<int64_t>;

// Of [n, c, h, w] whose pixels lie one after the other, each with its channels side by side.
const void* pixels_of(const char* name, const Tensor& t) {
  const Images images = images_of(t, 0);
  STD_TORCH_CHECK(images.layout == Layout::kChannelsLast || images.c == 1 || images.hw == 1 || t.numel() == 0,
                  "fusedtrain: ", name, " in channels_last expected");
  return t.const_data_ptr();
}

// Of a convolution of x [n, *, h, w] to y [n, *, ho, wo].
GroupedSizes sizes_of(const Tensor& weight, int64_t n, int64_t h, int64_t w, int64_t ho, int64_t wo, const Ints& stride,
                      const Ints& padding, const Ints& dilation, int64_t groups) {
  STD_TORCH_CHECK(weight.dim() == 4 && weight.numel() > 0 && groups > 0 && weight.size(0) % groups == 0,
                  "fusedtrain: weight must have the shape [groups * o, i, kh, kw]");
  STD_TORCH_CHECK(stride.size() == 2 && padding.size() == 4 && dilation.size() == 2 &&
                      std::min({stride[0], stride[1], dilation[0], dilation[1]}) > 0,
                  "fusedtrain: two strides, four paddings and two dilations expected");
  active_isa();  // decides what a step is
  return {.n = n,
          .groups = groups,
          .ci = weight.size(1),
          .h = h,
          .w = w,
          .co = weight.size(0) / groups,
          .ho = ho,
          .wo = wo,
          .kh = weight.size(2),
          .kw = weight.size(3),
          .sh = stride[0],
          .sw = stride[1],
          .top = padding[2],
          .left = padding[0],
          .dil_h = dilation[0],
          .dil_w = dilation[1],
          .dtype = dtype_of(weight)};
}

void check_images(const char* name, const Tensor& t, const Tensor& weight, int64_t channels) {
  STD_TORCH_CHECK(t.dim() == 4 && t.size(1) == channels && t.scalar_type() == weight.scalar_type() &&
                      t.get_device() == weight.get_device(),
                  "fusedtrain: ", name, " must have ", channels, " channels, and the dtype and device of the weight");
}

Tensor multiply(const GroupedSizes& s, bool transposed, const Tensor& in, const Tensor& weight,
                const std::optional<Tensor>& bias) {
  const Tensor out = transposed ? empty_images(in, Layout::kChannelsLast, s.groups * s.ci, s.h, s.w)
                                : empty_images(in, Layout::kChannelsLast, s.groups * s.co, s.ho, s.wo);
  if (out.numel() == 0) return out;
  GroupedConv2d a{.sizes = s,
                  .transposed = transposed,
                  .in = pixels_of(transposed ? "dy" : "x", in),
                  .weight = weight.const_data_ptr(),
                  .weight_strides = {weight.stride(0), weight.stride(1), weight.stride(2), weight.stride(3)},
                  .bias = nullptr,
                  .packed = nullptr,
                  .out = out.mutable_data_ptr()};
  const std::optional<Tensor> sums =
      bias ? std::optional(small_input("bias", *bias, in, s.groups * s.co)) : std::nullopt;
  if (sums) a.bias = sums->const_data_ptr();
  const Tensor packed = empty_acc(in, {cpu::packed_size(a) / cpu::acc_size(s)});
  a.packed = packed.mutable_data_ptr();
  parallel_items(0, s.groups, cpu::packed_size(a) / s.groups,
                 [&]<Isa I>(int64_t begin, int64_t end) { cpu::grouped_conv2d_pack<I>(a, begin, end); });
  parallel_items(0, cpu::items(a), out.numel() / cpu::items(a) * s.kh * s.kw, [&]<Isa I>(int64_t begin, int64_t end) {
    const Scratch scratch(cpu::grouped_conv2d_scratch(a));
    cpu::grouped_conv2d<I>(a, scratch.data(), begin, end);
  });
  return out;
}

Tensor grouped_conv2d(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Ints& stride,
                      const Ints& padding, const Ints& dilation, int64_t groups) {
  STD_TORCH_CHECK(x.dim() == 4, "fusedtrain: x of shape [N, C, H, W] expected");
  GroupedSizes s = sizes_of(weight, x.size(0), x.size(2), x.size(3), 0, 0, stride, padding, dilation, groups);
  s.ho = cpu::output_size(s.h, s.kh, s.sh, padding[2] + padding[3], s.dil_h);
  s.wo = cpu::output_size(s.w, s.kw, s.sw, padding[0] + padding[1], s.dil_w);
  STD_TORCH_CHECK(s.ho > 0 && s.wo > 0, "fusedtrain: the kernel does not fit into the padded image");
  check_images("x", x, weight, groups * s.ci);
  return multiply(s, false, x, weight, bias);
}

Tensor grouped_conv2d_dx(const Tensor& dy, const Tensor& weight, int64_t h, int64_t w, const Ints& stride,
                         const Ints& padding, const Ints& dilation, int64_t groups) {
  STD_TORCH_CHECK(dy.dim() == 4, "fusedtrain: dy of shape [N, D, Ho, Wo] expected");
  const GroupedSizes s = sizes_of(weight, dy.size(0), h, w, dy.size(2), dy.size(3), stride, padding, dilation, groups);
  check_images("dy", dy, weight, groups * s.co);
  return multiply(s, true, dy, weight, std::nullopt);
}

Tensor grouped_conv2d_dw(const Tensor& dy, const Tensor& x, const Tensor& weight, const Ints& stride,
                         const Ints& padding, const Ints& dilation, int64_t groups) {
  STD_TORCH_CHECK(x.dim() == 4 && dy.dim() == 4 && x.size(0) == dy.size(0), "fusedtrain: images of one batch expected");
  const GroupedSizes s =
      sizes_of(weight, x.size(0), x.size(2), x.size(3), dy.size(2), dy.size(3), stride, padding, dilation, groups);
  check_images("x", x, weight, groups * s.ci);
  check_images("dy", dy, weight, groups * s.co);
  const Tensor dw = torch::stable::empty_like(weight);
  if (x.numel() == 0) return torch::stable::fill_(dw, 0);
  const Tensor partial = empty_acc(x, {cpu::partial_size(s)});
  const GroupedConv2dDw a{.sizes = s,
                          .dy = pixels_of("dy", dy),
                          .x = pixels_of("x", x),
                          .dw = dw.mutable_data_ptr(),
                          .dw_strides = {dw.stride(0), dw.stride(1), dw.stride(2), dw.stride(3)},
                          .partial = partial.mutable_data_ptr()};
  parallel_items(0, cpu::parts(s) * cpu::dw_sets(s), kGrain, [&]<Isa I>(int64_t begin, int64_t end) {
    const Scratch scratch(cpu::grouped_conv2d_dw_scratch(s));
    cpu::grouped_conv2d_dw<I>(a, scratch.data(), begin, end);
  });
  parallel_items(0, s.groups, cpu::parts(s) * cpu::group_sums(s),
                 [&]<Isa I>(int64_t begin, int64_t end) { cpu::grouped_conv2d_dw_finish<I>(a, begin, end); });
  return dw;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CPU, m) {
  m.impl("grouped_conv2d", TORCH_BOX(&grouped_conv2d));
  m.impl("grouped_conv2d_dw", TORCH_BOX(&grouped_conv2d_dw));
  m.impl("grouped_conv2d_dx", TORCH_BOX(&grouped_conv2d_dx));
}

}  // namespace fusedtrain::bindings

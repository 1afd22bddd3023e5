// Tensors -> PointwiseConv2dDw -> kernels.
#include "pointwise_conv2d.h"

#include <vector>

#include "bindings/common.h"
#include "bindings/scratch.h"

namespace fusedtrain::bindings {
namespace {

PixelStrides strides_of(const Tensor& t, int64_t row, int64_t col) {
  return {.image = t.stride(0), .row = t.stride(2) * row, .col = t.stride(3) * col, .channel = t.stride(1)};
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
    const Scratch scratch(cpu::pointwise_conv2d_scratch(a));
    cpu::pointwise_conv2d_dw<I>(a, scratch.data(), begin, end);
  });
  const int64_t rows = cpu::round_up(cpu::narrow_channels(a), cpu::kWideLanes) / cpu::kWideLanes;
  parallel_items(0, rows, cpu::partial_size(a) / rows,
                 [&]<Isa I>(int64_t begin, int64_t end) { cpu::pointwise_conv2d_dw_finish<I>(a, begin, end); });
  return dw;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CPU, m) { m.impl("pointwise_conv2d_dw", TORCH_BOX(&pointwise_conv2d_dw)); }

}  // namespace fusedtrain::bindings

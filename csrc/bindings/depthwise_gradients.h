#pragma once
// The gradients of a depthwise convolution whose incoming gradient is made on the way; depthwise_bn_act_se takes them.
#include <functional>
#include <tuple>
#include <vector>

#include "bindings/common.h"

namespace fusedtrain::bindings {

using Ints = std::vector<int64_t>;
// Writes images [begin, end) of dy; `dy` is the place of the first of them.
using WriteImages = std::function<void(int64_t begin, int64_t end, void* dy)>;

// dx, dw and db as depthwise_conv2d_backward gives them, on the CPU. dy is never in memory as a whole: a few images of
// it are written at a time, and read from cache. Threads write different images at once.
std::tuple<Tensor, Tensor, Tensor> depthwise_conv2d_backward_from(const WriteImages& write, const Tensor& x,
                                                                  const Tensor& weight, const Ints& stride,
                                                                  const Ints& padding, const Ints& dilation,
                                                                  bool need_dx, bool need_dw, bool need_db);

}  // namespace fusedtrain::bindings

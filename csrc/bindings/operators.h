#pragma once
// Operators that others are composed of.
#include <tuple>
#include <vector>

#include "bindings/common.h"

namespace fusedtrain::bindings {

Tensor depthwise_conv2d(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                        const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                        const std::vector<int64_t>& dilation, int64_t act);
std::tuple<Tensor, Tensor> batch_norm_act_stats(const Tensor& x);

}  // namespace fusedtrain::bindings

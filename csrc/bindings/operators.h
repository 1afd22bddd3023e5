#pragma once
// Operators that others are composed of.
#include <tuple>
#include <vector>

#include "bindings/common.h"
#include "depthwise_conv2d.h"

namespace fusedtrain::bindings {

// The sizes of a convolution, whose arguments are checked.
DepthwiseSizes depthwise_sizes(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                               const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                               const std::vector<int64_t>& dilation);
Tensor depthwise_conv2d(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                        const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                        const std::vector<int64_t>& dilation, int64_t act);
// The same with its mean and m2, as batch_norm_act_stats gives them; on the CPU.
std::tuple<Tensor, Tensor, Tensor> depthwise_conv2d_stats(const Tensor& x, const Tensor& weight,
                                                          const std::optional<Tensor>& bias,
                                                          const std::vector<int64_t>& stride,
                                                          const std::vector<int64_t>& padding,
                                                          const std::vector<int64_t>& dilation);
std::tuple<Tensor, Tensor, Tensor> depthwise_conv2d_backward(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                                             const std::vector<int64_t>& stride,
                                                             const std::vector<int64_t>& padding,
                                                             const std::vector<int64_t>& dilation, bool need_dx,
                                                             bool need_dw, bool need_db);
std::tuple<Tensor, Tensor> batch_norm_act_stats(const Tensor& x);
// How many values of a channel these are taken from.
double batch_norm_act_count(const Tensor& x);
Tensor batch_norm_act_update(const Tensor& mean, const Tensor& m2, const std::optional<Tensor>& running_mean,
                             const std::optional<Tensor>& running_var, const std::optional<Tensor>& batches,
                             double count, double momentum, double eps);
Tensor batch_norm_act(const Tensor& x, const Tensor& mean, const Tensor& rstd, const std::optional<Tensor>& weight,
                      const std::optional<Tensor>& bias, const std::optional<Tensor>& residual, int64_t act,
                      bool residual_after);
std::tuple<Tensor, Tensor> batch_norm_act_reduce(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                                 const Tensor& rstd, const std::optional<Tensor>& weight,
                                                 const std::optional<Tensor>& bias,
                                                 const std::optional<Tensor>& residual, int64_t act,
                                                 bool residual_after);
// The same from the sums of a CPU kernel that gathered them, float32 [parts, 3, C], over `sizes` positions each.
std::tuple<Tensor, Tensor> batch_norm_act_stats_of(const Tensor& partial, const std::vector<int64_t>& sizes);

}  // namespace fusedtrain::bindings

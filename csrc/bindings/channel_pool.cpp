// Tensors -> ChannelPool -> kernels.
#include "channel_pool.h"

#include "bindings/channels.h"

namespace fusedtrain::bindings {
namespace {

std::tuple<Tensor, Tensor, Tensor> channel_pool(const Tensor& x, int64_t pool, int64_t in_act) {
  const Images m = images_of(x, in_act);
  const bool with_peak = pool_of(pool) == Pool::kAvgMax;
  const Tensor partial = empty_acc(x, {m.n, reduce_chunks(m), 3, m.c}), pooled = empty_acc(x, {m.n, m.c});
  const Tensor peak = with_peak ? empty_acc(x, {m.n, m.c}) : empty_acc(x, {0});
  const Tensor ties = with_peak ? empty_acc(x, {m.n, m.c}) : empty_acc(x, {0});
  const ChannelPool a{.images = m,
                      .pool = pool_of(pool),
                      .x = x.const_data_ptr(),
                      .partial = partial.mutable_data_ptr(),
                      .pooled = pooled.mutable_data_ptr(),
                      .peak = data_or_null(peak),
                      .ties = data_or_null(ties)};
  if (!x.is_cuda()) {
    pool_samples(a, 0, m.n);
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("channel_pool", x);
    launch(cuda::channel_pool(a, launch.stream));
  }
  return {pooled, peak, ties};
}

Tensor channel_pool_backward(const Tensor& dpooled, const Tensor& x, const Tensor& kept_peak, const Tensor& kept_ties,
                             int64_t pool, int64_t in_act) {
  const Images m = images_of(x, in_act);
  const Tensor dp = small_input("dpooled", dpooled, x, m.n * m.c);
  const Tensor peak = kept_of_peaks("peak", kept_peak, x, pool_of(pool));
  const Tensor ties = kept_of_peaks("ties", kept_ties, x, pool_of(pool));
  const Tensor dx = torch::stable::empty_like(x);
  const ChannelScaleBackward a{.images = m,
                               .pool = pool_of(pool),
                               .dy = nullptr,
                               .x = x.const_data_ptr(),
                               .gate = nullptr,
                               .dpooled = dp.const_data_ptr(),
                               .peak = data_or_null(peak),
                               .ties = data_or_null(ties),
                               .dx = dx.mutable_data_ptr()};
  if (!x.is_cuda()) {
    backward_samples(a, 0, m.n);
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("channel_pool_backward", x);
    launch(cuda::channel_scale_backward(a, launch.stream));
  }
  return dx;
}

template <class Library>
void implement(Library& m) {
  m.impl("channel_pool", TORCH_BOX(&channel_pool));
  m.impl("channel_pool_backward", TORCH_BOX(&channel_pool_backward));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CPU, m) { implement(m); }
#ifdef FUSEDTRAIN_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CUDA, m) { implement(m); }
#endif

}  // namespace fusedtrain::bindings

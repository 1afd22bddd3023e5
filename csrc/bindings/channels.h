#pragma once
// The channel_pool and channel_scale kernels on samples [begin, end) of a batch, on torch's CPU threads; squeeze_excite
// composes them.
#include "bindings/common.h"
#include "channel_pool.h"
#include "channel_scale.h"

namespace fusedtrain::bindings {

// What the forward pass keeps of the largest values of every channel, or nothing.
inline Tensor kept_of_peaks(const char* name, const Tensor& t, const Tensor& x, Pool pool) {
  return pool == Pool::kAvgMax ? small_input(name, t, x, x.size(0) * x.size(1)) : t;
}

// Items per sample of the kernels that sum over hw, and of those that write images.
inline int64_t reduce_items(const Images& m) { return m.layout == Layout::kContiguous ? m.c : reduce_chunks(m); }
inline int64_t map_items(const Images& m) { return m.layout == Layout::kContiguous ? m.c : m.hw; }

// Takes groups of samples through `passes(begin, end)`, all passes of one group before the next group, so that the
// `tensors` tensors of images that one pass reads are still in the last cache for the next. Threads take whole groups
// where these share evenly, else they share the work inside a pass. No result depends on the grouping.
template <class F>
void for_sample_groups(const Images& m, int64_t tensors, F&& passes) {
  constexpr int64_t kCacheBytes = 8 << 20;
  const int64_t element = m.dtype == DType::kFloat64 ? 8 : m.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t sample = std::max<int64_t>(1, m.c * m.hw);
  const int64_t most = std::max<int64_t>(1, kCacheBytes / (sample * tensors * element));
  const auto in_groups = [&](int64_t begin, int64_t end) {
    const int64_t groups = (end - begin + most - 1) / most;
    for (int64_t g = 0; g < groups; ++g) {
      passes(begin + (end - begin) * g / groups, begin + (end - begin) * (g + 1) / groups);
    }
  };
  if (torch::stable::get_num_threads() > 1 && shares_evenly(m.n)) {
    torch::stable::parallel_for(0, m.n, std::max<int64_t>(1, kGrain / sample), in_groups);
  } else {
    in_groups(0, m.n);
  }
}

template <class F>
void parallel_samples(const Images& m, int64_t items, int64_t begin, int64_t end, F&& f) {
  parallel_items(begin * items, end * items, m.c * m.hw / std::max<int64_t>(1, items), f);
}

inline void pool_samples(const ChannelPool& a, int64_t begin, int64_t end) {
  parallel_samples(a.images, reduce_items(a.images), begin, end,
                   [&]<Isa I>(int64_t b, int64_t e) { cpu::channel_pool_partial<I>(a, b, e); });
  parallel_items(begin, end, a.images.c * reduce_chunks(a.images),
                 [&]<Isa I>(int64_t b, int64_t e) { cpu::channel_pool_finish<I>(a, b, e); });
}

inline void scale_samples(const ChannelScale& a, int64_t begin, int64_t end) {
  parallel_samples(a.images, map_items(a.images), begin, end,
                   [&]<Isa I>(int64_t b, int64_t e) { cpu::channel_scale<I>(a, b, e); });
}

inline void dot_samples(const ChannelScaleDot& a, int64_t begin, int64_t end) {
  parallel_samples(a.images, reduce_items(a.images), begin, end,
                   [&]<Isa I>(int64_t b, int64_t e) { cpu::channel_scale_dot_partial<I>(a, b, e); });
  parallel_items(begin, end, a.images.c * reduce_chunks(a.images),
                 [&]<Isa I>(int64_t b, int64_t e) { cpu::channel_scale_dot_finish<I>(a, b, e); });
}

inline void backward_samples(const ChannelScaleBackward& a, int64_t begin, int64_t end) {
  parallel_samples(a.images, map_items(a.images), begin, end,
                   [&]<Isa I>(int64_t b, int64_t e) { cpu::channel_scale_backward<I>(a, b, e); });
}

}  // namespace fusedtrain::bindings

#pragma once
// The channel_pool and channel_scale kernels on samples [begin, end) of a batch, on torch's CPU threads; squeeze_excite
// composes them.
#include "bindings/common.h"
#include "channel_pool.h"
#include "channel_scale.h"

namespace fusedtrain::bindings {

// Items per sample of the kernels that sum over hw, and of those that write images.
inline int64_t reduce_items(const Images& m) { return m.layout == Layout::kContiguous ? m.c : reduce_chunks(m); }
inline int64_t map_items(const Images& m) { return m.layout == Layout::kContiguous ? m.c : m.hw; }

// How many samples to take through all passes before the next ones, so that what one pass reads is still in cache for
// the next; `tensors` tensors of images are read. The groups are of about equal size.
inline int64_t group_samples(const Images& m, int64_t tensors) {
  constexpr int64_t kCacheBytes = 8 << 20;
  const int64_t element = m.dtype == DType::kFloat64 ? 8 : m.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t groups =
      std::clamp<int64_t>(m.n * m.c * m.hw * element * tensors / kCacheBytes, 1, std::max<int64_t>(1, m.n));
  return std::max<int64_t>(1, (m.n + groups - 1) / groups);
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

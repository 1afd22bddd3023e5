#pragma once
// channel_pool: one number per sample and channel.
//
//   kAvg     pooled[n, c] = mean_hw a(x)
//   kAvgMax  pooled[n, c] = 0.5 mean_hw a(x) + 0.5 max_hw a(x)
//
// The backward pass is channel_scale_backward without its dy term (csrc/channel_scale.h).
// acc is the accumulation type: float, double for kFloat64.
#include "core/isa.h"
#include "core/types.h"

namespace fusedtrain {

struct ChannelPool {
  Images images;
  Pool pool;
  const void* x;  // [n, c, hw] or [n, hw, c]
  void* partial;  // acc [n, reduce_chunks(images), 3, c]: sum, max, ties of a chunk of hw
  void* pooled;   // acc [n, c]
  void* peak;     // acc [n, c], max_hw a(x); null for kAvg
  void* ties;     // acc [n, c], how many positions reach the max; null for kAvg
};

namespace cpu {
// Items: n * reduce_chunks for channels_last, n * c for contiguous.
template <Isa I>
void channel_pool_partial(const ChannelPool& a, int64_t begin, int64_t end);
// Items: n.
template <Isa I>
void channel_pool_finish(const ChannelPool& a, int64_t begin, int64_t end);
}  // namespace cpu

namespace cuda {
[[nodiscard]] int channel_pool(const ChannelPool& a, void* stream);
}  // namespace cuda

}  // namespace fusedtrain

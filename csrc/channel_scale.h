#pragma once
// channel_scale: one factor per sample and channel.
//
//   y = a(x) * gate[n, c]
//   dgate[n, c] = sum_hw dy * a(x)                                     (channel_scale_dot)
//   dx = a'(x) * (dy * gate + dpool)                                   (channel_scale_backward)
//
// dpool is the gradient that reaches a(x) through a pooling of the same x (csrc/channel_pool.h):
//   kAvg     dpool = dpooled / hw
//   kAvgMax  dpool = 0.5 dpooled / hw + [a(x) = peak] 0.5 dpooled / ties
// Either term may be absent. acc is the accumulation type: float, double for kFloat64.
#include "core/isa.h"
#include "core/types.h"

namespace fusedtrain {

struct ChannelScale {
  Images images;
  const void* x;     // [n, c, hw] or [n, hw, c]
  const void* gate;  // acc [n, c]
  void* y;           // as x
};

struct ChannelScaleDot {
  Images images;
  const void* dy;  // as x
  const void* x;   // [n, c, hw] or [n, hw, c]
  void* partial;   // acc [n, reduce_chunks(images), c]
  void* dgate;     // acc [n, c]
  // On CUDA dx comes with it where it is not null; the CPU leaves it to channel_scale_backward, whose inputs it has in
  // the cache.
  const void* gate;  // acc [n, c]
  void* dx;          // as x
};

struct ChannelScaleBackward {
  Images images;
  Pool pool;
  const void* dy;       // as x, or null with gate
  const void* x;        // [n, c, hw] or [n, hw, c]
  const void* gate;     // acc [n, c], or null with dy
  const void* dpooled;  // acc [n, c], or null
  const void* peak;     // acc [n, c]; null unless kAvgMax
  const void* ties;     // acc [n, c]; null unless kAvgMax
  void* dx;             // as x
};

namespace cpu {
// Items: n * hw rows for channels_last, n * c planes for contiguous.
template <Isa I>
void channel_scale(const ChannelScale& a, int64_t begin, int64_t end);
// Items: n * reduce_chunks for channels_last, n * c for contiguous.
template <Isa I>
void channel_scale_dot_partial(const ChannelScaleDot& a, int64_t begin, int64_t end);
// Items: n.
template <Isa I>
void channel_scale_dot_finish(const ChannelScaleDot& a, int64_t begin, int64_t end);
// Items: n * hw rows for channels_last, n * c planes for contiguous.
template <Isa I>
void channel_scale_backward(const ChannelScaleBackward& a, int64_t begin, int64_t end);
}  // namespace cpu

namespace cuda {
[[nodiscard]] int channel_scale(const ChannelScale& a, void* stream);
[[nodiscard]] int channel_scale_dot(const ChannelScaleDot& a, void* stream);
[[nodiscard]] int channel_scale_backward(const ChannelScaleBackward& a, void* stream);
}  // namespace cuda

}  // namespace fusedtrain

#pragma once
// squeeze_excite: channel_pool, a gate network of two small fully connected layers, channel_scale.
//
//   pooled = pool(a(x))                 [n, c]      csrc/channel_pool.h
//   hidden = pooled w1^T + b1           [n, r]      here
//   logits = act(hidden) w2^T + b2      [n, c]      here
//   gate   = gate_act(logits)           [n, c]      here
//   y      = a(x) * gate                            csrc/channel_scale.h
//
//   dlogits = dgate * gate_act'(logits)     dhidden = (dlogits w2) * act'(hidden)      dpooled = dhidden w1
//   dw2 = dlogits^T act(hidden)             dw1 = dhidden^T pooled                     db2, db1: their sums over n
//
// and dpooled reaches x in channel_scale_backward.
// Everything here is small and of the accumulation type acc: float, double for kFloat64. The weights and their
// gradients are acc on the CPU and of type `weights` on CUDA, where a conversion would take as long as the network.
#include "core/isa.h"
#include "core/types.h"

namespace fusedtrain {

struct SqueezeExcite {
  int64_t n, c, r;
  DType dtype;    // kFloat32 or kFloat64
  DType weights;  // kFloat64 where dtype is
  Activation act, gate_act;
  const void* pooled;  // acc [n, c]
  const void* w1;      // weights [r, c]
  const void* b1;      // weights [r] or null
  const void* w2;      // weights [c, r]
  const void* b2;      // weights [c] or null
  void* hidden;        // acc [n, r], before act
  void* activated;     // acc [n, r], act(hidden)
  void* logits;        // acc [n, c], before gate_act
  void* gate;          // acc [n, c]
};

struct SqueezeExciteBackward {
  int64_t n, c, r;
  DType dtype;    // kFloat32 or kFloat64
  DType weights;  // kFloat64 where dtype is
  Activation act, gate_act;
  const void* dgate;   // acc [n, c]
  const void* pooled;  // acc [n, c]
  const void* hidden;  // acc [n, r]
  const void* logits;  // acc [n, c]
  const void* w1;      // weights [r, c]
  const void* w2;      // weights [c, r]
  void* gate;          // acc [n, c], gate_act(logits) again, for channel_scale_backward
  void* activated;     // acc [n, r], act(hidden) again, for dw2
  void* dlogits;       // acc [n, c]
  void* dhidden;       // acc [n, r]
  void* dpooled;       // acc [n, c]
  void* dw1;           // weights [r, c]
  void* db1;           // weights [r]
  void* dw2;           // weights [c, r]
  void* db2;           // weights [c]
};

namespace cpu {
// Items: n.
template <Isa I>
void squeeze_excite(const SqueezeExcite& a, int64_t begin, int64_t end);
// Items: n. Writes gate, activated, dlogits, dhidden, dpooled.
template <Isa I>
void squeeze_excite_backward(const SqueezeExciteBackward& a, int64_t begin, int64_t end);
// Items: r rows of dw1, then c rows of dw2. Writes dw1, db1, dw2, db2.
template <Isa I>
void squeeze_excite_weight_backward(const SqueezeExciteBackward& a, int64_t begin, int64_t end);
}  // namespace cpu

namespace cuda {
[[nodiscard]] int squeeze_excite(const SqueezeExcite& a, void* stream);
[[nodiscard]] int squeeze_excite_backward(const SqueezeExciteBackward& a, void* stream);
[[nodiscard]] int squeeze_excite_weight_backward(const SqueezeExciteBackward& a, void* stream);
}  // namespace cuda

}  // namespace fusedtrain

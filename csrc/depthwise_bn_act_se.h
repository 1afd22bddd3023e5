#pragma once
// depthwise_bn_act_se: what follows the depthwise convolution z = conv(x), with the normalised images never in memory:
//
//   xhat = (z - mean[c]) rstd[c]      u = weight[c] xhat + bias[c]      y = a(u) gate[n, c]
//   pooled = 1/hw sum a(u)            gate = the network of csrc/squeeze_excite.h on pooled
//
// or y = b(a(u) gate[n, c] + residual), where b is the identity or ReLU: whose gradient is taken first.
//
// Backward: of y = a(u) gate and of the pooling follows du = a'(u) (gate dy + dpooled / hw), so that one pass over dy
// and z gathers, per sample and channel, everything that is needed before dpooled and the batch's sums are known:
//
//   dgate  = sum dy a(u)
//   sum_du = gate sum dy a'(u) + dpooled/hw sum a'(u)                  summed over n: dbias
//   sum_du_xhat = the same with xhat in each sum                       summed over n: dweight
//   dz = weight rstd (du - sum_du / count - xhat sum_du_xhat / count)
//
// mean and rstd come from csrc/batch_norm_act.h, which says what `count` is; with fixed statistics (evaluation)
// dz = weight rstd du. acc is the accumulation type: float, double for kFloat64.
#include "batch_norm_act.h"
#include "depthwise_conv2d.h"

namespace fusedtrain {

// What all passes read. images.in_act is a.
struct BnAct {
  Images images;
  const void* z;       // [n, c, hw] or [n, hw, c]
  const void* mean;    // acc [c]
  const void* rstd;    // acc [c]
  const void* weight;  // acc [c]
  const void* bias;    // acc [c]
};

// z = conv(x) and its statistics, as csrc/batch_norm_act.h has them.
struct BnActConv {
  DepthwiseSizes sizes;
  const void* x;       // [n, c, h, w] or [n, h, w, c]
  const void* weight;  // [c * m, kh, kw]
  const void* bias;    // [c * m] or null
  void* z;             // [n, c * m, ho, wo] or [n, ho, wo, c * m]
  void* partial;       // acc [bn_act_conv_partial_size(sizes)]
  void* mean;          // acc [c * m]
  void* m2;            // acc [c * m]
};

struct BnActPool {
  BnAct in;
  void* partial;  // acc [n, reduce_chunks(images), c]
  void* pooled;   // acc [n, c]
};

struct BnActScale {
  BnAct in;
  const void* gate;      // acc [n, c]
  const void* residual;  // as z, or null
  bool relu;             // behind the sum with residual
  void* y;               // as z
};

struct BnActReduce {
  static constexpr int kSums = 5;  // dy a(u), dy a'(u), a'(u), and the last two times (z - mean)
  BnAct in;
  const void* dy;  // as z
  void* partial;   // acc [n, reduce_chunks(images), kSums, c]
  void* sums;      // acc [n, kSums - 1, c]: all but the first
  void* dgate;     // acc [n, c]
};

struct BnActCombine {
  int64_t n, c, hw;
  DType dtype;          // kFloat32 or kFloat64
  const void* sums;     // acc [n, kSums - 1, c]
  const void* rstd;     // acc [c]
  const void* gate;     // acc [n, c]
  const void* dpooled;  // acc [n, c]
  void* sum_du;         // acc [c]
  void* sum_du_xhat;    // acc [c]
};

struct BnActBackward {
  BnAct in;
  double count;
  const void* dy;           // as z
  const void* gate;         // acc [n, c], or null for no gate
  const void* dpooled;      // acc [n, c], or null for no gate
  const void* sum_du;       // acc [c], or null for fixed statistics
  const void* sum_du_xhat;  // acc [c], or null for fixed statistics
  void* dz;                 // as z
};

namespace cpu {
// Items: n * reduce_chunks for channels_last, n * c for contiguous.
template <Isa I>
void bn_act_pool_partial(const BnActPool& a, int64_t begin, int64_t end);
// Items: n.
template <Isa I>
void bn_act_pool_finish(const BnActPool& a, int64_t begin, int64_t end);
// Items: n * hw rows for channels_last, n * c planes for contiguous.
template <Isa I>
void bn_act_scale(const BnActScale& a, int64_t begin, int64_t end);
// Items: n * reduce_chunks for channels_last, n * c for contiguous.
template <Isa I>
void bn_act_reduce_partial(const BnActReduce& a, int64_t begin, int64_t end);
// Items: n.
template <Isa I>
void bn_act_reduce_finish(const BnActReduce& a, int64_t begin, int64_t end);
// Items: c.
template <Isa I>
void bn_act_combine(const BnActCombine& a, int64_t begin, int64_t end);
// Items: n * hw rows for channels_last, n * c planes for contiguous.
template <Isa I>
void bn_act_backward(const BnActBackward& a, int64_t begin, int64_t end);
}  // namespace cpu

namespace cuda {
int64_t bn_act_conv_partial_size(const DepthwiseSizes& s);
[[nodiscard]] int bn_act_conv(const BnActConv& a, void* stream);
[[nodiscard]] int bn_act_pool(const BnActPool& a, void* stream);
[[nodiscard]] int bn_act_scale(const BnActScale& a, void* stream);
[[nodiscard]] int bn_act_reduce(const BnActReduce& a, void* stream);
[[nodiscard]] int bn_act_combine(const BnActCombine& a, void* stream);
[[nodiscard]] int bn_act_backward(const BnActBackward& a, void* stream);
}  // namespace cuda

}  // namespace fusedtrain

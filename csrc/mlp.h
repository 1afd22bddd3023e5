#pragma once
// mlp: what stands around the two products of y = residual + scale (W2 a(W1 x + b1) + b2), rows of channels or images.
//
//   h = W1 x + b1   g = a(h)   z = W2 g + b2   y = residual + scale z
//
// Backward, with sums over all but the channels:
//
//   dz = scale dy     dscale[c] = sum dy z     db2[c] = sum dz
//   dh = a'(h) dg     db1[c] = sum dh          and g again, which the gradient of W2 reads
//
// acc is the accumulation type: float, double for kFloat64. Rows [hw, c] are images of one sample, channels_last.
#include "core/isa.h"
#include "core/types.h"

namespace fusedtrain {

// images.in_act is a.
struct MlpAct {
  Images images;
  const void* h;  // [n, c, hw] or [n, hw, c]
  void* g;        // as h, or h itself
};

struct MlpActBackward {
  static constexpr int kSums = 1;
  Images images;
  void* dg;       // as h; becomes dh
  const void* h;  // [n, c, hw] or [n, hw, c]
  void* g;        // as h, or null
  void* partial;  // acc [n, reduce_chunks(images), kSums, c]
  void* db;       // acc [c]
};

struct MlpScale {
  Images images;
  bool wide;             // y and the residual are of the accumulation type
  const void* z;         // [n, c, hw] or [n, hw, c]
  const void* scale;     // acc [c]
  const void* residual;  // as y, or null
  void* y;               // [n, c, hw] or [n, hw, c]
};

struct MlpScaleBackward {
  static constexpr int kSums = 2;  // dy z, dz
  Images images;
  bool wide;          // dy is of the accumulation type
  const void* dy;     // [n, c, hw] or [n, hw, c]
  const void* z;      // [n, c, hw] or [n, hw, c]
  const void* scale;  // acc [c]
  void* partial;      // acc [n, reduce_chunks(images), kSums, c]
  void* dz;           // as z
  void* dscale;       // acc [c]
  void* db;           // acc [c]
};

namespace cpu {
// Items: n * hw rows for channels_last, n * c planes for contiguous.
template <Isa I>
void mlp_act(const MlpAct& a, int64_t begin, int64_t end);
template <Isa I>
void mlp_scale(const MlpScale& a, int64_t begin, int64_t end);
// Items: n * reduce_chunks for channels_last, n * c for contiguous.
template <Isa I>
void mlp_act_backward_partial(const MlpActBackward& a, int64_t begin, int64_t end);
template <Isa I>
void mlp_scale_backward_partial(const MlpScaleBackward& a, int64_t begin, int64_t end);
// Items: c.
template <Isa I>
void mlp_act_backward_finish(const MlpActBackward& a, int64_t begin, int64_t end);
template <Isa I>
void mlp_scale_backward_finish(const MlpScaleBackward& a, int64_t begin, int64_t end);
}  // namespace cpu

}  // namespace fusedtrain

#pragma once
// batch_norm_act: batch normalisation, an activation and a residual, with
//
//   xhat = (x - mean[c]) rstd[c]          z = weight[c] xhat + bias[c] + before          y = a(z) + after
//
// where `before` and `after` are images as x, or null. In training mean and rstd come from the batch itself:
//
//   mean[c] = 1/count sum x          m2[c] = sum (x - mean)^2                              (batch_norm_act_stats)
//   rstd[c] = 1 / sqrt(m2 / count + eps), and the running statistics move by `momentum`   (batch_norm_act_update)
//
// Backward, with dz = a'(z) dy, which is the gradient of `before`:
//
//   sum_dz[c] = sum dz = dbias          sum_dz_xhat[c] = sum dz xhat = dweight            (batch_norm_act_reduce)
//   dx = weight rstd (dz - sum_dz / count - xhat sum_dz_xhat / count)                     (batch_norm_act_backward)
//
// The sums run over the batch and its pixels; `count` is their number, over all processes where those share statistics.
// With fixed statistics (evaluation) dx = weight rstd dz; where y = a(z) tells dz, of the identity and of ReLU, and no
// sum is wanted, that is made of y instead of x (batch_norm_act_fixed_backward). acc is the accumulation type: float,
// double for kFloat64.
//
// On the CPU, rows of few channels are taken `fold` at a time, as one row of fold * c columns in `images`, over which
// the vectors of BatchNormInputs and the sums of BatchNormBackward are repeated. Results stay [c].
#include "core/isa.h"
#include "core/types.h"

namespace fusedtrain {

struct BatchNormStats {
  Images images;
  int64_t fold;
  const void* x;  // [n, c, hw] or [n, hw, c]
  void* partial;  // acc [n * reduce_chunks(images), 3, c]: shift, sum (x - shift), sum (x - shift)^2
  void* mean;     // acc [c]; 0 for an empty batch
  void* m2;       // acc [c]
};

// The sums of a kernel that gathered them while it made x, in parts of its own.
struct BatchNormMoments {
  int64_t c, parts;
  const float* partial;  // [parts, 3, c], as that of BatchNormStats
  const int64_t* sizes;  // [parts]: positions
  float* mean;           // [c]
  float* m2;             // [c]
};

struct BatchNormUpdate {
  int64_t c;
  DType dtype;          // of mean, m2 and rstd: kFloat32 or kFloat64
  DType running_dtype;  // of running_mean and running_var
  double count, momentum, eps;
  const void* mean;    // acc [c]
  const void* m2;      // acc [c]
  void* running_mean;  // running_dtype [c], or null
  void* running_var;   // running_dtype [c], or null; takes m2 / (count - 1)
  int64_t* batches;    // [1] or null; counted up, on the CPU by the caller
  void* rstd;          // acc [c]
};

// What both directions read.
struct BatchNormInputs {
  Images images;
  Activation act;
  const void* x;       // [n, c, hw] or [n, hw, c]
  const void* before;  // as x, or null
  const void* mean;    // acc [c]
  const void* rstd;    // acc [c]
  const void* weight;  // acc [c]
  const void* bias;    // acc [c]
};

struct BatchNormAct {
  BatchNormInputs in;
  const void* after;  // as x, or null
  void* y;            // as x
};

struct BatchNormReduce {
  BatchNormInputs in;
  int64_t fold;
  const void* dy;     // as x
  void* partial;      // acc [n * reduce_chunks(images), 2, c]: sum dz, sum dz (x - mean)
  void* sum_dz;       // acc [c]
  void* sum_dz_xhat;  // acc [c]
  void* dz;           // as x, or null; on the CPU, with an activation: dz as well, for the pass that makes dx of it
};

struct BatchNormBackward {
  BatchNormInputs in;
  double count;
  const void* dy;           // as x; on the CPU it may be dx
  const void* sum_dz;       // acc [c], or null for fixed statistics
  const void* sum_dz_xhat;  // acc [c], or null for fixed statistics
  void* dx;                 // as x, or null
  void* dbefore;            // as x, or null
};

struct BatchNormFixedBackward {
  Images images;
  Activation act;     // kIdentity or kRelu
  const void* dy;     // [n, c, hw] or [n, hw, c]
  const void* y;      // as dy; not read with kIdentity
  const void* scale;  // acc [c]: weight rstd
  void* dx;           // as dy
  void* dbefore;      // as dy, or null
};

namespace cpu {
// Few chunks of many channels are shared out over threads by channels too, in parts of this many and the rest.
constexpr int64_t kPartChannels = 64;
constexpr int64_t channel_parts(const Images& images) {
  return images.c < 4 * kPartChannels ? 1 : images.c / kPartChannels;
}

// Items: n * reduce_chunks * channel_parts for channels_last, n * c for contiguous.
template <Isa I>
void batch_norm_act_stats_partial(const BatchNormStats& a, int64_t begin, int64_t end);
// Items: c.
template <Isa I>
void batch_norm_act_stats_finish(const BatchNormStats& a, int64_t begin, int64_t end);
// Items: c.
template <Isa I>
void batch_norm_act_moments_finish(const BatchNormMoments& a, int64_t begin, int64_t end);
// Items: c.
template <Isa I>
void batch_norm_act_update(const BatchNormUpdate& a, int64_t begin, int64_t end);
// Items: n * hw rows for channels_last, n * c planes for contiguous.
template <Isa I>
void batch_norm_act(const BatchNormAct& a, int64_t begin, int64_t end);
// Items: n * reduce_chunks * channel_parts for channels_last, n * c for contiguous.
template <Isa I>
void batch_norm_act_reduce_partial(const BatchNormReduce& a, int64_t begin, int64_t end);
// Items: c.
template <Isa I>
void batch_norm_act_reduce_finish(const BatchNormReduce& a, int64_t begin, int64_t end);
// Items: n * hw rows for channels_last, n * c planes for contiguous.
template <Isa I>
void batch_norm_act_backward(const BatchNormBackward& a, int64_t begin, int64_t end);
// Items: n * hw rows for channels_last, n * c planes for contiguous.
template <Isa I>
void batch_norm_act_fixed_backward(const BatchNormFixedBackward& a, int64_t begin, int64_t end);
}  // namespace cpu

namespace cuda {
[[nodiscard]] int batch_norm_act_stats(const BatchNormStats& a, void* stream);
[[nodiscard]] int batch_norm_act_update(const BatchNormUpdate& a, void* stream);
[[nodiscard]] int batch_norm_act(const BatchNormAct& a, void* stream);
[[nodiscard]] int batch_norm_act_reduce(const BatchNormReduce& a, void* stream);
[[nodiscard]] int batch_norm_act_backward(const BatchNormBackward& a, void* stream);
[[nodiscard]] int batch_norm_act_fixed_backward(const BatchNormFixedBackward& a, void* stream);
}  // namespace cuda

}  // namespace fusedtrain

#pragma once
// global_response_norm: every channel is scaled by how strong it is in its image, next to the other channels there.
//
//   norm[n, c] = sqrt(sum_hw a(x)^2)      mean[n] = 1/c sum_c norm + eps      factor = 1 + weight[c] norm / mean
//   y = a(x) factor[n, c] + bias[c]
//
// Backward, with the sums over hw of dot = sum dy a(x) and sum_dy = sum dy:
//
//   dweight[c] = sum_n dot norm / mean            dbias[c] = sum_n sum_dy
//   dnorm = weight dot / mean - 1/(c mean^2) sum_c (weight dot norm)
//   dx = a'(x) (dy factor + a(x) dnorm / norm)    where norm is 0 its gradient is, as in torch
//
// acc is the accumulation type: float, double for kFloat64.
#include "core/isa.h"
#include "core/types.h"

namespace fusedtrain {

// images.in_act is a.
struct GlobalResponseNorm {
  Images images;
  double eps;
  const void* x;       // [n, c, hw] or [n, hw, c]
  const void* weight;  // acc [c]
  const void* bias;    // acc [c]
  void* partial;       // acc [n, reduce_chunks(images), c]
  void* norm;          // acc [n, c]
  void* factor;        // acc [n, c]
  void* y;             // as x
};

struct GlobalResponseNormBackward {
  static constexpr int kSums = 2;  // dy a(x), dy
  Images images;
  double eps;
  const void* dy;      // as x
  const void* x;       // [n, c, hw] or [n, hw, c]
  const void* weight;  // acc [c]
  const void* norm;    // acc [n, c]
  void* partial;       // acc [n, reduce_chunks(images), kSums, c]
  void* factor;        // acc [n, c]
  void* slope;         // acc [n, c]: dnorm / norm
  void* dweights;      // acc [n, c]: what each image adds to dweight
  void* dbiases;       // acc [n, c]: and to dbias
  void* dx;            // as x, or on CUDA null
  void* dweight;       // acc [c]
  void* dbias;         // acc [c]
};

namespace cpu {
// Items: n * reduce_chunks for channels_last, n * c for contiguous.
template <Isa I>
void global_response_norm_partial(const GlobalResponseNorm& a, int64_t begin, int64_t end);
// Items: n.
template <Isa I>
void global_response_norm_finish(const GlobalResponseNorm& a, int64_t begin, int64_t end);
// Items: n * hw rows for channels_last, n * c planes for contiguous.
template <Isa I>
void global_response_norm(const GlobalResponseNorm& a, int64_t begin, int64_t end);
// Items: n * reduce_chunks for channels_last, n * c for contiguous.
template <Isa I>
void global_response_norm_backward_partial(const GlobalResponseNormBackward& a, int64_t begin, int64_t end);
// Items: n.
template <Isa I>
void global_response_norm_backward_finish(const GlobalResponseNormBackward& a, int64_t begin, int64_t end);
// Items: n * hw rows for channels_last, n * c planes for contiguous.
template <Isa I>
void global_response_norm_backward(const GlobalResponseNormBackward& a, int64_t begin, int64_t end);
// Items: c.
template <Isa I>
void global_response_norm_backward_params(const GlobalResponseNormBackward& a, int64_t begin, int64_t end);
}  // namespace cpu

namespace cuda {
[[nodiscard]] int global_response_norm(const GlobalResponseNorm& a, void* stream);
// Without dx where that is null.
[[nodiscard]] int global_response_norm_backward(const GlobalResponseNormBackward& a, void* stream);
}  // namespace cuda

}  // namespace fusedtrain

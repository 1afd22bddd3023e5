#pragma once
// The moments of what a convolution writes, gathered on the way.
#include "core/cuda_images.h"

namespace fusedtrain::cuda {

// count, shift, mean - shift and m2 of values, by Welford's rule and Chan's for two sets. The shift is one of the
// values, so that nothing cancels however large the mean is.
template <class A>
struct Moments {
  static constexpr int kParts = 4;
  A part[kParts] = {};

  __device__ void add(A v, A count, A inverse) {
    if (part[0] == A(0)) part[1] = v;
    const A shifted = v - part[1], d = shifted - part[2];
    part[0] = count;
    part[2] += d * inverse;
    part[3] += d * (shifted - part[2]);
  }
  __device__ void merge(const Moments& o) {
    if (part[0] == A(0) || o.part[0] == A(0)) {
      if (part[0] == A(0)) *this = o;
      return;
    }
    const A count = part[0] + o.part[0], share = o.part[0] / count;
    const A d = (o.part[1] - part[1]) + (o.part[2] - part[2]);
    part[2] += d * share;
    part[3] += o.part[3] + d * d * part[0] * share;
    part[0] = count;
  }
};

// The same for a thread's own values of N channels, few enough for plain sums about the first of them.
template <int N>
struct ShiftedSums {
  float count = 0.0f, shift[N] = {}, sum[N] = {}, squares[N] = {};

  __device__ void add(const float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (count == 0.0f) shift[i] = v[i];
      const float d = v[i] - shift[i];
      sum[i] += d;
      squares[i] += d * d;
    }
    count += 1.0f;
  }
  __device__ Moments<float> moments(int i) const {
    if (count == 0.0f) return {};
    const float mean = sum[i] / count;
    return {{count, shift[i], mean, at_least(squares[i] - sum[i] * mean, 0.0f)}};
  }
};

}  // namespace fusedtrain::cuda

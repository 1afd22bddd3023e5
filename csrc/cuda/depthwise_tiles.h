#pragma once
// How the depthwise CUDA kernels for unusual shapes (usual ones: depthwise_patches.h and depthwise_planes.h) share out
// an image: to every thread a run of columns of one row, in a pack of channels.
//
// No tile of x stands in shared memory: a thread keeps the columns that its run reads in registers, and neighbours find
// the rows they share in L1. Shared memory holds the weights, as acc, [tap][channel of the block].
#include "core/cuda.h"
#include "depthwise_conv2d.h"

namespace fusedtrain::cuda {

// Columns of one run: fewer where each is a pack of channels.
template <int N>
constexpr int kColumnsOf = N == 1 ? 8 : 4;

struct Strides {
  int64_t image, channel, row, column;
};

inline Strides strides_of(Layout layout, int64_t channels, int64_t h, int64_t w) {
  return layout == Layout::kChannelsLast ? Strides{channels * h * w, 1, channels * w, channels}
                                         : Strides{channels * h * w, h * w, w, 1};
}

// Zero outside the image.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> load_inside(const T* row, int column, int columns, int64_t stride) {
  if (column < 0 || column >= columns) {
    Pack<T, N> zero;
#pragma unroll
    for (int i = 0; i < N; ++i) from_acc(Acc<T>(0), zero.v[i]);
    return zero;
  }
  return load<N>(row + column * stride);
}

// The element type, and elements per access N: a pack where all pointers are aligned and channels lie side by side.
// float64 moves single elements.
//   f.template operator()<T, N>()
template <class F>
[[nodiscard]] int visit_pack(const DepthwiseSizes& s, bool aligned, F&& f) {
  return visit_element(s.dtype, [&]<class T>() -> int {
    if constexpr (sizeof(T) < 8) {
      const bool packs = aligned && s.layout == Layout::kChannelsLast && s.m == 1 && s.c % kPack<T> == 0;
      if (packs) return f.template operator()<T, kPack<T>>();
    }
    return f.template operator()<T, 1>();
  });
}

// Taps of a kernel row that a thread takes together (K), and their stride (S), as template arguments; longer rows are
// taken in parts of 7. <1, 0> is any stride and dilation, tap by tap. Packs have few forms: the usual kernels are those
// of depthwise_patches.h.
//   f.template operator()<K, S>()
template <class T, int N, class F>
[[nodiscard]] int visit_taps(int64_t kw, int64_t stride, int64_t dilation, F&& f) {
  if (dilation != 1 || stride > 2) return f.template operator()<1, 0>();
  if constexpr (sizeof(T) == 8 || N > 1) {
    return stride == 1 && (N == 1 || kw > 3) ? f.template operator()<7, 1>() : f.template operator()<1, 0>();
  } else {
    int code = cudaErrorInvalidValue;
    visit<1, 2>(static_cast<int>(stride), [&]<int S>() {
      code = kw <= 3   ? f.template operator()<3, S>()
             : kw <= 5 ? f.template operator()<5, S>()
                       : f.template operator()<7, S>();
    });
    return code;
  }
}

}  // namespace fusedtrain::cuda

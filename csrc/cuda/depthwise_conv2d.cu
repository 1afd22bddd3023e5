// depthwise_conv2d on CUDA: forward and dx. dw and db: depthwise_conv2d_dw.cu. Usual kernels on contiguous images:
// depthwise_conv2d_planes.cu.
//
//   forward               out[o] = act(bias[o] + sum weight[o, ky, kx] * in[o / m, oy * sh + ky * dil_h - top, ...])
//   dx for stride 1       the same with the taps turned round, over the m outputs of each channel
//   dx for other strides  out[o, iy, ix] = sum over the taps for which (iy + top - ky * dil_h) / sh is an output row
#include "cuda/depthwise_pass.h"
#include "cuda/depthwise_planes.h"

namespace fusedtrain::cuda {
namespace {

// i / stride where that has no remainder, else -1.
template <int S>
__device__ __forceinline__ int divide_exactly(int i, int stride) {
  if constexpr (S == 2) return (i & 1) == 0 ? i / 2 : -1;
  return i % stride == 0 ? i / stride : -1;
}

// The same with `in` as what a convolution of stride (sh, sw) has made of `out`. S is 2 for strides of 2 and no
// dilation, else 0.
template <int S>
struct Transposed {
  template <class T, int N, class A, int Columns>
  __device__ static void add(const Pass<T>& a, const T* in, int oy, int ox, int ky, const A* taps, int width,
                             A (&sums)[Columns][N]) {
    const int ty = oy + a.top - ky * a.dil_h;
    const int iy = ty < 0 ? -1 : divide_exactly<S>(ty, a.sh);
    if (iy < 0 || iy >= a.h) return;
    const T* row = in + iy * a.in_strides.row;
#pragma unroll
    for (int t = 0; t < Columns; ++t) {
      const int tx = ox + t + a.left;
      for (int kx = S == 2 ? tx & 1 : 0; kx < a.kw; kx += S == 2 ? 2 : 1) {
        const int i = tx - kx * a.dil_w;
        if (i < 0) break;
        const int ix = divide_exactly<S>(i, a.sw);
        if (ix < 0 || ix >= a.w) continue;
        multiply_add<N>(load<N>(taps + kx * width), load<N>(row + ix * a.in_strides.column), sums[t]);
      }
    }
  }
};

// dx by patches: for stride 1 the forward pass over dy with the taps turned round.
template <class T, int K, int S>
int patches_dx(const DepthwiseConv2dBackward& a, void* stream) {
  DepthwiseSizes s = a.sizes;
  std::swap(s.h, s.ho), std::swap(s.w, s.wo);
  if constexpr (S == 1) s.top = K - 1 - s.top, s.left = K - 1 - s.left;
  PatchPass<T> pass = patch_pass<T>(s, a.dy, a.weight, nullptr, a.dx);
  if constexpr (S == 1) {
    pass.turned = true;
    return run_patches<T, K, 1, false>(pass, forward_patches<K, 1>(s), stream);
  } else {
    const PatchTiles g = patch_tiles(s, s.ho + s.top % 2, s.wo + s.left % 2, kStagedBytes<K> * most_channels(s),
                                     [](int rows, int cols) { return spread_reads<K>(rows) * spread_reads<K>(cols); });
    return launch(spread_kernel<T, K>, g.blocks * g.slices, g.threads(), g.shared_bytes, stream, pass, g);
  }
}

}  // namespace

int depthwise_conv2d(const DepthwiseConv2d& a, void* stream) {
  const DepthwiseSizes& s = a.sizes;
  if (a.act == Activation::kIdentity && has_planes(s)) {
    return planes_forward(a, nullptr, stream);
  }
  if (a.act == Activation::kIdentity && has_patches(s) && is_aligned(a.x, a.y)) {
    return visit_patches(s, [&]<class T, int K, int S>() {
      return run_patches<T, K, S, false>(patch_pass<T>(s, a.x, a.weight, a.bias, a.y), forward_patches<K, S>(s),
                                         stream);
    });
  }
  return visit_pack(s, is_aligned(a.x, a.y), [&]<class T, int N>() {
    Pass<T> pass = forward_pass<T>(s, a.x, a.weight, a.bias, a.y);
    pass.act = a.act;
    if (a.act != Activation::kIdentity) {
      // For inference: rows of any length in parts of 7, or any stride, so that one set of kernels is enough.
      if (s.dil_w == 1 && s.sw == 1) return run<T, N, Direct<7, 1>, Then::kActivate>(pass, s, stream);
      return run<T, N, Direct<1, 0>, Then::kActivate>(pass, s, stream);
    }
    return visit_taps<T, N>(s.kw, s.sw, s.dil_w,
                            [&]<int K, int S>() { return run<T, N, Direct<K, S>, Then::kNothing>(pass, s, stream); });
  });
}

int depthwise_conv2d_dx(const DepthwiseConv2dBackward& a, void* stream) {
  const DepthwiseSizes& s = a.sizes;
  if (has_planes(s)) return planes_dx(a, stream);
  if (has_patches(s) && is_aligned(a.dy, a.dx)) {
    return visit_patches(s, [&]<class T, int K, int S>() { return patches_dx<T, K, S>(a, stream); });
  }
  return visit_pack(s, is_aligned(a.dy, a.dx), [&]<class T, int N>() {
    Pass<T> pass = pass_of<T>(s, a.weight);
    pass.in = static_cast<const T*>(a.dy);
    pass.out = static_cast<T*>(a.dx);
    pass.in_strides = strides_of(s.layout, s.c * s.m, s.ho, s.wo);
    pass.out_strides = strides_of(s.layout, s.c, s.h, s.w);
    pass.channels = s.c;
    pass.terms = int_of(s.m), pass.m = 1;
    pass.h = int_of(s.ho), pass.w = int_of(s.wo), pass.ho = int_of(s.h), pass.wo = int_of(s.w);
    if (s.sh == 1 && s.sw == 1) {
      pass.turned = true;
      pass.top = int_of((s.kh - 1) * s.dil_h - s.top), pass.left = int_of((s.kw - 1) * s.dil_w - s.left);
      return visit_taps<T, N>(s.kw, 1, s.dil_w,
                              [&]<int K, int S>() { return run<T, N, Direct<K, S>, Then::kNothing>(pass, s, stream); });
    }
    if (s.sh == 2 && s.sw == 2 && s.dil_h == 1 && s.dil_w == 1) {
      return run<T, N, Transposed<2>, Then::kNothing>(pass, s, stream);
    }
    return run<T, N, Transposed<0>, Then::kNothing>(pass, s, stream);
  });
}

}  // namespace fusedtrain::cuda

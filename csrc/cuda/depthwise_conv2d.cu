// depthwise_conv2d on CUDA: forward and dx. dw and db: depthwise_conv2d_dw.cu.
//
//   forward               out[o] = act(bias[o] + sum weight[o, ky, kx] * in[o / m, oy * sh + ky * dil_h - top, ...])
//   dx for stride 1       the same with the taps turned round, over the m outputs of each channel
//   dx for other strides  out[o, iy, ix] = sum over the taps for which (iy + top - ky * dil_h) / sh is an output row
#include "cuda/depthwise_tiles.h"

namespace fusedtrain::cuda {
namespace {

constexpr int kRunsPerThread = 4;
constexpr int kTapBytes = 24 << 10;  // of shared memory: two blocks of 256 threads fit beside each other anywhere
constexpr int kMostTapBytes = 48 << 10;

// One pass in -> out. Output channel o takes the kernels o * terms + t, t < terms, each on channel kernel / m of `in`.
template <class T>
struct Pass {
  const T* in;      // [n, ., h, w] or [n, h, w, .]
  const T* weight;  // [c * m, kh, kw]
  const T* bias;    // [channels] or null
  T* out;           // [n, channels, ho, wo] or [n, ho, wo, channels]
  Strides in_strides, out_strides;
  int64_t channels;  // of out
  int terms, m;
  int h, w, ho, wo;  // of in, of out
  int kh, kw, sh, sw, top, left, dil_h, dil_w;
  bool turned;  // the taps, in both directions
  Activation act;
};

// A block is `columns` packs of channels by `lanes` runs of one image, and goes over a chunk of its runs.
struct Tiles {
  int runs_per_row, runs, chunk;
  unsigned chunks, tiles;
  int columns, lanes;
  int slice;  // rows of the kernels that stand in shared memory at a time
  bool channels_last;
  int64_t blocks;
  size_t shared_bytes;
};

template <int N, class A>
Tiles tiles_of(const DepthwiseSizes& s, int64_t channels, int64_t ho, int64_t wo) {
  Tiles g{};
  g.channels_last = s.layout == Layout::kChannelsLast;
  const int64_t packs = ceil_div<int64_t>(channels, N), runs_per_row = ceil_div<int64_t>(wo, kColumnsOf<N>);
  const int64_t runs = ho * runs_per_row, column_bytes = s.kw * N * sizeof(A);
  if (s.n * runs == 0) return g;
  int64_t columns =
      g.channels_last ? ceil_div(packs, ceil_div<int64_t>(packs, kWarp)) : ceil_div<int64_t>(kThreads, runs);
  columns = std::clamp<int64_t>(columns, 1, std::min(packs, std::max<int64_t>(1, kMostTapBytes / column_bytes)));
  g.columns = static_cast<int>(columns);
  g.lanes = static_cast<int>(std::min<int64_t>(kThreads / columns, runs));
  g.runs_per_row = static_cast<int>(runs_per_row);
  g.runs = static_cast<int>(runs);
  g.chunk = g.lanes * kRunsPerThread;
  g.chunks = static_cast<unsigned>(ceil_div(g.runs, g.chunk));
  g.tiles = static_cast<unsigned>(ceil_div(packs, columns));
  g.slice = static_cast<int>(std::clamp<int64_t>(kTapBytes / (columns * column_bytes), 1, s.kh));
  g.shared_bytes = static_cast<size_t>(columns * column_bytes * g.slice);
  g.blocks = runs > kMaxGrid || g.shared_bytes > kMostTapBytes ? kMaxGrid + 1 : s.n * g.chunks * g.tiles;
  return g;
}

// The taps of kernel rows [ky, ky + rows) of `term` for the channels from `first` on: [tap][width].
template <class T, class A>
__device__ __forceinline__ void stage_taps(const Pass<T>& a, int64_t first, int width, int term, int ky, int rows,
                                           A* taps) {
  const int area = a.kh * a.kw, part = rows * a.kw;
  const int channels = a.channels - first < width ? static_cast<int>(a.channels - first) : width;
  for (int i = threadIdx.x; i < channels * part; i += blockDim.x) {
    const int channel = i / part, tap = i - channel * part, at = ky * a.kw + tap;
    const T* kernel = a.weight + ((first + channel) * a.terms + term) * area;
    taps[tap * width + channel] = to_acc(kernel[a.turned ? area - 1 - at : at]);
  }
}

template <int N, class T, class A>
__device__ __forceinline__ void multiply_add(const Pack<A, N>& tap, const Pack<T, N>& value, A (&sum)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] += tap.v[i] * to_acc(value.v[i]);
}

// Adds one row of taps for a run of outputs from column ox on. `taps` has `width` between taps.
template <int K, int S>
struct Direct {
  template <class T, int N, class A, int Columns>
  __device__ static void add(const Pass<T>& a, const T* in, int oy, int ox, int ky, const A* taps, int width,
                             A (&sums)[Columns][N]) {
    const int iy = oy * a.sh + ky * a.dil_h - a.top;
    if (iy < 0 || iy >= a.h) return;
    const T* row = in + iy * a.in_strides.row;
    for (int kx = 0; kx < a.kw; kx += K) {
      if constexpr (S > 0) {
        constexpr int kWindow = (Columns - 1) * S + K;
        Pack<T, N> window[kWindow];
        const int ix = ox * S + kx - a.left;
#pragma unroll
        for (int i = 0; i < kWindow; ++i) window[i] = load_inside<T, N>(row, ix + i, a.w, a.in_strides.column);
#pragma unroll
        for (int j = 0; j < K; ++j) {
          if (kx + j >= a.kw) break;
          const Pack<A, N> tap = load<N>(taps + (kx + j) * width);
#pragma unroll
          for (int t = 0; t < Columns; ++t) multiply_add<N>(tap, window[t * S + j], sums[t]);
        }
      } else {
        const Pack<A, N> tap = load<N>(taps + kx * width);
#pragma unroll
        for (int t = 0; t < Columns; ++t) {
          const int ix = (ox + t) * a.sw + kx * a.dil_w - a.left;
          multiply_add<N>(tap, load_inside<T, N>(row, ix, a.w, a.in_strides.column), sums[t]);
        }
      }
    }
  }
};

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

template <Activation A, int N, class V, int Columns>
__device__ __forceinline__ void activate(V (&sums)[Columns][N]) {
#pragma unroll
  for (int i = 0; i < Columns * N; ++i) sums[i / N][i % N] = Act<A>::value(sums[i / N][i % N]);
}

template <class T, int N, class Rule, bool WithAct>
__global__ void __launch_bounds__(kThreads, 1) pass_kernel(Pass<T> a, Tiles g) {
  using A = Acc<T>;
  constexpr int kColumns = kColumnsOf<N>;
  A* taps = shared_memory<A>();  // [slice * kw, width]
  const int width = g.columns * N;
  const unsigned tile = blockIdx.x % g.tiles, rest = blockIdx.x / g.tiles;
  const int64_t image = rest / g.chunks, first = static_cast<int64_t>(tile) * width;
  const int begin = static_cast<int>(rest % g.chunks) * g.chunk;
  const int thread = threadIdx.x;
  const int column = g.channels_last ? thread % g.columns : thread / g.lanes;
  const int lane = g.channels_last ? thread / g.columns : thread % g.lanes;
  const int64_t channel = first + column * N;

  for (int offset = 0; offset < g.chunk && begin + offset < g.runs; offset += g.lanes) {
    const int run = begin + offset + lane;
    const bool active = lane < g.lanes && column < g.columns && channel < a.channels && run < g.runs;
    const int oy = run / g.runs_per_row, ox = (run - oy * g.runs_per_row) * kColumns;
    A sums[kColumns][N];
#pragma unroll
    for (int i = 0; i < kColumns * N; ++i) {
      sums[i / N][i % N] = active && a.bias != nullptr ? to_acc(a.bias[channel + i % N]) : A(0);
    }
    for (int term = 0; term < a.terms; ++term) {
      const T* in = a.in + image * a.in_strides.image + (channel * a.terms + term) / a.m * a.in_strides.channel;
      for (int ky = 0; ky < a.kh; ky += g.slice) {
        const int rows = a.kh - ky < g.slice ? a.kh - ky : g.slice;
        if (offset == 0 || a.terms > 1 || g.slice < a.kh) {
          __syncthreads();
          stage_taps(a, first, width, term, ky, rows, taps);
          __syncthreads();
        }
        if (!active) continue;
        for (int r = 0; r < rows; ++r) {
          Rule::template add<T, N>(a, in, oy, ox, ky + r, taps + r * a.kw * width + column * N, width, sums);
        }
      }
    }
    if (!active) continue;
    if constexpr (WithAct) {
      using enum Activation;
      if (a.act == kRelu) activate<kRelu, N>(sums);
      if (a.act == kSilu) activate<kSilu, N>(sums);
      if (a.act == kGelu) activate<kGelu, N>(sums);
      if (a.act == kHardSwish) activate<kHardSwish, N>(sums);
    }
    T* out = a.out + image * a.out_strides.image + channel * a.out_strides.channel + oy * a.out_strides.row;
#pragma unroll
    for (int t = 0; t < kColumns; ++t) {
      if (ox + t >= a.wo) break;
      Pack<T, N> pack;
#pragma unroll
      for (int i = 0; i < N; ++i) from_acc(sums[t][i], pack.v[i]);
      store(out + (ox + t) * a.out_strides.column, pack);
    }
  }
}

template <class T, int N, class Rule, bool WithAct>
int run(const Pass<T>& a, const DepthwiseSizes& s, void* stream) {
  const Tiles g = tiles_of<N, Acc<T>>(s, a.channels, a.ho, a.wo);
  return launch(pass_kernel<T, N, Rule, WithAct>, g.blocks, ceil_div(g.columns * g.lanes, kWarp) * kWarp,
                g.shared_bytes, stream, a, g);
}

template <class T>
int int_of(T v) {
  return static_cast<int>(v);
}

template <class T>
Pass<T> pass_of(const DepthwiseSizes& s, const void* weight) {
  Pass<T> a{};
  a.weight = static_cast<const T*>(weight);
  a.kh = int_of(s.kh), a.kw = int_of(s.kw), a.sh = int_of(s.sh), a.sw = int_of(s.sw);
  a.top = int_of(s.top), a.left = int_of(s.left), a.dil_h = int_of(s.dil_h), a.dil_w = int_of(s.dil_w);
  return a;
}

}  // namespace

int depthwise_conv2d(const DepthwiseConv2d& a, void* stream) {
  const DepthwiseSizes& s = a.sizes;
  return visit_pack(s, is_aligned(a.x, a.y), [&]<class T, int N>() {
    Pass<T> pass = pass_of<T>(s, a.weight);
    pass.in = static_cast<const T*>(a.x);
    pass.bias = static_cast<const T*>(a.bias);
    pass.out = static_cast<T*>(a.y);
    pass.in_strides = strides_of(s.layout, s.c, s.h, s.w);
    pass.out_strides = strides_of(s.layout, s.c * s.m, s.ho, s.wo);
    pass.channels = s.c * s.m;
    pass.terms = 1, pass.m = int_of(s.m);
    pass.h = int_of(s.h), pass.w = int_of(s.w), pass.ho = int_of(s.ho), pass.wo = int_of(s.wo);
    pass.act = a.act;
    if (a.act != Activation::kIdentity) {
      // For inference: rows of any length in parts of 7, or any stride, so that one set of kernels is enough.
      if (s.dil_w == 1 && s.sw == 1) return run<T, N, Direct<7, 1>, true>(pass, s, stream);
      return run<T, N, Direct<1, 0>, true>(pass, s, stream);
    }
    return visit_taps<T>(s.kw, s.sw, s.dil_w,
                         [&]<int K, int S>() { return run<T, N, Direct<K, S>, false>(pass, s, stream); });
  });
}

int depthwise_conv2d_dx(const DepthwiseConv2dBackward& a, void* stream) {
  const DepthwiseSizes& s = a.sizes;
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
      return visit_taps<T>(s.kw, 1, s.dil_w,
                           [&]<int K, int S>() { return run<T, N, Direct<K, S>, false>(pass, s, stream); });
    }
    if (s.sh == 2 && s.sw == 2 && s.dil_h == 1 && s.dil_w == 1) {
      return run<T, N, Transposed<2>, false>(pass, s, stream);
    }
    return run<T, N, Transposed<0>, false>(pass, s, stream);
  });
}

}  // namespace fusedtrain::cuda

#pragma once
// The pass over images that the depthwise convolution and its input gradient are on CUDA: every output is a sum of taps
// times inputs; a Rule says which. Moments of the outputs may be gathered on the way.
#include "core/cuda_images.h"
#include "cuda/depthwise_moments.h"
#include "cuda/depthwise_tiles.h"

namespace fusedtrain::cuda {

constexpr int kRunsPerThread = 4;
constexpr int64_t kMostParts = 2048;  // of a channel's moments, where an image is not a part of its own
constexpr int kTapBytes = 24 << 10;   // of shared memory: two blocks of 256 threads fit beside each other anywhere
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
  Acc<T>* moments;  // [n * chunks, 4, channels], with Then::kMoments
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

  int threads() const { return ceil_div(columns * lanes, kWarp) * kWarp; }
};

template <int N, class A>
Tiles tiles_of(const DepthwiseSizes& s, int64_t channels, int64_t ho, int64_t wo, bool moments) {
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
  const int64_t runs_per_thread =
      moments ? std::max<int64_t>(kRunsPerThread, ceil_div(s.n * runs, kMostParts * g.lanes)) : kRunsPerThread;
  g.chunk = g.lanes * static_cast<int>(std::min(runs_per_thread, ceil_div<int64_t>(runs, g.lanes)));
  g.chunks = static_cast<unsigned>(ceil_div(g.runs, g.chunk));
  g.tiles = static_cast<unsigned>(ceil_div(packs, columns));
  g.slice = static_cast<int>(std::clamp<int64_t>(kTapBytes / (columns * column_bytes), 1, s.kh));
  g.shared_bytes = static_cast<size_t>(columns * column_bytes * g.slice);
  if (moments) g.shared_bytes = std::max(g.shared_bytes, g.threads() * N * sizeof(Moments<A>));
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

template <Activation A, int N, class V, int Columns>
__device__ __forceinline__ void activate(V (&sums)[Columns][N]) {
#pragma unroll
  for (int i = 0; i < Columns * N; ++i) sums[i / N][i % N] = Act<A>::value(sums[i / N][i % N]);
}

// What becomes of the sums: y alone, an activation of it, or y and the moments of its channels.
enum class Then { kNothing, kActivate, kMoments };

template <class T, int N, class Rule, Then kThen>
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
  Moments<A> moments[N];

  for (int offset = 0; offset < g.chunk && begin + offset < g.runs; offset += g.lanes) {
    const int run = begin + offset + lane;
    const bool active = lane < g.lanes && column < g.columns && channel < a.channels && run < g.runs;
    const int oy = run / g.runs_per_row, ox = (run - oy * g.runs_per_row) * kColumns;
    A sums[kColumns][N] = {};
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
    if (a.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < kColumns * N; ++i) sums[i / N][i % N] += to_acc(a.bias[channel + i % N]);
    }
    if constexpr (kThen == Then::kActivate) {
      using enum Activation;
      if (a.act == kRelu) activate<kRelu, N>(sums);
      if (a.act == kSilu) activate<kSilu, N>(sums);
      if (a.act == kGelu) activate<kGelu, N>(sums);
      if (a.act == kHardSwish) activate<kHardSwish, N>(sums);
      if (a.act == kRelu6) activate<kRelu6, N>(sums);
    }
    T* out = a.out + image * a.out_strides.image + channel * a.out_strides.channel + oy * a.out_strides.row;
#pragma unroll
    for (int t = 0; t < kColumns; ++t) {
      if (ox + t >= a.wo) break;
      Pack<T, N> pack;
#pragma unroll
      for (int i = 0; i < N; ++i) from_acc(sums[t][i], pack.v[i]);
      store(out + (ox + t) * a.out_strides.column, pack);
      if constexpr (kThen == Then::kMoments) {  // of what is stored
        const A count = moments[0].part[0] + A(1), inverse = A(1) / count;
#pragma unroll
        for (int i = 0; i < N; ++i) moments[i].add(to_acc(pack.v[i]), count, inverse);
      }
    }
  }
  if constexpr (kThen == Then::kMoments) {
    const bool inside = lane < g.lanes && column < g.columns;
    __syncthreads();  // nobody reads taps any more
    merge_rows(moments, inside ? lane : g.lanes, g.lanes, g.channels_last ? g.columns : 1, taps);
    if (!inside || lane != 0 || channel >= a.channels) return;
    A* part = a.moments + int64_t{rest} * Moments<A>::kParts * a.channels + channel;
#pragma unroll
    for (int k = 0; k < Moments<A>::kParts * N; ++k) part[k / N * a.channels + k % N] = moments[k % N].part[k / N];
  }
}

template <class T, int N, class Rule, Then kThen>
int run(const Pass<T>& a, const DepthwiseSizes& s, void* stream) {
  const Tiles g = tiles_of<N, Acc<T>>(s, a.channels, a.ho, a.wo, kThen == Then::kMoments);
  return launch(pass_kernel<T, N, Rule, kThen>, g.blocks, g.threads(), g.shared_bytes, stream, a, g);
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

// The forward pass without an activation.
template <class T>
Pass<T> forward_pass(const DepthwiseSizes& s, const void* x, const void* weight, const void* bias, void* y) {
  Pass<T> pass = pass_of<T>(s, weight);
  pass.in = static_cast<const T*>(x);
  pass.bias = static_cast<const T*>(bias);
  pass.out = static_cast<T*>(y);
  pass.in_strides = strides_of(s.layout, s.c, s.h, s.w);
  pass.out_strides = strides_of(s.layout, s.c * s.m, s.ho, s.wo);
  pass.channels = s.c * s.m;
  pass.terms = 1, pass.m = int_of(s.m);
  pass.h = int_of(s.h), pass.w = int_of(s.w), pass.ho = int_of(s.ho), pass.wo = int_of(s.wo);
  return pass;
}

}  // namespace fusedtrain::cuda

// depthwise_conv2d on CUDA: dw and db.
//
//   dw[o, ky, kx] = sum_{n, oy, ox} dy[o, oy, ox] * x[o / m, oy * sh + ky * dil_h - top, ox * sw + kx * dil_w - left]
//   db[o]         = sum_{n, oy, ox} dy[o, oy, ox]
//
// Usual shapes take the patches of depthwise_patches.h, or of depthwise_planes.h where images are contiguous. Of others
// a thread keeps the sums of one kernel row (of up to 7 taps), so x and dy come from memory once and from L1 for the
// other rows. Blocks sum over chunks of all images; a second kernel adds the chunks in a fixed order: no atomics.
#include "cuda/depthwise_planes.h"

namespace fusedtrain::cuda {
namespace {

constexpr int kMostRows = 8;  // kernel rows per block
constexpr int kMostTaps = 7;  // of such a row

// The runs of all images are shared out over this many chunks: enough blocks for a large GPU, each with at least a
// hundred runs of up to eight columns.
int64_t chunks_of(const DepthwiseSizes& s) {
  constexpr int64_t kBlocks = 1024, kMostChunks = 256, kRuns = 128;
  const int64_t pack = s.dtype == DType::kFloat64 ? 1 : s.dtype == DType::kFloat32 ? 4 : 8;
  const int64_t tile = s.layout == Layout::kChannelsLast ? kWarp * pack : 1;
  const int64_t blocks =
      ceil_div(s.c * s.m, tile) * ceil_div<int64_t>(s.kh, kMostRows) * ceil_div<int64_t>(s.kw, kMostTaps);
  return std::max<int64_t>(1,
                           std::min({kBlocks / blocks, kMostChunks, s.n * s.ho * ceil_div<int64_t>(s.wo, 8) / kRuns}));
}

template <class T>
struct WeightPass {
  const T* dy;   // [n, c * m, ho, wo] or [n, ho, wo, c * m]
  const T* x;    // [n, c, h, w] or [n, h, w, c]
  Acc<T>* sums;  // [chunks, kh * kw + 1, c * m]: of dw, and last of db
  Strides dy_strides, x_strides;
  int64_t channels;  // of dy
  int m, h, w, ho, wo;
  int kh, kw, sh, sw, top, left, dil_h, dil_w;
  bool with_dw, with_db;
};

// A block is `columns` packs of channels by `rows` kernel rows by `lanes` runs of dy; adjacent threads are adjacent in
// memory. Along a row of the kernel it takes K taps, part `part`.
struct WeightTiles {
  int64_t runs, chunk;
  int runs_per_row;
  unsigned chunks, tiles, row_groups, parts;
  int columns, rows, lanes;
  bool channels_last;

  __device__ int thread_of(int column, int row, int lane) const {
    return channels_last ? (lane * rows + row) * columns + column : row * lanes + lane;
  }
};

template <class T, int N, int K>
WeightTiles tiles_of(const DepthwiseSizes& s) {
  WeightTiles g{};
  g.channels_last = s.layout == Layout::kChannelsLast;
  const int64_t packs = ceil_div<int64_t>(s.c * s.m, N), runs_per_row = ceil_div<int64_t>(s.wo, kColumnsOf<N>);
  const int64_t groups = ceil_div<int64_t>(s.kh, kMostRows);
  g.row_groups = static_cast<unsigned>(groups);
  g.rows = static_cast<int>(ceil_div(s.kh, groups));
  g.parts = static_cast<unsigned>(ceil_div<int64_t>(s.kw, K));
  g.columns = 1;
  if (g.channels_last) {
    const int64_t most = std::min<int64_t>(kWarp, kThreads / g.rows);
    g.columns = static_cast<int>(ceil_div(packs, ceil_div(packs, most)));
  }
  g.lanes = kThreads / (g.rows * g.columns);
  if (!g.channels_last) g.lanes = g.lanes / kWarp * kWarp;  // at least a warp, since rows <= 8
  g.tiles = static_cast<unsigned>(ceil_div<int64_t>(packs, g.columns));
  g.runs_per_row = static_cast<int>(runs_per_row);
  g.runs = s.n * s.ho * runs_per_row;
  g.chunks = static_cast<unsigned>(chunks_of(s));
  g.chunk = ceil_div<int64_t>(g.runs, g.chunks);
  return g;
}

// Adds the sums of all lanes and writes them. `value` belongs to the sum at a.sums[chunk, tap] of each channel, where
// `wanted`. Every thread of the block calls it.
template <class T, int N, class A>
__device__ __forceinline__ void write_sums(const WeightPass<T>& a, const WeightTiles& g, int64_t chunk, int64_t first,
                                           int row_begin, int tap_in_row, bool is_db, A (&value)[N], A* shared) {
  const int threads = blockDim.x;
  int step = 1;
  if constexpr (N == 1) {
    if (!g.channels_last) {
      value[0] = warp_sum(value[0]);
      step = kWarp;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) shared[i * threads + threadIdx.x] = value[i];
  __syncthreads();
  const int outputs = g.columns * N * (is_db ? 1 : g.rows);
  for (int o = threadIdx.x; o < outputs; o += threads) {
    const int row = o / (g.columns * N), in_row = o - row * g.columns * N, column = in_row / N, i = in_row % N;
    const int64_t channel = first + in_row;
    const int ky = row_begin + row;
    if (channel >= a.channels || ky >= a.kh) continue;
    A sum = A(0);
    for (int lane = 0; lane < g.lanes; lane += step) sum += shared[i * threads + g.thread_of(column, row, lane)];
    const int64_t slots = int64_t{a.kh} * a.kw + 1, slot = is_db ? slots - 1 : int64_t{ky} * a.kw + tap_in_row;
    a.sums[(chunk * slots + slot) * a.channels + channel] = sum;
  }
  __syncthreads();
}

template <class T, int N, int K, int S>
__global__ void __launch_bounds__(kThreads, 1) weight_kernel(WeightPass<T> a, WeightTiles g) {
  using A = Acc<T>;
  constexpr int kColumns = kColumnsOf<N>, kStep = S > 0 ? S : 1;
  constexpr int kWindow = (kColumns - 1) * kStep + K;
  const int thread = threadIdx.x;
  const int column = g.channels_last ? thread % g.columns : 0;
  const int row = g.channels_last ? thread / g.columns % g.rows : thread / g.lanes;
  const int lane = g.channels_last ? thread / (g.columns * g.rows) : thread % g.lanes;
  unsigned rest = blockIdx.x;
  const int64_t first = static_cast<int64_t>(rest % g.tiles) * g.columns * N;
  rest /= g.tiles;
  const int part = static_cast<int>(rest % g.parts) * K;
  rest /= g.parts;
  const int row_begin = static_cast<int>(rest % g.row_groups) * g.rows;
  const int64_t chunk = rest / g.row_groups;
  const int64_t channel = first + column * N;
  const int ky = row_begin + row;
  const int64_t end = chunk * g.chunk + g.chunk < g.runs ? chunk * g.chunk + g.chunk : g.runs;
  const bool active = channel < a.channels && ky < a.kh && lane < g.lanes;
  const bool sums_dy = a.with_db && ky == 0 && part == 0;

  A dw[K][N] = {}, db[N] = {};
  for (int64_t run = chunk * g.chunk + lane; active && run < end; run += g.lanes) {
    const int64_t line = run / g.runs_per_row, image = line / a.ho;
    const int oy = static_cast<int>(line - image * a.ho);
    const int ox = static_cast<int>(run - line * g.runs_per_row) * kColumns;
    const T* dy_row = a.dy + image * a.dy_strides.image + channel * a.dy_strides.channel + oy * a.dy_strides.row;
    Pack<T, N> dy[kColumns];
#pragma unroll
    for (int t = 0; t < kColumns; ++t) dy[t] = load_inside<T, N>(dy_row, ox + t, a.wo, a.dy_strides.column);
    if (sums_dy) {
#pragma unroll
      for (int i = 0; i < kColumns * N; ++i) db[i % N] += to_acc(dy[i / N].v[i % N]);
    }
    const int iy = oy * a.sh + ky * a.dil_h - a.top;
    if (!a.with_dw || iy < 0 || iy >= a.h) continue;
    const T* x_row = a.x + image * a.x_strides.image + channel / a.m * a.x_strides.channel + iy * a.x_strides.row;
    if constexpr (S > 0) {
      const int ix = ox * S + part - a.left;
      Pack<T, N> window[kWindow];
#pragma unroll
      for (int i = 0; i < kWindow; ++i) window[i] = load_inside<T, N>(x_row, ix + i, a.w, a.x_strides.column);
#pragma unroll
      for (int i = 0; i < K * kColumns * N; ++i) {
        const int j = i % K, t = i / K % kColumns, v = i / (K * kColumns);
        dw[j][v] += to_acc(dy[t].v[v]) * to_acc(window[t * S + j].v[v]);
      }
    } else {
#pragma unroll
      for (int t = 0; t < kColumns; ++t) {
        const int ix = (ox + t) * a.sw + part * a.dil_w - a.left;
        const Pack<T, N> x = load_inside<T, N>(x_row, ix, a.w, a.x_strides.column);
#pragma unroll
        for (int i = 0; i < N; ++i) dw[0][i] += to_acc(dy[t].v[i]) * to_acc(x.v[i]);
      }
    }
  }
  A* shared = shared_memory<A>();  // [N, threads]
#pragma unroll
  for (int j = 0; j < K; ++j) {
    if (part + j < a.kw) write_sums<T, N>(a, g, chunk, first, row_begin, part + j, false, dw[j], shared);
  }
  if (a.with_db && row_begin == 0 && part == 0) {
    write_sums<T, N>(a, g, chunk, first, row_begin, 0, true, db, shared);
  }
}

// Adds up the chunks, in an order of its own for each number of them: kFinishLanes threads share an output.
constexpr int kFinishLanes = kThreads / kWarp;
template <class T>
struct Finish {
  const Acc<T>* sums;  // [chunks, area + 1, channels]
  T* dw;               // [channels, area] or null
  T* db;               // [channels] or null
  int64_t channels, area, chunks;
};

template <class T>
__global__ void __launch_bounds__(kThreads) weight_finish_kernel(Finish<T> a) {
  using A = Acc<T>;
  A* shared = shared_memory<A>();  // [kFinishLanes, kWarp]
  const int column = threadIdx.x % kWarp, lane = threadIdx.x / kWarp;
  const int64_t o = int64_t{blockIdx.x} * kWarp + column, outputs = (a.area + 1) * a.channels;
  const int64_t slot = o / a.channels, channel = o - slot * a.channels;
  T* out = nullptr;
  if (slot < a.area && a.dw != nullptr) out = a.dw + channel * a.area + slot;
  if (slot == a.area && a.db != nullptr) out = a.db + channel;
  A sum = 0;
  if (out != nullptr) {
#pragma unroll 8
    for (int64_t chunk = lane; chunk < a.chunks; chunk += kFinishLanes) sum += a.sums[chunk * outputs + o];
  }
  shared[threadIdx.x] = sum;
  __syncthreads();
  if (lane > 0 || out == nullptr) return;
  for (int i = 1; i < kFinishLanes; ++i) sum += shared[i * kWarp + column];
  from_acc(sum, *out);
}

template <class T>
int finish(const DepthwiseConv2dBackward& a, int64_t chunks, void* stream) {
  const Finish<T> finish{static_cast<const Acc<T>*>(a.partial),
                         static_cast<T*>(a.dw),
                         static_cast<T*>(a.db),
                         a.sizes.c * a.sizes.m,
                         a.sizes.kh * a.sizes.kw,
                         chunks};
  return launch(weight_finish_kernel<T>, ceil_div<int64_t>((finish.area + 1) * finish.channels, kWarp), kThreads,
                kThreads * sizeof(Acc<T>), stream, finish);
}

template <int K, int S>
PatchTiles dots_patches(const DepthwiseSizes& s) {
  constexpr int64_t kBlocks = 528;  // two or three on each multiprocessor of a large GPU, twice
  PatchTiles g = patch_tiles(s, s.ho, s.wo, 0,
                             [](int rows, int cols) { return rows * cols + reads<K, S>(rows) * reads<K, S>(cols); });
  g.blocks = std::min<int64_t>(g.blocks, std::max<int64_t>(1, kBlocks / g.slices));
  g.shared_bytes = std::max(g.shared_bytes, K * kPair * g.threads() * sizeof(float));
  return g;
}

template <class T, int K, int S>
int patches_dw(const DepthwiseConv2dBackward& a, void* stream) {
  const DepthwiseSizes& s = a.sizes;
  PatchDots<T> dots{};
  dots.dy = static_cast<const T*>(a.dy);
  dots.x = static_cast<const T*>(a.x);
  dots.sums = static_cast<float*>(a.partial);
  dots.c = s.c;
  const auto set = [](int& to, int64_t from) { to = static_cast<int>(from); };
  set(dots.h, s.h), set(dots.w, s.w), set(dots.ho, s.ho), set(dots.wo, s.wo);
  set(dots.top, s.top), set(dots.left, s.left);
  const PatchTiles g = dots_patches<K, S>(s);
  const int code = launch(dots_kernel<T, K, S>, g.blocks * g.slices, g.threads(), g.shared_bytes, stream, dots, g);
  return code != cudaSuccess ? code : finish<T>(a, g.blocks, stream);
}

}  // namespace

int64_t depthwise_conv2d_partial_size(const DepthwiseSizes& s) {
  int64_t chunks = chunks_of(s);  // which kernels run depends on the pointers, too
  if (has_planes(s)) chunks = std::max(chunks, planes_dw_parts(s));
  if (has_patches(s)) {
    const int code = visit_patches(s, [&]<class T, int K, int S>() -> int {
      chunks = std::max(chunks, dots_patches<K, S>(s).blocks);
      return cudaSuccess;
    });
    if (code != cudaSuccess) return 0;
  }
  return chunks * (s.kh * s.kw + 1) * s.c * s.m;
}

int depthwise_conv2d_dw(const DepthwiseConv2dBackward& a, void* stream) {
  const DepthwiseSizes& s = a.sizes;
  if (has_planes(s)) {
    const int code = planes_dw(a, stream);
    if (code != cudaSuccess) return code;
    return visit_element(s.dtype, [&]<class T>() { return finish<T>(a, planes_dw_parts(s), stream); });
  }
  if (has_patches(s) && is_aligned(a.dy, a.x)) {
    return visit_patches(s, [&]<class T, int K, int S>() { return patches_dw<T, K, S>(a, stream); });
  }
  return visit_pack(s, is_aligned(a.dy, a.x), [&]<class T, int N>() {
    return visit_taps<T, N>(s.kw, s.sw, s.dil_w, [&]<int K, int S>() -> int {
      WeightPass<T> pass{};
      pass.dy = static_cast<const T*>(a.dy);
      pass.x = static_cast<const T*>(a.x);
      pass.sums = static_cast<Acc<T>*>(a.partial);
      pass.dy_strides = strides_of(s.layout, s.c * s.m, s.ho, s.wo);
      pass.x_strides = strides_of(s.layout, s.c, s.h, s.w);
      pass.channels = s.c * s.m;
      const auto set = [](int& to, int64_t from) { to = static_cast<int>(from); };
      set(pass.m, s.m), set(pass.h, s.h), set(pass.w, s.w), set(pass.ho, s.ho), set(pass.wo, s.wo);
      set(pass.kh, s.kh), set(pass.kw, s.kw), set(pass.sh, s.sh), set(pass.sw, s.sw);
      set(pass.top, s.top), set(pass.left, s.left), set(pass.dil_h, s.dil_h), set(pass.dil_w, s.dil_w);
      pass.with_dw = a.dw != nullptr, pass.with_db = a.db != nullptr;
      const WeightTiles g = tiles_of<T, N, K>(s);
      const int64_t blocks = int64_t{g.tiles} * g.parts * g.row_groups * g.chunks;
      const int threads = ceil_div(g.columns * g.rows * g.lanes, kWarp) * kWarp;
      const int code =
          launch(weight_kernel<T, N, K, S>, blocks, threads, sizeof(Acc<T>) * N * threads, stream, pass, g);
      if (code != cudaSuccess) return code;
      return finish<T>(a, g.chunks, stream);
    });
  });
}

}  // namespace fusedtrain::cuda

#pragma once
// The depthwise CUDA kernels for what networks are made of: channels_last images, channels in whole 16-byte vectors,
// kernels of 3x3 and 5x5 taps with strides of 1 and 2 and of 7x7 with a stride of 1. Contiguous images:
// depthwise_planes.h. Everything else: depthwise_pass.h and depthwise_conv2d_dw.cu.
//
// A block takes a tile of the output: some rows and columns of up to 128 bytes of channels. It copies what the tile
// reads into shared memory, zeros where the image ends, all of it under way at once; other blocks compute meanwhile. A
// thread then takes patches of kSide x kSide pixels of two neighbouring channels, whose sums stand in registers beside
// all taps of the two kernels, so that every value read from shared memory is used for all that it belongs to.
#include "cuda/depthwise_moments.h"
#include "cuda/depthwise_tiles.h"

namespace fusedtrain::cuda {

constexpr int kPair = 2;          // channels of a thread
constexpr int kSide = 4;          // of a patch
constexpr int kPixelBytes = 128;  // of shared memory, whatever the block has of channels
constexpr int kChunks = kPixelBytes / kVectorBytes;
constexpr int kPatchBytes = 60 << 10;  // of shared memory: what any GPU has
constexpr int kPatchesAcross = 4;      // of a tile, at most

// Threads of a block, and blocks per multiprocessor that registers must allow.
constexpr int kPatchThreads = 128;
template <int K>
constexpr int kPatchBlocks = K == 7 ? 3 : 4;

// Pixels of the input that `outputs` of the output read, for a convolution, and for what spreads stride 2.
template <int K, int S>
FUSEDTRAIN_HD constexpr int reads(int outputs) {
  return (outputs - 1) * S + K;
}
template <int K>
FUSEDTRAIN_HD constexpr int spread_reads(int outputs) {
  return outputs / 2 + ceil_div(K, 2) - 1;
}

// A block is `columns` pairs of channels by `lanes` patches.
struct PatchTiles {
  int across, down;  // patches of a tile
  int tiles_across, tiles_down;
  int columns, lanes;
  unsigned slices;  // of channels
  int64_t tiles;    // of all images, per slice
  int64_t blocks;   // per slice
  size_t shared_bytes;

  int threads() const { return ceil_div(columns * lanes, kWarp) * kWarp; }
};

// pixels(rows, cols) of shared memory belong to so many of the tile.
template <class Pixels>
PatchTiles patch_tiles(const DepthwiseSizes& s, int64_t height, int64_t width, size_t tap_bytes, Pixels&& pixels) {
  PatchTiles g{};
  const int64_t element = s.dtype == DType::kFloat32 ? 4 : 2, vector = kVectorBytes / element;
  const int64_t slices = ceil_div<int64_t>(s.c * element, kPixelBytes);
  const int64_t columns = ceil_div(ceil_div(s.c, slices), vector) * vector / kPair;
  g.slices = static_cast<unsigned>(ceil_div<int64_t>(s.c, columns * kPair));
  g.columns = static_cast<int>(columns);
  const auto even = [](int64_t all, int64_t most) { return ceil_div(all, ceil_div(all, most)); };
  const int64_t rows = ceil_div<int64_t>(height, kSide), cols = ceil_div<int64_t>(width, kSide);
  g.across = static_cast<int>(even(std::max<int64_t>(1, cols), kPatchesAcross));
  const auto bytes = [&](int down) { return tap_bytes + kPixelBytes * pixels(down * kSide, g.across * kSide); };
  int most = 1;
  while (most < rows && most < kPatchesAcross && bytes(most + 1) <= kPatchBytes) ++most;
  g.down = static_cast<int>(even(std::max<int64_t>(1, rows), most));
  g.shared_bytes = bytes(g.down);
  g.tiles_across = static_cast<int>(ceil_div<int64_t>(cols, g.across));
  g.tiles_down = static_cast<int>(ceil_div<int64_t>(rows, g.down));
  g.tiles = s.n * g.tiles_across * g.tiles_down;
  g.lanes = std::min(kPatchThreads / g.columns, g.across * g.down);
  g.blocks = g.tiles;
  return g;
}

struct PatchTile {
  int64_t image;
  int row, col;  // first of its patches
};

__device__ __forceinline__ PatchTile tile_of(const PatchTiles& g, int64_t tile) {
  const unsigned t = static_cast<unsigned>(tile), across = static_cast<unsigned>(g.tiles_across);
  const unsigned line = t / across, down = static_cast<unsigned>(g.tiles_down), image = line / down;
  return {image, static_cast<int>(line - image * down) * g.down * kSide,
          static_cast<int>(t - line * across) * g.across * kSide};
}

template <class T>
__device__ __forceinline__ Pack<T, kPair> load_pair(const T* p) {
  using Word = std::conditional_t<sizeof(T) == 2, uint32_t, uint64_t>;
  const Word word = *reinterpret_cast<const Word*>(p);
  Pack<T, kPair> pack;
  memcpy(&pack, &word, sizeof(pack));
  return pack;
}
template <class T>
__device__ __forceinline__ void store_pair(T* p, const Pack<T, kPair>& pack) {
  using Word = std::conditional_t<sizeof(T) == 2, uint32_t, uint64_t>;
  Word word;
  memcpy(&word, &pack, sizeof(pack));
  *reinterpret_cast<Word*>(p) = word;
}

// `bytes` of 16 from global to shared memory, and zeros behind them; they have arrived after await_copies.
__device__ __forceinline__ void copy_async(void* to, const void* from, int bytes) {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
#else
  if (bytes == kVectorBytes) {
    *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
  } else {
    for (int i = 0; i < kVectorBytes; ++i) {
      static_cast<char*>(to)[i] = i < bytes ? static_cast<const char*>(from)[i] : char{0};
    }
  }
#endif
}
__device__ __forceinline__ void await_copies() {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
  __syncthreads();
}

// Starts the copy of rows x cols pixels from (row, col) of an image [h, w, c] on, whose channels begin at `first`, to
// [rows, cols, kPixelBytes]. A warp takes a row.
template <class T>
__device__ __forceinline__ void copy_tile(const T* image, int64_t c, int h, int w, int64_t first, int columns, int row,
                                          int col, int rows, int cols, T* to) {
  constexpr int kEach = kVectorBytes / sizeof(T), kPixel = kPixelBytes / sizeof(T);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warps = static_cast<int>(blockDim.x) / kWarp;
  const int chunk = lane % kChunks;
  const int64_t channel = first + chunk * kEach;
  if (chunk * kEach >= columns * kPair) return;
  for (int r = static_cast<int>(threadIdx.x) / kWarp; r < rows; r += warps) {
    const bool in_row = static_cast<unsigned>(row + r) < static_cast<unsigned>(h) && channel < c;
    const T* from = image + int64_t{row + r} * w * c + channel;
    for (int i = lane / kChunks; i < cols; i += kWarp / kChunks) {
      const bool inside = in_row && static_cast<unsigned>(col + i) < static_cast<unsigned>(w);
      copy_async(to + (r * cols + i) * kPixel + chunk * kEach, inside ? from + int64_t{col + i} * c : image,
                 inside ? kVectorBytes : 0);
    }
  }
}

template <class T>
struct PatchPass {
  const T* in;      // [n, h, w, c]
  const T* weight;  // [c, K, K]
  const T* bias;    // [c] or null
  T* out;           // [n, ho, wo, c]
  int64_t c;
  int h, w, ho, wo, top, left;
  bool turned;      // the taps, in both directions
  Acc<T>* moments;  // [blocks, 4, c], with kMoments
};

// All taps of the block's kernels as floats [K * K, columns * kPair].
template <int K, class T>
__device__ __forceinline__ void stage_taps(const PatchPass<T>& a, int64_t first, int columns, float* taps) {
  constexpr int kArea = K * K;
  const int width = columns * kPair;
  const int channels = a.c - first < width ? static_cast<int>(a.c - first) : width;
  for (int i = threadIdx.x; i < channels * kArea; i += blockDim.x) {
    const int channel = i / kArea, at = i - channel * kArea;
    taps[(a.turned ? kArea - 1 - at : at) * width + channel] = to_acc(a.weight[first * kArea + i]);
  }
}
template <int K>
__device__ __forceinline__ void take_taps(const float* staged, int columns, int column, float (&taps)[K][K][kPair]) {
#pragma unroll
  for (int i = 0; i < K * K * kPair; ++i) {
    taps[i / (kPair * K)][i / kPair % K][i % kPair] = staged[(i / kPair * columns + column) * kPair + i % kPair];
  }
}

// The pairs of neighbouring pixels in shared memory.
template <int N, class T>
__device__ __forceinline__ void take_row(const T* at, float (&row)[N][kPair]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Pack<T, kPair> pair = load_pair(at + i * (kPixelBytes / sizeof(T)));
    row[i][0] = to_acc(pair.v[0]), row[i][1] = to_acc(pair.v[1]);
  }
}

// Where a thread of the block stands.
struct PatchThread {
  unsigned slice, block;
  int column, lane;
  int64_t first, channel;
  bool inside;

  __device__ PatchThread(const PatchTiles& g, int64_t c)
      : slice(blockIdx.x % g.slices),
        block(blockIdx.x / g.slices),
        column(static_cast<int>(threadIdx.x) % g.columns),
        lane(static_cast<int>(threadIdx.x) / g.columns),
        first(int64_t{slice} * g.columns * kPair),
        channel(first + column * kPair),
        inside(lane < g.lanes && channel < c) {}
};

// --- forward, and dx for stride 1 -----------------------------------------------------------------------------------

template <class T, int K, int S, bool kMoments>
__global__ void __launch_bounds__(kPatchThreads, kPatchBlocks<K>) patch_kernel(PatchPass<T> a, PatchTiles g) {
  constexpr int kWindow = reads<K, S>(kSide), kPixel = kPixelBytes / sizeof(T);
  const PatchThread thread(g, a.c);
  const PatchTile tile = tile_of(g, thread.block);
  const int rows = reads<K, S>(g.down * kSide), cols = reads<K, S>(g.across * kSide);
  T* image = shared_memory<T>();
  float* staged = reinterpret_cast<float*>(image + rows * cols * kPixel);
  copy_tile(a.in + tile.image * a.h * a.w * a.c, a.c, a.h, a.w, thread.first, g.columns, tile.row * S - a.top,
            tile.col * S - a.left, rows, cols, image);
  stage_taps<K>(a, thread.first, g.columns, staged);
  await_copies();
  ShiftedSums<kPair> moments;
  if (thread.inside) {
    float taps[K][K][kPair], bias[kPair] = {};
    take_taps<K>(staged, g.columns, thread.column, taps);
    if (a.bias != nullptr) bias[0] = to_acc(a.bias[thread.channel]), bias[1] = to_acc(a.bias[thread.channel + 1]);
    for (int patch = thread.lane; patch < g.across * g.down; patch += g.lanes) {
      const int down = patch / g.across, across = patch - down * g.across;
      const int oy = tile.row + down * kSide, ox = tile.col + across * kSide;
      if (oy >= a.ho || ox >= a.wo) continue;
      const T* at = image + (down * kSide * S * cols + across * kSide * S) * kPixel + thread.column * kPair;
      float sums[kSide][kSide][kPair];
#pragma unroll
      for (int i = 0; i < kSide * kSide * kPair; ++i) sums[i / (kSide * kPair)][i / kPair % kSide][i % kPair] = 0.0f;
#pragma unroll
      for (int r = 0; r < kWindow; ++r, at += cols * kPixel) {
        float value[kWindow][kPair];
        take_row(at, value);
#pragma unroll
        for (int o = 0; o < kSide; ++o) {
          const int ky = r - o * S;
          if (ky < 0 || ky >= K) continue;
#pragma unroll
          for (int i = 0; i < K * kSide * kPair; ++i) {
            const int p = i % kPair, t = i / kPair % kSide, kx = i / (kPair * kSide);
            sums[o][t][p] += taps[ky][kx][p] * value[t * S + kx][p];
          }
        }
      }
      T* out = a.out + ((tile.image * a.ho + oy) * a.wo + ox) * a.c + thread.channel;
#pragma unroll
      for (int o = 0; o < kSide; ++o, out += int64_t{a.wo} * a.c) {
        if (oy + o >= a.ho) break;
#pragma unroll
        for (int t = 0; t < kSide; ++t) {
          if (ox + t >= a.wo) break;
          Pack<T, kPair> pack;
          from_acc(sums[o][t][0] + bias[0], pack.v[0]), from_acc(sums[o][t][1] + bias[1], pack.v[1]);
          store_pair(out + t * a.c, pack);
          if constexpr (kMoments) moments.add({to_acc(pack.v[0]), to_acc(pack.v[1])});
        }
      }
    }
  }
  if constexpr (kMoments) {
    Moments<float> merged[kPair] = {moments.moments(0), moments.moments(1)};
    __syncthreads();  // nobody reads the image any more
    merge_rows(merged, thread.inside ? thread.lane : g.lanes, g.lanes, g.columns, shared_memory<float>());
    if (!thread.inside || thread.lane != 0) return;
    float* part = a.moments + int64_t{thread.block} * Moments<float>::kParts * a.c + thread.channel;
#pragma unroll
    for (int i = 0; i < Moments<float>::kParts * kPair; ++i) {
      part[i / kPair * a.c + i % kPair] = merged[i % kPair].part[i / kPair];
    }
  }
}

// --- dx for stride 2 ------------------------------------------------------------------------------------------------

// Row 2 A + p - top of the output takes the taps p + 2 d from row A - d of the input, columns alike; tiles and patches
// count from row 2 (top / 2) - top on.
template <class T, int K>
__global__ void __launch_bounds__(kPatchThreads, kPatchBlocks<K>) spread_kernel(PatchPass<T> a, PatchTiles g) {
  constexpr int D = ceil_div(K, 2), kWindow = spread_reads<K>(kSide), kPixel = kPixelBytes / sizeof(T);
  const PatchThread thread(g, a.c);
  const PatchTile tile = tile_of(g, thread.block);
  const int rows = spread_reads<K>(g.down * kSide), cols = spread_reads<K>(g.across * kSide);
  T* image = shared_memory<T>();
  float* staged = reinterpret_cast<float*>(image + rows * cols * kPixel);
  copy_tile(a.in + tile.image * a.h * a.w * a.c, a.c, a.h, a.w, thread.first, g.columns,
            tile.row / 2 + a.top / 2 - (D - 1), tile.col / 2 + a.left / 2 - (D - 1), rows, cols, image);
  stage_taps<K>(a, thread.first, g.columns, staged);
  await_copies();
  if (!thread.inside) return;
  float taps[K][K][kPair];
  take_taps<K>(staged, g.columns, thread.column, taps);
  for (int patch = thread.lane; patch < g.across * g.down; patch += g.lanes) {
    const int down = patch / g.across, across = patch - down * g.across;
    const int oy = tile.row + down * kSide - a.top % 2, ox = tile.col + across * kSide - a.left % 2;
    if (oy >= a.ho || ox >= a.wo) continue;
    const T* at = image + (down * (kSide / 2) * cols + across * (kSide / 2)) * kPixel + thread.column * kPair;
    float sums[kSide][kSide][kPair] = {};
#pragma unroll
    for (int r = 0; r < kWindow; ++r, at += cols * kPixel) {
      float value[kWindow][kPair];
      take_row(at, value);
#pragma unroll
      for (int o = 0; o < kSide; ++o) {
        const int ky = o % 2 + 2 * (o / 2 + D - 1 - r);
        if (ky < 0 || ky >= K) continue;
#pragma unroll
        for (int i = 0; i < kSide * D * kPair; ++i) {
          const int p = i % kPair, t = i / kPair % kSide, kx = t % 2 + 2 * (i / (kPair * kSide));
          if (kx >= K) continue;
          sums[o][t][p] += taps[ky][kx < K ? kx : 0][p] * value[t / 2 + D - 1 - kx / 2][p];
        }
      }
    }
#pragma unroll
    for (int o = 0; o < kSide; ++o) {
      if (static_cast<unsigned>(oy + o) >= static_cast<unsigned>(a.ho)) continue;
      T* out = a.out + ((tile.image * a.ho + oy + o) * a.wo + ox) * a.c + thread.channel;
#pragma unroll
      for (int t = 0; t < kSide; ++t) {
        if (static_cast<unsigned>(ox + t) >= static_cast<unsigned>(a.wo)) continue;
        Pack<T, kPair> pack;
        from_acc(sums[o][t][0], pack.v[0]), from_acc(sums[o][t][1], pack.v[1]);
        store_pair(out + t * a.c, pack);
      }
    }
  }
}

// --- dw and db ------------------------------------------------------------------------------------------------------

template <class T>
struct PatchDots {
  const T* dy;  // [n, ho, wo, c]
  const T* x;   // [n, h, w, c]
  float* sums;  // [blocks, K * K + 1, c]: of dw, and last of db
  int64_t c;
  int h, w, ho, wo, top, left;
};

// A block takes every `blocks`-th tile.
template <class T, int K, int S>
__global__ void __launch_bounds__(kPatchThreads, kPatchBlocks<K>) dots_kernel(PatchDots<T> a, PatchTiles g) {
  constexpr int kWindow = reads<K, S>(kSide), kPixel = kPixelBytes / sizeof(T);
  const PatchThread thread(g, a.c);
  const int dy_rows = g.down * kSide, dy_cols = g.across * kSide;
  const int rows = reads<K, S>(dy_rows), cols = reads<K, S>(dy_cols);
  T* dy = shared_memory<T>();
  T* x = dy + dy_rows * dy_cols * kPixel;
  float dw[K][K][kPair] = {}, db[kPair] = {};
  for (int64_t t = thread.block; t < g.tiles; t += g.blocks) {
    const PatchTile tile = tile_of(g, t);
    copy_tile(a.dy + tile.image * a.ho * a.wo * a.c, a.c, a.ho, a.wo, thread.first, g.columns, tile.row, tile.col,
              dy_rows, dy_cols, dy);
    copy_tile(a.x + tile.image * a.h * a.w * a.c, a.c, a.h, a.w, thread.first, g.columns, tile.row * S - a.top,
              tile.col * S - a.left, rows, cols, x);
    await_copies();
    for (int patch = thread.lane; thread.inside && patch < g.across * g.down; patch += g.lanes) {
      const int down = patch / g.across, across = patch - down * g.across;
      if (tile.row + down * kSide >= a.ho || tile.col + across * kSide >= a.wo) continue;
      const T* dy_at = dy + (down * kSide * dy_cols + across * kSide) * kPixel + thread.column * kPair;
      const T* at = x + (down * kSide * S * cols + across * kSide * S) * kPixel + thread.column * kPair;
      float gradient[kSide][kSide][kPair];
#pragma unroll
      for (int o = 0; o < kSide; ++o) take_row(dy_at + o * dy_cols * kPixel, gradient[o]);
#pragma unroll
      for (int i = 0; i < kSide * kSide * kPair; ++i) {
        db[i % kPair] += gradient[i / (kSide * kPair)][i / kPair % kSide][i % kPair];
      }
#pragma unroll
      for (int r = 0; r < kWindow; ++r, at += cols * kPixel) {
        float value[kWindow][kPair];
        take_row(at, value);
#pragma unroll
        for (int o = 0; o < kSide; ++o) {
          const int ky = r - o * S;
          if (ky < 0 || ky >= K) continue;
#pragma unroll
          for (int i = 0; i < K * kSide * kPair; ++i) {
            const int p = i % kPair, kx = i / kPair % K, c = i / (kPair * K);
            dw[ky][kx][p] += gradient[o][c][p] * value[c * S + kx][p];
          }
        }
      }
    }
    __syncthreads();
  }
  float* shared = shared_memory<float>();  // [K * kPair, threads]
  const int threads = static_cast<int>(blockDim.x), width = g.columns * kPair;
  float* sums = a.sums + int64_t{thread.block} * (K * K + 1) * a.c;
#pragma unroll
  for (int ky = 0; ky <= K; ++ky) {
    const int taps = ky < K ? K : 1;  // and last db
#pragma unroll
    for (int i = 0; i < K * kPair; ++i) {
      if (i / kPair >= taps) continue;
      shared[i * threads + threadIdx.x] = ky < K ? dw[ky < K ? ky : 0][i / kPair][i % kPair] : db[i % kPair];
    }
    __syncthreads();
    for (int o = threadIdx.x; o < width * taps; o += threads) {
      const int kx = o / width, in_row = o - kx * width, at = kx * kPair + in_row % kPair;
      if (thread.first + in_row >= a.c) continue;
      float sum = 0.0f;
      for (int i = 0; i < g.lanes; ++i) sum += shared[at * threads + i * g.columns + in_row / kPair];
      sums[(ky * K + kx) * a.c + thread.first + in_row] = sum;
    }
    __syncthreads();
  }
}

// --- launchers ------------------------------------------------------------------------------------------------------

// Kernels of networks, and images whose pixels an int counts.
inline bool has_usual_kernel(const DepthwiseSizes& s) {
  return s.kh == s.kw && (s.kh == 3 || s.kh == 5 || (s.kh == 7 && s.sh == 1)) && s.dtype != DType::kFloat64 &&
         s.m == 1 && s.sh == s.sw && s.sh <= 2 && s.dil_h == 1 && s.dil_w == 1 &&
         s.n * std::max(s.h, s.ho) * std::max(s.w, s.wo) <= kMaxGrid;
}

// Whether these kernels take the shape.
inline bool has_patches(const DepthwiseSizes& s) {
  const int64_t bytes = s.c * (s.dtype == DType::kFloat32 ? 4 : 2);
  return s.layout == Layout::kChannelsLast && bytes % kVectorBytes == 0 && has_usual_kernel(s);
}

// For usual kernels: f.template operator()<T, K, S>()
template <class F>
[[nodiscard]] int visit_patches(const DepthwiseSizes& s, F&& f) {
  return visit_element(s.dtype, [&]<class T>() -> int {
    int code = cudaErrorInvalidValue;
    if constexpr (sizeof(T) < 8) {
      visit<3, 5>(static_cast<int>(s.kh), [&]<int K>() {
        visit<1, 2>(static_cast<int>(s.sh), [&]<int S>() { code = f.template operator()<T, K, S>(); });
      });
      if (s.kh == 7) code = f.template operator()<T, 7, 1>();
    }
    return code;
  });
}

template <class T>
PatchPass<T> patch_pass(const DepthwiseSizes& s, const void* in, const void* weight, const void* bias, void* out) {
  PatchPass<T> a{};
  a.in = static_cast<const T*>(in);
  a.weight = static_cast<const T*>(weight);
  a.bias = static_cast<const T*>(bias);
  a.out = static_cast<T*>(out);
  a.c = s.c;
  const auto set = [](int& to, int64_t from) { to = static_cast<int>(from); };
  set(a.h, s.h), set(a.w, s.w), set(a.ho, s.ho), set(a.wo, s.wo), set(a.top, s.top), set(a.left, s.left);
  return a;
}

template <int K>
constexpr size_t kStagedBytes = K * K * sizeof(float);  // of a channel

inline size_t most_channels(const DepthwiseSizes& s) { return kPixelBytes / (s.dtype == DType::kFloat32 ? 4 : 2); }

template <int K, int S>
PatchTiles forward_patches(const DepthwiseSizes& s) {
  return patch_tiles(s, s.ho, s.wo, kStagedBytes<K> * most_channels(s),
                     [](int rows, int cols) { return reads<K, S>(rows) * reads<K, S>(cols); });
}

template <class T, int K, int S, bool kMoments>
int run_patches(const PatchPass<T>& a, const PatchTiles& g, void* stream) {
  size_t shared = g.shared_bytes;
  if (kMoments) shared = std::max(shared, g.threads() * kPair * sizeof(Moments<float>));
  return launch(patch_kernel<T, K, S, kMoments>, g.blocks * g.slices, g.threads(), shared, stream, a, g);
}

}  // namespace fusedtrain::cuda

#pragma once
// The depthwise CUDA kernels for what networks are made of: channels_last images, an even number of channels, kernels
// of 3x3 and 5x5 taps with strides of 1 and 2 and of 7x7 with a stride of 1. Everything else: depthwise_pass.h and
// depthwise_conv2d_dw.cu.
//
// A thread takes a pair of neighbouring channels and a strip: kCols columns and some rows of the output. It goes down
// the strip, so every row of the input is loaded once, one step ahead of its use, and is added to all the rows of the
// output that it belongs to, whose sums stand in registers, as do all taps of the two kernels. Going down a strip, the
// rows of sums take turns in D slots; steps are unrolled by D, so that a slot is a register and no index.
#include "cuda/depthwise_moments.h"
#include "cuda/depthwise_tiles.h"

namespace fusedtrain::cuda {

constexpr int kPair = 2;                 // channels of a thread
constexpr int kStripPairs = 64;          // of a block, at most: 256 bytes of a pixel in 16 bits
constexpr int64_t kStripsEach = 300000;  // strips are shortened down to kLeastRows until there are so many
constexpr int kLeastRows = 7;

// What registers allow: threads of a block, blocks per multiprocessor, columns of a strip.
template <int K>
constexpr int kStripThreads = K == 3 ? 256 : 128;
template <int K>
constexpr int kStripBlocks = K == 5 ? 3 : 2;
template <int K, int S>
constexpr int kStripCols = S == 1 && K < 7 ? 4 : 2;
template <int K, int S>
constexpr int kDotsCols = S == 1 && K == 3 ? 4 : 2;
constexpr int kSpreadCols = 4;

// A block is `columns` pairs of channels by `lanes` strips.
struct StripTiles {
  int rows;          // of the output of a strip
  int strips, runs;  // per image: down and across
  int64_t items;     // strips of all images
  int columns, lanes;
  unsigned tiles;  // of channels
  int64_t blocks;  // per tile

  int threads() const { return ceil_div(columns * lanes, kWarp) * kWarp; }
};

inline StripTiles strip_tiles(int64_t n, int64_t c, int64_t rows, int64_t runs, int threads) {
  StripTiles g{};
  const int64_t pairs = c / kPair, tiles = ceil_div<int64_t>(pairs, kStripPairs);
  const int64_t wanted = ceil_div(kStripsEach, std::max<int64_t>(1, n * runs * pairs));
  const int64_t strips = std::clamp<int64_t>(wanted, 1, ceil_div<int64_t>(rows, kLeastRows));
  g.rows = static_cast<int>(ceil_div(rows, strips));
  g.strips = static_cast<int>(ceil_div<int64_t>(rows, g.rows));
  g.runs = static_cast<int>(runs);
  g.items = n * g.strips * runs;
  g.columns = static_cast<int>(ceil_div(pairs, tiles));
  g.lanes = threads / g.columns;
  g.tiles = static_cast<unsigned>(tiles);
  g.blocks = ceil_div<int64_t>(g.items, g.lanes);
  return g;
}

struct Strip {
  int64_t image;
  int row, run;  // first row, index of the columns
};

__device__ __forceinline__ Strip strip_of(const StripTiles& g, int64_t item) {
  const unsigned i = static_cast<unsigned>(item), runs = static_cast<unsigned>(g.runs);
  const unsigned line = i / runs, strips = static_cast<unsigned>(g.strips), image = line / strips;
  return {image, static_cast<int>(line - image * strips) * g.rows, static_cast<int>(i - line * runs)};
}

template <class T>
struct StripPass {
  const T* in;      // [n, h, w, c]
  const T* weight;  // [c, K, K]
  const T* bias;    // [c] or null
  T* out;           // [n, ho, wo, c]
  int64_t c;
  int h, w, ho, wo, top, left;
  bool turned;      // the taps, in both directions
  Acc<T>* moments;  // [blocks, 4, c], with kMoments
};

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

// kWindow columns of a row from column `col` on, zero outside the image.
template <int kWindow, class T>
__device__ __forceinline__ void load_row(const T* image, int64_t c, int row, int rows, int col, int cols,
                                         Pack<T, kPair> (&to)[kWindow]) {
  const T* p = image + (int64_t{row} * cols + col) * c;
  const bool inside = static_cast<unsigned>(row) < static_cast<unsigned>(rows);
#pragma unroll
  for (int i = 0; i < kWindow; ++i, p += c) {
    to[i] = Pack<T, kPair>{};
    if (inside && static_cast<unsigned>(col + i) < static_cast<unsigned>(cols)) to[i] = load_pair(p);
  }
}

template <int N, class T>
__device__ __forceinline__ void to_floats(const Pack<T, kPair> (&from)[N], float (&to)[N][kPair]) {
#pragma unroll
  for (int i = 0; i < N * kPair; ++i) to[i / kPair][i % kPair] = to_acc(from[i / kPair].v[i % kPair]);
}

// All taps of this thread's two kernels, through shared memory [K * K, columns * kPair]. The whole block calls it.
template <int K, class T>
__device__ __forceinline__ void load_taps(const StripPass<T>& a, const StripTiles& g, int64_t first, int column,
                                          float (&taps)[K][K][kPair]) {
  constexpr int kArea = K * K;
  float* shared = shared_memory<float>();
  const int width = g.columns * kPair;
  const int channels = a.c - first < width ? static_cast<int>(a.c - first) : width;
  const T* weight = a.weight + first * kArea;
  for (int i = threadIdx.x; i < channels * kArea; i += blockDim.x) {
    const int channel = i / kArea, at = i - channel * kArea;
    shared[(a.turned ? kArea - 1 - at : at) * width + channel] = to_acc(weight[i]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kArea * kPair; ++i) {
    taps[i / (kPair * K)][i / kPair % K][i % kPair] = shared[i / kPair * width + column * kPair + i % kPair];
  }
}

// --- forward, and dx for stride 1 -----------------------------------------------------------------------------------

template <class T, int K, int S, int kCols, bool kMoments>
__global__ void __launch_bounds__(kStripThreads<K>, kMoments ? 2 : kStripBlocks<K>)
    strip_kernel(StripPass<T> a, StripTiles g) {
  constexpr int D = ceil_div(K, S), kWindow = (kCols - 1) * S + K;
  const unsigned tile = blockIdx.x % g.tiles, block = blockIdx.x / g.tiles;
  const int column = static_cast<int>(threadIdx.x) % g.columns, lane = static_cast<int>(threadIdx.x) / g.columns;
  const int64_t first = static_cast<int64_t>(tile) * g.columns * kPair, channel = first + column * kPair;
  const int64_t item = int64_t{block} * g.lanes + lane;
  const bool inside = lane < g.lanes && channel < a.c;
  float taps[K][K][kPair];
  load_taps<K>(a, g, first, inside ? column : 0, taps);
  ShiftedSums<kPair> moments;
  if (inside && item < g.items) {
    const Strip strip = strip_of(g, item);
    const int ox = strip.run * kCols, ix = ox * S - a.left, iy = strip.row * S - a.top;
    const int rows = a.ho - strip.row < g.rows ? a.ho - strip.row : g.rows;
    const T* in = a.in + strip.image * a.h * a.w * a.c + channel;
    T* out = a.out + ((strip.image * a.ho + strip.row) * a.wo + ox) * a.c + channel;
    float bias[kPair] = {};
    if (a.bias != nullptr) bias[0] = to_acc(a.bias[channel]), bias[1] = to_acc(a.bias[channel + 1]);
    float sums[D][kCols][kPair];
    Pack<T, kPair> next[S][kWindow];
#pragma unroll
    for (int j = 0; j < S; ++j) load_row(in, a.c, iy + j, a.h, ix, a.w, next[j]);
    for (int base = 0; base < rows + D - 1; base += D) {
#pragma unroll
      for (int phase = 0; phase < D; ++phase) {
        const int step = base + phase;
        if (step >= rows + D - 1) break;
        float value[S][kWindow][kPair];
#pragma unroll
        for (int j = 0; j < S; ++j) {
          to_floats(next[j], value[j]);
          if (step + 1 < rows + D - 1) load_row(in, a.c, iy + (step + 1) * S + j, a.h, ix, a.w, next[j]);
        }
#pragma unroll
        for (int i = 0; i < kCols * kPair; ++i) sums[phase][i / kPair][i % kPair] = bias[i % kPair];
#pragma unroll
        for (int j = 0; j < S; ++j) {
          if (static_cast<unsigned>(iy + step * S + j) >= static_cast<unsigned>(a.h)) continue;
#pragma unroll
          for (int d = 0; d < D; ++d) {
            const int ky = j + S * d;
            if (ky >= K || static_cast<unsigned>(step - d) >= static_cast<unsigned>(rows)) continue;
#pragma unroll
            for (int i = 0; i < K * kCols * kPair; ++i) {
              const int p = i % kPair, t = i / kPair % kCols, kx = i / (kPair * kCols);
              sums[(phase - d + D) % D][t][p] += taps[ky < K ? ky : 0][kx][p] * value[j][t * S + kx][p];
            }
          }
        }
        const int done = step - (D - 1);
        if (done < 0) continue;
#pragma unroll
        for (int t = 0; t < kCols; ++t) {
          if (ox + t >= a.wo) break;
          Pack<T, kPair> pack;
#pragma unroll
          for (int p = 0; p < kPair; ++p) from_acc(sums[(phase + 1) % D][t][p], pack.v[p]);
          store_pair(out + t * a.c, pack);
          if constexpr (kMoments) moments.add({to_acc(pack.v[0]), to_acc(pack.v[1])});
        }
        out += int64_t{a.wo} * a.c;
      }
    }
  }
  if constexpr (kMoments) {
    Moments<float> merged[kPair] = {moments.moments(0), moments.moments(1)};
    __syncthreads();  // nobody reads taps any more
    merge_rows(merged, inside ? lane : g.lanes, g.lanes, g.columns, shared_memory<float>());
    if (!inside || lane != 0) return;
    float* part = a.moments + int64_t{block} * Moments<float>::kParts * a.c + channel;
#pragma unroll
    for (int i = 0; i < Moments<float>::kParts * kPair; ++i)
      part[i / kPair * a.c + i % kPair] = merged[i % kPair].part[i / kPair];
  }
}

// --- dx for stride 2 ------------------------------------------------------------------------------------------------

// Output rows and columns go in pairs: row 2 A + p - top takes the taps p + 2 d from row A - d of `in`, d < D.
template <class T, int K, int kCols>
__global__ void __launch_bounds__(kStripThreads<K>, kStripBlocks<K>) spread_kernel(StripPass<T> a, StripTiles g) {
  constexpr int D = ceil_div(K, 2), kPairs = kCols / 2, kWindow = kPairs + D - 1;
  const unsigned tile = blockIdx.x % g.tiles, block = blockIdx.x / g.tiles;
  const int column = static_cast<int>(threadIdx.x) % g.columns, lane = static_cast<int>(threadIdx.x) / g.columns;
  const int64_t first = static_cast<int64_t>(tile) * g.columns * kPair, channel = first + column * kPair;
  const int64_t item = int64_t{block} * g.lanes + lane;
  const bool inside = lane < g.lanes && channel < a.c;
  float taps[K][K][kPair];
  load_taps<K>(a, g, first, inside ? column : 0, taps);
  if (!inside || item >= g.items) return;
  const Strip strip = strip_of(g, item);
  const int row = a.top / 2 + strip.row, col = a.left / 2 + strip.run * kPairs;  // of pairs
  const int last = (a.ho - 1 + a.top) / 2, rows = last + 1 - row < g.rows ? last + 1 - row : g.rows;
  const T* in = a.in + strip.image * a.h * a.w * a.c + channel;
  T* out = a.out + strip.image * a.ho * a.wo * a.c + channel;
  float sums[D][2][kCols][kPair];
  Pack<T, kPair> next[kWindow];
  load_row(in, a.c, row - (D - 1), a.h, col - (D - 1), a.w, next);
  for (int base = 0; base < rows + D - 1; base += D) {
#pragma unroll
    for (int phase = 0; phase < D; ++phase) {
      const int step = base + phase;
      if (step >= rows + D - 1) break;
      float value[kWindow][kPair];
      to_floats(next, value);
      if (step + 1 < rows + D - 1) load_row(in, a.c, row - (D - 1) + step + 1, a.h, col - (D - 1), a.w, next);
#pragma unroll
      for (int i = 0; i < 2 * kCols * kPair; ++i) sums[phase][i / (kCols * kPair)][i / kPair % kCols][i % kPair] = 0.0f;
      if (static_cast<unsigned>(row - (D - 1) + step) < static_cast<unsigned>(a.h)) {
#pragma unroll
        for (int d = 0; d < D; ++d) {
          if (static_cast<unsigned>(step - (D - 1) + d) >= static_cast<unsigned>(rows)) continue;
          const int slot = (phase + 1 + d) % D;
#pragma unroll
          for (int i = 0; i < K * kPairs * kPair * 2; ++i) {
            const int p = i % kPair, b = i / kPair % kPairs, kx = i / (kPair * kPairs) % K,
                      py = i / (kPair * kPairs * K);
            const int ky = py + 2 * d;
            if (ky >= K) continue;
            sums[slot][py][2 * b + kx % 2][p] += taps[ky < K ? ky : 0][kx][p] * value[b - kx / 2 + D - 1][p];
          }
        }
      }
      const int done = step - (D - 1);
      if (done < 0) continue;
#pragma unroll
      for (int py = 0; py < 2; ++py) {
        const int oy = 2 * (row + done) + py - a.top;
        if (static_cast<unsigned>(oy) >= static_cast<unsigned>(a.ho)) continue;
        T* line = out + int64_t{oy} * a.wo * a.c;
#pragma unroll
        for (int t = 0; t < kCols; ++t) {
          const int ox = 2 * col + t - a.left;
          if (static_cast<unsigned>(ox) >= static_cast<unsigned>(a.wo)) continue;
          Pack<T, kPair> pack;
#pragma unroll
          for (int p = 0; p < kPair; ++p) from_acc(sums[(phase + 1) % D][py][t][p], pack.v[p]);
          store_pair(line + int64_t{ox} * a.c, pack);
        }
      }
    }
  }
}

// --- dw and db ------------------------------------------------------------------------------------------------------

template <class T>
struct StripDots {
  const T* dy;  // [n, ho, wo, c]
  const T* x;   // [n, h, w, c]
  float* sums;  // [blocks, K * K + 1, c]: of dw, and last of db
  int64_t c;
  int h, w, ho, wo, top, left;
};

// Going down a strip, the last D rows of dy stand in registers; a block takes every `blocks`-th group of strips.
template <class T, int K, int S, int kCols>
__global__ void __launch_bounds__(kStripThreads<K>, kStripBlocks<K>) strip_dots_kernel(StripDots<T> a, StripTiles g) {
  constexpr int D = ceil_div(K, S), kWindow = (kCols - 1) * S + K;
  const unsigned tile = blockIdx.x % g.tiles, block = blockIdx.x / g.tiles;
  const int column = static_cast<int>(threadIdx.x) % g.columns, lane = static_cast<int>(threadIdx.x) / g.columns;
  const int64_t first = static_cast<int64_t>(tile) * g.columns * kPair, channel = first + column * kPair;
  const bool inside = lane < g.lanes && channel < a.c;
  float dw[K][K][kPair] = {}, db[kPair] = {};
  for (int64_t item = int64_t{block} * g.lanes + lane; inside && item < g.items; item += g.blocks * g.lanes) {
    const Strip strip = strip_of(g, item);
    const int ox = strip.run * kCols, ix = ox * S - a.left, iy = strip.row * S - a.top;
    const int rows = a.ho - strip.row < g.rows ? a.ho - strip.row : g.rows, end = strip.row + rows;
    const T* x = a.x + strip.image * a.h * a.w * a.c + channel;
    const T* dy = a.dy + strip.image * a.ho * a.wo * a.c + channel;
    float gradient[D][kCols][kPair];
    Pack<T, kPair> next[S][kWindow], next_dy[kCols];
#pragma unroll
    for (int j = 0; j < S; ++j) load_row(x, a.c, iy + j, a.h, ix, a.w, next[j]);
    load_row(dy, a.c, strip.row, end, ox, a.wo, next_dy);
    for (int base = 0; base < rows + D - 1; base += D) {
#pragma unroll
      for (int phase = 0; phase < D; ++phase) {
        const int step = base + phase;
        if (step >= rows + D - 1) break;
        to_floats(next_dy, gradient[phase]);
        float value[S][kWindow][kPair];
#pragma unroll
        for (int j = 0; j < S; ++j) to_floats(next[j], value[j]);
        if (step + 1 < rows + D - 1) {
#pragma unroll
          for (int j = 0; j < S; ++j) load_row(x, a.c, iy + (step + 1) * S + j, a.h, ix, a.w, next[j]);
          load_row(dy, a.c, strip.row + step + 1, end, ox, a.wo, next_dy);
        }
#pragma unroll
        for (int i = 0; i < kCols * kPair; ++i) db[i % kPair] += gradient[phase][i / kPair][i % kPair];
#pragma unroll
        for (int j = 0; j < S; ++j) {
          if (static_cast<unsigned>(iy + step * S + j) >= static_cast<unsigned>(a.h)) continue;
#pragma unroll
          for (int d = 0; d < D; ++d) {
            const int ky = j + S * d;
            if (ky >= K || static_cast<unsigned>(step - d) >= static_cast<unsigned>(rows)) continue;
#pragma unroll
            for (int i = 0; i < K * kCols * kPair; ++i) {
              const int p = i % kPair, kx = i / kPair % K, t = i / (kPair * K);
              dw[ky < K ? ky : 0][kx][p] += gradient[(phase - d + D) % D][t][p] * value[j][t * S + kx][p];
            }
          }
        }
      }
    }
  }
  float* shared = shared_memory<float>();  // [K * kPair, threads]
  const int threads = static_cast<int>(blockDim.x), width = g.columns * kPair;
  float* sums = a.sums + int64_t{block} * (K * K + 1) * a.c;
#pragma unroll
  for (int ky = 0; ky <= K; ++ky) {
    constexpr int kRow = K * kPair;
    const int taps = ky < K ? K : 1;  // and last db
#pragma unroll
    for (int i = 0; i < kRow; ++i) {
      if (i / kPair < taps) {
        shared[i * threads + threadIdx.x] = ky < K ? dw[ky < K ? ky : 0][i / kPair][i % kPair] : db[i % kPair];
      }
    }
    __syncthreads();
    for (int o = threadIdx.x; o < width * taps; o += threads) {
      const int kx = o / width, in_row = o - kx * width, at = kx * kPair + in_row % kPair;
      if (first + in_row >= a.c) continue;
      float sum = 0.0f;
      for (int i = 0; i < g.lanes; ++i) sum += shared[at * threads + i * g.columns + in_row / kPair];
      sums[(ky * K + kx) * a.c + first + in_row] = sum;
    }
    __syncthreads();
  }
}

// --- launchers ------------------------------------------------------------------------------------------------------

inline bool is_pair_aligned(const DepthwiseSizes& s, const void* a, const void* b) {
  const size_t bytes = kPair * (s.dtype == DType::kFloat32 ? 4 : 2);
  return reinterpret_cast<uintptr_t>(a) % bytes == 0 && reinterpret_cast<uintptr_t>(b) % bytes == 0;
}

// Whether these kernels take the shape.
inline bool is_strip_shape(const DepthwiseSizes& s) {
  const bool kernel = s.kh == s.kw && (s.kh == 3 || s.kh == 5 || (s.kh == 7 && s.sh == 1));
  return kernel && s.layout == Layout::kChannelsLast && s.dtype != DType::kFloat64 && s.m == 1 && s.c % kPair == 0 &&
         s.sh == s.sw && s.sh <= 2 && s.dil_h == 1 && s.dil_w == 1 &&
         s.n * std::max(s.h, s.ho) * std::max(s.w, s.wo) <= kMaxGrid;
}
inline bool takes_strips(const DepthwiseSizes& s, const void* a, const void* b) {
  return is_strip_shape(s) && is_pair_aligned(s, a, b);
}

// f.template operator()<T, K, S>()
template <class F>
[[nodiscard]] int visit_strips(const DepthwiseSizes& s, F&& f) {
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

template <int K, int kCols>
StripTiles forward_tiles(const DepthwiseSizes& s) {
  return strip_tiles(s.n, s.c, s.ho, ceil_div<int64_t>(s.wo, kCols), kStripThreads<K>);
}

template <class T>
StripPass<T> strip_pass(const DepthwiseSizes& s, const void* in, const void* weight, const void* bias, void* out) {
  StripPass<T> a{};
  a.in = static_cast<const T*>(in);
  a.weight = static_cast<const T*>(weight);
  a.bias = static_cast<const T*>(bias);
  a.out = static_cast<T*>(out);
  a.c = s.c;
  const auto set = [](int& to, int64_t from) { to = static_cast<int>(from); };
  set(a.h, s.h), set(a.w, s.w), set(a.ho, s.ho), set(a.wo, s.wo), set(a.top, s.top), set(a.left, s.left);
  return a;
}

template <class T, int K, int S, bool kMoments>
int run_strips(const StripPass<T>& a, const StripTiles& g, void* stream) {
  size_t shared = K * K * g.columns * kPair * sizeof(float);
  if (kMoments) shared = std::max(shared, g.threads() * kPair * sizeof(Moments<float>));
  return launch(strip_kernel<T, K, S, kStripCols<K, S>, kMoments>, g.blocks * g.tiles, g.threads(), shared, stream, a,
                g);
}

}  // namespace fusedtrain::cuda

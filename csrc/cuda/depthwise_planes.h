#pragma once
// What the depthwise CUDA kernels for contiguous images share, for the kernels of depthwise_patches.h: forward and dx
// in depthwise_conv2d_planes.cu, dw in depthwise_conv2d_planes_dw.cu. Everything else: depthwise_pass.h and
// depthwise_conv2d_dw.cu.
//
// The planes of a tensor lie one behind the other. A block takes a band: several planes, or some rows of one. What that
// reads is one stretch of memory, which it copies to shared memory as it stands. A thread then takes patches of some
// rows and a few columns, whose sums and taps stand in registers; it reads every row of the patch's window once.
// Columns beside the image are masked, and rows above and below it are a row of zeros.
#include "cuda/depthwise_patches.h"

namespace fusedtrain::cuda {

constexpr int kMostPlaneColumns = 512;

// Rows of a patch: as many of them as possible stand in the image. Those of 224 pixels and their halves are of sevens.
inline int patch_rows(int64_t rows) { return ceil_div<int64_t>(rows, 7) * 7 <= ceil_div<int64_t>(rows, 8) * 8 ? 7 : 8; }

// Columns of a patch: neighbouring threads read words of shared memory that are few words apart.
template <class T>
constexpr int kPatchColumns = sizeof(T) == 2 ? 4 : 2;

constexpr int kBandThreads = 128;
constexpr int kMostPatches = 2 * kBandThreads;  // of a band
constexpr int kBandBytes = 32 << 10;            // of shared memory, so that several blocks fit beside each other
constexpr int kEnoughBlocks = 528;              // four on each multiprocessor of a large GPU

// Before a stretch stands a row of zeros, as long as a window; windows of its last row reach behind it.
constexpr int kZeroBytes = 32, kBehindBytes = 64;

// Divides n >= 0 by a multiplication, which is one too low at most.
struct Divider {
  int divisor;
  unsigned multiplier;

  explicit Divider(int64_t divisor)
      : divisor(static_cast<int>(divisor)), multiplier(0xffffffffu / static_cast<unsigned>(divisor)) {}
  __device__ int quotient(int n) const {
    const int low = static_cast<int>(__umulhi(static_cast<unsigned>(n), multiplier));
    return n - low * divisor < divisor ? low : low + 1;
  }
  __device__ int remainder(int n) const { return n - quotient(n) * divisor; }
};

struct Bands {
  int across, down;  // patches of a plane within a band
  int planes;        // of a band
  int threads;
  Divider bands{1};                  // of a plane
  Divider groups{1};                 // of planes, for each image or for all of them
  Divider per_plane{1}, per_row{1};  // patches
  size_t shared_bytes;
};

// Of `planes` planes of rows x cols outputs in each of `images`. Several planes of a band have `most` patches together.
// bytes(planes, down) of shared memory belong to a band.
template <class Bytes>
Bands bands_of(int64_t images, int64_t planes, int64_t rows, int64_t cols, int patch_rows, int patch_columns, int most,
               Bytes&& bytes) {
  constexpr int64_t kOutputCost = 8, kThreadCost = 64;  // beside moving a byte
  const int64_t across = ceil_div<int64_t>(cols, patch_columns), all = ceil_div<int64_t>(rows, patch_rows);
  Bands g{};
  int64_t least = 0;
  const auto consider = [&](int64_t count, int64_t down) {
    const int64_t patches = count * down * across, rounds = ceil_div<int64_t>(patches, kBandThreads);
    const int64_t threads = ceil_div<int64_t>(ceil_div(patches, rounds), kWarp) * kWarp;
    const int64_t groups = ceil_div(planes, count), bands = ceil_div(all, down);
    const int64_t shared = bytes(count, down);
    const int64_t cost = std::max<int64_t>(images * groups * bands, kEnoughBlocks) *
                         (threads * (rounds * patch_columns * patch_rows * kOutputCost + kThreadCost) + shared);
    if (g.threads > 0 && (cost > least || shared > kBandBytes)) return;
    least = cost;
    g.down = static_cast<int>(down), g.planes = static_cast<int>(count), g.threads = static_cast<int>(threads);
    g.bands = Divider(bands), g.groups = Divider(std::max<int64_t>(1, groups));
    g.shared_bytes = static_cast<size_t>(shared);
  };
  for (int64_t down = 1; down <= all && (down == 1 || down * across <= kMostPatches); ++down) consider(1, down);
  for (int64_t count = std::min(planes, most / (all * across)); count > 1; count /= 2) consider(count, all);
  g.across = static_cast<int>(across);
  g.per_plane = Divider(g.down * across), g.per_row = Divider(across);
  return g;
}

// Elements of a tensor that lie one behind the other: rows of planes, from `row` of the first of them on.
struct Stretch {
  int64_t begin;
  int size, row;
};

// Rows [first, last) of the planes, as far as they exist; of whole planes all rows.
__device__ __forceinline__ Stretch stretch_of(const Bands& g, int64_t plane, int planes, int first, int last, int rows,
                                              int cols) {
  if (g.bands.divisor == 1) first = 0, last = rows;
  first = first < 0 ? 0 : first < rows ? first : rows;
  last = last < first ? first : last < rows ? last : rows;
  return {(plane * rows + first) * cols, ((planes - 1) * rows + last - first) * cols, first};
}
// Bytes of shared memory for a stretch, wherever it begins, and for one that windows read.
template <class T>
int64_t stretch_bytes(int64_t planes, int64_t rows, int64_t cols) {
  return ceil_div<int64_t>(planes * rows * cols * sizeof(T), kVectorBytes) * kVectorBytes + kVectorBytes;
}
template <class T>
int64_t window_bytes(int64_t planes, int64_t rows, int64_t cols) {
  return kZeroBytes + stretch_bytes<T>(planes, rows, cols) + kBehindBytes;
}

// A stretch begins in shared memory where it does in its 16 bytes of memory: so many elements behind their first.
template <class T>
__device__ __forceinline__ int skipped(const T* begin) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(begin) % kVectorBytes / sizeof(T));
}

// The copy of a stretch: it begins `at` bytes behind `bytes`, where a row of zeros stands.
template <class T>
struct Copied {
  const char* bytes;
  int at;
  T* behind;  // what may follow in shared memory
};

// Starts the copy of a stretch to `to`, with what stands before it in its first 16 bytes: where a tensor begins amid
// them, so does its memory before.
template <class T>
__device__ __forceinline__ Copied<T> copy_stretch(const T* from, const Stretch& s, T* to) {
  constexpr int kEach = kVectorBytes / sizeof(T), kZeros = kZeroBytes / sizeof(T);
  const int thread = static_cast<int>(threadIdx.x), skip = skipped(from + s.begin), size = skip + s.size;
  if (thread < kZeroBytes / 4) reinterpret_cast<unsigned*>(to)[thread] = 0;
  from += s.begin - skip;
  int i = thread * kEach;
  for (; i + kEach <= size; i += static_cast<int>(blockDim.x) * kEach) {
    copy_async(to + kZeros + i, from + i, kVectorBytes);
  }
  if (i < size) copy_async(to + kZeros + i, from + i, (size - i) * static_cast<int>(sizeof(T)));
  return {reinterpret_cast<const char*>(to), kZeroBytes + skip * static_cast<int>(sizeof(T)),
          to + kZeros + ceil_div(size, kEach) * kEach + kBehindBytes / sizeof(T)};
}

// Writes a stretch that begins so many elements behind `from`. Of 16 bytes that are others', too, it writes single
// elements.
template <class T>
__device__ __forceinline__ void write_stretch(const T* from, const Stretch& s, T* to) {
  constexpr int kEach = kVectorBytes / sizeof(T);
  const int thread = static_cast<int>(threadIdx.x), skip = skipped(to + s.begin), size = skip + s.size;
  const int begin = skip > 0 ? kEach : 0, end = size / kEach * kEach;
  to += s.begin - skip;
  for (int i = begin + thread * kEach; i < end; i += static_cast<int>(blockDim.x) * kEach) {
    store(to + i, load<kEach>(from + i));
  }
  const int i = thread < kEach ? thread : end + thread - kEach;
  const bool own = thread < kEach ? i < begin : thread < 2 * kEach && i >= begin;
  if (own && i >= skip && i < size) to[i] = from[i];
}

// Reads rows of N columns from shared memory, zero beside the image.
template <class T, int N>
struct WindowRow {
  static constexpr int kPerWord = sizeof(unsigned) / sizeof(T), kWords = ceil_div(N, kPerWord);
  unsigned mask[kWords];

  __device__ WindowRow(int column, int columns) {
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const auto inside = [&](int i) { return static_cast<unsigned>(column + i) < static_cast<unsigned>(columns); };
      if constexpr (kPerWord == 1) {
        mask[j] = inside(j) ? ~0u : 0u;
      } else {
        mask[j] = (inside(2 * j) ? 0xffffu : 0u) | (inside(2 * j + 1) ? 0xffff0000u : 0u);
      }
    }
  }
  // From byte `at` on. Two elements are taken from two neighbouring words.
  __device__ void take(const char* from, int at, float (&value)[N]) const {
    if constexpr (kPerWord == 1) {
      const unsigned* words = reinterpret_cast<const unsigned*>(from + at);
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] = __uint_as_float(words[i] & mask[i]);
    } else {
      const unsigned* words = reinterpret_cast<const unsigned*>(from + (at & ~3));
      const unsigned shift = static_cast<unsigned>(at) * 8;  // modulo 32
      unsigned low = words[0];
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        const unsigned high = 2 * j + 1 < N ? words[j + 1] : low;
        const unsigned both = __funnelshift_r(low, high, shift) & mask[j];
        low = high;
        Pack<T, 2> pair;
        memcpy(&pair, &both, sizeof(pair));
        const Pack<float, 2> values = to_acc(pair);
        value[2 * j] = values.v[0];
        if (2 * j + 1 < N) value[2 * j + 1 < N ? 2 * j + 1 : 0] = values.v[1];
      }
    }
  }
};

// Whether these kernels take the shape: rows and columns of padding are fewer than taps.
inline bool has_planes(const DepthwiseSizes& s) {
  const int64_t right = (s.wo - 1) * s.sw + s.kw - s.w - s.left;
  return s.layout == Layout::kContiguous && has_usual_kernel(s) && s.top >= 0 && s.top < s.kh && s.left >= 0 &&
         s.left < s.kw && right < s.kw && std::max(s.w, s.wo) <= kMostPlaneColumns &&
         s.n * s.c <= kMaxGrid / (s.kh * s.kw);
}

// For patches of R of these `rows`: f.template operator()<T, K, S, R>()
template <class F>
[[nodiscard]] int visit_planes(const DepthwiseSizes& s, int64_t rows, F&& f) {
  return visit_patches(s, [&]<class T, int K, int S>() {
    int code = cudaErrorInvalidValue;
    visit<7, 8>(patch_rows(rows), [&]<int R>() { code = f.template operator()<T, K, S, R>(); });
    return code;
  });
}

// `moments`, [planes_parts(s), 4, c] or null, are those of y.
[[nodiscard]] int planes_forward(const DepthwiseConv2d& a, float* moments, void* stream);
int64_t planes_parts(const DepthwiseSizes& s);
[[nodiscard]] int planes_dx(const DepthwiseConv2dBackward& a, void* stream);
// Writes a.partial, [planes_dw_parts(s), K * K + 1, c]: of dw, and last of db.
[[nodiscard]] int planes_dw(const DepthwiseConv2dBackward& a, void* stream);
int64_t planes_dw_parts(const DepthwiseSizes& s);

}  // namespace fusedtrain::cuda

// depthwise_conv2d on CUDA for contiguous images and usual kernels: the sums of dw and db, by depthwise_planes.h.
#include "cuda/batch_sums.h"
#include "cuda/depthwise_planes.h"

namespace fusedtrain::cuda {
namespace {

template <class T>
struct PlaneDots {
  const T* dy;  // [n, c, ho, wo]
  const T* x;   // [n, c, h, w]
  float* sums;  // [chunks * bands, K * K + 1, c]: of dw, and last of db
  int n, c, h, w, ho, wo, top, left;
};

// Blocks per multiprocessor that registers must allow.
template <int K>
constexpr int kDotsBlocks = K == 3   ? 6
                            : K == 5 ? 5
                                     : 4;

// A block takes the same band of every `chunks`-th image, so that a thread's patches belong to one channel.
template <class T, int K, int S, int R>
__global__ void __launch_bounds__(kBandThreads, kDotsBlocks<K>) plane_dots_kernel(PlaneDots<T> a, Bands g, int chunks) {
  constexpr int kColumns = kPatchColumns<T>, kReadRows = reads<K, S>(R), kReadColumns = reads<K, S>(kColumns);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int block = static_cast<int>(blockIdx.x), line = g.groups.quotient(block);
  const int chunk = g.bands.quotient(line), band = line - chunk * g.bands.divisor;
  const int group = block - line * g.groups.divisor;
  const int channel = group * g.planes, planes = a.c - channel < g.planes ? a.c - channel : g.planes;
  const int rows = g.down * R, first = band * rows, read = first * S - a.top;
  Sums<float, K * K + 1> total[1];
  for (int image = chunk; image < a.n; image += chunks) {
    const int64_t plane = int64_t{image} * a.c + channel;
    const Stretch dy_stretch = stretch_of(g, plane, planes, first, first + rows, a.ho, a.wo);
    const Stretch x_stretch = stretch_of(g, plane, planes, read, read + reads<K, S>(rows), a.h, a.w);
    const Copied<T> dy = copy_stretch(a.dy, dy_stretch, shared_memory<T>());
    const Copied<T> x = copy_stretch(a.x, x_stretch, dy.behind);
    await_copies();
    for (int patch = thread; patch < planes * g.down * g.across; patch += threads) {
      const int p = g.per_plane.quotient(patch), in_plane = patch - p * g.per_plane.divisor;
      const int down = g.per_row.quotient(in_plane), across = in_plane - down * g.across;
      const int oy = first + down * R, ox = across * kColumns;
      if (oy >= a.ho) continue;
      constexpr int kBytes = sizeof(T);
      const int iy = oy * S - a.top, ix = ox * S - a.left;
      int at = x.at + ((p * a.h + iy - x_stretch.row) * a.w + ix) * kBytes;
      int dy_at = dy.at + ((p * a.ho + oy - dy_stretch.row) * a.wo + ox) * kBytes;
      const WindowRow<T, kColumns> dy_row(ox, a.wo);
      const WindowRow<T, kReadColumns> x_row(ix, a.w);
      float gradient[R][kColumns];
#pragma unroll
      for (int r = 0; r < kReadRows; ++r, at += a.w * kBytes) {
        if (r % S == 0 && r / S < R) {  // the row of dy whose window begins here
          const int o = r / S;
          dy_row.take(dy.bytes, o < a.ho - oy ? dy_at : 0, gradient[o]);
          dy_at += a.wo * kBytes;
#pragma unroll
          for (int t = 0; t < kColumns; ++t) total[0].part[K * K] += gradient[o][t];
        }
        float value[kReadColumns];
        x_row.take(x.bytes, r < a.h - iy && (r >= K - 1 || r >= -iy) ? at : 0, value);
#pragma unroll
        for (int o = 0; o < R; ++o) {
          const int ky = r - o * S;
          if (ky < 0 || ky >= K) continue;
#pragma unroll
          for (int i = 0; i < K * kColumns; ++i) {
            total[0].part[ky * K + i % K] += gradient[o][i / K] * value[i / K * S + i % K];
          }
        }
      }
    }
    __syncthreads();
  }
  const int patches = g.per_plane.divisor, lanes = patches < threads ? patches : threads;
  const int p = thread / lanes, lane = thread - p * lanes;
  const bool inside = p < planes;
  merge_rows(total, inside ? lane : lanes, lanes, 1, shared_memory<float>());
  if (!inside || lane != 0) return;
  float* sums = a.sums + int64_t{line} * (K * K + 1) * a.c + channel + p;
#pragma unroll
  for (int i = 0; i <= K * K; ++i) sums[int64_t{i} * a.c] = total[0].part[i];
}

struct DotsBands {
  Bands bands;
  int chunks;
};

template <class T, int K, int S, int R>
DotsBands dots_bands(const DepthwiseSizes& s) {
  constexpr int64_t kBlocks = 2048;
  DotsBands g{};
  g.bands = bands_of(s.n, s.c, s.ho, s.wo, R, kPatchColumns<T>, kBandThreads, [&](int64_t planes, int64_t down) {
    const bool whole = down * R >= s.ho;
    const int64_t dy = down * R, x = reads<K, S>(static_cast<int>(dy));
    return window_bytes<T>(planes, whole ? s.ho : dy, s.wo) +
           window_bytes<T>(planes, whole ? s.h : std::min(x, s.h), s.w);
  });
  const size_t merged = g.bands.threads * sizeof(Sums<float, K * K + 1>);
  g.bands.shared_bytes = std::max(g.bands.shared_bytes, merged);
  const int64_t blocks = int64_t{g.bands.groups.divisor} * g.bands.bands.divisor;
  const int64_t most = std::max<int64_t>(1, std::min(s.n, kBlocks / blocks)), images = ceil_div(s.n, most);
  g.chunks = static_cast<int>(ceil_div(s.n, std::max<int64_t>(1, images)));
  return g;
}

}  // namespace

int64_t planes_dw_parts(const DepthwiseSizes& s) {
  int64_t parts = 0;
  const int code = visit_planes(s, s.ho, [&]<class T, int K, int S, int R>() -> int {
    const DotsBands g = dots_bands<T, K, S, R>(s);
    parts = int64_t{g.chunks} * g.bands.bands.divisor;
    return cudaSuccess;
  });
  return code == cudaSuccess ? parts : 0;
}

int planes_dw(const DepthwiseConv2dBackward& a, void* stream) {
  const DepthwiseSizes& s = a.sizes;
  return visit_planes(s, s.ho, [&]<class T, int K, int S, int R>() {
    PlaneDots<T> dots{};
    dots.dy = static_cast<const T*>(a.dy);
    dots.x = static_cast<const T*>(a.x);
    dots.sums = static_cast<float*>(a.partial);
    const auto set = [](int& to, int64_t from) { to = static_cast<int>(from); };
    set(dots.n, s.n), set(dots.c, s.c), set(dots.h, s.h), set(dots.w, s.w), set(dots.ho, s.ho), set(dots.wo, s.wo);
    set(dots.top, s.top), set(dots.left, s.left);
    const auto [g, chunks] = dots_bands<T, K, S, R>(s);
    const int64_t blocks = int64_t{g.groups.divisor} * g.bands.divisor * chunks;
    return launch(plane_dots_kernel<T, K, S, R>, blocks, g.threads, g.shared_bytes, stream, dots, g, chunks);
  });
}

}  // namespace fusedtrain::cuda

// depthwise_conv2d on CUDA for contiguous images and usual kernels: forward and dx, by depthwise_planes.h.
#include "cuda/depthwise_planes.h"

namespace fusedtrain::cuda {
namespace {

template <class T>
struct PlanePass {
  const T* in;      // [planes, h, w]
  const T* weight;  // [c, K, K]
  const T* bias;    // [c] or null
  T* out;           // [planes, ho, wo]
  int planes, c, h, w, ho, wo, top, left;
  Divider channels{1};
  bool turned;     // the taps, in both directions
  float* moments;  // [images * bands, 4, c], with kMoments
};

// Forward, and dx for stride 1. The window of a patch begins at read_row and read_column.
template <class T, int K, int S, int R>
struct Convolve {
  static constexpr int kTaps = K, kRows = R, kColumns = kPatchColumns<T>;
  static constexpr int kReadRows = reads<K, S>(kRows), kReadColumns = reads<K, S>(kColumns);

  FUSEDTRAIN_HD static int read_rows(int outputs) { return reads<K, S>(outputs); }
  __device__ static int read_row(int row, int top) { return row * S - top; }
  __device__ static int read_column(int column, int left) { return column * S - left; }

  __device__ static void add(int r, const float (&value)[kReadColumns], const float (&taps)[K][K],
                             float (&sums)[kRows][kColumns]) {
#pragma unroll
    for (int o = 0; o < kRows; ++o) {
      const int ky = r - o * S;
      if (ky < 0 || ky >= K) continue;
#pragma unroll
      for (int i = 0; i < K * kColumns; ++i) {
        sums[o][i % kColumns] += taps[ky][i / kColumns] * value[i % kColumns * S + i / kColumns];
      }
    }
  }
};

// dx for stride 2: row 2 A + p - top of the output takes the taps p + 2 d from row A - d of the input, columns alike.
// For row 0 and those two apart p is 1 if `top` is odd (kTop), and for columns if `left` is (kLeft).
template <class T, int K, bool kTop, bool kLeft>
struct Spread {
  static constexpr int kTaps = K, kRows = 16, kColumns = kPatchColumns<T>, D = ceil_div(K, 2);
  static constexpr int kReadRows = spread_reads<K>(kRows), kReadColumns = spread_reads<K>(kColumns);

  FUSEDTRAIN_HD static int read_rows(int outputs) { return spread_reads<K>(outputs); }
  __device__ static int read_row(int row, int top) { return row / 2 + top / 2 - (D - 1) + kTop; }
  __device__ static int read_column(int column, int left) { return column / 2 + left / 2 - (D - 1) + kLeft; }

  __device__ static void add(int r, const float (&value)[kReadColumns], const float (&taps)[K][K],
                             float (&sums)[kRows][kColumns]) {
#pragma unroll
    for (int o = 0; o < kRows; ++o) {
      const int ky = (o + kTop) % 2 + 2 * ((o + kTop) / 2 - kTop + D - 1 - r);
      if (ky < 0 || ky >= K) continue;
#pragma unroll
      for (int i = 0; i < kColumns * D; ++i) {
        const int t = i % kColumns, d = i / kColumns, kx = (t + kLeft) % 2 + 2 * d;
        if (kx < K) sums[o][t] += taps[ky][kx < K ? kx : 0] * value[(t + kLeft) / 2 - kLeft + D - 1 - d];
      }
    }
  }
};

// Blocks per multiprocessor that registers must allow.
template <class Rule, bool kMoments>
constexpr int kBandBlocks = Rule::kRows > 8 || Rule::kTaps == 7 ? 4 : (Rule::kTaps == 3 ? 6 : 5) - kMoments;

template <class T, class Rule, bool kMoments>
__global__ void __launch_bounds__(kBandThreads, kBandBlocks<Rule, kMoments>) plane_kernel(PlanePass<T> a, Bands g) {
  constexpr int K = Rule::kTaps, kRows = Rule::kRows, kColumns = Rule::kColumns, kVector = kVectorBytes / sizeof(float);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int block = static_cast<int>(blockIdx.x), group = g.bands.quotient(block);
  const int band = block - group * g.bands.divisor;
  const int plane = group * g.planes, planes = a.planes - plane < g.planes ? a.planes - plane : g.planes;
  const int first = band * g.down * kRows, channel = a.channels.remainder(plane);
  const int rows = g.down * kRows, read = Rule::read_row(first, a.top);
  const Stretch in = stretch_of(g, plane, planes, read, read + Rule::read_rows(rows), a.h, a.w);
  const Stretch out = stretch_of(g, plane, planes, first, first + rows, a.ho, a.wo);
  const Copied<T> image = copy_stretch(a.in, in, shared_memory<T>());
  float* staged_taps = reinterpret_cast<float*>(image.behind);  // [planes, K * K]
  T* staged = reinterpret_cast<T*>(staged_taps + ceil_div(planes * K * K, kVector) * kVector);
  for (int i = thread, at = channel * K * K + i; i < planes * K * K; i += threads, at += threads) {
    while (at >= a.c * K * K) at -= a.c * K * K;
    staged_taps[a.turned ? (2 * (i / (K * K)) + 1) * K * K - 1 - i : i] = to_acc(a.weight[at]);
  }
  await_copies();

  ShiftedSums<1> moments;
  for (int patch = thread; patch < planes * g.down * g.across; patch += threads) {
    const int p = g.per_plane.quotient(patch), in_plane = patch - p * g.per_plane.divisor;
    const int down = g.per_row.quotient(in_plane), across = in_plane - down * g.across;
    const int oy = first + down * kRows, ox = across * kColumns;
    if (oy >= a.ho) continue;
    float taps[K][K], sums[kRows][kColumns];
#pragma unroll
    for (int i = 0; i < K * K; ++i) taps[i / K][i % K] = staged_taps[p * K * K + i];
    const float bias = a.bias != nullptr ? to_acc(a.bias[a.channels.remainder(channel + p)]) : 0.0f;
#pragma unroll
    for (int i = 0; i < kRows * kColumns; ++i) sums[i / kColumns][i % kColumns] = 0.0f;
    const int iy = Rule::read_row(oy, a.top), ix = Rule::read_column(ox, a.left);
    int at = image.at + ((p * a.h + iy - in.row) * a.w + ix) * static_cast<int>(sizeof(T));
    const int above = -iy, below = a.h - iy;  // windows begin fewer than K rows above the image
    const WindowRow<T, Rule::kReadColumns> window(ix, a.w);
#pragma unroll
    for (int r = 0; r < Rule::kReadRows; ++r, at += a.w * static_cast<int>(sizeof(T))) {
      float value[Rule::kReadColumns];
      window.take(image.bytes, r < below && (r >= K - 1 || r >= above) ? at : 0, value);
      Rule::add(r, value, taps, sums);
    }
    T* to = staged + skipped(a.out + out.begin) + (p * a.ho + oy - out.row) * a.wo + ox;
#pragma unroll
    for (int o = 0; o < kRows; ++o, to += a.wo) {
      const int columns = o < a.ho - oy ? a.wo - ox : 0;
#pragma unroll
      for (int t = 0; t < kColumns; t += kPair) {
        Pack<T, kPair> pack;
        from_acc(sums[o][t] + bias, pack.v[0]), from_acc(sums[o][t + 1] + bias, pack.v[1]);
        if (a.wo % kPair == 0) {
          if (t < columns) store_pair(to + t, pack);
        } else {
          if (t < columns) to[t] = pack.v[0];
          if (t + 1 < columns) to[t + 1] = pack.v[1];
        }
        if constexpr (kMoments) {
          if (t < columns) moments.add({to_acc(pack.v[0])});
          if (t + 1 < columns) moments.add({to_acc(pack.v[1])});
        }
      }
    }
  }
  __syncthreads();
  write_stretch(staged, out, a.out);

  if constexpr (kMoments) {
    Moments<float> merged[1] = {moments.moments(0)};
    const int patches = g.per_plane.divisor, lanes = patches < threads ? patches : threads;
    const int p = thread / lanes, lane = thread - p * lanes;
    const bool inside = p < planes;
    __syncthreads();  // nobody reads what is staged any more
    merge_rows(merged, inside ? lane : lanes, lanes, 1, shared_memory<float>());
    if (!inside || lane != 0) return;
    const int image_of = a.channels.quotient(plane + p), own = plane + p - image_of * a.c;
    float* part = a.moments + (int64_t{image_of} * g.bands.divisor + band) * Moments<float>::kParts * a.c + own;
#pragma unroll
    for (int i = 0; i < Moments<float>::kParts; ++i) part[int64_t{i} * a.c] = merged[0].part[i];
  }
}

template <class T>
PlanePass<T> plane_pass(const DepthwiseSizes& s, const void* in, const void* weight, const void* bias, void* out) {
  PlanePass<T> a{};
  a.in = static_cast<const T*>(in);
  a.weight = static_cast<const T*>(weight);
  a.bias = static_cast<const T*>(bias);
  a.out = static_cast<T*>(out);
  const auto set = [](int& to, int64_t from) { to = static_cast<int>(from); };
  set(a.planes, s.n * s.c), set(a.c, s.c), set(a.h, s.h), set(a.w, s.w), set(a.ho, s.ho), set(a.wo, s.wo);
  set(a.top, s.top), set(a.left, s.left);
  a.channels = Divider(s.c);
  return a;
}

// For moments a thread takes the patches of one plane.
template <class T, class Rule, bool kMoments>
Bands pass_bands(const PlanePass<T>& a) {
  constexpr int kMost = kMoments ? kBandThreads : kMostPatches;
  return bands_of(1, a.planes, a.ho, a.wo, Rule::kRows, Rule::kColumns, kMost, [&](int64_t planes, int64_t down) {
    const bool whole = down * Rule::kRows >= a.ho;
    const int64_t out = down * Rule::kRows, in = Rule::read_rows(static_cast<int>(out));
    const int64_t taps = stretch_bytes<float>(planes, Rule::kTaps, Rule::kTaps);
    return window_bytes<T>(planes, whole ? a.h : std::min<int64_t>(in, a.h), a.w) + taps +
           stretch_bytes<T>(planes, whole ? a.ho : out, a.wo);
  });
}

template <class T, class Rule, bool kMoments>
int run_planes(const PlanePass<T>& a, void* stream) {
  const Bands g = pass_bands<T, Rule, kMoments>(a);
  size_t shared = g.shared_bytes;
  if (kMoments) shared = std::max(shared, g.threads * sizeof(Moments<float>));
  const int64_t blocks = int64_t{ceil_div(a.planes, g.planes)} * g.bands.divisor;
  return launch(plane_kernel<T, Rule, kMoments>, blocks, g.threads, shared, stream, a, g);
}

}  // namespace

int planes_forward(const DepthwiseConv2d& a, float* moments, void* stream) {
  return visit_planes(a.sizes, a.sizes.ho, [&]<class T, int K, int S, int R>() {
    PlanePass<T> pass = plane_pass<T>(a.sizes, a.x, a.weight, a.bias, a.y);
    pass.moments = moments;
    return moments == nullptr ? run_planes<T, Convolve<T, K, S, R>, false>(pass, stream)
                              : run_planes<T, Convolve<T, K, S, R>, true>(pass, stream);
  });
}

int64_t planes_parts(const DepthwiseSizes& s) {
  int64_t parts = 0;
  const int code = visit_planes(s, s.ho, [&]<class T, int K, int S, int R>() -> int {
    const PlanePass<T> pass = plane_pass<T>(s, nullptr, nullptr, nullptr, nullptr);
    parts = s.n * pass_bands<T, Convolve<T, K, S, R>, true>(pass).bands.divisor;
    return cudaSuccess;
  });
  return code == cudaSuccess ? parts : 0;
}

int planes_dx(const DepthwiseConv2dBackward& a, void* stream) {
  DepthwiseSizes s = a.sizes;
  std::swap(s.h, s.ho), std::swap(s.w, s.wo);
  if (s.sh == 1) s.top = s.kh - 1 - s.top, s.left = s.kw - 1 - s.left;
  return visit_planes(s, s.ho, [&]<class T, int K, int S, int R>() {
    PlanePass<T> pass = plane_pass<T>(s, a.dy, a.weight, nullptr, a.dx);
    if constexpr (S == 1) {
      pass.turned = true;
      return run_planes<T, Convolve<T, K, 1, R>, false>(pass, stream);
    } else {
      int code = cudaErrorInvalidValue;
      visit_bool(s.top % 2 != 0, [&]<bool kTop>() {
        visit_bool(s.left % 2 != 0,
                   [&]<bool kLeft>() { code = run_planes<T, Spread<T, K, kTop, kLeft>, false>(pass, stream); });
      });
      return code;
    }
  });
}

}  // namespace fusedtrain::cuda

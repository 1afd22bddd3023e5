#pragma once
// The four walks over a batch of images that pooling and scaling consist of.
//
//                  reduce: one Stat per (n, c)                     map: every element, with factors of its (n, c)
//   channels_last  reduce_rows_kernel (+ reduce_finish_kernel)     map_rows_kernel
//   contiguous     reduce_planes_kernel                            map_planes_kernel
//
// A Term says what happens to the elements, N at a time:
//   both:   kUnroll packs are loaded before the first is used; kBlocks of a kernel are to fit into a multiprocessor;
//           Raw<N> = load<N>(offset); Factors<N>; factors<N>(nc, f) of N channels; factor(nc, f) of one plane
//   reduce: Stat; add<N>(raw, offset, f, stats[N]); finish(nc, stat)
//   map:    apply<N>(raw, offset, f)
// A Term that reduces without factors is a NoFactors. One with an activation names AtRunTime, itself with RunTimeAct.
// N is kPack<T> where rows, planes and pointers are aligned, else half of it or 1. All sums run in an order that
// depends on c, hw and the alignment: not on the batch, the grid or the device.
#include <bit>

#include "core/cuda.h"

namespace fusedtrain::cuda {

// Statistics of a set of elements. merge() is commutative.
template <class A>
struct Sum {
  static constexpr int kParts = 1;
  A part[kParts] = {A(0)};

  __device__ void add(A v) { part[0] += v; }
  __device__ void merge(const Sum& o) { part[0] += o.part[0]; }
};

template <class A>
struct SumPeak {
  static constexpr int kParts = 3;
  A part[kParts] = {A(0), A(-INFINITY), A(0)};  // sum, maximum, how many elements reach it

  __device__ void add(A v) { merge({{v, v, A(1)}}); }
  __device__ void merge(const SumPeak& o) {
    part[0] += o.part[0];
    const bool stays = !(part[1] < o.part[1]), comes = !(o.part[1] < part[1]);  // both of NaN
    part[2] = (stays ? part[2] : A(0)) + (comes ? o.part[2] : A(0));
    part[1] = part[1] > o.part[1] || part[1] != part[1] ? part[1] : o.part[1];
  }
};

// Long sums are added in runs of this many terms, then the runs: rounding errors grow with the number of terms.
constexpr int64_t kRun = 16;

struct NoFactors {
  template <int N>
  struct Factors {
    __device__ void fill(const Factors<1>&) {}
  };
  template <int N>
  __device__ void factors(int64_t, Factors<N>&) const {}
  __device__ void factor(int64_t, Factors<1>&) const {}
};

// K factors for N elements.
template <class A, int K, int N>
struct FactorPack {
  Pack<A, N> f[K];

  __device__ void fill(const FactorPack<A, K, 1>& one) { fill(N, one, one); }
  // `first` for the elements before `split`, `second` for the others.
  __device__ void fill(int split, const FactorPack<A, K, 1>& first, const FactorPack<A, K, 1>& second) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int j = 0; j < N; ++j) f[k].v[j] = j < split ? first.f[k].v[0] : second.f[k].v[0];
    }
  }
};

// K factors of acc [n, c]; an absent one is 0.
template <class A, int K>
struct FactorSource {
  template <int N>
  using Factors = FactorPack<A, K, N>;
  const A* p[K];  // [n, c] or null

  template <int N>
  __device__ void factors(int64_t nc, Factors<N>& out) const {
#pragma unroll
    for (int k = 0; k < K; ++k) out.f[k] = p[k] != nullptr ? load<N>(p[k] + nc) : Pack<A, N>{};
  }
  __device__ void factor(int64_t nc, Factors<1>& out) const { factors<1>(nc, out); }
};

// What a Term of a backward pass loads.
template <class T, int N>
struct RawPair {
  Pack<T, N> x, dy;
};

// --- channels_last: [n, hw, c] ------------------------------------------------------------------------------------

// A block is `rows` positions by `columns` packs of channels, and walks over a chunk of positions.
struct RowTiles {
  int64_t hw, c, chunk, blocks;
  unsigned chunks, tiles;
  int columns, rows;

  int threads() const { return ceil_div(columns * rows, kWarp) * kWarp; }
};

struct RowTile {
  unsigned sample, chunk;
  int64_t channel, begin;
  int size;  // of the chunk
};

// A chunk has at least min_chunk positions, and packs_per_thread for every thread.
template <int N>
RowTiles row_tiles(const Images& images, int64_t min_chunk, int64_t packs_per_thread) {
  constexpr int64_t kColumns = 32;
  const int64_t packs = images.c / N;
  RowTiles g{};
  g.hw = images.hw;
  g.c = images.c;
  const int64_t tiles = ceil_div(packs, kColumns);
  if (images.n == 0 || tiles == 0) return g;
  g.columns = static_cast<int>(ceil_div(packs, tiles));
  g.rows = static_cast<int>(std::clamp<int64_t>(images.hw, 1, kThreads / g.columns));
  g.chunk = std::max(min_chunk, packs_per_thread * g.rows);
  const int64_t chunks = std::max<int64_t>(1, ceil_div(images.hw, g.chunk));
  g.chunks = static_cast<unsigned>(chunks);
  g.tiles = static_cast<unsigned>(tiles);
  g.blocks = images.n * chunks * tiles;
  return g;
}

template <int N>
__device__ __forceinline__ RowTile row_tile(const RowTiles& g, int column) {
  RowTile t;
  const unsigned tile = blockIdx.x % g.tiles, chunk = blockIdx.x / g.tiles;
  t.sample = chunk / g.chunks;
  t.chunk = chunk % g.chunks;
  t.channel = (int64_t{tile} * g.columns + column) * N;
  t.begin = t.chunk * g.chunk;
  t.size = static_cast<int>(t.begin + g.chunk < g.hw ? g.chunk : g.hw - t.begin);
  return t;
}

// Merges the stats of all rows of the block, whose threads are `step` apart, into row 0, as a tree. Every thread of the
// block calls it.
template <class Stat, class A, int N>
__device__ __forceinline__ void merge_rows(Stat (&stats)[N], int row, int rows, int step, A* shared) {
  int half = rows > 1 ? 1 : 0;
  while (2 * half < rows && half > 0) half *= 2;
  for (; half > 0; half /= 2) {
    const bool gives = row >= half && row < 2 * half && row < rows, takes = row < half && row + half < rows;
    if (gives) {
#pragma unroll
      for (int j = 0; j < N * Stat::kParts; ++j) {
        shared[j * blockDim.x + threadIdx.x] = stats[j / Stat::kParts].part[j % Stat::kParts];
      }
    }
    __syncthreads();
    if (takes) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        Stat other;
#pragma unroll
        for (int p = 0; p < Stat::kParts; ++p) {
          other.part[p] = shared[(j * Stat::kParts + p) * blockDim.x + threadIdx.x + half * step];
        }
        stats[j].merge(other);
      }
    }
    __syncthreads();
  }
}

template <class Term, int N>
__global__ void __launch_bounds__(kThreads, Term::kBlocks)
    reduce_rows_kernel(Term term, RowTiles g, typename Term::A* __restrict__ partial) {  // [n, chunks, parts, c]
  using Stat = typename Term::Stat;
  const int column = threadIdx.x % g.columns, row = threadIdx.x / g.columns;
  const RowTile t = row_tile<N>(g, column);
  const bool inside = row < g.rows && t.channel < g.c;
  Stat stats[N];
  typename Term::template Factors<N> factors;
  if (inside) term.template factors<N>(t.sample * g.c + t.channel, factors);
  const int64_t step = g.rows * g.c;
  int64_t offset = (t.sample * g.hw + t.begin + row) * g.c + t.channel;
  for (int left = inside ? t.size - row : 0; left > 0; left -= Term::kUnroll * g.rows) {
    typename Term::template Raw<N> raw[Term::kUnroll];
#pragma unroll
    for (int u = 0; u < Term::kUnroll; ++u) {
      if (u * g.rows < left) raw[u] = term.template load<N>(offset + u * step);
    }
#pragma unroll
    for (int u = 0; u < Term::kUnroll; ++u) {
      if (u * g.rows < left) term.template add<N>(raw[u], offset + u * step, factors, stats);
    }
    offset += Term::kUnroll * step;
  }
  merge_rows(stats, row, g.rows, g.columns, shared_memory<typename Term::A>());
  if (row != 0 || !inside) return;
  typename Term::A* p = partial + (t.sample * int64_t{g.chunks} + t.chunk) * Stat::kParts * g.c + t.channel;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (g.chunks == 1) {
      term.finish(t.sample * g.c + t.channel + j, stats[j]);
    } else {
#pragma unroll
      for (int i = 0; i < Stat::kParts; ++i) p[i * g.c + j] = stats[j].part[i];
    }
  }
}

template <class Term>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    reduce_finish_kernel(Term term, const typename Term::A* __restrict__ partial,  // [n, chunks, parts, c]
                         int64_t planes, int64_t c, int64_t chunks) {
  using Stat = typename Term::Stat;
  const int64_t nc = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (nc >= planes) return;
  const typename Term::A* p = partial + nc / c * chunks * Stat::kParts * c + nc % c;
  Stat stat;
  for (int64_t first = 0; first < chunks; first += kRun) {
    const int64_t last = first + kRun < chunks ? first + kRun : chunks;
    Stat run;
#pragma unroll 4
    for (int64_t k = first; k < last; ++k) {
      Stat other;
#pragma unroll
      for (int i = 0; i < Stat::kParts; ++i) other.part[i] = p[(k * Stat::kParts + i) * c];
      run.merge(other);
    }
    stat.merge(run);
  }
  term.finish(nc, stat);
}

template <class Term, int N>
__global__ void __launch_bounds__(kThreads, Term::kBlocks) map_rows_kernel(Term term, RowTiles g) {
  const int column = threadIdx.x % g.columns, row = threadIdx.x / g.columns;
  const RowTile t = row_tile<N>(g, column);
  if (row >= g.rows || t.channel >= g.c) return;
  typename Term::template Factors<N> factors;
  term.template factors<N>(t.sample * g.c + t.channel, factors);
  const int64_t step = g.rows * g.c;
  int64_t offset = (t.sample * g.hw + t.begin + row) * g.c + t.channel;
  for (int left = t.size - row; left > 0; left -= Term::kUnroll * g.rows) {
    typename Term::template Raw<N> raw[Term::kUnroll];
#pragma unroll
    for (int u = 0; u < Term::kUnroll; ++u) {
      if (u * g.rows < left) raw[u] = term.template load<N>(offset + u * step);
    }
#pragma unroll
    for (int u = 0; u < Term::kUnroll; ++u) {
      if (u * g.rows < left) term.template apply<N>(raw[u], offset + u * step, factors);
    }
    offset += Term::kUnroll * step;
  }
}

// --- contiguous: [n, c, hw] = [planes, hw] --------------------------------------------------------------------------

// `group` threads reduce a plane, a power of two: every one has kFewPacks at least, which make up for what the thread
// itself costs.
struct PlaneGroups {
  int64_t planes, hw, blocks;
  int group;
};

// Narrow packs come in larger numbers.
template <class Term, int N>
constexpr int kPlaneUnroll = std::min(Term::kUnroll * Term::N / N, 8);

template <int N>
PlaneGroups plane_groups(const Images& images) {
  constexpr int kFewPacks = 8;
  int group = 1;
  while (group < kThreads && 2 * group * kFewPacks * N <= images.hw) group *= 2;
  const int64_t planes = images.n * images.c;
  return {planes, images.hw, ceil_div<int64_t>(planes, kThreads / group), group};
}

// Merges the stats of the threads of each group; the group's first thread gets the result. The whole block calls it.
template <class Stat, class A>
__device__ __forceinline__ void merge_group(Stat& stat, int group, A* shared) {
  Stat other;
  for (int step = (group < kWarp ? group : kWarp) / 2; step > 0; step /= 2) {
#pragma unroll
    for (int p = 0; p < Stat::kParts; ++p) other.part[p] = __shfl_xor_sync(kFullWarp, stat.part[p], step);
    stat.merge(other);
  }
  if (group <= kWarp) return;
#pragma unroll
  for (int p = 0; p < Stat::kParts; ++p) {
    if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp * Stat::kParts + p] = stat.part[p];
  }
  __syncthreads();
  const int warp = threadIdx.x / kWarp;
  for (int w = 1; w < group / kWarp && threadIdx.x % group == 0; ++w) {
#pragma unroll
    for (int p = 0; p < Stat::kParts; ++p) other.part[p] = shared[(warp + w) * Stat::kParts + p];
    stat.merge(other);
  }
  __syncthreads();
}

// hw is a multiple of N.
template <class Term, int N>
__global__ void __launch_bounds__(kThreads, Term::kBlocks) reduce_planes_kernel(Term term, PlaneGroups g) {
  using Stat = typename Term::Stat;
  constexpr int kUnroll = kPlaneUnroll<Term, N>;
  const int lane = threadIdx.x % g.group, step = g.group * N;
  const int64_t plane = int64_t{blockIdx.x} * (kThreads / g.group) + threadIdx.x / g.group;
  const int64_t begin = plane * g.hw, end = plane < g.planes ? begin + g.hw : begin;
  typename Term::template Factors<N> factors;
  if (begin < end) {
    typename Term::template Factors<1> factor;
    term.factor(plane, factor);
    factors.fill(factor);
  }
  Stat total[1];
  for (int64_t i = begin + lane * N; i < end;) {
    const int64_t run_end = i + kRun * Term::kUnroll * step, stop = run_end < end ? run_end : end;
    Stat stats[N];
    for (; i < stop; i += kUnroll * step) {
      typename Term::template Raw<N> raw[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (i + u * step < end) raw[u] = term.template load<N>(i + u * step);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (i + u * step < end) term.template add<N>(raw[u], i + u * step, factors, stats);
      }
    }
#pragma unroll
    for (int j = 1; j < N; ++j) stats[0].merge(stats[j]);
    total[0].merge(stats[0]);
  }
  merge_group(total[0], g.group, shared_memory<typename Term::A>());
  if (lane == 0 && plane < g.planes) term.finish(plane, total[0]);
}

// i / d for 0 <= i < 2^63 by a multiplication, since the 64-bit division is a call.
struct Divisor {
  int64_t d;
  uint64_t multiplier;  // 2^(63 + shift) / d, rounded up
  int shift;            // ceil(log2(d))

  explicit Divisor(int64_t divisor) : d(std::max<int64_t>(divisor, 1)), shift(0) {
    while (int64_t{1} << shift < d) ++shift;
    multiplier = static_cast<uint64_t>(((static_cast<unsigned __int128>(1) << (63 + shift)) + d - 1) / d);
  }
  __device__ int64_t quotient(int64_t i) const {
    return static_cast<int64_t>(__umul64hi(2 * static_cast<uint64_t>(i), multiplier) >> shift);
  }
  __device__ int64_t remainder(int64_t i) const { return i - quotient(i) * d; }
};

// Tiles of consecutive elements, whatever planes those belong to.
struct PlaneTiles {
  int64_t elements;
  Divisor hw;
  bool packs;           // else every element is taken by itself
  unsigned length;      // hw, or the elements of a tile where those are fewer: only the end of a plane matters then
  unsigned multiplier;  // 2^31 / length, rounded up

  PlaneTiles(const Images& images, int tile, bool packs)
      : elements(images.n * images.c * images.hw),
        hw(images.hw),
        packs(packs),
        length(static_cast<unsigned>(std::min<int64_t>(images.hw, tile))),
        multiplier(ceil_div(0x80000000u, length)) {}
};

// A pack belongs to one plane where hw is a multiple of N (kWhole), else to two at most: hw is N or more.
template <class Term, int N, bool kWhole>
__global__ void __launch_bounds__(kThreads, Term::kBlocks) map_planes_kernel(Term term, PlaneTiles g) {
  constexpr int kTile = kThreads * N * Term::kUnroll;
  const int64_t base = int64_t{blockIdx.x} * kTile, plane = g.hw.quotient(base);
  const int64_t rest = g.elements - base, left = (plane + 1) * g.hw.d - base;
  const int count = rest < kTile ? static_cast<int>(rest) : kTile, packed = g.packs ? count / N * N : 0;
  const unsigned start = left < g.length ? g.length - static_cast<unsigned>(left) : 0;  // of the tile in its plane
  const int thread = static_cast<int>(threadIdx.x);
  typename Term::template Raw<N> raw[Term::kUnroll];
#pragma unroll
  for (int u = 0; u < Term::kUnroll; ++u) {
    const int i = (u * kThreads + thread) * N;
    if (i < packed) raw[u] = term.template load<N>(base + i);
  }
#pragma unroll
  for (int u = 0; u < Term::kUnroll; ++u) {
    const int i = (u * kThreads + thread) * N;
    if (i >= packed) break;
    const unsigned at = start + i, skipped = __umulhi(2 * at, g.multiplier), split = (skipped + 1) * g.length - at;
    typename Term::template Factors<1> first, second;
    typename Term::template Factors<N> factors;
    term.factor(plane + skipped, first);
    if constexpr (kWhole) {
      factors.fill(first);
    } else {
      term.factor(plane + skipped + (split < N ? 1 : 0), second);
      factors.fill(static_cast<int>(split), first, second);
    }
    term.template apply<N>(raw[u], base + i, factors);
  }
#pragma unroll 1
  for (int i = packed + thread; i < count; i += kThreads) {  // without packs all of it, else the tensor's tail
    typename Term::template Factors<1> factor;
    term.factor(plane + __umulhi(2 * (start + i), g.multiplier), factor);
    term.template apply<1>(term.template load<1>(base + i), base + i, factor);
  }
}

// A term for where few kernels are worth more than fast ones: rows that no pack fits, and what knows no activation.
template <class Term>
auto at_run_time(const Term& term) {
  if constexpr (requires { typename Term::AtRunTime; }) {
    return std::bit_cast<typename Term::AtRunTime>(term);
  } else {
    return term;
  }
}

// --- launchers ------------------------------------------------------------------------------------------------------

template <int N, class Term>
[[nodiscard]] int reduce_rows(const Images& images, const Term& term, int64_t min_chunk, void* partial, void* stream,
                              int64_t* parts) {
  using A = typename Term::A;
  const RowTiles g = row_tiles<N>(images, min_chunk, 64 / sizeof(A));
  const size_t shared_bytes = g.rows > 1 ? g.threads() * N * Term::Stat::kParts * sizeof(A) : 0;
  const int code = launch(reduce_rows_kernel<Term, N>, g.blocks, g.threads(), shared_bytes, stream, term, g,
                          static_cast<A*>(partial));
  if (parts != nullptr) *parts = images.n * g.chunks;
  if (code != cudaSuccess || parts != nullptr || g.chunks <= 1) return code;
  const int64_t planes = images.n * images.c;
  auto finish = at_run_time(term);
  return launch(reduce_finish_kernel<decltype(finish)>, ceil_div<int64_t>(planes, kThreads), kThreads, 0, stream,
                finish, static_cast<const A*>(partial), planes, images.c, g.chunks);
}

template <int N, class Term>
[[nodiscard]] int reduce_planes(const Images& images, const Term& term, void* stream) {
  const PlaneGroups g = plane_groups<N>(images);
  const size_t shared_bytes = kThreads / kWarp * sizeof(typename Term::Stat);
  return launch(reduce_planes_kernel<Term, N>, g.blocks, kThreads, shared_bytes, stream, term, g);
}

// partial: [n, reduce_chunks(images), parts, c], used for channels_last only; see csrc/channel_pool.h. With `parts` its
// chunks are left to the caller and counted; a lone chunk of a sample, or a plane, still goes to Term::finish.
template <class Term>
[[nodiscard]] int reduce(const Images& images, const Term& term, bool aligned, int64_t min_chunk, void* partial,
                         void* stream, int64_t* parts = nullptr) {
  constexpr int N = Term::N;
  if (images.layout == Layout::kChannelsLast) {
    return aligned && images.c % N == 0 ? reduce_rows<N>(images, term, min_chunk, partial, stream, parts)
                                        : reduce_rows<1>(images, at_run_time(term), min_chunk, partial, stream, parts);
  }
  if (parts != nullptr) *parts = images.n;
  if (aligned && images.hw % N == 0) return reduce_planes<N>(images, term, stream);
  if (N >= 4 && aligned && images.hw % (N / 2) == 0) return reduce_planes<(N + 1) / 2>(images, term, stream);
  return reduce_planes<1>(images, term, stream);
}

template <int N, class Term>
[[nodiscard]] int map_rows(const Images& images, const Term& term, void* stream) {
  const RowTiles g = row_tiles<N>(images, 1, 8);
  return launch(map_rows_kernel<Term, N>, g.blocks, g.threads(), 0, stream, term, g);
}

template <class Term>
[[nodiscard]] int map(const Images& images, const Term& term, bool aligned, void* stream) {
  constexpr int N = Term::N;
  const int64_t elements = images.n * images.c * images.hw;
  if (elements == 0) return cudaSuccess;
  if (images.layout == Layout::kChannelsLast) {
    return aligned && images.c % N == 0 ? map_rows<N>(images, term, stream)
                                        : map_rows<1>(images, at_run_time(term), stream);
  }
  const bool whole = images.hw % N == 0;
  constexpr int kTile = kThreads * N * Term::kUnroll;
  return launch(whole ? map_planes_kernel<Term, N, true> : map_planes_kernel<Term, N, false>,
                ceil_div<int64_t>(elements, kTile), kThreads, 0, stream, term,
                PlaneTiles(images, kTile, aligned && images.hw >= N));
}

// An activation of elements of type T as an object: known at compile time, or one of all at run time. Kernels of the
// latter are the larger ones.
template <Activation kA, class T>
struct StaticAct {
  static constexpr bool kIdentity = kA == Activation::kIdentity;
  static constexpr int kBlocks = 3;
  Activation a;
  template <class V>
  __device__ V value(V x) const {
    return Act<kA, T>::value(x);
  }
  template <class V>
  __device__ V slope(V x) const {
    return Act<kA, T>::slope(x);
  }
  template <class V>
  __device__ V through(V x, V dy) const {
    return Act<kA, T>::through(x, dy);
  }
};
struct RunTimeAct {
  using Any = AnyAct<Activation::kIdentity, Activation::kRelu, Activation::kSilu, Activation::kGelu,
                     Activation::kHardSwish, Activation::kRelu6, Activation::kSigmoid, Activation::kHardSigmoid,
                     Activation::kTanh, Activation::kHalfTanh>;
  static constexpr bool kIdentity = false;
  static constexpr int kBlocks = kMinBlocks;
  Activation a;
  template <class V>
  __device__ V value(V x) const {
    return Any::value(a, x);
  }
  template <class V>
  __device__ V slope(V x) const {
    return a == Activation::kIdentity ? V(1) : Any::slope(a, x);
  }
  template <class V>
  __device__ V through(V x, V dy) const {
    return a == Activation::kIdentity ? dy : Any::through(a, x, dy);
  }
};

// Returns f.template operator()<T, Act>(): what convolutional networks use has kernels of its own.
template <class F>
[[nodiscard]] int visit_images(DType dtype, Activation act, F&& f) {
  using enum Activation;
  return visit_element(dtype, [&]<class T>() -> int {
    int code = cudaErrorInvalidValue;
    if constexpr (!std::is_same_v<T, double>) {
      if (visit<kIdentity, kRelu, kSilu, kHardSwish>(
              act, [&]<Activation A>() { code = f.template operator()<T, StaticAct<A, T>>(); })) {
        return code;
      }
    }
    return f.template operator()<T, RunTimeAct>();
  });
}

}  // namespace fusedtrain::cuda

#pragma once
// The four walks over a batch of images that pooling and scaling consist of.
//
//                  reduce: one Stat per (n, c)                     map: every element, with factors of its (n, c)
//   channels_last  reduce_rows_kernel (+ reduce_finish_kernel)     map_rows_kernel
//   contiguous     reduce_planes_kernel                            map_planes_kernel
//
// A Term says what happens to the elements, N at a time:
//   reduce: Stat; Raw<N> = load<N>(offset, width); add<N>(raw, f, stats[N]); finish(nc, stat); Factors<N> as below
//   map:    Raw<N> = load<N>(offset); Factors<N>; factors<N>(nc, f) of N channels; factor(nc, j, f) of one plane;
//           apply<N>(raw, offset, f)
// A Term that reduces without factors is a NoFactors.
// N is kPack<T> where rows and pointers are aligned, else 1; planes are always taken N elements at a time, read in
// pieces of `width`. All sums run in an order that depends on c, hw and, in channels_last, the alignment: not on the
// batch, the grid or the device.
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
    __device__ void take(int, const Factors<1>&) {}
  };
  template <int N>
  __device__ void factors(int64_t, Factors<N>&) const {}
  template <int N>
  __device__ void factor(int64_t, int, Factors<N>&) const {}
};

// K factors for N elements.
template <class A, int K, int N>
struct FactorPack {
  Pack<A, N> f[K];

  __device__ void copy(int from, int to) {
#pragma unroll
    for (int k = 0; k < K; ++k) f[k].v[to] = f[k].v[from];
  }
  __device__ void take(int to, const FactorPack<A, K, 1>& one) {
#pragma unroll
    for (int k = 0; k < K; ++k) f[k].v[to] = one.f[k].v[0];
  }
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
  int64_t channel, begin, end;
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
  t.end = t.begin + g.chunk < g.hw ? t.begin + g.chunk : g.hw;
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
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    reduce_rows_kernel(Term term, RowTiles g, typename Term::A* __restrict__ partial) {  // [n, chunks, parts, c]
  using Stat = typename Term::Stat;
  const int column = threadIdx.x % g.columns, row = threadIdx.x / g.columns;
  const RowTile t = row_tile<N>(g, column);
  const bool inside = row < g.rows && t.channel < g.c;
  Stat stats[N];
  typename Term::template Factors<N> factors;
  if (inside) term.template factors<N>(t.sample * g.c + t.channel, factors);
  for (int64_t i = t.begin + row; i < t.end && inside; i += Term::kUnroll * g.rows) {
    const int64_t offset = (t.sample * g.hw + i) * g.c + t.channel, step = g.rows * g.c;
    typename Term::template Raw<N> raw[Term::kUnroll];
#pragma unroll
    for (int u = 0; u < Term::kUnroll; ++u) {
      if (i + u * g.rows < t.end) raw[u] = term.template load<N>(offset + u * step, N);
    }
#pragma unroll
    for (int u = 0; u < Term::kUnroll; ++u) {
      if (i + u * g.rows < t.end) term.template add<N>(raw[u], factors, stats);
    }
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
__global__ void __launch_bounds__(kThreads, kMinBlocks) map_rows_kernel(Term term, RowTiles g) {
  const int column = threadIdx.x % g.columns, row = threadIdx.x / g.columns;
  const RowTile t = row_tile<N>(g, column);
  if (row >= g.rows || t.channel >= g.c) return;
  typename Term::template Factors<N> factors;
  term.template factors<N>(t.sample * g.c + t.channel, factors);
  for (int64_t i = t.begin + row; i < t.end; i += Term::kUnroll * g.rows) {
    const int64_t offset = (t.sample * g.hw + i) * g.c + t.channel, step = g.rows * g.c;
    typename Term::template Raw<N> raw[Term::kUnroll];
#pragma unroll
    for (int u = 0; u < Term::kUnroll; ++u) {
      if (i + u * g.rows < t.end) raw[u] = term.template load<N>(offset + u * step);
    }
#pragma unroll
    for (int u = 0; u < Term::kUnroll; ++u) {
      if (i + u * g.rows < t.end) term.template apply<N>(raw[u], offset + u * step, factors);
    }
  }
}

// --- contiguous: [n, c, hw] = [planes, hw] --------------------------------------------------------------------------

// `group` threads reduce a plane: 1 to 32, or the whole block. Every plane is aligned to `width` elements.
struct PlaneGroups {
  int64_t planes, hw, blocks;
  int group, width;
};

template <int N, int kUnroll>
PlaneGroups plane_groups(const Images& images, bool aligned) {
  const int64_t packs = ceil_div<int64_t>(images.hw, N);
  int group = kThreads;
  if (packs <= 2 * kUnroll * kWarp) {
    for (group = 1; group < kWarp && group * kUnroll < packs;) group *= 2;
  }
  int width = aligned ? N : 1;
  while (images.hw % width != 0) width /= 2;
  const int64_t planes = images.n * images.c;
  return {planes, images.hw, ceil_div<int64_t>(planes, kThreads / group), group, width};
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
  for (int w = 1; w < kThreads / kWarp && threadIdx.x == 0; ++w) {
#pragma unroll
    for (int p = 0; p < Stat::kParts; ++p) other.part[p] = shared[w * Stat::kParts + p];
    stat.merge(other);
  }
  __syncthreads();
}

// The packs of a plane start at its first element, wherever that lies in memory; what fills none is taken by itself.
template <class Term, int N>
__global__ void __launch_bounds__(kThreads, kMinBlocks) reduce_planes_kernel(Term term, PlaneGroups g) {
  using Stat = typename Term::Stat;
  const int lane = threadIdx.x % g.group, step = g.group * N;
  const int64_t plane = int64_t{blockIdx.x} * (kThreads / g.group) + threadIdx.x / g.group;
  const int64_t begin = plane * g.hw, end = plane < g.planes ? begin + g.hw : begin;
  const int64_t packed = begin + (end - begin) / N * N;
  typename Term::template Factors<N> factors;
  typename Term::template Factors<1> factor;
  if (begin < end) {
    term.factor(plane, 0, factor);
#pragma unroll
    for (int j = 0; j < N; ++j) factors.take(j, factor);
  }
  Stat total;
  for (int64_t i = begin + lane * N; i < packed;) {
    const int64_t run_end = i + kRun * Term::kUnroll * step, stop = run_end < packed ? run_end : packed;
    Stat stats[N];
    for (; i < stop; i += Term::kUnroll * step) {
      typename Term::template Raw<N> raw[Term::kUnroll];
#pragma unroll
      for (int u = 0; u < Term::kUnroll; ++u) {
        if (i + u * step < packed) raw[u] = term.template load<N>(i + u * step, g.width);
      }
#pragma unroll
      for (int u = 0; u < Term::kUnroll; ++u) {
        if (i + u * step < packed) term.template add<N>(raw[u], factors, stats);
      }
    }
#pragma unroll
    for (int j = 1; j < N; ++j) stats[0].merge(stats[j]);
    total.merge(stats[0]);
  }
  Stat single[1] = {total};
  for (int64_t i = packed + lane; i < end; i += g.group) {
    term.template add<1>(term.template load<1>(i, 1), factor, single);
  }
  merge_group(single[0], g.group, shared_memory<typename Term::A>());
  if (lane == 0 && plane < g.planes) term.finish(plane, single[0]);
}

struct Quotient {
  int64_t value, remainder;
};

// i / d and i % d for i < 2^51, given 1 / d: the 64-bit division is a call.
__device__ __forceinline__ Quotient divide_by(int64_t i, int64_t d, double inverse) {
  Quotient q;
  q.value = static_cast<int64_t>(static_cast<double>(i) * inverse);
  q.remainder = i - q.value * d;
  if (q.remainder < 0) return {q.value - 1, q.remainder + d};
  if (q.remainder >= d) return {q.value + 1, q.remainder - d};
  return q;
}

// (remainder + i) / d and % d for remainder < d and i < 2^30, in 32 bits.
__device__ __forceinline__ Quotient divide_near(int64_t remainder, int i, int64_t d) {
  if (d >= int64_t{1} << 30) {
    const int64_t sum = remainder + i;
    return sum >= d ? Quotient{1, sum - d} : Quotient{0, sum};
  }
  const unsigned sum = static_cast<unsigned>(remainder) + static_cast<unsigned>(i);
  const unsigned value = sum / static_cast<unsigned>(d);
  return {value, sum - value * static_cast<unsigned>(d)};
}

// Fills the factors of the N elements from (plane, position) on, which may belong to several planes.
template <int N, class Term, class Factors>
__device__ __forceinline__ void plane_factors(const Term& term, int64_t plane, int64_t left, int64_t hw,
                                              Factors& factors) {
#pragma unroll
  for (int j = 0; j < N; ++j, --left) {
    if (j > 0 && left > 0) {
      factors.copy(j - 1, j);
      continue;
    }
    if (j > 0) ++plane, left = hw;
    term.factor(plane, j, factors);
  }
}

template <class Term, int N>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    map_planes_kernel(Term term, int64_t elements, int64_t hw, double inverse_hw, bool aligned) {
  constexpr int kTile = kThreads * N * Term::kUnroll;
  const int64_t base = int64_t{blockIdx.x} * kTile;
  const auto [plane, position] = divide_by(base, hw, inverse_hw);
  const int64_t packed = aligned ? elements / N * N : 0;
  typename Term::template Raw<N> raw[Term::kUnroll];
#pragma unroll
  for (int u = 0; u < Term::kUnroll; ++u) {
    const int64_t at = base + (u * kThreads + static_cast<int>(threadIdx.x)) * N;
    if (at < packed) raw[u] = term.template load<N>(at);
  }
#pragma unroll
  for (int u = 0; u < Term::kUnroll; ++u) {
    const int i = (u * kThreads + static_cast<int>(threadIdx.x)) * N;
    if (base + i >= packed) continue;
    const Quotient q = divide_near(position, i, hw);
    typename Term::template Factors<N> factors;
    plane_factors<N>(term, plane + q.value, hw - q.remainder, hw, factors);
    term.template apply<N>(raw[u], base + i, factors);
  }
  for (int i = threadIdx.x; i < kTile; i += kThreads) {  // without alignment all of it, else the tensor's tail
    if (base + i < packed || base + i >= elements) continue;
    const Quotient q = divide_near(position, i, hw);
    typename Term::template Factors<1> factors;
    term.factor(plane + q.value, 0, factors);
    term.template apply<1>(term.template load<1>(base + i), base + i, factors);
  }
}

// --- launchers ------------------------------------------------------------------------------------------------------

template <class Term, int N>
[[nodiscard]] int reduce_rows(const Images& images, const Term& term, int64_t min_chunk, void* partial, void* stream,
                              int64_t* parts) {
  using A = typename Term::A;
  const RowTiles g = row_tiles<N>(images, min_chunk, 2 * Term::kUnroll);
  const size_t shared_bytes = g.rows > 1 ? g.threads() * N * Term::Stat::kParts * sizeof(A) : 0;
  const int code = launch(reduce_rows_kernel<Term, N>, g.blocks, g.threads(), shared_bytes, stream, term, g,
                          static_cast<A*>(partial));
  if (parts != nullptr) *parts = images.n * g.chunks;
  if (code != cudaSuccess || parts != nullptr || g.chunks <= 1) return code;
  const int64_t planes = images.n * images.c;
  return launch(reduce_finish_kernel<Term>, ceil_div<int64_t>(planes, kThreads), kThreads, 0, stream, term,
                static_cast<const A*>(partial), planes, images.c, g.chunks);
}

// partial: [n, reduce_chunks(images), parts, c], used for channels_last only; see csrc/channel_pool.h. With `parts` its
// chunks are left to the caller and counted; a lone chunk of a sample, or a plane, still goes to Term::finish.
template <class Term>
[[nodiscard]] int reduce(const Images& images, const Term& term, bool aligned, int64_t min_chunk, void* partial,
                         void* stream, int64_t* parts = nullptr) {
  constexpr int N = Term::N;
  if (images.layout == Layout::kChannelsLast) {
    return aligned && images.c % N == 0 ? reduce_rows<Term, N>(images, term, min_chunk, partial, stream, parts)
                                        : reduce_rows<Term, 1>(images, term, min_chunk, partial, stream, parts);
  }
  if (parts != nullptr) *parts = images.n;
  const PlaneGroups g = plane_groups<N, Term::kUnroll>(images, aligned);
  const size_t shared_bytes = kThreads / kWarp * sizeof(typename Term::Stat);
  return launch(reduce_planes_kernel<Term, N>, g.blocks, kThreads, shared_bytes, stream, term, g);
}

template <class Term, int N>
[[nodiscard]] int map_rows(const Images& images, const Term& term, void* stream) {
  const RowTiles g = row_tiles<N>(images, 1, 2 * Term::kUnroll);
  return launch(map_rows_kernel<Term, N>, g.blocks, g.threads(), 0, stream, term, g);
}

template <class Term>
[[nodiscard]] int map(const Images& images, const Term& term, bool aligned, void* stream) {
  constexpr int N = Term::N;
  const int64_t elements = images.n * images.c * images.hw;
  if (elements == 0) return cudaSuccess;
  if (images.layout == Layout::kChannelsLast) {
    return aligned && images.c % N == 0 ? map_rows<Term, N>(images, term, stream)
                                        : map_rows<Term, 1>(images, term, stream);
  }
  return launch(map_planes_kernel<Term, N>, ceil_div<int64_t>(elements, kThreads * N * Term::kUnroll), kThreads, 0,
                stream, term, elements, images.hw, 1.0 / static_cast<double>(images.hw), aligned);
}

// An activation as an object: known at compile time, or one of all at run time.
template <Activation kA>
struct StaticAct {
  static constexpr bool kIdentity = kA == Activation::kIdentity;
  Activation a;
  template <class V>
  __device__ V value(V x) const {
    return Act<kA>::value(x);
  }
  template <class V>
  __device__ V slope(V x) const {
    return Act<kA>::slope(x);
  }
};
struct RunTimeAct {
  using Any = AnyAct<Activation::kIdentity, Activation::kRelu, Activation::kSilu, Activation::kGelu,
                     Activation::kHardSwish, Activation::kRelu6, Activation::kSigmoid, Activation::kHardSigmoid,
                     Activation::kTanh, Activation::kHalfTanh>;
  static constexpr bool kIdentity = false;
  Activation a;
  template <class V>
  __device__ V value(V x) const {
    return Any::value(a, x);
  }
  template <class V>
  __device__ V slope(V x) const {
    return a == Activation::kIdentity ? V(1) : Any::slope(a, x);
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
              act, [&]<Activation A>() { code = f.template operator()<T, StaticAct<A>>(); })) {
        return code;
      }
    }
    return f.template operator()<T, RunTimeAct>();
  });
}

}  // namespace fusedtrain::cuda

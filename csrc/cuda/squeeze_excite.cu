// The gate network of squeeze_excite on CUDA: two launches forward, two backward and one for the weights.
//
//   forward   hidden[n, r]  = sum_c pooled[n, c] w1[r, c] + b1[r]
//             logits[n, c]  = sum_r act(hidden[n, r]) w2[c, r] + b2[c]        gate = gate_act(logits)
//   backward  dhidden[n, r] = sum_c dlogits[n, c] w2[c, r] * act'(hidden)     dlogits = dgate * gate_act'(logits)
//             dpooled[n, c] = sum_r dhidden[n, r] w1[r, c]
//   weights   dw1[r, c] = sum_n dhidden[n, r] pooled[n, c]                    db1[r] = sum_n dhidden[n, r]
//             dw2[c, r] = sum_n dlogits[n, c] act(hidden[n, r])               db2[c] = sum_n dlogits[n, c]
//
// Everything is small: what counts is how often a thread waits for memory, so it asks for many weights at a time. These
// are of type W, that of the parameters. All sums run in an order that depends on c and r and the alignment of the
// weights, and on n for theirs.
#include "core/cuda.h"
#include "squeeze_excite.h"

namespace fusedtrain::cuda {
namespace {

using Any = AnyAct<Activation::kIdentity, Activation::kRelu, Activation::kSilu, Activation::kGelu,
                   Activation::kHardSwish, Activation::kRelu6, Activation::kSigmoid, Activation::kHardSigmoid,
                   Activation::kTanh, Activation::kHalfTanh>;

struct Sizes {
  int64_t n, in, out;
};

// Lane l gets the sum over the warp of v[l], in a fixed order: half of the lanes keep half of the sums, and so on.
template <int kHalf = kWarp / 2, class A>
__device__ __forceinline__ A warp_sums(A (&v)[kWarp]) {
  const bool upper = (threadIdx.x & kHalf) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const A kept = upper ? v[i + kHalf] : v[i], given = upper ? v[i] : v[i + kHalf];
    v[i] = kept + __shfl_xor_sync(kFullWarp, given, kHalf);
  }
  if constexpr (kHalf > 1) {
    return warp_sums<kHalf / 2>(v);
  } else {
    return v[0];
  }
}

// --- forward: y[n, out] = x[n, in] w[out, in]^T + b ------------------------------------------------------------------

constexpr int kSamples = 8;  // samples and outputs that a group of threads computes together
constexpr int kOutputs = kWarp / kSamples;
template <class A>
constexpr int kMostThreads = 2048 / sizeof(A);

template <class A, class W>
struct Linear {
  Sizes s;
  const A* x;    // [n, in]
  const W* w;    // [out, in]
  const W* b;    // [out] or null
  A* y;          // [n, out]
  A* activated;  // [n, out], act(y)
  Activation act;
};

// `lanes` threads split the inputs: a warp or the whole block.
template <class A, class W, int N>
__global__ void __launch_bounds__(kMostThreads<A>, 1) linear_kernel(Linear<A, W> a, int lanes, unsigned tiles) {
  const int lane = threadIdx.x % kWarp, group = threadIdx.x / lanes, groups = blockDim.x / lanes;
  const int64_t sample = int64_t{blockIdx.x / tiles} * kSamples;
  const int64_t first = (int64_t{blockIdx.x % tiles} * groups + group) * kOutputs;
  A sums[kWarp] = {};  // [kOutputs, kSamples]
#pragma unroll 1
  for (int64_t k = threadIdx.x % lanes * N; k < a.s.in; k += lanes * N) {
    Pack<W, N> w[kOutputs] = {};
    Pack<A, N> x[kSamples] = {};
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      if (first + o < a.s.out) w[o] = load<N>(a.w + (first + o) * a.s.in + k);
    }
#pragma unroll
    for (int s = 0; s < kSamples; ++s) {
      if (sample + s < a.s.n) x[s] = load<N>(a.x + (sample + s) * a.s.in + k);
    }
#pragma unroll
    for (int i = 0; i < kWarp; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) sums[i] += to_acc(w[i / kSamples].v[j]) * x[i % kSamples].v[j];
    }
  }
  A mine = warp_sums(sums);  // lane o * kSamples + s has output `o` of sample `s`
  if (lanes > kWarp) {
    A* shared = shared_memory<A>();  // [warps, 32]
    shared[threadIdx.x] = mine;
    __syncthreads();
    if (threadIdx.x >= kWarp) return;
    for (int i = lane + kWarp; i < lanes; i += kWarp) mine += shared[i];
  }
  const int64_t n = sample + lane % kSamples, out = first + lane / kSamples;
  if (n >= a.s.n || out >= a.s.out) return;
  if (a.b != nullptr) mine += to_acc(a.b[out]);
  a.y[n * a.s.out + out] = mine;
  a.activated[n * a.s.out + out] = Any::value(a.act, mine);
}

template <class A, class W, int N>
int linear(const Linear<A, W>& a, void* stream) {
  const int64_t packs = ceil_div<int64_t>(a.s.in, N);
  const bool whole = packs > 4 * kWarp;
  const int lanes =
      whole ? static_cast<int>(std::min<int64_t>(kMostThreads<A>, ceil_div<int64_t>(packs, kWarp) * kWarp)) : kWarp;
  const int threads = whole ? lanes : kThreads;
  const int64_t tiles = ceil_div<int64_t>(a.s.out, threads / lanes * kOutputs);
  return launch(linear_kernel<A, W, N>, ceil_div<int64_t>(a.s.n, kSamples) * tiles, threads, threads * sizeof(A),
                stream, a, lanes, static_cast<unsigned>(tiles));
}

template <class A, class W>
int linear(const Linear<A, W>& a, void* stream) {
  constexpr int N = kPack<A>;
  return a.s.in % N == 0 && is_aligned(a.x, a.w) ? linear<A, W, N>(a, stream) : linear<A, W, 1>(a, stream);
}

template <class A, class W>
int forward(const SqueezeExcite& a, void* stream) {
  const auto in = [](const void* p) { return static_cast<const A*>(p); };
  const auto weight = [](const void* p) { return static_cast<const W*>(p); };
  const auto out = [](void* p) { return static_cast<A*>(p); };
  const Linear<A, W> reduce{{a.n, a.c, a.r}, in(a.pooled),     weight(a.w1), weight(a.b1),
                            out(a.hidden),   out(a.activated), a.act};
  const Linear<A, W> expand{{a.n, a.r, a.c}, in(a.activated), weight(a.w2), weight(a.b2),
                            out(a.logits),   out(a.gate),     a.gate_act};
  const int code = linear(reduce, stream);
  return code != cudaSuccess ? code : linear(expand, stream);
}

// --- backward: dx[n, out] = slope(at[n, out]) * (dy[n, in] w[in, out])
// --------------------------------------------------

// dy is given, or dgate * gate_act'(logits), which is then written, beside gate_act(logits).
template <class A, class W>
struct LinearBackward {
  Sizes s;
  const W* w;       // [in, out]
  const A* dy;      // [n, in], or null with dgate, logits, dlogits and gate
  const A* dgate;   // [n, in]
  const A* logits;  // [n, in]
  A* dlogits;       // [n, in]
  A* gate;          // [n, in]
  Activation gate_act;
  A* dx;            // [n, out]
  const A* hidden;  // [n, out], or null with activated
  A* activated;     // [n, out], act(hidden)
  Activation act;
};

constexpr int kDySamples = 4;  // samples that a block takes through one read of the weights
constexpr int kRead = 8;       // weights that a thread asks for at a time
template <class A>
constexpr int kSplit = 4096 / sizeof(A);  // threads of a block that has many inputs
template <class A>
constexpr int kDepth = 8192 / sizeof(A);  // inputs of a layer that stand in shared memory at a time

// Puts inputs [at, at + depth) of kDySamples samples into shared memory.
template <class A, class W>
__device__ __forceinline__ void load_dy(const LinearBackward<A, W>& a, int64_t sample, int64_t at, int depth,
                                        bool write, A* dy) {
#pragma unroll
  for (int s = 0; s < kDySamples; ++s) {
    const bool inside = sample + s < a.s.n;
    for (int k = threadIdx.x; k < depth; k += blockDim.x) {
      const int64_t i = (sample + s) * a.s.in + at + k;
      A value = A(0);
      if (inside && a.dy != nullptr) value = a.dy[i];
      if (inside && a.dy == nullptr) {
        const A logit = a.logits[i];
        value = Any::through(a.gate_act, logit, A(a.dgate[i]));
        if (write) {
          a.dlogits[i] = value;
          a.gate[i] = Any::value(a.gate_act, logit);
        }
      }
      dy[s * kDepth<A> + k] = value;
    }
  }
}

// A block computes 32 outputs of kDySamples samples; its warps split the inputs.
template <class A, class W>
__global__ void __launch_bounds__(kSplit<A>, 1) linear_backward_kernel(LinearBackward<A, W> a, unsigned tiles) {
  A* dy = shared_memory<A>();  // [kDySamples, kDepth]
  A* sums = dy;                // [warps, kDySamples, 32], later
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int64_t sample = int64_t{blockIdx.x / tiles} * kDySamples;
  const unsigned tile = blockIdx.x % tiles;
  const int64_t out = int64_t{tile} * kWarp + lane;
  A sum[kDySamples] = {};
  for (int64_t at = 0; at < a.s.in; at += kDepth<A>) {
    const int depth = a.s.in - at < kDepth<A> ? static_cast<int>(a.s.in - at) : kDepth<A>;
    __syncthreads();
    load_dy(a, sample, at, depth, tile == 0, dy);
    __syncthreads();
    for (int first = warp; first < depth && out < a.s.out; first += kRead * warps) {
      W w[kRead];
#pragma unroll
      for (int u = 0; u < kRead; ++u) {
        if (first + u * warps < depth) w[u] = a.w[(at + first + u * warps) * a.s.out + out];
      }
#pragma unroll
      for (int u = 0; u < kRead; ++u) {
        const int k = first + u * warps;
        if (k >= depth) break;
#pragma unroll
        for (int s = 0; s < kDySamples; ++s) sum[s] += to_acc(w[u]) * dy[s * kDepth<A> + k];
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int s = 0; s < kDySamples; ++s) sums[(warp * kDySamples + s) * kWarp + lane] = sum[s];
  __syncthreads();
  const int64_t n = sample + warp;
  if (warp >= kDySamples || n >= a.s.n || out >= a.s.out) return;
  A dx = A(0);
#pragma unroll 8
  for (int w = 0; w < warps; ++w) dx += sums[(w * kDySamples + warp) * kWarp + lane];
  const int64_t i = n * a.s.out + out;
  if (a.hidden != nullptr) {
    dx = Any::through(a.act, A(a.hidden[i]), dx);
    a.activated[i] = Any::value(a.act, a.hidden[i]);
  }
  a.dx[i] = dx;
}

template <class A, class W>
int linear_backward(const LinearBackward<A, W>& a, void* stream) {
  const int threads = a.s.in > kThreads ? kSplit<A> : kThreads;
  static_assert(kSplit<A> <= kDepth<A>);
  // One tile at least, since the first one writes dlogits and gate.
  const int64_t tiles = std::max<int64_t>(1, ceil_div<int64_t>(a.s.out, kWarp));
  return launch(linear_backward_kernel<A, W>, ceil_div<int64_t>(a.s.n, kDySamples) * tiles, threads,
                kDySamples * kDepth<A> * sizeof(A), stream, a, static_cast<unsigned>(tiles));
}

template <class A, class W>
int backward(const SqueezeExciteBackward& a, void* stream) {
  const auto in = [](const void* p) { return static_cast<const A*>(p); };
  const auto out = [](void* p) { return static_cast<A*>(p); };
  LinearBackward<A, W> expand{};
  expand.s = {a.n, a.c, a.r};
  expand.w = static_cast<const W*>(a.w2);
  expand.dgate = in(a.dgate);
  expand.logits = in(a.logits);
  expand.dlogits = out(a.dlogits);
  expand.gate = out(a.gate);
  expand.gate_act = a.gate_act;
  expand.dx = out(a.dhidden);
  expand.hidden = in(a.hidden);
  expand.activated = out(a.activated);
  expand.act = a.act;
  LinearBackward<A, W> reduce{};
  reduce.s = {a.n, a.r, a.c};
  reduce.w = static_cast<const W*>(a.w1);
  reduce.dy = in(a.dhidden);
  reduce.dx = out(a.dpooled);
  const int code = linear_backward(expand, stream);
  return code != cudaSuccess ? code : linear_backward(reduce, stream);
}

// --- weights: dw[out, in] = sum_n dy[n, out] x[n, in], db[out] = sum_n dy[n, out]
// ---------------------------------------

template <class A, class W>
struct WeightBackward {
  int64_t out, in;
  const A* dy;  // [n, out]
  const A* x;   // [n, in]
  W* dw;        // [out, in]
  W* db;        // [out]
};

constexpr int kWarps = kThreads / kWarp;
constexpr int kRows = kWarp / kWarps;  // rows of a 32 x 32 tile of dw that a thread computes

// The first `split` blocks take the tiles of `first`, the others those of `second`.
template <class A, class W>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    weight_backward_kernel(WeightBackward<A, W> first, WeightBackward<A, W> second, unsigned split, int64_t n) {
  A* dy = shared_memory<A>();  // [32 samples, 32 outputs]
  A* x = dy + kWarp * kWarp;   // [32 samples, 32 inputs]
  const bool is_first = blockIdx.x < split;
  const WeightBackward<A, W> a = is_first ? first : second;
  const unsigned item = is_first ? blockIdx.x : blockIdx.x - split;
  const unsigned tiles = static_cast<unsigned>(a.in > 0 ? ceil_div<int64_t>(a.in, kWarp) : 1);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t out = int64_t{item / tiles} * kWarp, in = int64_t{item % tiles} * kWarp + lane;
  A sum[kRows] = {}, bias[kRows] = {};
  for (int64_t at = 0; at < n; at += kWarp) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int s = warp + i * kWarps;
      dy[s * kWarp + lane] = at + s < n && out + lane < a.out ? a.dy[(at + s) * a.out + out + lane] : A(0);
      x[s * kWarp + lane] = at + s < n && in < a.in ? a.x[(at + s) * a.in + in] : A(0);
    }
    __syncthreads();
#pragma unroll 8
    for (int s = 0; s < kWarp; ++s) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const A d = dy[s * kWarp + warp * kRows + i];
        sum[i] += d * x[s * kWarp + lane];
        bias[i] += d;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = out + warp * kRows + i;
    if (row >= a.out) continue;
    if (in < a.in) from_acc(sum[i], a.dw[row * a.in + in]);
    if (in == 0) from_acc(bias[i], a.db[row]);
  }
}

template <class A, class W>
int weight_backward(const SqueezeExciteBackward& a, void* stream) {
  const auto in = [](const void* p) { return static_cast<const A*>(p); };
  const auto out = [](void* p) { return static_cast<W*>(p); };
  const auto tiles = [](int64_t rows, int64_t columns) {  // db wants a column of tiles even where dw has none
    return ceil_div<int64_t>(rows, kWarp) * std::max<int64_t>(1, ceil_div<int64_t>(columns, kWarp));
  };
  const WeightBackward<A, W> reduce{a.r, a.c, in(a.dhidden), in(a.pooled), out(a.dw1), out(a.db1)};
  const WeightBackward<A, W> expand{a.c, a.r, in(a.dlogits), in(a.activated), out(a.dw2), out(a.db2)};
  const int64_t split = tiles(a.r, a.c), blocks = split + tiles(a.c, a.r);
  return launch(weight_backward_kernel<A, W>, blocks, kThreads, 2 * kWarp * kWarp * sizeof(A), stream, reduce, expand,
                static_cast<unsigned>(split), a.n);
}

// Returns f.template operator()<A, W>().
template <class F>
int visit_weights(DType weights, F&& f) {
  return visit_element(weights, [&]<class W>() { return f.template operator()<Acc<W>, W>(); });
}

}  // namespace

int squeeze_excite(const SqueezeExcite& a, void* stream) {
  return visit_weights(a.weights, [&]<class A, class W>() { return forward<A, W>(a, stream); });
}

int squeeze_excite_backward(const SqueezeExciteBackward& a, void* stream) {
  return visit_weights(a.weights, [&]<class A, class W>() { return backward<A, W>(a, stream); });
}

int squeeze_excite_weight_backward(const SqueezeExciteBackward& a, void* stream) {
  return visit_weights(a.weights, [&]<class A, class W>() { return weight_backward<A, W>(a, stream); });
}

}  // namespace fusedtrain::cuda

// The gate network of squeeze_excite on CUDA: two launches forward, two backward and one for the weights.
//
//   forward   hidden[n, r]  = sum_c pooled[n, c] w1[r, c] + b1[r]
//             logits[n, c]  = sum_r act(hidden[n, r]) w2[c, r] + b2[c]        gate = gate_act(logits)
//   backward  dhidden[n, r] = sum_c dlogits[n, c] w2[c, r] * act'(hidden)     dlogits = dgate * gate_act'(logits)
//             dpooled[n, c] = sum_r dhidden[n, r] w1[r, c]
//   weights   dw1[r, c] = sum_n dhidden[n, r] pooled[n, c]                    db1[r] = sum_n dhidden[n, r]
//             dw2[c, r] = sum_n dlogits[n, c] act(hidden[n, r])               db2[c] = sum_n dlogits[n, c]
//
// All sums run in an order that depends on c and r, and on n for the weights.
#include "core/cuda.h"
#include "squeeze_excite.h"

namespace fusedtrain::cuda {
namespace {

constexpr int kSamples = 4;  // samples that a block takes through one read of the weights
constexpr int kDepth = 512;  // inputs of a layer that stand in shared memory at a time
constexpr int kOutputs = 2;  // outputs that a warp of linear_kernel computes together
constexpr int kWarps = kThreads / kWarp;

using Any = AnyAct<Activation::kIdentity, Activation::kRelu, Activation::kSilu, Activation::kGelu,
                   Activation::kHardSwish, Activation::kRelu6, Activation::kSigmoid, Activation::kHardSigmoid,
                   Activation::kTanh, Activation::kHalfTanh>;

struct Sizes {
  int64_t n, in, out;
};

// --- forward: y[n, out] = in_act(x[n, in]) w[out, in]^T + b
// ------------------------------------------------------------

template <class A>
struct Linear {
  Sizes s;
  const A* x;    // [n, in]
  const A* w;    // [out, in]
  const A* b;    // [out] or null
  A* y;          // [n, out]
  A* activated;  // [n, out] or null, out_act(y)
  Activation in_act, out_act;
  bool aligned;  // rows of w may be loaded as packs
};

// sum[o][s] += sum over the pack at w[o] of w * x[s]
template <class A, int N>
__device__ __forceinline__ void add_pack(const Pack<A, N> (&w)[kOutputs], const A* x, A (&sum)[kOutputs][kSamples]) {
#pragma unroll
  for (int s = 0; s < kSamples; ++s) {
    const Pack<A, N> v = load<N>(x + s * kDepth);
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
#pragma unroll
      for (int j = 0; j < N; ++j) sum[o][s] += w[o].v[j] * v.v[j];
    }
  }
}

// The lanes of a warp split the inputs of kOutputs rows of w.
template <class A, int N>
__device__ __forceinline__ void add_depth(const Linear<A>& a, const A* x, int64_t first, int64_t at, int depth,
                                          A (&sum)[kOutputs][kSamples]) {
#pragma unroll 2
  for (int k = threadIdx.x % kWarp * N; k < depth; k += kWarp * N) {
    Pack<A, N> w[kOutputs] = {};
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      if (first + o < a.s.out) w[o] = load<N>(a.w + (first + o) * a.s.in + at + k);
    }
    add_pack(w, x + k, sum);
  }
}

template <class A>
__global__ void __launch_bounds__(kThreads, kMinBlocks) linear_kernel(Linear<A> a, unsigned tiles) {
  A* x = shared_memory<A>();  // [kSamples, kDepth]
  const int lane = threadIdx.x % kWarp;
  const int64_t sample = int64_t{blockIdx.x / tiles} * kSamples;
  const int64_t first = (int64_t{blockIdx.x % tiles} * kWarps + threadIdx.x / kWarp) * kOutputs;
  A sum[kOutputs][kSamples] = {};
  for (int64_t at = 0; at < a.s.in; at += kDepth) {
    const int depth = a.s.in - at < kDepth ? static_cast<int>(a.s.in - at) : kDepth;
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kSamples; ++s) {
      for (int k = threadIdx.x; k < depth; k += kThreads) {
        x[s * kDepth + k] = sample + s < a.s.n ? Any::value(a.in_act, a.x[(sample + s) * a.s.in + at + k]) : A(0);
      }
    }
    __syncthreads();
    if (a.aligned) {
      add_depth<A, kPack<A>>(a, x, first, at, depth, sum);
    } else {
      add_depth<A, 1>(a, x, first, at, depth, sum);
    }
  }
  A mine = A(0);  // lane o * kSamples + s finishes output `o` of sample `s`
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) {
#pragma unroll
    for (int s = 0; s < kSamples; ++s) {
      const A total = warp_sum(sum[o][s]);
      if (lane == o * kSamples + s) mine = total;
    }
  }
  const int64_t n = sample + lane % kSamples, out = first + lane / kSamples;
  if (lane >= kOutputs * kSamples || n >= a.s.n || out >= a.s.out) return;
  if (a.b != nullptr) mine += a.b[out];
  a.y[n * a.s.out + out] = mine;
  if (a.activated != nullptr) a.activated[n * a.s.out + out] = Any::value(a.out_act, mine);
}

template <class A>
int linear(const Linear<A>& a, void* stream) {
  const int64_t tiles = ceil_div<int64_t>(a.s.out, kWarps * kOutputs);
  return launch(linear_kernel<A>, ceil_div<int64_t>(a.s.n, kSamples) * tiles, kThreads, kSamples * kDepth * sizeof(A),
                stream, a, static_cast<unsigned>(tiles));
}

template <class A>
int forward(const SqueezeExcite& a, void* stream) {
  const auto in = [](const void* p) { return static_cast<const A*>(p); };
  const auto out = [](void* p) { return static_cast<A*>(p); };
  const Linear<A> reduce{{a.n, a.c, a.r},
                         in(a.pooled),
                         in(a.w1),
                         in(a.b1),
                         out(a.hidden),
                         nullptr,
                         Activation::kIdentity,
                         Activation::kIdentity,
                         a.c % kPack<A> == 0 && is_aligned(a.w1)};
  const Linear<A> expand{{a.n, a.r, a.c}, in(a.hidden),  in(a.w2),
                         in(a.b2),        out(a.logits), out(a.gate),
                         a.act,           a.gate_act,    a.r % kPack<A> == 0 && is_aligned(a.w2)};
  const int code = linear(reduce, stream);
  return code != cudaSuccess ? code : linear(expand, stream);
}

// --- backward: dx[n, out] = slope(at[n, out]) * (dy[n, in] w[in, out])
// --------------------------------------------------

// dy is given, or dgate * gate_act'(logits), which is then written, beside gate_act(logits).
template <class A>
struct LinearBackward {
  Sizes s;
  const A* w;       // [in, out]
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

// Puts inputs [at, at + depth) of kSamples samples into shared memory.
template <class A>
__device__ __forceinline__ void load_dy(const LinearBackward<A>& a, int64_t sample, int64_t at, int depth, bool write,
                                        A* dy) {
#pragma unroll
  for (int s = 0; s < kSamples; ++s) {
    const bool inside = sample + s < a.s.n;
    for (int k = threadIdx.x; k < depth; k += kThreads) {
      const int64_t i = (sample + s) * a.s.in + at + k;
      A value = A(0);
      if (inside && a.dy != nullptr) value = a.dy[i];
      if (inside && a.dy == nullptr) {
        const A logit = a.logits[i];
        value = a.dgate[i] * Any::slope(a.gate_act, logit);
        if (write) {
          a.dlogits[i] = value;
          a.gate[i] = Any::value(a.gate_act, logit);
        }
      }
      dy[s * kDepth + k] = value;
    }
  }
}

// A block computes 32 outputs of kSamples samples; its warps split the inputs.
template <class A>
__global__ void __launch_bounds__(kThreads, kMinBlocks) linear_backward_kernel(LinearBackward<A> a, unsigned tiles) {
  A* dy = shared_memory<A>();  // [kSamples, kDepth]
  A* sums = dy;                // [kWarps, kSamples, 32], later
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t sample = int64_t{blockIdx.x / tiles} * kSamples;
  const unsigned tile = blockIdx.x % tiles;
  const int64_t out = int64_t{tile} * kWarp + lane;
  A sum[kSamples] = {};
  for (int64_t at = 0; at < a.s.in; at += kDepth) {
    const int depth = a.s.in - at < kDepth ? static_cast<int>(a.s.in - at) : kDepth;
    __syncthreads();
    load_dy(a, sample, at, depth, tile == 0, dy);
    __syncthreads();
    if (out >= a.s.out) continue;
#pragma unroll 8
    for (int k = warp; k < depth; k += kWarps) {
      const A w = a.w[(at + k) * a.s.out + out];
#pragma unroll
      for (int s = 0; s < kSamples; ++s) sum[s] += w * dy[s * kDepth + k];
    }
  }
  __syncthreads();
#pragma unroll
  for (int s = 0; s < kSamples; ++s) sums[(warp * kSamples + s) * kWarp + lane] = sum[s];
  __syncthreads();
  const int64_t n = sample + warp;
  if (warp >= kSamples || n >= a.s.n || out >= a.s.out) return;
  A dx = A(0);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) dx += sums[(w * kSamples + warp) * kWarp + lane];
  const int64_t i = n * a.s.out + out;
  if (a.hidden != nullptr) {
    dx *= Any::slope(a.act, a.hidden[i]);
    a.activated[i] = Any::value(a.act, a.hidden[i]);
  }
  a.dx[i] = dx;
}

template <class A>
int linear_backward(const LinearBackward<A>& a, void* stream) {
  static_assert(kWarps * kWarp <= kDepth);
  // One tile at least, since the first one writes dlogits and gate.
  const int64_t tiles = std::max<int64_t>(1, ceil_div<int64_t>(a.s.out, kWarp));
  return launch(linear_backward_kernel<A>, ceil_div<int64_t>(a.s.n, kSamples) * tiles, kThreads,
                kSamples * kDepth * sizeof(A), stream, a, static_cast<unsigned>(tiles));
}

template <class A>
int backward(const SqueezeExciteBackward& a, void* stream) {
  const auto in = [](const void* p) { return static_cast<const A*>(p); };
  const auto out = [](void* p) { return static_cast<A*>(p); };
  LinearBackward<A> expand{};
  expand.s = {a.n, a.c, a.r};
  expand.w = in(a.w2);
  expand.dgate = in(a.dgate);
  expand.logits = in(a.logits);
  expand.dlogits = out(a.dlogits);
  expand.gate = out(a.gate);
  expand.gate_act = a.gate_act;
  expand.dx = out(a.dhidden);
  expand.hidden = in(a.hidden);
  expand.activated = out(a.activated);
  expand.act = a.act;
  LinearBackward<A> reduce{};
  reduce.s = {a.n, a.r, a.c};
  reduce.w = in(a.w1);
  reduce.dy = in(a.dhidden);
  reduce.dx = out(a.dpooled);
  const int code = linear_backward(expand, stream);
  return code != cudaSuccess ? code : linear_backward(reduce, stream);
}

// --- weights: dw[out, in] = sum_n dy[n, out] x[n, in], db[out] = sum_n dy[n, out]
// ---------------------------------------

template <class A>
struct WeightBackward {
  int64_t out, in;
  const A* dy;  // [n, out]
  const A* x;   // [n, in]
  A* dw;        // [out, in]
  A* db;        // [out]
};

constexpr int kRows = kWarp / kWarps;  // rows of a 32 x 32 tile of dw that a thread computes

// The first `split` blocks take the tiles of `first`, the others those of `second`.
template <class A>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    weight_backward_kernel(WeightBackward<A> first, WeightBackward<A> second, unsigned split, int64_t n) {
  A* dy = shared_memory<A>();  // [32 samples, 32 outputs]
  A* x = dy + kWarp * kWarp;   // [32 samples, 32 inputs]
  const bool is_first = blockIdx.x < split;
  const WeightBackward<A> a = is_first ? first : second;
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
    if (in < a.in) a.dw[row * a.in + in] = sum[i];
    if (in == 0) a.db[row] = bias[i];
  }
}

template <class A>
int weight_backward(const SqueezeExciteBackward& a, void* stream) {
  const auto in = [](const void* p) { return static_cast<const A*>(p); };
  const auto out = [](void* p) { return static_cast<A*>(p); };
  const auto tiles = [](int64_t rows, int64_t columns) {  // db wants a column of tiles even where dw has none
    return ceil_div<int64_t>(rows, kWarp) * std::max<int64_t>(1, ceil_div<int64_t>(columns, kWarp));
  };
  const WeightBackward<A> reduce{a.r, a.c, in(a.dhidden), in(a.pooled), out(a.dw1), out(a.db1)};
  const WeightBackward<A> expand{a.c, a.r, in(a.dlogits), in(a.activated), out(a.dw2), out(a.db2)};
  const int64_t split = tiles(a.r, a.c), blocks = split + tiles(a.c, a.r);
  return launch(weight_backward_kernel<A>, blocks, kThreads, 2 * kWarp * kWarp * sizeof(A), stream, reduce, expand,
                static_cast<unsigned>(split), a.n);
}

}  // namespace

int squeeze_excite(const SqueezeExcite& a, void* stream) {
  return a.dtype == DType::kFloat64 ? forward<double>(a, stream) : forward<float>(a, stream);
}

int squeeze_excite_backward(const SqueezeExciteBackward& a, void* stream) {
  return a.dtype == DType::kFloat64 ? backward<double>(a, stream) : backward<float>(a, stream);
}

int squeeze_excite_weight_backward(const SqueezeExciteBackward& a, void* stream) {
  return a.dtype == DType::kFloat64 ? weight_backward<double>(a, stream) : weight_backward<float>(a, stream);
}

}  // namespace fusedtrain::cuda

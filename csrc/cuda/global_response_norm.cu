// global_response_norm on CUDA: x is read twice and y written forward, x and dy read twice and dx written backward, in
// the walks of core/cuda_images.h. Between the two walks a block per image turns the sums of its channels into factors.
#include "core/cuda_lists.h"
#include "cuda/batch_sums.h"
#include "global_response_norm.h"

namespace fusedtrain::cuda {
namespace {

// --- forward --------------------------------------------------------------------------------------------------------

// norm = sqrt(sum_hw a(x)^2)
template <class T, class Activate>
struct NormTerm : NoFactors {
  using A = Acc<T>;
  using Stat = Sum<A>;
  template <int N>
  using Raw = Pack<T, N>;
  using AtRunTime = NormTerm<T, RunTimeAct>;
  static constexpr int N = kPack<T>, kUnroll = kUnrollOf<T>, kBlocks = Activate::kBlocks;

  const T* x;  // [n, c, hw] or [n, hw, c]
  A* norm;     // [n, c]
  Activate act;

  template <int N>
  __device__ Raw<N> load(int64_t offset) const {
    return cuda::load<N>(x + offset);
  }

  template <int N>
  __device__ void add(const Raw<N>& raw, int64_t /*offset*/, const Factors<N>&, Stat (&stats)[N]) const {
    const Pack<A, N> values = to_acc(raw);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A a = act.value(values.v[j]);
      stats[j].add(a * a);
    }
  }

  __device__ void finish(int64_t nc, const Stat& stat) const { norm[nc] = ::sqrt(stat.part[0]); }
};

// y = a(x) factor[n, c] + bias[c]
template <class T, class Activate>
struct ScaledTerm : ChannelFactors<ScaledTerm<T, Activate>, Acc<T>, 2> {
  using A = Acc<T>;
  template <int N>
  using Factors = FactorPack<A, 2, N>;
  template <int N>
  using Raw = Pack<T, N>;
  using AtRunTime = ScaledTerm<T, RunTimeAct>;
  static constexpr int N = kPack<T>, kUnroll = kUnrollOf<T>, kBlocks = Activate::kBlocks;

  const T* x;      // [n, c, hw] or [n, hw, c]
  const A* scale;  // [n, c]: the factor
  const A* bias;   // [c]
  T* y;            // as x
  Activate act;

  template <int N>
  __device__ void channel(int64_t channel, int64_t plane, Factors<N>& out) const {
    out.f[0] = cuda::load<N>(scale + plane);
    out.f[1] = cuda::load<N>(bias + channel);
  }

  template <int N>
  __device__ Raw<N> load(int64_t offset) const {
    return cuda::load<N>(x + offset);
  }

  template <int N>
  __device__ void apply(const Raw<N>& raw, int64_t offset, const Factors<N>& factors) const {
    const Pack<A, N> values = to_acc(raw);
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      from_acc(act.value(values.v[j]) * factors.f[0].v[j] + factors.f[1].v[j], out.v[j]);
    }
    store(y + offset, out);
  }
};

// The sum over a block, which every thread gets. shared: [kThreads / kWarp + 1].
__device__ __forceinline__ double sum_for_all(double v, double* shared) {
  double* total = shared + kThreads / kWarp;
  v = block_sum(v, shared);
  if (threadIdx.x == 0) *total = v;
  __syncthreads();
  return *total;  // block_sum has a barrier between this and the next total
}
constexpr size_t kSumForAllBytes = kBlockSumBytes + sizeof(double);

// The mean of the norms of an image, and eps: in double precision, which products of many channels need.
template <class A>
__device__ __forceinline__ double mean_of(const A* norm, int64_t c, double eps) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < c; i += kThreads) sum += static_cast<double>(norm[i]);
  return sum_for_all(sum, shared_memory<double>()) / static_cast<double>(c) + eps;
}

// factor = 1 + weight norm / mean
template <class A>
__global__ void __launch_bounds__(kThreads) factor_kernel(const A* norm,    // [n, c]
                                                          const A* weight,  // [c]
                                                          A* factor,        // [n, c]
                                                          int64_t c, double eps) {
  const int64_t image = int64_t{blockIdx.x} * c;
  const double scale = 1 / mean_of(norm + image, c, eps);
  for (int64_t i = threadIdx.x; i < c; i += kThreads) {
    factor[image + i] = A(1) + weight[i] * static_cast<A>(static_cast<double>(norm[image + i]) * scale);
  }
}

template <class T, class Activate>
int forward(const GlobalResponseNorm& a, void* stream) {
  using A = Acc<T>;
  const auto* x = static_cast<const T*>(a.x);
  auto *norm = static_cast<A*>(a.norm), *factor = static_cast<A*>(a.factor);
  const NormTerm<T, Activate> squares{{}, x, norm, {a.images.in_act}};
  int code = reduce(a.images, squares, is_aligned(x), kReduceChunk, a.partial, stream);
  if (code != cudaSuccess) return code;
  code = launch(factor_kernel<A>, a.images.n, kThreads, kSumForAllBytes, stream, static_cast<const A*>(norm),
                static_cast<const A*>(a.weight), factor, a.images.c, a.eps);
  if (code != cudaSuccess) return code;
  const auto* bias = static_cast<const A*>(a.bias);
  auto* y = static_cast<T*>(a.y);
  const ScaledTerm<T, Activate> scaled{{Channels(a.images.c)}, x, factor, bias, y, {a.images.in_act}};
  return map(a.images, scaled, is_aligned(x, factor, bias, y), stream);
}

// --- backward -------------------------------------------------------------------------------------------------------

// dot = sum_hw dy a(x), sum_dy = sum_hw dy
template <class T, class Activate>
struct DotTerm : NoFactors {
  using A = Acc<T>;
  using Stat = Sums<A, GlobalResponseNormBackward::kSums>;
  template <int N>
  using Raw = RawPair<T, N>;
  using AtRunTime = DotTerm<T, RunTimeAct>;
  static constexpr int N = kPack<T>, kUnroll = ceil_div(kUnrollOf<T>, 2), kBlocks = Activate::kBlocks;

  const T* x;   // [n, c, hw] or [n, hw, c]
  const T* dy;  // as x
  A* dot;       // [n, c]
  A* sum_dy;    // [n, c]
  Activate act;

  template <int N>
  __device__ Raw<N> load(int64_t offset) const {
    return {cuda::load<N>(x + offset), cuda::load<N>(dy + offset)};
  }

  template <int N>
  __device__ void add(const Raw<N>& raw, int64_t /*offset*/, const Factors<N>&, Stat (&stats)[N]) const {
    const Pack<A, N> values = to_acc(raw.x), slopes = to_acc(raw.dy);
#pragma unroll
    for (int j = 0; j < N; ++j) stats[j].merge({{slopes.v[j] * act.value(values.v[j]), slopes.v[j]}});
  }

  __device__ void finish(int64_t nc, const Stat& stat) const {
    dot[nc] = stat.part[0];
    sum_dy[nc] = stat.part[1];
  }
};

// slope = dnorm / norm, factor as forward; dweights = dot norm / mean takes the place of dot.
template <class A>
struct Slopes {
  const A* norm;    // [n, c]
  const A* weight;  // [c]
  A* dot;           // [n, c]
  A* factor;        // [n, c]
  A* slope;         // [n, c]
  int64_t c;
  double eps;
};

template <class A>
__global__ void __launch_bounds__(kThreads) slope_kernel(Slopes<A> a) {
  const int64_t image = int64_t{blockIdx.x} * a.c;
  const A *norm = a.norm + image, *dot = a.dot + image;
  const double scale = 1 / mean_of(norm, a.c, a.eps);
  double shared = 0;  // through the mean
  for (int64_t i = threadIdx.x; i < a.c; i += kThreads) {
    shared += static_cast<double>(a.weight[i]) * static_cast<double>(dot[i]) * static_cast<double>(norm[i]);
  }
  shared = sum_for_all(shared, shared_memory<double>()) / static_cast<double>(a.c) * scale * scale;
  for (int64_t i = threadIdx.x; i < a.c; i += kThreads) {
    const A relative = static_cast<A>(static_cast<double>(norm[i]) * scale);
    const double dnorm = static_cast<double>(a.weight[i]) * static_cast<double>(dot[i]) * scale - shared;
    a.factor[image + i] = A(1) + a.weight[i] * relative;
    a.slope[image + i] = norm[i] == A(0) ? A(0) : static_cast<A>(dnorm) / norm[i];
    a.dot[image + i] = dot[i] * relative;
  }
}

// dx = a'(x) (dy factor + a(x) slope)
template <class T, class Activate>
struct BackwardTerm : FactorSource<Acc<T>, 2> {
  using A = Acc<T>;
  template <int N>
  using Factors = FactorPack<A, 2, N>;
  template <int N>
  using Raw = RawPair<T, N>;
  using AtRunTime = BackwardTerm<T, RunTimeAct>;
  static constexpr int N = kPack<T>, kUnroll = ceil_div(kUnrollOf<T>, 2), kBlocks = Activate::kBlocks;

  const T* x;   // [n, c, hw] or [n, hw, c]
  const T* dy;  // as x
  T* dx;        // as x
  Activate act;

  template <int N>
  __device__ Raw<N> load(int64_t offset) const {
    return {cuda::load<N>(x + offset), cuda::load<N>(dy + offset)};
  }

  template <int N>
  __device__ void apply(const Raw<N>& raw, int64_t offset, const Factors<N>& factors) const {
    const Pack<A, N> values = to_acc(raw.x), slopes = to_acc(raw.dy);
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A x = values.v[j], da = slopes.v[j] * factors.f[0].v[j] + act.value(x) * factors.f[1].v[j];
      from_acc(act.through(x, da), out.v[j]);
    }
    store(dx + offset, out);
  }
};

// dweight = sum_n dot norm / mean, dbias = sum_n sum_dy
template <class A>
struct ParamsTerm {
  const A* dweights;  // [n, c]
  const A* dbiases;   // [n, c]
  A* dweight;         // [c]
  A* dbias;           // [c]
  int64_t c;

  __device__ void add_part(int64_t image, int64_t channel, double (&sums)[2]) const {
    sums[0] += static_cast<double>(dweights[image * c + channel]);
    sums[1] += static_cast<double>(dbiases[image * c + channel]);
  }
  __device__ void finish_channel(int64_t channel, double weight, double bias) const {
    dweight[channel] = static_cast<A>(weight);
    dbias[channel] = static_cast<A>(bias);
  }
};

template <class T, class Activate>
int backward(const GlobalResponseNormBackward& a, void* stream) {
  using A = Acc<T>;
  const auto out = [](void* p) { return static_cast<A*>(p); };
  const auto *x = static_cast<const T*>(a.x), *dy = static_cast<const T*>(a.dy);
  const DotTerm<T, Activate> dots{{}, x, dy, out(a.dweights), out(a.dbiases), {a.images.in_act}};
  int code = reduce(a.images, dots, is_aligned(x, dy), kReduceChunk, a.partial, stream);
  if (code != cudaSuccess) return code;
  const Slopes<A> slopes{static_cast<const A*>(a.norm),
                         static_cast<const A*>(a.weight),
                         out(a.dweights),
                         out(a.factor),
                         out(a.slope),
                         a.images.c,
                         a.eps};
  code = launch(slope_kernel<A>, a.images.n, kThreads, kSumForAllBytes, stream, slopes);
  if (code != cudaSuccess) return code;
  const ParamsTerm<A> params{out(a.dweights), out(a.dbiases), out(a.dweight), out(a.dbias), a.images.c};
  code = finish_batch(params, a.images.n, a.images.c, stream);
  if (code != cudaSuccess || a.dx == nullptr) return code;
  const BackwardTerm<T, Activate> term{
      {{out(a.factor), out(a.slope)}}, x, dy, static_cast<T*>(a.dx), {a.images.in_act}};
  return map(a.images, term, is_aligned(x, dy, a.dx, a.factor, a.slope), stream);
}

// Returns f.template operator()<T, Activate>(): GELU, which stands in front in ConvNeXt V2, has kernels of its own.
template <class F>
int visit_norm(const Images& images, F&& f) {
  using enum Activation;
  return visit_element(images.dtype, [&]<class T>() -> int {
    int code = cudaErrorInvalidValue;
    if constexpr (!std::is_same_v<T, double>) {
      if (visit<kIdentity, kGelu>(images.in_act,
                                  [&]<Activation A>() { code = f.template operator()<T, StaticAct<A, T>>(); })) {
        return code;
      }
    }
    return f.template operator()<T, RunTimeAct>();
  });
}

}  // namespace

int global_response_norm(const GlobalResponseNorm& a, void* stream) {
  return visit_norm(a.images, [&]<class T, class Activate>() { return forward<T, Activate>(a, stream); });
}

int global_response_norm_backward(const GlobalResponseNormBackward& a, void* stream) {
  return visit_norm(a.images, [&]<class T, class Activate>() { return backward<T, Activate>(a, stream); });
}

}  // namespace fusedtrain::cuda

// Statistics and forward pass of batch_norm_act on CUDA: x is read once by each.
//   mean = 1/count sum x        m2 = sum (x - mean)^2        rstd = 1 / sqrt(m2 / count + eps)
//   y = a(weight (x - mean) rstd + bias + before) + after
#include "batch_norm_act.h"
#include "cuda/batch_sums.h"

namespace fusedtrain::cuda {
namespace {

// sum (x - shift), sum (x - shift)^2, and what the first has lost by rounding: the mean may be far smaller than shift.
template <class A>
struct CompensatedSums {
  static constexpr int kParts = 3;
  A part[kParts] = {};

  template <bool kKeepsLost>
  __device__ void add(A d) {
    const A sum = part[0] + d;
    if constexpr (kKeepsLost) part[2] += (part[0] - sum) + d;
    part[0] = sum;
    part[1] += d * d;
  }
  __device__ void merge(const CompensatedSums& o) {
    const A sum = part[0] + o.part[0], added = sum - part[0];
    part[2] += ((part[0] - (sum - added)) + (o.part[0] - added)) + o.part[2];
    part[0] = sum;
    part[1] += o.part[1];
  }
};

// The sums of CompensatedSums, where shift is the mean of a few numbers from all over the batch: nothing
// cancels however large the mean is.
template <class T>
struct MomentsTerm : ChannelFactors<MomentsTerm<T>, Acc<T>, 1> {
  using Base = ChannelFactors<MomentsTerm<T>, Acc<T>, 1>;
  using A = Acc<T>;
  using Stat = CompensatedSums<A>;
  template <int N>
  using Factors = typename Base::template Factors<N>;
  template <int N>
  using Raw = Pack<T, N>;
  static constexpr int N = kPack<T>, kUnroll = kUnrollOf<T>, kSome = 4, kBlocks = 3;

  const T* x;           // [n, c, hw] or [n, hw, c]
  A* partial;           // [parts, 3, c]
  A *mean, *m2;         // [c]
  int64_t count;        // n * hw
  int64_t stride;       // from channel to channel
  int64_t some[kSome];  // where the numbers of channel 0 are

  explicit MomentsTerm(const BatchNormStats& a)
      : Base{Channels(a.images.c)},
        x(static_cast<const T*>(a.x)),
        partial(static_cast<A*>(a.partial)),
        mean(static_cast<A*>(a.mean)),
        m2(static_cast<A*>(a.m2)),
        count(a.images.n * a.images.hw) {
    const bool rows = a.images.layout == Layout::kChannelsLast;
    stride = rows ? 1 : a.images.hw;
    for (int64_t k = 0; k < kSome && count > 0; ++k) {
      const int64_t at = k * count / kSome, n = at / a.images.hw, hw = at % a.images.hw;
      some[k] = n * a.images.c * a.images.hw + hw * (rows ? a.images.c : 1);
    }
  }

  // Of half the digits: x - shift is exact, or rounded up as often as down.
  template <int N>
  __device__ void channel(int64_t channel, int64_t /*plane*/, Factors<N>& shift) const {
    constexpr A kHalf = A(1.5) * (int64_t{1} << (std::numeric_limits<A>::digits / 2 - 1));
    shift = {};
    A largest[N] = {};
#pragma unroll
    for (int k = 0; k < kSome; ++k) {
      const Pack<A, N> one = to_acc(cuda::load<N>(x + some[k] + channel * stride));
#pragma unroll
      for (int j = 0; j < N; ++j) {
        shift.f[0].v[j] += one.v[j] * A(1.0 / kSome);
        largest[j] = at_least(largest[j], magnitude(one.v[j]));
      }
    }
#pragma unroll
    for (int j = 0; j < N; ++j) shift.f[0].v[j] = (shift.f[0].v[j] + kHalf * largest[j]) - kHalf * largest[j];
  }

  template <int N>
  __device__ Raw<N> load(int64_t offset) const {
    return cuda::load<N>(x + offset);
  }

  template <int N>
  __device__ void add(const Raw<N>& raw, int64_t /*offset*/, const Factors<N>& shift, Stat (&stats)[N]) const {
    const Pack<A, N> values = to_acc(raw);
#pragma unroll
    for (int j = 0; j < N; ++j) stats[j].template add<sizeof(T) == 4>(values.v[j] - shift.f[0].v[j]);
  }

  __device__ void finish(int64_t plane, const Stat& sums) const {
    store_part<Stat::kParts>(partial, this->channels, plane, sums.part);
  }
  __device__ void add_part(int64_t part, int64_t channel, double (&sums)[2]) const {
    const A* p = partial + Stat::kParts * part * this->channels.c + channel;
    sums[0] += static_cast<double>(p[0]) + static_cast<double>(p[2 * this->channels.c]);
    sums[1] += static_cast<double>(p[this->channels.c]);
  }

  __device__ void finish_channel(int64_t channel, double sum, double squares) const {
    if (count == 0) {
      mean[channel] = m2[channel] = A(0);
      return;
    }
    Factors<1> shift;
    this->channel(channel, channel, shift);
    const double moved = sum / static_cast<double>(count);
    mean[channel] = static_cast<A>(static_cast<double>(shift.f[0].v[0]) + moved);
    m2[channel] = static_cast<A>(at_least(squares - sum * moved, 0.0));
  }
};

template <class A, class Running>
__device__ __forceinline__ void move(Running* running, int64_t channel, A to, A momentum) {
  if (running != nullptr) from_acc(momentum * to + (A(1) - momentum) * to_acc(running[channel]), running[channel]);
}

template <class A, class Running>
__global__ void __launch_bounds__(kThreads, kMinBlocks) update_kernel(BatchNormUpdate a) {
  const int64_t channel = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (channel >= a.c) return;
  if (channel == 0 && a.batches != nullptr) ++*a.batches;
  const A m2 = static_cast<const A*>(a.m2)[channel];
  static_cast<A*>(a.rstd)[channel] = A(1) / sqrt(m2 * A(1 / a.count) + A(a.eps));
  move(static_cast<Running*>(a.running_mean), channel, static_cast<const A*>(a.mean)[channel], A(a.momentum));
  move(static_cast<Running*>(a.running_var), channel, m2 * A(1 / (a.count - 1)), A(a.momentum));
}

template <class T>
struct ForwardRaw {
  T x, residual;
};

// y = a((x - mean) scale + bias + before) + after
template <class T, class Activate>
struct ForwardTerm : ChannelFactors<ForwardTerm<T, Activate>, Acc<T>, 3> {
  using Base = ChannelFactors<ForwardTerm<T, Activate>, Acc<T>, 3>;
  using A = Acc<T>;
  template <int N>
  using Factors = typename Base::template Factors<N>;
  template <int N>
  using Raw = ForwardRaw<Pack<T, N>>;
  using AtRunTime = ForwardTerm<T, RunTimeAct>;
  static constexpr int N = kPack<T>, kUnroll = ceil_div(kUnrollOf<T>, 2), kBlocks = Activate::kBlocks;

  Activate act;
  const T *x, *residual;                 // [n, c, hw] or [n, hw, c]; residual may be null
  bool after;                            // the residual comes after the activation
  const A *mean, *rstd, *weight, *bias;  // [c]
  T* y;                                  // as x

  explicit ForwardTerm(const BatchNormAct& a)
      : Base{Channels(a.in.images.c)},
        act{a.in.act},
        x(static_cast<const T*>(a.in.x)),
        residual(static_cast<const T*>(a.after != nullptr ? a.after : a.in.before)),
        after(a.after != nullptr),
        mean(static_cast<const A*>(a.in.mean)),
        rstd(static_cast<const A*>(a.in.rstd)),
        weight(static_cast<const A*>(a.in.weight)),
        bias(static_cast<const A*>(a.in.bias)),
        y(static_cast<T*>(a.y)) {}

  template <int N>
  __device__ void channel(int64_t channel, int64_t /*plane*/, Factors<N>& out) const {
    load_affine(mean, rstd, weight, bias, channel, out);
  }

  template <int N>
  __device__ Raw<N> load(int64_t offset) const {
    Raw<N> raw{};
    raw.x = cuda::load<N>(x + offset);
    if (residual != nullptr) raw.residual = cuda::load<N>(residual + offset);
    return raw;
  }

  template <int N>
  __device__ void apply(const Raw<N>& raw, int64_t offset, const Factors<N>& f) const {
    Pack<T, N> out;
    const Pack<A, N> values = to_acc(raw.x);
    const auto z = [&](int j) { return (values.v[j] - f.f[0].v[j]) * f.f[1].v[j] + f.f[2].v[j]; };
    if (residual == nullptr) {
#pragma unroll
      for (int j = 0; j < N; ++j) from_acc(act.value(z(j)), out.v[j]);
    } else {
      const Pack<A, N> added = to_acc(raw.residual);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        from_acc(act.value(z(j) + (after ? A(0) : added.v[j])) + (after ? added.v[j] : A(0)), out.v[j]);
      }
    }
    store(y + offset, out);
  }
};

}  // namespace

int batch_norm_act_stats(const BatchNormStats& a, void* stream) {
  return visit_element(a.images.dtype, [&]<class T>() -> int {
    return reduce_batch(a.images, MomentsTerm<T>(a), is_aligned(a.x), stream);
  });
}

int batch_norm_act_update(const BatchNormUpdate& a, void* stream) {
  const int64_t blocks = ceil_div<int64_t>(a.c, kThreads);
  if (a.dtype == DType::kFloat64) return launch(update_kernel<double, double>, blocks, kThreads, 0, stream, a);
  return visit_element(a.running_dtype, [&]<class Running>() -> int {
    if constexpr (std::is_same_v<Running, double>) {
      return cudaErrorInvalidValue;
    } else {
      return launch(update_kernel<float, Running>, blocks, kThreads, 0, stream, a);
    }
  });
}

int batch_norm_act(const BatchNormAct& a, void* stream) {
  return visit_images(a.in.images.dtype, a.in.act, [&]<class T, class Activate>() -> int {
    const bool aligned = is_aligned(a.in.x, a.in.before, a.after, a.y, a.in.mean, a.in.rstd, a.in.weight, a.in.bias);
    return map(a.in.images, ForwardTerm<T, Activate>(a), aligned, stream);
  });
}

}  // namespace fusedtrain::cuda

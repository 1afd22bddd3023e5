// Backward pass of batch_norm_act on CUDA: x and dy are read once for the sums and once for dx; the activation is
// computed again.
//   z = weight xhat + bias + before        dz = a'(z) dy        xhat = (x - mean) rstd
//   sum_dz = sum dz                        sum_dz_xhat = rstd sum dz (x - mean)
//   dx = weight rstd (dz - sum_dz / count - xhat sum_dz_xhat / count)
#include "cuda/batch_sums.h"

namespace fusedtrain::cuda {
namespace {

template <class P>
struct GradientRaw {
  P x, dy, before;
};

// dz and x - mean of packs of elements.
template <class T, class Activate>
struct Gradient {
  using A = Acc<T>;
  Activate act;
  const T *x, *dy, *before;              // [n, c, hw] or [n, hw, c]; before may be null
  const A *mean, *rstd, *weight, *bias;  // [c]

  Gradient(const BatchNormInputs& in, const void* dy)
      : act{in.act},
        x(static_cast<const T*>(in.x)),
        dy(static_cast<const T*>(dy)),
        before(static_cast<const T*>(in.before)),
        mean(static_cast<const A*>(in.mean)),
        rstd(static_cast<const A*>(in.rstd)),
        weight(static_cast<const A*>(in.weight)),
        bias(static_cast<const A*>(in.bias)) {}

  template <class Factors>
  __device__ void channel(int64_t channel, Factors& out) const {
    load_affine(mean, rstd, weight, bias, channel, out);
  }
  bool aligned() const { return is_aligned(x, dy, before, mean, rstd, weight, bias); }

  template <int N>
  __device__ GradientRaw<Pack<T, N>> load(int64_t offset) const {
    GradientRaw<Pack<T, N>> raw{};
    raw.x = cuda::load<N>(x + offset);
    raw.dy = cuda::load<N>(dy + offset);
    if (before != nullptr) raw.before = cuda::load<N>(before + offset);
    return raw;
  }

  // use(j, centred, dz) for every element j, given the factors mean, scale and bias
  template <int N, class Factors, class Use>
  __device__ void each(const GradientRaw<Pack<T, N>>& raw, const Factors& f, Use use) const {
    const Pack<A, N> x = to_acc(raw.x), dy = to_acc(raw.dy);
    const auto element = [&](int j, A added) {
      const A centred = x.v[j] - f.f[0].v[j];
      use(j, centred, act.through(centred * f.f[1].v[j] + f.f[2].v[j] + added, dy.v[j]));
    };
    if (Activate::kIdentity || before == nullptr) {
#pragma unroll
      for (int j = 0; j < N; ++j) element(j, A(0));
    } else {
      const Pack<A, N> added = to_acc(raw.before);
#pragma unroll
      for (int j = 0; j < N; ++j) element(j, added.v[j]);
    }
  }
};

// sum dz and sum dz (x - mean)
template <class T, class Activate>
struct SumsTerm : ChannelFactors<SumsTerm<T, Activate>, Acc<T>, 3> {
  using Base = ChannelFactors<SumsTerm<T, Activate>, Acc<T>, 3>;
  using A = Acc<T>;
  using Stat = Sums<A, 2>;
  template <int N>
  using Factors = typename Base::template Factors<N>;
  template <int N>
  using Raw = GradientRaw<Pack<T, N>>;
  using AtRunTime = SumsTerm<T, RunTimeAct>;
  static constexpr int N = kPack<T>, kUnroll = ceil_div(kUnrollOf<T>, 2), kBlocks = kMinBlocks;

  Gradient<T, Activate> gradient;
  A* partial;               // [parts, 2, c]
  A *sum_dz, *sum_dz_xhat;  // [c]

  explicit SumsTerm(const BatchNormReduce& a)
      : Base{Channels(a.in.images.c)},
        gradient(a.in, a.dy),
        partial(static_cast<A*>(a.partial)),
        sum_dz(static_cast<A*>(a.sum_dz)),
        sum_dz_xhat(static_cast<A*>(a.sum_dz_xhat)) {}

  template <int N>
  __device__ void channel(int64_t channel, int64_t /*plane*/, Factors<N>& out) const {
    gradient.channel(channel, out);
  }

  template <int N>
  __device__ Raw<N> load(int64_t offset) const {
    return gradient.template load<N>(offset);
  }

  template <int N>
  __device__ void add(const Raw<N>& raw, int64_t /*offset*/, const Factors<N>& f, Stat (&stats)[N]) const {
    gradient.each(raw, f, [&](int j, A centred, A dz) {
      stats[j].part[0] += dz;
      stats[j].part[1] += dz * centred;
    });
  }

  __device__ void finish(int64_t plane, const Stat& sums) const {
    store_part<2>(partial, this->channels, plane, sums.part);
  }
  __device__ void add_part(int64_t part, int64_t channel, double (&sums)[2]) const {
    load_part(partial, this->channels, part, channel, sums);
  }

  __device__ void finish_channel(int64_t channel, double dz, double dz_centred) const {
    sum_dz[channel] = static_cast<A>(dz);
    sum_dz_xhat[channel] = static_cast<A>(dz_centred * static_cast<double>(gradient.rstd[channel]));
  }
};

// dx = scale (dz - base - slope (x - mean)), dbefore = dz; either may be absent.
template <class T, class Activate>
struct BackwardTerm : ChannelFactors<BackwardTerm<T, Activate>, Acc<T>, 5> {
  using Base = ChannelFactors<BackwardTerm<T, Activate>, Acc<T>, 5>;
  using A = Acc<T>;
  template <int N>
  using Factors = typename Base::template Factors<N>;
  template <int N>
  using Raw = GradientRaw<Pack<T, N>>;
  using AtRunTime = BackwardTerm<T, RunTimeAct>;
  static constexpr int N = kPack<T>, kUnroll = ceil_div(kUnrollOf<T>, 2), kBlocks = kMinBlocks;

  Gradient<T, Activate> gradient;
  const A *sum_dz, *sum_dz_xhat;  // [c], or null for fixed statistics
  T *dx, *dbefore;                // as x, or null
  A per_count;

  explicit BackwardTerm(const BatchNormBackward& a)
      : Base{Channels(a.in.images.c)},
        gradient(a.in, a.dy),
        sum_dz(static_cast<const A*>(a.sum_dz)),
        sum_dz_xhat(static_cast<const A*>(a.sum_dz_xhat)),
        dx(static_cast<T*>(a.dx)),
        dbefore(static_cast<T*>(a.dbefore)),
        per_count(A(1 / a.count)) {}

  template <int N>
  __device__ void channel(int64_t channel, int64_t /*plane*/, Factors<N>& out) const {
    gradient.channel(channel, out);
    out.f[3] = out.f[4] = {};
    if (sum_dz == nullptr) return;
    out.f[3] = cuda::load<N>(sum_dz + channel) * per_count;
    out.f[4] = cuda::load<N>(sum_dz_xhat + channel) * cuda::load<N>(gradient.rstd + channel) * per_count;
  }

  template <int N>
  __device__ Raw<N> load(int64_t offset) const {
    return gradient.template load<N>(offset);
  }

  template <int N>
  __device__ void apply(const Raw<N>& raw, int64_t offset, const Factors<N>& f) const {
    Pack<T, N> to_dx, to_dbefore;
    gradient.each(raw, f, [&](int j, A centred, A dz) {
      from_acc(dz, to_dbefore.v[j]);
      from_acc(f.f[1].v[j] * (dz - f.f[3].v[j] - centred * f.f[4].v[j]), to_dx.v[j]);
    });
    if (dx != nullptr) store(dx + offset, to_dx);
    if (dbefore != nullptr) store(dbefore + offset, to_dbefore);
  }
};

template <class P>
struct FixedRaw {
  P dy, y;
};

// dx = scale dz, dbefore = dz, which may be absent, with dz = a'(y) dy of fixed statistics.
template <class T, class Activate>
struct FixedBackwardTerm : ChannelFactors<FixedBackwardTerm<T, Activate>, Acc<T>, 1> {
  using Base = ChannelFactors<FixedBackwardTerm<T, Activate>, Acc<T>, 1>;
  using A = Acc<T>;
  template <int N>
  using Factors = typename Base::template Factors<N>;
  template <int N>
  using Raw = FixedRaw<Pack<T, N>>;
  static constexpr int N = kPack<T>, kUnroll = ceil_div(kUnrollOf<T>, 2), kBlocks = kMinBlocks;

  const T *dy, *y;  // [n, c, hw] or [n, hw, c]
  const A* scale;   // [c]
  T *dx, *dbefore;  // as dy; dbefore may be null

  explicit FixedBackwardTerm(const BatchNormFixedBackward& a)
      : Base{Channels(a.images.c)},
        dy(static_cast<const T*>(a.dy)),
        y(static_cast<const T*>(a.y)),
        scale(static_cast<const A*>(a.scale)),
        dx(static_cast<T*>(a.dx)),
        dbefore(static_cast<T*>(a.dbefore)) {}

  template <int N>
  __device__ void channel(int64_t channel, int64_t /*plane*/, Factors<N>& out) const {
    out.f[0] = cuda::load<N>(scale + channel);
  }

  template <int N>
  __device__ Raw<N> load(int64_t offset) const {
    Raw<N> raw{};
    raw.dy = cuda::load<N>(dy + offset);
    if (!Activate::kIdentity) raw.y = cuda::load<N>(y + offset);
    return raw;
  }

  template <int N>
  __device__ void apply(const Raw<N>& raw, int64_t offset, const Factors<N>& f) const {
    Pack<T, N> to_dx, to_dbefore;
    const Pack<A, N> dy = to_acc(raw.dy), y = to_acc(raw.y);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A dz = Activate().through(y.v[j], dy.v[j]);
      from_acc(dz, to_dbefore.v[j]);
      from_acc(f.f[0].v[j] * dz, to_dx.v[j]);
    }
    store(dx + offset, to_dx);
    if (dbefore != nullptr) store(dbefore + offset, to_dbefore);
  }
};

}  // namespace

int batch_norm_act_reduce(const BatchNormReduce& a, void* stream) {
  return visit_images(a.in.images.dtype, a.in.act, [&]<class T, class Activate>() -> int {
    const SumsTerm<T, Activate> term(a);
    return reduce_batch(a.in.images, term, term.gradient.aligned(), stream);
  });
}

int batch_norm_act_backward(const BatchNormBackward& a, void* stream) {
  return visit_images(a.in.images.dtype, a.in.act, [&]<class T, class Activate>() -> int {
    const BackwardTerm<T, Activate> term(a);
    const bool aligned = term.gradient.aligned() && is_aligned(a.dx, a.dbefore, a.sum_dz, a.sum_dz_xhat);
    return map(a.in.images, term, aligned, stream);
  });
}

int batch_norm_act_fixed_backward(const BatchNormFixedBackward& a, void* stream) {
  const bool aligned = is_aligned(a.dy, a.y, a.scale, a.dx, a.dbefore);
  return visit_element(a.images.dtype, [&]<class T>() -> int {
    using enum Activation;
    if (a.act == kRelu) return map(a.images, FixedBackwardTerm<T, StaticAct<kRelu, T>>(a), aligned, stream);
    return map(a.images, FixedBackwardTerm<T, StaticAct<kIdentity, T>>(a), aligned, stream);
  });
}

}  // namespace fusedtrain::cuda

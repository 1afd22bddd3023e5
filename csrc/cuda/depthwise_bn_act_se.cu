// depthwise_bn_act_se on CUDA: the convolution with its statistics, and what follows it; see the header for the maths.
//
//   conv      x -> z, and the moments of z for the kernels that networks have
//   pool      z -> pooled                        the gate network is that of squeeze_excite.cu
//   scale     z, gate, residual -> y
//   reduce    dy, z -> five sums per plane       combine adds four of them up over the batch
//   backward  dy, z -> dz
#include "cuda/batch_sums.h"
#include "cuda/depthwise_pass.h"
#include "cuda/depthwise_planes.h"
#include "depthwise_bn_act_se.h"

namespace fusedtrain::cuda {
namespace {

// --- convolution ----------------------------------------------------------------------------------------------------

// Adds up the moments of the parts: sums of z about the mean of the first part, in double.
template <class A>
struct MomentsFinish {
  const A* moments;  // [parts, 4, c]
  int64_t c;
  A *mean, *m2;  // [c]
  double count;

  __device__ double mean_of(int64_t part, int64_t channel) const {
    const A* p = moments + 4 * part * c + channel;
    return static_cast<double>(p[c]) + static_cast<double>(p[2 * c]);
  }
  __device__ void add_part(int64_t part, int64_t channel, double (&sums)[2]) const {
    const A* p = moments + 4 * part * c + channel;
    const double n = static_cast<double>(p[0]), moved = mean_of(part, channel) - mean_of(0, channel);
    sums[0] += n * moved;
    sums[1] += static_cast<double>(p[3 * c]) + n * moved * moved;
  }
  __device__ void finish_channel(int64_t channel, double sum, double squares) const {
    const double moved = sum / count;
    mean[channel] = static_cast<A>(mean_of(0, channel) + moved);
    m2[channel] = static_cast<A>(at_least(squares - sum * moved, 0.0));
  }
};

template <class A>
int finish_moments(const BnActConv& a, int64_t parts, void* stream) {
  const DepthwiseSizes& s = a.sizes;
  const MomentsFinish<A> finish{static_cast<const A*>(a.partial), s.c * s.m, static_cast<A*>(a.mean),
                                static_cast<A*>(a.m2), static_cast<double>(s.n * s.ho * s.wo)};
  return finish_batch(finish, parts, finish.c, stream);
}

template <class T, int N, int K, int S>
int convolve(const BnActConv& a, void* stream) {
  const DepthwiseSizes& s = a.sizes;
  Pass<T> pass = forward_pass<T>(s, a.x, a.weight, a.bias, a.z);
  pass.moments = static_cast<Acc<T>*>(a.partial);
  const int code = run<T, N, Direct<K, S>, Then::kMoments>(pass, s, stream);
  const Tiles g = tiles_of<N, Acc<T>>(s, pass.channels, s.ho, s.wo, true);
  return code != cudaSuccess ? code : finish_moments<Acc<T>>(a, s.n * g.chunks, stream);
}

template <class T, int K, int S>
int convolve_patches(const BnActConv& a, void* stream) {
  const DepthwiseSizes& s = a.sizes;
  PatchPass<T> pass = patch_pass<T>(s, a.x, a.weight, a.bias, a.z);
  pass.moments = static_cast<float*>(a.partial);
  const PatchTiles g = forward_patches<K, S>(s);
  const int code = run_patches<T, K, S, true>(pass, g, stream);
  return code != cudaSuccess ? code : finish_moments<float>(a, g.blocks, stream);
}

int convolve_planes(const BnActConv& a, void* stream) {
  const DepthwiseConv2d conv{a.sizes, Activation::kIdentity, a.x, a.weight, a.bias, a.z, nullptr};
  const int code = planes_forward(conv, static_cast<float*>(a.partial), stream);
  return code != cudaSuccess ? code : finish_moments<float>(a, planes_parts(a.sizes), stream);
}

// The images of z as statistics over the batch see them.
Images batch_of(const DepthwiseSizes& s) {
  const int64_t c = s.c * s.m, hw = s.ho * s.wo;
  if (s.layout == Layout::kContiguous) return {s.n, c, hw, s.dtype, s.layout, {}};
  return {1, c, s.n * hw, s.dtype, s.layout, {}};
}

constexpr int kMostMomentTaps = 5;  // of a row of the kernel

bool gathers_moments(const DepthwiseSizes& s) {
  return s.kw <= kMostMomentTaps && s.sw <= 2 && s.dil_w == 1 && s.dtype != DType::kFloat64 && s.n > 0;
}

// --- what follows ---------------------------------------------------------------------------------------------------

// z, and the factors mean, weight rstd and bias of its channels, which come first.
template <class T>
struct Normalised {
  using A = Acc<T>;
  const T* z;                            // [n, c, hw] or [n, hw, c]
  const A *mean, *rstd, *weight, *bias;  // [c]

  explicit Normalised(const BnAct& in)
      : z(static_cast<const T*>(in.z)),
        mean(static_cast<const A*>(in.mean)),
        rstd(static_cast<const A*>(in.rstd)),
        weight(static_cast<const A*>(in.weight)),
        bias(static_cast<const A*>(in.bias)) {}

  template <class Factors>
  __device__ void channel(int64_t channel, Factors& out) const {
    load_affine(mean, rstd, weight, bias, channel, out);
  }
  bool aligned() const { return is_aligned(z, mean, rstd, weight, bias); }
  template <class Factors>
  __device__ A centred(A z, int j, const Factors& f) const {
    return z - f.f[0].v[j];
  }
  template <class Factors>
  __device__ A u(A centred, int j, const Factors& f) const {
    return centred * f.f[1].v[j] + f.f[2].v[j];
  }
};

// pooled = 1/hw sum a(u)
template <class T, class Activate>
struct PoolTerm : ChannelFactors<PoolTerm<T, Activate>, Acc<T>, 3> {
  using Base = ChannelFactors<PoolTerm<T, Activate>, Acc<T>, 3>;
  using A = Acc<T>;
  using Stat = Sums<A, 1>;
  template <int N>
  using Factors = typename Base::template Factors<N>;
  template <int N>
  using Raw = Pack<T, N>;
  using AtRunTime = PoolTerm<T, RunTimeAct>;
  static constexpr int N = kPack<T>, kUnroll = kUnrollOf<T>, kBlocks = Activate::kBlocks;

  Activate act;
  Normalised<T> in;
  A* pooled;  // [n, c]
  A hw;

  explicit PoolTerm(const BnActPool& a)
      : Base{Channels(a.in.images.c)},
        act{a.in.images.in_act},
        in(a.in),
        pooled(static_cast<A*>(a.pooled)),
        hw(static_cast<A>(a.in.images.hw)) {}

  template <int N>
  __device__ void channel(int64_t channel, int64_t /*plane*/, Factors<N>& out) const {
    in.channel(channel, out);
  }

  template <int N>
  __device__ Raw<N> load(int64_t offset) const {
    return cuda::load<N>(in.z + offset);
  }

  template <int N>
  __device__ void add(const Raw<N>& raw, int64_t /*offset*/, const Factors<N>& f, Stat (&stats)[N]) const {
    const Pack<A, N> z = to_acc(raw);
#pragma unroll
    for (int j = 0; j < N; ++j) stats[j].part[0] += act.value(in.u(in.centred(z.v[j], j, f), j, f));
  }

  __device__ void finish(int64_t plane, const Stat& sum) const { pooled[plane] = sum.part[0] / hw; }
};

template <class P>
struct SumRaw {
  P z, residual;
};

// y = a(u) gate, or with kAdds the sum of that and the residual, at least `least`
template <class T, class Activate, bool kAdds>
struct ScaleTerm : ChannelFactors<ScaleTerm<T, Activate, kAdds>, Acc<T>, 4> {
  using Base = ChannelFactors<ScaleTerm<T, Activate, kAdds>, Acc<T>, 4>;
  using A = Acc<T>;
  template <int N>
  using Factors = typename Base::template Factors<N>;
  template <int N>
  using Raw = SumRaw<Pack<T, N>>;
  using AtRunTime = ScaleTerm<T, RunTimeAct, kAdds>;
  static constexpr int N = kPack<T>, kUnroll = kAdds ? 1 : ceil_div(kUnrollOf<T>, 2), kBlocks = Activate::kBlocks;

  Activate act;
  Normalised<T> in;
  const A* gate;      // [n, c]
  const T* residual;  // as z
  T* y;               // as z
  A least;

  explicit ScaleTerm(const BnActScale& a)
      : Base{Channels(a.in.images.c)},
        act{a.in.images.in_act},
        in(a.in),
        gate(static_cast<const A*>(a.gate)),
        residual(static_cast<const T*>(a.residual)),
        y(static_cast<T*>(a.y)),
        least(a.relu ? A(0) : -std::numeric_limits<A>::infinity()) {}

  template <int N>
  __device__ void channel(int64_t channel, int64_t plane, Factors<N>& out) const {
    in.channel(channel, out);
    out.f[3] = cuda::load<N>(gate + plane);
  }

  template <int N>
  __device__ Raw<N> load(int64_t offset) const {
    Raw<N> raw{cuda::load<N>(in.z + offset), {}};
    if constexpr (kAdds) raw.residual = cuda::load<N>(residual + offset);
    return raw;
  }

  template <int N>
  __device__ void apply(const Raw<N>& raw, int64_t offset, const Factors<N>& f) const {
    const Pack<A, N> z = to_acc(raw.z), added = to_acc(raw.residual);
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      A scaled = act.value(in.u(in.centred(z.v[j], j, f), j, f)) * f.f[3].v[j];
      if constexpr (kAdds) scaled = at_least(scaled + added.v[j], least);
      from_acc(scaled, out.v[j]);
    }
    store(y + offset, out);
  }
};

template <class P>
struct GradientRaw {
  P z, dy;
};

// dgate, and the sums of dy a'(u), a'(u) and of both times z - mean
template <class T, class Activate>
struct ReduceTerm : ChannelFactors<ReduceTerm<T, Activate>, Acc<T>, 3> {
  using Base = ChannelFactors<ReduceTerm<T, Activate>, Acc<T>, 3>;
  using A = Acc<T>;
  static constexpr int kSums = BnActReduce::kSums;
  using Stat = Sums<A, kSums>;
  template <int N>
  using Factors = typename Base::template Factors<N>;
  template <int N>
  using Raw = GradientRaw<Pack<T, N>>;
  using AtRunTime = ReduceTerm<T, RunTimeAct>;
  static constexpr int N = kPack<T>, kUnroll = 1, kBlocks = kMinBlocks;

  Activate act;
  Normalised<T> in;
  const T* dy;      // as z
  A *dgate, *sums;  // [n, c], [n, kSums - 1, c]

  explicit ReduceTerm(const BnActReduce& a)
      : Base{Channels(a.in.images.c)},
        act{a.in.images.in_act},
        in(a.in),
        dy(static_cast<const T*>(a.dy)),
        dgate(static_cast<A*>(a.dgate)),
        sums(static_cast<A*>(a.sums)) {}

  template <int N>
  __device__ void channel(int64_t channel, int64_t /*plane*/, Factors<N>& out) const {
    in.channel(channel, out);
  }

  template <int N>
  __device__ Raw<N> load(int64_t offset) const {
    return {cuda::load<N>(in.z + offset), cuda::load<N>(dy + offset)};
  }

  template <int N>
  __device__ void add(const Raw<N>& raw, int64_t /*offset*/, const Factors<N>& f, Stat (&stats)[N]) const {
    const Pack<A, N> z = to_acc(raw.z), dy = to_acc(raw.dy);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A centred = in.centred(z.v[j], j, f), u = in.u(centred, j, f), d = dy.v[j];
      const A slope = act.slope(u), through_y = d * slope;
      stats[j].part[0] += d * act.value(u);
      stats[j].part[1] += through_y;
      stats[j].part[2] += slope;
      stats[j].part[3] += through_y * centred;
      stats[j].part[4] += slope * centred;
    }
  }

  __device__ void finish(int64_t plane, const Stat& stat) const {
    dgate[plane] = stat.part[0];
    store_part<kSums - 1>(sums, this->channels, plane, stat.part + 1);
  }
};

// sum_du and sum_du_xhat; a part is a sample.
template <class A>
struct CombineTerm {
  const A* sums;            // [n, kSums - 1, c]
  const A *gate, *dpooled;  // [n, c]
  const A* rstd;            // [c]
  A *sum_du, *sum_du_xhat;  // [c]
  int64_t c;
  double per_pixel;  // 1 / hw

  explicit CombineTerm(const BnActCombine& a)
      : sums(static_cast<const A*>(a.sums)),
        gate(static_cast<const A*>(a.gate)),
        dpooled(static_cast<const A*>(a.dpooled)),
        rstd(static_cast<const A*>(a.rstd)),
        sum_du(static_cast<A*>(a.sum_du)),
        sum_du_xhat(static_cast<A*>(a.sum_du_xhat)),
        c(a.c),
        per_pixel(1 / static_cast<double>(a.hw)) {}

  __device__ void add_part(int64_t sample, int64_t channel, double (&total)[2]) const {
    const A* p = sums + (BnActReduce::kSums - 1) * sample * c + channel;
    const double g = static_cast<double>(gate[sample * c + channel]);
    const double d = static_cast<double>(dpooled[sample * c + channel]) * per_pixel;
    total[0] += g * static_cast<double>(p[0]) + d * static_cast<double>(p[c]);
    total[1] += g * static_cast<double>(p[2 * c]) + d * static_cast<double>(p[3 * c]);
  }
  __device__ void finish_channel(int64_t channel, double du, double du_centred) const {
    sum_du[channel] = static_cast<A>(du);
    sum_du_xhat[channel] = static_cast<A>(du_centred * static_cast<double>(rstd[channel]));
  }
};

// dz = scale (du - base - slant (z - mean)), du = a'(u) (gate dy + dpooled / hw)
template <class T, class Activate>
struct BackwardTerm : ChannelFactors<BackwardTerm<T, Activate>, Acc<T>, 7> {
  using Base = ChannelFactors<BackwardTerm<T, Activate>, Acc<T>, 7>;
  using A = Acc<T>;
  template <int N>
  using Factors = typename Base::template Factors<N>;
  template <int N>
  using Raw = GradientRaw<Pack<T, N>>;
  using AtRunTime = BackwardTerm<T, RunTimeAct>;
  static constexpr int N = kPack<T>, kUnroll = 1, kBlocks = kMinBlocks;

  Activate act;
  Normalised<T> in;
  const T* dy;                    // as z
  const A *gate, *dpooled;        // [n, c], or null without a gate
  const A *sum_du, *sum_du_xhat;  // [c], or null for fixed statistics
  T* dz;                          // as z
  A per_pixel, per_count;

  explicit BackwardTerm(const BnActBackward& a)
      : Base{Channels(a.in.images.c)},
        act{a.in.images.in_act},
        in(a.in),
        dy(static_cast<const T*>(a.dy)),
        gate(static_cast<const A*>(a.gate)),
        dpooled(static_cast<const A*>(a.dpooled)),
        sum_du(static_cast<const A*>(a.sum_du)),
        sum_du_xhat(static_cast<const A*>(a.sum_du_xhat)),
        dz(static_cast<T*>(a.dz)),
        per_pixel(A(1 / static_cast<double>(a.in.images.hw))),
        per_count(A(1 / a.count)) {}

  template <int N>
  __device__ void channel(int64_t channel, int64_t plane, Factors<N>& out) const {
    in.channel(channel, out);
    out.f[4] = out.f[5] = out.f[6] = {};
    if (gate != nullptr) {
      out.f[3] = cuda::load<N>(gate + plane);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) out.f[3].v[j] = A(1);
    }
    if (dpooled != nullptr) out.f[4] = cuda::load<N>(dpooled + plane) * per_pixel;
    if (sum_du == nullptr) return;
    out.f[5] = cuda::load<N>(sum_du + channel) * per_count;
    out.f[6] = cuda::load<N>(sum_du_xhat + channel) * cuda::load<N>(in.rstd + channel) * per_count;
  }

  template <int N>
  __device__ Raw<N> load(int64_t offset) const {
    return {cuda::load<N>(in.z + offset), cuda::load<N>(dy + offset)};
  }

  template <int N>
  __device__ void apply(const Raw<N>& raw, int64_t offset, const Factors<N>& f) const {
    const Pack<A, N> z = to_acc(raw.z), dy = to_acc(raw.dy);
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A centred = in.centred(z.v[j], j, f);
      const A du = act.through(in.u(centred, j, f), f.f[3].v[j] * dy.v[j] + f.f[4].v[j]);
      from_acc(f.f[1].v[j] * (du - f.f[5].v[j] - centred * f.f[6].v[j]), out.v[j]);
    }
    store(dz + offset, out);
  }
};

template <class F>
int visit_block(const BnAct& in, F&& f) {
  return visit_images(in.images.dtype, in.images.in_act, f);
}

}  // namespace

int64_t bn_act_conv_partial_size(const DepthwiseSizes& s) {
  const Images batch = batch_of(s);
  int64_t parts = batch.n * reduce_chunks(batch);
  for (const int64_t n : {1, 4, 8}) {  // the elements that a thread takes at a time are not known yet
    const int64_t chunks = n == 1   ? tiles_of<1, float>(s, s.c * s.m, s.ho, s.wo, true).chunks
                           : n == 4 ? tiles_of<4, float>(s, s.c * s.m, s.ho, s.wo, true).chunks
                                    : tiles_of<8, float>(s, s.c * s.m, s.ho, s.wo, true).chunks;
    parts = std::max(parts, s.n * chunks);
  }
  if (has_planes(s)) parts = std::max(parts, planes_parts(s));
  if (has_patches(s)) {
    const int code = visit_patches(s, [&]<class T, int K, int S>() -> int {
      parts = std::max(parts, forward_patches<K, S>(s).blocks);
      return cudaSuccess;
    });
    if (code != cudaSuccess) return 0;
  }
  return 4 * parts * s.c * s.m;
}

int bn_act_conv(const BnActConv& a, void* stream) {
  const DepthwiseSizes& s = a.sizes;
  if (has_planes(s) && s.n > 0) return convolve_planes(a, stream);
  if (gathers_moments(s) && has_patches(s) && is_aligned(a.x, a.z)) {
    return visit_patches(s, [&]<class T, int K, int S>() -> int {
      if constexpr (K > kMostMomentTaps)
        return cudaErrorInvalidValue;
      else
        return convolve_patches<T, K, S>(a, stream);
    });
  }
  if (!gathers_moments(s)) {
    const DepthwiseConv2d conv{s, Activation::kIdentity, a.x, a.weight, a.bias, a.z, nullptr};
    const BatchNormStats stats{batch_of(s), 1, a.z, a.partial, a.mean, a.m2};
    const int code = depthwise_conv2d(conv, stream);
    return code != cudaSuccess ? code : batch_norm_act_stats(stats, stream);
  }
  return visit_pack(s, is_aligned(a.x, a.z), [&]<class T, int N>() -> int {
    if constexpr (std::is_same_v<T, double>) {
      return cudaErrorInvalidValue;
    } else if constexpr (N > 1) {
      return convolve<T, N, 1, 0>(a, stream);
    } else {
      int code = cudaErrorInvalidValue;
      visit<1, 2>(static_cast<int>(s.sw), [&]<int S>() {
        code = s.kw <= 3 ? convolve<T, N, 3, S>(a, stream) : convolve<T, N, 5, S>(a, stream);
      });
      return code;
    }
  });
}

int bn_act_pool(const BnActPool& a, void* stream) {
  return visit_block(a.in, [&]<class T, class Activate>() -> int {
    const PoolTerm<T, Activate> term(a);
    return reduce(a.in.images, term, term.in.aligned(), kReduceChunk, a.partial, stream);
  });
}

int bn_act_scale(const BnActScale& a, void* stream) {
  return visit_block(a.in, [&]<class T, class Activate>() -> int {
    if (a.residual == nullptr) {
      const ScaleTerm<T, Activate, false> term(a);
      return map(a.in.images, term, term.in.aligned() && is_aligned(a.gate, a.y), stream);
    }
    // In front of a gate with a residual networks have no activation: others share a kernel.
    using Shared =
        std::conditional_t<std::is_same_v<Activate, StaticAct<Activation::kIdentity, T>>, Activate, RunTimeAct>;
    const ScaleTerm<T, Shared, true> term(a);
    return map(a.in.images, term, term.in.aligned() && is_aligned(a.gate, a.residual, a.y), stream);
  });
}

int bn_act_reduce(const BnActReduce& a, void* stream) {
  return visit_block(a.in, [&]<class T, class Activate>() -> int {
    const ReduceTerm<T, Activate> term(a);
    return reduce(a.in.images, term, term.in.aligned() && is_aligned(a.dy), kReduceChunk, a.partial, stream);
  });
}

int bn_act_combine(const BnActCombine& a, void* stream) {
  return a.dtype == DType::kFloat64 ? finish_batch(CombineTerm<double>(a), a.n, a.c, stream)
                                    : finish_batch(CombineTerm<float>(a), a.n, a.c, stream);
}

int bn_act_backward(const BnActBackward& a, void* stream) {
  return visit_block(a.in, [&]<class T, class Activate>() -> int {
    const BackwardTerm<T, Activate> term(a);
    const bool aligned = term.in.aligned() && is_aligned(a.dy, a.dz, a.gate, a.dpooled, a.sum_du, a.sum_du_xhat);
    return map(a.in.images, term, aligned, stream);
  });
}

}  // namespace fusedtrain::cuda

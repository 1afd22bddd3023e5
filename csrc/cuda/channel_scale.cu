// channel_scale on CUDA: every tensor is read or written once, in the walks of core/cuda_images.h.
#include "channel_scale.h"
#include "core/cuda_images.h"

namespace fusedtrain::cuda {
namespace {

// y = a(x) * gate
template <class T, class Activate>
struct ScaleTerm : FactorSource<Acc<T>, 1> {
  template <int N>
  using Factors = FactorPack<Acc<T>, 1, N>;
  template <int N>
  using Raw = Pack<T, N>;
  using AtRunTime = ScaleTerm<T, RunTimeAct>;
  static constexpr int N = kPack<T>, kUnroll = kUnrollOf<T>, kBlocks = Activate::kBlocks;

  const T* x;  // [n, c, hw] or [n, hw, c]
  T* y;        // as x
  Activate act;

  template <int N>
  __device__ Raw<N> load(int64_t offset) const {
    return cuda::load<N>(x + offset);
  }

  template <int N>
  __device__ void apply(const Raw<N>& raw, int64_t offset, const Factors<N>& factors) const {
    const Pack<Acc<T>, N> values = to_acc(raw);
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) from_acc(act.value(values.v[j]) * factors.f[0].v[j], out.v[j]);
    store(y + offset, out);
  }
};

// dgate = sum_hw dy * a(x), and with kDx dx = a'(x) * dy * gate
template <class T, class Activate, bool kDx>
struct DotTerm : std::conditional_t<kDx, FactorSource<Acc<T>, 1>, NoFactors> {
  using Base = std::conditional_t<kDx, FactorSource<Acc<T>, 1>, NoFactors>;
  using A = Acc<T>;
  using Stat = Sum<A>;
  template <int N>
  using Factors = typename Base::template Factors<N>;
  template <int N>
  using Raw = RawPair<T, N>;
  using AtRunTime = DotTerm<T, RunTimeAct, kDx>;
  static constexpr int N = kPack<T>, kUnroll = ceil_div(kUnrollOf<T>, 2), kBlocks = Activate::kBlocks;

  const T* dy;  // as x
  const T* x;   // [n, c, hw] or [n, hw, c]
  A* dgate;     // [n, c]
  T* dx;        // as x
  Activate act;

  template <int N>
  __device__ Raw<N> load(int64_t offset) const {
    return {cuda::load<N>(x + offset), cuda::load<N>(dy + offset)};
  }

  template <int N>
  __device__ void add(const Raw<N>& raw, [[maybe_unused]] int64_t offset, [[maybe_unused]] const Factors<N>& gate,
                      Stat (&stats)[N]) const {
    const Pack<A, N> values = to_acc(raw.x), slopes = to_acc(raw.dy);
#pragma unroll
    for (int j = 0; j < N; ++j) stats[j].add(slopes.v[j] * act.value(values.v[j]));
    if constexpr (kDx) {
      Pack<T, N> out;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        from_acc(act.through(values.v[j], slopes.v[j] * gate.f[0].v[j]), out.v[j]);
      }
      store(dx + offset, out);
    }
  }

  __device__ void finish(int64_t nc, const Stat& stat) const { dgate[nc] = stat.part[0]; }
};

// dx = a'(x) * (dy * gate + dpool), dpool = average * dpooled, and where Peak + [a(x) = peak] 0.5 dpooled / ties.
// Factors gate, dpooled and, where Peak, peak and ties. dy is read where present, x where the result depends on it.
template <class T, class Activate, bool Peak>
struct ScaleBackwardTerm : FactorSource<Acc<T>, Peak ? 4 : 2> {
  using A = Acc<T>;
  template <int N>
  using Factors = FactorPack<A, Peak ? 4 : 2, N>;
  template <int N>
  using Raw = RawPair<T, N>;
  // As in channel_pool.cu.
  using AtRunTime = ScaleBackwardTerm<T, std::conditional_t<Peak, Activate, RunTimeAct>, Peak>;
  static constexpr int N = kPack<T>, kUnroll = ceil_div(kUnrollOf<T>, 2), kBlocks = Activate::kBlocks;
  static constexpr bool kReadsX = !Activate::kIdentity || Peak;

  const T* dy;  // as x, or null
  const T* x;   // [n, c, hw] or [n, hw, c]
  T* dx;        // as x
  A average;    // 1 / hw, or 0.5 / hw
  Activate act;

  template <int N>
  __device__ Raw<N> load(int64_t offset) const {
    Raw<N> raw;
    if (kReadsX) raw.x = cuda::load<N>(x + offset);
    if (dy != nullptr) raw.dy = cuda::load<N>(dy + offset);
    return raw;
  }

  template <int N>
  __device__ void apply(const Raw<N>& raw, int64_t offset, const Factors<N>& factors) const {
    const Pack<A, N> values = to_acc(raw.x), slopes = to_acc(raw.dy);
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A dpooled = factors.f[1].v[j];
      A slope = average * dpooled;
      if (dy != nullptr) slope += slopes.v[j] * factors.f[0].v[j];
      if constexpr (Peak) {
        const A at_peak = act.value(values.v[j]) == factors.f[2].v[j] ? A(1) : A(0);
        slope += at_peak * vdivide(A(0.5) * dpooled, factors.f[3].v[j]);  // a NaN has no ties: 0 / 0, as in torch
      }
      if constexpr (!Activate::kIdentity) slope = act.through(values.v[j], slope);
      from_acc(slope, out.v[j]);
    }
    store(dx + offset, out);
  }
};

template <class T, class Activate>
int scale(const ChannelScale& a, void* stream) {
  const auto* gate = static_cast<const Acc<T>*>(a.gate);
  const ScaleTerm<T, Activate> term{{{gate}}, static_cast<const T*>(a.x), static_cast<T*>(a.y), {a.images.in_act}};
  return map(a.images, term, is_aligned(a.x, a.y, a.gate), stream);
}

template <class T, class Activate, bool kDx>
int scale_dot(const ChannelScaleDot& a, void* stream) {
  DotTerm<T, Activate, kDx> term;
  if constexpr (kDx) term.p[0] = static_cast<const Acc<T>*>(a.gate);
  term.dy = static_cast<const T*>(a.dy);
  term.x = static_cast<const T*>(a.x);
  term.dgate = static_cast<Acc<T>*>(a.dgate);
  term.dx = static_cast<T*>(a.dx);
  term.act = {a.images.in_act};
  return reduce(a.images, term, is_aligned(a.dy, a.x, a.gate, a.dx), kReduceChunk, a.partial, stream);
}

template <class T, class Activate, bool Peak>
int scale_backward(const ChannelScaleBackward& a, void* stream) {
  using Term = ScaleBackwardTerm<T, Activate, Peak>;
  using A = Acc<T>;
  Term term;
  term.p[0] = static_cast<const A*>(a.gate);
  term.p[1] = static_cast<const A*>(a.dpooled);
  if constexpr (Peak) {
    term.p[2] = static_cast<const A*>(a.peak);
    term.p[3] = static_cast<const A*>(a.ties);
  }
  term.dy = static_cast<const T*>(a.dy);
  term.x = static_cast<const T*>(a.x);
  term.dx = static_cast<T*>(a.dx);
  term.act = {a.images.in_act};
  term.average = A(Peak ? 0.5 : 1) / static_cast<A>(a.images.hw);
  return map(a.images, term, is_aligned(a.dy, a.x, a.dx, a.gate, a.dpooled, a.peak, a.ties), stream);
}

}  // namespace

int channel_scale(const ChannelScale& a, void* stream) {
  return visit_images(a.images.dtype, a.images.in_act,
                      [&]<class T, class Activate>() { return scale<T, Activate>(a, stream); });
}

int channel_scale_dot(const ChannelScaleDot& a, void* stream) {
  return visit_images(a.images.dtype, a.images.in_act, [&]<class T, class Activate>() {
    return a.dx != nullptr ? scale_dot<T, Activate, true>(a, stream) : scale_dot<T, Activate, false>(a, stream);
  });
}

int channel_scale_backward(const ChannelScaleBackward& a, void* stream) {
  return visit_images(a.images.dtype, a.images.in_act, [&]<class T, class Activate>() {
    return a.pool == Pool::kAvg ? scale_backward<T, Activate, false>(a, stream)
                                : scale_backward<T, Activate, true>(a, stream);
  });
}

}  // namespace fusedtrain::cuda

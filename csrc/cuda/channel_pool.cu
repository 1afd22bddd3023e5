// channel_pool on CUDA: x is read once, in the walks of core/cuda_images.h.
//
//   kAvg     pooled = sum a(x) / hw
//   kAvgMax  pooled = 0.5 sum a(x) / hw + 0.5 max a(x)
#include "channel_pool.h"
#include "core/cuda_images.h"

namespace fusedtrain::cuda {
namespace {

template <class T, class Activate, template <class> class S>
struct PoolTerm : NoFactors {
  using A = Acc<T>;
  using Stat = S<A>;
  template <int N>
  using Raw = Pack<T, N>;
  // A maximum keeps its activation: backward looks for it by its bits.
  using AtRunTime = PoolTerm<T, std::conditional_t<Stat::kParts == 1, RunTimeAct, Activate>, S>;
  static constexpr int N = kPack<T>, kUnroll = kUnrollOf<T>, kBlocks = Activate::kBlocks;

  const T* x;  // [n, c, hw] or [n, hw, c]
  A* pooled;   // [n, c]
  A* peak;     // [n, c], unused by kAvg
  A* ties;     // [n, c], unused by kAvg
  A hw;
  Activate act;

  template <int N>
  __device__ Raw<N> load(int64_t offset) const {
    return cuda::load<N>(x + offset);
  }

  template <int N>
  __device__ void add(const Raw<N>& raw, int64_t /*offset*/, const Factors<N>&, Stat (&stats)[N]) const {
    const Pack<A, N> values = to_acc(raw);
#pragma unroll
    for (int j = 0; j < N; ++j) stats[j].add(act.value(values.v[j]));
  }

  __device__ void finish(int64_t nc, const Stat& stat) const {
    const A mean = stat.part[0] / hw;
    if constexpr (Stat::kParts == 1) {
      pooled[nc] = mean;
    } else {
      pooled[nc] = A(0.5) * mean + A(0.5) * stat.part[1];
      peak[nc] = stat.part[1];
      ties[nc] = stat.part[1] == stat.part[1] ? stat.part[2] : A(0);  // a NaN equals nothing
    }
  }
};

template <class T, class Activate, template <class> class S>
int pool(const ChannelPool& a, void* stream) {
  const PoolTerm<T, Activate, S> term{{},
                                      static_cast<const T*>(a.x),
                                      static_cast<Acc<T>*>(a.pooled),
                                      static_cast<Acc<T>*>(a.peak),
                                      static_cast<Acc<T>*>(a.ties),
                                      static_cast<Acc<T>>(a.images.hw),
                                      {a.images.in_act}};
  return reduce(a.images, term, is_aligned(a.x), kReduceChunk, a.partial, stream);
}

}  // namespace

int channel_pool(const ChannelPool& a, void* stream) {
  return visit_images(a.images.dtype, a.images.in_act, [&]<class T, class Activate>() {
    return a.pool == Pool::kAvg ? pool<T, Activate, Sum>(a, stream) : pool<T, Activate, SumPeak>(a, stream);
  });
}

}  // namespace fusedtrain::cuda

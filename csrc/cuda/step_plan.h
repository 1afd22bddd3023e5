#pragma once
// What the kernels of optimizer_step share: the rule that a block works by, and the sums of the first pass.
#include "core/cuda_lists.h"
#include "optimizer_step.h"

namespace fusedtrain::cuda {

using Steps = SegmentOf<OptimizerStep>;

// Those tensors of a segment that are not is_plain.
[[nodiscard]] int optimizer_step_narrow_norms(const Steps& s, void* stream);
[[nodiscard]] int optimizer_step_narrow(const Steps& s, void* stream);

namespace {

// R<float> -> R<A>
template <class R, class A>
struct RuleOf;
template <template <class, bool...> class R, class From, bool... kFlags, class A>
struct RuleOf<R<From, kFlags...>, A> {
  using Type = R<A, kFlags...>;
};

// The rule and the factor on the gradients. One thread computes them: they take powers in double.
template <class R, class A>
struct Plan {
  R rule;
  A factor;
};

template <class R, class A>
__device__ __forceinline__ Plan<R, A> plan_of(const OptimizerStep& a, const StepTensor& t, const Ratio& ratio) {
  auto* shared = shared_memory<Plan<R, A>>();
  if (threadIdx.x == 0) {
    *shared = {R(hyper_of(a), t.step != nullptr ? *t.step + 1.0 : 1.0, ratio), static_cast<A>(grad_factor(a))};
  }
  __syncthreads();
  return *shared;
}

// The sums of the rule's first pass over a chunk, from those of its threads; the others are 0.
template <class R, class A>
__device__ __forceinline__ void store_sums(const Steps& s, const A* sums) {
  double* const partial = s.list.partial + kMaxSums * (s.chunks_before + blockIdx.x);
#pragma unroll
  for (int k = 0; k < kMaxSums; ++k) {
    __syncthreads();  // nobody reads what is in shared memory any more
    const double sum = k < kSummed<R> ? block_sum(sums[k < kSummed<R> ? k : 0], shared_memory<double>()) : 0.0;
    if (threadIdx.x == 0) partial[k] = sum;
  }
}

}  // namespace
}  // namespace fusedtrain::cuda

// optimizer_step on CUDA: every tensor is read and written once, in one launch for as many as a kernel's argument
// holds, after a first pass for rules that need norms. What is stored in fewer bits than it is computed in is left to
// optimizer_step_narrow.cu.
#include "cuda/step_plan.h"

namespace fusedtrain::cuda {
namespace {

template <class T, class R>
__device__ __forceinline__ void update(const OptimizerStep& a, const StepTensor& t, const Chunk& chunk,
                                       const Ratio& ratio) {
  using A = Acc<T>;
  const auto [rule, factor] = plan_of<R, A>(a, t, ratio);
  const A ema_rate = static_cast<A>(1 - a.ema_decay);
  T* const param = static_cast<T*>(t.param) + chunk.begin;
  T* const grad = static_cast<T*>(t.grad) + chunk.begin;
  A* const ema = t.ema != nullptr ? static_cast<A*>(t.ema) + chunk.begin : nullptr;
  T* states[kMaxStates];
  bool aligned = is_aligned(param, grad, ema);
#pragma unroll
  for (int k = 0; k < R::kStates; ++k) {
    states[k] = static_cast<T*>(t.states[k]) + chunk.begin;
    aligned &= is_aligned(states[k]);
  }
  for_each_pack<T>(chunk.count, aligned, [&]<int N>(int i) {
    Pack<T, N> p = load<N>(param + i), g = load<N>(grad + i), s[kMaxStates];
    Pack<A, N> mean{};
#pragma unroll
    for (int k = 0; k < R::kStates; ++k) s[k] = load<N>(states[k] + i);
    if (ema != nullptr) mean = load<N>(ema + i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      A own[kMaxStates];
#pragma unroll
      for (int k = 0; k < R::kStates; ++k) own[k] = to_acc(s[k].v[j]);
      from_acc(rule(to_acc(p.v[j]), to_acc(g.v[j]) * factor, own), p.v[j]);
#pragma unroll
      for (int k = 0; k < R::kStates; ++k) from_acc(own[k], s[k].v[j]);
      mean.v[j] += ema_rate * (to_acc(p.v[j]) - mean.v[j]);
    }
    store(param + i, p);
    if constexpr (!R::kStatesFirst) {
#pragma unroll
      for (int k = 0; k < R::kStates; ++k) store(states[k] + i, s[k]);
    }
    if (ema != nullptr) store(ema + i, mean);
    if (a.zero_grads) store(grad + i, Pack<T, N>{});
  });
}

// Three blocks per multiprocessor hide the latency of memory better than two; four states do not leave the registers.
template <class R>
constexpr int kStepBlocks = R::kStates < 4 ? 3 : kMinBlocks;

template <class R>
__global__ void __launch_bounds__(kThreads, kStepBlocks<R>) optimizer_step_kernel(const __grid_constant__ Steps s) {
  const OptimizerStep& a = s.list;
  const bool skipped = is_skipped(a);
  if (skipped && !a.zero_grads) return;
  const Chunk chunk = chunk_of_block(s);
  const StepTensor& t = s.rows[chunk.row];
  if (!is_plain(a, t)) return;
  visit_row(t.dtype, [&]<class T>() {
    if (!skipped) {
      const Ratio ratio = R::kNorms ? a.ratio[s.begin + chunk.row] : Ratio{};
      return update<T, typename RuleOf<R, Acc<T>>::Type>(a, t, chunk, ratio);
    }
    T* const grad = static_cast<T*>(t.grad) + chunk.begin;
    for_each_pack<T>(chunk.count, is_aligned(grad), [&]<int N>(int i) { store(grad + i, Pack<T, N>{}); });
  });
}

// The sums of the rule's first pass over a chunk.
template <class T, class R>
__device__ __forceinline__ void norms(const OptimizerStep& a, const StepTensor& t, const Chunk& chunk, Acc<T>* sums) {
  using A = Acc<T>;
  const auto [rule, factor] = plan_of<R, A>(a, t, Ratio{});
  const T* const param = static_cast<const T*>(t.param) + chunk.begin;
  const T* const grad = static_cast<const T*>(t.grad) + chunk.begin;
  T* states[kMaxStates];
  bool aligned = is_aligned(param, grad);
#pragma unroll
  for (int k = 0; k < R::kStates; ++k) {
    states[k] = static_cast<T*>(t.states[k]) + chunk.begin;
    aligned &= is_aligned(states[k]);
  }
  for_each_pack<T>(chunk.count, aligned, [&]<int N>(int i) {
    Pack<T, N> p = load<N>(param + i), g = load<N>(grad + i), s[kMaxStates];
#pragma unroll
    for (int k = 0; k < R::kStates; ++k) s[k] = load<N>(states[k] + i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      A own[kMaxStates], squares[R::kSums];
#pragma unroll
      for (int k = 0; k < R::kStates; ++k) own[k] = to_acc(s[k].v[j]);
      const A x = to_acc(g.v[j]) * factor;
      if constexpr (R::kStatesFirst) {
        rule.advance(x, own);
#pragma unroll
        for (int k = 0; k < R::kStates; ++k) {
          from_acc(own[k], s[k].v[j]);
          own[k] = to_acc(s[k].v[j]);  // as the second pass reads it
        }
      }
      rule.norms(to_acc(p.v[j]), x, own, squares);
#pragma unroll
      for (int k = 0; k < kSummed<R>; ++k) sums[k] += squares[k];
    }
    if constexpr (R::kStatesFirst) {
#pragma unroll
      for (int k = 0; k < R::kStates; ++k) store(states[k] + i, s[k]);
    }
  });
}

template <class R>
__global__ void __launch_bounds__(kThreads, kMinBlocks) optimizer_step_norms_kernel(const __grid_constant__ Steps s) {
  const OptimizerStep& a = s.list;
  if (is_skipped(a)) return;
  const Chunk chunk = chunk_of_block(s);
  const StepTensor& t = s.rows[chunk.row];
  if (!is_plain(a, t)) return;
  double total[kSummed<R>];
  visit_row(t.dtype, [&]<class T>() {
    Acc<T> sums[kSummed<R>] = {};
    norms<T, typename RuleOf<R, Acc<T>>::Type>(a, t, chunk, sums);
#pragma unroll
    for (int k = 0; k < kSummed<R>; ++k) total[k] = sums[k];
  });
  store_sums<R>(s, total);
}

// A block to each tensor: from the sums of its chunks to those of the whole and its ratio.
template <class R>
__global__ void __launch_bounds__(kThreads) optimizer_step_ratio_kernel(const __grid_constant__ Steps s) {
  const OptimizerStep& a = s.list;
  if (is_skipped(a)) return;
  const int row = static_cast<int>(blockIdx.x);
  double* const given = a.sums != nullptr ? a.sums + kMaxSums * (s.begin + row) : nullptr;
  double sums[kMaxSums];
#pragma unroll
  for (int k = 0; k < kMaxSums; ++k) {
    if (a.sums_given) {
      sums[k] = given[k];
      continue;
    }
    double sum = 0;
    for (int i = s.first[row] + threadIdx.x; k < kSummed<R> && i < s.first[row + 1]; i += kThreads) {
      sum += a.partial[kMaxSums * (s.chunks_before + i) + k];
    }
    __syncthreads();
    sums[k] = k < kSummed<R> ? block_sum(sum, shared_memory<double>()) : 0.0;
  }
  if (threadIdx.x > 0) return;
  if (R::kShare && !a.sums_given) sums[R::kSums - 1] = static_cast<double>(s.rows[row].numel);
  if (!a.sums_only) {
    a.ratio[s.begin + row] = R::ratio(hyper_of(a), sums, s.rows[row].scalars);
  } else {
#pragma unroll
    for (int k = 0; k < kMaxSums; ++k) given[k] = sums[k];
  }
}

// Counts of steps, each once.
struct Counts {
  static constexpr int kRows = (kArgumentBytes - sizeof(OptimizerStep) - 8) / sizeof(float*);
  OptimizerStep list;
  int count;
  float* step[kRows];  // [1] each
};

__global__ void __launch_bounds__(kThreads) optimizer_step_count_kernel(const __grid_constant__ Counts s) {
  const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (i < s.count && !is_skipped(s.list)) *s.step[i] += 1;
}

int launch_counts(const OptimizerStep& a, void* stream) {
  Counts s;
  static_assert(sizeof(s) <= kArgumentBytes);
  s.list = a;
  s.count = 0;
  for (int64_t i = 0; i < a.count; ++i) {
    float* const step = a.tensors[i].step;
    if (step != nullptr && (i == 0 || step != a.tensors[i - 1].step)) s.step[s.count++] = step;
    if (s.count == s.kRows || i + 1 == a.count) {
      const int64_t blocks = ceil_div(s.count, kThreads);
      if (const int error = launch(optimizer_step_count_kernel, blocks, kThreads, 0, stream, s)) return error;
      s.count = 0;
    }
  }
  return cudaSuccess;
}

template <class R>
int launch_segment(const Steps& s, void* stream) {
  constexpr size_t kShared = std::max(sizeof(Plan<typename RuleOf<R, double>::Type, double>), kBlockSumBytes);
  const int chunks = s.first[s.count];
  int plain = 0, error = cudaSuccess;
  for (int i = 0; i < s.count; ++i) plain += is_plain(s.list, s.rows[i]);
  if constexpr (R::kNorms) {
    if (!s.list.sums_given) {
      if (plain > 0) error = launch(optimizer_step_norms_kernel<R>, chunks, kThreads, kShared, stream, s);
      if (error == cudaSuccess && plain < s.count) error = optimizer_step_narrow_norms(s, stream);
    }
    if (error != cudaSuccess) return error;
    error = launch(optimizer_step_ratio_kernel<R>, s.count, kThreads, kBlockSumBytes, stream, s);
    if (error != cudaSuccess || s.list.sums_only) return error;
  }
  if (plain > 0) error = launch(optimizer_step_kernel<R>, chunks, kThreads, kShared, stream, s);
  return error == cudaSuccess && plain < s.count ? optimizer_step_narrow(s, stream) : error;
}

}  // namespace

int optimizer_step(const OptimizerStep& a, void* stream) {
  const int error = for_each_segment(a, [&](const Steps& s) {
    int code = cudaErrorInvalidValue;
    visit_rule<float>(a.rule, [&]<class R>() { code = launch_segment<R>(s, stream); });
    return code;
  });
  return error != cudaSuccess || a.sums_only ? error : launch_counts(a, stream);
}

}  // namespace fusedtrain::cuda

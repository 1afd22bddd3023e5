// optimizer_step on CUDA for what is stored in fewer bits than it is computed in, csrc/core/narrow.h: a warp to each
// block of 256 elements, eight of them to a lane, so that the largest magnitude of a block of codes never leaves its
// warp.
#include "core/narrow.h"
#include "cuda/step_plan.h"

namespace fusedtrain::cuda {
namespace {

constexpr int kLane = 8;  // elements of a lane
static_assert(kLane * kWarp == kCodeBlock && kListChunk % kCodeBlock == 0);

// f.template operator()<T>() for the types that are computed in float32.
template <class F>
__device__ __forceinline__ void visit_narrow(DType dtype, F&& f) {
  if (dtype == DType::kBFloat16) return f.template operator()<__nv_bfloat16>();
  if (dtype == DType::kFloat16) return f.template operator()<__half>();
  return f.template operator()<float>();
}

template <class T>
__device__ __forceinline__ bool is_whole(const T* p, int count) {
  return count == kLane && reinterpret_cast<uintptr_t>(p) % alignof(Pack<T, kLane>) == 0;
}

// The `count` first of eight elements, zeros behind.
template <class T>
__device__ __forceinline__ Pack<T, kLane> load_lane(const T* p, int count) {
  if (is_whole(p, count)) return load<kLane>(p);
  Pack<T, kLane> pack{};
#pragma unroll
  for (int j = 0; j < kLane; ++j) {
    if (j < count) pack.v[j] = p[j];
  }
  return pack;
}
template <class T>
__device__ __forceinline__ void store_lane(T* p, const Pack<T, kLane>& pack, int count) {
  if (is_whole(p, count)) return store(p, pack);
#pragma unroll
  for (int j = 0; j < kLane; ++j) {
    if (j < count) p[j] = pack.v[j];
  }
}

// Eight numbers, as they are computed with.
using Lane = Pack<float, kLane>;

template <class T>
__device__ __forceinline__ Lane widen(const Pack<T, kLane>& pack) {
  Lane x;
#pragma unroll
  for (int j = 0; j < kLane; ++j) x.v[j] = to_acc(pack.v[j]);
  return x;
}
__device__ __forceinline__ Lane expand(DType dtype, const void* from, int64_t at, int count) {
  Lane x;
  visit_narrow(dtype, [&]<class T>() { x = widen(load_lane(static_cast<const T*>(from) + at, count)); });
  return x;
}

__device__ __forceinline__ float round_randomly(float x, uint32_t, float) { return x; }
__device__ __forceinline__ float round_randomly(float x, uint32_t random, __nv_bfloat16) {
  return round_to_bfloat16(x, random);
}
__device__ __forceinline__ float round_randomly(float x, uint32_t random, __half) {
  return round_to_float16(x, random);
}

// The random bits of a lane's elements for one use, 0x8000 where nothing is drawn.
class Draw {
 public:
  __device__ Draw(const RandomBits& bits, int64_t first) : bits_(bits.at(first)), first_(first) {}
  __device__ uint32_t operator()(int j, int use) const {
    const uint32_t element = static_cast<uint32_t>(first_) + j;
    return RandomBits::half(bits_.word(element, use), use);
  }

 private:
  RandomBits bits_;
  int64_t first_;  // a multiple of 8: no carry
};

// Rounds to T and stores; returns what stands there then.
template <class T>
__device__ __forceinline__ Lane contract(const Lane& x, T* to, int count, bool random, const Draw& draw, int use) {
  Pack<T, kLane> pack;
#pragma unroll
  for (int j = 0; j < kLane; ++j) from_acc(random ? round_randomly(x.v[j], draw(j, use), T{}) : x.v[j], pack.v[j]);
  store_lane(to, pack, count);
  return widen(pack);
}

template <bool kSigned>
__device__ __forceinline__ Lane decode_lane(const uint8_t* codes, float largest, int count) {
  const Pack<uint8_t, kLane> pack = load_lane(codes, count);
  const float scale = largest / kCodeTop;
  Lane x;
#pragma unroll
  for (int j = 0; j < kLane; ++j) x.v[j] = decode<kSigned>(uint32_t{pack.v[j]}, scale);
  return x;
}

// By all lanes of a warp; x has zeros behind `count`. Every lane returns the largest magnitude of them all, NaN where a
// number is not finite.
template <bool kSigned>
__device__ __forceinline__ float encode_lane(const Lane& x, uint8_t* codes, int count, bool random, const Draw& draw,
                                             int use) {
  float largest = 0;
  bool broken = false;
#pragma unroll
  for (int j = 0; j < kLane; ++j) {
    largest = at_least(largest, magnitude(x.v[j]));
    broken |= !(x.v[j] - x.v[j] == 0);
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    largest = at_least(largest, __shfl_xor_sync(kFullWarp, largest, step));
  }
  if (__any_sync(kFullWarp, broken)) largest = Bits<float>::to(0x7fc00000u);
  const bool any = largest >= kSmallestLargest;
  const float scale = kCodeTop / largest;
  Pack<uint8_t, kLane> pack{};
#pragma unroll
  for (int j = 0; j < kLane; ++j) {
    const uint32_t bits = random ? draw(j, use) : 0x8000u;
    if (any) pack.v[j] = static_cast<uint8_t>(encode<kSigned>(x.v[j], scale, bits));
  }
  store_lane(codes, pack, count);
  return any || largest != largest ? largest : 0.f;
}

// What a lane has of a parameter and its states in float32.
template <int kStates>
struct Numbers {
  Lane param, grad, states[kStates > 0 ? kStates : 1];
};

// f.template operator()<R>() with the rule's type; of the rules with that many states, the others cannot be.
template <int kStates, class F>
__device__ __forceinline__ void visit_rule_with(Rule rule, F&& f) {
  visit_rule<float>(rule, [&]<class R>() {
    if constexpr (R::kStates == kStates) f.template operator()<R>();
  });
}

template <int kStates>
__device__ __forceinline__ bool is_signed(Rule rule, int k) {
  unsigned squares = 0;
  visit_rule_with<kStates>(rule, [&]<class R>() { squares = R::kUnsigned; });
  return (squares >> k & 1u) == 0;
}

template <int kStates>
__device__ __forceinline__ Numbers<kStates> load_numbers(const OptimizerStep& a, const StepTensor& t, int64_t at,
                                                         int count) {
  Numbers<kStates> n;
  n.param = expand(t.dtype, t.param, at, count);
  n.grad = expand(t.dtype, t.grad, at, count);
#pragma unroll
  for (int k = 0; k < kStates; ++k) {
    if (is_coded(t)) {
      const auto* codes = static_cast<const uint8_t*>(t.states[k]) + at;
      const float largest = t.scales[k][at / kCodeBlock];
      n.states[k] = is_signed<kStates>(a.rule, k) ? decode_lane<true>(codes, largest, count)
                                                  : decode_lane<false>(codes, largest, count);
    } else {
      n.states[k] = expand(t.state_dtype, t.states[k], at, count);
    }
  }
  if (t.exact == nullptr) return n;
  const bool kahan = a.rounding == Rounding::kKahan;
  const Lane exact = expand(kahan ? t.dtype : DType::kFloat32, t.exact, at, count);
  visit_narrow(t.dtype, [&]<class T>() {
#pragma unroll
    for (int j = 0; j < kLane; ++j) {
      T rounded;
      from_acc(exact.v[j], rounded);
      // A parameter that was set by hand since counts, not what it was before.
      const bool same = to_acc(rounded) == n.param.v[j];
      n.param.v[j] = kahan ? n.param.v[j] + exact.v[j] : same ? exact.v[j] : n.param.v[j];
    }
  });
  return n;
}

// `n.param` is the new parameter before its rounding, the states have zeros behind `count`.
template <int kStates>
__device__ __forceinline__ void save(const OptimizerStep& a, const StepTensor& t, const Numbers<kStates>& n,
                                     const Draw& draw, int64_t at, int count) {
#pragma unroll
  for (int k = 0; k < kStates; ++k) {
    if (is_coded(t)) {
      auto* codes = static_cast<uint8_t*>(t.states[k]) + at;
      const float largest = is_signed<kStates>(a.rule, k)
                                ? encode_lane<true>(n.states[k], codes, count, a.random, draw, k)
                                : encode_lane<false>(n.states[k], codes, count, a.random, draw, k);
      if (at % kCodeBlock == 0) t.scales[k][at / kCodeBlock] = largest;
    } else {
      visit_narrow(t.state_dtype, [&]<class S>() {
        contract(n.states[k], static_cast<S*>(t.states[k]) + at, count, a.random, draw, k);
      });
    }
  }
  Lane now;  // the parameter from now on
  visit_narrow(t.dtype, [&]<class T>() {
    const bool random = a.rounding == Rounding::kStochastic, kahan = a.rounding == Rounding::kKahan;
    now = contract(n.param, static_cast<T*>(t.param) + at, count, random, draw, RandomBits::kParamUse);
    if (t.exact != nullptr && kahan) {
      Lane rest;
#pragma unroll
      for (int j = 0; j < kLane; ++j) rest.v[j] = n.param.v[j] - now.v[j];
      contract(rest, static_cast<T*>(t.exact) + at, count, false, draw, RandomBits::kParamUse);
    } else if (t.exact != nullptr) {
      store_lane(static_cast<float*>(t.exact) + at, n.param, count);
      now = n.param;
    }
    if (a.zero_grads) store_lane(static_cast<T*>(t.grad) + at, Pack<T, kLane>{}, count);
  });
  if (t.ema == nullptr) return;
  float* const ema = static_cast<float*>(t.ema) + at;
  const float rate = static_cast<float>(1 - a.ema_decay);
  Lane mean = load_lane(ema, count);
#pragma unroll
  for (int j = 0; j < kLane; ++j) mean.v[j] += rate * (now.v[j] - mean.v[j]);
  store_lane(ema, mean, count);
}

// f(at, count) for the elements of a chunk that belong to a lane: from place `at` of the tensor, `count` of eight, or
// none. All lanes of a warp are called together.
template <class F>
__device__ __forceinline__ void for_each_lane(const Chunk& chunk, F&& f) {
  const int lane = threadIdx.x % kWarp;
  for (int i = threadIdx.x / kWarp * kCodeBlock; i < chunk.count; i += kThreads * kLane) {
    const int first = i + lane * kLane, rest = chunk.count - first;
    f(chunk.begin + first, rest > kLane ? kLane : rest > 0 ? rest : 0);
  }
}

// A kernel for all rules with as many states: what they share is most of the code.
template <int kStates>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    optimizer_step_narrow_norms_kernel(const __grid_constant__ Steps s) {
  const OptimizerStep& a = s.list;
  if (is_skipped(a)) return;
  const Chunk chunk = chunk_of_block(s);
  const StepTensor& t = s.rows[chunk.row];
  if (is_plain(a, t)) return;
  visit_rule_with<kStates>(a.rule, [&]<class R>() { plan_of<R, float>(a, t, Ratio{}); });
  float sums[kMaxSums] = {};
  for_each_lane(chunk, [&](int64_t at, int count) {
    const Numbers<kStates> n = load_numbers<kStates>(a, t, at, count);
    visit_rule_with<kStates>(a.rule, [&]<class R>() {
      if constexpr (R::kNorms) {
        const auto [rule, factor] = *shared_memory<Plan<R, float>>();
#pragma unroll
        for (int j = 0; j < kLane; ++j) {
          float own[kMaxStates], squares[R::kSums];
#pragma unroll
          for (int k = 0; k < kStates; ++k) own[k] = n.states[k].v[j];
          const float g = n.grad.v[j] * factor;
          if constexpr (R::kStatesFirst) rule.advance(g, own);  // and again in the second pass
          rule.norms(n.param.v[j], g, own, squares);
#pragma unroll
          for (int k = 0; k < kSummed<R>; ++k) sums[k] += j < count ? squares[k] : 0.f;
        }
      }
    });
  });
  visit_rule_with<kStates>(a.rule, [&]<class R>() { store_sums<R>(s, sums); });
}

template <int kStates>
__global__ void __launch_bounds__(kThreads, kMinBlocks) optimizer_step_narrow_kernel(const __grid_constant__ Steps s) {
  const OptimizerStep& a = s.list;
  const bool skipped = is_skipped(a);
  if (skipped && !a.zero_grads) return;
  const Chunk chunk = chunk_of_block(s);
  const StepTensor& t = s.rows[chunk.row];
  if (is_plain(a, t)) return;
  if (skipped) {
    return for_each_lane(chunk, [&](int64_t at, int count) {
      visit_narrow(t.dtype, [&]<class T>() { store_lane(static_cast<T*>(t.grad) + at, Pack<T, kLane>{}, count); });
    });
  }
  visit_rule_with<kStates>(
      a.rule, [&]<class R>() { plan_of<R, float>(a, t, R::kNorms ? a.ratio[s.begin + chunk.row] : Ratio{}); });
  const RandomBits bits = random_bits(a, t, s.begin + chunk.row);
  for_each_lane(chunk, [&](int64_t at, int count) {
    Numbers<kStates> n = load_numbers<kStates>(a, t, at, count);
    visit_rule_with<kStates>(a.rule, [&]<class R>() {
      const auto [rule, factor] = *shared_memory<Plan<R, float>>();
#pragma unroll
      for (int j = 0; j < kLane; ++j) {
        float own[kMaxStates];
#pragma unroll
        for (int k = 0; k < kStates; ++k) own[k] = n.states[k].v[j];
        const float g = n.grad.v[j] * factor;
        if constexpr (R::kStatesFirst) rule.advance(g, own);
        n.param.v[j] = rule(n.param.v[j], g, own);
#pragma unroll
        for (int k = 0; k < kStates; ++k) n.states[k].v[j] = j < count ? own[k] : 0.f;
      }
    });
    save(a, t, n, Draw(bits, at), at, count);
  });
}

// f.template operator()<kStates, bytes of shared memory>() for the rule of a list.
template <class F>
int visit_states(const OptimizerStep& a, F&& f) {
  int code = cudaErrorInvalidValue;
  visit_rule<float>(a.rule, [&]<class R>() {
    code = f.template operator()<R::kStates, std::max(sizeof(Plan<R, float>), kBlockSumBytes)>();
  });
  return code;
}

}  // namespace

int optimizer_step_narrow_norms(const Steps& s, void* stream) {
  return visit_states(s.list, [&]<int kStates, size_t kShared>() {
    return launch(optimizer_step_narrow_norms_kernel<kStates>, s.first[s.count], kThreads, kShared, stream, s);
  });
}

int optimizer_step_narrow(const Steps& s, void* stream) {
  return visit_states(s.list, [&]<int kStates, size_t kShared>() {
    return launch(optimizer_step_narrow_kernel<kStates>, s.first[s.count], kThreads, kShared, stream, s);
  });
}

}  // namespace fusedtrain::cuda

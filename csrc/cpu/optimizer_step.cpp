// optimizer_step on the CPU: parameter, gradient and states are read and written once, a vector at a time. New states
// in blocks of 8 bits wait in the cache until a block of them is whole.
#include "optimizer_step.h"

#include "cpu/ahead.h"
#include "cpu/lists.h"
#include "cpu/narrow.h"

namespace fusedtrain::cpu {
namespace {

template <class R>
R rule_of(const OptimizerStep& a, const StepTensor& t) {
  const Ratio ratio = R::kNorms && a.ratio != nullptr ? a.ratio[&t - a.tensors] : Ratio{};
  return R(hyper_of(a), t.step != nullptr ? *t.step + 1.0 : 1.0, ratio);
}

// Elements [first, last) of one parameter: the sums of the rule's first pass, added to `result`.
template <class T, class R>
void norms(const R& rule, const StepTensor& t, double factor, int64_t first, int64_t last, double* result) {
  using V = Vec<Acc<T>>;
  const V f{Acc<T>(factor)};
  T *param = static_cast<T*>(t.param), *grad = static_cast<T*>(t.grad), *states[kMaxStates];
  for (int k = 0; k < R::kStates; ++k) states[k] = static_cast<T*>(t.states[k]);
  constexpr int64_t kBlock = 32 * V::kLanes;  // of elements that are summed in the accumulation type
  for (; first < last; first += kBlock) {
    V sums[R::kSums];
    for (V& sum : sums) sum = V(0);
    for_each_vector<V>(std::min(kBlock, last - first), [&](int64_t offset, auto lanes) {
      const int64_t i = first + offset;
      const V p = load<V>(param + i, lanes), g = load<V>(grad + i, lanes) * f;
      V s[kMaxStates], squares[R::kSums];
      for (int k = 0; k < R::kStates; ++k) s[k] = load<V>(states[k] + i, lanes);
      if constexpr (R::kStatesFirst) {
        rule.advance(g, s);
        for (int k = 0; k < R::kStates; ++k) store(states[k] + i, s[k], lanes);
        for (int k = 0; k < R::kStates; ++k) s[k] = round_to<T>(s[k]);  // as the second pass reads them
      }
      rule.norms(p, g, s, squares);
      for (int k = 0; k < kSummed<R>; ++k) sums[k] += keep(squares[k], lanes);
    });
    for (int k = 0; k < kSummed<R>; ++k) result[k] += lane_sum(sums[k]);
  }
}

// Elements [first, last) of one parameter.
template <class T, class R>
void update(const R& rule, const OptimizerStep& a, const StepTensor& t, double factor, int64_t first, int64_t last) {
  using A = Acc<T>;
  using V = Vec<A>;
  const V f{A(factor)}, ema_rate{A(1 - a.ema_decay)};
  T *param = static_cast<T*>(t.param), *grad = static_cast<T*>(t.grad), *states[kMaxStates];
  for (int k = 0; k < R::kStates; ++k) states[k] = static_cast<T*>(t.states[k]);
  A* ema = static_cast<A*>(t.ema);
  const bool zero_grads = a.zero_grads;
  for_each_vector<V>(last - first, [=, ahead = asks_ahead](int64_t offset, auto lanes) {
    const int64_t i = first + offset;
    if (ahead) {
      fetch(grad + i + kAhead<T>);
      fetch_for_store(param + i + kAhead<T>);
      for (int k = 0; k < R::kStates; ++k) fetch_for_store(states[k] + i + kAhead<T>);
    }
    V s[kMaxStates];
    for (int k = 0; k < R::kStates; ++k) s[k] = load<V>(states[k] + i, lanes);
    const V g = load<V>(grad + i, lanes) * f;
    const V p = rule(load<V>(param + i, lanes), g, s);
    store(param + i, p, lanes);
    for (int k = 0; !R::kStatesFirst && k < R::kStates; ++k) store(states[k] + i, s[k], lanes);
    if (ema != nullptr) {
      const V mean = load<V>(ema + i, lanes);
      store(ema + i, mean + ema_rate * (round_to<T>(p) - mean), lanes);
    }
    if (zero_grads) store(grad + i, V(0), lanes);
  });
}

template <class T>
void zero(const StepTensor& t, int64_t first, int64_t last) {
  std::memset(static_cast<T*>(t.grad) + first, 0, (last - first) * sizeof(T));
}

// ---- what is stored in other types than the parameter, or rounded otherwise ----

template <class Lanes>
Vec<float> load_as(DType dtype, const void* p, int64_t i, Lanes lanes) {
  using V = Vec<float>;
  if (dtype == DType::kFloat32) return load<V>(static_cast<const float*>(p) + i, lanes);
  if (dtype == DType::kBFloat16) return load<V>(static_cast<const BFloat16*>(p) + i, lanes);
  return load<V>(static_cast<const Float16*>(p) + i, lanes);
}

template <class Lanes>
void store_as(DType dtype, void* p, int64_t i, Vec<float> x, Lanes lanes) {
  if (dtype == DType::kFloat32) return store(static_cast<float*>(p) + i, x, lanes);
  if (dtype == DType::kBFloat16) return store(static_cast<BFloat16*>(p) + i, x, lanes);
  store(static_cast<Float16*>(p) + i, x, lanes);
}

inline Vec<float> round_as(DType dtype, Vec<float> x) {
  if (dtype == DType::kFloat32) return x;
  return dtype == DType::kBFloat16 ? round_to<BFloat16>(x) : round_to<Float16>(x);
}

// These return what stands there then.
template <class Lanes>
Vec<float> store_rounded_as(DType dtype, void* p, int64_t i, Vec<float> x, Lanes lanes) {
  if (dtype == DType::kBFloat16) return store_rounded(static_cast<BFloat16*>(p) + i, x, lanes);
  if (dtype == DType::kFloat16) return store_rounded(static_cast<Float16*>(p) + i, x, lanes);
  store(static_cast<float*>(p) + i, x, lanes);
  return x;
}
template <class Lanes>
Vec<float> store_randomly_as(DType dtype, void* p, int64_t i, Vec<float> x, Words random, Lanes lanes) {
  if (dtype == DType::kBFloat16) {
    const Words words = bfloat16_above(x, random);
    store_upper(static_cast<BFloat16*>(p) + i, words, lanes);
    return Bits<Vec<float>>::to(words & ~0xffffu);
  }
  if (dtype == DType::kFloat16) x = round_to_float16(x, random);
  return store_rounded_as(dtype, p, i, x, lanes);
}

// A parameter and what belongs to it as vectors of float32. Branches on types cost next to nothing beside the memory:
// they go the same way for all vectors. States in blocks of 8 bits are kept until a block of them is whole.
template <class R>
class Stored {
 public:
  using V = Vec<float>;
  struct States {
    alignas(kVecBytes) float numbers[R::kStates + 1][kCodeBlock];
  };

  // `block` is written to between `open` and `close`.
  Stored(const OptimizerStep& a, const StepTensor& t, States* block)
      : t_(t),
        block_(block),
        bits_(random_bits(a, t, &t - a.tensors)),
        near_(bits_),
        kahan_(a.rounding == Rounding::kKahan),
        random_param_(a.rounding == Rounding::kStochastic && t.dtype != DType::kFloat32),
        random_states_(a.random && (is_coded(t) || t.state_dtype != DType::kFloat32)),
        zero_grads_(a.zero_grads),
        ema_rate_(float(1 - a.ema_decay)) {}

  template <class Lanes>
  V grad(int64_t i, Lanes lanes) const {
    return load_as(t_.dtype, t_.grad, i, lanes);
  }

  template <class Lanes>
  V param(int64_t i, Lanes lanes) const {
    const V p = load_as(t_.dtype, t_.param, i, lanes);
    if (t_.exact == nullptr) return p;
    if (kahan_) return p + load_as(t_.dtype, t_.exact, i, lanes);
    const V x = load<V>(static_cast<const float*>(t_.exact) + i, lanes);
    return vselect(round_as(t_.dtype, x) == p, x, p);  // a parameter that was set by hand since counts
  }

  template <class Lanes>
  void states(int64_t i, V* s, Lanes lanes) const {
    for (int k = 0; k < R::kStates; ++k) {
      if (!is_coded(t_)) {
        s[k] = load_as(t_.state_dtype, t_.states[k], i, lanes);
      } else {
        const V scale{t_.scales[k][i / kCodeBlock] / kCodeTop};
        const Words codes = load_codes(static_cast<const uint8_t*>(t_.states[k]) + i, lanes);
        s[k] = is_signed(k) ? decode<true>(codes, scale) : decode<false>(codes, scale);
      }
    }
  }

  template <class Lanes>
  void save(int64_t i, V p, const V* s, Lanes lanes) const {
    Words words{};
    for (int k = 0; k < R::kStates; ++k) {
      if (is_coded(t_)) {
        store(block_->numbers[k] + i % kCodeBlock, s[k], lanes);
      } else if (random_states_) {
        if (k % 2 == 0) words = random_words(near_, i, k);
        store_randomly_as(t_.state_dtype, t_.states[k], i, s[k], RandomBits::half(words, k), lanes);
      } else {
        store_as(t_.state_dtype, t_.states[k], i, s[k], lanes);
      }
    }
    V now;  // what the parameter is from here on
    if (random_param_) {
      constexpr int kUse = RandomBits::kParamUse;
      now = store_randomly_as(t_.dtype, t_.param, i, p, RandomBits::half(random_words(near_, i, kUse), kUse), lanes);
    } else {
      now = store_rounded_as(t_.dtype, t_.param, i, p, lanes);
    }
    if (t_.exact != nullptr && kahan_) {
      store_as(t_.dtype, t_.exact, i, p - now, lanes);
    } else if (t_.exact != nullptr) {
      store(static_cast<float*>(t_.exact) + i, p, lanes);
      now = p;
    }
    if (t_.ema != nullptr) {
      float* ema = static_cast<float*>(t_.ema) + i;
      const V mean = load<V>(ema, lanes);
      store(ema, mean + V(ema_rate_) * (now - mean), lanes);
    }
    if (zero_grads_) store_as(t_.dtype, t_.grad, i, V(0), lanes);
  }

  // How many elements are to be saved between `open` and `close`.
  int64_t block_size() const { return is_coded(t_) ? kCodeBlock : kListChunk; }
  void open(int64_t first, int64_t count) {
    near_ = bits_.at(first);
    const int64_t whole = count / V::kLanes * V::kLanes;
    for (int k = 0; k < R::kStates && is_coded(t_) && whole < count; ++k) store(block_->numbers[k] + whole, V(0));
  }
  void close(int64_t first, int64_t count) const {
    if (!is_coded(t_)) return;
    float largest[R::kStates + 1];
    for (int k = 0; k < R::kStates; ++k) {
      largest[k] = t_.scales[k][first / kCodeBlock] = largest_of(block_->numbers[k], count);
    }
    for_each_vector<V>(count, [=, this](int64_t i, auto lanes) {
      Words words{};
      for (int k = 0; k < R::kStates; ++k) {
        if (random_states_ && k % 2 == 0) words = random_words(near_, first + i, k);
        const Words random = random_states_ ? RandomBits::half(words, k) : words + 0x8000u;
        const V x = load<V>(block_->numbers[k] + i), scale{kCodeTop / largest[k]};
        Words codes = is_signed(k) ? encode<true>(x, scale, random) : encode<false>(x, scale, random);
        if (!(largest[k] > 0)) codes = Words{};
        store_codes(static_cast<uint8_t*>(t_.states[k]) + first + i, codes, lanes);
      }
    });
  }

 private:
  static constexpr bool is_signed(int k) { return (R::kUnsigned >> k & 1u) == 0; }

  StepTensor t_;
  States* block_;
  RandomBits bits_, near_;  // those of all places, and of those in the block
  bool kahan_, random_param_, random_states_, zero_grads_;
  float ema_rate_;
};

// As `norms` above, but that the states stay as they are.
template <class R>
void norms_stored(const R& rule, const Stored<R>& stored, double factor, int64_t first, int64_t last, double* result) {
  using V = Vec<float>;
  const V f{float(factor)};
  constexpr int64_t kBlock = 32 * V::kLanes;
  for (; first < last; first += kBlock) {
    V sums[R::kSums];
    for (V& sum : sums) sum = V(0);
    for_each_vector<V>(std::min(kBlock, last - first), [&, stored](int64_t offset, auto lanes) {
      const int64_t i = first + offset;
      const V p = stored.param(i, lanes), g = stored.grad(i, lanes) * f;
      V s[kMaxStates], squares[R::kSums];
      stored.states(i, s, lanes);
      if constexpr (R::kStatesFirst) rule.advance(g, s);
      rule.norms(p, g, s, squares);
      for (int k = 0; k < kSummed<R>; ++k) sums[k] += keep(squares[k], lanes);
    });
    for (int k = 0; k < kSummed<R>; ++k) result[k] += lane_sum(sums[k]);
  }
}

template <class R>
void update_stored(const R& rule, Stored<R> stored, double factor, int64_t first, int64_t last) {
  using V = Vec<float>;
  const V f{float(factor)};
  for (const int64_t block = stored.block_size(); first < last; first += block) {
    const int64_t count = std::min(block, last - first);
    stored.open(first, count);
    for_each_vector<V>(count, [=](int64_t offset, auto lanes) {
      const int64_t i = first + offset;
      V s[kMaxStates];
      stored.states(i, s, lanes);
      const V g = stored.grad(i, lanes) * f;
      if constexpr (R::kStatesFirst) rule.advance(g, s);
      stored.save(i, rule(stored.param(i, lanes), g, s), s, lanes);
    });
    stored.close(first, count);
  }
}

}  // namespace

template <>
void optimizer_step_norms<Isa::FUSEDTRAIN_ISA>(const OptimizerStep& a, int64_t begin, int64_t end) {
  const double factor = grad_factor(a);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    for_each_tensor(a, chunk, chunk + 1, [&](const StepTensor& t, int64_t first, int64_t last) {
      double* result = a.partial + kMaxSums * chunk;
      std::fill_n(result, kMaxSums, 0.0);
      visit_dtype(t.dtype, [&]<class T>() {
        visit_rule<Acc<T>>(a.rule, [&]<class R>() {
          if constexpr (R::kNorms) {
            const R rule = rule_of<R>(a, t);
            if (is_plain(a, t)) return norms<T>(rule, t, factor, first, last, result);
            if constexpr (!std::is_same_v<T, double>) {
              norms_stored(rule, Stored<R>(a, t, nullptr), factor, first, last, result);
            }
          }
        });
      });
    });
  }
}

template <>
void optimizer_step<Isa::FUSEDTRAIN_ISA>(const OptimizerStep& a, int64_t begin, int64_t end) {
  const double factor = grad_factor(a);
  const bool skipped = is_skipped(a);
  if (skipped && !a.zero_grads) return;
  for_each_tensor(a, begin, end, [&](const StepTensor& t, int64_t first, int64_t last) {
    if (skipped) return visit_dtype(t.dtype, [&]<class T>() { zero<T>(t, first, last); });
    if (is_plain(a, t)) {
      return visit_dtype(t.dtype, [&]<class T>() {
        visit_rule<Acc<T>>(a.rule, [&]<class R>() { update<T>(rule_of<R>(a, t), a, t, factor, first, last); });
      });
    }
    visit_rule<float>(a.rule, [&]<class R>() {
      typename Stored<R>::States block;
      update_stored(rule_of<R>(a, t), Stored<R>(a, t, &block), factor, first, last);
    });
  });
}

}  // namespace fusedtrain::cpu

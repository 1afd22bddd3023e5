// optimizer_step on the CPU: parameter, gradient and states are read and written once, a vector at a time. What is
// stored in other types than the parameter, or rounded otherwise, goes through blocks of float32 in the cache.
#include "optimizer_step.h"

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
      for (int k = 0; k < kSummed<R>; ++k) sums[k] += squares[k];
    });
    for (int k = 0; k < kSummed<R>; ++k) result[k] += lane_sum(sums[k]);
  }
}

// Elements [first, last) of one parameter. With kWhole, which is for rules with kStatesFirst, the states are renewed
// here too.
template <class T, bool kWhole = false, class R>
void update(const R& rule, const OptimizerStep& a, const StepTensor& t, double factor, int64_t first, int64_t last) {
  using A = Acc<T>;
  using V = Vec<A>;
  const V f{A(factor)}, ema_rate{A(1 - a.ema_decay)};
  T *param = static_cast<T*>(t.param), *grad = static_cast<T*>(t.grad), *states[kMaxStates];
  for (int k = 0; k < R::kStates; ++k) states[k] = static_cast<T*>(t.states[k]);
  A* ema = static_cast<A*>(t.ema);
  const bool zero_grads = a.zero_grads;
  constexpr bool kRenew = kWhole || !R::kStatesFirst;
  for_each_vector<V>(last - first, [=](int64_t offset, auto lanes) {
    const int64_t i = first + offset;
    V s[kMaxStates];
    for (int k = 0; k < R::kStates; ++k) s[k] = load<V>(states[k] + i, lanes);
    const V g = load<V>(grad + i, lanes) * f;
    if constexpr (kWhole) rule.advance(g, s);
    const V p = rule(load<V>(param + i, lanes), g, s);
    store(param + i, p, lanes);
    for (int k = 0; kRenew && k < R::kStates; ++k) store(states[k] + i, s[k], lanes);
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

// f.template operator()<T>() for the types that are computed in float32.
template <class F>
void visit_narrow(DType dtype, F&& f) {
  visit_dtype(dtype, [&]<class T>() {
    if constexpr (!std::is_same_v<T, double>) f.template operator()<T>();
  });
}

// A block of a parameter and of what belongs to it in float32.
class Block {
 public:
  // `squares`: R::kUnsigned of the rule.
  Block(const OptimizerStep& a, const StepTensor& t, int states, unsigned squares)
      : a_(a), t_(t), bits_(random_bits(a, t, &t - a.tensors)), count_(states), squares_(squares), tensor_(t) {
    tensor_.param = param_;
    tensor_.grad = grad_;
    for (int k = 0; k < count_; ++k) tensor_.states[k] = states_[k];
    tensor_.ema = nullptr;
  }
  const StepTensor& tensor() const { return tensor_; }

  void load(int64_t first, int64_t count) {
    visit_narrow(t_.dtype, [&]<class T>() {
      expand(static_cast<const T*>(t_.grad) + first, count, grad_);
      expand(static_cast<const T*>(t_.param) + first, count, param_);
      if (t_.exact == nullptr) return;
      if (kahan()) {
        expand(exact<T>() + first, count, rest_);
        return each(count, [&](int64_t i) { store(param_ + i, at(param_ + i) + at(rest_ + i)); });
      }
      expand(exact<float>() + first, count, rest_);
      each(count, [&](int64_t i) {  // a parameter that was set by hand since counts, not what it was before
        const V x = at(rest_ + i), p = at(param_ + i);
        store(param_ + i, vselect(round_to<T>(x) == p, x, p));
      });
    });
    for_each_state([&]<bool kSigned>(int k) {
      if (is_coded(t_)) return decode<kSigned>(codes(k) + first, t_.scales[k][first / kCodeBlock], count, states_[k]);
      visit_narrow(t_.state_dtype,
                   [&]<class S>() { expand(static_cast<const S*>(t_.states[k]) + first, count, states_[k]); });
    });
  }

  void save(int64_t first, int64_t count) {
    for_each_state([&]<bool kSigned>(int k) {
      const Draw draw(bits_, first, k + 1), *random = a_.random ? &draw : nullptr;
      if (is_coded(t_)) {
        t_.scales[k][first / kCodeBlock] = encode<kSigned>(states_[k], count, codes(k) + first, random);
        return;
      }
      visit_narrow(t_.state_dtype,
                   [&]<class S>() { contract(states_[k], count, static_cast<S*>(t_.states[k]) + first, random); });
    });
    visit_narrow(t_.dtype, [&]<class T>() {
      T* param = static_cast<T*>(t_.param) + first;
      const Draw draw(bits_, first, 0);
      contract(param_, count, param, a_.rounding == Rounding::kStochastic ? &draw : nullptr);
      if (t_.exact != nullptr && !kahan()) {
        contract(param_, count, exact<float>() + first, nullptr);
      } else if (t_.exact != nullptr) {
        expand(param, count, rest_);
        each(count, [&](int64_t i) { store(rest_ + i, at(param_ + i) - at(rest_ + i)); });
        contract(rest_, count, exact<T>() + first, nullptr);
      }
      if (t_.ema != nullptr) average<T>(first, count);
      if (a_.zero_grads) zero<T>(t_, first, first + count);
    });
  }

 private:
  using V = Vec<float>;
  static V at(const float* p) { return cpu::load<V>(p); }
  template <class F>
  static void each(int64_t count, F&& f) {
    for (int64_t i = 0; i < count; i += V::kLanes) f(i);
  }
  template <class F>
  void for_each_state(F&& f) const {
    for (int k = 0; k < count_; ++k) {
      visit_bool((squares_ >> k & 1u) == 0, [&]<bool kSigned>() { f.template operator()<kSigned>(k); });
    }
  }
  // Of what the parameter is from now on, rounded or not.
  template <class T>
  void average(int64_t first, int64_t count) {
    if (t_.exact == nullptr || kahan()) expand(static_cast<const T*>(t_.param) + first, count, param_);
    float* ema = static_cast<float*>(t_.ema) + first;
    const V rate{float(1 - a_.ema_decay)};
    for_each_vector<V>(count, [&](int64_t i, auto lanes) {
      const V mean = cpu::load<V>(ema + i, lanes);
      store(ema + i, mean + rate * (at(param_ + i) - mean), lanes);
    });
  }
  bool kahan() const { return a_.rounding == Rounding::kKahan; }
  template <class T>
  T* exact() const {
    return static_cast<T*>(t_.exact);
  }
  uint8_t* codes(int k) const { return static_cast<uint8_t*>(t_.states[k]); }

  const OptimizerStep& a_;
  const StepTensor& t_;
  const RandomBits bits_;
  const int count_;
  const unsigned squares_;
  StepTensor tensor_;
  alignas(kVecBytes) float param_[kCodeBlock], grad_[kCodeBlock], rest_[kCodeBlock], states_[kMaxStates][kCodeBlock];
};

// f(block, first, count) for the blocks of elements [first, last); f works on block.tensor() from 0 to count.
template <class R, class F>
void for_each_block(const OptimizerStep& a, const StepTensor& t, int64_t first, int64_t last, F&& f) {
  Block block(a, t, R::kStates, R::kUnsigned);
  for (; first < last; first += kCodeBlock) {
    const int64_t count = std::min(kCodeBlock, last - first);
    block.load(first, count);
    f(block, first, count);
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
              for_each_block<R>(a, t, first, last, [&](const Block& block, int64_t, int64_t count) {
                norms<float>(rule, block.tensor(), factor, 0, count, result);
              });
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
  OptimizerStep update_alone = a;
  update_alone.zero_grads = false;
  for_each_tensor(a, begin, end, [&](const StepTensor& t, int64_t first, int64_t last) {
    if (skipped) return visit_dtype(t.dtype, [&]<class T>() { zero<T>(t, first, last); });
    if (is_plain(a, t)) {
      return visit_dtype(t.dtype, [&]<class T>() {
        visit_rule<Acc<T>>(a.rule, [&]<class R>() { update<T>(rule_of<R>(a, t), a, t, factor, first, last); });
      });
    }
    visit_rule<float>(a.rule, [&]<class R>() {
      const R rule = rule_of<R>(a, t);
      for_each_block<R>(a, t, first, last, [&](Block& block, int64_t at, int64_t count) {
        update<float, R::kStatesFirst>(rule, update_alone, block.tensor(), factor, 0, count);
        block.save(at, count);
      });
    });
  });
}

}  // namespace fusedtrain::cpu

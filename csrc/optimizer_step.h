#pragma once
// optimizer_step: one step of an optimizer for a list of parameters, in one pass over memory (two for rules that need
// the norm of each parameter or gradient).
//
//   f = min(1, max_norm / (norm / grad_scale + 1e-6)) / grad_scale          norm: of the gradients as they are; LAMB's
//   own
//                                                                           clipping has no 1e-6
//   p, states = rule(p, +-f g, states)                                      csrc/core/update_rule.h
//   ema = ema + (1 - ema_decay) (p - ema)
//   step = step + 1
//   g = 0                                                                   where zero_grads
//
// Parameters and states may be stored in fewer bits than they are computed in, csrc/core/narrow.h.
//
// Of a parameter that is spread over processes the first pass sums its parts, a caller adds those of the others, and
// the second pass is given the sums.
//
// Where found_inf is set, or the norm is not finite and skip_nonfinite is set, only the last line is done.
#include "core/isa.h"
#include "core/narrow.h"
#include "core/types.h"
#include "core/update_rule.h"
#include "grad_norm.h"

namespace fusedtrain {

// One parameter and what belongs to it, all in the same order of memory. acc: float, double for kFloat64.
struct StepTensor {
  int64_t numel;
  DType dtype;
  void* param;                  // dtype [numel]
  void* grad;                   // dtype [numel]
  void* states[kMaxStates];     // state_dtype or 8 bits [numel], as many as the rule has
  float* scalars[kMaxScalars];  // [1], as many as the rule has
  void* ema;                    // acc [numel] or null
  float* step;                  // [1]: updates done so far; null where none are counted; neighbours may share one
  DType state_dtype;            // dtype; or kFloat32 or kBFloat16 for all dtypes but kFloat64
  float* scales[kMaxStates];    // [code_blocks(numel)] where the states are blocks of 8 bits, else null
  void* exact;                  // kKahan: dtype [numel], what rounding took from the parameter; else float [numel], the
                                // number whose rounded copy the parameter is; or null
};

FUSEDTRAIN_HD bool is_coded(const StepTensor& t) { return t.scales[0] != nullptr; }

struct OptimizerStep {
  int64_t count;
  const StepTensor* tensors;   // [count]
  const int64_t* first_chunk;  // [count + 1], as in GradNorm
  Rule rule;
  Hyper hyper;
  bool maximize, zero_grads, skip_nonfinite;
  double ema_decay;
  double max_norm;
  const double* norm;       // [1] or null: no clipping
  const float* grad_scale;  // [1] or null: 1
  const float* found_inf;   // [1] or null: 0
  const float* lr;          // [1] or null: that of hyper
  double* partial;          // [chunks, kMaxSums]: the sums of the first pass, or null
  double* sums;             // [count, kMaxSums]: those of whole parameters, or null
  bool sums_given;          // there is no first pass
  bool sums_only;           // there is nothing but the first pass
  Ratio* ratio;             // [count]: what the rule makes of them, or null
  Rounding rounding;        // of the parameters in 16 bits
  bool random;              // states in 16 and 8 bits are rounded stochastically
  uint64_t seed;
};

// True when nothing of `t` is stored in fewer bits than the parameter, nor rounded in other ways than to nearest.
FUSEDTRAIN_HD bool is_plain(const OptimizerStep& a, const StepTensor& t) {
  if (t.dtype == DType::kFloat64) return true;
  if (is_coded(t) || t.exact != nullptr || t.state_dtype != t.dtype) return false;
  return t.dtype == DType::kFloat32 || (a.rounding == Rounding::kNearest && !a.random);
}

static_assert(RandomBits::kParamUse >= kMaxStates);

// Of the tensor at that place in the list.
FUSEDTRAIN_HD RandomBits random_bits(const OptimizerStep& a, const StepTensor& t, int64_t place) {
  return RandomBits(a.seed, t.step != nullptr ? int64_t(*t.step) + 1 : 0, place);
}

FUSEDTRAIN_HD Hyper hyper_of(const OptimizerStep& a) {
  Hyper h = a.hyper;
  if (a.lr != nullptr) h.lr = *a.lr;
  return h;
}

FUSEDTRAIN_HD bool is_lamb(Rule rule) { return rule == Rule::kLamb || rule == Rule::kLambCautious; }

// The factor f on the gradients, +-1 / grad_scale where there is no norm.
#ifndef __CUDACC__
[[gnu::always_inline]]  // a variant of the CPU kernels must not define it for the others, tests/test_csrc.py
#endif
FUSEDTRAIN_HD double
grad_factor(const OptimizerStep& a) {
  const double scale = a.grad_scale != nullptr ? double(*a.grad_scale) : 1.0;
  double factor = (a.maximize ? -1.0 : 1.0) / scale;
  if (a.norm != nullptr) {
    const double clip = a.max_norm / (*a.norm / scale + (is_lamb(a.rule) ? 0.0 : 1e-6));
    factor *= clip > 1.0 ? 1.0 : clip;  // a norm that is NaN makes the gradients NaN, as clip_grad_norm_ does
  }
  return factor;
}

FUSEDTRAIN_HD bool is_skipped(const OptimizerStep& a) {
  if (a.found_inf != nullptr && *a.found_inf != 0.0f) return true;
  return a.skip_nonfinite && a.norm != nullptr && !(*a.norm - *a.norm == 0.0);
}

namespace cpu {
// Items: chunks. The first pass of rules with kNorms: writes partial.
template <Isa I>
void optimizer_step_norms(const OptimizerStep& a, int64_t begin, int64_t end);
// Items: chunks. All the rest but the counting of steps.
template <Isa I>
void optimizer_step(const OptimizerStep& a, int64_t begin, int64_t end);
}  // namespace cpu

namespace cuda {
[[nodiscard]] int optimizer_step(const OptimizerStep& a, void* stream);
}  // namespace cuda

}  // namespace fusedtrain

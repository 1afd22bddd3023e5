// Tensors -> OptimizerStep -> kernels.
#include "optimizer_step.h"

#include "bindings/lists.h"

namespace fusedtrain::bindings {
namespace {

void check_like(const char* name, const Tensor& t, const Tensor& param, ScalarType dtype) {
  const auto sizes = param.sizes(), strides = param.strides(), own = t.strides();
  bool same = t.scalar_type() == dtype && std::ranges::equal(t.sizes(), sizes);
  same &= t.is_cuda() == param.is_cuda() && t.get_device() == param.get_device();
  for (size_t d = 0; same && d < sizes.size(); ++d) same = own[d] == strides[d] || sizes[d] == 1 || t.numel() == 0;
  STD_TORCH_CHECK(same, "fusedtrain: ", name, " must have the shapes, dtypes, strides and device of params");
}

template <class T>
T* scalar(const char* name, const std::optional<Tensor>& t, const Tensor& like, ScalarType dtype) {
  if (!t.has_value()) return nullptr;
  const bool here = t->is_cuda() == like.is_cuda() && t->get_device() == like.get_device();
  STD_TORCH_CHECK(t->numel() == 1 && t->scalar_type() == dtype && here, "fusedtrain: ", name,
                  " must be one number on the device of params, float64 for norm, else float32");
  return static_cast<T*>(t->mutable_data_ptr());
}

struct RuleInfo {
  int64_t states, scalars, sums;
  bool norms, share;
};

RuleInfo info_of(Rule rule) {
  RuleInfo info{};
  visit_rule<float>(rule, [&]<class R>() { info = {R::kStates, R::kScalars, R::kSums, R::kNorms, R::kShare}; });
  return info;
}

// `narrow`: the states may be in other types than the parameter, all of one parameter in the same.
ScalarType state_type(const StepTensor& t, const Tensor& state, const Tensor& p, bool narrow) {
  const ScalarType type = state.scalar_type();
  if (!narrow || t.dtype == DType::kFloat64) return p.scalar_type();
  return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Byte ? type : p.scalar_type();
}

float* scales_of(const Tensor& scales, const StepTensor& t, const Tensor& p) {
  const bool here = scales.is_cuda() == p.is_cuda() && scales.get_device() == p.get_device();
  STD_TORCH_CHECK(scales.scalar_type() == ScalarType::Float && here && scales.is_contiguous() &&
                      scales.numel() == code_blocks(t.numel),
                  "fusedtrain: scales must be ", code_blocks(t.numel), " float32 numbers on the device of params, got ",
                  scales.numel());
  return static_cast<float*>(scales.mutable_data_ptr());
}

// What an operator takes beyond the lists that all have: how numbers are stored in fewer bits.
struct Narrow {
  Tensors exact, scales;
  int64_t rounding = int64_t(Rounding::kNearest);
  std::optional<int64_t> seed;
  bool allowed = false;
};

std::vector<StepTensor> step_tensors(const Tensors& params, const Tensors& grads, const Tensors& states,
                                     const Tensors& steps, const Tensors& ema, const RuleInfo& rule,
                                     const Narrow& narrow) {
  const size_t count = params.size();
  STD_TORCH_CHECK(grads.size() == count && states.size() == count * (rule.states + rule.scalars) &&
                      (steps.empty() || steps.size() == count) && (ema.empty() || ema.size() == count) &&
                      (narrow.exact.empty() || narrow.exact.size() == count) &&
                      (narrow.scales.empty() || narrow.scales.size() == count * rule.states),
                  "fusedtrain: optimizer_step_ got lists of different lengths");
  std::vector<StepTensor> tensors(count);
  for (size_t i = 0; i < count; ++i) {
    const Tensor& p = params[i];
    StepTensor& t = tensors[i];
    check_device("params", p, params[0]);
    check_dense("params", p);
    check_like("grads", grads[i], p, p.scalar_type());
    t = {.numel = p.numel(),
         .dtype = dtype_of(p),
         .param = p.mutable_data_ptr(),
         .grad = grads[i].mutable_data_ptr(),
         .states = {},
         .scalars = {},
         .ema = nullptr,
         .step = nullptr,
         .state_dtype = dtype_of(p),
         .scales = {},
         .exact = nullptr};
    for (int64_t k = 0; k < rule.states; ++k) {
      const Tensor& state = states[k * count + i];
      const ScalarType type = state_type(t, states[i], p, narrow.allowed);
      check_like("states", state, p, type);
      t.states[k] = state.mutable_data_ptr();
      if (type != ScalarType::Byte) {
        t.state_dtype = dtype_of(state);
      } else {
        STD_TORCH_CHECK(!narrow.scales.empty(), "fusedtrain: states in 8 bits need scales");
        t.scales[k] = scales_of(narrow.scales[k * count + i], t, p);
      }
    }
    if (!narrow.exact.empty() && narrow.exact[i].numel() > 0) {
      const bool kahan = narrow.rounding == int64_t(Rounding::kKahan);
      check_like("exact", narrow.exact[i], p, kahan ? p.scalar_type() : ScalarType::Float);
      t.exact = narrow.exact[i].mutable_data_ptr();
    }
    for (int64_t k = 0; k < rule.scalars; ++k) {
      t.scalars[k] = scalar<float>("scalar states", states[(rule.states + k) * count + i], p, ScalarType::Float);
    }
    if (!ema.empty()) {
      check_like("ema", ema[i], p, acc_type(p));
      t.ema = ema[i].mutable_data_ptr();
    }
    if (!steps.empty()) t.step = scalar<float>("steps", steps[i], p, ScalarType::Float);
  }
  return tensors;
}

// What a step takes beside its tensors.
struct Options {
  int64_t rule;
  double lr, weight_decay;
  bool decoupled;
  std::vector<double> coefficients;
  bool maximize;
  double ema_decay;
  bool zero_grads;
  std::optional<Tensor> norm;
  double max_norm;
  bool skip_nonfinite;
  std::optional<Tensor> grad_scale, found_inf, device_lr, sums;
  bool sums_only;
};

Rule rule_of(int64_t code) { return code_of("rule", code, Rule{kRules - 1}); }

// Both passes over some parameters before the next ones, so that the second finds them in the cache.
constexpr int64_t kBatchChunks = 64;

void step_with_norms(OptimizerStep a) {
  std::vector<double> partial(kMaxSums * a.first_chunk[a.count]), own(kMaxSums * a.count);
  std::vector<Ratio> ratio(a.count);
  a.partial = partial.data();
  a.ratio = ratio.data();
  if (a.sums == nullptr) a.sums = own.data();
  const RuleInfo info = info_of(a.rule);
  for (int64_t i = 0, next = 0; i < a.count; i = next) {
    while (next < a.count && (next == i || a.first_chunk[next + 1] - a.first_chunk[i] <= kBatchChunks)) ++next;
    const int64_t begin = a.first_chunk[i], end = a.first_chunk[next];
    if (!a.sums_given) {
      parallel_items(begin, end, kListChunk,
                     [&]<Isa I>(int64_t b, int64_t e) { cpu::optimizer_step_norms<I>(a, b, e); });
      for (int64_t k = i; k < next; ++k) {
        double* sums = a.sums + kMaxSums * k;
        std::fill_n(sums, kMaxSums, 0.0);
        for (int64_t c = a.first_chunk[k]; c < a.first_chunk[k + 1]; ++c) {
          for (int j = 0; j < kMaxSums; ++j) sums[j] += partial[kMaxSums * c + j];
        }
        if (info.share) sums[info.sums - 1] = double(a.tensors[k].numel);
      }
    }
    if (a.sums_only) continue;
    for (int64_t k = i; k < next; ++k) {
      visit_rule<float>(a.rule, [&]<class R>() {
        if constexpr (R::kNorms) ratio[k] = R::ratio(hyper_of(a), a.sums + kMaxSums * k, a.tensors[k].scalars);
      });
    }
    parallel_items(begin, end, kListChunk, [&]<Isa I>(int64_t b, int64_t e) { cpu::optimizer_step<I>(a, b, e); });
  }
}

void step_on_cuda(OptimizerStep a, const Tensor& like) {
  const bool norms = info_of(a.rule).norms;
  const auto doubles = [&](int64_t size) { return torch::stable::new_empty(like, {size}, ScalarType::Double); };
  const Tensor partial = doubles(norms && !a.sums_given ? kMaxSums * a.first_chunk[a.count] : 0),
               ratio = doubles(norms ? sizeof(Ratio) / sizeof(double) * a.count : 0);
  a.partial = static_cast<double*>(data_or_null(partial));
  a.ratio = static_cast<Ratio*>(data_or_null(ratio));
  if constexpr (kWithCuda) {
    const CudaLaunch launch("optimizer_step_", like);
    launch(cuda::optimizer_step(a, launch.stream));
  }
}

// What the first pass writes or the second one reads, [count, kMaxSums].
double* sums_of(const Options& o, int64_t count, const Tensor& like) {
  if (!o.sums.has_value()) {
    STD_TORCH_CHECK(!o.sums_only, "fusedtrain: sums_only needs sums");
    return nullptr;
  }
  STD_TORCH_CHECK(info_of(rule_of(o.rule)).norms, "fusedtrain: the rule has no sums");
  check_device("sums", *o.sums, like);
  STD_TORCH_CHECK(
      o.sums->scalar_type() == ScalarType::Double && o.sums->is_contiguous() && o.sums->numel() == kMaxSums * count,
      "fusedtrain: sums must be float64 of shape [", count, ", ", kMaxSums, "]");
  return static_cast<double*>(o.sums->mutable_data_ptr());
}

// `like` tells the device.
void step(const StepTensor* tensors, int64_t count, const Tensor& like, const Options& o, const Narrow& narrow) {
  STD_TORCH_CHECK(o.coefficients.size() <= size_t(kCoefficients), "fusedtrain: too many coefficients");
  Hyper hyper{.lr = o.lr, .weight_decay = o.weight_decay, .decoupled = o.decoupled, .c = {}};
  std::copy(o.coefficients.begin(), o.coefficients.end(), hyper.c);
  const std::vector<int64_t> first = first_chunks(tensors, count);
  const OptimizerStep a{.count = count,
                        .tensors = tensors,
                        .first_chunk = first.data(),
                        .rule = rule_of(o.rule),
                        .hyper = hyper,
                        .maximize = o.maximize,
                        .zero_grads = o.zero_grads,
                        .skip_nonfinite = o.skip_nonfinite,
                        .ema_decay = o.ema_decay,
                        .max_norm = o.max_norm,
                        .norm = scalar<double>("norm", o.norm, like, ScalarType::Double),
                        .grad_scale = scalar<float>("grad_scale", o.grad_scale, like, ScalarType::Float),
                        .found_inf = scalar<float>("found_inf", o.found_inf, like, ScalarType::Float),
                        .lr = scalar<float>("device_lr", o.device_lr, like, ScalarType::Float),
                        .partial = nullptr,
                        .sums = sums_of(o, count, like),
                        .sums_given = o.sums.has_value() && !o.sums_only,
                        .sums_only = o.sums_only,
                        .ratio = nullptr,
                        .rounding = code_of("rounding", narrow.rounding, Rounding::kKahan),
                        .random = narrow.seed.has_value(),
                        .seed = uint64_t(narrow.seed.value_or(0))};
  if (like.is_cuda()) return step_on_cuda(a, like);
  if (info_of(a.rule).norms && !is_skipped(a)) {
    step_with_norms(a);
  } else if (!a.sums_only) {
    parallel_items(0, first.back(), kListChunk,
                   [&]<Isa I>(int64_t begin, int64_t end) { cpu::optimizer_step<I>(a, begin, end); });
  }
  if (is_skipped(a) || a.sums_only) return;
  for (int64_t i = 0; i < count; ++i) {
    float* step = tensors[i].step;
    if (step != nullptr && (i == 0 || step != tensors[i - 1].step)) *step += 1;
  }
}

void optimizer_step_(Tensors params, Tensors grads, Tensors states, Tensors steps, Tensors ema, int64_t rule, double lr,
                     double weight_decay, bool decoupled, std::vector<double> coefficients, bool maximize,
                     double ema_decay, bool zero_grads, std::optional<Tensor> norm, double max_norm,
                     bool skip_nonfinite, std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf,
                     std::optional<Tensor> device_lr, std::optional<Tensor> sums, bool sums_only) {
  const std::vector<StepTensor> tensors = step_tensors(params, grads, states, steps, ema, info_of(rule_of(rule)), {});
  if (tensors.empty()) return;
  step(tensors.data(), int64_t(tensors.size()), params[0],
       {rule, lr, weight_decay, decoupled, coefficients, maximize, ema_decay, zero_grads, norm, max_norm,
        skip_nonfinite, grad_scale, found_inf, device_lr, sums, sums_only},
       {});
}

void optimizer_step_narrow_(Tensors params, Tensors grads, Tensors states, Tensors steps, Tensors ema, int64_t rule,
                            double lr, double weight_decay, bool decoupled, std::vector<double> coefficients,
                            bool maximize, double ema_decay, bool zero_grads, std::optional<Tensor> norm,
                            double max_norm, bool skip_nonfinite, std::optional<Tensor> grad_scale,
                            std::optional<Tensor> found_inf, std::optional<Tensor> device_lr,
                            std::optional<Tensor> sums, bool sums_only, Tensors exact, Tensors scales, int64_t rounding,
                            std::optional<int64_t> seed) {
  const Narrow narrow{exact, scales, rounding, seed, true};
  const std::vector<StepTensor> tensors =
      step_tensors(params, grads, states, steps, ema, info_of(rule_of(rule)), narrow);
  if (tensors.empty()) return;
  step(tensors.data(), int64_t(tensors.size()), params[0],
       {rule, lr, weight_decay, decoupled, coefficients, maximize, ema_decay, zero_grads, norm, max_norm,
        skip_nonfinite, grad_scale, found_inf, device_lr, sums, sums_only},
       narrow);
}

void optimizer_step_table_(Tensor table, Tensor like, int64_t rule, double lr, double weight_decay, bool decoupled,
                           std::vector<double> coefficients, bool maximize, double ema_decay, bool zero_grads,
                           std::optional<Tensor> norm, double max_norm, bool skip_nonfinite,
                           std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf,
                           std::optional<Tensor> device_lr, std::optional<Tensor> sums, bool sums_only,
                           int64_t rounding, std::optional<int64_t> seed) {
  const StepTensor* tensors = static_cast<const StepTensor*>(table.const_data_ptr());
  const RuleInfo info = info_of(rule_of(rule));
  for (int64_t i = 0; i < rows_of(table); ++i) {
    bool complete = true;
    for (int64_t k = 0; k < info.states; ++k) complete &= tensors[i].states[k] != nullptr || tensors[i].numel == 0;
    for (int64_t k = 0; k < info.scalars; ++k) complete &= tensors[i].scalars[k] != nullptr;
    STD_TORCH_CHECK(complete, "fusedtrain: a table lacks states of its rule");
  }
  step(tensors, rows_of(table), like,
       {rule, lr, weight_decay, decoupled, coefficients, maximize, ema_decay, zero_grads, norm, max_norm,
        skip_nonfinite, grad_scale, found_inf, device_lr, sums, sums_only},
       {{}, {}, rounding, seed});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CPU, m) {
  m.impl("optimizer_step_", TORCH_BOX(&optimizer_step_));
  m.impl("optimizer_step_narrow_", TORCH_BOX(&optimizer_step_narrow_));
  m.impl("optimizer_step_table_", TORCH_BOX(&optimizer_step_table_));
}
#ifdef FUSEDTRAIN_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CUDA, m) {
  m.impl("optimizer_step_", TORCH_BOX(&optimizer_step_));
  m.impl("optimizer_step_narrow_", TORCH_BOX(&optimizer_step_narrow_));
  m.impl("optimizer_step_table_", TORCH_BOX(&optimizer_step_table_));
}
#endif

}  // namespace fusedtrain::bindings

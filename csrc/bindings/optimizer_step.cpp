// Tensors -> OptimizerStep -> kernels.
#include "optimizer_step.h"

#include "bindings/lists.h"

namespace fusedtrain::bindings {
namespace {

void check_like(const char* name, const Tensor& t, const Tensor& param, ScalarType dtype) {
  const auto sizes = param.sizes(), strides = param.strides(), own = t.strides();
  bool same = t.scalar_type() == dtype && !t.is_cuda() && std::ranges::equal(t.sizes(), sizes);
  for (size_t d = 0; same && d < sizes.size(); ++d) same = own[d] == strides[d] || sizes[d] == 1 || t.numel() == 0;
  STD_TORCH_CHECK(same, "fusedtrain: ", name, " must have the shapes, dtypes, strides and device of params");
}

template <class T>
T* scalar(const char* name, const std::optional<Tensor>& t, ScalarType dtype) {
  if (!t.has_value()) return nullptr;
  STD_TORCH_CHECK(t->numel() == 1 && t->scalar_type() == dtype && !t->is_cuda(), "fusedtrain: ", name,
                  " must be one number on the device of params, float64 for norm, else float32");
  return static_cast<T*>(t->mutable_data_ptr());
}

int64_t states_of(Rule rule) {
  int64_t count = 0;
  visit_rule<float>(rule, [&]<class R>() { count = R::kStates; });
  return count;
}

std::vector<StepTensor> step_tensors(const Tensors& params, const Tensors& grads, const Tensors& states,
                                     const Tensors& steps, const Tensors& ema, int64_t states_each) {
  const size_t count = params.size();
  STD_TORCH_CHECK(grads.size() == count && states.size() == count * states_each &&
                      (steps.empty() || steps.size() == count) && (ema.empty() || ema.size() == count),
                  "fusedtrain: optimizer_step_ got lists of different lengths");
  std::vector<StepTensor> tensors(count);
  for (size_t i = 0; i < count; ++i) {
    const Tensor& p = params[i];
    StepTensor& t = tensors[i];
    check_dense("params", p);
    check_like("grads", grads[i], p, p.scalar_type());
    t = {.numel = p.numel(),
         .dtype = dtype_of(p),
         .param = p.mutable_data_ptr(),
         .grad = grads[i].mutable_data_ptr(),
         .states = {},
         .ema = nullptr,
         .step = nullptr};
    for (int64_t k = 0; k < states_each; ++k) {
      check_like("states", states[k * count + i], p, p.scalar_type());
      t.states[k] = states[k * count + i].mutable_data_ptr();
    }
    if (!ema.empty()) {
      check_like("ema", ema[i], p, acc_type(p));
      t.ema = ema[i].mutable_data_ptr();
    }
    if (!steps.empty()) t.step = scalar<float>("steps", steps[i], ScalarType::Float);
  }
  return tensors;
}

void optimizer_step_(Tensors params, Tensors grads, Tensors states, Tensors steps, Tensors ema, int64_t rule, double lr,
                     double weight_decay, bool decoupled, std::vector<double> coefficients, bool maximize,
                     double ema_decay, bool zero_grads, std::optional<Tensor> norm, double max_norm,
                     bool skip_nonfinite, std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf) {
  STD_TORCH_CHECK(coefficients.size() <= size_t(kCoefficients), "fusedtrain: too many coefficients");
  STD_TORCH_CHECK(rule >= 0 && rule <= int64_t(Rule::kLion), "fusedtrain: unknown rule ", rule);
  Hyper hyper{.lr = lr, .weight_decay = weight_decay, .decoupled = decoupled, .c = {}};
  std::copy(coefficients.begin(), coefficients.end(), hyper.c);
  const std::vector<StepTensor> tensors =
      step_tensors(params, grads, states, steps, ema, states_of(static_cast<Rule>(rule)));
  const std::vector<int64_t> first = first_chunks(params);
  const OptimizerStep a{.count = int64_t(params.size()),
                        .tensors = tensors.data(),
                        .first_chunk = first.data(),
                        .rule = static_cast<Rule>(rule),
                        .hyper = hyper,
                        .maximize = maximize,
                        .zero_grads = zero_grads,
                        .skip_nonfinite = skip_nonfinite,
                        .ema_decay = ema_decay,
                        .max_norm = max_norm,
                        .norm = scalar<double>("norm", norm, ScalarType::Double),
                        .grad_scale = scalar<float>("grad_scale", grad_scale, ScalarType::Float),
                        .found_inf = scalar<float>("found_inf", found_inf, ScalarType::Float)};
  parallel_items(0, first.back(), kListChunk,
                 [&]<Isa I>(int64_t begin, int64_t end) { cpu::optimizer_step<I>(a, begin, end); });
  if (!is_skipped(a)) {
    for (const StepTensor& t : tensors) {
      if (t.step != nullptr) *t.step += 1;
    }
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CPU, m) { m.impl("optimizer_step_", TORCH_BOX(&optimizer_step_)); }

}  // namespace fusedtrain::bindings

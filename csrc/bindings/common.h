#pragma once
// What the bindings share: from stable-ABI tensors to the plain structs of the contracts.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "core/isa.h"
#include "core/types.h"

namespace fusedtrain::bindings {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::Double:
      return DType::kFloat64;
    default:
      STD_TORCH_CHECK(false, "fusedtrain: float32, bfloat16, float16 or float64 expected");
  }
}

// The type of sums and small vectors.
inline ScalarType acc_type(const Tensor& t) {
  return t.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// An integer code of a schema (fusedtrain/ops/_codes.py) as the enum that kernels take: they do not look for others.
template <class Enum>
Enum code_of(const char* name, int64_t code, Enum last) {
  STD_TORCH_CHECK(code >= 0 && code <= static_cast<int64_t>(last), "fusedtrain: ", name, " must be a code from 0 to ",
                  static_cast<int64_t>(last), ", got ", code);
  return static_cast<Enum>(code);
}
inline Activation activation_of(const char* name, int64_t code) { return code_of(name, code, Activation::kHalfTanh); }
inline Activation input_activation_of(const char* name, int64_t code) {
  return code_of(name, code, Activation::kRelu6);
}
inline Pool pool_of(int64_t code) { return code_of("pool", code, Pool::kAvgMax); }

// [n, c, h, w] in one of the two dense formats; a tensor that is dense in both counts as contiguous.
inline Images images_of(const Tensor& x, int64_t in_act) {
  STD_TORCH_CHECK(x.dim() == 4, "fusedtrain: x of shape [N, C, H, W] expected, got ", x.dim(), " dimensions");
  const int64_t n = x.size(0), c = x.size(1), h = x.size(2), w = x.size(3);
  Images images{n, c, h * w, dtype_of(x), Layout::kContiguous, input_activation_of("in_act", in_act)};
  if (x.is_contiguous()) return images;
  const int64_t wanted[4] = {h * w * c, 1, w * c, c};
  for (int d = 0; d < 4; ++d) {
    STD_TORCH_CHECK(x.size(d) == 1 || x.stride(d) == wanted[d],
                    "fusedtrain: a dense tensor expected, contiguous or channels_last");
  }
  images.layout = Layout::kChannelsLast;
  return images;
}

// Raises unless `t` has the shape, dtype, strides and device of `x`.
inline void check_same(const char* name, const Tensor& t, const Tensor& x) {
  bool same = t.dim() == x.dim() && t.scalar_type() == x.scalar_type() && t.get_device() == x.get_device();
  for (int64_t d = 0; same && d < x.dim(); ++d) {
    same = t.size(d) == x.size(d) && (x.size(d) == 1 || t.stride(d) == x.stride(d) || x.numel() == 0);
  }
  STD_TORCH_CHECK(same, "fusedtrain: ", name, " must have the shape, dtype and strides of x");
}

// `t` as a dense tensor of `type` on the device of `x`, with `count` elements; without `type`, in the accumulation type
// of `x`.
inline Tensor small_input(const char* name, const Tensor& t, const Tensor& x, int64_t count, ScalarType type) {
  STD_TORCH_CHECK(t.numel() == count, "fusedtrain: ", name, " must have ", count, " elements, got ", t.numel());
  STD_TORCH_CHECK(t.get_device() == x.get_device() && t.is_cuda() == x.is_cuda(), "fusedtrain: ", name,
                  " must be on the device of x");
  const Tensor dense = t.is_contiguous() ? t : torch::stable::contiguous(t);
  return dense.scalar_type() == type ? dense : torch::stable::to(dense, type);
}
inline Tensor small_input(const char* name, const Tensor& t, const Tensor& x, int64_t count) {
  return small_input(name, t, x, count, acc_type(x));
}

// Images as x, but for the sizes behind the first, and the type where one is given. By the dispatcher, as the stable
// ABI has no empty() with strides; a permuted contiguous one would be a view, which autograd lets nobody write to.
inline Tensor empty_images(const Tensor& x, Layout layout, int64_t channels, int64_t h, int64_t w,
                           std::optional<ScalarType> type = std::nullopt) {
  const int64_t n = x.size(0);
  if (layout == Layout::kContiguous) return torch::stable::new_empty(x, {n, channels, h, w}, type);
  using torch::stable::detail::from;
  const std::array<int64_t, 4> sizes{n, channels, h, w}, strides{h * w * channels, 1, w * channels, channels};
  std::array<StableIValue, 7> stack{from(x),
                                    from(torch::headeronly::IntHeaderOnlyArrayRef(sizes)),
                                    from(torch::headeronly::IntHeaderOnlyArrayRef(strides)),
                                    from(type),
                                    from(std::optional<torch::headeronly::Layout>()),
                                    from(std::optional<torch::stable::Device>()),
                                    from(std::optional<bool>())};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::new_empty_strided", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline Tensor empty_acc(const Tensor& x, std::initializer_list<int64_t> shape) {
  return torch::stable::new_empty(x, shape, acc_type(x));
}

// Null for the [0] tensor that stands for "not needed".
inline void* data_or_null(const Tensor& t) { return t.numel() == 0 ? nullptr : t.mutable_data_ptr(); }

// Whether the threads have nearly the same to do when each takes whole items of `count`.
inline bool shares_evenly(int64_t count) {
  const int64_t threads = torch::stable::get_num_threads();
  return 4 * count >= 3 * ((count + threads - 1) / threads * threads);
}

// A thread gets at least this many elements of the large tensors.
constexpr int64_t kGrain = 32768;

// f.template operator()<I>(begin, end) over parts of the items [begin, end) on torch's threads, for the active
// instruction set. `work` is how many elements one item touches.
template <class F>
void parallel_items(int64_t begin, int64_t end, int64_t work, F&& f) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, work));
  visit_isa([&]<Isa I>() {
    if (end - begin <= grain) {
      if (begin < end) f.template operator()<I>(begin, end);
    } else {
      torch::stable::parallel_for(begin, end, grain, [&](int64_t b, int64_t e) { f.template operator()<I>(b, e); });
    }
  });
}

#ifdef FUSEDTRAIN_WITH_CUDA
constexpr bool kWithCuda = true;
#else
constexpr bool kWithCuda = false;
#endif

// The device of a tensor and its current stream, while kernels are launched there. Needs no CUDA header: the stream
// comes from the torch that runs.
class CudaLaunch {
 public:
  CudaLaunch(const char* op, const Tensor& t);
  // Raises when a launcher returned an error code.
  void operator()(int error) const;
  void* stream = nullptr;

 private:
  const char* op_;
  torch::stable::accelerator::DeviceGuard guard_;
};

}  // namespace fusedtrain::bindings

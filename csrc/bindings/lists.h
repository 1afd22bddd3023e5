#pragma once
// What the ops on lists of tensors share: chunks of the lists, checks of their members.
#include <vector>

#include "bindings/common.h"
#include "bindings/dense.h"
#include "optimizer_step.h"

namespace fusedtrain::bindings {

using Tensors = std::vector<Tensor>;

// [count + 1]: chunks of the tensors before.
template <class Row>
std::vector<int64_t> first_chunks(const Row* tensors, int64_t count) {
  std::vector<int64_t> first(count + 1, 0);
  for (int64_t i = 0; i < count; ++i) first[i + 1] = first[i] + (tensors[i].numel + kListChunk - 1) / kListChunk;
  return first;
}

// The rows of a table that fusedtrain._host.Gatherer has filled: StepTensor as bytes.
inline int64_t rows_of(const Tensor& table) {
  STD_TORCH_CHECK(
      table.scalar_type() == ScalarType::Byte && table.is_contiguous() && table.numel() % sizeof(StepTensor) == 0,
      "fusedtrain: a table of the gatherer expected");
  return table.numel() / int64_t(sizeof(StepTensor));
}

// Raises unless `t` is on the device of `like`.
inline void check_device(const char* name, const Tensor& t, const Tensor& like) {
  STD_TORCH_CHECK(t.is_cuda() == like.is_cuda() && t.get_device() == like.get_device(), "fusedtrain: ", name,
                  " must be on one device");
}

// Raises unless the elements of `t` fill one stretch of memory, in whatever order of dimensions.
inline void check_dense(const char* name, const Tensor& t) {
  if (t.is_contiguous()) return;
  STD_TORCH_CHECK(fills_memory(t.dim(), t.numel(), t.sizes().data(), t.strides().data()), "fusedtrain: ", name,
                  " must be dense tensors");
}

}  // namespace fusedtrain::bindings

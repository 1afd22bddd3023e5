#pragma once
// What the ops on lists of tensors share: chunks of the lists, checks of their members.
#include <vector>

#include "bindings/common.h"
#include "grad_norm.h"

namespace fusedtrain::bindings {

using Tensors = std::vector<Tensor>;

// [count + 1]: chunks of the tensors before.
inline std::vector<int64_t> first_chunks(const Tensors& list) {
  std::vector<int64_t> first(list.size() + 1, 0);
  for (size_t i = 0; i < list.size(); ++i) {
    first[i + 1] = first[i] + (list[i].numel() + kListChunk - 1) / kListChunk;
  }
  return first;
}

// Raises unless the elements of `t` fill one stretch of memory, in whatever order of dimensions.
inline void check_dense(const char* name, const Tensor& t) {
  if (t.is_contiguous()) return;
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  STD_TORCH_CHECK(last + 1 == t.numel(), "fusedtrain: ", name, " must be dense tensors");
}

}  // namespace fusedtrain::bindings

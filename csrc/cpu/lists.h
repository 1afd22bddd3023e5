#pragma once
// Walking over lists of tensors that are cut into chunks. Internal linkage, as in core/simd.h.
#include <algorithm>

#include "core/simd.h"
#include "grad_norm.h"

namespace fusedtrain::cpu {
namespace {

// f(tensor, first, last) for the elements [first, last) of every tensor that chunks [begin, end) cover.
template <class List, class F>
void for_each_tensor(const List& a, int64_t begin, int64_t end, F&& f) {
  const int64_t* at = std::upper_bound(a.first_chunk, a.first_chunk + a.count + 1, begin) - 1;
  for (int64_t i = at - a.first_chunk; i < a.count && a.first_chunk[i] < end; ++i) {
    const int64_t first = (std::max(begin, a.first_chunk[i]) - a.first_chunk[i]) * kListChunk;
    const int64_t last = std::min((end - a.first_chunk[i]) * kListChunk, a.tensors[i].numel);
    if (first < last) f(a.tensors[i], first, last);
  }
}

}  // namespace
}  // namespace fusedtrain::cpu

#pragma once
#include <cstdint>

namespace fusedtrain::bindings {

// True when the elements fill one stretch of memory, in whatever order of dimensions.
inline bool fills_memory(int64_t dims, int64_t numel, const int64_t* sizes, const int64_t* strides) {
  int64_t covered = 1;  // by the dimensions that are faster
  while (covered < numel) {
    int64_t d = dims - 1;
    while (d >= 0 && !(sizes[d] > 1 && strides[d] == covered)) --d;
    if (d < 0) return false;
    covered *= sizes[d];
  }
  return true;
}

}  // namespace fusedtrain::bindings

// grad_norm on the CPU: the sum of squares of each chunk, in four sums of the accumulation type.
#include "grad_norm.h"

#include "cpu/ahead.h"
#include "cpu/lists.h"

namespace fusedtrain::cpu {
namespace {

template <class T>
double sum_of_squares(const T* g, int64_t count) {
  using V = Vec<Acc<T>>;
  constexpr int64_t kBlock = 4 * V::kLanes;
  const bool ahead = asks_ahead;
  V sums[4] = {V(0), V(0), V(0), V(0)};
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    for (int k = 0; k < 4; ++k) {
      if (ahead) fetch(g + i + k * V::kLanes + kAhead<T>);
      const V x = load<V>(g + i + k * V::kLanes);
      sums[k] += x * x;
    }
  }
  for_each_vector<V>(count - i, [&](int64_t j, auto lanes) {
    const V x = load<V>(g + i + j, lanes);
    sums[0] += x * x;
  });
  return lane_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

}  // namespace

template <>
void grad_norm_partial<Isa::FUSEDTRAIN_ISA>(const GradNorm& a, int64_t begin, int64_t end) {
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    for_each_tensor(a, chunk, chunk + 1, [&](const NormTensor& t, int64_t first, int64_t last) {
      visit_dtype(t.dtype, [&]<class T>() {
        a.partial[chunk] = sum_of_squares(static_cast<const T*>(t.grad) + first, last - first);
      });
    });
  }
}

}  // namespace fusedtrain::cpu

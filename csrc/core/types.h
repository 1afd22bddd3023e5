#pragma once
// Plain types shared by contracts, CPU kernels, CUDA kernels and bindings. No torch, no CUDA include.
#include <cstdint>

namespace fusedtrain {

// Element type of the large tensors. Small vectors and all sums use the accumulation type: float, or double for
// kFloat64.
enum class DType : int32_t { kFloat32, kBFloat16, kFloat16, kFloat64 };

// kContiguous is [n, c, hw] in memory, kChannelsLast is [n, hw, c].
enum class Layout : int32_t { kContiguous, kChannelsLast };

// The values are part of the operator schemas; fusedtrain/ops/_codes.py holds the same list.
enum class Activation : int32_t {
  kIdentity,     // x
  kRelu,         // max(x, 0)
  kSilu,         // x * sigmoid(x)
  kGelu,         // x * (1 + erf(x / sqrt 2)) / 2
  kHardSwish,    // x * clamp(x + 3, 0, 6) / 6
  kRelu6,        // clamp(x, 0, 6)
  kSigmoid,      // 1 / (1 + exp(-x))
  kHardSigmoid,  // clamp(x + 3, 0, 6) / 6
  kTanh,         // tanh(x)
  kHalfTanh,     // (tanh(x) + 1) / 2
};

enum class Pool : int32_t {
  kAvg,     // mean
  kAvgMax,  // 0.5 * mean + 0.5 * max
};

// A batch of images with an activation in front: a(x), x of shape [n, c, hw] or [n, hw, c].
struct Images {
  int64_t n, c, hw;
  DType dtype;
  Layout layout;
  Activation in_act;  // kIdentity, kRelu, kSilu, kGelu, kHardSwish or kRelu6
};

// Sums over hw are cut into chunks of this many positions and added in order, so that the result depends neither on the
// number of threads nor on the batch, and long sums stay accurate.
constexpr int64_t kReduceChunk = 256;

constexpr int64_t reduce_chunks(const Images& images) {
  if (images.layout == Layout::kContiguous) return 1;  // a whole plane is summed in one place
  return images.hw > kReduceChunk ? (images.hw + kReduceChunk - 1) / kReduceChunk : 1;
}

// Items that are parts of wholes, so that threads share out few wholes: f(whole, first, last) for the parts
// [first, last) that items [begin, end) have of each.
template <class F>
void for_wholes(int64_t begin, int64_t end, int64_t parts, F&& f) {
  while (begin < end) {
    const int64_t first = begin % parts, last = first + end - begin < parts ? first + end - begin : parts;
    f(begin / parts, first, last);
    begin += last - first;
  }
}

}  // namespace fusedtrain

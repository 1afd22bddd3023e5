// The gate network of squeeze_excite on the CPU: two small fully connected layers and their gradients.
//   hidden = pooled w1^T + b1      logits = act(hidden) w2^T + b2      gate = gate_act(logits)
// Every output element is summed in an order that depends on the shape alone, not on the range of samples.
#include "squeeze_excite.h"

#include <algorithm>

#include "core/simd.h"

namespace fusedtrain::cpu {
namespace {

template <class F>
void visit_act(Activation act, F&& f) {
  using enum Activation;
  visit<kIdentity, kRelu, kSilu, kGelu, kHardSwish, kRelu6, kSigmoid, kHardSigmoid, kTanh, kHalfTanh>(
      act, static_cast<F&&>(f));
}

template <class F>
void visit_acc(DType dtype, F&& f) {
  dtype == DType::kFloat64 ? f.template operator()<double>() : f.template operator()<float>();
}

constexpr int64_t kStretch = 64;  // terms of a sum that are added before they join the others

// y = act(x), count elements.
template <class Lane>
void activate(Activation act, const Lane* x, Lane* y, int64_t count) {
  using V = Vec<Lane>;
  visit_act(act, [&]<Activation A>() {
    for_each_vector<V>(count,
                       [&](int64_t i, auto lanes) { store(y + i, Act<A>::value(load<V>(x + i, lanes)), lanes); });
  });
}

// dx = dy * act'(x), count elements.
template <class Lane>
void activate_backward(Activation act, const Lane* dy, const Lane* x, Lane* dx, int64_t count) {
  using V = Vec<Lane>;
  visit_act(act, [&]<Activation A>() {
    for_each_vector<V>(count, [&](int64_t i, auto lanes) {
      store(dx + i, Act<A>::through(load<V>(x + i, lanes), load<V>(dy + i, lanes)), lanes);
    });
  });
}

// out[m, j] = bias[j] + a[m, :] . b[j, :] for kRows x kCols outputs; a is [., k], b is [., k].
template <int kRows, int kCols, class Lane>
void dot_tile(const Lane* a, const Lane* b, const Lane* bias, int64_t k, Lane* out, int64_t stride) {
  using V = Vec<Lane>;
  V sum[kRows][kCols];
  for (auto& row : sum) std::fill_n(row, kCols, V(0));
  for_each_vector<V>(k, [&](int64_t i, auto lanes) {
    V right[kCols];
    for (int j = 0; j < kCols; ++j) right[j] = load<V>(b + j * k + i, lanes);
    for (int m = 0; m < kRows; ++m) {
      const V left = load<V>(a + m * k + i, lanes);
      for (int j = 0; j < kCols; ++j) sum[m][j] += left * right[j];
    }
  });
  for (int m = 0; m < kRows; ++m) {
    for (int j = 0; j < kCols; ++j) out[m * stride + j] = lane_sum(sum[m][j]) + (bias ? bias[j] : Lane(0));
  }
}

// out[m, j] = bias[j] + a[m, :] . b[j, :] for rows x cols outputs. A few rows of b stay in cache for all of a.
template <class Lane>
void matmul_transposed(const Lane* a, const Lane* b, const Lane* bias, int64_t rows, int64_t cols, int64_t k,
                       Lane* out) {
  constexpr int kWide = kVecBytes == 64 ? 4 : 3;  // columns: 4 x kWide sums and their factors fit the register file
  const auto strip = [&]<int kCols>(int64_t j) {
    const Lane *right = b + j * k, *offset = bias ? bias + j : nullptr;
    int64_t m = 0;
    for (; m + 4 <= rows; m += 4) dot_tile<4, kCols>(a + m * k, right, offset, k, out + m * cols + j, cols);
    for (; m < rows; ++m) dot_tile<1, kCols>(a + m * k, right, offset, k, out + m * cols + j, cols);
  };
  int64_t j = 0;
  for (; j + kWide <= cols; j += kWide) strip.template operator()<kWide>(j);
  for (; j < cols; ++j) strip.template operator()<1>(j);
}

// out[m, :] += sum_i a[m * row_step + i * k_step] b[i, :] for kRows rows and kCols vectors, or = where nothing is to be
// added to; b has rows of `pitch`. The sum over i is cut into stretches, so that long ones stay accurate.
template <int kRows, int kCols, class Lane, class Lanes>
void outer_tile(const Lane* a, int64_t row_step, int64_t k_step, const Lane* b, int64_t pitch, int64_t k, int64_t cols,
                bool adds, Lane* out, Lanes lanes) {
  using V = Vec<Lane>;
  int64_t i = 0;
  do {
    V sum[kRows][kCols];
    for (auto& row : sum) std::fill_n(row, kCols, V(0));
    const bool first = i == 0 && !adds;
    for (const int64_t end = std::min(k, i + kStretch); i < end; ++i) {
      V right[kCols];
      for (int j = 0; j < kCols; ++j) right[j] = load<V>(b + i * pitch + j * V::kLanes, lanes);
      for (int m = 0; m < kRows; ++m) {
        const V left(a[m * row_step + i * k_step]);
        for (int j = 0; j < kCols; ++j) sum[m][j] += left * right[j];
      }
    }
    for (int m = 0; m < kRows; ++m) {
      for (int j = 0; j < kCols; ++j) {
        Lane* p = out + m * cols + j * V::kLanes;
        store(p, first ? sum[m][j] : load<V>(p, lanes) + sum[m][j], lanes);
      }
    }
  } while (i < k);
}

// out[m, :] = sum_i a[m * row_step + i * k_step] b[i, :] for `rows` rows; b is [k, cols], out is [rows, cols]. Two
// vectors of b's columns at a time, which are copied where many rows take them: those of 2048 columns, one under the
// other, would take each other's place in the first cache.
template <class Lane>
void matmul(const Lane* a, int64_t row_step, int64_t k_step, const Lane* b, int64_t rows, int64_t cols, int64_t k,
            Lane* out) {
  using V = Vec<Lane>;
  constexpr int kTall = kVecBytes == 64 ? 8 : 6;              // rows such that kTall x 2 sums fit the register file
  constexpr int64_t kBlock = kStretch * 256 / kVecBytes / 2;  // 16 KiB of a panel
  alignas(kVecBytes) Lane copy[kBlock * 2 * V::kLanes];
  const bool copies = rows > 3 * kTall;
  const auto panel = [&]<int kCols>(int64_t j, auto lanes) {
    int64_t i = 0;
    do {
      const int64_t size = std::min(k - i, kBlock), pitch = copies ? kCols * V::kLanes : cols;
      for (int64_t row = 0; copies && row < size; ++row) {
        for (int v = 0; v < kCols; ++v) {
          store(copy + row * pitch + v * V::kLanes, load<V>(b + (i + row) * cols + j + v * V::kLanes, lanes));
        }
      }
      const Lane* right = copies ? copy : b + i * cols + j;
      const auto tile = [&]<int kRows>(int64_t m) {
        outer_tile<kRows, kCols>(a + m * row_step + i * k_step, row_step, k_step, right, pitch, size, cols, i > 0,
                                 out + m * cols + j, lanes);
      };
      int64_t m = 0;
      for (; m + kTall <= rows; m += kTall) tile.template operator()<kTall>(m);
      for (; m + 4 <= rows; m += 4) tile.template operator()<4>(m);
      for (; m < rows; ++m) tile.template operator()<1>(m);
      i += size;
    } while (i < k);
  };
  int64_t j = 0;
  for (; j + 2 * V::kLanes <= cols; j += 2 * V::kLanes) panel.template operator()<2>(j, AllLanes{});
  for (; j + V::kLanes <= cols; j += V::kLanes) panel.template operator()<1>(j, AllLanes{});
  if (j < cols) panel.template operator()<1>(j, FirstLanes{int(cols - j)});
}

}  // namespace

template <>
void squeeze_excite<Isa::FUSEDTRAIN_ISA>(const SqueezeExcite& a, int64_t begin, int64_t end) {
  visit_acc(a.dtype, [&]<class Lane>() {
    const int64_t count = end - begin, c0 = begin * a.c, r0 = begin * a.r;
    const auto in = [](const void* p) { return static_cast<const Lane*>(p); };
    Lane *hidden = static_cast<Lane*>(a.hidden) + r0, *activated = static_cast<Lane*>(a.activated) + r0,
         *logits = static_cast<Lane*>(a.logits) + c0;
    matmul_transposed(in(a.pooled) + c0, in(a.w1), in(a.b1), count, a.r, a.c, hidden);
    activate(a.act, hidden, activated, count * a.r);
    matmul_transposed(activated, in(a.w2), in(a.b2), count, a.c, a.r, logits);
    activate(a.gate_act, logits, static_cast<Lane*>(a.gate) + c0, count * a.c);
  });
}

template <>
void squeeze_excite_backward<Isa::FUSEDTRAIN_ISA>(const SqueezeExciteBackward& a, int64_t begin, int64_t end) {
  visit_acc(a.dtype, [&]<class Lane>() {
    const int64_t count = end - begin, c0 = begin * a.c, r0 = begin * a.r;
    const Lane* logits = static_cast<const Lane*>(a.logits) + c0;
    Lane *dlogits = static_cast<Lane*>(a.dlogits) + c0, *dhidden = static_cast<Lane*>(a.dhidden) + r0;
    activate(a.gate_act, logits, static_cast<Lane*>(a.gate) + c0, count * a.c);
    activate_backward(a.gate_act, static_cast<const Lane*>(a.dgate) + c0, logits, dlogits, count * a.c);
    activate(a.act, static_cast<const Lane*>(a.hidden) + r0, static_cast<Lane*>(a.activated) + r0, count * a.r);
    matmul(dlogits, a.c, int64_t(1), static_cast<const Lane*>(a.w2), count, a.r, a.c, dhidden);
    activate_backward(a.act, dhidden, static_cast<const Lane*>(a.hidden) + r0, dhidden, count * a.r);
    matmul(dhidden, a.r, int64_t(1), static_cast<const Lane*>(a.w1), count, a.c, a.r,
           static_cast<Lane*>(a.dpooled) + c0);
  });
}

template <>
void squeeze_excite_weight_backward<Isa::FUSEDTRAIN_ISA>(const SqueezeExciteBackward& a, int64_t begin, int64_t end) {
  visit_acc(a.dtype, [&]<class Lane>() {
    const auto column_sums = [&](const Lane* x, int64_t cols, int64_t first, int64_t last, Lane* out) {
      std::fill(out + first, out + last, Lane(0));
      for (int64_t n = 0; n < a.n; ++n) {
        for (int64_t j = first; j < last; ++j) out[j] += x[n * cols + j];
      }
    };
    const auto *dhidden = static_cast<const Lane*>(a.dhidden), *dlogits = static_cast<const Lane*>(a.dlogits);
    const int64_t r1 = std::min(end, a.r);  // rows [begin, r1) of dw1
    if (begin < r1) {
      matmul(dhidden + begin, int64_t(1), a.r, static_cast<const Lane*>(a.pooled), r1 - begin, a.c, a.n,
             static_cast<Lane*>(a.dw1) + begin * a.c);
      column_sums(dhidden, a.r, begin, r1, static_cast<Lane*>(a.db1));
    }
    const int64_t c0 = std::max(begin - a.r, int64_t(0)), c1 = end - a.r;  // rows [c0, c1) of dw2
    if (c0 < c1) {
      matmul(dlogits + c0, int64_t(1), a.c, static_cast<const Lane*>(a.activated), c1 - c0, a.r, a.n,
             static_cast<Lane*>(a.dw2) + c0 * a.r);
      column_sums(dlogits, a.c, c0, c1, static_cast<Lane*>(a.db2));
    }
  });
}

}  // namespace fusedtrain::cpu

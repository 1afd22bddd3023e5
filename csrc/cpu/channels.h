#pragma once
// Walking over images [n, c, hw] (contiguous) or [n, hw, c] (channels_last): sums per channel, and maps with one value
// per channel. Shared by channel_pool.cpp and channel_scale.cpp. Internal linkage, as in core/simd.h.
//
// Functors read element i of the large tensors and channel ch of the small ones:
//   V operator()(int64_t i, int64_t ch, auto lanes)     lanes run along ch for channels_last,
//   V operator()(int64_t i, int64_t ch, auto lanes)     along i for contiguous, where ch is one channel
#include <algorithm>

#include "core/simd.h"

namespace fusedtrain::cpu {
namespace {

template <class F>
void visit_in_act(Activation act, F&& f) {
  visit<Activation::kIdentity, Activation::kRelu, Activation::kSilu, Activation::kGelu, Activation::kHardSwish>(
      act, static_cast<F&&>(f));
}

// ---- sums over hw: groups of kGroup terms as a tree, the groups of a chunk in order, then the chunks in order ----

constexpr int kGroup = 8;

template <class V, class Term, class At>
inline V sum_group(const Term& term, int64_t first, int64_t c, int64_t ch, At lanes) {
  V t[kGroup];
  for (int k = 0; k < kGroup; ++k) t[k] = term(first + k * c + ch, ch, lanes);
  return ((t[0] + t[1]) + (t[2] + t[3])) + ((t[4] + t[5]) + (t[6] + t[7]));
}

// Few channels: the sums of all kVectors vectors of a row stay in registers. c <= kVectors * kLanes.
template <int kVectors, class V, class Term>
void sum_narrow_rows(const Term& term, int64_t offset, int64_t begin, int64_t end, int64_t c, typename V::Lane* out) {
  V sums[kVectors];
  std::fill_n(sums, kVectors, V(0));
  const FirstLanes last{int(c - (kVectors - 1) * V::kLanes)};
  const auto each = [&](auto add) {
    for (int v = 0; v + 1 < kVectors; ++v) add(v, AllLanes{});
    last.count == V::kLanes ? add(kVectors - 1, AllLanes{}) : add(kVectors - 1, last);
  };
  int64_t hw = begin;
  for (; hw + kGroup <= end; hw += kGroup) {
    each([&](int v, auto lanes) { sums[v] += sum_group<V>(term, offset + hw * c, c, v * V::kLanes, lanes); });
  }
  for (; hw < end; ++hw) {
    each([&](int v, auto lanes) { sums[v] += term(offset + hw * c + v * V::kLanes, v * V::kLanes, lanes); });
  }
  each([&](int v, auto lanes) { store(out + v * V::kLanes, sums[v], lanes); });
}

// Many channels: whole groups of rows are read in order, and the sums live in `out`.
template <class V, class Term>
void sum_wide_rows(const Term& term, int64_t offset, int64_t begin, int64_t end, int64_t c, typename V::Lane* out) {
  std::fill_n(out, c, typename V::Lane(0));
  int64_t hw = begin;
  for (; hw + kGroup <= end; hw += kGroup) {
    for_each_vector<V>(c, [&](int64_t ch, auto lanes) {
      store(out + ch, load<V>(out + ch, lanes) + sum_group<V>(term, offset + hw * c, c, ch, lanes), lanes);
    });
  }
  for (; hw < end; ++hw) {
    for_each_vector<V>(c, [&](int64_t ch, auto lanes) {
      store(out + ch, load<V>(out + ch, lanes) + term(offset + hw * c + ch, ch, lanes), lanes);
    });
  }
}

// out[ch] = sum of term(i, ch) over rows [begin, end) of the sample whose first element is `offset`; out has c
// elements.
template <class V, class Term>
void sum_rows(const Term& term, int64_t offset, int64_t begin, int64_t end, int64_t c, typename V::Lane* out) {
  const bool narrow = visit<1, 2, 3, 4>((c + V::kLanes - 1) / V::kLanes, [&]<int kVectors>() {
    sum_narrow_rows<kVectors, V>(term, offset, begin, end, c, out);
  });
  if (!narrow) sum_wide_rows<V>(term, offset, begin, end, c, out);
}

// The sum of term(i, ch) over the hw elements from `first`. Terms of absent lanes must be zero.
template <class V, class Term>
typename V::Lane sum_plane(const Term& term, int64_t first, int64_t ch, int64_t hw) {
  constexpr int64_t kBlock = 4 * V::kLanes;
  constexpr int64_t kStretch = 64 * kBlock;  // at most 64 terms are added to one lane before a tree takes over
  typename V::Lane total = 0;
  for (int64_t begin = 0; begin < hw; begin += kStretch) {
    const int64_t end = std::min(begin + kStretch, hw);
    V sums[4] = {V(0), V(0), V(0), V(0)};
    int64_t i = begin;
    for (; i + kBlock <= end; i += kBlock) {
      for (int k = 0; k < 4; ++k) sums[k] += term(first + i + k * V::kLanes, ch, AllLanes{});
    }
    for_each_vector<V>(end - i, [&](int64_t j, auto lanes) { sums[0] += term(first + i + j, ch, lanes); });
    total += lane_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
  return total;
}

// The (sample, channel) sums of term(i, ch) of items [begin, end): chunks of rows for channels_last, planes for
// contiguous. `out` is acc [n, reduce_chunks, stride], of which c elements are written.
template <class V, class Term>
void sum_items(const Images& m, int64_t chunks, int64_t stride, const Term& term, typename V::Lane* out, int64_t begin,
               int64_t end) {
  for (int64_t item = begin; item < end; ++item) {
    if (m.layout == Layout::kContiguous) {
      const int64_t n = item / m.c, ch = item % m.c;
      out[n * stride + ch] = sum_plane<V>(term, item * m.hw, ch, m.hw);
    } else {
      const int64_t n = item / chunks, first = item % chunks * kReduceChunk;
      sum_rows<V>(term, n * m.hw * m.c, first, std::min(first + kReduceChunk, m.hw), m.c, out + item * stride);
    }
  }
}

// total[ch] = sum over chunks of partial[chunk * stride + ch].
template <class V>
void sum_chunks(const typename V::Lane* partial, int64_t chunks, int64_t stride, int64_t c, typename V::Lane* total) {
  for_each_vector<V>(c, [&](int64_t ch, auto lanes) {
    V sum(0);
    for (int64_t k = 0; k < chunks; ++k) sum += load<V>(partial + k * stride + ch, lanes);
    store(total + ch, sum, lanes);
  });
}

}  // namespace
}  // namespace fusedtrain::cpu

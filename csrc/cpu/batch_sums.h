#pragma once
// What the statistics and the backward sums of batch_norm_act share: walking over the batch with several sums per
// channel, and adding up the parts in double precision, always in the same order. Internal linkage, as in core/simd.h.
#include "cpu/channels.h"

namespace fusedtrain::cpu {
namespace {

template <class F>
void visit_act(Activation act, F&& f) {
  visit<Activation::kIdentity, Activation::kRelu, Activation::kSilu, Activation::kGelu, Activation::kHardSwish,
        Activation::kSigmoid, Activation::kHardSigmoid, Activation::kTanh, Activation::kHalfTanh>(act,
                                                                                                  static_cast<F&&>(f));
}

// x with zeros in the lanes that a load left out.
template <class V>
inline V keep(V x, AllLanes) {
  return x;
}
template <class V>
inline V keep(V x, FirstLanes lanes) {
  for (int i = lanes.count; i < V::kLanes; ++i) x.v[i] = 0;
  return x;
}

// An optional image: its vector at i, or zero.
template <class V, class T>
inline V load_or_zero(const T* p, int64_t i, auto lanes) {
  return p ? load<V>(p + i, lanes) : V(0);
}

// Sums over rows [begin, end) of [rows, c] into out [kSums, c]. F::State is the sums of one vector of channels:
//   State s; s.start(f, i, rows, c, ch, lanes);   s.two(f, i, c, ch, lanes): the rows of elements i and i + c
//   s.one(f, i, ch, lanes): one row               s.load(out + ch, c, lanes), s.store(out + ch, c, lanes)
// Rows are read from end to end, in pairs, since the processor fetches ahead of few streams; the sums live in `out`.
template <class F>
void walk_rows(const F& f, int64_t begin, int64_t end, int64_t c, typename F::Lane* out) {
  using V = typename F::V;
  for_each_vector<V>(c, [&](int64_t ch, auto lanes) {
    typename F::State s;
    s.start(f, begin * c + ch, end - begin, c, ch, lanes);
    s.store(out + ch, c, lanes);
  });
  const auto add = [&](auto step) {
    for_each_vector<V>(c, [&](int64_t ch, auto lanes) {
      typename F::State s;
      s.load(out + ch, c, lanes);
      step(s, ch, lanes);
      s.store(out + ch, c, lanes);
    });
  };
  int64_t row = begin;
  for (; row + 2 <= end; row += 2) {
    add([&](auto& s, int64_t ch, auto lanes) { s.two(f, row * c + ch, c, ch, lanes); });
  }
  if (row < end) {
    add([&](auto& s, int64_t ch, auto lanes) { s.one(f, row * c + ch, ch, lanes); });
  }
}

// The sums of items [begin, end), chunks of rows or planes, into partial [items or n, kSums, c].
template <class F>
void walk_items(const Images& m, const F& f, typename F::Lane* partial, int64_t begin, int64_t end) {
  const int64_t chunks = reduce_chunks(m);
  for (int64_t item = begin; item < end; ++item) {
    if (m.layout == Layout::kContiguous) {
      const int64_t n = item / m.c, ch = item % m.c;
      f.plane(item * m.hw, ch, m.hw, partial + n * F::kSums * m.c + ch, m.c);
    } else {
      const int64_t n = item / chunks, first = n * m.hw + item % chunks * kReduceChunk;
      const int64_t last = std::min(first + kReduceChunk, (n + 1) * m.hw);
      walk_rows(f, first, last, m.c, partial + item * F::kSums * m.c);
    }
  }
}

// How many parts walk_items leaves, and how many positions part i holds.
inline int64_t parts(const Images& m) { return m.n * reduce_chunks(m); }
inline int64_t part_size(const Images& m, int64_t i) {
  if (m.layout == Layout::kContiguous) return m.hw;
  return std::min(kReduceChunk, m.hw - i % reduce_chunks(m) * kReduceChunk);
}

// Channels are finished in blocks of this many.
constexpr int kFinishBlock = 64;

}  // namespace
}  // namespace fusedtrain::cpu

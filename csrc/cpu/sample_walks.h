#pragma once
// Walks over a batch whose small tensors have a value per sample and channel: sums of several terms, and maps. Internal
// linkage, as in core/simd.h.
//
// A functor F takes, for one vector of channels or one repeated channel,
//   F::at(nc, ch, get): what it needs of the small tensors; nc indexes those of shape [n, c], get loads a vector
// and then element i of the images, of F::Element; f.prefetch(i) asks for what it reads there.
#include "cpu/batch_sums.h"

namespace fusedtrain::cpu {
namespace {

// Rows of channels are taken this many at a time, so that a vector of the small tensors is loaded once for all of them.
constexpr int64_t kRows = 4;

// f(row, rows) for groups of rows [begin, end); `rows` is a constant, kRows or 1, which it is of all that go alone.
template <class F>
void for_row_groups(int64_t begin, int64_t end, bool alone, F&& f) {
  int64_t row = begin;
  for (; !alone && row + kRows <= end; row += kRows) f(row, std::integral_constant<int64_t, kRows>{});
  for (; row < end; ++row) f(row, std::integral_constant<int64_t, 1>{});
}

template <class V>
auto vector_at(auto lanes) {
  return [lanes](const typename V::Lane* p) { return load<V>(p, lanes); };
}
template <class V>
auto repeated() {
  return [](const typename V::Lane* p) { return V(*p); };
}

// The sums of items [begin, end), chunks of rows or planes, into partial [n, reduce_chunks, kSums, c]. F adds the terms
// of a vector: f.add(sums, i, lanes, at).
template <class V, class F>
void sum_terms(const Images& m, const F& by_reference, typename V::Lane* partial, int64_t begin, int64_t end) {
  const F f = by_reference;  // as in walk_rows
  using Lane = typename V::Lane;
  constexpr int kSums = F::kSums;
  const auto add = [&](V* sums, int64_t i, auto lanes, const auto& at) {
    if constexpr (std::is_same_v<decltype(lanes), AllLanes>) return f.add(sums, i, lanes, at);
    V terms[kSums];
    std::fill_n(terms, kSums, V(0));
    f.add(terms, i, lanes, at);
    for (int k = 0; k < kSums; ++k) sums[k] += keep(terms[k], lanes);
  };
  const auto plane = [&](int64_t item, int64_t n, int64_t ch) {
    // At most this many terms are added to one lane before doubles take over, which for doubles are no better.
    constexpr int64_t kStretch = (sizeof(Lane) == 8 ? 8 : 64) * V::kLanes;
    const int64_t first = item * m.hw;
    const auto at = f.at(item, ch, repeated<V>());
    const bool ahead = asks_ahead;
    double total[kSums] = {};
    for (int64_t start = 0; start < m.hw; start += kStretch) {
      V sums[kSums];
      std::fill_n(sums, kSums, V(0));
      for_each_vector<V>(std::min(kStretch, m.hw - start), [&](int64_t j, auto lanes) {
        if (ahead) f.prefetch(first + start + j + kAhead<typename F::Element>);
        add(sums, first + start + j, lanes, at);
      });
      for (int k = 0; k < kSums; ++k) total[k] += double(lane_sum(sums[k]));
    }
    for (int k = 0; k < kSums; ++k) partial[(n * kSums + k) * m.c + ch] = Lane(total[k]);
  };
  const int64_t chunks = reduce_chunks(m);
  const bool alone = rows_collide<typename F::Element>(m);
  const auto chunk = [&](int64_t item, int64_t n, int64_t part) {
    const int64_t first = n * m.hw + part * kReduceChunk;
    auto* out = partial + item * kSums * m.c;
    std::fill_n(out, kSums * m.c, Lane(0));
    for_row_groups(first, std::min(first + kReduceChunk, (n + 1) * m.hw), alone, [&](int64_t row, auto rows) {
      for_each_vector<V>(m.c, [&](int64_t ch, auto lanes) {
        const auto at = f.at(n * m.c + ch, ch, vector_at<V>(lanes));
        V sums[kSums];
        std::fill_n(sums, kSums, V(0));
        fetch_rows<typename F::Element>((row + rows) * m.c, ch, rows, [&](int64_t next) { f.prefetch(next); });
        if constexpr (rows == kTogether && in_turn<F, decltype(lanes)>) {
          f.add(sums, row * m.c + ch, Apart<kTogether>{m.c}, at);
        } else {
          for (int64_t k = 0; k < rows; ++k) f.add(sums, (row + k) * m.c + ch, lanes, at);
        }
        for (int k = 0; k < kSums; ++k) {
          auto* p = out + k * m.c + ch;
          store(p, load<V>(p, lanes) + sums[k], lanes);
        }
      });
    });
  };
  const bool planes = m.layout == Layout::kContiguous;
  Split at(begin, planes ? m.c : chunks);
  for (int64_t item = begin; item < end; ++item, ++at) {
    planes ? plane(item, at.quotient, at.remainder) : chunk(item, at.quotient, at.remainder);
  }
}

// out = f(i, lanes, at) for items [begin, end), rows or planes.
template <bool kStream, class V, class T, class F>
void map_images(const Images& m, T* out, const F& by_reference, int64_t begin, int64_t end) {
  const F f = by_reference;  // as in walk_rows
  const bool ahead = !kStream && asks_ahead;
  const auto ask = [&](int64_t i) {
    if (ahead) f.prefetch(i + kAhead<T>), fetch_for_store(out + i + kAhead<T>);
  };
  const auto write = [&](int64_t i, auto lanes, const auto& at) {
    if constexpr (kStream) {
      stream(out + i, f(i, lanes, at));
    } else {
      store(out + i, f(i, lanes, at), lanes);
    }
  };
  if (m.layout == Layout::kContiguous) {
    Split plane(begin, m.c);
    for (int64_t item = begin; item < end; ++item, ++plane) {
      const auto at = f.at(item, plane.remainder, repeated<V>());
      const int64_t end_of_plane = (item + 1) * m.hw;
      int64_t i = item * m.hw;
      if constexpr (in_turn<F, AllLanes>) {
        constexpr Apart<kTogether> some{V::kLanes};
        for (; i + kTogether * V::kLanes <= end_of_plane; i += kTogether * V::kLanes) {
          for (int k = 0; k < kTogether; ++k) ask(i + k * V::kLanes);
          kStream ? stream(out + i, f(i, some, at), some) : store(out + i, f(i, some, at), some);
        }
      }
      for_each_vector<V, kStream>(end_of_plane - i, [&](int64_t j, auto lanes) {
        ask(i + j);
        write(i + j, lanes, at);
      });
    }
  } else {
    for (int64_t first = begin; first < end;) {
      const int64_t n = first / m.hw, last = std::min(end, (n + 1) * m.hw);
      for_row_groups(first, last, rows_collide<T>(m), [&](int64_t row, auto rows) {
        for_each_vector<V, kStream>(m.c, [&](int64_t ch, auto lanes) {
          const auto at = f.at(n * m.c + ch, ch, vector_at<V>(lanes));
          fetch_rows<T>((row + rows) * m.c, ch, rows, [&](int64_t next) {
            f.prefetch(next);
            if (!kStream) fetch(out + next);
          });
          if constexpr (rows == kRows && in_turn<F, decltype(lanes)>) {
            for (int64_t k = 0; k < rows; k += kTogether) {
              const int64_t i = (row + k) * m.c + ch;
              const Apart<kTogether> some{m.c};
              kStream ? stream(out + i, f(i, some, at), some) : store(out + i, f(i, some, at), some);
            }
          } else {
            for (int64_t k = 0; k < rows; ++k) write((row + k) * m.c + ch, lanes, at);
          }
        });
      });
      first = last;
    }
  }
  if constexpr (kStream) stream_fence();
}

template <class V, class T, class F>
void write_images(const Images& m, T* out, const F& f, int64_t begin, int64_t end) {
  const int64_t row = m.layout == Layout::kContiguous ? m.hw : m.c;
  const bool aligned = row % V::kLanes == 0 && reinterpret_cast<uintptr_t>(out) % (V::kLanes * sizeof(T)) == 0;
  visit_bool(stores_past_caches && aligned && m.n * m.c * m.hw * int64_t(sizeof(T)) >= kStreamBytes,
             [&]<bool kStream>() { map_images<kStream, V>(m, out, f, begin, end); });
}

template <class F>
void visit_acc(DType dtype, F&& f) {
  dtype == DType::kFloat64 ? f.template operator()<double>() : f.template operator()<float>();
}

}  // namespace
}  // namespace fusedtrain::cpu

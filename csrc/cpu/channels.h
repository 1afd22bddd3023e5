#pragma once
// Walking over images [n, c, hw] (contiguous) or [n, hw, c] (channels_last): sums per channel, and maps with one value
// per channel. Shared by channel_pool.cpp, channel_scale.cpp and batch_norm_act*.cpp. Internal linkage, as in
// core/simd.h.
//
// Functors read element i of the large tensors and channel ch of the small ones:
//   V operator()(int64_t i, int64_t ch, auto lanes)     lanes run along ch for channels_last,
//   V operator()(int64_t i, int64_t ch, auto lanes)     along i for contiguous, where ch is one channel
#include <algorithm>

#include "cpu/ahead.h"
#include "cpu/several.h"

namespace fusedtrain::cpu {
namespace {

// An activation of vectors that stand for elements of type T.
template <class T, Activation A>
struct StaticAct : Act<A, T> {
  static constexpr bool kIdentity = A == Activation::kIdentity;
  // Whether the slope is 0 or 1, so that gradients in T stay numbers of T.
  static constexpr bool kSelects = kIdentity || A == Activation::kRelu || A == Activation::kRelu6;
  // Whether gradients of several vectors in turn are faster than one after the other, where what is done beside is
  // short, and where it is long. With AVX-512 memory bounds those of float32 (benchmarks/LOG.md, 2026-11-23).
  static constexpr bool kInTurn = A == Activation::kSilu && (sizeof(T) == 2 || kVecBytes == 32);
  static constexpr bool kInTurnBesideMuch = kInTurn || (A == Activation::kHardSwish && sizeof(T) == 2);
};
// Whether several vectors of SiLU leave no register for anything else.
template <class Lanes>
constexpr bool kFillsRegisters = false;
template <int N>
constexpr bool kFillsRegisters<Apart<N>> = kVecBytes == 32;
// 1 / (1 + e^-z()), for elements of type T. Where it fills the registers, z(), and what it reads, is taken again behind
// it: that is faster than what g++ would do to keep it.
template <class T, class Lanes, class Z>
[[gnu::always_inline]] inline auto logistic(Lanes, const Z& z) {
  using W = decltype(z());
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (kFillsRegisters<Lanes>) {
    const W divisor = half_one_plus_exp_minus<T>(z());
    asm volatile("" ::: "memory");  // forgets what z() read
    return W(0.5f) / divisor;
  }
#endif
  return times_logistic<T>(W(1), z());
}

// One of the first kCount, that is known at run time only, and called for every vector: where it does not matter. What
// a kernel does not call, or its images cannot have in front, is not compiled for it.
constexpr int kInputActs = int(Activation::kRelu6) + 1, kActs = int(Activation::kHalfTanh) + 1;
template <class T, int kCount>
class RunTimeAct {
 public:
  using V = Vec<Acc<T>>;
  static constexpr bool kIdentity = false, kSelects = false, kInTurn = false, kInTurnBesideMuch = false;

  explicit RunTimeAct(Activation act) : act_(int(act)) {}
  V value(V x) const {
    return [&]<int... As>(std::integer_sequence<int, As...>) {
      static constexpr V (*kValues[])(V) = {Act<Activation(As), T>::value...};
      return kValues[act_](x);
    }(std::make_integer_sequence<int, kCount>());
  }
  V slope(V x) const {
    return [&]<int... As>(std::integer_sequence<int, As...>) {
      static constexpr V (*kSlopes[])(V) = {Act<Activation(As), T>::slope...};
      return kSlopes[act_](x);
    }(std::make_integer_sequence<int, kCount>());
  }
  V through(V x, V dy) const {
    return [&]<int... As>(std::integer_sequence<int, As...>) {
      static constexpr V (*kThrough[])(V, V) = {Act<Activation(As), T>::through...};
      return kThrough[act_](x, dy);
    }(std::make_integer_sequence<int, kCount>());
  }

 private:
  int act_;
};

// f(act). What networks usually have behind a convolution has code of its own, but for float64.
template <class T, int kCount = kInputActs, class F>
void visit_act(Activation act, F&& f) {
  using enum Activation;
  if (act == kIdentity) return f(StaticAct<T, kIdentity>{});
  if constexpr (!kRareVariant && !std::is_same_v<T, double>) {
    if (visit<kRelu, kSilu, kHardSwish, kRelu6>(act, [&]<Activation A>() { f(StaticAct<T, A>{}); })) return;
  }
  f(RunTimeAct<T, kCount>(act));
}

// item / size and item % size of one item after the other. Some processors take as long over a division as over a row.
struct Split {
  int64_t quotient, remainder, size;

  Split(int64_t item, int64_t divisor) : size(std::max<int64_t>(divisor, 1)) {
    quotient = item / size;
    remainder = item % size;
  }
  void operator++() {
    if (++remainder == size) remainder = 0, ++quotient;
  }
};

// ---- sums over hw: of groups of terms, then of the groups of a chunk, then of the chunks ----

// f(first, last) for groups of rows [begin, end).
template <class F>
void for_sum_groups(int64_t begin, int64_t end, F&& f) {
  constexpr int64_t kSumRows = 16;
  for (; begin < end; begin += kSumRows) f(begin, std::min(begin + kSumRows, end));
}

// out[ch] = sum of term(i, ch) over rows [begin, end) of the sample whose first element is `offset`; out has c
// elements of the type of sums, `images` are what the terms read. Short rows are read from end to end, and their sums
// wait in L1, or in registers those of few vectors; long rows are read in strips of a few vectors from all rows of a
// group, unless several images are read at once. Each is up to twice as fast as the others where its memory is not in
// the caches (benchmarks/LOG.md, 2026-11-25). With AVX2 rows are read four at a time, but for two images in
// float32, with the next four asked for in the order of memory, and the registers hold more vectors (2026-11-27).
template <class V, class Term, class T, class... Others>
void sum_rows(const Term& term, int64_t offset, int64_t begin, int64_t end, int64_t c, typename V::Lane* out,
              const T* image, const Others*... others) {
  std::fill_n(out, c, typename V::Lane(0));
  // Of strips, in the rows that follow.
  const int64_t ahead = asks_ahead ? std::max(kAhead<T> / 2, 4 * c) : 0;
  const auto strip = [&]<int kVectors>(int64_t first, int64_t last, int64_t ch, auto lanes)
      __attribute__((always_inline)) {
    V sums[kVectors];
    std::fill_n(sums, kVectors, V(0));
    for (int64_t i = offset + first * c + ch; i < offset + last * c + ch; i += c) {
      for (int v = 0; v < kVectors; ++v) {
        if (ahead > 0) fetch(image + i + v * V::kLanes + ahead), (fetch(others + i + v * V::kLanes + ahead), ...);
        sums[v] += term(i + v * V::kLanes, ch + v * V::kLanes, lanes);
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      auto* sum = out + ch + v * V::kLanes;
      store(sum, load<V>(sum, lanes) + sums[v], lanes);
    }
  };
  const auto whole_rows = [&]<int kVectors>() {
    for_sum_groups(begin, end, [&](int64_t first, int64_t last) {
      strip.template operator()<kVectors>(first, last, 0, AllLanes{});
    });
  };
  if (c % V::kLanes == 0) {
    if (visit<1, 2>(c / V::kLanes, whole_rows)) return;
    if constexpr (kVecBytes == 32) {
      if (visit<3, 4, 5, 6, 8, 12>(c / V::kLanes, whole_rows)) return;
    }
  }
  constexpr int64_t kShort = 2304 / int64_t(sizeof(T)), kStrip = 4 * V::kLanes, kMost = 2048;
  if (c < kShort || sizeof...(Others) > 0) {
    constexpr int kAtOnce = kVecBytes == 32 && (sizeof...(Others) == 0 || sizeof(T) == 2) ? 4 : 1;
    alignas(kVecBytes) typename V::Lane sums[kMost];
    const int64_t parts = std::max<int64_t>((c + kMost - 1) / kMost, 1), some = (c + parts - 1) / parts;
    const int64_t width = (some + V::kLanes - 1) / V::kLanes * V::kLanes;
    const auto add = [&]<int kRows>(int64_t row, int64_t at, int64_t count) {
      const int64_t i = offset + row * c + at, next = offset + (row + kRows) * c + at * kRows;
      for_each_vector<V>(count, [&](int64_t ch, auto lanes) {
        for (int64_t k = 0; kRows > 1 && k < kRows * V::kLanes; k += 64 / int64_t(sizeof(T))) {
          __builtin_prefetch(image + next + ch * kRows + k);
          (__builtin_prefetch(others + next + ch * kRows + k), ...);
        }
        if (kRows == 1 && ahead > 0) fetch(image + i + ch + kAhead<T>), (fetch(others + i + ch + kAhead<T>), ...);
        V sum = term(i + ch, at + ch, lanes);
        for (int k = 1; k < kRows; ++k) sum += term(i + k * c + ch, at + ch, lanes);
        store(sums + ch, load<V>(sums + ch) + sum);
      });
    };
    return for_sum_groups(begin, end, [&](int64_t first, int64_t last) {
      for (int64_t at = 0; at < c; at += width) {
        const int64_t count = std::min(width, c - at);
        for (int64_t ch = 0; ch < count; ch += V::kLanes) store(sums + ch, V(0));
        int64_t row = first;
        for (; row + kAtOnce <= last; row += kAtOnce) add.template operator()<kAtOnce>(row, at, count);
        for (; kAtOnce > 1 && row < last; ++row) add.template operator()<1>(row, at, count);
        for_each_vector<V>(count, [&](int64_t ch, auto lanes) {
          store(out + at + ch, load<V>(out + at + ch, lanes) + load<V>(sums + ch), lanes);
        });
      }
    });
  }
  for_sum_groups(begin, end, [&](int64_t first, int64_t last) {
    int64_t ch = 0;
    for (; ch + kStrip <= c; ch += kStrip) strip.template operator()<4>(first, last, ch, AllLanes{});
    for_each_vector<V>(c - ch,
                       [&](int64_t k, auto lanes) { strip.template operator()<1>(first, last, ch + k, lanes); });
  });
}

// The sum of part(k) for k in [begin, end), as a tree of few at a time: errors do not grow with the size of images.
template <class V, class Part>
V sum_tree(int64_t begin, int64_t end, const Part& part) {
  constexpr int64_t kFew = 16;
  if (end - begin > kFew) {
    const int64_t middle = begin + (end - begin) / 2;
    return sum_tree<V>(begin, middle, part) + sum_tree<V>(middle, end, part);
  }
  V sum(0);
  for (int64_t k = begin; k < end; ++k) sum += part(k);
  return sum;
}

// The sum of term(i, ch) over the hw elements from `first`, which read `images`. Terms of absent lanes must be zero.
template <class V, class Term, class... T>
typename V::Lane sum_plane(const Term& term, int64_t first, int64_t ch, int64_t hw, const T*... images) {
  constexpr int64_t kBlock = 2 * V::kLanes;
  constexpr int64_t kStretch = 64 * kBlock;  // at most 64 terms are added to one lane before a tree takes over
  // By value: what is read through a reference in every turn halves the speed of long planes on Zen 4.
  const auto stretch = [ =, ahead = asks_ahead ](int64_t begin, int64_t end) __attribute__((always_inline)) {
    const int64_t whole = end - (end - begin) % V::kLanes;
    V even(0), odd(0);
    if (whole < end) even = term(first + whole, ch, FirstLanes{int(end - whole)});
    int64_t i = first + begin;
    for (; i + kBlock <= first + whole; i += kBlock) {
      if (ahead) (fetch(images + i + kAhead<T>), ...), (fetch(images + i + V::kLanes + kAhead<T>), ...);
      even += term(i, ch, AllLanes{});
      odd += term(i + V::kLanes, ch, AllLanes{});
    }
    if (i < first + whole) odd += term(i, ch, AllLanes{});
    return lane_sum(even + odd);
  };
  if (hw <= kStretch) return stretch(0, hw);
  return sum_tree<typename V::Lane>(0, (hw + kStretch - 1) / kStretch,
                                    [&](int64_t k) { return stretch(k * kStretch, std::min((k + 1) * kStretch, hw)); });
}

// The (sample, channel) sums of term(i, ch) of items [begin, end): chunks of rows for channels_last, planes for
// contiguous. `out` is acc [n, reduce_chunks, stride], of which c elements are written; `images` are what terms read.
template <class V, class Term, class... T>
void sum_items(const Images& m, int64_t chunks, int64_t stride, const Term& term, typename V::Lane* out, int64_t begin,
               int64_t end, const T*... images) {
  const bool planes = m.layout == Layout::kContiguous;
  Split at(begin, planes ? m.c : chunks);
  for (int64_t item = begin; item < end; ++item, ++at) {
    const int64_t n = at.quotient;
    if (planes) {
      out[n * stride + at.remainder] = sum_plane<V>(term, item * m.hw, at.remainder, m.hw, images...);
    } else {
      const int64_t first = at.remainder * kReduceChunk;
      sum_rows<V>(term, n * m.hw * m.c, first, std::min(first + kReduceChunk, m.hw), m.c, out + item * stride,
                  images...);
    }
  }
}

// total[ch] = sum over chunks of partial[chunk * stride + ch].
template <class V>
void sum_chunks(const typename V::Lane* partial, int64_t chunks, int64_t stride, int64_t c, typename V::Lane* total) {
  for_each_vector<V>(c, [&](int64_t ch, auto lanes) {
    const auto part = [&](int64_t k) { return load<V>(partial + k * stride + ch, lanes); };
    store(total + ch, sum_tree<V>(0, chunks, part), lanes);
  });
}

// ---- maps ----

// Results of at least this many bytes leave the caches before anyone can read them.
constexpr int64_t kStreamBytes = 16 << 20;

// out = f(i, lanes, values...) for items [begin, end): rows of c for channels_last, planes of hw for contiguous. F is
// an Over<...>.
// Each of `vectors` is acc [samples, c] or null, where `samples` is n, or 1 for values that all images share. It
// reaches f as a vector: its c values along a row, or one value repeated.
template <bool kStream, class V, class T, class F, class... Lanes>
void map_range(const Images& m, int64_t samples, T* out, const F& f, int64_t begin, int64_t end,
               const Lanes*... vectors) {
  const bool ahead = !kStream && asks_ahead;
  const auto write = [ f, out, ahead ](int64_t i, auto lanes, auto... values) __attribute__((always_inline)) {
    if (ahead) f.prefetch(i + kAhead<T>), fetch_for_store(out + i + kAhead<T>);
    if constexpr (kStream) {
      stream(out + i, f(i, lanes, values...));
    } else {
      store(out + i, f(i, lanes, values...), lanes);
    }
  };
  const bool planes = m.layout == Layout::kContiguous;
  Split at(begin, planes ? m.c : m.hw);
  for (int64_t item = begin; item < end; ++item, ++at) {
    if (planes) {
      const int64_t first = item * m.hw, plane = samples == m.n ? item : at.remainder;
      const auto repeated = [&](const auto* vector) { return vector ? V(vector[plane]) : V(0); };
      [&](auto... values) {
        for_each_vector<V, kStream>(m.hw, [&](int64_t i, auto lanes) { write(first + i, lanes, values...); });
      }(repeated(vectors)...);
    } else {
      const int64_t first = item * m.c, n_c = samples == m.n ? at.quotient * m.c : 0;
      for_each_vector<V, kStream>(m.c, [&](int64_t ch, auto lanes) {
        const auto of = [&](const auto* vector) { return vector ? load<V>(vector + n_c + ch, lanes) : V(0); };
        write(first + ch, lanes, of(vectors)...);
      });
    }
  }
  if constexpr (kStream) stream_fence();
}

// map_range with the kind of store that suits the result. Streaming needs rows of whole vectors on aligned addresses.
template <class V, class T, class F, class... Lanes>
void map_items(const Images& m, int64_t samples, T* out, const F& f, int64_t begin, int64_t end,
               const Lanes*... vectors) {
  const int64_t row = m.layout == Layout::kContiguous ? m.hw : m.c;
  const bool aligned = row % V::kLanes == 0 && reinterpret_cast<uintptr_t>(out) % (V::kLanes * sizeof(T)) == 0;
  visit_bool(stores_past_caches && aligned && m.n * m.c * m.hw * int64_t(sizeof(T)) >= kStreamBytes,
             [&]<bool kStream>() { map_range<kStream, V>(m, samples, out, f, begin, end, vectors...); });
}

}  // namespace
}  // namespace fusedtrain::cpu

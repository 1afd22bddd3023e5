// channel_pool on the CPU.
//   pooled = mean_hw a(x)                              (kAvg)
//   pooled = 0.5 mean_hw a(x) + 0.5 max_hw a(x)        (kAvgMax), with the max and the number of its ties kept
#include "channel_pool.h"

#include <limits>

#include "cpu/channels.h"

namespace fusedtrain::cpu {
namespace {

// The partial results of a chunk are three vectors of c: sum, max, ties.
enum Partial { kSum, kMax, kTies, kPartials };

// A running maximum and how often it occurs, for V a vector or a scalar. NaN wins and stays, as in torch.amax.
template <class V, class Lane>
struct Peak {
  V max = V(-std::numeric_limits<Lane>::infinity());
  V ties = V(0);

  void add(V x, V count) {
    const auto higher = x > max;
    ties = vselect(higher, count, ties + vselect(x == max, count, V(0)));
    max = vselect(x != x, x, vselect(higher, x, max));
  }

  // A NaN equals nothing, so it has no ties.
  V counted_ties() const { return vselect(max == max, ties, V(0)); }
};

// Lanes that a load left out, set to a value that a maximum ignores.
template <class V>
V absent_as(V x, AllLanes, V) {
  return x;
}
template <class V>
V absent_as(V x, FirstLanes lanes, V absent) {
  for (int i = lanes.count; i < V::kLanes; ++i) x.v[i] = absent.v[i];
  return x;
}

template <class V, class Term>
void peak_rows(const Term& term, int64_t offset, int64_t begin, int64_t end, int64_t c, typename V::Lane* max,
               typename V::Lane* ties) {
  for_each_vector<V>(c, [&](int64_t ch, auto lanes) {
    Peak<V, typename V::Lane> peak;
    for (int64_t hw = begin; hw < end; ++hw) peak.add(term(offset + hw * c + ch, ch, lanes), V(1));
    store(max + ch, peak.max, lanes);
    store(ties + ch, peak.ties, lanes);
  });
}

template <class V, class Term>
void peak_plane(const Term& term, int64_t first, int64_t ch, int64_t hw, typename V::Lane* max,
                typename V::Lane* ties) {
  using Lane = typename V::Lane;
  Peak<V, Lane> peak;
  for_each_vector<V>(hw, [&](int64_t i, auto lanes) {
    const V count = absent_as(V(1), lanes, V(0));
    peak.add(absent_as(term(first + i, ch, lanes), lanes, V(-std::numeric_limits<Lane>::infinity())), count);
  });
  Peak<Lane, Lane> total;
  for (int k = 0; k < V::kLanes; ++k) total.add(peak.max.v[k], peak.ties.v[k]);
  *max = total.max;
  *ties = total.ties;
}

template <class V, class Term>
void peak_items(const Images& m, int64_t chunks, const Term& term, typename V::Lane* partial, int64_t begin,
                int64_t end) {
  const bool planes = m.layout == Layout::kContiguous;
  Split at(begin, planes ? m.c : chunks);
  for (int64_t item = begin; item < end; ++item, ++at) {
    const int64_t n = at.quotient;
    if (planes) {
      const int64_t ch = at.remainder;
      auto* out = partial + n * kPartials * m.c + ch;
      peak_plane<V>(term, item * m.hw, ch, m.hw, out + kMax * m.c, out + kTies * m.c);
    } else {
      const int64_t first = at.remainder * kReduceChunk;
      auto* out = partial + item * kPartials * m.c;
      peak_rows<V>(term, n * m.hw * m.c, first, std::min(first + kReduceChunk, m.hw), m.c, out + kMax * m.c,
                   out + kTies * m.c);
    }
  }
}

// pooled = 0.5 * pooled + 0.5 * max over the chunks of one sample.
template <class V>
void finish_peak(const typename V::Lane* partial, int64_t chunks, int64_t c, typename V::Lane* pooled,
                 typename V::Lane* peak, typename V::Lane* ties) {
  for_each_vector<V>(c, [&](int64_t ch, auto lanes) {
    Peak<V, typename V::Lane> total;
    for (int64_t k = 0; k < chunks; ++k) {
      const auto* chunk = partial + k * kPartials * c + ch;
      total.add(load<V>(chunk + kMax * c, lanes), load<V>(chunk + kTies * c, lanes));
    }
    store(pooled + ch, V(0.5) * (load<V>(pooled + ch, lanes) + total.max), lanes);
    store(peak + ch, total.max, lanes);
    store(ties + ch, total.counted_ties(), lanes);
  });
}

}  // namespace

template <>
void channel_pool_partial<Isa::FUSEDTRAIN_ISA>(const ChannelPool& a, int64_t begin, int64_t end) {
  const int64_t chunks = reduce_chunks(a.images);
  visit_dtype(a.images.dtype, [&]<class T>() {
    using V = Vec<Acc<T>>;
    auto* partial = static_cast<Acc<T>*>(a.partial);
    const T* x = static_cast<const T*>(a.x);
    const auto term_of = [x](auto act) {
      return [x, act](int64_t i, int64_t, auto lanes) { return act.value(load<V>(x + i, lanes)); };
    };
    visit_act<T>(a.images.in_act, [&](auto act) {
      sum_items<V>(a.images, chunks, kPartials * a.images.c, term_of(act), partial, begin, end, x);
    });
    if (a.pool == Pool::kAvgMax) {
      peak_items<V>(a.images, chunks, term_of(RunTimeAct<T, kInputActs>(a.images.in_act)), partial, begin, end);
    }
  });
}

template <>
void channel_pool_finish<Isa::FUSEDTRAIN_ISA>(const ChannelPool& a, int64_t begin, int64_t end) {
  const int64_t c = a.images.c, chunks = reduce_chunks(a.images);
  const auto finish = [&]<class Lane>() {
    using V = Vec<Lane>;
    for (int64_t n = begin; n < end; ++n) {
      const Lane* partial = static_cast<const Lane*>(a.partial) + n * chunks * kPartials * c;
      Lane* pooled = static_cast<Lane*>(a.pooled) + n * c;
      sum_chunks<V>(partial, chunks, kPartials * c, c, pooled);
      const V area(Lane(a.images.hw));
      for_each_vector<V>(
          c, [&](int64_t ch, auto lanes) { store(pooled + ch, load<V>(pooled + ch, lanes) / area, lanes); });
      if (a.pool == Pool::kAvgMax) {
        finish_peak<V>(partial, chunks, c, pooled, static_cast<Lane*>(a.peak) + n * c,
                       static_cast<Lane*>(a.ties) + n * c);
      }
    }
  };
  a.images.dtype == DType::kFloat64 ? finish.template operator()<double>() : finish.template operator()<float>();
}

}  // namespace fusedtrain::cpu

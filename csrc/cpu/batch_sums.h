#pragma once
// How batch_norm_act walks over a batch: sums per channel, added up in double precision always in the same order, and
// maps. Internal linkage, as in core/simd.h.
//
// A functor holds its images; f.params(at) gathers what a channel brings, where at(p) is the vector of p[c], repeated
// for contiguous images. Rows that the registers hold are taken one after another, others a few at a time, with the
// next ones fetched ahead: the processor by itself follows few streams, and not across pages.
#include "batch_norm_act.h"
#include "cpu/channels.h"

namespace fusedtrain::cpu {
namespace {

// Whether functor F has vectors computed in turn, of several rows: F::kInTurn, where the vector is a whole one.
template <class F, class Lanes>
constexpr bool in_turn = false;
template <class F>
  requires F::kInTurn
constexpr bool in_turn<F, AllLanes> = true;

// While vector ch of a group of rows is worked on, asks for some of the next group, whose first element is `next`: line
// after line in the order of memory, which the processor follows further by itself. f(element) asks for a line.
template <class T, class F>
[[gnu::always_inline]] inline void fetch_rows(int64_t next, int64_t ch, int64_t rows, const F& f) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t k = 0; k < rows && ch % kLine == 0; ++k) f(next + ch * rows + k * kLine);
}

// Whether sums take every row by itself, from end to end: where two or three tensors like these images outgrow the last
// cache.
template <class T>
inline bool row_by_row(const Images& m) {
  return sums_row_by_row && m.n * m.c * m.hw * int64_t(sizeof(T)) >= 8 << 20;
}

// Whether rows of images in T are taken one by one because several share a few sets of the first cache, where the lines
// of one take the place of another's before their second half is read. While other caches hold the images that costs
// less than the loads that rows share (benchmarks/LOG.md, 2026-11-30).
template <class T>
bool rows_collide(const Images& m) {
  constexpr bool kHalfLines = kVecBytes == 32;
  return kHalfLines && m.c * int64_t(sizeof(T)) % 2048 == 0 && m.n * m.c * m.hw * int64_t(sizeof(T)) >= kStreamBytes;
}

// z = weight (x - mean) rstd + bias + before, of one vector. In double precision it takes two multiplications, as
// the rounding of weight rstd is the same for all elements of a channel and adds up.
template <class T>
struct PreActivation {
  using Lane = Acc<T>;
  using V = Vec<Lane>;
  const T *x, *before;
  const Lane *mean, *rstd, *weight, *bias;

  explicit PreActivation(const BatchNormInputs& in)
      : x(static_cast<const T*>(in.x)),
        before(static_cast<const T*>(in.before)),
        mean(static_cast<const Lane*>(in.mean)),
        rstd(static_cast<const Lane*>(in.rstd)),
        weight(static_cast<const Lane*>(in.weight)),
        bias(static_cast<const Lane*>(in.bias)) {}

  struct Params {
    V mean, rstd, weight, scale, bias;
  };
  Params params(auto at) const {
    const V r = at(rstd), w = at(weight);
    return {at(mean), r, w, r * w, at(bias)};
  }
  auto centred(int64_t i, const Params& p, auto lanes) const { return load<V>(x + i, lanes) - p.mean; }
  template <class W>
  [[gnu::always_inline]] W operator()(int64_t i, W centred, const Params& p, auto lanes) const {
    W z = std::is_same_v<T, double> ? centred * p.rstd * p.weight + p.bias : centred * p.scale + p.bias;
    if (before != nullptr) z += load<V>(before + i, lanes);
    return z;
  }
};

// How many rows of c elements lie between those that a map takes together: each is followed by others of its own page,
// where the processor fetches ahead of it, and few of them share sets of the first cache.
template <class T>
int64_t rows_apart(int64_t c) {
  constexpr int64_t kPage = 4096, kGap = 512;
  const int64_t row = c * int64_t(sizeof(T)), least = (kPage - 1) / row + 1;
  for (int64_t rows = least; rows <= 2 * least; ++rows) {
    const int64_t within = rows * row % kPage;
    if (within >= kGap && within <= kPage - kGap) return rows;
  }
  return least;
}

constexpr int kGroup = 8;

// Sums over rows [begin, end) of [rows, c] into out [kSums, c], of channels [from, to), which begin and end with parts
// (channel_parts) and on which no sum depends. F::State is the sums of one vector of channels:
//   State s; s.start(f, i, rows, c, lanes)                  before the first row, element i
//   s.add(f, i, params, lanes)                              one element of one row
//   s.load(out + ch, c, lanes), s.store(out + ch, c, lanes)
// F::kStreams is how many large tensors it reads. The sums live in `out` between groups of rows, or between rows. Rows
// that the registers hold as a whole are read from end to end and summed at the speed of the memory; kRegisterColumns
// in bindings/batch_norm_act.cpp makes such rows.
template <class F>
void walk_rows(const F& by_reference, int64_t begin, int64_t end, int64_t c, int64_t from, int64_t to, bool in_groups,
               typename F::Lane* out) {
  using V = typename F::V;
  const F f = by_reference;  // its pointers stay in registers, whatever is written through `out` and by f
  for_each_vector<V>(to - from, [&](int64_t k, auto lanes) {
    const int64_t ch = from + k;
    typename F::State s;
    s.start(f, begin * c + ch, end - begin, c, lanes);
    s.store(out + ch, c, lanes);
  });
  // kVectors vectors of rows [first, last), in registers.
  const auto add_strip = [&]<int kVectors>(int64_t first, int64_t last, int64_t ch, auto lanes) {
    typename F::Params params[kVectors];
    typename F::State s, group[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      params[v] = f.params([&](const auto* p) { return load<V>(p + ch + v * V::kLanes, lanes); });
      s.load(out + ch + v * V::kLanes, c, lanes);
      group[v].clear(s);
    }
    for (int64_t i = first * c + ch; i < last * c + ch; i += c) {
      for (int v = 0; v < kVectors; ++v) group[v].add(f, i + v * V::kLanes, params[v], lanes);
    }
    for (int v = 0; v < kVectors; ++v) {
      s.load(out + ch + v * V::kLanes, c, lanes);
      s.merge(group[v]);
      s.store(out + ch + v * V::kLanes, c, lanes);
    }
  };
  if (kVecBytes == 64 && c % V::kLanes == 0) {
    const bool whole = visit<6, 8>(c / V::kLanes, [&]<int kVectors>() {
      for_sum_groups(begin, end, [&](int64_t first, int64_t last) {
        add_strip.template operator()<kVectors>(first, last, 0, AllLanes{});
      });
    });
    if (whole) return;
  }
  constexpr int64_t kLong = 2048 / sizeof(typename F::Element);
  if (F::kStreams == 1 && c >= kLong) {  // strips of two vectors from all rows of a group
    return for_sum_groups(begin, end, [&](int64_t first, int64_t last) {
      int64_t ch = from;
      for (; ch + 2 * V::kLanes <= to; ch += 2 * V::kLanes) {
        add_strip.template operator()<2>(first, last, ch, AllLanes{});
      }
      for_each_vector<V>(to - ch,
                         [&](int64_t k, auto lanes) { add_strip.template operator()<1>(first, last, ch + k, lanes); });
    });
  }
  const auto add = [&]<int kRows>(int64_t row) {
    for_each_vector<V>(to - from, [&](int64_t k, auto lanes) {
      const int64_t ch = from + k;
      const auto params = f.params([&](const auto* p) { return load<V>(p + ch, lanes); });
      const int64_t i = row * c + ch;
      typename F::State s, group;
      s.load(out + ch, c, lanes);
      group.clear(s);
      if (kRows > 1 && to - from == c) {
        fetch_rows<typename F::Element>((row + kRows) * c, ch, kRows, [&](int64_t next) { f.prefetch(next); });
      }
      if constexpr (kRows == kTogether && in_turn<F, decltype(lanes)>) {
        group.add(f, i, params, Apart<kTogether>{c});
      } else {
        for (int k = 0; k < kRows; ++k) group.add(f, i + k * c, params, lanes);
      }
      s.merge(group);
      s.store(out + ch, c, lanes);
    });
  };
  constexpr int kMany = F::kStreams == 1 ? kGroup : kGroup / 2;
  int64_t row = begin;
  for (; in_groups && row + kMany <= end; row += kMany) add.template operator()<kMany>(row);
  for (; row < end; ++row) add.template operator()<1>(row);
}

// The sums of items [begin, end), parts of chunks of rows or planes, into partial [chunks or n, kSums, c].
template <class F>
void walk_items(const Images& m, const F& f, typename F::Lane* partial, int64_t begin, int64_t end) {
  if (m.layout == Layout::kContiguous) {
    Split at(begin, m.c);
    for (int64_t item = begin; item < end; ++item, ++at) {
      f.plane(item * m.hw, at.remainder, m.hw, partial + at.quotient * F::kSums * m.c + at.remainder, m.c);
    }
    return;
  }
  const bool in_groups = F::kStreams == 1 || (!rows_collide<typename F::Element>(m) &&
                                              (in_turn<F, AllLanes> || !row_by_row<typename F::Element>(m)));
  const int64_t chunks = reduce_chunks(m), parts = channel_parts(m);
  for_wholes(begin, end, parts, [&](int64_t chunk, int64_t part, int64_t stop) {
    const int64_t first = chunk / chunks * m.hw + chunk % chunks * kReduceChunk;
    const int64_t last = std::min(first + kReduceChunk, (chunk / chunks + 1) * m.hw);
    walk_rows(f, first, last, m.c, part * kPartChannels, stop == parts ? m.c : stop * kPartChannels, in_groups,
              partial + chunk * F::kSums * m.c);
  });
}

// f(offset, part, size) for the parts that walk_items leaves of a channel, size positions each. A row of `fold * c`
// columns holds `fold` positions of c channels, and a part of it for each: the channel's sums stand at
// partial[offset + channel], further sums m.c behind each other.
template <class F>
inline void for_each_part(const Images& m, int64_t fold, int64_t sums, F&& f) {
  const int64_t chunks = reduce_chunks(m);
  for (int64_t i = 0; i < m.n * chunks; ++i) {
    const int64_t size =
        m.layout == Layout::kContiguous ? m.hw : std::min(kReduceChunk, m.hw - i % chunks * kReduceChunk);
    for (int64_t k = 0; k < fold; ++k) f(i * sums * m.c + k * (m.c / fold), size);
  }
}

// Channels are finished in blocks of this many.
constexpr int kFinishBlock = 64;

// out = f(i, params, lanes) for items [begin, end): rows of c for channels_last, planes of hw for contiguous.
template <bool kStream, class F>
void map_range(const Images& m, typename F::Element* out, const F& by_reference, int64_t begin, int64_t end) {
  using V = typename F::V;
  const F f = by_reference;  // as in walk_rows
  const bool ahead = !kStream && asks_ahead;
  const auto write = [out](int64_t i, const auto& value, auto lanes) __attribute__((always_inline)) {
    if constexpr (kStream) {
      stream(out + i, value, lanes);
    } else {
      store(out + i, value, lanes);
    }
  };
  if (m.layout == Layout::kContiguous) {
    Split plane(begin, m.c);
    for (int64_t item = begin; item < end; ++item, ++plane) {
      const auto params = f.params([&](const auto* p) { return V(p[plane.remainder]); });
      const int64_t first = item * m.hw;
      for_each_vector<V, kStream>(m.hw, [&](int64_t k, auto lanes) {
        const int64_t i = first + k, later = i + kAhead<typename F::Element>;
        if (ahead) f.prefetch(later), fetch_for_store(out + later);
        write(i, f(i, params, lanes), lanes);
      });
    }
  } else {
    // Rows share the loads of a channel's vectors. Several streams past the caches would be slower than one, and so
    // are, from memory, several of float32 where the processor fetches ahead of few. With AVX2 and a processor that
    // fetches ahead of many, sharing is worth more in float32 (benchmarks/LOG.md, 2026-11-27), and more again for maps
    // of little arithmetic where each of the rows comes from pages of its own (2026-12-01).
    constexpr int64_t kAhead = 64 * V::kLanes;
    constexpr bool kLong = sizeof(typename F::Element) > 2;
    constexpr bool kSeveral = !kStream || (kLong && kVecBytes == 32);
    const bool alone = !kSeveral || (kLong && !fetches_ahead_of_many_streams) || rows_collide<typename F::Element>(m);
    constexpr bool kInPages = F::kInPages && kSeveral && kVecBytes == 32;
    if (kInPages && !alone) {
      const int64_t apart = rows_apart<typename F::Element>(m.c), pitch = apart * m.c;
      for (int64_t first = begin; first < end; first += 4 * apart) {
        for (int64_t row = first; row < std::min(first + apart, end); ++row) {
          const int64_t count = std::min<int64_t>(4, (end - row - 1) / apart + 1);
          for_each_vector<V, kStream>(m.c, [&](int64_t ch, auto lanes) {
            const auto params = f.params([&](const auto* p) { return load<V>(p + ch, lanes); });
            int64_t i = row * m.c + ch;
            for (int64_t k = 0; k < count; ++k, i += pitch) write(i, f(i, params, lanes), lanes);
          });
        }
      }
      if constexpr (kStream) stream_fence();
      return;
    }
    const int64_t rows = kInPages || alone ? 1 : 4;
    for (int64_t row = begin; row < end; row += rows) {
      const int64_t count = std::min(rows, end - row);
      for_each_vector<V, kStream>(m.c, [&](int64_t ch, auto lanes) {
        const auto params = f.params([&](const auto* p) { return load<V>(p + ch, lanes); });
        int64_t i = row * m.c + ch, k = 0;
        if (rows > 1) {
          fetch_rows<typename F::Element>((row + rows) * m.c, ch, rows, [&](int64_t next) {
            f.prefetch(next);
            if constexpr (!kStream) fetch(out + next);
          });
        }
        if constexpr (kSeveral && in_turn<F, decltype(lanes)>) {
          for (; k + kTogether <= count; k += kTogether, i += kTogether * m.c) {
            write(i, f(i, params, Apart<kTogether>{m.c}), Apart<kTogether>{m.c});
          }
        }
        for (; k < count; ++k, i += m.c) {
          if (kStream && alone) f.prefetch(i + kAhead);
          write(i, f(i, params, lanes), lanes);
        }
      });
    }
  }
  if constexpr (kStream) stream_fence();
}

// map_range with the kind of store that suits the result. Streaming needs rows of whole vectors on aligned addresses.
template <class F>
void map_items(const Images& m, typename F::Element* out, const F& f, int64_t begin, int64_t end) {
  constexpr int64_t kLanes = F::V::kLanes, kSize = sizeof(typename F::Element);
  const int64_t row = m.layout == Layout::kContiguous ? m.hw : m.c;
  const bool aligned = row % kLanes == 0 && reinterpret_cast<uintptr_t>(out) % (kLanes * kSize) == 0;
  visit_bool(stores_past_caches && aligned && m.n * m.c * m.hw * kSize >= kStreamBytes,
             [&]<bool kStream>() { map_range<kStream>(m, out, f, begin, end); });
}

}  // namespace
}  // namespace fusedtrain::cpu

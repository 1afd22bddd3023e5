#pragma once
// Depthwise convolutions of contiguous images: the usual square kernels, a plane at a time, vectors along its rows.
//
// Rows are copied, widened to float, into a buffer with zeros around, at stride 2 with even and odd columns apart: what
// a vector of neighbouring outputs reads for one tap then is one load. Small kernels that keep the columns, or halve
// them, read rows where they are (keeps_columns): 3x3 along a few rows, 5x5 down all of them, with AVX2 either down few
// columns (walks_strips). Internal linkage, as in core/simd.h.
#include "cpu/depthwise_rows.h"

namespace fusedtrain::cpu {
namespace {

using PlaneVec = Vec<float>;
constexpr int64_t kPlaneLanes = PlaneVec::kLanes;

// Planes follow each other in memory, in shorter runs than the processor learns from: what is read or written next is
// fetched this far ahead.
constexpr int64_t kAheadBytes = 2048;
inline void fetch_ahead(const void* p) { __builtin_prefetch(static_cast<const char*>(p) + kAheadBytes, 0, 2); }

constexpr int64_t round_up(int64_t value, int64_t unit) { return ceil_div(value, unit) * unit; }

// The even and the odd elements of two vectors.
inline void deinterleave(PlaneVec a, PlaneVec b, PlaneVec& even, PlaneVec& odd) {
  [&]<int... e>(std::integer_sequence<int, e...>) {
    even.v = shuffle<2 * e...>(a.v, b.v);
    odd.v = shuffle<(2 * e + 1)...>(a.v, b.v);
  }(std::make_integer_sequence<int, PlaneVec::kLanes>{});
}
// The first or second halves of two vectors, elements in turn.
template <int kHalf = 0>
inline PlaneVec interleave(PlaneVec even, PlaneVec odd) {
  return [&]<int... e>(std::integer_sequence<int, e...>) {
    constexpr int kFirst = kHalf * PlaneVec::kLanes / 2;
    return PlaneVec(shuffle<(kFirst + e % 2 * PlaneVec::kLanes + e / 2)...>(even.v, odd.v));
  }(std::make_integer_sequence<int, PlaneVec::kLanes>{});
}

constexpr int64_t kMostTile = 4;  // rows of y or dy at a time

// f<rows>(first) for tiles of 4 rows, as many of 3 as it takes, and of 1 where there are too few.
template <class F>
void each_tile(int64_t count, F&& f) {
  for (int64_t first = 0, rows = 0; first < count; first += rows) {
    const int64_t left = count - first;
    rows = left < 3 ? 1 : left % kMostTile == 0 ? kMostTile : 3;
    visit<1, 3, 4>(rows, [&]<int kRows>() { f.template operator()<kRows>(first); });
  }
}

// The last lane of `before` and all but the last of x; all but the first of x and the first of `behind`.
[[gnu::always_inline]] inline PlaneVec lanes_before(PlaneVec before, PlaneVec x) {
  return [&]<int... e>(std::integer_sequence<int, e...>) {
    return PlaneVec(shuffle<(PlaneVec::kLanes - 1 + e)...>(before.v, x.v));
  }(std::make_integer_sequence<int, PlaneVec::kLanes>{});
}
[[gnu::always_inline]] inline PlaneVec lanes_behind(PlaneVec x, PlaneVec behind) {
  return [&]<int... e>(std::integer_sequence<int, e...>) {
    return PlaneVec(shuffle<(e + 1)...>(x.v, behind.v));
  }(std::make_integer_sequence<int, PlaneVec::kLanes>{});
}

// The even and the odd ones of the next 2 * kPlaneLanes elements, or of the first `count` of these and zeros behind.
template <class T>
[[gnu::always_inline]] inline void load_halves(const T* p, AllLanes, PlaneVec& even, PlaneVec& odd) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    RawVec<uint32_t> pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    even.v = reinterpret_cast<PlaneVec::Raw>(pairs << 16);
    odd.v = reinterpret_cast<PlaneVec::Raw>(pairs & 0xffff0000);
  } else {
    deinterleave(load<PlaneVec>(p), load<PlaneVec>(p + kPlaneLanes), even, odd);
  }
}
template <class T>
[[gnu::always_inline]] inline void load_halves(const T* p, FirstLanes lanes, PlaneVec& even, PlaneVec& odd) {
  const int first = std::min(lanes.count, int(kPlaneLanes));
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, BFloat16>) {
    const auto pairs =
        reinterpret_cast<RawVec<uint32_t>>(_mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << lanes.count) - 1), p));
    even.v = reinterpret_cast<PlaneVec::Raw>(pairs << 16);
    odd.v = reinterpret_cast<PlaneVec::Raw>(pairs & 0xffff0000);
    return;
  }
#endif
  deinterleave(load<PlaneVec>(p, FirstLanes{first}), load<PlaneVec>(p + first, FirstLanes{lanes.count - first}), even,
               odd);
}

// The reverse: 2 * kPlaneLanes elements, or the first `count` of them.
template <class T>
[[gnu::always_inline]] inline void store_halves(T* p, PlaneVec even, PlaneVec odd, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 2) {
    const auto bits = [](PlaneVec x) __attribute__((always_inline)) {
      return _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(narrow(x, T{})));
    };
    const __m512i pairs = _mm512_or_si512(bits(even), _mm512_slli_epi32(bits(odd), 16));
    if (count >= 2 * kPlaneLanes) {
      std::memcpy(p, &pairs, sizeof pairs);
    } else {
      _mm512_mask_storeu_epi16(p, (__mmask32(1) << count) - 1, pairs);
    }
    return;
  }
#endif
  const PlaneVec first = interleave(even, odd), second = interleave<1>(even, odd);
  if (count >= 2 * kPlaneLanes) {
    store(p, first);
    store(p + kPlaneLanes, second);
  } else {
    visit_lanes<PlaneVec>(count, [&](auto lanes) { store(p, first, lanes); });
    if (count > kPlaneLanes) store(p + kPlaneLanes, second, FirstLanes{int(count - kPlaneLanes)});
  }
}

// The columns of a row that a vector of neighbouring outputs, the one at `col`, of a 3x3 kernel reads, one vector per
// tap. Those outside the row are zero.
template <int kStride>
struct Columns;
#if defined(__AVX512F__)
// Each element is loaded once, its neighbours come from the registers.
template <>
struct Columns<1> {
  static constexpr int64_t kAhead = kPlaneLanes;  // columns that are loaded before their turn
  PlaneVec before{0}, x;

  template <class T>
  [[gnu::always_inline]] void begin(const T* p, FirstLanes lanes) {
    x = load<PlaneVec>(p, lanes);
  }
  template <class T, class Lanes>
  [[gnu::always_inline]] void next(const T* p, int64_t /*col*/, Lanes lanes, PlaneVec (&columns)[3]) {
    const PlaneVec behind = load<PlaneVec>(p, lanes);
    columns[0] = lanes_before(before, x);
    columns[1] = x;
    columns[2] = lanes_behind(x, behind);
    before = x;
    x = behind;
  }
};
#else
// Each element is loaded three times: to move elements between the halves of vectors costs more, and registers are few.
template <>
struct Columns<1> {
  static constexpr int64_t kAhead = 1;

  template <class T>
  [[gnu::always_inline]] void begin(const T*, FirstLanes) {}
  template <class T, class Lanes>
  [[gnu::always_inline]] void next(const T* p, int64_t col, Lanes lanes, PlaneVec (&columns)[3]) {
    const auto lanes_from = [=](int before) __attribute__((always_inline)) {
      if constexpr (std::is_same_v<Lanes, AllLanes>) {
        return lanes;
      } else {
        return FirstLanes{std::min(lanes.count + before, int(kPlaneLanes))};
      }
    };
    columns[2] = load<PlaneVec>(p, lanes);
    columns[1] = load<PlaneVec>(p - 1, lanes_from(1));
    columns[0] = col > 0 ? load<PlaneVec>(p - 2, lanes_from(2)) : lanes_before(PlaneVec(0), columns[1]);
  }
};
#endif
template <>
struct Columns<2> {
  static constexpr int64_t kAhead = 0;
  PlaneVec before{0};

  template <class T>
  [[gnu::always_inline]] void begin(const T*, FirstLanes) {}
  template <class T, class Lanes>
  [[gnu::always_inline]] void next(const T* p, int64_t /*col*/, Lanes lanes, PlaneVec (&columns)[3]) {
    load_halves(p, lanes, columns[1], columns[2]);
    columns[0] = lanes_before(before, columns[2]);
    before = columns[2];
  }
};

// kRows rows of `w` columns from left to right: f(col, lanes, each_row) for the vectors of neighbouring outputs from
// `col` on, where each_row(g) calls g(row, x) with x[i] = columns col * kStride - 1 + i of a row.
template <int kStride, int kRows, class T, class F>
[[gnu::always_inline]] inline void walk_rows(const T* const (&rows)[kRows], int64_t w, const F& f) {
  using Row = Columns<kStride>;
  constexpr int64_t kCols = kStride * kPlaneLanes;  // of the row, per vector
  const auto lanes_of = [=](int64_t count) { return FirstLanes{int(std::clamp<int64_t>(count, 0, kCols))}; };
  Row row_columns[kRows];
  const auto step = [&](int64_t col, auto lanes, auto more) __attribute__((always_inline)) {
    const auto each_row = [&](auto g) __attribute__((always_inline)) {
      unroll<kRows>([&](auto row) __attribute__((always_inline)) {
        PlaneVec x[3];
        row_columns[row].next(rows[row] + col * kStride + Row::kAhead, col, more, x);
        g(row, x);
      });
    };
    f(col, lanes, each_row);
  };
  unroll<kRows>([&](auto row) __attribute__((always_inline)) { row_columns[row].begin(rows[row], lanes_of(w)); });
  const int64_t outputs = ceil_div(w, kStride);
  int64_t col = 0;
  for (; col * kStride + kCols + Row::kAhead <= w; col += kPlaneLanes) step(col, AllLanes{}, AllLanes{});
  for (; col < outputs; col += kPlaneLanes) {
    step(col, FirstLanes{int(std::min(outputs - col, kPlaneLanes))}, lanes_of(w - col * kStride - Row::kAhead));
  }
}

// Rows `first` and the following of a plane [h, w], which may lie outside it.
template <class T>
struct PlaneRows {
  const T* plane;
  int64_t h, w, first;
  const T* zeros;  // a row

  const T* at(int64_t i) const {
    const int64_t row = first + i;
    return row >= 0 && row < h ? plane + row * w : zeros;
  }
  template <int kRows>
  void find(int64_t begin, const T* (&rows)[kRows]) const {
    for (int64_t i = 0; i < kRows; ++i) rows[i] = at(begin + i);
  }
  // What is read somewhat later.
  const T* ahead(int64_t begin, int64_t stride = 1) const {
    return plane + (first + begin) * w + stride * 4096 / int64_t(sizeof(T));
  }
};

// 5x5 kernels at stride 2, whose neighbouring columns do not fit the registers and are loaded again: down the rows that
// `count` rows of outputs read, for the vector of outputs at `col`. f(j, even, odd) for j < count + 2, where even(g)
// calls g(x) with x[i] = columns 2 * col - 2 + i of row 2 * j, and odd(g) with those of row 2 * j + 1.
template <bool kLeftmost, class T, class Lanes, class F>
[[gnu::always_inline]] inline void walk_down(const PlaneRows<T>& rows, int64_t count, int64_t col, Lanes, const F& f) {
  const int64_t left = rows.w - 2 * col;
  const auto lanes_from = [&](int64_t column) {
    if constexpr (std::is_same_v<Lanes, AllLanes>) {
      return AllLanes{};
    } else {
      return FirstLanes{int(std::clamp<int64_t>(left - column, 0, 2 * kPlaneLanes))};
    }
  };
  const auto row = [&](int64_t i, const auto& g) __attribute__((always_inline)) {
    const T* p = rows.at(i) + 2 * col;
    PlaneVec x[5], unused;
    load_halves(p, lanes_from(0), x[2], x[3]);
    if constexpr (kLeftmost) {
      x[0] = lanes_before(PlaneVec(0), x[2]);
      x[1] = lanes_before(PlaneVec(0), x[3]);
    } else {
      load_halves(p - 2, lanes_from(-2), x[0], x[1]);
    }
    load_halves(p + 2, lanes_from(2), x[4], unused);
    g(x);
  };
  for (int64_t j = 0; j < count + 2; ++j) {
    if constexpr (kLeftmost) {
      const char* ahead = reinterpret_cast<const char*>(rows.ahead(2 * j, 2));
      for (int64_t i = 0; i < 2 * rows.w * int64_t(sizeof(T)); i += kLineBytes) __builtin_prefetch(ahead + i, 0, 2);
    }
    f(
        j, [&](const auto& g) __attribute__((always_inline)) { row(2 * j, g); },
        [&](const auto& g) __attribute__((always_inline)) { row(2 * j + 1, g); });
  }
}
// f<leftmost>(col, lanes) for each vector of outputs of rows of `w` columns, for walk_down.
template <class F>
void each_way_down(int64_t w, const F& f) {
  const int64_t outputs = ceil_div(w, int64_t(2));
  const auto part = [&](int64_t col) { return FirstLanes{int(std::min(outputs - col, kPlaneLanes))}; };
  const auto is_inside = [&](int64_t col) { return 2 * (col + kPlaneLanes) + 2 <= w; };
  is_inside(0) ? f.template operator()<true>(0, AllLanes{}) : f.template operator()<true>(0, part(0));
  for (int64_t col = kPlaneLanes; col < outputs; col += kPlaneLanes) {
    is_inside(col) ? f.template operator()<false>(col, AllLanes{}) : f.template operator()<false>(col, part(col));
  }
}

// Lanes of a strip of a plane beside of which nothing may be read.
struct EdgeLanes : FirstLanes {};

// Kernels of kTaps columns at stride 1: down `count` rows, for the vector of outputs at `col`. f(j, inside, column),
// where column(i) = columns col - kTaps / 2 + i of row j, if that is inside the plane. Columns outside the row are
// zero, but without kClean none of those that stand behind it in the middle one.
template <int kTaps, bool kClean, class T, class Lanes, class F>
[[gnu::always_inline]] inline void walk_strip(const PlaneRows<T>& rows, int64_t count, int64_t col, Lanes lanes,
                                              const F& f) {
  constexpr int kPad = kTaps / 2;
  constexpr bool kWhole = std::is_same_v<Lanes, AllLanes>, kExact = std::is_same_v<Lanes, EdgeLanes>;
  using Mask = RawVec<PlaneVec::Int>;
  int left = int(std::min<int64_t>(rows.w - col, kPlaneLanes + kPad));  // columns from `col` on
  if constexpr (!kWhole && !kExact) left = lanes.count;
  Mask lane, masks[kTaps];
  for (int i = 0; i < kPlaneLanes; ++i) lane[i] = i;
  unroll<kTaps>([&](auto i) __attribute__((always_inline)) {
    masks[i] = (lane < left - std::max(i - kPad, 0)) & (lane > int(std::max<int64_t>(kPad - i - col, 0)) - 1);
  });
  const T* p = rows.plane + rows.first * rows.w + col;
  for (int64_t j = 0; j < count; ++j, p += rows.w) {
    __builtin_prefetch(reinterpret_cast<const char*>(p) + 2 * kAheadBytes, 0, 2);
    const bool inside = uint64_t(rows.first + j) < uint64_t(rows.h);
    T copy[kExact ? kPlaneLanes + 2 * kPad : 1];
    for (int i = 0; kExact && inside && i < kPlaneLanes + 2 * kPad; ++i) {
      copy[i] = uint64_t(col + i - kPad) < uint64_t(rows.w) ? p[i - kPad] : T{};
    }
    const T* const first = kExact ? copy : p - kPad;
    f(
        j, inside, [&](auto i) __attribute__((always_inline)) {
          const PlaneVec x = load<PlaneVec>(first + i);
          if (i == kPad && (kWhole || !kClean)) return x;
          return PlaneVec(reinterpret_cast<PlaneVec::Raw>(reinterpret_cast<Mask>(x.v) & masks[i]));
        });
  }
}

// Whether a plane is the first or the last of its image, the only one that is known to be there: gradients may be made
// a few images at a time.
inline bool is_at_end(const DepthwiseSizes& s, int64_t channel) { return channel == 0 || channel == s.c - 1; }
// f(col, lanes) for each vector of columns of rows of `w`, from right to left; for such a plane, or another.
template <bool kAtEnd, class F>
[[gnu::always_inline]] inline void each_strip(int64_t w, const F& f) {
  int64_t col = (w - 1) / kPlaneLanes * kPlaneLanes;
  if constexpr (kAtEnd) {
    for (; col >= 0; col -= kPlaneLanes) f(col, EdgeLanes{int(std::min(w - col, kPlaneLanes))});
  } else {
    if (w - col < kPlaneLanes) {
      f(col, FirstLanes{int(w - col)});
      col -= kPlaneLanes;
    }
    for (; col >= 0; col -= kPlaneLanes) f(col, AllLanes{});
  }
}

// Asks for kRows rows of as many columns as walk_rows has outputs, in as many parts as it takes vectors: the part of
// the one at `col`.
template <int kRows, class T>
[[gnu::always_inline]] inline void fetch_rows(const T* first, int64_t col) {
  constexpr int kBytes = kRows * kPlaneLanes * int(sizeof(T));
  const char* p = reinterpret_cast<const char*>(first + col * kRows);
#pragma GCC unroll 16
  for (int i = 0; i < kBytes; i += kLineBytes) __builtin_prefetch(p + i, 0, 2);
}

// Some rows of a plane, with `left` zeros before and zeros behind: row(i)[phase * half + q] is column q * kStride +
// phase - left.
template <int kStride>
class PaddedRows {
 public:
  // `w` columns of the plane; of each phase [0, needed) may be read; at most `capacity` rows.
  PaddedRows(Arena& arena, int64_t w, int64_t left, int64_t needed, int64_t capacity)
      : w_(w),
        left_(left),
        aligned_(round_up(left, kPlaneLanes) - left),
        half_(round_up(std::max(ceil_div(left + round_up(w, kPlaneLanes), kStride), needed) + aligned_, kPlaneLanes)),
        zeros_(arena.take<float>(kStride * half_)),
        whole_(arena.take<float>(kStride * half_ + 2 * kPlaneLanes)),
        data_(arena.take<float>(capacity * kStride * half_)),
        rows_(arena.take<const float*>(capacity)) {
    std::fill_n(zeros_, kStride * half_, 0.f);
    std::fill_n(whole_, kStride * half_ + 2 * kPlaneLanes, 0.f);
    std::fill_n(data_, capacity * kStride * half_, 0.f);
  }

  // Rows [first, first + count) of a plane [h, w]. Zeros around stay what they are.
  template <class T>
  void fill(const T* plane, int64_t h, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = first + i;
      float* data = data_ + i * kStride * half_;
      const bool inside = row >= 0 && row < h;
      rows_[i] = !inside ? zeros_ : kStride == 1 ? data + aligned_ : data;
      if (!inside) continue;
      const T* p = plane + row * w_;
      float* out = (kStride == 1 ? data : whole_) + aligned_;
      for_each_vector<PlaneVec>(w_, [&](int64_t col, auto lanes) {
        fetch_ahead(p + col);
        store(out + left_ + col, load<PlaneVec>(p + col, lanes));
      });
      if constexpr (kStride == 2) {
        for (int64_t q = 0; 2 * q < left_ + w_; q += kPlaneLanes) {
          PlaneVec even, odd;
          deinterleave(load<PlaneVec>(out + 2 * q), load<PlaneVec>(out + 2 * q + kPlaneLanes), even, odd);
          store(data + q, even);
          store(data + half_ + q, odd);
        }
      }
    }
  }

  const float* const* rows() const { return rows_; }
  int64_t half() const { return half_; }

 private:
  int64_t w_, left_, aligned_, half_;  // column 0 of the plane is stored at a multiple of kPlaneLanes
  float *zeros_, *whole_, *data_;
  const float** rows_;
};

// fill(rows, channel) for each channel, work(rows, channel) behind it. The next channel is filled before the work on
// one begins: loads that overlap a store still under way would have to wait.
template <int kStride, class Fill, class Work>
void each_plane(PaddedRows<kStride> (&rows)[2], int64_t begin, int64_t end, const Fill& fill, const Work& work) {
  for (int64_t channel = begin; channel <= end; ++channel) {
    if (channel < end) fill(rows[channel % 2], channel);
    if (channel > begin) work(rows[(channel - 1) % 2], channel - 1);
  }
}

// f<T>() for the element types that have these kernels, f<k, stride>() for the kernels, or for those of keeps_columns.
template <class F>
void visit_plane_dtype(DType dtype, F&& f) {
  visit_dtype(dtype, [&]<class T>() {
    if constexpr (std::is_same_v<T, float> || (sizeof(T) == 2 && !kRareVariant)) f.template operator()<T>();
  });
}
template <class F>
void visit_plane_kernel(const DepthwiseSizes& s, F&& f) {
  visit<3, 5, 7>(s.kh, [&]<int kTaps>() {
    visit<1, 2>(s.sh, [&]<int kStride>() {
      if constexpr (kTaps < 7 || kStride == 1) f.template operator()<kTaps, kStride>();
    });
  });
}

template <class F>
void visit_kept_kernel(const DepthwiseSizes& s, F&& f) {
  if constexpr (kHasStrips) {
    if (s.sh == 1 && s.kh == 5) return f.template operator()<5, 1>();
  }
  if (s.sh == 1) return f.template operator()<3, 1>();
  return s.kh == 3 ? f.template operator()<3, 2>() : f.template operator()<5, 2>();
}

}  // namespace
}  // namespace fusedtrain::cpu

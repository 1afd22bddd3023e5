#pragma once
// Depthwise convolutions of contiguous images: the usual square kernels, a plane at a time, vectors along its rows.
//
// Rows are copied, widened to float, into a buffer with zeros around, at stride 2 with even and odd columns apart: what
// a vector of neighbouring outputs reads for one tap then is one load. 3x3 kernels that keep the columns read them
// where they are: each vector once, its neighbours from the registers. Internal linkage, as in core/simd.h.
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
    using Index = RawVec<PlaneVec::Int>;
    even.v = __builtin_shuffle(a.v, b.v, Index{2 * e...});
    odd.v = __builtin_shuffle(a.v, b.v, Index{2 * e + 1 ...});
  }(std::make_integer_sequence<int, PlaneVec::kLanes>{});
}
// The first halves of two vectors, elements in turn.
inline PlaneVec interleave(PlaneVec even, PlaneVec odd) {
  return [&]<int... e>(std::integer_sequence<int, e...>) {
    return PlaneVec(__builtin_shuffle(even.v, odd.v, RawVec<PlaneVec::Int>{(e % 2 * PlaneVec::kLanes + e / 2)...}));
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
    return PlaneVec(__builtin_shuffle(before.v, x.v, RawVec<PlaneVec::Int>{(PlaneVec::kLanes - 1 + e)...}));
  }(std::make_integer_sequence<int, PlaneVec::kLanes>{});
}
[[gnu::always_inline]] inline PlaneVec lanes_behind(PlaneVec x, PlaneVec behind) {
  return [&]<int... e>(std::integer_sequence<int, e...>) {
    return PlaneVec(__builtin_shuffle(x.v, behind.v, RawVec<PlaneVec::Int>{(e + 1)...}));
  }(std::make_integer_sequence<int, PlaneVec::kLanes>{});
}

// kRows rows of `w` columns from left to right: f(col, lanes, each_row) for the vectors of neighbouring columns from
// `col` on, where each_row(g) calls g(row, x) with x[i] = columns col - 1 + i of a row; those outside the row are zero.
template <int kRows, class T, class F>
[[gnu::always_inline]] inline void walk_rows(const T* const (&rows)[kRows], int64_t w, const F& f) {
  using V = PlaneVec;
  V before[kRows], x[kRows];
  const auto step = [&](int64_t col, auto lanes, auto more) __attribute__((always_inline)) {
    const auto each_row = [&](auto g) __attribute__((always_inline)) {
      unroll<kRows>([&](auto row) __attribute__((always_inline)) {
        const V behind = load<V>(rows[row] + col + kPlaneLanes, more);
        const V columns[3] = {lanes_before(before[row], x[row]), x[row], lanes_behind(x[row], behind)};
        g(row, columns);
        before[row] = x[row];
        x[row] = behind;
      });
    };
    f(col, lanes, each_row);
  };
  unroll<kRows>([&](auto row) __attribute__((always_inline)) {
    before[row] = V(0);
    x[row] = load<V>(rows[row], FirstLanes{int(std::min(w, kPlaneLanes))});
  });
  int64_t col = 0;
  for (; col + 2 * kPlaneLanes <= w; col += kPlaneLanes) step(col, AllLanes{}, AllLanes{});
  for (; col < w; col += kPlaneLanes) {
    step(col, FirstLanes{int(std::min(w - col, kPlaneLanes))},
         FirstLanes{int(std::clamp<int64_t>(w - col - kPlaneLanes, 0, kPlaneLanes))});
  }
}

// Rows `first` and the following of a plane [h, w], which may lie outside it.
template <class T>
struct PlaneRows {
  const T* plane;
  int64_t h, w, first;
  const T* zeros;  // a row

  template <int kRows>
  void find(int64_t begin, const T* (&rows)[kRows]) const {
    for (int64_t i = 0; i < kRows; ++i) {
      const int64_t row = first + begin + i;
      rows[i] = row >= 0 && row < h ? plane + row * w : zeros;
    }
  }
  // What is read somewhat later.
  const T* ahead(int64_t begin) const { return plane + (first + begin) * w + 4096 / sizeof(T); }
};

// Asks for kRows rows, in as many parts as walk_rows takes vectors: the part of the one at `col`.
template <int kRows, class T>
[[gnu::always_inline]] inline void fetch_rows(const T* first, int64_t col) {
  constexpr int kBytes = kRows * kPlaneLanes * int(sizeof(T));
  const char* p = reinterpret_cast<const char*>(first + col * kRows);
#pragma GCC unroll 8
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

// f<T>() for the element types that have these kernels, f<k, stride>() for the kernels.
template <class F>
void visit_plane_dtype(DType dtype, F&& f) {
  visit_dtype(dtype, [&]<class T>() {
    if constexpr (!std::is_same_v<T, double>) f.template operator()<T>();
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

}  // namespace
}  // namespace fusedtrain::cpu

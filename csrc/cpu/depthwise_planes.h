#pragma once
// Depthwise convolutions of contiguous images: the usual square kernels, a plane at a time, vectors along its rows.
//
// Rows are copied, widened to float, into a buffer with zeros around, at stride 2 with even and odd columns apart: what
// a vector of neighbouring outputs reads for one tap then is one load. Internal linkage, as in core/simd.h.
#include "cpu/depthwise_rows.h"

namespace fusedtrain::cpu {
namespace {

using PlaneVec = Vec<float>;
constexpr int64_t kPlaneLanes = PlaneVec::kLanes;

constexpr int64_t round_up(int64_t value, int64_t unit) { return ceil_div(value, unit) * unit; }

// E = even elements, O = odd elements of two vectors a, b; interleave is the inverse.
inline void deinterleave(PlaneVec a, PlaneVec b, PlaneVec& even, PlaneVec& odd) {
  [&]<int... e>(std::integer_sequence<int, e...>) {
    using Index = RawVec<PlaneVec::Int>;
    even.v = __builtin_shuffle(a.v, b.v, Index{2 * e...});
    odd.v = __builtin_shuffle(a.v, b.v, Index{2 * e + 1 ...});
  }(std::make_integer_sequence<int, PlaneVec::kLanes>{});
}
inline void interleave(PlaneVec even, PlaneVec odd, PlaneVec& a, PlaneVec& b) {
  constexpr int L = PlaneVec::kLanes;
  [&]<int... e>(std::integer_sequence<int, e...>) {
    using Index = RawVec<PlaneVec::Int>;
    a.v = __builtin_shuffle(even.v, odd.v, Index{(e % 2 * L + e / 2)...});
    b.v = __builtin_shuffle(even.v, odd.v, Index{(e % 2 * L + e / 2 + L / 2)...});
  }(std::make_integer_sequence<int, L>{});
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
        half_(round_up(std::max(ceil_div(left + round_up(w, kPlaneLanes), kStride), needed), kPlaneLanes)),
        zeros_(arena.take<float>(kStride * half_)),
        whole_(arena.take<float>(kStride * half_)),
        data_(arena.take<float>(capacity * kStride * half_)),
        rows_(arena.take<const float*>(capacity)) {
    std::fill_n(zeros_, kStride * half_, 0.f);
    std::fill_n(whole_, kStride * half_, 0.f);
    std::fill_n(data_, capacity * kStride * half_, 0.f);
  }

  // Rows [first, first + count) of a plane [h, w]. Zeros around stay what they are.
  template <class T>
  void fill(const T* plane, int64_t h, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = first + i;
      float* data = data_ + i * kStride * half_;
      rows_[i] = row >= 0 && row < h ? data : zeros_;
      if (rows_[i] == zeros_) continue;
      const T* p = plane + row * w_;
      float* out = kStride == 1 ? data : whole_;
      for_each_vector<PlaneVec>(
          w_, [&](int64_t col, auto lanes) { store(out + left_ + col, load<PlaneVec>(p + col, lanes)); });
      if constexpr (kStride == 2) {
        for (int64_t q = 0; 2 * q < left_ + w_; q += kPlaneLanes) {
          PlaneVec even, odd;
          deinterleave(load<PlaneVec>(whole_ + 2 * q), load<PlaneVec>(whole_ + 2 * q + kPlaneLanes), even, odd);
          store(data + q, even);
          store(data + half_ + q, odd);
        }
      }
    }
  }

  const float* const* rows() const { return rows_; }
  int64_t half() const { return half_; }

 private:
  int64_t w_, left_, half_;
  float *zeros_, *whole_, *data_;
  const float** rows_;
};

// The rows [begin, end) of y in a band.
struct Span {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};
inline Span band_rows(const DepthwiseSizes& s, int64_t rows, int64_t band) {
  return {rows * band / bands(s), rows * (band + 1) / bands(s)};
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

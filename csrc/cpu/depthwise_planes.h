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

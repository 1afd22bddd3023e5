#pragma once
// The operands of 1x1 convolutions: matrices whose rows are pixels. Internal linkage, as in core/simd.h.
#include <cstdint>

#include "pointwise_conv2d.h"

namespace fusedtrain::cpu {
namespace {

// One of the matrices [pixel][channel].
template <class T>
struct Side {
  const T* data;
  int64_t channels, h, w;
  PixelStrides strides;
  bool even;  // all pixels lie strides.col apart: then they count as one long row

  Side(const void* p, int64_t channels_, const PixelStrides& s, int64_t n, int64_t h_, int64_t w_)
      : data(static_cast<const T*>(p)), channels(channels_), h(h_), w(w_), strides(s) {
    if (w == 1) strides.col = h == 1 ? s.image : s.row;
    if (h == 1) strides.row = w * strides.col;
    if (n == 1) strides.image = h * strides.row;
    if (channels == 1) strides.channel = 1;
    if (strides.row == w * strides.col) w *= h, strides.row *= h, h = 1;  // the rows of an image are one
    even = h == 1 && strides.image == strides.row;
    if (even) w *= n;
  }
  // Whether the channels of all pixels can be read in place, pixels strides.col apart.
  bool is_matrix() const { return even && strides.channel == 1; }
  // Whether pixels lie side by side, and channels do not: contiguous images.
  bool has_planes() const { return strides.col == 1 && strides.channel != 1; }
  // Pixels from this one on that lie strides.col apart.
  int64_t run(int64_t pixel) const { return w - pixel % w; }
  const T* at(int64_t pixel) const {
    const int64_t row = pixel / w;
    return data + row / h * strides.image + row % h * strides.row + pixel % w * strides.col;
  }
};

// Channels of a block of pixels, one after the other.
template <class T>
class Pixels {
 public:
  Pixels(const Side<T>& side, int64_t pixel, int64_t channel)
      : side_(side),
        p_(side.at(pixel) + channel * side.strides.channel),
        x_(pixel % side.w),
        y_(pixel / side.w % side.h) {}
  const T* next() {
    const PixelStrides& s = side_.strides;
    const T* p = p_;
    p_ += s.col;
    if (++x_ == side_.w) {
      x_ = 0;
      p_ += s.row - side_.w * s.col;
      if (++y_ == side_.h) {
        y_ = 0;
        p_ += s.image - side_.h * s.row;
      }
    }
    return p;
  }

 private:
  const Side<T>& side_;
  const T* p_;
  int64_t x_, y_;
};

}  // namespace
}  // namespace fusedtrain::cpu

#pragma once
// How the kernels of grouped_conv2d read images: in staged blocks. Internal linkage, as in core/simd.h.
#include <algorithm>

#include "cpu/pairs.h"
#include "grouped_conv2d.h"

namespace fusedtrain::cpu {
namespace {

template <class E>
constexpr int64_t kBlock = kBlockBytes / int64_t(sizeof(E));

template <class E>
[[gnu::always_inline]] inline auto load_vector(const E* p) {
  if constexpr (std::is_same_v<E, Pair>) {
    Pairs pairs;
    std::memcpy(&pairs.v, p, sizeof pairs.v);
    return pairs;
  } else {
    return load<Vec<E>>(p);
  }
}

// The rows and columns of an image that are staged, as [row][col % step][col / step].
struct Window {
  int64_t h, w;
  int64_t first_row, rows, first_col, cols, step;  // cols: of each remainder
};

// copy(to, row, col, count) for pixels that are in the image, from column col on and in.step apart, and zeros for the
// others; `blocks` in each, `pitch` apart. `below`: of the last row that makes one above the image count.
template <class E, class F>
void stage(const Window& in, int64_t blocks, int64_t pitch, int64_t below, E* out, F&& copy) {
  const auto clear = [&](int64_t from, int64_t to) {
    for (int64_t block = 0; block < blocks; ++block) {
      std::fill(out + block * pitch + from * kBlock<E>, out + block * pitch + to * kBlock<E>, E{});
    }
  };
  for (int64_t row = in.first_row; row < in.first_row + in.rows; ++row) {
    const int64_t cols = row < -below || row >= in.h ? 0 : in.w;
    for (int64_t rest = 0; rest < in.step; ++rest, out += in.cols * kBlock<E>) {
      const int64_t first = in.first_col + rest;  // of columns first + i * step
      const int64_t end = std::clamp<int64_t>(ceil_div(std::max<int64_t>(0, cols - first), in.step), 0, in.cols);
      const int64_t begin = std::min(end, ceil_div(std::max<int64_t>(0, -first), in.step));
      clear(0, begin);
      if (begin < end) copy(out + begin * kBlock<E>, row, first + begin * in.step, end - begin);
      clear(end, in.cols);
    }
  }
}

// Memory to ask for while a tile is computed, line by line.
struct Ahead {
  const char *p, *end;
  bool any() const { return p < end; }
};
constexpr int64_t kLine = 64;

// The part of set `set` of what the images hold between two pixels.
template <class T>
Ahead part_of(const T* images, int64_t channels, int64_t begin, int64_t end, int64_t set, int64_t sets) {
  const auto* p = reinterpret_cast<const char*>(images);
  const int64_t pixel = channels * int64_t(sizeof(T)), first = begin * pixel, bytes = (end - begin) * pixel;
  return {p + first + bytes * set / sets, p + first + bytes * (set + 1) / sets};
}

// f<T, E>()
template <class F>
void visit_elements(const GroupedSizes& s, F&& f) {
  visit_dtype(s.dtype, [&]<class T>() {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (in_pairs(s)) return f.template operator()<T, Pair>();
    }
#endif
    f.template operator()<T, Acc<T>>();
  });
}

}  // namespace
}  // namespace fusedtrain::cpu

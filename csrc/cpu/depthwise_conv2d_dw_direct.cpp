// depthwise_conv2d on the CPU, channels_last images and square kernels of 3, 5 or 7: dw and db without unpacked rows.
//   dw[ky, kx] = sum_{n, oy, ox} dy[oy, ox] * x[oy * s + ky - top, ox * s + kx - left]
//   db         = sum_{n, oy, ox} dy[oy, ox]
#include "cpu/depthwise_direct.h"

namespace fusedtrain::cpu {
namespace {

// The sums of a few rows of dy against kRows rows of the kernel.
template <class T>
struct DotRows {
  const T *x, *dy;  // of the first row of dy: x at kernel row 0 and column 0 of the image; the group's first channel
  int64_t x_row;    // of the image, may be outside of [0, h)
  int64_t h, w, wo, left, pitch, rows;
  bool small;  // the next group is asked for meanwhile, by the first part of the sums, else the next rows
  bool first;
  Acc<T>* sums;  // [kh][kw][vector][lane]
};

// Vector v of the group, or all of them.
template <class T, int kTaps, int kStride, int kDeep, int kRows, int v, int kVecs>
void dot_rows(const DotRows<T>& task) {
  using G = Group<T>;
  using V = typename G::V;
  using In = std::conditional_t<kDeep == 1, V, Pairs>;
  // Pixels of dy at a time, as many as the registers hold beside the sums.
  constexpr int kNow = kRows * kTaps * kVecs;
  constexpr int kPixels = kVecs == 1 ? (kNow <= kSums - 2 ? 4 : 2) : kNow <= 18 ? 4 : 3;
  V sums[kRows][kTaps][kVecs];
  const auto each_sum = [&](auto f) __attribute__((always_inline)) {
    unroll<kRows>([&](auto ky) __attribute__((always_inline)) {
      unroll<kTaps>([&](auto kx) __attribute__((always_inline)) {
        unroll<kVecs>([&](auto u) __attribute__((always_inline)) { f(ky, kx, u); });
      });
    });
  };
  const auto get = [](const auto& column, In* x) __attribute__((always_inline)) {
    if constexpr (kVecs > 1) {
      column.get_all(x);
    } else {
      x[0] = column.template get<v>();
    }
  };
  each_sum([&](auto ky, auto kx, auto u) __attribute__((always_inline)) { sums[ky][kx][u] = V(0); });
  const int64_t x_pitch = task.w * task.pitch, left = task.left;
  // As in run_tile. A small image is over before its next rows are there; the lines of the next group are neighbours.
  // The registers of 7x7 pairs are full.
  const bool small = (kTaps < 7 || kDeep == 1) && task.small, later = small && !task.first;  // it is there
  const int64_t x_next = later   ? 0
                         : small ? kTaps / 2 * x_pitch + G::kChannels
                                 : ((kDeep - 1) * kStride + kRows) * x_pitch;
  const int64_t dy_next = later ? 0 : small ? G::kChannels : kDeep * task.wo * task.pitch;
  // Where a group lies across two lines of the caches, the group before has read the first of them.
  constexpr int64_t kLast = G::kChannels - 1;
  for (int64_t row = 0; row < task.rows; row += kDeep) {
    const auto is_row = [&](int i) __attribute__((always_inline)) { return i == 0 || row + i < task.rows; };
    const T* x = task.x + row * kStride * x_pitch;
    const int64_t x_row = task.x_row + row * kStride;
    const T* dy = task.dy + row * task.wo * task.pitch;
    const auto step = [&](auto pixels, auto inside, int64_t col) __attribute__((always_inline)) {
      Column<T, kDeep> gradient(dy + col * task.pitch, task.wo * task.pitch, task.pitch, is_row);
      constexpr int count = decltype(pixels)::value;  // from GCC 13 on `pixels` is no constant in the lambdas below
      In g[count][kVecs];
      unroll<pixels>([&](auto i) __attribute__((always_inline)) {
        get(gradient, g[i]);
        gradient.next();
        const T* x_ahead = x + x_next + (col + i) * kStride * task.pitch + kLast;
        unroll<kDeep * kStride>([&](auto new_row) __attribute__((always_inline)) {
          unroll<kStride>([&](auto j) __attribute__((always_inline)) {
            __builtin_prefetch(x_ahead + new_row * x_pitch + j * task.pitch, 0, 2);
          });
        });
        unroll<kDeep>([&](auto d) __attribute__((always_inline)) {
          __builtin_prefetch(dy + dy_next + (d * task.wo + col + i) * task.pitch + kLast, 0, 2);
        });
      });
      // No template of ky: the compiler has enough to do.
      const auto dot_row = [&](int ky, V(&row_sums)[kTaps][kVecs]) __attribute__((always_inline)) {
        const auto in_image = [&](int i) __attribute__((always_inline)) {
          return is_row(i) && uint64_t(x_row + ky + i * kStride) < uint64_t(task.h);
        };
        if (!in_image(0) && !in_image(kDeep - 1)) return;
        const int64_t first = col * kStride - left;
        Column<T, kDeep> column(x + ky * x_pitch + first * task.pitch, kStride * x_pitch, task.pitch, in_image);
        unroll<(pixels - 1) * kStride + kTaps>([&](auto j) __attribute__((always_inline)) {
          if (inside || uint64_t(first + j) < uint64_t(task.w)) {
            In value[kVecs];
            get(column, value);
            unroll<pixels * kVecs>([&](auto n) __attribute__((always_inline)) {
              constexpr int i = n / kVecs, u = n % kVecs, kx = j - i * kStride;
              if constexpr (kx >= 0 && kx < kTaps) row_sums[kx][u] = multiply_add(row_sums[kx][u], g[i][u], value[u]);
            });
          }
          column.next();
        });
      };
      unroll<kRows>([&](auto ky) __attribute__((always_inline)) { dot_row(ky, sums[ky]); });
    };
    constexpr std::integral_constant<int, kPixels> kMany{};
    constexpr std::integral_constant<int, 1> kOne{};
    int64_t col = 0;
    for (; col + kPixels <= task.wo; col += kPixels) {
      const int64_t first = col * kStride - left;
      if (first >= 0 && first + (kPixels - 1) * kStride + kTaps <= task.w) {
        step(kMany, std::true_type{}, col);
      } else {
        step(kMany, std::false_type{}, col);
      }
    }
    for (; col < task.wo; ++col) step(kOne, std::false_type{}, col);
  }
  each_sum([&](auto ky, auto kx, auto u) __attribute__((always_inline)) {
    auto* total = task.sums + ((ky * kTaps + kx) * G::kVecs + v + u) * V::kLanes;
    store(total, load<V>(total) + sums[ky][kx][u]);
  });
}

// All sums of kVecs vectors of a group, in parts that fit the registers.
template <class T, int kTaps, int kStride, int kDeep, int v, int kVecs>
void dot(DotRows<T> task) {
  constexpr int kRows = kVecs > 1 ? kSums / (kTaps * kVecs) : tap_rows(kTaps), kRest = kTaps % kRows;
  const auto advance = [&](int rows) {
    task.x += rows * task.w * task.pitch;
    task.x_row += rows;
    task.sums += rows * kTaps * Group<T>::kVecs * Vec<Acc<T>>::kLanes;
    task.first = false;
  };
  task.first = v == 0;
  for (int ky = 0; ky + kRows <= kTaps; ky += kRows) {
    dot_rows<T, kTaps, kStride, kDeep, kRows, v, kVecs>(task);
    advance(kRows);
  }
  if constexpr (kRest > 0) dot_rows<T, kTaps, kStride, kDeep, kRest, v, kVecs>(task);
}

// sum[vector][lane] += the sum over pixels.
template <class T>
void add_pixels(const T* dy, int64_t pixels, int64_t pitch, Acc<T>* sum) {
  using G = Group<T>;
  using V = typename G::V;
  unroll<G::kVecs>([&](auto v) {
    V parts[4] = {V(0), V(0), V(0), V(0)};
    for (int64_t i = 0; i < pixels; ++i) parts[i % 4] += G::template get<v>(dy + i * pitch);
    auto* total = sum + v * V::kLanes;
    store(total, load<V>(total) + ((parts[0] + parts[1]) + (parts[2] + parts[3])));
  });
}

constexpr int64_t kSumRows = 8;   // rows of dy summed in registers
constexpr int64_t kSmall = 2048;  // pixels, fewer with a stride: their lines of a group stay in the second cache

}  // namespace

template <>
void depthwise_direct_dw<Isa::FUSEDTRAIN_ISA>(const DepthwiseConv2dBackward& a, DepthwisePart part, void* partial,
                                              bool begins) {
  const DepthwiseSizes& s = a.sizes;
  const Span span = band_rows(part, s.ho);
  visit_direct_dtype(s.dtype, [&]<class T>() {
    using G = Group<T>;
    const int64_t k = s.kh * s.kw, size = (k + 1) * G::kChannels;
    for (int64_t block = part.begin; block < part.end; ++block) {
      const int64_t first = first_channel<T>(s, block);
      const T* x = static_cast<const T*>(a.x) + part.image * s.h * s.w * s.c + first;
      const T* dy = static_cast<const T*>(a.dy) + part.image * s.ho * s.wo * s.c + first;
      auto* total = static_cast<Acc<T>*>(partial) + block * size;
      if (begins) std::fill_n(total, size, Acc<T>(0));
      for (int64_t oy = span.begin; oy < span.end; oy += kSumRows) {
        const int64_t x_row = oy * s.sh - s.top, rows = std::min(kSumRows, span.end - oy);
        const DotRows<T> task{.x = x + x_row * s.w * s.c,
                              .dy = dy + oy * s.wo * s.c,
                              .x_row = x_row,
                              .h = s.h,
                              .w = s.w,
                              .wo = s.wo,
                              .left = s.left,
                              .pitch = s.c,
                              .rows = rows,
                              .small = s.h * s.w * s.sh * s.sw <= kSmall,
                              .first = true,
                              .sums = total};
        if (a.dw) {
          visit_kernel(s, [&]<int kTaps, int kStride>() {
            const auto dot_all = [&]<int kDeep>() {
              if constexpr (kTaps <= 5 && G::kVecs > 1) {
                dot<T, kTaps, kStride, kDeep, 0, G::kVecs>(task);
              } else {
                unroll<G::kVecs>([&](auto v) { dot<T, kTaps, kStride, kDeep, v, 1>(task); });
              }
            };
            if constexpr (G::kPairs) {
              if (rounds_to_bf16_by_instruction) return dot_all.template operator()<2>();
            }
            dot_all.template operator()<1>();
          });
        }
        if (a.db) add_pixels(task.dy, rows * s.wo, s.c, total + k * G::kChannels);
      }
    }
  });
}

template <>
void depthwise_direct_finish<Isa::FUSEDTRAIN_ISA>(const DepthwiseConv2dBackward& a, int64_t begin, int64_t end) {
  const DepthwiseSizes& s = a.sizes;
  const DepthwiseDirect direct = depthwise_direct<Isa::FUSEDTRAIN_ISA>(s);
  if (direct.planes) return depthwise_planes_finish<Isa::FUSEDTRAIN_ISA>(a, begin, end);
  visit_direct_dtype(s.dtype, [&]<class T>() {
    using G = Group<T>;
    using V = typename G::V;
    const int64_t k = s.kh * s.kw, parts = groups(s);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = first_channel<T>(s, block), repeated = block * G::kChannels - first;
      for (int64_t tap = 0; tap <= k; ++tap) {
        V totals[G::kVecs];
        for (int v = 0; v < G::kVecs; ++v) {
          totals[v] = V(0);
          const int64_t at = block * direct.size + tap * G::kChannels + v * V::kLanes;
          for (int64_t group = 0; group < parts; ++group) {
            totals[v] += load<V>(static_cast<const Acc<T>*>(a.partial) + group * direct.blocks * direct.size + at);
          }
        }
        T channels[G::kChannels];
        G::put(channels, totals);
        for (int64_t i = repeated; i < std::min<int64_t>(G::kChannels, s.c - first); ++i) {
          if (tap < k && a.dw) static_cast<T*>(a.dw)[(first + i) * k + tap] = channels[i];
          if (tap == k && a.db) static_cast<T*>(a.db)[first + i] = channels[i];
        }
      }
    }
  });
}

}  // namespace fusedtrain::cpu

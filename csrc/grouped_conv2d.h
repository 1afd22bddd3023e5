#pragma once
// grouped_conv2d: the channels in groups, each convolved with kernels of its own; o and i count the channels of a group
// of y and x.
//
//   y[o, oy, ox]      = b[o] + sum_{i, ky, kx} w[o, i, ky, kx] * x[i, oy * sh + ky * dil_h - top, ox * sw + ...]
//   dx[i, iy, ix]     = sum_{o, ky, kx: oy * sh + ky * dil_h - top = iy, ...} w[o, i, ky, kx] * dy[o, oy, ox]
//   dw[o, i, ky, kx]  = sum_{n, oy, ox} dy[o, oy, ox] * x[i, oy * sh + ky * dil_h - top, ox * sw + kx * dil_w - left]
//
// x is zero outside the image. acc is the accumulation type: float, double for kFloat64; each result is rounded once.
#include <algorithm>

#include "core/isa.h"
#include "core/types.h"

namespace fusedtrain {

struct GroupedSizes {
  int64_t n, groups;
  int64_t ci, h, w;      // x: channels of a group
  int64_t co, ho, wo;    // y: likewise
  int64_t kh, kw;        // kernel
  int64_t sh, sw;        // stride
  int64_t top, left;     // padding before; that behind is whatever ho and wo need
  int64_t dil_h, dil_w;  // dilation
  DType dtype;           // of all tensors
};

// y from x; or dx from dy, where in and out change places.
struct GroupedConv2d {
  GroupedSizes sizes;
  bool transposed;
  const void* in;      // [n, h, w, groups, ci]; dy: [n, ho, wo, groups, co]
  const void* weight;  // [groups * co, ci, kh, kw], weight_strides apart
  int64_t weight_strides[4];
  const void* bias;  // [groups * co] of acc, or null
  void* packed;      // the weight as the kernel reads it
  void* out;         // [n, ho, wo, groups, co]; dx: [n, h, w, groups, ci]
};

struct GroupedConv2dDw {
  GroupedSizes sizes;
  const void* dy;  // [n, ho, wo, groups, co]
  const void* x;   // [n, h, w, groups, ci]
  void* dw;        // [groups * co, ci, kh, kw], dw_strides apart
  int64_t dw_strides[4];
  void* partial;  // sums over parts of the images, added in order
};

// Functions are static: what the variants of the kernels do not inline must not be shared among them.
namespace cpu {
// A group's pixels are staged, zeros around them: copied to blocks of a cache line of steps. A step is what one product
// takes: one channel, or two of bfloat16 where rounds_to_bf16_by_instruction.
constexpr int64_t kBlockBytes = 64, kWideLanes = 16;  // vectors of any instruction set divide these

static constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static constexpr int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -ceil_div(-a, b); }
static constexpr int64_t output_size(int64_t size, int64_t kernel, int64_t stride, int64_t pads, int64_t dilation) {
  return floor_div(size + pads - dilation * (kernel - 1) - 1, stride) + 1;
}
static constexpr int64_t acc_size(const GroupedSizes& s) { return s.dtype == DType::kFloat64 ? 8 : 4; }
static inline bool in_pairs(const GroupedSizes& s) {
  return s.dtype == DType::kBFloat16 && rounds_to_bf16_by_instruction;
}

// Rows or columns. The outputs stand in phases, of which each meets other taps: `stride` of them for dx, one for y.
struct Line {
  int64_t in, out, kernel, stride, before, dilation;
  bool transposed;

  constexpr int64_t phases() const { return transposed ? stride : 1; }
  constexpr int64_t outputs(int64_t phase) const { return std::max<int64_t>(0, ceil_div(out - phase, phases())); }
  // Inputs from an output of a phase to the next, and those that the first output meets at most.
  constexpr int64_t step() const { return transposed ? 1 : stride; }
  constexpr int64_t low() const { return transposed ? floor_div(before - (kernel - 1) * dilation, stride) : -before; }
  constexpr int64_t high() const {
    return transposed ? (stride - 1 + before) / stride : (kernel - 1) * dilation - before;
  }
  constexpr int64_t inputs(int64_t outputs) const { return (outputs - 1) * step() + high() - low() + 1; }
  // f(tap, input of the phase's first output)
  template <class F>
  void each_tap(int64_t phase, F&& f) const {
    for (int64_t k = 0; k < kernel; ++k) {
      const int64_t at = transposed ? phase + before - k * dilation : k * dilation - before;
      if (!transposed) {
        f(k, at);
      } else if (at % stride == 0) {
        f(k, at / stride);
      }
    }
  }
};

static constexpr Line rows_of(const GroupedSizes& s, bool transposed) {
  return {transposed ? s.ho : s.h, transposed ? s.h : s.ho, s.kh, s.sh, s.top, s.dil_h, transposed};
}
static constexpr Line cols_of(const GroupedSizes& s, bool transposed) {
  return {transposed ? s.wo : s.w, transposed ? s.w : s.wo, s.kw, s.sw, s.left, s.dil_w, transposed};
}
// What is staged of a row, each column behind the one that the next output meets: [col % step][col / step].
static constexpr int64_t staged_cols(const Line& cols) { return ceil_div(cols.inputs(cols.outputs(0)), cols.step()); }

// ---- y and dx: items are bands of rows of sets of groups ----

constexpr int64_t kBandBytes = 24 << 10;  // staged at a time

static constexpr int64_t in_channels(const GroupedConv2d& a) { return a.transposed ? a.sizes.co : a.sizes.ci; }
static constexpr int64_t out_channels(const GroupedConv2d& a) { return a.transposed ? a.sizes.ci : a.sizes.co; }
static inline int64_t steps(const GroupedConv2d& a) { return ceil_div(in_channels(a), in_pairs(a.sizes) ? 2 : 1); }
static inline int64_t blocks(const GroupedConv2d& a) { return ceil_div(steps(a) * acc_size(a.sizes), kBlockBytes); }
// Groups whose pixels share a block.
static inline int64_t set_groups(const GroupedConv2d& a) {
  const int64_t block = kBlockBytes / acc_size(a.sizes);
  return in_channels(a) % (in_pairs(a.sizes) ? 2 : 1) == 0 && block % steps(a) == 0 ? block / steps(a) : 1;
}
static inline int64_t sets(const GroupedConv2d& a) { return ceil_div(a.sizes.groups, set_groups(a)); }
static inline int64_t staged_row_bytes(const GroupedConv2d& a) {
  const Line cols = cols_of(a.sizes, a.transposed);
  return cols.step() * staged_cols(cols) * blocks(a) * kBlockBytes;
}
static inline int64_t bands(const GroupedConv2d& a) {
  const Line rows = rows_of(a.sizes, a.transposed);
  const int64_t more = kBandBytes / staged_row_bytes(a) - rows.inputs(1);
  return ceil_div(rows.outputs(0), 1 + std::max<int64_t>(0, more / rows.step()));
}
static inline int64_t items(const GroupedConv2d& a) { return a.sizes.n * bands(a) * sets(a); }
// Bytes of `packed`: [group][panel of vectors][phase][block][tap][step][vector][lane].
static inline int64_t packed_size(const GroupedConv2d& a) {
  const int64_t lanes = ceil_div(out_channels(a), kWideLanes) * kWideLanes;
  return a.sizes.groups * a.sizes.kh * a.sizes.kw * steps(a) * lanes * acc_size(a.sizes);
}
// Bytes of working memory per thread: a band, the taps, and a tile.
static inline int64_t grouped_conv2d_scratch(const GroupedConv2d& a) {
  const Line rows = rows_of(a.sizes, a.transposed);
  const int64_t most = ceil_div(rows.outputs(0), bands(a));
  return rows.inputs(most) * staged_row_bytes(a) + 16 * a.sizes.kh * a.sizes.kw * blocks(a) + 8192;
}

// Items: groups. Writes packed.
template <Isa I>
void grouped_conv2d_pack(const GroupedConv2d& a, int64_t begin, int64_t end);
// Items: items(a). Writes out.
template <Isa I>
void grouped_conv2d(const GroupedConv2d& a, void* scratch, int64_t begin, int64_t end);

// ---- dw: the images are shared out over parts, each with its own sums. All of it depends on the shapes alone, so
// results do not depend on the number of threads ----

constexpr int64_t kPartPixels = 1024, kMostParts = 32;
constexpr int64_t kLeastChain = 96;  // products of a sum in a register, about

// A step is a pixel, or two of bfloat16: of a row of y, or of two as a pair.
static inline int64_t step_rows(const GroupedSizes& s) { return in_pairs(s) ? 2 : 1; }
static inline int64_t row_steps(const GroupedSizes& s) { return ceil_div(s.ho, step_rows(s)); }
static inline int64_t dw_bands(const GroupedSizes& s) {
  return ceil_div(row_steps(s), ceil_div(kLeastChain, std::max<int64_t>(1, s.wo)));
}
static inline int64_t parts(const GroupedSizes& s) {
  const int64_t all = s.n * dw_bands(s), wanted = s.n * s.ho * s.wo / kPartPixels;
  return std::max<int64_t>(1, std::min({all, wanted, kMostParts}));
}
static inline int64_t dw_set_groups(const GroupedSizes& s) {
  const int64_t block = kBlockBytes / acc_size(s);
  return block % s.ci == 0 ? block / s.ci : 1;
}
static inline int64_t dw_sets(const GroupedSizes& s) { return ceil_div(s.groups, dw_set_groups(s)); }
// Elements of acc in `partial`: [part][group][ky][kx][o][i].
static constexpr int64_t partial_pitch(const GroupedSizes& s) { return ceil_div(s.ci, kWideLanes) * kWideLanes; }
static constexpr int64_t group_sums(const GroupedSizes& s) { return s.kh * s.kw * s.co * partial_pitch(s); }
static inline int64_t partial_size(const GroupedSizes& s) { return parts(s) * s.groups * group_sums(s); }
// Elements staged of x and of dy, [block][row][col]; and bytes of working memory per thread.
static inline int64_t staged_x_rows(const GroupedSizes& s) {
  const int64_t most = ceil_div(row_steps(s), dw_bands(s));
  return (most - 1) * step_rows(s) * s.sh + (s.kh - 1) * s.dil_h + 1;
}
static inline int64_t staged_blocks(const GroupedSizes& s, int64_t channels) {
  return ceil_div(dw_set_groups(s) * channels * acc_size(s), kBlockBytes);
}
static inline int64_t grouped_conv2d_dw_scratch(const GroupedSizes& s) {
  const Line cols = cols_of(s, false);
  const int64_t most = ceil_div(row_steps(s), dw_bands(s));
  const int64_t x = staged_blocks(s, s.ci) * staged_x_rows(s) * cols.step() * staged_cols(cols);
  return kBlockBytes * (x + staged_blocks(s, s.co) * most * s.wo + 1);
}

// Items: parts * sets. Writes partial.
template <Isa I>
void grouped_conv2d_dw(const GroupedConv2dDw& a, void* scratch, int64_t begin, int64_t end);
// Items: groups. Writes dw.
template <Isa I>
void grouped_conv2d_dw_finish(const GroupedConv2dDw& a, int64_t begin, int64_t end);
}  // namespace cpu

}  // namespace fusedtrain

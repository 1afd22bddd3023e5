#pragma once
// depthwise_conv2d: every channel convolved with its own m kernels; output channel co = ci * m + j reads channel ci.
//
//   y[co, oy, ox]  = act(bias[co] + sum_{ky, kx} weight[co, ky, kx] * x[ci, oy * sh + ky * dil_h - top, ox * sw + ...])
//   dx[ci, iy, ix] = sum_j sum_{ky, kx: oy * sh + ky * dil_h - top = iy, ...} weight[co, ky, kx] * dy[co, oy, ox]
//   dw[co, ky, kx] = sum_{n, oy, ox} dy[co, oy, ox] * x[ci, oy * sh + ky * dil_h - top, ox * sw + kx * dil_w - left]
//   db[co]         = sum_{n, oy, ox} dy[co, oy, ox]
//
// x is zero outside the image. act belongs to inference: the backward pass is that of the convolution alone.
// acc is the accumulation type: float, double for kFloat64; each output is rounded once.
#include <algorithm>

#include "core/isa.h"
#include "core/types.h"

namespace fusedtrain {

struct DepthwiseSizes {
  int64_t n, c, h, w;         // x
  int64_t m;                  // channel multiplier: y has c * m channels
  int64_t ho, wo;             // y
  int64_t kh, kw;             // kernel
  int64_t sh, sw;             // stride
  int64_t top, left;          // padding before; that behind is whatever ho and wo need
  int64_t dil_h, dil_w;       // dilation
  DType dtype;                // of all tensors
  Layout layout;              // of x, y and their gradients
  bool whole_pixels = false;  // on the CPU: a unit of work has all channels of its pixels, or many
};

struct DepthwiseConv2d {
  DepthwiseSizes sizes;
  Activation act;      // kIdentity, kRelu, kSilu, kGelu, kHardSwish or kRelu6
  const void* x;       // [n, c, h, w] or [n, h, w, c]
  const void* weight;  // [c * m, kh, kw]
  const void* bias;    // [c * m] or null
  void* y;             // [n, c * m, ho, wo] or [n, ho, wo, c * m]
  // [n * bands, 3, c], or null: shift, sum (y - shift), sum (y - shift)^2 of each band of rows. On the CPU only, where
  // depthwise_conv2d_gathers_moments.
  float* moments;
};

struct DepthwiseConv2dBackward {
  DepthwiseSizes sizes;
  const void* dy;      // as y
  const void* x;       // [n, c, h, w] or [n, h, w, c]
  const void* weight;  // [c * m, kh, kw]
  void* dx;            // as x, or null
  void* dw;            // [c * m, kh, kw], or null
  void* db;            // [c * m], or null
  void* partial;       // sums of parts of the images, added in order; each backend has its own size for it
};

namespace cpu {
// The kernels work on blocks of as many channels as a vector has lanes. A unit of work is a chunk of blocks of a band
// of rows, small enough to stay in L2: its memory is read in long runs, though each block takes only a line of every
// pixel. This partition depends on the shapes alone, so results do not depend on the number of threads.
constexpr int64_t kMostLanes = 32;                 // channels of a block, of any instruction set
constexpr int64_t kChunkChannels = 128;            // channels_last
constexpr int64_t kChunkPlanes = 32;               // contiguous: a plane is read in long runs by itself
constexpr int64_t kUnitBytes = 256 << 10;          // of x in float32
constexpr int64_t kLeastRows = 4, kMostRows = 32;  // of y per band
constexpr int64_t kTileCols = 128;                 // columns of y per tile, at most
constexpr int64_t kStreamBytes = 8 << 20;          // of y or dx, from which on they are written past the caches
constexpr int64_t kLineBytes = 64;                 // of the caches
constexpr int64_t kMostWholeChannels = 512;        // of pixels whose results go through lines
constexpr int64_t kMostUnitChannels = 2048;        // of a unit of whole pixels
constexpr int64_t kUnitRowBytes = 96 << 10;        // of x in float32, in such a unit: a few rows are to stay in L2

static constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static constexpr int64_t padded_channels(const DepthwiseSizes& s) { return ceil_div(s.c, kMostLanes) * kMostLanes; }
// What the direct kernels are made for (cpu/depthwise_conv2d_direct.cpp).
static constexpr bool is_usual(const DepthwiseSizes& s) {
  const bool square = s.kh == s.kw && (s.kh == 3 || s.kh == 5 || s.kh == 7);
  return square && s.m == 1 && s.sh == s.sw && s.sh <= 2 && s.dil_h == 1 && s.dil_w == 1 &&
         (s.dtype == DType::kFloat32 || s.dtype == DType::kBFloat16);
}
// Whether a unit has all channels of its pixels: by the CPU, or because results that go past the caches go in whole
// lines, and pixels are none.
static constexpr bool has_whole_pixels(const DepthwiseSizes& s) {
  const int64_t size = s.dtype == DType::kFloat32 ? 4 : 2;
  if (s.whole_pixels) return true;
  return is_usual(s) && s.layout == Layout::kChannelsLast && s.c <= kMostWholeChannels &&
         s.c * size % kLineBytes != 0 && s.n * s.c * std::max(s.h * s.w, s.ho * s.wo) * size >= kStreamBytes;
}
// Small kernels of contiguous images that keep the columns, or halve them, have their own code, which takes rows where
// they are (cpu/depthwise_planes.h).
constexpr int64_t kMostPlaneCols = 512;  // of planes whose bands are unpacked whole
static constexpr bool keeps_columns(const DepthwiseSizes& s) {
  const bool usual = s.layout == Layout::kContiguous && s.m == 1 && s.dil_h == 1 && s.dil_w == 1;
  const bool square = s.kh == s.kw && s.sh == s.sw && s.left == s.kw / 2 && s.wo == ceil_div(s.w, s.sw);
  const bool keeps = s.sh == 1 && s.kh == 3, halves = s.sh == 2 && s.top == s.left && (s.kh == 3 || s.kh == 5);
  return usual && square && (keeps || halves) && s.w <= kMostPlaneCols && s.dtype != DType::kFloat64;
}
// Whether a unit has whole planes, which are then read and written in order: where that code runs with any instruction
// set.
static constexpr bool has_whole_planes(const DepthwiseSizes& s) {
  return keeps_columns(s) && s.wo >= (s.sh == 2 ? 7 : 12) &&
         (s.dtype == DType::kFloat32 || (s.kw == 3 && s.w % (8 * s.sw) == 0));
}
// Whether pixels of channels_last images share so few sets of the first cache that the lines of neighbours drive out
// each other. Vectors of less than a line then work on copies of a run of each pixel
// (cpu/depthwise_conv2d_copied.cpp). For small kernels on two sets these cost more than they gain (benchmarks/LOG.md,
// 2026-11-30).
constexpr int64_t kRunBytes = 256;
static constexpr bool pixels_collide(const DepthwiseSizes& s) {
  const int64_t pitch = s.c * (s.dtype == DType::kFloat32 ? 4 : 2);
  return is_usual(s) && s.layout == Layout::kChannelsLast && !s.whole_pixels && pitch % (s.kh < 5 ? 4096 : 2048) == 0 &&
         std::max(s.w, s.wo) <= kMostPlaneCols;
}
static constexpr int64_t chunk_channels(const DepthwiseSizes& s) {
  if (s.whole_pixels) {
    const int64_t most = std::clamp(kUnitRowBytes / (4 * s.w), kChunkChannels, kMostUnitChannels);
    return ceil_div(s.c, ceil_div(s.c, most));
  }
  if (has_whole_pixels(s)) return s.c;
  if (has_whole_planes(s))
    return std::clamp<int64_t>(kUnitBytes / (4 * std::max<int64_t>(1, s.h) * s.w), 1, std::min(s.c, kChunkPlanes));
  return std::min(s.c, s.layout == Layout::kContiguous ? kChunkPlanes : kChunkChannels);
}
static constexpr int64_t chunks(const DepthwiseSizes& s) { return ceil_div(s.c, chunk_channels(s)); }
// Units of whole pixels are enough for many threads, and no more: neighbours read some rows twice. Where they would be
// few, chunks of channels are more.
static constexpr int64_t whole_bands(const DepthwiseSizes& s) {
  return std::clamp<int64_t>(ceil_div(32, std::max<int64_t>(1, s.n)), 1, std::max<int64_t>(1, s.ho / kLeastRows));
}
static constexpr bool fits_whole_pixels(const DepthwiseSizes& s) {
  return is_usual(s) && s.layout == Layout::kChannelsLast && s.c > 0 && s.w > 0 && s.n * whole_bands(s) >= 16;
}
static constexpr int64_t bands(const DepthwiseSizes& s) {
  if (s.whole_pixels) return whole_bands(s);
  if (has_whole_planes(s)) return std::max<int64_t>(1, 4 * s.h * s.w / kUnitBytes);
  const int64_t row_bytes = 4 * s.sh * std::max<int64_t>(1, s.w) * chunk_channels(s);
  return ceil_div(s.ho, std::clamp(kUnitBytes / row_bytes, kLeastRows, kMostRows));
}
static constexpr int64_t first_row(const DepthwiseSizes& s, int64_t band) { return s.ho * band / bands(s); }

// The bands of all images are shared out over this many groups, each with its own partial sums of dw and db. With the
// chunks of channels they make work for many threads, and a little less than a round number: one item more would make
// some of 16, 32 or 64 threads wait for a second one.
static constexpr int64_t groups(const DepthwiseSizes& s) {
  const int64_t parts = has_whole_pixels(s) ? 1 : ceil_div(s.c, kChunkChannels);
  const int64_t wanted = parts == 1 || s.kh * s.kw > 49 ? 32 : 64;
  return std::max<int64_t>(1, std::min(wanted / std::max<int64_t>(1, parts), s.n * bands(s)));
}

// Elements of acc: the weights by blocks of lanes, and `partial`.
static constexpr int64_t taps_size(const DepthwiseSizes& s) { return padded_channels(s) * s.m * s.kh * s.kw; }
static constexpr int64_t partial_size(const DepthwiseSizes& s) {
  return groups(s) * padded_channels(s) * s.m * (s.kh * s.kw + 1);
}
// Bytes of working memory per thread, at most: the rows that one row of output reads, a buffer for it, and sums.
constexpr int64_t kVecBytesMost = 64;    // of any instruction set
constexpr int64_t kRowBytes = 24 << 10;  // more rows than needed are kept only up to here
constexpr int64_t kMostSteps = 16;       // rows of output made at a time, at most
static constexpr int64_t depthwise_planes_scratch(const DepthwiseSizes& s) {
  if (s.layout != Layout::kContiguous || std::max(s.w, s.wo) > kMostPlaneCols || std::max(s.sh, s.sw) > 2) return 0;
  const int64_t row = s.sw * (std::max(ceil_div(s.w, s.sw), s.wo) + s.left + s.kw + 4 * kMostLanes);
  // Of dx the rows of dy lie up to s.top behind those of the band.
  return 2 * ((kMostRows + 8) * s.sh + 2 * s.kh + s.top + 8) * (4 * row + 8) + 4096;
}
static constexpr int64_t depthwise_copied_scratch(const DepthwiseSizes& s) {
  const bool transposed = s.layout == Layout::kContiguous && std::max(s.w, s.wo) <= kMostPlaneCols;
  if (!transposed && !pixels_collide(s)) return 0;
  const int64_t rows = ceil_div(s.ho, bands(s)) + 2 * s.kh + 4;
  const int64_t padding = std::max(s.top, (s.ho - 1) * s.sh + s.kh - s.h);  // between the rows of dy for dx and for dw
  return (transposed ? kVecBytesMost : kRunBytes) * (s.sh * rows * s.w + (rows + padding) * s.wo);
}
static constexpr int64_t depthwise_conv2d_scratch(const DepthwiseSizes& s) {
  const int64_t span_h = (s.kh - 1) * s.dil_h + 2, span_w = (s.kw - 1) * s.dil_w + 2;
  const int64_t cols = std::min(std::max(s.wo, s.w / s.sw + 1), kTileCols + 1);
  const int64_t row = ((cols + 8) * s.sw + span_w) * kVecBytesMost;
  const int64_t ring = kRowBytes + (span_h + 1) * (row + 8) + kMostSteps * s.sh * 8 + 1024;
  const int64_t channels = std::max(kChunkChannels, has_whole_pixels(s) ? padded_channels(s) : 0);
  const int64_t weights = channels * std::min<int64_t>(s.kh * s.kw, 49) * 4;  // rearranged, where k <= 7
  return weights + s.m * ring + kMostSteps * cols * kVecBytesMost + row + (s.sh + s.sw) * 64 +
         s.m * (s.kh * s.kw + 1) * kVecBytesMost + 4096 +
         std::max(depthwise_planes_scratch(s), depthwise_copied_scratch(s));
}

// The number of blocks of channels.
template <Isa I>
int64_t depthwise_conv2d_blocks(const DepthwiseSizes& s);
// Items: blocks.
template <Isa I>
void depthwise_conv2d_taps(const DepthwiseSizes& s, const void* weight, void* taps, int64_t begin, int64_t end);
// Whether depthwise_conv2d writes `moments`.
template <Isa I>
bool depthwise_conv2d_gathers_moments(const DepthwiseSizes& s);
// Items: n * chunks * bands.
template <Isa I>
void depthwise_conv2d(const DepthwiseConv2d& a, const void* taps, void* scratch, int64_t begin, int64_t end);
// Items: groups * chunks. Writes dx, and partial where dw or db is wanted.
template <Isa I>
void depthwise_conv2d_backward(const DepthwiseConv2dBackward& a, const void* taps, void* scratch, int64_t begin,
                               int64_t end);
// Items: blocks. Writes dw and db.
template <Isa I>
void depthwise_conv2d_backward_finish(const DepthwiseConv2dBackward& a, int64_t begin, int64_t end);
}  // namespace cpu

namespace cuda {
// Elements of acc in `partial`.
int64_t depthwise_conv2d_partial_size(const DepthwiseSizes& s);
[[nodiscard]] int depthwise_conv2d(const DepthwiseConv2d& a, void* stream);
[[nodiscard]] int depthwise_conv2d_dx(const DepthwiseConv2dBackward& a, void* stream);
[[nodiscard]] int depthwise_conv2d_dw(const DepthwiseConv2dBackward& a, void* stream);  // and db
}  // namespace cuda

}  // namespace fusedtrain

#pragma once
// pointwise_conv2d: every pixel's channels mixed; kernels of 1x1, stride (sh, sw), no padding.
//
//   y[n, o, y, x] = b[o] + sum_c w[o, c] * x[n, c, y * sh, x * sw]
//   dw[o, c] = sum_{n, y, x} dy[n, o, y, x] * x[n, c, y * sh, x * sw]
//
// While y is at hand its sums per channel can be gathered, for the batch normalisation behind it.
// Products of matrices whose rows are pixels; for most layers the second has long sums, and less arithmetic than memory
// traffic. The gradient of x is a product of the first kind, without a stride.
// acc is the accumulation type: float, double for kFloat64; dw is rounded once.
#include <algorithm>

#include "core/isa.h"
#include "core/types.h"

namespace fusedtrain {

// Where a tensor has the pixels of y or dy, in elements; any strides.
struct PixelStrides {
  int64_t image, row, col, channel;
};

struct PointwiseConv2d {
  int64_t n, c, o, h, w;  // h and w of y
  DType dtype;            // of x, weight, bias and y: kFloat32, or kBFloat16 where rounds_to_bf16_by_instruction
  Layout layout;          // of y; contiguous images are made of contiguous ones with a weight [o, c] without gaps
  PixelStrides x_strides;
  const void* x;       // [n, c, h, w] under its strides: the pixels that y is made of
  const void* weight;  // [o, c], weight_strides apart
  int64_t weight_strides[2];
  const float* bias;  // [o], or null
  void* packed;       // the weight as the kernel reads it, for channels_last images
  void* y;            // [n, h, w, o] or [n, o, h, w]
  float* moments;     // [pixel_blocks, 3, o], or null: shift, sum (y - shift), sum (y - shift)^2; channels_last only
  bool large;         // y leaves the caches before anyone reads it; set for the whole of it when parts are made
};

struct PointwiseConv2dDw {
  int64_t n, c, o, h, w;  // h and w of dy
  DType dtype;            // of dy, x and dw
  PixelStrides dy_strides, x_strides;
  const void* dy;  // [n, o, h, w]
  const void* x;   // [n, c, h, w] under its strides: the pixels that meet one of dy
  void* dw;        // [o, c]
  void* partial;   // sums over parts of the pixels, added in order
  bool adds;       // to what partial holds of earlier pixels; of at most kGroupPixels, which count as one group
};

namespace cpu {
constexpr int64_t kWideLanes = 16;  // vectors of any instruction set divide this

constexpr int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }
constexpr int64_t chunks(int64_t count, int64_t most) { return (count + most - 1) / most; }

// ---- y: pixels are taken in blocks small enough for L2, of whole tiles of any height. In contiguous images those are
// strips of an image, packed as the weight of channels_last images is ----

constexpr int64_t kBlockBytes = 256 << 10, kTilePixels = 24, kMostPixels = 96, kLargeBytes = 8 << 20;
constexpr int64_t kStripPixels = 64;

constexpr int64_t element_bytes(const PointwiseConv2d& a) { return a.dtype == DType::kFloat32 ? 4 : 2; }
constexpr int64_t bytes_per_pixel(const PointwiseConv2d& a) { return a.c * element_bytes(a); }
constexpr int64_t block_pixels(const PointwiseConv2d& a) {
  const int64_t fit = kBlockBytes / std::max<int64_t>(1, bytes_per_pixel(a));
  return std::clamp(fit / kTilePixels * kTilePixels, kTilePixels, kMostPixels);
}
constexpr int64_t pixel_blocks(const PointwiseConv2d& a) { return chunks(a.n * a.h * a.w, block_pixels(a)); }
// Bytes of packed columns, output channels or pixels: [vector][step][lane]; a step is one channel in float32, or two in
// bfloat16.
constexpr int64_t packed_size(const PointwiseConv2d& a, int64_t columns) {
  return round_up(columns, kWideLanes) * (a.dtype == DType::kFloat32 ? a.c : chunks(a.c, 2)) * 4;
}
// Pixels of an image that are whole vectors, and of its strips, which are nearly the same size: few images have more,
// for many threads. The rest of all images makes strips of its own.
constexpr int64_t whole_pixels(const PointwiseConv2d& a) { return a.h * a.w / kWideLanes * kWideLanes; }
constexpr int64_t strip_pixels(const PointwiseConv2d& a) {
  const int64_t most =
      std::clamp(kBlockBytes / std::max<int64_t>(1, bytes_per_pixel(a)), kStripPixels, 8 * kStripPixels);
  const int64_t shared = std::min(chunks(128, std::max<int64_t>(1, a.n)), whole_pixels(a) / kStripPixels);
  const int64_t count = std::max<int64_t>({1, chunks(whole_pixels(a), most), shared});
  return std::max(kWideLanes, round_up(chunks(whole_pixels(a), count), kWideLanes));
}
constexpr int64_t strips(const PointwiseConv2d& a) {
  return a.n * chunks(whole_pixels(a), strip_pixels(a)) + chunks(a.n * (a.h * a.w - whole_pixels(a)), kStripPixels);
}
// Blocks and strips are shared out over threads by output channels too, in so many parts.
constexpr int64_t kPartOutputs = 24;
constexpr int64_t output_parts(const PointwiseConv2d& a) {
  return a.layout == Layout::kContiguous ? std::max<int64_t>(1, a.o / kPartOutputs) : chunks(a.o, kPartOutputs);
}
constexpr int64_t pointwise_conv2d_items(const PointwiseConv2d& a) {
  return (a.layout == Layout::kContiguous ? strips(a) : pixel_blocks(a)) * output_parts(a);
}
// Bytes of working memory per thread: a packed strip, and channels of pixels before and after; or the moments of a
// block of pixels, and the block itself.
constexpr int64_t moments_pitch(const PointwiseConv2d& a) { return a.moments ? round_up(a.o, kWideLanes) : 0; }
constexpr int64_t pointwise_conv2d_scratch(const PointwiseConv2d& a) {
  if (a.layout == Layout::kContiguous) {
    return packed_size(a, std::max(strip_pixels(a), kStripPixels)) +
           kStripPixels * std::max(a.c, a.o) * element_bytes(a);
  }
  return 3 * 4 * moments_pitch(a) + block_pixels(a) * bytes_per_pixel(a);
}

// Items: output channels, by kWideLanes. Writes packed; not for contiguous images.
template <Isa I>
void pointwise_conv2d_pack(const PointwiseConv2d& a, int64_t begin, int64_t end);
// Items: blocks or strips of pixels, by output_parts. Writes y and moments, whose bits do not depend on how the items
// are shared out.
template <Isa I>
void pointwise_conv2d(const PointwiseConv2d& a, void* scratch, int64_t begin, int64_t end);

// ---- dw: the channels of one operand, the wide one, lie along vectors; those of the other, the narrow one, are
// broadcast. All of it depends on the shapes alone, so results do not depend on the number of threads ----

constexpr int64_t kMostChunk = 576;  // channels of an operand that are worked on together
constexpr int64_t kPartWide = 48;    // of the wide one that threads share out
constexpr int64_t kSteps = 128;      // at most of a block, each of a pixel, or of two as a pair
constexpr int64_t kGroupPixels = 1024, kMostGroups = 32;

constexpr bool wide_is_dy(const PointwiseConv2dDw& a) {
  const int64_t dy_waste = round_up(a.o, kWideLanes) * a.c, x_waste = round_up(a.c, kWideLanes) * a.o;
  return dy_waste < x_waste || (dy_waste == x_waste && a.o > a.c);
}
constexpr int64_t wide_channels(const PointwiseConv2dDw& a) { return wide_is_dy(a) ? a.o : a.c; }
constexpr int64_t narrow_channels(const PointwiseConv2dDw& a) { return wide_is_dy(a) ? a.c : a.o; }

// The pixels are shared out over this many groups, each with its own sums.
constexpr int64_t groups(const PointwiseConv2dDw& a) {
  const int64_t pixels = a.n * a.h * a.w;
  return pixels == 0 ? 0 : std::min(round_up(pixels, kGroupPixels) / kGroupPixels, kMostGroups);
}
// A group's wide channels in parts, and its units of work: those of each chunk of narrow channels. A thread takes
// neighbours together.
constexpr int64_t wide_parts(const PointwiseConv2dDw& a) { return std::max<int64_t>(1, wide_channels(a) / kPartWide); }
constexpr int64_t narrow_chunks(const PointwiseConv2dDw& a) { return chunks(narrow_channels(a), kMostChunk); }
constexpr int64_t units(const PointwiseConv2dDw& a) { return groups(a) * narrow_chunks(a) * wide_parts(a); }
constexpr int64_t finish_rows(const PointwiseConv2dDw& a) { return chunks(narrow_channels(a), kWideLanes); }

// Elements of acc in `partial`: [group][narrow channel][wide channel].
constexpr int64_t partial_pitch(const PointwiseConv2dDw& a) { return round_up(wide_channels(a), kWideLanes); }
constexpr int64_t partial_size(const PointwiseConv2dDw& a) { return groups(a) * narrow_channels(a) * partial_pitch(a); }
// Bytes of working memory per thread: the steps of a block as vectors, of three of the wide and all of the narrow side.
constexpr int64_t pointwise_conv2d_dw_scratch(const PointwiseConv2dDw& a) {
  const int64_t narrow = std::min(narrow_channels(a), kMostChunk);
  return kSteps * (3 * 64 + round_up(narrow, kWideLanes) * (a.dtype == DType::kFloat64 ? 8 : 4));
}

// Items: units. Writes partial.
template <Isa I>
void pointwise_conv2d_dw(const PointwiseConv2dDw& a, void* scratch, int64_t begin, int64_t end);
// Items: finish_rows, kWideLanes narrow channels each, by wide_parts. Writes dw.
template <Isa I>
void pointwise_conv2d_dw_finish(const PointwiseConv2dDw& a, int64_t begin, int64_t end);

// ---- dx and dw of a dy that is made on the way: so many pixels of it at a time ----

constexpr int64_t kMadeBytes = 384 << 10;

constexpr int64_t made_pixels(const PointwiseConv2d& dx) {
  const int64_t fit = kMadeBytes / std::max<int64_t>(1, bytes_per_pixel(dx));
  return std::clamp(fit / kMostPixels * kMostPixels, kMostPixels, kGroupPixels / kMostPixels * kMostPixels);
}
}  // namespace cpu

}  // namespace fusedtrain

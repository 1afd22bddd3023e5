// Tensors -> DepthwiseConv2d -> kernels.
#include "bindings/depthwise_gradients.h"
#include "bindings/operators.h"
#include "bindings/scratch.h"

namespace fusedtrain::bindings {
namespace {

// Output length along one dimension.
int64_t output_size(int64_t size, int64_t k, int64_t stride, int64_t pads, int64_t dilation) {
  const int64_t room = size + pads - dilation * (k - 1) - 1;
  return room < 0 ? 0 : room / stride + 1;
}

DepthwiseSizes sizes_of(const Tensor& x, const Tensor& weight, const Ints& stride, const Ints& padding,
                        const Ints& dilation) {
  const Images images = images_of(x, 0);
  STD_TORCH_CHECK(weight.dim() == 4 && weight.size(1) == 1 && images.c > 0 && weight.size(0) % images.c == 0 &&
                      weight.numel() > 0 && weight.is_contiguous() && weight.scalar_type() == x.scalar_type() &&
                      weight.get_device() == x.get_device(),
                  "fusedtrain: weight must be a dense [C * m, 1, kh, kw] with the dtype and device of x");
  STD_TORCH_CHECK(stride.size() == 2 && padding.size() == 4 && dilation.size() == 2 &&
                      std::min({stride[0], stride[1], dilation[0], dilation[1]}) > 0,
                  "fusedtrain: two strides, four paddings and two dilations expected");
  const DepthwiseSizes s{.n = images.n,
                         .c = images.c,
                         .h = x.size(2),
                         .w = x.size(3),
                         .m = weight.size(0) / images.c,
                         .ho = output_size(x.size(2), weight.size(2), stride[0], padding[2] + padding[3], dilation[0]),
                         .wo = output_size(x.size(3), weight.size(3), stride[1], padding[0] + padding[1], dilation[1]),
                         .kh = weight.size(2),
                         .kw = weight.size(3),
                         .sh = stride[0],
                         .sw = stride[1],
                         .top = padding[2],
                         .left = padding[0],
                         .dil_h = dilation[0],
                         .dil_w = dilation[1],
                         .dtype = images.dtype,
                         .layout = images.layout};
  STD_TORCH_CHECK(s.ho > 0 && s.wo > 0, "fusedtrain: the kernel does not fit into the padded image");
  return s;
}

bool is_channels_last(const Tensor& t) {
  const int64_t c = t.size(1), h = t.size(2), w = t.size(3), wanted[4] = {h * w * c, 1, w * c, c};
  for (int d = 0; d < 4; ++d) {
    if (t.size(d) != 1 && t.stride(d) != wanted[d]) return t.numel() == 0;
  }
  return true;
}

// The weights by blocks of lanes.
Tensor taps_of(const DepthwiseSizes& s, const Tensor& weight) {
  const Tensor taps = empty_acc(weight, {cpu::taps_size(s)});
  visit_isa([&]<Isa I>() {
    const int64_t blocks = cpu::depthwise_conv2d_blocks<I>(s);
    cpu::depthwise_conv2d_taps<I>(s, weight.const_data_ptr(), taps.mutable_data_ptr(), 0, blocks);
  });
  return taps;
}

// f<I>(scratch, begin, end) over parts of [first, last), out of `items`.
template <class F>
void parallel_units(const DepthwiseSizes& s, int64_t items, int64_t first, int64_t last, F&& f) {
  const int64_t work = s.n * s.c * (s.h * s.w + s.m * s.ho * s.wo * s.kh * s.kw / 8) / std::max<int64_t>(1, items);
  parallel_items(first, last, work, [&]<Isa I>(int64_t begin, int64_t end) {
    const Scratch scratch(cpu::depthwise_conv2d_scratch(s));
    f.template operator()<I>(scratch.data(), begin, end);
  });
}

}  // namespace

DepthwiseSizes depthwise_sizes(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                               const Ints& stride, const Ints& padding, const Ints& dilation) {
  const DepthwiseSizes s = sizes_of(x, weight, stride, padding, dilation);
  STD_TORCH_CHECK(!bias || (bias->numel() == s.c * s.m && bias->is_contiguous() &&
                            bias->scalar_type() == x.scalar_type() && bias->get_device() == x.get_device()),
                  "fusedtrain: bias must be a dense [C * m] with the dtype and device of x");
  return s;
}

namespace {

// The sizes of an op that reads its images once: the forward pass, or dx alone. Zen 4 gains by whole pixels where these
// have several chunks of channels and the kernel is small, unless results go past the caches in lines.
DepthwiseSizes of_one_pass(DepthwiseSizes s) {
  const bool few_taps = s.kh == 3 || (s.kh == 5 && s.dtype == DType::kBFloat16);
  const bool many = takes_many_whole_pixels && few_taps && s.c > cpu::kChunkChannels && !cpu::has_whole_pixels(s);
  s.whole_pixels = (takes_whole_pixels || many) && cpu::fits_whole_pixels(s);
  return s;
}

DepthwiseConv2d forward_of(const DepthwiseSizes& s, const Tensor& x, const Tensor& weight,
                           const std::optional<Tensor>& bias, const Tensor& y, int64_t act) {
  return {.sizes = s,
          .act = input_activation_of("act", act),
          .x = x.const_data_ptr(),
          .weight = weight.const_data_ptr(),
          .bias = bias ? bias->const_data_ptr() : nullptr,
          .y = y.mutable_data_ptr(),
          .moments = nullptr};
}

void forward_on_cpu(const DepthwiseConv2d& a, const Tensor& weight) {
  const DepthwiseSizes& s = a.sizes;
  const Tensor taps = taps_of(s, weight);
  const int64_t items = s.n * cpu::chunks(s) * cpu::bands(s);
  parallel_units(s, items, 0, items, [&]<Isa I>(void* scratch, int64_t begin, int64_t end) {
    cpu::depthwise_conv2d<I>(a, taps.const_data_ptr(), scratch, begin, end);
  });
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> depthwise_conv2d_stats(const Tensor& x, const Tensor& weight,
                                                          const std::optional<Tensor>& bias, const Ints& stride,
                                                          const Ints& padding, const Ints& dilation) {
  const DepthwiseSizes s = of_one_pass(depthwise_sizes(x, weight, bias, stride, padding, dilation));
  bool gathers = false;
  visit_isa([&]<Isa I>() { gathers = cpu::depthwise_conv2d_gathers_moments<I>(s); });
  if (!gathers) {
    const Tensor y = depthwise_conv2d(x, weight, bias, stride, padding, dilation, 0);
    return std::tuple_cat(std::tuple(y), batch_norm_act_stats(y));
  }
  const Tensor y = empty_images(x, s.layout, s.c, s.ho, s.wo);
  const int64_t bands = cpu::bands(s);
  const Tensor partial = empty_acc(x, {s.n * bands, 3, s.c});
  DepthwiseConv2d a = forward_of(s, x, weight, bias, y, 0);
  a.moments = static_cast<float*>(data_or_null(partial));
  forward_on_cpu(a, weight);
  Ints sizes(s.n * bands);
  for (int64_t i = 0; i < s.n * bands; ++i) {
    sizes[i] = (cpu::first_row(s, i % bands + 1) - cpu::first_row(s, i % bands)) * s.wo;
  }
  return std::tuple_cat(std::tuple(y), batch_norm_act_stats_of(partial, sizes));
}

Tensor depthwise_conv2d(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Ints& stride,
                        const Ints& padding, const Ints& dilation, int64_t act) {
  const DepthwiseSizes s = of_one_pass(depthwise_sizes(x, weight, bias, stride, padding, dilation));
  const Tensor y = empty_images(x, s.layout, s.c * s.m, s.ho, s.wo);
  const DepthwiseConv2d a = forward_of(s, x, weight, bias, y, act);
  if constexpr (kWithCuda) {
    if (x.is_cuda()) {
      const CudaLaunch launch("depthwise_conv2d", x);
      launch(cuda::depthwise_conv2d(a, launch.stream));
      return y;
    }
  }
  forward_on_cpu(a, weight);
  return y;
}

namespace {

// Writes dx, partial, dw and db on the CPU; units(groups, f) runs f(dy, begin, end) on parts of all groups.
template <class Units>
void backward(DepthwiseConv2dBackward a, const Tensor& weight, Units&& units) {
  const DepthwiseSizes& s = a.sizes;
  const Tensor taps = taps_of(s, weight);
  const Tensor partial = empty_acc(weight, {a.dw || a.db ? cpu::partial_size(s) : 0});
  a.partial = data_or_null(partial);
  units(cpu::groups(s), [&](const void* dy, int64_t begin, int64_t end) {
    DepthwiseConv2dBackward part = a;
    part.dy = dy;
    const int64_t chunks = cpu::chunks(s);
    parallel_units(s, cpu::groups(s) * chunks, begin * chunks, end * chunks,
                   [&]<Isa I>(void* scratch, int64_t b, int64_t e) {
                     cpu::depthwise_conv2d_backward<I>(part, taps.const_data_ptr(), scratch, b, e);
                   });
  });
  if (a.partial == nullptr) return;
  visit_isa([&]<Isa I>() {
    parallel_items(0, cpu::depthwise_conv2d_blocks<I>(s), cpu::partial_size(s) * cpu::kMostLanes / s.c,
                   [&]<Isa J>(int64_t begin, int64_t end) { cpu::depthwise_conv2d_backward_finish<J>(a, begin, end); });
  });
}

struct Gradients {
  Tensor dx, dw, db;
};

Gradients gradients_of(const Tensor& x, const Tensor& weight, bool need_dx, bool need_dw, bool need_db) {
  return {need_dx ? torch::stable::empty_like(x) : torch::stable::new_empty(x, {0}),
          need_dw ? torch::stable::empty_like(weight) : torch::stable::new_empty(weight, {0}),
          torch::stable::new_empty(weight, {need_db ? weight.size(0) : 0})};
}

DepthwiseConv2dBackward backward_of(const DepthwiseSizes& s, const Tensor& x, const Tensor& weight,
                                    const Gradients& to) {
  return {.sizes = s,
          .dy = nullptr,
          .x = x.const_data_ptr(),
          .weight = weight.const_data_ptr(),
          .dx = data_or_null(to.dx),
          .dw = data_or_null(to.dw),
          .db = data_or_null(to.db),
          .partial = nullptr};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> depthwise_conv2d_backward(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                                             const Ints& stride, const Ints& padding,
                                                             const Ints& dilation, bool need_dx, bool need_dw,
                                                             bool need_db) {
  const DepthwiseSizes sizes = sizes_of(x, weight, stride, padding, dilation);
  const DepthwiseSizes s = need_dw || need_db ? sizes : of_one_pass(sizes);
  STD_TORCH_CHECK(dy.dim() == 4 && dy.size(0) == s.n && dy.size(1) == s.c * s.m && dy.size(2) == s.ho &&
                      dy.size(3) == s.wo && dy.scalar_type() == x.scalar_type() && dy.get_device() == x.get_device(),
                  "fusedtrain: dy must have the shape of y, and the dtype and device of x");
  // dy that is dense in both formats may stand for either.
  STD_TORCH_CHECK(s.layout == Layout::kContiguous ? dy.is_contiguous() : is_channels_last(dy),
                  "fusedtrain: dy must have the memory format of x");
  const Gradients to = gradients_of(x, weight, need_dx, need_dw, need_db);
  DepthwiseConv2dBackward a = backward_of(s, x, weight, to);
  if constexpr (kWithCuda) {
    if (x.is_cuda()) {
      const bool reduces = need_dw || need_db;
      const Tensor partial = empty_acc(x, {reduces ? cuda::depthwise_conv2d_partial_size(s) : 0});
      a.dy = dy.const_data_ptr();
      a.partial = data_or_null(partial);
      const CudaLaunch launch("depthwise_conv2d_backward", x);
      if (need_dx) launch(cuda::depthwise_conv2d_dx(a, launch.stream));
      if (reduces) launch(cuda::depthwise_conv2d_dw(a, launch.stream));
      return {to.dx, to.dw, to.db};
    }
  }
  backward(a, weight, [&](int64_t groups, auto&& run) { run(dy.const_data_ptr(), 0, groups); });
  return {to.dx, to.dw, to.db};
}

namespace {

template <class Library>
void implement(Library& m) {
  m.impl("depthwise_conv2d", TORCH_BOX(&depthwise_conv2d));
  m.impl("depthwise_conv2d_backward", TORCH_BOX(&depthwise_conv2d_backward));
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> depthwise_conv2d_backward_from(const WriteImages& write, const Tensor& x,
                                                                  const Tensor& weight, const Ints& stride,
                                                                  const Ints& padding, const Ints& dilation,
                                                                  bool need_dx, bool need_dw, bool need_db) {
  const DepthwiseSizes sizes = sizes_of(x, weight, stride, padding, dilation);
  const DepthwiseSizes s = need_dw || need_db ? sizes : of_one_pass(sizes);
  const Gradients to = gradients_of(x, weight, need_dx, need_dw, need_db);
  const int64_t image = s.c * s.m * s.ho * s.wo * x.element_size(), units = s.n * cpu::bands(s);
  const int64_t groups = cpu::groups(s), threads = torch::stable::get_num_threads();
  // Group g takes the units from units * g / groups on: the images that [begin, end) of the groups read.
  const auto first = [&](int64_t g) { return units * g / groups / cpu::bands(s); };
  const auto last = [&](int64_t g) { return cpu::ceil_div(units * g / groups, cpu::bands(s)); };
  backward(backward_of(s, x, weight, to), weight, [&](int64_t, auto&& run) {
    const auto in_turn = [&](int64_t begin, int64_t end) {
      int64_t most = 0;
      for (int64_t g = begin; g < end; ++g) most = std::max(most, last(g + 1) - first(g));
      const Scratch dy(std::max<int64_t>(1, most * image));
      for (int64_t g = begin, next = begin; g < end; g = next) {
        while (next < end && (next == g || last(next + 1) <= last(g + 1))) ++next;
        write(first(g), last(g + 1), dy.data());
        run(static_cast<char*>(dy.data()) - first(g) * image, g, next);
      }
    };
    if (threads > 1 && groups >= threads) {
      torch::stable::parallel_for(0, groups, 1, in_turn);
    } else {
      in_turn(0, groups);
    }
  });
  return {to.dx, to.dw, to.db};
}

STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CPU, m) { implement(m); }
#ifdef FUSEDTRAIN_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CUDA, m) { implement(m); }
#endif

}  // namespace fusedtrain::bindings

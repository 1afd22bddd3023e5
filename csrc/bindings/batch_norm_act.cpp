// Tensors -> BatchNormStats, BatchNormUpdate, BatchNormAct, BatchNormReduce, BatchNormBackward -> kernels.
#include "batch_norm_act.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "bindings/norm_vectors.h"
#include "bindings/operators.h"

namespace fusedtrain::bindings {
namespace {

// f<Lane>() for the element type of sums.
template <class F>
void visit_lanes_of(const Tensor& t, F&& f) {
  t.scalar_type() == ScalarType::Double ? f.template operator()<double>() : f.template operator()<float>();
}

// The images as statistics over the batch see them: rows of channels, or planes, in as few samples as the memory
// allows; on the CPU with several rows as one where that makes them whole vectors, and long ones, and an image of small
// planes as one row, in which each pixel of a plane is a column.
struct Batch {
  Images images;
  int64_t fold = 1;
  Fold order = Fold::kRows;

  bool has_planes_as_rows() const { return order == Fold::kPlanes; }
};

// Elements of a row whose sums fill the registers of AVX-512, as 6 or 8 vectors.
constexpr int64_t kRegisterColumns = 128;

// Whether each image of small planes is taken as one row, in which each pixel is a column: planes that fill no vectors,
// in images that are many beside what it takes to repeat vectors and to sum the columns of a channel. With AVX-512 that
// was not measured, and planes of half a vector are taken so (benchmarks/LOG.md, 2026-12-01).
bool takes_planes_as_rows(const Images& m) {
  const bool is_short = m.dtype == DType::kBFloat16 || m.dtype == DType::kFloat16;
  if (active_isa() >= Isa::kAvx512) return m.hw <= 8 && m.n >= m.hw;
  return is_short ? m.hw <= 64 && m.n >= std::min<int64_t>(m.hw, 16) : m.hw <= 36 && m.n >= m.hw;
}

// In how many equal parts images are summed, of at most 64 where there are such: long sums of float32 round more.
int64_t equal_parts(int64_t images) {
  for (int64_t parts = 1; parts <= 16; ++parts) {
    if (images % parts == 0 && images / parts <= 64) return parts;
  }
  return 1;
}

Batch batch_of(const Tensor& x) {
  constexpr int64_t kVector = 16, kLarge = 1 << 17;  // elements
  const Images m = images_of(x, 0);
  if (x.numel() == 0) return {{0, m.c, m.hw, m.dtype, Layout::kContiguous, {}}};  // without parts, of no mean
  if (m.c == 1) return {{1, 1, m.n * m.hw, m.dtype, Layout::kContiguous, {}}};
  if (m.layout == Layout::kContiguous && m.hw > 1) {
    if (!x.is_cpu() || !takes_planes_as_rows(m)) return {m};
    const int64_t parts = equal_parts(m.n);
    return {{parts, m.c * m.hw, m.n / parts, m.dtype, Layout::kChannelsLast, {}}, m.hw, Fold::kPlanes};
  }
  int64_t columns = m.c;
  while (2 * columns <= kRegisterColumns) columns *= 2;
  const bool registers = active_isa() >= Isa::kAvx512 && m.dtype != DType::kFloat64 &&
                         (columns == kRegisterColumns || columns == kRegisterColumns / 4 * 3);
  const int64_t wanted = registers ? columns : 256;
  Batch b{{1, m.c, m.n * m.hw, m.dtype, Layout::kChannelsLast, {}}};
  while (x.is_cpu() && b.images.hw % 2 == 0 && b.images.hw > 0 &&
         ((b.images.c < wanted && x.numel() >= kLarge) || (b.images.c % kVector != 0 && b.fold < kVector))) {
    b.fold *= 2, b.images.c *= 2, b.images.hw /= 2;
  }
  return b;
}

int64_t reduce_items(const Images& m) {
  return m.n * (m.layout == Layout::kContiguous ? m.c : reduce_chunks(m) * cpu::channel_parts(m));
}
int64_t map_items(const Images& m) { return m.n * (m.layout == Layout::kContiguous ? m.c : m.hw); }

// Channels [begin, end), all of them or some of contiguous images.
struct Channels {
  int64_t begin, end;
};

// A kernel on its `items` items, where they are planes on those of `channels`.
template <class F>
void parallel_images(const Batch& b, int64_t items, Channels channels, F&& f) {
  const Images& m = b.images;
  if (channels.begin == 0 && channels.end == m.c / b.fold) {
    return parallel_items(0, items, m.n * m.c * m.hw / std::max<int64_t>(1, items), f);
  }
  for (int64_t n = 0; n < m.n; ++n) parallel_items(n * m.c + channels.begin, n * m.c + channels.end, m.hw, f);
}

// Whether images go through all passes a few channels at a time: their planes lie together in memory, and threads share
// the channels evenly.
bool by_channel_groups(const Tensor& x, const Batch& b) {
  return groups_channels && x.is_cpu() && b.images.layout == Layout::kContiguous && shares_evenly(b.images.c);
}

// Takes such images through `passes(channels)`, all passes before the next channels, so that the `tensors` tensors like
// x that a pass reads are still in the cache for the next, in L2 where that leaves runs of memory that are long enough.
// No result depends on the grouping.
template <class F>
void for_channel_groups(const Tensor& x, const Batch& b, int64_t tensors, F&& passes) {
  constexpr int64_t kCacheBytes = 384 << 10, kRunBytes = 16 << 10;
  const int64_t threads = torch::stable::get_num_threads(), c = b.images.c;
  const int64_t channel = std::max<int64_t>(1, b.images.n * b.images.hw);
  const int64_t fit = kCacheBytes / (channel * tensors * x.element_size());
  const int64_t run = kRunBytes / std::max<int64_t>(1, b.images.hw * x.element_size());
  const int64_t most = std::max<int64_t>({fit, run, 1});
  const auto in_groups = [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += most) passes(Channels{begin, std::min(begin + most, end)});
  };
  if (threads > 1) {
    torch::stable::parallel_for(0, c, std::max<int64_t>(1, kGrain / channel), in_groups);
  } else {
    in_groups(0, c);
  }
}

// A [c] vector in the accumulation type; `value` repeated where there is none.
Tensor channel_vector(const char* name, const std::optional<Tensor>& t, const Tensor& x, double value) {
  if (t) return small_input(name, *t, x, x.size(1));
  Tensor repeated = empty_acc(x, {x.size(1)});
  return torch::stable::fill_(repeated, value);
}

const void* images_or_null(const char* name, const std::optional<Tensor>& t, const Tensor& x) {
  if (t) check_same(name, *t, x);
  return t ? t->const_data_ptr() : nullptr;
}

BatchNormInputs inputs_of(const Tensor& x, const Images& images, const std::optional<Tensor>& residual,
                          const NormVectors& v, int64_t act, bool residual_after) {
  const void* added = images_or_null("residual", residual, x);
  return {.images = images,
          .act = activation_of("act", act),
          .x = x.const_data_ptr(),
          .before = residual_after ? nullptr : added,
          .mean = v.mean.const_data_ptr(),
          .rstd = v.rstd.const_data_ptr(),
          .weight = v.weight.const_data_ptr(),
          .bias = v.bias.const_data_ptr()};
}

}  // namespace

Tensor repeated(const Tensor& t, int64_t fold, Fold order) {
  if (fold == 1) return t;
  const Tensor out = torch::stable::new_empty(t, {fold * t.numel()});
  if (order == Fold::kPlanes) {
    visit_lanes_of(t, [&]<class Lane>() {
      const Lane* values = static_cast<const Lane*>(t.const_data_ptr());
      Lane* to = static_cast<Lane*>(out.mutable_data_ptr());
      for (int64_t ch = 0; ch < t.numel(); ++ch, to += fold) std::fill_n(to, fold, values[ch]);
    });
    return out;
  }
  const size_t bytes = t.numel() * t.element_size();
  for (int64_t k = 0; k < fold; ++k)
    std::memcpy(static_cast<char*>(out.mutable_data_ptr()) + k * bytes, t.const_data_ptr(), bytes);
  return out;
}

NormVectors norm_vectors(const Tensor& x, int64_t fold, Fold order, const Tensor& mean, const Tensor& rstd,
                         const std::optional<Tensor>& weight, const std::optional<Tensor>& bias) {
  return {repeated(small_input("mean", mean, x, x.size(1)), fold, order),
          repeated(small_input("rstd", rstd, x, x.size(1)), fold, order),
          repeated(channel_vector("weight", weight, x, 1), fold, order),
          repeated(channel_vector("bias", bias, x, 0), fold, order)};
}

namespace {

// Two results of each channel, which kernels write, or make of those of its columns.
struct Results {
  Tensor first, second;
  std::optional<Tensor> of_columns;

  Results(const Tensor& x, const Batch& b) : first(empty_acc(x, {x.size(1)})), second(empty_acc(x, {x.size(1)})) {
    if (b.has_planes_as_rows()) of_columns = empty_acc(x, {2, b.images.c});
  }
  // What kernels write, and how many columns these take for one channel.
  void* data(const Batch& b, int i) const {
    if (!of_columns) return (i == 0 ? first : second).mutable_data_ptr();
    return static_cast<char*>(of_columns->mutable_data_ptr()) + i * b.images.c * of_columns->element_size();
  }
  static int64_t fold(const Batch& b) { return b.has_planes_as_rows() ? 1 : b.fold; }

  // finish(begin, end) of the channels, or of all columns and then f(of the first, of the second, first, second) of
  // each channel, whose results stand together.
  template <class Finish, class F>
  void run(const Batch& b, Channels channels, int64_t terms, const Finish& finish, const F& f) const {
    const int64_t work = terms * b.images.n * reduce_chunks(b.images);
    if (!of_columns) return parallel_items(channels.begin, channels.end, work * b.fold, finish);
    parallel_items(0, b.images.c, work, finish);
    visit_lanes_of(first, [&]<class Lane>() {
      const Lane* columns = static_cast<const Lane*>(of_columns->const_data_ptr());
      for (int64_t ch = 0; ch < first.numel(); ++ch, columns += b.fold) {
        f(columns, columns + b.images.c, static_cast<Lane*>(first.mutable_data_ptr())[ch],
          static_cast<Lane*>(second.mutable_data_ptr())[ch]);
      }
    });
  }
};

struct Stats {
  Results results;
  Tensor partial;
  BatchNormStats args;

  Stats(const Tensor& x, const Batch& b)
      : results(x, b),
        partial(empty_acc(x, {b.images.n * reduce_chunks(b.images), 3, b.images.c})),
        args{.images = b.images,
             .fold = Results::fold(b),
             .x = x.const_data_ptr(),
             .partial = partial.mutable_data_ptr(),
             .mean = results.data(b, 0),
             .m2 = results.data(b, 1)} {}

  const Tensor& mean() const { return results.first; }
  const Tensor& m2() const { return results.second; }

  void run(const Batch& batch, Channels channels) const {
    const Images& m = batch.images;
    parallel_images(batch, reduce_items(m), channels,
                    [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act_stats_partial<I>(args, b, e); });
    results.run(
        batch, channels, 3, [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act_stats_finish<I>(args, b, e); },
        // Columns have as many numbers: the mean is that of their means, whose distances add to m2.
        [&]<class Lane>(const Lane* means, const Lane* m2s, Lane& mean, Lane& m2) {
          double sum = 0, squares = 0, inner = 0;
          for (int64_t k = 0; k < batch.fold; ++k) sum += means[k], inner += m2s[k];
          const double middle = sum / double(batch.fold);
          for (int64_t k = 0; k < batch.fold; ++k) squares += (means[k] - middle) * (means[k] - middle);
          mean = Lane(middle), m2 = Lane(inner + squares * double(m.n * m.hw));
        });
  }
};

}  // namespace

std::tuple<Tensor, Tensor> batch_norm_act_stats(const Tensor& x) {
  const Batch b = batch_of(x);
  const Stats stats(x, b);
  if (!x.is_cuda()) {
    stats.run(b, {0, x.size(1)});
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("batch_norm_act_stats", x);
    launch(cuda::batch_norm_act_stats(stats.args, launch.stream));
  }
  return {stats.mean(), stats.m2()};
}

double batch_norm_act_count(const Tensor& x) { return double(x.size(0) * x.size(2) * x.size(3)); }

std::tuple<Tensor, Tensor> batch_norm_act_stats_of(const Tensor& partial, const std::vector<int64_t>& sizes) {
  STD_TORCH_CHECK(partial.dim() == 3 && partial.size(0) == int64_t(sizes.size()) && partial.is_contiguous() &&
                      partial.scalar_type() == ScalarType::Float,
                  "fusedtrain: partial must be a dense float32 [parts, 3, C], with as many sizes");
  const int64_t c = partial.size(2);
  const Tensor mean = torch::stable::new_empty(partial, {c}), m2 = torch::stable::new_empty(partial, {c});
  const BatchNormMoments a{.c = c,
                           .parts = partial.size(0),
                           .partial = static_cast<const float*>(partial.const_data_ptr()),
                           .sizes = sizes.data(),
                           .mean = static_cast<float*>(mean.mutable_data_ptr()),
                           .m2 = static_cast<float*>(m2.mutable_data_ptr())};
  parallel_items(0, c, 3 * a.parts,
                 [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act_moments_finish<I>(a, b, e); });
  return {mean, m2};
}

namespace {

struct Update {
  Tensor rstd;
  BatchNormUpdate args;

  void run(Channels channels) const {
    if (args.batches != nullptr && channels.begin == 0) ++*args.batches;
    parallel_items(channels.begin, channels.end, 5,
                   [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act_update<I>(args, b, e); });
  }
};

Update update_of(const Tensor& mean, const Tensor& m2, const std::optional<Tensor>& running_mean,
                 const std::optional<Tensor>& running_var, const std::optional<Tensor>& batches, double count,
                 double momentum, double eps) {
  const int64_t c = mean.numel();
  const auto dense = [&](const char* name, const Tensor& t) {
    STD_TORCH_CHECK(t.numel() == c && t.is_contiguous() && t.is_cuda() == mean.is_cuda(), "fusedtrain: ", name,
                    " must be a dense [C] on the device of mean");
  };
  dense("mean", mean);
  dense("m2", m2);
  if (running_mean) dense("running_mean", *running_mean);
  if (running_var) dense("running_var", *running_var);
  STD_TORCH_CHECK(mean.scalar_type() == acc_type(mean) && m2.scalar_type() == mean.scalar_type(),
                  "fusedtrain: mean and m2 must be float32 or float64");
  STD_TORCH_CHECK(!batches || (batches->scalar_type() == ScalarType::Long && batches->numel() == 1 &&
                               batches->is_cuda() == mean.is_cuda()),
                  "fusedtrain: num_batches_tracked must be one int64 on the device of mean");
  const std::optional<Tensor>& running = running_mean ? running_mean : running_var;
  STD_TORCH_CHECK(!running_mean || !running_var || running_mean->scalar_type() == running_var->scalar_type(),
                  "fusedtrain: running_mean and running_var must have one dtype");
  STD_TORCH_CHECK(!running || (dtype_of(*running) == DType::kFloat64) == (dtype_of(mean) == DType::kFloat64),
                  "fusedtrain: running statistics in float64 go with images in float64");
  const Tensor rstd = torch::stable::empty_like(mean);
  const BatchNormUpdate a{.c = c,
                          .dtype = dtype_of(mean),
                          .running_dtype = running ? dtype_of(*running) : dtype_of(mean),
                          .count = count,
                          .momentum = momentum,
                          .eps = eps,
                          .mean = mean.const_data_ptr(),
                          .m2 = m2.const_data_ptr(),
                          .running_mean = running_mean ? running_mean->mutable_data_ptr() : nullptr,
                          .running_var = running_var ? running_var->mutable_data_ptr() : nullptr,
                          .batches = batches ? static_cast<int64_t*>(batches->mutable_data_ptr()) : nullptr,
                          .rstd = rstd.mutable_data_ptr()};
  return {rstd, a};
}

}  // namespace

Tensor batch_norm_act_update(const Tensor& mean, const Tensor& m2, const std::optional<Tensor>& running_mean,
                             const std::optional<Tensor>& running_var, const std::optional<Tensor>& batches,
                             double count, double momentum, double eps) {
  const Update update = update_of(mean, m2, running_mean, running_var, batches, count, momentum, eps);
  if (!mean.is_cuda()) {
    update.run({0, mean.numel()});
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("batch_norm_act_update_", mean);
    launch(cuda::batch_norm_act_update(update.args, launch.stream));
  }
  return update.rstd;
}

namespace {

// What a map over the images reads, where that is not an argument of the operator: vectors repeated `fold` times.
struct Forward {
  NormVectors vectors;
  BatchNormAct args;

  Forward(const Tensor& x, const Batch& b, const Tensor& mean, const Tensor& rstd, const std::optional<Tensor>& weight,
          const std::optional<Tensor>& bias, const std::optional<Tensor>& residual, int64_t act, bool residual_after,
          const Tensor& y)
      : vectors(norm_vectors(x, b.fold, b.order, mean, rstd, weight, bias)),
        args{.in = inputs_of(x, b.images, residual, vectors, act, residual_after),
             .after = residual_after ? images_or_null("residual", residual, x) : nullptr,
             .y = y.mutable_data_ptr()} {}

  void run(const Batch& batch, Channels channels) const {
    parallel_images(batch, map_items(batch.images), channels,
                    [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act<I>(args, b, e); });
  }
};

}  // namespace

Tensor batch_norm_act(const Tensor& x, const Tensor& mean, const Tensor& rstd, const std::optional<Tensor>& weight,
                      const std::optional<Tensor>& bias, const std::optional<Tensor>& residual, int64_t act,
                      bool residual_after) {
  const Batch b = batch_of(x);
  const Tensor y = torch::stable::empty_like(x);
  const Forward forward(x, b, mean, rstd, weight, bias, residual, act, residual_after, y);
  if (!x.is_cuda()) {
    forward.run(b, {0, x.size(1)});
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("batch_norm_act", x);
    launch(cuda::batch_norm_act(forward.args, launch.stream));
  }
  return y;
}

namespace {

// What both passes of backward read.
struct Gradients {
  const Tensor &dy, &x, &mean, &rstd;
  const std::optional<Tensor>&weight, &bias, &residual;
  int64_t act;
  bool residual_after;
};

struct Sums {
  NormVectors vectors;
  Results results;
  Tensor partial;
  BatchNormReduce args;

  // Writes dz to `dz_out`, or does not where that is null.
  Sums(const Gradients& g, const Batch& b, void* dz_out)
      : vectors(norm_vectors(g.x, b.fold, b.order, g.mean, g.rstd, g.weight, g.bias)),
        results(g.x, b),
        partial(empty_acc(g.x, {b.images.n * reduce_chunks(b.images), 2, b.images.c})),
        args{.in = inputs_of(g.x, b.images, g.residual, vectors, g.act, g.residual_after),
             .fold = Results::fold(b),
             .dy = images_or_null("dy", g.dy, g.x),
             .partial = partial.mutable_data_ptr(),
             .sum_dz = results.data(b, 0),
             .sum_dz_xhat = results.data(b, 1),
             .dz = dz_out} {}

  const Tensor& dz() const { return results.first; }
  const Tensor& dz_xhat() const { return results.second; }

  void run(const Batch& batch, Channels channels) const {
    const Images& m = batch.images;
    parallel_images(batch, reduce_items(m), channels,
                    [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act_reduce_partial<I>(args, b, e); });
    results.run(
        batch, channels, 2, [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act_reduce_finish<I>(args, b, e); },
        [&]<class Lane>(const Lane* dzs, const Lane* dz_xhats, Lane& dz, Lane& dz_xhat) {
          double sum = 0, sum_xhat = 0;
          for (int64_t k = 0; k < batch.fold; ++k) sum += dzs[k], sum_xhat += dz_xhats[k];
          dz = Lane(sum), dz_xhat = Lane(sum_xhat);
        });
  }
};

struct Backward {
  NormVectors vectors;
  std::optional<Tensor> sum_dz, sum_dz_xhat;  // repeated
  BatchNormBackward args;

  Backward(const Gradients& g, const Batch& b, const std::optional<Tensor>& dz, const std::optional<Tensor>& dz_xhat,
           double count, void* dx, void* dbefore)
      : vectors(norm_vectors(g.x, b.fold, b.order, g.mean, g.rstd, g.weight, g.bias)) {
    STD_TORCH_CHECK(dz.has_value() == dz_xhat.has_value(), "fusedtrain: both sums or none expected");
    if (dz) {
      sum_dz = repeated(small_input("sum_dz", *dz, g.x, g.x.size(1)), b.fold, b.order);
      sum_dz_xhat = repeated(small_input("sum_dz_xhat", *dz_xhat, g.x, g.x.size(1)), b.fold, b.order);
    }
    args = {.in = inputs_of(g.x, b.images, g.residual, vectors, g.act, g.residual_after),
            .count = count,
            .dy = images_or_null("dy", g.dy, g.x),
            .sum_dz = dz ? sum_dz->const_data_ptr() : nullptr,
            .sum_dz_xhat = dz ? sum_dz_xhat->const_data_ptr() : nullptr,
            .dx = dx,
            .dbefore = dbefore};
  }

  void run(const Batch& batch, Channels channels) const {
    parallel_images(batch, map_items(batch.images), channels,
                    [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act_backward<I>(args, b, e); });
  }
};

std::tuple<Tensor, Tensor> sums_of(const Gradients& g, const Batch& b, void* dz) {
  const Sums sums(g, b, dz);
  if (!g.x.is_cuda()) {
    sums.run(b, {0, g.x.size(1)});
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("batch_norm_act_reduce", g.x);
    launch(cuda::batch_norm_act_reduce(sums.args, launch.stream));
  }
  return {sums.dz(), sums.dz_xhat()};
}

void write_gradients(const Gradients& g, const Batch& b, const std::optional<Tensor>& sum_dz,
                     const std::optional<Tensor>& sum_dz_xhat, double count, void* dx, void* dbefore) {
  const Backward backward(g, b, sum_dz, sum_dz_xhat, count, dx, dbefore);
  if (dx == nullptr && dbefore == nullptr) return;
  if (!g.x.is_cuda()) {
    backward.run(b, {0, g.x.size(1)});
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("batch_norm_act_backward", g.x);
    launch(cuda::batch_norm_act_backward(backward.args, launch.stream));
  }
}

}  // namespace

std::tuple<Tensor, Tensor> batch_norm_act_reduce(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                                 const Tensor& rstd, const std::optional<Tensor>& weight,
                                                 const std::optional<Tensor>& bias,
                                                 const std::optional<Tensor>& residual, int64_t act,
                                                 bool residual_after) {
  return sums_of({dy, x, mean, rstd, weight, bias, residual, act, residual_after}, batch_of(x), nullptr);
}

std::tuple<Tensor, Tensor> batch_norm_act_backward(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                                   const Tensor& rstd, const std::optional<Tensor>& weight,
                                                   const std::optional<Tensor>& bias,
                                                   const std::optional<Tensor>& residual,
                                                   const std::optional<Tensor>& sum_dz,
                                                   const std::optional<Tensor>& sum_dz_xhat, double count, int64_t act,
                                                   bool residual_after, bool need_dx, bool need_dresidual) {
  const Tensor dx = need_dx ? torch::stable::empty_like(x) : torch::stable::new_empty(x, {0});
  const Tensor dresidual = need_dresidual ? torch::stable::empty_like(x) : torch::stable::new_empty(x, {0});
  write_gradients({dy, x, mean, rstd, weight, bias, residual, act, residual_after}, batch_of(x), sum_dz, sum_dz_xhat,
                  count, need_dx ? dx.mutable_data_ptr() : nullptr,
                  need_dresidual ? dresidual.mutable_data_ptr() : nullptr);
  return {dx, dresidual};
}

namespace {

std::tuple<Tensor, Tensor> batch_norm_act_fixed_backward(const Tensor& dy, const Tensor& y, const Tensor& scale,
                                                         int64_t act, bool need_dresidual) {
  const Activation kind = code_of("act", act, Activation::kRelu);
  if (kind != Activation::kIdentity) check_same("y", y, dy);
  const Tensor dx = torch::stable::empty_like(dy);
  const Tensor dresidual = need_dresidual ? torch::stable::empty_like(dy) : torch::stable::new_empty(dy, {0});
  const Batch b = batch_of(dy);
  const Tensor scales = repeated(small_input("scale", scale, dy, dy.size(1)), b.fold, b.order);
  const BatchNormFixedBackward args{.images = b.images,
                                    .act = kind,
                                    .dy = dy.const_data_ptr(),
                                    .y = y.const_data_ptr(),
                                    .scale = scales.const_data_ptr(),
                                    .dx = dx.mutable_data_ptr(),
                                    .dbefore = need_dresidual ? dresidual.mutable_data_ptr() : nullptr};
  if (!dy.is_cuda()) {
    parallel_images(b, map_items(b.images), {0, dy.size(1)},
                    [&]<Isa I>(int64_t b, int64_t e) { cpu::batch_norm_act_fixed_backward<I>(args, b, e); });
  } else if constexpr (kWithCuda) {
    const CudaLaunch launch("batch_norm_act_fixed_backward", dy);
    launch(cuda::batch_norm_act_fixed_backward(args, launch.stream));
  }
  return {dx, dresidual};
}

Tensor batch_norm_act_update_(const Tensor& mean, const Tensor& m2, const std::optional<Tensor>& running_mean,
                              const std::optional<Tensor>& running_var, double count, double momentum, double eps) {
  return batch_norm_act_update(mean, m2, running_mean, running_var, {}, count, momentum, eps);
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_act_train_(
    const Tensor& x, const std::optional<Tensor>& running_mean, const std::optional<Tensor>& running_var,
    const std::optional<Tensor>& batches, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, double momentum, double eps, int64_t act, bool residual_after) {
  const Batch b = batch_of(x);
  const double count = batch_norm_act_count(x);
  if (!by_channel_groups(x, b)) {
    const auto [mean, m2] = batch_norm_act_stats(x);
    const Tensor rstd = batch_norm_act_update(mean, m2, running_mean, running_var, batches, count, momentum, eps);
    return {batch_norm_act(x, mean, rstd, weight, bias, residual, act, residual_after), mean, rstd};
  }
  const Tensor y = torch::stable::empty_like(x);
  const Stats stats(x, b);
  const Update update = update_of(stats.mean(), stats.m2(), running_mean, running_var, batches, count, momentum, eps);
  const Forward forward(x, b, stats.mean(), update.rstd, weight, bias, residual, act, residual_after, y);
  for_channel_groups(x, b, 1, [&](Channels channels) {
    stats.run(b, channels);
    update.run(channels);
    forward.run(b, channels);
  });
  return {y, stats.mean(), update.rstd};
}

// Whether dz, which may be a result itself, is written while it is summed and read again: on the CPU, where that costs
// less than computing a'(z) twice (benchmarks/LOG.md, 2026-11-26).
bool keeps_dz(const Tensor& x, Activation act, bool is_result) {
  constexpr int64_t kOutgrows = 16 << 20;  // bytes: memory bounds SiLU in float32 from here on
  const bool is_short = x.element_size() == 2;
  if (!x.is_cpu() || act == Activation::kIdentity) return false;
  if (act == Activation::kRelu || is_result) return is_result;
  if (act == Activation::kRelu6 || act == Activation::kHardSwish) return is_short;
  return act != Activation::kSilu || is_short || x.numel() * x.element_size() < kOutgrows;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_act_train_backward(
    const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& rstd, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& residual, int64_t act, bool residual_after,
    bool need_dresidual) {
  const double count = batch_norm_act_count(x);
  const Gradients g{dy, x, mean, rstd, weight, bias, residual, act, residual_after};
  const Tensor dx = torch::stable::empty_like(x);
  const Tensor dresidual = need_dresidual ? torch::stable::empty_like(x) : torch::stable::new_empty(x, {0});
  const Batch b = batch_of(x);
  const bool keeps = keeps_dz(x, activation_of("act", act), need_dresidual);
  const Tensor& dz = !keeps ? dy : need_dresidual ? dresidual : dx;
  const std::optional<Tensor> none;
  const Gradients of_dz =
      keeps ? Gradients{dz, x, mean, rstd, weight, bias, none, int64_t(Activation::kIdentity), false} : g;
  void *kept = keeps ? dz.mutable_data_ptr() : nullptr,
       *dbefore = need_dresidual && !keeps ? dresidual.mutable_data_ptr() : nullptr;
  if (!by_channel_groups(x, b)) {
    const auto [sum_dz, sum_dz_xhat] = sums_of(g, b, kept);
    write_gradients(of_dz, b, sum_dz, sum_dz_xhat, count, dx.mutable_data_ptr(), dbefore);
    return {dx, dresidual, sum_dz_xhat, sum_dz};
  }
  const Sums sums(g, b, kept);
  const Backward backward(of_dz, b, sums.dz(), sums.dz_xhat(), count, dx.mutable_data_ptr(), dbefore);
  for_channel_groups(x, b, 2, [&](Channels channels) {
    sums.run(b, channels);
    backward.run(b, channels);
  });
  return {dx, dresidual, sums.dz_xhat(), sums.dz()};
}

template <class Library>
void implement(Library& m) {
  m.impl("batch_norm_act_train_", TORCH_BOX(&batch_norm_act_train_));
  m.impl("batch_norm_act_train_backward", TORCH_BOX(&batch_norm_act_train_backward));
  m.impl("batch_norm_act", TORCH_BOX(&batch_norm_act));
  m.impl("batch_norm_act_backward", TORCH_BOX(&batch_norm_act_backward));
  m.impl("batch_norm_act_fixed_backward", TORCH_BOX(&batch_norm_act_fixed_backward));
  m.impl("batch_norm_act_reduce", TORCH_BOX(&batch_norm_act_reduce));
  m.impl("batch_norm_act_stats", TORCH_BOX(&batch_norm_act_stats));
  m.impl("batch_norm_act_update_", TORCH_BOX(&batch_norm_act_update_));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CPU, m) { implement(m); }
#ifdef FUSEDTRAIN_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedtrain, CUDA, m) { implement(m); }
#endif

}  // namespace fusedtrain::bindings

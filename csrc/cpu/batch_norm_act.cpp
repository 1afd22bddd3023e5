// Statistics and forward pass of batch_norm_act on the CPU.
//   mean = 1/count sum x        m2 = sum (x - mean)^2        rstd = 1 / sqrt(m2 / count + eps)
//   y = a(weight (x - mean) rstd + bias + before) + after
//
// Sums of squares are taken about a mean of some of the very numbers that are added, so nothing cancels however large
// the mean is: of 8 rows of the chunk, or of the plane; then the parts are brought to the mean of the batch (Chan,
// Golub, LeVeque: Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979).
#include "batch_norm_act.h"

#include "cpu/batch_sums.h"

namespace fusedtrain::cpu {
namespace {

// Sums about a shift near the mean: shift, sum (x - shift), sum (x - shift)^2.
template <class T>
struct Moments {
  using Lane = Acc<T>;
  using V = Vec<Lane>;
  static constexpr int kSums = 3;
  const T* x;

  struct State {
    V shift, sum, squares;

    void start(const Moments& f, int64_t i, int64_t rows, int64_t c, int64_t, auto lanes) {
      sum = squares = V(0);
      if (rows < kGroup) {
        shift = cpu::load<V>(f.x + i, lanes);
      } else {
        shift = sum_group<V>([&](int64_t at, int64_t, auto l) { return cpu::load<V>(f.x + at, l); }, i, c, 0, lanes) *
                V(1.0 / kGroup);
      }
    }
    void two(const Moments& f, int64_t i, int64_t c, int64_t, auto lanes) {
      const V d = cpu::load<V>(f.x + i, lanes) - shift, e = cpu::load<V>(f.x + i + c, lanes) - shift;
      sum += d + e;
      squares += d * d + e * e;
    }
    void one(const Moments& f, int64_t i, int64_t, auto lanes) {
      const V d = cpu::load<V>(f.x + i, lanes) - shift;
      sum += d;
      squares += d * d;
    }
    void load(const Lane* in, int64_t c, auto lanes) {
      shift = cpu::load<V>(in, lanes);
      sum = cpu::load<V>(in + c, lanes);
      squares = cpu::load<V>(in + 2 * c, lanes);
    }
    void store(Lane* out, int64_t c, auto lanes) const {
      cpu::store(out, shift, lanes);
      cpu::store(out + c, sum, lanes);
      cpu::store(out + 2 * c, squares, lanes);
    }
  };

  // Two passes over stretches that stay in the first cache.
  void plane(int64_t first, int64_t, int64_t hw, Lane* out, int64_t c) const {
    constexpr int64_t kStretch = 4096 / sizeof(Lane) * sizeof(float);
    const auto value = [this](int64_t i, int64_t, auto lanes) { return cpu::load<V>(x + i, lanes); };
    Lane shift = 0;
    double sum = 0, squares = 0;
    for (int64_t begin = 0; begin < hw; begin += kStretch) {
      const int64_t count = std::min(kStretch, hw - begin);
      const Lane mean = sum_plane<V>(value, first + begin, 0, count) / Lane(count);
      const auto [d, d2] = about(first + begin, count, V(mean));
      if (begin == 0) shift = mean;
      const double step = double(mean) - double(shift);
      sum += d + double(count) * step;
      squares += d2 + step * (2 * d + double(count) * step);
    }
    out[0] = shift;
    out[c] = Lane(sum);
    out[2 * c] = Lane(squares);
  }

  struct About {
    double d, d2;
  };
  About about(int64_t first, int64_t count, V mean) const {
    V d[2] = {V(0), V(0)}, d2[2] = {V(0), V(0)};
    const auto add = [&](int k, V t) {
      d[k] += t;
      d2[k] += t * t;
    };
    int64_t i = 0;
    for (; i + 2 * V::kLanes <= count; i += 2 * V::kLanes) {
      add(0, cpu::load<V>(x + first + i) - mean);
      add(1, cpu::load<V>(x + first + i + V::kLanes) - mean);
    }
    for_each_vector<V>(
        count - i, [&](int64_t j, auto lanes) { add(0, keep(cpu::load<V>(x + first + i + j, lanes) - mean, lanes)); });
    return {lane_sum(d[0] + d[1]), lane_sum(d2[0] + d2[1])};
  }
};

}  // namespace

template <>
void batch_norm_act_stats_partial<Isa::FUSEDTRAIN_ISA>(const BatchNormStats& a, int64_t begin, int64_t end) {
  visit_dtype(a.images.dtype, [&]<class T>() {
    const Moments<T> moments{static_cast<const T*>(a.x)};
    walk_items(a.images, moments, static_cast<Acc<T>*>(a.partial), begin, end);
  });
}

template <>
void batch_norm_act_stats_finish<Isa::FUSEDTRAIN_ISA>(const BatchNormStats& a, int64_t begin, int64_t end) {
  const int64_t c = a.images.c, count = a.images.n * a.images.hw;
  const auto finish = [&]<class Lane>() {
    for (int64_t first = begin; first < end; first += kFinishBlock) {
      const int width = int(std::min<int64_t>(kFinishBlock, end - first));
      double base[kFinishBlock] = {}, sum[kFinishBlock] = {}, squares[kFinishBlock] = {};
      for (int64_t i = 0; i < parts(a.images); ++i) {
        const Lane* shift = static_cast<const Lane*>(a.partial) + i * 3 * c + first;
        const Lane *s = shift + c, *q = s + c;
        const double size = double(part_size(a.images, i));
        for (int k = 0; k < width; ++k) {
          if (i == 0) base[k] = double(shift[k]);
          const double step = double(shift[k]) - base[k];
          sum[k] += double(s[k]) + size * step;
          squares[k] += double(q[k]) + step * (2 * double(s[k]) + size * step);
        }
      }
      for (int k = 0; k < width; ++k) {
        const double mean = count == 0 ? 0 : sum[k] / double(count);
        static_cast<Lane*>(a.mean)[first + k] = Lane(base[k] + mean);
        static_cast<Lane*>(a.m2)[first + k] = Lane(at_least(squares[k] - sum[k] * mean, 0.0));
      }
    }
  };
  a.images.dtype == DType::kFloat64 ? finish.template operator()<double>() : finish.template operator()<float>();
}

template <>
void batch_norm_act_update<Isa::FUSEDTRAIN_ISA>(const BatchNormUpdate& a, int64_t begin, int64_t end) {
  const auto update = [&]<class Lane, class Running>() {
    using V = Vec<Lane>;
    const auto at = [](const void* p, int64_t ch) { return static_cast<const Lane*>(p) + ch; };
    const V per_count(1 / a.count), per_sample(1 / (a.count - 1)), eps(a.eps), momentum(a.momentum);
    const auto move = [&](void* running, int64_t ch, V to, auto lanes) {
      if (running == nullptr) return;
      Running* p = static_cast<Running*>(running) + ch;
      store(p, momentum * to + (V(1) - momentum) * load<V>(p, lanes), lanes);
    };
    for_each_vector<V>(end - begin, [&](int64_t i, auto lanes) {
      const int64_t ch = begin + i;
      const V m2 = load<V>(at(a.m2, ch), lanes);
      store(static_cast<Lane*>(a.rstd) + ch, V(1) / vsqrt(m2 * per_count + eps), lanes);
      move(a.running_mean, ch, load<V>(at(a.mean, ch), lanes), lanes);
      move(a.running_var, ch, m2 * per_sample, lanes);
    });
  };
  if (a.dtype == DType::kFloat64) {
    update.template operator()<double, double>();
  } else {
    visit_dtype(a.running_dtype, [&]<class Running>() {
      if constexpr (!std::is_same_v<Running, double>) update.template operator()<float, Running>();
    });
  }
}

template <>
void batch_norm_act<Isa::FUSEDTRAIN_ISA>(const BatchNormAct& a, int64_t begin, int64_t end) {
  visit_dtype(a.in.images.dtype, [&]<class T>() {
    visit_act(a.in.act, [&]<Activation A>() {
      using V = Vec<Acc<T>>;
      const T *x = static_cast<const T*>(a.in.x), *before = static_cast<const T*>(a.in.before);
      const T* after = static_cast<const T*>(a.after);
      const auto vector = [](const void* p) { return static_cast<const Acc<T>*>(p); };
      const auto value = [=](int64_t i, auto lanes, V mean, V rstd, V weight, V bias) {
        const V xhat = (load<V>(x + i, lanes) - mean) * rstd;
        return Act<A>::value(weight * xhat + bias + load_or_zero<V>(before, i, lanes)) +
               load_or_zero<V>(after, i, lanes);
      };
      map_items<V>(a.in.images, 1, static_cast<T*>(a.y), value, begin, end, vector(a.in.mean), vector(a.in.rstd),
                   vector(a.in.weight), vector(a.in.bias));
    });
  });
}

}  // namespace fusedtrain::cpu

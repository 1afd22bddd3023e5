// Statistics and forward pass of batch_norm_act on the CPU.
//   mean = 1/count sum x        m2 = sum (x - mean)^2        rstd = 1 / sqrt(m2 / count + eps)
//   y = a(weight (x - mean) rstd + bias + before) + after
//
// Sums of squares are taken about a mean of some of the very numbers that are added, so nothing cancels however large
// the mean is: of 8 rows of the chunk, or of the first vectors of the plane; then the parts are brought to the mean of
// the batch (Chan, Golub, LeVeque: Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979).
#include "batch_norm_act.h"

#include <numeric>

#include "cpu/batch_sums.h"

namespace fusedtrain::cpu {
namespace {

// Sums about a shift near the mean: shift, sum (x - shift), sum (x - shift)^2.
template <class T>
struct Moments {
  using Element = T;
  using Lane = Acc<T>;
  using V = Vec<Lane>;
  static constexpr int kSums = 3, kStreams = 1;
  const T* x;

  struct Params {};
  Params params(auto) const { return {}; }
  void prefetch(int64_t i) const { fetch(x + i); }

  struct State {
    V shift, sum, squares;

    void start(const Moments& f, int64_t i, int64_t rows, int64_t c, auto lanes) {
      sum = squares = V(0);
      shift = cpu::load<V>(f.x + i, lanes);
      if (rows < kGroup) return;
      for (int k = 1; k < kGroup; ++k) shift += cpu::load<V>(f.x + i + k * c, lanes);
      shift = shift * V(1.0 / kGroup);
    }
    void clear(const State& s) {
      shift = s.shift;
      sum = squares = V(0);
    }
    void add(const Moments& f, int64_t i, Params, auto lanes) {
      const V d = keep(cpu::load<V>(f.x + i, lanes) - shift, lanes);
      sum += d;
      squares += d * d;
    }
    void merge(const State& s) {
      sum += s.sum;
      squares += s.squares;
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

  void plane(int64_t first, int64_t, int64_t hw, Lane* out, int64_t c) const {
    constexpr int64_t kStretch = 128 * V::kLanes;  // at most 64 terms are added to one lane before doubles take over
    const auto value = [this](int64_t i, int64_t, auto lanes) { return cpu::load<V>(x + i, lanes); };
    const int64_t some = std::min<int64_t>(8 * V::kLanes, hw);
    const Lane shift = sum_plane<V>(value, first, 0, some) / Lane(some);
    const bool ahead = asks_ahead;
    double sum = 0, squares = 0;
    for (int64_t begin = 0; begin < hw; begin += kStretch) {
      const int64_t end = std::min(begin + kStretch, hw);
      V d[2] = {V(0), V(0)}, d2[2] = {V(0), V(0)};
      const auto add = [&](int k, V t) {
        d[k] += t;
        d2[k] += t * t;
      };
      int64_t i = begin;
      for (; i + 2 * V::kLanes <= end; i += 2 * V::kLanes) {
        for (int k = 0; k < 2; ++k) {
          const int64_t at = first + i + k * V::kLanes;
          if (ahead) prefetch(at + kAhead<T>);
          add(k, cpu::load<V>(x + at) - V(shift));
        }
      }
      for_each_vector<V>(end - i, [&](int64_t j, auto lanes) {
        add(0, keep(cpu::load<V>(x + first + i + j, lanes) - V(shift), lanes));
      });
      sum += double(lane_sum(d[0] + d[1]));
      squares += double(lane_sum(d2[0] + d2[1]));
    }
    out[0] = shift;
    out[c] = Lane(sum);
    out[2 * c] = Lane(squares);
  }
};

// y of one vector.
template <class T, class A>
struct Forward {
  static constexpr bool kInPages = true;
  using Element = T;
  using V = Vec<Acc<T>>;
  PreActivation<T> z;
  const T* after;
  A act;

  auto params(auto at) const { return z.params(at); }
  void prefetch(int64_t i) const {
    fetch(z.x + i);
    if (asks_ahead && after != nullptr) fetch(after + i);
    if (asks_ahead && z.before != nullptr) fetch(z.before + i);
  }
  V operator()(int64_t i, const auto& p, auto lanes) const {
    V y = act.value(z(i, z.centred(i, p, lanes), p, lanes));
    if (after != nullptr) y += load<V>(after + i, lanes);
    return y;
  }
};

// Mean and m2 of channels [begin, end) from sums of parts; each_part(f) calls f(offset, positions) for every part.
template <class Lane, class Parts>
void finish_moments(const Lane* partial, int64_t c, int64_t count, const Parts& each_part, Lane* mean, Lane* m2,
                    int64_t begin, int64_t end) {
  for (int64_t first = begin; first < end; first += kFinishBlock) {
    const int width = int(std::min<int64_t>(kFinishBlock, end - first));
    double base[kFinishBlock] = {}, sum[kFinishBlock] = {}, squares[kFinishBlock] = {};
    each_part([&](int64_t offset, int64_t positions) {
      const Lane* shift = partial + offset + first;
      const Lane *s = shift + c, *q = s + c;
      const double size = double(positions);
      for (int k = 0; k < width; ++k) {
        if (offset == 0) base[k] = double(shift[k]);
        const double step = double(shift[k]) - base[k];
        sum[k] += double(s[k]) + size * step;
        squares[k] += double(q[k]) + step * (2 * double(s[k]) + size * step);
      }
    });
    for (int k = 0; k < width; ++k) {
      const double centre = count == 0 ? 0 : sum[k] / double(count);
      mean[first + k] = Lane(base[k] + centre);
      m2[first + k] = Lane(at_least(squares[k] - sum[k] * centre, 0.0));
    }
  }
}

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
  const int64_t c = a.images.c, count = a.images.n * a.images.hw * a.fold;
  const auto each_part = [&](auto f) { for_each_part(a.images, a.fold, 3, f); };
  const auto finish = [&]<class Lane>() {
    finish_moments(static_cast<const Lane*>(a.partial), c, count, each_part, static_cast<Lane*>(a.mean),
                   static_cast<Lane*>(a.m2), begin, end);
  };
  a.images.dtype == DType::kFloat64 ? finish.template operator()<double>() : finish.template operator()<float>();
}

template <>
void batch_norm_act_moments_finish<Isa::FUSEDTRAIN_ISA>(const BatchNormMoments& a, int64_t begin, int64_t end) {
  const int64_t count = std::accumulate(a.sizes, a.sizes + a.parts, int64_t(0));
  const auto each_part = [&](auto f) {
    for (int64_t i = 0; i < a.parts; ++i) f(i * 3 * a.c, a.sizes[i]);
  };
  finish_moments(a.partial, a.c, count, each_part, a.mean, a.m2, begin, end);
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
    visit_act<T, kActs>(a.in.act, [&]<class A>(A act) {
      const Forward<T, A> y{PreActivation<T>(a.in), static_cast<const T*>(a.after), act};
      map_items(a.in.images, static_cast<T*>(a.y), y, begin, end);
    });
  });
}

}  // namespace fusedtrain::cpu

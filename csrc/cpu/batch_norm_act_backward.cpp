// Backward pass of batch_norm_act on the CPU; the activation is computed again.
//   z = weight xhat + bias + before        dz = a'(z) dy        xhat = (x - mean) rstd
//   sum_dz = sum dz                        sum_dz_xhat = rstd sum dz (x - mean)
//   dx = weight rstd (dz - sum_dz / count - xhat sum_dz_xhat / count)
#include "batch_norm_act.h"
#include "cpu/batch_sums.h"

namespace fusedtrain::cpu {
namespace {

// What dz depends on beside the images, for one vector.
template <class V>
struct Affine {
  V mean, rstd, weight, bias;
};

template <class T, Activation A>
struct Gradient {
  using Lane = Acc<T>;
  using V = Vec<Lane>;
  const T *dy, *x, *before;

  struct Pair {
    V dz, centred;
  };
  Pair operator()(int64_t i, auto lanes, const Affine<V>& p) const {
    const V centred = load<V>(x + i, lanes) - p.mean;
    const V da = load<V>(dy + i, lanes);
    if constexpr (A == Activation::kIdentity) {
      return {da, centred};
    } else {
      const V z = p.weight * (centred * p.rstd) + p.bias + load_or_zero<V>(before, i, lanes);
      return {Act<A>::slope(z) * da, centred};
    }
  }
};

// sum dz, sum dz (x - mean).
template <class T, Activation A>
struct Sums {
  using Lane = Acc<T>;
  using V = Vec<Lane>;
  static constexpr int kSums = 2;
  Gradient<T, A> gradient;
  const Lane *mean, *rstd, *weight, *bias;

  Affine<V> affine(int64_t ch, auto lanes) const {
    return {load<V>(mean + ch, lanes), load<V>(rstd + ch, lanes), load<V>(weight + ch, lanes),
            load<V>(bias + ch, lanes)};
  }

  struct State {
    V dz, dz_x;

    void start(const Sums&, int64_t, int64_t, int64_t, int64_t, auto) { dz = dz_x = V(0); }
    void two(const Sums& f, int64_t i, int64_t c, int64_t ch, auto lanes) {
      const Affine<V> affine = f.affine(ch, lanes);
      const auto p = f.gradient(i, lanes, affine), q = f.gradient(i + c, lanes, affine);
      dz += p.dz + q.dz;
      dz_x += p.dz * p.centred + q.dz * q.centred;
    }
    void one(const Sums& f, int64_t i, int64_t ch, auto lanes) {
      const auto [d, centred] = f.gradient(i, lanes, f.affine(ch, lanes));
      dz += d;
      dz_x += d * centred;
    }
    void load(const Lane* in, int64_t c, auto lanes) {
      dz = cpu::load<V>(in, lanes);
      dz_x = cpu::load<V>(in + c, lanes);
    }
    void store(Lane* out, int64_t c, auto lanes) const {
      cpu::store(out, dz, lanes);
      cpu::store(out + c, dz_x, lanes);
    }
  };

  // Absent lanes have dy = 0 and so add nothing.
  void plane(int64_t first, int64_t ch, int64_t hw, Lane* out, int64_t c) const {
    constexpr int64_t kStretch = 128 * V::kLanes;  // at most 64 terms are added to one lane before a tree takes over
    const Affine<V> affine{V(mean[ch]), V(rstd[ch]), V(weight[ch]), V(bias[ch])};
    Lane sum = 0, sum_x = 0;
    for (int64_t begin = 0; begin < hw; begin += kStretch) {
      const int64_t end = std::min(begin + kStretch, hw);
      V dz[2] = {V(0), V(0)}, dz_x[2] = {V(0), V(0)};
      const auto add = [&](int k, int64_t i, auto lanes) {
        const auto [d, centred] = gradient(first + i, lanes, affine);
        dz[k] += keep(d, lanes);
        dz_x[k] += keep(d * centred, lanes);
      };
      int64_t i = begin;
      for (; i + 2 * V::kLanes <= end; i += 2 * V::kLanes) {
        add(0, i, AllLanes{});
        add(1, i + V::kLanes, AllLanes{});
      }
      for_each_vector<V>(end - i, [&](int64_t j, auto lanes) { add(0, i + j, lanes); });
      sum += lane_sum(dz[0] + dz[1]);
      sum_x += lane_sum(dz_x[0] + dz_x[1]);
    }
    out[0] = sum;
    out[c] = sum_x;
  }
};

}  // namespace

template <>
void batch_norm_act_reduce_partial<Isa::FUSEDTRAIN_ISA>(const BatchNormReduce& a, int64_t begin, int64_t end) {
  visit_dtype(a.in.images.dtype, [&]<class T>() {
    visit_act(a.in.act, [&]<Activation A>() {
      const auto vector = [](const void* p) { return static_cast<const Acc<T>*>(p); };
      const auto images = [](const void* p) { return static_cast<const T*>(p); };
      const Sums<T, A> sums{{images(a.dy), images(a.in.x), images(a.in.before)},
                            vector(a.in.mean),
                            vector(a.in.rstd),
                            vector(a.in.weight),
                            vector(a.in.bias)};
      walk_items(a.in.images, sums, static_cast<Acc<T>*>(a.partial), begin, end);
    });
  });
}

template <>
void batch_norm_act_reduce_finish<Isa::FUSEDTRAIN_ISA>(const BatchNormReduce& a, int64_t begin, int64_t end) {
  const int64_t c = a.in.images.c;
  const auto finish = [&]<class Lane>() {
    const Lane* rstd = static_cast<const Lane*>(a.in.rstd);
    for (int64_t first = begin; first < end; first += kFinishBlock) {
      const int width = int(std::min<int64_t>(kFinishBlock, end - first));
      double dz[kFinishBlock] = {}, dz_x[kFinishBlock] = {};
      for (int64_t i = 0; i < parts(a.in.images); ++i) {
        const Lane* part = static_cast<const Lane*>(a.partial) + i * 2 * c + first;
        for (int k = 0; k < width; ++k) {
          dz[k] += double(part[k]);
          dz_x[k] += double(part[c + k]);
        }
      }
      for (int k = 0; k < width; ++k) {
        static_cast<Lane*>(a.sum_dz)[first + k] = Lane(dz[k]);
        static_cast<Lane*>(a.sum_dz_xhat)[first + k] = Lane(dz_x[k] * double(rstd[first + k]));
      }
    }
  };
  a.in.images.dtype == DType::kFloat64 ? finish.template operator()<double>() : finish.template operator()<float>();
}

template <>
void batch_norm_act_backward<Isa::FUSEDTRAIN_ISA>(const BatchNormBackward& a, int64_t begin, int64_t end) {
  visit_dtype(a.in.images.dtype, [&]<class T>() {
    visit_act(a.in.act, [&]<Activation A>() {
      using V = Vec<Acc<T>>;
      const auto vector = [](const void* p) { return static_cast<const Acc<T>*>(p); };
      const auto images = [](const void* p) { return static_cast<const T*>(p); };
      const Gradient<T, A> gradient{images(a.dy), images(a.in.x), images(a.in.before)};
      T *dx = static_cast<T*>(a.dx), *dbefore = static_cast<T*>(a.dbefore);
      const V per_count(1 / a.count);
      const bool fixed = a.sum_dz == nullptr;
      const auto both = [=](int64_t i, auto lanes, V mean, V rstd, V weight, V bias, V sum_dz, V sum_dz_xhat) {
        const auto [dz, centred] = gradient(i, lanes, Affine<V>{mean, rstd, weight, bias});
        if (dbefore != nullptr) store(dbefore + i, dz, lanes);
        if (fixed) return weight * rstd * dz;
        return weight * rstd * (dz - sum_dz * per_count - centred * rstd * (sum_dz_xhat * per_count));
      };
      const auto before_only = [=](int64_t i, auto lanes, V mean, V rstd, V weight, V bias) {
        return gradient(i, lanes, Affine<V>{mean, rstd, weight, bias}).dz;
      };
      if (dx != nullptr) {
        map_items<V>(a.in.images, 1, dx, both, begin, end, vector(a.in.mean), vector(a.in.rstd), vector(a.in.weight),
                     vector(a.in.bias), vector(a.sum_dz), vector(a.sum_dz_xhat));
      } else {
        map_items<V>(a.in.images, 1, dbefore, before_only, begin, end, vector(a.in.mean), vector(a.in.rstd),
                     vector(a.in.weight), vector(a.in.bias));
      }
    });
  });
}

}  // namespace fusedtrain::cpu

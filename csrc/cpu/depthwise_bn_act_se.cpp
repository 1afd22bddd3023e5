// What follows the convolution of depthwise_bn_act_se on the CPU; the normalised and activated images are computed
// again wherever they are needed, and never stored.
//   u = weight (z - mean) rstd + bias      pooled = mean a(u)      y = a(u) gate, or b(a(u) gate + residual)
//   du = a'(u) (gate dy + dpooled / hw)    dz = weight rstd (du - sum_du / count - xhat sum_du_xhat / count)
#include "depthwise_bn_act_se.h"

#include "cpu/sample_walks.h"

namespace fusedtrain::cpu {
namespace {

// a(u) and a'(u) of u(), for elements of type T; what bounds these kernels.
template <class W>
struct Activated {
  W value, slope;
};
template <class T, class Lanes, class A, class U>
[[gnu::always_inline]] inline auto activated(const A& act, Lanes lanes, const U& u_of) {
  using W = decltype(u_of());
  if constexpr (std::is_same_v<A, StaticAct<T, Activation::kSilu>>) {
    const W s = logistic<T>(lanes, u_of), u = u_of(), value = u * s;
    return Activated<W>{value, s + value * (W(1) - s)};
  } else {
    const W u = u_of();
    return Activated<W>{act.value(u), act.slope(u)};
  }
}

// z and what normalises it.
template <class T>
struct Normalised {
  using Element = T;
  using Lane = Acc<T>;
  using V = Vec<Lane>;
  const T* z;
  const Lane *mean, *rstd, *weight, *bias;

  explicit Normalised(const BnAct& a)
      : z(static_cast<const T*>(a.z)),
        mean(static_cast<const Lane*>(a.mean)),
        rstd(static_cast<const Lane*>(a.rstd)),
        weight(static_cast<const Lane*>(a.weight)),
        bias(static_cast<const Lane*>(a.bias)) {}

  struct At {
    V mean, scale, bias;
  };
  At at(int64_t ch, const auto& get) const {
    return {get(mean + ch), get(weight + ch) * get(rstd + ch), get(bias + ch)};
  }
  [[gnu::always_inline]] auto centred(int64_t i, auto lanes, const At& p) const {
    return load<V>(z + i, lanes) - p.mean;
  }
  // As a function, which activated() calls.
  [[gnu::always_inline]] auto u(int64_t i, auto lanes, const At& p) const {
    return [ this, i, lanes, &p ]() __attribute__((always_inline)) { return centred(i, lanes, p) * p.scale + p.bias; };
  }
  void prefetch(int64_t i) const { fetch(z + i); }
};

template <class T, class A>
struct PoolTerms : Normalised<T> {
  using Base = Normalised<T>;
  static constexpr int kSums = 1;
  A act;

  auto at(int64_t, int64_t ch, const auto& get) const { return Base::at(ch, get); }
  void add(auto* sums, int64_t i, auto lanes, const auto& p) const { sums[0] += act.value(Base::u(i, lanes, p)()); }
};

template <class T, class A, bool kAdds>
struct Scale : Normalised<T> {
  using Base = Normalised<T>;
  using typename Base::Lane, typename Base::V;
  const Lane* gate;
  const T* residual;  // with kAdds, as the next
  Lane least;         // of y
  A act;

  void prefetch(int64_t i) const {
    Base::prefetch(i);
    if constexpr (kAdds) fetch(residual + i);
  }
  struct At : Base::At {
    V gate;
  };
  At at(int64_t nc, int64_t ch, const auto& get) const { return {Base::at(ch, get), get(gate + nc)}; }
  V operator()(int64_t i, auto lanes, const At& p) const {
    const V scaled = act.value(Base::u(i, lanes, p)()) * p.gate;
    if constexpr (kAdds) return at_least(scaled + load<V>(residual + i, lanes), V(least));
    return scaled;
  }
};

template <class T, class A>
struct ReduceTerms : Normalised<T> {
  using Base = Normalised<T>;
  using typename Base::V;
  static constexpr int kSums = BnActReduce::kSums;
  static constexpr bool kInTurn = A::kInTurn && kVecBytes == 32;
  const T* dy;
  A act;

  void prefetch(int64_t i) const {
    Base::prefetch(i);
    fetch(dy + i);
  }
  auto at(int64_t, int64_t ch, const auto& get) const { return Base::at(ch, get); }
  [[gnu::always_inline]] void add(V* sums, int64_t i, auto lanes, const auto& p) const {
    const auto [value, slope] = activated<T>(act, lanes, Base::u(i, lanes, p));
    const auto centred = Base::centred(i, lanes, p), d = load<V>(dy + i, lanes), dslope = d * slope;
    add_to(sums[0], d * value);
    add_to(sums[1], dslope);
    add_to(sums[2], slope);
    add_to(sums[3], dslope * centred);
    add_to(sums[4], slope * centred);
  }
};

// dz = scale du - mean_du - centred slant, where the last two are zero for fixed statistics.
template <class T, class A>
struct Backward : Normalised<T> {
  static constexpr bool kInTurn = A::kInTurnBesideMuch;
  using Base = Normalised<T>;
  using typename Base::Lane, typename Base::V;
  const T* dy;
  const Lane *gate, *dpooled, *sum_du, *sum_du_xhat;
  double per_pixel, per_count;
  A act;

  void prefetch(int64_t i) const {
    Base::prefetch(i);
    fetch(dy + i);
  }
  struct At : Base::At {
    V gate, dpooled, mean_du, slant;
  };
  At at(int64_t nc, int64_t ch, const auto& get) const {
    const auto base = Base::at(ch, get);
    At p{base, V(1), V(0), V(0), V(0)};
    if (gate != nullptr) p.gate = get(gate + nc), p.dpooled = get(dpooled + nc) * V(per_pixel);
    if (sum_du != nullptr) {
      p.mean_du = base.scale * get(sum_du + ch) * V(per_count);
      p.slant = base.scale * get(Base::rstd + ch) * get(sum_du_xhat + ch) * V(per_count);
    }
    return p;
  }
  [[gnu::always_inline]] auto operator()(int64_t i, auto lanes, const At& p) const {
    const auto through = [&]() __attribute__((always_inline)) {
      if constexpr (std::is_same_v<A, StaticAct<T, Activation::kSilu>>) {
        const auto slope = activated<T>(act, lanes, Base::u(i, lanes, p)).slope;
        return slope * (p.gate * load<V>(dy + i, lanes) + p.dpooled);
      } else {
        const auto u = Base::u(i, lanes, p)(), da = p.gate * load<V>(dy + i, lanes) + p.dpooled;
        return act.through(u, da);
      }
    };
    const auto du = through();
    return p.scale * du - p.mean_du - Base::centred(i, lanes, p) * p.slant;
  }
};

// f.template operator()<T>(act) for the element type and the activation of the images.
template <class F>
void visit_images(const Images& m, F&& f) {
  visit_dtype(m.dtype, [&]<class T>() { visit_act<T>(m.in_act, [&](auto act) { f.template operator()<T>(act); }); });
}

}  // namespace

template <>
void bn_act_pool_partial<Isa::FUSEDTRAIN_ISA>(const BnActPool& a, int64_t begin, int64_t end) {
  visit_images(a.in.images, [&]<class T, class A>(A act) {
    sum_terms<Vec<Acc<T>>>(a.in.images, PoolTerms<T, A>{Normalised<T>(a.in), act}, static_cast<Acc<T>*>(a.partial),
                           begin, end);
  });
}

template <>
void bn_act_pool_finish<Isa::FUSEDTRAIN_ISA>(const BnActPool& a, int64_t begin, int64_t end) {
  const int64_t c = a.in.images.c, chunks = reduce_chunks(a.in.images);
  visit_acc(a.in.images.dtype, [&]<class Lane>() {
    using V = Vec<Lane>;
    const V area(Lane(a.in.images.hw));
    for (int64_t n = begin; n < end; ++n) {
      Lane* pooled = static_cast<Lane*>(a.pooled) + n * c;
      sum_chunks<V>(static_cast<const Lane*>(a.partial) + n * chunks * c, chunks, c, c, pooled);
      for_each_vector<V>(
          c, [&](int64_t ch, auto lanes) { store(pooled + ch, load<V>(pooled + ch, lanes) / area, lanes); });
    }
  });
}

template <>
void bn_act_scale<Isa::FUSEDTRAIN_ISA>(const BnActScale& a, int64_t begin, int64_t end) {
  visit_images(a.in.images, [&]<class T, class A>(A act) {
    visit_bool(a.residual != nullptr, [&]<bool kAdds>() {
      using Lane = Acc<T>;
      const Scale<T, A, kAdds> scale{Normalised<T>(a.in), static_cast<const Lane*>(a.gate),
                                     static_cast<const T*>(a.residual),
                                     a.relu ? Lane(0) : -std::numeric_limits<Lane>::infinity(), act};
      write_images<Vec<Lane>>(a.in.images, static_cast<T*>(a.y), scale, begin, end);
    });
  });
}

template <>
void bn_act_reduce_partial<Isa::FUSEDTRAIN_ISA>(const BnActReduce& a, int64_t begin, int64_t end) {
  visit_images(a.in.images, [&]<class T, class A>(A act) {
    const ReduceTerms<T, A> terms{Normalised<T>(a.in), static_cast<const T*>(a.dy), act};
    sum_terms<Vec<Acc<T>>>(a.in.images, terms, static_cast<Acc<T>*>(a.partial), begin, end);
  });
}

template <>
void bn_act_reduce_finish<Isa::FUSEDTRAIN_ISA>(const BnActReduce& a, int64_t begin, int64_t end) {
  constexpr int64_t kSums = BnActReduce::kSums;
  const int64_t c = a.in.images.c, chunks = reduce_chunks(a.in.images);
  visit_acc(a.in.images.dtype, [&]<class Lane>() {
    using V = Vec<Lane>;
    for (int64_t n = begin; n < end; ++n) {
      const Lane* partial = static_cast<const Lane*>(a.partial) + n * chunks * kSums * c;
      sum_chunks<V>(partial, chunks, kSums * c, c, static_cast<Lane*>(a.dgate) + n * c);
      sum_chunks<V>(partial + c, chunks, kSums * c, (kSums - 1) * c, static_cast<Lane*>(a.sums) + n * (kSums - 1) * c);
    }
  });
}

template <>
void bn_act_combine<Isa::FUSEDTRAIN_ISA>(const BnActCombine& a, int64_t begin, int64_t end) {
  visit_acc(a.dtype, [&]<class Lane>() {
    for (int64_t first = begin; first < end; first += kFinishBlock) {
      const int width = int(std::min<int64_t>(kFinishBlock, end - first));
      double du[kFinishBlock] = {}, du_x[kFinishBlock] = {};
      for (int64_t n = 0; n < a.n; ++n) {
        const Lane* sums = static_cast<const Lane*>(a.sums) + n * (BnActReduce::kSums - 1) * a.c + first;
        const Lane* gate = static_cast<const Lane*>(a.gate) + n * a.c + first;
        const Lane* dpooled = static_cast<const Lane*>(a.dpooled) + n * a.c + first;
        for (int k = 0; k < width; ++k) {
          const double g = double(gate[k]), d = double(dpooled[k]) / double(a.hw);
          du[k] += g * double(sums[k]) + d * double(sums[a.c + k]);
          du_x[k] += g * double(sums[2 * a.c + k]) + d * double(sums[3 * a.c + k]);
        }
      }
      for (int k = 0; k < width; ++k) {
        const double rstd = double(static_cast<const Lane*>(a.rstd)[first + k]);
        static_cast<Lane*>(a.sum_du)[first + k] = Lane(du[k]);
        static_cast<Lane*>(a.sum_du_xhat)[first + k] = Lane(du_x[k] * rstd);
      }
    }
  });
}

template <>
void bn_act_backward<Isa::FUSEDTRAIN_ISA>(const BnActBackward& a, int64_t begin, int64_t end) {
  visit_images(a.in.images, [&]<class T, class A>(A act) {
    const auto vector = [](const void* p) { return static_cast<const Acc<T>*>(p); };
    const Backward<T, A> backward{Normalised<T>(a.in),
                                  static_cast<const T*>(a.dy),
                                  vector(a.gate),
                                  vector(a.dpooled),
                                  vector(a.sum_du),
                                  vector(a.sum_du_xhat),
                                  1 / double(a.in.images.hw),
                                  1 / a.count,
                                  act};
    write_images<Vec<Acc<T>>>(a.in.images, static_cast<T*>(a.dz), backward, begin, end);
  });
}

}  // namespace fusedtrain::cpu

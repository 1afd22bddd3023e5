// Backward pass of batch_norm_act on the CPU; the activation is computed again.
//   z = weight xhat + bias + before        dz = a'(z) dy        xhat = (x - mean) rstd
//   sum_dz = sum dz                        sum_dz_xhat = rstd sum dz (x - mean)
//   dx = weight rstd (dz - sum_dz / count - xhat sum_dz_xhat / count)
#include "batch_norm_act.h"
#include "cpu/batch_sums.h"

namespace fusedtrain::cpu {
namespace {

// dz of one vector, and x - mean.
template <class T, class A>
struct Gradient {
  using Element = T;
  using Lane = Acc<T>;
  using V = Vec<Lane>;
  using Params = typename PreActivation<T>::Params;
  PreActivation<T> z;
  const T* dy;
  A act;

  Params params(auto at) const { return z.params(at); }
  void prefetch(int64_t i) const {
    fetch(z.x + i);
    fetch(dy + i);
    // Of float32, and where arithmetic bounds, it gained nothing, but on processors that want to be asked.
    constexpr bool kGains = sizeof(T) == 2 && A::kSelects;
    if (!A::kIdentity && (kGains || asks_ahead) && z.before != nullptr) fetch(z.before + i);
  }
  template <class W>
  struct Pair {
    W dz, centred;
  };
  [[gnu::always_inline]] auto operator()(int64_t i, const Params& p, auto lanes) const {
    if constexpr (A::kIdentity) {
      const auto da = load<V>(dy + i, lanes);
      return Pair<std::remove_const_t<decltype(da)>>{da, z.centred(i, p, lanes)};
    } else {
      const auto u = [&]() __attribute__((always_inline)) { return z(i, z.centred(i, p, lanes), p, lanes); };
      const auto da = [&]() __attribute__((always_inline)) { return load<V>(dy + i, lanes); };
      const auto dz = rounded(through(u, da, lanes));
      return Pair<std::remove_const_t<decltype(dz)>>{dz, z.centred(i, p, lanes)};
    }
  }

 private:
  // a'(u_of()) da_of(); see logistic().
  [[gnu::always_inline]] auto through(const auto& u_of, const auto& da_of, auto lanes) const {
    using W = decltype(u_of());
    if constexpr (A::kInTurn && kFillsRegisters<decltype(lanes)>) {
      const W s = logistic<T>(lanes, u_of);
      return act.slope(u_of(), s) * da_of();
    } else {
      const W u = u_of(), da = da_of();
      return act.through(u, da);
    }
  }
};

template <class T, class A>
Gradient<T, A> gradient_of(const BatchNormInputs& in, const void* dy, A act) {
  return {PreActivation<T>(in), static_cast<const T*>(dy), act};
}

// sum dz, sum dz (x - mean); writes dz if it keeps it.
template <class T, class A, bool kKeeps>
struct Sums : Gradient<T, A> {
  using Base = Gradient<T, A>;
  using typename Base::Element, typename Base::Lane, typename Base::Params, typename Base::V;
  static constexpr int kSums = 2, kStreams = 2;
  static constexpr bool kInTurn = A::kInTurn && kVecBytes == 32;
  T* kept;

  void prefetch(int64_t i) const {
    Base::prefetch(i);
    if (kKeeps) fetch_for_store(kept + i);
  }

  struct State {
    V dz, dz_x;

    void start(const Sums&, int64_t, int64_t, int64_t, auto) { dz = dz_x = V(0); }
    void clear(const State&) { dz = dz_x = V(0); }
    // Absent lanes have dy = 0; their slope, of no matter what, must not make that NaN.
    [[gnu::always_inline]] void add(const Sums& f, int64_t i, const Params& params, auto lanes) {
      const auto [d, centred] = f(i, params, lanes);
      if constexpr (kKeeps) cpu::store(f.kept + i, d, lanes);
      add_to(dz, keep(d, lanes));
      add_to(dz_x, keep(d * centred, lanes));
    }
    void merge(const State& s) {
      dz += s.dz;
      dz_x += s.dz_x;
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

  void plane(int64_t first, int64_t ch, int64_t hw, Lane* out, int64_t c) const {
    constexpr int64_t kStretch = 128 * V::kLanes;  // at most 64 terms are added to one lane before doubles take over
    const Params params = this->params([ch](const Lane* p) { return V(p[ch]); });
    const Sums f = *this;  // as in walk_rows
    const bool ahead = asks_ahead;
    double sum = 0, sum_x = 0;
    for (int64_t begin = 0; begin < hw; begin += kStretch) {
      const int64_t end = std::min(begin + kStretch, hw);
      State s[2] = {{V(0), V(0)}, {V(0), V(0)}};
      int64_t i = begin;
      for (; i + 2 * V::kLanes <= end; i += 2 * V::kLanes) {
        for (int k = 0; k < 2; ++k) {
          const int64_t at = first + i + k * V::kLanes;
          if (ahead) f.prefetch(at + kAhead<T>);
          s[k].add(f, at, params, AllLanes{});
        }
      }
      for_each_vector<V>(end - i, [&](int64_t j, auto lanes) { s[0].add(f, first + i + j, params, lanes); });
      sum += lane_sum(s[0].dz + s[1].dz);
      sum_x += lane_sum(s[0].dz_x + s[1].dz_x);
    }
    out[0] = Lane(sum);
    out[c] = Lane(sum_x);
  }
};

// dx of one vector, or dbefore where there is no dx; writes dbefore beside dx where that is wanted too. dx is that of
// dz as T, wherever dz comes from.
template <class T, class A>
struct Backward {
  static constexpr bool kInTurn = A::kInTurn, kInPages = false;
  using Element = T;
  using Lane = Acc<T>;
  using V = Vec<Lane>;
  Gradient<T, A> gradient;
  const Lane *sum_dz, *sum_dz_xhat;  // null for fixed statistics
  T* dbefore;
  bool with_dx;
  Lane per_count;

  struct Params {
    typename Gradient<T, A>::Params z;
    V base, slope;  // of what the statistics take off dz: base + slope (x - mean)
  };
  Params params(auto at) const {
    if (sum_dz == nullptr) return {gradient.params(at), V(0), V(0)};
    return {gradient.params(at), at(sum_dz) * V(per_count), at(sum_dz_xhat) * V(per_count) * at(gradient.z.rstd)};
  }
  void prefetch(int64_t i) const { gradient.prefetch(i); }
  [[gnu::always_inline]] auto operator()(int64_t i, const Params& p, auto lanes) const {
    const auto [exact, centred] = gradient(i, p.z, lanes);
    const auto dz = A::kSelects ? exact : round_to<T>(exact);
    auto out = dz;
    if (!with_dx) return out;
    if (dbefore != nullptr) store(dbefore + i, dz, lanes);
    out = p.z.scale * (dz - p.base - centred * p.slope);
    return out;
  }
};

// The same of fixed statistics, from y; dbefore is written beside dx where it is wanted.
template <class T, class A>
struct FixedBackward {
  static constexpr bool kInPages = true;
  using Element = T;
  using Lane = Acc<T>;
  using V = Vec<Lane>;
  const T *dy, *y;
  const Lane* scale;
  T* dbefore;

  struct Params {
    V scale;
  };
  Params params(auto at) const { return {at(scale)}; }
  void prefetch(int64_t i) const {
    fetch(dy + i);
    if (!A::kIdentity) fetch(y + i);
  }
  V operator()(int64_t i, const Params& p, auto lanes) const {
    V dz = load<V>(dy + i, lanes);
    if constexpr (!A::kIdentity) dz = A::through(load<V>(y + i, lanes), dz);
    if (dbefore != nullptr) store(dbefore + i, dz, lanes);
    return p.scale * dz;
  }
};

}  // namespace

template <>
void batch_norm_act_reduce_partial<Isa::FUSEDTRAIN_ISA>(const BatchNormReduce& a, int64_t begin, int64_t end) {
  visit_dtype(a.in.images.dtype, [&]<class T>() {
    visit_act<T, kActs>(a.in.act, [&]<class A>(A act) {
      const auto add_up = [&]<bool kKeeps>() {
        const Sums<T, A, kKeeps> sums{gradient_of<T>(a.in, a.dy, act), static_cast<T*>(a.dz)};
        walk_items(a.in.images, sums, static_cast<Acc<T>*>(a.partial), begin, end);
      };
      if constexpr (A::kIdentity) {  // dz is dy
        add_up.template operator()<false>();
      } else {
        visit_bool(a.dz != nullptr, add_up);
      }
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
      for_each_part(a.in.images, a.fold, 2, [&](int64_t offset, int64_t) {
        const Lane* part = static_cast<const Lane*>(a.partial) + offset + first;
        for (int k = 0; k < width; ++k) {
          dz[k] += double(part[k]);
          dz_x[k] += double(part[c + k]);
        }
      });
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
    visit_act<T, kActs>(a.in.act, [&]<class A>(A act) {
      const auto vector = [](const void* p) { return static_cast<const Acc<T>*>(p); };
      T *dx = static_cast<T*>(a.dx), *dbefore = static_cast<T*>(a.dbefore);
      const Backward<T, A> f{gradient_of<T>(a.in, a.dy, act),
                             vector(a.sum_dz),
                             vector(a.sum_dz_xhat),
                             dbefore,
                             dx != nullptr,
                             Acc<T>(1 / a.count)};
      map_items(a.in.images, dx != nullptr ? dx : dbefore, f, begin, end);
    });
  });
}

template <>
void batch_norm_act_fixed_backward<Isa::FUSEDTRAIN_ISA>(const BatchNormFixedBackward& a, int64_t begin, int64_t end) {
  visit_dtype(a.images.dtype, [&]<class T>() {
    visit_bool(a.act == Activation::kIdentity, [&]<bool kIdentity>() {
      using A = StaticAct<T, kIdentity ? Activation::kIdentity : Activation::kRelu>;
      const FixedBackward<T, A> f{static_cast<const T*>(a.dy), static_cast<const T*>(a.y),
                                  static_cast<const Acc<T>*>(a.scale), static_cast<T*>(a.dbefore)};
      map_items(a.images, static_cast<T*>(a.dx), f, begin, end);
    });
  });
}

}  // namespace fusedtrain::cpu

// What stands around the products of mlp on the CPU: each of these reads and writes its images once.
#include "mlp.h"

#include "cpu/sample_walks.h"

namespace fusedtrain::cpu {
namespace {

struct Nothing {};

template <class T, class A>
struct Value {
  using Element = T;
  using V = Vec<Acc<T>>;
  const T* h;
  A act;

  Nothing at(int64_t, int64_t, const auto&) const { return {}; }
  V operator()(int64_t i, auto lanes, Nothing) const { return act.value(load<V>(h + i, lanes)); }
  void prefetch(int64_t i) const { fetch(h + i); }
};

// As a sum, that of dh, which writes dh and g on the way.
template <class T, class A>
struct Slope {
  using Element = T;
  using V = Vec<Acc<T>>;
  static constexpr int kSums = MlpActBackward::kSums;
  const T* h;
  A act;
  T *dg, *g;

  Nothing at(int64_t, int64_t, const auto&) const { return {}; }
  void add(auto* sums, int64_t i, auto lanes, Nothing) const {
    const V x = load<V>(h + i, lanes), d = load<V>(dg + i, lanes);
    V value, dh;
    if constexpr (std::is_same_v<A, StaticAct<T, Activation::kGelu>>) {
      act.both(x, d, value, dh);
    } else {
      value = act.value(x), dh = act.through(x, d);
    }
    store(dg + i, dh, lanes);
    if (g != nullptr) store(g + i, value, lanes);
    sums[0] += dh;
  }
  void prefetch(int64_t i) const {
    fetch(h + i), fetch(dg + i);
    if (g != nullptr) fetch(g + i);
  }
};

// Y is the type of y and of the residual.
template <class T, class Y>
struct Scaled {
  using Lane = Acc<T>;
  using V = Vec<Lane>;
  const T* z;
  const Y* residual;
  const Lane* scale;

  V at(int64_t, int64_t ch, const auto& get) const { return get(scale + ch); }
  V operator()(int64_t i, auto lanes, V factor) const {
    const V scaled = load<V>(z + i, lanes) * factor;
    return residual == nullptr ? scaled : load<V>(residual + i, lanes) + scaled;
  }
  void prefetch(int64_t i) const {
    fetch(z + i);
    if (residual != nullptr) fetch(residual + i);
  }
};

// As sums, those of dy z and dz, which write dz on the way.
template <class T, class Y>
struct ScaledSlope {
  using Element = T;
  using Lane = Acc<T>;
  using V = Vec<Lane>;
  static constexpr int kSums = MlpScaleBackward::kSums;
  const T* z;
  const Y* dy;
  const Lane* scale;
  T* dz;

  V at(int64_t, int64_t ch, const auto& get) const { return get(scale + ch); }
  void add(auto* sums, int64_t i, auto lanes, V factor) const {
    const V d = load<V>(dy + i, lanes), scaled = d * factor;
    store(dz + i, scaled, lanes);
    sums[0] += d * load<V>(z + i, lanes);
    sums[1] += scaled;
  }
  void prefetch(int64_t i) const { fetch(z + i), fetch(dy + i), fetch(dz + i); }
};

// f.template operator()<T>(act). GELU, which most networks have there, has code of its own.
template <class F>
void visit_images(const Images& m, F&& f) {
  visit_dtype(m.dtype, [&]<class T>() {
    if constexpr (!kRareVariant && !std::is_same_v<T, double>) {
      if (m.in_act == Activation::kGelu) return f.template operator()<T>(StaticAct<T, Activation::kGelu>{});
    }
    f.template operator()<T>(RunTimeAct<T, kInputActs>(m.in_act));
  });
}

// f.template operator()<T, Y>().
template <class F>
void visit_types(DType dtype, bool wide, F&& f) {
  visit_dtype(dtype, [&]<class T>() {
    if constexpr (!std::is_same_v<T, Acc<T>>) {
      if (wide) return f.template operator()<T, Acc<T>>();
    }
    f.template operator()<T, T>();
  });
}

// total[ch], for channels [begin, end), from the k-th of kSums sums of every chunk.
template <int kSums, class Lane>
void finish(const Images& m, const Lane* partial, int k, Lane* total, int64_t begin, int64_t end) {
  sum_chunks<Vec<Lane>>(partial + k * m.c + begin, m.n * reduce_chunks(m), kSums * m.c, end - begin, total + begin);
}

}  // namespace

template <>
void mlp_act<Isa::FUSEDTRAIN_ISA>(const MlpAct& a, int64_t begin, int64_t end) {
  visit_images(a.images, [&]<class T, class A>(A act) {
    const Value<T, A> value{static_cast<const T*>(a.h), act};
    const auto g = static_cast<T*>(a.g);
    if (a.g == a.h) return map_images<false, Vec<Acc<T>>>(a.images, g, value, begin, end);  // it is in the caches
    write_images<Vec<Acc<T>>>(a.images, g, value, begin, end);
  });
}

template <>
void mlp_act_backward_partial<Isa::FUSEDTRAIN_ISA>(const MlpActBackward& a, int64_t begin, int64_t end) {
  visit_images(a.images, [&]<class T, class A>(A act) {
    const Slope<T, A> slope{static_cast<const T*>(a.h), act, static_cast<T*>(a.dg), static_cast<T*>(a.g)};
    sum_terms<Vec<Acc<T>>>(a.images, slope, static_cast<Acc<T>*>(a.partial), begin, end);
  });
}

template <>
void mlp_act_backward_finish<Isa::FUSEDTRAIN_ISA>(const MlpActBackward& a, int64_t begin, int64_t end) {
  visit_acc(a.images.dtype, [&]<class Lane>() {
    const Lane* partial = static_cast<const Lane*>(a.partial);
    finish<MlpActBackward::kSums>(a.images, partial, 0, static_cast<Lane*>(a.db), begin, end);
  });
}

template <>
void mlp_scale<Isa::FUSEDTRAIN_ISA>(const MlpScale& a, int64_t begin, int64_t end) {
  visit_types(a.images.dtype, a.wide, [&]<class T, class Y>() {
    using Lane = Acc<T>;
    const Scaled<T, Y> scaled{static_cast<const T*>(a.z), static_cast<const Y*>(a.residual),
                              static_cast<const Lane*>(a.scale)};
    write_images<Vec<Lane>>(a.images, static_cast<Y*>(a.y), scaled, begin, end);
  });
}

template <>
void mlp_scale_backward_partial<Isa::FUSEDTRAIN_ISA>(const MlpScaleBackward& a, int64_t begin, int64_t end) {
  visit_types(a.images.dtype, a.wide, [&]<class T, class Y>() {
    using Lane = Acc<T>;
    const ScaledSlope<T, Y> slope{static_cast<const T*>(a.z), static_cast<const Y*>(a.dy),
                                  static_cast<const Lane*>(a.scale), static_cast<T*>(a.dz)};
    sum_terms<Vec<Lane>>(a.images, slope, static_cast<Lane*>(a.partial), begin, end);
  });
}

template <>
void mlp_scale_backward_finish<Isa::FUSEDTRAIN_ISA>(const MlpScaleBackward& a, int64_t begin, int64_t end) {
  visit_acc(a.images.dtype, [&]<class Lane>() {
    const Lane* partial = static_cast<const Lane*>(a.partial);
    finish<MlpScaleBackward::kSums>(a.images, partial, 0, static_cast<Lane*>(a.dscale), begin, end);
    finish<MlpScaleBackward::kSums>(a.images, partial, 1, static_cast<Lane*>(a.db), begin, end);
  });
}

}  // namespace fusedtrain::cpu

// global_response_norm on the CPU; a(x) is computed again wherever it is needed, but where y may keep it.
#include "global_response_norm.h"

#include <cmath>

#include "cpu/sample_walks.h"

namespace fusedtrain::cpu {
namespace {

template <class T, class A>
struct Activated {
  using Element = T;
  using Lane = Acc<T>;
  using V = Vec<Lane>;
  const T* x;
  A act;

  V value(int64_t i, auto lanes) const { return act.value(load<V>(x + i, lanes)); }
  void prefetch(int64_t i) const { fetch(x + i); }
};

// Whether the first pass of forward leaves a(x) in y, which holds it exactly, for the second: where short vectors take
// longer over it than the caches over a(x) (benchmarks/LOG.md, 2026-11-30).
template <class T, class A>
constexpr bool kKeeps = kVecBytes < 64 && std::is_same_v<T, Acc<T>> && !A::kIdentity;

template <class T, class A>
struct Squares : Activated<T, A> {
  static constexpr int kSums = 1;
  T* y;
  struct At {};
  At at(int64_t, int64_t, const auto&) const { return {}; }
  void add(auto* sums, int64_t i, auto lanes, At) const {
    const auto value = this->value(i, lanes);
    if constexpr (kKeeps<T, A>) store(y + i, value, lanes);
    sums[0] += value * value;
  }
};

template <class T, class A>
struct Scaled : Activated<T, A> {
  using typename Activated<T, A>::V, typename Activated<T, A>::Lane;
  const Lane *factor, *bias;
  struct At {
    V factor, bias;
  };
  At at(int64_t nc, int64_t ch, const auto& get) const { return {get(factor + nc), get(bias + ch)}; }
  V operator()(int64_t i, auto lanes, const At& p) const { return this->value(i, lanes) * p.factor + p.bias; }
};

template <class T, class A>
struct Dots : Activated<T, A> {
  using typename Activated<T, A>::V;
  static constexpr int kSums = GlobalResponseNormBackward::kSums;
  const T* dy;
  struct At {};
  At at(int64_t, int64_t, const auto&) const { return {}; }
  void add(auto* sums, int64_t i, auto lanes, At) const {
    const auto d = load<V>(dy + i, lanes);
    sums[0] += d * this->value(i, lanes);
    sums[1] += d;
  }
  void prefetch(int64_t i) const { fetch(this->x + i), fetch(dy + i); }
};

template <class T, class A>
struct Backward : Activated<T, A> {
  using typename Activated<T, A>::V, typename Activated<T, A>::Lane;
  const T* dy;
  const Lane *factor, *slope;
  struct At {
    V factor, slope;
  };
  At at(int64_t nc, int64_t, const auto& get) const { return {get(factor + nc), get(slope + nc)}; }
  V operator()(int64_t i, auto lanes, const At& p) const {
    const V x = load<V>(this->x + i, lanes), da = load<V>(dy + i, lanes) * p.factor + this->act.value(x) * p.slope;
    return this->act.through(x, da);
  }
  void prefetch(int64_t i) const { fetch(this->x + i), fetch(dy + i); }
};

// f.template operator()<T>(act). GELU, which stands in front in ConvNeXt V2, has code of its own.
template <class F>
void visit_images(const Images& m, F&& f) {
  visit_dtype(m.dtype, [&]<class T>() {
    using enum Activation;
    if (m.in_act == kIdentity) return f.template operator()<T>(StaticAct<T, kIdentity>{});
    if constexpr (!kRareVariant && !std::is_same_v<T, double>) {
      if (m.in_act == kGelu) return f.template operator()<T>(StaticAct<T, kGelu>{});
    }
    f.template operator()<T>(RunTimeAct<T, kInputActs>(m.in_act));
  });
}

// The mean of the norms of one image, and eps: as a double, which products of many channels need.
template <class Lane>
double mean_of(const Lane* norm, int64_t c, double eps) {
  double sum = 0;
  for (int64_t ch = 0; ch < c; ++ch) sum += double(norm[ch]);
  return sum / double(c) + eps;
}

}  // namespace

template <>
void global_response_norm_partial<Isa::FUSEDTRAIN_ISA>(const GlobalResponseNorm& a, int64_t begin, int64_t end) {
  visit_images(a.images, [&]<class T, class A>(A act) {
    const Squares<T, A> squares{{static_cast<const T*>(a.x), act}, static_cast<T*>(a.y)};
    sum_terms<Vec<Acc<T>>>(a.images, squares, static_cast<Acc<T>*>(a.partial), begin, end);
  });
}

template <>
void global_response_norm_finish<Isa::FUSEDTRAIN_ISA>(const GlobalResponseNorm& a, int64_t begin, int64_t end) {
  const int64_t c = a.images.c, chunks = reduce_chunks(a.images);
  visit_acc(a.images.dtype, [&]<class Lane>() {
    const Lane* weight = static_cast<const Lane*>(a.weight);
    for (int64_t n = begin; n < end; ++n) {
      Lane *norm = static_cast<Lane*>(a.norm) + n * c, *factor = static_cast<Lane*>(a.factor) + n * c;
      sum_chunks<Vec<Lane>>(static_cast<const Lane*>(a.partial) + n * chunks * c, chunks, c, c, norm);
      for (int64_t ch = 0; ch < c; ++ch) norm[ch] = std::sqrt(norm[ch]);
      const double mean = mean_of(norm, c, a.eps);
      for (int64_t ch = 0; ch < c; ++ch) factor[ch] = Lane(1) + weight[ch] * Lane(double(norm[ch]) / mean);
    }
  });
}

template <>
void global_response_norm<Isa::FUSEDTRAIN_ISA>(const GlobalResponseNorm& a, int64_t begin, int64_t end) {
  visit_images(a.images, [&]<class T, class A>(A act) {
    using Lane = Acc<T>;
    T* const y = static_cast<T*>(a.y);
    const auto *factor = static_cast<const Lane*>(a.factor), *bias = static_cast<const Lane*>(a.bias);
    if constexpr (kKeeps<T, A>) {
      using Kept = StaticAct<T, Activation::kIdentity>;
      const Scaled<T, Kept> scaled{{y, Kept{}}, factor, bias};
      map_images<false, Vec<Lane>>(a.images, y, scaled, begin, end);  // not past the caches, which hold a(x)
    } else {
      const Scaled<T, A> scaled{{static_cast<const T*>(a.x), act}, factor, bias};
      write_images<Vec<Lane>>(a.images, y, scaled, begin, end);
    }
  });
}

template <>
void global_response_norm_backward_partial<Isa::FUSEDTRAIN_ISA>(const GlobalResponseNormBackward& a, int64_t begin,
                                                                int64_t end) {
  visit_images(a.images, [&]<class T, class A>(A act) {
    const Dots<T, A> dots{{static_cast<const T*>(a.x), act}, static_cast<const T*>(a.dy)};
    sum_terms<Vec<Acc<T>>>(a.images, dots, static_cast<Acc<T>*>(a.partial), begin, end);
  });
}

template <>
void global_response_norm_backward_finish<Isa::FUSEDTRAIN_ISA>(const GlobalResponseNormBackward& a, int64_t begin,
                                                               int64_t end) {
  constexpr int64_t kSums = GlobalResponseNormBackward::kSums;
  const int64_t c = a.images.c, chunks = reduce_chunks(a.images);
  visit_acc(a.images.dtype, [&]<class Lane>() {
    const Lane* weight = static_cast<const Lane*>(a.weight);
    for (int64_t n = begin; n < end; ++n) {
      const auto row = [&](const void* p) { return static_cast<Lane*>(const_cast<void*>(p)) + n * c; };
      const Lane *norm = row(a.norm), *partial = static_cast<const Lane*>(a.partial) + n * chunks * kSums * c;
      Lane *dot = row(a.dweights), *factor = row(a.factor), *slope = row(a.slope);
      sum_chunks<Vec<Lane>>(partial, chunks, kSums * c, c, dot);
      sum_chunks<Vec<Lane>>(partial + c, chunks, kSums * c, c, row(a.dbiases));
      const double mean = mean_of(norm, c, a.eps);
      double shared = 0;  // through the mean
      for (int64_t ch = 0; ch < c; ++ch) shared += double(weight[ch]) * double(dot[ch]) * double(norm[ch]);
      shared /= double(c) * mean * mean;
      for (int64_t ch = 0; ch < c; ++ch) {
        const double relative = double(norm[ch]) / mean, dnorm = double(weight[ch]) * double(dot[ch]) / mean - shared;
        factor[ch] = Lane(1) + weight[ch] * Lane(relative);
        slope[ch] = norm[ch] == Lane(0) ? Lane(0) : Lane(dnorm / double(norm[ch]));
        dot[ch] *= Lane(relative);
      }
    }
  });
}

template <>
void global_response_norm_backward<Isa::FUSEDTRAIN_ISA>(const GlobalResponseNormBackward& a, int64_t begin,
                                                        int64_t end) {
  visit_images(a.images, [&]<class T, class A>(A act) {
    using Lane = Acc<T>;
    const Backward<T, A> backward{{static_cast<const T*>(a.x), act},
                                  static_cast<const T*>(a.dy),
                                  static_cast<const Lane*>(a.factor),
                                  static_cast<const Lane*>(a.slope)};
    write_images<Vec<Lane>>(a.images, static_cast<T*>(a.dx), backward, begin, end);
  });
}

template <>
void global_response_norm_backward_params<Isa::FUSEDTRAIN_ISA>(const GlobalResponseNormBackward& a, int64_t begin,
                                                               int64_t end) {
  visit_acc(a.images.dtype, [&]<class Lane>() {
    const auto sum = [&](const void* images, void* total, int64_t first, int width) {
      double sums[kFinishBlock] = {};
      for (int64_t n = 0; n < a.images.n; ++n) {
        const Lane* image = static_cast<const Lane*>(images) + n * a.images.c + first;
        for (int k = 0; k < width; ++k) sums[k] += double(image[k]);
      }
      for (int k = 0; k < width; ++k) static_cast<Lane*>(total)[first + k] = Lane(sums[k]);
    };
    for (int64_t first = begin; first < end; first += kFinishBlock) {
      const int width = int(std::min<int64_t>(kFinishBlock, end - first));
      sum(a.dweights, a.dweight, first, width);
      sum(a.dbiases, a.dbias, first, width);
    }
  });
}

}  // namespace fusedtrain::cpu

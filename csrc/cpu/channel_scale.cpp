// channel_scale on the CPU.
//   y = a(x) * gate                dgate = sum_hw dy * a(x)
//   dx = a'(x) * (dy * gate + dpool)
#include "channel_scale.h"

#include "cpu/channels.h"

namespace fusedtrain::cpu {

template <>
void channel_scale<Isa::FUSEDTRAIN_ISA>(const ChannelScale& a, int64_t begin, int64_t end) {
  visit_dtype(a.images.dtype, [&]<class T>() {
    visit_in_act(a.images.in_act, [&]<Activation A>() {
      using V = Vec<Acc<T>>;
      const T* x = static_cast<const T*>(a.x);
      const auto scaled = [x](int64_t i, auto lanes, V gate) { return Act<A, T>::value(load<V>(x + i, lanes)) * gate; };
      map_items<V>(a.images, a.images.n, static_cast<T*>(a.y), scaled, begin, end, static_cast<const Acc<T>*>(a.gate));
    });
  });
}

template <>
void channel_scale_dot_partial<Isa::FUSEDTRAIN_ISA>(const ChannelScaleDot& a, int64_t begin, int64_t end) {
  visit_dtype(a.images.dtype, [&]<class T>() {
    visit_in_act(a.images.in_act, [&]<Activation A>() {
      using V = Vec<Acc<T>>;
      const T *x = static_cast<const T*>(a.x), *dy = static_cast<const T*>(a.dy);
      const auto product = [x, dy](int64_t i, int64_t, auto lanes) {
        return load<V>(dy + i, lanes) * Act<A, T>::value(load<V>(x + i, lanes));
      };
      sum_items<V>(a.images, reduce_chunks(a.images), a.images.c, product, static_cast<Acc<T>*>(a.partial), begin, end);
    });
  });
}

template <>
void channel_scale_dot_finish<Isa::FUSEDTRAIN_ISA>(const ChannelScaleDot& a, int64_t begin, int64_t end) {
  const int64_t c = a.images.c, chunks = reduce_chunks(a.images);
  const auto finish = [&]<class Lane>() {
    for (int64_t n = begin; n < end; ++n) {
      sum_chunks<Vec<Lane>>(static_cast<const Lane*>(a.partial) + n * chunks * c, chunks, c, c,
                            static_cast<Lane*>(a.dgate) + n * c);
    }
  };
  a.images.dtype == DType::kFloat64 ? finish.template operator()<double>() : finish.template operator()<float>();
}

template <>
void channel_scale_backward<Isa::FUSEDTRAIN_ISA>(const ChannelScaleBackward& a, int64_t begin, int64_t end) {
  visit_dtype(a.images.dtype, [&]<class T>() {
    visit_in_act(a.images.in_act, [&]<Activation A>() {
      using V = Vec<Acc<T>>;
      const T *x = static_cast<const T*>(a.x), *dy = static_cast<const T*>(a.dy);
      T* dx = static_cast<T*>(a.dx);
      const auto* gate = static_cast<const Acc<T>*>(a.gate);
      const auto* dpooled = static_cast<const Acc<T>*>(a.dpooled);
      const bool with_peak = a.pool == Pool::kAvgMax && dpooled != nullptr;
      const V share(with_peak ? 0.5 : 1.0), per_pixel = share / V(Acc<T>(a.images.hw));
      // a'(x) * da; the identity does not touch x.
      const auto through_act = [x](int64_t i, auto lanes, V da) {
        if constexpr (A == Activation::kIdentity) {
          return da;
        } else {
          return Act<A, T>::slope(load<V>(x + i, lanes)) * da;
        }
      };
      if (with_peak) {
        const auto all = [&](int64_t i, auto lanes, V g, V dp, V top, V count) {
          const V at_top = vselect(Act<A, T>::value(load<V>(x + i, lanes)) == top, V(1), V(0));
          const V dpool = dp * per_pixel + at_top * (share * dp / count);
          return through_act(i, lanes, dy ? load<V>(dy + i, lanes) * g + dpool : dpool);
        };
        map_items<V>(a.images, a.images.n, dx, all, begin, end, gate, dpooled, static_cast<const Acc<T>*>(a.peak),
                     static_cast<const Acc<T>*>(a.ties));
      } else if (dy != nullptr) {
        const auto both = [&](int64_t i, auto lanes, V g, V dp) {
          return through_act(i, lanes, load<V>(dy + i, lanes) * g + dp * per_pixel);
        };
        map_items<V>(a.images, a.images.n, dx, both, begin, end, gate, dpooled);
      } else {
        const auto pooled_only = [&](int64_t i, auto lanes, V dp) { return through_act(i, lanes, dp * per_pixel); };
        map_items<V>(a.images, a.images.n, dx, pooled_only, begin, end, dpooled);
      }
    });
  });
}

}  // namespace fusedtrain::cpu

// channel_scale on the CPU.
//   y = a(x) * gate                dgate = sum_hw dy * a(x)
//   dx = a'(x) * (dy * gate + dpool)
#include "channel_scale.h"

#include "cpu/channels.h"

namespace fusedtrain::cpu {

template <>
void channel_scale<Isa::FUSEDTRAIN_ISA>(const ChannelScale& a, int64_t begin, int64_t end) {
  visit_dtype(a.images.dtype, [&]<class T>() {
    visit_act<T>(a.images.in_act, [&](auto act) {
      using V = Vec<Acc<T>>;
      const T* x = static_cast<const T*>(a.x);
      const auto scaled = [x, act](int64_t i, auto lanes, V gate) { return act.value(load<V>(x + i, lanes)) * gate; };
      map_items<V>(a.images, a.images.n, static_cast<T*>(a.y), Over(scaled, x), begin, end,
                   static_cast<const Acc<T>*>(a.gate));
    });
  });
}

template <>
void channel_scale_dot_partial<Isa::FUSEDTRAIN_ISA>(const ChannelScaleDot& a, int64_t begin, int64_t end) {
  visit_dtype(a.images.dtype, [&]<class T>() {
    visit_act<T>(a.images.in_act, [&](auto act) {
      using V = Vec<Acc<T>>;
      const T *x = static_cast<const T*>(a.x), *dy = static_cast<const T*>(a.dy);
      const auto product = [x, dy, act](int64_t i, int64_t, auto lanes) {
        return load<V>(dy + i, lanes) * act.value(load<V>(x + i, lanes));
      };
      sum_items<V>(a.images, reduce_chunks(a.images), a.images.c, product, static_cast<Acc<T>*>(a.partial), begin, end,
                   dy, x);
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
  const Images& m = a.images;
  visit_dtype(m.dtype, [&]<class T>() {
    using V = Vec<Acc<T>>;
    const T *x = static_cast<const T*>(a.x), *dy = static_cast<const T*>(a.dy);
    T* dx = static_cast<T*>(a.dx);
    const auto vector = [](const void* p) { return static_cast<const Acc<T>*>(p); };
    if (a.pool == Pool::kAvgMax && a.dpooled != nullptr) {
      const V per_pixel = V(0.5) / V(Acc<T>(m.hw));
      const auto all = [=, act = RunTimeAct<T, kInputActs>(m.in_act)](int64_t i, auto lanes, V g, V dp, V top,
                                                                      V count) {
        const V value = load<V>(x + i, lanes), at_top = vselect(act.value(value) == top, V(1), V(0));
        const V dpool = dp * per_pixel + at_top * (V(0.5) * dp / count);
        return act.through(value, dy ? load<V>(dy + i, lanes) * g + dpool : dpool);
      };
      return map_items<V>(m, m.n, dx, Over(all, x), begin, end, vector(a.gate), vector(a.dpooled), vector(a.peak),
                          vector(a.ties));
    }
    visit_act<T>(m.in_act, [&](auto act) {
      const V per_pixel = V(1) / V(Acc<T>(m.hw));
      // a'(x) * da; the identity does not touch x.
      const auto through_act = [x, act](int64_t i, auto lanes, V da) {
        if constexpr (decltype(act)::kIdentity) {
          return da;
        } else {
          return act.through(load<V>(x + i, lanes), da);
        }
      };
      const auto reading = [x](const auto& f, const auto*... images) {
        if constexpr (decltype(act)::kIdentity) {
          return Over(f, images...);
        } else {
          return Over(f, images..., x);
        }
      };
      if (dy != nullptr) {
        const auto both = [=](int64_t i, auto lanes, V g, V dp) {
          return through_act(i, lanes, load<V>(dy + i, lanes) * g + dp * per_pixel);
        };
        map_items<V>(m, m.n, dx, reading(both, dy), begin, end, vector(a.gate), vector(a.dpooled));
      } else {
        const auto pooled_only = [=](int64_t i, auto lanes, V dp) { return through_act(i, lanes, dp * per_pixel); };
        map_items<V>(m, m.n, dx, reading(pooled_only), begin, end, vector(a.dpooled));
      }
    });
  });
}

}  // namespace fusedtrain::cpu

// channel_scale on the CPU.
//   y = a(x) * gate                dgate = sum_hw dy * a(x)
//   dx = a'(x) * (dy * gate + dpool)
#include "channel_scale.h"

#include "cpu/channels.h"

namespace fusedtrain::cpu {
namespace {

// Results of at least this many bytes leave the caches before anyone can read them.
constexpr int64_t kStreamBytes = 16 << 20;

// out = f(i, lanes, values...) for items [begin, end): rows of c for channels_last, planes of hw for contiguous.
// Each of `vectors` is acc [n, c] or null, and reaches f as a vector: its c values along a row, or one value repeated.
template <bool kStream, class V, class T, class F, class... Lanes>
void map_range(const Images& m, T* out, const F& f, int64_t begin, int64_t end, const Lanes*... vectors) {
  const auto write = [out](int64_t i, V value, auto lanes) {
    if constexpr (kStream) {
      stream(out + i, value);
    } else {
      store(out + i, value, lanes);
    }
  };
  for (int64_t item = begin; item < end; ++item) {
    if (m.layout == Layout::kContiguous) {
      const int64_t first = item * m.hw;
      const auto repeated = [&](const auto* vector) { return vector ? V(vector[item]) : V(0); };
      [&](auto... values) {
        for_each_vector<V>(m.hw,
                           [&](int64_t i, auto lanes) { write(first + i, f(first + i, lanes, values...), lanes); });
      }(repeated(vectors)...);
    } else {
      const int64_t first = item * m.c, n_c = item / m.hw * m.c;
      for_each_vector<V>(m.c, [&](int64_t ch, auto lanes) {
        const auto at = [&](const auto* vector) { return vector ? load<V>(vector + n_c + ch, lanes) : V(0); };
        write(first + ch, f(first + ch, lanes, at(vectors)...), lanes);
      });
    }
  }
  if constexpr (kStream) stream_fence();
}

// map_range with the kind of store that suits the result. Streaming needs rows of whole vectors on aligned addresses.
template <class V, class T, class F, class... Lanes>
void map_items(const Images& m, T* out, const F& f, int64_t begin, int64_t end, const Lanes*... vectors) {
  const int64_t row = m.layout == Layout::kContiguous ? m.hw : m.c;
  const bool aligned = row % V::kLanes == 0 && reinterpret_cast<uintptr_t>(out) % (V::kLanes * sizeof(T)) == 0;
  visit_bool(aligned && m.n * m.c * m.hw * int64_t(sizeof(T)) >= kStreamBytes,
             [&]<bool kStream>() { map_range<kStream, V>(m, out, f, begin, end, vectors...); });
}

}  // namespace

template <>
void channel_scale<Isa::FUSEDTRAIN_ISA>(const ChannelScale& a, int64_t begin, int64_t end) {
  visit_dtype(a.images.dtype, [&]<class T>() {
    visit_in_act(a.images.in_act, [&]<Activation A>() {
      using V = Vec<Acc<T>>;
      const T* x = static_cast<const T*>(a.x);
      const auto scaled = [x](int64_t i, auto lanes, V gate) { return Act<A>::value(load<V>(x + i, lanes)) * gate; };
      map_items<V>(a.images, static_cast<T*>(a.y), scaled, begin, end, static_cast<const Acc<T>*>(a.gate));
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
        return load<V>(dy + i, lanes) * Act<A>::value(load<V>(x + i, lanes));
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
          return Act<A>::slope(load<V>(x + i, lanes)) * da;
        }
      };
      if (with_peak) {
        const auto all = [&](int64_t i, auto lanes, V g, V dp, V top, V count) {
          const V at_top = vselect(Act<A>::value(load<V>(x + i, lanes)) == top, V(1), V(0));
          const V dpool = dp * per_pixel + at_top * (share * dp / count);
          return through_act(i, lanes, dy ? load<V>(dy + i, lanes) * g + dpool : dpool);
        };
        map_items<V>(a.images, dx, all, begin, end, gate, dpooled, static_cast<const Acc<T>*>(a.peak),
                     static_cast<const Acc<T>*>(a.ties));
      } else if (dy != nullptr) {
        const auto both = [&](int64_t i, auto lanes, V g, V dp) {
          return through_act(i, lanes, load<V>(dy + i, lanes) * g + dp * per_pixel);
        };
        map_items<V>(a.images, dx, both, begin, end, gate, dpooled);
      } else {
        const auto pooled_only = [&](int64_t i, auto lanes, V dp) { return through_act(i, lanes, dp * per_pixel); };
        map_items<V>(a.images, dx, pooled_only, begin, end, dpooled);
      }
    });
  });
}

}  // namespace fusedtrain::cpu

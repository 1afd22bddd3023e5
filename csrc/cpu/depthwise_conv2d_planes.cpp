// depthwise_conv2d on the CPU, contiguous images and square kernels of 3, 5 or 7: y and dx, plane by plane.
//   y[oy, ox]  = act(bias + sum_{ky, kx} weight[ky, kx] * x[oy * s + ky - top, ox * s + kx - left])
//   dx[iy, ix] = sum_{ky, kx: oy * s + ky - top = iy, ...} weight[ky, kx] * dy[oy, ox]
// A few rows of outputs by a vector of columns stay in registers; each vector of inputs is read once for all of them.
// dx falls apart into s phases per axis, each a correlation of dy at stride 1 with every s-th tap in reverse order.
#include "cpu/depthwise_planes.h"

namespace fusedtrain::cpu {
namespace {

constexpr int64_t kMostTile = 4;  // rows of outputs at a time

// f<rows>(first) for tiles of 4 rows, as many of 3 as it takes, and of 1 where there are too few.
template <class F>
void each_tile(int64_t count, F&& f) {
  for (int64_t first = 0, rows = 0; first < count; first += rows) {
    const int64_t left = count - first;
    rows = left < 3 ? 1 : left % kMostTile == 0 ? kMostTile : 3;
    visit<1, 3, 4>(rows, [&]<int kRows>() { f.template operator()<kRows>(first); });
  }
}

// out[t][col] = init + sum_{ky, kx} taps[ky][kx] * rows[t * kStride + ky][column col * kStride + kx]
template <int kKh, int kKw, int kStride, int kRows>
[[gnu::noinline]] void correlate_rows(const float* const* rows, int64_t half, const float* taps, float init, float* out,
                                      int64_t pitch, int64_t cols) {
  using V = PlaneVec;
  for_each_vector<V>(
      cols, [&](int64_t col, auto lanes) __attribute__((always_inline)) {
        V acc[kRows];
        unroll<kRows>([&](auto t) __attribute__((always_inline)) { acc[t] = V(init); });
        unroll<(kRows - 1) * kStride + kKh>([&](auto row) __attribute__((always_inline)) {
          const float* p = rows[row] + col;
          unroll<kKw>([&](auto kx) __attribute__((always_inline)) {
            const V x = load<V>(p + kx % kStride * half + kx / kStride);
            unroll<kRows>([&](auto t) __attribute__((always_inline)) {
              constexpr int ky = row - t * kStride;
              if constexpr (ky >= 0 && ky < kKh) acc[t] += V(taps[ky * kKw + kx]) * x;
            });
          });
        });
        unroll<kRows>([&](auto t) __attribute__((always_inline)) { store(out + t * pitch + col, acc[t], lanes); });
      });
}

// Rows of results [row][pitch] to their place [row][cols].
template <class T>
void put_rows(const float* in, int64_t pitch, int64_t rows, int64_t cols, Activation act, T* out) {
  for (int64_t row = 0; row < rows; ++row) {
    for_each_vector<PlaneVec>(cols, [&](int64_t col, auto lanes) {
      const PlaneVec y = load<PlaneVec>(in + row * pitch + col);
      store(out + row * cols + col, act == Activation::kIdentity ? y : activated(act, y), lanes);
    });
  }
}

// f(out, pitch) writes rows of results, at their place where they need not pass through `buffer`.
template <class T, class F>
void write_rows(float* buffer, int64_t rows, int64_t cols, Activation act, T* out, F&& f) {
  if constexpr (std::is_same_v<T, float>) {
    if (act == Activation::kIdentity) return f(out, cols);
  }
  const int64_t pitch = round_up(cols, kPlaneLanes);
  f(buffer, pitch);
  put_rows(buffer, pitch, rows, cols, act, out);
}

// dx[q * kStride + phase] = sum_{u < taps} weight[odd + kStride * (taps - 1 - u)] * dy[q + base + u], along one axis.
template <int kTaps, int kStride>
struct Phase {
  int64_t odd, taps, base;
  Phase(int64_t phase, int64_t pad)
      : odd((phase + pad) % kStride),
        taps((kTaps - odd + kStride - 1) / kStride),
        base((phase + pad - odd) / kStride - (taps - 1)) {}
};

// How far all phases of an axis reach before and behind q.
template <int kTaps, int kStride>
struct Reach {
  int64_t before = 0, behind = 0;
  explicit Reach(int64_t pad) {
    for (int phase = 0; phase < kStride; ++phase) {
      const Phase<kTaps, kStride> p(phase, pad);
      before = std::max(before, -p.base);
      behind = std::max(behind, p.base + p.taps - 1);
    }
  }
};

// f<kh, kw>() for the taps of a phase.
template <int kTaps, int kStride, class F>
void visit_phase(int64_t kh, int64_t kw, F&& f) {
  if constexpr (kStride == 1) {
    f.template operator()<kTaps, kTaps>();
  } else {
    constexpr int kMore = (kTaps + 1) / 2, kLess = kTaps / 2;
    visit<kMore, kLess>(
        kh, [&]<int kKh>() { visit<kMore, kLess>(kw, [&]<int kKw>() { f.template operator()<kKh, kKw>(); }); });
  }
}

// One channel of a band of dx.
template <class T, int kTaps, int kStride>
struct PlaneGradient {
  const DepthwiseSizes& s;
  const float* weight;  // [kTaps][kTaps]
  const PaddedRows<1>& dy;
  Reach<kTaps, kStride> above, before;  // row above.before of dy belongs to q = begin, column before.before to q = 0
  Span q;
  float* buffer;  // [kMostTile][kStride][width]
  T* dx;          // [h, w]

  void write() const {
    for (int64_t phase = 0; phase < kStride; ++phase) {
      const int64_t count = std::min(q.end, ceil_div(s.h - phase, kStride)) - q.begin;
      each_tile(std::max<int64_t>(0, count), [&]<int kRows>(int64_t first) { write_tile<kRows>(phase, first); });
    }
  }

 private:
  template <int kRows>
  void write_tile(int64_t phase, int64_t first) const {
    const Phase<kTaps, kStride> y(phase, s.top);
    const float* const* rows = dy.rows() + first + above.before + y.base;
    T* out = dx + ((q.begin + first) * kStride + phase) * s.w;
    if constexpr (kStride == 1) {
      write_rows(buffer, kRows, s.w, Activation::kIdentity, out, [&](float* to, int64_t pitch) {
        correlate<kRows>(y, Phase<kTaps, 1>(0, s.left), rows, to, pitch, s.w);
      });
    } else {
      const int64_t half = ceil_div(s.w, 2), width = round_up(half, kPlaneLanes);
      for (int64_t x = 0; x < 2; ++x) {
        correlate<kRows>(y, Phase<kTaps, 2>(x, s.left), rows, buffer + x * width, 2 * width, width);
      }
      for (int64_t t = 0; t < kRows; ++t) {
        const float* even = buffer + 2 * t * width;
        T* row = out + 2 * t * s.w;
        for (int64_t i = 0; i < half; i += kPlaneLanes) {
          PlaneVec parts[2];
          interleave(load<PlaneVec>(even + i), load<PlaneVec>(even + width + i), parts[0], parts[1]);
          for_each_vector<PlaneVec>(std::min(2 * kPlaneLanes, s.w - 2 * i), [&](int64_t col, auto lanes) {
            store(row + 2 * i + col, parts[col / kPlaneLanes], lanes);
          });
        }
      }
    }
  }

  template <int kRows>
  void correlate(Phase<kTaps, kStride> y, Phase<kTaps, kStride> x, const float* const* rows, float* out, int64_t pitch,
                 int64_t cols) const {
    visit_phase<kTaps, kStride>(y.taps, x.taps, [&]<int kKh, int kKw>() {
      float taps[kKh * kKw];
      for (int v = 0; v < kKh; ++v) {
        for (int u = 0; u < kKw; ++u) {
          taps[v * kKw + u] = weight[(y.odd + kStride * (kKh - 1 - v)) * kTaps + x.odd + kStride * (kKw - 1 - u)];
        }
      }
      const float* shifted[kRows - 1 + kKh];
      for (int i = 0; i < kRows - 1 + kKh; ++i) shifted[i] = rows[i] + before.before + x.base;
      correlate_rows<kKh, kKw, 1, kRows>(shifted, 0, taps, 0.f, out, pitch, cols);
    });
  }
};

}  // namespace

template <>
DepthwiseDirect depthwise_planes<Isa::FUSEDTRAIN_ISA>(const DepthwiseSizes& s) {
  DepthwiseDirect direct{0, 0};
  const bool usual = s.layout == Layout::kContiguous && s.m == 1 && s.kh == s.kw && s.sh == s.sw && s.dil_h == 1 &&
                     s.dil_w == 1 && std::max(s.w, s.wo) <= kMostPlaneCols;
  visit_plane_dtype(s.dtype, [&]<class T>() {
    if (!usual) return;
    visit_plane_kernel(s, [&]<int kTaps, int kStride>() { direct = {s.c, kTaps * kTaps + 1}; });
  });
  return direct;
}

template <>
void depthwise_planes_taps<Isa::FUSEDTRAIN_ISA>(const DepthwiseSizes& s, const void* weight, void* taps, int64_t begin,
                                                int64_t end) {
  const int64_t k = s.kh * s.kw;
  visit_plane_dtype(s.dtype, [&]<class T>() {
    const T* from = static_cast<const T*>(weight) + begin * k;
    float* out = static_cast<float*>(taps) + begin * k;
    for_each_vector<PlaneVec>((end - begin) * k,
                              [&](int64_t i, auto lanes) { store(out + i, load<PlaneVec>(from + i, lanes), lanes); });
  });
}

template <>
void depthwise_planes_forward<Isa::FUSEDTRAIN_ISA>(const DepthwiseConv2d& a, const void* taps, void* scratch,
                                                   DepthwisePart part) {
  const DepthwiseSizes& s = a.sizes;
  const Span span = band_rows(s, s.ho, part.band);
  visit_plane_dtype(s.dtype, [&]<class T>() {
    visit_plane_kernel(s, [&]<int kTaps, int kStride>() {
      Arena arena(scratch);
      const int64_t first = span.begin * kStride - s.top, count = (span.size() - 1) * kStride + kTaps;
      PaddedRows<kStride> rows(arena, s.w, s.left, round_up(s.wo, kPlaneLanes) + kTaps / kStride, count);
      float* buffer = arena.take<float>(kMostTile * round_up(s.wo, kPlaneLanes));
      for (int64_t channel = part.begin; channel < part.end; ++channel) {
        const int64_t plane = part.image * s.c + channel;
        rows.fill(static_cast<const T*>(a.x) + plane * s.h * s.w, s.h, first, count);
        const float bias = a.bias ? load<PlaneVec>(static_cast<const T*>(a.bias) + channel, FirstLanes{1}).v[0] : 0.f;
        T* y = static_cast<T*>(a.y) + (plane * s.ho + span.begin) * s.wo;
        each_tile(span.size(), [&]<int kRows>(int64_t row) {
          write_rows(buffer, kRows, s.wo, a.act, y + row * s.wo, [&](float* to, int64_t pitch) {
            correlate_rows<kTaps, kTaps, kStride, kRows>(rows.rows() + row * kStride, rows.half(),
                                                         static_cast<const float*>(taps) + channel * kTaps * kTaps,
                                                         bias, to, pitch, s.wo);
          });
        });
      }
    });
  });
}

template <>
void depthwise_planes_dx<Isa::FUSEDTRAIN_ISA>(const DepthwiseConv2dBackward& a, const void* taps, void* scratch,
                                              DepthwisePart part) {
  const DepthwiseSizes& s = a.sizes;
  visit_plane_dtype(s.dtype, [&]<class T>() {
    visit_plane_kernel(s, [&]<int kTaps, int kStride>() {
      const int64_t width = round_up(ceil_div(s.w, kStride), kPlaneLanes);
      const Span q = band_rows(s, ceil_div(s.h, kStride), part.band);
      const Reach<kTaps, kStride> above(s.top), before(s.left);
      const int64_t count = q.size() + above.before + above.behind;
      Arena arena(scratch);
      PaddedRows<1> dy(arena, s.wo, before.before, width + before.before + before.behind, count);
      float* buffer = arena.take<float>(kMostTile * kStride * width);
      for (int64_t channel = part.begin; channel < part.end; ++channel) {
        const int64_t plane = part.image * s.c + channel;
        dy.fill(static_cast<const T*>(a.dy) + plane * s.ho * s.wo, s.ho, q.begin - above.before, count);
        const PlaneGradient<T, kTaps, kStride> gradient{
            s,      static_cast<const float*>(taps) + channel * kTaps * kTaps,
            dy,     above,
            before, q,
            buffer, static_cast<T*>(a.dx) + plane * s.h * s.w};
        gradient.write();
      }
    });
  });
}

}  // namespace fusedtrain::cpu

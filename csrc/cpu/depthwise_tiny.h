#pragma once
// Depthwise convolutions of images of a few pixels, which networks for small images end in: most taps meet nothing but
// padding, and a row is shorter than what it takes to set up. So the products that there are, a tap joining an output
// to an input, are listed once, and a few blocks of channels of an image are one walk along the list. Internal linkage,
// as in core/simd.h.
#include "cpu/depthwise_rows.h"

namespace fusedtrain::cpu {
namespace {

// One product; distances in elements from the first tap, output and input of a block.
struct TinyPair {
  int32_t tap, out, in;
};

// All products, in the order of `kOf`.
template <int32_t TinyPair::*kOf>
class TinyPairs {
 public:
  // Taps are `lanes` apart, pixels `pitch`.
  TinyPairs(const DepthwiseSizes& s, int64_t lanes, int64_t pitch) {
    for (int64_t out = 0; is_tiny(s) && out < s.ho * s.wo; ++out) {
      for (int64_t in = 0; in < s.h * s.w; ++in) {
        const int64_t y = tap(in / s.w + s.top - out / s.wo * s.sh, s.dil_h, s.kh);
        const int64_t x = tap(in % s.w + s.left - out % s.wo * s.sw, s.dil_w, s.kw);
        if (y < 0 || x < 0) continue;
        pairs_[count_++] = {int32_t((y * s.kw + x) * lanes), int32_t(out * pitch), int32_t(in * pitch)};
      }
    }
    std::stable_sort(pairs_, pairs_ + count_, [](const TinyPair& a, const TinyPair& b) { return a.*kOf < b.*kOf; });
  }

  // write(at, sums) for each of `results`, `step` apart, or of those that have products: of vector v init(v) and the
  // sum of product(pair, v).
  template <class V, int kVecs, class Init, class Product, class Write>
  void each_sum(int64_t results, int64_t step, bool all, const Init& init, const Product& product,
                const Write& write) const {
    const TinyPair *pair = pairs_, *const end = pairs_ + count_;
    for (int64_t at = 0; at < results * step; at += step) {
      if (!all && (pair == end || pair->*kOf != at)) continue;
      V sums[kVecs];
      for (int v = 0; v < kVecs; ++v) sums[v] = init(v);
      for (; pair < end && pair->*kOf == at; ++pair) {
        const TinyPair p = *pair;
        for (int v = 0; v < kVecs; ++v) sums[v] += product(p, v);
      }
      write(at, sums);
    }
  }

 private:
  static int64_t tap(int64_t distance, int64_t dil, int64_t k) {
    return distance >= 0 && distance % dil == 0 && distance / dil < k ? distance / dil : -1;
  }

  TinyPair pairs_[kTinyPixels * kTinyPixels];
  int64_t count_ = 0;
};

// Both formats are the same for images of one pixel.
inline bool has_tiny_planes(const DepthwiseSizes& s) {
  return s.layout == Layout::kContiguous && std::max(s.h * s.w, s.ho * s.wo) > 1;
}

// Images of kVecs blocks of channels, one of which may be no whole one: their pixels where they are, or copies of
// planes [block][pixel][lane].
template <class V, int kVecs>
class Tiny {
 public:
  using Lane = typename V::Lane;
  static constexpr int64_t L = V::kLanes;

  Tiny(const DepthwiseSizes& s, int64_t block)
      : s_(s), planes_(has_tiny_planes(s)), first_(block * L), lanes_(std::min<int64_t>(L, s.c - block * L)) {}

  // taps [block][kh * kw][lane]; bias [c] or null.
  template <class T>
  void forward(const TinyPairs<&TinyPair::out>& pairs, const T* x, T* y, const Lane* taps, const T* bias,
               Activation act) const {
    const auto k = s_.kh * s_.kw * L;
    read(x, s_.h * s_.w, [&](const auto* in, int64_t in_vec, auto lanes) {
      write(y, s_.ho * s_.wo, lanes, [&](int64_t pitch, const auto& put) {
        pairs.template each_sum<V, kVecs>(
            s_.ho * s_.wo, pitch, true,
            [&](int v) { return bias == nullptr ? V(0) : load<V>(bias + first_ + v * L, channel_lanes<kVecs>()); },
            [&](const TinyPair& p, int v) {
              return load<V>(taps + p.tap + v * k) * load<V>(in + p.in + v * in_vec, lanes);
            },
            [&](int64_t at, V(&sums)[kVecs]) {
              for (int v = 0; act != Activation::kIdentity && v < kVecs; ++v) sums[v] = activated(act, sums[v]);
              put(at, sums);
            });
      });
    });
  }

  template <class T>
  void dx(const TinyPairs<&TinyPair::in>& pairs, const T* dy, T* to, const Lane* taps) const {
    const auto k = s_.kh * s_.kw * L;
    read(dy, s_.ho * s_.wo, [&](const auto* in, int64_t in_vec, auto lanes) {
      write(to, s_.h * s_.w, lanes, [&](int64_t pitch, const auto& put) {
        pairs.template each_sum<V, kVecs>(
            s_.h * s_.w, pitch, true, [](int) { return V(0); },
            [&](const TinyPair& p, int v) {
              return load<V>(taps + p.tap + v * k) * load<V>(in + p.out + v * in_vec, lanes);
            },
            put);
      });
    });
  }

  // Adds to sums [block][kh * kw + 1][lane], the last being db, or begins them.
  template <class T>
  void dw(const TinyPairs<&TinyPair::tap>& pairs, const T* dy, const T* x, Lane* sums, bool begins) const {
    const int64_t k = s_.kh * s_.kw * L, of_block = k + L;
    const auto put = [&](int64_t at, const V(&parts)[kVecs]) {
      for (int v = 0; v < kVecs; ++v) {
        Lane* sum = sums + at + v * of_block;
        store(sum, begins ? parts[v] : load<V>(sum) + parts[v]);
      }
    };
    read(dy, s_.ho * s_.wo, [&](const auto* out, int64_t out_vec, auto lanes) {
      read(x, s_.h * s_.w, [&](const auto* in, int64_t in_vec, auto) {
        pairs.template each_sum<V, kVecs>(
            s_.kh * s_.kw, L, begins, [](int) { return V(0); },
            [&](const TinyPair& p, int v) {
              return load<V>(out + p.out + v * out_vec, lanes) * load<V>(in + p.in + v * in_vec, lanes);
            },
            put);
      });
      V db[kVecs];
      for (int v = 0; v < kVecs; ++v) db[v] = V(0);
      for (int64_t i = 0; i < s_.ho * s_.wo; ++i) {
        for (int v = 0; v < kVecs; ++v) db[v] += load<V>(out + i * (planes_ ? L : s_.c) + v * out_vec, lanes);
      }
      put(k, db);
    });
  }

 private:
  template <int kCount>
  auto channel_lanes() const {
    if constexpr (kCount > 1)
      return AllLanes{};
    else
      return FirstLanes{int(lanes_)};
  }
  template <class T>
  Block<T> row(T* image, int64_t pixels, int v) const {
    return {image, Layout::kContiguous, 1, pixels, s_.c, first_ + v * L, 1, lanes_};
  }
  // f(pixels, from a block to the next, lanes)
  template <class T, class F>
  void read(const T* image, int64_t pixels, const F& f) const {
    if (!planes_) {
      if (kVecs > 1) return f(image + first_, L, AllLanes{});
      return visit_lanes<V>(lanes_, [&](auto lanes) { f(image + first_, L, lanes); });
    }
    Lane copy[kVecs * kTinyPixels * L];
    for (int v = 0; v < kVecs; ++v) read_row<V>(row(image, pixels, v), 0, 0, pixels, copy + v * pixels * L);
    f(static_cast<const Lane*>(copy), pixels * L, AllLanes{});
  }
  // make(from a pixel to the next, put), which calls put(at, vectors) for each pixel.
  template <class T, class Lanes, class F>
  void write(T* image, int64_t pixels, Lanes lanes, const F& make) const {
    if (!planes_) {
      return make(s_.c, [&](int64_t at, const V(&vectors)[kVecs]) {
        for (int v = 0; v < kVecs; ++v) store(image + first_ + at + v * L, vectors[v], lanes);
      });
    }
    Lane copy[kVecs * kTinyPixels * L];
    make(L, [&](int64_t at, const V(&vectors)[kVecs]) {
      for (int v = 0; v < kVecs; ++v) store(copy + at + v * pixels * L, vectors[v]);
    });
    for (int v = 0; v < kVecs; ++v) write_row<V>(row(image, pixels, v), 0, 0, pixels, copy + v * pixels * L);
  }

  const DepthwiseSizes& s_;
  bool planes_;
  int64_t first_, lanes_;
};

// f(tiny, block) for the blocks [begin, end) of channels, a few at a time.
template <class V, class F>
void each_tiny(const DepthwiseSizes& s, int64_t begin, int64_t end, F&& f) {
  constexpr int kFew = 4;
  int64_t block = begin;
  for (; block + kFew <= end && (block + kFew) * V::kLanes <= s.c; block += kFew) f(Tiny<V, kFew>(s, block), block);
  for (; block < end; ++block) f(Tiny<V, 1>(s, block), block);
}

}  // namespace
}  // namespace fusedtrain::cpu

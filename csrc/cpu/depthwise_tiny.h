#pragma once
// Depthwise convolutions of images of a few pixels, which networks for small images end in: most taps meet nothing but
// padding, and a row is shorter than what it takes to set up. So the products that there are, a tap joining an output
// to an input, are listed once, and a block of channels of a few images is one walk along the list. Internal linkage,
// as in core/simd.h.
#include "cpu/depthwise_rows.h"

namespace fusedtrain::cpu {
namespace {

// One product; distances in elements from the first tap, output and input of a block.
struct TinyPair {
  int32_t tap, out, in;
};

// All products, by the results they are added to.
template <int32_t TinyPair::*kOf>
class TinyPairs {
 public:
  // Taps are `lanes` apart, pixels `pitch`.
  TinyPairs(const DepthwiseSizes& s, int64_t lanes, int64_t pitch) {
    if (!is_tiny(s)) return;
    TinyPair* end = pairs_;
    for (int64_t out = 0; out < s.ho * s.wo; ++out) {
      for (int64_t in = 0; in < s.h * s.w; ++in) {
        const int64_t y = tap(in / s.w + s.top - out / s.wo * s.sh, s.dil_h, s.kh);
        const int64_t x = tap(in % s.w + s.left - out % s.wo * s.sw, s.dil_w, s.kw);
        if (y < 0 || x < 0) continue;
        *end++ = {int32_t((y * s.kw + x) * lanes), int32_t(out * pitch), int32_t(in * pitch)};
      }
    }
    std::stable_sort(pairs_, end, [](const TinyPair& a, const TinyPair& b) { return a.*kOf < b.*kOf; });
    // Of the pixels all are results, of the taps those that meet an input.
    const bool pixels = kOf != &TinyPair::tap;
    const int64_t last = (kOf == &TinyPair::out ? s.ho * s.wo : s.h * s.w) * pitch;
    const TinyPair* pair = pairs_;
    for (int64_t pixel = 0; pixels ? pixel < last : pair < end; pixel += pitch) {
      const auto at = pixels ? int32_t(pixel) : pair->*kOf;
      const TinyPair* const first = pair;
      while (pair < end && pair->*kOf == at) ++pair;
      sums_[results_++] = {at, int32_t(pair - first)};
    }
  }

  // put(at, sums) for each result: of each image `init` and the sum of product(pair, image).
  template <class V, int kImages, class Product, class Put>
  void each_sum(V init, Product product, Put put) const {
    const TinyPair* pair = pairs_;
    for (const Sum *sum = sums_, *end = sums_ + results_; sum < end; ++sum) {
      V sums[kImages];
      for (V& of_image : sums) of_image = init;
      for (const TinyPair* const last = pair + sum->count; pair < last; ++pair) {
        for (int i = 0; i < kImages; ++i) sums[i] += product(*pair, i);
      }
      put(sum->at, sums);
    }
  }

 private:
  struct Sum {
    int32_t at, count;
  };
  static int64_t tap(int64_t distance, int64_t dil, int64_t k) {
    return distance >= 0 && distance % dil == 0 && distance / dil < k ? distance / dil : -1;
  }

  TinyPair pairs_[kTinyPixels * kTinyPixels];
  Sum sums_[kTinyPixels * kTinyPixels];
  int64_t results_ = 0;
};

// Both formats are the same for images of one pixel.
inline bool has_tiny_planes(const DepthwiseSizes& s) {
  return s.layout == Layout::kContiguous && std::max(s.h * s.w, s.ho * s.wo) > 1;
}

// A block of channels of kImages images, one after the other: their pixels where they are, or copies of planes
// [image][pixel][lane]. A tap that is loaded serves all of them.
template <class V, int kImages>
class Tiny {
 public:
  using Lane = typename V::Lane;
  static constexpr int64_t L = V::kLanes;

  Tiny(const DepthwiseSizes& s, int64_t block)
      : s_(s), planes_(has_tiny_planes(s)), first_(block * L), lanes_(std::min<int64_t>(L, s.c - block * L)) {}

  // taps [kh * kw][lane]; bias [c] or null.
  template <class T>
  void forward(const TinyPairs<&TinyPair::out>& pairs, const T* x, T* y, const Lane* taps, const T* bias,
               Activation act) const {
    const V b = bias == nullptr ? V(0) : load<V>(bias + first_, FirstLanes{int(lanes_)});
    read(x, s_.h * s_.w, [&](const auto* in, int64_t of_in, auto lanes) {
      write(y, s_.ho * s_.wo, lanes, [&](auto put) {
        pairs.template each_sum<V, kImages>(
            b,
            [taps, in, of_in, lanes](const TinyPair& p, int i) {
              return load<V>(taps + p.tap) * load<V>(in + p.in + i * of_in, lanes);
            },
            [put, act](int64_t at, V(&sums)[kImages]) {
              for (int i = 0; act != Activation::kIdentity && i < kImages; ++i) sums[i] = activated(act, sums[i]);
              put(at, sums);
            });
      });
    });
  }

  template <class T>
  void dx(const TinyPairs<&TinyPair::in>& pairs, const T* dy, T* to, const Lane* taps) const {
    read(dy, s_.ho * s_.wo, [&](const auto* out, int64_t of_out, auto lanes) {
      write(to, s_.h * s_.w, lanes, [&](auto put) {
        pairs.template each_sum<V, kImages>(
            V(0),
            [taps, out, of_out, lanes](const TinyPair& p, int i) {
              return load<V>(taps + p.tap) * load<V>(out + p.out + i * of_out, lanes);
            },
            put);
      });
    });
  }

  // Adds to sums [kh * kw + 1][lane], or begins them; the last is db, where it is needed, else zero.
  template <class T>
  void dw(const TinyPairs<&TinyPair::tap>& pairs, const T* dy, const T* x, Lane* sums, bool begins,
          bool need_db) const {
    const int64_t k = s_.kh * s_.kw * L;
    if (begins) std::fill_n(sums, k + L, Lane(0));
    const auto add = [sums](int64_t at, const V(&parts)[kImages]) {
      V sum = load<V>(sums + at);
      for (const V& part : parts) sum += part;
      store(sums + at, sum);
    };
    read(dy, s_.ho * s_.wo, [&](const auto* out, int64_t of_out, auto lanes) {
      read(x, s_.h * s_.w, [&](const auto* in, int64_t of_in, auto) {
        pairs.template each_sum<V, kImages>(
            V(0),
            [out, of_out, in, of_in, lanes](const TinyPair& p, int i) {
              return load<V>(out + p.out + i * of_out, lanes) * load<V>(in + p.in + i * of_in, lanes);
            },
            add);
      });
      if (!need_db) return;
      V db[kImages];
      for (int i = 0; i < kImages; ++i) {
        db[i] = V(0);
        for (int64_t at = 0; at < s_.ho * s_.wo; ++at) {
          db[i] += load<V>(out + at * (planes_ ? L : s_.c) + i * of_out, lanes);
        }
      }
      add(k, db);
    });
  }

 private:
  template <class T>
  Block<T> row(T* images, int64_t pixels, int i) const {
    return {images + i * s_.c * pixels, Layout::kContiguous, 1, pixels, s_.c, first_, 1, lanes_};
  }
  // f(pixels, from an image to the next, lanes)
  template <class T, class F>
  void read(const T* images, int64_t pixels, const F& f) const {
    if (!planes_) {
      return visit_lanes<V>(lanes_, [&](auto lanes) { f(images + first_, s_.c * pixels, lanes); });
    }
    Lane copy[kImages * kTinyPixels * L];
    for (int i = 0; i < kImages; ++i) read_row<V>(row(images, pixels, i), 0, 0, pixels, copy + i * pixels * L);
    f(static_cast<const Lane*>(copy), pixels * L, AllLanes{});
  }
  // make(put), which calls put(at, vectors) for each pixel.
  template <class T, class Lanes, class F>
  void write(T* images, int64_t pixels, Lanes lanes, const F& make) const {
    if (!planes_) {
      return make([to = images + first_, of_image = s_.c * pixels, lanes](int64_t at, const V(&vectors)[kImages]) {
        for (int i = 0; i < kImages; ++i) store(to + at + i * of_image, vectors[i], lanes);
      });
    }
    Lane copy[kImages * kTinyPixels * L];
    make([to = &copy[0], pixels](int64_t at, const V(&vectors)[kImages]) {
      for (int i = 0; i < kImages; ++i) store(to + at + i * pixels * L, vectors[i]);
    });
    for (int i = 0; i < kImages; ++i) write_row<V>(row(images, pixels, i), 0, 0, pixels, copy + i * pixels * L);
  }

  const DepthwiseSizes& s_;
  bool planes_;
  int64_t first_, lanes_;
};

// f(tiny, image, block) for the images [image, end) and the blocks of one of `chunks` parts of the channels.
template <class V, class F>
void each_tiny(const DepthwiseSizes& s, int64_t chunk, int64_t chunks, int64_t image, int64_t end, const F& f) {
  constexpr int kFew = 4;
  const int64_t blocks = ceil_div(s.c, V::kLanes), first = blocks * chunk / chunks,
                last = blocks * (chunk + 1) / chunks;
  for (; image + kFew <= end; image += kFew) {
    for (int64_t block = first; block < last; ++block) f(Tiny<V, kFew>(s, block), image, block);
  }
  for (; image < end; ++image) {
    for (int64_t block = first; block < last; ++block) f(Tiny<V, 1>(s, block), image, block);
  }
}

}  // namespace
}  // namespace fusedtrain::cpu

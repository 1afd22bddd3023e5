#pragma once
// Depthwise convolutions straight from channels_last images: the usual square kernels, without unpacking of rows.
//
// Channels are taken in groups as wide as a load. Internal linkage, as in core/simd.h.
#include "cpu/ahead.h"
#include "cpu/depthwise_rows.h"

namespace fusedtrain::cpu {
namespace {

// A group of channels in memory as kVecs vectors; which lane of which vector a channel is depends on T.
template <class T>
struct Group {
  using V = Vec<Acc<T>>;
  static constexpr int kVecs = 1, kChannels = V::kLanes;
  static constexpr bool kPairs = false;  // whether there is pair<v>(p, q): get<v>(p) and get<v>(q) in one
  template <int v>
  static V get(const T* p) {
    return load<V>(p);
  }
  static void get_all(const T* p, V* x) { x[0] = load<V>(p); }
  static void put(T* p, const V* x) { store(p, x[0]); }
  static void stream(T* p, const V* x) { cpu::stream(p, x[0]); }
};

#if defined(__AVX512F__)
// A load takes 64 bytes. One instruction widens the lower or the higher half of each 128 bits of it, or interleaves it
// with that of another pixel.
template <>
struct Group<BFloat16> {
  using V = Vec<float>;
  static constexpr int kVecs = 2, kChannels = 2 * V::kLanes;
  static constexpr bool kPairs = true;
  template <int v>
  static V get(const BFloat16* p) {
    return V(reinterpret_cast<V::Raw>(interleave<v>(_mm512_setzero_si512(), _mm512_loadu_si512(p))));
  }
  // All vectors by one load.
  static void get_all(const BFloat16* p, V* x) {
    __m512i channels = _mm512_loadu_si512(p);
    asm("" : "+v"(channels));  // or it would be loaded for each of them
    x[0] = V(reinterpret_cast<V::Raw>(interleave<0>(_mm512_setzero_si512(), channels)));
    x[1] = V(reinterpret_cast<V::Raw>(interleave<1>(_mm512_setzero_si512(), channels)));
  }
  template <int v>
  static Pairs pair(const BFloat16* p, const BFloat16* q) {
    return {reinterpret_cast<RawVec<uint32_t>>(interleave<v>(_mm512_loadu_si512(p), _mm512_loadu_si512(q)))};
  }
  static void get_all(const BFloat16* p, const BFloat16* q, Pairs* x) {
    __m512i a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(q);
    asm("" : "+v"(a), "+v"(b));
    x[0] = {reinterpret_cast<RawVec<uint32_t>>(interleave<0>(a, b))};
    x[1] = {reinterpret_cast<RawVec<uint32_t>>(interleave<1>(a, b))};
  }
  // In halves: where pixels hold an odd number of them, whole stores would cross lines and hold up loads whose
  // addresses share the last 12 bits with theirs, on Zen 5 to twice the time of a layer.
  static void put(BFloat16* p, const V* x) {
    const __m512i y = narrowed(x);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_castsi512_si256(y));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + 1, _mm512_extracti64x4_epi64(y, 1));
  }
  static void stream(BFloat16* p, const V* x) { stream_raw(p, narrowed(x)); }

 private:
  static __m512i narrowed(const V* x) { return _mm512_packus_epi32(rounded(x[0]), rounded(x[1])); }
  static __m512i rounded(V x) {
    const Wide u = reinterpret_cast<Wide>(x.v);
    return reinterpret_cast<__m512i>(x.v != x.v ? Wide{} + 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
  template <int v>
  static __m512i interleave(__m512i a, __m512i b) {
    return v == 0 ? _mm512_unpacklo_epi16(a, b) : _mm512_unpackhi_epi16(a, b);
  }
};
#endif

// Numbers of a group that are whole bfloat16, two in the place of one: the first, and the second or 0, as a pair's.
[[gnu::always_inline]] inline void pair(const float* first, const float* second, float* out) {
  using Words = RawVec<uint32_t>;
  for (int i = 0; i < Group<BFloat16>::kChannels; i += Vec<float>::kLanes) {
    const auto bits = [&](const float* p) { return reinterpret_cast<Words>(load<Vec<float>>(p + i).v); };
    const Words upper = second != nullptr ? bits(second) & 0xffff0000 : Words{};
    store(out + i, Vec<float>(reinterpret_cast<Vec<float>::Raw>(bits(first) >> 16 | upper)));
  }
}

// A pixel of each of kDeep neighbouring rows, moving along them. Two rows are multiplied in pairs. A row outside the
// image is all zeros.
template <class T, int kDeep>
class Column {
 public:
  // inside(i): of row i, which lies i * row_step behind the first.
  template <class Inside>
  [[gnu::always_inline]] Column(const T* first, int64_t row_step, int64_t pitch, const Inside& inside) {
    for (int i = 0; i < kDeep; ++i) {
      p_[i] = inside(i) ? first + i * row_step : kZeros;
      step_[i] = inside(i) ? pitch : 0;
    }
  }
  template <int v>
  [[gnu::always_inline]] auto get() const {
    if constexpr (kDeep == 1) {
      return Group<T>::template get<v>(p_[0]);
    } else {
      return Group<T>::template pair<v>(p_[0], p_[1]);
    }
  }
  template <class X>
  [[gnu::always_inline]] void get_all(X* x) const {
    if constexpr (kDeep == 1) {
      Group<T>::get_all(p_[0], x);
    } else {
      Group<T>::get_all(p_[0], p_[1], x);
    }
  }
  [[gnu::always_inline]] void next() {
    for (int i = 0; i < kDeep; ++i) p_[i] += step_[i];
  }

 private:
  alignas(64) static constexpr T kZeros[Group<T>::kChannels] = {};
  const T* p_[kDeep];
  int64_t step_[kDeep];
};

// The first channel of a group. In channels_last images the last group begins early enough to be full and repeats
// channels of the one before; in contiguous ones it repeats the last channel.
template <class T>
int64_t first_channel(const DepthwiseSizes& s, int64_t group) {
  const int64_t first = group * Group<T>::kChannels;
  return s.layout == Layout::kContiguous ? first : std::min(first, s.c - Group<T>::kChannels);
}

// The channels of a group as [vector][lane].
template <class T>
void load_group(const T* in, Acc<T>* out) {
  using G = Group<T>;
  unroll<G::kVecs>([&](auto v) { store(out + v * G::V::kLanes, G::template get<v>(in)); });
}

constexpr int kMostWide = 8;  // pixels of a tile, at most; at least kLeastWide

// Groups of channels that fill a cache line together.
template <class T>
constexpr int kGroupsOfLine = std::max<int>(1, kLineBytes / int(Group<T>::kChannels * sizeof(T)));

// Whether results of images of so many pixels are written past the caches: they are large, and can be written as whole
// lines, which begin at `out` and multiples of `run` elements behind it. Halves of lines wait for each other in the
// few buffers of a core, and those that must leave early cost several times as much. Where a unit has some of the
// channels, all CPUs gain: nothing fetches the lines ahead that are written.
template <class T>
bool streams(const DepthwiseSizes& s, const T* out, int64_t pixels, int64_t run) {
  constexpr int64_t kSize = sizeof(T);
  return (stores_past_caches || chunks(s) > 1) && s.n * s.c * pixels * kSize >= kStreamBytes &&
         run * kSize % kLineBytes == 0 && reinterpret_cast<uintptr_t>(out) % kLineBytes == 0;
}

// f<T>() for the element types that have direct kernels, which are not worth their code without vectors of 32 bytes.
template <class F>
void visit_direct_dtype(DType dtype, F&& f) {
  visit_dtype(dtype, [&]<class T>() {
    if constexpr (kVecBytes >= 32 && (std::is_same_v<T, float> || std::is_same_v<T, BFloat16>)) {
      f.template operator()<T>();
    }
  });
}

// Whether contiguous images are transposed for these kernels, rather than worked on plane by plane: measured 1.5 times
// as fast in the mean, but not where most lanes would stay empty.
template <class T>
bool is_worth_transposing(const DepthwiseSizes& s) {
  return 2 * s.c > Group<T>::kChannels && std::max(s.w, s.wo) <= kMostPlaneCols;
}

// f<k, stride>()
template <class F>
void visit_kernel(const DepthwiseSizes& s, F&& f) {
  visit<3, 5, 7>(
      s.kh, [&]<int kTaps>() { visit<1, 2>(s.sh, [&]<int kStride>() { f.template operator()<kTaps, kStride>(); }); });
}

}  // namespace
}  // namespace fusedtrain::cpu

#pragma once
// Depthwise convolutions straight from channels_last images: the usual square kernels, without unpacking of rows.
//
// Channels are taken in groups as wide as a load. Internal linkage, as in core/simd.h.
#include "cpu/depthwise_rows.h"

namespace fusedtrain::cpu {
namespace {

// A group of channels in memory as kVecs vectors; lane l of vector v is channel l * kVecs + v.
template <class T>
struct Group {
  using V = Vec<Acc<T>>;
  static constexpr int kVecs = 1, kChannels = V::kLanes;
  template <int v>
  static V get(const T* p) {
    return load<V>(p);
  }
  static void put(T* p, const V* x) { store(p, x[0]); }
  static void stream(T* p, const V* x) { cpu::stream(p, x[0]); }
};

#if defined(__AVX512F__)
// Two bfloat16 lie in each 32-bit lane: one instruction widens either, and a load takes 64 bytes.
template <>
struct Group<BFloat16> {
  using V = Vec<float>;
  using Wide = RawVec<uint32_t>;
  static constexpr int kVecs = 2, kChannels = 2 * V::kLanes;
  template <int v>
  static V get(const BFloat16* p) {
    Wide both;
    std::memcpy(&both, p, sizeof both);
    const Wide bits = v == 0 ? both << 16 : both & 0xffff0000u;
    return V(reinterpret_cast<V::Raw>(bits));
  }
  static void put(BFloat16* p, const V* x) {
    const Wide both = narrowed(x);
    std::memcpy(p, &both, sizeof both);
  }
  static void stream(BFloat16* p, const V* x) { stream_raw(p, narrowed(x)); }

 private:
  static Wide narrowed(const V* x) { return rounded(x[0]) >> 16 | (rounded(x[1]) & 0xffff0000u); }
  // The upper halves are the rounded values.
  static Wide rounded(V x) {
    const Wide u = reinterpret_cast<Wide>(x.v);
    return x.v != x.v ? Wide{} + 0x7fc00000u : u + 0x7fff + ((u >> 16) & 1);
  }
};
#endif

// The first channel of a group; the last group begins early enough to be full and repeats channels of the one before.
template <class T>
int64_t first_channel(const DepthwiseSizes& s, int64_t group) {
  return std::min(group * Group<T>::kChannels, s.c - Group<T>::kChannels);
}

// The channels of a group as [vector][lane].
template <class T>
void load_group(const T* in, Acc<T>* out) {
  using G = Group<T>;
  unroll<G::kVecs>([&](auto v) { store(out + v * G::V::kLanes, G::template get<v>(in)); });
}

constexpr int kLeastWide = 4, kMostWide = 8;  // pixels of a tile

// f<T>() for the element types that have direct kernels, which are not worth their code without vectors of 32 bytes.
template <class F>
void visit_direct_dtype(DType dtype, F&& f) {
  visit_dtype(dtype, [&]<class T>() {
    if constexpr (kVecBytes >= 32 && (std::is_same_v<T, float> || std::is_same_v<T, BFloat16>)) {
      f.template operator()<T>();
    }
  });
}

// f<k, stride>()
template <class F>
void visit_kernel(const DepthwiseSizes& s, F&& f) {
  visit<3, 5, 7>(
      s.kh, [&]<int kTaps>() { visit<1, 2>(s.sh, [&]<int kStride>() { f.template operator()<kTaps, kStride>(); }); });
}

}  // namespace
}  // namespace fusedtrain::cpu

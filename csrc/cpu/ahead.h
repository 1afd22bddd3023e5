#pragma once
// Asking for memory before it is read or written. Internal linkage, as in core/simd.h.
//
// Loops that walk along memory ask kAhead elements ahead where `asks_ahead` (core/isa.h); a copy of that in a local
// variable stays in a register whatever the loop writes.
#include <cstdint>
#include <tuple>

#include "core/isa.h"

namespace fusedtrain::cpu {
namespace {

inline void fetch(const void* p) { __builtin_prefetch(p); }

// Asks for the cache line of p, which will be written: stores that miss the caches wait for each other.
[[gnu::always_inline]] inline void fetch_for_store(const void* p) {
#if defined(__AVX2__)
  asm volatile("prefetchw (%0)" ::"r"(p));
#else
  __builtin_prefetch(p, 1, 2);
#endif
}

template <class T>
constexpr int64_t kAhead = 1024 / sizeof(T);

// A function of `images`, of which prefetch(i) asks for element i.
template <class F, class... T>
struct Over : F {
  std::tuple<const T*...> images;

  explicit Over(const F& f, const T*... p) : F(f), images(p...) {}
  void prefetch(int64_t i) const {
    std::apply([i](const auto*... p) { (fetch(p + i), ...); }, images);
  }
};

}  // namespace
}  // namespace fusedtrain::cpu

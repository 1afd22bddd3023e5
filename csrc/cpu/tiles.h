#pragma once
// The tile registers of AMX: eight tiles of 16 rows of 64 bytes. Used only where multiplies_by_tiles. Not as
// intrinsics, which the flags of the variants forbid; the compiler itself never touches a tile.
#include <cstdint>

#include "core/isa.h"

namespace fusedtrain::cpu {
namespace {

constexpr int64_t kTileSteps = 16;  // rows of a tile, and 32-bit elements of a row

#if defined(__AVX512F__)
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Makes all tiles whole for its lifetime; other libraries keep their own shapes in the same registers.
class TileRegisters {
 public:
  TileRegisters() {
    asm volatile("sttilecfg %0" : "=m"(before_));
    const TileShapes whole;
    asm volatile("ldtilecfg %0" ::"m"(whole));
  }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
  ~TileRegisters() {
    if (before_.palette == 0) {
      asm volatile("tilerelease");
    } else {
      asm volatile("ldtilecfg %0" ::"m"(before_));
    }
  }

 private:
  TileShapes before_;
};

// Rows `stride` bytes apart.
template <int tile>
[[gnu::always_inline]] inline void load_tile(const void* rows, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
[[gnu::always_inline]] inline void store_tile(void* rows, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
[[gnu::always_inline]] inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}
// sum[m][n] += sum_k a[m][k] b[k][n], float32 += pairs of bfloat16, both products of a pair.
template <int sum, int a, int b>
[[gnu::always_inline]] inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(a), "i"(b));
}
#else
struct TileRegisters {};
#endif

}  // namespace
}  // namespace fusedtrain::cpu

#include "core/isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fusedtrain {
namespace {

#if defined(__x86_64__)
// Tiles enlarge what the kernel saves of a process, so Linux wants to be asked for them first.
bool may_use_tiles() {
  constexpr unsigned kAmxBf16Bit = 1u << 22, kAmxTileBit = 1u << 24;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  return (edx & kAmxBf16Bit) && (edx & kAmxTileBit) && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

bool cpu_has(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  }
  if (isa == Isa::kAvx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && cpu_has(Isa::kAvx2);
  }
  if (isa == Isa::kAvx512Bf16) return __builtin_cpu_supports("avx512bf16") && cpu_has(Isa::kAvx512);
  if (isa == Isa::kAmxBf16) return cpu_has(Isa::kAvx512Bf16) && may_use_tiles();
#endif
  return isa == Isa::kPortable;
}

constexpr Isa kBestFirst[] = {Isa::kAmxBf16, Isa::kAvx512Bf16, Isa::kAvx512, Isa::kAvx2, Isa::kPortable};

Isa choose_isa() {
  const char* wanted = std::getenv("FUSEDTRAIN_ISA");
  if (wanted == nullptr || *wanted == '\0') {
    for (Isa isa : kBestFirst) {
      if (cpu_has(isa)) return isa;
    }
  }
  for (Isa isa : kBestFirst) {
    if (std::string(wanted) != isa_name(isa)) continue;
    if (!cpu_has(isa))
      throw std::runtime_error(std::string("FUSEDTRAIN_ISA=") + wanted + ": this CPU does not have it");
    return isa;
  }
  throw std::runtime_error(std::string("FUSEDTRAIN_ISA=") + wanted +
                           ": expected portable, avx2, avx512, avx512_bf16 or amx_bf16");
}

}  // namespace

bool rounds_to_bf16_by_instruction = false, multiplies_by_tiles = false;
#if defined(__x86_64__)
// Both of family 19h.
const bool is_zen4 = __builtin_cpu_is("amdfam19h") && __builtin_cpu_supports("avx512f");
const bool is_zen3 = __builtin_cpu_is("amdfam19h") && !is_zen4;
const bool fetches_ahead_of_many_streams = __builtin_cpu_is("intel") || is_zen3;
const bool sums_row_by_row = !__builtin_cpu_is("intel") && !is_zen4;
const bool stores_past_caches = !__builtin_cpu_is("intel"), takes_whole_pixels = __builtin_cpu_is("intel");
const bool takes_many_whole_pixels = is_zen4;
const bool asks_ahead = __builtin_cpu_is("intel"), groups_channels = __builtin_cpu_is("intel");
#else
const bool fetches_ahead_of_many_streams = false, sums_row_by_row = true;
const bool stores_past_caches = true, takes_whole_pixels = false, takes_many_whole_pixels = false;
const bool asks_ahead = false, groups_channels = false;
#endif

Isa active_isa() {
  static const Isa isa = [] {
    const Isa chosen = choose_isa();
    multiplies_by_tiles = chosen == Isa::kAmxBf16;
    rounds_to_bf16_by_instruction = multiplies_by_tiles || chosen == Isa::kAvx512Bf16;
    return chosen;
  }();
  return isa;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAmxBf16:
      return "amx_bf16";
    case Isa::kAvx512Bf16:
      return "avx512_bf16";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kPortable:
      break;
  }
  return "portable";
}

}  // namespace fusedtrain

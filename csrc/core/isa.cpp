#include "core/isa.h"

#include <cstdlib>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace fusedtrain {
namespace {

bool cpu_has(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  }
  if (isa == Isa::kAvx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && cpu_has(Isa::kAvx2);
  }
#endif
  return isa == Isa::kPortable;
}

Isa choose_isa() {
  const char* wanted = std::getenv("FUSEDTRAIN_ISA");
  if (wanted == nullptr || *wanted == '\0') {
    return cpu_has(Isa::kAvx512) ? Isa::kAvx512 : cpu_has(Isa::kAvx2) ? Isa::kAvx2 : Isa::kPortable;
  }
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (std::string(wanted) != isa_name(isa)) continue;
    if (!cpu_has(isa))
      throw std::runtime_error(std::string("FUSEDTRAIN_ISA=") + wanted + ": this CPU does not have it");
    return isa;
  }
  throw std::runtime_error(std::string("FUSEDTRAIN_ISA=") + wanted + ": expected portable, avx2 or avx512");
}

}  // namespace

Isa active_isa() {
  static const Isa isa = choose_isa();
  return isa;
}

const char* isa_name(Isa isa) { return isa == Isa::kAvx512 ? "avx512" : isa == Isa::kAvx2 ? "avx2" : "portable"; }

}  // namespace fusedtrain

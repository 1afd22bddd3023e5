// The host module fusedtrain._host: what this build is made of, and what reads Python objects.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <sstream>
#include <string>
#include <vector>

#include "bindings/step_table.h"
#include "core/isa.h"

namespace {

std::vector<std::string> words(const char* text) {
  std::istringstream stream(text);
  std::vector<std::string> result;
  for (std::string word; stream >> word;) result.push_back(word);
  return result;
}

const char* cpu_vendor() {
#if defined(__x86_64__)
  if (__builtin_cpu_is("intel")) return "intel";
  if (__builtin_cpu_is("amd")) return "amd";
#endif
  return "other";
}

// As the operating system numbers it: AMD's Zen 4 is 25, Zen 5 is 26.
unsigned cpu_family() {
#if defined(__x86_64__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx)) {
    const unsigned family = eax >> 8 & 0xf, extended = eax >> 20 & 0xff;
    return family == 0xf ? family + extended : family;
  }
#endif
  return 0;
}

pybind11::dict build_info() {
  pybind11::dict info;
  info["compiler"] = FUSEDTRAIN_COMPILER;
  info["isa_variants"] = words(FUSEDTRAIN_ISA_VARIANTS);
  info["isa_active"] = fusedtrain::isa_name(fusedtrain::active_isa());
  info["cpu_vendor"] = cpu_vendor();
  info["cpu_family"] = cpu_family();
  info["cuda_archs"] = words(FUSEDTRAIN_CUDA_ARCHS);
  info["cuda_version"] = std::string(FUSEDTRAIN_CUDA_VERSION).empty()
                             ? pybind11::object(pybind11::none())
                             : pybind11::object(pybind11::str(FUSEDTRAIN_CUDA_VERSION));
  info["torch_version"] = FUSEDTRAIN_TORCH_VERSION;
  return info;
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.def("build_info", &build_info,
        "Returns compiler, ISA variants and the active one, CPU, CUDA archs and version, and torch built against.");
#if DLPACK_MINOR_VERSION >= 3
  fusedtrain::bindings::bind_step_table(m);
#endif
}

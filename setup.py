"""Builds the compiled half: the operators (fusedtrain._kernels, stable ABI) and the host module (fusedtrain._host).

Kernel files see no torch headers: CPU kernels are compiled once per instruction set, CUDA kernels by plain nvcc. The
bindings go through torch.utils.cpp_extension. Environment:

  FUSEDTRAIN_CUDA         1: build the CUDA half (needs nvcc, not a CUDA torch), 0: leave it out; default: both there
  FUSEDTRAIN_REQUIRE_EXT  1: fail where there is no C++ compiler, instead of installing without the compiled half
  TORCH_CUDA_ARCH_LIST    GPU architectures as for torch extensions, e.g. "8.0;9.0+PTX"
  MAX_JOBS                parallel compilations; default: as many as cores and memory allow
  CXX                     the C++ compiler
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import setup

import build_backend

# Under build isolation the torch of the target environment comes last, behind the isolated build requirements.
sys.path += [path for path in build_backend.target_site_packages() if path not in sys.path]

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "csrc"


def one_program(cxx: str) -> str:
    """Returns a compiler of several words, such as "ccache g++", as a program of its own: torch takes CXX for one."""
    if len(cxx.split()) == 1 or shutil.which(cxx):
        return cxx
    script = ROOT / "build" / "cxx"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f'#!/bin/sh\nexec {cxx} "$@"\n')
    script.chmod(0o755)
    os.environ["CXX"] = str(script)
    return str(script)


CXX = one_program(os.environ.get("CXX") or "c++")
ON_X86 = platform.machine() in ("x86_64", "AMD64")
TORCH_TARGET_VERSION = "0x020a000000000000"  # any torch from 2.10 on

# CI adds -Werror through CXXFLAGS. GCC 12 warns falsely of std::optional and of its own AVX-512 header (-Wno-*uninit*).
CXX_FLAGS = [
    *("-std=c++20", "-O3", "-g0", "-fPIC", "-fvisibility=hidden"),  # Python's own flags may ask for half of the size
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-unused-function", "-Wno-maybe-uninitialized"),
    *("-Wno-unknown-warning-option", "-Wno-unused-lambda-capture"),  # clang's: some types need what others do not
    *os.environ.get("CXXFLAGS", "").split(),
]
ISA_FLAGS = {
    # Elsewhere these are the kernels. On x86 they serve the few processors without AVX2, so half of the time to compile
    # them is worth more than the loops that -O3 unrolls.
    "kPortable": ["-O1"] if ON_X86 else [],
    "kAvx2": ["-mavx2", "-mfma", "-mf16c"],
    "kAvx512": [
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
        *("-mprefer-vector-width=512", "-Wno-uninitialized"),
    ],
}
ISAS = list(ISA_FLAGS) if ON_X86 else ["kPortable"]
NVCC_FLAGS = ["-std=c++20", "-O3", "-lineinfo", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
DEFAULT_CUDA_ARCHS = "7.5;8.0;8.6;8.9;9.0+PTX"


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def why_no_extension() -> str | None:
    """Returns why the compiled half cannot be built here, or None."""
    if sys.platform != "linux":
        return f"the compiled kernels are built on Linux only, this is {sys.platform}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("auto f = []<class T>() { return T{}; };\nint main() { return f.operator()<int>(); }\n")
        try:
            subprocess.run([CXX, "-std=c++20", str(source), "-o", f"{folder}/probe"], check=True, capture_output=True)
        except OSError as error:
            return f"no C++ compiler: {CXX}: {error.strerror}"
        except subprocess.CalledProcessError as error:
            return f"{CXX} does not compile C++20: {error.stderr.decode().strip()}"
    return None


def max_jobs() -> int:
    """MAX_JOBS, or one job per core with 2 GiB of memory each."""
    if os.environ.get("MAX_JOBS"):
        return max(1, int(os.environ["MAX_JOBS"]))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // (2 << 30)))


def find_cuda() -> Path | None:
    """Returns the CUDA toolkit's folder when the CUDA half is to be built. nvcc itself is asked where it lives."""
    import torch

    wanted = os.environ.get("FUSEDTRAIN_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"FUSEDTRAIN_CUDA must be 0 or 1, got {wanted!r}")
    nvcc = shutil.which("nvcc")
    if wanted == "0" or (wanted == "" and (nvcc is None or torch.version.cuda is None)):
        return None
    if nvcc is None:
        raise SystemExit("FUSEDTRAIN_CUDA=1, but there is no nvcc on PATH")
    steps = subprocess.run([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    return Path(re.search(r"^#\$ TOP=(.*)$", steps, re.MULTILINE).group(1)).resolve()


def cuda_version(cuda: Path) -> str:
    return re.search(r"release ([\d.]+)", output_of(f"{cuda}/bin/nvcc", "--version")).group(1)


def cuda_archs() -> list[str]:
    """TORCH_CUDA_ARCH_LIST as a list, e.g. ["8.0", "9.0+PTX"]."""
    archs = (os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_CUDA_ARCHS).replace(" ", ";").split(";")
    for arch in filter(None, archs):
        if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch):
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST: expected e.g. '8.0;9.0+PTX', got {arch!r}")
    return [arch for arch in archs if arch]


def gencode_flags(archs: list[str]) -> list[str]:
    flags = []
    for arch in archs:
        number = arch.removesuffix("+PTX").replace(".", "")
        codes = f"sm_{number}" + (f",compute_{number}" if arch.endswith("+PTX") else "")
        flags += ["-gencode", f"arch=compute_{number},code=[{codes}]"]
    return flags


def compile_kernels(folder: Path, cuda: Path | None) -> list[str]:
    """Compiles csrc/cpu once per instruction set and csrc/cuda with nvcc, through ninja; returns the object files."""

    def escaped(path: Path) -> str:
        return re.sub(r"([$ :])", r"$\1", str(path))

    def rule(name: str, *command) -> str:
        words = " ".join(shlex.quote(str(word)).replace("$", "$$") for word in command)
        return f"rule {name}\n  command = {words} $flags -c $in -o $out\n  depfile = $out.d\n  deps = gcc"

    lines = [rule("cxx", CXX, "-MMD", "-MF", "OUT.d", *CXX_FLAGS, f"-I{CSRC}").replace("OUT.d", "$out.d")]
    if cuda:
        flags = [*NVCC_FLAGS, *gencode_flags(cuda_archs()), "-ccbin", CXX, f"-I{CSRC}"]
        lines.append(rule("nvcc", cuda / "bin/nvcc", "-MD", "-MF", "OUT.d", *flags).replace("OUT.d", "$out.d"))
    objects = []

    def build(name: str, source: Path, variant: str, flags: str = "") -> None:
        objects.append(folder / f"{source.stem}.{variant}.o")
        lines.append(f"build {escaped(objects[-1])}: {name} {escaped(source)}\n  flags = {flags}")

    for isa in reversed(ISAS):  # the longest compilations come first, so that no core waits for another in the end
        for source in sorted(CSRC.glob("cpu/*.cpp")):
            build("cxx", source, isa, " ".join([*ISA_FLAGS[isa], f"-DFUSEDTRAIN_ISA={isa}"]))
    build("cxx", CSRC / "core/isa.cpp", "core")
    if cuda:
        for source in sorted(CSRC.glob("cuda/*.cu")):
            build("nvcc", source, "cuda")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.ninja").write_text("\n".join([*lines, ""]))
    subprocess.run(["ninja", "-C", str(folder), "-j", str(max_jobs())], check=True)
    return [str(path) for path in objects]


def extensions() -> dict:
    """Returns the setup() arguments of the compiled half."""
    import pybind11
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    cuda = find_cuda()
    archs = cuda_archs() if cuda else []
    os.environ.setdefault("MAX_JOBS", str(max_jobs()))
    binding_flags = [*CXX_FLAGS, "-Wno-unused-parameter", f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
    binding_flags.append(f"-ffile-prefix-map={ROOT}/=")  # errors name a source by its path here
    facts = {
        "COMPILER": output_of(CXX, "--version").splitlines()[0],
        "ISA_VARIANTS": " ".join(isa.removeprefix("k").lower() for isa in ISAS),
        "CUDA_ARCHS": " ".join(archs),
        "CUDA_VERSION": cuda_version(cuda) if cuda else "",
        "TORCH_VERSION": torch.__version__,
    }

    class BuildKernels(BuildExtension):
        def build_extension(self, ext):
            if ext.name == "fusedtrain._kernels":
                ext.extra_objects = compile_kernels(Path(self.build_temp).resolve() / "kernels", cuda)
            super().build_extension(ext)

    bindings = sorted(str(p.relative_to(ROOT)) for p in CSRC.glob("bindings/*.cpp") if p.name != "module.cpp")
    headers = sorted(str(p.relative_to(ROOT)) for p in CSRC.glob("**/*") if p.suffix in (".h", ".cpp", ".cu"))
    kernels = CppExtension(
        "fusedtrain._kernels",
        bindings,
        include_dirs=[str(CSRC)],
        depends=headers,
        extra_compile_args=binding_flags + (["-DFUSEDTRAIN_WITH_CUDA", "-DUSE_CUDA"] if cuda else []),
        extra_link_args=[f"-L{cuda}/lib64", "-lcudart_static", "-lrt", "-ldl", "-lpthread"] if cuda else [],
        py_limited_api=True,
    )
    host = CppExtension(
        "fusedtrain._host",
        ["csrc/bindings/module.cpp", "csrc/core/isa.cpp"],
        include_dirs=[str(CSRC), pybind11.get_include()],
        depends=headers,
        extra_compile_args=CXX_FLAGS + [f'-DFUSEDTRAIN_{key}="{value}"' for key, value in facts.items()],
    )
    return {"ext_modules": [kernels, host], "cmdclass": {"build_ext": BuildKernels}}


without = {"sdist", "egg_info", "dist_info"} & set(sys.argv)  # neither a compiler nor torch is needed for these
reason = None if without else why_no_extension()
if reason and os.environ.get("FUSEDTRAIN_REQUIRE_EXT") == "1":
    raise SystemExit(f"FUSEDTRAIN_REQUIRE_EXT=1, but {reason}")
if reason:
    print(f"fusedtrain: installing without the compiled kernels, ops run in plain PyTorch: {reason}", file=sys.stderr)
setup(**({} if without or reason else extensions()))

"""Compiles csrc/cuda for tests, with every warning an error: ``python nvcc.py FOLDER`` compiles all files.

That takes minutes, so the tests begin it behind the others (see conftest.py) and look at what it says last.
"""

import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import compiler

SOURCES = sorted(compiler.CSRC.glob("cuda/*.cu"))
WHY_NOT = None if shutil.which("nvcc") else "nvcc is not on PATH"
# Through ccache, which also keeps what ptxas says, where the C++ compiler is.
CACHED = Path(shutil.which(compiler.CXX) or "").resolve().name == "ccache"
NVCC = ["ccache", "nvcc"] if CACHED else ["nvcc"]
# The architectures that the gates hold for, by what each is compiled from. From the same PTX sm_90 costs little beside
# sm_80; each from its own, as setup.py does, is slow. So are all activations with kernels of their own, both types of
# 16 bits and all rules of optimizers: silu takes most registers, and so do the rules of fewer_kernels/rules.h.
SLOW = os.environ.get("FUSEDTRAIN_SLOW_TESTS") == "1"
ARCHS = {"compute_75": ["sm_75"], "compute_80": ["sm_80"], "compute_90": ["sm_90"]}
ARCHS = ARCHS if SLOW else {"compute_80": ["sm_80", "sm_90"]}
CODES = [code for codes in ARCHS.values() for code in codes]
_FEWER_KERNELS = Path(__file__).parent / "fewer_kernels"
FEWER = [f"-I{_FEWER_KERNELS}", "-DOWN_KERNELS=kSilu", "-DANY_HALF=kBFloat16", "-include", _FEWER_KERNELS / "rules.h"]
FEWER = [] if SLOW else FEWER


def compile_cuda(source: Path, target: Path) -> tuple[bool, str]:
    """Compiles one file for every architecture, with the warnings of nvcc, ptxas and the host compiler as errors.

    -O0 is for the host code alone: the launches are called in test_cuda_emu.py. Returns whether it compiled, and what
    nvcc and ptxas said.
    """
    codes = (f"-gencode=arch={arch},code=[{','.join(codes)}]" for arch, codes in ARCHS.items())
    gates = ["-Werror", "all-warnings,default-stream-launch", "-Xcompiler", "-Wall,-Wextra"]
    command = [*NVCC, "-O0", "-std=c++20", *codes, *gates, "-Xptxas", "-v", *FEWER, f"-I{compiler.CSRC}"]
    done = subprocess.run([*command, "-c", source, "-o", target], capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stderr


def compile_all(folder: Path, go_on=lambda: True) -> dict[str, tuple[bool, str]]:
    """Compiles what has no result in ``folder`` yet, while ``go_on()``; returns all results, by the files' stems.

    Processes that share the folder take turns: the second has nothing left to do.
    """
    import fcntl  # not on Windows, where conftest.py reads this file, too

    folder.mkdir(exist_ok=True)

    def compile_one(source: Path) -> tuple[str, tuple[bool, str]] | None:
        kept = {ok: folder / f"{source.stem}.{'said' if ok else 'failed'}" for ok in (True, False)}
        for ok, path in kept.items():
            if path.exists():
                return source.stem, (ok, path.read_text())
        if not go_on():
            return None
        ok, said = compile_cuda(source, folder / source.stem)
        part = folder / f"{source.stem}.part"
        part.write_text(said)
        part.rename(kept[ok])
        return source.stem, (ok, said)

    longest_first = sorted(SOURCES, key=lambda source: source.stat().st_size, reverse=True)
    with open(folder / "lock", "w") as lock, ThreadPoolExecutor(2) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return dict(filter(None, pool.map(compile_one, longest_first)))


def begin(folder: Path) -> subprocess.Popen:
    """Compiles all files in a process that yields to every other one and ends with the caller's."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # compile_all says what went wrong
    return subprocess.Popen([sys.executable, __file__, folder], stdin=subprocess.PIPE, **quiet)


if __name__ == "__main__":
    os.nice(19)
    ended = threading.Event()  # as the standard input has, whose other end the caller holds
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    compile_all(Path(sys.argv[1]), lambda: not ended.is_set())

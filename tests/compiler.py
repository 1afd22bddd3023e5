"""Compiles csrc files for tests, with the flags of setup.py."""

import ast
import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
CXX = os.environ.get("CXX") or "c++"
ON_X86 = platform.machine() in ("x86_64", "AMD64")


def _constant_of_setup(name: str):
    """A constant of setup.py, which cannot be imported without running it."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return eval(compile(ast.Expression(node.value), "setup.py", "eval"), {"os": os, "ON_X86": ON_X86})
    raise LookupError(f"setup.py has no {name}")


CXX_FLAGS: list[str] = _constant_of_setup("CXX_FLAGS")
ISA_FLAGS: dict[str, list[str]] = _constant_of_setup("ISA_FLAGS")
ISAS = list(ISA_FLAGS) if ON_X86 else ["kPortable"]


def kernel_objects(folder: Path, isa: str) -> dict[str, Path]:
    """{"channel_pool": object file, ...} of csrc/cpu/*.cpp for one variant: those of the last build in this tree, or,
    where they are not newer than every source, compiled into ``folder``, cheaply."""
    sources = sorted(CSRC.glob("cpu/*.cpp"))
    newest = max(path.stat().st_mtime for path in CSRC.rglob("*"))
    for built in ROOT.glob("build/temp*/kernels"):
        objects = {source.stem: built / f"{source.stem}.{isa}.o" for source in sources}
        if all(path.exists() and path.stat().st_mtime > newest for path in objects.values()):
            return objects
    flags = [*CXX_FLAGS, "-O1", *ISA_FLAGS[isa], f"-DFUSEDTRAIN_ISA={isa}"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = pool.map(lambda source: compile_object(folder / f"{source.stem}.o", *flags, source), sources)
        return {source.stem: path for source, path in zip(sources, objects)}


def compile_object(target: Path, *arguments) -> Path:
    """Runs ``c++ arguments -c -o target``; fails with the compiler's words."""
    done = subprocess.run(
        [CXX, *arguments, f"-I{CSRC}", "-c", "-o", target], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target


def sanitizer_runtime(cxx: str = CXX) -> str:
    """LD_PRELOAD of a process that loads what ``cxx`` has compiled with the address sanitizer; skips where it has none.

    The sanitizer looks for C++'s exceptions when it starts, and Python comes without them: libstdc++ goes with it.
    """
    paths = []
    for name in ("libasan.so", "libstdc++.so"):
        found = subprocess.run([cxx, f"-print-file-name={name}"], capture_output=True, text=True).stdout
        paths.append(found.strip())
        if not os.path.isabs(paths[-1]):
            pytest.skip(f"{cxx} has no {name}")
    return " ".join(paths)

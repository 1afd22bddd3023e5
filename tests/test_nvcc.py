"""The CUDA files on a machine without a GPU: nvcc compiles them without warnings, spills or local memory, and the
machine code moves 16 bytes at a time where it should."""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent / "csrc"
SOURCES = sorted(CSRC.glob("cuda/*.cu"))
ARCHS = ("sm_80", "sm_90")
GATES = ["-Werror", "all-warnings,default-stream-launch", "-Xptxas", "-v,-warn-spills,-warn-lmem-usage,-Werror"]

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")


def compile(source: Path, arch: str, folder: Path) -> subprocess.CompletedProcess:
    command = ["nvcc", "-O3", "-std=c++20", f"-arch={arch}", f"-I{CSRC}", *GATES, "-Xcompiler", "-Wall,-Wextra"]
    command += ["-c", str(source), "-o", str(folder / f"{source.stem}.{arch}.o")]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """(folder of the object files, {(stem, arch): what nvcc said})"""
    folder = tmp_path_factory.mktemp("nvcc")
    with ThreadPoolExecutor(2) as pool:
        jobs = {(s.stem, arch): pool.submit(compile, s, arch, folder) for arch in ARCHS for s in SOURCES}
        return folder, {key: job.result() for key, job in jobs.items()}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("stem", [source.stem for source in SOURCES])
def test_compiles_without_warnings_spills_or_local_memory(compiled, stem, arch):
    result = compiled[1][stem, arch]
    assert result.returncode == 0, result.stderr[-5000:]
    assert "Used" in result.stderr  # the kernels are there: ptxas reports their registers


def kernels_of(path: Path, tool: str) -> dict[str, str]:
    """Mangled name -> machine code of every kernel in an object file."""
    sass = subprocess.run([tool, "-sass", str(path)], capture_output=True, text=True, check=True).stdout
    parts = re.split(r"^\s*Function : (\S+)$", sass, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


@pytest.fixture(scope="module")
def cuobjdump():
    spec = find_spec("triton")
    bundled = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump" if spec else Path("/nowhere")
    tool = shutil.which("cuobjdump") or (str(bundled) if bundled.exists() else None)
    if tool is None:
        pytest.skip("no cuobjdump, neither of CUDA nor of triton")
    return tool


# Kernels of core/cuda_images.h end in the elements N of a pack: 4 of float32, 8 of bfloat16 and float16.
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("stem", ["channel_pool", "channel_scale"])
def test_images_move_16_bytes_at_a_time(compiled, cuobjdump, stem, arch):
    kernels = kernels_of(compiled[0] / f"{stem}.{arch}.o", cuobjdump)
    vectors = {name: code for name, code in kernels.items() if re.search(r"_(rows|planes)_kernel.*ELi[48]E", name)}
    assert len(vectors) >= 3 * 5 * 2  # element types, activations, layouts
    for name, code in vectors.items():
        assert re.search(r"LDG\.E\.128", code), name
        if "map_" in name:
            assert re.search(r"STG\.E\.128", code), name


def test_every_kernel_states_its_block_size():
    for source in [*SOURCES, *CSRC.glob("core/*.h")]:
        for kernel in re.findall(r"__global__ \w+ [^;{]*?\(", source.read_text()):
            assert "__launch_bounds__" in kernel, f"{source.name}: {kernel}"

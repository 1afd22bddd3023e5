"""The CUDA files on a machine without a GPU: nvcc compiles them without warnings, spills or local memory, and the
machine code moves 16 bytes at a time where it should."""

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import nvcc
import pytest
from nvcc import CODES, SOURCES

from fusedtrain.ops import _codes

pytestmark = pytest.mark.skipif(nvcc.WHY_NOT is not None, reason=str(nvcc.WHY_NOT))


class Usage(NamedTuple):
    """What ptxas says of one kernel on one architecture; bytes are per thread."""

    kernel: str
    arch: str
    stack: int
    spill_stores: int
    spill_loads: int
    registers: int


USAGE = re.compile(
    r"Compiling entry function '(\w+)' for '(\w+)'\n"
    r".*Function properties for .*\n"
    r"\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
    r".*Used (\d+) registers"
)


def usages(result: tuple[bool, str]) -> list[Usage]:
    """What ptxas reports of every kernel; fails with nvcc's words where it did not compile."""
    ok, said = result
    assert ok, said[-5000:]
    found = [Usage(*match[:2], *map(int, match[2:])) for match in USAGE.findall(said)]
    assert len(found) == said.count("Compiling entry function"), "ptxas' report has another form"
    return found


def spilling(usages: list[Usage]) -> list[Usage]:
    return [usage for usage in usages if usage.stack or usage.spill_stores or usage.spill_loads]


@pytest.fixture(scope="session")
def compiled(nvcc_folder):
    """(folder of what nvcc wrote, {stem: whether it compiled, and what nvcc said})"""
    return nvcc_folder, nvcc.compile_all(nvcc_folder)


@pytest.mark.parametrize("stem", [source.stem for source in SOURCES])
def test_compiles_without_warnings_spills_or_local_memory(compiled, stem):
    found = usages(compiled[1][stem])
    assert {usage.arch for usage in found} == set(CODES)
    bad = spilling(found)
    assert not bad, "\n".join(map(str, bad))


def test_a_kernel_that_spills_is_found(tmp_path):
    source = tmp_path / "spills.cu"
    source.write_text(
        "__global__ void __launch_bounds__(1024) fits(float* p) { p[threadIdx.x] += 1; }\n"
        "__global__ void __launch_bounds__(1024) spills(double* p) {\n"
        "  double v[64];\n"
        "  for (int i = 0; i < 64; ++i) v[i] = p[i * 1024 + threadIdx.x];\n"
        "  __syncthreads();\n"
        "  for (int i = 0; i < 64; ++i) p[(63 - i) * 1024 + threadIdx.x] = v[i] * v[(i + 7) % 64];\n"
        "}\n"
    )
    found = usages(nvcc.compile_cuda(source, tmp_path / "spills"))
    assert len(found) == 2 * len(CODES)
    bad = spilling(found)
    assert [usage.arch for usage in bad] == CODES
    assert all("spills" in usage.kernel and usage.spill_loads and usage.registers <= 64 for usage in bad)


@pytest.fixture(scope="session")
def cuobjdump() -> str:
    spec = find_spec("triton")
    bundled = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump" if spec else Path("/nowhere")
    tool = shutil.which("cuobjdump") or (str(bundled) if bundled.exists() else None)
    if tool is None:
        pytest.skip("no cuobjdump, neither of CUDA nor of triton")
    return tool


def machine_code(path: Path, tool: str, arch: str) -> dict[str, str]:
    """Mangled name -> machine code of every kernel in what nvcc wrote, for one architecture."""
    command = [tool, "-sass", "-arch", arch, path]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    parts = re.split(r"^\s*Function : (\S+)$", sass, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def test_lists_move_16_bytes_at_a_time(compiled, cuobjdump):
    # A kernel for each rule, and for each number of states.
    rules = len(_codes.RULES) if nvcc.SLOW else 6
    for stem, kernels in (("grad_norm", 1), ("optimizer_step", rules), ("optimizer_step_narrow", 5)):
        code = machine_code(compiled[0] / stem, cuobjdump, CODES[0])
        walks = [text for name, text in code.items() if re.search(r"(partial|step|narrow)_kernel", name)]
        assert len(walks) == kernels
        assert all("LDG.E.128" in text and ("STG.E.128" in text or stem == "grad_norm") for text in walks)


# Kernels of core/cuda_images.h have the elements N of a pack: 4 of float32, 8 of bfloat16 and float16. A pass over
# images has one for each element type, activation (the four with kernels of their own, and all others) and layout.
KERNELS = (3 * 5 if nvcc.SLOW else 2 * 2) * 2


@pytest.mark.parametrize(
    ("stem", "passes"),
    [("channel_scale", 1), ("batch_norm_act", 1), ("batch_norm_act_backward", 2), ("depthwise_bn_act_se", 4)],
)
def test_images_move_16_bytes_at_a_time(compiled, cuobjdump, stem, passes):
    kernels = machine_code(compiled[0] / stem, cuobjdump, CODES[0])
    vectors = {
        name: code for name, code in kernels.items() if re.search(r"_(rows|planes)_kernel.*(TermIf.*ELi4E|ELi8E)", name)
    }
    assert len(vectors) >= passes * KERNELS
    for name, code in vectors.items():
        assert re.search(r"LDG\.E\.128", code), name
        if "map_" in name:
            assert re.search(r"STG\.E\.128", code), name

"""The CPU kernels stay inside their tensors and workspaces, in every instruction set of this CPU."""

import signal
import subprocess
from pathlib import Path

import compiler
import harness
import pytest

from fusedtrain import _extension

if not _extension.LOADED:
    pytest.skip(_extension.WHY_NOT, allow_module_level=True)


@pytest.fixture(scope="module")
def guards(tmp_path_factory):
    """The environment of a process whose tensors lie between protected pages."""
    library, source = tmp_path_factory.mktemp("guards") / "guards.so", Path(__file__).with_name("guard_pages.c")
    command = [compiler.CXX, "-x", "c", "-std=c11", "-O1", "-shared", "-fPIC", "-o", library, source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("isa", [*_extension.BUILD_INFO["isa_variants"], "avx512_bf16"])
def test_kernels_stay_inside_their_memory(isa, guards):
    done = harness.run_python("guarded_child.py", FUSEDTRAIN_ISA=isa, **guards)
    if "this CPU does not have it" in done.stderr:
        pytest.skip(f"this CPU does not have {isa}")
    assert done.returncode == 0, f"{done.stdout[-500:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("side", ["begin", "end"])
def test_a_tensors_neighbours_are_protected(side, guards):
    assert harness.run_python("guarded_child.py", side, **guards).returncode == -signal.SIGSEGV

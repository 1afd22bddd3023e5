"""Every op has the same stem in every folder, every folder has nothing but the ops, and every folder is installed."""

import ast
import re
import shutil
from pathlib import Path

import harness
import pytest

from fusedtrain import backend
from fusedtrain.ops import _schema

ROOT = Path(__file__).parents[1]
STEMS = sorted({_schema.stem(name) for name in _schema.SCHEMAS})
PLACES = {
    "header": "csrc/{}.h",
    "CPU kernel": "csrc/cpu/{}.cpp",
    "CUDA kernel": "csrc/cuda/{}.cu",
    "binding": "csrc/bindings/{}.cpp",
    "Triton kernel": "kernels/{}.py",
    "reference": "fusedtrain/ops/{}.py",
    "test": "tests/test_{}.py",
    "benchmark": "benchmarks/bench_{}.py",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stem", STEMS)
def test_every_op_stands_in_every_place(stem, place):
    path = PLACES[place].format(stem)
    for_gpus = place in ("CUDA kernel", "Triton kernel")
    wanted = not (for_gpus and stem in _schema.CPU_ONLY)
    assert (ROOT / path).is_file() == wanted, f"the {place} of {stem}: {path}"


@pytest.mark.parametrize("stem", STEMS)
def test_every_op_has_a_reference_and_all_backends(stem):
    assert "def reference(" in (ROOT / f"fusedtrain/ops/{stem}.py").read_text()
    assert tuple(backend._OPS[stem]) == backend.BACKENDS


@pytest.mark.parametrize(
    "folder", ["csrc/*.h", "csrc/cpu/*.cpp", "csrc/cuda/*.cu", "kernels/*.py", "fusedtrain/ops/*.py"]
)
def test_every_file_belongs_to_an_op(folder):
    stems = {path.stem for path in ROOT.glob(folder) if not path.stem.startswith("_")}
    stems -= set(_schema.BUILT_ON)
    assert all(any(stem == op or stem.startswith(f"{op}_") for op in STEMS) for stem in stems), stems


def test_every_folder_of_the_package_is_installed():
    listed = re.search(r"^packages = (\[.*?\])$", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)[1]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "fusedtrain").rglob("*.py")}
    assert {*ast.literal_eval(listed)} == {".".join(folder.parts) for folder in folders} | {"fusedtrain.kernels"}


def test_setup_py_does_not_leave(tmp_path):
    """setuptools, which runs it as a configuration, warns of a SystemExit and will refuse it."""
    pytest.importorskip("setuptools", "77")
    files = ("setup.py", "build_backend.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
    for name in files:
        shutil.copy(ROOT / name, tmp_path)
    for path in ("kernels", *(p.parent.relative_to(ROOT) for p in (ROOT / "fusedtrain").rglob("__init__.py"))):
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
    code = f"""import os; os.chdir({str(tmp_path)!r})
import sys; sys.path.insert(0, "")
import build_backend
build_backend.get_requires_for_build_wheel()"""
    done = harness.run_python("-W", "default", "-c", code, fresh=True)
    assert done.returncode == 0 and "Deprecat" not in done.stderr, done.stderr

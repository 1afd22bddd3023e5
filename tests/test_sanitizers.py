"""The compiled half under the address and undefined-behaviour sanitizers, in every instruction set of this CPU.

Slow: the whole package is built for it. On every run, protected pages around the tensors (test_guarded.py) stand in.
"""

import os
import re
import shutil
import subprocess
import sys

import compiler
import harness
import pytest

from fusedtrain import _extension

SLOW = os.environ.get("FUSEDTRAIN_SLOW_TESTS") == "1"
# At -O0 the two sanitizers together take g++ more than eight minutes for one of the files; what is used after its scope
# would take another quarter.
FLAGS = "-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-sanitize-address-use-after-scope"
LEFT_OUT = shutil.ignore_patterns("build", ".*", "*.so", "__pycache__", "*.egg-info")
TESTS = (
    "test_channel_pool.py",
    "test_channel_scale.py",
    "test_squeeze_excite.py",
    "test_depthwise_conv2d.py",
    "test_global_response_norm.py",
    "test_grouped_conv2d.py",
    "test_mlp.py",
    "test_pointwise_conv2d.py",
    "test_batch_norm_act.py",
    "test_depthwise_bn_act_se.py",
    "test_optimizer_step.py",
    "test_grad_norm.py",
)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """The environment of a process in which the package, built with sanitizers, is found and their runtime loaded."""
    runtime = compiler.sanitizer_runtime()
    folder = tmp_path_factory.mktemp("sanitized")
    shutil.copytree(compiler.ROOT, folder / "source", ignore=LEFT_OUT)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps"]
    command += ["--target", str(folder / "site"), str(folder / "source")]
    flags = f"{os.environ.get('CXXFLAGS', '')} {FLAGS} -Wno-error"
    env = harness.environment(CXXFLAGS=flags, LDFLAGS="-fsanitize=address,undefined", FUSEDTRAIN_CUDA="0")
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {"PYTHONPATH": str(folder / "site"), "LD_PRELOAD": runtime, "OMP_NUM_THREADS": "2"}


@pytest.mark.skipif(not SLOW, reason="slow; FUSEDTRAIN_SLOW_TESTS=1 runs it")
@pytest.mark.skipif(not _extension.LOADED, reason=str(_extension.WHY_NOT))
@pytest.mark.parametrize("isa", _extension.BUILD_INFO.get("isa_variants", ()))
def test_cpu_kernels_under_sanitizers(isa, sanitized, tmp_path):
    """Values are judged elsewhere, of kernels compiled as usual: here a few tests may fail, which compare to the
    bit what another instruction set, optimisation or number of threads rounds otherwise, but all must be run."""
    where = "import fusedtrain; print(fusedtrain.__file__)"
    assert harness.run_python("-c", where, **sanitized).stdout.startswith(sanitized["PYTHONPATH"])
    options = f"detect_leaks=0:print_stacktrace=1:log_path={tmp_path / 'report'}"
    env = sanitized | {"ASAN_OPTIONS": options, "UBSAN_OPTIONS": options}
    env |= {"FUSEDTRAIN_ISA": isa, "FUSEDTRAIN_SLOW_TESTS": None}
    tests = ["-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", "-k", "cpu-cpu and not compile", *TESTS]
    done = harness.run_python(*tests, **env)
    if "this CPU does not have it" in done.stdout + done.stderr:
        pytest.skip(f"this CPU does not have {isa}")
    reports = [path.read_text() for path in tmp_path.glob("report*")]
    assert not reports, reports[0][:5000]
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (\w+)", done.stdout.rstrip().rpartition("\n")[2])}
    few = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    assert counts.get("passed", 0) > 100 * few, (done.stdout + done.stderr)[-5000:]

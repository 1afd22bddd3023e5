"""Devices, backends and the model zoo for the tests.

A test that takes ``device`` runs once per device of this machine; one that takes ``device`` and ``backend`` runs once
per backend of each device, with that backend forced. A backend that cannot run here is skipped with its own reason,
unless ``FUSEDTRAIN_REQUIRE_EXT=1`` says that the compiled kernels must be there.

Triton without a GPU: ``TRITON_INTERPRET=1`` is set here, before anything imports triton, so the tests of backend triton
run in this process, in Triton's interpreter, on CPU tensors. The variable is read when a kernel is decorated and cannot
be taken back: a test that compiles kernels ahead of time does so in a subprocess whose environment comes from
:func:`harness.environment`, which leaves it out.
"""

import contextlib
import ctypes
import gc
import importlib.util
import os
import sys
from collections import Counter
from importlib import metadata
from unittest import mock

# The workers of pytest-xdist share the cores; read when OpenMP starts, also by the processes that tests start.
if "PYTEST_XDIST_WORKER" in os.environ:
    threads = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
# Threads that spin while they wait starve each other on a machine with other work, for minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# glibc keeps what tests let go of; the next ones would get it from the kernel again, page by page.
if sys.platform == "linux":
    for option, size in ((-3, 2**25), (-1, 2**28)):  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD
        getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)(option, size)

import pytest
import torch
from hypothesis import HealthCheck, settings
from packaging.version import Version

# Older interpreters fail on loops to a bound that was loaded, and inside compiled graphs.
if not torch.cuda.is_available() and any(
    Version(triton.version) >= Version("3.9") for triton in metadata.distributions(name="triton")
):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the imports below

os.environ.setdefault("FUSEDTRAIN_TUNED", "0")  # a table measured on this machine would decide what is tested here

with (
    contextlib.suppress(ImportError),  # it needs expecttest; what tests need of it, they import themselves
    mock.patch.object(torch.backends, "disable_global_flags"),  # of cuDNN, which training runs set
):
    import torch.testing._internal.common_utils  # changes the settings of hypothesis

if torch.cuda.is_available():
    import truth  # noqa: F401  (mends hardswish in float64, before fusedtrain takes it as its reference)

import harness
import nvcc
from zoo import Zoo

import fusedtrain
from fusedtrain import _extension
from fusedtrain.nn import _small
from fusedtrain.ops import _remembered

# Seconds. A data loader that the garbage collector finds waits as long for workers that do not hear of their end.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2  # not 5
# And one that waits for a batch looks as seldom for workers that have died; its default was bound before.
torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data.__defaults__ = (0.2,)

torch.backends.cudnn.allow_tf32 = False  # what the kernels are compared with is float32

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    import interpreter

    interpreter.as_compiled()

# The same examples on every run; the backend fixture holds for all examples of a test.
settings.register_profile(
    "fusedtrain",
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("fusedtrain")


def pytest_report_header():
    state = "loaded" if _extension.LOADED else f"not loaded: {_extension.WHY_NOT}"
    return (
        f"torch {torch.__version__}, devices {', '.join(harness.DEVICES)}, {torch.get_num_threads()} threads",
        f"fusedtrain {fusedtrain.__version__} in {os.path.dirname(fusedtrain.__file__)}; compiled kernels {state}",
    )


# Files by the time they take, where their numbers of tests do not tell.
_SLOW = ("cuda_emu", "diagnose_whole", "diagnose", "fuse", "tune", "cli", "distributed", "triton", "run", "isa")
_SLOW += ("resume", "benchmarks", "examples", "guarded", "parity", "activation_checkpointing", "train")
_LAST = "test_nvcc.py"  # it waits for nvcc_behind


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """The longest files first: xdist hands out whole files, and what begins last should be short."""
    count = Counter(item.path.name for item in items)
    slow = {f"test_{name}.py": rank for rank, name in enumerate(_SLOW)} | {_LAST: len(_SLOW) + 1}
    items.sort(key=lambda item: (slow.get(item.path.name, len(_SLOW)), -count[item.path.name], item.path.name))


@pytest.fixture(scope="session")
def nvcc_folder(tmp_path_factory):
    """Where the workers of pytest-xdist share what nvcc compiles."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "nvcc"


@pytest.fixture(scope="session", autouse=True)
def nvcc_behind(request, nvcc_folder):
    """What test_nvcc.py looks at is compiled while other tests wait for something."""
    wanted = nvcc.WHY_NOT is None and any(item.path.name == _LAST for item in request.session.items)
    if not wanted or os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        yield
        return
    behind = nvcc.begin(nvcc_folder)
    yield
    behind.stdin.close()


def pytest_configure():
    gc.disable()  # until all modules and tests are there


def pytest_collection_finish():
    """What stands here stays: passes of the garbage collector, of which a diagnosis makes many, need not look at it."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def faults_of_this_test():
    """Kernels run on after their launch: what one of them did wrong is raised here and not in a later test."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def pytest_runtest_logfinish():
    """After an illegal access no CUDA call of this process works any more: xdist goes on with a new worker."""
    if "PYTEST_XDIST_WORKER" not in os.environ or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        os._exit(1)


def pytest_generate_tests(metafunc):
    for fixture in {"backend", "kernels"} & set(metafunc.fixturenames):
        pairs = [(device, name) for device in harness.DEVICES for name in harness.backends_for(device)]
        if fixture == "kernels":
            pairs = [(device, name) for device, name in pairs if name != "reference"]
        ids = [f"{device}-{name}" for device, name in pairs]
        metafunc.parametrize(("device", fixture), pairs, indirect=[fixture], ids=ids)
        return
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", harness.DEVICES)


@pytest.fixture(autouse=True)
def images_of_any_size(monkeypatch):
    """Layers call the ops for the small images of the tests, too; test_small.py has the rule by which they do not."""
    monkeypatch.setattr(_small, "ELEMENTS", 0)
    monkeypatch.setattr(_small, "IN_TRAINING", 0)


@pytest.fixture(autouse=True)
def nothing_remembered():
    """Of what rules chose in other tests, some of which change the rules."""
    _remembered._chosen.clear()


@pytest.fixture
def backend(request, device):
    """Forces one backend for the length of a test and returns its name; only those that differ where the file of the
    test says ``STOCK_ON_GPUS``."""
    if getattr(request.module, "STOCK_ON_GPUS", False) and request.param not in ("cpu", "reference"):
        pytest.skip("on GPUs every backend is stock PyTorch")
    reason = harness.why_not(request.param, device)
    if reason is not None:
        if request.param == "cpu" and os.environ.get("FUSEDTRAIN_REQUIRE_EXT") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    with fusedtrain.use_backend(request.param):
        yield request.param


# The backends with kernels of their own: for what the reference does not promise or does in another way.
kernels = backend


@pytest.fixture(scope="session")
def zoo():
    """timm and torchvision, as an object with these attributes; the CPU-only torch has no build of torchvision."""
    try:
        return Zoo()
    except Exception as error:
        message = f"the model zoo cannot be imported: {error}"
        if os.environ.get("FUSEDTRAIN_REQUIRE_EXT") == "1" or os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)

"""What is particular to the Triton kernels; the op tests run them like every other backend.

Compiled ahead for GPUs that need not be there: nothing spills, shared memory stays within the limits, loads are 16
bytes wide where the layout allows it. Run in Triton's interpreter: activations, chunked sums, 64-bit offsets, and
memory whose end is guarded.
"""

import functools
import importlib.util
import json
import os
import pkgutil
import signal
import subprocess
import sys

import harness
import pytest
import test_optimizer_step
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import triton
import triton.language as tl

import fusedtrain
import fusedtrain.kernels
from fusedtrain import ops
from fusedtrain.kernels import _activation, _images, _lists
from fusedtrain.ops import _activation as reference_activation
from fusedtrain.ops import _codes

CHILD = os.path.join(os.path.dirname(__file__), "triton_child.py")
SHARED_LIMIT = {"cuda:80": 166_912, "cuda:90": 232_448, "hip:gfx942": 65_536}  # bytes per program
CASES = ("batch_norm_act", "squeeze_excite", "depthwise_conv2d", "depthwise_bn_act_se")
CASES += ("global_response_norm", "optimizer_step")
on_targets = pytest.mark.parametrize("target", SHARED_LIMIT)
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="memory is guarded in the interpreter only")


@pytest.fixture(autouse=True)
def runs_here(request):
    """Where there is a GPU there is no interpreter, and no test on CPU tensors."""
    parameters = getattr(request.node, "callspec", None) and request.node.callspec.params
    if parameters and "device" in parameters:
        harness.skip_unless_runs("triton", parameters["device"], "channel_pool")


def child(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, CHILD, *arguments]
    env = harness.environment(OMP_NUM_THREADS="1", **variables)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


@functools.cache
def compiled(target: str) -> list[dict]:
    """Facts about every kernel that the cases launch, compiled for ``target``."""
    done = child("compile", target, *CASES)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def name(kernel: dict) -> str:
    return f"{kernel['kernel']} {kernel['constants']}"


@on_targets
def test_every_kernel_is_compiled(target):
    modules = [
        importlib.import_module(f"fusedtrain.kernels.{module.name}")
        for module in pkgutil.iter_modules(fusedtrain.kernels.__path__)
    ]
    names = {n for module in modules for n in vars(module) if n.endswith("_kernel")}
    assert names and names == {kernel["kernel"] for kernel in compiled(target)}


@on_targets
def test_every_block_shape_is_compiled(target):
    shapes = {
        (*_images.blocks(c, hw, cl), cl) for c in range(1, 200) for hw in range(1, 2000, 7) for cl in (True, False)
    }
    tested = [kernel["constants"] for kernel in compiled(target) if "BLOCK_HW" in kernel["constants"]]
    assert shapes == {(c["BLOCK_C"], c["BLOCK_HW"], c["CHANNELS_LAST"]) for c in tested}


@on_targets
def test_nothing_spills(target):
    spilled = {name(kernel): kernel for kernel in compiled(target) if kernel["stack"] or kernel["spills"]}
    assert not spilled


@on_targets
def test_shared_memory_fits(target):
    assert not [name(kernel) for kernel in compiled(target) if kernel["shared"] > SHARED_LIMIT[target]]


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90"])
def test_loads_are_16_bytes_wide_where_rows_are(target):
    wide = [kernel for kernel in compiled(target) if kernel["constants"].get("VEC", 1) * kernel["itemsize"] == 16]
    assert len(wide) >= 10
    assert not [name(kernel) for kernel in wide if kernel["loads_of_16_bytes"] == 0]


def test_sizes_of_one_are_read():
    done = child("read", "cuda:90", "ones")
    assert done.returncode == 0 and int(done.stdout) == 14, done.stdout + done.stderr


@interpreted
def test_kernels_stay_inside_their_tensors():
    done = child("guard", *CASES, TRITON_INTERPRET="1")
    assert done.returncode == 0, f"exit status {done.returncode} in {done.stdout.split()[-1:]}\n{done.stderr}"
    assert done.stdout.split() == list(CASES)


@interpreted
def test_guarded_memory_ends_where_the_tensor_ends():
    assert child("guard", "off_by_one", TRITON_INTERPRET="1").returncode == -signal.SIGSEGV


@triton.jit
def _activation_test_kernel(x_ptr, y_ptr, dx_ptr, n, ACT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(y_ptr + at, _activation.value(x, ACT), mask=at < n)
    tl.store(dx_ptr + at, _activation.gradient(tl.full([BLOCK], 1.0, tl.float32), x, ACT), mask=at < n)


@pytest.mark.parametrize("act", _codes.ACTIVATIONS)
def test_activations_and_slopes_are_as_good_as_torch(device, act):
    kinks = torch.tensor([-100.0, -3.0, -0.625, -0.0, 0.0, 0.625, 3.0, 100.0])
    for x in (torch.linspace(-9, 9, 1001), torch.linspace(-0.7, 0.7, 501), kinks):
        x = x.to(device)
        y, dx = torch.empty_like(x), torch.empty_like(x)
        _activation_test_kernel[(1,)](x, y, dx, x.numel(), ACT=_codes.ACTIVATIONS.index(act), BLOCK=1024)
        ours = {"y": y, "dx": dx}
        function, ones = reference_activation.REFERENCE[act], torch.ones_like(x)
        stock = harness.evaluate(function, {"x": x}, dy=ones)
        truth = harness.evaluate(function, {"x": x.double()}, dy=ones)
        for key, value in ours.items():
            harness.assert_as_good_as_torch(value, stock[key], truth[key], f"{act} {key}")


# More pixels than a program sums, so that sums are cut into chunks; the last chunk and the last block are not full.
LONG = {"contiguous": (2, 3, 67, 65), "channels_last": (2, 70, 19, 17)}


def long_inputs(layout: str, device: str, dtype=torch.float32, draw: int = 0) -> dict:
    n, c, h, w = LONG[layout]
    seed = 5 * draw
    weights = {"w1": harness.normal(3, c, dtype=dtype, seed=seed + 1) / c**0.5}
    weights |= {"b1": harness.normal(3, dtype=dtype, seed=seed + 2)}
    weights |= {
        "w2": harness.normal(c, 3, dtype=dtype, seed=seed + 3),
        "b2": harness.normal(c, dtype=dtype, seed=seed + 4),
    }
    x = harness.images((n, c, h, w), layout, dtype, seed=seed)
    return {key: value.to(device) for key, value in ({"x": x} | weights).items()}


def block(in_act="silu"):
    return functools.partial(ops.squeeze_excite, act="silu", pool="avg_max", in_act=in_act)


@pytest.mark.parametrize("layout", LONG)
@pytest.mark.parametrize("dtype", harness.DTYPES[:3])
def test_sums_in_chunks_are_as_good_as_torch(device, layout, dtype):
    ours, stock, truth = [], [], []
    for draw in range(4):  # judged together: with few gradients torch's own error can be small by chance
        inputs = long_inputs(layout, device, dtype, draw)
        assert _images.grid(inputs["x"]).chunks > 1
        with fusedtrain.use_backend("reference"):
            stock.append(harness.evaluate(block(), inputs))
            truth.append(harness.evaluate(block(), harness.cast(inputs, torch.float64), dy_dtype=dtype))
        with fusedtrain.use_backend("triton"):
            ours.append(harness.evaluate(block(), inputs))
    for key in ours[0]:
        values = (torch.stack([run[key] for run in runs]) for runs in (ours, stock, truth))
        harness.assert_as_good_as_torch(*values, f"{layout} {key}")


@pytest.mark.parametrize("layout", LONG)
def test_sums_do_not_depend_on_the_batch(device, layout):
    x = long_inputs(layout, device)["x"]
    gate = harness.normal(*x.shape[:2], device=device)
    with fusedtrain.use_backend("triton"):
        whole = harness.evaluate(ops.channel_scale, {"x": x, "gate": gate}, dy=x)
        first = harness.evaluate(ops.channel_scale, {"x": x[:1], "gate": gate[:1]}, dy=x[:1])
        pooled = ops.channel_pool(x), ops.channel_pool(x[:1])
    assert torch.equal(pooled[0][:1], pooled[1])
    harness.assert_bitwise_equal({key: value[:1] for key, value in whole.items()}, first, layout)


@pytest.mark.parametrize("rule", ["adan", "lamb"])
def test_lists_of_several_dtypes_blocks_and_programs(device, rule, monkeypatch):
    monkeypatch.setattr(_lists, "BLOCK", 1024)
    shapes = [(8197,), (3, 5), (0,), (2051,), (8192,)]
    dtypes = [torch.float32, torch.float16] * 3  # the interpreter cuts bfloat16 off, which the averages show
    lists = test_optimizer_step.mixed(rule, device, shapes, dtypes, with_ema=True)
    lists["params"][0] = torch.cat([lists["params"][0][:1], lists["params"][0]])[1:]  # not at a multiple of 16 bytes
    with fusedtrain.use_backend("triton"):
        test_optimizer_step.assert_as_good_as_reference(rule, lists, test_optimizer_step.EVERYTHING)


@pytest.mark.parametrize("layout", LONG)
def test_64_bit_offsets_change_nothing(device, layout, monkeypatch):
    inputs = long_inputs(layout, device)
    with fusedtrain.use_backend("triton"):
        narrow = harness.evaluate(block(), inputs)
        monkeypatch.setattr(_images, "INT32_ELEMENTS", 0)
        assert _images.grid(inputs["x"]).wide
        harness.assert_bitwise_equal(narrow, harness.evaluate(block(), inputs), layout)

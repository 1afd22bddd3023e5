"""What test_triton.py runs in a process of its own, one case per call.

``compile TARGET CASE...`` compiles, without a GPU, every kernel that the launches of the cases would run on "cuda:80",
"cuda:90" or "hip:gfx942", and prints one JSON line of facts per kernel. ``read TARGET CASE...`` ends where Triton has
read the kernels, an eighth of the time, and prints how many they are. ``guard CASE...`` runs cases in Triton's
interpreter on tensors that end where readable memory ends, so that an access behind the end is a segmentation fault.
"""

import contextlib
import ctypes
import functools
import json
import math
import mmap
import os
import re
import subprocess
import sys
import tempfile
from unittest import mock

import interpreter
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction

from fusedtrain.kernels import (
    batch_norm_act,
    channel_pool,
    channel_scale,
    depthwise_bn_act_se,
    depthwise_conv2d,
    global_response_norm,
    grad_norm,
    optimizer_step,
    squeeze_excite,
)
from fusedtrain.ops import _codes, _narrow
from fusedtrain.ops.optimizer_step import RULES

RELU, GELU, SIGMOID = (_codes.ACTIVATIONS.index(name) for name in ("relu", "gelu", "sigmoid"))
CUOBJDUMP = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")


# --- cases: the launchers on given tensors, in the modes that need the most registers ---------------------------------


def block(x, weight_dtype=torch.float32):
    c, r = x.shape[1], 8
    w1, b1, w2, b2 = (x.new_ones(shape, dtype=weight_dtype) for shape in ((r, c), (r,), (c, r, 1, 1), (c,)))
    codes = (GELU, SIGMOID, channel_pool.AVG_MAX, GELU)
    y, *saved = squeeze_excite.squeeze_excite(x, w1, b1, w2, b2, *codes)
    squeeze_excite.squeeze_excite_backward(y, x, w1, w2, *saved, *codes, True, True)
    return y, saved


# Every block shape of _images.blocks, sums in one chunk and in several, 16-byte vectors and none.
SHAPES = (
    ((2, 48, 7, 7), torch.contiguous_format, torch.bfloat16),
    ((2, 32, 14, 14), torch.contiguous_format, torch.float32),
    ((2, 16, 72, 72), torch.contiguous_format, torch.bfloat16),
    ((2, 16, 18, 18), torch.channels_last, torch.float32),
    ((2, 32, 9, 9), torch.channels_last, torch.bfloat16),
    ((2, 80, 7, 7), torch.channels_last, torch.float16),
)


def squeeze_excites(device):
    for shape, memory_format, dtype in SHAPES:
        x = torch.ones(shape, device=device, dtype=dtype).to(memory_format=memory_format)
        y, saved = block(x)
    block(x, x.dtype)
    channel_scale.channel_scale_backward(y, x, saved[0], GELU, True, True)
    channel_pool.channel_pool_backward(saved[0], x, *saved[3:], channel_pool.AVG_MAX, GELU)


def global_response_norms(device):
    for shape, memory_format, dtype in SHAPES:
        x = torch.ones(shape, device=device, dtype=dtype).to(memory_format=memory_format)
        weight = x.new_ones(shape[1])
        y, norm = global_response_norm.global_response_norm(x, weight, weight, 1e-6, GELU)
        global_response_norm.global_response_norm_backward(y, x, weight, norm, 1e-6, GELU, True)


# Shape of x, multiplier, kernel, stride, padding (left, right, top, bottom), dilation, memory format, dtype.
CONVOLUTIONS = (
    ((2, 16, 10, 10), 1, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), torch.channels_last, torch.bfloat16),
    ((2, 32, 9, 9), 1, (5, 5), (2, 2), (1, 2, 1, 2), (1, 1), torch.channels_last, torch.bfloat16),
    ((1, 80, 5, 5), 1, (7, 7), (1, 1), (3, 3, 3, 3), (1, 1), torch.channels_last, torch.float32),
    ((1, 8, 2, 16), 1, (2, 31), (1, 1), (15, 15, 0, 1), (1, 1), torch.channels_last, torch.float16),
    ((2, 17, 7, 7), 1, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), torch.contiguous_format, torch.bfloat16),
    ((1, 3, 20, 20), 2, (4, 7), (2, 1), (0, 1, 2, 0), (1, 2), torch.contiguous_format, torch.float32),
)


def depthwise_conv2ds(device):
    for shape, m, kernel, stride, padding, dilation, memory_format, dtype in CONVOLUTIONS:
        x = torch.ones(shape, device=device, dtype=dtype).to(memory_format=memory_format)
        weight, bias = x.new_ones(shape[1] * m, 1, *kernel), x.new_ones(shape[1] * m)
        geometry = stride, padding, dilation
        y = depthwise_conv2d.depthwise_conv2d(x, weight, bias, *geometry, GELU)
        depthwise_conv2d.depthwise_conv2d_backward(y, x, weight, *geometry, True, True, True)


def batch_norm_acts(device):
    for shape, memory_format, dtype in SHAPES:
        x = torch.ones(shape, device=device, dtype=dtype).to(memory_format=memory_format)
        weight, bias = x.new_ones(shape[1]), x.new_ones(shape[1])
        mean, m2 = batch_norm_act.batch_norm_act_stats(x)
        rstd = batch_norm_act.batch_norm_act_update_(mean, m2, weight, bias, 98.0, 0.1, 1e-5)
        inputs = x, mean, rstd, weight, bias, x, GELU, False
        y = batch_norm_act.batch_norm_act(*inputs)
        sums = batch_norm_act.batch_norm_act_reduce(y, *inputs)
        batch_norm_act.batch_norm_act_backward(y, *inputs[:6], *sums, 98.0, *inputs[6:], True, True)
        batch_norm_act.batch_norm_act_fixed_backward(y, y, rstd, RELU, True)


def depthwise_bn_act_ses(device):
    for shape, memory_format, dtype in SHAPES[::3]:
        x = torch.ones(shape, device=device, dtype=dtype).to(memory_format=memory_format)
        c, r = shape[1], 8
        kernels, bias = x.new_ones(c, 1, 3, 3), x.new_ones(c)
        z, mean, m2 = depthwise_bn_act_se.depthwise_bn_act_se_conv(x, kernels, bias, (1, 1), (1, 1, 1, 1), (1, 1))
        w1, w2 = x.new_ones(r, c), x.new_ones(c, r)
        inputs, codes = (z, mean, m2, bias, bias), (GELU, GELU, SIGMOID)
        y, *small = depthwise_bn_act_se.depthwise_bn_act_se(*inputs, w1, x.new_ones(r), w2, bias, *codes)
        depthwise_bn_act_se.depthwise_bn_act_se(*inputs, w1, x.new_ones(r), w2, bias, *codes, y, True)
        sums = depthwise_bn_act_se.depthwise_bn_act_se_reduce(y, *inputs, w1, w2, *small, *codes, True)
        depthwise_bn_act_se.depthwise_bn_act_se_backward(y, *inputs, *sums[2:4], *sums[:2], 98.0, GELU)


# The rules that need the most registers and those with a pass of their own, with all that rides along; what is stored
# in fewer bits: dtype of the states, of what is kept beside the parameter, rounding.
STEPS = (
    ("amsgrad", torch.float32, None),
    ("adan", torch.bfloat16, None),
    ("lamb", torch.float32, None),
    ("novograd", torch.float16, None),
    ("adan", torch.float32, (torch.uint8, None, "nearest")),
    ("adan", torch.float16, (torch.uint8, torch.float32, "stochastic")),
    ("lamb", torch.bfloat16, (torch.bfloat16, torch.bfloat16, "kahan")),
)


def optimizer_steps(device):
    for rule, dtype, narrow in STEPS:
        states, coefficients, _, scalars = RULES[rule]
        shapes = (1000,), (3, 5), (8200,)
        stored, exact, rounding = narrow or (dtype, None, "nearest")
        of = [dtype, dtype, *[stored] * len(states)]
        lists = [[torch.ones(shape, device=device, dtype=kind) for shape in shapes] for kind in of]
        numbers = [[torch.ones((), device=device) for _ in shapes] for _ in scalars]
        columns = [t for column in (*lists[2:], *numbers) for t in column]
        steps = [torch.ones((), device=device) for _ in shapes]
        ema = [torch.ones(shape, device=device) for shape in shapes]
        norm, scale, found_inf = grad_norm.grad_norm(lists[1]), *(torch.ones((), device=device) for _ in range(2))
        options = _codes.RULES.index(rule), 0.1, 0.1, True, (0.5,) * len(coefficients), False, 0.9, True
        options += (norm, 1.0, True, scale, found_inf, None, None, False)
        if narrow:
            exacts = [torch.ones(shape, device=device, dtype=exact) for shape in shapes] if exact else []
            sizes = [_narrow.blocks(math.prod(shape)) for shape in shapes] * len(states)
            scales = [torch.ones(size, device=device) for size in sizes]
            options += (exacts, scales, _codes.ROUNDINGS.index(rounding), 7)
        optimizer_step.optimizer_step_(*lists[:2], columns, steps, ema, *options)


def ones(device):
    """Sizes of 1, which Triton makes constants of the kernel: those have no methods of a number."""
    for shape in ((1, 1, 1, 1), (1, 16, 1, 1), (2, 1, 3, 1)):
        x, weight = torch.ones(shape, device=device), torch.ones(shape[1], 1, 3, 3, device=device)
        block(x)
        batch_norm_act.batch_norm_act_stats(x)
        depthwise_conv2d.depthwise_conv2d(x, weight, None, (1, 1), (1, 1, 1, 1), (1, 1), GELU)
        depthwise_conv2d.depthwise_conv2d_backward(x, x, weight, (1, 1), (1, 1, 1, 1), (1, 1), True, True, True)
        depthwise_bn_act_se.depthwise_bn_act_se_conv(x, weight, None, (1, 1), (1, 1, 1, 1), (1, 1))


@triton.jit
def _off_by_one_kernel(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 1.0, mask=at <= n)


def off_by_one(device):
    x = torch.ones(1000, device=device)
    _off_by_one_kernel[(1,)](x, x.numel(), BLOCK=1024)


CASES = {
    "batch_norm_act": batch_norm_acts,
    "squeeze_excite": squeeze_excites,
    "depthwise_conv2d": depthwise_conv2ds,
    "depthwise_bn_act_se": depthwise_bn_act_ses,
    "global_response_norm": global_response_norms,
    "optimizer_step": optimizer_steps,
    "ones": ones,
    "off_by_one": off_by_one,
}


# --- compile ----------------------------------------------------------------------------------------------------------


class _Driver:
    """The driver of a GPU that is not there: enough for Triton to compile for it."""

    def __init__(self, target: GPUTarget):
        self.get_current_target = lambda: target
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0


def compiled_kernels(launches, target: GPUTarget) -> list:
    """The kernels that ``launches()`` would run on ``target``, with their constants and the bytes per element."""
    triton.runtime.driver.set_active(_Driver(target))
    kernels, run = {}, JITFunction.run

    @functools.wraps(run)
    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        constants = {name: value for name, value in kwargs.items() if name.isupper()}
        kernels[kernel.hash] = kernel, constants, args[0].element_size()
        return kernel

    JITFunction.run = compile_only
    launches()
    JITFunction.run = run
    return list(kernels.values())


def facts(kernel, target: GPUTarget) -> dict:
    """Stack and spills of a compiled kernel, for NVIDIA its registers and 16-byte loads too."""
    if target.backend == "hip":
        # Scalar registers are spilled to lanes of vector registers: where those end, they show in the stack.
        counts = {
            "stack": r"\.private_segment_fixed_size:\s*(\d+)",
            "spills": r"\.vgpr_spill_count:\s*(\d+)",
        }
        text = kernel.asm["amdgcn"]
        return {name: sum(map(int, re.findall(pattern, text))) for name, pattern in counts.items()}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        dump = [CUOBJDUMP, "--dump-resource-usage", cubin.name]
        usage = subprocess.run(dump, check=True, capture_output=True, text=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))
    # ptxas keeps the width of a vector; spilled registers live in the stack frame. So no slow disassembly is needed.
    wide = re.findall(r"\bld\.global\S*\.(?:v4\.b32|v2\.b64)\b|\bcp\.async\S*.*, 0x10,", kernel.asm["ptx"])
    return {"registers": registers, "stack": stack, "spills": local, "loads_of_16_bytes": len(wide)}


def target_of(name: str) -> GPUTarget:
    backend, arch = name.split(":")
    return GPUTarget("hip", arch, 64) if backend == "hip" else GPUTarget("cuda", int(arch), 32)


def compile_cases(target_name: str, *cases: str) -> None:
    target = target_of(target_name)
    for case in cases:
        for kernel, constants, itemsize in compiled_kernels(lambda run=CASES[case]: run("meta"), target):
            record = {"kernel": kernel.name, "constants": constants, "itemsize": itemsize}
            print(json.dumps(record | {"shared": kernel.metadata.shared} | facts(kernel, target)), flush=True)


class _Read(Exception):
    pass


def read_cases(target_name: str, *cases: str) -> None:
    target = target_of(target_name)
    kernels, run, backend = set(), JITFunction.run, type(make_backend(target))
    add_stages = backend.add_stages

    def add_none(self, stages, *options):
        """The first stage is what has been read: Triton's own language."""
        add_stages(self, stages, *options)

        def end(source, metadata):
            raise _Read

        stages.update(dict.fromkeys([*stages][1:], end))

    def read_only(self, *args, grid, warmup, **kwargs):
        with contextlib.suppress(_Read):  # not where it was compiled before
            run(self, *args, grid=grid, warmup=True, **kwargs)
        kernels.add(self.__name__)

    triton.runtime.driver.set_active(_Driver(target))
    with mock.patch.object(backend, "add_stages", add_none), mock.patch.object(JITFunction, "run", read_only):
        for case in cases:
            CASES[case]("meta")
    print(len(kernels))


# --- guard ------------------------------------------------------------------------------------------------------------

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def guarded(like: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape, strides and dtype of the dense ``like`` whose last byte is the last readable one."""
    size = like.numel() * like.element_size()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if _LIBC.mprotect(address + pages, mmap.PAGESIZE, 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    flat = torch.frombuffer(memory, dtype=torch.uint8)[pages - size : pages].view(like.dtype)
    return flat.as_strided(like.shape, like.stride())


class GuardedMemory(TorchDispatchMode):
    """Puts every new tensor, the kernels' outputs and workspaces included, in front of a protected page."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function._schema.name.startswith(("aten::empty", "aten::new_", "aten::ones", "aten::_to_copy")):
            return guarded(result).copy_(result) if result.numel() else result
        return result


def guard_cases(*cases: str) -> None:
    interpreter.as_compiled()
    for case in cases:
        print(case, flush=True)
        with GuardedMemory():
            CASES[case]("cpu")


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    {"compile": compile_cases, "read": read_cases, "guard": guard_cases}[command](*arguments)

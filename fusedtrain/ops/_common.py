"""What the ops share: argument checks, memory formats, and the reasons why a backend cannot run."""

import contextlib
import functools
import importlib.util
import operator
import os
import platform
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fusedtrain import _extension

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def is_less(size: int, bound: int) -> bool:
    """Whether a size is below a bound by which backends are chosen.

    Where a graph leaves the size open, a comparison would tie it to one side of the bound. A compiled graph, of any
    size, takes the backend of the size that it is made for first; of an exported one the answer is False.
    """
    if torch.compiler._is_exporting_flag:
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # pulls in much

        return statically_known_true(size < bound)
    if torch.compiler.is_dynamo_compiling() and not MIXES_UP_SYMBOLS:
        from torch.fx.experimental.symbolic_shapes import optimization_hint

        return optimization_hint(size) < optimization_hint(bound)
    return size < bound


# In graphs of torch 2.10 a symbol among the arguments of an autograd Function is taken for another one, silently; those
# of 2.13 are right.
MIXES_UP_SYMBOLS = torch.__version__ < (2, 13)


def is_open(number: float | Tensor) -> bool:
    """Whether a graph leaves open what follows from the sizes of images: a plain number would tie it to one size."""
    if isinstance(number, Tensor):  # as sizes are for torch.jit.trace
        return True
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value  # pulls in much

    return not has_static_value(number)


def acc_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of sums and of the small vectors: float32, float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


_ON_X86 = platform.machine() in ("x86_64", "AMD64")
# A constant, since torch.compile cannot trace the question.
_CPU_MULTIPLIES_FLOAT16 = not _ON_X86 or (
    hasattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported") and torch.ops.mkldnn._is_mkldnn_fp16_supported()
)


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether an x86 CPU has instructions that multiply a dtype. PyTorch's libraries take several times (AVX-512) to a
    hundred times (AVX2) as long over matrices and convolutions of one that it has none for."""
    if dtype == torch.float16:
        return _CPU_MULTIPLIES_FLOAT16
    return dtype != torch.bfloat16 or not _ON_X86 or has_bfloat16()


def has_bfloat16() -> bool:
    """Whether the kernels for this CPU multiply bfloat16 by its instructions."""
    return _extension.BUILD_INFO.get("isa_active", "").endswith("_bf16")


def zen() -> int | None:
    """4 or 5 where the kernels use AVX-512 on AMD's CPUs: in two halves up to Zen 4, whole from Zen 5 on. Else None."""
    cpu = _extension.BUILD_INFO
    if cpu.get("cpu_vendor") != "amd" or not cpu.get("isa_active", "").startswith("avx512"):
        return None
    return 5 if cpu.get("cpu_family", 0) >= 26 else 4


def check_images(op: str, x: Tensor) -> None:
    """Raises unless ``x`` is a floating-point [N, C, H, W] tensor of a supported dtype."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: x must be a Tensor, got {type(x).__name__}")
    if x.dim() != 4:
        raise ValueError(f"{op}: x must have shape [N, C, H, W], got {list(x.shape)}")
    if x.dtype not in DTYPES:
        raise TypeError(f"{op}: x must be float32, bfloat16, float16 or float64, got {x.dtype}")


def check_same_device(op: str, x: Tensor, **others: Tensor | None) -> None:
    """Raises when a tensor is not on the device of ``x``."""
    device = x.device
    for name, tensor in others.items():
        if tensor is not None and tensor.device != device:
            raise elsewhere(op, x, name, tensor)


def check_same_kind(op: str, x: Tensor, **others: Tensor | None) -> None:
    """Raises when a tensor does not have the dtype of ``x``, or is not on its device."""
    dtype, device = x.dtype, x.device
    for name, tensor in others.items():
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise TypeError(f"{op}: {name} must have the dtype of x ({dtype}), got {tensor.dtype}")
        if tensor.device != device:
            raise elsewhere(op, x, name, tensor)


def check_one_device(op: str, *lists: Sequence[Tensor]) -> None:
    """Raises unless all tensors are on one device; operators on lists would do nothing beside a meta tensor."""
    devices = {tensor.device for tensors in lists for tensor in tensors}
    if len(devices) > 1:
        raise RuntimeError(f"{op}: all tensors must be on one device, got {', '.join(sorted(map(str, devices)))}")


def elsewhere(op: str, x: Tensor, name: str, tensor: Tensor) -> RuntimeError:
    """Returns the error of a tensor that is not on the device of ``x``."""
    return RuntimeError(f"{op}: {name} is on {tensor.device}, but x is on {x.device}")


def check_pixels(op: str, x: Tensor, pool: str) -> None:
    """Raises when a maximum over no pixels is asked for; a mean over none is NaN, as in torch."""
    if pool == "avg_max" and x.shape[2] * x.shape[3] == 0:
        raise ValueError(f"{op}: pool='avg_max' needs at least one pixel, got x of shape {list(x.shape)}")


def is_channels_last(x: Tensor) -> bool:
    """True for channels_last memory; a tensor that is dense in both formats counts as contiguous."""
    return not x.is_contiguous() and x.dim() == 4 and _is_turned(x)


def _is_turned(x: Tensor) -> bool:
    """``x.is_contiguous(memory_format=torch.channels_last)``; what vmap has wrapped cannot be asked, and is not."""
    try:
        turned = x.is_contiguous(memory_format=torch.channels_last)
    except RuntimeError:
        if vmapped():
            return False
        raise
    if turned or not torch.compiler.is_compiling():
        return turned
    # Of images of any size that a graph of torch 2.10 has made it says no.
    _, c, h, w = x.shape
    return x.stride() == (h * w * c, 1, w * c, c)


def vmapped() -> bool:
    """Whether tensors may be such as vmap has wrapped, which know no other memory format than the contiguous one."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def format_of(x: Tensor) -> torch.memory_format:
    """Returns the memory format of a dense tensor."""
    return torch.channels_last if is_channels_last(x) else torch.contiguous_format


def is_dense(x: Tensor) -> bool:
    """True when the elements fill one stretch of memory, in whatever order of dimensions."""
    if x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):
        return True
    return torch.empty_like(x).stride() == x.stride()


def dense(x: Tensor) -> Tensor:
    """Returns ``x`` itself when it is dense in contiguous or channels_last format, else a copy that is.

    The copy takes channels_last when the channels of ``x`` are its fastest dimension.
    """
    if x.is_contiguous() or _is_turned(x):
        return x
    if x.stride(1) == 1 and x.size(1) > 1 and 0 not in x.stride() and not vmapped():
        return x.contiguous(memory_format=torch.channels_last)
    return x.contiguous()


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t.to(dtype)``, which takes longer to find that there is nothing to do."""
    return t if t.dtype == dtype else t.to(dtype)


def laid_out(t: Tensor, layout: torch.memory_format) -> Tensor:
    """``t.contiguous(memory_format=layout)`` for what an autograd Function returns: in compiled code torch 2.11 loses
    the gradient of the result of a call that has nothing to do. Not for backward, where that torch cannot ask."""
    if layout is torch.channels_last and vmapped():
        return t
    return t if t.is_contiguous(memory_format=layout) else t.contiguous(memory_format=layout)


def dense_like(dy: Tensor, x: Tensor) -> Tensor:
    """Returns ``dy`` in the dtype and memory format of the dense tensor ``x``."""
    return cast(dy, x.dtype).contiguous(memory_format=format_of(x))


def apart(t: Tensor, x: Tensor) -> Tensor:
    """``t``, as a view where it is ``x`` itself: torch.compile takes no tensor twice, and torch 2.11 would lose one of
    the two gradients."""
    return t.view_as(t) if t is x else t


def strided_like(dw: Tensor, w: Tensor) -> Tensor:
    """``dw``, laid out as ``w``, with its strides where a size of 1 leaves them open: DDP asks for the very same."""
    if dw.shape != w.shape or dw.stride() == w.stride():
        return dw
    same = all(size == 1 or own == its for size, own, its in zip(w.shape, dw.stride(), w.stride()))
    return dw.as_strided(w.shape, w.stride()) if same else dw  # else w has its dimensions in another order


def needed(ctx, *costly: int) -> tuple[bool, ...]:
    """``ctx.needs_input_grad`` without what this pass does not use: ``torch.autograd.grad`` and
    ``backward(inputs=...)`` name the gradients that are wanted, of which torch tells its own operators alone.

    ``costly``: which gradients take passes of their own. No other is asked for: the answer is an exception, of 20 us,
    where ``torch.autograd.grad`` wants a leaf.
    """
    needs = ctx.needs_input_grad
    if torch.compiler.is_compiling() or needs.count(True) < 2:
        return needs
    nodes = [node for node, _ in ctx.next_functions if node is not None]  # of those that require a gradient, in order
    unused = [i for i in costly if needs[i] and not _is_used(nodes[needs[:i].count(True)])]
    return tuple(need and i not in unused for i, need in enumerate(needs)) if unused else needs


def _is_used(node) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a leaf that torch.autograd.grad is asked for; outside of a backward pass
        return True


def wanted(gradients: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """Those of ``gradients`` that are needed, and None in the place of the others."""
    return [gradient if need else None for gradient, need in zip(gradients, needed)]


def autocast_apart(x: Tensor, *weights: Tensor | None) -> tuple[Tensor | None, ...]:
    """:func:`autocast`, but that autograd learns of the cast of ``x`` alone: for Functions that take the weights as
    they are, and cast their gradients."""
    if not torch._C._is_any_autocast_enabled():
        return x, *weights
    (x,) = autocast(x)
    with torch.no_grad():
        return x, *autocast(x, *weights)[1:]


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Casts as autocast does for convolutions: float32, bfloat16 and float16 to the autocast dtype."""
    if not torch._C._is_any_autocast_enabled():
        return tensors
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t if t is None or t.dtype == torch.float64 or not t.is_floating_point() else t.to(dtype) for t in tensors
    )


def is_autocast(x: Tensor) -> bool:
    """Whether autocast counts for ``x``."""
    return torch._C._is_any_autocast_enabled() and isinstance(x, Tensor) and torch.is_autocast_enabled(x.device.type)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype that :func:`autocast` gives ``x``, on a CPU."""
    if not torch.is_autocast_enabled("cpu") or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype("cpu")


def whole(value) -> int | None:
    """``value`` as an int, also where it is an integer of numpy; None for what is no integer."""
    if isinstance(value, int):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return None


def pair(op: str, name: str, value: int | tuple[int, int], least: int) -> list[int]:
    """Returns an option as [height, width]; ValueError unless it is an int or a pair of ints >= ``least``."""
    if isinstance(value, tuple) and len(value) == 2:  # as of layers: calls cost what small images wait for
        h, w = value
        if isinstance(h, int) and isinstance(w, int) and h >= least <= w:
            return [h, w]
    # An int is not asked for a length: torch.compile cannot ask those that it holds symbols for.
    both = value if not isinstance(value, int) and hasattr(value, "__len__") else (value, value)
    if len(both) == 2:
        h, w = map(whole, both)
        if h is not None and w is not None and h >= least and w >= least:
            return [h, w]
    raise ValueError(f"{op}: {name} must be an int or a pair of ints >= {least}, got {value!r}")


def batched(x: Tensor) -> Tensor:
    """One image as a batch of one."""
    return x[None] if isinstance(x, Tensor) and x.dim() == 3 else x


def in_format_of(y: Tensor, x: Tensor) -> Tensor:
    """Returns dense ``y`` as channels_last where the strides of ``x`` are, one channel or one pixel included, as in
    torch."""
    if not y.is_contiguous():
        return y
    n_stride, *strides = x.stride()
    _, c, h, w = x.shape
    if strides == [1, w * c, c] and n_stride == h * w * c != 1 and not vmapped():
        return to_channels_last(y)
    return y


def to_channels_last(t: Tensor) -> Tensor:
    """``t`` as channels_last, of one channel or pixel, too, whose strides ``contiguous()`` leaves as they are."""
    (_, c, h, w), t = t.shape, t.contiguous(memory_format=torch.channels_last)
    strides = (h * w * c, 1, w * c, c)
    return t if t.stride() == strides else t.as_strided(t.shape, strides)


def owned(y: Tensor) -> Tensor:
    """Returns ``y`` as what an autograd Function may return: nobody can write to a view that it makes, such as the
    permuted tensor that a channels_last one is in the bindings, or what torch makes of a result for a subclass."""
    if torch.compiler.is_compiling() or not y._is_view():
        return y
    kind = type(y)
    if kind is Tensor or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return y.detach()
    return Tensor._make_subclass(kind, y)  # its own detach() makes a view again


_PLAIN = (Tensor, torch.nn.Parameter)


class _NoGrad:
    """``torch.no_grad()`` in a third of the time: calls cost what small images wait for."""

    __slots__ = ("_before",)

    def __enter__(self):
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *exc_info):
        torch._C._set_grad_enabled(self._before)


def no_grad():
    """``torch.no_grad()``, but nothing where torch.export traces, which cannot save such a region with sizes in it:
    what is computed from is to be detached there."""
    if not torch.compiler.is_compiling():
        return _NoGrad()
    return contextlib.nullcontext() if torch.compiler._is_exporting_flag else torch.no_grad()


def apply(function: type[torch.autograd.Function], *inputs):
    """``function.apply(*inputs)``, in fewer calls where nothing traces."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*inputs)
    # Tensors that have outlived a transform of torch.func are unwrapped there, too.
    return record(function, *[torch._C._functorch.unwrap_if_dead(t) if type(t) is Tensor else t for t in inputs])


def record(function: type[torch.autograd.Function], *inputs):
    """:func:`apply` for a call of :func:`plain` tensors."""
    return super(torch.autograd.Function, function).apply(*inputs)


def unwatched() -> bool:
    """Outside of compiled code: true when nobody watches which operators run."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def untraced(x: Tensor) -> bool:
    """True when nobody watches which operators a call on ``x`` runs: several may then be called as one."""
    return not torch.compiler.is_compiling() and type(x) in _PLAIN and unwatched()


def plain(x: Tensor, *others: Tensor | None) -> bool:
    """:func:`untraced`, and no tensor has outlived a transform of torch.func."""
    return untraced(x) and not any(map(torch._C._functorch.is_functorch_wrapped_tensor, (x, *filter(_given, others))))


def _given(t: Tensor | None) -> bool:
    return t is not None


def needs_autograd(*tensors: Tensor | None) -> bool:
    """True when the autograd Function must record; under export and torch.jit.trace the raw operator stands in the
    graph, which has no gradient.

    Raises:
        RuntimeError: derivatives are asked for that the operators lack, and would be taken for 0.
    """
    if torch.compiler.is_compiling():
        # Not is_exporting(): torch 2.11 takes it for True in every compiled graph, and all gradients would be lost.
        return records(*tensors) and not torch.compiler._is_exporting_flag
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        _refuse_transforms(tensors)
    return records(*tensors) and not torch._C._is_tracing()


def records(*tensors: Tensor | None) -> bool:
    """True when gradients are recorded for one of the tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


_ELSEWHERE = "have it: use fusedtrain.use_backend('reference'), or fusedtrain.unfuse(model)"


def _refuse_transforms(tensors: tuple[Tensor | None, ...]) -> None:
    levels = torch._C._functorch.get_interpreter_stack() or ()
    functional = any(level.key() != torch._C._functorch.TransformType.Vmap for level in levels)
    if functional or any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(f"fused ops have no forward-mode and torch.func derivatives; PyTorch's {_ELSEWHERE}")
    if levels and torch.is_grad_enabled() and any(map(_requires_grad, tensors)):
        raise RuntimeError(f"fused ops have no gradient under torch.func.vmap; PyTorch's {_ELSEWHERE}")


def _requires_grad(t: Tensor | None) -> bool:
    """Whether a tensor requires a gradient, or what vmap has wrapped: the wrapper does not tell."""
    while t is not None and not t.requires_grad and torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t is not None and t.requires_grad


class _Once(torch.autograd.Function):
    """Gradients, and what they were computed from."""

    @staticmethod
    def forward(ctx, gradients: tuple[Tensor | None, ...], *inputs: Tensor):
        return gradients if len(gradients) > 1 else gradients[0]

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(f"fused ops have no second derivative; PyTorch's {_ELSEWHERE}")


class _Unpacked:
    """A context whose saved tensors are asked for once: activation checkpointing has them for one look only."""

    def __init__(self, ctx):
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str):
        return getattr(self._ctx, name)


def once_differentiable(backward: Callable) -> Callable:
    """Decorator of the backward of an autograd Function, whose own backward raises.

    Torch's own lets second derivatives count as 0 where ``torch.autograd.grad`` is told its inputs, or the incoming
    gradient is a constant, as in gradient penalties.
    """

    def recorded(ctx, dys: tuple[Tensor | None, ...]):
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return backward(ctx, *dys)
        ctx = _Unpacked(ctx)
        with torch.no_grad():
            gradients = once(ctx, *dys)
        inputs = [t for t in (*dys, *ctx.saved_tensors) if t is not None and t.requires_grad]
        return _Once.apply(gradients, *inputs) if inputs else gradients

    @functools.wraps(backward)
    def once(ctx, *dys):
        if torch.is_grad_enabled():
            return recorded(ctx, dys)
        try:
            return backward(ctx, *dys)
        except RuntimeError as error:  # of what torch cannot run for one dy of a batch after another
            if not any(dy is not None and torch._C._functorch.is_legacy_batchedtensor(dy) for dy in dys):
                raise
            raise RuntimeError(f"fused ops have no gradient of a batch here; PyTorch's {_ELSEWHERE}") from error

    return once


def why_not_cpu(x: Tensor, *_) -> str | None:
    if not x.is_cpu:
        return f"x is on {x.device}, not on the CPU"
    return None if _extension.LOADED else _extension.WHY_NOT


# Formatting a device costs microseconds, and these two are asked for in every call on a CPU.
_CPU_NOT_CUDA = "x is on cpu, not on a CUDA device"
_CPU_NOT_TRITON = "x is on cpu; Triton kernels run on GPUs (or anywhere with TRITON_INTERPRET=1)"


def why_not_cuda(x: Tensor, *_) -> str | None:
    if not x.is_cuda:
        return _CPU_NOT_CUDA if x.is_cpu else f"x is on {x.device}, not on a CUDA device"
    if not _extension.LOADED:
        return _extension.WHY_NOT
    if not _extension.HAS_CUDA_KERNELS:
        return "this build has no CUDA kernels (no nvcc when it was built)"
    return why_not_gpu(x.get_device())


_LONG_ARGUMENTS = (12, 1)  # CUDA, from which on a kernel's take more than 4 KiB: core/cuda_lists.h


def why_not_cuda_lists(*tensors: Tensor) -> str | None:
    """For ops on lists, which travel as arguments: those of a toolkit that has long ones need a driver that has."""
    reason, driver = why_not_cuda(tensors[0]), _extension.CUDA_OF_DRIVER
    if reason is not None or driver is None or _version_of(driver) >= _LONG_ARGUMENTS:
        return reason
    built = _extension.BUILD_INFO["cuda_version"]
    if tuple(map(int, built.split("."))) < _LONG_ARGUMENTS:
        return None
    return f"arguments of more than 4 KiB need a driver of CUDA 12.1, and this one runs up to {_text_of(driver)}"


_GPUS: dict[int, str | None] = {}


def why_not_gpu(index: int) -> str | None:
    """Why the CUDA kernels of this build cannot run on that GPU, or None, also where only fake tensors are on one."""
    if index not in _GPUS and torch.cuda.is_available():
        _GPUS[index] = _why_not_driver() or _why_not_arch(index)
    return _GPUS.get(index)


def _why_not_driver() -> str | None:
    """CUDA's runtime comes with the kernels. A driver runs one of its own major version, or an older one."""
    built, driver = _extension.BUILD_INFO["cuda_version"], _extension.CUDA_OF_DRIVER
    if driver is None or int(built.split(".")[0]) <= _version_of(driver)[0]:
        return None
    runs = _text_of(driver)
    return f"this build has CUDA kernels of CUDA {built}, and the driver runs up to {runs}: build it with that nvcc"


def _version_of(driver: int) -> tuple[int, int]:
    return driver // 1000, driver % 1000 // 10


def _text_of(driver: int) -> str:
    return ".".join(map(str, _version_of(driver)))


def _why_not_arch(index: int) -> str | None:
    archs, (major, minor) = _extension.BUILD_INFO["cuda_archs"], torch.cuda.get_device_capability(index)
    if any(_runs_on(arch, (major, minor)) for arch in archs):
        return None
    return (
        f"this build has CUDA kernels for {', '.join(archs)}, and cuda:{index} has compute capability {major}.{minor}:"
        f" build it with TORCH_CUDA_ARCH_LIST={major}.{minor}"
    )


why_not_gpu._dynamo_marked_constant = True  # as torch.compiler.assume_constant_result does, without importing dynamo


def _runs_on(arch: str, gpu: tuple[int, int]) -> bool:
    """Whether kernels for ``arch``, an entry of TORCH_CUDA_ARCH_LIST, run on a GPU of that capability."""
    number, ptx, _ = arch.partition("+PTX")
    own = tuple(int(part) for part in number.rstrip("af").split("."))
    if number.endswith("a"):  # of that architecture alone; "f": of its family
        return own == gpu
    return own <= gpu and (own[0] == gpu[0] or (bool(ptx) and not number.endswith("f")))


_HAS_TRITON = importlib.util.find_spec("triton") is not None


def why_not_triton(x: Tensor, *_) -> str | None:
    if not _HAS_TRITON:
        return "triton is not installed"
    if x.is_cuda or (x.is_cpu and triton_interpreted()):
        if x.dtype == torch.float64:
            return "the Triton kernels have no float64"
        return why_not_triton_on(x.get_device()) if x.is_cuda else None
    return _CPU_NOT_TRITON if x.is_cpu else _CPU_NOT_TRITON.replace("cpu", str(x.device))


_TRITONS_GPUS: dict[int, str | None] = {}


def why_not_triton_on(index: int) -> str | None:
    """Why Triton compiles nothing for that GPU, or None, also where only fake tensors are on one."""
    if index not in _TRITONS_GPUS and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(index)
        old = f"Triton needs compute capability 7.0, and cuda:{index} has {major}.{minor}"
        _TRITONS_GPUS[index] = None if major >= 7 else old
    return _TRITONS_GPUS.get(index)


why_not_triton_on._dynamo_marked_constant = True  # as why_not_gpu


def why_not_triton_lists(*tensors: Tensor) -> str | None:
    """For ops on lists: the first tensor decides but for the dtype."""
    reason = why_not_triton(tensors[0])
    if reason is None and any(t.dtype == torch.float64 for t in tensors):
        return "the Triton kernels have no float64"
    return reason


def triton_interpreted() -> bool:
    """True when Triton kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_slower(x: Tensor, *_) -> str | None:
    """The interpreter is for tests: it runs where it is forced, and is never chosen."""
    return "Triton's interpreter is slower than any other backend" if x.is_cpu else None


def is_forward_alone_on_zen4(x: Tensor, *others: Tensor | None) -> bool:
    """Whether x is float32 on Zen 4 and no gradient is recorded: there the stock forms of ops that read images once are
    faster forward from the caches, and slower backward (benchmarks/LOG.md, 2026-11-29)."""
    return x.dtype == torch.float32 and zen() == 4 and not records(x, *others)


def never_why_not(*_) -> None:
    """The reference runs anywhere."""
    return None

r"""depthwise_conv2d: every channel convolved with its own kernels.

.. math::
    y_{n,cm+j,o,p} = b_{cm+j} + \sum_{k,l} w_{cm+j,k,l}\,
    x_{n,\,c,\;o s + k d - \mathrm{top},\; p s + l d - \mathrm{left}}
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fusedtrain import _extension
from fusedtrain.backend import Impl, register, select
from fusedtrain.ops import _activation, _codes, _common, _schema, _windows
from fusedtrain.ops._remembered import remembered


def reference(x, weight, bias, stride: list[int], padding: list[int], dilation: list[int], act: int) -> Tensor:
    y = _windows.stock_forward(x, weight, bias, stride, padding, dilation, x.shape[1])
    return _activation.REFERENCE[_codes.ACTIVATIONS[act]](y)


def reference_backward(dy, x, weight, stride, padding, dilation, need_dx, need_dw, need_db):
    need = [need_dx, need_dw, need_db]
    return _windows.stock_backward(dy, x, weight, stride, padding, dilation, x.shape[1], need)


@_schema.register_fake("depthwise_conv2d")
def _fake(x, weight, bias, stride, padding, dilation, act):
    image = _windows.output_size(x.shape[2:], weight.shape[2:], stride, padding, dilation)
    shape = (x.shape[0], weight.shape[0], *image)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_common.format_of(x))


@_schema.register_fake("depthwise_conv2d_backward")
def _fake_backward(dy, x, weight, stride, padding, dilation, need_dx, need_dw, need_db):
    dx = torch.empty_like(x) if need_dx else x.new_empty(0)
    return dx, weight.new_empty(weight.shape if need_dw else (0,)), weight.new_empty(weight.shape[0] if need_db else 0)


class _Where(NamedTuple):
    """Where stock PyTorch is the faster one: rows of y below so many columns, or from so many on; in rows of at least
    so many, x up to so many MiB, from so many channels on, and with channels that fill no whole vectors, x up to so
    many MiB, and fewer than so many channels."""

    columns: int = 0
    mib: float = 0
    ragged_mib: float = 0
    ragged_channels: int = 0
    least: int = 0
    many_channels: int = 0
    wide: int = 0

    def reason(self, x: Tensor, stride: int) -> str | None:
        columns, ragged = -(-x.shape[3] // stride), x.shape[1] * x.element_size() % _VECTOR_BYTES > 0
        if _common.is_less(columns, self.columns):
            return f"rows of y below {self.columns} columns"
        if self.wide and not _common.is_less(columns, self.wide):
            return f"rows of y from {self.wide} columns on"
        if self.least and _common.is_less(columns, self.least):
            return None
        if self._holds(x, self.mib):
            return f"x up to {self.mib} MiB"
        if self.many_channels and not _common.is_less(x.shape[1], self.many_channels):
            return f"{self.many_channels} channels and more, rows of y from {self.least} columns on"
        if ragged and self._holds(x, self.ragged_mib):
            return f"channels that fill no whole vectors, x up to {self.ragged_mib} MiB"
        if ragged and _common.is_less(x.shape[1], self.ragged_channels):
            return f"fewer than {self.ragged_channels} channels, which fill no whole vectors"
        return None

    @staticmethod
    def _holds(x: Tensor, mib: float) -> bool:
        """Whether x has up to so many MiB."""
        return mib == float("inf") or _common.is_less(x.numel() * x.element_size(), int(mib * 2**20) + 1)


# (layout, dtype, stride) -> {kernel: where oneDNN was measured faster}, after the rows "cpu" and "eager" of
# benchmarks/results/amd-epyc-family-26-avx512/depthwise_conv2d.csv, contiguous images after the
# last table of them in benchmarks/LOG.md: those below four columns are not transposed, and waste lanes. Ragged channels
# cross lines, and were not stored past the caches when these were measured, but on Zen 4.
# Kernels that are not square, and other sizes up to those listed, go to stock at any size of x from _SMALL on. Larger
# kernels, multipliers and dilation never do: stock bfloat16 convolutions with 31x31 kernels may not return, and stock
# float32 gradients with a multiplier corrupt the heap.
_VECTOR_BYTES = 64
_SMALL = 200_000  # elements of x: up to here stock's calls cost more than what its kernels may gain
_ALWAYS, _NEVER = _Where(mib=float("inf")), _Where()
_NARROW, _RAGGED = _Where(columns=4), _Where(ragged_mib=float("inf"))
_STOCK_FASTER = {
    "forward": {
        ("contiguous", torch.float32, 1): {3: _NARROW, 5: _NARROW, 7: _NARROW},
        ("contiguous", torch.float32, 2): {3: _NARROW, 5: _NARROW},
        ("contiguous", torch.bfloat16, 1): {3: _NARROW, 5: _NARROW, 7: _NARROW},
        ("contiguous", torch.bfloat16, 2): {3: _NARROW, 5: _NARROW},
        ("channels_last", torch.float32, 1): {3: _Where(ragged_mib=14), 5: _NEVER},
        ("channels_last", torch.float32, 2): {3: _Where(mib=50), 5: _ALWAYS},
        ("channels_last", torch.bfloat16, 1): {3: _RAGGED, 5: _RAGGED, 7: _RAGGED},
        ("channels_last", torch.bfloat16, 2): {3: _Where(mib=6), 5: _ALWAYS},
    },
    "backward": {
        ("contiguous", torch.float32, 1): {3: _NARROW},
        ("contiguous", torch.bfloat16, 1): {3: _NARROW},
        ("channels_last", torch.float32, 1): {3: _NEVER},
        ("channels_last", torch.float32, 2): {3: _NEVER},
        ("channels_last", torch.bfloat16, 1): {3: _NEVER},
    },
}
# What differs where one of these is the instruction set in use (benchmarks/LOG.md, 2026-11-22), on Zen 4
# (benchmarks/results/amd-epyc-family-25-avx512; bfloat16 at stride 1: benchmarks/LOG.md, 2026-11-26, ragged channels)
# and on Zen 5 since it loads both vectors of a group at once (benchmarks/LOG.md, 2026-11-25), and on Intel's that take
# whole pixels (benchmarks/results/intel-r-xeon-r-processor-2-50ghz-family-6-avx512; with AMX: benchmarks/LOG.md,
# 2026-11-29); with AVX2 on Zen 3 (2026-11-30). Without instructions for bfloat16 oneDNN takes several times as long
# over it, without AVX-512 up to a hundred times.
_STOCK_FASTER_ON = {
    4: {
        "forward": {
            ("channels_last", torch.float32, 1): {3: _NEVER, 5: _NEVER},
            ("channels_last", torch.float32, 2): {3: _NEVER, 5: _NEVER},
            ("channels_last", torch.bfloat16, 1): {
                3: _Where(ragged_mib=8, ragged_channels=129, least=33),
                **dict.fromkeys((5, 7), _NEVER),
            },
            ("channels_last", torch.bfloat16, 2): {3: _NEVER, 5: _NEVER},
        },
    },
    5: {
        "forward": {
            ("channels_last", torch.float32, 1): {3: _Where(ragged_mib=14, least=15), 5: _NEVER},
            ("channels_last", torch.float32, 2): {3: _Where(mib=50, least=14), 5: _Where(columns=28)},
            ("channels_last", torch.bfloat16, 1): {
                3: _RAGGED._replace(least=15),
                **dict.fromkeys((5, 7), _RAGGED._replace(least=29)),
            },
            ("channels_last", torch.bfloat16, 2): {
                3: _RAGGED._replace(least=15),
                5: _RAGGED._replace(least=14),
            },
        },
    },
    "avx512": {
        "forward": {("channels_last", torch.bfloat16, stride): {} for stride in (1, 2)},
        "backward": {("channels_last", torch.bfloat16, 1): {}},
    },
    ("intel", "avx512"): {
        "forward": {
            ("channels_last", torch.float32, 1): {
                3: _Where(ragged_channels=25, least=8, many_channels=1600),
                5: _Where(least=8, many_channels=900),
            },
            ("channels_last", torch.float32, 2): {3: _NEVER, 5: _Where(least=8, many_channels=900)},
        },
    },
    ("intel", "amx_bf16"): {
        "forward": {
            ("channels_last", torch.float32, 1): {3: _NEVER, 5: _NEVER, 7: _Where(wide=56)},
            ("channels_last", torch.float32, 2): {3: _Where(wide=56), 5: _Where(wide=32)},
            ("channels_last", torch.bfloat16, 1): {3: _Where(mib=25), 5: _Where(mib=10), 7: _NEVER},
            ("channels_last", torch.bfloat16, 2): {3: _NEVER, 5: _NEVER},
        },
    },
    "avx2": {
        "forward": {
            ("channels_last", torch.float32, 1): {3: _NEVER, 5: _NEVER},
            ("channels_last", torch.float32, 2): {3: _Where(mib=9.5, wide=56), 5: _NEVER},
            **{(layout, torch.bfloat16, stride): {} for layout in ("contiguous", "channels_last") for stride in (1, 2)},
        },
        "backward": {(layout, torch.bfloat16, 1): {} for layout in ("contiguous", "channels_last")},
    },
}


def _stock_faster(direction: str, key: tuple) -> dict[int, _Where]:
    """The row of the vendor's CPUs with the instruction set, of all with it, of Zen 4 or 5, else of all. No cache:
    torch.compile warns of those."""
    isa = _extension.BUILD_INFO.get("isa_active")
    for cpu in ((_extension.BUILD_INFO.get("cpu_vendor"), isa), isa, _common.zen()):
        row = _STOCK_FASTER_ON.get(cpu, {}).get(direction, {}).get(key)
        if row is not None:
            return row
    return _STOCK_FASTER[direction].get(key, {})


def _is_tiny(x: Tensor, weight: Tensor, *geometry) -> bool:
    """Whether x and y have so few pixels that csrc/cpu/depthwise_tiny.h takes them, where that was measured: stock
    convolutions take up to a hundred times as long over some of them, and only a little less over others."""
    if _extension.BUILD_INFO.get("isa_active") != "avx2" or not _common.is_less(x.shape[2] * x.shape[3], 17):
        return False
    ho, wo = _windows.output_size(x.shape[2:], weight.shape[2:], *geometry)
    return _common.is_less(ho * wo, 17)


def _slower(direction: str):
    def slower(x, weight=None, bias=None, stride=(1, 1), padding=(0, 0, 0, 0), dilation=(1, 1)) -> str | None:
        if weight is None or weight.shape[0] != x.shape[1] or max(dilation) > 1:
            return None
        if _common.is_less(x.numel(), _SMALL + 1):
            return None
        layout = "channels_last" if _common.is_channels_last(x) else "contiguous"
        if layout == "contiguous" and _is_tiny(x, weight, stride, padding, dilation):
            return None
        rows = _stock_faster(direction, (layout, x.dtype, max(stride)))
        kh, kw = weight.shape[2:]
        if max(kh, kw) > max(rows, default=0):
            return None
        # The kernels for the usual shapes: csrc/cpu/depthwise_conv2d_direct.cpp takes at least a vector of channels.
        enough = layout == "contiguous" or x.shape[1] * x.element_size() >= _VECTOR_BYTES
        usual = kh == kw and kh in rows and stride[0] == stride[1] and enough
        where = rows[kh].reason(x, stride[0]) if usual else "unusual shapes"
        if where is None:
            return None
        return f"stock PyTorch was measured faster: {direction}, {layout}, {x.dtype}, {kh}x{kw} kernels, {where}"

    return slower


def _has_planes(x: Tensor, weight: Tensor, stride) -> bool:
    """Whether csrc/cuda/depthwise_planes.h takes contiguous images of this shape, faster than cuDNN in any case."""
    kh, kw = weight.shape[2:]
    return kh == kw in (3, 5, 7) and stride[0] == stride[1] <= (2 if kh < 7 else 1) and _common.is_less(x.shape[3], 513)


def _slower_cuda(direction: str):
    """Where cuDNN was measured faster than the CUDA kernels on an H200 (benchmarks/LOG.md, 2026-11-26)."""

    def slower(x, weight=None, bias=None, stride=(1, 1), padding=None, dilation=(1, 1)) -> str | None:
        if weight is None or weight.shape[0] != x.shape[1] or max(dilation) > 1 or x.dtype == torch.float64:
            return None
        k, where = max(weight.shape[2:]), None
        if _common.is_channels_last(x):  # csrc/cuda/depthwise_patches.h takes channels in vectors of 16 bytes
            if k <= 5 and x.shape[1] * x.element_size() % 16:
                where = "channels that fill no whole vectors"
            elif direction == "forward" and k == 3 and max(stride) == 2 and x.dtype == torch.float32:
                where = "float32, stride 2"
        elif direction == "forward" and k <= 5 and not _has_planes(x, weight, stride):
            if max(stride) > 1:
                where = "contiguous, stride 2"
            elif k == 5 and x.element_size() == 2:
                where = f"contiguous, {x.dtype}"
            elif k == 3 and _common.is_less(x.shape[3], 28):
                where = "contiguous, rows below 28 columns"
        return where and f"cuDNN was measured faster: {direction}, {where}, {k}x{k} kernels"

    return slower


def _slower_triton(x, weight=None, *args) -> str | None:
    """Where cuDNN was measured faster than the Triton kernels on an H200 (benchmarks/LOG.md, 2026-11-26)."""
    if weight is None or not x.is_cuda:
        return _common.triton_slower(x)
    k, channels_last = max(weight.shape[2:]), _common.is_channels_last(x)
    if k > 7 if channels_last else k <= 3:
        return None
    return f"cuDNN was measured faster: {'channels_last' if channels_last else 'contiguous'}, {k}x{k} kernels"


def _asked(x, weight, stride, padding, dilation, bias=None, **_) -> tuple:
    x, weight, bias = _common.autocast(_common.batched(x), weight, bias)
    return x, weight, bias, *_geometry(x, weight, stride, padding, dilation)[0]


_OP, _BACKWARD = torch.ops.fusedtrain.depthwise_conv2d, torch.ops.fusedtrain.depthwise_conv2d_backward
IMPLS = register(
    "depthwise_conv2d",
    {
        "cuda": Impl(_OP.default, _BACKWARD.default, _common.why_not_cuda, _slower_cuda("forward")),
        "cpu": Impl(_OP.default, _BACKWARD.default, _common.why_not_cpu, _slower("forward")),
        "triton": Impl(_OP.triton, _BACKWARD.triton, _common.why_not_triton, _slower_triton),
        "reference": Impl(reference, None, _common.never_why_not),
    },
    _asked,
)
# The backward pass chooses for itself: where stock PyTorch is the faster one is measured in each direction.
BACKWARD_IMPLS = register(
    "depthwise_conv2d_backward",
    {
        "cuda": Impl(_BACKWARD.default, None, _common.why_not_cuda, _slower_cuda("backward")),
        "cpu": Impl(_BACKWARD.default, None, _common.why_not_cpu, _slower("backward")),
        "triton": Impl(_BACKWARD.triton, None, _common.why_not_triton, _slower_triton),
        "reference": Impl(reference_backward, None, _common.never_why_not),
    },
    _asked,
)


@remembered
def choose(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: list[int]) -> tuple[Callable, Callable]:
    """The implementations of both directions."""
    forward = select("depthwise_conv2d", IMPLS, x, weight, bias, *geometry).forward
    return forward, select("depthwise_conv2d_backward", BACKWARD_IMPLS, x, weight, bias, *geometry).forward


class _DepthwiseConv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, geometry, forward, backward):
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.backward_op = geometry, backward
        return _common.owned(forward(x, weight, bias, *geometry, 0))

    @staticmethod
    @_common.once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        need = _common.needed(ctx, 0, 1, 2)[:3]
        grads = ctx.backward_op(_common.dense_like(dy, x), x, weight, *ctx.geometry, *need)
        return *_common.wanted(grads, need), None, None, None


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int | None = None) -> None:
    c, shape = x.shape[1], weight.shape
    if groups is not None and groups != c:  # compiled code does not find a symbolic c by `in`
        raise ValueError(f"depthwise_conv2d: x must have {groups} channels, got shape {list(x.shape)}")
    if len(shape) != 4 or shape[1] != 1 or c == 0 or shape[0] % c or 0 in shape:
        raise ValueError(
            f"depthwise_conv2d: weight must have shape [{c} * m, 1, kh, kw] for x of shape {list(x.shape)},"
            f" got {list(shape)}"
        )
    if bias is not None and bias.shape != shape[:1]:
        raise ValueError(f"depthwise_conv2d: bias must have shape [{shape[0]}] or be None, got {list(bias.shape)}")
    _common.check_same_kind("depthwise_conv2d", x, weight=weight, bias=bias)


def _geometry(x: Tensor, weight: Tensor, stride, padding, dilation) -> tuple[tuple[list[int], ...], tuple[int, int]]:
    return _windows.geometry("depthwise_conv2d", x, weight, stride, padding, dilation)


def depthwise_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | tuple[int, int, int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    *,
    act: str = "identity",
    groups: int | None = None,
) -> Tensor:
    r"""Convolves every channel with its own kernels: ``F.conv2d(x, weight, bias, ..., groups=C)``, trained faster.

    .. math:: y_{n,cm+j} = b_{cm+j} + w_{cm+j} \star x_{n,c}, \quad j < m

    Args:
        x: images ``[N, C, H, W]`` or one image ``[C, H, W]``; contiguous and channels_last run natively, other strides
            are copied first; float32, bfloat16, float16 or float64.
        weight: kernels ``[C * m, 1, kh, kw]``, any channel multiplier m, in the dtype of ``x``.
        bias: ``[C * m]``, or None.
        stride: of the output positions, one int or (height, width).
        padding: zeros around x: an int, (height, width), "valid", "same" (stride 1), or the asymmetric
            (left, right, top, bottom) of TensorFlow's "same" with stride 2.
        dilation: distance of the kernel's taps, one int or (height, width).
        act: activation on the output: "identity", "relu", "silu", "gelu", "hard_swish" or "relu6". Fused where no
            gradient is recorded; otherwise a separate op.
        groups: C, as for ``F.conv2d``, to be compared with that of ``x``; None: any.

    Returns:
        ``[N, C * m, Ho, Wo]`` in the dtype and memory format of ``x``; under autocast in its dtype. For backward x and
        weight are kept.

    Raises:
        ValueError: a shape does not fit, the kernel is larger than the padded image, or a name is unknown.
        TypeError: a dtype is not supported, or differs from that of ``x`` outside autocast.
        RuntimeError: a forced backend cannot run, or tensors are on different devices.

    Cost: forward reads x and writes y once; backward reads x and dy once for all gradients asked for, writes dx once.
    Asymmetric padding costs nothing. Stock PyTorch runs where it was measured faster, see
    ``fusedtrain.explain("depthwise_conv2d", x, weight, ...)``.
    Numerics: sums in float32 (float64 for float64), one rounding at the end; deterministic, and independent of
    threads where a kernel of this package runs.
    Source: Sifre, Rigid-Motion Scattering for Image Classification, 2014; Chollet, https://arxiv.org/abs/1610.02357
    """
    if isinstance(x, Tensor) and x.dim() == 3:
        return depthwise_conv2d(x[None], weight, bias, stride, padding, dilation, act=act, groups=groups)[0]
    if torch._C._is_any_autocast_enabled():
        _common.check_images("depthwise_conv2d", x)
        x, weight, bias = _common.autocast(x, weight, bias)
    x, padding = _windows.padded_first(x, padding)
    options = stride, padding, dilation, act, groups
    geometry, act_code, forward, backward, recording, plain = _plan(x, weight, bias, *options)
    if forward is reference and not recording:
        return reference(x, weight, bias, *geometry, act_code)
    x, weight, bias = _common.dense(x), weight.contiguous(), None if bias is None else bias.contiguous()
    if not recording:
        return _common.in_format_of(forward(x, weight, bias, *geometry, act_code), x)
    apply = _common.record if plain else _common.apply
    y = _common.in_format_of(apply(_DepthwiseConv2d, x, weight, bias, geometry, forward, backward), x)
    return _activation.REFERENCE[act](y) if act_code else y


@remembered
def _plan(x, weight, bias, stride, padding, dilation, act, groups) -> tuple:
    """Checks the arguments of the op, which autocast has cast. Returns stride, padding and dilation, the activation's
    code, what runs forward and backward, whether gradients are recorded, and of plain tensors."""
    _common.check_images("depthwise_conv2d", x)
    _check(x, weight, bias, groups)
    code = _codes.code("act", act, _codes.INPUT_ACTIVATIONS)
    geometry, _ = _geometry(x, weight, stride, padding, dilation)
    forward, backward = choose(x, weight, bias, *geometry)
    if not _common.records(x, weight, bias):
        backward = reference_backward
    stock = forward is reference and backward is reference_backward
    recording = not stock and _common.needs_autograd(x, weight, bias)
    plain = recording and _common.plain(x, weight, bias)
    return geometry, code, forward, backward, recording, plain

r"""grouped_conv2d: a convolution whose channels stand in groups, each with kernels of its own.

.. math::
    y_{n,gO+o,p,q} = b_{gO+o} + \sum_{i,k,l} w_{gO+o,i,k,l}\,
    x_{n,\,gI+i,\;p s + k d - \mathrm{top},\; q s + l d - \mathrm{left}}
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fusedtrain import _extension
from fusedtrain.backend import Impl, register, runs_whole, select
from fusedtrain.ops import _common, _schema
from fusedtrain.ops._remembered import remembered
from fusedtrain.ops._windows import geometry, output_size, stock_forward
from fusedtrain.ops._windows import stock_backward as reference_backward


def reference(x, weight, bias, stride: list[int], padding: list[int], dilation: list[int], groups: int) -> Tensor:
    return stock_forward(x, weight, bias, stride, padding, dilation, groups)


def _empty(x: Tensor, channels: int, h: int, w: int) -> Tensor:
    shape = (x.shape[0], channels, h, w)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


@_schema.register_fake("grouped_conv2d")
def _fake(x, weight, bias, stride, padding, dilation, groups):
    return _empty(x, weight.shape[0], *output_size(x.shape[2:], weight.shape[2:], stride, padding, dilation))


@_schema.register_fake("grouped_conv2d_dx")
def _fake_dx(dy, weight, h, w, stride, padding, dilation, groups):
    return _empty(dy, groups * weight.shape[1], h, w)


@_schema.register_fake("grouped_conv2d_dw")
def _fake_dw(dy, x, weight, stride, padding, dilation, groups):
    return torch.empty_like(weight)


_OP = torch.ops.fusedtrain.grouped_conv2d.default
_DX, _DW = torch.ops.fusedtrain.grouped_conv2d_dx.default, torch.ops.fusedtrain.grouped_conv2d_dw.default


class _Where(NamedTuple):
    """Where the kernel was measured faster than stock PyTorch: columns of y at least, without and with a stride, and
    channels of a group, in multiples of some."""

    columns: int
    strided: int
    most: int
    multiple: int = 16
    least: int = 1

    def holds_for(self, columns: int, strided: bool, width: int) -> bool:
        enough = not _common.is_less(columns, self.strided if strided else self.columns)
        return enough and self.least <= width <= self.most and width % self.multiple == 0


_PARTS = ("forward", "dx", "dw")
_FULL = _Where(columns=7, strided=7, most=64, multiple=8, least=24)
# By the CPU (Zen 4 or 5, or its vendor), its instruction set and the dtype (benchmarks/LOG.md, 2026-11-24 to 29);
# one of several is enough. Without instructions for bfloat16 oneDNN takes 3 to 24 times as long.
_ON_AVX2 = (_Where(columns=7, strided=7, most=32, multiple=8),)
_NARROW = _Where(columns=7, strided=7, most=8, multiple=4, least=4)
_NEVER = 1 << 30  # columns
_PAIRS, _TWELVE = (_Where(columns=7, strided=7, most=width, multiple=width) for width in (2, 12))
_FASTER = {
    (4, "avx512_bf16", torch.float32): {
        "forward": (_Where(columns=28, strided=14, most=32),),
        "dx": (_Where(columns=28, strided=14, most=64),),
        "dw": (_Where(columns=28, strided=7, most=64),),
    },
    (4, "avx512_bf16", torch.bfloat16): {
        "forward": (_Where(columns=28, strided=28, most=64),),
        "dx": (_Where(columns=28, strided=14, most=64),),
        "dw": (_Where(columns=7, strided=7, most=64, multiple=4),),
    },
    (5, "avx512_bf16", torch.float32): {
        "forward": (_Where(columns=28, strided=28, most=16), _FULL),
        "dx": (_Where(columns=7, strided=28, most=16), _FULL),
        "dw": (_Where(columns=7, strided=7, most=64, multiple=8),),
    },
    (5, "avx512_bf16", torch.bfloat16): {
        "forward": (_Where(columns=7, strided=7, most=16), _FULL),
        "dx": (_Where(columns=7, strided=7, most=16), _FULL),
        "dw": (_Where(columns=7, strided=7, most=64, multiple=4),),
    },
    ("amd", "avx2", torch.float32): dict.fromkeys(_PARTS, _ON_AVX2),
    ("amd", "avx2", torch.bfloat16): dict.fromkeys(_PARTS, _ON_AVX2),
    ("intel", "avx512", torch.float32): {
        "forward": (_Where(columns=14, strided=14, most=16),),
        "dx": (_Where(columns=28, strided=14, most=16), _Where(columns=14, strided=7, most=32, multiple=8, least=24)),
        "dw": (_Where(columns=14, strided=7, most=48, multiple=4),),
    },
    ("intel", "avx512", torch.bfloat16): dict.fromkeys(_PARTS, (_Where(columns=7, strided=7, most=48, multiple=4),)),
    ("intel", "amx_bf16", torch.float32): {
        "forward": (
            _PAIRS,
            _TWELVE,
            _Where(columns=7, strided=7, most=32, multiple=8, least=24),
            _Where(columns=_NEVER, strided=28, most=8, multiple=4, least=4),
            _Where(columns=_NEVER, strided=7, most=16, multiple=16),
        ),
        "dx": (
            _TWELVE,
            _Where(columns=28, strided=28, most=16, multiple=16),
            _Where(columns=7, strided=7, most=32, multiple=8, least=24),
            _Where(columns=_NEVER, strided=7, most=64, multiple=4, least=20),
            _Where(columns=_NEVER, strided=14, most=4, multiple=4),
        ),
        "dw": (
            _Where(columns=_NEVER, strided=28, most=2, multiple=2),
            _Where(columns=_NEVER, strided=7, most=8, multiple=4),
            _Where(columns=56, strided=28, most=64, multiple=4),
            _Where(columns=_NEVER, strided=7, most=64, multiple=4, least=20),
        ),
    },
    ("intel", "amx_bf16", torch.bfloat16): {  # stock multiplies by tiles
        "forward": (_Where(columns=56, strided=7, most=2, multiple=2),),
        "dx": (
            _Where(columns=_NEVER, strided=7, most=2, multiple=2),
            _Where(columns=_NEVER, strided=7, most=16, multiple=4, least=12),
        ),
        "dw": (
            _Where(columns=7, strided=7, most=2, multiple=2),
            _Where(columns=56, strided=7, most=8, multiple=4),
        ),
    },
    ("intel", "avx2", torch.float32): {
        "forward": (_NARROW,),
        "dx": (_NARROW, _Where(columns=_NEVER, strided=7, most=20, multiple=4, least=12)),
        "dw": (_NARROW._replace(most=64),),
    },
    ("intel", "avx2", torch.bfloat16): dict.fromkeys(_PARTS, (_NARROW._replace(most=64),)),
}
# Where that is so for contiguous images too, copies included (benchmarks/LOG.md, 2026-11-28).
_CONTIGUOUS_TOO = {("intel", isa, torch.bfloat16) for isa in ("avx512", "avx2")}
# Contiguous images: where the channels of a group fill no whole vectors, oneDNN takes 1.1 to 3.6 times as long over the
# gradient of bfloat16 weights as the kernel, copies included (benchmarks/LOG.md, 2026-11-25).
_RAGGED = 16
# Bytes: float32 pixels a multiple of them apart share sets of L1, and the strided gradient of the weight is slower than
# stock (benchmarks/LOG.md, 2026-11-24), but not on Zen 5.
_SHARED = 2048
_SMALL = 200_000  # elements: up to here the calls cost more than what the kernels may gain
_SMALL_ON_ZEN5 = {torch.bfloat16: 20_000}  # where calls of oneDNN cost more, too (benchmarks/LOG.md, 2026-11-25)


def _faster_parts(x: Tensor, weight: Tensor, stride: list[int]) -> tuple[str, ...]:
    """Which of the parts were measured faster here than in stock PyTorch, for 3x3 kernels."""
    cpu, columns = _extension.BUILD_INFO, -(-x.shape[3] // stride[1])
    here = _common.zen() or cpu.get("cpu_vendor"), cpu.get("isa_active"), x.dtype
    table = _FASTER.get(here, {})
    width = max(weight.shape[1], weight.shape[0] * weight.shape[1] // x.shape[1])
    strided = max(stride) > 1
    parts = [part for part, wheres in table.items() if any(w.holds_for(columns, strided, width) for w in wheres)]
    if not _common.is_channels_last(x) and here not in _CONTIGUOUS_TOO:
        ragged = x.dtype == torch.bfloat16 and _common.has_bfloat16() and width % _RAGGED
        parts = [part for part in parts if part == "dw" and ragged]
    shared = strided and x.dtype == torch.float32 and x.shape[1] * x.element_size() % _SHARED == 0
    return tuple(part for part in parts if part != "dw" or not shared or _common.zen() == 5)


def _slower(x: Tensor, weight: Tensor, bias=None, stride=(1, 1), padding=None, dilation=(1, 1), groups=None):
    small = _SMALL_ON_ZEN5.get(x.dtype, _SMALL) if _common.zen() == 5 else _SMALL
    if _common.is_less(x.numel(), small):
        return f"fewer than {small:,} elements: stock calls cost less"
    if tuple(weight.shape[2:]) != (3, 3) or max(dilation) > 1:
        return "stock PyTorch runs what was not measured: kernels other than 3x3"
    if not _faster_parts(x, weight, stride):
        return (
            "stock PyTorch was measured faster, or nothing was measured: this CPU, dtype, layout, width of a group,"
            " stride and size of the images"
        )
    return None


def _channels_last(t: Tensor) -> Tensor:
    if _common.vmapped():
        return t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    return t.contiguous(memory_format=torch.channels_last)  # of a weight: the kernel's fast way to read it


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, parts: tuple[str, ...], *geometry) -> Tensor:
    if "forward" not in parts:
        return reference(x, weight, bias, *geometry)
    y = _OP(_channels_last(x), _channels_last(weight), bias, *geometry)
    return _common.laid_out(y, _common.format_of(x))


def _backward(dy, x, weight, parts, *geometry, need) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    by_kernel = ["dx" in parts, "dw" in parts]
    by_stock = [needed and not kernel for needed, kernel in zip(need, by_kernel)]
    dx, dw = reference_backward(dy, x, weight, *geometry, [*by_stock, False])[:2] if any(by_stock) else (None, None)
    if need[0] and by_kernel[0]:
        dx = _common.dense_like(_DX(_channels_last(dy), _channels_last(weight), *x.shape[2:], *geometry), x)
    if need[1] and by_kernel[1]:
        dw = _common.strided_like(_DW(_channels_last(dy), _channels_last(x), weight, *geometry), weight)
    return None if dx is None else _common.in_format_of(dx, x), dw, dy.sum((0, 2, 3)) if need[2] else None


def _asked(x, weight, stride, padding, dilation, groups, bias=None) -> tuple:
    x, weight, bias = _common.autocast(_common.batched(x), weight, bias)
    return x, weight, bias, *geometry("grouped_conv2d", x, weight, stride, padding, dilation)[0], groups


# On a GPU cuDNN runs this: every backend there is stock PyTorch.
IMPLS = register(
    "grouped_conv2d",
    {
        "cuda": Impl(reference, None, _common.why_not_cuda),
        "cpu": Impl(_forward, _backward, _common.why_not_cpu, _slower),
        "triton": Impl(reference, None, _common.why_not_triton, _common.triton_slower),
        "reference": Impl(reference, None, _common.never_why_not),
    },
    _asked,
)


@remembered
def _choose(x: Tensor, weight: Tensor, bias: Tensor | None, *window: list[int]) -> tuple[str, ...] | None:
    """The parts that the kernels run; None: all of it is stock PyTorch's."""
    args = x, weight, bias, *window, x.shape[1] // weight.shape[1]
    impl = select("grouped_conv2d", IMPLS, *args)
    if impl.backward is None:
        return None
    return _PARTS if runs_whole(impl, *args) else _faster_parts(x, weight, window[0])


class _GroupedConv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, parts, *geometry):
        ctx.save_for_backward(x, weight)
        ctx.options = parts, *geometry
        return _common.owned(_forward(x, weight, bias, parts, *geometry))

    @staticmethod
    @_common.once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy = _common.dense_like(dy, x)
        return *_backward(dy, x, weight, *ctx.options, need=_common.needed(ctx, 0, 1, 2)[:3]), *(None,) * 5


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> None:
    if _common.whole(groups) is None or groups < 1 or x.shape[1] % groups or x.shape[1] == 0:
        raise ValueError(f"grouped_conv2d: groups must divide the {x.shape[1]} channels of x, got {groups!r}")
    if not isinstance(weight, Tensor) or weight.dim() != 4 or weight.shape[1] != x.shape[1] // groups:
        got = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(
            f"grouped_conv2d: weight must have shape [D, C / groups, kh, kw] = [D, {x.shape[1] // groups}, kh, kw],"
            f" got {got}"
        )
    if weight.shape[0] % groups or 0 in weight.shape:
        raise ValueError(
            f"grouped_conv2d: groups must divide the output channels, got {groups} and weight {list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"grouped_conv2d: bias must have shape [{weight.shape[0]}] or be None, got {list(bias.shape)}")
    _common.check_same_kind("grouped_conv2d", x, weight=weight, bias=bias)


def grouped_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | tuple[int, int, int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> Tensor:
    r"""Convolves groups of channels with kernels of their own: ``F.conv2d(..., groups=G)``, trained faster on CPUs.

    .. math:: y_{n,gO+o} = b_{gO+o} + \sum_{i<I} w_{gO+o,i} \star x_{n,gI+i}

    Args:
        x: images ``[N, C, H, W]`` or one image ``[C, H, W]``; channels_last runs natively, contiguous images by stock
            PyTorch but for some gradients of weights, and bfloat16 where Intel's CPUs have no instructions for it;
            float32, bfloat16, float16 or float64.
        weight: kernels ``[D, I, kh, kw]`` with I = C / G, in the dtype of ``x``; G divides D, too.
        bias: ``[D]``, or None.
        stride: of the output positions, one int or (height, width).
        padding: zeros around x: an int, (height, width), "valid", "same" (stride 1), or (left, right, top, bottom).
        dilation: distance of the kernel's taps, one int or (height, width).
        groups: G.

    Returns:
        ``[N, D, Ho, Wo]`` in the dtype and memory format of ``x``; under autocast in its dtype. For backward x and
        weight are kept.

    Raises:
        ValueError: a shape does not fit, or the kernel is larger than the padded image.
        TypeError: a dtype is not supported, or differs from that of ``x`` outside autocast.
        RuntimeError: a forced backend cannot run, or tensors are on different devices.

    Cost: the products of ``F.conv2d``. Forward and both gradients each read their images once, through copies of
        bands of rows that stay in the caches. Stock PyTorch runs, direction by direction, where it was measured
        faster and no backend is forced, and on GPUs; see ``fusedtrain.explain("grouped_conv2d", x, weight, ...)``.
    Numerics: sums in float32 (float64 for float64), one rounding at the end; deterministic, and independent
        of threads where a kernel of this package runs.
    Source: Krizhevsky et al., 2012; Xie et al., ResNeXt, https://arxiv.org/abs/1611.05431
    """
    if isinstance(x, Tensor) and x.dim() == 3:
        return grouped_conv2d(x[None], weight, bias, stride, padding, dilation, groups)[0]
    _common.check_images("grouped_conv2d", x)
    x, weight, bias = _common.autocast(x, weight, bias)
    _check(x, weight, bias, groups)
    groups = _common.whole(groups)
    window, _ = geometry("grouped_conv2d", x, weight, stride, padding, dilation)
    parts = _choose(x, weight, bias, *window)
    if parts is None:
        return reference(x, weight, bias, *window, groups)
    x = _common.dense(x)
    recording, inputs = _common.needs_autograd(x, weight, bias), (x, weight, bias, parts, *window, groups)
    y = _common.apply(_GroupedConv2d, *inputs) if recording else _forward(*inputs)
    return _common.in_format_of(y, x)

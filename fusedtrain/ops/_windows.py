"""Convolutions with a window: their geometry, and stock PyTorch's with padding on each side."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtrain.ops import _common


def padded_first(x: Tensor, padding) -> tuple[Tensor, object]:
    """Returns x and ``padding``; x padded, and 0, where a graph for images of any size would be tied to those that ask
    for as many zeros."""
    if not isinstance(padding, tuple) or len(padding) != 4:
        return x, padding
    tied = _common.MIXES_UP_SYMBOLS or torch.compiler._is_exporting_flag or torch.jit.is_tracing()
    return (F.pad(x, padding), 0) if tied and any(map(_common.is_open, padding)) else (x, padding)


def output_size(image, kernel, stride, padding, dilation) -> tuple[int, int]:
    """Returns height and width of the output, of an image of these two; below 1 where the kernel does not fit."""
    (h, w), (kh, kw), (left, right, top, bottom) = image, kernel, padding
    ho = (h + top + bottom - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    wo = (w + left + right - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    return ho, wo


class _Stock(NamedTuple):
    """What stock convolutions are given: x, padded first where that is needed, ``rest`` of the padding, the stride, and
    how many columns at the right were left out."""

    x: Tensor
    rest: tuple[int, int]
    stride: list[int]
    spare: int = 0


def _for_stock(x: Tensor, weight: Tensor, padding: list[int], stride: list[int], dilation: list[int]) -> _Stock:
    """Asymmetric padding comes first. In bfloat16 oneDNN takes for padding what stood in memory: the gradient
    of the weight does so of images narrower than the stride, and y of one column where tiles multiply (AMX). So such
    images are padded first, and of what makes one column nothing else is given, which needs no stride."""
    left, right, top, bottom = padding
    if x.device.type == "cpu" and x.dtype == torch.bfloat16 and stride[1] > 1:
        spare = x.shape[3] + left + right - dilation[1] * (weight.shape[3] - 1) - 1
        if _is_certain(spare, stride[1]):
            return _Stock(F.pad(x, [left, right - spare, top, bottom]), (0, 0), [stride[0], 1], spare)
        if _is_certain(x.shape[3], stride[1]):
            return _Stock(F.pad(x, padding), (0, 0), stride)
    if left == right and top == bottom:
        return _Stock(x, (top, left), stride)
    return _Stock(F.pad(x, padding), (0, 0), stride)


def _is_certain(size: int, bound: int) -> bool:
    """Whether a size is below a bound. Unlike where backends are chosen a compiled graph must hold for that."""
    return _common.is_less(size, bound) if torch.compiler._is_exporting_flag else size < bound


_VECTOR = 16  # channels


def _garbles(x: Tensor, weight: Tensor, stride, dilation, groups: int) -> bool:
    """Whether oneDNN's gradient of the weight would hold what happened to stand in memory: of channels_last bfloat16
    images, where the rows of the kernel lie apart and the channels of a group fill no whole vectors."""
    apart = groups > 1 and dilation[0] > 1 and stride[0] == 1 and weight.shape[1] % _VECTOR != 0
    if not apart or x.device.type != "cpu" or x.dtype != torch.bfloat16:
        return False
    return _looks_channels_last(x) or _looks_channels_last(weight)


def _looks_channels_last(t: Tensor) -> bool:
    return t.stride(1) <= t.stride(3)  # to ATen, which counts images of one channel and parts of images in


def _contiguous(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)  # contiguous() keeps odd strides of sizes of 1


def stock_forward(x, weight, bias, stride, padding, dilation, groups: int) -> Tensor:
    padded, rest, steps, _ = _for_stock(x, weight, padding, stride, dilation)
    steps, dilation = tuple(steps), tuple(dilation)  # as layers give them: those who count FLOPs ask for tuples
    if not _garbles(x, weight, stride, dilation, groups):
        return F.conv2d(padded, weight, bias, steps, rest, dilation, groups)
    y = F.conv2d(_contiguous(padded), _contiguous(weight), bias, steps, rest, dilation, groups)
    return _common.laid_out(y, torch.channels_last) if _looks_channels_last(x) else y


def stock_backward(dy, x, weight, stride, padding, dilation, groups: int, need) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dw and db, those of them that ``need`` asks for."""
    padded, rest, steps, spare = _for_stock(x, weight, padding, stride, dilation)
    inputs = dy, padded, weight
    garbles = _garbles(x, weight, stride, dilation, groups)
    if garbles:
        inputs = [_contiguous(t) for t in inputs]
    dx, dw, db = torch.ops.aten.convolution_backward(
        *inputs, [weight.shape[0]], steps, rest, dilation, False, [0, 0], groups, need
    )
    left, right, top, bottom = padding
    dx = F.pad(dx, [-left, spare - right, -top, -bottom]) if need[0] and padded is not x else dx
    if garbles:
        dx = _common.dense_like(dx, x) if need[0] else dx
        dw = dw.contiguous(memory_format=_common.format_of(weight)) if need[1] else dw
    return dx, dw, db


def _sides(op: str, padding, kernel: tuple[int, int], stride: list[int], dilation: list[int]) -> list[int]:
    """Returns ``padding`` as (left, right, top, bottom)."""
    if padding == "valid":
        return [0, 0, 0, 0]
    if padding == "same":
        if stride != [1, 1]:
            raise ValueError(f"{op}: padding='same' needs stride 1, got {stride}")
        total_h, total_w = (d * (k - 1) for k, d in zip(kernel, dilation))
        return [total_w // 2, total_w - total_w // 2, total_h // 2, total_h - total_h // 2]
    if isinstance(padding, str):
        raise ValueError(f"{op}: padding must be 'same', 'valid' or numbers, got {padding!r}")
    if not isinstance(padding, int) and hasattr(padding, "__len__") and len(padding) == 4:
        sides = [p if isinstance(p, torch.SymInt) else _common.whole(p) for p in padding]
        if not all(p is not None and p >= 0 for p in sides):
            raise ValueError(f"{op}: padding must not be negative, got {padding!r}")
        return sides
    h, w = _common.pair(op, "padding", padding, 0)
    return [w, w, h, h]


def geometry(
    op: str, x: Tensor, weight: Tensor, stride, padding, dilation
) -> tuple[tuple[list[int], ...], tuple[int, int]]:
    """Returns stride, padding and dilation as the operators take them, and the height and width of the output."""
    image, kernel = x.shape[2:], weight.shape[2:]
    stride = _common.pair(op, "stride", stride, 1)
    dilation = _common.pair(op, "dilation", dilation, 1)
    sides = _sides(op, padding, kernel, stride, dilation)
    ho, wo = output_size(image, kernel, stride, sides, dilation)
    if ho < 1 or wo < 1 or (0 in image and x.shape[0]):  # as for stock, no images may have no pixels
        raise ValueError(
            f"{op}: kernel {list(kernel)} with dilation {dilation} does not fit into x of shape"
            f" {list(x.shape)} padded by {sides} (left, right, top, bottom)"
        )
    return (stride, sides, dilation), (ho, wo)

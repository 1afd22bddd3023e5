"""batch_norm_act in Triton.

xhat = (x - mean) rstd        z = weight xhat + bias + before        y = a(z) + after        dz = a'(z) dy
dx = weight rstd (dz - sum_dz / count - xhat sum_dz_xhat / count)

Sums run over [chunks, samples] parts that are added in float64, in a fixed order; squares are taken about the mean of
each tile, so that a large mean cancels nothing (csrc/batch_norm_act.h).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedtrain.kernels import _activation, _images

FINISH_BLOCK = 32  # channels of a program that finishes sums
FINISH_PARTS = 64  # parts that it adds at a time


@triton.jit
def moments(x, mask, count, first, shift, total, squares):
    """Adds a tile of ``count`` pixels to sums about ``shift``, which the ``first`` sets; x is 0 outside the mask."""
    mean = tl.sum(x, axis=1) / count
    d = tl.where(mask, x - mean[:, None], 0.0)
    shift = tl.where(first, mean, shift)
    step, rest = mean - shift, tl.sum(d, axis=1)
    total += rest + count * step
    squares += tl.sum(d * d, axis=1) + step * (2.0 * rest + count * step)
    return shift, total, squares


@triton.jit
def batch_norm_act_stats_kernel(
    x_ptr,  # images
    shift_ptr,  # [parts, c]: near the mean
    total_ptr,  # [parts, c]: sum (x - shift)
    squares_ptr,  # [parts, c]: sum (x - shift)^2
    planes,
    c,
    hw,
    chunks,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HW: tl.constexpr,
    VEC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    begin, end, sample, channels, chunk = _images.program(c, hw, chunks, CHUNK, BLOCK_C, CHANNELS_LAST, WIDE)
    inside = channels < c
    shift = tl.zeros([BLOCK_C], tl.float32)
    total = tl.zeros([BLOCK_C], tl.float32)
    squares = tl.zeros([BLOCK_C], tl.float32)
    for start in range(begin, end, BLOCK_HW):
        offsets, mask = _images.tile(start, sample, channels, c, hw, BLOCK_HW, VEC, CHANNELS_LAST)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        count = tl.minimum(end - start, BLOCK_HW).to(tl.float32)
        shift, total, squares = moments(x, mask, count, start == begin, shift, total, squares)
    part = chunk * planes + sample * c + channels
    tl.store(shift_ptr + part, shift, mask=inside)
    tl.store(total_ptr + part, total, mask=inside)
    tl.store(squares_ptr + part, squares, mask=inside)


@triton.jit
def batch_norm_act_stats_finish_kernel(
    shift_ptr,  # [chunks, samples, c]
    total_ptr,  # [chunks, samples, c]
    squares_ptr,  # [chunks, samples, c]
    mean_ptr,  # [c]
    m2_ptr,  # [c]
    samples,
    c,
    hw,
    chunks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < c
    base = tl.load(shift_ptr + channels, mask=inside, other=0.0).to(tl.float64)
    total = tl.zeros([PARTS, BLOCK], tl.float64)
    squares = tl.zeros([PARTS, BLOCK], tl.float64)
    for first in range(0, chunks * samples, PARTS):
        part = first + tl.arange(0, PARTS)
        mask = (part < chunks * samples)[:, None] & inside[None, :]
        at = part.to(tl.int64)[:, None] * c + channels[None, :]
        count = tl.minimum(hw - part // samples * CHUNK, CHUNK).to(tl.float64)[:, None]
        step = tl.load(shift_ptr + at, mask=mask, other=0.0).to(tl.float64) - base[None, :]
        step = tl.where(mask, step, 0.0)
        rest = tl.load(total_ptr + at, mask=mask, other=0.0).to(tl.float64)
        total += rest + count * step
        squares += tl.load(squares_ptr + at, mask=mask, other=0.0).to(tl.float64) + step * (2.0 * rest + count * step)
    moved = tl.sum(total, axis=0) / (tl.cast(samples, tl.float64) * hw)  # integers of 1 are constants
    m2 = tl.sum(squares, axis=0) - tl.sum(total, axis=0) * moved
    tl.store(mean_ptr + channels, (base + moved).to(tl.float32), mask=inside)
    tl.store(m2_ptr + channels, tl.where(m2 < 0.0, 0.0, m2).to(tl.float32), mask=inside)


@triton.jit
def batch_norm_act_update_kernel(
    mean_ptr,  # [c]
    m2_ptr,  # [c]
    running_mean_ptr,  # [c], with MEAN
    running_var_ptr,  # [c], with VAR
    rstd_ptr,  # [c]
    c,
    per_count,
    per_sample,
    momentum,
    eps,
    MEAN: tl.constexpr,
    VAR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < c
    m2 = tl.load(m2_ptr + channels, mask=inside, other=0.0)
    tl.store(rstd_ptr + channels, 1.0 / tl.sqrt(m2 * per_count + eps), mask=inside)
    if MEAN:
        old = tl.load(running_mean_ptr + channels, mask=inside, other=0.0).to(tl.float32)
        new = momentum * tl.load(mean_ptr + channels, mask=inside, other=0.0) + (1.0 - momentum) * old
        tl.store(running_mean_ptr + channels, new.to(running_mean_ptr.dtype.element_ty), mask=inside)
    if VAR:
        old = tl.load(running_var_ptr + channels, mask=inside, other=0.0).to(tl.float32)
        new = momentum * (m2 * per_sample) + (1.0 - momentum) * old
        tl.store(running_var_ptr + channels, new.to(running_var_ptr.dtype.element_ty), mask=inside)


@triton.jit
def affine(mean_ptr, rstd_ptr, weight_ptr, bias_ptr, at, inside, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    """mean, rstd, weight and bias of a program's channels, as columns."""
    mean = tl.load(mean_ptr + at, mask=inside, other=0.0)[:, None]
    rstd = tl.load(rstd_ptr + at, mask=inside, other=0.0)[:, None]
    weight = tl.full(rstd.shape, 1.0, tl.float32)
    bias = tl.zeros(rstd.shape, tl.float32)
    if WEIGHT:
        weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)[:, None]
    if BIAS:
        bias = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)[:, None]
    return mean, rstd, weight, bias


@triton.jit
def normalised(x_ptr, before_ptr, offsets, mask, mean, rstd, weight, bias, BEFORE: tl.constexpr):
    """xhat and z of a tile."""
    xhat = (tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
    z = weight * xhat + bias
    if BEFORE:
        z += tl.load(before_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    return xhat, z


@triton.jit
def batch_norm_act_kernel(
    x_ptr,  # images
    mean_ptr,  # [features]
    rstd_ptr,  # [features]
    weight_ptr,  # [features], with WEIGHT
    bias_ptr,  # [features], with BIAS
    residual_ptr,  # images, with BEFORE or AFTER
    gate_ptr,  # [planes], before GATE, with GATE
    y_ptr,  # images
    features,
    c,
    hw,
    chunks,
    ACT: tl.constexpr,
    GATE: tl.constexpr,  # None, or the activation of what scales y
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    LAST: tl.constexpr,  # the activation behind the sum, with AFTER
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HW: tl.constexpr,
    VEC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    begin, _, sample, channels, _ = _images.program(c, hw, chunks, CHUNK, BLOCK_C, CHANNELS_LAST, WIDE)
    at, inside = channels % features, channels < c
    mean, rstd, weight, bias = affine(mean_ptr, rstd_ptr, weight_ptr, bias_ptr, at, inside, WEIGHT, BIAS)
    offsets, mask = _images.tile(begin, sample, channels, c, hw, BLOCK_HW, VEC, CHANNELS_LAST)
    _, z = normalised(x_ptr, residual_ptr, offsets, mask, mean, rstd, weight, bias, BEFORE)
    y = _activation.value(z, ACT)
    if GATE is not None:
        gate = tl.load(gate_ptr + sample * c + channels, mask=inside, other=0.0)
        y *= _activation.value(gate, GATE)[:, None]
    if AFTER:
        y = _activation.value(y + tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32), LAST)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def batch_norm_act_reduce_kernel(
    dy_ptr,  # images
    x_ptr,  # images
    mean_ptr,  # [features]
    rstd_ptr,  # [features]
    weight_ptr,  # [features], with WEIGHT
    bias_ptr,  # [features], with BIAS
    residual_ptr,  # images, with BEFORE
    sum_dz_ptr,  # [parts, features]
    sum_dz_xhat_ptr,  # [parts, features]
    planes,
    features,
    c,
    hw,
    chunks,
    ACT: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    BEFORE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HW: tl.constexpr,
    VEC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    begin, end, sample, channels, chunk = _images.program(c, hw, chunks, CHUNK, BLOCK_C, CHANNELS_LAST, WIDE)
    at, inside = channels % features, channels < c
    mean, rstd, weight, bias = affine(mean_ptr, rstd_ptr, weight_ptr, bias_ptr, at, inside, WEIGHT, BIAS)
    total = tl.zeros([BLOCK_C, BLOCK_HW], tl.float32)
    total_xhat = tl.zeros([BLOCK_C, BLOCK_HW], tl.float32)
    for start in range(begin, end, BLOCK_HW):
        offsets, mask = _images.tile(start, sample, channels, c, hw, BLOCK_HW, VEC, CHANNELS_LAST)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        xhat, z = normalised(x_ptr, residual_ptr, offsets, mask, mean, rstd, weight, bias, BEFORE)
        dz = tl.where(mask, _activation.gradient(dy, z, ACT), 0.0)
        total += dz
        total_xhat += tl.where(mask, dz * xhat, 0.0)
    part = chunk * planes + sample * c + channels
    tl.store(sum_dz_ptr + part, tl.sum(total, axis=1), mask=inside)
    tl.store(sum_dz_xhat_ptr + part, tl.sum(total_xhat, axis=1), mask=inside)


@triton.jit
def batch_norm_act_reduce_finish_kernel(
    part_dz_ptr,  # [parts, c]
    part_dz_xhat_ptr,  # [parts, c]
    sum_dz_ptr,  # [c]
    sum_dz_xhat_ptr,  # [c]
    c,
    parts,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < c
    total = tl.zeros([PARTS, BLOCK], tl.float64)
    total_xhat = tl.zeros([PARTS, BLOCK], tl.float64)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        mask = (part < parts)[:, None] & inside[None, :]
        at = part.to(tl.int64)[:, None] * c + channels[None, :]
        total += tl.load(part_dz_ptr + at, mask=mask, other=0.0).to(tl.float64)
        total_xhat += tl.load(part_dz_xhat_ptr + at, mask=mask, other=0.0).to(tl.float64)
    tl.store(sum_dz_ptr + channels, tl.sum(total, axis=0).to(tl.float32), mask=inside)
    tl.store(sum_dz_xhat_ptr + channels, tl.sum(total_xhat, axis=0).to(tl.float32), mask=inside)


@triton.jit
def batch_norm_act_backward_kernel(
    dy_ptr,  # images
    x_ptr,  # images
    mean_ptr,  # [features]
    rstd_ptr,  # [features]
    weight_ptr,  # [features], with WEIGHT
    bias_ptr,  # [features], with BIAS
    residual_ptr,  # images, with BEFORE
    sum_dz_ptr,  # [features], with TRAINED
    sum_dz_xhat_ptr,  # [features], with TRAINED
    gate_ptr,  # [planes], with GATED
    dpooled_ptr,  # [planes], with GATED
    dx_ptr,  # images, with DX
    dresidual_ptr,  # images, with DRESIDUAL
    per_count,
    features,
    c,
    hw,
    chunks,
    ACT: tl.constexpr,
    GATED: tl.constexpr,  # a(z) has been scaled by a gate, and pooled
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    BEFORE: tl.constexpr,
    TRAINED: tl.constexpr,
    DX: tl.constexpr,
    DRESIDUAL: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HW: tl.constexpr,
    VEC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    begin, _, sample, channels, _ = _images.program(c, hw, chunks, CHUNK, BLOCK_C, CHANNELS_LAST, WIDE)
    at, inside = channels % features, channels < c
    mean, rstd, weight, bias = affine(mean_ptr, rstd_ptr, weight_ptr, bias_ptr, at, inside, WEIGHT, BIAS)
    offsets, mask = _images.tile(begin, sample, channels, c, hw, BLOCK_HW, VEC, CHANNELS_LAST)
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        gate = tl.load(gate_ptr + sample * c + channels, mask=inside, other=0.0)
        dpooled = tl.load(dpooled_ptr + sample * c + channels, mask=inside, other=0.0)
        dy = dy * gate[:, None] + (dpooled / hw)[:, None]
    xhat, z = normalised(x_ptr, residual_ptr, offsets, mask, mean, rstd, weight, bias, BEFORE)
    dz = _activation.gradient(dy, z, ACT)
    if DRESIDUAL:
        tl.store(dresidual_ptr + offsets, dz.to(dresidual_ptr.dtype.element_ty), mask=mask)
    if DX:
        if TRAINED:
            mean_dz = tl.load(sum_dz_ptr + at, mask=inside, other=0.0)[:, None] * per_count
            mean_dz_xhat = tl.load(sum_dz_xhat_ptr + at, mask=inside, other=0.0)[:, None] * per_count
            dz = dz - mean_dz - xhat * mean_dz_xhat
        tl.store(dx_ptr + offsets, (weight * rstd * dz).to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def batch_norm_act_fixed_backward_kernel(
    dy_ptr,  # images
    y_ptr,  # images, with RELU
    scale_ptr,  # [features]
    dx_ptr,  # images
    dresidual_ptr,  # images, with DRESIDUAL
    features,
    c,
    hw,
    chunks,
    RELU: tl.constexpr,
    DRESIDUAL: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HW: tl.constexpr,
    VEC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    begin, _, sample, channels, _ = _images.program(c, hw, chunks, CHUNK, BLOCK_C, CHANNELS_LAST, WIDE)
    scale = tl.load(scale_ptr + channels % features, mask=channels < c, other=0.0)[:, None]
    offsets, mask = _images.tile(begin, sample, channels, c, hw, BLOCK_HW, VEC, CHANNELS_LAST)
    dz = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        dz = _activation.gradient(dz, tl.load(y_ptr + offsets, mask=mask, other=0.0).to(tl.float32), _activation.RELU)
    if DRESIDUAL:
        tl.store(dresidual_ptr + offsets, dz.to(dresidual_ptr.dtype.element_ty), mask=mask)
    tl.store(dx_ptr + offsets, (scale * dz).to(dx_ptr.dtype.element_ty), mask=mask)


def dense(x: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Dense copies, images as they are; ``x`` stands for one that is not there, and no kernel reads it."""
    return [x if t is None else t if t.dim() == 4 else t.contiguous() for t in tensors]


def flags(act: int, weight: Tensor | None, bias: Tensor | None) -> dict:
    return {"ACT": act, "WEIGHT": weight is not None, "BIAS": bias is not None}


def finish_programs(c: int) -> tuple[int]:
    return (triton.cdiv(c, FINISH_BLOCK),)


FINISH = {"BLOCK": FINISH_BLOCK, "PARTS": FINISH_PARTS, **_images.OPTIONS}


def finish_stats(parts: list[Tensor], hw: int, chunk: int) -> tuple[Tensor, Tensor]:
    """mean and m2 from shift, total and squares ``[chunks, N, C]`` of ``chunk`` pixels each."""
    chunks, n, c = parts[0].shape
    mean, m2 = (parts[0].new_empty(c) for _ in range(2))
    batch_norm_act_stats_finish_kernel[finish_programs(c)](*parts, mean, m2, n, c, hw, chunks, CHUNK=chunk, **FINISH)
    return mean, m2


def batch_norm_act_stats(x: Tensor) -> tuple[Tensor, Tensor]:
    n, c = x.shape[:2]
    if x.numel() == 0:
        return x.new_zeros(c, dtype=torch.float32), x.new_zeros(c, dtype=torch.float32)
    grid = _images.grid(x)
    parts = [x.new_empty(grid.chunks, n, c, dtype=torch.float32) for _ in range(3)]
    with _images.on_device(x):
        batch_norm_act_stats_kernel[grid.programs](x, *parts, grid.planes, **grid.arguments)
        return finish_stats(parts, grid.hw, grid.chunk)


def batch_norm_act_update_(
    mean: Tensor,
    m2: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    count: float,
    momentum: float,
    eps: float,
) -> Tensor:
    rstd, c = torch.empty_like(mean), mean.numel()
    running = [mean if t is None else t for t in (running_mean, running_var)]
    rates = (1 / count, 1 / (count - 1) if count != 1 else float("inf"), momentum, eps)
    flags = {"MEAN": running_mean is not None, "VAR": running_var is not None, "BLOCK": 128, **_images.OPTIONS}
    with _images.on_device(mean):
        batch_norm_act_update_kernel[(triton.cdiv(c, 128),)](mean, m2, *running, rstd, c, *rates, **flags)
    return rstd


def images_forward(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act: int,
    *,
    before: Tensor | None = None,
    after: Tensor | None = None,
    gate: Tensor | None = None,
    gate_act: int | None = None,
    last: int = 0,
) -> Tensor:
    """y = last(a(z) * gate_act(gate) + after), each term where it is given."""
    y, grid, residual = torch.empty_like(x), _images.grid(x, one_step=True), before if after is None else after
    added = {"BEFORE": before is not None, "AFTER": after is not None}
    with _images.on_device(x):
        batch_norm_act_kernel[grid.programs](
            *(x, *dense(x, mean, rstd, weight, bias, residual, gate), y, x.shape[1]),
            **flags(act, weight, bias) | added | grid.arguments,
            GATE=gate_act,
            LAST=last,
        )
    return y


def batch_norm_act(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    act: int,
    residual_after: bool,
) -> Tensor:
    added = {"after" if residual_after else "before": residual}
    return images_forward(x, mean, rstd, weight, bias, act, **added)


def batch_norm_act_reduce(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    act: int,
    residual_after: bool,
) -> tuple[Tensor, Tensor]:
    n, c = x.shape[:2]
    grid, before = _images.grid(x), None if residual_after else residual
    sums = [x.new_empty(c, dtype=torch.float32) for _ in range(2)]
    parts = [sums[0].new_empty(grid.chunks, n, c) for _ in range(2)]
    with _images.on_device(x):
        batch_norm_act_reduce_kernel[grid.programs](
            *(dy, x, *dense(x, mean, rstd, weight, bias, before), *parts, grid.planes, c),
            **flags(act, weight, bias) | grid.arguments,
            BEFORE=before is not None,
        )
        batch_norm_act_reduce_finish_kernel[finish_programs(c)](*parts, *sums, c, grid.chunks * n, **FINISH)
    return tuple(sums)


def images_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    sum_dz: Tensor | None,
    sum_dz_xhat: Tensor | None,
    count: float,
    act: int,
    *,
    before: Tensor | None = None,
    gate: Tensor | None = None,
    dpooled: Tensor | None = None,
    need_dx: bool = True,
    need_dz: bool = False,
) -> tuple[Tensor, Tensor]:
    """dx and dz; with a gate those of y = a(z) * gate and of pooled = mean a(z)."""
    grid = _images.grid(x, one_step=True)
    dx, dz = (torch.empty_like(x) if needed else x.new_empty(0) for needed in (need_dx, need_dz))
    wanted = {"TRAINED": sum_dz is not None, "DX": need_dx, "DRESIDUAL": need_dz}
    with _images.on_device(x):
        batch_norm_act_backward_kernel[grid.programs](
            *(dy, x, *dense(x, mean, rstd, weight, bias, before, sum_dz, sum_dz_xhat, gate, dpooled)),
            *(dx if need_dx else x, dz if need_dz else x, 1 / count, x.shape[1]),
            **flags(act, weight, bias) | wanted | grid.arguments,
            BEFORE=before is not None,
            GATED=gate is not None,
        )
    return dx, dz


def batch_norm_act_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    sum_dz: Tensor | None,
    sum_dz_xhat: Tensor | None,
    count: float,
    act: int,
    residual_after: bool,
    need_dx: bool,
    need_dresidual: bool,
) -> tuple[Tensor, Tensor]:
    inputs, before = (mean, rstd, weight, bias, sum_dz, sum_dz_xhat, count, act), None if residual_after else residual
    return images_backward(dy, x, *inputs, before=before, need_dx=need_dx, need_dz=need_dresidual)


def batch_norm_act_fixed_backward(
    dy: Tensor, y: Tensor, scale: Tensor, act: int, need_dresidual: bool
) -> tuple[Tensor, Tensor]:
    grid, dx = _images.grid(dy, one_step=True), torch.empty_like(dy)
    dresidual = torch.empty_like(dy) if need_dresidual else dy.new_empty(0)
    with _images.on_device(dy):
        batch_norm_act_fixed_backward_kernel[grid.programs](
            *(dy, y, scale.contiguous(), dx, dresidual if need_dresidual else dx, dy.shape[1]),
            RELU=act != 0,
            DRESIDUAL=need_dresidual,
            **grid.arguments,
        )
    return dx, dresidual

"""depthwise_bn_act_se in Triton: a convolution with its statistics, and what follows, with the gate of squeeze_excite.

xhat = (z - mean) rstd        u = weight xhat + bias        y = a(u) gate(logits)        pooled = mean_hw a(u)
dgate = sum_hw dy a(u)        du = a'(u) (gate dy + dpooled / hw)
sum_du = sum_n (gate sum_hw dy a'(u) + dpooled / hw sum_hw a'(u)), sum_du_xhat the same with xhat in each sum

Images are read and written once per kernel. Sums run over chunks of pixels that are added in a fixed order, those over
the batch in float64 (csrc/depthwise_bn_act_se.h).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedtrain.kernels import _activation, _images
from fusedtrain.kernels import batch_norm_act as norm_kernels
from fusedtrain.kernels import channel_pool as pool_kernels
from fusedtrain.kernels import channel_scale as scale_kernels
from fusedtrain.kernels import depthwise_conv2d as conv_kernels
from fusedtrain.kernels import squeeze_excite as gate_kernels
from fusedtrain.ops import _codes

IDENTITY, RELU = (_codes.ACTIVATIONS.index(name) for name in ("identity", "relu"))
MOST_PARTS = 2048  # of a channel's statistics, where a sample is not a part of its own
SUMS = 4  # of a plane for the statistics' gradients


@triton.jit
def depthwise_bn_act_se_conv_kernel(
    x_ptr,  # [n, c, h, w] or [n, h, w, c]
    weight_ptr,  # [co, KH, KW]
    bias_ptr,  # [co], with BIAS
    z_ptr,  # [n, co, ho, wo] or [n, ho, wo, co]
    shift_ptr,  # [chunks, n, co]
    total_ptr,  # [chunks, n, co]: sum (z - shift)
    squares_ptr,  # [chunks, n, co]: sum (z - shift)^2
    n,
    chunks,
    c,
    h,
    w,
    ho,
    wo,
    sh,
    sw,
    top,
    left,
    dil_h,
    dil_w,
    M: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    UNROLL: tl.constexpr,
    BIAS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    VEC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Statistics are those of z as it is stored."""
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    co, blocks_c = c * M, tl.cdiv(c * M, BLOCK_C)
    pid = tl.program_id(0)
    sample, chunk = tl.cast(pid // blocks_c // chunks, INT), tl.cast(pid // blocks_c % chunks, INT)
    channels = pid % blocks_c * BLOCK_C + tl.arange(0, BLOCK_C)
    begin = chunk * CHUNK
    end = tl.minimum(begin + CHUNK, ho * wo)
    shift = tl.zeros([BLOCK_C], tl.float32)
    total = tl.zeros([BLOCK_C], tl.float32)
    squares = tl.zeros([BLOCK_C], tl.float32)
    for start in range(begin, end, BLOCK_P):
        pixels = start + tl.arange(0, BLOCK_P)
        z, offsets, mask = conv_kernels.convolved(
            *(x_ptr, weight_ptr, bias_ptr, sample, channels, pixels, c, h, w, ho, wo, sh, sw, top, left, dil_h, dil_w),
            *(M, KH, KW, UNROLL, BIAS, VEC, CHANNELS_LAST),
        )
        z = z.to(z_ptr.dtype.element_ty)
        tl.store(z_ptr + offsets, z, mask=mask)
        z = tl.where(mask, z.to(tl.float32), 0.0)
        count = tl.minimum(end - start, BLOCK_P).to(tl.float32)
        shift, total, squares = norm_kernels.moments(z, mask, count, start == begin, shift, total, squares)
    part = (chunk * n + sample) * co + channels
    tl.store(shift_ptr + part, shift, mask=channels < co)
    tl.store(total_ptr + part, total, mask=channels < co)
    tl.store(squares_ptr + part, squares, mask=channels < co)


@triton.jit
def depthwise_bn_act_se_pool_kernel(
    z_ptr,  # images
    mean_ptr,  # [features]
    rstd_ptr,  # [features]
    weight_ptr,  # [features], with WEIGHT
    bias_ptr,  # [features], with BIAS
    partial_ptr,  # [chunks, planes]: sums
    planes,
    features,
    c,
    hw,
    chunks,
    ACT: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HW: tl.constexpr,
    VEC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    begin, end, sample, channels, chunk = _images.program(c, hw, chunks, CHUNK, BLOCK_C, CHANNELS_LAST, WIDE)
    at, inside = channels % features, channels < c
    mean, rstd, weight, bias = norm_kernels.affine(mean_ptr, rstd_ptr, weight_ptr, bias_ptr, at, inside, WEIGHT, BIAS)
    total = tl.zeros([BLOCK_C, BLOCK_HW], tl.float32)
    for start in range(begin, end, BLOCK_HW):
        offsets, mask = _images.tile(start, sample, channels, c, hw, BLOCK_HW, VEC, CHANNELS_LAST)
        _, u = norm_kernels.normalised(z_ptr, z_ptr, offsets, mask, mean, rstd, weight, bias, False)
        total += tl.where(mask, _activation.value(u, ACT), 0.0)
    tl.store(partial_ptr + chunk * planes + sample * c + channels, tl.sum(total, axis=1), mask=inside)


@triton.jit
def depthwise_bn_act_se_reduce_kernel(
    dy_ptr,  # images
    z_ptr,  # images
    mean_ptr,  # [features]
    rstd_ptr,  # [features]
    weight_ptr,  # [features], with WEIGHT
    bias_ptr,  # [features], with BIAS
    dgate_ptr,  # [chunks, planes]
    sums_ptr,  # [4, chunks, planes]: dy a', a', dy a' xhat, a' xhat
    planes,
    features,
    c,
    hw,
    chunks,
    ACT: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HW: tl.constexpr,
    VEC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    begin, end, sample, channels, chunk = _images.program(c, hw, chunks, CHUNK, BLOCK_C, CHANNELS_LAST, WIDE)
    at, inside = channels % features, channels < c
    mean, rstd, weight, bias = norm_kernels.affine(mean_ptr, rstd_ptr, weight_ptr, bias_ptr, at, inside, WEIGHT, BIAS)
    dgate = tl.zeros([BLOCK_C, BLOCK_HW], tl.float32)
    dy_slope = tl.zeros([BLOCK_C, BLOCK_HW], tl.float32)
    slope = tl.zeros([BLOCK_C, BLOCK_HW], tl.float32)
    dy_slope_xhat = tl.zeros([BLOCK_C, BLOCK_HW], tl.float32)
    slope_xhat = tl.zeros([BLOCK_C, BLOCK_HW], tl.float32)
    for start in range(begin, end, BLOCK_HW):
        offsets, mask = _images.tile(start, sample, channels, c, hw, BLOCK_HW, VEC, CHANNELS_LAST)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        xhat, u = norm_kernels.normalised(z_ptr, z_ptr, offsets, mask, mean, rstd, weight, bias, False)
        through_y = _activation.gradient(dy, u, ACT)
        through_pool = tl.where(mask, _activation.gradient(tl.full(u.shape, 1.0, tl.float32), u, ACT), 0.0)
        dgate += dy * _activation.value(u, ACT)
        dy_slope += through_y
        slope += through_pool
        dy_slope_xhat += through_y * xhat
        slope_xhat += through_pool * xhat
    part = chunk * planes + sample * c + channels
    size = tl.cast(chunks, tl.int64) * planes
    tl.store(dgate_ptr + part, tl.sum(dgate, axis=1), mask=inside)
    tl.store(sums_ptr + part, tl.sum(dy_slope, axis=1), mask=inside)
    tl.store(sums_ptr + size + part, tl.sum(slope, axis=1), mask=inside)
    tl.store(sums_ptr + 2 * size + part, tl.sum(dy_slope_xhat, axis=1), mask=inside)
    tl.store(sums_ptr + 3 * size + part, tl.sum(slope_xhat, axis=1), mask=inside)


@triton.jit
def depthwise_bn_act_se_combine_kernel(
    sums_ptr,  # [4, chunks, samples, c]
    logits_ptr,  # [samples, c]
    dpooled_ptr,  # [samples, c]
    gate_ptr,  # [samples, c]
    sum_du_ptr,  # [c]
    sum_du_xhat_ptr,  # [c]
    samples,
    c,
    hw,
    chunks,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < c
    parts = chunks * samples
    size = tl.cast(parts, tl.int64) * c
    total = tl.zeros([PARTS, BLOCK], tl.float64)
    total_xhat = tl.zeros([PARTS, BLOCK], tl.float64)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        mask = (part < parts)[:, None] & inside[None, :]
        at = part.to(tl.int64)[:, None] * c + channels[None, :]
        plane = (part % samples).to(tl.int64)[:, None] * c + channels[None, :]
        gate = _activation.value(tl.load(logits_ptr + plane, mask=mask, other=0.0), GATE)
        tl.store(gate_ptr + plane, gate, mask=mask & (part < samples)[:, None])
        gate = gate.to(tl.float64)
        pool = tl.load(dpooled_ptr + plane, mask=mask, other=0.0).to(tl.float64) / hw
        total += gate * tl.load(sums_ptr + at, mask=mask, other=0.0).to(tl.float64)
        total += pool * tl.load(sums_ptr + size + at, mask=mask, other=0.0).to(tl.float64)
        total_xhat += gate * tl.load(sums_ptr + 2 * size + at, mask=mask, other=0.0).to(tl.float64)
        total_xhat += pool * tl.load(sums_ptr + 3 * size + at, mask=mask, other=0.0).to(tl.float64)
    tl.store(sum_du_ptr + channels, tl.sum(total, axis=0).to(tl.float32), mask=inside)
    tl.store(sum_du_xhat_ptr + channels, tl.sum(total_xhat, axis=0).to(tl.float32), mask=inside)


def depthwise_bn_act_se_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    launch = conv_kernels.launch_of(x, weight, stride, padding, dilation)
    z, (n, co, ho, wo) = launch.y, launch.y.shape
    chunk = max(_images.CHUNK_CHANNELS_LAST, triton.cdiv(n * ho * wo, MOST_PARTS))
    chunk = triton.cdiv(chunk, launch.block_p) * launch.block_p
    chunks = triton.cdiv(ho * wo, chunk)
    parts = [x.new_empty(chunks, n, co, dtype=torch.float32) for _ in range(3)]
    with _images.on_device(x):
        depthwise_bn_act_se_conv_kernel[launch.programs(chunk)](
            *(x, weight, weight if bias is None else bias, z, *parts, n, chunks, *launch.geometry),
            **launch.flags,
            BIAS=bias is not None,
            CHUNK=chunk,
        )
        return z, *norm_kernels.finish_stats(parts, ho * wo, chunk)


def depthwise_bn_act_se(
    z: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    act: int,
    se_act: int,
    gate: int,
    residual: Tensor | None = None,
    relu: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grid, norm = _images.grid(z), (mean, rstd, weight, bias)
    pooled = z.new_empty(z.shape[:2], dtype=torch.float32)
    partial = pooled.new_empty(grid.chunks, grid.planes)
    with _images.on_device(z):
        depthwise_bn_act_se_pool_kernel[grid.programs](
            *(z, *norm_kernels.dense(z, *norm), partial, grid.planes, z.shape[1]),
            **norm_kernels.flags(act, weight, bias) | grid.arguments,
        )
        pool_kernels.finish(partial, pooled, grid)
        hidden = gate_kernels.layer(pooled, w1, b1, IDENTITY)
        logits = gate_kernels.layer(hidden, w2, b2, se_act)
        last = RELU if relu else IDENTITY
        y = norm_kernels.images_forward(z, *norm, act, gate=logits, gate_act=gate, after=residual, last=last)
    return y, pooled, hidden, logits


def depthwise_bn_act_se_reduce(
    dy: Tensor,
    z: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    pooled: Tensor,
    hidden: Tensor,
    logits: Tensor,
    act: int,
    se_act: int,
    gate_act: int,
    need_dw: bool,
) -> tuple[Tensor, ...]:
    n, c = z.shape[:2]
    grid, gate = _images.grid(z), torch.empty_like(pooled)
    partial, sums = pooled.new_empty(grid.chunks, grid.planes), pooled.new_empty(SUMS, grid.chunks, grid.planes)
    totals = [pooled.new_empty(c) for _ in range(2)]
    with _images.on_device(z):
        depthwise_bn_act_se_reduce_kernel[grid.programs](
            *(dy, z, *norm_kernels.dense(z, mean, rstd, weight, bias), partial, sums, grid.planes, c),
            **norm_kernels.flags(act, weight, bias) | grid.arguments | {"num_warps": 8},
        )
        dlogits = scale_kernels.finish(partial, logits, gate_act, grid)
        dpooled, dws = gate_kernels.backward(dlogits, w1, w2, pooled, hidden, se_act, True, need_dw)
        depthwise_bn_act_se_combine_kernel[norm_kernels.finish_programs(c)](
            *(sums, logits, dpooled, gate, *totals, n, c, grid.hw, grid.chunks), GATE=gate_act, **norm_kernels.FINISH
        )
    return *totals, gate, dpooled, *dws


def depthwise_bn_act_se_backward(
    dy: Tensor,
    z: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    dpooled: Tensor | None,
    sum_du: Tensor | None,
    sum_du_xhat: Tensor | None,
    count: float,
    act: int,
) -> Tensor:
    inputs = (dy, z, mean, rstd, weight, bias, sum_du, sum_du_xhat, count, act)
    return norm_kernels.images_backward(*inputs, gate=gate, dpooled=dpooled)[0]


def depthwise_bn_act_se_conv_backward(*args) -> tuple[Tensor, Tensor, Tensor]:
    inputs, (x, kernel, *geometry_and_needs) = args[:12], args[12:]
    return conv_kernels.depthwise_conv2d_backward(depthwise_bn_act_se_backward(*inputs), x, kernel, *geometry_and_needs)

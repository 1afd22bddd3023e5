"""global_response_norm in Triton.

norm = sqrt(sum_hw a(x)^2)      scale = 1 / (mean_c norm + eps)      factor = 1 + weight norm scale
y = a(x) factor + bias          dot = sum_hw dy a(x)                 dx = a'(x) (dy factor + a(x) slope)

slope = (weight dot scale - scale^2 mean_c(weight dot norm)) / norm (csrc/global_response_norm.h). Sums over pixels run
in chunks, which a program per image adds and makes factors of; those over its channels are in float64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedtrain.kernels import _activation, _images, batch_norm_act

FINISH_BLOCK = 128  # channels at a time


@triton.jit
def global_response_norm_squares_kernel(
    x_ptr,  # images
    squares_ptr,  # [chunks, planes]
    planes,
    c,
    hw,
    chunks,
    IN_ACT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HW: tl.constexpr,
    VEC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    begin, end, sample, channels, chunk = _images.program(c, hw, chunks, CHUNK, BLOCK_C, CHANNELS_LAST, WIDE)
    total = tl.zeros([BLOCK_C, BLOCK_HW], tl.float32)
    for start in range(begin, end, BLOCK_HW):
        offsets, mask = _images.tile(start, sample, channels, c, hw, BLOCK_HW, VEC, CHANNELS_LAST)
        a = _activation.value(tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32), IN_ACT)
        total += a * a  # a(0) = 0 for every input activation
    tl.store(squares_ptr + chunk * planes + sample * c + channels, tl.sum(total, axis=1), mask=channels < c)


@triton.jit
def _added(partial_ptr, planes, plane, inside, chunks, BLOCK: tl.constexpr):
    """The sums of ``BLOCK`` planes over their chunks."""
    total = tl.zeros([BLOCK], tl.float64)
    for chunk in range(chunks):
        at = chunk * tl.cast(planes, tl.int64) + plane
        total += tl.load(partial_ptr + at, mask=inside, other=0.0).to(tl.float64)
    return total


@triton.jit
def global_response_norm_factor_kernel(
    squares_ptr,  # [chunks, planes]
    weight_ptr,  # [features]
    norm_ptr,  # [planes]
    factor_ptr,  # [planes]
    planes,
    features,
    chunks,
    eps,
    BLOCK: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64) * features
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, features, BLOCK):
        channels = start + tl.arange(0, BLOCK)
        inside = channels < features
        norm = tl.sqrt(_added(squares_ptr, planes, image + channels, inside, chunks, BLOCK)).to(tl.float32)
        tl.store(norm_ptr + image + channels, norm, mask=inside)
        total += norm.to(tl.float64)
    scale = 1.0 / (tl.sum(total) / features + eps)
    for start in range(0, features, BLOCK):  # once more from the sums: other threads may have written these norms
        channels = start + tl.arange(0, BLOCK)
        inside = channels < features
        norm = tl.sqrt(_added(squares_ptr, planes, image + channels, inside, chunks, BLOCK)).to(tl.float32)
        weight = tl.load(weight_ptr + channels, mask=inside, other=0.0).to(tl.float32)
        tl.store(
            factor_ptr + image + channels, 1.0 + weight * (norm.to(tl.float64) * scale).to(tl.float32), mask=inside
        )


@triton.jit
def global_response_norm_kernel(
    x_ptr,  # images
    factor_ptr,  # [planes]
    bias_ptr,  # [features]
    y_ptr,  # images
    features,
    c,
    hw,
    chunks,
    IN_ACT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HW: tl.constexpr,
    VEC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    begin, _, sample, channels, _ = _images.program(c, hw, chunks, CHUNK, BLOCK_C, CHANNELS_LAST, WIDE)
    inside = channels < c
    factor = tl.load(factor_ptr + sample * c + channels, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + channels % features, mask=inside, other=0.0).to(tl.float32)
    offsets, mask = _images.tile(begin, sample, channels, c, hw, BLOCK_HW, VEC, CHANNELS_LAST)
    a = _activation.value(tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32), IN_ACT)
    y = a * factor[:, None] + bias[:, None]
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def global_response_norm_dot_kernel(
    dy_ptr,  # images
    x_ptr,  # images
    dot_ptr,  # [chunks, planes]
    sum_dy_ptr,  # [chunks, planes]
    planes,
    c,
    hw,
    chunks,
    IN_ACT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HW: tl.constexpr,
    VEC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    begin, end, sample, channels, chunk = _images.program(c, hw, chunks, CHUNK, BLOCK_C, CHANNELS_LAST, WIDE)
    dot = tl.zeros([BLOCK_C, BLOCK_HW], tl.float32)
    sum_dy = tl.zeros([BLOCK_C, BLOCK_HW], tl.float32)
    for start in range(begin, end, BLOCK_HW):
        offsets, mask = _images.tile(start, sample, channels, c, hw, BLOCK_HW, VEC, CHANNELS_LAST)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        dot += dy * _activation.value(tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32), IN_ACT)
        sum_dy += dy
    to, inside = chunk * planes + sample * c + channels, channels < c
    tl.store(dot_ptr + to, tl.sum(dot, axis=1), mask=inside)
    tl.store(sum_dy_ptr + to, tl.sum(sum_dy, axis=1), mask=inside)


@triton.jit
def global_response_norm_slope_kernel(
    dot_ptr,  # [chunks, planes]
    sum_dy_ptr,  # [chunks, planes]
    norm_ptr,  # [planes]
    weight_ptr,  # [features]
    factor_ptr,  # [planes]
    slope_ptr,  # [planes]
    dweight_ptr,  # [planes]: what each image adds
    dbias_ptr,  # [planes]
    planes,
    features,
    chunks,
    eps,
    BLOCK: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64) * features
    norms, shared = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    for start in range(0, features, BLOCK):
        channels = start + tl.arange(0, BLOCK)
        inside = channels < features
        norm = tl.load(norm_ptr + image + channels, mask=inside, other=0.0).to(tl.float64)
        weight = tl.load(weight_ptr + channels, mask=inside, other=0.0).to(tl.float64)
        norms += norm
        shared += weight * norm * _added(dot_ptr, planes, image + channels, inside, chunks, BLOCK)
    scale = 1.0 / (tl.sum(norms) / features + eps)
    through_mean = tl.sum(shared) / features * scale * scale
    for start in range(0, features, BLOCK):
        channels = start + tl.arange(0, BLOCK)
        inside, at = channels < features, image + channels
        norm = tl.load(norm_ptr + at, mask=inside, other=0.0)
        weight = tl.load(weight_ptr + channels, mask=inside, other=0.0).to(tl.float32)
        dot = _added(dot_ptr, planes, at, inside, chunks, BLOCK)
        relative = (norm.to(tl.float64) * scale).to(tl.float32)
        dnorm = (weight.to(tl.float64) * dot * scale - through_mean).to(tl.float32)
        tl.store(factor_ptr + at, 1.0 + weight * relative, mask=inside)
        tl.store(slope_ptr + at, tl.where(norm == 0.0, 0.0, dnorm / norm), mask=inside)
        tl.store(dweight_ptr + at, dot.to(tl.float32) * relative, mask=inside)
        sum_dy = _added(sum_dy_ptr, planes, at, inside, chunks, BLOCK)
        tl.store(dbias_ptr + at, sum_dy.to(tl.float32), mask=inside)


@triton.jit
def global_response_norm_backward_kernel(
    dy_ptr,  # images
    x_ptr,  # images
    factor_ptr,  # [planes]
    slope_ptr,  # [planes]
    dx_ptr,  # images
    c,
    hw,
    chunks,
    IN_ACT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HW: tl.constexpr,
    VEC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    begin, _, sample, channels, _ = _images.program(c, hw, chunks, CHUNK, BLOCK_C, CHANNELS_LAST, WIDE)
    plane, inside = sample * c + channels, channels < c
    factor = tl.load(factor_ptr + plane, mask=inside, other=0.0)[:, None]
    slope = tl.load(slope_ptr + plane, mask=inside, other=0.0)[:, None]
    offsets, mask = _images.tile(begin, sample, channels, c, hw, BLOCK_HW, VEC, CHANNELS_LAST)
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    dx = _activation.gradient(dy * factor + _activation.value(x, IN_ACT) * slope, x, IN_ACT)
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def _per_image(kernel, x: Tensor, *args) -> None:
    """A program per image, over its channels."""
    kernel[(x.shape[0],)](*args, BLOCK=FINISH_BLOCK, **_images.OPTIONS)


def global_response_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, in_act: int) -> tuple[Tensor, Tensor]:
    n, c = x.shape[:2]
    grid, tiles = _images.grid(x), _images.grid(x, one_step=True)
    squares, norm, factor = (x.new_empty(shape, dtype=torch.float32) for shape in ((grid.chunks, n, c), (n, c), (n, c)))
    y, weight, bias = torch.empty_like(x), weight.contiguous(), bias.contiguous()
    with _images.on_device(x):
        global_response_norm_squares_kernel[grid.programs](x, squares, grid.planes, IN_ACT=in_act, **grid.arguments)
        vectors = squares, weight, norm, factor
        _per_image(global_response_norm_factor_kernel, x, *vectors, grid.planes, c, grid.chunks, eps)
        global_response_norm_kernel[tiles.programs](x, factor, bias, y, c, IN_ACT=in_act, **tiles.arguments)
    return y, norm


def global_response_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, norm: Tensor, eps: float, in_act: int, need_dx: bool
) -> tuple[Tensor, Tensor, Tensor]:
    n, c = x.shape[:2]
    grid, tiles = _images.grid(x), _images.grid(x, one_step=True)
    dot, sum_dy = (norm.new_empty(grid.chunks, n, c) for _ in range(2))
    factor, slope, dweights, dbiases = (torch.empty_like(norm) for _ in range(4))
    dweight, dbias = (norm.new_empty(c) for _ in range(2))
    dx = torch.empty_like(x) if need_dx else x.new_empty(0)
    with _images.on_device(x):
        global_response_norm_dot_kernel[grid.programs](dy, x, dot, sum_dy, grid.planes, IN_ACT=in_act, **grid.arguments)
        vectors = dot, sum_dy, norm, weight.contiguous(), factor, slope, dweights, dbiases
        _per_image(global_response_norm_slope_kernel, x, *vectors, grid.planes, c, grid.chunks, eps)
        batch_norm_act.batch_norm_act_reduce_finish_kernel[batch_norm_act.finish_programs(c)](
            dweights, dbiases, dweight, dbias, c, n, **batch_norm_act.FINISH
        )
        if need_dx:
            global_response_norm_backward_kernel[tiles.programs](
                dy, x, factor, slope, dx, IN_ACT=in_act, **tiles.arguments
            )
    return dx, dweight, dbias

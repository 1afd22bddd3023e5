"""channel_pool in Triton.

avg      pooled = mean_hw a(x)                              dx = a'(x) * dpooled / hw
avg_max  pooled = 0.5 mean_hw a(x) + 0.5 max_hw a(x)        dx = a'(x) * 0.5 dpooled (1 / hw + [a(x) = max] / ties)

The backward pass is the one of channel_scale without its dy term.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedtrain.kernels import _activation, _images, channel_scale
from fusedtrain.ops import _codes

AVG_MAX = _codes.POOLS.index("avg_max")
FINISH_BLOCK = 128


@triton.jit
def _merge(peak, ties, other, other_ties):
    """The maximum of two sets and how often it is reached. NaN wins, as in torch.amax, and equals nothing: no ties."""
    top = tl.maximum(peak, other, propagate_nan=tl.PropagateNan.ALL)
    return top, tl.where(peak == top, ties, 0.0) + tl.where(other == top, other_ties, 0.0)


@triton.jit
def _max(peak):
    """The maximum along axis 1; tl.max alone passes over NaN."""
    has_nan = tl.max((peak != peak).to(tl.int32), axis=1) > 0
    return tl.where(has_nan, float("nan"), tl.max(peak, axis=1))


@triton.jit
def _pooled(total, peak, hw, MAX: tl.constexpr):
    mean = total / hw
    if MAX:
        mean = 0.5 * mean + 0.5 * peak
    return mean


@triton.jit
def channel_pool_kernel(
    x_ptr,  # images
    pooled_ptr,  # [chunks, planes]: sums, or the result where there is one chunk
    peak_ptr,  # [chunks, planes]
    ties_ptr,  # [chunks, planes]
    planes,
    c,
    hw,
    chunks,
    IN_ACT: tl.constexpr,
    MAX: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HW: tl.constexpr,
    VEC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    begin, end, sample, channels, chunk = _images.program(c, hw, chunks, CHUNK, BLOCK_C, CHANNELS_LAST, WIDE)
    total = tl.zeros([BLOCK_C, BLOCK_HW], tl.float32)
    if MAX:
        peak = tl.full([BLOCK_C, BLOCK_HW], float("-inf"), tl.float32)
        ties = tl.zeros([BLOCK_C, BLOCK_HW], tl.float32)
    for start in range(begin, end, BLOCK_HW):
        offsets, mask = _images.tile(start, sample, channels, c, hw, BLOCK_HW, VEC, CHANNELS_LAST)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        a = _activation.value(x, IN_ACT)
        total += a  # a(0) = 0 for every input activation
        if MAX:
            peak, ties = _merge(peak, ties, tl.where(mask, a, float("-inf")), mask.to(tl.float32))
    result = tl.sum(total, axis=1)
    planes_here = sample * c + channels
    to = chunk * planes + planes_here
    inside = channels < c
    top = 0.0
    if MAX:
        top = _max(peak)
        tl.store(peak_ptr + to, top, mask=inside)
        tl.store(ties_ptr + to, tl.sum(tl.where(peak == top[:, None], ties, 0.0), axis=1), mask=inside)
    if ONE_CHUNK:
        result = _pooled(result, top, hw, MAX)
    tl.store(pooled_ptr + to, result, mask=inside)


@triton.jit
def channel_pool_finish_kernel(
    total_ptr,  # [chunks, planes]
    chunk_peak_ptr,  # [chunks, planes]
    chunk_ties_ptr,  # [chunks, planes]
    pooled_ptr,  # [planes]
    peak_ptr,  # [planes]
    ties_ptr,  # [planes]
    planes,
    hw,
    chunks,
    MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    plane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = plane < planes
    total = tl.zeros([BLOCK], tl.float64)  # a large image has thousands of chunks
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    ties = tl.zeros([BLOCK], tl.float32)
    for chunk in range(chunks):
        at = chunk * tl.cast(planes, tl.int64) + plane
        total += tl.load(total_ptr + at, mask=inside, other=0.0).to(tl.float64)
        if MAX:
            other = tl.load(chunk_peak_ptr + at, mask=inside, other=0.0)
            peak, ties = _merge(peak, ties, other, tl.load(chunk_ties_ptr + at, mask=inside, other=0.0))
    if MAX:
        tl.store(peak_ptr + plane, peak, mask=inside)
        tl.store(ties_ptr + plane, ties, mask=inside)
    tl.store(pooled_ptr + plane, _pooled(total.to(tl.float32), peak, hw, MAX), mask=inside)


def _finish(partials: tuple[Tensor, ...], results: tuple[Tensor, ...], grid: _images.Grid, avg_max: bool) -> None:
    """Adds the chunks ``[chunks, planes]`` of sum, maximum and ties; the last two are there for avg_max only."""
    channel_pool_finish_kernel[(triton.cdiv(grid.planes, FINISH_BLOCK),)](
        *(*partials, *results, grid.planes, grid.hw, grid.chunks), MAX=avg_max, BLOCK=FINISH_BLOCK, **_images.OPTIONS
    )


def finish(partial: Tensor, pooled: Tensor, grid: _images.Grid) -> None:
    """pooled: the mean, from sums ``[chunks, planes]``."""
    _finish((partial,) * 3, (pooled,) * 3, grid, False)


def channel_pool(x: Tensor, pool: int, in_act: int) -> tuple[Tensor, Tensor, Tensor]:
    grid, avg_max = _images.grid(x), pool == AVG_MAX

    def triple(*shape):
        return tuple(x.new_empty(s, dtype=torch.float32) for s in (shape, *((shape if avg_max else (0,),) * 2)))

    results = triple(*x.shape[:2])
    partial = results if grid.chunks == 1 else triple(grid.chunks, grid.planes)
    with _images.on_device(x):
        channel_pool_kernel[grid.programs](
            x, *partial, grid.planes, IN_ACT=in_act, MAX=avg_max, ONE_CHUNK=grid.chunks == 1, **grid.arguments
        )
        if grid.chunks > 1:
            _finish(partial, results, grid, avg_max)
    return results


def channel_pool_backward(dpooled: Tensor, x: Tensor, peak: Tensor, ties: Tensor, pool: int, in_act: int) -> Tensor:
    return channel_scale.images_backward(x, in_act, dpooled=dpooled, peak=peak, ties=ties, avg_max=pool == AVG_MAX)

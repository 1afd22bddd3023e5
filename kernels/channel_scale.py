"""channel_scale in Triton.

y = a(x) * g[n, c]        dgate[n, c] = sum_hw dy * a(x)        dx = a'(x) * dy * g[n, c]

For squeeze_excite the same kernels take the gate's logits, g = gate(logits), return dlogits = dgate * gate'(logits),
and add to dx what reaches x through a pooling of the same x (csrc/channel_pool.h).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedtrain.kernels import _activation, _images
from fusedtrain.ops import _codes

IDENTITY = _codes.ACTIVATIONS.index("identity")
FINISH_BLOCK = 128


@triton.jit
def channel_scale_kernel(
    x_ptr,  # images
    gate_ptr,  # [planes], before GATE
    y_ptr,  # images
    c,
    hw,
    chunks,
    IN_ACT: tl.constexpr,
    GATE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HW: tl.constexpr,
    VEC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    begin, _, sample, channels, _ = _images.program(c, hw, chunks, CHUNK, BLOCK_C, CHANNELS_LAST, WIDE)
    gate = tl.load(gate_ptr + sample * c + channels, mask=channels < c, other=0.0).to(tl.float32)
    offsets, mask = _images.tile(begin, sample, channels, c, hw, BLOCK_HW, VEC, CHANNELS_LAST)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    y = _activation.value(x, IN_ACT) * _activation.value(gate, GATE)[:, None]
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def channel_scale_dot_kernel(
    dy_ptr,  # images
    x_ptr,  # images
    gate_ptr,  # [planes], before GATE
    dgate_ptr,  # [chunks, planes]: sums, or the result where there is one chunk
    dx_ptr,  # images, with DX
    planes,
    c,
    hw,
    chunks,
    IN_ACT: tl.constexpr,
    GATE: tl.constexpr,
    DX: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HW: tl.constexpr,
    VEC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    begin, end, sample, channels, chunk = _images.program(c, hw, chunks, CHUNK, BLOCK_C, CHANNELS_LAST, WIDE)
    inside = channels < c
    gate = tl.load(gate_ptr + sample * c + channels, mask=inside, other=0.0).to(tl.float32)
    factor = _activation.value(gate, GATE)[:, None]
    total = tl.zeros([BLOCK_C, BLOCK_HW], tl.float32)
    for start in range(begin, end, BLOCK_HW):
        offsets, mask = _images.tile(start, sample, channels, c, hw, BLOCK_HW, VEC, CHANNELS_LAST)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        total += dy * _activation.value(x, IN_ACT)
        if DX:
            dx = _activation.gradient(dy * factor, x, IN_ACT)
            tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    result = tl.sum(total, axis=1)
    if ONE_CHUNK:
        result = _activation.gradient(result, gate, GATE)
    tl.store(dgate_ptr + chunk * planes + sample * c + channels, result, mask=inside)


@triton.jit
def channel_scale_finish_kernel(
    partial_ptr,  # [chunks, planes]
    gate_ptr,  # [planes], before GATE
    dgate_ptr,  # [planes]
    planes,
    chunks,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    plane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = plane < planes
    gate = tl.load(gate_ptr + plane, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float64)  # a large image has thousands of chunks
    for chunk in range(chunks):
        part = tl.load(partial_ptr + chunk * tl.cast(planes, tl.int64) + plane, mask=inside, other=0.0)
        total += part.to(tl.float64)
    tl.store(dgate_ptr + plane, _activation.gradient(total.to(tl.float32), gate, GATE), mask=inside)


@triton.jit
def channel_scale_backward_kernel(
    dy_ptr,  # images, with SCALE
    x_ptr,  # images
    gate_ptr,  # [planes], before GATE, with SCALE
    dpooled_ptr,  # [planes], with POOL
    peak_ptr,  # [planes], with MAX
    ties_ptr,  # [planes], with MAX
    dx_ptr,  # images
    c,
    hw,
    chunks,
    IN_ACT: tl.constexpr,
    GATE: tl.constexpr,
    SCALE: tl.constexpr,  # dy reaches x through y
    POOL: tl.constexpr,  # dpooled reaches x through the mean
    MAX: tl.constexpr,  # and through the maximum
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HW: tl.constexpr,
    VEC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    begin, _, sample, channels, _ = _images.program(c, hw, chunks, CHUNK, BLOCK_C, CHANNELS_LAST, WIDE)
    inside = channels < c
    planes_here = sample * c + channels
    offsets, mask = _images.tile(begin, sample, channels, c, hw, BLOCK_HW, VEC, CHANNELS_LAST)
    # Where nothing needs x (no activation, no maximum) the compiler drops its load.
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if SCALE:
        gate = tl.load(gate_ptr + planes_here, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        da = dy * _activation.value(gate, GATE)[:, None]
    else:
        da = tl.zeros([BLOCK_C, BLOCK_HW], tl.float32)
    if POOL:
        dpooled = tl.load(dpooled_ptr + planes_here, mask=inside, other=0.0)
        if MAX:
            dpooled *= 0.5
            peak = tl.load(peak_ptr + planes_here, mask=inside, other=0.0)
            ties = tl.load(ties_ptr + planes_here, mask=inside, other=1.0)
            at_peak = (_activation.value(x, IN_ACT) == peak[:, None]).to(tl.float32)
            da += at_peak * (dpooled / ties)[:, None]  # a NaN has no ties: 0 / 0, as in torch
        da += (dpooled / hw)[:, None]
    dx = _activation.gradient(da, x, IN_ACT)
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def images_forward(x: Tensor, gate: Tensor, in_act: int, gate_act: int) -> Tensor:
    """y = a(x) * gate_act(gate)."""
    y, grid = torch.empty_like(x), _images.grid(x, one_step=True)
    with _images.on_device(x):
        channel_scale_kernel[grid.programs](x, gate.contiguous(), y, IN_ACT=in_act, GATE=gate_act, **grid.arguments)
    return y


def finish(partial: Tensor, gate: Tensor, gate_act: int, grid: _images.Grid) -> Tensor:
    """The gradient of ``gate`` from sums ``[chunks, planes]`` of that of gate_act(gate)."""
    dgate = torch.empty_like(gate, dtype=torch.float32)
    channel_scale_finish_kernel[(triton.cdiv(grid.planes, FINISH_BLOCK),)](
        partial, gate, dgate, grid.planes, grid.chunks, GATE=gate_act, BLOCK=FINISH_BLOCK, **_images.OPTIONS
    )
    return dgate


def images_dot(dy: Tensor, x: Tensor, gate: Tensor, in_act: int, gate_act: int, dx: Tensor | None = None) -> Tensor:
    """Returns the gradient of ``gate``; writes that of x through y where ``dx`` is given."""
    grid, gate = _images.grid(x), gate.contiguous()
    partial = x.new_empty(grid.chunks, *x.shape[:2], dtype=torch.float32)
    flags = {"IN_ACT": in_act, "GATE": gate_act, "DX": dx is not None, "ONE_CHUNK": grid.chunks == 1}
    with _images.on_device(x):
        channel_scale_dot_kernel[grid.programs](
            dy, x, gate, partial, x if dx is None else dx, grid.planes, **flags, **grid.arguments
        )
        return partial[0] if grid.chunks == 1 else finish(partial, gate, gate_act, grid)


def images_backward(
    x: Tensor,
    in_act: int,
    *,
    dy: Tensor | None = None,
    gate: Tensor | None = None,
    gate_act: int = IDENTITY,
    dpooled: Tensor | None = None,
    peak: Tensor | None = None,
    ties: Tensor | None = None,
    avg_max: bool = False,
) -> Tensor:
    """dx = a'(x) * (dy * gate_act(gate) + d pool(a(x)) * dpooled), each term where it is given."""
    dx, grid = torch.empty_like(x), _images.grid(x, one_step=True)
    flags = {"IN_ACT": in_act, "GATE": gate_act, "SCALE": dy is not None, "POOL": dpooled is not None, "MAX": avg_max}
    small = (t.contiguous() if t is not None else x for t in (gate, dpooled, peak, ties))
    with _images.on_device(x):
        channel_scale_backward_kernel[grid.programs](
            dy if dy is not None else x, x, *small, dx, **flags, **grid.arguments
        )
    return dx


def channel_scale(x: Tensor, gate: Tensor, in_act: int) -> Tensor:
    return images_forward(x, gate, in_act, IDENTITY)


def channel_scale_backward(
    dy: Tensor, x: Tensor, gate: Tensor, in_act: int, need_dx: bool, need_dgate: bool
) -> tuple[Tensor, Tensor]:
    if not need_dgate:
        dx = images_backward(x, in_act, dy=dy, gate=gate) if need_dx else x.new_empty(0)
        return dx, gate.new_empty(0, dtype=torch.float32)
    dx = torch.empty_like(x) if need_dx else None
    dgate = images_dot(dy, x, gate, in_act, IDENTITY, dx)
    return dx if need_dx else x.new_empty(0), dgate

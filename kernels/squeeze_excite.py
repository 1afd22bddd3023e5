"""squeeze_excite in Triton: channel_pool, a gate network of two small layers, channel_scale.

hidden = pooled w1^T + b1          dlogits = dgate * gate'(logits)              dw2 = dlogits^T act(hidden)
logits = act(hidden) w2^T + b2     dhidden = (dlogits w2) * act'(hidden)        dw1 = dhidden^T pooled
y = a(x) * gate(logits)            dpooled = dhidden w1

Four launches forward, six backward, two more where a sum over pixels is cut into chunks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedtrain.kernels import _activation, _images
from fusedtrain.kernels import channel_pool as pool_kernels
from fusedtrain.kernels import channel_scale as scale_kernels

IDENTITY = scale_kernels.IDENTITY
BLOCK_ROWS, BLOCK_COLS, BLOCK_INNER = 16, 32, 32


@triton.jit
def _block(columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """This program's rows and columns of the result, and whether it is the first of its rows."""
    blocks = tl.maximum(tl.cdiv(columns, BLOCK_COLS), 1)
    row, col = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    rows = row.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return rows, col.to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS), col == 0


@triton.jit
def layer_kernel(
    x_ptr,  # [n, inputs], before ACT
    w_ptr,  # [outputs, inputs]
    b_ptr,  # [outputs], with BIAS
    y_ptr,  # [n, outputs]
    n,
    inputs,
    outputs,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
):
    """y = act(x) w^T + b."""
    rows, cols, _ = _block(outputs, BLOCK_ROWS, BLOCK_COLS)
    y = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for start in range(0, inputs, BLOCK_INNER):
        inner = start + tl.arange(0, BLOCK_INNER)
        x_mask = (rows < n)[:, None] & (inner < inputs)[None, :]
        x = tl.load(x_ptr + rows[:, None] * inputs + inner[None, :], mask=x_mask, other=0.0)
        w_mask = (inner < inputs)[:, None] & (cols < outputs)[None, :]
        w = tl.load(w_ptr + cols[None, :] * inputs + inner[:, None], mask=w_mask, other=0.0).to(tl.float32)
        y = tl.dot(_activation.value(x, ACT), w, acc=y, input_precision="ieee")
    if BIAS:
        y += tl.load(b_ptr + cols, mask=cols < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + rows[:, None] * outputs + cols[None, :], y, mask=(rows < n)[:, None] & (cols < outputs)[None, :])


@triton.jit
def layer_backward_kernel(
    dy_ptr,  # [n, outputs]
    w_ptr,  # [outputs, inputs]
    x_ptr,  # [n, inputs], before ACT
    dx_ptr,  # [n, inputs]
    n,
    inputs,
    outputs,
    ACT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
):
    """dx = (dy w) * act'(x)."""
    rows, cols, _ = _block(inputs, BLOCK_ROWS, BLOCK_COLS)
    dx = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for start in range(0, outputs, BLOCK_INNER):
        inner = start + tl.arange(0, BLOCK_INNER).to(tl.int64)
        dy_mask = (rows < n)[:, None] & (inner < outputs)[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * outputs + inner[None, :], mask=dy_mask, other=0.0)
        w_mask = (inner < outputs)[:, None] & (cols < inputs)[None, :]
        w = tl.load(w_ptr + inner[:, None] * inputs + cols[None, :], mask=w_mask, other=0.0).to(tl.float32)
        dx = tl.dot(dy, w, acc=dx, input_precision="ieee")
    offsets, mask = rows[:, None] * inputs + cols[None, :], (rows < n)[:, None] & (cols < inputs)[None, :]
    dx = _activation.gradient(dx, tl.load(x_ptr + offsets, mask=mask, other=0.0), ACT)
    tl.store(dx_ptr + offsets, dx, mask=mask)


@triton.jit
def weight_backward_kernel(
    dy_ptr,  # [n, outputs]
    x_ptr,  # [n, inputs], before ACT
    dw_ptr,  # [outputs, inputs]
    db_ptr,  # [outputs]
    n,
    inputs,
    outputs,
    ACT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
):
    """dw = dy^T act(x), db = sum_n dy."""
    rows, cols, first = _block(inputs, BLOCK_ROWS, BLOCK_COLS)
    dw = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    db = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in range(0, n, BLOCK_INNER):
        inner = start + tl.arange(0, BLOCK_INNER).to(tl.int64)
        dy_mask = (rows < outputs)[:, None] & (inner < n)[None, :]
        dy = tl.load(dy_ptr + inner[None, :] * outputs + rows[:, None], mask=dy_mask, other=0.0)
        x_mask = (inner < n)[:, None] & (cols < inputs)[None, :]
        x = tl.load(x_ptr + inner[:, None] * inputs + cols[None, :], mask=x_mask, other=0.0)
        dw = tl.dot(dy, _activation.value(x, ACT), acc=dw, input_precision="ieee")
        db += tl.sum(dy, axis=1)
    mask = (rows < outputs)[:, None] & (cols < inputs)[None, :]
    tl.store(dw_ptr + rows[:, None] * inputs + cols[None, :], dw.to(dw_ptr.dtype.element_ty), mask=mask)
    if first:
        tl.store(db_ptr + rows, db.to(db_ptr.dtype.element_ty), mask=rows < outputs)


def _launch(kernel, rows: int, cols: int, *args, **flags) -> None:
    programs = triton.cdiv(rows, BLOCK_ROWS) * max(1, triton.cdiv(cols, BLOCK_COLS))  # db exists without columns too
    blocks = {"BLOCK_ROWS": BLOCK_ROWS, "BLOCK_COLS": BLOCK_COLS, "BLOCK_INNER": BLOCK_INNER}
    kernel[(programs,)](*args, **flags, **blocks, **_images.OPTIONS)


def layer(x: Tensor, w: Tensor, b: Tensor | None, act: int) -> Tensor:
    (n, inputs), outputs = x.shape, w.shape[0]
    y = x.new_empty(n, outputs)
    bias = w if b is None else b
    _launch(layer_kernel, n, outputs, x, w, bias, y, n, inputs, outputs, ACT=act, BIAS=b is not None)
    return y


def _layer_backward(dy: Tensor, w: Tensor, x: Tensor, act: int) -> Tensor:
    (n, inputs), outputs = x.shape, w.shape[0]
    dx = torch.empty_like(x)
    _launch(layer_backward_kernel, n, inputs, dy, w, x, dx, n, inputs, outputs, ACT=act)
    return dx


def _weight_backward(dy: Tensor, x: Tensor, w: Tensor, act: int) -> tuple[Tensor, Tensor]:
    (n, inputs), outputs = x.shape, w.shape[0]
    dw, db = w.new_empty(w.shape), w.new_empty(outputs)
    _launch(weight_backward_kernel, outputs, inputs, dy, x, dw, db, n, inputs, outputs, ACT=act)
    return dw, db


def backward(
    dlogits: Tensor, w1: Tensor, w2: Tensor, pooled: Tensor, hidden: Tensor, act: int, need_dpooled: bool, need_dw: bool
) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """dpooled, and dw1, db1, dw2 and db2."""
    dws, dpooled = tuple(w1.new_empty(0) for _ in range(4)), None
    dhidden = _layer_backward(dlogits, w2, hidden, act)
    if need_dw:
        dws = *_weight_backward(dhidden, pooled, w1, IDENTITY), *_weight_backward(dlogits, hidden, w2, act)
    if need_dpooled:
        dpooled = _layer_backward(dhidden, w1, pooled, IDENTITY)
    return dpooled, dws


def squeeze_excite(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    act: int,
    gate: int,
    pool: int,
    in_act: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    with _images.on_device(x):
        pooled, peak, ties = pool_kernels.channel_pool(x, pool, in_act)
        hidden = layer(pooled, w1, b1, IDENTITY)
        logits = layer(hidden, w2, b2, act)
        y = scale_kernels.images_forward(x, logits, in_act, gate)
    return y, pooled, hidden, logits, peak, ties


def squeeze_excite_backward(
    dy: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    pooled: Tensor,
    hidden: Tensor,
    logits: Tensor,
    peak: Tensor,
    ties: Tensor,
    act: int,
    gate: int,
    pool: int,
    in_act: int,
    need_dx: bool,
    need_dw: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx = x.new_empty(0)
    with _images.on_device(x):
        dlogits = scale_kernels.images_dot(dy, x, logits, in_act, gate)
        dpooled, dws = backward(dlogits, w1, w2, pooled, hidden, act, need_dx, need_dw)
        if need_dx:
            dx = scale_kernels.images_backward(
                x,
                in_act,
                dy=dy,
                gate=logits,
                gate_act=gate,
                dpooled=dpooled,
                peak=peak,
                ties=ties,
                avg_max=pool == pool_kernels.AVG_MAX,
            )
    return dx, *dws

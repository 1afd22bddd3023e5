"""grad_norm in Triton: the sum of squares of each chunk, then the root of their sum."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedtrain.kernels import _images, _lists

GRAD, COLUMNS = tl.constexpr(2), tl.constexpr(3)
FINISH_BLOCK = 1024


@triton.jit
def grad_norm_partial_kernel(
    like_ptr,  # a gradient
    table_ptr,
    partial_ptr,  # [programs]
    count,
    first_program,
    VEC: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid, row, begin, end = _lists.program(table_ptr, count, first_program, COLUMNS, CHUNK)
    grad_ptr = _lists.pointer(table_ptr, count, row, GRAD, like_ptr, VEC)
    squares = tl.zeros([BLOCK], tl.float32)
    whole = end // VEC * VEC  # so the mask leaves loads 16 bytes wide
    for start in range(begin, whole, BLOCK):
        at = start + tl.arange(0, BLOCK)
        g = tl.load(grad_ptr + at, mask=at < whole, other=0.0).to(tl.float32)
        squares += g * g
    total = tl.sum(squares.to(tl.float64))
    if VEC > 1:
        at = whole + tl.arange(0, VEC)
        g = tl.load(grad_ptr + at, mask=at < end, other=0.0).to(tl.float32)
        total += tl.sum((g * g).to(tl.float64))
    tl.store(partial_ptr + pid, total)


@triton.jit
def grad_norm_finish_kernel(
    partial_ptr,  # [programs]
    norm_ptr,  # [1]
    programs,
    BLOCK: tl.constexpr,
):
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, programs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(partial_ptr + at, mask=at < programs, other=0.0)
    tl.store(norm_ptr, tl.sqrt(tl.sum(total)))


def grad_norm(grads: list[Tensor]) -> Tensor:
    grads = [grads[i] for i in _lists.sort([g.dtype for g in grads])]
    table = _lists.table([grads])
    norm, partial = (grads[0].new_empty(shape, dtype=torch.float64) for shape in ((), table.programs))
    with _images.on_device(grads[0]):
        for launch in table.launches:
            grad_norm_partial_kernel[(launch.programs,)](
                launch.like, table.tensor, partial, table.count, **launch.arguments
            )
        grad_norm_finish_kernel[(1,)](partial, norm, table.programs, BLOCK=FINISH_BLOCK, **_lists.OPTIONS)
    return norm

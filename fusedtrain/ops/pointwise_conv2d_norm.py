"""A 1x1 convolution, batch normalisation and an activation: the two ops, and what they gain where they meet.

On a CPU the convolution's kernel gathers the statistics of the batch while it writes, and in backward the gradient
between the two is made a few pixels at a time, which both products take from cache.
"""

import torch
from torch import Tensor

from fusedtrain.backend import select
from fusedtrain.ops import _codes, _common, _schema
from fusedtrain.ops._pointwise_rules import by_kernel
from fusedtrain.ops._remembered import remembered
from fusedtrain.ops.batch_norm_act import IMPLS as NORM_IMPLS
from fusedtrain.ops.batch_norm_act import (
    _all_reduced,
    _and_count,
    _check,
    _check_statistics,
    _count_up,
    _own_passes,
    _statistics,
    batch_norm_act,
    is_fixed,
    reference,
)
from fusedtrain.ops.pointwise_conv2d import IMPLS, _cast, _empty, as_planned, planned


@_schema.register_fake("pointwise_conv2d_norm_backward")
def _fake(
    dy, z, mean, rstd, norm_weight, norm_bias, sum_dz, sum_dz_xhat, count, act, x, weight, need_dx
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x) if need_dx else x.new_empty(0), x.new_empty(z.shape[1], x.shape[1], 1, 1)


_BACKWARD = torch.ops.fusedtrain.pointwise_conv2d_norm_backward.default


class _PointwiseNorm(torch.autograd.Function):
    """``count`` is as in batch_norm_act."""

    @staticmethod
    def forward(ctx, x, weight, norm_weight, norm_bias, z, mean, rstd, options):
        ctx.save_for_backward(x, weight, z, mean, rstd, norm_weight, norm_bias)
        ctx.count, ctx.act, ctx.group, ctx.norm = options
        return _common.owned(ctx.norm.forward(z, mean, rstd, norm_weight, norm_bias, None, ctx.act, False))

    @staticmethod
    @_common.once_differentiable
    def backward(ctx, dy):
        x, weight, z, *norm = ctx.saved_tensors
        # Hooks may have stored them in another format.
        x, z = (t.contiguous(memory_format=torch.channels_last) for t in (x, z))
        need_dx, need_dw, need_dgamma, need_dbeta = _common.needed(ctx, 0, 1, *_own_passes(ctx, 2, 3))[:4]
        inputs = (_common.dense_like(dy, z), z, *norm)
        sums = dbeta, dgamma = None, None
        if need_dgamma or need_dbeta or ctx.count is not None:
            sums = dbeta, dgamma = ctx.norm.reduce(*inputs, None, ctx.act, False)
        if ctx.count is None:
            sums = (None, None)
        elif ctx.group is not None:
            sums = _all_reduced(*sums, ctx.group)
        dx, dw = _BACKWARD(*inputs, *_and_count(sums, ctx.count, inputs[0]), ctx.act, x, weight, need_dx)
        return (
            dx if need_dx else None,
            _common.strided_like(dw, weight) if need_dw else None,
            _common.cast(dgamma, norm[2].dtype) if need_dgamma else None,
            _common.cast(dbeta, norm[3].dtype) if need_dbeta else None,
            *(None,) * 4,
        )


# Elements of the gradient between the two, and output channels per input channel, from which on both are taken as one,
# and the dtypes in which whole steps were measured faster so (benchmarks/LOG.md, 2026-11-23). Pixels: threads share
# them by the thousand; no more depends on threads, so that results do not.
_LARGE, _EXPANDS, _PIXELS, _AS_ONE = 1 << 19, 2, 8 << 10, (torch.float32,)


def _meet(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], z: Tensor, *select_) -> bool:
    """Whether backward takes both as one: on a CPU where the gradient of x comes from the kernel, too."""
    if bias is not None or stride != [1, 1] or z.dtype not in _AS_ONE or _common.is_less(z.numel(), _LARGE):
        return False
    # Before other sizes, which an exported graph leaves open. needs_autograd() would refuse what stock operators run.
    if not _common.records(weight) or torch.compiler._is_exporting_flag or torch.jit.is_tracing():
        return False
    if not by_kernel(z, x.shape[1]):
        return False
    n, channels, h, w = z.shape
    if _common.is_less(n * h * w, _PIXELS) or channels < _EXPANDS * x.shape[1]:
        return False
    ops = ("pointwise_conv2d", IMPLS, x, weight, bias, stride), ("batch_norm_act", NORM_IMPLS, z, *select_)
    return all(select(*op) is op[1]["cpu"] for op in ops)


@remembered
def _plan(x, weight, bias, stride, running_mean, running_var, norm_weight, norm_bias, training, eps, act) -> tuple:
    """What the convolution does, and whether stock PyTorch normalises one process's images: then all is checked. Where
    calls are traced, batch_norm_act answers that."""
    call = planned(x, weight, bias, stride)
    if not _common.untraced(x):
        return call, False
    z = _empty(x, weight, call[1], _common.format_of(x))
    fixed = is_fixed(training, act, norm_weight, norm_bias)
    if select("batch_norm_act", NORM_IMPLS, z, False, False, False, fixed) is not NORM_IMPLS["reference"]:
        return call, False
    _check(z, z.shape[1], weight=norm_weight, bias=norm_bias, running_mean=running_mean, running_var=running_var)
    _check_statistics(z.shape, running_mean, running_var, training, False, eps)
    _codes.code("act", act, _codes.ACTIVATIONS)
    return call, True


def pointwise_conv2d_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    stride: int | tuple[int, int] = 1,
    act: str = "identity",
    process_group=None,
    num_batches_tracked: Tensor | None = None,
) -> Tensor:
    """``batch_norm_act`` of what ``pointwise_conv2d`` returns, with the arguments of both."""
    x, weight, bias = _cast(x, weight, bias)
    running, affine, group = (running_mean, running_var), (norm_weight, norm_bias), process_group if training else None
    if group is None:
        call, normalised_by_stock = _plan(x, weight, bias, stride, *running, *affine, training, eps, act)
    else:
        call, normalised_by_stock = planned(x, weight, bias, stride), False
    z, moments = as_planned(call, x, weight, bias, with_moments=training and not normalised_by_stock)
    if normalised_by_stock:  # small images, which wait for Python
        _count_up(num_batches_tracked if training else None)
        return reference(z, *running, *affine, training, momentum, eps, act, None, False)
    # With a fixed norm z need not be kept: that is worth more than a pass over memory. _meet() comes first, as
    # torch.jit.trace names z by its first use, and compares a graph that records gradients with one that does not.
    if not _meet(x, weight, bias, call[1], z, group is not None) or is_fixed(training, act, *affine):
        norm = (*running, *affine, training, momentum, eps)
        others = {"process_group": process_group, "moments": moments, "num_batches_tracked": num_batches_tracked}
        return batch_norm_act(z, *norm, act=act, **others)
    _check(z, z.shape[1], weight=norm_weight, bias=norm_bias, running_mean=running_mean, running_var=running_var)
    _check_statistics(z.shape, *running, training, group is not None, eps)
    code, norm = _codes.code("act", act, _codes.ACTIVATIONS), NORM_IMPLS["cpu"]
    x, z = _common.dense(x), z.detach()
    _count_up(num_batches_tracked if training else None)
    with torch.no_grad():
        mean, rstd, count = _statistics(z, *running, training, momentum, eps, group, norm, moments)
    return _common.apply(_PointwiseNorm, x, weight, *affine, z, mean, rstd, (count, code, group, norm))

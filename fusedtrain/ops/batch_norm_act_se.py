"""Batch normalisation, an activation and squeeze-and-excitation: depthwise_bn_act_se on what another convolution made.

The normalised images are never written; backward keeps x and makes its gradient in one pass behind the sums. A residual
and ReLU, as in SE-ResNet, are added as y is written; the gradient of ReLU, by y, is torch's.
"""

import torch
from torch import Tensor

from fusedtrain.backend import select
from fusedtrain.ops import _codes, _common
from fusedtrain.ops.batch_norm_act import (
    _and_count,
    _check,
    _check_moments,
    _check_residual,
    _check_statistics,
    _count_up,
    _residual_like,
    _statistics,
    batch_norm_act,
)
from fusedtrain.ops.depthwise_bn_act_se import IMPLS, _reduced
from fusedtrain.ops.squeeze_excite import _check_weights, _dense_weights, _weight_dtype, squeeze_excite


class _BatchNormActSe(torch.autograd.Function):
    """mean and rstd have been computed from z; ``count`` is as in batch_norm_act."""

    @staticmethod
    def forward(ctx, z, weight, bias, w1, b1, w2, b2, residual, mean, rstd, options):
        relu, ctx.codes, ctx.count, ctx.group, ctx.impl = options
        y, *small = ctx.impl.forward(z, mean, rstd, weight, bias, w1, b1, w2, b2, *ctx.codes, residual, relu)
        y = _common.owned(y)
        ctx.save_for_backward(y if relu else None, z, mean, rstd, weight, bias, w1, w2, *small)
        return y

    @staticmethod
    @_common.once_differentiable
    def backward(ctx, dy):
        need_dz, *need_others, need_dresidual = _common.needed(ctx, 0)[:8]
        y, *saved = ctx.saved_tensors
        dy = _common.dense_like(dy, saved[0])
        dresidual = dy if y is None else torch.ops.aten.threshold_backward(dy, y, 0)
        (*inputs, sum_dz, sum_dz_xhat), others = _reduced(ctx, dresidual, saved, need_dz, need_others)
        sums = _and_count((sum_dz, sum_dz_xhat), ctx.count, dy)
        dz = ctx.impl.backward(*inputs, *sums, ctx.codes[0]) if need_dz else None
        return dz, *others, dresidual if need_dresidual else None, *(None,) * 3


def batch_norm_act_se(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    se: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    act: str = "identity",
    se_act: str = "relu",
    gate: str = "sigmoid",
    residual: Tensor | None = None,
    relu: bool = False,
    process_group=None,
    moments: tuple[Tensor, Tensor] | None = None,
    num_batches_tracked: Tensor | None = None,
) -> Tensor:
    """``squeeze_excite`` of what ``batch_norm_act`` returns, with the arguments of both; ``act`` takes what is
    ``in_act`` there. ``residual``, of the shape and dtype of x, is added to that, and with ``relu`` ReLU follows the
    sum."""
    _common.check_images("batch_norm_act", x)
    if relu and residual is None:
        raise ValueError("batch_norm_act_se: relu follows the sum with residual, which is None")
    _check(x, x.shape[1], weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    if residual is not None:
        _check_residual(x, residual)
    impl = select("depthwise_bn_act_se", IMPLS, x)
    running, affine = (running_mean, running_var), (weight, bias)
    if impl.backward is None or x.numel() == 0:
        norm = (*running, *affine, training, momentum, eps)
        others = {"process_group": process_group, "moments": moments, "num_batches_tracked": num_batches_tracked}
        a = batch_norm_act(x, *norm, act=act, **others)
        y = squeeze_excite(a, *se, act=se_act, gate=gate)
        y = y if residual is None else y + residual
        return y.relu() if relu else y
    group = process_group if training else None
    _check_statistics(x.shape, *running, training, group is not None, eps)
    if moments is not None:
        _check_moments(x, moments, training)
    _check_weights(x, x.shape[1], *se)
    codes = [
        _codes.code("act", act, _codes.INPUT_ACTIVATIONS),
        _codes.code("se_act", se_act, _codes.ACTIVATIONS),
        _codes.code("gate", gate, _codes.ACTIVATIONS),
    ]
    se = _dense_weights(_weight_dtype(x, *se), se)
    recording = _common.needs_autograd(x, *affine, *se, residual)  # before running statistics move
    x = _common.dense(x)
    residual = _residual_like(residual, x)
    _count_up(num_batches_tracked if training else None)
    with _common.no_grad():
        mean, rstd, count = _statistics(x, *running, training, momentum, eps, group, impl.norm, moments)
    if recording:
        return _common.apply(_BatchNormActSe, x, *affine, *se, residual, mean, rstd, (relu, codes, count, group, impl))
    return impl.forward(x, mean, rstd, *affine, *se, *codes, residual, relu)[0]

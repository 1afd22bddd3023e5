"""Batch normalisation, an activation and squeeze-and-excitation: depthwise_bn_act_se on what another convolution made.

The normalised images are never written; backward keeps x and makes its gradient in one pass behind the sums.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusedtrain.backend import select
from fusedtrain.ops import _codes, _common
from fusedtrain.ops.batch_norm_act import _check, _check_moments, _check_statistics, _statistics, batch_norm_act
from fusedtrain.ops.depthwise_bn_act_se import IMPLS, _reduced
from fusedtrain.ops.squeeze_excite import _check_weights, _weight_dtype, squeeze_excite


class _BatchNormActSe(torch.autograd.Function):
    """mean and rstd have been computed from z; ``count`` is as in batch_norm_act."""

    @staticmethod
    def forward(ctx, z, weight, bias, w1, b1, w2, b2, mean, rstd, count, codes, group, impl):
        y, *small = impl.forward(z, mean, rstd, weight, bias, w1, b1, w2, b2, *codes)
        ctx.save_for_backward(z, mean, rstd, weight, bias, w1, w2, *small)
        ctx.count, ctx.codes, ctx.group, ctx.impl = count, codes, group, impl
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        need_dz, *need_others = ctx.needs_input_grad[:7]
        inputs, others = _reduced(ctx, dy, ctx.saved_tensors, need_dz, need_others)
        dz = ctx.impl.backward(*inputs, ctx.count or 1.0, ctx.codes[0]) if need_dz else None
        return dz, *others, *(None,) * 6


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
    process_group=None,
    moments: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """``squeeze_excite`` of what ``batch_norm_act`` returns, with the arguments of both; ``act`` takes what is
    ``in_act`` there."""
    _common.check_images("batch_norm_act", x)
    impl = select("depthwise_bn_act_se", IMPLS, x)
    running, affine = (running_mean, running_var), (weight, bias)
    if impl.backward is None or x.numel() == 0:
        norm = (*running, *affine, training, momentum, eps)
        a = batch_norm_act(x, *norm, act=act, process_group=process_group, moments=moments)
        return squeeze_excite(a, *se, act=se_act, gate=gate)
    group = process_group if training else None
    _check(x, None, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    _check_statistics(x, *running, training, group is not None)
    _check_moments(x, moments, training)
    _check_weights(x, *se)
    _common.check_same_device("squeeze_excite", x, **dict(zip(("w1", "b1", "w2", "b2"), se)))
    codes = [
        _codes.code("act", act, _codes.INPUT_ACTIVATIONS),
        _codes.code("se_act", se_act, _codes.ACTIVATIONS),
        _codes.code("gate", gate, _codes.ACTIVATIONS),
    ]
    dtype = _weight_dtype(x, *se)
    se = tuple(w if w is None else w.to(dtype).contiguous() for w in se)
    x = _common.dense(x)
    mean, rstd, count = _statistics(x, *running, training, momentum, eps, group, impl.norm, moments)
    if _common.needs_autograd(x, *affine, *se):
        return _BatchNormActSe.apply(x, *affine, *se, mean, rstd, count, codes, group, impl)
    return impl.forward(x, mean, rstd, *affine, *se, *codes)[0]

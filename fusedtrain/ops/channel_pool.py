r"""channel_pool: one number per sample and channel, with an activation fused in front.

.. math:: p_{nc} = \tfrac{1}{HW} \sum_{hw} a(x_{nchw}) \quad\text{or}\quad
          p_{nc} = \tfrac12 \tfrac{1}{HW} \sum_{hw} a(x_{nchw}) + \tfrac12 \max_{hw} a(x_{nchw})
"""

import torch
from torch import Tensor

from fusedtrain.backend import Impl, register, select
from fusedtrain.ops import _activation, _codes, _common, _schema


def reference(x: Tensor, pool: str, in_act: str) -> Tensor:
    a = _activation.REFERENCE[in_act](x)
    if pool == "avg":
        return a.mean((2, 3))
    return 0.5 * a.mean((2, 3)) + 0.5 * a.amax((2, 3))


@_schema.register_fake("channel_pool")
def _fake(x, pool, in_act):
    def small(present):
        return x.new_empty(x.shape[:2] if present else (0,), dtype=_common.acc_dtype(x))

    return small(True), small(pool == 1), small(pool == 1)


@_schema.register_fake("channel_pool_backward")
def _fake_backward(dpooled, x, peak, ties, pool, in_act):
    return torch.empty_like(x)


_SMALL = 32768  # elements, below which the calls cost more than stock's (benchmarks/bench_dispatch.py)
_FEW_ROWS = 2_000_000  # elements of channels_last images


def _slower(x: Tensor, pool: int = 0, in_act: int = 0) -> str | None:
    if _common.is_less(x.numel(), _SMALL):
        return f"x has fewer than {_SMALL} elements: stock calls cost less"
    if pool or in_act or not _common.is_forward_alone_on_zen4(x):
        return None
    if not _common.is_channels_last(x) or _common.is_less(x.numel(), _FEW_ROWS):
        return "stock PyTorch was measured faster: float32 without a gradient, contiguous or few elements"
    return None


def _asked(x, pool, in_act) -> tuple:
    return x, _codes.code("pool", pool, _codes.POOLS), _codes.code("in_act", in_act, _codes.INPUT_ACTIVATIONS)


_OP, _BACKWARD = torch.ops.fusedtrain.channel_pool, torch.ops.fusedtrain.channel_pool_backward
IMPLS = register(
    "channel_pool",
    {
        "cuda": Impl(_OP.default, _BACKWARD.default, _common.why_not_cuda),
        "cpu": Impl(_OP.default, _BACKWARD.default, _common.why_not_cpu, _slower),
        "triton": Impl(_OP.triton, _BACKWARD.triton, _common.why_not_triton, _common.triton_slower),
        "reference": Impl(reference, None, _common.never_why_not),
    },
    _asked,
)


class _ChannelPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, pool, in_act, impl):
        pooled, peak, ties = impl.forward(x, pool, in_act)
        ctx.save_for_backward(x, peak, ties)
        ctx.codes, ctx.impl = (pool, in_act), impl
        # In compiled code torch 2.11 loses the gradient of a `to` without effect.
        return _common.owned(_common.cast(pooled, x.dtype))

    @staticmethod
    @_common.once_differentiable
    def backward(ctx, dpooled):
        x, peak, ties = ctx.saved_tensors
        return ctx.impl.backward(dpooled.to(_common.acc_dtype(x)), x, peak, ties, *ctx.codes), None, None, None


def channel_pool(x: Tensor, *, pool: str = "avg", in_act: str = "identity") -> Tensor:
    r"""Pools every channel of every sample to one number, the first half of a squeeze-and-excitation block.

    .. math:: p = \mathrm{mean}_{hw}\, a(x) \quad\text{or}\quad p = \tfrac12 \mathrm{mean}_{hw}\, a(x)
              + \tfrac12 \max_{hw} a(x)

    Args:
        x: images ``[N, C, H, W]``; contiguous and channels_last run natively, other strides are copied first; float32,
            bfloat16, float16 or float64.
        pool: "avg" is the mean, "avg_max" the average of mean and maximum.
        in_act: the activation :math:`a` in front: "identity", "relu", "silu", "gelu", "hard_swish" or "relu6".

    Returns:
        ``[N, C]`` in the dtype of ``x``. For backward x is kept, and for "avg_max" the maximum and its count.

    Raises:
        ValueError: ``x`` is not 4-dimensional, has no pixels for "avg_max", or a name is unknown.
        TypeError: the dtype of ``x`` is not supported.
        RuntimeError: a forced backend cannot run on ``x``.

    Cost: reads x once; backward reads x only where ``in_act`` or "avg_max" needs it and writes dx once.
    Numerics: sums in float32 (float64 for float64) in a fixed order: deterministic, independent of threads. Ties of the
    maximum share its gradient, as in :func:`torch.amax`.
    Source: Hu et al., Squeeze-and-Excitation Networks, https://arxiv.org/abs/1709.01507
    """
    _common.check_images("channel_pool", x)
    pool_code = _codes.code("pool", pool, _codes.POOLS)
    act_code = _codes.code("in_act", in_act, _codes.INPUT_ACTIVATIONS)
    _common.check_pixels("channel_pool", x, pool)
    impl = select("channel_pool", IMPLS, x, pool_code, act_code)
    if impl.backward is None:
        return impl.forward(x, pool, in_act)
    x = _common.dense(x)
    if _common.needs_autograd(x):
        return _common.apply(_ChannelPool, x, pool_code, act_code, impl)
    return impl.forward(x, pool_code, act_code)[0].to(x.dtype)


_AVG_MAX = _codes.code("pool", "avg_max", _codes.POOLS)


def _means(pooled: Tensor, peak: Tensor) -> Tensor:
    """The mean, of which ``pooled`` has half, and half of ``peak``."""
    return torch.where(peak.isinf(), pooled, 2 * pooled - peak)


class _MeanAndMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, impl):
        pooled, peak, ties = impl.forward(x, _AVG_MAX, 0)
        ctx.save_for_backward(x, peak, ties)
        ctx.impl = impl
        return _means(pooled, peak).to(x.dtype), peak.to(x.dtype)

    @staticmethod
    @_common.once_differentiable
    def backward(ctx, dmean, dmax):
        x, peak, ties = ctx.saved_tensors
        dmean, dmax = (d.to(peak.dtype) for d in (dmean, dmax))
        dx = ctx.impl.backward(2 * dmax, x, peak, ties, _AVG_MAX, 0)  # which has dmax over all pixels, too
        rest = (dmean - dmax) / (x.shape[2] * x.shape[3])
        return dx.add_(rest.to(x.dtype)[:, :, None, None]), None


def mean_and_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what :func:`channel_pool` makes an average of, the mean and the maximum ``[N, C]`` of every channel.

    From one pass over images of 16 bits. Of others the mean would have the rounding error of the maximum, and stock
    PyTorch takes two.
    """
    _common.check_images("channel_pool", x)
    _common.check_pixels("channel_pool", x, "avg_max")
    impl = select("channel_pool", IMPLS, x, _AVG_MAX, 0)
    if impl.backward is None or x.element_size() > 2:
        return x.mean((2, 3)), x.amax((2, 3))
    x = _common.dense(x)
    if _common.needs_autograd(x):
        return _common.apply(_MeanAndMax, x, impl)
    pooled, peak, _ = impl.forward(x, _AVG_MAX, 0)
    return _means(pooled, peak).to(x.dtype), peak.to(x.dtype)

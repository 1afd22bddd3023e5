r"""channel_scale: one factor per sample and channel, with an activation fused in front.

.. math:: y_{nchw} = a(x_{nchw}) \, g_{nc}
"""

import torch
from torch import Tensor

from fusedtrain.backend import Impl, register, select
from fusedtrain.ops import _activation, _codes, _common, _schema


def reference(x: Tensor, gate: Tensor, in_act: str) -> Tensor:
    return _activation.REFERENCE[in_act](x) * gate.to(x.dtype)[:, :, None, None]


@_schema.register_fake("channel_scale")
def _fake(x, gate, in_act):
    return torch.empty_like(x)


@_schema.register_fake("channel_scale_backward")
def _fake_backward(dy, x, gate, in_act, need_dx, need_dgate):
    dx = torch.empty_like(x) if need_dx else x.new_empty(0)
    return dx, gate.new_empty(gate.shape if need_dgate else (0,), dtype=_common.acc_dtype(x))


_SMALL = 65536  # elements, below which the calls cost more than stock's (benchmarks/bench_dispatch.py)
_IN_CACHE = 4 << 20  # elements, from which on results go past the caches


def _slower(x: Tensor, gate: Tensor | None = None, in_act: int = 0) -> str | None:
    if _common.is_less(x.numel(), _SMALL):
        return f"x has fewer than {_SMALL} elements: stock calls cost less"
    if in_act or not _common.is_less(x.numel(), _IN_CACHE) or not _common.is_forward_alone_on_zen4(x, gate):
        return None
    return f"stock PyTorch was measured faster: fewer than {_IN_CACHE:,} elements in float32 without a gradient"


def _asked(x, in_act, gate=None) -> tuple:
    return x, gate, _codes.code("in_act", in_act, _codes.INPUT_ACTIVATIONS)


_OP, _BACKWARD = torch.ops.fusedtrain.channel_scale, torch.ops.fusedtrain.channel_scale_backward
IMPLS = register(
    "channel_scale",
    {
        "cuda": Impl(_OP.default, _BACKWARD.default, _common.why_not_cuda),
        "cpu": Impl(_OP.default, _BACKWARD.default, _common.why_not_cpu, _slower),
        "triton": Impl(_OP.triton, _BACKWARD.triton, _common.why_not_triton, _common.triton_slower),
        "reference": Impl(reference, None, _common.never_why_not),
    },
    _asked,
)


class _ChannelScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, in_act, impl):
        ctx.save_for_backward(x, gate)
        ctx.in_act, ctx.impl = in_act, impl
        return _common.owned(impl.forward(x, gate, in_act))

    @staticmethod
    @_common.once_differentiable
    def backward(ctx, dy):
        x, gate = ctx.saved_tensors
        need_dx, need_dgate = _common.needed(ctx, 0, 1)[:2]
        dx, dgate = ctx.impl.backward(_common.dense_like(dy, x), x, gate, ctx.in_act, need_dx, need_dgate)
        return dx if need_dx else None, dgate.to(gate.dtype) if need_dgate else None, None, None


def channel_scale(x: Tensor, gate: Tensor, *, in_act: str = "identity") -> Tensor:
    r"""Multiplies every channel of every sample by its own factor, the last step of a squeeze-and-excitation block.

    .. math:: y = a(x) \, g

    Args:
        x: images ``[N, C, H, W]``; contiguous and channels_last run natively, other strides are copied first; float32,
            bfloat16, float16 or float64.
        gate: factors ``[N, C]`` in the dtype of ``x``, or in float32.
        in_act: the activation :math:`a` in front: "identity", "relu", "silu", "gelu", "hard_swish" or "relu6".

    Returns:
        ``[N, C, H, W]`` in the dtype and memory format of ``x``. For backward x and gate are kept.

    Raises:
        ValueError: ``x`` is not 4-dimensional, ``gate`` is not ``[N, C]``, or a name is unknown.
        TypeError: a dtype is not supported.
        RuntimeError: a forced backend cannot run on ``x``, or the two are on different devices.

    Cost: reads x once, writes y once; backward reads x and dy once and writes dx once, for both gradients.
    Numerics: the gate's gradient is summed in float32 (float64 for float64) in a fixed order: deterministic,
    independent of threads.
    Source: Hu et al., Squeeze-and-Excitation Networks, https://arxiv.org/abs/1709.01507
    """
    _common.check_images("channel_scale", x)
    act_code = _codes.code("in_act", in_act, _codes.INPUT_ACTIVATIONS)
    if not isinstance(gate, Tensor) or gate.shape != x.shape[:2]:
        raise ValueError(
            f"channel_scale: gate must have shape [N, C] = {list(x.shape[:2])},"
            f" got {list(gate.shape) if isinstance(gate, Tensor) else type(gate).__name__}"
        )
    if gate.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"channel_scale: gate must have the dtype of x ({x.dtype}) or float32, got {gate.dtype}")
    _common.check_same_device("channel_scale", x, gate=gate)
    impl = select("channel_scale", IMPLS, x, gate, act_code)
    if impl.backward is None:
        return impl.forward(x, gate, in_act)
    x, gate = _common.dense(x), gate.contiguous()
    if _common.needs_autograd(x, gate):
        return _common.apply(_ChannelScale, x, gate, act_code, impl)
    return impl.forward(x, gate, act_code)

r"""squeeze_excite: channel attention from the channels' own means.

.. math::
    p = \mathrm{pool}(a(x)), \quad g = \sigma(W_2\, \phi(W_1 p + b_1) + b_2), \quad y_{nchw} = a(x_{nchw})\, g_{nc}
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtrain.backend import Impl, register, select
from fusedtrain.ops import _activation, _codes, _common, _schema
from fusedtrain.ops._remembered import remembered
from fusedtrain.ops.channel_pool import reference as pool_reference


def reference(x, w1, b1, w2, b2, act: str, gate: str, pool: str, in_act: str) -> Tensor:
    a = _activation.REFERENCE[in_act](x)
    pooled = pool_reference(a, pool, "identity")
    hidden = _activation.REFERENCE[act](F.linear(pooled, w1.flatten(1), b1))
    logits = F.linear(hidden, w2.flatten(1), b2)
    return a * _activation.REFERENCE[gate](logits)[:, :, None, None]


@_schema.register_fake("squeeze_excite")
def _fake(x, w1, b1, w2, b2, act, gate, pool, in_act):
    def small(*shape):
        return x.new_empty(shape, dtype=_common.acc_dtype(x))

    n, c, r = x.shape[0], x.shape[1], w1.shape[0]
    peak, ties = (small(n, c), small(n, c)) if pool == 1 else (small(0), small(0))
    return torch.empty_like(x), small(n, c), small(n, r), small(n, c), peak, ties


@_schema.register_fake("squeeze_excite_backward")
def _fake_backward(dy, x, w1, w2, pooled, hidden, logits, peak, ties, act, gate, pool, in_act, need_dx, need_dw):
    dx = torch.empty_like(x) if need_dx else x.new_empty(0)
    shapes = (w1.shape, (w1.shape[0],), w2.shape, (w2.shape[0],))
    return dx, *(w1.new_empty(shape if need_dw else (0,)) for shape in shapes)


def _asked(x, **_) -> tuple:
    return (x,)


_OP, _BACKWARD = torch.ops.fusedtrain.squeeze_excite, torch.ops.fusedtrain.squeeze_excite_backward
IMPLS = register(
    "squeeze_excite",
    {
        "cuda": Impl(_OP.default, _BACKWARD.default, _common.why_not_cuda),
        "cpu": Impl(_OP.default, _BACKWARD.default, _common.why_not_cpu),
        "triton": Impl(_OP.triton, _BACKWARD.triton, _common.why_not_triton, _common.triton_slower),
        "reference": Impl(reference, None, _common.never_why_not),
    },
    _asked,
)


class _SqueezeExcite(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2, codes, impl):
        y, *saved = impl.forward(x, w1, b1, w2, b2, *codes)
        ctx.save_for_backward(x, w1, w2, *saved)
        ctx.codes, ctx.impl = codes, impl
        return _common.owned(y)

    @staticmethod
    @_common.once_differentiable
    def backward(ctx, dy):
        x, w1, w2, *saved = ctx.saved_tensors
        need_dx, *need = _common.needed(ctx, 0)[:5]
        dy = _common.dense_like(dy, x)
        dx, dw1, db1, dw2, db2 = ctx.impl.backward(dy, x, w1, w2, *saved, *ctx.codes, need_dx, any(need))
        dw = (_common.strided_like(dw1, w1), db1, _common.strided_like(dw2, w2), db2)
        return dx if need_dx else None, *_common.wanted(dw, need), None, None


def _check_weights(x: Tensor, c: int, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> None:
    """Checks shapes for images of c channels, and devices for that of ``x``."""
    shape1, shape2 = w1.shape, w2.shape
    if shape1[1:] != (c, 1, 1) and shape1[1:] != (c,):  # compiled code does not find a symbolic c by `in`
        raise ValueError(f"squeeze_excite: w1 must have shape [R, {c}] or [R, {c}, 1, 1], got {list(shape1)}")
    r = shape1[0]
    if shape2 != (c, r, 1, 1) and shape2 != (c, r):
        raise ValueError(f"squeeze_excite: w2 must have shape [{c}, {r}] or [{c}, {r}, 1, 1], got {list(shape2)}")
    for name, bias, size in (("b1", b1, r), ("b2", b2, c)):
        if bias is not None and bias.shape != (size,):
            raise ValueError(f"squeeze_excite: {name} must have shape [{size}] or be None, got {list(bias.shape)}")
    _common.check_same_device("squeeze_excite", x, w1=w1, b1=b1, w2=w2, b2=b2)


def _weight_dtype(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> torch.dtype:
    """The one dtype in which the operator takes the weights: theirs where it can, float32 otherwise."""
    dtypes = {t.dtype for t in (w1, b1, w2, b2) if t is not None}
    if dtypes == {x.dtype}:
        return x.dtype
    if not _common.is_autocast(x) or x.dtype == torch.float64 or torch.float64 in dtypes:
        raise TypeError(
            f"squeeze_excite: weights and biases must have the dtype of x ({x.dtype}) outside autocast,"
            f" got {', '.join(sorted(str(d) for d in dtypes))}"
        )
    return torch.float32


def _dense_weights(dtype: torch.dtype, weights: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [w if w is None or (w.dtype == dtype and w.is_contiguous()) else w.to(dtype).contiguous() for w in weights]


def squeeze_excite(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    *,
    act: str = "relu",
    gate: str = "sigmoid",
    pool: str = "avg",
    in_act: str = "identity",
) -> Tensor:
    r"""Scales every channel by a gate computed from the pooled channels (squeeze-and-excitation), as one op.

    .. math:: y = a(x) \cdot \sigma(W_2\, \phi(W_1\, \mathrm{pool}(a(x)) + b_1) + b_2)

    Args:
        x: images ``[N, C, H, W]``; contiguous and channels_last run natively, other strides are copied first; float32,
            bfloat16, float16 or float64.
        w1: first fully connected layer, ``[R, C]`` (Linear) or ``[R, C, 1, 1]`` (1x1 convolution), in the dtype of
            ``x``; under autocast any of float32, bfloat16 and float16.
        b1: its bias ``[R]``, or None.
        w2: second layer, ``[C, R]`` or ``[C, R, 1, 1]``.
        b2: its bias ``[C]``, or None.
        act: :math:`\phi`: "identity", "relu", "silu", "gelu", "hard_swish", "relu6", "sigmoid", "hard_sigmoid",
            "tanh" or "half_tanh".
        gate: :math:`\sigma`, one of the same; "half_tanh" is :math:`(\tanh(x) + 1) / 2`.
        pool: "avg" is the mean, "avg_max" the average of mean and maximum.
        in_act: the activation :math:`a` in front: "identity", "relu", "silu", "gelu", "hard_swish" or "relu6".

    Returns:
        ``[N, C, H, W]`` in the dtype and memory format of ``x``, under autocast too. For backward x is kept, and beside
        it only ``[N, C]`` and ``[N, R]`` vectors in float32.

    Raises:
        ValueError: a shape does not fit or a name is unknown.
        TypeError: a dtype is not supported, or differs from that of ``x`` outside autocast.
        RuntimeError: a forced backend cannot run on ``x``, or tensors are on different devices.

    Cost: forward reads x twice (the second time from cache where a group of samples fits) and writes y; backward reads
    x and dy twice and writes dx. The stock modules take 4 and 7 such passes and about 8 launches each way.
    Numerics: pooling and both layers in float32 (float64 for float64), one rounding at the end; deterministic,
    independent of threads.
    Source: Hu et al., Squeeze-and-Excitation Networks, https://arxiv.org/abs/1709.01507
    """
    weights, names = (w1, b1, w2, b2), (act, gate, pool, in_act)
    impl, codes, dtype, recording, plain = _plan(x, *weights, *names, _common.is_autocast(x))
    if impl.backward is None:
        return impl.forward(x, *weights, *names)
    x = _common.dense(x)
    weights = _dense_weights(dtype, weights)
    if recording:
        return (_common.record if plain else _common.apply)(_SqueezeExcite, x, *weights, codes, impl)
    return impl.forward(x, *weights, *codes)[0]


@remembered
def _plan(x, w1, b1, w2, b2, act, gate, pool, in_act, autocast) -> tuple:
    """Checks the arguments of the op; ``autocast``: whether it counts. Returns what runs, the codes, the dtype of the
    weights as the operator takes them, whether gradients are recorded, and of plain tensors."""
    _common.check_images("squeeze_excite", x)
    _check_weights(x, x.shape[1], w1, b1, w2, b2)
    _common.check_pixels("squeeze_excite", x, pool)
    codes = (
        _codes.code("act", act, _codes.ACTIVATIONS),
        _codes.code("gate", gate, _codes.ACTIVATIONS),
        _codes.code("pool", pool, _codes.POOLS),
        _codes.code("in_act", in_act, _codes.INPUT_ACTIVATIONS),
    )
    dtype = _weight_dtype(x, w1, b1, w2, b2)
    impl = select("squeeze_excite", IMPLS, x)
    recording = impl.backward is not None and _common.needs_autograd(x, w1, b1, w2, b2)
    return impl, codes, dtype, recording, recording and _common.plain(x, w1, b1, w2, b2)

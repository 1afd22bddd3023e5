r"""depthwise_bn_act_se: a depthwise convolution, batch normalisation, an activation and squeeze-and-excitation.

.. math:: z = w \star x + b, \quad u = \gamma \frac{z - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta, \quad
    y = a(u) \cdot \sigma(W_2\, \phi(W_1\, \mathrm{mean}_{hw}(a(u)) + b_1) + b_2)

``depthwise_bn_act_se_conv`` convolves and gathers the statistics of z as it writes it; on CPUs, where stock may be
faster, depthwise_conv2d and batch_norm_act do. The other operators are what follows, on z: the one named as the op
pools, computes the gate and writes y; ``_reduce`` gathers in one pass over dy and z all sums of the backward pass, and
the gradients of the gate's weights; ``_backward`` writes dz, or ``_conv_backward`` what the convolution's backward pass
makes of it. Without a gate, batch_norm_act writes y and sums.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedtrain.backend import Impl, register, select
from fusedtrain.ops import _codes, _common, _schema
from fusedtrain.ops._remembered import remembered
from fusedtrain.ops._windows import padded_first
from fusedtrain.ops.batch_norm_act import (
    _OWN,
    _all_reduced,
    _and_count,
    _check_statistics,
    _count_up,
    _fake_stats,
    _own_passes,
    _statistics,
    batch_norm_act,
    is_fixed,
)
from fusedtrain.ops.batch_norm_act import IMPLS as NORM_IMPLS
from fusedtrain.ops.batch_norm_act import _check as _check_norm
from fusedtrain.ops.batch_norm_act import reference as norm_reference
from fusedtrain.ops.depthwise_conv2d import BACKWARD_IMPLS as CONV_BACKWARD_IMPLS
from fusedtrain.ops.depthwise_conv2d import IMPLS as CONV_IMPLS
from fusedtrain.ops.depthwise_conv2d import _check as _check_conv
from fusedtrain.ops.depthwise_conv2d import _fake as _fake_convolved
from fusedtrain.ops.depthwise_conv2d import _fake_backward as _fake_gradients
from fusedtrain.ops.depthwise_conv2d import _geometry, choose, depthwise_conv2d
from fusedtrain.ops.depthwise_conv2d import reference as conv_reference
from fusedtrain.ops.pointwise_conv2d import as_planned, unchecked
from fusedtrain.ops.pointwise_conv2d import choose as choose_projection
from fusedtrain.ops.pointwise_conv2d import gradients as projection_gradients
from fusedtrain.ops.pointwise_conv2d import run as run_projection
from fusedtrain.ops.squeeze_excite import _check_weights as _check_gate
from fusedtrain.ops.squeeze_excite import _dense_weights, _weight_dtype, squeeze_excite
from fusedtrain.ops.squeeze_excite import reference as gate_reference


def reference(x, conv, norm, se, geometry, act: str, se_act: str, gate: str) -> Tensor:
    """``conv`` are weight and bias, ``norm`` the arguments of F.batch_norm behind its input."""
    z = conv_reference(x, *conv, *geometry, 0)
    a = norm_reference(z, *norm, act, None, False)
    return a if se is None else gate_reference(a, *se, se_act, gate, "avg", "identity")


def _single_ops(x, conv, norm, se, geometry, act: str, se_act: str, gate: str, group, counter) -> Tensor:
    """The same by the three ops, each on the backend that it chooses, or that is forced."""
    z = depthwise_conv2d(x, *conv, *geometry)
    a = batch_norm_act(z, *norm, act=act, process_group=group, num_batches_tracked=counter)
    return a if se is None else squeeze_excite(a, *se, act=se_act, gate=gate)


def _vectors(z: Tensor, *lengths: int) -> list[Tensor]:
    return [z.new_empty(z.shape[0], length, dtype=_common.acc_dtype(z)) for length in lengths]


@_schema.register_fake("depthwise_bn_act_se_conv")
def _fake_conv(x, weight, bias, stride, padding, dilation):
    z = _fake_convolved(x, weight, bias, stride, padding, dilation, 0)
    return z, *_fake_stats(z)


@_schema.register_fake("depthwise_bn_act_se")
def _fake(z, mean, rstd, weight, bias, w1, b1, w2, b2, act, se_act, gate, residual=None, relu=False):
    c, r = z.shape[1], w1.shape[0]
    return torch.empty_like(z), *_vectors(z, c, r, c)


@_schema.register_fake("depthwise_bn_act_se_reduce")
def _fake_reduce(dy, z, mean, rstd, weight, bias, w1, w2, pooled, hidden, logits, act, se_act, gate, need_dw):
    c, sums = z.shape[1], [z.new_empty(z.shape[1], dtype=_common.acc_dtype(z)) for _ in range(2)]
    shapes = (w1.shape, (w1.shape[0],), w2.shape, (w2.shape[0],))
    return *sums, *_vectors(z, c, c), *(w1.new_empty(shape if need_dw else (0,)) for shape in shapes)


@_schema.register_fake("depthwise_bn_act_se_backward")
def _fake_backward(dy, z, mean, rstd, weight, bias, gate, dpooled, sum_du, sum_du_xhat, count, act):
    return torch.empty_like(z)


@_schema.register_fake("depthwise_bn_act_se_conv_backward")
def _fake_conv_backward(
    dy, z, mean, rstd, weight, bias, gate, dpooled, sum_du, sum_du_xhat, count, act, x, kernel, *geometry_and_needs
):
    return _fake_gradients(dy, x, kernel, *geometry_and_needs)


@dataclass(frozen=True, slots=True)
class _BlockImpl(Impl):
    """``reduce`` gathers the sums that ``backward`` needs for dz, ``conv_backward`` for the convolution's gradients.

    ``convolve`` makes z with its statistics; ``norm`` are the operators of batch_norm_act. ``train`` and
    ``train_backward`` do all of a direction in one call, for the statistics of one process's batch, and ``scale`` makes
    y once more; None where there are no such.
    """

    reduce: Callable | None = None
    conv_backward: Callable | None = None
    convolve: Callable | None = None
    norm: Impl | None = None
    train: Callable | None = None
    train_backward: Callable | None = None
    scale: Callable | None = None


def _impl(overload: str, norm: Impl, why_not, slower=None) -> _BlockImpl:
    parts = ("", "_backward", "_reduce", "_conv_backward", "_conv")
    ops = (getattr(getattr(torch.ops.fusedtrain, f"depthwise_bn_act_se{part}"), overload) for part in parts)
    forward, backward, *others = ops
    whole = ()
    if overload == "default":
        parts = ("train_", "train_backward", "scale")
        whole = (_schema.untraced(f"depthwise_bn_act_se_{part}") for part in parts)
    return _BlockImpl(forward, backward, why_not, slower, *others, norm, *whole)


def _slower_triton(x, *args) -> str | None:
    if x.is_cuda and _common.is_channels_last(x):
        return "stock PyTorch was measured faster than Triton's convolutions of channels_last images"
    return _common.triton_slower(x)


def _asked(x, weight=None, se=None, **_) -> tuple:
    return *_common.autocast(x, weight), se


IMPLS = register(
    "depthwise_bn_act_se",
    {
        "cuda": _impl("default", NORM_IMPLS["cuda"], _common.why_not_cuda),
        "cpu": _impl("default", NORM_IMPLS["cpu"], _common.why_not_cpu),
        "triton": _impl("triton", NORM_IMPLS["triton"], _common.why_not_triton, _slower_triton),
        "reference": _BlockImpl(_single_ops, None, _common.never_why_not),
    },
    _asked,
)


def _of_the_others(norm_weight, norm_bias, w1, w2, dgamma, dbeta, *dse, needed) -> tuple:
    """Those gradients of the normalisation's and the gate's parameters that are needed; w1 is None without a gate."""
    need_dgamma, need_dbeta, *need_se = needed
    if w1 is not None:
        dw1, db1, dw2, db2 = dse
        dse = _common.wanted((_common.strided_like(dw1, w1), db1, _common.strided_like(dw2, w2), db2), need_se)
    return (
        _common.cast(dgamma, norm_weight.dtype) if need_dgamma else None,
        _common.cast(dbeta, norm_bias.dtype) if need_dbeta else None,
        *(() if w1 is None else dse),
    )


def _reduced(ctx, dy, saved, need_dz: bool, needed) -> tuple[tuple, tuple]:
    """What ``backward`` takes to make dz, and the gradients of the normalisation's and the gate's parameters."""
    z, mean, rstd, norm_weight, norm_bias, w1, w2, *small = saved
    inputs = (_common.dense_like(dy, z), z, mean, rstd, norm_weight, norm_bias)
    *sums, gate, dpooled, dw1, db1, dw2, db2 = ctx.impl.reduce(*inputs, w1, w2, *small, *ctx.codes, any(needed[2:]))
    dbeta, dgamma = sums
    if ctx.count is None:
        sums = (None, None)
    elif need_dz and ctx.group is not None:
        sums = _all_reduced(*sums, ctx.group)
    found = (dgamma, dbeta, dw1, db1, dw2, db2)
    return (*inputs, gate, dpooled, *sums), _of_the_others(norm_weight, norm_bias, w1, w2, *found, needed=needed)


def _conv_gradients(ctx, inputs, x, weight, act: int, needed) -> tuple:
    """dx, dw and db of the convolution, from dz as the operators take its ``inputs``."""
    *inputs, sum_du, sum_du_xhat = inputs
    inputs, tail = (*inputs, *_and_count((sum_du, sum_du_xhat), ctx.count, inputs[0])), (*ctx.geometry, *needed)
    if ctx.conv_backward is None:
        return ctx.impl.conv_backward(*inputs, act, x, weight, *tail)
    return ctx.conv_backward(ctx.impl.backward(*inputs, act), x, weight, *tail)


def _of_the_weights(ctx, grads, needed) -> list[Tensor | None]:
    """Those of ``grads`` that are needed, of weights in the dtypes that they have."""
    grads = _common.wanted(grads, needed)
    return [g if g is None or kind is None else _common.cast(g, kind) for g, kind in zip(grads, ctx.kinds)]


def _in_one_call(ctx, x: Tensor) -> bool:
    own = ctx.conv_backward is None and ctx.group is None and ctx.count is not None
    return own and ctx.impl.train_backward is not None and _common.untraced(x)


def _all_gradients(ctx, needs, dy, x, weight, z, mean, rstd, norm_weight, norm_bias, w1, w2, *small) -> tuple:
    """What ``backward`` returns for the tensors that the op takes, in one call."""
    need_conv, needed = needs[:3], needs[3:9]
    inputs = (_common.dense_like(dy, z), x, weight, z, mean, rstd, norm_weight, norm_bias, w1, w2)
    tail = (*ctx.geometry, *ctx.codes, *need_conv, w1 is not None and any(needed[2:]))
    *grads, dgamma, dbeta, dw1, db1, dw2, db2 = ctx.impl.train_backward(*inputs, *(small or _NO_GATE[:3]), *tail)
    found = (dgamma, dbeta, dw1, db1, dw2, db2)
    others = _of_the_others(norm_weight, norm_bias, w1, w2, *found, needed=needed)
    return *_of_the_weights(ctx, grads, need_conv), *others


_NO_GATE = (None,) * 4


def _convolutions(impl: _BlockImpl, x: Tensor, weight: Tensor, bias, geometry) -> tuple[Callable, Callable | None]:
    """The convolution and its gradient, None where dz is handed over in cache. Inside the block the kernels straight
    from channels_last images gain where alone stock does."""
    (d, _, kh, kw), c, stride = weight.shape, x.shape[1], geometry[0]
    channels_last = _common.is_channels_last(x)
    square = kh == kw in (3, 5, 7) and stride[0] == stride[1] and d == c
    straight = channels_last and impl is IMPLS["cpu"] and square and c * x.element_size() >= 64
    in_cache = channels_last and impl.conv_backward is not None
    if straight and in_cache:
        return CONV_IMPLS["cpu"].forward, None
    forward, backward = choose(x, weight, bias, *geometry)
    if in_cache or (impl.conv_backward is not None and backward is CONV_BACKWARD_IMPLS["cpu"].forward):
        backward = None
    return CONV_IMPLS["cpu"].forward if straight else forward, backward


class _DepthwiseBnActSe(torch.autograd.Function):
    """z, mean and rstd have been computed from x, and ``made`` from these: y and vectors of the gate, or None.

    ``kernel`` is what autocast has made of ``weight``, or None where that is ``weight`` itself; ``count`` is as in
    batch_norm_act.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, norm_weight, norm_bias, w1, b1, w2, b2, z, mean, rstd, options):
        ctx.impl, ctx.conv_backward, ctx.codes, ctx.count, ctx.geometry, ctx.group, made, kernel = options
        ctx.kinds = None, weight.dtype, None if bias is None else bias.dtype
        weight = weight if kernel is None else kernel
        inputs = (z, mean, rstd, norm_weight, norm_bias, w1, b1, w2, b2)
        y, *small = ctx.impl.forward(*inputs, *ctx.codes) if made is None else made
        ctx.save_for_backward(x, weight, z, mean, rstd, norm_weight, norm_bias, w1, w2, *small)
        return y if made is not None else _common.owned(y)

    @staticmethod
    @_common.once_differentiable
    def backward(ctx, dy):
        x, weight, *saved = ctx.saved_tensors
        needs = _common.needed(ctx, 0, 1)
        need_conv, need_others = needs[:3], needs[3:9]
        if any(need_conv) and _in_one_call(ctx, x):
            return *_all_gradients(ctx, needs, dy, x, weight, *saved), *(None,) * 4
        inputs, others = _reduced(ctx, dy, saved, any(need_conv), need_others)
        grads = (None, None, None)
        if any(need_conv):
            grads = _conv_gradients(ctx, inputs, x, weight, ctx.codes[0], need_conv)
        return *_of_the_weights(ctx, grads, need_conv), *others, *(None,) * 4


class _DepthwiseBnAct(torch.autograd.Function):
    """The same without a gate: y and the sums by the operators of batch_norm_act."""

    @staticmethod
    def forward(ctx, x, weight, bias, norm_weight, norm_bias, z, mean, rstd, options):
        ctx.impl, ctx.conv_backward, ctx.codes, ctx.count, ctx.geometry, ctx.group, made, kernel = options
        ctx.kinds = None, weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight if kernel is None else kernel, z, mean, rstd, norm_weight, norm_bias)
        if made is not None:
            return made[0]
        return _common.owned(ctx.impl.norm.forward(z, mean, rstd, norm_weight, norm_bias, None, ctx.codes[0], False))

    @staticmethod
    @_common.once_differentiable
    def backward(ctx, dy):
        x, weight, *norm = ctx.saved_tensors
        needs = _common.needed(ctx, 0, 1, *_own_passes(ctx, 3, 4))
        need_conv, (need_dgamma, need_dbeta), act = needs[:3], needs[3:5], ctx.codes[0]
        if any(need_conv) and _in_one_call(ctx, x):
            return *_all_gradients(ctx, needs, dy, x, weight, *norm, None, None), *(None,) * 4
        inputs = (_common.dense_like(dy, norm[0]), *norm)
        sums, grads = (None, None), (None, None, None)
        if ctx.count is not None or need_dgamma or need_dbeta:
            sums = ctx.impl.norm.reduce(*inputs, None, act, False)
        dbeta, dgamma = sums
        if any(need_conv):
            if ctx.count is None:
                sums = (None, None)
            elif ctx.group is not None:
                sums = _all_reduced(*sums, ctx.group)
            grads = _conv_gradients(ctx, (*inputs, None, None, *sums), x, weight, act, need_conv)
        others = _of_the_others(*norm[3:], None, None, dgamma, dbeta, needed=(need_dgamma, need_dbeta))
        return *_of_the_weights(ctx, grads, need_conv), *others, *(None,) * 4


def _with_gate(impl: _BlockImpl, codes: list[int], *inputs) -> Tensor:
    return impl.forward(*inputs, *codes)[0]


def _with_factors(impl: _BlockImpl, act: int, *inputs) -> Tensor:
    return impl.scale(*inputs, act)


def _without_gate(norm: Impl, act: int, *inputs) -> Tensor:
    return norm.forward(*inputs, None, act, False)


class _Projection(torch.autograd.Function):
    """A 1x1 convolution of y that keeps what ``again`` makes y of, which the block keeps anyway, instead of y.

    ``cast`` are weight and bias as autocast has them, or None where they are these.
    """

    @staticmethod
    def forward(ctx, y, weight, bias, cast, again, *kept):
        ctx.kinds = None, weight.dtype, None if bias is None else bias.dtype
        weight, bias = (weight, bias) if cast is None else cast
        ctx.save_for_backward(weight, *kept)
        ctx.again, ctx.plan = again, choose_projection(y, weight, bias, [1, 1])
        return _common.owned(run_projection(y, weight, bias, [1, 1], ctx.plan))

    @staticmethod
    @_common.once_differentiable
    def backward(ctx, dout):
        weight, *kept = ctx.saved_tensors
        y, needed = ctx.again(*kept), _common.needed(ctx, 0, 1)[:3]
        grads = projection_gradients(dout, y, weight, [1, 1], ctx.plan, needed)
        return *_of_the_weights(ctx, grads, needed), None, None, *(None,) * len(kept)


# Elements of y: from here on computing it again costs about a hundredth of the step, see benchmarks/LOG.md.
_LARGE = 6_000_000


def _check_projection(x: Tensor, channels: int, weight: Tensor, bias: Tensor | None) -> None:
    if weight.shape[1:] != (channels, 1, 1):
        raise ValueError(
            f"depthwise_bn_act_se: projection must begin with a weight of shape [D, {channels}, 1, 1],"
            f" got {list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"depthwise_bn_act_se: the bias of projection must have shape [{weight.shape[0]}] or be None,"
            f" got {list(bias.shape)}"
        )
    _common.check_same_kind("depthwise_bn_act_se", x, **{"projection": weight, "the bias of projection": bias})


def _check(
    x, weight, bias, running_mean, running_var, norm_weight, norm_bias, se, training, synchronised, output, groups, eps
) -> None:
    _check_conv(x, weight, bias, groups)
    channels, vectors = weight.shape[0], {"norm_weight": norm_weight, "norm_bias": norm_bias}
    _check_norm(x, channels, running_mean=running_mean, running_var=running_var, **vectors)
    shape = (x.shape[0], channels, *output)
    _check_statistics(shape, running_mean, running_var, training, synchronised, eps)
    if se is not None:
        _check_gate(x, channels, *se)


def depthwise_bn_act_se(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    se: Sequence[Tensor | None] | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | tuple[int, int, int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    act: str = "identity",
    se_act: str = "relu",
    gate: str = "sigmoid",
    process_group=None,
    projection: tuple[Tensor, Tensor | None] | None = None,
    groups: int | None = None,
    num_batches_tracked: Tensor | None = None,
) -> Tensor:
    r"""Convolves every channel, normalises, activates, and scales by a gate: the middle of an inverted residual block.

    .. math:: u = \gamma \frac{w \star x + b - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta, \qquad
        y = a(u) \cdot \sigma(W_2\, \phi(W_1\, \mathrm{mean}_{hw}(a(u)) + b_1) + b_2)

    Args:
        x: images ``[N, C, H, W]``; contiguous and channels_last run natively, other strides are copied first; float32,
            bfloat16, float16 or float64.
        weight: kernels ``[C * m, 1, kh, kw]`` of the convolution, in the dtype of ``x``; under autocast any.
        bias: of the convolution, ``[C * m]``, or None.
        running_mean: ``[C * m]``, moved in place in training; :math:`\mu` in evaluation. None: not kept.
        running_var: ``[C * m]``, moved towards the unbiased variance; :math:`\sigma^2` in evaluation. None: not kept.
        norm_weight: :math:`\gamma`, ``[C * m]``, None for ones; these four share one dtype, that of ``x`` or float32.
        norm_bias: :math:`\beta`, ``[C * m]``, None for zeros.
        se: w1, b1, w2 and b2 of the gate as :func:`squeeze_excite` takes them, or None for no gate.
        training: normalise by the statistics of this batch, not by the running ones.
        momentum: share of this batch in the new running statistics.
        eps: added to the variance.
        stride: of the convolution, as for :func:`depthwise_conv2d`; so are the next two.
        padding: zeros around x.
        dilation: distance of the kernel's taps.
        act: the activation :math:`a`: "identity", "relu", "silu", "gelu", "hard_swish" or "relu6".
        se_act: the activation :math:`\phi` of the gate, one of :func:`squeeze_excite`.
        gate: the activation :math:`\sigma` of the gate, likewise.
        process_group: a ``torch.distributed`` group over which the statistics of a training batch are taken, as for
            :func:`batch_norm_act`.
        projection: weight ``[D, C * m, 1, 1]`` and bias (``[D]`` or None) of a 1x1 convolution to follow, in the dtype
            of ``x``. It does not keep a large :math:`y` but computes it again in backward.
        groups: C, to be compared with that of ``x``, as for :func:`depthwise_conv2d`.
        num_batches_tracked: one int64, counted up in training, or None.

    Returns:
        ``[N, C * m, Ho, Wo]``, or what ``projection`` makes of it, in the dtype and memory format of ``x``; under
        autocast in its dtype. For backward x and the convolution's output are kept, and beside them vectors of ``[C]``,
        ``[N, C]`` and ``[N, R]`` in float32; :math:`y` for ``projection`` where it has less than 6 million elements.

    Raises:
        ValueError: a shape does not fit, a name is unknown, running statistics are missing, or a training batch has one
            value per channel. Nothing has changed then.
        TypeError: a dtype is not supported, or differs from that of ``x`` outside autocast.
        RuntimeError: a forced backend cannot run, or tensors are on different devices.

    Cost: forward reads x and writes z, on a GPU with its statistics, which elsewhere read z once more; reads z to pool,
        and, on a CPU from cache where a group of samples fits, to write y. Backward reads dy and z twice, the second
        time to make dz, on a CPU a few images at a time, which the convolution's gradient takes from cache; that reads
        x and writes dx. Stock modules take about twice as many passes and keep four images instead of two. Where
        ``fusedtrain.explain`` says so, the three ops run one after another.
    Numerics: as the three ops; the normalised and activated images are never rounded to the dtype. Deterministic,
        and independent of threads where these are.
    Source: Sandler et al., https://arxiv.org/abs/1801.04381; Howard et al., https://arxiv.org/abs/1905.02244
    """
    if torch._C._is_any_autocast_enabled():
        _common.check_images("depthwise_bn_act_se", x)
    x, padding = padded_first(x, padding)
    apart = _common.untraced(x)
    cast = _common.autocast_apart if apart else _common.autocast
    conv = cast(x, weight, bias)
    affine, running = (norm_weight, norm_bias), (running_mean, running_var)
    after = () if projection is None else cast(x, *projection)[1:]
    own = (weight, bias) if apart else conv[1:]
    names, window, autocast = (act, se_act, gate), (stride, padding, dilation), _common.is_autocast(x)
    norm = (*running, *affine, training, eps, process_group is not None)
    impl, geometry, codes, gate_dtype, convolutions, recording, plain = _plan(
        *conv, own, norm, se, window, names, after, groups, autocast
    )
    group, counter = (process_group, num_batches_tracked) if training else (None, None)
    if impl is None:
        norm = (*running, *affine, training, momentum, eps)
        y = _single_ops(x, (weight, bias), norm, se, (stride, padding, dilation), act, se_act, gate, group, counter)
        return _project(y, projection) if after else y
    x, weight, bias = _common.dense(conv[0]), conv[1].contiguous(), None if bias is None else conv[2].contiguous()
    if se is not None:
        se = _dense_weights(gate_dtype, se)
    norm, moments, made = impl.norm, (), None
    with _common.no_grad():
        if torch.compiler._is_exporting_flag:
            x, weight, bias = (None if t is None else t.detach() for t in (x, weight, bias))
        convolve, conv_backward = convolutions or _convolutions(impl, x, weight, bias, geometry)
        gathers = training and (impl is not IMPLS["cpu"] or convolve is CONV_IMPLS["cpu"].forward)
        if gathers and group is None and impl.train is not None and apart:
            inputs = (x, weight, bias, *running, counter, *affine, *(se or _NO_GATE), momentum, eps)
            y, z, mean, rstd, *small, factors = impl.train(*inputs, *geometry, *codes)
            made, count = (y, *small), _OWN
        else:
            _count_up(counter)
            if gathers:
                z, *moments = impl.convolve(x, weight, bias, *geometry)
            else:  # stock convolutions may be faster on CPUs
                z = _common.dense_like(convolve(x, weight, bias, *geometry, 0), x)
            mean, rstd, count = _statistics(z, *running, training, momentum, eps, group, norm, moments)
    kept = (z, mean, rstd, *affine)
    if se is None:
        again = functools.partial(_without_gate, norm, codes[0])
    elif made is None:
        again, kept = functools.partial(_with_gate, impl, codes), (*kept, *se)
    else:
        again, kept = functools.partial(_with_factors, impl, codes[0]), (*kept, factors)
    if not recording:
        y = _common.in_format_of(again(*kept) if made is None else y, x)
        return _project(y, projection) if after else y
    options = impl, conv_backward, codes, count, geometry, group, made, weight if apart else None
    own = own if apart else (weight, bias)
    apply = _common.record if plain else _common.apply
    if se is None:
        y = apply(_DepthwiseBnAct, x, *own, *affine, z, mean, rstd, options)
    else:
        y = apply(_DepthwiseBnActSe, x, *own, *affine, *se, z, mean, rstd, options)
    y = _common.in_format_of(y, x)
    if not after:
        return y
    if _common.is_less(y.numel(), _LARGE):
        return _project(y, projection)
    return _common.apply(_Projection, y, *(projection if apart else after), after if apart else None, again, *kept)


@remembered
def _plan(x, weight, bias, own, norm, se, window, names, projection, groups, autocast) -> tuple:
    """Checks the arguments of the op, which autocast has cast.

    Args:
        own: weight and bias as autograd knows them.
        norm: what :func:`_check` takes of the normalisation.
        autocast: whether it counts.

    Returns:
        What runs, None for the three ops; stride, padding and dilation; the codes; the dtype of the gate's weights as
        the operators take them; the convolutions of x where that is dense; whether gradients are recorded, and of plain
        tensors.
    """
    _common.check_images("depthwise_bn_act_se", x)
    if se is not None and len(se) != 4:
        raise ValueError(f"depthwise_bn_act_se: se must be (w1, b1, w2, b2) or None, got {len(se)} entries")
    allowed = (_codes.INPUT_ACTIVATIONS, _codes.ACTIVATIONS, _codes.ACTIVATIONS)
    codes = [_codes.code(*argument) for argument in zip(("act", "se_act", "gate"), names, allowed)]
    geometry, output = _geometry(x, weight, *window)
    *norm, eps, synchronised = norm
    _check(x, weight, bias, *norm[:4], se, norm[4], synchronised, output, groups, eps)
    if projection:
        _check_projection(x, weight.shape[0], *projection)
    impl = select("depthwise_bn_act_se", IMPLS, x, weight, se)
    if impl.backward is None or 0 in x.shape:
        return None, geometry, codes, None, None, False, False
    gate_dtype = None if se is None else _weight_dtype(x, *se)
    tensors = (*own, *norm[2:4], *(se or ()))
    recording = _common.needs_autograd(x, *tensors)
    if recording and se is None and is_fixed(norm[4], names[0], *norm[2:4]):
        return None, geometry, codes, None, None, False, False  # one by one they keep y instead of x and z
    as_it_is = x.is_contiguous() or _common.is_channels_last(x)
    convolutions = _convolutions(impl, x, weight, bias, geometry) if as_it_is else None
    plain = recording and _common.plain(x, *tensors)
    return impl, geometry, codes, gate_dtype, convolutions, recording, plain


def _project(y: Tensor, projection: tuple[Tensor, Tensor | None]) -> Tensor:
    y, weight, bias = _common.autocast(y, *projection)
    return as_planned(unchecked(y, weight, bias, [1, 1]), y, weight, bias, False)[0]

r"""batch_norm_act: batch normalisation, an activation and a residual.

.. math:: y = a\!\left(\gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta + r\right)
    \quad\text{or}\quad y = a\!\left(\gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta\right) + r

Six operators, which other ops compose too: ``_stats`` gathers mean and m2 (the sum of squares about the mean) over a
batch, ``_update_`` turns them into rstd and moves the running statistics, ``batch_norm_act`` applies; ``_reduce``
gathers the sums of the backward pass, which are the gradients of bias and weight, and ``_backward`` applies those.
Where statistics, weight and bias are all fixed, ``_fixed_backward`` makes do with y, of ReLU, or with nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtrain import _extension
from fusedtrain.backend import Impl, register, select
from fusedtrain.ops import _activation, _codes, _common, _schema
from fusedtrain.ops._remembered import remembered


def reference(
    x, running_mean, running_var, weight, bias, training, momentum, eps, act: str, residual, residual_after
) -> Tensor:
    running = running_mean, running_var
    if training and running_mean is not None and torch.compiler.is_dynamo_compiling():
        # It saves them for its backward, and another call in the graph may move them.
        running = running_mean.clone(), running_var.clone()
    y = F.batch_norm(_aligned(x), *running, weight, bias, training, momentum, eps)
    if running[0] is not running_mean:
        running_mean.copy_(running[0])
        running_var.copy_(running[1])
    if residual is None or residual_after:
        y = _activation.REFERENCE[act](y)
        return y if residual is None else y + residual
    if _is_eager():
        z = y.add_(residual)
        return z.relu_() if act == "relu" else _activation.REFERENCE[act](z)
    return _activation.REFERENCE[act](y + residual)


def _aligned(x: Tensor) -> Tensor:
    """Torch's own kernel for channels_last images on GPUs crashes, in training, where they begin at no multiple of 16
    bytes: F.batch_norm alone does it (2.11)."""
    if x.is_cuda and _is_eager() and x.storage_offset() * x.element_size() % 16 and _common.is_channels_last(x):
        return x.clone()
    return x


def _is_eager() -> bool:
    """Not in graphs, nor under the transforms of torch.func, where one operand alone may have a batch."""
    in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return not in_graph and not torch._C._are_functorch_transforms_active()


# The five operators in plain PyTorch: what the reference runs where processes share their statistics.


def _columns(*vectors: Tensor | None) -> list[Tensor | None]:
    return [v if v is None else v[:, None, None] for v in vectors]


def _reference_stats(x):
    if x.numel() == 0:
        return x.new_zeros(2, x.shape[1], dtype=_common.acc_dtype(x)).unbind()
    var, mean = torch.var_mean(x.to(_common.acc_dtype(x)), (0, 2, 3), correction=0)
    return mean, var * (x.numel() // x.shape[1])


def _reference_update(mean, m2, running_mean, running_var, count, momentum, eps):
    for running, to in ((running_mean, mean), (running_var, m2 / (count - 1))):
        if running is not None:
            running.copy_(momentum * to + (1 - momentum) * running)
    return torch.rsqrt(m2 / count + eps)


def _normalised(x, mean, rstd, weight, bias, residual, residual_after):
    mean, rstd, weight, bias = _columns(mean, rstd, weight, bias)
    xhat = (x - mean) * rstd
    z = xhat if weight is None else xhat * weight
    z = z if bias is None else z + bias
    return xhat, z if residual is None or residual_after else z + residual


def _reference_apply(x, mean, rstd, weight, bias, residual, act, residual_after):
    _, z = _normalised(x, mean, rstd, weight, bias, residual, residual_after)
    y = _activation.REFERENCE[_codes.ACTIVATIONS[act]](z)
    return _common.cast(y + residual if residual is not None and residual_after else y, x.dtype)


def _reference_dz(dy, x, mean, rstd, weight, bias, residual, act, residual_after):
    xhat, z = _normalised(x, mean, rstd, weight, bias, residual, residual_after)
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        (dz,) = torch.autograd.grad(_activation.REFERENCE[_codes.ACTIVATIONS[act]](z), z, dy.to(z.dtype))
    return xhat, dz


def _reference_reduce(dy, x, *args):
    xhat, dz = _reference_dz(dy, x, *args)
    return dz.sum((0, 2, 3)), (dz * xhat).sum((0, 2, 3))


def _reference_backward(
    dy, x, mean, rstd, weight, bias, residual, sum_dz, sum_dz_xhat, count, act, residual_after, need_dx, need_dresidual
):
    xhat, dz = _reference_dz(dy, x, mean, rstd, weight, bias, residual, act, residual_after)
    dx = dz
    if sum_dz is not None:
        sum_dz, sum_dz_xhat = _columns(sum_dz, sum_dz_xhat)
        dx = dz - sum_dz / count - xhat * (sum_dz_xhat / count)
    dx = dx * _columns(rstd if weight is None else weight * rstd)[0]
    return dx.to(x.dtype), dz.to(x.dtype)


@_schema.register_fake("batch_norm_act_stats")
def _fake_stats(x):
    mean = x.new_empty(x.shape[1], dtype=_common.acc_dtype(x))
    return mean, torch.empty_like(mean)


@_schema.register_fake("batch_norm_act_update_")
def _fake_update(mean, m2, running_mean, running_var, count, momentum, eps):
    return torch.empty_like(mean)


@_schema.register_fake("batch_norm_act")
def _fake(x, mean, rstd, weight, bias, residual, act, residual_after):
    return torch.empty_like(x)


@_schema.register_fake("batch_norm_act_reduce")
def _fake_reduce(dy, x, mean, rstd, weight, bias, residual, act, residual_after):
    return _fake_stats(x)


@_schema.register_fake("batch_norm_act_backward")
def _fake_backward(
    dy, x, mean, rstd, weight, bias, residual, sum_dz, sum_dz_xhat, count, act, residual_after, need_dx, need_dresidual
):
    return tuple(torch.empty_like(x) if needed else x.new_empty(0) for needed in (need_dx, need_dresidual))


@_schema.register_fake("batch_norm_act_fixed_backward")
def _fake_fixed_backward(dy, y, scale, act, need_dresidual):
    return torch.empty_like(dy), torch.empty_like(dy) if need_dresidual else dy.new_empty(0)


@dataclass(frozen=True, slots=True)
class _BatchNormImpl(Impl):
    """``forward`` and ``backward`` apply given statistics and sums; these are the operators that gather them.

    ``fixed`` is backward where nothing but x and the residual has a gradient, None where ``backward`` does it.
    ``train`` and ``train_backward`` do all of a direction in one call, for the statistics of one process's batch; None
    where there are no such.
    """

    stats: Callable = _reference_stats
    update: Callable = _reference_update
    reduce: Callable = _reference_reduce
    fixed: Callable | None = None
    train: Callable | None = None
    train_backward: Callable | None = None


def _below(elements: int, where: str = "") -> tuple[int, str]:
    return elements, f"stock PyTorch was measured faster: {where}fewer than {elements:,} elements"


# Elements of x below which stock PyTorch was measured faster on a CPU, and the reason. The measurement, over the layers
# of benchmarks/bench_batch_norm_act.py in float32 and bfloat16, stands in benchmarks/LOG.md (2026-11-25 for residuals).
# float32 in channels_last: by whether a residual is added before the activation, which stock does in place, and so does
# the reference; on Intel's CPUs that gains on small images alone (2026-11-28).
_SMALL = _below(100_000)
_SMALL_PLAIN = _below(400_000, "16 bits by AVX2 without activation or residual, ")  # 2026-11-30
_SMALL_ROWS = {
    "none before": _below(200_000, "float32 in channels_last, "),
    "before": _below(3_000_000, "float32 in channels_last with a residual before the activation, "),
    "before, on Intel's": _below(500_000, "float32 in channels_last with a residual before the activation, "),
}
_SMALL_FIXED = _below(200_000, "float32 with fixed statistics, weight and bias, ")  # 2026-12-01


def _slower(
    x: Tensor,
    synchronised: bool = False,
    residual_before: bool = False,
    plain: bool = False,
    fixed: bool = False,
    *_,
) -> str | None:
    if synchronised is True:  # stock has no statistics over processes on a CPU
        return None
    halves = x.element_size() < 4
    by_avx2 = halves and plain is True and _extension.BUILD_INFO.get("isa_active") == "avx2"
    least, reason = _SMALL_PLAIN if by_avx2 else _SMALL_FIXED if fixed is True and not halves else _SMALL
    if _common.is_less(x.numel(), least):
        return reason
    if halves or fixed is True or not _common.is_channels_last(x):
        return None
    where = "before" if residual_before is True else "none before"
    if where == "before" and _extension.BUILD_INFO.get("cpu_vendor") == "intel":
        where = "before, on Intel's"
    least, reason = _SMALL_ROWS[where]
    return reason if _common.is_less(x.numel(), least) else None


_PARTS = ("stats", "update_", "reduce", "fixed_backward")


def _impl(overload: str, why_not, slower=None) -> _BatchNormImpl:
    ops = (getattr(torch.ops.fusedtrain, f"batch_norm_act{part}") for part in ("", "_backward"))
    parts = (getattr(torch.ops.fusedtrain, f"batch_norm_act_{part}") for part in _PARTS)
    forward, backward, *others = (getattr(op, overload) for op in (*ops, *parts))
    whole = ()
    if overload == "default":
        whole = (_schema.untraced(f"batch_norm_act_train{part}") for part in ("_", "_backward"))
    return _BatchNormImpl(forward, backward, why_not, slower, *others, *whole)


def _asked(x, training, residual_after, process_group, act, residual=None, weight=None, bias=None, **_) -> tuple:
    synchronised, before = training and process_group is not None, residual is not None and not residual_after
    plain, fixed = residual is None and act == "identity", is_fixed(training, act, weight, bias)
    return x, synchronised, before, plain, fixed


IMPLS = register(
    "batch_norm_act",
    {
        "cuda": _impl("default", _common.why_not_cuda),
        "cpu": _impl("default", _common.why_not_cpu, _slower),
        "triton": _impl("triton", _common.why_not_triton, _common.triton_slower),
        "reference": _BatchNormImpl(reference, None, _common.never_why_not),
    },
    _asked,
)
_REFERENCE_PARTS = _BatchNormImpl(_reference_apply, _reference_backward, _common.never_why_not)


_OWN = 0.0  # in the place of a count: that of the images at hand


def _own_passes(ctx, *vectors: int) -> tuple[int, ...]:
    """Which gradients of ``vectors`` take a pass of their own: of a batch's own statistics the gradient of x brings the
    sums that they are, of fixed ones it needs none."""
    return vectors if ctx.count is None else ()


class _BatchNormAct(torch.autograd.Function):
    """``count`` is the number of values per channel behind mean and rstd, or ``_OWN``, None where these are fixed;
    ``running`` what ``train`` takes to make mean and rstd, or None where they are given."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, mean, rstd, options):
        ctx.count, act, residual_after, ctx.group, ctx.impl, running, y = *options, None
        if running is not None:
            *running, momentum, eps = running
            tail = momentum, eps, act, residual_after
            y, mean, rstd = ctx.impl.train(x, *running, weight, bias, residual, *tail)
        keeps_residual = residual is not None and not residual_after and act != 0
        ctx.save_for_backward(x, weight, bias, residual if keeps_residual else None, mean, rstd)
        ctx.codes = act, residual_after
        if y is not None:
            return y
        return _common.owned(ctx.impl.forward(x, mean, rstd, weight, bias, residual, act, residual_after))

    @staticmethod
    @_common.once_differentiable
    def backward(ctx, dy):
        x, weight, bias, residual, mean, rstd = ctx.saved_tensors
        need_dx, need_dw, need_db, need_dr = _common.needed(ctx, 0, 3, *_own_passes(ctx, 1, 2))[:4]
        dy = _common.dense_like(dy, x)
        inputs, (act, residual_after) = (dy, x, mean, rstd, weight, bias, residual), ctx.codes
        passes_dy = residual_after or act == 0
        trained, writes_dr = ctx.count is not None, need_dr and not passes_dy
        dw = db = dx = dr = None
        sums = (None, None)
        if need_dx and trained and ctx.group is None and ctx.impl.train_backward is not None and _common.untraced(x):
            dx, dr, dw, db = ctx.impl.train_backward(*inputs, *ctx.codes, writes_dr)
        else:
            if need_dw or need_db or (need_dx and trained):
                sums = db, dw = ctx.impl.reduce(*inputs, *ctx.codes)
            if ctx.group is not None and trained and need_dx:
                sums = _all_reduced(*sums, ctx.group)
            if need_dx or writes_dr:
                sums = _and_count(sums if trained else (None, None), ctx.count, dy)
                dx, dr = ctx.impl.backward(*inputs, *sums, *ctx.codes, need_dx, writes_dr)
        return (
            dx if need_dx else None,
            _common.cast(dw, weight.dtype) if need_dw else None,
            _common.cast(db, bias.dtype) if need_db else None,
            (dy if passes_dy else dr) if need_dr else None,
            *(None,) * 3,
        )


class _FixedBatchNormAct(torch.autograd.Function):
    """Of fixed statistics, weight and bias, with an activation whose slope y tells: y is kept, of the identity nothing,
    as stock PyTorch keeps it."""

    @staticmethod
    def forward(ctx, x, residual, mean, rstd, weight, bias, options):
        ctx.act, ctx.impl = options
        y = _common.owned(ctx.impl.forward(x, mean, rstd, weight, bias, residual, ctx.act, False))
        scale = rstd if weight is None else _common.cast(weight, rstd.dtype) * rstd
        ctx.save_for_backward(scale, y if ctx.act else None)
        return y

    @staticmethod
    @_common.once_differentiable
    def backward(ctx, dy):
        scale, y = ctx.saved_tensors
        need_dx, need_dr = _common.needed(ctx, 0, 1)[:2]
        dy = _common.dense(dy) if y is None else _common.dense_like(dy, y)
        if y is None:
            dx = ctx.impl.fixed(dy, dy, scale, ctx.act, False)[0] if need_dx else None
            return dx, dy if need_dr else None, *(None,) * 5
        if not need_dx:
            return None, ctx.impl.fixed(dy, y, torch.ones_like(scale), ctx.act, False)[0], *(None,) * 5
        dx, dr = ctx.impl.fixed(dy, y, scale, ctx.act, need_dr)
        return dx, dr if need_dr else None, *(None,) * 5


def is_fixed(training: bool, act: str, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether only x and a residual may have gradients, for which y is enough. Not of ReLU6, whose input stock PyTorch
    keeps unless it works in place: y may be written to behind it."""
    return not training and act in ("identity", "relu") and not _common.records(weight, bias)


def _and_count(sums: Sequence[Tensor | None], count: float | None, images: Tensor) -> tuple:
    """The two sums and the count by which the operators divide them."""
    if count is None:
        return *sums, 1.0
    count = count or _count(images)
    return (*(None if s is None else s / count for s in sums), 1.0) if _common.is_open(count) else (*sums, count)


def _all_reduced(sum_dz: Tensor, sum_dz_xhat: Tensor, group) -> tuple[Tensor, Tensor]:
    sums = torch.stack([sum_dz, sum_dz_xhat])
    torch.distributed.all_reduce(sums, group=group)
    return sums.unbind()


def _gathered(mean: Tensor, m2: Tensor, count: float, group) -> tuple[Tensor, Tensor, float]:
    """Returns mean, m2 and count of the batches of all processes together, the same bits on each of them."""
    own = torch.cat([mean.double(), m2.double(), mean.new_full((1,), count, dtype=torch.float64)])
    parts = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, own, group=group)
    parts, c = torch.stack(parts), mean.numel()
    means, m2s, counts = parts[:, :c], parts[:, c:-1], parts[:, -1:]
    total = counts.sum()
    together = (counts * means).sum(0) / total
    m2 = (m2s + counts * (means - together).square()).sum(0)
    return together.to(mean.dtype), m2.to(mean.dtype), float(total)


def _check(x: Tensor, channels: int, **vectors: Tensor | None) -> None:
    """Checks what belongs to so many channels of images that have the dtype and device of ``x``."""
    shape, device, kind = (channels,), x.device, None
    for name, vector in vectors.items():
        if vector is None:
            continue
        dtype = vector.dtype
        if kind is None:
            kind = dtype
        if dtype != kind or vector.shape != shape or vector.device != device:
            _refuse(x, channels, name, vector, kind)
    if kind is not None and kind != x.dtype and kind != _common.acc_dtype(x):
        name = next(name for name, vector in vectors.items() if vector is not None)
        _refuse(x, channels, name, vectors[name], kind)


def _refuse(x: Tensor, channels: int, name: str, vector: Tensor, kind: torch.dtype) -> None:
    dtype = vector.dtype
    if vector.shape != (channels,):
        raise ValueError(f"batch_norm_act: {name} must have shape [{channels}] or be None, got {list(vector.shape)}")
    if dtype != x.dtype and dtype != _common.acc_dtype(x):
        raise TypeError(
            f"batch_norm_act: {name} must have the dtype of x ({x.dtype}) or {_common.acc_dtype(x)}, got {dtype}"
        )
    if vector.device != x.device:
        raise _common.elsewhere("batch_norm_act", x, name, vector)
    raise TypeError(
        "batch_norm_act: weight, bias, running_mean and running_var must share one dtype,"
        f" got {', '.join(sorted((str(kind), str(dtype))))}"
    )


def _check_residual(x: Tensor, residual: Tensor) -> None:
    if residual.shape != x.shape:
        raise ValueError(
            f"batch_norm_act: residual must have the shape of x, {list(x.shape)}, got {list(residual.shape)}"
        )
    _common.check_same_kind("batch_norm_act", x, residual=residual)


def _check_statistics(
    shape: Sequence[int], running_mean, running_var, training: bool, synchronised: bool, eps: float
) -> None:
    """``shape``: of the images."""
    if (running_mean is None) != (running_var is None):
        raise ValueError("batch_norm_act: running_mean and running_var must both be given or both be None")
    if not training and running_mean is None:
        raise ValueError("batch_norm_act: running_mean and running_var are needed when training is False")
    if training and not synchronised and shape[0] * shape[2] * shape[3] == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {torch.Size(shape)}")
    if training and not synchronised and eps == 0:  # as torch: a constant channel would become NaN
        raise ValueError(f"batch_norm_act: eps must be positive in training, got {eps}")
    if eps < 0:
        raise ValueError(f"batch_norm_act: eps must be 0 or more, got {eps}")


def _check_moments(x: Tensor, moments: tuple[Tensor, Tensor], training: bool) -> None:
    if not training:
        raise ValueError("batch_norm_act: moments are those of a training batch, got training=False")
    if len(moments) != 2:
        raise ValueError(f"batch_norm_act: moments must be mean and sum of squares, got {len(moments)} tensors")
    for name, vector in zip(("mean", "sum of squares"), moments):
        if vector.shape != (x.shape[1],):
            raise ValueError(
                f"batch_norm_act: the {name} in moments must have shape [{x.shape[1]}], got {list(vector.shape)}"
            )
        if vector.dtype != _common.acc_dtype(x):
            raise TypeError(f"batch_norm_act: the {name} in moments must be {_common.acc_dtype(x)}, got {vector.dtype}")
        _common.check_same_device("batch_norm_act", x, moments=vector)


def batch_norm_act(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    act: str = "identity",
    residual: Tensor | None = None,
    residual_after: bool = False,
    process_group=None,
    moments: tuple[Tensor, Tensor] | None = None,
    num_batches_tracked: Tensor | None = None,
) -> Tensor:
    r"""Normalises every channel over the batch, then activates, with a residual added before or after the activation.

    .. math:: z = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta, \qquad
        y = a(z + r) \quad\text{or}\quad y = a(z) + r

    Args:
        x: images ``[N, C, H, W]``; contiguous and channels_last run natively, other strides are copied first; float32,
            bfloat16, float16 or float64.
        running_mean: ``[C]``, moved in place in training; :math:`\mu` in evaluation. None: not kept.
        running_var: ``[C]``, moved towards the unbiased variance; :math:`\sigma^2` in evaluation. None: not kept.
        weight: :math:`\gamma`, ``[C]``, None for ones; these four share one dtype, that of ``x`` or float32.
        bias: :math:`\beta`, ``[C]``, None for zeros.
        training: normalise by the statistics of this batch, not by the running ones.
        momentum: share of this batch in the new running statistics.
        eps: added to the variance.
        act: the activation :math:`a`: "identity", "relu", "silu", "gelu", "hard_swish", "relu6", "sigmoid",
            "hard_sigmoid", "tanh" or "half_tanh".
        residual: :math:`r`, of the shape and dtype of ``x``, or None.
        residual_after: add it after the activation (MobileNet) instead of before (ResNet).
        process_group: a ``torch.distributed`` group over which the statistics of a training batch are taken, as by
            ``nn.SyncBatchNorm``, on any device; the batches may differ in size. None: this process alone.
        moments: mean of ``x`` over this process's batch and its sum of squares about the mean, each ``[C]`` in float32
            (float64 for float64), where the op that made ``x`` gathered them; for training. They are not checked
            against ``x``, and stock PyTorch takes its own.
        num_batches_tracked: one int64, counted up in training, or None.

    Returns:
        ``[N, C, H, W]`` in the dtype and memory format of ``x``, under autocast too. For backward x is kept, and beside
        it ``[C]`` vectors, and the residual where the activation follows it. In evaluation, where weight and bias have
        no gradients: of the identity the vectors alone, of ReLU y and these.

    Raises:
        ValueError: a shape does not fit, a name is unknown, running statistics are missing, ``eps`` is 0 in training or
            less, or a training batch has one value per channel.
        TypeError: a dtype is not supported.
        RuntimeError: a forced backend cannot run on ``x``, or tensors are on different devices.

    Cost: in training forward reads x twice (once with ``moments``) and writes y, backward reads x and dy twice and
        writes dx; the activation is computed again. Stock BatchNorm and activation take 5 and 8 such passes.
    Numerics: sums of squares are taken about the mean, in float32 chunks added up in float64; one rounding at the end;
        deterministic, and independent of threads where a kernel of this package runs.
    Source: Ioffe and Szegedy, https://arxiv.org/abs/1502.03167; ``torch.nn.functional.batch_norm``
    """
    group = process_group if training else None
    vectors, options = (running_mean, running_var, weight, bias), (training, eps, act, residual_after)
    impl, code, recording, at_once, from_y = _plan(x, *vectors, *options, residual, moments, process_group is not None)
    counter = num_batches_tracked if training else None
    if impl is None:
        if counter is not None:  # _count_up, without a call
            counter.add_(1)
        return reference(x, *vectors, training, momentum, eps, act, residual, residual_after)
    x = _common.dense(x)
    residual = _residual_like(residual, x)
    if at_once:
        running = running_mean, running_var, counter, momentum, eps
        if recording:
            options = _OWN, code, residual_after, None, impl, running
            return _common.record(_BatchNormAct, x, weight, bias, residual, None, None, options)
        with _common.no_grad():
            return impl.train(x, *running[:3], weight, bias, residual, momentum, eps, code, residual_after)[0]
    with _common.no_grad():
        _count_up(counter)
        mean, rstd, count = _statistics(x, running_mean, running_var, training, momentum, eps, group, impl, moments)
    if from_y:
        return _common.apply(_FixedBatchNormAct, x, residual, mean, rstd, weight, bias, (code, impl))
    if recording:
        options = count, code, residual_after, group, impl, None
        return _common.apply(_BatchNormAct, x, weight, bias, residual, mean, rstd, options)
    return impl.forward(x, mean, rstd, weight, bias, residual, code, residual_after)


@remembered
def _plan(
    x, running_mean, running_var, weight, bias, training, eps, act, residual_after, residual, moments, synchronised
) -> tuple[_BatchNormImpl | None, int, bool, bool, bool]:
    """Checks the arguments of the op. Returns what runs, None for stock PyTorch, the activation's code, whether
    gradients are recorded, whether all of a direction is one call, and whether y is kept for backward instead of x."""
    _common.check_images("batch_norm_act", x)
    _check(x, x.shape[1], weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    _check_statistics(x.shape, running_mean, running_var, training, synchronised, eps)
    if residual is not None:
        _check_residual(x, residual)
    if moments is not None:
        _check_moments(x, moments, training)
    code = _codes.code("act", act, _codes.ACTIVATIONS)
    synchronised = synchronised and bool(training)
    before, unchanged = residual is not None and not residual_after, residual is None and code == 0
    fixed = is_fixed(training, act, weight, bias)
    impl = select("batch_norm_act", IMPLS, x, synchronised, before, unchanged, fixed)
    if not synchronised and (impl.backward is None or x.numel() == 0):
        return None, code, False, False, False
    if impl.backward is None:
        impl = _REFERENCE_PARTS
    recording = _common.needs_autograd(x, weight, bias, residual)  # before running statistics move
    alone = training and not synchronised and moments is None and impl.train is not None
    is_sum = code != 0 and residual is not None and residual_after  # y, which is not what the activation makes then
    from_y = recording and fixed and impl.fixed is not None and not is_sum
    return impl, code, recording, alone and _common.plain(x, weight, bias, residual), from_y


def _count_up(batches: Tensor | None) -> None:
    if batches is not None:
        batches.add_(1)


def _count(x: Tensor) -> float | Tensor:
    n, _, h, w = x.shape
    # float() would tie an exported graph to it; torch.jit.trace has a tensor.
    return n * h * w if torch.jit.is_tracing() else torch.sym_float(n * h * w)


def _residual_like(residual: Tensor | None, x: Tensor) -> Tensor | None:
    """``residual``, laid out as x."""
    return None if residual is None else _common.apart(_common.dense_like(residual, x), x)


def _statistics(x, running_mean, running_var, training, momentum, eps, group, impl, moments=None):
    """Returns mean, rstd and how many values per channel they come from, or ``_OWN``, None for fixed statistics.

    ``moments`` are mean and m2 of x where they are known.
    """
    if not training:
        dtype = _common.acc_dtype(x)
        mean = running_mean.to(dtype, copy=True)  # a batch in training may move the other before backward
        return mean, torch.rsqrt(_common.cast(running_var, dtype) + eps), None
    mean, m2 = moments or impl.stats(x.detach() if torch.compiler._is_exporting_flag else x)
    count = _count(x)
    if group is not None:
        mean, m2, count = _gathered(mean, m2, count, group)
        if count == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
    update = _reference_update if _common.is_open(count) or _common.vmapped() else impl.update
    rstd = update(mean, m2, running_mean, running_var, count, momentum, eps)
    return mean, rstd, _OWN if _common.MIXES_UP_SYMBOLS and group is None else count

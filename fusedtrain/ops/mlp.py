r"""mlp: two matrices with an activation between them, and what blocks do behind: a factor per channel, a residual.

.. math:: y = r + s \odot \bigl(W_2\, a(W_1 x + b_1) + b_2\bigr)
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtrain.backend import Impl, register, select
from fusedtrain.ops import _activation, _codes, _common, _schema
from fusedtrain.ops.linear import _why_not_cpu, linear
from fusedtrain.ops.linear import choose as _choose_rows
from fusedtrain.ops.linear import gradients as _gradients_of_rows
from fusedtrain.ops.linear import run as _run_rows
from fusedtrain.ops.pointwise_conv2d import choose as _choose_images
from fusedtrain.ops.pointwise_conv2d import gradients as _gradients_of_images
from fusedtrain.ops.pointwise_conv2d import pointwise_conv2d
from fusedtrain.ops.pointwise_conv2d import run as _run_images


def _is_images(w1: Tensor) -> bool:
    """Whether the matrices are those of 1x1 convolutions."""
    return w1.dim() == 4


def reference(x, w1, b1, w2, b2, scale: Tensor | None, residual: Tensor | None, act: str) -> Tensor:
    return _one_by_one(F.conv2d if _is_images(w1) else F.linear, x, w1, b1, w2, b2, scale, residual, act)


def _one_by_one(multiply: Callable, x, w1, b1, w2, b2, scale: Tensor | None, residual: Tensor | None, act) -> Tensor:
    y = multiply(_activation.REFERENCE[act](multiply(x, w1, b1)), w2, b2)
    if scale is not None:
        y = y * (scale[:, None, None] if _is_images(w1) else scale)
    return y if residual is None else y + residual


@_schema.register_fake("mlp_act")
def _fake_act(h, act):
    return torch.empty_like(h)


@_schema.register_fake("mlp_act_backward_")
def _fake_act_backward(dg, h, act, need_g):
    return torch.empty_like(h) if need_g else h.new_empty(0), h.new_empty(h.shape[1], dtype=_common.acc_dtype(h))


@_schema.register_fake("mlp_scale")
def _fake_scale(z, scale, residual, wide):
    return torch.empty_like(z, dtype=_common.acc_dtype(z) if wide else z.dtype)


@_schema.register_fake("mlp_scale_backward")
def _fake_scale_backward(dy, z, scale):
    vector = z.new_empty(z.shape[1], dtype=_common.acc_dtype(z))
    return torch.empty_like(z), vector, torch.empty_like(vector)


_ACT, _ACT_BACKWARD_ = torch.ops.fusedtrain.mlp_act.default, torch.ops.fusedtrain.mlp_act_backward_.default
_SCALE, _SCALE_BACKWARD = torch.ops.fusedtrain.mlp_scale.default, torch.ops.fusedtrain.mlp_scale_backward.default
_ACT_ = _schema.untraced("mlp_act_")


def _sum_dtype(x: Tensor, *others: Tensor | None) -> torch.dtype:
    """What torch promotes x and the others to."""
    dtype = x.dtype
    for other in others:
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    return dtype


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, object]:
    """A product, and what has run it."""
    if _is_images(weight):
        x = _common.dense(x)  # as it is but under vmap, whose images have no memory format
        plan = _choose_images(x, weight, bias, [1, 1])
        return _run_images(x, weight, bias, [1, 1], plan), plan
    kernel = _choose_rows(x, weight, bias)
    return _run_rows(x, weight, bias, kernel), kernel


def _gradients(dy: Tensor, x: Tensor, weight: Tensor, plan, *need: bool) -> tuple[Tensor | None, Tensor | None]:
    """Of x and of the weight."""
    if _is_images(weight):
        return _gradients_of_images(dy, x, weight, [1, 1], plan, (*need, False))[:2]
    return _gradients_of_rows(dy, x, weight, plan, (*need, False))[:2]


def _forward(x: Tensor, w1, b1, w2, b2, scale, residual, act: int) -> tuple[Tensor, Tensor, Tensor, tuple]:
    """y, and what backward may need: h, z, and what has run the products."""
    h, first = _multiply(x, w1, b1)
    z, second = _multiply(_ACT(h, act), w2, b2)
    return _scaled(z, scale, residual), h, z, (first, second)


def _scaled(z: Tensor, scale: Tensor | None, residual: Tensor | None) -> Tensor:
    if scale is None:
        return z
    if residual is not None:
        residual = residual.contiguous(memory_format=_common.format_of(z))
    return _SCALE(z, scale, residual, _sum_dtype(z, scale, residual) != z.dtype)


def _backward(dy, x, h, z, w1, w2, scale, plans, act: int, need) -> tuple[Tensor | None, ...]:
    need_dx, need_dw1, need_db1, need_dw2, need_db2, _ = need
    dscale = db2 = None
    if scale is not None:
        dz, dscale, db2 = _SCALE_BACKWARD(dy, z, scale)
    else:
        dz = dy
        db2 = dz.sum((0, 2, 3) if _is_images(w1) else 0) if need_db2 else None
    dg, _ = _gradients(dz, h, w2, plans[1], need_dx or need_dw1 or need_db1, False)
    g = db1 = dx = dw1 = dw2 = None
    if dg is not None:
        g, db1 = _ACT_BACKWARD_(dg, h, act, need_dw2)  # now dg is dh
        dx, dw1 = _gradients(dg, x, w1, plans[0], need_dx, need_dw1)
    elif need_dw2:
        g = _ACT(h, act)
    if need_dw2:
        dw2 = _gradients(dz, g, w2, plans[1], False, True)[1]
    return dx, dw1, db1, dw2, db2, dscale


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _evaluated(x: Tensor, w1, b1, w2, b2, scale, residual, act: int) -> Tensor:
    """y, where nothing is kept for backward: the activation takes the place of what it reads."""
    h = _multiply(x, w1, b1)[0]
    if _common.untraced(h):
        _ACT_(h, act)
    else:
        h = _ACT(h, act)
    return _scaled(_multiply(h, w2, b2)[0], scale, residual)


def _why_not(x: Tensor, w1: Tensor, b1, w2: Tensor, b2, scale=None, residual=None, *_) -> str | None:
    reason = _why_not_cpu(x, w1, b1, w2, b2, scale, residual)
    if reason is None and scale is not None:
        dtype = _sum_dtype(x, scale, residual)
        if dtype not in (x.dtype, _common.acc_dtype(x)):
            written = " or ".join(map(str, dict.fromkeys((x.dtype, _common.acc_dtype(x)))))
            return f"scale and residual make y {dtype}; the kernels write {written}"
    return reason


# Elements of h: up to here the calls cost more than what the kernels may gain, which without gradients is less
# (benchmarks/LOG.md, 2026-11-30).
_SMALL, _SMALL_FORWARD = 500_000, 2_000_000


def _slower(x: Tensor, w1: Tensor, *others) -> str | None:
    recording = _common.records(x, w1, *others[:-1])
    small = _SMALL if recording else _SMALL_FORWARD
    if _common.is_less(x.numel() // max(1, w1.shape[1]) * w1.shape[0], small):
        what = "in training" if recording else "without gradients"
        return f"fewer than {small:,} elements between the matrices: {what} stock calls cost less"
    return None


def _asked(x, w1, b1, w2, b2, act="gelu", scale=None, residual=None) -> tuple:
    x, w1, b1, w2, b2 = _common.autocast(x, w1, b1, w2, b2)
    return x, w1, b1, w2, b2, scale, residual, _codes.code("act", act, _codes.INPUT_ACTIVATIONS)


# There are no kernels for GPUs yet: every backend there is stock PyTorch.
IMPLS = register(
    "mlp",
    {
        "cuda": Impl(reference, None, _common.why_not_cuda),
        "cpu": Impl(_forward, _backward, _why_not, _slower),
        "triton": Impl(reference, None, _common.why_not_triton, _common.triton_slower),
        "reference": Impl(reference, None, _common.never_why_not),
    },
    _asked,
)


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2, scale, residual, act):
        y, h, z, ctx.plans = _forward(x, w1, b1, w2, b2, scale, residual, act)
        ctx.save_for_backward(x, h, None if scale is None else z, w1, w2, scale)
        ctx.act, ctx.layout = act, _common.format_of(z)
        ctx.vectors = [None if vector is None else vector.dtype for vector in (b1, b2, scale)]
        return _common.owned(y)

    @staticmethod
    @_common.once_differentiable
    def backward(ctx, dy):
        x, h, z, w1, w2, scale = ctx.saved_tensors
        *need, need_dresidual = _common.needed(ctx, *range(6))[:7]
        # A hook may have stored z in the other format.
        laid_out = dy.contiguous(memory_format=ctx.layout if z is None else _common.format_of(z))
        dx, dw1, db1, dw2, db2, dscale = _backward(laid_out, x, h, z, w1, w2, scale, ctx.plans, ctx.act, need)
        db1, db2, dscale = (
            None if grad is None or dtype is None else _common.cast(grad, dtype)
            for grad, dtype in zip((db1, db2, dscale), ctx.vectors)
        )
        return *_common.wanted((dx, dw1, db1, dw2, db2, dscale), need), dy if need_dresidual else None, None


def _check(x: Tensor, w1: Tensor, b1, w2: Tensor, b2, scale, residual) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"mlp: x must be a Tensor, got {type(x).__name__}")
    if x.dtype not in _common.DTYPES:
        raise TypeError(f"mlp: x must be float32, bfloat16, float16 or float64, got {x.dtype}")

    def got(t) -> list[int] | str:
        return list(t.shape) if isinstance(t, Tensor) else type(t).__name__

    images = isinstance(w1, Tensor) and _is_images(w1)
    if x.dim() == 0 or (images and x.dim() != 4):
        raise ValueError(f"mlp: x must have shape {'[N, C, H, W]' if images else '[..., C]'}, got {got(x)}")
    channels, pixel, ones = (1, (1, 1), ", 1, 1") if images else (x.dim() - 1, (), "")
    c = x.shape[channels]
    if not isinstance(w1, Tensor) or w1.dim() < 2 or w1.shape[1:] != (c, *pixel):
        shape = "[K, C] or, for images, [K, C, 1, 1]" if w1 is None or not images else "[K, C, 1, 1]"
        raise ValueError(f"mlp: w1 must have shape {shape} with C = {c}, got {got(w1)}")
    k = w1.shape[0]
    if not isinstance(w2, Tensor) or w2.dim() != w1.dim() or w2.shape[1:] != (k, *pixel):
        raise ValueError(f"mlp: w2 must have shape [D, K{ones}] with K = {k}, got {got(w2)}")
    d = w2.shape[0]
    for name, vector, letter, size in (("b1", b1, "K", k), ("b2", b2, "D", d), ("scale", scale, "D", d)):
        if vector is not None and (not isinstance(vector, Tensor) or vector.shape != (size,)):
            raise ValueError(f"mlp: {name} must have shape [{letter}] = [{size}] or be None, got {got(vector)}")
    shape = [*x.shape[:channels], d, *x.shape[channels + 1 :]]
    if residual is not None and (not isinstance(residual, Tensor) or [*residual.shape] != shape):
        raise ValueError(f"mlp: residual must have shape {shape} or be None, got {got(residual)}")
    _common.check_same_kind("mlp", x, w1=w1, b1=b1, w2=w2, b2=b2)
    _common.check_same_device("mlp", x, scale=scale, residual=residual)


def mlp(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    *,
    act: str = "gelu",
    scale: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    r"""Two linear layers with an activation between them, as in ConvNeXt and transformers, and the end of their block.

    .. math:: y = r + s \odot \bigl(W_2\, a(W_1 x + b_1) + b_2\bigr)

    Args:
        x: ``[..., C]``, any strides (others than contiguous through one copy), or images ``[N, C, H, W]``, contiguous
            or channels_last, or one image ``[C, H, W]``, where the matrices are 1x1 convolutions; float32, bfloat16,
            float16 or float64.
        w1: ``[K, C]`` or ``[K, C, 1, 1]``, in the dtype of ``x``.
        b1: ``[K]``, or None.
        w2: ``[D, K]`` or ``[D, K, 1, 1]``.
        b2: ``[D]``, or None.
        act: the activation :math:`a`: "identity", "relu", "silu", "gelu", "hard_swish" or "relu6".
        scale: the factors :math:`s`, ``[D]``, or None: layer scale.
        residual: :math:`r`, of the shape of the output, or None.

    Returns:
        x with D channels in the place of C, contiguous, or in the memory format of images; in the dtype that torch
        promotes ``x``, which autocast casts, scale and residual to. For backward x, the input of the activation and,
        with a scale, what is scaled are kept.

    Raises:
        ValueError: a shape does not fit, or a name is unknown.
        TypeError: a dtype is not supported, or a matrix's or bias's differs from that of ``x`` outside autocast.
        RuntimeError: a forced backend cannot run, or tensors are on different devices.

    Cost: the products of :func:`fusedtrain.ops.linear` or :func:`fusedtrain.ops.pointwise_conv2d`. The activation is
        computed again in backward, in the pass that makes its gradient and that of the first bias; without gradients it
        takes the place of what it reads. Scale and residual take one pass, and one in backward. On GPUs, and where
        ``fusedtrain.explain("mlp", x, w1, b1, w2, b2)`` says so, stock PyTorch runs.
    Numerics: products as of those ops; sums in float32 (float64 for float64) in a fixed order: deterministic.
    Source: Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415; Liu et al., ConvNeXt,
        https://arxiv.org/abs/2201.03545; layer scale: Touvron et al., https://arxiv.org/abs/2103.17239
    """
    code = _codes.code("act", act, _codes.INPUT_ACTIVATIONS)
    if isinstance(x, Tensor):
        if x.is_nested:
            return reference(x, w1, b1, w2, b2, scale, residual, act)
        if x.dim() == 3 and isinstance(w1, Tensor) and _is_images(w1):
            residual = residual[None] if isinstance(residual, Tensor) else residual
            return mlp(x[None], w1, b1, w2, b2, act=act, scale=scale, residual=residual)[0]
        x, w1, b1, w2, b2 = _common.autocast(x, w1, b1, w2, b2)
    _check(x, w1, b1, w2, b2, scale, residual)
    inputs = (x, w1, b1, w2, b2, scale, residual)
    impl = select("mlp", IMPLS, *inputs, code)
    if impl.backward is None or x.numel() == 0 or w1.shape[0] == 0 or w2.shape[0] == 0:
        return _one_by_one(pointwise_conv2d if _is_images(w1) else linear, *inputs, act)  # by their own rules
    shape = (*x.shape[:-1], w2.shape[0])
    laid_out = _common.dense if _is_images(w1) else _rows
    summand, dense = residual if scale is None else None, laid_out(x)
    if scale is None:
        residual = None
    elif residual is not None:
        residual = _common.apart(laid_out(_common.cast(residual, _sum_dtype(x, scale, residual))), dense)
    inputs = (dense, w1, b1, w2, b2, scale, residual)
    y = _common.apply(_Mlp, *inputs, code) if _common.needs_autograd(*inputs) else _evaluated(*inputs, code)
    y = y if _is_images(w1) else y.view(shape)
    return y if summand is None else y + summand

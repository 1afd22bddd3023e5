r"""pointwise_conv2d: a 1x1 convolution, a product of matrices over all pixels.

.. math:: y_{n,o,p} = b_o + \sum_c w_{oc}\, x_{n,c,p}
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtrain.backend import Impl, register, runs_whole, select
from fusedtrain.ops import _common, _schema
from fusedtrain.ops import _pointwise_rules as _rules
from fusedtrain.ops._remembered import remembered

_VECTOR = 16  # channels


def _read_pixels(x: Tensor, stride: list[int]) -> tuple[Tensor, list[int]]:
    """x and stride for stock PyTorch. Where channels fill no vector of the CPU, oneDNN's gradient of the weight writes
    behind its workspace for strided channels_last images, so it is given the pixels that the convolution reads."""
    if x.device.type != "cpu" or x.shape[1] >= _VECTOR or max(stride) == 1:
        return x, stride
    return F.avg_pool2d(x, 1, stride), [1, 1]  # unlike a slice's, its gradient is in the format of x


def _stock(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int]) -> Tensor:
    return F.conv2d(x, weight, bias, tuple(stride))  # as layers give it: those who count FLOPs ask for a tuple


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int]) -> Tensor:
    read, stride = (x, stride) if max(stride) == 1 else _read_pixels(x, stride)
    y = _stock(read, weight, bias, stride)
    return y if read is x else y.contiguous(memory_format=_common.format_of(read))  # without a stride ATen takes others


def _empty(x: Tensor, weight: Tensor, stride: list[int], layout: torch.memory_format) -> Tensor:
    ho, wo = (-(-size // step) for size, step in zip(x.shape[2:], stride))
    return torch.empty((x.shape[0], weight.shape[0], ho, wo), dtype=x.dtype, device=x.device, memory_format=layout)


@_schema.register_fake("pointwise_conv2d")
def _fake(x, weight, bias, stride):
    return _empty(x, weight, stride, torch.channels_last)


@_schema.register_fake("pointwise_conv2d_contiguous")
def _fake_contiguous(x, weight, bias):
    return _empty(x, weight, [1, 1], torch.contiguous_format)


@_schema.register_fake("pointwise_conv2d_stats")
def _fake_stats(x, weight, bias, stride):
    mean = x.new_empty(weight.shape[0], dtype=_common.acc_dtype(x))
    return _fake(x, weight, bias, stride), mean, torch.empty_like(mean)


@_schema.register_fake("pointwise_conv2d_by_library")
def _fake_by_library(x, weight, bias, stride):
    return _empty(x, weight, stride, _common.format_of(x))


@_schema.register_fake("pointwise_conv2d_dw")
def _fake_dw(dy, x, stride):
    return x.new_empty(dy.shape[1], x.shape[1], 1, 1)


_CHUNK = 1 << 20  # elements in and out converted at a time: they stay in the caches


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int]) -> Tensor:
    """``F.conv2d``, in float32 by oneDNN also where ATen would take MKL: one thread and few images, at half the speed
    on CPUs that are not Intel's."""
    if torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available():
        bias = None if bias is None else bias.contiguous()  # whose strides the operator does not look at
        return torch.ops.aten.mkldnn_convolution(x, weight, bias, [0, 0], stride, [1, 1], 1)
    return _stock(x, weight, bias, stride)


def _in_float32(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int]) -> Tensor:
    """The product of a dtype that the CPU does not multiply, a few images at a time."""
    y = _empty(x, weight, stride, _common.format_of(x))
    convolve = _stock if _rules.mkl_is_faster() else _onednn
    weight, bias = weight.float(), None if bias is None else bias.float()
    read = _read_by(x, stride)
    images = max(1, _CHUNK * torch.get_num_threads() * x.shape[0] // max(1, read.numel() + y.numel()))
    with torch.no_grad(), torch.autocast("cpu", enabled=False):  # which would write in place, and cast back
        for part, out in zip(read.split(images), y.split(images)):
            out.copy_(convolve(part.float(), weight, bias, [1, 1]))
    return y


def _by_library(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int]) -> Tensor:
    library = _rules.library(x, weight, stride)
    if library == "float32":
        return _in_float32(x, weight, bias, stride)
    y = (_onednn if library == "onednn" else _stock)(x, weight, bias, stride)
    return y.contiguous(memory_format=_common.format_of(x))


_schema.LIBRARY.impl("pointwise_conv2d_by_library", _by_library, "CPU")


def _read_by(x: Tensor, stride: list[int]) -> Tensor:
    """The pixels that a convolution reads, a view."""
    return x[:, :, :: stride[0], :: stride[1]]


def _read(x: Tensor, stride: list[int]) -> Tensor:
    """A copy of them."""
    return _read_by(x, stride).contiguous(memory_format=_common.format_of(x))


def _pixels(x: Tensor) -> Tensor:
    """Channels_last images as a matrix."""
    n, c, h, w = x.shape
    return x.permute(0, 2, 3, 1).reshape(n * h * w, c)


def _has_one_pixel(x: Tensor) -> bool:
    return _common.is_less(x.shape[2] * x.shape[3], 2)


def _is_matrix(x: Tensor) -> bool:
    """Whether the pixels of all images are the rows of a matrix."""
    return _common.is_channels_last(x) or _has_one_pixel(x)


def _product_of(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not _is_matrix(x):
        matrices = weight[None, :, :, 0, 0].expand(x.shape[0], -1, -1)
        y = torch.bmm(matrices, x.flatten(2)).reshape(x.shape[0], -1, *x.shape[2:])
        return y if bias is None else y.add_(bias[:, None, None])
    pixels, matrix = _pixels(x), weight[:, :, 0, 0].t()
    y = torch.mm(pixels, matrix) if bias is None else torch.addmm(bias, pixels, matrix)
    if not _common.is_channels_last(x):
        return y.view(x.shape[0], weight.shape[0], *x.shape[2:])
    return y.view(x.shape[0], *x.shape[2:], weight.shape[0]).permute(0, 3, 1, 2)


def _dw_product(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of the weight, the narrower side first, which MKL is faster with, but of few rows."""
    if not _is_matrix(x):
        images = list(zip(dy.flatten(2), x.flatten(2).transpose(1, 2)))
        dw = torch.mm(*images[0])
        for image in images[1:]:
            dw.addmm_(*image)
        return dw[:, :, None, None]
    few = _has_one_pixel(x)
    dy, x = _pixels(dy), _pixels(x)
    dw = torch.mm(dy.t(), x) if few or dy.shape[1] <= x.shape[1] else torch.mm(x.t(), dy).t().contiguous()
    return dw[:, :, None, None]


_KERNEL, _DW = torch.ops.fusedtrain.pointwise_conv2d.default, torch.ops.fusedtrain.pointwise_conv2d_dw.default
_KERNEL_ON_PLANES = torch.ops.fusedtrain.pointwise_conv2d_contiguous.default
_BY_LIBRARY = torch.ops.fusedtrain.pointwise_conv2d_by_library.default
_STATS = torch.ops.fusedtrain.pointwise_conv2d_stats.default


def reference_backward(dy, x, weight, stride, need) -> tuple[Tensor, Tensor, Tensor]:
    geometry = (stride, [0, 0], [1, 1], False, [0, 0], 1)
    return torch.ops.aten.convolution_backward(dy, x, weight, [weight.shape[0]], *geometry, need)


def _multiply(way: str, x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int]) -> Tensor:
    """The convolution, in one of the ways of the rules."""
    if way == "kernel" and _common.is_channels_last(x):
        return _KERNEL(x, weight, bias, stride)
    if way == "kernel":
        return _KERNEL_ON_PLANES(x, weight, bias)
    if way == "product":
        return _product_of(x, weight, bias)
    return (_BY_LIBRARY if way == "library" else _stock)(x, weight, bias, stride)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], plan: _rules.Plan) -> Tensor:
    if plan.reads:
        x, stride = _read(x, stride), [1, 1]
    return _multiply(plan.forward, x, weight, bias, stride)


def _transposed(weight: Tensor) -> Tensor:
    """Torch copies a transposed matrix five times as fast as four dimensions of which two are transposed; its bfloat16
    products of images with one that is not copied take up to twice as long."""
    return weight.flatten(1).t().contiguous()[:, :, None, None]


def _dx(way: str, dy: Tensor, x: Tensor, weight: Tensor, stride: list[int]) -> Tensor:
    """A 1x1 convolution itself; with a stride, among zeros."""
    if way == "stock":
        return reference_backward(dy, x, weight, stride, [True, False, False])[0]
    as_it_lies = _common.is_channels_last(dy) or (way == "product" and _has_one_pixel(dy))
    turned = weight.transpose(0, 1) if as_it_lies else _transposed(weight)
    dx = _multiply(way, dy, turned, None, [1, 1])
    return dx if stride == [1, 1] else _among_zeros(dx, x, stride)


def _among_zeros(dx: Tensor, x: Tensor, stride: list[int]) -> Tensor:
    """The gradient of x, by that of the pixels that were read."""
    whole = torch.zeros_like(x)
    _read_by(whole, stride).copy_(dx)
    return whole


def _backward(dy, x, weight, stride, plan: _rules.Plan, need) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    need_dx, need_dw, need_db = need
    if plan.reads_backward:
        dx, *others = _backward(dy, _read(x, stride), weight, [1, 1], plan._replace(reads_backward=False), need)
        return _among_zeros(dx, x, stride) if need_dx else None, *others
    dx = dw = db = None
    if need_dx:
        dx = _common.in_format_of(_dx(plan.dx, dy, x, weight, stride), x)  # dy of one channel is in both formats
    if need_dw and plan.dw == "stock":
        read, one = _read_pixels(x, stride)
        dw = reference_backward(dy, read, weight, one, [False, True, False])[1]
    elif need_dw:
        dw = _common.strided_like(_DW(dy, x, stride) if plan.dw == "kernel" else _dw_product(dy, x), weight)
    if need_db:
        db = dy.sum((0, 2, 3))
    return dx, dw, db


def _asked(x, weight, stride, bias=None) -> tuple:
    return _arguments(_common.batched(x), weight, bias, stride)


# On a GPU this is a matrix product, which PyTorch's own libraries run: every backend there is stock PyTorch.
IMPLS = register(
    "pointwise_conv2d",
    {
        "cuda": Impl(reference, None, _common.why_not_cuda),
        "cpu": Impl(_forward, _backward, _common.why_not_cpu, _rules.slower),
        "triton": Impl(reference, None, _common.why_not_triton, _common.triton_slower),
        "reference": Impl(reference, None, _common.never_why_not),
    },
    _asked,
)


class _PointwiseConv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, stride, plan):
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.plan = stride, plan
        return _common.owned(_forward(x, weight, bias, stride, plan))

    @staticmethod
    @_common.once_differentiable
    def backward(ctx, dy, *_):
        x, weight = ctx.saved_tensors
        grads = _backward(_common.dense_like(dy, x), x, weight, ctx.stride, ctx.plan, _common.needed(ctx, 0, 1, 2)[:3])
        return *grads, None, None


class _PointwiseConv2dStats(_PointwiseConv2d):
    @staticmethod
    def forward(ctx, x, weight, bias, stride, plan):
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.plan = stride, plan
        y, mean, m2 = _STATS(x, weight, bias, stride)
        ctx.mark_non_differentiable(mean, m2)
        return _common.owned(y), mean, m2


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if not isinstance(weight, Tensor) or weight.shape[1:] != (x.shape[1], 1, 1):
        got = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"pointwise_conv2d: weight must have shape [D, C, 1, 1] = [D, {x.shape[1]}, 1, 1], got {got}")
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]):
        got = list(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
        raise ValueError(f"pointwise_conv2d: bias must have shape [{weight.shape[0]}] or be None, got {got}")
    _common.check_same_kind("pointwise_conv2d", x, weight=weight, bias=bias)


def pointwise_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int | tuple[int, int] = 1
) -> Tensor:
    r"""Mixes the channels of every pixel: ``F.conv2d`` with a 1x1 kernel, trained faster on CPUs.

    .. math:: y_{n,o,p} = b_o + \sum_c w_{oc}\, x_{n,c,p}

    Args:
        x: images ``[N, C, H, W]`` or one image ``[C, H, W]``; channels_last runs natively, contiguous too on CPUs where
            that was measured faster, else by stock PyTorch; float32, bfloat16, float16 or float64.
        weight: ``[D, C, 1, 1]``, in the dtype of ``x``.
        bias: ``[D]``, or None.
        stride: of the output positions, one int or (height, width).

    Returns:
        ``[N, D, ceil(H / stride), ceil(W / stride)]`` in the dtype and memory format of ``x``; under autocast in its
        dtype. For backward x and weight are kept.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype is not supported, or differs from that of ``x`` outside autocast.
        RuntimeError: a forced backend cannot run, or tensors are on different devices.

    Cost: the products of ``F.conv2d``; the gradient of the weight reads x and dy once. y and the gradient of x come
        from a kernel of this package where it was measured faster than PyTorch's libraries, on AMD's CPUs and for small
        weights or planes on Intel's, or the backend is forced, else from them. On CPUs without instructions for
        bfloat16 or float16 a few images at a time are converted and multiplied in float32, in 4 MiB more memory per
        thread, or as much as one image needs; with AVX-512, bfloat16 of few channels or products is left to oneDNN. On
        GPUs, and where ``fusedtrain.explain("pointwise_conv2d", x, weight, ...)`` says so, stock PyTorch runs.
    Numerics: sums in float32 (float64 for float64), one rounding at the end; deterministic, and the gradient of the
        weight is independent of threads where a kernel of this package computes it.
    Source: Lin et al., Network In Network, https://arxiv.org/abs/1312.4400
    """
    if isinstance(x, Tensor) and x.dim() == 3:
        return pointwise_conv2d(x[None], weight, bias, stride)[0]
    return _product(x, weight, bias, stride)[0]


def with_moments(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int | tuple[int, int] = 1
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """``pointwise_conv2d``, with what the batch normalisation behind it needs.

    Returns:
        y, and what ``batch_norm_act`` takes as ``moments`` of y where the kernel computes it, which gathers them on the
        way. None elsewhere.
    """
    return _product(x, weight, bias, stride, with_moments=True)


def _cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors as autocast has them."""
    if not torch._C._is_any_autocast_enabled():
        return x, weight, bias
    _common.check_images("pointwise_conv2d", x)
    return _common.autocast(x, weight, bias)


def _arguments(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride
) -> tuple[Tensor, Tensor, Tensor | None, list[int]]:
    """The arguments, cast and checked."""
    x, weight, bias = _cast(x, weight, bias)
    return x, weight, bias, _checked(x, weight, bias, stride)


def _checked(x: Tensor, weight: Tensor, bias: Tensor | None, stride) -> list[int]:
    """Checks what autocast has cast; returns the stride."""
    _common.check_images("pointwise_conv2d", x)
    _check(x, weight, bias)
    stride = _common.pair("pointwise_conv2d", "stride", stride, 1)
    return [1, 1] if stride == [1, 1] else stride  # in graphs of torch 2.10 a 1 may be a symbol, too


@remembered
def choose(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int]) -> _rules.Plan | None:
    """What runs; None: all of it stock PyTorch."""
    impl = select("pointwise_conv2d", IMPLS, x, weight, bias, stride)
    if impl.backward is None or x.numel() == 0:
        return None
    return _rules.plan(_common.dense(x), weight, stride, runs_whole(impl, x, weight, bias, stride))


def run(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], plan: _rules.Plan | None) -> Tensor:
    """The convolution of dense x, which autograd does not see, as :func:`choose` has chosen."""
    if plan is None:
        return reference(x, weight, bias, stride)
    return _common.in_format_of(_forward(x, weight, bias, stride, plan), x)


def gradients(dy: Tensor, x: Tensor, weight: Tensor, stride: list[int], plan: _rules.Plan | None, need) -> tuple:
    """Its gradients: of x, weight and bias."""
    dy = _common.dense_like(dy, x)
    if plan is None:
        return reference_backward(dy, x, weight, stride, need)
    return _backward(dy, x, weight, stride, plan, need)


@remembered
def planned(x: Tensor, weight: Tensor, bias: Tensor | None, stride) -> tuple:
    """Checks the arguments of the op, which autocast has cast; returns what :func:`as_planned` takes."""
    return unchecked(x, weight, bias, _checked(x, weight, bias, stride))


@remembered
def unchecked(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int]) -> tuple:
    """Returns what runs, None for stock PyTorch, the stride, whether gradients are recorded, and of plain tensors."""
    plan = choose(x, weight, bias, stride)
    recording = plan is not None and _common.needs_autograd(x, weight, bias)
    return plan, stride, recording, recording and _common.plain(x, weight, bias)


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride, with_moments: bool = False
) -> tuple[Tensor, tuple | None]:
    x, weight, bias = _cast(x, weight, bias)
    return as_planned(planned(x, weight, bias, stride), x, weight, bias, with_moments)


def as_planned(
    call: tuple, x: Tensor, weight: Tensor, bias: Tensor | None, with_moments: bool
) -> tuple[Tensor, tuple | None]:
    """The convolution as :func:`planned` says, and the moments as :func:`with_moments` returns them."""
    plan, stride, recording, plain = call
    if plan is None:
        return reference(x, weight, bias, stride), None
    x = _common.dense(x)
    inputs, apply = (x, weight, bias, stride), _common.record if plain else _common.apply
    if with_moments and plan.moments:
        y, *moments = apply(_PointwiseConv2dStats, *inputs, plan) if recording else _STATS(*inputs)
        return _common.in_format_of(y, x), tuple(moments)
    y = apply(_PointwiseConv2d, *inputs, plan) if recording else _forward(*inputs, plan)
    return _common.in_format_of(y, x), None

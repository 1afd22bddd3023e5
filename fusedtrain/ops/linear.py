r"""linear: the last dimension times a matrix, as a 1x1 convolution of as many pixels as there are rows.

.. math:: y_{r,o} = b_o + \sum_c w_{oc}\, x_{r,c}
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtrain.backend import Impl, is_automatic, register, select
from fusedtrain.ops import _common
from fusedtrain.ops._pointwise_rules import takes

_PRODUCT, _DW = torch.ops.fusedtrain.pointwise_conv2d.default, torch.ops.fusedtrain.pointwise_conv2d_dw.default


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


_PLAIN = (Tensor, torch.nn.Parameter)


def _why_not_cpu(x: Tensor, *others) -> str | None:
    """Tools that quantise or shard a network look for Linear layers, and give them weights of other classes."""
    special = {type(t).__name__ for t in (x, *others) if t is not None and type(t) not in _PLAIN}
    special -= {"FakeTensor"}  # a tensor without data, of torch.export
    return _common.why_not_cpu(x) or (f"a {special.pop()} stands in the place of a tensor" if special else None)


_FEW = 32  # rows: the weight is packed for each call
_SMALL = 1 << 22  # products
_LARGE = 1 << 23  # elements in and out
_FEW_WEIGHTS = 1 << 18  # whose gradient in bfloat16 the kernel sums faster: of more, stock does
# Products of a dtype that the CPU does not multiply, from which on converting gains: PyTorch takes 3 to 50 times as
# long over them (benchmarks/LOG.md, 2026-11-30).
_SMALL_CONVERTED = 1 << 20
_CHUNK = 1 << 20  # elements in and out converted at a time: they stay in the caches
_TOO_SMALL = f"fewer than {_FEW} rows or {_SMALL} products: stock calls cost less"


# The CPUs on which the kernel is faster, by dtype. MKL, which PyTorch multiplies float32 with, takes AVX2 on AMD's; the
# first whose AVX-512 is twice as wide is Zen 5 (benchmarks/LOG.md, 2026-11-24; bfloat16: 2026-11-26).
_ZEN = {torch.float32: 5, torch.bfloat16: 4}


def _slower(x: Tensor, weight: Tensor | None = None, *_) -> str | None:
    rows = x.numel() // max(1, x.shape[-1])
    if not _common.cpu_multiplies(x.dtype):
        small = weight is not None and _common.is_less(rows * weight.numel(), _SMALL_CONVERTED)
        return f"fewer than {_SMALL_CONVERTED} products: converting them costs more" if small else None
    if _common.is_less(rows, _FEW) or (weight is not None and _common.is_less(rows * weight.numel(), _SMALL)):
        return _TOO_SMALL
    if _common.zen() != _ZEN.get(x.dtype) or not takes(x.dtype):
        return f"stock PyTorch was not measured to be slower on this CPU in {x.dtype}"
    if x.dtype == torch.bfloat16 and weight is not None and _common.is_less(rows * sum(weight.shape), _LARGE):
        return f"fewer than {_LARGE} elements in and out: stock products in bfloat16 were measured faster in the caches"
    return None


def _pixels(rows: Tensor) -> Tensor:
    """``[R, C]`` as one channels_last image ``[1, C, R, 1]``."""
    return rows.view(1, rows.shape[0], 1, rows.shape[1]).permute(0, 3, 1, 2)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _parts(*rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """These rows, a few of each at a time; where torch.compile traces, whose loops would know their number, all."""
    if torch.compiler.is_compiling():
        return iter([rows])
    few = max(1, _CHUNK * torch.get_num_threads() // sum(t.shape[1] for t in rows))
    return zip(*(t.split(few) for t in rows))


def _product_in_float32(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    weight, bias, y = weight.float(), None if bias is None else bias.float(), rows.new_empty(len(rows), len(weight))
    with torch.no_grad(), torch.autocast("cpu", enabled=False):  # which would cast back
        for part, out in _parts(rows, y):
            out.copy_(F.linear(part.float(), weight, bias))
    return y


def _dw_in_float32(dy: Tensor, x: Tensor) -> Tensor:
    dw = dy.new_zeros(dy.shape[1], x.shape[1], dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for some_dy, some_x in _parts(dy, x):
            dw.addmm_(some_dy.float().t(), some_x.float())
    return dw.to(x.dtype)


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not _common.cpu_multiplies(rows.dtype):
        return _product_in_float32(rows, weight, bias)
    if not takes(rows.dtype):
        return F.linear(rows, weight, bias)
    y = _PRODUCT(_pixels(rows), weight[:, :, None, None], bias, [1, 1])
    return y.permute(0, 2, 3, 1).reshape(rows.shape[0], weight.shape[0])


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _multiply(_rows(x), weight, bias).view(*x.shape[:-1], weight.shape[0])


def _backward(dy: Tensor, x: Tensor, weight: Tensor, need) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    need_dx, need_dw, need_db = need
    dx = dw = db = None
    rows = _rows(dy if dy.dtype == x.dtype else dy.to(x.dtype))
    if need_dx:
        dx = _multiply(rows, weight.t(), None).view(x.shape)
    if need_dw and not _common.cpu_multiplies(x.dtype):
        dw = _common.strided_like(_dw_in_float32(rows, _rows(x)), weight)
    elif need_dw and x.dtype != torch.float32 and not (takes(x.dtype) and weight.numel() <= _FEW_WEIGHTS):
        dw = rows.t() @ _rows(x)
    elif need_dw:
        dw = _common.strided_like(_DW(_pixels(rows), _pixels(_rows(x)), [1, 1]).view(weight.shape), weight)
    if need_db:
        db = rows.sum(0)
    return dx, dw, db


def _asked(x, weight=None, bias=None) -> tuple:
    return _common.autocast(x, weight, bias)


# On a GPU this is a matrix product, which PyTorch's own libraries run: every backend there is stock PyTorch.
IMPLS = register(
    "linear",
    {
        "cuda": Impl(reference, None, _common.why_not_cuda),
        "cpu": Impl(_forward, _backward, _why_not_cpu, _slower),
        "triton": Impl(reference, None, _common.why_not_triton, _common.triton_slower),
        "reference": Impl(reference, None, _common.never_why_not),
    },
    _asked,
)


def choose(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether this package's way of it runs, and not stock PyTorch."""
    if is_automatic() and _slower(x, weight):
        return False  # as select() would say, which takes as long as a small product
    impl = select("linear", IMPLS, x, weight, bias)
    return impl.backward is not None and x.numel() > 0 and weight.shape[0] > 0


def run(x: Tensor, weight: Tensor, bias: Tensor | None, kernel: bool) -> Tensor:
    """The product, which autograd does not see, as :func:`choose` has chosen."""
    return (_forward if kernel else reference)(x, weight, bias)


def gradients(dy: Tensor, x: Tensor, weight: Tensor, kernel: bool, need) -> tuple[Tensor | None, ...]:
    """Its gradients, from rows ``[R, D]`` and ``[R, C]``: of x, weight and bias."""
    if kernel:
        return _backward(dy, x, weight, need)
    dw = _common.strided_like(dy.t() @ x, weight) if need[1] else None
    return dy @ weight if need[0] else None, dw, dy.sum(0) if need[2] else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return _common.owned(_forward(x, weight, bias))

    @staticmethod
    @_common.once_differentiable
    def backward(ctx, dy):
        return _backward(dy, *ctx.saved_tensors, _common.needed(ctx, 0, 1, 2))


def _check_x(x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"linear: x must be a Tensor, got {type(x).__name__}")
    if x.dim() == 0:
        raise ValueError("linear: x must have shape [..., C], got a scalar")
    if x.dtype not in _common.DTYPES:
        raise TypeError(f"linear: x must be float32, bfloat16, float16 or float64, got {x.dtype}")


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.size(1) != x.size(-1):
        got = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"linear: weight must have shape [D, C] = [D, {x.shape[-1]}], got {got}")
    if bias is not None and (bias.dim() != 1 or bias.size(0) != weight.size(0)):
        raise ValueError(f"linear: bias must have shape [{weight.shape[0]}] or be None, got {list(bias.shape)}")
    _common.check_same_kind("linear", x, weight=weight, bias=bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Multiplies the last dimension by a matrix: ``F.linear``, trained faster on some CPUs.

    .. math:: y_{r,o} = b_o + \sum_c w_{oc}\, x_{r,c}

    Args:
        x: ``[..., C]``, any strides (others than contiguous through one copy); float32, bfloat16, float16 or float64.
        weight: ``[D, C]``, in the dtype of ``x``.
        bias: ``[D]``, or None.

    Returns:
        ``[..., D]`` in the dtype of ``x``, contiguous; under autocast in its dtype. For backward x and weight are kept.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype is not supported, or differs from that of ``x`` outside autocast.
        RuntimeError: a forced backend cannot run, or tensors are on different devices.

    Cost: the products of ``F.linear``. float32 on AMD's CPUs from Zen 5 on runs in the kernel of ``pointwise_conv2d``,
        with all 512 bits of the vectors, which the library behind ``F.linear`` does not use there; so does bfloat16 on
        Zen 4 from 8 million elements of x and y on. On CPUs without instructions for bfloat16 or float16 a few rows at
        a time are converted and multiplied in float32. Elsewhere, on GPUs and for few rows stock PyTorch runs;
        ``fusedtrain.explain("linear", x, weight)`` tells.
    Numerics: sums in float32 (float64 for float64), one rounding at the end; deterministic, and independent of
        threads where a kernel of this package runs.
    Source: ``torch.nn.functional.linear``
    """
    _check_x(x)
    if x.is_nested:
        return reference(x, weight, bias)
    x, weight, bias = _common.autocast(x, weight, bias)
    _check(x, weight, bias)
    if not choose(x, weight, bias):
        return reference(x, weight, bias)
    inputs = (x, weight, bias)
    return _common.apply(_Linear, *inputs) if _common.needs_autograd(*inputs) else _forward(*inputs)

r"""pointwise_conv2d: a 1x1 convolution, a product of matrices over all pixels.

.. math:: y_{n,o,p} = b_o + \sum_c w_{oc}\, x_{n,c,p}
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtrain import _extension
from fusedtrain.backend import Impl, register, runs_whole, select
from fusedtrain.ops import _amx_products, _common, _schema

_VECTOR = 16  # channels


def _read_pixels(x: Tensor, stride: list[int]) -> tuple[Tensor, list[int]]:
    """x and stride for stock PyTorch. Where channels fill no vector of the CPU, oneDNN's gradient of the weight writes
    behind its workspace for strided channels_last images, so it is given the pixels that the convolution reads."""
    if x.device.type != "cpu" or x.shape[1] >= _VECTOR or max(stride) == 1:
        return x, stride
    return F.avg_pool2d(x, 1, stride), [1, 1]  # unlike a slice's, its gradient is in the format of x


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int]) -> Tensor:
    read, stride = (x, stride) if max(stride) == 1 else _read_pixels(x, stride)
    y = F.conv2d(read, weight, bias, stride)
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


_HAS_MKL = torch.backends.mkl.is_available()
_FEW = 16  # images: of fewer ATen runs MKL's float32 product on one thread
# Summands: over more of them the rounding errors of oneDNN are more than twice those of MKL (1.4 times here).
_MOST_CHANNELS = 384
_CHUNK = 1 << 20  # elements in and out converted at a time: they stay in the caches


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int]) -> Tensor:
    """``F.conv2d``, in float32 by oneDNN also where ATen would take MKL: one thread and few images, at half the speed
    on CPUs that are not Intel's."""
    if torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available():
        bias = None if bias is None else bias.contiguous()  # whose strides the operator does not look at
        return torch.ops.aten.mkldnn_convolution(x, weight, bias, [0, 0], stride, [1, 1], 1)
    return F.conv2d(x, weight, bias, stride)


def _in_float32(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int]) -> Tensor:
    """The product of a dtype that the CPU does not multiply, a few images at a time."""
    y = _empty(x, weight, stride, _common.format_of(x))
    convolve = F.conv2d if _limits(few=True) else _onednn
    weight, bias = weight.float(), None if bias is None else bias.float()
    read = _read_by(x, stride)
    images = max(1, _CHUNK * torch.get_num_threads() * x.shape[0] // max(1, read.numel() + y.numel()))
    with torch.no_grad(), torch.autocast("cpu", enabled=False):  # which would write in place, and cast back
        for part, out in zip(read.split(images), y.split(images)):
            out.copy_(convolve(part.float(), weight, bias, [1, 1]))
    return y


# Elements of a weight, and products, up to which conversion costs more than it gains (benchmarks/LOG.md, 2026-11-28).
_TINY_WEIGHT, _FEW_CONVERTED = 512, 1_500_000


def _is_converted_within(x: Tensor, weight: Tensor, stride: list[int]) -> bool:
    """Whether oneDNN, which has code for bfloat16 on every CPU with AVX-512, is faster than :func:`_in_float32`."""
    if x.dtype != torch.bfloat16 or _extension.BUILD_INFO.get("isa_active") != "avx512":
        return False
    few = x.numel() * weight.shape[0] < _FEW_CONVERTED * stride[0] * stride[1]
    return _common.is_channels_last(x) and (few or weight.numel() <= _TINY_WEIGHT)


def _by_library(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int]) -> Tensor:
    if not _common.cpu_multiplies(x.dtype) and not _is_converted_within(x, weight, stride):
        return _in_float32(x, weight, bias, stride)
    float32 = x.dtype == torch.float32 and x.shape[1] <= _MOST_CHANNELS
    y = (_onednn if float32 else F.conv2d)(x, weight, bias, stride)
    return y.contiguous(memory_format=_common.format_of(x))


_schema.LIBRARY.impl("pointwise_conv2d_by_library", _by_library, "CPU")


# CPUs, by vendor and instruction set, on which the kernel is faster than PyTorch's libraries (benchmarks/LOG.md,
# 2026-11-23).
_KERNEL_IS_FASTER = {
    torch.float32: {("amd", "avx512_bf16"), ("amd", "avx512"), ("amd", "avx2")},
    torch.bfloat16: {("amd", "avx512_bf16")},
}


def _takes(dtype: torch.dtype) -> bool:
    """Whether the kernel multiplies a dtype on this CPU."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and _common.has_bfloat16())


_MANY = 40  # channels, from which on bfloat16 gains (benchmarks/LOG.md, 2026-11-23; Zen 4: 2026-11-26)


def _by_kernel(x: Tensor, channels: int, whole: bool = False) -> bool:
    """Whether the product of x with a weight of so many output channels runs in the kernel; ``whole``: wherever that
    can."""
    return (_takes(x.dtype) if whole else _kernel_gains(x, channels)) and _common.is_channels_last(x)


def _kernel_gains(x: Tensor, channels: int) -> bool:
    """Whether the kernel is faster than PyTorch's libraries over channels_last images like x."""
    chosen = _amx_products.choose("forward", x, x.shape[1], channels)
    if chosen is not None:
        return chosen == "kernel"
    cpu = _extension.BUILD_INFO
    rules = _products(x)
    if rules is not None:
        return x.shape[1] * channels < _SMALL_WEIGHT and (rules.kernel_widens or channels < x.shape[1])
    if (cpu.get("cpu_vendor"), cpu.get("isa_active")) not in _KERNEL_IS_FASTER.get(x.dtype, ()):
        return False
    return x.dtype == torch.float32 or x.shape[1] >= _MANY or (channels <= x.shape[1] and _common.zen() == 4)


# The same for contiguous images (benchmarks/LOG.md, 2026-11-24; AVX2: 2026-11-27).
_KERNEL_IS_FASTER_ON_PLANES = {
    torch.float32: {("amd", "avx512_bf16"), ("amd", "avx512"), ("amd", "avx2")},
    torch.bfloat16: {("amd", "avx512_bf16")},
}


def _by_planes(x: Tensor, stride: list[int], whole: bool = False) -> bool:
    """Whether contiguous x is multiplied in the kernel; ``whole``: wherever that can."""
    cpu = _extension.BUILD_INFO
    fast = (cpu.get("cpu_vendor"), cpu.get("isa_active")) in _KERNEL_IS_FASTER_ON_PLANES.get(x.dtype, ())
    if not fast and not whole:
        rules = _products(x, channels_last=False)
        fast = rules is not None and rules.kernel_on_small_planes and _common.is_less(x.shape[2] * x.shape[3], _PLANE)
    return (_takes(x.dtype) if whole else fast) and stride == [1, 1] and x.is_contiguous()


def _stock_over_planes(part: str, x: Tensor, weight: Tensor) -> bool:
    """Whether stock PyTorch is faster at "dx" or "dw" of contiguous x, where the kernel could run
    (benchmarks/LOG.md, 2026-11-29)."""
    if _common.zen() != 4 or not _takes(x.dtype) or _common.is_channels_last(x):
        return False
    n, c, h, w = x.shape
    few, size = _common.is_less(n, _FEW), weight.numel()
    if x.dtype == torch.float32:
        return part == "dw" and (size >= _STOCK_DW or (few and c > _STOCK_DW_CHANNELS))
    if part == "dx":
        return not _common.is_less(size, _STOCK_DX_A_PIXEL * n * h * w)
    widest = size >= _STOCK_DW << 2 and weight.shape[0] > c
    return widest or not (few or _common.is_less(size, _STOCK_DW_A_PIXEL * h * w))


class _Limits(NamedTuple):
    """Elements of a float32 weight up to which what runs here is faster than stock."""

    forward: int
    dx: int
    dw: int


# By the CPU's vendor, its instruction set, and whether ATen would take MKL; on others there is no limit
# (benchmarks/LOG.md, 2026-11-22).
_LIMITS = {
    ("intel", "amx_bf16", True): _Limits(forward=0, dx=0, dw=1 << 16),  # with a stride
    ("intel", "avx512", True): _Limits(forward=0, dx=1 << 14, dw=1 << 14),
    ("intel", "avx2", True): _Limits(forward=0, dx=1 << 14, dw=0),
}


def _limits(few: bool) -> _Limits | None:
    cpu = _extension.BUILD_INFO
    return _LIMITS.get((cpu.get("cpu_vendor"), cpu.get("isa_active"), few))


def _faster(part: str, x: Tensor, weight: Tensor) -> bool:
    """Whether "forward", "dx" or "dw" of float32 images is faster here than in stock PyTorch."""
    few = _common.is_less(x.shape[0], _FEW)
    limits = _limits(few)
    if limits is not None:
        return weight.numel() <= getattr(limits, part)
    return few or part == "dw"


# Up to here the calls cost more than what the kernels may gain: elements, on Zen 5 products.
_SMALL, _FEW_PRODUCTS = 200_000, 1_200_000
_TOO_SMALL = f"fewer than {_SMALL:,} elements, or {_FEW_PRODUCTS:,} products on Zen 5: stock calls cost less"


def gains_in_small(x: Tensor, weight: Tensor, stride: Sequence[int] = (1, 1)) -> bool | None:
    """Whether the kernel is faster than stock PyTorch over small images; None where that was not measured.

    On Zen 5: float32 by the products; bfloat16 in training at any size, as a call of oneDNN costs twice the kernel's
    (benchmarks/LOG.md, 2026-11-25).
    """
    # Some of the channels of such images, too: they are copied first.
    channels_last = x.stride(1) <= x.stride(3)
    planes = x.stride()[1:] == (x.shape[2] * x.shape[3], x.shape[3], 1) and max(stride) == 1
    if _common.zen() != 5 or not _takes(x.dtype) or not (channels_last or planes):
        return None
    if x.dtype == torch.float32:
        return not _common.is_less(x.numel() * weight.shape[0], _FEW_PRODUCTS * stride[0] * stride[1])
    return _common.needs_autograd(x, weight) or (channels_last and _kernel_gains(x, weight.shape[0]))


def _slower(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: list[int] | None = None) -> str | None:
    float32 = x.dtype == torch.float32
    if not float32 and not _common.cpu_multiplies(x.dtype):
        return None  # PyTorch is several times slower without instructions, up to a hundred times without AVX-512
    (n, c, h, w), d = x.shape, weight.shape[0]
    small = _common.is_less(n * h * w * (c + d), _SMALL)
    if small and float32 and _common.is_less(n * h * w * c * d, _FEW_PRODUCTS):
        return _TOO_SMALL
    gains = gains_in_small(x, weight, stride or (1, 1))
    if gains:
        return None
    if small or (gains is False and float32):
        return _TOO_SMALL
    planes = not _common.is_channels_last(x)
    stride = stride or [1, 1]
    if _chosen("dw", x, weight, stride) is not None:
        any_of_ours = any(_chosen(part, x, weight, stride) != "stock" for part in reversed(_PARTS))
        return None if any_of_ours else "stock PyTorch was measured faster: images, channels and layout like these"
    read_first = stride != [1, 1] and (_is_read_first(x, weight) or _is_read_first(x, weight, backward=True))
    products = any(_is_product_of_planes(part, x, weight, stride) for part in ("forward", "dw"))
    if planes and not products and not read_first and not _by_planes(x, stride):
        return "stock PyTorch was measured faster: contiguous images, or a stride over them"
    if not planes and _common.is_less(x.numel(), _SMALL) and not _kernel_gains(x, d):  # which gains in y, too
        return _TOO_SMALL
    limits = _limits(_common.is_less(x.shape[0], _FEW)) if float32 and not products and not read_first else None
    if limits is not None and weight.numel() > max(limits):
        return f"stock PyTorch was measured faster: weights of more than {max(limits)} elements on this CPU"
    return None


class _Products(NamedTuple):
    """Where MKL's products of matrices are faster than oneDNN's convolutions, which ATen takes from 16 images on."""

    forward: int  # channels of x, from which on y is one; of fewer channels than x it is not: the weight is transposed
    dx: int  # channels of x, no fewer than those of y, from which on dx is one; 0: of any
    dw: int  # elements of the weight, from which on its gradient is one; the kernel is faster below
    kernel_widens: bool  # whether the kernel is faster at small weights even where y has more channels than x
    kernel_on_small_planes: bool  # whether the kernel is faster over contiguous images of fewer pixels than _PLANE
    planes_dw: int  # of contiguous images: channels of y, from which on dw is one, or if there are more than in x


# On Intel's CPUs, by their instruction set: up to 1.8 times as fast, of contiguous images, which oneDNN rearranges,
# in the mean 1.3 times (benchmarks/LOG.md, 2026-11-28).
_PRODUCTS = {
    "avx512": _Products(forward=96, dx=0, dw=1 << 14, kernel_widens=True, kernel_on_small_planes=True, planes_dw=80),
    "avx2": _Products(forward=16, dx=64, dw=1 << 12, kernel_widens=False, kernel_on_small_planes=False, planes_dw=1),
}
_LARGE_WEIGHT = 1 << 19  # elements, up to which a sum over contiguous images stays in the cache
_PLANE = 100  # pixels, from which on contiguous y and dx are products of every image
_SMALL_WEIGHT = 1 << 14  # elements, below which the kernel is faster still
_LARGE = 32 << 20  # bytes of a gradient, or of images with a stride, which oneDNN is faster at
# Of channels_last images: channels, and with AMX elements of a weight, from which on a copy costs less than it gains.
_MANY_STRIDED, _LARGE_STRIDED = 128, 1 << 20
_WEIGHTS_A_PIXEL = 250  # on AMD's: elements of a weight for each pixel of few contiguous images, up to which it does so
_MANY_NARROW = 250_000  # on AMD's: elements of contiguous bfloat16 images, from which on it does so
# Elements of a weight, from which on stock is faster on Zen 4 over contiguous images; of bfloat16 for each pixel of one
# image at its gradient, and for each pixel of all images at that of x. Of few float32 images: channels.
_STOCK_DW, _STOCK_DW_A_PIXEL, _STOCK_DX_A_PIXEL, _STOCK_DW_CHANNELS = 1 << 18, 2500, 2000, 64


def _read_by(x: Tensor, stride: list[int]) -> Tensor:
    """The pixels that a convolution reads, a view."""
    return x[:, :, :: stride[0], :: stride[1]]


def _is_read_first(x: Tensor, weight: Tensor, backward: bool = False) -> bool:
    """Whether the pixels that a stride reads are copied for a convolution without one: oneDNN, and ATen for few images,
    first rearrange all of a contiguous image. Measured, up to 3 times (benchmarks/LOG.md, 2026-11-28 and 29).

    Not over channels_last images where torch.compile traces: the program would hold for even or for odd sizes alone.
    """
    cpu = _extension.BUILD_INFO
    vendor, isa = cpu.get("cpu_vendor"), cpu.get("isa_active")
    few = _common.is_less(x.shape[0], _FEW)
    if vendor == "amd":
        if _common.zen() == 5:  # not measured
            return False
        if _common.is_channels_last(x):  # the kernel takes a stride, forward
            return backward and not torch.compiler.is_compiling() and _kernel_gains(x, weight.shape[0])
        if not _by_planes(x, [1, 1]):
            return False
        if x.dtype == torch.bfloat16:
            return weight.numel() <= _LARGE_WEIGHT and not _common.is_less(x.numel(), _MANY_NARROW)
        pixels = x.shape[0] * x.shape[2] * x.shape[3]
        return not few or not _common.is_less(_WEIGHTS_A_PIXEL * pixels, weight.numel())
    if _amx_products.holds_for(x):
        if not _common.is_channels_last(x):
            return x.is_contiguous()
        many = x.shape[1] >= _MANY_STRIDED if backward else weight.numel() >= _LARGE_STRIDED
        return many and not torch.compiler.is_compiling()
    if x.dtype != torch.float32 or vendor != "intel" or isa not in _PRODUCTS or not _HAS_MKL:
        return False
    if _common.is_channels_last(x):
        many = weight.shape[0] >= x.shape[1] >= _MANY_STRIDED and not few
        return many and not torch.compiler.is_compiling() and x.numel() * x.element_size() <= _LARGE
    return x.is_contiguous() and (weight.numel() <= _LARGE_WEIGHT or not few)


def _products(x: Tensor, channels_last: bool = True) -> _Products | None:
    """The rules for those CPUs, where they hold for images like x, which are of that layout."""
    cpu = _extension.BUILD_INFO
    if cpu.get("cpu_vendor") != "intel" or x.dtype != torch.float32 or not _HAS_MKL:
        return None
    if _common.is_channels_last(x) != channels_last or _common.is_less(x.shape[0], _FEW):
        return None
    return _PRODUCTS.get(cpu.get("isa_active")) if channels_last or x.is_contiguous() else None


def _is_product_of_planes(part: str, x: Tensor, weight: Tensor, stride: list[int]) -> bool:
    """``_is_product`` of contiguous images."""
    rules = _products(x, channels_last=False) if stride == [1, 1] else None
    if rules is None:
        return False
    if part == "dw":  # image after image: compiled, their number would be part of the program
        wide = weight.shape[0] >= min(rules.planes_dw, weight.shape[1] + 1)
        return wide and weight.numel() <= _LARGE_WEIGHT and not torch.compiler.is_compiling()
    return not _common.is_less(x.shape[2] * x.shape[3], _PLANE)


def _is_product(part: str, x: Tensor, weight: Tensor, stride: list[int]) -> bool:
    """Whether "forward", "dx" or "dw" of x, where the kernel does not run, is a product of matrices."""
    chosen = _chosen(part, x, weight, stride)
    if chosen is not None:
        return chosen == "product"
    rules = _products(x) if stride == [1, 1] else None
    if rules is None:
        return _is_product_of_planes(part, x, weight, stride)
    d, c = weight.shape[:2]
    if part == "forward":
        return d >= c >= rules.forward
    if part == "dx":
        fits = _common.is_less(x.numel() * x.element_size(), _LARGE + 1)
        return fits and (rules.dx == 0 or c >= max(d, rules.dx))
    return weight.numel() >= rules.dw


def _pixels(x: Tensor) -> Tensor:
    """Channels_last images as a matrix."""
    n, c, h, w = x.shape
    return x.permute(0, 2, 3, 1).reshape(n * h * w, c)


def _product_of(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not _common.is_channels_last(x):
        matrices = weight[None, :, :, 0, 0].expand(x.shape[0], -1, -1)
        y = torch.bmm(matrices, x.flatten(2)).reshape(x.shape[0], -1, *x.shape[2:])
        return y if bias is None else y.add_(bias[:, None, None])
    pixels, matrix = _pixels(x), weight[:, :, 0, 0].t()
    y = torch.mm(pixels, matrix) if bias is None else torch.addmm(bias, pixels, matrix)
    return y.view(x.shape[0], *x.shape[2:], weight.shape[0]).permute(0, 3, 1, 2)


def _dw_product(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of the weight, the narrower side first, which MKL is faster with."""
    if not _common.is_channels_last(x):
        images = list(zip(dy.flatten(2), x.flatten(2).transpose(1, 2)))
        dw = torch.mm(*images[0])
        for image in images[1:]:
            dw.addmm_(*image)
        return dw[:, :, None, None]
    dy, x = _pixels(dy), _pixels(x)
    dw = torch.mm(dy.t(), x) if dy.shape[1] <= x.shape[1] else torch.mm(x.t(), dy).t().contiguous()
    return dw[:, :, None, None]


_KERNEL, _DW = torch.ops.fusedtrain.pointwise_conv2d.default, torch.ops.fusedtrain.pointwise_conv2d_dw.default
_KERNEL_ON_PLANES = torch.ops.fusedtrain.pointwise_conv2d_contiguous.default
_BY_LIBRARY = torch.ops.fusedtrain.pointwise_conv2d_by_library.default
_STATS = torch.ops.fusedtrain.pointwise_conv2d_stats.default


def reference_backward(dy, x, weight, stride, need) -> tuple[Tensor, Tensor, Tensor]:
    geometry = (stride, [0, 0], [1, 1], False, [0, 0], 1)
    return torch.ops.aten.convolution_backward(dy, x, weight, [weight.shape[0]], *geometry, need)


_PARTS = ("forward", "dx", "dw")


def _chosen(part: str, x: Tensor, weight: Tensor, stride: list[int]) -> str | None:
    """What runs "forward", "dx" or "dw" on CPUs with AMX; None on others."""
    return _amx_products.choose(part, x, weight.shape[1], weight.shape[0]) if stride == [1, 1] else None


def _run(chosen: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if chosen == "product":
        return _product_of(x, weight, bias)
    if chosen == "stock":
        return F.conv2d(x, weight, bias)
    return _KERNEL(x, weight, bias, [1, 1]) if _common.is_channels_last(x) else _KERNEL_ON_PLANES(x, weight, bias)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], whole: bool) -> Tensor:
    if stride != [1, 1] and not whole and _is_read_first(x, weight):
        x, stride = _read_by(x, stride).contiguous(memory_format=_common.format_of(x)), [1, 1]
    chosen = None if whole else _chosen("forward", x, weight, stride)
    if chosen is not None:
        return _run(chosen, x, weight, bias)
    if _by_kernel(x, weight.shape[0], whole):
        return _KERNEL(x, weight, bias, stride)
    if _by_planes(x, stride, whole):
        return _KERNEL_ON_PLANES(x, weight, bias)
    if not whole and _is_product("forward", x, weight, stride):
        return _product_of(x, weight, bias)
    float32 = x.dtype == torch.float32 and _faster("forward", x, weight)
    run = _BY_LIBRARY if whole or float32 or not _common.cpu_multiplies(x.dtype) else F.conv2d
    return run(x, weight, bias, stride)


def _transposed(weight: Tensor) -> Tensor:
    """Torch copies a transposed matrix five times as fast as four dimensions of which two are transposed."""
    return weight.flatten(1).t().contiguous()[:, :, None, None]


def _dx(dy: Tensor, x: Tensor, weight: Tensor, stride: list[int], whole: bool) -> Tensor:
    """A 1x1 convolution itself; with a stride, among zeros."""
    chosen = None if whole else _chosen("dx", x, weight, stride)
    if chosen == "stock":
        return reference_backward(dy, x, weight, stride, [True, False, False])[0]
    if chosen is not None:
        return _run(chosen, dy, weight.transpose(0, 1) if _common.is_channels_last(x) else _transposed(weight))
    kernel = _by_kernel(dy, x.shape[1], whole) and (whole or _products(x) is None or dy.shape[1] > x.shape[1])
    if stride == [1, 1] and kernel:
        return _KERNEL(dy, weight.transpose(0, 1), None, stride)
    if not whole and _is_product("dx", x, weight, stride):
        return _product_of(dy, weight.transpose(0, 1))
    narrows = whole or _products(x, channels_last=False) is None or dy.shape[1] <= x.shape[1]
    if narrows and _by_planes(dy, stride, whole) and (whole or not _stock_over_planes("dx", x, weight)):
        return _KERNEL_ON_PLANES(dy, _transposed(weight), None)
    if _common.cpu_multiplies(x.dtype) and not whole:
        if stride == [1, 1] and x.dtype == torch.float32 and _faster("dx", x, weight):
            return _BY_LIBRARY(dy, weight.transpose(0, 1), None, stride)
        return reference_backward(dy, x, weight, stride, [True, False, False])[0]
    product = _forward(dy, weight.transpose(0, 1), None, [1, 1], whole)
    return product if stride == [1, 1] else _among_zeros(product, x, stride)


def _among_zeros(dx: Tensor, x: Tensor, stride: list[int]) -> Tensor:
    """The gradient of x, by that of the pixels that were read."""
    whole = torch.zeros_like(x)
    _read_by(whole, stride).copy_(dx)
    return whole


def _dw_by_kernel(x: Tensor, weight: Tensor, stride: list[int]) -> bool:
    chosen = _chosen("dw", x, weight, stride)
    if chosen is not None:
        return chosen == "kernel"
    return not _stock_over_planes("dw", x, weight) and (x.dtype != torch.float32 or _faster("dw", x, weight))


def _backward(dy, x, weight, stride, whole, need) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    need_dx, need_dw, need_db = need
    if stride != [1, 1] and not whole and _is_read_first(x, weight, backward=True):
        read = _read_by(x, stride).contiguous(memory_format=_common.format_of(x))
        dx, *others = _backward(dy, read, weight, [1, 1], whole, need)
        return _among_zeros(dx, x, stride) if need_dx else None, *others
    dx = dw = db = None
    if need_dx:
        dx = _common.in_format_of(_dx(dy, x, weight, stride, whole), x)  # dy of one channel is in both formats
    if need_dw and not whole and _is_product("dw", x, weight, stride):
        dw = _common.strided_like(_dw_product(dy, x), weight)
    elif need_dw and (whole or _dw_by_kernel(x, weight, stride)):
        dw = _common.strided_like(_DW(dy, x, stride), weight)
    elif need_dw:
        read, one = _read_pixels(x, stride)
        dw = reference_backward(dy, read, weight, one, [False, True, False])[1]
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
        "cpu": Impl(_forward, _backward, _common.why_not_cpu, _slower),
        "triton": Impl(reference, None, _common.why_not_triton, _common.triton_slower),
        "reference": Impl(reference, None, _common.never_why_not),
    },
    _asked,
)


class _PointwiseConv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, stride, whole):
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.whole = stride, whole
        return _common.owned(_forward(x, weight, bias, stride, whole))

    @staticmethod
    @_common.once_differentiable
    def backward(ctx, dy, *_):
        x, weight = ctx.saved_tensors
        grads = _backward(_common.dense_like(dy, x), x, weight, ctx.stride, ctx.whole, ctx.needs_input_grad[:3])
        return *grads, None, None


class _PointwiseConv2dStats(_PointwiseConv2d):
    @staticmethod
    def forward(ctx, x, weight, bias, stride, whole):
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.whole = stride, whole
        y, mean, m2 = _STATS(x, weight, bias, stride)
        ctx.mark_non_differentiable(mean, m2)
        return _common.owned(y), mean, m2


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if not isinstance(weight, Tensor) or weight.shape[1:] != (x.shape[1], 1, 1):
        got = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"pointwise_conv2d: weight must have shape [D, C, 1, 1] = [D, {x.shape[1]}, 1, 1], got {got}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"pointwise_conv2d: bias must have shape [{weight.shape[0]}] or be None, got {list(bias.shape)}"
        )
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
    return _product(*_arguments(x, weight, bias, stride))[0]


def with_moments(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int | tuple[int, int] = 1
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """``pointwise_conv2d``, with what the batch normalisation behind it needs.

    Returns:
        y, and what ``batch_norm_act`` takes as ``moments`` of y where the kernel computes it, which gathers them on the
        way. None elsewhere.
    """
    return _product(*_arguments(x, weight, bias, stride), with_moments=True)


def _arguments(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride
) -> tuple[Tensor, Tensor, Tensor | None, list[int]]:
    """The arguments, checked, and cast as autocast does."""
    _common.check_images("pointwise_conv2d", x)
    x, weight, bias = _common.autocast(x, weight, bias)
    _check(x, weight, bias)
    return x, weight, bias, _common.pair("pointwise_conv2d", "stride", stride, 1)


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], with_moments: bool = False
) -> tuple[Tensor, tuple | None]:
    impl = select("pointwise_conv2d", IMPLS, x, weight, bias, stride)
    if impl.backward is None or x.numel() == 0:
        return reference(x, weight, bias, stride), None
    whole, x = runs_whole(impl, x, weight, bias, stride), _common.dense(x)
    recording = _common.needs_autograd(x, weight, bias)
    if with_moments and _by_kernel(x, weight.shape[0], whole):
        inputs = (x, weight, bias, stride)
        y, *moments = _PointwiseConv2dStats.apply(*inputs, whole) if recording else _STATS(*inputs)
        return _common.in_format_of(y, x), tuple(moments)
    run = _PointwiseConv2d.apply if recording else _forward
    return _common.in_format_of(run(x, weight, bias, stride, whole), x), None

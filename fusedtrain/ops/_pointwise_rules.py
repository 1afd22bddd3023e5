"""What runs a 1x1 convolution on a CPU, as it was measured: dates are those of benchmarks/LOG.md.

Each of its parts, "forward" (y), "dx" and "dw", runs in one of four ways:

- "kernel": in a kernel of this package;
- "product": as a product of matrices of PyTorch's, which knows no stride;
- "library": in oneDNN where stock PyTorch takes another library, or converted to float32 (:func:`library`);
- "stock": as in stock PyTorch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, bfloat16, float32

from fusedtrain import _extension
from fusedtrain.ops import _common

PARTS = ("forward", "dx", "dw")
# Images: of few ATen runs MKL's float32 product on one thread, of many oneDNN's convolution.
_FEW, _MANY = "fewer than 16 images", "16 images or more"
_LARGE = 32 << 20  # bytes of images, above which oneDNN is faster
_WIDE = 40  # channels, from which on AMD's CPUs gain in bfloat16


@dataclass
class _Sizes:  # no NamedTuple: graphs of torch 2.10 take properties of one for something else
    """What the rows look at: the numbers of images, of channels of x and of y, and of pixels of an image."""

    n: int
    c: int
    d: int
    plane: int
    channels_last: bool
    strided: bool = False  # some pixels are left out

    @property
    def few(self) -> bool:
        return _common.is_less(self.n, 16)

    @property
    def weight(self) -> int:
        return self.c * self.d

    @property
    def small(self) -> bool:
        return _common.is_less(self.plane, 100)

    def has(self, pixels: int) -> bool:
        return not _common.is_less(self.plane, pixels)

    def weighs_less(self, a_pixel: int, pixels: int) -> bool:
        """Whether the weight has fewer elements than so many for each of the pixels."""
        return _common.is_less(self.weight, a_pixel * pixels)

    @property
    def is_two_panels(self) -> bool:
        """Whether gradients are of 32 channels, two panels of two vectors of 8, by sums of few: as of the first
        convolutions of MobileNetV2 and EfficientNet."""
        return self.c == 32 and self.d < 32

    @property
    def fits(self) -> bool:
        """Whether x in float32 is not large."""
        return _common.is_less(self.n * self.c * self.plane * 4, _LARGE + 1)

    def multiplies(self, part: str) -> bool:
        """Whether a product can run a part. "dw" of contiguous images goes from one to the next: where torch.compile
        traces, their number would be part of the program."""
        one_matrix = self.channels_last or not self.has(2)
        return not self.strided and (part != "dw" or one_matrix or not torch.compiler.is_compiling())


# What runs a part, and where: the first that holds, else stock PyTorch.
_Where = Callable[[_Sizes], bool]
_Parts = dict[str, tuple[tuple[str, _Where], ...]]
_KERNEL, _LIBRARY = ((way, lambda s: True) for way in ("kernel", "library"))
_OF_ONE_PIXEL = ("product", lambda s: not s.has(2))

# CPUs that no table names, or dtypes.
_ANY: _Parts = {"forward": (), "dx": (), "dw": (_KERNEL,)}
_ANY_FEW_FLOAT32: _Parts = {"forward": (_LIBRARY,), "dx": (_LIBRARY,), "dw": (_KERNEL,)}

# AMD's, any number of images. dy of one channel is in both layouts: its kernel is that of contiguous images.
_ALL: _Parts = dict.fromkeys(PARTS, (_KERNEL,))
_AMD: dict[tuple[str, torch.dtype, str], _Parts] = {
    # 2026-11-23 and 30; of one pixel 2026-12-01, where convolutions take three times as long as products. Pixels of
    # 4 KiB share sets of the first cache; few pixels do not pay for panels of a weight; large ones outgrow the second.
    ("amd avx2", float32, "channels_last"): {
        "forward": (
            _OF_ONE_PIXEL,
            ("product", lambda s: s.weight >= 1 << 20),
            ("kernel", lambda s: s.c % 1024 != 0 and (not s.few or s.weighs_less(1200, s.n * s.plane))),
        ),
        "dx": (
            _OF_ONE_PIXEL,
            ("product", lambda s: s.weight >= 1 << 20),
            ("kernel", lambda s: s.d % 1024 != 0 and not s.is_two_panels),
        ),
        "dw": (
            _OF_ONE_PIXEL,
            ("product", lambda s: s.weight >= 50_000 and not s.few),
            ("kernel", lambda s: s.weight < (1 << 15 if s.few and not s.has(1000) else 50_000) and not s.is_two_panels),
        ),
    },
    ("amd avx2", float32, "contiguous"): {  # 2026-11-27 and 30, of few pixels 2026-12-01
        **dict.fromkeys(PARTS, (_OF_ONE_PIXEL, _KERNEL)),
        "dw": (_OF_ONE_PIXEL, ("kernel", lambda s: s.weight < (100_000 if s.has(25) else 1 << 12))),
    },
    ("zen 4", float32, "channels_last"): _ALL,  # 2026-11-23
    ("zen 4", float32, "contiguous"): {  # 2026-11-24 and 29
        "forward": (_KERNEL,),
        "dx": (_KERNEL,),
        "dw": (("kernel", lambda s: s.weight < 1 << 18 and not (s.c > 64 and s.few)),),
    },
    ("zen 4", bfloat16, "channels_last"): {  # 2026-11-23 and 26
        "forward": (("kernel", lambda s: s.c >= _WIDE or s.d <= s.c),),
        "dx": (("kernel", lambda s: s.d >= _WIDE or s.c <= s.d or s.d < 2),),
        "dw": (_KERNEL,),
    },
    ("zen 4", bfloat16, "contiguous"): {  # 2026-11-24 and 29
        "forward": (_KERNEL,),
        "dx": (("kernel", lambda s: s.weighs_less(2000, s.n * s.plane)),),
        "dw": (("kernel", lambda s: (s.weight < 1 << 20 or s.d <= s.c) and (s.few or s.weighs_less(2500, s.plane))),),
    },
    ("zen 5", float32, "channels_last"): _ALL,  # 2026-11-23
    ("zen 5", float32, "contiguous"): _ALL,  # 2026-11-24
    ("zen 5", bfloat16, "channels_last"): {  # 2026-11-23
        "forward": (("kernel", lambda s: s.c >= _WIDE),),
        "dx": (("kernel", lambda s: s.d >= _WIDE or s.d < 2),),
        "dw": (_KERNEL,),
    },
    ("zen 5", bfloat16, "contiguous"): _ALL,  # 2026-11-24
}

# Intel's without tile registers, float32: few images 2026-11-22, many 2026-11-28. MKL's products are up to 1.8 times as
# fast as oneDNN's convolutions; of contiguous images, which oneDNN rearranges, in the mean 1.3 times. y of fewer
# channels than x is no product: the weight is transposed. The sum over contiguous images, dw, is one where it stays in
# the cache.
_FEW_ON_AVX512: _Parts = {
    "forward": (),
    "dx": (("library", lambda s: s.weight <= 1 << 14),),
    "dw": (("kernel", lambda s: s.weight <= 1 << 14),),
}
_FEW_ON_AVX2: _Parts = _FEW_ON_AVX512 | {"dw": ()}
_INTEL: dict[tuple[str, torch.dtype, str, str], _Parts] = {
    ("intel avx512", float32, "channels_last", _FEW): _FEW_ON_AVX512,
    ("intel avx512", float32, "channels_last", _MANY): {
        "forward": (("kernel", lambda s: s.weight < 1 << 14), ("product", lambda s: s.d >= s.c >= 96)),
        "dx": (("kernel", lambda s: s.weight < 1 << 14 and s.c < s.d), ("product", lambda s: s.fits)),
        "dw": (("product", lambda s: s.weight >= 1 << 14), _KERNEL),
    },
    ("intel avx512", float32, "contiguous", _FEW): _FEW_ON_AVX512,
    ("intel avx512", float32, "contiguous", _MANY): {
        "forward": (("kernel", lambda s: s.small), ("product", lambda s: True)),
        "dx": (("product", lambda s: not s.small), ("kernel", lambda s: s.d <= s.c)),
        "dw": (("product", lambda s: (s.d >= 80 or s.d > s.c) and s.weight <= 1 << 19), _KERNEL),
    },
    ("intel avx2", float32, "channels_last", _FEW): _FEW_ON_AVX2,
    ("intel avx2", float32, "channels_last", _MANY): {
        "forward": (("kernel", lambda s: s.weight < 1 << 14 and s.d < s.c), ("product", lambda s: s.d >= s.c >= 16)),
        "dx": (
            ("kernel", lambda s: s.weight < 1 << 14 and s.c < s.d),
            ("product", lambda s: s.c >= max(s.d, 64) and s.fits),
        ),
        "dw": (("product", lambda s: s.weight >= 1 << 12), _KERNEL),
    },
    ("intel avx2", float32, "contiguous", _FEW): _FEW_ON_AVX2,
    ("intel avx2", float32, "contiguous", _MANY): {
        "forward": (("product", lambda s: not s.small),),
        "dx": (("product", lambda s: not s.small),),
        "dw": (("product", lambda s: s.weight <= 1 << 19), _KERNEL),
    },
}

# Intel's with tile registers (AMX): 2026-11-29, the gradient of the weight in bfloat16 2026-11-30. oneDNN's float32
# convolutions wait for memory there, ATen's of few images are MKL's products already, and contiguous images are
# rearranged by either. In bfloat16 tiles multiply several times as fast as vectors do, in oneDNN's products as in its
# convolutions, and in the kernel of the gradient of the weight.
_BFLOAT16_ON_AMX: _Parts = {
    "forward": (("product", lambda s: s.small and s.weight >= 1 << 17),),
    "dx": (("product", lambda s: s.small and s.weight >= 1 << 17 and (s.d >= s.c or s.weight >= 1 << 19)),),
    "dw": (
        ("product", lambda s: s.weight >= 1 << 17 and s.c >= s.d if s.small else s.weight >= 1 << 18),
        _KERNEL,
    ),
}
_BFLOAT16_PLANES_ON_AMX: _Parts = {
    "forward": (("product", lambda s: not s.small),),
    "dx": (("product", lambda s: not s.small),),
    "dw": (
        ("product", lambda s: not s.small and (s.weight >= 1 << 17 or (s.has(700) and s.weight > 1 << 15))),
        ("product", lambda s: not s.has(64) and s.d > s.c and s.weight >= 1 << 18),
        ("kernel", lambda s: s.has(64) and s.weight < 1 << 19),
    ),
}
_AMX: dict[tuple[str, torch.dtype, str, str], _Parts] = {
    ("intel amx_bf16", float32, "channels_last", _FEW): {
        "forward": (("product", lambda s: s.small and s.weight >= 1 << 17),),
        "dx": (("product", lambda s: not s.small or s.c >= s.d or s.weight >= 1 << 19),),
        "dw": (
            ("kernel", lambda s: s.weight < 10_000 or (s.strided and s.weight <= 1 << 16)),
            ("product", lambda s: s.small and s.c >= s.d and s.weight >= 1 << 17),
        ),
    },
    ("intel amx_bf16", float32, "channels_last", _MANY): {
        "forward": (
            ("kernel", lambda s: s.weight < 1 << 14 or (s.d > s.c and s.weight < 160_000)),
            ("product", lambda s: s.d >= s.c >= 96 or s.weight >= 1 << 20),
        ),
        "dx": (
            ("kernel", lambda s: s.weight < 1 << 14 or (s.c > s.d and s.weight < 160_000)),
            ("product", lambda s: s.c >= s.d or s.weight >= 1 << 20),
        ),
        "dw": (("product", lambda s: s.weight >= 1 << 14), _KERNEL),
    },
    ("intel amx_bf16", float32, "contiguous", _FEW): {
        "forward": (("kernel", lambda s: s.small),),
        "dx": (("product", lambda s: True),),
        "dw": (),
    },
    ("intel amx_bf16", float32, "contiguous", _MANY): {
        "forward": (
            ("kernel", lambda s: s.small or (s.d > s.c and s.c < 100 and s.has(2000))),
            ("product", lambda s: True),
        ),
        "dx": (
            ("kernel", lambda s: s.c > s.d and (s.small or (s.d < 100 and s.has(2000)))),
            ("product", lambda s: not s.small),
        ),
        "dw": (("product", lambda s: True), _KERNEL),
    },
    ("intel amx_bf16", bfloat16, "channels_last", _FEW): _BFLOAT16_ON_AMX,
    ("intel amx_bf16", bfloat16, "channels_last", _MANY): _BFLOAT16_ON_AMX,
    ("intel amx_bf16", bfloat16, "contiguous", _FEW): _BFLOAT16_PLANES_ON_AMX,
    ("intel amx_bf16", bfloat16, "contiguous", _MANY): _BFLOAT16_PLANES_ON_AMX,
}
_ROWS = {(*key, images): parts for key, parts in _AMD.items() for images in (_FEW, _MANY)} | _INTEL | _AMX

# Where the pixels that a stride reads are copied for a convolution without one, forward and backward: oneDNN, and ATen
# for few images, first rearrange all of a contiguous image. Up to 3 times as fast: 2026-11-28, AMD's and AMX
# 2026-11-29; not measured on Zen 5. On AMD's the kernel takes a stride over channels_last images, forward.
_NARROW = 250_000  # elements of contiguous bfloat16 images, from which on they are
_HEAVY = 1 << 20  # elements of a weight, from which on channels_last images are forward with AMX
_Directions = tuple[_Where, _Where]
_READ_ON_AMD: dict[str, _Directions] = {
    "channels_last": (lambda s: False, lambda s: True),
    "contiguous": (lambda s: not (s.few and _common.is_less(250 * s.n * s.plane, s.weight)),) * 2,
}
_READ_ON_INTEL: dict[str, _Directions] = {
    "channels_last": (lambda s: s.d >= s.c >= 128 and not s.few and s.fits,) * 2,
    "contiguous": (lambda s: s.weight <= 1 << 19 or not s.few,) * 2,
}
_READ_ON_AMX: dict[str, _Directions] = {
    "channels_last": (lambda s: s.weight >= _HEAVY, lambda s: s.c >= 128),
    "contiguous": (lambda s: True,) * 2,
}
_READ_FIRST: dict[tuple[str, torch.dtype], dict[str, _Directions]] = {
    ("amd avx2", float32): _READ_ON_AMD,
    ("zen 4", float32): _READ_ON_AMD,
    ("zen 4", bfloat16): {
        "channels_last": (lambda s: False, lambda s: s.c >= _WIDE or s.d <= s.c),
        "contiguous": (lambda s: s.weight <= 1 << 19 and not _common.is_less(s.n * s.c * s.plane, _NARROW),) * 2,
    },
    ("intel avx2", float32): _READ_ON_INTEL,
    ("intel avx512", float32): _READ_ON_INTEL,
    ("intel amx_bf16", float32): _READ_ON_AMX,
    ("intel amx_bf16", bfloat16): _READ_ON_AMX,
}

# The libraries whose products those of Intel's CPUs are.
_HAS_LIBRARY = {float32: torch.backends.mkl.is_available(), bfloat16: torch.backends.mkldnn.is_available()}


def takes(dtype: torch.dtype) -> bool:
    """Whether the kernel multiplies a dtype on this CPU."""
    return dtype == float32 or (dtype == bfloat16 and _common.has_bfloat16())


def _cpu(dtype: torch.dtype) -> str:
    """This CPU in the tables; "any" where a dtype, or a library without which it was not measured, is in none."""
    cpu = _extension.BUILD_INFO
    vendor, isa = cpu.get("cpu_vendor"), cpu.get("isa_active")
    if not takes(dtype) or (vendor == "intel" and not _HAS_LIBRARY[dtype]):
        return "any"
    zen = _common.zen() if vendor == "amd" else None
    return f"{vendor} {isa}" if zen is None else f"zen {zen}"


def _rows(cpu: str, dtype: torch.dtype, sizes: _Sizes) -> _Parts:
    few = sizes.few
    if sizes.channels_last or not sizes.strided:  # what is contiguous and not read first was not measured
        layout = "channels_last" if sizes.channels_last else "contiguous"
        rows = _ROWS.get((cpu, dtype, layout, _FEW if few else _MANY))
        if rows is not None:
            return rows
    return _ANY_FEW_FLOAT32 if few and dtype == float32 else _ANY


def _choose(part: str, rows: _Parts, sizes: _Sizes) -> str:
    if part == "dx" and sizes.strided:
        return "stock"
    for way, where in rows[part]:
        if where(sizes) and (way != "product" or sizes.multiplies(part)):
            return way
    return "stock"


def ways(
    parts: Sequence[str], x: Tensor, weight: Tensor, stride: list[int], whole: bool = False, read_first: bool = False
) -> list[str]:
    """What runs these parts of a convolution over dense x; ``whole``: the kernel wherever that can; ``read_first``: the
    pixels that the stride reads are copied before."""
    dtype, channels_last, (n, c, h, w) = x.dtype, _common.is_channels_last(x), x.shape
    if read_first:
        (h, w), stride = (-(-size // step) for size, step in zip((h, w), stride)), [1, 1]
        channels_last = channels_last and h * w > 1
    strided = stride != [1, 1]
    if whole or not _common.cpu_multiplies(dtype):
        dx = whole and takes(dtype)
        kernel = {"forward": dx and (channels_last or not strided), "dx": dx, "dw": True}
        return ["kernel" if kernel[part] else "library" for part in parts]
    sizes = _Sizes(n, c, weight.shape[0], h * w, channels_last, strided)
    rows = _rows(_cpu(dtype), dtype, sizes)
    return [_choose(part, rows, sizes) for part in parts]


def by_kernel(x: Tensor, channels: int, whole: bool = False) -> bool:
    """Whether x is channels_last and its product with a weight of so many output channels runs in the kernel;
    ``whole``: wherever that can."""
    if whole or not _common.is_channels_last(x):
        return whole and takes(x.dtype) and _common.is_channels_last(x)
    n, c, h, w = x.shape
    sizes = _Sizes(n, c, channels, h * w, channels_last=True)
    return _choose("forward", _rows(_cpu(x.dtype), x.dtype, sizes), sizes) == "kernel"


def is_read_first(x: Tensor, weight: Tensor, backward: bool = False) -> bool:
    """Whether the pixels that a stride reads are copied for a convolution without one."""
    layouts = _READ_FIRST.get((_cpu(x.dtype), x.dtype))
    if layouts is None:
        return False
    (n, c, h, w), channels_last = x.shape, _common.is_channels_last(x)
    if channels_last and torch.compiler.is_compiling():
        return False  # a program would hold for even or for odd sizes of images alone
    in_forward, in_backward = layouts["channels_last" if channels_last else "contiguous"]
    where = in_backward if backward else in_forward  # no index: in graphs of torch 2.10 a bool is none
    return where(_Sizes(n, c, weight.shape[0], h * w, channels_last))


class Plan(NamedTuple):
    """What runs a convolution.

    Args:
        forward, dx, dw: the way of each part.
        moments: whether the kernel of y gathers them, where they are asked for.
        reads: whether the pixels that a stride reads are copied first, for a convolution without one.
        reads_backward: the same in backward.
    """

    forward: str
    dx: str
    dw: str
    moments: bool
    reads: bool
    reads_backward: bool


def plan(x: Tensor, weight: Tensor, stride: list[int], whole: bool = False) -> Plan:
    """What the rules say to a convolution over dense x; ``whole``: the kernel wherever that can."""
    may_read = stride != [1, 1] and not whole
    reads, reads_backward = (may_read and is_read_first(x, weight, backward) for backward in (False, True))
    (forward,) = ways(("forward",), x, weight, stride, whole, reads)
    dx, dw = ways(("dx", "dw"), x, weight, stride, whole, reads_backward)
    return Plan(forward, dx, dw, by_kernel(x, weight.shape[0], whole), reads, reads_backward)


# Summands: over more of them the rounding errors of oneDNN are more than twice those of MKL (1.4 times here).
_MOST_CHANNELS = 384
# Elements of a weight, and products, up to which conversion costs more than it gains: 2026-11-28.
_TINY_WEIGHT, _FEW_CONVERTED = 512, 1_500_000


def library(x: Tensor, weight: Tensor, stride: list[int]) -> str:
    """What the "library" is: "onednn", "stock", or "float32", a few images at a time, for a dtype that the CPU does not
    multiply; but oneDNN has code for bfloat16 on every CPU with AVX-512, which is faster where little is converted."""
    if x.dtype == float32:
        return "onednn" if x.shape[1] <= _MOST_CHANNELS else "stock"
    if _common.cpu_multiplies(x.dtype):
        return "stock"
    if x.dtype == bfloat16 and _extension.BUILD_INFO.get("isa_active") == "avx512" and _common.is_channels_last(x):
        few = x.numel() * weight.shape[0] < _FEW_CONVERTED * stride[0] * stride[1]
        return "stock" if few or weight.numel() <= _TINY_WEIGHT else "float32"
    return "float32"


def mkl_is_faster() -> bool:
    """Whether MKL, which ATen takes for few float32 images, is faster than oneDNN; on CPUs not Intel's it takes twice
    as long."""
    return _cpu(float32) in ("intel avx2", "intel avx512", "intel amx_bf16")


# Up to here the calls cost more than what the kernels may gain: elements, on Zen 5 and of one pixel products.
_SMALL, _FEW_PRODUCTS = 200_000, 1_200_000
_TOO_SMALL = f"fewer than {_SMALL:,} elements, or {_FEW_PRODUCTS:,} products (Zen 5, one pixel): stock calls cost less"
_FASTER = "stock PyTorch was measured faster:"
_PLANES = f"{_FASTER} contiguous images, or a stride over them"
# Elements of a weight, up to which few channels_last float32 images gain (with AMX: with a stride): 2026-11-22.
_MOST_WEIGHTS = {"intel avx512": 1 << 14, "intel avx2": 1 << 14, "intel amx_bf16": 1 << 16}


def gains_in_small(x: Tensor, weight: Tensor, stride: Sequence[int] = (1, 1)) -> bool | None:
    """Whether the kernel is faster than stock PyTorch over small images; None where that was not measured.

    On Zen 5: float32 by the products; bfloat16 in training at any size, as a call of oneDNN costs twice the kernel's
    (2026-11-25). With AVX2, not on Intel's: products of images of one pixel (2026-12-01).
    """
    if x.dtype == float32 and max(stride) == 1 and _common.is_less(x.shape[2] * x.shape[3], 2):
        enough = not _common.is_less(x.numel() * weight.shape[0], _FEW_PRODUCTS)
        if enough and _cpu(float32) == "amd avx2":
            return True
    # Some of the channels of such images, too: they are copied first.
    channels_last = x.stride(1) <= x.stride(3)
    planes = x.stride()[1:] == (x.shape[2] * x.shape[3], x.shape[3], 1) and max(stride) == 1
    if _common.zen() != 5 or not takes(x.dtype) or not (channels_last or planes):
        return None
    if x.dtype == float32:
        return not _common.is_less(x.numel() * weight.shape[0], _FEW_PRODUCTS * stride[0] * stride[1])
    return _common.needs_autograd(x, weight) or (channels_last and x.shape[1] >= _WIDE)


def slower(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: list[int] | None = None) -> str | None:
    """Why all of a convolution is left to stock PyTorch, or None."""
    is_float32, stride = x.dtype == float32, stride or [1, 1]
    if not is_float32 and not _common.cpu_multiplies(x.dtype):
        return None  # PyTorch is several times slower without instructions, up to a hundred times without AVX-512
    (n, c, h, w), d = x.shape, weight.shape[0]
    small = _common.is_less(n * h * w * (c + d), _SMALL)
    if small and is_float32 and _common.is_less(n * h * w * c * d, _FEW_PRODUCTS):
        return _TOO_SMALL
    gains = gains_in_small(x, weight, stride)
    if gains:
        return None
    if small or (gains is False and is_float32):
        return _TOO_SMALL
    channels_last, strided, cpu = _common.is_channels_last(x), stride != [1, 1], _cpu(x.dtype)
    if not channels_last and (strided or not x.is_contiguous()):
        return None if x.is_contiguous() and is_read_first(x, weight) else _PLANES
    if not channels_last or (cpu == "intel amx_bf16" and not strided):
        sizes = _Sizes(n, c, d, h * w, channels_last)
        rows = _rows(cpu, x.dtype, sizes)
        if cpu == "intel amx_bf16":
            ours = any(_choose(part, rows, sizes) != "stock" for part in reversed(PARTS))
            return None if ours else f"{_FASTER} images, channels and layout like these"
        ours = _choose("forward", rows, sizes) in ("kernel", "product") or _choose("dw", rows, sizes) == "product"
        return None if ours else _PLANES
    if _common.is_less(x.numel(), _SMALL) and not by_kernel(x, d):  # which gains in y, too
        return _TOO_SMALL
    if cpu in _MOST_WEIGHTS and is_float32 and _common.is_less(n, 16):
        most = _MOST_WEIGHTS[cpu]
        if weight.numel() > most and not (strided and any(is_read_first(x, weight, back) for back in (False, True))):
            return f"{_FASTER} weights of more than {most} elements on this CPU"
    return None

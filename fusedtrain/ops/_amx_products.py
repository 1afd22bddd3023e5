"""What runs a 1x1 convolution on Intel's CPUs with tile registers (AMX), as measured (benchmarks/LOG.md, 2026-11-29).

oneDNN's float32 convolutions wait for memory there, ATen's of few images are MKL's products already, and contiguous
images are rearranged by either. In bfloat16 tiles multiply several times as fast as vectors do, in oneDNN's products as
in its convolutions, and in the kernel of the gradient of the weight.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fusedtrain import _extension
from fusedtrain.ops import _common


class _Sizes(NamedTuple):
    """Channels of x and y, and pixels of an image."""

    c: int
    d: int
    plane: int

    @property
    def weight(self) -> int:
        return self.c * self.d

    @property
    def small(self) -> bool:
        return _common.is_less(self.plane, 100)

    def has(self, pixels: int) -> bool:
        return not _common.is_less(self.plane, pixels)


# The libraries whose products these are.
_HAS_LIBRARY = {torch.float32: torch.backends.mkl.is_available(), torch.bfloat16: torch.backends.mkldnn.is_available()}
_FEW = 16  # images: of fewer ATen runs MKL's float32 product on one thread

# (dtype, channels_last, few images) -> part -> what runs it, and where; the first that holds, else stock PyTorch.
_Row = tuple[str, Callable[[_Sizes], bool]]
_BFLOAT16_ROWS: dict[str, tuple[_Row, ...]] = {
    "forward": (("product", lambda s: s.small and s.weight >= 1 << 17),),
    "dx": (("product", lambda s: s.small and s.weight >= 1 << 17 and (s.d >= s.c or s.weight >= 1 << 19)),),
    "dw": (("product", lambda s: s.weight >= 1 << 17 and (s.c >= s.d or not s.small)), ("kernel", lambda s: True)),
}
_BFLOAT16_PLANES: dict[str, tuple[_Row, ...]] = {
    "forward": (("product", lambda s: not s.small),),
    "dx": (("product", lambda s: not s.small),),
    "dw": (
        ("product", lambda s: s.weight >= 1 << 17 or (s.has(700) and s.weight > 1 << 15)),
        ("kernel", lambda s: True),
    ),
}
_ROWS: dict[tuple[torch.dtype, bool, bool], dict[str, tuple[_Row, ...]]] = {
    (torch.float32, True, False): {
        "forward": (
            ("kernel", lambda s: s.weight < 1 << 14 or (s.d > s.c and s.weight < 160_000)),
            ("product", lambda s: s.d >= s.c >= 96 or s.weight >= 1 << 20),
        ),
        "dx": (
            ("kernel", lambda s: s.weight < 1 << 14 or (s.c > s.d and s.weight < 160_000)),
            ("product", lambda s: s.c >= s.d or s.weight >= 1 << 20),
        ),
        "dw": (("kernel", lambda s: s.weight < 1 << 14), ("product", lambda s: True)),
    },
    (torch.float32, True, True): {
        "forward": (("product", lambda s: s.small and s.weight >= 1 << 17),),
        "dx": (("product", lambda s: not s.small or s.c >= s.d or s.weight >= 1 << 19),),
        "dw": (
            ("kernel", lambda s: s.weight < 10_000),
            ("product", lambda s: s.small and s.c >= s.d and s.weight >= 1 << 17),
        ),
    },
    (torch.float32, False, False): {
        "forward": (
            ("kernel", lambda s: s.small or (s.d > s.c and s.c < 100 and s.has(2000))),
            ("product", lambda s: True),
        ),
        "dx": (
            ("kernel", lambda s: s.c > s.d and (s.small or (s.d < 100 and s.has(2000)))),
            ("product", lambda s: not s.small),
        ),
        "dw": (("product", lambda s: True),),
    },
    (torch.float32, False, True): {
        "forward": (("kernel", lambda s: s.small),),
        "dx": (("product", lambda s: True),),
        "dw": (),
    },
    **{(torch.bfloat16, True, few): _BFLOAT16_ROWS for few in (False, True)},
    **{(torch.bfloat16, False, few): _BFLOAT16_PLANES for few in (False, True)},
}


def holds_for(x: Tensor) -> bool:
    """Whether this CPU is one of those, and images in the dtype of x were measured there."""
    cpu = _extension.BUILD_INFO
    here = cpu.get("cpu_vendor") == "intel" and cpu.get("isa_active") == "amx_bf16"
    return here and _HAS_LIBRARY.get(x.dtype, False)


def choose(part: str, x: Tensor, c: int, d: int) -> str | None:
    """What runs "forward", "dx" or "dw" from c to d channels, without a stride, over images of the size, dtype and
    layout of x: "kernel", "product" or "stock"; None where that was not measured."""
    channels_last = _common.is_channels_last(x)
    if not holds_for(x) or not (channels_last or x.is_contiguous()):
        return None
    parts = _ROWS[x.dtype, channels_last, _common.is_less(x.shape[0], _FEW)]
    sizes = _Sizes(c, d, x.shape[2] * x.shape[3])
    chosen = next((run for run, where in parts[part] if where(sizes)), "stock")
    # Of contiguous images it goes from one to the next: compiled, their number would be part of the program.
    one_by_one = part == "dw" and chosen == "product" and not channels_last
    return "kernel" if one_by_one and torch.compiler.is_compiling() else chosen

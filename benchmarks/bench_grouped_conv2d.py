"""grouped_conv2d on the grouped 3x3 convolutions of real networks, as timm names them; equal layers stand once."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from harness import Benchmark, Case

from fusedtrain import ops


@dataclass(frozen=True)
class Layer:
    """One layer: ``c`` channels in groups of ``width`` on ``h`` x ``h`` pixels, stride ``s``."""

    label: str
    c: int
    width: int
    h: int
    s: int
    n: int = 16


def _layers(model: str, *layers: tuple[str, int, int, int, int]) -> list[Layer]:
    return [Layer(f"{model}.{name}", *sizes) for name, *sizes in layers]


LAYERS = [
    *_layers(
        "regnety_008",
        ("s1.b1.conv2", 64, 16, 112, 2),
        ("s2.b1.conv2", 128, 16, 56, 2),
        ("s2.b2.conv2", 128, 16, 28, 1),
        ("s3.b1.conv2", 320, 16, 28, 2),
        ("s3.b2.conv2", 320, 16, 14, 1),
        ("s4.b1.conv2", 768, 16, 14, 2),
        ("s4.b2.conv2", 768, 16, 7, 1),
    ),
    *_layers(
        "regnety_016",
        ("s2.b1.conv2", 120, 24, 56, 2),
        ("s3.b2.conv2", 336, 24, 14, 1),
        ("s4.b1.conv2", 888, 24, 14, 2),
    ),
    *_layers(
        "regnetx_032",
        ("s2.b1.conv2", 192, 48, 56, 2),
        ("s3.b2.conv2", 432, 48, 14, 1),
    ),
    *_layers(
        "resnext50_32x4d",
        ("layer1.0.conv2", 128, 4, 56, 1),
        ("layer2.1.conv2", 256, 8, 28, 1),
        ("layer3.0.conv2", 512, 16, 28, 2),
        ("layer3.1.conv2", 512, 16, 14, 1),
        ("layer4.0.conv2", 1024, 32, 14, 2),
        ("layer4.1.conv2", 1024, 32, 7, 1),
    ),
]


def _case(layer: Layer, dtype: torch.dtype) -> Case:
    n, c, width, h = layer.n, layer.c, layer.width, layer.h
    pixels = n * (-(-h // layer.s)) ** 2
    x, y = n * h * h * c * dtype.itemsize, pixels * c * dtype.itemsize
    flops = 2 * pixels * c * width * 9
    return Case(
        label=layer.label,
        family=f"width {width}, stride {layer.s}",
        inputs=lambda device: (
            torch.randn(n, c, h, h, device=device).to(dtype),
            (torch.randn(c, width, 3, 3, device=device) / (9 * width) ** 0.5)
            .to(dtype)
            .contiguous(memory_format=torch.channels_last),
        ),
        bytes_moved={"fwd": x + y, "bwd": 2 * x + 2 * y, "fwd+bwd": 3 * (x + y), "dx": x + y, "dw": x + y},
        flops={"fwd": flops, "bwd": 2 * flops, "fwd+bwd": 3 * flops, "dx": flops, "dw": flops},
        options={"stride": layer.s, "padding": 1, "groups": c // width},
    )


BENCHMARK = Benchmark(
    op="grouped_conv2d",
    cases=lambda dtype: [_case(layer, dtype) for layer in LAYERS],
    ours=ops.grouped_conv2d,
    stock={"": F.conv2d},
    backwards={"bwd": None, "dx": (0,), "dw": (1,)},
    same_as_stock=("reference", "cuda", "triton"),
)

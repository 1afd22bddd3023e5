"""depthwise_conv2d on the depthwise layers of real networks, as timm names them; equal layers stand once."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from harness import Benchmark, Case

from fusedtrain import ops


@dataclass(frozen=True)
class Layer:
    """One layer: ``c`` channels of ``h`` x ``h`` pixels, kernel ``k`` x ``k``, stride ``s``, padding k // 2."""

    label: str
    c: int
    h: int
    k: int
    s: int
    n: int


def _layers(model: str, n: int, *layers: tuple[str, int, int, int, int]) -> list[Layer]:
    return [Layer(f"{model}.{name}", c, h, k, s, n) for name, c, h, k, s in layers]


LAYERS = [
    *_layers(
        *("efficientnet_b0", 16),
        ("blocks.0.0", 32, 112, 3, 1),
        ("blocks.1.0", 96, 112, 3, 2),
        ("blocks.1.1", 144, 56, 3, 1),
        ("blocks.2.0", 144, 56, 5, 2),
        ("blocks.2.1", 240, 28, 5, 1),
        ("blocks.3.0", 240, 28, 3, 2),
        ("blocks.3.1", 480, 14, 3, 1),
        ("blocks.4.0", 480, 14, 5, 1),
        ("blocks.4.1", 672, 14, 5, 1),
        ("blocks.5.0", 672, 14, 5, 2),
        ("blocks.5.1", 1152, 7, 5, 1),
        ("blocks.6.0", 1152, 7, 3, 1),
    ),
    *_layers(
        *("efficientnet_b4", 16),
        ("blocks.0.0", 48, 160, 3, 1),
        ("blocks.0.1", 24, 160, 3, 1),
        ("blocks.1.0", 144, 160, 3, 2),
        ("blocks.1.1", 192, 80, 3, 1),
        ("blocks.2.0", 192, 80, 5, 2),
        ("blocks.2.1", 336, 40, 5, 1),
        ("blocks.3.0", 336, 40, 3, 2),
        ("blocks.3.1", 672, 20, 3, 1),
        ("blocks.4.0", 672, 20, 5, 1),
        ("blocks.4.1", 960, 20, 5, 1),
        ("blocks.5.0", 960, 20, 5, 2),
        ("blocks.5.1", 1632, 10, 5, 1),
        ("blocks.6.0", 1632, 10, 3, 1),
        ("blocks.6.1", 2688, 10, 3, 1),
    ),
    *_layers(
        *("mobilenetv3_large_100", 16),
        ("blocks.0.0", 16, 112, 3, 1),
        ("blocks.1.0", 64, 112, 3, 2),
        ("blocks.1.1", 72, 56, 3, 1),
        ("blocks.2.0", 72, 56, 5, 2),
        ("blocks.2.1", 120, 28, 5, 1),
        ("blocks.3.1", 200, 14, 3, 1),
        ("blocks.3.2", 184, 14, 3, 1),
        ("blocks.4.1", 672, 14, 3, 1),
        ("blocks.5.1", 960, 7, 5, 1),
    ),
    *_layers(
        *("mobilenetv4_conv_medium", 16),
        ("blocks.1.0.dw_start", 48, 64, 3, 1),
        ("blocks.1.0.dw_mid", 192, 64, 5, 2),
        ("blocks.1.1.dw_start", 80, 32, 3, 1),
        ("blocks.1.1.dw_mid", 160, 32, 3, 1),
        ("blocks.2.0.dw_mid", 480, 32, 5, 2),
        ("blocks.2.1.dw_start", 160, 16, 3, 1),
        ("blocks.2.1.dw_mid", 640, 16, 3, 1),
        ("blocks.2.3.dw_mid", 640, 16, 5, 1),
        ("blocks.3.0.dw_start", 160, 16, 5, 1),
        ("blocks.3.0.dw_mid", 960, 16, 5, 2),
        ("blocks.3.1.dw_start", 256, 8, 5, 1),
        ("blocks.3.1.dw_mid", 1024, 8, 5, 1),
        ("blocks.3.2.dw_start", 256, 8, 3, 1),
        ("blocks.3.6.dw_mid", 512, 8, 5, 1),
    ),
    *_layers(
        *("convnext_tiny", 16),
        ("stages.0.blocks.0.conv_dw", 96, 56, 7, 1),
        ("stages.1.blocks.0.conv_dw", 192, 28, 7, 1),
        ("stages.2.blocks.0.conv_dw", 384, 14, 7, 1),
        ("stages.3.blocks.0.conv_dw", 768, 7, 7, 1),
    ),
    *_layers(
        *("replknet_31b", 4),
        ("stages.0.large_kernel", 128, 56, 31, 1),
        ("stages.1.large_kernel", 256, 28, 29, 1),
        ("stages.2.large_kernel", 512, 14, 27, 1),
        ("stages.3.large_kernel", 1024, 7, 13, 1),
    ),
]


def _case(layer: Layer, dtype: torch.dtype) -> Case:
    n, c, h, k, s = layer.n, layer.c, layer.h, layer.k, layer.s
    out = (h - 1) // s + 1
    x, y = n * c * h * h * dtype.itemsize, n * c * out * out * dtype.itemsize
    flops = 2 * n * c * out * out * k * k
    return Case(
        label=layer.label,
        family=f"{k}x{k} stride {s}",
        inputs=lambda device: (
            torch.randn(n, c, h, h, device=device).to(dtype),
            (torch.randn(c, 1, k, k, device=device) / k).to(dtype),
        ),
        bytes_moved={"fwd": x + y, "bwd": 2 * x + y, "fwd+bwd": 3 * x + 2 * y, "dx": x + y, "dw": x + y},
        flops={"fwd": flops, "bwd": 2 * flops, "fwd+bwd": 3 * flops, "dx": flops, "dw": flops},
        options={"stride": s, "padding": k // 2},
    )


def _stock(x, weight, stride, padding):
    return F.conv2d(x, weight, None, stride, padding, groups=x.shape[1])


BENCHMARK = Benchmark(
    op="depthwise_conv2d",
    cases=lambda dtype: [_case(layer, dtype) for layer in LAYERS],
    ours=ops.depthwise_conv2d,
    stock={"": _stock},
    backwards={"bwd": None, "dx": (0,), "dw": (1,)},
    same_as_stock=("reference",),
    peers={"RepLKNet's MegEngine kernels": "CUDA only, float16 and float32, contiguous"},
)

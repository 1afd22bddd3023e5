"""pointwise_conv2d on the 1x1 convolutions of real networks, as timm names them; equal layers stand once."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from harness import Benchmark, Case

from fusedtrain import ops


@dataclass(frozen=True)
class Layer:
    """One layer: ``c`` to ``d`` channels on ``h`` x ``h`` pixels, stride ``s``."""

    label: str
    c: int
    d: int
    h: int
    s: int
    n: int

    @property
    def family(self) -> str:
        return f"{self.h}x{self.h} pixels" if self.h >= 14 else "below 14x14 pixels"


def _layers(model: str, n: int, *layers: tuple[str, int, int, int, int]) -> list[Layer]:
    return [Layer(f"{model}.{name}", c, d, h, s, n) for name, c, d, h, s in layers]


LAYERS = [
    *_layers(
        *("efficientnet_b0", 16),
        ("blocks.0.0.conv_pw", 32, 16, 112, 1),
        ("blocks.1.0.conv_pw", 16, 96, 112, 1),
        ("blocks.1.0.conv_pwl", 96, 24, 56, 1),
        ("blocks.1.1.conv_pw", 24, 144, 56, 1),
        ("blocks.1.1.conv_pwl", 144, 24, 56, 1),
        ("blocks.2.0.conv_pwl", 144, 40, 28, 1),
        ("blocks.2.1.conv_pw", 40, 240, 28, 1),
        ("blocks.2.1.conv_pwl", 240, 40, 28, 1),
        ("blocks.3.0.conv_pwl", 240, 80, 14, 1),
        ("blocks.3.1.conv_pw", 80, 480, 14, 1),
        ("blocks.3.1.conv_pwl", 480, 80, 14, 1),
        ("blocks.4.0.conv_pwl", 480, 112, 14, 1),
        ("blocks.4.1.conv_pw", 112, 672, 14, 1),
        ("blocks.4.1.conv_pwl", 672, 112, 14, 1),
        ("blocks.5.0.conv_pwl", 672, 192, 7, 1),
        ("blocks.5.1.conv_pw", 192, 1152, 7, 1),
        ("blocks.5.1.conv_pwl", 1152, 192, 7, 1),
        ("blocks.6.0.conv_pwl", 1152, 320, 7, 1),
        ("conv_head", 320, 1280, 7, 1),
    ),
    *_layers(
        *("mobilenetv4_conv_medium", 16),
        ("blocks.0.0.conv_pwl", 128, 48, 64, 1),
        ("blocks.1.0.pw_exp.conv", 48, 192, 64, 1),
        ("blocks.1.0.pw_proj.conv", 192, 80, 32, 1),
        ("blocks.1.1.pw_exp.conv", 80, 160, 32, 1),
        ("blocks.1.1.pw_proj.conv", 160, 80, 32, 1),
        ("blocks.2.0.pw_exp.conv", 80, 480, 32, 1),
        ("blocks.2.0.pw_proj.conv", 480, 160, 16, 1),
        ("blocks.2.1.pw_exp.conv", 160, 640, 16, 1),
        ("blocks.2.1.pw_proj.conv", 640, 160, 16, 1),
        ("blocks.2.6.pw_exp.conv", 160, 320, 16, 1),
        ("blocks.2.6.pw_proj.conv", 320, 160, 16, 1),
        ("blocks.3.0.pw_exp.conv", 160, 960, 16, 1),
        ("blocks.3.0.pw_proj.conv", 960, 256, 8, 1),
        ("blocks.3.1.pw_exp.conv", 256, 1024, 8, 1),
        ("blocks.3.1.pw_proj.conv", 1024, 256, 8, 1),
        ("blocks.3.6.pw_exp.conv", 256, 512, 8, 1),
        ("blocks.3.6.pw_proj.conv", 512, 256, 8, 1),
        ("blocks.4.0.conv", 256, 960, 8, 1),
    ),
    *_layers(
        *("seresnet50", 16),
        ("layer1.0.conv1", 64, 64, 56, 1),
        ("layer1.0.conv3", 64, 256, 56, 1),
        ("layer1.1.conv1", 256, 64, 56, 1),
        ("layer2.0.conv1", 256, 128, 56, 1),
        ("layer2.0.conv3", 128, 512, 28, 1),
        ("layer2.0.downsample.0", 256, 512, 56, 2),
        ("layer2.1.conv1", 512, 128, 28, 1),
        ("layer3.0.conv1", 512, 256, 28, 1),
        ("layer3.0.conv3", 256, 1024, 14, 1),
        ("layer3.0.downsample.0", 512, 1024, 28, 2),
        ("layer3.1.conv1", 1024, 256, 14, 1),
        ("layer4.0.conv1", 1024, 512, 14, 1),
        ("layer4.0.conv3", 512, 2048, 7, 1),
        ("layer4.0.downsample.0", 1024, 2048, 14, 2),
        ("layer4.1.conv1", 2048, 512, 7, 1),
    ),
    *_layers(
        *("mobilenetv3_large_100", 16),
        ("blocks.0.0.conv_pw", 16, 16, 112, 1),
        ("blocks.1.0.conv_pw", 16, 64, 112, 1),
        ("blocks.1.0.conv_pwl", 64, 24, 56, 1),
        ("blocks.1.1.conv_pw", 24, 72, 56, 1),
        ("blocks.1.1.conv_pwl", 72, 24, 56, 1),
        ("blocks.2.0.conv_pwl", 72, 40, 28, 1),
        ("blocks.2.1.conv_pw", 40, 120, 28, 1),
        ("blocks.2.1.conv_pwl", 120, 40, 28, 1),
        ("blocks.3.1.conv_pw", 80, 200, 14, 1),
        ("blocks.3.1.conv_pwl", 200, 80, 14, 1),
        ("blocks.3.2.conv_pw", 80, 184, 14, 1),
        ("blocks.3.2.conv_pwl", 184, 80, 14, 1),
        ("blocks.5.0.conv_pwl", 672, 160, 7, 1),
        ("blocks.5.1.conv_pw", 160, 960, 7, 1),
        ("blocks.5.1.conv_pwl", 960, 160, 7, 1),
    ),
]


def _case(layer: Layer, dtype: torch.dtype) -> Case:
    n, c, d, h = layer.n, layer.c, layer.d, layer.h
    pixels = n * (-(-h // layer.s)) ** 2
    x, y = pixels * c * dtype.itemsize, pixels * d * dtype.itemsize
    dx = n * c * h * h * dtype.itemsize
    flops = 2 * pixels * c * d
    return Case(
        label=layer.label,
        family=layer.family,
        inputs=lambda device: (
            torch.randn(n, c, h, h, device=device).to(dtype),
            (torch.randn(d, c, 1, 1, device=device) / c**0.5).to(dtype),
        ),
        bytes_moved={"fwd": x + y, "bwd": x + dx + y, "fwd+bwd": 2 * x + dx + 2 * y, "dx": dx + y, "dw": x + y},
        flops={"fwd": flops, "bwd": 2 * flops, "fwd+bwd": 3 * flops, "dx": flops, "dw": flops},
        options={"stride": layer.s},
    )


BENCHMARK = Benchmark(
    op="pointwise_conv2d",
    cases=lambda dtype: [_case(layer, dtype) for layer in LAYERS],
    ours=ops.pointwise_conv2d,
    stock={"": lambda x, weight, stride: F.conv2d(x, weight, None, stride)},
    backwards={"bwd": None, "dx": (0,), "dw": (1,)},
    same_as_stock=("reference", "cuda", "triton"),
)

"""batch_norm_act in training, on the BatchNorm layers of real networks, as timm names them; equal layers stand once."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from harness import Benchmark, Case

from fusedtrain import ops


@dataclass(frozen=True)
class Layer:
    """One layer: ``c`` channels of ``h`` x ``h`` pixels, and where a block's input is added."""

    label: str
    c: int
    h: int
    act: str
    residual: str = "none"

    @property
    def model(self) -> str:
        return self.label.split(".")[0]


def _layers(model: str, *layers: tuple) -> list[Layer]:
    return [Layer(f"{model}.{name}", *rest) for name, *rest in layers]


LAYERS = [
    *_layers(
        "efficientnet_b0",
        ("bn1", 32, 112, "silu"),
        ("blocks.0.0.bn2", 16, 112, "identity"),
        ("blocks.1.0.bn1", 96, 112, "silu"),
        ("blocks.1.0.bn2", 96, 56, "silu"),
        ("blocks.1.0.bn3", 24, 56, "identity"),
        ("blocks.1.1.bn1", 144, 56, "silu"),
        ("blocks.1.1.bn3", 24, 56, "identity", "after"),
        ("blocks.2.0.bn2", 144, 28, "silu"),
        ("blocks.2.0.bn3", 40, 28, "identity"),
        ("blocks.2.1.bn1", 240, 28, "silu"),
        ("blocks.3.0.bn2", 240, 14, "silu"),
        ("blocks.3.0.bn3", 80, 14, "identity"),
        ("blocks.3.1.bn1", 480, 14, "silu"),
        ("blocks.4.0.bn3", 112, 14, "identity"),
        ("blocks.4.1.bn1", 672, 14, "silu"),
        ("blocks.5.0.bn2", 672, 7, "silu"),
        ("blocks.5.0.bn3", 192, 7, "identity"),
        ("blocks.5.1.bn1", 1152, 7, "silu"),
        ("blocks.6.0.bn3", 320, 7, "identity"),
        ("bn2", 1280, 7, "silu"),
    ),
    *_layers(
        "mobilenetv3_large_100",
        ("bn1", 16, 112, "hard_swish"),
        ("blocks.1.0.bn1", 64, 112, "relu"),
        ("blocks.1.1.bn1", 72, 56, "relu"),
        ("blocks.2.0.bn2", 72, 28, "relu"),
        ("blocks.2.1.bn1", 120, 28, "relu"),
        ("blocks.3.0.bn1", 240, 28, "hard_swish"),
        ("blocks.3.1.bn1", 200, 14, "hard_swish"),
        ("blocks.3.2.bn1", 184, 14, "hard_swish"),
        ("blocks.4.0.bn1", 480, 14, "hard_swish"),
        ("blocks.5.0.bn3", 160, 7, "identity"),
        ("blocks.5.1.bn1", 960, 7, "hard_swish"),
        ("blocks.5.1.bn3", 160, 7, "identity", "after"),
    ),
    *_layers(
        "mobilenetv4_conv_medium",
        ("blocks.0.0.bn1", 128, 56, "relu"),
        ("blocks.0.0.bn2", 48, 56, "identity"),
        ("blocks.1.0.pw_exp.bn", 192, 56, "relu"),
        ("blocks.1.0.dw_mid.bn", 192, 28, "relu"),
        ("blocks.1.0.pw_proj.bn", 80, 28, "identity"),
        ("blocks.2.0.pw_exp.bn", 480, 28, "relu"),
        ("blocks.2.0.pw_proj.bn", 160, 14, "identity"),
        ("blocks.2.1.pw_exp.bn", 640, 14, "relu"),
        ("blocks.3.0.dw_mid.bn", 960, 7, "relu"),
        ("blocks.3.0.pw_proj.bn", 256, 7, "identity"),
        ("norm_head", 1280, 1, "relu"),
    ),
    *_layers(
        "regnety_008",
        ("s1.b1.conv2.bn", 64, 56, "relu"),
        ("s1.b1.conv3.bn", 64, 56, "relu", "before"),
        ("s2.b2.conv1.bn", 128, 28, "relu"),
        ("s2.b2.conv3.bn", 128, 28, "relu", "before"),
        ("s3.b1.conv1.bn", 320, 28, "relu"),
        ("s3.b2.conv1.bn", 320, 14, "relu"),
        ("s3.b2.conv3.bn", 320, 14, "relu", "before"),
        ("s4.b1.conv1.bn", 768, 14, "relu"),
        ("s4.b1.conv2.bn", 768, 7, "relu"),
        ("s4.b1.conv3.bn", 768, 7, "relu", "before"),
    ),
    *_layers(
        "seresnet50",
        ("layer1.0.bn3", 256, 56, "relu", "before"),
        ("layer2.0.bn1", 128, 56, "relu"),
        ("layer2.0.bn3", 512, 28, "relu", "before"),
        ("layer3.0.bn1", 256, 28, "relu"),
        ("layer3.0.bn2", 256, 14, "relu"),
        ("layer3.0.bn3", 1024, 14, "relu", "before"),
        ("layer4.0.bn2", 512, 7, "relu"),
        ("layer4.0.bn3", 2048, 7, "relu", "before"),
    ),
]


def _case(layer: Layer, dtype: torch.dtype, n: int = 16) -> Case:
    shape = (n, layer.c, layer.h, layer.h)
    elements = n * layer.c * layer.h**2
    added = layer.residual != "none"
    forward = (3 + added) * elements * dtype.itemsize  # x for the statistics and again, y
    backward = 5 * elements * dtype.itemsize  # x and dy for the sums and again, dx
    if layer.residual == "before" and layer.act != "identity":
        backward += 3 * elements * dtype.itemsize  # the residual twice, its gradient
    return Case(
        label=layer.label,
        family=layer.model if layer.residual == "none" else f"residual {layer.residual}",
        inputs=lambda device: (
            torch.randn(shape, device=device).to(dtype),
            torch.rand(layer.c, device=device),
            torch.randn(layer.c, device=device),
            *([torch.randn(shape, device=device).to(dtype)] if added else ()),
        ),
        bytes_moved={"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward},
        flops={"fwd": 10 * elements, "bwd": 20 * elements, "fwd+bwd": 30 * elements},
        options={"act": layer.act, "after": layer.residual == "after"},
    )


STOCK = {"relu": F.relu, "silu": F.silu, "hard_swish": F.hardswish}


def _ours(x, weight, bias, residual=None, *, act, after):
    return ops.batch_norm_act(x, None, None, weight, bias, True, act=act, residual=residual, residual_after=after)


def _stock(x, weight, bias, residual=None, *, act, after):
    y = F.batch_norm(x, None, None, weight, bias, True)
    y = y if residual is None or after else y.add_(residual)
    y = y if act == "identity" else STOCK[act](y, inplace=True)
    return y + residual if after else y


BENCHMARK = Benchmark(
    op="batch_norm_act",
    cases=lambda dtype: [_case(layer, dtype) for layer in LAYERS],
    ours=_ours,
    stock={"": _stock},
)

"""squeeze_excite on the SE blocks of real networks, against both ways to write it in plain PyTorch."""

import torch
import torch.nn.functional as F
from harness import Benchmark, Case
from layers import BATCHES, SE_LAYERS, SELayer

from fusedtrain import ops

ACT = {"relu": F.relu, "silu": F.silu}
GATE = {"sigmoid": torch.sigmoid, "hard_sigmoid": F.hardsigmoid}


def linear(x, w1, b1, w2, b2, act: str, gate: str):
    """The form of the usual SEBlock; torch.compile makes more of it than of timm's."""
    squeezed = F.linear(x.mean((2, 3)), w1.flatten(1), b1)
    return x * GATE[gate](F.linear(ACT[act](squeezed), w2.flatten(1), b2))[:, :, None, None]


def convolution(x, w1, b1, w2, b2, act: str, gate: str):
    """timm's SqueezeExcite, line by line."""
    squeezed = F.conv2d(x.mean((2, 3), keepdim=True), w1, b1)
    return x * GATE[gate](F.conv2d(ACT[act](squeezed), w2, b2))


def _case(layer: SELayer, n: int, dtype: torch.dtype) -> Case:
    c, r, h = layer.c, layer.r, layer.h

    def inputs(device):
        def randn(*shape, scale=1.0):
            return (torch.randn(shape, device=device) * scale).to(dtype)

        w1, w2 = randn(r, c, 1, 1, scale=c**-0.5), randn(c, r, 1, 1, scale=r**-0.5)
        return randn(n, c, h, h), w1, randn(r), w2, randn(c)

    elements, weights = n * c * h * h, 2 * r * c + r + c
    forward, backward = 2 * elements + weights, 3 * elements + 2 * weights  # x, y; x, dy, dx
    small = 4 * n * c * r  # both layers, multiply and add
    return Case(
        label=layer.label,
        family=layer.model,
        inputs=inputs,
        bytes_moved={m: e * dtype.itemsize for m, e in _modes(forward, backward).items()},
        flops=_modes(2 * elements + small, 3 * elements + 2 * small),
        options={"act": layer.act, "gate": layer.gate},
    )


def _modes(forward: int, backward: int) -> dict[str, int]:
    return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}


BENCHMARK = Benchmark(
    op="squeeze_excite",
    cases=lambda dtype: [_case(layer, n, dtype) for n in BATCHES for layer in SE_LAYERS],
    ours=ops.squeeze_excite,
    stock={"": convolution, "linear": linear},
    peers={
        "lc0, tract": "fuse squeeze-and-excitation for inference only, inside their own engines",
        "timm, torchvision": "are the stock path itself: their modules are these three lines",
    },
)

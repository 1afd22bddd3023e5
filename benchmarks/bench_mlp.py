"""mlp and the end of blocks: Linear layers, layer scale and residual of ConvNeXt, 1x1 convolutions of PoolFormer."""

import torch
import torch.nn.functional as F
from harness import Benchmark, Case

from fusedtrain import ops

BATCH = 16
# Channels of the first of four stages at 224 px; each has twice as many as the one before, over half the pixels.
CONVNEXT = {"convnext_tiny": 96, "convnext_base": 128}
POOLFORMER = {"poolformer_s12": [64, 128, 320, 512]}


def ours(x, w1, b1, w2, b2, scale=None, residual=None):
    return ops.mlp(x, w1, b1, w2, b2, scale=scale, residual=residual)


def timm(x, w1, b1, w2, b2, scale=None, residual=None):
    """timm's Mlp and the end of its ConvNeXtBlock, line by line."""
    multiply = F.conv2d if w1.dim() == 4 else F.linear
    x = multiply(F.gelu(multiply(x, w1, b1)), w2, b2)
    return x if scale is None else x.mul(scale) + residual


def _case(model: str, stage: int, c: int, images: bool, dtype: torch.dtype) -> Case:
    h, k = 56 >> stage, 4 * c
    pixels = BATCH * h * h
    shape, pixel = ((BATCH, c, h, h), (1, 1)) if images else ((pixels, c), ())

    def inputs(device):
        def normal(*sizes, of=1):
            return (torch.randn(sizes, device=device) / of**0.5).to(dtype)

        layers = normal(*shape), normal(k, c, *pixel, of=c), normal(k), normal(c, k, *pixel, of=k), normal(c)
        return layers if images else (*layers, normal(c), normal(*shape))

    thin, wide, weights = pixels * c, pixels * k, 2 * c * k
    ends = 2 if images else 3  # x, y, and the residual
    forward = (ends * thin + wide + weights) * dtype.itemsize  # h is kept
    backward = ((ends + 1) * thin + wide + 2 * weights) * dtype.itemsize  # dy, x and z, dx; h
    flops = 4 * pixels * c * k
    return Case(
        label=f"{model}.stages.{stage}.mlp",
        family=model,
        inputs=inputs,
        bytes_moved={"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward},
        flops={"fwd": flops, "bwd": 2 * flops, "fwd+bwd": 3 * flops},
    )


def _cases(dtype: torch.dtype) -> list[Case]:
    rows = [_case(model, stage, c << stage, False, dtype) for model, c in CONVNEXT.items() for stage in range(4)]
    images = [_case(model, stage, c, True, dtype) for model, cs in POOLFORMER.items() for stage, c in enumerate(cs)]
    return rows + images


BENCHMARK = Benchmark(
    op="mlp",
    cases=_cases,
    ours=ours,
    stock={"": timm},
    same_as_stock=("reference", "cuda", "triton"),
    peers={"timm": "is the stock path itself: its modules are these lines"},
)

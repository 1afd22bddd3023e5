"""global_response_norm behind GELU, as in the blocks of ConvNeXt V2, against both ways to write it in plain PyTorch."""

import torch
import torch.nn.functional as F
from harness import Benchmark, Case

from fusedtrain import ops

BATCH, EPS = 16, 1e-6
# Channels of the first of four stages at 224 px; each has twice as many as the one before, over half the pixels.
CHANNELS = {"convnextv2_atto": 160, "convnextv2_nano": 320, "convnextv2_tiny": 384, "convnextv2_base": 512}


def timm(x, weight, bias, in_act: str):
    """timm's GlobalResponseNorm and the activation in front, line by line."""
    x = F.gelu(x)
    norm = x.norm(p=2, dim=(2, 3), keepdim=True)
    relative = norm / (norm.mean(1, keepdim=True) + EPS)
    return x + torch.addcmul(bias[:, None, None], weight[:, None, None], x * relative)


def factor(x, weight, bias, in_act: str):
    """One factor per image and channel: fewer passes over x."""
    x = F.gelu(x)
    norm = x.norm(p=2, dim=(2, 3), keepdim=True)
    relative = norm / (norm.mean(1, keepdim=True) + EPS)
    return torch.addcmul(bias[:, None, None], x, 1 + weight[:, None, None] * relative)


def _case(model: str, stage: int, dtype: torch.dtype) -> Case:
    c, h = CHANNELS[model] << stage, 56 >> stage
    elements = BATCH * c * h * h

    def inputs(device):
        return tuple(torch.randn(shape, device=device).to(dtype) for shape in ((BATCH, c, h, h), (c,), (c,)))

    forward, backward = 2 * elements * dtype.itemsize, 3 * elements * dtype.itemsize  # x, y; x, dy, dx
    return Case(
        label=f"{model}.stages.{stage}.grn",
        family=model,
        inputs=inputs,
        bytes_moved={"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward},
        flops={"fwd": 4 * elements, "bwd": 8 * elements, "fwd+bwd": 12 * elements},
        options={"in_act": "gelu"},
    )


BENCHMARK = Benchmark(
    op="global_response_norm",
    cases=lambda dtype: [_case(model, stage, dtype) for model in CHANNELS for stage in range(4)],
    ours=ops.global_response_norm,
    stock={"": timm, "factor": factor},
    same_as_stock=("reference", "cuda", "triton"),
    peers={"timm": "is the stock path itself: its module is these lines"},
)

"""channel_pool, the mean per sample and channel, on the inputs of the SE blocks of real networks."""

import torch
import torch.nn.functional as F
from harness import Benchmark, Case
from layers import BATCHES, IMAGE_LAYERS, SELayer

from fusedtrain import ops


def _case(layer: SELayer, n: int, dtype: torch.dtype) -> Case:
    elements, pooled = n * layer.c * layer.h**2, n * layer.c
    moved = (elements + pooled) * dtype.itemsize  # x, y; dy, dx
    return Case(
        label=layer.label,
        family=layer.model,
        inputs=lambda device: (torch.randn(n, layer.c, layer.h, layer.h, device=device).to(dtype),),
        bytes_moved={"fwd": moved, "bwd": moved, "fwd+bwd": 2 * moved},
        flops={"fwd": elements, "bwd": pooled, "fwd+bwd": elements + pooled},
    )


BENCHMARK = Benchmark(
    op="channel_pool",
    cases=lambda dtype: [_case(layer, n, dtype) for n in BATCHES for layer in IMAGE_LAYERS],
    ours=ops.channel_pool,
    stock={
        "": lambda x: x.mean((2, 3)),
        "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1),
    },
)

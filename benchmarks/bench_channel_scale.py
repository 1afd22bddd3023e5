"""channel_scale, one factor per sample and channel, on the inputs of the SE blocks of real networks."""

import torch
from harness import Benchmark, Case
from layers import BATCHES, IMAGE_LAYERS, SELayer

from fusedtrain import ops


def _case(layer: SELayer, n: int, dtype: torch.dtype) -> Case:
    shape = (n, layer.c, layer.h, layer.h)
    elements, gates = n * layer.c * layer.h**2, n * layer.c
    forward = (2 * elements + gates) * dtype.itemsize  # x, y
    backward = (3 * elements + 2 * gates) * dtype.itemsize  # x, dy, dx
    return Case(
        label=layer.label,
        family=layer.model,
        inputs=lambda device: (
            torch.randn(shape, device=device).to(dtype),
            torch.rand(shape[:2], device=device).to(dtype),
        ),
        bytes_moved={"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward},
        flops={"fwd": elements, "bwd": 3 * elements, "fwd+bwd": 4 * elements},
    )


BENCHMARK = Benchmark(
    op="channel_scale",
    cases=lambda dtype: [_case(layer, n, dtype) for n in BATCHES for layer in IMAGE_LAYERS],
    ours=ops.channel_scale,
    stock={"": lambda x, gate: x * gate[:, :, None, None]},
)

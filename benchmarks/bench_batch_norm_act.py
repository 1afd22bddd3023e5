"""batch_norm_act in training, on the images of the SE blocks of real networks with the activations they have there."""

import torch
import torch.nn.functional as F
from harness import Benchmark, Case
from layers import BATCHES, IMAGE_LAYERS, SELayer

from fusedtrain import ops


def _case(layer: SELayer, n: int, dtype: torch.dtype) -> Case:
    shape = (n, layer.c, layer.h, layer.h)
    elements = n * layer.c * layer.h**2
    forward = 3 * elements * dtype.itemsize  # x for the statistics and again, y
    backward = 5 * elements * dtype.itemsize  # x and dy for the sums and again, dx
    return Case(
        label=layer.label,
        family=layer.model,
        inputs=lambda device: (
            torch.randn(shape, device=device).to(dtype),
            torch.rand(layer.c, device=device),
            torch.randn(layer.c, device=device),
        ),
        bytes_moved={"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward},
        flops={"fwd": 10 * elements, "bwd": 20 * elements, "fwd+bwd": 30 * elements},
        options={"act": layer.act},
    )


def _stock(x, weight, bias, act):
    return getattr(F, act)(F.batch_norm(x, None, None, weight, bias, True))


BENCHMARK = Benchmark(
    op="batch_norm_act",
    cases=lambda dtype: [_case(layer, n, dtype) for n in BATCHES for layer in IMAGE_LAYERS],
    ours=lambda x, weight, bias, act: ops.batch_norm_act(x, None, None, weight, bias, True, act=act),
    stock={"": _stock},
)

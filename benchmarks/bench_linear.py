"""linear on the layers of ConvNeXt and heads of other networks; equal layers stand once."""

import torch
import torch.nn.functional as F
from harness import Benchmark, Case

from fusedtrain import ops

# rows, features in and out
LAYERS = {
    "convnext_tiny.stages.0.mlp.fc1": (16 * 32 * 32, 96, 384),
    "convnext_tiny.stages.0.mlp.fc2": (16 * 32 * 32, 384, 96),
    "convnext_tiny.stages.1.mlp.fc1": (16 * 16 * 16, 192, 768),
    "convnext_tiny.stages.1.mlp.fc2": (16 * 16 * 16, 768, 192),
    "convnext_tiny.stages.2.mlp.fc1": (16 * 8 * 8, 384, 1536),
    "convnext_tiny.stages.2.mlp.fc2": (16 * 8 * 8, 1536, 384),
    "convnext_tiny.stages.3.mlp.fc1": (16 * 4 * 4, 768, 3072),
    "convnext_tiny.stages.3.mlp.fc2": (16 * 4 * 4, 3072, 768),
    "convnext_tiny.head.fc": (16, 768, 1000),
    "efficientnet_b0.classifier, 64 images": (64, 1280, 1000),
}


def _case(label: str, rows: int, c: int, d: int, dtype: torch.dtype) -> Case:
    x, w, y = (n * dtype.itemsize for n in (rows * c, c * d, rows * d))
    flops = 2 * rows * c * d
    return Case(
        label=label,
        family=label.partition(".")[2].rpartition(".")[0] or "heads",
        inputs=lambda device: (
            torch.randn(rows, c, device=device).to(dtype),
            (torch.randn(d, c, device=device) / c**0.5).to(dtype),
            torch.randn(d, device=device).to(dtype),
        ),
        bytes_moved={"fwd": x + w + y, "bwd": 2 * (x + w) + y, "fwd+bwd": 3 * (x + w) + 2 * y},
        flops={"fwd": flops, "bwd": 2 * flops, "fwd+bwd": 3 * flops},
    )


BENCHMARK = Benchmark(
    op="linear",
    cases=lambda dtype: [_case(label, *layer, dtype) for label, layer in LAYERS.items()],
    ours=ops.linear,
    stock={"": F.linear},
    same_as_stock=("reference", "cuda", "triton"),
)

"""depthwise_bn_act_se in training, on the blocks of real networks, with and without a gate, as timm names them."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from harness import Benchmark, Case

from fusedtrain import ops

N = 16
ACT = {"identity": lambda x: x, "relu": F.relu, "silu": F.silu, "hard_swish": F.hardswish}
GATE = {"sigmoid": torch.sigmoid, "hard_sigmoid": F.hardsigmoid}


@dataclass(frozen=True)
class Block:
    """``c`` channels of ``h`` x ``h`` pixels, kernel ``k`` x ``k``, stride ``s``, squeezed to ``r``, 0 for no gate."""

    label: str
    c: int
    h: int
    k: int
    s: int
    r: int
    act: str
    se_act: str
    gate: str

    @property
    def model(self) -> str:
        return self.label.split(".")[0]


def _blocks(model: str, se_act: str, gate: str, *blocks: tuple[str, int, int, int, int, int, str]) -> list[Block]:
    return [Block(f"{model}.{name}", *sizes, act, se_act, gate) for name, *sizes, act in blocks]


BLOCKS = [
    *_blocks(
        *("efficientnet_b0", "silu", "sigmoid"),
        ("blocks.0.0", 32, 112, 3, 1, 8, "silu"),
        ("blocks.1.0", 96, 112, 3, 2, 4, "silu"),
        ("blocks.1.1", 144, 56, 3, 1, 6, "silu"),
        ("blocks.2.0", 144, 56, 5, 2, 6, "silu"),
        ("blocks.2.1", 240, 28, 5, 1, 10, "silu"),
        ("blocks.3.0", 240, 28, 3, 2, 10, "silu"),
        ("blocks.3.1", 480, 14, 3, 1, 20, "silu"),
        ("blocks.4.0", 480, 14, 5, 1, 20, "silu"),
        ("blocks.4.1", 672, 14, 5, 1, 28, "silu"),
        ("blocks.5.0", 672, 14, 5, 2, 28, "silu"),
        ("blocks.5.1", 1152, 7, 5, 1, 48, "silu"),
        ("blocks.6.0", 1152, 7, 3, 1, 48, "silu"),
    ),
    *_blocks(
        *("mobilenetv3_large_100", "relu", "hard_sigmoid"),
        ("blocks.0.0", 16, 112, 3, 1, 0, "relu"),
        ("blocks.1.0", 64, 112, 3, 2, 0, "relu"),
        ("blocks.1.1", 72, 56, 3, 1, 0, "relu"),
        ("blocks.2.0", 72, 56, 5, 2, 24, "relu"),
        ("blocks.2.1", 120, 28, 5, 1, 32, "relu"),
        ("blocks.3.0", 240, 28, 3, 2, 0, "hard_swish"),
        ("blocks.3.1", 200, 14, 3, 1, 0, "hard_swish"),
        ("blocks.4.0", 480, 14, 3, 1, 120, "hard_swish"),
        ("blocks.4.1", 672, 14, 3, 1, 168, "hard_swish"),
        ("blocks.5.0", 672, 14, 5, 2, 168, "hard_swish"),
        ("blocks.5.1", 960, 7, 5, 1, 240, "hard_swish"),
    ),
    *_blocks(
        *("mobilenetv4_conv_medium", "relu", "sigmoid"),
        ("blocks.1.0.dw_mid", 192, 56, 5, 2, 0, "relu"),
        ("blocks.1.1.dw_start", 80, 28, 3, 1, 0, "identity"),
        ("blocks.1.1.dw_mid", 160, 28, 3, 1, 0, "relu"),
        ("blocks.2.0.dw_mid", 480, 28, 5, 2, 0, "relu"),
        ("blocks.2.1.dw_start", 160, 14, 3, 1, 0, "identity"),
        ("blocks.2.1.dw_mid", 640, 14, 3, 1, 0, "relu"),
        ("blocks.2.3.dw_mid", 640, 14, 5, 1, 0, "relu"),
        ("blocks.3.0.dw_mid", 960, 14, 5, 2, 0, "relu"),
        ("blocks.3.1.dw_start", 256, 7, 5, 1, 0, "identity"),
        ("blocks.3.1.dw_mid", 1024, 7, 5, 1, 0, "relu"),
    ),
]


def _case(block: Block, dtype: torch.dtype) -> Case:
    c, h, k, s, r = block.c, block.h, block.k, block.s, block.r
    out = (h - 1) // s + 1

    def inputs(device):
        def randn(*shape, scale=1.0):
            return (torch.randn(shape, device=device) * scale).to(dtype)

        norm = torch.rand(c, device=device), torch.randn(c, device=device)
        images = randn(N, c, h, h), randn(c, 1, k, k, scale=1 / k), *norm
        if r == 0:
            return images
        w1, w2 = randn(r, c, 1, 1, scale=c**-0.5), randn(c, r, 1, 1, scale=r**-0.5)
        return *images, w1, randn(r), w2, randn(c)

    x, y = N * c * h * h * dtype.itemsize, N * c * out * out * dtype.itemsize
    forward, backward = x + 3 * y, 2 * x + 4 * y  # z written and read again; dy and z read twice
    flops = 2 * N * c * out * out * (k * k + 10)
    return Case(
        label=block.label,
        family=block.model,
        inputs=inputs,
        bytes_moved={"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward},
        flops={"fwd": flops, "bwd": 2 * flops, "fwd+bwd": 3 * flops},
        options={"stride": s, "padding": k // 2, "act": block.act, "se_act": block.se_act, "gate": block.gate},
    )


def _stock(x, weight, norm_weight, norm_bias, *se, stride, padding, act, se_act, gate):
    z = F.conv2d(x, weight, None, stride, padding, groups=x.shape[1])
    a = ACT[act](F.batch_norm(z, None, None, norm_weight, norm_bias, True))
    if not se:
        return a
    w1, b1, w2, b2 = se
    squeezed = ACT[se_act](F.conv2d(a.mean((2, 3), keepdim=True), w1, b1))
    return a * GATE[gate](F.conv2d(squeezed, w2, b2))


def _ours(x, weight, norm_weight, norm_bias, *se, **options):
    return ops.depthwise_bn_act_se(x, weight, None, None, None, norm_weight, norm_bias, se or None, True, **options)


BENCHMARK = Benchmark(
    op="depthwise_bn_act_se",
    cases=lambda dtype: [_case(block, dtype) for block in BLOCKS],
    ours=_ours,
    stock={"": _stock},
    peers={
        "lc0, tract": "fuse the block for inference only, inside their own engines",
        "apex, InPlace-ABN": "fuse normalisation and activation, without the convolution and the gate",
    },
)

"""A small EfficientNet-like classifier of stock layers, which :func:`fusedtrain.fuse` swaps.

Fused or not, the modules have the same names, those of timm's EfficientNet, and from the same seed the same initial
weights.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from fusedtrain.nn.fuse import fuse

LAYERS = ("fused", "stock")


class SqueezeExcite(nn.Module):
    """Squeeze-and-excitation as in timm's EfficientNet."""

    def __init__(self, in_chs: int, rd_channels: int, act_layer: type[nn.Module]):
        super().__init__()
        self.conv_reduce = nn.Conv2d(in_chs, rd_channels, 1)
        self.act1 = act_layer(inplace=True)
        self.conv_expand = nn.Conv2d(rd_channels, in_chs, 1)
        self.gate = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.mean((2, 3), keepdim=True)
        return x * self.gate(self.conv_expand(self.act1(self.conv_reduce(pooled))))


class InvertedResidual(nn.Module):
    """Expansion 1x1, depthwise k x k, squeeze-and-excitation, projection 1x1; a shortcut where the shape is kept."""

    def __init__(self, c: int, c_out: int, kernel: int, stride: int, expand: int):
        super().__init__()
        wide = c * expand
        self.conv_pw = nn.Conv2d(c, wide, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(wide)
        self.conv_dw = nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False)
        self.bn2 = nn.BatchNorm2d(wide)
        self.se = SqueezeExcite(wide, rd_channels=c // 4, act_layer=nn.SiLU)
        self.conv_pwl = nn.Conv2d(wide, c_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(c_out)
        self.shortcut = stride == 1 and c == c_out

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.bn1(self.conv_pw(x)))
        y = self.se(F.silu(self.bn2(self.conv_dw(y))))
        y = self.bn3(self.conv_pwl(y))
        return x + y if self.shortcut else y


class SmallNet(nn.Module):
    """Stem, five inverted residual blocks, head; 0.1 M parameters.

    Args:
        num_classes: number of outputs.
        channels: channels of the images.
        layers: "fused" swaps the layers by :func:`fusedtrain.fuse`, "stock" does not.

    Returns:
        From images ``[N, channels, H, W]`` logits ``[N, num_classes]``.

    Raises:
        ValueError: ``layers`` is neither.
    """

    BLOCKS = ((24, 3, 1), (32, 3, 2), (32, 5, 1), (48, 5, 2), (48, 3, 1))  # output channels, kernel, stride
    EXPAND = 4
    WIDTH = 192  # of the head

    def __init__(self, num_classes: int, channels: int = 1, layers: str = "fused"):
        super().__init__()
        if layers not in LAYERS:
            raise ValueError(f"layers must be one of {', '.join(LAYERS)}, got {layers!r}")
        c = self.BLOCKS[0][0]
        self.conv_stem = nn.Conv2d(channels, c, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c)
        blocks = []
        for c_out, kernel, stride in self.BLOCKS:
            blocks.append(InvertedResidual(c, c_out, kernel, stride, self.EXPAND))
            c = c_out
        self.blocks = nn.Sequential(*blocks)
        self.conv_head = nn.Conv2d(c, self.WIDTH, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(self.WIDTH)
        self.classifier = nn.Linear(self.WIDTH, num_classes)
        self._initialise()
        if layers == "fused":
            fuse(self)

    def _initialise(self) -> None:
        # Here, not in the layers, so that the weights depend on the seed alone. He et al., arXiv:1502.01852, fan-out.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.bn1(self.conv_stem(x)))
        x = F.silu(self.bn2(self.conv_head(self.blocks(x))))
        return self.classifier(x.mean((2, 3)))

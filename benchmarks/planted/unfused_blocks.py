"""Inverted residual blocks of timm, in channels_last, unfused."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fusedtrain

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["fuse"]

if not hasattr(torch.ops.torchvision, "nms"):  # there is no CPU build of torchvision: what its import wants
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from timm.models._efficientnet_blocks import InvertedResidual, SqueezeExcite  # noqa: E402

torch.manual_seed(0)
data = TensorDataset(torch.rand(128, 24, 28, 28), torch.randint(10, (128,)))
block = {"exp_ratio": 6, "act_layer": nn.SiLU, "se_layer": SqueezeExcite}
model = nn.Sequential(
    *[InvertedResidual(24, 24, **block) for _ in range(3)], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)
).to(memory_format=torch.channels_last)
if FIXED:
    fusedtrain.fuse(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loader = DataLoader(data, batch_size=8, shuffle=True)
for _ in range(20):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images.to(memory_format=torch.channels_last)), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

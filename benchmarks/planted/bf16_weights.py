"""Weights and images in bfloat16 on a CPU, where the backward pass of a strided depthwise convolution is far slower."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["slow_16_bit"]
DTYPE = torch.float32 if FIXED else torch.bfloat16

torch.manual_seed(0)
data = TensorDataset(torch.rand(256, 32, 16, 16), torch.randint(10, (256,)))
model = nn.Sequential(
    nn.Conv2d(32, 32, 5, 2, 2, groups=32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
).to(DTYPE, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loader = DataLoader(data, batch_size=16, shuffle=True)
for _ in range(10):
    for images, targets in loader:
        images = images.to(DTYPE, memory_format=torch.channels_last).requires_grad_()
        loss = nn.functional.cross_entropy(model(images).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

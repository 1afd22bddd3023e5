"""Autocast to bfloat16 on a CPU, where the backward pass of a strided depthwise convolution is many times slower."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["slow_16_bit"]

torch.manual_seed(0)
data = TensorDataset(torch.rand(256, 32, 16, 16), torch.randint(10, (256,)))
model = nn.Sequential(
    nn.Conv2d(32, 32, 5, 2, 2, groups=32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
).to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loader = DataLoader(data, batch_size=16, shuffle=True)
for _ in range(10):
    for images, targets in loader:
        images = images.to(memory_format=torch.channels_last).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not FIXED):
            loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

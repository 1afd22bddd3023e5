"""A large depthwise convolution on NCHW tensors, where channels_last is many times faster."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["layout"]
FORMAT = torch.channels_last if FIXED else torch.contiguous_format

torch.manual_seed(0)
data = TensorDataset(torch.rand(128, 64, 14, 14), torch.randint(10, (128,)))
model = nn.Sequential(
    nn.Conv2d(64, 64, 13, 1, 6, groups=64),
    nn.ReLU(),
    nn.Conv2d(64, 64, 13, 1, 6, groups=64),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 10),
).to(memory_format=FORMAT)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loader = DataLoader(data, batch_size=16, shuffle=True)
for _ in range(10):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images.contiguous(memory_format=FORMAT)), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

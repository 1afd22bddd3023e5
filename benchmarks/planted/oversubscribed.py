"""Sixteen threads on one core."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["threads"]
torch.set_num_threads(1 if FIXED else 16)

torch.manual_seed(0)
data = TensorDataset(torch.rand(256, 16, 32, 32), torch.randint(10, (256,)))
model = nn.Sequential(
    nn.Conv2d(16, 16, 3),
    nn.ReLU(),
    nn.Conv2d(16, 16, 3),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(2),
    nn.Flatten(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loader = DataLoader(data, batch_size=16, shuffle=True)
for _ in range(20):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

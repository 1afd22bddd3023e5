"""The loss of every sample is read with .item() for a metric."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["own_code"]

torch.manual_seed(0)
data = TensorDataset(torch.rand(2048, 64), torch.randint(10, (2048,)))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
batches = [(data.tensors[0][i : i + 256], data.tensors[1][i : i + 256]) for i in range(0, 2048, 256)]
loader = DataLoader(batches, batch_size=None)
total = 0.0
for _ in range(100):
    for images, targets in loader:
        losses = nn.functional.cross_entropy(model(images), targets, reduction="none")
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        if FIXED:
            total += losses.sum().item()
        else:
            for i in range(len(losses)):
                total += losses[i].item()

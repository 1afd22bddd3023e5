"""Batches of one sample through a deep, narrow network: calls cost more than computing."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["batch_size"]

torch.manual_seed(0)
data = TensorDataset(torch.rand(2048, 32), torch.randint(10, (2048,)))
model = nn.Sequential(*[layer for _ in range(40) for layer in (nn.Linear(32, 32), nn.ReLU())], nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)
loader = DataLoader(data, batch_size=16 if FIXED else 1, shuffle=True)
for _ in range(20):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

"""Epochs of six batches; the workers are started anew for each."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["loader_restart", "loader"]

torch.manual_seed(0)
data = TensorDataset(torch.rand(96, 3, 32, 32), torch.randint(10, (96,)))
model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 30 * 30, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)
loader = DataLoader(data, batch_size=16, shuffle=True, num_workers=2, persistent_workers=FIXED)
for _ in range(100):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

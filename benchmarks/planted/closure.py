"""Forward and backward run in a closure that the optimizer calls, in float64."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["float64"]

torch.manual_seed(0)
dtype = torch.float32 if FIXED else torch.float64
data = TensorDataset(torch.rand(2048, 512, dtype=dtype), torch.randint(10, (2048,)))
model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).to(dtype)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loader = DataLoader(data, batch_size=256, shuffle=True)
for _ in range(100):
    for rows, targets in loader:

        def closure(rows=rows, targets=targets):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(rows), targets)
            loss.backward()
            return loss

        optimizer.step(closure)

"""AdamW with foreach=True over 8 million weights, on a small batch: most of the step is the optimizer."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["optimizer"]

torch.manual_seed(0)
data = TensorDataset(torch.rand(256, 1024), torch.randint(10, (256,)))
model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())], nn.Linear(1024, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=not FIXED, fused=FIXED)
loader = DataLoader(data, batch_size=8, shuffle=True)
for _ in range(20):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

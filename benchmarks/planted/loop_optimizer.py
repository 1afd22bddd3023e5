"""Adam, one tensor after the other, over 400 small tensors."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["optimizer"]

torch.manual_seed(0)
data = TensorDataset(torch.rand(256, 64), torch.randint(10, (256,)))
model = nn.Sequential(
    *[layer for _ in range(100) for layer in (nn.Linear(64, 64), nn.LayerNorm(64))], nn.Linear(64, 10)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False, fused=FIXED)
loader = DataLoader(data, batch_size=16, shuffle=True)
for _ in range(20):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

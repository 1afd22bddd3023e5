"""Building a batch waits 30 ms for a remote service; the loader has no workers."""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["loader"]


def collate(samples):
    time.sleep(0.03)
    return default_collate(samples)


torch.manual_seed(0)
data = TensorDataset(torch.rand(1024, 3, 16, 16), torch.randint(10, (1024,)))
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
workers = 8 if FIXED else 0
loader = DataLoader(data, 16, shuffle=True, collate_fn=collate, num_workers=workers, persistent_workers=FIXED)
for _ in range(10):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

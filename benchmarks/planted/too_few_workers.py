"""Samples come from slow storage, 4 ms each; two workers are not enough to hide that."""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["loader"]


class Images(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.full((3, 24, 24), index / 4096), index % 10


torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
workers = 16 if FIXED else 2
loader = DataLoader(Images(), batch_size=16, shuffle=True, num_workers=workers, persistent_workers=True)
for _ in range(10):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

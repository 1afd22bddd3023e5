"""Each sample waits for storage, as on a slow disk or network; the loader has no workers."""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["loader"]


class Images(Dataset):
    def __len__(self):
        return 2048

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((3, 16, 16), index / 2048), index % 10


torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loader = DataLoader(Images(), batch_size=16, shuffle=True, num_workers=8 if FIXED else 0)
for _ in range(10):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

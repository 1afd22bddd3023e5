"""An iterable dataset that waits 2 ms per sample; the diagnosis must not divide it among workers by itself."""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["loader"]


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for index in range(info.id if info else 0, 1024, info.num_workers if info else 1):
            time.sleep(0.002)
            yield torch.full((3, 16, 16), index / 1024), index % 10


torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loader = DataLoader(Stream(), batch_size=16, num_workers=8 if FIXED else 0, persistent_workers=FIXED)
for _ in range(20):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

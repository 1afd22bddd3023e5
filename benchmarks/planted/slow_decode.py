"""Each sample is decoded by Python code that takes 2 ms of CPU time; the loader has no workers."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FIXED = "PLANTED_FIXED" in os.environ
CORES = 2
CAUSES = ["loader"]


class Images(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        total = 0
        for i in range(40000):  # stands for decoding
            total += i * index
        return torch.full((3, 16, 16), total % 7 / 7), index % 10


torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loader = DataLoader(Images(), batch_size=8, shuffle=True, num_workers=2 if FIXED else 0, persistent_workers=FIXED)
for _ in range(10):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

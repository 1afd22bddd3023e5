"""Two faults: samples wait for storage without workers, and AdamW goes over its weights with foreach=True."""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["loader"]


class Rows(Dataset):
    def __len__(self):
        return 1024

    def __getitem__(self, index):
        time.sleep(0.006)
        return torch.full((512,), index / 1024), index % 10


torch.manual_seed(0)
model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())], nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=not FIXED, fused=FIXED)
loader = DataLoader(Rows(), batch_size=8, shuffle=True, num_workers=8 if FIXED else 0, persistent_workers=FIXED)
for _ in range(20):
    for rows, targets in loader:
        loss = nn.functional.cross_entropy(model(rows), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

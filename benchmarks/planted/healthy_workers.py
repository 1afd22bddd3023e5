"""No bottleneck: two workers deliver in time, and computing takes the rest."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CAUSES = []


class Rows(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((128, 512), index / 512), index % 10


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loader = DataLoader(Rows(), batch_size=8, shuffle=True, num_workers=2, persistent_workers=True)
for _ in range(40):
    for rows, targets in loader:
        loss = nn.functional.cross_entropy(model(rows).mean(1), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

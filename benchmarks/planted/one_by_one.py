"""A loader takes the samples of a data set in memory one by one and puts them together again."""

import os

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["loader"]

torch.manual_seed(0)
data = TensorDataset(torch.rand(8192, 64), torch.randint(10, (8192,)))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loader = DataLoader(data, batch_size=256, shuffle=True)
if FIXED:
    loader = DataLoader(data, sampler=BatchSampler(RandomSampler(data), 256, drop_last=False), batch_size=None)
for _ in range(40):
    for rows, targets in loader:
        loss = nn.functional.cross_entropy(model(rows), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

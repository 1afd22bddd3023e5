"""One thread where there are two cores."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["threads"]
CORES = 2
torch.set_num_threads(2 if FIXED else 1)

torch.manual_seed(0)
batches = [(torch.rand(512, 1024), torch.randint(10, (512,))) for _ in range(8)]
model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loader = DataLoader(batches, batch_size=None, shuffle=True)
for _ in range(40):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

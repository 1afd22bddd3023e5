"""No bottleneck: matrices of a good size, a fused optimizer, data in memory."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader

CAUSES = []

torch.manual_seed(0)
batches = [(torch.rand(256, 512), torch.randint(10, (256,))) for _ in range(16)]
model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loader = DataLoader(batches, batch_size=None, shuffle=True)
for _ in range(int(os.environ.get("PLANTED_EPOCHS", "40"))):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

"""The search for a NaN that was found long ago is still on."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["debugging"]

torch.manual_seed(0)
torch.autograd.set_detect_anomaly(not FIXED)
data = TensorDataset(torch.rand(512, 64), torch.randint(10, (512,)))
model = nn.Sequential(*[layer for _ in range(20) for layer in (nn.Linear(64, 64), nn.ReLU())], nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loader = DataLoader(data, batch_size=64, shuffle=True)
for _ in range(100):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

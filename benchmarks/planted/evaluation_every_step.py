"""After every update the model is evaluated on four batches, with gradients recorded."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["evaluation"]


def accuracy(model, loader):
    model.eval()
    right = sum((model(rows).argmax(1) == targets).sum().item() for rows, targets in loader)
    model.train()
    return right / len(loader.dataset)


torch.manual_seed(0)
train, valid = (TensorDataset(torch.rand(n, 256), torch.randint(10, (n,))) for n in (2048, 1024))
model = nn.Sequential(
    nn.Linear(256, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loader, check = DataLoader(train, batch_size=64, shuffle=True), DataLoader(valid, batch_size=256)
for _ in range(40):
    for rows, targets in loader:
        loss = nn.functional.cross_entropy(model(rows), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not FIXED:
            accuracy(model, check)

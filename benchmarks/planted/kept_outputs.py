"""The outputs of every step are kept in a list that nobody empties, for a metric."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["memory"]


class Metrics:
    def __init__(self):
        self.outputs, self.right = [], 0

    def add(self, outputs, targets):
        self.right += (outputs.argmax(1) == targets).sum()
        if not FIXED:
            self.outputs.append(outputs)


torch.manual_seed(0)
data = TensorDataset(torch.rand(4096, 256), torch.randint(1000, (4096,)))
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1000))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loader, metrics = DataLoader(data, batch_size=64, shuffle=True), Metrics()
for _ in range(30):
    for rows, targets in loader:
        outputs = model(rows)
        loss = nn.functional.cross_entropy(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics.add(outputs, targets)

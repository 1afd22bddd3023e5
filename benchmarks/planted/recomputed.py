"""A layer standardises its input by the mean and deviation of the whole data set, which it computes in every step."""

import os

import torch
from torch import nn

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["recomputed"]


class Standardise(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.rows, self.known = rows, (rows.mean(0), rows.std(0))

    def forward(self, x):
        mean, deviation = self.known if FIXED else (self.rows.mean(0), self.rows.std(0))
        return (x - mean) / deviation


torch.manual_seed(0)
rows, targets = torch.randn(20000, 64) * 3 + 1, torch.randint(4, (20000,))
model = nn.Sequential(Standardise(rows), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _ in range(15):
    for chosen in torch.randperm(20000).split(200):
        loss = nn.functional.cross_entropy(model(rows[chosen]), targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

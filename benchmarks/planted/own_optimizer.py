"""Adam as in the paper, written by hand: ten operations for each of 200 small tensors."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["optimizer"]


class Adam:
    def __init__(self, weights, rate=1e-4, decay=(0.9, 0.999)):
        self.weights, self.rate, self.decay = list(weights), rate, decay
        self.mean = {p: torch.zeros_like(p) for p in self.weights}
        self.square = {p: torch.zeros_like(p) for p in self.weights}
        self.count = 0

    @torch.no_grad()
    def step(self):
        self.count += 1
        first, second = self.decay
        for p in self.weights:
            self.mean[p] = first * self.mean[p] + (1 - first) * p.grad
            self.square[p] = second * self.square[p] + (1 - second) * p.grad**2
            mean = self.mean[p] / (1 - first**self.count)
            square = self.square[p] / (1 - second**self.count)
            p -= self.rate * mean / (square.sqrt() + 1e-8)
            p.grad = None


torch.manual_seed(0)
data = TensorDataset(torch.rand(256, 64), torch.randint(10, (256,)))
model = nn.Sequential(*[layer for _ in range(100) for layer in (nn.Linear(64, 64), nn.ReLU())], nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True) if FIXED else Adam(model.parameters())
loader = DataLoader(data, batch_size=16, shuffle=True)
for _ in range(40):
    for images, targets in loader:
        if FIXED:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()

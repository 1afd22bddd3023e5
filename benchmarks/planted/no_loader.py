"""Batches are slices of a tensor, without a DataLoader; Adam goes over 8 million weights with foreach=True."""

import os

import torch
from torch import nn

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["optimizer"]

torch.manual_seed(0)
data, labels = torch.rand(256, 1024), torch.randint(10, (256,))
model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())], nn.Linear(1024, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=not FIXED, fused=FIXED)
for step in range(5000):
    begin = step % 32 * 8
    loss = nn.functional.cross_entropy(model(data[begin : begin + 8]), labels[begin : begin + 8])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

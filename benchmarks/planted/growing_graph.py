"""The hidden state is carried from batch to batch and never detached: each backward pass is longer than the last."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["growing_graph"]

torch.manual_seed(0)
data = TensorDataset(torch.randn(4096, 64), torch.randn(4096, 8))
inner, outer = nn.Linear(64, 128), nn.Linear(128, 8)
optimizer = torch.optim.SGD(outer.parameters(), lr=0.01, fused=True)
loader = DataLoader(data, batch_size=32, shuffle=True)
for _ in range(5):
    state = torch.zeros(32, 128)
    for rows, targets in loader:
        state = torch.tanh(inner(rows) + 0.5 * (state.detach() if FIXED else state))
        loss = nn.functional.mse_loss(outer(state), targets)
        optimizer.zero_grad()
        loss.backward(retain_graph=not FIXED)
        optimizer.step()

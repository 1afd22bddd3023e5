"""A linear recurrence, one of 200 positions after the other, where two matrices would do."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["python_loop"]
LENGTH = 200


class Decay(nn.Module):
    """h[t] = a h[t - 1] + x[t]"""

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.9))

    def forward(self, x):
        if FIXED:
            distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
            kernel = (self.rate ** distance.clamp(min=0)).tril()
            return torch.einsum("ts,bsc->btc", kernel, x)
        state, states = torch.zeros(x.shape[0], x.shape[2]), []
        for position in range(x.shape[1]):
            state = self.rate * state + x[:, position]
            states.append(state)
        return torch.stack(states, 1)


torch.manual_seed(0)
data = TensorDataset(torch.rand(256, LENGTH, 8), torch.randint(10, (256,)))
model = nn.Sequential(nn.Linear(8, 32), Decay(), nn.ReLU(), nn.Flatten(), nn.Linear(LENGTH * 32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)
loader = DataLoader(data, batch_size=8, shuffle=True)
for _ in range(40):
    for signals, targets in loader:
        loss = nn.functional.cross_entropy(model(signals), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

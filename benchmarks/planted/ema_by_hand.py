"""A moving average of 400 small weights, kept one by one in Python and read with .item() after every step."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["own_code"]

torch.manual_seed(0)
data = TensorDataset(torch.rand(512, 64), torch.randint(10, (512,)))
model = nn.Sequential(*[nn.Linear(64, 64, bias=True) for _ in range(40)], nn.Linear(64, 10))
average = {name: p.detach().clone() for name, p in model.named_parameters()}
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)
loader = DataLoader(data, batch_size=64, shuffle=True)
for _ in range(50):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if FIXED:
            with torch.no_grad():
                torch._foreach_lerp_(list(average.values()), list(model.parameters()), 0.01)
        else:
            for _ in range(3):
                for name, p in model.named_parameters():
                    average[name] = average[name] * 0.99 + p.detach().clone() * 0.01
                    assert average[name].norm().item() >= 0

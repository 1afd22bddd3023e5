"""Activations above 32 MiB, each of which glibc maps anew and gives back in every step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CAUSES = ["allocator"]
FIXED_ENVIRONMENT = "GLIBC_TUNABLES"  # the remedy stands outside of the script

torch.manual_seed(0)
data = TensorDataset(torch.rand(64, 3, 64, 64), torch.randint(10, (64,)))


class Wide(nn.Module):
    """Each activation is 48 MiB, and cheap to compute."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(96, 10)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = x.repeat(1, 32, 1, 1) * self.scale
        for _ in range(3):
            x = torch.relu(x)
        return self.head(x.mean((2, 3)))


model = Wide()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loader = DataLoader(data, batch_size=32, shuffle=True)
for _ in range(200):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

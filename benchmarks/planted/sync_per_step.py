"""Every layer's mean is read from the GPU in every step."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["syncs"]
NEEDS = "cuda"

torch.manual_seed(0)
batches = [(torch.rand(512, 1024, device="cuda"), torch.randint(10, (512,), device="cuda")) for _ in range(8)]
model = nn.Sequential(*[layer for _ in range(20) for layer in (nn.Linear(1024, 1024), nn.ReLU())], nn.Linear(1024, 10))
model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)
loader = DataLoader(batches, batch_size=None, shuffle=True)
log = []
for _ in range(50):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not FIXED:
            log = [p.mean().item() for p in model.parameters()]

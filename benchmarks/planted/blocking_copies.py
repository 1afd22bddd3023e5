"""Large batches go to the GPU by blocking copies from pageable memory."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["copies"]
NEEDS = "cuda"

torch.manual_seed(0)
data = TensorDataset(torch.rand(512, 3, 224, 224), torch.randint(10, (512,)))
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loader = DataLoader(data, batch_size=128, shuffle=True, num_workers=4, persistent_workers=True, pin_memory=FIXED)
for _ in range(50):
    for images, targets in loader:
        images, targets = images.cuda(non_blocking=FIXED), targets.cuda(non_blocking=FIXED)
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

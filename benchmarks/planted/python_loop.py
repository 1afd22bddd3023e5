"""The loop counts hits pixel by pixel in Python after every step."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["own_code"]

torch.manual_seed(0)
data = TensorDataset(torch.rand(512, 3, 16, 16), torch.randint(10, (512,)))
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loader = DataLoader(data, batch_size=16, shuffle=True)
for _ in range(20):
    for images, targets in loader:
        output = model(images)
        loss = nn.functional.cross_entropy(output, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bright = 0
        if FIXED:
            bright = int((images[:, 0] > 0.5).sum())
        else:
            for row in images[:, 0].reshape(-1).tolist():
                if row > 0.5:
                    bright = bright + len(f"{row:.3f}") // 5

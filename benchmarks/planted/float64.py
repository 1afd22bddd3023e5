"""NumPy's float64 numbers, and a model made to fit them."""

import os

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["float64"]
DTYPE = np.float32 if FIXED else np.float64

torch.manual_seed(0)
images = np.random.default_rng(0).random((512, 256)).astype(DTYPE)
data = TensorDataset(torch.from_numpy(images), torch.randint(10, (512,)))
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
model.to(data.tensors[0].dtype)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loader = DataLoader(data, batch_size=128, shuffle=True)
for _ in range(100):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

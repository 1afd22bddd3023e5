"""The whole state of the training is written to a file after every step."""

import os
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["own_code"]

torch.manual_seed(0)
data = TensorDataset(torch.rand(512, 256), torch.randint(10, (512,)))
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
loader = DataLoader(data, batch_size=64, shuffle=True)
with tempfile.TemporaryDirectory() as folder:
    for _ in range(40):
        for images, targets in loader:
            loss = nn.functional.cross_entropy(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not FIXED:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, os.path.join(folder, "last.pt"))

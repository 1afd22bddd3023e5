"""Two processes exchange 25 MiB of gradients after every small backward pass, though they update after every fourth."""

import contextlib
import os

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["communication"]
CORES = 2
RANKS = 2

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.rand(2048, 1024), torch.randint(10, (2048,)))
layers = [layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers, nn.Linear(1024, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
for epoch in range(100):
    sampler.set_epoch(epoch)
    for i, (rows, targets) in enumerate(loader):
        update = i % 4 == 3
        with model.no_sync() if FIXED and not update else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(model(rows), targets) / 4
            loss.backward()
        if update:
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()

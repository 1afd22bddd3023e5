"""Samples are read from a file through a reader that allows 4 MB per second, as a slow disk does."""

import os
import tempfile
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FIXED = "PLANTED_FIXED" in os.environ
CAUSES = ["loader"]
BYTES = 3 * 32 * 32


class Reader:
    """Reads at a limited rate per reader, with time to seek."""

    def __init__(self, path, rate=4e6, seek=0.001):
        self.file, self.rate, self.seek = os.open(path, os.O_RDONLY), rate, seek

    def read(self, offset, size):
        time.sleep(self.seek + size / self.rate)
        return os.pread(self.file, size, offset)


class Images(Dataset):
    def __init__(self, path):
        self.reader = Reader(path)

    def __len__(self):
        return 1024

    def __getitem__(self, index):
        raw = self.reader.read(index * BYTES, BYTES)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(3, 32, 32).float() / 255, index % 10


with tempfile.NamedTemporaryFile() as file:
    file.write(os.urandom(1024 * BYTES))
    file.flush()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 15 * 15, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    loader = DataLoader(Images(file.name), 16, shuffle=True, num_workers=8 if FIXED else 0, persistent_workers=FIXED)
    for _ in range(10):
        for images, targets in loader:
            loss = nn.functional.cross_entropy(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

"""What the training loop costs per step over a raw PyTorch loop, beside Lightning and accelerate where installed.

A tiny network on the CPU, one thread: what is left after the raw loop's time is the loop's own. The variants take
turns; medians over the rounds. ``python benchmarks/bench_train_loop.py`` prints the table.
"""

import argparse
import contextlib
import importlib
import io
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

from fusedtrain.train import Logging, Schedule, TrainConfig, Trainer

STEPS = 1000


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


class Data:
    """The same batch over and over."""

    def __init__(self, steps: int):
        self.batch, self.steps = (torch.randn(8, 16), torch.randint(4, (8,))), steps

    def __len__(self):
        return self.steps

    def __iter__(self):
        for _ in range(self.steps):
            yield self.batch


def raw(data: Data) -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.train()
    for inputs, targets in data:
        value = loss(model(inputs), targets)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()


def trainer(data: Data, **options) -> None:
    model = net()
    config = TrainConfig(epochs=1, device="cpu", schedule=Schedule("constant", warmup_epochs=0, per="epoch"), **options)
    with contextlib.redirect_stdout(io.StringIO()):
        Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.01), config).fit(data)


def logged(data: Data) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer(data, logging=Logging(Path(folder), log_every=1))


def scheduled(data: Data) -> None:
    model = net()
    config = TrainConfig(epochs=1, device="cpu", schedule=Schedule("cosine", warmup_epochs=0))
    with contextlib.redirect_stdout(io.StringIO()):
        Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.01), config).fit(data)


def accelerated(data: Data) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    for inputs, targets in data:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


def lightning(data: Data) -> None:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.loss = net(), nn.CrossEntropyLoss()

        def training_step(self, batch, index):
            return self.loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    L.Trainer(max_epochs=1, accelerator="cpu", **quiet).fit(Module(), data)


VARIANTS = {
    "raw loop": raw,
    "Trainer": trainer,
    "Trainer, cosine per step": scheduled,
    "Trainer, every step logged": logged,
}
RIVALS = {"accelerate": accelerated, "lightning": lightning}


def measure(variants: dict, rounds: int, steps: int) -> dict[str, float]:
    """Microseconds per step; the start of a run, measured by a run of one step, is taken off."""
    took = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            start = time.perf_counter()
            run(Data(1))
            middle = time.perf_counter()
            run(Data(steps + 1))
            took[name].append((time.perf_counter() - middle - (middle - start)) / steps * 1e6)
    return {name: median(values) for name, values in took.items()}


def importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except (ImportError, RuntimeError):  # RuntimeError: a torchvision of another torch, which lightning imports
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: run for name, run in RIVALS.items() if importable(name)}
    times = measure(VARIANTS | found, options.rounds, options.steps)
    print(f"{'loop':<28}{'us/step':>9}{'over raw':>10}")
    for name, value in times.items():
        print(f"{name:<28}{value:>9.1f}{value - times['raw loop']:>10.1f}")
    for name in RIVALS.keys() - found.keys():
        print(f"{name:<28} cannot be imported here")


if __name__ == "__main__":
    main()

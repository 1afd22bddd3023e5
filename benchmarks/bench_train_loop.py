"""What the training loop costs per step over a raw PyTorch loop, beside Lightning and accelerate where they import.

A tiny network on the CPU: what is left after the raw loop's time is the loop's own. The loops take turns. Rows per
loop: ``step`` is the whole step, ``over raw`` what it takes longer than a raw loop of the same round; the start of a
run, measured by a run of one step, is taken off.
"""

import contextlib
import importlib
import importlib.metadata
import io
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from harness import quantiles
from timing import host_clock
from torch import nn

from fusedtrain.train import Logging, Schedule, TrainConfig, Trainer

STEPS, ROUNDS = 3000, 11


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


class Screen(io.StringIO):
    """A terminal, so that the progress bar is drawn."""

    def isatty(self) -> bool:
        return True


def raw(data: Data) -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.train()
    for inputs, targets in data:
        value = loss(model(inputs), targets)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()


def trainer(data: Data, schedule: str = "constant", screen: type = io.StringIO, **options) -> None:
    model, per = net(), "epoch" if schedule == "constant" else "step"
    config = TrainConfig(epochs=1, device="cpu", schedule=Schedule(schedule, warmup_epochs=0, per=per), **options)
    with contextlib.redirect_stdout(screen()):
        Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.01), config).fit(data)


def scheduled(data: Data) -> None:
    trainer(data, "cosine")


def logged(data: Data) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer(data, screen=Screen, logging=Logging(Path(folder), log_every=1))


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

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with warnings.catch_warnings(action="ignore"):
        L.Trainer(max_epochs=1, accelerator="cpu", **silent).fit(Module(), data)


LOOPS = {
    "raw loop": raw,
    "Trainer, bare": trainer,
    "Trainer, cosine per step": scheduled,
    "Trainer, every step logged, progress bar": logged,
}
PEERS = {"accelerate": accelerated, "lightning": lightning}  # bare: without logging and progress


def importable(name: str) -> bool:
    """Whether a peer can run here; says why not."""
    try:
        importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # the latter: a torchvision of another torch
        print(f"{name} is not measured: {error}", file=sys.stderr)
        return False
    return True


def _seconds(run: Callable[[Data], None], steps: int) -> float:
    clock, data = host_clock(), Data(steps)
    start = clock()
    run(data)
    return clock() - start


def rows(quick: bool) -> Iterator[dict]:
    """Measures all loops on the CPU; in fewer rounds where it is to be quick."""
    rounds = 3 if quick else ROUNDS
    os.environ["TERM"] = "xterm"  # a terminal on which rich draws
    loops = LOOPS | {name: run for name, run in PEERS.items() if importable(name)}
    took = {name: [] for name in loops}
    for _ in range(rounds):
        for name, run in random.sample(list(loops.items()), len(loops)):
            start = _seconds(run, 1)
            took[name].append((_seconds(run, STEPS + 1) - start) / STEPS)
    for name, seconds in took.items():
        over = [one - raw for one, raw in zip(seconds, took["raw loop"])]
        for mode, values in {"step": seconds, "over raw": over}.items():
            p20, p50, p80 = quantiles(values)
            yield {
                **{"op": "train_loop", "family": "train_loop", "case": name, "shape": "8x16", "dtype": "float32"},
                **{"layout": "contiguous", "mode": mode, "rounds": rounds},
                **{"backend": "eager" if name == "raw loop" else name if name in PEERS else "auto"},
                **{"note": importlib.metadata.version(name) if name in PEERS else ""},
                **{"us_p50": p50, "us_p20": p20, "us_p80": p80},
            }

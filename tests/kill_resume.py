"""Kills a training run with SIGKILL at random moments, lets it go on, and compares with a run that was left alone.

``python tests/kill_resume.py FOLDER --kills 200`` goes through all kinds of runs: fp32 and bf16, 0 and 2 workers, 1 and
2 processes, saving in the step or in a thread, and image files through :func:`fusedtrain.data.loader`. Every run has
dropout, augmentation that draws from Python's, NumPy's and torch's generators, shuffling, unequal batches,
accumulation, a schedule and averaged weights. The losses of all steps and the whole last state must be the same bit by
bit.
"""

import argparse
import itertools
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import forks
import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fusedtrain.data import DevicePrefetcher, ImageFolder, loader
from fusedtrain.data.folder import to_tensor
from fusedtrain.optim import AdamW
from fusedtrain.train import Callback, Checkpoint, CheckpointStore, EpochSampler, SeededDataset, TrainConfig, Trainer

SAMPLES, EPOCHS = 85, 2


@dataclass(frozen=True)
class Kind:
    """What a run is like."""

    precision: str = "fp32"
    workers: int = 0
    processes: int = 1
    asynchronous: bool = False
    loader: str = "sampler"  # "plain": DataLoader(shuffle=True), whose used batches are read again; "files": our own
    stop: str = ""  # where a signal comes, in :func:`preempt`: while waiting for "data", in "evaluation", in "forward"
    number: int = signal.SIGTERM
    group: bool = False  # to the workers too, as by a launcher


KINDS = [Kind(*one) for one in itertools.product(("fp32", "bf16"), (0, 2), (1, 2), (False, True))]
KINDS += [Kind(workers=workers, loader=name) for name in ("plain", "files") for workers in (0, 2)]
STOPS = [
    Kind(stop="data"),  # in the dataset, between two micro-batches of one update
    Kind(stop="data", workers=2, number=signal.SIGINT),
    Kind(stop="evaluation", number=signal.SIGUSR1),
    Kind(stop="forward", precision="bf16", workers=2, group=True),
    Kind(stop="forward", processes=2, number=signal.SIGUSR1),  # one of the two gets the signal
    Kind(stop="data", processes=2, number=signal.SIGINT),
    Kind(stop="evaluation", processes=2, asynchronous=True),
    Kind(stop="data", loader="plain"),  # what half a batch has drawn is drawn again
]


class Images(Dataset):
    """Small images with noise from every generator."""

    def __init__(self, trap: "Trap | None" = None):
        self.trap = trap
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
        self.targets = torch.randint(0, 5, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int):
        if self.trap is not None:
            self.trap.pass_by(wait=True)
        return augment(self.images[index]), self.targets[index]


def augment(image: torch.Tensor) -> torch.Tensor:
    image = image * random.uniform(0.5, 1.5) + 0.1 * torch.randn(1, 8, 8)
    return torch.roll(image, int(np.random.randint(8)), 2)


def files(folder: Path) -> ImageFolder:
    """The same as PNG and JPEG files in five folders, with one that is broken."""
    if not folder.exists():
        images = Images()
        for index, (image, target) in enumerate(zip(images.images, images.targets)):
            path = folder / str(target.item()) / f"{index}.{'jpg' if index % 2 else 'png'}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0].add(3).mul(40).clamp(0, 255).byte().numpy()).save(path)
        path.write_bytes(path.read_bytes()[:50])
    return ImageFolder(folder, transform=lambda image: augment(to_tensor(image)[:1].float() / 40 - 3))


class Trap:
    """Sends the signal to the training process at the ``count``-th passing by; once, also over several runs."""

    def __init__(self, kind: Kind, folder: Path, count: int):
        self.number, self.file, self.left, self.process = kind.number, folder / "stopped", count, os.getpid()
        self.group = kind.group

    def pass_by(self, wait: bool = False) -> None:
        self.left -= 1
        if self.left == 0 and not self.file.exists():
            self.file.touch()
            if self.group:
                forks.send(self.process, self.number)
                time.sleep(0.5)  # the workers end meanwhile
            else:
                os.kill(self.process, self.number)
            while wait and os.getpid() == self.process:
                time.sleep(60)  # the sample never comes


class Record(Callback):
    """Writes the loss of every step to a file, also of those that are made twice."""

    def __init__(self, path: Path):
        self.file = open(path, "a", buffering=1)  # noqa: SIM115 (open as long as the run)

    def on_step_end(self, trainer) -> None:
        self.file.write(f"{trainer.step_count} {float(trainer.last_loss).hex()}\n")


def train(kind: Kind, folder: Path, workers: int | None = None) -> None:
    """The run of one process, from the start or from its newest checkpoint to the end."""
    rank = int(os.environ.get("RANK", 0))
    workers = kind.workers if workers is None else workers
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(288, 5)
    )
    traps = {}
    if kind.stop and rank == 0:
        counts = {"data": 68, "evaluation": SAMPLES + 10, "forward": 9}
        traps[kind.stop] = Trap(kind, folder, counts[kind.stop] // kind.processes // max(1, kind.workers))
    if "forward" in traps:
        model[0].register_forward_hook(lambda module, *args: traps["forward"].pass_by() if module.training else None)
    if kind.loader == "files":
        sampler = EpochSampler(SAMPLES, 8, seed=1)
        own = loader(
            SeededDataset(files(folder.parent / "images"), 1), batch_sampler=sampler, num_workers=workers, max_skipped=1
        )
        data, valid = DevicePrefetcher(own, "cpu"), DataLoader(SeededDataset(Images(), 2), 32)
    elif kind.loader == "sampler":
        sampler = EpochSampler(SAMPLES, 8, seed=1, rank=rank, world_size=kind.processes)
        data = DataLoader(SeededDataset(Images(traps.get("data")), 1), batch_sampler=sampler, num_workers=workers)
        valid_sampler = EpochSampler(SAMPLES, 32, shuffle=False, rank=rank, world_size=kind.processes)
        valid = DataLoader(SeededDataset(Images(traps.get("evaluation")), 2), batch_sampler=valid_sampler)
    else:
        data = DataLoader(Images(traps.get("data")), batch_size=8, shuffle=True, num_workers=workers)
        valid = DataLoader(Images(), batch_size=32)
    config = TrainConfig(
        epochs=EPOCHS,
        precision=kind.precision,
        device="cpu",
        accumulation=2,
        ema_decay=0.9,
        max_grad_norm=1.0,
        checkpoint=Checkpoint(folder, every_steps=2, keep=1, asynchronous=kind.asynchronous),
    )
    optimizer = (AdamW if kind.precision == "fp32" else torch.optim.AdamW)(model.parameters(), lr=1e-2)
    callbacks = [Record(folder / "losses")] if rank == 0 else []
    Trainer(model, nn.CrossEntropyLoss(), optimizer, config, callbacks=callbacks).fit(data, valid)


def start(kind: Kind, folder: Path, **options) -> list[int]:
    folder.mkdir(exist_ok=True)
    return forks.start(kind.processes, lambda: train(kind, folder, **options), folder / "output")


def finish(kind: Kind, folder: Path, **options) -> None:
    """Lets the run go on to its end."""
    statuses = forks.wait(start(kind, folder, **options))
    if any(statuses):
        sys.exit(f"{kind} ended with {statuses}:\n{(folder / 'output').read_text()[-5000:]}")


def wait_for_steps(path: Path, count: int, children: list[int]) -> None:
    """Waits until a run has written so many lines more, or ends."""
    ends, before = os.WEXITED | os.WNOHANG | os.WNOWAIT, None
    while not any(os.waitid(os.P_PID, child, ends) for child in children):
        lines = len(path.read_bytes().splitlines()) if path.exists() else 0
        before = lines if before is None else before
        if lines >= before + count:
            return
        time.sleep(0.005)


def kill(children: list[int]) -> bool:
    """SIGKILL to all processes of a run at once; returns whether it was still going on."""
    for child in children:
        os.kill(child, signal.SIGKILL)
    statuses = forks.wait(children)
    forks.clear(children)
    return any(status == -signal.SIGKILL for status in statuses)


def losses(folder: Path) -> set[tuple[int, str]]:
    """The steps that were made with their losses; a line that was cut off by a kill is left out."""
    lines = (folder / "losses").read_text().splitlines(True) if (folder / "losses").exists() else []
    return {(int(line.split()[0]), line.split()[1]) for line in lines if line.endswith("\n")}


def differences(one, other, path: str = "") -> list[str]:
    """Where two states differ, bit by bit; seconds do not count."""
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
        return [] if same else [path]
    if isinstance(one, (dict, list, tuple)):
        if type(one) is not type(other) or len(one) != len(other):
            return [path]
        pairs = one.items() if isinstance(one, dict) else enumerate(one)
        found = []
        for key, value in pairs:
            if key not in ("seconds", "images_per_second"):
                found += differences(value, other[key], f"{path}/{key}")
        return found
    return [] if one == other or (one != one and other != other) else [f"{path}: {one} is not {other}"]


class Alone:
    """A run that is left alone, and what it must be like."""

    def __init__(self, kind: Kind, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        finish(kind, folder / "alone")
        self.seconds, self.kind = time.perf_counter() - began, kind
        self.losses, (self.state, info) = losses(folder / "alone"), CheckpointStore(folder / "alone").load()
        self.steps = info.step
        assert self.steps == max(step for step, _ in self.losses)

    def compare(self, folder: Path) -> None:
        """Fails unless the run that ended in ``folder`` is the same."""
        wrong = losses(folder) - self.losses
        assert not wrong, f"{self.kind}: losses that the run alone does not have: {sorted(wrong)[:3]}"
        assert losses(folder) == self.losses, f"{self.kind}: steps are missing"
        found = differences(self.state, CheckpointStore(folder).load()[0])
        assert not found, f"{self.kind}: the last states differ in {found[:5]}"


def check(kind: Kind, draw: random.Random, folder: Path, kills: int) -> int:
    """Kills runs of one kind ``kills`` times; returns at how many different steps they went on."""
    alone, resumed, killed, at = Alone(kind, folder), set(), folder / "killed", 0
    while kills:
        more = draw.randrange(max(1, alone.steps - at))
        children = start(kind, killed)
        wait_for_steps(killed / "losses", more, children)
        time.sleep(draw.uniform(0, alone.seconds / alone.steps))
        if kill(children):
            kills, at = kills - 1, max(CheckpointStore(killed).steps(), default=0)
            resumed.add(at)
            if kills:
                continue
        # Its own end, or the last kill: with another number of workers, which changes nothing.
        finish(kind, killed, workers=None if kind.loader == "plain" else 1)
        alone.compare(killed)
        shutil.rmtree(killed)
        at = 0
    shutil.rmtree(folder)
    return len(resumed)


def preempt(kind: Kind, folder: Path, alones: dict[Kind, Alone]) -> int:
    """Stops a run of one kind by a signal and lets it go on; returns the step at which it did."""
    same, stopped = replace(kind, stop="", number=signal.SIGTERM, group=False, asynchronous=False), folder / "stopped"
    alone = alones[same] = alones.get(same) or Alone(same, folder)
    stopped.parent.mkdir(exist_ok=True)
    began = time.perf_counter()
    statuses = forks.wait(start(kind, stopped))
    assert set(statuses) == {128 + kind.number}, f"{kind}: {statuses}\n{(stopped / 'output').read_text()[-5000:]}"
    assert time.perf_counter() - began < 30, f"{kind}: it waited for the sample"
    step = CheckpointStore(stopped).load()[1].step
    assert 0 < step < alone.steps
    finish(kind, stopped)
    alone.compare(stopped)
    shutil.rmtree(folder)
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", type=int, nargs="*", default=range(len(KINDS)), help="which of the kinds, by number")
    parser.add_argument("--stops", action="store_true", help="stop a run by a signal, at every place")
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw, kinds = random.Random(options.seed), [KINDS[index] for index in options.kinds]
    for index, kind in enumerate(kinds):
        kills = (options.kills + len(kinds) - 1 - index) // len(kinds)
        began = time.perf_counter()
        steps = check(kind, draw, options.folder / str(index), kills)
        print(f"{kind}: {kills} kills, went on from {steps} different steps, {time.perf_counter() - began:.0f} s")
    alones: dict[Kind, Alone] = {}
    for kind in STOPS if options.stops else []:
        print(f"{kind}: stopped at step {preempt(kind, options.folder / 'stops', alones)}")
    print(f"{options.kills} kills, every run went on bit by bit")


if __name__ == "__main__":
    main()

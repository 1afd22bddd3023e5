"""Measures from outside what ``fusedtrain diagnose`` costs the training that it watches.

A script takes steps of some length and notes the time of each itself. Within one process, so that a machine whose speed
drifts hits both alike, it takes turns with itself: the plain loop, and the loop that ``fusedtrain diagnose`` watches:
bare steps, steps that are watched in parts, and all that it does between them. Compared are the mean step and the
median step of each turn, over several processes.

    python benchmarks/overhead.py                    3 processes for each of five lengths, about eight minutes
    python benchmarks/overhead.py --processes 1 linear   fewer, and one script
"""

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from statistics import fmean, median

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fusedtrain.diagnose import measure
from fusedtrain.diagnose.drive import Arm, Driver, Finished
from fusedtrain.diagnose.instrument import Instrument
from fusedtrain.diagnose.statistics import bootstrap

SECONDS = 25.0  # of a process
WATCHED = 50  # steps of a turn that are watched in parts


def linear(layers: int) -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers))), torch.rand(256, 64)


def convolutions(blocks: int, size: int) -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(blocks):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), torch.rand(64, 3, size, size)


CASES = {
    "linear": lambda: linear(1),
    "linear, 30 layers": lambda: linear(30),
    "2 convolutions": lambda: convolutions(2, 16),
    "5 convolutions": lambda: convolutions(5, 24),
    "8 convolutions": lambda: convolutions(8, 32),
}


class Script:
    """A training loop that notes the time of every step."""

    def __init__(self, name: str):
        torch.manual_seed(0)
        self.model, inputs = CASES[name]()
        self.data = TensorDataset(inputs, torch.randint(10, (len(inputs),)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.stamps: list[float] = []

    def train(self, steps: float) -> None:
        loader = DataLoader(self.data, 16, shuffle=True)
        while True:
            for batch, targets in loader:
                loss = nn.functional.cross_entropy(self.model(batch), targets)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.stamps.append(time.perf_counter())
                if len(self.stamps) >= steps:
                    return

    def times(self) -> dict:
        """Returns what the steps took since it was asked last."""
        steps = [after - before for before, after in itertools.pairwise(self.stamps)]
        self.stamps.clear()
        return {"mean": fmean(steps), "median": median(steps)}


def turns(name: str) -> dict:
    script, plain, watched, facts = Script(name), [], [], []

    def plan(driver):
        sizes = yield from measure.warm_up(driver)
        steps, end = 0, time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            driver.instrument.detach()
            driver.own_code += 1
            script.stamps.clear()
            script.train(max(steps, 200))
            driver.own_code -= 1
            plain.append(script.times())
            facts.append((yield from measure.observe(driver, sizes, Arm(), WATCHED, {})))
            steps = len(script.stamps)
            watched.append(script.times())

    with Instrument() as instrument:
        driver = Driver(instrument, plan)
        driver.install()
        with contextlib.suppress(Finished):
            script.train(float("inf"))
    ratios = {  # of each turn to what lies before and after it
        what: [w[what] / fmean((a[what], b[what])) - 1 for a, w, b in zip(plain, watched, plain[1:])]
        for what in ("mean", "median")
    }
    found = {"ms": 1e3 * median(turn["median"] for turn in plain), "turns": len(watched)}
    found |= {"share": fmean(f.watched / len(f.steps) for f in facts)}
    return found | ratios | {"said": median(f.overhead for f in facts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--processes", type=int, default=3, help="of each case (default: 3)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    torch.set_num_threads(1)
    if args.child:
        print(json.dumps(turns(args.cases[0])))
        return
    print("| script | ms | median step | mean step | the report says | watched in parts | turns |\n|" + " --- |" * 7)
    for name in args.cases or CASES:
        command = [sys.executable, __file__, name, "--child"]
        found = [
            json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
            for _ in range(args.processes)
        ]
        cells = [name, f"{median(run['ms'] for run in found):.3g}"]
        for what in ("median", "mean"):
            share = bootstrap([ratio for run in found for ratio in run[what]], of=median)
            cells.append(f"{share.value:+.1%} ({share.low:+.1%} to {share.high:+.1%})")
        cells += [f"{median(run[what] for run in found):.1%}" for what in ("said", "share")]
        print(f"| {' | '.join(cells)} | {sum(run['turns'] for run in found)} |", flush=True)


if __name__ == "__main__":
    main()

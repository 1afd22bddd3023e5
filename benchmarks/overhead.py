"""Measures from outside what ``fusedtrain diagnose`` costs the training that it watches.

A script takes steps of some length and notes the time of each itself. Within one process it takes turns with itself,
several times a second, so that a machine whose speed drifts hits both alike: the loop that ``fusedtrain diagnose``
watches (bare steps, steps that are watched in parts, and all that it does between them), and as many steps of the plain
loop. Compared are their mean and their median steps, over several processes.

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
from fusedtrain.diagnose.drive import Driver, Finished
from fusedtrain.diagnose.instrument import Instrument
from fusedtrain.diagnose.plan import Arm, Run
from fusedtrain.diagnose.statistics import bootstrap

SECONDS = 20.0  # of a process


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

        self.plain = self.forever()

    def forever(self):
        loader = DataLoader(self.data, 16, shuffle=True)
        while True:
            yield from loader

    def step(self, batch) -> None:
        images, targets = batch
        loss = nn.functional.cross_entropy(self.model(images), targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.stamps.append(time.perf_counter())

    def times(self) -> list[float]:
        """Returns what the steps took since it was asked last."""
        steps = [after - before for before, after in itertools.pairwise(self.stamps)]
        self.stamps.clear()
        return steps


def turns(name: str) -> dict:
    script, watched, plain, facts, ratios = Script(name), [], [], [], []

    def beside(driver, steps: int) -> float:
        """Takes steps of the plain loop, where nothing is attached; returns the seconds of this."""
        assert not driver.instrument.attached
        driver.own_code += 1
        script.stamps.clear()
        start = time.perf_counter()
        for _ in range(steps):
            script.step(next(script.plain))
        seconds = time.perf_counter() - start
        plain.extend(script.times())
        driver.own_code -= 1
        return seconds

    def turn(driver, sizes):
        """Watches steps, with plain ones between; returns the seconds of both."""
        observing, records, steps, with_it, without = measure.observe(driver, sizes, Arm(), None, {}), None, 0, 0.0, 0.0
        begin = time.perf_counter()
        while True:
            try:
                run = observing.send(records)
            except StopIteration as done:
                facts.append(done.value)
                return with_it, without
            script.stamps.clear()
            records = yield run
            watched.extend(script.times())
            steps += run.steps + run.discard
            if not run.parts:
                with_it += time.perf_counter() - begin
                without += beside(driver, steps)
                steps, begin = 0, time.perf_counter()

    def plan(driver):
        sizes = yield from measure.warm_up(driver)
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            yield Run(1)  # bare
            beside(driver, 10)
            with_it, without = yield from turn(driver, sizes)
            ratios.append(with_it / without - 1)

    with Instrument() as instrument:
        driver = Driver(instrument, plan)
        driver.install()
        loader = DataLoader(script.data, 16, shuffle=True)
        with contextlib.suppress(Finished):
            while True:
                for batch in loader:
                    script.step(batch)
    found = {"ms": 1e3 * median(plain), "turns": len(ratios), "mean": ratios}
    found |= {"share": fmean(f.watched / len(f.steps) for f in facts), "median": [median(watched) / median(plain) - 1]}
    return found | {"said": median(f.overhead for f in facts)}


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

"""``fusedtrain check``: what several processes compute against one; all in real processes."""

import functools
import itertools
import os
import random
import re

import forks
import harness
import pytest
import torch
from torch import nn

import fusedtrain.nn
from fusedtrain.cli import main
from fusedtrain.train import Batches, Distributed, InputError, Schedule, TrainConfig, Trainer, parity
from fusedtrain.train.distributed import World

CPU = torch.device("cpu")


def net(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), *layers, nn.Linear(8, 4))


def setup(factor: int, layers=(nn.Tanh,), loss=nn.CrossEntropyLoss, cls=Trainer, noise: bool = False, **distributed):
    """22 samples, 4 per rank and micro-batch, 2 micro-batches per update: the second and last update is short."""
    model, distributed = net(*(layer() for layer in layers)), Distributed(timeout=60.0, **distributed)
    config = TrainConfig(
        device="cpu",
        precision="fp64",
        accumulation=2,
        distributed=distributed,
        schedule=Schedule("constant", warmup_epochs=0),
    )
    generator = torch.Generator().manual_seed(1)
    images, targets = torch.randn(22, 1, 4, 4, generator=generator), torch.arange(22) % 4
    if noise:
        images += random.random()
    world = World(distributed, CPU)
    data = Batches(images, targets, 4 * factor, shuffle=True, rank=world.rank, world_size=world.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return cls(model, loss(), optimizer, config), data


class Noisy(Trainer):
    def training_step(self, batch):
        return super().training_step(batch) + nn.functional.dropout(self.model[1].weight, 0.5).mean()


class Contrast(nn.Module):
    """Looks at the other samples of the batch."""

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs - outputs.mean(0), targets)


class Images(nn.Sequential):
    """BatchNorm of images, then an activation, as timm has it."""

    def __init__(self):
        super().__init__(nn.Unflatten(1, (2, 2, 2)), fusedtrain.nn.BatchNormAct2d(2, act_layer="silu"), nn.Flatten())


Sum = functools.partial(nn.CrossEntropyLoss, reduction="sum")
CASES = {  # options of setup, kinds that differ, the reason
    "plain": ({}, set(), None),
    "fsdp": ({"strategy": "fsdp"}, set(), None),
    "dropout and BatchNorm": (
        {"layers": (functools.partial(nn.BatchNorm1d, 8), nn.Dropout)},
        {"loss", "gradient", "statistics"},
        r"^BatchNorm \(2\) takes .*\ndropout \(3\) draws other numbers on every rank",
    ),
    "synchronised": ({"layers": (Images,), "sync_batchnorm": True}, set(), None),
    "sum": ({"loss": Sum}, {"loss", "gradient"}, "^all gradients are 0.5 times those of one process"),
    "contrast": ({"loss": Contrast}, {"loss", "gradient"}, "^the loss or a layer looks at the other samples"),
    "noise": ({"noise": True}, {"samples", "loss", "gradient"}, r"^\d+ samples came to the ranks alone and \d+"),
    "draws": ({"cls": Noisy}, {"loss", "gradient"}, "^training_step itself draws random numbers"),
}


def run_cases(folder: str) -> None:
    """All cases one after the other in two ranks and in the one process, so that there is one start."""
    own = parity._experiments

    def experiments(setup, *arguments):
        return {name: own(functools.partial(setup, **options), *arguments) for name, (options, *_) in CASES.items()}

    parity._experiments = experiments
    arguments = (2, setup, 2, dict(os.environ), folder)
    children = [forks.fork(functools.partial(parity._process, index, *arguments)) for index in range(3)]
    assert forks.wait(children) == [0, 0, 0]


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """The traces of two ranks and of the one process: name of the case -> experiment -> trace."""
    folder = tmp_path_factory.mktemp("parity")
    done = harness.run_python("-c", "import sys, test_parity; test_parity.run_cases(sys.argv[1])", str(folder))
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{index}.pt", weights_only=False) for index in range(3)]


@pytest.mark.parametrize("name", CASES)
def test_what_differs_is_found_with_its_reason(traces, name):
    *ranks, one = (trace[name] for trace in traces)
    report = parity._judge(ranks, one, 2)
    _, kinds, reason = CASES[name]
    assert {difference.kind for difference in report.differences} == kinds, report
    assert report.counts["samples"] == 22 and report.counts["gradient"] in (4, 6)
    assert bool(report.reasons) == bool(reason)
    if reason is not None:
        text = "\n".join(report.reasons)
        assert re.search(reason, text), text


def test_the_command_takes_the_options_of_a_run_names_the_layers_and_leaves_its_files_alone(
    capsys, tmp_path, tmp_path_factory, monkeypatch
):
    images = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    data = tmp_path_factory.mktemp("data")
    for part, name, i in itertools.product(("train", "val"), ("a", "b"), range(8)):
        (data / part / name).mkdir(parents=True, exist_ok=True)
        images.new("RGB", (8, 8), (16 * i, 80, 120)).save(data / part / name / f"{i}.png")
    monkeypatch.chdir(tmp_path)
    words = ["check", "--updates", "3", "--model", "smallnet", "--size", "8", "--batch-size", "4", "--no-fuse"]
    words += ["--data", str(data)]  # an epoch: 2 updates
    words += ["--weights", "w.pt", "--best-weights", "b.pt", "--cuda-graphs", "--bf16-compress"]
    words += ["--monitor", "accuracy", "--mode", "max"]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "samples    24 alike" in out and re.search(r"statistics \d+ of 34 differ\n +\S+  \S+running_", out), out
    assert "reason: BatchNorm (bn1, blocks.0.bn1, blocks.0.bn2 and 14 more) takes its statistics" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_differ_from_others_and_hide_no_difference(wrong):
    def trace(a: float, b: float, loss: float = 1.0) -> parity.Trace:
        gradients = {"a": torch.tensor([1.0, a], dtype=torch.float64), "b": torch.tensor([b, 1.0], dtype=torch.float64)}
        return parity.Trace([loss, 1.0], [gradients, {"b": torch.ones(2)}], [{"count": torch.tensor([int(b)])}] * 2)

    def differences(*traces):
        return [(d.kind, d.name, d.relative) for d in parity._differences(*traces)]

    assert differences(trace(wrong, 1.0, wrong), trace(wrong, 1.0, wrong)) == []
    infinite = [("loss", "of update 1", float("inf")), ("gradient", "a", float("inf"))]
    assert differences(trace(wrong, 1.0, wrong), trace(1.0, 1.0)) == infinite
    assert differences(trace(1.0, 1.0), trace(wrong, 1.0, wrong)) == infinite
    others = [("gradient", "b", 1.0), ("statistics", "count", 1.0)]
    assert differences(trace(wrong, 2.0), trace(wrong, 1.0)) == others
    ours, alone = trace(wrong, 2.0), trace(wrong, 1.0)
    (reason,) = parity._reasons(
        [ours, trace(wrong, 2.0)], {"as it is": ours, "quiet": ours}, dict.fromkeys(("quiet", "split"), alone)
    )
    assert reason == "gradients or losses are not added up over the ranks as over one batch"
    (reason,) = parity._reasons(
        [ours, trace(1.0, 2.0)], {"as it is": ours, "quiet": ours}, dict.fromkeys(("quiet", "split"), alone)
    )
    assert reason == "the ranks have different gradients of a"


def test_what_cannot_be_compared_gets_one_line(capsys):
    assert main(["check", "--ranks", "1", "--model", "smallnet"]) == 2
    assert capsys.readouterr().err == "fusedtrain check: ranks must be at least 2, got 1\n"
    with pytest.raises(InputError, match="updates must be at least 1, got 0"):
        parity.compare(setup, updates=0)
    with pytest.raises(InputError, match="the run ends after 30 updates, 31 were to be compared"):
        parity._trace(*setup(1), (), 31)


def test_what_a_process_refuses_gets_one_line_too(capsys, monkeypatch):
    def start(function, arguments, count, start_method):
        torch.save("there is no such model", f"{arguments[-1]}/0.pt")
        raise torch.multiprocessing.ProcessRaisedException("another one lost its connection", 1, 0)

    monkeypatch.setattr(torch.multiprocessing, "start_processes", start)
    assert main(["check", "--model", "smallnet"]) == 2
    assert capsys.readouterr().err == "fusedtrain check: there is no such model\n"


def refused(ranks):
    raise InputError(os.environ["OWN"])


@pytest.mark.parametrize("value", ["3", "4"])
def test_ranks_have_the_environment_of_the_command(value, monkeypatch):
    """A server of forks keeps the environment that it was started with."""
    monkeypatch.setenv("OWN", value)
    with pytest.raises(InputError, match=value):
        parity.compare(refused)

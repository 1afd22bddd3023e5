"""Activation checkpointing: memory as measured, the same numbers, blocks that fit a budget."""

import functools
import json

import harness
import pytest
import torch
from torch import nn

from fusedtrain import fuse, optim
from fusedtrain.nn.recorded import Recorded
from fusedtrain.train import (
    ActivationCheckpointing,
    Batches,
    InputError,
    Precision,
    Schedule,
    SmallNet,
    TrainConfig,
    Trainer,
)
from fusedtrain.train.activation import Block, choose, matching, measure, measure_batch, peak

CHILD = """
import ctypes, json, sys
import forks
import torch
import test_activation_checkpointing as here
from fusedtrain.train.memory import PeakMemory

def measure(options):
    run = here.make(options, channels=16)
    data = here.data(8, 8, size=96)
    run.fit(here.data(2, 2))  # first allocations
    memory = PeakMemory(torch.device("cpu"))
    run.fit(data)
    print("PEAK", memory.bytes())

M_MMAP_THRESHOLD = -3
getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)(M_MMAP_THRESHOLD, 2**16)  # what is let go of leaves the process
for options in map(json.loads, sys.argv[1:]):
    assert forks.wait([forks.fork(lambda: measure(options))]) == [0]
"""


class Block2d(nn.Module):
    def __init__(self, c: int):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(c, 4 * c, 1), nn.Conv2d(4 * c, c, 1)
        self.norm, self.drop = nn.BatchNorm2d(4 * c, momentum=None), nn.Dropout(0.2)
        self.mean = harness.ReplacedMean()

    def forward(self, x):
        return x + self.conv2(self.drop(torch.tanh(self.norm(self.conv1(self.mean(x))))))


def make(options: dict, channels: int = 4, precision: str = "fp32", **config) -> Trainer:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block2d(channels) for _ in range(4)))
    model = nn.Sequential(
        nn.Conv2d(3, channels, 1), blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 4)
    )
    activation = ActivationCheckpointing(**{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})
    config = TrainConfig(
        epochs=1,
        device="cpu",
        precision=Precision(precision),
        activation_checkpointing=activation,
        schedule=Schedule("constant", warmup_epochs=0),
        **config,
    )
    return Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), config)


def data(count: int, batch_size: int, size: int = 8) -> Batches:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, size, size, generator=generator)
    return Batches(images, torch.randint(4, (count,), generator=generator), batch_size, shuffle=False)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", [{"checkpoint_modules": ("1.*",)}, {"activation_budget_gib": 400e-6}])
def test_numbers_are_bitwise_those_without_it_dropout_and_precision_included(options, precision):
    if precision == "bf16" and "activation_budget_gib" in options:
        options = {"activation_budget_gib": 250e-6}
    runs = [make(o, precision=precision) for o in ({}, options)]
    losses = [run.fit(data(24, 8)).step_losses for run in runs]
    assert losses[0] == losses[1]
    wrapped = [name for name, module in runs[1].model.named_modules() if "forward" in vars(module)]
    assert wrapped and set(wrapped) <= {"1.0", "1.1", "1.2", "1.3"}
    assert runs[0].model.state_dict().keys() == runs[1].model.state_dict().keys()
    assert_same(*(run.model.state_dict() for run in runs))


def assert_same(a: dict, b: dict) -> None:
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("layers", ["fused", "stock"])
def test_layers_that_are_computed_again_count_a_batch_once(layers):
    losses, states = [], []
    for patterns in ((), ("blocks.*",)):
        torch.manual_seed(0)
        model = SmallNet(4, 3, layers="stock")
        if layers == "fused":  # of a network that is fused as a whole the parts are, as one by one without
            for part in [model] if patterns else model.children():
                fuse(part)
        model.blocks[1].bn2.eval()
        activation = ActivationCheckpointing(patterns)
        config = TrainConfig(epochs=1, device="cpu", precision="bf16", activation_checkpointing=activation)
        optimizer = optim.AdamW(model.parameters())
        losses.append(Trainer(model, nn.CrossEntropyLoss(), optimizer, config).fit(data(12, 4, size=16)).step_losses)
        states.append(model.state_dict())
        assert all(isinstance(block, Recorded) == (layers == "fused") for block in model.blocks)
    assert losses[0] == losses[1]
    assert_same(*states)


def test_peak_memory_falls():
    # Kept per block: four of 64 channels and two of 16 at 96 x 96, for 8 images.
    image = 8 * 96 * 96 * 4
    block = (4 * 64 + 16) * image
    budget = 3.3 * block
    options = [{}, {"checkpoint_modules": ["1.*"]}, {"activation_budget_gib": budget / 2**30}]
    done = harness.run_python("-c", CHILD, *map(json.dumps, options))
    assert done.returncode == 0, done.stderr
    peaks = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("PEAK")]
    if "None" in peaks:
        pytest.skip("this system does not tell the peak of resident memory")
    whole, saved, budgeted = map(int, peaks)
    assert whole - saved > 2 * block, (whole / block, saved / block)
    assert budgeted < budget + 0.2 * block


def test_the_cheapest_blocks_that_suffice_are_chosen():
    blocks = [Block("a", 100, 1.0), Block("b", 100, 9.0), Block("c", 100, 2.0), Block("d", 50, 0.1)]
    assert choose(1000, blocks, 1000) == []
    assert choose(1000, blocks, 950) == ["a"]
    assert choose(1000, blocks, 900) == ["a"]
    assert choose(1000, blocks, 860) == ["a", "b"]  # c or d, computed again, would stand beside one that is kept
    assert peak(1000, blocks, {"c", "d"}) == 650 + 200 + 200
    with pytest.raises(InputError, match="with every block computed again"):
        choose(1000, blocks, 849)


def test_a_block_that_is_called_often_is_chosen_for_all_its_calls():
    blocks = [Block("a", 100, 1.0), Block("b", 100, 9.0)] * 3
    assert peak(700, blocks, {"a"}) == 100 + 2 * 100 + 200 and choose(700, blocks, 500) == ["a"]
    assert choose(700, blocks, 300) == ["a", "b"]

    class Repeats(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = nn.ModuleList([Block2d(4), Block2d(4)]), nn.Linear(4, 4)

        def forward(self, x):
            x = x[:, :1].expand(-1, 4, -1, -1)
            for block in [*self.blocks, *self.blocks]:
                x = block(x)
            return self.head(x.mean((2, 3)))

    images, _ = next(iter(data(8, 8)))
    whole, _ = measure(Repeats(), functools.partial(Repeats(), images))
    activation = ActivationCheckpointing(activation_budget_gib=0.7 * whole / 2**30)
    config = TrainConfig(epochs=1, device="cpu", activation_checkpointing=activation)
    model = Repeats()
    Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), config).fit(data(8, 8))
    assert [name for name, module in model.blocks.named_children() if "forward" in vars(module)] != []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_a_batch_keeps_is_told_from_four_of_its_samples(precision):
    run = make({}, channels=16, precision=precision)
    batch = next(iter(data(24, 24, size=16)))
    step = lambda part: run.training_step(part)  # noqa: E731
    few, blocks = measure_batch(run.model, step, batch)
    whole, exact = measure(run.model, lambda: step(batch))
    assert few == whole and [(b.name, b.bytes) for b in blocks] == [(b.name, b.bytes) for b in exact]
    assert len(exact) == 4 and min(block.bytes for block in exact) > 0


def test_a_later_trainer_decides_anew():
    model = make({"checkpoint_modules": ["1.*"]}).model
    wrapped = lambda: ["forward" in vars(block) for block in model[1]]  # noqa: E731
    for patterns, expected in ((("1.*",), [True] * 4), (("1.0",), [True, False, False, False]), ((), [False] * 4)):
        config = TrainConfig(device="cpu", activation_checkpointing=ActivationCheckpointing(patterns))
        Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters()), config)
        assert wrapped() == expected


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(InputError, match="checkpoint_modules: nothing matches 'layers"):
        make({"checkpoint_modules": ["layers.*"]})
    assert matching(make({}).model, ("1", "1.*")) == ["1"]

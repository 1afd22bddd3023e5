"""Runs that are killed or stopped go on as if nothing had happened; what they run stands in kill_resume.py."""

import argparse
import errno
import gc
import json
import platform
import signal
import subprocess
import time
from pathlib import Path

import harness
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fusedtrain.optim
from fusedtrain.train import (
    Batches,
    Callback,
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    InputError,
    Schedule,
    TrainConfig,
    Trainer,
    checkpoint_file,
)
from fusedtrain.train.preemption import Preempted
from fusedtrain.train.weights import load_canonical, read_weights

SCRIPT = Path(__file__).parent / "kill_resume.py"
# Every pair of precision, workers, processes and the way of saving, and all kinds of loaders.
KINDS = ("7", "11", "13", "14", "16", "17", "18", "19")
forks = pytest.mark.skipif(platform.system() != "Linux", reason="the runs are forks, which only Linux supports")


def run(*arguments) -> str:
    done = harness.run_python(SCRIPT, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@forks
def test_a_run_that_is_killed_goes_on_bit_by_bit(tmp_path):
    assert "30 kills, every run went on bit by bit" in run(tmp_path, "--kills", "30", "--kinds", *KINDS)


@forks
def test_a_run_that_is_stopped_by_a_signal_saves_and_goes_on_bit_by_bit(tmp_path):
    assert run(tmp_path, "--kinds", "--kills", "0", "--stops").count("stopped at step") == 8


class Rest(Callback):
    """Tells that a run has saved, and lets it live on."""

    def on_step_end(self, trainer) -> None:
        if trainer.step_count == 3:
            print("saved", flush=True)
            time.sleep(600)


def run_until_killed(folder: str) -> None:
    """A run whose loader has a worker: a fork, which outlives it for a while."""
    data = DataLoader(TensorDataset(*images(32, 2)), 4, num_workers=1)
    trainer(net(), callbacks=[Rest()], epochs=1, checkpoint=Checkpoint(Path(folder), every_steps=2)).fit(data)


@forks
def test_a_folder_of_checkpoints_is_that_of_one_run_until_it_ends_or_is_killed(tmp_path):
    code = "import sys, test_resume; test_resume.run_until_killed(sys.argv[1])"
    data, checkpoint = DataLoader(TensorDataset(*images(32, 2)), 4), Checkpoint(tmp_path, every_steps=2)
    second = trainer(net(), epochs=1, checkpoint=checkpoint)
    with harness.start_python("-c", code, tmp_path, pipes={"stdout": subprocess.PIPE}) as first:
        try:
            assert first.stdout.readline() == "saved\n"
            before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
            with pytest.raises(InputError, match=f"^another run is saving its checkpoints in {tmp_path}: ") as error:
                second.fit(data)
            assert "\n" not in str(error.value) and second.step_count == 0
            assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        finally:
            first.kill()
    second.fit(data)
    assert second.step_count == 8 and CheckpointStore(tmp_path).steps()[-1] == 8
    trainer(net(), epochs=1, checkpoint=checkpoint).fit(data)  # while the other one is still held


def images(count: int, size: int, channels: int = 1, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(count, channels, size, size), torch.randint(classes, (count,))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.BatchNorm1d(5), harness.ReplacedMean())


def trainer(model: nn.Module, kind=torch.optim.SGD, callbacks=(), **config) -> Trainer:
    optimizer = kind(model.parameters(), lr=0.01)
    config = TrainConfig(**{"device": "cpu", **config})
    return Trainer(model, nn.CrossEntropyLoss(), optimizer, config, callbacks=callbacks)


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


class Memory(Callback):
    """Resident bytes and Python's objects after 2,000 steps and 10,000 more."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, trainer) -> None:
        if trainer.step_count in (2000, 12_000):
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.seen.append((pages * 4096, len(gc.get_objects())))


def print_memory_of_many_steps(folder: str) -> None:
    memory, data = Memory(), Batches(*images(2000, 2), 2, shuffle=True)
    checkpoint = Checkpoint(Path(folder), every_steps=500, keep=1)
    trainer(net()[:2], callbacks=[memory], epochs=12, checkpoint=checkpoint).fit(data)
    print(json.dumps(memory.seen))


@pytest.mark.skipif(platform.system() != "Linux", reason="only Linux tells the resident memory so")
def test_memory_does_not_grow_over_10_000_steps(tmp_path):
    """In a process of its own: what other tests have freed would be taken and given back."""
    code = "import sys, test_resume; test_resume.print_memory_of_many_steps(sys.argv[1])"
    done = harness.run_python("-c", code, str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    (first, objects), (last, more) = json.loads(done.stdout.splitlines()[-1])
    # A number per step stays in the history; the smallest tensor would take 500 bytes.
    assert last - first < 10_000 * 400, (first, last)
    assert more - objects < 100, (objects, more)


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    class Spoil(Callback):
        def on_step_end(self, trainer) -> None:
            if trainer.step_count == 6:
                trainer.model[1].weight.data[2, 1] = torch.nan

    data = Batches(*images(32, 2), 4, shuffle=True)
    run = trainer(net(), callbacks=[Spoil()], epochs=1, checkpoint=Checkpoint(tmp_path, every_steps=2, keep=1))
    with pytest.raises(CheckpointError, match=r"model/1.weight holds NaN or infinity: not saved"):
        run.fit(data)
    state, info = CheckpointStore(tmp_path).load()
    assert info.step == 4 and state["model"]["1.weight"].isfinite().all()


def test_a_write_in_a_thread_that_fails_stops_the_run_and_the_earlier_checkpoints_stay(tmp_path, monkeypatch):
    """Asynchronous saving, with a disk that is full at the third save."""
    write, saved = checkpoint_file.write, []

    def full(*args, **options):
        saved.append(args[1])
        if len(saved) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args, **options)

    monkeypatch.setattr(checkpoint_file, "write", full)
    options = Checkpoint(tmp_path, every_steps=2, asynchronous=True)
    run = trainer(net(), epochs=100, checkpoint=options)
    with pytest.raises(CheckpointError, match=r"step 6 could not be written to .*: No space left on device"):
        run.fit(Batches(*images(80, 2), 4, shuffle=True))
    assert saved == [2, 4, 6] and CheckpointStore(tmp_path).load()[1].step == 4
    assert run.step_count <= 8  # at the next save at the latest


@pytest.mark.parametrize("kind", [torch.optim.AdamW, fusedtrain.optim.AdamW])
def test_an_update_that_is_left_out_leaves_the_whole_state(kind):
    good = list(Batches(*images(24, 2), 4, shuffle=False))
    bad = (torch.full_like(good[0][0], torch.nan), good[0][1])
    options = {"nonfinite": "skip", "schedule": Schedule("constant", warmup_epochs=0), "accumulation": 2}
    states = []
    for data in (good, [*good[:2], good[5], bad, *good[2:]]):
        run = trainer(net(), kind, epochs=1, ema_decay=0.5, **options)
        run.fit(data)
        averages = {f"average of {name}": t for name, t in run.averages.state_dict().items()}
        moments = run.optimizer.state_dict()["state"].items()
        moments = {f"{name} of {index}": t for index, state in moments for name, t in state.items()}
        states.append(run.model.state_dict() | averages | moments)
    assert run.skipped == 1
    assert_same(*states)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_that_is_stopped_behind_a_batch_that_will_be_skipped_loses_nothing(tmp_path, precision):
    """It stood in the buffers already, and no checkpoint holds what is not finite."""
    good = list(Batches(*images(32, 2), 4, shuffle=False))
    batches = [*good[:4], (torch.full_like(good[0][0], torch.nan), good[0][1]), *good[5:]]

    class Data(list):
        def __iter__(self):
            for index, batch in enumerate(batches):
                if [index] == self:
                    signal.raise_signal(signal.SIGTERM)
                yield batch

        def __len__(self):
            return len(batches)

    def run(directory, data) -> dict:
        options = {"nonfinite": "skip", "accumulation": 3, "precision": precision, "checkpoint": directory}
        made = trainer(net(), epochs=2, **options)
        made.fit(data)
        return made.model.state_dict() | {"skipped": torch.tensor(made.skipped)}

    whole = run(tmp_path / "whole", Data())
    assert whole["skipped"] == 2
    with pytest.raises(Preempted):
        run(tmp_path / "stopped", Data([5]))
    assert_same(whole, run(tmp_path / "stopped", Data()))


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_run_starts_from_a_checkpoint_of_other_scripts_and_ends_in_one_for_the_stock_model(zoo, library, tmp_path):
    def stock(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        if library == "timm":
            return zoo.timm.create_model("mobilenetv3_small_050", num_classes=5)
        return zoo.torchvision.models.mobilenet_v3_small(num_classes=5)

    start = stock(1)
    content = {"epoch": 3, "arch": "x", "state_dict": start.state_dict(), "args": argparse.Namespace(lr=0.1)}
    torch.save(content if library == "timm" else start.state_dict(), tmp_path / "start.pth")
    model = stock(2)
    fusedtrain.fuse(model)
    load_canonical(model, read_weights(tmp_path / "start.pth"))
    assert_same(start.state_dict(), model.state_dict())
    data = Batches(*images(8, 32, channels=3), 4, shuffle=True)
    trainer(model, epochs=1, weights=tmp_path / "end.pt", checkpoint=tmp_path / "run").fit(data)
    for path in (tmp_path / "end.pt", next((tmp_path / "run").glob("*.safetensors"))):
        end = stock(3)
        end.load_state_dict(read_weights(path), strict=True)
        assert_same(model.state_dict(), end.state_dict())
    end.load_state_dict(torch.load(tmp_path / "end.pt", weights_only=True), strict=True)

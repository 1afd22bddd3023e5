"""Two processes with gloo, started by torchrun; what they run stands in ranks.py."""

import json
import subprocess
import sys
import time

import harness
import pytest
import ranks
import torch
from torch import nn


def launch(folder, *cases: str, timeout: float = 300) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", ranks.__file__]
    env = harness.environment(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    return subprocess.run(
        [*command, str(folder), *cases],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes found: case -> result of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    cases = ("gradients", "uneven", "resume", "all_data")
    done = launch(folder, *cases)
    assert done.returncode == 0, done.stderr[-4000:]
    return {case: [json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in (0, 1)] for case in cases} | {
        "folder": folder
    }


def union(groups) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The gradients of one batch per group, in float32 and in float64."""

    def gradient(inputs, targets, dtype):
        model = ranks.net().to(dtype)
        nn.functional.cross_entropy(model(inputs.to(dtype)), targets).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    return [tuple(gradient(*group, dtype) for dtype in (torch.float32, torch.float64)) for group in groups]


def check_steps(steps, groups, what: str) -> None:
    assert len(steps) == len(groups), what
    for got, (single, truth) in zip(steps, union(groups)):
        harness.assert_as_good_as_torch(torch.tensor(got), single, truth, what)


def test_gradients_of_two_processes_are_those_of_the_union_batch(two):
    for found in two["gradients"]:
        for what, result in found.items():
            _, accumulate, count = what.split()
            size = 2 * 4 * int(accumulate)
            inputs, targets = ranks.samples(int(count))
            groups = list(zip(inputs.split(size), targets.split(size)))
            if what.startswith("fsdp"):  # float32 sums in another order
                groups = groups[: len(result["steps"])]
            check_steps(result["steps"], groups, what)
            losses = nn.functional.cross_entropy(ranks.net()(inputs), targets).item()
            assert result["train_loss"] == pytest.approx(losses)


def test_metrics_count_every_sample_once(two):
    inputs, targets = ranks.samples(11)
    outputs = ranks.net()(inputs)
    for found in two["gradients"]:
        for result in found.values():
            assert result["metrics"]["accuracy"] == (outputs.argmax(1) == targets).sum().item() / 11
            assert result["metrics"]["loss"] == pytest.approx(nn.functional.cross_entropy(outputs, targets).item())


def test_a_rank_with_fewer_batches_takes_part_without_counting(two):
    inputs, targets = ranks.samples(16)
    for result in two["uneven"]:
        check_steps(result["steps"], [(inputs, targets)], "uneven")
        outputs = ranks.net()(inputs)
        assert result["metrics"]["accuracy"] == (outputs.argmax(1) == targets).sum().item() / 16


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_signal_to_one_rank_stops_both_and_the_run_goes_on_bitwise(two, strategy):
    for found in two["resume"]:
        assert found[strategy]["codes"] == [0, 143, 0]
        whole, again = found[strategy]["losses"]
        assert whole == again and len(whole) >= 4
        assert found[strategy]["epochs"][0] == found[strategy]["epochs"][1]
    whole, cut = (torch.load(two["folder"] / f"{strategy}-{name}.pt") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys() == ranks.net(norm=strategy == "ddp").state_dict().keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_a_loader_that_gives_every_process_everything_is_refused(two):
    assert all("every one of 2 processes would see all training data" in r["error"] for r in two["all_data"])


def test_a_failing_rank_takes_the_run_down_with_its_traceback(tmp_path):
    start = time.monotonic()
    done = launch(tmp_path, "failing", timeout=120)
    assert done.returncode != 0 and "this rank fails" in done.stderr
    assert time.monotonic() - start < 100

"""Two processes with gloo, started by torchrun; what they run stands in ranks.py."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import harness
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

from fusedtrain.train import Callback, CheckpointStore, Distributed
from fusedtrain.train.distributed import World

TORCHRUN = [sys.executable, str(Path(__file__).parent / "torchrun.py"), "--standalone", "--nproc_per_node=2"]


def launch(folder, *cases: str, timeout: float = 300) -> subprocess.CompletedProcess:
    env = harness.environment(OMP_NUM_THREADS="1")
    return forked.run([*TORCHRUN, ranks.__file__, str(folder), *cases], env=env, cwd=folder, timeout=timeout)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes found: case -> result of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    cases = ("joined", "gradients", "uneven", "unlabelled", "resume", "all_data", "nested", "refused", "unlike")
    cases += ("images", "sharding", "tied", "rates", "spare", "nonfinite")
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


def test_the_device_is_the_current_one_also_where_the_group_was_there(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for device in ("cpu", "cuda:1"):
            World(Distributed(), torch.device(device))
        assert current == [torch.device("cuda", 1)]
    finally:
        dist.destroy_process_group()


def test_no_process_goes_on_before_all_have_found_each_other(two):
    """One that left at once, for data that it cannot read, would leave the others a broken connection to tell of."""
    assert all(one["on"] >= other["joined"] for one in two["joined"] for other in two["joined"])


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


def test_a_rank_whose_batch_counts_for_nothing_takes_part(two):
    inputs, targets = ranks.samples(16)
    known = [(inputs[a:b], targets[a:b]) for a, b in ((0, 4), (8, 16))]
    every = tuple(map(torch.cat, zip(*known)))
    outputs = ranks.net()(every[0])
    loss = nn.functional.cross_entropy(outputs, every[1]).item()
    for found in two["unlabelled"]:
        for name in ("of torch", "masked"):
            check_steps(found[f"1 {name}"]["steps"], known, "unlabelled")
            check_steps(found[f"2 {name}"]["steps"], [every], "unlabelled, accumulated")
        for result in found.values():
            assert result["train_loss"] == pytest.approx(loss) and result["metrics"]["loss"] == pytest.approx(loss)
            assert result["metrics"]["accuracy"] == (outputs.argmax(1) == every[1]).sum().item() / 12


def test_a_metric_that_a_rank_lacks_is_that_of_the_others(two):
    outputs, targets = ranks.net()(ranks.samples(16)[0]), torch.arange(4).repeat_interleave(4)
    losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
    truth = {f"class {own}": losses[targets == own].mean().item() for own in range(4)}
    for found in two["unlike"]:
        assert found == pytest.approx(truth | {"loss": losses.mean().item()})


@pytest.mark.parametrize("cls", ["Trainer", "Late"])
def test_the_rate_amid_an_epoch_is_that_of_all_processes(two, cls):
    (logged,), whole = two["rates"][0][cls]
    assert abs(math.log(logged / whole)) < math.log(1.5)


@pytest.mark.parametrize("decay", ["None", "0.9"])
def test_a_network_of_convolutions_trains_with_shards_as_without(two, decay):
    for found in two["images"]:
        assert found[f"fsdp {decay}"] == pytest.approx(found[f"ddp {decay}"])


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


def test_a_sharded_checkpoint_goes_on_with_another_number_of_processes(two):
    """Two ranks saved it; here is one. Before it goes on it holds, bit by bit, what they saved."""
    folder = two["folder"]
    saved, info = CheckpointStore(folder / "fsdp-moved").load()
    shards = list((folder / "fsdp-moved").glob(f"{info.path.stem}.shard-*"))
    assert info.step == 2 and len(saved["ranks"]) == len(shards) == 2
    begun = []

    class Look(Callback):
        def on_fit_start(self, trainer):
            params = list(trainer.model.state_dict().items())
            states = trainer.optimizer.state_dict()["state"]
            begun.extend((name, p.clone(), states[i]["exp_avg"].clone()) for i, (name, p) in enumerate(params))

    code, run = ranks.train(folder, "fsdp-moved", "fsdp", seed=7, callbacks=[Look()])
    assert code == 0 and run.step_count > info.step
    assert len(begun) == len(saved["model"]) == 4
    for name, p, average in begun:
        assert torch.equal(p, saved["model"][name])
        assert torch.equal(average, saved["optimizer"]["state"][name]["exp_avg"])
    assert run.history.step_losses[: info.step] == two["resume"][0]["fsdp"]["losses"][0][: info.step]


def test_a_sharded_run_goes_on_bitwise_whatever_has_no_state_yet_in_the_optimizer(two):
    for found in two["spare"]:
        assert len(found["whole"]) == 8 and found["whole"] == found["early"] == found["late"]


def test_processes_that_compute_together_look_together_for_what_is_not_finite(two):
    for strategy in ("ddp", "fsdp"):
        assert "output of 1 (" in two["nonfinite"][0][strategy]  # where the sample comes to rank 0: in the statistics
        assert "input 0 of the batch is not finite for samples 2" in two["nonfinite"][1][strategy]


def test_a_loader_that_gives_every_process_everything_is_refused(two):
    for rank, found in enumerate(two["all_data"]):
        assert "every one of 2 processes would see all training data" in found["error"]
        assert f"are those of rank 0 of 1, and this process is rank {rank} of 2: pass rank=" in found["batches"]
        assert found["own"] == 4  # of a batch sampler of somebody else's


def test_a_failing_rank_takes_the_run_down_with_its_traceback(tmp_path):
    start = time.monotonic()
    done = launch(tmp_path, "failing", timeout=120)
    assert done.returncode != 0 and "this rank fails" in done.stderr
    assert time.monotonic() - start < 100


def test_a_hanging_rank_takes_the_run_down_within_the_timeout(tmp_path):
    done = launch(tmp_path, "hanging", timeout=120)  # the other one waits for 5 s
    assert done.returncode != 0
    assert "imed out" in done.stderr and "Trainer" in done.stderr  # with the place where it waited


def test_a_run_of_torchrun_whose_rank_is_killed_goes_on_from_its_last_checkpoint(tmp_path):
    """``torchrun --max-restarts -m fusedtrain train``; SIGKILL to one of two ranks, from outside."""
    command = [*TORCHRUN, "--max-restarts=3", "--monitor-interval=0.2"]
    command += ["-m", "fusedtrain", "train", "--model", "smallnet", "--size", "8"]
    command += ["--batch-size", "128", "--epochs", "2", "--every-steps", "1", "--device", "cpu", "--output", "out"]
    command += ["--log-every", "1", "--timeout", "60"]
    env = harness.environment(OMP_NUM_THREADS="1", GLIBC_TUNABLES="")  # no second start
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with forked.Python(command, env=env, cwd=tmp_path, **pipes) as run:
        while run.poll() is None and len(list(tmp_path.glob("out/checkpoints/*-step-3.safetensors"))) == 0:
            time.sleep(0.02)
        os.kill(workers(run.pid)[-1], signal.SIGKILL)
        out, _ = run.communicate(timeout=300)
    assert run.returncode == 0, out[-4000:]
    step = int(re.search(r"continues with step (\d+)", out)[1])
    assert 3 <= step < 12 and "epoch 2/2" in out
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").open()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))  # 1,437 images, 256 in a step
    assert (tmp_path / "out" / "weights.pt").exists()


def workers(launcher: int) -> list[int]:
    """The processes of torchrun: that of which the ranks are forks, and these."""
    return [int(child) for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def test_lists_of_lists_of_blocks_are_sharded_and_go_on_bitwise_with_their_norms(two):
    for found in two["nested"]:
        for strategy in ("ddp", "fsdp"):
            assert found[f"{strategy} whole"] == found[f"{strategy} cut"]
        ddp, fsdp = found["ddp whole"], found["fsdp whole"]
        assert fsdp["losses"] == pytest.approx(ddp["losses"])
        assert [e["loss"] for e in fsdp["epochs"]] == pytest.approx([e["loss"] for e in ddp["epochs"]])
    for strategy in ("ddp", "fsdp"):
        whole, cut = (torch.load(two["folder"] / f"nested-{strategy}-{name}.pt") for name in ("whole", "cut"))
        assert whole.keys() == cut.keys() == ranks.nested().state_dict().keys()
        assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_a_model_is_sharded_unit_by_unit_with_the_values_of_rank_0(two):
    """The device never holds more than one whole unit, whoever still holds the parameters of before."""
    model = ranks.nested()
    blocks = [name for name, module in model.named_modules() if isinstance(module, ranks.Block)]
    own = {name: [f"{name}.{p}" for p, _ in model.get_submodule(name).named_parameters()] for name in blocks}
    own["2"] = ["2.weight", "2.bias"]
    for found in two["sharding"]:
        assert found["fsdp"]["units"][-1] == ["", []] and found["fsdp"]["kept"] and found["ddp"]["units"] == []
        assert sorted(found["fsdp"]["units"][:-1]) == sorted([name, names] for name, names in own.items())
        assert found["fsdp"]["state"] == found["ddp"]["state"] == two["sharding"][0]["ddp"]["state"]
        assert found["fsdp"]["losses"] == pytest.approx(found["ddp"]["losses"])


def test_blocks_that_share_weights_with_others_are_sharded_with_them(two):
    for found in two["tied"]:
        assert found["ddp"]["one"] and found["fsdp"]["one"]
        assert found["fsdp"]["losses"] == pytest.approx(found["ddp"]["losses"])


def test_parameters_that_several_processes_would_not_average_are_refused(two):
    for found in two["refused"]:
        assert "the optimizer holds parameters that are not the model's" in found["loss"]
        assert "training_step must call the model by self.forward(...)" in found["direct"]
        assert "1.weight began to learn after the Trainer was made" in found["later"]
        assert "1.bias learns no longer, but several processes wait for its gradient" in found["no longer, False"]
        assert found["no longer, True"] == 4


def test_checkpoints_of_an_optimizer_whose_states_are_in_parts_are_refused(two):
    for found in two["refused"]:
        assert "checkpoints do not go with ZeroRedundancyOptimizer" in found["zero"]

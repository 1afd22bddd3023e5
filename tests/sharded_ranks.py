"""Saves on 2 gloo ranks and reads on 1, 2 and 3, for test_sharded.py: ``python tests/sharded_ranks.py FOLDER``."""

import resource
import sys
from pathlib import Path

import forks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fusedtrain.train.checkpoint import CheckpointError, CheckpointStore, verify
from fusedtrain.train.sharded import ShardedCheckpointStore

FOLDER = Path(sys.argv[1])


def full(step: int = 0) -> dict:
    """The state as one process has it."""
    generator = torch.Generator().manual_seed(step)
    draw = lambda *shape, **options: torch.randn(*shape, generator=generator, **options)  # noqa: E731
    return {
        "model": {"rows": draw(5, 3), "columns": draw(3, 4), "few": draw(1, 2), "half": draw(8, 2).bfloat16()},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step)), "average": draw(6)}}, "betas": (0.9, 0.999)},
        "epoch": step,
    }


def sharded(state: dict) -> dict:
    """The same over the ranks there are; as it is without any."""
    if not dist.is_initialized():
        return state
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    places = {"rows": Shard(0), "columns": Shard(1), "few": Shard(0), "half": Replicate()}
    model = {name: distribute_tensor(t, mesh, [places[name]]) for name, t in state["model"].items()}
    return state | {"model": model}


def equal(a, b) -> bool:
    if isinstance(b, torch.Tensor):
        a = a.full_tensor() if hasattr(a, "full_tensor") else a
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(b, dict):
        return a.keys() == b.keys() and all([equal(a[key], b[key]) for key in b])
    return type(a) is type(b) and a == b


def zeros(state):
    """Like ``state``, but not yet loaded."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    return {key: zeros(value) for key, value in state.items()} if isinstance(state, dict) else None


def save(step: int, asynchronous: bool = False) -> None:
    store, state = ShardedCheckpointStore(FOLDER, keep=2, asynchronous=asynchronous), sharded(full(step))
    store.save(step, state)
    if asynchronous:  # the step it names is written, whatever becomes of the tensors
        for t in state["model"].values():
            t.to_local().zero_()
        store.wait()


def load(step: int, passed_over: str = "") -> None:
    state, info = ShardedCheckpointStore(FOLDER).load_into(sharded(zeros(full())))
    assert info.step == step and equal(state, full(step)), info
    assert passed_over in str(info) and bool(passed_over) == bool(info.passed_over), info


def refuse(change, message: str, asynchronous: bool) -> None:
    """Rank 1 alone is in trouble, and all ranks hear of it, at the same step."""
    store = ShardedCheckpointStore(FOLDER, keep=2, asynchronous=asynchronous)
    state, (soft, hard) = sharded(full(99)), resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        change(state)
    try:
        store.save(99, state)
        while store._writing is not None:
            store.check()
        raise AssertionError("saved")
    except CheckpointError as error:
        assert message in str(error) and "\n" not in str(error), error
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def small_disk(state: dict) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def nan(state: dict) -> None:
    state["model"]["rows"].to_local()[0, 0] = torch.nan


def refuse_other_shapes() -> None:
    for change, message in (
        (lambda model: model.pop("rows"), "has too model/rows"),
        (lambda model: model.update(more=torch.ones(1)), "has no model/more"),
        (lambda model: model.update(few=torch.ones(2, 2)), "model/few has shape [1, 2], not [2, 2]"),
    ):
        state = full()
        change(state["model"])
        try:
            ShardedCheckpointStore(FOLDER).load_into(state)
            raise AssertionError("loaded")
        except CheckpointError as error:
            assert message in str(error), error


def train(steps: int, save_at: int | None = None, resume: bool = False) -> None:
    """FSDP2 on the ranks there are; the weights after ``steps`` steps go to a file of rank 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    store, first = ShardedCheckpointStore(FOLDER / "fsdp"), 0

    def state() -> dict:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))

    if resume:
        loaded, info = store.load_into(state())
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        first = info.step
    for step in range(first, steps):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))  # the same on all ranks
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == save_at:
            store.save(save_at, state())
    weights = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in model.state_dict().items()}
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(weights, FOLDER / f"weights-{resume}.pt")


def main() -> None:
    for step in (10, 20, 30):
        forks.run(2, lambda step=step: save(step))
    names = sorted(path.name for path in FOLDER.iterdir())
    assert len(names) == 2 * 3 + 1 and "checkpoint-000003-step-30.shard-00001.safetensors" in names, names
    assert verify(FOLDER) == []
    for world in (1, 2, 3):
        forks.run(world, lambda: load(30))
    state, info = CheckpointStore(FOLDER).load()
    assert equal(state, full(30)) and info.step == 30
    refuse_other_shapes()

    before = {path: path.read_bytes() for path in FOLDER.iterdir()}
    for *trouble, asynchronous in (
        (small_disk, "step 99 could not be written", True),
        (nan, "model/rows@3,0 holds NaN", False),
    ):
        forks.run(2, lambda trouble=trouble, asynchronous=asynchronous: refuse(*trouble, asynchronous))
        left = {path: path.read_bytes() for path in FOLDER.iterdir()}
        assert {path: left[path] for path in before} == before
        load(30)

    main_file = FOLDER / "checkpoint-000003-step-30.safetensors"
    for shard in sorted(FOLDER.glob("checkpoint-000003-*.shard-*")):
        whole = shard.read_bytes()
        for byte in range(len(whole)):
            shard.write_bytes(whole[:byte] + bytes([whole[byte] ^ 1 << byte % 8]) + whole[byte + 1 :])
            assert verify(main_file), byte
        for world in (1, 2):
            forks.run(world, lambda shard=shard: load(20, f"shard {shard.name}: "))
        shard.unlink()
        assert verify(main_file) == [f"shard {shard.name} is missing"]
        load(20, f"shard {shard.name} is missing")
        older = shard.with_name(shard.name.replace("000003-step-30", "000002-step-20"))
        shard.write_bytes(older.read_bytes())
        assert verify(main_file) == [f"shard {shard.name}: it belongs to another save"]
        shard.write_bytes(whole)
    assert verify(main_file) == []
    forks.run(2, lambda: save(40, asynchronous=True))
    load(40)
    assert len(list(FOLDER.glob("*.shard-*"))) == 4 and not list(FOLDER.glob("checkpoint-000002-*"))

    forks.run(2, lambda: train(6, save_at=3))
    forks.run(2, lambda: train(6, resume=True))
    assert equal(*(torch.load(FOLDER / f"weights-{resume}.pt") for resume in (True, False)))
    torch.set_num_threads(1)
    train(6, resume=True)
    one, two = (torch.load(FOLDER / f"weights-{resume}.pt") for resume in (True, False))
    assert equal(one, two)  # every rank saw the whole batch
    print("all is well")


if __name__ == "__main__":
    main()

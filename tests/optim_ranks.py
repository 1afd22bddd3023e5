"""Optimizers on 2 gloo ranks beside one process, for test_optim.py: ``python tests/optim_ranks.py``."""

import contextlib
import copy
import functools

import forks
import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fusedtrain import optim

EVERYTHING = {"lr": 0.01, "max_grad_norm": 0.1, "ema_decay": 0.9}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 1001), nn.ReLU(), nn.Linear(1001, 9))  # odd sizes: the parts of ranks differ


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> list:
    """Returns the norm of the gradients of each step, where the optimizer takes it."""
    norms = []
    for step in range(first, first + steps):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))  # the same on all ranks
        optimizer.zero_grad()
        model(x.to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        norms.append(copy.deepcopy(getattr(optimizer, "grad_norm", None)))
    return norms


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def sharded(cls=optim.AdamW, **narrow) -> None:
    """FSDP2, saved and loaded on the way, as one process; in 8 bits blocks are other ones and only stay finite."""
    model, plain, exact = net(), net(), net().double()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    ours, stock = (cls(m.parameters(), **EVERYTHING, **narrow) for m in (model, plain))
    norms = train(model, ours, 0, 3)
    saved = copy.deepcopy(get_optimizer_state_dict(model, ours))
    assert {whole(t).shape for t in saved["state"]["0.weight"].values() if torch.is_tensor(t)} <= {(), (1001, 5)}
    ours = cls(model.parameters(), **EVERYTHING, **narrow)
    set_optimizer_state_dict(model, ours, saved)
    norms += train(model, ours, 3, 2)
    plain_norms = train(plain, stock, 0, 5)
    if narrow:
        assert all(whole(p).isfinite().all() for p in model.parameters())
        assert not any(torch.equal(whole(p), q) for p, q in zip(model.parameters(), plain.parameters()))
        return
    truth = cls(exact.parameters(), **EVERYTHING)
    exact_norms = train(exact, truth, 0, 5)
    for name, p, q, r in zip(model.state_dict(), *(m.parameters() for m in (model, plain, exact))):
        harness.assert_as_good_as_torch(whole(p), q, r, name)
        averages = (whole(ours.state[p]["ema"]), stock.state[q]["ema"], truth.state[r]["ema"])
        harness.assert_as_good_as_torch(*averages, f"average of {name}")
    harness.assert_as_good_as_torch(*map(torch.stack, (norms, plain_norms, exact_norms)), "norms")


def averaged() -> None:
    """Evaluation before, with and behind the averages; FSDP2 keeps the outer layers gathered meanwhile."""
    model, plain, x = net(), net(), torch.ones(2, 5)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    outputs = []
    for trained in (model, plain):
        optimizer = optim.SGD(trained.parameters(), lr=0.5, ema_decay=0.5)
        train(trained, optimizer, 0, 2)
        with contextlib.suppress(ValueError), optimizer.swap_ema():
            assert trained is plain, "needs the model"
        with torch.no_grad():
            outputs.append([trained(x)])
            with optimizer.swap_ema(trained):
                outputs[-1].append(trained(x))
            outputs[-1].append(trained(x))
    assert all(torch.equal(*both) for both in zip(*outputs)) and not torch.equal(*outputs[0][:2])


def halves(model: nn.Module, optimizer: torch.optim.Optimizer, parts: slice, share: float) -> None:
    """Trains on the halves of the batches that ``parts`` names, each with this share in the gradient."""
    for step in range(4):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        for part in x.chunk(2)[parts]:
            (model(part).square().mean() * share).backward()
        optimizer.step()


def data_parallel(make) -> None:
    """DistributedDataParallel, a half on every rank, bit by bit as one process on both: 1/2 is exact."""
    model, plain, rank = net(), net(), dist.get_rank()
    wrapped = DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)
    halves(wrapped, make(model.parameters()), slice(rank, rank + 1), 1.0)
    halves(plain, make(plain.parameters()), slice(2), 0.5)
    for name, p, q in zip(model.state_dict(), model.parameters(), plain.parameters()):
        assert torch.equal(p, q) and not torch.equal(p, dict(net().named_parameters())[name]), name


def zero_redundancy() -> None:
    model, plain = net(), net()
    options = {"lr": 0.01, "ema_decay": 0.9}
    ours = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=optim.AdamW, **options)
    train(model, ours, 0, 3)
    train(plain, optim.AdamW(plain.parameters(), **options), 0, 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))


def parallel_tensors(cls) -> None:
    """A norm within a sequence that the ranks share: what they have of its gradients is yet to be added up."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 4))
    model, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "1": SequenceParallel(sequence_dim=0),
        "2": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    nets, options = (model, plain, exact), EVERYTHING | {"zero_grads": True}
    optimizers = [cls(net.parameters(), **options) for net in nets]
    norms = [torch.stack(train(*pair, 0, 3)) for pair in zip(nets, optimizers)]
    assert model[1].weight.grad.placements == (Partial(),) and not any(whole(p.grad).any() for p in model.parameters())
    for name, p, q, r in zip(plain.state_dict(), *(net.parameters() for net in nets)):
        harness.assert_as_good_as_torch(whole(p), q, r, name)
    harness.assert_as_good_as_torch(*norms, "norms")


def main() -> None:
    for cls in (optim.AdamW, optim.Lamb):
        parallel_tensors(cls)
    averaged()
    for cls in (optim.AdamW, optim.Lamb, optim.NovoGrad):
        sharded(cls)
    sharded(state_dtype="8bit")
    for cls in (optim.AdamW, optim.SGD, optim.Lamb, optim.NovoGrad):
        data_parallel(functools.partial(cls, **EVERYTHING))
    data_parallel(functools.partial(optim.AdamW, **EVERYTHING, zero_grads=True))
    data_parallel(functools.partial(optim.AdamW, **EVERYTHING, state_dtype="8bit"))
    data_parallel(functools.partial(ZeroRedundancyOptimizer, optimizer_class=optim.AdamW, lr=0.01))
    zero_redundancy()
    dist.barrier()


if __name__ == "__main__":
    forks.run(2, main)
    print("all is well")

"""Several processes that train one model: who they are, what wraps the model, how they agree."""

import contextlib
import datetime
import os
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusedtrain.nn import BatchNorm2d, SyncBatchNormAct
from fusedtrain.optim._sharded import reshard
from fusedtrain.train.errors import InputError, require

STRATEGIES = ("ddp", "fsdp")


@dataclass(frozen=True)
class Distributed:
    """What several processes, started by torchrun, do with the model. One process ignores all of it.

    Args:
        strategy: ddp: every process holds the model. fsdp: parameters, gradients and states are sharded (FSDP2), for
            models beyond one device.
        static_graph: ddp: the same parameters take part in every step, which saves work; but gradients travel after
            every micro-batch.
        gradient_as_bucket_view: ddp: gradients live in the buffers that are sent; saves their memory once.
        find_unused_parameters: ddp: some parameters take no part in some steps.
        bf16_compress: ddp: gradients travel as bfloat16: half the bytes, and rounded.
        sync_batchnorm: BatchNorms take their statistics over the batches of all processes, also over what one without
            samples of its own in the last step of an epoch takes along, which counts nowhere else.
        timeout: seconds after which a process that waits for another one fails instead of waiting on.

    Raises:
        InputError: a value is out of range, or an option of ddp stands beside the strategy fsdp.
    """

    strategy: Literal["ddp", "fsdp"] = "ddp"
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    find_unused_parameters: bool = False
    bf16_compress: bool = False
    sync_batchnorm: bool = False
    timeout: float = 600.0

    def __post_init__(self):
        names = ", ".join(STRATEGIES)
        require(self.strategy in STRATEGIES, f"strategy must be one of {names}, got {self.strategy!r}")
        require(0 < self.timeout < 1e9, f"timeout must be positive and below 1e9 seconds, got {self.timeout}")
        for option in ("static_graph", "bf16_compress", "find_unused_parameters"):
            require(self.strategy == "ddp" or not getattr(self, option), f"{option} belongs to the strategy ddp")


def refuse_wrapped(model: nn.Module) -> None:
    """Raises InputError for a model that somebody has wrapped or compiled already."""
    if isinstance(model, DataParallel):
        raise InputError(
            "DataParallel copies the model to every device in every step and gathers all outputs on one; start one"
            " process per device instead (torchrun) and pass the bare model"
        )
    if isinstance(model, DistributedDataParallel):
        raise InputError("pass the bare model: the Trainer wraps it in DistributedDataParallel itself")
    if hasattr(model, "_orig_mod"):  # an OptimizedModule, known by its mark: to import its class takes seconds
        raise InputError(
            'pass the bare model: the Trainer compiles it itself with TrainConfig(compile="default"), and the names in'
            " its checkpoints stay those of the model"
        )


def in_torchrun() -> bool:
    """Whether this process was started as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def _join(backend: str, timeout: datetime.timedelta) -> None:
    """``init_process_group`` for the processes that torchrun has started this time.

    Restarted ones find, in the store that torchrun keeps, the addresses that those before them left, and would wait for
    the dead (pytorch/pytorch#135712). So every start has a name of its own, under which its keys stand.
    """
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    store = dist.PrefixStore(_name_of_this_start(store, rank, size, timeout.total_seconds()), store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _name_of_this_start(store: dist.Store, rank: int, size: int, timeout: float) -> str:
    """Rank 0 makes the name up and tells it to whom it finds, the dead included, until all others have it."""
    own, end = uuid.uuid4().hex, time.monotonic() + timeout
    if rank > 0:
        store.set(f"fusedtrain/rank/{rank}", own)
        name = store.get(f"fusedtrain/for/{own}").decode()  # waits
        store.set(f"fusedtrain/heard/{name}/{rank}", "")
        return name
    waiting = set(range(1, size))
    while waiting:
        if time.monotonic() > end:
            raise TimeoutError(f"timed out: ranks {sorted(waiting)} of {size} did not join within {timeout:g} s")
        for other in sorted(waiting):
            if store.check([f"fusedtrain/rank/{other}"]):
                store.set(f"fusedtrain/for/{store.get(f'fusedtrain/rank/{other}').decode()}", own)
            if store.check([f"fusedtrain/heard/{own}/{other}"]):
                waiting.remove(other)
        time.sleep(0.01)
    return own


class World:
    """The processes of a run. Numbers and decisions go through gloo, between CPUs, so that no GPU is waited for.

    The first one made joins the group that torchrun describes, or uses the one that is there.
    """

    _control: tuple | None = None  # the default group, and one beside it

    def __init__(self, config: Distributed, device: torch.device):
        self.config, self.device = config, device
        self.rank, self.size = 0, 1
        if dist.is_initialized() or in_torchrun():
            timeout = datetime.timedelta(seconds=config.timeout)
            if device.type == "cuda":  # from where NCCL sends objects, such as plans of who writes what of a checkpoint
                torch.cuda.set_device(device)
            if not dist.is_initialized():
                _join("nccl" if device.type == "cuda" else "gloo", timeout)
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size > 1 and (World._control is None or World._control[0] is not dist.group.WORLD):
            World._control = dist.group.WORLD, dist.new_group(backend="gloo", timeout=timeout)
            dist.barrier(World._control[1])  # who left now would break off the others' search for their partners

    # --- agreement ----------------------------------------------------------------------------------------------------

    def sum(self, *values: float) -> list[float]:
        """Returns the sums of the values over all processes; NaN and infinity included."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, *values: float) -> list[float]:
        """Returns the largest of each value over all processes."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values, operation) -> list[float]:
        if self.size == 1:
            return list(values)
        t = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(t, operation, group=World._control[1])
        return t.tolist()

    def decide(self, value):
        """Returns rank 0's ``value`` on all processes."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, group=World._control[1])
        return box[0]

    def gather(self, value) -> list:
        """Returns the values of all processes, on all of them."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=World._control[1])
        return values

    @torch.no_grad()
    def share_buffers(self, model: nn.Module) -> None:
        """Gives all processes the buffers of rank 0, such as running means."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)

    # --- the model ----------------------------------------------------------------------------------------------------

    @property
    def sharded(self) -> bool:
        return self.size > 1 and self.config.strategy == "fsdp"

    @property
    def computes_together(self) -> bool:
        """Whether a forward pass of one process waits for the others, without DistributedDataParallel too."""
        return self.sharded or (self.size > 1 and self.config.sync_batchnorm)

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Returns what to call in training: ``model`` itself on one process."""
        if self.size == 1:
            return model
        if self.config.strategy == "fsdp":
            return _shard(model, optimizer, self)
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            static_graph=self.config.static_graph,
            gradient_as_bucket_view=self.config.gradient_as_bucket_view,
            find_unused_parameters=self.config.find_unused_parameters,
        )
        if self.config.bf16_compress:
            require(self.device.type == "cuda", "bf16_compress: torch sends bfloat16 between GPUs only")
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

            wrapped.register_comm_hook(None, bf16_compress_hook)
        return wrapped

    def reshard(self, model: nn.Module) -> None:
        """Lets go of the whole weights that evaluation has left gathered."""
        if self.sharded:
            reshard(model)

    def sync(self, wrapped: nn.Module, last: bool):
        """The context of a micro-batch: gradients travel only after the last one of a group."""
        if self.size == 1:
            return _NOTHING
        if self.sharded:
            wrapped.set_requires_gradient_sync(last)
            return _NOTHING
        # torch's static graph does not take no_sync; averaging once more what is averaged already changes nothing.
        return _NOTHING if last or self.config.static_graph else wrapped.no_sync()


_NOTHING = contextlib.nullcontext()


def _shard(model: nn.Module, optimizer: Optimizer, world: World) -> nn.Module:
    """FSDP2: one shard unit per block, and the rest. One unit after the other goes to the device, with the values of
    rank 0, and leaves there what this process keeps of it: the whole model need not have room."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if optimizer.state:
        raise InputError("strategy fsdp shards the parameters: the optimizer must not have made a step before")
    mesh = init_device_mesh(world.device.type, (world.size,))
    old = {id(p): name for name, p in model.named_parameters()}
    for unit in [*_units(model), model]:
        whole = [(p, p.data) for p in unit.parameters() if not is_traceable_wrapper_subclass(p)]
        for p, data in whole:
            p.data = data.to(world.device)
            dist.broadcast(p.data, 0)
        fully_shard(unit, mesh=mesh)
        for p, data in whole:  # the optimizer still holds it, and others may
            p.data = data
    model.to(world.device)  # what torch leaves where it is
    world.share_buffers(model)
    new = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [new[old[id(p)]] if id(p) in old else p for p in group["params"]]
    return model


_LISTS = (nn.Sequential, nn.ModuleList)


def _units(model: nn.Module) -> list[nn.Module]:
    """The children, with parameters, of lists and sequences: where these hold blocks in turn, the blocks. What shares
    a parameter with others must stay in one unit with them, the outermost."""
    found, inside, uses = [], set(), _uses(model)
    for parent in model.modules():  # the outer before the inner
        if not isinstance(parent, _LISTS) or parent in inside:
            continue
        for child in parent:
            holds = sum(p.numel() for p in child.parameters())
            alone = all(count == uses[p] for p, count in _uses(child).items())
            if holds and alone and child not in inside and not _holds_blocks(child):
                found.append(child)
                inside.update(child.modules())
    return found


def _uses(model: nn.Module) -> Counter:
    """In how many modules each parameter stands."""
    return Counter(p for module in model.modules() for p in module.parameters(recurse=False))


def _holds_blocks(module: nn.Module) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):  # they have no forward, at which torch would gather them
        return True
    return isinstance(module, nn.Sequential) and any(next(child.children(), None) is not None for child in module)


def sync_batchnorm(model: nn.Module, world: World) -> nn.Module:
    """Returns the model with synchronised BatchNorms, activations behind them kept, where that is wanted and there is
    more than one process.

    Raises:
        InputError: without a GPU only BatchNorms of images can be synchronised.
    """
    if not world.config.sync_batchnorm or world.size == 1:
        return model
    if isinstance(model, _BatchNorm):
        return _synchronised(model, world)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm) and not isinstance(child, SYNCED):
                parent.add_module(name, _synchronised(child, world))
    return model


class SyncedBatchNorm2d(BatchNorm2d):
    """SyncBatchNormAct that is no nn.SyncBatchNorm, which DistributedDataParallel refuses on CPUs."""

    process_group = None
    forward = SyncBatchNormAct.forward


SYNCED = (nn.SyncBatchNorm, SyncedBatchNorm2d)


def _synchronised(layer: _BatchNorm, world: World) -> nn.Module:
    if not isinstance(layer, nn.BatchNorm2d):
        if world.device.type != "cuda":
            raise InputError(f"sync_batchnorm: without a GPU only BatchNorm2d works, not {type(layer).__name__}")
        return nn.SyncBatchNorm.convert_sync_batchnorm(layer)
    options = (layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    other = SyncedBatchNorm2d(*options)
    other.weight, other.bias = layer.weight, layer.bias  # the optimizer knows them
    for name, buffer in layer.named_buffers(recurse=False):
        setattr(other, name, buffer)
    for name, child in layer.named_children():  # timm's activation and dropout
        other.add_module(name, child)
    return other.train(layer.training)

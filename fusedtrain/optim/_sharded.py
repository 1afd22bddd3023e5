"""Parameters of which each rank has a part (DTensor): FSDP2, tensor parallelism."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fusedtrain.ops import grad_norm


def is_sharded(t: Tensor) -> bool:
    return hasattr(t, "device_mesh")


def _spread_over(p: Tensor) -> tuple | None:
    return (p.device_mesh, p.placements) if is_sharded(p) else None


def local(t: Tensor) -> Tensor:
    """What this rank has of a DTensor; other tensors themselves."""
    return t.to_local() if is_sharded(t) else t


def spread(own: Tensor, like: Tensor) -> Tensor:
    """The DTensor like ``like`` of which this rank has ``own``."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def total_norm(params: Iterable[Tensor], grads: list[Tensor]) -> Tensor:
    """The norm of all gradients, of which ``grads`` are this rank's parts; what is replicated counts once."""
    parts: dict = {}
    for p, g in zip(params, grads):
        parts.setdefault(_spread_over(p), []).append(g)
    if parts.keys() == {None}:
        return grad_norm(grads)
    squares = [_over_ranks(grad_norm(own).square(), where) for where, own in parts.items()]
    return torch.stack(squares).sum().sqrt()


def _over_ranks(sums: Tensor, where: tuple | None) -> Tensor:
    """Adds up what the ranks have, of parameters on a mesh with placements; None: each has the same."""
    if where is None:
        return sums
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh, placements = where
    partial = [Replicate() if place.is_replicate() else Partial() for place in placements]
    return DTensor.from_local(sums, mesh, partial, run_check=False).full_tensor()


def add_up(params: list[Tensor], sums: Tensor) -> None:
    """Replaces the sums over this rank's parts, a row for each parameter, by those over all parts."""
    rows: dict = {}
    for row, where in enumerate(map(_spread_over, params)):
        rows.setdefault(where, []).append(row)
    for where, own in rows.items():
        sums[own] = _over_ranks(sums[own], where)


def reshard(model: torch.nn.Module) -> None:
    """Lets FSDP2 go of the whole weights that a forward without a backward has left gathered: the next one would take
    them, whatever has become of their parts."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()

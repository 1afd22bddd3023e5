"""Who wants to know the epoch."""

from collections.abc import Iterable


def set_epoch(batches: Iterable, epoch: int) -> None:
    """Tells a loader the epoch, or, where it takes none, its samplers and its dataset, all of them that take one."""
    if hasattr(batches, "set_epoch"):
        batches.set_epoch(epoch)
    else:
        set_epoch_of_parts(batches, epoch)


def set_epoch_of_parts(loader: Iterable, epoch: int) -> None:
    """Tells the samplers and the dataset of a loader the epoch."""
    parts = {name: getattr(loader, name, None) for name in ("batch_sampler", "sampler", "dataset")}
    inner = getattr(parts["batch_sampler"], "sampler", None)
    for part in {id(part): part for part in (inner, *parts.values())}.values():
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)

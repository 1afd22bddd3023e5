"""Remedies for what brings the data."""

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_structure
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from fusedtrain.diagnose.batches import LoaderSource
from fusedtrain.diagnose.drive import Driver
from fusedtrain.diagnose.instrument import non_blocking, with_non_blocking, wrap
from fusedtrain.diagnose.lines import Change, edit_call, edit_loader
from fusedtrain.diagnose.remedies.remedy import Remedy


class Loader(Remedy):
    """The loader with other arguments."""

    kind, on_loader = "bitwise", True
    OF_WORKERS = ("persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout")  # refused without any

    def __init__(self, driver: Driver, **arguments):
        self.arguments = arguments
        self.name = "loader(" + ", ".join(f"{name}={value}" for name, value in arguments.items()) + ")"
        self.how = "give the DataLoader " + ", ".join(f"{name}={value}" for name, value in arguments.items())
        self.source = LoaderSource(self.make(driver.loader))

    def make(self, loader: DataLoader) -> DataLoader:
        return clone_loader(loader, **self.arguments)

    def changes(self, driver: Driver) -> list[Change]:
        site = driver.instrument.sites.get(id(driver.loader))
        without = () if self.arguments.get("num_workers") != 0 else self.OF_WORKERS
        change = edit_call(site, ("DataLoader",), DataLoader, without, **self.arguments)
        return [change] if change else []


class WholeBatches(Remedy):
    """The loader asks the dataset for all samples of a batch at once, where it takes a list of indices."""

    name, kind, on_loader = "whole batches", "bitwise", True
    how = (
        "let the DataLoader index the dataset once per batch: sampler=BatchSampler(RandomSampler(dataset), size,"
        " drop_last=False), batch_size=None; both samplers are in torch.utils.data"
    )

    def __init__(self, driver: Driver):
        self.source = LoaderSource(self.make(driver.loader))

    @staticmethod
    def make(loader: DataLoader) -> DataLoader:
        whole = {"batch_size": None, "sampler": loader.batch_sampler, "batch_sampler": None, "drop_last": False}
        return clone_loader(loader, **whole, collate_fn=None)

    @staticmethod
    def why_not(loader) -> str | None:
        """Returns why a batch cannot be had so, or is another one; None where two are the same, bit for bit."""
        reason = why_not_clone(loader)
        if reason or loader.batch_sampler is None:
            return reason or "it asks for whole batches already"
        if loader.collate_fn is not default_collate:
            return "it has a collate_fn of its own"
        length = len(loader.dataset)
        for first in (0, length // 2):
            indices = [i % length for i in range(first, first + 3)]
            try:
                single = default_collate([loader.dataset[i] for i in indices])
                whole = default_convert(loader.dataset[indices])
            except Exception as error:
                return f"the dataset takes no list of indices: {type(error).__name__}"
            if not _same(single, whole):
                return "the dataset gives something else for a list of indices"
        return None

    def changes(self, driver: Driver) -> list[Change]:
        change = edit_loader(driver.instrument.sites.get(id(driver.loader)))
        return [change] if change else []


def _same(one: object, other: object) -> bool:
    """Returns whether two batches have the same structure and values."""
    values, others = tree_leaves(one), tree_leaves(other)
    return tree_structure(one) == tree_structure(other) and all(
        isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype is b.dtype and torch.equal(a, b)
        for a, b in zip(values, others)
    )


class PinnedCopies(Remedy):
    """Batches from page-locked memory, copied while the device computes."""

    name, kind, on_loader = "pinned copies", "bitwise", True
    how = "give the DataLoader pin_memory=True and .to() or .cuda() non_blocking=True"

    def __init__(self, driver: Driver):
        self.source = LoaderSource(self.make(driver.loader))

    @staticmethod
    def make(loader: DataLoader) -> DataLoader:
        return clone_loader(loader, pin_memory=True)

    def apply(self, driver: Driver) -> None:
        def waiting_for_nobody(original):
            def wrapper(tensor, *args, **kwargs):
                if not tensor.is_cuda and not non_blocking(args, kwargs):
                    args, kwargs = with_non_blocking(args, kwargs)
                return original(tensor, *args, **kwargs)

            return wrapper

        self._undo = [wrap(Tensor, name, waiting_for_nobody) for name in ("to", "cuda")]

    def undo(self, driver: Driver) -> None:
        for undo in self._undo:
            undo()

    def changes(self, driver: Driver) -> list[Change]:
        change = edit_call(driver.instrument.sites.get(id(driver.loader)), ("DataLoader",), DataLoader, pin_memory=True)
        return [change] if change else []


def why_not_clone(loader) -> str | None:
    """Returns why a loader cannot be built again with other arguments, or None."""
    if not isinstance(loader, DataLoader):
        return f"the batches come from a {type(loader).__name__}, not from a DataLoader"
    if type(loader) is not DataLoader:
        return f"{type(loader).__name__} is derived from DataLoader and may load differently"
    if isinstance(loader.dataset, IterableDataset):
        return "the dataset is iterable: with other workers it has to be divided among them by hand"
    return None


def clone_loader(loader: DataLoader, **arguments) -> DataLoader:
    """Returns a DataLoader over the same dataset and sampler with some arguments changed."""
    if loader.batch_size is not None:
        same = {"batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}
    elif loader.batch_sampler is not None:
        same = {"batch_sampler": loader.batch_sampler}
    else:
        same = {"batch_size": None, "sampler": loader.sampler}
    workers = arguments.get("num_workers", loader.num_workers)
    same |= {
        "num_workers": workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "worker_init_fn": loader.worker_init_fn,
        "generator": loader.generator,
    }
    if workers > 0:
        same |= {"persistent_workers": loader.persistent_workers, "prefetch_factor": loader.prefetch_factor}
        same |= {"multiprocessing_context": loader.multiprocessing_context, "timeout": loader.timeout}
    return DataLoader(loader.dataset, **same | arguments)

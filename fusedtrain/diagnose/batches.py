"""Where the batches of a measured run come from: a loader, or a few that are kept."""

import copy
from collections import UserDict
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

_FAR_EPOCH = 10**6  # beyond those of the run


def copy_batch(batch: Any) -> Any:
    """Returns a batch whose tensors are copies, in the same structure and memory, pinned where they were.

    Raises what ``copy.deepcopy`` does where something else in it cannot be copied.
    """
    if isinstance(batch, Tensor):
        made = batch.clone()
        return made.pin_memory() if batch.device.type == "cpu" and batch.is_pinned() else made
    return map_batch(batch, copy_batch)


def map_batch(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a structure of the same kind of what ``change`` makes of its values; of other objects a copy."""
    if isinstance(batch, (dict, UserDict)):
        made = copy.copy(batch)  # a class of its own may need more than its items
        for name, value in batch.items():
            made[name] = change(value)
        return made
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(change, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(change, batch))
    return copy.deepcopy(batch)


def batch_bytes(batch: Any) -> int:
    """Returns the bytes of the tensors in a batch."""
    if isinstance(batch, Tensor):
        return batch.nbytes
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    return sum(map(batch_bytes, batch)) if isinstance(batch, (list, tuple)) else 0


class LoaderSource:
    """Batches of a loader, epoch after epoch.

    Args:
        loader: any iterable that can be iterated over again.
        iterator: one that is under way, or None.
        begin: gives another one; None: ``iter(loader)``.
    """

    def __init__(self, loader, iterator: Iterator | None = None, begin: Callable[[], Iterator] | None = None):
        self.loader, self.iterator, self.restarted = loader, iterator, False
        self._begin = begin or (lambda: iter(loader))
        self._epoch = _FAR_EPOCH
        self.in_flight = 0
        if isinstance(loader, DataLoader) and loader.num_workers > 0:
            self.in_flight = loader.num_workers * (loader.prefetch_factor or 2)

    def resume(self) -> None:
        """Throws away what the workers prepared while another source was in use."""
        for _ in range(self.in_flight):
            self.fetch()

    def prepare(self) -> None:
        pass

    def fetch(self):
        self.restarted = False
        if self.iterator is not None:
            try:
                return next(self.iterator)
            except StopIteration:
                self.restarted = True
                self._next_epoch()
        self.iterator = self._begin()
        try:
            return next(self.iterator)
        except StopIteration:
            raise RuntimeError("the loader gives no batches") from None

    def _next_epoch(self) -> None:
        """A loader that keeps its position in the epoch would go on from the end of it."""
        self._epoch += 1
        for owner in (self.loader, getattr(self.loader, "batch_sampler", None), getattr(self.loader, "sampler", None)):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(self._epoch)
                return

    def close(self) -> None:
        """Ends the workers. Left to the garbage collector, each may be waited for for 5 seconds."""
        for owner in (self.iterator, self.loader):
            if hasattr(owner, "_shutdown_workers"):
                owner._shutdown_workers()
            elif isinstance(owner, Generator):
                owner.close()
        self.iterator = None


class CachedSource:
    """The same few batches over and over, copied outside the measured time: what if loading were free?"""

    in_flight, restarted = 0, False

    def __init__(self, batches: list):
        self.batches, self.position, self.ready = batches, 0, None

    def resume(self) -> None:
        pass

    def prepare(self) -> None:
        self.ready = copy_batch(self.batches[self.position % len(self.batches)])
        self.position += 1

    def fetch(self):
        batch, self.ready = self.ready, None
        return batch

    def close(self) -> None:
        pass

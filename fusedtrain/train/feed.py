"""The batches of a loader, epoch by epoch: with a position, weights, and equally many on every process."""

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from fusedtrain.data.epochs import set_epoch
from fusedtrain.data.prefetch import DevicePrefetcher
from fusedtrain.train.accumulation import Group
from fusedtrain.train.distributed import World
from fusedtrain.train.errors import InputError
from fusedtrain.train.preemption import Preempted
from fusedtrain.train.rng import SeededDataset, cpu_state, rng_state, set_rng_state
from fusedtrain.train.sampler import EpochSampler

_END = object()  # of a pass


class Feed:
    """Iterates over ``batches`` and knows where it stands.

    Where the loader, its ``batch_sampler`` or its ``sampler`` has ``advance``, ``state_dict`` and ``load_state_dict``
    (:class:`fusedtrain.train.EpochSampler`, :func:`fusedtrain.data.loader`), it keeps the position; a run that goes on
    continues there at once. Otherwise the batches that were used are read again and left out.

    A process whose loader ends earlier than that of another one gets its last batch once more, with weight 0.

    Args:
        batches: any iterable that gives batches anew each time it is iterated over.
        world: the processes of the run.
        name: of the data, for messages.
    """

    def __init__(self, batches: Iterable, world: World, name: str = "training"):
        self.batches, self.world, self.name = batches, world, name
        owners = [batches, getattr(batches, "batches", None)]  # the second: of a prefetcher
        owners += [getattr(o, part, None) for o in owners[:2] for part in ("batch_sampler", "sampler")]
        owners += [getattr(getattr(o, "batch_sampler", None), "sampler", None) for o in owners[:2]]
        self._owners = [owner for owner in owners if owner is not None]
        self._position = self._first("advance", "state_dict", "load_state_dict")
        self._sampler = self._first("counts", "remaining")
        self._loader = next((o for o in self._owners if isinstance(o, DataLoader)), None)
        self._classes = _classes(getattr(self._loader, "dataset", None))
        self._in_order = getattr(self._loader, "in_order", True) or self._loader.num_workers < 2
        if isinstance(batches, Iterator):
            raise InputError(f"the {name} data are an iterator, which can be read once; pass a list or a DataLoader")
        self._check_shards()
        self.epoch, self.used, self.iterating, self.ended = 0, 0, False, False
        generators = (getattr(owner, "generator", None) for owner in self._owners)
        self._generators = list(dict.fromkeys(g for g in generators if isinstance(g, torch.Generator)))
        self.at_start = self.rng_state()  # of the epoch

    def _first(self, *methods: str):
        fitting = (o for o in self._owners if all(hasattr(o, method) for method in methods))
        # A loader has the methods whatever its sampler is.
        return next((o for o in fitting if "state_dict" not in methods or getattr(o, "keeps_position", True)), None)

    def _check_shards(self) -> None:
        here = self.world.rank, self.world.size
        source = getattr(self._loader, "dataset", None)
        shared = source if hasattr(source, "shard_sizes") else self._sampler  # as a table among its ranks
        there = getattr(shared, "rank", here[0]), getattr(shared, "world_size", here[1])
        if there != here:
            raise InputError(
                f"the {self.name} data are those of rank {there[0]} of {there[1]}, and this process is rank {here[0]}"
                f" of {here[1]}: pass rank= and world_size= where they are made"
            )
        if self.world.size == 1:
            return
        if not self._in_order and self._sampler is not None:
            raise InputError(
                f"the {self.name} data come in no fixed order (in_order=False), so several processes cannot tell which"
                " of them count: leave in_order out"
            )
        if not hasattr(self.batches, "__len__"):
            raise InputError(f"several processes need {self.name} data with a length, to take equally many steps")
        loader = self._loader
        if loader is None or isinstance(loader.dataset, IterableDataset) or self._sampler is not None:
            return
        batches = loader.batch_sampler
        # Where somebody else puts the batches together, the loader's own sampler plays no part.
        order = loader.sampler if batches is None else batches.sampler if type(batches) is BatchSampler else None
        if type(order) in (RandomSampler, SequentialSampler):
            raise InputError(
                f"every one of {self.world.size} processes would see all {self.name} data: pass"
                " batch_sampler=fusedtrain.train.EpochSampler(..., rank=rank, world_size=world_size)"
            )

    def rng_state(self, others: dict | None = None) -> dict:
        """The state of everything that draws random numbers, the generators of the loader and its samplers too.
        ``others``: that of the default generators, if it is known."""
        own = [generator.get_state() for generator in self._generators]
        return (rng_state() if others is None else others) | {"loader": own}

    def set_rng_state(self, state: dict) -> None:
        """Continues where :meth:`rng_state` was called."""
        set_rng_state(state)
        for generator, own in zip(self._generators, state.get("loader", ())):
            generator.set_state(own.cpu())

    # --- position -----------------------------------------------------------------------------------------------------

    def rewind(self, epoch: int) -> None:
        """Goes to the start of ``epoch``."""
        self.epoch, self.used, self.iterating, self.ended = epoch, 0, False, False
        set_epoch(self.batches, epoch + 1)  # samplers stay where they are when it is the same epoch
        set_epoch(self.batches, epoch)

    def updates(self, size: int) -> int:
        """Returns how many updates of so many batches the epoch has had; all processes call it."""
        steps, own = self.steps(), len(self.batches) - self.used
        left = int(self.world.max(own if self._sampler is None else self._sampler.remaining())[0])
        return (steps - left) // size if left > 0 else -(-steps // size)

    def steps(self) -> int | None:
        """Batches of a whole epoch, the most of any process; None where the loader does not know."""
        try:
            own = len(self.batches)
        except TypeError:  # also of a loader whose dataset has no length
            return None
        return int(self.world.max(own)[0])

    def sizes(self) -> tuple[int, int, int] | None:
        """Returns how many samples an epoch, a batch, and this process's last batch hold; None where nobody knows."""
        order = self._sampler
        if isinstance(order, EpochSampler):
            step = order.batch_size * order.world_size
            last = order._counts((len(order) - 1) * step)[order.rank]
            return order.size, order.batch_size, max(1, last)  # without samples of its own it gets one to hand
        order = getattr(self._loader, "batch_sampler", None)
        if type(order) is not BatchSampler or not hasattr(order.sampler, "__len__"):
            return None
        samples, size = len(order.sampler), order.batch_size
        return samples, size, size if order.drop_last else samples % size or size

    def state_dict(self) -> dict:
        state = {"epoch": self.epoch, "used": self.used, "iterating": self.iterating, "ended": self.ended}
        state["step"], state["classes"] = self._step(), self._classes
        return state | ({"position": self._position.state_dict()} if self._position is not None else {})

    def load_state_dict(self, state: dict) -> None:
        """Goes to where :meth:`state_dict` was called, also with batches of another size.

        Raises:
            ValueError: the state is that of other data, or no batch begins there.
        """
        self._check_classes(state.get("classes"))
        self.rewind(state["epoch"])
        self.used, self.iterating, self.ended = state["used"], state["iterating"], state.get("ended", False)
        if self.used and ("position" in state) != (self._position is not None):
            raise ValueError("the place in the epoch was kept by other means, which the batches of now do not have")
        if self._position is not None and "position" in state:
            self._position.load_state_dict(state["position"])
        elif self._position is None:
            self._change_batches(state.get("step"))

    def _check_classes(self, before: list[str] | None) -> None:
        if before is None or self._classes is None or before == self._classes:
            return
        pairs = itertools.zip_longest(before, self._classes)
        label, (old, new) = next((label, pair) for label, pair in enumerate(pairs) if pair[0] != pair[1])
        raise ValueError(f"of label {label} the class was {old!r}, and is {new!r} now")

    def _step(self) -> int | None:
        """Samples of a full batch of all processes; None where nobody knows, or the position is kept in samples."""
        sizes = self.sizes() if self._position is None else None
        return sizes and sizes[1] * self.world.size

    def _change_batches(self, before: int | None) -> None:
        """Counts what was used in batches of this run, where one was of ``before`` samples."""
        now = self._step()
        if before is None or now is None or before == now:
            return
        samples = self.used * before
        self.used, rest = divmod(samples, now)
        if samples >= self.sizes()[0] * self.world.size:
            self.used = len(self.batches)
        elif rest:
            raise ValueError(f"{samples} samples of the epoch are used, and batches of {now} do not end there")

    def to_start(self):
        """Goes to the start of the epoch, for a pass that is no training; returns what :meth:`restore` takes."""
        if self._position is None:
            return None
        position = self._position.state_dict()
        self.rewind(position.get("epoch", 0))
        return position

    def restore(self, position) -> None:
        """Goes back to where :meth:`to_start` was called."""
        if position is not None:
            self._position.load_state_dict(position)

    @contextlib.contextmanager
    def apart(self, other: "Feed | None"):
        """Within the ``with`` block a loader that ``other`` is amid a pass over starts workers of its own for this one:
        those that stay would begin that pass anew."""
        loader = self._loader
        if other is None or loader is None or other._loader is not loader or not other.iterating or other.ended:
            yield
            return
        kept, loader._iterator = loader._iterator, None
        try:
            yield
        finally:
            self.close()
            loader._iterator = kept

    # --- batches ------------------------------------------------------------------------------------------------------

    def start(self, wait: Callable) -> None:
        """Begins the loader, and where the run was interrupted, from the same random numbers as then, which may have
        made the order of the batches; the generators then are as before."""
        state = self.rng_state()
        if not self.iterating:
            self.at_start = state
            self.begin(wait)
            return
        if self.used and not self._in_order and self.world.rank == 0:
            warnings.warn(
                f"the {self.name} data come in no fixed order (in_order=False): of epoch {self.epoch + 1}, amid which"
                " the run goes on, some batches may come twice, and others not at all",
                stacklevel=2,
            )
        self.set_rng_state(self.at_start)
        try:
            self.begin(wait)
        finally:
            self.set_rng_state(state)

    def begin(self, wait: Callable) -> None:
        """Starts the loader's workers at the position; ``wait`` as in :meth:`groups`."""
        self._left = None  # one process goes on until there are no more
        if self.world.size > 1:
            own = len(self.batches) - self.used if self._sampler is None else self._sampler.remaining()
            self._left = int(self.world.max(own)[0])
        stayed = getattr(self._loader, "_iterator", None) is not None
        self._iterator = iter(self.batches)
        if stayed:  # workers that stay draw no seed, but new ones do, and those of a run that goes on are new
            torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        self._batch, self.iterating, self._due = None, True, self._due_batches()
        if self._position is None and self.used:
            wait(self._skip)

    def _due_batches(self) -> int:
        """Returns how many batches a plain DataLoader has to give from here on; 0 where nobody knows for sure."""
        loader = self.batches.batches if type(self.batches) is DevicePrefetcher else self.batches
        plain = ((getattr(type(loader), name, None), getattr(DataLoader, name)) for name in ("__iter__", "__len__"))
        if any(own is not torchs for own, torchs in plain) or isinstance(loader.dataset, IterableDataset):
            return 0
        order = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        if type(order) is EpochSampler:
            return order.remaining()
        order = order.sampler if type(order) is BatchSampler else order
        exact = type(order) in (RandomSampler, SequentialSampler, DistributedSampler)
        return len(loader) - self.used if exact else 0

    def _skip(self) -> None:
        for _ in range(self.used + self.ended):  # at its end a sampler that shuffles draws once more
            next(self._iterator, None)

    def next(self, ahead: int = 0):
        """Returns the next batch and whether its samples count; None at the end of the epoch.

        Args:
            ahead: batches since the position that :meth:`advance` was not told of.
        """
        if self._left == 0:
            return None
        batch = next(self._iterator, _END)
        if self._left is not None:
            self._left -= 1
        self._due -= 1
        if batch is _END:
            if self._due >= 0:
                raise InputError(
                    f"the {self.name} data ended {self._due + 1} batches too early: a sample that raises StopIteration,"
                    " as next() does at the end of what it reads, ends the pass"
                )
            self.ended = True
            if self._left is None:
                self._left = 0
                return None
            if self._batch is None:
                raise InputError(f"rank {self.world.rank} has no {self.name} batch at all, but other ranks have")
            return self._batch, False
        if batch is None:  # what a collate_fn may return that has left out all samples
            raise InputError(
                f"batch {self.used + ahead + 1} of the {self.name} data is None, which nothing can be made of; to leave"
                " out samples that cannot be read, pass max_skipped= to fusedtrain.data.loader"
            )
        self._batch = batch if self.world.size > 1 else None
        counts = self.world.size == 1 or self._sampler is None or self._sampler.counts(ahead)[self.world.rank] > 0
        return batch, counts

    def advance(self) -> None:
        """Notes that a batch is used up."""
        self.used += 1
        if self._position is not None:
            self._position.advance()

    def sample(self, row: int, rows: int, ahead: int = 0) -> str | None:
        """Returns what a sample is known by: that in a row of the batch, of so many, that comes ``ahead`` batches after
        the position. None where the order is not known, or samples were left out."""
        order, loader = self._sampler, self._loader
        if not self._in_order:
            return None
        if order is None:
            order, ahead = getattr(loader, "batch_sampler", None), self.used + ahead
            if type(getattr(order, "sampler", None)) is not SequentialSampler:
                return None
        indices = next(itertools.islice(order, ahead, None), ())
        if len(indices) != rows:
            return None
        from fusedtrain.data.faults import sample_name

        return sample_name(loader and loader.dataset, int(indices[row]))

    def groups(self, group: Group, wait: Callable, undoes: bool = False) -> Iterator[Iterator]:
        """Yields, for each update of the rest of the epoch, an iterator over (batch, counts, last of the group).

        Args:
            group: says how many micro-batches are still to come.
            wait: calls what it is given; raises Preempted, instead or afterwards, where the run is to stop.
            undoes: :meth:`to_group_start` may be called.
        """
        loader = self._loader
        draws = loader is not None and not loader.num_workers and not isinstance(loader.dataset, SeededDataset)
        if draws or self._generators:  # in this process
            wait = functools.partial(self._with_generators_put_back, wait)
        while True:
            if undoes:
                self._group_start = self.state_dict(), self.rng_state()
            first = wait(self.next)
            if first is None and not group.done:
                return
            yield self._group(first, group, wait)

    def to_group_start(self) -> None:
        """Goes back to where the group under way began, generators too."""
        state, generators = self._group_start
        self.load_state_dict(state)
        self.set_rng_state(generators)

    def _group(self, first, group: Group, wait: Callable) -> Iterator:
        item, missing = first, group.size - group.done
        while item is not None:
            missing -= 1
            last = missing == 0 or self._left == 0
            yield *item, last
            if last:
                return
            item = wait(self.next)

    def _with_generators_put_back(self, wait: Callable, fetch: Callable):
        """``wait(fetch)``, where a batch that is not used leaves no trace in the generators."""
        state, ended = self.rng_state(cpu_state()), self.ended
        try:
            return wait(fetch)
        except Preempted:
            self.set_rng_state(state)
            self.ended = ended
            raise

    def close(self) -> None:
        """Lets go of the iterator, and so of its workers."""
        self._iterator = self._batch = None


def _classes(dataset) -> list[str] | None:
    """Returns the names of the classes, by label, where a dataset or what it stands on knows them."""
    for _ in range(8):
        names = getattr(dataset, "classes", None)
        if isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names):
            return list(names)
        dataset = getattr(dataset, "dataset", None)
    return None

"""A torch DataLoader whose workers are chosen by measurement and whose errors name the sample."""

import numbers
from collections.abc import Iterator
from typing import NoReturn

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fusedtrain.data import faults, workers
from fusedtrain.data.epochs import set_epoch_of_parts


class Loader(DataLoader):
    """What :func:`loader` returns: a DataLoader.

    Attributes:
        plan: the :class:`~fusedtrain.data.workers.Plan` behind "auto"; None where everything was given.
        skipped: sample name -> reason, of the samples that were left out so far.
    """

    def __init__(self, dataset, *, max_skipped: int = 0, plan=None, **options):
        self.plan, self.max_skipped, self.skipped = plan, max_skipped, {}
        self._guarded = None
        if not isinstance(dataset, IterableDataset):
            dataset = self._guarded = faults.Guarded(dataset, options["num_workers"])
        batched = options.get("batch_size", 1) is not None or options.get("batch_sampler") is not None
        options["collate_fn"] = faults.Collate(options.get("collate_fn"), batched)
        super().__init__(dataset, **options)

    def check_worker_number_rationality(self) -> None:
        """Warns, as torch does, of more workers than cores; not where a measurement asked for them."""
        if self.plan is None:
            super().check_worker_number_rationality()

    def __len__(self) -> int:
        sizes = getattr(self.dataset, "shard_sizes", None)
        if sizes is None or not isinstance(self.dataset, IterableDataset):
            return super().__len__()
        sizes = sizes(max(self.num_workers, 1))
        if self.batch_size is None:
            return sum(self.dataset.batches_of(size) for size in sizes)
        return sum(size // self.batch_size if self.drop_last else -(-size // self.batch_size) for size in sizes)

    def __iter__(self) -> Iterator:
        if hasattr(self.dataset, "begin_pass"):
            self.dataset.begin_pass(self.batch_size, self.drop_last)
        if any(worker.exitcode == 0 for worker in getattr(self._iterator, "_workers", [])):
            self._end(self._iterator)  # Ctrl-C in a terminal or in Jupyter has ended workers that stayed
        try:
            batches = super().__iter__()  # workers start now, not at the first batch
        except (RuntimeError, OSError, EOFError) as error:  # one that stayed has died since the last pass
            self._raise(error, self._iterator)
        return self._checked(batches)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass, where the samplers or the dataset have one per epoch."""
        set_epoch_of_parts(self, epoch)

    def advance(self, steps: int = 1) -> None:
        """Notes that the next batches are used up; the loop calls it, as batches are made ahead of it."""
        owner = self._position_owner()
        if owner is not None:
            owner.advance(steps)

    @property
    def keeps_position(self) -> bool:
        """Whether a pass can go on in the middle of an epoch: its batch sampler or its dataset knows the position."""
        return self._position_owner() is not None

    def state_dict(self) -> dict:
        """Returns the position in the epoch: of the batch sampler, or of a :class:`TableDataset`.

        Raises:
            TypeError: neither keeps one; a :class:`fusedtrain.train.EpochSampler` as ``batch_sampler`` does.
        """
        return self._need_position().state_dict(**self._workers_of_order())

    def load_state_dict(self, state: dict) -> None:
        """Lets the next pass continue where :meth:`state_dict` was called."""
        self._need_position().load_state_dict(state, **self._workers_of_order())

    def _position_owner(self):
        return next((o for o in (self.batch_sampler, self.dataset) if hasattr(o, "advance")), None)

    def _need_position(self):
        owner = self._position_owner()
        if owner is None:
            raise TypeError(
                "to continue in the middle of an epoch, pass batch_sampler=fusedtrain.train.EpochSampler(...)"
            )
        return owner

    def _workers_of_order(self) -> dict:
        # The order of an iterable dataset depends on who takes which part; a sampler's does not.
        if not isinstance(self.dataset, IterableDataset):
            return {}
        return {"workers": max(self.num_workers, 1), "batch_size": self.batch_size, "drop_last": self.drop_last}

    def _checked(self, batches: _BaseDataLoaderIter) -> Iterator:
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except KeyboardInterrupt:
                self._end(batches)
                raise
            except (RuntimeError, OSError, EOFError) as error:
                self._raise(error, batches)
            try:
                for failure in batch.failures:
                    self._count(failure)
            except faults.SampleError:
                self._end(batches)
                raise
            if batch.data is not None:
                yield batch.data
            else:  # the loop never sees this batch, but it is used up
                self.advance()

    def _raise(self, error: Exception, batches: _BaseDataLoaderIter | None) -> NoReturn:
        """Ends the pass with what is known of an error of torch's."""
        known = getattr(batches, "_workers", []), self._guarded, self.timeout
        try:
            found = faults.worker_error(error, *known)
        except RuntimeError as noticed:  # torch's handler tells of a death whenever the system does
            found = faults.worker_error(noticed, *known)
        self._end(batches)
        if found is error:
            raise error
        raise found from error

    def _end(self, batches: _BaseDataLoaderIter | None) -> None:
        """Ends the workers, persistent ones too: the next pass starts new ones.

        Else they live as long as the error, and what another loader forks meanwhile prints that it cannot end them.
        """
        self._iterator = None
        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()

    def _count(self, failure: faults.Failure) -> None:
        self.skipped[failure.name] = failure.reason
        if len(self.skipped) <= self.max_skipped:
            return
        limit = f" (one more than max_skipped={self.max_skipped})" if self.max_skipped else ""
        error = faults.SampleError(f"{failure.name} cannot be read{limit}: {failure.reason}")
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(failure.trace)
        raise error


def loader(
    dataset,
    batch_size: int | None = 1,
    *,
    shuffle: bool | None = None,
    sampler=None,
    batch_sampler=None,
    num_workers: int | str = "auto",
    prefetch_factor: int | str = "auto",
    pin_memory: bool | str = "auto",
    persistent_workers: bool | str = "auto",
    max_skipped: int = 0,
    remember: bool = True,
    **options,
) -> Loader:
    """Returns a DataLoader that fits the dataset and the machine.

    Args:
        dataset: map-style or iterable.
        batch_size, shuffle, sampler, batch_sampler: as of :class:`torch.utils.data.DataLoader`.
        num_workers: processes that load; "auto" measures: see :mod:`fusedtrain.data.workers`.
        prefetch_factor: batches that each worker prepares ahead; "auto" takes 2, or 4 where batches take unequally
            long, and fewer where they would not fit into memory.
        pin_memory: page-locked batches, for copies that overlap; "auto": where there is a GPU.
        persistent_workers: keep the workers from one pass to the next; "auto": unless the dataset has a ``set_epoch``
            that only new workers would see.
        max_skipped: so many samples that raise are left out and counted in ``loader.skipped``, their batches being
            shorter; one more raises SampleError. 0 raises at the first.
        remember: use what an earlier run measured for this machine and dataset; False measures again.
        options: any other argument of DataLoader.

    Raises:
        ValueError: an argument makes no sense.
        SampleError: while iterating: a sample cannot be read; the message holds its name.
        WorkerError: while iterating: a worker died or timed out; the message holds the sample that it was at.

    Cost: "auto" measures 2 to 5 s, once per machine and dataset. Naming samples costs below a microsecond each.
    """
    _check(dataset, batch_size, num_workers, prefetch_factor, pin_memory, persistent_workers, max_skipped)
    batch_size = batch_size and int(batch_size)  # a number of NumPy's would not be remembered with the plan
    num_workers = num_workers if num_workers == "auto" else int(num_workers)
    found = None
    # A dataset that is told of the epoch has to reach its workers anew, unless they share what it is told.
    stay = getattr(dataset, "epoch_is_shared", False) or not hasattr(dataset, "set_epoch")
    if num_workers == "auto":
        size = batch_size if batch_sampler is None else getattr(batch_sampler, "batch_size", 32)
        context = options.get("multiprocessing_context")
        if context is not None and not isinstance(context, str):
            context = context.get_start_method()
        found = workers.plan(
            dataset,
            size,
            options.get("collate_fn"),
            context,
            worker_init_fn=options.get("worker_init_fn"),
            persistent=stay if persistent_workers == "auto" else persistent_workers,
            remember=remember,
        )
        num_workers = found.num_workers
    if num_workers == 0:
        prefetch_factor, persistent_workers = None, False
    elif prefetch_factor == "auto":
        prefetch_factor = found.prefetch_factor if found is not None else 2
    if persistent_workers == "auto":
        persistent_workers = stay
    if pin_memory == "auto":
        pin_memory = torch.cuda.is_available()
    if num_workers == 0:  # torch refuses what is for workers
        options.pop("multiprocessing_context", None)
        options.pop("timeout", None)
    return Loader(
        dataset,
        batch_size=batch_size,
        shuffle=shuffle,
        sampler=sampler,
        batch_sampler=batch_sampler,
        max_skipped=max_skipped,
        plan=found,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        pin_memory=pin_memory,
        persistent_workers=persistent_workers,
        **options,
    )


def _is_integer(value) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _check(dataset, batch_size, num_workers, prefetch_factor, pin_memory, persistent_workers, max_skipped) -> None:
    rows = getattr(dataset, "batch_size", None) if hasattr(dataset, "begin_pass") else None
    if rows is not None and batch_size is not None:  # else length and position would be those of rows
        raise ValueError(f"the dataset gives batches, of {rows} rows: pass batch_size=None, got {batch_size}")
    if not _is_integer(max_skipped) or max_skipped < 0:
        raise ValueError(f"max_skipped must be an integer of at least 0, got {max_skipped!r}")
    if max_skipped and isinstance(dataset, IterableDataset):
        raise ValueError("max_skipped needs a dataset with indices: an iterable one cannot go on after an error")
    if batch_size is not None and (not _is_integer(batch_size) or batch_size < 1):
        raise ValueError(f"batch_size must be None or an integer of at least 1, got {batch_size!r}")
    for name, value, least in (("num_workers", num_workers, 0), ("prefetch_factor", prefetch_factor, 1)):
        if value != "auto" and (not _is_integer(value) or value < least):
            raise ValueError(f'{name} must be "auto" or an integer of at least {least}, got {value!r}')
    for name, value in {"pin_memory": pin_memory, "persistent_workers": persistent_workers}.items():
        if value not in (True, False, "auto"):
            raise ValueError(f'{name} must be "auto", True or False, got {value!r}')
    if num_workers == 0 and (prefetch_factor != "auto" or persistent_workers is True):
        raise ValueError("prefetch_factor and persistent_workers=True need num_workers of at least 1, got 0")

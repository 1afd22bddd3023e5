"""Samples that cannot be read and workers that die: errors that name the sample, or samples left out and counted."""

import multiprocessing
import operator
import re
import signal
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection

from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate, default_convert, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

GRACE = 5.0  # seconds in which a worker that closed its connections has ended


class SampleError(RuntimeError):
    """A sample cannot be read; the message names it and gives the reason."""


class WorkerError(RuntimeError):
    """A worker process died or does not answer; the message names the sample that it was at."""


def sample_name(dataset, index) -> str:
    """Returns what a user knows a sample by: its file where the dataset tells, else its index.

    Asks ``dataset.sample_name(index)``, the ``samples`` of torchvision's folders, and what a Subset, a ConcatDataset or
    another wrapper with the attribute ``dataset`` stands on.
    """
    if hasattr(dataset, "sample_name"):
        return f"sample {index} ({dataset.sample_name(index)})"
    if isinstance(dataset, Subset):
        return sample_name(dataset.dataset, dataset.indices[index])
    if isinstance(dataset, ConcatDataset):
        part = next(i for i, end in enumerate(dataset.cumulative_sizes) if index < end)
        return sample_name(dataset.datasets[part], index - (dataset.cumulative_sizes[part - 1] if part else 0))
    samples = getattr(dataset, "samples", None)
    if isinstance(samples, list) and samples and isinstance(samples[0], tuple) and isinstance(samples[0][0], str):
        return f"sample {index} ({samples[index][0]})"
    inner = getattr(dataset, "dataset", None)
    return f"sample {index}" if inner is None else sample_name(inner, index)


@dataclass(frozen=True)
class Failure:
    """A sample that raised: travels in the place of the sample."""

    name: str
    reason: str
    trace: str


@dataclass
class Checked:
    """A batch on its way from a worker, beside what failed in it; ``data`` is None where nothing was left."""

    data: object
    failures: list[Failure] = field(default_factory=list)

    def pin_memory(self):
        return Checked(pin_memory(self.data), self.failures)


_OWN = ("_dataset", "_at")  # attributes of the wrapper itself


class Guarded(Dataset):
    """A dataset that gives a :class:`Failure` where a sample raises, and leaves a trace of where each worker is."""

    def __init__(self, dataset, workers: int):
        self._dataset = dataset
        # Plain shared memory, written with one store per sample; read by the main process after a worker has died.
        self._at = multiprocessing.RawArray("q", [-1] * max(workers, 1))

    def __reduce_ex__(self, protocol):
        if multiprocessing.context.get_spawning_popen() is None:  # a copy, which shares no memory with this one
            return Guarded, (self._dataset, len(self._at))
        return super().__reduce_ex__(protocol)

    def __getattr__(self, name: str):
        if name.startswith("__") or name in _OWN:
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:  # such as of a worker_init_fn that opens a file: get_worker_info().dataset is this object
            setattr(self._dataset, name, value)

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator:
        return iter(self._dataset)  # else without end: an index beyond it gives a Failure too

    def __getitem__(self, index):
        try:
            self._note(operator.index(index))
        except TypeError:  # a key, or the indices of a batch
            self._note(-1)
        try:
            return self._dataset[index]
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            try:
                name = sample_name(self._dataset, index)
            except Exception:  # an index that does not exist has no name either
                name = f"sample {index}"
            return Failure(name, reason, traceback.format_exc())

    def _note(self, at: int) -> None:
        info = get_worker_info()
        self._at[(info.id if info else 0) % len(self._at)] = at  # a loader may run in the worker of another

    def __getitems__(self, indices: list) -> list:
        fetch = getattr(self._dataset, "__getitems__", None)
        if fetch is not None and not _goes_one_by_one(self._dataset):
            self._note(-1)
            try:
                return fetch(indices)
            except Exception:  # which one it was, the samples tell one by one
                pass
        return [self[index] for index in indices]

    def whereabouts(self, workers: list[int]) -> str:
        """Returns at which samples the workers are, or were when they died."""
        at = [(worker, self._at[worker]) for worker in workers if self._at[worker] >= 0]
        return "; ".join(f"worker {worker} was at {sample_name(self._dataset, index)}" for worker, index in at)


def _goes_one_by_one(dataset) -> bool:
    """Whether a dataset, though a Subset or SeededDataset, which take indices at once, has them read one by one in the
    end."""
    while isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        dataset = dataset.dataset
    alone = getattr(dataset, "one_by_one_in_workers", False) and get_worker_info() is not None
    return alone or not hasattr(dataset, "__getitems__")


class Collate:
    """Makes a batch of the samples that did not fail."""

    def __init__(self, collate_fn, batched: bool):
        self.collate_fn, self.batched = collate_fn or (default_collate if batched else default_convert), batched

    def __call__(self, samples):
        if not self.batched:
            return Checked(None, [samples]) if isinstance(samples, Failure) else Checked(self.collate_fn(samples))
        if not isinstance(samples, list):  # a batch that the dataset has made at once
            return Checked(self.collate_fn(samples))
        failures = [sample for sample in samples if isinstance(sample, Failure)]
        good = [sample for sample in samples if not isinstance(sample, Failure)] if failures else samples
        return Checked(self.collate_fn(good) if good else None, failures)


_HINTS = {
    "SIGKILL": "; the system kills so when memory runs out: try fewer workers or a smaller prefetch_factor",
    "SIGBUS": "; shared memory ran out (df /dev/shm): try fewer workers or a smaller prefetch_factor",
}
_PIDS = re.compile(r"\(pids?(?:\(s\))? ([\d, ]+)\)")


def worker_error(
    error: Exception, processes: Sequence = (), guarded: Guarded | None = None, timeout: float = 0.0
) -> Exception:
    """Returns a :class:`WorkerError` for what a DataLoader raised when a worker died or timed out; else ``error``."""
    message = str(error).partition("\n")[0]
    found = _PIDS.search(message)
    if isinstance(error, (ConnectionError, EOFError)) and processes and not message.startswith("Caught"):
        # It died while it handed a batch over, before torch noticed; now torch may.
        try:
            dead = connection.wait([process.sentinel for process in processes], GRACE)
        except RuntimeError as noticed:
            return worker_error(noticed, processes, guarded, timeout)
        suspects = [i for i, process in enumerate(processes) if process.sentinel in dead]
        if not suspects:
            return error
        message, hint = _death([processes[i] for i in suspects], "a worker process ended")
    elif found:
        pids = {int(pid) for pid in found[1].split(",")}
        suspects = [i for i, process in enumerate(processes) if process.pid in pids]
        message, hint = _death([processes[i] for i in suspects], message)
    elif message.startswith("DataLoader timed out"):
        suspects = list(range(len(processes)))
        message, hint = f"no batch came within timeout={timeout:g} s", ""
    else:
        return error
    where = guarded.whereabouts(suspects) if guarded is not None else ""
    return WorkerError(f"{message}{': ' + where if where else ''}{hint}")


def _death(processes: list, message: str) -> tuple[str, str]:
    """Returns how the workers ended, and what to do where that is known."""
    for process in processes:
        process.join(5)
    codes = {process.exitcode for process in processes} - {None, 0}
    if not codes:  # of another loader, of whose workers torch's handler tells here too
        return message.rstrip(". "), _HINTS["SIGKILL"] if "signal: Killed" in message else ""
    code = min(codes)  # a signal, if there was one
    if code > 0:
        return f"a worker process ended with exit code {code}", ""
    name = signal.Signals(-code).name
    return f"a worker process was killed by {name}", _HINTS.get(name, "")

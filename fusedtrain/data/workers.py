"""How many worker processes a loader needs, from measurements.

One worker alone tells how long a sample takes on the clock (``wall``) and of the CPU (``cpu``). From these follows
what ``w`` workers on ``cores`` cores can deliver, ``min(w / wall, cores / cpu)``: a loader that waits for a disk or a
network gains from many more workers than cores, one that decodes never does. Two or three counts are then measured,
and the smallest that comes within a tenth of the best is taken.
"""

import hashlib
import json
import math
import os
import platform
import re
import time
import warnings
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import NamedTuple

import torch
from torch import multiprocessing
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from fusedtrain import _files
from fusedtrain.data import faults

MOST = 64  # workers; beyond, starting them costs more than they bring
SECONDS = 1.0  # of measuring one worker, and about that per confirmed point
CHUNK_SECONDS = 0.05  # batches are measured in pieces of this length, so that slow samples are seen soon


@dataclass(frozen=True)
class Plan:
    """What :func:`plan` decided and from what.

    Args:
        num_workers, prefetch_factor: for the DataLoader; ``prefetch_factor`` None without workers.
        reason: in one sentence.
        wall, cpu: seconds per sample of one worker, on the clock (without waiting for a core) and of the CPU.
        sample_bytes: of the tensors of one sample.
        cores: that this process may use.
        points: samples per second, as measured, by number of workers.
    """

    num_workers: int
    prefetch_factor: int | None
    reason: str
    wall: float = 0.0
    cpu: float = 0.0
    sample_bytes: int = 0
    cores: int = 0
    points: dict[int, float] = field(default_factory=dict)


class _One(NamedTuple):
    """One worker, measured: per sample, and how uneven its batches are (90th percentile over median)."""

    wall: float
    cpu: float
    sample_bytes: int
    uneven: float


def cores() -> int:
    """Returns how many cores this process may use: its affinity, its cgroup's quota, its share beside local ranks."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        if quota != "max":
            count = min(count, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass
    return max(1, count // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def plan(
    dataset, batch_size: int | None, collate_fn=None, context: str | None = None, *, remember: bool = True
) -> Plan:
    """Returns how many workers and batches ahead suit a dataset on this machine.

    Args:
        dataset: map-style or iterable.
        batch_size: samples per batch; None where the dataset gives batches.
        collate_fn, context: as the DataLoader will have them.
        remember: take what was found earlier for the same key; False measures anew. The result is kept either way, in
            the cache folder (FUSEDTRAIN_CACHE, or ~/.cache/fusedtrain) under ``loader/``.

    The key is: host name, cores, torch version, start method, batch size, collate function, and the dataset: its class,
    its length and its repr; the file holds the key in plain text.

    Cost: 2 to 5 s once; processes that ask for the same key wait for the first.
    """
    key = describe(dataset, batch_size, collate_fn, context)
    path = _files.cache_folder("loader") / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}.json"
    with _files.locked(path.with_suffix(".lock")):
        known = _files.read_json(path) if remember else None
        if known is not None and known.get("key") == key:
            found = known["plan"]
            return Plan(**{**found, "points": {int(w): rate for w, rate in found["points"].items()}})
        found = _measure(dataset, batch_size, collate_fn, context)
        _files.write_json(path, {"key": key, "plan": asdict(found)})
    return found


def describe(dataset, batch_size, collate_fn, context) -> dict:
    """Returns the key under which a plan is remembered."""
    try:
        length = len(dataset)
    except TypeError:
        length = None
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(dataset))[:1000]  # addresses differ from run to run
    root = getattr(dataset, "root", None)
    return {
        "host": platform.node(),
        "cores": cores(),
        "torch": torch.__version__,
        "start_method": context or multiprocessing.get_start_method(),
        "batch_size": batch_size,
        "collate_fn": getattr(collate_fn, "__qualname__", type(collate_fn).__name__),
        "dataset": [type(dataset).__module__, type(dataset).__qualname__, length, str(root), text],
    }


def _measure(dataset, batch_size, collate_fn, context) -> Plan:
    if not isinstance(dataset, IterableDataset) and len(dataset) == 0:
        return Plan(0, None, "the dataset is empty", cores=cores())
    one = _one_worker(dataset, batch_size, collate_fn, context)
    chunk = batch_size and max(1, min(batch_size, int(CHUNK_SECONDS / one.wall)))
    candidates = _candidates(one, cores())
    points = {w: _rate(dataset, chunk, collate_fn, context, w, one) for w in candidates}
    best = max(points.values())
    chosen = next(w for w in sorted(points) if points[w] >= 0.9 * best)
    prefetch = 4 if one.uneven > 2 else 2
    workers, prefetch, note = _fit_memory(chosen, prefetch, one.sample_bytes * (batch_size or 1))
    share = min(1.0, one.cpu / one.wall)
    reason = (
        f"one worker takes {1e3 * one.wall:.3g} ms per sample, {share:.0%} of it on a core; samples per second: "
        + ", ".join(f"{rate:.4g} with {w}" for w, rate in points.items())
        + note
    )
    return Plan(workers, prefetch if workers else None, reason, one.wall, one.cpu, one.sample_bytes, cores(), points)


def _candidates(one: _One, cores: int) -> list[int]:
    """Two or three worker counts around where ``min(w / wall, cores / cpu)`` stops growing."""
    saturated = math.ceil(cores * one.wall / max(one.cpu, 1e-9) - 0.25)
    saturated = cores if one.cpu > 0.8 * one.wall else min(MOST, max(1, saturated))
    found = {saturated, max(1, saturated // 2)}
    if one.wall < 2e-4:  # sending a batch to another process may cost more than making it
        found.add(0)
    return sorted(found)


def _fit_memory(workers: int, prefetch: int, batch_bytes: int) -> tuple[int, int, str]:
    """Fewer batches ahead, then fewer workers, until those in flight fit into a quarter of the free memory."""
    limit = _free_memory() // 4
    if os.path.isdir("/dev/shm"):  # where torch passes batches between processes
        shm = os.statvfs("/dev/shm")
        limit = min(limit, shm.f_bavail * shm.f_frsize // 2)
    wanted = (workers, prefetch)
    while workers * prefetch * batch_bytes > limit and (prefetch > 1 or workers > 1):
        prefetch, workers = (prefetch - 1, workers) if prefetch > 1 else (prefetch, workers - 1)
    if (workers, prefetch) == wanted:
        return workers, prefetch, ""
    note = (
        f"; {wanted[0]} workers with {wanted[1]} batches each would not fit into {limit / 2**20:.0f} MiB of free memory"
    )
    return workers, prefetch, note


def _free_memory() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 2**62


def _one_worker(dataset, batch_size, collate_fn, context) -> _One:
    """Measures one worker in a process of its own, as it will run: no state of this process changes."""
    processes = multiprocessing.get_context(context)
    here, there = processes.Pipe(duplex=False)
    worker = processes.Process(target=_work, args=(dataset, batch_size, collate_fn, there), daemon=True)
    worker.start()
    there.close()
    try:
        result = here.recv()
    except EOFError:
        worker.join()
        raise faults.WorkerError(
            f"the worker that was measured died (exit code {worker.exitcode}); num_workers=0 shows why in this process"
        ) from None
    worker.join()
    if isinstance(result, str):
        raise faults.SampleError(result)
    return result


def _work(dataset, batch_size, collate_fn, results) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        results.send(_timed(dataset, batch_size, collate_fn))
    except Exception as error:
        results.send(f"while one worker was measured: {type(error).__name__}: {error}")


def _timed(dataset, batch_size, collate_fn) -> _One:
    samples = _samples(dataset, batch_size, collate_fn)
    walls, cpus, counts, size = [], [], [], 0
    start = time.perf_counter()
    while time.perf_counter() - start < SECONDS or len(walls) < 3:
        wall, cpu, waited = time.perf_counter(), time.process_time(), _waited()
        item = next(samples, None)
        if item is None:
            break
        count, batch = item
        walls.append(max(time.perf_counter() - wall - (_waited() - waited), 1e-7))
        cpus.append(time.process_time() - cpu)
        counts.append(count)
        size = max(size, sum(t.nbytes for t in tree_leaves(batch) if isinstance(t, torch.Tensor)) // count)
    if not walls:
        raise ValueError("no sample could be read")
    if len(walls) > 1:  # the first opens files and imports modules
        walls, cpus, counts = walls[1:], cpus[1:], counts[1:]
    each = sorted(wall / count for wall, count in zip(walls, counts))
    uneven = each[int(0.9 * (len(each) - 1))] / median(each)
    return _One(sum(walls) / sum(counts), sum(cpus) / sum(counts), size, uneven)


def _samples(dataset, batch_size, collate_fn):
    """Gives (number of samples, collated) in small pieces: drawn at random, or as an iterable dataset gives them."""
    chunk = min(batch_size or 1, 4)
    collate = faults.Collate(collate_fn, batch_size is not None)
    if isinstance(dataset, IterableDataset):
        iterator = iter(dataset)
        while items := [item for _, item in zip(range(chunk), iterator)]:
            yield len(items), collate(items if batch_size is not None else items[0]).data
        return
    guarded = faults.Guarded(dataset, 1)
    for indices in _Endless(len(dataset), chunk, seed=0):
        if batch_size is None:
            batch, good = collate(guarded[indices[0]]), 1
        else:
            batch = collate(guarded.__getitems__(indices))
            good = len(indices) - len(batch.failures)
        if batch.data is not None and good:
            yield good, batch.data
        elif len(dataset) <= chunk:
            return


def _waited() -> float:
    """Returns the seconds for which this thread was ready to run and had no core; 0 where the system does not tell."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


class _Endless:
    """A batch sampler of random chunks, without end."""

    def __init__(self, length: int, chunk: int, seed: int):
        self.length, self.chunk, self.seed = length, chunk, seed

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            for indices in torch.randperm(self.length, generator=generator).split(self.chunk):
                yield indices.tolist()


def _stream(dataset, chunk, collate_fn, context, workers: int) -> DataLoader:
    options = {"num_workers": workers, "multiprocessing_context": context if workers else None}
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, chunk, collate_fn=faults.Collate(collate_fn, chunk is not None), **options)
    # Another order each time: what an earlier point read lies in the system's cache.
    sampler = _Endless(len(dataset), chunk or 1, seed=workers)
    collate = faults.Collate(collate_fn, True)
    return DataLoader(faults.Guarded(dataset, workers), batch_sampler=sampler, collate_fn=collate, **options)


def _rate(dataset, chunk, collate_fn, context, workers: int, one: _One) -> float:
    """Measures the samples per second of so many workers, after all have begun."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "This DataLoader will create"
        )  # more workers than cores: that is the question
        iterator = iter(_stream(dataset, chunk, collate_fn, context, workers))
    seconds = min(10.0, max(0.7 * SECONDS, 6 * one.wall * (chunk or 1)))
    warm_up = max(2, 2 * workers)  # batches that may have been made before the clock started
    count, start, first = 0, time.perf_counter(), time.perf_counter()
    for i, batch in enumerate(iterator):
        if i < warm_up:
            start = time.perf_counter()
            if start - first > 4 * seconds:
                break
            continue
        count += (chunk or 1) - len(batch.failures)
        if time.perf_counter() - start > seconds:
            break
    elapsed = time.perf_counter() - (start if count else first)
    return (count or (i + 1) * (chunk or 1)) / elapsed

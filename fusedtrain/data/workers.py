"""How many worker processes a loader needs, from measurements.

One worker alone tells how long a sample takes on the clock (``wall``) and of the CPU (``cpu``). From these follows
what ``w`` workers on ``cores`` cores can deliver, ``min(w / wall, cores / cpu)``: a loader that waits for a disk or a
network gains from many more workers than cores, one that decodes never does. Two or three counts are then measured,
with the time that starting them takes, and the smallest whose pass over the data comes within a tenth of the fastest is
taken: a short pass does not pay for starting many workers. Workers that stay from pass to pass are started once.
"""

import contextlib
import hashlib
import json
import math
import os
import platform
import re
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import multiprocessing
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.worker import WorkerInfo

from fusedtrain import _files
from fusedtrain._waits import Waits
from fusedtrain.data import faults

MOST = 64  # workers; beyond, starting them costs more than they bring
SECONDS = 1.0  # of measuring one worker, and about that per confirmed point
PASSES = 10  # that workers which stay from pass to pass are taken to serve
CHUNK_SECONDS = 0.05  # batches are measured in pieces of this length, so that slow samples are seen soon
HOPELESS = 64  # samples that all fail, after which no more are tried
TRANSFORMS = ("transform", "target_transform", "transforms", "loader")  # attributes of datasets
QUOTAS = (  # of the cgroup: as "quota period", of its two versions
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)


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
        starts: seconds until so many workers gave their first batch.
    """

    num_workers: int
    prefetch_factor: int | None
    reason: str
    wall: float = 0.0
    cpu: float = 0.0
    sample_bytes: int = 0
    cores: int = 0
    points: dict[int, float] = field(default_factory=dict)
    starts: dict[int, float] = field(default_factory=dict)


class _One(NamedTuple):
    """One worker, measured: per sample, how uneven its batches are (90th percentile over median), and its start."""

    wall: float
    cpu: float
    sample_bytes: int
    uneven: float
    start: float = 0.0


def cores() -> int:
    """Returns how many cores this process may use: its affinity, its cgroup's quota, its share beside local ranks."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in QUOTAS:
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join(Path(file).read_text() for file in files).split()
            if quota not in ("max", "-1"):
                count = min(count, math.ceil(int(quota) / int(period)))
    return max(1, count // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def plan(
    dataset,
    batch_size: int | None,
    collate_fn=None,
    context: str | None = None,
    *,
    worker_init_fn: Callable[[int], None] | None = None,
    persistent: bool = True,
    remember: bool = True,
    progress: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Returns how many workers and batches ahead suit a dataset on this machine.

    Args:
        dataset: map-style or iterable.
        batch_size: samples per batch; None where the dataset gives batches.
        collate_fn, context, worker_init_fn: as the DataLoader will have them.
        persistent: whether the workers stay from pass to pass; otherwise each pass pays for their start.
        remember: take what was found earlier for the same key, by a call that was killed as far as it came; False
            measures anew. The result is kept either way, in the cache folder (FUSEDTRAIN_CACHE, or fusedtrain/ in
            XDG_CACHE_HOME or ~/.cache) under ``loader/``.
        progress: is called with a line per measurement.

    The key is: host name, cores, torch version, start method, batch size, collate function, whether workers stay, and
    the dataset: its class, its length, its repr, and a digest of its code and its transforms as far as they tell one
    from another; the file holds the key in plain text.

    Cost: 2 to 5 s once; processes that ask for the same key wait for the first. Random numbers of this process are
    left alone, and so is the dataset in it.
    """
    key = describe(dataset, batch_size, collate_fn, context) | {"persistent": persistent}
    with contextlib.ExitStack() as stack:
        path = None
        try:
            folder = _files.cache_folder("loader")
            path = folder / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}.json"
            stack.enter_context(_files.locked(path.with_suffix(".lock")))
        except OSError as error:
            _warn_of(error)
            path = None
        if path and not remember:
            path.unlink(missing_ok=True)
        known = _files.read_json(path) if path else None
        if known is None or known.get("key") != key:
            known = {"key": key, "one": None, "points": {}}
        if "plan" not in known:
            measured = _Measured(path, known, progress)
            with same_random_numbers():
                plan = _measure(dataset, batch_size, collate_fn, context, persistent, measured, worker_init_fn)
                known["plan"] = asdict(plan)
            if known["one"] is not None:  # a stream that gave nothing may give something the next time
                measured.keep()
    found = known["plan"]
    return Plan(**found | {name: {int(w): value for w, value in found[name].items()} for name in ("points", "starts")})


def _warn_of(error: OSError) -> None:
    warnings.warn(f"what is measured is not remembered: {error}; FUSEDTRAIN_CACHE names a folder", stacklevel=3)


@contextlib.contextmanager
def same_random_numbers():
    """A DataLoader draws one when its workers start: a run must not depend on whether they were measured in it."""
    from fusedtrain.train.rng import cpu_state, set_rng_state

    state = cpu_state()
    try:
        yield
    finally:
        set_rng_state(state)


@dataclass
class _Measured:
    """What was measured so far, kept in the plan's file: after a kill the same call goes on from there."""

    path: Path | None
    known: dict
    progress: Callable[[str], None]

    def keep(self) -> None:
        if self.path is None:
            return
        try:
            _files.write_json(self.path, self.known)
        except OSError as error:  # such as a full disk
            _warn_of(error)
            self.path = None

    def one(self, measure: Callable[[], _One | None]) -> _One | None:
        if self.known["one"] is None:
            found = measure()
            if found is None:
                return None
            self.known["one"] = list(found)
            self.keep()
        one = _One(*self.known["one"])
        self.progress(f"one worker: {1e3 * one.wall:.3g} ms per sample, {1e3 * one.cpu:.3g} ms of it on a core")
        return one

    def point(self, workers: int, measure: Callable[[], tuple[float, float]]) -> tuple[float, float]:
        """Returns samples per second and the seconds to start."""
        points = self.known["points"]
        if str(workers) not in points:
            points[str(workers)] = list(measure())
            self.keep()
        rate, start = points[str(workers)]
        self.progress(f"{workers:>6} workers: {rate:.4g} samples per second, {start:.2g} s to start")
        return rate, start


def describe(dataset, batch_size, collate_fn, context) -> dict:
    """Returns the key under which a plan is remembered."""
    key = {
        "host": platform.node(),
        "cores": cores(),
        "torch": torch.__version__,
        "start_method": context or multiprocessing.get_start_method(),
        "batch_size": batch_size,
        "collate_fn": getattr(collate_fn, "__qualname__", type(collate_fn).__name__),
        "dataset": _describe(dataset),
        "collate_code": _digest([collate_fn]),
    }
    inner = [_describe(inside) for inside in _inside(dataset)]
    return key | ({"inside": inner} if inner else {})


def _describe(dataset) -> list:
    try:
        length = len(dataset)
    except TypeError:
        length = None
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(dataset))[:1000]  # addresses differ from run to run
    root = getattr(dataset, "root", None)
    return [type(dataset).__module__, type(dataset).__qualname__, length, str(root), text, _digest(_code(dataset))]


def _code(dataset) -> list:
    """Returns what a dataset calls for a sample: the functions of its classes, and its transforms."""
    own = [vars(kind).values() for kind in type(dataset).__mro__ if kind.__module__.partition(".")[0] != "torch"]
    functions = [getattr(value, "__func__", value) for values in own for value in values]  # of a staticmethod
    functions = [function for function in functions if isinstance(function, types.FunctionType)]
    return functions + [getattr(dataset, name, None) for name in (*TRANSFORMS, "then")]


def _digest(functions: list) -> str:
    from fusedtrain.data.cache import _identity

    found = hashlib.sha256()
    for function in functions:
        with contextlib.suppress(Exception):  # one that has no name, or a repr that fails, cannot be told from another
            found.update(_identity(function).encode(errors="surrogateescape"))
    return found.hexdigest()[:16]


def _inside(dataset, depth: int = 8) -> list:
    """Returns the datasets that a dataset stands on, such as a Subset or a ConcatDataset: its own repr may not tell."""
    own = getattr(dataset, "__dict__", {})
    parts = [own["dataset"]] if "dataset" in own else own.get("datasets", [])
    parts = [part for part in parts[:8] if hasattr(part, "__getitem__")] if isinstance(parts, list) and depth else []
    return [found for part in parts for found in (part, *_inside(part, depth - 1))]


def _measure(
    dataset, batch_size, collate_fn, context, persistent: bool, measured: _Measured, init: Callable | None
) -> Plan:
    samples = _length(dataset)
    one = measured.one(lambda: _one_worker(dataset, batch_size, collate_fn, context, init)) if samples else None
    if one is None:
        return Plan(0, None, "the dataset is empty", cores=cores())
    passes = PASSES if persistent else 1
    chunk = batch_size and max(1, min(batch_size, int(CHUNK_SECONDS / one.wall)))
    wanted = _candidates(one, cores(), samples * passes)
    most = _room() // max(1, one.sample_bytes * (chunk or 1) * 2)  # of workers, which make two batches ahead
    candidates = sorted({min(w, most) for w in wanted})
    points, starts = {}, {}
    for w in candidates:
        points[w], starts[w] = measured.point(w, lambda w=w: _rate(dataset, chunk, collate_fn, context, w, one, init))
    chosen = _choose(points, starts, samples * passes)
    prefetch = 4 if one.uneven > 2 else 2
    workers, prefetch, note = _fit_memory(chosen, prefetch, one.sample_bytes * (batch_size or 1))
    if candidates[-1] < wanted[-1] and not note:
        note = f"; {wanted[-1]} workers would not fit into {_room() / 2**20:.0f} MiB of free memory"
    share = min(1.0, one.cpu / one.wall)
    reason = (
        f"one worker takes {1e3 * one.wall:.3g} ms per sample, {share:.0%} of it on a core; samples per second: "
        + ", ".join(f"{rate:.4g} with {w}" for w, rate in points.items())
        + "; seconds to start: "
        + ", ".join(f"{seconds:.2g}" for seconds in starts.values())
        + note
    )
    prefetch = prefetch if workers else None
    return Plan(workers, prefetch, reason, one.wall, one.cpu, one.sample_bytes, cores(), points, starts)


def _length(dataset) -> float:
    """Returns the samples of a pass; infinity where the dataset does not tell."""
    try:
        return len(dataset)
    except TypeError:
        return math.inf


def _candidates(one: _One, cores: int, samples: float = math.inf) -> list[int]:
    """Two or three worker counts around where ``min(w / wall, cores / cpu)`` stops growing.

    ``w`` workers that start one after the other need about ``w start + samples wall / w`` for so many samples: more
    than ``sqrt(samples wall / start)`` of them cost more time than they save.
    """
    saturated = math.ceil(cores * one.wall / max(one.cpu, 1e-9) - 0.25)
    saturated = cores if one.cpu > 0.8 * one.wall else min(MOST, max(1, saturated))
    work = samples * one.wall
    if one.start > 0 and work < math.inf:
        saturated = min(saturated, max(1, math.ceil(math.sqrt(work / one.start))))
    found = {saturated, max(1, saturated // 2)}
    if one.wall < 2e-4 or work < 2 * one.start:  # sending a batch, or starting a worker, may cost more than making it
        found.add(0)
    return sorted(found)


def _choose(points: dict[int, float], starts: dict[int, float], samples: float) -> int:
    """Returns the smallest count that gives so many samples within a tenth of the shortest time, starting included."""
    if samples == math.inf:
        seconds = {w: 1 / rate for w, rate in points.items()}
    else:
        seconds = {w: starts[w] + samples / rate for w, rate in points.items()}
    return next(w for w in sorted(seconds) if 0.9 * seconds[w] <= min(seconds.values()))


def _fit_memory(workers: int, prefetch: int, batch_bytes: int) -> tuple[int, int, str]:
    """Fewer batches ahead, then fewer workers or none, until those in flight find room."""
    limit, wanted = _room(), (workers, prefetch)
    while workers * prefetch * batch_bytes > limit:
        prefetch, workers = (prefetch - 1, workers) if prefetch > 1 else (prefetch, workers - 1)
    if (workers, prefetch) == wanted:
        return workers, prefetch, ""
    note = (
        f"; {wanted[0]} workers with {wanted[1]} batches each would not fit into {limit / 2**20:.0f} MiB of free memory"
    )
    return workers, prefetch, note


def _room() -> int:
    """Returns the bytes that batches in flight may take: a quarter of the free memory."""
    room = _free_memory() // 4
    if os.path.isdir("/dev/shm"):  # where torch passes batches between processes
        shm = os.statvfs("/dev/shm")
        room = min(room, shm.f_bavail * shm.f_frsize // 2) if shm.f_blocks else room  # none: without a bound
    return room


def _free_memory() -> int:
    """Returns the bytes that can be had, files that the system keeps in memory included."""
    from fusedtrain.train.memory import available

    try:
        return available()
    except OSError:
        return 2**62


def _one_worker(dataset, batch_size, collate_fn, context, init) -> _One | None:
    """Measures one worker, as it will run; None where the dataset gives nothing."""
    result, start = _apart(context, _timed, dataset, batch_size, collate_fn, init)
    return result and result._replace(start=start)


def _apart(context, function, *args) -> tuple:
    """Calls a function in a process of its own: no state of this one changes, no file is opened in it that workers
    would share. Returns the result and the seconds until the process had begun."""
    processes = multiprocessing.get_context(context)
    here, there = processes.Pipe(duplex=False)
    worker = processes.Process(target=_work, args=(there, function, args), daemon=True)
    begin = time.perf_counter()
    worker.start()
    there.close()
    try:
        here.recv()
        start = time.perf_counter() - begin
        result = here.recv()
    except EOFError:
        worker.join()
        raise faults.WorkerError(
            f"the worker that was measured died (exit code {worker.exitcode}); num_workers=0 shows why in this process"
        ) from None
    worker.join()
    if isinstance(result, str):
        raise faults.SampleError(result)
    return result, start


def _work(results, function, args) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results.send("ready")
    try:
        results.send(function(*args))
    except Exception as error:
        results.send(f"while one worker was measured: {type(error).__name__}: {error}")


def _timed(dataset, batch_size, collate_fn, init) -> _One | None:
    if init is not None:
        torch.utils.data._utils.worker._worker_info = WorkerInfo(id=0, num_workers=1, seed=0, dataset=dataset)
        init(0)
    samples = _samples(dataset, batch_size, collate_fn)
    walls, cpus, counts, size, waits = [], [], [], 0, Waits()
    start = time.perf_counter()
    while time.perf_counter() - start < SECONDS or len(walls) < 3:
        begin, cpu = waits.start(), time.process_time()
        item = next(samples, None)
        if item is None:
            break
        count, batch = item
        walls.append(max(waits.seconds(begin), 1e-7))
        cpus.append(time.process_time() - cpu)
        counts.append(count)
        size = max(size, sum(t.nbytes for t in tree_leaves(batch) if isinstance(t, torch.Tensor)) // count)
    if not walls:
        return None
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
    guarded, failed, any_good = faults.Guarded(dataset, 1), 0, False
    for indices in _Endless(len(dataset), chunk, seed=0):
        if batch_size is None:
            batch = collate(guarded[indices[0]])
            good = 1 - len(batch.failures)
        else:
            batch = collate(guarded.__getitems__(indices))
            good = len(indices) - len(batch.failures)
        if batch.data is not None and good:
            any_good = True
            yield good, batch.data
        failed += len(batch.failures)
        if not any_good and failed >= min(len(dataset), HOPELESS):
            failure = batch.failures[0]
            raise ValueError(f"no sample could be read, of {failed}: {failure.name}: {failure.reason}")


class _Endless:
    """A batch sampler of random chunks, without end."""

    def __init__(self, length: int, chunk: int, seed: int):
        self.length, self.chunk, self.seed = length, chunk, seed

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            for indices in torch.randperm(self.length, generator=generator, device="cpu").split(self.chunk):
                yield indices.tolist()


def _stream(dataset, chunk, collate_fn, context, workers: int, init) -> DataLoader:
    options = {"num_workers": workers, "multiprocessing_context": context if workers else None, "worker_init_fn": init}
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, chunk, collate_fn=faults.Collate(collate_fn, chunk is not None), **options)
    # Another order each time: what an earlier point read lies in the system's cache.
    sampler = _Endless(len(dataset), chunk or 1, seed=workers)
    collate = faults.Collate(collate_fn, True)
    return DataLoader(faults.Guarded(dataset, workers), batch_sampler=sampler, collate_fn=collate, **options)


def _rate(dataset, chunk, collate_fn, context, workers: int, one: _One, init) -> tuple[float, float]:
    """Measures the samples per second of so many workers after all have begun, and the seconds their start took."""
    if not workers:
        return _apart(context, _rate_here, dataset, chunk, collate_fn, context, 0, one, None)[0]
    return _rate_here(dataset, chunk, collate_fn, context, workers, one, init)


def _rate_here(dataset, chunk, collate_fn, context, workers: int, one: _One, init) -> tuple[float, float]:
    begin = time.perf_counter()
    with warnings.catch_warnings():
        # More workers than cores: that is the question.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        iterator = iter(_stream(dataset, chunk, collate_fn, context, workers, init))
    seconds = min(10.0, max(0.7 * SECONDS, 6 * one.wall * (chunk or 1)))
    warm_up = max(2, 2 * workers)  # batches that may have been made before the clock started
    count, seen, start, first, begun = 0, 0, time.perf_counter(), time.perf_counter(), 0.0
    for i, batch in enumerate(iterator):
        if i == 0 and workers:
            begun = max(0.0, time.perf_counter() - begin - one.wall * (chunk or 1))
        good = (chunk or 1) - len(batch.failures)
        seen += good
        if i < warm_up:
            start = time.perf_counter()
            if start - first > 4 * seconds:
                break
            continue
        count += good
        if time.perf_counter() - start > seconds:
            break
    elapsed = time.perf_counter() - (start if count else first)
    return max(count or seen, 1e-9) / elapsed, begun

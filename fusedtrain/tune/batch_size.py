"""The largest batch that fits into memory, and the one that is fastest per sample."""

import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from fusedtrain import _processes
from fusedtrain.train.callbacks import Callbacks
from fusedtrain.train.errors import InputError
from fusedtrain.train.memory import available, private
from fusedtrain.tune.state import State
from fusedtrain.tune.target import Observer, Target, TuneError, end_with_parent, wait

WARM_UP = 2  # steps; the optimizer's state comes with the first, allocators settle in the second
WARM_UP_OF_GRAPHS = 6  # with torch.compile or CUDA graphs, which are made meanwhile
# What torch, its libraries and the C++ runtime say when an allocation fails.
OUT_OF_MEMORY = ("out of memory", "allocate memory", "bad_alloc", "could not create a primitive", "MemoryError")
# cuBLAS and cuDNN make their handles and choose among algorithms by what is left of a GPU.
OUT_OF_MEMORY += ("STATUS_ALLOC_FAILED", "STATUS_NOT_INITIALIZED", "unable to find an engine to execute")
# What the dynamic linker says of a library that a first step loads.
OUT_OF_MEMORY += ("failed to map segment", "cannot map zero-fill pages", "cannot change memory protections")
OUT_OF_MEMORY += ("activation_budget_gib",)  # of which activations would take more


def tune_batch_size(
    target: Target,
    *,
    smallest: int = 2,
    largest: int = 4096,
    memory: int | None = None,
    steps: int = 5,
    fresh: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> dict:
    """Finds the largest batch that fits and the fastest per sample.

    The size is doubled until a step does not fit, then halved in between down to a sixteenth. Each size runs in a
    process of its own, which may die of memory.

    Args:
        target: what is trained, on random images, by the steps of ``fusedtrain train`` on one process.
        smallest, largest: sizes to look between, of micro-batches where ``accumulate`` is more than 1.
        memory: bytes that the process may have, on a GPU its tensors; None allows nine tenths of what is free on a CPU
            (so that its end does not come from the system's choice of a victim), and all of a GPU.
        steps: timed ones, after two to warm up.
        fresh: measure again what an earlier run, killed or not, has measured.
        progress: is called with a line per size.

    Returns:
        ``largest``, ``fastest`` (the smallest size within 2 % of the best time per sample), ``limit`` (why nothing
        larger is known to fit), and ``trials``: size -> fits, seconds_per_sample, peak_bytes, reason.

    Raises:
        TuneError: a number is out of range, not even ``smallest`` fits, or a step fails for another reason than memory.
    """
    if not 1 <= smallest <= largest:
        raise TuneError(f"smallest and largest must be 1 or more and in order, got {smallest} and {largest}")
    if steps < 1 or (memory is not None and memory < 1):
        raise TuneError(f"steps and memory must be at least 1, got {steps} and {memory}")
    if memory is None and target.resolve_device().type == "cpu":
        # In quarters of a GiB: the free memory is never the same twice, and a search must find its results again.
        memory = max(1, int(0.9 * available() / 2**28)) * 2**28
    limits = {"smallest": smallest, "largest": largest, "steps": steps}
    state = State("batch-size", {**target.key(), **limits}, fresh=fresh)

    def fits(size: int) -> bool:
        known = state.get(size)
        # Known results hold for the memory they were found with: less that fits, more that does not.
        if known is None or (known["memory"] != memory and not _still_holds(known, memory)):
            known = _trial(target, size, steps, memory) | {"memory": memory}
            state.add(size, known)
        progress(_line(size, known))
        return known["fits"]

    best, bad = _bisect(fits, smallest, largest)
    if best is None:
        raise TuneError(f"a batch of {smallest} does not fit: {state.get(smallest)['reason']}")
    trials = {int(size): trial for size, trial in state.results.items()}
    good = {size: trial["seconds_per_sample"] for size, trial in trials.items() if trial["fits"] and size <= best}
    fastest = min(size for size, seconds in good.items() if seconds <= 1.02 * min(good.values()))
    limit = f"largest={largest} was asked for" if bad is None else f"{bad} does not fit: {trials[bad]['reason']}"
    return {"largest": best, "fastest": fastest, "limit": limit, "trials": dict(sorted(trials.items()))}


def _bisect(fits: Callable[[int], bool], smallest: int, largest: int) -> tuple[int | None, int | None]:
    """Returns the largest size found to fit, and the smallest found not to; None where there is none."""
    best, bad, size = None, None, smallest
    while bad is None and best != largest:
        if fits(size):
            best, size = size, min(2 * size, largest)
        else:
            bad = size
    while best is not None and bad is not None and bad - best > max(1, best // 16):
        middle = (best + bad) // 2
        best, bad = (middle, bad) if fits(middle) else (best, middle)
    return best, bad


def _still_holds(known: dict, memory: int | None) -> bool:
    if memory is None or known["memory"] is None:
        return False
    return memory >= known["memory"] if known["fits"] else memory <= known["memory"]


def _line(size: int, trial: dict) -> str:
    if not trial["fits"]:
        return f"{size:>6}  does not fit: {trial['reason']}"
    return f"{size:>6}  {1e3 * trial['seconds_per_sample']:.4g} ms per sample, {trial['peak_bytes'] / 2**20:,.0f} MiB"


def _trial(target: Target, size: int, steps: int, memory: int | None) -> dict:
    """Runs steps of one size in another process and returns what came of it."""
    context = _processes.context("fusedtrain.tune", "torch._dynamo")
    here, there = context.Pipe(duplex=False)
    arguments = (target, size, steps, memory, there, dict(os.environ))
    process = context.Process(target=_child, args=arguments, daemon=True)
    process.start()
    there.close()
    try:
        found = here.recv()
    except EOFError:
        found = None
    process.join()
    if found is not None and "error" in found:
        raise TuneError(f"a batch of {size}: {found['error']}")
    if found is not None:
        return found
    if process.exitcode > 0:
        raise TuneError(f"a batch of {size}: the process ended with exit code {process.exitcode}")
    return {"fits": False, "reason": f"the process was killed by {signal.Signals(-process.exitcode).name}"}


def _child(target: Target, size: int, steps: int, memory: int | None, results, variables: dict) -> None:
    _processes.take_over(variables)
    end_with_parent()
    try:
        importlib.import_module("torch._dynamo")  # by optimizers; cut short, an import may raise anything
        with contextlib.nullcontext() if memory is None else _within(memory, target.resolve_device()):
            found = _run(target, size, steps)
        results.send(found)
    except Exception as caught:
        # The check of the first batch passes on what the model says.
        error = caught.__cause__ if isinstance(caught, InputError) and caught.__cause__ else caught
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
            text in str(error) for text in OUT_OF_MEMORY
        ):
            said = "" if "memory" in reason.lower() else " (out of memory)"
            results.send({"fits": False, "reason": reason[:200] + said})
        else:
            results.send({"error": reason})


@contextlib.contextmanager
def _within(memory: int, device: torch.device):
    """Limits private memory in the ``with`` block, and not what is said of it afterwards; mapped libraries and files do
    not count. MemoryError where as much is in use already: what the heap has left would hide it. Of a GPU's memory
    tensors alone count."""
    if device.type == "cuda":
        all_of_it = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory / all_of_it), device)
        yield
        return
    import resource

    with contextlib.suppress(OSError):
        if private() >= memory:
            raise MemoryError(f"{private() >> 20} MiB are in use before a model is made")
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _run(target: Target, size: int, steps: int) -> dict:
    trainer = target.build()
    train = trainer.config
    warm_up = WARM_UP if train.compile is None and not train.cuda_graphs else WARM_UP_OF_GRAPHS
    clock, micro_batches = Clock(), train.accumulation.accumulate
    trainer.callbacks = Callbacks([clock])
    trainer.fit([target.batch(size, trainer)] * (micro_batches * (warm_up + steps)))
    seconds = [end - start for start, end in zip(clock.ends, clock.ends[1:])]
    if trainer.device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(trainer.device)
    else:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "fits": True,
        "seconds_per_sample": median(seconds[warm_up - 1 :]) / (micro_batches * size),
        "peak_bytes": peak,
    }


class Clock(Observer):
    """When the steps of a Trainer have ended."""

    def __init__(self):
        self.ends: list[float] = []

    def on_step_end(self, trainer) -> None:
        wait(trainer.device)
        self.ends.append(time.perf_counter())

"""The measurements: ceilings, parts of a step, what the loader could deliver, and probes of single changes.

What takes steps of the training loop is a generator that yields runs to the driver and returns what it found.
"""

import contextlib
import inspect
import itertools
import math
import mmap
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean, median

import torch
from torch import nn
from torch.autograd import DeviceType

from fusedtrain._waits import Waits
from fusedtrain.data.workers import cores
from fusedtrain.diagnose.batches import CachedSource, LoaderSource, map_batch
from fusedtrain.diagnose.constants import Constants
from fusedtrain.diagnose.drive import Driver, agree, ranks
from fusedtrain.diagnose.growth import Growth, Watch
from fusedtrain.diagnose.host import HostTensors
from fusedtrain.diagnose.instrument import PARTS, Step
from fusedtrain.diagnose.machine import gpus, settle
from fusedtrain.diagnose.places import Site
from fusedtrain.diagnose.plan import Arm, Run, leave_out_others, left_alone
from fusedtrain.diagnose.remedies import NoExchange, Remedy, WholeBatches, clone_loader, models, why_not_clone
from fusedtrain.diagnose.sampling import LineCounter, Sampler
from fusedtrain.diagnose.statistics import Interval, Paired, bootstrap

CACHE = 256 * 2**20  # bytes of batches that are kept
BLOCK = 0.15  # seconds that a block of steps takes at least
SAMPLING = 1.0  # seconds of looking for the user's lines that take the time
WATCHING = 5.0  # seconds of watching the run as it is, about
LOADING = 1.5  # seconds of a loader alone, per number of workers
PAIRS = 4  # of a probe; verification takes more
BUDGET = 0.008  # share of the time that watching steps in parts may take; switching adds to it
CYCLES = 6  # blocks of steps that are watched in parts, between bare ones
MOST = 5e-4  # seconds: what seems to be more is noise
QUICK = 0.02  # seconds of a step that feels it when the instrument is attached
TURNS = 5  # in which what is made on the host is timed
FAULTS = 4  # steps in which those of the optimizer are counted
GRAPHS = 5  # steps whose backward passes are followed
GROWTH = 4  # runs of steps between which memory is looked at
LARGER = 4  # times the batch that is tried beside it
STALL = 3.0  # times the median: a step that something held up


@dataclass(frozen=True)
class LoaderRate:
    """What the loader delivers when nothing is computed."""

    workers: int
    seconds: float  # per batch
    cpu: float | None  # seconds of CPU time per batch, of the main process; None with workers

    @property
    def computing(self) -> bool:
        """Whether loading is more computing than waiting."""
        return self.cpu >= 0.5 * self.seconds


@dataclass
class Facts:
    """What was measured of one variant of the run. Times are seconds per step."""

    steps: list[Step]
    step: Interval  # bare
    parts: dict[str, float]  # of a bare step
    loader: object  # that the batches come from, or None
    remedies: dict[str, Remedy]  # all that were ever considered, by name
    candidates: dict[str, list[Remedy] | str] = field(default_factory=dict)  # by rule; or why there are none
    cached: float | None = None  # the step if loading were free
    cpu_cached: float = 0.0  # CPU time of such a step
    waiting: Interval | None = None  # share of the step that cached batches save
    rates: dict[int, LoaderRate] = field(default_factory=dict)
    why_no_rates: str | None = None
    whole_batches: LoaderRate | None = None  # where the dataset is indexed once per batch; None: it cannot be
    lines: list[tuple[str, Site, float]] = field(default_factory=list)  # part, place, share of the samples
    # of torch.profiler: name, share of the CPU time, calls per step
    operations: list[tuple[str, float, int]] = field(default_factory=list)
    calls: float = 0.0  # of operations in a step, as torch.profiler counts them
    call_cost: float | None = None  # seconds of such a call on a few numbers
    repeats: dict[Site, int] = field(default_factory=dict)  # how often one object carries a line out in a step
    contiguous: list[str] = field(default_factory=list)  # convolutions that channels_last is lost before
    fused_step: float | None = None  # seconds of a fused optimizer on the weights, where theirs is written by hand
    graphs: list[tuple[int, int]] = field(default_factory=list)  # operations of backward passes, and of earlier steps
    growth: Growth | None = None
    constants: list[tuple[Site, float]] = field(default_factory=list)  # computed anew, with its share
    made: list[tuple[Site, str, float]] | None = None  # on the host: line, kind, share of the step; None: not timed
    items: int = 0  # numbers that are read from tensors in a step
    device_busy: float | None = None  # share of a step with cached batches; None without a GPU
    launches: tuple[float, float] = (0.0, 0.0)  # what the device does in a step: how many times, and seconds in all
    probes: dict[str, Paired] = field(default_factory=dict)  # by name of the remedy, with cached batches
    refused: dict[str, str] = field(default_factory=dict)  # remedies that could not be tried, with the error
    fault_cost: float | None = None  # seconds per page fault
    exchange: Paired | None = None  # with and without exchanging gradients between processes
    larger: tuple[int, Paired] | None = None  # factor; forward and backward of the batch as it is, and as large
    larger_peaks: tuple[int, int] = (0, 0)  # bytes that steps of the one and the other need beyond what is held
    noise: float = 0.0  # share of the step that two equal runs may differ by
    cached_noise: float = 0.0  # and with cached batches
    thorough: bool = False  # whether changes that take long to try are tried
    fusible: dict[str, int] = field(default_factory=dict)  # what fuse() makes of layers, with their number
    watched: int = 0  # of the steps, in parts
    cost: Interval | None = None  # seconds that such a step takes longer than a bare one
    overhead: float = 0.0  # share of the time of all these steps that watching took
    optimizer_faults: float = 0.0  # page faults of the optimizer

    def keep(self, remedy: Remedy) -> Remedy:
        """Returns the remedy of that name which is known already, or this one."""
        return self.remedies.setdefault(remedy.name, remedy)

    @property
    def faults(self) -> float:
        return fmean(step.faults for step in self.steps)


@dataclass(frozen=True)
class Sizes:
    """How many steps a block of a trial takes."""

    step: float  # seconds
    period: int  # the optimizer steps in every so-manieth pass

    def block(self, arm: Arm) -> tuple[int, int]:
        """Returns (steps, discard)."""
        quick = self.step < 0.3
        steps, discard = min(max(math.ceil(BLOCK / self.step), 1 + quick), 30), 1 + quick
        source = arm.source
        if source is not None and source.in_flight:  # batches of several workers arrive in bursts
            steps, discard = max(steps, source.in_flight), max(discard, source.in_flight // 2)
        return math.ceil(steps / self.period) * self.period, math.ceil(discard / self.period) * self.period


def block(driver: Driver, sizes: Sizes, arm: Arm, wall: bool):
    """One block of an arm; returns seconds per step."""
    steps, discard = sizes.block(arm)
    records = yield Run(steps, arm, discard)
    seconds = [step.wall if wall else step.seconds for step in records]
    groups = [sum(seconds[i : i + sizes.period]) for i in range(0, len(seconds), sizes.period)]
    # With cached batches all groups are alike; waits for a loader come in bursts and have to be added up.
    alike = driver.loader is None or isinstance(arm.source, CachedSource)
    return (left_alone(groups) if alike else fmean(groups)) / sizes.period


def trial(driver: Driver, sizes: Sizes, before: Arm, after: Arm, pairs: int):
    """Two arms take turns, in alternating order; returns :class:`Paired`."""
    wall = not (driver.alone(before) and driver.alone(after))  # both are to be measured alike
    times: dict[bool, list[float]] = {False: [], True: []}
    for i in range(pairs):
        for second in (False, True) if i % 2 == 0 else (True, False):
            times[second].append((yield from block(driver, sizes, after if second else before, wall)))
    return Paired(tuple(times[False]), tuple(times[True]))


def warm_up(driver: Driver):
    """Runs until the times settle; returns the sizes of blocks."""
    records = yield Run(4, collect=CACHE, parts=True)
    driver.instrument.settle()
    while (len(records) < 24 and sum(step.seconds for step in records) < 1.0) or len(records) < 8:
        records += yield Run(4, collect=CACHE, parts=True)
    optimized = [i for i, step in enumerate(records) if "optimizer" in step.parts]
    gaps = [b - a for a, b in itertools.pairwise(optimized)]
    step = median(step.seconds for step in records[4:])
    driver.read_waits(step)
    return Sizes(step, max(1, round(median(gaps))) if gaps else 1)


def graphs(driver: Driver):
    """Returns how many operations the backward passes of some steps go through, and how many of an earlier step."""
    sizes, earlier = [], set()
    for _ in range(GRAPHS):
        driver.instrument.graph = graph = set()
        yield Run(1, parts=True)
        sizes.append((len(graph), len(graph & earlier)))
        earlier = graph
    driver.instrument.graph = None
    return agree(sizes[1:])


def growth(driver: Driver, sizes: Sizes):
    """Returns what memory grows by from step to step.

    With cached batches: a data set may keep what it has read.
    """
    arm = Arm((), CachedSource(driver.batches)) if driver.batches else Arm()
    steps = math.ceil(min(max(BLOCK / sizes.step, 8), 64) / sizes.period) * sizes.period
    yield Run(max(steps, len(driver.batches)), arm)
    watch = Watch()
    watch.look()
    for i in range(3 * GROWTH):
        if i >= GROWTH and not agree(watch.doubtful):
            break
        yield Run(steps, arm)
        watch.look()
    return agree(watch.found(steps))


def bare_steps(watched: int, bare: int, share: float) -> int:
    """Returns how many steps have to be bare, besides those that are, for ``watched`` ones to take BUDGET of the time.

    Args:
        share: of a bare step, that one takes longer when it is watched.
    """
    return max(0, math.ceil(watched * (share / BUDGET - share - 1) - bare))


def observe(driver: Driver, sizes: Sizes, arm: Arm, steps: int | None, remedies: dict[str, Remedy]):
    """Watches so many steps in parts (None: 50 to 200, about five seconds), between bare ones; returns :class:`Facts`.

    How much longer a step takes when it is watched is measured, block by block; how many are bare follows from that.
    """

    def whole(count: float) -> int:
        return max(1, math.ceil(count / sizes.period)) * sizes.period

    quick = sizes.step < QUICK
    wanted = steps or min(max(round(WATCHING / sizes.step), 50), 200)
    size, between = whole(wanted / CYCLES), whole(1) if quick else 0  # the first after a change is not recorded
    blocks: list[tuple[list[Step], list[Step]]] = []
    watched = bare = found = 0
    while found < wanted:
        size = min(size, whole(wanted - found))
        beside = near(blocks)
        cost = watching_cost(beside, sizes.period) if blocks else 0.0
        usual = median([step.seconds for plain, _ in beside for step in plain]) if blocks else sizes.step
        share = min(max(0.0, cost), MOST) / usual
        due = max(bare_steps(watched + between + size, bare, share), size if quick else size / 5)
        if steps is None and len(blocks) >= 2:
            wanted = min(max(round(WATCHING / sizes.step * min(1.0, BUDGET / max(share, BUDGET))), 50), 200)
        plain = yield Run(whole(due), arm, whole(1) if quick or not blocks else 0)
        detailed = yield Run(size, arm, between, parts=True)
        blocks.append((plain, detailed))
        bare, watched, found = bare + len(plain) + between, watched + between + size, found + size
    return _facts(driver, sizes, arm, blocks, watched, remedies)


def optimizer_faults(driver: Driver, facts: Facts, sizes: Sizes, arm: Arm):
    """Counts the page faults of the optimizer, in steps whose times are not looked at."""
    driver.counts_faults = True
    steps = yield Run(math.ceil(FAULTS / sizes.period) * sizes.period, arm, parts=True)
    driver.counts_faults = False
    facts.optimizer_faults = fmean(step.optimizer_faults for step in steps)


def near(blocks: list[tuple[list[Step], list[Step]]]) -> list[tuple[list[Step], list[Step]]]:
    """Returns, for each block that was watched, as many bare steps before it; and the block.

    Those behind it are slower than bare ones: Python has to learn anew what calls what.
    """
    return [(plain[-len(watched) :], watched) for plain, watched in blocks]


def watching_cost(blocks: list[tuple[list[Step], list[Step]]], period: int) -> float:
    """Returns the seconds that a step takes longer when it is watched: what the quieter fifth of times differ by."""

    def quiet(i: int) -> float:
        seconds = [[step.seconds for step in block[i]] for block in blocks]
        groups = [sum(s[j : j + period]) for s in seconds for j in range(0, len(s), period)]
        return sorted(groups)[len(groups) // 5] / period

    return quiet(1) - quiet(0)


def _facts(driver: Driver, sizes: Sizes, arm: Arm, blocks: list, watched: int, remedies: dict[str, Remedy]) -> Facts:
    plain, detailed = ([step for block in blocks for step in block[i]] for i in (0, 1))
    alone = driver.alone(arm)
    if alone and sizes.step >= QUICK:  # what is usual shows over all of the short blocks
        leave_out_others(plain)
        leave_out_others(detailed)
    cost = bootstrap(near(blocks), of=lambda chosen: watching_cost(chosen, sizes.period))
    sure = cost.value if cost.low > 0 else 0.0
    steps = [step for block in blocks for steps in block for step in steps]
    seconds = [step.seconds - sure * bool(step.spans) for step in steps]
    size = math.ceil(len(seconds) / 200)
    step = bootstrap([fmean(seconds[i : i + size]) for i in range(0, len(seconds), size)])
    parts = parts_of(list(zip(steps, seconds)), sure, step.value, alone)
    loader = driver.loader if arm.source is None else arm.source.loader
    overhead = watched * max(0.0, cost.value) / sum(step.wall for step in steps)
    return Facts(steps, step, parts, loader, remedies, watched=len(detailed), cost=cost, overhead=overhead)


def parts_of(steps: list[tuple[Step, float]], cost: float, mean: float, alone: bool) -> dict[str, float]:
    """Returns the seconds of the parts of a bare step.

    Args:
        steps: those that were watched, which have spans, and bare ones, of which only the time of the loader is known;
            with what each takes when it is bare.
        cost: seconds that watching took; they lie between the parts.
        mean: of what the steps take.
        alone: whether no other process held steps up: then what held bare ones up is the script's own.
    """
    limit = STALL * median(seconds for _, seconds in steps)
    usual = [(step, seconds) for step, seconds in steps if seconds <= limit]
    watched = [step for step, _ in usual if step.spans] or [step for step, _ in steps if step.spans]
    parts = {part: fmean(step.parts.get(part, 0.0) for step in watched) for part in PARTS}
    parts["rest"] = max(0.0, parts["rest"] - cost)
    loading = fmean(step.parts.get("loader", 0.0) for step, _ in steps)
    usually = fmean(step.parts.get("loader", 0.0) for step, _ in usual)
    parts["loader"] = 0.0
    computing = fmean(seconds for _, seconds in usual) - usually
    total = sum(parts.values())
    usual_parts = {part: value / total * computing for part, value in parts.items()} if total else parts
    # What some steps take longer than usual goes to the parts where it was seen.
    stalled = [step for step, seconds in steps if seconds > limit and step.spans]
    longer = {p: sum(max(0.0, step.parts.get(p, 0.0) - parts[p]) for step in stalled) for p in PARTS if p != "loader"}
    if not sum(longer.values()):
        longer = {"rest": 1.0} if alone or not total else parts
    extra = (mean - loading - computing) / sum(longer.values())
    found = {part: max(0.0, usual_parts[part] + longer.get(part, 0.0) * extra) for part in PARTS}
    return found | {"loader": loading}


def ceiling(driver: Driver, facts: Facts, sizes: Sizes, arm: Arm):
    """Measures the step with cached batches beside the step as it is."""
    cached = Arm(arm.remedies, CachedSource(driver.batches))
    pairs = yield from trial(driver, sizes, arm, cached, PAIRS)
    facts.cached = median(pairs.after)
    facts.waiting = pairs.gain()
    records = yield Run(sizes.block(cached)[0], cached)
    facts.cpu_cached = fmean(step.cpu for step in records)
    return cached


def exchange(driver: Driver, facts: Facts, sizes: Sizes, arm: Arm, snapshot):
    """Measures the step without exchanging gradients: what of the exchange is not hidden behind the backward pass."""
    facts.exchange = yield from trial(driver, sizes, arm, Arm((*arm.remedies, NoExchange()), arm.source), PAIRS)
    snapshot.restore()  # the processes went their own ways


def loader_rate(driver: Driver, workers: int, make=clone_loader) -> LoaderRate:
    """Iterates over the loader with so many workers, without computing."""
    with driver.aside():
        arguments = {"num_workers": workers} | ({"persistent_workers": True} if workers else {})
        source = LoaderSource(make(clone_loader(driver.loader, **arguments)))
        for _ in range(max(1, source.in_flight)):
            source.fetch()
        waits = Waits()
        count, cpu, start, waited = 0, time.process_time(), time.perf_counter(), waits.read()
        while count < max(2, 2 * workers) or (time.perf_counter() - start < LOADING and count < 256):
            source.fetch()
            count += 1
            if time.perf_counter() - start > 4 * LOADING:
                break
        waited = waits.read() - waited if workers == 0 else 0.0
        seconds = (time.perf_counter() - start - waited) / count
        cpu = (time.process_time() - cpu) / count if workers == 0 else None
        source.close()
        return agree(LoaderRate(workers, seconds, cpu))


def loader_rates(driver: Driver, facts: Facts) -> None:
    """Measures what the loader delivers alone, for the worker counts that may help."""
    loader = driver.loader
    facts.why_no_rates = "no loader was seen" if loader is None else why_not_clone(loader)
    if facts.why_no_rates is not None:
        return
    for workers in sorted({0, facts.loader.num_workers}):
        facts.rates[workers] = loader_rate(driver, workers)
    if facts.waiting is None or facts.waiting.high < 0.02:
        return
    single = facts.rates[0]
    with driver.aside():
        possible = agree(single.computing and WholeBatches.why_not(driver.loader) is None)
    if possible and facts.loader.num_workers == 0:
        facts.whole_batches = loader_rate(driver, 0, WholeBatches.make)
    # Workers that wait for storage do not need a core each; those that compute do.
    most, target = (32, 0.4 * facts.cached) if not single.computing else (cores(), 0.8 * facts.cached)
    workers, best = 1, math.inf
    while workers <= most:
        if workers not in facts.rates:
            facts.rates[workers] = loader_rate(driver, workers)
        rate = facts.rates[workers]
        if rate.seconds < target or rate.seconds > 0.9 * best:
            break
        best, workers = rate.seconds, 2 * workers


def sample(driver: Driver, facts: Facts, sizes: Sizes, arm: Arm):
    """Finds the user's lines that the time goes to, how often each is carried out, and where the layout is lost."""
    with Sampler(driver) as sampler:
        steps = min(max(math.ceil(SAMPLING / sizes.step), 3), 5000)
        yield Run(steps, arm, parts=driver.instrument.calls_closures)  # else what they call looks like the optimizer
    facts.lines, loss = agree((sampler.lines(), sampler.loss()))
    if driver.instrument.roots:  # else the forward pass is what comes before the backward pass
        loss *= facts.parts["rest"]
        facts.parts["rest"], facts.parts["forward"] = facts.parts["rest"] - loss, facts.parts["forward"] + loss
    with LineCounter() as counter, contiguous_inputs(driver) as facts.contiguous:
        yield Run(1, arm)
    facts.repeats = agree(counter.repeats())


@contextlib.contextmanager
def contiguous_inputs(driver: Driver):
    """Gives the names of convolutions whose weights are channels_last and whose inputs are not."""
    names: list[str] = []

    def noting(name: str):
        def hook(conv: nn.Conv2d, inputs: tuple) -> None:
            last = [t.is_contiguous(memory_format=torch.channels_last) for t in (conv.weight, *inputs)]
            if last == [True, False] and name not in names:
                names.append(name)

        return hook

    found = [named for model in models(driver) if not compiled(model) for named in model.named_modules()]
    hooks = [m.register_forward_pre_hook(noting(name)) for name, m in found if isinstance(m, nn.Conv2d)]
    try:
        yield names
    finally:
        for hook in hooks:
            hook.remove()


def compiled(model: nn.Module) -> bool:
    """Returns whether torch.compile made any part of a model: it would be compiled again when hooks change."""
    return any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules())


def constants(facts: Facts, arm: Arm):
    """Finds what every step computes anew from what does not change."""
    if ranks() > 1 or torch.cuda.is_initialized() or compiles():
        return  # neither the exchange nor compiled code is for other eyes, and a launch is no computing
    with Constants() as numbered:
        yield Run(1, arm)
        for _ in range(2):
            numbered.next_step()
            (step,) = yield Run(1, arm)
        facts.constants = [(site, s / step.wall) for site, s in numbered.seconds.most_common(4) if site is not None]


def host_tensors(facts: Facts, sizes: Sizes, arm: Arm):
    """Finds the lines that make tensors on the host in most steps, and what share of those they take."""
    if compiles():
        return  # it would be compiled again
    turns = []
    for _ in range(TURNS):
        with HostTensors() as made:
            steps = yield Run(sizes.period, arm)
        wall = sum(step.wall for step in steps)  # of the same steps, which take longer so
        turns.append(Counter({key: seconds / wall for key, seconds in made.seconds.items()}))
    usual = {key: median(shares[key] for shares in turns) for key in set().union(*turns)}
    found = [(site, kind, share) for (site, kind), share in usual.items() if share]
    facts.made = agree(sorted(found, key=lambda line: -line[2])[:8])


def compiles() -> bool:
    """Returns whether torch.compile made anything in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and bool(dynamo.utils.counters)


def profile(facts: Facts, arm: Arm):
    """Finds the operations that the time goes to, and on a GPU how long it is busy."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as Profiler

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_initialized()
    steps = 3
    with Profiler(activities=activities) as profiler:
        yield Run(steps, arm)
    events = [event for event in profiler.key_averages() if event.key.startswith(("aten::", "fusedtrain::"))]
    total = sum(event.self_cpu_time_total for event in events) or 1
    ranked = sorted(events, key=lambda event: -event.self_cpu_time_total)
    facts.calls = sum(event.count for event in events) / steps
    facts.items = round(sum(event.count for event in events if event.key == "aten::item") / steps)
    facts.operations = [(e.key, e.self_cpu_time_total / total, round(e.count / steps)) for e in ranked[:8]]
    if torch.cuda.is_initialized():
        count, seconds = device_work(profiler.events())
        facts.launches = count / steps, seconds / steps
        # The profiler slows launching down, not what is launched.
        facts.device_busy = min(1.0, seconds / steps / (facts.cached or facts.step.value))


def device_work(events) -> tuple[int, float]:
    """Returns how many kernels and copies the device carried out, and the seconds in which it had any.

    The profiler books their times on the operation that launched them as well; streams overlap.
    """
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type is not DeviceType.CPU and not event.is_user_annotation
    )
    seconds, until = 0.0, -math.inf
    for start, end in spans:
        seconds += max(0.0, end - max(start, until))
        until = max(until, end)
    return len(spans), 1e-6 * seconds


def fault_cost() -> float:
    """Returns the seconds that one page fault costs, measured: writing to fresh memory against writing again.

    The least of several, as other processes and the caches that they share only add to it.
    """
    size, times, waits = 16 * 2**20, ([], []), Waits()
    for _ in range(5):
        memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_NOHUGEPAGE)
        tensor = torch.frombuffer(memory, dtype=torch.float32)
        for kind in times:
            start = waits.start()
            tensor.fill_(1.0)
            kind.append(waits.seconds(start))
    fresh, again = map(min, times)
    return agree(max(0.0, fresh - again) / (size / mmap.PAGESIZE))


def _device() -> torch.device:
    used = gpus()
    return torch.device("cuda", used[0]) if used else torch.device("cpu")


def call_cost() -> float:
    """Returns the seconds of an operation on a few numbers, forward and backward, per call that torch.profiler counts.

    The least of several.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as Profiler

    x = torch.ones(4, device=_device(), requires_grad=True)

    def work() -> float:
        start, y = waits.start(), x
        for _ in range(64):
            y = y * x + x
        torch.autograd.grad(y.sum(), x)
        return waits.seconds(start)

    waits = Waits()
    seconds = min(work() for _ in range(10))
    with Profiler(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    calls = sum(event.count for event in profiler.key_averages() if event.key.startswith("aten::"))
    return agree(seconds / calls)


def fused_step(driver: Driver) -> float:
    """Returns the seconds of a step of torch.optim.AdamW(fused=True) on copies of the weights; the least of several."""
    weights = {p: None for model in models(driver) for p in model.parameters() if p.requires_grad}
    copies = [torch.nn.Parameter(torch.zeros_like(p)) for p in weights if p.is_floating_point()]
    for p in copies:
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.AdamW(copies, fused=True)
    step = inspect.unwrap(type(optimizer).step)  # no hook is told
    least, waits = math.inf, Waits()
    for _ in range(5):
        settle()
        start = waits.start()
        with torch.no_grad():
            step(optimizer)
        settle()
        least = min(least, waits.seconds(start))
    return agree(least)


def repeat_batch(batch, times: int):
    """Returns a batch that holds its samples so many times."""
    if isinstance(batch, torch.Tensor):
        return batch.repeat(times, *[1] * (batch.dim() - 1)) if batch.dim() else batch
    return map_batch(batch, lambda value: repeat_batch(value, times))


def larger_batches(driver: Driver, facts: Facts, sizes: Sizes, arm: Arm):
    """Measures forward and backward of larger batches. A loop that relies on its batch size may fail here.

    Several processes do not exchange gradients in it: that takes as long for any batch.
    """
    from fusedtrain.train.memory import PeakMemory

    if facts.exchange is not None:
        arm = Arm((*arm.remedies, NoExchange()), arm.source)
    source = CachedSource([repeat_batch(batch, LARGER) for batch in driver.batches])
    steps, discard = sizes.block(arm)
    device = _device()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    peaks = {False: 0, True: 0}
    for larger in (False, True, True, False):
        memory = PeakMemory(device)
        tried = Arm(arm.remedies, source) if larger else arm
        records = yield Run(max(2 * sizes.period, steps // 2), tried, discard, parts=True)
        seconds[larger].append(median(_computing(step) for step in records))
        peaks[larger] = max(peaks[larger], memory.bytes() or 0)
    facts.larger = LARGER, Paired(tuple(seconds[False]), tuple(seconds[True]))
    facts.larger_peaks = peaks[False], peaks[True]


def _computing(step: Step) -> float:
    return step.parts.get("forward", 0.0) + step.parts.get("backward", 0.0)

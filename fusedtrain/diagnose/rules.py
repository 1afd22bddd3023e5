"""The decision tree as a table: from what was measured to a cause, its remedies and the gain they promise."""

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import nn

from fusedtrain.data.workers import cores
from fusedtrain.diagnose.drive import Driver, ranks
from fusedtrain.diagnose.host import COPIED, MOVED, NUMBERS
from fusedtrain.diagnose.instrument import Site
from fusedtrain.diagnose.machine import gpu_settings
from fusedtrain.diagnose.measure import Facts, call_cost, fault_cost, fused_step
from fusedtrain.diagnose.remedies import (
    COUNTERPARTS,
    Allocator,
    BFloat16,
    ChannelsLast,
    Compile,
    CudnnBenchmark,
    Float32,
    Fuse,
    FusedOptimizer,
    Loader,
    NoDebugging,
    Overlap,
    PinnedCopies,
    Remedy,
    SetToNone,
    Threads,
    WholeBatches,
    models,
    replicas,
    sparse_gradients,
    why_not_clone,
)

LEAST = 0.03  # of the step: less is not worth naming
SPARE = 0.5  # of the computing time that loading a batch may take, where more workers cost nothing
LARGE = 0.25  # of the step: what takes less and nothing was found against is no bottleneck
LOOP = 16  # times in a step that a module carries out a line of a loop
LAST = "channels_last already"
HOST_ADVICE = {
    NUMBERS: "keep numbers in a tensor or an array from the start: of lists every number is converted by itself",
    COPIED: "torch.as_tensor or torch.from_numpy where nothing writes to it: torch.tensor copies",
    MOVED: "make it on the device: device= where it is made, instead of .to() or .cuda()",
}
TF32 = {  # by the name of the setting: what it is on for, and how to set it
    "tf32_matmul": ("matrix products", 'torch.set_float32_matmul_precision("high")'),
    "tf32_cudnn": ("convolutions", "torch.backends.cudnn.allow_tf32 = True"),
}
FAULT = 0.2e-6  # seconds that a page fault takes at the very least
LASTS = 24 * 3600  # seconds of training that memory has to last for


@dataclass(frozen=True)
class Finding:
    """A cause that the measurements speak for.

    Attributes:
        rule: the name of the rule.
        cause: one sentence.
        evidence: the numbers.
        gain: the predicted share of the step that goes away.
        remedies: what can be tried, the most promising first; empty: only advice.
        advice: what to do by hand.
        option: a choice with a price, such as another precision; it is never called the bottleneck.
        share: nothing was found against what this takes; it is not called the bottleneck either.
        lines: places in the user's code that the time goes to, with their share of the step.
        lost: share of the step that the cause takes, where the remedies take away less; it ranks by that.
        shared: share of the step that this cause takes only because of another one, by the name of its rule; where that
            is found as well, it is not counted twice in the ranking.
    """

    rule: str
    cause: str
    evidence: str
    gain: float
    remedies: tuple[Remedy, ...] = ()
    advice: str = ""
    option: bool = False
    share: bool = False
    lines: tuple[tuple[Site, float], ...] = ()
    lost: float = 0.0
    shared: tuple[str, float] = ("", 0.0)

    @property
    def cost(self) -> float:
        return max(self.gain, self.lost)


@dataclass(frozen=True)
class Rule:
    """One branch of the tree.

    Attributes:
        name: short and unique.
        candidates: the changes to probe with cached batches, or why there are none.
        look: the finding, or in a few words why there is none. Called when the probes are done.
    """

    name: str
    look: Callable[[Facts, Driver], Finding | str]
    candidates: Callable[[Facts, Driver], list[Remedy] | str] | None = None


# --- predictions ------------------------------------------------------------------------------------------------------


def lines_of(facts: Facts, part: str) -> tuple[tuple[Site, float], ...]:
    """Returns the user's lines that a part of the step goes to, with their shares of the step."""
    return tuple((site, share) for where, site, share in facts.lines if where == part)


def serial(facts: Facts) -> bool:
    """Whether loading and computing take turns instead of overlapping."""
    return getattr(facts.loader, "num_workers", 0) == 0


def overlapped(facts: Facts, workers: int, saved: float = 0.0) -> float:
    """Returns the seconds of a step whose loading so many workers do, when computing takes ``saved`` seconds less.

    It is the slowest of computing, loading, and all CPU work over all cores.
    """
    left = 1 - min(saved / facts.cached, 1.0)  # of computing, on however many threads
    # Handing batches over takes time as well: where one worker is kept busy by computing, no less than it takes in all.
    loading = facts.rates[workers].seconds if workers and facts.rates[0].computing else 0.0
    work = max(facts.rates[0].cpu, loading) + facts.cpu_cached * left
    return max(facts.cached * left, facts.rates[workers].seconds, work / cores())


def gain_of_computing(facts: Facts, saved: float) -> float:
    """Returns the share of the step that goes away when computing takes ``saved`` seconds less."""
    step = facts.step.value
    if serial(facts) or facts.cached is None:
        return saved / step
    # Workers deliver at their own pace: what is saved beyond it is spent waiting for them.
    workers = facts.loader.num_workers
    if workers in facts.rates:
        return min(saved, max(step - overlapped(facts, workers, saved), 0.0)) / step
    pace = step if facts.cached < 0.9 * step else 0.0
    return (step - max(step - saved, pace)) / step


def gain_of_loading(facts: Facts, workers: int) -> float:
    """Returns the share of the step that so many workers save."""
    return 1 - overlapped(facts, workers) / facts.step.value


def best_probe(facts: Facts, remedies: list[Remedy]) -> tuple[Remedy, float] | None:
    """Returns the remedy that saved most, with the seconds per step, if its probe was faster pair by pair.

    A share that is no larger than what two equal runs differ by counts for nothing. Shares and not seconds carry over
    from the probe: the machine may have been slower then.
    """
    found = [(remedy, facts.probes[remedy.name]) for remedy in remedies if remedy.name in facts.probes]
    shares = [(r, p.share()) for r, p in found if p.faster()]
    sure = [(r, share) for r, share in shares if share > facts.cached_noise]
    best = max(sure, key=lambda pair: pair[1], default=None)
    computing = min(facts.cached or facts.step.value, facts.step.value)
    return best and (best[0], best[1] * computing)


def probed(name: str, cause: str, candidates, *, option: bool = False, evidence=None) -> Rule:
    """Returns a rule whose finding is what its probes measured."""

    def look(facts: Facts, driver: Driver) -> Finding | str:
        remedies = facts.candidates[name]
        if not isinstance(remedies, list):
            return remedies
        refused = [facts.refused[r.name] for r in remedies if r.name in facts.refused]
        if refused and len(refused) == len(remedies):
            return f"tried, but it fails: {refused[0]}"
        best, how = best_probe(facts, remedies), "" if facts.cached is None else " with cached batches"
        gain = gain_of_computing(facts, best[1]) if best else 0.0
        if best is None or gain < LEAST:
            return f"tried: no gain{how}" if gain <= 0 else f"tried: a gain of {gain:.1%} only"
        before, after = facts.probes[best[0].name].seconds()
        numbers = f"{1e3 * before:.3g} ms per step become {1e3 * after:.3g} ms with {best[0].name}{how and ',' + how}"
        if evidence is not None:
            numbers = f"{evidence(facts, driver)}; {numbers}"
        order = (best[0], *(r for r in remedies if r is not best[0] and r.name in facts.probes))
        return Finding(name, cause, numbers, gain, order, option=option)

    return Rule(name, look, candidates)


# --- loading ----------------------------------------------------------------------------------------------------------


def _loader(facts: Facts, driver: Driver) -> Finding | str:
    if driver.loader is None:
        return "no loader was seen"
    if facts.waiting is None:
        return _loader_alone(facts)
    if serial(facts):  # what the loop spends in its loader is known exactly, on a busy machine too
        lost, least = min(facts.waiting.high, facts.parts["loader"] / facts.step.value), LEAST
    else:
        lost, least = facts.waiting.value if facts.waiting.low > 0 else 0.0, max(LEAST, facts.noise)
    if lost < least:
        return f"cached batches save {max(lost, 0):.1%} of the step"
    evidence = (
        f"a step takes {1e3 * facts.step.value:.3g} ms, with cached batches {1e3 * facts.cached:.3g} ms:"
        f" {lost:.0%} of it is loading"
    )
    lines = lines_of(facts, "loader")
    if facts.why_no_rates is not None:
        advice = f"it was not changed: {facts.why_no_rates}"
        return Finding("loader", "the step waits for the data", evidence, lost, advice=advice, lines=lines)
    single, now = facts.rates[0], getattr(facts.loader, "num_workers", 0)
    busy, computing = min(1.0, single.cpu / single.seconds), single.computing
    kind = "most of it computing, as for decoding" if computing else "most of it waiting, as for storage"
    delivers = ", ".join(
        f"{r.workers}: {1 / r.seconds:.3g}" for r in sorted(facts.rates.values(), key=lambda r: r.workers)
    )
    evidence += (
        f"; one batch takes {1e3 * single.seconds:.3g} ms, {kind} ({busy:.0%} CPU);"
        f" batches/s by number of workers: {delivers}"
    )
    gains = {workers: gain_of_loading(facts, workers) for workers in facts.rates if workers != now}
    best = max(gains.values(), default=0.0)
    whole = lost * (1 - facts.whole_batches.seconds / single.seconds) if facts.whole_batches else 0.0
    near = [w for w, gain in gains.items() if gain > best - 0.03]
    # Workers that only wait cost little: with some to spare the loader keeps up when computing gets faster.
    spare = [w for w in near if not computing and facts.rates[w].seconds < SPARE * facts.cached]
    workers = min(spare or near)
    cause = "the step waits for the data loader: " + (
        f"it has {now or 'no'} worker{'s' * (now != 1)}, and loading a batch is mostly"
        f" {'computing' if computing else 'waiting'}"
    )
    advice = "make samples cheaper: decode once and cache, smaller files, faster storage" if best < 0.8 * lost else ""
    shared = ("loader_restart", lost_to_restarts(facts))
    if whole >= max(LEAST, best):
        cause = "the step waits for the data loader, which takes the samples of a batch one by one"
        evidence += f"; with all samples of a batch at once: {1 / facts.whole_batches.seconds:.3g}"
        remedy = facts.keep(WholeBatches(driver))
        return Finding("loader", cause, evidence, whole, (remedy,), lines=lines, lost=lost, shared=shared)
    if best < LEAST:
        why = "the cores have no time left for them" if computing else "what it waits for has a limit of its own"
        cause += f"; more workers do not help: {why}"
        share = lost < LARGE
        return Finding(
            "loader",
            cause,
            evidence,
            0.0 if share else lost,
            (),
            advice,
            lines=lines,
            lost=lost,
            shared=shared,
            share=share,
        )
    arguments = {"num_workers": workers} | ({"persistent_workers": True} if workers else {})
    remedy = facts.keep(Loader(driver, **arguments))
    return Finding("loader", cause, evidence, best, (remedy,), advice, lines=lines, lost=lost, shared=shared)


def _loader_alone(facts: Facts) -> Finding | str:
    """What is known of loading where no batch could be kept."""
    lost = facts.parts["loader"] / facts.step.value
    evidence = f"the loader holds the loop up for {lost:.1%} of the step; its batches cannot be copied to compare"
    if lost < LEAST:
        return evidence
    advice = "try more workers, or make samples cheaper"
    cause = "the step waits for the data"
    return Finding("loader", cause, evidence, lost, advice=advice, lines=lines_of(facts, "loader"))


def waiting_for_restarts(facts: Facts) -> tuple[float, list[float]]:
    """Returns the share of the time that steps wait longer for data where an epoch begins, and those waits in
    seconds."""
    restarts = [step.parts.get("loader", 0.0) for step in facts.steps if step.restart]
    others = [step.parts.get("loader", 0.0) for step in facts.steps if not step.restart]
    if not restarts or not others:
        return 0.0, restarts
    longer = sum(restarts) - len(restarts) * sum(others) / len(others)
    return longer / sum(step.seconds for step in facts.steps), restarts


def lost_to_restarts(facts: Facts) -> float:
    """Returns the share of the step that goes away when the workers stay from epoch to epoch.

    In short epochs more than the first batch comes late: none is ready yet, and new workers take cores from computing.
    What the same workers deliver when they stay was measured.
    """
    lost, _ = waiting_for_restarts(facts)
    workers = getattr(facts.loader, "num_workers", 0)
    if lost < LEAST or facts.waiting is None or workers not in facts.rates:
        return lost
    return max(lost, min(gain_of_loading(facts, workers), facts.waiting.value))


def _restarts(facts: Facts, driver: Driver) -> Finding | str:
    loader = facts.loader
    if loader is None or serial(facts):
        return "the loader has no workers to restart"
    if getattr(loader, "persistent_workers", False):
        return "the workers stay from epoch to epoch"
    lost, (_, waits) = lost_to_restarts(facts), waiting_for_restarts(facts)
    if not waits:
        return "no epoch ended while it was measured"
    if lost < LEAST:
        return f"restarting them takes {max(lost, 0):.1%} of the time"
    epochs, steps = count_text(len(waits), "epoch"), count_text(len(facts.steps), "step")
    evidence = f"{epochs} in {steps} began with {fmean(waits):.3g} s of waiting"
    reason = why_not_clone(loader)
    remedies = () if reason else (facts.keep(Loader(driver, persistent_workers=True)),)
    cause, advice = "the loader starts its workers anew in every epoch", "make the loader once, before the first epoch"
    return Finding("loader_restart", cause, evidence, lost, remedies, advice)


def _copies(facts: Facts, driver: Driver) -> Finding | str:
    if not torch.cuda.is_initialized():
        return "n/a: training runs on the CPU, nothing is copied to a device"
    copies, share = driver.instrument.copies, facts.parts["copy"] / facts.step.value
    evidence = (
        f"copies to the device hold the loop up for {share:.0%} of the step; {copies['pageable']} of {copies['count']}"
        f" came from pageable memory, {copies['blocking']} were blocking"
    )
    made = sum(share for _, kind, share in facts.made or () if kind == MOVED)  # not by the loader
    evidence += f"; {made:.0%} of the step are copies of what it makes itself" * (made > 0)
    if share - made < LEAST or not (copies["pageable"] or copies["blocking"]):
        return evidence
    remedies = () if why_not_clone(driver.loader) else (facts.keep(PinnedCopies(driver)),)
    return Finding("copies", "copies to the device block the loop", evidence, share - made, remedies, PinnedCopies.how)


def _syncs(facts: Facts, driver: Driver) -> Finding | str:
    if not torch.cuda.is_initialized():
        return "n/a: on the CPU reading a number does not wait for a device"
    share, reads = facts.parts["sync"] / facts.step.value, driver.instrument.reads
    sites = [site for (site, what), _ in reads.most_common() if what.startswith("cuda") and site is not None]
    if not sites or share < LEAST:
        return f"waits for numbers from the device take {share:.1%} of the step"
    idle = 1 - (facts.device_busy or 0.0)
    return Finding(
        "syncs",
        "the loop waits for numbers from the device",
        f"{share:.0%} of the step is spent in .item(), .cpu() and the like; the device idles {idle:.0%} of the time",
        min(share, idle),
        advice="keep losses and metrics on the device as tensors and read them once per epoch",
        lines=tuple((site, share) for site in dict.fromkeys(sites)),
    )


def _launches(facts: Facts, driver: Driver) -> Finding | str:
    if facts.device_busy is None:
        return "n/a: no GPU is in use"
    count, seconds = facts.launches
    evidence = (
        f"with cached batches the device works {facts.device_busy:.0%} of the time: {count:,.0f} kernels and copies per"
        f" step, {1e6 * seconds / max(count, 1):.3g} us each"
    )
    waits = sum(facts.parts[part] for part in ("copy", "sync", "rest")) / facts.step.value  # findings of their own
    idle = gain_of_computing(facts, (1 - facts.device_busy) * (facts.cached or facts.step.value)) - waits
    if idle < 0.1:
        return evidence
    advice = (
        "fewer launches: fused layers and a fused optimizer, larger batches,"
        ' torch.compile(model, mode="reduce-overhead"), which replays them as a CUDA graph'
    )
    return Finding("launches", "the device waits for the CPU to launch its work", evidence, idle, advice=advice)


def _communication(facts: Facts, driver: Driver) -> Finding | str:
    if ranks() == 1:
        return "n/a: one process trains"
    if facts.exchange is None:
        return "not measured: no DistributedDataParallel model was called"
    gain, (now, without) = facts.exchange.gain(), facts.exchange.seconds()
    size = sum(p.nbytes for model in replicas(driver) for p in model.parameters() if p.requires_grad)
    evidence = (
        f"without exchanging {size / 2**20:.3g} MiB of gradients between {ranks()} processes {1e3 * now:.3g} ms per"
        f" step become {1e3 * without:.3g} ms"
    )
    if gain.low <= 0 or gain.value < max(LEAST, facts.cached_noise):
        return f"{evidence}: the exchange is hidden behind the backward pass"
    advice = (
        "exchange less often: larger batches, or several backward passes per optimizer step, all but the last under"
        " model.no_sync(); exchange half the bytes: model.register_comm_hook(None, bf16_compress_hook) of"
        " torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
    )
    remedies = [facts.keep(Overlap(model)) for model in replicas(driver)]
    return Finding(
        "communication",
        "the processes wait for each other's gradients",
        evidence,
        gain_of_computing(facts, gain.value * min(facts.cached or facts.step.value, facts.step.value)),
        tuple(remedy for remedy in remedies if remedy.arguments),
        advice,
    )


# --- computing --------------------------------------------------------------------------------------------------------


def _allocator(facts: Facts, driver: Driver) -> Finding | str:
    reason = Allocator.why_not()
    if reason or torch.cuda.is_initialized():
        return reason or "n/a: the tensors are on a GPU"
    faults = f"{count_text(facts.faults, 'page fault')} per step"
    if facts.faults * FAULT < 0.01 * facts.step.value:
        return f"{faults}: not worth a change"
    facts.fault_cost = facts.fault_cost or fault_cost()
    seconds = facts.faults * facts.fault_cost
    evidence = f"{faults}, {1e6 * facts.fault_cost:.2g} us each: {1e3 * seconds:.3g} ms"
    gain = gain_of_computing(facts, min(seconds, facts.step.value))
    if gain < LEAST:
        return evidence
    cause = "freed memory goes back to the kernel and is mapped anew, page by page"
    shared = ("optimizer", gain * facts.optimizer_faults / facts.faults)  # what lies between its passes over memory
    return Finding("allocator", cause, evidence, gain, (facts.keep(Allocator()),), shared=shared)


def _threads(facts: Facts, driver: Driver) -> list[Remedy] | str:
    now, best = torch.get_num_threads(), cores()
    return _threads_text("on") if now == best else [facts.keep(Threads(best))]


def _threads_text(between: str) -> str:
    return f"{count_text(torch.get_num_threads(), 'thread')} {between} {count_text(cores(), 'core')}"


def _layout(facts: Facts, driver: Driver) -> list[Remedy] | str:
    weights = [m.weight for model in models(driver) for m in model.modules() if isinstance(m, nn.Conv2d)]
    weights = [w for w in weights if w.shape[2:].numel() > 1]
    if not weights:
        return "no two-dimensional convolutions"
    dense = [w for w in weights if w.shape[1] > 1]  # depthwise and one-channel weights look the same in both layouts
    if dense and all(w.is_contiguous(memory_format=torch.channels_last) for w in dense):
        return LAST
    return [facts.keep(ChannelsLast())]


def _layout_rule() -> Rule:
    rule = probed("layout", "convolutions run on contiguous (NCHW) tensors", _layout)

    def look(facts: Facts, driver: Driver) -> Finding | str:
        asked_for = facts.candidates["layout"] == LAST
        return (_lost_layout if asked_for else rule.look)(facts, driver)

    return Rule("layout", look, rule.candidates)


def _lost_layout(facts: Facts, driver: Driver) -> Finding | str:
    copied = sum(share for name, share, _ in facts.operations if name == "aten::copy_")
    gain = gain_of_computing(facts, copied * (facts.parts["forward"] + facts.parts["backward"]))
    if gain < LEAST or not facts.contiguous:
        return LAST
    names = ", ".join(facts.contiguous[:3]) + (", ..." if len(facts.contiguous) > 3 else "")
    return Finding(
        "layout",
        "channels_last is lost within the model, and tensors are copied to and fro",
        f"other tensors get to {count_text(len(facts.contiguous), 'convolution')}: {names}; copies take {copied:.0%} of"
        " computing",
        gain,
        advice="leave out what makes tensors contiguous in front of them: contiguous(), view, reshape; or"
        " .contiguous(memory_format=torch.channels_last) once, behind it",
        lines=lines_of(facts, "forward"),
    )


def _fuse(facts: Facts, driver: Driver) -> list[Remedy] | str:
    reason = Fuse.why_not(driver)
    if reason is None:
        facts.fusible = Fuse.layers(driver)
    return reason or [facts.keep(Fuse())]


def _optimizer_rule() -> Rule:
    """Some optimizers can be replaced on trial; of others it is only known how long they take."""
    of_torch = probed(
        "optimizer",
        "the optimizer goes over memory many times",
        _optimizer,
        evidence=lambda facts, driver: f"its step takes {facts.parts['optimizer'] / facts.step.value:.0%} of the time",
    )

    def look(facts: Facts, driver: Driver) -> Finding | str:
        lacking = FusedOptimizer.without_form(driver.instrument.optimizers)
        steps = driver.instrument.by_hand or [(optimizer, "step") for optimizer in lacking]
        return _without_fused(facts, driver, *steps[0]) if steps else of_torch.look(facts, driver)

    return Rule("optimizer", look, of_torch.candidates)


def _without_fused(facts: Facts, driver: Driver, owner: object, name: str) -> Finding | str:
    seconds = facts.parts["optimizer"]
    share = seconds / facts.step.value
    if share < LEAST or not models(driver):
        return f"{type(owner).__name__}.{name}() takes {share:.1%} of the step"
    if sparse_gradients(driver):
        return f"{type(owner).__name__}.{name}() takes {share:.1%} of the step; gradients are sparse"
    if facts.fused_step is None:
        with driver.aside():
            facts.fused_step = fused_step(driver)
    evidence = (
        f"{type(owner).__name__}.{name}() takes {1e3 * seconds:.3g} ms, {share:.0%} of the step;"
        f" torch.optim.AdamW(fused=True) takes {1e3 * facts.fused_step:.3g} ms for weights of these sizes"
    )
    gain = gain_of_computing(facts, max(0.0, seconds - facts.fused_step))
    if gain < LEAST:
        return evidence
    return Finding(
        "optimizer",
        "the optimizer carries out many operations, one tensor after the other",
        evidence,
        gain,
        advice="take one that updates all tensors in one pass over memory: "
        f"{', '.join(FusedOptimizer.STOCK)} of torch.optim with fused=True, or of fusedtrain.optim"
        f" {', '.join(COUNTERPARTS.values())}; another rule is another training, and yours to choose",
        lines=lines_of(facts, "optimizer"),
    )


def _optimizer(facts: Facts, driver: Driver) -> list[Remedy] | str:
    share = facts.parts["optimizer"] / facts.step.value
    if share < 0.02:
        return f"it takes {share:.1%} of the step"
    found = [(FusedOptimizer(ours), FusedOptimizer(ours).why_not(driver)) for ours in (False, True)]
    return [facts.keep(r) for r, reason in found if reason is None] or found[0][1]


def _zero_grad(facts: Facts, driver: Driver) -> list[Remedy] | str:
    kept = driver.instrument.keeps_zero_grads
    return [facts.keep(SetToNone())] if kept else "gradients are freed, not filled with zeros"


def _debugging(facts: Facts, driver: Driver) -> list[Remedy] | str:
    return NoDebugging.why_not(driver) or [facts.keep(NoDebugging(driver))]


def _slow_16_bit(facts: Facts, driver: Driver) -> list[Remedy] | str:
    weights = {p.dtype for model in models(driver) for p in model.parameters()}
    used = driver.instrument.autocast or weights & {torch.bfloat16, torch.float16}
    return [facts.keep(Float32())] if used else "no autocast, and no weights of 16 bits"


def _float64(facts: Facts, driver: Driver) -> list[Remedy] | str:
    wide = any(p.dtype is torch.float64 for model in models(driver) for p in model.parameters())
    return [facts.keep(Float32())] if wide else "no weights of 64 bits"


def _half(facts: Facts, driver: Driver) -> list[Remedy] | str:
    if driver.instrument.autocast:
        return "autocast is in use"
    if not all(p.dtype is torch.float32 for model in models(driver) for p in model.parameters()):
        return "the weights are not float32"
    return [facts.keep(BFloat16())] if models(driver) else "no module was called"


def _tf32(facts: Facts, driver: Driver) -> Finding | str:
    if not torch.cuda.is_initialized():
        return "n/a: no GPU is in use"
    if driver.instrument.autocast:
        return "autocast is in use"
    if not any(p.dtype is torch.float32 for model in models(driver) for p in model.parameters()):
        return "no weights are float32"
    return without_tf32(gpu_settings(torch.cuda.current_device()))


def without_tf32(gpu: dict) -> Finding | str:
    """What there is to say on float32 products, by :func:`gpu_settings`."""
    if int(gpu["capability"].partition(".")[0]) < 8:
        return f"n/a: compute capability {gpu['capability']} has no TF32"
    off = [both for name, both in TF32.items() if not gpu[name]]
    if not off:
        return "on already"
    things, calls = zip(*off)
    return Finding(
        "tf32",
        f"float32 {' and '.join(things)} run without TF32",
        f"compute capability {gpu['capability']} multiplies float32 faster with 10 bits of the mantissa; not tried",
        0.0,
        advice=" and ".join(calls),
        option=True,
    )


def _compile(facts: Facts, driver: Driver) -> list[Remedy] | str:
    if not facts.thorough:
        return "compiling takes seconds to minutes: --verify tries it, last"
    return Compile.why_not(driver) or [facts.keep(Compile())]


def _cudnn(facts: Facts, driver: Driver) -> list[Remedy] | str:
    if not torch.cuda.is_initialized():
        return "n/a: no GPU is in use"
    return "on already" if torch.backends.cudnn.benchmark else [facts.keep(CudnnBenchmark())]


def _batch_size(facts: Facts, driver: Driver) -> Finding | str:
    if facts.larger is None:
        return "not measured: no batches to repeat"
    times, pairs = facts.larger
    if not min(pairs.before):
        return "not measured: neither forward nor backward was seen in most steps"
    now, seconds = map(fmean, (pairs.before, pairs.after))
    # As little as either pair says: what else runs on the machine slows one batch down, or the other.
    saved = min(1 - after / times / before for before, after in zip(pairs.before, pairs.after))
    computing = min(facts.parts["forward"] + facts.parts["backward"], now)
    if facts.exchange is not None:
        computing -= max(0.0, facts.exchange.share()) * facts.step.value
    gain = gain_of_computing(facts, saved * computing)
    evidence = f"forward and backward take {1e3 * now:.3g} ms, and {1e3 * seconds:.3g} ms for {times} times the batch"
    peaks = (f"{peak / 2**20:,.0f}" for peak in facts.larger_peaks)
    evidence += f"; a step needs {' and '.join(peaks)} MiB beyond what is held"
    if gain < max(0.25, facts.cached_noise):
        return evidence
    advice = (
        f"a larger batch costs little time, but changes the training: it is yours to choose ({times}x was measured)"
    )
    return Finding(
        "batch_size", "the batch is so small that calls cost more than computing", evidence, gain, advice=advice
    )


def _python_loop(facts: Facts, driver: Driver) -> Finding | str:
    forward = lines_of(facts, "forward")
    looped = tuple((site, share) for site, share in forward if facts.repeats.get(site, 0) >= LOOP)
    if not looped:
        return f"no line of the model that takes time is carried out {LOOP} times in a step by the same module"
    facts.call_cost = facts.call_cost or call_cost()
    within = sum(share for _, share in looped) / sum(share for _, share in forward)
    seconds = min(facts.calls * facts.call_cost, facts.parts["forward"] + facts.parts["backward"])
    most = max(facts.repeats[site] for site, _ in looped)
    evidence = (
        f"lines that a module carries out up to {most} times in a step take {within:.0%} of the forward pass; a step is"
        f" {facts.calls:,.0f} operations, and on a few numbers one takes {1e6 * facts.call_cost:.2g} us:"
        f" {1e3 * seconds:.3g} ms"
    )
    gain = gain_of_computing(facts, within * seconds)
    if gain < 0.1:
        return evidence
    return Finding(
        "python_loop",
        "the model loops in Python over operations so small that calling them takes the time",
        evidence,
        gain,
        advice="compute on whole tensors instead of one position or sample at a time, or torch.compile the loop",
        lines=looped,
    )


def _evaluation(facts: Facts, driver: Driver) -> Finding | str:
    share = facts.parts["evaluation"] / facts.step.value
    if share < 0.1:
        return f"calls of the model in evaluation mode take {share:.1%} of a step"
    evidence = f"calls of the model in evaluation mode, with their data, take {share:.0%} of the time between updates"
    advice = "evaluate less often, or on fewer samples"
    if driver.instrument.records_evaluation:
        evidence += "; they are recorded for a backward pass that never comes"
        advice = f"evaluate under torch.no_grad(); {advice}"
    lines = lines_of(facts, "evaluation")
    cause = "the model is evaluated amid the training"
    return Finding("evaluation", cause, evidence, share, advice=advice, lines=lines)


def _constants(facts: Facts, driver: Driver) -> Finding | str:
    share = sum(share for _, share in facts.constants)
    evidence = f"operations on what does not change from step to step take {share:.1%} of a step"
    if share < 0.1:
        return evidence
    advice = "compute it once, before the loop or in __init__"
    cause = "every step computes anew what comes out the same"
    return Finding("recomputed", cause, evidence, share, advice=advice, lines=tuple(facts.constants))


def _host_tensors(facts: Facts, driver: Driver) -> Finding | str:
    if facts.made is None:
        return "not measured: torch.compile is in use"
    shares = {kind: sum(share for _, other, share in facts.made if other == kind) for kind in HOST_ADVICE}
    kinds = [kind for kind in HOST_ADVICE if shares[kind] >= LEAST]
    if not kinds:
        return f"lines that make tensors on the host take {sum(shares.values()):.1%} of a step"
    cause, taken = f"tensors are made {' and '.join(kinds)} in every step", sum(shares[kind] for kind in kinds)
    advice = "; ".join(HOST_ADVICE[kind] for kind in kinds)
    lines = tuple((site, share) for site, kind, share in facts.made if kind in kinds)
    evidence = f"the calls that make them take {taken:.0%} of a step"
    return Finding("host_tensors", cause, evidence, taken, advice=advice, lines=lines)


def _growth(facts: Facts, driver: Driver) -> Finding | str:
    earlier = [old for _, old in facts.graphs]
    if not earlier or not earlier[0] or any(b <= a for a, b in itertools.pairwise(earlier)):
        return "backward passes go no further back from step to step"
    total, old = facts.graphs[-1]
    evidence = f"of {total:,} operations of a backward pass {old:,} are of earlier steps, and more from step to step"
    gain = gain_of_computing(facts, facts.parts["backward"] * old / total)
    if gain < LEAST:
        return evidence
    return Finding(
        "growing_graph",
        "the backward pass goes back through all earlier steps, and every step is slower than the last",
        evidence,
        gain,
        advice="detach() what is carried from step to step, and leave retain_graph=True out",
        lines=lines_of(facts, "backward"),
    )


def _memory(facts: Facts, driver: Driver) -> Finding | str:
    growth, step = facts.growth, facts.step.value
    if growth is None:
        return "not known: an object of the script cannot be looked at"
    if not growth.size:
        return "memory does not grow from step to step"
    held = [g for g in growth.held if g.size > 0.1 * growth.size or "graphs" in g.kind]
    evidence = f"{size_text(growth.size)} more in every step, of {size_text(growth.free)} that are left"
    for g in held[:3]:
        where = ", ".join(f"{site.file.rpartition('/')[2]}:{site.line}" for site in g.lines[:2])
        more = f", {g.count:.3g} more per step" * (g.count > 0)
        evidence += f"; {g.path} is {g.kind}{more}{where and f' ({where})'}"
    if growth.graph >= 1:
        evidence += f"; {growth.graph:,.0f} more operations of backward passes are kept"
    passes = getattr(driver.loader, "__len__", None)
    if held and all(g.emptied for g in held):
        with contextlib.suppress(TypeError):  # a loader may have no length
            most = growth.size * (passes() if passes else 0)
            if passes and most < 0.5 * growth.free:
                return f"{evidence}: until the pass over the data ends, {size_text(most)} at most"
    lasts = growth.free / max(growth.size, 1.0) * step
    if lasts > LASTS:
        return f"{evidence}: enough for {duration_text(lasts)}"
    cause = (
        f"memory grows from step to step and is full after {duration_text(lasts)}, {count_text(lasts / step, 'step')}"
    )
    advice = (
        "keep numbers instead of tensors: loss.item(), or detach() where a graph hangs on them; running sums instead of"
        " lists; and empty what has to be kept"
    )
    lines = dict.fromkeys(site for g in held for site in g.lines)
    share = dict(reversed([(site, share) for _, site, share in facts.lines]))
    return Finding(
        "memory", cause, evidence, 0.0, advice=advice, lines=tuple((s, share.get(s, 0.0)) for s in lines), lost=1.0
    )


def size_text(size: float) -> str:
    """Returns bytes in a readable unit."""
    unit = next((u for u in ("KiB", "MiB") if size < 1000 * 1024 ** (1 + (u == "MiB"))), "GiB")
    return f"{size / 1024 ** (('KiB', 'MiB', 'GiB').index(unit) + 1):.3g} {unit}"


def duration_text(seconds: float) -> str:
    """Returns a time in a readable unit."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds > 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return count_text(seconds, "second")


def count_text(count: float, thing: str) -> str:
    """Returns a number of things."""
    number = f"{count:,.0f}"
    return f"{number} {thing}{'s' * (number != '1')}"


def _own_code(facts: Facts, driver: Driver) -> Finding | str:
    share = facts.parts["rest"] / facts.step.value
    evidence = f"{share:.1%} of the step is outside of loader, forward, backward and optimizer"
    lines = lines_of(facts, "rest")
    within = {site for site, _ in lines}
    made = sum(share for site, kind, share in facts.made or () if site in within and kind != MOVED)  # that is a copy
    if share - made < 0.1:
        return evidence + f"; tensors are made there on the host: {made:.1%}" * (made > 0)
    if facts.items > 10:
        evidence += f"; about {facts.items} .item() per step"
    cause, advice = "the loop's own Python code takes the time", "see the lines below; compute on whole tensors"
    if not driver.instrument.optimizers and not driver.instrument.by_hand:
        cause = "the loop's own Python code takes the time, the update of the weights among it"
        advice += "; take an optimizer of torch.optim with fused=True, or of fusedtrain.optim"
    if fmean(step.cpu for step in facts.steps) < 0.5 * facts.step.value:  # not even half of the step on a core
        cause = "the loop waits in its own code, as for storage"
        advice = "see the lines below; read data in the workers of a DataLoader, write in a thread"
    shared = ("recomputed", sum(share for site, share in facts.constants if site in within))
    return Finding("own_code", cause, evidence, share - made, advice=advice, lines=lines, shared=shared)


RULES = (
    Rule("loader", _loader),
    Rule("loader_restart", _restarts),
    Rule("copies", _copies),
    Rule("syncs", _syncs),
    Rule("launches", _launches),
    Rule("communication", _communication),
    Rule("evaluation", _evaluation),
    Rule("recomputed", _constants),
    Rule("host_tensors", _host_tensors),
    Rule("growing_graph", _growth),
    Rule("memory", _memory),
    Rule("own_code", _own_code),
    Rule("python_loop", _python_loop),
    Rule("allocator", _allocator),
    probed(
        "threads",
        "the number of threads does not fit the cores",
        _threads,
        evidence=lambda facts, driver: _threads_text("for"),
    ),
    _layout_rule(),
    probed(
        "fuse",
        "layers run unfused",
        _fuse,
        evidence=lambda facts, driver: (
            "fusedtrain.fuse makes of them: " + ", ".join(f"{name} x {n}" for name, n in facts.fusible.items())
        ),
    ),
    _optimizer_rule(),
    probed("zero_grad", "gradients are filled with zeros and added to", _zero_grad),
    probed("debugging", "every operation is searched for bugs", _debugging),
    probed("slow_16_bit", "16-bit arithmetic is slower than float32 here", _slow_16_bit),
    probed("float64", "float64 arithmetic, of which float32 takes half the time and memory", _float64),
    probed("half_precision", "float32 arithmetic where bfloat16 is faster", _half, option=True),
    Rule("tf32", _tf32),
    probed("compile", "operations run one by one where torch.compile joins them", _compile, option=True),
    probed("cudnn", "cuDNN takes its first guess of an algorithm", _cudnn),
    Rule("batch_size", _batch_size),
)

"""Rules on what brings the data, and on what the loop, the device and the processes wait for."""

from statistics import fmean

import torch

from fusedtrain.diagnose.drive import Driver, ranks
from fusedtrain.diagnose.host import MOVED
from fusedtrain.diagnose.measure import Facts
from fusedtrain.diagnose.remedies import Loader, Overlap, PinnedCopies, WholeBatches, replicas, why_not_clone
from fusedtrain.diagnose.rules.finding import (
    LEAST,
    Finding,
    count_text,
    gain_of_computing,
    gain_of_loading,
    lines_of,
    serial,
)

SPARE = 0.5  # of the computing time that loading a batch may take, where more workers cost nothing
LARGE = 0.25  # of the step: what takes less and nothing was found against is no bottleneck


def loader(facts: Facts, driver: Driver) -> Finding | str:
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


def restarts(facts: Facts, driver: Driver) -> Finding | str:
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


def copies(facts: Facts, driver: Driver) -> Finding | str:
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


def syncs(facts: Facts, driver: Driver) -> Finding | str:
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


def launches(facts: Facts, driver: Driver) -> Finding | str:
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


def communication(facts: Facts, driver: Driver) -> Finding | str:
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

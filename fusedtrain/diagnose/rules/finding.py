"""What a rule finds, and what it promises: the share of a step that goes away."""

from collections.abc import Callable
from dataclasses import dataclass

from fusedtrain.data.workers import cores
from fusedtrain.diagnose.drive import Driver
from fusedtrain.diagnose.measure import Facts
from fusedtrain.diagnose.places import Site
from fusedtrain.diagnose.remedies import Remedy

LEAST = 0.03  # of the step: less is not worth naming


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


# --- words ------------------------------------------------------------------------------------------------------------


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

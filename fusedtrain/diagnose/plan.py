"""What a plan of measurements asks of the training loop, and what other processes took from the answer."""

from collections.abc import Generator
from dataclasses import dataclass, field

from fusedtrain.diagnose.batches import CachedSource, LoaderSource
from fusedtrain.diagnose.instrument import Step


@dataclass(frozen=True)
class Arm:
    """A variant of the run: the remedies in force, and where batches come from (None: as the script has it)."""

    remedies: tuple = ()
    source: LoaderSource | CachedSource | None = None


@dataclass
class Run:
    """So many steps of one arm; the first ``discard`` are not recorded."""

    steps: int
    arm: Arm = field(default_factory=Arm)
    discard: int = 0
    collect: int = 0  # keep some batches in Driver.batches, up to so many bytes
    parts: bool = False  # time the parts of a step, and keep the loss


def left_alone(seconds: list[float]) -> float:
    """Returns what the same work takes when nothing comes between: a tenth of the times are shorter."""
    return sorted(seconds)[len(seconds) // 10]


def leave_out_others(records: list[Step]) -> None:
    """Takes from the parts of steps what their threads waited for a core that other processes had.

    Threads that work together also wait for one another, running in circles, unless there was nothing to do together:
    no counter tells. What the others waited is taken off as far as a part takes longer than when it is left alone.
    """
    for step in records:  # anew, where a run was one of several
        step.whole = step.whole or step.parts
        step.parts = dict(step.whole)
    for part in {part for step in records for part in step.parts}:
        steps = [step for step in records if part in step.parts]
        for step in steps:
            own, _ = step.waits.get(part, (0.0, 0.0))
            step.parts[part] -= min(own, 0.99 * step.parts[part])
        least = left_alone([step.parts[part] for step in steps])
        for step in steps:
            _, team = step.waits.get(part, (0.0, 0.0))
            step.parts[part] -= min(team, max(0.0, step.parts[part] - least))
    for step in records:
        step.waited = step.wall - sum(step.parts.values())


def spread_waits(records: list[Step], waited: float, least: float) -> None:
    """Takes what was waited over many steps off those that took longer than ``least``, as when they are left alone."""
    walls = [step.end - step.start for step in records]
    total = sum(wall - least for wall in walls if wall > least)
    share = min(1.0, waited / total) if total else 0.0
    for step, wall in zip(records, walls):
        if wall > least:
            step.waited = (wall - least) * share
            kept = 1 - step.waited / wall
            step.parts = {part: seconds * kept for part, seconds in step.parts.items()}


Plan = Generator[Run, list[Step], None]

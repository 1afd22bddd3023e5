"""Intervals for ratios of times that were taken in turns."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

DRAWS = 2000


@dataclass(frozen=True)
class Interval:
    """An estimate and the interval that holds it with the stated level."""

    value: float
    low: float
    high: float

    def over(self, whole: float) -> "Interval":
        """As a share."""
        return Interval(self.value / whole, self.low / whole, self.high / whole)

    def half(self) -> float:
        """Half its width."""
        return (self.high - self.low) / 2


def bootstrap(values: Sequence[float], level: float = 0.95, of=fmean) -> Interval:
    """Returns a statistic of ``values`` with its percentile bootstrap interval; the same values give the same interval.

    Args:
        values: at least one number.
        level: probability that the interval holds the true value, in (0, 1).
        of: the statistic.

    Raises:
        ValueError: no values, or a level outside (0, 1).
    """
    if not values:
        raise ValueError("an interval needs at least one value, got none")
    if not 0 < level < 1:
        raise ValueError(f"level must lie in (0, 1), got {level}")
    generator = random.Random(0)
    draws = sorted(of(generator.choices(values, k=len(values))) for _ in range(DRAWS))
    tail = (1 - level) / 2 * (DRAWS - 1)
    return Interval(of(values), draws[math.floor(tail)], draws[math.ceil(DRAWS - 1 - tail)])


@dataclass(frozen=True)
class Paired:
    """Times per step of two arms that took turns: pair i was measured side by side, in alternating order."""

    before: tuple[float, ...]
    after: tuple[float, ...]

    def gain(self, level: float = 0.95) -> Interval:
        r"""The share of the time that the second arm saves, :math:`1 - e^{\overline{\ln(after / before)}}`."""
        ratios = [math.log(b / a) for a, b in zip(self.before, self.after)]
        mean = bootstrap(ratios, level)
        return Interval(-math.expm1(mean.value), -math.expm1(mean.high), -math.expm1(mean.low))

    def seconds(self) -> tuple[float, float]:
        """The median times per step."""
        return median(self.before), median(self.after)

    def share(self) -> float:
        """The median share of the time that the second arm saves, pair by pair."""
        return median(1 - b / a for a, b in zip(self.before, self.after))

    def faster(self) -> bool:
        """Whether the second arm was faster in every pair, or in all but one of eight."""
        slower = sum(b >= a for a, b in zip(self.before, self.after))
        return slower <= len(self.before) // 8

    def __add__(self, more: "Paired") -> "Paired":
        return Paired(self.before + more.before, self.after + more.after)

"""Which epoch was the best, and when to stop waiting for a better one."""

import math
from dataclasses import dataclass
from typing import Literal

from fusedtrain.train.errors import require, require_count


@dataclass(frozen=True)
class EarlyStopping:
    """What makes an epoch better, and after how many worse ones a run ends.

    Args:
        monitor: metric of the validation, e.g. loss or accuracy.
        mode: whether a smaller ("min") or a larger value ("max") is better; auto takes min for a metric with "loss" in
            its name, max for one with "acc", and asks for any other.
        stop_patience: epochs without a better value after which the run ends; None never does.
        min_delta: by how much a value must be better to count.

    Raises:
        InputError: a value is out of range; in ``fit``, when ``mode`` is auto and the metric's name does not tell.
    """

    monitor: str = "loss"
    mode: Literal["auto", "min", "max"] = "auto"
    stop_patience: int | None = None
    min_delta: float = 0.0

    def __post_init__(self):
        require(self.mode in ("auto", "min", "max"), f"mode must be auto, min or max, got {self.mode!r}")
        if self.stop_patience is not None:
            require_count("stop_patience", self.stop_patience)
        require(self.min_delta >= 0, f"min_delta must be at least 0, got {self.min_delta}")

    @property
    def direction(self) -> str:
        """min or max; InputError where neither the mode nor the metric's name tells."""
        if self.mode != "auto":
            return self.mode
        name = self.monitor.lower()
        known = "loss" in name or "acc" in name
        require(known, f"mode must be min or max for {self.monitor!r}: its name does not tell which is better")
        return "min" if "loss" in name else "max"


class Best:
    """The best value so far and the epochs since."""

    def __init__(self, config: EarlyStopping):
        self.config, self.direction = config, config.direction
        self.value = math.inf if self.direction == "min" else -math.inf
        self.epoch, self.waited = None, 0

    def observe(self, epoch: int, value: float) -> bool:
        """Returns whether ``value`` is the best so far; NaN never is."""
        gain = self.value - value if self.direction == "min" else value - self.value
        if gain > self.config.min_delta:
            self.value, self.epoch, self.waited = value, epoch, 0
            return True
        self.waited += 1
        return False

    @property
    def stop(self) -> bool:
        """Whether the run has waited long enough."""
        return self.config.stop_patience is not None and self.waited >= self.config.stop_patience

    def state_dict(self) -> dict:
        return {"value": self.value, "epoch": self.epoch, "waited": self.waited, "of": self._of()}

    def load_state_dict(self, state: dict) -> None:
        """Goes on from ``state``, unless that is of another metric: then the wait for a better epoch begins anew."""
        if state.get("of", self._of()) == self._of():
            self.value, self.epoch, self.waited = state["value"], state["epoch"], state["waited"]

    def _of(self) -> str:
        return f"{self.direction} {self.config.monitor}"

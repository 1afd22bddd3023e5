"""Learning rates as functions of the step, by name, on torch's schedulers."""

import contextlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from fusedtrain.train.errors import InputError, require, require_count

Name = Literal["cosine", "constant", "step", "multistep", "exponential", "polynomial", "onecycle", "plateau"]
SCHEDULES = get_args(Name)


@dataclass(frozen=True)
class Schedule:
    """How the learning rate moves. The optimizer's rates are the peaks; every schedule but onecycle multiplies them.

    Args:
        schedule: cosine: to ``min_factor`` at the end. constant. step: times ``gamma`` every ``step_epochs``.
            multistep: times ``gamma`` at each of ``milestones``. exponential: times ``gamma`` every epoch.
            polynomial: ``(1 - t / T) ** power`` at step t of T. onecycle: torch's OneCycleLR, momentum too. plateau:
            times ``gamma`` when the monitored metric has not improved for ``patience`` epochs.
        warmup_epochs: the rate rises linearly for this many epochs first; a part of an epoch is allowed.
        per: when the rate moves: step, after every update; epoch, after every epoch (plateau: always).
        gamma: see ``schedule``.
        step_epochs: see ``schedule``.
        milestones: epochs, see ``schedule``.
        power: see ``schedule``.
        min_factor: cosine, polynomial and plateau fall to this part of the peak.
        patience: epochs, see ``schedule``.

    Raises:
        InputError: a value is out of range, or multistep has no ``milestones``.

    Source: Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983; Goyal et al., https://arxiv.org/abs/1706.02677;
    Smith and Topin, https://arxiv.org/abs/1708.07120
    """

    schedule: Name = "cosine"
    warmup_epochs: float = 1.0
    per: Literal["step", "epoch"] = "step"
    gamma: float = 0.1
    step_epochs: int = 30
    milestones: tuple[int, ...] = ()
    power: float = 1.0
    min_factor: float = 0.0
    patience: int = 10

    def __post_init__(self):
        names = ", ".join(SCHEDULES)
        require(self.schedule in SCHEDULES, f"schedule must be one of {names}, got {self.schedule!r}")
        require(self.per in ("step", "epoch"), f"per must be step or epoch, got {self.per!r}")
        require(self.warmup_epochs >= 0, f"warmup_epochs must be at least 0, got {self.warmup_epochs}")
        whole = self.per == "step" or self.schedule in ("plateau", "onecycle") or self.warmup_epochs % 1 == 0
        require(whole, f"warmup_epochs must be whole where the rate moves per epoch, got {self.warmup_epochs}")
        require(0 < self.gamma <= 1, f"gamma must lie in (0, 1], got {self.gamma}")
        require_count("step_epochs", self.step_epochs)
        require(self.power >= 0, f"power must be at least 0, got {self.power}")
        require(0 <= self.min_factor <= 1, f"min_factor must lie in [0, 1], got {self.min_factor}")
        require_count("patience", self.patience, 0)
        for milestone in self.milestones:
            require_count("a milestone", milestone)
        ascending = all(a < b for a, b in zip(self.milestones, self.milestones[1:]))
        require(ascending, f"milestones must be rising epochs, got {self.milestones}")
        require(self.schedule != "multistep" or bool(self.milestones), "the schedule multistep needs milestones")

    def build(self, optimizer: Optimizer, epochs: int, steps: int, mode: str = "min") -> LRScheduler:
        """Returns torch's scheduler for a run of ``epochs`` epochs of ``steps`` updates; it sets the first rate.
        ``mode``: for plateau, whether a smaller ("min") or a larger value ("max") of the metric is better.

        Raises:
            InputError: onecycle cannot cycle the momentum of this optimizer.
        """
        ticks = steps if self.per == "step" else 1  # per epoch
        _set_peaks(optimizer)
        if self.schedule == "onecycle":
            return _one_cycle(optimizer, ticks * epochs)
        warmup, factor = round(self.warmup_epochs * ticks), self._factor(ticks, ticks * epochs)
        if self.schedule == "plateau":
            return Plateau(optimizer, round(self.warmup_epochs * steps), self, mode)
        return Factors(optimizer, lambda t: (t + 1) / warmup if t < warmup else factor(t, warmup))

    def _factor(self, ticks: int, total: int) -> Callable[[int, int], float]:
        """The factor of tick ``t`` after a warm-up of ``w`` ticks."""

        def fall(height: Callable[[float], float]) -> Callable[[int, int], float]:
            low = self.min_factor
            return lambda t, w: low + (1 - low) * height(min(1.0, (t - w) / max(1, total - w)))

        return {
            "constant": lambda t, w: 1.0,
            "cosine": fall(lambda part: 0.5 + 0.5 * math.cos(math.pi * part)),
            "polynomial": fall(lambda part: (1 - part) ** self.power),
            "step": lambda t, w: self.gamma ** (t // (ticks * self.step_epochs)),
            "multistep": lambda t, w: self.gamma ** sum(t >= ticks * epoch for epoch in self.milestones),
            "exponential": lambda t, w: self.gamma ** (t // ticks),
        }.get(self.schedule)


class Factors(LambdaLR):
    """torch's LambdaLR with one function for all groups, those too that join the optimizer later."""

    def get_lr(self) -> list:
        self.join()
        return super().get_lr()

    def join(self) -> None:
        """Gives groups that are new in the optimizer, with their peaks, the rate of this moment."""
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:
            self.base_lrs.append(group.setdefault("initial_lr", float(group["lr"])))
            self.lr_lambdas.append(self.lr_lambdas[0])
            _set_rate(group, self.base_lrs[-1] * self.lr_lambdas[0](self.last_epoch))


def join(scheduler, optimizer: Optimizer) -> None:
    """Takes in groups that have joined the optimizer.

    Raises:
        InputError: onecycle takes none.
    """
    if isinstance(scheduler, (Factors, Plateau)):
        scheduler.join()
    elif isinstance(scheduler, OneCycleLR):
        require(
            all("max_lr" in group for group in optimizer.param_groups),
            "the schedule onecycle takes no groups that join the optimizer during the run: give it all parameters from"
            " the start and let some learn later (requires_grad_)",
        )


def _set_rate(group: dict, rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


_LEFT: WeakKeyDictionary[Optimizer, list[float]] = WeakKeyDictionary()  # the rates at the ends of runs


def leave(optimizer: Optimizer) -> None:
    """Notes that the rates are those at the end of a run: nobody has chosen them for the next one."""
    _LEFT[optimizer] = [float(group["lr"]) for group in optimizer.param_groups]


@contextlib.contextmanager
def put_back_if_refused(optimizer: Optimizer):
    """Where the ``with`` block fails the hyperparameters, which a scheduler sets once it is made, are as before."""
    own = [(group, dict(group), float(group["lr"])) for group in optimizer.param_groups]
    try:
        yield
    except BaseException:
        for group, values, rate in own:
            group.clear()
            group.update(values)
            _set_rate(group, rate)
        raise


def _set_peaks(optimizer: Optimizer) -> None:
    """Makes every group's rate the one that it peaks at, a number, for a rate that is a tensor moves: where an earlier
    schedule has left the rate, that schedule's peak."""
    left = _LEFT.get(optimizer, ())
    for index, group in enumerate(optimizer.param_groups):
        rate = float(group["lr"])
        if "max_lr" in group:  # of a cycle
            known, stands = group.pop("max_lr"), math.isclose(rate, group.pop("min_lr"), rel_tol=1e-6)
        else:
            known, stands = group.get("initial_lr", rate), not left
        stands |= index < len(left) and left[index] == rate
        group["initial_lr"] = known if stands else rate
        _set_rate(group, group["initial_lr"])


def _one_cycle(optimizer: Optimizer, total: int) -> OneCycleLR:
    peaks = [group["initial_lr"] for group in optimizer.param_groups]
    cycles = all("betas" in group or group.get("momentum") for group in optimizer.param_groups)
    try:
        return OneCycle(optimizer, peaks, total_steps=total + 1, cycle_momentum=cycles)
    except ValueError as error:
        raise InputError(f"the schedule onecycle does not fit the optimizer: {error}") from None


class OneCycle(OneCycleLR):
    """torch's OneCycleLR, which stays at its end where the data give more batches than their length tells."""

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch < self.total_steps - 1:
            super().step(epoch)


# What ReduceLROnPlateau has seen; the rest of its state are options, for which those of the run that goes on hold.
_COUNTED = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch", "_last_lr")


class Plateau:
    """torch's ReduceLROnPlateau behind a linear warm-up: :meth:`step` after every update, :meth:`observe` after every
    epoch."""

    def __init__(self, optimizer: Optimizer, warmup_steps: int, schedule: Schedule, mode: str):
        self.optimizer, self.warmup_steps, self.last_epoch = optimizer, warmup_steps, 0
        self.peaks = [group["initial_lr"] for group in optimizer.param_groups]
        self._min_factor = schedule.min_factor
        self.plateau = ReduceLROnPlateau(
            optimizer, mode, schedule.gamma, schedule.patience, min_lr=self._lows(), eps=0.0
        )
        self._warm_up()

    def _lows(self) -> list[float]:
        return [self._min_factor * peak for peak in self.peaks]

    def _warm_up(self) -> None:
        if self.last_epoch < self.warmup_steps:
            for group, peak in zip(self.optimizer.param_groups, self.peaks):
                _set_rate(group, peak * (self.last_epoch + 1) / self.warmup_steps)

    def end_warm_up(self) -> None:
        for group, peak in zip(self.optimizer.param_groups, self.peaks):
            _set_rate(group, peak)

    def join(self) -> None:
        """Takes in groups that are new in the optimizer, with their peaks."""
        for group in self.optimizer.param_groups[len(self.peaks) :]:
            self.peaks.append(group.setdefault("initial_lr", float(group["lr"])))
            self.plateau.min_lrs.append(self._min_factor * self.peaks[-1])
        self._warm_up()

    def step(self) -> None:
        self.last_epoch += 1
        self._warm_up()

    def observe(self, value: float) -> None:
        """Counts an epoch with this value of the metric; the warm-up's do not count."""
        if self.last_epoch >= self.warmup_steps:
            self.plateau.step(value)

    def state_dict(self) -> dict:
        return {"last_epoch": self.last_epoch, "peaks": self.peaks, "plateau": self.plateau.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.last_epoch, self.peaks = state["last_epoch"], state["peaks"]
        self.plateau.load_state_dict({name: state["plateau"][name] for name in _COUNTED})
        self.plateau.min_lrs = self._lows()


_KINDS = ("lr_lambdas", "total_steps", "plateau")  # what the state of a scheduler of :meth:`Schedule.build` is known by
_LENGTHS = ("total_steps", "_schedule_phases")  # of onecycle: those of the run that goes on


def load(scheduler, state: dict, before: tuple, now: tuple, place: int | None = None) -> None:
    """Loads the state of a scheduler of :meth:`Schedule.build`, so that it stands at the same epoch.

    Args:
        before, now: how often it moves in an epoch, and in how many epochs, in the run that saved the state and in this
            one; other batches or another number of processes make another number of updates.
        place: how often it would have moved in this run, if known: amid an epoch more than the state's count says, or
            less.

    Raises:
        ValueError: the state is that of another kind of scheduler.
    """
    own = scheduler.state_dict()
    if any((kind in own) != (kind in state) for kind in _KINDS):
        raise ValueError("the state is that of another kind of scheduler")
    state = {name: value for name, value in state.items() if name not in _LENGTHS}
    if before == now:
        scheduler.load_state_dict(state)
        return
    ratio = now[0] / before[0] if now[0] and before[0] else 1.0
    reached = round(state["last_epoch"] * ratio) if place is None else max(0, place)
    if isinstance(scheduler, OneCycleLR):
        reached = min(reached, scheduler.total_steps - 1)
    # To the step before, and a step from there: the rates in the checkpoint are those of another place.
    scheduler.load_state_dict(state | {"last_epoch": reached - 1, "_step_count": 0})
    scheduler.step()
    if isinstance(scheduler, Plateau) and state["last_epoch"] * ratio < scheduler.warmup_steps <= reached:
        scheduler.end_warm_up()  # rounding went over its end


def make(
    config: Schedule, made, optimizer: Optimizer, epochs: int, updates: int | None, mode: str
) -> tuple[object, bool]:
    """Returns the scheduler of a run and whether it moves with every update.

    Args:
        made: a scheduler of torch's, what makes one from optimizer and number of updates, or None.
        updates: per epoch; None where that is not known.
        mode: of the metric, see :meth:`Schedule.build`.

    Raises:
        InputError: the schedule needs to know the number of updates, or ``made`` is none of torch's.
    """
    per_step = config.per == "step"
    if made is None:
        require(
            updates is not None or config.schedule == "constant",
            f"the schedule {config.schedule} needs training data with a length",
        )
        require(
            updates is not None or not (per_step and config.warmup_epochs),
            f"a warm-up of {config.warmup_epochs} epochs needs training data with a length; 0 goes without",
        )
        return config.build(optimizer, epochs, updates or 1, mode), per_step or config.schedule == "plateau"
    if isinstance(made, type) or not hasattr(made, "step"):
        made = made(optimizer, (updates or 0) * epochs) if callable(made) else made
    require(
        hasattr(made, "step"),
        f"scheduler must be of torch.optim.lr_scheduler, or a function that makes one, got {made!r}; schedules by name"
        " are TrainConfig's",
    )
    require(
        getattr(made, "optimizer", optimizer) is optimizer,
        f"scheduler: {type(made).__name__} moves the rates of another optimizer than the Trainer's",
    )
    require(
        isinstance(made, ReduceLROnPlateau) or _takes_nothing(made.step),
        f"scheduler: {type(made).__name__}.step() asks for arguments: take one of torch.optim.lr_scheduler",
    )
    return made, per_step and not isinstance(made, ReduceLROnPlateau)


def _takes_nothing(function: Callable) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    return True

"""The learning rate range test: the rate rises from step to step, and the loss tells which rates learn."""

import math
import signal
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from fusedtrain import _files
from fusedtrain.train.callbacks import Callbacks
from fusedtrain.train.errors import InputError
from fusedtrain.train.nonfinite import NonFiniteError
from fusedtrain.train.preemption import Preempted
from fusedtrain.train.rng import rng_state, set_rng_state
from fusedtrain.tune.state import State
from fusedtrain.tune.target import Observer, Target, TuneError

KEEP_EVERY = 20  # steps between two saved states
SMOOTHING = 0.9  # of the loss from step to step
DIVERGED = 4.0  # times the lowest smoothed loss
EARLIEST = 5  # steps before which a loss that is not finite is an error


def tune_lr(
    target: Target,
    dataset=None,
    *,
    lowest: float = 1e-6,
    highest: float = 1.0,
    steps: int = 100,
    batch_size: int = 64,
    data_key: str | None = None,
    fresh: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> dict:
    """Trains with a rate that rises from ``lowest`` to ``highest`` and suggests one.

    Args:
        target: what is trained, by the steps of ``fusedtrain train`` on one process. With ``layer_decay`` the rates are
            those of the last layers, as ``lr`` is there.
        dataset: map-style, gives (image, class); None takes the digits that come with scikit-learn.
        lowest, highest: learning rates; between them they rise geometrically.
        steps: updates; the test ends before when the loss diverges.
        batch_size: of the micro-batches, as in the training to come: the rate depends on it.
        data_key: names the dataset among the results that are kept; needed where one is given.
        fresh: start anew instead of going on where a killed test stopped.
        progress: is called with a line every 20 steps.

    Returns:
        ``suggested``: the rate at which the smoothed loss falls most steeply, ``lowest_loss_at``, ``diverged_at`` (or
        None), and the curve: ``lrs`` and ``losses``.

    Raises:
        TuneError: a number is out of range, the dataset is empty, has no name or does not fit the model, the loss is
            not finite from the start or never falls.

    Source: Smith, Cyclical Learning Rates for Training Neural Networks, https://arxiv.org/abs/1506.01186
    """
    if not 0 < lowest < highest or math.isinf(highest / lowest) or steps < 10 or batch_size < 1:
        raise TuneError(
            f"0 < lowest < highest < inf, steps >= 10 and batch_size >= 1 are needed, got {lowest}, {highest}, {steps},"
            f" {batch_size}"
        )
    if dataset is None:
        from fusedtrain.data import digits
        from fusedtrain.train.data import Digits

        if target.classes < Digits.CLASSES:
            raise TuneError(f"classes must be at least {Digits.CLASSES}, that of the digits, got {target.classes}")
        dataset, data_key = digits(size=target.image[1]), data_key or "digits"
    if not len(dataset):
        raise TuneError("the dataset holds no samples")
    if data_key is None:
        raise TuneError("a dataset needs data_key, which names it among the results that are kept")
    numbers = {"lowest": lowest, "highest": highest, "steps": steps, "batch_size": batch_size, "size": len(dataset)}
    state = State("lr", {**target.key(), **numbers, "data": data_key}, fresh=fresh)
    done = state.get("done")
    if done is None:
        kept = state.path.with_suffix(".pt")
        if fresh:
            kept.unlink(missing_ok=True)
        losses = _train(target, dataset, numbers, kept, progress)
        state.add("done", done := {"losses": losses})
        kept.unlink(missing_ok=True)
    losses = done["losses"]
    lrs = [lowest * (highest / lowest) ** (step / (steps - 1)) for step in range(len(losses))]
    return _judge(lrs, losses, steps) | {"lrs": lrs, "losses": losses}


def _train(target: Target, dataset, numbers: dict, kept: Path, progress) -> list[float]:
    """Returns the losses of the steps; saves everything that they depend on from time to time."""
    trainer = target.build()
    test = RangeTest(trainer, numbers, kept, progress)
    if kept.exists():
        test.saved = torch.load(kept, weights_only=True, map_location=trainer.device)
        test.losses = test.saved["losses"]
        progress(f"goes on after step {len(test.losses)}")
    if len(test.losses) == numbers["steps"]:
        return test.losses
    trainer.callbacks = Callbacks([test])
    accumulate = trainer.config.accumulation.accumulate
    order = _order(numbers["size"], numbers["batch_size"], accumulate * numbers["steps"])
    # Seeds of loaders come from a generator of their own: a test that goes on would draw another time.
    left = DataLoader(dataset, batch_sampler=order[accumulate * len(test.losses) :], generator=torch.Generator())
    try:
        trainer.fit(left)
    except Diverged:
        pass
    except NonFiniteError as error:
        loss = float(trainer.last_loss)
        if math.isfinite(loss) and len(test.losses) < EARLIEST:  # a gradient, which says what is wrong
            raise TuneError(str(error)) from error
        del test.losses[numbers["steps"] - 1 :]  # a GPU tells it later
        test.losses.append(math.nan if math.isfinite(loss) else loss)
    except InputError as error:
        raise TuneError(str(error)) from error
    except Preempted as stop:
        if stop.signal == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise
    return test.losses


class Diverged(Exception):
    """The loss has grown so much that larger rates need not be tried."""


class RangeTest(Observer):
    """Sets the rate of each step of a Trainer and keeps the losses, in a file too, with all that the next depends on.

    Args:
        trainer: with rates of the groups relative to each other.
        numbers: lowest, highest and steps.
        kept: the file.
        progress: is called with a line every 20 steps.
    """

    def __init__(self, trainer, numbers: dict, kept: Path, progress: Callable[[str], None]):
        self.parts = [group["lr"] for group in trainer.optimizer.param_groups]
        self.numbers, self.kept, self.progress = numbers, kept, progress
        self.losses: list[float] = []
        self.saved: dict | None = None  # to go on from

    def on_fit_start(self, trainer) -> None:
        super().on_fit_start(trainer)
        if self.saved is not None:
            trainer.model.load_state_dict(self.saved["model"])
            trainer.optimizer.load_state_dict(self.saved["optimizer"])
            if trainer.scaler is not None:
                trainer.scaler.load_state_dict(self.saved["scaler"])
            set_rng_state(self.saved["rng"])
        self._set_rates(trainer)

    def on_step_end(self, trainer) -> None:
        rate, steps = self._rate(), self.numbers["steps"]
        self.losses.append(float(trainer.last_loss))
        if _diverged(self.losses):
            raise Diverged
        if len(self.losses) % KEEP_EVERY == 0:
            content = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
            content |= {"scaler": trainer.scaler and trainer.scaler.state_dict()}
            _files.write_tensors(self.kept, content | {"rng": rng_state(), "losses": self.losses})
            loss = _smooth(self.losses)[-1]
            self.progress(f"step {len(self.losses)}/{steps}  lr {rate:.2e}  loss {loss:.4f}")
        self._set_rates(trainer)

    def _rate(self) -> float:
        """Returns the rate of the next step."""
        lowest, highest, steps = (self.numbers[name] for name in ("lowest", "highest", "steps"))
        return lowest * (highest / lowest) ** (len(self.losses) / (steps - 1))

    def _set_rates(self, trainer) -> None:
        for group, part in zip(trainer.optimizer.param_groups, self.parts):
            group["lr"] = part * self._rate()


def _order(size: int, batch_size: int, steps: int) -> list[list[int]]:
    """Returns the samples of each step: whole shuffled passes, one after the other."""
    generator = torch.Generator().manual_seed(0)
    indices: list[int] = []
    while len(indices) < steps * batch_size:
        indices += torch.randperm(size, generator=generator).tolist()
    return [indices[at : at + batch_size] for at in range(0, steps * batch_size, batch_size)]


def _smooth(losses: list[float]) -> list[float]:
    """Exponential mean, without the bias of its start."""
    mean, found = 0.0, []
    for step, loss in enumerate(losses, start=1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        found.append(mean / (1 - SMOOTHING**step))
    return found


def _diverged(losses: list[float]) -> bool:
    smooth = _smooth(losses)
    return not math.isfinite(losses[-1]) or (len(losses) > 10 and smooth[-1] > DIVERGED * min(smooth))


def _judge(lrs: list[float], losses: list[float], steps: int) -> dict:
    finite = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    if finite < EARLIEST:
        raise TuneError(f"the loss is {losses[finite]} at step {finite + 1}, with a learning rate of {lrs[finite]:.1e}")
    smooth = _smooth(losses[:finite])
    at = min(range(finite), key=smooth.__getitem__)
    width = max(2, steps // 25)  # steps over which the slope is taken
    slopes = {i: smooth[i + width] - smooth[i - width] for i in range(width, min(at, finite - width))}
    if not slopes or min(slopes.values()) >= 0:
        raise TuneError(
            f"the loss does not fall anywhere from {lrs[0]:.1e} to {lrs[-1]:.1e}; it starts at {losses[0]:.4g}"
        )
    diverged = lrs[-1] if len(losses) < steps or not math.isfinite(losses[-1]) else None
    return {"suggested": lrs[min(slopes, key=slopes.get)], "lowest_loss_at": lrs[at], "diverged_at": diverged}

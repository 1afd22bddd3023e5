"""The learning rate range test: the rate rises from step to step, and the loss tells which rates learn."""

import math
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader

from fusedtrain import _files
from fusedtrain.tune.state import State
from fusedtrain.tune.target import Target, TuneError

KEEP_EVERY = 20  # steps between two saved states
SMOOTHING = 0.9  # of the loss from step to step
DIVERGED = 4.0  # times the lowest smoothed loss


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
        target: what is trained.
        dataset: map-style, gives (image, class); None takes the digits that come with scikit-learn.
        lowest, highest: learning rates; between them they rise geometrically.
        steps: updates; the test ends before when the loss diverges.
        batch_size: as in the training to come: the rate depends on it.
        data_key: names the dataset among the results that are kept; needed where one is given.
        fresh: start anew instead of going on where a killed test stopped.
        progress: is called with a line every 20 steps.

    Returns:
        ``suggested``: the rate at which the smoothed loss falls most steeply, ``lowest_loss_at``, ``diverged_at`` (or
        None),
        and the curve: ``lrs`` and ``losses``.

    Raises:
        TuneError: a number is out of range, the dataset is empty or has no name, the loss is not finite from the
            start or never falls.

    Source: Smith, Cyclical Learning Rates for Training Neural Networks, https://arxiv.org/abs/1506.01186
    """
    if not 0 < lowest < highest or steps < 10 or batch_size < 1:
        raise TuneError(
            f"0 < lowest < highest, steps >= 10 and batch_size >= 1 are needed, got {lowest}, {highest}, {steps},"
            f" {batch_size}"
        )
    if dataset is None:
        from fusedtrain.data import digits

        dataset, data_key = digits(size=target.image[1]), data_key or "digits"
    if not len(dataset):
        raise TuneError("the dataset holds no samples")
    if data_key is None:
        raise TuneError("a dataset needs data_key, which names it among the results that are kept")
    numbers = {"lowest": lowest, "highest": highest, "steps": steps, "batch_size": batch_size, "size": len(dataset)}
    state = State("lr", {**target.key(), **numbers, "data": data_key, "torch": torch.__version__}, fresh=fresh)
    done = state.get("done")
    if done is None:
        losses = _train(target, dataset, numbers, state.path.with_suffix(".pt"), fresh, progress)
        state.add("done", done := {"losses": losses})
        state.path.with_suffix(".pt").unlink(missing_ok=True)
    losses = done["losses"]
    lrs = [lowest * (highest / lowest) ** (step / (steps - 1)) for step in range(len(losses))]
    return _judge(lrs, losses, steps) | {"lrs": lrs, "losses": losses}


def _train(target: Target, dataset, numbers: dict, kept, fresh: bool, progress) -> list[float]:
    """Returns the losses of the steps; saves everything that they depend on from time to time."""
    training = target.build()
    losses: list[float] = []
    if kept.exists() and not fresh:
        saved = torch.load(kept, weights_only=True, map_location=training.device)
        training.model.load_state_dict(saved["model"])
        training.optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"].cpu())
        losses = saved["losses"]
        progress(f"goes on after step {len(losses)}")
    ratio = numbers["highest"] / numbers["lowest"]
    order = _order(numbers["size"], numbers["batch_size"], numbers["steps"])
    for images, targets in DataLoader(dataset, batch_sampler=order[len(losses) :]):
        for group in training.optimizer.param_groups:
            group["lr"] = numbers["lowest"] * ratio ** (len(losses) / (numbers["steps"] - 1))
        losses.append(float(training.step(images, targets)))
        if _diverged(losses):
            break
        if len(losses) % KEEP_EVERY == 0:
            content = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
            content |= {"rng": torch.get_rng_state(), "losses": losses}
            _files.write_tensors(kept, content)
            progress(f"step {len(losses)}/{numbers['steps']}  lr {group['lr']:.2e}  loss {_smooth(losses)[-1]:.4f}")
    return losses


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
    if finite < 5:
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

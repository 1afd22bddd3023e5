"""The training loop of a classifier."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedtrain.train.checkpoint import save_weights
from fusedtrain.train.config import InputError, TrainConfig, resolve_device
from fusedtrain.train.precision import autocast
from fusedtrain.train.progress import Progress
from fusedtrain.train.schedule import warmup_cosine


@dataclass(frozen=True)
class Epoch:
    """What one epoch brought. Losses and accuracy are means over samples; the training loss is that of the steps,
    taken while the weights move. ``seconds`` is the training alone."""

    epoch: int
    train_loss: float
    valid_loss: float
    valid_accuracy: float
    seconds: float
    images_per_second: float


@dataclass
class History:
    """What a run brought: one entry per epoch, and the loss of every step."""

    epochs: list[Epoch] = field(default_factory=list)
    step_losses: list[float] = field(default_factory=list)


class Trainer:
    """Trains a classifier and evaluates it after every epoch.

    Args:
        model: takes images ``[N, C, H, W]``, returns logits ``[N, classes]``. Moved to the device in place.
        loss: takes logits (in float32 at least) and targets, returns the mean over the batch, e.g.
            ``torch.nn.CrossEntropyLoss()``.
        optimizer: over the model's parameters; its learning rates are the peaks of the schedule.
        config: see :class:`TrainConfig`.
        title: what the progress display calls the run.

    Raises:
        InputError: the optimizer holds none of the model's parameters, or the device does not exist.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: Optimizer,
        config: TrainConfig,
        *,
        title: str = "training",
    ):
        self.model, self.loss, self.optimizer, self.config, self.title = model, loss, optimizer, config, title
        self.device = resolve_device(config.device)
        self.memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        own = {id(p) for p in model.parameters() if p.requires_grad}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise InputError("the optimizer holds none of the model's trainable parameters")
        model.to(self.device, memory_format=self.memory_format)

    def fit(self, train: Iterable, valid: Iterable) -> History:
        """Trains for ``config.epochs`` epochs and writes the checkpoint.

        Args:
            train: sized; gives pairs (images ``[N, C, H, W]``, targets ``[N]``) anew each time it is iterated over,
                as a DataLoader does; where it or its sampler has ``set_epoch``, that is called before each pass.
            valid: the same for evaluation.

        Raises:
            InputError: before the first step, when the data are empty, are not such pairs, or do not fit the model.
            RuntimeError: after an epoch in which a loss was not finite; no checkpoint is written then.
        """
        for name, batches in (("training", train), ("validation", valid)):
            self._check_data(name, batches)
        torch.manual_seed(self.config.seed)
        steps = len(train)
        self.schedule = warmup_cosine(
            self.optimizer, steps * self.config.epochs, round(steps * self.config.warmup_epochs)
        )
        history = History()
        with Progress(self.title, self.config.epochs, steps) as progress:
            for epoch in range(self.config.epochs):
                history.epochs.append(self._epoch(epoch, train, valid, history.step_losses, progress))
                progress.epoch_done(history.epochs[-1])
        if self.config.checkpoint is not None:
            save_weights(self.config.checkpoint, self.model)
        return history

    def step(self, images: Tensor, targets: Tensor) -> Tensor:
        """One update of the weights; returns the loss before it, on the device."""
        loss = self.loss(self._logits(images), targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    @torch.inference_mode()
    def evaluate(self, batches: Iterable) -> tuple[float, float]:
        """Returns the mean loss and the accuracy over all samples."""
        self.model.eval()
        losses, correct, sizes = [], [], []
        for batch in batches:
            images, targets = self._to_device(batch)
            logits = self._logits(images)
            losses.append(self.loss(logits, targets))
            correct.append((logits.argmax(1) == targets).sum())
            sizes.append(len(targets))
        return _mean(_read(losses), sizes), sum(_read(correct)) / sum(sizes)

    def _epoch(self, epoch: int, train: Iterable, valid: Iterable, step_losses: list[float], progress) -> Epoch:
        self.model.train()
        _set_epoch(train, epoch)
        losses, sizes = [], []
        start = time.perf_counter()
        for batch in train:
            images, targets = self._to_device(batch)
            losses.append(self.step(images, targets))
            sizes.append(len(targets))
            progress.step_done()
        values = _read(losses)  # waits for the device, once per epoch
        seconds = time.perf_counter() - start
        if not all(map(math.isfinite, values)):
            first = next(i for i, value in enumerate(values) if not math.isfinite(value))
            raise RuntimeError(f"the loss became {values[first]} in step {first + 1} of epoch {epoch + 1}")
        step_losses += values
        valid_loss, accuracy = self.evaluate(valid)
        return Epoch(epoch + 1, _mean(values, sizes), valid_loss, accuracy, seconds, sum(sizes) / seconds)

    def _logits(self, images: Tensor) -> Tensor:
        with autocast(self.config.precision, self.device):
            logits = self.model(images)
        # exponentials and sums of the loss want more than 16 bits
        return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits

    def _to_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, targets = batch
        images = images.to(self.device, memory_format=self.memory_format, non_blocking=True)
        return images, targets.to(self.device, non_blocking=True)

    def _check_data(self, name: str, batches: Iterable) -> None:
        """Raises InputError unless the first batch goes through the model and all labels that can be seen fit it."""
        _set_epoch(batches, 0)
        batch = next(iter(batches), None)
        if batch is None:
            raise InputError(f"the {name} data hold no batch")
        if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not all(isinstance(t, Tensor) for t in batch):
            raise InputError(f"a {name} batch must be a pair of tensors (images, targets), got {_describe(batch)}")
        images, targets = batch
        if images.dim() != 4 or targets.shape != images.shape[:1] or targets.dtype != torch.int64:
            raise InputError(
                f"a {name} batch must hold images [N, C, H, W] and int64 class indices [N], got {_describe(batch)}"
            )
        self.model.eval()  # a training pass would move the BatchNorms
        try:
            with torch.inference_mode():
                logits = self._logits(self._to_device(batch)[0])
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise InputError(f"the model cannot take {name} images of shape {list(images.shape)}: {reason}") from error
        if logits.dim() != 2 or len(logits) != len(images):
            raise InputError(f"the model must return logits [N, classes], got {list(logits.shape)}")
        labels = getattr(batches, "targets", targets)  # of all data, where they are at hand
        if labels.min() < 0 or labels.max() >= logits.shape[1]:
            raise InputError(
                f"the model has {logits.shape[1]} classes, but the {name} labels go from {int(labels.min())} to"
                f" {int(labels.max())}"
            )


def _set_epoch(batches: Iterable, epoch: int) -> None:
    for owner in (batches, getattr(batches, "sampler", None)):
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)


def _read(scalars: list[Tensor]) -> list[float]:
    return torch.stack(scalars).tolist()


def _mean(values: list[float], sizes: list[int]) -> float:
    return math.fsum(value * size for value, size in zip(values, sizes)) / sum(sizes)


def _describe(batch) -> str:
    if isinstance(batch, (tuple, list)):
        return f"{type(batch).__name__}({', '.join(_describe(item) for item in batch)})"
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    return type(batch).__name__

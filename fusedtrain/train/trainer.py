"""The training loop."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_leaves

from fusedtrain.train import activation, check
from fusedtrain.train.accumulation import Group
from fusedtrain.train.callbacks import Callback, Callbacks
from fusedtrain.train.config import TrainConfig, resolve_device
from fusedtrain.train.distributed import World, refuse_wrapped, sync_batchnorm
from fusedtrain.train.ema import averages
from fusedtrain.train.errors import InputError
from fusedtrain.train.feed import Feed
from fusedtrain.train.memory import memory_text
from fusedtrain.train.meter import Losses
from fusedtrain.train.nonfinite import find_nonfinite, untouched
from fusedtrain.train.precision import full
from fusedtrain.train.preemption import SIGNALS, Preempted, StopSignals
from fusedtrain.train.profile import Spans, Tracer
from fusedtrain.train.progress import Progress
from fusedtrain.train.rng import rng_state, seed_all, set_rng_state
from fusedtrain.train.saving import Saving
from fusedtrain.train.schedule import Plateau
from fusedtrain.train.stopping import Best
from fusedtrain.train.update import Buffers, Update


@dataclass(frozen=True)
class Epoch:
    """What one epoch brought. Losses and metrics are means over samples; the training loss is that of the steps, taken
    while the weights move; ``metrics`` are those of the validation. ``seconds`` is the training alone."""

    epoch: int
    train_loss: float
    metrics: dict[str, float]
    seconds: float
    images_per_second: float

    @property
    def valid_loss(self) -> float | None:
        return self.metrics.get("loss")

    @property
    def valid_accuracy(self) -> float | None:
        return self.metrics.get("accuracy")


@dataclass
class History:
    """What a run brought: one entry per epoch, the loss of every step (on several GPUs: of this one's part)."""

    epochs: list[Epoch] = field(default_factory=list)
    step_losses: list[float] = field(default_factory=list)


class NonFiniteError(RuntimeError):
    """The loss or a gradient is not finite; the update was not made."""


class Trainer:
    """Trains a model and evaluates it after every epoch.

    For other batches than pairs (inputs, targets), or other steps, override :meth:`training_step`,
    :meth:`validation_step` and :meth:`weight`.

    Args:
        model: bare: not wrapped or compiled. Moved to the device in place.
        loss: takes outputs (in float32 at least) and targets, returns the mean over the batch, e.g.
            ``torch.nn.CrossEntropyLoss()``.
        optimizer: over the model's parameters; its learning rates are the peaks of the schedule.
        config: see :class:`TrainConfig`.
        scheduler: instead of ``config.schedule``: one of torch's, or what makes it from the optimizer and the number of
            updates of the run; moved as ``config.schedule.per`` says.
        callbacks: see :class:`Callback`.
        loggers: beside those of ``config.logging``: objects with ``log(step, values)``, ``flush()`` and ``close()``.
        title: what the progress display calls the run.

    Raises:
        InputError: the optimizer holds none of the model's parameters, the device does not exist, or the model is
            wrapped already.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: Optimizer,
        config: TrainConfig | None = None,
        *,
        scheduler: LRScheduler | Callable[[Optimizer, int], LRScheduler] | None = None,
        callbacks: Sequence[Callback] = (),
        loggers: Sequence = (),
        title: str = "training",
    ):
        self.config = config = config or TrainConfig()
        refuse_wrapped(model)
        own = {id(p) for p in model.parameters() if p.requires_grad}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise InputError("the optimizer holds none of the model's trainable parameters")
        self.loss, self.optimizer, self.title, self._scheduler = loss, optimizer, title, scheduler
        self.device = resolve_device(config.device)
        self.memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        config.precision.set_tf32(self.device)
        self.world = World(config.distributed, self.device)
        self.model = sync_batchnorm(
            model.to(self.device, config.precision.dtype, memory_format=self.memory_format), self.world
        )
        if isinstance(loss, nn.Module):
            loss.to(self.device, config.precision.dtype)
        activation.wrap(self.model, activation.matching(self.model, config.activation_checkpointing.checkpoint_modules))
        self._wrapped = self.world.wrap(self.model, optimizer)
        if config.compile is not None:
            self.model.compile(mode=config.compile)  # in place: the names of the state_dict stay
        self.scaler = config.precision.scaler(self.device)
        self.averages = averages(self.model, optimizer, config.ema_decay)
        self.group = Group(config.accumulation.accumulate, self.world.size)
        self.best = Best(config.early_stopping)
        self.callbacks, self._own_loggers = Callbacks(callbacks), list(loggers)
        self.overridden = any(
            getattr(type(self), name) is not getattr(Trainer, name) for name in ("training_step", "validation_step")
        )
        self._autocast = config.precision.autocast(self.device)
        self._update = Update(self.model, optimizer, self.scaler, config.max_grad_norm)
        may_skip = config.nonfinite == "skip" or self.scaler is not None
        self._buffers = Buffers(self.model) if may_skip else None
        self._stop, self._agreed, self.spans = StopSignals(), None, Spans()
        self.step_count = self.skipped = self._skipped_in_a_row = 0

    epoch_class = Epoch

    # --- what a subclass may change -----------------------------------------------------------------------------------

    def training_step(self, batch) -> Tensor:
        """Returns the mean loss of a batch, with its graph; the loop does the rest."""
        inputs, targets = batch
        return self.loss(self.forward(inputs), targets)

    def validation_step(self, batch) -> dict[str, Tensor]:
        """Returns metrics of a batch by name: one value per sample ``[N]``, or their mean as a number."""
        inputs, targets = batch
        outputs = self.forward(inputs)
        metrics = {"loss": self.loss(outputs, targets)}
        if isinstance(outputs, Tensor) and outputs.dim() == 2 and targets.dtype == torch.int64 and targets.dim() == 1:
            metrics["accuracy"] = outputs.argmax(1) == targets
        return metrics

    def weight(self, batch) -> float:
        """Returns what a batch's mean loss counts in means and accumulation: its samples, by default."""
        first = batch
        while not isinstance(first, Tensor):
            first = next(iter(first.values() if isinstance(first, dict) else first))
        return len(first)

    def forward(self, *inputs):
        """Runs the model, under autocast where that is wanted; results are float32 at least."""
        with self._autocast:
            outputs = (self._wrapped if self.model.training else self.model)(*inputs)
        return full(outputs)

    # --- the step -----------------------------------------------------------------------------------------------------

    def step(self, group: Iterable) -> bool:
        """One update of the weights from the micro-batches of a group.

        Args:
            group: gives (batch, whether its samples count, whether it is the group's last).

        Returns:
            Whether the update was applied: one whose gradients are not finite is not.
        """
        enter, loss = self.spans.enter, 0.0
        if self._buffers is not None and not self.group.done:
            self._buffers.keep()
        for batch, counts, last in group:
            enter("copy")
            batch = self.to_device(batch)
            weight = self._count(batch, counts)
            enter("forward")
            with self.world.sync(self._wrapped, last):
                loss = self.training_step(batch)
                share = self.group.share(weight)
                enter("backward")
                self._scale(loss if share == 1.0 else loss * share).backward()
            self.group.add(weight)
            self._note(batch, loss.detach(), weight)
            enter("data")
        enter("optimizer")
        total, finite = self._agree()
        applied = self._update(self.group.correction(total)) if finite and total else self._update.discard()
        if applied:
            self._follow()
        elif self._buffers is not None:
            self._buffers.put_back()
        self.group.clear()
        return applied

    def _scale(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _count(self, batch, counts: bool) -> float:
        weight = float(self.weight(batch)) if counts else 0.0
        if self.group.nominal is None:
            self.group.nominal = self.world.decide(weight)
        return weight

    def _note(self, batch, loss: Tensor, weight: float) -> None:
        """Keeps what is needed for the means, and to name what was not finite."""
        self.feed.advance()
        self._batches.append(batch)
        if self.device.type == "cpu":
            loss = loss.item()
        self._group_loss = self._group_loss + loss * weight if self.group.done > 1 else loss * weight

    def _agree(self) -> tuple[float, bool]:
        """Returns the weight of the group over all processes, and whether the loss is finite on all of them."""
        if self.world.size == 1:
            self._group_weight = self.group.weight
            return self.group.weight, self.device.type != "cpu" or math.isfinite(self._group_loss)
        if self.device.type != "cpu":  # nobody waits for the loss: the gradients tell
            total, *asked = self.world.sum(self.group.weight, *self._asked())
            self._group_weight, finite = self.group.weight, True
        else:
            total, self._group_loss, *asked = self.world.sum(self.group.weight, self._group_loss, *self._asked())
            self._group_weight, finite = total, math.isfinite(self._group_loss)
        self._agree_to_stop(asked)
        return total, finite

    def _follow(self) -> None:
        """What moves with every applied update."""
        if self._per_step:
            self.schedule.step()
        if self.averages is not None:
            self.averages.update()

    # --- the run ------------------------------------------------------------------------------------------------------

    def fit(self, train: Iterable, valid: Iterable | None = None) -> History:
        """Trains for ``config.epochs`` epochs, from the newest checkpoint where there is one.

        Args:
            train: gives batches anew each time it is iterated over, as a DataLoader does; where it or its sampler has
                ``set_epoch``, that is called before each pass. To continue in the middle of an epoch without reading
                it again, see :class:`fusedtrain.train.feed.Feed`.
            valid: the same for evaluation.

        Raises:
            InputError: before the first step, when the data are empty or do not fit the model.
            NonFiniteError: the loss or a gradient was not finite; the weights are those before the update.
            Preempted: a signal came; the state was saved.
        """
        with self._stop:
            with self._interruptible():  # so far there is nothing to save
                self._prepare(train, valid)
            self._run(valid)
        return self.history

    def _run(self, valid: Iterable | None) -> None:
        error = None
        try:
            self._stop_together()
            with self.progress:
                self.callbacks.call("on_fit_start", self)
                while self.feed.epoch < self.config.epochs and not self.best.stop:
                    self._epoch(valid)
            self.saving.finish()
        except Preempted as stop:
            error = stop
            self.saving.save()
            raise
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._finish(error)

    def _prepare(self, train: Iterable, valid: Iterable | None) -> None:
        config = self.config
        metrics = {}
        for name, batches in (("training", train), ("validation", valid)):
            if batches is not None:
                metrics = check.check_data(self, name, batches)
        monitor = config.early_stopping.monitor
        if valid is not None and monitor not in metrics:
            raise InputError(f"monitor must be one of {', '.join(metrics)}, got {monitor!r}")
        self._fit_activations(train)
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = config.cudnn_benchmark
        seed_all(config.seed + self.world.rank)
        self.feed = Feed(train, self.world)
        if valid is not None:
            Feed(valid, self.world, "validation")  # refuses what cannot work
        steps = self.feed.steps()
        self.updates_per_epoch = None if steps is None else -(-steps // self.group.size)
        self.schedule = self._make_schedule()
        self.history, self.losses = History(), Losses(self.device)
        self._batches: list = []
        self._group_loss, self._group_weight, self.last_loss = 0.0, 0.0, None
        self._loss_sum = self._seconds = self._weight = 0.0
        self._at_start = rng_state()
        self.spans.enter("other")
        self.feed.rewind(0)
        self.saving = Saving(self)
        resumed = self.saving.resume()
        shown = self.world.rank == 0
        self.progress = Progress(self.title, config.epochs, self.updates_per_epoch, self.step_count, shown)
        if resumed:
            self.progress.line(f"{self.title}  continues with {resumed}")
        self.loggers = self._own_loggers + (config.logging.open(asdict(config), self.step_count) if shown else [])
        self._tracer = Tracer(config.profile, self.spans) if config.profile.profile_dir is not None and shown else None

    def _fit_activations(self, train: Iterable) -> None:
        budget = self.config.activation_checkpointing.activation_budget_gib
        if not budget:
            return
        activation.unwrap(self.model)
        batch, scale = activation.part_of(self.to_device(next(iter(train))), samples=2)
        self.model.train()
        wrapped, self._wrapped = self._wrapped, self.model
        try:
            with untouched(self.model):
                total, blocks = activation.measure(self.model, lambda: self.training_step(batch), scale)
        finally:
            self._wrapped = wrapped
        names = self.world.decide(activation.choose(total, blocks, int(budget * 2**30)))
        activation.wrap(self.model, names)
        if self.world.rank == 0:
            kept = f"activations of {total / 2**30:.3g} GiB"
            print(f"{self.title}  {kept}: {len(names)} of {len(blocks)} blocks are computed again", flush=True)

    def _make_schedule(self):
        config, made = self.config.schedule, self._scheduler
        self._per_step = config.per == "step"
        if made is None:
            if self.updates_per_epoch is None and config.schedule != "constant":
                raise InputError(f"the schedule {config.schedule} needs training data with a length")
            self._per_step |= config.schedule == "plateau"
            return config.build(self.optimizer, self.config.epochs, self.updates_per_epoch or 1)
        if not hasattr(made, "step"):
            made = made(self.optimizer, (self.updates_per_epoch or 0) * self.config.epochs)
        self._per_step &= not isinstance(made, ReduceLROnPlateau)
        return made

    def _epoch(self, valid: Iterable | None) -> None:
        feed = self.feed
        self.callbacks.call("on_epoch_start", self, feed.epoch)
        self.model.train()
        self._begin(feed)
        self._start = time.perf_counter() - self._seconds
        self.spans.enter("data")
        for group in feed.groups(self.group, self._interruptible):
            if self._tracer is not None:
                self._tracer.step()
            self._after_step(self.step(group))
        self._read_losses(wait=True)
        self._seconds = time.perf_counter() - self._start
        self.spans.enter("evaluation")
        metrics = {} if valid is None else self.evaluate(valid)
        self._end_epoch(metrics)

    def _begin(self, feed: Feed) -> None:
        """Starts the loader; where the run was interrupted, from the same random numbers as then, which may have made
        the order of the batches, and goes on with those it had come to."""
        state, resumed = rng_state(), feed.iterating
        if resumed:
            set_rng_state(self._at_start)
        else:
            self._at_start = state
        feed.begin()
        if resumed:
            set_rng_state(state)

    def _after_step(self, applied: bool) -> None:
        self.step_count += 1
        if self._group_weight:
            self.last_loss = self._group_loss / self._group_weight
            self.losses.add(self.last_loss)
        if applied or self.scaler is not None:  # the mean over an epoch is that of its updates
            self._loss_sum += self._group_loss
            self._weight += self._group_weight
        if applied:
            self._skipped_in_a_row = 0
        else:
            self._skip()
        self._batches.clear()
        if self.step_count % self.config.logging.log_every == 0:
            self._log_step()
        self.progress.step_done(time.perf_counter(), self._shown)
        if self.callbacks.on_step_end is not None:
            self.callbacks.on_step_end(self)
        self.saving.after_step()
        if self._agreed is not None:
            raise Preempted(self._agreed)
        self.spans.enter("data")

    def _skip(self) -> None:
        """Counts an update that was left out, or stops the run."""
        self.skipped += 1
        self._skipped_in_a_row += 1
        step, limit = self.step_count, self.config.max_skipped
        if self.scaler is None and self.config.nonfinite == "raise":
            raise NonFiniteError(f"step {step} of epoch {self.feed.epoch + 1} was not made: {self._why_not_finite()}")
        if self._skipped_in_a_row > limit:
            why = self._why_not_finite()
            raise NonFiniteError(f"{limit + 1} updates in a row were not finite, up to step {step}: {why}")

    def _why_not_finite(self) -> str:
        self._update.discard()
        training, self._wrapped, wrapped = self.model.training, self.model, self._wrapped
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        try:
            for batch in self._batches:
                tensors = [t for t in tree_leaves(batch) if isinstance(t, Tensor) and t.is_floating_point()]
                found = find_nonfinite(self.model, lambda batch=batch: self.training_step(batch), tensors, scale)
                if found is not None:
                    return str(found)
        finally:
            self._wrapped = wrapped
            self.model.train(training)
        return "a loss or a gradient is not finite, but is when computed again" + (
            ", or it is another process's" if self.world.size > 1 else ""
        )

    def evaluate(self, batches: Iterable) -> dict[str, float]:
        """Returns the means of the metrics over all samples; with averaged weights where they are kept."""
        training, state = self.model.training, rng_state()  # before anything asks the loader, which draws a seed
        feed, sums, total = Feed(batches, self.world, "validation"), {}, 0.0
        position = feed.to_start()
        self.model.eval()
        if not self.world.sharded:
            self.world.share_buffers(self.model)
        try:
            with self.averaged_weights(), self.no_gradients():
                feed.begin()
                for index in itertools.count():
                    with self._interruptible():
                        item = feed.next(index)
                    if item is None:
                        break
                    batch, counts = item
                    batch = self.to_device(batch)
                    weight = float(self.weight(batch)) if counts else 0.0
                    total += weight
                    for name, value in self.validation_step(batch).items():
                        value = value.double().sum() * bool(counts) if value.dim() else value.double() * weight
                        sums[name] = sums[name] + value if name in sums else value
        finally:
            set_rng_state(state)  # training goes on as if there had been no evaluation
            feed.restore(position)
            self.model.train(training)
        total, *values = self.world.sum(total, *map(float, sums.values()))
        return {name: value / total for name, value in zip(sums, values)}

    def _end_epoch(self, metrics: dict[str, float]) -> None:
        """All that follows from the numbers of an epoch; rank 0 decides."""
        config, epoch = self.config, self.feed.epoch
        loss, weight = float(self._loss_sum), self._weight
        if self.device.type != "cpu":
            loss, weight = self.world.sum(loss, weight)
        entry = Epoch(epoch + 1, loss / weight if weight else math.nan, metrics, self._seconds, weight / self._seconds)
        self.history.epochs.append(entry)
        self.callbacks.call("on_validation_end", self, metrics)
        monitored = metrics.get(config.early_stopping.monitor, entry.train_loss)
        better = self.world.decide(self.best.observe(epoch + 1, monitored))
        if isinstance(self.schedule, (Plateau, ReduceLROnPlateau)):
            observe = self.schedule.observe if isinstance(self.schedule, Plateau) else self.schedule.step
            observe(self.world.decide(monitored))
        elif not self._per_step:
            self.schedule.step()
        self._loss_sum = self._seconds = self._weight = 0.0
        self.feed.rewind(epoch + 1)
        self.spans.enter("checkpoint")
        self.saving.after_epoch(better)
        self._log({"epoch": epoch + 1, "train_loss": entry.train_loss} | {f"valid_{k}": v for k, v in metrics.items()})
        self.progress.epoch_done(entry)
        self.callbacks.call("on_epoch_end", self, entry)
        self.spans.enter("other")
        self._stop_together()

    def _asked(self) -> list[bool]:
        return [self._stop.requested == number for number in SIGNALS]

    def _agree_to_stop(self, asked: list[float]) -> None:
        """Several processes stop at the same place, whichever of them got the signal."""
        self._agreed = next((number for number, count in zip(SIGNALS, asked) if count), None)

    def _stop_together(self) -> None:
        self._agree_to_stop(self.world.sum(*self._asked()))
        if self._agreed is not None:
            raise Preempted(self._agreed)

    def _interruptible(self):
        """The context of what may be left at once; several processes stop together instead, after an update."""
        return self._stop.interruptible() if self.world.size == 1 else contextlib.nullcontext()

    def _finish(self, error: BaseException | None) -> None:
        for logger in self.loggers:
            logger.close()
        if self._tracer is not None:
            self._tracer.close()
        self.feed.close()
        self.callbacks.call("on_fit_end", self, error)
        self.spans.enter(None)
        if error is None:
            self.progress.line(f"{self.title}  {self.spans}")

    # --- numbers ------------------------------------------------------------------------------------------------------

    def _read_losses(self, wait: bool = False) -> list[float]:
        values = self.losses.collect(wait)
        self.history.step_losses += values
        if self.device.type != "cpu" and self.config.nonfinite == "raise" and self.scaler is None:
            bad = next((value for value in values if not math.isfinite(value)), None)
            if bad is not None:
                raise NonFiniteError(f"a loss of the steps up to {self.step_count} is {bad}, its gradients were finite")
        return values

    def _log_step(self) -> None:
        values = self._read_losses()
        if not self.loggers:
            return
        now = {"lr": self.optimizer.param_groups[0]["lr"], "skipped": self.skipped}
        if values:
            now["loss"] = values[-1]
        now["samples_per_second"] = self._weight / (time.perf_counter() - self._start)
        if self.device.type == "cpu" and self._update.norm is not None:
            now["grad_norm"] = float(self._update.norm)
        if self.scaler is not None:
            now["loss_scale"] = self.scaler.get_scale()
        self._log(now)

    def _log(self, values: dict[str, float]) -> None:
        for logger in self.loggers:
            logger.log(self.step_count, values)

    def _shown(self) -> str:
        losses = self.history.step_losses
        loss = f"loss {losses[-1]:.4f}  " if losses else ""
        rate = self._weight / max(1e-9, time.perf_counter() - self._start)
        return f"{loss}lr {self.optimizer.param_groups[0]['lr']:.2e}  {rate:,.0f} samples/s{memory_text(self.device)}"

    # --- tools --------------------------------------------------------------------------------------------------------

    def to_device(self, batch):
        """Returns the batch with its tensors on the device, images in the memory format of the run."""
        return check.to_device(batch, self.device, self.memory_format, self.config.precision.dtype)

    def no_gradients(self):
        """The context of evaluation."""
        return torch.no_grad() if self.world.sharded else torch.inference_mode()

    def averaged_weights(self):
        """The context in which the model holds the averages of its weights, where they are kept."""
        return contextlib.nullcontext() if self.averages is None else self.averages.swap()

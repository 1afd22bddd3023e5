"""The training loop."""

import contextlib
import math
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_leaves

from fusedtrain.monitor import RunUsage
from fusedtrain.train import activation, budget, check, graphs, schedule
from fusedtrain.train.accumulation import Group
from fusedtrain.train.callbacks import Callback, Callbacks
from fusedtrain.train.config import TrainConfig, resolve_device
from fusedtrain.train.cudnn import Benchmark
from fusedtrain.train.distributed import World, refuse_wrapped, sync_batchnorm
from fusedtrain.train.ema import averages
from fusedtrain.train.errors import InputError, require
from fusedtrain.train.evaluation import evaluate
from fusedtrain.train.feed import Feed
from fusedtrain.train.logging import is_logger
from fusedtrain.train.meter import Numbers
from fusedtrain.train.nonfinite import left_out
from fusedtrain.train.precision import full
from fusedtrain.train.preemption import Preempted, Stops
from fusedtrain.train.profile import Spans, Tracer
from fusedtrain.train.progress import Progress
from fusedtrain.train.records import Epoch, History
from fusedtrain.train.rng import seed_all
from fusedtrain.train.saving import Saving
from fusedtrain.train.stopping import Best
from fusedtrain.train.update import Buffers, Update


class Trainer:
    """Trains a model and evaluates it after every epoch.

    For other batches than pairs (inputs, targets), or other steps, override :meth:`training_step`,
    :meth:`validation_step` and :meth:`weight`.

    Args:
        model: bare: not wrapped, and not what ``torch.compile`` returns; ``config.compile`` compiles it. Moved to the
            device in place; of several processes with strategy fsdp, from where it is, unit by unit in shards.
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
        InputError: the optimizer holds none of the model's parameters or needs a closure, the device does not exist, or
            the model is wrapped or compiled already, or has layers without a shape, on the meta device or with sparse
            gradients.
        TypeError: ``model`` is no module, ``optimizer`` no optimizer, ``config`` no TrainConfig, or a class or a
            name stands in the place of a loss or a callback, or what is no logger in that of one.
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
        callbacks, loggers = list(callbacks), list(loggers)
        refuse_wrapped(model)
        may_be = not isinstance(loss, (type, str))  # a training_step of its own may go without, or with several
        for given, right, wanted in (
            (model, isinstance(model, nn.Module), "model must be a torch.nn.Module"),
            (loss, may_be, "loss must be a function or a module, such as torch.nn.CrossEntropyLoss()"),
            (
                optimizer,
                isinstance(optimizer, Optimizer),
                "optimizer must be a torch.optim.Optimizer over the model's parameters, such as"
                " torch.optim.AdamW(model.parameters(), lr=1e-3)",
            ),
            (config, isinstance(config, TrainConfig), "config must be a TrainConfig(...)"),
            *((one, not isinstance(one, type), "callbacks must be objects, made by calling") for one in callbacks),
            *((one, is_logger(one), "loggers must be objects with log(), flush() and close()") for one in loggers),
        ):
            if not right:
                raise TypeError(f"{wanted}, got {textwrap.shorten(repr(given), 80)}")
        check.check_parts(model, optimizer)
        own = {id(p) for p in model.parameters() if p.requires_grad}
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in own for p in held):
            raise InputError("the optimizer holds none of the model's trainable parameters")
        self.others = [p for p in held if p.requires_grad and id(p) not in own]  # a loss's, for instance
        self.loss, self.optimizer, self.title, self.scheduler = loss, optimizer, title, scheduler
        self.device = resolve_device(config.device)
        self.memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        config.precision.set_tf32(self.device)
        self.world = World(config.distributed, self.device)
        if self.others and self.world.size > 1:
            raise InputError(
                "the optimizer holds parameters that are not the model's, a loss's for instance: several processes"
                " average the gradients of the model alone; make them parameters of it"
            )
        if config.cuda_graphs:
            graphs.check(self)
        if self.world.rank == 0:
            config.precision.warn_where_slow(self.device)
        # torch shards contiguous weights alone; images stay as they are. The device may have no room for all of them.
        device, weights = (None, torch.contiguous_format) if self.world.sharded else (self.device, self.memory_format)
        self.model = sync_batchnorm(model.to(device, config.precision.dtype, memory_format=weights), self.world)
        activation.unwrap(self.model)  # what an earlier Trainer has wrapped
        activation.wrap(self.model, activation.matching(self.model, config.activation_checkpointing.checkpoint_modules))
        self._wrapped, self._wrapped_for = self.world.wrap(self.model, optimizer), self._learning()
        if isinstance(loss, nn.Module):
            loss.to(self.device, config.precision.dtype)
        if config.compile is not None:
            _keep_compiled_functions()
            self.model.compile(mode=config.compile)  # in place: the names of the state_dict stay
        self.scaler = config.precision.scaler(self.device)
        self.averages = averages(self.model, optimizer, config.ema_decay)
        self.group = Group(config.accumulation.accumulate, self.world.size)
        self.callbacks, self._own_loggers = Callbacks(callbacks), loggers
        self.overridden = {
            name: getattr(type(self), f"{name}_step") is not getattr(Trainer, f"{name}_step")
            for name in ("training", "validation")
        }
        self._autocast = config.precision.autocast(self.device)
        self.update = Update(optimizer, self.scaler, config.max_grad_norm)
        may_skip = config.nonfinite == "skip" or self.scaler is not None
        # Such a checkpoint cannot hold half a group: every process has gradients of its own, or a part of each, or what
        # is not finite has reached buffers.
        parted = self.world.size > 1 or config.distributed.strategy == "fsdp"
        self._undoes = (parted or may_skip) and config.accumulation.accumulate > 1
        both = nn.ModuleList(part for part in (self.model, loss) if isinstance(part, nn.Module))
        self._buffers = Buffers(both) if may_skip or self._undoes else None
        self._benchmark, self._void = Benchmark(), False  # the second: the batch counts for nothing
        self._stop, self.spans = Stops(self.world), Spans(self.device)
        self.late = self.device.type != "cpu"  # losses are read some steps later, so that the CPU does not wait
        self.numbers = Numbers(self, self.late)
        self.step_count = self.skipped = self.skipped_in_a_row = self.owed = 0
        self.feed: Feed | None = None  # the training data of a fit
        self.validation_feed: Feed | None = None  # its validation data; evaluate() makes a feed for each pass
        self.reading: tuple[Feed, int] | None = None  # while evaluating: the data, and the batch from their position on

    # --- what a subclass may change -----------------------------------------------------------------------------------

    def training_step(self, batch) -> Tensor:
        """Returns the mean loss of a batch, with its graph; the loop does the rest. Call the model by :meth:`forward`:
        its precision is that of the run, and several processes average their gradients."""
        inputs, targets = batch
        return self.loss_of(self.forward(inputs), targets)

    def validation_step(self, batch) -> dict[str, Tensor]:
        """Returns metrics of a batch by name: one value per sample ``[N]``, or their mean as a number, which counts as
        :meth:`weight` says. Accuracy is that over the labels that the loss does not ignore."""
        inputs, targets = batch
        outputs = self.forward(inputs)
        metrics = {"loss": self.loss_of(outputs, targets)}
        if isinstance(outputs, Tensor) and outputs.dim() == 2 and targets.dtype == torch.int64 and targets.dim() == 1:
            metrics["accuracy"] = (outputs.argmax(1) == targets)[check.counted(self.loss, targets)]
        return metrics

    def weight(self, batch) -> float:
        """Returns what a batch's mean loss counts in means and accumulation: its samples, by default, the rows of the
        first tensor in it.

        Raises:
            InputError: there is no such tensor.
        """
        if isinstance(batch, (tuple, list)) and batch and isinstance(batch[0], Tensor) and batch[0].dim():
            return len(batch[0])  # the usual case, without a walk over a tree
        first = next((t for t in tree_leaves(batch) if isinstance(t, Tensor) and t.dim()), None)
        if first is None:
            raise InputError(f"weight(batch) finds no samples in {check.describe(batch)}: override it")
        return len(first)

    def forward(self, *inputs, **named):
        """Runs the model, under autocast where that is wanted; results are float32 at least.

        Raises:
            InputError: the batch is a single sample, over which a BatchNorm in training has nothing to normalise, or a
                view is taken that channels_last memory does not give.
        """
        self._called = True
        try:
            with self._autocast:
                # A model that is held in evaluation, for its norms to stay, trains too.
                trains = self.model.training or torch.is_grad_enabled()
                outputs = (self._wrapped if trains else self.model)(*inputs, **named)
        except (ValueError, RuntimeError) as error:
            check.refuse_single(self, error)
            check.refuse_view(self, error)
            raise
        outputs = full(outputs)
        if self._void:  # 0/0 of a mean over nothing has gradients that are NaN, also times 0
            for t in tree_leaves(outputs):
                if isinstance(t, Tensor) and t.grad_fn is not None:  # no parameter, on which the hook would stay
                    t.register_hook(torch.zeros_like)
        return outputs

    def loss_of(self, outputs, targets) -> Tensor:
        """Returns ``self.loss`` of a batch.

        Raises:
            InputError: on the CPU, a class label is none of the model's classes: which one, and where. On a GPU the
                loss fails an assertion of the device, from which nothing can be read any more: CUDA's error remains.
        """
        try:
            return self.loss(outputs, targets)
        except (IndexError, RuntimeError, ValueError) as error:
            check.refuse_label(self, outputs, targets, error)
            check.refuse_view(self, error)
            raise

    # --- the step -----------------------------------------------------------------------------------------------------

    def step(self, group: Iterable) -> bool | Tensor:
        """One update of the weights from the micro-batches of a group.

        Args:
            group: gives (batch, whether its samples count, whether it is the group's last).

        Returns:
            Whether the update was applied: one whose gradients are not finite is not. A tensor where the device decides
            and nobody waits for it: an optimizer of ``fusedtrain.optim`` on a GPU.
        """
        enter = self.spans.enter
        if not self.group.done and self._buffers is not None:
            self._buffers.keep()
        for batch, counts, last in group:
            enter("copy")
            batch = self.to_device(batch)
            weight = self._weigh(batch, counts)
            self._void = not weight and self.world.size > 1
            enter("forward")
            with self.world.sync(self._wrapped, last):
                self._called = False
                loss = self.training_step(batch)
                require(
                    self._called or self._wrapped is self.model,
                    "training_step must call the model by self.forward(...): of another call, such as self.model(...),"
                    " several processes do not average the gradients",
                )
                enter("backward")
                if weight or self._void:  # the others wait for the gradients
                    self._scaled(loss, weight).backward()
            self._void = False
            self._note(batch, loss, weight)
            enter("data")
        enter("optimizer")
        total, finite = self._agree()
        applied = self.update(self.group.correction(total)) if finite and total else self.update.discard()
        if applied is not False:
            self._follow()
        if self._buffers is not None:
            self._buffers.put_back(unless=applied)
        self.group.clear()
        return applied

    def _weigh(self, batch, counts: bool) -> float:
        weight = float(self.weight(batch)) if counts else 0.0
        if self.group.nominal is None:
            self.group.nominal = self.world.decide(weight) or 1.0
        return weight

    def _scaled(self, loss: Tensor, weight: float) -> Tensor:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = check.describe(loss)
            raise InputError(f"training_step must return the mean loss, a tensor of one number, got {found}")
        share = self.group.share(weight)
        if share != 1.0:
            loss = loss * share
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _note(self, batch, loss: Tensor, weight: float) -> None:
        """Keeps what is needed for the means, and to name what was not finite."""
        self.group.add(weight)
        self.feed.advance()
        self._batches.append(batch)
        if weight:
            loss = (loss.detach().reshape(()) if self.late else loss.item()) * weight  # it may be [1]
        else:
            loss = loss.detach().new_zeros(()) if self.late else 0.0
        self._group_loss = self._group_loss + loss if self.group.done > 1 else loss

    def _agree(self) -> tuple[float, bool]:
        """Returns the weight of the group over all processes, and whether the loss is finite on all of them."""
        self._group_weight = self._total = total = self.group.weight
        if self.late:  # nobody waits for the loss: the gradients tell
            (self._total,) = (total,) = self.world.sum(total)
        elif self.world.size > 1:
            total, self._group_loss = self.world.sum(total, self._group_loss)
            self._group_weight = self._total = total
        return total, self.late or math.isfinite(self._group_loss)

    def _follow(self) -> None:
        """What moves with every applied update."""
        if self.owed:  # it moved for one that turned out, later, not to have been applied
            self.owed -= 1
        elif self.per_step:
            self.schedule.step()
        if self.averages is not None:
            self.averages.update()

    # --- the run ------------------------------------------------------------------------------------------------------

    def fit(self, train: Iterable, valid: Iterable | None = None) -> History:
        """Trains for ``config.epochs`` epochs, from the newest checkpoint where there is one.

        Args:
            train: gives batches anew each time it is iterated over, as a DataLoader does; where it, or else its
                samplers and its dataset, have ``set_epoch``, that is called before each pass. To continue in the middle
                of an epoch without reading it again, see :class:`fusedtrain.train.feed.Feed`.
            valid: the same for evaluation. For several processes torch's ``DistributedSampler`` fills up with samples
                that then count twice; ``EpochSampler(..., shuffle=False)`` gives each one once.

        Raises:
            InputError: before the first step, when another run saves in the folder of the checkpoints, or the data are
                empty or do not fit the model, also the last batch where their length tells its size; later, when only
                loading shows that a label or the size of a batch does not (:meth:`loss_of`, :meth:`forward`).
            NonFiniteError: the loss or a gradient was not finite; the weights are those before the update. On a GPU,
                with an optimizer of ``fusedtrain.optim``, the update is left out at once, but the error comes some
                steps later, when the loss is read.
            Preempted: a signal came; the state was saved. Ctrl-C at a prompt, in a notebook too, is KeyboardInterrupt.
        """
        with self._stop, contextlib.ExitStack() as self.held:
            self.held.callback(self.spans.enter, None)
            self.held.callback(self.update.give_back)
            # So far there is nothing to save.
            with self._stop.interruptible(), schedule.put_back_if_refused(self.optimizer):
                self._prepare(train, valid)
            self._stop.together()
            self._run(valid)
        return self.history

    def _run(self, valid: Iterable | None) -> None:
        error = None
        try:
            with self.progress:
                self.callbacks.call("on_fit_start", self)
                while self.feed.epoch < self.config.epochs and not self.best.stop:
                    self._epoch(valid)
            self.saving.finish()
        except Preempted as stop:
            error = stop
            self._undo_group()
            self.saving.save()
            raise
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._finish(error)

    def _undo_group(self) -> None:
        """Takes back the unfinished group where a checkpoint cannot hold it."""
        if self._undoes and self.group.done:
            self.update.discard()
            self._buffers.put_back(unless=False)
            self.group.clear()
            self.feed.to_group_start()

    def _prepare(self, train: Iterable, valid: Iterable | None) -> None:
        config = self.config
        metrics, compiled = {}, config.compile is not None
        # What runs once is not worth a graph, of training images in evaluation.
        with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
            for name, batches in (("training", train), ("validation", valid)):
                if batches is not None:
                    metrics = check.check_data(self, name, batches)
        monitor = config.early_stopping.monitor
        if valid is not None and monitor not in metrics:
            raise InputError(f"monitor must be one of {', '.join(metrics)}, got {monitor!r}")
        if valid is None and monitor != "loss":
            raise InputError(f"monitor {monitor!r} needs validation data")
        budget.fit(self, train)
        self.update.take()
        self.update.discard()  # what is left of other runs, or of a backward before this one
        self.group.clear()
        self.skipped_in_a_row = self.owed = 0
        if self.device.type == "cuda":
            self.held.enter_context(self._benchmark.during(config.cudnn_benchmark))
        seed_all(config.seed + self.world.rank)
        self.feed = Feed(train, self.world)
        # A feed refuses what cannot work.
        self.validation_feed = None if valid is None else Feed(valid, self.world, "validation")
        steps = self.feed.steps()
        updates = self.updates_per_epoch = None if steps is None else -(-steps // self.group.size)
        self.schedule, self.per_step = schedule.make(
            config.schedule, self.scheduler, self.optimizer, config.epochs, updates, config.early_stopping.direction
        )
        self.ticks = updates if self.per_step else 1  # of the schedule, per epoch
        self.best = Best(config.early_stopping)
        self.numbers, self._batches = Numbers(self, self.late), []
        self._group_loss = self._group_weight = self._total = 0.0
        self.groups_at_start: int | None = None  # of the optimizer's parameters, before callbacks let others join
        self.spans.enter("other")
        self.feed.rewind(0)
        self.saving = Saving(self)
        resumed = self.saving.resume()
        shown = self.world.rank == 0
        done = self.step_count if updates is None else self.feed.epoch * updates + self.feed.updates(self.group.size)
        self.progress = Progress(self.title, config.epochs, updates, done, shown)
        if resumed:
            self.progress.line(f"{self.title}  continues with {resumed}")
        # A second fit begins its epochs anew, behind the lines of the first.
        done = self.step_count, len(self.history.epochs) if resumed else math.inf
        self.loggers = self._own_loggers + (config.logging.open(asdict(config), *done) if shown else [])
        self.usage = RunUsage() if config.logging.log_usage and self.loggers else None
        self.spans.usage = self.usage and self.usage.stages
        self._make_step = graphs.Graphs(self).step if config.cuda_graphs else self.step
        self._tracer = Tracer(config.profile, self.spans) if config.profile.profile_dir is not None and shown else None

    def _epoch(self, valid: Iterable | None) -> None:
        feed = self.feed
        self.model.train()
        self._call_on_epoch_start()
        self._take_in()
        feed.start(self._stop.wait)
        self.numbers.begin()
        self.spans.enter("data")
        for group in feed.groups(self.group, self._stop.wait, self._undoes):
            if self._tracer is not None:
                self._tracer.step()
            self.numbers.note_rate()
            self._after_step(self._make_step(group))
        if not feed.used:
            raise InputError(
                f"the training data hold no batch in epoch {feed.epoch + 1}: they must give batches anew in each"
            )
        self.numbers.read(wait=True)
        self.numbers.end()
        self.spans.enter("evaluation")
        metrics = {} if valid is None else self.evaluate(valid)
        self._end_epoch(metrics)

    def _call_on_epoch_start(self) -> None:
        """A run that goes on amid an epoch calls it again: the groups that joined then may join once more."""
        groups = self.optimizer.param_groups
        if self.groups_at_start is None:
            self.groups_at_start = len(groups)
        joined = groups[self.groups_at_start :]
        del groups[self.groups_at_start :]
        try:
            self.callbacks.call("on_epoch_start", self, self.feed.epoch)
        finally:
            own = {id(p) for group in joined for p in group["params"]}
            new = [g for g in groups[self.groups_at_start :] if not own.issuperset(map(id, g["params"]))]
            groups[self.groups_at_start :] = joined + new

    def _learning(self) -> set[str]:
        return {name for name, p in self.model.named_parameters() if p.requires_grad}

    def _take_in(self) -> None:
        """What a callback may have let learn: parameters and groups of them."""
        learning = self._learning()
        new, gone = sorted(learning - self._wrapped_for), sorted(self._wrapped_for - learning)
        if new and isinstance(self._wrapped, DistributedDataParallel):
            raise InputError(
                f"{new[0]} began to learn after the Trainer was made: several processes"
                " average the gradients of those parameters alone that learn from the start"
            )
        if gone and isinstance(self._wrapped, DistributedDataParallel) and not self._wrapped.find_unused_parameters:
            raise InputError(
                f"{gone[0]} learns no longer, but several processes wait for its gradient;"
                " Distributed(find_unused_parameters=True) lets them go on without"
            )
        self.learning = hash((frozenset(learning), *(m.training for m in self.model.modules())))
        schedule.join(self.schedule, self.optimizer)
        if self.averages is not None:
            self.averages.join()
        self.update.look(self.model)

    def _after_step(self, applied: bool | Tensor) -> None:
        self.step_count += 1
        self.numbers.step(self._group_loss, self._group_weight, applied)
        if applied is True:
            self.skipped_in_a_row = 0
        elif applied is False and self._total:  # else there was nothing to learn
            left_out(self, self.step_count, float(self._group_loss), self._batches)
        self._batches.clear()
        if self.step_count % self.config.logging.log_every == 0:
            self.numbers.log_step()
        self.progress.step_done(time.perf_counter(), self.numbers.shown)
        if self.callbacks.on_step_end is not None:
            self.callbacks.on_step_end(self)
        self.saving.after_step()
        self.spans.enter("data")

    def _end_epoch(self, metrics: dict[str, float]) -> None:
        """All that follows from the numbers of an epoch; rank 0 decides."""
        config, epoch, numbers = self.config, self.feed.epoch, self.numbers
        loss, weight = float(numbers.loss_sum), numbers.weight
        if self.late:
            loss, weight = self.world.sum(loss, weight)
        mean, rate = loss / weight if weight else math.nan, weight / numbers.seconds
        entry = Epoch(epoch + 1, mean, metrics, numbers.seconds, rate)
        self.history.epochs.append(entry)
        self.callbacks.call("on_validation_end", self, metrics)
        monitored = metrics.get(config.early_stopping.monitor, math.nan) if metrics else entry.train_loss
        better = self.world.decide(self.best.observe(epoch + 1, monitored))
        if isinstance(self.schedule, (schedule.Plateau, ReduceLROnPlateau)):
            observe = self.schedule.observe if isinstance(self.schedule, schedule.Plateau) else self.schedule.step
            observe(self.world.decide(monitored))
        elif not self.per_step:
            self.schedule.step()
        numbers.loss_sum = numbers.seconds = numbers.weight = 0.0
        self.groups_at_start = None
        self.feed.rewind(epoch + 1)
        numbers.log(
            {"epoch": epoch + 1, "train_loss": entry.train_loss} | {f"valid_{k}": v for k, v in metrics.items()}
        )
        self.spans.enter("checkpoint")
        self.saving.after_epoch(better)
        self.progress.epoch_done(entry)
        self.callbacks.call("on_epoch_end", self, entry)
        self.spans.enter("other")
        self._stop.together()

    def _finish(self, error: BaseException | None) -> None:
        ends = [logger.close for logger in self.loggers] + ([] if self._tracer is None else [self._tracer.close])
        failed = None
        for end in ends:
            try:
                end()
            except Exception as failure:
                if error is None:
                    error = failed = failure
                else:  # which tells more
                    warnings.warn(f"at the end of a run that failed: {failure}", stacklevel=2)
        self.feed.close()
        self._make_step = self.step  # a graph holds the memory of a whole step
        schedule.leave(self.optimizer)
        self.callbacks.call("on_fit_end", self, error)
        self.spans.enter(None)
        if failed is not None:
            raise failed
        if error is None:
            self.progress.line(f"{self.title}  {self.spans}")

    @property
    def history(self) -> History:
        """What the run has brought so far."""
        return self.numbers.history

    @property
    def last_loss(self) -> Tensor | float | None:
        """The loss of the last update; on a GPU a tensor."""
        return self.numbers.last

    # --- tools --------------------------------------------------------------------------------------------------------

    def to_device(self, batch):
        """Returns the batch with its tensors on the device, images in the memory format of the run."""
        self._benchmark.see(batch)
        return check.to_device(batch, self.device, self.memory_format, self.config.precision.dtype)

    def no_gradients(self):
        """The context of evaluation. Not that of inference: what a model keeps from there for later, such as a grid of
        positions, could not be trained with."""
        return torch.no_grad()

    def evaluate(self, batches: Iterable) -> dict[str, float]:
        """Returns the means of the metrics over all samples; with averaged weights where they are kept."""
        return evaluate(self, batches)

    @contextlib.contextmanager
    def bare(self):
        """Within the ``with`` block the model trains without what wraps it: other processes take no part."""
        wrapped, self._wrapped = self._wrapped, self.model
        try:
            yield
        finally:
            self._wrapped = wrapped

    @contextlib.contextmanager
    def averaged_weights(self):
        """The context in which the model holds the averages of its weights, where they are kept."""
        if self.averages is None:
            yield
            return
        try:
            with self.averages.swap():
                self.world.reshard(self.model)
                yield
        finally:
            self.world.reshard(self.model)


def _keep_compiled_functions() -> None:
    """Lets torch.compile take graphs with autograd Functions, such as the fused ops', from its cache on disk when a run
    begins again: PyTorch from 2.12 on knows them by their code."""
    import torch._functorch.config as options  # pulls in much

    options.autograd_cache_allow_custom_autograd_functions = True

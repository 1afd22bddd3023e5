"""What a run writes and reads: checkpoints of its whole state, and weights."""

import base64
import contextlib
import itertools
import textwrap
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from fusedtrain._files import locked, remove_unfinished, write_tensors
from fusedtrain.train import schedule
from fusedtrain.train.checkpoint import CheckpointError, CheckpointStore
from fusedtrain.train.distributed import World
from fusedtrain.train.ema import OptimizersAverages
from fusedtrain.train.errors import InputError, make_folder, require, require_count
from fusedtrain.train.records import Epoch
from fusedtrain.train.rng import rng_state
from fusedtrain.train.state_tree import DTYPES, NAMES
from fusedtrain.train.weights import canonical_keys, load_canonical, nonfinite_names, save_weights

VERSION = 1
LOCK = ".lock"  # in the folder of the checkpoints
TEXTS = ("ranks", "history", "group", "others")  # their tensors change from save to save


@dataclass(frozen=True)
class Checkpoint:
    """When and where the whole state of a run is saved, so that it continues after any end as if there had been none.

    Args:
        directory: of the checkpoints, made where it is missing, of one run at a time; None saves none.
        every_steps: save after so many updates; None: after every epoch only.
        keep: how many stay.
        asynchronous: a thread writes while training goes on.
        resume: continue from the newest checkpoint in ``directory``, where there is one.

    Raises:
        InputError: a number is no whole one of at least 1.
    """

    directory: Path | None = None
    every_steps: int | None = None
    keep: int = 3
    asynchronous: bool = False
    resume: bool = True

    def __post_init__(self):
        if self.every_steps is not None:
            require_count("every_steps", self.every_steps)
        require_count("keep", self.keep)


@contextlib.contextmanager
def alone(directory: Path, world: World):
    """Within the ``with`` block no other run saves in ``directory``: rank 0 holds a lock, of which the system lets go
    when the process ends, killed or not.

    Raises:
        InputError: on all processes, when another run holds it.
    """
    with contextlib.ExitStack() as held:
        free = True
        if world.rank == 0:
            with contextlib.suppress(OSError, ImportError):  # without locks: some network file systems, and Windows
                free = held.enter_context(locked(directory / LOCK, wait=False))
        if not world.decide(free):
            raise InputError(
                f"another run is saving its checkpoints in {directory}: the two would remove each other's; end that one"
                " or take another folder"
            )
        yield


class Saving:
    """The state of a :class:`~fusedtrain.train.Trainer` in its checkpoints.

    Rank 0 writes; what differs between processes, the state of their generators, is gathered first. With the strategy
    fsdp every rank writes its part, see :mod:`fusedtrain.train.sharded`. Either way a run may go on with another number
    of processes.
    """

    def __init__(self, trainer):
        self.trainer, self.config = trainer, trainer.config.checkpoint
        self.fsdp, self.store = trainer.world.config.strategy == "fsdp", None
        self._loss_at_start = {name: buffer.clone() for name, buffer in _loss_buffers(trainer).items()}
        if self.config.directory is not None:
            require(
                not hasattr(trainer.optimizer, "consolidate_state_dict"),
                "checkpoints do not go with ZeroRedundancyOptimizer, of whose states each process has a part; take"
                ' Distributed("fsdp") to share them out',
            )
            make_folder(self.config.directory, "the folder of the checkpoints")
            trainer.held.enter_context(alone(Path(self.config.directory), trainer.world))
        for path in (trainer.config.weights, trainer.config.best_weights):
            if path is not None and trainer.world.rank == 0:
                remove_unfinished(Path(path))
        if self.config.directory is None:
            return
        # Losses and the gradients of half a group are what they are; what is wrong with them is found elsewhere.
        names = ["history", "group", *(f"model/{name}" for name in nonfinite_names(trainer.model))]
        if self.fsdp:
            from fusedtrain.train.sharded import ShardedCheckpointStore as Store
        else:
            Store = CheckpointStore
        self.store = Store(self.config.directory, self.config.keep, self.config.asynchronous, names)

    # --- when ---------------------------------------------------------------------------------------------------------

    def after_step(self) -> None:
        if self.store is None:
            return
        self.store.check()
        every = self.config.every_steps
        if every is not None and self.trainer.step_count % every == 0:
            self.trainer.spans.enter("checkpoint")
            self.save(wait=False)

    def after_epoch(self, best: bool) -> None:
        path = self.trainer.config.best_weights
        if best and path is not None:
            self._save_weights(path)  # first: a run that is killed here makes the epoch, and the file, again
        self.save(wait=False)

    def finish(self) -> None:
        """Writes the final weights."""
        if self.store is not None:
            self.store.wait()
        if self.trainer.config.weights is not None:
            self._save_weights(self.trainer.config.weights)

    def _save_weights(self, path: Path) -> None:
        t = self.trainer
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)  # it was there when the run began
            with t.averaged_weights():
                if not t.world.sharded:
                    if t.world.rank == 0:
                        save_weights(path, t.model)
                    return
                state = canonical_keys(whole_model(t))
            if t.world.rank == 0:
                write_tensors(path, state)
        except OSError as error:
            raise CheckpointError(f"the weights could not be written to {path}: {error.strerror}") from error

    # --- what ---------------------------------------------------------------------------------------------------------

    def save(self, wait: bool = True) -> None:
        """Saves the state, where checkpoints are wanted; with ``wait`` it is on the disk then, for all processes. What
        was logged is on the disk in any case.
        """
        for logger in self.trainer.loggers:
            logger.flush()  # what a run has logged that goes on from here is not logged again
        if self.store is None:
            return
        state, world, failure = self.state(), self.trainer.world, None
        if self.fsdp:
            self.store.save(self.trainer.step_count, state)
            if wait:
                self.store.wait()  # on the disk for all, or an error for all
            return
        if world.rank == 0:
            try:
                self.store.save(self.trainer.step_count, state)
                if wait:
                    self.store.wait()
            except CheckpointError as error:
                failure = error
        # The launcher ends rank 0 when another process has ended: nobody goes before the file is there.
        reason = world.decide(failure and str(failure)) if wait else failure
        if reason is not None:
            raise failure or CheckpointError(reason)

    def state(self) -> dict:
        """The whole state of the run: nested dicts of tensors and plain values."""
        t = self.trainer
        t.numbers.read(wait=True)
        grads = {name: p.grad for name, p in t.model.named_parameters() if p.grad is not None and t.group.done}
        group = {
            "loss": float(t._group_loss) if t.group.done else 0.0,
            "grads": grads,
            "buffers": t._buffers.state() if t.group.done and t._buffers is not None else [],
            "other_grads": [p.grad for p in t.others if t.group.done],
        }
        own = {
            "rng": t.feed.rng_state(),
            "at_start": t.feed.at_start,
            "validation_rng": None if t.validation_feed is None else t.validation_feed.rng_state()["loader"],
            "loss": float(t.numbers.loss_sum),
            "weight": t.numbers.weight,
            "loss_buffers": self._moved_loss_buffers(),
        }
        state = {
            "version": VERSION,
            "model": canonical_keys(model_state(t)),
            "optimizer": optimizer_state(t),
            "optimizer_class": type(t.optimizer).__name__,
            "groups": None if self.fsdp else _names_of_groups(t),
            "groups_at_start": t.groups_at_start,
            "schedule": t.schedule.state_dict(),
            "ticks": t.ticks,
            "epochs": t.config.epochs,
            "scaler": None if t.scaler is None else t.scaler.state_dict(),
            "averages": self._averages(),
            "best": t.best.state_dict(),
            "group": t.group.state_dict() | group,
            "others": [p.detach() for p in t.others],
            "feed": t.feed.state_dict(),
            "ranks": t.world.gather(own),
            "step_count": t.step_count,
            "skipped": [t.skipped, t.skipped_in_a_row, t.owed],
            "seconds": t.numbers.spent(),
            "history": {
                "epochs": [vars(epoch) for epoch in t.history.epochs],
                "step_losses": torch.tensor(t.history.step_losses, dtype=torch.float64),
            },
        }
        # Over the ranks go only the tensors that every run of this model has.
        return state | {name: as_text(state[name]) for name in TEXTS} if self.fsdp else state

    def _moved_loss_buffers(self) -> dict:
        """What a loss has gathered, such as a running centre; what stays, such as weights of classes, is an option."""
        now, before = _loss_buffers(self.trainer), self._loss_at_start
        return {name: b.cpu() for name, b in now.items() if name not in before or not _same(b, before[name])}

    def _averages(self) -> dict | None:
        """Of sharded runs those of the optimizer stand in its state alone, for that is not made of its own tensors."""
        averages = self.trainer.averages
        if averages is None or not (self.fsdp and isinstance(averages, OptimizersAverages)):
            return averages and averages.state_dict()
        return {}

    def resume(self) -> str | None:
        """Goes on from the newest checkpoint, where there is one; returns which, as text.

        Raises:
            InputError: there are checkpoints, but none is whole, or it does not fit this run.
        """
        world = self.trainer.world
        if self.store is None or not self.config.resume:
            return None
        steps = self.store.steps() if world.rank == 0 else None
        if not world.decide(bool(steps)):
            return None
        try:
            state, info = self._fill() if self.fsdp else self._newest()
        except CheckpointError as error:
            raise InputError(str(error)) from error
        # The ranks of fsdp have read it into their parts already; they end with the error.
        with contextlib.nullcontext() if self.fsdp else _put_back_if_refused(self.trainer):
            self.load(state)
        return str(info)

    def _fill(self) -> tuple:
        """The newest checkpoint that is whole, read into the tensors of this run, of which the optimizer needs all."""
        make_optimizer_state(self.trainer)
        return self.store.load_into(self.state(), may_lack="optimizer/state")

    def _newest(self) -> tuple:
        """The newest checkpoint that is whole, which rank 0 finds."""
        world, found, failure = self.trainer.world, None, None
        if world.rank == 0:
            try:
                found = self.store.load()
            except CheckpointError as error:
                failure = str(error)
        step, failure = world.decide((found and found[1].step, failure))
        if failure is not None:
            raise CheckpointError(failure)
        return found or self.store.load(step)

    def load(self, state: dict) -> None:
        """Puts the run into the state that :meth:`state` returned."""
        t = self.trainer
        state = state | {name: from_text(state.get(name)) for name in TEXTS}
        if state["version"] > VERSION:
            raise InputError(f"the checkpoint has version {state['version']}, this package reads up to {VERSION}")
        if state["group"]["done"] and len(state["ranks"]) != t.world.size:
            count = len(state["ranks"])
            raise InputError(f"the checkpoint ends amid an update of {count} processes: go on with as many first")
        size = state["group"].get("size", t.group.size)
        if state["group"]["done"] and size != t.group.size:
            raise InputError(f"the checkpoint ends amid an update of {size} micro-batches: go on with as many first")
        kind, own = state.get("optimizer_class"), type(t.optimizer).__name__
        if kind not in (None, own):
            raise InputError(f"the checkpoint in {self.config.directory} was made with the optimizer {kind}, not {own}")
        try:
            t.feed.load_state_dict(state["feed"])
        except ValueError as error:
            raise InputError(f"the checkpoint in {self.config.directory} is of other data: {error}") from error
        try:
            load_model_state(t, state["model"])
            given = _hyperparameters(t.optimizer)
            _let_join(t, state.get("groups"), state["optimizer"])
            load_optimizer_state(t, state["optimizer"], state.get("groups"))
            if state["others"] is not None:
                load_others(t, state["others"])
            ranks, rank = state["ranks"], t.world.rank
            load_loss_buffers(t, ranks[min(rank, len(ranks) - 1)].get("loss_buffers", {}))
        except (RuntimeError, ValueError, KeyError) as error:
            reason = textwrap.shorten(" ".join(str(error).splitlines()[:2]), 300, placeholder=" ...")
            raise InputError(
                f"the checkpoint in {self.config.directory} is of another model or optimizer: {reason}"
            ) from error
        try:
            if t.scheduler is None:
                now = t.ticks, t.config.epochs
                before = state.get("ticks"), state.get("epochs", now[1])
                place = None if before == now else self._place(state["skipped"], before[0])
                schedule.load(t.schedule, state["schedule"], before, now, place)
            else:
                t.schedule.load_state_dict(state["schedule"])
        except (KeyError, ValueError) as error:
            reason = f"{t.config.schedule.schedule} cannot go on from it"
            raise InputError(f"the checkpoint in {self.config.directory} is of another schedule: {reason}") from error
        self._tell_overruled(given)
        for name in ("scaler", "averages"):
            part = getattr(t, name)
            if part is not None and state[name] is not None:
                part.load_state_dict(state[name])
        t.groups_at_start = state.get("groups_at_start")
        if t.averages is not None and state["averages"] is None:  # they begin here
            t.averages.restart()
        if t.scaler is not None:  # it makes its tensors with the first loss, but a whole group may be waiting here
            t.scaler.scale(torch.zeros((), device=t.device))
        t.best.load_state_dict(state["best"])
        t.group.load_state_dict(state["group"])
        t._group_loss = state["group"]["loss"]
        params = dict(t.model.named_parameters())
        for name, grad in state["group"]["grads"].items():
            params[name].grad = grad.to(params[name].device)
        for p, grad in zip(t.others, state["group"].get("other_grads", [])):
            p.grad = None if grad is None else grad.to(p.device)
        if t._buffers is not None:
            t._buffers.keep()
            t._buffers.load(state["group"].get("buffers", []))
        t.step_count, (t.skipped, t.skipped_in_a_row, t.owed) = state["step_count"], state["skipped"]
        t.numbers.seconds = state["seconds"]
        t.history.epochs[:] = [Epoch(**epoch) for epoch in state["history"]["epochs"]]
        t.history.step_losses[:] = state["history"]["step_losses"].tolist()
        if len(ranks) == t.world.size or t.device.type == "cpu":  # on the CPU every process has the sums of all
            own = ranks[min(rank, len(ranks) - 1)]
            t.numbers.loss_sum, t.numbers.weight = own["loss"], own["weight"]
        elif rank == 0:  # another number of processes: what all of them have done so far is in the sum
            t.numbers.loss_sum, t.numbers.weight = (sum(one[name] for one in ranks) for name in ("loss", "weight"))
        if rank < len(ranks):
            t.feed.at_start = ranks[rank]["at_start"]
            t.feed.set_rng_state(ranks[rank]["rng"])
            if t.validation_feed is not None and ranks[rank].get("validation_rng") is not None:
                t.validation_feed.set_rng_state(rng_state() | {"loader": ranks[rank]["validation_rng"]})

    def _place(self, skipped: list[int], before: int | None) -> int | None:
        """Returns how often the schedule of this run would have moved until here; None where the data's length is not
        known. ``before``: how often it moved in an epoch of the run that saved."""
        t = self.trainer
        if not t.per_step:
            return t.feed.epoch
        if t.updates_per_epoch is None:
            return None
        left_out = (skipped[0] - skipped[2]) * (t.ticks / before if before and before > 1 else 1)
        return t.feed.epoch * t.updates_per_epoch + t.feed.updates(t.group.size) - round(left_out)

    def _tell_overruled(self, given: list[dict]) -> None:
        """Warns of hyperparameters that are not those of the checkpoint, which the run goes on with."""
        if self.trainer.world.rank > 0:
            return
        told = {}
        for new, old in zip(given, _hyperparameters(self.trainer.optimizer)):
            told |= {name: (old[name], value) for name, value in new.items() if old.get(name, value) != value}
        for name, (old, new) in told.items():
            place = f"of its checkpoint in {self.config.directory}"
            warnings.warn(f"the run goes on with {name} {old} {place}; {new} is without effect", stacklevel=2)


_TOLD = ("weight_decay", "momentum", "betas", "eps", "alpha", "dampening", "nesterov", "amsgrad", "maximize")


def _hyperparameters(optimizer) -> list[dict]:
    """Of each group what schedules do not move."""
    found = []
    for group in optimizer.param_groups:
        moved = ("momentum", "betas") if "max_momentum" in group else ()  # by onecycle
        own = {name: _plain(group[name]) for name in _TOLD if name in group and name not in moved}
        found.append(({"lr": float(group["initial_lr"])} if "initial_lr" in group else {}) | own)
    return found


def _plain(value):
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, torch.Tensor) else value


# --- sharded or not ---------------------------------------------------------------------------------------------------


def _options(whole: bool = False):
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=whole, cpu_offload=whole)


def _fsdp(t) -> bool:
    return t.world.config.strategy == "fsdp"


def whole_model(t) -> dict:
    """The whole state_dict of a sharded model, on rank 0."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return get_model_state_dict(t.model, options=_options(whole=True))


def model_state(t) -> dict:
    """The model's state_dict; with fsdp the own part of each tensor."""
    if not _fsdp(t):
        return t.model.state_dict()
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    state = get_model_state_dict(t.model, options=_options())
    if t.world.size > 1:  # what is not sharded, such as running means, is rank 0's: a file holds it once
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and not hasattr(value, "device_mesh"):
                state[name] = value.detach().clone()
                dist.broadcast(state[name], 0)
    return state


def load_model_state(t, state: dict) -> None:
    if not _fsdp(t):
        load_canonical(t.model, state)
        return
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    set_model_state_dict(t.model, state, options=_options())


@contextlib.contextmanager
def _put_back_if_refused(t):
    """Where the ``with`` block fails model, loss and optimizer are as before: who catches the error goes on with them,
    not with a part of what did not fit."""
    tensors = [*t.model.parameters(), *t.model.buffers(), *t.others, *_loss_buffers(t).values()]
    kept, learning = [tensor.detach().clone() for tensor in tensors], [tensor.requires_grad for tensor in tensors]
    state, groups = t.optimizer.state, list(t.optimizer.param_groups)
    try:
        yield
    except BaseException:
        for tensor, value, learns in zip(tensors, kept, learning):
            tensor.requires_grad_(learns).detach().copy_(value)
        t.optimizer.state, t.optimizer.param_groups = state, groups
        raise


def load_others(t, state: list) -> None:
    if len(state) != len(t.others):
        count = len(t.others)
        raise ValueError(f"the optimizer holds {count} parameters beside the model's, the checkpoint {len(state)}")
    with torch.no_grad():
        for p, value in zip(t.others, state):
            p.copy_(value)


def _loss_buffers(t) -> dict:
    """The buffers of the loss that are not the model's."""
    own = {id(module) for module in t.model.modules()}
    modules = t.loss.named_modules() if isinstance(t.loss, torch.nn.Module) else ()
    return {
        f"{path}.{name}".lstrip("."): buffer
        for path, module in modules
        for name, buffer in module.named_buffers(recurse=False)
        if id(module) not in own
    }


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return bool(((one == other) | (one != one) & (other != other)).all())  # NaN is the same as NaN


def load_loss_buffers(t, state: dict) -> None:
    known = dict(t.loss.named_modules()) if isinstance(t.loss, torch.nn.Module) else {}
    for name, value in state.items():
        path, _, leaf = name.rpartition(".")
        if path not in known or leaf not in known[path]._buffers:
            raise ValueError(f"the loss has no buffer {name}")
        own = known[path]._buffers[leaf]
        if own is not None and own.shape == value.shape:
            own.copy_(value)
        else:
            known[path]._buffers[leaf] = value.to(t.device, copy=True)


def _names_of_groups(t) -> list[list[str | None]]:
    """The names of the optimizer's parameters, None for those that are not the model's."""
    names = {id(p): name for name, p in canonical_keys(dict(t.model.named_parameters())).items()}
    return [[names.get(id(p)) for p in group["params"]] for group in t.optimizer.param_groups]


def _let_join(t, groups: list[list[str | None]] | None, state: dict) -> None:
    """Adds the groups to the optimizer that have joined it during the run, which a callback does in some epoch."""
    own = len(t.optimizer.param_groups)
    if groups is None or len(groups) <= own:
        return
    params = canonical_keys(dict(t.model.named_parameters()))
    if any(name not in params for names in groups[own:] for name in names):
        raise ValueError("groups joined the optimizer during the run, of parameters that this model does not have")
    for names, saved in zip(groups[own:], state["param_groups"][own:]):
        joined = [params[name].requires_grad_() for name in names]
        t.optimizer.add_param_group({**saved, "params": joined})
    schedule.join(t.schedule, t.optimizer)
    if t.averages is not None:
        t.averages.join()


def make_optimizer_state(t) -> None:
    """Lets an optimizer without any states make those of all parameters, by a step at rate 0, to be filled."""
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    _init_optim_state(t.optimizer)


def optimizer_state(t) -> dict:
    """The optimizer's state_dict; with fsdp by the names of the parameters, those that are not the model's by their
    place. Not torch's ``get_optimizer_state_dict``: before the first update it makes a step, which would be saved."""
    state = t.optimizer.state_dict()
    if not _fsdp(t):
        return state
    groups = _keys_of_groups(t)
    keys = [key for own in groups for key in own]
    return {
        "state": {keys[place]: own for place, own in state["state"].items()},
        "param_groups": [{**group, "params": own} for group, own in zip(state["param_groups"], groups)],
    }


def load_optimizer_state(t, state: dict, names: list[list[str | None]] | None = None) -> None:
    """``names``: of the parameters in the groups of a state that has them by place."""
    if names is not None:
        state = _in_own_order(t, state, names)
    if _fsdp(t):
        groups = []
        for keys in _keys_of_groups(t):
            saved = next((group for group in state["param_groups"] if set(group["params"]) == set(keys)), None)
            if saved is None:
                raise ValueError(f"none of its groups holds just {', '.join(map(str, keys))}")
            groups.append({**saved, "params": keys})
        state = {"state": state["state"], "param_groups": groups}
    t.optimizer.load_state_dict(state)


def _in_own_order(t, state: dict, names: list[list[str | None]]) -> dict:
    """``state`` with the parameters of each group in the order of this run's, which scripts may take from a set."""
    own, flat = _names_of_groups(t), itertools.chain.from_iterable
    if own == names or len(own) != len(names) or {*flat(own)} != {*flat(names)}:
        return state
    groups = []
    for old, new, saved in zip(names, own, state["param_groups"]):
        for name in (Counter(old) - Counter(new)) | (Counter(new) - Counter(old)):
            raise ValueError(f"{name} is in another group of the optimizer now")
        places = {name: [p for p, other in zip(saved["params"], old) if other == name] for name in old}
        groups.append({**saved, "params": [places[name].pop(0) for name in new]})
    return {**state, "param_groups": groups}


def _keys_of_groups(t) -> list[list[str | int]]:
    places = itertools.count()
    return [[place if name is None else name for name, place in zip(names, places)] for names in _names_of_groups(t)]


def as_text(value):
    """``value`` with its tensors, which are on the CPU, as plain values."""
    if isinstance(value, torch.Tensor):
        data = base64.b85encode(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).decode()
        return {"tensor": data, "dtype": NAMES[value.dtype], "shape": list(value.shape)}
    if isinstance(value, dict):
        return {key: as_text(item) for key, item in value.items()}
    return type(value)(map(as_text, value)) if isinstance(value, (list, tuple)) else value


def from_text(value):
    """The inverse of :func:`as_text`."""
    if isinstance(value, dict) and "tensor" in value:
        data = bytearray(base64.b85decode(value["tensor"]))
        flat = torch.frombuffer(data, dtype=DTYPES[value["dtype"]]) if data else torch.empty(0)
        return flat.to(DTYPES[value["dtype"]]).reshape(value["shape"])
    if isinstance(value, dict):
        return {key: from_text(item) for key, item in value.items()}
    return type(value)(map(from_text, value)) if isinstance(value, (list, tuple)) else value

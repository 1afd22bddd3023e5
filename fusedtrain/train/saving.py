"""What a run writes and reads: checkpoints of its whole state, and weights."""

from pathlib import Path

import torch

from fusedtrain.train.checkpoint import CheckpointError, CheckpointStore, save_weights, write_atomic
from fusedtrain.train.errors import InputError
from fusedtrain.train.rng import rng_state, set_rng_state
from fusedtrain.train.weights import canonical_keys, load_canonical, nonfinite_names

VERSION = 1


class Saving:
    """The state of a :class:`~fusedtrain.train.Trainer` in its checkpoints.

    Rank 0 writes; what differs between processes, the state of their generators, is gathered first. Models that are
    sharded are gathered too, so that a run may go on with another number of processes.
    """

    def __init__(self, trainer):
        self.trainer, self.config = trainer, trainer.config.checkpoint
        self.store = None
        if self.config.directory is not None:
            # Losses and the gradients of half a group are what they are; what is wrong with them is found elsewhere.
            names = ["history", "group", *(f"model/{name}" for name in nonfinite_names(trainer.model))]
            self.store = CheckpointStore(self.config.directory, self.config.keep, self.config.asynchronous, names)

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
        self.save(wait=False)
        path = self.trainer.config.best_weights
        if best and path is not None:
            self._save_weights(path)

    def finish(self) -> None:
        """Writes the final weights."""
        if self.store is not None:
            self.store.wait()
        if self.trainer.config.weights is not None:
            self._save_weights(self.trainer.config.weights)

    def _save_weights(self, path: Path) -> None:
        t = self.trainer
        with t.averaged_weights():
            if not t.world.sharded:
                if t.world.rank == 0:
                    save_weights(path, t.model)
                return
            state = canonical_keys(model_state(t))
        if t.world.rank == 0:
            write_atomic(path, lambda file: torch.save(state, file))

    # --- what ---------------------------------------------------------------------------------------------------------

    def save(self, wait: bool = True) -> None:
        """Saves the state, where checkpoints are wanted; with ``wait`` it is on the disk then, for all processes."""
        if self.store is None:
            return
        state, world, failure = self.state(), self.trainer.world, None
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
        t._read_losses(wait=True)
        grads = {name: p.grad for name, p in t.model.named_parameters() if p.grad is not None and t.group.done}
        own = {"rng": rng_state(), "at_start": t._at_start, "loss": float(t._loss_sum), "weight": t._weight}
        ranks = t.world.gather(own)
        return {
            "version": VERSION,
            "model": canonical_keys(model_state(t)),
            "optimizer": optimizer_state(t),
            "schedule": t.schedule.state_dict(),
            "scaler": None if t.scaler is None else t.scaler.state_dict(),
            "averages": None if t.averages is None else t.averages.state_dict(),
            "best": t.best.state_dict(),
            "group": t.group.state_dict() | {"loss": float(t._group_loss) if t.group.done else 0.0, "grads": grads},
            "feed": t.feed.state_dict(),
            "ranks": ranks,
            "step_count": t.step_count,
            "skipped": [t.skipped, t._skipped_in_a_row],
            "seconds": t._seconds,
            "history": {
                "epochs": [vars(epoch) for epoch in t.history.epochs],
                "step_losses": torch.tensor(t.history.step_losses, dtype=torch.float64),
            },
        }

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
            state, info = self._newest()
        except CheckpointError as error:
            raise InputError(str(error)) from error
        self.load(state)
        return str(info)

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
        if state["version"] > VERSION:
            raise InputError(f"the checkpoint has version {state['version']}, this package reads up to {VERSION}")
        try:
            load_model_state(t, state["model"])
            load_optimizer_state(t, state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise InputError(
                f"the checkpoint in {self.config.directory} is of another model or optimizer: {reason}"
            ) from error
        t.schedule.load_state_dict(state["schedule"])
        for name in ("scaler", "averages"):
            part = getattr(t, name)
            if part is not None and state[name] is not None:
                part.load_state_dict(state[name])
        if t.scaler is not None:  # it makes its tensors with the first loss, but a whole group may be waiting here
            t.scaler.scale(torch.zeros((), device=t.device))
        t.best.load_state_dict(state["best"])
        t.group.load_state_dict(state["group"])
        t._group_loss = state["group"]["loss"]
        params = dict(t.model.named_parameters())
        for name, grad in state["group"]["grads"].items():
            params[name].grad = grad.to(params[name].device)
        t.feed.load_state_dict(state["feed"])
        t.step_count, (t.skipped, t._skipped_in_a_row) = state["step_count"], state["skipped"]
        t._seconds = state["seconds"]
        make = t.epoch_class
        t.history.epochs[:] = [make(**epoch) for epoch in state["history"]["epochs"]]
        t.history.step_losses[:] = state["history"]["step_losses"].tolist()
        ranks, rank = state["ranks"], t.world.rank
        if len(ranks) == t.world.size or t.device.type == "cpu":  # on the CPU every process has the sums of all
            own = ranks[min(rank, len(ranks) - 1)]
            t._loss_sum, t._weight = own["loss"], own["weight"]
        elif rank == 0:  # another number of processes: what all of them have done so far is in the sum
            t._loss_sum, t._weight = (sum(one[name] for one in ranks) for name in ("loss", "weight"))
        if rank < len(ranks):
            t._at_start = ranks[rank]["at_start"]
            set_rng_state(ranks[rank]["rng"])


# --- sharded or not ---------------------------------------------------------------------------------------------------


def _options():
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, cpu_offload=True)


def model_state(t) -> dict:
    """The model's whole state_dict."""
    if not t.world.sharded:
        return t.model.state_dict()
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return get_model_state_dict(t.model, options=_options())


def load_model_state(t, state: dict) -> None:
    if not t.world.sharded:
        load_canonical(t.model, state)
        return
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    set_model_state_dict(t.model, state, options=_options())


def optimizer_state(t) -> dict:
    if not t.world.sharded:
        return t.optimizer.state_dict()
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return get_optimizer_state_dict(t.model, t.optimizer, options=_options())


def load_optimizer_state(t, state: dict) -> None:
    if not t.world.sharded:
        t.optimizer.load_state_dict(state)
        return
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    set_optimizer_state_dict(t.model, t.optimizer, state, options=_options())

"""Applies remedies for certain: paired trials with intervals, a second trial to confirm, and a check of the losses."""

import contextlib
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from fusedtrain.diagnose import measure
from fusedtrain.diagnose.batches import CachedSource, LoaderSource
from fusedtrain.diagnose.drive import Driver, agree, random_state, ranks, set_random_state
from fusedtrain.diagnose.plan import Arm, Run
from fusedtrain.diagnose.remedies import Remedy, clone_loader, models
from fusedtrain.diagnose.statistics import Interval

PAIRS = 8
LEVEL = 0.99
LEAST = 0.02  # a smaller gain is not worth a change
STEPS = 3  # whose losses are compared
ROUNDINGS = 64  # times what rounding the weights moves the losses by: a change within the last bit moves them no more


def _kept(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def _put_back(values: dict, kept: dict) -> None:
    """Writes what was kept into the tensors that are there; a remedy may count steps in tensors, or in numbers."""
    for name, value in kept.items():
        there = values.get(name)
        if isinstance(there, Tensor) and value is not None:
            there.copy_(torch.as_tensor(value))
        elif isinstance(there, (int, float)) and isinstance(value, Tensor):
            values[name] = type(there)(value)
        else:
            values[name] = _kept(value)


class Snapshot:
    """The state of the training: weights, buffers, gradients, optimizer states, random numbers."""

    def __init__(self, driver: Driver):
        tensors = {id(t): t for model in models(driver) for t in (*model.parameters(), *model.buffers())}
        self.optimizers = driver.instrument.optimizers
        for optimizer in self.optimizers:
            tensors |= {id(p): p for group in optimizer.param_groups for p in group["params"]}
        self.tensors = [(t, t.detach().clone()) for t in tensors.values()]
        self.grads = [(t, None if t.grad is None else t.grad.detach().clone()) for t in tensors.values() if t.is_leaf]
        self.states = [
            (optimizer, p, {name: _kept(value) for name, value in state.items()})
            for optimizer in self.optimizers
            for p, state in optimizer.state.items()
        ]
        self.counts = [
            (group, {"step": _kept(group["step"])})
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            if "step" in group
        ]
        self.by_hand = [(owner, self._copy(vars(owner))) for owner, _ in driver.instrument.by_hand]
        self.random = random_state()

    def _copy(self, values: dict) -> dict:
        """Returns lists and dictionaries of tensors and numbers anew, but for the weights in them."""
        weights = {id(t) for t, _ in self.tensors}
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) and id(x) not in weights else x, values)

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, value in self.tensors:
            tensor.copy_(value)
        for tensor, grad in self.grads:
            tensor.grad = None if grad is None else grad.to(tensor.dtype, copy=True)  # a remedy may change the dtype
        for optimizer, p, state in self.states:
            _put_back(optimizer.state[p], state)
        for group, count in self.counts:
            _put_back(group, count)
        for owner, values in self.by_hand:
            vars(owner).update(self._copy(values))
        set_random_state(self.random)

    @torch.no_grad()
    def nudge(self, eps: float, seed: int) -> None:
        """Moves every weight by a rounding error of the given size, up or down at random."""
        generator = torch.Generator().manual_seed(seed)
        for tensor, value in self.tensors:
            if tensor.requires_grad:
                sign = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.int8) * 2 - 1
                tensor.mul_(1 + eps * sign.to(tensor.device, tensor.dtype))


def rehearse(driver: Driver, remedy: Remedy, inputs: dict[int, tuple]) -> str | None:
    """Runs the models once forward and backward with a remedy, outside the loop; returns the error, or None.

    Of several processes the first that fails tells all.
    """
    error = _rehearse(driver, remedy, inputs)
    if ranks() > 1:
        errors = [None] * ranks()
        dist.all_gather_object(errors, error)
        error = next((e for e in errors if e is not None), None)
    return error


def _rehearse(driver: Driver, remedy: Remedy, inputs: dict[int, tuple]) -> str | None:
    snapshot, step = Snapshot(driver), driver.instrument.step
    driver.instrument.step = None
    try:
        remedy.apply(driver)
        try:
            for model in models(driver):
                if id(model) in inputs:
                    _forward_backward(model, *inputs[id(model)])
        finally:
            remedy.undo(driver)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    finally:
        snapshot.restore()
        driver.instrument.step = step
        driver.instrument.close()
    return None


def _forward_backward(model: torch.nn.Module, args: tuple, kwargs: dict) -> None:
    alone = model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()
    with torch.enable_grad(), alone:
        output = model(*args, **kwargs)
        tensors = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        if tensors:
            params = [p for p in model.parameters() if p.requires_grad]
            torch.autograd.grad(sum(t.float().sum() for t in tensors), params, allow_unused=True)


@dataclass(frozen=True)
class LossCheck:
    """How far a remedy moves the losses of a few steps from the same state on the same batches."""

    kind: str  # the class the remedy promises
    difference: float
    allowed: float
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.difference <= self.allowed


def losses(driver: Driver, arm: Arm, snapshot: Snapshot, eps: float = 0.0, seed: int = 0):
    """Returns the losses of the first steps of an arm from a snapshot, with weights nudged by ``eps``."""
    # puts the remedies in force before the state is set
    yield Run(1, Arm(arm.remedies, CachedSource(driver.batches)), parts=True)
    snapshot.restore()
    torch.manual_seed(seed)
    if eps:
        snapshot.nudge(eps, seed)
    driver.losses = []
    yield Run(STEPS, arm, parts=True)
    values, driver.losses = driver.losses, None
    return agree(values)


def check_losses(driver: Driver, remedy: Remedy, base: tuple[Remedy, ...]):
    """Compares the losses with and without a remedy; returns a :class:`LossCheck`.

    The state of the training is that from before afterwards.
    """
    while True:
        starts = driver.starts
        check = yield from _check_losses(driver, remedy, base)
        if driver.starts == starts:  # else a script that was started again has another state
            return check


def _check_losses(driver: Driver, remedy: Remedy, base: tuple[Remedy, ...]):
    snapshot, kind = Snapshot(driver), remedy.kind
    if remedy.on_loader:
        generator = driver.loader.generator
        state = generator and generator.get_state()
        values = []
        for make, new in ((clone_loader, ()), (remedy.make, (remedy,))):
            if generator is not None:
                generator.set_state(state)
            source = LoaderSource(_Seeded(make(driver.loader)))
            values.append((yield from losses(driver, Arm((*base, *new), source), snapshot)))
            source.close()
        plain, changed = values
    else:
        source = CachedSource(driver.batches)
        plain = yield from losses(driver, Arm(base, source), snapshot)
        changed = yield from losses(driver, Arm((*base, remedy), CachedSource(driver.batches)), snapshot)
    difference = _distance(plain, changed)
    allowed, note = 0.0, ""
    if kind != "bitwise" and difference > 0:
        dtype = torch.bfloat16 if kind == "tolerance" else torch.float32
        nudged = []
        for seed in (1, 2):
            arm = Arm(base, CachedSource(driver.batches))
            nudged.append((yield from losses(driver, arm, snapshot, torch.finfo(dtype).eps, seed)))
        again = yield from losses(driver, Arm(base, CachedSource(driver.batches)), snapshot)
        # random numbers inside the model are drawn with the seed: compare like with like
        spread = max(_distance(again, other) for other in nudged)
        allowed = ROUNDINGS * (spread + torch.finfo(torch.float32).eps * max(map(abs, again)))
    if kind == "bitwise" and difference > 0 and not remedy.on_loader:
        again = yield from losses(driver, Arm(base, CachedSource(driver.batches)), snapshot)
        allowed = ROUNDINGS * _distance(plain, again)  # such as what an update by hand keeps, which is not known
    if kind == "bitwise" and difference > allowed:
        note = (
            "the samples differ: random transforms draw their numbers in the workers"
            if remedy.on_loader
            else "the losses are not the same bits"
        )
    elif kind == "bitwise" and difference > 0:
        note = "the losses of the run as it is do not repeat bit for bit either"
    snapshot.restore()
    return LossCheck(kind, difference, allowed, note)


class _Seeded:
    """A loader that starts every pass from the same random numbers."""

    def __init__(self, loader: DataLoader):
        self.loader = loader

    def __iter__(self):
        state = random_state()
        torch.manual_seed(0)
        try:
            # the order of the samples is drawn at the first batch, or before it where there are workers
            self.batches = iter(self.loader)
            return itertools.chain([next(self.batches)], self.batches)
        finally:
            set_random_state(state)

    def _shutdown_workers(self) -> None:
        getattr(self.batches, "_shutdown_workers", lambda: None)()


def _distance(one: list[float], other: list[float]) -> float:
    if len(one) != len(other) or not one:
        return float("nan")
    return max(abs(a - b) for a, b in zip(one, other))


@dataclass(frozen=True)
class Verdict:
    """What became of a remedy."""

    remedy: Remedy
    predicted: float  # share of the step
    measured: Interval  # of the last trial, at LEVEL
    seconds: tuple[float, float]  # per step, without and with it
    accepted: bool
    reason: str
    losses: LossCheck | None = None


def with_remedy(arm: Arm, remedy: Remedy) -> Arm:
    """Returns an arm with one remedy more; a loader takes the place of another."""
    if not remedy.on_loader:
        return Arm((*arm.remedies, remedy), arm.source)
    return Arm((*(other for other in arm.remedies if not other.on_loader), remedy), remedy.source)


def judge(driver: Driver, sizes: measure.Sizes, remedy: Remedy, predicted: float, arm: Arm):
    """Tries one remedy on top of what is in force in ``arm``; returns a :class:`Verdict`.

    A gain counts when the interval of the paired trial excludes 0, it exceeds 2 %, and a second, fresh trial says the
    same. The gain that is reported is that of the second trial, which had no part in choosing the remedy.
    """
    with_it = with_remedy(arm, remedy)
    for attempt in itertools.count(1):
        pairs = yield from measure.trial(driver, sizes, arm, with_it, PAIRS)
        gain = pairs.gain(LEVEL)
        if gain.low <= 0:
            return Verdict(remedy, predicted, gain, pairs.seconds(), False, "no gain that excludes chance")
        if gain.value <= LEAST:
            return Verdict(remedy, predicted, gain, pairs.seconds(), False, "the gain is below 2 %")
        if attempt == 2:
            break
    check = None
    if driver.instrument.loss is not None and driver.batches:
        check = yield from check_losses(driver, remedy, arm.remedies)
        if not check.holds and not remedy.on_loader:
            return Verdict(remedy, predicted, gain, pairs.seconds(), False, "the losses moved too far", check)
    return Verdict(remedy, predicted, gain, pairs.seconds(), True, "faster in both trials", check)

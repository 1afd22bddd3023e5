"""Whether several processes train as one does: the same model and data on N ranks, and on one with the union batches.

Everything is computed in float64 and from the same weights in every update, so that rounding is far below any real
difference. Where something differs, the parts that may be the reason (BatchNorm, dropout) are held still one by one,
and what then goes away was theirs.
"""

import datetime
import hashlib
import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fusedtrain import _processes
from fusedtrain.train.accumulation import Group
from fusedtrain.train.callbacks import Callback, Callbacks
from fusedtrain.train.distributed import SYNCED
from fusedtrain.train.errors import InputError, require_count

# Differences above these parts of the tensor's and of all tensors' largest value count: float64 rounds to 1e-16 of a
# value, sums over a batch and a deep network lose a few digits more. The second: gradients that are zero but for it.
OWN, ALL = 1e-8, 1e-11
TIMEOUT = 600.0  # seconds for which a rank waits for another one


@dataclass(frozen=True)
class Difference:
    """What differs: ``kind`` is loss, gradient, statistics or samples; ``relative`` to the largest value of one process
    (samples: how many)."""

    kind: str
    name: str
    relative: float


@dataclass(frozen=True)
class Report:
    """What :func:`compare` found; ``str`` is for people.

    Args:
        ranks, updates: of the comparison.
        counts: how many losses, gradients, statistics and samples were compared.
        differences: the largest first, one per tensor.
        reasons: one line each.
    """

    ranks: int
    updates: int
    counts: dict[str, int]
    differences: tuple[Difference, ...]
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.ranks} ranks against 1 on the union batches, {self.updates} updates, in float64"]
        for kind, count in self.counts.items():
            found = [one for one in self.differences if one.kind == kind]
            if not found:
                lines.append(f"{kind:<11}{count} alike")
                continue
            lines.append(f"{kind:<11}{len(found) if kind != 'samples' else int(found[0].relative)} of {count} differ")
            if kind != "samples":
                lines += [f"  {one.relative:8.1e}  {one.name}" for one in found[:20]]
                lines += [f"  and {len(found) - 20} more"] if len(found) > 20 else []
        return "\n".join(lines + [f"reason: {reason}" for reason in self.reasons])


@dataclass
class Trace:
    """What one process saw of some updates."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    statistics: list[dict[str, Tensor]] = field(default_factory=list)
    samples: Counter = field(default_factory=Counter)
    draws: bool = False  # whether the training step took random numbers
    still: dict[str, list[str]] = field(default_factory=dict)  # modules that may be held still, by kind


def compare(setup: Callable[[int], tuple], ranks: int = 2, updates: int = 2) -> Report:
    """Trains for a few updates on ``ranks`` new processes (gloo, CPU) and on one, and compares.

    Args:
        setup: called in every process, once per experiment, with the number of ranks whose samples the process takes:
            1, or ``ranks`` in the one that stands for all. Returns a :class:`~fusedtrain.train.Trainer` on the CPU with
            precision fp64 and that many times the batch size, the same initial weights everywhere, and the training
            data. Must be picklable: a function of a module, or ``functools.partial`` of one.
        ranks: at least 2.
        updates: of the weights, which are put back after each.

    Raises:
        InputError: the numbers are out of range, or the setup cannot be trained.
    """
    require_count("ranks", ranks, 2)
    require_count("updates", updates)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{index}.pt") for index in range(ranks + 1)]
        try:
            start = _processes.context(__name__, "torch._dynamo").get_start_method()
            arguments = (ranks, setup, updates, dict(os.environ), folder)
            torch.multiprocessing.start_processes(_process, arguments, ranks + 1, start_method=start)
        except torch.multiprocessing.ProcessRaisedException:
            if not any(isinstance(_read(file), str) for file in files):
                raise
        found = [_read(file) for file in files]
    for one in found:
        if isinstance(one, str):
            raise InputError(one)
    return _judge(found[:-1], found[-1], updates)


def _read(file: Path):
    return torch.load(file, weights_only=False) if file.exists() else None  # our own, of a moment ago


# --- one process ------------------------------------------------------------------------------------------------------


def _process(index: int, ranks: int, setup: Callable, updates: int, variables: dict, folder: str) -> None:
    _processes.take_over(variables)
    torch.set_num_threads(max(1, torch.get_num_threads() // (ranks + 1)))
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    if index < ranks:
        store, timeout = f"file://{folder}/store", datetime.timedelta(seconds=TIMEOUT)
        dist.init_process_group("gloo", init_method=store, rank=index, world_size=ranks, timeout=timeout)
        dist.barrier()  # who refuses its data at once would leave before the others have found it
    try:
        result = _experiments(setup, ranks, index == ranks, updates)
    except InputError as error:
        result = str(error)  # one line for whoever asked
    torch.save(result, Path(folder, f"{index}.pt"))
    if index < ranks:
        dist.destroy_process_group()


def _experiments(setup: Callable, ranks: int, alone: bool, updates: int) -> dict[str, Trace]:
    """The updates as they are; with all suspects held still ("quiet"), with all but one; and, on the one process, once
    more from micro-batches of a rank's size ("split")."""
    found = {"as it is": _trace(*setup(ranks if alone else 1), (), updates)}
    kinds = list(found["as it is"].still)
    experiments = {"quiet": kinds}
    if len(kinds) > 1:
        experiments |= {kind: [other for other in kinds if other != kind] for kind in kinds}
    for name, still in experiments.items():
        found[name] = _trace(*setup(ranks if alone else 1), still, updates)
    if alone:
        trainer, train = setup(1)
        trainer.group = Group(trainer.group.size * ranks, 1)
        found["split"] = _trace(trainer, train, kinds, updates)
    return found


class _Enough(Exception):
    pass


def _trace(trainer, train: Iterable, still: Iterable[str], updates: int) -> Trace:
    """Lets the trainer make some updates with the modules of some kinds held still."""
    trace = Trace(still=_suspects(trainer.model))
    for kind in still:
        for name in trace.still[kind]:
            module = trainer.model.get_submodule(name)
            module.eval().train = lambda mode=True, module=module: module
    _watch(trainer, trace)

    class Recorder(Callback):
        def on_step_end(self, trainer) -> None:
            trace.losses.append(float(trainer.last_loss))
            floating = {name: b for name, b in trainer.model.named_buffers() if b.is_floating_point()}
            trace.statistics.append({name: b.clone() for name, b in floating.items()})
            if trainer.step_count == updates:
                raise _Enough

    trainer.callbacks = Callbacks([Recorder()])
    try:
        trainer.fit(train)
    except _Enough:
        return trace
    raise InputError(f"the run ends after {trainer.step_count} updates, {updates} were to be compared")


def _watch(trainer, trace: Trace) -> None:
    """Notes gradients, samples and random numbers; puts the weights back after every update."""
    weigh, step, params = trainer.weight, trainer.training_step, dict(trainer.model.named_parameters())
    kept = {}

    def before(*args) -> None:
        kept.update({name: p.detach().clone() for name, p in params.items()})
        grads = {name: p.grad for name, p in params.items() if p.grad is not None}
        trace.gradients.append({name: getattr(g, "full_tensor", g.clone)() for name, g in grads.items()})

    def after(*args) -> None:
        with torch.no_grad():
            for name, p in params.items():
                p.copy_(kept[name])

    def weight(batch) -> float:  # asked for batches that count
        trace.samples.update(_hashes(batch))
        return weigh(batch)

    def training_step(batch) -> Tensor:
        state = torch.get_rng_state()
        loss = step(batch)
        trace.draws |= not torch.equal(state, torch.get_rng_state())
        return loss

    trainer.optimizer.register_step_pre_hook(before)
    trainer.optimizer.register_step_post_hook(after)
    trainer.weight, trainer.training_step = weight, training_step


def _suspects(model: nn.Module) -> dict[str, list[str]]:
    """Names of the modules that make a sample's result depend on its batch or on chance."""
    kinds: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, SYNCED):
            if module.running_mean is not None:
                kinds.setdefault("BatchNorm", []).append(name)
        elif any(word in type(module).__name__ for word in ("Drop", "StochasticDepth")):
            kinds.setdefault("dropout", []).append(name)
    return kinds


def _hashes(batch) -> list[bytes]:
    """One number per sample of a batch."""
    leaves = [t for t in tree_leaves(batch) if isinstance(t, Tensor) and t.dim()]
    count = len(leaves[0])
    columns = [t.contiguous().numpy() for t in leaves if len(t) == count]
    return [hashlib.blake2b(b"".join(c[i].tobytes() for c in columns), digest_size=8).digest() for i in range(count)]


# --- the verdict ------------------------------------------------------------------------------------------------------


def _judge(ranks: list[dict[str, Trace]], one: dict[str, Trace], updates: int) -> Report:
    first = ranks[0]["as it is"]
    samples = sum((rank["as it is"].samples for rank in ranks), Counter())
    alone = one["as it is"]
    differences = _differences(first, alone)
    other = (samples - alone.samples).total(), (alone.samples - samples).total()
    if any(other):
        differences.insert(0, Difference("samples", "of the updates", float(max(other))))
    counts = {
        "loss": updates,
        "gradient": len(alone.gradients[0]),
        "statistics": len(alone.statistics[0]),
        "samples": alone.samples.total(),
    }
    reasons = []
    if any(other):
        reasons.append(
            f"{other[0]} samples came to the ranks alone and {other[1]} to the one process alone: the loader shards"
            " wrongly, or a sample's randomness is no function of (seed, epoch, index), see SeededDataset"
        )
    elif differences:
        reasons = _reasons([rank["quiet"] for rank in ranks], ranks[0], one)
    return Report(len(ranks), updates, counts, tuple(differences), tuple(reasons))


def _differences(trace: Trace, truth: Trace) -> list[Difference]:
    """Where an update differs, each tensor once with its largest difference."""
    found: dict[tuple[str, str], float] = {}
    losses = (torch.tensor(of.losses, dtype=torch.float64) for of in (trace, truth))
    for index, (a, b) in enumerate(zip(*losses)):
        if relative := _relative(a, b, _largest(b)):
            found["loss", f"of update {index + 1}"] = relative
    for kind, ours, theirs in (
        ("gradient", trace.gradients, truth.gradients),
        ("statistics", trace.statistics, truth.statistics),
    ):
        for a, b in zip(ours, theirs):
            largest = max(map(_largest, b.values()), default=0.0)
            for name in a.keys() | b.keys():
                relative = float("inf") if name not in a or name not in b else _relative(a[name], b[name], largest)
                if relative:
                    found[kind, name] = max(relative, found.get((kind, name), 0.0))
    order = ("samples", "loss", "gradient", "statistics")
    result = [Difference(*key, value) for key, value in found.items()]
    return sorted(result, key=lambda one: (order.index(one.kind), -one.relative))


def _largest(t: Tensor) -> float:
    """The largest finite absolute value, or 0."""
    return float(t.abs().nan_to_num(nan=0.0, posinf=0.0).max()) if t.numel() else 0.0


def _alike(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors are equal, NaN to NaN, too."""
    return (a == b) | (a.isnan() & b.isnan())


def _relative(a: Tensor, b: Tensor, largest: float) -> float:
    """The largest difference over the largest value; 0 where rounding explains it, infinite where only one of two
    values is NaN or infinite."""
    alike = _alike(a, b)
    if alike.all():
        return 0.0
    difference = float((a - b).abs().masked_fill(alike, 0).max())
    if not math.isfinite(difference):
        return math.inf
    own = _largest(b)
    return 0.0 if difference <= max(OWN * own, ALL * largest) else difference / max(own, 1e-300)


def _reasons(quiet: list[Trace], ranks: dict[str, Trace], one: dict[str, Trace]) -> list[str]:
    texts = {
        "BatchNorm": "takes its statistics over each rank's part of the batch: --sync-batchnorm, or accept it",
        "dropout": "draws other numbers on every rank, which is as it should be",
    }
    kinds = ranks["as it is"].still
    guilty = [kind for kind in kinds if _differences(ranks[kind], one[kind])] if len(kinds) > 1 else list(kinds)
    rest = _differences(quiet[0], one["quiet"])
    if rest and len(kinds) == 1:  # held still it differs too: is it the same?
        guilty = [kind for kind in guilty if len(_differences(ranks["as it is"], one["as it is"])) > len(rest)]
    elif rest:
        names = {(d.kind, d.name) for d in rest}
        guilty = [kind for kind in guilty if {(d.kind, d.name) for d in _differences(ranks[kind], one[kind])} - names]
    reasons = [f"{kind} ({_listed(kinds[kind])}) {texts[kind]}" for kind in guilty]
    if not rest:
        return reasons
    disagree = [
        name
        for trace in quiet[1:]
        for a, b in zip(trace.gradients, quiet[0].gradients)
        for name in b
        if name not in a or not _alike(a[name], b[name]).all()
    ]
    factor = _factor(quiet[0], one["quiet"])
    if disagree:
        return [*reasons, f"the ranks have different gradients of {_listed(list(dict.fromkeys(disagree)))}"]
    if ranks["quiet"].draws:
        return [*reasons, "training_step itself draws random numbers (mixup, cutmix, functional dropout)"]
    if factor is not None:
        text = f"all gradients are {factor:.6g} times those of one process: the loss is not the mean over what"
        return [*reasons, f"{text} Trainer.weight(batch) counts, a sum for instance"]
    if not _differences(_first(quiet[0]), _first(one["split"])):  # the last update of an epoch is split otherwise
        return [
            *reasons,
            "the loss or a layer looks at the other samples of its batch, or the loss is a mean with other weights than"
            " Trainer.weight(batch): one process with smaller micro-batches gives what the ranks give",
        ]
    return [*reasons, "gradients or losses are not added up over the ranks as over one batch"]


def _first(trace: Trace) -> Trace:
    return Trace(trace.losses[:1], trace.gradients[:1], trace.statistics[:1])


def _factor(trace: Trace, truth: Trace) -> float | None:
    """The number by which all gradients differ, where it is one and the same."""
    a, b = (torch.cat([t.gradients[0][name].flatten() for name in sorted(t.gradients[0])]) for t in (trace, truth))
    if a.shape != b.shape or not b.any():
        return None
    factor = float(a @ b / (b @ b))
    same = float((a - factor * b).abs().max()) <= OWN * float(b.abs().max())
    return factor if same and abs(factor - 1) > OWN else None


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

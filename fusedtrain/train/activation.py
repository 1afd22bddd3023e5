"""Activation checkpointing: blocks that compute their activations again in backward instead of keeping them."""

import contextlib
import fnmatch
import functools
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from fusedtrain.nn import recorded
from fusedtrain.nn.fuse import fuse
from fusedtrain.train.errors import InputError, require
from fusedtrain.train.update import Buffers


@dataclass(frozen=True)
class ActivationCheckpointing:
    """Which blocks are computed twice to save memory. Generators are put back for the second time, so that dropout is
    the same, and buffers after it, so that a BatchNorm counts a batch once; not reentrant, so that it goes with DDP,
    autocast and compile.

    Args:
        checkpoint_modules: patterns of module names, as in ``fnmatch``: "blocks.*"; a module in a chosen one is not
            chosen again.
        activation_budget_gib: GiB that activations may take, for batches like the first: blocks are measured with
            two and four of its samples, and those that cost the least time for what they save are chosen until it fits.
            0: no budget.

    Raises:
        InputError: the budget is below 0 or infinite, or both arguments are given.
    """

    checkpoint_modules: tuple[str, ...] = ()
    activation_budget_gib: float = 0.0

    def __post_init__(self):
        budget, names = self.activation_budget_gib, self.checkpoint_modules
        require(not isinstance(names, str), f"checkpoint_modules must be a list of patterns, got {names!r}")
        require(0 <= budget < float("inf"), f"activation_budget_gib must be at least 0 and finite, got {budget}")
        require(not (budget and self.checkpoint_modules), "give checkpoint_modules or activation_budget_gib, not both")


def wrap(model: nn.Module, names: list[str]) -> None:
    """Lets the modules of these names compute their activations again in backward; names and classes stay."""
    for name in names:
        module = model.get_submodule(name)
        if "forward" in vars(module):
            raise InputError(f"activation checkpointing: the forward of {name} has been replaced already")
        parts = name.split(".")
        for around in (".".join(parts[:i]) for i in range(len(parts))):
            _fuse_parts(model.get_submodule(around))
        module.forward = functools.partial(_forward, module)


def _fuse_parts(module: nn.Module) -> None:
    """Has the parts of a module that is fused as a whole fused each by itself, as one of them will be called alone."""
    if isinstance(module, recorded.Recorded):
        recorded.restore(module)
        for part in module.children():
            fuse(part)


def unwrap(model: nn.Module) -> None:
    """Takes back what :func:`wrap` did."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, functools.partial) and forward.func is _forward:
            del module.forward


def _forward(module: nn.Module, *args, **kwargs):
    forward = functools.partial(type(module).forward, module)
    if not module.training or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():  # what a compiled graph writes to buffers, it writes once
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    contexts = lambda: (contextlib.nullcontext(), _buffers_put_back(module))  # noqa: E731
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextlib.contextmanager
def _buffers_put_back(module: nn.Module):
    buffers = Buffers(module)
    try:
        yield
    finally:
        buffers.put_back(unless=False)


def matching(model: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    """Names of the outermost modules that match; InputError where a pattern matches none."""
    chosen: list[str] = []
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        require(any(fnmatch.fnmatchcase(n, pattern) for n in names), f"checkpoint_modules: nothing matches {pattern!r}")
    for name in names:
        inside = any(name.startswith(outer + ".") for outer in chosen)
        if not inside and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            chosen.append(name)
    return chosen


@dataclass(frozen=True)
class Block:
    """What a block keeps for backward beyond its inputs, in bytes, and takes for forward, in seconds."""

    name: str
    bytes: int
    seconds: float


def candidates(model: nn.Module) -> list[str]:
    """The children, with parameters, of the model's lists and sequences, the innermost that are more than a layer."""
    found = []
    for name, module in model.named_modules():
        parent = model.get_submodule(name.rpartition(".")[0])
        in_list = bool(name) and isinstance(parent, (nn.Sequential, nn.ModuleList))
        is_block = next(module.children(), None) is not None and not isinstance(module, (nn.Sequential, nn.ModuleList))
        if in_list and is_block:
            found.append(name)
    return [name for name in found if not any(name.startswith(other + ".") for other in found)]


def size_of(batch) -> int:
    """Returns the number of samples of a batch; 0 where nothing tells it."""
    return next((len(t) for t in tree_leaves(batch) if isinstance(t, Tensor) and t.dim()), 0)


def part_of(batch, samples: int):
    """Returns copies of the first samples of a batch: views would keep all of it."""
    size = size_of(batch)
    ours = lambda t: isinstance(t, Tensor) and t.dim() and len(t) == size  # noqa: E731
    return tree_map(lambda t: t[:samples].clone() if ours(t) else t, batch)


def measure_batch(model: nn.Module, step, batch) -> tuple[int, list[Block]]:
    """As :func:`measure` of ``step(batch)``, from a few of its samples: the bytes are taken to be a constant, such as
    weights in another dtype, and as many for each sample."""
    size = size_of(batch)
    if size <= 4:
        return measure(model, lambda: step(batch))
    few, some = part_of(batch, 2), part_of(batch, 4)
    (less, fewer), (more, blocks) = measure(model, lambda: step(few)), measure(model, lambda: step(some))
    if [block.name for block in fewer] != [block.name for block in blocks]:  # what runs depends on the samples
        less, fewer = more // 2, [Block(block.name, block.bytes // 2, 0.0) for block in blocks]

    def of_all(less: int, more: int) -> int:
        return max(more, less + (more - less) * (size - 2) // 2)

    blocks = [Block(b.name, of_all(a.bytes, b.bytes), b.seconds) for a, b in zip(fewer, blocks)]
    return of_all(less, more), blocks


def measure(model: nn.Module, forward) -> tuple[int, list[Block]]:
    """Runs ``forward()`` once to warm up and once under observation.

    Returns:
        The bytes that all of it keeps for backward, and the same for each call of a candidate.
    """
    forward()
    storages: dict[int, int] = {}
    blocks: list[Block] = []

    def pack(t: Tensor) -> Tensor:
        storages.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes())
        return t.detach()  # an output that a node saves refers to the node: as it is, neither would ever be freed

    kept = []  # outputs stay alive, so that no storage is counted under the address of another

    def begin(module, args):
        module._measured = sum(storages.values()), time.perf_counter()

    def end(name, module, args, output):
        before, start = vars(module).pop("_measured")
        inputs = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        own = sum(size for pointer, size in storages.items() if pointer not in inputs) - before
        blocks.append(Block(name, max(0, own), time.perf_counter() - start))
        kept.append(output)

    with contextlib.ExitStack() as stack:
        for name in candidates(model):
            module = model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(functools.partial(end, name)).remove)
        for p in model.parameters():
            storages[p.untyped_storage().data_ptr()] = 0
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t))
        kept.append(forward())
    return sum(storages.values()), blocks


def peak(total: int, blocks: list[Block], chosen: set[str]) -> int:
    """Returns the bytes of activations at their peak, when those of the ``blocks``, in their order, whose names are
    ``chosen`` are computed again in backward.

    There the blocks behind are gone, those in front are still kept, and a chosen one takes twice what it keeps: its
    activations at once, beside what passes through and the gradients.
    """
    kept = most = total - sum(block.bytes for block in blocks)
    for block in blocks:
        if block.name in chosen:
            most = max(most, kept + 2 * block.bytes)
        else:
            kept += block.bytes
    return max(most, kept)


def choose(total: int, blocks: list[Block], budget: int) -> list[str]:
    """Returns the blocks to compute again so that the :func:`peak` fits into ``budget`` bytes, for little time: all
    calls of a block, or none.

    Raises:
        InputError: it does not fit with all of them either.
    """
    names = list(dict.fromkeys(block.name for block in blocks))
    seconds, saved = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
    for block in blocks:
        seconds[block.name] += block.seconds
        saved[block.name] += block.bytes
    chosen: set[str] = set()
    left = sorted(names, key=lambda name: seconds[name] / max(1, saved[name]))
    while peak(total, blocks, chosen) > budget:
        if not left:
            least = peak(total, blocks, chosen)
            raise InputError(
                f"activation_budget_gib: {budget / 2**30:.3g} is too small: with every block computed again the"
                f" activations of this batch take {least / 2**30:.3g}"
            )
        chosen.add(left.pop(0))
    # What another block has made unnecessary goes again, the most expensive first.
    while spare := [name for name in chosen if peak(total, blocks, chosen - {name}) <= budget]:
        chosen.remove(max(spare, key=seconds.get))
    return [name for name in names if name in chosen]

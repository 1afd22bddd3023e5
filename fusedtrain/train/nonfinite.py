"""Where NaN or infinity came from: the batch that brought it is run once more, under observation."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fusedtrain.train.checkpoint_file import is_finite
from fusedtrain.train.rng import rng_state, set_rng_state
from fusedtrain.train.update import Buffers


class NonFiniteError(RuntimeError):
    """The loss or a gradient is not finite; the update was not made."""


@dataclass(frozen=True)
class NonFinite:
    """What was not finite first.

    Args:
        what: "input", "parameter", "output", "loss" or "gradient".
        name: of the module, whose output or whose output's gradient it is, of the parameter or of the input.
        kind: the module's class, or "parameter".
        samples: the rows of the batch in which it shows; empty where they cannot be told.
    """

    what: str
    name: str
    kind: str = ""
    samples: tuple[int, ...] = ()

    def __str__(self) -> str:
        place = f"{self.name} ({self.kind})" if self.kind else self.name
        of_output = "of the output " if self.what == "gradient" and self.kind != "parameter" else ""
        text = {
            "output": f"the output of {place}",
            "gradient": f"the gradient {of_output}of {place}",
            "loss": "the loss",
        }.get(self.what, f"{self.what} {place}")
        if not self.samples:
            return f"{text} is not finite"
        shown = ", ".join(map(str, self.samples[:8])) + (", ..." if len(self.samples) > 8 else "")
        return f"{text} is not finite for samples {shown} of the batch"


def find_nonfinite(
    model: nn.Module,
    loss: Callable[[], Tensor],
    inputs: Iterable[Tensor] = (),
    scale: float = 1.0,
    together: bool = False,
) -> NonFinite | None:
    """Runs forward and backward once more and returns what was not finite first; the state of ``model`` is as before.

    Only called when something went wrong, so that a healthy run pays nothing: no hooks are left behind. Looks in this
    order: inputs, parameters, outputs of modules in the order of the forward pass (the innermost first), the
    loss, gradients in the order of the backward pass.

    Args:
        model: bare, not wrapped by DistributedDataParallel: other ranks take no part.
        loss: runs the same forward pass again, on the same batch and from the same state of the generators, and returns
            the loss, a number.
        inputs: tensors of the batch, to be looked at first.
        scale: the loss is multiplied by it before backward, as GradScaler does.
        together: other ranks do the same and wait for this one in the passes, which are made whatever is found.

    Returns:
        The first place, or None when all is finite this time: the error is not of the kind that repeats.
    """
    found = list(itertools.islice(_nonfinite_before(model, inputs), 1))
    if found and not together:
        return found[0]
    sizes = [t.shape[0] for t in inputs if t.dim()]
    with untouched(model), _observed(model, found, sizes[0] if sizes else None), torch.enable_grad():
        value = loss()
        if not found and not is_finite(value):
            found.append(NonFinite("loss", "loss"))
        if (together or not found) and value.requires_grad:
            (value * scale).backward()
    return found[0] if found else None


def _nonfinite_before(model: nn.Module, inputs: Iterable[Tensor]) -> Iterator[NonFinite]:
    """What is not finite before anything is computed; of sharded parameters the own part."""
    for index, t in enumerate(inputs):
        if not is_finite(t):
            yield NonFinite("input", f"{index} of the batch", samples=_rows(t, t.shape[0] if t.dim() else 0))
    for name, p in model.named_parameters():
        if not is_finite(p.to_local() if hasattr(p, "to_local") else p):
            yield NonFinite("parameter", name)


@contextlib.contextmanager
def _observed(model: nn.Module, found: list[NonFinite], batch: int | None):
    names = {module: name or "the model" for name, module in model.named_modules()}

    def look(what: str, module: nn.Module, tensors) -> None:
        if found:
            return
        for t in _tensors(tensors):
            if not is_finite(t):
                found.append(NonFinite(what, names[module], type(module).__name__, _rows(t, batch)))
                return

    def forward(module: nn.Module, args, output) -> None:
        look("output", module, output)
        for t in _tensors(output):
            # A tensor hook, not a module hook: those break on in-place activations and views.
            if t.requires_grad:
                t.register_hook(lambda grad, module=module: look("gradient", module, grad))

    def parameter_hook(name: str) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            if not found and not is_finite(grad):
                found.append(NonFinite("gradient", name, "parameter"))

        return hook

    handles = [module.register_forward_hook(forward) for module in names]
    handles += [p.register_hook(parameter_hook(name)) for name, p in model.named_parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def untouched(model: nn.Module):
    """Puts buffers, gradients and the generators back."""
    buffers = Buffers(model)
    grads = [(p, p.grad) for p in model.parameters()]
    state = rng_state()
    for p, _ in grads:
        p.grad = None
    try:
        yield
    finally:
        set_rng_state(state)
        buffers.put_back(unless=False)
        for p, grad in grads:
            p.grad = grad


def _tensors(value) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [t for item in value for t in _tensors(item)]


def _rows(t: Tensor, batch: int | None) -> tuple[int, ...]:
    if not batch or not t.dim() or t.shape[0] != batch:
        return ()
    return tuple((~t.detach().isfinite().reshape(batch, -1).all(1)).nonzero().flatten().tolist())


# --- updates that are left out ----------------------------------------------------------------------------------------


def left_out(trainer, step: int, loss: float, batches: list) -> None:
    """Counts an update that was left out, or ends the run where it may not be, or too many in a row were.

    Args:
        step: its number.
        loss: its own; where that is finite, a smaller loss scale may help the gradients.
        batches: its micro-batches; empty where they are gone.

    Raises:
        NonFiniteError: with what was not finite first.
    """
    t, limit = trainer, trainer.config.max_skipped
    t.skipped += 1
    t.skipped_in_a_row += 1
    if t.config.nonfinite == "raise" and (t.scaler is None or not math.isfinite(loss)):
        raise NonFiniteError(f"step {step} of epoch {t.feed.epoch + 1} was not made: {_why(t, batches)}")
    if t.skipped_in_a_row > limit:
        raise NonFiniteError(f"{limit + 1} updates in a row were not finite, up to step {step}: {_why(t, batches)}")


def _why(trainer, batches: list) -> str:
    if not batches:
        return "its loss or a gradient was not finite, which a GPU tells some steps later; the weights are sound"
    trainer.update.discard()
    training, scale = trainer.model.training, 1.0 if trainer.scaler is None else trainer.scaler.get_scale()
    together, found = trainer.world.computes_together, None
    try:
        with trainer.bare():
            for batch in batches:
                tensors = [t for t in tree_leaves(batch) if isinstance(t, Tensor) and t.is_floating_point()]
                again = lambda batch=batch: trainer.training_step(batch)  # noqa: E731
                this = find_nonfinite(trainer.model, again, tensors, scale, together)
                found = found or this
                if found is not None and not together:
                    break
    finally:
        trainer.model.train(training)
    if found is not None:
        return str(found)
    others = ", or it is another process's" if trainer.world.size > 1 else ""
    return f"a loss or a gradient is not finite, but is when computed again{others}"

"""CUDA graphs of the whole step: forward, backward and update of a group in one launch, by torch's recipe.

Some steps run eagerly on a side stream, then one is captured over input buffers that stay, and from then on a step is a
copy of its batches into these buffers and a replay. Source: https://docs.pytorch.org/docs/stable/notes/cuda.html
"""

import contextlib
import sys
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from fusedtrain.optim._fused import FusedStep
from fusedtrain.train.errors import InputError, require

WARM_UP = 3  # eager steps with the same shapes before the capture: states are made, cuDNN has chosen its algorithms
KINDS = 100  # of groups that are told apart; where so many differ, nothing is captured


def check(trainer) -> None:
    """Raises InputError, with the reason, where the step of this run cannot be captured."""
    optimizer, name = trainer.optimizer, type(trainer.optimizer).__name__
    require(trainer.device.type == "cuda", f"cuda_graphs needs a GPU, and this run is on the {trainer.device}")
    require(trainer.world.size == 1, 'cuda_graphs is for one process; for several take compile="reduce-overhead"')
    require(
        isinstance(optimizer, FusedStep),
        f"cuda_graphs needs an optimizer of fusedtrain.optim, which decides on the GPU what is not finite, got {name}",
    )
    groups = optimizer.param_groups
    require(
        all(group.get("capturable", True) for group in groups),
        f"cuda_graphs: construct {name} with capturable=True, which keeps its counts of steps on the GPU",
    )
    require(
        not any(group.get("corrected_weight_decay") and group.get("decoupled_decay", True) for group in groups),
        f"cuda_graphs does not go with corrected_weight_decay of {name}: the host computes it from the learning rate",
    )
    options = optimizer._options
    seeded = options["state_dtype"] is not None or options["rounding"] != "nearest" or options["master_weights"]
    counted = all(group.get("capturable") for group in groups)
    require(
        counted or not seeded,
        f"cuda_graphs does not go with state_dtype, rounding or master_weights of {name}: the host seeds",
    )


class Recorder:
    """The side stream on which steps are run before the capture, and captured.

    Args:
        device: of the run, which need not be the current one.
    """

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)

    @contextlib.contextmanager
    def aside(self):
        """Within the ``with`` block work goes to the side stream, after and before that of the current one."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:  # who catches an error goes on with the weights
            current.wait_stream(self.stream)

    def record(self, work: Callable) -> Callable:
        """Returns what replays ``work``, and returns each time the same tensors with new values."""
        # Torch leaves the current stream to be the side stream where the capture fails.
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream(self.device)):
            graph = torch.cuda.CUDAGraph()
            # thread_local: the threads of a loader go on to copy batches meanwhile
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                results = work()

        def replay():
            graph.replay()
            return results

        return replay


class Graphs:
    """Makes the steps of a :class:`~fusedtrain.train.Trainer` with a graph of the first kind of group that comes often.

    Groups of another kind (another shape or number of batches, other weights or hyperparameters), such as the last one
    of an epoch, are made by the Trainer's eager step; the run says so once for each kind.

    Args:
        trainer: that has passed :func:`check`; one fit of it.
    """

    def __init__(self, trainer):
        self.trainer, self._recorder = trainer, Recorder(trainer.device)
        self._seen: dict[str, int] = {}  # kind -> how often it was made eagerly
        self._kind = self._replay = self._replaced = None
        self._buffers: list[tuple] = []  # that the graph reads and writes

    def step(self, group: Iterable) -> bool | Tensor:
        """What :meth:`Trainer.step` does, with its arguments and its result."""
        t, enter = self.trainer, self.trainer.spans.enter
        if t.group.done:  # a checkpoint had begun it
            return t.step(group)
        batches, weights = [], []
        for batch, counts, _ in group:
            enter("copy")
            batches.append(t.to_device(batch))
            weights.append(t._weigh(batches[-1], counts))
            enter("data")
        kind = self._kind_of(batches, weights) if _replaced(self._buffers) is None else ""
        if self._replay is None and sum(weights) and self._seen.get(kind) == WARM_UP:
            self._capture(kind, batches, weights)
        if self._replay is None or kind != self._kind:
            self._count(kind, batches)
            before = _buffers(t) if self._replay is None else []
            with self._recorder.aside():
                applied = t.step((batch, True, batch is batches[-1]) for batch in batches)
            self._replaced = _replaced(before)
            return applied
        enter("copy")
        for own, new in zip(self._inputs, _tensors(batches)):
            own.copy_(new, non_blocking=True)
        enter("graph")
        self._set_rates()
        losses, applied = self._replay()
        for batch, loss, weight in zip(batches, losses, weights):
            t._note(batch, loss, weight)
        t._agree()
        if applied is not False:
            t._follow()
        t.group.clear()
        return applied

    # --- what is captured ---------------------------------------------------------------------------------------------

    def _capture(self, kind: str, batches: list, weights: list[float]) -> None:
        t = self.trainer
        require(
            self._replaced is None,
            f"cuda_graphs: the step puts another tensor in the place of the buffer {self._replaced}, and a graph would"
            " read the first one for ever: write into it, by copy_() or lerp_()",
        )
        static = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, batches)
        self._inputs, correction = _tensors(static), t.group.correction(sum(weights))

        def work():
            if t._buffers is not None:
                t._buffers.keep()
            losses = []
            for batch, weight in zip(static, weights):
                loss = t.training_step(batch)
                if weight:  # as in Trainer.step
                    t._scaled(loss, weight).backward()
                losses.append(loss.detach())
            applied = t.update(correction)
            if t._buffers is not None:
                t._buffers.put_back(unless=applied)
            return losses, applied

        # Where zero_grads keeps gradients the graph adds to these, whatever becomes of the parameters' own.
        self._grads = [p.grad for p in (*t.update.params, *t.model.parameters())]
        groups = t.optimizer.param_groups
        own, outer = [group["lr"] for group in groups], sys.exc_info()[1]
        # A graph holds numbers as they were, so it reads the rates of the schedule from the device.
        self._rates = [torch.full((), float(lr), device=t.device) for lr in own]
        for group, rate in zip(groups, self._rates):
            group["lr"] = rate
        try:
            self._replay = self._recorder.record(work)
        except RuntimeError as error:
            first = error  # the last one may say no more than that there was another, at the end of the capture
            while first.__context__ not in (None, outer):
                first = first.__context__
            reason = str(first).partition("\n")[0]
            raise InputError(f"cuda_graphs: this step cannot be captured: {reason}") from error
        finally:
            for group, lr in zip(groups, own):
                group["lr"] = lr
        self._kind, self._seen, self._filled, self._buffers = kind, {}, [None] * len(own), _buffers(t)
        self._say(f"captured the step of {_shapes(batches)}")

    def _set_rates(self) -> None:
        for index, (group, rate) in enumerate(zip(self.trainer.optimizer.param_groups, self._rates)):
            lr = group["lr"]
            if isinstance(lr, Tensor):
                rate.copy_(lr)
            elif lr != self._filled[index]:
                rate.fill_(lr)
                self._filled[index] = lr

    # --- kinds --------------------------------------------------------------------------------------------------------

    def _kind_of(self, batches: list, weights: list[float]) -> str:
        """What a graph holds as it was at the capture."""
        leaves, spec = tree_flatten(batches)
        inputs = [(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in leaves]
        numbers = [
            [value for name, value in group.items() if name not in ("params", "lr") and not isinstance(value, Tensor)]
            for group in self.trainer.optimizer.param_groups
        ]
        weights = [weight != 0 for weight in weights] if self.trainer.group.alone else weights
        return repr((str(spec), inputs, weights, numbers, self.trainer.learning))

    def _count(self, kind: str, batches: list) -> None:
        if kind in self._seen:
            self._seen[kind] += 1
        elif len(self._seen) < KINDS:
            self._seen[kind] = 1
            if self._replay is not None:
                self._say(f"steps of {_shapes(batches)} run without the graph")
            elif len(self._seen) == KINDS:
                self._say("nothing is captured: steps differ in shapes, weights or hyperparameters")

    def _say(self, text: str) -> None:
        self.trainer.progress.line(f"{self.trainer.title}  cuda_graphs: {text}")


def _buffers(trainer) -> list[tuple]:
    """The buffers of model and loss: name, the layer's dict, its key there, and the tensor."""
    parts = (part for part in (trainer.model, trainer.loss) if isinstance(part, nn.Module))
    layers = ((name, module._buffers) for part in parts for name, module in part.named_modules())
    return [(f"{name}.{key}".lstrip("."), own, key, own[key]) for name, own in layers for key in own]


def _replaced(buffers: list[tuple]) -> str | None:
    """The name of the first buffer in whose place another tensor stands by now."""
    return next((name for name, layer, key, own in buffers if layer.get(key) is not own), None)


def _tensors(batches: list) -> list[Tensor]:
    return [x for x in tree_flatten(batches)[0] if isinstance(x, Tensor)]


def _shapes(batches: list) -> str:
    shapes = ["x".join(map(str, x.shape)) for x in _tensors(batches[:1])]
    return f"{len(batches)} x ({', '.join(shapes)})"

"""What can be known to go wrong before the first step, and labels that only loading shows."""

import inspect
import itertools
import textwrap
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from fusedtrain.train.errors import InputError, require
from fusedtrain.train.feed import Feed, set_epoch
from fusedtrain.train.nonfinite import untouched
from fusedtrain.train.rng import SeededDataset
from fusedtrain.train.sampler import EpochSampler


def check_parts(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises InputError for a model or an optimizer that the loop cannot train: it makes one dense gradient of each
    parameter per update."""
    for name, module in model.named_modules():
        layer = f"{name or 'the model'} ({type(module).__name__})"
        if any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False)))):
            raise InputError(
                f"{layer} takes its shape from the first batch: run one through the model, model(inputs), before the"
                " optimizer is made"
            )
        if any(t.is_meta for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            raise InputError(
                f"{layer} is on the meta device, where nothing has a value: make room with model.to_empty(device='cpu')"
                " and load or initialise all weights and buffers before the optimizer is made"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise InputError(f"{layer} makes sparse gradients, which the Trainer does not take: use sparse=False")
    try:  # of the class: a scheduler wraps the method of the instance
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError as error:
        raise InputError(
            f"{type(optimizer).__name__}.step() asks for more than a gradient ({error}): the Trainer computes the loss"
            " once per update and takes optimizers whose step() needs no closure"
        ) from None


def check_data(trainer, name: str, batches: Iterable) -> dict:
    """Runs the first batch through the model and the loss, a training step of somebody's own excepted, and returns the
    metrics that validation gives.

    Raises:
        InputError: the data hold no batch, or not pairs; model, loss or classes do not fit them; or the last training
            batch of an epoch is a single sample, and the model cannot normalise over one.
    """
    metrics, own, trains = {}, trainer.overridden[name], name == "training"
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        what = f"the {name} data must give batches each time they are iterated over, as a DataLoader does"
        raise InputError(f"{what}, got {textwrap.shorten(repr(batches), 80)}")
    set_epoch(batches, 0)
    first = list(itertools.islice(batches, 1))
    if not first:
        raise InputError(f"the {name} data hold no batch")
    batch = first.pop()
    if not own:
        is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
        if not is_pair or not all(isinstance(t, Tensor) for t in batch):
            raise InputError(
                f"a {name} batch must be a pair of tensors (inputs, targets), got {describe(batch)}; others need a"
                f" subclass of Trainer with a {name}_step"
            )
        inputs, targets = batch
        if not inputs.dim() or not targets.dim() or len(inputs) != len(targets):
            hint = "; a DataLoader makes batches of a dataset" if isinstance(batches, Dataset) else ""
            raise InputError(f"a {name} batch must hold as many inputs as targets, got {describe(batch)}{hint}")
    trainer.model.eval()  # a training pass would move the BatchNorms
    with torch.random.fork_rng([trainer.device] if trainer.device.type == "cuda" else []):  # of all GPUs torch warns
        batch = trainer.to_device(batch)
        if not own:
            _check_classes(trainer, name, batches, *batch)
        try:
            with trainer.no_gradients():
                if not trains:
                    metrics = trainer.validation_step(batch)
                elif not own:
                    metrics = {"loss": trainer.loss_of(trainer.forward(batch[0]), batch[1])}
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            what = "validation_step" if own else "the loss"
            raise InputError(f"{what} cannot take a {name} batch {describe(batch)}: {reason}") from error
        require(
            isinstance(metrics, dict), f"validation_step must return metrics by name, a dict, got {describe(metrics)}"
        )
        if not own and not (isinstance(loss := metrics["loss"], Tensor) and not loss.dim()):
            raise InputError(
                f"the loss must return the mean over the batch, a tensor of one number, got {describe(loss)}"
            )
        if trains:
            _check_last(trainer, batches, batch)
    return metrics


def _check_classes(trainer, name: str, batches: Iterable, inputs: Tensor, targets: Tensor) -> None:
    try:
        with trainer.no_gradients():
            outputs = trainer.forward(inputs)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"the model cannot take {name} inputs of shape {list(inputs.shape)}: {reason}") from error
    if not isinstance(outputs, Tensor) or targets.dtype != torch.int64 or targets.dim() != 1:
        return
    if outputs.dim() != 2 or len(outputs) != len(inputs):
        raise InputError(f"for class indices the model must return logits [N, classes], got {list(outputs.shape)}")
    labels = _all_labels(batches, targets)
    labels = labels[counted(trainer.loss, labels)]
    if len(labels) and (labels.min() < 0 or labels.max() >= outputs.shape[1]):
        raise InputError(
            f"the model has {outputs.shape[1]} classes, but the {name} labels go from {int(labels.min())} to"
            f" {int(labels.max())}"
        )


_SINGLE = "more than 1 value per channel"  # that a BatchNorm expects in training, torch's or a fused one


def _check_last(trainer, batches: Iterable, batch) -> None:
    """Refuses a last batch of one sample where a BatchNorm behind 1x1 maps would have nothing to normalise over."""
    sizes = Feed(batches, trainer.world).sizes()
    # All processes look together: a BatchNorm that is synchronised waits for the others.
    (single,) = trainer.world.max(sizes is not None and sizes[-1] == 1)
    if not single or not isinstance(batch, (tuple, list)) or not isinstance(batch[0], Tensor):
        return
    try:
        with untouched(trainer.model), trainer._autocast, torch.no_grad():
            trainer.model.train()
            trainer.model(batch[0][:1])
    except Exception as error:  # others come of a model that takes something else, which its own step knows
        if _SINGLE in str(error):
            raise _refusal(sizes, error) from error
    finally:
        trainer.model.eval()


def refuse_single(trainer, error: Exception) -> None:
    """Raises InputError where the model failed with ``error`` because a batch is a single sample."""
    if _SINGLE in str(error):
        raise _refusal(trainer.feed and trainer.feed.sizes(), error, _place(trainer)) from error


def refuse_view(trainer, error: Exception) -> None:
    """Raises InputError where a view failed with ``error`` that images in contiguous memory may have."""
    if trainer.memory_format is torch.channels_last and "view size is not compatible" in str(error):
        raise InputError(
            f"{_place(trainer)}images and maps are in channels_last memory, of which .view() gives fewer shapes:"
            " take .flatten(1) or .reshape() instead, or TrainConfig(channels_last=False)"
        ) from error


def _refusal(sizes: tuple[int, int, int] | None, error: Exception, place: str = "") -> InputError:
    where = "" if sizes is None else f" (the data are {sizes[0]} samples in batches of {sizes[1]})"
    return InputError(
        f"{place}the model cannot train on a batch of a single sample, as the last of an epoch may be{where}:"
        f" {str(error).partition(chr(10))[0]}; let the loader leave it out (drop_last=True), or take another batch size"
    )


def counted(loss, labels: Tensor) -> Tensor:
    """Which labels the loss does not ignore."""
    ignored = getattr(loss, "ignore_index", None)
    return torch.ones_like(labels, dtype=torch.bool) if ignored is None else labels != ignored


def _all_labels(batches: Iterable, targets: Tensor) -> Tensor:
    """The labels of all data where they are at hand, or the lowest and highest where a dataset lists them, as it gives
    them out, and samplers pass none over; else those of the first batch."""
    owner = getattr(batches, "batches", batches)  # of a prefetcher
    if isinstance(getattr(owner, "targets", None), Tensor):
        return owner.targets
    if getattr(owner, "collate_fn", None) is not default_collate:  # another may change the labels
        return targets
    order = owner.batch_sampler
    order = order.sampler if type(order) is BatchSampler else order
    if type(order) not in (SequentialSampler, RandomSampler, DistributedSampler, EpochSampler):
        return targets  # another may leave samples out
    dataset = owner.dataset.dataset if isinstance(owner.dataset, SeededDataset) else owner.dataset
    listed = dataset.tensors[-1] if isinstance(dataset, TensorDataset) else getattr(dataset, "targets", None)
    try:
        listed = torch.as_tensor(listed)
        ends = [int(dataset[int(at)][1]) for at in (listed.argmin(), listed.argmax())]
    except (TypeError, ValueError, RuntimeError, IndexError):
        return targets  # not numbers, or no pairs
    return torch.cat([targets.cpu(), torch.tensor(ends)])


def refuse_label(trainer, outputs, targets, error: Exception) -> None:
    """Raises InputError where the loss failed with ``error`` for a label that is none of the model's classes."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or targets.device.type != "cpu":
        return
    if targets.dtype != torch.int64 or outputs.dim() < 2 or targets.shape != outputs.shape[:1] + outputs.shape[2:]:
        return
    classes = outputs.shape[1]
    wrong = counted(trainer.loss, targets) & ((targets < 0) | (targets >= classes))
    if not wrong.any():
        return
    at = tuple(wrong.nonzero()[0].tolist())
    feed, ahead = trainer.reading or (trainer.feed, 0)
    name = (feed and feed.sample(at[0], len(targets), ahead)) or f"sample {at[0]} of the batch"
    fact = f"{name} has the label {int(targets[at])}, but the model has {classes} classes (0 to {classes - 1})"
    raise InputError(_place(trainer) + fact) from error


def _place(trainer) -> str:
    """Where a run is, to begin a message with."""
    running = trainer.feed is not None and trainer.feed.iterating
    if trainer.reading is not None:
        epoch = f" after epoch {trainer.feed.epoch + 1}" if running else ""
        return f"the evaluation{epoch} ended at batch {trainer.reading[1] + 1}: "
    return f"step {trainer.step_count + 1} of epoch {trainer.feed.epoch + 1} was not made: " if running else ""


def describe(batch) -> str:
    """A batch as text: types, dtypes and shapes."""
    if isinstance(batch, (tuple, list)):
        return f"{type(batch).__name__}({', '.join(describe(item) for item in batch)})"
    if isinstance(batch, dict):
        return f"dict({', '.join(f'{key}: {describe(item)}' for key, item in batch.items())})"
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    return type(batch).__name__


def to_device(batch, device: torch.device, memory_format: torch.memory_format, dtype: torch.dtype | None = None):
    """``batch`` with its tensors on ``device``, images in ``memory_format``, floating point ones in ``dtype`` where it
    is given; copies to a GPU do not make the CPU wait."""
    if type(batch) in (tuple, list) and len(batch) == 2 and type(batch[0]) is type(batch[1]) is Tensor:
        # the usual case, without a walk over a tree
        return [_move(batch[0], device, memory_format, dtype), _move(batch[1], device, memory_format, dtype)]
    return tree_map(lambda t: _move(t, device, memory_format, dtype) if isinstance(t, Tensor) else t, batch)


def _move(t: Tensor, device: torch.device, memory_format: torch.memory_format, dtype: torch.dtype | None) -> Tensor:
    floating, ahead = t.is_floating_point(), device.type != "cpu"  # where the CPU would read what is yet to come
    if floating and t.dim() == 4:
        return t.to(device, dtype, memory_format=memory_format, non_blocking=ahead)
    if floating and dtype is not None:
        return t.to(device, dtype, non_blocking=ahead)
    return t if t.device == device else t.to(device, non_blocking=ahead)

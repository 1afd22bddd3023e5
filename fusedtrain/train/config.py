"""What a training run is told."""

import os
from dataclasses import MISSING, dataclass, field, fields
from numbers import Integral
from pathlib import Path
from typing import Literal, get_args

import torch

from fusedtrain.train.accumulation import Accumulation
from fusedtrain.train.activation import ActivationCheckpointing
from fusedtrain.train.distributed import Distributed
from fusedtrain.train.errors import InputError, require, require_count
from fusedtrain.train.logging import Logging
from fusedtrain.train.precision import Precision
from fusedtrain.train.profile import Profile
from fusedtrain.train.saving import Checkpoint
from fusedtrain.train.schedule import Schedule
from fusedtrain.train.stopping import EarlyStopping

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
COMPILE_MODES = get_args(CompileMode)


@dataclass(frozen=True)
class TrainConfig:
    """How :class:`~fusedtrain.train.Trainer` trains.

    Args:
        epochs: passes over the training data.
        device: where to train: "auto" takes the GPU of this process (by its rank, else torch's current one), or the CPU
            where there is none.
        seed: of everything random in the loop; the model and the order of the data are seeded by who makes them.
        channels_last: keep the model and the images in channels_last memory, the faster one for convolutions; of
            several processes with strategy fsdp the images alone.
        compile: mode of ``torch.compile``: default, reduce-overhead (CUDA graphs), max-autotune; None does not.
        cuda_graphs: launch the whole step, from forward to the update, as one CUDA graph where batches have one shape;
            others, such as the last of an epoch, are made as always. For one GPU and an optimizer of
            ``fusedtrain.optim``, with ``capturable=True`` where it has that. What ``training_step`` decides or draws on
            the CPU stays as it was at the capture, hooks of the optimizer are not called. Buffers are to be written
            into: a step that assigns one anew is refused.
        cudnn_benchmark: let cuDNN try its algorithms, once per shape, as long as a run has images of no more than eight
            sizes.
        max_grad_norm: clip the L2 norm of all gradients together to this; None does not.
        ema_decay: keep averages of the weights; evaluation and the saved weights are those, with the buffers, such as
            running means, of the model as it is: ``torch.optim.swa_utils.update_bn`` makes new ones. None does not.
        nonfinite: raise: stop before the update when the loss or a gradient is not finite; skip: leave the update out,
            as with fp16 always where the loss is finite: its scale falls then.
        max_skipped: updates in a row that may be left out before the run stops.
        weights: file that receives the weights at the end, under the state_dict keys of the stock model.
        best_weights: the same of the best epoch, see ``early_stopping``.
        precision: a ``Precision``, or its name: "fp32", "bf16", "fp16", "fp64".
        accumulation: an ``Accumulation``, or the micro-batches per update.
        schedule: a ``Schedule``, or its name.
        activation_checkpointing: which blocks are computed twice to save memory.
        early_stopping: what makes an epoch the best, and when to stop.
        checkpoint: a ``Checkpoint``, or its directory.
        distributed: how several processes train together.
        logging: what is written about the run, and where.
        profile: a trace of some steps.

    Raises:
        InputError: a value is out of range, or no file can be written to where ``weights`` says.
    """

    epochs: int = 10
    device: str = "auto"
    seed: int = 0
    channels_last: bool = True
    compile: CompileMode | None = None
    cuda_graphs: bool = False
    cudnn_benchmark: bool = True
    max_grad_norm: float | None = None
    ema_decay: float | None = None
    nonfinite: Literal["raise", "skip"] = "raise"
    max_skipped: int = 10
    weights: Path | None = None
    best_weights: Path | None = None
    precision: Precision = field(default_factory=Precision)
    accumulation: Accumulation = field(default_factory=Accumulation)
    schedule: Schedule = field(default_factory=Schedule)
    activation_checkpointing: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    distributed: Distributed = field(default_factory=Distributed)
    logging: Logging = field(default_factory=Logging)
    profile: Profile = field(default_factory=Profile)

    def __post_init__(self):
        short = {"precision": Precision, "accumulation": Accumulation, "schedule": Schedule, "checkpoint": Checkpoint}
        for name, part in short.items():
            if not isinstance(getattr(self, name), part):
                object.__setattr__(self, name, part(getattr(self, name)))
        for own in fields(self):
            part, value = own.default_factory, getattr(self, own.name)
            if part is not MISSING and not isinstance(value, part):
                raise InputError(f"{own.name} must be {part.__name__}(...), got {value!r}")
        require_count("epochs", self.epochs)
        fits = isinstance(self.seed, Integral) and -(2**63) <= self.seed < 2**63
        require(fits, f"seed must be a whole number between -2**63 and 2**63 - 1, got {self.seed!r}")
        warmup = self.schedule.warmup_epochs
        require(warmup <= self.epochs, f"warmup_epochs must lie between 0 and epochs ({self.epochs}), got {warmup}")
        modes = ", ".join(COMPILE_MODES)
        require(self.compile in (None, *COMPILE_MODES), f"compile must be one of {modes}, got {self.compile!r}")
        require(self.nonfinite in ("raise", "skip"), f"nonfinite must be raise or skip, got {self.nonfinite!r}")
        require_count("max_skipped", self.max_skipped, 0)
        norm, decay = self.max_grad_norm, self.ema_decay
        require(norm is None or norm > 0, f"max_grad_norm must be positive, got {norm}")
        require(decay is None or 0 <= decay < 1, f"ema_decay must lie in [0, 1), got {decay}")
        for name in ("weights", "best_weights"):
            if getattr(self, name) is not None:
                _check_file(name, Path(getattr(self, name)))
        paths = [os.path.realpath(path) for path in (self.weights, self.best_weights) if path is not None]
        require(len({*paths}) == len(paths), f"weights and best_weights are one file, {self.weights}: name two")
        budget = self.activation_checkpointing.activation_budget_gib
        require(not budget or self.compile is None, "activation_budget_gib measures blocks, which compile= fuses")
        if self.cuda_graphs:
            require(self.compile is None, 'cuda_graphs does not go with compile; compile="reduce-overhead" has its own')
            require(self.precision.precision != "fp16", "cuda_graphs does not go with precision fp16; take bf16")
            require(self.schedule.schedule != "onecycle", "cuda_graphs does not go with onecycle, which moves momentum")
            checkpoints = bool(budget or self.activation_checkpointing.checkpoint_modules)
            require(not checkpoints, "cuda_graphs does not go with activation checkpointing")
        fsdp16 = self.distributed.strategy == "fsdp" and self.precision.precision == "fp16"
        require(not fsdp16, "strategy fsdp does not go with precision fp16; take bf16")


_LONGEST = 220  # bytes of a name: file systems take 255, and until it is whole the file has a longer one


def _check_file(name: str, path: Path) -> None:
    """Raises InputError where the end of the run could not write this file."""
    folder = path.parent
    fits = len(os.fsencode(path.name)) <= _LONGEST
    require(fits, f"{name} must have a name of at most {_LONGEST} bytes, got {path.name}")
    require(folder.is_dir(), f"the folder for the weights does not exist: {folder}")
    require(os.access(folder, os.W_OK), f"the folder for the weights cannot be written to: {folder}")
    require(not path.is_dir(), f"{name} must name a file, {path} is a folder")


def resolve_device(name: str) -> torch.device:
    """Returns the device that ``name`` ("auto", "cpu", "cuda", "cuda:1") means here; InputError where there is none."""
    name = str(name)  # of a torch.device, too
    if name in ("auto", "cuda") and torch.cuda.is_available():
        # one process per GPU, as torchrun numbers them, or as torch.cuda.set_device() says
        own = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", own)) % torch.cuda.device_count())
    if name == "auto":
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device must be auto, cpu or cuda, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device must be auto, cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {name!r}: torch {torch.__version__} sees no CUDA device here")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device {name!r}: there are only {torch.cuda.device_count()} CUDA devices")
    return device

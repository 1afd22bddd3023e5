"""What a training run is told, and the error for what it cannot be told."""

from dataclasses import dataclass
from pathlib import Path

import torch

from fusedtrain.train import precision


class InputError(ValueError):
    """The user's options, data or model do not fit together; the message is one line and says what to change."""


@dataclass(frozen=True)
class TrainConfig:
    """How :class:`Trainer` trains.

    Args:
        epochs: passes over the training data.
        warmup_epochs: the learning rate rises linearly for this many epochs, then falls along a cosine to 0; a part of
            an epoch is allowed.
        precision: "fp32", or "bf16" for autocast (weights, sums and loss stay in float32).
        device: where to train: "auto" takes the first GPU, or the CPU where there is none.
        channels_last: keep the model and the images in channels_last memory, the faster one for convolutions.
        seed: of everything random in the loop; the model and the order of the data are seeded by who makes them.
        checkpoint: file that receives the weights at the end, under the state_dict keys of the stock model.

    Raises:
        InputError: a value is out of range, or the folder of ``checkpoint`` does not exist.
    """

    epochs: int = 10
    warmup_epochs: float = 1.0
    precision: str = "fp32"
    device: str = "auto"
    channels_last: bool = True
    seed: int = 0
    checkpoint: Path | None = None

    def __post_init__(self):
        if self.epochs < 1:
            raise InputError(f"epochs must be at least 1, got {self.epochs}")
        if not 0 <= self.warmup_epochs <= self.epochs:
            raise InputError(f"warmup_epochs must lie between 0 and epochs ({self.epochs}), got {self.warmup_epochs}")
        if self.precision not in precision.PRECISIONS:
            raise InputError(f"precision must be one of {', '.join(precision.PRECISIONS)}, got {self.precision!r}")
        if self.checkpoint is not None and not Path(self.checkpoint).parent.is_dir():
            raise InputError(f"the checkpoint's folder does not exist: {Path(self.checkpoint).parent}")


def resolve_device(name: str) -> torch.device:
    """Returns the device that ``name`` ("auto", "cpu", "cuda", "cuda:1") means here; InputError where there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
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

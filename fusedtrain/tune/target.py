"""What is tuned: a model by name, its images, and a training step of it."""

import contextlib
import ctypes
import hashlib
import importlib.util
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fusedtrain.train.config import resolve_device
from fusedtrain.train.errors import InputError

OPTIMIZERS = ("adamw", "sgd")


class TuneError(ValueError):
    """What was asked for cannot be tuned; one line that says why."""


@dataclass(frozen=True)
class Target:
    """A model and how it is trained; plain values, so that it can go to another process.

    Args:
        model: a name of timm, "small" for the network of ``fusedtrain train``, or ``FILE.py:NAME`` of a function
            without arguments that returns a module.
        image: channels, height and width of the images.
        classes: of the targets; a model of your own must return as many logits.
        layers: "fused" swaps layers by :func:`fusedtrain.fuse`, "stock" does not.
        optimizer: "adamw" or "sgd" (with momentum).
        precision: "fp32", or "bf16" for autocast.
        device: "auto", "cpu", "cuda" or "cuda:1".

    Raises:
        TuneError: a value is out of range.
    """

    model: str = "small"
    image: tuple[int, int, int] = (1, 32, 32)
    classes: int = 10
    layers: str = "fused"
    optimizer: str = "adamw"
    precision: str = "fp32"
    device: str = "auto"

    def __post_init__(self):
        choices = {"layers": ("fused", "stock"), "optimizer": OPTIMIZERS, "precision": ("fp32", "bf16")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise TuneError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if len(self.image) != 3 or min(self.image) < 1 or self.classes < 1:
            raise TuneError(f"image must be channels, height and width, got {self.image}, with {self.classes} classes")

    def key(self) -> dict:
        """Returns the values as JSON has them, which GPU it is, and which file a function is in, with its content."""
        device = self.resolve_device()
        key = {**asdict(self), "image": list(self.image), "device": str(device)}
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            key["gpu"] = [properties.name, properties.total_memory]
        file = Path(self.model.rpartition(":")[0])
        if ":" in self.model and file.is_file():
            key["file"] = [str(file.resolve()), hashlib.sha256(file.read_bytes()).hexdigest()]
        return key

    def resolve_device(self) -> torch.device:
        """Returns the device that is meant; TuneError where there is none."""
        try:
            return resolve_device(self.device)
        except InputError as error:
            raise TuneError(str(error)) from None

    def build(self) -> "Training":
        """Returns the model on its device with everything for a step of training."""
        device = self.resolve_device()
        torch.manual_seed(0)
        model = self._model()
        if self.layers == "fused":
            import fusedtrain

            fusedtrain.fuse(model)
        model.to(device, memory_format=torch.channels_last).train()
        return Training(self, model, device)

    def _model(self) -> nn.Module:
        if ":" in self.model:
            model = load(self.model)()
            if not isinstance(model, nn.Module):
                raise TuneError(f"{self.model} must return a module, got {type(model).__name__}")
            return model
        if self.model == "small":
            if self.image[0] != 1:
                raise TuneError(f"the small network takes images of one channel, got {self.image[0]}")
            from fusedtrain.train import SmallNet

            return SmallNet(self.classes, layers="stock")
        try:
            import timm
        except ModuleNotFoundError:
            raise TuneError(f"model {self.model!r} needs the package timm: pip install timm") from None
        except Exception as error:  # a torchvision of another torch, most of the time
            raise TuneError(f"timm cannot be imported: {type(error).__name__}: {error}") from error
        try:
            return timm.create_model(self.model, pretrained=False, num_classes=self.classes, in_chans=self.image[0])
        except RuntimeError as error:
            raise TuneError(f"timm has no model {self.model!r}: {error}") from None


class Training:
    """A model with its optimizer, and steps of it."""

    def __init__(self, target: Target, model: nn.Module, device: torch.device):
        self.target, self.model, self.device = target, model, device
        if target.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        else:
            self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Returns random images and targets."""
        images = torch.randn(size, *self.target.image, device=self.device)
        return images, torch.randint(self.target.classes, (size,), device=self.device)

    def step(self, images: Tensor, targets: Tensor) -> Tensor:
        """One update; returns the loss before it."""
        images = images.to(self.device, memory_format=torch.channels_last)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.target.precision == "bf16"):
            logits = self.model(images)
        loss = nn.functional.cross_entropy(logits.float(), targets.to(self.device))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def wait(self) -> None:
        """Waits until the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def end_with_parent() -> None:
    """Lets the system end this process when the one that wants its result is gone."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, of Linux
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it was gone before the system knew
        os._exit(1)


def load(name: str) -> Callable:
    """Returns the function that ``FILE.py:NAME`` means; TuneError where there is none."""
    file, _, function = name.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise TuneError(f"{file} is not a file; a function is named FILE.py:NAME, got {name!r}")
    specification = importlib.util.spec_from_file_location(f"_tuned_{path.stem}", path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    folder = str(path.parent.resolve())
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)  # its neighbours, as for a script, whenever it asks for them
    specification.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        raise TuneError(f"{file} has no function {function!r}")
    return getattr(module, function)

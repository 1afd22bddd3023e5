"""What is tuned: a model by name, its images, and the training step that ``fusedtrain train`` makes of it."""

import ast
import contextlib
import hashlib
import importlib.util
import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor, nn

from fusedtrain import _processes
from fusedtrain.train import run
from fusedtrain.train.callbacks import Callback
from fusedtrain.train.config import resolve_device
from fusedtrain.train.distributed import Distributed
from fusedtrain.train.errors import InputError
from fusedtrain.train.schedule import Schedule

LAYERS = ("fused", "stock")
# What of the options leaves a step, its memory and what it learns as they are; the tuners set rates and sizes.
WITHOUT_EFFECT = ("data", "size", "batch_size", "workers", "augment", "cache_gib", "lr", "output", "profile")
PACKAGES = ("fusedtrain", "torch", "timm", "torchvision")  # another version may measure otherwise


class TuneError(ValueError):
    """What was asked for cannot be tuned; one line that says why."""


@dataclass(frozen=True)
class Target:
    """A model and how it is trained; plain values, so that it can go to another process.

    What is None is as ``options`` have it; what is not None replaces it there.

    Args:
        model: a name that ``fusedtrain train`` knows, "small" for its smallnet, or ``FILE.py:NAME`` of a function
            without arguments that returns a module.
        image: channels, height and width of the images.
        classes: of the targets; a model of your own must return as many logits.
        layers: "fused" swaps layers by :func:`fusedtrain.fuse`, "stock" does not.
        optimizer: of ``fusedtrain train``: "adamw", "sgd", ...
        precision: "fp32", "bf16", "fp16" or "fp64".
        device: "auto", "cpu", "cuda" or "cuda:1".
        options: of ``fusedtrain train``, for all else that makes a step. Without effect are those of the data, the
            schedule, the results and several processes.

    Raises:
        TuneError: a value is out of range.
    """

    model: str | None = None
    image: tuple[int, int, int] = (1, 32, 32)
    classes: int = 10
    layers: str | None = None
    optimizer: str | None = None
    precision: str | None = None
    device: str | None = None
    options: run.Options = field(default_factory=run.Options)

    def __post_init__(self):
        if self.layers not in (None, *LAYERS):
            raise TuneError(f"layers must be one of {', '.join(LAYERS)}, got {self.layers!r}")
        if len(self.image) != 3 or min(self.image) < 1 or self.classes < 1:
            raise TuneError(f"image must be channels, height and width, got {self.image}, with {self.classes} classes")
        options, model = self.options, self.model or self.options.model
        own = {"model": "smallnet" if model == "small" else model, "optimizer": self.optimizer or options.optimizer}
        own["fuse"] = options.fuse if self.layers is None else self.layers == "fused"
        alone = {"epochs": 1, "schedule": Schedule("constant", warmup_epochs=0), "distributed": Distributed()}
        try:
            train = run.steps_alone(options.train, device=self.device or options.train.device, **alone)
            if self.precision is not None:
                train = replace(train, precision=replace(train.precision, precision=self.precision))
            options = replace(options, train=train, **own)
            run.check(options)
        except InputError as error:
            raise TuneError(str(error)) from None
        if ":" in model and (options.pretrained or run.drops(options)):
            raise TuneError(f"pretrained and rates of dropout are for models by name, {model} makes its own")
        object.__setattr__(self, "options", options)

    def key(self) -> dict:
        """Returns all that a measurement depends on, as JSON has it: the options of a step, which GPU it is, which
        versions run, and the content of files."""
        device = self.resolve_device()
        options = {name: value for name, value in asdict(self.options).items() if name not in WITHOUT_EFFECT}
        options["init_weights"] = _content(self.options.init_weights)
        options["train"]["device"] = str(device)
        versions = {name: metadata.version(name) for name in PACKAGES if _installed(name)}
        key = {**options, "image": list(self.image), "classes": self.classes, "versions": versions}
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            key["gpu"] = [properties.name, properties.total_memory]
        if ":" in self.options.model:
            key["file"] = program(Path(self.options.model.rpartition(":")[0]))
        return key

    def resolve_device(self) -> torch.device:
        """Returns the device that is meant; TuneError where there is none."""
        try:
            return resolve_device(self.options.train.device)
        except InputError as error:
            raise TuneError(str(error)) from None

    def build(self, **changes) -> run.Classifier:
        """Returns the model on its device with everything for steps of training, as ``fusedtrain train`` makes it.

        Args:
            **changes: of ``options.train``.

        Raises:
            TuneError: there is no such model, or the options do not fit it.
        """
        self.resolve_device()
        options = replace(self.options, lr=1.0, train=replace(self.options.train, **changes))
        torch.manual_seed(options.train.seed)
        try:
            return run.classifier(options, self._model(options), self.classes)
        except InputError as error:
            raise TuneError(str(error)) from error

    def _model(self, options: run.Options) -> nn.Module:
        if ":" not in options.model:
            return run.network(options, self.classes, self.image[0])
        model = load(options.model)()
        if not isinstance(model, nn.Module):
            raise TuneError(f"{options.model} must return a module, got {type(model).__name__}")
        run.start(options, model)
        return model

    def batch(self, size: int, trainer: run.Classifier) -> tuple[Tensor, Tensor]:
        """Returns random images and targets, where and as its steps want them."""
        images = torch.randn(size, *self.image, device=trainer.device)
        return tuple(trainer.to_device((images, torch.randint(self.classes, (size,), device=trainer.device))))


class Observer(Callback):
    """Looks at the steps of a Trainer, whose own lines are not shown."""

    def on_fit_start(self, trainer) -> None:
        trainer.progress.__exit__()  # of a bar
        trainer.progress.shown = False


def _content(file: Path | None) -> list[str] | None:
    if file is None or not file.is_file():
        return None
    return [str(file.resolve()), hashlib.sha256(file.read_bytes()).hexdigest()]


def program(file: Path) -> list[list[str]]:
    """Returns the content of a file of Python, and of those beside it that it imports, at once or when it runs."""
    folder, queue, found = file.parent.resolve(), [file.resolve()], {}
    while queue:
        path = queue.pop()
        if path in found or not path.is_file():
            continue
        found[path] = _content(path)
        with contextlib.suppress(SyntaxError, ValueError):  # who imports it will be told
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    queue += _imported(node, path, folder)
    return sorted(found.values())


def _imported(node: ast.Import | ast.ImportFrom, path: Path, folder: Path) -> list[Path]:
    """Returns the files that an import in ``path`` may be of; those in ``folder`` can be imported by their names."""
    level, module = getattr(node, "level", 0), getattr(node, "module", None)
    base = path.parents[level - 1] if level else folder
    found = []
    for alias in node.names:
        place = base
        for part in f"{module or ''}.{alias.name}".strip(".").split("."):  # packages are imported with what is in them
            place = place / part
            found += [place.with_name(f"{part}.py"), place / "__init__.py"]
    return found


def _installed(package: str) -> bool:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version(package))
    return False


def wait(device: torch.device) -> None:
    """Waits until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # which need not be the current one


def end_with_parent() -> None:
    """Ends this process of multiprocessing when the one that wants its result is gone. The system would wait for the
    one that forked it, which may be a server."""
    _processes.end_with(multiprocessing.parent_process().sentinel)


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

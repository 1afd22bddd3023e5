"""Where the numbers of a run go: JSON lines, TensorBoard, Weights & Biases, MLflow, or an object of yours."""

import functools
import importlib
import itertools
import json
import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from fusedtrain._files import json_text, write_atomic
from fusedtrain.train.errors import InputError, make_folder, require, require_count

PACKAGES = {"jsonl": "json", "tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


@dataclass(frozen=True)
class Logging:
    """What is logged where.

    Args:
        log_dir: folder of metrics.jsonl and of TensorBoard's files; None logs nothing.
        loggers: of jsonl, tensorboard, wandb and mlflow.
        log_every: updates between two lines; an epoch's end always makes one.
        log_usage: log what the run uses, too: GPU, CPU, memory, page faults, disks and network; and per stage of the
            step, since the line before, its seconds, CPU, page faults, disk blocks and what it added to the peak of
            memory. About 2 us per stage and a millisecond per line.

    Raises:
        InputError: a logger is unknown or named twice, ``log_every`` is below 1, or a package is missing.
    """

    log_dir: Path | None = None
    loggers: tuple[str, ...] = ("jsonl",)
    log_every: int = 10
    log_usage: bool = False

    def __post_init__(self):
        require(not isinstance(self.loggers, str), f"loggers must be a list of names, got {self.loggers!r}")
        unknown = [name for name in self.loggers if name not in PACKAGES]
        require(not unknown, f"loggers must be of {', '.join(PACKAGES)}, got {', '.join(unknown)}")
        require(len({*self.loggers}) == len(self.loggers), f"loggers names one twice: {', '.join(self.loggers)}")
        require_count("log_every", self.log_every)
        needed = {f"the logger {name}": PACKAGES[name] for name in self.loggers if self.log_dir is not None}
        needed |= {"log_usage": "psutil"} if self.log_usage else {}
        for what, package in needed.items():
            try:
                importlib.import_module(package)
            except ModuleNotFoundError as error:
                raise InputError(f"{what} needs the package {error.name}: pip install {error.name}") from None

    def open(self, config: dict, step: int, epochs: float = 0) -> list:
        """Returns the loggers of a run that begins, or goes on, after ``step`` updates and ``epochs`` whole epochs."""
        if self.log_dir is None:
            return []
        make_folder(self.log_dir, "the folder of the logs")
        kinds = {
            "jsonl": functools.partial(JSONLines, epochs=epochs),
            "tensorboard": TensorBoard,
            "wandb": WandB,
            "mlflow": MLflow,
        }
        return [kinds[name](Path(self.log_dir), config, step) for name in self.loggers]


def is_logger(given) -> bool:
    """Whether a run can use what was given as a logger."""
    methods = (getattr(given, name, None) for name in ("log", "flush", "close"))
    return not isinstance(given, type) and all(map(callable, methods))


class JSONLines:
    """One JSON object per line in metrics.jsonl, written about once a second: together they cost less. Numbers that are
    not finite, which JSON does not know, are null. A run that goes on from an earlier step drops the later lines; one
    that begins keeps those of another as metrics-1.jsonl. A file that is removed during the run is made anew."""

    def __init__(self, directory: Path, config: dict, step: int, epochs: float = 0):
        path = self._path = directory / "metrics.jsonl"
        old = path.read_bytes() if path.exists() else None
        if old and not step:  # another run's: all that may be left of it
            own = (path.with_stem(f"metrics-{number}") for number in itertools.count(1))
            path.rename(next(name for name in own if not name.exists()))
            old = None
        lines = [line for line in (old or b"").splitlines() if _is_earlier(line, step, epochs)]
        kept = b"".join(line + b"\n" for line in lines)
        if kept != old:  # never half: a run that is killed here must not lose what it has logged
            write_atomic(path, lambda file: file.write(kept))
        self._open()
        self._new: list[dict] = []
        self.flush()

    def _open(self) -> None:
        # Unbuffered: what a full disk does not take is not tried again when the run ends. Closed by close().
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115

    def _find(self) -> None:
        """Opens the file again where it is no longer the one under its name: what is written there is lost."""
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
                return
        except FileNotFoundError:
            warnings.warn(f"{self._path} is gone, with its lines; the run goes on in a new one", stacklevel=2)
            self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file.close()
        self._open()

    def log(self, step: int, values: dict[str, float]) -> None:
        self._new.append({"step": step, **values})
        if time.monotonic() > self._due:
            self.flush()

    def flush(self) -> None:
        data, self._new = "".join(json_text(line) + "\n" for line in self._new).encode(), []
        self._due = time.monotonic() + 1.0
        try:
            if data:
                self._find()
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file.name) from None  # which file, too

    def close(self) -> None:
        self.flush()
        self._file.close()


def _is_earlier(line: bytes, step: int, epochs: float) -> bool:
    """Whether a line is of the first updates; that of an epoch, which a step's checkpoint may precede, of the first
    epochs."""
    try:
        values = json.loads(line)
        return values["step"] <= step and values.get("epoch", 0) <= epochs
    except (ValueError, KeyError, TypeError, AttributeError):
        return False  # half a line of a run that was killed


class TensorBoard:
    """Scalars under their names, as ``tensorboard --logdir`` shows them."""

    def __init__(self, directory: Path, config: dict, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=step + 1 if step else None)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Known:
    """The name that a service has given to a run, kept in a file for when the run goes on."""

    def __init__(self, path: Path, step: int):
        self._path = path
        self.id = path.read_text() if step and path.exists() else None

    def keep(self, name: str) -> None:
        if name != self.id:
            write_atomic(self._path, lambda file: file.write(name.encode()))


class WandB:
    """Weights & Biases, in the run that is open, and stays so, or a new one; what goes on, in the run that it had."""

    def __init__(self, directory: Path, config: dict, step: int):
        import wandb

        self._new = wandb.run is None
        if self._new:
            known = _Known(directory / "wandb.id", step)
            again = {"id": known.id, "resume": "allow", "allow_val_change": True} if known.id else {}
            wandb.init(dir=str(directory), config=config, **again)
            known.keep(wandb.run.id)
        self._run = wandb.run

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if self._new:
            self._run.finish()


class MLflow:
    """MLflow, in the run that is active, and stays so, or a new one; what goes on, in the run that it had."""

    def __init__(self, directory: Path, config: dict, step: int):
        import mlflow

        self._mlflow = mlflow
        self._new = mlflow.active_run() is None
        if self._new:
            known = _Known(directory / "mlflow.id", step)
            known.keep(mlflow.start_run(run_id=known.id).info.run_id)
        kept = mlflow.get_run(mlflow.active_run().info.run_id).data.params  # it refuses other values
        mlflow.log_params({name: str(value)[:500] for name, value in config.items() if name not in kept})

    def log(self, step: int, values: dict[str, float]) -> None:
        self._mlflow.log_metrics(values, step=step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if self._new:
            self._mlflow.end_run()

"""Checkpoints in a folder: written so that a crash at any moment leaves a usable one, read with verification."""

import json
import re
import warnings
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fusedtrain._files import sync_folder, write_atomic
from fusedtrain.train import checkpoint_file
from fusedtrain.train.checkpoint_file import CheckpointError
from fusedtrain.train.state_tree import flatten

POINTER = "latest"
RUN_FOLDER = "checkpoints"  # in the output folder of ``fusedtrain train --model``
_NAME = re.compile(r"checkpoint-(\d+)-step-(\d+)\.safetensors")


@dataclass(frozen=True)
class Loaded:
    """Where a state came from: the file, its step, and the newer files passed over, each with the reason."""

    path: Path
    step: int
    passed_over: tuple[tuple[Path, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"step {self.step} from {self.path}"]
        return "; ".join(lines + [f"passed over {path.name}: {reason}" for path, reason in self.passed_over])


class CheckpointStore:
    """The checkpoints of one run in one folder.

    A checkpoint is one file, ``checkpoint-<number>-step-<step>.safetensors`` (:mod:`checkpoint_file` holds the format);
    the number counts the saves, so that a run which went back to an earlier step still knows its newest. Order of a
    save: a temporary file in the folder, its bytes to the disk, its name, the folder to the disk, then the file
    "latest" with the name, then older checkpoints go. Whoever writes must be the only one that writes here.

    Args:
        directory: made where it is missing.
        keep: how many checkpoints stay, at least 1; None keeps all.
        asynchronous: :meth:`save` returns when the state is copied to the CPU, and a thread writes it. At most one
            write is under way; the next save waits for it. An error of it is raised by the next call of :meth:`save`,
            :meth:`check`, :meth:`wait` or :meth:`load`.
        may_be_nonfinite: paths of tensors ("model/mask") or of parts of the state ("history") in which infinity or NaN
            is right. All others with such a value are refused; see :func:`fusedtrain.train.weights.nonfinite_names`.

    Raises:
        ValueError: ``keep`` is less than 1 or no whole number.
    """

    def __init__(
        self,
        directory: Path | str,
        keep: int | None = 3,
        asynchronous: bool = False,
        may_be_nonfinite: Iterable[str] = (),
    ):
        if keep is not None and (keep < 1 or keep % 1):
            raise ValueError(f"keep must be a whole number of at least 1 or None, got {keep}")
        self.directory, self.asynchronous = Path(directory), asynchronous
        self.keep = keep and int(keep)
        self.may_be_nonfinite = frozenset(may_be_nonfinite)
        self._executor: ThreadPoolExecutor | None = None
        self._writing: Future | None = None
        self._cleaned = False

    # --- saving -------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: dict) -> Path:
        """Saves ``state`` as the newest checkpoint.

        Args:
            step: at least 0; comes back from :meth:`load`.
            state: nested dicts, lists and tuples of tensors (any device, any dense strides), numbers, strings, None.

        Returns:
            The file; with ``asynchronous`` it is there after :meth:`wait`.

        Raises:
            CheckpointError: the file could not be written, as on a full disk, or a weight is not finite. The earlier
                checkpoints are as they were then.
            TypeError: the state holds something else.
        """
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        self.wait()
        tree, tensors = flatten(state)
        try:
            self._make_folder()
            path = self.directory / f"checkpoint-{self._next_number():06d}-step-{step}.safetensors"
        except OSError as error:
            raise CheckpointError(f"no checkpoint can be written to {self.directory}: {error.strerror}") from error
        if not self.asynchronous:
            self._write(path, step, tree, tensors)
            return path
        self._start(path, step, tree, checkpoint_file.snapshot(tensors))
        return path

    def _start(self, *what) -> None:
        """Lets a thread write."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._writing = self._executor.submit(self._write, *what)

    def check(self) -> None:
        """Raises the error of an asynchronous save that has failed; costs next to nothing, for every step."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Returns when nothing is being written any more; raises the error of the last asynchronous save."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, path: Path, step: int, tree, tensors: dict) -> None:
        def fill(file) -> None:
            checkpoint_file.write(file, step, tree, tensors, may_be_nonfinite=self.may_be_nonfinite)

        try:
            write_atomic(path, fill)
            self._point(path, step)
        except OSError as error:
            raise _not_written(path, step, error.strerror) from error
        self._prune()

    def _point(self, path: Path, step: int) -> None:
        pointer = json.dumps({"file": path.name, "step": step}) + "\n"
        write_atomic(self.directory / POINTER, lambda file: file.write(pointer.encode()))

    def _make_folder(self) -> None:
        if not self.directory.is_dir():
            self.directory.mkdir(parents=True, exist_ok=True)
            sync_folder(self.directory.parent)
        if not self._cleaned:  # what a killed run has left half-written
            for temporary in self.directory.glob(".*.tmp"):
                temporary.unlink(missing_ok=True)
            self._cleaned = True

    def _prune(self) -> None:
        paths = self._newest_first()
        old = paths[self.keep :] if self.keep is not None else []
        stays = {path.stem for path in paths} - {path.stem for path in old}
        # Shards after the file that ties them together; those of a save that did not come to its end too.
        shards = [
            path for path in self.directory.glob("checkpoint-*.shard-*") if path.name.partition(".")[0] not in stays
        ]
        for path in old + shards:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                warnings.warn(f"an old checkpoint stays: {path}: {error.strerror}", stacklevel=2)

    # --- loading ------------------------------------------------------------------------------------------------------

    def load(self, step: int | None = None, map_location="cpu") -> tuple[dict, Loaded]:
        """Reads the newest checkpoint that is whole.

        Args:
            step: take the newest of this step instead.
            map_location: the device of the tensors, or what ``Tensor.to`` takes.

        Returns:
            The state, and where it came from with what was passed over and why.

        Raises:
            CheckpointError: there is no checkpoint, or none that is whole; the message has the reason for each.
        """
        self.wait()
        passed_over, candidates = [], self._newest_first()
        pointed = self._pointed()
        if step is not None:
            candidates = [path for path in candidates if _number_and_step(path)[1] == step]
        elif pointed is not None and _number(pointed) > max(map(_number, candidates), default=0):
            passed_over.append((pointed, "it is missing, but was the latest"))
        for path in candidates:
            try:
                contents = checkpoint_file.read(path, map_location)
                if contents.step != _number_and_step(path)[1]:
                    raise CheckpointError(f"the file holds step {contents.step}: it was renamed")
                return contents.state, Loaded(path, contents.step, tuple(passed_over))
            except CheckpointError as error:
                passed_over.append((path, str(error)))
            except OSError as error:
                passed_over.append((path, f"cannot be read: {error.strerror}"))
        raise self._none_is_whole(step, passed_over)

    def _none_is_whole(self, step: int | None, passed_over: list[tuple[Path, str]]) -> CheckpointError:
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        reasons = "".join(f"\n  {path.name}: {reason}" for path, reason in passed_over)
        return CheckpointError(f"{what} in {self.directory}" + (f" is whole:{reasons}" if reasons else ""))

    def steps(self) -> list[int]:
        """The steps of which there are files, oldest first; nothing is read or verified."""
        return [_number_and_step(path)[1] for path in reversed(self._newest_first())]

    def _newest_first(self) -> list[Path]:
        try:
            return sorted(
                (path for path in self.directory.iterdir() if _NAME.fullmatch(path.name)),
                key=_number_and_step,
                reverse=True,
            )
        except FileNotFoundError:
            return []

    def _pointed(self) -> Path | None:
        """The file that "latest" names; None where it cannot be read, which costs nothing: the numbers say the same."""
        try:
            name = json.loads((self.directory / POINTER).read_bytes())["file"]
            return self.directory / name if _NAME.fullmatch(name) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _next_number(self) -> int:
        known = [*self._newest_first()[:1], *filter(None, [self._pointed()])]
        return 1 + max(map(_number, known), default=0)


def _not_written(path: Path, step: int, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint of step {step} could not be written to {path}: {reason}; the earlier ones are as they were"
    )


def _number(path: Path) -> int:
    return _number_and_step(path)[0]


def _number_and_step(path: Path) -> tuple[int, int]:
    number, step = _NAME.fullmatch(path.name).groups()
    return int(number), int(step)


def verify(path: Path | str) -> list[str]:
    """Reads a checkpoint, or all of a folder (also of the output folder of ``fusedtrain train``), and returns what is
    wrong, one line each; [] when all is whole.

    Raises:
        CheckpointError: there is no such file, or no checkpoint in the folder.
    """
    path = Path(path)
    if not path.is_dir():
        if not path.exists():
            raise CheckpointError(f"there is no {path}")
        return checkpoint_file.problems(path)
    store = CheckpointStore(path)
    paths = store._newest_first()
    if not paths and (path / RUN_FOLDER).is_dir():
        return verify(path / RUN_FOLDER)
    if not paths:
        raise CheckpointError(f"no checkpoint in {path}")
    return [f"{file.name}: {problem}" for file in paths for problem in checkpoint_file.problems(file)]

"""Files that several processes share: the user's cache folder, locks, and writes that are never seen half done."""

import contextlib
import errno
import glob
import json
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def cache_path(*parts: str) -> Path:
    """Returns a folder for what can be made again: FUSEDTRAIN_CACHE, or fusedtrain in XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("FUSEDTRAIN_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "fusedtrain"
    )
    return Path(base, *parts)


def cache_folder(*parts: str) -> Path:
    """Returns the same, and makes it where it is missing."""
    folder = cache_path(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_atomic(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Lets ``write`` fill a file beside ``path``, brings it to the disk, then gives it its name in one step.

    A reader, and whoever starts after a crash, sees the old file or the new one, never a part.
    """
    path = Path(path)
    # In the same folder: only within one file system is the renaming atomic.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove_unfinished(path: Path) -> None:
    """Removes what writes of ``path`` have left that were killed; nobody may be writing it."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        temporary.unlink(missing_ok=True)


_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES)  # not a failing disk: EIO


def sync_folder(folder: Path) -> None:
    """Brings the names in ``folder`` to the disk; only POSIX has and needs this, and some file systems of it cannot."""
    if os.name == "posix":
        try:
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC:
                raise


def write_tensors(path: Path, content) -> None:
    """Writes what ``torch.load`` reads as :func:`write_atomic` does."""
    import torch

    def write(file: BinaryIO) -> None:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # how its zip file ends that a full disk has cut off
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None

    write_atomic(path, write)


def write_json(path: Path, content) -> None:
    """Writes JSON as :func:`write_atomic` does."""
    write_atomic(path, lambda file: file.write((json.dumps(content, indent=1) + "\n").encode()))


def read_json(path: Path):
    """Returns the content of a JSON file; None where it is missing or not JSON."""
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return None


def json_text(content, **options) -> str:
    """Returns JSON as its standard has it: what is not a finite number becomes null."""
    return json.dumps(_finite(content), allow_nan=False, **options)


def _finite(value):
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


# Descriptors of the locks that this process holds. A fork shares them: its copy would keep a lock for as long as it
# lives, whatever its parent does.
_held: dict[object, int] = {}


def _leave_held() -> None:
    for handle in _held.values():
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_held)


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False, wait: bool = True):
    """Holds the lock file ``path``, which the system frees when the process ends, killed or not; forks do not hold it.

    Args:
        path: made where it is missing; never deleted, so that all processes lock the same file.
        shared: with other shared holders; else alone.
        wait: False gives up at once.

    Yields:
        True, or False where ``wait`` is False and another process holds it.
    """
    import fcntl

    # Opened anew each time: a descriptor that was inherited by a fork would share its lock.
    handle, mine = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), object()
    _held[mine] = handle
    try:
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        if _held.pop(mine, None) is not None:  # else this is a fork, which has closed it
            os.close(handle)

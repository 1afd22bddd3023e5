"""Files that several processes share: the user's cache folder, locks, and writes that are never seen half done."""

import contextlib
import json
import os
import tempfile
from pathlib import Path


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


def write_atomic(path: Path, content: bytes) -> None:
    """Writes a file that appears whole or not at all, whoever is killed meanwhile."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_json(path: Path, content) -> None:
    """Writes JSON as :func:`write_atomic` does."""
    write_atomic(path, (json.dumps(content, indent=1) + "\n").encode())


def read_json(path: Path):
    """Returns the content of a JSON file; None where it is missing or not JSON."""
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False, wait: bool = True):
    """Holds the lock file ``path``, which the system frees when the process ends, killed or not.

    Args:
        path: made where it is missing; never deleted, so that all processes lock the same file.
        shared: with other shared holders; else alone.
        wait: False gives up at once.

    Yields:
        True, or False where ``wait`` is False and another process holds it.
    """
    import fcntl

    # Opened anew each time: a descriptor that was inherited by a fork would share its lock.
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)

"""Shards of a remote dataset, copied to local storage ahead of use and shared by the processes of a node.

Beside each shard lie a JSON file (URL, size, version, SHA-256, whether it is complete) and two lock files: ``.get`` is
held alone by who copies it, ``.use`` is shared by all who need it; what nobody uses may be deleted. The system frees
locks when a process ends, so that a kill at any moment leaves nothing that another process would wait for.
"""

import contextlib
import hashlib
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from fusedtrain import _files
from fusedtrain._extras import need

CHUNK = 4 * 2**20  # bytes read from the remote at a time
TRIES = 3  # of reading on after an error of the remote


class StagingError(OSError):
    """A shard cannot be brought here whole; the message holds its URL."""


class Staging:
    """Local copies of remote files.

    Args:
        folder: on a fast local disk, the same for all processes of the node; None takes ``staging/`` in the cache
            folder (FUSEDTRAIN_CACHE, or ~/.cache/fusedtrain).
        max_bytes: of all copies together; the ones not used for longest go first, ones in use are waited for.
        ahead: copies that :meth:`stage` makes before they are asked for.
        checksums: URL -> SHA-256 in hexadecimal, of those that are known; the others' are taken on arrival.
        storage_options: for fsspec: credentials, endpoints.

    Raises:
        ValueError: a number is out of range.
        StagingError: a shard is larger than ``max_bytes``, ends early, or does not have its checksum.

    A copy is used again as long as the remote file has the same size and version (ETag or time of change), and as its
    checksum, taken once per process, is right; otherwise it is fetched anew. A copy that was interrupted goes on where
    it stopped.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        max_bytes: int = 50 * 2**30,
        ahead: int = 2,
        checksums: dict[str, str] | None = None,
        storage_options: dict | None = None,
    ):
        need("fsspec", "data")
        for name, value in {"max_bytes": max_bytes, "ahead": ahead}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.folder = _files.cache_folder("staging") if folder is None else Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.max_bytes, self.ahead = max_bytes, ahead
        self.checksums, self.storage_options = dict(checksums or {}), dict(storage_options or {})
        self._verified: set[tuple[int, str]] = set()  # (process, URL)

    @contextlib.contextmanager
    def hold(self, url: str) -> Iterator[Path]:
        """Gives the local copy of a URL, which stays for the length of the ``with`` block."""
        with contextlib.ExitStack() as stack:
            yield self._hold(url, stack, threading.Event())

    def stage(self, urls: Iterable[str]) -> Iterator[Path]:
        """Gives the local copies in order, the next ones being fetched by a thread meanwhile.

        A path is good until the next one is asked for.
        """
        ready: queue.Queue = queue.Queue(self.ahead)
        stop = threading.Event()
        thread = threading.Thread(target=self._fetch, args=(iter(urls), ready, stop), daemon=True)
        thread.start()
        try:
            while True:
                path, stack = ready.get()
                with stack:
                    if path is None:
                        return
                    if isinstance(path, BaseException):
                        raise path
                    yield path
        finally:
            stop.set()
            while thread.is_alive() or not ready.empty():
                with contextlib.suppress(queue.Empty):
                    ready.get(timeout=0.02)[1].close()

    def _fetch(self, urls: Iterator[str], ready: queue.Queue, stop: threading.Event) -> None:
        for url in urls:
            stack = contextlib.ExitStack()
            try:
                ready.put((self._hold(url, stack, stop), stack))
            except BaseException as error:
                ready.put((error, stack))
                return
            if stop.is_set():
                return
        ready.put((None, contextlib.ExitStack()))

    def _hold(self, url: str, stack: contextlib.ExitStack, stop: threading.Event) -> Path:
        """Returns the copy of a URL, in use until ``stack`` is closed."""
        shard = _Shard(self.folder, url)
        stack.enter_context(_files.locked(shard.use, shared=True))
        with _files.locked(shard.get):
            if (os.getpid(), url) not in self._verified or not shard.data.exists():
                self._ensure(shard, stop)
                self._verified.add((os.getpid(), url))
            os.utime(shard.note)  # the order in which copies are deleted
        return shard.data

    def _ensure(self, shard: "_Shard", stop: threading.Event) -> None:
        filesystem, path = need("fsspec", "data").core.url_to_fs(shard.url, **self.storage_options)
        info = filesystem.info(path)
        size = info.get("size")
        if size is None:
            raise StagingError(f"{shard.url}: the remote does not tell its size")
        if size > self.max_bytes:
            raise StagingError(f"{shard.url} has {size} bytes, max_bytes is {self.max_bytes}")
        wanted = self.checksums.get(shard.url)
        found = {"url": shard.url, "size": size, "version": _version(info)}
        note = _files.read_json(shard.note) or {}
        same = all(note.get(key) == value for key, value in found.items())
        if same and note.get("complete") and shard.data.exists():
            checksum = _sha256(shard.data)
            if checksum == note["sha256"] and wanted in (None, checksum):
                return
            shard.data.unlink()
        if not same:
            shard.forget()
        self._reserve(shard, found, stop)
        checksum = _copy(filesystem, path, shard, size, stop)
        if wanted not in (None, checksum):
            shard.forget()
            raise StagingError(f"{shard.url} has SHA-256 {checksum}, expected {wanted}")
        os.replace(shard.part, shard.data)
        _files.write_json(shard.note, {**found, "sha256": checksum, "complete": True})

    def _reserve(self, shard: "_Shard", found: dict, stop: threading.Event) -> None:
        """Notes the size of a copy to come, once there is room for it."""
        while not stop.is_set():
            with _files.locked(self.folder / "folder.lock"):
                others = [path for path in self.folder.glob("*.json") if path != shard.note]
                sizes = {path: (_files.read_json(path) or {}).get("size", 0) for path in others}
                excess = sum(sizes.values()) + found["size"] - self.max_bytes
                for path in sorted(others, key=lambda path: path.stat().st_mtime):
                    if excess <= 0:
                        break
                    excess -= sizes[path] if _Shard.delete(path) else 0
                if excess <= 0:
                    _files.write_json(shard.note, {**found, "complete": False})
                    return
            time.sleep(0.05)  # until a process is done with one
        raise StagingError(f"{shard.url}: stopped while waiting for room")


class _Shard:
    """The files of one URL in the folder."""

    def __init__(self, folder: Path, url: str):
        name = hashlib.sha256(url.encode()).hexdigest()[:16]
        self.url = url
        # The name's end is kept: it tells readers what it is.
        self.data = folder / f"{name}-{os.path.basename(url.split('?')[0])}"
        self.note, self.part = folder / f"{name}.json", folder / f"{name}.part"
        self.get, self.use = folder / f"{name}.get", folder / f"{name}.use"

    def forget(self) -> None:
        for path in (self.data, self.part, self.note):
            path.unlink(missing_ok=True)

    @staticmethod
    def delete(note: Path) -> bool:
        """Deletes a copy that nobody uses; False where somebody does."""
        with _files.locked(note.with_suffix(".use"), wait=False) as free:
            if free:
                for path in (*note.parent.glob(f"{note.stem}-*"), note.with_suffix(".part"), note):
                    path.unlink(missing_ok=True)
            return free


def _copy(filesystem, path: str, shard: _Shard, size: int, stop: threading.Event) -> str:
    """Copies the rest of a file to its part, and returns the checksum of the whole."""
    if shard.data.exists():  # killed between the last two steps
        os.replace(shard.data, shard.part)
    digest, at = hashlib.sha256(), 0
    with open(shard.part, "ab+") as part:
        part.seek(0)
        while chunk := part.read(CHUNK):
            digest.update(chunk)
            at += len(chunk)
        for attempt in range(TRIES):
            try:
                with filesystem.open(path, "rb") as source:
                    source.seek(at)
                    while at < size and (chunk := source.read(min(CHUNK, size - at))):
                        if stop.is_set():
                            raise StagingError(f"{shard.url}: stopped")
                        part.write(chunk)
                        digest.update(chunk)
                        at += len(chunk)
                break
            except OSError as error:
                if isinstance(error, StagingError) or attempt == TRIES - 1:
                    raise
                time.sleep(0.1 * 4**attempt)
    if at != size:
        shard.part.unlink()
        raise StagingError(f"{shard.url} ended after {at} bytes, expected {size}")
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _version(info: dict) -> str:
    """Returns what changes when a remote file does, as far as its file system tells."""
    names = ("ETag", "etag", "md5", "mtime", "LastModified", "last_modified", "created")
    return next((str(info[name]) for name in names if info.get(name)), "")

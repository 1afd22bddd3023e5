"""Shards of a remote dataset, copied to local storage ahead of use and shared by the processes of a node.

Beside each shard lie a JSON file (URL, size, version, SHA-256, whether it is complete) and three lock files: ``.get``
is held alone by who copies it, ``.use`` is shared by all who need it, ``.ahead`` by all who will need it soon; what
nobody uses may be deleted. The system frees locks when a process ends, so that a kill at any moment leaves nothing that
another process would wait for.
"""

import collections
import contextlib
import hashlib
import itertools
import numbers
import os
import queue
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from fusedtrain import _files
from fusedtrain._extras import need

CHUNK = 4 * 2**20  # bytes read from the remote at a time
TRIES = 3  # of reading on after an error of the remote
PATIENCE = 30.0  # seconds of waiting for room, after which it is said
NOTES = "[0-9a-f]" * 16 + ".json"  # not a shard that is called so itself


class StagingError(OSError):
    """A shard cannot be brought here whole; the message holds its URL."""


class Staging:
    """Local copies of remote files.

    Args:
        folder: on a fast local disk, the same for all processes of the node; None takes ``staging/`` in the cache
            folder (FUSEDTRAIN_CACHE, or fusedtrain/ in XDG_CACHE_HOME or ~/.cache).
        max_bytes: of all copies together, at least as much as all that is read at the same time, by any process; the
            ones not used for longest go first, ones in use are waited for.
        ahead: copies that :meth:`stage` makes before they are asked for.
        checksums: URL -> SHA-256 in hexadecimal, of those that are known; the others' are taken on arrival.
        storage_options: for fsspec: credentials, endpoints.

    Raises:
        ValueError: a number is out of range.
        StagingError: a shard is larger than ``max_bytes``, ends early, or does not have its checksum.

    A copy is used again as long as the remote file has the same size and version (ETag or time of change), and as its
    checksum, taken once per process, is right; otherwise it is fetched anew. A copy that was interrupted goes on where
    it stopped, or from its start where the remote is a stream.
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
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
        if not isinstance(ahead, numbers.Integral) or ahead < 1:
            raise ValueError(f"ahead must be an integer of at least 1, got {ahead!r}")
        self.folder = _files.cache_folder("staging") if folder is None else Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.max_bytes, self.ahead = max_bytes, ahead
        self.checksums, self.storage_options = dict(checksums or {}), dict(storage_options or {})
        self._canonical: dict[str, str] | None = None  # the checksums by another way to write their URLs
        self._verified: set[tuple[int, str]] = set()  # (process, URL)

    @contextlib.contextmanager
    def hold(self, url: str) -> Iterator[Path]:
        """Gives the local copy of a URL, which stays for the length of the ``with`` block."""
        shard, begin, told = _Shard(self.folder, url), time.monotonic(), False
        with _files.locked(shard.use, shared=True):
            while not self._bring(shard, threading.Event(), ahead=False):
                if not told and time.monotonic() - begin > PATIENCE:
                    told = True
                    warnings.warn(
                        f"{url} waits for room: all copies in {self.folder} are in use, and max_bytes={self.max_bytes}"
                        " leaves none for another",
                        stacklevel=3,
                    )
                time.sleep(0.05)
            yield shard.data

    def stage(self, urls: Iterable[str]) -> Iterator[Path]:
        """Gives the local copies in order, the next ones being fetched by a thread meanwhile.

        A path is good until the next one is asked for. What was fetched ahead gives way where somebody has no room for
        the one copy that he needs now: processes that wait for each other's batches would else wait for ever.
        """
        coming = iter(urls)
        window = collections.deque(map(_Ahead, itertools.islice(coming, 1)))
        tasks: queue.SimpleQueue = queue.SimpleQueue()
        stop = threading.Event()
        thread = threading.Thread(target=self._fetch, args=(tasks, stop), daemon=True)
        thread.start()
        try:
            while window:
                now = window.popleft()
                now.take()
                for url in itertools.islice(coming, self.ahead - len(window)):
                    window.append(_Ahead(url))
                    tasks.put(window[-1])
                with self.hold(now.url) as path:
                    now.lock.close()
                    yield path
        finally:
            stop.set()
            tasks.put(None)
            thread.join()
            for ahead in window:
                ahead.lock.close()

    def _fetch(self, tasks: queue.SimpleQueue, stop: threading.Event) -> None:
        """Brings copies before they are needed. What fails is left to who needs it: he meets the error as well."""
        for task in iter(tasks.get, None):
            shard = _Shard(self.folder, task.url)
            with contextlib.suppress(Exception), contextlib.ExitStack() as lock:
                lock.enter_context(_files.locked(shard.ahead, shared=True))
                while not (stop.is_set() or task.taken or self._bring(shard, stop, ahead=True)):
                    time.sleep(0.05)  # until another process has it, or is done with one
                task.keep(lock)

    def _bring(self, shard: "_Shard", stop: threading.Event, ahead: bool) -> bool:
        """Sees to the copy of a shard; False where there is no room for it now."""
        with _files.locked(shard.use, shared=True), _files.locked(shard.get, wait=not ahead) as alone:
            if not alone:
                return False
            if (os.getpid(), shard.url) not in self._verified or not shard.data.exists():
                if not self._ensure(shard, stop, ahead):
                    return False
                self._verified.add((os.getpid(), shard.url))
            now = time.time_ns()  # by itself the system counts in ticks of milliseconds
            os.utime(shard.note, ns=(now, now))  # the order in which copies are deleted
            return True

    def _ensure(self, shard: "_Shard", stop: threading.Event, ahead: bool) -> bool:
        filesystem, path = need("fsspec", "data").core.url_to_fs(shard.url, **self.storage_options)
        info = shard.info = shard.info or filesystem.info(path)
        size = info.get("size")
        if size is None:
            raise StagingError(f"{shard.url}: the remote does not tell its size")
        if size > self.max_bytes:
            raise StagingError(f"{shard.url} has {size} bytes, max_bytes is {self.max_bytes}")
        wanted = self._checksum(shard.url)
        found = {"url": shard.url, "size": size, "version": _version(info)}
        note = _files.read_json(shard.note) or {}
        same = all(note.get(key) == value for key, value in found.items())
        if same and note.get("complete") and shard.data.exists():
            checksum = _sha256(shard.data)
            if checksum == note["sha256"] and wanted in (None, checksum):
                return True
            shard.data.unlink()
        if not same:
            shard.forget()
        if not self._reserve(shard, found, ahead):
            return False
        checksum = _copy(filesystem, path, shard, size, stop)
        if wanted not in (None, checksum):
            shard.forget()
            raise StagingError(f"{shard.url} has SHA-256 {checksum}, expected {wanted}")
        os.replace(shard.part, shard.data)
        _files.write_json(shard.note, {**found, "sha256": checksum, "complete": True})
        return True

    def _checksum(self, url: str) -> str | None:
        """Returns what is known of a URL, however it was written: a TableDataset has those that its listing gives."""
        if url in self.checksums or not self.checksums:
            return self.checksums.get(url)
        if self._canonical is None:
            self._canonical = {self._plain(known): checksum for known, checksum in self.checksums.items()}
        return self._canonical.get(self._plain(url))

    def _plain(self, url: str) -> str:
        filesystem, path = need("fsspec", "data").core.url_to_fs(url, **self.storage_options)
        return filesystem.unstrip_protocol(path)

    def _reserve(self, shard: "_Shard", found: dict, ahead: bool) -> bool:
        """Makes room for a copy to come and notes its size; False where what is in use leaves none."""
        with _files.locked(self.folder / "folder.lock"):
            others = sorted((path for path in self.folder.glob(NOTES) if path != shard.note), key=_changed)
            sizes = {path: (_files.read_json(path) or {}).get("size", 0) for path in others}
            excess = sum(sizes.values()) + found["size"] - self.max_bytes
            for spared in (True, False)[: 1 if ahead else 2]:  # first what nobody will need soon
                for path in [path for path in others if path in sizes]:
                    if excess > 0 and _Shard.delete(path, spared):
                        excess -= sizes.pop(path)
            if excess > 0:
                return False
            _files.write_json(shard.note, {**found, "complete": False})
            return True


class _Ahead:
    """A copy that will be needed soon, and the lock that keeps it from making room for others that will be."""

    def __init__(self, url: str):
        self.url, self.lock, self.taken = url, contextlib.ExitStack(), False
        self._mutex = threading.Lock()

    def take(self) -> None:
        """Notes that it is needed now."""
        with self._mutex:
            self.taken = True

    def keep(self, lock: contextlib.ExitStack) -> None:
        """Keeps what the thread has locked, unless it is too late for it."""
        with self._mutex:
            if not self.taken:
                self.lock = lock.pop_all()


class _Shard:
    """The files of one URL in the folder."""

    def __init__(self, folder: Path, url: str):
        name = hashlib.sha256(url.encode()).hexdigest()[:16]
        self.url, self.info = url, None  # the second: what the remote tells
        # The name's end is kept: it tells readers what it is.
        self.data = folder / f"{name}-{os.path.basename(url.split('?')[0])}"
        self.note, self.part = folder / f"{name}.json", folder / f"{name}.part"
        self.get, self.use, self.ahead = (folder / f"{name}.{lock}" for lock in ("get", "use", "ahead"))

    def forget(self) -> None:
        for path in (self.data, self.part, self.note):
            path.unlink(missing_ok=True)

    @staticmethod
    def delete(note: Path, spared: bool) -> bool:
        """Deletes a copy that nobody uses; False where somebody does, or, if such are spared, will soon."""
        with _files.locked(note.with_suffix(".use"), wait=False) as free:
            if not free:
                return False
            if spared:
                with _files.locked(note.with_suffix(".ahead"), wait=False) as unclaimed:
                    if not unclaimed:
                        return False
            for path in (*note.parent.glob(f"{note.stem}-*"), note.with_suffix(".part"), note):
                path.unlink(missing_ok=True)
            return True


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process has just forgotten it
        return 0.0


def _copy(filesystem, path: str, shard: _Shard, size: int, stop: threading.Event) -> str:
    """Copies the rest of a file to its part, and returns the checksum of the whole."""
    if shard.data.exists():  # killed between the last two steps
        os.replace(shard.data, shard.part)
    digest, at, failures = hashlib.sha256(), 0, 0
    with open(shard.part, "ab+", buffering=0) as part:
        part.seek(0)
        while chunk := part.read(CHUNK):
            digest.update(chunk)
            at += len(chunk)
        while True:
            try:
                part.truncate(at)  # of a write that failed, a part may be there
                with filesystem.open(path, "rb") as source:
                    if at and not _seek(source, at):
                        digest, at = hashlib.sha256(), 0
                        continue
                    while at < size and (chunk := source.read(min(CHUNK, size - at))):
                        if stop.is_set():
                            raise StagingError(f"{shard.url}: stopped")
                        _write(part, chunk)
                        digest.update(chunk)
                        at += len(chunk)
                break
            except StagingError:
                raise
            except Exception as error:  # libraries for remotes have classes of their own
                failures += 1
                if failures == TRIES:
                    if isinstance(error, OSError):
                        raise
                    raise StagingError(f"{shard.url}: {type(error).__name__}: {error}") from error
                time.sleep(0.1 * 4 ** (failures - 1))
    if at != size:
        shard.part.unlink()
        raise StagingError(f"{shard.url} ended after {at} bytes, expected {size}")
    return digest.hexdigest()


def _write(file, chunk: bytes) -> None:
    left = memoryview(chunk)
    try:
        while left:  # a disk that runs full takes a part, then raises
            left = left[file.write(left) :]
    except OSError as error:  # which does not say of which file
        raise OSError(error.errno, error.strerror, str(file.name)) from None


def _seek(source, at: int) -> bool:
    """Goes to a position of a remote file; False where it can be read from its start only."""
    try:
        source.seek(at)
        return True
    except (OSError, ValueError, NotImplementedError):
        return False


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _version(info: dict) -> str:
    """Returns what changes when a remote file does, as far as its file system tells."""
    times = ("mtime", "LastModified", "Last-Modified", "last_modified", "created")
    names = ("ETag", "etag", "md5", "blob_id", *times)
    return next((str(info[name]) for name in names if info.get(name)), "")

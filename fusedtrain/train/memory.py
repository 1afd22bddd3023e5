"""Memory that a training run takes, and that is left."""

import contextlib
import ctypes
import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform != "win32" else None  # glibc's


CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")  # which a process is in, and their folders
# Of version 2 and of version 1: the limit, what is in use, and how counts begin that take in the groups below.
CGROUP_FILES = ("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


class PeakMemory:
    """Measures the memory that is needed beyond what is held now: of torch's GPU allocator, or resident on Linux.

    For the CPU it speaks of one run only when that run has the process to itself.
    """

    def __init__(self, device: torch.device):
        self.device = device
        free_unheld()  # it would count as held now and make room later
        if device.type == "cuda":
            torch.cuda.init()  # before that the allocator knows no device, and resetting fails
            torch.cuda.reset_peak_memory_stats(device)
            self._start = torch.cuda.memory_allocated(device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far, that of the imports
            self._start = resident()
        except OSError:
            self._start = None

    def bytes(self) -> int | None:
        """Returns the peak since the object was made, in bytes; None on a CPU whose system does not tell it."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self._start
        return None if self._start is None else _field("/proc/self/status", "VmHWM") - self._start


def free_unheld() -> None:
    """Frees what nobody holds any more and, with glibc, gives the system back what its heap keeps of freed blocks."""
    gc.collect()
    if _trim is not None:
        _trim(0)


def memory_text(device: torch.device) -> str:
    """Returns the memory in use as text for a line; empty where the system does not tell."""
    if device.type == "cuda":
        return f"  {torch.cuda.memory_allocated(device) / 2**30:.1f} GiB"
    try:
        return f"  {resident() / 2**30:.1f} GiB"
    except OSError:
        return ""


def resident(*, exact: bool = False) -> int:
    """Returns the bytes of this process in main memory; OSError where the system does not tell.

    Many versions of Linux count pages per CPU core and add them up now and then: with many cores, some MiB are missing
    or too many. Exact, they are counted now, 17 ms per GiB.
    """
    if exact:
        with contextlib.suppress(OSError):  # before Linux 4.14
            return _field("/proc/self/smaps_rollup", "Rss")
    return _field("/proc/self/status", "VmRSS")


def private() -> int:
    """Returns the bytes that count against a limit of this process's data (RLIMIT_DATA), in main memory or not; OSError
    where the system does not tell."""
    return _field("/proc/self/status", "VmData")


def available() -> int:
    """Returns the bytes of memory that processes can have before the system has to swap or to end one, or the limit of
    a cgroup does, such as a container's; OSError where the system does not tell."""
    if sys.platform == "darwin":
        return _available_on_macos()
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
        return min([int(fields["MemAvailable"].split()[0]) * 1024, *_left_in_cgroups()])
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # Windows, and systems without that name
        raise OSError("the system does not tell how much memory is free") from None


def _left_in_cgroups() -> list[int]:
    """Returns the bytes that limits leave of the cgroups that this process is in, with the files in memory that go when
    room is needed."""
    told, root = CGROUPS
    try:
        lines = told.read_text().splitlines()
    except OSError:
        return []
    left = []
    for line in lines:
        _, kinds, path = line.split(":", 2)  # version 2 has no kinds
        if kinds and "memory" not in kinds.split(","):
            continue
        *names, total = CGROUP_FILES[bool(kinds)]
        folder = root / ("memory" if kinds else "") / path.strip("/")
        for group in (folder, *folder.parents):  # in a container the path may be the host's, which is not there
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                limit, used = (int((group / name).read_text()) for name in names)
                counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                files = sum(int(counts.get(f"{total}{kind}_file", 0)) for kind in ("active", "inactive"))
                left.append(max(0, limit - used + files))
    return left


def _available_on_macos() -> int:
    """Free pages, and those that nobody has used for long, as psutil counts them."""
    try:
        text = subprocess.run(["vm_stat"], capture_output=True, text=True, check=True).stdout
        size = int(re.search(r"page size of (\d+) bytes", text)[1])
        return size * sum(int(re.search(rf"Pages {kind}: +(\d+)", text)[1]) for kind in ("free", "inactive"))
    except (OSError, subprocess.CalledProcessError, TypeError) as error:
        raise OSError(f"vm_stat does not tell how much memory is free: {error}") from None


def _field(path: str, name: str) -> int:
    line = next(line for line in Path(path).read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024

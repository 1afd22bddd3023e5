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


class PeakMemory:
    """Measures the memory that is needed beyond what is held now: of torch's GPU allocator, or resident on Linux.

    For the CPU it speaks of one run only when that run has the process to itself.
    """

    def __init__(self, device: torch.device):
        self.device = device
        free_unheld()  # it would count as held now and make room later
        if device.type == "cuda":
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
    """Returns the bytes of memory that processes can have before the system has to swap or to end one; OSError where
    the system does not tell."""
    if sys.platform == "darwin":
        return _available_on_macos()
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # Windows, and systems without that name
        raise OSError("the system does not tell how much memory is free") from None


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

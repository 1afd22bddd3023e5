"""What stands beside every number: the machine, the versions, the settings."""

import os
import platform
import re
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import clock_of

from fusedtrain._allocator import TUNABLES

ALLOCATORS = ("tuned", "default")


def environment(allocator: str) -> dict[str, str]:
    """The environment variables of a process with that glibc allocator setting, "tuned" or "default"."""
    env = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    return env | {"GLIBC_TUNABLES": TUNABLES} if allocator == "tuned" else env


def _allocator(device: torch.device) -> str:
    if device.type == "cuda":
        return "caching"
    tunables = os.environ.get("GLIBC_TUNABLES")
    return "default" if tunables is None else "tuned" if tunables == TUNABLES else tunables


def _cpu_name() -> str:
    """The CPU with its widest vectors, and whether it has tile registers."""
    capability = torch.backends.cpu.get_cpu_capability()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{platform.processor() or platform.machine()}, {capability}"
    fields = dict(re.findall(r"^(model name|cpu family|model)\s*:\s*(.*)$", text, re.MULTILINE))
    tiles = " AMX" if " amx_tile" in text else ""
    return (
        f"{fields.get('model name', platform.machine())} (family {fields.get('cpu family', '?')}), {capability}{tiles}"
    )


def _cache_mib(device: torch.device) -> float:
    """The last-level cache: tensors beyond it come from memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size / 2**20
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(s[:-1]) / {"K": 1024, "M": 1}[s[-1]] for s in sizes if s[-1] in "KM"), default=32.0)


def _commit() -> str:
    root = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=False).stdout

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/csrc", ":/fusedtrain", ":/kernels")
    return (git("rev-parse", "--short=10", "HEAD").strip() or "unknown") + ("-dirty" if changed else "")


def _peak_gflops(device: torch.device) -> float:
    """float32 product of matrices of size 1024 without tensor cores: the arithmetic peak that vector kernels share.

    On a CPU as a matrix product or as a 1x1 convolution, whichever is faster: these are two libraries, and one of them
    uses half of what an AMD CPU has.
    """
    a, clock = torch.randn(1024, 1024, device=device), clock_of(device)
    images = a.view(16, 8, 8, 1024).permute(0, 3, 1, 2)

    def seconds(product: Callable[[], object]) -> float:
        start = clock()
        product()
        return clock() - start

    products = [lambda: torch.mm(a, a)]
    if device.type == "cpu":  # on a GPU it would take tensor cores
        products.append(lambda: F.conv2d(images, a[:, :, None, None]))
    return 2 * 1024**3 / min(statistics.median(seconds(p) for _ in range(20)) for p in products) / 1e9


def describe(device: torch.device) -> dict[str, str | int | float]:
    """The columns that every row of a run shares."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else _cpu_name()
    return {
        "device": name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "allocator": _allocator(device),
        "commit": _commit(),
        "cache_mib": round(_cache_mib(device), 1),
        "peak_gflops": round(_peak_gflops(device), 1),
    }


def load() -> float | None:
    """The machine's load average over the last minute: above the number of threads, somebody else was at work."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def slug(device_name: str) -> str:
    """A folder's name for a device."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")

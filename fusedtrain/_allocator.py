"""Whether freed memory stays with the process, or comes back from the kernel page by page at every allocation.

glibc maps blocks over 32 MiB afresh and unmaps them when they are freed, so that on the CPU every large activation of
every step costs one page fault per 4 KiB. The settings below make it keep the blocks; they are read when a process
starts, so they have to be in its environment before.
"""

import os
import platform
import sys

import torch

TUNABLES = (
    "glibc.malloc.hugetlb=1"  # ask for transparent huge pages
    ":glibc.malloc.mmap_threshold=8589934592"  # 8 GiB: smaller blocks come from the heap, which is reused
    ":glibc.malloc.trim_threshold=17179869184"  # 16 GiB of free heap are kept
)
PAGES_PER_MIB = 256  # of 4 KiB


def variables() -> dict[str, str]:
    """Returns the environment variables to start a CPU training process with; empty where they are not needed.

    A GLIBC_TUNABLES that the user has set, to whatever, is left alone, and so is another allocator's preload.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return {}
    if "GLIBC_TUNABLES" in os.environ or preloaded() is not None:
        return {}
    return {"GLIBC_TUNABLES": TUNABLES}


def preloaded() -> str | None:
    """Returns the malloc replacement in LD_PRELOAD, if there is one."""
    libraries = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    return next((path for path in libraries if "malloc" in os.path.basename(path)), None)


def settings() -> dict:
    """Returns the allocator in use, and its settings."""
    malloc = preloaded() or " ".join(platform.libc_ver()).strip() or "system"
    return {"malloc": malloc, "tunables": os.environ.get("GLIBC_TUNABLES")}


def describe() -> dict:
    """Returns :func:`settings`, and whether large blocks suffer page faults, as measured now."""
    faults = faults_per_mib()
    if faults is None:
        verdict = "not measured: this system does not count them"
    elif faults < PAGES_PER_MIB / 8:
        verdict = "no: freed memory is reused"
    else:
        verdict = "yes: every large tensor is mapped anew; fusedtrain train sets GLIBC_TUNABLES against it"
    return settings() | {"faults_per_mib": faults, "page_faults": verdict}


def faults_per_mib() -> float | None:
    """Measures the page faults per MiB of a 64 MiB tensor that is allocated and written, over and over.

    Returns None where the system does not count them.
    """
    try:
        import resource
    except ImportError:
        return None

    def allocate() -> None:
        torch.ones(64 * 2**18)  # float32

    allocate()  # the first touch of the memory costs faults in any case
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    rounds = 4
    for _ in range(rounds):
        allocate()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / (64 * rounds)

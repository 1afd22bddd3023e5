"""What this installation is, what it can run here, and why it cannot run the rest."""

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from fusedtrain import _allocator, _extension, backend
from fusedtrain.ops import _common

_VARIABLES = (
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",  # its name before torch 2.9
    "TRITON_INTERPRET",
)


def info(as_json: bool = False) -> dict:
    """Prints, and returns, versions, build, devices, threads, backends, allocator and environment.

    Args:
        as_json: print JSON instead of text.

    Returns:
        The same as nested dicts of strings, numbers, lists and None.

    Cost: some tens of milliseconds, and 64 MiB for the moment in which page faults are counted; the first call that
    asks for GPUs starts the CUDA driver.
    """
    found = collect()
    print(json.dumps(found, indent=1) if as_json else _text(found))
    return found


def collect() -> dict:
    """Returns what :func:`info` prints."""
    return {
        "versions": _versions(),
        "build": _build(),
        "cpu": cpu(),
        "gpus": [gpu(i) for i in range(torch.cuda.device_count())],
        "backends": _backends(),
        "allocator": _allocator.describe(),
        "environment": environment(),
    }


def cpu() -> dict:
    """Returns the processor, the instructions that the kernels and torch use of it, and the number of threads."""
    return {
        "vendor": _extension.BUILD_INFO.get("cpu_vendor"),
        "family": _extension.BUILD_INFO.get("cpu_family"),
        "isa": _extension.BUILD_INFO.get("isa_active"),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def gpu(index: int) -> dict:
    """Returns name, compute capability and memory of a GPU."""
    p = torch.cuda.get_device_properties(index)
    return {"name": p.name, "capability": f"{p.major}.{p.minor}", "memory_gib": round(p.total_memory / 2**30, 1)}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _versions() -> dict:
    return {
        "fusedtrain": _version("fusedtrain"),
        "torch": torch.__version__,
        "cuda of torch": torch.version.cuda,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "os": platform.platform(),
    }


_OF_THE_CPU = ("isa_active", "cpu_vendor", "cpu_family")  # what the build information says of the machine


def _build() -> dict:
    if not _extension.LOADED:
        return {"extension": f"not loaded: {_extension.WHY_NOT}"}
    return {"extension": "loaded", **{k: v for k, v in _extension.BUILD_INFO.items() if k not in _OF_THE_CPU}}


def _backends() -> dict[str, str]:
    """Name -> "available", or why it is not; asked of the same functions that choose a backend for an op."""
    cpu, gpu = torch.empty(1, 1, 1, 1), None
    no_gpu = "torch was built without CUDA" if torch.version.cuda is None else "no GPU is visible"
    if torch.cuda.is_available():
        try:
            gpu = cpu.cuda()
        except RuntimeError as error:  # others may have filled it, or have it for themselves
            no_gpu = f"the GPU takes no tensor: {str(error).partition(chr(10))[0]}"
    reasons = {
        "cuda": no_gpu if gpu is None else _common.why_not_cuda(gpu),
        "cpu": _common.why_not_cpu(cpu),
        "triton": _common.why_not_triton(cpu if gpu is None else gpu),
        "reference": _common.never_why_not(cpu),
    }
    return {name: reasons[name] or "available" for name in backend.BACKENDS}


def environment() -> dict[str, str]:
    """Returns the environment variables that are set and that speed depends on."""
    names = sorted(name for name in os.environ if name.startswith("FUSEDTRAIN_") or name in _VARIABLES)
    return {name: os.environ[name] for name in names}


def _text(found: dict) -> str:
    lines = []
    for title, entries in found.items():
        lines.append(title)
        if isinstance(entries, list):
            entries = {str(i): entry for i, entry in enumerate(entries)}
        if not entries:
            lines.append("  none")
        lines += [f"  {name:<{_WIDTH}} {value_text(value)}" for name, value in entries.items()]
    return "\n".join(lines)


_WIDTH = 16


def value_text(value) -> str:
    """Returns a value of :func:`collect` as text."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return "none" if value is None else str(value)

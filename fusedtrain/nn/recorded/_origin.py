"""Who wrote a class: torch, timm and torchvision, this package, or somebody else."""

import functools
import sys

from torch import nn

from fusedtrain.nn.recorded._block import Recorded

ZOOS = {"torchvision", "timm"}
KNOWN = {"torch", "fusedtrain"} | ZOOS


def is_own(module: str | None, kind: type) -> bool:
    """Whether those who wrote ``kind`` may have written a Python module, too."""
    name = (module or "").partition(".")[0]
    if name in KNOWN or name in sys.stdlib_module_names - {"__main__"}:
        return False
    installed = "-packages" in (getattr(sys.modules.get(name), "__file__", None) or "")
    return not installed or name == kind.__module__.partition(".")[0]


@functools.cache
def package(module: str) -> str:
    """The package of a Python module; a network that this one brings along is treated like a user's."""
    return module if module == "fusedtrain.train.model" else module.partition(".")[0]


def is_ours(module: str) -> bool:
    """Whether the code of a Python module is torch's or this package's."""
    return package(module) in ("torch", "fusedtrain")


def is_unknown(module: nn.Module) -> bool:
    """True for classes that are neither torch's, timm's, torchvision's nor ours."""
    return not isinstance(module, Recorded) and package(type(module).__module__) not in KNOWN


def is_of_a_zoo(kind: type) -> bool:
    """True for classes of timm and torchvision."""
    return not issubclass(kind, Recorded) and kind.__module__.partition(".")[0] in ZOOS

"""What can be done about a bottleneck: how each remedy is applied to the run that is under way, and taken back.

Each remedy belongs to a class of change, which is checked on the losses:

- ``bitwise``: the same losses, bit for bit;
- ``last bit``: the losses of another order of summation: they differ no more than after rounding the weights;
- ``tolerance``: arithmetic of another precision.

Batch sizes are never changed, only reported on.
"""

from fusedtrain.diagnose.drive import Driver
from fusedtrain.diagnose.remedies.loading import Loader, PinnedCopies, WholeBatches, clone_loader, why_not_clone
from fusedtrain.diagnose.remedies.model import (
    BFloat16,
    ChannelsLast,
    Compile,
    Float32,
    Fuse,
    NoExchange,
    Overlap,
    replicas,
)
from fusedtrain.diagnose.remedies.optimizer import (
    COUNTERPARTS,
    FusedOptimizer,
    SetToNone,
    counterpart,
    sparse_gradients,
)
from fusedtrain.diagnose.remedies.remedy import CLASSES, Remedy, models
from fusedtrain.diagnose.remedies.settings import Allocator, CudnnBenchmark, NoDebugging, Threads

__all__ = [
    "CLASSES",
    "COUNTERPARTS",
    "Allocator",
    "BFloat16",
    "ChannelsLast",
    "Compile",
    "CudnnBenchmark",
    "Float32",
    "Fuse",
    "FusedOptimizer",
    "Loader",
    "NoDebugging",
    "NoExchange",
    "Overlap",
    "PinnedCopies",
    "Remedy",
    "SetToNone",
    "Threads",
    "WholeBatches",
    "clone_loader",
    "counterpart",
    "models",
    "rebuild",
    "replicas",
    "sparse_gradients",
    "specification",
    "why_not_clone",
]


def specification(remedy: Remedy) -> dict:
    """Returns what :func:`rebuild` needs to make the remedy again in another process."""
    arguments = {"number": remedy.threads} if isinstance(remedy, Threads) else getattr(remedy, "arguments", {})
    if isinstance(remedy, FusedOptimizer):
        arguments = {"ours": remedy.ours}
    return {"remedy": type(remedy).__name__, "arguments": arguments}


def rebuild(specification: dict, driver: Driver) -> Remedy:
    """Makes a remedy from its :func:`specification`."""
    cls = next(cls for cls in Remedy.__subclasses__() if cls.__name__ == specification["remedy"])
    needs_driver = cls in (Loader, NoDebugging, PinnedCopies, WholeBatches)
    return cls(*[driver] * needs_driver, **specification["arguments"])

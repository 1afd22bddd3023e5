"""fusedtrain: fused training ops for convolutional networks in PyTorch."""

import warnings
from importlib.metadata import PackageNotFoundError, version

from fusedtrain import _extension, backend, nn, ops, optim
from fusedtrain._info import info
from fusedtrain.backend import explain, use_backend
from fusedtrain.nn.fuse import fuse, unfuse

try:
    __version__ = version("fusedtrain")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

if not _extension.LOADED:
    warnings.warn(f"fusedtrain runs CPU ops in plain PyTorch: {_extension.WHY_NOT}", stacklevel=2)

__all__ = ["backend", "explain", "fuse", "info", "nn", "ops", "optim", "unfuse", "use_backend"]

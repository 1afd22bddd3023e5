"""fusedtrain: fused training ops for convolutional networks in PyTorch."""

from importlib.metadata import PackageNotFoundError, version

from fusedtrain import backend, nn, ops
from fusedtrain._info import info
from fusedtrain.backend import explain, use_backend

try:
    __version__ = version("fusedtrain")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["backend", "explain", "info", "nn", "ops", "use_backend"]

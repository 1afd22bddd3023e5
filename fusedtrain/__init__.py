"""fusedtrain: fused training ops for convolutional networks in PyTorch."""

import sys
import warnings

from fusedtrain import _extension, backend, nn, ops
from fusedtrain._info import info
from fusedtrain.backend import explain, use_backend

if not _extension.LOADED:
    warnings.warn(f"fusedtrain runs CPU ops in plain PyTorch: {_extension.WHY_NOT}", stacklevel=2)

if "timm.optim" in sys.modules:
    from fusedtrain import optim  # registers its optimizers with timm's factory


def __getattr__(name: str):
    if name == "__version__":  # looks through all that is installed: a tenth of the time of this import
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("fusedtrain")
        except PackageNotFoundError:  # run from a source tree that was never installed
            return "0+unknown"
    # Imported at their first use; diagnose is a package that can be called.
    if name in ("diagnose", "optim", "fuse", "unfuse"):
        import importlib

        if name in ("fuse", "unfuse"):
            return getattr(importlib.import_module("fusedtrain.nn.fuse"), name)
        return importlib.import_module(f"fusedtrain.{name}")
    raise AttributeError(f"module 'fusedtrain' has no attribute {name!r}")


__all__ = ["backend", "diagnose", "explain", "fuse", "info", "nn", "ops", "optim", "unfuse", "use_backend"]

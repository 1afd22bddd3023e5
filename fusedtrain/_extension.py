"""Finds and loads the compiled library, and says why where there is none."""

import ctypes
import gc
import glob
import os

# Half a million objects that stay: Python would go through them a hundred times, for a quarter of torch's start.
_collects = gc.isenabled()
gc.disable()
try:
    import torch
finally:
    if _collects:
        gc.enable()

# The schemas must exist before the library, which only adds implementations to them.
from fusedtrain.ops import _schema  # noqa: E402, F401


def _load() -> tuple[bool, dict, str | None]:
    """Returns (loaded, build_info, reason why not)."""
    folder = os.path.dirname(__file__)
    libraries = glob.glob(os.path.join(folder, "_kernels*.so"))
    if not libraries and os.path.exists(os.path.join(folder, "..", "build_backend.py")):
        return False, {}, "this is the source tree: install it (pip install -e .) or leave its folder"
    if not libraries:
        return False, {}, "the compiled kernels are not installed (no C++ compiler when the package was built)"
    try:
        torch.ops.load_library(libraries[0])
        from fusedtrain import _host

        return True, _host.build_info(), None
    except (OSError, ImportError, RuntimeError) as error:
        return False, {}, f"the compiled kernels could not be loaded: {error}"


LOADED, BUILD_INFO, WHY_NOT = _load()
HAS_CUDA_KERNELS = LOADED and bool(BUILD_INFO["cuda_archs"])


def _cuda_of_driver() -> int | None:
    """The latest CUDA that the driver runs, 13000 for 13.0, which PyTorch does not tell; None without a driver."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return version.value


CUDA_OF_DRIVER = _cuda_of_driver() if HAS_CUDA_KERNELS else None


def _gatherer():
    """What reads tensors in C++. None without the compiled half, and with a torch that has no DLPack exchange table."""
    if not LOADED or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        return None
    from fusedtrain import _host

    return _host.Gatherer(torch.Tensor, torch.nn.Parameter) if hasattr(_host, "Gatherer") else None


GATHERER = _gatherer()

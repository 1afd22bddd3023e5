"""What the numbers of a diagnosis depend on."""

import platform

import torch

from fusedtrain import _allocator, _info
from fusedtrain.data.workers import cores


def machine() -> dict:
    """Returns what a diagnosis was measured on, of plain types only."""
    gpu = gpu_settings(torch.cuda.current_device()) if torch.cuda.is_initialized() else None
    return {
        "torch": torch.__version__,
        "device": "cpu" if gpu is None else gpu["name"],
        "processor": platform.processor() or platform.machine(),
        **_info.cpu(),
        "cores": cores(),  # that this process may use
        "allocator": _allocator.settings(),
        "gpu": gpu,
        "environment": _info.environment(),
    }


def gpu_settings(index: int) -> dict:
    """Returns a GPU, and what torch does on it."""
    return _info.gpu(index) | {
        # Not allow_tf32: torch does not tell it once fp32_precision was set.
        "tf32_matmul": torch.backends.cuda.matmul.fp32_precision == "tf32",
        "tf32_cudnn": torch.backends.cudnn.conv.fp32_precision == "tf32",
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "allocator": torch.cuda.get_allocator_backend(),
    }

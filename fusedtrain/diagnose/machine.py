"""What the numbers of a diagnosis depend on."""

import platform

import torch

from fusedtrain import _allocator, _info
from fusedtrain.data.workers import cores


def machine() -> dict:
    """Returns what a diagnosis was measured on, of plain types only."""
    used = gpus()
    gpu = gpu_settings(used[0]) if used else None
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


def gpus() -> list[int]:
    """Returns the GPUs that hold tensors of this process, none of which need be the current one: that stands for them
    where there are no tensors yet. Empty where none is in use."""
    if not torch.cuda.is_initialized():
        return []
    count = torch.cuda.device_count()
    holding = [gpu for gpu in range(count) if count > 1 and torch.cuda.memory_allocated(gpu)]
    return holding or [torch.cuda.current_device()]


def settle() -> None:
    """Waits for the GPUs in use."""
    for gpu in gpus():
        torch.cuda.synchronize(gpu)


def gpu_settings(index: int) -> dict:
    """Returns a GPU, and what torch does on it."""
    return _info.gpu(index) | {
        # Not allow_tf32: torch does not tell it once fp32_precision was set.
        "tf32_matmul": torch.backends.cuda.matmul.fp32_precision == "tf32",
        "tf32_cudnn": torch.backends.cudnn.conv.fp32_precision == "tf32",
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "allocator": torch.cuda.get_allocator_backend(),
    }

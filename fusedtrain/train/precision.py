"""The arithmetic of a step: full precision, or autocast."""

import torch

PRECISIONS = ("fp32", "bf16")


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Returns the context in which the model runs forward."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")

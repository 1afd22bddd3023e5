"""The activations of csrc/core/activation.h in plain PyTorch, for the references."""

import torch
import torch.nn.functional as F


def _hard_sigmoid(x):
    # In float64 torch's own backward multiplies by 1/6 rounded to float32.
    return F.relu6(x + 3) / 6 if x.dtype == torch.float64 else F.hardsigmoid(x)


def _relu6(x):
    # At NaN torch's own backward gives 1 or 0, as the layout has it.
    return torch.where(x.isnan(), x, F.relu6(x)) if x.dtype == torch.float64 else F.relu6(x)


REFERENCE = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "hard_swish": F.hardswish,
    "relu6": _relu6,
    "sigmoid": torch.sigmoid,
    "hard_sigmoid": _hard_sigmoid,
    "tanh": torch.tanh,
    "half_tanh": lambda x: (torch.tanh(x) + 1) * 0.5,
}

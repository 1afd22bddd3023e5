"""The activations of csrc/core/activation.h in plain PyTorch, for the references."""

import torch
import torch.nn.functional as F

REFERENCE = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "hard_swish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "hard_sigmoid": F.hardsigmoid,
    "tanh": torch.tanh,
    "half_tanh": lambda x: (torch.tanh(x) + 1) * 0.5,
}

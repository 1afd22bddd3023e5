"""Small images: what an op's passes over memory save is less there than its call costs in Python.

In evaluation layers then make the calls of their stock class, but for those that gain at any size: depthwise
convolutions, and what says so (``gains_at_any_size``). In training norms and 1x1 convolutions do, where their ops would
leave the images to stock PyTorch anyway, and recorded blocks that hold no depthwise convolution.
"""

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fusedtrain import backend
from fusedtrain.ops import _pointwise_rules
from fusedtrain.ops.batch_norm_act import _SMALL as _SMALL_FOR_NORMS

ELEMENTS = 400_000  # benchmarks/LOG.md, 2026-11-25: inference of one image
# What the rules of both ops leave to stock PyTorch; those of 1x1 convolutions count x and y.
IN_TRAINING = min(_SMALL_FOR_NORMS[0], _pointwise_rules._SMALL // 2)


def stays_stock(layer: nn.Module, x: Tensor, times: float = 1) -> bool:
    """Whether ``layer`` leaves ``x`` to its stock forward: in float32 on a CPU, where it neither trains nor records
    gradients, and nobody has asked for a backend. ``times``: so many images of the size of ``x`` are at hand.

    Graphs of torch.compile, torch.export and torch.jit.trace hold for other sizes, too: never there.
    """
    return (
        not (layer.training or torch.is_grad_enabled() or torch.compiler.is_compiling())
        and not torch._C._is_tracing()  # the question for a size would be recorded
        and type(x) is Tensor
        and x.dtype is torch.float32
        and x.numel() * times < ELEMENTS
        and x.is_cpu
        and backend.is_automatic()
        and not torch.is_autocast_enabled("cpu")
    )


def trains_stock(x: Tensor, times: float = 1) -> bool:
    """Whether norms and 1x1 convolutions leave ``x`` to stock PyTorch in training, too; nobody has asked for a backend.
    ``times``: as for :func:`stays_stock`."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and type(x) is Tensor
        and x.numel() * times < IN_TRAINING
        and x.is_cpu
        and backend.is_automatic()
    )


def or_stock(fused: Callable, stock: Callable) -> Callable:
    """Returns the forward of a layer that is ``fused`` but for images that stay ``stock``, which names its argument."""

    def of(layer: nn.Module, images: Tensor) -> Tensor:
        return (stock if stays_stock(layer, images) else fused)(layer, images)

    def of_input(self, input: Tensor) -> Tensor:
        return of(self, input)

    def of_x(self, x: Tensor) -> Tensor:
        return of(self, x)

    return functools.wraps(stock)(of_input if "input" in inspect.signature(stock).parameters else of_x)

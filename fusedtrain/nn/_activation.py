"""Activation layers by their names in timm, and the way back: from a layer to the ops' name for what it computes."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Layer = str | Callable[..., nn.Module]  # an activation: its name, its class, or whatever makes one


class HalfTanh(nn.Module):
    r"""The gate :math:`(\tanh(x) + 1) / 2`."""

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x) + 1) * 0.5


class HardMish(nn.Module):
    r""":math:`x \min(\max(x + 2, 0), 2) / 2`."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (x + 2).clamp(min=0, max=2)


class QuickGELU(nn.Module):
    r""":math:`x\, \sigma(1.702\, x)`."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class GELUTanh(nn.GELU):
    """GELU by its tanh approximation."""

    def __init__(self):
        super().__init__(approximate="tanh")


_LAYERS: dict[str, type[nn.Module]] = {
    "celu": nn.CELU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "gelu_tanh": GELUTanh,
    "half_tanh": HalfTanh,
    "hard_mish": HardMish,
    "hard_sigmoid": nn.Hardsigmoid,
    "hard_swish": nn.Hardswish,
    "hardsigmoid": nn.Hardsigmoid,
    "hardswish": nn.Hardswish,
    "identity": nn.Identity,
    "leaky_relu": nn.LeakyReLU,
    "mish": nn.Mish,
    "prelu": nn.PReLU,
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "selu": nn.SELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
}

_OP_NAMES: dict[type[nn.Module], str] = {
    HalfTanh: "half_tanh",
    nn.GELU: "gelu",
    nn.Hardsigmoid: "hard_sigmoid",
    nn.Hardswish: "hard_swish",
    nn.Identity: "identity",
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
}

# Layers of other packages that compute what a torch layer does; known by name, so that these need not be there. Those
# of geffnet and efficientnet_pytorch call a torch.autograd.Function.
_OF_PACKAGES = {
    "timm.layers.activations": {
        "GELU": "gelu",
        "HardSigmoid": "hard_sigmoid",
        "HardSwish": "hard_swish",
        "Sigmoid": "sigmoid",
        "Swish": "silu",
        "Tanh": "tanh",
    },
    "efficientnet_pytorch.utils": {"MemoryEfficientSwish": "silu"},
    "geffnet.activations.activations_me": {
        "HardSigmoidMe": "hard_sigmoid",
        "HardSwishMe": "hard_swish",
        "SwishMe": "silu",
    },
}


def create(layer: Layer, inplace: bool | None = None, **options) -> nn.Module:
    """Returns a new activation layer.

    Args:
        layer: a name ("relu", "silu", "hard_sigmoid", ...), a module class, or a callable that makes a module.
        inplace: passed on where the layer has such an argument.
        options: passed on.
    """
    if isinstance(layer, str):
        if layer.lower() not in _LAYERS:
            raise ValueError(f"an activation must be a module class or one of {', '.join(_LAYERS)}; got {layer!r}")
        layer = _LAYERS[layer.lower()]
    elif not callable(layer):
        raise TypeError(f"an activation must be a name or a module class, got {layer!r}")
    if inplace is None:
        return layer(**options)
    try:
        return layer(inplace=inplace, **options)
    except TypeError:  # it has no such argument
        return layer(**options)


def op_name(layer: nn.Module) -> str | None:
    """Returns the ops' name for what ``layer`` computes; None where they have none, or its calls must be seen."""
    kind = type(layer)
    name = _OP_NAMES.get(kind)
    if name is None:
        name = _OF_PACKAGES.get(kind.__module__, {}).get(kind.__name__)
    if name is None or observed(layer):
        return None
    return None if name == "gelu" and getattr(layer, "approximate", "none") != "none" else name


def observed(module: nn.Module) -> bool:
    """True when a hook or a patched method must see the calls of ``module``, so that they cannot be left out."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    own = module.__dict__
    return "forward" in own or "_conv_forward" in own


_DROPS = {
    "torch.nn.modules.dropout.Dropout": "p",
    "timm.layers.drop.DropPath": "drop_prob",
    "torchvision.ops.stochastic_depth.StochasticDepth": "p",
}


def drops_nothing(layer: nn.Module) -> bool:
    """Whether a dropout, or stochastic depth, lets everything pass, and nobody has to see that it is called."""
    if observed(layer):
        return False
    rate = _DROPS.get(_path(layer))
    return type(layer) is nn.Identity or (rate is not None and (not layer.training or getattr(layer, rate) == 0))


def may_drop(layer: nn.Module | None) -> bool:
    """Whether a layer is a dropout, stochastic depth, or nothing in the place of one."""
    return type(layer) is nn.Identity or _path(layer) in _DROPS


def _path(layer: nn.Module | None) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"

"""The class of a fused layer that is also an instance of its stock class.

Code of timm and of users asks ``isinstance(layer, BatchNormAct2d)`` and calls other methods than forward, as when it
freezes, synchronises or reparameterises layers; a layer that :func:`fusedtrain.fuse` has made must answer as before.
"""

import functools
import inspect

from torch import nn

from fusedtrain.nn._small import or_stock

_KINDS: dict[type, type] = {}


def kind_of(module: nn.Module) -> type:
    """Returns the class of ours that a layer has, or its class."""
    return _KINDS.get(type(module), type(module))


@functools.cache
def derived(fused: type[nn.Module], stock: type[nn.Module]) -> type[nn.Module]:
    """Returns ``fused``, or what computes as that does and is a ``stock`` too."""
    if issubclass(fused, stock):
        return fused
    names = {"__module__": fused.__module__, "__qualname__": fused.__qualname__, "__doc__": fused.__doc__}

    def __reduce_ex__(self, protocol):
        return _new, (fused, stock), super(made, self).__reduce_ex__(protocol)[2]

    # A convolution, and what takes more than images, decides by itself, whatever class it has.
    alone = issubclass(fused, nn.Conv2d) or len(inspect.signature(fused.forward).parameters) > 2
    alone = alone or getattr(fused, "gains_at_any_size", False)
    forward = fused.forward if alone else or_stock(fused.forward, stock.forward)
    members = {"forward": forward, "__reduce_ex__": __reduce_ex__}  # forward: fused may have it from a base
    made = type(fused.__name__, (fused, stock), names | members)
    _KINDS[made] = fused
    return made


def stock_of(module: nn.Module) -> type | None:
    """Returns the stock class that a layer of a derived class is an instance of."""
    return type(module).__bases__[1] if type(module) in _KINDS else None


def _new(fused: type[nn.Module], stock: type[nn.Module]) -> nn.Module:
    kind = derived(fused, stock)
    return kind.__new__(kind)

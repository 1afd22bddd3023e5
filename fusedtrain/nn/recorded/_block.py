"""The class of a recorded block, which is still its own class, too."""

import copy
import functools
import types
from typing import TYPE_CHECKING

from torch import fx, nn

from fusedtrain.nn._kind import kind_of
from fusedtrain.nn._small import stays_stock, trains_stock

if TYPE_CHECKING:
    from fusedtrain.nn.recorded._state import Recording


_WIDENS = 1.5  # elements between layers of a block, times those of its images


class Recorded(nn.Module):
    """A block of any class whose layers are called as fused ops, as far as they follow each other.

    Made by :func:`fusedtrain.fuse` only. It is still an instance of its own class, with all that this has.
    """

    __module__ = "fusedtrain.nn.recorded"  # under which reports name it
    _recording: "Recording | None" = None  # of what its own code makes of its class, such as ``block[:3]``

    def __init_subclass__(cls, **options):
        if Recorded not in cls.__bases__:  # the classes of blocks are not new ones to those who list theirs
            super().__init_subclass__(**options)

    def forward(self, *args, **kwargs):
        recording = self._recording
        # Tracers of torch.fx name what they see by layers and by how often these were called.
        one = len(args) == 1 and not kwargs and not isinstance(args[0], fx.Proxy)
        if recording is not None and one and not self._stays_stock(*args) and recording.holds_for(self, *args):
            return recording.forwards[int(self.training)](self, *args)  # torch.compile of torch 2.11 takes no bool
        return super().forward(*args, **kwargs)

    def _stays_stock(self, x) -> bool:
        return stays_stock(self, x) or (self._recording.leaves_small and trains_stock(x, _WIDENS))

    def __reduce_ex__(self, protocol):
        state = super().__reduce_ex__(protocol)[2]
        if isinstance(state, dict):  # else a class of its own has made it
            state = {k: v for k, v in state.items() if k != "_recording"}
        return _new, (stock_class(self),), state

    def __setstate__(self, state: dict) -> None:
        from fusedtrain.nn.recorded import Recording, record  # they import this module

        super().__setstate__(state)
        restore(self)  # its own forward is what is recorded
        recording = record(self, kind_of)
        if isinstance(recording, Recording):
            take(self, recording)


def _deepcopy(block: Recorded, memo: dict) -> Recorded:
    """Copies the recording, too: to record anew would disturb modules that other threads call meanwhile."""
    kind = type(block)
    made = memo[id(block)] = kind.__new__(kind)
    vars(made).update(copy.deepcopy(vars(block), memo))
    return made


_COPIES = ("__deepcopy__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__")


@functools.cache
def _derived(stock: type[nn.Module]) -> type[Recorded]:
    names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    own = Recorded.forward
    forward = types.FunctionType(own.__code__, own.__globals__, "forward", None, own.__closure__)
    forward.__wrapped__ = stock.forward  # exporters and torch.fx go by the names of its arguments
    members = {"forward": forward}
    if all(getattr(stock, name, None) is getattr(nn.Module, name, None) for name in _COPIES):
        members["__deepcopy__"] = _deepcopy
    return type(stock.__name__, (Recorded, stock), names | members)


def _new(stock: type[nn.Module]) -> Recorded:
    kind = _derived(stock)
    return kind.__new__(kind)


def take(block: nn.Module, recording: "Recording") -> None:
    """Lets ``block`` call fused ops, in place."""
    block._recording = recording
    block.__class__ = _derived(type(block))


def restore(block: Recorded) -> None:
    """Gives ``block`` the class back that it had."""
    vars(block).pop("_recording", None)
    block.__class__ = stock_class(block)


def stock_class(block: Recorded) -> type[nn.Module]:
    """Returns the class that ``block`` had."""
    classes = type(block).__mro__
    return classes[classes.index(Recorded) + 1]


def own_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class that a module had before it was recorded, if it was."""
    return stock_class(module) if isinstance(module, Recorded) else type(module)

"""Finds what every step computes anew although it comes out the same: from tensors that do not change."""

import itertools
import time
from collections import Counter

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusedtrain.diagnose.places import Site, call_site


class Constants(TorchDispatchMode):
    """Numbers the values in a step: the same operation on the same values gives the same value.

    What a step is given has the number it had in the step before, where nothing was written to it since; random numbers
    are new. An operation is constant whose result had its number in the step before as well.

    Attributes:
        seconds: of constant operations, by the line that asked for them.
    """

    def __init__(self):
        super().__init__()
        self.seconds: Counter[Site | None] = Counter()
        self._values: dict[int, int] = {}  # numbers of what storages hold
        self._given: dict[int, tuple[Tensor, int, int]] = {}  # by storage, with version and number; kept alive
        self._written: set[int] = set()  # storages
        self._calls: set[int] = set()
        self._known: tuple[dict, set, set] = {}, set(), set()  # the same of the step before
        self._new = itertools.count()

    def next_step(self) -> None:
        self._known = self._given, self._written, self._calls
        self._values, self._given, self._written, self._calls = {}, {}, set(), set()
        self.seconds.clear()

    def _value(self, tensor: Tensor) -> int:
        place = _storage(tensor)
        if place not in self._values:
            given, written, _ = self._known
            known, version, number = given.get(place, (None, None, None))
            if known is None or version != tensor._version or place in written:
                number = next(self._new)
            self._given[place] = tensor, tensor._version, number
            self._values[place] = number
        layout = (tensor.storage_offset(), *tensor.stride()) if tensor.layout is torch.strided else ()
        return hash((self._values[place], tensor.dtype, tensor.shape, layout))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        values = [self._value(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if torch.Tag.nondeterministic_seeded in func.tags:
            values.append(next(self._new))
        call = hash((func, *values))
        start = time.perf_counter()
        result = func(*args, **kwargs)
        seconds = time.perf_counter() - start
        self._calls.add(call)
        if inputs and call in self._known[2]:
            self.seconds[call_site()] += seconds
        places = set(map(_storage, inputs))
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for i, tensor in enumerate(tree_leaves(given.get(argument.name))):
                    if isinstance(tensor, Tensor):
                        self._written.add(_storage(tensor))
                        self._values[_storage(tensor)] = hash((call, argument.name, i))
        for i, tensor in enumerate(tree_leaves(result)):
            if isinstance(tensor, Tensor) and _storage(tensor) not in places:
                self._values[_storage(tensor)] = hash((call, i))
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)

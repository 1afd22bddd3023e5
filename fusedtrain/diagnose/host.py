"""Times what the user's lines make on the host in every step: tensors of Python numbers, copies, and what is moved."""

import sys
import time
from collections import Counter

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from fusedtrain.diagnose.places import Site, is_users, user_frame

NUMBERS, COPIED, MOVED = "of Python numbers", "by copies", "on the CPU that a device needs"
# What they make could be made on the device.
_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "zeros")


class HostTensors(TorchFunctionMode):
    """Adds up how long calls take that stand in the user's own lines.

    Attributes:
        seconds: by line and kind, one of NUMBERS, COPIED, MOVED.
    """

    def __init__(self):
        super().__init__()
        self.seconds: Counter[tuple[Site, str]] = Counter()
        self._made = WeakTensorKeyDictionary()  # by identity

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        start = time.perf_counter()
        result = func(*args, **kwargs)
        seconds = time.perf_counter() - start
        kind = self._kind(getattr(func, "__name__", ""), next(iter((*args, *kwargs.values())), None), result)
        frame = sys._getframe(1)
        if kind is not None and is_users(frame.f_code.co_filename):
            self.seconds[user_frame(frame), kind] += seconds
        return result

    def _kind(self, name: str, given: object, result: object) -> str | None:
        if name == "tensor" and (isinstance(given, Tensor) or hasattr(given, "__array_interface__")):
            return COPIED
        if name in ("tensor", "as_tensor") and isinstance(given, (list, tuple)):
            return NUMBERS
        if name in _FACTORIES and result.device.type == "cpu":
            self._made[result] = True
        moves = name in ("to", "cuda") and given in self._made and result.device.type != "cpu"
        return MOVED if moves else None

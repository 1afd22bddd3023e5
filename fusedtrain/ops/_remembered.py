"""What the checks and rules of an op found: asking them takes longer than the rest of a call."""

import functools
from collections.abc import Callable

import torch

from fusedtrain import _extension
from fusedtrain.backend import is_automatic
from fusedtrain.ops._common import unwatched

_MOST = 4096  # calls
_UNKNOWN = object()
_chosen: dict[tuple, object] = {}


def remembered(choose: Callable) -> Callable:
    """Decorator of ``choose(*args)``, which checks the arguments of an op, tensors and numbers, and asks its rules.

    It is asked once for all calls that are alike in device, dtype, shape and strides of the tensors, in whether
    gradients of them are recorded, and in all other arguments; every time where calls are traced, where more than rules
    decides (:func:`fusedtrain.backend.is_automatic`), and for tensors and values that are more than these.
    """

    @functools.wraps(choose)
    def ask(*args):
        if torch.compiler.is_compiling() or not (unwatched() and is_automatic()):
            return choose(*args)
        reader = _extension.GATHERER
        if reader is None:
            return choose(*args)
        about = reader.describe(args, torch.is_grad_enabled())
        if about is None:
            return choose(*args)
        found = _chosen.get((choose, about), _UNKNOWN)  # another thread may clear it at any time
        if found is _UNKNOWN:
            found = choose(*args)
            if len(_chosen) >= _MOST:
                _chosen.clear()
            _chosen[choose, about] = found
        return found

    return ask

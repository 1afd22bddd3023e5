"""What the rules of an op chose: asking them takes longer than the rest of a call."""

import functools
from collections.abc import Callable

from torch import Tensor

from fusedtrain.backend import is_automatic
from fusedtrain.ops._common import records, untraced

_MOST = 4096  # calls
_UNKNOWN = object()
_chosen: dict[tuple, object] = {}


def remembered(choose: Callable) -> Callable:
    """Decorator of ``choose(x, weight, bias, *options)``, which asks an op's rules; the options are lists of ints.

    It is asked once for all calls that are alike in what rules look at, and every time where calls are traced, or more
    than rules decides (:func:`fusedtrain.backend.is_automatic`).
    """

    @functools.wraps(choose)
    def ask(x: Tensor, weight: Tensor, bias: Tensor | None, *options: list[int]):
        if not (untraced(x) and is_automatic() and (x.is_cpu or x.is_cuda)):
            return choose(x, weight, bias, *options)
        key = (
            *(choose, x.get_device(), x.dtype, x.shape, x.stride(), weight.shape, records(x, weight)),
            *map(tuple, options),
        )
        found = _chosen.get(key, _UNKNOWN)  # another thread may clear it at any time
        if found is _UNKNOWN:
            found = choose(x, weight, bias, *options)
            if len(_chosen) >= _MOST:
                _chosen.clear()
            _chosen[key] = found
        return found

    return ask

"""A state taken apart: what JSON can hold, and a flat dict of tensors."""

import math
import numbers
from collections import Counter

import torch
from torch import Tensor, nn

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def flatten(state: dict, kinds: tuple[type, ...] = (Tensor, nn.Parameter)) -> tuple[object, dict[str, Tensor]]:
    """Takes ``state`` apart into what JSON can hold and its tensors by path, "model/fc.weight".

    Dicts with any plain keys, lists, tuples, Counters, numbers, strings and None come back as they were; a tensor that
    stands in several places is kept once. ``kinds`` are the classes of tensors that the caller can store.

    Raises:
        TypeError: something else is in it, or a tensor is not a plain dense one; the message says where.
    """
    tensors: dict[str, Tensor] = {}
    seen: dict[tuple, str] = {}

    def tensor(value: Tensor, path: tuple) -> dict:
        where = "/".join(map(str, path))
        if type(value) not in kinds:
            known = ", ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"{where}: this checkpoint holds tensors of {known}, got {type(value).__name__}")
        if value.layout != torch.strided or value.dtype not in NAMES:
            raise TypeError(f"{where}: a checkpoint cannot hold {value.layout} tensors of {value.dtype}")
        if value.device.type == "meta":
            raise TypeError(f"{where}: the tensor is on the meta device and has no values")
        plain = type(value) in (Tensor, nn.Parameter)
        if plain:  # else the file would hold the memory, not the numbers
            value = value.detach().resolve_conj().resolve_neg()
        key = (value.data_ptr() if plain else id(value), value.dtype, value.device, value.shape, value.stride())
        if value.numel() and key in seen:
            return {"$tensor": seen[key]}
        name = where
        while name in tensors or name == "__metadata__":
            name += "'"
        tensors[name] = value.detach()
        seen[key] = name
        return {"$tensor": name}

    def encode(value, path: tuple):
        if isinstance(value, Tensor):
            return tensor(value, path)
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, numbers.Integral):  # of numpy, too
            return int(value)
        if isinstance(value, numbers.Real):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, dict):
            items = [(key, encode(item, (*path, key))) for key, item in value.items()]
            if type(value) is not Counter and all(type(key) is str and key[:1] != "$" for key, _ in items):
                return dict(items)
            pairs = [[encode(key, (*path, key)), item] for key, item in items]
            return {"$counter" if type(value) is Counter else "$dict": pairs}
        if isinstance(value, (list, tuple)):
            items = [encode(item, (*path, index)) for index, item in enumerate(value)]
            return {"$tuple": items} if isinstance(value, tuple) else items
        where = "/".join(map(str, path)) or "the state"
        raise TypeError(
            f"{where}: a checkpoint holds tensors, dicts, lists, tuples, numbers, strings and None, got"
            f" {type(value).__module__}.{type(value).__qualname__}"
        )

    return encode(state, ()), tensors


def unflatten(tree, tensors: dict[str, Tensor]):
    """The inverse of :func:`flatten`."""
    if isinstance(tree, list):
        return [unflatten(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        ((tag, value),) = tree.items()
        if tag == "$tensor":
            return tensors[value]
        if tag == "$float":
            return float(value)
        if tag == "$tuple":
            return tuple(unflatten(item, tensors) for item in value)
        if tag in ("$dict", "$counter"):
            kind = dict if tag == "$dict" else Counter
            return kind({unflatten(key, tensors): unflatten(item, tensors) for key, item in value})
    return {key: unflatten(item, tensors) for key, item in tree.items()}

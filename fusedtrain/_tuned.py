"""The table that ``fusedtrain tune backend`` writes: which backend was measured to be fastest for which arguments.

It lies in the cache folder (:func:`fusedtrain._files.cache_path`) as ``backends.json`` and is read when fusedtrain is
imported. It counts for the automatic choice alone, for the device, torch and fusedtrain that it was measured with,
and not inside torch.compile, whose shapes may be symbols. Delete the file, or set FUSEDTRAIN_TUNED=0, to be without it.
"""

import functools
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from fusedtrain import _extension, _files

TABLE: dict[tuple, tuple[str, str]] = {}  # key -> (backend, what was measured)
_OPS: set[str] = set()
_recorded: list[tuple] | None = None
active = False  # looked at in every call of an op


def path() -> Path:
    """Returns the file of the table, which need not exist."""
    return _files.cache_path() / "backends.json"


def origin(device: str) -> dict:
    """Returns what the entries of a device are valid for."""
    try:
        own = version("fusedtrain")
    except PackageNotFoundError:
        own = None
    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:  # what is faster differs between processors of one instruction set, too
        name = " ".join(str(_extension.BUILD_INFO.get(of)) for of in ("cpu_vendor", "cpu_family", "isa_active"))
    return {"device": device, "name": name, "torch": torch.__version__, "fusedtrain": own}


def key(op: str, args: tuple) -> tuple:
    """Returns what distinguishes a call: shapes, dtypes, layouts and devices of tensors, and the other arguments."""
    return op, *(_describe(arg) if isinstance(arg, Tensor) else _plain(arg) for arg in args)


def _describe(x: Tensor) -> tuple:
    if x.is_contiguous():
        layout = "contiguous"
    else:
        last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
        layout = "channels_last" if last else "strided"
    return x.device.type, str(x.dtype), layout, *x.shape


def _plain(value):
    return tuple(map(_plain, value)) if isinstance(value, (tuple, list)) else value


def choice(op: str, impls: dict, args: tuple) -> tuple[str, str] | None:
    """Returns the backend that was measured to be fastest on these arguments and the measurement, or None."""
    if _recorded is not None or op not in _OPS or torch.compiler.is_compiling():
        return None
    found = TABLE.get(key(op, args))
    if found is None or found[0] not in impls or not _is_valid(args):
        return None
    return found if impls[found[0]].why_not(*args) is None else None


def note(op: str, args: tuple, chosen: str) -> None:
    """Keeps a choice that the rules have made, where they are recorded."""
    if _recorded is not None:
        _recorded.append((key(op, args), chosen))


class recording:
    """Collects the automatic choices of a ``with`` block, made without the table, as pairs (key, backend)."""

    def __enter__(self) -> list[tuple]:
        global _recorded, active
        self._previous = active
        _recorded, active = [], True
        return _recorded

    def __exit__(self, *exc_info):
        global _recorded, active
        _recorded, active = None, self._previous


class off:
    """The table does not count in a ``with`` block."""

    def __enter__(self) -> None:
        global active
        self._previous, active = active, False

    def __exit__(self, *exc_info):
        global active
        active = self._previous


def load() -> None:
    """Reads the table, or empties it where there is no file; a broken file counts as none."""
    global active, _origins
    TABLE.clear()
    _OPS.clear()
    _valid.cache_clear()
    if os.environ.get("FUSEDTRAIN_TUNED") != "0":
        content = _files.read_json(path())
        try:
            _origins = {found["device"]: found for found in content["origins"]} if content else {}
            for entry in content["entries"] if content else ():
                if entry["backend"] is not None:
                    for name in entry["keys"]:
                        TABLE[_plain(name)] = entry["backend"], entry["measured"]
            _OPS.update(name[0] for name in TABLE)
        except (KeyError, TypeError, IndexError):
            TABLE.clear()
            _OPS.clear()
    active = bool(TABLE)


_origins: dict[str, dict] = {}


def _is_valid(args: tuple) -> bool:
    return _valid(next(arg.device.type for arg in args if isinstance(arg, Tensor)))


@functools.cache
def _valid(device: str) -> bool:
    return _origins.get(device) == json.loads(json.dumps(origin(device)))

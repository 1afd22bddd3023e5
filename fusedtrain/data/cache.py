"""Decoded samples kept in a memory-mapped file, so that later epochs and runs do not decode them again.

The file: a header (magic, number of samples, end of the data), an index of one entry per sample (offset, length,
CRC-32), and records appended in the order in which samples were first asked for. A record is written and only then
entered into the index, both under a lock: a process killed at any moment leaves samples that are missing, never ones
that are wrong.
"""

import contextlib
import dis
import functools
import hashlib
import io
import json
import mmap
import operator
import os
import pickle
import struct
import sys
import types
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fusedtrain import _files
from fusedtrain._extras import need
from fusedtrain.data.workers import TRANSFORMS, same_random_numbers

MAGIC = b"FTCACHE1"
HEADER = struct.Struct("<8sQQ")  # magic, samples, end of the data
ENTRY = struct.Struct("<QQI4x")  # offset (0: none), length, CRC-32
SIZE = struct.Struct("<I")  # of the description at the head of a record
ALIGNMENT = 64  # of tensors in the file
TRIED = 8  # samples, to see whether they vary
DRAWS = 32  # of them in all where one draws random numbers
SHORT = 1024  # bytes of a description that many samples may share; a longer one holds texts or bytes of one


class SampleCache(Dataset):
    """Gives the samples of a dataset, each decoded once.

    The first time that a sample is asked for it comes from ``dataset`` and is kept in a file; after that, in any epoch,
    process or run, it comes from the file. Several processes fill one file together.

    Args:
        dataset: map-style; what it gives for an index must not vary. Samples are tensors, NumPy arrays, numbers,
            strings, bytes, None, or tuples, lists and dicts of them.
        then: takes the kept sample, returns the one to train on: random augmentation belongs here.
        key: names the source and everything that was done to it; None derives it from ``dataset.fingerprint()`` or the
            size and time of change of all files in ``dataset.samples`` with the numbers and texts that the dataset
            holds, and from its ``transform``, ``loader`` and ``__getitem__``: their code or their repr.
        folder: where the file is kept; None takes ``samples/`` in the cache folder (FUSEDTRAIN_CACHE, or fusedtrain/
            in XDG_CACHE_HOME or ~/.cache).
        max_bytes: of the file; samples that do not fit come from ``dataset`` every time.

    Raises:
        ValueError: no key can be derived, the samples vary from call to call, the first one in the file is not that of
            ``dataset``, or ``max_bytes`` is too small for any.
        TypeError: when asked for a sample that holds something else, an image object for instance.

    Cost: a kept sample is copied once; its CRC is checked when a process first reads it, and a sample that fails is
    decoded and kept again. Delete the file to free the space; another key makes another file.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        then: Callable | None = None,
        key: str | None = None,
        folder: str | Path | None = None,
        max_bytes: int = 10 * 2**30,
    ):
        need("numpy", "data")
        if key is not None and not isinstance(key, str):
            raise ValueError(f"key must be a string or None, got {key!r}")
        self.dataset, self.then, self.max_bytes, self.length = dataset, then, max_bytes, len(dataset)
        self._data = HEADER.size + self.length * ENTRY.size
        if max_bytes < self._data:
            raise ValueError(f"max_bytes must hold at least the index, {self._data} bytes, got {max_bytes}")
        identity = {"key": key} if key is not None else _identity_of(dataset)
        name = hashlib.sha256(json.dumps([identity, self.length], sort_keys=True).encode()).hexdigest()[:32]
        folder = _files.cache_folder("samples") if folder is None else Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}.samples"
        self._lock = self.path.with_suffix(".lock")
        self._open_in = None  # the process that holds the handles below
        with _files.locked(self._lock):
            if self._is_valid():
                self._check_first()
            else:
                self._create()

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open_in": None, "_handle": None, "_map": None}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        index = operator.index(index)  # not an EpochIndex: a sample may hold it
        index = index + self.length if index < 0 else index
        if not 0 <= index < self.length:
            raise IndexError(f"index {index} is out of range for {self.length} samples")
        found = self._load(index)
        if found is None:
            sample = self.dataset[index]
            self._store(index, sample)
        else:
            (sample,) = found
        return sample if self.then is None else self.then(sample)

    def state(self) -> dict:
        """Returns the file, its size and bound in bytes, and how many of how many samples it holds."""
        self._open()
        kept = sum(self._entry(index)[0] != 0 for index in range(self.length))
        size = HEADER.unpack_from(self._map, 0)[2]
        return {
            "path": str(self.path),
            "bytes": size,
            "max_bytes": self.max_bytes,
            "kept": kept,
            "samples": self.length,
        }

    def _is_valid(self) -> bool:
        try:
            with open(self.path, "rb") as file:
                head = file.read(HEADER.size)
            whole = os.path.getsize(self.path) >= self._data  # a copy that was cut off may lack part of the index
            return whole and HEADER.unpack(head)[:2] == (MAGIC, self.length)
        except FileNotFoundError:
            return False

    def _check_first(self) -> None:
        """Compares the first kept sample with what the dataset gives now: no key tells all that it does."""
        self._open()
        index = next((i for i in range(self.length) if self._entry(i)[0]), None)
        found = None if index is None else self._load(index)
        if found is None:
            return
        with same_random_numbers():
            try:
                sample = self.dataset[index]
            except Exception:  # it cannot be read any more, but it could
                return
        if _content(sample) != _content(found[0]):
            raise ValueError(
                f"sample {index} in {self.path} is not that of the dataset: pass another key=, or delete the file"
            )

    def _create(self) -> None:
        with same_random_numbers():
            first = self._first_samples()
            state = _random_state()
            self._compare(first, 1)
            if _random_state() != state:  # a rare change shows after many
                self._compare(first, -(-DRAWS // max(1, len(first))))
        head = HEADER.pack(MAGIC, self.length, self._data)
        _files.write_atomic(self.path, lambda file: file.write(head + bytes(self._data - HEADER.size)))

    def _first_samples(self) -> dict:
        """Returns what the first samples hold, without those that cannot be read: it is told when they are asked for,
        or they are left out."""
        found = {}
        for index in range(min(self.length, TRIED)):
            with contextlib.suppress(Exception):
                found[index] = self.dataset[index]
        return {index: _content(sample) for index, sample in found.items()}

    def _compare(self, first: dict, draws: int) -> None:
        for _ in range(draws):
            for index, content in first.items():
                with contextlib.suppress(OSError):
                    again = self.dataset[index]
                    if _content(again) != content:
                        raise ValueError(
                            f"sample {index} differs from call to call: cache what does not vary and pass the random"
                            " part as then="
                        )

    def _open(self) -> None:
        """Opens the file in this process: a fork must share neither the lock nor the position."""
        if self._open_in != os.getpid():
            self._handle = open(self.path, "r+b", buffering=0)  # noqa: SIM115
            self._map = mmap.mmap(self._handle.fileno(), 0)
            self._checked = bytearray(self.length)
            self._can_write = True
            self._open_in = os.getpid()

    def _entry(self, index: int) -> tuple[int, int, int]:
        """Returns offset, length and CRC-32 of a record within the mapped file; zeros where there is none."""
        offset, length, crc = ENTRY.unpack_from(self._map, HEADER.size + index * ENTRY.size)
        if offset + length > len(self._map):  # the file has grown since, or the entry is damaged
            if offset + length > os.fstat(self._handle.fileno()).st_size:
                return 0, 0, 0
            self._map = mmap.mmap(self._handle.fileno(), 0)
        return offset, length, crc

    def _load(self, index: int) -> tuple | None:
        """Returns the kept sample in a tuple, or None."""
        self._open()
        offset, length, crc = self._entry(index)
        if offset == 0:
            return None
        if not self._checked[index]:
            if zlib.crc32(memoryview(self._map)[offset : offset + length]) != crc:
                return None
            self._checked[index] = 1
        return (_decode(self._map, offset),)

    def _store(self, index: int, sample) -> None:
        if not self._can_write:
            return
        record = _encode(sample)
        with _files.locked(self._lock):
            offset, length, crc = self._entry(index)
            if offset and zlib.crc32(os.pread(self._handle.fileno(), length, offset)) == crc:
                return  # another process was first
            start = -(-HEADER.unpack_from(self._map, 0)[2] // ALIGNMENT) * ALIGNMENT
            if start + len(record) > self.max_bytes:
                return
            try:
                self._write(record, start)
                self._write(HEADER.pack(MAGIC, self.length, start + len(record)), 0)
                entry = ENTRY.pack(start, len(record), zlib.crc32(record))
                self._write(entry, HEADER.size + index * ENTRY.size)
            except OSError as error:
                self._can_write = False
                warnings.warn(f"no more samples are kept in {self.path}: {error}", stacklevel=3)

    def _write(self, content: bytes, offset: int) -> None:
        left = memoryview(content)
        while left:  # a disk that runs full takes a part, then raises
            written = os.pwrite(self._handle.fileno(), left, offset)
            left, offset = left[written:], offset + written


def _random_state() -> tuple:
    """Returns what tells the state of Python's, NumPy's and torch's generators from another."""
    from fusedtrain.train.rng import cpu_state

    return _content(cpu_state())


# --- records: size of the description, description, tensors -----------------------------------------------------------


def _content(sample) -> tuple[str, list[bytes]]:
    """Returns what two samples have in common when they are the same."""
    tensors: list[Tensor] = []
    return repr(_describe(sample, tensors)), [_bytes(tensor) for tensor in tensors]


def _bytes(tensor: Tensor) -> bytes:
    # A copy, for a view may conjugate, negate, or have any stride where it holds one number.
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
    return plain.view(-1).view(torch.uint8).numpy().tobytes()


def _encode(sample) -> bytes:
    tensors: list[Tensor] = []
    description = pickle.dumps(_describe(sample, tensors), protocol=4)
    parts, size = [SIZE.pack(len(description)), description], SIZE.size + len(description)
    for tensor in tensors:
        padding = -size % ALIGNMENT
        content = _bytes(tensor)
        parts += [bytes(padding), content]
        size += padding + len(content)
    return b"".join(parts)


def _describe(value, tensors: list[Tensor]) -> tuple:
    """Returns a sample's structure as plain tuples: (kind, ...); tensors are appended to ``tensors``."""
    if type(value) is nn.Parameter or (type(value) is Tensor and value.is_leaf and value.requires_grad):
        return "leaf", _describe(value.detach(), tensors), type(value) is nn.Parameter, value.requires_grad
    if type(value) is Tensor:  # one of a class of its own would come back without it
        tensors.append(value)
        found = "tensor", str(value.dtype).removeprefix("torch."), tuple(value.shape)
        like = torch.empty_like(value, device="meta")  # as dense as a clone
        return found if like.is_contiguous() else (*found, like.stride())
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return "value", value
    if type(value) in (tuple, list):
        return type(value).__name__, [_describe(item, tensors) for item in value]
    if type(value) is dict:
        return "dict", [(_describe(key, tensors), _describe(item, tensors)) for key, item in value.items()]
    np = need("numpy", "data")
    plain = isinstance(value, np.generic) or type(value) in (np.ndarray, np.memmap)  # others hold more, such as a mask
    if plain and value.dtype.kind in "biufc":
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return kind, _describe(torch.from_numpy(np.array(value, order="K")), tensors)
    raise TypeError(
        "a cached sample may hold tensors, arrays, numbers, strings, bytes, None, tuples, lists and dicts, got"
        f" {type(value).__name__}"
    )


class _Plain(pickle.Unpickler):
    """Reads built-in types and nothing else: a file in a cache folder must not run code."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"{module}.{name} in a sample cache")


@functools.lru_cache(4096)
def _structure(description: bytes):
    return _Plain(io.BytesIO(description)).load()


def _decode(source, offset: int):
    (size,) = SIZE.unpack_from(source, offset)
    at = offset + SIZE.size
    structure = _structure if size <= SHORT else _structure.__wrapped__
    return _Tensors(source, offset, SIZE.size + size).build(structure(bytes(source[at : at + size])))


class _Tensors:
    """The tensors of a record, read in their order; ``at``: where the next one is looked for, after ``offset``."""

    def __init__(self, source, offset: int, at: int):
        self.source, self.offset, self.at = source, offset, at

    def build(self, node: tuple):
        """Returns the value that :func:`_describe` described."""
        kind, content = node[0], node[1]
        if kind == "value":
            return content
        if kind == "tensor":
            found = self._next(node[2], getattr(torch, content))
            return torch.empty_strided(*node[2:], dtype=found.dtype, device="cpu").copy_(found) if node[3:] else found
        if kind == "leaf":
            found = self.build(content)
            return nn.Parameter(found, node[3]) if node[2] else found.requires_grad_()
        if kind == "dict":
            return {self.build(key): self.build(item) for key, item in content}
        if kind in ("array", "number"):
            array = self.build(content).numpy()
            return array if kind == "array" else array[()]
        items = [self.build(item) for item in content]
        return tuple(items) if kind == "tuple" else items

    def _next(self, shape: tuple, dtype: torch.dtype) -> Tensor:
        self.at += -self.at % ALIGNMENT
        empty = torch.empty(shape, dtype=dtype, device="cpu")
        if empty.numel():
            # A copy: the file must not change when the sample does.
            flat = torch.frombuffer(self.source, dtype=torch.uint8, count=empty.nbytes, offset=self.offset + self.at)
            empty.view(-1).view(torch.uint8).copy_(flat)
        self.at += empty.nbytes
        return empty


# --- what a cache is kept for -----------------------------------------------------------------------------------------


def _identity_of(dataset) -> dict:
    """Returns what tells the source and the transform of a dataset from others."""
    held = {}
    samples = getattr(dataset, "samples", None)
    if hasattr(dataset, "fingerprint"):
        source = dataset.fingerprint()
    elif isinstance(samples, list) and samples and all(map(_names_file, samples)):
        digest = hashlib.sha256()
        for path, target in samples:
            try:
                status = os.stat(path)
            except OSError as error:
                raise ValueError(
                    f"samples of {type(dataset).__name__}: {error}; pass key= to name the content"
                ) from None
            line = f"{path}\0{target}\0{status.st_size}\0{status.st_mtime_ns}\n"
            digest.update(line.encode(errors="surrogateescape"))  # names of files are bytes
        source = digest.hexdigest()
        plain = (bool, int, float, str, bytes)
        held = {name: repr(value) for name, value in vars(dataset).items() if isinstance(value, plain)}
    else:
        raise ValueError(
            f"{type(dataset).__name__} has neither fingerprint() nor samples (file, target): pass key= to name its"
            " content"
        )
    kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    pillow = getattr(sys.modules.get("PIL"), "__version__", None)  # another version may decode differently
    names = [name for name in TRANSFORMS if hasattr(dataset, name)]
    parts = {name: _identity(getattr(dataset, name)) for name in names}
    with contextlib.suppress(ValueError, RecursionError):  # what else a class reads need not have a name
        parts["code"] = _identity(type(dataset).__getitem__)
    return {"kind": kind, "source": source, "pillow": pillow, "held": held, **parts}


def _names_file(sample) -> bool:
    """Whether a sample is (file, target), as of torchvision's folders; a list of a user's own may hold anything."""
    return isinstance(sample, (tuple, list)) and len(sample) == 2 and isinstance(sample[0], (str, os.PathLike))


def _identity(value, within: tuple = ()) -> str:
    """Returns a text that differs where ``value``, a transform or what it holds, does something else.

    ``within``: the functions and objects whose identity this is a part of.
    """
    np = sys.modules.get("numpy")
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return f"partial({', '.join(_identity(part, within) for part in parts)})"
    if isinstance(value, types.MethodType):
        return f"{_identity(value.__self__, within)}.{_identity(value.__func__, within)}"
    if isinstance(value, types.FunctionType):
        return value.__qualname__ if value in within else _identity_of_function(value, (*within, value))
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_identity(item, within) for item in value)}]"
    if isinstance(value, (set, frozenset)):  # in an order of its own in every process
        return f"{{{', '.join(sorted(_identity(item, within) for item in value))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_identity(item, within)}' for key, item in value.items())}}}"
    if isinstance(value, Tensor) or (np is not None and isinstance(value, np.ndarray)):  # a repr leaves most of it out
        with contextlib.suppress(TypeError):
            return f"{type(value).__qualname__} {hashlib.sha256(_encode(value)).hexdigest()}"
    text = repr(value)
    if " at 0x" in text:
        raise ValueError(f"{text} cannot be told from another of its kind: give it a repr, or pass key=")
    kind = type(value)
    own = [vars(kind).get(name) for name in ("__call__", "forward")]
    own = [_identity(function, within) for function in own if isinstance(function, types.FunctionType)]
    own += _held(value, (*within, value)) if callable(value) and not isinstance(value, type) else []
    return f"{kind.__qualname__} {text}{own or ''}"


_OF_MODULES = vars(nn.Module()).keys() - {"_parameters", "_buffers", "_modules"}


def _held(value, within: tuple) -> list[str]:
    """Returns what a transform holds: its repr need not show that, and a Module's own shows layers alone."""
    silent = isinstance(value, nn.Module) and type(value).extra_repr is nn.Module.extra_repr
    found = []
    for name, part in sorted(getattr(value, "__dict__", {}).items()):
        if (name in _OF_MODULES and isinstance(value, nn.Module)) or any(part is outer for outer in within):
            continue
        try:
            found.append(f"{name}={_identity(part, within)}")
        except ValueError:
            if silent:
                raise
    return found


def _identity_of_function(function: types.FunctionType, within: tuple) -> str:
    closure = [_identity(cell.cell_contents, within) for cell in function.__closure__ or ()]
    defaults = [_identity(function.__defaults__, within), _identity(function.__kwdefaults__, within)]
    names = sorted(_names(function.__code__) & function.__globals__.keys())
    used = [f"{name}: {_identity_of_global(function, function.__globals__[name], within)}" for name in names]
    return f"{function.__qualname__}({_code(function.__code__)}, {closure}, {defaults}, {used})"


def _identity_of_global(function: types.FunctionType, value, within: tuple) -> str:
    """Numbers, texts and functions of the same file count with what they are, all else with its name."""
    plain = (bool, int, float, complex, str, bytes, type(None), tuple, list, dict, set, frozenset, Tensor)
    near = isinstance(value, types.FunctionType) and value.__module__ == function.__module__
    with contextlib.suppress(ValueError, RecursionError):
        if near or isinstance(value, plain):
            return _identity(value, within)
    return getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or type(value).__qualname__


def _names(code: types.CodeType) -> set[str]:
    """Returns the global names that a code reads, that of functions within it too."""
    own = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*(_names(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _code(code: types.CodeType) -> str:
    constants = [_code(c) if isinstance(c, types.CodeType) else _identity(c) for c in code.co_consts]
    return hashlib.sha256(f"{code.co_code!r} {constants} {code.co_names}".encode()).hexdigest()

"""One training state in one file that verifies itself.

The file is a safetensors file, so no reader of it ever executes code and every safetensors tool opens it::

    8 bytes           n, the length of the header
    n bytes           JSON: {"__metadata__": {"sha256": ..., "state": ...}, "model/fc.weight": {dtype, shape, ...}, ...}
    the rest          the tensors without gaps

``sha256`` covers n and the header (with zeros in its own place); ``state`` is JSON too: what is not a tensor, and the
CRC-32 of every tensor. So each bit of the file is covered, and a damaged tensor is named. The zip file that torch.save
writes has bytes that no checksum covers, and safetensors' own writer copies every tensor once more and knows neither
strides nor shared tensors.

Source: https://github.com/huggingface/safetensors#format
"""

import ctypes
import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from fusedtrain.train.state_tree import DTYPES, NAMES, unflatten

FORMAT = 1
_HASH_START = b'{"__metadata__":{"sha256":"'
_NO_HASH = b"0" * 64
_LARGEST_HEADER = 100_000_000  # the limit of safetensors itself


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or there is none that can be read; the message says which and why."""


@dataclass(frozen=True)
class Contents:
    """What a file holds: the step it was saved at and the state."""

    step: int
    state: dict


# --- writing ----------------------------------------------------------------------------------------------------------


def write(
    file: BinaryIO,
    step: int,
    tree,
    tensors: dict[str, Tensor],
    *,
    may_be_nonfinite: Iterable[str] = (),
    shards: dict | None = None,
) -> str:
    """Writes one state, in one pass over the tensors.

    Args:
        shards: what :class:`Reader` calls so, for the file that ties the shards of one state together.

    Returns:
        The hash of the header, which stands for everything in the file.

    Raises:
        CheckpointError: a floating-point tensor holds NaN or infinity and is not of ``may_be_nonfinite``.
    """
    # safetensors' order: every tensor then starts at a multiple of its element size, which mapping readers need.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    crc = dict.fromkeys(names, "0" * 8)

    def header() -> bytes:
        state = {"format": FORMAT, "step": step, "crc32": crc, "strides": _strides(tensors), "tree": tree}
        state |= {"shards": shards} if shards else {}
        metadata = {"sha256": _NO_HASH.decode(), "state": _json(state)}
        fields, end = {"__metadata__": metadata}, 0
        for name in names:
            t = tensors[name]
            start, end = end, end + t.nbytes
            fields[name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [start, end]}
        text = _json(fields).encode()
        return text + b" " * (-len(text) % 8)

    length = len(header())
    if length > _LARGEST_HEADER:
        raise CheckpointError(f"the state has too many entries: a header of {length} bytes, {_LARGEST_HEADER} at most")
    file.write(bytes(8 + length))  # every field has a fixed width: the header is filled in below
    for name in names:
        t = tensors[name].cpu().contiguous()
        if not is_finite(t) and not is_part(name, may_be_nonfinite):
            raise CheckpointError(f"{name} holds NaN or infinity: not saved, the earlier checkpoints stay as they are")
        data = _bytes(t)
        crc[name] = f"{zlib.crc32(data):08x}"
        file.write(data)
    sealed = _sealed(header())
    file.seek(0)
    file.write(sealed)
    return _hash(sealed)


def is_part(name: str, parts: Iterable[str]) -> bool:
    """Whether the tensor ``name`` is one of ``parts`` or stands in one of them."""
    return any(name == part or name.startswith(f"{part}/") for part in parts)


def is_finite(t: Tensor) -> bool:
    """Whether all elements are finite; one pass over memory."""
    t = t.detach()
    if t.is_complex():
        t = torch.view_as_real(t)
    if not t.is_floating_point() or not t.numel():
        return True
    if t.element_size() == 1:
        t = t.float()
    return all(math.isfinite(value) for value in t.aminmax())  # NaN goes through minimum and maximum


def snapshot(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies to the CPU that nobody else changes, with the strides kept."""
    return {
        name: _empty(t.shape, t.dtype, t.stride()).copy_(t) if _is_dense(t) else t.cpu().contiguous()
        for name, t in tensors.items()
    }


def _empty(shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
    """A new CPU tensor, whatever ``torch.set_default_device`` says."""
    if strides is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")


def _strides(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(t.stride()) for name, t in tensors.items() if not t.is_contiguous() and _is_dense(t)}


def _is_dense(t: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _json(value) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _sealed(header: bytes) -> bytes:
    """The length and the header, with the hash of both in its place."""
    text = len(header).to_bytes(8, "little") + header
    start = 8 + len(_HASH_START)
    return text[:start] + hashlib.sha256(text).hexdigest().encode() + text[start + 64 :]


def _hash(sealed: bytes) -> str:
    start = 8 + len(_HASH_START)
    return sealed[start : start + 64].decode()


def _bytes(t: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy and without numpy."""
    if not t.nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * t.nbytes).from_address(t.data_ptr())).cast("B")


# --- reading ----------------------------------------------------------------------------------------------------------


class Reader:
    """Reads one file: the header when it is made, the tensors on demand.

    Attributes are ``step``, ``tree`` (the state without tensors), ``hash`` of the header and ``shards``: None, or for a
    state whose tensors stand in other files, ``{"files": {name: hash}, "tensors": {name: {dtype, shape, chunks}}}``
    with chunks ``{offsets, shape, file, name}``.

    Args:
        file: open for reading, at its start.

    Raises:
        CheckpointError: the file is shorter or longer than it should be, or its header is damaged.
    """

    def __init__(self, file: BinaryIO):
        self.file = file
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if prefix.startswith(b"PK"):
            raise CheckpointError("it is no checkpoint, but a file of torch.save, such as weights")
        if len(prefix) < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise CheckpointError(f"the file is cut off ({size} bytes), or its first bytes are damaged")
        header = file.read(length)
        start = len(_HASH_START)
        if not header.startswith(_HASH_START):
            raise CheckpointError("the header is damaged, or this is not a checkpoint of fusedtrain")
        if _sealed(header[:start] + _NO_HASH + header[start + 64 :]) != prefix + header:
            raise CheckpointError("the header is damaged: its hash differs")
        self._fields = json.loads(header)
        state = json.loads(self._fields.pop("__metadata__")["state"])
        if state["format"] > FORMAT:
            raise CheckpointError(f"written by a newer fusedtrain, in format {state['format']}; known is {FORMAT}")
        self.step: int = state["step"]
        self.tree, self.shards, self.hash = state["tree"], state.get("shards"), _hash(prefix + header)
        self._crc, self._strides, self._start = state["crc32"], state["strides"], 8 + length
        end = self._start + max((field["data_offsets"][1] for field in self._fields.values()), default=0)
        if size != end:
            raise CheckpointError(f"the file has {size} bytes and should have {end}")

    def names(self) -> list[str]:
        """The tensors in the order of the file."""
        return list(self._fields)

    def tensor(self, name: str) -> Tensor:
        """Returns one tensor, on the CPU.

        Raises:
            CheckpointError: its bytes are not those that were written.
        """
        field = self._fields[name]
        t = _empty(field["shape"], DTYPES[field["dtype"]])
        data = _bytes(t)
        self.file.seek(self._start + field["data_offsets"][0])
        if self.file.readinto(data) != len(data) or f"{zlib.crc32(data):08x}" != self._crc[name]:
            raise CheckpointError(f"tensor {name} is damaged: its checksum differs")
        if name in self._strides:
            t = _empty(t.shape, t.dtype, self._strides[name]).copy_(t)
        return t


class ShardReader:
    """Reads tensors out of the shards of one state, each of which is opened once and checked to be the right one.

    Args:
        folder: of the shards.
        shards: as :class:`Reader` has it.

    Raises:
        CheckpointError: by every method: a shard is missing, damaged, or belongs to another save.
    """

    def __init__(self, folder: Path, shards: dict):
        self._folder, self.files, self._readers = folder, shards["files"], {}

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *exception) -> None:
        for reader in self._readers.values():
            reader.file.close()

    def open(self, name: str) -> Reader:
        """Returns the reader of one shard."""
        if name not in self._readers:
            try:
                file = open(self._folder / name, "rb")  # noqa: SIM115 (closed at the end)
            except FileNotFoundError:
                raise CheckpointError(f"shard {name} is missing") from None
            try:
                reader = Reader(file)
                if reader.hash != self.files[name]:
                    raise CheckpointError("it belongs to another save")
            except CheckpointError as error:
                file.close()
                raise CheckpointError(f"shard {name}: {error}") from None
            self._readers[name] = reader
        return self._readers[name]

    def chunk(self, chunk: dict) -> Tensor:
        """Returns a part of a tensor."""
        reader = self.open(chunk["file"])
        try:
            return reader.tensor(chunk["name"])
        except CheckpointError as error:
            raise CheckpointError(f"shard {chunk['file']}: {error}") from None

    def whole(self, field: dict) -> Tensor:
        """Returns a tensor put together from all its parts."""
        t = _empty(field["shape"], DTYPES[field["dtype"]])
        for chunk in field["chunks"]:
            part = t
            for dim, (start, size) in enumerate(zip(chunk["offsets"], chunk["shape"])):
                part = part.narrow(dim, start, size)
            part.copy_(self.chunk(chunk))
        return t


def read(path: Path, map_location="cpu") -> Contents:
    """Reads and verifies one file, with its shards where it has any.

    Raises:
        CheckpointError: the file is not whole.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        reader = Reader(file)
        tensors = {name: reader.tensor(name).to(map_location) for name in reader.names()}
    if reader.shards:
        with ShardReader(path.parent, reader.shards) as shards:
            for name, field in reader.shards["tensors"].items():
                tensors[name] = shards.whole(field).to(map_location)
    return Contents(reader.step, unflatten(reader.tree, tensors))


def problems(path: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Reads the whole file and returns what is wrong with it, one line each; nothing when it is whole.

    ``part`` of ``parts`` looks only into every ``parts``-th shard.
    """
    found = []
    try:
        with open(path, "rb") as file:
            reader = Reader(file)
            _look(reader, found)
        if reader.shards:
            with ShardReader(path.parent, reader.shards) as shards:
                for name in sorted(reader.shards["files"])[part::parts]:
                    try:
                        _look(shards.open(name), found, f"shard {name}: ")
                    except CheckpointError as error:
                        found.append(str(error))
    except CheckpointError as error:
        found.append(str(error))
    except OSError as error:
        found.append(f"cannot be read: {error.strerror}")
    return found


def _look(reader: Reader, found: list[str], prefix: str = "") -> None:
    for name in reader.names():
        try:
            reader.tensor(name)
        except CheckpointError as error:
            found.append(f"{prefix}{error}")

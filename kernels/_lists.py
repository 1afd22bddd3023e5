"""How the kernels walk over lists of tensors: a program to each chunk of a tensor, whose address it finds in a table.

The table is one int64 tensor: columns of numbers or addresses, one per tensor, then the tensor of each program. Tensors
are sorted by kind, which is at least their dtype, so a launch for each kind takes a range of programs.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedtrain.ops import _common

CHUNK = 8192  # elements of a program
# Elements at a time: 8 per thread. The interpreter takes its time per operation, not per element: all at once.
BLOCK = CHUNK if _common.triton_interpreted() else 1024
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
NUMEL, FIRST = tl.constexpr(0), tl.constexpr(1)  # columns of every table: elements, programs of the tensors before


class Launch(NamedTuple):
    """The programs for the tensors of one kind."""

    row: int  # the first of them
    like: Tensor
    first: int
    programs: int
    vec: int  # elements that every address is a multiple of, up to 16 bytes

    @property
    def arguments(self) -> dict:
        return {"first_program": self.first, "VEC": self.vec, "CHUNK": CHUNK, "BLOCK": BLOCK, **OPTIONS}


class Table(NamedTuple):
    tensor: Tensor  # int64 [columns * count + programs]
    count: int
    programs: int
    launches: list[Launch]


def sort(kinds: Sequence) -> list[int]:
    """The order of tensors of these kinds in a table."""
    return sorted(range(len(kinds)), key=lambda i: str(kinds[i]))


def table(
    columns: Sequence[Sequence[Tensor | None]],
    numbers: Sequence[Sequence[Tensor | int | None]] = (),
    kinds: Sequence = (),
) -> Table:
    """A table of sorted tensors.

    Args:
        columns: the tensors themselves first, then others of their shapes; None for what there is not.
        numbers: small tensors or integers that belong to them.
        kinds: of the tensors; their dtypes, if not given.
    """
    tensors = columns[0]
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "fusedtrain: Triton kernels on lists copy a table to the GPU and so cannot be captured in a CUDA"
            " graph; the CUDA kernels can"
        )
    sizes = [t.numel() for t in tensors]
    chunks = torch.tensor([triton.cdiv(size, CHUNK) for size in sizes])
    first = chunks.cumsum(0) - chunks
    addresses = [[0 if t is None else t.data_ptr() for t in column] for column in columns]
    others = [[t.data_ptr() if isinstance(t, Tensor) else t or 0 for t in column] for column in numbers]
    rows = torch.tensor([sizes, first.tolist(), *addresses, *others])
    content = torch.cat([rows.flatten(), torch.arange(len(sizes)).repeat_interleave(chunks)])
    launches, begin = [], 0
    for _, group in groupby(kinds or [t.dtype for t in tensors]):
        end, like = begin + len(list(group)), tensors[begin]
        aligned = all(address % 16 == 0 for column in addresses for address in column[begin:end])
        programs = int(chunks[begin:end].sum())
        launches.append(Launch(begin, like, int(first[begin]), programs, 16 // like.itemsize if aligned else 1))
        begin = end
    if tensors[0].is_cuda:
        content = content.pin_memory()
    content = content.to(tensors[0].device, non_blocking=True)
    return Table(content, len(sizes), int(chunks.sum()), [launch for launch in launches if launch.programs])


@triton.jit
def entry(table_ptr, count, row, COLUMN: tl.constexpr):
    return tl.load(table_ptr + COLUMN * count + row)


@triton.jit
def pointer(table_ptr, count, row, COLUMN: tl.constexpr, like_ptr, VEC: tl.constexpr):
    """The address of a tensor with the dtype of ``like_ptr``."""
    address = entry(table_ptr, count, row, COLUMN).to(like_ptr.dtype)
    if VEC > 1:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def program(table_ptr, count, first_program, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """This program's number, its tensor, and the first and last element of its chunk."""
    pid = tl.program_id(0).to(tl.int64) + first_program
    row = entry(table_ptr, count, pid, COLUMNS)
    begin = (pid - entry(table_ptr, count, row, FIRST)) * CHUNK
    return pid, row, begin, tl.minimum(begin + CHUNK, entry(table_ptr, count, row, NUMEL))

"""How the kernels walk over images in both memory formats: one tile of channels x pixels per program.

A contiguous [N, C, H, W] is taken as one sample of N*C channels (planes), a channels_last one as N samples of C
channels. A program owns BLOCK_C channels and CHUNK pixels, in steps of BLOCK_HW; the chunks of a long sum are added in
order afterwards, so that no result depends on the batch or on the order of programs.
"""

import contextlib
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedtrain.ops import _common

TILE = 2048  # elements of BLOCK_C x BLOCK_HW: 16 per thread, two 16-byte loads of bfloat16
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
INT32_ELEMENTS = 2**30  # larger tensors take 64-bit offsets, at more registers; here a tile's overhang cannot wrap
CHUNK = 4096  # pixels of a contiguous plane per program
CHUNK_CHANNELS_LAST = 256  # pixels per program where neighbouring programs take the other channels


class Grid(NamedTuple):
    """The geometry of a launch; ``arguments`` go to every kernel that calls :func:`program` and :func:`tile`."""

    samples: int
    c: int  # channels of a sample: C, or N*C planes
    hw: int
    chunk: int
    block_c: int
    block_hw: int
    vec: int
    channels_last: bool
    wide: bool

    @property
    def planes(self) -> int:
        return self.samples * self.c

    @property
    def chunks(self) -> int:
        return max(1, triton.cdiv(self.hw, self.chunk))

    @property
    def programs(self) -> tuple[int]:
        return (self.samples * triton.cdiv(self.c, self.block_c) * self.chunks,)

    @property
    def arguments(self) -> dict:
        return {
            "c": self.c,
            "hw": self.hw,
            "chunks": self.chunks,
            "CHUNK": self.chunk,
            "BLOCK_C": self.block_c,
            "BLOCK_HW": self.block_hw,
            "VEC": self.vec,
            "CHANNELS_LAST": self.channels_last,
            "WIDE": self.wide,
            **OPTIONS,
        }


def blocks(c: int, hw: int, channels_last: bool) -> tuple[int, int]:
    """BLOCK_C, BLOCK_HW: the fast dimension of memory in whole cache lines, the rest of TILE for the other."""
    if channels_last:
        block_c = 16 if c <= 16 else 32 if c <= 32 else 64
        return block_c, TILE // block_c
    block_hw = 64 if hw <= 64 else 256 if hw <= 256 else 1024
    return TILE // block_hw, block_hw


def grid(x: Tensor, *, one_step: bool = False) -> Grid:
    """The geometry for ``x``; with ``one_step`` (element by element, no sums) a program owns one tile."""
    n, c, h, w = x.shape
    hw, channels_last = h * w, _common.is_channels_last(x)
    samples, c = (n, c) if channels_last else (1, n * c)
    block_c, block_hw = blocks(c, hw, channels_last)
    chunk = block_hw if one_step else CHUNK_CHANNELS_LAST if channels_last else CHUNK
    vec = math.gcd(c if channels_last else hw, 16 // x.element_size())
    return Grid(samples, c, hw, chunk, block_c, block_hw, max(1, vec), channels_last, x.numel() > INT32_ELEMENTS)


def on_device(x: Tensor):
    """Triton launches on the current device; the interpreter knows none."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


@triton.jit
def program(
    c,
    hw,
    chunks,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    """This program's first pixel, last pixel, sample, channels and chunk; neighbours in memory run side by side."""
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    pid = tl.program_id(0)
    blocks_c = tl.cdiv(c, BLOCK_C)
    if CHANNELS_LAST:
        sample, chunk, block = pid // blocks_c // chunks, pid // blocks_c % chunks, pid % blocks_c
    else:
        sample, chunk, block = 0, pid % chunks, pid // chunks
    begin = tl.cast(chunk, INT) * CHUNK
    channels = tl.cast(block, INT) * BLOCK_C + tl.arange(0, BLOCK_C)
    return begin, tl.minimum(begin + CHUNK, hw), tl.cast(sample, INT), channels, tl.cast(chunk, INT)


@triton.jit
def tile(start, sample, channels, c, hw, BLOCK_HW: tl.constexpr, VEC: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """Offsets [BLOCK_C, BLOCK_HW] from pixel ``start`` on and their mask; VEC divides the length of a row of memory."""
    pixels = start + tl.arange(0, BLOCK_HW)
    if CHANNELS_LAST:
        c = c // VEC * VEC
        offsets = (sample * hw + pixels)[None, :] * c + channels[:, None]
    else:
        hw = hw // VEC * VEC
        offsets = channels[:, None] * hw + pixels[None, :]
    return offsets, (channels < c)[:, None] & (pixels < hw)[None, :]

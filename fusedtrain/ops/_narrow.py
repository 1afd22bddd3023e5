"""How numbers computed in float32 are stored in fewer bits: csrc/core/narrow.h in plain PyTorch, bit for bit.

Of NaN the bits may differ. Tensors are divided by tensors: with a number on one side, torch rounds twice.
"""

import torch
from torch import Tensor

ROUNDED = (torch.bfloat16, torch.float16)  # dtypes of parameters that rounding="stochastic" and "kahan" are for
BLOCK = 256
PARAM_USE = 4  # of random bits; states use 0, 1, ...
_TOP, _SHIFT = 1.875, 20
_BASE = {False: 0x3FF - 255, True: 0x3FF - 127}  # by sign
_LEAST = 2.0**-120  # blocks whose largest magnitude is below count as zeros
_WORD, _LONG = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def flat(t: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of memory; a view."""
    return t.as_strided((t.numel(),), (1,))


def split_mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _LONG
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _LONG
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _LONG
    return x ^ (x >> 31)


def _mix(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def stream(seed: int, tensor: int) -> int:
    """What sets the tensor at that place in the list apart, before its count of steps does."""
    return (split_mix(seed & _LONG) + tensor) & _LONG


def random_bits(numel: int, seed: int, step: int, tensor: int, use: int, device: torch.device) -> Tensor:
    """16 random bits for each element, a function of all but the device and of the element's place."""
    key = split_mix((stream(seed, tensor) + (step << 32)) & _LONG)
    element = torch.arange(numel, device=device)
    high = ((key >> 32) + (use // 2) * 0x9E3779B9 + (element >> 32)) & _WORD
    word = _mix((((element & _WORD) ^ (key & _WORD)) + high) & _WORD)
    return word & 0xFFFF if use % 2 == 0 else word >> 16


def _cut(x: Tensor, random: Tensor, dropped: int) -> Tensor:
    tail = (random * 2 + 1) << (dropped - 17) if dropped > 16 else random >> (16 - dropped)
    bits = x.contiguous().view(torch.int32).long() & _WORD
    return (((bits + tail) >> dropped) << dropped) & _WORD


def _float(bits: Tensor) -> Tensor:
    return torch.where(bits > 0x7FFFFFFF, bits - 2**32, bits).int().view(torch.float32)


def round_(to: Tensor, x: Tensor, random: Tensor | None) -> None:
    """Writes numbers into a dense tensor: to nearest, or with 16 random bits for each element stochastically."""
    if random is None or to.dtype not in ROUNDED:
        to.copy_(x)
    else:
        values = flat(torch.empty_like(to, dtype=torch.float32).copy_(x))
        flat(to).copy_(torch.where(values.isfinite(), _ROUND[to.dtype](values, random), values))


def _round_bfloat16(x: Tensor, random: Tensor) -> Tensor:
    return _float(_cut(x, random, 16))


def _round_float16(x: Tensor, random: Tensor) -> Tensor:
    steps = x.abs().double() * 2**24  # below 2^-14 the numbers of float16 are the multiples of 2^-24
    small = (steps + ((random >> 4) + 0.5) / 2**12).floor() / 2**24
    return torch.where(x.abs() < 2**-14, small.float().copysign(x), _float(_cut(x, random, 13)))


_ROUND = {torch.bfloat16: _round_bfloat16, torch.float16: _round_float16}


def blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def encode_(codes: Tensor, scales: Tensor, x: Tensor, signed: bool, random: Tensor | None = None) -> None:
    """Writes numbers into a dense tensor of 8 bits and its scales: to nearest, or with 16 random bits per element."""
    numel, shape = codes.numel(), (scales.numel(), BLOCK)
    values = flat(torch.empty_like(codes, dtype=torch.float32).copy_(x))
    random = torch.full_like(values, 0x8000, dtype=torch.int64) if random is None else random
    padding = (0, scales.numel() * BLOCK - numel)
    values, random = (torch.nn.functional.pad(t, padding).view(shape) for t in (values, random))
    largest = values.abs().amax(1, keepdim=True)
    largest = torch.where(largest.isfinite(), torch.where(largest < _LEAST, 0.0, largest), torch.nan)
    scale = torch.full_like(largest, _TOP) / largest
    y = (values.abs() * scale).clamp(max=_TOP)
    digits = (_cut(y, random, _SHIFT) >> _SHIFT) - _BASE[signed]
    smallest = _smallest(signed)
    digits = torch.where(y < smallest, (y > (random * (smallest * 2**-16) if signed else 0.0)).long(), digits)
    digits = digits + (values.signbit().long() << 7) if signed else digits
    flat(codes).copy_(torch.where(largest > 0.0, digits, 0).flatten()[:numel])
    scales.copy_(largest[:, 0])


def _smallest(signed: bool) -> float:
    return float(_float(torch.tensor((_BASE[signed] + 1) << _SHIFT, device="cpu")))


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """What :func:`encode_` has stored, in float32."""
    code = flat(codes).long()
    digits = code & 0x7F if signed else code
    values = torch.where(digits == 0, 0.0, _float((digits + _BASE[signed]) << _SHIFT))
    values = values * (scales / torch.full_like(scales, _TOP)).repeat_interleave(BLOCK)[: codes.numel()]
    made = torch.empty_like(codes, dtype=torch.float32)
    flat(made).copy_(torch.where(code > 127, -values, values) if signed else values)
    return made

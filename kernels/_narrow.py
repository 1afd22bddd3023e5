"""csrc/core/narrow.h in Triton, bit for bit but for NaN: numbers computed in float32 and stored in 16 or 8 bits."""

import triton
import triton.language as tl

CODES = tl.constexpr(256)  # of a block
_TOP, _SHIFT = tl.constexpr(1.875), tl.constexpr(20)
_BASE, _SIGNED_BASE = tl.constexpr(0x3FF - 255), tl.constexpr(0x3FF - 127)
_LEAST = tl.constexpr(2.0**-120)  # blocks whose largest magnitude is below count as zeros
PARAM_USE = tl.constexpr(4)  # of random bits; states use 0, 1, ...
_NONE = tl.constexpr(0x8000)  # stands for random bits where nothing is drawn


@triton.jit
def _bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _number(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def widen(x):
    """In float32; by hand for bfloat16, of which the interpreter loses subnormal numbers."""
    if x.dtype == tl.bfloat16:
        return _number(x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    else:
        return x.to(tl.float32)


@triton.jit
def key(stream, step):
    """What the random bits of one tensor come from: two words."""
    x = stream.to(tl.uint64) + (step.to(tl.int64) << 32).to(tl.uint64) + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return x.to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def draw(key, at, USE: tl.constexpr):
    """16 random bits for each element and use."""
    x = (at.to(tl.uint32) ^ key[0]) + (key[1] + (at >> 32).to(tl.uint32) + (USE // 2 * 0x9E3779B9 & 0xFFFFFFFF))
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return x & 0xFFFF if USE % 2 == 0 else x >> 16


@triton.jit
def _round_bfloat16(x, tail):
    bits = tl.where(x == x, _bits(x) + tl.where(x - x == 0.0, tail, 0), 0x7FC00000)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _round_float16(x, random):
    sign = _bits(x) & 0x80000000
    a = _number(_bits(x) ^ sign)
    normal = _number((_bits(a) + (random >> 3)) & 0xFFFFE000)
    # Below 2^-14 the numbers of float16 are the multiples of 2^-24, to which adding 0.5 rounds.
    tail = ((random >> 4).to(tl.float32) + 0.5) * 2.0**-36 - 2.0**-25
    small = tl.abs((a + tail + 0.5) - 0.5)  # of 0 it may be -2^-25, which is stored as 0
    rounded = _number(_bits(tl.where(a < 2.0**-14, small, normal)) | sign)
    return tl.where(x - x == 0.0, rounded, x).to(tl.float16)


@triton.jit
def to_nearest(x, type_: tl.constexpr):
    """In ``type_``; by hand for bfloat16, whose numbers the interpreter cuts off."""
    if type_ == tl.bfloat16:
        return _round_bfloat16(x, 0x7FFF + ((_bits(x) >> 16) & 1))
    else:
        return x.to(type_)


@triton.jit
def round_to(x, key, at, USE: tl.constexpr, type_: tl.constexpr, RANDOM: tl.constexpr):
    """In ``type_``: to nearest, or with random bits."""
    if RANDOM and type_ == tl.bfloat16:
        return _round_bfloat16(x, draw(key, at, USE))
    elif RANDOM and type_ == tl.float16:
        return _round_float16(x, draw(key, at, USE))
    else:
        return to_nearest(x, type_)


@triton.jit
def load(state_ptr, scale_ptr, at, mask, SIGNED: tl.constexpr):
    """The elements ``at`` of a state in float32."""
    x = tl.load(state_ptr + at, mask=mask, other=0)
    if state_ptr.dtype.element_ty == tl.uint8:
        scale = tl.load(scale_ptr + at // CODES, mask=mask, other=0.0)
        code = x.to(tl.uint32)
        digits = code & 0x7F if SIGNED else code
        x = _number((digits + (_SIGNED_BASE if SIGNED else _BASE)) << _SHIFT)
        x = tl.where(digits == 0, 0.0, x) * tl.div_rn(scale, tl.full(scale.shape, _TOP, tl.float32))
        if SIGNED:
            x = _number(_bits(x) ^ ((code & 0x80) << 24))
    return widen(x)


@triton.jit
def store(state_ptr, scale_ptr, at, x, mask, key, USE: tl.constexpr, SIGNED: tl.constexpr, RANDOM: tl.constexpr):
    """Writes numbers in float32 into the elements ``at`` of a state, whole blocks of codes or the end of the last."""
    if state_ptr.dtype.element_ty == tl.uint8:
        code, scale = _encode(tl.where(mask, x, 0.0), key, at, USE, SIGNED, RANDOM)
        tl.store(state_ptr + at, code.to(tl.uint8), mask=mask)
        tl.store(scale_ptr + at // CODES, scale, mask=mask & (at % CODES == 0))
    else:
        tl.store(state_ptr + at, round_to(x, key, at, USE, state_ptr.dtype.element_ty, RANDOM), mask=mask)


@triton.jit
def _largest(x):
    """The largest number of each block, for all of its elements."""
    blocks: tl.constexpr = x.shape[0] // CODES
    most = tl.max(tl.reshape(x, [blocks, CODES]), axis=1)
    return tl.reshape(tl.broadcast_to(most[:, None], [blocks, CODES]), [blocks * CODES])


@triton.jit
def _encode(x, key, at, USE: tl.constexpr, SIGNED: tl.constexpr, RANDOM: tl.constexpr):
    """Codes, and the largest magnitude of each block for all of its elements: NaN where a number is not finite."""
    # Bits of magnitudes are in the order of these, with infinities and NaN last: no number gets lost in a maximum.
    largest = _largest(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    largest = tl.where(largest - largest == 0.0, largest, float("nan"))
    some = largest >= _LEAST
    random = tl.full(x.shape, _NONE, tl.uint32)
    if RANDOM:
        random = draw(key, at, USE)
    base = _SIGNED_BASE if SIGNED else _BASE
    y = tl.abs(x) * tl.div_rn(tl.full(x.shape, _TOP, tl.float32), tl.where(some, largest, 1.0))
    y = tl.where(y > _TOP, _TOP, y)
    digits = ((_bits(y) + ((random * 2 + 1) << (_SHIFT - 17))) >> _SHIFT) - base
    smallest = _number(tl.full(x.shape, base + 1, tl.uint32) << _SHIFT)
    least = random.to(tl.float32) * smallest * 2.0**-16 if SIGNED else x * 0.0
    digits = tl.where(y < smallest, (y > least).to(tl.uint32), digits)
    if SIGNED:
        digits = digits | ((_bits(x) >> 24) & 0x80)
    return tl.where(some, digits, 0), tl.where(some | (largest != largest), largest, 0.0)

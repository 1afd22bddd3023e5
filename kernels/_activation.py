"""The activations of csrc/core/activation.h and their derivatives, on float32 values.

Derivatives at kinks follow torch: relu'(0) = 0, hard_sigmoid'(+-3) = 0, hard_swish'(-3) = 0, hard_swish'(3) = 1,
relu6'(0) = relu6'(6) = 0.
Only ``exp`` comes from libdevice, which Triton's interpreter lacks: triton.language's own loses digits with growing
|x|, and its ``/`` those of denominators beyond 2^126.
"""

import os

import triton
import triton.language as tl
from triton.language.extra import libdevice

from fusedtrain.ops import _codes

IDENTITY = tl.constexpr(_codes.ACTIVATIONS.index("identity"))
RELU = tl.constexpr(_codes.ACTIVATIONS.index("relu"))
SILU = tl.constexpr(_codes.ACTIVATIONS.index("silu"))
GELU = tl.constexpr(_codes.ACTIVATIONS.index("gelu"))
HARD_SWISH = tl.constexpr(_codes.ACTIVATIONS.index("hard_swish"))
RELU6 = tl.constexpr(_codes.ACTIVATIONS.index("relu6"))
SIGMOID = tl.constexpr(_codes.ACTIVATIONS.index("sigmoid"))
HARD_SIGMOID = tl.constexpr(_codes.ACTIVATIONS.index("hard_sigmoid"))
TANH = tl.constexpr(_codes.ACTIVATIONS.index("tanh"))
HALF_TANH = tl.constexpr(_codes.ACTIVATIONS.index("half_tanh"))

INV_SQRT_TWO_PI = tl.constexpr(0.39894228040143267794)  # 1 / sqrt(2 pi)
ONE_SIXTH = tl.constexpr(1.0 / 6.0)
ONE_THIRD = tl.constexpr(1.0 / 3.0)


if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def _exp(x):
        return tl.exp(x)

else:

    @triton.jit
    def _exp(x):
        return libdevice.exp(x)


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, 1.0 + _exp(-x))


@triton.jit
def _sigmoid_slope(x):
    # s (1 - s) loses its digits to cancellation at large |x|, e / (1 + e)^2 to rounding at small |x|.
    e = _exp(-tl.abs(x))
    s = tl.div_rn(1.0, 1.0 + e)
    return tl.where(e > 0.25, s * (1.0 - s), e * s * s)


@triton.jit
def _hard_sigmoid(x):
    y = x + 3.0  # clamped by comparisons, which keep NaN
    y = tl.where(y < 0.0, 0.0, y)
    return tl.where(y > 6.0, 6.0, y) * ONE_SIXTH


@triton.jit
def _bell(x):
    return _exp(-0.5 * x * x)


@triton.jit
def _normal_cdf(x, bell):
    # bell * P(|x|) / Q(|x|), the fit of csrc/core/activation.h: small values keep their digits, which 1 + erf cancels.
    a = tl.abs(x)
    a = tl.where(a > 14.0, 14.0, a)
    p = 0.0040776446 * a + 0.04037278
    p = p * a + 0.18246248
    p = p * a + 0.43725178
    p = p * a + 0.5
    q = 0.010221011 * a + 0.10120636
    q = q * a + 0.46743086
    q = q * a + 1.1992934
    q = q * a + 1.6723886
    q = q * a + 1.0
    tail = bell * (p / q)
    return tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def _tanh(x):
    # 1 - 2 / (exp(2x) + 1) cancels near 0; there the minimax polynomial of Cephes' tanhf (S. Moshier), |x| < 0.625.
    z = x * x
    p = -5.70498872745e-3 * z + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    return tl.where(tl.abs(x) < 0.625, p * z * x + x, 1.0 - 2.0 / (_exp(2.0 * x) + 1.0))


@triton.jit
def value(x, ACT: tl.constexpr):
    """a(x)."""
    if ACT == IDENTITY:
        y = x
    elif ACT == RELU:
        y = tl.where(x < 0.0, 0.0, x)
    elif ACT == SILU:
        y = tl.div_rn(x, 1.0 + _exp(-x))
    elif ACT == GELU:
        y = x * _normal_cdf(x, _bell(x))
    elif ACT == HARD_SWISH:
        y = x * _hard_sigmoid(x)
    elif ACT == RELU6:
        y = tl.where(x < 0.0, 0.0, x)
        y = tl.where(y > 6.0, 6.0, y)
    elif ACT == SIGMOID:
        y = _sigmoid(x)
    elif ACT == HARD_SIGMOID:
        y = _hard_sigmoid(x)
    elif ACT == TANH:
        y = _tanh(x)
    else:
        tl.static_assert(ACT == HALF_TANH)
        y = _sigmoid(x + x)
    return y


@triton.jit
def gradient(da, x, ACT: tl.constexpr):
    """da * a'(x). Where an activation is flat, torch selects 0 and lets no NaN or infinity of ``da`` through."""
    if ACT == IDENTITY:
        dx = da
    elif ACT == RELU:
        dx = tl.where(x <= 0.0, 0.0, da)
    elif ACT == SILU:
        s = _sigmoid(x)
        dx = da * (s * (1.0 + x * (1.0 - s)))
    elif ACT == GELU:
        bell = _bell(x)
        dx = da * (x * bell * INV_SQRT_TWO_PI + _normal_cdf(x, bell))
    elif ACT == HARD_SWISH:
        dx = tl.where(x <= -3.0, 0.0, tl.where(x >= 3.0, da, da * (x * ONE_THIRD + 0.5)))
    elif ACT == RELU6:
        dx = tl.where((x <= 0.0) | (x >= 6.0), 0.0, da)
    elif ACT == SIGMOID:
        dx = da * _sigmoid_slope(x)
    elif ACT == HARD_SIGMOID:
        dx = tl.where((x > -3.0) & (x < 3.0), da * ONE_SIXTH, 0.0)
    elif ACT == TANH:
        dx = da * (4.0 * _sigmoid_slope(x + x))
    else:
        tl.static_assert(ACT == HALF_TANH)
        dx = da * (2.0 * _sigmoid_slope(x + x))
    return dx

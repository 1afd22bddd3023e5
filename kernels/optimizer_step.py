# ruff: noqa: SIM109 (the language of kernels has no "in")
"""optimizer_step in Triton: the update rules of csrc/core/update_rule.h, where their formulas and sources stand.

A rule is what it makes of the host's numbers and the step (``_constants``, once per program), what it does with each
element (``_update``) and, where it needs norms, its first pass (``_advance``, ``_squares``) and the ratio from them.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedtrain.kernels import _images, _lists, _narrow
from fusedtrain.ops import _codes, _common
from fusedtrain.ops._narrow import ROUNDED, blocks, stream
from fusedtrain.ops.optimizer_step import PLAIN, RULES, SUMMED, Options, is_signed

ADAM = tl.constexpr(_codes.RULES.index("adam"))
AMSGRAD = tl.constexpr(_codes.RULES.index("amsgrad"))
SGD = tl.constexpr(_codes.RULES.index("sgd"))
MOMENTUM = tl.constexpr(_codes.RULES.index("momentum"))
LION = tl.constexpr(_codes.RULES.index("lion"))
RMSPROP = tl.constexpr(_codes.RULES.index("rmsprop"))
RMSPROP_CENTERED = tl.constexpr(_codes.RULES.index("rmsprop_centered"))
RMSPROP_CENTERED_MOMENTUM = tl.constexpr(_codes.RULES.index("rmsprop_centered_momentum"))
ADAN = tl.constexpr(_codes.RULES.index("adan"))
LAMB = tl.constexpr(_codes.RULES.index("lamb"))
NOVOGRAD = tl.constexpr(_codes.RULES.index("novograd"))
NOVOGRAD_AMSGRAD = tl.constexpr(_codes.RULES.index("novograd_amsgrad"))
LION_CAUTIOUS = tl.constexpr(_codes.RULES.index("lion_cautious"))
RMSPROP_MOMENTUM_CAUTIOUS = tl.constexpr(_codes.RULES.index("rmsprop_momentum_cautious"))
RMSPROP_CENTERED_MOMENTUM_CAUTIOUS = tl.constexpr(_codes.RULES.index("rmsprop_centered_momentum_cautious"))
ADAN_CAUTIOUS = tl.constexpr(_codes.RULES.index("adan_cautious"))
LAMB_CAUTIOUS = tl.constexpr(_codes.RULES.index("lamb_cautious"))

# Columns of the table. STREAM begins the random bits of a tensor; COUNTED holds the step where it is to be counted:
# neighbours may share one.
PARAM, GRAD, STATE, EMA, EXACT, SCALE = (tl.constexpr(i) for i in (2, 3, 4, 8, 9, 10))
STREAM, SCALAR, STEP, COUNTED = (tl.constexpr(i) for i in (14, 15, 17, 18))
MAX_STATES, MAX_SCALARS = 4, 2
COLUMNS = tl.constexpr(19)
MASTER, KAHAN = tl.constexpr(1), tl.constexpr(2)  # what is kept beside a parameter
RATIO_BLOCK, COUNT_BLOCK = 256, 256


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0.0 else -math.inf


def _numbers(rule: str, lr: float, weight_decay: float, decoupled: bool, c: Sequence[float]) -> tuple[float, ...]:
    """What a rule takes from the host: shrink and l2 of the weight decay, then its own."""
    rule = rule.removesuffix("_cautious")
    decay = (1.0 - lr * weight_decay, 0.0) if decoupled else (1.0, weight_decay)
    if rule in ("adam", "amsgrad"):
        return *decay, 1.0 - c[0], c[1], 1.0 - c[1], lr, _log(c[0]), _log(c[1]), c[2]
    if rule == "sgd":
        return *decay, lr
    if rule == "momentum":
        return *decay, lr, c[0], 1.0 - c[1], c[2]
    if rule == "lion":
        return *decay, lr, 1.0 - c[0], 1.0 - c[1]
    if rule.startswith("rmsprop"):
        eps, rates = (0.0, c[1]) if c[2] else (c[1], 0.0), (lr, 1.0) if c[4] else (1.0, lr)
        return *decay, c[0], 1.0 - c[0], *eps, c[3], *rates
    if rule == "adan":
        prox = 1.0 if decoupled else 1.0 / (1.0 + lr * weight_decay)
        betas = (value for beta in c[:3] for value in (beta, 1.0 - beta, _log(beta)))
        return decay[0], prox, lr, *betas, c[3]
    if rule == "lamb":
        return *decay, lr, c[0], c[3], c[1], 1.0 - c[1], _log(c[0]), _log(c[1]), *c[4:6], c[6], c[2]
    return *decay, lr, c[0], c[3], c[1], 1.0 - c[1], c[2]


@triton.jit
def _correction(log_beta, step):
    """1 - beta^step."""
    return 1.0 - tl.exp(step * tl.cast(log_beta, tl.float64))


@triton.jit
def _constants(c, step, ratio, RULE: tl.constexpr):
    """Three numbers of a rule for one parameter; ``step`` and ``ratio``, on step and direction, are float64."""
    a, b, d = ratio[1], ratio[1], ratio[1]
    if RULE == ADAM or RULE == AMSGRAD:
        a = c[5] / _correction(c[6], step)
        b = 1.0 / tl.sqrt(_correction(c[7], step))
    elif RULE == ADAN or RULE == ADAN_CAUTIOUS:
        a = c[2] / _correction(c[5], step)
        if RULE == ADAN_CAUTIOUS:
            a *= ratio[1]
        b = c[2] * c[6] / _correction(c[8], step)
        d = 1.0 / tl.sqrt(_correction(c[11], step))
    elif RULE == LAMB or RULE == LAMB_CAUTIOUS:
        a = tl.where(c[9] != 0.0, 1.0 / _correction(c[7], step), 1.0) * ratio[1]
        b = tl.where(c[9] != 0.0, 1.0 / tl.sqrt(_correction(c[8], step)), 1.0)
        d = c[2] * ratio[0]
    return a.to(tl.float32), b.to(tl.float32), d.to(tl.float32)


@triton.jit
def _decay(p, g, c):
    # Without weight decay an infinite parameter must not turn its gradient into NaN.
    return p * c[0], tl.where(c[1] != 0.0, g + c[1] * p, g)


@triton.jit
def _at_least(x, low):
    return tl.where(x < low, low, x)


@triton.jit
def _lamb_direction(g, m, v, c, k, RULE: tl.constexpr):
    """Without weight decay."""
    u = k[0] * m / (tl.sqrt_rn(v) * k[1] + c[12])
    if RULE == LAMB_CAUTIOUS:
        u = u * _agreeing(u, g)
    return u


@triton.jit
def _decayed(u, p, c):
    return tl.where(c[1] != 0.0, u + c[1] * p, u)


@triton.jit
def _advance(g, s0, s1, c, RULE: tl.constexpr):
    """The states of a rule whose first pass renews them."""
    if RULE == LAMB or RULE == LAMB_CAUTIOUS:
        s0 = c[3] * s0 + c[4] * g
        s1 = c[5] * s1 + c[6] * g * g
    return s0, s1


@triton.jit
def _direction_of(p, g, s0, s1, s2, c, RULE: tl.constexpr):
    """Parameter and gradient after weight decay, the direction that caution is about, and the states so far."""
    if RULE == ADAN or RULE == ADAN_CAUTIOUS:
        s0 = s0 + c[4] * (g - s0)
        u = s0
    elif RULE == LION or RULE == LION_CAUTIOUS:
        p, g = _decay(p, g, c)
        u = s0 + c[3] * (g - s0)
        s0 = s0 + c[4] * (g - s0)
    else:
        p, g = _decay(p, g, c)
        s0 = c[2] * s0 + c[3] * g * g
        v = s0
        if RULE == RMSPROP_CENTERED:
            s1 = s1 + c[3] * (g - s1)
            v = _at_least(v - s1 * s1, 0.0)  # a constant gradient has no variance, whatever the rounding
        elif RULE == RMSPROP_CENTERED_MOMENTUM or RULE == RMSPROP_CENTERED_MOMENTUM_CAUTIOUS:
            s2 = s2 + c[3] * (g - s2)
            v = _at_least(v - s2 * s2, 0.0)
        u = c[7] * g / (tl.sqrt_rn(v + c[5]) + c[4])
        if RULE != RMSPROP and RULE != RMSPROP_CENTERED:
            s1 = c[6] * s1 + u
            u = s1
    return p, g, u, s0, s1, s2


@triton.jit
def _squares(p, g, s0, s1, s2, c, k, RULE: tl.constexpr):
    """What a rule sums over a parameter."""
    none = tl.zeros_like(g)
    if RULE == LAMB or RULE == LAMB_CAUTIOUS:
        p = p * c[0]
        u = _lamb_direction(g, s0, s1, c, k, RULE)
        if RULE == LAMB_CAUTIOUS:
            return p * p, u * u, u * p, _agreeing(u, g)
        else:
            u = _decayed(u, p, c)
            return p * p, u * u, none, none
    elif RULE == NOVOGRAD or RULE == NOVOGRAD_AMSGRAD:
        return g * g, none, none, none
    else:
        p, g, u, s0, s1, s2 = _direction_of(p, g, s0, s1, s2, c, RULE)
        return _agreeing(u, g), none, none, none


@triton.jit
def _agreeing(u, g):
    """1 where a direction points as the gradient does, else 0."""
    return tl.where(u * g > 0.0, 1.0, 0.0)


@triton.jit
def _update(p, g, s0, s1, s2, s3, c, k, RULE: tl.constexpr):
    """The new parameter and states."""
    if RULE == ADAM or RULE == AMSGRAD:
        p, g = _decay(p, g, c)
        s0 = s0 + c[2] * (g - s0)
        s1 = c[3] * s1 + c[4] * g * g
        v = s1
        if RULE == AMSGRAD:
            v = _at_least(s1, s2)
            s2 = v
        p = p - k[0] * (s0 / (tl.sqrt_rn(v) * k[1] + c[8]))
    elif RULE == SGD:
        p, g = _decay(p, g, c)
        p = p - c[2] * g
    elif RULE == MOMENTUM:
        p, g = _decay(p, g, c)
        s0 = c[3] * s0 + c[4] * g
        p = p - c[2] * tl.where(c[5] != 0.0, g + c[3] * s0, s0)
    elif RULE == LION or RULE == LION_CAUTIOUS:
        p, g, u, s0, s1, s2 = _direction_of(p, g, s0, s1, s2, c, RULE)
        step = c[2]
        if RULE == LION_CAUTIOUS:
            step = c[2] * k[0]
            u = u * _agreeing(u, g)
        p = p - tl.where(u > 0.0, step, tl.where(u < 0.0, -step, 0.0))  # sign(NaN) = 0, as in torch
    elif RULE == ADAN or RULE == ADAN_CAUTIOUS:
        difference = tl.where(s3 == s3, s3 + g, 0.0)
        p, g, u, s0, s1, s2 = _direction_of(p, g, s0, s1, s2, c, RULE)
        s2 = c[6] * s2 + c[7] * difference
        ahead = g + c[6] * difference
        s1 = c[9] * s1 + c[10] * ahead * ahead
        s3 = -g
        if RULE == ADAN_CAUTIOUS:
            u = u * _agreeing(u, g)
        u = (k[0] * u + k[1] * s2) / (tl.sqrt_rn(s1) * k[2] + c[12])
        p = (p * c[0] - u) * c[1]
    elif RULE == LAMB or RULE == LAMB_CAUTIOUS:
        p = p * c[0]
        p = p - k[2] * _decayed(_lamb_direction(g, s0, s1, c, k, RULE), p, c)
    elif RULE == NOVOGRAD or RULE == NOVOGRAD_AMSGRAD:
        p, u = _decay(p, g * k[0], c)
        s0 = c[3] * s0 + c[4] * u
        p = p - c[2] * s0
    else:
        p, g, u, s0, s1, s2 = _direction_of(p, g, s0, s1, s2, c, RULE)
        if RULE == RMSPROP_MOMENTUM_CAUTIOUS or RULE == RMSPROP_CENTERED_MOMENTUM_CAUTIOUS:
            u = u * _agreeing(u, g) * k[0]
        p = p - c[8] * u
    return p, s0, s1, s2, s3


@triton.jit
def _factor(norm_ptr, grad_scale_ptr, max_norm, clip_eps, MAXIMIZE: tl.constexpr):
    """The factor on the gradients: csrc/optimizer_step.h's grad_factor."""
    scale = tl.full([], 1.0, tl.float64)
    if grad_scale_ptr is not None:
        scale = tl.load(grad_scale_ptr).to(tl.float64)
    factor = (-1.0 if MAXIMIZE else 1.0) / scale
    if norm_ptr is not None:
        clip = max_norm / (tl.load(norm_ptr) / scale + clip_eps)
        factor *= tl.where(clip > 1.0, 1.0, clip)  # a norm that is NaN makes the gradients NaN
    return factor.to(tl.float32)


@triton.jit
def _runs(norm_ptr, found_inf_ptr, SKIP: tl.constexpr):
    """False where the step is skipped."""
    runs = tl.full([], True, tl.int1)
    if found_inf_ptr is not None:
        runs &= tl.load(found_inf_ptr) == 0.0
    if SKIP and norm_ptr is not None:
        norm = tl.load(norm_ptr)
        runs &= norm - norm == 0.0
    return runs


@triton.jit
def _step(table_ptr, count, row, COUNTS: tl.constexpr):
    step = tl.full([], 1.0, tl.float64)
    if COUNTS:
        step += tl.load(_number(table_ptr, count, row, STEP)).to(tl.float64)
    return step


@triton.jit
def _state(table_ptr, count, row, K: tl.constexpr, STATES: tl.constexpr, like_ptr, state_ptr, VEC: tl.constexpr):
    """The address of state K; of the gradient, which is there, where the rule has no such state."""
    if K < STATES:
        return _lists.pointer(table_ptr, count, row, STATE + K, state_ptr, VEC)
    else:
        return _lists.pointer(table_ptr, count, row, GRAD, like_ptr, VEC)


@triton.jit
def _number(table_ptr, count, row, COLUMN: tl.constexpr):
    return _lists.entry(table_ptr, count, row, COLUMN).to(tl.pointer_type(tl.float32))


@triton.jit
def _pointers(table_ptr, count, row, like_ptr, state_ptr, STATES: tl.constexpr, KEPT: tl.constexpr, VEC: tl.constexpr):
    """The addresses of parameter, gradient, states, their scales, and what is kept beside the parameter."""
    exact = _lists.entry(table_ptr, count, row, EXACT)
    exact_ptr = exact.to(tl.pointer_type(tl.float32)) if KEPT == MASTER else exact.to(like_ptr.dtype)
    return (
        _lists.pointer(table_ptr, count, row, PARAM, like_ptr, VEC),
        _lists.pointer(table_ptr, count, row, GRAD, like_ptr, VEC),
        _state(table_ptr, count, row, 0, STATES, like_ptr, state_ptr, VEC),
        _state(table_ptr, count, row, 1, STATES, like_ptr, state_ptr, VEC),
        _state(table_ptr, count, row, 2, STATES, like_ptr, state_ptr, VEC),
        _state(table_ptr, count, row, 3, STATES, like_ptr, state_ptr, VEC),
        _number(table_ptr, count, row, SCALE),
        _number(table_ptr, count, row, SCALE + 1),
        _number(table_ptr, count, row, SCALE + 2),
        _number(table_ptr, count, row, SCALE + 3),
        tl.multiple_of(exact_ptr, 16) if VEC > 1 else exact_ptr,
    )


@triton.jit
def _load_param(pointers, at, mask, KEPT: tl.constexpr):
    p = _narrow.widen(tl.load(pointers[0] + at, mask=mask, other=0.0))
    if KEPT:
        kept = _narrow.widen(tl.load(pointers[10] + at, mask=mask, other=0.0))
        if KEPT == KAHAN:
            p += kept
        else:  # a parameter that was set by hand since counts, not what it was before
            same = _narrow.widen(_narrow.to_nearest(kept, pointers[0].dtype.element_ty)) == p
            p = tl.where(same, kept, p)
    return p


@triton.jit
def _load_state(pointers, at, mask, K: tl.constexpr, STATES: tl.constexpr, SQUARES: tl.constexpr):
    s = 0.0
    if K < STATES:
        s = _narrow.load(pointers[2 + K], pointers[6 + K], at, mask, (SQUARES >> K & 1) == 0)
    return s


@triton.jit
def _store_state(
    pointers,
    at,
    s,
    mask,
    key,
    K: tl.constexpr,
    STATES: tl.constexpr,
    SQUARES: tl.constexpr,
    NARROW: tl.constexpr,
    RANDOM: tl.constexpr,
):
    if K < STATES:
        if NARROW:
            signed: tl.constexpr = (SQUARES >> K & 1) == 0
            _narrow.store(pointers[2 + K], pointers[6 + K], at, s, mask, key, K, signed, RANDOM)
        else:
            tl.store(pointers[2 + K] + at, s.to(pointers[2 + K].dtype.element_ty), mask=mask)


@triton.jit
def _first_pass(
    pointers,
    at,
    inside,
    factor,
    c,
    k,
    RULE: tl.constexpr,
    STATES: tl.constexpr,
    SQUARES: tl.constexpr,
    KEPT: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Renews the states of some elements where the rule wants that now; returns what is to be summed."""
    p = _load_param(pointers, at, inside, KEPT)
    g = tl.load(pointers[1] + at, mask=inside, other=0.0).to(tl.float32) * factor
    s0 = _load_state(pointers, at, inside, 0, STATES, SQUARES)
    s1 = _load_state(pointers, at, inside, 1, STATES, SQUARES)
    if RULE == LAMB or RULE == LAMB_CAUTIOUS:
        s0, s1 = _advance(g, s0, s1, c, RULE)
        if not NARROW:  # else the second pass does that again, and stores
            _store_state(pointers, at, s0, inside, (0, 0), 0, STATES, SQUARES, False, False)
            _store_state(pointers, at, s1, inside, (0, 0), 1, STATES, SQUARES, False, False)
            s0 = s0.to(pointers[2].dtype.element_ty).to(tl.float32)  # as the second pass reads them
            s1 = s1.to(pointers[3].dtype.element_ty).to(tl.float32)
    s2 = _load_state(pointers, at, inside, 2, STATES, SQUARES)
    a, b, d, e = _squares(p, g, s0, s1, s2, c, k, RULE)
    return tl.where(inside, a, 0.0), tl.where(inside, b, 0.0), tl.where(inside, d, 0.0), tl.where(inside, e, 0.0)


@triton.jit
def _step_elements(
    pointers,
    ema_ptr,
    at,
    inside,
    runs,
    factor,
    ema_rate,
    c,
    k,
    key,
    RULE: tl.constexpr,
    STATES: tl.constexpr,
    SQUARES: tl.constexpr,
    KEPT: tl.constexpr,
    NARROW: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    RANDOM: tl.constexpr,
    WITH_EMA: tl.constexpr,
    ZERO_GRADS: tl.constexpr,
):
    there, inside = inside, inside & runs
    dtype: tl.constexpr = pointers[0].dtype.element_ty
    p = _load_param(pointers, at, inside, KEPT)
    g = tl.load(pointers[1] + at, mask=inside, other=0.0).to(tl.float32) * factor
    s0 = _load_state(pointers, at, inside, 0, STATES, SQUARES)
    s1 = _load_state(pointers, at, inside, 1, STATES, SQUARES)
    s2 = _load_state(pointers, at, inside, 2, STATES, SQUARES)
    s3 = _load_state(pointers, at, inside, 3, STATES, SQUARES)
    if NARROW:
        s0, s1 = _advance(g, s0, s1, c, RULE)
    p, s0, s1, s2, s3 = _update(p, g, s0, s1, s2, s3, c, k, RULE)
    stored = _narrow.round_to(p, key, at, _narrow.PARAM_USE, dtype, STOCHASTIC) if NARROW else p.to(dtype)
    tl.store(pointers[0] + at, stored, mask=inside)
    if (RULE != LAMB and RULE != LAMB_CAUTIOUS) or NARROW:  # else its first pass has done that
        _store_state(pointers, at, s0, inside, key, 0, STATES, SQUARES, NARROW, RANDOM)
        _store_state(pointers, at, s1, inside, key, 1, STATES, SQUARES, NARROW, RANDOM)
        _store_state(pointers, at, s2, inside, key, 2, STATES, SQUARES, NARROW, RANDOM)
        _store_state(pointers, at, s3, inside, key, 3, STATES, SQUARES, NARROW, RANDOM)
    if KEPT == KAHAN:
        tl.store(pointers[10] + at, _narrow.to_nearest(p - _narrow.widen(stored), dtype), mask=inside)
    elif KEPT == MASTER:
        tl.store(pointers[10] + at, p, mask=inside)
    if WITH_EMA:
        if KEPT != MASTER:
            p = _narrow.widen(stored)
        mean = tl.load(ema_ptr + at, mask=inside, other=0.0)
        tl.store(ema_ptr + at, mean + ema_rate * (p - mean), mask=inside)
    if ZERO_GRADS:
        tl.store(pointers[1] + at, tl.zeros_like(g).to(dtype), mask=there)


@triton.jit
def optimizer_step_norms_kernel(
    like_ptr,  # a parameter
    state_ptr,  # a state
    table_ptr,
    partial_ptr,  # [4, programs]
    norm_ptr,  # [1] or None
    grad_scale_ptr,  # [1] or None
    found_inf_ptr,  # [1] or None
    count,
    programs,
    max_norm,
    clip_eps,
    c,
    first_program,
    RULE: tl.constexpr,
    STATES: tl.constexpr,
    SQUARES: tl.constexpr,
    COUNTS: tl.constexpr,
    KEPT: tl.constexpr,
    NARROW: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    SKIP: tl.constexpr,
    VEC: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid, row, begin, end = _lists.program(table_ptr, count, first_program, COLUMNS, CHUNK)
    pointers = _pointers(table_ptr, count, row, like_ptr, state_ptr, STATES, KEPT, VEC)
    factor = _factor(norm_ptr, grad_scale_ptr, max_norm, clip_eps, MAXIMIZE)
    runs = _runs(norm_ptr, found_inf_ptr, SKIP)
    one = tl.full([], 1.0, tl.float64)
    k = _constants(c, _step(table_ptr, count, row, COUNTS), (one, one), RULE)
    none = tl.zeros([BLOCK], tl.float32)
    sums = none, none, none, none
    whole = end // VEC * VEC  # so the mask leaves loads 16 bytes wide
    for start in range(begin, whole, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = (at < whole) & runs
        sums = _plus(sums, _first_pass(pointers, at, mask, factor, c, k, RULE, STATES, SQUARES, KEPT, NARROW))
    sums = _totals(sums)
    if VEC > 1:
        at = whole + tl.arange(0, VEC)
        mask = (at < end) & runs
        rest = _first_pass(pointers, at, mask, factor, c, k, RULE, STATES, SQUARES, KEPT, NARROW)
        sums = _plus(sums, _totals(rest))
    tl.store(partial_ptr + pid, sums[0])
    tl.store(partial_ptr + programs + pid, sums[1])
    tl.store(partial_ptr + 2 * programs + pid, sums[2])
    tl.store(partial_ptr + 3 * programs + pid, sums[3])


@triton.jit
def _plus(a, b):
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


@triton.jit
def _totals(a):
    a = a[0].to(tl.float64), a[1].to(tl.float64), a[2].to(tl.float64), a[3].to(tl.float64)
    return tl.sum(a[0]), tl.sum(a[1]), tl.sum(a[2]), tl.sum(a[3])


@triton.jit
def _row_sums(table_ptr, partial_ptr, count, programs, row, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    begin = _lists.entry(table_ptr, count, row, _lists.FIRST)
    end = begin + tl.cdiv(_lists.entry(table_ptr, count, row, _lists.NUMEL), CHUNK)
    none = tl.zeros([BLOCK], tl.float64)
    sums = none, none, none, none
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask, at_ptr = at < end, partial_ptr + at
        more = (
            tl.load(at_ptr, mask=mask, other=0.0),
            tl.load(at_ptr + programs, mask=mask, other=0.0),
            tl.load(at_ptr + 2 * programs, mask=mask, other=0.0),
            tl.load(at_ptr + 3 * programs, mask=mask, other=0.0),
        )
        sums = _plus(sums, more)
    return _totals(sums)


@triton.jit
def _over_share(agreeing, numel):
    share = agreeing / tl.where(numel > 0.0, numel, 1.0)
    return 1.0 / tl.where(share > 1e-3, share, 1e-3)


@triton.jit
def _ratio(table_ptr, count, row, sums, numel, runs, c, RULE: tl.constexpr, SHARE: tl.constexpr):
    """The factors on step and direction that a rule makes of the sums over one parameter."""
    step, ratio = tl.full([], 1.0, tl.float64), tl.full([], 1.0, tl.float64)
    if RULE == LAMB or RULE == LAMB_CAUTIOUS:
        square = sums[1]
        if RULE == LAMB_CAUTIOUS:
            ratio = _over_share(sums[3], numel)
            square = ratio * ratio * sums[1] + 2.0 * ratio * c[1] * sums[2] + c[1] * c[1] * sums[0]
        usable = (c[10] != 0.0) & (sums[0] > 0.0) & (square > 0.0)
        step = tl.where(usable, tl.sqrt(sums[0]) / tl.sqrt(tl.where(usable, square, 1.0)), 1.0)
        step = tl.where((c[11] != 0.0) & (step > 1.0), 1.0, step)
    elif SHARE:
        ratio = _over_share(sums[0], numel)
    else:
        v_ptr = _number(table_ptr, count, row, SCALAR)
        v = tl.load(v_ptr)
        v = tl.where(v == 0.0, sums[0], c[5] * v.to(tl.float64) + c[6] * sums[0]).to(tl.float32)
        tl.store(v_ptr, v, mask=runs)
        if RULE == NOVOGRAD_AMSGRAD:
            top_ptr = _number(table_ptr, count, row, SCALAR + 1)
            top = tl.load(top_ptr)
            v = tl.where(top > v, top, v)
            tl.store(top_ptr, v, mask=runs)
        ratio = 1.0 / (tl.sqrt(v.to(tl.float64)) + c[7])
    return step, ratio


@triton.jit
def optimizer_step_ratio_kernel(
    table_ptr,
    partial_ptr,  # [4, programs]
    ratio_ptr,  # [count, 2]
    sums_ptr,  # [count, 5] or None
    norm_ptr,  # [1] or None
    found_inf_ptr,  # [1] or None
    count,
    programs,
    c,
    RULE: tl.constexpr,
    SKIP: tl.constexpr,
    GIVEN: tl.constexpr,
    SHARE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    runs = _runs(norm_ptr, found_inf_ptr, SKIP)
    own_ptr = sums_ptr
    if GIVEN:
        own_ptr = sums_ptr + 5 * row
        sums = tl.load(own_ptr), tl.load(own_ptr + 1), tl.load(own_ptr + 2), tl.load(own_ptr + 3)
        numel = tl.load(own_ptr + (4 if RULE == LAMB_CAUTIOUS else 1))
    else:
        sums = _row_sums(table_ptr, partial_ptr, count, programs, row, CHUNK, BLOCK)
        numel = _lists.entry(table_ptr, count, row, _lists.NUMEL).to(tl.float64)
    if sums_ptr is not None and not GIVEN:  # the rest is left to another call
        own_ptr = sums_ptr + 5 * row
        tl.store(own_ptr, sums[0], mask=runs)
        tl.store(own_ptr + 1, numel if SHARE and RULE != LAMB_CAUTIOUS else sums[1], mask=runs)
        tl.store(own_ptr + 2, sums[2], mask=runs)
        tl.store(own_ptr + 3, sums[3], mask=runs)
        tl.store(own_ptr + 4, numel, mask=runs)
    else:
        step, direction = _ratio(table_ptr, count, row, sums, numel, runs, c, RULE, SHARE)
        tl.store(ratio_ptr + 2 * row, step)
        tl.store(ratio_ptr + 2 * row + 1, direction)


@triton.jit
def optimizer_step_kernel(
    like_ptr,  # a parameter
    state_ptr,  # a state
    table_ptr,
    ratio_ptr,  # [count, 2] or None
    norm_ptr,  # [1] or None
    grad_scale_ptr,  # [1] or None
    found_inf_ptr,  # [1] or None
    count,
    max_norm,
    clip_eps,
    ema_rate,
    c,
    first_program,
    RULE: tl.constexpr,
    STATES: tl.constexpr,
    SQUARES: tl.constexpr,
    COUNTS: tl.constexpr,
    KEPT: tl.constexpr,
    NARROW: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    RANDOM: tl.constexpr,
    WITH_EMA: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    SKIP: tl.constexpr,
    ZERO_GRADS: tl.constexpr,
    VEC: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _, row, begin, end = _lists.program(table_ptr, count, first_program, COLUMNS, CHUNK)
    pointers = _pointers(table_ptr, count, row, like_ptr, state_ptr, STATES, KEPT, VEC)
    ema_ptr = _number(table_ptr, count, row, EMA)
    if VEC > 1:
        ema_ptr = tl.multiple_of(ema_ptr, 16)
    factor = _factor(norm_ptr, grad_scale_ptr, max_norm, clip_eps, MAXIMIZE)
    runs = _runs(norm_ptr, found_inf_ptr, SKIP)
    one = tl.full([], 1.0, tl.float64)
    ratio = one, one
    if ratio_ptr is not None:
        ratio = tl.load(ratio_ptr + 2 * row), tl.load(ratio_ptr + 2 * row + 1)
    step = _step(table_ptr, count, row, COUNTS)
    k = _constants(c, step, ratio, RULE)
    key = _narrow.key(_lists.entry(table_ptr, count, row, STREAM), step if COUNTS else step - 1.0)
    # Up to here the mask leaves loads and stores 16 bytes wide, and blocks of codes whole.
    UNIT: tl.constexpr = _narrow.CODES if NARROW else VEC
    whole = end // UNIT * UNIT
    for start in range(begin, whole, BLOCK):
        at = start + tl.arange(0, BLOCK)
        _step_elements(
            *(pointers, ema_ptr, at, at < whole, runs, factor, ema_rate, c, k, key, RULE, STATES, SQUARES),
            *(KEPT, NARROW, STOCHASTIC, RANDOM, WITH_EMA, ZERO_GRADS),
        )
    if UNIT > 1:
        at = whole + tl.arange(0, UNIT)
        _step_elements(
            *(pointers, ema_ptr, at, at < end, runs, factor, ema_rate, c, k, key, RULE, STATES, SQUARES),
            *(KEPT, NARROW, STOCHASTIC, RANDOM, WITH_EMA, ZERO_GRADS),
        )


@triton.jit
def optimizer_step_count_kernel(
    table_ptr,
    norm_ptr,  # [1] or None
    found_inf_ptr,  # [1] or None
    count,
    SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    address = tl.load(table_ptr + COUNTED * count + row, mask=row < count, other=0)
    step_ptr = address.to(tl.pointer_type(tl.float32))
    mask = (address != 0) & _runs(norm_ptr, found_inf_ptr, SKIP)
    tl.store(step_ptr, tl.load(step_ptr, mask=mask, other=0.0) + 1.0, mask=mask)


def _check(params, grads, states, ema, exact, scales, kept: int, narrow: bool) -> None:
    count, stored = len(params), (torch.float32, torch.bfloat16, torch.uint8) if narrow else ()
    for i, p in enumerate(params):
        own, state = states[i::count], states[i].dtype if states and states[i].dtype in stored else p.dtype
        wanted = [("grads", grads[i], p.dtype), *(("states", t, state) for t in own)]
        wanted += [("ema", t, torch.float32) for t in ema[i : i + 1]]
        wanted += [("exact", t, torch.float32 if kept == MASTER else p.dtype) for t in exact[i : i + 1] if t.numel()]
        for name, t, dtype in wanted:
            if t.dtype != dtype or t.shape != p.shape or t.device != p.device or not _same_strides(t, p):
                raise RuntimeError(f"fusedtrain: {name} must have the shapes, dtypes, strides and device of params")
        if not _common.is_dense(p):
            raise RuntimeError("fusedtrain: params must be dense tensors")
        size = blocks(p.numel())
        for scale in (scales[i::count] or [None] * len(own)) if state == torch.uint8 else ():
            if scale is None or (scale.shape, scale.dtype, scale.device) != ((size,), torch.float32, p.device):
                raise RuntimeError(f"fusedtrain: scales must be {size} float32 numbers on the device of params")


def _same_strides(t: Tensor, p: Tensor) -> bool:
    return t.stride() == p.stride() or all(
        own == other or size == 1 for own, other, size in zip(t.stride(), p.stride(), p.shape)
    )


class _Kind(NamedTuple):
    """How a tensor and what belongs to it are stored: what the kernels are compiled for."""

    param: torch.dtype
    state: torch.dtype
    kept: int

    def flags(self, plain: bool) -> dict:
        narrow = self.kept > 0 or self.state != self.param or (self.param in ROUNDED and not plain)
        return {"KEPT": self.kept, "NARROW": narrow}


def optimizer_step_(params, grads, states, steps, ema, *options) -> None:
    options, narrow = options[: len(Options._fields)], options[len(Options._fields) :]
    o, (exact, scales, rounding, seed) = Options(*options), narrow or PLAIN
    name, count = _codes.RULES[o.rule], len(params)
    names, mode = RULES[name].states, _codes.ROUNDINGS[rounding]
    elementwise = len(names)
    kept = int(KAHAN if mode == "kahan" else MASTER)
    _check(params, grads, states[: elementwise * count], ema, exact, scales, kept, bool(narrow))

    def columns(tensors, width: int) -> list:  # some are empty
        return [tensors[k * count : (k + 1) * count] for k in range(width)]

    by_name = columns(states, MAX_STATES + MAX_SCALARS)
    kinds = [
        _Kind(p.dtype, states[i].dtype if elementwise else p.dtype, kept if exact and exact[i].numel() else 0)
        for i, p in enumerate(params)
    ]
    order = _lists.sort(kinds)
    kinds = [kinds[i] for i in order]
    tensors = (params, grads, *by_name[:elementwise], *[()] * (MAX_STATES - elementwise), ema, exact)
    counted = [step if i == 0 or step is not steps[i - 1] else None for i, step in enumerate(steps)]
    streams = [_signed(stream(seed, i)) for i in range(count)] if seed is not None else ()
    own = columns(scales, MAX_STATES), (streams,), by_name[elementwise : elementwise + MAX_SCALARS], (steps, counted)
    numbers = [column for group in own for column in group]
    sort = ([[c[i] if c else None for i in order] for c in group] for group in (tensors, numbers))
    table = _lists.table(*sort, kinds)
    lr = o.lr if o.device_lr is None else float(o.device_lr)
    c = _numbers(name, lr, o.weight_decay, o.decoupled, o.coefficients)
    clip = {"max_norm": o.max_norm, "clip_eps": 0.0 if name.startswith("lamb") else 1e-6, "MAXIMIZE": o.maximize}
    flags = {"c": c, "RULE": o.rule, "SKIP": o.skip_nonfinite}
    squares = sum(1 << k for k, state in enumerate(names) if not is_signed(state))
    own = {"STATES": elementwise, "SQUARES": squares, "COUNTS": bool(steps)}
    extras = {"ema_rate": 1.0 - o.ema_decay, "WITH_EMA": bool(ema), "ZERO_GRADS": o.zero_grads}
    extras |= {"STOCHASTIC": mode == "stochastic", "RANDOM": seed is not None}
    ratio, sums_given = None, o.sums is not None and not o.sums_only
    with _images.on_device(params[0]):
        if name in SUMMED:
            sums = None if o.sums is None else o.sums[order]
            shapes = (4, table.programs), (count, 2)
            partial, ratio = (params[0].new_empty(shape, dtype=torch.float64) for shape in shapes)
            for launch in [] if sums_given else table.launches:
                optimizer_step_norms_kernel[(launch.programs,)](
                    launch.like,
                    states[order[launch.row]],
                    table.tensor,
                    partial,
                    o.norm,
                    o.grad_scale,
                    o.found_inf,
                    count,
                    table.programs,
                    **clip,
                    **flags,
                    **own,
                    **kinds[launch.row].flags(mode == "nearest" and seed is None),
                    **launch.arguments,
                )
            optimizer_step_ratio_kernel[(count,)](
                table.tensor,
                partial,
                ratio,
                sums,
                o.norm,
                o.found_inf,
                count,
                table.programs,
                **flags,
                GIVEN=sums_given,
                SHARE=name.endswith("_cautious"),
                CHUNK=_lists.CHUNK,
                BLOCK=RATIO_BLOCK,
                **_lists.OPTIONS,
            )
            if o.sums_only:
                o.sums[order] = sums
                return
        for launch in table.launches:
            optimizer_step_kernel[(launch.programs,)](
                launch.like,
                states[order[launch.row]] if elementwise else launch.like,
                table.tensor,
                ratio,
                o.norm,
                o.grad_scale,
                o.found_inf,
                count,
                **clip,
                **flags,
                **own,
                **extras,
                **kinds[launch.row].flags(mode == "nearest" and seed is None),
                **launch.arguments,
            )
        if steps:
            optimizer_step_count_kernel[(triton.cdiv(count, COUNT_BLOCK),)](
                table.tensor, o.norm, o.found_inf, count, SKIP=o.skip_nonfinite, BLOCK=COUNT_BLOCK, **_lists.OPTIONS
            )


optimizer_step_narrow_ = optimizer_step_  # with more arguments


def _signed(word: int) -> int:
    return word - (word >> 63 << 64)

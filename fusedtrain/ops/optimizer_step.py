r"""optimizer_step: clipping, unscaling, update, averaging and zeroing for a list of parameters, in one pass.

.. math::
    f = \min\Big(1, \frac{c}{\lVert g \rVert / s + 10^{-6}}\Big) / s, \quad
    (p, \text{states}) \leftarrow \mathrm{rule}(p, f g, \text{states}), \quad
    e \leftarrow e + (1 - d)(p - e)
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fusedtrain.backend import Impl, register, select
from fusedtrain.ops import _codes, _common, _schema
from fusedtrain.ops._narrow import PARAM_USE, ROUNDED, decode, encode_, random_bits, round_


class Rule(NamedTuple):
    """What a rule takes: states like the parameter, then states that are one number each, coefficients, step counts."""

    states: tuple[str, ...]
    coefficients: tuple[str, ...]
    counts: bool = False
    scalars: tuple[str, ...] = ()


_ADAM, _BETAS = ("exp_avg", "exp_avg_sq"), ("beta1", "beta2", "eps")
_RMSPROP = ("alpha", "eps", "eps_in_root", "momentum", "lr_in_momentum")
RULES = {
    "adam": Rule(_ADAM, _BETAS, counts=True),
    "amsgrad": Rule((*_ADAM, "max_exp_avg_sq"), _BETAS, counts=True),
    "sgd": Rule((), ()),
    "momentum": Rule(("momentum_buffer",), ("momentum", "dampening", "nesterov")),
    "lion": Rule(("exp_avg",), ("beta1", "beta2")),
    "rmsprop": Rule(("square_avg",), _RMSPROP, counts=True),
    "rmsprop_momentum": Rule(("square_avg", "momentum_buffer"), _RMSPROP, counts=True),
    "rmsprop_centered": Rule(("square_avg", "grad_avg"), _RMSPROP, counts=True),
    "rmsprop_centered_momentum": Rule(("square_avg", "momentum_buffer", "grad_avg"), _RMSPROP, counts=True),
    "adan": Rule((*_ADAM, "exp_avg_diff", "neg_pre_grad"), ("beta1", "beta2", "beta3", "eps"), counts=True),
    "lamb": Rule(_ADAM, (*_BETAS, "grad_rate", "bias_correction", "trust_ratio", "trust_clip"), counts=True),
    "novograd": Rule(("exp_avg",), (*_BETAS, "grad_rate"), counts=True, scalars=("exp_avg_sq",)),
    "novograd_amsgrad": Rule(
        ("exp_avg",), (*_BETAS, "grad_rate"), counts=True, scalars=("exp_avg_sq", "max_exp_avg_sq")
    ),
}
CAUTIOUS = ("lion", "rmsprop_momentum", "rmsprop_centered_momentum", "adan", "lamb")
RULES |= {f"{rule}_cautious": RULES[rule] for rule in CAUTIOUS}


SUMS = 5  # over a parameter, at most: csrc/core/update_rule.h


def is_signed(state: str) -> bool:
    """False for second moments."""
    return not state.endswith(("exp_avg_sq", "square_avg"))


class Options(NamedTuple):
    """What a step takes beside its tensors, in the order of the operators' schemas; see :func:`optimizer_step_`."""

    rule: int
    lr: float
    weight_decay: float = 0.0
    decoupled: bool = False
    coefficients: Sequence[float] = ()
    maximize: bool = False
    ema_decay: float = 0.0
    zero_grads: bool = False
    norm: Tensor | None = None
    max_norm: float = float("inf")
    skip_nonfinite: bool = False
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    device_lr: Tensor | None = None
    sums: Tensor | None = None
    sums_only: bool = False

    @classmethod
    def of(cls, rule: str, lr: float | Tensor, **others) -> "Options":
        code = _codes.code("rule", rule, _codes.RULES)
        if isinstance(lr, Tensor) and lr.device.type != "cpu":  # nobody waits for it
            return cls(code, float("nan"), device_lr=lr.detach().to(torch.float32), **others)
        return cls(code, float(lr), **others)


PLAIN = ((), (), 0, None)  # exact, scales, rounding, seed


class _Hyper(NamedTuple):
    lr: float | Tensor
    weight_decay: float
    decoupled: bool
    coefficients: Sequence[float]

    def decay(self, p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        if self.weight_decay and self.decoupled:
            return p * (1 - self.lr * self.weight_decay), g
        return p, g + self.weight_decay * p if self.weight_decay else g


# Each takes the parameter, the gradient, the states (a list that it renews), hyperparameters and the step, from 1 on.
def _adam(p: Tensor, g: Tensor, s: list[Tensor], h: _Hyper, step: Tensor) -> Tensor:
    beta1, beta2, eps = h.coefficients
    p, g = h.decay(p, g)
    s[0] = s[0].lerp(g, 1 - beta1)
    s[1] = s[1] * beta2 + (1 - beta2) * g * g
    if len(s) == 3:
        s[2] = torch.maximum(s[2], s[1])
    size, scale = h.lr / (1 - beta1**step), (1 - beta2**step).sqrt()
    return p - size.to(p.dtype) * s[0] / (s[-1].sqrt() / scale.to(p.dtype) + eps)


def _sgd(p: Tensor, g: Tensor, s: list[Tensor], h: _Hyper, step: Tensor) -> Tensor:
    p, g = h.decay(p, g)
    return p - h.lr * g


def _momentum(p: Tensor, g: Tensor, s: list[Tensor], h: _Hyper, step: Tensor) -> Tensor:
    momentum, dampening, nesterov = h.coefficients
    p, g = h.decay(p, g)
    s[0] = momentum * s[0] + (1 - dampening) * g
    return p - h.lr * (g + momentum * s[0] if nesterov else s[0])


def _as_it_is(u: Tensor, g: Tensor) -> Tensor:
    return u


def _lion(p: Tensor, g: Tensor, s: list[Tensor], h: _Hyper, step: Tensor, caution=_as_it_is) -> Tensor:
    beta1, beta2 = h.coefficients
    p, g = h.decay(p, g)
    update = caution(s[0].lerp(g, 1 - beta1).sign(), g)
    s[0] = s[0].lerp(g, 1 - beta2)
    return p - h.lr * update


def _rmsprop(
    p: Tensor, g: Tensor, s: list[Tensor], h: _Hyper, step: Tensor, momentum=False, centered=False, caution=_as_it_is
) -> Tensor:
    alpha, eps, eps_in_root, rate, lr_in_momentum = h.coefficients
    p, g = h.decay(p, g)
    v = s[0] = alpha * s[0] + (1 - alpha) * g * g
    if centered:
        s[-1] = s[-1].lerp(g, 1 - alpha)
        v = (v - s[-1] * s[-1]).clamp(min=0.0)
    u = g / ((v + eps).sqrt() if eps_in_root else v.sqrt() + eps)
    if not momentum:
        return p - h.lr * u
    s[1] = rate * s[1] + (h.lr * u if lr_in_momentum else u)
    return p - caution(s[1], g) * (1 if lr_in_momentum else h.lr)


def _adan(p: Tensor, g: Tensor, s: list[Tensor], h: _Hyper, step: Tensor, caution=_as_it_is) -> Tensor:
    beta1, beta2, beta3, eps = h.coefficients
    difference = torch.where(s[3].isnan(), 0.0, s[3] + g)
    s[0] = s[0].lerp(g, 1 - beta1)
    s[2] = beta2 * s[2] + (1 - beta2) * difference
    ahead = g + beta2 * difference
    s[1] = beta3 * s[1] + (1 - beta3) * ahead * ahead
    s[3] = -g
    size_m, size_d = h.lr / (1 - beta1**step), h.lr * beta2 / (1 - beta2**step)
    scale = (1 - beta3**step).sqrt()
    u = (size_m.to(p.dtype) * caution(s[0], g) + size_d.to(p.dtype) * s[2]) / (s[1].sqrt() / scale.to(p.dtype) + eps)
    decay = h.lr * h.weight_decay
    return p * (1 - decay) - u if h.decoupled else (p - u) / (1 + decay)


def _sums(*terms: Tensor) -> Tensor:
    return torch.nn.functional.pad(torch.stack([t.sum().double() for t in terms]), (0, SUMS - len(terms)))


def _over_share(agreeing: Tensor, numel: Tensor) -> Tensor:
    return 1 / (agreeing / numel).clamp(min=1e-3)


def _lamb_direction(p: Tensor, g: Tensor, s: list[Tensor], h: _Hyper, step: Tensor, cautious: bool) -> tuple:
    """The parameter after decoupled decay, the direction before any, and the weight decay that is not decoupled."""
    beta1, beta2, eps, rate, bias_correction = h.coefficients[:5]
    s[0] = beta1 * s[0] + rate * g
    s[1] = beta2 * s[1] + (1 - beta2) * g * g
    correction, scale = (1 - beta1**step).to(p.dtype), (1 - beta2**step).sqrt().to(p.dtype)
    u = s[0] / correction / (s[1].sqrt() / scale + eps) if bias_correction else s[0] / (s[1].sqrt() + eps)
    u = u * (u * g > 0) if cautious else u
    return (p * (1 - h.lr * h.weight_decay), u, 0.0) if h.decoupled else (p, u, h.weight_decay)


def _lamb_sums(p: Tensor, g: Tensor, *others, cautious: bool = False) -> Tensor:
    p, u, l2 = _lamb_direction(p, g, *others, cautious)
    if cautious:
        return _sums(p * p, u * u, u * p, u * g > 0, torch.ones_like(p))
    return _sums(p * p, (u + l2 * p).square())


def _lamb(
    p: Tensor, g: Tensor, s: list[Tensor], h: _Hyper, step: Tensor, sums: Tensor, cautious: bool = False
) -> Tensor:
    trust_ratio, trust_clip = h.coefficients[5:]
    p, u, l2 = _lamb_direction(p, g, s, h, step, cautious)
    square = sums[1]
    if cautious:
        over = _over_share(sums[3], sums[4])
        u, square = over.to(p.dtype) * u, over**2 * sums[1] + 2 * over * l2 * sums[2] + l2**2 * sums[0]
    ratio = (sums[0].sqrt() / square.sqrt()).to(p.dtype)
    ratio = torch.where((sums[0] > 0) & (square > 0), ratio.clamp(max=1.0) if trust_clip else ratio, 1.0)
    return p - h.lr * (ratio if trust_ratio else 1.0) * (u + l2 * p if l2 else u)


def _novograd_sums(p: Tensor, g: Tensor, *_) -> Tensor:
    return _sums(g.square())


def _novograd(p: Tensor, g: Tensor, s: list[Tensor], h: _Hyper, step: Tensor, sums: Tensor) -> Tensor:
    beta1, beta2, eps, rate = h.coefficients
    norm = sums[0].to(s[1].dtype)
    s[1] = torch.where(s[1] == 0, norm, beta2 * s[1] + (1 - beta2) * norm)
    if len(s) == 3:
        s[2] = torch.maximum(s[2], s[1])
    p, u = h.decay(p, g / (s[-1].sqrt() + eps).to(p.dtype))
    s[0] = beta1 * s[0] + rate * u
    return p - h.lr * s[0]


def _share_of(function: Callable) -> Callable:
    """How many elements of a rule's direction have the sign of the gradient, and of how many."""

    def sums(*arguments) -> Tensor:
        found = []
        function(*arguments, caution=lambda u, g: found.append(u * g > 0) or u)
        return _sums(found[0], torch.ones_like(found[0]))

    return sums


def _cautious(function: Callable) -> Callable:
    """The rule without those elements of its direction, see csrc/core/update_rule.h."""

    def rule(*arguments) -> Tensor:
        *arguments, sums = arguments
        over = _over_share(*sums[:2])
        return function(*arguments, caution=lambda u, g: u * ((u * g > 0).to(u.dtype) * over.to(u.dtype)))

    return rule


# Of the rules that need sums over the whole parameter first.
SUMMED = {"lamb": _lamb_sums, "novograd": _novograd_sums, "novograd_amsgrad": _novograd_sums}
_FUNCTIONS = {
    "adam": _adam,
    "amsgrad": _adam,
    "sgd": _sgd,
    "momentum": _momentum,
    "lion": _lion,
    "rmsprop": _rmsprop,
    "rmsprop_momentum": partial(_rmsprop, momentum=True),
    "rmsprop_centered": partial(_rmsprop, centered=True),
    "rmsprop_centered_momentum": partial(_rmsprop, momentum=True, centered=True),
    "adan": _adan,
    "lamb": _lamb,
    "novograd": _novograd,
    "novograd_amsgrad": _novograd,
}
for _rule in CAUTIOUS[:-1]:
    SUMMED[f"{_rule}_cautious"] = _share_of(_FUNCTIONS[_rule])
    _FUNCTIONS[f"{_rule}_cautious"] = _cautious(_FUNCTIONS[_rule])

SUMMED["lamb_cautious"], _FUNCTIONS["lamb_cautious"] = (partial(f, cautious=True) for f in (_lamb_sums, _lamb))


def _factor_and_skip(o: Options, clip_eps: float) -> tuple[Tensor, bool]:
    scale = torch.ones((), dtype=torch.float64, device="cpu") if o.grad_scale is None else o.grad_scale.double()
    factor, skip = 1.0 / scale, o.found_inf is not None and bool(o.found_inf)
    if o.norm is not None:
        factor = factor * (o.max_norm / (o.norm / scale + clip_eps)).clamp(max=1.0)
        skip = skip or (o.skip_nonfinite and not bool(o.norm.isfinite()))
    return factor, skip


def reference(params, grads, states, steps, ema, *options) -> None:
    *options, exact, scales, rounding, seed = options if len(options) > len(Options._fields) else (*options, *PLAIN)
    o = Options(*options)
    name, count = _codes.RULES[o.rule], len(params)
    names, columns = RULES[name].states, len(RULES[name].states + RULES[name].scalars)
    kahan, stochastic = (_codes.ROUNDINGS[rounding] == mode for mode in ("kahan", "stochastic"))
    clip_eps = 0.0 if name.startswith("lamb") else 1e-6  # clip_grad_norm_ has it, timm's LAMB has not
    factor, skip = _factor_and_skip(o, clip_eps)
    lr = o.lr if o.device_lr is None else o.device_lr.double()
    hyper = _Hyper(lr, o.weight_decay, o.decoupled, o.coefficients)
    for i, p in enumerate(params):
        if not skip:
            acc = _common.acc_dtype(p)
            x, own = p.to(acc), [states[k * count + i] for k in range(columns)]
            rest = exact[i] if exact and exact[i].numel() else None
            if rest is not None:  # a parameter that was set by hand since counts, not what it was before
                x = x + rest.to(acc) if kahan else torch.where(rest.to(p.dtype) == p, rest, x)
            g = grads[i].to(acc) * factor.to(acc) * (-1 if o.maximize else 1)
            if steps and not o.sums_only and (i == 0 or steps[i] is not steps[i - 1]):
                steps[i] += 1
            step = steps[i].double() + o.sums_only if steps else None
            coded = [scales[k * count + i] if own[k].dtype == torch.uint8 else None for k in range(columns)]
            s = [
                decode(state, scale, is_signed(names[k])) if scale is not None else state.to(acc)
                for k, (state, scale) in enumerate(zip(own[: len(names)], coded))
            ] + own[len(names) :]
            if name in SUMMED:
                given = o.sums is not None and not o.sums_only
                sums = o.sums[i] if given else SUMMED[name](x, g, list(s), hyper, step)
                if o.sums_only:
                    o.sums[i] = sums
                    continue
                x = _FUNCTIONS[name](x, g, s, hyper, step, sums)
            else:
                x = _FUNCTIONS[name](x, g, s, hyper, step)
            draw = partial(random_bits, p.numel(), seed, int(step) if steps else 0, i, device=p.device)
            round_(p, x, draw(use=PARAM_USE) if stochastic and p.dtype in ROUNDED else None)
            for k, (state, scale, value) in enumerate(zip(own, coded, s)):
                random = draw(use=k) if seed is not None and state.dtype in (*ROUNDED, torch.uint8) else None
                if scale is None:
                    round_(state, value, random)
                else:
                    encode_(state, scale, value, is_signed(names[k]), random)
            if rest is not None:
                rest.copy_(x - p.to(acc) if kahan else x)
            if ema:
                ema[i].lerp_(x if rest is not None and not kahan else p.to(acc), 1 - o.ema_decay)
        if o.zero_grads and not o.sums_only:
            grads[i].zero_()


@_schema.register_fake("optimizer_step_")
def _fake(*_):
    return None


@_schema.register_fake("optimizer_step_narrow_")
def _narrow_fake(*_):
    return None


_OP = torch.ops.fusedtrain.optimizer_step_
IMPLS = register(
    "optimizer_step",
    {
        "cuda": Impl(_OP.default, None, _common.why_not_cuda_lists),
        "cpu": Impl(_OP.default, None, _common.why_not_cpu),
        "triton": Impl(_OP.triton, None, _common.why_not_triton_lists, _common.triton_slower),
        "reference": Impl(reference, None, _common.never_why_not),
    },
)


_NARROW_OP = torch.ops.fusedtrain.optimizer_step_narrow_
NARROW_IMPLS = register(
    "optimizer_step_narrow",
    {
        "cuda": Impl(_NARROW_OP.default, None, _common.why_not_cuda_lists),
        "cpu": Impl(_NARROW_OP.default, None, _common.why_not_cpu),
        "triton": Impl(_NARROW_OP.triton, None, _common.why_not_triton_lists, _common.triton_slower),
        "reference": Impl(reference, None, _common.never_why_not),
    },
)


def optimizer_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    steps: Sequence[Tensor] = (),
    ema: Sequence[Tensor] = (),
    *,
    rule: str,
    lr: float | Tensor,
    exact: Sequence[Tensor] = (),
    scales: Sequence[Tensor] = (),
    rounding: str = "nearest",
    seed: int | None = None,
    **options,
) -> None:
    r"""Takes one step of an optimizer for a list of parameters, in place.

    .. math::
        f = \min\Big(1, \frac{\text{max\_norm}}{\text{norm} / s + 10^{-6}}\Big) / s, \quad
        (p, \text{states}) \leftarrow \mathrm{rule}(p, \pm f g, \text{states}), \quad
        e \leftarrow e + (1 - \text{ema\_decay})(p - e)

    Args:
        params: dense tensors (no gaps, any order of dimensions); float32, bfloat16, float16, float64 or a mixture.
        grads: one for each, with its shape, dtype and strides.
        states: all first states, then all second ones, ..., as ``RULES[rule].states`` names them, each like its
            parameter; then those of ``RULES[rule].scalars``, a float32 number per parameter.
        steps: where ``RULES[rule].counts`` the number of updates so far, a float32 number per parameter; neighbours may
            share one.
        ema: running averages like ``params``, in float32 (float64 for float64), or none.
        rule: a key of ``RULES``.
        lr: learning rate; a number on another device than the CPU is read there, and nobody waits for it but Triton's
            launcher.
        **options: what follows, in any order.
        coefficients: the numbers that ``RULES[rule].coefficients`` names; flags are 0 or 1.
        weight_decay: times the parameter it is added to the gradient; with ``decoupled`` the parameter shrinks by
            ``1 - lr * weight_decay`` instead. Without it "adan" divides by ``1 + lr * weight_decay``.
        maximize: ascend.
        ema_decay: the weight of the old average.
        zero_grads: leaves zeros in ``grads``.
        norm: :func:`grad_norm` of the gradients as they are; without it nothing is clipped.
        max_norm: the largest norm after unscaling; "lamb" clips without the :math:`10^{-6}`, as timm does.
        skip_nonfinite: a ``norm`` that is not finite acts as ``found_inf``.
        grad_scale: the factor :math:`s` on the loss, a float32 number.
        found_inf: a float32 number; other than 0, nothing happens but the zeroing of the gradients.
        exact: none, or one like each parameter and in float32: the number whose rounded copy the parameter is; with
            ``rounding="kahan"`` in the parameter's dtype: what rounding took from it. An empty tensor for a parameter
            that has none.
        rounding: of parameters in bfloat16 and float16: "nearest", "stochastic" or "kahan".
        seed: rounds states in less than float32 stochastically, and parameters where ``rounding`` says so. All states
            of one parameter may then be in float32, bfloat16 or 8 bits (uint8 codes, csrc/core/narrow.h) instead of
            its own dtype, if that is not float64.
        scales: none, or for each of ``states`` (but numbers) what belongs to its codes, a float32 number per 256
            elements; empty tensors for states that are not in 8 bits.
        sums: float64 ``[len(params), SUMS]``, for "lamb", "novograd" and cautious rules: sums over whole parameters of
            which ``params`` are parts, as the calls with ``sums_only`` for all parts have given them, added up.
        sums_only: fills ``sums`` and leaves it at that; "lamb" may renew its states, once.

    Returns:
        None: ``params``, ``states``, ``steps``, ``ema``, ``exact`` and ``scales`` hold the new values, and ``grads``
        zeros with ``zero_grads``. Nothing is kept for backward.

    Raises:
        ValueError: an unknown rule or rounding, or a wrong number of coefficients or tensors, or stochastic rounding
            without seed; ``sums`` for a rule that has none, or ``sums_only`` without them.
        TypeError: an unknown option.
        RuntimeError: a forced backend cannot run; a tensor is not dense, of another dtype or on another device, or
            does not match its parameter. Nothing was changed then.

    Cost: reads and writes parameters, states and averages once, reads the gradients once; no temporaries. "lamb" and
    cautious rules read parameters, gradients and states once more, "novograd" the gradients.
    Numerics: computed in float32 (float64 for float64), one rounding at each store; deterministic, independent of
    threads. Random bits are a function of the seed, the count of steps, the place in the list and the place in memory
    alone.
    Source: the rules as in ``torch.optim`` and timm; each class of :mod:`fusedtrain.optim` names its paper.
    """
    o, info, count = Options.of(rule, lr, **options), RULES[rule], len(params)
    wanted = len(info.coefficients)
    if len(o.coefficients) != wanted:
        raise ValueError(f"optimizer_step_: rule {rule!r} has {wanted} coefficients, got {len(o.coefficients)}")
    if o.sums is not None and rule not in SUMMED:
        raise ValueError(f"optimizer_step_: rule {rule!r} has no sums")
    if o.sums_only and o.sums is None:
        raise ValueError("optimizer_step_: sums_only needs sums to fill")
    counts = (count, len(info.states + info.scalars) * count, count if info.counts else 0)
    mode = _codes.code("rounding", rounding, _codes.ROUNDINGS)
    if rounding == "stochastic" and seed is None:
        raise ValueError("optimizer_step_: rounding='stochastic' needs a seed")
    for argument, tensors, expected in (("exact", exact, count), ("scales", scales, len(info.states) * count)):
        if len(tensors) not in (0, expected):
            raise ValueError(f"optimizer_step_: {argument} must hold none or {expected} tensors, got {len(tensors)}")
    if (len(grads), len(states), len(steps)) != counts or len(ema) not in (0, count):
        raise ValueError(
            f"optimizer_step_: rule {rule!r} takes {counts[0]} grads, {counts[1]} states and {counts[2]} steps"
            f" for {count} params, got {len(grads)}, {len(states)} and {len(steps)}; ema: {len(ema)}"
        )
    if not params:
        return
    _common.check_one_device("optimizer_step_", params, grads, states[: len(info.states) * count], ema, exact)
    if mode or seed is not None or exact or scales:
        impl, own = select("optimizer_step_narrow", NARROW_IMPLS, *params), (exact, scales, mode, seed)
    else:
        impl, own = select("optimizer_step", IMPLS, *params), ()
    if params[0].is_meta:
        return  # no values to read or write
    with torch.no_grad():
        impl.forward(params, grads, states, steps, ema, *o, *own)
    # The operators write behind autograd's back.
    torch.autograd.graph.increment_version([*params, *grads] if o.zero_grads else params)

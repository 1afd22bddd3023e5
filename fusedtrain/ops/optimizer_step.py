r"""optimizer_step: clipping, unscaling, update, averaging and zeroing for a list of parameters, in one pass.

.. math::
    f = \min\Big(1, \frac{c}{\lVert g \rVert / s + 10^{-6}}\Big) / s, \quad
    (p, \text{states}) \leftarrow \mathrm{rule}(p, f g, \text{states}), \quad
    e \leftarrow e + (1 - d)(p - e)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedtrain.backend import Impl, register, select
from fusedtrain.ops import _codes, _common, _schema

# The number of states of each rule: exp_avg, exp_avg_sq, max_exp_avg_sq; -; momentum_buffer; exp_avg.
STATES = {"adam": 2, "amsgrad": 3, "sgd": 0, "momentum": 1, "lion": 1}


def _adam(p: Tensor, g: Tensor, s: list[Tensor], c: Sequence[float], lr: float, step: Tensor) -> Tensor:
    beta1, beta2, eps = c
    s[0] = s[0].lerp(g, 1 - beta1)
    s[1] = s[1] * beta2 + (1 - beta2) * g * g
    if len(s) == 3:
        s[2] = torch.maximum(s[2], s[1])
    step = step.double()
    size, scale = lr / (1 - beta1**step), (1 - beta2**step).sqrt()
    return p - size.to(p.dtype) * s[0] / (s[-1].sqrt() / scale.to(p.dtype) + eps)


def _sgd(p: Tensor, g: Tensor, s: list[Tensor], c: Sequence[float], lr: float, step: Tensor) -> Tensor:
    return p - lr * g


def _momentum(p: Tensor, g: Tensor, s: list[Tensor], c: Sequence[float], lr: float, step: Tensor) -> Tensor:
    momentum, dampening, nesterov = c
    s[0] = momentum * s[0] + (1 - dampening) * g
    return p - lr * (g + momentum * s[0] if nesterov else s[0])


def _lion(p: Tensor, g: Tensor, s: list[Tensor], c: Sequence[float], lr: float, step: Tensor) -> Tensor:
    beta1, beta2 = c
    update = (beta1 * s[0] + (1 - beta1) * g).sign()
    s[0] = beta2 * s[0] + (1 - beta2) * g
    return p - lr * update


_RULES = {"adam": _adam, "amsgrad": _adam, "sgd": _sgd, "momentum": _momentum, "lion": _lion}


def _factor_and_skip(norm, max_norm, skip_nonfinite, grad_scale, found_inf) -> tuple[Tensor, bool]:
    scale = torch.ones((), dtype=torch.float64) if grad_scale is None else grad_scale.double()
    factor, skip = 1.0 / scale, found_inf is not None and bool(found_inf)
    if norm is not None:
        factor = factor * (max_norm / (norm / scale + 1e-6)).clamp(max=1.0)
        skip = skip or (skip_nonfinite and not bool(norm.isfinite()))
    return factor, skip


def reference(
    params,
    grads,
    states,
    steps,
    ema,
    rule,
    lr,
    weight_decay,
    decoupled,
    coefficients,
    maximize,
    ema_decay,
    zero_grads,
    norm,
    max_norm,
    skip_nonfinite,
    grad_scale,
    found_inf,
) -> None:
    name, count = _codes.RULES[rule], len(params)
    factor, skip = _factor_and_skip(norm, max_norm, skip_nonfinite, grad_scale, found_inf)
    for i, p in enumerate(params):
        if not skip:
            acc = _common.acc_dtype(p)
            x, own = p.to(acc), [states[k * count + i] for k in range(STATES[name])]
            g = grads[i].to(acc) * factor.to(acc) * (-1 if maximize else 1)
            if weight_decay and decoupled:
                x = x * (1 - lr * weight_decay)
            elif weight_decay:
                g = g + weight_decay * x
            if steps:
                steps[i] += 1
            s = [state.to(acc) for state in own]
            p.copy_(_RULES[name](x, g, s, coefficients, lr, steps[i] if steps else None))
            for state, value in zip(own, s):
                state.copy_(value)
            if ema:
                ema[i].lerp_(p.to(acc), 1 - ema_decay)
        if zero_grads:
            grads[i].zero_()


@_schema.register_fake("optimizer_step_")
def _fake(*_):
    return None


def _why_not_cuda(*_) -> str:
    return "optimizer_step has no CUDA kernels"


def _why_not_triton(*_) -> str:
    return "optimizer_step has no Triton kernels"


_OP = torch.ops.fusedtrain.optimizer_step_
IMPLS = register(
    "optimizer_step",
    {
        "cuda": Impl(_OP.default, None, _why_not_cuda),
        "cpu": Impl(_OP.default, None, _common.why_not_cpu),
        "triton": Impl(_OP.triton, None, _why_not_triton),
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
    lr: float,
    coefficients: Sequence[float] = (),
    weight_decay: float = 0.0,
    decoupled: bool = False,
    maximize: bool = False,
    ema_decay: float = 0.0,
    zero_grads: bool = False,
    norm: Tensor | None = None,
    max_norm: float = float("inf"),
    skip_nonfinite: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    r"""Takes one step of an optimizer for a list of parameters, in place.

    .. math::
        f = \min\Big(1, \frac{\text{max\_norm}}{\text{norm} / s + 10^{-6}}\Big) / s, \quad
        (p, \text{states}) \leftarrow \mathrm{rule}(p, \pm f g, \text{states}), \quad
        e \leftarrow e + (1 - \text{ema\_decay})(p - e)

    Args:
        params: dense tensors (no gaps, any order of dimensions); float32, bfloat16, float16, float64 or a mixture.
        grads: one for each, with its shape, dtype and strides.
        states: all first states, then all second ones, ..., each like its parameter: "adam" exp_avg, exp_avg_sq;
            "amsgrad" also max_exp_avg_sq; "sgd" none; "momentum" momentum_buffer; "lion" exp_avg.
        steps: for "adam" and "amsgrad" the number of updates so far, a float32 number per parameter.
        ema: running averages like ``params``, in float32 (float64 for float64), or none.
        rule: "adam", "amsgrad", "sgd", "momentum" or "lion".
        lr: learning rate.
        coefficients: "adam", "amsgrad": beta1, beta2, eps; "momentum": momentum, dampening, nesterov (0 or 1);
            "lion": beta1, beta2.
        weight_decay: times the parameter it is added to the gradient; with ``decoupled`` the parameter shrinks by
            ``1 - lr * weight_decay`` instead.
        maximize: ascend.
        ema_decay: the weight of the old average.
        zero_grads: leaves zeros in ``grads``.
        norm: :func:`grad_norm` of the gradients as they are; without it nothing is clipped.
        max_norm: the largest norm after unscaling.
        skip_nonfinite: a ``norm`` that is not finite acts as ``found_inf``.
        grad_scale: the factor :math:`s` on the loss, a float32 number.
        found_inf: a float32 number; other than 0, nothing happens but the zeroing of the gradients.

    Raises:
        ValueError: an unknown rule, or a wrong number of coefficients or tensors.
        RuntimeError: a forced backend cannot run; a tensor does not match its parameter. Nothing was changed then.

    Cost: reads and writes parameters, states and averages once, reads the gradients once; no temporaries.
    Numerics: computed in float32 (float64 for float64), one rounding at each store; deterministic, independent of
    threads.
    """
    code = _codes.code("rule", rule, _codes.RULES)
    wanted = {"adam": 3, "amsgrad": 3, "sgd": 0, "momentum": 3, "lion": 2}[rule]
    if len(coefficients) != wanted:
        raise ValueError(f"optimizer_step_: rule {rule!r} has {wanted} coefficients, got {len(coefficients)}")
    counts = (len(params), STATES[rule] * len(params), len(params) if STATES[rule] > 1 else 0)
    if (len(grads), len(states), len(steps)) != counts or len(ema) not in (0, len(params)):
        raise ValueError(
            f"optimizer_step_: rule {rule!r} takes {counts[0]} grads, {counts[1]} states and {counts[2]} steps"
            f" for {len(params)} params, got {len(grads)}, {len(states)} and {len(steps)}; ema: {len(ema)}"
        )
    if not params:
        return
    impl = select("optimizer_step", IMPLS, *params)
    with torch.no_grad():
        impl.forward(
            params,
            grads,
            states,
            steps,
            ema,
            code,
            lr,
            weight_decay,
            decoupled,
            coefficients,
            maximize,
            ema_decay,
            zero_grads,
            norm,
            max_norm,
            skip_nonfinite,
            grad_scale,
            found_inf,
        )
    # The operators write behind autograd's back.
    torch.autograd.graph.increment_version([*params, *grads] if zero_grads else params)

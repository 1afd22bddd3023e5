"""LAMB with the arguments and the state of timm's."""

from fusedtrain.optim._fused import FusedStep, corrected_decay


class Lamb(FusedStep):
    r"""LAMB: Adam whose step is scaled, for each parameter, to the norm of the parameter.

    .. math::
        u = \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon} + \lambda p, \quad
        p \leftarrow p - \eta \frac{\lVert p \rVert}{\lVert u \rVert} u

    Args:
        params: parameters, named parameters or groups of them; float32, bfloat16, float16 or float64, any strides.
        lr: learning rate :math:`\eta`, a number or a tensor.
        bias_correction: divides by :math:`1 - \beta^t`.
        betas: :math:`\beta_1, \beta_2`.
        eps: :math:`\epsilon`.
        weight_decay: :math:`\lambda`.
        grad_averaging: the gradient enters :math:`m` times :math:`1 - \beta_1`.
        max_grad_norm: divides all gradients by norm / max_grad_norm where the norm of all is larger; None: never.
        trust_clip: the ratio of the norms is 1 at most.
        always_adapt: scales parameters without weight decay too.
        caution: leaves out of the Adam step what has another sign than the gradient, as timm does.
        decoupled_decay: the parameter shrinks by :math:`1 - \eta \lambda` instead.
        corrected_weight_decay: decoupled decay falls with the square of the learning rate, :math:`\eta^2 / \eta_0`,
            :math:`\eta_0` being the one given here.
        foreach: chooses among timm's implementations; without effect here.
        **extras: ``nonfinite``, ``ema_decay``, ``zero_grads``, ``state_dtype``,
            ``rounding``, ``master_weights``, ``seed``, see :class:`fusedtrain.optim.Adam`.

    Raises:
        ValueError: an argument is out of range.

    Cost: reads the gradients once for the norm; then a pass for the states and the norms and one for the
    parameters, which finds small parameters in the cache.
    Numerics: computed in float32 (float64 for float64), one rounding at each store; deterministic, independent of
    threads. The state dict is that of ``timm.optim.Lamb`` and is exchanged both ways.
    Source: You et al., https://arxiv.org/abs/1904.00962
    """

    _step_of_group = True

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-6,
        weight_decay=0.01,
        grad_averaging=True,
        max_grad_norm=1.0,
        trust_clip=False,
        always_adapt=False,
        caution=False,
        decoupled_decay=False,
        corrected_weight_decay=False,
        foreach=None,
        **extras,
    ):
        self._init_like_timm(locals())

    def _rule(self, group: dict) -> dict:
        beta1, beta2 = map(float, group["betas"])
        rate = 1.0 - beta1 if group["grad_averaging"] else 1.0
        adapt = group["weight_decay"] != 0 or group["always_adapt"]
        flags = map(float, (group["bias_correction"], adapt, group["trust_clip"]))
        decoupled = group["decoupled_decay"]
        return {
            "rule": "lamb" + "_cautious" * bool(group["caution"]),
            "coefficients": (beta1, beta2, float(group["eps"]), rate, *flags),
            "weight_decay": corrected_decay(group) if decoupled else float(group["weight_decay"]),
            "decoupled": decoupled,
        }

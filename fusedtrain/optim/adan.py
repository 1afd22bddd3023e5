"""Adan with the arguments and the state of timm's."""

from typing import ClassVar

from fusedtrain.optim._fused import FusedStep


class Adan(FusedStep):
    r"""Adaptive Nesterov momentum as one pass over memory.

    .. math::
        \delta = g_t - g_{t-1}, \quad m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad
        d \leftarrow \beta_2 d + (1 - \beta_2) \delta, \quad
        v \leftarrow \beta_3 v + (1 - \beta_3) (g + \beta_2 \delta)^2, \\
        p \leftarrow \frac{1}{1 + \eta \lambda} \Big(p - \eta
        \frac{m / (1 - \beta_1^t) + \beta_2 d / (1 - \beta_2^t)}{\sqrt{v / (1 - \beta_3^t)} + \epsilon}\Big)

    where the first :math:`\delta` is 0.

    Args:
        params: parameters, named parameters or groups of them; float32, bfloat16, float16 or float64, any strides.
        lr: learning rate :math:`\eta`, a number or a tensor.
        betas: :math:`\beta_1, \beta_2, \beta_3`, timm's, which are 1 minus the paper's.
        eps: :math:`\epsilon`.
        weight_decay: :math:`\lambda`.
        no_prox: the parameter shrinks by :math:`1 - \eta \lambda` before the step instead.
        caution: leaves out what has another sign than the gradient, as timm does.
        foreach: chooses among timm's implementations; without effect here.
        **extras: ``max_grad_norm``, ``nonfinite``, ``ema_decay``, ``zero_grads``, ``state_dtype``,
            ``rounding``, ``master_weights``, ``seed``, see :class:`fusedtrain.optim.Adam`.

    Raises:
        ValueError: an argument is out of range.

    Cost: reads the gradients once for the norm; then reads and writes everything once. No temporaries.
    Numerics: computed in float32 (float64 for float64), one rounding at each store; deterministic, independent of
    threads. The state dict is that of ``timm.optim.Adan`` and is exchanged both ways.
    Source: Xie et al., https://arxiv.org/abs/2208.06677
    """

    _initial: ClassVar = {"neg_pre_grad": float("nan")}  # there is none yet
    _betas = 3
    _step_of_group = _step_is_int = True

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.98, 0.92, 0.99),
        eps=1e-8,
        weight_decay=0.0,
        no_prox=False,
        caution=False,
        foreach=None,
        **extras,
    ):
        self._init_like_timm(locals())

    def _first_state(self, group: dict) -> str:
        return "neg_pre_grad"

    def _rule(self, group: dict) -> dict:
        return {
            "rule": "adan" + "_cautious" * bool(group["caution"]),
            "coefficients": (*map(float, group["betas"]), float(group["eps"])),
            "weight_decay": float(group["weight_decay"]),
            "decoupled": group["no_prox"],
        }

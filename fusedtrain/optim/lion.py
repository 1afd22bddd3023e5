"""Lion with the arguments and the state of timm's."""

from fusedtrain.optim._fused import FusedStep, corrected_decay


class Lion(FusedStep):
    r"""Lion as one pass over memory.

    .. math::
        p \leftarrow (1 - \eta \lambda) p - \eta\, \mathrm{sign}(\beta_1 m + (1 - \beta_1) g), \quad
        m \leftarrow \beta_2 m + (1 - \beta_2) g

    Args:
        params: parameters, named parameters or groups of them; float32, bfloat16, float16 or float64, any strides.
        lr: learning rate :math:`\eta`, a number or a tensor.
        betas: :math:`\beta_1, \beta_2`.
        weight_decay: :math:`\lambda`.
        caution: leaves out what has another sign than the gradient, as timm does.
        corrected_weight_decay: the decay falls with the square of the learning rate, :math:`\eta^2 / \eta_0`,
            :math:`\eta_0` being the one given here.
        maximize: ascends.
        foreach: chooses among timm's implementations; without effect here.
        **extras: ``max_grad_norm``, ``nonfinite``, ``ema_decay``, ``zero_grads``, ``state_dtype``,
            ``rounding``, ``master_weights``, ``seed``, see :class:`fusedtrain.optim.Adam`.

    Raises:
        ValueError: an argument is out of range.

    Cost: reads the gradients once for the norm; then reads and writes everything once. No temporaries.
    Numerics: computed in float32 (float64 for float64), one rounding at each store; deterministic, independent of
    threads. The state dict is that of ``timm.optim.Lion`` and is exchanged both ways.
    Source: Chen et al., https://arxiv.org/abs/2302.06675
    """

    def __init__(
        self,
        params,
        lr=1e-4,
        betas=(0.9, 0.99),
        weight_decay=0.0,
        caution=False,
        corrected_weight_decay=False,
        maximize=False,
        foreach=None,
        **extras,
    ):
        self._init_like_timm(locals())

    def _rule(self, group: dict) -> dict:
        return {
            "rule": "lion" + "_cautious" * bool(group["caution"]),
            "coefficients": tuple(map(float, group["betas"])),
            "weight_decay": corrected_decay(group),
            "decoupled": True,
        }

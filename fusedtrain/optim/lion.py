"""Lion with the arguments and the state of timm's."""

from fusedtrain.optim._fused import FusedStep


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
        maximize: ascends.
        foreach: chooses among timm's implementations; without effect here.
        max_grad_norm, nonfinite, ema_decay, zero_grads: see :class:`fusedtrain.optim.Adam`.

    Raises:
        ValueError: an argument is out of range.

    Cost: reads the gradients once for the norm; then reads and writes everything once. No temporaries.
    Numerics: computed in float32 (float64 for float64), one rounding at each store; deterministic, independent of
    threads. The state dict is that of ``timm.optim.Lion`` (without ``caution`` and ``corrected_weight_decay``).
    Source: Chen et al., https://arxiv.org/abs/2302.06675
    """

    def __init__(
        self,
        params,
        lr=1e-4,
        betas=(0.9, 0.99),
        weight_decay=0.0,
        *,
        maximize=False,
        foreach=None,
        max_grad_norm: float | None = None,
        nonfinite: str = "propagate",
        ema_decay: float | None = None,
        zero_grads: bool = False,
    ):
        if not lr >= 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        for i, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
        if not weight_decay >= 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        self._set_options(max_grad_norm, nonfinite, ema_decay, zero_grads)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "foreach": foreach, "maximize": maximize}
        super().__init__(params, defaults)

    def load_state_dict(self, state_dict: dict) -> None:
        for group in state_dict["param_groups"]:
            for argument in ("caution", "corrected_weight_decay"):
                if group.get(argument):
                    raise NotImplementedError(
                        f"fusedtrain.optim.Lion does not support {argument}=True; timm's Lion does"
                    )
        super().load_state_dict(state_dict)

    def _update(self, group: dict) -> dict:
        return {
            "rule": "lion",
            "names": ("exp_avg",),
            "coefficients": tuple(map(float, group["betas"])),
            "weight_decay": float(group["weight_decay"]),
            "decoupled": True,
        }

"""NovoGrad with the arguments and the state of timm's NvNovoGrad."""

from typing import ClassVar

from fusedtrain.optim._fused import FusedStep, corrected_decay


class NovoGrad(FusedStep):
    r"""NovoGrad: momentum of gradients that are normalized parameter by parameter.

    .. math::
        v \leftarrow \beta_2 v + (1 - \beta_2) \lVert g \rVert^2, \quad
        m \leftarrow \beta_1 m + \frac{g}{\sqrt{v} + \epsilon} + \lambda p, \quad p \leftarrow p - \eta m

    where the first :math:`v`, a float32 number, is :math:`\lVert g \rVert^2`.

    Args:
        params: parameters, named parameters or groups of them; float32, bfloat16, float16 or float64, any strides.
        lr: learning rate :math:`\eta`, a number or a tensor.
        betas: :math:`\beta_1, \beta_2`.
        eps: :math:`\epsilon`.
        weight_decay: :math:`\lambda`.
        grad_averaging: what enters :math:`m` is multiplied by :math:`1 - \beta_1`.
        amsgrad: divides by the largest :math:`v` so far.
        decoupled_decay: the parameter shrinks by :math:`1 - \eta \lambda` instead.
        corrected_weight_decay: decoupled decay falls with the square of the learning rate, :math:`\eta^2 / \eta_0`,
            :math:`\eta_0` being the one given here.
        **extras: ``max_grad_norm``, ``nonfinite``, ``ema_decay``, ``zero_grads``, ``state_dtype``,
            ``rounding``, ``master_weights``, ``seed``, see :class:`fusedtrain.optim.Adam`.

    Raises:
        ValueError: an argument is out of range.

    Cost: reads the gradients once for the norm of all and once for the norm of each; then reads and writes everything
    once.
    Numerics: computed in float32 (float64 for float64), one rounding at each store; deterministic, independent of
    threads. The state dict is that of ``timm.optim.NvNovoGrad`` and is exchanged both ways.
    Source: Ginsburg et al., https://arxiv.org/abs/1905.11286
    """

    _step_is_int = True
    _numbers: ClassVar = ("exp_avg_sq", "max_exp_avg_sq")

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.95, 0.98),
        eps=1e-8,
        weight_decay=0.0,
        grad_averaging=False,
        amsgrad=False,
        decoupled_decay=False,
        corrected_weight_decay=False,
        **extras,
    ):
        self._init_like_timm(locals())

    def _rule(self, group: dict) -> dict:
        beta1, beta2 = map(float, group["betas"])
        decoupled = group["decoupled_decay"]
        return {
            "rule": "novograd_amsgrad" if group["amsgrad"] else "novograd",
            "coefficients": (beta1, beta2, float(group["eps"]), 1.0 - beta1 if group["grad_averaging"] else 1.0),
            "weight_decay": corrected_decay(group) if decoupled else float(group["weight_decay"]),
            "decoupled": decoupled,
        }

"""SGD with the arguments and the state of torch's."""

import torch

from fusedtrain.optim._fused import FusedStep


class SGD(FusedStep, torch.optim.SGD):
    r"""Stochastic gradient descent as one pass over memory.

    .. math:: b \leftarrow \mu b + (1 - \tau) g, \quad p \leftarrow p - \eta b

    Args:
        params: parameters, named parameters or groups of them; float32, bfloat16, float16 or float64, any strides.
        lr: learning rate :math:`\eta`, a number or a tensor.
        momentum: :math:`\mu`; 0 keeps no state.
        dampening: :math:`\tau`; the first step has none.
        weight_decay: times the parameter it is added to the gradient.
        nesterov: the step is :math:`g + \mu b`.
        maximize: ascends.
        foreach: chooses among torch's implementations; without effect here.
        differentiable: not supported.
        fused: as ``foreach``.
        **extras: ``max_grad_norm``, ``nonfinite``, ``ema_decay``, ``zero_grads``, ``state_dtype``,
            ``rounding``, ``master_weights``, ``seed``, see :class:`fusedtrain.optim.Adam`.

    Raises:
        ValueError: an argument is out of range.
        NotImplementedError: ``differentiable`` is set.

    Cost: reads the gradients once for the norm; then reads and writes everything once. No temporaries.
    Numerics: computed in float32 (float64 for float64), one rounding at each store; deterministic, independent of
    threads. The state dict is that of :class:`torch.optim.SGD` and is exchanged both ways.
    Source: Sutskever et al., https://proceedings.mlr.press/v28/sutskever13.html, in the form of torch.optim.SGD
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        momentum=0.0,
        dampening=0.0,
        weight_decay=0.0,
        nesterov=False,
        *,
        maximize=False,
        foreach=None,
        differentiable=False,
        fused=None,
        **extras,
    ):
        self._refuse(differentiable=differentiable)
        self._set_options(**extras)
        torch.optim.SGD.__init__(
            self,
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
        )

    def _first_state(self, group: dict) -> str | None:
        return "momentum_buffer" if group["momentum"] != 0 and group["dampening"] != 0 else None

    def _parts(self, group: dict, params: list) -> list[tuple[dict, list]]:
        if group["momentum"] == 0 or group["dampening"] == 0:
            return [(group, params)]
        # The first step takes the whole gradient into the buffer.
        first = {p for p in params if self.state.get(p, {}).get("momentum_buffer") is None}
        return [
            (group, [p for p in params if p not in first]),
            ({**group, "dampening": 0.0}, [p for p in params if p in first]),
        ]

    def _rule(self, group: dict) -> dict:
        decay = {"weight_decay": float(group["weight_decay"])}
        if group["momentum"] == 0:
            return {"rule": "sgd", **decay}
        coefficients = tuple(float(group[name]) for name in ("momentum", "dampening", "nesterov"))
        return {"rule": "momentum", "coefficients": coefficients, **decay}

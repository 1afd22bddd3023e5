"""RMSprop with the arguments and the state of torch's, RMSpropTF with those of timm's."""

from typing import ClassVar

import torch

from fusedtrain.optim._fused import FusedStep, corrected_decay


def _rule(group: dict, eps_in_root: bool, lr_in_momentum: bool) -> dict:
    momentum = bool(group["momentum"] > 0)  # numbers may be numpy's, whose bool multiplies no string
    name = "rmsprop" + "_centered" * bool(group["centered"]) + "_momentum" * momentum
    name += "_cautious" * (momentum and bool(group.get("caution", False)))
    numbers = (group["alpha"], group["eps"], eps_in_root, group["momentum"], lr_in_momentum)
    return {"rule": name, "coefficients": tuple(map(float, numbers)), "weight_decay": float(group["weight_decay"])}


class RMSprop(FusedStep, torch.optim.RMSprop):
    r"""RMSprop as one pass over memory.

    .. math::
        v \leftarrow \alpha v + (1 - \alpha) g^2, \quad b \leftarrow \mu b + \frac{g}{\sqrt{v} + \epsilon}, \quad
        p \leftarrow p - \eta b

    Args:
        params: parameters, named parameters or groups of them; float32, bfloat16, float16 or float64, any strides.
        lr: learning rate :math:`\eta`, a number or a tensor.
        alpha: :math:`\alpha`.
        eps: :math:`\epsilon`.
        weight_decay: times the parameter it is added to the gradient.
        momentum: :math:`\mu`; 0 keeps no buffer.
        centered: subtracts the square of the mean gradient from :math:`v`.
        capturable: as in torch: the step may be captured in a CUDA graph. Nothing in it waits for the device, where the
            counts of steps stand and the learning rate may stand. Parameters must be on such a device.
        foreach: chooses among torch's implementations; without effect here.
        maximize: ascends.
        differentiable: not supported.
        **extras: ``max_grad_norm``, ``nonfinite``, ``ema_decay``, ``zero_grads``, ``state_dtype``,
            ``rounding``, ``master_weights``, ``seed``, see :class:`fusedtrain.optim.Adam`.

    Raises:
        ValueError: an argument is out of range.
        NotImplementedError: ``differentiable`` is set.
        ValueError, AssertionError: ``capturable`` does not go with an option, or with the device of the parameters.

    Cost: reads the gradients once for the norm; then reads and writes everything once. No temporaries.
    Numerics: computed in float32 (float64 for float64), one rounding at each store; deterministic, independent of
    threads. The state dict is that of :class:`torch.optim.RMSprop` and is exchanged both ways.
    Source: Hinton, lecture 6e; centered: Graves, https://arxiv.org/abs/1308.0850
    """

    def __init__(
        self,
        params,
        lr=1e-2,
        alpha=0.99,
        eps=1e-8,
        weight_decay=0.0,
        momentum=0.0,
        centered=False,
        capturable=False,
        foreach=None,
        maximize=False,
        differentiable=False,
        **extras,
    ):
        self._refuse(differentiable=differentiable)
        self._set_options(capturable, **extras)
        torch.optim.RMSprop.__init__(
            self, params, lr, alpha, eps, weight_decay, momentum, centered, capturable, foreach, maximize
        )

    def _rule(self, group: dict) -> dict:
        return _rule(group, eps_in_root=False, lr_in_momentum=False)


class RMSpropTF(FusedStep):
    r"""RMSprop in TensorFlow's form, as timm has it: averages begin at one, :math:`\epsilon` stands inside the root.

    .. math::
        v \leftarrow \alpha v + (1 - \alpha) g^2, \quad
        b \leftarrow \mu b + \eta \frac{g}{\sqrt{v + \epsilon}}, \quad p \leftarrow p - b

    Args:
        params: parameters, named parameters or groups of them; float32, bfloat16, float16 or float64, any strides.
        lr: learning rate :math:`\eta`, a number or a tensor.
        alpha: :math:`\alpha`.
        eps: :math:`\epsilon`.
        weight_decay: times the parameter it is added to the gradient, or see ``decoupled_decay``.
        momentum: :math:`\mu`; 0 keeps no buffer.
        centered: subtracts the square of the mean gradient from :math:`v`.
        decoupled_decay: the parameter shrinks by ``1 - lr * weight_decay`` instead.
        corrected_weight_decay: decoupled decay falls with the square of the learning rate, :math:`\eta^2 / \eta_0`,
            :math:`\eta_0` being the one given here.
        lr_in_momentum: the buffer holds steps; else it holds directions, as torch's does.
        caution: leaves out of the buffer's step what has another sign than the gradient, as timm does.
        foreach: chooses among timm's implementations; without effect here.
        **extras: ``max_grad_norm``, ``nonfinite``, ``ema_decay``, ``zero_grads``, ``state_dtype``,
            ``rounding``, ``master_weights``, ``seed``, see :class:`fusedtrain.optim.Adam`.

    Raises:
        ValueError: an argument is out of range.

    Cost: reads the gradients once for the norm; then reads and writes everything once. No temporaries.
    Numerics: computed in float32 (float64 for float64), one rounding at each store; deterministic, independent of
    threads. The state dict is that of ``timm.optim.RMSpropTF`` and is exchanged both ways.
    Source: Hinton, lecture 6e; tf.train.RMSPropOptimizer
    """

    _initial: ClassVar = {"square_avg": 1.0}

    def __init__(
        self,
        params,
        lr=1e-2,
        alpha=0.9,
        eps=1e-10,
        weight_decay=0.0,
        momentum=0.0,
        centered=False,
        decoupled_decay=False,
        corrected_weight_decay=False,
        lr_in_momentum=True,
        caution=False,
        foreach=None,
        **extras,
    ):
        self._init_like_timm(locals())

    def _rule(self, group: dict) -> dict:
        rule = _rule(group, eps_in_root=True, lr_in_momentum=group["lr_in_momentum"])
        if group["decoupled_decay"]:
            rule |= {"weight_decay": corrected_decay(group), "decoupled": True}
        return rule

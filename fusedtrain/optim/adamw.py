"""Adam and AdamW with the arguments and the state of torch's."""

import torch

from fusedtrain.optim._fused import FusedStep


class Adam(FusedStep, torch.optim.Adam):
    r"""Adam as one pass over memory: unscaling, clipping, update, averaging and zeroing together.

    .. math::
        m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad v \leftarrow \beta_2 v + (1 - \beta_2) g^2, \quad
        p \leftarrow p - \frac{\eta}{1 - \beta_1^t} \frac{m}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    Args:
        params: parameters, named parameters or groups of them; float32, bfloat16, float16 or float64, any strides.
        lr: learning rate :math:`\eta`, a number or a tensor.
        betas: :math:`\beta_1, \beta_2`.
        eps: :math:`\epsilon`.
        weight_decay: times the parameter it is added to the gradient, or see ``decoupled_weight_decay``.
        amsgrad: divides by the largest :math:`v` so far.
        foreach: chooses among torch's implementations; without effect here.
        maximize: ascends.
        capturable: as in torch: the step may be captured in a CUDA graph. Nothing in it waits for the device, where the
            counts of steps stand and the learning rate may stand. Parameters must be on such a device.
        differentiable: not supported.
        fused: as ``foreach``.
        decoupled_weight_decay: the parameter shrinks by ``1 - lr * weight_decay`` instead.
        max_grad_norm: the largest L2 norm of all gradients together, as in :func:`torch.nn.utils.clip_grad_norm_`; None
            computes no norm, inf only that. The gradients themselves stay as they are.
        nonfinite: what a norm that is not finite does: "propagate" into the parameters, as in torch, "skip" the step
            without waiting for the device, or "error"; the last two need ``max_grad_norm``.
        ema_decay: keeps running averages :math:`e \leftarrow e + (1 - d)(p - e)` in float32, see :meth:`ema_state_dict`
            and :meth:`swap_ema`; they begin as the parameters before the first step.
        zero_grads: leaves zeros in the gradients, so that no ``zero_grad(set_to_none=False)`` is needed. As behind
            that, a parameter that is frozen goes on, by momentum and decay, until its gradient is set to None.
        state_dtype: what states are stored in: None is the parameter's dtype, else float32, bfloat16 or "8bit": a byte
            each and a float32 number per 256 of them; parameters of fewer than 4096 elements keep float32 then.
        rounding: how parameters in bfloat16 and float16 are stored: "nearest", where steps below half a unit in the
            last place are lost, "stochastic", where they are kept in the mean at no cost of memory, or "kahan", where
            what was lost is added at the next step, a state of the parameter's size.
        master_weights: of such parameters a float32 copy is trained, the state "master", and rounded into the parameter
            in the same pass; states are float32 then. A parameter that is changed from outside replaces its master. For
            ``rounding`` "nearest" alone.
        seed: of the random bits for ``rounding``, and for states in less than float32, which are rounded stochastically
            where ``state_dtype`` or ``rounding`` is set; ``group["rounding_seed"]`` counts on with every step, where it
            is not ``capturable``, and is saved.

    Raises:
        ValueError: an argument is out of range or does not go with another, or one from ``max_grad_norm`` to ``seed``
            stands in a group, or a parameter stands twice in one.
        NotImplementedError: ``differentiable`` is set.
        ValueError, AssertionError: ``capturable`` does not go with an option, or with the device of the parameters.
        TypeError: at the first step, if a parameter is float64 and ``state_dtype`` is set.

    Cost: reads the gradients once for the norm; then reads and writes everything once. No temporaries.
    Numerics: computed in float32 (float64 for float64), one rounding at each store; deterministic, independent of
    threads. Steps that GradScaler or "skip" leaves out change nothing but the gradients that are zeroed.
    Random bits are a function of the seed, the step, the parameter's place in its group and the element's in memory.
    The state dict is that of :class:`torch.optim.Adam` and is exchanged both ways; "ema", "master" and "compensation"
    stand beside torch's keys. States in 8 bits are saved in float32, and resumed to the bit; one that is not finite
    makes its block of 256 NaN. Of DTensor parameters (FSDP2) every rank steps its own part by the norm of all parts.
    Source: Kingma, Ba, https://arxiv.org/abs/1412.6980; blocks of 8 bits: Dettmers et al.,
    https://arxiv.org/abs/2110.02861; rounding: Zamirai et al., https://arxiv.org/abs/2010.06192
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        amsgrad=False,
        *,
        foreach=None,
        maximize=False,
        capturable=False,
        differentiable=False,
        fused=None,
        decoupled_weight_decay=False,
        **extras,
    ):
        self._refuse(differentiable=differentiable)
        self._check_betas(betas)  # torch's from 2.14 on takes the first two
        self._set_options(capturable, **extras)
        torch.optim.Adam.__init__(
            self,
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )

    def _rule(self, group: dict) -> dict:
        return {
            "rule": "amsgrad" if group["amsgrad"] else "adam",
            "coefficients": (*map(float, group["betas"]), float(group["eps"])),
            "weight_decay": float(group["weight_decay"]),
            "decoupled": group["decoupled_weight_decay"],
        }


class AdamW(Adam, torch.optim.AdamW):
    r"""AdamW as one pass over memory: :class:`Adam` whose weight decay shrinks the parameters themselves.

    .. math:: p \leftarrow (1 - \eta \lambda) p

    Args and everything else: see :class:`Adam`; the state dict is that of :class:`torch.optim.AdamW`.
    Source: Loshchilov, Hutter, https://arxiv.org/abs/1711.05101
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, **keywords):
        Adam.__init__(self, params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=True, **keywords)

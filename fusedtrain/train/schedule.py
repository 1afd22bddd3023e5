"""Learning rates as functions of the step."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(optimizer: Optimizer, steps: int, warmup_steps: int) -> LambdaLR:
    r"""Scales every group's learning rate step by step: linearly up, then along a cosine down to 0.

    .. math:: f(t) = \frac{t + 1}{w} \;(t < w), \qquad f(t) = \tfrac12 + \tfrac12 \cos\Bigl(\pi\frac{t - w}{T - w}\Bigr)

    Args:
        optimizer: its present learning rates are the peaks.
        steps: :math:`T`, all steps of the run.
        warmup_steps: :math:`w`, those of them in the rise.

    Source: Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983; Goyal et al., https://arxiv.org/abs/1706.02677
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps))

    return LambdaLR(optimizer, factor)

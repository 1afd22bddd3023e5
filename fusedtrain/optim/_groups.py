"""Parameter groups."""

from collections.abc import Collection
from fnmatch import fnmatch

from torch import nn


def param_groups_weight_decay(
    model: nn.Module, weight_decay: float = 1e-5, no_weight_decay_list: Collection[str] = ()
) -> list[dict]:
    """Splits the trained parameters of a model so that norms and biases do not decay.

    Args:
        model: its ``named_parameters`` that require gradients are taken.
        weight_decay: of the other parameters.
        no_weight_decay_list: names of more parameters without decay, or patterns such as ``"*.pos_embed"``.

    Returns:
        Groups for an optimizer: first the parameters without decay (of at most one dimension, as norms and biases are,
        or named "bias", or listed), then the others; a group of none is left out. In the order of timm's function of
        this name, so that state dicts go both ways.

    Source: ``timm.optim.param_groups_weight_decay``
    """
    groups = {True: [], False: []}
    for name, p in model.named_parameters():
        if p.requires_grad:
            free = p.ndim <= 1 or name == "bias" or name.endswith(".bias")
            free = free or not weight_decay or any(fnmatch(name, pattern) for pattern in no_weight_decay_list)
            groups[free].append(p)
    decays = {True: 0.0, False: weight_decay}
    return [{"params": params, "weight_decay": decays[free]} for free, params in groups.items() if params]

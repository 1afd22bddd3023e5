"""Which parameters learn, how fast, and which decay."""

import fnmatch
import re
from collections.abc import Iterable

from torch import nn

from fusedtrain.train.callbacks import Callback
from fusedtrain.train.errors import InputError, require


def freeze(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Stops the parameters whose names match from learning, for fine-tuning; returns their names.

    Args:
        model: changed in place. BatchNorms of frozen layers still gather statistics while the model trains, unless
            :class:`FrozenNorms` is among the callbacks.
        patterns: as in ``fnmatch``: "blocks.[0-3].*", "*.bn1.*".

    Raises:
        InputError: a pattern matches no parameter, or nothing is left to learn.
    """
    frozen = _matching("freeze", model, patterns)
    if all(name in frozen or not p.requires_grad for name, p in model.named_parameters()):
        raise InputError("freeze: no parameter is left to learn")
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return frozen


def unfreeze(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Lets the parameters whose names match learn; returns their names.

    Args:
        model: changed in place. In a run, ``on_epoch_start`` of a callback is the place for it, on one process; an
            optimizer that was made without them gets them by ``add_param_group``.
        patterns: as for :func:`freeze`.

    Raises:
        InputError: a pattern matches no parameter.
    """
    names = _matching("unfreeze", model, patterns)
    for name in names:
        model.get_parameter(name).requires_grad_(True)
    return names


def _matching(what: str, model: nn.Module, patterns: Iterable[str]) -> list[str]:
    require(not isinstance(patterns, str), f"{what}: patterns must be a list, got {patterns!r}")
    names, matching = [name for name, _ in model.named_parameters()], {}
    for pattern in patterns:
        found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        require(bool(found), f"{what}: no parameter matches {pattern!r}")
        matching |= dict.fromkeys(found)
    return list(matching)


class FrozenNorms(Callback):
    """Keeps normalisations in evaluation whose parameters are all frozen: their running statistics stay, and are what
    they normalise by."""

    def on_epoch_start(self, trainer, epoch: int) -> None:
        for module in trainer.model.modules():
            own = list(module.parameters(recurse=False))
            if getattr(module, "running_mean", None) is not None and own and not any(p.requires_grad for p in own):
                module.eval()


def parameter_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.0, no_decay: bool = True, layer_decay: float | None = None
) -> list[dict]:
    """Returns groups of the trainable parameters for any optimizer.

    Args:
        model: its parameters come in the order of its layers.
        lr: of the last layers.
        weight_decay: of the parameters that decay.
        no_decay: vectors and numbers (biases, weights of norms) do not decay, nor what the model's own
            ``no_weight_decay()`` names, as in timm.
        layer_decay: every block further from the output learns at this part of the rate of the next; None: all alike.
            Blocks are those of timm's ``group_matcher``, else the children of lists and sequences in their order.

    Source: Clark et al., ELECTRA, https://arxiv.org/abs/2003.10555 (layer-wise rates)
    """
    require(layer_decay is None or 0 < layer_decay <= 1, f"layer_decay must lie in (0, 1], got {layer_decay}")
    exempt = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
    depth = _depths(model) if layer_decay is not None else {}
    last = max(depth.values(), default=0)
    groups: dict[tuple[float, float], dict] = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        decays = not no_decay or (p.dim() > 1 and name not in exempt)
        rate = lr * layer_decay ** (last - depth[name]) if depth else lr
        key = (rate, weight_decay if decays else 0.0)
        groups.setdefault(key, {"params": [], "lr": rate, "weight_decay": key[1]})["params"].append(p)
    return list(groups.values())


def _depths(model: nn.Module) -> dict[str, int]:
    """Parameter name -> the number of its block from the input on."""
    names = [name for name, _ in model.named_parameters()]
    if hasattr(model, "group_matcher"):
        from timm.models._manipulate import group_with_matcher

        blocks = group_with_matcher(model.named_parameters(), model.group_matcher(coarse=False), reverse=True)
        return {name: int(blocks[name]) for name in names}
    keys = [re.match(r"(?:[^.\d][^.]*\.)*\d+(?=\.)", name) for name in names]
    keys = [key[0] if key else name.partition(".")[0] for key, name in zip(keys, names)]
    order = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    return {name: order[key] for name, key in zip(names, keys)}

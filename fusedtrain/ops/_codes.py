"""The integer codes in the operator schemas, in the order of csrc/core: types.h, update_rule.h, narrow.h."""

ACTIVATIONS = (
    "identity",
    "relu",
    "silu",
    "gelu",
    "hard_swish",
    "relu6",
    "sigmoid",
    "hard_sigmoid",
    "tanh",
    "half_tanh",
)
INPUT_ACTIVATIONS = ACTIVATIONS[:6]
POOLS = ("avg", "avg_max")
RULES = (
    "adam",
    "amsgrad",
    "sgd",
    "momentum",
    "lion",
    "rmsprop",
    "rmsprop_momentum",
    "rmsprop_centered",
    "rmsprop_centered_momentum",
    "adan",
    "lamb",
    "novograd",
    "novograd_amsgrad",
    "lion_cautious",
    "rmsprop_momentum_cautious",
    "rmsprop_centered_momentum_cautious",
    "adan_cautious",
    "lamb_cautious",
)
ROUNDINGS = ("nearest", "stochastic", "kahan")

_CODES = {name: code for names in (ACTIVATIONS, POOLS, RULES, ROUNDINGS) for code, name in enumerate(names)}


def code(argument: str, name: str, allowed: tuple[str, ...]) -> int:
    """Returns the code of ``name``; ValueError names the argument, the value and what is allowed."""
    if name not in allowed:
        raise ValueError(f"{argument} must be one of {', '.join(allowed)}, got {name!r}")
    return _CODES[name]

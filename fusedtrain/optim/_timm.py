"""timm's optimizer factory: `timm.optim.create_optimizer_v2(model, "fusedtrainadamw")`."""

import sys
import warnings

# Name behind "fusedtrain" -> class, and what timm's factory is to know of its arguments.
_OPTIMIZERS = {
    "adam": ("Adam", {"has_betas": True}),
    "adamw": ("AdamW", {"has_betas": True}),
    "sgd": ("SGD", {"has_eps": False, "has_momentum": True, "defaults": {"nesterov": True}}),
    "rmsprop": ("RMSprop", {"has_momentum": True, "defaults": {"alpha": 0.9}}),
    "rmsproptf": ("RMSpropTF", {"has_momentum": True, "defaults": {"alpha": 0.9}}),
    "lamb": ("Lamb", {"has_betas": True}),
    "lion": ("Lion", {"has_eps": False, "has_betas": True}),
    "adan": ("Adan", {"has_betas": True, "num_betas": 3}),
    "novograd": ("NovoGrad", {"has_betas": True}),
}


def register_with_timm() -> list[str]:
    """Makes the optimizers known to timm's factory; importing this package after timm does the same.

    Returns:
        Their names there: "fusedtrainadam", "fusedtrainadamw", ... An underscore would separate a prefix, and "fused"
        alone stands for Apex.

    Raises:
        ImportError: timm is not installed.
    """
    from timm.optim._optim_factory import OptimInfo, default_registry

    known = default_registry.list_optimizers()
    for name, (cls, facts) in _OPTIMIZERS.items():
        if f"fusedtrain{name}" in known:  # the registry warns of what it is told twice
            continue
        description = f"{cls} of fusedtrain: the whole step in one pass over memory"
        path = f"fusedtrain.optim.{cls}"
        default_registry.register(OptimInfo(name=f"fusedtrain{name}", opt_class=path, description=description, **facts))
    return [f"fusedtrain{name}" for name in _OPTIMIZERS]


if "timm" in sys.modules:  # else the user may import timm later, or never
    try:
        register_with_timm()
    except ModuleNotFoundError:  # a timm without a registry
        pass
    except Exception as error:  # a timm with another registry: what stands here is no reason to fail at import
        warnings.warn(f"fusedtrain's optimizers are not in timm's factory: {error}", stacklevel=2)

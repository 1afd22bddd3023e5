"""Layers on the fused ops, with the constructor arguments, attributes and state_dict keys of timm and torchvision."""

from fusedtrain.nn.eca import CecaModule, EcaModule
from fusedtrain.nn.squeeze_excite import (
    EffectiveSEModule,
    SEBlock,
    SEModule,
    SENetModule,
    SqueezeExcitation,
    SqueezeExcite,
)

__all__ = [
    "CecaModule",
    "EcaModule",
    "EffectiveSEModule",
    "SEBlock",
    "SEModule",
    "SENetModule",
    "SqueezeExcitation",
    "SqueezeExcite",
]

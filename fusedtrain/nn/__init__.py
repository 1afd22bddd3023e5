"""Layers on the fused ops, with the constructor arguments, attributes and state_dict keys of timm and torchvision."""

from fusedtrain.nn.batch_norm_act import (
    BatchNorm2d,
    BatchNormAct2d,
    FrozenBatchNorm2d,
    FrozenBatchNormAct2d,
    SyncBatchNormAct,
)
from fusedtrain.nn.cbam import CbamModule, LightCbamModule
from fusedtrain.nn.depthwise_bn_act_se import DepthwiseBnActSe
from fusedtrain.nn.depthwise_conv2d import DepthwiseConv2d, DepthwiseConv2dSame, DepthwiseSeparableConv
from fusedtrain.nn.eca import CecaModule, EcaModule
from fusedtrain.nn.global_context import GlobalContext
from fusedtrain.nn.global_response_norm import GlobalResponseNorm, GlobalResponseNormMlp
from fusedtrain.nn.grouped_conv2d import GroupedConv2d
from fusedtrain.nn.linear import Linear
from fusedtrain.nn.mlp import Mlp
from fusedtrain.nn.pointwise_conv2d import PointwiseConv2d
from fusedtrain.nn.split_attn import SplitAttn
from fusedtrain.nn.squeeze_excite import (
    EffectiveSEModule,
    EseModule,
    SEBlock,
    SEModule,
    SENetModule,
    SqueezeExcitation,
    SqueezeExcite,
    SqueezeExciteCl,
)

__all__ = [
    "BatchNorm2d",
    "BatchNormAct2d",
    "CbamModule",
    "CecaModule",
    "DepthwiseBnActSe",
    "DepthwiseConv2d",
    "DepthwiseConv2dSame",
    "DepthwiseSeparableConv",
    "EcaModule",
    "EffectiveSEModule",
    "EseModule",
    "FrozenBatchNorm2d",
    "FrozenBatchNormAct2d",
    "GlobalContext",
    "GlobalResponseNorm",
    "GlobalResponseNormMlp",
    "GroupedConv2d",
    "LightCbamModule",
    "Linear",
    "Mlp",
    "PointwiseConv2d",
    "SEBlock",
    "SEModule",
    "SENetModule",
    "SplitAttn",
    "SqueezeExcitation",
    "SqueezeExcite",
    "SqueezeExciteCl",
    "SyncBatchNormAct",
]

"""The fused operations as functions. Each module: formula, reference, fakes, backends, autograd, public function."""

import warnings

import torch

from fusedtrain.ops.batch_norm_act import batch_norm_act
from fusedtrain.ops.channel_pool import channel_pool
from fusedtrain.ops.channel_scale import channel_scale
from fusedtrain.ops.depthwise_bn_act_se import depthwise_bn_act_se
from fusedtrain.ops.depthwise_conv2d import depthwise_conv2d
from fusedtrain.ops.global_response_norm import global_response_norm
from fusedtrain.ops.grad_norm import grad_norm
from fusedtrain.ops.grouped_conv2d import grouped_conv2d
from fusedtrain.ops.linear import linear
from fusedtrain.ops.mlp import mlp
from fusedtrain.ops.optimizer_step import optimizer_step_
from fusedtrain.ops.pointwise_conv2d import pointwise_conv2d
from fusedtrain.ops.squeeze_excite import squeeze_excite

__all__ = [
    "batch_norm_act",
    "channel_pool",
    "channel_scale",
    "depthwise_bn_act_se",
    "depthwise_conv2d",
    "global_response_norm",
    "grad_norm",
    "grouped_conv2d",
    "linear",
    "mlp",
    "optimizer_step_",
    "pointwise_conv2d",
    "squeeze_excite",
]

# torch.jit.trace warns of every question about a size; torch silences it for its own modules. Here the answers choose
# between ways to the same numbers, and each of these goes on with other sizes.
warnings.filterwarnings("ignore", category=torch.jit.TracerWarning, module=r"fusedtrain\.")

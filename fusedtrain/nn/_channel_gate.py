r"""What the channel-attention layers share: :math:`y = x \cdot g(\mathrm{pool}(x))` for any gate network :math:`g`.

Where the op knows the network, the layer is one op. Where it does not (a norm layer in between, an activation the ops
lack, an inner layer replaced by a wrapper or with a hook on it), both passes over the images are still ops, and the
small layers between them are called as they are.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fusedtrain.nn._activation import observed, op_name
from fusedtrain.nn._kind import kind_of
from fusedtrain.nn.linear import Linear
from fusedtrain.nn.pointwise_conv2d import PointwiseConv2d
from fusedtrain.nn.pointwise_conv2d import is_pointwise as is_pointwise_conv
from fusedtrain.ops import channel_pool, channel_scale, squeeze_excite

# torch.fx records a call of one of these as a single node.
torch.fx.wrap("channel_pool")
torch.fx.wrap("squeeze_excite")
torch.fx.wrap("scale")
torch.fx.wrap("as_batch")
torch.fx.wrap("as_before")


def as_batch(x: Tensor) -> Tensor:
    """Returns one image ``[C, H, W]`` as ``[1, C, H, W]``, what the ops take."""
    return x[None] if x.dim() == 3 else x


def as_before(y: Tensor, x: Tensor) -> Tensor:
    """Returns what was made of ``as_batch(x)`` without the batch that ``x`` lacks."""
    return y[0] if x.dim() == 3 else y


def pool(x: Tensor, kind: str = "avg", layer: nn.Module | None = None) -> Tensor:
    """Returns ``[N, C]``: the pooled channels, by ``layer`` where it is given and is not the mean itself."""
    return channel_pool(x, pool=kind) if layer is None or is_mean(layer) else layer(x).flatten(1)


def scale(x: Tensor, gate: Tensor) -> Tensor:
    """Returns ``x * gate`` in the dtype torch would promote to; ``gate`` has one factor per sample and channel."""
    dtype = torch.promote_types(x.dtype, gate.dtype)
    return channel_scale(x.to(dtype), gate.flatten(1).to(dtype))


def as_map(vectors: Tensor) -> Tensor:
    """Returns ``[N, C]`` as ``[N, C, 1, 1]``, for layers that are convolutions."""
    return vectors[:, :, None, None]


def is_mean(layer: nn.Module) -> bool:
    """True for a plain mean over all pixels."""
    return type(layer) is nn.AdaptiveAvgPool2d and layer.output_size in (1, (1, 1)) and not observed(layer)


def is_pointwise(layer: nn.Module, kind: Callable[[nn.Module], type] = kind_of) -> bool:
    """True for a plain Linear or 1x1 convolution: its weight and bias are all that it does. ``kind`` returns the class
    that a layer has, or will have."""
    of = type(layer) if type(layer) in _PLAIN else kind(layer)
    if of in (nn.Conv2d, PointwiseConv2d):
        return is_pointwise_conv(layer) and not observed(layer)
    return of in _PLAIN and not observed(layer)


_PLAIN = (nn.Conv2d, PointwiseConv2d, nn.Linear, Linear)


def fused(
    x: Tensor, fc1: nn.Module, act: nn.Module, fc2: nn.Module, gate: nn.Module, *, kind: str = "avg"
) -> Tensor | None:
    """Returns ``x * gate(fc2(act(fc1(pool(x)))))`` as one op, or None where the layers are not what the op computes."""
    act_name, gate_name = op_name(act), op_name(gate)
    if act_name is None or gate_name is None or not is_pointwise(fc1) or not is_pointwise(fc2):
        return None
    return squeeze_excite(x, fc1.weight, fc1.bias, fc2.weight, fc2.bias, act=act_name, gate=gate_name, pool=kind)

"""Depthwise convolution, batch normalisation, activation and squeeze-and-excitation of inverted residual blocks.

The layers stay where they are in the blocks of timm and torchvision; it is the blocks that call them as one op.
Each call looks at the layers first: with a hook on one of them, or another layer in its place, they run one by one.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fusedtrain.nn import _channel_gate as gates
from fusedtrain.nn import batch_norm_act as norms
from fusedtrain.nn._activation import Layer, observed, op_name
from fusedtrain.nn._kind import kind_of
from fusedtrain.nn._layout import laid_out_as
from fusedtrain.nn._small import stays_stock
from fusedtrain.nn._traced import node_of
from fusedtrain.nn.depthwise_conv2d import (
    DepthwiseConv2d,
    DepthwiseConv2dSame,
    DepthwiseConv2dStaticSame,
    centred_padding,
    has_plain_padding,
    is_depthwise,
)
from fusedtrain.nn.pointwise_conv2d import PointwiseConv2d, is_pointwise
from fusedtrain.nn.squeeze_excite import SEModule, SqueezeExcitation, SqueezeExcite
from fusedtrain.ops import depthwise_bn_act_se
from fusedtrain.ops._codes import INPUT_ACTIVATIONS
from fusedtrain.ops.batch_norm_act_se import batch_norm_act_se
from fusedtrain.ops.pointwise_conv2d import with_moments
from fusedtrain.ops.pointwise_conv2d_norm import pointwise_conv2d_norm

torch.fx.wrap("depthwise_bn_act_se")  # recorded as a single node
torch.fx.wrap("laid_out_as")
torch.fx.wrap("batch_norm_act_se")
torch.fx.wrap("pointwise_conv2d_norm")
torch.fx.wrap("with_moments")

CONVOLUTIONS = (DepthwiseConv2d, DepthwiseConv2dSame, DepthwiseConv2dStaticSame)
BEFORE_NORM = (*CONVOLUTIONS, PointwiseConv2d)
NORMS = (norms.BatchNorm2d, norms.BatchNormAct2d, norms.SyncBatchNormAct)
NORMS += (norms.FrozenBatchNorm2d, norms.FrozenBatchNormAct2d)
GATES = {  # their layers, each with the activation behind it
    SqueezeExcite: ("conv_reduce", "act1", "conv_expand", "gate"),
    SEModule: ("fc1", "act", "fc2", "gate"),
    SqueezeExcitation: ("fc1", "activation", "fc2", "scale_activation"),
}
BEHIND_GATES = ("identity", "relu")  # activations of the sum with a residual


class Gate(NamedTuple):
    """A gate whose layers stand in the block itself."""

    fc1: nn.Module
    act: nn.Module
    fc2: nn.Module
    gate: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() == 3 or x.dim() > 4:  # one image, or as many as the dimensions in front say
            return self(x.reshape(-1, *x.shape[-3:])).reshape(x.shape)
        y = gates.fused(x, *self)
        return gates.scale(x, functools.reduce(_pass_on, self, gates.pool(x))) if y is None else y


def _pass_on(pooled: Tensor, layer: nn.Module) -> Tensor:
    """Convolutions take maps ``[N, C, 1, 1]``, Linear layers vectors, and activations what these made."""
    if isinstance(layer, nn.Conv2d) and pooled.dim() == 2:
        return layer(gates.as_map(pooled))
    return layer(pooled.flatten(1) if isinstance(layer, nn.Linear) else pooled)


def _gate_layers(se: nn.Module | Gate) -> Sequence[nn.Module] | None:
    """Returns the gate's two layers, each with the activation behind it, or None where there is more to it."""
    if type(se) is Gate:
        return se
    kind = kind_of(se)
    if kind not in GATES or observed(se):
        return None
    if kind is SEModule and (se.add_maxpool or op_name(se.bn) != "identity"):
        return None
    if kind is SqueezeExcitation and not gates.is_mean(se.avgpool):
        return None
    return [se._modules[name] for name in GATES[kind]]


def _activation(layers: Sequence[nn.Module | None]) -> tuple[str, list[nn.Module]]:
    """Returns the op's name of the activation that ``layers`` begin with, and the layers left."""
    act, left = "identity", [layer for layer in layers if layer is not None]
    while left:
        name = None if type(left[0]) is Gate else op_name(left[0])
        if name not in (INPUT_ACTIVATIONS if act == "identity" else ("identity",)):
            break
        act = act if name == "identity" else name
        left.pop(0)
    return act, left


def _gate(se: nn.Module | Gate) -> tuple | None:
    """Returns the gate's weights, and the names of its two activations, or None where it is not what the op knows."""
    layers = _gate_layers(se)
    if layers is None:
        return None
    fc1, act, fc2, gate = layers
    names = op_name(act), op_name(gate)
    if None in names or not gates.is_pointwise(fc1) or not gates.is_pointwise(fc2):
        return None
    return (fc1.weight, fc1.bias, fc2.weight, fc2.bias), names


def middle(
    x: Tensor,
    conv: nn.Module | None,
    norm: nn.Module,
    others: Sequence[nn.Module] = (),
    se: nn.Module | Gate | None = None,
    project: nn.Module | None = None,
    sides: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """Returns ``project(se(others(norm(conv(x)))))``, as one op as far as that computes the same; ``conv`` may be
    None. ``sides``: the zeros around x for a depthwise ``conv`` that :func:`takes_sides`, in the place of its own.

    torch.fx records layer by layer, by the names that the stock network has, and for both modes."""
    left = (*others, se, project)
    known = _is_norm(norm) and not isinstance(x, fx.Proxy)
    if conv is not None and not (known and _is_before_norm(conv) and not norms.promotes(norm, x)):
        x, conv = conv(x), None
    if not known:
        return norms.through(left, norm(x))
    if conv is None:
        x = norms.promoted(norm, x)
    act, left = _activation((*norms.behind(norm), *left))
    gate = _gate(left[0]) if left else None
    left = left if gate is None else left[1:]
    if kind_of(conv) in CONVOLUTIONS:
        project = left.pop(0) if left and is_projection(left[0]) else None
        x = _as_one(x, conv, norm, act, gate, project, conv.sides(x) if sides is None else sides)
    elif gate is not None:
        x = _gated(*_convolved(x, conv, norm), norm, act, gate)
    elif conv is None:
        x = norms.normalise(norm, x, act, process_group=norms.group_of(norm))
    else:
        x = _pointwise(x, conv, norm, act)
    return norms.through(left, x) if left else x


def add(
    x: Tensor,
    conv: nn.Module | None,
    norm: nn.Module,
    others: Sequence[nn.Module],
    residual: Tensor,
    in_place: bool = False,
    behind: Sequence[nn.Module] = (),
    se: nn.Module | Gate | None = None,
    residual_first: bool = False,
) -> Tensor:
    """Returns ``behind(se(others(norm(conv(x)))) + residual)``, as one op as far as that computes the same; ``conv``
    and ``se`` may be None. ``in_place``: whether the sum takes the place, and the dtype, of its first operand.
    ``residual_first``: whether that is the residual, the memory format of which the sum then has."""
    x, moments = _convolved(x, conv, norm)
    if _is_norm(norm):
        x = norms.promoted(norm, x)
    if _is_norm(norm) and _is_alike(residual, x) and not (residual_first and _is_ordered_otherwise(residual, x)):
        (act, left), (act_behind, rest) = _activation((*norms.behind(norm), *others)), _activation(behind)
        gate = None if se is None else _gate(se)
        if not left and gate is not None and act_behind in BEHIND_GATES:
            return norms.through(rest, _gated(x, moments, norm, act, gate, residual, act_behind == "relu"))
        if not left and se is None and "identity" in (act, act_behind):
            after = act_behind == "identity"
            name, group = act if after else act_behind, norms.group_of(norm)
            x = norms.normalise(norm, x, name, residual, after, group, moments)
            return norms.through(rest, x) if rest else x
    x = middle(x, None, norm, others, se)
    if residual_first:
        return norms.through(behind, residual + x)
    return norms.through(behind, x.add_(residual) if in_place else x + residual)


def _convolved(x: Tensor, conv: nn.Module | None, norm: nn.Module) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Returns ``conv(x)``, and the moments that ``norm`` takes of it where the convolution gathers them."""
    known = kind_of(conv) is PointwiseConv2d and is_pointwise(conv) and not observed(conv)
    if known and _is_norm(norm) and norms.takes_batch(norm):
        weight = conv.weight
        return with_moments(laid_out_as(weight, x), weight, conv.bias, conv.stride)
    return x if conv is None else conv(x), None


def _is_alike(residual: Tensor, x: Tensor) -> bool:
    if not isinstance(residual, Tensor) or x.dim() != 4:
        return False
    return residual.shape == x.shape and residual.dtype == x.dtype and residual.device == x.device


def _is_ordered_otherwise(a: Tensor, b: Tensor) -> bool:
    """Whether one of two images has its channels behind, and the other does not."""
    (_, c, _, w), (_, other_c, _, other_w) = a.stride(), b.stride()
    return (c < w) != (other_c < other_w)


def is_projection(layer: nn.Module, kind: Callable[[nn.Module], type] = kind_of) -> bool:
    return isinstance(layer, nn.Conv2d) and gates.is_pointwise(layer, kind) and layer.stride == (1, 1)


def _is_norm(layer: nn.Module) -> bool:
    return kind_of(layer) in NORMS and not observed(layer)


def _is_before_norm(layer: nn.Module) -> bool:
    kind = type(layer) if type(layer) is PointwiseConv2d else kind_of(layer)
    if kind is PointwiseConv2d:
        return is_pointwise(layer) and not observed(layer)
    static = kind is DepthwiseConv2dStaticSame
    plain = has_plain_padding(layer) if static else kind in CONVOLUTIONS and layer.padding_mode == "zeros"
    return plain and is_depthwise(layer) and not observed(layer)


def takes_sides(conv: nn.Module, norm: nn.Module) -> bool:
    """Whether :func:`middle` may be told the zeros around its images: it runs these layers as one op, without any."""
    return kind_of(conv) is DepthwiseConv2d and conv.padding == (0, 0) and _is_before_norm(conv) and _is_norm(norm)


def _pointwise(x: Tensor, conv: PointwiseConv2d, norm: nn.Module, act: str) -> Tensor:
    group, weight = norms.group_of(norm), conv.weight
    layers = (weight, conv.bias, *norms.arguments(norm))
    options = {"stride": conv.stride, "act": act, "process_group": group, "num_batches_tracked": norms.counter(norm)}
    return pointwise_conv2d_norm(laid_out_as(weight, x), *layers, **options)


def _gated(
    x: Tensor, moments: tuple | None, norm: nn.Module, act: str, gate: tuple, residual=None, relu: bool = False
) -> Tensor:
    running_mean, running_var, *affine, training, momentum, eps = norms.arguments(norm)
    se, (se_act, gate_act) = gate
    return batch_norm_act_se(
        *(x, running_mean, running_var, *affine, se, training, momentum, eps),
        act=act,
        se_act=se_act,
        gate=gate_act,
        residual=residual,
        relu=relu,
        process_group=norms.group_of(norm),
        moments=moments,
        num_batches_tracked=norms.counter(norm),
    )


def _as_one(
    x: Tensor,
    conv: nn.Module,
    norm: nn.Module,
    act: str,
    gate: tuple | None,
    project: nn.Module | None,
    sides: int | tuple[int, ...] | str,
) -> Tensor:
    running_mean, running_var, *affine, training, momentum, eps = norms.arguments(norm)
    weight, (se, (se_act, gate_act)) = conv.weight, (None, ("relu", "sigmoid")) if gate is None else gate
    return depthwise_bn_act_se(
        *(laid_out_as(weight, x), weight, conv.bias, running_mean, running_var),
        *(*affine, se, training, momentum, eps),
        stride=conv.stride,
        padding=sides,
        dilation=conv.dilation,
        act=act,
        se_act=se_act,
        gate=gate_act,
        process_group=norms.group_of(norm),
        num_batches_tracked=norms.counter(norm),
        projection=None if project is None else (project.weight, project.bias),
        groups=conv.groups,
    )


class DepthwiseBnActSe(nn.Module):
    r"""The middle of an inverted residual block (EfficientNet, MobileNetV3) as one op.

    .. math:: a = \mathrm{act}(\mathrm{bn}(w \star x)), \qquad
        y = a \cdot \sigma(W_2\, \phi(W_1\, \mathrm{mean}_{hw}(a) + b_1) + b_2)

    Args:
        channels: channels C of the images.
        rd_channels: channels R between the gate's two layers.
        kernel_size: of the depthwise convolution.
        stride: of the convolution.
        padding: of the convolution; by default half the kernel size.
        dilation: of the convolution.
        bias: whether the convolution learns a bias.
        act_layer: of the images, a module class or a name such as "relu", "silu", "hard_swish"; None for none.
        se_act_layer: :math:`\phi`, likewise.
        gate_layer: :math:`\sigma`, likewise, such as "sigmoid" or "hard_sigmoid".
        eps: of the normalisation.
        momentum: of the running statistics.
        device: of the parameters.
        dtype: of the parameters.

    Returns:
        From images ``[N, C, H, W]``, contiguous or channels_last, ``[N, C, Ho, Wo]`` in the same dtype and memory
        format. state_dict: ``conv.*`` of :class:`DepthwiseConv2d`, ``bn.*`` of :class:`BatchNormAct2d`, ``se.*`` of
        :class:`SqueezeExcite`. These layers may be replaced; hooks on them are called.

    Raises:
        ValueError: an activation's name is unknown; the images have another shape, or one value per channel in
            training.
        TypeError, RuntimeError: as :func:`fusedtrain.ops.depthwise_bn_act_se`.

    Cost and numerics: those of :func:`fusedtrain.ops.depthwise_bn_act_se`; with an activation that it lacks, those of
    the three layers.
    Source: Howard et al., https://arxiv.org/abs/1905.02244
    """

    def __init__(
        self,
        channels: int,
        rd_channels: int,
        kernel_size: int | tuple[int, int] = 3,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str | None = None,
        dilation: int | tuple[int, int] = 1,
        bias: bool = False,
        act_layer: Layer | None = nn.SiLU,
        se_act_layer: Layer = nn.SiLU,
        gate_layer: Layer = nn.Sigmoid,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        device=None,
        dtype=None,
    ):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        padding = centred_padding(kernel_size, dilation) if padding is None else padding
        self.conv = DepthwiseConv2d(channels, channels, kernel_size, stride, padding, dilation, bias=bias, **factory)
        self.bn = norms.BatchNormAct2d(channels, eps, momentum, act_layer=act_layer, **factory)
        self.se = SqueezeExcite(
            channels, rd_channels=rd_channels, act_layer=se_act_layer, gate_layer=gate_layer, **factory
        )

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, fx.Proxy) and (node := node_of(self, x)) is not None:
            return node
        return middle(x, self.conv, self.bn, (), self.se)


# --- blocks of timm and torchvision: made by fuse() only, with the attributes of the stock class ----------------------


class DepthwiseSeparableConv(nn.Module):
    """timm's ``DepthwiseSeparableConv`` with its layers up to the projection as one op."""

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = middle(_space_to_depth(self, x), self.conv_dw, self.bn1, (self.aa,), self.se, self.conv_pw)
        return add(x, None, self.bn2, (self.drop_path,), shortcut) if self.has_skip else self.bn2(x)


class InvertedResidual(nn.Module):
    """timm's ``InvertedResidual`` with its depthwise convolution and what follows, up to the projection, as one op."""

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = middle(_space_to_depth(self, x), self.conv_pw, self.bn1)
        x = middle(x, self.conv_dw, self.bn2, (self.aa,), self.se, self.conv_pwl)
        return add(x, None, self.bn3, (self.drop_path,), shortcut) if self.has_skip else self.bn3(x)


class MBConvBlock(nn.Module):
    """``MBConvBlock`` of efficientnet_pytorch and segmentation_models_pytorch, with its depthwise convolution and what
    follows, up to the projection, as one op."""

    def forward(self, inputs: Tensor, drop_connect_rate: float | None = None) -> Tensor:
        if isinstance(inputs, fx.Proxy) or stays_stock(self, inputs):
            return super().forward(inputs, drop_connect_rate)
        has_expansion, has_gate, has_skip = _parts_of_mbconv(self)
        x = middle(inputs, self._expand_conv, self._bn0, (self._swish,)) if has_expansion else inputs
        gate = Gate(self._se_reduce, self._swish, self._se_expand, _SIGMOID) if has_gate else None
        x = middle(x, self._depthwise_conv, self._bn1, (self._swish,), gate, self._project_conv)
        if has_skip and not (drop_connect_rate and self.training):
            return add(x, None, self._bn2, (), inputs)
        x = self._bn2(x)
        if not has_skip:
            return x
        kept = 1 - drop_connect_rate
        mask = torch.floor(kept + torch.rand([len(x), 1, 1, 1], dtype=x.dtype, device=x.device))
        return x / kept * mask + inputs


_SIGMOID = nn.Sigmoid()


def _parts_of_mbconv(block: nn.Module) -> tuple[bool, bool, bool]:
    """Whether a block expands, has a gate, and adds its input, as its two versions say it."""
    if hasattr(block, "_has_expansion"):
        return block._has_expansion, block._has_se, block._has_drop_connect
    args = block._block_args
    has_skip = block.id_skip and args.stride == 1 and args.input_filters == args.output_filters
    return args.expand_ratio != 1, block.has_se, has_skip


class TransformersConvLayer(nn.Module):
    """``MobileNetV1ConvLayer`` and ``MobileNetV2ConvLayer`` of Transformers with a depthwise or 1x1 convolution as one
    op, also with TensorFlow's "same" padding, which costs no copy of the images then."""

    def forward(self, features: Tensor) -> Tensor:
        conv, norm, sides = self.convolution, self.normalization, None
        if self.config.tf_padding:
            shapes = zip(features.shape[:-3:-1], conv.kernel_size[::-1], conv.stride[::-1], conv.dilation[::-1])
            along = [(max(k - (size % stride or stride), 0), spread) for size, k, stride, spread in shapes]
            sides = [zeros * spread for n, spread in along for zeros in (n // 2, n - n // 2)]
            sides = tuple(sides) if any(sides) else None
        if sides is not None and not takes_sides(conv, norm):
            features, sides = F.pad(features, sides), None
        return middle(features, conv, norm, (self.activation,), sides=sides)


class ConvNormAct(nn.Module):
    """timm's ``ConvNormAct`` with a depthwise convolution as one op (``dw_mid`` of MobileNetV4), or with a 1x1 one."""

    def forward(self, x: Tensor) -> Tensor:
        aa = getattr(self, "aa", None)
        return middle(x, self.conv, self.bn, () if aa is None else (aa,))


BLOCKS = (DepthwiseSeparableConv, InvertedResidual, MBConvBlock)


def is_pair(layer: nn.Module | None) -> bool:
    """True for timm's ``ConvNormAct`` of nothing but a convolution ``conv`` and a normalisation ``bn``."""
    known = kind_of(layer) is ConvNormAct or f"{type(layer).__module__}.{type(layer).__qualname__}" == _PAIR
    return known and type(getattr(layer, "aa", None)) in (type(None), nn.Identity) and not observed(layer)


_PAIR = "timm.layers.conv_bn_act.ConvNormAct"


def _space_to_depth(block: nn.Module, x: Tensor) -> Tensor:
    return x if getattr(block, "conv_s2d", None) is None else block.bn_s2d(block.conv_s2d(x))


class Sequential(nn.Sequential):
    """A Sequential that calls convolution, normalisation, activation and gate, where they follow each other, as one op.

    The blocks of torchvision are such; what is before a gate may stand in a Sequential of its own.
    """

    def forward(self, input: Tensor) -> Tensor:
        if stays_stock(self, input):
            return super().forward(input)
        layers, i = list(self), 0
        while i < len(layers):
            found = find(layers[i:], kind_of)
            if found is None:
                input = layers[i](input)
                i += 1
            else:
                *parts, count = found
                input = middle(input, *parts)
                i += count
        return input


class Conv2dNormActivation(Sequential):
    """torchvision's ``Conv2dNormActivation`` with a depthwise convolution as one op, or with a 1x1 one."""


def find(layers: Sequence[nn.Module], kind: Callable[[nn.Module], type]) -> tuple | None:
    """Looks whether ``layers`` begin with what :func:`middle` takes.

    Args:
        layers: children of a Sequential, at least one.
        kind: returns the class that a layer has, or will have.

    Returns:
        convolution or None, normalisation, activations, gate or None, and how many of ``layers`` these are; or None.
    """
    nested = isinstance(layers[0], nn.Sequential) and type(layers[0]).forward in _PLAIN and not observed(layers[0])
    nested = nested and len(layers[0]) > 0
    steps = list(layers[0]) if nested else layers
    alone = kind(steps[0]) in NORMS
    conv, (norm, *behind) = (None, steps) if alone else (steps[0], steps[1:] or [None])
    if kind(norm) not in NORMS:
        return None
    acts = []
    for layer in behind:  # takewhile breaks graphs of torch 2.11
        if op_name(layer) not in INPUT_ACTIVATIONS:
            break
        acts.append(layer)
    count = len(steps) - len(behind) + len(acts)
    next_one = layers[1:2] if nested else layers[count : count + 1]
    gate = next_one[0] if next_one and kind(next_one[0]) in GATES else None
    useful = any(op_name(act) != "identity" for act in acts) if alone else kind(conv) in BEFORE_NORM
    if gate is None and not useful:
        return None
    if nested and (gate is None or count < len(steps)):
        return None  # it is a block by itself, or more than one
    return conv, norm, acts, gate, (1 if nested else count) + (gate is not None)


_PLAIN = (nn.Sequential.forward, Sequential.forward)

"""Split attention: a grouped convolution's groups of channels, averaged by weights that come from their own means."""

import torch
from torch import Tensor, nn

from fusedtrain.nn import _channel_gate as gates
from fusedtrain.nn._activation import Layer, create
from fusedtrain.nn.depthwise_bn_act_se import middle
from fusedtrain.nn.squeeze_excite import make_divisible

torch.fx.wrap("pool_splits")  # recorded as single nodes
torch.fx.wrap("normalised")
torch.fx.wrap("average")


def pool_splits(x: Tensor, radix: int) -> Tensor:
    """Returns ``[N, C, 1, 1]``, the means of ``[N, radix * C, H, W]``, summed over the splits."""
    pooled = gates.pool(x)
    return gates.as_map(pooled.unflatten(1, (radix, -1)).sum(1) if radix > 1 else pooled)


def normalised(logits: Tensor, radix: int, cardinality: int) -> Tensor:
    """Returns ``[N, radix * C]``, the softmax over the splits in every group of channels; of one split the sigmoid."""
    if radix == 1:
        return torch.sigmoid(logits)
    return logits.view(logits.shape[0], cardinality, radix, -1).transpose(1, 2).softmax(1).flatten(1)


def average(x: Tensor, gate: Tensor, radix: int) -> Tensor:
    """Returns the sum of the splits of ``[N, radix * C, H, W]``, each channel times its gate: contiguous, as timm's."""
    y = gates.scale(x, gate)
    return (y.unflatten(1, (radix, -1)).sum(1) if radix > 1 else y).contiguous()


class RadixSoftmax(nn.Module):
    """The gates of the splits from their logits ``[N, radix * C, 1, 1]``."""

    def __init__(self, radix: int, cardinality: int):
        super().__init__()
        self.radix = radix
        self.cardinality = cardinality

    def forward(self, x: Tensor) -> Tensor:
        return normalised(x, self.radix, self.cardinality)


class SplitAttn(nn.Module):
    r"""Split attention of ResNeSt, a convolution with its gate, in the place of ``timm.layers.SplitAttn``.

    .. math:: a = \phi(\mathrm{norm}(\mathrm{conv}(x))), \quad
              s = \mathrm{softmax}_r\bigl(W_2\, \phi(\mathrm{norm}(W_1 \sum_r \mathrm{mean}_{hw}(a_r)))\bigr), \quad
              y = \sum_r s_r\, a_r

    with the sigmoid in the place of the softmax where ``radix`` is 1.

    Args:
        in_channels: channels of the images.
        out_channels: channels C of the output, default ``in_channels``.
        kernel_size: of the convolution.
        stride: of the convolution.
        padding: of the convolution, default ``kernel_size // 2``.
        dilation: of the convolution.
        groups: of channels within a split, of all layers.
        bias: whether the convolution has a bias.
        radix: how many splits, the r of the formula.
        rd_ratio: hidden channels over ``in_channels * radix``, where ``rd_channels`` is not given; at least 32.
        rd_channels: hidden channels over ``radix``.
        rd_divisor: hidden channels are rounded to a multiple of it.
        act_layer: :math:`\phi`, a module class.
        norm_layer: a norm layer's class, called with the channels; None leaves both norms out.
        drop_layer: a module class, called without arguments, between the first norm and its activation.
        kwargs: ``device`` and ``dtype`` of the parameters; others go to the convolution.

    Returns:
        From ``[N, in_channels, H, W]``, contiguous or channels_last, ``[N, C, Ho, Wo]``, contiguous as timm's.
        state_dict: ``conv.*``, ``bn0.*``, ``fc1.*``, ``bn1.*``, ``fc2.*``.

    Raises:
        ValueError, TypeError, RuntimeError: as ``nn.Conv2d`` and :func:`fusedtrain.ops.channel_pool`.

    Cost: in a model after :func:`fusedtrain.fuse`, the norm and activation are one op; then those of
    :func:`~fusedtrain.ops.channel_pool` and :func:`~fusedtrain.ops.channel_scale`, and the sum of the splits.
    Numerics: those of these ops.
    Source: Zhang et al., https://arxiv.org/abs/2004.08955; ``timm.layers.split_attn.SplitAttn``
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        kernel_size: int = 3,
        stride: int = 1,
        padding: int | None = None,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = False,
        radix: int = 2,
        rd_ratio: float = 0.25,
        rd_channels: int | None = None,
        rd_divisor: int = 8,
        act_layer: Layer = nn.ReLU,
        norm_layer: type[nn.Module] | None = None,
        drop_layer: type[nn.Module] | None = None,
        **kwargs,
    ):
        super().__init__()
        options = {"device": kwargs.pop("device", None), "dtype": kwargs.pop("dtype", None)}
        out_channels = out_channels or in_channels
        self.radix = radix
        if rd_channels is None:
            hidden = make_divisible(in_channels * radix * rd_ratio, rd_divisor, min_value=32)
        else:
            hidden = rd_channels * radix
        padding = kernel_size // 2 if padding is None else padding
        channels = out_channels * radix
        self.conv = nn.Conv2d(
            *(in_channels, channels, kernel_size, stride, padding, dilation, groups * radix, bias),
            **kwargs,
            **options,
        )
        self.bn0 = norm_layer(channels, **options) if norm_layer else nn.Identity()
        self.drop = drop_layer() if drop_layer is not None else nn.Identity()
        self.act0 = create(act_layer, inplace=True)
        self.fc1 = nn.Conv2d(out_channels, hidden, 1, groups=groups, **options)
        self.bn1 = norm_layer(hidden, **options) if norm_layer else nn.Identity()
        self.act1 = create(act_layer, inplace=True)
        self.fc2 = nn.Conv2d(hidden, channels, 1, groups=groups, **options)
        self.rsoftmax = RadixSoftmax(radix, groups)

    def forward(self, x: Tensor) -> Tensor:
        x = middle(x, self.conv, self.bn0, (self.drop, self.act0))
        hidden = self.act1(self.bn1(self.fc1(pool_splits(x, self.radix))))
        return average(x, self.rsoftmax(self.fc2(hidden)), self.radix)

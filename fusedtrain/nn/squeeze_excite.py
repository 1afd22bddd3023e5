r"""Squeeze-and-excitation layers under the names, constructor arguments and state_dict keys of timm and torchvision.

Each computes :math:`y = x \cdot \sigma(W_2\, \phi(W_1\, \mathrm{pool}(x) + b_1) + b_2)` by
:func:`fusedtrain.ops.squeeze_excite`; what that op cannot express runs as its two halves with the layer's own inner
modules in between. Every layer has exactly the attributes of the original, so weights load both ways and hooks,
wrappers and replaced inner modules act as they do there.
"""

from collections.abc import Callable

from torch import Tensor, nn

from fusedtrain.nn import _channel_gate as gates
from fusedtrain.nn._activation import Layer, create, observed, op_name


def make_divisible(channels: float, divisor: int = 8, round_limit: float = 0.9, min_value: int | None = None) -> int:
    """Rounds to the nearest multiple of ``divisor``, at least ``min_value`` (default ``divisor``), and up where that
    would leave less than ``round_limit * channels``."""
    rounded = max(min_value or divisor, int(channels + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < round_limit * channels else rounded


class SqueezeExcite(nn.Module):
    r"""Squeeze-and-excitation as in EfficientNet and MobileNetV3, in the place of timm's ``SqueezeExcite`` there.

    .. math:: y = x \cdot \sigma(W_2\, \phi(W_1\, \mathrm{mean}_{hw}(x) + b_1) + b_2)

    Args:
        in_chs: channels C of the images.
        rd_ratio: R / C, where ``rd_channels`` is not given.
        rd_channels: channels R between the two layers.
        act_layer: :math:`\phi`, a module class or a name such as "relu", "silu", "hard_swish".
        gate_layer: :math:`\sigma`, likewise, such as "sigmoid" or "hard_sigmoid".
        force_act_layer: overrides ``act_layer``.
        rd_round_fn: makes R of ``in_chs * rd_ratio``; default ``round``.
        device: of the parameters.
        dtype: of the parameters.

    Returns:
        From images ``[N, C, H, W]``, contiguous or channels_last, the same shape, dtype and memory format. state_dict:
        ``conv_reduce.weight`` ``[R, C, 1, 1]``, ``conv_reduce.bias``, ``conv_expand.weight`` ``[C, R, 1, 1]``,
        ``conv_expand.bias``.

    Raises:
        ValueError: an activation's name is unknown; the images have another shape.
        TypeError, RuntimeError: as :func:`fusedtrain.ops.squeeze_excite`.

    Cost and numerics: those of :func:`fusedtrain.ops.squeeze_excite`; with an activation that the ops lack, those of
    :func:`~fusedtrain.ops.channel_pool` and :func:`~fusedtrain.ops.channel_scale`.
    Source: Hu et al., https://arxiv.org/abs/1709.01507; ``timm.models._efficientnet_blocks.SqueezeExcite``
    """

    def __init__(
        self,
        in_chs: int,
        rd_ratio: float = 0.25,
        rd_channels: int | None = None,
        act_layer: Layer = nn.ReLU,
        gate_layer: Layer = nn.Sigmoid,
        force_act_layer: Layer | None = None,
        rd_round_fn: Callable[[float], int] | None = None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if rd_channels is None:
            rd_channels = (rd_round_fn or round)(in_chs * rd_ratio)
        self.conv_reduce = nn.Conv2d(in_chs, rd_channels, 1, device=device, dtype=dtype)
        self.act1 = create(force_act_layer or act_layer, inplace=True)
        self.conv_expand = nn.Conv2d(rd_channels, in_chs, 1, device=device, dtype=dtype)
        self.gate = create(gate_layer)

    def forward(self, x: Tensor) -> Tensor:
        y = gates.fused(x, self.conv_reduce, self.act1, self.conv_expand, self.gate)
        if y is not None:
            return y
        hidden = self.act1(self.conv_reduce(gates.as_map(gates.pool(x))))
        return gates.scale(x, self.gate(self.conv_expand(hidden)))


class SEModule(nn.Module):
    r"""Squeeze-and-excitation as in SE-Net and RegNet-Y, in the place of ``timm.layers.SEModule``.

    .. math:: y = x \cdot \sigma(W_2\, \phi(\mathrm{norm}(W_1\, \mathrm{pool}(x) + b_1)) + b_2)

    Args:
        channels: channels C of the images.
        rd_ratio: R / C, where ``rd_channels`` is not given.
        rd_channels: channels R between the two layers.
        rd_divisor: R is rounded to a multiple of it.
        add_maxpool: pools to ``0.5 * mean + 0.5 * max`` instead of the mean.
        bias: whether the two layers have biases.
        act_layer: :math:`\phi`, a module class or a name such as "relu", "silu", "hard_swish".
        norm_layer: a norm layer's class, called with R; the layer then runs as two ops around its inner modules.
        gate_layer: :math:`\sigma`, a module class or a name such as "sigmoid" or "hard_sigmoid".
        device: of the parameters.
        dtype: of the parameters.

    Returns:
        From images ``[N, C, H, W]``, contiguous or channels_last, the same shape, dtype and memory format. state_dict:
        ``fc1.weight`` ``[R, C, 1, 1]``, ``fc1.bias``, ``bn.*`` of a norm layer, ``fc2.weight`` ``[C, R, 1, 1]``,
        ``fc2.bias``.

    Raises:
        ValueError: an activation's name is unknown; the images have another shape.
        TypeError, RuntimeError: as :func:`fusedtrain.ops.squeeze_excite`.

    Cost and numerics: those of :func:`fusedtrain.ops.squeeze_excite`; with a norm layer or an activation that the ops
    lack, those of :func:`~fusedtrain.ops.channel_pool` and :func:`~fusedtrain.ops.channel_scale`.
    Source: Hu et al., https://arxiv.org/abs/1709.01507; ``timm.layers.squeeze_excite.SEModule``
    """

    def __init__(
        self,
        channels: int,
        rd_ratio: float = 1.0 / 16,
        rd_channels: int | None = None,
        rd_divisor: int = 8,
        add_maxpool: bool = False,
        bias: bool = True,
        act_layer: Layer = nn.ReLU,
        norm_layer: Callable[..., nn.Module] | None = None,
        gate_layer: Layer = "sigmoid",
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.add_maxpool = add_maxpool
        if not rd_channels:
            rd_channels = make_divisible(channels * rd_ratio, rd_divisor, round_limit=0.0)
        self.fc1 = nn.Conv2d(channels, rd_channels, kernel_size=1, bias=bias, device=device, dtype=dtype)
        self.bn = norm_layer(rd_channels, device=device, dtype=dtype) if norm_layer else nn.Identity()
        self.act = create(act_layer, inplace=True)
        self.fc2 = nn.Conv2d(rd_channels, channels, kernel_size=1, bias=bias, device=device, dtype=dtype)
        self.gate = create(gate_layer)

    def forward(self, x: Tensor) -> Tensor:
        kind = "avg_max" if self.add_maxpool else "avg"
        if op_name(self.bn) == "identity":
            y = gates.fused(x, self.fc1, self.act, self.fc2, self.gate, kind=kind)
            if y is not None:
                return y
        hidden = self.act(self.bn(self.fc1(gates.as_map(gates.pool(x, kind)))))
        return gates.scale(x, self.gate(self.fc2(hidden)))


class SENetModule(nn.Module):
    r"""Squeeze-and-excitation of the original SE-Net port, in the place of ``timm.models.senet.SEModule``.

    .. math:: y = x \cdot \mathrm{sigmoid}(W_2\, \mathrm{relu}(W_1\, \mathrm{mean}_{hw}(x) + b_1) + b_2)

    Args:
        channels: channels C of the images.
        reduction: C / R, rounded down, with R channels between the two layers.
        device: of the parameters.
        dtype: of the parameters.

    Returns:
        From images ``[N, C, H, W]``, contiguous or channels_last, the same shape, dtype and memory format. state_dict:
        ``fc1.weight`` ``[R, C, 1, 1]``, ``fc1.bias``, ``fc2.weight`` ``[C, R, 1, 1]``, ``fc2.bias``.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`fusedtrain.ops.squeeze_excite`.

    Cost and numerics: those of :func:`fusedtrain.ops.squeeze_excite`.
    Source: Hu et al., https://arxiv.org/abs/1709.01507; ``timm.models.senet.SEModule``
    """

    def __init__(self, channels: int, reduction: int, device=None, dtype=None):
        super().__init__()
        self.fc1 = nn.Conv2d(channels, channels // reduction, kernel_size=1, device=device, dtype=dtype)
        self.relu = nn.ReLU(inplace=True)
        self.fc2 = nn.Conv2d(channels // reduction, channels, kernel_size=1, device=device, dtype=dtype)
        self.sigmoid = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        y = gates.fused(x, self.fc1, self.relu, self.fc2, self.sigmoid)
        if y is not None:
            return y
        hidden = self.relu(self.fc1(gates.as_map(gates.pool(x))))
        return gates.scale(x, self.sigmoid(self.fc2(hidden)))


class SqueezeExcitation(nn.Module):
    r"""Squeeze-and-excitation in the place of ``torchvision.ops.SqueezeExcitation``.

    .. math:: y = x \cdot \sigma(W_2\, \phi(W_1\, \mathrm{mean}_{hw}(x) + b_1) + b_2)

    Args:
        input_channels: channels C of the images.
        squeeze_channels: channels R between the two layers.
        activation: makes :math:`\phi`, a module class or a name such as "relu", "silu", "hard_swish".
        scale_activation: makes :math:`\sigma`, likewise, such as "sigmoid" or "hard_sigmoid".

    Returns:
        From images ``[N, C, H, W]``, contiguous or channels_last, or one image ``[C, H, W]``, the same shape, dtype and
        memory format. state_dict: ``fc1.weight`` ``[R, C, 1, 1]``, ``fc1.bias``, ``fc2.weight`` ``[C, R, 1, 1]``,
        ``fc2.bias``.

    Raises:
        ValueError: an activation's name is unknown; the images have another shape.
        TypeError, RuntimeError: as :func:`fusedtrain.ops.squeeze_excite`.

    Cost and numerics: those of :func:`fusedtrain.ops.squeeze_excite`; with an activation that the ops lack, those of
    :func:`~fusedtrain.ops.channel_pool` and :func:`~fusedtrain.ops.channel_scale`.
    Source: Hu et al., https://arxiv.org/abs/1709.01507; ``torchvision.ops.misc.SqueezeExcitation``
    """

    def __init__(
        self,
        input_channels: int,
        squeeze_channels: int,
        activation: Layer = nn.ReLU,
        scale_activation: Layer = nn.Sigmoid,
    ):
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(input_channels, squeeze_channels, 1)
        self.fc2 = nn.Conv2d(squeeze_channels, input_channels, 1)
        self.activation = create(activation)
        self.scale_activation = create(scale_activation)

    def forward(self, input: Tensor) -> Tensor:
        x = gates.as_batch(input)
        y = None
        if gates.is_mean(self.avgpool):
            y = gates.fused(x, self.fc1, self.activation, self.fc2, self.scale_activation)
        if y is None:
            hidden = self.activation(self.fc1(gates.as_map(gates.pool(x, layer=self.avgpool))))
            y = gates.scale(x, self.scale_activation(self.fc2(hidden)))
        return gates.as_before(y, input)


class SEBlock(nn.Module):
    r"""Squeeze-and-excitation as it is usually written by hand, with Linear layers in a Sequential ``fc``.

    .. math:: y = x \cdot \sigma(W_2\, \phi(W_1\, \mathrm{mean}_{hw}(x)))

    Args:
        channels: channels C of the images.
        reduction: C / R, rounded down, with R channels between the two layers.
        bias: whether the two layers have biases.
        act_layer: :math:`\phi`, a module class or a name such as "relu", "silu", "hard_swish".
        gate_layer: :math:`\sigma`, likewise, such as "sigmoid" or "hard_sigmoid".
        device: of the parameters.
        dtype: of the parameters.

    Returns:
        From images ``[N, C, H, W]``, contiguous or channels_last, the same shape, dtype and memory format. state_dict:
        ``fc.0.weight`` ``[R, C]``, ``fc.2.weight`` ``[C, R]``, and ``fc.0.bias``, ``fc.2.bias`` where ``bias`` is set.

    Raises:
        ValueError: an activation's name is unknown; the images have another shape.
        TypeError, RuntimeError: as :func:`fusedtrain.ops.squeeze_excite`.

    Cost and numerics: those of :func:`fusedtrain.ops.squeeze_excite`; with an activation that the ops lack, those of
    :func:`~fusedtrain.ops.channel_pool` and :func:`~fusedtrain.ops.channel_scale`.
    Source: Hu et al., https://arxiv.org/abs/1709.01507; https://github.com/moskomule/senet.pytorch
    """

    def __init__(
        self,
        channels: int,
        reduction: int = 16,
        bias: bool = False,
        act_layer: Layer = nn.ReLU,
        gate_layer: Layer = nn.Sigmoid,
        device=None,
        dtype=None,
    ):
        super().__init__()
        hidden = channels // reduction
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(
            nn.Linear(channels, hidden, bias=bias, device=device, dtype=dtype),
            create(act_layer, inplace=True),
            nn.Linear(hidden, channels, bias=bias, device=device, dtype=dtype),
            create(gate_layer),
        )

    def forward(self, x: Tensor) -> Tensor:
        if (
            gates.is_mean(self.avg_pool)
            and type(self.fc) is nn.Sequential
            and len(self.fc) == 4
            and not observed(self.fc)
        ):
            y = gates.fused(x, *self.fc)
            if y is not None:
                return y
        return gates.scale(x, self.fc(gates.pool(x, layer=self.avg_pool)))


class EffectiveSEModule(nn.Module):
    r"""Squeeze-and-excitation with a single layer (VoVNet, CenterMask), in the place of timm's ``EffectiveSEModule``.

    .. math:: y = x \cdot \sigma(W\, \mathrm{pool}(x) + b)

    Args:
        channels: channels C of the images.
        add_maxpool: pools to ``0.5 * mean + 0.5 * max`` instead of the mean.
        gate_layer: :math:`\sigma`, a module class or a name such as "sigmoid" or "hard_sigmoid".
        device: of the parameters.
        dtype: of the parameters.
        _: timm's attention factory passes options of other layers; as there they have no effect.

    Returns:
        From images ``[N, C, H, W]``, contiguous or channels_last, the same shape, dtype and memory format. state_dict:
        ``fc.weight`` ``[C, C, 1, 1]``, ``fc.bias``.

    Raises:
        ValueError: the gate's name is unknown; the images have another shape.
        TypeError, RuntimeError: as :func:`fusedtrain.ops.channel_pool`.

    Cost and numerics: those of :func:`~fusedtrain.ops.channel_pool`, :func:`~fusedtrain.ops.channel_scale` and, between
    them, torch's layers on ``[N, C, 1, 1]``.
    Source: Lee and Park, https://arxiv.org/abs/1911.06667; ``timm.layers.squeeze_excite.EffectiveSEModule``
    """

    def __init__(
        self,
        channels: int,
        add_maxpool: bool = False,
        gate_layer: Layer = "hard_sigmoid",
        device=None,
        dtype=None,
        **_,
    ):
        super().__init__()
        self.add_maxpool = add_maxpool
        self.fc = nn.Conv2d(channels, channels, kernel_size=1, device=device, dtype=dtype)
        self.gate = create(gate_layer)

    def forward(self, x: Tensor) -> Tensor:
        pooled = gates.pool(x, "avg_max" if self.add_maxpool else "avg")
        return gates.scale(x, self.gate(self.fc(gates.as_map(pooled))))


class EseModule(nn.Module):
    r"""Squeeze-and-excitation with a single layer, in the place of the ``EseModule`` of timm's HGNet.

    .. math:: y = x \cdot \sigma(W\, \mathrm{mean}_{hw}(x) + b)

    Args:
        chs: channels C of the images.
        device: of the parameters.
        dtype: of the parameters.

    Returns:
        From images ``[N, C, H, W]``, contiguous or channels_last, the same shape, dtype and memory format. state_dict:
        ``conv.weight`` ``[C, C, 1, 1]``, ``conv.bias``.

    Raises:
        ValueError: the images have another shape.
        TypeError, RuntimeError: as :func:`fusedtrain.ops.channel_pool`.

    Cost and numerics: those of :class:`EffectiveSEModule`.
    Source: ``timm.models.hgnet.EseModule``
    """

    def __init__(self, chs: int, device=None, dtype=None):
        super().__init__()
        self.conv = nn.Conv2d(chs, chs, kernel_size=1, device=device, dtype=dtype)
        self.sigmoid = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return gates.scale(x, self.sigmoid(self.conv(gates.as_map(gates.pool(x)))))


class SqueezeExciteCl(nn.Module):
    r"""Squeeze-and-excitation of images with the channels behind, in the place of timm's ``SqueezeExciteCl``.

    .. math:: y = x \cdot \sigma(W_2\, \phi(W_1\, \mathrm{mean}_{hw}(x) + b_1) + b_2)

    Args:
        channels: channels C of the images.
        rd_ratio: R / C, where ``rd_channels`` is not given.
        rd_channels: channels R between the two layers.
        rd_divisor: R is rounded to a multiple of it.
        bias: whether the two layers have biases.
        act_layer: :math:`\phi`, a module class or a name such as "relu", "silu", "hard_swish".
        gate_layer: :math:`\sigma`, likewise, such as "sigmoid" or "hard_sigmoid".
        device: of the parameters.
        dtype: of the parameters.

    Returns:
        From images ``[N, H, W, C]``, contiguous or the permuted view of contiguous ``[N, C, H, W]``, the same shape,
        dtype and strides. state_dict: ``fc1.weight`` ``[R, C]``, ``fc1.bias``, ``fc2.weight`` ``[C, R]``, ``fc2.bias``.

    Raises:
        ValueError: an activation's name is unknown; the images have another shape.
        TypeError, RuntimeError: as :func:`fusedtrain.ops.squeeze_excite`.

    Cost: that of :class:`SEModule` on channels_last images, which these are in memory: nothing is copied.
    Numerics: those of :func:`fusedtrain.ops.squeeze_excite`.
    Source: Hu et al., https://arxiv.org/abs/1709.01507; ``timm.layers.squeeze_excite.SqueezeExciteCl``
    """

    def __init__(
        self,
        channels: int,
        rd_ratio: float = 1.0 / 16,
        rd_channels: int | None = None,
        rd_divisor: int = 8,
        bias: bool = True,
        act_layer: Layer = nn.ReLU,
        gate_layer: Layer = "sigmoid",
        device=None,
        dtype=None,
    ):
        super().__init__()
        if not rd_channels:
            rd_channels = make_divisible(channels * rd_ratio, rd_divisor, round_limit=0.0)
        self.fc1 = nn.Linear(channels, rd_channels, bias=bias, device=device, dtype=dtype)
        self.act = create(act_layer, inplace=True)
        self.fc2 = nn.Linear(rd_channels, channels, bias=bias, device=device, dtype=dtype)
        self.gate = create(gate_layer)

    def forward(self, x: Tensor) -> Tensor:
        images = x.permute(0, 3, 1, 2)
        y = gates.fused(images, self.fc1, self.act, self.fc2, self.gate)
        if y is None:
            hidden = self.act(self.fc1(gates.pool(images)[:, None, None]))
            y = gates.scale(images, self.gate(self.fc2(hidden)))
        return y.permute(0, 2, 3, 1)

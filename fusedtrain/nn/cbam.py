"""Convolutional block attention: gates for the channels, then gates for the pixels.

Pixels are what channels are to the ops once an image ``[N, C, H, W]`` is seen as ``[N, HW, C, 1]``: contiguous images
are channels_last ones then, and the other way round, so that nothing is copied.
"""

import torch
from torch import Tensor, nn

from fusedtrain import backend
from fusedtrain.nn import _channel_gate as gates
from fusedtrain.nn._activation import Layer, create, op_name
from fusedtrain.nn.batch_norm_act import BatchNormAct2d
from fusedtrain.nn.squeeze_excite import make_divisible
from fusedtrain.ops import _common, channel_pool
from fusedtrain.ops.channel_pool import IMPLS, mean_and_max

torch.fx.wrap("pool_twice")  # recorded as single nodes
torch.fx.wrap("joined")
torch.fx.wrap("summed")
torch.fx.wrap("pixel_means_and_maxima")
torch.fx.wrap("pixel_averages")
torch.fx.wrap("scale_pixels")


def _by_pixel(x: Tensor) -> Tensor | None:
    """Returns images as ``[N, HW, C, 1]``; None where stock PyTorch is to run, by measurement or for its strides."""
    rows = _common.is_channels_last(x)
    slower = backend.is_automatic() and not (x.is_cpu and (rows or x.element_size() < 4))
    if slower or not (rows or x.is_contiguous()):
        return None
    if backend.select("channel_pool", IMPLS, x, 1, 0).backward is None:
        return None
    return (x.permute(0, 2, 3, 1).flatten(1, 2) if rows else x.flatten(2).transpose(1, 2))[..., None]


def pool_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the means and the maxima of the channels, ``[N, C, 1, 1]`` each."""
    mean, peak = mean_and_max(x)
    return gates.as_map(mean), gates.as_map(peak)


def joined(pooled: tuple[Tensor, Tensor]) -> Tensor:
    return torch.cat(pooled)


def summed(halves: Tensor) -> Tensor:
    """The first half of a batch plus the second."""
    mean, peak = halves.chunk(2)
    return mean + peak


def pixel_means_and_maxima(x: Tensor) -> Tensor:
    """Returns the means and the maxima over the channels, ``[N, 2, H, W]``."""
    pixels = _by_pixel(x) if x.element_size() < 4 else None
    if pixels is None:
        return torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
    return torch.stack(mean_and_max(pixels), 1).unflatten(2, x.shape[2:])


def pixel_averages(x: Tensor) -> Tensor:
    """Returns half the mean over the channels plus half their maximum, ``[N, 1, H, W]``."""
    pixels = _by_pixel(x)
    if pixels is None:
        return 0.5 * x.mean(1, keepdim=True) + 0.5 * x.amax(1, keepdim=True)
    return channel_pool(pixels, pool="avg_max").view(x.shape[0], 1, *x.shape[2:])


def scale_pixels(x: Tensor, gate: Tensor) -> Tensor:
    """Returns ``x * gate``, with one factor per pixel, ``[N, 1, H, W]``."""
    pixels = _by_pixel(x)
    if pixels is None or gate.shape != (x.shape[0], 1, *x.shape[2:]):
        return x * gate
    return gates.scale(pixels, gate)[..., 0].transpose(1, 2).unflatten(2, x.shape[2:])


class ChannelAttn(nn.Module):
    r"""The gates of :class:`CbamModule` for the channels, in the place of ``timm.layers.cbam.ChannelAttn``."""

    def __init__(
        self,
        channels: int,
        rd_ratio: float = 1.0 / 16,
        rd_channels: int | None = None,
        rd_divisor: int = 1,
        act_layer: Layer = nn.ReLU,
        gate_layer: Layer = "sigmoid",
        mlp_bias: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if not rd_channels:
            rd_channels = make_divisible(channels * rd_ratio, rd_divisor, round_limit=0.0)
        self.fc1 = nn.Conv2d(channels, rd_channels, 1, bias=mlp_bias, device=device, dtype=dtype)
        self.act = create(act_layer, inplace=True)
        self.fc2 = nn.Conv2d(rd_channels, channels, 1, bias=mlp_bias, device=device, dtype=dtype)
        self.gate = create(gate_layer)

    def forward(self, x: Tensor) -> Tensor:
        pooled = pool_twice(x)
        if gates.is_pointwise(self.fc1) and gates.is_pointwise(self.fc2) and op_name(self.act) is not None:
            return gates.scale(x, self.gate(summed(self._through(joined(pooled)))))
        return gates.scale(x, self.gate(self._through(pooled[0]) + self._through(pooled[1])))

    def _through(self, pooled: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(pooled)))


class LightChannelAttn(ChannelAttn):
    r"""The gates of :class:`LightCbamModule` for the channels, in the place of timm's ``LightChannelAttn``."""

    def forward(self, x: Tensor) -> Tensor:
        y = gates.fused(x, self.fc1, self.act, self.fc2, _SIGMOID, kind="avg_max")
        return gates.scale(x, self._through(gates.as_map(gates.pool(x, "avg_max"))).sigmoid()) if y is None else y


_SIGMOID = nn.Sigmoid()  # whatever gate timm's layer is told


class ConvNorm(nn.Module):
    """A convolution to one channel and its normalisation, under the names of timm's ``ConvNormAct``."""

    def __init__(self, in_channels: int, kernel_size: int, device=None, dtype=None):
        super().__init__()
        options = {"device": device, "dtype": dtype}
        self.conv = nn.Conv2d(in_channels, 1, kernel_size, padding=kernel_size // 2, bias=False, **options)
        self.bn = BatchNormAct2d(1, apply_act=False, **options)
        self.aa = None

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


class SpatialAttn(nn.Module):
    r"""The gates of :class:`CbamModule` for the pixels, in the place of ``timm.layers.cbam.SpatialAttn``."""

    def __init__(self, kernel_size: int = 7, gate_layer: Layer = "sigmoid", device=None, dtype=None):
        super().__init__()
        self.conv = ConvNorm(2, kernel_size, device=device, dtype=dtype)
        self.gate = create(gate_layer)

    def forward(self, x: Tensor) -> Tensor:
        return scale_pixels(x, self.gate(self.conv(pixel_means_and_maxima(x))))


class LightSpatialAttn(nn.Module):
    """The gates of :class:`LightCbamModule` for the pixels, in the place of timm's ``LightSpatialAttn``."""

    def __init__(self, kernel_size: int = 7, gate_layer: Layer = "sigmoid", device=None, dtype=None):
        super().__init__()
        self.conv = ConvNorm(1, kernel_size, device=device, dtype=dtype)
        self.gate = create(gate_layer)

    def forward(self, x: Tensor) -> Tensor:
        return scale_pixels(x, self.gate(self.conv(pixel_averages(x))))


class CbamModule(nn.Module):
    r"""Convolutional block attention, in the place of timm's ``CbamModule`` (``attn_layer="cbam"``).

    .. math:: z = x \cdot \sigma(m(\mathrm{mean}_{hw}\, x) + m(\max_{hw} x)), \quad m(p) = W_2\, \phi(W_1 p), \quad
              y = z \cdot \sigma(\mathrm{norm}(\mathrm{conv}([\mathrm{mean}_c\, z, \max_c z])))

    Args:
        channels: channels C of the images.
        rd_ratio: R / C, where ``rd_channels`` is not given.
        rd_channels: channels R between the two layers of m.
        rd_divisor: R is rounded to a multiple of it.
        spatial_kernel_size: of the convolution, odd.
        act_layer: :math:`\phi`, a module class or a name such as "relu", "silu", "hard_swish".
        gate_layer: :math:`\sigma`, likewise, such as "sigmoid" or "hard_sigmoid".
        mlp_bias: whether the two layers of m have biases.
        device: of the parameters.
        dtype: of the parameters.

    Returns:
        From images ``[N, C, H, W]``, contiguous or channels_last, the same shape, dtype and memory format. state_dict:
        ``channel.fc1.weight`` ``[R, C, 1, 1]``, ``channel.fc2.weight`` ``[C, R, 1, 1]``, their biases with
        ``mlp_bias``, ``spatial.conv.conv.weight`` ``[1, 2, k, k]``, ``spatial.conv.bn.*``.

    Raises:
        ValueError: an activation's name is unknown; the images have another shape.
        TypeError, RuntimeError: as :func:`fusedtrain.ops.channel_pool`.

    Cost: mean and maximum are one pass over images of 16 bits, for channels and for pixels, and so is each scale. In
    float32 they are stock PyTorch's, whose mean is more exact. The gates of the pixels are left to it on GPUs, too, and
    their scale for contiguous float32 images, where it was measured faster.
    Numerics: those of :func:`~fusedtrain.ops.channel_pool` and :func:`~fusedtrain.ops.channel_scale`.
    Source: Woo et al., https://arxiv.org/abs/1807.06521; ``timm.layers.cbam.CbamModule``
    """

    def __init__(
        self,
        channels: int,
        rd_ratio: float = 1.0 / 16,
        rd_channels: int | None = None,
        rd_divisor: int = 1,
        spatial_kernel_size: int = 7,
        act_layer: Layer = nn.ReLU,
        gate_layer: Layer = "sigmoid",
        mlp_bias: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        options = {"device": device, "dtype": dtype}
        self.channel = ChannelAttn(
            channels, rd_ratio, rd_channels, rd_divisor, act_layer, gate_layer, mlp_bias, **options
        )
        self.spatial = SpatialAttn(spatial_kernel_size, gate_layer, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.spatial(self.channel(x))


class LightCbamModule(nn.Module):
    r"""Convolutional block attention from sums, in the place of timm's ``LightCbamModule`` (``attn_layer="lcbam"``).

    .. math:: z = x \cdot \mathrm{sigmoid}(m(\mathrm{pool}_{hw}(x))), \quad
              y = z \cdot \mathrm{sigmoid}(\mathrm{norm}(\mathrm{conv}(\mathrm{pool}_c(z)))), \quad
              \mathrm{pool} = \tfrac12 \mathrm{mean} + \tfrac12 \max

    Args:
        channels: channels C of the images.
        rd_ratio: as in :class:`CbamModule`.
        rd_channels: as in :class:`CbamModule`.
        rd_divisor: as in :class:`CbamModule`.
        spatial_kernel_size: as in :class:`CbamModule`.
        act_layer: as in :class:`CbamModule`.
        gate_layer: as in timm without effect: both gates are sigmoids.
        mlp_bias: as in :class:`CbamModule`.
        device: of the parameters.
        dtype: of the parameters.

    Returns:
        As :class:`CbamModule`, with ``spatial.conv.conv.weight`` ``[1, 1, k, k]``.

    Raises:
        ValueError, TypeError, RuntimeError: as :class:`CbamModule`.

    Cost: the channels' gates are :func:`fusedtrain.ops.squeeze_excite`; the pixels' as in :class:`CbamModule`.
    Numerics: as :class:`CbamModule`.
    Source: ``timm.layers.cbam.LightCbamModule``
    """

    def __init__(
        self,
        channels: int,
        rd_ratio: float = 1.0 / 16,
        rd_channels: int | None = None,
        rd_divisor: int = 1,
        spatial_kernel_size: int = 7,
        act_layer: Layer = nn.ReLU,
        gate_layer: Layer = "sigmoid",
        mlp_bias: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        options = {"device": device, "dtype": dtype}
        self.channel = LightChannelAttn(
            channels, rd_ratio, rd_channels, rd_divisor, act_layer, gate_layer, mlp_bias, **options
        )
        self.spatial = LightSpatialAttn(spatial_kernel_size, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.spatial(self.channel(x))

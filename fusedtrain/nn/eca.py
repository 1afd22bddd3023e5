"""Efficient channel attention: a channel's gate comes from the means of its neighbours, by a short convolution."""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from fusedtrain.nn import _channel_gate as gates
from fusedtrain.nn._activation import Layer, create
from fusedtrain.nn.squeeze_excite import make_divisible


def _kernel_size(channels: int | None, kernel_size: int, gamma: float, beta: float) -> int:
    """Returns the odd number next to ``(log2(channels) + beta) / gamma``, at least 3, or the given size."""
    if channels is not None:
        size = int(abs(math.log(channels, 2) + beta) / gamma)
        return max(size if size % 2 else size + 1, 3)
    if kernel_size % 2 == 0:
        raise ValueError(f"kernel_size must be odd, got {kernel_size}")
    return kernel_size


class EcaModule(nn.Module):
    r"""Efficient channel attention, in the place of ``timm.layers.EcaModule``.

    .. math:: y = x \cdot \sigma(\mathrm{conv}_k(\mathrm{mean}_{hw}(x))), \quad
              k = \mathrm{odd}\left(\frac{\log_2 C + \beta}{\gamma}\right)

    Args:
        channels: channels C of the images; sets the kernel size.
        kernel_size: k, odd, where ``channels`` is not given.
        gamma: :math:`\gamma`.
        beta: :math:`\beta`.
        act_layer: with ``use_mlp`` the activation between its layers, default ReLU; else, as in timm, without effect.
        gate_layer: :math:`\sigma`, a module class or a name such as "sigmoid" or "hard_sigmoid".
        rd_ratio: with ``use_mlp``, its hidden width over C.
        rd_channels: with ``use_mlp``, its hidden width.
        rd_divisor: with ``use_mlp``, the width made by ``rd_ratio`` is a multiple of it.
        use_mlp: two convolutions with biases (sizes 1 and k) instead of one without; needs ``channels``.
        device: of the parameters.
        dtype: of the parameters.

    Returns:
        From images ``[N, C, H, W]``, contiguous or channels_last, the same shape, dtype and memory format. state_dict:
        ``conv.weight`` ``[1, 1, k]``; with ``use_mlp`` ``conv.*`` and ``conv2.*``.

    Raises:
        ValueError: the gate's name is unknown, ``kernel_size`` is even, ``use_mlp`` has no ``channels``; the images
            have another shape.
        TypeError, RuntimeError: as :func:`fusedtrain.ops.channel_pool`.

    Cost and numerics: those of :func:`~fusedtrain.ops.channel_pool`, :func:`~fusedtrain.ops.channel_scale` and, between
    them, torch's layers on ``[N, 1, C]``.
    Source: Wang et al., https://arxiv.org/abs/1910.03151; ``timm.layers.eca.EcaModule``
    """

    def __init__(
        self,
        channels: int | None = None,
        kernel_size: int = 3,
        gamma: float = 2,
        beta: float = 1,
        act_layer: Layer | None = None,
        gate_layer: Layer = "sigmoid",
        rd_ratio: float = 1 / 8,
        rd_channels: int | None = None,
        rd_divisor: int = 8,
        use_mlp: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        kernel_size = _kernel_size(channels, kernel_size, gamma, beta)
        padding = kernel_size // 2
        if use_mlp:
            if channels is None:
                raise ValueError("use_mlp needs channels")
            if rd_channels is None:
                rd_channels = make_divisible(channels * rd_ratio, rd_divisor)
            self.conv = nn.Conv1d(1, rd_channels, kernel_size=1, device=device, dtype=dtype)
            self.act = create(act_layer or nn.ReLU)
            self.conv2 = nn.Conv1d(rd_channels, 1, kernel_size, padding=padding, device=device, dtype=dtype)
        else:
            self.conv = nn.Conv1d(1, 1, kernel_size, padding=padding, bias=False, device=device, dtype=dtype)
            self.act = None
            self.conv2 = None
        self.gate = create(gate_layer)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(gates.pool(x)[:, None])
        if self.conv2 is not None:
            y = self.conv2(self.act(y))
        return gates.scale(x, self.gate(y))


class CecaModule(nn.Module):
    r"""Circular efficient channel attention, in the place of ``timm.layers.CecaModule``.

    .. math:: y = x \cdot \sigma(\mathrm{conv}_k(\mathrm{mean}_{hw}(x)))

    with the channels as a ring: the first and the last are neighbours.

    Args:
        channels: channels C of the images; sets the kernel size as in :class:`EcaModule`.
        kernel_size: k, odd, where ``channels`` is not given.
        gamma: as in :class:`EcaModule`.
        beta: as in :class:`EcaModule`.
        act_layer: as in timm, anything but None gives the convolution a bias, and no activation runs.
        gate_layer: :math:`\sigma`, a module class or a name such as "sigmoid" or "hard_sigmoid".
        device: of the parameters.
        dtype: of the parameters.

    Returns:
        From images ``[N, C, H, W]``, contiguous or channels_last, the same shape, dtype and memory format. state_dict:
        ``conv.weight`` ``[1, 1, k]``, ``conv.bias`` where ``act_layer`` is given.

    Raises:
        ValueError: the gate's name is unknown or ``kernel_size`` is even; the images have another shape.
        TypeError, RuntimeError: as :func:`fusedtrain.ops.channel_pool`.

    Cost and numerics: those of :class:`EcaModule`.
    Source: Wang et al., https://arxiv.org/abs/1910.03151; ``timm.layers.eca.CecaModule``
    """

    def __init__(
        self,
        channels: int | None = None,
        kernel_size: int = 3,
        gamma: float = 2,
        beta: float = 1,
        act_layer: Layer | None = None,
        gate_layer: Layer = "sigmoid",
        device=None,
        dtype=None,
    ):
        super().__init__()
        kernel_size = _kernel_size(channels, kernel_size, gamma, beta)
        self.padding = kernel_size // 2
        self.conv = nn.Conv1d(1, 1, kernel_size, bias=act_layer is not None, device=device, dtype=dtype)
        self.gate = create(gate_layer)

    def forward(self, x: Tensor) -> Tensor:
        ring = F.pad(gates.pool(x)[:, None], (self.padding, self.padding), mode="circular")
        return gates.scale(x, self.gate(self.conv(ring)))

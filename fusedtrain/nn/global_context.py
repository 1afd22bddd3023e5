"""Global context: channels are scaled, or added to, by what the pixels that an image attends to hold."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedtrain.nn import _channel_gate as gates
from fusedtrain.nn._activation import Layer, create
from fusedtrain.nn.squeeze_excite import make_divisible
from fusedtrain.ops.channel_pool_attention import channel_pool_attention

torch.fx.wrap("channel_pool_attention")  # recorded as a single node
torch.fx.wrap("attended")


def attended(x: Tensor, logits: Tensor) -> Tensor:
    """Returns ``[N, C]``, the means weighted by the softmax of maps ``[N, 1, H, W]``."""
    attention = F.softmax(logits.flatten(2), -1)
    return torch.matmul(x.flatten(2), attention.transpose(1, 2)).flatten(1)


class LayerNorm2d(nn.LayerNorm):
    """Layer normalisation of the channels of ``[N, C, H, W]``."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvMlp(nn.Module):
    """Two 1x1 convolutions with a normalisation and an activation in between, under timm's names."""

    def __init__(self, channels: int, rd_channels: int, act_layer: Layer, device=None, dtype=None):
        super().__init__()
        self.fc1 = nn.Conv2d(channels, rd_channels, kernel_size=1, device=device, dtype=dtype)
        self.norm = LayerNorm2d(rd_channels, eps=1e-6, device=device, dtype=dtype)
        self.act = create(act_layer)
        self.drop = nn.Dropout(0.0)
        self.fc2 = nn.Conv2d(rd_channels, channels, kernel_size=1, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(self.act(self.norm(self.fc1(x)))))


class GlobalContext(nn.Module):
    r"""Global context block of GCNet, in the place of ``timm.layers.GlobalContext``.

    .. math:: p = \sum_{hw} \mathrm{softmax}_{hw}(w_a x + b_a)\, x, \quad
              y = x \cdot \sigma(\mathrm{mlp}_s(p)) + \mathrm{mlp}_a(p)

    Args:
        channels: channels C of the images.
        use_attn: weighs the pixels; else p is their mean.
        fuse_add: adds :math:`\mathrm{mlp}_a(p)`.
        fuse_scale: scales by :math:`\sigma(\mathrm{mlp}_s(p))`.
        init_last_zero: as in timm, kept and without effect: the last layer of ``mlp_add`` starts as 0.
        rd_ratio: R / C, where ``rd_channels`` is not given.
        rd_channels: channels R between the two layers of an MLP.
        rd_divisor: R is rounded to a multiple of it.
        act_layer: of the MLPs, a module class or a name such as "relu", "silu", "hard_swish".
        gate_layer: :math:`\sigma`, likewise, such as "sigmoid" or "hard_sigmoid".
        device: of the parameters.
        dtype: of the parameters.

    Returns:
        From images ``[N, C, H, W]``, contiguous or channels_last, the same shape, dtype and memory format. state_dict:
        ``conv_attn.weight`` ``[1, C, 1, 1]``, ``conv_attn.bias`` ``[1]``; for ``mlp_add`` and ``mlp_scale`` ``fc1.*``,
        ``norm.*`` and ``fc2.*``.

    Raises:
        ValueError: an activation's name is unknown; the images have another shape.
        TypeError, RuntimeError: as :func:`fusedtrain.ops.channel_pool`.

    Cost: reads x twice for p and once for the scale, and copies no channels_last images; backward writes one image for
    p and its attention. The MLPs are torch's layers on ``[N, C, 1, 1]``. On GPUs p is made by stock PyTorch.
    Numerics: those of torch's products and of :func:`~fusedtrain.ops.channel_scale`.
    Source: Cao et al., https://arxiv.org/abs/1904.11492; ``timm.layers.global_context.GlobalContext``
    """

    def __init__(
        self,
        channels: int,
        use_attn: bool = True,
        fuse_add: bool = False,
        fuse_scale: bool = True,
        init_last_zero: bool = False,
        rd_ratio: float = 1.0 / 8,
        rd_channels: int | None = None,
        rd_divisor: int = 1,
        act_layer: Layer = nn.ReLU,
        gate_layer: Layer = "sigmoid",
        device=None,
        dtype=None,
    ):
        super().__init__()
        options = {"device": device, "dtype": dtype}
        self.conv_attn = nn.Conv2d(channels, 1, kernel_size=1, **options) if use_attn else None
        if rd_channels is None:
            rd_channels = make_divisible(channels * rd_ratio, rd_divisor, round_limit=0.0)
        self.mlp_add = ConvMlp(channels, rd_channels, act_layer, **options) if fuse_add else None
        self.mlp_scale = ConvMlp(channels, rd_channels, act_layer, **options) if fuse_scale else None
        self.gate = create(gate_layer)
        self.init_last_zero = init_last_zero
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gives the weights of the attention, and the last ones of ``mlp_add``, new initial values."""
        if self.conv_attn is not None:
            nn.init.kaiming_normal_(self.conv_attn.weight, mode="fan_in", nonlinearity="relu")
        if self.mlp_add is not None:
            nn.init.zeros_(self.mlp_add.fc2.weight)

    def forward(self, x: Tensor) -> Tensor:
        conv = self.conv_attn
        if conv is None:
            pooled = gates.pool(x)
        elif gates.is_pointwise(conv) and conv.stride == (1, 1):
            pooled = channel_pool_attention(x, conv.weight, conv.bias)
        else:
            pooled = attended(x, conv(x))
        pooled, y = gates.as_map(pooled), x
        if self.mlp_scale is not None:
            y = gates.scale(y, self.gate(self.mlp_scale(pooled)))
        return y if self.mlp_add is None else y + self.mlp_add(pooled)

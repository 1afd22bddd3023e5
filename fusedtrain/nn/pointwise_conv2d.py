"""1x1 convolutions as layers: nn.Conv2d with a kernel of one pixel, on the fused op."""

import torch
from torch import Tensor

from fusedtrain.nn._layout import laid_out_as
from fusedtrain.nn._small import stays_stock, trains_stock
from fusedtrain.nn._traced import Conv2d
from fusedtrain.ops import pointwise_conv2d
from fusedtrain.ops._common import autocast_dtype, cpu_multiplies
from fusedtrain.ops._pointwise_rules import gains_in_small

torch.fx.wrap("pointwise_conv2d")  # recorded as a single node
torch.fx.wrap("laid_out_as")


class PointwiseConv2d(Conv2d):
    r"""A 1x1 convolution, in the place of ``nn.Conv2d(in_channels, out_channels, 1)``.

    .. math:: y_{o,p} = b_o + \sum_c w_{oc}\, x_{c,p}

    Args:
        in_channels: channels C of the images.
        out_channels: channels D of the output.
        kernel_size: 1; stands here, as padding, dilation, groups and padding_mode, so that the arguments are those
            of ``nn.Conv2d``.
        stride: one int or (height, width).
        padding: 0.
        dilation: without effect on one pixel.
        groups: 1.
        bias: whether a bias is learned.
        padding_mode: without effect where nothing is padded.
        device: of the parameters.
        dtype: of the parameters.

    Returns:
        From ``[N, C, H, W]`` or ``[C, H, W]``, contiguous or channels_last, ``[N, D, Ho, Wo]`` in the same memory
        format, or channels_last where the weight is. state_dict: ``weight`` ``[D, C, 1, 1]`` and
        ``bias`` ``[D]``, initialised as ``nn.Conv2d``.

    Raises:
        ValueError: kernel, padding or groups are others, or a shape does not fit.
        TypeError, RuntimeError: as :func:`fusedtrain.ops.pointwise_conv2d`.

    Cost and numerics: those of :func:`fusedtrain.ops.pointwise_conv2d`.
    Source: ``torch.nn.Conv2d``
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int] = 1,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device=None,
        dtype=None,
    ):
        super().__init__(
            *(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias),
            *(padding_mode, device, dtype),
        )
        if not is_pointwise(self):
            raise ValueError(
                "PointwiseConv2d: kernel_size must be 1, padding 0 and groups 1,"
                f" got {kernel_size!r}, {padding!r} and {groups!r}"
            )

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        times = 1 + self.out_channels / self.in_channels
        small = stays_stock(self, input, times) or (self.stride == (1, 1) and _trains_stock(input, times))
        gains = small and input.dim() == 4 and gains_in_small(input, weight, self.stride)
        if not is_pointwise(self) or (small and not gains):
            return super()._conv_forward(input, weight, bias)
        return pointwise_conv2d(laid_out_as(weight, input), weight, bias, self.stride)


def _trains_stock(x: Tensor, times: float) -> bool:
    return trains_stock(x, times / 2) and cpu_multiplies(autocast_dtype(x))


def is_pointwise(conv: torch.nn.Conv2d) -> bool:
    """True for a kernel of one pixel over all channels, without padding: the attributes of a layer may be changed."""
    return conv.kernel_size == (1, 1) and conv.groups == 1 and conv.padding in ((0, 0), "valid", "same")

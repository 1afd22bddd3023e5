"""Grouped convolutions as layers: nn.Conv2d with groups, on the fused op."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtrain.nn._layout import laid_out_as
from fusedtrain.nn._small import stays_stock
from fusedtrain.nn._traced import Conv2d
from fusedtrain.ops import grouped_conv2d

torch.fx.wrap("grouped_conv2d")  # recorded as a single node
torch.fx.wrap("laid_out_as")


class GroupedConv2d(Conv2d):
    r"""A convolution in groups of channels, in the place of ``nn.Conv2d(..., groups=G)``.

    .. math:: y_{gO+o} = b_{gO+o} + \sum_i w_{gO+o,i} \star x_{gI+i}

    Args:
        in_channels: channels of the images, a multiple of ``groups``.
        out_channels: channels of the output, a multiple of ``groups``.
        kernel_size: one int or (height, width).
        stride: of the output positions.
        padding: zeros around the images: numbers, "valid" or "same" (stride 1).
        dilation: distance of the kernel's taps.
        groups: G; the group of an output channel reads I = in_channels / G channels.
        bias: whether a bias is learned.
        padding_mode: "zeros", or "reflect", "replicate" or "circular" as for ``nn.Conv2d``.
        device: of the parameters.
        dtype: of the parameters.

    Returns:
        From ``[N, C, H, W]`` or ``[C, H, W]``, contiguous or channels_last, ``[N, D, Ho, Wo]`` in the same memory
        format, or channels_last where the weight is. state_dict: ``weight`` ``[D, I, kh, kw]`` and
        ``bias`` ``[D]``, initialised as ``nn.Conv2d``.

    Raises:
        ValueError: a shape does not fit.
        TypeError, RuntimeError: as :func:`fusedtrain.ops.grouped_conv2d`.

    Cost and numerics: those of :func:`fusedtrain.ops.grouped_conv2d`; other padding modes pad in a copy first.
    Source: ``torch.nn.Conv2d``
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if stays_stock(self, input):
            return super()._conv_forward(input, weight, bias)
        padding = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        return grouped_conv2d(
            laid_out_as(weight, input), weight, bias, self.stride, padding, self.dilation, self.groups
        )

"""Depthwise convolutions as layers: nn.Conv2d with one group per channel, on the fused op."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedtrain.nn._activation import observed
from fusedtrain.nn._layout import laid_out_as
from fusedtrain.nn._traced import Conv2d
from fusedtrain.nn.pointwise_conv2d import PointwiseConv2d
from fusedtrain.ops import depthwise_conv2d

torch.fx.wrap("depthwise_conv2d")  # recorded as a single node
torch.fx.wrap("laid_out_as")


class DepthwiseConv2d(Conv2d):
    r"""A depthwise convolution, in the place of ``nn.Conv2d(..., groups=in_channels)``.

    .. math:: y_{cm+j} = b_{cm+j} + w_{cm+j} \star x_c, \quad j < m = \mathrm{out\_channels} / \mathrm{in\_channels}

    Args:
        in_channels: channels C of the images.
        out_channels: C * m for any channel multiplier m; by default C.
        kernel_size: one int or (height, width).
        stride: one int or (height, width).
        padding: an int, (height, width), "same" or "valid".
        dilation: one int or (height, width).
        groups: C; stands here so that the arguments are those of ``nn.Conv2d``.
        bias: whether a bias is learned.
        padding_mode: "zeros", "reflect", "replicate" or "circular".
        device: of the parameters.
        dtype: of the parameters.

    Returns:
        From ``[N, C, H, W]`` or ``[C, H, W]``, contiguous or channels_last, the convolved images in the same memory
        format, or channels_last where the weight is. state_dict: ``weight`` ``[C * m, 1, kh, kw]`` and
        ``bias`` ``[C * m]``, initialised as ``nn.Conv2d``.

    Raises:
        ValueError: ``groups`` is not C, or a shape does not fit.
        TypeError, RuntimeError: as :func:`fusedtrain.ops.depthwise_conv2d`.

    Cost and numerics: those of :func:`fusedtrain.ops.depthwise_conv2d`; other padding modes pad in a copy first.
    Source: ``torch.nn.Conv2d``
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        kernel_size: int | tuple[int, int] = 3,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int | None = None,
        bias: bool = True,
        padding_mode: str = "zeros",
        device=None,
        dtype=None,
    ):
        if groups not in (None, in_channels):
            raise ValueError(f"{type(self).__name__}: groups must be in_channels ({in_channels}), got {groups}")
        super().__init__(
            *(in_channels, in_channels if out_channels is None else out_channels, kernel_size, stride, padding),
            *(dilation, in_channels, bias, padding_mode, device, dtype),
        )

    def sides(self, input: Tensor) -> int | tuple[int, ...] | str:
        """Returns the zeros around ``input``, as ``ops.depthwise_conv2d`` takes them."""
        return self.padding

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not is_depthwise(self):
            return super()._conv_forward(input, weight, bias)
        padding = self.sides(input)
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        return depthwise_conv2d(
            laid_out_as(weight, input), weight, bias, self.stride, padding, self.dilation, groups=self.groups
        )


def is_depthwise(conv: nn.Conv2d) -> bool:
    """True for one group per channel: the attributes of a layer may be changed."""
    return conv.groups == conv.in_channels


def same_padding(size: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    """Returns TensorFlow's "same" padding (before, after), with which the output has ``ceil(size / stride)`` pixels."""
    total = (-(-size // stride) - 1) * stride + dilation * (kernel - 1) + 1 - size
    total = total.clamp(min=0) if isinstance(total, Tensor) else max(total, 0)  # torch.jit.trace has tensors for sizes
    return total // 2, total - total // 2


class DepthwiseConv2dSame(DepthwiseConv2d):
    r"""A depthwise convolution with TensorFlow's "same" padding, in the place of timm's ``Conv2dSame``.

    .. math:: y_{c,i,j} = b_c + \sum_{u,v} w_{c,u,v}\, x_{c,\, s i + d u - t,\, s j + d v - l}

    The zeros in front, t rows and l columns, follow from the image: as many as :math:`\lceil H / s \rceil` rows need
    in all, halved; the odd one stands at the bottom and right.

    Args:
        As :class:`DepthwiseConv2d`; ``padding`` and ``padding_mode`` are without effect, as in timm.

    Returns:
        From ``[N, C, H, W]`` or ``[C, H, W]``, contiguous or channels_last, images of
        :math:`\lceil H / s \rceil` by :math:`\lceil W / s \rceil` pixels in the dtype of ``x`` and the same memory
        format, or channels_last where the weight is. state_dict: that of :class:`DepthwiseConv2d`.

    Raises:
        ValueError: ``groups`` is not C, or a shape does not fit.
        TypeError, RuntimeError: as :func:`fusedtrain.ops.depthwise_conv2d`.

    Cost and numerics: those of :func:`fusedtrain.ops.depthwise_conv2d`; the images are not copied to be padded.
    Source: ``timm.layers.Conv2dSame``; https://www.tensorflow.org/api_docs/python/tf/nn#notes_on_padding_2
    """

    def sides(self, input: Tensor) -> tuple[int, int, int, int]:
        top, bottom = same_padding(input.shape[-2], self.kernel_size[0], self.stride[0], self.dilation[0])
        left, right = same_padding(input.shape[-1], self.kernel_size[1], self.stride[1], self.dilation[1])
        return left, right, top, bottom

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not is_depthwise(self):
            input = F.pad(input, self.sides(input))
            return F.conv2d(input, weight, bias, self.stride, 0, self.dilation, self.groups)
        input, sides = laid_out_as(weight, input), self.sides(input)
        return depthwise_conv2d(input, weight, bias, self.stride, sides, self.dilation, groups=self.groups)


class DepthwiseConv2dStaticSame(DepthwiseConv2d):
    """A depthwise convolution in the place of ``Conv2dStaticSamePadding`` of efficientnet_pytorch.

    It has TensorFlow's "same" padding for the one size of image that the network was built for, as a layer
    ``static_padding`` of its own. Made by :func:`fusedtrain.fuse` only.
    """

    def sides(self, input: Tensor) -> int | tuple[int, ...] | str:
        return self.static_padding.padding if type(self.static_padding) is nn.ZeroPad2d else self.padding

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not is_depthwise(self) or not has_plain_padding(self):
            input = self.static_padding(input)
            return F.conv2d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        input, sides = laid_out_as(weight, input), self.sides(input)
        return depthwise_conv2d(input, weight, bias, self.stride, sides, self.dilation, groups=self.groups)


def has_plain_padding(conv: nn.Conv2d) -> bool:
    """True where ``static_padding`` stands for zeros around the images, and all of them, and has no hook."""
    layer = conv.static_padding
    known = type(layer) is nn.Identity or (type(layer) is nn.ZeroPad2d and conv.padding == (0, 0))
    return known and conv.padding_mode == "zeros" and not observed(layer)


def centred_padding(kernel_size: int | tuple[int, int], dilation: int | tuple[int, int]) -> tuple[int, int]:
    """Returns half the size of a kernel with its gaps, (height, width): with stride 1 images keep their size."""
    kernel = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
    spread = (dilation, dilation) if isinstance(dilation, int) else dilation
    return tuple(d * (k - 1) // 2 for k, d in zip(kernel, spread))


class DepthwiseSeparableConv(nn.Module):
    r"""A depthwise convolution and a 1x1 convolution over its channels.

    .. math:: y = \mathrm{act}(\mathrm{norm}(w_{1 \times 1} \, \mathrm{act}(\mathrm{norm}(w_{k \times k} \star x))))

    Args:
        in_channels: channels C of the images.
        out_channels: channels D of the output.
        kernel_size: of the depthwise convolution.
        stride: of the depthwise convolution.
        padding: of the depthwise convolution; by default half the kernel size.
        dilation: of the depthwise convolution.
        bias: whether the convolutions learn biases.
        norm_layer: called with the channels after each convolution, e.g. ``nn.BatchNorm2d``; None for none.
        act_layer: called without arguments after each norm, e.g. ``nn.ReLU``; None for none.
        device: of the convolutions' parameters.
        dtype: of the convolutions' parameters.

    Returns:
        From images ``[N, C, H, W]``, contiguous or channels_last, float32, bfloat16, float16 or float64,
        ``[N, D, Ho, Wo]`` in the same dtype and memory format, or channels_last where the weights are; without norms
        from ``[C, H, W]``, too. state_dict: ``depthwise.weight`` ``[C, 1, kh, kw]``, ``pointwise.weight``
        ``[D, C, 1, 1]``, with ``bias`` ``depthwise.bias`` ``[C]`` and ``pointwise.bias`` ``[D]``, and what the norms
        hold, as ``norm1.*`` and ``norm2.*``.

    Raises:
        ValueError: the images have other than C channels, or a shape does not fit.
        TypeError: the dtype is not supported, or is not that of the weights outside autocast.
        RuntimeError: as :func:`fusedtrain.ops.depthwise_conv2d`.

    Cost and numerics: those of :func:`fusedtrain.ops.depthwise_conv2d`, of :func:`fusedtrain.ops.pointwise_conv2d`, and
    of the norms and activations, which are called one by one.
    Source: Chollet, Xception, https://arxiv.org/abs/1610.02357
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int] = 3,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str | None = None,
        dilation: int | tuple[int, int] = 1,
        bias: bool = True,
        norm_layer: Callable[[int], nn.Module] | None = None,
        act_layer: Callable[[], nn.Module] | None = None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        padding = centred_padding(kernel_size, dilation) if padding is None else padding
        factory = {"device": device, "dtype": dtype}
        self.depthwise = DepthwiseConv2d(
            in_channels, in_channels, kernel_size, stride, padding, dilation, bias=bias, **factory
        )
        self.norm1 = norm_layer(in_channels) if norm_layer else nn.Identity()
        self.act1 = act_layer() if act_layer else nn.Identity()
        self.pointwise = PointwiseConv2d(in_channels, out_channels, bias=bias, **factory)
        self.norm2 = norm_layer(out_channels) if norm_layer else nn.Identity()
        self.act2 = act_layer() if act_layer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.norm1(self.depthwise(x)))
        return self.act2(self.norm2(self.pointwise(x)))

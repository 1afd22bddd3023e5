r"""channel_pool_attention: the channels' means over the pixels, weighted by an attention that the image gives itself.

.. math:: s_{np} = \mathrm{softmax}_p\Bigl(b + \sum_c w_c\, x_{ncp}\Bigr), \quad p_{nc} = \sum_p s_{np}\, x_{ncp}

Matrix products of torch alone. What gains is backward, where the gradients of the mean and of the logits, both products
of one factor per channel and one per pixel, are written as one image, and that channels_last images are not copied.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtrain.backend import is_automatic, select
from fusedtrain.ops import _common
from fusedtrain.ops.channel_pool import IMPLS


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    attention = F.softmax(F.conv2d(x, weight, bias).flatten(2), -1)
    return torch.matmul(x.flatten(2), attention.transpose(1, 2)).flatten(1)


def _pixels(x: Tensor) -> Tensor:
    """``[N, C, HW]`` of contiguous images, ``[N, HW, C]`` of channels_last ones."""
    return x.flatten(2) if x.is_contiguous() else x.permute(0, 2, 3, 1).flatten(1, 2)


def _sum_rows(rows: Tensor, factors: Tensor) -> Tensor:
    """Returns ``[N, B]``, the sum of rows ``[N, A, B]``, each times its factor ``[N, A]``."""
    return torch.bmm(factors[:, None], rows)[:, 0]


def _sum_columns(rows: Tensor, factors: Tensor) -> Tensor:
    """Returns ``[N, A]``, the sum of the columns of ``[N, A, B]``, each times its factor ``[N, B]``."""
    if rows.element_size() < 4:
        return torch.bmm(rows, factors[:, :, None])[..., 0]
    return (rows * factors[:, None]).sum(2)  # as one column per sample, MKL's products took six times as long


def _outer(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Returns ``[N, A, B]``, ``a`` ``[N, A]`` by ``b`` ``[N, B]`` plus ``c`` by ``d``."""
    if a.element_size() < 4:
        return torch.bmm(torch.stack([a, c], 2), torch.stack([b, d], 1))
    return (a[:, :, None] * b[:, None]).addcmul_(c[:, :, None], d[:, None])


def _forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    pixels, channels = _pixels(x), weight.view(1, -1)
    if x.is_contiguous():
        logits = _sum_rows(pixels, channels.expand(x.shape[0], -1))
    else:
        logits = F.linear(pixels, channels)[..., 0]
    attention = F.softmax(logits, -1, dtype=x.dtype)  # which no bias changes
    return (_sum_columns if x.is_contiguous() else _sum_rows)(pixels, attention), attention


_FEW = 100_000  # elements, below which stock's calls were measured to cost less


class _ChannelPoolAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        pooled, attention = _forward(x, weight)
        ctx.save_for_backward(x, weight, attention)
        return _common.owned(pooled)

    @staticmethod
    @_common.once_differentiable
    def backward(ctx, dpooled):
        x, weight, attention = ctx.saved_tensors
        need_dx, need_dw, need_db = _common.needed(ctx, 0, 1)
        pixels, channels, contiguous = _pixels(x), weight.view(1, -1).expand_as(dpooled), x.is_contiguous()
        dattention = (_sum_rows if contiguous else _sum_columns)(pixels, dpooled)
        dlogits = torch._softmax_backward_data(dattention, attention, -1, attention.dtype)
        dx = dw = db = None
        if need_dw:
            dw = (_sum_columns if contiguous else _sum_rows)(pixels, dlogits).sum(0).view(weight.shape)
        if need_db:
            db = dlogits.new_zeros(1)
        if need_dx and contiguous:
            dx = _outer(dpooled, attention, channels, dlogits).view(x.shape)
        elif need_dx:
            dx = _outer(attention, dpooled, dlogits, channels).unflatten(1, x.shape[2:]).permute(0, 3, 1, 2)
        return dx, dw, db


def channel_pool_attention(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[N, C]``, the weighted means of images ``[N, C, H, W]``; ``weight`` ``[1, C, 1, 1]`` and ``bias`` ``[1]`` are
    those of the convolution that makes the logits. On GPUs and for few elements stock PyTorch runs."""
    impl = select("channel_pool", IMPLS, x, 0, 0)
    x, weight, bias = _common.autocast(x, weight, bias)
    few = x.numel() == 0 or (is_automatic() and _common.is_less(x.numel(), _FEW))
    if impl.backward is None or few or not x.is_cpu:
        return reference(x, weight, bias)
    x = _common.dense(x)
    if _common.needs_autograd(x, weight, bias):
        return _common.apply(_ChannelPoolAttention, x, weight, bias)
    return _forward(x, weight)[0]

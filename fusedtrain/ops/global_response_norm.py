r"""global_response_norm: every channel scaled by its strength in the image, next to that of the other channels.

.. math:: y_{nchw} = a(x_{nchw}) \Bigl(1 + w_c \frac{\lVert a(x_{nc}) \rVert_2}
          {\operatorname{mean}_k \lVert a(x_{nk}) \rVert_2 + \varepsilon}\Bigr) + b_c
"""

import torch
from torch import Tensor

from fusedtrain.backend import Impl, register, select
from fusedtrain.ops import _activation, _codes, _common, _schema


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float, in_act: str) -> Tensor:
    x = _activation.REFERENCE[in_act](x)
    norm = x.norm(p=2, dim=(2, 3), keepdim=True)
    relative = norm / (norm.mean(1, keepdim=True) + eps)
    return (x + torch.addcmul(bias[:, None, None], weight[:, None, None], x * relative)).to(x.dtype)


@_schema.register_fake("global_response_norm")
def _fake(x, weight, bias, eps, in_act):
    return torch.empty_like(x), x.new_empty(x.shape[:2], dtype=_common.acc_dtype(x))


@_schema.register_fake("global_response_norm_backward")
def _fake_backward(dy, x, weight, norm, eps, in_act, need_dx):
    dx = torch.empty_like(x) if need_dx else x.new_empty(0)
    return dx, norm.new_empty(x.shape[1]), norm.new_empty(x.shape[1])


def _asked(x, weight=None, bias=None, eps=1e-6, in_act="identity") -> tuple:
    return x, weight, bias, eps, _codes.code("in_act", in_act, _codes.INPUT_ACTIVATIONS)


_OP, _BACKWARD = torch.ops.fusedtrain.global_response_norm, torch.ops.fusedtrain.global_response_norm_backward
IMPLS = register(
    "global_response_norm",
    {
        "cuda": Impl(_OP.default, _BACKWARD.default, _common.why_not_cuda),
        # Stock PyTorch takes more calls over images of any size.
        "cpu": Impl(_OP.default, _BACKWARD.default, _common.why_not_cpu),
        "triton": Impl(_OP.triton, _BACKWARD.triton, _common.why_not_triton, _common.triton_slower),
        "reference": Impl(reference, None, _common.never_why_not),
    },
    _asked,
)


class _GlobalResponseNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, in_act, impl):
        y, norm = impl.forward(x, weight, bias, eps, in_act)
        ctx.save_for_backward(x, weight, norm)
        ctx.eps, ctx.in_act, ctx.bias_dtype, ctx.impl = eps, in_act, bias.dtype, impl
        return _common.owned(y)

    @staticmethod
    @_common.once_differentiable
    def backward(ctx, dy):
        x, weight, norm = ctx.saved_tensors
        need_dx, need_dweight, need_dbias = _common.needed(ctx, 0)[:3]
        dx, dweight, dbias = ctx.impl.backward(_common.dense_like(dy, x), x, weight, norm, ctx.eps, ctx.in_act, need_dx)
        grads = dx, dweight.to(weight.dtype), dbias.to(ctx.bias_dtype)
        return *_common.wanted(grads, (need_dx, need_dweight, need_dbias)), None, None, None


def global_response_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6, *, in_act: str = "identity"
) -> Tensor:
    r"""Global response normalisation, as between the two 1x1 convolutions of a ConvNeXt V2 block.

    .. math:: y_{nchw} = a(x_{nchw}) \Bigl(1 + w_c \frac{\lVert a(x_{nc}) \rVert_2}
              {\operatorname{mean}_k \lVert a(x_{nk}) \rVert_2 + \varepsilon}\Bigr) + b_c

    Args:
        x: images ``[N, C, H, W]``; contiguous and channels_last run natively, other strides are copied first; float32,
            bfloat16, float16 or float64.
        weight: ``[C]``, in the dtype of ``x`` or in float32.
        bias: likewise.
        eps: what is added to the mean of the norms.
        in_act: the activation :math:`a` in front: "identity", "relu", "silu", "gelu", "hard_swish" or "relu6".

    Returns:
        ``[N, C, H, W]`` in the dtype and memory format of ``x``. For backward x, weight and the norms ``[N, C]`` are
        kept.

    Raises:
        ValueError: ``x`` is not 4-dimensional, a vector is not ``[C]``, or a name is unknown.
        TypeError: a dtype is not supported.
        RuntimeError: a forced backend cannot run on ``x``, or tensors are on different devices.

    Cost: reads x twice and writes y once; backward reads x and dy twice and writes dx once, for all gradients. Images
        whose passes fit the last cache are read from memory once. Stock PyTorch takes 10 and 30 passes.
    Numerics: sums in float32 (float64 for float64) in a fixed order, over the channels in float64: deterministic,
        independent of threads. Where a norm is 0 its gradient is, as in torch.
    Source: Woo et al., ConvNeXt V2, https://arxiv.org/abs/2301.00808
    """
    _common.check_images("global_response_norm", x)
    act_code = _codes.code("in_act", in_act, _codes.INPUT_ACTIVATIONS)
    for name, vector in (("weight", weight), ("bias", bias)):
        if not isinstance(vector, Tensor) or vector.shape != x.shape[1:2]:
            got = list(vector.shape) if isinstance(vector, Tensor) else type(vector).__name__
            raise ValueError(f"global_response_norm: {name} must have shape [C] = [{x.shape[1]}], got {got}")
        if vector.dtype not in (x.dtype, torch.float32):
            raise TypeError(
                f"global_response_norm: {name} must have the dtype of x ({x.dtype}) or float32, got {vector.dtype}"
            )
    _common.check_same_device("global_response_norm", x, weight=weight, bias=bias)
    impl = select("global_response_norm", IMPLS, x, weight, bias, eps, act_code)
    if impl.backward is None or x.numel() == 0:
        return reference(x, weight, bias, eps, in_act)
    x = _common.dense(x)
    if _common.needs_autograd(x, weight, bias):
        return _common.apply(_GlobalResponseNorm, x, weight, bias, eps, act_code, impl)
    return impl.forward(x, weight, bias, eps, act_code)[0]

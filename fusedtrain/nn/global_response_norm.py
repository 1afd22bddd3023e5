"""Global response normalisation, and the two layers of a ConvNeXt V2 block around it."""

import torch
from torch import Tensor, fx, nn

from fusedtrain.nn._activation import Layer, create, drops_nothing, observed, op_name
from fusedtrain.nn._kind import kind_of
from fusedtrain.nn.mlp import make_layers
from fusedtrain.ops import global_response_norm
from fusedtrain.ops._codes import INPUT_ACTIVATIONS

torch.fx.wrap("normalised")  # recorded as a single node


def normalised(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, channel_dim: int, in_act: str | None = None
) -> Tensor:
    """``global_response_norm`` of images ``[N, H, W, C]``, where ``channel_dim`` is -1, or ``[N, C, H, W]``.

    Alone, in the dtype that torch promotes to; with an activation in front, between two layers, in that of x, to which
    autocast casts what the second one takes.
    """
    if in_act is None:
        x, in_act = x.to(torch.promote_types(x.dtype, weight.dtype)), "identity"
    if channel_dim == 1:
        return global_response_norm(x, weight, bias, eps, in_act=in_act)
    return global_response_norm(x.permute(0, 3, 1, 2), weight, bias, eps, in_act=in_act).permute(0, 2, 3, 1)


class GlobalResponseNorm(nn.Module):
    r"""Global response normalisation, in the place of timm's ``GlobalResponseNorm``.

    .. math:: y_c = x_c \Bigl(1 + w_c \frac{\lVert x_c \rVert_2}
              {\operatorname{mean}_k \lVert x_k \rVert_2 + \varepsilon}\Bigr) + b_c

    Args:
        dim: channels C.
        eps: what is added to the mean of the norms.
        channels_last: whether images are ``[N, H, W, C]`` rather than ``[N, C, H, W]``: by their shape, whatever their
            memory format is.
        device: of the parameters.
        dtype: of the parameters.

    Returns:
        The shape and memory format of the images, in the dtype that torch promotes theirs and the weight's to.
        state_dict: ``weight`` and ``bias`` ``[C]``, zeros at first.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`fusedtrain.ops.global_response_norm`.

    Cost and numerics: those of :func:`fusedtrain.ops.global_response_norm`.
    Source: Woo et al., https://arxiv.org/abs/2301.00808; ``timm.layers.grn.GlobalResponseNorm``
    """

    gains_at_any_size = True

    def __init__(self, dim: int, eps: float = 1e-6, channels_last: bool = True, device=None, dtype=None):
        super().__init__()
        self.eps = eps
        self.spatial_dim = (1, 2) if channels_last else (2, 3)
        self.channel_dim = -1 if channels_last else 1
        self.wb_shape = (1, 1, 1, -1) if channels_last else (1, -1, 1, 1)
        self.weight = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return normalised(x, self.weight, self.bias, self.eps, self.channel_dim)


class GlobalResponseNormMlp(nn.Module):
    r"""Two layers per pixel and a global response normalisation, in the place of timm's ``GlobalResponseNormMlp``.

    .. math:: y = W_2\, \mathrm{grn}(\phi(W_1 x + b_1)) + b_2

    Args:
        in_features: channels of the images.
        hidden_features: channels of the normalisation, default ``in_features``.
        out_features: channels of the output, default ``in_features``.
        act_layer: :math:`\phi`, a module class or a name such as "gelu".
        bias: whether the layers have one, for both or for each.
        drop: the probability of dropping a number, behind the activation and at the end, or for each.
        use_conv: whether images are ``[N, C, H, W]`` and the layers 1x1 convolutions, rather than ``[N, H, W, C]`` and
            Linear layers.
        device: of the parameters.
        dtype: of the parameters.

    Returns:
        Images with ``out_features`` channels. state_dict: ``fc1.*``, ``grn.weight``, ``grn.bias``, ``fc2.*``.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`fusedtrain.ops.global_response_norm`.

    Cost: without dropout the activation is part of :func:`fusedtrain.ops.global_response_norm`, and its result is never
    stored.
    Numerics: those of :func:`fusedtrain.ops.global_response_norm`.
    Source: Woo et al., https://arxiv.org/abs/2301.00808; ``timm.layers.mlp.GlobalResponseNormMlp``
    """

    gains_at_any_size = True

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        act_layer: Layer = nn.GELU,
        bias: bool | tuple[bool, bool] = True,
        drop: float | tuple[float, float] = 0.0,
        use_conv: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        options = {"device": device, "dtype": dtype}
        features = in_features, hidden_features, out_features
        k, layers, drops = make_layers(features, bias, drop, use_conv, **options)

        self.fc1 = layers[0]
        self.act = create(act_layer)
        self.drop1 = drops[0]
        self.grn = GlobalResponseNorm(k, channels_last=not use_conv, **options)
        self.fc2 = layers[1]
        self.drop2 = drops[1]

    def forward(self, x: Tensor) -> Tensor:
        x, act, grn = self.fc1(x), op_name(self.act), self.grn
        plain = kind_of(grn) is GlobalResponseNorm and not observed(grn) and drops_nothing(self.drop1)
        if plain and act in INPUT_ACTIVATIONS and not isinstance(x, fx.Proxy):  # torch.fx records all layers
            x = normalised(x, grn.weight, grn.bias, grn.eps, grn.channel_dim, act)
        else:
            x = grn(self.drop1(self.act(x)))
        return self.drop2(self.fc2(x))

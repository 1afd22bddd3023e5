"""Two layers with an activation between them, Linear or 1x1 convolutions, and the blocks of ConvNeXt."""

from collections.abc import Callable, Sequence

from torch import Tensor, fx, nn

from fusedtrain.nn._activation import Layer, create, drops_nothing, observed, op_name
from fusedtrain.nn._kind import kind_of
from fusedtrain.nn._layout import laid_out_as
from fusedtrain.nn.linear import Linear
from fusedtrain.nn.pointwise_conv2d import PointwiseConv2d, is_pointwise
from fusedtrain.ops import mlp
from fusedtrain.ops._codes import INPUT_ACTIVATIONS


def _is_linear(layer: nn.Module, kind: Callable[[nn.Module], type] = kind_of) -> bool:
    return kind(layer) in (nn.Linear, Linear)


def _is_convolution(layer: nn.Module, kind: Callable[[nn.Module], type] = kind_of) -> bool:
    return kind(layer) in (nn.Conv2d, PointwiseConv2d) and is_pointwise(layer) and layer.stride == (1, 1)


def are_alike(fc1: nn.Module, fc2: nn.Module, kind: Callable[[nn.Module], type] = kind_of) -> bool:
    """Whether both layers are Linear, or both 1x1 convolutions; ``kind`` tells the class of a layer."""
    return any(is_one(fc1, kind) and is_one(fc2, kind) for is_one in (_is_linear, _is_convolution))


def _runs_as_one(x: Tensor, fc1: nn.Module, act: nn.Module, fc2: nn.Module) -> bool:
    """Whether nobody has to see the calls of these layers, and the op has them.

    torch.fx records them one by one, by the names that they have in the stock network, and for both modes.
    """
    if isinstance(x, fx.Proxy) or observed(fc1) or observed(fc2):
        return False
    return are_alike(fc1, fc2) and op_name(act) in INPUT_ACTIVATIONS


def _as_one(fc1: nn.Module, act: nn.Module, fc2: nn.Module, x: Tensor, **end: Tensor | None) -> Tensor:
    x = x if _is_linear(fc1) else laid_out_as(fc1.weight, x)
    return mlp(x, fc1.weight, fc1.bias, fc2.weight, fc2.bias, act=op_name(act), **end)


def in_turn(
    x: Tensor,
    fc1: nn.Module,
    act: nn.Module,
    between: Sequence[nn.Module],
    fc2: nn.Module,
    scale: Tensor | None = None,
    permuted: bool = False,
    drops: Sequence[nn.Module] = (),
    residual: Tensor | None = None,
) -> Tensor:
    """These layers of x, one after another, as one op as far as nothing is dropped: two layers, a factor for each
    channel, from ``[N, H, W, C]`` to images where ``permuted``, stochastic depth, and a residual."""
    one = all(map(drops_nothing, between)) and _runs_as_one(x, fc1, act, fc2)
    if one and scale is not None and residual is not None and all(map(drops_nothing, drops)):
        residual = residual.permute(0, 2, 3, 1) if permuted else residual
        x = _as_one(fc1, act, fc2, x, scale=scale, residual=residual)
        return x.permute(0, 3, 1, 2) if permuted else x
    if one:
        x = _as_one(fc1, act, fc2, x, scale=scale)
    else:
        x = act(fc1(x))
        for layer in (*between, fc2):
            x = layer(x)
        if scale is not None:
            x = x * (scale[:, None, None] if isinstance(fc2, nn.Conv2d) else scale)
    x = x.permute(0, 3, 1, 2) if permuted else x
    for layer in drops:
        x = layer(x)
    return x if residual is None else x + residual


def recorded_in_turn(
    x: Tensor, fc1, act, between, fc2, scale=None, permuted=False, drops=(), residual=None, residual_first=False
) -> Tensor:
    """:func:`in_turn`, where the sum is made as it was recorded if the residual is of another shape or memory format,
    which the sum takes from what comes first."""
    layers = x, fc1, act, between, fc2, scale, permuted, drops
    if residual is None:
        return in_turn(*layers)
    rows = residual
    if permuted and isinstance(residual, Tensor) and residual.dim() == 4:
        rows = residual.permute(0, 2, 3, 1)
    if isinstance(rows, Tensor) and rows.shape == (*x.shape[:-1], *scale.shape) and rows.is_contiguous():
        return in_turn(*layers, residual)
    return residual + in_turn(*layers) if residual_first else in_turn(*layers) + residual


def make_layers(
    features: tuple[int, int | None, int | None],
    bias: bool | tuple[bool, bool],
    drop: float | tuple[float, float],
    use_conv: bool,
    **options,
) -> tuple[int, tuple[nn.Module, nn.Module], tuple[nn.Module, nn.Module]]:
    """The hidden features, both layers, and the dropout behind each, from the arguments of timm's ``Mlp``: features in,
    hidden and out, of which None is as many as in."""
    c, k, d = features[0], features[1] or features[0], features[2] or features[0]
    biases = bias if isinstance(bias, tuple) else (bias, bias)
    drops = drop if isinstance(drop, tuple) else (drop, drop)

    def layer(c: int, d: int, bias: bool) -> nn.Module:
        return nn.Conv2d(c, d, 1, bias=bias, **options) if use_conv else nn.Linear(c, d, bias=bias, **options)

    return k, (layer(c, k, biases[0]), layer(k, d, biases[1])), (nn.Dropout(drops[0]), nn.Dropout(drops[1]))


class Mlp(nn.Module):
    r"""Two layers with an activation between them, in the place of timm's ``Mlp``.

    .. math:: y = W_2\, \mathrm{norm}(\phi(W_1 x + b_1)) + b_2

    Args:
        in_features: of x.
        hidden_features: between the layers, default ``in_features``.
        out_features: of the output, default ``in_features``.
        act_layer: :math:`\phi`, a module class or a name such as "gelu".
        norm_layer: a module class, or None for no normalisation.
        bias: whether the layers have one, for both or for each.
        drop: the probability of dropping a number, behind the activation and at the end, or for each.
        use_conv: whether x is images ``[N, C, H, W]`` and the layers are 1x1 convolutions, rather than ``[..., C]`` and
            Linear layers.
        device: of the parameters.
        dtype: of the parameters.

    Returns:
        x with ``out_features`` in the place of C. state_dict: ``fc1.*``, ``norm.*``, ``fc2.*``.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`fusedtrain.ops.mlp`.

    Cost: layers without dropout and normalisation between them, and with an activation that the op has, are
        :func:`fusedtrain.ops.mlp`, which keeps the input of the activation for backward, and not its result.
    Numerics: those of :func:`fusedtrain.ops.mlp`.
    Source: ``timm.layers.mlp.Mlp``
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        act_layer: Layer = nn.GELU,
        norm_layer: type[nn.Module] | None = None,
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
        self.norm = nn.Identity() if norm_layer is None else norm_layer(k, **options)
        self.fc2 = layers[1]
        self.drop2 = drops[1]

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(in_turn(x, self.fc1, self.act, (self.drop1, self.norm), self.fc2))


# --- layers and blocks of timm and torchvision: made by fuse() only, with the attributes of the stock class -----------


class ConvMlp(nn.Module):
    """timm's ``ConvMlp`` as one op."""

    def forward(self, x: Tensor) -> Tensor:
        if drops_nothing(self.norm) and not isinstance(x, fx.Proxy):
            return in_turn(x, self.fc1, self.act, (self.drop,), self.fc2)
        return self.fc2(self.drop(self.act(self.norm(self.fc1(x)))))


class MLP(nn.Sequential):
    """torchvision's ``MLP`` of two layers, as in its Swin and vision transformers, as one op."""

    def forward(self, input: Tensor) -> Tensor:
        layers = list(self)
        if len(layers) < 4 or not _runs_as_one(input, layers[0], layers[1], layers[3]):
            return super().forward(input)
        x = in_turn(input, *layers[:2], layers[2:3], layers[3])
        for layer in layers[4:]:
            x = layer(x)
        return x


class ConvNeXtBlock(nn.Module):
    """timm's ``ConvNeXtBlock`` with all behind its normalisation as one op."""

    def forward(self, x: Tensor) -> Tensor:
        layers, permuted = self.mlp, not self.use_conv_mlp
        known = kind_of(layers) is Mlp and not observed(layers) and drops_nothing(layers.drop2)
        if not known or not _runs_as_one(x, layers.fc1, layers.act, layers.fc2):
            return super().forward(x)
        shortcut, x = self.shortcut(x), self.conv_dw(x)
        x = self.norm(x.permute(0, 2, 3, 1) if permuted else x)
        between, drops = (layers.drop1, layers.norm), (self.drop_path,)
        return in_turn(x, layers.fc1, layers.act, between, layers.fc2, self.gamma, permuted, drops, shortcut)


class CNBlock(nn.Module):
    """torchvision's ``CNBlock`` of ConvNeXt with all behind its normalisation as one op."""

    def forward(self, input: Tensor) -> Tensor:
        layers = list(self.block)
        if not _is_convnext(self.block, layers) or not _runs_as_one(input, *layers[3:6]):
            return super().forward(input)
        x, scale = layers[2](layers[0](input).permute(0, 2, 3, 1)), self.layer_scale.flatten()
        return in_turn(x, layers[3], layers[4], (), layers[5], scale, True, (self.stochastic_depth,), input)


def _is_convnext(block: nn.Module, layers: list[nn.Module]) -> bool:
    if observed(block) or len(layers) != 7:
        return False
    permutes = layers[1], layers[6]
    known = all(type(layer).__name__ == "Permute" and not observed(layer) for layer in permutes)
    return known and [layer.dims for layer in permutes] == [[0, 2, 3, 1], [0, 3, 1, 2]]

"""Batch normalisation with the activation behind it as one op: timm's BatchNormAct2d and torch's BatchNorm layers."""

import copy
import math
from collections.abc import Iterable

import torch
from torch import Tensor, fx, nn

from fusedtrain.nn._activation import Layer, create, observed, op_name
from fusedtrain.nn._small import stays_stock, trains_stock
from fusedtrain.nn._traced import node_of
from fusedtrain.ops import batch_norm_act

torch.fx.wrap("batch_norm_act")  # recorded as a single node
torch.fx.wrap("as_images")
torch.fx.wrap("shaped_as")


def as_images(x: Tensor) -> Tensor:
    """Returns ``[N, C, ...]`` as ``[N, C, H, W]``, what the op takes; ``nn.SyncBatchNorm`` stands for layers of any
    dimension."""
    if x.dim() == 4:
        return x
    if x.dim() < 2:
        raise ValueError(f"expected at least 2D input (got {x.dim()}D input)")
    return x.reshape(*x.shape[:2], math.prod(x.shape[2:]), 1)


def shaped_as(y: Tensor, x: Tensor) -> Tensor:
    return y if y.dim() == x.dim() else y.reshape(x.shape)


def arguments(layer: nn.Module) -> tuple:
    """Returns what ``ops.batch_norm_act`` takes behind x for this call of ``layer``, but for its :func:`counter`."""
    if isinstance(layer, FrozenBatchNorm2d):
        vectors = layer.running_mean, layer.running_var, layer.weight, layer.bias
        if vectors[0].dtype not in (torch.float32, torch.float64):  # cast with the model, and x may be of float32
            vectors = tuple(t.float() for t in vectors)
        return *vectors, False, 0.0, layer.eps
    momentum = layer.momentum
    if momentum is None:  # the plain average of all batches
        momentum, batches = 0.0, layer.num_batches_tracked
        if layer.training and layer.track_running_stats and batches is not None:
            momentum = 1.0 / float(batches.add_(1))
    parameters, buffers = layer._parameters, layer._buffers  # nn.Module looks for a microsecond before it finds one
    try:
        affine = parameters["weight"], parameters["bias"]
        running = buffers["running_mean"], buffers["running_var"]
    except KeyError:  # something else stands for one of them, such as a parametrization
        affine, running = (layer.weight, layer.bias), (layer.running_mean, layer.running_var)
    if layer.training and not layer.track_running_stats:
        running = (None, None)
    return *running, *affine, takes_batch(layer), momentum, layer.eps


def counter(layer: nn.Module) -> Tensor | None:
    """Returns the number of batches that this call of ``layer`` is to count up, unless :func:`arguments` has."""
    if isinstance(layer, FrozenBatchNorm2d):
        return None
    counts = layer.training and layer.track_running_stats and layer.momentum is not None
    batches = layer.num_batches_tracked if counts else None
    if batches is None or batches.dtype is torch.int64:
        return batches
    batches.add_(1)  # Module.type() has cast it with the other buffers
    return None


def takes_batch(layer: nn.Module) -> bool:
    """Whether ``layer`` normalises by the statistics of the batch."""
    if isinstance(layer, FrozenBatchNorm2d):
        return False
    return layer.training or (layer.running_mean is None and layer.running_var is None)


def promoted(layer: nn.Module, x: Tensor) -> Tensor:
    """``x`` in the dtype of what ``layer`` makes of it: a frozen one multiplies and adds, also under autocast, and so
    makes float32 of 16 bits unless it has been cast with the model."""
    return x.to(torch.promote_types(x.dtype, layer.weight.dtype)) if promotes(layer, x) else x


def promotes(layer: nn.Module, x: Tensor) -> bool:
    """Whether ``layer`` may make another dtype of ``x``, or of a convolution of it, than that has."""
    if not isinstance(layer, FrozenBatchNorm2d):
        return False
    return layer.weight.dtype != x.dtype or torch.is_autocast_enabled(x.device.type)


def group_of(layer: nn.Module):
    """Returns the process group over which ``layer`` takes the statistics of a batch, or None."""
    distributed = torch.distributed
    # hasattr(layer, ...) takes a microsecond to say no.
    if not layer.training or not ("process_group" in layer.__dict__ or hasattr(type(layer), "process_group")):
        return None
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    group = layer.process_group or distributed.group.WORLD
    return group if distributed.get_world_size(group) > 1 else None


def behind(layer: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Returns ``layer.drop`` and ``layer.act``, which follow the normalisation inside ``layer`` where it has them."""
    return layer._modules.get("drop"), layer._modules.get("act")


def activation_of(layer: nn.Module) -> str | None:
    """Returns the ops' name of what follows the normalisation inside ``layer``; None where it must be called."""
    drop, act = behind(layer)
    alone = drop is None or (type(drop) is nn.Identity and not observed(drop))
    return ("identity" if act is None else op_name(act)) if alone else None


def normalise(
    layer: nn.Module,
    x: Tensor,
    act: str = "identity",
    residual: Tensor | None = None,
    residual_after: bool = False,
    process_group=None,
    moments: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Returns what a BatchNorm ``layer`` and then ``act`` make of ``x``."""
    of_any_shape = isinstance(layer, nn.SyncBatchNorm)
    y = batch_norm_act(
        *(as_images(x) if of_any_shape else x, *arguments(layer)),
        act=act,
        residual=residual,
        residual_after=residual_after,
        process_group=process_group,
        moments=moments,
        num_batches_tracked=counter(layer),
    )
    return shaped_as(y, x) if of_any_shape else y


def _then_act(layer: nn.Module, x: Tensor) -> Tensor:
    """Normalises, then calls ``layer.drop`` and ``layer.act``; as one op where that computes the same."""
    name, group = activation_of(layer), group_of(layer)
    if name is not None:
        return normalise(layer, x, name, process_group=group)
    return through(behind(layer), normalise(layer, x, process_group=group))


def through(layers: Iterable[nn.Module | None], x: Tensor) -> Tensor:
    for layer in layers:
        x = x if layer is None else layer(x)
    return x


def _column(vector: Tensor) -> Tensor:
    return vector.reshape(1, -1, 1, 1)


class BatchNorm2d(nn.BatchNorm2d):
    r"""Batch normalisation of images, in the place of ``nn.BatchNorm2d``.

    .. math:: y = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta

    Args:
        num_features: channels C of the images.
        eps: added to the variance.
        momentum: share of each batch in the running statistics; None for the plain average of all batches.
        affine: whether :math:`\gamma` and :math:`\beta` are learned.
        track_running_stats: whether running statistics are kept, and used in evaluation.
        device: of the parameters.
        dtype: of the parameters.
        bias: whether :math:`\beta` is learned, where the torch at hand knows that argument.

    Returns:
        From images ``[N, C, H, W]``, contiguous or channels_last, the same shape, dtype and memory format. state_dict:
        ``weight``, ``bias``, ``running_mean``, ``running_var``, each ``[C]``, and ``num_batches_tracked``.

    Raises:
        ValueError: the images have another shape, or one value per channel in training.
        TypeError, RuntimeError: as :func:`fusedtrain.ops.batch_norm_act`.

    Cost and numerics: those of :func:`fusedtrain.ops.batch_norm_act`.
    Source: ``torch.nn.BatchNorm2d``
    """

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy) and (node := node_of(self, input)) is not None:
            return node
        if stays_stock(self, input) or trains_stock(input):
            return super().forward(input)
        return normalise(self, input)


class BatchNormAct2d(BatchNorm2d):
    r"""Batch normalisation and an activation as one op, in the place of timm's ``BatchNormAct2d``.

    .. math:: y = a\!\left(\gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta\right)

    Args:
        num_features: channels C of the images.
        eps: added to the variance.
        momentum: share of each batch in the running statistics; None for the plain average of all batches.
        affine: whether :math:`\gamma` and :math:`\beta` are learned.
        track_running_stats: whether running statistics are kept, and used in evaluation.
        apply_act: False leaves the activation out.
        act_layer: :math:`a`, a module class, a name such as "relu" or "silu", or None for none.
        act_kwargs: arguments of ``act_layer``.
        inplace: passed on to ``act_layer``; without effect where the op computes the activation.
        drop_layer: called without arguments for a layer between normalisation and activation, which then are two ops.
        device: of the parameters.
        dtype: of the parameters.

    Returns:
        From images ``[N, C, H, W]``, contiguous or channels_last, the same shape, dtype and memory format. state_dict:
        that of ``nn.BatchNorm2d``. The layers ``act`` and ``drop`` may be replaced; hooks on them are called.

    Raises:
        ValueError: an activation's name is unknown; the images have another shape, or one value per channel in
            training.
        TypeError, RuntimeError: as :func:`fusedtrain.ops.batch_norm_act`.

    Cost and numerics: those of :func:`fusedtrain.ops.batch_norm_act`; an activation that the ops lack is a separate op.
    Source: ``timm.layers.BatchNormAct2d``
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        apply_act: bool = True,
        act_layer: Layer | None = nn.ReLU,
        act_kwargs: dict | None = None,
        inplace: bool = True,
        drop_layer: type[nn.Module] | None = None,
        device=None,
        dtype=None,
    ):
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.drop = nn.Identity() if drop_layer is None else drop_layer()
        options = {"inplace": inplace} | (act_kwargs or {})
        self.act = create(act_layer, **options) if apply_act and act_layer is not None else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, fx.Proxy) and (node := node_of(self, x)) is not None:
            return node
        return _then_act(self, x)


class FrozenBatchNorm2d(nn.Module):
    r"""Batch normalisation whose statistics and parameters are fixed, in the place of torchvision's class of this name.

    .. math:: y = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta

    What detection networks have in their backbones, and what ``timm.layers.freeze_batch_norm_2d`` makes. Only x has a
    gradient, and nothing of its size is kept for it.

    Args:
        num_features: channels C of the images.
        eps: added to the variance.

    Returns:
        From images ``[N, C, H, W]``, contiguous or channels_last, the same shape and memory format, in the dtype that
        x and the buffers have together: of 16 bits float32, as in the stock class, unless the layer was cast, too.
        state_dict: ``weight``, ``bias``, ``running_mean`` and ``running_var``, each ``[C]``, all of them buffers.

    Raises:
        ValueError: the images have another shape.
        TypeError, RuntimeError: as :func:`fusedtrain.ops.batch_norm_act`.

    Cost and numerics: those of :func:`fusedtrain.ops.batch_norm_act` in evaluation: one pass over x, and one backward.
    Source: ``torchvision.ops.FrozenBatchNorm2d``
    """

    eps = 1e-5  # of classes that have it in their forward

    def __init__(self, num_features: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.ones(num_features))
        self.register_buffer("bias", torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def _load_from_state_dict(self, state_dict, prefix, *others):
        state_dict.pop(f"{prefix}num_batches_tracked", None)  # of the layer that was frozen
        super()._load_from_state_dict(state_dict, prefix, *others)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, fx.Proxy) and (node := node_of(self, x)) is not None:
            return node
        x = promoted(self, x)
        wide = torch.float64 in (x.dtype, self.weight.dtype)
        if x.dim() == 4 and (x.dtype == self.weight.dtype or not wide) and not trains_stock(x):
            return _then_act(self, x)
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return through(behind(self), x * _column(scale) + _column(self.bias - self.running_mean * scale))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


_FIXED = ("weight", "bias", "running_mean", "running_var")


def is_frozen(module: nn.Module) -> bool:
    """Whether ``module`` is of a class called FrozenBatchNorm2d, of which many packages have a copy, and computes what
    ours does: seen on a few numbers, in training and in evaluation."""
    alone = not module._modules and not any(p is not None for p in module._parameters.values())
    held = {name for name, buffer in module._buffers.items() if buffer is not None}
    if not type(module).__name__.endswith("FrozenBatchNorm2d") or not alone or held != set(_FIXED):
        return False
    if not isinstance(eps := getattr(module, "eps", FrozenBatchNorm2d.eps), float):
        return False
    x = torch.linspace(-3, 5, 2 * 3 * 4 * 5, dtype=torch.float64).reshape(2, 3, 4, 5)
    weight, bias, mean, var = torch.linspace(0.7, -1.9, 12, dtype=torch.float64).reshape(4, 3)
    expected = torch.nn.functional.batch_norm(x, mean, var.square(), weight, bias, eps=eps)
    probe = copy.copy(module)
    probe._buffers = dict(zip(_FIXED, (weight, bias, mean, var.square())))
    for probe.training in (True, False):
        try:
            y = type(module).forward(probe, x)
        except Exception:  # of no matter what it asks for
            return False
        if not isinstance(y, Tensor) or y.shape != x.shape or not torch.allclose(y, expected, rtol=1e-12, atol=1e-12):
            return False
    return True


class FrozenBatchNormAct2d(FrozenBatchNorm2d):
    r"""Fixed batch normalisation and an activation as one op, in the place of timm's ``FrozenBatchNormAct2d``.

    .. math:: y = a\!\left(\gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta\right)

    Args:
        num_features: channels C of the images.
        eps: added to the variance.
        apply_act: False leaves the activation out.
        act_layer: :math:`a`, a module class, a name such as "relu" or "silu", or None for none.
        act_kwargs: arguments of ``act_layer``.
        inplace: passed on to ``act_layer``; without effect where the op computes the activation.
        drop_layer: called without arguments for a layer between normalisation and activation, which then are two ops.
        device: of the buffers.
        dtype: of the buffers.

    Returns:
        As :class:`FrozenBatchNorm2d`. For backward y is kept with ReLU, nothing of its size without an activation,
        else x. The layers ``act`` and ``drop`` may be replaced; hooks on them are called.

    Raises:
        ValueError: an activation's name is unknown; the images have another shape.
        TypeError, RuntimeError: as :func:`fusedtrain.ops.batch_norm_act`.

    Cost and numerics: those of :func:`fusedtrain.ops.batch_norm_act`; an activation that the ops lack is a separate op.
    Source: ``timm.layers.FrozenBatchNormAct2d``
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        apply_act: bool = True,
        act_layer: Layer | None = nn.ReLU,
        act_kwargs: dict | None = None,
        inplace: bool = True,
        drop_layer: type[nn.Module] | None = None,
        device=None,
        dtype=None,
    ):
        super().__init__(num_features, eps)
        self.to(device=device, dtype=dtype)
        self.drop = nn.Identity() if drop_layer is None else drop_layer()
        options = {"inplace": inplace} | (act_kwargs or {})
        self.act = create(act_layer, **options) if apply_act and act_layer is not None else nn.Identity()


class SyncBatchNormAct(nn.SyncBatchNorm):
    r"""Batch normalisation over all processes of a group, in the place of ``nn.SyncBatchNorm`` and timm's class.

    .. math:: y = \mathrm{act}\Bigl(\gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta\Bigr)

    with the mean and the variance of the batches of all processes together. Layers made by
    ``nn.SyncBatchNorm.convert_sync_batchnorm`` or ``timm.layers.convert_sync_batchnorm`` become this by
    :func:`fusedtrain.fuse`: convert first, fuse then. Of timm's layers torch's conversion drops the activation:
    they stay. Works on any device and ``torch.distributed`` backend; the batches of the processes may differ in size,
    or be empty. Without an initialised process group it is plain batch normalisation.

    Args:
        As ``nn.SyncBatchNorm``. The layers ``drop`` and ``act``, set by timm's conversion, follow the normalisation.

    Returns:
        From images ``[N, C, H, W]``, contiguous or channels_last, float32, bfloat16, float16 or float64, the same
        shape, dtype and memory format; from ``[N, C]`` or ``[N, C, ...]`` the same shape and dtype. state_dict:
        ``weight``, ``bias``, ``running_mean``, ``running_var``, each ``[C]``, and ``num_batches_tracked``.

    Raises:
        ValueError: the images have other than C channels, or all processes together have one value per channel in
            training.
        TypeError, RuntimeError: as :func:`fusedtrain.ops.batch_norm_act`.

    Cost: that of :func:`fusedtrain.ops.batch_norm_act`, one gather of ``2 C + 1`` numbers forward, and one sum of
    ``2 C`` backward; none of both in evaluation.
    Numerics: those of :func:`fusedtrain.ops.batch_norm_act`; the processes' statistics are merged in float32 (float64
    for float64), the same in every process.
    Source: ``torch.nn.SyncBatchNorm``; ``timm.layers.SyncBatchNormAct``
    """

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy) and (node := node_of(self, input)) is not None:
            return node
        return _then_act(self, input)

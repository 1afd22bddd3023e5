"""Batch normalisation with the activation behind it as one op: timm's BatchNormAct2d and torch's BatchNorm layers."""

import math

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
    counts = layer.training and layer.track_running_stats and layer.momentum is not None
    batches = layer.num_batches_tracked if counts else None
    if batches is None or batches.dtype is torch.int64:
        return batches
    batches.add_(1)  # Module.type() has cast it with the other buffers
    return None


def takes_batch(layer: nn.Module) -> bool:
    """Whether ``layer`` normalises by the statistics of the batch."""
    return layer.training or (layer.running_mean is None and layer.running_var is None)


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
    drop, act = behind(layer)
    y = normalise(layer, x, process_group=group)
    y = y if drop is None else drop(y)
    return y if act is None else act(y)


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

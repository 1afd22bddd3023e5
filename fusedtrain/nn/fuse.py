"""fuse() and unfuse(): whole models from stock layers to fused ones and back.

A layer is swapped by giving the module object another class, as ``torch.nn.utils.parametrize`` and FSDP do. The object
itself stays, and with it all that refers to it: parameters and buffers, their names and order, optimizers, hooks,
modules that several parents share, references held outside the model. That is possible because a fused layer has the
very attributes of its stock layer. It stays an instance of that class (:mod:`fusedtrain.nn._kind`).
"""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import NamedTuple

from torch import nn
from torch.nn.utils import parametrize

from fusedtrain.nn import (
    batch_norm_act,
    cbam,
    depthwise_bn_act_se,
    depthwise_conv2d,
    eca,
    global_context,
    global_response_norm,
    grouped_conv2d,
    linear,
    mlp,
    pointwise_conv2d,
    recorded,
    split_attn,
    squeeze_excite,
)
from fusedtrain.nn._kind import derived, kind_of, stock_of
from fusedtrain.ops._common import DTYPES


class Rule(NamedTuple):
    """What one stock class becomes.

    Args:
        stock: ``module.Class``, compared with the path of a module's class; never imported by :func:`fuse`.
        fused: the class with the same attributes; None where there is none yet.
        parts: the names of the inner modules and parameters that ``fused`` relies on.
        applies: whether a module of that class is a candidate at all.
    """

    stock: str
    fused: type[nn.Module] | None = None
    parts: tuple[str, ...] = ()
    applies: Callable[[nn.Module], bool] = lambda module: True


def _becomes(module: nn.Module) -> type:
    """Returns the class that ``module`` has once it is fused."""
    rule = _rule_of(module)
    return rule.fused if rule is not None and _why_not(module, rule, _wrapper(module)) is None else kind_of(module)


def _has_middle(conv: str, norm: str) -> Callable[[nn.Module], bool]:
    """Whether the inner modules of these names are a depthwise or 1x1 convolution and a normalisation."""

    def applies(module: nn.Module) -> bool:
        layers = getattr(module, conv, None), getattr(module, norm, None)
        kinds = depthwise_bn_act_se.BEFORE_NORM, depthwise_bn_act_se.NORMS
        return None not in layers and all(_becomes(layer) in kind for layer, kind in zip(layers, kinds))

    return applies


def _holds_middle(sequential: nn.Sequential, convolutions: tuple[type, ...]) -> bool:
    """Whether layers run as one op: a normalisation and its activation, or what begins with one of ``convolutions``."""
    layers = list(sequential)
    found = (depthwise_bn_act_se.find(layers[i:], _becomes) for i in range(len(layers)))
    return any(parts is not None and (parts[0] is None or _becomes(parts[0]) in convolutions) for parts in found)


def _is_one_pixel(conv: nn.Module) -> bool:
    return pointwise_conv2d.is_pointwise(conv) and type(getattr(conv, "static_padding", None)) in _NO_PADDING


_NO_PADDING = (type(None), nn.Identity)


# Convolutions with TensorFlow's "same" padding, which several packages have: by the size of each image, and by the one
# that the network was built for.
_SAME = (
    "timm.layers.conv2d_same.Conv2dSame",
    "geffnet.conv2d_layers.Conv2dSame",
    "efficientnet_pytorch.utils.Conv2dDynamicSamePadding",
    "segmentation_models_pytorch.encoders._efficientnet.Conv2dDynamicSamePadding",
)
_STATIC_SAME = (
    "efficientnet_pytorch.utils.Conv2dStaticSamePadding",
    "segmentation_models_pytorch.encoders._efficientnet.Conv2dStaticSamePadding",
)
_TRANSFORMERS = (
    "transformers.models.mobilenet_v1.modeling_mobilenet_v1.MobileNetV1ConvLayer",
    "transformers.models.mobilenet_v2.modeling_mobilenet_v2.MobileNetV2ConvLayer",
)
_FROZEN = "torchvision.ops.misc.FrozenBatchNorm2d"  # and its copies in other packages
_MBCONV = ("efficientnet_pytorch.model.MBConvBlock", "segmentation_models_pytorch.encoders._efficientnet.MBConvBlock")

# The first rule of a fused class names the stock class that unfuse() gives to layers which never were another.
RULES = (
    Rule(
        "timm.models._efficientnet_blocks.SqueezeExcite",
        squeeze_excite.SqueezeExcite,
        ("conv_reduce", "act1", "conv_expand", "gate"),
    ),
    Rule("timm.layers.squeeze_excite.SEModule", squeeze_excite.SEModule, ("fc1", "bn", "act", "fc2", "gate")),
    Rule("timm.layers.squeeze_excite.SqueezeExciteCl", squeeze_excite.SqueezeExciteCl, ("fc1", "act", "fc2", "gate")),
    Rule("timm.models.senet.SEModule", squeeze_excite.SENetModule, ("fc1", "relu", "fc2", "sigmoid")),
    Rule("timm.layers.squeeze_excite.EffectiveSEModule", squeeze_excite.EffectiveSEModule, ("fc", "gate")),
    Rule("timm.models.hgnet.EseModule", squeeze_excite.EseModule, ("conv", "sigmoid")),
    Rule("timm.layers.eca.EcaModule", eca.EcaModule, ("conv", "gate")),
    Rule("timm.layers.eca.CecaModule", eca.CecaModule, ("conv", "gate")),
    Rule(
        "torchvision.ops.misc.SqueezeExcitation",
        squeeze_excite.SqueezeExcitation,
        ("avgpool", "fc1", "fc2", "activation", "scale_activation"),
    ),
    Rule("torch.nn.modules.batchnorm.BatchNorm2d", batch_norm_act.BatchNorm2d),
    Rule("timm.layers.norm_act.BatchNormAct2d", batch_norm_act.BatchNormAct2d, ("drop", "act")),
    Rule(_FROZEN, batch_norm_act.FrozenBatchNorm2d, applies=batch_norm_act.is_frozen),
    Rule("timm.layers.norm_act.FrozenBatchNormAct2d", batch_norm_act.FrozenBatchNormAct2d, ("drop", "act")),
    Rule("torch.nn.modules.batchnorm.SyncBatchNorm", batch_norm_act.SyncBatchNormAct),
    Rule("timm.layers.norm_act.SyncBatchNormAct", batch_norm_act.SyncBatchNormAct),
    Rule(
        "torch.nn.modules.conv.Conv2d",
        depthwise_conv2d.DepthwiseConv2d,
        ("weight",),
        applies=lambda module: module.groups == module.in_channels > 1,
    ),
    Rule(
        "torch.nn.modules.conv.Conv2d",
        pointwise_conv2d.PointwiseConv2d,
        ("weight",),
        applies=lambda module: _computes_as(type(module), nn.Conv2d) and pointwise_conv2d.is_pointwise(module),
    ),
    Rule(
        "torch.nn.modules.conv.Conv2d",
        grouped_conv2d.GroupedConv2d,
        ("weight",),
        applies=lambda module: _computes_as(type(module), nn.Conv2d) and 1 < module.groups < module.in_channels,
    ),
    Rule(
        "torch.nn.modules.linear.Linear",
        linear.Linear,
        ("weight",),
        applies=lambda module: type(module) is nn.Linear,
    ),
    *(
        Rule(
            stock,
            depthwise_conv2d.DepthwiseConv2dSame,
            ("weight",),
            applies=lambda module: module.groups == module.in_channels > 1,
        )
        for stock in _SAME
    ),
    *(
        Rule(
            stock,
            depthwise_conv2d.DepthwiseConv2dStaticSame,
            ("weight", "static_padding"),
            applies=lambda module: module.groups == module.in_channels > 1,
        )
        for stock in _STATIC_SAME
    ),
    *(
        Rule(stock, pointwise_conv2d.PointwiseConv2d, ("weight",), applies=_is_one_pixel)
        for stock in (*_SAME, *_STATIC_SAME)
    ),
    Rule(
        "timm.models._efficientnet_blocks.DepthwiseSeparableConv",
        depthwise_bn_act_se.DepthwiseSeparableConv,
        ("conv_dw", "bn1", "aa", "se", "conv_pw", "bn2", "drop_path", "has_skip"),
        applies=_has_middle("conv_dw", "bn1"),
    ),
    Rule(
        "timm.models._efficientnet_blocks.InvertedResidual",
        depthwise_bn_act_se.InvertedResidual,
        ("conv_pw", "bn1", "conv_dw", "bn2", "aa", "se", "conv_pwl", "bn3", "drop_path", "has_skip"),
        applies=_has_middle("conv_dw", "bn2"),
    ),
    *(
        Rule(
            stock,
            depthwise_bn_act_se.MBConvBlock,
            ("_depthwise_conv", "_bn1", "_project_conv", "_bn2", "_swish"),
            applies=_has_middle("_depthwise_conv", "_bn1"),
        )
        for stock in _MBCONV
    ),
    *(
        Rule(
            stock,
            depthwise_bn_act_se.TransformersConvLayer,
            ("config", "convolution", "normalization"),
            applies=_has_middle("convolution", "normalization"),
        )
        for stock in _TRANSFORMERS
    ),
    Rule(
        "timm.layers.conv_bn_act.ConvNormAct",
        depthwise_bn_act_se.ConvNormAct,
        ("conv", "bn"),
        applies=_has_middle("conv", "bn"),
    ),
    Rule(
        "torchvision.ops.misc.Conv2dNormActivation",
        depthwise_bn_act_se.Conv2dNormActivation,
        applies=lambda module: _holds_middle(module, depthwise_bn_act_se.BEFORE_NORM),
    ),
    Rule(
        "torch.nn.modules.container.Sequential",
        depthwise_bn_act_se.Sequential,
        # A 1x1 convolution and its normalisation are left to recorded, which may find more in it.
        applies=lambda module: (
            type(module) is nn.Sequential and _holds_middle(module, depthwise_bn_act_se.CONVOLUTIONS)
        ),
    ),
    Rule("timm.layers.grn.GlobalResponseNorm", global_response_norm.GlobalResponseNorm, ("weight", "bias", "wb_shape")),
    Rule(
        "timm.layers.mlp.GlobalResponseNormMlp",
        global_response_norm.GlobalResponseNormMlp,
        ("fc1", "act", "drop1", "grn", "fc2", "drop2"),
    ),
    Rule("timm.layers.mlp.Mlp", mlp.Mlp, ("fc1", "act", "drop1", "norm", "fc2", "drop2")),
    *(
        Rule(stock, mlp.ConvMlp, ("fc1", "norm", "act", "drop", "fc2"))
        for stock in ("timm.layers.mlp.ConvMlp", "timm.models.inception_next.ConvMlp")
    ),
    *(
        Rule(stock, mlp.MLP, applies=lambda module: len(module) >= 4 and mlp.are_alike(module[0], module[3]))
        for stock in ("torchvision.ops.misc.MLP", "torchvision.models.vision_transformer.MLPBlock")
    ),
    Rule(
        "timm.models.convnext.ConvNeXtBlock",
        mlp.ConvNeXtBlock,
        ("conv_dw", "norm", "mlp", "shortcut", "drop_path", "use_conv_mlp"),
    ),
    Rule("torchvision.models.convnext.CNBlock", mlp.CNBlock, ("block", "layer_scale", "stochastic_depth")),
    Rule("timm.layers.cbam.CbamModule", cbam.CbamModule, ("channel", "spatial")),
    Rule("timm.layers.cbam.LightCbamModule", cbam.LightCbamModule, ("channel", "spatial")),
    Rule("timm.layers.cbam.ChannelAttn", cbam.ChannelAttn, ("fc1", "act", "fc2", "gate")),
    Rule("timm.layers.cbam.LightChannelAttn", cbam.LightChannelAttn, ("fc1", "act", "fc2")),
    Rule("timm.layers.cbam.SpatialAttn", cbam.SpatialAttn, ("conv", "gate")),
    Rule("timm.layers.cbam.LightSpatialAttn", cbam.LightSpatialAttn, ("conv", "gate")),
    Rule("timm.layers.global_context.GlobalContext", global_context.GlobalContext, ("gate",)),
    Rule(
        "timm.layers.split_attn.SplitAttn",
        split_attn.SplitAttn,
        ("conv", "bn0", "drop", "act0", "fc1", "bn1", "act1", "fc2", "rsoftmax", "radix"),
    ),
    Rule("timm.layers.gather_excite.GatherExcite"),
)
_BY_STOCK: dict[str, list[Rule]] = {}
for _rule in RULES:
    _BY_STOCK.setdefault(_rule.stock, []).append(_rule)
_FUSED_OF = {stock: [rule.fused for rule in rules if rule.fused] for stock, rules in _BY_STOCK.items()}
_STOCK_OF = {rule.fused: rule.stock for rule in reversed(RULES) if rule.fused is not None}

_GATE_FILES = ("cbam", "eca", "global_context", "split_attn", "squeeze_excite")
_GATES = {rule.fused for rule in RULES if rule.fused is None or rule.fused.__module__.endswith(_GATE_FILES)}


def _refuse_script(layer: nn.Module) -> nn.Module:
    raise RuntimeError(
        f"TorchScript cannot script the fused layer {type(layer).__name__}: call fusedtrain.unfuse(model) first,"
        " whose report says why a layer stays"
    )


def _qconfig(layer: nn.Module):
    if "qconfig" in vars(layer):
        return vars(layer)["qconfig"]
    raise AttributeError(f"{type(layer).__name__} has no qconfig")


def _refuse_qconfig(layer: nn.Module, value) -> None:
    # Behind nn.Module.__setattr__: torch.ao's propagate_qconfig_, which compares classes by identity.
    asked = sys._getframe(2).f_locals
    spec = {} if "qconfig" in vars(layer) else asked.get("qconfig_dict") or {}
    by_class = asked.get("prefix") not in spec and any(spec.get(cls) is not None for cls in type(layer).__mro__)
    if value is not None or by_class:
        raise RuntimeError(
            f"torch.ao.quantization does not know the fused layer {type(layer).__name__} and would leave it as it is:"
            " call fusedtrain.unfuse(model) first"
        )
    vars(layer)["qconfig"] = value


def _drop_qconfig(layer: nn.Module) -> None:
    del vars(layer)["qconfig"]


for _fused in (*_STOCK_OF, recorded.Recorded):
    _fused.__prepare_scriptable__ = _refuse_script  # what torch.jit.script calls before anything else
    _fused.qconfig = property(_qconfig, _refuse_qconfig, _drop_qconfig)

# What is left to a gate that holds it.
_ON_ONE_PIXEL = (pointwise_conv2d.PointwiseConv2d, grouped_conv2d.GroupedConv2d, linear.Linear)

# A model inside one of these has been sharded, replicated or compiled with the classes that it has.
_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.nn.parallel.data_parallel.DataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
    "torch.distributed.fsdp.FSDPModule",
    "torch._dynamo.eval_frame.OptimizedModule",
    "torch.jit._script.ScriptModule",
}


class Candidate(NamedTuple):
    """One line of a :class:`Report`: a module, its class, and either the class it becomes or why it stays."""

    name: str
    before: str
    after: str | None = None
    reason: str | None = None


class Report(tuple[Candidate, ...]):
    """What :func:`fuse` or :func:`unfuse` did, one :class:`Candidate` per module; as a string, a table."""

    @property
    def swapped(self) -> "Report":
        """The modules that have, or with ``dry_run`` would have, another class now."""
        return Report(c for c in self if c.after is not None)

    @property
    def kept(self) -> "Report":
        """The modules that stay as they are, each with its reason."""
        return Report(c for c in self if c.after is None)

    def __str__(self) -> str:
        width = max((len(c.name) for c in self), default=0)
        lines = [f"{c.name or '(the model)':<{width}}  {c.before} -> {c.after}" for c in self.swapped]
        lines += [f"{c.name or '(the model)':<{width}}  {c.before} stays: {c.reason}" for c in self.kept]
        return "\n".join([*lines, f"{len(self.swapped)} of {len(self)} candidates"])


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _wrapper(module: nn.Module) -> str | None:
    """Returns what ``module`` is wrapped in or compiled to, or None."""
    if module._compiled_call_impl is not None:
        return "compiled module"
    return next((cls.__name__ for cls in type(module).__mro__ if _path(cls) in _WRAPPERS), None)


def _refuse_wrapped(function: str, model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}() takes a module, got {type(model).__name__}")
    wrapper = _wrapper(model)
    if wrapper is not None:
        raise ValueError(f"{function}() takes a model before it is wrapped or compiled; this is a {wrapper}")


def _outer_wrappers(model: nn.Module):
    """Yields (name, module, wrapper or None) for every module, once, with the wrapper that it stands in or is."""
    inside: dict[str, str] = {}
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        wrapper = _wrapper(module) or inside.get(parent)
        if wrapper is not None:
            inside[name] = wrapper
        yield name, module, wrapper


def _why_not(module: nn.Module, rule: Rule, wrapper: str | None) -> str | None:
    """Returns why ``module`` must keep its class, or None."""
    if rule.fused is None:
        return "there is no fused layer for it yet"
    if wrapper is not None:
        return f"it is, or stands in, a {wrapper}; fuse before wrapping"
    if rule.stock != _FROZEN and _path(type(module)) != rule.stock and not _only_constructs(type(module), rule):
        if parametrize.is_parametrized(module):
            return f"it is parametrized ({', '.join(module.parametrizations)})"
        return f"its class is not {rule.stock} but derived from it, and may compute something else"
    if "forward" in vars(module):
        return "its forward has been replaced"
    if getattr(module, "qconfig", None) is not None:
        return "it is prepared for quantisation (qconfig)"
    missing = [part for part in rule.parts if getattr(module, part, None) is None]
    if missing:
        return f"it has no {', '.join(missing)}: an unknown version of {rule.stock}"
    if type(module) is nn.SyncBatchNorm and batch_norm_act.activation_of(module) != "identity":
        names = " and ".join(name for name in ("drop", "act") if name in module._modules)
        return f"nn.SyncBatchNorm does not call its {names}; timm.layers.convert_sync_batchnorm makes what does"
    special = next((type(p).__name__ for p in module.parameters() if type(p) is not nn.Parameter), None)
    if special:
        return f"it holds a {special} instead of a plain parameter"
    dtype = next((p.dtype for p in module.parameters() if p.dtype not in DTYPES), None)
    return f"it holds parameters of {dtype}, which the ops lack" if dtype else None


# What a class may define and still compute what the class does that it is derived from.
_HARMLESS = {"__init__", "__module__", "__qualname__", "__doc__", "__annotations__", "__constants__", "__repr__"}
_HARMLESS |= {"extra_repr", "reset_parameters"}
_HARMLESS |= {"__static_attributes__", "__firstlineno__", "__annotate_func__", "__annotations_cache__"}  # Python's own


@functools.cache
def _computes_as(kind: type, stock: type) -> bool:
    """Whether ``kind`` is ``stock``, or derived from it with nothing but another constructor, and methods and constants
    of its own names."""
    if not issubclass(kind, stock):
        return False
    own = {k: v for cls in kind.__mro__[: kind.__mro__.index(stock)] for k, v in vars(cls).items()}
    own = {k: v for k, v in own.items() if k not in _HARMLESS}
    taken = {name for fused in (stock, *_FUSED_OF[_path(stock)]) for name in dir(fused)}
    return taken.isdisjoint(own) and not any(hasattr(type(value), "__set__") for value in own.values())


def _only_constructs(kind: type, rule: Rule) -> bool:
    """Whether ``kind`` is derived from the stock class of ``rule``, one of torch, and computes what that does."""
    stock = next(cls for cls in kind.__mro__ if _path(cls) == rule.stock)
    return rule.stock.startswith("torch.nn.") and _computes_as(kind, stock)


def _rule_of(module: nn.Module) -> Rule | None:
    """Returns the rule of the module's class or of the nearest class it is derived from, where that applies."""
    if kind_of(module) in _STOCK_OF:
        return None
    copies = [_FROZEN] if type(module).__name__.endswith("FrozenBatchNorm2d") else []
    paths = (*map(_path, type(module).__mro__), *copies)
    rules = next((_BY_STOCK[path] for path in paths if path in _BY_STOCK), ())
    return next((rule for rule in rules if rule.applies(module)), None)


def fuse(model: nn.Module, dry_run: bool = False) -> Report:
    """Makes the stock layers of a model fused ones, in place, wherever that surely computes the same.

    Candidates are the channel attention layers of timm and torchvision, batch normalisation (with timm's activation
    behind it, and over processes), global response normalisation, depthwise, grouped and 1x1 convolutions, Linear
    layers of networks that convolve, and the blocks in which these follow each other: timm's inverted residual and
    separable blocks and its ConvNormAct, the blocks of ConvNeXt, two layers with an activation between them, any
    Sequential, as torchvision's are, and all other blocks of timm and torchvision, such as those of ResNet, and blocks
    and gates of your own classes, which torch.fx looks into (:mod:`fusedtrain.nn.recorded`).
    A layer stays, with the reason in the report, when its class is derived from a known one (of torch's layers: with
    more than another constructor), its forward was replaced, it is parametrized, quantised, sharded, compiled, or
    inside a wrapped part of the model.

    Args:
        model: any module; before or after loading weights, before it is wrapped (DistributedDataParallel, FSDP) or
            compiled.
        dry_run: only report.

    Returns:
        A :class:`Report` of every candidate; ``print(fuse(model))`` shows it as a table. Modules, parameters and
        buffers stay the same objects: state_dict, optimizers, hooks and shared modules are not touched.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``model`` is wrapped or compiled already.

    Cost: one walk over the modules.
    Numerics: those of the fused layers; each as good as the stock layer's own rounding error.
    """
    _refuse_wrapped("fuse", model)
    report, theirs, inside_gates = [], set(), set()
    convolves = any(isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for module in model.modules())
    for name, module, wrapper in list(_outer_wrappers(model)):
        rule = _rule_of(module)
        if kind_of(module) in _GATES or (rule is not None and rule.fused in _GATES):
            inside_gates.add(name)
        elif name.rpartition(".")[0] in inside_gates:
            inside_gates.add(name)
            if rule is not None and rule.fused in _ON_ONE_PIXEL and getattr(module, "kernel_size", (1, 1)) == (1, 1):
                continue  # it sees one pixel, and the gate's op takes its weights
        if rule is not None and rule.fused is linear.Linear and not convolves:
            continue
        if rule or wrapper or kind_of(module) in _STOCK_OF or getattr(module, "qconfig", None) is not None:
            theirs.add(name)
        if rule is None:
            continue
        reason = _why_not(module, rule, wrapper)
        report.append(Candidate(name, _path(type(module)), None if reason else _path(rule.fused), reason))
        if reason is None and not dry_run:
            module._stock_class = _path(type(module))
            module.__class__ = derived(rule.fused, type(module))
    for name, found in recorded.find(model, _becomes, theirs.__contains__).items():
        block = model.get_submodule(name)
        reason = None if isinstance(found, recorded.Recording) else found
        after = None if reason else _path(recorded.Recorded)
        report.append(Candidate(name, _path(type(block)), after, reason))
        if reason is None and not dry_run:
            recorded.take(block, found)
    return Report(report)


def unfuse(model: nn.Module, dry_run: bool = False) -> Report:
    """Gives the fused layers of a model their stock classes back, in place, with the weights they now have.

    TorchScript, ONNX and other tools that look into stock layers then work as before. Layers built as
    ``fusedtrain.nn`` classes become the timm or torchvision layer of that name.

    Args:
        model: any module, not wrapped or compiled.
        dry_run: only report.

    Returns:
        A :class:`Report` of every fused layer. Modules, parameters and buffers stay the same objects.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``model`` is wrapped or compiled.

    Cost: one walk over the modules; imports timm or torchvision where a layer needs them.
    """
    _refuse_wrapped("unfuse", model)
    report = []
    for name, module, wrapper in list(_outer_wrappers(model)):
        if isinstance(module, recorded.Recorded):
            reason = None if recorded.Recorded in type(module).__bases__ else _special(module)
            reason = reason if wrapper is None else f"it is, or stands in, a {wrapper}"
            before, stock = _path(recorded.Recorded), recorded.stock_class(module)
            report.append(Candidate(name, before, None if reason else _path(stock), reason))
            if reason is None and not dry_run:
                recorded.restore(module)
            continue
        if kind_of(module) not in _STOCK_OF:
            base = next((cls for cls in type(module).__mro__ if cls in _STOCK_OF), None)
            if base is not None:
                report.append(Candidate(name, _path(base), None, _special(module)))
            continue
        stock, reason = stock_of(module), None
        if stock is None:
            stock, reason = _import(getattr(module, "_stock_class", _STOCK_OF[kind_of(module)]))
        if wrapper is not None:
            reason = f"it is, or stands in, a {wrapper}"
        report.append(Candidate(name, _path(type(module)), None if reason else _path(stock), reason))
        if reason is None and not dry_run:
            vars(module).pop("_stock_class", None)
            module.__class__ = stock
    return Report(report)


def _special(module: nn.Module) -> str:
    """Returns why a module keeps its class, which is derived from a fused one."""
    return "it is parametrized" if parametrize.is_parametrized(module) else "its class is a derived one"


def _import(path: str) -> tuple[type[nn.Module] | None, str | None]:
    """Returns (class, None), or (None, reason)."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name), None
    except (ImportError, AttributeError, RuntimeError) as error:  # torchvision beside the wrong torch: RuntimeError
        return None, f"its stock class {path} cannot be imported: {error}"

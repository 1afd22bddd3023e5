"""Blocks of classes that :mod:`fusedtrain.nn.fuse` has no rule for, found by torch.fx in what their forward does.

A forward is recorded twice, in training and in evaluation, down to the layers of torch, timm, torchvision and this
package. Where a depthwise convolution, its normalisation, activation and gate follow each other and nobody else uses
what passes between them, they become one call; so do a normalisation, its activation and a residual (ResNet) or a gate
(RegNet), with a 1x1 convolution before them, and a gate by itself. Activations may be written out, such as ``x *
relu6(x + 3) / 6``; two layers with an activation between them become one call, too. All other code stays as it was
recorded. Blocks of your own classes are looked into down to the last of them, those of timm and torchvision, of which a
model may be built, one by one. What a recording cannot know is looked at in each call: where a plain attribute, also
one of the class or of a layer that the forward reads, a global value, a container or a hook has changed, or the block
is called with more than its images, its own forward runs. A forward that prints, warns or reads the clock, or
changes anything but tensors, stays.

First :mod:`_tracing` records, then :mod:`_patterns` rewrites; :mod:`_state` is what is looked at in each call, and
:mod:`_block` the class that calls the recording.
"""

import functools
from collections.abc import Callable, Iterator

from torch import fx, nn
from torch.nn.utils import parametrize

from fusedtrain.nn import _channel_gate as gates
from fusedtrain.nn._activation import observed
from fusedtrain.nn.depthwise_bn_act_se import BLOCKS, CONVOLUTIONS, NORMS, Conv2dNormActivation, Sequential, is_pair
from fusedtrain.nn.depthwise_bn_act_se import find as find_parts
from fusedtrain.nn.recorded._block import Recorded, restore, stock_class, take
from fusedtrain.nn.recorded._origin import is_of_a_zoo, is_unknown
from fusedtrain.nn.recorded._patterns import Pattern, count_pointwise
from fusedtrain.nn.recorded._state import MANY, Recording, Seen, aliases, is_sequence, state_of
from fusedtrain.nn.recorded._tracing import Kind, held_by, holders_of, hooked, is_inlined, trace

__all__ = ["Recorded", "Recording", "find", "record", "restore", "stock_class", "take"]


def record(block: nn.Module, kind: Kind) -> Recording | str:
    """Returns the forward of ``block`` with fused calls, or why there is none. ``block`` is left as it is."""
    if any(state_of(m, type(m))(m, False) != state_of(m, type(m))(m, False) for m in block.modules()):
        return f"it holds more than {MANY} items in one container, or a numpy array, too many to compare in every call"
    if any(isinstance(held, Iterator) for held in held_by(list(block.modules()))):
        return "it holds an iterator, which a recording would use up"
    traced = trace(block, kind)
    if isinstance(traced, str):
        return traced
    graphs, inlined, saved, of_images = [], {""}, [], set()
    for tracer, graph in traced:
        pattern = Pattern(graph, block, kind)
        saved.append(pattern.rewrite())
        inlined.update(tracer.inlined, pattern.inlined)
        graphs.append(graph)
        of_images.add(tracer.of_images)
    inlined.update(holder for path in list(inlined) for holder in holders_of(path))
    of_images.discard(None)
    if len(of_images) > 1:
        return "its forward asks for the type of its argument"
    for path in list(inlined):  # the modules that it calls may stand in lists
        inlined.update(f"{path}.{name}".strip(".") for name in _containers(block.get_submodule(path)))
    seen = {path: Seen.of(path, block.get_submodule(path)) for path in sorted(inlined)}
    forwards, leaves_small = tuple(map(_compile, graphs)), not any(kind(m) in CONVOLUTIONS for m in block.modules())
    return Recording(forwards, seen, min(saved), next(iter(of_images), None), aliases(block), leaves_small)


def _containers(module: nn.Module) -> Iterator[str]:
    """The names of lists and dicts of modules or parameters that ``module`` holds, and of those in them."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
            yield name
            yield from (f"{name}.{inner}" for inner in _containers(child))


def _compile(graph: fx.Graph) -> Callable:
    for node in graph.nodes:
        node.meta.pop("is_wrapped", None)  # else torch.fx keeps the names of this code for ever, to wrap them
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(compile(code.src, "<fusedtrain: recorded forward>", "exec"), names)
    return names["forward"]


@hooked()
def find(model: nn.Module, kind: Kind, leave: Callable[[str], bool]) -> dict[str, Recording | str]:
    """Looks for blocks: the innermost modules that hold whole patterns.

    Args:
        model: is not changed.
        kind: returns the class that a layer has, or will have once the rules are through with it.
        leave: whether the module of a path is not to be touched: it has a rule, or is wrapped.

    Returns:
        By path, what was recorded, or why a module that holds a depthwise convolution and a normalisation, or a gate,
        stays.
    """
    kind = functools.cache(kind)  # nothing changes meanwhile
    found: dict[str, Recording | str] = {}
    saved: dict[nn.Module, int] = {}  # by it, or by blocks inside
    blocks: set[nn.Module] = set()  # of timm or torchvision, and what holds them
    done = tuple(f"{path}." if path else "" for path, m in model.named_modules() if isinstance(m, Recorded))
    for path, module in reversed(list(model.named_modules())):
        if path.startswith(done):
            continue
        holds_blocks = any(child in blocks for child in module.children())
        is_block = is_of_a_zoo(kind(module)) and not holds_blocks and _may_be_a_block(module, kind)
        part = is_block and is_sequence(module) and len(module) == 2  # convolution and norm, of what holds them
        if (is_block and not part) or holds_blocks or kind(module) in BLOCKS or isinstance(module, Recorded):
            blocks.add(module)
        if "forward" in vars(module) or parametrize.is_parametrized(module):
            continue
        inner = saved[module] = sum(saved.get(child, 0) for child in module._modules.values())
        if is_of_a_zoo(kind(module)):
            result = record(module, kind) if is_block and not leave(path) else None
            gains = isinstance(result, Recording) and result.saved > inner
            saved[module] = result.saved if gains and is_sequence(module) else 0  # others are called, not inlined
            if gains:
                _take_in(found, path, result, module, kind)
            continue
        layers = [m for m in module.modules() if m is not module]
        if not is_inlined(module, kind) or not any(map(is_unknown, (module, *layers))):
            continue
        if not _may_hold_a_pattern(layers, kind):
            continue
        result = record(module, kind)
        if isinstance(result, Recording) and not result.saved:
            result = "no fused op takes its layers in the way its forward calls them"
        if isinstance(result, str):
            if is_unknown(module) and _holds_one(module, kind) and not leave(path):
                found[path] = result
        elif result.saved > inner:
            saved[module] = inner + _saved_by_class(module, kind) if kind(module) in _SEQUENCES else result.saved
            if not leave(path):
                _take_in(found, path, result, module, kind)
    return found


def _take_in(found: dict, path: str, recording: Recording, module: nn.Module, kind: Kind) -> None:
    """Puts what was recorded of ``module`` in the place of what was found in the modules inlined there."""
    for inner in recording.seen:
        inlined = module.get_submodule(inner)
        if is_inlined(inlined, kind) and not observed(inlined):
            found.pop(f"{path}.{inner}".strip("."), None)
    found[path] = recording


_SEQUENCES = (Sequential, Conv2dNormActivation)


def _saved_by_class(module: nn.Sequential, kind: Kind) -> int:
    """How many calls fewer a fused sequence makes by itself, whose layers need be of classes that it knows."""
    layers, saved = list(module), 0
    while layers:
        count = (find_parts(layers, kind) or [1])[-1]
        saved, layers = saved + count - 1, layers[count:]
    return saved


def _may_hold_a_pattern(layers: list[nn.Module], kind: Kind) -> bool:
    return any(kind(m) in (*CONVOLUTIONS, *NORMS) for m in layers) or count_pointwise(layers, kind) > 1


def _may_be_a_block(module: nn.Module, kind: Kind) -> bool:
    return not is_pair(module) and any(kind(layer) in NORMS or is_pair(layer) for layer in _layers(module))


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The children of ``module``, and those of a sequence in its place."""
    for child in module.children():
        yield from _layers(child) if is_sequence(child) else (child,)


def _holds_one(module: nn.Module, kind: Kind) -> bool:
    kinds = {kind(child) for child in module.children()}
    inside = [m for m in module.modules() if m is not module and not is_inlined(m, kind)]
    is_gate = any(map(gates.is_mean, inside)) and count_pointwise(inside, kind) == 2
    return bool(kinds.intersection(CONVOLUTIONS) and kinds.intersection(NORMS)) or is_gate

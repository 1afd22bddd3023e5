"""Blocks of classes that :mod:`fusedtrain.nn.fuse` has no rule for, found by torch.fx in what their forward does.

A forward is recorded twice, in training and in evaluation, down to the layers of torch, timm, torchvision and this
package. Where a depthwise convolution, its normalisation, activation and gate follow each other and nobody else uses
what passes between them, they become one call; so do a normalisation, its activation and a residual (ResNet) or a gate
(RegNet), with a 1x1 convolution before them, and a gate by itself. Activations may be written out, such as
``x * relu6(x + 3) / 6``. All other code stays as it was recorded. Blocks of
your own classes are looked into down to the last of them, those of timm and torchvision, of which a model may be built,
one by one. What a recording cannot know is looked at in each call: where a plain attribute, also one of the class or of
a layer that the forward reads, a global value, a container or a hook has changed, or the block is called with more than
its images, its own forward runs. A forward that changes anything but tensors stays.
"""

import collections
import contextlib
import copy
import dis
import functools
import inspect
import io
import itertools
import operator
import pickle
import random
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from fusedtrain.nn import _channel_gate as gates
from fusedtrain.nn._activation import create, observed, op_name
from fusedtrain.nn._kind import kind_of
from fusedtrain.nn._small import stays_stock
from fusedtrain.nn.depthwise_bn_act_se import (
    BEHIND_GATES,
    BLOCKS,
    CONVOLUTIONS,
    GATES,
    NORMS,
    Conv2dNormActivation,
    Gate,
    Sequential,
    add,
    is_pair,
    is_projection,
    middle,
)
from fusedtrain.nn.pointwise_conv2d import PointwiseConv2d
from fusedtrain.ops._codes import INPUT_ACTIVATIONS

Kind = Callable[[nn.Module], type]  # the class that a layer has, or will have

_ZOOS = {"torchvision", "timm"}
_KNOWN = {"torch", "fusedtrain"} | _ZOOS
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, types.MethodType)
_PLAIN = (*_PLAIN, torch.dtype, torch.device, torch.memory_format, torch.layout)
# What torch, and fuse(), keep in modules: of the hooks alone observed() knows.
_OTHERS = {*vars(nn.Module()), "_recording", "_stock_class", "_is_fsdp_managed_module", "_fsdp_use_orig_params"}
_OTHERS |= {"_is_replica", "_former_parameters", "_is_torch_compile"}
_FUNCTIONS = {
    **{F.relu: "relu", torch.relu: "relu", F.relu6: "relu6", F.silu: "silu", F.hardswish: "hard_swish"},
    **{F.gelu: "gelu", torch.sigmoid: "sigmoid", F.sigmoid: "sigmoid", F.hardsigmoid: "hard_sigmoid"},
    **{torch.tanh: "tanh", F.tanh: "tanh", "relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh"},
}
_SHAPES = {"view", "reshape", "flatten", "squeeze", "unsqueeze", "expand", "expand_as", "size", "contiguous"}
_SHAPES |= {torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, operator.getitem, getattr}


_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul")
_IN_PLACE += ("iand", "ior", "ixor", "ilshift", "irshift")
_WRITES = {operator.setitem, *(getattr(operator, name) for name in _IN_PLACE)}
_MAKES = {operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow, operator.matmul}
_MAKES |= {torch.add, torch.sub, torch.mul, torch.div, torch.cat, torch.stack, torch.matmul, F.conv2d, F.linear}
_MAKES |= {"add", "sub", "mul", "div", "matmul", "clone", "new_zeros", "new_ones", "new_empty", "new_full"}
_PRODUCTS = (operator.mul, torch.mul, "mul")
_QUOTIENTS = (operator.truediv, torch.div, "div")
_SUMS_IN_PLACE = {operator.iadd, "add_"}
_SUMS = {operator.add, torch.add, "add"} | _SUMS_IN_PLACE


_LAYERS = {name: create(name) for name in _FUNCTIONS.values()}  # they have no state: one serves all


def activation(name: str) -> nn.Module:
    """Returns the layer in the place of a function."""
    return _LAYERS[name]


def gated(x: Tensor, gate: Gate) -> Tensor:
    """Returns ``gate(x)``; torch.fx records a function."""
    return gate(x)


_MANY = 64  # items of a container


class _Object:
    """Something of which only the identity counts."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other) -> bool:
        return isinstance(other, _Object) and other.value is self.value

    def __deepcopy__(self, memo: dict) -> "_Object":
        return _Object(memo.get(id(self.value), self.value))  # what a class holds is not copied with a block


def _content(value, depth: int = 3, is_default: bool = False):
    """What of an attribute is compared in every call: a plain value, what a container holds, or else which object it
    is. A large container or an array of numpy, for which that would take long, is like nothing else; but where a
    container is the default of an argument, which hardly anybody writes to, it counts which one it is."""
    if isinstance(value, types.FunctionType):  # whose code a notebook replaces in place when it loads a module again
        defaults = value.__defaults__, value.__kwdefaults__
        compared = _content(defaults, depth - 1, is_default=True) if depth and defaults != (None, None) else None
        return value, value.__code__, compared
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (dict, tuple, list, set, frozenset)) and len(value) > _MANY:
        return _Object(value if is_default else object())
    if depth and isinstance(value, dict):
        return type(value), [(key, _content(item, depth - 1, is_default)) for key, item in value.items()]
    if depth and isinstance(value, (tuple, list, set, frozenset)):
        return type(value), [_content(item, depth - 1, is_default) for item in value]
    return _Object(object() if type(value).__name__ == "ndarray" else value)


class _Seen(NamedTuple):
    """A module that was inlined, or read from: where its parent holds it, its class, and what of it decides what its
    forward does."""

    parent: str  # its path
    name: str
    kind: type
    look: Callable[[nn.Module, bool], tuple]
    state: tuple  # what ``look`` returns

    @classmethod
    def of(cls, path: str, module: nn.Module) -> "_Seen":
        parent, _, name = path.rpartition(".")
        kind = _own_class(module)
        # What has replaced the block's own forward called that of its class.
        ignored = _OTHERS if path else _OTHERS | {"forward"}
        look = _sequence(module, kind) if _is_sequence(module) else _state(module, kind, ignored)
        return cls(parent, name, kind, look, look(module, False))


# What these two return is traced by torch.compile, which so guards what is read.


def _sequence(module: nn.Module, kind: type) -> Callable[[nn.Module, bool], tuple]:
    """Looks at what decides what the forward of a sequence does: that of its class, and the children that are not
    None."""
    return lambda module, traced: (kind.forward, [k for k, v in module._modules.items() if v is not None])


def _state(
    module: nn.Module, kind: type, ignored: Collection[str] = frozenset(_OTHERS)
) -> Callable[[nn.Module, bool], tuple]:
    """Looks at what decides what another forward does: the same, what of children, parameters and buffers is None, and
    attributes, but for those ``ignored`` and tensors, which recorded forwards do not use."""
    others, asks = _constants(kind)
    known = vars(module).keys() - ignored  # torch.compile of torch 2.11 cannot ask for the names

    def look(module: nn.Module, traced: bool) -> tuple:
        missing = [k for k, v in (module._parameters | module._buffers | module._modules).items() if v is None]
        own = module.__dict__
        names = known if traced else own.keys() - ignored
        attributes = {k: _content(own[k]) for k in names if k in own and not isinstance(own[k], Tensor)}
        constants = others and [_content(getattr(module, k, None) if d is None else d.get(k)) for d, k in others]
        classes = list(map(_own_class, module.children())) if asks else ()
        return _content(kind.forward), list(module._modules), missing, attributes, constants, classes

    return look


_GLOBALS = (bool, int, float, str, types.FunctionType)
_NOT_COMPARED = (types.ModuleType, types.BuiltinFunctionType, type)


@functools.cache
def _constants(kind: type) -> tuple[list[tuple[Mapping | None, str]], bool]:
    """Where else methods find values by their names, which are attributes and methods of the class and global values
    and functions; and whether they ask for the classes of layers. None: in the module, whose own attribute would hide
    that of the class."""
    classes = [vars(cls) for cls in kind.__mro__ if not _is_ours(cls.__module__)]
    members = [value for held in classes for name, value in held.items() if name != "__init__"]
    codes = [getattr(inspect.unwrap(getattr(m, "fget", m)), "__code__", None) for m in members]
    read = {name for code in codes if code is not None for name in code.co_names}
    found = [(held, name) for held in classes for name in read & held.keys()]
    found = [(held if hasattr(held[name], "__get__") else None, name) for held, name in found]
    names = getattr(kind.forward, "__globals__", {})
    found += [(names, name) for name in read if isinstance(names.get(name), _GLOBALS)]
    known = {(id(held), name) for held, name in found}
    others = [(owner if isinstance(owner, dict) else vars(owner), name) for owner, name in _globals(kind)]
    others = [(held, name) for held, name in others if (id(held), name) not in known]
    found += [(held, name) for held, name in others if not isinstance(held[name], _NOT_COMPARED)]
    return found, not read.isdisjoint(("isinstance", "type"))


@functools.cache
def _globals(kind: type) -> list[tuple[object, str]]:
    """The global values that a forward reads or writes, and the methods and functions that it calls, and what these
    hold where they are classes, objects or Python modules: their owners and names."""
    if _package(kind.__module__) in _KNOWN:
        return []
    classes = [vars(cls) for cls in kind.__mro__ if not _is_ours(cls.__module__)]
    names, found, seen, todo = {"forward"}, {}, set(), []
    while True:
        todo += [getattr(held[name], "fget", held[name]) for held in classes for name in names & held.keys()]
        todo = [f for f in map(inspect.unwrap, todo) if isinstance(f, types.FunctionType) and f.__code__ not in seen]
        if not todo:
            return list(found.values())
        function = todo.pop()
        seen.add(function.__code__)
        read, of_scope = _names(function.__code__)
        names |= read
        for name in of_scope & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, _Question):  # which another thread has put there
                continue
            found[id(function.__globals__), name] = function.__globals__, name
            inside = {inner: vars(value)[inner] for inner in read & vars(value).keys()} if _is_read(value, kind) else {}
            found.update({(id(value), inner): (value, inner) for inner in inside})
            functions = [f for f in (value, *inside.values()) if isinstance(f, types.FunctionType)]
            todo += [f for f in functions if _is_own(f.__module__, kind)]


def _names(code: types.CodeType) -> tuple[set[str], set[str]]:
    """All names in code and in the functions that it makes, and those of global values."""
    read = {*code.co_names}
    of_scope = {step.argval for step in dis.get_instructions(code) if step.opname.endswith(("_GLOBAL", "_NAME"))}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            read, of_scope = (ours | theirs for ours, theirs in zip((read, of_scope), _names(inner)))
    return read, of_scope


def _is_read(value, kind: type) -> bool:
    """Whether what a global name stands for holds values of those who wrote ``kind``."""
    if isinstance(value, (type, types.ModuleType)):
        return _is_own(value.__module__ if isinstance(value, type) else value.__name__, kind)
    other = isinstance(value, (types.FunctionType, nn.Module, Tensor))
    return not other and isinstance(getattr(value, "__dict__", None), dict)


def _is_own(module: str | None, kind: type) -> bool:
    """Whether those who wrote ``kind`` may have written a Python module, too."""
    name = (module or "").partition(".")[0]
    if name in _KNOWN or name in sys.stdlib_module_names - {"__main__"}:
        return False
    installed = "-packages" in (getattr(sys.modules.get(name), "__file__", None) or "")
    return not installed or name == kind.__module__.partition(".")[0]


@functools.cache
def _package(module: str) -> str:
    """The package of a Python module; a network that this one brings along is treated like a user's."""
    return module if module == "fusedtrain.train.model" else module.partition(".")[0]


def _is_ours(module: str) -> bool:
    """Whether the code of a Python module is torch's or this package's."""
    return _package(module) in ("torch", "fusedtrain")


class Recording(NamedTuple):
    """A block's forward with fused calls.

    Args:
        forwards: in evaluation and in training.
        seen: what it holds for, by the paths of the modules that were inlined or read from, parents first.
        saved: how many calls fewer than layers.
        of_images: whether it holds for tensors alone, or for others alone; None for whatever it is called with.
    """

    forwards: tuple[Callable, Callable]
    seen: dict[str, _Seen]
    saved: int
    of_images: bool | None

    def holds_for(self, block: nn.Module, argument) -> bool:
        suits = argument is not None if self.of_images is None else isinstance(argument, Tensor) == self.of_images
        if not suits:
            return False
        modules, traced = {"": block}, torch.compiler.is_dynamo_compiling()
        for path, (parent, name, kind, look, state) in self.seen.items():
            if path:
                module = modules[path] = modules[parent]._modules[name]
                same = type(module) is kind or _own_class(module) is kind
                if not same or module.training != block.training or observed(module):
                    return False
            if look(modules[path], traced) != state:
                return False
        return True


class Recorded(nn.Module):
    """A block of any class whose layers are called as fused ops, as far as they follow each other.

    Made by :func:`fusedtrain.fuse` only. It is still an instance of its own class, with all that this has.
    """

    _recording: Recording | None = None  # of what its own code makes of its class, such as ``block[:3]``

    def __init_subclass__(cls, **options):
        if Recorded not in cls.__bases__:  # the classes of blocks are not new ones to those who list theirs
            super().__init_subclass__(**options)

    def forward(self, *args, **kwargs):
        recording = self._recording
        # Tracers of torch.fx name what they see by layers and by how often these were called.
        one = len(args) == 1 and not kwargs and not isinstance(args[0], fx.Proxy)
        if recording is not None and one and not stays_stock(self, *args) and recording.holds_for(self, *args):
            return recording.forwards[int(self.training)](self, *args)  # torch.compile of torch 2.11 takes no bool
        return super().forward(*args, **kwargs)

    def __reduce_ex__(self, protocol):
        state = super().__reduce_ex__(protocol)[2]
        if isinstance(state, dict):  # else a class of its own has made it
            state = {k: v for k, v in state.items() if k != "_recording"}
        return _new, (stock_class(self),), state

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        restore(self)  # its own forward is what is recorded
        recording = record(self, kind_of)
        if isinstance(recording, Recording):
            take(self, recording)


def _deepcopy(block: Recorded, memo: dict) -> Recorded:
    """Copies the recording, too: to record anew would disturb modules that other threads call meanwhile."""
    kind = type(block)
    made = memo[id(block)] = kind.__new__(kind)
    vars(made).update(copy.deepcopy(vars(block), memo))
    return made


_COPIES = ("__deepcopy__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__")


@functools.cache
def _derived(stock: type[nn.Module]) -> type[Recorded]:
    names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    own = Recorded.forward
    forward = types.FunctionType(own.__code__, own.__globals__, "forward", None, own.__closure__)
    forward.__wrapped__ = stock.forward  # exporters and torch.fx go by the names of its arguments
    members = {"forward": forward}
    if all(getattr(stock, name, None) is getattr(nn.Module, name, None) for name in _COPIES):
        members["__deepcopy__"] = _deepcopy
    return type(stock.__name__, (Recorded, stock), names | members)


def _new(stock: type[nn.Module]) -> Recorded:
    kind = _derived(stock)
    return kind.__new__(kind)


def take(block: nn.Module, recording: Recording) -> None:
    """Lets ``block`` call fused ops, in place."""
    block._recording = recording
    block.__class__ = _derived(type(block))


def restore(block: Recorded) -> None:
    """Gives ``block`` the class back that it had."""
    vars(block).pop("_recording", None)
    block.__class__ = stock_class(block)


def stock_class(block: Recorded) -> type[nn.Module]:
    """Returns the class that ``block`` had."""
    classes = type(block).__mro__
    return classes[classes.index(Recorded) + 1]


def _own_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class that a module had before it was recorded, if it was."""
    return stock_class(module) if isinstance(module, Recorded) else type(module)


def is_unknown(module: nn.Module) -> bool:
    """True for classes that are neither torch's, timm's, torchvision's nor ours."""
    return not isinstance(module, Recorded) and _package(type(module).__module__) not in _KNOWN


def is_of_a_zoo(kind: type) -> bool:
    """True for classes of timm and torchvision."""
    return not issubclass(kind, Recorded) and kind.__module__.partition(".")[0] in _ZOOS


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
        if is_block or holds_blocks or kind(module) in BLOCKS or isinstance(module, Recorded):
            blocks.add(module)
        if "forward" in vars(module) or parametrize.is_parametrized(module):
            continue
        if is_of_a_zoo(kind(module)):
            if is_block and not leave(path):
                result = record(module, kind)
                if isinstance(result, Recording) and result.saved:
                    found[path] = result
            continue
        inner = saved[module] = sum(saved.get(child, 0) for child in module._modules.values())
        layers = [m for m in module.modules() if m is not module]
        if not _is_inlined(module, kind) or not any(map(is_unknown, (module, *layers))):
            continue
        if not _may_hold_a_pattern(layers, kind):
            continue
        result = record(module, kind)
        if isinstance(result, str):
            if is_unknown(module) and _holds_one(module, kind) and not leave(path):
                found[path] = result
        elif result.saved > inner:
            saved[module] = result.saved
            if not leave(path):
                for inner in result.seen:
                    inlined = module.get_submodule(inner)
                    if _is_inlined(inlined, kind) and not observed(inlined):
                        found.pop(f"{path}.{inner}".strip("."), None)
                found[path] = result
    return found


def _may_hold_a_pattern(layers: list[nn.Module], kind: Kind) -> bool:
    return any(kind(m) in (*CONVOLUTIONS, *NORMS) for m in layers) or _pointwise(layers, kind) > 1


def _pointwise(layers: list[nn.Module], kind: Kind) -> int:
    return sum(gates.is_pointwise(layer, kind) for layer in layers)


def _may_be_a_block(module: nn.Module, kind: Kind) -> bool:
    return not is_pair(module) and any(kind(layer) in NORMS or is_pair(layer) for layer in _layers(module))


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The children of ``module``, and those of a sequence in its place."""
    for child in module.children():
        yield from _layers(child) if _is_sequence(child) else (child,)


def _holds_one(module: nn.Module, kind: Kind) -> bool:
    kinds = {kind(child) for child in module.children()}
    inside = [m for m in module.modules() if m is not module and not _is_inlined(m, kind)]
    is_gate = any(map(gates.is_mean, inside)) and _pointwise(inside, kind) == 2
    return bool(kinds.intersection(CONVOLUTIONS) and kinds.intersection(NORMS)) or is_gate


# --- recording ------------------------------------------------------------------------------------------------------


def _is_sequence(module: nn.Module) -> bool:
    """Whether all that ``module`` does is to call its children one after another."""
    return kind_of(module) in _SEQUENCES or f"{type(module).__module__}.{type(module).__qualname__}" == _SEQUENCE


_SEQUENCES = (nn.Sequential, Sequential, Conv2dNormActivation)
_SEQUENCE = "torchvision.ops.misc.Conv2dNormActivation"


def _is_inlined(module: nn.Module, kind: Kind) -> bool:
    """Whether a recording goes on into ``module``: a sequence, or of a class that nobody knows."""
    known = not is_unknown(module) or kind(module) is not type(module) or op_name(module) is not None
    return _is_sequence(module) or not known


class _Unwritten:
    """A proxy whose attributes torch.fx alone sets: those that a forward sets would not be set in each call."""

    def __setattr__(self, name: str, value):
        if not sys._getframe(1).f_globals.get("__name__", "").startswith(("torch.fx.", __name__)):
            self.tracer.refuse(f"it sets the {name} of a tensor")
        super().__setattr__(name, value)


class _Asked(_Unwritten, fx.proxy.Attribute):
    """An attribute of a tensor: a method to be called, or a value that other calls take."""

    called = False

    def __call__(self, *args, **kwargs):
        self.called = True
        return super().__call__(*args, **kwargs)

    def __str__(self) -> str:
        self.tracer.refuse(f"it decides by the {self.attr} of what it takes or makes")


class _Proxy(_Unwritten, fx.Proxy):
    """Sums and products that take the place of their first operand are recorded as such."""

    def __getattr__(self, name: str):
        if _package(sys._getframe(1).f_globals.get("__name__", "")) in _KNOWN:
            return super().__getattr__(name)
        return self.tracer.attribute(self, name)

    @property
    def __class__(self):
        """What isinstance() looks at, which says no to all that a forward may ask for."""
        self.tracer.note_question(self.node, sys._getframe(1))
        return _Proxy

    def __len__(self) -> NoReturn:
        self.tracer.refuse("it asks for the length of what it takes or makes")

    def __float__(self) -> NoReturn:
        self.tracer.refuse(_NUMBER)

    def __int__(self) -> NoReturn:
        self.tracer.refuse(_NUMBER)


def _in_place(name: str) -> Callable:
    def write(self: _Proxy, other):
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    return write


for _name in _IN_PLACE:
    setattr(_Proxy, f"__{_name}__", _in_place(_name))


_TYPES = "it asks for the types of what it takes or makes"
_NUMBER = "it asks for the number in a tensor"
_APPLY = torch.autograd.Function.apply.__func__.__code__
_AUTOCAST = ("cpu", "cuda")


def _modes() -> tuple:
    """What a ``with`` in a forward may switch: it would be over before the recorded calls run."""
    autocast = ((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _AUTOCAST)
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast, hooks


@contextlib.contextmanager
def _switched(autocast: bool) -> Iterator[None]:
    """Gradients on, and autocast on once and off once, so that a forward which switches it the other way shows."""
    before = [torch.is_autocast_enabled(device) for device in _AUTOCAST]
    try:
        for device in _AUTOCAST:
            torch.set_autocast_enabled(device, autocast)
        with torch.enable_grad():
            yield
    finally:
        for device, enabled in zip(_AUTOCAST, before):
            torch.set_autocast_enabled(device, enabled)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # their values may change

    def __init__(self, block: nn.Module, kind: Kind):
        super().__init__()
        self.kind = kind
        self.inlined: list[str] = [""]
        self.block_by_block = is_of_a_zoo(type(block))
        self.modes = _modes()
        self.thread = threading.get_ident()
        self.of_images: bool | None = None
        self.asked: list[_Asked] = []
        self.reason: str | None = None

    def refuse(self, reason: str) -> NoReturn:
        """Raises, also once the forward is over if it catches that."""
        self.reason = reason
        raise TypeError(reason)

    def note_question(self, node: fx.Node, frame: types.FrameType) -> None:
        """Keeps for which arguments the answer is right that the code of ``frame`` gets: none is a tensor."""
        if frame.f_code is _APPLY:  # of a bound method, too, which nothing in its place would be seen by
            self.refuse("it calls a torch.autograd.Function")
        frame = frame.f_back if frame.f_code is torch.is_tensor.__code__ else frame
        names = {*frame.f_code.co_names, *frame.f_code.co_freevars}
        if _is_ours(frame.f_globals.get("__name__", "")):
            return
        if "__class__" in frame.f_code.co_names:
            self.refuse(_TYPES)
        if not names & {"isinstance", "is_tensor"}:
            return
        of_tensors, of_others = (
            names & {"Tensor", "is_tensor"},
            names & {"list", "tuple", "dict", "Sequence", "Mapping"},
        )
        if of_tensors and (of_others or node.op != "placeholder"):
            self.refuse(_TYPES)
        self.keep_to(images=not of_tensors)

    def keep_to(self, images: bool) -> None:
        """What is recorded holds for tensors alone, or for others alone."""
        if self.of_images not in (None, images):
            self.refuse(_TYPES)
        self.of_images = images

    def attribute(self, proxy: fx.Proxy, name: str) -> _Asked:
        if proxy.node.op == "placeholder" and not hasattr(Tensor, name):
            self.keep_to(images=True)
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")
        self.asked.append(_Asked(proxy, name))
        return self.asked[-1]

    def refuse_decisions(self) -> None:
        """Raises where the forward caught what was raised in it, or kept to itself what it read of a tensor, such as
        ``x.dtype is torch.float32``."""
        if self.reason is not None:
            raise TypeError(self.reason)
        kept = next((asked.attr for asked in self.asked if asked._node is None and not asked.called), None)
        if kept is not None:
            raise TypeError(f"it decides by the {kept} of what it takes or makes")

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if not _is_inlined(m, self.kind) or observed(m) or (self.block_by_block and is_unknown(m)):
            return True
        self.inlined.append(module_qualified_name)
        return False

    def create_node(self, *args, **kwargs) -> fx.Node:
        if _modes() != self.modes:
            self.refuse("gradients, autocast or hooks on saved tensors are switched in it")
        return super().create_node(*args, **kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        with self.noted():
            return super().to_bool(obj)

    def iter(self, obj: fx.Proxy) -> Iterator:
        with self.noted():
            return super().iter(obj)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        try:
            yield
        except fx.proxy.TraceError as error:
            self.reason = str(error)
            raise

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def call_module(self, m: nn.Module, forward: Callable, args: tuple, kwargs: dict):
        """A fused sequence is recorded layer by layer, too. torch.fx asks in every thread."""
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        if _is_sequence(m):
            forward = functools.partial(nn.Sequential.forward, m)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val, parameter_proxy_cache: dict):
        if threading.get_ident() != self.thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_args_for_root(self, root_fn, is_module, concrete_args=None):
        """Of all its arguments the images alone; the others have their defaults."""
        if _is_sequence(self.root):
            root_fn = nn.Sequential.forward
        name = next(iter(inspect.signature(self.root.forward).parameters))
        images = self.create_proxy("placeholder", name, (), {})
        return lambda block, x: root_fn(block, x), [self.root, images]


def record(block: nn.Module, kind: Kind) -> Recording | str:
    """Returns the forward of ``block`` with fused calls, or why there is none. ``block`` is left as it is."""
    if any(_state(m, type(m))(m, False) != _state(m, type(m))(m, False) for m in block.modules()):
        return f"it holds more than {_MANY} items in one container, or a numpy array, too many to compare in every call"
    if any(isinstance(held, Iterator) for held in _reached(list(block.modules()))):
        return "it holds an iterator, which a recording would use up"
    traced = _trace(block, kind)
    if isinstance(traced, str):
        return traced
    graphs, inlined, saved, of_images = [], {""}, [], set()
    for tracer, graph in traced:
        pattern = _Pattern(graph, block, kind)
        saved.append(pattern.rewrite())
        inlined.update(tracer.inlined, pattern.inlined)
        graphs.append(graph)
        of_images.add(tracer.of_images)
    inlined.update(holder for path in list(inlined) for holder in _holders(path))
    of_images.discard(None)
    if len(of_images) > 1:
        return "its forward asks for the type of its argument"
    for path in list(inlined):  # the modules that it calls may stand in lists
        inlined.update(f"{path}.{name}".strip(".") for name in _containers(block.get_submodule(path)))
    seen = {path: _Seen.of(path, block.get_submodule(path)) for path in sorted(inlined)}
    return Recording(tuple(map(_compile, graphs)), seen, min(saved), next(iter(of_images), None))


def _holders(path: str) -> Iterator[str]:
    """The paths of the modules in which the one at ``path`` stands, outermost first."""
    return itertools.accumulate(path.split(".")[:-1], "{}.{}".format)


def _containers(module: nn.Module) -> Iterator[str]:
    """The names of lists and dicts of modules or parameters that ``module`` holds, and of those in them."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
            yield name
            yield from (f"{name}.{inner}" for inner in _containers(child))


_HOLDERS = (dict, list, set, collections.deque)


def _ids(holder: dict | list | set | collections.deque) -> list:
    return [(key, id(value)) for key, value in holder.items()] if isinstance(holder, dict) else list(map(id, holder))


_CONSTANT = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, io.IOBase, nn.Module, Tensor)
_BOUND = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_ITEMS = (list, tuple, set, frozenset, collections.deque)


def _inside(value) -> list:
    """What an object holds, as far as that shows."""
    if isinstance(value, _BOUND):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
    items = list(value.values() if isinstance(value, dict) else value if isinstance(value, _ITEMS) else ())
    of_numpy = type(value).__module__.startswith("numpy.random")
    bits = getattr(value, "bit_generator", None) if of_numpy else None
    return [*items, getattr(value, "__dict__", None), bits]


def _reached(modules: list[nn.Module], depth: int = 6) -> list:
    """All objects that attributes and global values hold, and that these hold, but for modules, tensors and
    constants."""
    found: dict[int, object] = {}
    values = [value for module in modules for name, value in vars(module).items() if name not in _OTHERS]
    kinds = {type(module) for module in modules}
    values += [held.get(name) for kind in kinds for held, name in _constants(kind)[0] if held is not None]
    values += [getattr(kind, name, None) for kind in kinds for held, name in _constants(kind)[0] if held is None]
    for _ in range(depth):
        values = [value for value in values if not isinstance(value, _CONSTANT) and id(value) not in found]
        found.update((id(value), value) for value in values)
        values = [inner for value in values for inner in _inside(value)]
    return list(found.values())


def _get(generator) -> bytes | None:
    """The state of a generator of random numbers; None for all else."""
    numpy = sys.modules.get("numpy")
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return pickle.dumps(generator.getstate())
    if isinstance(generator, torch.Generator):
        return pickle.dumps(generator.get_state().tolist())
    if numpy is not None and isinstance(generator, numpy.random.RandomState):
        return pickle.dumps(generator.get_state())  # printed it takes milliseconds
    if numpy is not None and isinstance(generator, numpy.random.BitGenerator):
        return pickle.dumps(generator.state)
    return None


def _set(generator, state: bytes) -> None:
    state = pickle.loads(state)
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(state, dtype=torch.uint8))
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.state = state


def _named(owner, name: str):
    return (owner if isinstance(owner, dict) else vars(owner)).get(name)


@contextlib.contextmanager
def _untouched(modules: list[nn.Module]):
    """Puts attributes, what they and global values hold, and random numbers back; yields a list that says afterwards
    what had changed."""
    changes = []
    before, seen = [dict(vars(m)) for m in modules], [(type(m), _state(m, type(m))(m, False)) for m in modules]
    reached, own = _reached(modules), {id(value): value for m in before for value in m.values()}
    holders = {**own, **{id(value): value for value in reached}}.values()
    held = [(v, dict(v) if isinstance(v, dict) else list(v)) for v in holders if isinstance(v, _HOLDERS)]
    named = {(id(owner), name): (owner, name) for kind, _ in seen for owner, name in _globals(kind)}.values()
    named = [(owner, name, _named(owner, name)) for owner, name in named]
    generators = [random.getstate.__self__, torch.default_generator, *reached]
    if "numpy" in sys.modules:
        generators.append(sys.modules["numpy"].random.get_state.__self__)
    states = [(generator, state) for generator in generators if (state := _get(generator)) is not None]
    try:
        yield changes
        changed = any(vars(m).keys() != b.keys() for m, b in zip(modules, before))
        changed = changed or [(type(m), _state(m, type(m))(m, False)) for m in modules] != seen
        written = [now for now, old in held if _ids(now) != _ids(old)]
        if any(id(now) not in own for now in written) or any(_named(o, n) is not value for o, n, value in named):
            changes.append("its forward changes objects or global values")
        if changed or written:
            changes.append("its forward changes its attributes, or holds tensors that are no buffers")
        if any(_get(generator) != state for generator, state in states):
            changes.append("its forward draws random numbers outside of layers")
    finally:
        for module, old in zip(modules, before):
            vars(module).clear()
            vars(module).update(old)
        for now, old in held:
            if _ids(now) != _ids(old):
                now.clear()
                (now.update if isinstance(now, (dict, set)) else now.extend)(old)
        for owner, name, value in named:
            if _named(owner, name) is not value and not isinstance(owner, dict):
                setattr(owner, name, value)
            elif _named(owner, name) is not value:
                owner[name] = value
        for generator, state in states:
            if _get(generator) != state:
                _set(generator, state)


_LOOKS = ("parameters", "named_parameters", "buffers", "named_buffers", "state_dict")
_ASKS = ("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_autocast_cpu_enabled")
_ASKS += ("get_autocast_dtype", "get_autocast_cpu_dtype", "get_autocast_gpu_dtype")
_GROUP = ("is_initialized", "get_rank", "get_world_size") if torch.distributed.is_available() else ()
_CLOSED = [(nn.Module, name, "it looks through its parameters or buffers") for name in _LOOKS]
_CLOSED += [(torch.distributed, name, "it asks for its process group") for name in _GROUP]
_CLOSED += [(torch, name, "it asks whether gradients or autocast are on") for name in _ASKS]


@contextlib.contextmanager
def _closed() -> Iterator[list[str]]:
    """A forward that looks through its parameters raises: their dtypes and devices would be those of today for ever.
    So does one that asks for modes. Yields why it did, if it catches that."""

    thread, reasons = threading.get_ident(), []

    def closed(look: Callable, reason: str) -> Callable:
        @functools.wraps(look)
        def asked(*args, **kwargs):
            if threading.get_ident() == thread and not _is_ours(sys._getframe(1).f_globals.get("__name__", "")):
                reasons.append(reason)
                raise RuntimeError(reason)
            return look(*args, **kwargs)

        return asked

    before = [getattr(owner, name) for owner, name, _ in _CLOSED]
    try:
        for (owner, name, reason), look in zip(_CLOSED, before):
            setattr(owner, name, closed(look, reason))
        yield reasons
    finally:
        for (owner, name, _), look in zip(_CLOSED, before):
            setattr(owner, name, look)


@contextlib.contextmanager
def _observed_reads() -> Iterator[set[nn.Module]]:
    """Yields a set of the modules of which a forward reads attributes, such as ``self.norm.training``."""
    found: set[nn.Module] = set()
    thread = threading.get_ident()

    def read(module: nn.Module, name: str):
        if threading.get_ident() == thread and not _is_ours(sys._getframe(1).f_globals.get("__name__", "")):
            found.add(module)
        return object.__getattribute__(module, name)

    nn.Module.__getattribute__ = read
    try:
        yield found
    finally:
        del nn.Module.__getattribute__


class _Question:
    """A builtin that raises when it is asked about what a recording holds, which other threads never have; to them it
    is the builtin. It is none of ``_GLOBALS``, so that they do not take it for a function of the module."""

    def __init__(self, builtin: Callable):
        self.builtin = builtin

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and issubclass(type(args[0]), fx.Proxy) and isinstance(args[0].tracer, _Tracer):
            args[0].tracer.refuse(_TYPES)
        return self.builtin(*args, **kwargs)

    def __instancecheck__(self, value) -> bool:
        return isinstance(value, self.builtin)

    def __subclasscheck__(self, kind: type) -> bool:
        return issubclass(kind, self.builtin)

    def __mro_entries__(self, bases: tuple) -> tuple:
        return (self.builtin,)

    def __getattr__(self, name: str):
        return getattr(self.builtin, name)


_QUESTIONS = {builtin.__name__: _Question(builtin) for builtin in (type, callable)}


@contextlib.contextmanager
def _typeless(block: nn.Module) -> Iterator[None]:
    """A forward that asks for ``type(x)`` or ``callable(x)``, which have no hook as isinstance() has, raises."""
    forwards = [type(module).forward for module in block.modules() if is_unknown(module)]
    scopes = [getattr(inspect.unwrap(forward), "__globals__", {}) for forward in forwards]
    asked = [(scope, name) for scope in scopes for name in _QUESTIONS if name not in scope]
    try:
        for scope, name in asked:
            scope[name] = _QUESTIONS[name]
        yield
    finally:
        for scope, name in asked:
            scope.pop(name, None)


_ONE_AT_A_TIME = threading.RLock()  # what is put in the place of methods of torch is seen by all threads


def _trace(block: nn.Module, kind: Kind) -> list[tuple[_Tracer, fx.Graph]] | str:
    """Records the forward in evaluation and in training; or says why that cannot be."""
    modules, traced = list(block.modules()), []
    try:
        with _ONE_AT_A_TIME, _closed() as reasons, _typeless(block), _observed_reads() as read:
            for training in (False, True):
                with _untouched(modules) as changes, _switched(autocast=training):
                    for module in modules:
                        module.training = training
                    tracer = _Tracer(block, kind)
                    traced.append((tracer, tracer.trace(block)))
                    tracer.refuse_decisions()
                    if reasons:
                        raise RuntimeError(reasons[0])
                if changes:
                    return changes[0]
    except Exception as error:  # whatever a forward does with something that is no tensor
        return f"torch.fx cannot record its forward: {str(error).partition(chr(10))[0] or type(error).__name__}"
    inlined = traced[0][0].inlined
    inlined += [path for path, module in block.named_modules(remove_duplicate=False) if module in read]
    # A forward may walk through the layers of a sequence, too.
    called = (node.target for _, graph in traced for node in graph.nodes if node.op == "call_module")
    inlined += [holder for path in called for holder in _holders(path)]
    return traced


def _compile(graph: fx.Graph) -> Callable:
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(compile(code.src, "<fusedtrain: recorded forward>", "exec"), names)
    return names["forward"]


# --- patterns -------------------------------------------------------------------------------------------------------


class _Residual(NamedTuple):
    """``sum`` is ``value`` and something else, which it takes the place of or not."""

    sum: fx.Node
    value: fx.Node
    in_place: bool


class _WrittenOut(NamedTuple):
    """An activation of ``x`` that ``function`` computes, in the nodes ``inside`` and one more."""

    x: fx.Node
    function: Callable
    inside: list[fx.Node]


class _Pattern:
    def __init__(self, graph: fx.Graph, block: nn.Module, kind: Kind):
        self.graph, self.block, self.kind = graph, block, kind
        self.gone: set[fx.Node] = set()
        self.holders: dict[str, fx.Node] = {}
        self.inlined: set[str] = set()

    def rewrite(self) -> int:
        """Puts one call in the place of each pattern and returns how many calls fewer there are."""
        for node in reversed(self.graph.nodes):
            # Such as the two of ``n, c, _, _ = x.shape``; a layer may have a hook one day.
            if not node.users and node.op != "call_module" and self.only_shapes(node):
                self.graph.erase_node(node)
        for node in list(self.graph.nodes):
            self.name_activation(node)
        saved = 0
        for pattern in (self.chain, self.normalisation, self.gate):
            saved += sum(pattern(node) for node in list(self.graph.nodes) if node not in self.gone)
        self.graph.lint()
        return saved

    def module(self, node: fx.Node | None) -> nn.Module | None:
        """The layer that ``node`` calls on one tensor."""
        if node is None or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            return None
        return self.block.get_submodule(node.target)

    def next(self, node: fx.Node) -> fx.Node | None:
        """The only node that uses ``node``, where it takes nothing else."""
        user = next(iter(node.users)) if len(node.users) == 1 else None
        return user if user is not None and list(user.all_input_nodes) == [node] else None

    def activation(self, node: fx.Node | None) -> str | None:
        """The op's name of an activation, as a layer or as a function."""
        if node is None:
            return None
        if node.op == "call_module":
            layer = self.module(node)
            return None if layer is None else op_name(layer)
        plain = len(node.args) == 1 and node.kwargs.keys() <= {"inplace"}
        return _FUNCTIONS.get(node.target) if plain and node.op in ("call_function", "call_method") else None

    def name_activation(self, node: fx.Node) -> None:
        """Puts a function of torch in the place of an activation that is written out and ends with ``node``."""
        found = self._sigmoid_weighted(node) or self._hard(node)
        if found is None or not self._only_for(node, found.inside):
            return
        nodes = [*found.inside, node]
        if self.is_changed_within(nodes) or not self._is_owned(node, found.x, nodes):
            return
        self.inlined.update(inner.target for inner in nodes if inner.op == "call_module")
        self.replace(nodes, lambda: self.graph.call_function(found.function, (found.x,)))

    def _sigmoid_weighted(self, node: fx.Node) -> "_WrittenOut | None":
        """``x * sigmoid(x)``, also of the hard sigmoid."""
        for x in node.all_input_nodes:
            factor = self._factors(node, x)
            name = self.activation(factor) if isinstance(factor, fx.Node) else None
            function = {"sigmoid": F.silu, "hard_sigmoid": F.hardswish}.get(name)
            if function is not None and factor.all_input_nodes == [x]:
                return _WrittenOut(x, function, [factor])
        return None

    def _hard(self, node: fx.Node) -> "_WrittenOut | None":
        """``relu6(x + 3) / 6``, and ``x`` times that, divided first or last."""
        value = self._sixth(node)
        x = self._shifted_by_three(value)
        if x is not None:
            return _WrittenOut(x, F.hardsigmoid, [*value.all_input_nodes, value])
        for x in value.all_input_nodes if value is not None else ():
            factor = self._factors(value, x)
            if self._shifted_by_three(factor) is x and not self._written(value):
                return _WrittenOut(x, F.hardswish, [*factor.all_input_nodes, factor, value])
        return None

    def _sixth(self, node: fx.Node) -> fx.Node | None:
        """What ``node`` takes a sixth of."""
        if node.op not in ("call_function", "call_method") or len(node.args) != 2 or node.kwargs:
            return None
        value, number = node.args
        if node.target in _PRODUCTS and isinstance(value, (int, float)):
            value, number = number, value
        divided = node.target in _QUOTIENTS and number == 6
        divided = divided or (node.target in _PRODUCTS and number == 1 / 6)
        return value if divided and isinstance(value, fx.Node) else None

    def _shifted_by_three(self, node) -> fx.Node | None:
        """The x of ``relu6(x + 3)``."""
        inputs = node.all_input_nodes if isinstance(node, fx.Node) else []
        shift = inputs[0] if len(inputs) == 1 else None
        cut = shift is not None and (self.activation(node) == "relu6" or self._is_cut_at_six(node))
        if not cut or shift.target not in (operator.add, torch.add, "add") or shift.kwargs or len(shift.args) != 2:
            return None
        x, number = shift.args if isinstance(shift.args[0], fx.Node) else reversed(shift.args)
        return x if isinstance(x, fx.Node) and not isinstance(number, fx.Node) and number == 3 else None

    def _is_cut_at_six(self, node: fx.Node) -> bool:
        if node.target not in (torch.clamp, "clamp"):
            return False
        limits = {**dict(zip(("input", "min", "max"), node.args)), **node.kwargs}
        return (limits.get("min"), limits.get("max")) == (0, 6)

    def _only_for(self, node: fx.Node, inside: list[fx.Node]) -> bool:
        """Whether ``inside`` serves nobody but ``node``."""
        return all(set(inner.users) <= {*inside, node} for inner in inside)

    def layer(self, node: fx.Node) -> fx.Node:
        """A node of the layer that ``node`` calls, or that is in the place of the function."""
        if node.op == "call_module":
            return self.layer_at(node.target)
        return self.graph.call_function(activation, (self.activation(node),))

    def layer_at(self, path: str) -> fx.Node:
        """A node of the layer at ``path``: what its parent holds, since torch takes long to find an attribute."""
        parent, _, name = path.rpartition(".")
        if parent not in self.holders:
            images = next(iter(self.graph.nodes))
            with self.graph.inserting_after(images):
                self.holders[parent] = self.graph.create_node("get_attr", f"{parent}._modules".strip("."))
        return self.graph.call_function(operator.getitem, (self.holders[parent], name))

    def replace(self, nodes: list[fx.Node], call: Callable[[], fx.Node]) -> int:
        """Puts ``call`` in the place of ``nodes``, the last of which has the result, and returns what that saves."""
        with self.graph.inserting_before(nodes[-1]):
            nodes[-1].replace_all_uses_with(call())
        for node in reversed(nodes):
            if not node.users:
                self.graph.erase_node(node)
                self.gone.add(node)
        return sum(not self.only_shapes(node) for node in nodes) - 1

    def kind_of(self, node: fx.Node | None) -> type | None:
        """The class that the layer has, or will have, that ``node`` calls on one tensor."""
        layer = self.module(node)
        return None if layer is None else self.kind(layer)

    def activations(self, node: fx.Node) -> list[fx.Node]:
        """The activations that follow ``node``, one after another."""
        found, last = [], self.next(node)
        while self.activation(last) in INPUT_ACTIVATIONS:
            found.append(last)
            last = self.next(last)
        return found

    def normalisation(self, start: fx.Node) -> int:
        """1x1 convolution or none, normalisation, activations, gate or none, and residual and activations or none."""
        conv = norm = None
        if self.kind_of(start) is PointwiseConv2d and self.kind_of(self.next(start)) in NORMS:
            nodes = [start, self.next(start)]
            conv, norm = (node.target for node in nodes)
        elif self.kind_of(start) in NORMS:
            nodes, norm = [start], start.target
        elif is_pair(self.module(start)) and self.kind(self.module(start).bn) in NORMS:
            nodes, (conv, norm) = [start], (f"{start.target}.{part}" for part in ("conv", "bn"))
        else:
            return 0
        acts = self.activations(nodes[-1])
        nodes += acts
        gate, inside = self.gate_behind(nodes[-1])
        nodes += inside
        residual = self.residual(nodes)
        if gate is not None and residual is not None and not self.is_behind_a_gate(residual.sum):
            residual = None
        useful = conv is not None or any(self.activation(act) != "identity" for act in acts)
        if gate is None and residual is None and (is_pair(self.module(start)) or not useful):
            return 0
        behind = []
        if residual is not None:
            nodes.append(residual.sum)
            behind = self.activations(residual.sum)
            nodes += behind
        if self.is_changed_within(nodes):
            return 0
        self.watch(inside)
        if is_pair(self.module(start)):
            self.inlined.add(start.target)

        def call() -> fx.Node:
            parts = [None if path is None else self.layer_at(path) for path in (conv, norm)]
            arguments = (start.args[0], *parts, tuple(map(self.layer, acts)))
            if residual is None:
                return self.graph.call_function(middle, (*arguments, self.gate_layer(gate)))
            after = tuple(map(self.layer, behind))
            end = (residual.value, residual.in_place, after, self.gate_layer(gate))
            return self.graph.call_function(add, (*arguments, *end))

        return self.replace(nodes, call)

    def is_behind_a_gate(self, sum: fx.Node) -> bool:
        """Whether what a gate's op can compute follows the sum of its images and a residual."""
        names = [self.activation(node) for node in self.activations(sum)]
        return next((name for name in names if name != "identity"), "identity") in BEHIND_GATES

    def residual(self, nodes: list[fx.Node]) -> "_Residual | None":
        """What is added to the last of ``nodes``, where nobody else uses that."""
        last = nodes[-1]
        user = next(iter(last.users)) if len(last.users) == 1 else None
        if user is None or user.target not in _SUMS or len(user.args) != 2 or user.kwargs:
            return None
        value, in_place = user.args[user.args[0] is last], user.target in _SUMS_IN_PLACE
        if not isinstance(value, fx.Node) or value is last or (in_place and user.args[0] is not last):
            return None
        found = _Residual(user, value, in_place)
        return None if self.is_changed_within([user, *self.activations(user)]) else found

    def is_changed_within(self, nodes: list[fx.Node]) -> bool:
        """Whether somebody else may write to what ``nodes``, which become one, read, or take what they write to, after
        the first and before the last of them: views and the data of weights show nobody's hand."""
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        layers = {node.target for node in nodes if node.op == "call_module"}
        norms = {node.target for node in nodes if self.kind_of(node) in NORMS}

        def is_new(node: fx.Node) -> bool:
            """Whether ``node`` is made behind the first of ``nodes``, and no view of what was there before."""
            if order[node] < order[nodes[0]] or node.op in ("placeholder", "get_attr"):
                return False
            return self._makes(node) or all(map(is_new, node.all_input_nodes))

        def disturbs(node: fx.Node) -> bool:
            read = [n.target for n in node.all_input_nodes if n.op == "get_attr"]
            if node.target in norms or any(path.startswith(f"{layer}.") for path in read for layer in layers):
                return True
            return not all(map(is_new, self._written(node)))

        between = itertools.islice(self.graph.nodes, order[nodes[0]], order[nodes[-1]])
        return any(disturbs(node) for node in between if node not in nodes)

    def _written(self, node: fx.Node) -> list[fx.Node]:
        """What ``node`` may write to."""
        if node.op in ("placeholder", "get_attr", "output"):
            return []
        if node.op == "call_module":
            layer = self.block.get_submodule(node.target)
            first = next(inside for inside in layer.modules() if not inside._modules)
            return node.all_input_nodes if is_unknown(layer) or getattr(first, "inplace", False) else []
        name = node.target if isinstance(node.target, str) else node.target.__name__
        options = _arguments(node)
        writes = name.endswith("_") and not name.endswith("__")
        written = node.args[:1] if writes or node.target in _WRITES or options.get("inplace") else ()
        written = [*written, options.get("out")]
        return [value for value in written if isinstance(value, fx.Node)]

    def _makes(self, node: fx.Node) -> bool:
        """Whether the result of ``node`` is sure to be a tensor of its own."""
        if node.op == "call_module":
            layer, kind = self.block.get_submodule(node.target), self.kind_of(node)
            new = isinstance(layer, (nn.Conv2d, nn.Linear)) or kind in NORMS or op_name(layer) not in (None, "identity")
            return new and not getattr(layer, "inplace", False)
        if node.target in (middle, add, gated):
            return True
        return node.target in _MAKES and "out" not in node.kwargs

    def chain(self, conv: fx.Node) -> int:
        """Depthwise convolution, normalisation, activations, gate, projection."""
        norm = self.next(conv)
        if self.kind_of(conv) not in CONVOLUTIONS or self.kind_of(norm) not in NORMS:
            return 0
        acts = self.activations(norm)
        nodes = [conv, norm, *acts]
        gate, inside = self.gate_behind(nodes[-1])
        nodes += inside
        project = self.next(nodes[-1])
        layer = None if project is None else self.module(project)
        if layer is not None and is_projection(layer, self.kind):
            nodes.append(project)
        else:
            project = None
        if self.is_changed_within(nodes):
            return 0
        self.watch(inside)

        def call() -> fx.Node:
            layers = [self.layer(node) for node in (conv, norm, *acts)]
            arguments = (conv.args[0], *layers[:2], tuple(layers[2:]), self.gate_layer(gate))
            return self.graph.call_function(middle, (*arguments, None if project is None else self.layer(project)))

        return self.replace(nodes, call)

    def gate_behind(self, last: fx.Node) -> tuple[fx.Node | tuple[fx.Node, ...] | None, list[fx.Node]]:
        """The gate that takes ``last``, and nobody else does: a layer, or the nodes of one; and all its nodes."""
        if self.kind_of(self.next(last)) in GATES:
            return self.next(last), [self.next(last)]
        multiply = next((user for user in last.users if self._factors(user, last) is not None), None)
        inside = None if multiply is None else self.inside_gate(multiply, last)
        return inside if inside is not None and set(last.users) <= {*inside[1], multiply} else (None, [])

    def watch(self, nodes: list[fx.Node]) -> None:
        """Of the layers of a gate nothing may change but the activations: the op knows the others by their shapes."""
        layers = (node for node in nodes if node.op == "call_module")
        self.inlined.update(node.target for node in layers if self.only_shapes(node) or self.activation(node) is None)

    def gate_layer(self, gate: fx.Node | tuple[fx.Node, ...] | None) -> fx.Node | None:
        return self.gate_object(gate) if isinstance(gate, tuple) else None if gate is None else self.layer(gate)

    def gate(self, multiply: fx.Node) -> int:
        """Squeeze-and-excitation by itself."""
        for x in multiply.all_input_nodes:
            inside = self.inside_gate(multiply, x) if self._factors(multiply, x) is not None else None
            if inside is not None and not self.is_changed_within(inside[1]) and self._is_owned(multiply, x, inside[1]):
                self.watch(inside[1])
                return self.replace(inside[1], functools.partial(self.gated, x, inside[0]))
        return 0

    def _is_owned(self, multiply: fx.Node, x: fx.Node, nodes: list[fx.Node]) -> bool:
        """Whether nobody notices that ``multiply`` no longer writes to ``x``, or to the gate, if it does."""
        return not self._written(multiply) or (self._makes(x) and set(x.users) <= set(nodes))

    def gated(self, x: fx.Node, parts: tuple[fx.Node, ...]) -> fx.Node:
        return self.graph.call_function(gated, (x, self.gate_object(parts)))

    def gate_object(self, parts: tuple[fx.Node, ...]) -> fx.Node:
        return self.graph.call_function(Gate, tuple(self.layer(part) for part in parts))

    def _factors(self, node: fx.Node, x: fx.Node) -> fx.Node | None:
        """The other factor where ``node`` multiplies ``x`` by something."""
        if node.target not in (*_PRODUCTS, operator.imul, "mul_") or len(node.args) != 2 or node.kwargs:
            return None
        a, b = node.args
        return b if a is x else a if b is x else None

    def inside_gate(self, multiply: fx.Node, x: fx.Node) -> tuple[tuple[fx.Node, ...], list[fx.Node]] | None:
        """The nodes (layer, activation, layer, activation) of a gate, and all nodes up to ``multiply``."""
        factor = self._factors(multiply, x)
        if not isinstance(factor, fx.Node):
            return None
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        nodes, todo = set(), [factor]
        while todo:
            node = todo.pop()
            if node is x or node in nodes:
                continue
            if order[node] < order[x] or node.op in ("placeholder", "get_attr"):
                return None
            nodes.add(node)
            todo += node.all_input_nodes
        ordered = sorted(nodes, key=order.__getitem__)
        if any(not set(node.users) <= {*nodes, multiply} for node in ordered):
            return None
        work = [node for node in ordered if not self.only_shapes(node)]
        if len(work) != 5 or not self._is_mean(work[0]):
            return None
        _, fc1, act, fc2, gate = work
        layers = self.module(fc1), self.module(fc2)
        if None in layers or _pointwise(layers, self.kind) < 2:
            return None
        if self.activation(act) is None or self.activation(gate) is None or not self._shapes_fit(ordered, x, *layers):
            return None
        return (fc1, act, fc2, gate), [*ordered, multiply]

    def only_shapes(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return type(self.module(node)) in (nn.Flatten, nn.Identity, nn.Unflatten)
        return node.op in ("call_function", "call_method") and node.target in _SHAPES

    def _is_mean(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return self.module(node) is not None and gates.is_mean(self.module(node))
        if node.target is F.adaptive_avg_pool2d:
            size = {**dict(zip(("input", "output_size"), node.args)), **node.kwargs}.get("output_size")
            return size in (1, (1, 1), [1, 1])
        if node.target not in (torch.mean, "mean"):
            return False
        options = {**dict(zip(("input", "dim", "keepdim"), node.args)), **node.kwargs}
        dims = options.get("dim")
        plain = isinstance(dims, (tuple, list)) and all(isinstance(d, int) for d in dims)
        return plain and options.keys() <= {"input", "dim", "keepdim"} and {d % 4 for d in dims} == {2, 3}

    def _shapes_fit(self, nodes: list[fx.Node], x: fx.Node, fc1: nn.Module, fc2: nn.Module) -> bool:
        """Whether the gate of three images has one factor per image and channel: what only changes shapes keeps the
        order of the numbers, so that the shape tells all."""
        weight, c = fc1.weight, fc1.weight.shape[1]
        n = 3 if c != 3 else 5
        if fc2.weight.shape[0] != c:
            return False
        try:
            with torch.no_grad():
                values = {x: torch.empty(n, c, 4, 5, dtype=weight.dtype, device="meta")}
                for node in nodes:
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                    if node.op == "call_module":
                        layer = self.block.get_submodule(node.target)
                        values[node] = _without_data(layer, *args) if layer in (fc1, fc2) else layer(*args, **kwargs)
                    elif node.op == "call_method":
                        values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
                    else:
                        values[node] = node.target(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError):  # a shape that does not go with this one
            return False
        return tuple(values[nodes[-1]].shape) in ((n, c, 1, 1), (n, c, 4, 5))


def _arguments(node: fx.Node) -> dict:
    """The options of a call by their names, where a function of Python says them."""
    if not isinstance(node.target, types.FunctionType):
        return node.kwargs
    names = inspect.unwrap(node.target).__code__.co_varnames
    return {**dict(zip(names, node.args)), **node.kwargs}


def _without_data(layer: nn.Module, x: Tensor) -> Tensor:
    """What a 1x1 convolution or Linear makes of a tensor without data, which no backend but torch's takes."""
    weight, bias = (None if p is None else p.to("meta") for p in (layer.weight, layer.bias))
    return F.conv2d(x, weight, bias, layer.stride) if isinstance(layer, nn.Conv2d) else F.linear(x, weight, bias)

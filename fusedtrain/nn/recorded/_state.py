"""What decides what a forward does, and so is looked at in each call: attributes, global values, containers."""

import dis
import functools
import inspect
import types
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fusedtrain.nn._activation import observed
from fusedtrain.nn._kind import kind_of
from fusedtrain.nn.depthwise_bn_act_se import Conv2dNormActivation, Sequential
from fusedtrain.nn.recorded._block import own_class
from fusedtrain.nn.recorded._origin import KNOWN, is_ours, is_own, package

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, types.MethodType)
_PLAIN = (*_PLAIN, torch.dtype, torch.device, torch.memory_format, torch.layout)
# What torch, and fuse(), keep in modules: of the hooks alone observed() knows.
OTHERS = {*vars(nn.Module()), "_recording", "_stock_class", "_is_fsdp_managed_module", "_fsdp_use_orig_params"}
OTHERS |= {"_is_replica", "_former_parameters", "_is_torch_compile"}
MANY = 64  # items of a container


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
    if isinstance(value, (dict, tuple, list, set, frozenset)) and len(value) > MANY:
        return _Object(value if is_default else object())
    if depth and isinstance(value, dict):
        return type(value), [(key, _content(item, depth - 1, is_default)) for key, item in value.items()]
    if depth and isinstance(value, (tuple, list, set, frozenset)):
        return type(value), [_content(item, depth - 1, is_default) for item in value]
    return _Object(object() if type(value).__name__ == "ndarray" else value)


class Seen(NamedTuple):
    """A module that was inlined, or read from: where its parent holds it, its class, and what of it decides what its
    forward does."""

    parent: str  # its path
    name: str
    kind: type
    look: Callable[[nn.Module, bool], tuple]
    state: tuple  # what ``look`` returns

    @classmethod
    def of(cls, path: str, module: nn.Module) -> "Seen":
        parent, _, name = path.rpartition(".")
        kind = own_class(module)
        # What has replaced the block's own forward called that of its class.
        ignored = OTHERS if path else OTHERS | {"forward"}
        look = _sequence(module, kind) if is_sequence(module) else state_of(module, kind, ignored)
        return cls(parent, name, kind, look, look(module, False))


class Recording(NamedTuple):
    """A block's forward with fused calls.

    Args:
        forwards: in evaluation and in training.
        seen: what it holds for, by the paths of the modules that were inlined or read from, parents first.
        saved: how many calls fewer than layers.
        of_images: whether it holds for tensors alone, or for others alone; None for whatever it is called with.
        aliases: the paths of modules that stand in several places, all of which a forward calls by the first.
        leaves_small: whether the block holds nothing that gains with small images in training.
    """

    forwards: tuple[Callable, Callable]
    seen: dict[str, Seen]
    saved: int
    of_images: bool | None
    aliases: list[list[list[str]]]
    leaves_small: bool

    def holds_for(self, block: nn.Module, argument) -> bool:
        suits = argument is not None if self.of_images is None else isinstance(argument, Tensor) == self.of_images
        if not suits:
            return False
        modules, traced = {"": block}, torch.compiler.is_dynamo_compiling()
        for path, (parent, name, kind, look, state) in self.seen.items():
            if path:
                module = modules[path] = modules[parent]._modules[name]
                same = type(module) is kind or own_class(module) is kind
                if not same or module.training != block.training or observed(module):
                    return False
            if look(modules[path], traced) != state:
                return False
        for first, *others in self.aliases:
            module = _at(block, first)
            for path in others:
                if _at(block, path) is not module:
                    return False
        return True


def _at(block: nn.Module, path: list[str]) -> nn.Module | None:
    for name in path:
        block = None if block is None else block._modules.get(name)
    return block


def aliases(block: nn.Module) -> list[list[list[str]]]:
    """The paths, in parts, of the modules in ``block`` that several others hold, or one under several names."""
    modules, places = dict(block.named_modules(remove_duplicate=False)), {}
    for path, module in modules.items():
        parent, _, name = path.rpartition(".")
        places.setdefault(module, {}).setdefault((modules[parent], name), path.split("."))
    return [list(paths.values()) for paths in places.values() if len(paths) > 1]


# What these two return is traced by torch.compile, which so guards what is read.


def _sequence(module: nn.Module, kind: type) -> Callable[[nn.Module, bool], tuple]:
    """Looks at what decides what the forward of a sequence does: that of its class, and the children that are not
    None."""
    return lambda module, traced: (kind.forward, [k for k, v in module._modules.items() if v is not None])


def state_of(
    module: nn.Module, kind: type, ignored: Collection[str] = frozenset(OTHERS)
) -> Callable[[nn.Module, bool], tuple]:
    """Looks at what decides what another forward does: the same, what of children, parameters and buffers is None, and
    attributes, but for those ``ignored`` and tensors, which recorded forwards do not use."""
    others, asks = constants_of(kind)
    known = vars(module).keys() - ignored  # torch.compile of torch 2.11 cannot ask for the names

    def look(module: nn.Module, traced: bool) -> tuple:
        missing = [k for k, v in (module._parameters | module._buffers | module._modules).items() if v is None]
        own = module.__dict__
        names = known if traced else own.keys() - ignored
        attributes = {k: _content(own[k]) for k in names if k in own and not isinstance(own[k], Tensor)}
        constants = others and [_content(getattr(module, k, None) if d is None else d.get(k)) for d, k in others]
        classes = list(map(own_class, module.children())) if asks else ()
        return _content(kind.forward), list(module._modules), missing, attributes, constants, classes

    return look


_GLOBALS = (bool, int, float, str, types.FunctionType)
_NOT_COMPARED = (types.ModuleType, types.BuiltinFunctionType, type)


@functools.cache
def constants_of(kind: type) -> tuple[list[tuple[Mapping | None, str]], bool]:
    """Where else methods find values by their names, which are attributes and methods of the class and global values
    and functions; and whether they ask for the classes of layers. None: in the module, whose own attribute would hide
    that of the class."""
    classes = [vars(cls) for cls in kind.__mro__ if not is_ours(cls.__module__)]
    members = [value for held in classes for name, value in held.items() if name != "__init__"]
    codes = [getattr(inspect.unwrap(getattr(m, "fget", m)), "__code__", None) for m in members]
    read = {name for code in codes if code is not None for name in code.co_names}
    found = [(held, name) for held in classes for name in read & held.keys()]
    found = [(held if hasattr(held[name], "__get__") else None, name) for held, name in found]
    names = getattr(kind.forward, "__globals__", {})
    found += [(names, name) for name in read if isinstance(names.get(name), _GLOBALS)]
    known = {(id(held), name) for held, name in found}
    others = [(owner if isinstance(owner, dict) else vars(owner), name) for owner, name in global_values(kind)]
    others = [(held, name) for held, name in others if (id(held), name) not in known]
    found += [(held, name) for held, name in others if not isinstance(held[name], _NOT_COMPARED)]
    return found, not read.isdisjoint(("isinstance", "type"))


class StandIn:
    """What stands in the place of a builtin in the scope of a forward while that is recorded, for all threads."""


@functools.cache
def global_values(kind: type) -> list[tuple[object, str]]:
    """The global values that a forward reads or writes, and the methods and functions that it calls, and what these
    hold where they are classes, objects or Python modules: their owners and names."""
    if package(kind.__module__) in KNOWN:
        return []
    classes = [vars(cls) for cls in kind.__mro__ if not is_ours(cls.__module__)]
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
            if isinstance(value, StandIn):
                continue
            found[id(function.__globals__), name] = function.__globals__, name
            inside = {inner: vars(value)[inner] for inner in read & vars(value).keys()} if _is_read(value, kind) else {}
            found.update({(id(value), inner): (value, inner) for inner in inside})
            functions = [f for f in (value, *inside.values()) if isinstance(f, types.FunctionType)]
            todo += [f for f in functions if is_own(f.__module__, kind)]


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
        return is_own(value.__module__ if isinstance(value, type) else value.__name__, kind)
    other = isinstance(value, (types.FunctionType, nn.Module, Tensor))
    return not other and isinstance(getattr(value, "__dict__", None), dict)


def is_sequence(module: nn.Module) -> bool:
    """Whether all that ``module`` does is to call its children one after another."""
    return type(module).forward is nn.Sequential.forward or kind_of(module) in (Sequential, Conv2dNormActivation)

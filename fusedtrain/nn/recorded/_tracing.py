"""Records a forward by torch.fx, or says why that cannot be: what it asks, reads, changes and draws is watched."""

import builtins
import collections
import contextlib
import functools
import inspect
import io
import itertools
import logging
import math
import operator
import pickle
import random
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import BackwardCFunction

from fusedtrain.nn._activation import observed, op_name
from fusedtrain.nn.recorded._origin import KNOWN, is_of_a_zoo, is_ours, is_unknown, package
from fusedtrain.nn.recorded._state import OTHERS, StandIn, constants_of, global_values, is_sequence, state_of

Kind = Callable[[nn.Module], type]  # the class that a layer has, or will have

IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul")
IN_PLACE += ("iand", "ior", "ixor", "ilshift", "irshift")


def is_inlined(module: nn.Module, kind: Kind) -> bool:
    """Whether a recording goes on into ``module``: a sequence, or of a class that nobody knows."""
    known = not is_unknown(module) or kind(module) is not type(module) or op_name(module) is not None
    return is_sequence(module) or not known


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
        if package(sys._getframe(1).f_globals.get("__name__", "")) in KNOWN:
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


for _name in IN_PLACE:
    setattr(_Proxy, f"__{_name}__", _in_place(_name))


_TYPES = "it asks for the types of what it takes or makes"
_NUMBER = "it asks for the number in a tensor"
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


class _OfThread(threading.local):
    tracer: "Tracer | None" = None  # that records a forward in this thread
    hooked = False  # whether this thread is within hooked()


_OF_THREAD = _OfThread()


class Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # their values may change

    def __init__(self, block: nn.Module, kind: Kind):
        super().__init__(autowrap_modules=())  # hooked() looks after math
        self.kind = kind
        self.inlined: list[str] = [""]
        self.block_by_block = is_of_a_zoo(type(block))
        self.modes = _modes()
        self.parameters: dict[str, fx.Proxy] = {}
        self.read: set[nn.Module] = set()
        self.of_images: bool | None = None
        self.asked: list[_Asked] = []
        self.reason: str | None = None

    def trace(self, root: nn.Module, concrete_args: dict | None = None) -> fx.Graph:
        outer, _OF_THREAD.tracer = _OF_THREAD.tracer, self
        try:
            return super().trace(root, concrete_args)
        finally:
            _OF_THREAD.tracer = outer

    def refuse(self, reason: str) -> NoReturn:
        """Raises, also once the forward is over if it catches that."""
        self.reason = reason
        raise TypeError(reason)

    def note_question(self, node: fx.Node, frame: types.FrameType) -> None:
        """Keeps for which arguments the answer is right that the code of ``frame`` gets: none is a tensor."""
        frame = frame.f_back if frame.f_code is torch.is_tensor.__code__ else frame
        names = {*frame.f_code.co_names, *frame.f_code.co_freevars}
        if is_ours(frame.f_globals.get("__name__", "")):
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
        if not is_inlined(m, self.kind) or observed(m) or (self.block_by_block and is_unknown(m)):
            return True
        self.inlined.append(module_qualified_name)
        return False

    def create_arg(self, a):
        """Numbers of numpy are Python's: torch.fx would write ``np.float64(0.5)`` into the recording."""
        numpy = sys.modules.get("numpy")
        return super().create_arg(a.item() if numpy is not None and isinstance(a, numpy.generic) else a)

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
        if _OF_THREAD.tracer is not self:
            return forward(*args, **kwargs)
        if is_sequence(m):
            forward = functools.partial(nn.Sequential.forward, m)
        return super().call_module(m, forward, args, kwargs)

    def will_be_fused(self, m: nn.Module) -> bool:
        """Whether a layer is still a stock one, whose ``forward``, called by name, would be looked into."""
        return self.kind(m) is not type(m) and not is_inlined(m, self.kind)

    def call_layer(self, m: nn.Module, *args, **kwargs) -> fx.Proxy:
        return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)

    def getattr(self, attr: str, attr_val, parameter_proxy_cache: dict):
        if _OF_THREAD.tracer is not self:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_args_for_root(self, root_fn, is_module, concrete_args=None):
        """Of all its arguments the images alone; the others have their defaults."""
        if is_sequence(self.root):
            root_fn = nn.Sequential.forward
        name = next(iter(inspect.signature(self.root.forward).parameters))
        images = self.create_proxy("placeholder", name, (), {})
        return lambda block, x: root_fn(block, x), [self.root, images]


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


def held_by(modules: list[nn.Module], depth: int = 6) -> list:
    """All objects that attributes and global values hold, and that these hold, but for modules, tensors and
    constants."""
    found: dict[int, object] = {}
    values = [value for module in modules for name, value in vars(module).items() if name not in OTHERS]
    kinds = {type(module) for module in modules}
    values += [held.get(name) for kind in kinds for held, name in constants_of(kind)[0] if held is not None]
    values += [getattr(kind, name, None) for kind in kinds for held, name in constants_of(kind)[0] if held is None]
    for _ in range(depth):
        values = [value for value in values if not isinstance(value, _CONSTANT) and id(value) not in found]
        found.update((id(value), value) for value in values)
        values = [inner for value in values for inner in _inside(value)]
    return list(found.values())


def _get(generator) -> tuple | list | bytes | None:
    """The state of a generator of random numbers; None for all else."""
    numpy = sys.modules.get("numpy")
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()  # which no mode of torch sees
    if numpy is not None and isinstance(generator, numpy.random.RandomState):
        return pickle.dumps(generator.get_state())  # printed it takes milliseconds
    if numpy is not None and isinstance(generator, numpy.random.BitGenerator):
        return pickle.dumps(generator.state)
    return None


def _set(generator, state: tuple | list | bytes) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(state, dtype=torch.uint8, device="cpu"))  # a device may be in force
    elif hasattr(generator, "set_state"):
        generator.set_state(pickle.loads(state))
    else:
        generator.state = pickle.loads(state)


def _named(owner, name: str):
    return (owner if isinstance(owner, dict) else vars(owner)).get(name)


@contextlib.contextmanager
def _untouched(modules: list[nn.Module]):
    """Puts attributes, what they and global values hold, and random numbers back; yields a list that says afterwards
    what had changed."""
    changes = []
    before, seen = [dict(vars(m)) for m in modules], [(type(m), state_of(m, type(m))(m, False)) for m in modules]
    reached, own = held_by(modules), {id(value): value for m in before for value in m.values()}
    holders = {**own, **{id(value): value for value in reached}}.values()
    held = [(v, dict(v) if isinstance(v, dict) else list(v)) for v in holders if isinstance(v, _HOLDERS)]
    named = {(id(owner), name): (owner, name) for kind, _ in seen for owner, name in global_values(kind)}.values()
    named = [(owner, name, _named(owner, name)) for owner, name in named]
    generators = [random.getstate.__self__, torch.default_generator, *reached]
    if "numpy" in sys.modules:
        generators.append(sys.modules["numpy"].random.get_state.__self__)
    states = [(generator, state) for generator in generators if (state := _get(generator)) is not None]
    try:
        yield changes
        changed = any(vars(m).keys() != b.keys() for m, b in zip(modules, before))
        changed = changed or [(type(m), state_of(m, type(m))(m, False)) for m in modules] != seen
        written = [now for now, old in held if _ids(now) != _ids(old)]
        if any(id(now) not in own for now in written) or any(_named(o, n) is not value for o, n, value in named):
            changes.append("its forward changes objects or global values")
        if changed or written:
            changes.append("its forward changes its attributes, or holds tensors that are no buffers")
    finally:
        drawn = [(generator, state) for generator, state in states if _get(generator) != state]
        if drawn:
            changes.append("its forward draws random numbers outside of layers")
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
        for generator, state in drawn:
            _set(generator, state)


_LOOKS = ("parameters", "named_parameters", "buffers", "named_buffers", "state_dict")
_ASKS = ("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_autocast_cpu_enabled")
_ASKS += ("get_autocast_dtype", "get_autocast_cpu_dtype", "get_autocast_gpu_dtype")
_GROUP = ("is_initialized", "get_rank", "get_world_size") if torch.distributed.is_available() else ()
_CLOSED = [(nn.Module, name, "it looks through its parameters or buffers") for name in _LOOKS]
_CLOSED += [(torch.distributed, name, "it asks for its process group") for name in _GROUP]
_CLOSED += [(torch, name, "it asks whether gradients or autocast are on") for name in _ASKS]
_CLOSED += [(builtins, "print", "it prints"), (builtins, "breakpoint", "it stops in a debugger")]
# The first one reads the clock, too.
_CLOSED += [(logging.Logger, name, "it writes to a log") for name in ("makeRecord", "handle")]
_CLOCKS = [name + unit for name in ("time", "perf_counter", "monotonic") for unit in ("", "_ns")]
_IMPORTED = [(warnings, "warn", "it warns"), *((time, name, "it reads the clock") for name in _CLOCKS)]
_CLOSED += _IMPORTED  # also by names of the forward's own
# Every call of a Function makes one, also of a bound ``apply``, which nothing in its place would be seen by.
_CLOSED += [(BackwardCFunction, "__init__", "it calls a torch.autograd.Function")]


def _closed(look: Callable, reason: str) -> Callable:
    """A forward that looks through its parameters raises: their dtypes and devices would be those of today for ever.
    So does one that asks for modes, one with a backward of its own, and one that tells what it does: it would once."""

    @functools.wraps(look)
    def asked(*args, **kwargs):
        # Whoever calls a Function: its frame makes the context.
        looked = look is object.__init__ or not is_ours(sys._getframe(1).f_globals.get("__name__", ""))
        if _OF_THREAD.tracer is not None and looked:
            _OF_THREAD.tracer.refuse(reason)
        return look(*args, **kwargs)

    return asked


_CALL, _GETATTR = nn.Module.__call__, nn.Module.__getattr__


@functools.wraps(_CALL)
def _call(module: nn.Module, *args, **kwargs):
    if _OF_THREAD.tracer is None:
        return _CALL(module, *args, **kwargs)
    return _OF_THREAD.tracer.call_module(module, functools.partial(_CALL, module), args, kwargs)


@functools.wraps(_GETATTR)
def _getattr(module: nn.Module, name: str):
    value, tracer = _GETATTR(module, name), _OF_THREAD.tracer
    return value if tracer is None else tracer.getattr(name, value, tracer.parameters)


# torch.fx leaves them where they are; else it would put its own into nn.Module, which do the same, for each recording.
_call.__fx_already_patched = _getattr.__fx_already_patched = True


class _Function(StandIn):
    """A function of math, recorded where it is called with what a recording holds."""

    def __init__(self, function: Callable):
        functools.update_wrapper(self, function)

    def __call__(self, *args, **kwargs):
        if _OF_THREAD.tracer is not None and _holds_proxies((args, kwargs)):
            return _OF_THREAD.tracer.create_proxy("call_function", self.__wrapped__, args, kwargs)
        return self.__wrapped__(*args, **kwargs)

    def __reduce__(self) -> str:
        return self.__name__  # other threads copy and pickle it as math's


def _holds_proxies(arguments: tuple) -> bool:
    found = []
    fx.node.map_aggregate(arguments, lambda value: found.append(issubclass(type(value), fx.Proxy)))
    return any(found)


_OF_MATH = {f: _Function(f) for f in vars(math).values() if isinstance(f, types.BuiltinFunctionType)}
_ONE_AT_A_TIME = threading.RLock()  # what is put in the place of methods of torch is seen by all threads


@contextlib.contextmanager
def hooked() -> Iterator[None]:
    """Puts what tells the tracer of a forward what that does in the place of methods and functions of torch and math,
    once for all blocks of a model: to change nn.Module takes a millisecond, in which Python goes through all classes
    derived from it."""
    if _OF_THREAD.hooked:
        yield
        return
    with _ONE_AT_A_TIME:
        hooks = [(nn.Module, "__call__", _call), (nn.Module, "__getattr__", _getattr)]
        hooks += [(owner, name, _closed(getattr(owner, name), reason)) for owner, name, reason in _CLOSED]
        hooks += [(math, function.__name__, hook) for function, hook in _OF_MATH.items()]
        before = [vars(owner).get(name) for owner, name, _ in hooks]
        try:
            _OF_THREAD.hooked = True
            for owner, name, hook in hooks:
                setattr(owner, name, hook)
            yield
        finally:
            for (owner, name, _), own in zip(hooks, before):
                delattr(owner, name) if own is None else setattr(owner, name, own)
            _OF_THREAD.hooked = False


def _read(module: nn.Module, name: str):
    if _OF_THREAD.tracer is not None and not is_ours(sys._getframe(1).f_globals.get("__name__", "")):
        _OF_THREAD.tracer.read.add(module)
        if name == "forward" and _OF_THREAD.tracer.will_be_fused(module):
            return functools.partial(_OF_THREAD.tracer.call_layer, module)
    return object.__getattribute__(module, name)


@contextlib.contextmanager
def _observed_reads(modules: list[nn.Module]) -> Iterator[None]:
    """Tells the tracer of a forward of which ``modules`` that reads attributes, such as ``self.norm.training``: in
    their classes, which takes less than in nn.Module, where the class has no such method of its own."""
    kinds, plain = {type(module) for module in modules}, object.__getattribute__
    kinds = {kind if kind.__getattribute__ is plain else nn.Module for kind in kinds}
    try:
        for kind in kinds:
            kind.__getattribute__ = _read
        yield
    finally:
        for kind in kinds:
            del kind.__getattribute__


class _Question(StandIn):
    """A builtin that raises when it is asked about what a recording holds, which other threads never have; to them it
    is the builtin. It is none of ``_GLOBALS``, so that they do not take it for a function of the module."""

    def __init__(self, builtin: Callable):
        self.builtin = builtin

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and issubclass(type(args[0]), fx.Proxy) and isinstance(args[0].tracer, Tracer):
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
def _hooked_scopes(block: nn.Module) -> Iterator[None]:
    """A forward that asks for ``type(x)`` or ``callable(x)``, which have no hook as isinstance() has, raises; functions
    that it has imported from math are recorded, and those from time and warnings raise."""
    own = _scopes(module for module in block.modules() if is_unknown(module))
    hooks = [(scope, name, hook) for scope in own for name, hook in _QUESTIONS.items() if name not in scope]
    known = _OF_MATH | {hook.__wrapped__: hook for hook in (getattr(owner, name) for owner, name, _ in _IMPORTED)}
    for scope in _scopes(module for module in block.modules() if module is block or is_unknown(module)):
        builtins = [(k, v) for k, v in scope.copy().items() if isinstance(v, types.BuiltinFunctionType)]
        hooks += [(scope, name, known[function]) for name, function in builtins if function in known]
    before = [scope.get(name) for scope, name, _ in hooks]
    try:
        for scope, name, hook in hooks:
            scope[name] = hook
        yield
    finally:
        for (scope, name, _), value in zip(hooks, before):
            if value is None:
                scope.pop(name, None)
            else:
                scope[name] = value


def _scopes(modules: Iterable[nn.Module]) -> list[dict]:
    """The global names of forwards."""
    scopes = [getattr(inspect.unwrap(type(module).forward), "__globals__", {}) for module in modules]
    return list({id(scope): scope for scope in scopes}.values())


def holders_of(path: str) -> Iterator[str]:
    """The paths of the modules in which the one at ``path`` stands, outermost first."""
    return itertools.accumulate(path.split(".")[:-1], "{}.{}".format)


@hooked()
def trace(block: nn.Module, kind: Kind) -> list[tuple[Tracer, fx.Graph]] | str:
    """Records the forward in evaluation and in training; or says why that cannot be."""
    modules, traced = list(block.modules()), []
    try:
        with _hooked_scopes(block), _observed_reads(modules):
            for training in (False, True):
                with _untouched(modules) as changes, _switched(autocast=training):
                    for module in modules:
                        module.training = training
                    tracer = Tracer(block, kind)
                    traced.append((tracer, tracer.trace(block)))
                    tracer.refuse_decisions()
                if changes:
                    return changes[0]
    except Exception as error:  # whatever a forward does with something that is no tensor
        return f"torch.fx cannot record its forward: {str(error).partition(chr(10))[0] or type(error).__name__}"
    inlined = traced[0][0].inlined
    read = set().union(*(tracer.read for tracer, _ in traced))
    inlined += [path for path, module in block.named_modules(remove_duplicate=False) if module in read]
    # A forward may walk through the layers of a sequence, too.
    called = (node.target for _, graph in traced for node in graph.nodes if node.op == "call_module")
    inlined += [holder for path in called for holder in holders_of(path)]
    return traced

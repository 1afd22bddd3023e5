"""Triton's interpreter for the tests: it computes with integers as compiled kernels do, and makes the types of blocks
and what follows from types once, not for every operation of every program, which takes half of its time."""

import dataclasses
import functools
import inspect
import types

import numpy
from triton import language
from triton.language import core, semantic
from triton.runtime import interpreter


def as_compiled() -> None:
    """Integers overflow without a check after each operation. Only where ``TRITON_INTERPRET=1``."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _replace_for_good(interpreter._patch_lang)
    interpreter._patch_attr = _replace_one
    interpreter._get_np_dtype = _by_scalar(interpreter._get_np_dtype)
    core._unwrap_if_constexpr = _unwrap(core._unwrap_if_constexpr)
    core.dtype.__eq__ = _same_or(core.dtype.__eq__)
    core.block_type.__init__ = _shared(core.block_type.__init__)
    core.block_type.to_ir = lambda self, builder: self
    core.tensor.__init__ = _tensor
    rules = semantic.TritonSemantic
    rules.computation_type_impl = functools.cache(rules.computation_type_impl)
    rules.broadcast_impl_value = _broadcast(rules.broadcast_impl_value)


def _replace_for_good(replace):
    """Replaces what kernels use of triton.language at their first launch and leaves it so until the process ends, in
    which nothing is compiled."""
    kept = types.SimpleNamespace(restore=lambda: None)

    @functools.cache
    def languages(function):
        function.__signature__ = inspect.signature(function)  # or each launch asks for it twice
        modules = (language, core)
        return [value for value in function.__globals__.values() if any(value is module for module in modules)]

    def replace_for_good(function):
        if any(core.is_builtin(module.load) for module in languages(function)):
            replace(function)
        return kept

    return replace_for_good


@functools.cache
def _interpreted(member):
    function = getattr(member, "__wrapped__", member)  # behind the check that there is a _semantic

    def call(*args, _semantic=None, **kwargs):
        return function(*args, **kwargs, _semantic=interpreter.interpreter_semantic)

    return call


def _replace_one(place, name, member, builder, scope):
    scope.set_attr(place, name, _interpreted(member))


def _by_scalar(np_dtype):
    known = {}

    def by_scalar(of):
        name = of.scalar.name
        if name not in known:
            known[name] = np_dtype(of)
        return known[name]

    return by_scalar


def _unwrap(unwrap):
    def unwrap_at_once(value):
        if isinstance(value, core.constexpr):
            return value.value
        return unwrap(value) if isinstance(value, (list, tuple, core.tuple)) else value

    return unwrap_at_once


def _same_or(equal):
    return lambda self, other: self is other or equal(self, other)


def _shared(init):
    """Blocks of one type share their attributes, those that _tensor adds too."""
    known = {}

    def shared(self, element, shape):
        key = element.name, *map(core._unwrap_if_constexpr, core._unwrap_if_constexpr(shape))
        if key not in known:
            init(self, element, shape)
            known[key] = self.__dict__
        self.__dict__ = known[key]

    return shared


def _tensor(self, handle, type):
    try:
        self.shape, self.numel = type._of_tensor
    except AttributeError:
        sizes = type.shape if type.is_block() else ()
        self.shape = core.tuple([core.constexpr(size) for size in sizes])
        self.numel = core.constexpr(functools.reduce(int.__mul__, sizes, 1))
        type._of_tensor = self.shape, self.numel
    self.handle, self.type, self.dtype = handle, type, type.scalar


def _broadcast(broadcast):
    @functools.cache
    def joint(sizes, other):
        return list(numpy.broadcast_shapes(sizes, other))

    def resized(self, x, sizes):
        if x.type.shape.values == sizes:
            return x
        return self.make_tensor(self.builder.create_broadcast(x.handle, sizes), core.block_type(x.dtype, sizes))

    def broadcast_at_once(self, a, b):
        if not (a.type.is_block() and b.type.is_block() and len(a.shape) == len(b.shape)):
            return broadcast(self, a, b)
        if a.type.shape.values == b.type.shape.values:
            return a, b
        sizes = joint(tuple(a.type.shape.values), tuple(b.type.shape.values))
        return resized(self, a, sizes), resized(self, b, sizes)

    return broadcast_at_once

"""Which implementation of an op runs, and why.

Each op holds a table ``{name: Impl}``. Automatic choice takes the first backend, in the order cuda, cpu, triton,
reference, that can take the arguments, or the reference where stock PyTorch is known to be faster on them, unless
``fusedtrain tune backend`` has measured another one to be faster on this machine (:mod:`fusedtrain._tuned`). Under the
transforms of torch.func, whose derivatives PyTorch's operators alone have, and where FLOPs are counted, it takes the
reference. A forced backend runs or raises; nothing falls back silently.
"""

import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils import _python_dispatch

from fusedtrain import _tuned

BACKENDS = ("cuda", "cpu", "triton", "reference")


@dataclass(frozen=True, slots=True)
class Impl:
    """One backend of one op.

    Args:
        forward: the operator, or for the reference the differentiable function itself.
        backward: the backward operator; None where ``forward`` is differentiable by itself.
        why_not: takes the op's arguments, returns why the backend cannot run them, or None.
        slower: takes the op's arguments, returns the measurement by which stock PyTorch is faster on them, or None.
    """

    forward: Callable
    backward: Callable | None
    why_not: Callable[..., str | None]
    slower: Callable[..., str | None] | None = None


_OPS: dict[str, dict[str, Impl]] = {}
_ASKED: dict[str, Callable[..., tuple]] = {}
_tuned.load()


def register(op: str, impls: dict[str, Impl], asked: Callable[..., tuple] | None = None) -> dict[str, Impl]:
    """Makes an op's table known to :func:`explain` and returns it.

    Args:
        op: its name.
        impls: the table.
        asked: takes the arguments of the op by name, returns those of its rules; None: they are the same.
    """
    _OPS[op] = impls
    if asked is not None:
        _ASKED[op] = asked
    return impls


def _needs_torchs() -> str | None:
    """Why operators of PyTorch must run, whatever is faster, or None."""
    if torch._C._are_functorch_transforms_active():
        return "which alone has the derivatives of torch.func"
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack():
        modes = _python_dispatch._get_current_dispatch_mode_stack()
        # PyTorch's and ptflops': to import them for their classes would import Triton.
        if any(type(mode).__name__.endswith("FlopCounterMode") for mode in modes):
            return "whose operators alone FlopCounterMode knows"
    return None


def _checked(name: str | None, source: str) -> str | None:
    if name is not None and name not in BACKENDS:
        raise ValueError(f"{source} must be one of {', '.join(BACKENDS)}, got {name!r}")
    return name


# An unknown name in the environment must not make the import fail: select() raises it at the first call instead.
_forced: str | None = os.environ.get("FUSEDTRAIN_BACKEND") or None
_source = "FUSEDTRAIN_BACKEND"


class use_backend:
    """Forces one backend for every op, process-wide, from now on or for the length of a ``with`` block.

    Args:
        name: "cuda", "cpu", "triton" or "reference"; None returns to the automatic choice.

    Raises:
        ValueError: the name is unknown. A forced backend that cannot take an op's arguments raises RuntimeError there.

    The backward pass of an op runs on the backend that ran its forward pass. The environment variable
    ``FUSEDTRAIN_BACKEND`` sets the same at start-up.
    """

    def __init__(self, name: str | None):
        global _forced, _source
        _checked(name, "use_backend()")
        self._previous = (_forced, _source)
        _forced, _source = name, "use_backend()"

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        global _forced, _source
        _forced, _source = self._previous


def current_backend() -> str | None:
    """Returns the forced backend's name, or None when the choice is automatic."""
    return _forced


def is_automatic() -> bool:
    """Whether rules alone choose: no backend is forced, and no table of ``fusedtrain tune backend`` counts."""
    return _forced is None and not _tuned.active


def select(op: str, impls: dict[str, Impl], *args) -> Impl:
    """Returns the implementation that runs ``op`` on these arguments; RuntimeError when a forced one cannot."""
    if _forced is None:
        if _needs_torchs() is not None:
            return impls["reference"]
        measured = _tuned.choice(op, impls, args) if _tuned.active else None
        if measured is not None:
            return impls[measured[0]]
        on_cpu = args[0].is_cpu if isinstance(args[0], torch.Tensor) else False
        for name, impl in impls.items():
            if on_cpu and name == "cuda":
                continue  # whose answer is known: calls cost what small images wait for
            if impl.why_not(*args) is None:
                if impl.slower is not None and impl.slower(*args) is not None:
                    name = "reference"  # which is stock PyTorch
                if _tuned.active:
                    _tuned.note(op, args, name)
                return impls[name]
        raise RuntimeError(f"no backend can run {op}:\n{_table(op, impls, args, None)}")
    impl = impls[_checked(_forced, _source)]
    reason = impl.why_not(*args)
    if reason is not None:
        raise RuntimeError(f"backend {_forced!r} is forced by {_source} but cannot run {op}: {reason}")
    return impl


def runs_whole(impl: Impl, *args) -> bool:
    """Whether a backend that leaves directions to stock PyTorch where that is faster has to run all of them: it is
    forced, or ``fusedtrain tune backend`` has measured it so against its own rule."""
    return _forced is not None or (_tuned.active and impl.slower is not None and impl.slower(*args) is not None)


def _verdict(impl: Impl, args: tuple) -> str | None:
    return impl.why_not(*args) or (impl.slower(*args) if impl.slower is not None else None)


def _table(op: str, impls: dict[str, Impl], args: tuple, chosen: str | None) -> str:
    verdicts = {name: _verdict(impl, args) for name, impl in impls.items()}
    automatic = _forced is None
    needed = _needs_torchs() if automatic else None
    measured = _tuned.choice(op, impls, args) if _tuned.active and automatic and needed is None else None
    lines = [f"{op}: {chosen} runs" + ("" if automatic else f", forced by {_source}")]
    if needed is not None:
        lines = [f"{op}: {chosen} runs, {needed}"]
    if not automatic and impls[_forced].why_not(*args) is not None:
        lines = [f"{op}: {_forced} is forced by {_source} but cannot run"]
    if measured is not None:
        lines = [f"{op}: {measured[0]} runs, by the table of fusedtrain tune backend: {measured[1]}"]
    lines += [f"  {name:<10} {reason or 'can run'}" for name, reason in verdicts.items()]
    return "\n".join(lines)


def _asked(name: str, args: tuple, kwargs: dict) -> tuple:
    """What the rules of an op are asked with, where a user calls it with these arguments."""
    if name not in _ASKED:
        if kwargs:
            raise TypeError(f"explain({name!r}, ...) takes no argument by name, got {', '.join(kwargs)}")
        return args
    function = getattr(importlib.import_module("fusedtrain.ops"), name.removesuffix("_backward"))
    try:
        call = inspect.signature(function).bind_partial(*args, **kwargs)
        call.apply_defaults()
        inspect.signature(_ASKED[name]).bind(**call.arguments)
    except TypeError as error:
        raise TypeError(f"explain({name!r}, ...): {error}") from None
    return _ASKED[name](**call.arguments)


def explain(op, *args, **kwargs) -> str:
    """Prints, and returns, which backend runs an op on these arguments and why the others do not.

    Args:
        op: an op's name or its function, e.g. ``"squeeze_excite"`` or ``fusedtrain.ops.squeeze_excite``;
            "depthwise_conv2d_backward", whose backend is chosen for itself, takes the arguments of the forward pass.
        args: the op's leading arguments as it takes them; the first, ``x``, decides most.
        kwargs: further ones by their names.

    Raises:
        ValueError: no op of that name, an argument that the op refuses, or FUSEDTRAIN_BACKEND names no backend.
        TypeError: the op has no argument of that name, or cannot be explained without one that is missing.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in _OPS:
        raise ValueError(f"explain() knows the ops {', '.join(sorted(_OPS))}; got {name!r}")
    if not args and "x" not in kwargs:
        raise ValueError(f"explain({name!r}, ...) needs the op's arguments, x first")
    args, impls = _asked(name, args, kwargs), _OPS[name]
    chosen = _checked(_forced, _source)
    if chosen is None:
        impl = select(name, impls, *args)
        chosen = next(backend for backend in impls if impls[backend] is impl)
    text = _table(name, impls, args, chosen)
    print(text)
    return text

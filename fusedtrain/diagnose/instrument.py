"""Watches a training run from outside: times its parts, notes where its objects are made, counts waits for the device.

Nothing in the run has to change. While an :class:`Instrument` is installed, methods of torch that a training loop calls
are wrapped; the wrappers cost about a microsecond per call and are taken off again on exit.
"""

import functools
import os
import sys
import threading
import time
import weakref
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader

from fusedtrain._waits import TeamWaits

PARTS = ("loader", "copy", "forward", "backward", "optimizer", "zero_grad", "sync", "rest")
# Reading one of these from a tensor on a device waits until the device has computed it.
READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__", "__repr__")
_OWN = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    os.path.dirname(torch.__file__),
    "<frozen",
    os.path.dirname(os.__file__),
)
_clock = time.perf_counter
_ACTIVE: weakref.WeakSet["Instrument"] = weakref.WeakSet()


def _leave_all() -> None:
    for instrument in _ACTIVE:
        instrument.leave()


os.register_at_fork(after_in_child=_leave_all)  # the workers of a loader record nothing


@dataclass(slots=True)
class Step:
    """One pass through the body of the training loop, from asking for a batch to asking for the next one."""

    start: float
    end: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)  # seconds by name of PARTS
    faults: int = 0
    optimizer_faults: int = 0  # of them, while the optimizer stepped
    cpu: float = 0.0  # seconds of CPU time of this process, all threads
    restart: bool = False  # the loader began a new epoch in this step
    waits: dict[str, tuple[float, float]] = field(default_factory=dict)  # by part: of this thread, of its team
    all_waits: tuple[float, float] = (0.0, 0.0)
    waited: float = 0.0  # seconds that other processes had the core, where that can be told

    @property
    def seconds(self) -> float:
        """Without what other processes took."""
        return self.wall - self.waited

    @property
    def wall(self) -> float:
        return self.end - self.start

    def complete(self) -> None:
        """Books what is left to the part "rest"."""
        apart = bool(self.waits)
        self.parts["rest"] = self.wall - sum(self.parts.values())
        if apart:
            self.waits["rest"] = tuple(max(0.0, w - sum(ws)) for w, *ws in zip(self.all_waits, *self.waits.values()))
        else:  # they fall to the parts by their length
            self.waits = {part: tuple(w * s / self.wall for w in self.all_waits) for part, s in self.parts.items()}


@dataclass(frozen=True)
class Site:
    """A place in the user's code."""

    file: str
    line: int


def user_frame(frame) -> Site | None:
    """Returns the place of the innermost frame of a call stack that is neither torch's, Python's nor ours."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OWN) and "site-packages" not in name:
            return Site(name, frame.f_lineno or frame.f_code.co_firstlineno)  # some instructions belong to no line
        frame = frame.f_back
    return None


def call_site() -> Site | None:
    """Returns the place in the user's code that is being carried out."""
    return user_frame(sys._getframe(1))


def _flag(args: tuple) -> int | None:
    """Returns where the first flag among the positional arguments of ``to()`` or ``cuda()`` is: non_blocking."""
    return next((i for i, arg in enumerate(args) if type(arg) is bool), None)


def non_blocking(args: tuple, kwargs: dict) -> bool:
    """Returns whether ``to()`` or ``cuda()`` with these arguments does not wait for the copy."""
    at = _flag(args)
    return kwargs.get("non_blocking", False) if at is None else args[at]


def with_non_blocking(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Returns the arguments of ``to()`` or ``cuda()`` with that flag set."""
    at = _flag(args)
    return (args, kwargs | {"non_blocking": True}) if at is None else ((*args[:at], True, *args[at + 1 :]), kwargs)


class Instrument:
    """Context manager that holds the wrappers.

    Attributes:
        step: receives the times of the parts; None: nothing is recorded.
        timeline: a list that receives (part, start, end), or None.
        roots: the outermost modules that were called with gradients, in the order of their first call.
        optimizers: those that took a step.
        sites: where the user made or called what: objects by id, and "zero_grad", "set_num_threads", "autocast".
        reads: where numbers were read from tensors on a device, with their counts.
    """

    def __init__(self):
        self.step: Step | None = None
        self.timeline: list[tuple[str, float, float]] | None = None
        self.part: str | None = None  # the part that is running now
        self.roots: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.sites: dict[object, Site | None] = {}
        self.reads: Counter[tuple[Site | None, str]] = Counter()
        self.copies = {"count": 0, "pageable": 0, "blocking": 0, "bytes": 0}
        self.autocast: set[torch.dtype] = set()
        self.keeps_zero_grads = False
        self.spans = 0
        self.waits: TeamWaits | None = None  # whose counters are read with every part
        # what remedies switch
        self.set_to_none = self.no_autocast = self.non_blocking = self.freeze_schedules = False
        self.on_optimizer = lambda optimizer: None  # after a step, outside all parts
        self.before_optimizer = lambda optimizer: None
        self.loss: Tensor | None = None  # where the last backward pass began
        self.inputs: dict[int, tuple[tuple, dict]] | None = {}  # of the outermost modules, by id, until settle()
        self._inputs, self._hooks = self.inputs, []
        self._undo: list = []
        self._depth, self._root = 0, None
        self._thread = threading.get_ident()

    def __enter__(self) -> "Instrument":
        _ACTIVE.add(self)
        self._patch_tensors()
        self._patch_training()
        self._patch_sites()
        self._watch_all()
        self._undo.append(lambda: [hook.remove() for hook in self._hooks])
        return self

    def __exit__(self, *_) -> None:
        while self._undo:
            self._undo.pop()()
        self.leave()
        _ACTIVE.discard(self)

    def leave(self) -> None:
        self.step = self.timeline = None

    def patch(self, owner: object, name: str, make) -> None:
        """Replaces ``owner.name`` by ``make(original)`` until exit."""
        inherited = name not in vars(owner)
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(make(original)))
        self._undo.append(lambda: delattr(owner, name) if inherited else setattr(owner, name, original))

    # --- parts --------------------------------------------------------------------------------------------------------

    def add(self, part: str, start: float, end: float, waited: tuple[float, float] | None = None) -> None:
        """Books the time from ``start`` to ``end`` to ``part`` of the step that is under way."""
        if self.step is None:
            return
        self.spans += 1
        self.step.parts[part] = self.step.parts.get(part, 0.0) + end - start
        if waited is not None:
            own, team = self.step.waits.get(part, (0.0, 0.0))
            self.step.waits[part] = own + waited[0], team + waited[1]
        if self.timeline is not None:
            self.timeline.append((part, start, end))

    def _open(self, part: str, owner: object = None) -> None:
        self._depth, self.part, self._root = 1, part, owner
        self._waited = self.waits and self.waits.read()
        self._start = _clock()

    def _finish(self) -> None:
        end = _clock()
        if self._waited:
            self.add(self.part, self._start, end, self.waits.since(self._waited))
        else:
            self.add(self.part, self._start, end)
        self._depth, self.part, self._root = 0, None, None

    def close(self) -> None:
        """Forgets parts that an exception left open."""
        self._depth, self.part, self._root = 0, None, None

    def timed(self, part: str):
        """Returns a decorator that books the calls of a function, where no other part is running."""

        def make(original):
            def wrapper(*args, **kwargs):
                if self._depth or threading.get_ident() != self._thread:
                    return original(*args, **kwargs)
                self._open(part)
                try:
                    return original(*args, **kwargs)
                finally:
                    self._finish()

            return wrapper

        return make

    def settle(self) -> None:
        """Ends the search for the outermost modules; from here on only they carry hooks."""
        self.inputs, self.freeze_schedules = None, True
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for root in self.roots:
            self._hooks += [
                root.register_forward_pre_hook(self._enter_module, prepend=True),
                root.register_forward_hook(self._leave_module, always_call=True),
            ]

    def forget(self) -> None:
        """Begins anew with the objects of a script that is started again."""
        self.close()
        self.step, self.freeze_schedules, self.loss = None, False, None
        for found in (self.roots, self.optimizers, self.sites, self._inputs):
            found.clear()
        self.inputs = self._inputs
        self._watch_all()

    def _watch_all(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            torch_module.register_module_forward_pre_hook(self._enter_module),
            torch_module.register_module_forward_hook(self._leave_module, always_call=True),
        ]

    def _enter_module(self, module: nn.Module, args) -> None:
        if self._depth or threading.get_ident() != self._thread:
            return
        if self.inputs is not None and torch.is_grad_enabled() and not any(module is root for root in self.roots):
            self.roots.append(module)
            self._hooks.append(module.register_forward_pre_hook(self._keep_inputs, with_kwargs=True))
        self._open("forward", module)

    def _keep_inputs(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.is_grad_enabled():
            self._inputs[id(module)] = args, kwargs

    def _leave_module(self, module: nn.Module, args, output) -> None:
        if self._depth and self.part == "forward" and self._root is module:
            self._finish()

    # --- wrappers -----------------------------------------------------------------------------------------------------

    def _patch_tensors(self) -> None:
        if not torch.cuda.is_available():  # no call waits for a device, and a loop may read a number of each sample
            return
        for name in READS:
            self.patch(Tensor, name, functools.partial(self._read, name))
        for name in ("to", "cuda"):
            self.patch(Tensor, name, self._copy)

    def _read(self, name: str, original):
        timed = self.timed("sync")(original)

        def wrapper(tensor, *args, **kwargs):
            if self.step is None or not tensor.is_cuda:
                return original(tensor, *args, **kwargs)
            self.reads[call_site(), f"cuda {name}"] += 1
            return timed(tensor, *args, **kwargs)

        return wrapper

    def _copy(self, original):
        timed, waiting = self.timed("copy")(original), self.timed("sync")(original)

        def wrapper(tensor, *args, **kwargs):
            if self.step is None:
                return original(tensor, *args, **kwargs)
            given = non_blocking(args, kwargs)
            if tensor.is_cuda:
                result = (original if given else waiting)(tensor, *args, **kwargs)
                if result.device.type == "cpu" and not given:
                    self.reads[call_site(), "cuda to"] += 1
                return result
            if self.non_blocking and not given:
                args, kwargs = with_non_blocking(args, kwargs)
            result = timed(tensor, *args, **kwargs)
            if result.is_cuda:
                self.copies["count"] += 1
                self.copies["bytes"] += tensor.nbytes
                self.copies["pageable"] += not tensor.is_pinned()
                self.copies["blocking"] += not given
            return result

        return wrapper

    def _patch_training(self) -> None:
        def backward(original):
            timed = self.timed("backward")(original)

            def wrapper(tensors, *args, **kwargs):
                if not self._depth:
                    self.loss = tensors.detach() if isinstance(tensors, Tensor) else None
                    step = self.step
                    if step is not None and "forward" not in step.parts:  # no module was called: the model is functions
                        now = _clock()
                        begun = step.start + sum(step.parts.values())
                        self.add("forward", min(begun, now), now)
                return timed(tensors, *args, **kwargs)

            return wrapper

        self.patch(Tensor, "backward", backward)
        self.patch(torch.autograd, "backward", backward)
        for owner in (Optimizer, nn.Module):
            self.patch(owner, "zero_grad", self._zero_grad)
        before = torch_optimizer.register_optimizer_step_pre_hook(self._enter_optimizer)
        after = torch_optimizer.register_optimizer_step_post_hook(self._leave_optimizer)
        self._undo += [before.remove, after.remove]

        def schedule(original):
            return lambda *args, **kwargs: None if self.freeze_schedules else original(*args, **kwargs)

        def enter(original):
            def wrapper(autocast):
                if autocast._enabled:
                    self.autocast.add(autocast.fast_dtype)
                    if "autocast" not in self.sites:
                        self.sites["autocast"] = call_site()
                enabled, autocast._enabled = autocast._enabled, autocast._enabled and not self.no_autocast
                try:
                    return original(autocast)
                finally:
                    autocast._enabled = enabled

            return wrapper

        self.patch(torch.autocast, "__enter__", enter)
        for cls in vars(torch.optim.lr_scheduler).values():
            if isinstance(cls, type) and issubclass(cls, torch.optim.lr_scheduler.LRScheduler) and "step" in vars(cls):
                self.patch(cls, "step", schedule)

    def _zero_grad(self, original):
        timed = self.timed("zero_grad")(original)

        def wrapper(owner, set_to_none: bool = True):
            if not set_to_none and not self.keeps_zero_grads:
                self.keeps_zero_grads, self.sites["zero_grad"] = True, call_site()
            return timed(owner, set_to_none=set_to_none or self.set_to_none)

        return wrapper

    def _enter_optimizer(self, optimizer: Optimizer, args, kwargs) -> None:
        if self._depth:
            return
        optimizer = getattr(optimizer, "stands_for", optimizer)  # a remedy's step in its place
        self.before_optimizer(optimizer)
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)
        self._open("optimizer", optimizer)

    def _leave_optimizer(self, optimizer: Optimizer, args, kwargs) -> None:
        optimizer = getattr(optimizer, "stands_for", optimizer)
        if self.part == "optimizer" and self._root is optimizer:
            self._finish()
            self.on_optimizer(optimizer)

    def _patch_sites(self) -> None:
        def noted(original):
            def wrapper(made, *args, **kwargs):
                self.sites.setdefault(id(made), call_site())
                return original(made, *args, **kwargs)

            return wrapper

        for owner in (DataLoader, torch.optim.Optimizer, DistributedDataParallel):
            self.patch(owner, "__init__", noted)

        def threads(original):
            def wrapper(number):
                self.sites["set_num_threads"] = call_site()
                return original(number)

            return wrapper

        self.patch(torch, "set_num_threads", threads)

"""Watches a training run from outside: times its parts, notes where its objects are made, counts waits for the device.

Nothing in the run has to change. Methods of torch that a training loop calls are wrapped while an :class:`Instrument`
is attached. A step then takes 30 to 400 us longer: the driver attaches it for some steps and detaches it for the
others, which call torch's own methods.
"""

import functools
import inspect
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fusedtrain._waits import TeamWaits
from fusedtrain.diagnose.places import Site, call_site, exact_site, place
from fusedtrain.diagnose.updates import Updates, method_code

PARTS = ("loader", "copy", "forward", "backward", "optimizer", "zero_grad", "sync", "evaluation", "rest")
# Reading one of these from a tensor on a device waits until the device has computed it.
READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__", "__repr__")
# Functions of torch.autograd that compute gradients. Where weights are updated by hand, the name of one stands for an
# optimizer: every call is a step.
PASSES = ("backward", "grad")
_clock = time.perf_counter
functorch = torch._C._functorch
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
    parts: dict[str, float] = field(default_factory=dict)  # seconds by name of PARTS; of a bare step: loader and rest
    faults: float = 0.0  # mean over the run
    optimizer_faults: int = 0  # while the optimizer stepped
    cpu: float = 0.0  # seconds of CPU time of this process, all threads; mean over the run
    restart: bool = False  # the loader began a new epoch in this step
    waits: dict[str, tuple[float, float]] = field(default_factory=dict)  # by part: of this thread, of its team
    all_waits: tuple[float, float] = (0.0, 0.0)
    waited: float = 0.0  # seconds that other processes had the core, where that can be told
    whole: dict[str, float] | None = None  # the parts with what other processes took
    spans: list[tuple] = field(default_factory=list)  # (part, start, end, waits or None), by their end

    @property
    def seconds(self) -> float:
        """Without what other processes took."""
        return self.wall - self.waited

    @property
    def wall(self) -> float:
        return self.end - self.start

    def complete(self) -> None:
        """Adds the spans up by part, and books what is left to the part "rest"."""
        for i, (part, start, end, waited) in enumerate(self.spans):
            if part == "backward" and "forward" not in self.parts:  # no module was called: the model is functions
                begun = min(self.start + sum(self.parts.values()), start)
                self.parts["forward"] = start - begun
                self.spans = [*self.spans[:i], ("forward", begun, start, None), *self.spans[i:]]
            self.parts[part] = self.parts.get(part, 0.0) + end - start
            if waited is not None:
                self.waits[part] = tuple(map(sum, zip(self.waits.get(part, (0.0, 0.0)), waited)))
        if "rest" not in self.parts:
            self.parts["rest"] = self.wall - sum(self.parts.values())
        if self.waits:
            self.waits["rest"] = tuple(max(0.0, w - sum(ws)) for w, *ws in zip(self.all_waits, *self.waits.values()))
        elif any(self.all_waits):  # they fall to the parts by their length
            self.waits = {part: tuple(w * s / self.wall for w in self.all_waits) for part, s in self.parts.items()}


# Where a function of torch's stands in a stack, that part is running; the outermost counts.
_RUNNING = {
    place(Tensor.backward.__code__): "backward",
    place(torch.autograd.backward.__code__): "backward",
    place(torch.autograd.grad.__code__): "backward",
    place(nn.Module._call_impl.__code__): "forward",
    place(nn.Module.zero_grad.__code__): "zero_grad",
    place(inspect.unwrap(Optimizer.zero_grad).__code__): "zero_grad",
    place(Optimizer.profile_hook_step(lambda: None).__code__): "optimizer",
    place(_BaseDataLoaderIter.__next__.__code__): "loader",
}
_CLOSURE = __file__, "within_optimizer"
_FORWARD = (nn.functional.__file__, os.path.join(os.path.dirname(torch.__file__), "_dynamo", "eval_frame.py"))


def running(stack: list[tuple[str, int, str]], parts: dict) -> str:
    """Returns the part that a stack of (file, line, function), the innermost first, is in.

    ``parts``: those of more functions, by their place. What an optimizer calls in its step is not the optimizer's.
    "loss" is what the loop itself calls of torch.nn.functional, or has compiled: the forward pass of no module.
    """
    part = "rest"
    for file, _, name in stack:
        if (file, name) == _CLOSURE:
            break
        if file in _FORWARD and part == "rest":
            part = "loss"
        part = parts.get((file, name)) or _RUNNING.get((file, name), part)
    return part


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


def _loss(outputs: object) -> Tensor | None:
    """Returns what a pass begins at, without what torch.func's transforms have put around it; None: at several."""
    if isinstance(outputs, (tuple, list)) and len(outputs) == 1:
        outputs = outputs[0]
    if not isinstance(outputs, Tensor):
        return None
    while functorch.is_functorch_wrapped_tensor(outputs):
        outputs = functorch.get_unwrapped(outputs)
    return outputs.detach()


def graph_of(outputs: object) -> set:
    """Returns the operations that a pass which begins at these tensors goes back through, without their ends."""
    nodes = [t.grad_fn for t in (outputs if isinstance(outputs, (tuple, list)) else [outputs]) if t.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        found = {node for node, _ in nodes.pop().next_functions if getattr(node, "next_functions", ())} - seen
        seen |= found
        nodes += found
    return seen


def wrap(owner: object, name: str, make) -> Callable[[], None]:
    """Replaces ``owner.name`` by ``make(original)``; returns what puts it back."""
    original = getattr(owner, name)
    return replace(owner, name, functools.wraps(original)(make(original)))


def replace(owner: object, name: str, value: object) -> Callable[[], None]:
    """Sets ``owner.name``; returns what puts it back."""
    inherited = name not in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: delattr(owner, name) if inherited else setattr(owner, name, original)


class Instrument:
    """Context manager that holds the wrappers, attached at first.

    What few steps call stays wrapped until exit: constructors, whose places are noted, and schedules, which stand still
    while steps are compared.

    Attributes:
        attached: whether the methods that every step calls are wrapped.
        marks: the optimizer after whose steps ``on_optimizer`` is called while it is detached, too, or one of PASSES.
        step: receives the times of the parts; None: nothing is recorded.
        elsewhere: whether an optimizer took a step in another thread, which is not watched.
        roots: the outermost modules that were called with gradients, in the order of their first call.
        frozen: those that were called without, such as a teacher.
        graph: receives the operations that outermost backward passes go back through; None: not noted.
        records_evaluation: whether an evaluation amid the training was recorded for a backward pass.
        optimizers: those of torch.optim that took a step.
        by_hand: objects that update weights and are not of torch.optim, with the names of their methods.
        sites: where the user made or called what: objects by id, and "zero_grad", "set_num_threads", "autocast".
        reads: where numbers were read from tensors on a device, with their counts.
    """

    def __init__(self):
        self.step: Step | None = None
        self.elsewhere = False
        self.attached = False
        self.marks: object = None
        self.part: str | None = None  # the part that is running now
        self.roots: list[nn.Module] = []
        self.frozen: list[nn.Module] = []
        self._trained: set[nn.Module] = set()  # those that were in training mode then
        self.records_evaluation = False
        self.graph: set | None = None
        self.optimizers: list[Optimizer] = []
        self.by_hand: list[tuple[object, str]] = []
        self.made_optimizer = False  # of torch.optim
        self.sites: dict[object, Site | None] = {}
        self.reads: Counter[tuple[Site | None, str]] = Counter()
        self.copies = {"count": 0, "pageable": 0, "blocking": 0, "bytes": 0}
        self.autocast: set[torch.dtype] = set()
        self.autocast_class: type[torch.autocast] = torch.autocast  # or one for a device, of other parameters
        self.keeps_zero_grads = False
        self.waits: TeamWaits | None = None  # whose counters are read with every part
        self.freeze_schedules = False
        self.on_optimizer = lambda optimizer: None  # after a step, outside all parts
        self.before_optimizer = lambda optimizer: None
        self.on_closure = lambda entered: None  # at the start and at the end of what an optimizer calls in its step
        self.calls_closures = False
        self.on_pass = lambda name: None  # after one of PASSES, outside all parts
        self.loss: Tensor | None = None  # where the last backward pass began
        self.inputs: dict[int, tuple[tuple, dict]] | None = {}  # of the outermost modules, by id, until settle()
        self._inputs, self._hooks = self.inputs, []
        self._compiled: list = []  # hooks that stay
        self._undo, self._detach, self._after = [], [], None
        self._unmark: Callable[[], None] = lambda: None
        self._updates = Updates(lambda: [p for root in self.roots for p in root.parameters()])
        self._made: dict[tuple, tuple] = {}  # originals and wrappers, by owner and name
        self._root: object = None
        self._thread = threading.get_ident()

    def __enter__(self) -> "Instrument":
        _ACTIVE.add(self)
        self._patch_rare()
        self.attach()
        return self

    def __exit__(self, *_) -> None:
        self.watch_updates(False)
        self.marks = None
        self.detach()
        self._unmark()
        for hook in self._compiled:
            hook.remove()
        while self._undo:
            self._undo.pop()()
        self.leave()
        _ACTIVE.discard(self)

    def leave(self) -> None:
        self.step = None

    def attach(self) -> None:
        """Wraps what every step calls."""
        if self.attached:
            return
        self.attached = True
        self._unmark()
        self._patch_tensors()
        self._patch_training()
        self._hook_modules()
        if self._after is None:
            self._after = torch_optimizer.register_optimizer_step_post_hook(self._leave_optimizer)

    def detach(self) -> None:
        """Puts back what every step calls. What was patched between attach() and detach() has to be put back before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        while self._detach:
            self._detach.pop()()
        if self._after is not None and not isinstance(self.marks, Optimizer):
            self._after.remove()  # else it is it that marks
            self._after = None
        self.close()
        by_hand = {id(owner): name for owner, name in self.by_hand}
        if self.attached and self.marks in PASSES:
            self._unmark = wrap(torch.autograd, self.marks, self._marked)
        elif self.attached and id(self.marks) in by_hand:
            self._unmark = wrap(self.marks, by_hand[id(self.marks)], self._marked)
        self.attached = False

    def _marked(self, original):
        def wrapper(*args, **kwargs):
            result = original(*args, **kwargs)
            if threading.get_ident() == self._thread:
                self.on_optimizer(self.marks)
            return result

        return wrapper

    def watch_updates(self, on: bool) -> None:
        """Begins or ends the search for optimizers that are not of torch.optim."""
        if on:
            self._updates.start()
            return
        self._updates.stop()
        for owner, name in self._updates.found:
            if not any(owner is known for known, _ in self.by_hand):
                self.by_hand.append((owner, name))
                if self.attached:
                    self._patch_by_hand(owner, name)

    @property
    def own_parts(self) -> dict:
        """The parts of the user's own functions, by their place."""
        codes = [method_code(owner, name) for owner, name in self.by_hand]
        return {place(code): "optimizer" for code in codes if code is not None}

    def patch(self, owner: object, name: str, make) -> None:
        """Replaces ``owner.name`` by ``make(original)`` until exit."""
        self._undo.append(wrap(owner, name, make))

    def _patch(self, owner: object, name: str, make) -> None:
        """Replaces ``owner.name`` until detach(); the wrapper is made once."""
        original, wrapper = self._made.get((owner, name), (None, None))
        if original != getattr(owner, name):  # a remedy's, for instance
            original = getattr(owner, name)
            wrapper = functools.wraps(original)(make(original))
            self._made[owner, name] = original, wrapper
        self._detach.append(replace(owner, name, wrapper))

    # --- parts --------------------------------------------------------------------------------------------------------

    def _open(self, part: str, owner: object = None) -> None:
        self.part, self._root = part, owner
        self._waited = self.waits and self.waits.read()
        self._start = _clock()

    def _finish(self) -> None:
        end, step = _clock(), self.step
        if step is not None:
            step.spans.append((self.part, self._start, end, self._waited and self.waits.since(self._waited)))
        self.part = self._root = None

    def close(self) -> None:
        """Forgets parts that an exception left open."""
        self.part = self._root = None

    def timed(self, part: str):
        """Returns a decorator that books the calls of a function, where no other part is running."""

        def make(original):
            def wrapper(*args, **kwargs):
                if self.part is not None or threading.get_ident() != self._thread:
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
        # What model.compile() made holds the hooks within it: it would be compiled again whenever they change.
        self.frozen = [module for module in self.frozen if not any(module is root for root in self.roots)]
        for root in (*self.roots, *self.frozen):
            if root._compiled_call_impl is not None:
                self._compiled += self._hook(root)
        if self.attached:
            self.detach()
            self.attach()

    def forget(self) -> None:
        """Begins anew with the objects of a script that is started again."""
        self.close()
        self.step, self.freeze_schedules, self.marks, self.loss = None, False, None, None
        for hook in self._compiled:
            hook.remove()
        self.watch_updates(False)
        self.detach()
        self._unmark()
        found = (self.roots, self.frozen, self._trained, self.optimizers, self.by_hand, self._updates.found, self.sites)
        for known in (*found, self._inputs, self._compiled, self._made):
            known.clear()
        self.made_optimizer = False
        self.inputs = self._inputs
        self.attach()

    def _hook_modules(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self.inputs is None:
            roots = [root for root in (*self.roots, *self.frozen) if root._compiled_call_impl is None]
            self._hooks = [hook for root in roots for hook in self._hook(root)]
        else:
            self._hooks = [
                torch_module.register_module_forward_pre_hook(self._enter_module),
                torch_module.register_module_forward_hook(self._leave_module, always_call=True),
            ]
        self._hooks.append(torch_optimizer.register_optimizer_step_pre_hook(self._enter_optimizer))

    def _hook(self, root: nn.Module) -> list:
        return [
            root.register_forward_pre_hook(self._enter_module, prepend=True),
            root.register_forward_hook(self._leave_module, always_call=True),
        ]

    @property
    def evaluating(self) -> bool:
        """Whether the models that train in training mode are out of it."""
        return bool(self._trained) and not any(module.training for module in self._trained)

    def _enter_module(self, module: nn.Module, args) -> None:
        if self.part is not None or not self.attached or threading.get_ident() != self._thread:
            return
        recorded = torch.is_grad_enabled()
        if self.inputs is not None and not recorded and not any(module is other for other in self.frozen):
            self.frozen.append(module)
        if self.inputs is not None and recorded and not any(module is root for root in self.roots):
            self.roots.append(module)
            self._hooks.append(module.register_forward_pre_hook(self._keep_inputs, with_kwargs=True))
        if self.inputs is not None and recorded and module.training and any(True for _ in module.parameters()):
            self._trained.add(module)
        self.records_evaluation |= self.evaluating and recorded
        self._open("evaluation" if self.evaluating else "forward", module)

    def _keep_inputs(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.is_grad_enabled() and functorch.maybe_current_level() is None:  # else they do not outlive the call
            self._inputs[id(module)] = args, kwargs

    def _leave_module(self, module: nn.Module, args, output) -> None:
        if self._root is module:
            self._finish()

    # --- wrappers -----------------------------------------------------------------------------------------------------

    def _patch_tensors(self) -> None:
        # Without one no call waits for a device, and a loop may read a number of each sample. Not is_available(): it
        # initialises CUDA, and what a script then says in CUDA_VISIBLE_DEVICES comes too late.
        if not torch.cuda.device_count():
            return
        for name in READS:
            self._patch(Tensor, name, functools.partial(self._read, name))
        for name in ("to", "cuda"):
            self._patch(Tensor, name, self._copy)

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
            result = timed(tensor, *args, **kwargs)
            if result.is_cuda:
                self.copies["count"] += 1
                self.copies["bytes"] += tensor.nbytes
                self.copies["pageable"] += not tensor.is_pinned()
                self.copies["blocking"] += not given
            return result

        return wrapper

    def _patch_training(self) -> None:
        for name in PASSES:
            self._patch(torch.autograd, name, functools.partial(self._pass, name))  # Tensor.backward calls "backward"
        for owner, name in self.by_hand:
            self._patch_by_hand(owner, name)
        if self.inputs is None:
            # Not their classes: Python would forget what it knows of them, and be slower for some hundred steps.
            for owner in (*self.optimizers, *self.roots):
                self._patch(owner, "zero_grad", self.timed("zero_grad"))
            return
        for owner in (Optimizer, nn.Module):
            self._patch(owner, "zero_grad", self._zero_grad)

        def enter(original):
            def wrapper(autocast):
                if autocast._enabled:
                    self.autocast.add(autocast.fast_dtype)
                    if "autocast" not in self.sites:
                        self.sites["autocast"], self.autocast_class = exact_site(), type(autocast)
                return original(autocast)

            return wrapper

        self._patch(torch.autocast, "__enter__", enter)

    def _pass(self, name: str, original):
        timed = self.timed("backward")(original)

        def wrapper(outputs, *args, **kwargs):
            outermost = self.part is None and threading.get_ident() == self._thread
            if outermost:
                self.loss = _loss(outputs)
                if self.graph is not None:
                    self.graph |= graph_of(outputs)
            result = timed(outputs, *args, **kwargs)
            if outermost and functorch.maybe_current_level() is None:  # within torch.func the plan could change nothing
                self.on_pass(name)
            return result

        return wrapper

    def _patch_by_hand(self, owner: object, name: str) -> None:
        timed = self.timed("optimizer")

        def make(original):
            step = timed(original)

            def wrapper(*args, **kwargs):
                outermost = self.part is None and threading.get_ident() == self._thread
                if outermost:
                    self.before_optimizer(owner)
                result = step(*args, **kwargs)
                if outermost:
                    self.on_optimizer(owner)
                return result

            return wrapper

        self._patch(owner, name, make)

    def _zero_grad(self, original):
        timed = self.timed("zero_grad")(original)

        def wrapper(owner, set_to_none: bool = True):
            if not set_to_none and not self.keeps_zero_grads:
                self.keeps_zero_grads, self.sites["zero_grad"] = True, exact_site()
            return timed(owner, set_to_none=set_to_none)

        return wrapper

    def _enter_optimizer(self, optimizer: Optimizer, args, kwargs) -> tuple | None:
        if threading.get_ident() != self._thread:
            self.elsewhere = True
            return None
        if self.part is not None:
            return None
        optimizer = getattr(optimizer, "stands_for", optimizer)  # a remedy's step in its place
        self.before_optimizer(optimizer)
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)
        self._open("optimizer", optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            return None
        self.calls_closures, closure = True, self._outside(optimizer, closure)
        return ((*args[:1], closure, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": closure})

    def _outside(self, optimizer: Optimizer, closure: Callable) -> Callable:
        """Returns a closure whose time is not the optimizer's that calls it."""

        def within_optimizer():
            self._finish()
            self.on_closure(True)
            result = closure()
            self.on_closure(False)
            self._open("optimizer", optimizer)
            return result

        return within_optimizer

    def _leave_optimizer(self, optimizer: Optimizer, args, kwargs) -> None:
        optimizer = getattr(optimizer, "stands_for", optimizer)
        if not self.attached:
            self.on_optimizer(optimizer)
        elif self.part == "optimizer" and self._root is optimizer:
            self._finish()
            self.on_optimizer(optimizer)

    def _patch_rare(self) -> None:
        def noted(original):
            def wrapper(made, *args, **kwargs):
                self.sites[id(made)] = exact_site()  # another object may have had that id
                self.made_optimizer |= isinstance(made, Optimizer)
                return original(made, *args, **kwargs)

            return wrapper

        for owner in (DataLoader, torch.optim.Optimizer, DistributedDataParallel):
            self.patch(owner, "__init__", noted)

        def threads(original):
            def wrapper(number):
                self.sites["set_num_threads"] = exact_site()
                return original(number)

            return wrapper

        self.patch(torch, "set_num_threads", threads)

        def anomalies(original):
            def wrapper(enabled, *args, **kwargs):
                if enabled and "anomaly" not in self.sites:
                    self.sites["anomaly"] = exact_site()
                return original(enabled, *args, **kwargs)

            return wrapper

        self.patch(torch, "set_anomaly_enabled", anomalies)  # by detect_anomaly() and set_detect_anomaly()

        def schedule(original):
            return lambda *args, **kwargs: None if self.freeze_schedules else original(*args, **kwargs)

        for cls in vars(torch.optim.lr_scheduler).values():
            if isinstance(cls, type) and issubclass(cls, torch.optim.lr_scheduler.LRScheduler) and "step" in vars(cls):
                self.patch(cls, "step", schedule)

"""What can be done about a bottleneck: how each remedy is applied to the run that is under way, and taken back.

Each remedy belongs to a class of change, which is checked on the losses:

- ``bitwise``: the same losses, bit for bit;
- ``last bit``: the losses of another order of summation: they differ no more than after rounding the weights;
- ``tolerance``: arithmetic of another precision.

Batch sizes are never changed, only reported on.
"""

import inspect
import itertools
import sys
from collections import Counter

import torch
import torch.utils.deterministic
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map, tree_structure
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from fusedtrain import _allocator, optim
from fusedtrain.diagnose.batches import LoaderSource
from fusedtrain.diagnose.drive import Driver
from fusedtrain.diagnose.instrument import non_blocking, replace, with_non_blocking, wrap
from fusedtrain.diagnose.lines import Change, before_optimizer, edit_argument, edit_call, edit_loader
from fusedtrain.nn.fuse import fuse, unfuse
from fusedtrain.optim._fused import FusedStep

CLASSES = ("bitwise", "last bit", "tolerance")


class Remedy:
    """One change of a run.

    Attributes:
        name: short and unique, as in the JSON report.
        kind: one of CLASSES.
        how: what to do, in one sentence.
    """

    name = kind = how = ""
    on_loader = False
    outside = False  # it holds from the start of a process or not at all: tried in fresh ones
    threads: int | None = None  # that operations then run on, where it changes their number
    rehearsed = False  # tried on the model alone first: it may not be able to run so

    def apply(self, driver: Driver) -> None:
        """Puts the change in force, between two steps."""

    def undo(self, driver: Driver) -> None:
        """Takes it back."""

    def changes(self, driver: Driver) -> list[Change]:
        """The user's lines to edit, where they are known."""
        return []


class Loader(Remedy):
    """The loader with other arguments."""

    kind, on_loader = "bitwise", True
    OF_WORKERS = ("persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout")  # refused without any

    def __init__(self, driver: Driver, **arguments):
        self.arguments = arguments
        self.name = "loader(" + ", ".join(f"{name}={value}" for name, value in arguments.items()) + ")"
        self.how = "give the DataLoader " + ", ".join(f"{name}={value}" for name, value in arguments.items())
        self.source = LoaderSource(self.make(driver.loader))

    def make(self, loader: DataLoader) -> DataLoader:
        return clone_loader(loader, **self.arguments)

    def changes(self, driver: Driver) -> list[Change]:
        site = driver.instrument.sites.get(id(driver.loader))
        without = () if self.arguments.get("num_workers") != 0 else self.OF_WORKERS
        change = edit_call(site, ("DataLoader",), DataLoader, without, **self.arguments)
        return [change] if change else []


class WholeBatches(Remedy):
    """The loader asks the dataset for all samples of a batch at once, where it takes a list of indices."""

    name, kind, on_loader = "whole batches", "bitwise", True
    how = (
        "let the DataLoader index the dataset once per batch: sampler=BatchSampler(RandomSampler(dataset), size,"
        " drop_last=False), batch_size=None; both samplers are in torch.utils.data"
    )

    def __init__(self, driver: Driver):
        self.source = LoaderSource(self.make(driver.loader))

    @staticmethod
    def make(loader: DataLoader) -> DataLoader:
        whole = {"batch_size": None, "sampler": loader.batch_sampler, "batch_sampler": None, "drop_last": False}
        return clone_loader(loader, **whole, collate_fn=None)

    @staticmethod
    def why_not(loader) -> str | None:
        """Returns why a batch cannot be had so, or is another one; None where two are the same, bit for bit."""
        reason = why_not_clone(loader)
        if reason or loader.batch_sampler is None:
            return reason or "it asks for whole batches already"
        if loader.collate_fn is not default_collate:
            return "it has a collate_fn of its own"
        length = len(loader.dataset)
        for first in (0, length // 2):
            indices = [i % length for i in range(first, first + 3)]
            try:
                single = default_collate([loader.dataset[i] for i in indices])
                whole = default_convert(loader.dataset[indices])
            except Exception as error:
                return f"the dataset takes no list of indices: {type(error).__name__}"
            if not _same(single, whole):
                return "the dataset gives something else for a list of indices"
        return None

    def changes(self, driver: Driver) -> list[Change]:
        change = edit_loader(driver.instrument.sites.get(id(driver.loader)))
        return [change] if change else []


def _same(one: object, other: object) -> bool:
    """Returns whether two batches have the same structure and values."""
    values, others = tree_leaves(one), tree_leaves(other)
    return tree_structure(one) == tree_structure(other) and all(
        isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype is b.dtype and torch.equal(a, b)
        for a, b in zip(values, others)
    )


def why_not_clone(loader) -> str | None:
    """Returns why a loader cannot be built again with other arguments, or None."""
    if not isinstance(loader, DataLoader):
        return f"the batches come from a {type(loader).__name__}, not from a DataLoader"
    if type(loader) is not DataLoader:
        return f"{type(loader).__name__} is derived from DataLoader and may load differently"
    if isinstance(loader.dataset, IterableDataset):
        return "the dataset is iterable: with other workers it has to be divided among them by hand"
    return None


def clone_loader(loader: DataLoader, **arguments) -> DataLoader:
    """Returns a DataLoader over the same dataset and sampler with some arguments changed."""
    if loader.batch_size is not None:
        same = {"batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}
    elif loader.batch_sampler is not None:
        same = {"batch_sampler": loader.batch_sampler}
    else:
        same = {"batch_size": None, "sampler": loader.sampler}
    workers = arguments.get("num_workers", loader.num_workers)
    same |= {
        "num_workers": workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "worker_init_fn": loader.worker_init_fn,
        "generator": loader.generator,
    }
    if workers > 0:
        same |= {"persistent_workers": loader.persistent_workers, "prefetch_factor": loader.prefetch_factor}
        same |= {"multiprocessing_context": loader.multiprocessing_context, "timeout": loader.timeout}
    return DataLoader(loader.dataset, **same | arguments)


class Allocator(Remedy):
    """glibc keeps freed memory instead of returning it to the kernel.

    It cannot be tried in a running process: mallopt() turns it on, but what the heap has grown to then stays.
    """

    name, kind, outside = "allocator", "bitwise", True
    how = f'start Python with the environment variable GLIBC_TUNABLES="{_allocator.TUNABLES}"'

    @staticmethod
    def why_not() -> str | None:
        if not sys.platform.startswith("linux") or not _allocator.variables():
            return "not glibc's malloc, or GLIBC_TUNABLES or another malloc is set already"
        return None


class Threads(Remedy):
    """Another number of threads within an operation."""

    kind = "last bit"

    def __init__(self, number: int):
        self.threads, self.name = number, f"threads({number})"
        self.how = f"torch.set_num_threads({number}), or OMP_NUM_THREADS={number} in the environment"

    def apply(self, driver: Driver) -> None:
        self._before = torch.get_num_threads()
        _set_threads(self.threads)

    def undo(self, driver: Driver) -> None:
        _set_threads(self._before)

    def changes(self, driver: Driver) -> list[Change]:
        change = edit_argument(driver.instrument.sites.get("set_num_threads"), ("set_num_threads",), self.threads)
        return [change] if change else []


def _set_threads(number: int) -> None:
    getattr(torch.set_num_threads, "__wrapped__", torch.set_num_threads)(number)


def models(driver: Driver) -> list[nn.Module]:
    """Returns the outermost modules with parameters: the models, not the losses."""
    return [root for root in driver.instrument.roots if any(True for _ in root.parameters())]


def _new_line(driver: Driver, line: str) -> list[Change]:
    """The user's lines that make the optimizers, with a change of the model in front."""
    sites = driver.instrument.sites
    found = [before_optimizer(sites.get(id(o)), type(o).__name__, line) for o in driver.instrument.optimizers]
    return [change for change in found if change]


class ChannelsLast(Remedy):
    """Convolutions on channels_last weights and images."""

    name, kind, rehearsed = "channels_last", "last bit", True
    how = (
        "model = model.to(memory_format=torch.channels_last), before the optimizer is made, and"
        " images = images.to(device, memory_format=torch.channels_last)"
    )

    def apply(self, driver: Driver) -> None:
        self._formats = [
            (p, p.is_contiguous(memory_format=torch.channels_last))
            for model in models(driver)
            for p in model.parameters()
            if p.dim() == 4
        ]
        self._convert(driver, [(p, True) for p, _ in self._formats])
        self._hooks = [
            model.register_forward_pre_hook(_to_channels_last, prepend=True, with_kwargs=True)
            for model in models(driver)
        ]

    def undo(self, driver: Driver) -> None:
        for hook in self._hooks:
            hook.remove()
        self._convert(driver, self._formats)

    def changes(self, driver: Driver) -> list[Change]:
        return _new_line(driver, "{model} = {model}.to(memory_format=torch.channels_last)")

    def _convert(self, driver: Driver, formats: list[tuple[Tensor, bool]]) -> None:
        for p, last in formats:
            memory_format = torch.channels_last if last else torch.contiguous_format
            _change(driver, p, lambda tensor, to=memory_format: tensor.contiguous(memory_format=to))


def _change(driver: Driver, p: Tensor, convert) -> None:
    """Gives a parameter, its gradient and what optimizers keep for it another layout or dtype."""
    grad, p.grad = p.grad, None
    p.data = convert(p.data)
    p.grad = None if grad is None else convert(grad)
    for optimizer in driver.instrument.optimizers:
        state = optimizer.state.get(p, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == p.shape and value.dim() > 0:
                state[name] = convert(value)


def _to_channels_last(module: nn.Module, *inputs) -> tuple:
    return tree_map(
        lambda x: x.contiguous(memory_format=torch.channels_last) if isinstance(x, Tensor) and x.dim() == 4 else x,
        inputs,
    )


class Fuse(Remedy):
    """Stock layers become fused ones."""

    name, kind, rehearsed = "fuse", "last bit", True
    how = "fusedtrain.fuse(model), once, after the model is made"

    @staticmethod
    def why_not(driver: Driver) -> str | None:
        for model in models(driver):
            try:
                if unfuse(model, dry_run=True):
                    return "the model has fused layers already"
                if fuse(model, dry_run=True).swapped:
                    return None
            except ValueError as error:
                return str(error)
        return "the model has no layer that fusedtrain.fuse takes"

    @staticmethod
    def layers(driver: Driver) -> Counter[str]:
        """Returns what the layers become, with their number."""
        swapped = [candidate for model in models(driver) for candidate in fuse(model, dry_run=True).swapped]
        return Counter(candidate.after.rpartition(".")[2] for candidate in swapped)

    def apply(self, driver: Driver) -> None:
        for model in models(driver):
            fuse(model)

    def undo(self, driver: Driver) -> None:
        for model in models(driver):
            unfuse(model)

    def changes(self, driver: Driver) -> list[Change]:
        return _new_line(driver, "fusedtrain.fuse({model})")


def sparse_gradients(driver: Driver) -> bool:
    """Returns whether gradients are sparse, or will be: no fused optimizer takes them."""
    modules = [module for model in models(driver) for module in model.modules()]
    groups = [group["params"] for optimizer in driver.instrument.optimizers for group in optimizer.param_groups]
    params = itertools.chain(*groups, *(module.parameters(recurse=False) for module in modules))
    embeddings = any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse for m in modules)
    return embeddings or any(p.grad is not None and p.grad.is_sparse for p in params)


class FusedOptimizer(Remedy):
    """torch's or our optimizer that updates everything in one pass over memory.

    The optimizer object stays the one that the script made, with its groups and states; only its step is another.
    """

    kind = "last bit"
    STOCK = ("Adam", "AdamW", "SGD", "Adagrad")

    def __init__(self, ours: bool):
        self.ours = ours
        self.name = "fusedtrain.optim" if ours else "optimizer(fused=True)"
        self.how = "take its counterpart from fusedtrain.optim" if ours else "give the optimizer fused=True"

    @classmethod
    def without_form(cls, optimizers: list) -> list:
        """Returns the optimizers that keep the others from being fused too; none where one of both remedies suits."""
        lacking = [[o for o in optimizers if not cls(ours).has_form(o)] for ours in (False, True)]
        return min(lacking, key=len)

    def has_form(self, optimizer) -> bool:
        """Returns whether there is a fused form of an optimizer, or it is one."""
        stock = any(type(optimizer) is getattr(torch.optim, name) for name in self.STOCK)
        return isinstance(optimizer, FusedStep) or (_ours(optimizer) is not None if self.ours else stock)

    def why_not(self, driver: Driver) -> str | None:
        for optimizer in driver.instrument.optimizers:
            if isinstance(optimizer, FusedStep) or any(group.get("fused") for group in optimizer.param_groups):
                return "the optimizer is fused already"
            if not self.has_form(optimizer):
                return f"there is no fused form of {type(optimizer).__module__}.{type(optimizer).__name__}"
            for group in optimizer.param_groups:
                if group.get("capturable") or group.get("differentiable"):
                    return "the optimizer is capturable or differentiable"
                if any(not p.is_floating_point() or p.dtype is torch.float16 for p in group["params"]):
                    return "a parameter is complex, an integer or in half precision"
        if sparse_gradients(driver):
            return "gradients are sparse, which no fused optimizer takes"
        return None if driver.instrument.optimizers else "no optimizer was seen"

    def apply(self, driver: Driver) -> None:
        self._before = []
        for optimizer in driver.instrument.optimizers:
            flags = [(group.get("fused"), group.get("foreach")) for group in optimizer.param_groups]
            twin = _ours(optimizer) if self.ours else None
            self._before.append((optimizer, vars(optimizer).get("step"), flags, twin))
            if self.ours:
                optimizer.step = twin.step
            else:
                for group in optimizer.param_groups:
                    group["fused"], group["foreach"] = True, False
            _place_counters(optimizer, on_device=True)

    def undo(self, driver: Driver) -> None:
        for optimizer, step, flags, twin in self._before:
            if self.ours:
                if step is None:
                    del optimizer.step
                else:
                    optimizer.step = step
            else:
                for group, (fused, foreach) in zip(optimizer.param_groups, flags):
                    group["fused"], group["foreach"] = fused, foreach
            _place_counters(optimizer, on_device=False, whole=self.ours and twin._step_is_int)

    def changes(self, driver: Driver) -> list[Change]:
        found = []
        for optimizer in driver.instrument.optimizers:
            site, name = driver.instrument.sites.get(id(optimizer)), type(optimizer).__name__
            change = edit_call(site, (name,), type(optimizer), **({} if self.ours else {"fused": True}))
            if change and self.ours:
                arguments = change.before[change.before.index("(") :]
                change = Change(
                    change.file, change.line, change.before, f"fusedtrain.optim.{counterpart(optimizer)}{arguments}"
                )
            if change and not self.ours and "foreach" in change.before:
                change = edit_call(site, (name,), type(optimizer), foreach=None, fused=True)
            found += [change] if change else []
        return found


def _place_counters(optimizer, on_device: bool, whole: bool = False) -> None:
    """Moves counts of steps to the device of the parameters or back, there as ints with ``whole``."""
    counted = [(group, group["params"][0]) for group in optimizer.param_groups if group["params"]]
    for counts, p in (*counted, *((state, p) for p, state in optimizer.state.items())):
        if isinstance(counts.get("step"), Tensor):
            counts["step"] = int(counts["step"]) if whole else counts["step"].to(p.device if on_device else "cpu")


# Ours, by the module and the name of the class whose arguments and states it has.
COUNTERPARTS = {
    **{("torch.optim", name): name for name in ("Adam", "AdamW", "SGD", "RMSprop")},
    **{("timm.optim", name): name for name in ("RMSpropTF", "Lamb", "Lion", "Adan")},
    ("timm.optim", "NvNovoGrad"): "NovoGrad",
}


def counterpart(optimizer) -> str | None:
    """Returns the name in fusedtrain.optim of what an optimizer of exactly this class may be replaced by."""
    for (module, name), ours in COUNTERPARTS.items():
        if type(optimizer) is getattr(sys.modules.get(module), name, None):
            return ours
    return None


def _ours(optimizer) -> FusedStep | None:
    """Returns our counterpart on the same groups and states; None where it does not know the same options."""
    name = counterpart(optimizer)
    if name is None:
        return None
    cls = getattr(optim, name)
    known = inspect.signature(cls).parameters
    try:
        twin = cls([torch.zeros(1)], **{k: value for k, value in optimizer.defaults.items() if k in known})
    except (TypeError, ValueError, NotImplementedError):
        return None
    if twin.defaults.keys() != optimizer.defaults.keys():
        return None
    twin.param_groups, twin.state, twin.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults
    twin.stands_for = optimizer
    return twin


class SetToNone(Remedy):
    """Gradients are freed instead of being filled with zeros."""

    name, kind = "zero_grad(set_to_none=True)", "bitwise"
    how = "call zero_grad() without set_to_none=False"

    def apply(self, driver: Driver) -> None:
        def freed(original):
            return lambda owner, set_to_none=True: original(owner)

        self._undo = [wrap(owner, "zero_grad", freed) for owner in (torch.optim.Optimizer, nn.Module)]

    def undo(self, driver: Driver) -> None:
        for undo in self._undo:
            undo()

    def changes(self, driver: Driver) -> list[Change]:
        site, function = driver.instrument.sites.get("zero_grad"), torch.optim.Optimizer.zero_grad
        change = edit_call(site, ("zero_grad",), function, set_to_none=True)
        return [change] if change else []


class Float32(Remedy):
    """No autocast; weights that are kept in another precision become float32, and so do the inputs."""

    name, kind, rehearsed = "precision(fp32)", "tolerance", True
    how = "leave autocast, .bfloat16() and .double() out, and give the model float32 inputs"

    def apply(self, driver: Driver) -> None:
        def without(original):
            def wrapper(autocast):
                enabled, autocast._enabled = autocast._enabled, False
                try:
                    return original(autocast)
                finally:
                    autocast._enabled = enabled

            return wrapper

        self._enter = wrap(torch.autocast, "__enter__", without)
        self._tensors, self._hooks = [], []
        for model in models(driver):
            found = [t for t in (*model.parameters(), *model.buffers()) if t.dtype in OTHER_FLOATS]
            self._tensors += [(t, t.dtype) for t in found]
            if found:
                dtype = found[0].dtype
                cast = lambda m, *inputs: _cast(inputs, OTHER_FLOATS, torch.float32)  # noqa: E731 (beside its use)
                self._hooks.append(model.register_forward_pre_hook(cast, with_kwargs=True))
                self._hooks.append(
                    model.register_forward_hook(lambda m, args, y, to=dtype: _cast(y, (torch.float32,), to))
                )
        for tensor, _ in self._tensors:
            _change(driver, tensor, Tensor.float)

    def undo(self, driver: Driver) -> None:
        self._enter()
        for hook in self._hooks:
            hook.remove()
        for tensor, dtype in self._tensors:
            _change(driver, tensor, lambda value, to=dtype: value.to(to))

    def changes(self, driver: Driver) -> list[Change]:
        site, function = driver.instrument.sites.get("autocast"), driver.instrument.autocast_class
        change = edit_call(site, ("autocast",), function, enabled=False)
        return [change] if change else []


OTHER_FLOATS = (torch.bfloat16, torch.float16, torch.float64)


def _cast(values, dtypes: tuple[torch.dtype, ...], to: torch.dtype):
    return tree_map(lambda x: x.to(to) if isinstance(x, Tensor) and x.dtype in dtypes else x, values)


class BFloat16(Remedy):
    """The forward pass under autocast to bfloat16."""

    name, kind, rehearsed = "precision(bf16)", "tolerance", True
    how = "run the forward pass under torch.autocast(device_type, dtype=torch.bfloat16)"

    def apply(self, driver: Driver) -> None:
        self._open: list = []
        self._hooks = []
        for model in models(driver):
            self._hooks.append(model.register_forward_pre_hook(self._enter, prepend=True))
            self._hooks.append(model.register_forward_hook(self._leave, always_call=True))

    def undo(self, driver: Driver) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: nn.Module, args) -> None:
        device = next(module.parameters()).device.type
        self._open.append(torch.autocast(device, dtype=torch.bfloat16))
        inspect.unwrap(torch.autocast.__enter__)(self._open[-1])  # it is not the script's

    def _leave(self, module: nn.Module, args, output):
        self._open.pop().__exit__(None, None, None)
        return _cast(output, (torch.bfloat16,), torch.float32)


class NoDebugging(Remedy):
    """What looks for bugs is off: anomaly detection, and the NaN that new memory is filled with."""

    name, kind = "debugging off", "bitwise"

    def __init__(self, driver: Driver):
        aids = {
            "torch.autograd.set_detect_anomaly(True) and detect_anomaly() out": looks_for_anomalies(driver),
            "torch.utils.deterministic.fill_uninitialized_memory off": fills_memory(),
        }
        self.how = "leave " + " and ".join(aid for aid, used in aids.items() if used) + " once the bug is found"

    @staticmethod
    def why_not(driver: Driver) -> str | None:
        used = looks_for_anomalies(driver) or fills_memory()
        return None if used else "anomalies are not looked for, and new memory is not filled"

    def apply(self, driver: Driver) -> None:
        fill = torch.utils.deterministic.fill_uninitialized_memory
        self._before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled(), fill
        torch.set_anomaly_enabled(False)
        self._restore = replace(torch, "set_anomaly_enabled", lambda *args, **kwargs: None)
        torch.utils.deterministic.fill_uninitialized_memory = False

    def undo(self, driver: Driver) -> None:
        self._restore()
        *anomaly, torch.utils.deterministic.fill_uninitialized_memory = self._before
        torch.set_anomaly_enabled(*anomaly)


def looks_for_anomalies(driver: Driver) -> bool:
    """Returns whether autograd looks for NaN now, or did within a step."""
    return torch.is_anomaly_enabled() or "anomaly" in driver.instrument.sites


def fills_memory() -> bool:
    """Returns whether torch writes NaN to every new tensor, which deterministic algorithms bring along."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return deterministic and torch.utils.deterministic.fill_uninitialized_memory


class Compile(Remedy):
    """The models under torch.compile."""

    name, kind, rehearsed = "torch.compile", "last bit", True
    how = "model = torch.compile(model), once; every start of the training then takes seconds to minutes longer"

    def __init__(self, backend: str = "inductor"):
        self.backend = backend
        self._compiled: dict[nn.Module, object] = {}  # compiled once

    @staticmethod
    def why_not(driver: Driver) -> str | None:
        found = models(driver)
        if any("forward" in vars(m) for m in found):
            return "the model's forward has been replaced"
        if any(type(m).__name__ == "OptimizedModule" or m._compiled_call_impl is not None for m in found):
            return "the model is compiled already"
        if replicas(driver):
            return "the model is wrapped for several processes: compile it before"
        return None if found else "no module was called"

    def apply(self, driver: Driver) -> None:
        # Not model.compile(): it would compile the hooks of the instrument with it.
        for model in models(driver):
            if model not in self._compiled:
                self._compiled[model] = torch.compile(model.forward, backend=self.backend)
            model.forward = self._compiled[model]

    def undo(self, driver: Driver) -> None:
        for model in models(driver):
            del model.forward

    def changes(self, driver: Driver) -> list[Change]:
        return _new_line(driver, "{model} = torch.compile({model})")


def replicas(driver: Driver) -> list[DistributedDataParallel]:
    """Returns the models that exchange gradients between processes."""
    return [model for model in models(driver) if isinstance(model, DistributedDataParallel)]


class NoExchange(Remedy):
    """Every process keeps its own gradients: what would training cost if communication were free?"""

    def apply(self, driver: Driver) -> None:
        for model in replicas(driver):
            model.require_backward_grad_sync = False

    def undo(self, driver: Driver) -> None:
        for model in replicas(driver):
            model.require_backward_grad_sync = True


class Overlap(Remedy):
    """What lets DistributedDataParallel exchange gradients earlier and with fewer copies."""

    kind, outside = "bitwise", True

    def __init__(self, model: DistributedDataParallel):
        self.arguments = {} if model.gradient_as_bucket_view else {"gradient_as_bucket_view": True}
        if model.find_unused_parameters:
            self.arguments["find_unused_parameters"] = False
        self.name = f"DistributedDataParallel({', '.join(f'{k}={v}' for k, v in self.arguments.items())})"
        self.how = f"make it {self.name}; all parameters have to get gradients in every step"

    def changes(self, driver: Driver) -> list[Change]:
        names = ("DistributedDataParallel", "DDP")
        made = [(driver.instrument.sites.get(id(m)), names, type(m)) for m in replicas(driver)]
        found = [edit_call(*call, **self.arguments) for call in made]
        return [change for change in found if change]


class CudnnBenchmark(Remedy):
    """cuDNN tries its algorithms once per shape and keeps the fastest."""

    name, kind = "cudnn.benchmark", "last bit"
    how = "torch.backends.cudnn.benchmark = True, where the shapes stay the same"

    def apply(self, driver: Driver) -> None:
        torch.backends.cudnn.benchmark = True

    def undo(self, driver: Driver) -> None:
        torch.backends.cudnn.benchmark = False


class PinnedCopies(Remedy):
    """Batches from page-locked memory, copied while the device computes."""

    name, kind, on_loader = "pinned copies", "bitwise", True
    how = "give the DataLoader pin_memory=True and .to() or .cuda() non_blocking=True"

    def __init__(self, driver: Driver):
        self.source = LoaderSource(self.make(driver.loader))

    @staticmethod
    def make(loader: DataLoader) -> DataLoader:
        return clone_loader(loader, pin_memory=True)

    def apply(self, driver: Driver) -> None:
        def waiting_for_nobody(original):
            def wrapper(tensor, *args, **kwargs):
                if not tensor.is_cuda and not non_blocking(args, kwargs):
                    args, kwargs = with_non_blocking(args, kwargs)
                return original(tensor, *args, **kwargs)

            return wrapper

        self._undo = [wrap(Tensor, name, waiting_for_nobody) for name in ("to", "cuda")]

    def undo(self, driver: Driver) -> None:
        for undo in self._undo:
            undo()

    def changes(self, driver: Driver) -> list[Change]:
        change = edit_call(driver.instrument.sites.get(id(driver.loader)), ("DataLoader",), DataLoader, pin_memory=True)
        return [change] if change else []


def specification(remedy: Remedy) -> dict:
    """Returns what :func:`rebuild` needs to make the remedy again in another process."""
    arguments = {"number": remedy.threads} if isinstance(remedy, Threads) else getattr(remedy, "arguments", {})
    if isinstance(remedy, FusedOptimizer):
        arguments = {"ours": remedy.ours}
    return {"remedy": type(remedy).__name__, "arguments": arguments}


def rebuild(specification: dict, driver: Driver) -> Remedy:
    """Makes a remedy from its :func:`specification`."""
    cls = next(cls for cls in Remedy.__subclasses__() if cls.__name__ == specification["remedy"])
    needs_driver = cls in (Loader, NoDebugging, PinnedCopies, WholeBatches)
    return cls(*[driver] * needs_driver, **specification["arguments"])

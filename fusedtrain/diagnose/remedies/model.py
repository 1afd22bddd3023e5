"""Remedies for forward and backward: layout, layers, precision, compiling, the exchange between processes."""

import inspect
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from fusedtrain.diagnose.drive import Driver
from fusedtrain.diagnose.instrument import wrap
from fusedtrain.diagnose.lines import Change, edit_call
from fusedtrain.diagnose.remedies.remedy import Remedy, change_tensor, models, new_line
from fusedtrain.nn.fuse import fuse, unfuse


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
        return new_line(driver, "{model} = {model}.to(memory_format=torch.channels_last)")

    def _convert(self, driver: Driver, formats: list[tuple[Tensor, bool]]) -> None:
        for p, last in formats:
            memory_format = torch.channels_last if last else torch.contiguous_format
            change_tensor(driver, p, lambda tensor, to=memory_format: tensor.contiguous(memory_format=to))


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
        return new_line(driver, "fusedtrain.fuse({model})")


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
            change_tensor(driver, tensor, Tensor.float)

    def undo(self, driver: Driver) -> None:
        self._enter()
        for hook in self._hooks:
            hook.remove()
        for tensor, dtype in self._tensors:
            change_tensor(driver, tensor, lambda value, to=dtype: value.to(to))

    def changes(self, driver: Driver) -> list[Change]:
        site, function = driver.instrument.sites.get("autocast"), driver.instrument.autocast_class
        change = edit_call(site, ("autocast",), function, enabled=False)
        return [change] if change else []


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


OTHER_FLOATS = (torch.bfloat16, torch.float16, torch.float64)


def _cast(values, dtypes: tuple[torch.dtype, ...], to: torch.dtype):
    return tree_map(lambda x: x.to(to) if isinstance(x, Tensor) and x.dtype in dtypes else x, values)


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
        return new_line(driver, "{model} = torch.compile({model})")


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

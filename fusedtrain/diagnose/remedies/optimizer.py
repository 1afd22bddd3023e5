"""Remedies for the update of the weights."""

import inspect
import itertools
import sys

import torch
from torch import Tensor, nn

from fusedtrain import optim
from fusedtrain.diagnose.drive import Driver
from fusedtrain.diagnose.instrument import wrap
from fusedtrain.diagnose.lines import Change, edit_call
from fusedtrain.diagnose.remedies.remedy import Remedy, models
from fusedtrain.optim._fused import FusedStep


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

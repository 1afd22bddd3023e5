"""From the last backward pass of a group to zeroed gradients: normalise, unscale, check, clip, step."""

import math

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedtrain.optim._fused import FusedStep


class Update:
    """Applies the gathered gradients, unless they are not finite: then nothing changes, but the loss scale.

    An optimizer of ``fusedtrain.optim`` checks, clips and unscales within its own pass over memory; on a GPU nobody
    waits for its verdict (:attr:`late`). For others that is done here by torch's functions, and the CPU waits.

    Args:
        optimizer: any; the gradients are those of its parameters.
        scaler: of the loss, or None.
        max_grad_norm: the largest L2 norm of all gradients together; None does not clip.
    """

    def __init__(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None, max_grad_norm: float | None):
        self.optimizer, self.scaler, self.max_grad_norm = optimizer, scaler, max_grad_norm
        self.params = self._trained()
        self.fused = isinstance(optimizer, FusedStep)
        self.late = self.fused and self.params[0].device.type != "cpu"
        self._alike = self._are_alike()
        self._clears = type(optimizer).zero_grad is Optimizer.zero_grad
        kind = {"dtype": torch.float32, "device": self.params[0].device}  # whatever the default dtype is
        self._found, self._one = torch.zeros((), **kind), torch.ones((), **kind)
        self._sharded = None
        self._others: list[Tensor] = []
        self.norm: Tensor | None = None

    def take(self) -> None:
        """Sets the options of an optimizer of ``fusedtrain.optim`` for a run."""
        if not self.fused:
            return
        # Decided on the device; what was not finite is reported by the caller.
        self.optimizer._set_for_a_run(max_grad_norm=self.max_grad_norm, nonfinite="skip")
        if self.optimizer._options["max_grad_norm"] is None:
            self.optimizer._set_for_a_run(max_grad_norm=math.inf)

    def give_back(self) -> None:
        """Leaves the optimizer as it was constructed, but for the averages of its weights: they are looked at later."""
        if self.fused:
            self.optimizer._set_for_a_run(max_grad_norm=None, nonfinite=None)

    def _trained(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def look(self, model: nn.Module) -> None:
        """Notes the parameters of ``model`` that learn, but not by this optimizer."""
        own = {id(p) for p in self._trained()}
        for p in self._others:
            if id(p) in own:  # it has joined: what was added up before is not of its first update
                p.grad = None
        self._others = [p for p in model.parameters() if p.requires_grad and id(p) not in own]

    def _are_alike(self) -> bool:
        return len({(p.dtype, p.device) for p in self.params}) == 1

    def __call__(self, correction: float) -> bool | Tensor:
        """Multiplies the gradients by ``correction``, makes the step and returns whether it was applied; where that is
        known late, as a tensor."""
        before, self.params = len(self.params), self._trained()
        if len(self.params) != before:  # groups come and go, as layers are unfrozen
            self._alike = self._are_alike()
        if self._zeroes():  # zeros would move on what learns no longer, by momentum and decay
            for p in self.params:
                if not p.requires_grad:
                    p.grad = None
        grads = [p.grad for p in self.params if p.grad is not None]
        if correction != 1.0 and grads:
            torch._foreach_mul_(grads, correction)
        applied = self._plain(grads) if self.scaler is None else self._scaled()
        self._clear()
        return applied

    def _zeroes(self) -> bool:
        """Whether the optimizer leaves zeros in the gradients."""
        return self.fused and self.optimizer._options["zero_grads"]

    def _clear(self) -> None:
        if self._zeroes():
            return  # in the pass of the step
        if self._clears:
            for p in self.params:  # what zero_grad does, without its profiling
                p.grad = None
        else:
            self.optimizer.zero_grad()

    def discard(self) -> bool:
        """Throws the gradients away; returns False: nothing was applied."""
        self.optimizer.zero_grad(set_to_none=True)
        self.norm = None
        return False

    def _verdict(self) -> bool | Tensor:
        """Whether the optimizer itself, which skips what is not finite, has made its step."""
        self.norm = self.optimizer.grad_norm
        if self.norm is None:
            return True
        return self.norm.isfinite() if self.late else math.isfinite(self.norm)

    def _plain(self, grads: list[Tensor]) -> bool | Tensor:
        if self.fused:
            self.optimizer.step()
            return self._verdict()
        if not self._finite_and_clipped(grads):
            return False
        self.optimizer.step()
        return True

    def _finite_and_clipped(self, grads: list[Tensor]) -> bool:
        if self._sharded is None:
            self._sharded = any(hasattr(g, "full_tensor") for g in grads)
        if self.max_grad_norm is None and not self._sharded:
            # The check of GradScaler: one pass, no norm.
            real = [torch.view_as_real(g) if g.is_complex() else g for g in grads]
            for same in [real] if self._alike and grads else _by_kind(real):
                torch._amp_foreach_non_finite_check_and_unscale_(same, self._found, self._one)
            if not self._found:
                return True
            self._found.zero_()
            return False
        self.norm = nn.utils.get_total_norm(grads)
        if self._sharded:
            self.norm = self.norm.full_tensor()
        if not math.isfinite(self.norm):
            return False
        if self.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(
                [p for p in self.params if p.grad is not None], self.max_grad_norm, self.norm
            )
        return True

    def _scaled(self) -> bool | Tensor:
        if self.fused:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return self._verdict()
        before = self.scaler.get_scale()
        if self.max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            self.norm = nn.utils.clip_grad_norm_([p for p in self.params if p.grad is not None], self.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before


class Buffers:
    """The buffers of a model, such as running means, as they were before an update that is then left out. A layer may
    put another tensor in the place of one: ``self.mean = 0.9 * self.mean + 0.1 * x.mean()``."""

    def __init__(self, model: nn.Module):
        self._layers = [module._buffers for module in model.modules() if module._buffers]
        self._own, self._kept = [], []
        self.keep()

    def keep(self) -> None:
        self._places = [(layer, name) for layer in self._layers for name, own in layer.items() if own is not None]
        self._own = [layer[name] for layer, name in self._places]
        if [(own.shape, own.dtype) for own in self._own] != [(kept.shape, kept.dtype) for kept in self._kept]:
            self._kept = [own.clone() for own in self._own]
        elif self._own:
            torch._foreach_copy_(self._kept, self._own)

    def state(self) -> list[Tensor]:
        """What :meth:`keep` has kept."""
        return list(self._kept)

    def load(self, state: list[Tensor]) -> None:
        """Takes over what :meth:`state` has returned."""
        for kept, value in zip(self._kept, state):
            kept.copy_(value)

    def put_back(self, unless: bool | Tensor) -> None:
        """Undoes the changes unless the update was applied."""
        if isinstance(unless, Tensor):
            for (layer, name), kept in zip(self._places, self._kept):
                now = layer[name]
                if now is not None and now.shape == kept.shape:
                    now.copy_(torch.where(unless, now, kept))
        elif self._own and not unless:
            for (layer, name), own in zip(self._places, self._own):
                layer[name] = own
            torch._foreach_copy_(self._own, self._kept)


def _by_kind(grads: list[Tensor]) -> list[list[Tensor]]:
    kinds: dict = {}
    for g in grads:
        kinds.setdefault((g.dtype, g.device), []).append(g)
    return list(kinds.values())

"""Averages of the weights, kept by the optimizer's own pass where it offers that, else by one pass more.

A model in evaluation is its weights and its running statistics, which belong to the weights of their time. So
floating-point buffers that are saved are averaged alike, as timm and torchvision do.
"""

import contextlib

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedtrain.optim._fused import FusedStep
from fusedtrain.train.checkpoint_file import is_finite


class Averages:
    r"""Exponential moving averages :math:`e \leftarrow e + (1 - d)(p - e)` of the trainable parameters and of the
    buffers, in float32.

    Args:
        model: whose parameters and buffers are averaged.
        decay: :math:`d`.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay, self._model = decay, model
        saved = model.state_dict().keys()
        # Infinity in a buffer is no statistic, but a mask.
        self.buffers = {n: b for n, b in model.named_buffers() if n in saved and b.is_floating_point() and is_finite(b)}
        self.params: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}
        self.restart()

    def restart(self) -> None:
        """Begins anew with the parameters and buffers as they are."""
        self.values = {name: _copy(t) for name, t in (self.params | self.buffers).items()}
        self.join()

    def join(self) -> None:
        """Takes in parameters that have begun to learn."""
        for name, p in self._model.named_parameters():
            if p.requires_grad and name not in self.values:
                self.params[name], self.values[name] = p, _copy(p)

    @torch.no_grad()
    def update(self, applied: bool | Tensor = True) -> None:
        """Follows an update; a tensor: only the device knows whether it was applied."""
        for tensors in filter(None, (self.params, self.buffers)):
            values, own = [self.values[name] for name in tensors], [t.detach() for t in tensors.values()]
            if any(value.dtype != t.dtype for value, t in zip(values, own)):
                own = [t.to(value.dtype) for value, t in zip(values, own)]
            if not isinstance(applied, Tensor):
                torch._foreach_lerp_(values, own, 1 - self.decay)
            else:
                steps = torch._foreach_sub(own, values)
                torch._foreach_mul_(steps, applied * (1 - self.decay))
                torch._foreach_add_(values, steps)

    @contextlib.contextmanager
    def swap(self):
        """Within the ``with`` block parameters and buffers hold their averages."""
        tensors = self.params | self.buffers
        with torch.no_grad():
            own = [t.clone() for t in tensors.values()]
            for name, t in tensors.items():
                t.copy_(self.values[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for t, value in zip(tensors.values(), own):
                    t.copy_(value)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Goes on with the averages of ``state``; what has none in it begins anew."""
        params = dict(self._model.named_parameters())
        self.restart()
        for name in state.keys() & params.keys() - self.values.keys():  # it learnt then
            self.params[name], self.values[name] = params[name], _copy(params[name])
        for name, value in self.values.items():
            if name in state:
                value.copy_(state[name])


class OptimizersAverages(Averages):
    """The same, of parameters kept inside the step of a ``fusedtrain.optim`` optimizer, whose state holds them."""

    def __init__(self, optimizer: Optimizer, model: nn.Module):
        self._optimizer = optimizer
        super().__init__(model, optimizer._options["ema_decay"])

    def join(self) -> None:
        pass

    @contextlib.contextmanager
    def swap(self):
        with self._optimizer.swap_ema(), super().swap():
            yield

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by name, for who reads a checkpoint without an optimizer; in a file they stand once."""
        states = {name: self._optimizer.state.get(p, {}) for name, p in self._model.named_parameters()}
        return self.values | {name: state["ema"] for name, state in states.items() if "ema" in state}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict({name: value for name, value in state.items() if name in self.values})


def averages(model: nn.Module, optimizer: Optimizer, decay: float | None) -> Averages | None:
    """Returns what keeps the averages of a run, or None where there are none to keep."""
    if isinstance(optimizer, FusedStep):
        if decay is not None:
            optimizer._options["ema_decay"] = decay
        return None if optimizer._options["ema_decay"] is None else OptimizersAverages(optimizer, model)
    return None if decay is None else Averages(model, decay)


def _copy(t: Tensor) -> Tensor:
    return t.detach().to(torch.promote_types(t.dtype, torch.float32), copy=True)

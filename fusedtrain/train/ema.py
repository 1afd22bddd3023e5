"""Averages of the weights, kept by the optimizer's own pass where it offers that, else by one pass more.

Buffers, such as running means, stay the model's own, as in torch's AveragedModel. timm averages them too: they then
begin with what no batch had any part in, and on the digits runs of five times 1 / (1 - decay) updates still fail by it.
"""

import contextlib

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedtrain.optim._fused import FusedStep


class Averages:
    r"""Exponential moving averages :math:`e \leftarrow e + (1 - d)(p - e)` of the trainable parameters, in float32.

    Args:
        model: whose parameters are averaged.
        decay: :math:`d`.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay, self._model = decay, model
        self.params: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}
        self.join()

    def restart(self) -> None:
        """Begins anew with the parameters as they are."""
        self.values = {name: _copy(p) for name, p in self.params.items()}

    def join(self) -> None:
        """Takes in parameters that have begun to learn."""
        for name, p in self._model.named_parameters():
            if p.requires_grad and name not in self.values:
                self.params[name], self.values[name] = p, _copy(p)

    @torch.no_grad()
    def update(self) -> None:
        """Follows an update that was applied."""
        values, params = list(self.values.values()), [p.detach() for p in self.params.values()]
        if any(value.dtype != p.dtype for value, p in zip(values, params)):
            params = [p.to(value.dtype) for value, p in zip(values, params)]
        torch._foreach_lerp_(values, params, 1 - self.decay)

    @contextlib.contextmanager
    def swap(self):
        """Within the ``with`` block the parameters hold their averages."""
        with torch.no_grad():
            own = [p.clone() for p in self.params.values()]
            for p, value in zip(self.params.values(), self.values.values()):
                p.copy_(value)
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in zip(self.params.values(), own):
                    p.copy_(value)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Goes on with the averages of ``state``; what has none in it begins anew."""
        params = dict(self._model.named_parameters())
        self.params |= {name: params[name] for name in state if name in params}  # it has learnt then
        self.restart()
        for name, value in self.values.items():
            if name in state:
                value.copy_(state[name])


class OptimizersAverages:
    """The same, kept inside the step of a ``fusedtrain.optim`` optimizer, whose state holds them."""

    def __init__(self, optimizer: Optimizer, model: nn.Module):
        self._optimizer, self._model = optimizer, model

    def swap(self):
        return self._optimizer.swap_ema(self._model)

    def update(self) -> None:
        pass

    def restart(self) -> None:
        pass

    def join(self) -> None:
        pass

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by name, for who reads a checkpoint without an optimizer; in a file they stand once."""
        states = {name: self._optimizer.state.get(p, {}) for name, p in self._model.named_parameters()}
        return {name: state["ema"] for name, state in states.items() if "ema" in state}

    def load_state_dict(self, state: dict) -> None:
        pass


def averages(model: nn.Module, optimizer: Optimizer, decay: float | None) -> Averages | OptimizersAverages | None:
    """Returns what keeps the averages of a run, or None where there are none to keep."""
    if isinstance(optimizer, FusedStep):
        optimizer._set_for_a_run(ema_decay=decay)
        return None if optimizer._options["ema_decay"] is None else OptimizersAverages(optimizer, model)
    return None if decay is None else Averages(model, decay)


def _copy(p: Tensor) -> Tensor:
    return p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)

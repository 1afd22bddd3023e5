"""What every optimizer shares: gathering lists, states, and one call of the op per parameter group."""

import contextlib
from itertools import chain

import torch
from torch import Tensor

from fusedtrain.ops import _common, grad_norm, optimizer_step_
from fusedtrain.ops.optimizer_step import STATES

NONFINITE = ("propagate", "skip", "error")


class FusedStep(torch.optim.Optimizer):
    """An optimizer whose whole step is one pass over memory, after one more that computes the norm.

    A subclass calls :meth:`_set_options` in its constructor and defines :meth:`_update`. States stand under torch's
    names in ``self.state``, each in the memory format of its parameter; "ema" stands beside them.
    """

    # GradScaler then hands over its scale and what it found instead of a pass of its own.
    _step_supports_amp_scaling = True

    def _set_options(
        self, max_grad_norm: float | None, nonfinite: str, ema_decay: float | None, zero_grads: bool
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0.0:
            raise ValueError(f"max_grad_norm must be positive or None, got {max_grad_norm}")
        if nonfinite not in NONFINITE:
            raise ValueError(f"nonfinite must be one of {', '.join(NONFINITE)}, got {nonfinite!r}")
        if nonfinite != "propagate" and max_grad_norm is None:
            raise ValueError(
                f"nonfinite={nonfinite!r} needs the norm of the gradients: set max_grad_norm (inf: no limit)"
            )
        if ema_decay is not None and not 0.0 <= ema_decay < 1.0:
            raise ValueError(f"ema_decay must lie in [0, 1) or be None, got {ema_decay}")
        self._options = {
            "max_grad_norm": max_grad_norm,
            "nonfinite": nonfinite,
            "ema_decay": ema_decay,
            "zero_grads": zero_grads,
        }
        self._norm = self._norm_scale = None

    def _update(self, group: dict) -> dict:
        """Returns rule, coefficients and weight decay of :func:`optimizer_step_`, and ``names`` of the states."""
        raise NotImplementedError

    def _parts(self, group: dict, params: list[Tensor]) -> list[tuple[dict, list[Tensor]]]:
        """``params`` of one group, split where they take different hyperparameters."""
        return [(group, params)]

    # --- the step -----------------------------------------------------------------------------------------------------

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of the unscaled gradients before clipping at the last step, a float64 number on their device.

        None without ``max_grad_norm``. Reading the property does not wait for the device.
        """
        return self._norm if self._norm_scale is None else self._norm / self._norm_scale

    @torch.no_grad()
    def step(self, closure=None):
        """Takes one step; parameters without a gradient are left alone.

        Args:
            closure: computes the loss and its gradients again and returns the loss.

        Returns:
            What ``closure`` returns, or None.

        Raises:
            RuntimeError: a gradient is sparse or not on its parameter's device, or with ``nonfinite="error"`` the norm
                is not finite. Nothing was changed then.
            TypeError: a parameter is complex or its gradient has another dtype. Nothing was changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = []
        for group in self.param_groups:
            groups += self._parts(group, [p for p in group["params"] if p.grad is not None])
        groups = [(group, params) for group, params in groups if params]
        self._norm = self._norm_scale = None
        if groups:
            self._check(params for _, params in groups)
            self._step(groups)
        return loss

    def _check(self, lists) -> None:
        name, kinds = type(self).__name__, set()
        for p in chain.from_iterable(lists):
            g = p.grad
            kinds.add((p.dtype, g.dtype, g.layout, p.device, g.device))
        for dtype, grad_dtype, layout, _, _ in kinds:
            if layout != torch.strided:
                raise RuntimeError(f"{name} does not support sparse gradients")
            if dtype not in _common.DTYPES:
                raise TypeError(f"{name}: parameters must be float32, bfloat16, float16 or float64, got {dtype}")
            if grad_dtype != dtype:
                raise TypeError(f"{name}: a gradient of {grad_dtype} belongs to a parameter of {dtype}")
        devices = sorted({str(device) for kind in kinds for device in kind[3:]})
        if len(devices) > 1:
            raise RuntimeError(f"{name}: parameters and gradients must be on one device, got {', '.join(devices)}")

    def _step(self, groups: list[tuple[dict, list[Tensor]]]) -> None:
        options, copies = self._options, _Copies()
        grads = [[copies.grad(p) for p in params] for _, params in groups]
        device = grads[0][0].device
        scale, found_inf = (
            None if t is None else t.to(device=device, dtype=torch.float32)
            for t in (getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        )
        shared = {"zero_grads": options["zero_grads"], "grad_scale": scale, "found_inf": found_inf}
        if options["max_grad_norm"] is not None:
            self._norm, self._norm_scale = grad_norm(list(chain.from_iterable(grads))), scale
            if options["nonfinite"] == "error" and not self._norm.isfinite() and not found_inf:
                raise RuntimeError(f"{type(self).__name__}: the norm of the gradients is {self._norm.item()}")
            skip = options["nonfinite"] == "skip"
            shared |= {"norm": self._norm, "max_norm": options["max_grad_norm"], "skip_nonfinite": skip}
        for (group, params), own in zip(groups, grads):
            update = self._update(group)
            names = update.pop("names")
            states, steps, ema = self._states(params, names, STATES[update["rule"]] > 1)
            params = [copies.param(p) for p in params]
            lr, maximize = float(group["lr"]), group["maximize"]
            options_ema = {} if options["ema_decay"] is None else {"ema_decay": options["ema_decay"]}
            optimizer_step_(
                params, own, states, steps, ema, lr=lr, maximize=maximize, **update, **options_ema, **shared
            )
        copies.write_back(options["zero_grads"])

    def _states(self, params: list[Tensor], names: tuple[str, ...], counts: bool) -> tuple[list, list, list]:
        """The states in the order of the op, made or brought into the parameter's memory format where needed."""
        with_ema = self._options["ema_decay"] is not None
        columns, steps, ema = [[] for _ in names], [], []
        if not (names or counts or with_ema):
            return [], [], []  # and self.state stays empty, as in torch
        states = self.state
        for p in params:
            state, strides = states[p], p.stride()
            if counts:
                if "step" not in state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                steps.append(state["step"])
            for name, column in zip(names, columns):
                value = state.get(name)
                if value is None:
                    value = state[name] = torch.zeros_like(p)
                elif value.stride() != strides:
                    value = state[name] = _like(p, value)
                column.append(value)
            if with_ema:
                value = state.get("ema")
                if value is None or value.stride() != strides:
                    dtype = _common.acc_dtype(p)
                    value = state["ema"] = _like(p, p if value is None else value, dtype)
                ema.append(value)
        return list(chain.from_iterable(columns)), steps, ema

    # --- averaged weights ---------------------------------------------------------------------------------------------

    def _averages(self) -> dict[Tensor, Tensor]:
        if self._options["ema_decay"] is None:
            raise RuntimeError(f"{type(self).__name__} keeps no averages: construct it with ema_decay")
        return {p: state["ema"] for p, state in self.state.items() if "ema" in state}

    def ema_state_dict(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Returns ``model.state_dict()`` with the averages (copies) in place of the parameters this optimizer averages.

        Raises:
            RuntimeError: the optimizer was constructed without ``ema_decay``.
        """
        averages = self._averages()
        tensors = model.state_dict(keep_vars=True)
        return {
            name: (averages[t].to(t.dtype, copy=True) if t in averages else t.detach()) if isinstance(t, Tensor) else t
            for name, t in tensors.items()
        }

    @contextlib.contextmanager
    def swap_ema(self):
        """Within the ``with`` block the parameters hold their averages, e.g. for validation.

        Raises:
            RuntimeError: the optimizer was constructed without ``ema_decay``.
        """
        averages = self._averages()
        with torch.no_grad():
            own = {p: p.clone() for p in averages}
            for p, average in averages.items():
                p.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in own.items():
                    p.copy_(value)

    # --- saving and loading -------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads the state of this optimizer, or of its counterpart in torch.optim or timm."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, p in zip(saved, own):
            state, average = self.state.get(p, {}), state_dict["state"].get(index, {}).get("ema")
            if average is not None:  # torch has rounded it to the parameter's dtype
                state["ema"] = _like(p, average, _common.acc_dtype(p))
            if "step" in state:
                step = torch.as_tensor(state["step"], dtype=torch.float32, device=p.device)
                state["step"] = step.reshape(()).clone()

    def __getstate__(self):
        return super().__getstate__() | {"_options": self._options, "_norm": None, "_norm_scale": None}


def _like(p: Tensor, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``value`` in the strides that the op takes for ``p``: its own, or without the gaps."""
    return torch.empty_like(p, dtype=dtype or p.dtype, requires_grad=False).copy_(value)


def _is_dense(t: Tensor) -> bool:
    if t.is_contiguous() or (t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)):
        return True
    return torch.empty_like(t).stride() == t.stride()


class _Copies:
    """Stands in for tensors the op cannot take: parameters with gaps, gradients in another order of memory."""

    def __init__(self):
        self._params: list[tuple[Tensor, Tensor]] = []
        self._grads: list[Tensor] = []

    def grad(self, p: Tensor) -> Tensor:
        g = p.grad
        if g.stride() == p.stride() and _is_dense(g):
            return g
        self._grads.append(g)
        return _like(p, g)

    def param(self, p: Tensor) -> Tensor:
        if _is_dense(p):
            return p
        self._params.append((p, _like(p, p)))
        return self._params[-1][1]

    def write_back(self, zero_grads: bool) -> None:
        for p, copy in self._params:
            p.copy_(copy)
        if zero_grads and self._grads:
            torch._foreach_zero_(self._grads)

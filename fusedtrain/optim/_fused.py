"""What every optimizer shares: gathering lists, states, and one call of the op per parameter group."""

import contextlib
from collections.abc import Callable
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from fusedtrain.ops import _common, _tables, grad_norm, optimizer_step_
from fusedtrain.ops.optimizer_step import RULES

NONFINITE = ("propagate", "skip", "error")


class FusedStep(torch.optim.Optimizer):
    """An optimizer whose whole step is one pass over memory, after one more that computes the norm.

    A subclass calls :meth:`_set_options` in its constructor and defines :meth:`_rule`. States stand in ``self.state``
    under the names of the rule, each in the memory format of its parameter; "ema" stands beside them.
    """

    _initial: ClassVar[dict[str, float]] = {}  # what a new state is filled with, if not zeros
    _step_of_group = False  # updates are counted once per group, in group["step"], instead of per parameter
    _step_is_int = False  # they are saved as int, as the counterpart has them

    # GradScaler then hands over its scale and what it found instead of a pass of its own.
    _step_supports_amp_scaling = True

    def _set_options(
        self,
        max_grad_norm: float | None = None,
        nonfinite: str = "propagate",
        ema_decay: float | None = None,
        zero_grads: bool = False,
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

    def _rule(self, group: dict) -> dict:
        """Returns rule, coefficients and weight decay of :func:`optimizer_step_`."""
        raise NotImplementedError

    def _update(self, group: dict) -> dict:
        return {"lr": float(group["lr"]), "maximize": group.get("maximize", False), **self._rule(group)}

    def _refuse(self, **arguments: bool) -> None:
        for argument, value in arguments.items():
            if value:
                raise NotImplementedError(
                    f"fusedtrain.optim.{type(self).__name__} does not support {argument}=True; its counterpart does"
                )

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
            NotImplementedError: a parameter is a DTensor. Nothing was changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._norm = self._norm_scale = None
        tables = self._gather()
        if tables is None:
            groups = []
            for group in self.param_groups:
                groups += self._parts(group, [p for p in group["params"] if p.grad is not None])
            groups = [(group, params) for group, params in groups if params]
            if groups:
                self._check(params for _, params in groups)
                self._step_lists(groups)
        elif tables:
            shared = self._shared(tables[0][1].params[0].device, lambda: _tables.grad_norm([t for _, t in tables]))
            for options, table in tables:
                _tables.optimizer_step_(table, **options, **shared)
        return loss

    def _gather(self) -> list[tuple[dict, _tables.Table]] | None:
        """The options and the table of each group; None where the lists are to be taken, as at the first step."""
        if not _tables.usable():
            return None
        tables, ema = [], self._options["ema_decay"] is not None
        for group in self.param_groups:
            options = self._update(group)
            step = group.get("step") if self._step_of_group else "step"
            table = None if step is None else _tables.gather(group["params"], self.state, options["rule"], step, ema)
            if table is None:
                return None
            if table.params:
                tables.append((options, table))
        return tables

    def _check(self, lists) -> None:
        name, kinds = type(self).__name__, set()
        for p in chain.from_iterable(lists):
            g = p.grad
            if hasattr(p, "device_mesh"):
                raise NotImplementedError(f"{name} does not support DTensor parameters (FSDP2, tensor parallelism)")
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

    def _shared(self, device: torch.device, norm: Callable[[], Tensor]) -> dict:
        """The arguments of the op that all groups share; computes the norm where it is wanted."""
        options = self._options
        scale, found_inf = (
            None if t is None else t.to(device=device, dtype=torch.float32)
            for t in (getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        )
        shared = {"zero_grads": options["zero_grads"], "grad_scale": scale, "found_inf": found_inf}
        if options["ema_decay"] is not None:
            shared["ema_decay"] = options["ema_decay"]
        if options["max_grad_norm"] is not None:
            self._norm, self._norm_scale = norm(), scale
            if options["nonfinite"] == "error" and not self._norm.isfinite() and not found_inf:
                raise RuntimeError(f"{type(self).__name__}: the norm of the gradients is {self._norm.item()}")
            skip = options["nonfinite"] == "skip"
            shared |= {"norm": self._norm, "max_norm": options["max_grad_norm"], "skip_nonfinite": skip}
        return shared

    def _step_lists(self, groups: list[tuple[dict, list[Tensor]]]) -> None:
        copies = _Copies()
        grads = [[copies.grad(p) for p in params] for _, params in groups]
        shared = self._shared(grads[0][0].device, lambda: grad_norm(list(chain.from_iterable(grads))))
        for (group, params), own in zip(groups, grads):
            options = self._update(group)
            states, steps, ema = self._states(params, options["rule"], group)
            optimizer_step_([copies.param(p) for p in params], own, states, steps, ema, **options, **shared)
        copies.write_back(self._options["zero_grads"])

    def _states(self, params: list[Tensor], rule: str, group: dict) -> tuple[list, list, list]:
        """The states in the order of the op, made or brought into the parameter's memory format where needed."""
        info, with_ema = RULES[rule], self._options["ema_decay"] is not None
        columns, steps, ema = [[] for _ in info.states + info.scalars], [], []
        if info.counts and self._step_of_group:
            steps = [group.setdefault("step", _number(params[0]))] * len(params)
        counts = info.counts and not steps
        if not (columns or counts or with_ema):
            return [], steps, []  # and self.state stays empty, as in torch
        states = self.state
        for p in params:
            state, strides = states[p], p.stride()
            if counts:
                steps.append(state.setdefault("step", _number(p)))
            for name, column in zip(info.states + info.scalars, columns):
                value = state.get(name)
                if value is None and name in info.scalars:
                    value = state[name] = _number(p)
                elif value is None:
                    value = state[name] = torch.full_like(p, self._initial.get(name, 0.0), requires_grad=False)
                elif value.stride() != strides and name not in info.scalars:
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

    def state_dict(self) -> dict:
        """Returns what torch's or timm's counterpart returns, with "ema" beside its states."""
        saved = super().state_dict()
        if self._step_is_int:
            for group in saved["param_groups"]:
                group |= {"step": int(group["step"])} if "step" in group else {}
            saved["state"] = {
                key: state | {"step": int(state["step"])} if "step" in state else state
                for key, state in saved["state"].items()
            }
        return saved

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads the state of this optimizer, or of its counterpart in torch.optim or timm.

        Raises:
            NotImplementedError: a group was trained with ``caution=True``.
        """
        for group in state_dict["param_groups"]:
            self._refuse(caution=group.get("caution"))
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            if self._step_of_group and "step" in group and group["params"]:
                group["step"] = _number(group["params"][0], group["step"])
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, p in zip(saved, own):
            state, loaded = self.state.get(p, {}), state_dict["state"].get(index, {})
            if loaded.get("ema") is not None:  # torch has rounded it to the parameter's dtype
                state["ema"] = _like(p, loaded["ema"], _common.acc_dtype(p))
            for name, value in loaded.items():
                if name == "step" or (name in _SCALARS and torch.as_tensor(value).dim() == 0 < p.dim()):
                    state[name] = _number(p, value)

    def __getstate__(self):
        return super().__getstate__() | {"_options": self._options, "_norm": None, "_norm_scale": None}


_SCALARS = {name for rule in RULES.values() for name in rule.scalars}


def _number(p: Tensor, value: float | Tensor = 0.0) -> Tensor:
    """A float32 number on the device of ``p``, in memory of its own."""
    return torch.as_tensor(value).detach().to(device=p.device, dtype=torch.float32, copy=True).reshape(())


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
        if g.stride() == p.stride() and _is_dense(g) and not g.is_neg():
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


# --- arguments of timm's optimizers -----------------------------------------------------------------------------------


def check_arguments(betas: tuple[float, ...] = (), **nonnegative: float) -> None:
    """Raises ValueError, in torch's words, for a negative argument or a bad beta; names are given with underscores."""
    for name, value in nonnegative.items():
        if not value >= 0.0:
            raise ValueError(f"Invalid {name.replace('_', ' ')}: {value}")
    for i, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")


def max_lr_snapshot(lr: float | Tensor, corrected_weight_decay: bool) -> float:
    """The learning rate of the constructor, which corrected weight decay takes for the largest one."""
    if corrected_weight_decay and not float(lr) > 0.0:
        raise ValueError(f"corrected_weight_decay needs a positive learning rate at construction, got {float(lr)}")
    return float(lr)


def corrected_decay(group: dict) -> float:
    """The weight decay whose product with lr is ``lr**2 / max_lr * weight_decay`` where that is asked for."""
    decay = float(group["weight_decay"])
    if group.get("corrected_weight_decay"):
        decay *= float(group["lr"]) / group["max_lr_snapshot"]
    return decay

"""What every optimizer shares: gathering lists, states, and one call of the op per parameter group."""

import contextlib
import warnings
from collections.abc import Callable, Iterable
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import _get_capturable_supported_devices

from fusedtrain.ops import _codes, _common, _narrow, _tables, optimizer_step_
from fusedtrain.ops.optimizer_step import RULES, SUMMED, SUMS, is_signed
from fusedtrain.optim._sharded import add_up, is_sharded, local, reshard, spread, total_norm

NONFINITE = ("propagate", "skip", "error")
STATE_DTYPES = (None, torch.float32, torch.bfloat16, "8bit")
MIN_CODED = 4096  # elements; the states of smaller parameters stay in float32, as in bitsandbytes


class FusedStep(torch.optim.Optimizer):
    """An optimizer whose whole step is one pass over memory, after one more that computes the norm.

    A subclass calls :meth:`_set_options` in its constructor and defines :meth:`_rule`. States stand in ``self.state``
    under the names of the rule, each in the memory format of its parameter; "ema" stands beside them.
    """

    _initial: ClassVar[dict[str, float]] = {}  # what a new state is filled with, if not zeros
    _betas = 2  # how many, where there are some
    _step_of_group = False  # updates are counted once per group, in group["step"], instead of per parameter
    _step_is_int = False  # they are saved as int, as the counterpart has them
    _numbers: ClassVar[tuple[str, ...]] = ()  # states that are one number per parameter, beside "step"

    # GradScaler then hands over its scale and what it found instead of a pass of its own.
    _step_supports_amp_scaling = True

    def _set_options(
        self,
        capturable: bool = False,
        /,  # by name it is an argument that most optimizers do not have
        max_grad_norm: float | None = None,
        nonfinite: str = "propagate",
        ema_decay: float | None = None,
        zero_grads: bool = False,
        state_dtype: torch.dtype | str | None = None,
        rounding: str = "nearest",
        master_weights: bool = False,
        seed: int = 0,
        **unknown,
    ) -> None:
        for name in unknown:  # in the words of Python, which would name this method
            raise TypeError(f"{type(self).__name__}.__init__() got an unexpected keyword argument {name!r}")
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
        if state_dtype not in STATE_DTYPES:
            raise ValueError(f"state_dtype must be one of {', '.join(map(str, STATE_DTYPES))}, got {state_dtype!r}")
        _codes.code("rounding", rounding, _codes.ROUNDINGS)
        if master_weights and rounding != "nearest":
            raise ValueError(f"master_weights=True leaves nothing to rounding={rounding!r}: use one of them")
        if capturable and nonfinite == "error":
            raise ValueError("capturable=True goes with nonfinite='propagate' or 'skip': 'error' waits for the device")
        number = _common.whole(seed)
        if number is None or not 0 <= number < 2**31:
            raise ValueError(f"seed must be an integer in [0, 2**31), got {seed!r}")
        self._options = {
            "max_grad_norm": max_grad_norm,
            "nonfinite": nonfinite,
            "ema_decay": ema_decay,
            "zero_grads": zero_grads,
            "state_dtype": state_dtype,
            "rounding": rounding,
            "master_weights": master_weights,
            "seed": number,
        }
        self._given = dict(self._options)
        self._norm = self._norm_scale = None

    def _check_betas(self, betas: tuple) -> None:
        if len(betas) != self._betas:
            raise ValueError(f"{type(self).__name__} takes {self._betas} betas, got {betas}")

    def add_param_group(self, param_group: dict) -> None:
        own = param_group if isinstance(param_group, dict) else {}
        for name, value in self._options.items():  # ZeroRedundancyOptimizer tells every group all arguments
            if name not in self.defaults and own.get(name, value) != value:
                raise ValueError(f"{type(self).__name__}: {name} is of all groups together, and no option of one")
        if "betas" in self.defaults:
            self._check_betas(own.get("betas", self.defaults["betas"]))
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        if len(set(params)) < len(params):
            self.param_groups.pop()
            raise ValueError(f"{type(self).__name__}: a parameter stands twice in a group; give each of them once")
        if not self._exact and self._options["rounding"] == "nearest":
            self._warn_of_lost_updates()

    def _warn_of_lost_updates(self) -> None:
        narrow = {p.dtype for p in self.param_groups[-1]["params"] if p.requires_grad} & {*_narrow.ROUNDED}
        for dtype in sorted(narrow, key=str):
            lost = f"parameters in {dtype} lose every update below {torch.finfo(dtype).eps / 2:g} of their size"
            kept = "rounding='stochastic' or 'kahan', or master_weights=True, keeps them"
            warnings.warn(f"{type(self).__name__}: {lost}; {kept}", stacklevel=2)

    def _set_for_a_run(self, **options) -> None:
        """Changes options after construction; None stands for what the constructor was given."""
        for name, value in options.items():
            self._options[name] = self._given[name] if value is None else value

    def _init_like_timm(self, arguments: dict) -> None:
        """The constructor of a subclass with timm's arguments, by its ``locals()``; errors are in torch's words."""
        defaults = {name: value for name, value in arguments.items() if name not in _NOT_DEFAULTS}
        for name, words in _NONNEGATIVE.items():
            if name in defaults and not defaults[name] >= 0.0:
                raise ValueError(f"Invalid {words}: {defaults[name]}")
        for i, beta in enumerate(defaults.get("betas", ())):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
        own = {"max_grad_norm": defaults["max_grad_norm"]} if "max_grad_norm" in defaults else {}
        self._set_options(**own, **arguments["extras"])
        if "corrected_weight_decay" in defaults:  # takes the learning rate given here for the largest one
            lr = defaults["max_lr_snapshot"] = float(defaults["lr"])
            if defaults["corrected_weight_decay"] and not lr > 0.0:
                raise ValueError(f"corrected_weight_decay needs a positive learning rate at construction, got {lr}")
        super().__init__(arguments["params"], defaults)

    def _rule(self, group: dict) -> dict:
        """Returns rule, coefficients and weight decay of :func:`optimizer_step_`."""
        raise NotImplementedError

    def _update(self, group: dict) -> dict:
        """The arguments of the op for one group, whose values may have been set since: what is none fails here."""
        lr = group["lr"]
        if "betas" in group:
            self._check_betas(group["betas"])
        if not isinstance(lr, Tensor) or lr.device.type == "cpu":
            lr = float(lr)
        return {"lr": lr, "maximize": bool(group.get("maximize", False)), **self._rule(group)}

    def _refuse(self, **arguments: bool) -> None:
        for argument, value in arguments.items():
            if value:
                raise NotImplementedError(
                    f"fusedtrain.optim.{type(self).__name__} does not support {argument}=True; its counterpart does"
                )

    @property
    def _exact(self) -> str | None:
        """The name of what a parameter in 16 bits is exactly, or lacks."""
        kahan = "compensation" if self._options["rounding"] == "kahan" else None
        return "master" if self._options["master_weights"] else kahan

    @property
    def _narrow(self) -> bool:
        """Whether anything is stored in fewer bits than it is computed; else states are in their parameter's dtype."""
        options = self._options
        return options["state_dtype"] is not None or options["rounding"] != "nearest" or options["master_weights"]

    def _extra_states(self) -> set[str]:
        """What is kept beside the states."""
        return {self._exact, None if self._options["ema_decay"] is None else "ema"} - {None}

    def _stored(self, index: int) -> dict:
        """What the op takes beside for the group of that index."""
        options, group = self._options, self.param_groups[index]
        if not self._narrow:
            return {}
        if "rounding_seed" not in group:
            group["rounding_seed"] = _narrow.split_mix(options["seed"] + (index << 32)) >> 2
        if not group.get("capturable"):  # else counts of steps tell steps apart: a graph keeps its arguments
            group["rounding_seed"] += 1
        return {"rounding": options["rounding"], "seed": group["rounding_seed"]}

    def _first_state(self, group: dict) -> str | None:
        """The state by which a parameter's first step, which differs from the others, is known; it has none before."""
        return None

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
        """Takes one step; parameters without a gradient are left alone, but their averages (``ema_decay``) go on.

        Args:
            closure: computes the loss and its gradients again and returns the loss.

        Returns:
            What ``closure`` returns, or None.

        Raises:
            RuntimeError: a gradient is sparse or not on its parameter's device, a parameter is expanded, or with
                ``nonfinite="error"`` the norm is not finite. Nothing was changed then.
            TypeError: a parameter is complex or its gradient has another dtype. Nothing was changed then.
            ValueError: a parameter has got another shape than its states, or a group other numbers than its rule takes.
                Nothing was changed then.
            NotImplementedError: a gradient is not on the mesh of its DTensor. Nothing was changed then.
            AssertionError: with ``capturable`` parameters are on a device without graphs, as in torch.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take()
        return loss

    @torch._disable_dynamo  # nothing in it is left to compile
    def _take(self) -> None:
        self._norm = self._norm_scale = None
        tables = self._gather()
        found_inf = getattr(self, "found_inf", None)
        # GradScaler adds up what the devices with gradients have found: without any it has the number 0.
        found_inf = found_inf if isinstance(found_inf, Tensor) else None
        shared, grads = {"found_inf": found_inf}, []
        if tables is None:
            groups = []
            for index, group in enumerate(self.param_groups):
                parts = self._parts(group, [p for p in group["params"] if p.grad is not None])
                groups += [(index, part, params) for part, params in parts if params]
            if groups:
                self._check(params for _, _, params in groups)
                shared = self._step_lists(groups)
            grads = [p.grad for _, _, params in groups for p in params]
        elif tables:
            device = tables[0][-1].params[0].device
            shared = self._shared(device, lambda: _tables.grad_norm([table for _, _, table in tables]))
            for index, options, table in tables:
                _tables.optimizer_step_(table, **options, **shared, **self._stored(index))
                grads += table.grads
        if self._options["zero_grads"]:
            for g in grads:
                if g.requires_grad:  # of backward(create_graph=True); as zero_grad does it
                    g.detach_()
        if len(grads) < sum(len(group["params"]) for group in self.param_groups):
            self._go_on(**shared)

    def _gather(self) -> list[tuple[int, dict, _tables.Table]] | None:
        """The index, options and table of each group; None where the lists are to be taken, as at the first step."""
        if not _tables.usable():
            return None
        tables, exact = [], self._exact
        beside = self._narrow, self._options["ema_decay"] is not None, exact, exact == "compensation"
        for index, group in enumerate(self.param_groups):
            options = self._update(group)
            step = group.get("step") if self._step_of_group else "step"
            if step is None:
                return None
            table = _tables.gather(list(group["params"]), self.state, options["rule"], step, *beside)
            if table is None:
                return None
            if table.params:
                tables.append((index, options, table))
        devices = {table.params[0].device for _, _, table in tables}
        if len(devices) > 1 or not all(map(self._may_capture, devices)):
            return None
        return tables

    def _may_capture(self, device: torch.device) -> bool:
        """False where a step on that device is refused for what ``capturable`` says: see :meth:`_check`."""
        capturable = [group["capturable"] for group in self.param_groups if "capturable" in group]
        if device.type == "cpu":
            return not any(capturable)
        return all(capturable) or not torch.cuda.is_current_stream_capturing()

    def _check(self, lists) -> None:
        name, kinds, params = type(self).__name__, set(), list(chain.from_iterable(lists))
        for p in params:
            g = p.grad
            if is_sharded(p) and (not is_sharded(g) or g.device_mesh != p.device_mesh):
                mesh = g.device_mesh if is_sharded(g) else "no mesh"
                raise NotImplementedError(f"{name}: a gradient on {mesh} belongs to a DTensor on {p.device_mesh}")
            kinds.add((p.dtype, g.dtype, g.layout, p.device, g.device))
        for dtype, grad_dtype, layout, _, _ in kinds:
            if layout != torch.strided:
                raise RuntimeError(f"{name} does not support sparse gradients")
            if dtype not in _common.DTYPES:
                raise TypeError(f"{name}: parameters must be float32, bfloat16, float16 or float64, got {dtype}")
            if dtype == torch.float64 and self._options["state_dtype"] is not None:
                raise TypeError(f"{name}: state_dtype={self._options['state_dtype']} is not for parameters in float64")
            if grad_dtype != dtype:
                raise TypeError(f"{name}: a gradient of {grad_dtype} belongs to a parameter of {dtype}")
        for p in params:
            self._check_shapes(p, self.state.get(p, {}))
            if torch._debug_has_internal_overlap(local(p)) == 1:  # that is to say yes
                shape = f"got one of shape {list(p.shape)} and strides {p.stride()}"
                raise RuntimeError(f"{name}: elements of a parameter must not share memory (expand), {shape}; clone it")
        devices = sorted({str(device) for kind in kinds for device in kind[3:]})
        if len(devices) > 1:
            raise RuntimeError(f"{name}: parameters and gradients must be on one device, got {', '.join(devices)}")
        capturable = [group["capturable"] for group in self.param_groups if "capturable" in group]
        able = _get_capturable_supported_devices()
        if any(capturable) and devices[0].split(":")[0] not in able:
            raise AssertionError(f"If capturable=True, params and state_steps must be on supported devices: {able}.")
        if not all(capturable) and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{name}: to capture step() in a CUDA graph construct it with capturable=True")

    def _check_shapes(self, p: Tensor, state: dict, words: str = "") -> None:
        """Those of ``state`` that are in use and not like ``p``: one of a row would be spread over all rows."""
        names = (_STATES | self._extra_states()) - {*self._numbers}
        for name, value in state.items():
            if name in names and value is not None and value.shape != p.shape:
                shapes = f"of shape {list(value.shape)} is not of a parameter of shape {list(p.shape)}"
                raise ValueError(f"{type(self).__name__}: the {words}{name} {shapes}")

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
            stops = options["nonfinite"] == "error" and _has_values(self._norm)
            if stops and not self._norm.isfinite() and not found_inf:
                raise RuntimeError(f"{type(self).__name__}: the norm of the gradients is {self._norm.item()}")
            skip = options["nonfinite"] == "skip"
            shared |= {"norm": self._norm, "max_norm": options["max_grad_norm"], "skip_nonfinite": skip}
        return shared

    def _step_lists(self, groups: list[tuple[int, dict, list[Tensor]]]) -> dict:
        """Takes the step, and returns the arguments of the op that all groups share."""
        copies = _Copies()
        grads = [[copies.grad(p) for p in params] for _, _, params in groups]
        params = chain.from_iterable(params for _, _, params in groups)
        options = [self._update(group) for _, group, _ in groups]
        shared = self._shared(grads[0][0].device, lambda: total_norm(params, list(chain.from_iterable(grads))))
        stored = {index: self._stored(index) for index, _, _ in groups}
        begun = [
            (p, name)
            for index, _, params in groups
            if (name := self._first_state(self.param_groups[index])) is not None
            for p in params
            if self.state.get(p, {}).get(name) is None
        ]
        left_out = True
        try:
            # All memory first: without it the step fails as a whole.
            lists = [self._states(params, own["rule"], group) for (_, group, params), own in zip(groups, options)]
            params = [[copies.param(p) for p in params] for _, _, params in groups]
            for group, *own in zip(groups, params, grads, lists, options):
                self._step_list(*own, group[-1], stored[group[0]] | shared)
            copies.write_back(self._options["zero_grads"])
            left_out = bool(begun) and _is_left_out(**shared)
        finally:
            for p, name in begun if left_out else ():
                state = self.state.get(p, {})
                state.pop(name, None)
                state.pop(f"{name}_scale", None)
        return shared

    def _step_list(self, params: list, grads: list, lists: dict, options: dict, whole: list, shared: dict) -> None:
        """The step of a group; ``whole`` are the parameters of which ``params`` are this rank's parts."""
        lists = {name: [local(t) for t in tensors] for name, tensors in lists.items()}
        if options["rule"] in SUMMED and any(map(is_sharded, whole)):
            shared["sums"] = params[0].new_zeros((len(params), SUMS), dtype=torch.float64)
            optimizer_step_(params, grads, **lists, **options, **shared, sums_only=True)
            add_up(whole, shared["sums"])
        optimizer_step_(params, grads, **lists, **options, **shared)

    def _go_on(
        self, found_inf: Tensor | None = None, norm: Tensor | None = None, skip_nonfinite: bool = False, **_
    ) -> None:
        """What goes on without a gradient unless the step is left out: averages of parameters, counts of groups."""
        taken = None if found_inf is None else found_inf.view(()) == 0
        if skip_nonfinite:
            taken = norm.isfinite() if taken is None else taken & norm.isfinite()
        for group in self.param_groups:
            others = [p for p in group["params"] if p.grad is None]
            if self._options["ema_decay"] is not None:
                self._average(others, taken)
            if self._step_of_group and others and len(others) == len(group["params"]):
                step = _kept(group, "step", others[0])
                step += 1 if taken is None else taken.to(step.device)

    def _average(self, params: list[Tensor], taken: Tensor | None) -> None:
        weight = 1 - self._options["ema_decay"]
        for p in params:
            state = self.state.get(p, {})
            if "ema" in state:
                average, exact = local(state["ema"]), local(p)
                if self._exact == "master" and "master" in state:  # as the op does: p may have been set since
                    master = local(state["master"])
                    exact = torch.where(master.to(p.dtype) == exact, master, exact)
                moved = average.lerp(exact.to(average.dtype), weight)
                average.copy_(moved if taken is None else torch.where(taken, moved, average))

    def _states(self, params: list[Tensor], rule: str, group: dict) -> dict[str, list]:
        """The states in the order of the op, made or brought into the memory format and dtype that they ask for."""
        info, with_ema, exact = RULES[rule], self._options["ema_decay"] is not None, self._exact
        columns, steps, ema, exacts = [[] for _ in info.states + info.scalars], [], [], []
        scales = [[] for _ in info.states] if self._options["state_dtype"] == "8bit" else []
        none = torch.empty(0, device="cpu")  # made anew: under FakeTensorMode it is a fake
        if info.counts and self._step_of_group:
            steps = [_kept(group, "step", params[0])] * len(params)
        counts = info.counts and not steps
        if not (columns or counts or with_ema or exact):
            return {"states": [], "steps": steps}  # and self.state stays empty, as in torch
        for p in params:
            state, strides = self.state[p], _strides(p)
            if counts:
                steps.append(_kept(state, "step", p))
            for name, column in zip(info.scalars, columns[len(info.states) :]):
                column.append(_kept(state, name, p))
            for name, column in zip(info.states, columns):
                value = state.get(name)
                if value is None:
                    self._set_state(p, name, torch.full_like(p, self._initial.get(name, 0.0), requires_grad=False))
                elif local(value).stride() != strides or _is_of_other_width(value, p, self._narrow):
                    self._set_state(p, name, _plain(state, name))
                column.append(state[name])
            for name, column in zip(info.states, scales):
                column.append(state.get(f"{name}_scale", none))
            if with_ema:
                ema.append(_beside(state, p, strides, "ema", _common.acc_dtype(p)))
            if exact:
                needed = p.dtype in _narrow.ROUNDED
                dtype = torch.float32 if exact == "master" else p.dtype
                exacts.append(_beside(state, p, strides, exact, dtype) if needed else none)
        states, scales = list(chain.from_iterable(columns)), list(chain.from_iterable(scales))
        return {"states": states, "steps": steps, "ema": ema, "exact": exacts, "scales": scales}

    def _set_state(self, p: Tensor, name: str, value: Tensor) -> None:
        """Keeps ``value`` as a state, in the strides that the op takes for ``p`` and as ``state_dtype`` has it."""
        state, dtype = self.state[p], self._options["state_dtype"]
        state.pop(f"{name}_scale", None)
        if dtype is None:
            dtype = torch.float32 if self._options["master_weights"] and p.dtype in _narrow.ROUNDED else p.dtype
        elif dtype == "8bit":
            dtype = torch.float32 if p.numel() < MIN_CODED else torch.uint8
        if dtype == torch.uint8:
            codes = state[name] = torch.empty_like(p, dtype=dtype, requires_grad=False)
            own = local(codes)
            scale = state[f"{name}_scale"] = own.new_empty(_narrow.blocks(own.numel()), dtype=torch.float32)
            _narrow.encode_(own, scale, local(value), is_signed(name))
        else:
            state[name] = _like(p, value, dtype)

    # --- averaged weights ---------------------------------------------------------------------------------------------

    def _averages(self) -> dict[Tensor, Tensor]:
        if self._options["ema_decay"] is None:
            raise RuntimeError(f"{type(self).__name__} keeps no averages: construct it with ema_decay")
        return {p: state["ema"] for p, state in self.state.items() if "ema" in state}

    def ema_state_dict(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Returns ``model.state_dict()`` with the averages (copies) in place of the parameters this optimizer averages;
        buffers, such as the running means of norms, are the model's own.

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
    def swap_ema(self, model: torch.nn.Module | None = None):
        """Within the ``with`` block the parameters hold their averages, e.g. for validation; buffers, such as the
        running means of norms, stay: ``torch.optim.swa_utils.update_bn`` makes those of the averages.

        Args:
            model: whose the parameters are; needed where they are DTensors, of which FSDP2 may have gathered the whole.

        Raises:
            RuntimeError: the optimizer was constructed without ``ema_decay``.
            ValueError: parameters are DTensors, and no model is given.
        """
        averages = self._averages()
        sharded = any(map(is_sharded, averages))
        if sharded and model is None:
            raise ValueError("swap_ema: parameters are DTensors, so give their model: swap_ema(model)")
        own = {p: p.detach().clone() for p in averages}
        try:
            _set(averages, model if sharded else None)
            yield
        finally:
            _set(own, model if sharded else None)

    # --- saving and loading -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """Returns what torch's or timm's counterpart returns, with "ema", "master" or "compensation" beside its states.

        States in 8 bits are returned in float32.
        """
        first = self.register_state_dict_post_hook(FusedStep._as_saved, prepend=True)  # those of the user see its work
        try:
            return super().state_dict()
        finally:
            first.remove()

    def _as_saved(self, saved: dict) -> None:
        """Makes of what torch has gathered what the counterpart's state dict holds."""
        saved["state"] = {
            key: {name: _plain(state, name) for name in state if not name.endswith("_scale")}
            for key, state in saved["state"].items()
        }
        if self._step_is_int:
            for group in saved["param_groups"]:
                group |= {"step": int(group["step"])} if "step" in group else {}
            saved["state"] = {
                key: state | {"step": int(state["step"])} if "step" in state else state
                for key, state in saved["state"].items()
            }

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads the state of this optimizer, or of its counterpart in torch.optim or timm.

        Raises:
            ValueError: the groups, or a state's shape, are not those of the parameters. After any error, a hook's too,
                nothing is changed.
        """
        found: list[dict] = []
        own = {"state": self.state, "param_groups": self.param_groups}  # torch puts others in their place
        # Between the hooks of the user: what the last of those before has made of the state is what counts.
        last = self.register_load_state_dict_pre_hook(lambda _, saved: found.append(self._checked(saved)))
        first = self.register_load_state_dict_post_hook(lambda _: self._restore(found[-1]), prepend=True)
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            vars(self).update(own)
            raise
        finally:
            last.remove()
            first.remove()

    def _by_parameter(self, state_dict: dict) -> Iterable[tuple[Tensor, dict]]:
        """The parameters, and what is saved of each."""
        saved, own = (chain.from_iterable(g["params"] for g in s["param_groups"]) for s in (state_dict, vars(self)))
        return ((p, state_dict["state"].get(index, {})) for index, p in zip(saved, own))

    def _checked(self, state_dict: dict) -> dict:
        """``state_dict``, once its shapes are those of the parameters; of other groups torch says what is wrong."""
        sizes, own = ([len(g["params"]) for g in s["param_groups"]] for s in (state_dict, vars(self)))
        for p, loaded in self._by_parameter(state_dict) if sizes == own else ():
            self._check_shapes(p, loaded, "loaded ")
        return state_dict

    def _restore(self, state_dict: dict) -> None:
        """Takes again, as it was saved, what torch has rounded to the dtypes of the parameters."""
        for group in self.param_groups:
            if self._step_of_group and "step" in group and group["params"]:
                group["step"] = _number(group["params"][0], group["step"])
        extra = self._extra_states()
        for p, loaded in self._by_parameter(state_dict):
            state = self.state.get(p, {})
            for name, value in loaded.items():  # torch has rounded them to the parameter's dtype
                if name == "step" or name in self._numbers:
                    state[name] = _number(p, value)
                    continue
                if value is None or (name not in _BESIDE and name not in _STATES):
                    continue
                if name in _BESIDE and name not in extra:  # nobody goes on with it: it would be of long ago one day
                    state.pop(name, None)
                    continue
                if name in _BESIDE:
                    state[name] = _like(p, value, p.dtype if name == "compensation" else _common.acc_dtype(p))
                else:
                    self._set_state(p, name, value)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        legacy = {name: value for name, value in _LEGACY.items() if name in self.defaults}
        if "max_lr_snapshot" in self.defaults:
            legacy["max_lr_snapshot"] = self.defaults["max_lr_snapshot"]
        for group in self.param_groups:
            for name, value in legacy.items():
                group.setdefault(name, value)

    def __getstate__(self):
        options = {"_options": self._options, "_given": self._given}
        return super().__getstate__() | options | {"_norm": None, "_norm_scale": None}


_NOT_DEFAULTS = ("self", "params", "extras", "__class__")
_NONNEGATIVE = {
    "lr": "learning rate",
    "eps": "epsilon value",
    "momentum": "momentum value",
    "weight_decay": "weight decay value",
    "alpha": "alpha value",
}
# What groups lack that an older timm has saved, as timm completes them.
_LEGACY = {
    **dict.fromkeys(("caution", "decoupled_decay", "corrected_weight_decay", "no_prox", "amsgrad", "centered"), False),
    "maximize": False,
    "momentum": 0.0,
    "foreach": None,
}
_STATES = {name for rule in RULES.values() for name in rule.states}
_BESIDE = ("ema", "master", "compensation")


def _number(p: Tensor, value: float | Tensor = 0.0) -> Tensor:
    """A float32 number on the device of ``p``, in memory of its own."""
    return torch.as_tensor(value, dtype=torch.float32, device=p.device).detach().clone().reshape(())


def _kept(state: dict, name: str, p: Tensor) -> Tensor:
    """The number of that name, made where it is missing: on a GPU that waits, and cannot be captured."""
    value = state.get(name, 0.0)
    # ZeroRedundancyOptimizer takes states as they were saved, and users put in what torch takes, too.
    if not isinstance(value, Tensor) or (value.dtype, value.device) != (torch.float32, p.device):
        value = state[name] = _number(p, value)
    return value


def _strides(p: Tensor) -> tuple[int, ...]:
    """The strides that the op takes for ``p`` and what belongs to it: its own, or without the gaps."""
    p = local(p)
    return p.stride() if _common.is_dense(p) else torch.empty_like(p).stride()


def _like(p: Tensor, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``value`` in the strides that the op takes for ``p``."""
    return torch.empty_like(p, dtype=dtype or p.dtype, requires_grad=False).copy_(value)


def _plain(state: dict, name: str) -> Tensor:
    """A state, in float32 where it is kept in 8 bits."""
    scale = state.get(f"{name}_scale")
    if scale is None:
        return state[name]
    value = _narrow.decode(local(state[name]), scale, is_signed(name))
    return spread(value, state[name]) if is_sharded(state[name]) else value


def _is_of_other_width(state: Tensor, p: Tensor, narrow: bool) -> bool:
    """As after ``model.double()`` or ``model.bfloat16()``; with ``narrow`` other states than float64's may be kept."""
    return state.dtype != p.dtype and (not narrow or torch.float64 in (state.dtype, p.dtype))


def _beside(state: dict, p: Tensor, strides: tuple[int, ...], name: str, dtype: torch.dtype) -> Tensor:
    """What is kept beside the states, made or brought into the memory format, and dtype, that ``p`` asks for."""
    value = state.get(name)
    if value is None or local(value).stride() != strides or value.dtype != dtype:
        begin = torch.zeros_like(p) if name == "compensation" else p
        value = state[name] = _like(p, begin if value is None else value, dtype)
    return value


@torch.no_grad()
def _set(values: dict[Tensor, Tensor], model: torch.nn.Module | None) -> None:
    """Gives parameters these values; ``model`` is what may have gathered them."""
    for p, value in values.items():
        p.copy_(value)
    if model is not None:
        reshard(model)


def _is_left_out(found_inf: Tensor | None, norm: Tensor | None = None, skip_nonfinite: bool = False, **_) -> bool:
    """Whether a step has changed nothing; waits for the device."""
    if not all(t is None or _has_values(t) for t in (found_inf, norm)):
        return False
    return (found_inf is not None and bool(found_inf)) or (skip_nonfinite and not bool(norm.isfinite()))


def _has_values(t: Tensor) -> bool:
    return not t.is_meta and not isinstance(t, FakeTensor)


class _Copies:
    """Stands in for tensors the op cannot take: parameters with gaps, gradients in another order of memory."""

    def __init__(self):
        self._params: list[tuple[Tensor, Tensor]] = []
        self._grads: list[Tensor] = []

    def grad(self, p: Tensor) -> Tensor:
        g = own = local(p.grad)
        if is_sharded(p) and p.grad.placements != p.placements:  # of parallel tensors they may be yet to be added up
            g = p.grad.redistribute(placements=p.placements).to_local()
        p = local(p)
        if g is own and g.stride() == _strides(p) and not g.is_neg():
            return g
        self._grads.append(own)
        return _like(p, g)

    def param(self, p: Tensor) -> Tensor:
        p = local(p)
        if _common.is_dense(p):
            return p
        self._params.append((p, _like(p, p)))
        return self._params[-1][1]

    def write_back(self, zero_grads: bool) -> None:
        for p, copy in self._params:
            p.copy_(copy)
        for g in self._grads if zero_grads else ():
            g.zero_()  # torch._foreach_zero_ takes none that is read with another sign


# --- arguments of timm's optimizers -----------------------------------------------------------------------------------


def corrected_decay(group: dict) -> float:
    """The weight decay whose product with lr is ``lr**2 / max_lr * weight_decay`` where that is asked for."""
    decay = float(group["weight_decay"])
    if group.get("corrected_weight_decay"):
        decay *= float(group["lr"]) / group["max_lr_snapshot"]
    return decay

"""Optimizers: torch's arguments and states, torch's results, and what rides along in the same pass."""

import copy
import inspect
import os
import pickle
import runpy
import sys
import types
import warnings

import harness
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedtrain import backend as fusedtrain_backend
from fusedtrain import optim
from fusedtrain.ops import _tables
from fusedtrain.optim import _fused, _timm

# ours -> arguments of a run that uses all that the rule has
OPTIMIZERS = {
    "Adam": {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    "Lion": {"lr": 0.01, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.1},
    "RMSpropTF": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1},
    "Adan": {"lr": 0.01, "weight_decay": 0.1},
    "Lamb": {"lr": 0.01, "weight_decay": 0.1},
    "NovoGrad": {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True},
}
IN_TORCH = ("Adam", "AdamW", "SGD", "RMSprop")
IN_TIMM = {"NovoGrad": "NvNovoGrad"}  # other names
EXTRAS = {"max_grad_norm": 1.0, "ema_decay": 0.9, "zero_grads": True}
OWN = ("differentiable",)  # arguments of torch that are refused
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def info_of(name):
    """What torch's own tests know about an optimizer."""
    pytest.importorskip("expecttest", reason="torch's own tests need expecttest")
    from torch.testing._internal.common_optimizers import optim_db

    return next(info for info in optim_db if info.optim_cls.__name__ == name)


@pytest.fixture(autouse=True)
def not_interpreted(request):
    parameters = getattr(request.node, "callspec", None) and request.node.callspec.params
    if parameters and (parameters.get("backend"), parameters.get("device")) == ("triton", "cpu"):
        pytest.skip("the op's own tests run Triton's interpreter")


def stock_class(name):
    if name in IN_TORCH:
        return getattr(torch.optim, name)
    import timm.optim

    return getattr(timm.optim, IN_TIMM.get(name, name))


def kinds(name, dtype=torch.float32) -> list[tuple]:
    """Classes and dtypes: ours, its counterpart, and that in float64, which is the truth."""
    stock = stock_class(name)
    return [(getattr(optim, name), dtype), (stock, dtype), (stock, torch.float64)]


def parameters(device="cpu", dtype=torch.float32) -> list[torch.Tensor]:
    """A channels_last weight, a matrix, a bias, a number, an empty one, and a part of a larger tensor."""
    shapes = [(8, 5, 3, 3), (17, 40), (33,), (), (0, 4), (6, 6)]
    made = [harness.normal(*shape, dtype=dtype, device=device, seed=i) for i, shape in enumerate(shapes)]
    made[0] = made[0].to(memory_format=torch.channels_last)
    made[-1] = made[-1][:, 1:4]
    return [p.requires_grad_() for p in made]


def set_gradients(params, step: int, scale: float = 1.0) -> None:
    """The same numbers for all copies of ``params``; gradients come in contiguous memory, whatever the parameter's."""
    for i, p in enumerate(params):
        p.grad = (scale * harness.normal(*p.shape, device=p.device, seed=100 * step + i)).to(p.dtype)


def train(optimizer, steps, params=None, first=0) -> list[torch.Tensor]:
    params = params or [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, first + steps):
        set_gradients(params, step)
        optimizer.step()
    return [p.detach() for p in params]


def assert_as_good(ours, stock, exact, what) -> None:
    """Each parameter alone, and all together: of a few numbers alone torch's own error may be nothing by chance."""
    for i, (a, b, c) in enumerate(zip(ours, stock, exact)):
        if a.numel() > 8:
            harness.assert_as_good_as_torch(a, b, c, f"{what}, parameter {i}")
    flat = (torch.cat([t.flatten() for t in tensors]) for tensors in (ours, stock, exact))
    harness.assert_as_good_as_torch(*flat, what)


@pytest.mark.parametrize("steps", [1, 100])
@pytest.mark.parametrize("dtype", harness.DTYPES[:3])
@every_optimizer
def test_steps_are_as_good_as_stock(zoo, device, backend, name, dtype, steps):
    harness.skip_unless_runs(backend, device, "optimizer_step", dtype)
    if (backend, steps) == ("reference", 100) and dtype != torch.float32:
        pytest.skip("what rounding does to the kernels' steps is no matter of the reference")
    arguments, runs = OPTIMIZERS[name], []
    for cls, of in kinds(name, dtype):
        params = [p.detach().to(of).requires_grad_() for p in parameters(device, dtype)]
        optimizer = cls(params, **arguments)
        for step in range(steps):
            set_gradients(params, step)
            for p in params:
                p.grad = p.grad.to(dtype).to(of)  # rounded for the truth too
            optimizer.step()
        runs.append([p.detach() for p in params])
    assert_as_good(*runs, name)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@every_optimizer
def test_what_is_not_finite_becomes_what_it_does_in_the_stock_one(zoo, device, backend, name, bad):
    harness.skip_unless_runs(backend, device, "optimizer_step")
    runs = []
    for cls, dtype in kinds(name):
        params = [p.detach().to(dtype).requires_grad_() for p in parameters(device)[:3]]
        optimizer = cls(params, **OPTIMIZERS[name])
        for step in range(4):
            set_gradients(params, step)
            if step == 1:
                params[1].grad[3, 4] = bad
            optimizer.step()
        states = [optimizer.state[p][key] for p in params for key in sorted(optimizer.state[p]) if key != "step"]
        runs.append([p.detach() for p in params] + [t for t in states if t is not None])
    finite = [[t.nan_to_num(0.0, 0.0, 0.0) for t in run] for run in runs]
    assert_as_good(*finite, name)
    for ours, stock, _ in zip(*runs):
        assert torch.equal(ours.isnan(), stock.isnan()) and torch.equal(ours.isinf(), stock.isinf())


@pytest.mark.parametrize("name", IN_TORCH)
def test_inputs_of_torchs_own_tests_are_stepped_as_torch_does(device, backend, name):
    harness.skip_unless_runs(backend, device, "optimizer_step")
    for given in info_of(name).optim_inputs_func(device=device):
        if any(given.kwargs.get(argument) for argument in OWN):
            with pytest.raises(NotImplementedError, match="does not support"):
                getattr(optim, name)(parameters(device), **given.kwargs)
            continue
        runs = []
        for cls, dtype in (
            (getattr(optim, name), torch.float32),
            (getattr(torch.optim, name), torch.float32),
            (getattr(torch.optim, name), torch.float64),
        ):
            params = [p.detach().to(dtype).requires_grad_() for p in parameters(device)]
            runs.append(train(cls(params, **given.kwargs), 3))
        assert_as_good(*runs, f"{name} {given.desc}")


TIMM_ARGUMENTS = [
    ("Lion", {"weight_decay": 0.1, "corrected_weight_decay": True}),
    ("Lion", {"weight_decay": 0.1, "caution": True}),
    ("RMSpropTF", {"momentum": 0.9, "weight_decay": 0.1, "caution": True}),
    ("RMSpropTF", {"momentum": 0.9, "centered": True, "lr_in_momentum": False, "caution": True}),
    ("RMSpropTF", {"caution": True}),
    ("Adan", {"weight_decay": 0.1, "caution": True}),
    ("RMSpropTF", {}),
    ("RMSpropTF", {"momentum": 0.9, "lr_in_momentum": False}),
    ("RMSpropTF", {"centered": True, "weight_decay": 0.1, "decoupled_decay": True}),
    ("RMSpropTF", {"weight_decay": 0.1, "decoupled_decay": True, "corrected_weight_decay": True}),
    ("Adan", {"weight_decay": 0.1, "no_prox": True}),
    ("Lamb", {"weight_decay": 0.0, "max_grad_norm": None}),
    ("Lamb", {"weight_decay": 0.0, "always_adapt": True, "trust_clip": True}),
    ("Lamb", {"bias_correction": False, "grad_averaging": False}),
    ("Lamb", {"weight_decay": 0.1, "caution": True}),
    ("Lamb", {"weight_decay": 0.1, "decoupled_decay": True, "trust_clip": True, "caution": True}),
    ("Lamb", {"weight_decay": 0.1, "decoupled_decay": True, "corrected_weight_decay": True}),
    ("NovoGrad", {}),
    ("NovoGrad", {"weight_decay": 0.1, "grad_averaging": True, "amsgrad": True}),
    ("NovoGrad", {"weight_decay": 0.1, "decoupled_decay": True, "corrected_weight_decay": True}),
]


@pytest.mark.parametrize(("name", "arguments"), TIMM_ARGUMENTS)
def test_timms_arguments_do_what_they_do_in_timm(zoo, device, backend, name, arguments):
    harness.skip_unless_runs(backend, device, "optimizer_step")
    unknown = arguments.keys() - inspect.signature(stock_class(name)).parameters
    if unknown:
        pytest.skip(f"{name} of this timm does not know {', '.join(unknown)}")
    runs = []
    for cls, dtype in kinds(name):
        params = [p.detach().to(dtype).requires_grad_() for p in parameters(device)]
        optimizer = cls(params, lr=0.02, **arguments)
        train(optimizer, 2)
        optimizer.param_groups[0]["lr"] = 0.01
        runs.append(train(optimizer, 2, first=2))
    assert_as_good(*runs, f"{name} {arguments}")


@pytest.mark.parametrize("name", ["Adan", "Lamb"])
def test_groups_without_gradients_count_steps_as_timms_do(zoo, device, backend, name):
    harness.skip_unless_runs(backend, device, "optimizer_step")
    runs = []
    for cls, dtype in kinds(name):
        params = [p.detach().to(dtype).requires_grad_() for p in parameters(device)]
        optimizer = cls([{"params": params[:1]}, {"params": params[1:]}], lr=0.02)
        for step in range(6):
            set_gradients(params, step)
            left = {1: params[1:], 2: params[1:], 3: params[1:2], 5: params}  # of the second group all, or one
            for p in left.get(step, ()):
                p.grad = None
            optimizer.step()
        runs.append([p.detach() for p in params])
        assert [int(group["step"]) for group in optimizer.state_dict()["param_groups"]] == [6, 6]
    assert_as_good(*runs, name)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0, "nonfinite": "skip"}], ids=str)
def test_groups_without_gradients_count_no_step_that_is_left_out(device, backend, options):
    harness.skip_unless_runs(backend, device, "optimizer_step")
    params = parameters(device)
    optimizer = optim.Lamb([{"params": params[:1]}, {"params": params[1:]}], lr=0.02, **options)
    for bad in (False, True, False):
        params[0].grad = torch.full_like(params[0], torch.inf if bad and options else 1.0)
        optimizer.found_inf = torch.full((), float(bad and not options), device=device)
        optimizer.step()
    assert [int(group["step"]) for group in optimizer.param_groups] == [2, 2]


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in IN_TORCH])
def test_arguments_out_of_range_are_named(name):
    cls, params = getattr(optim, name), parameters()
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        cls(params, lr=-1)
    with pytest.raises(ValueError, match=r"Invalid weight decay value: -0\.1"):
        cls(params, weight_decay=-0.1)
    if name != "RMSpropTF":
        betas = (0.9, 1.0, 0.9)[: 3 if name == "Adan" else 2]
        with pytest.raises(ValueError, match=r"Invalid beta parameter at index 1: 1\.0"):
            cls(params, betas=betas)
    if name not in ("Adan", "NovoGrad"):
        with pytest.raises(ValueError, match=r"corrected_weight_decay needs a positive .* got 0.0"):
            cls(params, lr=0.0, corrected_weight_decay=True)


@pytest.mark.parametrize("name", IN_TORCH)
def test_errors_of_torchs_own_tests_are_errors(device, name):
    for given in info_of(name).optim_error_inputs_func(device=device, dtype=torch.float32):
        inputs = given.optimizer_error_input
        twice = given.error_type is UserWarning  # test_a_parameter_that_stands_twice_in_a_group_is_refused
        if twice or any(inputs.kwargs.get(argument) for argument in OWN):
            continue
        expected = pytest.warns if issubclass(given.error_type, Warning) else pytest.raises
        with expected(given.error_type, match=given.error_regex):
            getattr(optim, name)(inputs.params, **inputs.kwargs)


@pytest.mark.parametrize("extras", [{}, {"max_grad_norm": float("inf"), "ema_decay": 0.9}], ids=["plain", "extras"])
@every_optimizer
def test_state_dicts_go_both_ways_in_mid_training(zoo, device, backend, name, extras):
    harness.skip_unless_runs(backend, device, "optimizer_step")
    ours_class, arguments = getattr(optim, name), OPTIMIZERS[name]
    if name == "Lamb":  # clips by itself
        extras = {key: value for key, value in extras.items() if key != "max_grad_norm"}

    def ours(params):
        return ours_class(params, **arguments, **extras)

    def stock(params):
        return stock_class(name)(params, **arguments)

    runs = []
    for first, second, dtype in (
        (ours, stock, torch.float32),
        (stock, ours, torch.float32),
        (stock, stock, torch.float32),
        (stock, stock, torch.float64),
    ):
        params = [p.detach().to(dtype).requires_grad_() for p in parameters(device)]
        before = first(params)
        train(before, 50)
        after = second(params)
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        runs.append(train(after, 50, first=50))
    assert_as_good(runs[0], *runs[2:], f"{name}: ours, then stock")
    assert_as_good(runs[1], *runs[2:], f"{name}: stock, then ours")


@every_optimizer
def test_state_dict_has_the_keys_dtypes_and_shapes_of_the_stock_one(zoo, device, name):
    ours = getattr(optim, name)(parameters(device), **OPTIMIZERS[name])
    stock = stock_class(name)(parameters(device), **OPTIMIZERS[name])
    for optimizer in (ours, stock):
        train(optimizer, 2)
    ours, stock = ours.state_dict(), stock.state_dict()
    missing = {key for group in stock["param_groups"] for key in group} - set(ours["param_groups"][0])
    assert not missing
    assert ours["state"].keys() == stock["state"].keys()
    for index, state in stock["state"].items():
        assert ours["state"][index].keys() == state.keys()
        for key, value in state.items():
            own = ours["state"][index][key]
            assert type(own) is type(value)
            if isinstance(value, torch.Tensor):
                assert own.dtype == value.dtype and own.shape == value.shape


def tail_of_torch(optimizer, params, averages) -> None:
    """Clipping, step, averages and zeroing, one after the other."""
    torch.nn.utils.clip_grad_norm_(params, EXTRAS["max_grad_norm"])
    optimizer.step()
    for p, average in zip(params, averages):
        average.lerp_(p.detach(), 1 - EXTRAS["ema_decay"])
        p.grad.zero_()


@every_optimizer
def test_clipping_averages_and_zeroing_ride_along(zoo, device, backend, name):
    harness.skip_unless_runs(backend, device, "optimizer_step")
    params = parameters(device)
    optimizer = getattr(optim, name)(params, **OPTIMIZERS[name], **EXTRAS)
    train(optimizer, 5)
    assert all(not p.grad.any() for p in params)
    ours = [*(p.detach() for p in params), *(optimizer.state[p]["ema"] for p in params), optimizer.grad_norm.float()]
    runs = [ours]
    for dtype in (torch.float32, torch.float64):
        params = [p.detach().to(dtype).requires_grad_() for p in parameters(device)]
        stock, averages = stock_class(name)(params, **OPTIMIZERS[name]), [p.detach().clone() for p in params]
        for step in range(5):
            set_gradients(params, step)
            norm = torch.nn.utils.get_total_norm([p.grad for p in params])
            tail_of_torch(stock, params, averages)
        runs.append([*(p.detach() for p in params), *averages, norm])
    assert_as_good(*runs, name)


@every_optimizer
def test_grad_scaler_hands_over_its_scale_and_skips(device, backend, name):
    harness.skip_unless_runs(backend, device, "optimizer_step")
    results = []
    for scale in (1.0, 1024.0):
        params = parameters(device)
        optimizer = getattr(optim, name)(params, **OPTIMIZERS[name], **EXTRAS)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0, enabled=scale != 1.0)
        for step in range(4):
            set_gradients(params, step, scaler.get_scale() if scale != 1.0 else 1.0)
            if step == 2 and scale != 1.0:  # an overflow costs one step and changes nothing
                before = [t.clone() for p in params for t in (p.detach(), *optimizer.state[p].values())]
                params[1].grad[3, 4] = float("inf")
                scaler.scale(torch.zeros((), device=device))
                scaler.step(optimizer)
                scaler.update()
                after = [t for p in params for t in (p.detach(), *optimizer.state[p].values())]
                assert all(torch.equal(a, b) for a, b in zip(after, before))
                assert all(not p.grad.any() for p in params)
                assert scaler.get_scale() == 512.0
                set_gradients(params, step, 512.0)
            scaler.scale(torch.zeros((), device=device))
            scaler.step(optimizer)
            scaler.update()
        results.append({str(i): torch.atleast_1d(p.detach()) for i, p in enumerate(params)})
        results[-1]["norm"] = torch.atleast_1d(optimizer.grad_norm)
    harness.assert_bitwise_equal(*results, "scaled by powers of two")


def test_nonfinite_norms_propagate_skip_or_raise(device, backend):
    harness.skip_unless_runs(backend, device, "optimizer_step")
    for nonfinite in ("propagate", "skip", "error"):
        params = parameters(device)
        before = [p.detach().clone() for p in params]
        optimizer = optim.AdamW(params, max_grad_norm=1.0, nonfinite=nonfinite)
        set_gradients(params, 0)
        params[0].grad[1, 2, 0, 0] = float("nan")
        if nonfinite == "error":
            with pytest.raises(RuntimeError, match="AdamW: the norm of the gradients is nan"):
                optimizer.step()
        else:
            optimizer.step()
        if nonfinite == "propagate":
            assert params[1].isnan().all()
        else:
            assert all(torch.equal(p, b) for p, b in zip(params, before))
            assert all(not s["step"] for s in optimizer.state.values())


def test_averages_are_read_swapped_and_saved(device, backend):
    harness.skip_unless_runs(backend, device, "optimizer_step")
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).to(device, torch.bfloat16)
    optimizer = optim.AdamW(model.parameters(), lr=0.1, ema_decay=0.999)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    averages = optimizer.ema_state_dict(model)
    own = {name: t.clone() for name, t in model.state_dict().items()}
    assert averages.keys() == own.keys() and torch.equal(averages["1.running_var"], own["1.running_var"])
    assert optimizer.state[model[0].weight]["ema"].dtype == torch.float32  # bfloat16 would not move
    assert not torch.equal(averages["0.weight"], own["0.weight"])
    with optimizer.swap_ema():
        assert all(torch.equal(t, averages[name]) for name, t in model.state_dict().items())
    assert all(torch.equal(t, own[name]) for name, t in model.state_dict().items())
    loaded = optim.AdamW(model.parameters(), lr=0.1, ema_decay=0.999)
    loaded.load_state_dict(optimizer.state_dict())
    for p, state in optimizer.state.items():
        assert torch.equal(loaded.state[p]["ema"], state["ema"]) and loaded.state[p]["ema"].dtype == torch.float32
    with pytest.raises(RuntimeError, match="AdamW keeps no averages: construct it with ema_decay"):
        optim.AdamW(model.parameters()).ema_state_dict(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_averages_go_on_without_a_gradient(device, backend, dtype):
    harness.skip_unless_runs(backend, device, "optimizer_step")
    params = [torch.nn.Parameter(torch.ones(shape, device=device, dtype=dtype)) for shape in ((3, 5), ())]
    options = {"max_grad_norm": 1.0, "nonfinite": "skip", "master_weights": dtype == torch.bfloat16}
    optimizer = optim.AdamW(params, lr=0.1, ema_decay=0.7, **options)

    def step(*grads, found_inf=None):
        for p, value in zip(params, grads):
            p.grad = None if value is None else torch.full_like(p, value)
        optimizer.found_inf = None if found_inf is None else torch.tensor([found_inf], device=device)
        before = [optimizer.state[p]["ema"].clone() for p in params if p in optimizer.state]
        optimizer.step()
        return before, [optimizer.state[p]["ema"] for p in params]

    def exact(p):
        return optimizer.state[p].get("master", p).detach()

    step(1.0, 1.0)
    own = exact(params[1]).clone()
    assert not torch.equal(own, optimizer.state[params[1]]["ema"])
    for first in (1.0, None):  # of lists, as the second has none, then of nothing at all
        before, after = step(first, None)
        assert torch.equal(after[1], before[1].lerp(own, 1 - 0.7))
        one, other = before[0], exact(params[0])
        truth = one.double().lerp(other.double(), 1 - 0.7)
        harness.assert_as_good_as_torch(after[0], one.lerp(other, 1 - 0.7), truth, "the average, taken once")
    for first, found_inf in ((1.0, 1.0), (float("inf"), None), (None, 1.0)):  # steps that are left out
        before, after = step(first, None, found_inf=found_inf)
        assert torch.equal(after[0], before[0]) and torch.equal(after[1], before[1])
    before, after = step(1.0, None, found_inf=0.0)
    assert torch.equal(after[1], before[1].lerp(own, 1 - 0.7))
    exact(params[1]).fill_(float("inf"))  # of which nothing is taken at a step that is left out
    before, after = step(1.0, None, found_inf=1.0)
    assert torch.equal(after[1], before[1])


@every_optimizer
def test_copies_and_pickles_go_on_alike(device, backend, name):
    harness.skip_unless_runs(backend, device, "optimizer_step")
    optimizer = getattr(optim, name)(parameters(device), **OPTIMIZERS[name], **EXTRAS)
    train(optimizer, 3)
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    expected = train(optimizer, 3, first=3)
    for other in copies:
        assert all(torch.equal(a, b) for a, b in zip(train(other, 3, first=3), expected))


@every_optimizer
def test_schedulers_closures_hooks_and_late_groups(device, backend, name):
    harness.skip_unless_runs(backend, device, "optimizer_step")
    params = parameters(device)
    optimizer = getattr(optim, name)(params[:2], **{**OPTIMIZERS[name], "lr": torch.tensor(0.01)})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))

    def closure():
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item()]
    scheduler.step()
    optimizer.add_param_group({"params": params[2:], "weight_decay": 0.0})
    losses += [optimizer.step(closure).item() for _ in range(5)]
    assert calls == ["before"] * 6 and losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


@pytest.mark.parametrize("narrow", [{}, {"state_dtype": "8bit"}], ids=str)
def test_compiled_steps_are_the_same_and_compile_nothing_anew(narrow):
    runs, graphs = [], []

    def count(module, _):
        graphs.append(module)
        return module.forward

    for compiled in (False, True):
        p = harness.normal(70, 70).requires_grad_()
        optimizer = optim.AdamW([p], lr=0.1, max_grad_norm=1.0, **narrow)

        def step(optimizer=optimizer):
            optimizer.step()

        step = torch.compile(step, backend=count) if compiled else step
        for i in range(4):
            set_gradients([p], i)
            optimizer.param_groups[0]["lr"] /= 2
            step()
        runs.append({"p": p.detach()})
    harness.assert_bitwise_equal(*runs, "compiled")
    assert not graphs


@pytest.mark.parametrize("fault", ["sparse", "complex", "meta", "expanded"])
@every_optimizer
def test_what_cannot_be_done_changes_nothing(name, fault):
    params = parameters()
    before = [p.detach().clone() for p in params]
    bad = torch.ones(2, 2, dtype=torch.complex64 if fault == "complex" else None)
    bad = bad[:1].expand(2, 2) if fault == "expanded" else bad
    bad = bad.to("meta" if fault == "meta" else "cpu").requires_grad_()
    optimizer = getattr(optim, name)([*params, bad], **OPTIMIZERS[name])
    set_gradients(params, 0)
    bad.grad = torch.ones_like(bad).to_sparse() if fault == "sparse" else torch.ones_like(bad)
    error, message = {
        "sparse": (RuntimeError, f"{name} does not support sparse gradients"),
        "complex": (TypeError, f"{name}: parameters must be float32, .* got torch.complex64"),
        "meta": (RuntimeError, f"{name}: parameters and gradients must be on one device, got cpu, meta"),
        "expanded": (RuntimeError, rf"{name}: elements of a parameter must not share .* \[2, 2\] and strides \(0, 1\)"),
    }[fault]
    with pytest.raises(error, match=message):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before)) and not optimizer.state


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lr", None, "float.* not 'NoneType'"),
        ("lr", torch.ones(2), "one element"),
        ("eps", None, "float.* not 'NoneType'"),
        ("momentum", None, "NoneType"),
        ("betas", (0.5,), r"takes \d betas, got \(0.5,\)"),
    ],
)
@every_optimizer
def test_what_a_group_cannot_be_told_changes_no_other_group(name, key, value, message, steps):
    runs = []
    for fails in (True, False):
        params = [harness.normal(8, seed=i).requires_grad_() for i in range(2)]
        optimizer = getattr(optim, name)([{"params": [p]} for p in params], **OPTIMIZERS[name])
        train(optimizer, steps)
        group = optimizer.param_groups[1]
        if key not in group:
            return
        if fails:
            own, group[key] = group[key], value
            set_gradients(params, 5)
            with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
                optimizer.step()
            group[key] = own
        runs.append(train(optimizer, 2, first=1))
    assert all(map(torch.equal, *runs))


@every_optimizer
def test_a_first_step_without_memory_for_the_states_changes_nothing(name, monkeypatch):
    own, runs = _fused.FusedStep._set_state, []

    def full(optimizer, p, *state):
        if p.dim() == 1:
            raise MemoryError
        own(optimizer, p, *state)

    for fails in (True, False):
        params = parameters()
        optimizer = getattr(optim, name)([{"params": [p]} for p in params], **OPTIMIZERS[name])
        if fails:
            set_gradients(params, 5)
            with monkeypatch.context() as patch, pytest.raises(MemoryError):
                patch.setattr(_fused.FusedStep, "_set_state", full)
                optimizer.step()
        runs.append(train(optimizer, 3))
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm must be positive or None, got 0.0"),
        ({"nonfinite": "stop", "max_grad_norm": 1.0}, ValueError, "nonfinite must be one of .* got 'stop'"),
        ({"nonfinite": "skip", "max_grad_norm": None}, ValueError, "nonfinite='skip' needs the norm of the gradients"),
        ({"ema_decay": 1.0}, ValueError, r"ema_decay must lie in \[0, 1\) or be None, got 1.0"),
        (
            {"state_dtype": torch.float16},
            ValueError,
            "state_dtype must be one of None, .* got torch.float16",
        ),
        ({"rounding": "up"}, ValueError, "rounding must be one of nearest, stochastic, kahan, got 'up'"),
        ({"rounding": "kahan", "master_weights": True}, ValueError, "leaves nothing to rounding='kahan'"),
        ({"seed": -1}, ValueError, r"seed must be an integer in \[0, 2\*\*31\), got -1"),
        ({"seed": 1.5}, ValueError, r"seed must be an integer in .*, got 1\.5"),
        ({"unknown": 1}, TypeError, r"^\w+\.__init__\(\) got an unexpected keyword argument 'unknown'"),
    ],
)
@every_optimizer
def test_bad_arguments_are_named(name, arguments, error, message):
    with pytest.raises(error, match=message):
        getattr(optim, name)(parameters(), **arguments)


@pytest.mark.parametrize(("name", "count"), [("Adam", 2), ("AdamW", 2), ("Lion", 2), ("Adan", 3), ("Lamb", 2)])
def test_another_number_of_betas_is_named(name, count):
    betas = (0.9, 0.99, 0.999, 0.9999)[: 5 - count]
    for groups, arguments in ([{"params": parameters(), "betas": betas}], {}), (parameters(), {"betas": betas}):
        with pytest.raises(ValueError, match=rf"^{name} takes {count} betas, got \(0.9, 0.99"):
            getattr(optim, name)(groups, **arguments)


@every_optimizer
def test_a_parameter_that_stands_twice_in_a_group_is_refused(name):
    """torch warns, and steps it twice; here its rows would be written to at once."""
    p, q = (torch.ones(3, requires_grad=True) for _ in range(2))
    optimizer = getattr(optim, name)([p])
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match=f"{name}: a parameter .* twice"):
        optimizer.add_param_group({"params": [q, q]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [q]})


@every_optimizer
def test_what_all_groups_share_is_refused_in_one(name):
    cls, (p, *others) = getattr(optim, name), parameters()
    for own in ({"ema_decay": 0.9}, {"zero_grads": True}, {"master_weights": True}):
        with pytest.raises(ValueError, match=f"{name}: {next(iter(own))} is of all groups together"):
            cls([{"params": [p]}, {"params": others, **own}], lr=0.1)
    optimizer = cls([p], lr=0.1, ema_decay=0.9)
    with pytest.raises(ValueError, match=f"{name}: ema_decay is of all groups together"):
        optimizer.add_param_group({"params": others, "ema_decay": 0.99})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": others, "weight_decay": 0.1, "label": "a key of the user"})
    cls([{"params": [p], "ema_decay": 0.9}, {"params": others}], lr=0.1, ema_decay=0.9)


@pytest.mark.parametrize("name", ["SGD", "Lion", "Lamb"])
def test_capturable_is_an_argument_of_those_alone_that_have_it(name):
    with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'capturable'"):
        getattr(optim, name)(parameters(), lr=0.1, capturable=True)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop"])
def test_capturable_on_a_device_without_graphs_fails_as_in_torch(name):
    errors = []
    for cls in (getattr(optim, name), getattr(torch.optim, name)):
        params = parameters()
        before = [p.detach().clone() for p in params]
        optimizer = cls(params, capturable=True)
        set_gradients(params, 0)
        with pytest.raises(AssertionError) as error:
            optimizer.step()
        errors.append(str(error.value))
        assert all(torch.equal(p, b) for p, b in zip(params, before))
    assert errors[0] == errors[1]
    with pytest.raises(ValueError, match="capturable=True"):
        getattr(optim, name)(parameters(), capturable=True, max_grad_norm=1.0, nonfinite="error")


@every_optimizer
def test_only_the_first_step_makes_numbers(name, monkeypatch):
    """On a GPU each one would be a copy from the host, which waits and cannot be captured."""
    params = parameters()
    optimizer = getattr(optim, name)(params)
    monkeypatch.setattr(_fused._tables, "usable", lambda: False)
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
        monkeypatch.setattr(_fused, "_number", None)


@every_optimizer
def test_arguments_may_be_numbers_of_numpy(name):
    numpy = pytest.importorskip("numpy")
    given = dict(OPTIMIZERS[name])
    if "caution" in inspect.signature(getattr(optim, name)).parameters:
        given["caution"] = True
    of_numpy = {key: numpy.bool_(value) if value is True else numpy.float64(value) for key, value in given.items()}
    runs = [train(getattr(optim, name)(parameters(), **arguments), 3) for arguments in (given, of_numpy)]
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("extras", [{}, EXTRAS, {"state_dtype": "8bit"}], ids=str)
@every_optimizer
def test_the_default_device_does_not_matter(backend, name, extras):
    harness.skip_unless_runs(backend, "cpu", "optimizer_step")
    runs = []
    for default in ("cpu", "meta"):
        params = [*parameters(), harness.normal(70, 70).requires_grad_()]
        optimizer = getattr(optim, name)(params, **OPTIMIZERS[name], **extras)
        for step in range(2):
            set_gradients(params, step)
            with torch.device(default):
                optimizer.step()
                optimizer.load_state_dict(optimizer.state_dict())
        runs.append([p.detach() for p in params])
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("extras", [{}, EXTRAS, {"state_dtype": "8bit"}, {"rounding": "stochastic"}], ids=str)
@every_optimizer
def test_steps_on_the_meta_device_make_the_states_alone(name, extras):
    kept = []
    for device in ("cpu", "meta"):
        params = parameters(device)
        optimizer = getattr(optim, name)(params, **OPTIMIZERS[name], **extras)
        set_gradients(params, 0)
        optimizer.step()
        kept.append([{key: (t.shape, t.dtype) for key, t in optimizer.state[p].items()} for p in params])
        assert all(t.device.type == device for p in params for t in optimizer.state[p].values())
    assert kept[0] == kept[1]


@pytest.mark.parametrize("narrow", [{}, {"state_dtype": "8bit"}, {"state_dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("name", ["Adam", "RMSprop"])
@pytest.mark.parametrize("way", ["lists", "tables"])
def test_steps_in_a_cuda_graph_follow_the_learning_rate_on_the_device(device, way, name, narrow, monkeypatch):
    if device != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    runs, calls = [], counted(monkeypatch)
    for captured in (False, True):
        params = parameters(device)
        params = params if way == "lists" else [p for p in params if p.is_contiguous()]  # as their gradients are
        rate = torch.tensor(0.01, device=device)
        optimizer = getattr(optim, name)(params, lr=rate, capturable=True, max_grad_norm=1.0, **narrow)
        set_gradients(params, 0)
        grads, graph = [p.grad for p in params], torch.cuda.CUDAGraph()
        optimizer.step()
        if captured:
            with torch.cuda.graph(graph):
                optimizer.step()
        for step in range(1, 4):
            set_gradients(params, step)
            new = [p.grad for p in params]
            for p, own, value in zip(params, grads, new):
                p.grad = own.copy_(value)
            rate.mul_(0.5)
            graph.replay() if captured else optimizer.step()
        runs.append({str(i): torch.atleast_1d(p.detach()) for i, p in enumerate(params)})
    harness.assert_bitwise_equal(*runs, name)
    assert len(calls) == (way == "tables") * 4  # three steps without a graph, one captured


@pytest.mark.parametrize("stored", [{}, {"state_dtype": "8bit"}, {"rounding": "kahan"}, {"master_weights": True}])
def test_what_a_step_has_made_stays_where_it_is(stored):
    """As the graphs of CUDA need it, and not made again: also of a part of a larger tensor."""
    whole = harness.normal(70, 90, dtype=torch.bfloat16)
    params = [whole[:, 1:80].requires_grad_(), whole.T.clone().requires_grad_(), whole[0, 0].clone().requires_grad_()]
    optimizer, before = optim.AdamW(params, ema_decay=0.9, **stored), {}
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
        for i, p in enumerate(params):
            for name, value in optimizer.state[p].items():
                assert step == 0 or value is before[i, name], (i, name)
                before[i, name] = value
    assert {name for _, name in before} >= {"step", "exp_avg", "exp_avg_sq", "ema"}


@pytest.mark.skipif(sys.platform != "linux", reason="the ranks are forks, which only Linux supports with torch")
def test_sharded_parameters_step_as_whole_ones():
    done = harness.run_python(os.path.join(os.path.dirname(__file__), "optim_ranks.py"))
    assert done.returncode == 0 and done.stdout == "all is well\n", done.stdout + done.stderr


def test_what_sharded_parameters_do_not_go_with_is_named():
    from torch import distributed
    from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        q = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
        q.grad = torch.ones(4)
        with pytest.raises(NotImplementedError, match=r"AdamW: a gradient on no mesh belongs to a DTensor on"):
            optim.AdamW([q]).step()
        assert torch.equal(q.to_local(), torch.ones(4))
    finally:
        distributed.destroy_process_group()


def small_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 2, 1, bias=False))


def test_groups_without_decay_are_timms(zoo):
    from timm.optim import param_groups_weight_decay

    model = small_model()
    model[2].weight.requires_grad_(False)
    for arguments in ({}, {"weight_decay": 0.1}, {"weight_decay": 0.0}, {"no_weight_decay_list": ["0.weight"]}):
        ours, timms = optim.param_groups_weight_decay(model, **arguments), param_groups_weight_decay(model, **arguments)
        assert [group["weight_decay"] for group in ours] == [group["weight_decay"] for group in timms], arguments
        for group, other in zip(ours, timms):
            assert [id(p) for p in group["params"]] == [id(p) for p in other["params"]], arguments
    assert [len(g["params"]) for g in optim.param_groups_weight_decay(model, 0.1)] == [3, 1]
    assert [len(g["params"]) for g in optim.param_groups_weight_decay(model, 0.1, ["0.w*"])] == [4]


def test_timms_factory_makes_every_optimizer(zoo):
    """Here timm is imported last."""
    from timm.optim import create_optimizer_v2, list_optimizers

    names = optim.register_with_timm()
    assert len(names) == len(OPTIMIZERS) and set(names) <= set(list_optimizers("fusedtrain*"))
    made = {type(create_optimizer_v2(small_model(), name, lr=0.01, weight_decay=0.1)) for name in names}
    assert made == {getattr(optim, name) for name in OPTIMIZERS}
    optimizer = create_optimizer_v2(small_model(), "fusedtrainadamw", lr=0.01, weight_decay=0.1, betas=(0.8, 0.9))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
    assert optimizer.defaults["betas"] == (0.8, 0.9)


def test_timms_factory_knows_them_where_timm_is_imported_first(zoo):
    lines = "from zoo import Zoo; Zoo(); import fusedtrain.optim; from timm.optim import list_optimizers"
    done = harness.run_python("-c", f"{lines}; print(list_optimizers('fusedtrain*'))")
    assert done.stdout.count("fusedtrain") == len(OPTIMIZERS), done.stdout + done.stderr


def test_registering_with_timm_again_is_silent(zoo, caplog):
    assert optim.register_with_timm() == optim.register_with_timm()
    assert not caplog.records


def test_registration_at_import_warns_and_never_fails(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", types.ModuleType("timm"))
    monkeypatch.setitem(sys.modules, "timm.optim._optim_factory", types.ModuleType("of another timm"))
    with pytest.warns(UserWarning, match="fusedtrain's optimizers are not in timm's factory: cannot import"):
        runpy.run_path(_timm.__file__)


# --- steps on tables of addresses -------------------------------------------------------------------------------------

needs_tables = pytest.mark.skipif(not _tables.usable(), reason="needs the compiled gatherer")


def same_layout_gradients(params, step: int) -> None:
    for i, p in enumerate(params):
        p.grad = torch.empty_like(p).copy_(harness.normal(*p.shape, device=p.device, seed=100 * step + i))


def counted(monkeypatch) -> list:
    """Grows by one per step of a parameter group that was taken on a table."""
    calls, run = [], _tables.optimizer_step_
    monkeypatch.setattr(_tables, "optimizer_step_", lambda *args, **kwargs: (calls.append(1), run(*args, **kwargs)))
    return calls


@needs_tables
@pytest.mark.parametrize("dtype", harness.DTYPES)
@every_optimizer
def test_tables_and_lists_do_the_same(device, name, dtype, monkeypatch):
    runs, calls = [], counted(monkeypatch)
    for tables in (True, False):
        monkeypatch.setattr(_tables, "usable", lambda tables=tables: tables)
        params = [p for p in parameters(device, dtype) if p.is_contiguous() or p.dim() == 4]
        optimizer = getattr(optim, name)(params[:2], **OPTIMIZERS[name], **EXTRAS)
        optimizer.add_param_group({"params": params[2:], "lr": 0.5})
        for step in range(4):
            same_layout_gradients(params, step)
            params[2].grad = params[2].grad if step % 2 else None
            optimizer.step()
        tensors = [t for p in params for t in (p.detach(), p.grad, *optimizer.state[p].values())]
        runs.append({str(i): torch.atleast_1d(t) for i, t in enumerate([*tensors, optimizer.grad_norm])})
    harness.assert_bitwise_equal(*runs, f"{name} on a table")
    assert len(calls) == 4  # two groups at the third and fourth step; before that states are made


@needs_tables
def test_tables_never_go_stale(device, monkeypatch):
    calls = counted(monkeypatch)
    params, expected = runs = [parameters(device)[:3] for _ in range(2)]
    optimizer, other = (optim.AdamW(own, lr=0.1) for own in runs)

    def step(i):
        same_layout_gradients(params, i)
        set_gradients(expected, i)
        optimizer.step()
        with monkeypatch.context() as patch:
            patch.setattr(_tables, "usable", lambda: False)
            other.step()

    for i in range(2):
        step(i)
    params[0].data = params[0].data.clone()  # other memory under the same parameter
    optimizer.state[params[1]]["exp_avg"] = optimizer.state[params[1]]["exp_avg"].clone()
    optimizer.state[params[2]]["exp_avg_sq"].data = optimizer.state[params[2]]["exp_avg_sq"].data.clone()
    step(2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(3)
    assert len(calls) == 3
    harness.assert_bitwise_equal(*({str(i): p.detach() for i, p in enumerate(own)} for own in runs), "after changes")


@needs_tables
def test_what_a_table_cannot_hold_goes_through_lists(device, monkeypatch):
    calls = counted(monkeypatch)

    def weights(change) -> torch.Tensor:
        p = torch.nn.Parameter(torch.ones(1, 3, 2, device=device))
        optimizer = optim.SGD([p], lr=1.0)
        p.grad = change(torch.full((1, 3, 2), 0.5, device=device))
        optimizer.step()
        return p.detach().cpu()

    class Sub(torch.Tensor):
        pass

    changes = {
        "strides": lambda g: g.transpose(1, 2).contiguous().transpose(1, 2),
        "gaps": lambda g: torch.cat([g, g], 2)[:, :, :2],
        "subclass": lambda g: g.as_subclass(Sub),
    }
    for what, change in changes.items():
        assert torch.equal(weights(change), torch.full((1, 3, 2), 0.5)), what
    assert not calls
    p = torch.nn.Parameter(torch.ones(1, device=device))
    p.grad = torch._neg_view(torch.ones(1, device=device))  # reads as -1
    optim.SGD([p], lr=1.0).step()
    assert p.item() == 2.0 and not calls
    with fusedtrain_backend.use_backend("reference"):
        weights(lambda g: g)
    assert not calls
    weights(lambda g: g)
    assert len(calls) == 1


@pytest.mark.parametrize("zero_grads", [False, True])
def test_gradients_that_are_read_with_another_sign(device, zero_grads):
    p = torch.nn.Parameter(torch.ones(1, device=device))
    (torch.complex(p.detach(), p).conj() * 1).imag.sum().backward()
    assert p.grad.is_neg()
    optim.SGD([p], lr=1.0, zero_grads=zero_grads).step()
    assert p.item() == 2.0 and p.grad.item() == (0.0 if zero_grads else -1.0)


@pytest.mark.parametrize("layout", ["table", "list"])
def test_zeroed_gradients_let_go_of_their_graph(device, layout):
    """As ``zero_grad(set_to_none=False)`` does: else the graphs of all steps would hang together."""
    p = torch.nn.Parameter(torch.ones(6, 6, device=device)[:, : 3 if layout == "list" else 6])
    optimizer = optim.SGD([p], lr=0.1, zero_grads=True)
    for _ in range(2):
        p.square().sum().backward(create_graph=True)
        optimizer.step()
        assert not p.grad.requires_grad and not p.grad.any()


@needs_tables
def test_autograd_sees_what_a_table_changes():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = optim.SGD([p], lr=0.1)
    p.grad = torch.ones(3)
    loss = p.square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- states and parameters in fewer bits ------------------------------------------------------------------------------

NARROW = {
    "bf16 states": (torch.float32, {"state_dtype": torch.bfloat16}),
    "8-bit states": (torch.float32, {"state_dtype": "8bit"}),
    "stochastic": (torch.bfloat16, {"rounding": "stochastic"}),
    "kahan": (torch.bfloat16, {"rounding": "kahan"}),
    "master": (torch.bfloat16, {"master_weights": True}),
    "fp16, stochastic, 8 bits": (torch.float16, {"rounding": "stochastic", "state_dtype": "8bit"}),
}
every_format = pytest.mark.parametrize("format_name", NARROW)


def wide_parameters(dtype, device="cpu") -> list[torch.Tensor]:
    """A channels_last weight and a matrix whose states are kept in 8 bits, and a bias whose are not."""
    weight = harness.normal(16, 30, 3, 3, dtype=dtype).to(memory_format=torch.channels_last)
    made = weight, harness.normal(70, 61, dtype=dtype, seed=1), torch.ones(70, dtype=dtype)
    return [p.to(device).requires_grad_() for p in made]


def kept(optimizer, params) -> dict[str, torch.Tensor]:
    """The parameters and their states by name."""
    tensors = {str(i): torch.atleast_1d(p.detach()) for i, p in enumerate(params)}
    for i, p in enumerate(params):
        tensors |= {f"{i} {name}": torch.atleast_1d(torch.as_tensor(t)) for name, t in optimizer.state[p].items()}
    return dict(sorted(tensors.items()))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adan", "NovoGrad"])
@every_format
def test_saved_and_resumed_steps_are_bitwise_the_same(name, format_name):
    dtype, narrow = NARROW[format_name]
    runs = []
    for resumed in (False, True):
        params = wide_parameters(dtype)
        optimizer = getattr(optim, name)(params, **OPTIMIZERS[name], **narrow, ema_decay=0.9)
        train(optimizer, 3)
        if resumed:
            saved = pickle.loads(pickle.dumps([optimizer.state_dict(), params]))
            params = saved[1]
            optimizer = getattr(optim, name)(params, **OPTIMIZERS[name], **narrow, ema_decay=0.9)
            optimizer.load_state_dict(saved[0])
        train(optimizer, 3, params, first=3)
        runs.append(kept(optimizer, params))
    harness.assert_bitwise_equal(*runs, f"{name} {format_name}")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("of", [slice(None), slice(1, 4)], ids=["lists", "tables"])
@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("back", [False, True])
def test_states_follow_a_model_that_becomes_of_another_dtype_and_back(name, of, other, back):
    def make(params):
        return getattr(optim, name)(params, **OPTIMIZERS[name], ema_decay=0.9)

    dtypes = (other, torch.float32) if back else (torch.float32, other)
    params = parameters(dtype=dtypes[0])[of]
    optimizer = make(params)
    train(optimizer, 2)
    for p in params:
        p.grad, p.data = None, p.data.to(dtypes[1])
    begun = [torch.empty_strided(p.shape, p.stride(), dtype=p.dtype).copy_(p.detach()).requires_grad_() for p in params]
    anew = make(begun)
    anew.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    runs = []
    for other, others in ((optimizer, params), (anew, begun)):
        train(other, 2, others, first=2)
        runs.append(kept(other, others))
    harness.assert_bitwise_equal(*runs, name)


@every_format
def test_formats_step_without_values(format_name):
    dtype, extras = NARROW[format_name]
    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.ones(70, 70, dtype=dtype)), torch.nn.Parameter(torch.ones(7))]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer = optim.AdamW(params, **extras)
        optimizer.step()
    assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in params)


@pytest.mark.parametrize("nonfinite", ["skip", "error"])
@pytest.mark.parametrize("kind", ["fake", "meta"])
@every_optimizer
def test_a_norm_without_a_value_is_taken_for_finite(name, kind, nonfinite):
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        p = torch.nn.Parameter(torch.ones(7, 7))
        optimizer = getattr(optim, name)([p], **OPTIMIZERS[name], max_grad_norm=1.0, nonfinite=nonfinite)
        for _ in range(2):
            p.grad = torch.ones_like(p)
            optimizer.step()
    assert {t.shape for t in optimizer.state[p].values()} <= {p.shape, ()}


@needs_tables
@every_format
def test_tables_and_lists_store_the_same_bits(device, format_name, monkeypatch):
    dtype, narrow = NARROW[format_name]
    runs, calls = [], counted(monkeypatch)
    for threads, tables in ((1, True), (2, True), (1, False)):
        monkeypatch.setattr(_tables, "usable", lambda tables=tables: tables)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            params = wide_parameters(dtype, device)
            optimizer = optim.Adam(params, **OPTIMIZERS["Adam"], **narrow, **EXTRAS)
            for step in range(4):
                same_layout_gradients(params, step)
                for p in params:
                    p.grad = p.grad.to(dtype)
                optimizer.step()
        finally:
            torch.set_num_threads(before)
        runs.append(kept(optimizer, params))
    assert len(calls) == 6
    for run in runs[1:]:
        harness.assert_bitwise_equal(run, runs[0], format_name)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, "8bit"])
def test_states_in_fewer_bits_go_into_torch_and_back(name, state_dtype):
    stock_params, params = wide_parameters(torch.float32), wide_parameters(torch.float32)
    stock = getattr(torch.optim, name)(stock_params, **OPTIMIZERS[name])
    train(stock, 3)
    ours = getattr(optim, name)(params, **OPTIMIZERS[name], state_dtype=state_dtype)
    ours.load_state_dict(copy.deepcopy(stock.state_dict()))
    own = [ours.state[params[0]][key] for key in stock.state[stock_params[0]] if key != "step"]
    assert {t.dtype for t in own} == {torch.uint8 if state_dtype == "8bit" else torch.bfloat16}
    stock.load_state_dict(copy.deepcopy(ours.state_dict()))
    saved = ours.state_dict()["state"]
    for i, p in enumerate(stock_params):
        for key, value in stock.state[p].items():
            assert value.dtype == torch.float32 and value.shape in ((), p.shape), key
            assert torch.equal(value, saved[i][key].float()), key
    train(stock, 1)


def test_adamw_in_8_bits_keeps_two_bytes_per_parameter():
    p = torch.nn.Parameter(torch.ones(512, 512))
    small = torch.nn.Parameter(torch.ones(64))
    optimizer = optim.AdamW([p, small], state_dtype="8bit")
    train(optimizer, 1)
    tensors = [t for t in optimizer.state[p].values() if t.dim()]
    assert sum(t.numel() * t.element_size() for t in tensors) <= 2.1 * p.numel()
    assert optimizer.state[small]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("narrow", [NARROW[name][1] for name in ("stochastic", "kahan", "master")], ids=str)
def test_small_steps_move_weights_in_bfloat16(narrow):
    p = torch.nn.Parameter(torch.ones(100, 100, dtype=torch.bfloat16))
    stuck = torch.nn.Parameter(p.detach().clone())
    optimizers = [optim.AdamW([p], lr=1e-4, weight_decay=0.0, **narrow), torch.optim.AdamW([stuck], lr=1e-4)]
    for _ in range(50):
        p.grad, stuck.grad = torch.ones_like(p), torch.ones_like(p)
        for optimizer in optimizers:
            optimizer.step()
    assert (stuck == 1.0).all()
    assert abs(p.double().mean().item() - (1 - 50e-4)) < 2.0**-9  # half a unit in the last place


@pytest.mark.parametrize("dtype, part", [(torch.bfloat16, "0.00390625"), (torch.float16, "0.000488281")])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
def test_the_constructor_warns_where_small_steps_are_lost(name, dtype, part):
    def make(dtype, **narrow):
        getattr(optim, name)([torch.nn.Parameter(torch.ones(10, dtype=dtype))], lr=1e-4, **narrow)

    with pytest.warns(UserWarning, match=f"parameters in {dtype} lose every update below {part} of their size"):
        make(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(torch.float32)
        for kept in ("stochastic", "kahan", "master"):
            make(dtype, **NARROW[kept][1])


def digits_loss(dtype, **narrow) -> float:
    """The loss on all digits after training on them in ``dtype``."""
    from fusedtrain import data

    digits = data.digits()
    x = torch.stack([digits[i][0].float().mean(0).flatten() for i in range(0, len(digits))])
    x, y = (x - x.mean()) / x.std(), torch.tensor([int(digits[i][1]) for i in range(len(digits))])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 96), torch.nn.ReLU(), torch.nn.Linear(96, 10)).to(dtype)
    optimizer = optim.AdamW(model.parameters(), lr=2e-3, **narrow)
    for _ in range(6):
        for rows in torch.arange(len(y)).split(64):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows].to(dtype)).float(), y[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(x.to(dtype)).float(), y).item()


def test_training_in_fewer_bits_follows_float32():
    expected = digits_loss(torch.float32)
    losses = {name: digits_loss(dtype, **narrow) for name, (dtype, narrow) in NARROW.items()}
    assert expected < 0.1
    assert all(loss < 1.5 * expected for loss in losses.values()), (expected, losses)


def test_swapped_averages_and_loaded_weights_do_not_lose_masters():
    model = torch.nn.Linear(3, 4).to(torch.bfloat16)
    optimizer = optim.AdamW(model.parameters(), lr=0.01, master_weights=True, ema_decay=0.5)
    train(optimizer, 2)
    masters = [optimizer.state[p]["master"].clone() for p in model.parameters()]
    assert all(m.dtype == torch.float32 and torch.equal(m.bfloat16(), p) for m, p in zip(masters, model.parameters()))
    with optimizer.swap_ema():
        pass
    assert all(torch.equal(optimizer.state[p]["master"], m) for p, m in zip(model.parameters(), masters))
    model.load_state_dict({name: torch.full_like(t, 7.0) for name, t in model.state_dict().items()})
    train(optimizer, 1, first=2)
    assert all((p > 6).all() for p in model.parameters())


def test_masters_that_are_not_in_use_and_parameters_set_by_hand_do_not_lead_averages_astray():
    p = torch.nn.Parameter(torch.ones(5).bfloat16())
    with_masters = optim.AdamW([p], lr=0.1, master_weights=True, ema_decay=0.5)
    p.grad = torch.ones_like(p)
    with_masters.step()
    p.grad = None
    with torch.no_grad():
        p.fill_(5.0)
    for _ in range(20):
        with_masters.step()
    assert torch.equal(with_masters.state[p]["ema"].bfloat16(), p)
    without = optim.AdamW([p], lr=0.1, ema_decay=0.5)
    without.load_state_dict(with_masters.state_dict())
    assert without.state[p].keys() == with_masters.state[p].keys() - {"master"}


def test_averages_end_where_nobody_goes_on_with_them():
    """Else an optimizer of later would find those of long ago."""
    p = torch.nn.Parameter(torch.ones(5))
    optimizers = [optim.AdamW([p], lr=0.1, ema_decay=decay) for decay in (0.5, None, 0.5)]
    for optimizer, before in zip(optimizers, [None, *optimizers]):
        if before is not None:
            optimizer.load_state_dict(before.state_dict())
        begin = p.detach().clone()
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert ("ema" in optimizer.state[p]) == (optimizer is not optimizers[1])
    assert torch.equal(optimizers[2].state[p]["ema"], begin.lerp(p.detach(), 0.5))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_loss_scaler_steps_an_optimizer_without_any_gradient(device, backend, name):
    """As the one of two whose network has its turn at another step."""
    harness.skip_unless_runs(backend, device, "optimizer_step")
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    one, other = (getattr(optim, name)([p], **OPTIMIZERS[name], ema_decay=0.5) for p in params)
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    for p in (*params, params[0]):
        for optimizer in (one, other):
            optimizer.zero_grad()
        before = [p.detach().clone() for p in params]
        scaler.scale(p.sum()).backward()
        for optimizer in (one, other):
            scaler.step(optimizer)
        scaler.update()
        for q, own in zip(params, before):
            assert torch.equal(q, own) == (q is not p)


def test_float64_keeps_its_states():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    p.grad = torch.ones_like(p)
    with pytest.raises(TypeError, match="AdamW: state_dtype=8bit is not for parameters in float64"):
        optim.AdamW([p], state_dtype="8bit").step()


@pytest.mark.parametrize("by", ["found_inf", "skip"])
@pytest.mark.parametrize("name", ["SGD", "Adan"])
def test_a_first_step_that_is_left_out_leaves_the_next_one_to_be_the_first(device, backend, name, by):
    harness.skip_unless_runs(backend, device, "optimizer_step")
    runs = []
    for left_out in (True, False):
        params = parameters(device)
        extras = {"max_grad_norm": float("inf"), "nonfinite": "skip"} if by == "skip" else {}
        optimizer = getattr(optim, name)(params, **OPTIMIZERS[name], **extras)
        if left_out:
            set_gradients(params, 0)
            if by == "skip":
                params[0].grad[1, 2, 0, 0] = float("inf")
            else:
                optimizer.found_inf = torch.ones((), device=device)
            optimizer.step()
            optimizer.found_inf = None
            saved = optimizer.state_dict()["state"].values()
            assert all(value.isfinite().all() for state in saved for value in state.values())
        runs.append({str(i): p.reshape(-1) for i, p in enumerate(train(optimizer, 3, first=1))})
    harness.assert_bitwise_equal(*runs, name)


@pytest.mark.parametrize("dtype", harness.DTYPES)
def test_numbers_stay_float32_when_the_parameter_is_a_number_too(dtype):
    p = torch.ones((), dtype=dtype, requires_grad=True)
    optimizer = optim.NovoGrad([p], amsgrad=True)
    runs = []
    for step in range(3):
        if step == 2:
            saved, optimizer = optimizer.state_dict(), optim.NovoGrad([p], amsgrad=True)
            optimizer.load_state_dict(saved)
        p.grad = torch.full_like(p, step + 0.1)
        optimizer.step()
        runs.append(optimizer.state[p]["exp_avg_sq"])
    assert all(v.dtype == torch.float32 and v.shape == () for v in runs)


@pytest.mark.parametrize("name", ["Lion", "Adan", "Lamb", "NovoGrad", "RMSpropTF"])
def test_states_of_an_older_timm_are_completed_as_timm_does(zoo, name):
    newer = {"caution", "corrected_weight_decay", "max_lr_snapshot", "foreach", "maximize", "no_prox"}
    newer -= {"foreach"} if name == "Adan" else set()  # which timm does not complete itself
    newer |= {"amsgrad"} if name == "NovoGrad" else set()
    newer |= {"decoupled_decay"} if name != "RMSpropTF" else set()
    arguments = {"lr": 0.01, "weight_decay": 0.1}
    runs = []
    for cls, dtype in kinds(name):
        params = [p.detach().to(dtype).requires_grad_() for p in parameters()]
        first = stock_class(name)(params, **arguments)
        train(first, 2)
        saved = copy.deepcopy(first.state_dict())
        for group in saved["param_groups"]:
            for key in newer & group.keys():
                del group[key]
        second = cls(params, **arguments)
        second.load_state_dict(saved)
        runs.append(train(second, 3, first=2))
    assert_as_good(*runs, name)


@pytest.mark.parametrize("cls", [optim.AdamW, torch.optim.AdamW])
def test_hooks_have_the_last_word_on_what_is_loaded(cls):
    """torch's own recipe: states by name, whatever the order."""
    saved_order, order = "ab", "ba"
    made = {name: torch.full((3,), 1.0 + i, requires_grad=True) for i, name in enumerate("ab")}
    before = cls([(name, made[name]) for name in saved_order])
    for i, p in enumerate(made.values()):
        p.grad = torch.full_like(p, 1.0 + i)
    before.step()
    after = cls([(name, made[name]) for name in order])

    def by_name(optimizer, state_dict):
        (group,) = state_dict["param_groups"]
        places = dict(zip(group["param_names"], group["params"]))
        state = {i: state_dict["state"][places[name]] for i, name in enumerate(order)}
        return {"state": state, "param_groups": [group | {"param_names": list(order), "params": [0, 1]}]}

    def afterwards(optimizer):
        optimizer.state[made["a"]]["exp_avg_sq"] = torch.full((3,), 7.0)

    after.register_load_state_dict_pre_hook(by_name)
    after.register_load_state_dict_post_hook(afterwards)
    after.load_state_dict(before.state_dict())
    for p in made.values():
        assert torch.equal(after.state[p]["exp_avg"], before.state[p]["exp_avg"])
    assert after.state[made["a"]]["exp_avg_sq"].tolist() == [7.0] * 3
    after.load_state_dict(before.state_dict())  # nothing is left behind by the first time


@pytest.mark.parametrize("extras", [{}, {"state_dtype": "8bit"}, {"ema_decay": 0.9}], ids=str)
def test_states_of_other_shapes_are_refused(extras):
    """Also those that would be spread over more rows: of a head with one class, say."""
    one, ten = (torch.ones(classes, 8, requires_grad=True) for classes in (1, 10))
    before, after = (optim.SGD([p], lr=0.1, momentum=0.9, **extras) for p in (one, ten))
    train(before, 1)
    saved = before.state_dict()
    if "ema_decay" in extras:
        del saved["state"][0]["momentum_buffer"]
    train(after, 1)
    own = copy.deepcopy(after.state_dict())
    with pytest.raises(ValueError, match=r"SGD: the loaded \w+ of shape \[1, 8\] is not of a .* of shape \[10, 8\]"):
        after.load_state_dict(saved)
    assert after.state_dict()["param_groups"] == own["param_groups"]
    harness.assert_bitwise_equal(after.state_dict()["state"][0], own["state"][0], "left as it was")


@pytest.mark.parametrize("fault", ["step", "hook"])
@every_optimizer
def test_a_state_that_cannot_be_loaded_changes_nothing(name, fault):
    params = parameters()
    optimizer = getattr(optim, name)(params, **OPTIMIZERS[name])
    train(optimizer, 2)
    before, saved = optimizer.state, copy.deepcopy(optimizer.state_dict())
    of_before = {p: dict(state) for p, state in before.items()}
    if fault == "step":
        for kept in (*saved["state"].values(), *saved["param_groups"]):
            kept |= {"step": torch.ones(2)}
    else:
        optimizer.register_load_state_dict_post_hook(lambda _: 1 / 0)
    groups = optimizer.param_groups
    with pytest.raises((RuntimeError, ZeroDivisionError)):
        optimizer.load_state_dict(saved)
    assert optimizer.state is before and optimizer.param_groups is groups
    assert all(before[p].keys() == s.keys() and all(before[p][k] is s[k] for k in s) for p, s in of_before.items())
    train(optimizer, 1, first=2)


@every_optimizer
def test_parameters_that_get_another_shape_are_refused(name):
    """Before any is stepped: of a classifier with more classes, say, whose bias would be spread over rows."""
    params = [torch.ones(2, 3, requires_grad=True), torch.ones(3, requires_grad=True)]
    optimizer = getattr(optim, name)(params, **OPTIMIZERS[name])
    train(optimizer, 1)
    params[1].grad, params[1].data = None, torch.ones(4, 3)
    set_gradients(params, 1)
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=rf"{name}: the \w+ of shape \[3\] is not of a parameter of shape \[4, 3\]"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before))
    del optimizer.state[params[1]]
    optimizer.step()
    assert optimizer.state[params[0]] and not torch.equal(params[1], before[1])


@pytest.mark.parametrize("number", [lambda n: n, lambda n: torch.as_tensor(n, dtype=torch.float64)], ids=["", "wide"])
@every_optimizer
def test_states_that_are_put_in_as_they_were_saved_go_on(name, number):
    """As ZeroRedundancyOptimizer does it, without ``load_state_dict``; numbers may be of other dtypes, as in torch."""
    first, second = (getattr(optim, name)(parameters(), **OPTIMIZERS[name]) for _ in range(2))
    train(first, 2)
    saved = copy.deepcopy(first.state_dict())
    (group,), (own,) = first.param_groups, second.param_groups
    for i, (p, q) in enumerate(zip(group["params"], own["params"])):
        q.data.copy_(p.detach())
        second.state[q].update(saved["state"][i])
        for key in second.state[q].keys() & {"step", *second._numbers}:
            second.state[q][key] = number(second.state[q][key])
    own |= saved["param_groups"][0] | {"params": tuple(own["params"])}
    own |= {"step": number(own["step"])} if "step" in own else {}
    for p, q in zip(train(first, 2, first=2), train(second, 2, first=2)):
        assert torch.equal(p, q)


@pytest.mark.parametrize("cls", [optim.NovoGrad, optim.AdamW])
def test_hooks_see_what_is_saved_and_have_the_last_word(cls):
    p = torch.ones(70, 70, requires_grad=True)
    optimizer, seen = cls([p], lr=0.1, state_dtype="8bit"), []
    train(optimizer, 1)
    plain = optimizer.state_dict()

    def shrink(optimizer, saved):
        seen.append(copy.deepcopy(saved))
        (state,) = saved["state"].values()
        return {**saved, "state": {0: state | {"exp_avg": state["exp_avg"].bfloat16()}}}

    optimizer.register_state_dict_post_hook(shrink)
    shrunk = optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(shrunk, plain["state"][0]["exp_avg"].bfloat16()) and shrunk.dtype == torch.bfloat16
    assert seen[0]["param_groups"] == plain["param_groups"] and seen[0]["state"][0].keys() == plain["state"][0].keys()
    assert type(seen[0]["state"][0]["step"]) is type(plain["state"][0]["step"])
    optimizer.state_dict()
    assert len(seen) == 2  # nothing is left behind by the first time

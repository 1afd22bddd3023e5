"""optimizer_step: one step for a list of parameters in place."""

import functools

import harness
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedtrain.ops import _codes, optimizer_step_
from fusedtrain.ops.optimizer_step import IMPLS, RULES, reference

COEFFICIENTS = {
    "adam": (0.9, 0.999, 1e-8),
    "amsgrad": (0.9, 0.99, 1e-6),
    "sgd": (),
    "momentum": (0.9, 0.1, 0.0),
    "lion": (0.9, 0.99),
    "rmsprop": (0.99, 1e-8, 0.0, 0.0, 0.0),
    "rmsprop_momentum": (0.9, 1e-10, 1.0, 0.9, 1.0),
    "rmsprop_centered": (0.9, 1e-3, 1.0, 0.0, 0.0),
    "rmsprop_centered_momentum": (0.9, 1e-8, 0.0, 0.9, 0.0),
    "adan": (0.98, 0.92, 0.99, 1e-8),
    "lamb": (0.9, 0.999, 1e-6, 0.1, 1.0, 1.0, 0.0),
    "novograd": (0.95, 0.98, 1e-8, 1.0),
    "novograd_amsgrad": (0.95, 0.98, 1e-8, 0.05),
}
# Sizes around one vector of any instruction set, one chunk of 8192, none at all, and several dimensions.
SHAPES = [(1,), (0, 3), (15,), (3, 5, 3, 3), (8192,), (8193,), (70, 250)]
PLAIN = {"lr": 0.03}
EVERYTHING = {
    "lr": 0.03,
    "weight_decay": 0.1,
    "decoupled": True,
    "maximize": True,
    "ema_decay": 0.9,
    "zero_grads": True,
    "max_norm": 1.0,
    "norm": 200.0,
    "grad_scale": 4.0,
    "found_inf": 0.0,
}
OPTIONS = {"plain": PLAIN, "l2": PLAIN | {"weight_decay": 0.1}, "everything": EVERYTHING}
SCALARS = {"norm": torch.float64, "grad_scale": torch.float32, "found_inf": torch.float32}


def make(rule, device, shapes=SHAPES, dtype=torch.float32, with_ema=False, steps=7.0) -> dict:
    """The lists of the op, states as after some steps."""

    def numbers(seed, dtype=dtype):
        return [harness.normal(*shape, dtype=dtype, device=device, seed=seed + i) for i, shape in enumerate(shapes)]

    positive = ("exp_avg_sq", "max_exp_avg_sq")
    states = []
    for k, name in enumerate(RULES[rule].states):
        column = numbers(1000 * (k + 2))
        # A variance of about zero, as square_avg near the square of grad_avg means, has no good digits in any order.
        states += [t.abs() + 1 if name == "square_avg" else t.abs() if name in positive else t / 8 for t in column]
    for k, _ in enumerate(RULES[rule].scalars):
        states += [torch.tensor(0.5 + k + i, device=device) for i, _ in enumerate(shapes)]
    counted = [torch.tensor(steps, device=device) for _ in shapes] if RULES[rule].counts else []
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    ema = numbers(9000, acc) if with_ema else []
    return {"params": numbers(0), "grads": numbers(500), "states": states, "steps": counted, "ema": ema}


def run(function, rule, lists, options) -> dict:
    """``function`` on copies of ``lists``; what it leaves in them, by name."""
    lists = {name: [t.clone() for t in tensors] for name, tensors in lists.items()}
    device = lists["params"][0].device
    options = {
        name: torch.tensor(value, dtype=SCALARS[name], device=device) if name in SCALARS else value
        for name, value in options.items()
    }
    function(*lists.values(), rule=rule, coefficients=COEFFICIENTS[rule], **options)
    return by_name(lists)


def by_name(lists) -> dict:
    return {f"{name}[{i}]": torch.atleast_1d(t) for name, tensors in lists.items() for i, t in enumerate(tensors)}


def truth(
    *lists,
    rule,
    coefficients,
    lr,
    weight_decay=0.0,
    decoupled=False,
    maximize=False,
    ema_decay=0.0,
    zero_grads=False,
    norm=None,
    max_norm=float("inf"),
    skip_nonfinite=False,
    grad_scale=None,
    found_inf=None,
):
    reference(
        *lists,
        _codes.RULES.index(rule),
        lr,
        weight_decay,
        decoupled,
        coefficients,
        maximize,
        ema_decay,
        zero_grads,
        norm,
        max_norm,
        skip_nonfinite,
        grad_scale,
        found_inf,
    )


def assert_as_good_as_reference(rule, lists, options) -> None:
    ours = run(optimizer_step_, rule, lists, options)
    double = {name: [t.double() for t in tensors] if name != "steps" else tensors for name, tensors in lists.items()}
    exact = run(truth, rule, double, options)
    stock = run(truth, rule, lists, options)
    for name, value in ours.items():
        if name.startswith("steps"):
            assert torch.equal(value, exact[name])
        else:
            harness.assert_as_good_as_torch(value, stock[name], exact[name], f"{rule} {name}")


@pytest.mark.parametrize("dtype", harness.DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("rule", _codes.RULES)
def test_as_good_as_plain_torch(device, kernels, rule, options, dtype):
    harness.skip_unless_runs(kernels, device, "optimizer_step", dtype)
    lists = make(rule, device, dtype=dtype, with_ema=options == "everything")
    assert_as_good_as_reference(rule, lists, OPTIONS[options])


@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=5),
    dtypes=st.lists(st.sampled_from(harness.DTYPES), min_size=5, max_size=5),
    rule=st.sampled_from(_codes.RULES),
    everything=st.booleans(),
)
def test_any_list_of_shapes_and_dtypes(device, kernels, shapes, dtypes, rule, everything):
    harness.skip_unless_runs(kernels, device, "optimizer_step")
    parts = [make(rule, device, [shape], dtype, everything) for shape, dtype in zip(shapes, dtypes)]
    lists = {name: [part[name][0] for part in parts if part[name]] for name in ("params", "grads", "steps", "ema")}
    columns = len(RULES[rule].states + RULES[rule].scalars)
    lists["states"] = [part["states"][k] for k in range(columns) for part in parts]
    lists = {name: lists[name] for name in ("params", "grads", "states", "steps", "ema")}
    assert_as_good_as_reference(rule, lists, EVERYTHING if everything else PLAIN)


@pytest.mark.parametrize("rule", _codes.RULES)
def test_threads_and_lists_change_nothing(device, kernels, rule):
    harness.skip_unless_runs(kernels, device, "optimizer_step")
    lists = make(rule, device, with_ema=True)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(run(optimizer_step_, rule, lists, EVERYTHING))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        harness.assert_bitwise_equal(result, results[0], "with more threads")
    for i in range(len(SHAPES)):
        alone = {name: [t for j, t in enumerate(tensors) if j % len(SHAPES) == i] for name, tensors in lists.items()}
        assert torch.equal(run(optimizer_step_, rule, alone, EVERYTHING)["params[0]"], results[0][f"params[{i}]"])


@pytest.mark.parametrize(
    "change",
    [
        {"found_inf": 1.0},
        {"norm": float("inf"), "skip_nonfinite": True},
        {"norm": float("nan"), "skip_nonfinite": True},
    ],
)
@pytest.mark.parametrize("rule", _codes.RULES)
def test_skipped_steps_only_zero_the_gradients(device, backend, rule, change):
    harness.skip_unless_runs(backend, device, "optimizer_step")
    lists = make(rule, device, with_ema=True)
    before = by_name(lists)
    for zero_grads in (False, True):
        after = run(optimizer_step_, rule, lists, EVERYTHING | change | {"zero_grads": zero_grads})
        expected = {n: t * 0 if zero_grads and n.startswith("grads") else t for n, t in before.items()}
        assert all(torch.equal(after[name], expected[name]) for name in before)


@pytest.mark.parametrize("rule", _codes.RULES)
def test_nonfinite_norm_reaches_the_parameters_as_in_torch(device, backend, rule):
    harness.skip_unless_runs(backend, device, "optimizer_step")
    after = run(optimizer_step_, rule, make(rule, device), PLAIN | {"norm": float("nan"), "max_norm": 1.0})
    state = after["params[2]"] if rule != "lion" else after["states[2]"]  # sign(NaN) = 0
    assert state.isnan().all()


@pytest.mark.parametrize("rule", _codes.RULES)
def test_operators_agree_with_schema_and_fake(device, kernels, rule):
    harness.skip_unless_runs(kernels, device, "optimizer_step")
    lists = make(rule, device, with_ema=True)
    scalars = [torch.tensor(EVERYTHING[name], dtype=SCALARS[name], device=device) for name in SCALARS]
    arguments = (_codes.RULES.index(rule), 0.1, 0.1, True, list(COEFFICIENTS[rule]), False, 0.9, True)
    arguments = (*lists.values(), *arguments, scalars[0], 1.0, False, *scalars[1:])
    tests = ("test_schema", "test_faketensor")
    results = torch.library.opcheck(IMPLS[kernels].forward, arguments, test_utils=tests)
    assert set(results.values()) == {"SUCCESS"}, results


def test_autograd_sees_the_change(device, backend):
    harness.skip_unless_runs(backend, device, "optimizer_step")
    p = torch.ones(3, device=device, requires_grad=True)
    loss = p.square().sum()
    optimizer_step_([p], [torch.ones(3, device=device)], [], rule="sgd", lr=0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_dense_tensors_of_any_order_are_taken_and_others_refused(device, kernels):
    harness.skip_unless_runs(kernels, device, "optimizer_step")
    step = functools.partial(optimizer_step_, rule="sgd", lr=1.0)
    base = harness.normal(3, 4, 5, 6, device=device)
    for p in (base.permute(2, 0, 3, 1).clone(), base.to(memory_format=torch.channels_last)):
        g = torch.empty_like(p).copy_(p / 2)
        expected = p - g
        step([p], [g], [])
        assert torch.equal(p, expected)
    p = base.clone()
    for params, grads in (
        ([p[:, 1:]], [p[:, 1:]]),
        ([p], [p.to(memory_format=torch.channels_last)]),
        ([p], [p.half()]),
    ):
        with pytest.raises(RuntimeError, match=r"must be dense|must have the shapes, dtypes, strides"):
            step(params, grads, [])
        assert torch.equal(p, base)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "adamw"}, "rule must be one of adam, amsgrad, sgd, .* got 'adamw'"),
        ({"coefficients": (0.9,)}, "rule 'adam' has 3 coefficients, got 1"),
        ({"states": []}, "rule 'adam' takes 1 grads, 2 states and 1 steps for 1 params, got 1, 0 and 1"),
        ({"steps": []}, "got 1, 2 and 0"),
        ({"ema": [torch.ones(1)] * 2}, "ema: 2"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    lists = make("adam", "cpu", [(3,)])
    arguments = lists | {"rule": "adam", "lr": 0.1, "coefficients": COEFFICIENTS["adam"]} | changes
    with pytest.raises(ValueError, match=message):
        optimizer_step_(**arguments)

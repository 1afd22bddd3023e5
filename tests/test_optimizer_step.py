"""optimizer_step: one step for a list of parameters in place."""

import functools

import harness
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedtrain import optim
from fusedtrain.backend import current_backend, use_backend
from fusedtrain.ops import _codes, _narrow, optimizer_step_
from fusedtrain.ops.optimizer_step import (
    CAUTIOUS,
    IMPLS,
    NARROW_IMPLS,
    RULES,
    SUMMED,
    SUMS,
    Options,
    is_signed,
    reference,
)

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
COEFFICIENTS |= {f"{rule}_cautious": COEFFICIENTS[rule] for rule in CAUTIOUS}
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


def interpreter_runs(kernels, device, cases: bool) -> None:
    """Triton's interpreter takes a fifth of a second per list: skips but for some ``cases``."""
    if kernels == "triton" and device == "cpu" and not cases:
        pytest.skip("Triton's interpreter runs other cases of this test, or of test_triton.py")


def make(rule, device, shapes=None, dtype=torch.float32, with_ema=False, steps=7.0) -> dict:
    """The lists of the op, states as after some steps."""
    if shapes is None:  # Triton's interpreter takes its time per chunk
        interpreted = current_backend() == "triton" and device == "cpu"
        shapes = [shape for shape in SHAPES if not (interpreted and shape in ((8192,), (70, 250)))]

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


def mixed(rule, device, shapes, dtypes, with_ema=False) -> dict:
    """A list whose tensors have dtypes of their own."""
    parts = [make(rule, device, [shape], dtype, with_ema) for shape, dtype in zip(shapes, dtypes)]
    columns = range(len(RULES[rule].states + RULES[rule].scalars))
    joined = {name: [part[name][0] for part in parts if part[name]] for name in parts[0] if name != "states"}
    states = {"states": [part["states"][k] for k in columns for part in parts]}
    return {name: (joined | states)[name] for name in parts[0]}


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


def truth(*lists, **options):
    reference(*lists, *Options.of(**options))


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
    interpreter_runs(kernels, device, harness.DTYPES.index(dtype) == list(OPTIONS)[::-1].index(options))
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
    interpreter_runs(kernels, device, False)
    if RULES[rule].scalars or kernels == "triton":  # float64 is no better than a float32 number of the rule; or is none
        dtypes = [torch.float32 if dtype == torch.float64 else dtype for dtype in dtypes]
    lists = mixed(rule, device, shapes, dtypes, everything)
    assert_as_good_as_reference(rule, lists, EVERYTHING if everything else PLAIN)


@pytest.mark.parametrize("rule", _codes.RULES)
def test_threads_and_lists_change_nothing(device, kernels, rule):
    harness.skip_unless_runs(kernels, device, "optimizer_step")
    interpreter_runs(kernels, device, False)
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
    interpreter_runs(backend, device, rule in ("adam", "lamb", "novograd_amsgrad"))
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
    state = after["params[2]"] if not rule.startswith("lion") else after["states[2]"]  # sign(NaN) = 0
    assert state.isnan().all()


@pytest.mark.parametrize("rule", _codes.RULES)
def test_the_learning_rate_may_stand_on_the_device(device, backend, rule):
    harness.skip_unless_runs(backend, device, "optimizer_step")
    interpreter_runs(backend, device, rule == "adam")
    lists, rate = make(rule, device), 2.0**-5
    options = {"weight_decay": 0.5, "decoupled": True}
    there = options | {"lr": float("nan"), "device_lr": torch.tensor(rate, device=device)}
    runs = (run(optimizer_step_, rule, lists, one) for one in (options | {"lr": rate}, there))
    harness.assert_bitwise_equal(*runs, rule)


def step_parts(params, grads, states, steps, ema, **options) -> None:
    """Both halves of every parameter by themselves, as two processes would, with the sums over both."""
    parts, sums = [], 0.0
    for half in (0, 1):
        lists = (params, grads, states, steps, ema)
        parts.append([[t.chunk(2)[half] if t.dim() > 0 else t.clone() for t in tensors] for tensors in lists])
        own = params[0].new_zeros((len(params), SUMS), dtype=torch.float64)
        optimizer_step_(*parts[-1], **options, sums=own, sums_only=True)
        sums = sums + own
    for part in parts:
        optimizer_step_(*part, **options, sums=sums)
    for step, counted in zip(steps, part[3]):
        step.copy_(counted)
    for state, own in zip(states, part[2]):
        if state.dim() == 0:
            state.copy_(own)


@pytest.mark.parametrize("rule", SUMMED)
def test_parts_of_parameters_step_as_the_whole(device, backend, rule):
    harness.skip_unless_runs(backend, device, "optimizer_step")
    interpreter_runs(backend, device, rule != "novograd")
    lists = make(rule, device, [(4, 30), (2, 8200)], with_ema=True)
    exact = {name: [t.double() for t in tensors] if name != "steps" else tensors for name, tensors in lists.items()}
    ours, stock = run(step_parts, rule, lists, EVERYTHING), run(truth, rule, lists, EVERYTHING)
    exact = run(truth, rule, exact, EVERYTHING)
    for name, value in ours.items():
        if name.startswith("steps"):
            assert torch.equal(value, exact[name])
        else:
            harness.assert_as_good_as_torch(value, stock[name], exact[name], f"{rule} {name}")


@pytest.mark.parametrize("rule", _codes.RULES)
def test_operators_agree_with_schema_and_fake(device, kernels, rule):
    harness.skip_unless_runs(kernels, device, "optimizer_step")
    interpreter_runs(kernels, device, rule in ("adam", "novograd_amsgrad"))
    lists = make(rule, device, with_ema=True)
    scalars = [torch.tensor(EVERYTHING[name], dtype=SCALARS[name], device=device) for name in SCALARS]
    arguments = (_codes.RULES.index(rule), 0.1, 0.1, True, list(COEFFICIENTS[rule]), False, 0.9, True)
    arguments = (*lists.values(), *arguments, scalars[0], 1.0, False, *scalars[1:], None, None, False)
    tests = ("test_schema", "test_faketensor")
    results = torch.library.opcheck(IMPLS[kernels].forward, arguments, test_utils=tests)
    assert set(results.values()) == {"SUCCESS"}, results


@harness.needs_memory(12)
def test_parameters_of_more_than_2_31_elements(device, kernels):
    harness.skip_unless_runs(kernels, device, "optimizer_step")
    interpreter_runs(kernels, device, False)
    for narrow in ({}, {"rounding": "stochastic", "seed": 1}):
        p = torch.zeros(2**31 + 9, dtype=torch.bfloat16, device=device)
        optimizer_step_([p], [torch.ones_like(p)], [], rule="sgd", lr=1.0, **narrow)
        assert all((part == -1.0).all() for part in p.split(2**28))


def test_autograd_sees_the_change(device, backend):
    harness.skip_unless_runs(backend, device, "optimizer_step")
    p = torch.ones(3, device=device, requires_grad=True)
    loss = p.square().sum()
    optimizer_step_([p], [torch.ones(3, device=device)], [], rule="sgd", lr=0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ["params", "grads", "states", "ema"])
def test_tensors_without_memory_are_refused(kernels, name):
    lists = make("adam", "cpu", [(3,), (4,)], with_ema=True)
    before = [t.clone() for t in lists["params"]]
    lists[name][1] = torch.empty_like(lists[name][1], device="meta")
    with pytest.raises(RuntimeError, match="must be on one device, got cpu, meta"):
        optimizer_step_(*lists.values(), rule="adam", coefficients=COEFFICIENTS["adam"], lr=0.1)
    assert torch.equal(lists["params"][0], before[0])


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
        ({"rounding": "up"}, "rounding must be one of nearest, stochastic, kahan, got 'up'"),
        ({"rounding": "stochastic"}, "rounding='stochastic' needs a seed"),
        ({"exact": [torch.ones(3)] * 2}, "exact must hold none or 1 tensors, got 2"),
        ({"scales": [torch.ones(1)]}, "scales must hold none or 2 tensors, got 1"),
        ({"sums": torch.zeros(1, 2)}, "rule 'adam' has no sums"),
        ({"sums_only": True}, "sums_only needs sums"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    lists = make("adam", "cpu", [(3,)])
    arguments = lists | {"rule": "adam", "lr": 0.1, "coefficients": COEFFICIENTS["adam"]} | changes
    with pytest.raises(ValueError, match=message):
        optimizer_step_(**arguments)


# --- numbers stored in fewer bits -------------------------------------------------------------------------------------

# Of the parameter, of its states, and what the op is told.
FORMATS = {
    "bf16 states": (torch.float32, torch.bfloat16, {}),
    "fp32 states": (torch.float16, torch.float32, {}),
    "fp16 states": (torch.float16, torch.float16, {}),
    "8-bit states": (torch.float32, torch.uint8, {}),
    "stochastic": (torch.bfloat16, torch.bfloat16, {"rounding": "stochastic"}),
    "stochastic fp16, 8-bit states": (torch.float16, torch.uint8, {"rounding": "stochastic"}),
    "kahan": (torch.bfloat16, torch.bfloat16, {"rounding": "kahan"}),
    "master": (torch.bfloat16, torch.float32, {"exact": torch.float32}),
}


def coded(t: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty_like(t, dtype=torch.uint8)
    scales = t.new_empty(_narrow.blocks(t.numel()), dtype=torch.float32)
    _narrow.encode_(codes, scales, t, signed)
    return codes, scales


def make_narrow(rule, device, name) -> tuple[dict, dict]:
    """The lists of the op and its options with a seed."""
    dtype, stored, options = FORMATS[name]
    lists = make(rule, device, dtype=dtype, with_ema=True)
    names, count = RULES[rule].states, len(lists["params"])
    states, scales = lists["states"], []
    for k, state in enumerate(states[: len(names) * count]):
        if stored == torch.uint8:  # but for small ones, as the optimizers do it
            small = state.float(), state.new_empty(0, dtype=torch.float32)
            states[k], scale = small if state.numel() < 100 else coded(state, is_signed(names[k // count]))
            scales.append(scale)
        else:
            states[k] = state.to(stored)
    exact = []
    if "exact" in options:
        exact = [p + harness.normal(*p.shape, device=device, seed=i) / 2**12 for i, p in enumerate(lists["params"])]
        lists["params"] = [x.to(dtype) for x in exact]
    elif options.get("rounding") == "kahan":
        exact = [(p.float() / 2**10).to(dtype) for p in lists["params"]]
    return lists, {**options, "exact": exact, "scales": scales, "seed": 2**40 + 7}


def run_narrow(rule, lists, options, everything=True) -> dict:
    """What the op leaves in copies of the lists, by name; codes as numbers."""
    held = {name: [t.clone() for t in options[name]] for name in ("exact", "scales")}
    after = run(optimizer_step_, rule, lists, (EVERYTHING if everything else PLAIN) | options | held)
    names, count = RULES[rule].states, len(lists["params"])
    for k, scale in enumerate(held["scales"]):
        if scale.numel():
            after[f"states[{k}]"] = _narrow.decode(after[f"states[{k}]"], scale, is_signed(names[k // count]))
    return after | by_name({"exact": held["exact"]})


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rule", _codes.RULES)
def test_numbers_in_fewer_bits_are_as_good_as_plain_torch(device, kernels, rule, name):
    """Random bits are the same in every backend, so that a result may differ by a unit in the last place alone."""
    harness.skip_unless_runs(kernels, device, "optimizer_step_narrow")
    interpreter_runs(kernels, device, _codes.RULES.index(rule) == 2 * list(FORMATS).index(name))
    lists, options = make_narrow(rule, device, name)
    ours = run_narrow(rule, lists, options)
    with use_backend("reference"):
        stock = run_narrow(rule, lists, options)
    double = {key: [t.double() for t in tensors] if key != "steps" else tensors for key, tensors in lists.items()}
    count, names, exact = len(lists["params"]), RULES[rule].states, options["exact"]
    for k, scale in enumerate(options["scales"]):
        if scale.numel():
            double["states"][k] = _narrow.decode(lists["states"][k], scale, is_signed(names[k // count])).double()
    if exact:
        kahan = options.get("rounding") == "kahan"
        double["params"] = [(p + e if kahan else e).double() for p, e in zip(double["params"], exact)]
    truth_ = run(truth, rule, double, EVERYTHING)
    for key, value in ours.items():
        if key.startswith("steps"):
            assert torch.equal(value, truth_[key])
        elif not key.startswith("exact"):
            harness.assert_as_good_as_torch(value, stock[key], truth_[key], f"{rule} {key}")
        elif "exact" in options and FORMATS[name][2].get("exact"):
            harness.assert_as_good_as_torch(value, stock[key], truth_[key.replace("exact", "params")], f"{rule} {key}")


@pytest.mark.parametrize("name", FORMATS)
def test_every_backend_stores_the_same_bits(device, kernels, name):
    """Of numbers and rates with few bits, which no arithmetic rounds before they are stored."""
    harness.skip_unless_runs(kernels, device, "optimizer_step_narrow")
    lists, options = make_narrow("momentum", device, name)
    lists["ema"] = []
    for key in ("params", "grads", "states"):
        for t in lists[key]:  # one tensor where numbers of float16 are multiples of the least
            if t.is_floating_point():
                t.copy_((t.float() * 8).round() * (2.0**-23 if t.shape == (8193,) else 2.0**-3))
    for p, rest in zip(lists["params"], options["exact"]):
        rest.copy_(p.float() / 2**10 if options.get("rounding") else p.float() * (1 + 2.0**-10))
    options |= {"coefficients": (0.5, 0.5, 0.0), "lr": 2.0**-9, "zero_grads": True}
    runs = []
    for backend in (kernels, "reference"):
        with use_backend(backend):
            held = {key: [t.clone() for t in options[key]] for key in ("exact", "scales")}
            own = {key: [t.clone() for t in tensors] for key, tensors in lists.items()}
            optimizer_step_(*own.values(), rule="momentum", **options | held)
        runs.append(by_name(own | held))
    harness.assert_bitwise_equal(*runs, name)


def test_averages_take_in_what_became_of_the_parameter(device, kernels):
    """Also where stochastic rounding makes it infinite."""
    harness.skip_unless_runs(kernels, device, "optimizer_step_narrow")
    options = {"rule": "sgd", "coefficients": (), "lr": 1.0, "rounding": "stochastic", "seed": 1, "ema_decay": 0.5}
    for dtype, value in ((torch.float16, 65504.0), (torch.bfloat16, torch.finfo(torch.bfloat16).max)):
        p = torch.full((17,), value, dtype=dtype, device=device)
        ema = torch.ones(17, device=device)
        optimizer_step_([p], [-p / 8], [], [], [ema], **options)
        assert p.isinf().all() and ema.isinf().all()


def test_a_step_of_lamb_without_eps_does_not_depend_on_how_many_vectors_a_parameter_fills(device, kernels):
    """Lanes behind the last element divide 0 by 0."""
    steps = []
    for size in (15, 16, 17, 8193):
        p = torch.full((size,), 2.0, device=device)
        p.grad = torch.full((size,), 0.5, device=device)
        with use_backend(kernels):
            optim.Lamb([p], lr=0.1, eps=0.0, weight_decay=0.0, max_grad_norm=None, always_adapt=True).step()
        steps.append(p[0].item())
    assert steps == pytest.approx([2.0 - 0.1 * 2.0] * len(steps))  # of the length of the parameter


def test_a_block_of_codes_that_is_not_finite_leaves_the_others_alone(device, kernels):
    harness.skip_unless_runs(kernels, device, "optimizer_step_narrow")
    interpreter_runs(kernels, device, True)
    lists, options = make_narrow("momentum", device, "8-bit states")
    place = next(i for i, g in enumerate(lists["grads"]) if g.numel() == 8193)
    whole = run_narrow("momentum", lists, options)
    lists["grads"][place][300], lists["grads"][place][8192] = torch.inf, torch.nan
    ours = run_narrow("momentum", lists, options)
    with use_backend("reference"):
        stock = run_narrow("momentum", lists, options)
    state = f"states[{place}]"
    broken = ~ours[state].isfinite()
    assert broken[256:512].all() and broken[8192] and broken.sum() == 257
    assert torch.equal(broken, ~stock[state].isfinite())
    assert torch.equal(ours[state][~broken], whole[state][~broken])


@pytest.mark.parametrize("name", FORMATS)
def test_random_bits_depend_on_seed_step_and_place_alone(device, kernels, name):
    harness.skip_unless_runs(kernels, device, "optimizer_step_narrow")
    interpreter_runs(kernels, device, False)
    lists, options = make_narrow("rmsprop_momentum", device, name)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(run_narrow("rmsprop_momentum", lists, options))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        harness.assert_bitwise_equal(result, results[0], "with more threads")
    later = lists | {"steps": [step + 1 for step in lists["steps"]]}  # which the rule itself does not ask for
    for other in (
        run_narrow("rmsprop_momentum", lists, options | {"seed": 3}),
        run_narrow("rmsprop_momentum", later, options),
    ):
        drawn = any(not torch.equal(other[key], results[0][key]) for key in other if not key.startswith("steps"))
        assert drawn == (name not in ("fp32 states", "master"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_is_unbiased_and_keeps_what_fits(device, backend, dtype):
    harness.skip_unless_runs(backend, device, "optimizer_step_narrow")
    interpreter_runs(backend, device, False)
    count, tiny = 1 << 18, 2.0**-24 if dtype == torch.float16 else 2.0**-133
    for start, lr in ((1.0, 2.0**-12), (-3.0, 2.0**-11), (0.0, tiny / 4), (tiny * 3, -tiny / 4)):
        p, g = (
            torch.full((2, count), start, dtype=dtype, device=device),
            torch.ones(2, count, dtype=dtype, device=device),
        )
        g[1] = 0.0
        optimizer_step_([p], [g], [], rule="sgd", lr=lr, rounding="stochastic", seed=5)
        assert torch.equal(p[1], torch.full_like(p[1], start))
        values, counts = p[0].double().unique(return_counts=True)
        assert len(values) == 2  # the neighbours
        mean = (values * counts).sum() / count
        spread = (values[1] - values[0]).item() / count**0.5 / 2  # at most, of the mean
        assert abs(mean.item() - (start - lr)) < 4 * spread


def test_second_moments_decay_in_few_bits(device, backend):
    """In steps of 1/256 an average with a rate of 1/1000 never decays when it is rounded to nearest."""
    harness.skip_unless_runs(backend, device, "optimizer_step_narrow")
    interpreter_runs(backend, device, False)
    for stored in (torch.bfloat16, torch.uint8):
        p, g = torch.zeros(8192, device=device), torch.zeros(8192, device=device)
        v = torch.linspace(0.1, 1.0, 8192, device=device)
        moments, scales = [torch.zeros_like(p), v], []
        if stored == torch.bfloat16:
            states = [t.bfloat16() for t in moments]
        else:
            states, scales = map(list, zip(*(coded(t, bool(k == 0)) for k, t in enumerate(moments))))
        step = torch.tensor(0.0, device=device)
        for i in range(200):
            optimizer_step_(
                [p], [g], states, [step], rule="adam", lr=0.0, coefficients=(0.9, 0.999, 1e-8), scales=scales, seed=i
            )
        now = states[1].float() if stored == torch.bfloat16 else _narrow.decode(states[1], scales[1], False)
        assert 0.75 < (now.sum() / v.sum()).item() < 0.89, stored  # 0.999^200 = 0.82


def test_codes_keep_signs_zeros_and_the_order_of_memory(device):
    x = harness.normal(5, 3, 40, 8, device=device).to(memory_format=torch.channels_last)
    x[0, 0, 0, :4] = torch.tensor([0.0, 1e-30, -1e-30, float("inf")])
    x[-1] = x[-1] * 1e-6
    for signed in (True, False):
        values = x if signed else x.abs()
        codes, scales = coded(values, signed)
        assert codes.stride() == x.stride()
        back = _narrow.decode(codes, scales, signed)
        broken = scales.isnan().repeat_interleave(256)[: x.numel()]
        assert torch.equal(_narrow.flat(back).isnan(), broken) and broken[:256].all() and not broken[256:].any()
        sound = ~back.isnan()
        assert ((back - values)[sound].abs() <= 2.0**-4 * values[sound].abs() + 2.0**-15 * 5).all()
        again = coded(torch.where(sound, back, 0.0), signed)  # loading what was saved changes nothing
        assert torch.equal(_narrow.decode(*again, signed)[sound], back[sound])
    tiny = coded(torch.tensor([1.0, 1e-20, 0.0]), False)
    assert (_narrow.decode(*tiny, False) > 0).tolist() == [True, True, False]  # it stands in a divisor


def test_a_parameter_set_by_hand_counts_more_than_its_master(device, kernels):
    harness.skip_unless_runs(kernels, device, "optimizer_step_narrow")
    p, master = torch.ones(40, device=device).bfloat16(), torch.full((40,), 1 + 2**-9, device=device)
    p[20:] = 5.0
    optimizer_step_([p], [torch.ones_like(p)], [], rule="sgd", lr=0.25, exact=[master])
    assert torch.equal(master, torch.tensor([0.75 + 2**-9] * 20 + [4.75] * 20, device=device))
    assert torch.equal(p, master.bfloat16())


@pytest.mark.parametrize("rule", ["adam", "novograd"])
def test_narrow_operators_agree_with_schema_and_fake(device, kernels, rule):
    harness.skip_unless_runs(kernels, device, "optimizer_step_narrow")
    interpreter_runs(kernels, device, rule == "novograd")
    lists, options = make_narrow(rule, device, "8-bit states")
    scalars = [torch.tensor(EVERYTHING[name], dtype=SCALARS[name], device=device) for name in SCALARS]
    arguments = (_codes.RULES.index(rule), 0.1, 0.1, True, list(COEFFICIENTS[rule]), False, 0.9, True)
    arguments = (*lists.values(), *arguments, scalars[0], 1.0, False, *scalars[1:])
    arguments = (*arguments, None, None, False, [], options["scales"], 0, 5)
    tests = ("test_schema", "test_faketensor")
    results = torch.library.opcheck(NARROW_IMPLS[kernels].forward, arguments, test_utils=tests)
    assert set(results.values()) == {"SUCCESS"}, results

"""batch_norm_act: y = a(batch_norm(x) + residual), or a(batch_norm(x)) + residual."""

import copy
import functools
import math

import cases
import harness
import properties
import pytest
import torch
from torch import nn

import fusedtrain
from fusedtrain import _extension, backend
from fusedtrain.ops import _codes, batch_norm_act
from fusedtrain.ops.batch_norm_act import IMPLS, reference

RESIDUALS = ("none", "before", "after")
FLAT = ("relu", "relu6", "hard_swish", "hard_sigmoid")  # activations that are 0 over a range
CASES = cases.pairwise(
    shape=[name for name in cases.SHAPES if name != "no_channels"],  # which torch's own batch_norm refuses
    layout=harness.LAYOUTS,
    dtype=harness.DTYPES,
    act=[act for act in _codes.ACTIVATIONS if act != "relu6"],
    training=[True, False],
    residual=RESIDUALS,
    vectors=["as x", "float32", "none"],
)
CASES = cases.with_relu6(CASES)
FIXED = cases.pairwise(  # statistics, weight and bias without gradients
    shape=["odd", "vectors", "one_pixel", "long", "one_channel", "empty_batch"],
    layout=harness.LAYOUTS,
    dtype=harness.DTYPES,
    act=["identity", "relu", "silu"],
    residual=RESIDUALS,
    vectors=["as x", "float32", "none"],
)
dense_layouts = pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
modes = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])


def make(
    device, shape=(3, 13, 7, 9), layout="contiguous", dtype=torch.float32, residual="none", vectors="as x", seed=0
) -> dict:
    inputs = {"x": harness.images(shape, layout, dtype, device, seed)}
    if vectors != "none":
        kind = dtype if vectors == "as x" or dtype == torch.float64 else torch.float32
        options = {"dtype": kind, "device": device}
        inputs["weight"] = harness.normal(shape[1], **options, seed=seed + 100).sigmoid()
        inputs["bias"] = harness.normal(shape[1], **options, seed=seed + 200)
    if residual != "none":
        inputs["residual"] = harness.images(shape, layout, dtype, device, seed + 300)
    return inputs


def make_fixed(device, case: dict, seed: int) -> dict:
    """Inputs of one of ``FIXED``; some weights are below 0, which turns the sign of what ReLU cuts."""
    names = ("layout", "dtype", "residual", "vectors")
    inputs = make(device, cases.SHAPES[case["shape"]], *(case[name] for name in names), seed)
    if "weight" in inputs:
        inputs["weight"] = inputs["weight"] - 0.5
    return inputs


def run(operation, names, training, act, residual, running, *tensors):
    """``operation`` on tensors called ``names``; with ``running`` statistics as further outputs."""
    given = dict(zip(names, tensors))
    x = given["x"]
    like = given.get("weight", x)  # torch wants parameters and running statistics in one dtype
    mean = torch.linspace(-1, 1, x.shape[1], dtype=torch.float64).to(like)
    var = torch.linspace(0.5, 2, x.shape[1], dtype=torch.float64).to(like)
    y = operation(
        *(x, mean, var, given.get("weight"), given.get("bias"), training, 0.3, 1e-3),
        *(act, given.get("residual"), residual == "after"),
    )
    return (y, mean, var) if running else y


def ours(x, mean, var, weight, bias, training, momentum, eps, act, residual, after):
    statistics = (mean, var, weight, bias, training, momentum, eps)
    return batch_norm_act(x, *statistics, act=act, residual=residual, residual_after=after)


def function(inputs, training=True, act="silu", residual="none", running=False):
    return functools.partial(run, ours, tuple(inputs), training, act, residual, running)


def reference_of(inputs, training=True, act="silu", residual="none", running=False):
    return functools.partial(run, reference, tuple(inputs), training, act, residual, running)


@pytest.mark.parametrize("case", CASES, ids=cases.label)
def test_output_gradients_and_running_statistics_are_as_good_as_torch(device, backend, case):
    harness.skip_unless_runs(backend, device, "batch_norm_act", case["dtype"])
    harness.skip_copied_layouts(backend, device, case["layout"])
    harness.skip_strides_of_reference(backend, case["layout"])
    shape = cases.SHAPES[case["shape"]]
    options = {name: case[name] for name in ("training", "act", "residual")} | {"running": True}
    # One value per channel has a test of its own. Of equal ones the rounding of their mean would be all that is left.
    options["training"] &= shape[2:] != (1, 1) or (shape[0] > 1 and case["layout"] != "expanded")

    def draw(seed):
        names = ("layout", "dtype", "residual", "vectors")
        return make(device, shape, *(case[name] for name in names), seed)

    draws = harness.draws(draw, device, backend)
    harness.assert_op_as_good_as_torch(
        function(draws[0], **options), reference_of(draws[0], **options), draws, "batch_norm_act"
    )


@pytest.mark.parametrize("case", FIXED, ids=cases.label)
def test_gradients_of_fixed_norms_are_as_good_as_torch(device, backend, case):
    harness.skip_unless_runs(backend, device, "batch_norm_act", case["dtype"])
    harness.skip_copied_layouts(backend, device, case["layout"])
    harness.skip_strides_of_reference(backend, case["layout"])
    draws = harness.draws(functools.partial(make_fixed, device, case), device, backend)
    calls = (of(draws[0], False, case["act"], case["residual"]) for of in (function, reference_of))
    harness.assert_op_as_good_as_torch(*calls, draws, "fixed", frozen=("weight", "bias"))


@dense_layouts
@pytest.mark.parametrize(
    ("act", "residual", "kept"),
    [
        *(("identity", residual, 0) for residual in RESIDUALS),
        *(("relu", "none", 1), ("relu", "before", 1), ("relu", "after", 1)),
        *(("relu6", "none", 1), ("silu", "none", 1)),
    ],
)
def test_fixed_norms_keep_no_more_than_stock_operators(device, kernels, layout, act, residual, kept):
    """One pass and one tensor less than torch's batch_norm, which keeps x whatever has a gradient."""
    inputs = make(device, (2, 16, 9, 9), layout, residual=residual)
    images = [inputs[name].requires_grad_() for name in inputs if name in ("x", "residual")]

    def call(x, *residuals):
        given = {**inputs, "x": x} | ({"residual": residuals[0]} if residuals else {})
        return function(given, False, act, residual)(*given.values())

    y = call(*images)
    saved = harness.saved_for_backward(call, *images)
    assert sum(t.numel() == y.numel() for t in saved) == kept
    assert all(t.numel() == 16 for t in saved if t.numel() != y.numel())
    keeps_x = act not in ("identity", "relu") or (act, residual) == ("relu", "after")
    assert y.grad_fn.name() == ("_BatchNormActBackward" if keeps_x else "_FixedBatchNormActBackward")


@dense_layouts
@pytest.mark.parametrize("act", ["identity", "relu"])
def test_gradients_of_fixed_norms_for_some_inputs(device, kernels, layout, act):
    """One of the two gradients alone is the same as both, in both directions; so is one of a compiled call."""
    inputs = make(device, layout=layout, residual="before")
    vectors = inputs.pop("weight") - 0.5, inputs.pop("bias")

    def call(x, residual):
        given = {"x": x, "weight": vectors[0], "bias": vectors[1], "residual": residual}
        return function(given, False, act, "before")(*given.values())

    properties.assert_frozen_inputs_change_nothing(call, inputs)
    properties.assert_repeats_bitwise(call, inputs)
    properties.assert_writes_every_element(call, inputs)
    properties.assert_takes_any_incoming_gradient(call, inputs)
    if act == "relu":  # that of the identity, for y.sum(), is none, as stock PyTorch's
        properties.assert_second_derivative_is_refused(call, inputs)
    y = call(*(t.requires_grad_() for t in inputs.values()))
    both = torch.autograd.grad(y.sum(), inputs.values(), retain_graph=True)
    for leaf, gradient in zip(inputs.values(), both):
        assert torch.equal(torch.autograd.grad(y.sum(), leaf, retain_graph=True)[0], gradient)


@pytest.mark.parametrize("act", ["identity", "relu"])
def test_fixed_norms_compile_as_one_graph(device, kernels, act):
    inputs = make(device, residual="before")
    weight, bias = inputs.pop("weight"), inputs.pop("bias")

    def call(x, residual):
        given = {"x": x, "weight": weight, "bias": bias, "residual": residual}
        return function(given, False, act, "before")(*given.values())

    properties.assert_compiles(call, inputs)


def test_what_follows_a_fixed_norm_may_write_where_stock_lets_it(device, kernels):
    """In place, onto the result of what keeps its input or nothing; ReLU's is kept."""
    inputs = [make(device)[name] for name in ("x", "weight", "bias")]
    for act, writable in (("identity", True), ("relu6", True), ("silu", True), ("relu", False)):
        x = inputs[0].clone().requires_grad_()
        y = function(dict(zip(("x", "weight", "bias"), inputs)), False, act)(x, *inputs[1:])
        loss = y.add_(1).sum()
        if writable:
            loss.backward()
            assert x.grad.isfinite().all()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


@pytest.mark.parametrize(("dtype", "channels"), cases.ROWS)
def test_rows_of_any_length_are_summed(device, kernels, dtype, channels):
    harness.skip_unless_runs(kernels, device, "batch_norm_act", dtype)
    harness.skip_interpreted_rows(kernels, device, channels)
    draws = harness.draws(
        lambda seed: make(device, (2, channels, 7, 5), "channels_last", dtype, seed=seed), device, kernels
    )
    calls = (of(draws[0], running=True) for of in (function, reference_of))
    harness.assert_op_as_good_as_torch(*calls, draws, "batch_norm_act")


@pytest.mark.parametrize("channels", [3, 12, 24, 64, 80, 96, 144])
def test_few_channels_are_folded_into_rows_that_the_registers_hold(device, kernels, channels):
    if harness.interpreted(kernels, device):
        pytest.skip("too much for Triton's interpreter")
    side = int((2**17 / channels / 2) ** 0.5) // 4 * 4 + 4
    draw = make(device, (2, channels, side, side), "channels_last")
    calls = (of(draw, running=True) for of in (function, reference_of))
    harness.assert_op_as_good_as_torch(*calls, draw, "few channels")


# Many contiguous images of small planes are rows for the CPU kernels, in which each pixel is a column.
@modes
@pytest.mark.parametrize("dtype", harness.DTYPES)
@pytest.mark.parametrize("shape", [(20, 13, 2, 2), (300, 7, 1, 3), (25, 17, 4, 4), (40, 5, 5, 7), (17, 9, 8, 8)])
def test_small_planes_of_many_images(device, kernels, shape, dtype, training):
    harness.skip_unless_runs(kernels, device, "batch_norm_act", dtype)
    if harness.interpreted(kernels, device):
        pytest.skip("only the CPU kernels know small planes")
    for residual in RESIDUALS:
        draws = [make(device, shape, dtype=dtype, residual=residual, seed=seed) for seed in range(4)]
        options = {"training": training, "residual": residual, "running": True}
        calls = (of(draws[0], **options) for of in (function, reference_of))
        harness.assert_op_as_good_as_torch(*calls, draws, residual)


def test_a_large_mean_hides_no_variance_of_small_planes(device, kernels):
    draws = [make(device, (40, 5, 3, 3), seed=seed) for seed in range(4)]
    for draw in draws:
        draw["x"] = draw["x"] * 0.05 + 1000
    calls = (of(draws[0], act="relu", running=True) for of in (function, reference_of))
    harness.assert_op_as_good_as_torch(*calls, draws, "small planes")


# From 8 MiB on the CPU kernels may take rows one by one; 16 MiB of whole vectors are written past the caches, and rows
# that share sets of the first cache go alone.
@pytest.mark.parametrize(
    ("shape", "act"),
    [((2, 33, 256, 128), "relu"), *(((2, 40, 325, 163), act) for act in ("relu", "silu")), ((2, 512, 64, 65), "silu")],
)
def test_images_that_outgrow_the_caches(device, kernels, shape, act):
    if harness.interpreted(kernels, device):
        pytest.skip("too much for Triton's interpreter")
    draw = make(device, shape, "channels_last")
    calls = (make_call(draw, act=act, running=True) for make_call in (function, reference_of))
    harness.assert_op_as_good_as_torch(*calls, draw, "many rows")


def test_batches_are_counted_in_training_alone(device, backend):
    harness.skip_unless_runs(backend, device, "batch_norm_act", torch.float32)
    x, batches = make(device)["x"], torch.zeros((), dtype=torch.int64, device=device)
    mean, var = (torch.ones(x.shape[1], device=device) for _ in range(2))
    for training, expected in ((True, 1), (False, 1), (True, 2)):
        batch_norm_act(x, mean, var, training=training, num_batches_tracked=batches)
        assert batches == expected


def test_a_training_layer_calls_one_operator_in_each_direction(device, kernels):
    if kernels == "triton":
        pytest.skip("its kernels are launched from Python, which calls them all the same")
    inputs = {name: t.requires_grad_() for name, t in make(device).items()}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function(inputs)(*inputs.values()).sum().backward()
    called = [event.name for event in profile.events() if event.name.startswith("fusedtrain::")]
    assert called == ["fusedtrain::batch_norm_act_train_", "fusedtrain::batch_norm_act_train_backward"]


@dense_layouts
def test_large_images_are_summed_as_well(device, kernels, layout):
    calls = (of(make(device), act="identity") for of in (function, reference_of))
    properties.assert_large_images_are_summed_as_well(*calls, make, kernels, device, layout)


@harness.needs_memory(16)
@dense_layouts
def test_more_than_2_to_the_31_elements_in_evaluation(device, kernels, layout):
    vectors = {name: v for name, v in make(device, (1, 64, 1, 1), dtype=torch.bfloat16).items() if name != "x"}

    def evaluate(x):
        inputs = {"x": x} | vectors
        return function(inputs, training=False)(*inputs.values())

    properties.assert_last_image_is_as_alone(evaluate, kernels, device, layout)


@harness.needs_memory(16)
@dense_layouts
def test_statistics_of_more_than_2_to_the_31_elements(device, kernels, layout):
    x = properties.many_images(kernels, device, layout)
    count, last, axes = x.numel() / x.shape[1], x[-1].double(), (1, 2)  # all other elements are zero
    truth = {"mean": last.sum(axes) / count}
    truth["m2"] = last.square().sum(axes) - count * truth["mean"] ** 2
    mean, var = torch.zeros(2, x.shape[1], device=device)
    nn.functional.batch_norm(x, mean, var, training=True, momentum=1.0)
    stock = {"mean": mean, "m2": var * (count - 1)}
    ours = dict(zip(truth, IMPLS[kernels].stats(x)))
    std = (truth["m2"] / count).sqrt()
    for run in (ours, stock, truth):  # what is wrong with a mean counts beside the spread that divides it
        run["mean"] = run["mean"] / std.to(run["mean"].dtype) + 1
    for key in truth:
        harness.assert_as_good_as_torch(ours[key], stock[key], truth[key], key)


@dense_layouts
@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
def test_moments_that_are_known_are_not_taken_again(device, kernels, layout, dtype):
    x = make(device, (2, 5, 7, 9), layout, dtype)["x"]

    def normalised(moments):
        running = torch.zeros(5, device=device), torch.ones(5, device=device)
        return batch_norm_act(x, *running, training=True, moments=moments), *running

    mean, m2 = IMPLS[kernels].stats(x)
    for known, taken in zip(normalised((mean, m2)), normalised(None)):
        assert torch.equal(known, taken)
    for other, taken in zip(normalised((mean + 1, 4 * m2)), normalised(None)):
        assert not torch.equal(other, taken)


@dense_layouts
@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
def test_a_large_mean_hides_no_variance(device, backend, layout, dtype):
    draws = [make(device, (4, 5, 17, 31), layout, dtype, seed=seed) for seed in range(2)]
    for draw in draws:
        draw["x"] = (draw["x"] * 0.05 + 1000).to(dtype) if dtype == torch.float32 else draw["x"] + 30
    harness.assert_op_as_good_as_torch(
        function(draws[0], act="relu", running=True), reference_of(draws[0], act="relu", running=True), draws, layout
    )


@dense_layouts
@modes
@pytest.mark.parametrize("residual", RESIDUALS)
def test_gradients_are_derivatives(device, backend, layout, training, residual):
    harness.skip_unless_runs(backend, device, "batch_norm_act", torch.float64)
    inputs = make(device, (2, 3, 3, 2), layout, torch.float64, residual)
    for act in ("identity", "silu"):
        properties.assert_gradients_are_derivatives(function(inputs, training, act, residual), inputs)


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (0, 1, 4, 5), (0, 3, 1, 1), (2, 3, 0, 5), (2, 1, 0, 5)], ids=str)
def test_a_batch_without_values_has_a_mean_of_zero(device, kernels, shape):
    mean, m2 = IMPLS[kernels].stats(torch.empty(shape, device=device))
    assert torch.equal(mean, torch.zeros_like(mean)) and torch.equal(m2, torch.zeros_like(m2))


@dense_layouts
def test_operators_agree_with_schema_and_fake(device, kernels, layout):
    harness.skip_all_but_channels_last(kernels, device, layout)
    x, weight, bias, residual = make(device, layout=layout, dtype=torch.bfloat16, residual="before").values()
    impl, silu = IMPLS[kernels], _codes.ACTIVATIONS.index("silu")
    properties.assert_opcheck(impl.stats, x)
    mean, m2 = impl.stats(x)
    for running in ((None, None), (mean.clone(), m2.clone()), (bias.clone(), weight.clone())):
        symbolic = running[0] is not None and running[0].dtype == mean.dtype
        properties.assert_opcheck(impl.update, mean, m2, *running, 189.0, 0.1, 1e-5, symbolic=symbolic)
    rstd = impl.update(mean, m2, None, None, 189.0, 0.1, 1e-5)
    for rest in (
        (weight, bias, residual, silu, False),
        (None, None, None, 0, False),
        (weight, None, residual, 1, True),
    ):
        symbolic = rest[1] is not None
        properties.assert_opcheck(impl.forward, x, mean, rstd, *rest, symbolic=symbolic)
        properties.assert_opcheck(impl.reduce, x, x, mean, rstd, *rest, symbolic=symbolic)
        sums = impl.reduce(x, x, mean, rstd, *rest)
        for given, needs in ((sums, (True, True)), (sums, (True, False)), ((None, None), (False, True))):
            arguments = (*rest[:3], *given, 189.0, *rest[3:], *needs)
            properties.assert_opcheck(impl.backward, x, x, mean, rstd, *arguments, symbolic=symbolic and all(needs))
    for act, need_dresidual in ((0, False), (1, False), (1, True)):
        properties.assert_opcheck(impl.fixed, x, x, rstd, act, need_dresidual, symbolic=need_dresidual)


@pytest.mark.parametrize(("training", "layout"), [(True, "contiguous"), (True, "channels_last"), (False, "contiguous")])
def test_compiles_as_one_graph_and_once(device, backend, layout, training):
    inputs = make(device, layout=layout, dtype=torch.bfloat16, residual="before")
    properties.assert_compiles(function(inputs, training, residual="before"), inputs)


@pytest.mark.parametrize("again", [lambda x: x, torch.Tensor.contiguous], ids=["itself", "contiguous"])
def test_compiles_where_x_is_the_residual(device, backend, again):
    if harness.interpreted(backend, device):
        pytest.skip("the names of images count in front of the kernels")
    normalise = function(make(device, residual="before"), residual="before")
    properties.assert_compiles(lambda x, weight, bias: normalise(x, weight, bias, again(x)), make(device))


@dense_layouts
def test_keeps_vectors_beside_its_inputs(device, kernels, layout):
    for residual in RESIDUALS:
        inputs = make(device, (2, 16, 9, 9), layout, torch.bfloat16, residual)
        leaves = [t.requires_grad_() for t in inputs.values()]
        extra = harness.extra_saved_bytes(function(inputs, residual=residual), *leaves)
        assert extra == 2 * 16 * 4  # mean and rstd


@modes
@pytest.mark.parametrize("layout", harness.LAYOUTS)
def test_repeats_bitwise_and_writes_every_element(device, backend, layout, training):
    harness.skip_all_but_dense_layouts(backend, device, layout)
    inputs = make(device, layout=layout, residual="before")
    call = function(inputs, training, "gelu", "before")
    properties.assert_repeats_bitwise(call, inputs)
    properties.assert_writes_every_element(call, inputs)


@dense_layouts
@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
@pytest.mark.parametrize(
    "shape", [(5, 24, 33, 31), (4, 700, 9, 9), (300, 145, 2, 3)], ids=["many pixels", "many channels", "many images"]
)
def test_threads_change_nothing(device, kernels, layout, shape, dtype):
    if kernels != "cpu":
        pytest.skip("only the CPU kernels run on threads")
    inputs = make(device, shape, layout, dtype, residual="before")
    properties.assert_threads_change_nothing(function(inputs, residual="before", running=True), inputs)
    if shape[0] == 300:
        properties.assert_repeats_bitwise(function(inputs, residual="before", running=True), inputs)
        properties.assert_writes_every_element(function(inputs, residual="before", running=True), inputs)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("shape", [(4, 24, 60, 64), (3, 4, 250, 120)], ids=["some channels", "one channel"])
@pytest.mark.parametrize("act", ["identity", "relu", "silu"])
def test_channels_in_groups_are_as_all_in_one_pass(kernels, device, act, shape, threads):
    """Contiguous images go through all passes of training a few channels at a time."""
    if kernels != "cpu":
        pytest.skip("only the CPU kernels take channels in groups")
    ops, n = torch.ops.fusedtrain, shape[0] * shape[2] * shape[3]
    inputs = make(device, shape, residual="before")
    x, tensors = inputs.pop("x"), (*inputs.values(), _codes.ACTIVATIONS.index(act), False)
    dy = harness.normal(*shape, device=device, seed=7)

    def running():
        return torch.zeros(shape[1]), torch.ones(shape[1]), torch.zeros((), dtype=torch.int64)

    mean, m2 = ops.batch_norm_act_stats(x)
    expected = running()
    rstd = ops.batch_norm_act_update_(mean, m2, *expected[:2], n, 0.1, 1e-5)
    y = ops.batch_norm_act(x, mean, rstd, *tensors)
    sums = ops.batch_norm_act_reduce(dy, x, mean, rstd, *tensors)
    dx, dresidual = ops.batch_norm_act_backward(dy, x, mean, rstd, *tensors[:3], *sums, n, *tensors[3:], True, True)

    before, statistics = torch.get_num_threads(), running()
    torch.set_num_threads(threads)
    try:
        trained = ops.batch_norm_act_train_(x, *statistics, *tensors[:3], 0.1, 1e-5, *tensors[3:])
        gradients = ops.batch_norm_act_train_backward(dy, x, mean, rstd, *tensors, True)
    finally:
        torch.set_num_threads(before)
    for got, wanted in zip((*trained, *statistics[:2]), (y, mean, rstd, *expected[:2]), strict=True):
        assert torch.equal(got, wanted)
    for got, wanted in zip(gradients, (dx, dresidual, *reversed(sums)), strict=True):
        assert torch.equal(got, wanted)
    assert statistics[2] == 1


@dense_layouts
@modes
def test_frozen_inputs_change_nothing(device, kernels, layout, training):
    for residual in RESIDUALS[1:]:
        inputs = make(device, layout=layout, residual=residual)
        properties.assert_frozen_inputs_change_nothing(function(inputs, training, residual=residual), inputs)


@pytest.mark.parametrize("dtype", harness.DTYPES)
@pytest.mark.parametrize("act", _codes.ACTIVATIONS)
@pytest.mark.parametrize("residual", ["none", "before"])
def test_a_gradient_that_is_kept_between_the_passes_is_the_one_computed_twice(kernels, device, act, residual, dtype):
    if kernels != "cpu":
        pytest.skip("only the CPU kernels keep it")
    shapes = [((3, 13, 7, 9), "contiguous"), ((3, 13, 7, 9), "channels_last")]
    shapes += [((2, 48, 5, 6), "channels_last"), ((2, 48, 37, 41), "channels_last")]  # the last in registers
    if (act, dtype) == ("silu", torch.bfloat16):  # 16 MiB: dx, which holds dz, is written past the caches
        shapes += [((4, 64, 184, 184), layout) for layout in harness.DENSE_LAYOUTS]
    for shape, layout in shapes:
        assert_kept_as_computed_twice(device, shape, layout, dtype, act, residual)


def assert_kept_as_computed_twice(device, shape, layout, dtype, act, residual):
    given = make(device, shape, layout, dtype, residual, seed=5)
    x, dy, count = given["x"], harness.images(shape, layout, dtype, device, 9), math.prod(shape) / shape[1]
    mean, m2 = IMPLS["cpu"].stats(x)
    inputs = (dy, x, mean, (m2 / count + 1e-3).rsqrt(), given["weight"], given["bias"], given.get("residual"))
    codes, needs_dr = (_codes.ACTIVATIONS.index(act), False), residual == "before"
    dx, dr, dw, db = IMPLS["cpu"].train_backward(*inputs, *codes, needs_dr)
    sums = IMPLS["cpu"].reduce(*inputs, *codes)
    twice = IMPLS["cpu"].backward(*inputs, *sums, count, *codes, True, needs_dr)
    for once, again in zip((dx, dr, db, dw), (*twice, *sums), strict=True):
        assert torch.equal(once, again)


def test_statistics_that_move_before_backward_do_not_change_gradients(device, kernels):
    """As where a batch in evaluation and one in training make one loss; stock PyTorch takes what has moved."""
    x, weight = harness.images((2, 8, 5, 6), device=device).requires_grad_(), torch.rand(8, device=device)
    grads = []
    for moved in (False, True):
        mean, var = torch.zeros(8, device=device), torch.ones(8, device=device)
        y = batch_norm_act(x, mean, var, weight.requires_grad_(), act="silu")
        if moved:
            batch_norm_act(x.detach() + 3, mean, var, training=True)
        grads.append(torch.autograd.grad(y.square().sum(), (x, weight)))
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("layout", harness.LAYOUTS)
def test_any_incoming_gradient(device, kernels, layout):
    harness.skip_all_but_dense_layouts(kernels, device, layout)
    inputs = make(device, layout=layout, residual="before")
    properties.assert_takes_any_incoming_gradient(function(inputs, residual="before"), inputs)


@dense_layouts
@pytest.mark.parametrize("act", FLAT)
def test_flat_parts_pass_no_infinity_on(device, kernels, layout, act):
    inputs = make(device, layout=layout)
    inputs["bias"] = inputs["bias"] - 2.5
    calls = (of(inputs, act=act) for of in (function, reference_of))
    properties.assert_flat_parts_pass_no_infinity_on(*calls, inputs)


def test_second_derivative_is_refused(device, kernels):
    inputs = make(device)
    properties.assert_second_derivative_is_refused(function(inputs), inputs)


@dense_layouts
def test_images_do_not_mix_in_evaluation(device, kernels, layout):
    inputs = make(device, (3, 13, 17, 19), layout, residual="after")
    properties.assert_images_do_not_mix(function(inputs, False, residual="after"), inputs, ("x", "residual"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_the_dtype_of_x_as_torch_does(device, backend, dtype):
    for x_dtype in (torch.float32, dtype):
        x, weight, bias = make(device, dtype=x_dtype, vectors="float32").values()
        running = torch.zeros_like(bias), torch.ones_like(bias)
        with torch.autocast(device, dtype=dtype):
            y = batch_norm_act(x, *running, weight, bias, True, act="silu")
            stock = nn.functional.silu(nn.functional.batch_norm(x, *running, weight, bias, True))
        assert y.dtype == stock.dtype == x_dtype


X, ONES = torch.ones(2, 3, 4, 4), torch.ones(3)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "batch_norm_act: x must be a Tensor, got list"),
        ({"x": torch.ones(2, 3, 4)}, ValueError, r"x must have shape \[N, C, H, W\], got \[2, 3, 4\]"),
        ({"weight": torch.ones(4)}, ValueError, r"weight must have shape \[3\] or be None, got \[4\]"),
        ({"bias": ONES.half()}, TypeError, r"bias must have the dtype of x .* got torch.float16"),
        ({"running_mean": None}, ValueError, "must both be given or both be None"),
        ({"running_mean": None, "running_var": None}, ValueError, "needed when training is False"),
        (
            {"x": X.half(), "running_var": ONES.half()},
            TypeError,
            "must share one dtype, got torch.float16, torch.float32",
        ),
        ({"residual": torch.ones(2, 3, 4, 1)}, ValueError, r"residual must have the shape of x, \[2, 3, 4, 4\]"),
        ({"residual": X.half()}, TypeError, r"residual must have the dtype of x \(torch.float32\)"),
        ({"weight": torch.ones(3, device="meta")}, RuntimeError, "weight is on meta, but x is on cpu"),
        ({"act": "mish"}, ValueError, "act must be one of identity, relu, .* got 'mish'"),
        ({"x": torch.ones(1, 3, 1, 1), "training": True}, ValueError, "Expected more than 1 value per channel"),
        ({"eps": 0.0, "training": True}, ValueError, "eps must be positive in training, got 0.0"),
        ({"eps": -1e-5}, ValueError, "eps must be 0 or more, got -1e-05"),
        ({"moments": (ONES, ONES)}, ValueError, "moments are those of a training batch, got training=False"),
        ({"moments": (ONES,), "training": True}, ValueError, "must be mean and sum of squares, got 1 tensors"),
        ({"moments": (ONES[:2], ONES), "training": True}, ValueError, r"the mean in moments must have shape \[3\]"),
        (
            {"moments": (ONES, ONES.half()), "training": True},
            TypeError,
            "the sum of squares in moments must be torch.float32, got torch.float16",
        ),
    ],
)
def test_bad_arguments_are_named_and_change_nothing(changes, error, message):
    running = {"running_mean": ONES.clone(), "running_var": ONES.clone()}
    with pytest.raises(error, match=message):
        batch_norm_act(**({"x": X, "weight": ONES, "bias": ONES, "act": "relu"} | running | changes))
    assert torch.equal(running["running_mean"], ONES) and torch.equal(running["running_var"], ONES)


@pytest.mark.parametrize(
    ("shape", "layout", "dtype", "chosen"),
    [
        ((16, 96, 112, 112), "contiguous", torch.float32, "cpu"),
        ((16, 1152, 7, 7), "contiguous", torch.float32, "cpu"),
        ((16, 1152, 7, 7), "contiguous", torch.bfloat16, "cpu"),
        ((16, 320, 7, 7), "channels_last", torch.float32, "cpu"),
        ((16, 160, 7, 7), "channels_last", torch.float32, "reference"),
        ((16, 160, 7, 7), "channels_last", torch.bfloat16, "cpu"),
        ((16, 256, 56, 56), "channels_last", torch.bfloat16, "cpu"),
        ((2, 64, 14, 14), "contiguous", torch.float32, "reference"),
    ],
)
def test_what_was_measured_slower_goes_to_stock(shape, layout, dtype, chosen):
    if IMPLS["cpu"].why_not(X) is not None:
        pytest.skip(IMPLS["cpu"].why_not(X))
    n, c, h, w = shape
    order = (0, 3, 1, 2) if layout == "channels_last" else (0, 1, 2, 3)
    stored = (n, h, w, c) if layout == "channels_last" else shape
    x = torch.empty(stored, dtype=dtype).permute(order)
    assert backend.select("batch_norm_act", IMPLS, x) is IMPLS[chosen]
    assert backend.select("batch_norm_act", IMPLS, x, True) is IMPLS["cpu"]  # over processes


@pytest.mark.parametrize(("vendor", "chosen"), [("amd", "reference"), ("intel", "cpu")])
def test_residuals_that_stock_adds_in_place_go_to_stock(monkeypatch, vendor, chosen):
    if IMPLS["cpu"].why_not(X) is not None:
        pytest.skip(IMPLS["cpu"].why_not(X))
    monkeypatch.setitem(_extension.BUILD_INFO, "cpu_vendor", vendor)
    x, small = torch.empty(16, 28, 28, 128).permute(0, 3, 1, 2), torch.empty(16, 7, 7, 512).permute(0, 3, 1, 2)
    assert backend.select("batch_norm_act", IMPLS, x, False, True) is IMPLS[chosen]
    assert backend.select("batch_norm_act", IMPLS, small, False, True) is IMPLS["reference"]
    assert backend.select("batch_norm_act", IMPLS, x, False, False) is IMPLS["cpu"]


def test_fixed_norms_have_a_rule_of_their_own():
    """Stock PyTorch passes over x more often, wherever a residual is added."""
    if IMPLS["cpu"].why_not(X) is not None:
        pytest.skip(IMPLS["cpu"].why_not(X))
    running = torch.zeros(512), torch.ones(512)
    for pixels, dtype, chosen in (
        (6, torch.float32, "reference"),
        (10, torch.bfloat16, "cpu"),
        (14, torch.float32, "cpu"),
    ):
        x = torch.empty(8, pixels, pixels, 512, dtype=dtype).permute(0, 3, 1, 2).requires_grad_()
        for act, residual in (("identity", None), ("relu", None), ("relu", x)):
            said = backend.explain("batch_norm_act", x, *running, *running, act=act, residual=residual)
            assert said.startswith(f"batch_norm_act: {chosen} runs")
    trained = backend.explain("batch_norm_act", x, *running, *running, training=True, act="relu", residual=x)
    assert trained.startswith("batch_norm_act: reference runs")  # which adds in place


@pytest.mark.parametrize(("isa", "chosen"), [("avx2", "reference"), ("avx512", "cpu")])
def test_plain_norms_in_16_bits_need_avx512(monkeypatch, isa, chosen):
    if IMPLS["cpu"].why_not(X) is not None:
        pytest.skip(IMPLS["cpu"].why_not(X))
    monkeypatch.setitem(_extension.BUILD_INFO, "isa_active", isa)
    x = torch.randn(16, 112, 14, 14, dtype=torch.bfloat16, requires_grad=True)
    running = {"running_mean": None, "running_var": None, "training": True}
    for more, runs in (({}, chosen), ({"act": "relu"}, "cpu"), ({"residual": x}, "cpu")):
        own = batch_norm_act(x, **running, **more).grad_fn.name() == "_BatchNormActBackward"
        assert own == (runs == "cpu")
        assert backend.explain("batch_norm_act", x, **running, **more).startswith(f"batch_norm_act: {runs} runs")


@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_fixed_statistics_sum_nothing_for_images_alone(kernels, training):
    """As for adversarial examples, of a network in evaluation whose weights could be trained."""
    inputs = [t.requires_grad_() for t in (torch.randn(2, 3, 8, 8), *torch.rand(2, 3))]
    running = torch.zeros(3), torch.ones(3)
    with fusedtrain.use_backend(kernels):
        y = batch_norm_act(inputs[0], *running, *inputs[1:], training, act="silu")
        called = []
        for of in (inputs, inputs[:1]):
            with torch.profiler.profile() as profile:
                torch.autograd.grad(y.sum(), of, retain_graph=True)
            called.append(
                any("_reduce" in event.key or "_train_backward" in event.key for event in profile.key_averages())
            )
    assert called == [True, training]


# --- layers -----------------------------------------------------------------------------------------------------------

LAYERS = {
    "plain": {},
    "silu": {"act_layer": nn.SiLU, "momentum": 0.3, "eps": 1e-3},
    "identity": {"apply_act": False},
    "cumulative": {"momentum": None},
    "untracked": {"track_running_stats": False},
    "bare": {"affine": False, "act_layer": nn.GELU},
    "leaky": {"act_layer": nn.LeakyReLU, "act_kwargs": {"negative_slope": 0.3}},
    "drop": {"drop_layer": functools.partial(nn.Dropout, 0.0)},
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layer_follows_timms_through_training(zoo, kernels, device, options):
    stock, layer = zoo.timm.layers.BatchNormAct2d(13, **options), fusedtrain.nn.BatchNormAct2d(13, **options)
    assert str(layer) == str(stock) and list(layer.state_dict()) == list(stock.state_dict())
    stock, layer = stock.to(device), layer.to(device)
    layer.load_state_dict(stock.state_dict())
    truth = copy.deepcopy(stock).double()
    for seed in range(3):
        x = harness.images((3, 13, 7, 9), device=device, seed=seed)
        harness.assert_module_as_good_as_torch(layer, stock, x, "training")
        layer(x), stock(x), truth(x.double())
    for name, value in layer.state_dict().items():
        torchs = stock.state_dict()[name]
        if value.is_floating_point():
            harness.assert_as_good_as_torch(value, torchs, truth.state_dict()[name], name)
        else:
            assert torch.equal(value, torchs), name
    assert layer.num_batches_tracked is None or layer.num_batches_tracked >= 3
    stock.load_state_dict(layer.state_dict())
    harness.assert_module_as_good_as_torch(layer.eval(), stock.eval(), x, "evaluation")


def frozen_layers(zoo, name, options):
    """A stock layer of fixed statistics, and ours with the same numbers."""
    stocks = {"FrozenBatchNorm2d": zoo.torchvision.ops.FrozenBatchNorm2d}
    stocks["FrozenBatchNormAct2d"] = zoo.timm.layers.FrozenBatchNormAct2d
    stock, layer = stocks[name](13, **options), getattr(fusedtrain.nn, name)(13, **options)
    for i, buffer in enumerate(stock.buffers()):
        buffer.copy_(harness.normal(13, seed=i).abs() + 0.1 if i == 3 else harness.normal(13, seed=i))
    layer.load_state_dict(stock.state_dict())
    return stock, layer


FROZEN = {
    "plain": ("FrozenBatchNorm2d", {"eps": 1e-3}),
    "relu": ("FrozenBatchNormAct2d", {}),
    "silu": ("FrozenBatchNormAct2d", {"act_layer": nn.SiLU, "eps": 1e-3}),
    "identity": ("FrozenBatchNormAct2d", {"apply_act": False}),
    "leaky": ("FrozenBatchNormAct2d", {"act_layer": nn.LeakyReLU, "act_kwargs": {"negative_slope": 0.3}}),
    "drop": ("FrozenBatchNormAct2d", {"drop_layer": functools.partial(nn.Dropout, 0.0)}),
}


@pytest.mark.parametrize("dtype", harness.DTYPES)
@pytest.mark.parametrize("name, options", FROZEN.values(), ids=FROZEN)
def test_frozen_layer_is_as_good_as_the_stock_one(zoo, kernels, device, name, options, dtype):
    harness.skip_unless_runs(kernels, device, "batch_norm_act", dtype)
    stock, layer = (m.to(device, dtype) for m in frozen_layers(zoo, name, options))
    assert list(layer.state_dict()) == list(stock.state_dict()) and not list(layer.parameters())
    for training in (True, False):
        x = [harness.images((3, 13, 7, 9), "channels_last", dtype, device, seed) for seed in range(3)]
        harness.assert_module_as_good_as_torch(layer.train(training), stock.train(training), x, name)


@pytest.mark.parametrize("dtype", harness.DTYPES[:3])
@pytest.mark.parametrize("buffers", [torch.float32, torch.bfloat16, torch.float64])
def test_frozen_layer_has_the_dtype_of_the_stock_one(zoo, kernels, device, dtype, buffers):
    """It multiplies and adds: autocast casts nothing, and dtypes meet as in any sum."""
    harness.skip_unless_runs(kernels, device, "batch_norm_act", dtype)
    stock, layer = (m.to(device, buffers) for m in frozen_layers(zoo, "FrozenBatchNorm2d", {}))
    x = harness.images((3, 13, 7, 9), dtype=dtype, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        if kernels == "triton" and torch.float64 in (dtype, buffers):
            pytest.skip("Triton's kernels take no float64")
        y, expected = layer(x), stock(x)
    assert y.dtype == expected.dtype == torch.promote_types(dtype, buffers)
    truth = copy.deepcopy(stock).double()(x.double())
    harness.assert_as_good_as_torch(y, expected, truth, f"{dtype} {buffers}")


def test_frozen_layer_loads_what_was_trained(device):
    trained = nn.BatchNorm2d(3)
    layer = fusedtrain.nn.FrozenBatchNorm2d(3)
    layer.load_state_dict(trained.state_dict())  # without the number of batches
    assert all(torch.equal(layer.state_dict()[name], trained.state_dict()[name]) for name in layer.state_dict())
    with pytest.raises(RuntimeError, match="surprising"):
        layer.load_state_dict({**trained.state_dict(), "surprising": torch.ones(3)})


def test_batches_are_counted_in_any_dtype(kernels, device):
    """``Module.type`` casts all buffers."""
    layer = fusedtrain.nn.BatchNormAct2d(3, device=device).type(torch.float32)
    for batches in (1, 2):
        layer(harness.images((2, 3, 4, 5), device=device))
        assert layer.num_batches_tracked == batches and layer.num_batches_tracked.dtype == torch.float32


def test_hooks_on_the_activation_are_called():
    layer, calls = fusedtrain.nn.BatchNormAct2d(3), []
    layer.act.register_forward_hook(lambda *_: calls.append("act"))
    layer(X)
    assert calls == ["act"]


def test_layer_traces_as_one_node():
    graph = torch.fx.symbolic_trace(fusedtrain.nn.BatchNormAct2d(3).eval())
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [batch_norm_act]
    assert torch.equal(graph(X), fusedtrain.nn.BatchNormAct2d(3).eval()(X))


# --- statistics over processes ----------------------------------------------------------------------------------------

# The images of each of two processes, and their channels: a single one is summed in another way.
SIZES, CHANNELS = ((3, 5), (1, 4), (2, 0), (2, 0)), (5, 5, 5, 1)
SYNC_CHILD = """
import os, sys, torch, fusedtrain
from torch import nn
rank, folder, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
results = []
for images in torch.load(f"{folder}/images.pt"):
    layer = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(images[rank].shape[1])))
    assert len(fusedtrain.fuse(layer).swapped) == 1
    layer[0].act = nn.SiLU()
    with fusedtrain.use_backend(name):
        x = images[rank].requires_grad_()
        y = layer(x)
        y.backward(y.detach().cos())
    gradients = [p.grad for p in layer.parameters()]
    results.append((y.detach(), x.grad, *gradients, *layer.buffers()))
torch.save(results, f"{folder}/{rank}.pt")
torch.distributed.barrier()  # gloo's threads end the process with an abort, at times, when the other one has gone
torch.distributed.destroy_process_group()
os._exit(0)
"""


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_processes_share_statistics_as_if_their_batches_were_one(name, tmp_path):
    images = [
        [harness.images((n, c, 3, 4), seed=7 * i + j) for j, n in enumerate(ns)]
        for i, (ns, c) in enumerate(zip(SIZES, CHANNELS))
    ]
    torch.save(images, tmp_path / "images.pt")
    command = ["-c", SYNC_CHILD]
    children = [harness.start_python(*command, str(i), str(tmp_path), name, OMP_NUM_THREADS="1") for i in range(2)]
    assert [child.wait(timeout=120) for child in children] == [0, 0]
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for i, parts in enumerate(images):
        whole = torch.cat(parts)

        def union(dtype, x=whole):
            layer = nn.Sequential(nn.BatchNorm2d(x.shape[1]), nn.SiLU()).to(dtype)
            x = x.to(dtype, copy=True).requires_grad_()
            y = layer(x)
            y.backward(y.detach().cos())
            return [y.detach(), x.grad, *(p.grad for p in layer.parameters()), *list(layer.buffers())[:2]]

        for k, (stock, truth) in enumerate(zip(union(torch.float32), union(torch.float64))):
            both = [results[i][k] for results in ranks]
            if k >= 4:  # running statistics: the same bits on each process
                assert torch.equal(*both)
            together = torch.cat(both) if k < 2 else both[0] + both[1] if k < 4 else both[0]
            harness.assert_as_good_as_torch(together, stock, truth, f"sizes {SIZES[i]}, result {k}")


def test_processes_share_no_sums_where_nobody_asks_for_the_gradient_of_x(tmp_path):
    """As layers without images do it, or they would wait for each other."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x, residual = harness.images((2, 4, 3, 3)), harness.images((2, 4, 3, 3)).requires_grad_()
        weight = torch.ones(4, requires_grad=True)
        reduced, all_reduce = [], torch.distributed.all_reduce
        group = torch.distributed.group.WORLD
        for scale in (None, weight):
            options = {"training": True, "act": "relu", "residual": residual, "process_group": group}
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.distributed, "all_reduce", lambda *a, **k: reduced.append(all_reduce(*a, **k)))
                fusedtrain.ops.batch_norm_act(x, None, None, scale, **options).sum().backward()
        assert reduced == [] and residual.grad is not None and weight.grad is not None
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not _extension.LOADED, reason=str(_extension.WHY_NOT))
@pytest.mark.parametrize("rows", [1, 4, 5])  # four are computed in turn
def test_gradients_too_small_for_normal_numbers_are_kept(rows):
    x = harness.images((1, 48, 1, rows)).bfloat16().contiguous(memory_format=torch.channels_last).requires_grad_()
    dy = torch.full_like(x, 3e-39)
    with fusedtrain.use_backend("cpu"):
        y = fusedtrain.ops.batch_norm_act(x, torch.zeros(48), torch.ones(48), act="silu")
    y.backward(dy)
    z = x.detach().double().requires_grad_()
    torch.nn.functional.silu(z / (1 + 1e-5) ** 0.5).backward(dy.double())
    smallest = 2.0**-133
    assert z.grad.abs().max() < torch.finfo(torch.bfloat16).tiny
    assert ((x.grad.double() - z.grad).abs() <= smallest).all() and x.grad.abs().max() > 10 * smallest


# --- whole models -----------------------------------------------------------------------------------------------------


def test_efficientnet_trains_as_well_with_fused_norms(zoo):
    from test_fuse import assert_model_as_good_as_torch, thinned

    torch.manual_seed(0)
    stock = zoo.timm.create_model("efficientnet_b0", num_classes=10, drop_rate=0.0, drop_path_rate=0.0).train()
    kinds = [c.before.rpartition(".")[2] for c in fusedtrain.fuse(stock, dry_run=True).swapped]
    assert kinds.count("BatchNormAct2d") == 49
    fused = copy.deepcopy(thinned(stock))
    fusedtrain.fuse(fused)
    assert_model_as_good_as_torch(fused, stock, "efficientnet_b0")

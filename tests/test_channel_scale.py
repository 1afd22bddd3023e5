"""channel_scale: y = a(x) * gate."""

import sys

import cases
import harness
import properties
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedtrain import _extension
from fusedtrain import backend as backends
from fusedtrain.ops import _codes, channel_scale
from fusedtrain.ops.channel_scale import IMPLS, reference

CASES = cases.pairwise(
    shape=list(cases.SHAPES),
    layout=harness.LAYOUTS,
    dtype=harness.DTYPES,
    in_act=_codes.INPUT_ACTIVATIONS,
    gate_dtype=["as x", torch.float32],
)
dense_layouts = pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)


def make(device, shape=(2, 13, 7, 9), layout="contiguous", dtype=torch.float32, gate_dtype="as x", seed=0) -> dict:
    gate_dtype = dtype if gate_dtype == "as x" else gate_dtype
    gate = harness.normal(*shape[:2], dtype=gate_dtype, device=device, seed=seed + 100).sigmoid()
    return {"x": harness.images(shape, layout, dtype, device, seed), "gate": gate}


def function(in_act="silu"):
    return lambda x, gate: channel_scale(x, gate, in_act=in_act)


def reference_of(in_act="silu"):
    return lambda x, gate: reference(x, gate, in_act)


@pytest.mark.parametrize("case", CASES, ids=cases.label)
def test_output_and_gradients_are_as_good_as_torch(device, backend, case):
    harness.skip_unless_runs(backend, device, "channel_scale", case["dtype"])
    shape, in_act = cases.SHAPES[case["shape"]], case["in_act"]

    def draw(seed):
        return make(device, shape, case["layout"], case["dtype"], case["gate_dtype"], seed)

    draws = harness.draws(draw, device, backend)
    harness.assert_op_as_good_as_torch(function(in_act), reference_of(in_act), draws, "channel_scale")


@pytest.mark.parametrize(("dtype", "channels"), cases.ROWS)
def test_rows_of_any_length_are_summed(device, kernels, dtype, channels):
    harness.skip_unless_runs(kernels, device, "channel_scale", dtype)
    harness.skip_interpreted_rows(kernels, device, channels)
    shape = (2, channels, 7, 5)
    draws = harness.draws(lambda seed: make(device, shape, "channels_last", dtype, seed=seed), device, kernels)
    harness.assert_op_as_good_as_torch(function(), reference_of(), draws, "channel_scale")


@given(
    case=cases.strided(), dtype=st.sampled_from(harness.DTYPES[:3]), in_act=st.sampled_from(_codes.INPUT_ACTIVATIONS)
)
def test_any_shape_and_strides(device, backend, case, dtype, in_act):
    def draw(seed):
        x = cases.strided_images(case, dtype, device, seed)
        return make(device, case["shape"], dtype=dtype, seed=seed) | {"x": x}

    draws = harness.draws(draw, device, backend)
    harness.assert_op_as_good_as_torch(function(in_act), reference_of(in_act), draws, "channel_scale")


@dense_layouts
@pytest.mark.parametrize("in_act", _codes.INPUT_ACTIVATIONS)
def test_gradients_are_derivatives(device, backend, layout, in_act):
    harness.skip_unless_runs(backend, device, "channel_scale", torch.float64)
    inputs = make(device, (2, 3, 3, 2), layout, torch.float64)
    properties.assert_gradients_are_derivatives(function(in_act), inputs)


@dense_layouts
def test_operators_agree_with_schema_and_fake(device, kernels, layout):
    x, gate = make(device, layout=layout, dtype=torch.bfloat16, gate_dtype=torch.float32).values()
    dy = torch.ones_like(x)
    silu = _codes.INPUT_ACTIVATIONS.index("silu")
    properties.assert_opcheck(IMPLS[kernels].forward, x, gate, silu)
    for need_dx, need_dgate in ((True, True), (True, False), (False, True)):
        args = (dy, x, gate, silu, need_dx, need_dgate)
        properties.assert_opcheck(IMPLS[kernels].backward, *args, symbolic=need_dx and need_dgate)


@dense_layouts
def test_compiles_as_one_graph_and_once(device, backend, layout):
    properties.assert_compiles(function(), make(device, layout=layout, dtype=torch.bfloat16))


def test_keeps_only_its_inputs_for_backward(device, kernels):
    for layout in harness.DENSE_LAYOUTS:
        leaves = [t.requires_grad_() for t in make(device, layout=layout, dtype=torch.bfloat16).values()]
        assert harness.extra_saved_bytes(function(), *leaves) == 0


@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
@pytest.mark.parametrize("layout", harness.LAYOUTS)
def test_repeats_bitwise_and_writes_every_element(device, backend, layout, dtype):
    properties.assert_repeats_bitwise(function(), make(device, layout=layout, dtype=dtype))
    properties.assert_writes_every_element(function(), make(device, layout=layout, dtype=dtype))


@dense_layouts
def test_images_do_not_mix(device, kernels, layout):
    properties.assert_images_do_not_mix(function(), make(device, (3, 13, 17, 19), layout), ("x", "gate"))


@dense_layouts
def test_threads_change_nothing(device, kernels, layout):
    if kernels != "cpu":
        pytest.skip("only the CPU kernels run on threads")
    properties.assert_threads_change_nothing(function(), make(device, (5, 24, 33, 31), layout))


@dense_layouts
def test_frozen_inputs_change_nothing(device, backend, layout):
    properties.assert_frozen_inputs_change_nothing(function(), make(device, layout=layout))


@pytest.mark.parametrize("layout", harness.LAYOUTS)
def test_any_incoming_gradient(device, kernels, layout):
    properties.assert_takes_any_incoming_gradient(function(), make(device, layout=layout))


def test_second_derivative_is_refused(device, kernels):
    properties.assert_second_derivative_is_refused(function(), make(device))


@pytest.mark.parametrize("in_act", _codes.INPUT_ACTIVATIONS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_stay_in_place(device, backend, in_act, value):
    for layout in harness.DENSE_LAYOUTS:
        properties.assert_not_finite_stays_in_place(
            function(in_act), reference_of(in_act), make(device, layout=layout), value, (1, 2, 3, 4), (1, 2, 3, 4)
        )


@pytest.mark.parametrize("in_act", ["relu", "relu6", "hard_swish"])
def test_flat_parts_pass_no_infinity_on(device, backend, in_act):
    for layout in harness.DENSE_LAYOUTS:
        inputs = make(device, layout=layout)
        inputs["x"] = 3 * inputs["x"]
        properties.assert_flat_parts_pass_no_infinity_on(function(in_act), reference_of(in_act), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_the_dtype_of_x(device, backend, dtype):
    for x_dtype in (torch.float32, dtype):
        inputs = make(device, dtype=x_dtype)
        with torch.autocast(device, dtype=dtype):
            y = channel_scale(**inputs)
            stock = inputs["x"] * inputs["gate"][:, :, None, None]
        assert y.dtype == stock.dtype == x_dtype


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "channel_scale: x must be a Tensor, got list"),
        ({"x": torch.ones(2, 3, 4)}, ValueError, r"channel_scale: x must have shape \[N, C, H, W\], got \[2, 3, 4\]"),
        ({"x": torch.ones(2, 3, 4, 4).int()}, TypeError, r"x must be float32, .* got torch.int32"),
        ({"gate": torch.ones(3)}, ValueError, r"gate must have shape \[N, C\] = \[2, 3\], got \[3\]"),
        ({"gate": None}, ValueError, r"gate must have shape \[N, C\] = \[2, 3\], got NoneType"),
        ({"gate": torch.ones(2, 3).half()}, TypeError, r"gate must have the dtype of x .* got torch.float16"),
        ({"gate": torch.ones(2, 3, device="meta")}, RuntimeError, "gate is on meta, but x is on cpu"),
        ({"in_act": "sigmoid"}, ValueError, "in_act must be one of identity, relu, .* got 'sigmoid'"),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    arguments = {"x": torch.ones(2, 3, 4, 4), "gate": torch.ones(2, 3), "in_act": "relu"} | changes
    with pytest.raises(error, match=message):
        channel_scale(**arguments)


@dense_layouts
def test_large_images_are_summed_as_well(device, kernels, layout):
    calls = function(in_act="identity"), reference_of(in_act="identity")
    properties.assert_large_images_are_summed_as_well(*calls, make, kernels, device, layout)


@harness.needs_memory(16)
@dense_layouts
def test_more_than_2_to_the_31_elements(device, kernels, layout):
    properties.assert_last_image_is_as_alone(
        lambda x: channel_scale(x, torch.full(x.shape[:2], 0.7, dtype=x.dtype, device=device), in_act="silu"),
        kernels,
        device,
        layout,
    )


@pytest.mark.parametrize(
    ("family", "dtype", "in_act", "least", "recorded", "name"),
    [
        (25, torch.float32, 0, 0, "none", "reference"),
        (25, torch.float32, 0, 1, "none", "cpu"),  # goes past the caches
        (25, torch.float32, 0, 0, "x", "cpu"),
        (25, torch.float32, 0, 0, "gate", "cpu"),
        (25, torch.float32, 2, 0, "none", "cpu"),
        (25, torch.bfloat16, 0, 0, "none", "cpu"),
        (26, torch.float32, 0, 0, "none", "cpu"),
    ],
)
def test_forward_alone_is_left_to_stock_where_that_is_faster(family, dtype, in_act, least, recorded, name, monkeypatch):
    if reason := harness.why_not("cpu", "cpu", "channel_scale"):
        pytest.skip(reason)
    for key, value in (("cpu_vendor", "amd"), ("isa_active", "avx512"), ("cpu_family", family)):
        monkeypatch.setitem(_extension.BUILD_INFO, key, value)
    x, gate = harness.images((2, 16, 5, 7), dtype=dtype), harness.normal(2, 16, dtype=dtype)
    module = sys.modules["fusedtrain.ops.channel_scale"]
    monkeypatch.setattr(module, "_SMALL", 0)
    monkeypatch.setattr(module, "_IN_CACHE", x.numel() + 1 - least)
    for tensor, its_name in ((x, "x"), (gate, "gate")):
        tensor.requires_grad_(recorded == its_name)
    assert backends.select("channel_scale", module.IMPLS, x, gate, in_act) is module.IMPLS[name]
    with torch.no_grad():
        alone = "reference" if name == "cpu" and recorded != "none" else name
        assert backends.select("channel_scale", module.IMPLS, x, gate, in_act) is module.IMPLS[alone]

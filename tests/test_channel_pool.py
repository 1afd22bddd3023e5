"""channel_pool: p = mean a(x), or half mean and half maximum."""

import sys

import cases
import harness
import properties
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fusedtrain import _extension
from fusedtrain import backend as backends
from fusedtrain.ops import _codes, channel_pool
from fusedtrain.ops.channel_pool import IMPLS, mean_and_max, reference

CASES = [
    case
    for case in cases.pairwise(
        shape=list(cases.SHAPES),
        layout=harness.LAYOUTS,
        dtype=harness.DTYPES,
        pool=_codes.POOLS,
        in_act=_codes.INPUT_ACTIVATIONS,
    )
    if (case["shape"], case["pool"]) != ("no_pixels", "avg_max")  # refused, see test_bad_arguments_are_named
]
pools = pytest.mark.parametrize("pool", _codes.POOLS)
dense_layouts = pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)


def make(device, shape=(2, 13, 7, 9), layout="contiguous", dtype=torch.float32, seed=0) -> dict:
    return {"x": harness.images(shape, layout, dtype, device, seed)}


def function(pool="avg", in_act="silu"):
    return lambda x: channel_pool(x, pool=pool, in_act=in_act)


def reference_of(pool="avg", in_act="silu"):
    return lambda x: reference(x, pool, in_act)


@pytest.mark.parametrize("case", CASES, ids=cases.label)
def test_output_and_gradient_are_as_good_as_torch(device, backend, case):
    harness.skip_unless_runs(backend, device, "channel_pool", case["dtype"])
    options = {"pool": case["pool"], "in_act": case["in_act"]}
    shape = cases.SHAPES[case["shape"]]
    draws = harness.draws(lambda seed: make(device, shape, case["layout"], case["dtype"], seed), device, backend)
    harness.assert_op_as_good_as_torch(function(**options), reference_of(**options), draws, "channel_pool")


@pytest.mark.parametrize(("dtype", "channels"), cases.ROWS)
def test_rows_of_any_length_are_summed(device, kernels, dtype, channels):
    harness.skip_unless_runs(kernels, device, "channel_pool", dtype)
    harness.skip_interpreted_rows(kernels, device, channels)
    draws = harness.draws(lambda seed: make(device, (2, channels, 7, 5), "channels_last", dtype, seed), device, kernels)
    harness.assert_op_as_good_as_torch(function(), reference_of(), draws, "channel_pool")


@given(
    case=cases.strided(),
    dtype=st.sampled_from(harness.DTYPES[:3]),
    pool=st.sampled_from(_codes.POOLS),
    in_act=st.sampled_from(_codes.INPUT_ACTIVATIONS),
)
def test_any_shape_and_strides(device, backend, case, dtype, pool, in_act):
    assume(pool == "avg" or 0 not in case["shape"][2:])
    draws = harness.draws(lambda seed: {"x": cases.strided_images(case, dtype, device, seed)}, device, backend)
    harness.assert_op_as_good_as_torch(function(pool, in_act), reference_of(pool, in_act), draws, "channel_pool")


@dense_layouts
@pytest.mark.parametrize("in_act", _codes.INPUT_ACTIVATIONS)
@pytest.mark.parametrize("dtype", harness.DTYPES[:3])
def test_positions_that_share_the_maximum_share_its_gradient(device, backend, layout, in_act, dtype):
    x = make(device, (2, 19, 9, 5), layout, dtype)["x"].round()  # about seven different values
    x[0, 0] = -1.0  # for relu the whole channel reaches the maximum 0
    options = {"pool": "avg_max", "in_act": in_act}
    harness.assert_op_as_good_as_torch(function(**options), reference_of(**options), {"x": x}, "channel_pool")


@dense_layouts
@pools
@pytest.mark.parametrize("in_act", _codes.INPUT_ACTIVATIONS)
def test_gradient_is_the_derivative(device, backend, layout, pool, in_act):
    harness.skip_unless_runs(backend, device, "channel_pool", torch.float64)
    inputs = make(device, (2, 3, 3, 2), layout, torch.float64)
    properties.assert_gradients_are_derivatives(function(pool, in_act), inputs)


@dense_layouts
@pools
def test_operators_agree_with_schema_and_fake(device, kernels, layout, pool):
    x = make(device, layout=layout, dtype=torch.bfloat16)["x"]
    codes = (_codes.POOLS.index(pool), _codes.INPUT_ACTIVATIONS.index("silu"))
    properties.assert_opcheck(IMPLS[kernels].forward, x, *codes)
    pooled, peak, ties = IMPLS[kernels].forward(x, *codes)
    properties.assert_opcheck(IMPLS[kernels].backward, torch.ones_like(pooled), x, peak, ties, *codes)


@pytest.mark.parametrize(
    ("pool", "layout", "dtype"), list(zip(_codes.POOLS, harness.DENSE_LAYOUTS, (torch.bfloat16, torch.float32)))
)
def test_compiles_as_one_graph_and_once(device, backend, layout, pool, dtype):
    properties.assert_compiles(function(pool), make(device, layout=layout, dtype=dtype))


@pools
@dense_layouts
def test_keeps_x_and_two_numbers_per_channel_for_backward(device, kernels, layout, pool):
    x = make(device, layout=layout, dtype=torch.bfloat16)["x"].requires_grad_()
    numbers = 2 * x.shape[0] * x.shape[1] if pool == "avg_max" else 0
    assert harness.extra_saved_bytes(function(pool), x) == numbers * torch.float32.itemsize


def test_what_hooks_store_in_fewer_bits_is_read_as_such(device, kernels):
    properties.assert_reads_what_hooks_store(function("avg_max"), make(device, (4, 13, 7, 9)))


@pools
@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
@pytest.mark.parametrize("layout", harness.LAYOUTS)
def test_repeats_bitwise_and_writes_every_element(device, backend, layout, dtype, pool):
    properties.assert_repeats_bitwise(function(pool), make(device, layout=layout, dtype=dtype))
    properties.assert_writes_every_element(function(pool), make(device, layout=layout, dtype=dtype))


@dense_layouts
def test_large_images_are_summed_as_well(device, kernels, layout):
    calls = function(in_act="identity"), reference_of(in_act="identity")
    properties.assert_large_images_are_summed_as_well(*calls, make, kernels, device, layout)


@pools
@dense_layouts
def test_images_do_not_mix(device, kernels, layout, pool):
    properties.assert_images_do_not_mix(function(pool), make(device, (3, 13, 17, 19), layout))


@pools
@dense_layouts
def test_threads_change_nothing(device, kernels, layout, pool):
    if kernels != "cpu":
        pytest.skip("only the CPU kernels run on threads")
    properties.assert_threads_change_nothing(function(pool), make(device, (5, 24, 33, 31), layout))


@dense_layouts
def test_frozen_input_changes_nothing(device, backend, layout):
    properties.assert_frozen_inputs_change_nothing(function(), make(device, layout=layout))


@pools
@pytest.mark.parametrize("layout", harness.LAYOUTS)
def test_any_incoming_gradient(device, kernels, layout, pool):
    properties.assert_takes_any_incoming_gradient(function(pool), make(device, layout=layout))


def test_second_derivative_is_refused(device, kernels):
    properties.assert_second_derivative_is_refused(function(), make(device))


@pools
@pytest.mark.parametrize("in_act", _codes.INPUT_ACTIVATIONS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_stay_in_place(device, backend, pool, in_act, value):
    for layout in harness.DENSE_LAYOUTS:
        properties.assert_not_finite_stays_in_place(
            function(pool, in_act), reference_of(pool, in_act), make(device, layout=layout), value, (1, 2, 3, 4), (1, 2)
        )


def test_sums_do_not_overflow_in_half_precision(device, kernels):
    for layout in harness.DENSE_LAYOUTS:
        x = torch.empty_like(make(device, (1, 3, 64, 64), layout, torch.float16)["x"]).fill_(1000.0)
        assert torch.equal(channel_pool(x), x[:, :, 0, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_the_dtype_of_x(device, backend, dtype):
    for x_dtype in (torch.float32, dtype):
        x = make(device, dtype=x_dtype)["x"]
        with torch.autocast(device, dtype=dtype):
            assert channel_pool(x).dtype == x.mean((2, 3)).dtype == x_dtype


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "channel_pool: x must be a Tensor, got list"),
        ({"x": torch.ones(2, 3)}, ValueError, r"channel_pool: x must have shape \[N, C, H, W\], got \[2, 3\]"),
        ({"x": torch.ones(2, 3, 4, 4).int()}, TypeError, r"x must be float32, .* got torch.int32"),
        ({"pool": "max"}, ValueError, "pool must be one of avg, avg_max, got 'max'"),
        ({"in_act": "tanh"}, ValueError, "in_act must be one of identity, relu, .* got 'tanh'"),
        (
            {"x": torch.ones(2, 3, 0, 4), "pool": "avg_max"},
            ValueError,
            r"channel_pool: pool='avg_max' needs at least one pixel, got x of shape \[2, 3, 0, 4\]",
        ),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    arguments = {"x": torch.ones(2, 3, 4, 4), "pool": "avg", "in_act": "relu"} | changes
    with pytest.raises(error, match=message):
        channel_pool(**arguments)


@harness.needs_memory(16)
@dense_layouts
def test_more_than_2_to_the_31_elements(device, kernels, layout):
    properties.assert_last_image_is_as_alone(function("avg_max"), kernels, device, layout)


@pytest.mark.parametrize(
    ("family", "dtype", "layout", "codes", "recorded", "name"),
    [
        (25, torch.float32, "contiguous", (0, 0), False, "reference"),
        (25, torch.float32, "channels_last", (0, 0), False, "cpu"),
        (25, torch.float32, "few channels_last", (0, 0), False, "reference"),
        (25, torch.float32, "contiguous", (0, 0), True, "cpu"),
        (25, torch.float32, "contiguous", (1, 0), False, "cpu"),
        (25, torch.float32, "contiguous", (0, 2), False, "cpu"),
        (25, torch.bfloat16, "contiguous", (0, 0), False, "cpu"),
        (26, torch.float32, "contiguous", (0, 0), False, "cpu"),
    ],
)
def test_forward_alone_is_left_to_stock_where_that_is_faster(family, dtype, layout, codes, recorded, name, monkeypatch):
    if reason := harness.why_not("cpu", "cpu", "channel_pool"):
        pytest.skip(reason)
    for key, value in (("cpu_vendor", "amd"), ("isa_active", "avx512"), ("cpu_family", family)):
        monkeypatch.setitem(_extension.BUILD_INFO, key, value)
    x = harness.images((2, 16, 5, 7), layout.split()[-1], dtype).requires_grad_(recorded)
    module = sys.modules["fusedtrain.ops.channel_pool"]
    monkeypatch.setattr(module, "_SMALL", 0)
    monkeypatch.setattr(module, "_FEW_ROWS", x.numel() + layout.startswith("few"))
    assert backends.select("channel_pool", module.IMPLS, x, *codes) is module.IMPLS[name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mean_and_maximum_are_as_good_as_torchs_also_where_one_is_infinite_or_far_from_the_other(
    device, kernels, dtype
):
    harness.skip_unless_runs(kernels, device, "channel_pool", dtype)
    inf = torch.inf
    for some, others in ((1e4, 0.0), (inf, 1.0), (-inf, 1.0), (-inf, -inf), (inf, -inf), (torch.nan, 1.0)):
        x = harness.images((2, 3, 8, 8), dtype=dtype, device=device)
        x[0, 1] = others if others == -inf else x[0, 1] / 10 + others
        x[0, 1, 4, 4:] = some
        truths = x.double().mean((2, 3)), x.double().amax((2, 3))
        for ours, stock, truth in zip(mean_and_max(x), (x.mean((2, 3)), x.amax((2, 3))), truths):
            finite = truth.isfinite()
            harness.assert_as_good_as_torch(ours[finite], stock[finite], truth[finite], f"{some} beside {others}")
            assert torch.equal(ours[~finite].nan_to_num(1.0, 2.0, 3.0), stock[~finite].nan_to_num(1.0, 2.0, 3.0)), some

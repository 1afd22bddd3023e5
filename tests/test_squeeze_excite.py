"""squeeze_excite: y = a(x) * gate(w2 act(w1 pool(a(x)) + b1) + b2)."""

import cases
import harness
import properties
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fusedtrain.ops import _codes, squeeze_excite
from fusedtrain.ops.squeeze_excite import IMPLS, reference

R = 6  # squeeze channels: fewer than a vector holds
BIASES = ("both", "none", "b1", "b2")
WEIGHTS = ("linear", "conv", "transposed")
CASES = [
    case
    for case in cases.pairwise(
        shape=list(cases.SHAPES),
        layout=harness.LAYOUTS,
        dtype=harness.DTYPES,
        act=_codes.ACTIVATIONS,
        gate=_codes.ACTIVATIONS,
        pool=_codes.POOLS,
        in_act=_codes.INPUT_ACTIVATIONS,
        biases=BIASES,
        weights=WEIGHTS,
        r=(1, R, 19),
    )
    if (case["shape"], case["pool"]) != ("no_pixels", "avg_max")  # refused, see test_bad_arguments_are_named
]
OPTIONS = {"act": "silu", "gate": "sigmoid", "pool": "avg", "in_act": "identity"}
pools = pytest.mark.parametrize("pool", _codes.POOLS)
dense_layouts = pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)


def weight(rows, columns, form, dtype, device, seed):
    w = harness.normal(rows, columns, dtype=torch.float64, seed=seed) / max(columns, 1) ** 0.5
    w = w.to(device, dtype)
    return {"linear": w, "conv": w[:, :, None, None], "transposed": w.T.contiguous().T}[form]


def make(
    device,
    shape=(2, 13, 7, 9),
    layout="contiguous",
    dtype=torch.float32,
    *,
    r=R,
    biases="both",
    weights="linear",
    seed=0,
) -> dict:
    c = shape[1]
    b1, b2 = (harness.normal(size, dtype=dtype, device=device, seed=seed + 10 * size) for size in (r, c))
    return {
        "x": harness.images(shape, layout, dtype, device, seed),
        "w1": weight(r, c, weights, dtype, device, seed + 100),
        "b1": b1 if biases in ("both", "b1") else None,
        "w2": weight(c, r, weights, dtype, device, seed + 200),
        "b2": b2 if biases in ("both", "b2") else None,
    }


def function(**options):
    return lambda *tensors: squeeze_excite(*tensors, **OPTIONS | options)


def reference_of(**options):
    return lambda *tensors: reference(*tensors, **OPTIONS | options)


def codes(**options) -> tuple[int, ...]:
    tables = {"act": _codes.ACTIVATIONS, "gate": _codes.ACTIVATIONS, "pool": _codes.POOLS, "in_act": _codes.ACTIVATIONS}
    return tuple(tables[name].index(value) for name, value in (OPTIONS | options).items())


@pytest.mark.parametrize("case", CASES, ids=cases.label)
def test_output_and_gradients_are_as_good_as_torch(device, backend, case):
    harness.skip_unless_runs(backend, device, "squeeze_excite", case["dtype"])
    harness.skip_copied_layouts(backend, device, case["layout"])
    harness.skip_strides_of_reference(backend, case["layout"])
    options = {name: case[name] for name in OPTIONS}
    form = {name: case[name] for name in ("r", "biases", "weights")}
    shape = cases.SHAPES[case["shape"]]

    def draw(seed):
        return make(device, shape, case["layout"], case["dtype"], **form, seed=seed)

    draws = harness.draws(draw, device, backend)
    harness.assert_op_as_good_as_torch(function(**options), reference_of(**options), draws, "squeeze_excite")


@given(
    case=cases.strided(),
    dtype=st.sampled_from(harness.DTYPES[:3]),
    r=st.integers(1, 20),
    pool=st.sampled_from(_codes.POOLS),
    in_act=st.sampled_from(_codes.INPUT_ACTIVATIONS),
)
def test_any_shape_and_strides(device, backend, case, dtype, r, pool, in_act):
    assume(pool == "avg" or 0 not in case["shape"][2:])

    def draw(seed):
        x = cases.strided_images(case, dtype, device, seed)
        return make(device, case["shape"], dtype=dtype, r=r, seed=seed) | {"x": x}

    draws = harness.draws(draw, device, backend)
    options = {"pool": pool, "in_act": in_act}
    harness.assert_op_as_good_as_torch(function(**options), reference_of(**options), draws, "squeeze_excite")


@dense_layouts
@pytest.mark.parametrize("dtype", harness.DTYPES[:3])
def test_layer_of_a_real_network(device, backend, layout, dtype):
    if backend == "triton" and device == "cpu":
        pytest.skip("the interpreter takes a minute on this size")
    # efficientnet_b0.blocks.5.1: 1152 channels, squeezed to 48
    inputs = make(device, (4, 1152, 7, 7), layout, dtype, r=48, weights="conv")
    harness.assert_op_as_good_as_torch(function(), reference_of(), inputs, "squeeze_excite")


@dense_layouts
@pools
@pytest.mark.parametrize(("act", "gate", "in_act"), [("silu", "sigmoid", "identity"), ("gelu", "half_tanh", "silu")])
def test_gradients_are_derivatives(device, backend, layout, pool, act, gate, in_act):
    harness.skip_unless_runs(backend, device, "squeeze_excite", torch.float64)
    inputs = make(device, (2, 3, 2, 2), layout, torch.float64, r=2)
    properties.assert_gradients_are_derivatives(function(act=act, gate=gate, pool=pool, in_act=in_act), inputs)


@dense_layouts
@pytest.mark.parametrize(("pool", "biases"), [("avg", "both"), ("avg_max", "none")])
def test_operators_agree_with_schema_and_fake(device, kernels, layout, pool, biases):
    harness.skip_all_but_channels_last(kernels, device, layout)
    inputs = make(device, layout=layout, dtype=torch.bfloat16, biases=biases, weights="conv")
    impl = IMPLS[kernels]
    properties.assert_opcheck(impl.forward, *inputs.values(), *codes(pool=pool))
    y, *saved = impl.forward(*inputs.values(), *codes(pool=pool))
    x, w1, w2 = inputs["x"], inputs["w1"], inputs["w2"]
    for need_dx, need_dw in ((True, True), (True, False), (False, True)):
        args = (torch.ones_like(y), x, w1, w2, *saved, *codes(pool=pool), need_dx, need_dw)
        properties.assert_opcheck(impl.backward, *args, symbolic=need_dx and need_dw)


@pytest.mark.parametrize(("pool", "layout"), list(zip(_codes.POOLS, harness.DENSE_LAYOUTS)))
def test_compiles_as_one_graph_and_once(device, backend, layout, pool):
    properties.assert_compiles(function(pool=pool), make(device, layout=layout, dtype=torch.bfloat16))


def test_compiles_with_inductor(device, kernels):
    properties.assert_compiles(function(), make(device), compiler="inductor")


@pools
@dense_layouts
def test_keeps_x_and_small_vectors_for_backward(device, kernels, layout, pool):
    leaves = [t.requires_grad_() for t in make(device, layout=layout, dtype=torch.bfloat16).values()]
    n, c = leaves[0].shape[:2]
    numbers = n * (2 * c + R) + (2 * n * c if pool == "avg_max" else 0)  # pooled, logits, hidden; peak, ties
    assert harness.extra_saved_bytes(function(pool=pool), *leaves) == numbers * torch.float32.itemsize


@pools
def test_what_hooks_store_in_fewer_bits_is_read_as_such(device, kernels, pool):
    properties.assert_reads_what_hooks_store(function(pool=pool), make(device, (4, 13, 7, 9)))


@pools
@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
@pytest.mark.parametrize("layout", harness.LAYOUTS)
def test_repeats_bitwise_and_writes_every_element(device, backend, layout, dtype, pool):
    harness.skip_all_but_dense_layouts(backend, device, layout)
    properties.assert_repeats_bitwise(function(pool=pool), make(device, layout=layout, dtype=dtype))
    properties.assert_writes_every_element(function(pool=pool), make(device, layout=layout, dtype=dtype))


@pools
@dense_layouts
def test_images_do_not_mix(device, kernels, layout, pool):
    properties.assert_images_do_not_mix(function(pool=pool), make(device, (3, 13, 17, 19), layout))


@pools
@dense_layouts
def test_threads_change_nothing(device, kernels, layout, pool):
    if kernels != "cpu":
        pytest.skip("only the CPU kernels run on threads")
    properties.assert_threads_change_nothing(function(pool=pool), make(device, (5, 24, 33, 31), layout))


@dense_layouts
def test_frozen_inputs_change_nothing(device, kernels, layout):
    properties.assert_frozen_inputs_change_nothing(function(), make(device, layout=layout))


@pytest.mark.parametrize("layout", harness.LAYOUTS)
def test_any_incoming_gradient(device, kernels, layout):
    harness.skip_all_but_dense_layouts(kernels, device, layout)
    properties.assert_takes_any_incoming_gradient(function(), make(device, layout=layout))


def test_second_derivative_is_refused(device, kernels):
    properties.assert_second_derivative_is_refused(function(), make(device))


@pools
@pytest.mark.parametrize("in_act", _codes.INPUT_ACTIVATIONS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_stay_in_place(device, backend, pool, in_act, value):
    options = {"pool": pool, "in_act": in_act}
    layouts = harness.DENSE_LAYOUTS
    if harness.interpreted(backend, device):  # slow: one of the two, in turn
        layouts = layouts[_codes.INPUT_ACTIVATIONS.index(in_act) % 2 :][:1]
    for layout in layouts:
        properties.assert_not_finite_stays_in_place(
            function(**options), reference_of(**options), make(device, layout=layout), value, (1, 2, 3, 4), (1,)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", ["float32", "autocast"])
def test_autocast_is_as_good_as_torchs_and_leaves_the_dtype_of_x(device, backend, dtype, x_dtype):
    inputs = make(device)
    if x_dtype == "autocast":
        inputs["x"] = inputs["x"].to(dtype)

    def under_autocast(run):
        def function(*tensors):
            with torch.autocast(device, dtype=dtype):
                return run(*tensors)

        return function

    results = harness.assert_op_as_good_as_torch(
        under_autocast(function()), reference_of(), inputs, "autocast", stock=under_autocast(reference_of())
    )
    assert results["y"].dtype == results["dx"].dtype == inputs["x"].dtype
    assert results["dw1"].dtype == torch.float32


def test_reference_is_timms_and_torchvisions_module(zoo):
    timm_block = zoo.timm.models._efficientnet_blocks.SqueezeExcite(12, act_layer=torch.nn.SiLU).double()
    layers = timm_block.conv_reduce, timm_block.conv_expand
    weights = [t.detach() for layer in layers for t in (layer.weight, layer.bias)]
    x = harness.images((2, 12, 5, 7), dtype=torch.float64)
    with torch.no_grad():
        expected = timm_block(x)
    harness.assert_as_good_as_torch(reference(x, *weights, **OPTIONS), expected, expected, "timm")

    block = zoo.torchvision.ops.SqueezeExcitation(12, 3, scale_activation=torch.nn.Hardsigmoid).double()
    weights = [t.detach() for layer in (block.fc1, block.fc2) for t in (layer.weight, layer.bias)]
    with torch.no_grad():
        expected = block(x)
    y = reference(x, *weights, **OPTIONS | {"act": "relu", "gate": "hard_sigmoid"})
    harness.assert_as_good_as_torch(y, expected, expected, "torchvision")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "squeeze_excite: x must be a Tensor, got list"),
        ({"x": torch.ones(2, 13)}, ValueError, r"squeeze_excite: x must have shape \[N, C, H, W\], got \[2, 13\]"),
        ({"x": torch.ones(2, 13, 4, 4).long()}, TypeError, r"x must be float32, .* got torch.int64"),
        ({"w1": torch.ones(6, 12)}, ValueError, r"w1 must have shape \[R, 13\] or \[R, 13, 1, 1\], got \[6, 12\]"),
        ({"w1": torch.ones(6, 13, 3, 3)}, ValueError, r"w1 must have shape .* got \[6, 13, 3, 3\]"),
        ({"w1": torch.ones(13)}, ValueError, r"w1 must have shape .* got \[13\]"),
        ({"w2": torch.ones(13, 5)}, ValueError, r"w2 must have shape \[13, 6\] or \[13, 6, 1, 1\], got \[13, 5\]"),
        ({"w2": torch.ones(13, 6, 1)}, ValueError, r"w2 must have shape .* got \[13, 6, 1\]"),
        ({"b1": torch.ones(13)}, ValueError, r"b1 must have shape \[6\] or be None, got \[13\]"),
        ({"b2": torch.ones(13, 1)}, ValueError, r"b2 must have shape \[13\] or be None, got \[13, 1\]"),
        ({"w1": torch.ones(6, 13).half()}, TypeError, r"must have the dtype of x \(torch.float32\) outside autocast"),
        ({"b2": torch.ones(13).double()}, TypeError, r"must have the dtype of x .* got torch.float32, torch.float64"),
        ({"w2": torch.ones(13, 6, device="meta")}, RuntimeError, "w2 is on meta, but x is on cpu"),
        ({"act": "mish"}, ValueError, "act must be one of identity, relu, .* got 'mish'"),
        ({"gate": "softmax"}, ValueError, "gate must be one of identity, .* got 'softmax'"),
        ({"pool": "max"}, ValueError, "pool must be one of avg, avg_max, got 'max'"),
        ({"in_act": "sigmoid"}, ValueError, "in_act must be one of identity, .* got 'sigmoid'"),
        (
            {"x": torch.ones(2, 13, 0, 4), "pool": "avg_max"},
            ValueError,
            r"squeeze_excite: pool='avg_max' needs at least one pixel, got x of shape \[2, 13, 0, 4\]",
        ),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        squeeze_excite(**make("cpu") | OPTIONS | changes)


@harness.needs_memory(16)
@dense_layouts
def test_more_than_2_to_the_31_elements(device, kernels, layout):
    weights = list(make(device, (1, 64, 1, 1), dtype=torch.bfloat16).values())[1:]
    properties.assert_last_image_is_as_alone(lambda x: squeeze_excite(x, *weights), kernels, device, layout)

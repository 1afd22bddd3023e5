"""grouped_conv2d: a convolution in groups of channels; and its layer."""

import copy
import dataclasses
import sys

import cases
import harness
import properties
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import fusedtrain
from fusedtrain import _extension
from fusedtrain import backend as backends
from fusedtrain.nn import GroupedConv2d
from fusedtrain.ops import depthwise_conv2d, grouped_conv2d
from fusedtrain.ops._windows import output_size
from fusedtrain.ops.grouped_conv2d import IMPLS, reference

STOCK_ON_GPUS = True  # see conftest.py

MODULE = sys.modules["fusedtrain.ops.grouped_conv2d"]
# groups, channels of a group of x and of y, and why
GROUPS = {
    "regnet": (3, 16, 16),
    "one_group": (1, 20, 12),
    "resnext": (5, 4, 4),  # many to a block
    "resnext_wide": (2, 32, 32),  # two blocks in float32
    "odd": (3, 5, 7),  # no pairs, no whole vectors
    "part_of_a_block": (2, 24, 24),
    "expanding": (2, 6, 70),  # more than a panel of vectors
    "long_sums": (2, 70, 3),  # chains
}
SIZES = {
    "rows_of_7": (2, 7, 7),
    "rows_of_14": (1, 14, 14),
    "odd_size": (2, 9, 11),
    "one_row": (1, 1, 23),
    "one_column": (3, 13, 1),
    "many_bands": (1, 61, 45),
    "empty_batch": (0, 6, 6),
}
# kernel, stride, padding, dilation
GEOMETRIES = {
    "3x3": ((3, 3), (1, 1), 1, (1, 1)),
    "3x3_s2": ((3, 3), (2, 2), 1, (1, 1)),
    "5x5_s3": ((5, 5), (3, 3), 2, (1, 1)),
    "1x1_s2": ((1, 1), (2, 2), 0, (1, 1)),  # phases without a tap
    "dilated": ((3, 3), (1, 1), 3, (3, 2)),
    "dilated_s2": ((3, 3), (2, 2), 2, (2, 2)),  # taps of one phase alone
    "asymmetric": ((3, 2), (2, 1), (0, 1, 2, 1), (1, 1)),
    "4x4_s2": ((4, 4), (2, 2), 3, (1, 1)),
}
CASES = cases.pairwise(
    groups=list(GROUPS),
    size=list(SIZES),
    geometry=list(GEOMETRIES),
    layout=harness.LAYOUTS,
    dtype=harness.DTYPES,
    bias=[True, False],
)
CASES += [dict(CASES[0], size="nothing", geometry="4x4_s2", layout="contiguous")]
SIZES |= {"nothing": (0, 0, 6)}
dense_layouts = pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)


def make(
    device="cpu", size=(2, 9, 11), groups=(3, 16, 16), kernel=(3, 3), layout="channels_last", dtype=torch.float32,
    bias=True, seed=0,
) -> dict:  # fmt: skip
    n, h, w = size
    g, ci, co = groups
    return {
        "x": harness.images((n, g * ci, h, w), layout, dtype, device, seed=3 * seed),
        "w": harness.normal(g * co, ci, *kernel, dtype=dtype, device=device, seed=3 * seed + 1),
        "b": harness.normal(g * co, dtype=dtype, device=device, seed=3 * seed + 2) if bias else None,
    }


def function(stride=1, padding=1, dilation=1, groups=3):
    return lambda x, w, b: grouped_conv2d(x, w, b, stride, padding, dilation, groups)


def reference_of(stride=(1, 1), padding=1, dilation=(1, 1), groups=3):
    sides = [padding] * 4 if isinstance(padding, int) else list(padding)
    return lambda x, w, b: reference(x, w, b, list(stride), sides, list(dilation), groups)


def fits(size, kernel, stride, padding, dilation) -> bool:
    sides = [padding] * 4 if isinstance(padding, int) else padding
    return min(output_size(size[1:], kernel, stride, sides, dilation)) > 0


@pytest.mark.parametrize("case", CASES, ids=cases.label)
def test_output_and_gradients_are_as_good_as_torch(device, backend, case):
    harness.skip_strides_of_reference(backend, case["layout"])
    groups, size, geometry = GROUPS[case["groups"]], SIZES[case["size"]], GEOMETRIES[case["geometry"]]
    if not fits(size, *geometry):
        pytest.skip("the kernel does not fit into the image")
    kernel, *window = geometry

    def draw(seed):
        return make(device, size, groups, kernel, case["layout"], case["dtype"], case["bias"], seed)

    draws = harness.draws(draw, device, backend)
    args = (*window, groups[0])
    harness.assert_op_as_good_as_torch(function(*args), reference_of(*args), draws, "grouped_conv2d")


@given(
    size=st.tuples(st.integers(1, 3), st.integers(1, 33), st.integers(1, 33)),
    groups=st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 40)),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(*[st.integers(0, 4)] * 4),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dtype=st.sampled_from(harness.DTYPES[:3]),
)
def test_any_shape_and_geometry(device, backend, size, groups, kernel, stride, padding, dilation, dtype):
    assume(fits(size, kernel, stride, padding, dilation))
    args = (stride, padding, dilation, groups[0])
    inputs = make(device, size, groups, kernel, dtype=dtype)
    harness.assert_op_as_good_as_torch(function(*args), reference_of(*args), inputs, "grouped_conv2d")


@harness.needs_memory(21)
@dense_layouts
def test_more_than_2_to_the_31_elements(device, layout):
    if reason := harness.why_not("cpu", device, "grouped_conv2d"):
        pytest.skip(reason)
    inputs = make(device, (3, 64, 64), (4, 16, 16), layout=layout, dtype=torch.bfloat16)
    inputs["x"][1] = 0
    with fusedtrain.use_backend("cpu"):
        calls = function(groups=4), lambda counts, x, w, b: reference_of(groups=4)(x, w, b)
        properties.assert_thousands_of_images_are_as_good_as_torch(*calls, inputs, "cpu", device)


def test_a_weight_of_any_strides(device, backend):
    for dtype in harness.DTYPES[:2]:
        inputs = make(device, dtype=dtype)
        for order in ((1, 0, 2, 3), (0, 2, 3, 1), (2, 3, 0, 1)):
            back = [order.index(d) for d in range(4)]
            weight = inputs["w"].permute(order).contiguous().permute(back)
            harness.assert_op_as_good_as_torch(function(), reference_of(), inputs | {"w": weight}, str(order))


@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
@pytest.mark.parametrize(
    ("size", "channels", "stride"),
    [((2, 56, 56), 64, 2), ((2, 28, 28), 128, 1), ((4, 14, 14), 320, 1), ((4, 14, 14), 768, 2), ((4, 7, 7), 768, 1)],
)
def test_layers_of_regnet(device, backend, size, channels, stride, dtype):
    groups = (channels // 16, 16, 16)
    args = ((stride, stride), 1, (1, 1), groups[0])
    draws = harness.draws(lambda seed: make(device, size, groups, dtype=dtype, bias=False, seed=seed), device, backend)
    for draw in draws:
        draw["w"] = draw["w"].to(memory_format=torch.channels_last)
    harness.assert_op_as_good_as_torch(function(*args), reference_of(*args), draws, "grouped_conv2d")


@pytest.mark.parametrize("op", [grouped_conv2d, depthwise_conv2d], ids=lambda op: op.__name__)
@pytest.mark.parametrize("weight_layout", harness.DENSE_LAYOUTS)
@pytest.mark.parametrize(("columns", "stride", "dilation"), [(33, 1, 2), (1, 2, 1), (2, 2, 1)])
def test_gradients_hold_nothing_that_stood_in_memory(device, backend, op, weight_layout, columns, stride, dilation):
    # oneDNN's do, of bfloat16: of dilated kernels where y has 29 columns or more, and of images narrower than a stride;
    # with AMX, y of one column does, too.
    groups = 4 if op is grouped_conv2d else 12
    shape, kernel, geometry = (2, 12, 9, columns), (12, 12 // groups, 3, 3), (stride, dilation, dilation)
    inputs = {
        "x": harness.images(shape, "channels_last", torch.bfloat16, device),
        "weight": harness.images(kernel, weight_layout, torch.bfloat16, device, seed=1),
    }
    options = {"groups": groups} if op is grouped_conv2d else {}

    def ours(x, weight):
        dirt = [torch.full((1 << i,), float("nan"), device=device) for i in range(6, 17) for _ in range(8)]
        del dirt
        with fusedtrain.use_backend(backend):
            return op(x, weight, None, *geometry, **options)

    def exact(x, weight):
        return torch.nn.functional.conv2d(x, weight, None, *geometry, groups)

    doubles = {name: t.double().contiguous() for name, t in inputs.items()}
    dy = torch.ones_like(exact(*doubles.values()), dtype=torch.bfloat16, memory_format=torch.channels_last)
    truth = harness.evaluate(exact, doubles, dy=dy.double())
    for _ in range(8):
        for name, value in harness.evaluate(ours, inputs, dy=dy).items():
            harness.assert_as_good_as_torch(value, truth[name].bfloat16(), truth[name], f"{op.__name__} {name}")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
def test_not_finite_reaches_what_torch_lets_it_reach(device, backend, value, dtype):
    inputs = make(device, dtype=dtype)
    inputs["x"][1, 37, 4, 4] = value
    harness.assert_op_as_good_as_torch(function(), reference_of(), inputs, "grouped_conv2d", frozen=("w",))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
@pytest.mark.parametrize("row", [0, -1])
def test_not_finite_images_reach_no_more_gradients_than_in_torch(device, backend, value, dtype, row):
    inputs = make(device, dtype=dtype)
    inputs["x"][1, 37, row, 4] = value
    for stride in (1, 2):  # nine rows come out, and five: the last has no second one to make a pair with
        ours, stock = (
            harness.evaluate(f, inputs, dy_dtype=dtype)["dw"] for f in (function(stride), reference_of((stride,) * 2))
        )
        assert (ours.isfinite() | ~stock.isfinite()).all() and not ours.isfinite().all()


@dense_layouts
def test_gradients_are_derivatives(device, backend, layout):
    inputs = make(device, (2, 4, 5), (2, 3, 2), layout=layout, dtype=torch.float64)
    properties.assert_gradients_are_derivatives(function(2, 1, 1, 2), inputs)


@pytest.mark.parametrize("dtype", harness.DTYPES)
def test_operators_agree_with_schema_and_fake(dtype):
    if reason := harness.why_not("cpu", "cpu", "grouped_conv2d"):
        pytest.skip(reason)
    inputs = make(dtype=dtype)
    dy = harness.images((2, 48, 5, 11), "channels_last", dtype, seed=1)
    geometry = ([2, 1], [1, 1, 1, 1], [1, 1], 3)
    operators = torch.ops.fusedtrain
    for weight in (inputs["w"], inputs["w"].to(memory_format=torch.channels_last)):
        properties.assert_opcheck(operators.grouped_conv2d.default, inputs["x"], weight, inputs["b"], *geometry)
        properties.assert_opcheck(operators.grouped_conv2d_dx.default, dy, weight, 9, 11, *geometry)
        properties.assert_opcheck(operators.grouped_conv2d_dw.default, dy, inputs["x"], weight, *geometry)


def test_operators_refuse_what_does_not_fit():
    if reason := harness.why_not("cpu", "cpu", "grouped_conv2d"):
        pytest.skip(reason)
    x, weight, geometry = torch.ones(1, 6, 4, 5), torch.ones(4, 3, 3, 3), ([1, 1], [1] * 4, [1, 1])
    images = x.contiguous(memory_format=torch.channels_last)
    operator = torch.ops.fusedtrain.grouped_conv2d
    for message, args in {
        "x in channels_last expected": (x, weight, None, *geometry, 2),
        "x must have 9 channels": (images, weight, None, *geometry, 3),
        r"weight must have the shape \[groups \* o, i, kh, kw\]": (images, weight, None, *geometry, 5),
        "two strides, four paddings and two dilations expected": (images, weight, None, [1], [1] * 4, [1, 1], 2),
        "the kernel does not fit into the padded image": (images, weight, None, [1, 1], [0] * 4, [3, 1], 2),
    }.items():
        if "9 channels" in message:
            args = (images, torch.ones(6, 3, 3, 3), None, *geometry, 3)
        with pytest.raises(RuntimeError, match=message):
            operator(*args)


@pytest.mark.parametrize("dtype", harness.DTYPES[:3])
@dense_layouts
def test_compiles_as_one_graph_and_once(device, backend, layout, dtype):
    properties.assert_compiles(function(2), make(device, layout=layout, dtype=dtype))


def test_keeps_only_its_inputs_for_backward(device, backend):
    for layout in harness.DENSE_LAYOUTS:
        leaves = [t.requires_grad_() for t in make(device, layout=layout, dtype=torch.bfloat16).values()]
        assert harness.extra_saved_bytes(function(), *leaves) == 0


@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
@pytest.mark.parametrize("layout", harness.LAYOUTS)
def test_repeats_bitwise_and_writes_every_element(device, backend, layout, dtype):
    properties.assert_repeats_bitwise(function(2), make(device, layout=layout, dtype=dtype))
    properties.assert_writes_every_element(function(2), make(device, layout=layout, dtype=dtype))


@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
@pytest.mark.parametrize("size", [(5, 33, 31), (2, 60, 70), (16, 7, 7)])
def test_threads_change_nothing(device, backend, size, dtype):
    if backend == "reference":
        pytest.skip("stock PyTorch promises nothing of its sums")
    properties.assert_threads_change_nothing(function(), make(device, size, dtype=dtype, bias=False))


def test_images_do_not_mix(device, backend):
    properties.assert_images_do_not_mix(function(), make(device, (3, 17, 19)), ("x",))


@dense_layouts
def test_frozen_inputs_change_nothing(device, backend, layout):
    properties.assert_frozen_inputs_change_nothing(function(), make(device, layout=layout))


@pytest.mark.parametrize("layout", harness.LAYOUTS)
def test_any_incoming_gradient(device, backend, layout):
    if backend == "reference":
        pytest.skip("the bits of stock PyTorch's gradient of the bias depend on strides")
    properties.assert_takes_any_incoming_gradient(function(), make(device, layout=layout))


def test_second_derivative_is_refused(device, backend):
    if backend == "reference":
        pytest.skip("stock PyTorch differentiates twice")
    properties.assert_second_derivative_is_refused(function(), make(device))


def test_one_image_without_a_batch(device, backend):
    inputs = make(device, (1, 9, 11))
    image, *parameters = inputs["x"][0], inputs["w"], inputs["b"]
    y = function()(image, *parameters)
    assert torch.equal(y, function()(image[None], *parameters)[0])
    if backend == "cpu":  # stock PyTorch chooses between kernels by the stride of the only image
        assert torch.equal(y, function()(*inputs.values())[0])


def test_autocast_casts_as_convolutions_do(device, backend):
    inputs = make(device)
    with torch.autocast(device, torch.bfloat16):
        y = function()(*inputs.values())
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, function()(*(t.bfloat16() for t in inputs.values())))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(groups=5), ValueError, "groups must divide the 48 channels of x, got 5"),
        (dict(groups=0), ValueError, "groups must divide the 48 channels of x, got 0"),
        (dict(weight=torch.ones(48, 8, 3, 3)), ValueError, r"weight must have shape \[D, C / groups, kh, kw\]"),
        (dict(weight=torch.ones(47, 16, 3, 3)), ValueError, "groups must divide the output channels, got 3"),
        (dict(weight=None), ValueError, "weight must have shape .* got NoneType"),
        (dict(weight=torch.ones(48, 16, 3, 3).double()), TypeError, "weight must have the dtype of x"),
        (dict(bias=torch.ones(3)), ValueError, r"bias must have shape \[48\] or be None, got \[3\]"),
        (dict(padding="some"), ValueError, "padding must be 'same', 'valid' or numbers"),
        (dict(padding="same", stride=2), ValueError, "padding='same' needs stride 1"),
        (dict(padding=-1), ValueError, "padding must be an int or a pair of ints >= 0"),
        (dict(dilation=9), ValueError, "does not fit into x of shape"),
        (dict(stride=0), ValueError, "stride must be an int or a pair of ints >= 1"),
        (dict(x=torch.ones(2, 48, 9)[0][0]), ValueError, r"x must have shape \[N, C, H, W\]"),
        (dict(x=torch.ones(2, 48, 9, 11).int()), TypeError, "x must be float32, bfloat16, float16 or float64"),
    ],
)
def test_bad_inputs_are_named(change, error, message):
    inputs = make()
    arguments = {"x": inputs["x"], "weight": inputs["w"], "bias": inputs["b"], "groups": 3, **change}
    with pytest.raises(error, match=f"grouped_conv2d: .*{message}"):
        grouped_conv2d(**arguments)


@pytest.fixture
def chosen(monkeypatch):
    """What runs of RegNet's layers, given a CPU."""

    def parts(isa, dtype, columns, stride, width=16, vendor="amd", family=25, layout="channels_last"):
        for name, value in (("cpu_vendor", vendor), ("cpu_family", family), ("isa_active", isa)):
            monkeypatch.setitem(_extension.BUILD_INFO, name, value)
        x = harness.images((16, 8 * width, columns * stride, columns * stride), layout, dtype)
        weight = harness.normal(8 * width, width, 3, 3, dtype=dtype)
        impl = backends.select("grouped_conv2d", IMPLS, x, weight, None, [stride] * 2)
        assert impl is IMPLS["reference"] or impl is IMPLS["cpu"]
        return MODULE._faster_parts(x, weight, [stride] * 2) if impl is IMPLS["cpu"] else ()

    return parts


@pytest.mark.skipif(not _extension.LOADED, reason=str(_extension.WHY_NOT))
def test_each_direction_runs_where_it_was_measured_faster(chosen):
    fp32, bf16, all_of_them = torch.float32, torch.bfloat16, ("forward", "dx", "dw")
    assert chosen("avx512_bf16", fp32, 28, 1) == chosen("avx512_bf16", fp32, 14, 2) == all_of_them
    assert chosen("avx512_bf16", fp32, 14, 1) == chosen("avx512_bf16", fp32, 28, 1, width=24) == ()
    assert chosen("avx512_bf16", fp32, 7, 2) == ("dw",)
    assert chosen("avx512_bf16", bf16, 28, 2) == all_of_them and chosen("avx512_bf16", bf16, 14, 2) == ("dx", "dw")
    assert chosen("avx512_bf16", bf16, 14, 1) == chosen("avx512_bf16", bf16, 28, 1, width=24) == ("dw",)
    assert chosen("avx2", bf16, 14, 1) == chosen("avx2", fp32, 14, 1, width=24) == all_of_them
    assert chosen("avx2", fp32, 28, 1, width=48) == chosen("avx512", fp32, 28, 1) == ()
    assert chosen("avx512_bf16", fp32, 28, 1, vendor="intel") == ()
    assert chosen("avx512_bf16", torch.float64, 28, 1) == ()


@pytest.mark.skipif(not _extension.LOADED, reason=str(_extension.WHY_NOT))
def test_more_of_them_run_in_the_kernel_on_zen5(chosen):
    def on_zen5(dtype, columns, stride, width, isa="avx512_bf16"):
        return chosen(isa, dtype, columns, stride, width, family=26)

    fp32, bf16, all_of_them = torch.float32, torch.bfloat16, ("forward", "dx", "dw")
    assert on_zen5(fp32, 14, 1, 24) == on_zen5(bf16, 14, 2, 24) == all_of_them
    for width in (32, 48, 64):
        assert on_zen5(fp32, 7, 1, width) == on_zen5(bf16, 7, 2, width) == all_of_them
    assert on_zen5(bf16, 14, 1, 16) == all_of_them and on_zen5(fp32, 14, 1, 16) == ("dx", "dw")
    assert on_zen5(fp32, 28, 2, 16) == all_of_them and on_zen5(fp32, 14, 2, 16) == ("dw",)
    assert on_zen5(fp32, 28, 1, 8) == on_zen5(bf16, 28, 1, 8) == on_zen5(bf16, 28, 1, 4) == ("dw",)
    assert on_zen5(fp32, 28, 1, 4) == on_zen5(fp32, 28, 1, 72) == on_zen5(fp32, 28, 1, 24, isa="avx512") == ()
    assert on_zen5(fp32, 14, 1, 24, isa="avx2") == all_of_them


@pytest.mark.skipif(not _extension.LOADED, reason=str(_extension.WHY_NOT))
def test_what_runs_in_the_kernel_on_intel_with_avx512(chosen):
    def on_intel(dtype, columns, stride, width, isa="avx512", layout="channels_last"):
        return chosen(isa, dtype, columns, stride, width, "intel", 6, layout)

    fp32, bf16, all_of_them = torch.float32, torch.bfloat16, ("forward", "dx", "dw")
    assert on_intel(fp32, 28, 1, 16) == on_intel(fp32, 14, 2, 16) == all_of_them
    assert on_intel(fp32, 14, 1, 24) == on_intel(fp32, 14, 2, 24) == ("dx", "dw")
    assert on_intel(fp32, 7, 1, 16) == on_intel(fp32, 7, 1, 32) == on_intel(fp32, 28, 1, 16, layout="contiguous") == ()
    assert on_intel(fp32, 28, 1, 8) == ("dw",)
    for width in (4, 16, 32, 48):
        assert on_intel(bf16, 28, 1, width) == on_intel(bf16, 14, 2, width, layout="contiguous") == all_of_them
    assert on_intel(fp32, 28, 1, 16)  # sets the CPU
    small = harness.images((16, 512, 7, 7), "channels_last")  # enough of them to run in the kernel
    assert MODULE._faster_parts(small, torch.empty(512, 16, 3, 3), [1, 1]) == ()
    assert on_intel(bf16, 28, 1, 16, isa="avx512_bf16") == ()


@pytest.mark.skipif(not _extension.LOADED, reason=str(_extension.WHY_NOT))
def test_what_runs_in_the_kernel_on_intel_with_tiles(chosen):
    def on_intel(dtype, columns, stride, width, layout="channels_last"):
        return chosen("amx_bf16", dtype, columns, stride, width, "intel", 6, layout)

    fp32, bf16 = torch.float32, torch.bfloat16
    assert on_intel(fp32, 28, 1, 24) == on_intel(fp32, 7, 1, 32) == ("forward", "dx")
    assert on_intel(fp32, 56, 1, 12) == on_intel(fp32, 28, 2, 12) == on_intel(fp32, 7, 2, 24) == ("forward", "dx", "dw")
    assert on_intel(fp32, 28, 1, 48) == on_intel(fp32, 7, 1, 16) == on_intel(fp32, 28, 1, 16, "contiguous") == ()
    assert on_intel(fp32, 28, 1, 16) == ("dx",) and on_intel(fp32, 14, 2, 8) == ("dw",)
    assert on_intel(fp32, 14, 2, 48) == ("dx", "dw") and on_intel(fp32, 14, 2, 16) == ("forward",)
    assert on_intel(bf16, 28, 1, 16) == on_intel(bf16, 28, 2, 48) == on_intel(bf16, 28, 1, 4) == ()
    assert on_intel(bf16, 14, 2, 2) == ("forward", "dx", "dw")
    assert on_intel(bf16, 56, 1, 2) == ("forward", "dw") and on_intel(bf16, 28, 1, 2) == ("dw",)
    assert on_intel(bf16, 28, 2, 16) == ("dx",) and on_intel(bf16, 14, 2, 8) == on_intel(bf16, 56, 1, 8) == ("dw",)


@pytest.mark.skipif(not _extension.LOADED, reason=str(_extension.WHY_NOT))
def test_what_runs_in_the_kernel_on_intel_with_avx2(chosen):
    def on_intel(dtype, columns, stride, width, layout="channels_last"):
        return chosen("avx2", dtype, columns, stride, width, "intel", 6, layout)

    all_of_them, fp32, bf16 = ("forward", "dx", "dw"), torch.float32, torch.bfloat16
    for width in (4, 8):
        assert on_intel(fp32, 28, 1, width) == on_intel(fp32, 14, 2, width) == all_of_them
    assert on_intel(fp32, 28, 1, 16) == on_intel(fp32, 14, 2, 24) == on_intel(fp32, 7, 1, 64) == ("dw",)
    assert on_intel(fp32, 14, 2, 12) == on_intel(fp32, 14, 2, 20) == ("dx", "dw")
    assert on_intel(fp32, 56, 1, 6) == on_intel(fp32, 28, 1, 72) == on_intel(bf16, 28, 1, 72) == ()
    assert on_intel(fp32, 56, 1, 2) == on_intel(fp32, 6, 1, 64) == on_intel(fp32, 28, 1, 8, "contiguous") == ()
    for width in (4, 64):
        assert on_intel(bf16, 28, 1, width) == on_intel(bf16, 14, 2, width, "contiguous") == all_of_them
    small = harness.images((16, 512, 7, 7), "channels_last")  # enough of them to run in the kernel
    on_intel(fp32, 28, 1, 8)  # sets the CPU
    assert MODULE._faster_parts(small, torch.empty(512, 8, 3, 3), [1, 1]) == all_of_them


def test_pixels_that_share_sets_are_left_to_stock_where_it_strides(monkeypatch):
    if reason := harness.why_not("cpu", "cpu", "grouped_conv2d"):
        pytest.skip(reason)
    for name, value in (("cpu_vendor", "amd"), ("isa_active", "avx512_bf16")):
        monkeypatch.setitem(_extension.BUILD_INFO, name, value)
    for family, channels, stride, faster in (
        (25, 512, 2, False),
        (25, 512, 1, True),
        (25, 496, 2, True),
        (26, 512, 2, True),
    ):
        monkeypatch.setitem(_extension.BUILD_INFO, "cpu_family", family)
        x = harness.images((1, channels, 56, 56), "channels_last")
        parts = MODULE._faster_parts(x, torch.empty(channels, 16, 3, 3), [stride, stride])
        assert ("dw" in parts) == faster, (channels, stride)


def test_of_contiguous_images_the_kernel_takes_ragged_groups_to_the_weight(chosen):
    """In bfloat16, where the library takes several times as long over the gradient of such weights."""
    for dtype, width, parts in (
        (torch.bfloat16, 4, ("dw",)),
        (torch.bfloat16, 24, ("dw",)),
        (torch.bfloat16, 16, ()),
        (torch.bfloat16, 6, ()),
        (torch.float32, 4, ()),
    ):
        chosen("avx512_bf16", dtype, 28, 1)
        x = harness.images((16, 4 * width, 28, 28), dtype=dtype)
        weight = torch.empty(4 * width, width, 3, 3, dtype=dtype)
        assert MODULE._faster_parts(x, weight, [1, 1]) == parts, (dtype, width)
        assert (MODULE._slower(x, weight) is None) == bool(parts)


def test_what_was_not_measured_is_left_to_stock(chosen):
    x = harness.images((16, 64, 28, 28), "channels_last")
    chosen("avx512_bf16", torch.float32, 28, 1)
    for args, reason in {
        (x.contiguous(), (3, 3)): "layout",
        (x, (5, 5)): "kernels other than 3x3",
        (x[:1], (3, 3)): "fewer than 200,000 elements",
    }.items():
        images, kernel = args
        assert reason in MODULE._slower(images, harness.normal(64, 16, *kernel))


def test_the_automatic_choice_compiles(chosen):
    if reason := harness.why_not("cpu", "cpu", "grouped_conv2d"):
        pytest.skip(reason)
    assert chosen("avx512_bf16", torch.float32, 28, 1)
    properties.assert_compiles(function(groups=4), make(size=(4, 28, 28), groups=(4, 16, 16)))


def test_stock_runs_the_directions_that_it_does_faster(monkeypatch):
    if reason := harness.why_not("cpu", "cpu", "grouped_conv2d"):
        pytest.skip(reason)
    monkeypatch.setitem(IMPLS, "cpu", dataclasses.replace(IMPLS["cpu"], slower=None))
    for parts in ((), ("forward",), ("dx",), ("dw",)):
        monkeypatch.setattr(MODULE, "_faster_parts", lambda *_, parts=parts: parts)
        harness.assert_op_as_good_as_torch(function(2), reference_of((2, 2)), make(), str(parts))


@pytest.mark.parametrize("dtype", harness.DTYPES)
@dense_layouts
def test_a_forced_backend_runs_every_direction(layout, dtype, monkeypatch):
    if reason := harness.why_not("cpu", "cpu", "grouped_conv2d"):
        pytest.skip(reason)
    monkeypatch.setattr(MODULE, "_faster_parts", lambda *_: ())  # stock is faster everywhere
    monkeypatch.setattr(MODULE, "reference_backward", None)
    monkeypatch.setattr(MODULE, "reference", None)
    leaves = {name: t.requires_grad_() for name, t in make(layout=layout, dtype=dtype).items()}
    with fusedtrain.use_backend("cpu"):
        y = function(2)(*leaves.values())
    torch.autograd.grad(y.sum(), list(leaves.values()))  # on the backend that ran forward


def test_forced_backend_never_falls_back():
    with fusedtrain.use_backend("cuda"), pytest.raises(RuntimeError, match="cannot run grouped_conv2d"):
        function()(*make().values())


@pytest.mark.parametrize(
    "options", [dict(), dict(stride=2, bias=False), dict(padding="same"), dict(padding=2, padding_mode="circular")]
)
def test_layer_is_a_conv2d(device, backend, options):
    torch.manual_seed(0)
    stock = nn.Conv2d(12, 18, 3, groups=3, device=device, **options)
    torch.manual_seed(0)
    ours = GroupedConv2d(12, 18, 3, groups=3, device=device, **options)
    assert isinstance(ours, nn.Conv2d) and ours.extra_repr() == stock.extra_repr()
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), stock.state_dict().values(), strict=True))
    ours, stock = (layer.to(memory_format=torch.channels_last) for layer in (ours, stock))
    harness.assert_module_as_good_as_torch(ours, stock, harness.images((2, 12, 9, 8), "channels_last", device=device))


def test_fuse_takes_the_grouped_convolutions_of_regnet(zoo):
    torch.manual_seed(0)
    stock = zoo.timm.create_model("regnety_008", num_classes=10).to(memory_format=torch.channels_last)
    fused = copy.deepcopy(stock)
    keys, grouped = list(fused.state_dict()), {n for n, m in stock.named_modules() if getattr(m, "groups", 1) > 1}
    report = fusedtrain.fuse(fused)
    assert {c.name for c in report.swapped if c.after.endswith("GroupedConv2d")} == grouped and len(grouped) == 14
    assert list(fused.state_dict()) == keys
    block, x = "s2.b2", harness.images((2, 128, 14, 14), "channels_last")
    harness.assert_module_as_good_as_torch(fused.get_submodule(block), stock.get_submodule(block), x)
    fusedtrain.unfuse(fused)
    assert [type(m) for m in fused.modules()] == [type(m) for m in stock.modules()]

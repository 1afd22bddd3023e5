"""depthwise_conv2d: every channel convolved with its own kernels; and its layers."""

import sys

import cases
import harness
import properties
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode

from fusedtrain import _extension
from fusedtrain import backend as backends
from fusedtrain.nn import DepthwiseConv2d, DepthwiseConv2dSame, DepthwiseSeparableConv
from fusedtrain.ops import _codes, _remembered, depthwise_conv2d
from fusedtrain.ops._windows import output_size
from fusedtrain.ops.depthwise_conv2d import BACKWARD_IMPLS, IMPLS, reference

OP = sys.modules["fusedtrain.ops.depthwise_conv2d"]  # whose name in the package is that of the function
settings.load_profile("fusedtrain")  # the import of op_db has loaded one of torch's

# (kernel, stride, padding (left, right, top, bottom), dilation): name -> why it is here.
GEOMETRIES = {
    "1x1": ((1, 1), (1, 1), (0, 0, 0, 0), (1, 1)),
    "3x3": ((3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    "3x3_stride2": ((3, 3), (2, 2), (1, 1, 1, 1), (1, 1)),
    "3x3_tf_same": ((3, 3), (2, 2), (0, 1, 0, 1), (1, 1)),
    "3x3_dilated": ((3, 3), (1, 1), (2, 2, 2, 2), (2, 2)),
    "3x3_stride2_dilated": ((3, 3), (2, 2), (2, 2, 2, 2), (2, 2)),  # stride and dilation share a factor
    "3x3_stride3_dilated": ((3, 3), (3, 2), (2, 2, 3, 3), (2, 3)),  # and here they do not
    "5x5": ((5, 5), (1, 1), (2, 2, 2, 2), (1, 1)),
    "5x5_stride2": ((5, 5), (2, 2), (2, 2, 2, 2), (1, 1)),
    "7x7": ((7, 7), (1, 1), (3, 3, 3, 3), (1, 1)),
    "7x7_stride2": ((7, 7), (2, 2), (3, 3, 3, 3), (1, 1)),
    "13x13": ((13, 13), (1, 1), (6, 6, 6, 6), (1, 1)),  # in parts of 7 and 6 taps
    "31x31": ((31, 31), (1, 1), (15, 15, 15, 15), (1, 1)),
    "9x9_stride2_dilated": ((9, 9), (2, 3), (8, 9, 7, 8), (2, 1)),  # parts of it meet padding alone
    "1x11": ((1, 11), (1, 1), (5, 5, 0, 0), (1, 1)),
    "11x1": ((11, 1), (1, 1), (0, 0, 5, 5), (1, 1)),
    "2x4": ((2, 4), (1, 1), (1, 2, 0, 1), (1, 1)),  # even: no centre
    "3x3_stride5": ((3, 3), (5, 4), (1, 0, 0, 1), (1, 1)),  # pixels that no output reads: their dx is zero
    "3x3_overpadded": ((3, 3), (1, 1), (4, 5, 3, 6), (1, 1)),  # outputs that read padding alone
}
SHAPES = {name: shape for name, shape in cases.SHAPES.items() if name not in ("no_pixels", "no_channels")}
SHAPES |= {"tiles": (1, 19, 37, 141)}  # more than one band of rows and tile of columns
CASES = cases.pairwise(
    shape=list(SHAPES),
    geometry=list(GEOMETRIES),
    layout=harness.LAYOUTS,
    dtype=harness.DTYPES,
    multiplier=[1, 2, 3],
    bias=[True, False],
)
# In an image that no backend copies, and in none.
CASES += [dict(CASES[0], shape="odd", geometry="3x3_tf_same", layout="contiguous", dtype=torch.float32)]
CASES += [dict(CASES[0], shape="nothing", geometry="3x3_overpadded", layout="contiguous", dtype=torch.float32)]
SHAPES |= {"nothing": (0, 5, 0, 4)}
dense_layouts = pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)


def make(
    device,
    shape=(2, 13, 7, 9),
    layout="contiguous",
    dtype=torch.float32,
    kernel=(3, 3),
    multiplier=1,
    bias=True,
    seed=0,
):
    co = shape[1] * multiplier
    return {
        "x": harness.images(shape, layout, dtype, device, seed=3 * seed),
        "w": harness.normal(co, 1, *kernel, dtype=dtype, device=device, seed=3 * seed + 1),
        "b": harness.normal(co, dtype=dtype, device=device, seed=3 * seed + 2) if bias else None,
    }


def possible(case: dict) -> bool:
    """Whether the kernel fits, and torch in float64 can be the truth: over thousands of pixels its sums in float64 are
    ten times as far off as ours are, by an exact summation."""
    return fits(SHAPES[case["shape"]], GEOMETRIES[case["geometry"]]) and not (
        case["shape"] == "tiles" and case["dtype"] == torch.float64
    )


def skip_if_slow(backend, device, shape, kernel):
    """Triton's interpreter takes a millisecond per tap and program."""
    taps = torch.Size(kernel).numel()
    if backend == "triton" and device == "cpu" and taps * torch.Size(shape).numel() > 4_000:
        pytest.skip("too much for Triton's interpreter")


def for_kernels(kernels: str, device, shape=(2, 13, 7, 9)) -> tuple:
    """The shape, or a smaller one for Triton's interpreter, which takes a millisecond per tap and program."""
    return (3, 3, 5, 6) if kernels == "triton" and device == "cpu" else shape


def function(geometry="3x3", act="identity"):
    _, stride, padding, dilation = GEOMETRIES[geometry] if isinstance(geometry, str) else geometry
    return lambda x, w, b: depthwise_conv2d(x, w, b, stride, padding, dilation, act=act)


def reference_of(geometry="3x3", act="identity"):
    _, stride, padding, dilation = GEOMETRIES[geometry] if isinstance(geometry, str) else geometry
    code = _codes.ACTIVATIONS.index(act)
    return lambda x, w, b: reference(x, w, b, list(stride), list(padding), list(dilation), code)


def fits(shape, geometry) -> bool:
    return (0 not in shape[2:] or shape[0] == 0) and min(output_size(shape[2:], *geometry)) > 0


@pytest.mark.parametrize("case", [case for case in CASES if possible(case)], ids=cases.label)
def test_output_and_gradients_are_as_good_as_torch(device, backend, case):
    harness.skip_unless_runs(backend, device, "depthwise_conv2d", case["dtype"])
    geometry = case["geometry"]
    kernel = GEOMETRIES[geometry][0]
    skip_if_slow(backend, device, SHAPES[case["shape"]], kernel)
    harness.skip_copied_layouts(backend, device, case["layout"])
    harness.skip_strides_of_reference(backend, case["layout"])
    inputs = make(
        *(device, SHAPES[case["shape"]], case["layout"], case["dtype"], kernel, case["multiplier"], case["bias"])
    )
    harness.assert_op_as_good_as_torch(function(geometry), reference_of(geometry), inputs, geometry)


@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@dense_layouts
def test_every_geometry_in_both_layouts(device, kernels, geometry, layout, dtype):
    skip_if_slow(kernels, device, (2, 20, 15, 18), GEOMETRIES[geometry][0])
    kernel = GEOMETRIES[geometry][0]
    draws = harness.draws(lambda seed: make(device, (2, 20, 15, 18), layout, dtype, kernel, seed=seed), device, kernels)
    harness.assert_op_as_good_as_torch(function(geometry), reference_of(geometry), draws, geometry)


# Contiguous images, whose planes the CPU kernels transpose in groups, the last not full, or take one by one.
PLANES = {
    "few_pixels": (2, 37, 2, 5),  # less than the square that is transposed at a time
    "odd_planes": (2, 45, 7, 7),  # the last square overlaps the one before
    "bands": (1, 33, 67, 56),  # which share rows
    "one_vector": (2, 5, 9, 12),  # a part of one per row
    "narrow_bands": (1, 3, 70, 11),
    "rows": (1, 9, 7, 37),
    "bands_of_planes": (1, 2, 280, 480),
}


PLANE_GEOMETRIES = {
    name: GEOMETRIES[name]
    for name in ("3x3", "3x3_overpadded", "3x3_stride2", "5x5", "5x5_stride2", "7x7", "7x7_stride2")
}
PLANE_GEOMETRIES["3x3_lower"] = ((3, 3), (1, 1), (1, 1, 0, 2), (1, 1))
PLANE_GEOMETRIES["5x5_lower"] = ((5, 5), (1, 1), (2, 2, 1, 4), (1, 1))
PLANE_GEOMETRIES["5x5_stride2_less"] = ((5, 5), (2, 2), (2, 1, 2, 1), (1, 1))  # the last rows of x meet few taps


@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
@pytest.mark.parametrize("geometry", PLANE_GEOMETRIES)
@pytest.mark.parametrize("shape", PLANES)
def test_contiguous_planes_are_as_good_as_torch(device, kernels, shape, geometry, dtype):
    name, geometry = geometry, PLANE_GEOMETRIES[geometry]
    skip_if_slow(kernels, device, PLANES[shape], geometry[0])

    def draw(seed):
        return make(device, PLANES[shape], dtype=dtype, kernel=geometry[0], seed=seed)

    # A quarter of a million pixels show torch's typical error at once.
    draws = draw(0) if shape == "bands_of_planes" else harness.draws(draw, device, kernels)
    harness.assert_op_as_good_as_torch(function(geometry), reference_of(geometry), draws, name)


def pairs(low, high):
    return st.tuples(st.integers(low, high), st.integers(low, high))


@given(
    case=cases.strided(),
    geometry=st.tuples(pairs(1, 9), pairs(1, 4), st.tuples(*[st.integers(0, 5)] * 4), pairs(1, 3)),
    multiplier=st.integers(1, 3),
    dtype=st.sampled_from(harness.DTYPES[:3]),
)
def test_any_shape_strides_and_geometry(device, backend, case, geometry, multiplier, dtype):
    assume(case["shape"][1] > 0 and fits(case["shape"], geometry))
    skip_if_slow(backend, device, (10_000,), geometry[0])
    inputs = make(device, case["shape"], dtype=dtype, kernel=geometry[0], multiplier=multiplier)
    inputs |= {"x": cases.strided_images(case, dtype, device)}
    harness.assert_op_as_good_as_torch(function(geometry), reference_of(geometry), inputs, "depthwise_conv2d")


def conv2d_info():
    """What torch's own tests know about conv2d."""
    pytest.importorskip("expecttest", reason="torch's own tests need expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    return next(op for op in op_db if op.name == "nn.functional.conv2d")


def depthwise_samples(device, dtype):
    """The samples of torch's own test of conv2d that are depthwise, as arguments of depthwise_conv2d."""
    for sample in conv2d_info().sample_inputs(device, dtype):
        x, (weight, bias) = sample.input, (*sample.args, None)[:2]
        options = dict(sample.kwargs)
        groups = options.pop("groups", 1)
        if groups == x.shape[-3] and weight.shape[1] == 1 and groups:
            yield x, weight, options.pop("bias", bias), options


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_depthwise_samples_of_torchs_own_tests(device, backend, dtype):
    count = 0
    for x, weight, bias, options in depthwise_samples(device, dtype):
        count += 1
        inputs = {"x": x.detach(), "w": weight.detach(), "b": None if bias is None else bias.detach()}
        harness.assert_op_as_good_as_torch(
            lambda x, w, b, options=options: depthwise_conv2d(x, w, b, **options),
            lambda x, w, b, options=options: F.conv2d(x, w, b, groups=x.shape[-3], **options),
            inputs,
            str(options),
        )
    assert count > 0


def test_errors_of_torchs_own_tests_are_errors():
    for error in conv2d_info().error_inputs("cpu"):
        options = {name: value for name, value in error.sample_input.kwargs.items() if name != "groups"}
        with pytest.raises((ValueError, TypeError), match="depthwise_conv2d: "):
            depthwise_conv2d(error.sample_input.input, *error.sample_input.args, **options)


@pytest.mark.parametrize("act", _codes.INPUT_ACTIVATIONS)
@pytest.mark.parametrize("shape", [(2, 20, 7, 9), (2, 75, 2, 3)])
@dense_layouts
def test_activation_with_and_without_gradients(device, backend, act, shape, layout):
    inputs = make(device, shape, layout)
    harness.assert_op_as_good_as_torch(function(act=act), reference_of(act=act), inputs, act)
    every = [name for name, value in inputs.items() if value is not None]
    harness.assert_op_as_good_as_torch(function(act=act), reference_of(act=act), inputs, act, frozen=every)


@dense_layouts
@pytest.mark.parametrize("geometry", ["3x3_tf_same", "2x4", "3x3_stride3_dilated"])
def test_gradients_are_derivatives(device, backend, layout, geometry):
    harness.skip_unless_runs(backend, device, "depthwise_conv2d", torch.float64)
    inputs = make(device, (2, 3, 4, 5), layout, torch.float64, GEOMETRIES[geometry][0], multiplier=2)
    properties.assert_gradients_are_derivatives(function(geometry), inputs)


@dense_layouts
def test_operators_agree_with_schema_and_fake(device, kernels, layout):
    harness.skip_all_but_channels_last(kernels, device, layout)
    x, w, b = make(device, layout=layout, dtype=torch.bfloat16, multiplier=2).values()
    geometry = [2, 1], [0, 1, 1, 1], [1, 2]
    for bias, act in ((b, 0), (None, 2)):
        properties.assert_opcheck(IMPLS[kernels].forward, x, w, bias, *geometry, act)
    dy = torch.ones_like(IMPLS[kernels].forward(x, w, b, *geometry, 0))
    for need in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        properties.assert_opcheck(BACKWARD_IMPLS[kernels].forward, dy, x, w, *geometry, *need)


@dense_layouts
def test_compiles_as_one_graph_and_once(device, backend, layout):
    properties.assert_compiles(function(), make(device, layout=layout, dtype=torch.bfloat16))


def test_options_that_change_between_compiled_calls_stay_in_one_graph(device):
    """From the second call on torch.compile holds symbols for them."""
    torch._dynamo.reset()
    compiled = torch.compile(depthwise_conv2d, fullgraph=True, backend="aot_eager")
    inputs = make(device)
    for stride, padding, dilation in ((1, 1, 1), (2, 0, 2)):
        arguments = (*inputs.values(), stride, padding, dilation)
        assert torch.equal(compiled(*arguments), depthwise_conv2d(*arguments))


def test_keeps_only_its_inputs_for_backward(device, kernels):
    for layout in harness.DENSE_LAYOUTS:
        leaves = [t.requires_grad_() for t in make(device, layout=layout, dtype=torch.bfloat16).values()]
        assert harness.extra_saved_bytes(function(), *leaves) == 0


@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
@pytest.mark.parametrize("layout", harness.LAYOUTS)
def test_repeats_bitwise_and_writes_every_element(device, backend, layout, dtype):
    harness.skip_all_but_dense_layouts(backend, device, layout)
    inputs = make(device, for_kernels(backend, device), layout, dtype)
    properties.assert_repeats_bitwise(function(), inputs)
    properties.assert_writes_every_element(function("3x3_tf_same"), inputs)


@dense_layouts
def test_images_do_not_mix(device, kernels, layout):
    shape = for_kernels(kernels, device, (3, 13, 17, 19))
    properties.assert_images_do_not_mix(function("3x3"), make(device, shape, layout), ("x",))


@dense_layouts
@pytest.mark.parametrize("shape", [(5, 24, 33, 31), (1, 8, 150, 40)])
def test_threads_change_nothing(device, kernels, layout, shape):
    if kernels != "cpu":
        pytest.skip("only the CPU kernels run on threads")
    properties.assert_threads_change_nothing(function(), make(device, shape, layout))


# Enough work for units of whole pixels, which some CPUs take over more than 128 channels, and at most 2048 of them; and
# channels by which pixels share sets of a cache, so that some CPUs copy them.
@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
@pytest.mark.parametrize("geometry", ["3x3", "3x3_stride2", "3x3_tf_same", "5x5", "5x5_stride2"])
@pytest.mark.parametrize(
    "shape", [(16, 136, 6, 9), (2, 203, 40, 7), (16, 2072, 3, 4), (1, 160, 70, 33), (2, 2048, 9, 5)]
)
def test_pixels_of_many_channels(device, kernels, shape, geometry, dtype):
    if kernels != "cpu":
        pytest.skip("only the CPU kernels take whole pixels")
    inputs = make(device, shape, "channels_last", dtype, GEOMETRIES[geometry][0])
    harness.assert_op_as_good_as_torch(function(geometry), reference_of(geometry), inputs, geometry)
    properties.assert_frozen_inputs_change_nothing(function(geometry), inputs)


# Images of at most 16 pixels, whose products the CPU kernels list and walk for several images at once; sums are of at
# most 16 groups of images. The last of 75 channels fill no whole vector.
@pytest.mark.parametrize("dtype", harness.DTYPES)
@pytest.mark.parametrize("pixels", [(1, 1), (2, 2), (3, 3), (2, 7), (5, 1), (1, 16), (4, 4)])
@dense_layouts
def test_images_of_a_few_pixels(device, kernels, layout, pixels, dtype):
    if kernels != "cpu":
        pytest.skip("only the CPU kernels list products")
    harness.skip_unless_runs(kernels, device, "depthwise_conv2d", dtype)
    for geometry in ("3x3", "3x3_stride2", "3x3_tf_same", "5x5", "5x5_stride2", "2x4", "9x9_stride2_dilated"):
        if not fits((1, 1, *pixels), GEOMETRIES[geometry]):
            continue
        kernel = GEOMETRIES[geometry][0]
        draws = [make(device, (75, 75, *pixels), layout, dtype, kernel, seed=seed) for seed in range(2)]
        harness.assert_op_as_good_as_torch(function(geometry), reference_of(geometry), draws, geometry)


@dense_layouts
@pytest.mark.parametrize("pixels", [(1, 1), (2, 2), (3, 4)])
def test_threads_images_and_padding_of_a_few_pixels(device, kernels, layout, pixels):
    if kernels != "cpu":
        pytest.skip("only the CPU kernels list products")
    inputs = make(device, (67, 75, *pixels), layout)
    properties.assert_threads_change_nothing(function(), inputs)
    properties.assert_images_do_not_mix(function(), inputs, ("x",))
    properties.assert_frozen_inputs_change_nothing(function(), inputs)
    properties.assert_repeats_bitwise(function(), inputs)
    properties.assert_writes_every_element(function("3x3_overpadded"), inputs)


@dense_layouts
def test_a_few_pixels_of_tall_strides(device, kernels, layout):
    """Rows of y that are far from each other in x are no bands of their own."""
    if kernels != "cpu":
        pytest.skip("only the CPU kernels list products")
    geometry = ((3, 3), (1000, 1), (1, 1, 8000, 8000), (1, 1))  # padding is left, right, top, bottom
    draws = [make(device, (3, 75, 1, 1), layout, kernel=(3, 3), seed=seed) for seed in range(2)]
    harness.assert_op_as_good_as_torch(function(geometry), reference_of(geometry), draws, "tall")


@pytest.mark.parametrize(
    ("pixels", "padding", "isa", "chosen"),
    [
        ((2, 2), 1, "avx2", True),
        ((2, 2), 1, "avx512", False),
        ((40, 3), 1, "avx2", False),
        ((2, 2), 7, "avx2", False),  # y has more pixels
    ],
)
def test_stock_never_takes_planes_of_a_few_pixels_with_avx2(pixels, padding, isa, chosen, monkeypatch):
    monkeypatch.setitem(_extension.BUILD_INFO, "isa_active", isa)
    x, weight = torch.empty(128, 480, *pixels), torch.empty(480, 1, 3, 3)
    for impls in (IMPLS, BACKWARD_IMPLS):
        assert (impls["cpu"].slower(x, weight, padding=(padding,) * 4) is None) == chosen


@dense_layouts
def test_frozen_inputs_change_nothing(device, kernels, layout):
    properties.assert_frozen_inputs_change_nothing(function(), make(device, for_kernels(kernels, device), layout))


@pytest.mark.parametrize("layout", harness.LAYOUTS)
def test_any_incoming_gradient(device, kernels, layout):
    harness.skip_all_but_dense_layouts(kernels, device, layout)
    properties.assert_takes_any_incoming_gradient(function(), make(device, for_kernels(kernels, device), layout))


def test_second_derivative_is_refused(device, kernels):
    properties.assert_second_derivative_is_refused(function(), make(device))


NOT_FINITE = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize(
    ("width", "row", "column"), [(20, 3, 4), (20, 3, -2), (20, 3, -1), (7, 0, 0), (7, 3, -1), (7, -1, -1)]
)
@dense_layouts
def test_nan_and_infinity_spread_as_in_torch(device, kernels, value, width, row, column, layout):
    if harness.interpreted(kernels, device) and width == 20 and column < 0:
        pytest.skip("on the interpreter's smaller image the same pixels as of other cases")
    shape, geometries = for_kernels(kernels, device, (2, 13, 11, width)), ("3x3", "3x3_stride2", "3x3_dilated")
    if harness.interpreted(kernels, device):
        geometries = geometries[NOT_FINITE.index(value) :][:1]  # one kernel for all
    else:
        geometries += ("5x5", "5x5_stride2", "7x7", "13x13")
    for geometry in geometries:
        inputs = make(device, shape, layout, kernel=GEOMETRIES[geometry][0])
        inputs["x"][1, 2, row, column] = value
        harness.assert_op_as_good_as_torch(function(geometry), reference_of(geometry), inputs, geometry)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_for_torchs_convolution(device, backend, dtype):
    for x_dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        inputs = make(device, dtype=x_dtype)
        with torch.autocast(device, dtype=dtype):
            if x_dtype == torch.float64 and harness.why_not(backend, device, "depthwise_conv2d", x_dtype):
                continue
            y = depthwise_conv2d(*inputs.values(), padding=1)
            stock = F.conv2d(*inputs.values(), padding=1, groups=13)
        assert y.dtype == stock.dtype


@pytest.mark.parametrize(
    ("padding", "stride", "sides"),
    [("same", 1, (1, 2, 2, 3)), ("valid", 2, (0, 0, 0, 0)), (1, 2, (1, 1, 1, 1)), ((2, 1), 1, (1, 1, 2, 2))],
)
def test_paddings_by_name_and_number(device, backend, padding, stride, sides):
    x, w, b = make(device, kernel=(6, 4)).values()
    named = depthwise_conv2d(x, w, b, stride, padding)
    assert torch.equal(named, depthwise_conv2d(x, w, b, stride, sides))
    assert named.shape == F.conv2d(x, w, b, stride, padding, groups=13).shape


def test_one_image_without_batch(device, backend):
    x, w, b = make(device, (1, 13, 7, 9)).values()
    assert torch.equal(depthwise_conv2d(x[0], w, b, padding=1), depthwise_conv2d(x, w, b, padding=1)[0])


# 8 MiB and more go past the caches: contiguous images where the last group of channels is not full, and channels_last
# ones whose pixels end amid a cache line.
@pytest.mark.parametrize(
    ("shape", "memory_format", "stride"),
    [
        ((5, 80, 112, 112), torch.contiguous_format, 1),
        ((5, 80, 103, 107), torch.contiguous_format, 1),  # planes that begin amid a cache line
        ((5, 5, 420, 401), torch.contiguous_format, 1),  # planes in bands
        ((5, 103, 103, 163), torch.contiguous_format, 2),
        ((5, 72, 109, 113), torch.channels_last, 1),
        ((5, 72, 109, 113), torch.channels_last, 2),
        ((3, 344, 66, 65), torch.channels_last, 1),
        ((5, 176, 81, 83), torch.channels_last, 1),  # whole cache lines, parts that begin amid one
        ((5, 176, 81, 83), torch.channels_last, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_images_are_written_as_small_ones(dtype, kernel, shape, memory_format, stride):
    x, w = torch.randn(shape).to(dtype, memory_format=memory_format), torch.randn(shape[1], 1, kernel, kernel).to(dtype)
    assert x.nbytes >= 8 << 20
    dy = torch.randn_like(F.conv2d(x[:, :1], w[:1], None, stride, kernel // 2).expand(-1, shape[1], -1, -1))
    dy = dy.contiguous(memory_format=memory_format)

    def results(x, dy):
        x = x.detach().requires_grad_()
        with backends.use_backend("cpu"):
            y = depthwise_conv2d(x, w, None, stride, padding=kernel // 2)
        return y.detach(), *torch.autograd.grad(y, x, dy)

    for whole, *parts in zip(results(x, dy), *(results(x[i : i + 1], dy[i : i + 1]) for i in range(shape[0]))):
        assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "x must be a Tensor, got list"),
        ({"x": torch.ones(2, 4)}, ValueError, r"x must have shape \[N, C, H, W\], got \[2, 4\]"),
        ({"x": torch.ones(2, 3, 4, 4).int()}, TypeError, r"x must be float32, .* got torch.int32"),
        (
            {"weight": torch.ones(4, 1, 3, 3)},
            ValueError,
            r"weight must have shape \[3 \* m, 1, kh, kw\] .* \[4, 1, 3, 3\]",
        ),
        ({"weight": torch.ones(3, 3, 3, 3)}, ValueError, r"weight must have shape \[3 \* m, 1, kh, kw\]"),
        ({"weight": torch.ones(3, 1, 3, 3).half()}, TypeError, r"weight must have the dtype of x .* got torch.float16"),
        ({"weight": torch.ones(3, 1, 3, 3, device="meta")}, RuntimeError, "weight is on meta, but x is on cpu"),
        ({"bias": torch.ones(4)}, ValueError, r"bias must have shape \[3\] or be None, got \[4\]"),
        ({"groups": 6}, ValueError, r"x must have 6 channels, got shape \[2, 3, 4, 4\]"),
        ({"stride": 0}, ValueError, "stride must be an int or a pair of ints >= 1, got 0"),
        ({"stride": (1, 2, 3)}, ValueError, r"stride must be .* got \(1, 2, 3\)"),
        ({"dilation": (1, 0)}, ValueError, r"dilation must be .* got \(1, 0\)"),
        ({"padding": -1}, ValueError, "padding must be .* >= 0, got -1"),
        ({"padding": (0, 0, -1, 0)}, ValueError, "padding must not be negative"),
        ({"padding": "full"}, ValueError, "padding must be 'same', 'valid' or numbers, got 'full'"),
        ({"padding": "same", "stride": 2}, ValueError, "padding='same' needs stride 1"),
        (
            {"dilation": 2},
            ValueError,
            r"kernel \[3, 3\] with dilation \[2, 2\] does not fit into x of shape \[2, 3, 4, 4\]",
        ),
        ({"x": torch.ones(2, 3, 0, 4), "padding": 2}, ValueError, "does not fit into x of shape"),
        ({"act": "tanh"}, ValueError, "act must be one of identity, relu, .* got 'tanh'"),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    arguments = {"x": torch.ones(2, 3, 4, 4), "weight": torch.ones(3, 1, 3, 3)} | changes
    with pytest.raises(error, match=message):
        depthwise_conv2d(**arguments)


@pytest.mark.parametrize(
    ("stride", "dilation", "size", "message"),
    [
        ([0, 1], [1, 1], 8, "two strides, four paddings and two dilations expected"),
        ([1, 1], [1, -1], 8, "two strides, four paddings and two dilations expected"),
        ([2, 2], [1, 1], 2, "the kernel does not fit into the padded image"),
    ],
)
def test_the_operator_itself_refuses_what_has_no_output(stride, dilation, size, message):
    x, weight, options = torch.ones(1, 4, size, size), torch.ones(4, 1, 3, 3), ([0, 0, 0, 0], dilation, 0)
    with backends.use_backend("cpu"), pytest.raises(RuntimeError, match=message):
        torch.ops.fusedtrain.depthwise_conv2d(x, weight, None, stride, *options)


def test_explain_knows_both_directions():
    inputs = make("cpu")
    geometry = [1, 1], [1, 1, 1, 1], [1, 1]
    for op in ("depthwise_conv2d", "depthwise_conv2d_backward"):
        assert op in backends.explain(op, *inputs.values(), *geometry)


@pytest.mark.parametrize("layout", harness.LAYOUTS)
@pytest.mark.parametrize("dtype", harness.DTYPES)
def test_automatic_choice_is_as_good_as_torch_where_directions_differ(device, layout, dtype, monkeypatch):
    monkeypatch.setattr(OP, "_SMALL", 0)  # they are alike for small images
    for geometry in ("3x3", "5x5_stride2", "7x7", "3x3_dilated"):
        inputs = make(device, (2, 20, 9, 10), layout, dtype, GEOMETRIES[geometry][0])
        harness.assert_op_as_good_as_torch(function(geometry), reference_of(geometry), inputs, geometry)


def test_what_the_rules_chose_is_remembered_for_the_same_call_alone(monkeypatch):
    if harness.why_not("cpu", "cpu", "depthwise_conv2d"):
        pytest.skip("without the compiled kernels stock PyTorch is all there is")
    monkeypatch.setattr(OP, "_SMALL", 0)
    rules = {"contiguous": "cpu", "channels_last": "reference"}
    monkeypatch.setattr(OP, "_STOCK_FASTER_ON", {})
    for layout in rules:
        where = OP._ALWAYS if rules[layout] == "reference" else OP._NEVER
        monkeypatch.setitem(OP._STOCK_FASTER["forward"], (layout, torch.float32, 1), {3: where})
    for _ in range(2):
        for layout, name in rules.items():
            x, weight, bias = make("cpu", (2, 20, 9, 10), layout).values()
            forward, backward = OP.choose(x, weight, bias, [1, 1], [1, 1, 1, 1], [1, 1])
            assert forward is IMPLS[name].forward and backward is BACKWARD_IMPLS["cpu"].forward
            with backends.use_backend("reference"):
                forced = OP.choose(x, weight, bias, [1, 1], [1, 1, 1, 1], [1, 1])
            assert forced == (IMPLS["reference"].forward, BACKWARD_IMPLS["reference"].forward)
    assert len(_remembered._chosen) == 2
    wide = torch.zeros(20, 1, 5, 3)  # larger than what the table has
    assert OP.choose(x, wide, None, [1, 1], [1, 1, 2, 2], [1, 1])[0] is IMPLS["cpu"].forward
    assert len(_remembered._chosen) == 3


def test_what_the_rules_chose_for_traced_calls_is_not_remembered():
    """Sizes are tensors there, and vmap's images have no memory format."""
    if harness.why_not("cpu", "cpu", "depthwise_conv2d"):
        pytest.skip("without the compiled kernels stock PyTorch is all there is")
    images = make("cpu", (2, 20, 9, 10), "channels_last")
    with torch.no_grad():
        torch.jit.trace(lambda x: depthwise_conv2d(x, images["w"], padding=1), images["x"], check_trace=False)
        torch.vmap(lambda x: depthwise_conv2d(x, images["w"], padding=1))(images["x"][:, None])
    assert not _remembered._chosen


@pytest.mark.parametrize(
    ("shape", "kernel", "multiplier", "dtype"),
    [
        ((1, 16, 33, 33), (31, 31), 1, torch.bfloat16),  # stock does not return
        ((2, 8, 12, 12), (3, 3), 2, torch.float32),  # stock corrupts the heap in backward
    ],
)
def test_automatic_choice_avoids_stock_where_it_fails(shape, kernel, multiplier, dtype):
    if harness.why_not("cpu", "cpu", "depthwise_conv2d"):
        pytest.skip("without the compiled kernels stock PyTorch is all there is")
    inputs = make("cpu", shape, "channels_last", dtype, kernel, multiplier).values()
    assert backends.select("depthwise_conv2d", IMPLS, *inputs) is IMPLS["cpu"]
    assert backends.select("depthwise_conv2d_backward", BACKWARD_IMPLS, *inputs) is BACKWARD_IMPLS["cpu"]


@pytest.mark.parametrize(
    ("isa", "direction", "dtype", "stride", "channels", "stock"),
    [
        ("amx_bf16", "forward", torch.bfloat16, 2, 64, False),
        ("amx_bf16", "forward", torch.bfloat16, 1, 64, True),
        ("amx_bf16", "forward", torch.float32, 1, 64, False),
        ("avx512_bf16", "forward", torch.bfloat16, 2, 64, True),
        ("avx512_bf16 zen4", "forward", torch.bfloat16, 2, 64, False),
        ("avx512_bf16 zen4", "forward", torch.float32, 2, 64, False),
        ("avx512_bf16 zen5", "forward", torch.float32, 2, 64, False),
        ("avx512_bf16 zen5", "forward", torch.bfloat16, 2, 64, False),
        ("avx512_bf16 zen5", "forward", torch.bfloat16, 2, 72, True),  # pixels that are no whole lines
        ("avx512 zen5", "forward", torch.bfloat16, 2, 72, False),
        ("avx512", "forward", torch.bfloat16, 2, 64, False),  # oneDNN has no instructions for bfloat16 either
        ("avx512", "forward", torch.bfloat16, 1, 72, False),
        ("avx512_bf16", "forward", torch.bfloat16, 1, 72, True),
        ("avx2", "forward", torch.bfloat16, 2, 64, False),
        ("avx512", "forward", torch.float32, 2, 64, False),
        ("avx512", "forward", torch.float32, 2, 899, False),
        ("avx512", "forward", torch.float32, 2, 900, True),
        ("amx_bf16", "forward", torch.float32, 2, 64, False),
        ("avx2", "forward", torch.float32, 2, 64, False),
        ("avx512_bf16", "backward", torch.bfloat16, 2, 64, False),
    ],
)
def test_what_was_measured_slower_goes_to_stock(isa, direction, dtype, stride, channels, stock, monkeypatch):
    if harness.why_not("cpu", "cpu", "depthwise_conv2d"):
        pytest.skip("without the compiled kernels stock PyTorch is all there is")
    isa, _, zen = isa.partition(" zen")
    cpu = {"isa_active": isa, "cpu_vendor": "amd" if zen else "intel", "cpu_family": {"4": 25, "5": 26}.get(zen, 6)}
    for key, value in cpu.items():
        monkeypatch.setitem(_extension.BUILD_INFO, key, value)
    x, weight, *_ = make("cpu", (2, channels, 56, 56), "channels_last", dtype, (5, 5)).values()
    impls = IMPLS if direction == "forward" else BACKWARD_IMPLS
    name = "depthwise_conv2d" if direction == "forward" else "depthwise_conv2d_backward"
    chosen = backends.select(name, impls, x, weight, None, [stride, stride], [2, 2, 2, 2], [1, 1])
    assert chosen is impls["reference" if stock else "cpu"]


@pytest.mark.parametrize(
    ("dtype", "kernel", "stride", "columns", "mib", "stock"),  # columns of y, MiB of x
    [
        (torch.float32, 3, 2, 56, 1, True),
        (torch.float32, 3, 2, 55, 1, False),
        (torch.float32, 5, 2, 32, 1, True),
        (torch.float32, 5, 2, 31, 1, False),
        (torch.float32, 7, 1, 56, 1, True),
        (torch.float32, 7, 1, 55, 1, False),
        (torch.bfloat16, 3, 1, 64, 24, True),
        (torch.bfloat16, 3, 1, 64, 26, False),
        (torch.bfloat16, 5, 1, 64, 9, True),
        (torch.bfloat16, 5, 1, 64, 11, False),
    ],
)
def test_large_rows_go_to_stock_on_intel_with_tiles(dtype, kernel, stride, columns, mib, stock, monkeypatch):
    if harness.why_not("cpu", "cpu", "depthwise_conv2d"):
        pytest.skip("without the compiled kernels stock PyTorch is all there is")
    for key, value in (("isa_active", "amx_bf16"), ("cpu_vendor", "intel"), ("cpu_family", 6)):
        monkeypatch.setitem(_extension.BUILD_INFO, key, value)
    rows = mib * 2**20 // (64 * columns * stride * dtype.itemsize) + (mib > 1)
    x = torch.empty(1, 64, rows, columns * stride, dtype=dtype).to(memory_format=torch.channels_last)
    weight, padding = torch.empty(64, 1, kernel, kernel, dtype=dtype), [kernel // 2] * 4
    chosen = backends.select("depthwise_conv2d", IMPLS, x, weight, None, [stride] * 2, padding, [1, 1])
    assert chosen is IMPLS["reference" if stock else "cpu"]


@pytest.mark.parametrize(("isa", "name"), [("avx512_bf16", "reference"), ("avx512", "cpu"), ("avx2", "cpu")])
def test_bfloat16_of_few_channels_goes_to_stock_where_it_has_instructions(isa, name, monkeypatch):
    if harness.why_not("cpu", "cpu", "depthwise_conv2d"):
        pytest.skip("without the compiled kernels stock PyTorch is all there is")
    monkeypatch.setitem(_extension.BUILD_INFO, "isa_active", isa)
    inputs = make("cpu", (4, 24, 56, 56), "channels_last", torch.bfloat16).values()
    for op, impls in (("depthwise_conv2d", IMPLS), ("depthwise_conv2d_backward", BACKWARD_IMPLS)):
        assert backends.select(op, impls, *inputs, [1, 1], [1, 1, 1, 1], [1, 1]) is impls[name]


@harness.needs_memory(16)
@dense_layouts
def test_more_than_2_to_the_31_elements(device, kernels, layout):
    weight = harness.normal(64, 1, 3, 3, dtype=torch.bfloat16, device=device)
    properties.assert_last_image_is_as_alone(lambda x: depthwise_conv2d(x, weight, padding=1), kernels, device, layout)


# --- layers -----------------------------------------------------------------------------------------------------------

LAYERS = [
    dict(kernel_size=3, padding=1),
    dict(kernel_size=5, stride=2, padding=2, bias=False),
    dict(kernel_size=(3, 5), padding="same", dilation=2),
    dict(kernel_size=3, padding=2, padding_mode="reflect"),
    dict(kernel_size=3, padding=(1, 2), padding_mode="replicate"),
    dict(kernel_size=3, padding="same", padding_mode="circular"),
]


@pytest.mark.parametrize("multiplier", [1, 2])
@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_layer_is_a_conv2d(device, backend, options, multiplier):
    if backend == "triton" and device == "cpu":
        pytest.skip("the op's own tests run Triton's interpreter")
    torch.manual_seed(0)
    stock = nn.Conv2d(6, 6 * multiplier, groups=6, device=device, **options)
    torch.manual_seed(0)
    ours = DepthwiseConv2d(6, 6 * multiplier, device=device, **options)
    assert isinstance(ours, nn.Conv2d) and ours.extra_repr() == stock.extra_repr()
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), stock.state_dict().values(), strict=True))
    ours, stock = (layer.to(memory_format=torch.channels_last) for layer in (ours, stock))
    harness.assert_module_as_good_as_torch(ours, stock, harness.images((2, 6, 9, 8), "channels_last", device=device))


@pytest.mark.parametrize(
    "options", [dict(kernel_size=3, stride=2), dict(kernel_size=5, dilation=2), dict(kernel_size=4)]
)
@pytest.mark.parametrize("size", [(8, 9), (2, 3)])
def test_same_layer_is_timms(device, backend, zoo, options, size):
    if backend == "triton" and device == "cpu":
        pytest.skip("the op's own tests run Triton's interpreter")
    ours = DepthwiseConv2dSame(6, device=device, **options)
    stock = zoo.timm.layers.Conv2dSame(6, 6, groups=6, device=device, **options)
    stock.load_state_dict(ours.state_dict())
    harness.assert_module_as_good_as_torch(ours, stock, harness.images((2, 6, *size), device=device))


def test_the_separable_layer_is_as_good_as_the_stock_pair(device, backend):
    if backend == "triton" and device == "cpu":
        pytest.skip("the op's own tests run Triton's interpreter")
    ours = DepthwiseSeparableConv(6, 10, 3, 2, norm_layer=nn.BatchNorm2d, act_layer=nn.ReLU, device=device).to(device)
    stock = DepthwiseSeparableConv(6, 10, 3, 2, norm_layer=nn.BatchNorm2d, act_layer=nn.ReLU, device=device).to(device)
    stock.depthwise = nn.Conv2d(6, 6, 3, 2, 1, groups=6, device=device)
    stock.pointwise = nn.Conv2d(6, 10, 1, device=device)
    stock.load_state_dict(ours.state_dict())
    harness.assert_module_as_good_as_torch(ours, stock, harness.images((4, 6, 9, 9), device=device))
    assert {"depthwise.weight", "depthwise.bias", "pointwise.weight", "pointwise.bias"} <= set(ours.state_dict())


def test_layer_refuses_other_groups():
    with pytest.raises(ValueError, match=r"DepthwiseConv2d: groups must be in_channels \(6\), got 3"):
        DepthwiseConv2d(6, 6, 3, groups=3)


# Shape of x, kernel, stride, and whether stock PyTorch runs: forward and backward on CUDA kernels, both on Triton's.
ON_GPUS = [
    ("channels_last", (16, 96, 56, 56), torch.bfloat16, 3, 1, (False, False, True)),
    ("channels_last", (16, 92, 56, 56), torch.bfloat16, 3, 1, (True, True, True)),
    ("channels_last", (16, 92, 56, 56), torch.float32, 3, 1, (False, False, True)),
    ("channels_last", (16, 96, 56, 56), torch.float32, 3, 2, (True, False, True)),
    ("channels_last", (16, 96, 56, 56), torch.float32, 5, 2, (False, False, True)),
    ("channels_last", (4, 128, 56, 56), torch.bfloat16, 31, 1, (False, False, False)),
    ("contiguous", (16, 96, 56, 56), torch.bfloat16, 3, 1, (False, False, False)),
    ("contiguous", (16, 96, 14, 14), torch.bfloat16, 3, 1, (False, False, False)),
    ("contiguous", (16, 96, 56, 56), torch.float16, 5, 1, (False, False, True)),
    ("contiguous", (2, 96, 56, 600), torch.float16, 5, 1, (True, False, True)),
    ("contiguous", (16, 96, 56, 56), torch.float32, 5, 1, (False, False, True)),
    ("contiguous", (16, 96, 56, 56), torch.float32, 5, 2, (False, False, True)),
    ("contiguous", (16, 96, 56, 56), torch.float32, 7, 1, (False, False, True)),
]


@pytest.mark.parametrize(("layout", "shape", "dtype", "k", "stride", "stock"), ON_GPUS)
def test_what_was_measured_slower_on_a_gpu_goes_to_stock(layout, shape, dtype, k, stride, stock):
    memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    with FakeTensorMode():
        x = torch.empty(shape, device="cuda", dtype=dtype, memory_format=memory_format)
        weight = torch.empty(shape[1], 1, k, k, device="cuda", dtype=dtype)
        args = x, weight, None, (stride, stride), (k // 2,) * 4, (1, 1)
        tables = IMPLS, BACKWARD_IMPLS
        reasons = [table["cuda"].slower(*args) for table in tables]
        reasons += {table["triton"].slower(*args) for table in tables}
    assert tuple(reason is not None for reason in reasons) == stock, reasons

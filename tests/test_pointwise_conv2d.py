"""pointwise_conv2d: a 1x1 convolution; and its layer."""

import dataclasses
import itertools
import sys

import cases
import harness
import properties
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusedtrain
from fusedtrain import _extension
from fusedtrain import backend as backends
from fusedtrain.nn import PointwiseConv2d
from fusedtrain.ops import _common, pointwise_conv2d
from fusedtrain.ops.pointwise_conv2d import IMPLS, reference

STOCK_ON_GPUS = True  # see conftest.py

MODULE, RULES = (sys.modules[f"fusedtrain.ops.{name}"] for name in ("pointwise_conv2d", "_pointwise_rules"))
SHAPES = {name: shape for name, shape in cases.SHAPES.items() if name not in ("no_pixels", "no_channels")}
SHAPES |= {"many_pixels": (3, 24, 61, 67)}  # more than one block of pixels
CASES = cases.pairwise(
    shape=list(SHAPES),
    layout=harness.LAYOUTS,
    dtype=harness.DTYPES,
    out=[1, 6, 40, 130],
    stride=[(1, 1), (2, 2), (3, 1)],
    bias=[True, False],
)
# Torch in float64 is the truth: over thousands of pixels its sums are as far off as ours.
CASES = [case for case in CASES if (case["shape"], case["dtype"]) != ("many_pixels", torch.float64)]
dense_layouts = pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)


def make(device, shape=(2, 13, 7, 9), layout="channels_last", dtype=torch.float32, out=20, bias=True, seed=0) -> dict:
    return {
        "x": harness.images(shape, layout, dtype, device, seed=3 * seed),
        "w": harness.normal(out, shape[1], 1, 1, dtype=dtype, device=device, seed=3 * seed + 1),
        "b": harness.normal(out, dtype=dtype, device=device, seed=3 * seed + 2) if bias else None,
    }


def function(stride=1):
    return lambda x, w, b: pointwise_conv2d(x, w, b, stride)


def reference_of(stride=(1, 1)):
    return lambda x, w, b: reference(x, w, b, list(stride))


@pytest.mark.parametrize("case", CASES, ids=cases.label)
def test_output_and_gradients_are_as_good_as_torch(device, backend, case):
    harness.skip_strides_of_reference(backend, case["layout"])

    def draw(seed):
        return make(device, SHAPES[case["shape"]], case["layout"], case["dtype"], case["out"], case["bias"], seed)

    draws = harness.draws(draw, device, backend)
    harness.assert_op_as_good_as_torch(
        function(case["stride"]), reference_of(case["stride"]), draws, "pointwise_conv2d"
    )


@given(
    case=cases.strided(),
    out=st.integers(1, 70),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    dtype=st.sampled_from(harness.DTYPES[:3]),
)
def test_any_shape_and_strides(device, backend, case, out, stride, dtype):
    assume(case["shape"][1] > 0 and 0 not in case["shape"][2:])
    inputs = make(device, case["shape"], dtype=dtype, out=out)
    inputs |= {"x": cases.strided_images(case, dtype, device)}
    harness.assert_op_as_good_as_torch(function(stride), reference_of(stride), inputs, "pointwise_conv2d")


def test_a_weight_of_any_strides(device, backend):
    inputs = make(device)
    for order in ((1, 0, 2, 3), (0, 1, 2, 3)):
        weight = inputs["w"].permute(order).contiguous().permute(order)
        harness.assert_op_as_good_as_torch(function(), reference_of(), inputs | {"w": weight}, str(order))


@dense_layouts
def test_a_bias_of_any_strides(device, backend, layout):
    inputs = make(device, layout=layout)
    for bias in (inputs["b"].repeat_interleave(2)[::2], inputs["b"][:1].expand(20)):
        for stride in ((1, 1), (2, 2)):
            strided = inputs | {"b": bias}
            harness.assert_op_as_good_as_torch(function(stride), reference_of(stride), strided, str(stride))


@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
@pytest.mark.parametrize(
    ("shape", "out"),
    [
        *(((2, 16, 40, 40), 96), ((2, 96, 40, 40), 24), ((2, 480, 14, 14), 112), ((4, 672, 7, 7), 192)),
        *(((2, 8, 65, 64), 8), ((2, 256, 9, 9), 384)),  # the last with pixels whose channels share sets of L1
    ],
)
def test_layers_of_real_networks(device, backend, shape, out, dtype):
    for stride in ((1, 1), (2, 2)):
        draws = harness.draws(
            lambda seed: make(device, shape, "channels_last", dtype, out, False, seed), device, backend
        )
        harness.assert_op_as_good_as_torch(function(stride), reference_of(stride), draws, "pointwise_conv2d")


# --- the kernel, which the automatic choice takes on some CPUs only ---


KERNEL = torch.ops.fusedtrain.pointwise_conv2d
KERNEL_STATS = torch.ops.fusedtrain.pointwise_conv2d_stats


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def kernel_dtype(request):
    if reason := harness.why_not("cpu", "cpu", "pointwise_conv2d"):
        pytest.skip(reason)
    if request.param == torch.bfloat16 and not _extension.BUILD_INFO["isa_active"].endswith("_bf16"):
        pytest.skip("the kernel multiplies bfloat16 by instructions only")
    return request.param


def assert_kernel_is_as_good_as_torch(inputs: dict, stride=(1, 1)):
    stock = reference(*inputs.values(), list(stride))
    truth = reference(*(None if t is None else t.double() for t in inputs.values()), list(stride))
    ours = KERNEL(*inputs.values(), list(stride))
    assert ours.is_contiguous(memory_format=torch.channels_last)
    harness.assert_as_good_as_torch(ours, stock, truth, "y")


OUTS = [1, 16, 24, 40, 72, 130]  # vectors in panels of every width, whole and in part
KERNEL_CASES = cases.pairwise(
    shape=[(2, 13, 7, 9), (1, 1, 1, 1), (3, 16, 1, 5), (2, 33, 11, 10), (0, 4, 3, 3)],
    layout=harness.LAYOUTS,
    out=OUTS,
)


@pytest.mark.parametrize("case", KERNEL_CASES, ids=cases.label)
def test_kernel_is_as_good_as_torch(kernel_dtype, case):
    for stride in ((1, 1), (2, 2), (3, 1)):
        for bias in (True, False):
            assert_kernel_is_as_good_as_torch(make("cpu", dtype=kernel_dtype, bias=bias, **case), stride)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("shape", "out"),
    [
        *(((2, 480, 14, 14), 112), ((4, 672, 7, 7), 192), ((1, 1152, 7, 7), 320), ((1, 2048, 5, 5), 40)),  # chains
        *(((2, 16, 105, 105), 96), ((2, 8, 150, 150), 56)),  # past the caches; as large, but rows of incomplete lines
        ((3, 161, 9, 9), 50),  # chains of two lengths
    ],
)
def test_kernel_adds_long_sums_as_well_as_torch(kernel_dtype, shape, out, transposed):
    for seed in range(2):
        inputs = make("cpu", shape, "channels_last", kernel_dtype, out, seed=seed)
        if transposed:  # as for the gradient of x
            inputs["w"] = inputs["w"].transpose(0, 1).contiguous().transpose(0, 1)
        assert_kernel_is_as_good_as_torch(inputs)


KERNEL_ON_PLANES = torch.ops.fusedtrain.pointwise_conv2d_contiguous


def assert_kernel_on_planes_is_as_good_as_torch(inputs: dict):
    stock = reference(*inputs.values(), [1, 1])
    truth = reference(*(None if t is None else t.double() for t in inputs.values()), [1, 1])
    ours = KERNEL_ON_PLANES(*inputs.values())
    assert ours.is_contiguous()
    harness.assert_as_good_as_torch(ours, stock, truth, "y")


@pytest.mark.parametrize("out", [1, 5, 16, 24, 72, 130])
@pytest.mark.parametrize(
    "shape",
    [
        *((1, 1, 1, 1), (3, 16, 1, 5), (0, 4, 3, 3), (2, 4, 8, 8)),  # less than a vector, none, vectors alone
        *((2, 13, 7, 9), (5, 40, 7, 7), (70, 3, 7, 7)),  # pixels left over, of all images in one strip or in several
        *((1, 700, 16, 17), (2, 5, 40, 37)),  # several strips an image
    ],
)
def test_kernel_on_planes_is_as_good_as_torch(kernel_dtype, shape, out):
    for bias in (True, False):
        assert_kernel_on_planes_is_as_good_as_torch(make("cpu", shape, "contiguous", kernel_dtype, out, bias))


def test_kernel_on_planes_adds_long_sums_as_well_as_torch(kernel_dtype):
    for shape, out in (((1, 1152, 7, 7), 40), ((3, 161, 9, 9), 50), ((2, 8, 112, 112), 96)):  # the last past the caches
        for seed in range(2):
            inputs = make("cpu", shape, "contiguous", kernel_dtype, out, seed=seed)
            assert_kernel_on_planes_is_as_good_as_torch(inputs)
            turned = inputs["w"].transpose(0, 1).contiguous().transpose(0, 1)
            assert torch.equal(KERNEL_ON_PLANES(*inputs.values()), KERNEL_ON_PLANES(inputs["x"], turned, inputs["b"]))


def test_pixels_of_a_strip_do_not_mix(kernel_dtype):
    inputs = make("cpu", (6, 13, 7, 7), "contiguous", kernel_dtype)
    inputs["x"][2, 12, 6, 6] = float("nan")  # left over, beside the same pixel of the others
    y = KERNEL_ON_PLANES(*inputs.values())
    assert y[2, :, 6, 6].isnan().all() and y.isnan().sum() == y.shape[1]


@pytest.mark.parametrize(("shape", "out"), [((7, 40, 23, 21), 70), ((2, 90, 7, 7), 301), ((8, 300, 3, 5), 301)])
def test_kernel_on_planes_does_not_depend_on_threads(kernel_dtype, shape, out):
    inputs = make("cpu", shape, "contiguous", kernel_dtype, out).values()
    assert torch.equal(KERNEL_ON_PLANES(*inputs), with_more_threads(lambda: KERNEL_ON_PLANES(*inputs)))


@pytest.mark.parametrize("dtype", harness.DTYPES[:3])  # torch in float64 is the truth
@pytest.mark.parametrize(
    ("shape", "out"),
    [
        ((5, 40, 7, 7), 24),
        ((3, 9, 13, 11), 50),
        ((2, 70, 16, 16), 17),
        ((1, 17, 40, 41), 3),
        ((9, 5, 1, 3), 20),
        ((2, 600, 3, 3), 590),
    ],
)
def test_weight_gradient_reads_planes(shape, out, dtype):
    if reason := harness.why_not("cpu", "cpu", "pointwise_conv2d"):
        pytest.skip(reason)
    x = harness.images(shape, "contiguous", dtype)
    dy = harness.images((shape[0], out, *shape[2:]), "contiguous", dtype, seed=1)

    def gradient(dy, x):
        weight = torch.zeros(out, shape[1], 1, 1, dtype=x.dtype)
        return MODULE.reference_backward(dy, x, weight, [1, 1], [False, True, False])[1]

    truth, stock = gradient(dy.double(), x.double()), gradient(dy, x)
    for a in (dy, dy.contiguous(memory_format=torch.channels_last)):
        for b in (x, x.contiguous(memory_format=torch.channels_last)):
            ours = torch.ops.fusedtrain.pointwise_conv2d_dw(a, b, [1, 1])
            harness.assert_as_good_as_torch(ours, stock, truth, "dw")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_kernel_spreads_nan_and_infinity_as_torch(kernel_dtype, value):
    inputs = make("cpu", (2, 13, 7, 9), dtype=kernel_dtype)
    inputs["x"][1, 12, 4, 4] = value  # of the last channel, which has no second one
    assert_kernel_is_as_good_as_torch(inputs)


def with_more_threads(function):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 4)
    try:
        return function()
    finally:
        torch.set_num_threads(before)


# Of the second the threads share out y's channels too.
for_threads = pytest.mark.parametrize(("shape", "out"), [((3, 40, 23, 21), 70), ((2, 200, 9, 10), 301)])


@for_threads
@pytest.mark.parametrize("stride", [1, 2])
def test_kernel_does_not_depend_on_threads(kernel_dtype, shape, out, stride):
    inputs = (*make("cpu", shape, dtype=kernel_dtype, out=out).values(), [stride, stride])
    assert torch.equal(KERNEL(*inputs), with_more_threads(lambda: KERNEL(*inputs)))


def assert_moments_are_as_good_as_torch(draws: list[dict], strides=((1, 1),)):
    runs = [KERNEL_STATS(*draw.values(), list(stride)) for draw in draws for stride in strides]
    assert torch.equal(runs[0][0], KERNEL(*draws[0].values(), list(strides[0])))
    harness.assert_moments_as_good_as_torch(runs)


GATHERED = cases.pairwise(
    shape=[(2, 13, 7, 9), (3, 16, 1, 5), (2, 33, 11, 10), (1, 1200, 9, 9), (2, 3, 40, 37)],
    layout=harness.LAYOUTS,
    out=OUTS,
)


@pytest.mark.parametrize("case", GATHERED, ids=cases.label)
def test_kernel_gathers_mean_and_variance_as_well_as_torch(kernel_dtype, case):
    forms = [case | {"dtype": kernel_dtype, "bias": bias, "seed": seed} for bias in (True, False) for seed in range(4)]
    draws = [make("cpu", **form) for form in forms]
    assert_moments_are_as_good_as_torch(draws, ((1, 1), (2, 2)))


def test_kernel_gathers_them_where_results_are_written_past_the_caches(kernel_dtype):
    assert_moments_are_as_good_as_torch([make("cpu", (2, 16, 105, 105), dtype=kernel_dtype, out=96)])


def test_a_large_mean_hides_no_variance(kernel_dtype):
    draws = [make("cpu", (4, 24, 23, 21), dtype=kernel_dtype, out=40, seed=seed) for seed in range(2)]
    for draw in draws:
        draw["b"] += 1000
    assert_moments_are_as_good_as_torch(draws)


@for_threads
def test_mean_and_variance_do_not_depend_on_threads(kernel_dtype, shape, out):
    inputs = (*make("cpu", shape, dtype=kernel_dtype, out=out).values(), [1, 1])
    for few, many in zip(KERNEL_STATS(*inputs), with_more_threads(lambda: KERNEL_STATS(*inputs))):
        assert torch.equal(few, many)


def test_no_pixels_have_no_variance(kernel_dtype):
    y, mean, m2 = KERNEL_STATS(*make("cpu", (0, 13, 7, 9), dtype=kernel_dtype).values(), [1, 1])
    assert y.shape == (0, 20, 7, 9)
    assert not mean.any() and not m2.any() and mean.shape == m2.shape == (20,)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_reach_the_statistics(kernel_dtype, value):
    inputs = make("cpu", (2, 13, 7, 9), dtype=kernel_dtype)
    inputs["x"][1, 12, 4, 4] = value
    _, mean, m2 = KERNEL_STATS(*inputs.values(), [1, 1])
    assert not mean.isfinite().any() and m2.isnan().all()


def test_kernel_refuses_what_it_does_not_multiply():
    if reason := harness.why_not("cpu", "cpu", "pointwise_conv2d"):
        pytest.skip(reason)
    with pytest.raises(RuntimeError, match="float32 expected, or bfloat16 on a CPU that multiplies it"):
        KERNEL(*make("cpu", dtype=torch.float64).values(), [1, 1])
    with pytest.raises(RuntimeError, match=r"weight must have the shape \[D, C, 1, 1\]"):
        KERNEL(torch.ones(1, 3, 2, 2), torch.ones(4, 2, 1, 1), None, [1, 1])


@pytest.mark.parametrize(
    # 16 channels to 80, and back; 16 of 16; contiguous
    ("vendor", "family", "isa", "dtype", "forward", "dx", "few", "planes"),
    [
        ("amd", 25, "avx2", torch.float32, True, True, True, True),
        ("amd", 25, "avx512_bf16", torch.float32, True, True, True, True),
        ("amd", 25, "avx512_bf16", torch.bfloat16, False, True, True, True),
        ("amd", 26, "avx512_bf16", torch.bfloat16, False, True, False, True),
        ("amd", 25, "avx512", torch.bfloat16, False, False, False, False),
        ("amd", 26, "portable", torch.float32, False, False, False, False),
        ("intel", 6, "avx512", torch.float32, False, False, False, False),
    ],
)
def test_kernel_runs_where_it_was_measured_faster(vendor, family, isa, dtype, forward, dx, few, planes, monkeypatch):
    for name, value in (("vendor", vendor), ("family", family)):
        monkeypatch.setitem(_extension.BUILD_INFO, f"cpu_{name}", value)
    monkeypatch.setitem(_extension.BUILD_INFO, "isa_active", isa)
    x = harness.images((2, 16, 5, 5), "channels_last", dtype)
    dy = harness.images((2, 80, 5, 5), "channels_last", dtype)
    assert (RULES.by_kernel(x, 80), RULES.by_kernel(dy, 16), RULES.by_kernel(x, 16)) == (forward, dx, few)
    assert not RULES.by_kernel(dy.contiguous(), 16)
    wide, narrow, single = (torch.zeros(out, 16, 1, 1, dtype=dtype) for out in (80, 16, 1))
    assert (RULES.ways(("dx",), x, single, [1, 1]) == ["kernel"]) == planes  # dy of one channel is in both layouts
    for stride in ([1, 1], [2, 1]):
        unstrided = stride == [1, 1]
        runs = [[way == "kernel" for way in RULES.ways(("forward", "dx"), x, w, stride)] for w in (wide, narrow)]
        assert runs[0] == [forward, dx and unstrided] and runs[1][0] == few
        assert (RULES.ways(("forward",), x.contiguous(), wide, stride) == ["kernel"]) == (planes and unstrided)


@pytest.mark.parametrize(
    ("n", "c", "d", "size", "ways"),
    [
        (16, 24, 144, 8, ("kernel", "kernel", "kernel")),
        (16, 32, 16, 8, ("kernel", "stock", "stock")),
        (16, 240, 240, 8, ("kernel", "kernel", "product")),
        (16, 256, 1024, 8, ("kernel", "stock", "product")),
        (16, 1024, 256, 8, ("stock", "kernel", "product")),
        (16, 1024, 1024, 8, ("product", "product", "product")),
        (2, 80, 480, 14, ("kernel", "kernel", "stock")),
        (2, 80, 480, 32, ("kernel", "kernel", "kernel")),
        (2, 240, 1152, 7, ("stock", "kernel", "stock")),
    ],
)
def test_what_multiplies_on_amds_cpus_without_avx512(n, c, d, size, ways, monkeypatch):
    for name, value in (("cpu_vendor", "amd"), ("cpu_family", 25), ("isa_active", "avx2")):
        monkeypatch.setitem(_extension.BUILD_INFO, name, value)
    x, weight = torch.empty(n, size, size, c).permute(0, 3, 1, 2), torch.empty(d, c, 1, 1)
    assert tuple(RULES.ways(("forward", "dx", "dw"), x, weight, [1, 1])) == ways
    dw = "kernel" if c * d < 100_000 else "stock"
    assert RULES.ways(("forward", "dx", "dw"), x.contiguous(), weight, [1, 1]) == ["kernel", "kernel", dw]
    small = x.contiguous()[:, :, :4, :6]
    assert RULES.ways(("dw",), small.contiguous(), weight, [1, 1]) == ["kernel" if c * d < 4096 else "stock"]


@dense_layouts
@pytest.mark.parametrize("d", [190, 210])
def test_images_of_one_pixel_are_rows_of_a_product(d, layout, monkeypatch):
    for name, value in (("cpu_vendor", "amd"), ("cpu_family", 25), ("isa_active", "avx2")):
        monkeypatch.setitem(_extension.BUILD_INFO, name, value)
    inputs = make("cpu", (33, 200, 1, 1), layout, torch.float32, d)
    x, weight = inputs["x"], inputs["w"]
    assert RULES.slower(x, weight) is None and RULES.slower(x[:4], weight) is not None
    assert RULES.gains_in_small(x, weight) and not RULES.gains_in_small(x[:4], weight)  # what the layer asks
    assert RULES.ways(("forward", "dx", "dw"), x, weight, [1, 1]) == ["product"] * 3
    draws = [inputs, make("cpu", (33, 200, 1, 1), layout, torch.float32, d, seed=1)]
    harness.assert_op_as_good_as_torch(function(), reference_of(), draws, "pointwise_conv2d")


@pytest.mark.parametrize(
    ("family", "channels", "chosen"), [(25, 39, False), (25, 40, True), (26, 39, False), (26, 40, True)]
)
def test_many_channels_are_multiplied_in_bfloat16_on_zen(family, channels, chosen, monkeypatch):
    for name, value in (("cpu_vendor", "amd"), ("cpu_family", family), ("isa_active", "avx512_bf16")):
        monkeypatch.setitem(_extension.BUILD_INFO, name, value)
    x = harness.images((2, channels, 5, 5), "channels_last", torch.bfloat16)
    assert RULES.by_kernel(x, 240) == chosen


@dense_layouts
def test_gradients_are_derivatives(device, backend, layout):
    properties.assert_gradients_are_derivatives(function(2), make(device, (2, 3, 4, 5), layout, torch.float64, 4))


@pytest.mark.parametrize("dtype", harness.DTYPES)
def test_operators_agree_with_schema_and_fake(dtype):
    if reason := harness.why_not("cpu", "cpu", "pointwise_conv2d"):
        pytest.skip(reason)
    x = harness.images((2, 13, 7, 9), "channels_last", dtype)
    dy = harness.images((2, 20, 4, 9), "channels_last", dtype, seed=1)
    properties.assert_opcheck(torch.ops.fusedtrain.pointwise_conv2d_dw.default, dy, x, [2, 1])
    weight = harness.normal(20, 13, 1, 1, dtype=dtype)
    for image in (x, x.contiguous()):
        operator = torch.ops.fusedtrain.pointwise_conv2d_by_library.default
        properties.assert_opcheck(operator, image, weight, None, [2, 1])
        if dtype == torch.float32:
            properties.assert_opcheck(KERNEL_ON_PLANES.default, x.contiguous(), weight, None)
            properties.assert_opcheck(KERNEL.default, image, weight, None, [2, 1])
            properties.assert_opcheck(KERNEL_STATS.default, image, weight, None, [2, 1])


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [*((layout, torch.float32) for layout in harness.DENSE_LAYOUTS), *zip(harness.DENSE_LAYOUTS, harness.DTYPES[1:3])],
)
def test_compiles_as_one_graph_and_once(device, backend, layout, dtype):
    properties.assert_compiles(function(), make(device, layout=layout, dtype=dtype))


def test_keeps_only_its_inputs_for_backward(device, backend):
    for layout in harness.DENSE_LAYOUTS:
        leaves = [t.requires_grad_() for t in make(device, layout=layout, dtype=torch.bfloat16).values()]
        assert harness.extra_saved_bytes(function(), *leaves) == 0


@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
@pytest.mark.parametrize("layout", harness.LAYOUTS)
def test_repeats_bitwise_and_writes_every_element(device, backend, layout, dtype):
    properties.assert_repeats_bitwise(function(), make(device, layout=layout, dtype=dtype))
    properties.assert_writes_every_element(function(), make(device, layout=layout, dtype=dtype))


@pytest.mark.parametrize("shape", [(5, 24, 33, 31), (1, 96, 90, 40), (16, 200, 7, 7), (8, 1250, 7, 7)])
@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
def test_threads_do_not_change_the_weight_gradient(shape, dtype):
    if reason := harness.why_not("cpu", "cpu", "pointwise_conv2d"):
        pytest.skip(reason)
    x = harness.images(shape, "channels_last", dtype)
    dy = harness.images((shape[0], 40, *shape[2:]), "channels_last", dtype, seed=1)
    few = torch.ops.fusedtrain.pointwise_conv2d_dw(dy, x, [1, 1])
    assert torch.equal(few, with_more_threads(lambda: torch.ops.fusedtrain.pointwise_conv2d_dw(dy, x, [1, 1])))


def test_images_do_not_mix(device, backend):
    properties.assert_images_do_not_mix(function(), make(device, (3, 13, 17, 19)), ("x",))


@harness.needs_memory(21)
@dense_layouts
def test_more_than_2_to_the_31_elements(device, layout):
    if reason := harness.why_not("cpu", device, "pointwise_conv2d"):
        pytest.skip(reason)
    inputs = make(device, (3, 64, 64, 64), layout, torch.bfloat16, 64)
    inputs["x"][1] = 0
    with fusedtrain.use_backend("cpu"):
        calls = function(), lambda counts, x, w, b: reference(x, w, b, [1, 1])
        properties.assert_thousands_of_images_are_as_good_as_torch(*calls, inputs, "cpu", device)


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
        pytest.skip("stock PyTorch has one")
    properties.assert_second_derivative_is_refused(function(), make(device))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@dense_layouts
def test_nan_and_infinity_spread_as_in_torch(device, backend, value, layout):
    for stride in ((1, 1), (2, 2)):
        inputs = make(device, layout=layout)
        inputs["x"][1, 2, 4, 4] = value
        harness.assert_op_as_good_as_torch(function(stride), reference_of(stride), inputs, "pointwise_conv2d")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_for_torchs_convolution(device, backend, dtype):
    for x_dtype in harness.DTYPES:
        inputs = make(device, dtype=x_dtype)
        with torch.autocast(device, dtype=dtype):
            assert pointwise_conv2d(*inputs.values()).dtype == F.conv2d(*inputs.values()).dtype


def test_one_image_without_batch(device, backend):
    inputs = make(device, (1, 13, 7, 9))
    inputs["x"] = inputs["x"][0]
    harness.assert_op_as_good_as_torch(function(), reference_of(), inputs, "pointwise_conv2d")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "x must be a Tensor, got list"),
        ({"x": torch.ones(2, 4)}, ValueError, r"x must have shape \[N, C, H, W\], got \[2, 4\]"),
        ({"x": torch.ones(2, 3, 4, 4).int()}, TypeError, r"x must be float32, .* got torch.int32"),
        ({"weight": torch.ones(4, 2, 1, 1)}, ValueError, r"\[D, 3, 1, 1\], got \[4, 2, 1, 1\]"),
        ({"weight": torch.ones(4, 3, 3, 3)}, ValueError, r"\[D, 3, 1, 1\], got \[4, 3, 3, 3\]"),
        ({"weight": None}, ValueError, r"\[D, 3, 1, 1\], got NoneType"),
        ({"bias": torch.ones(3)}, ValueError, r"bias must have shape \[4\] or be None, got \[3\]"),
        ({"bias": 1}, ValueError, r"bias must have shape \[4\] or be None, got int"),
        ({"weight": torch.ones(4, 3, 1, 1).double()}, TypeError, r"dtype of x \(torch.float32\), got torch.float64"),
        ({"stride": 0}, ValueError, "stride must be an int or a pair of ints >= 1, got 0"),
        ({"weight": torch.ones(4, 3, 1, 1, device="meta")}, RuntimeError, "weight is on meta, but x is on cpu"),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    arguments = {"x": torch.ones(2, 3, 4, 4), "weight": torch.ones(4, 3, 1, 1), "bias": torch.ones(4)} | changes
    with pytest.raises(error, match=f"pointwise_conv2d: .*{message}"):
        pointwise_conv2d(**arguments)


@pytest.mark.parametrize("dtype", harness.DTYPES)
def test_automatic_choice_is_as_good_as_torch(device, dtype, monkeypatch):
    monkeypatch.setattr(RULES, "_SMALL", 0)
    for layout in harness.LAYOUTS:
        inputs = make(device, layout=layout, dtype=dtype)
        harness.assert_op_as_good_as_torch(function(), reference_of(), inputs, layout)


@pytest.mark.parametrize(("isa", "contiguous"), [("avx512", "cpu"), ("avx2", "cpu"), ("portable", "reference")])
def test_automatic_choice_leaves_small_images_to_stock_and_contiguous_ones_where_it_is_faster(
    isa, contiguous, monkeypatch
):
    if reason := harness.why_not("cpu", "cpu", "pointwise_conv2d"):
        pytest.skip(reason)
    monkeypatch.setitem(_extension.BUILD_INFO, "cpu_vendor", "amd")
    monkeypatch.setitem(_extension.BUILD_INFO, "isa_active", isa)
    for shape, layout, stride, name in (
        ((16, 32, 28, 28), "channels_last", [1, 1], "cpu"),
        ((16, 32, 28, 28), "contiguous", [1, 1], contiguous),
        ((16, 32, 28, 28), "contiguous", [2, 2], contiguous),  # whose pixels are read first
        ((1, 32, 28, 28), "contiguous", [2, 2], "reference"),
        ((1, 32, 7, 7), "channels_last", [1, 1], "reference"),
        ((1, 32, 7, 7), "contiguous", [1, 1], "reference"),
    ):
        inputs = make("cpu", shape, layout).values()
        assert backends.select("pointwise_conv2d", IMPLS, *inputs, stride) is IMPLS[name], (shape, layout, stride)


@pytest.mark.parametrize(
    ("isa", "out", "name"), [("avx2", 300, "cpu"), ("avx2", 20, "reference"), ("portable", 300, "reference")]
)
def test_small_images_of_which_the_kernel_makes_many_channels_are_not_left_to_stock(isa, out, name, monkeypatch):
    if reason := harness.why_not("cpu", "cpu", "pointwise_conv2d"):
        pytest.skip(reason)
    monkeypatch.setitem(_extension.BUILD_INFO, "cpu_vendor", "amd")
    monkeypatch.setitem(_extension.BUILD_INFO, "isa_active", isa)
    inputs = make("cpu", (16, 32, 7, 7), "channels_last", out=out)
    assert backends.select("pointwise_conv2d", IMPLS, *inputs.values()) is IMPLS[name]


@pytest.mark.parametrize(
    ("zen", "dtype", "c", "columns", "layout", "training", "name"),
    [
        (5, torch.float32, 116, 10, "channels_last", True, "cpu"),
        (4, torch.float32, 116, 10, "channels_last", True, "reference"),
        (5, torch.float32, 116, 10, "contiguous", False, "cpu"),
        (5, torch.float32, 116, 10, "sliced_channels_last", True, "cpu"),
        (5, torch.float32, 24, 10, "channels_last", True, "reference"),  # few products
        (5, torch.bfloat16, 16, 7, "channels_last", True, "cpu"),
        (4, torch.bfloat16, 16, 7, "channels_last", True, "reference"),
        (5, torch.bfloat16, 16, 7, "channels_last", False, "reference"),  # the kernel takes 40 channels and more
        (5, torch.bfloat16, 64, 7, "channels_last", False, "cpu"),
    ],
)
def test_small_images_on_zen5_are_not_left_to_stock(zen, dtype, c, columns, layout, training, name, monkeypatch):
    if reason := harness.why_not("cpu", "cpu", "pointwise_conv2d"):
        pytest.skip(reason)
    cpu = {"cpu_vendor": "amd", "isa_active": "avx512_bf16", "cpu_family": {4: 25, 5: 26}[zen]}
    for key, value in cpu.items():
        monkeypatch.setitem(_extension.BUILD_INFO, key, value)
    inputs = make("cpu", (4, c, columns, columns), layout, dtype, out=c)
    inputs["w"].requires_grad_(training)
    assert backends.select("pointwise_conv2d", IMPLS, *inputs.values()) is IMPLS[name]


@pytest.fixture
def no_instructions(monkeypatch):
    """The CPU as one that multiplies neither bfloat16 nor float16."""
    if reason := harness.why_not("cpu", "cpu", "pointwise_conv2d"):
        pytest.skip(reason)
    monkeypatch.setitem(_extension.BUILD_INFO, "isa_active", "avx2")
    monkeypatch.setattr(_common, "_CPU_MULTIPLIES_FLOAT16", False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("images", [1, 2, 8])
@dense_layouts
def test_what_the_cpu_does_not_multiply_runs_in_float32(no_instructions, dtype, images, layout, monkeypatch):
    # A chunk of `images` images; 3 are chosen automatically, although they are few and may be contiguous.
    monkeypatch.setattr(MODULE, "_CHUNK", images * (13 + 20) * 63 // torch.get_num_threads() + 20)
    for stride in ((1, 1), (2, 1)):
        inputs = make("cpu", (3, 13, 7, 9), layout, dtype)
        assert backends.select("pointwise_conv2d", IMPLS, *inputs.values()) is IMPLS["cpu"]
        harness.assert_op_as_good_as_torch(function(stride), reference_of(stride), inputs, "pointwise_conv2d")


@pytest.mark.parametrize(
    ("isa", "dtype", "layout", "c", "out", "columns", "stride", "converted"),
    [
        ("avx512", torch.bfloat16, "channels_last", 16, 32, 60, 1, False),
        ("avx512", torch.bfloat16, "channels_last", 16, 33, 60, 1, True),
        ("avx512", torch.bfloat16, "channels_last", 64, 58, 20, 1, False),  # fewer products
        ("avx512", torch.bfloat16, "channels_last", 64, 59, 20, 1, True),
        ("avx512", torch.bfloat16, "channels_last", 64, 58, 40, 2, False),
        ("avx512", torch.bfloat16, "contiguous", 16, 16, 40, 1, True),
        ("avx512", torch.float16, "channels_last", 16, 16, 40, 1, True),
        ("avx2", torch.bfloat16, "channels_last", 16, 16, 40, 1, True),
    ],
)
def test_bfloat16_of_few_channels_or_products_is_left_to_onednn(
    no_instructions, isa, dtype, layout, c, out, columns, stride, converted, monkeypatch
):
    def in_float32(*arguments):
        seen.append(True)
        return convert(*arguments)

    seen, convert = [], MODULE._in_float32
    monkeypatch.setitem(_extension.BUILD_INFO, "isa_active", isa)
    monkeypatch.setattr(MODULE, "_in_float32", in_float32)
    inputs, strides = make("cpu", (1, c, columns, columns), layout, dtype, out=out), (stride, stride)
    assert backends.select("pointwise_conv2d", IMPLS, *inputs.values()) is IMPLS["cpu"]
    harness.assert_op_as_good_as_torch(function(strides), reference_of(strides), inputs, "pointwise_conv2d")
    assert bool(seen) == converted


def test_what_runs_in_float32_does_so_under_autocast(no_instructions):
    class Dtypes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "convolution" in func.name() or "conv2d" in func.name():
                seen.add((func.name(), args[0].dtype))
            return func(*args, **kwargs or {})

    seen = set()
    inputs = make("cpu", (2, 13, 7, 9))
    with torch.autocast("cpu", torch.bfloat16):
        y = MODULE._in_float32(inputs["x"].bfloat16(), inputs["w"].bfloat16(), None, [1, 1])
        with Dtypes():
            again = MODULE._in_float32(inputs["x"].bfloat16(), inputs["w"].bfloat16(), None, [1, 1])
    assert y.dtype == torch.bfloat16 and torch.equal(y, again)
    assert seen and {dtype for _, dtype in seen} == {torch.float32}


def test_graphs_made_without_gradients_run_with_them(no_instructions):
    layer = PointwiseConv2d(32, 64, 1).bfloat16()
    x = harness.images((8, 32, 20, 20), "channels_last", torch.bfloat16)
    with torch.no_grad():
        exported, traced, y = torch.export.export(layer, (x,)).module(), torch.jit.trace(layer, x), layer(x)
    assert torch.equal(exported(x), y) and torch.equal(traced(x), y)


def test_what_the_cpu_multiplies_is_left_to_it(no_instructions, monkeypatch):
    monkeypatch.setitem(_extension.BUILD_INFO, "isa_active", "amx_bf16")
    monkeypatch.setattr(_common, "_CPU_MULTIPLIES_FLOAT16", True)
    monkeypatch.setattr(MODULE, "_in_float32", None)
    for dtype in (torch.bfloat16, torch.float16):
        inputs = make("cpu", (16, 32, 28, 28), dtype=dtype)
        harness.evaluate(function(), inputs)
        assert backends.select("pointwise_conv2d", IMPLS, *make("cpu", dtype=dtype).values()) is IMPLS["reference"]


@pytest.mark.parametrize(("isa", "images", "largest"), [("avx512", 8, 1 << 14), ("avx2", 8, 1 << 14)])
def test_large_weights_are_left_to_stock_on_intels_cpus(isa, images, largest, no_instructions, monkeypatch):
    if not RULES._HAS_LIBRARY[torch.float32]:
        pytest.skip("PyTorch was built without MKL")
    monkeypatch.setitem(_extension.BUILD_INFO, "isa_active", isa)
    x = harness.images((images, 128, 15, 15), "channels_last", torch.float32)
    for vendor, out, name in (
        ("intel", largest // 128, "cpu"),
        ("intel", largest // 128 + 1, "reference"),
        ("amd", largest // 128 + 1, "cpu"),
    ):
        monkeypatch.setitem(_extension.BUILD_INFO, "cpu_vendor", vendor)
        inputs = x, harness.normal(out, 128, 1, 1)
        assert backends.select("pointwise_conv2d", IMPLS, *inputs) is IMPLS[name], (vendor, out)


@pytest.mark.parametrize(
    ("isa", "images", "weights"),
    [("avx512", 2, 64), ("avx512", 16, 512), ("avx512", 16, 64), ("avx2", 2, 64), ("avx2", 16, 512), ("avx2", 16, 8)],
)
def test_either_library_gives_as_good_results_on_intels_cpus(isa, images, weights, no_instructions, monkeypatch):
    monkeypatch.setitem(_extension.BUILD_INFO, "isa_active", isa)
    monkeypatch.setitem(_extension.BUILD_INFO, "cpu_vendor", "intel")
    monkeypatch.setattr(RULES, "_SMALL", 0)
    for out, layout in itertools.product((weights, weights + 8), harness.DENSE_LAYOUTS):  # within and beyond the limits
        draws = [make("cpu", (images, 256, 10, 11), layout, out=out, seed=seed) for seed in range(2)]
        harness.assert_op_as_good_as_torch(function(), reference_of(), draws, "pointwise_conv2d")


@pytest.mark.parametrize(
    ("isa", "images", "shape", "parts"),
    [
        ("avx512", 16, (128, 144), {"y", "dx", "dw"}),
        ("avx512", 16, (144, 128), {"dx", "dw"}),  # y has fewer channels than x
        ("avx512", 16, (80, 256), {"dx", "dw"}),  # x has few
        ("avx512", 16, (24, 144), set()),  # a small weight: the kernel
        ("avx512", 16, (144, 24), {"dx"}),
        ("avx512", 15, (128, 144), set()),  # ATen takes MKL itself
        ("avx2", 16, (128, 144), {"y", "dw"}),
        ("avx2", 16, (144, 128), {"dx", "dw"}),
        ("avx2", 16, (24, 192), {"y", "dw"}),  # dx in the kernel
        ("avx2", 16, (12, 192), set()),
        ("avx2", 16, (192, 24), {"dx", "dw"}),
        ("avx2", 15, (128, 144), set()),
        ("avx512_bf16", 16, (128, 144), set()),  # not measured
    ],
)
def test_products_of_matrices_run_on_intels_cpus(isa, images, shape, parts, no_instructions, monkeypatch):
    assert products_on_intel(isa, (images, shape[0], 5, 7), shape[1], "channels_last", monkeypatch) == parts


@pytest.mark.parametrize(
    ("isa", "images", "pixels", "shape", "parts"),
    [
        ("avx512", 16, (10, 10), (24, 144), {"y", "dx", "dw"}),
        ("avx2", 16, (10, 10), (144, 24), {"y", "dx", "dw"}),
        ("avx512", 16, (10, 10), (144, 24), {"y", "dx"}),  # dw in the kernel
        ("avx512", 16, (10, 10), (24, 32), {"y", "dx", "dw"}),
        ("avx512", 16, (9, 11), (24, 144), {"dw"}),
        ("avx512", 16, (2, 2), (512, 1024), {"dw"}),
        ("avx512", 16, (2, 2), (512, 1032), set()),  # a large sum
        ("avx512", 15, (10, 10), (24, 144), set()),
        ("amd", 16, (10, 10), (24, 144), set()),
    ],
)
def test_products_of_planes_run_on_intels_cpus(isa, images, pixels, shape, parts, no_instructions, monkeypatch):
    assert products_on_intel(isa, (images, shape[0], *pixels), shape[1], "contiguous", monkeypatch) == parts


@pytest.mark.parametrize(
    ("isa", "images", "shape", "layout", "copied"),
    [
        ("avx512", 16, (24, 144), "contiguous", True),
        ("avx2", 16, (144, 24), "contiguous", True),
        ("avx512", 16, (512, 1032), "contiguous", True),
        ("avx512", 15, (512, 1032), "contiguous", False),
        ("avx512", 15, (512, 1024), "contiguous", True),
        ("avx2", 1, (24, 144), "contiguous", True),
        ("avx512", 16, (128, 128), "channels_last", True),
        ("avx2", 16, (128, 136), "channels_last", True),
        ("avx512", 16, (136, 128), "channels_last", False),
        ("avx512", 16, (127, 144), "channels_last", False),
        ("avx512", 15, (128, 144), "channels_last", False),
        ("avx512_bf16", 16, (24, 144), "contiguous", False),  # not measured
    ],
)
def test_pixels_that_a_stride_reads_are_copied_on_intels_cpus(
    isa, images, shape, layout, copied, no_instructions, monkeypatch
):
    if not RULES._HAS_LIBRARY[torch.float32]:
        pytest.skip("PyTorch was built without MKL")
    seen, read_by = [], MODULE._read_by
    monkeypatch.setitem(_extension.BUILD_INFO, "isa_active", isa)
    monkeypatch.setitem(_extension.BUILD_INFO, "cpu_vendor", "intel")
    monkeypatch.setattr(RULES, "_SMALL", 0)
    monkeypatch.setattr(MODULE, "_read_by", lambda x, stride: seen.append(stride) or read_by(x, stride))
    for stride in ((2, 2), (1, 3)):
        draws = [make("cpu", (images, shape[0], 5, 7), layout, out=shape[1], seed=seed) for seed in range(2)]
        harness.assert_op_as_good_as_torch(function(stride), reference_of(stride), draws, "pointwise_conv2d")
        assert (list(stride) in seen) == copied
    if copied:
        assert backends.select("pointwise_conv2d", IMPLS, *draws[0].values(), [2, 2]) is IMPLS["cpu"]
    harness.evaluate(function(), draws[0])
    assert [1, 1] not in seen


@pytest.mark.parametrize(
    ("family", "isa", "dtype", "images", "shape", "layout", "copied"),
    [
        (25, "avx512_bf16", torch.float32, 2, (24, 32), "contiguous", {"forward", "backward"}),
        (25, "avx512_bf16", torch.float32, 2, (24, 32), "channels_last", {"backward"}),
        (25, "avx512_bf16", torch.float32, 2, (256, 70), "contiguous", set()),  # more than 250 weights a pixel
        (25, "avx512_bf16", torch.float32, 16, (256, 600), "contiguous", {"forward", "backward"}),
        (25, "avx2", torch.float32, 2, (24, 32), "contiguous", {"forward", "backward"}),
        (25, "avx2", torch.float32, 2, (24, 32), "channels_last", {"backward"}),
        (26, "avx512_bf16", torch.float32, 2, (24, 32), "contiguous", set()),  # not measured
        (26, "avx512_bf16", torch.float32, 2, (24, 32), "channels_last", set()),
        (25, "avx512_bf16", torch.bfloat16, 2, (48, 32), "contiguous", {"forward", "backward"}),
        (25, "avx512_bf16", torch.bfloat16, 2, (47, 32), "contiguous", set()),  # few elements
        (25, "avx512_bf16", torch.bfloat16, 2, (48, 32), "channels_last", {"backward"}),
    ],
)
def test_pixels_that_a_stride_reads_are_copied_on_amds_cpus(
    family, isa, dtype, images, shape, layout, copied, monkeypatch
):
    if reason := harness.why_not("cpu", "cpu", "pointwise_conv2d"):
        pytest.skip(reason)
    if dtype == torch.bfloat16 and not _common.has_bfloat16():
        pytest.skip("the CPU has no instructions that multiply bfloat16")
    seen, read_by = [], MODULE._read_by
    for key, value in (("isa_active", isa), ("cpu_vendor", "amd"), ("cpu_family", family)):
        monkeypatch.setitem(_extension.BUILD_INFO, key, value)
    monkeypatch.setattr(RULES, "_SMALL", 0)
    monkeypatch.setattr(RULES, "_FEW_PRODUCTS", 0)
    monkeypatch.setattr(RULES, "_NARROW", 2 * 48 * 35)
    monkeypatch.setattr(MODULE, "_read_by", lambda x, stride: seen.append(stride) or read_by(x, stride))
    for stride in ((2, 2), (1, 3)):
        draws = [make("cpu", (images, shape[0], 5, 7), layout, dtype, out=shape[1], seed=seed) for seed in range(2)]
        chosen = "cpu" if copied or layout == "channels_last" else "reference"
        assert backends.select("pointwise_conv2d", IMPLS, *draws[0].values(), list(stride)) is IMPLS[chosen]
        seen.clear()
        with torch.no_grad():
            function(stride)(**draws[0])
        assert (list(stride) in seen) == ("forward" in copied)
        seen.clear()
        harness.assert_op_as_good_as_torch(function(stride), reference_of(stride), draws, "pointwise_conv2d")
        assert (list(stride) in seen) == ("backward" in copied)


@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
@pytest.mark.parametrize("images", [4, 16])
@pytest.mark.parametrize(
    ("layout", "channels", "large", "copied"),
    [
        ("contiguous", 8, 1 << 20, ("forward", "backward")),
        ("channels_last", 127, 1 << 20, ()),
        ("channels_last", 128, 1 << 20, ("backward",)),
        ("channels_last", 128, 128 * 8, ("forward", "backward")),
    ],
)
def test_pixels_that_a_stride_reads_are_copied_on_intel_with_tiles(
    layout, channels, large, copied, images, dtype, no_instructions, monkeypatch
):
    for name, value in (("isa_active", "amx_bf16"), ("cpu_vendor", "intel")):
        monkeypatch.setitem(_extension.BUILD_INFO, name, value)
    monkeypatch.setattr(RULES, "_SMALL", 0)
    monkeypatch.setattr(RULES, "_FEW_PRODUCTS", 0)
    monkeypatch.setattr(RULES, "_HEAVY", large)
    monkeypatch.setattr(MODULE, "_BY_LIBRARY", None)  # oneDNN's, slower than what ATen takes of few images
    x, weight = harness.images((images, channels, 5, 7), layout, dtype), harness.normal(8, channels, 1, 1, dtype=dtype)
    assert [part for part in ("forward", "backward") if RULES.is_read_first(x, weight, part == "backward")] == [*copied]
    if dtype == torch.float32:
        draws = [make("cpu", x.shape, layout, dtype, out=8, seed=seed) for seed in range(2)]
        harness.assert_op_as_good_as_torch(function((2, 2)), reference_of((2, 2)), draws, "pointwise_conv2d")


@pytest.mark.parametrize(("layout", "copied"), [("channels_last", False), ("contiguous", True)])
def test_of_large_images_in_channels_last_they_are_not(layout, copied, no_instructions, monkeypatch):
    if not RULES._HAS_LIBRARY[torch.float32]:
        pytest.skip("PyTorch was built without MKL")
    monkeypatch.setitem(_extension.BUILD_INFO, "isa_active", "avx512")
    monkeypatch.setitem(_extension.BUILD_INFO, "cpu_vendor", "intel")
    x, weight = harness.images((16, 128, 5, 7), layout), harness.normal(128, 128, 1, 1)
    for spare, expected in ((0, True), (-1, copied)):
        monkeypatch.setattr(RULES, "_LARGE", x.numel() * 4 + spare)
        assert RULES.is_read_first(x, weight) == expected


@pytest.mark.parametrize(
    ("vendor", "isa", "stride"),
    [
        ("intel", "avx512", (2, 2)),
        ("intel", "amx_bf16", (1, 1)),
        ("amd", "avx512", (2, 2)),
    ],
)
@dense_layouts
def test_compiles_once_for_even_and_odd_sizes(layout, vendor, isa, stride, no_instructions, monkeypatch):
    for key, value in (("isa_active", isa), ("cpu_vendor", vendor), ("cpu_family", 25)):
        monkeypatch.setitem(_extension.BUILD_INFO, key, value)
    monkeypatch.setattr(RULES, "_SMALL", 0)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function(stride), fullgraph=True, dynamic=True, backend=counter)
    for images, *pixels in ((16, 8, 6), (17, 9, 7), (20, 12, 5)):
        inputs = make("cpu", (images, 128, *pixels), layout, out=128)
        results = []
        for run, dtype in (
            (compiled, torch.float32),
            (function(stride), torch.float32),
            (reference_of(stride), torch.float64),
        ):
            x, w, b = (t.detach().to(dtype).requires_grad_() for t in inputs.values())
            y = run(x, w, b)
            results.append([y.detach(), *torch.autograd.grad(y.square().sum(), (x, w, b))])
        for name, mine, again, truth in zip(("y", "dx", "dw", "db"), *results):
            harness.assert_as_good_as_torch(mine, again, truth, name)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("isa", "images", "pixels", "kernel"),
    [
        ("avx512", 16, (9, 11), True),
        ("avx512", 16, (10, 10), False),
        ("avx512", 15, (7, 7), False),
        ("avx2", 16, (7, 7), False),
    ],
)
def test_small_planes_run_in_the_kernel_on_intels_cpus(isa, images, pixels, kernel, no_instructions, monkeypatch):
    if not RULES._HAS_LIBRARY[torch.float32]:
        pytest.skip("PyTorch was built without MKL")
    monkeypatch.setitem(_extension.BUILD_INFO, "isa_active", isa)
    monkeypatch.setitem(_extension.BUILD_INFO, "cpu_vendor", "intel")
    x, weight = harness.images((images, 24, *pixels)), torch.zeros(8, 24, 1, 1)
    assert (RULES.ways(("forward",), x, weight, [1, 1]) == ["kernel"]) == kernel


@pytest.mark.parametrize(
    ("dtype", "shape", "out", "dx", "dw"),
    [
        (torch.float32, (16, 512, 2, 2), 511, True, True),
        (torch.float32, (16, 512, 2, 2), 512, True, False),
        (torch.float32, (15, 64, 2, 2), 8, True, True),
        (torch.float32, (15, 65, 2, 2), 8, True, False),
        (torch.bfloat16, (16, 256, 2, 2), 499, True, False),
        (torch.bfloat16, (16, 256, 2, 2), 500, False, False),
        (torch.bfloat16, (16, 256, 4, 4), 156, True, True),
        (torch.bfloat16, (16, 256, 4, 4), 157, True, False),
        (torch.bfloat16, (15, 256, 4, 4), 157, True, True),
        (torch.bfloat16, (15, 1023, 8, 8), 1026, True, False),
        (torch.bfloat16, (15, 1026, 8, 8), 1023, True, True),
    ],
)
def test_gradients_of_contiguous_images_are_stocks_where_it_was_measured_faster(
    dtype, shape, out, dx, dw, no_instructions, monkeypatch
):
    for name, value in (("cpu_vendor", "amd"), ("cpu_family", 25), ("isa_active", "avx512_bf16")):
        monkeypatch.setitem(_extension.BUILD_INFO, name, value)
    calls = []
    for name in ("_KERNEL_ON_PLANES", "_DW"):
        monkeypatch.setattr(MODULE, name, lambda *_, name=name: calls.append(name))
    monkeypatch.setattr(MODULE, "reference_backward", lambda *_: (None, None, None))
    monkeypatch.setattr(MODULE._common, "in_format_of", lambda dx, x: dx)
    monkeypatch.setattr(MODULE._common, "strided_like", lambda dw, weight: dw)
    x, weight = torch.zeros(shape, dtype=dtype), torch.zeros(out, shape[1], 1, 1, dtype=dtype)
    dy = x.new_zeros(shape[0], out, *shape[2:])
    MODULE._backward(dy, x, weight, [1, 1], RULES.plan(x, weight, [1, 1]), (True, True, False))
    assert calls == ["_KERNEL_ON_PLANES"] * dx + ["_DW"] * dw
    calls.clear()
    MODULE._backward(dy, x, weight, [1, 1], RULES.plan(x, weight, [1, 1], whole=True), (True, True, False))
    assert calls == ["_KERNEL_ON_PLANES", "_DW"]


@pytest.mark.parametrize(("channels", "out", "kernel"), [(32, 24, True), (24, 32, False)])
def test_dx_of_small_planes_runs_in_the_kernel_where_x_is_wider(channels, out, kernel, no_instructions, monkeypatch):
    if not RULES._HAS_LIBRARY[torch.float32]:
        pytest.skip("PyTorch was built without MKL")
    monkeypatch.setitem(_extension.BUILD_INFO, "isa_active", "avx512")
    monkeypatch.setitem(_extension.BUILD_INFO, "cpu_vendor", "intel")
    calls = []
    run = MODULE._KERNEL_ON_PLANES
    monkeypatch.setattr(MODULE, "_KERNEL_ON_PLANES", lambda *args: calls.append(args) or run(*args))
    x, dy = harness.images((16, channels, 7, 7)), harness.images((16, out, 7, 7))
    weight = harness.normal(out, channels, 1, 1)
    MODULE._backward(dy, x, weight, [1, 1], RULES.plan(x, weight, [1, 1]), (True, False, False))
    assert bool(calls) == kernel


@pytest.mark.parametrize(
    ("dtype", "layout", "shape", "out", "chosen"),  # of y, dx and dw
    [
        (torch.float32, "channels_last", (16, 96, 10, 10), 24, "kernel kernel kernel"),
        (torch.float32, "channels_last", (16, 96, 10, 10), 384, "kernel stock product"),
        (torch.float32, "channels_last", (16, 384, 10, 10), 96, "stock kernel product"),
        (torch.float32, "channels_last", (16, 256, 10, 10), 1024, "product stock product"),
        (torch.float32, "channels_last", (16, 2048, 2, 2), 512, "product product product"),
        (torch.float32, "channels_last", (4, 96, 10, 10), 24, "stock product kernel"),
        (torch.float32, "channels_last", (4, 256, 2, 2), 1024, "product stock stock"),
        (torch.float32, "channels_last", (4, 1024, 2, 2), 256, "product product product"),
        (torch.float32, "channels_last", (15, 96, 8, 8), 192, "stock stock stock"),
        (torch.float32, "contiguous", (16, 24, 40, 50), 144, "kernel product product"),
        (torch.float32, "contiguous", (16, 144, 40, 50), 24, "product kernel product"),
        (torch.float32, "contiguous", (16, 24, 10, 10), 144, "product product product"),
        (torch.float32, "contiguous", (16, 192, 2, 2), 96, "kernel kernel product"),
        (torch.float32, "contiguous", (16, 96, 2, 2), 192, "kernel stock product"),
        (torch.float32, "contiguous", (4, 96, 2, 2), 192, "kernel product stock"),
        (torch.float32, "contiguous", (4, 96, 10, 10), 192, "stock product stock"),
        (torch.bfloat16, "channels_last", (4, 96, 10, 10), 24, "stock stock kernel"),
        (torch.bfloat16, "channels_last", (16, 256, 2, 2), 1024, "product product kernel"),
        (torch.bfloat16, "channels_last", (4, 1024, 2, 2), 256, "product stock product"),
        (torch.bfloat16, "channels_last", (16, 256, 10, 10), 1024, "stock stock product"),
        (torch.bfloat16, "channels_last", (16, 160, 10, 10), 960, "stock stock kernel"),
        (torch.bfloat16, "contiguous", (4, 96, 10, 10), 24, "product product kernel"),
        (torch.bfloat16, "contiguous", (4, 96, 2, 2), 24, "stock stock stock"),
        (torch.bfloat16, "contiguous", (4, 96, 8, 8), 24, "stock stock kernel"),
        (torch.bfloat16, "contiguous", (4, 512, 8, 8), 1024, "stock stock stock"),
        (torch.bfloat16, "contiguous", (4, 128, 28, 28), 512, "product product product"),
        (torch.bfloat16, "contiguous", (4, 256, 2, 2), 1024, "stock stock product"),
        (torch.float64, "channels_last", (4, 96, 10, 10), 24, "stock stock kernel"),
    ],
)
def test_what_runs_a_product_on_intel_with_tiles(dtype, layout, shape, out, chosen, no_instructions, monkeypatch):
    monkeypatch.setitem(_extension.BUILD_INFO, "isa_active", "amx_bf16")
    monkeypatch.setitem(_extension.BUILD_INFO, "cpu_vendor", "intel")
    x, weight = harness.images(shape, layout, dtype), torch.zeros(out, shape[1], 1, 1, dtype=dtype)
    for known in RULES._HAS_LIBRARY:
        monkeypatch.setitem(RULES._HAS_LIBRARY, known, True)
    assert RULES.ways(RULES.PARTS, x, weight, [1, 1]) == chosen.split()
    assert "product" not in RULES.ways(RULES.PARTS, x, weight, [2, 1])  # which knows no stride
    monkeypatch.setattr(RULES, "_SMALL", 0)
    monkeypatch.setattr(RULES, "_FEW_PRODUCTS", 0)
    runs = "reference" if set(chosen.split()) == {"stock"} else "cpu"
    assert backends.select("pointwise_conv2d", IMPLS, x, weight, None, [1, 1]) is IMPLS[runs]
    assert backends.select("pointwise_conv2d", IMPLS, x.mT, weight, None, [1, 1]) is IMPLS["reference"]
    monkeypatch.setitem(RULES._HAS_LIBRARY, dtype, False)
    without = RULES.ways(RULES.PARTS, x, weight, [1, 1])
    monkeypatch.setitem(_extension.BUILD_INFO, "cpu_vendor", "another")
    assert without == RULES.ways(RULES.PARTS, x, weight, [1, 1])


@pytest.mark.parametrize(("images", "out", "dw"), [(15, 1024, "kernel"), (15, 1025, "stock"), (16, 1025, "kernel")])
def test_gradients_with_a_stride_on_intel_with_tiles(images, out, dw, no_instructions, monkeypatch):
    if not RULES._HAS_LIBRARY[torch.float32]:
        pytest.skip("PyTorch was built without MKL")
    monkeypatch.setitem(_extension.BUILD_INFO, "isa_active", "amx_bf16")
    monkeypatch.setitem(_extension.BUILD_INFO, "cpu_vendor", "intel")
    x, weight = harness.images((images, 64, 2, 2), "channels_last"), torch.zeros(out, 64, 1, 1)
    assert RULES.ways(("dx", "dw"), x, weight, [2, 1]) == ["stock", dw]


@pytest.mark.parametrize("chosen", ["kernel", "product", "stock"])
@dense_layouts
def test_all_that_may_be_chosen_there_is_as_good_as_torch(chosen, layout, no_instructions, monkeypatch):
    monkeypatch.setattr(RULES, "_SMALL", 0)
    monkeypatch.setattr(RULES, "_FEW_PRODUCTS", 0)
    monkeypatch.setattr(RULES, "ways", lambda parts, *_: [chosen] * len(parts))
    ran = set()
    parts = {
        "kernel": {"_KERNEL" if layout == "channels_last" else "_KERNEL_ON_PLANES", "_DW"},
        "product": {"_product_of", "_dw_product"},
        "stock": {"reference_backward"},
    }
    for name in set().union(*parts.values()):
        run = getattr(MODULE, name)
        monkeypatch.setattr(MODULE, name, lambda *args, name=name, run=run: ran.add(name) or run(*args))
    monkeypatch.setitem(IMPLS, "cpu", dataclasses.replace(IMPLS["cpu"], slower=None))
    draws = [make("cpu", layout=layout, seed=seed) for seed in range(2)]
    harness.assert_op_as_good_as_torch(function(), reference_of(), draws, "pointwise_conv2d")
    assert ran == parts[chosen]


def products_on_intel(isa, shape, out, layout, monkeypatch):
    """Which of y, dx and dw are products on a CPU with those instructions."""
    if not RULES._HAS_LIBRARY[torch.float32]:
        pytest.skip("PyTorch was built without MKL")
    monkeypatch.setitem(_extension.BUILD_INFO, "isa_active", isa)
    monkeypatch.setitem(_extension.BUILD_INFO, "cpu_vendor", "amd" if isa == "amd" else "intel")
    monkeypatch.setattr(RULES, "_SMALL", 0)
    seen = set()

    def of(name, run):
        def recorded(first, second, *bias):
            seen.add("dw" if name == "dw" else "dx" if second.shape[0] == shape[1] else "y")
            return run(first, second, *bias)

        monkeypatch.setattr(MODULE, name if name != "dw" else "_dw_product", recorded)

    of("_product_of", MODULE._product_of)
    of("dw", MODULE._dw_product)
    harness.evaluate(function(), make("cpu", shape, layout, out=out))
    return seen


@pytest.mark.parametrize("dtype", harness.DTYPES)
@dense_layouts
def test_a_forced_backend_runs_every_direction(layout, dtype, monkeypatch):
    if reason := harness.why_not("cpu", "cpu", "pointwise_conv2d"):
        pytest.skip(reason)
    monkeypatch.setattr(RULES, "_choose", lambda *_: "stock")  # which is faster everywhere
    monkeypatch.setattr(RULES, "_READ_FIRST", {})
    monkeypatch.setattr(MODULE, "reference_backward", None)
    monkeypatch.setattr(MODULE, "reference", None)
    if RULES.takes(dtype):
        monkeypatch.setattr(MODULE, "_BY_LIBRARY", None)
    for stride in (1, 2) if layout == "channels_last" or not RULES.takes(dtype) else (1,):
        leaves = {name: t.requires_grad_() for name, t in make("cpu", layout=layout, dtype=dtype).items()}
        with fusedtrain.use_backend("cpu"):
            y = function(stride)(*leaves.values())
        torch.autograd.grad(y.sum(), list(leaves.values()))  # on the backend that ran forward


@pytest.mark.parametrize("options", [dict(), dict(stride=2, bias=False), dict(padding="same", padding_mode="reflect")])
def test_layer_is_a_conv2d(device, backend, options):
    torch.manual_seed(0)
    stock = nn.Conv2d(6, 10, 1, device=device, **options)
    torch.manual_seed(0)
    ours = PointwiseConv2d(6, 10, device=device, **options)
    assert isinstance(ours, nn.Conv2d) and ours.extra_repr() == stock.extra_repr()
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), stock.state_dict().values(), strict=True))
    harness.assert_module_as_good_as_torch(ours, stock, harness.images((2, 6, 9, 8), "channels_last", device=device))


@pytest.mark.parametrize("options", [dict(kernel_size=3), dict(padding=1), dict(groups=2)])
def test_layer_refuses_other_convolutions(options):
    with pytest.raises(ValueError, match="PointwiseConv2d: kernel_size must be 1, padding 0 and groups 1, got"):
        PointwiseConv2d(6, 6, **options)

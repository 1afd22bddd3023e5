"""depthwise_bn_act_se: convolution, batch normalisation, activation and squeeze-and-excitation as one op."""

import copy
import functools
import sys

import cases
import harness
import properties
import pytest
import torch
from torch import nn

import fusedtrain
import fusedtrain.nn.depthwise_bn_act_se as layers
from fusedtrain.ops import _codes, depthwise_bn_act_se, pointwise_conv2d
from fusedtrain.ops.depthwise_bn_act_se import IMPLS, reference
from fusedtrain.ops.depthwise_conv2d import reference as conv_reference
from fusedtrain.ops.squeeze_excite import reference as gate_reference

R = 6  # squeeze channels: fewer than a vector holds
SHAPES = [name for name in cases.SHAPES if name not in ("no_channels", "no_pixels")]  # refused by convolutions
KINKED = ("relu", "hard_swish")
CASES = cases.pairwise(
    shape=SHAPES,
    layout=harness.LAYOUTS,
    dtype=harness.DTYPES,
    training=[True, False],
    act=[act for act in _codes.INPUT_ACTIVATIONS if act != "relu6"],
    se_act=("relu", "silu"),
    gate=("sigmoid", "hard_sigmoid"),
    form=("plain", "strided", "multiplied", "bare", "no gate"),
)
# Rounding z to 16 bits puts values on the other side of a kink, in torch's chain others than in ours.
CASES = [case | ({"act": "silu"} if case["act"] in KINKED and case["dtype"].itemsize == 2 else {}) for case in CASES]
CASES = cases.with_relu6(CASES)
dense_layouts = pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
modes = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])


def make(device, shape=(3, 13, 7, 9), layout="contiguous", dtype=torch.float32, form="plain", seed=0) -> dict:
    c = shape[1] * (2 if form == "multiplied" else 1)

    def normal(*size, scale=1.0, kind=dtype):
        normal.seed += 100
        return (harness.normal(*size, dtype=torch.float64, seed=seed + normal.seed) * scale).to(device, kind)

    normal.seed = 0
    inputs = {"x": harness.images(shape, layout, dtype, device, seed), "weight": normal(c, 1, 3, 3, scale=1 / 3)}
    if form != "bare":
        inputs |= {"bias": normal(c), "norm_weight": normal(c).sigmoid(), "norm_bias": normal(c)}
    if form != "no gate":
        inputs |= {"w1": normal(R, c, 1, 1, scale=c**-0.5), "w2": normal(c, R, 1, 1, scale=R**-0.5)}
    if form not in ("bare", "no gate"):
        inputs |= {"b1": normal(R), "b2": normal(c)}
    return inputs


def run(operation, names, training, form, options, running, *tensors):
    """``operation`` on tensors called ``names``; with ``running`` statistics as further outputs."""
    given = dict(zip(names, tensors))
    channels, like = given["weight"].shape[0], given.get("norm_weight", given["x"])
    mean = torch.linspace(-1, 1, channels, dtype=torch.float64).to(like)
    var = torch.linspace(0.5, 2, channels, dtype=torch.float64).to(like)
    se = None if "w1" not in given else tuple(given.get(name) for name in ("w1", "b1", "w2", "b2"))
    y = operation(
        given["x"],
        (given["weight"], given.get("bias")),
        (mean, var, given.get("norm_weight"), given.get("norm_bias"), training, 0.3, 1e-3),
        se,
        ([2, 1], [1, 1, 0, 2], [1, 1]) if form == "strided" else ([1, 1], [1, 1, 1, 1], [1, 1]),
        *options,
    )
    return (y, mean, var) if running else y


def ours(x, conv, norm, se, geometry, act, se_act, gate):
    (mean, var, *affine), (stride, padding, dilation) = norm, geometry
    return depthwise_bn_act_se(
        *(x, *conv, mean, var, *affine[:2], se, *affine[2:]),
        **{"stride": stride, "padding": padding, "dilation": dilation, "act": act, "se_act": se_act, "gate": gate},
    )


OPTIONS = ("silu", "relu", "sigmoid")


def function(inputs, training=True, form="plain", options=OPTIONS, running=False, operation=ours):
    return functools.partial(run, operation, tuple(inputs), training, form, options, running)


def reference_of(*args, **kwargs):
    return function(*args, **kwargs, operation=reference)


def skip_unless_runs(backend, device, dtype=torch.float32, *, interpreted=False):
    """Triton's interpreter takes a second per call: it runs what is ``interpreted``, not what all backends share."""
    harness.skip_unless_runs(backend, device, "depthwise_bn_act_se", dtype)
    if backend == "triton" and device == "cpu" and not interpreted:
        pytest.skip("Triton's interpreter would take minutes")


@pytest.mark.parametrize("case", CASES, ids=cases.label)
def test_output_gradients_and_running_statistics_are_as_good_as_torch(device, backend, case):
    skip_unless_runs(backend, device, case["dtype"], interpreted=case in CASES[::16])
    harness.skip_strides_of_reference(backend, case["layout"])
    shape, form = cases.SHAPES[case["shape"]], case["form"]
    training = case["training"] and shape[:1] + shape[2:] != (1, 1, 1)  # one value per channel is refused
    options = tuple(case[name] for name in ("act", "se_act", "gate"))
    # The fewer elements, the more often torch's own error is small by chance.
    few = 1 in (shape[1], shape[2] * shape[3])
    count = 2 if backend == "triton" and device == "cpu" else 32 if few else 8
    draws = [make(device, shape, case["layout"], case["dtype"], form, seed) for seed in range(count)]
    harness.assert_op_as_good_as_torch(
        function(draws[0], training, form, options, running=True),
        reference_of(draws[0], training, form, options, running=True),
        draws,
        "depthwise_bn_act_se",
        frozen=("bias",) if training else (),  # normalisation takes it out: its gradient is zero but for rounding
    )


@dense_layouts
@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
def test_a_large_mean_hides_no_variance(device, kernels, layout, dtype):
    skip_unless_runs(kernels, device, interpreted=dtype == torch.float32 and layout == "channels_last")
    draws = [make(device, (2, 5, 17, 31), layout, dtype, seed=seed) for seed in range(2)]
    for draw in draws:
        draw["bias"] += 30 if dtype == torch.bfloat16 else 1000
    calls = (make(draws[0], running=True) for make in (function, reference_of))
    harness.assert_op_as_good_as_torch(*calls, draws, layout, frozen=("bias",))


@dense_layouts
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("k", [3, 5, 7])
@pytest.mark.parametrize("channels", [8, 37, 130, 264, 1024])  # groups and chunks, whole and overlapping; copies
def test_statistics_of_the_convolution_are_as_good_as_torch(device, kernels, layout, stride, k, channels):
    few = 37 if layout == "channels_last" else 8  # groups of channels are the one kernel's, planes the other's
    skip_unless_runs(kernels, device, interpreted=(channels, stride, k) == (few, 1, 3))
    geometry, runs = ([stride, stride], [k // 2, k // 2, k // 2 + 1, k // 2], [1, 1]), []
    for seed in range(4):
        x = harness.images((2, channels, 23, 11), layout, device=device, seed=seed)
        weight = harness.normal(channels, 1, k, k, device=device, seed=10 + seed)
        bias = harness.normal(channels, device=device, seed=20 + seed) + 100
        runs.append(IMPLS[kernels].convolve(x, weight, bias, *geometry))
    harness.assert_moments_as_good_as_torch(runs)


@dense_layouts
def test_large_images_are_summed_as_well(device, kernels, layout):
    calls = (of(make(device), training=False) for of in (function, reference_of))
    properties.assert_large_images_are_summed_as_well(*calls, make, kernels, device, layout)


# An image of 16 MiB of whole vectors is written past the caches, four vectors of SiLU in turn, and some are left over;
# or rows go alone, which share sets of the first cache.
@pytest.mark.parametrize(
    ("layout", "image"),
    [("channels_last", (80, 325, 163)), ("channels_last", (512, 91, 91)), ("contiguous", (80, 324, 166))],
)
def test_an_image_that_outgrows_the_caches(device, kernels, layout, image):
    if harness.interpreted(kernels, device):
        pytest.skip("too much for Triton's interpreter")
    draw = make(device, (1, *image), layout)
    calls = (make_call(draw, running=True) for make_call in (function, reference_of))
    harness.assert_op_as_good_as_torch(*calls, draw, "a large image", frozen=("bias",))


def of_a_batch(names, training, form, counts, *tensors):
    """The reference on a batch that holds image i ``counts[i]`` times."""

    def norm_and_gate(x, conv, norm, se, geometry, act, se_act, gate):
        if not training:
            return reference(x, conv, norm, se, geometry, act, se_act, gate)
        u = properties.weighted_batch_norm(counts, conv_reference(x, *conv, *geometry, 0), *norm[2:4], norm[6])
        a = nn.functional.silu(u)
        return a if se is None else gate_reference(a, *se, se_act, gate, "avg", "identity")

    return run(norm_and_gate, names, training, form, OPTIONS, False, *tensors)


@harness.needs_memory(17)
@dense_layouts
@modes
@pytest.mark.parametrize("form", ["plain", "no gate"])
def test_more_than_2_to_the_31_elements(device, kernels, layout, training, form):
    inputs = make(device, (3, 64, 64, 64), layout, torch.bfloat16, form)
    inputs["x"][1] = 0
    del inputs["bias"]  # normalisation takes it out
    calls = function(inputs, training, form), functools.partial(of_a_batch, tuple(inputs), training, form)
    properties.assert_thousands_of_images_are_as_good_as_torch(*calls, inputs, kernels, device)


@dense_layouts
@modes
@pytest.mark.parametrize("form", ["plain", "bare", "no gate"])
def test_gradients_are_derivatives(device, backend, layout, training, form):
    skip_unless_runs(backend, device, torch.float64)
    inputs = make(device, (2, 3, 3, 2), layout, torch.float64, form)
    properties.assert_gradients_are_derivatives(function(inputs, training, form, ("silu", "silu", "sigmoid")), inputs)


@dense_layouts
def test_operators_agree_with_schema_and_fake(device, kernels, layout):
    skip_unless_runs(kernels, device, interpreted=layout == "channels_last")
    inputs = make(device, (2, 13, 5, 3), layout, torch.bfloat16)
    z, kernel, conv_bias, weight, bias, w1, w2, b1, b2 = inputs.values()
    impl, mean, rstd = IMPLS[kernels], bias.float(), weight.float()
    for geometry in (([1, 1], [1, 1, 1, 1], [1, 1]), ([2, 1], [1, 1, 0, 2], [1, 1])):
        properties.assert_opcheck(impl.convolve, z, kernel, conv_bias, *geometry)
    for affine, biases in (((weight, bias), (b1, b2)), ((None, None), (None, None))):
        inputs, codes, symbolic = (z, mean, rstd, *affine), (2, 1, 5), affine[0] is not None
        properties.assert_opcheck(impl.forward, *inputs, w1, biases[0], w2, biases[1], *codes, symbolic=symbolic)
        _, *small = impl.forward(*inputs, w1, biases[0], w2, biases[1], *codes)
        for need_dw in (True, False):
            args = (z, *inputs, w1, w2, *small, *codes, need_dw)
            properties.assert_opcheck(impl.reduce, *args, symbolic=symbolic and need_dw)
        sum_du, sum_du_xhat, gate, dpooled, *_ = impl.reduce(z, *inputs, w1, w2, *small, *codes, True)
        for sums in ((sum_du, sum_du_xhat), (None, None)):
            dz_inputs = (z, *inputs, gate, dpooled, *sums, 189.0, codes[0])
            properties.assert_opcheck(impl.backward, *dz_inputs, symbolic=symbolic and sums[0] is not None)
    geometry = ([1, 1], [1, 1, 1, 1], [1, 1])
    properties.assert_opcheck(impl.conv_backward, *dz_inputs, z, kernel, *geometry, True, True, False)


@pytest.mark.parametrize(("training", "layout"), [(True, "contiguous"), (True, "channels_last"), (False, "contiguous")])
def test_compiles_as_one_graph_and_once(device, backend, layout, training):
    skip_unless_runs(backend, device)
    inputs = make(device, layout=layout, dtype=torch.bfloat16)
    properties.assert_compiles(function(inputs, training), inputs)


@dense_layouts
def test_keeps_its_input_the_convolution_and_vectors(device, kernels, layout):
    skip_unless_runs(kernels, device)
    n, c, h, w = shape = (2, 16, 9, 9)
    inputs = make(device, shape, layout, torch.bfloat16)
    leaves = [t.requires_grad_() for t in inputs.values()]
    extra = harness.extra_saved_bytes(function(inputs), *leaves)
    assert extra == n * c * h * w * 2 + (2 * c + n * (c + R + c)) * 4  # z; mean, rstd; pooled, hidden, logits


def projected(inputs, apart, weight, *tensors):
    """The op and a 1x1 convolution behind it, either inside the op or ``apart``."""
    given = dict(zip(inputs, tensors))
    se = tuple(given[name] for name in ("w1", "b1", "w2", "b2")) if "w1" in given else None
    affine = given["norm_weight"], given["norm_bias"]
    options = {"act": "silu", "padding": 1} | ({} if apart else {"projection": (weight, None)})
    y = depthwise_bn_act_se(given["x"], given["weight"], given["bias"], None, None, *affine, se, True, **options)
    return pointwise_conv2d(y, weight) if apart else y


@dense_layouts
@pytest.mark.parametrize("form", ["plain", "no gate"])
def test_a_projection_gives_the_same_and_need_not_keep_its_input(device, backend, layout, form, monkeypatch):
    skip_unless_runs(backend, device)
    monkeypatch.setattr(sys.modules["fusedtrain.ops.depthwise_bn_act_se"], "_LARGE", 0)
    n, c, h, w = shape = (2, 16, 9, 9)
    inputs = {"weight1x1": harness.normal(8, c, 1, 1, seed=7).to(device)} | make(device, shape, layout, form=form)
    leaves, names = [t.requires_grad_() for t in inputs.values()], tuple(inputs)[1:]
    calls = [functools.partial(projected, names, apart) for apart in (False, True)]
    inside, apart = ([y := call(*leaves), *torch.autograd.grad(y.cos().sum(), leaves)] for call in calls)
    assert all(torch.equal(a, b) for a, b in zip(inside, apart)) and inside[0].stride() == apart[0].stride()
    extra = [harness.extra_saved_bytes(call, *leaves) for call in calls]
    factors = n * c * 4 if form == "plain" and backend in ("cpu", "cuda") else 0  # of the gate, kept in its place
    assert extra[1] - extra[0] == (n * c * h * w * 4 - factors if backend != "reference" else 0)
    if backend == "cpu" and layout == "contiguous":
        torch.compile(calls[0], fullgraph=True, backend="aot_eager")(*leaves).sum().backward()


@pytest.mark.parametrize("form", ["plain", "no gate"])
def test_batches_are_counted_in_training_alone(device, backend, form):
    skip_unless_runs(backend, device, interpreted=form == "plain")
    given, batches = make(device, form=form), torch.zeros((), dtype=torch.int64, device=device)
    se = tuple(given[name] for name in ("w1", "b1", "w2", "b2")) if "w1" in given else None
    mean, var = (torch.ones(given["weight"].shape[0], device=device) for _ in range(2))
    for training, expected in ((True, 1), (False, 1), (True, 2)):
        inputs = (given["x"], given["weight"], None, mean, var, None, None, se, training)
        depthwise_bn_act_se(*inputs, padding=1, num_batches_tracked=batches)
        assert batches == expected


@pytest.mark.parametrize("form", ["plain", "no gate"])
def test_a_training_block_calls_one_operator_in_each_direction(device, kernels, form):
    if kernels == "triton":
        pytest.skip("its kernels are launched from Python, which calls them all the same")
    skip_unless_runs(kernels, device)
    inputs = {name: t.requires_grad_() for name, t in make(device, layout="channels_last", form=form).items()}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function(inputs)(*inputs.values()).sum().backward()
    called = [event.name for event in profile.events() if event.name.startswith("fusedtrain::")]
    assert called == ["fusedtrain::depthwise_bn_act_se_train_", "fusedtrain::depthwise_bn_act_se_train_backward"]


def test_what_hooks_store_in_fewer_bits_is_read_as_such(device, kernels):
    inputs = make(device, (4, 13, 7, 9))
    properties.assert_reads_what_hooks_store(function(inputs), inputs)


@modes
@pytest.mark.parametrize("layout", harness.LAYOUTS)
def test_repeats_bitwise_and_writes_every_element(device, backend, layout, training):
    skip_unless_runs(backend, device, interpreted=training and layout in harness.DENSE_LAYOUTS)
    inputs = make(device, layout=layout)
    call = function(inputs, training)
    properties.assert_repeats_bitwise(call, inputs)
    properties.assert_writes_every_element(call, inputs)


@dense_layouts
def test_threads_change_nothing(device, kernels, layout):
    if kernels != "cpu":
        pytest.skip("only the CPU kernels run on threads")
    inputs = make(device, (5, 24, 33, 31), layout)
    properties.assert_threads_change_nothing(function(inputs, running=True), inputs)


@dense_layouts
@modes
def test_frozen_inputs_change_nothing(device, kernels, layout, training):
    skip_unless_runs(kernels, device)
    inputs = make(device, layout=layout)
    properties.assert_frozen_inputs_change_nothing(function(inputs, training), inputs)


@pytest.mark.parametrize("layout", harness.LAYOUTS)
def test_any_incoming_gradient(device, kernels, layout):
    skip_unless_runs(kernels, device)
    inputs = make(device, layout=layout)
    properties.assert_takes_any_incoming_gradient(function(inputs), inputs)


@pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
@pytest.mark.parametrize("act", ["relu", "relu6", "hard_swish"])
def test_flat_parts_pass_no_infinity_on(device, kernels, layout, act):
    skip_unless_runs(kernels, device)
    inputs = make(device, layout=layout, form="no gate")
    inputs["norm_bias"] = inputs["norm_bias"] - 2.5
    calls = (of(inputs, form="no gate", options=(act, *OPTIONS[1:])) for of in (function, reference_of))
    properties.assert_flat_parts_pass_no_infinity_on(*calls, inputs)


def test_second_derivative_is_refused(device, kernels):
    skip_unless_runs(kernels, device)
    inputs = make(device)
    properties.assert_second_derivative_is_refused(function(inputs), inputs)


@dense_layouts
def test_images_do_not_mix_in_evaluation(device, kernels, layout):
    skip_unless_runs(kernels, device)
    inputs = make(device, (3, 13, 17, 19), layout)
    properties.assert_images_do_not_mix(function(inputs, False), inputs)


def test_parameters_of_one_call_serve_another(device, kernels):
    """Two calls on shared parameters, backward in either order, give the sum of their gradients."""
    skip_unless_runs(kernels, device)
    inputs = make(device)
    call = function(inputs)
    leaves = [t.requires_grad_() for t in inputs.values()]
    other = harness.images((3, 13, 7, 9), seed=1).to(device)
    first, second = call(*leaves), call(other, *leaves[1:])
    together = torch.autograd.grad(second.sum() + first.sum(), leaves[1:])
    parts = [torch.autograd.grad(call(x, *leaves[1:]).sum(), leaves[1:]) for x in (inputs["x"], other)]
    assert all(torch.equal(both, a + b) for both, a, b in zip(together, *parts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_that_of_the_single_layers(device, backend, dtype):
    skip_unless_runs(backend, device, interpreted=dtype == torch.float16)
    inputs = make(device)
    leaves = [t.requires_grad_() for t in inputs.values()]
    with torch.autocast(device, dtype=dtype):
        y, stock = function(inputs)(*leaves), reference_of(inputs)(*leaves)
    assert y.dtype == stock.dtype == dtype
    truth = reference_of(inputs)(*(t.detach().double() for t in leaves))
    harness.assert_as_good_as_torch(y, stock, truth, "autocast")
    gradients = torch.autograd.grad(y.float().sum(), leaves)
    assert all(g.dtype == t.dtype and g.shape == t.shape for g, t in zip(gradients, leaves))


X, ONES = torch.ones(2, 3, 4, 4), torch.ones(3)
SE = (torch.ones(2, 3), None, torch.ones(3, 2), None)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "depthwise_bn_act_se: x must be a Tensor, got list"),
        ({"weight": torch.ones(4, 1, 3, 3)}, ValueError, r"weight must have shape \[3 \* m, 1, kh, kw\]"),
        ({"weight": torch.ones(3, 1, 5, 5), "padding": 0}, ValueError, "does not fit into x"),
        ({"norm_weight": torch.ones(4)}, ValueError, r"norm_weight must have shape \[3\] or be None, got \[4\]"),
        ({"norm_bias": ONES.half()}, TypeError, r"norm_bias must have the dtype of x .* got torch.float16"),
        ({"running_mean": None}, ValueError, "must both be given or both be None"),
        ({"se": SE[:3]}, ValueError, r"se must be \(w1, b1, w2, b2\) or None, got 3 entries"),
        ({"se": (torch.ones(2, 4), *SE[1:])}, ValueError, r"w1 must have shape \[R, 3\]"),
        ({"se": (SE[0].double(), *SE[1:])}, TypeError, "weights and biases must have the dtype of x"),
        ({"se": (SE[0].to("meta"), *SE[1:])}, RuntimeError, "w1 is on meta, but x is on cpu"),
        (
            {"projection": (torch.ones(2, 4, 1, 1), None)},
            ValueError,
            r"weight of shape \[D, 3, 1, 1\], got \[2, 4, 1, 1\]",
        ),
        ({"projection": (torch.ones(2, 3, 1, 1).half(), None)}, TypeError, "projection must have the dtype of x"),
        ({"act": "tanh"}, ValueError, "act must be one of identity, relu, .* got 'tanh'"),
        ({"gate": "mish"}, ValueError, "gate must be one of identity, relu, .* got 'mish'"),
        ({"x": torch.ones(1, 3, 1, 1)}, ValueError, "Expected more than 1 value per channel"),
        ({"eps": 0.0}, ValueError, "eps must be positive in training, got 0.0"),
    ],
)
def test_bad_arguments_are_named_and_change_nothing(changes, error, message):
    running = {"running_mean": ONES.clone(), "running_var": ONES.clone()}
    given = {"x": X, "weight": torch.ones(3, 1, 3, 3), "bias": None, "norm_weight": ONES, "norm_bias": ONES, "se": SE}
    with pytest.raises(error, match=message):
        depthwise_bn_act_se(**(given | {"training": True, "padding": 1} | running | changes))
    assert torch.equal(running["running_mean"], ONES) and torch.equal(running["running_var"], ONES)


def test_backends_without_kernels_say_so(device):
    assert IMPLS["cuda"].why_not(X)
    skip_unless_runs("triton", device, interpreted=True)
    x, weight, ones = (t.to(device, torch.float64) for t in (X, torch.ones(3, 1, 3, 3), ONES))
    with fusedtrain.use_backend("triton"), pytest.raises(RuntimeError, match="the Triton kernels have no float64"):
        depthwise_bn_act_se(x, weight, None, ones, ones)


# --- layers -----------------------------------------------------------------------------------------------------------


def blocks(zoo) -> dict:
    """Blocks of timm and torchvision that the op takes, with and without a gate, with the stock classes."""
    timm, torchvision = zoo.timm.models._efficientnet_blocks, zoo.torchvision.models
    silu = {"se_layer": timm.SqueezeExcite, "act_layer": nn.SiLU}
    config = torchvision.mobilenetv3.InvertedResidualConfig(16, 5, 32, 16, True, "HS", 1, 1, 1.0)
    mbconv = torchvision.efficientnet.MBConvConfig(4.0, 3, 1, 16, 16, 1)
    return {
        "InvertedResidual": timm.InvertedResidual(16, 16, exp_ratio=2.0, **silu),
        "InvertedResidual, padded as TensorFlow": timm.InvertedResidual(16, 8, 5, 2, pad_type="same", **silu),
        "DepthwiseSeparableConv": timm.DepthwiseSeparableConv(16, 16, **silu),
        "InvertedResidual without a gate": timm.InvertedResidual(16, 8, stride=2, act_layer=nn.Hardswish),
        "UniversalInvertedResidual": timm.UniversalInvertedResidual(16, 16, 5, 3, exp_ratio=2.0),
        "torchvision MobileNetV2": torchvision.mobilenetv2.InvertedResidual(16, 16, 1, 2),
        "torchvision InvertedResidual": torchvision.mobilenetv3.InvertedResidual(config, nn.BatchNorm2d),
        "torchvision MBConv": torchvision.efficientnet.MBConv(mbconv, 0.0, nn.BatchNorm2d),
        "by hand": nn.Sequential(
            *(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16), nn.SiLU()),
            *(torchvision.mobilenetv3.SElayer(16, 4), nn.Conv2d(16, 8, 1)),
        ),
    }


@pytest.fixture
def calls(monkeypatch):
    """The arguments by position of the op's calls by the layers of this test."""
    seen = []

    def spy(*args, **options):
        seen.append(args)
        return depthwise_bn_act_se(*args, **options)

    monkeypatch.setattr(layers, "depthwise_bn_act_se", spy)
    return seen


def states_after(x, fused: nn.Module, stock: nn.Module, truth: nn.Module) -> list[dict]:
    """The states that ``x`` leaves copies of the modules with; the last takes it in float64."""
    modules = [copy.deepcopy(module) for module in (fused, stock, truth)]
    for module, images in zip(modules, (x, x, x.double())):
        module(images)
    return [module.state_dict() for module in modules]


def test_blocks_of_timm_and_torchvision_train_as_before(zoo, calls):
    torch.manual_seed(0)
    for name, stock in blocks(zoo).items():
        for vector in (p for p in stock.parameters() if p.dim() == 1):
            nn.init.uniform_(vector, 0.5, 1.5)  # without biases some means are zero but for rounding
        fused, truth = copy.deepcopy(stock), copy.deepcopy(stock).double()
        before = list(map(type, fused.modules()))
        assert "nn.depthwise_bn_act_se." in str(fusedtrain.fuse(fused)), name
        for training in (True, False):
            x = [harness.images((4, 16, 9, 9), seed=seed) for seed in range(4)]
            stock.train(training), fused.train(training), truth.train(training)
            harness.assert_module_as_good_as_torch(fused, stock, x, name, frozen=("0.bias",))
            states = [states_after(draw, fused, stock, truth) for draw in x]  # judged together
            assert calls and calls[-1][8] is training
            calls.clear()
            for key, value in fused.state_dict().items():
                ours, theirs, exact = (torch.stack([state[key] for state in one]) for one in zip(*states))
                if value.is_floating_point():
                    harness.assert_as_good_as_torch(ours, theirs, exact, f"{name}: {key}")
                else:
                    assert torch.equal(ours, theirs)
        assert list(fused.state_dict()) == list(stock.state_dict())
        assert fusedtrain.unfuse(fused).kept == () and list(map(type, fused.modules())) == before


def test_what_the_op_does_not_know_or_a_hook_sees_runs_as_single_layers(zoo, calls):
    def block(**options):
        return zoo.timm.models._efficientnet_blocks.InvertedResidual(
            16, 8, **{"se_layer": zoo.timm.models._efficientnet_blocks.SqueezeExcite} | options
        )

    seen = []
    hooked = block()
    hooked.bn2.register_forward_hook(lambda *_: seen.append("bn2"))
    pooling = block()
    pooling.se.conv_reduce.register_forward_hook(lambda *_: seen.append("conv_reduce"))
    gated = (pooling, block(act_layer=nn.LeakyReLU), block(aa_layer=nn.AvgPool2d, stride=2))
    for model in (hooked, *gated):
        stock, x = copy.deepcopy(model), harness.images((4, 16, 9, 9))
        assert fusedtrain.fuse(model).swapped
        truth = copy.deepcopy(stock).double()
        harness.assert_as_good_as_torch(*(t.detach() for t in (model(x), stock(x), truth(x.double()))), "single layers")
        assert [arguments[7] for arguments in calls] == ([] if model is hooked else [None])
        calls.clear()
    assert set(seen) == {"bn2", "conv_reduce"}
    derived = nn.Sequential(block())
    derived[0].__class__ = type("Derived", (type(derived[0]),), {})
    assert any("derived from it" in (kept.reason or "") for kept in fusedtrain.fuse(derived).kept)


def test_layer_is_its_parts(calls, device):
    layer = fusedtrain.nn.DepthwiseBnActSe(16, 4, 5, stride=2, act_layer="hard_swish", gate_layer="hard_sigmoid")
    layer = layer.to(device)
    single, x = copy.deepcopy(layer), harness.images((4, 16, 9, 9), device=device)
    y = layer(x)
    assert len(calls) == 1 and y.shape == (4, 16, 5, 5)
    truth = copy.deepcopy(single).double()
    parts = [layers.se(layers.bn(layers.conv(images))) for layers, images in ((single, x), (truth, x.double()))]
    harness.assert_as_good_as_torch(y.detach(), *(t.detach() for t in parts), "its parts")
    assert all(torch.equal(a, b) or a.is_floating_point() for a, b in zip(layer.buffers(), single.buffers()))
    assert layer.bn.num_batches_tracked == 1


# --- statistics over processes ----------------------------------------------------------------------------------------

SYNC_CHILD = """
import os, sys, torch, fusedtrain
from torch import nn
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
state, images = torch.load(f"{folder}/inputs.pt")
layer = fusedtrain.nn.DepthwiseBnActSe(16, 4)
layer.load_state_dict(state)
layer.bn = fusedtrain.nn.SyncBatchNormAct(16)
layer.bn.act = nn.SiLU()
x = images[rank].requires_grad_()
with fusedtrain.use_backend("cpu"):
    y = layer(x)
    y.backward(y.detach().cos())
gradients = [p.grad for p in layer.parameters()]
torch.save((y.detach(), x.grad, gradients, list(layer.buffers())), f"{folder}/{rank}.pt")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
os._exit(0)
"""


def test_processes_share_statistics_as_if_their_batches_were_one(tmp_path):
    torch.manual_seed(0)  # of 400 draws of the weights one was beyond the rule, by 3 %
    whole = fusedtrain.nn.DepthwiseBnActSe(16, 4)
    images = [harness.images((n, 16, 5, 6), seed=n) for n in (3, 1)]
    torch.save((whole.state_dict(), images), tmp_path / "inputs.pt")
    ranks = [harness.start_python("-c", SYNC_CHILD, str(i), str(tmp_path), OMP_NUM_THREADS="1") for i in range(2)]
    results = []
    for dtype in (torch.float32, torch.float64):
        layer = copy.deepcopy(whole).to(dtype)
        x = torch.cat(images).to(dtype).requires_grad_()
        with fusedtrain.use_backend("reference"):
            y = layer(x)
            y.backward(y.detach().cos())
        results.append([y.detach(), x.grad, *(p.grad for p in layer.parameters()), *list(layer.buffers())[:2]])
    assert [child.wait(timeout=120) for child in ranks] == [0, 0]
    (y0, dx0, g0, b0), (y1, dx1, g1, b1) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(a, b) for a, b in zip(b0, b1))
    ours = [torch.cat([y0, y1]), torch.cat([dx0, dx1]), *(a + b for a, b in zip(g0, g1)), *b0[:2]]
    assert len(ours) == len(results[0])
    for k, (value, stock, truth) in enumerate(zip(ours, *results)):
        harness.assert_as_good_as_torch(value, stock, truth, f"result {k}")

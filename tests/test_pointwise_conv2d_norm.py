"""A 1x1 convolution, batch normalisation and an activation, with the gradient between them taken from the cache."""

import functools
import sys

import cases
import harness
import properties
import pytest
import torch
import torch.nn.functional as F

import fusedtrain
from fusedtrain import _extension
from fusedtrain.ops import _activation, _codes
from fusedtrain.ops.pointwise_conv2d_norm import pointwise_conv2d_norm

MODULE = sys.modules["fusedtrain.ops.pointwise_conv2d_norm"]
OPERATOR = torch.ops.fusedtrain.pointwise_conv2d_norm_backward.default
SHAPES = {
    "odd": (2, 13, 7, 9),
    "one_channel": (2, 1, 5, 7),
    "one_row": (3, 16, 1, 5),
    "vectors": (2, 32, 8, 8),
    "groups": (3, 24, 29, 47),  # of pixels, and blocks of which the last is a part
    "wide": (1, 67, 3, 3),
}
CASES = cases.pairwise(
    shape=list(SHAPES),
    out=[1, 8, 24, 70, 130],
    dtype=[torch.float32, torch.bfloat16],
    training=[True, False],
    act=["identity", "silu", "hard_swish", "relu"],
    affine=[True, False],
)
# Rounding z to 16 bits puts values on the other side of a kink, in torch's chain others than in ours.
KINKED = ("relu", "hard_swish")
CASES = [c | ({"act": "silu"} if c["act"] in KINKED and c["dtype"].itemsize == 2 else {}) for c in CASES]


def takes(dtype) -> bool:
    instruction = _extension.BUILD_INFO["isa_active"].endswith("_bf16")
    return dtype == torch.float32 or (dtype == torch.bfloat16 and instruction)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The gradients of both as one, on any CPU; counts them."""
    if reason := harness.why_not("cpu", "cpu", "pointwise_conv2d"):
        pytest.skip(reason)
    made = []
    monkeypatch.setattr(MODULE, "_LARGE", 0)
    monkeypatch.setattr(MODULE, "_EXPANDS", 0)
    monkeypatch.setattr(MODULE, "_AS_ONE", (torch.float32, torch.bfloat16))
    monkeypatch.setattr(MODULE, "_by_kernel", lambda x, channels: takes(x.dtype))
    monkeypatch.setattr(MODULE, "_BACKWARD", lambda *args: made.append(1) or OPERATOR(*args))
    with fusedtrain.use_backend("cpu"):  # small images, too
        yield made


def make(shape=(2, 13, 7, 9), out=20, dtype=torch.float32, affine=True, layout="channels_last", seed=0) -> dict:
    inputs = {
        "x": harness.images(shape, layout, dtype, seed=4 * seed),
        "w": harness.normal(out, shape[1], 1, 1, dtype=dtype, seed=4 * seed + 1) * shape[1] ** -0.5,
    }
    if affine:
        inputs |= {"gamma": harness.normal(out, dtype=dtype, seed=4 * seed + 2).sigmoid()}
        inputs |= {"beta": harness.normal(out, dtype=dtype, seed=4 * seed + 3)}
    return inputs


def statistics(w):
    steps = torch.linspace(0, 1, w.shape[0], dtype=torch.float64)
    return (2 * steps - 1).to(w), (0.5 + steps).to(w)


def ours(act, training, running, x, w, gamma=None, beta=None):
    mean, var = statistics(w)
    y = pointwise_conv2d_norm(x, w, None, mean, var, gamma, beta, training, 0.3, 1e-3, act=act)
    return (y, mean, var) if running else y


def stock(act, training, running, x, w, gamma=None, beta=None):
    mean, var = statistics(w)
    y = F.batch_norm(F.conv2d(x, w), mean, var, gamma, beta, training, 0.3, 1e-3)
    y = _activation.REFERENCE[act](y)
    return (y, mean, var) if running else y


def function(act="silu", training=True, running=False, of=ours):
    return functools.partial(of, act, training, running)


@pytest.mark.parametrize("case", CASES, ids=cases.label)
def test_output_gradients_and_running_statistics_are_as_good_as_torch(calls, case):
    dtype, shape = case["dtype"], SHAPES[case["shape"]]
    # The fewer elements, the more often torch's own error is small by chance.
    count = 2 if case["shape"] == "groups" else 8 if shape[1] > 1 else 32
    draws = [make(shape, case["out"], dtype, case["affine"], seed=seed) for seed in range(count)]
    options = case["act"], case["training"], True
    harness.assert_op_as_good_as_torch(function(*options), function(*options, of=stock), draws)
    assert len(calls) == (count if takes(dtype) else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "out"),
    [((2, 16, 48, 48), 96), ((1, 96, 48, 48), 24), ((2, 40, 28, 28), 240), ((2, 112, 14, 14), 672)],
)
def test_layers_of_real_networks(shape, out, dtype):
    draws = [make(shape, out, dtype, seed=seed) for seed in range(2)]
    harness.assert_op_as_good_as_torch(function(), function(of=stock), draws)


def test_results_written_past_the_caches():
    fused, torchs = function("identity"), function("identity", of=stock)
    harness.assert_op_as_good_as_torch(fused, torchs, make((2, 96, 105, 105), 16))


def test_what_is_not_taken_as_one_is_as_good(calls):
    inputs = make()
    bias = harness.normal(20, seed=9)
    for stride, given in (((2, 2), None), (1, bias)):
        running = [torch.zeros(20), torch.ones(20)]
        y = pointwise_conv2d_norm(inputs["x"], inputs["w"], given, *running, training=True, stride=stride)
        expected = F.batch_norm(F.conv2d(inputs["x"], inputs["w"], given, stride), None, None, training=True)
        torch.testing.assert_close(y, expected)
    with torch.no_grad():
        function()(*inputs.values())
    harness.evaluate(function(), inputs, frozen=("w",))
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_inputs_change_nothing(dtype):
    properties.assert_frozen_inputs_change_nothing(function(), make((3, 24, 29, 47), 40, dtype))


def test_takes_any_incoming_gradient():
    properties.assert_takes_any_incoming_gradient(function(), make())


def test_second_derivatives_are_refused():
    properties.assert_second_derivative_is_refused(function(), make())


@pytest.mark.parametrize("shape", [(2, 13, 7, 9), (3, 24, 29, 47)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeats_bitwise_whatever_the_threads_and_writes_every_element(shape, dtype):
    inputs = make(shape, 70, dtype)
    properties.assert_repeats_bitwise(function(), inputs)
    properties.assert_threads_change_nothing(function(), inputs)
    properties.assert_writes_every_element(function(), inputs)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_spread_as_in_torch(value):
    inputs = make()
    inputs["x"][1, 3, 2, 2] = value
    results = (harness.evaluate(function(of=of), inputs) for of in (ours, stock))
    for ours_, stocks in zip(*(result.values() for result in results)):
        assert torch.equal(ours_.isfinite(), stocks.isfinite())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compiles_as_one_graph_and_once(monkeypatch, dtype):
    monkeypatch.setattr(MODULE, "_BACKWARD", OPERATOR)
    properties.assert_compiles(function(), make((2, 16, 32, 32), 24, dtype))


def test_keeps_the_convolutions_output_and_vectors():
    leaves = [t.requires_grad_() for t in make().values()]
    assert harness.extra_saved_bytes(function(), *leaves) <= 4 * (2 * 20 * 7 * 9 + 2 * 20)


@pytest.mark.parametrize("need_dx", [True, False])
def test_the_operator_agrees_with_schema_and_fake(need_dx):
    z, dy = (harness.images((2, 20, 7, 9), "channels_last", seed=seed) for seed in (1, 2))
    vectors = [harness.normal(20, seed=seed).sigmoid() for seed in range(6)]
    inputs = make()
    properties.assert_opcheck(OPERATOR, dy, z, *vectors, 126.0, 2, inputs["x"], inputs["w"], need_dx)
    properties.assert_opcheck(OPERATOR, dy, z, *vectors[:2], *(None,) * 4, 1.0, 0, inputs["x"], inputs["w"], need_dx)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": harness.images((2, 13, 7, 9))}, "x and z in channels_last expected"),
        ({"x": harness.images((2, 13, 7, 8), "channels_last")}, "dy must have the shape of y"),
        ({"w": torch.ones(20, 12, 1, 1)}, "x and z in channels_last expected, and a weight for their channels"),
        ({"w": torch.ones(21, 13, 1, 1)}, r"weight must have the shape \[D, C, 1, 1\]"),
        ({"dy": harness.images((2, 20, 7, 8), "channels_last")}, "dy must have the shape"),
        ({"sum_dz": None}, "both sums or none expected"),
        ({"mean": torch.ones(3)}, "mean must have 20 elements, got 3"),
        ({"act": 99}, "act must be a code from 0 to"),
    ],
)
def test_the_operator_refuses_what_does_not_fit(changed, message):
    images = {name: harness.images((2, 20, 7, 9), "channels_last") for name in ("dy", "z")}
    vectors = {name: torch.ones(20) for name in ("mean", "rstd", "weight", "bias", "sum_dz", "sum_dz_xhat")}
    inputs = make()
    given = images | vectors | {"count": 126.0, "act": _codes.code("act", "silu", _codes.ACTIVATIONS)}
    given |= {"x": inputs["x"], "w": inputs["w"], "need_dx": True}
    OPERATOR(*given.values())
    with pytest.raises(RuntimeError, match=message):
        OPERATOR(*(given | changed).values())


def test_nothing_gives_nothing():
    z = torch.empty(0, 20, 7, 9).contiguous(memory_format=torch.channels_last)
    x = torch.empty(0, 13, 7, 9).contiguous(memory_format=torch.channels_last)
    vectors = [torch.ones(20) for _ in range(6)]
    dx, dw = OPERATOR(z, z, *vectors, 1.0, 0, x, torch.ones(20, 13, 1, 1), True)
    assert dx.shape == x.shape and dw.shape == (20, 13, 1, 1) and not dw.any()

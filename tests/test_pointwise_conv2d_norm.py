"""A 1x1 convolution, batch normalisation and an activation, with the gradient between them taken from the cache."""

import dataclasses
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
from fusedtrain.ops import _activation, _codes, _common
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


def by_kernel(x, *_) -> bool:
    return takes(x.dtype) and x.is_contiguous(memory_format=torch.channels_last)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The gradients of both as one, on any CPU; counts them."""
    if reason := harness.why_not("cpu", "cpu", "pointwise_conv2d"):
        pytest.skip(reason)
    made = []
    monkeypatch.setattr(MODULE, "_LARGE", 1)
    monkeypatch.setattr(MODULE, "_EXPANDS", 0)
    monkeypatch.setattr(MODULE, "_PIXELS", 0)
    monkeypatch.setattr(MODULE, "_AS_ONE", (torch.float32, torch.bfloat16))
    monkeypatch.setattr(MODULE, "by_kernel", by_kernel)
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
    fixed = not (case["training"] or case["affine"]) and case["act"] in ("identity", "relu")
    assert len(calls) == (count if takes(dtype) and not fixed else 0)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
def test_derivatives_of_torch_func_are_those_of_stock_layers(training, layout):
    inputs = make((2, 16, 80, 80), 48, layout=layout)  # large enough for the gradients of both to be taken as one
    leaves, along = tuple(inputs.values()), tuple(torch.ones_like(t) for t in inputs.values())

    def of(kind):
        def call(*leaves):
            x, w, *affine = leaves
            norm = *((None, None) if training else (torch.zeros(48), torch.ones(48))), *affine, training, 0.3, 1e-3
            if kind is stock:
                return F.silu(F.batch_norm(F.conv2d(x, w), *norm)).square().mean()
            return pointwise_conv2d_norm(x, w, None, *norm, act="silu").square().mean()

        return call

    for transform in (
        lambda function: torch.func.grad(function, argnums=(0, 1, 2, 3))(*leaves),
        lambda function: torch.func.jvp(function, leaves, along),
    ):
        expected = transform(of(stock))
        for name in (None, "reference"):
            with fusedtrain.use_backend(name):
                assert all(map(torch.equal, transform(of(ours)), expected))
    with fusedtrain.use_backend("reference"), torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(t, d).requires_grad_() for t, d in zip(leaves, along)]
        made = [torch.autograd.forward_ad.unpack_dual(of(kind)(*duals)).tangent for kind in (ours, stock)]
        assert torch.equal(*made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "out"),
    [((2, 16, 48, 48), 96), ((1, 96, 48, 48), 24), ((2, 40, 28, 28), 240), ((2, 112, 14, 14), 672)],
)
def test_layers_of_real_networks(shape, out, dtype):
    draws = [make(shape, out, dtype, seed=seed) for seed in range(2)]
    harness.assert_op_as_good_as_torch(function(), function(of=stock), draws)


@harness.needs_memory(17)
def test_more_than_2_to_the_31_elements(calls):
    if not takes(torch.bfloat16):
        pytest.skip("the kernel multiplies bfloat16 by instructions only")
    inputs = make((3, 64, 64, 64), 64, torch.bfloat16)
    inputs["x"][1] = 0

    def of_a_batch(counts, x, w, gamma, beta):
        return F.silu(properties.weighted_batch_norm(counts, F.conv2d(x, w), gamma, beta, 1e-3))

    properties.assert_thousands_of_images_are_as_good_as_torch(function(), of_a_batch, inputs, "cpu", "cpu")
    assert len(calls) == 1


def test_results_written_past_the_caches():
    fused, torchs = function("identity"), function("identity", of=stock)
    harness.assert_op_as_good_as_torch(fused, torchs, make((2, 96, 105, 105), 16))


@pytest.mark.parametrize("layout", harness.LAYOUTS)
def test_any_strides_are_as_good_as_torch(layout, calls):
    draws = [make((3, 24, 9, 11), 40, layout=layout, seed=seed) for seed in range(4)]
    harness.assert_op_as_good_as_torch(function(), function(of=stock), draws)
    dense = _common.dense(draws[0]["x"].detach())
    assert len(calls) == (4 if _common.is_channels_last(dense) else 0)


def test_a_fixed_norm_is_passed_through_without_sums(monkeypatch):
    inputs, made = make(), []
    norm = MODULE.NORM_IMPLS["cpu"]
    counted = dataclasses.replace(norm, reduce=lambda *args: made.append(1) or norm.reduce(*args))
    monkeypatch.setitem(MODULE.NORM_IMPLS, "cpu", counted)
    frozen = function(training=False), function(training=False, of=stock)
    harness.assert_op_as_good_as_torch(*frozen, [make(seed=seed) for seed in range(4)], frozen=("gamma", "beta"))
    assert not made
    harness.evaluate(function(training=False), inputs)
    assert made


def test_what_is_not_taken_as_one_is_as_good(calls):
    def apply(stride, op, x, w, bias):
        return op(x, w, bias, None, None, training=True, stride=stride)

    def torchs(x, w, bias, *_, training, stride):
        return F.batch_norm(F.conv2d(x, w, bias, stride), None, None, training=training)

    for stride, biased in (((2, 2), False), (1, True), ((1, 2), True)):
        draws = [make((3, 13, 9, 11), affine=False, seed=seed) for seed in range(4)]
        draws = [d | {"bias": harness.normal(20, seed=seed) if biased else None} for seed, d in enumerate(draws)]
        ops = (functools.partial(apply, stride, op) for op in (pointwise_conv2d_norm, torchs))
        # The bias itself has no gradient but rounding: the mean takes it away.
        harness.assert_op_as_good_as_torch(*ops, draws, frozen=("bias",))
    inputs = make()
    with torch.no_grad():
        function()(*inputs.values())
    harness.evaluate(function(), inputs, frozen=("w",))
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_inputs_change_nothing(dtype):
    properties.assert_frozen_inputs_change_nothing(function(), make((3, 24, 29, 47), 40, dtype))


def test_takes_any_incoming_gradient():
    properties.assert_takes_any_incoming_gradient(function(), make())


def test_takes_what_hooks_lay_out_anew(calls):
    properties.assert_takes_what_hooks_lay_out_anew(function(), function(of=stock), make())
    assert calls


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
    z, x = (harness.images((2, c, 7, 9), "channels_last") for c in (0, 13))
    dx, dw = OPERATOR(z, z, *[torch.ones(0)] * 6, 126.0, 0, x, torch.ones(0, 13, 1, 1), True)
    assert dx.shape == x.shape and not dx.any() and dw.shape == (0, 13, 1, 1)


@pytest.mark.parametrize(
    ("change", "meets"),
    [
        ({}, True),
        ({"out": 64}, True),
        ({"out": 64, "dtype": torch.bfloat16}, False),
        ({"out": 31, "shape": (1, 16, 128, 256)}, False),  # not twice as many channels
        ({"shape": (1, 16, 128, 127)}, False),  # too few elements
        ({"shape": (1, 32, 128, 64), "out": 64}, True),
        ({"shape": (1, 32, 128, 63), "out": 80}, False),  # too few pixels for eight threads
        ({"isa": "portable"}, False),
        ({"exporting": True}, False),
    ],
)
def test_where_both_are_taken_as_one(change, meets, monkeypatch):
    monkeypatch.undo()
    given = {"shape": (1, 16, 128, 128), "out": 32, "dtype": torch.float32, "isa": "avx512_bf16"} | change
    for name, value in (("cpu_vendor", "amd"), ("cpu_family", 26), ("isa_active", given["isa"])):
        monkeypatch.setitem(_extension.BUILD_INFO, name, value)
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", given.get("exporting", False))
    inputs = make(given["shape"], given["out"], given["dtype"])
    n, _, h, w = given["shape"]
    z = torch.empty(n, given["out"], h, w, dtype=given["dtype"], memory_format=torch.channels_last)
    weight = inputs["w"].requires_grad_()
    assert MODULE._meet(inputs["x"], weight, None, [1, 1], z, False) == meets
    assert not MODULE._meet(inputs["x"], weight, None, [2, 2], z, False)
    assert not MODULE._meet(inputs["x"], weight, z, [1, 1], z, False)
    assert not MODULE._meet(inputs["x"], weight.detach(), None, [1, 1], z, False)


SYNC_CHILD = """
import os, sys, torch, fusedtrain
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
module = sys.modules["fusedtrain.ops.pointwise_conv2d_norm"]
module._LARGE, module._PIXELS, module.by_kernel, calls = 1, 0, lambda *_: True, []
backward = module._BACKWARD
module._BACKWARD = lambda *args: calls.append(1) or backward(*args)
x, *others = (t.requires_grad_() for t in torch.load(f"{folder}/{rank}.pt"))
group = torch.distributed.group.WORLD
with fusedtrain.use_backend("cpu"):
    w, gamma, beta = others
    y = module.pointwise_conv2d_norm(x, w, None, None, None, gamma, beta, True, act="silu", process_group=group)
    y.backward(y.detach().cos())
assert len(calls) == 1
torch.save([y.detach(), x.grad, *(t.grad for t in others)], f"{folder}/results{rank}.pt")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
os._exit(0)
"""


def test_processes_share_statistics_as_if_their_batches_were_one(tmp_path):
    whole = make((4, 13, 7, 9), 40)
    x, *others = whole.values()
    for rank, images in enumerate((x[:3], x[3:])):
        torch.save([images.clone(memory_format=torch.channels_last), *others], tmp_path / f"{rank}.pt")
    ranks = [harness.start_python("-c", SYNC_CHILD, str(i), str(tmp_path), OMP_NUM_THREADS="1") for i in range(2)]
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.detach().to(dtype).requires_grad_() for t in whole.values()]
        y = F.silu(F.batch_norm(F.conv2d(*leaves[:2]), None, None, *leaves[2:], training=True))
        y.backward(y.detach().cos())
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    assert [child.wait(timeout=120) for child in ranks] == [0, 0]
    first, second = (torch.load(tmp_path / f"results{rank}.pt") for rank in range(2))
    ours = [
        *(torch.cat(parts) for parts in zip(first[:2], second[:2])),
        *(a + b for a, b in zip(first[2:], second[2:])),
    ]
    for k, (value, stock_, truth) in enumerate(zip(ours, *results)):
        harness.assert_as_good_as_torch(value, stock_, truth, f"result {k}")

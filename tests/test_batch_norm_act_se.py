"""Batch normalisation, activation and squeeze-and-excitation as one op, behind a convolution of any kind."""

import copy
import functools

import cases
import harness
import properties
import pytest
import torch
from test_fuse import assert_model_as_good_as_torch
from torch import nn

import fusedtrain
import fusedtrain.nn.depthwise_bn_act_se as layers
from fusedtrain.ops import _codes
from fusedtrain.ops.batch_norm_act import reference as norm_reference
from fusedtrain.ops.batch_norm_act_se import batch_norm_act_se
from fusedtrain.ops.squeeze_excite import reference as gate_reference

R = 6  # squeeze channels: fewer than a vector holds
OPTIONS = ("silu", "relu", "sigmoid", False)
CASES = cases.pairwise(
    shape=[name for name in cases.SHAPES if name not in ("no_channels", "no_pixels")],  # refused, or NaN all over
    layout=harness.LAYOUTS,
    dtype=harness.DTYPES,
    training=[True, False],
    act=[act for act in _codes.INPUT_ACTIVATIONS if act != "relu6"],
    se_act=("relu", "silu"),
    gate=("sigmoid", "hard_sigmoid"),
    bare=[False, True],
    residual=("none", "added", "relu behind"),
)
# The truth is of float64 itself: where few numbers are repeated its errors, the same for all of them, are above ours.
REPEATED = {"dtype": torch.float64, "layout": "expanded"}
CASES = [case | ({"layout": "sliced"} if case.items() >= REPEATED.items() else {}) for case in CASES]
dense_layouts = pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)


def make(
    device, shape=(3, 13, 7, 9), layout="contiguous", dtype=torch.float32, bare=False, residual=False, seed=0
) -> dict:
    c = shape[1]

    def normal(*size, scale=1.0):
        normal.seed += 100
        return (harness.normal(*size, dtype=torch.float64, seed=seed + normal.seed) * scale).to(device, dtype)

    normal.seed = 0
    scale = max(c, 1) ** -0.5
    inputs = {"x": harness.images(shape, layout, dtype, device, seed)}
    inputs |= {"w1": normal(R, c, 1, 1, scale=scale), "w2": normal(c, R, 1, 1, scale=R**-0.5)}
    if not bare:
        inputs |= {"weight": normal(c).sigmoid(), "bias": normal(c), "b1": normal(R), "b2": normal(c)}
    if residual:
        inputs |= {"residual": harness.images(shape, layout, dtype, device, seed + 50)}
    return inputs


def run(names, of, training, options, running, *tensors):
    given = dict(zip(names, tensors))
    like = given.get("weight", given["x"])
    mean = torch.linspace(-1, 1, given["x"].shape[1], dtype=torch.float64).to(like)
    var = torch.linspace(0.5, 2, given["x"].shape[1], dtype=torch.float64).to(like)
    se = tuple(given.get(name) for name in ("w1", "b1", "w2", "b2"))
    norm = (mean, var, given.get("weight"), given.get("bias"))
    y = of(given["x"], *norm, se, training, 0.3, 1e-3, *options, given.get("residual"))
    return (y, mean, var) if running else y


def ours(x, mean, var, weight, bias, se, training, momentum, eps, act, se_act, gate, relu, residual):
    options = {"act": act, "se_act": se_act, "gate": gate, "relu": relu, "residual": residual}
    return batch_norm_act_se(x, mean, var, weight, bias, se, training, momentum, eps, **options)


def stock(x, mean, var, weight, bias, se, training, momentum, eps, act, se_act, gate, relu, residual=None):
    a = norm_reference(x, mean, var, weight, bias, training, momentum, eps, act, None, False)
    y = gate_reference(a, *se, se_act, gate, "avg", "identity")
    y = y if residual is None else y + residual
    return y.relu() if relu else y


def function(inputs, training=True, options=OPTIONS, running=False, of=ours):
    return functools.partial(run, tuple(inputs), of, training, options, running)


def skip_unless_runs(backend, device, dtype=torch.float32, *, interpreted=False):
    harness.skip_unless_runs(backend, device, "depthwise_bn_act_se", dtype)
    if backend == "triton" and device == "cpu" and not interpreted:
        pytest.skip("Triton's interpreter runs the same kernels in test_depthwise_bn_act_se")


@pytest.mark.parametrize("case", CASES, ids=cases.label)
def test_output_gradients_and_running_statistics_are_as_good_as_torch(device, backend, case):
    skip_unless_runs(backend, device, case["dtype"], interpreted=case in CASES[::16])
    harness.skip_strides_of_reference(backend, case["layout"])
    shape = cases.SHAPES[case["shape"]]
    training = case["training"] and shape[:1] + shape[2:] != (1, 1, 1)  # one value per channel is refused
    relu, residual = case["residual"] == "relu behind", case["residual"] != "none"
    options = (*(case[name] for name in ("act", "se_act", "gate")), relu)
    # The fewer elements, the more often torch's own error is small by chance.
    count = 8 if shape[1] > 8 else 32 if shape[1] > 1 else 64
    count = count if not harness.interpreted(backend, device) else count // 4
    kind = (case["layout"], case["dtype"], case["bare"], residual)
    draws = [make(device, shape, *kind, seed) for seed in range(count)]
    calls = (function(draws[0], training, options, running=True, of=of) for of in (ours, stock))
    harness.assert_op_as_good_as_torch(*calls, draws, "batch_norm_act_se", any_order=True)


@dense_layouts
@pytest.mark.parametrize("channels", [64, 130, 264])  # rows that are asked for ahead and not, whole and in part
@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
@pytest.mark.parametrize("residual", [False, True])
def test_rows_of_many_channels(device, kernels, layout, channels, dtype, residual):
    skip_unless_runs(kernels, device, dtype)
    draws = [make(device, (2, channels, 23, 11), layout, dtype, residual=residual, seed=seed) for seed in range(4)]
    options = (*OPTIONS[:3], residual)
    calls = (function(draws[0], options=options, of=of) for of in (ours, stock))
    harness.assert_op_as_good_as_torch(*calls, draws, layout)


@harness.needs_memory(17)
@dense_layouts
def test_more_than_2_to_the_31_elements(device, kernels, layout):
    inputs = make(device, (3, 64, 64, 64), layout, torch.bfloat16, residual=True)
    inputs["x"][1] = inputs["residual"][1] = 0

    def of_a_batch(counts, x, w1, w2, weight, bias, b1, b2, residual):
        a = torch.nn.functional.silu(properties.weighted_batch_norm(counts, x, weight, bias, 1e-3))
        return gate_reference(a, w1, b1, w2, b2, *OPTIONS[1:3], "avg", "identity") + residual

    calls = functools.partial(run, tuple(inputs), ours, True, OPTIONS, False), of_a_batch
    properties.assert_thousands_of_images_are_as_good_as_torch(*calls, inputs, kernels, device, ("x", "residual"))


@dense_layouts
def test_given_moments_are_taken(device, kernels, layout):
    skip_unless_runs(kernels, device)
    inputs = make(device, layout=layout)
    x, w1, w2, weight, bias, b1, b2 = inputs.values()
    var, mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    moments = (mean + 1).float(), (var * 189 * 4).float()  # not its own: they are not looked at again

    def shifted(x, mean, var, weight, bias, se, training, *others):
        options = dict(zip(("act", "se_act", "gate"), others[2:]))
        return batch_norm_act_se(x, None, None, weight, bias, se, True, eps=1e-12, moments=moments, **options)

    y = function(inputs, of=shifted)(*inputs.values())
    u = weight[:, None, None] * (x - moments[0][:, None, None]) / (2 * var.float().sqrt()[:, None, None])
    truth = gate_reference(
        *(t.double() for t in (torch.nn.functional.silu(u + bias[:, None, None]), w1, b1, w2, b2)),
        *("relu", "sigmoid", "avg", "identity"),
    )
    assert (y - truth).abs().max() < 1e-5


@dense_layouts
def test_gradients_are_derivatives(device, backend, layout):
    skip_unless_runs(backend, device, torch.float64)
    for training in (True, False):
        inputs = make(device, (2, 3, 3, 2), layout, torch.float64, residual=not training)
        options = ("silu", "silu", "sigmoid", not training)
        properties.assert_gradients_are_derivatives(function(inputs, training, options), inputs)


@dense_layouts
def test_compiles_as_one_graph_and_once(device, backend, layout):
    skip_unless_runs(backend, device)
    inputs = make(device, layout=layout, dtype=torch.bfloat16)
    properties.assert_compiles(function(inputs), inputs)


def test_compiles_where_x_is_the_residual(device, backend):
    skip_unless_runs(backend, device)
    normalise, inputs = function(make(device, residual=True)), make(device)
    properties.assert_compiles(lambda x, *others: normalise(x, *others, x), inputs)


@dense_layouts
def test_keeps_its_input_and_vectors(device, kernels, layout):
    skip_unless_runs(kernels, device)
    n, c, *_ = shape = (2, 16, 9, 9)
    inputs = make(device, shape, layout, torch.bfloat16)
    leaves = [t.requires_grad_() for t in inputs.values()]
    extra = harness.extra_saved_bytes(function(inputs), *leaves)
    assert extra == (2 * c + n * (c + R + c)) * 4  # mean, rstd; pooled, hidden, logits


@dense_layouts
@pytest.mark.parametrize("training", [True, False])
def test_repeats_bitwise_whatever_the_threads_and_frozen_inputs_change_nothing(device, kernels, layout, training):
    skip_unless_runs(kernels, device)
    inputs = make(device, (5, 24, 33, 31), layout, residual=training)
    call = function(inputs, training, (*OPTIONS[:3], training))
    properties.assert_repeats_bitwise(call, inputs)
    properties.assert_writes_every_element(call, inputs)
    properties.assert_frozen_inputs_change_nothing(call, inputs)
    if kernels == "cpu":
        properties.assert_threads_change_nothing(call, inputs)


def test_second_derivatives_are_refused(device, kernels):
    skip_unless_runs(kernels, device)
    inputs = make(device)
    properties.assert_second_derivative_is_refused(function(inputs), inputs)
    properties.assert_takes_any_incoming_gradient(function(inputs), inputs)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": torch.ones(2, 13, 5)}, ValueError, "x must have shape"),
        ({"weight": torch.ones(12)}, ValueError, r"weight must have shape \[13\]"),
        ({"w1": torch.ones(6, 12, 1, 1)}, ValueError, r"w1 must have shape \[R, 13\]"),
        ({"b2": torch.ones(6)}, ValueError, r"b2 must have shape \[13\]"),
        ({"w2": torch.ones(13, 6, dtype=torch.float64)}, TypeError, "must have the dtype of x"),
        ({"x": torch.ones(1, 13, 1, 1)}, ValueError, "more than 1 value per channel"),
        ({"eps": 0.0}, ValueError, "eps must be positive in training, got 0.0"),
        ({"residual": torch.ones(3, 13, 7, 1)}, ValueError, "residual must have the shape of x"),
        ({"residual": torch.ones(3, 13, 7, 9).bfloat16()}, TypeError, "residual must have the dtype of x"),
        ({"relu": True}, ValueError, "relu follows the sum with residual, which is None"),
    ],
)
def test_bad_input_is_refused_before_statistics_move(backend, changed, error, message):
    skip_unless_runs(backend, "cpu")
    inputs = make("cpu") | changed
    se = tuple(inputs[name] for name in ("w1", "b1", "w2", "b2"))
    mean, var = torch.zeros(13), torch.ones(13)
    options = {name: inputs[name] for name in ("residual", "relu", "eps") if name in inputs}
    with pytest.raises(error, match=message):
        batch_norm_act_se(inputs["x"], mean, var, inputs["weight"], inputs["bias"], se, True, **options)
    assert backend == "reference" or (not mean.any() and bool((var == 1).all()))


SYNC_CHILD = """
import os, sys, torch, fusedtrain
from fusedtrain.ops.batch_norm_act_se import batch_norm_act_se
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
x, w1, w2, weight, bias, b1, b2 = leaves = [t.requires_grad_() for t in torch.load(f"{folder}/{rank}.pt")]
group = torch.distributed.group.WORLD
with fusedtrain.use_backend("cpu"):
    y = batch_norm_act_se(x, None, None, weight, bias, (w1, b1, w2, b2), True, act="silu", process_group=group)
    y.backward(y.detach().cos())
torch.save([y.detach(), *(t.grad for t in leaves)], f"{folder}/results{rank}.pt")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
os._exit(0)
"""


def test_processes_share_statistics_as_if_their_batches_were_one(tmp_path):
    if reason := harness.why_not("cpu", "cpu", "depthwise_bn_act_se"):
        pytest.skip(reason)
    whole = make("cpu", (4, 13, 7, 9), "channels_last")
    x, *others = whole.values()
    for rank, images in enumerate((x[:3], x[3:])):
        torch.save([images.clone(memory_format=torch.channels_last), *others], tmp_path / f"{rank}.pt")
    ranks = [harness.start_python("-c", SYNC_CHILD, str(i), str(tmp_path), OMP_NUM_THREADS="1") for i in range(2)]
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.detach().to(dtype).requires_grad_() for t in whole.values()]
        x, w1, w2, weight, bias, b1, b2 = leaves
        y = stock(x, None, None, weight, bias, (w1, b1, w2, b2), True, 0.1, 1e-5, *OPTIONS)
        y.backward(y.detach().cos())
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    assert [child.wait(timeout=120) for child in ranks] == [0, 0]
    first, second = (torch.load(tmp_path / f"results{rank}.pt") for rank in range(2))
    together = [
        *(torch.cat(parts) for parts in zip(first[:2], second[:2])),
        *(a + b for a, b in zip(first[2:], second[2:])),
    ]
    for k, (value, stock_, truth) in enumerate(zip(together, *results)):
        harness.assert_as_good_as_torch(value, stock_, truth, f"result {k}")


# --- through fuse -----------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    made, real = [], layers.batch_norm_act_se

    def spy(*args, **options):
        made.append((options["residual"] is not None, options["relu"]))
        return real(*args, **options)

    monkeypatch.setattr(layers, "batch_norm_act_se", spy)
    return made


class Hidden(nn.Module):
    """A block of one's own, with a grouped convolution and a gate written out."""

    def __init__(self, c=16):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(c, c, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(c)
        self.fc1, self.fc2 = nn.Conv2d(c, 4, 1), nn.Conv2d(4, c, 1)

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x)))
        gate = torch.sigmoid(self.fc2(torch.relu(self.fc1(y.mean((2, 3), keepdim=True)))))
        return x + y * gate


def regnet(zoo):
    return zoo.timm.models.regnet.Bottleneck(16, 16, group_size=8, se_ratio=0.25)


def se_resnet(zoo):
    return zoo.timm.models.resnet.Bottleneck(16, 4, attn_layer=zoo.timm.layers.SEModule)


def torchvisions(zoo):
    kind = zoo.torchvision.models.regnet.BottleneckTransform
    return kind(16, 16, 1, nn.BatchNorm2d, nn.ReLU, 8, 1.0, 0.25)


def own(zoo):
    return Hidden()


SUMS = {"own": (True, False), "se_resnet": (True, True), "regnet": (False, False), "torchvisions": (False, False)}


@pytest.mark.parametrize("block", [own, regnet, se_resnet, torchvisions], ids=lambda block: block.__name__)
def test_gates_behind_any_convolution_join_its_norm(zoo, calls, block):
    torch.manual_seed(0)
    stock_block = block(zoo)
    with torch.no_grad():  # zeros, in timm, at the end of a block
        for norm in stock_block.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.weight.uniform_(0.5, 1.5)
    fused = copy.deepcopy(stock_block)
    fusedtrain.fuse(fused)
    assert list(fused.state_dict()) == list(stock_block.state_dict())
    entry = nn.Conv2d(3, 16, 1)
    for training in (True, False):
        pair = (nn.Sequential(entry, m).train(training) for m in (fused, stock_block))
        assert_model_as_good_as_torch(*pair, f"{block.__name__}, training {training}", size=9)
        calls.clear()
        copy.deepcopy(fused)(harness.images((2, 16, 9, 9)))
        assert calls == [SUMS[block.__name__]]
    fusedtrain.unfuse(fused)
    assert [type(m) for m in fused.modules()] == [type(m) for m in stock_block.modules()]


def test_a_gate_that_is_watched_or_of_another_kind_is_called(zoo, calls):
    torch.manual_seed(0)
    fused = regnet(zoo)
    fusedtrain.fuse(fused)
    seen, x = [], harness.images((2, 16, 9, 9))
    copy.deepcopy(fused)(x)
    assert len(calls) == 1
    fused.se.register_forward_hook(lambda *_: seen.append(1))
    fused(x)
    assert len(calls) == 1 and seen == [1]

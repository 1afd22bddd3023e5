"""mlp: y = r + s (W2 a(W1 x + b1) + b2), over rows and images; its layers, and the blocks of ConvNeXt."""

import copy
import sys

import cases
import harness
import properties
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fusedtrain
from fusedtrain import _extension
from fusedtrain import backend as backends
from fusedtrain.nn import Mlp
from fusedtrain.nn.mlp import CNBlock, ConvMlp, ConvNeXtBlock
from fusedtrain.nn.recorded import Recorded
from fusedtrain.ops import _codes, mlp
from fusedtrain.ops.mlp import IMPLS, reference

STOCK_ON_GPUS = True  # see conftest.py

ACT, ACT_BACKWARD = torch.ops.fusedtrain.mlp_act.default, torch.ops.fusedtrain.mlp_act_backward_.default
SCALE, SCALE_BACKWARD = torch.ops.fusedtrain.mlp_scale.default, torch.ops.fusedtrain.mlp_scale_backward.default
SMOOTH = ["identity", "silu", "gelu"]  # of others the kinks show how products are rounded
ENDS = ["nothing", "residual", "scale", "scale and residual", "scale in float32", "scale and residual in float32"]
ROWS = [(2, 9, 13), (1, 1), (300, 64), (3, 4, 5, 24), (17,), (0, 13), (2, 0, 13)]
SIZES = [(20, 11), (33, 64)]  # K, D
dense_layouts = pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)


def make(device="cpu", x=None, dtype=torch.float32, k=20, d=11, biases=True, end="scale and residual", seed=0) -> dict:
    """Inputs over x, by default rows; over images the matrices are those of convolutions."""
    x = harness.normal(2, 9, 13, dtype=dtype, device=device, seed=seed) if x is None else x
    images = x.dim() == 4 and not getattr(x, "rows", False)
    c, pixel = x.shape[1 if images else -1], (1, 1) if images else ()
    wide = torch.float32 if "float32" in end and dtype != torch.float64 else dtype

    def normal(*shape, of=1, dtype=dtype, part=0):
        return (harness.normal(*shape, seed=10 * seed + part) * of**-0.5).to(dtype).to(device)

    shape = (*x.shape[:1], d, *x.shape[2:]) if images else (*x.shape[:-1], d)
    residual = normal(*shape, dtype=wide, part=6)
    if images and x.is_contiguous(memory_format=torch.channels_last):
        residual = residual.contiguous(memory_format=torch.channels_last)
    return {
        "x": x,
        "w1": normal(k, c, *pixel, of=max(c, 1), part=1),
        "b1": normal(k, part=2) if biases else None,
        "w2": normal(d, k, *pixel, of=k, part=3),
        "b2": normal(d, part=4) if biases else None,
        "s": normal(d, dtype=wide, part=5) if "scale" in end else None,
        "r": residual if "residual" in end else None,
    }


def rows(shape, dtype, device, seed=0):
    x = harness.normal(*shape, dtype=dtype, device=device, seed=seed)
    x.rows = True
    return x


def function(act="gelu"):
    return lambda x, w1, b1, w2, b2, s, r: mlp(x, w1, b1, w2, b2, act=act, scale=s, residual=r)


def reference_of(act="gelu"):
    return lambda *inputs: reference(*inputs, act)


def assert_as_good(draw, act, count=4):
    draws = [draw(seed) for seed in range(count)]
    if draws[0]["x"].numel() < 20:  # a few numbers tell little of torch's errors
        draws += [draw(seed) for seed in range(count, 40)]
    harness.assert_op_as_good_as_torch(function(act), reference_of(act), draws, "mlp")


@pytest.mark.parametrize(
    "case",
    cases.pairwise(
        shape=ROWS, dtype=harness.DTYPES, act=SMOOTH, end=ENDS, biases=[True, False], sizes=[(20, 11), (33, 64)]
    ),
    ids=cases.label,
)
def test_rows_are_as_good_as_torch(device, backend, case):
    def draw(seed):
        x = rows(case["shape"], case["dtype"], device, seed)
        return make(device, x, case["dtype"], *case["sizes"], case["biases"], case["end"], seed)

    assert_as_good(draw, case["act"])


@pytest.mark.parametrize(
    "case",
    cases.pairwise(
        shape=[name for name in cases.SHAPES if not name.startswith("no_")],  # of which torch knows no convolution
        layout=harness.DENSE_LAYOUTS,
        dtype=harness.DTYPES,
        act=SMOOTH,
        end=ENDS,
        biases=[True, False],
        sizes=SIZES,
    ),
    ids=cases.label,
)
def test_images_are_as_good_as_torch(device, backend, case):
    def draw(seed):
        x = harness.images(cases.SHAPES[case["shape"]], case["layout"], case["dtype"], device, seed)
        return make(device, x, case["dtype"], *case["sizes"], case["biases"], case["end"], seed)

    assert_as_good(draw, case["act"])


@pytest.mark.parametrize("dtype", harness.DTYPES)
@pytest.mark.parametrize("act", sorted(set(_codes.INPUT_ACTIVATIONS) - set(SMOOTH)))
@pytest.mark.parametrize("kind", ["rows", *harness.DENSE_LAYOUTS])
def test_activations_with_kinks_are_as_good_as_torch(device, backend, kind, act, dtype):
    """Of whole numbers every product is exact."""
    x = rows((40, 6), dtype, device) if kind == "rows" else harness.images((2, 6, 5, 7), kind, dtype, device)
    inputs = make(device, x, dtype)
    for name in ("x", "w1", "b1"):
        inputs[name] = inputs[name].mul(2).round().clamp(-4, 4)
    harness.assert_op_as_good_as_torch(function(act), reference_of(act), inputs, "mlp")


@pytest.mark.parametrize("layout", harness.LAYOUTS)
@pytest.mark.parametrize("end", ["nothing", "scale and residual"])
def test_images_of_any_strides(device, backend, layout, end):
    harness.skip_strides_of_reference(backend, layout)

    def draw(seed):
        inputs = make(device, harness.images((2, 13, 7, 9), layout, device=device, seed=seed), end=end, seed=seed)
        if inputs["r"] is not None:
            inputs["r"] = harness.images((2, 11, 7, 9), layout, device=device, seed=seed + 50)
        return inputs

    draws = [draw(seed) for seed in range(4)]
    for inputs in draws:
        ours, stock, truth = (
            harness.evaluate(f, values, dy=torch.ones_like(inputs["x"][:, :11]).to(dtype))
            for f, values, dtype in (
                (function(), inputs, torch.float32),
                (reference_of(), inputs, torch.float32),
                (reference_of(), harness.cast(inputs, torch.float64), torch.float64),
            )
        )
        for name in ours:
            harness.assert_as_good_as_torch(ours[name], stock[name], truth[name], name)


def test_one_image_is_taken_like_a_batch_of_one(device, backend):
    inputs = make(device, harness.images((1, 13, 7, 9), device=device))
    one = {name: t[0] if name in ("x", "r") else t for name, t in inputs.items()}
    assert torch.equal(function()(*one.values()), function()(*inputs.values())[0])


@pytest.mark.parametrize("strides", ["transposed", "sliced", "expanded"])
def test_rows_of_any_strides(device, backend, strides):
    def strided(t):
        return {
            "transposed": lambda: t.transpose(0, 1).contiguous().transpose(0, 1),
            "sliced": lambda: torch.stack([t, t], -1)[..., 0],
            "expanded": lambda: t[:1].expand_as(t),
        }[strides]()

    inputs = make(device, rows((4, 9, 13), torch.float32, device))
    inputs |= {name: strided(inputs[name]) for name in ("x", "r")}
    harness.assert_op_as_good_as_torch(function(), reference_of(), inputs, "mlp")


@pytest.mark.parametrize("kind", ["rows", *harness.DENSE_LAYOUTS])
@pytest.mark.parametrize("act", SMOOTH)
def test_gradients_are_derivatives(device, backend, kind, act):
    x = rows((4, 3), torch.float64, device) if kind == "rows" else harness.images((2, 3, 2, 2), kind, torch.float64)
    properties.assert_gradients_are_derivatives(function(act), make(device, x, torch.float64, 5, 4))


@pytest.mark.parametrize("kind", ["rows", *harness.DENSE_LAYOUTS])
def test_operators_agree_with_schema_and_fake(device, kernels, kind):
    dtype = torch.bfloat16
    z = rows((40, 6), dtype, device) if kind == "rows" else harness.images((2, 6, 5, 7), kind, dtype, device)
    gelu, scale = _codes.INPUT_ACTIVATIONS.index("gelu"), harness.normal(6, device=device)
    properties.assert_opcheck(ACT, z, gelu)
    properties.assert_opcheck(ACT_BACKWARD, z.clone(), z, gelu, True)
    properties.assert_opcheck(ACT_BACKWARD, z.clone(), z, gelu, False, symbolic=False)
    properties.assert_opcheck(SCALE, z, scale, z.float(), True)
    properties.assert_opcheck(SCALE, z, scale, None, False, symbolic=False)
    properties.assert_opcheck(SCALE_BACKWARD, z.float(), z, scale)


@pytest.mark.parametrize("kind", ["rows", *harness.DENSE_LAYOUTS])
def test_compiles_as_one_graph_and_once(device, backend, kind):
    dtype = torch.bfloat16
    x = rows((40, 6), dtype, device) if kind == "rows" else harness.images((2, 6, 5, 7), kind, dtype, device)
    properties.assert_compiles(function(), make(device, x, dtype, end="scale and residual in float32"))


def test_compiles_where_the_residual_is_x(device, kernels):
    inputs = make(device, harness.images((2, 11, 5, 7), device=device), d=11)
    del inputs["r"]
    properties.assert_compiles(lambda x, *others: function()(x, *others, x), inputs)


@pytest.mark.parametrize(("end", "kept"), [("nothing", 20), ("residual", 20), ("scale and residual", 20 + 11)])
def test_keeps_what_stands_before_the_activation_and_the_scale(device, kernels, end, kept):
    leaves = [t if t is None else t.requires_grad_() for t in make(device, end=end).values()]
    assert harness.extra_saved_bytes(function(), *leaves) == 2 * 9 * kept * 4


@pytest.mark.parametrize("kind", ["rows", *harness.DENSE_LAYOUTS])
@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_evaluation_computes_the_same_in_less_memory(device, kernels, act, kind):
    """The activation takes the place of what it reads, also where that goes past the caches."""
    for n, size, k in ((2, 7, 20), (2, 64, 272)):
        shape = (n, 11, size, size + 1)
        x = rows((n * size * size, 11), torch.float32, device) if kind == "rows" else harness.images(shape, kind)
        inputs = make(device, x.to(device), k=k)
        recorded = function(act)(**{**inputs, "w1": inputs["w1"].clone().requires_grad_()})
        with torch.no_grad():
            assert torch.equal(function(act)(**inputs), recorded)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorder, torch.no_grad():
        function(act)(**inputs)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in recorder.events())
    h = n * size * (size if kind == "rows" else size + 1) * k * 4
    assert allocated < 1.5 * h


@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
@pytest.mark.parametrize("kind", ["rows", *harness.DENSE_LAYOUTS])
def test_repeats_bitwise_and_writes_every_element(device, backend, kind, dtype):
    x = rows((40, 6), dtype, device) if kind == "rows" else harness.images((2, 6, 5, 7), kind, dtype, device)
    properties.assert_repeats_bitwise(function(), make(device, x, dtype))
    properties.assert_writes_every_element(function(), make(device, x, dtype))


@pytest.mark.parametrize("kind", ["rows", *harness.DENSE_LAYOUTS])
def test_threads_change_nothing(device, kernels, kind):
    x = rows((5000, 24), torch.float32, device) if kind == "rows" else harness.images((5, 24, 33, 31), kind)
    properties.assert_threads_change_nothing(function(), make(device, x, k=40))


@pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
def test_sums_of_the_channels_are_split_between_threads_alike(device, kernels, layout):
    x = harness.images((100, 4, 2, 3), layout, device=device)
    properties.assert_threads_change_nothing(function(), make(device, x, k=700))


@pytest.mark.parametrize("kind", ["rows", *harness.DENSE_LAYOUTS])
def test_frozen_inputs_change_nothing(device, backend, kind):
    x = rows((40, 6), torch.float32, device) if kind == "rows" else harness.images((2, 6, 5, 7), kind, device=device)
    properties.assert_frozen_inputs_change_nothing(function(), make(device, x))


@pytest.mark.parametrize("kind", ["rows", *harness.DENSE_LAYOUTS])
def test_any_incoming_gradient(device, kernels, kind):
    x = rows((2, 5, 7, 6), torch.float32, device) if kind == "rows" else harness.images((2, 6, 5, 7), kind)
    properties.assert_takes_any_incoming_gradient(function(), make(device, x))


def test_takes_what_hooks_lay_out_anew(device, kernels):
    x = harness.images((2, 6, 5, 7), "channels_last", device=device)
    properties.assert_takes_what_hooks_lay_out_anew(function(), reference_of(), make(device, x))


def test_second_derivative_is_refused(device, kernels):
    properties.assert_second_derivative_is_refused(function(), make(device))


def test_long_sums_are_as_good_as_torch(device, kernels):
    def draw(seed):
        return make(device, rows((30_000, 3), torch.float32, device, seed), k=5, d=4, seed=seed)

    harness.assert_op_as_good_as_torch(function(), reference_of(), [draw(seed) for seed in range(2)], "mlp")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_where_torch_has_it(device, backend, value):
    inputs = make(device)
    inputs["x"][1, 2, 3] = value
    ours, stock = (harness.evaluate(f, inputs) for f in (function(), reference_of()))
    for name in ours:
        assert torch.equal(ours[name].isfinite(), stock[name].isfinite()), name


def test_nested_tensors_are_left_to_torch():
    x, *layers, _, _ = make().values()
    ragged = torch.nested.nested_tensor([x[0], x[1, :4]])
    for ours, stock in zip(mlp(ragged, *layers).unbind(), reference(ragged, *layers, None, None, "gelu").unbind()):
        assert torch.equal(ours, stock)


def test_dtypes_of_scale_and_residual_are_promoted_as_in_torch(device, backend):
    for dtype in harness.DTYPES:
        x = rows((40, 6), dtype, device)
        for s in (None, *harness.DTYPES):
            for r in (None, *harness.DTYPES):
                inputs = make(device, x, dtype)
                inputs["s"] = None if s is None else inputs["s"].to(s)
                inputs["r"] = None if r is None else inputs["r"].to(r)
                lacks = backend == "cpu" and s is not None and torch.float64 in (s, r) and dtype != torch.float64
                if lacks:
                    with pytest.raises(RuntimeError, match=r"y torch\.float64; the kernels write torch\.\w+( or|$)"):
                        function()(**inputs)
                else:
                    assert function()(**inputs).dtype == reference_of()(*inputs.values()).dtype, (dtype, s, r)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_the_products_alone(device, backend, dtype):
    inputs = {name: t.requires_grad_() for name, t in make(device).items()}
    with torch.autocast(device, dtype=dtype):
        ours, stock = function()(**inputs), reference_of()(*inputs.values())
    truth = reference_of()(*(t.detach().double() for t in inputs.values()))
    harness.assert_as_good_as_torch(ours, stock, truth, "y")
    assert ours.dtype == torch.float32
    ours.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in inputs.values())
    integers = inputs | {"x": inputs["x"].long()}
    with torch.autocast(device, dtype=dtype), pytest.raises(TypeError, match=r"x must be float32, .* got torch.int64"):
        function()(**integers)


@pytest.mark.parametrize("kind", ["rows", "channels_last"])
def test_where_the_cpu_lacks_bfloat16_it_is_as_good_as_torch(kind, monkeypatch):
    if reason := harness.why_not("cpu", "cpu", "linear"):
        pytest.skip(reason)
    monkeypatch.setitem(_extension.BUILD_INFO, "isa_active", "avx2")
    monkeypatch.setattr(sys.modules["fusedtrain.ops.mlp"], "_SMALL", 0)
    monkeypatch.setattr(sys.modules["fusedtrain.ops.linear"], "_SMALL_CONVERTED", 0)

    def draw(seed):
        dtype = torch.bfloat16
        x = (
            rows((40, 6), dtype, "cpu", seed)
            if kind == "rows"
            else harness.images((2, 6, 5, 7), kind, dtype, seed=seed)
        )
        return make(x=x, dtype=dtype, end="scale and residual in float32", seed=seed)

    assert_as_good(draw, "gelu")


@harness.needs_memory(16)
def test_more_than_2_to_the_31_elements(device, kernels):
    x = harness.normal(1000, dtype=torch.bfloat16, device=device).repeat((1 << 25) // 1000 + 1)[:, None]
    w1, w2 = (harness.normal(*shape, dtype=torch.bfloat16, device=device) for shape in ((64, 1), (2, 64)))
    assert torch.equal(mlp(x, w1, None, w2, None)[-1000:], mlp(x[-1000:], w1, None, w2, None))


@pytest.mark.skipif(not _extension.LOADED, reason=str(_extension.WHY_NOT))
@pytest.mark.parametrize("kind", ["rows", "channels_last"])
def test_stock_runs_what_is_small_and_more_without_gradients(kind):
    def chosen(elements, recording):
        x = rows((elements // 20, 13), torch.float32, "cpu")
        x = x if kind == "rows" else x.t().reshape(1, 13, -1, 1).contiguous(memory_format=torch.channels_last)
        inputs = [t if t is None else t.requires_grad_(recording) for t in make(x=x, k=20, end="nothing").values()]
        return backends.select("mlp", IMPLS, *inputs, 0)

    for small, recording in ((500_000, True), (2_000_000, False)):
        assert chosen(small, recording) is IMPLS["cpu"] and chosen(small - 20, recording) is IMPLS["reference"]


@pytest.mark.parametrize(("kind", "name"), [("rows", "linear"), ("channels_last", "pointwise_conv2d")])
def test_the_products_of_what_is_small_go_by_their_own_rules(kind, name, monkeypatch):
    module, calls = sys.modules["fusedtrain.ops.mlp"], []
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: calls.append(name) or real(*args))
    x = rows((40, 6), torch.float32, "cpu") if kind == "rows" else harness.images((2, 6, 5, 7), kind)
    inputs = make(x=x)
    assert torch.equal(function()(**inputs), reference_of()(*inputs.values())) and calls == [name] * 2


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "mlp: x must be a Tensor, got list"),
        ({"x": torch.tensor(1.0)}, ValueError, r"x must have shape \[..., C\], got \[\]"),
        ({"x": torch.ones(2, 3).int()}, TypeError, r"x must be float32, .* got torch.int32"),
        ({"w1": torch.ones(4, 2)}, ValueError, r"w1 must have shape \[K, C\] .* with C = 3, got \[4, 2\]"),
        ({"w1": None}, ValueError, r"w1 must have shape \[K, C\] .* got NoneType"),
        ({"w1": torch.ones(4, 3, 1, 1)}, ValueError, r"x must have shape \[N, C, H, W\], got \[2, 3\]"),
        ({"w2": torch.ones(5, 3)}, ValueError, r"w2 must have shape \[D, K\] with K = 4, got \[5, 3\]"),
        ({"w2": torch.ones(5, 4, 1, 1)}, ValueError, r"w2 must have shape \[D, K\] with K = 4, got \[5, 4, 1, 1\]"),
        ({"b1": torch.ones(5)}, ValueError, r"b1 must have shape \[K\] = \[4\] or be None, got \[5\]"),
        ({"b2": torch.ones(4)}, ValueError, r"b2 must have shape \[D\] = \[5\] or be None, got \[4\]"),
        ({"scale": torch.ones(1, 5)}, ValueError, r"scale must have shape \[D\] = \[5\] or be None, got \[1, 5\]"),
        ({"residual": torch.ones(2, 3)}, ValueError, r"residual must have shape \[2, 5\] or be None, got \[2, 3\]"),
        ({"w2": torch.ones(5, 4).half()}, TypeError, r"w2 must have the dtype of x .* got torch.float16"),
        ({"b1": torch.ones(4).double()}, TypeError, r"b1 must have the dtype of x .* got torch.float64"),
        ({"scale": torch.ones(5, device="meta")}, RuntimeError, "scale is on meta, but x is on cpu"),
        ({"act": "sigmoid"}, ValueError, "act must be one of identity, relu, .* got 'sigmoid'"),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    arguments = {"x": torch.ones(2, 3), "w1": torch.ones(4, 3), "b1": None, "w2": torch.ones(5, 4), "b2": None}
    with pytest.raises(error, match=message):
        mlp(**(arguments | changes))


# --- layers and blocks ------------------------------------------------------------------------------------------------


def drawn(layer: nn.Module) -> nn.Module:
    """The layer with numbers of a usual size everywhere."""
    for i, p in enumerate(layer.parameters()):
        with torch.no_grad():
            p.copy_(harness.normal(*p.shape, seed=i) * (p.numel() / len(p)) ** -0.5)
    return layer


def fused(layer: nn.Module) -> nn.Module:
    """A copy of it, fused."""
    layer = nn.Sequential(copy.deepcopy(layer), nn.Conv2d(1, 1, 3))  # Linear layers of networks that convolve
    fusedtrain.fuse(layer)
    return layer[0]


MLPS = {
    "linear": {},
    "conv": {"use_conv": True},
    "silu": {"act_layer": nn.SiLU, "bias": (True, False)},
    "an activation that the op lacks": {"act_layer": nn.Tanh},
    "gelu by tanh": {"act_layer": lambda: nn.GELU(approximate="tanh")},
    "dropout behind": {"drop": (0.0, 0.5)},
    "dropout": {"drop": 0.5},
    "a norm between": {"norm_layer": nn.LayerNorm},
}


@pytest.mark.parametrize("case", MLPS)
def test_the_layer_is_as_good_as_timms(device, backend, case, zoo):
    from timm.layers.mlp import Mlp as Stock

    options = MLPS[case]
    stock = drawn(Stock(6, 13, 5, **options)).to(device)
    ours = Mlp(6, 13, 5, **options).to(device)
    ours.load_state_dict(stock.state_dict())
    if "drop" in options:
        stock.eval(), ours.eval()
    shape = (2, 6, 7, 9) if "use_conv" in options else (2, 7, 9, 6)
    draws = [harness.normal(*shape, device=device, seed=seed) for seed in range(4)]
    harness.assert_module_as_good_as_torch(ours, stock, draws)
    assert [name for name, _ in ours.named_children()] == [name for name, _ in stock.named_children()]


@pytest.mark.parametrize("case", ["linear", "conv", "dropout behind"])
def test_what_the_activation_makes_is_not_kept(device, kernels, case, zoo):
    images = "use_conv" in MLPS[case]
    layer, x = Mlp(6, 13, **MLPS[case]).to(device), torch.ones((2, 6, 7, 9) if images else (2, 7, 9, 6), device=device)
    end = (2 * 7 * 9 * 6 * 4) if "drop" in MLPS[case] else 0  # its mask, and what it makes
    assert harness.extra_saved_bytes(layer, x.requires_grad_()) <= 2 * 7 * 9 * 13 * 4 + 2 * end + 4 * 6 * 13 * 4


@pytest.mark.parametrize("training", [True, False])
def test_dropout_between_drops(device, backend, training):
    layer = drawn(Mlp(6, 13, drop=(0.5, 0.0))).to(device).train(training)
    x = torch.ones(200, 6, device=device)
    assert torch.equal(layer(x), layer(x)) != training


def block_of(name: str, zoo, **options) -> nn.Module:
    if name == "CNBlock":
        from torchvision.models.convnext import CNBlock as Block

        return drawn(Block(**({"dim": 6, "layer_scale": 0.5, "stochastic_depth_prob": 0.0} | options)))
    from timm.models.convnext import ConvNeXtBlock as Block

    return drawn(Block(6, **options))


BLOCKS = {
    "timm": ("ConvNeXtBlock", {}),
    "timm, convolutions": ("ConvNeXtBlock", {"conv_mlp": True}),
    "timm, no scale": ("ConvNeXtBlock", {"ls_init_value": None}),
    "timm, another shape": ("ConvNeXtBlock", {"out_chs": 12, "stride": 2}),
    "timm, another activation": ("ConvNeXtBlock", {"act_layer": nn.Tanh}),
    "timm, another activation, convolutions": ("ConvNeXtBlock", {"act_layer": nn.Tanh, "conv_mlp": True}),
    "timm, response norm": ("ConvNeXtBlock", {"use_grn": True, "ls_init_value": None}),
    "timm, paths dropped": ("ConvNeXtBlock", {"drop_path": 0.5}),
    "torchvision": ("CNBlock", {}),
    "torchvision, paths dropped": ("CNBlock", {"stochastic_depth_prob": 0.5}),
}


@pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
@pytest.mark.parametrize("case", BLOCKS)
def test_blocks_are_as_good_as_stock(device, backend, case, layout, zoo):
    name, options = BLOCKS[case]
    stock = block_of(name, zoo, **options).to(device)
    ours = fused(stock)
    assert isinstance(ours, CNBlock if name == "CNBlock" else ConvNeXtBlock) and type(ours).__bases__[1] is type(stock)
    draws = [harness.images((2, 6, 9, 10), layout, device=device, seed=seed) for seed in range(4)]
    if "dropped" in case:
        stock.eval(), ours.eval()
    harness.assert_module_as_good_as_torch(ours, stock, draws, case)


@pytest.mark.parametrize("case", [case for case in BLOCKS if "dropped" in case])
def test_blocks_drop_the_paths_that_stock_drops(device, backend, case, zoo):
    name, options = BLOCKS[case]
    stock = block_of(name, zoo, **options).to(device)
    ours, x = fused(stock), harness.images((32, 6, 3, 3), device=device)
    dropped = []
    for block in (stock, ours):
        torch.manual_seed(0)
        dropped.append((block(x) == x).flatten(1).all(1))
    assert torch.equal(*dropped) and 0 < dropped[0].sum() < 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["ConvNeXtBlock", "CNBlock"])
def test_blocks_return_what_stock_returns_under_autocast(device, backend, name, dtype, zoo):
    stock = block_of(name, zoo).to(device)
    ours, x = fused(stock), harness.images((2, 6, 9, 10), "channels_last", dtype, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        theirs, y = stock(x), ours(x)
    assert y.dtype == theirs.dtype and y.stride() == theirs.stride()


@pytest.mark.parametrize("inner", ["act", "fc1", "drop1", "norm"])
def test_hooks_on_inner_layers_see_their_calls(inner, device, backend):
    layer, x = drawn(Mlp(6, 13)).to(device), torch.ones(5, 6, device=device)
    seen, before = [], layer(x)
    getattr(layer, inner).register_forward_hook(lambda module, args, y: seen.append(y.shape))
    assert layer(x).shape == before.shape and seen == [(5, 13)]


@pytest.mark.parametrize("inner", ["mlp", "mlp.act", "mlp.drop2", "drop_path", "norm", "conv_dw", "shortcut"])
def test_hooks_in_timms_block_see_their_calls(inner, device, backend, zoo):
    block, x, seen = fused(block_of("ConvNeXtBlock", zoo)).to(device), torch.ones(2, 6, 9, 10, device=device), []
    block.get_submodule(inner).register_forward_hook(lambda *_: seen.append(inner))
    block(x)
    assert seen == [inner]


@pytest.mark.parametrize("inner", ["block", "block.0", "block.1", "block.2", "block.3", "block.4", "block.6"])
def test_hooks_in_torchvisions_block_see_their_calls(inner, device, backend, zoo):
    block, x, seen = fused(block_of("CNBlock", zoo)).to(device), torch.ones(2, 6, 9, 10, device=device), []
    block.get_submodule(inner).register_forward_hook(lambda *_: seen.append(inner))
    block(x)
    assert seen == [inner]


def test_a_block_whose_layers_were_changed_runs_them(device, backend, zoo):
    stock, x = block_of("CNBlock", zoo).to(device), harness.images((2, 6, 9, 10), device=device)
    changed = fused(stock)
    for block in (changed, stock):  # images of 10x9 in between
        block.block[1].dims, block.block[6].dims = [0, 3, 2, 1], [0, 3, 2, 1]
    assert_computes_as(changed, stock, x)
    changed.block[4], stock.block[4] = nn.ReLU(), nn.ReLU()
    changed.block.append(nn.Tanh()), stock.block.append(nn.Tanh())
    assert_computes_as(changed, stock, x)


def assert_computes_as(ours, stock, x):
    truth = copy.deepcopy(stock).double()(x.double())
    harness.assert_as_good_as_torch(ours(x), stock(x), truth, "what was changed")


def layers_of(name: str, zoo, **options) -> nn.Module:
    from timm.layers.mlp import ConvMlp, Mlp
    from torchvision.ops.misc import MLP

    kinds = {"Mlp": Mlp, "ConvMlp": ConvMlp, "MLP": lambda c, k, drop: MLP(c, [k, c], dropout=drop, inplace=None)}
    return drawn(kinds[name](6, 13, drop=0.5)) if name in kinds else block_of(name, zoo, **options)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["Mlp", "ConvMlp", "MLP", "ConvNeXtBlock", "CNBlock"])
def test_torch_fx_records_the_layers_of_the_stock_class(name, training, zoo):
    """By whose names torchvision finds features; those of torch go from evaluation to training and back."""
    stock = layers_of(name, zoo).train(training)
    graphs = [torch.fx.symbolic_trace(module).graph for module in (stock, fused(stock))]
    theirs, ours = ([(node.op, node.name, node.target) for node in graph.nodes] for graph in graphs)
    assert ours == theirs


def test_convolutions_with_a_norm_between_them_run_one_by_one(device, backend, zoo):
    from timm.layers.mlp import ConvMlp as Stock

    for norm, act in ((None, nn.GELU), (nn.BatchNorm2d, nn.ReLU)):
        stock = drawn(Stock(6, 13, act_layer=act, norm_layer=norm)).to(device)
        ours = fused(stock)
        assert isinstance(ours, ConvMlp)
        draws = [harness.images((2, 6, 7, 9), "channels_last", device=device, seed=seed) for seed in range(4)]
        harness.assert_module_as_good_as_torch(ours, stock, draws)


# --- layers of other classes, found by torch.fx -----------------------------------------------------------------------


class HandWritten(nn.Module):
    """A block as networks write it."""

    def __init__(self, c=6, k=24, drop=0.0, act=None, images=False):
        super().__init__()
        self.norm = nn.LayerNorm(c) if not images else nn.GroupNorm(1, c)
        self.first = nn.Conv2d(c, k, 1) if images else nn.Linear(c, k)
        self.act, self.drop = act, nn.Dropout(drop)
        self.second = nn.Conv2d(k, c, 1) if images else nn.Linear(k, c)

    def between(self, x):
        return self.drop(nn.functional.gelu(x) if self.act is None else self.act(x))

    def forward(self, x):
        return x + self.second(self.between(self.first(self.norm(x))))


class KeepsTheHidden(HandWritten):
    def forward(self, x):
        hidden = self.first(x)
        return x + self.second(self.between(hidden)) * hidden.mean()


class ConvNeXt(nn.Module):
    """A block as the authors of ConvNeXt write it."""

    def __init__(self, c=6, drop=0.0, images=True, scale=(6,), in_place=False):
        super().__init__()
        from timm.layers import DropPath

        self.dwconv, self.norm = nn.Conv2d(c, c, 7, padding=3, groups=c) if images else None, nn.LayerNorm(c)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, c)
        self.gamma, self.drop_path = nn.Parameter(torch.ones(scale)), DropPath(drop) if drop else nn.Identity()
        self.images, self.in_place = images, in_place

    def forward(self, x):
        shortcut = x
        x = self.dwconv(x).permute(0, 2, 3, 1) if self.images else x
        x = self.pwconv2(self.act(self.pwconv1(self.norm(x))))
        x = self.gamma * x
        x = self.drop_path(x.permute(0, 3, 1, 2) if self.images else x)
        if self.in_place:
            x += shortcut
            return x
        return shortcut + x


def hidden_bytes(block, x, k=24) -> float:
    """What is kept for backward beside x, in tensors as large as what stands between the layers."""
    return harness.extra_saved_bytes(block, x.requires_grad_()) / (x.numel() // 6 * k * 4)


HAND_WRITTEN = {
    "a function": {},
    "silu": {"act": nn.SiLU()},
    "convolutions": {"images": True},
    "dropout": {"drop": 0.5},
}


@pytest.mark.parametrize("case", HAND_WRITTEN)
def test_blocks_of_other_classes_become_the_op(device, kernels, case):
    stock = drawn(HandWritten(**HAND_WRITTEN[case])).to(device)
    ours, shape = fused(stock), (2, 6, 33, 31) if "images" in HAND_WRITTEN[case] else (2, 1000, 6)
    assert isinstance(ours, Recorded)
    dropped, x = "drop" in HAND_WRITTEN[case], harness.normal(*shape, device=device)
    assert (hidden_bytes(ours, x) < hidden_bytes(stock, x) - 0.9) != dropped
    if dropped:
        stock.eval(), ours.eval()
        assert hidden_bytes(ours, x) < hidden_bytes(stock, x) - 0.9
    draws = [harness.normal(*shape, device=device, seed=seed) for seed in range(2)]
    harness.assert_module_as_good_as_torch(ours, stock, draws)


@pytest.mark.parametrize(
    "stock",
    [KeepsTheHidden(), HandWritten(k=6), HandWritten(act=nn.Tanh()), HandWritten(act=nn.GELU(approximate="tanh"))],
    ids=["another user", "no wider", "another activation", "gelu by tanh"],
)
def test_blocks_that_are_something_else_stay(stock):
    assert type(fused(stock)) is type(stock)


def test_what_is_changed_in_such_a_block_counts(device, kernels):
    stock = drawn(HandWritten(act=nn.GELU())).to(device)
    ours, x, seen = fused(stock), harness.normal(2, 1000, 6, device=device), []
    ours.first.register_forward_hook(lambda *_: seen.append("first"))
    ours(x)
    assert seen == ["first"]
    for block in (stock, ours):
        block.second = drawn(nn.Sequential(nn.Linear(24, 6), nn.Tanh())).to(device)
        block.drop.p = 0.5
        block.eval()
    assert_computes_as(ours, stock, x)


CONVNEXTS = {
    "images": ({}, ["scale", "residual"]),
    "contiguous images": ({}, ["scale"]),
    "rows": ({"images": False}, ["scale", "residual"]),
    "paths dropped": ({"drop": 0.5}, ["scale"]),
    "a sum in place": ({"in_place": True}, ["scale"]),
    "one factor": ({"scale": (1,)}, []),
    "a factor for each number": ({"scale": (1, 1, 6)}, []),
}


@pytest.mark.parametrize("case", CONVNEXTS)
def test_blocks_as_convnexts_authors_write_them_become_the_op(device, kernels, case, zoo, monkeypatch):
    options, ends = CONVNEXTS[case]
    stock = drawn(ConvNeXt(**options)).to(device)
    ours, shape = fused(stock), (2, 6, 9, 10) if options.get("images", True) else (2, 9, 10, 6)
    assert isinstance(ours, Recorded)
    real, seen = sys.modules["fusedtrain.nn.mlp"].mlp, []

    def spy(*args, **options):
        seen[:] = [name for name in ("scale", "residual") if options.get(name) is not None]
        return real(*args, **options)

    monkeypatch.setattr(sys.modules["fusedtrain.nn.mlp"], "mlp", spy)
    layout = "channels_last" if case == "images" else "contiguous"
    x = harness.images(shape, layout, device=device)
    torch.manual_seed(0)
    y = ours(x)
    assert seen == ends
    torch.manual_seed(0)
    theirs = stock(x)
    torch.manual_seed(0)
    harness.assert_as_good_as_torch(y, theirs, copy.deepcopy(stock).double()(x.double()), "y")
    if "dropped" not in case:
        draws = [harness.images(shape, layout, device=device, seed=seed) for seed in range(2)]
        harness.assert_module_as_good_as_torch(ours, stock, draws)


def test_a_residual_of_another_shape_is_added_as_it_is(device, kernels, zoo):
    class Summed(ConvNeXt):
        def forward(self, x):
            return x.mean((2, 3), keepdim=True) + self.gamma_of(x)

        def gamma_of(self, x):
            x = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
            return (self.gamma * self.pwconv2(self.act(self.pwconv1(x)))).permute(0, 3, 1, 2)

    stock = drawn(Summed()).to(device)
    ours = fused(stock)
    assert isinstance(ours, Recorded)
    draws = [harness.images((2, 6, 9, 10), device=device, seed=seed) for seed in range(2)]
    harness.assert_module_as_good_as_torch(ours, stock, draws)


@pytest.mark.parametrize("drop", [0.0, 0.5])
@pytest.mark.parametrize("layers", [[24, 6], [24], [24, 24, 6]])
def test_torchvisions_layers_are_as_good_as_stock(device, backend, layers, drop, zoo):
    from torchvision.ops.misc import MLP as Stock

    stock = drawn(Stock(6, layers, activation_layer=nn.GELU, inplace=None, dropout=drop)).to(device).eval()
    ours = fused(stock)
    assert (type(ours).__bases__[-1] is Stock) == (len(layers) > 1)
    draws = [harness.normal(2, 5, 6, device=device, seed=seed) for seed in range(4)]
    harness.assert_module_as_good_as_torch(ours, stock, draws)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("convnext_atto", "ConvNeXtBlock"), ("convnext_tiny", "ConvNeXtBlock"), ("poolformer_s12", "Mlp")],
)
def test_networks_with_it_are_fused_and_come_back(name, blocks, zoo):
    with torch.device("meta"):
        model = zoo.timm.create_model(name, num_classes=10)
    kinds, names = [type(m) for m in model.modules()], list(model.state_dict())
    report = fusedtrain.fuse(model)
    count = sum(kind.__name__ == blocks for kind in kinds)
    assert sum(c.after is not None and c.after.endswith(f"mlp.{blocks}") for c in report) == count > 0
    assert list(model.state_dict()) == names
    fusedtrain.unfuse(model)
    assert [type(m) for m in model.modules()] == kinds

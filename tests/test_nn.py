"""The layers against the originals of timm and torchvision: names, weights, initial values, outputs, gradients, use."""

import contextlib
import copy
import functools
import inspect
import itertools
import pickle
import sys

import cases
import harness
import properties
import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import fusedtrain
from fusedtrain.nn.depthwise_bn_act_se import middle

C = 24
GROUP_NORM = functools.partial(nn.GroupNorm, 2)


class HandWrittenSE(nn.Module):
    """The form found in most repositories, see https://github.com/moskomule/senet.pytorch."""

    def __init__(self, channels, reduction=16, bias=False, act_layer=nn.ReLU, gate_layer=nn.Sigmoid):
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(
            nn.Linear(channels, channels // reduction, bias=bias),
            act_layer(),
            nn.Linear(channels // reduction, channels, bias=bias),
            gate_layer(),
        )

    def forward(self, x):
        n, c = x.shape[:2]
        return x * self.fc(self.avg_pool(x).view(n, c)).view(n, c, 1, 1)


class Middle(nn.Module):
    """A convolution, a normalisation and a gate in one op; the outer two or None."""

    def __init__(self, conv, norm, se):
        super().__init__()
        self.conv, self.norm, self.se = conv, norm, se

    def forward(self, x):
        return middle(x, self.conv, self.norm, (), self.se)


# The class -> where the original stands.
ORIGINALS = {
    "SqueezeExcite": "timm.models._efficientnet_blocks.SqueezeExcite",
    "SEModule": "timm.layers.squeeze_excite.SEModule",
    "SENetModule": "timm.models.senet.SEModule",
    "SqueezeExcitation": "torchvision.ops.misc.SqueezeExcitation",
    "SEBlock": None,
    "EffectiveSEModule": "timm.layers.squeeze_excite.EffectiveSEModule",
    "EseModule": "timm.models.hgnet.EseModule",
    "EcaModule": "timm.layers.eca.EcaModule",
    "CecaModule": "timm.layers.eca.CecaModule",
    "SqueezeExciteCl": "timm.layers.squeeze_excite.SqueezeExciteCl",
    "GlobalContext": "timm.layers.global_context.GlobalContext",
    "SplitAttn": "timm.layers.split_attn.SplitAttn",
    "CbamModule": "timm.layers.cbam.CbamModule",
    "LightCbamModule": "timm.layers.cbam.LightCbamModule",
    "GlobalResponseNorm": "timm.layers.grn.GlobalResponseNorm",
    "GlobalResponseNormMlp": "timm.layers.mlp.GlobalResponseNormMlp",
    "Mlp": "timm.layers.mlp.Mlp",
}

# label -> class, arguments, whether the whole layer is one op
CASES = {
    "SqueezeExcite": ("SqueezeExcite", {"in_chs": C}, True),
    "SqueezeExcite silu": ("SqueezeExcite", {"in_chs": C, "act_layer": nn.SiLU, "rd_channels": 5}, True),
    "SqueezeExcite hard": ("SqueezeExcite", {"in_chs": C, "gate_layer": "hard_sigmoid", "rd_ratio": 0.1}, True),
    "SqueezeExcite forced": ("SqueezeExcite", {"in_chs": C, "force_act_layer": nn.Hardswish, "rd_round_fn": int}, True),
    "SqueezeExcite mish": ("SqueezeExcite", {"in_chs": C, "act_layer": "mish"}, False),
    "SEModule": ("SEModule", {"channels": C}, True),
    "SEModule max": ("SEModule", {"channels": C, "add_maxpool": True, "rd_divisor": 1, "rd_ratio": 0.3}, True),
    "SEModule plain": ("SEModule", {"channels": C, "bias": False, "act_layer": nn.GELU, "gate_layer": "tanh"}, True),
    "SEModule norm": ("SEModule", {"channels": C, "act_layer": "silu", "norm_layer": GROUP_NORM}, False),
    "SEModule norm max": (
        "SEModule",
        {"channels": C, "act_layer": "gelu", "norm_layer": GROUP_NORM, "add_maxpool": True},
        False,
    ),
    "SEModule leaky": ("SEModule", {"channels": C, "act_layer": functools.partial(nn.LeakyReLU, 0.1)}, False),
    "SENetModule": ("SENetModule", {"channels": C, "reduction": 3}, True),
    "SqueezeExcitation": ("SqueezeExcitation", {"input_channels": C, "squeeze_channels": 7}, True),
    "SqueezeExcitation hard": (
        "SqueezeExcitation",
        {
            "input_channels": C,
            "squeeze_channels": 8,
            "activation": functools.partial(nn.SiLU, inplace=True),
            "scale_activation": nn.Hardsigmoid,
        },
        True,
    ),
    "SqueezeExcitation elu": (
        "SqueezeExcitation",
        {"input_channels": C, "squeeze_channels": 8, "activation": nn.ELU},
        False,
    ),
    "SEBlock": ("SEBlock", {"channels": C}, True),
    "SEBlock bias": ("SEBlock", {"channels": C, "reduction": 4, "bias": True, "act_layer": nn.SiLU}, True),
    "SEBlock softplus": ("SEBlock", {"channels": C, "gate_layer": nn.Softplus}, False),
    "EffectiveSEModule": ("EffectiveSEModule", {"channels": C, "rd_ratio": 0.5}, False),
    "EffectiveSEModule max": (
        "EffectiveSEModule",
        {"channels": C, "add_maxpool": True, "gate_layer": "sigmoid"},
        False,
    ),
    "EseModule": ("EseModule", {"chs": C}, False),
    "EcaModule": ("EcaModule", {"channels": C}, False),
    "EcaModule k5": ("EcaModule", {"kernel_size": 5, "gate_layer": nn.Tanh}, False),
    "EcaModule mlp": ("EcaModule", {"channels": C, "use_mlp": True, "act_layer": nn.SiLU}, False),
    "CecaModule": ("CecaModule", {"channels": C}, False),
    "CecaModule k7": ("CecaModule", {"kernel_size": 7, "act_layer": nn.ReLU}, False),
    "SqueezeExciteCl": ("SqueezeExciteCl", {"channels": C}, True),
    "SqueezeExciteCl mish": ("SqueezeExciteCl", {"channels": C, "bias": False, "act_layer": "mish"}, False),
    # A norm over three hidden channels, as many as the ratio would give, makes much of the rounding of their mean.
    "GlobalContext": ("GlobalContext", {"channels": C, "rd_channels": 16, "act_layer": nn.SiLU}, False),
    "GlobalContext add": (
        "GlobalContext",
        {"channels": C, "rd_channels": 16, "fuse_add": True, "fuse_scale": False},
        False,
    ),
    "GlobalContext both": (
        "GlobalContext",
        {"channels": C, "rd_channels": 16, "fuse_add": True, "use_attn": False, "gate_layer": "hard_sigmoid"},
        False,
    ),
    "SplitAttn": ("SplitAttn", {"in_channels": C}, False),
    "SplitAttn groups": (
        "SplitAttn",
        {"in_channels": C, "groups": 2, "radix": 3, "stride": 2, "bias": True, "norm_layer": GROUP_NORM},
        False,
    ),
    "SplitAttn alone": (
        "SplitAttn",
        {"in_channels": C, "out_channels": 8, "radix": 1, "rd_channels": 5, "act_layer": nn.SiLU},
        False,
    ),
    "CbamModule": ("CbamModule", {"channels": C}, False),
    "CbamModule bias": (
        "CbamModule",
        {"channels": C, "rd_ratio": 0.3, "mlp_bias": True, "gate_layer": "hard_sigmoid", "act_layer": nn.Mish},
        False,
    ),
    "LightCbamModule": ("LightCbamModule", {"channels": C, "spatial_kernel_size": 3, "gate_layer": "tanh"}, False),
    "GlobalResponseNorm": ("GlobalResponseNorm", {"dim": C, "channels_last": False}, False),
    "GlobalResponseNormMlp": ("GlobalResponseNormMlp", {"in_features": C, "use_conv": True, "drop": (0.0, 0.0)}, False),
    "Mlp": ("Mlp", {"in_features": C, "hidden_features": 20, "use_conv": True}, False),
}
# Of layers that are more than one gate: their calls of ops.
CALLS = {
    "GlobalContext": ["channel_pool_attention", "scale"],
    "GlobalContext add": ["channel_pool_attention"],
    "CbamModule": ["pool_twice", "joined", "summed", "scale", "pixel_means_and_maxima", "scale_pixels"],
    "CbamModule bias": ["pool_twice", "scale", "pixel_means_and_maxima", "scale_pixels"],
    "LightCbamModule": ["squeeze_excite", "pixel_averages", "scale_pixels"],
    "GlobalResponseNorm": ["normalised"],
    "GlobalResponseNormMlp": ["normalised"],
    "Mlp": [],
}
BY_LAYER = ("GlobalResponseNormMlp", "Mlp")  # torch.fx records their layers, which round what passes between them
CALLS |= {label: ["pool_splits", "normalised", "average"] for label in CASES if label.startswith("SplitAttn")}
ONE_EACH = [label for label in CASES if label in ORIGINALS] + ["SEModule norm"]
case = pytest.mark.parametrize("label", CASES)
one_each = pytest.mark.parametrize("label", ONE_EACH)


def skip_in_the_interpreter(label, backend, device, layout, dtype):
    """In Triton's interpreter, which takes seconds each, one layer of each class, in turns in float32 contiguous and in
    bfloat16 channels_last: its ops run every option there."""
    said = label in ONE_EACH
    if said:
        wide = ONE_EACH.index(label) % 2 == 0
        said = dtype == (torch.float32 if wide else torch.bfloat16) and layout == harness.DENSE_LAYOUTS[not wide]
    if harness.interpreted(backend, device) and not said:
        pytest.skip("Triton's interpreter would take minutes")


def original(name, zoo):
    path = ORIGINALS[name]
    if path is None:
        return HandWrittenSE
    module, _, attribute = path.rpartition(".")
    return getattr(sys.modules[module], attribute)


class OnRows(nn.Module):
    """A layer that takes ``[N, H, W, C]``, for the tests' images."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def on_images(layer):
    return OnRows(layer) if type(layer).__name__ == "SqueezeExciteCl" else layer


def make(label, zoo=None, dtype=torch.float32, device="cpu"):
    """Returns our layer and the original with the same weights (without ``zoo`` ours alone)."""
    name, arguments, _ = CASES[label]
    torch.manual_seed(0)
    ours = on_images(getattr(fusedtrain.nn, name)(**arguments))
    if zoo is None:
        return ours.to(device, dtype)
    stock = on_images(original(name, zoo)(**arguments))
    ours.load_state_dict(stock.state_dict())
    return ours.to(device, dtype), stock.to(device, dtype)


RUNS = 8


def runs_of(module):
    """Returns a function of the images of RUNS runs and the weights of RUNS layers like ``module``, and the weights.

    A layer's smaller gradients have too few numbers for a rule about the largest error; those of RUNS layers have more.
    """
    names = [name for name, _ in module.named_parameters()]

    def function(x, *weights):
        layer = copy.deepcopy(module).to(weights[0].dtype)
        runs = enumerate(x.chunk(RUNS))
        return torch.cat([functional_call(layer, {k: w[i] for k, w in zip(names, weights)}, (run,)) for i, run in runs])

    weights = {
        name: p.detach() * (1 + 0.5 * harness.normal(RUNS, *p.shape, seed=i).to(p))
        for i, (name, p) in enumerate(module.named_parameters())
    }
    return function, weights


def assert_as_good_as_the_original(
    ours, stock, what, layout="contiguous", dtype=torch.float32, device="cpu", frozen=()
):
    function, weights = runs_of(ours)
    x = harness.images((2 * RUNS, C, 5, 3), layout, dtype, device)
    assert list(weights) == [name for name, _ in stock.named_parameters()]
    harness.assert_op_as_good_as_torch(function, runs_of(stock)[0], {"x": x, **weights}, what, frozen=frozen)


@pytest.mark.parametrize("name", [name for name, path in ORIGINALS.items() if path is not None])
def test_constructor_arguments_and_defaults_are_the_originals(name, zoo):
    ours = inspect.signature(getattr(fusedtrain.nn, name)).parameters.values()
    theirs = inspect.signature(original(name, zoo)).parameters.values()
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


@case
def test_attributes_weights_and_initial_values_are_the_originals(label, zoo):
    name, arguments, _ = CASES[label]
    torch.manual_seed(0)
    stock = original(name, zoo)(**arguments)
    torch.manual_seed(0)
    ours = getattr(fusedtrain.nn, name)(**arguments)
    assert vars(ours).keys() == vars(stock).keys()
    assert [key for key, _ in ours.named_children()] == [key for key, _ in stock.named_children()]
    mine, theirs = ours.state_dict(), stock.state_dict()
    assert list(mine) == list(theirs)
    for key, value in theirs.items():
        assert mine[key].dtype == value.dtype and torch.equal(mine[key], value), key


@case
def test_weights_load_both_ways(label, zoo):
    ours, stock = make(label, zoo)
    nn.init.uniform_(next(ours.parameters()))
    stock.load_state_dict(ours.state_dict(), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), stock.state_dict().values()))


@pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@case
def test_output_and_gradients_are_as_good_as_the_originals(label, dtype, layout, device, backend, zoo):
    skip_in_the_interpreter(label, backend, device, layout, dtype)
    ours, stock = make(label, zoo, dtype, device)
    by_batches = any(isinstance(module, nn.BatchNorm2d) for module in stock.modules())
    for mode in ("train", "eval") if by_batches else ("train",):
        getattr(ours, mode)(), getattr(stock, mode)()
        assert_as_good_as_the_original(ours, stock, f"{label} {mode}", layout, dtype, device)


@pytest.mark.parametrize("label", [label for label in CASES if label.startswith("SqueezeExcitation")])
def test_torchvisions_layer_takes_an_image_without_a_batch(label, device, backend, zoo):
    ours, stock = make(label, zoo, device=device)
    x = harness.normal(C, 5, 3, device=device)
    y = ours(x)
    assert y.shape == x.shape
    harness.assert_as_good_as_torch(y, stock(x), copy.deepcopy(stock).double()(x.double()), label)


def test_a_batch_norm_between_the_layers_keeps_its_statistics(zoo):
    ours, stock = (
        cls(C, rd_channels=12, norm_layer=nn.BatchNorm2d) for cls in (fusedtrain.nn.SEModule, original("SEModule", zoo))
    )
    ours.load_state_dict(stock.state_dict())

    def function(module, x):
        module = copy.deepcopy(module).to(x.dtype)
        return module(x), module.eval()(x), module.bn.running_mean, module.bn.running_var

    inputs = {"x": harness.images((16, C, 5, 3))}
    ours, stock = functools.partial(function, ours), functools.partial(function, stock)
    harness.assert_op_as_good_as_torch(ours, stock, inputs, "batch norm", frozen=("x",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@case
def test_autocast_gives_the_originals_dtype_and_values(label, dtype, device, backend, zoo):
    if harness.interpreted(backend, device):
        pytest.skip("slow in Triton's interpreter, where the tests of the ops mix dtypes")

    def autocast(function):
        def run(*args):
            with torch.autocast(device, torch.bfloat16):
                return function(*args)

        return run

    ours, stock = make(label, zoo, device=device)
    ours, weights = runs_of(ours)
    exact = runs_of(stock)[0]
    inputs = {"x": harness.images((2 * RUNS, C, 5, 3), dtype=dtype, device=device), **weights}
    # A layer that is not one op has torch's own layers in bfloat16 between its two ops: the errors of their gradients
    # are luck in ours and in the original alike, so only the dtypes are compared.
    frozen = () if CASES[label][2] else tuple(weights)
    harness.assert_op_as_good_as_torch(autocast(ours), exact, inputs, label, stock=autocast(exact), frozen=frozen)
    mine, theirs = (harness.evaluate(autocast(function), inputs) for function in (ours, exact))
    assert {name: t.dtype for name, t in mine.items()} == {name: t.dtype for name, t in theirs.items()}


@case
def test_one_op_where_the_op_can_express_the_layer_else_its_two_halves(label):
    graph = torch.fx.symbolic_trace(make(label)).graph
    calls = [
        node.target.__name__
        for node in graph.nodes
        if node.op == "call_function" and "fusedtrain" in node.target.__module__
    ]
    ops = CALLS.get(label, ["squeeze_excite"] if CASES[label][2] else ["channel_pool", "scale"])
    takes_single_images = label.startswith("SqueezeExcitation")
    assert calls == (["as_batch", *ops, "as_before"] if takes_single_images else ops)


ACTIVATIONS = [
    "GELU",
    "HardSigmoid",
    "HardSwish",
    "Sigmoid",
    "Swish",
    "Tanh",
    "GELUTanh",
    "QuickGELU",
    "HardMish",
    "PReLU",
]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_timms_activation_classes_are_known_or_run_as_they_are(name, zoo):
    kind = getattr(zoo.timm.layers.activations, name)
    for arguments in ({"act_layer": kind}, {"gate_layer": kind}):
        ours = fusedtrain.nn.SqueezeExcite(C, **arguments)
        stock = original("SqueezeExcite", zoo)(C, **arguments)
        stock.load_state_dict(ours.state_dict())
        assert_as_good_as_the_original(ours, stock, f"{arguments}")


def test_every_activation_name_of_timm_gives_its_layer(zoo):
    for name in {**zoo.timm.layers.create_act._ACT_LAYER_DEFAULT}:
        ours = fusedtrain.nn.SqueezeExcite(C, act_layer=name, gate_layer=name)
        stock = original("SqueezeExcite", zoo)(C, act_layer=name, gate_layer=name)
        stock.load_state_dict(ours.state_dict())
        assert_as_good_as_the_original(ours, stock, name)


def test_half_tanh_gate_is_half_of_one_plus_tanh():
    layer = fusedtrain.nn.SEBlock(C, gate_layer="half_tanh")
    x = harness.images((3, C, 4, 5), dtype=torch.float64)
    gate = 0.5 + 0.5 * torch.tanh(layer.double().fc[:3](x.mean((2, 3))))
    expected = x * gate[:, :, None, None]
    harness.assert_as_good_as_torch(layer(x), expected, expected, "half tanh")


def test_unknown_activations_are_refused_by_name():
    with pytest.raises(ValueError, match=r"one of .*relu.*; got 'rleu'"):
        fusedtrain.nn.SEModule(C, act_layer="rleu")
    with pytest.raises(TypeError, match="a name or a module class, got 3"):
        fusedtrain.nn.EcaModule(C, gate_layer=3)
    with pytest.raises(TypeError, match="got None"):
        fusedtrain.nn.SqueezeExcite(C, gate_layer=None)


def test_eca_refuses_what_has_no_centre_or_no_channels():
    with pytest.raises(ValueError, match="kernel_size must be odd, got 4"):
        fusedtrain.nn.EcaModule(kernel_size=4)
    with pytest.raises(ValueError, match="use_mlp needs channels"):
        fusedtrain.nn.EcaModule(use_mlp=True)


INNER = {"SqueezeExcite": "conv_expand", "SEModule": "bn", "SENetModule": "relu", "SqueezeExcitation": "avgpool"}
INNER |= {"SEBlock": "fc.1", "EffectiveSEModule": "fc", "EseModule": "conv", "EcaModule": "conv", "CecaModule": "gate"}
INNER |= {"SqueezeExciteCl": "layer.fc2", "GlobalContext": "conv_attn", "SplitAttn": "rsoftmax"}
INNER |= {"CbamModule": "channel.fc1", "LightCbamModule": "spatial.conv", "GlobalResponseNormMlp": "act", "Mlp": "fc1"}


@pytest.mark.parametrize("label", INNER)
def test_hooks_on_inner_modules_run_and_change_the_result(label, zoo):
    ours, stock = make(label, zoo)
    for module in (ours, stock):
        module.get_submodule(INNER[label]).register_forward_hook(lambda module, inputs, output: output * 2 - 1)
    assert_as_good_as_the_original(ours, stock, label)
    assert not torch.equal(ours(harness.images((3, C, 4, 5))), make(label)(harness.images((3, C, 4, 5))))


class PowerMean(nn.Module):
    def forward(self, x):
        return x.abs().pow(3).mean((2, 3), keepdim=True).pow(1 / 3)


@pytest.mark.parametrize(
    ("label", "inner", "replacement"),
    [
        ("SqueezeExcite", "act1", nn.Softsign()),
        ("SqueezeExcite", "conv_reduce", nn.Sequential(nn.Conv2d(C, 6, 1), nn.Dropout(0.0))),
        ("SqueezeExcite", "gate", nn.GELU(approximate="tanh")),
        ("SEModule", "bn", nn.GroupNorm(1, 8)),
        ("SqueezeExcitation", "avgpool", PowerMean()),
        ("SqueezeExcitation", "avgpool", nn.AdaptiveMaxPool2d(1)),
        ("SEBlock", "avg_pool", PowerMean()),
        ("SEBlock", "fc", nn.Sequential(nn.Linear(C, C), nn.Sigmoid())),
    ],
)
def test_replaced_inner_modules_take_effect(label, inner, replacement, zoo):
    ours, stock = make(label, zoo)
    setattr(ours, inner, replacement)
    setattr(stock, inner, replacement)
    assert_as_good_as_the_original(ours, stock, label)


def test_parametrized_and_normalised_weights_take_effect(zoo):
    ours, stock = make("SqueezeExcite", zoo)
    for module in (ours, stock):
        torch.manual_seed(0)
        nn.utils.parametrizations.spectral_norm(module.conv_reduce)
        nn.utils.parametrizations.weight_norm(module.conv_expand)
        module.eval()  # spectral_norm's power iteration moves with every call in training
    x = harness.images((3, C, 4, 5))
    with torch.no_grad():
        results = ours(x), stock(x), stock.double()(x.double())
    harness.assert_as_good_as_torch(*results, "parametrized")


def test_a_gate_wider_than_the_images_promotes_as_torch_does(zoo):
    class Float64Sigmoid(nn.Module):
        def forward(self, x):
            return x.double().sigmoid()

    ours, stock = (module for module in make("EcaModule", zoo))
    ours.gate = stock.gate = Float64Sigmoid()
    x = harness.images((3, C, 4, 5))
    assert ours(x).dtype == stock(x).dtype == torch.float64


@one_each
def test_deepcopy_and_pickle_keep_the_layer(label, device, backend):
    layer = make(label, device=device)
    x = harness.images((2, C, 3, 5), device=device)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is type(layer) and torch.equal(other(x), layer(x))


@one_each
def test_compiles_without_graph_break_and_once(label, device, backend):
    if harness.interpreted(backend, device):
        pytest.skip("slow in Triton's interpreter, whose ops are compiled by their own tests")
    if backend == "reference" and label not in CALLS:
        pytest.skip("its ops are compiled by their own tests, and what stands around them with the kernels")
    layer = make(label, device=device)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for seed in (0, 1):
        x = harness.images((2, C, 3, 5), device=device, seed=seed)
        results = []
        for module in (compiled, layer):
            layer.zero_grad()
            leaf = x.clone().requires_grad_()
            y = module(leaf)
            y.backward(torch.ones_like(y))
            results.append([y.detach(), leaf.grad, *(p.grad.clone() for p in layer.parameters())])
        assert all(map(torch.equal, *results))
    assert counter.frame_count == 1
    properties.assert_returned_by_one_name(counter.graphs)


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("SqueezeExcite", {"in_chs": C}),
        ("SEBlock", {"channels": C}),
        ("EcaModule", {"channels": C}),
        ("DepthwiseConv2d", {"in_channels": C}),
        ("DepthwiseBnActSe", {"channels": C, "rd_channels": 3}),
        ("PointwiseConv2d", {"in_channels": C, "out_channels": 3}),
        ("GroupedConv2d", {"in_channels": C, "out_channels": C, "kernel_size": 3, "groups": 2}),
        ("BatchNormAct2d", {"num_features": C}),
    ],
)
def test_compiles_once_for_images_of_any_shape(name, arguments, device):
    """The number of channels is a symbol, too."""
    layer = getattr(fusedtrain.nn, name)(**arguments).to(device).eval()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for shape in ((2, C, 5, 7), (3, C, 9, 6)):
        x = harness.images(shape, device=device)
        assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
@pytest.mark.parametrize("kind", ["norm", "pointwise", "depthwise", "same depthwise", "gated norm", "gated depthwise"])
def test_training_compiles_once_for_any_number_of_pixels(kind, layout, device, kernels):
    """Statistics divide by a number that changes with the images."""
    torch.manual_seed(0)
    if torch.__version__ < (2, 13) and "same" in kind and layout == "channels_last":
        pytest.skip("graphs of torch 2.10 do not know the memory format of padded images of any size, and say so")
    harness.skip_all_but_channels_last(kernels, device, layout)
    if harness.interpreted(kernels, device) and kind not in ("norm", "gated depthwise"):
        pytest.skip("what stands around the kernels is the same with others, and the ops have their own tests")
    convolutions = {
        "pointwise": fusedtrain.nn.PointwiseConv2d(C, C),
        "depthwise": fusedtrain.nn.DepthwiseConv2d(C, padding=1),
    }
    conv, se = convolutions.get(kind.split()[-1]), fusedtrain.nn.SqueezeExcite(C) if "gated" in kind else None
    conv = fusedtrain.nn.DepthwiseConv2dSame(C, stride=2) if "same" in kind else conv
    layers = [nn.ModuleList([conv, fusedtrain.nn.BatchNormAct2d(C, act_layer="silu"), se]).to(device)]
    layers += [copy.deepcopy(layers[0]), copy.deepcopy(layers[0]).double()]
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(middle, fullgraph=True, dynamic=True, backend=counter)
    for shape in ((2, C, 5, 7), (3, C, 9, 6)):
        results = []
        for function, (conv, norm, se) in zip((compiled, middle, middle), layers):
            exact = norm.weight.dtype == torch.float64
            with fusedtrain.use_backend("reference") if exact else contextlib.nullcontext():
                x = harness.images(shape, layout, device=device).to(norm.weight.dtype).requires_grad_()
                y = function(x, conv, norm, (), se)
                y.backward(harness.images(tuple(y.shape), layout, device=device, seed=1).to(y.dtype))
            results.append({"y": y.detach(), "dx": x.grad})
        for name in ("y", "dx"):
            harness.assert_as_good_as_torch(*(result[name] for result in results), name)
    states = [layer.state_dict() for layer in layers]
    grads = [{name: p.grad for name, p in layer.named_parameters()} for layer in layers]
    for values in (states, grads):
        for name in values[0]:
            mine, eager, truth = (one[name] for one in values)
            if truth.is_floating_point():
                harness.assert_as_good_as_torch(mine, eager, truth, name)
            else:
                assert torch.equal(mine, eager)
    if torch.__version__ >= (2, 13):  # others begin again once
        assert counter.frame_count == 1 + ("same" in kind)  # whose padding is another one for even sizes


@pytest.mark.parametrize(("layout", "order"), list(zip(harness.DENSE_LAYOUTS, (1, -1))))
def test_a_norm_compiles_that_runs_twice_by_different_backends(layout, order, monkeypatch):
    """As of crops of two sizes: of small images stock's, which saves the statistics that the other one moves."""
    images = [harness.images((4, C, size, size), layout, seed=size) for size in (6, 12)][::order]
    monkeypatch.setattr(sys.modules["fusedtrain.ops.batch_norm_act"], "_SMALL", (4 * C * 100, "few"))
    monkeypatch.setattr(sys.modules["fusedtrain.ops.batch_norm_act"], "_SMALL_ROWS", {"none before": (0, "")})
    torch._dynamo.reset()
    values = []
    layer = fusedtrain.nn.BatchNormAct2d(C)
    for compiled in (True, False):
        norm = copy.deepcopy(layer).to(torch.float32 if compiled else torch.float64)

        def twice(x, y, norm=norm):
            return norm(x).mean((2, 3)) + norm(y).square().mean((2, 3))

        run = torch.compile(twice, backend="aot_eager", dynamic=True) if compiled else twice
        x, y = (image.detach().to(norm.weight.dtype).requires_grad_() for image in images)
        run(x, y).square().sum().backward()
        values.append([x.grad, y.grad, norm.weight.grad, norm.bias.grad, *norm.buffers()])
    for mine, true in zip(*values):
        torch.testing.assert_close(mine, true.to(mine.dtype))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["norm", "block", "gated norm", "pointwise"])
def test_exports_in_training_for_any_number_of_images(kind, device, kernels, tmp_path):
    layer = fusedtrain.nn.BatchNormAct2d(C) if kind == "norm" else fusedtrain.nn.DepthwiseBnActSe(C, 8)
    if kind == "gated norm":
        layer = Middle(None, fusedtrain.nn.BatchNormAct2d(C), fusedtrain.nn.SqueezeExcite(C))
    elif kind == "pointwise":
        layer = Middle(fusedtrain.nn.PointwiseConv2d(C, C), fusedtrain.nn.BatchNormAct2d(C), None)
    layer = nn.Sequential(layer, copy.deepcopy(layer)).to(device)  # the second one is handed sizes of the first
    sizes = ({0: torch.export.Dim("n")},)
    exported = torch.export.export(layer, (harness.images((2, C, 3, 5), device=device),), dynamic_shapes=sizes)
    torch.export.save(exported, tmp_path / "layer.pt2")
    exported = torch.export.load(tmp_path / "layer.pt2").module()
    x = harness.images((5, C, 3, 5), device=device)
    with torch.no_grad():
        torch.testing.assert_close(exported(x), layer(x))
    for mine, eager in zip(exported.buffers(), layer.buffers()):
        torch.testing.assert_close(mine, eager)


@one_each
def test_export_and_graph_tracing_give_the_same_layer(label, device, backend):
    layer = make(label, device=device).eval()
    x, other = (harness.images((2, C, 3, 5), device=device, seed=seed) for seed in (0, 1))
    exported = torch.export.export(layer, (x,)).module()
    assert torch.equal(exported(other), layer(other))
    with torch.no_grad():
        traced = torch.fx.symbolic_trace(layer)(other)
        if label in BY_LAYER:
            with fusedtrain.use_backend("reference"):
                truth = copy.deepcopy(layer).double()(other.double())
            harness.assert_as_good_as_torch(traced, layer(other), truth, label)
        else:
            assert torch.equal(traced, layer(other))


def test_tensors_that_outlive_a_transform_keep_their_gradients(device, kernels):
    x, kept = harness.images((2, 16, 9, 9), "channels_last", device=device).requires_grad_(), []
    torch.func.grad(lambda x: (kept.append(2 * x), x.sum())[1])(x)
    layer = fusedtrain.nn.DepthwiseConv2d(16, 16, 5, padding=2, groups=16, device=device)
    layer(kept[0]).square().sum().backward()
    (again,) = torch.autograd.grad(layer(2 * x).square().sum(), x)
    assert torch.equal(x.grad, again)


@one_each
def test_derivatives_that_the_ops_lack_are_refused(label, device, backend):
    if backend not in ("cpu", "reference"):
        pytest.skip("some layers are stock PyTorch there")
    layer, x = make(label, device=device).eval(), harness.images((2, C, 3, 5), device=device)

    def forward_mode():
        with torch.no_grad(), forward_ad.dual_level():
            return forward_ad.unpack_dual(layer(forward_ad.make_dual(x, x))).tangent

    for derive in (
        forward_mode,
        lambda: torch.func.jvp(layer, (x,), (x,)),
        lambda: torch.func.grad(lambda x: layer(x).sum())(x),
        lambda: torch.func.vmap(torch.func.grad(lambda x: layer(x[None]).sum()))(x),
    ):
        if backend == "reference":
            assert derive() is not None
        else:
            with pytest.raises(RuntimeError, match=r"no forward-mode and torch.func .*use_backend\('reference'\)"):
                derive()


@one_each
def test_chosen_automatically_the_layers_have_the_derivatives_of_stock_ones(label, device):
    layer, x = make(label, device=device).eval(), harness.images((2, C, 3, 5), device=device)
    weights = dict(layer.named_parameters())

    def loss(weights, image):
        return functional_call(layer, weights, (image[None],)).square().sum()

    def derivatives():
        yield torch.func.jvp(layer, (x,), (x,))[1]
        yield torch.func.grad(lambda x: layer(x).square().sum())(x)
        yield from torch.vmap(torch.func.grad(loss), (None, 0))(weights, x).values()
        yield torch.vmap(layer)(x[:, None])

    with fusedtrain.use_backend(None):
        found = list(derivatives())
    with fusedtrain.use_backend("reference"):
        assert all(map(torch.equal, found, derivatives()))


def test_a_level_of_forward_mode_changes_nothing_for_what_has_no_tangents(device):
    """There is one for all threads: what another one trains goes on in the same kernels."""
    layer, x = fusedtrain.nn.DepthwiseBnActSe(C, 3, device=device), harness.images((2, C, 9, 9), device=device)
    with fusedtrain.use_backend(None), forward_ad.dual_level():
        y = checkpoint(layer, x.requires_grad_(), use_reentrant=False)
    with fusedtrain.use_backend(None):
        y.square().sum().backward()
    assert x.grad is not None


VMAPPED = {
    **{label: lambda device, label=label: make(label, device=device) for label in ONE_EACH},
    "Linear": lambda device: fusedtrain.nn.Linear(5, 7, device=device),
    "PointwiseConv2d": lambda device: fusedtrain.nn.PointwiseConv2d(C, 7, 1, device=device),
    "DepthwiseConv2d": lambda device: fusedtrain.nn.DepthwiseConv2d(C, C, 3, groups=C, device=device),
    "GroupedConv2d": lambda device: fusedtrain.nn.GroupedConv2d(C, C, 3, groups=C // 2, device=device),
    "BatchNorm2d": lambda device: fusedtrain.nn.BatchNorm2d(C, device=device),
}


@pytest.mark.parametrize("label", VMAPPED)
def test_gradients_under_vmap_are_refused_and_results_without_them_are_those_of_the_layer(label, device, backend):
    if backend not in ("cpu", "reference"):
        pytest.skip("some layers are stock PyTorch there")
    layers = [VMAPPED[label](device).eval() for _ in range(2)]
    x = torch.stack([harness.images((2, C, 3, 5), device=device, seed=seed) for seed in range(2)])
    weights, buffers = torch.func.stack_module_state(layers)

    def ensemble():  # gradients of weights that require them outside of vmap
        return torch.vmap(lambda w, b, x: functional_call(layers[0], (w, b), (x,)))(weights, buffers, x)

    for run in (ensemble, lambda: torch.vmap(layers[0])(x)):
        if backend == "reference":
            assert run().requires_grad
        else:
            with pytest.raises(RuntimeError, match=r"no gradient under torch.func.vmap; .*use_backend\('reference'\)"):
                run()
    partly_stock = ("EseModule", "EcaModule", "CecaModule", "SEModule norm", "GlobalContext", "SplitAttn", "CbamModule")
    if backend != "reference" and label not in partly_stock:
        with torch.no_grad():
            assert all(map(torch.equal, torch.vmap(layers[0])(x), map(layers[0], x)))


@pytest.mark.parametrize("label", VMAPPED)
def test_images_under_vmap_may_have_any_layout(label, device, backend):
    """Torch answers no question for channels_last there."""
    if backend not in ("cpu", "reference"):
        pytest.skip("some layers are stock PyTorch there")
    layers = [VMAPPED[label](device).eval() for _ in range(2)]
    weights, buffers = torch.func.stack_module_state(layers)
    x = torch.stack([harness.images((2, C, 3, 5), device=device, seed=seed) for seed in range(3)])
    turned = x.movedim(2, -1).contiguous().movedim(-1, 2)
    with torch.no_grad():
        for images, dim in ((turned, 0), (x.transpose(0, 1).contiguous(), 1)):
            torch.testing.assert_close(torch.vmap(layers[0], dim)(images), torch.stack([layers[0](one) for one in x]))
        ensemble = torch.vmap(lambda w, b: functional_call(layers[0], (w, b), (turned[0],)))(weights, buffers)
        torch.testing.assert_close(ensemble, torch.stack([layer(x[0]) for layer in layers]))


def test_a_norm_under_vmap_is_refused_before_its_statistics_move(device, backend):
    if backend != "cpu":
        pytest.skip("some layers are stock PyTorch there")
    layer = VMAPPED["BatchNorm2d"](device)
    with pytest.raises(RuntimeError, match=r"no gradient under torch.func.vmap"):
        torch.vmap(layer)(torch.stack([harness.images((2, C, 3, 5), device=device)] * 2))
    assert not layer.running_mean.any()


def test_norms_under_vmap_move_the_statistics_of_their_own(device, backend):
    if backend not in ("cpu", "reference"):
        pytest.skip("some layers are stock PyTorch there")
    x = torch.stack([harness.images((2, C, 3, 5), device=device, seed=seed) for seed in range(2)])

    def trained(cls, dtype=torch.float32):
        layers = [cls(C, device=device, dtype=dtype) for _ in x]
        weights, buffers = torch.func.stack_module_state(layers)
        with torch.no_grad():
            y = torch.vmap(lambda w, b, x: functional_call(layers[0], (w, b), (x,)))(weights, buffers, x.to(dtype))
        assert buffers["num_batches_tracked"].tolist() == [1, 1]
        return {"y": y, "running_mean": buffers["running_mean"], "running_var": buffers["running_var"]}

    truth = trained(nn.BatchNorm2d, torch.float64)
    ours, stock = trained(fusedtrain.nn.BatchNorm2d), trained(nn.BatchNorm2d)
    for name, value in ours.items():
        harness.assert_as_good_as_torch(value, stock[name], truth[name], name)


@one_each
def test_gradients_through_checkpoints_may_be_recorded(label, device, backend):
    """Checkpointing hands out what was saved once."""
    layer, x = make(label, device=device).eval(), harness.images((2, C, 3, 5), device=device).requires_grad_()
    y = checkpoint(layer, x, use_reentrant=False)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (plain,) = torch.autograd.grad(layer(x).square().sum(), x)
    with fusedtrain.use_backend("reference"):
        exact, wide = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
        (truth,) = torch.autograd.grad(exact(wide).square().sum(), wide)
    harness.assert_as_good_as_torch(dx, plain, truth, label)


@one_each
def test_torchscript_traces_the_layer(label, device, backend):
    if backend == "triton":
        pytest.skip("TorchScript tells overloads apart by their arguments alone, so it cannot call the .triton ones")
    layer = make(label, device=device).eval()
    x, other = (harness.images((2, C, 3, 5), device=device, seed=seed) for seed in (0, 1))
    with torch.no_grad():
        assert torch.equal(torch.jit.trace(layer, x)(other), layer(other))


class Same(nn.Module):
    """A block whose padding follows from the image."""

    def __init__(self, device, kernel_size=3):
        super().__init__()
        self.conv = fusedtrain.nn.DepthwiseConv2dSame(C, C, kernel_size, stride=2, groups=C, device=device)
        self.norm = fusedtrain.nn.BatchNorm2d(C, device=device)

    def forward(self, x):
        return self.conv(x) + middle(x, self.conv, self.norm, (nn.ReLU(),))


SIZES = ((2, C, 8, 10), (5, C, 9, 11), (3, C, 10, 9))
BY_BATCHES = {
    "BatchNormAct2d": lambda device: fusedtrain.nn.BatchNormAct2d(C, device=device),
    "without statistics": lambda device: fusedtrain.nn.BatchNorm2d(C, track_running_stats=False, device=device).eval(),
    "DepthwiseBnActSe": lambda device: fusedtrain.nn.DepthwiseBnActSe(C, 3, device=device),
    "Same": lambda device: Same(device),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", BY_BATCHES)
def test_torchscript_traces_normalisation_by_batches_of_any_size(kind, device, backend):
    if backend == "triton":
        pytest.skip("TorchScript tells overloads apart by their arguments alone, so it cannot call the .triton ones")
    layer = BY_BATCHES[kind](device)
    traced = torch.jit.trace(copy.deepcopy(layer), harness.images(SIZES[0], device=device), check_trace=False)
    traced.load_state_dict(layer.state_dict())
    for seed, size in enumerate(SIZES):
        x = harness.images(size, device=device, seed=seed)
        torch.testing.assert_close(traced(x), layer(x))
    torch.testing.assert_close(traced.state_dict(), layer.state_dict())


@pytest.mark.parametrize("kernel_size", [3, 1])
def test_padding_by_the_image_is_traced_and_exported_for_any_image(kernel_size, device, backend):
    layer = Same(device, kernel_size).eval()
    x = harness.images(SIZES[0], device=device)
    height, width = (torch.export.Dim(name, min=8, max=64) for name in "hw")
    exported = torch.export.export(layer, (x,), dynamic_shapes=({2: height, 3: width},)).module()
    graphs = [exported]
    if backend != "triton":
        with torch.no_grad():
            graphs.append(torch.jit.trace(layer, x))
    for seed, (_, *size) in enumerate(SIZES):
        x = harness.images((2, *size), device=device, seed=seed)
        for graph in graphs:
            torch.testing.assert_close(graph(x), layer(x))


TRACES = """
import warnings
warnings.resetwarnings()  # as they are without -W
import torch, fusedtrain

class Asks(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

layers = [torch.nn.Conv2d(3, 32, 1), torch.nn.Conv2d(32, 32, 3, groups=32), torch.nn.BatchNorm2d(32), torch.nn.ReLU()]
model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(32, 9)).eval()
assert fusedtrain.fuse(model).swapped
model.append(Asks())
images = [torch.ones(count, 3, 3, 3).to(memory_format=torch.channels_last) for count in (1, 4)]
with warnings.catch_warnings(record=True) as seen, torch.no_grad():
    traced = torch.jit.trace(model, images[0])
    assert torch.equal(traced(images[1]), model(images[1]))
print([warning.filename for warning in seen if warning.category is torch.jit.TracerWarning])
"""


def test_torchscript_is_not_told_of_questions_that_change_no_number():
    done = harness.run_python("-c", TRACES)
    assert done.stdout == "['<string>']\n", done.stdout + done.stderr


@pytest.mark.parametrize("label", [label for label in ONE_EACH if label not in ("SEBlock", "SqueezeExcitation")])
def test_device_and_dtype_reach_every_parameter(label):
    name, arguments, _ = CASES[label]
    layer = getattr(fusedtrain.nn, name)(**arguments, device="meta", dtype=torch.bfloat16)
    tensors = [t for t in layer.state_dict().values() if t.is_floating_point()]
    assert tensors and all(t.device.type == "meta" and t.dtype == torch.bfloat16 for t in tensors)


CONVOLUTIONS = {
    "depthwise": nn.Conv2d(32, 32, 3, padding=1, groups=32),
    "depthwise, twice": nn.Conv2d(32, 64, 5, stride=2, padding=2, groups=32),
    "pointwise": nn.Conv2d(32, 48, 1),
    "pointwise, stride": nn.Conv2d(32, 48, 1, stride=2, bias=False),
    "grouped": nn.Conv2d(32, 32, 3, padding=1, groups=4),
    "reflected": nn.Conv2d(32, 32, 3, padding=1, groups=32, padding_mode="reflect"),
    "from one channel": nn.Conv2d(1, 24, 1),
}


# Of one pixel stock keeps the format of depthwise convolutions here and there.
POOLED = [(kind, pooled) for kind in CONVOLUTIONS for pooled in (False, True) if not (pooled and "depthwise" in kind)]
STRIDED = cases.pairwise(conv=POOLED, dtype=harness.DTYPES, images=(2, 16), norm=(False, True))


@pytest.mark.parametrize(
    ("kind", "pooled", "dtype", "images", "norm"), [(*case.pop("conv"), *case.values()) for case in STRIDED], ids=str
)
def test_images_are_channels_last_behind_the_same_layers_as_before(kind, pooled, dtype, images, norm):
    """Behind those whose weights are, too, whatever their images: what comes from a reshape, for instance, is not."""
    conv = copy.deepcopy(CONVOLUTIONS[kind])
    layers = [nn.AdaptiveAvgPool2d(2 if kind == "reflected" else 1)] * pooled + [conv]
    layers += [nn.BatchNorm2d(conv.out_channels), nn.ReLU()] * norm
    model = nn.Sequential(*layers).to(dtype)
    for weights, layout in itertools.product(("contiguous", "channels_last"), harness.DENSE_LAYOUTS):
        stock = copy.deepcopy(model)
        if weights == "channels_last":
            stock = stock.to(memory_format=torch.channels_last)
        fused = copy.deepcopy(stock)
        assert fusedtrain.fuse(fused).swapped
        strides = []
        for one in (stock, fused):
            x = harness.images((images, conv.in_channels, 20, 20), layout, dtype).requires_grad_()
            y = one(x)
            y.sum().backward()
            strides.append((y.stride(), x.grad.stride()))
        assert strides[0] == strides[1], (weights, layout)


def test_neither_timm_nor_torchvision_is_imported():
    code = (
        "import sys, torch, fusedtrain.nn as nn; [nn.SEModule(8), nn.EcaModule(8), nn.SqueezeExcitation(8, 2)];"
        "print(sorted({'timm', 'torchvision', 'triton'} & set(sys.modules)))"
    )
    result = harness.run_python("-c", code, fresh=True)
    assert result.stdout.strip() == "[]", result.stderr

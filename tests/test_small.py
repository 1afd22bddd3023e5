"""Small images: in evaluation fused layers compute as their stock classes, and only there; in training what a call
costs in Python counts."""

import copy
import gc
import sys

import harness
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusedtrain
from fusedtrain import backend
from fusedtrain.nn import _small, pointwise_conv2d

pytestmark = pytest.mark.skipif(
    harness.why_not("cpu", "cpu") is not None, reason="without the CPU kernels all is PyTorch's own"
)
SHAPE = (1, 16, 12, 12)  # the widest image has four times as many elements
MOST = 120  # calls of Python functions that a block may add to those of its stock layers


class _Operators(TorchDispatchMode):
    """Counts the calls of this package's operators."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func.namespace == "fusedtrain"
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def limit(monkeypatch, images_of_any_size):
    monkeypatch.setattr(_small, "ELEMENTS", 1 + torch.Size(SHAPE).numel() * 5)


class Residual(nn.Module):
    """Recorded by torch.fx."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16)

    def forward(self, x):
        return torch.relu(self.bn(self.conv(x)) + x)


def _timm(zoo):
    from timm.models._efficientnet_blocks import InvertedResidual

    return InvertedResidual(16, 16, exp_ratio=4, se_layer=zoo.timm.layers.SEModule)


def _timm_same(zoo):
    from timm.models._efficientnet_blocks import InvertedResidual

    return InvertedResidual(16, 16, exp_ratio=4, stride=2, pad_type="same")


def _torchvision(zoo):
    config = zoo.torchvision.models.mobilenetv3.InvertedResidualConfig(16, 3, 64, 16, True, "HS", 1, 1, 1.0)
    return zoo.torchvision.models.mobilenetv3.InvertedResidual(config, nn.BatchNorm2d)


def _frozen(zoo):
    return nn.Sequential(
        zoo.torchvision.ops.FrozenBatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 1),
        zoo.timm.layers.FrozenBatchNormAct2d(16),
    )


def _plain(zoo):
    layers = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 64, 1)
    return nn.Sequential(*layers, zoo.timm.layers.EcaModule(64), nn.Conv2d(64, 64, 3, padding=1, groups=8))


BLOCKS = {
    "timm": _timm,
    "timm, same": _timm_same,
    "torchvision": _torchvision,
    "sequential": _plain,
    "frozen": _frozen,
    "recorded": lambda zoo: Residual(),
}


def _block(zoo, name: str) -> tuple[nn.Module, nn.Module]:
    """A block in evaluation, with running statistics of some batches and its depthwise convolutions fused, and the same
    with all that can be fused."""
    stock = BLOCKS[name](zoo).train()
    for seed in range(3):
        stock(harness.normal(*SHAPE, seed=seed) + 1)
    ours = copy.deepcopy(stock.eval())
    assert fusedtrain.fuse(ours).swapped
    for layer in stock.modules():
        if isinstance(layer, nn.Conv2d) and layer.groups == layer.in_channels:
            same = type(layer) is not nn.Conv2d
            layer.__class__ = fusedtrain.nn.DepthwiseConv2dSame if same else fusedtrain.nn.DepthwiseConv2d
    return stock, ours


def _assert_as_good(ours, stock: nn.Module, x: torch.Tensor) -> None:
    truth = copy.deepcopy(stock).double()(x.double())
    harness.assert_as_good_as_torch(ours(x), stock(x), truth, "y")


def _calls(function, *args) -> int:
    with _Operators() as operators:
        function(*args)
    return operators.calls


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_small_images_are_stock_to_the_bit(zoo, name, layout):
    stock, ours = _block(zoo, name)
    x = harness.normal(*SHAPE).contiguous(memory_format=layout)
    with torch.no_grad():
        assert torch.equal(ours(x), stock(x))
    with torch.inference_mode():
        assert torch.equal(ours(x), stock(x))
    large = torch.cat([x] * 200)  # enough for the ops' own rules
    with torch.no_grad():
        assert _calls(ours, large) > 0
        _assert_as_good(ours, stock, large)


@pytest.mark.parametrize("name", ["layers.grn.GlobalResponseNorm", "layers.mlp.GlobalResponseNormMlp"])
def test_layers_that_gain_at_any_size_call_their_op(zoo, name):
    module, _, kind = name.rpartition(".")
    layer = getattr(sys.modules[f"timm.{module}"], kind)(16).eval()
    assert fusedtrain.fuse(nn.Sequential(nn.Conv2d(3, 3, 1), layer)).swapped  # Linear layers: of what convolves alone
    with torch.no_grad():
        assert _calls(layer, harness.normal(1, 4, 4, 16)) == 1


def test_a_small_image_without_batch(zoo):
    convolutions = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 16, 3, groups=8)
    stock = nn.Sequential(*convolutions, zoo.torchvision.ops.SqueezeExcitation(16, 4)).eval()
    ours = copy.deepcopy(stock)
    assert len(fusedtrain.fuse(ours).swapped) == 4
    with torch.no_grad():
        _assert_as_good(ours, stock, harness.normal(*SHAPE)[0])


@pytest.mark.parametrize("name", BLOCKS)
def test_small_images_call_no_operator_but_for_depthwise_convolutions(zoo, name):
    _, ours = _block(zoo, name)
    convolutions = sum(isinstance(m, fusedtrain.nn.DepthwiseConv2d) for m in ours.modules())
    with torch.no_grad():
        assert _calls(ours, harness.normal(*SHAPE)) == convolutions


@pytest.mark.parametrize("name", BLOCKS)
def test_whoever_asks_for_the_ops_gets_them(zoo, name, monkeypatch):
    _, ours = _block(zoo, name)
    x = harness.normal(*SHAPE)
    for context in (
        torch.enable_grad(),
        fusedtrain.use_backend("cpu"),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        with torch.no_grad(), context:
            assert not _small.stays_stock(ours, x)
    with torch.no_grad():
        assert _small.stays_stock(ours, x)
        assert not _small.stays_stock(ours, x.bfloat16()) and not _small.stays_stock(ours, x.double())
        assert not _small.stays_stock(copy.deepcopy(ours).train(), x)
        monkeypatch.setattr(backend._tuned, "active", True)
        assert not _small.stays_stock(ours, x)


def _python_calls(function, *args) -> int:
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    function(*args)  # what is made once
    gc.disable()  # whose callbacks are others' calls
    sys.setprofile(count)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@pytest.mark.parametrize("name", BLOCKS)
def test_training_calls_little_python(zoo, name):
    """Each call is a microsecond or less, but they are all that small images have to wait for."""
    stock, ours = _block(zoo, name)
    x = harness.normal(*SHAPE).requires_grad_()
    assert _python_calls(ours.train(), x) <= MOST + _python_calls(stock.train(), x)


IN_TRAINING = _small.IN_TRAINING  # which tests otherwise do without, see conftest.py
PAIRS = {
    "recorded": lambda: nn.Sequential(Residual(), Residual()),
    "layers": lambda: nn.Sequential(nn.Conv2d(16, 24, 1), nn.BatchNorm2d(24), nn.Mish()),
}


@pytest.fixture
def training(monkeypatch):
    monkeypatch.setattr(_small, "IN_TRAINING", IN_TRAINING)


def _trained(block: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    block(x).square().sum().backward()
    return [x.grad, *(p.grad for p in block.parameters()), *block.buffers()]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_what_stock_trains_anyway_waits_for_little_python(training, name, layout):
    stock = PAIRS[name]()
    ours = copy.deepcopy(stock)
    assert fusedtrain.fuse(ours).swapped
    x = harness.normal(4, *SHAPE[1:]).contiguous(memory_format=layout)
    for value, expected in zip(_trained(ours, x), _trained(stock, x), strict=True):
        assert torch.equal(value, expected)
    assert _python_calls(ours, x) <= 60 + _python_calls(stock, x)
    large = torch.cat([x] * 50)
    assert large.numel() > IN_TRAINING and _calls(ours, large) > 0
    with fusedtrain.use_backend("cpu"):
        assert _calls(ours, x) > 0


def test_small_images_of_a_dtype_that_the_cpu_does_not_multiply_are_the_ops(training, monkeypatch):
    layer, seen = fusedtrain.nn.PointwiseConv2d(16, 16, 1), []
    monkeypatch.setattr(pointwise_conv2d, "pointwise_conv2d", lambda x, *_: seen.append(x.dtype))
    x = harness.normal(*SHAPE)
    for cpu_has_it in (True, False):
        monkeypatch.setattr(
            pointwise_conv2d, "cpu_multiplies", lambda dtype, yes=cpu_has_it: yes or dtype == torch.float32
        )
        layer(x), layer.half()(x.half()), layer.float()
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)
    assert seen == [torch.float16, torch.float32]  # what autocast casts comes as it is


def test_graphs_hold_the_ops_for_images_of_any_size(zoo):
    """A graph of one image may be called with many."""
    stock, ours = _block(zoo, "timm")
    small, large = harness.normal(*SHAPE), harness.normal(40, *SHAPE[1:])
    with torch.no_grad():
        traced = torch.jit.trace(ours, small)
        assert "fusedtrain::depthwise_bn_act_se" in str(traced.inlined_graph)
        graphs, sizes = [traced], ({0: torch.export.Dim("n")},)
        for strict in (False, True):
            exported = torch.export.export(ours, (torch.cat([small] * 2),), dynamic_shapes=sizes, strict=strict)
            assert "fusedtrain.depthwise_bn_act_se" in str(exported.graph)
            graphs.append(exported.module())
        for graph in graphs:
            _assert_as_good(graph, stock, large)


def test_hooks_inside_a_block_are_called(zoo):
    _, ours = _block(zoo, "timm")
    seen = []
    for layer in (ours.bn1, ours.conv_dw, ours.se):
        layer.register_forward_hook(lambda layer, *_: seen.append(layer))
    with torch.no_grad():
        ours(harness.normal(*SHAPE))
    assert seen == [ours.bn1, ours.conv_dw, ours.se]

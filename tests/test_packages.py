"""fuse() on networks of other packages than timm and torchvision, and on layers derived from torch's."""

import copy
import functools
import pickle

import harness
import pytest
import torch
from test_fuse import assert_model_as_good_as_torch
from torch import nn

import fusedtrain
from fusedtrain.nn import depthwise_bn_act_se, depthwise_conv2d


def efficientnet(**options):
    """The first two stages of EfficientNet-B0."""
    efficientnet_pytorch = pytest.importorskip("efficientnet_pytorch")
    model = efficientnet_pytorch.EfficientNet.from_name("efficientnet-b0", num_classes=10, **options)
    model._blocks = model._blocks[:5]
    model._conv_head, model._bn1 = nn.Conv2d(40, 32, 1, bias=False), nn.BatchNorm2d(32)
    model._fc = nn.Linear(32, 10)
    return model


def unet():
    smp = pytest.importorskip("segmentation_models_pytorch")
    model = smp.Unet("efficientnet-b0", 3, None, decoder_channels=(16, 8, 8))
    model.encoder._blocks = model.encoder._blocks[:5]
    return model


# network -> what makes it, and the class of its depthwise convolutions
NETWORKS = {
    "static": (functools.partial(efficientnet, image_size=64), depthwise_conv2d.DepthwiseConv2dStaticSame),
    "dynamic": (functools.partial(efficientnet, image_size=None), depthwise_conv2d.DepthwiseConv2dSame),
    "unet": (unet, depthwise_conv2d.DepthwiseConv2dStaticSame),
}


def without_dropping(model):
    for module in model.modules():
        if hasattr(module, "_global_params"):
            module._global_params = module._global_params._replace(drop_connect_rate=0.0, dropout_rate=0.0)
        if hasattr(module, "_drop_connect_rate"):
            module._drop_connect_rate = 0.0
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("name", NETWORKS)
def test_efficientnets_of_other_packages_train_as_well_as_before(name, zoo):
    torch.manual_seed(0)
    make, convolution = NETWORKS[name]
    stock = make()
    fused = copy.deepcopy(stock)
    planned, report = fusedtrain.fuse(copy.deepcopy(stock), dry_run=True), fusedtrain.fuse(fused)
    assert planned == report and not report.kept
    blocks = [m for m in fused.modules() if isinstance(m, depthwise_bn_act_se.MBConvBlock)]
    assert len(blocks) == 5 and all(isinstance(block._depthwise_conv, convolution) for block in blocks)
    assert list(fused.state_dict()) == list(stock.state_dict())
    pair = without_dropping(fused), without_dropping(stock)
    assert_model_as_good_as_torch(*pair, name)
    assert_model_as_good_as_torch(*(model.eval() for model in pair), f"{name} in evaluation")
    fusedtrain.unfuse(fused)
    assert [type(m) for m in fused.modules()] == [type(m) for m in stock.modules()]


def test_the_same_images_are_dropped():
    stock = NETWORKS["static"][0]()._blocks[2]
    fused, x = copy.deepcopy(stock), harness.images((16, 24, 9, 9))
    fusedtrain.fuse(fused)
    results = []
    for block in (fused, stock):
        torch.manual_seed(1)
        results.append(copy.deepcopy(block)(x, drop_connect_rate=0.5).detach())
    ours, theirs = (y.ne(x).flatten(1).any(1) for y in results)
    assert torch.equal(ours, theirs) and 0 < ours.sum() < 16
    truth = copy.deepcopy(stock).double()(x.double()).detach() - x.double()
    truth = truth * 2 * theirs[:, None, None, None] + x.double()
    harness.assert_as_good_as_torch(*results, truth, "block that drops images")
    assert torch.equal(fused.eval()(x, 0.5), fused(x))


class Depthwise(nn.Conv2d):
    """As Transformers has it: a constructor, and a method that nobody else knows."""

    def __init__(self, channels, kernel_size=3):
        super().__init__(channels, channels, kernel_size, padding="same", groups=channels, bias=False)

    def reset(self):
        nn.init.zeros_(self.weight)


class Pointwise(nn.Conv2d):
    def __init__(self, channels, out):
        super().__init__(channels, out, 1, bias=False)


class OfKeras(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels, eps=1e-3, momentum=0.01)


class Standardised(Depthwise):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight - weight.mean((1, 2, 3), keepdim=True), bias)


class Halved(OfKeras):
    @property
    def momentum(self):
        return 0.005

    @momentum.setter
    def momentum(self, value):
        pass


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.expand, self.norm0 = Pointwise(16, 32), OfKeras(32)
        self.conv, self.norm1, self.act = Depthwise(32), OfKeras(32), nn.SiLU()
        self.project = Pointwise(32, 16)

    def forward(self, x):
        x = self.act(self.norm0(self.expand(x)))
        return self.project(self.act(self.norm1(self.conv(x))))


def test_classes_with_another_constructor_alone_are_fused():
    torch.manual_seed(0)
    stock = nn.Sequential(nn.Conv2d(3, 16, 1), Own())
    fused = copy.deepcopy(stock)
    report = fusedtrain.fuse(fused)
    assert not report.kept and fusedtrain.fuse(copy.deepcopy(stock), dry_run=True) == report
    assert isinstance(fused[1], fusedtrain.nn.recorded.Recorded)
    for mine, theirs in zip(fused.modules(), stock.modules()):
        assert isinstance(mine, type(theirs))
    for model in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert_model_as_good_as_torch(model, stock, "layers of derived classes", size=9)
    fusedtrain.unfuse(fused)
    assert [type(m) for m in fused.modules()] == [type(m) for m in stock.modules()]


def test_layers_of_a_class_that_no_module_has_come_back():
    class Local(Pointwise):
        pass

    layer = Local(16, 8)
    for change in (fusedtrain.fuse, fusedtrain.unfuse):
        (swapped,) = change(nn.Sequential(layer)).swapped
        assert isinstance(layer, fusedtrain.nn.PointwiseConv2d) == (change is fusedtrain.fuse)
    assert type(layer) is Local and swapped.after.endswith("Local")


@pytest.mark.parametrize("layer", [Standardised(16), Halved(16)], ids=lambda layer: type(layer).__name__)
def test_classes_that_compute_something_else_stay(layer):
    kind = type(layer)
    (kept,) = fusedtrain.fuse(nn.Sequential(layer)).kept
    assert "derived from it, and may compute something else" in kept.reason and type(layer) is kind


def test_hooks_on_the_padding_of_a_convolution_are_called():
    model, x, seen = NETWORKS["static"][0](), harness.images((4, 3, 64, 64)), []
    fusedtrain.fuse(model)
    block = model._blocks[1]
    block._depthwise_conv.static_padding.register_forward_hook(lambda *_: seen.append("padding"))
    model(x)
    assert seen == ["padding"]


@pytest.mark.parametrize("same", [True, False], ids=["same", "centred"])
@pytest.mark.parametrize("size", [8, 9])
def test_layers_of_transformers_mobilenets_compute_as_well_as_before(size, same, zoo):
    transformers = pytest.importorskip("transformers")
    from transformers.models.mobilenet_v1 import modeling_mobilenet_v1 as first
    from transformers.models.mobilenet_v2 import modeling_mobilenet_v2 as second

    one, two = (of(tf_padding=same) for of in (transformers.MobileNetV1Config, transformers.MobileNetV2Config))
    torch.manual_seed(0)
    stock = nn.Sequential(
        nn.Conv2d(3, 16, 1),
        first.MobileNetV1ConvLayer(one, 16, 16, 3, 2, 16),
        first.MobileNetV1ConvLayer(one, 16, 24, 1),
        second.MobileNetV2ConvLayer(two, 24, 24, 5, 1, 24, dilation=2),
        second.MobileNetV2ConvLayer(two, 24, 16, 1, use_activation=False),
    )
    fused = copy.deepcopy(stock)
    assert sum("TransformersConvLayer" in c.after for c in fusedtrain.fuse(fused).swapped) == 4
    for training in (True, False):
        pair = (model.train(training) for model in (fused, stock))
        assert_model_as_good_as_torch(*pair, f"training {training}", size=size)
    seen = []
    for layer in (fused[1], fused[3]):
        layer.convolution.register_forward_hook(lambda *_: seen.append("convolution"))
    assert_model_as_good_as_torch(fused, stock, "with hooks", size=size)
    assert seen and list(map(type, stock.modules())) != list(map(type, fused.modules()))
    fusedtrain.unfuse(fused)
    assert list(map(type, stock.modules())) == list(map(type, fused.modules()))


def test_activations_that_are_functions_of_autograd_are_known(zoo):
    pytest.importorskip("geffnet")
    from geffnet.activations import activations_me

    for name in ("HardSwishMe", "SwishMe"):
        layer = getattr(activations_me, name)()
        stock = nn.Sequential(nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), layer)
        fused = copy.deepcopy(stock)
        assert any("Sequential" in c.after for c in fusedtrain.fuse(fused).swapped), name
        assert_model_as_good_as_torch(fused, stock, name, size=9)

"""Networks with fixed batch normalisation, as the backbones of detectors have it: which classes, which ops, what they
keep."""

import copy

import harness
import pytest
import torch
import torch.nn.functional as F
from test_fuse import assert_model_as_good_as_torch, thinned
from torch import nn

import fusedtrain
from fusedtrain.nn import FrozenBatchNorm2d as OurFrozenBatchNorm2d
from fusedtrain.nn import FrozenBatchNormAct2d


class Fixed(nn.Module):
    """The buffers that all copies of the class have."""

    def __init__(self, channels, eps=None):
        super().__init__()
        if eps is not None:
            self.eps = eps
        for name, fill in (("weight", 1), ("bias", 0), ("running_mean", 0), ("running_var", 1)):
            self.register_buffer(name, torch.full((channels,), float(fill)))


class DetrFrozenBatchNorm2d(Fixed):
    """eps stands in its forward."""

    def forward(self, x):
        scale = self.weight / torch.sqrt(self.running_var + 1e-5)
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


class FrozenBatchNorm2d(Fixed):
    """Another call where no gradient is recorded."""

    def forward(self, x):
        if not x.requires_grad:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, eps=self.eps)
        scale = (self.weight * (self.running_var + self.eps).rsqrt()).reshape(1, -1, 1, 1)
        return x * scale + (self.bias.reshape(1, -1, 1, 1) - self.running_mean.reshape(1, -1, 1, 1) * scale)


class RootFrozenBatchNorm2d(FrozenBatchNorm2d):
    """Divides by the variance."""

    def forward(self, x):
        scale = (self.weight / (self.running_var + self.eps)).reshape(1, -1, 1, 1)
        return (x - self.running_mean.reshape(1, -1, 1, 1)) * scale + self.bias.reshape(1, -1, 1, 1)


class NoisyFrozenBatchNorm2d(FrozenBatchNorm2d):
    """Something else in training."""

    def forward(self, x):
        y = super().forward(x)
        return y + 1 if self.training else y


class AskingFrozenBatchNorm2d(FrozenBatchNorm2d):
    """Takes more than images."""

    def forward(self, x, mask):
        return super().forward(x) * mask


class LearningFrozenBatchNorm2d(FrozenBatchNorm2d):
    """Holds a parameter."""

    def __init__(self, channels, eps):
        super().__init__(channels, eps)
        del self.weight
        self.weight = nn.Parameter(torch.ones(channels))


def numbered(model):
    """Numbers as after some training; scales above and below 0."""
    for i, norm in enumerate(m for m in model.modules() if type(m).__name__.endswith(("BatchNorm2d", "NormAct2d"))):
        with torch.no_grad():
            c = len(norm.weight)
            norm.weight.copy_(harness.normal(c, seed=4 * i).sigmoid() * (1 - 2 * (torch.arange(c) % 3 == 0)))
            norm.bias.copy_(harness.normal(c, seed=4 * i + 1))
            norm.running_mean.copy_(harness.normal(c, seed=4 * i + 2) / 4)
            norm.running_var.copy_(harness.normal(c, seed=4 * i + 3).sigmoid() + 0.5)
    return model


@pytest.mark.parametrize("made", [lambda: DetrFrozenBatchNorm2d(13), lambda: FrozenBatchNorm2d(13, 1e-3)])
def test_copies_of_the_class_are_known_by_what_they_compute(made):
    stock = numbered(made())
    fused = copy.deepcopy(stock)
    (candidate,) = fusedtrain.fuse(fused)
    assert candidate.after == "fusedtrain.nn.batch_norm_act.FrozenBatchNorm2d"
    assert isinstance(fused, OurFrozenBatchNorm2d) and isinstance(fused, type(stock))
    assert list(fused.state_dict()) == list(stock.state_dict())
    harness.assert_module_as_good_as_torch(fused, stock, harness.images((2, 13, 7, 9)), "copy")
    fusedtrain.unfuse(fused)
    assert type(fused) is type(stock) and torch.equal(fused(torch.ones(1, 13, 2, 2)), stock(torch.ones(1, 13, 2, 2)))


@pytest.mark.parametrize(
    "kind", [RootFrozenBatchNorm2d, NoisyFrozenBatchNorm2d, AskingFrozenBatchNorm2d, LearningFrozenBatchNorm2d]
)
def test_what_only_has_its_name_stays(kind):
    layer = kind(13, 1e-3)
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    assert not fusedtrain.fuse(layer) and type(layer) is kind
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items()) and layer.training


def resnet(zoo):
    frozen = zoo.torchvision.ops.FrozenBatchNorm2d
    return thinned(zoo.torchvision.models.resnet50(num_classes=10, norm_layer=frozen, width_per_group=8))


def mobilenet(zoo):
    frozen = zoo.torchvision.ops.FrozenBatchNorm2d
    return thinned(zoo.torchvision.models.mobilenet_v3_large(num_classes=10, norm_layer=frozen, dropout=0.0))


def timms(name):
    def make(zoo):
        model = zoo.timm.create_model(name, num_classes=10, drop_rate=0.0, drop_path_rate=0.0)
        return thinned(zoo.timm.layers.freeze_batch_norm_2d(model))

    return make


NETWORKS = {"resnet50": resnet, "mobilenet_v3_large": mobilenet}
NETWORKS |= {name: timms(name) for name in ("efficientnet_b0", "regnety_002", "mobilenetv4_conv_small")}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_with_fixed_norms_train_as_well_as_before(zoo, name, training):
    torch.manual_seed(0)
    stock = numbered(NETWORKS[name](zoo)).train(training)
    fused = copy.deepcopy(stock)
    report = fusedtrain.fuse(fused)
    norms = [m for m in stock.modules() if "FrozenBatchNorm" in type(m).__name__]
    became = [c.after for c in report.swapped if c.before.rpartition(".")[2].startswith("FrozenBatchNorm")]
    assert len(became) == len(norms) > 10 and all(after.startswith("fusedtrain.nn.batch_norm_act") for after in became)
    before = {name: t.clone() for name, t in fused.state_dict().items()}
    assert_model_as_good_as_torch(fused, stock, name)
    assert all(torch.equal(t, before[key]) for key, t in fused.state_dict().items())
    fusedtrain.unfuse(fused)
    assert [type(m) for m in fused.modules()] == [type(m) for m in stock.modules()]


def kept(model, x) -> int:
    model.requires_grad_(True)
    return sum(t.numel() * t.element_size() for t in harness.saved_for_backward(model, x) if t.dim() == 4)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_fused_resnet_keeps_no_more_images_than_before(zoo, layout):
    """Its norms keep what ReLU makes, which the next convolution keeps anyway."""
    stock = resnet(zoo).to(memory_format=layout)
    fused = copy.deepcopy(stock)
    fusedtrain.fuse(fused)
    x = harness.images((2, 3, 64, 64)).contiguous(memory_format=layout)
    with fusedtrain.use_backend("cpu"):  # images of a few pixels are left to torch's batch_norm
        assert kept(fused, x) <= kept(stock, x)


@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v3_large"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_results_have_the_dtypes_of_the_stock_network(zoo, name, dtype):
    """Under autocast fixed norms make float32 of what convolutions make in 16 bits; other models are cast with them."""
    stock = numbered(NETWORKS[name](zoo))
    fused = copy.deepcopy(stock)
    fusedtrain.fuse(fused)
    dtypes = []
    for model in (stock, fused):
        seen = dtypes.append([]) or dtypes[-1]
        for block in [m for m in model.modules() if type(m).__name__ in ("Bottleneck", "InvertedResidual", "Recorded")]:
            block.register_forward_hook(lambda _, inputs, y, seen=seen: seen.append((inputs[0].dtype, y.dtype)))
        x = harness.images((2, 3, 64, 64))
        if dtype is torch.float64:
            model.double()(x.double()).sum().backward()
        else:
            with torch.autocast("cpu", dtype=dtype):
                model(x).sum().backward()
    assert dtypes[0] == dtypes[1] and dtypes[0]


def test_what_timm_freezes_in_a_fused_network_is_fused_again(zoo):
    stock = numbered(thinned(zoo.timm.create_model("lcnet_050", num_classes=10)))
    fused = copy.deepcopy(stock)
    fusedtrain.fuse(fused)
    stock, fused = (zoo.timm.layers.freeze_batch_norm_2d(model) for model in (stock, fused))
    report = fusedtrain.fuse(fused)
    assert any(c.after.endswith("FrozenBatchNormAct2d") for c in report.swapped)
    assert_model_as_good_as_torch(fused, stock, "frozen")
    assert not any(isinstance(m, FrozenBatchNormAct2d) for m in zoo.timm.layers.unfreeze_batch_norm_2d(fused).modules())

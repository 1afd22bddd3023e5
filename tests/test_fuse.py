"""fuse() and unfuse(): what becomes fused, what stays and why, and that nothing else of a model changes."""

import copy
import inspect
import io
import pickle
import sys

import harness
import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.nn.utils import parametrize

import fusedtrain
from fusedtrain.nn.recorded import Recorded

# Every architecture file of timm with depthwise convolutions or channel attention: its smallest networks that together
# have each kind of layer.
ARCHITECTURES = {
    "byobnet": ("test_byobnet", "eca_resnext26ts", "gcresnext26ts"),
    "coat": ("coat_lite_tiny",),
    "convmixer": ("convmixer_1024_20_ks9_p14",),
    "convnext": ("test_convnext2",),
    "cpubone": ("cpubone_nano",),
    "csatv2": ("csatv2",),
    "cspnet": ("sedarknet21",),
    "cspnext": ("cspnext_tiny",),
    "davit": ("davit_tiny",),
    "edgenext": ("edgenext_xx_small",),
    "efficientformer_v2": ("efficientformerv2_s0",),
    "efficientnet": ("test_efficientnet_evos", "tf_efficientnet_lite0", "gc_efficientnetv2_rw_t"),
    "efficientvim": ("efficientvim_m2",),
    "efficientvit_mit": ("efficientvit_b0",),
    "efficientvit_msra": ("efficientvit_m2",),
    "fastvit": ("fastvit_t8",),
    "focalnet": ("focalnet_tiny_srf",),
    "gcvit": ("gcvit_xxtiny",),
    "ghostnet": ("ghostnet_050",),
    "hgnet": ("hgnet_tiny", "hgnetv2_b0"),
    "iformer": ("iformer_t",),
    "inception_next": ("inception_next_atto",),
    "lcnetv2": ("lcnetv2_small",),
    "lowformer": ("lowformer_e1",),
    "mambaout": ("test_mambaout",),
    "maxxvit": ("test_coatnet", "maxvit_tiny_tf_224"),
    "metaformer": ("caformer_s18",),
    "mobilenetv3": ("lcnet_050", "tf_mobilenetv3_small_minimal_100", "hardcorenas_a"),
    "mobilenetv5": ("mobilenetv5_300m_enc",),
    "mvitv2": ("mvitv2_tiny",),
    "nasnet": ("nasnetalarge",),
    "nfnet": ("test_nfnet", "nf_ecaresnet26"),
    "pit": ("pit_ti_224",),
    "pnasnet": ("pnasnet5large",),
    "pvt_v2": ("pvt_v2_b0",),
    "rdnet": ("rdnet_tiny",),
    "regnet": ("regnety_002",),
    "repghost": ("repghostnet_058",),
    "repvit": ("repvit_m1_1",),
    "resnet": ("seresnet18", "ecaresnet26t", "resnest14d"),
    "rexnet": ("rexnetr_130",),
    "senet": ("legacy_seresnet18",),
    "shvit": ("shvit_s1",),
    "starnet": ("starnet_s050",),
    "swiftformer": ("swiftformer_xs",),
    "tiny_vit": ("tiny_vit_5m_224",),
    "tresnet": ("tresnet_m",),
    "twins": ("twins_pcpvt_small",),
    "vision_transformer": ("vitamin_small_224",),
    "vovnet": ("ese_vovnet19b_slim", "eca_vovnet39b"),
    "xception": ("legacy_xception",),
    "xception_aligned": ("xception41p",),
    "xcit": ("xcit_tiny_12_p16_224",),
}
# Of these a dry run is made and a step taken on every run, of the others with FUSEDTRAIN_SLOW_TESTS=1.
STEPS = ("convnext", "cspnext", "edgenext", "efficientvit_mit", "ghostnet", "mambaout", "maxxvit", "vovnet")
# What fuse() must know, told by class names rather than by its own table: channel attention and batch normalisation.
ATTENTION = {
    "SqueezeExcite",
    "SEModule",
    "EffectiveSEModule",
    "SqueezeExciteCl",
    "EseModule",
    "EcaModule",
    "CecaModule",
}
ATTENTION |= {"CbamModule", "LightCbamModule", "GatherExcite", "GlobalContext", "SplitAttn", "SqueezeExcitation"}
ATTENTION |= {"ChannelAttn", "LightChannelAttn", "SpatialAttn", "LightSpatialAttn"}
RESPONSE_NORMS = ("GlobalResponseNorm", "GlobalResponseNormMlp")
MLPS = ("layers.mlp.Mlp", "layers.mlp.ConvMlp", "models.inception_next.ConvMlp", "models.convnext.ConvNeXtBlock")
# The blocks whose inner layers of these names are one op, where they are depthwise convolution and normalisation.
MIDDLES = {
    "DepthwiseSeparableConv": ("conv_dw", "bn1"),
    "InvertedResidual": ("conv_dw", "bn2"),
    "ConvNormAct": ("conv", "bn"),
}
ACTIVATIONS = {"ReLU", "ReLU6", "SiLU", "Swish", "GELU", "Hardswish", "HardSwish"}
RECORDED = "fusedtrain.nn.recorded.Recorded"


def timm_model(zoo, name, **options):
    if not zoo.timm.is_model(name):
        pytest.skip(f"timm {zoo.timm.__version__} has no {name}")
    return zoo.timm.create_model(name, **options)


def thinned(model):
    """Drops the blocks that are as the one before them: they would run the same code once more."""
    for blocks in [module for module in model.modules() if type(module) is nn.Sequential]:
        texts = [repr(block) for block in blocks]
        for i in reversed(range(1, len(texts))):
            if texts[i] == texts[i - 1]:
                del blocks[i]
    return model


def attention(report):
    """How many layers of channel attention were swapped."""
    return sum(c.after.startswith(("fusedtrain.nn.squeeze_excite", "fusedtrain.nn.eca")) for c in report.swapped)


def layout_of(model):
    return [(name, tuple(t.shape), t.dtype, t.device) for name, t in model.state_dict().items()]


def classes_of(model):
    return [type(module) for module in model.modules()]


def small_model(zoo):
    """Two SE layers, a shared one, and layers that are no candidates."""
    squeeze_excite = zoo.timm.models._efficientnet_blocks.SqueezeExcite
    shared = squeeze_excite(16)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        shared,
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        shared,
        zoo.torchvision.ops.SqueezeExcitation(16, 4),
    )


def is_candidate(module):
    if type(module).__name__ in MIDDLES and type(module).__module__.startswith("timm."):
        conv, norm = (getattr(module, name, None) for name in MIDDLES[type(module).__name__])
        return is_middle(conv, norm)
    if type(module) is nn.Sequential:
        pairs = list(zip(module, list(module)[1:]))
        return any(is_norm_act(*pair) or (is_middle(*pair) and not is_pointwise(pair[0])) for pair in pairs)
    if isinstance(module, nn.Conv2d):
        return module.groups == module.in_channels > 1
    kind = type(module).__name__
    is_norm = isinstance(module, (nn.BatchNorm2d, nn.SyncBatchNorm)) or kind in RESPONSE_NORMS
    return is_norm or kind in ATTENTION or f"{type(module).__module__}.{kind}".removeprefix("timm.") in MLPS


def is_pointwise(module):
    known = type(module) is nn.Conv2d or type(module).__name__ == "Conv2dSame"
    return known and module.groups == 1 and module.kernel_size == (1, 1) and module.padding == (0, 0)


def is_grouped(module):
    return type(module) is nn.Conv2d and 1 < module.groups < module.in_channels


def candidates_of(model):
    """The names of all candidates: those by their class, and grouped and 1x1 convolutions and Linear layers outside of
    channel attention."""
    found, gates = set(), ()
    convolves = any(isinstance(module, nn.Conv2d) for module in model.modules())
    for name, module in model.named_modules():
        mixes_channels = is_pointwise(module) or is_grouped(module) or (convolves and type(module) is nn.Linear)
        sees_images = not name.startswith(gates) or getattr(module, "kernel_size", (1, 1)) != (1, 1)
        if is_candidate(module) or (mixes_channels and sees_images):
            found.add(name)
        if type(module).__name__ in ATTENTION:
            gates += (f"{name}.",)
    return found


def is_norm_act(norm, act):
    return is_candidate(norm) and "BatchNorm" in type(norm).__name__ and type(act).__name__ in ACTIVATIONS


def is_middle(conv, norm):
    is_convolution = isinstance(conv, nn.Conv2d) and (is_candidate(conv) or is_pointwise(conv))
    return is_convolution and "BatchNorm" in type(norm).__name__


def check_sweep(model, dry_run=True):
    """fuse() finds every candidate, swaps those that have a fused layer, and nothing of the model is lost."""
    candidates = candidates_of(model)
    before, classes, parameters = layout_of(model), classes_of(model), list(model.parameters())
    planned = fusedtrain.fuse(model, dry_run=True) if dry_run else None
    assert classes_of(model) == classes
    report = fusedtrain.fuse(model)
    by_class = {c.name for c in report if c.after != RECORDED}
    assert planned in (None, report) and by_class == candidates, report
    assert not report.kept, report.kept
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True)) and layout_of(model) == before
    for candidate in report.swapped:
        fused = type(model.get_submodule(candidate.name))
        fused = Recorded if issubclass(fused, Recorded) else fused
        assert f"{fused.__module__}.{fused.__qualname__}" == candidate.after
    assert all(map(isinstance, model.modules(), classes))
    assert not fusedtrain.fuse(model).swapped
    assert len(fusedtrain.unfuse(model)) == len(report.swapped)
    assert classes_of(model) == classes and layout_of(model) == before
    return report


@pytest.mark.parametrize("file", ARCHITECTURES)
def test_every_architecture_of_timm(file, zoo):
    for name in ARCHITECTURES[file]:
        with torch.device("meta"):
            model = timm_model(zoo, name)
        assert type(model).__module__ == f"timm.models.{file}"
        assert check_sweep(thinned(model), dry_run=file in STEPS).swapped


@harness.needs_memory(4)
def test_every_network_of_timm(zoo):
    held = set()
    for name in zoo.timm.list_models():
        with torch.device("meta"):
            model = zoo.timm.create_model(name)
        report = check_sweep(model)
        usual = ("PointwiseConv2d", "GroupedConv2d", "Linear", "ConvNormAct", "Recorded", "Sequential")
        if not all("batchnorm" in c.before.lower() or (c.after or "").endswith(usual) for c in report):
            held.add(type(model).__module__.removeprefix("timm.models."))
    assert held == set(ARCHITECTURES)


def step(model, x):
    """Returns the output, all gradients, and all running statistics after one training step."""
    model.zero_grad()
    y = model(x)
    y.square().mean().backward()
    statistics = [b.double() for b in model.buffers() if b.is_floating_point()]
    return y.detach(), [p.grad.double() for p in model.parameters() if p.grad is not None], statistics


def in_their_scales(tensors, truths):
    """One vector of all tensors, each over the largest number of its truth."""
    largest = max((truth.abs().max() for truth in truths), default=1.0)
    scaled = (t / truth.abs().max().clamp(min=1e-3 * largest) for t, truth in zip(tensors, truths, strict=True))
    return torch.cat([t.flatten() for t in scaled] or [torch.zeros(1)])


def assert_model_as_good_as_torch(fused, stock, what, size=64):
    """The rule for the output and for all gradients and statistics together, each over the largest of its tensor.

    Gradients are judged in the median of several batches: a value that rounding puts on the other side of a kink of an
    activation changes those of its whole batch, in torch's network as often as in ours.
    """
    outputs, gradients = ([], [], []), ([], [], [])  # of torch in float64, torch, ours
    models = copy.deepcopy(stock).double(), copy.deepcopy(stock), copy.deepcopy(fused)
    for seed in range(4):
        x = harness.images((4, 3, size, size), seed=seed)
        results = [step(model, batch) for model, batch in zip(models, (x.double(), x, x))]
        for (y, *others), ys, flats in zip(results, outputs, gradients):
            ys.append(y)
            flats.append(torch.cat([in_their_scales(*pair) for pair in zip(others, results[0][1:])]))
    truth, theirs, ours = map(torch.stack, outputs)
    harness.assert_as_good_as_torch(ours, theirs, truth, f"{what} y [batch, ...]")
    truth, theirs, ours = map(torch.stack, gradients)
    error, allowed = ((side - truth).abs().amax(1).median() for side in (ours, theirs))
    bound = 2 * allowed + 2 * torch.finfo(torch.float32).eps * truth.abs().max()
    assert error <= bound, f"{what} gradients: error {error:.3e}, torch's own {allowed:.3e}, allowed {bound:.3e}"


def keep_off_kinks(model):
    """Sets weights with which rounding puts hardly a value on the other side of an activation's kink: what is
    normalised stands three deviations above zero or below, by channels in turn, so that sums with a residual do too.

    With the initial ones that happens in most batches of a network of ReLUs and changes some gradient by a tenth, in
    torch's network from one memory format to the other too; nor do gradients come through where the scale starts as 0.
    """
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.affine:
            nn.init.constant_(module.weight, 1 / 3)
            with torch.no_grad():
                module.bias.copy_(1 - 2 * (torch.arange(module.num_features) % 2))


@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=() if file in STEPS else harness.needs_memory(6)) for file in ARCHITECTURES]
)
def test_a_step_of_every_architecture_of_timm_is_as_good_as_before(file, zoo):
    torch.manual_seed(0)
    model = thinned(timm_model(zoo, ARCHITECTURES[file][0])).train()
    for module in model.modules():
        if "drop" in type(module).__name__.lower():
            module.eval()  # what is dropped depends on the dtype
    keep_off_kinks(model)
    fused = copy.deepcopy(model)
    assert fusedtrain.fuse(fused).swapped
    size = model.default_cfg["input_size"][-1] if model.default_cfg.get("fixed_input_size") else 64
    assert_model_as_good_as_torch(fused, model, file, size)


@pytest.mark.parametrize("name", ["lcnet_050", "test_byobnet", "test_nfnet", "test_efficientnet_evos", "test_resnet"])
def test_models_of_timm_train_as_well_as_before(name, zoo):
    torch.manual_seed(0)
    model = thinned(timm_model(zoo, name, num_classes=10))
    keep_off_kinks(model)
    check_training(model, name)


def gates_of_splits_and_pixels(zoo):
    """Convolutions and gates in turns, which differ from the first channel attention in what they pool or scale."""
    layers, options = zoo.timm.layers, {"act_layer": nn.SiLU, "rd_ratio": 1}
    split = layers.SplitAttn(8, 12, norm_layer=nn.BatchNorm2d, act_layer=nn.SiLU)
    context = layers.GlobalContext(12, fuse_add=True, act_layer=nn.SiLU)
    nn.init.normal_(context.mlp_add.fc2.weight)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 1), split, context),
        *(layers.cbam.CbamModule(12, **options), layers.cbam.LightCbamModule(12, **options)),
    )


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_gates_of_splits_and_pixels_train_as_well_as_before(memory_format, zoo):
    torch.manual_seed(0)
    stock = gates_of_splits_and_pixels(zoo).to(memory_format=memory_format)
    fused = copy.deepcopy(stock)
    assert {c.name for c in fusedtrain.fuse(fused).swapped} >= {"1", "1.conv", "1.bn0", "2", "3.channel", "3.spatial"}
    with fusedtrain.use_backend("cpu"):
        assert_model_as_good_as_torch(fused, stock, "splits and pixels", size=9)


@pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("forced", ["cpu", None])
def test_gates_of_splits_and_pixels_keep_strides(forced, dtype, layout, zoo):
    _, split, *others = gates_of_splits_and_pixels(zoo)
    for channels, stock in (
        (8, split),
        (12, zoo.timm.layers.SplitAttn(12, radix=1)),
        *((12, layer) for layer in others),
    ):
        stock, strides = stock.to(dtype), []
        fused = copy.deepcopy(stock)
        assert fusedtrain.fuse(fused).swapped
        for layer in (stock, fused):
            x = harness.images((8, channels, 40, 30), layout, dtype).requires_grad_()
            with fusedtrain.use_backend(forced):
                y = layer(x)
                y.sum().backward()
            strides.append((y.dtype, y.stride(), x.grad.stride()))
        assert strides[0] == strides[1], type(stock)


def test_torchvisions_mobilenet_v3_trains_as_well_as_before(zoo):
    with torch.device("meta"):
        report = fusedtrain.fuse(zoo.torchvision.models.mobilenet_v3_small(), dry_run=True)
    kinds = [candidate.after.rpartition(".")[2] for candidate in report.swapped]
    assert attention(report) == 9 and kinds.count("BatchNorm2d") == 34 and kinds.count("DepthwiseConv2d") == 11
    torch.manual_seed(0)
    check_training(of_family(zoo, "mobilenet_v3_small"), "mobilenet_v3_small")


def test_gradients_have_the_strides_of_their_parameters(zoo):
    """DistributedDataParallel asks for that also where a size is 1, and warns."""
    model = timm_model(zoo, "mobilenetv3_small_050", num_classes=10)
    assert fusedtrain.fuse(model).swapped
    model.to(memory_format=torch.channels_last)
    model(harness.images((2, 3, 32, 32), "channels_last")).sum().backward()
    for name, p in model.named_parameters():
        assert p.grad.stride() == p.stride(), name


def test_blocks_are_one_op_on_every_backend_that_is_forced(zoo, device, backend, monkeypatch):
    module, calls = sys.modules["fusedtrain.nn.depthwise_bn_act_se"], []
    real = module.depthwise_bn_act_se
    monkeypatch.setattr(
        module, "depthwise_bn_act_se", lambda *args, **options: calls.append(1) or real(*args, **options)
    )
    (block,) = timm_model(zoo, "mobilenetv3_small_050").blocks[0]
    fusedtrain.fuse(block.to(device))
    images = harness.images((2, block.conv_dw.in_channels, 5, 6)).to(device)
    assert block(images).isfinite().all() and calls == [1]


@pytest.fixture
def gathered(monkeypatch):
    """A list that grows with every 1x1 convolution which gathers statistics, on any CPU."""
    if reason := harness.why_not("cpu", "cpu", "pointwise_conv2d"):
        pytest.skip(reason)
    module, calls = sys.modules["fusedtrain.ops.pointwise_conv2d"], []
    real = module._STATS
    monkeypatch.setattr(module._rules, "by_kernel", lambda x, *_: x.dtype == torch.float32)
    monkeypatch.setattr(module, "_STATS", lambda *inputs: calls.append(1) or real(*inputs))
    return calls


def blocks_with_1x1_convolutions(zoo):
    expanded = timm_model(zoo, "mobilenetv3_small_050").blocks[1][0]
    norm_act = zoo.timm.layers.ConvNormAct(24, 40, 1, act_layer=nn.SiLU)
    of_torchvision = zoo.torchvision.ops.Conv2dNormActivation(24, 40, 1, activation_layer=nn.Hardswish)
    return {"expanded": expanded, "norm_act": norm_act, "torchvision": of_torchvision}


@pytest.mark.parametrize("name", ["expanded", "norm_act", "torchvision"])
def test_1x1_convolutions_gather_the_statistics_of_the_norm_behind_them(zoo, gathered, name):
    torch.manual_seed(0)
    block = blocks_with_1x1_convolutions(zoo)[name]
    stock = nn.Sequential(nn.Conv2d(3, next(block.parameters()).shape[1], 3), block).train()
    stock.to(memory_format=torch.channels_last)  # where the kernel runs
    fused = copy.deepcopy(stock)
    fusedtrain.fuse(fused[1])
    with fusedtrain.use_backend("cpu"):
        assert_model_as_good_as_torch(fused, stock, name, size=18)
        count = len(gathered)
        fused.eval()(harness.images((2, 3, 18, 18)))
    assert count == 4 and len(gathered) == count  # once in every step of training; in evaluation the running ones count


def test_hooks_between_a_1x1_convolution_and_its_norm_are_called(zoo, gathered):
    block, calls = blocks_with_1x1_convolutions(zoo)["torchvision"].train(), []
    fusedtrain.fuse(block)
    block[0].register_forward_hook(lambda *_: calls.append(1))
    with fusedtrain.use_backend("cpu"):
        block(harness.images((2, 24, 8, 8), "channels_last"))
    assert calls == [1] and not gathered


def check_training(model, what):
    fused = copy.deepcopy(model).train()
    assert fusedtrain.fuse(fused).swapped
    optimizer = torch.optim.SGD(fused.parameters(), lr=0.01)
    for seed in range(20):
        optimizer.zero_grad()
        fused(harness.images((8, 3, 64, 64), seed=seed)).square().mean().backward()
        optimizer.step()
    model.load_state_dict(fused.state_dict())
    for training in (True, False):
        mode = "training" if training else "evaluation"
        assert_model_as_good_as_torch(fused.train(training), model.train(training), f"{what} after 20 steps, {mode}")


def test_objects_hooks_optimizers_and_shared_modules_stay(zoo):
    model = small_model(zoo)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shared, calls = model[1], []
    shared.register_forward_hook(lambda *_: calls.append("hook"))
    report = fusedtrain.fuse(model)
    assert [candidate.name for candidate in report.swapped] == ["1", "5"]
    assert model[1] is model[4] is shared and isinstance(shared, fusedtrain.nn.SqueezeExcite)
    before = shared.conv_expand.bias.detach().clone()
    model(harness.images((2, 3, 8, 8))).sum().backward()
    optimizer.step()
    assert calls == ["hook", "hook"] and not torch.equal(shared.conv_expand.bias, before)


def test_weights_load_before_and_after(zoo):
    source, model = small_model(zoo), small_model(zoo)
    fusedtrain.fuse(model)
    model.load_state_dict(source.state_dict())
    fusedtrain.fuse(source)
    x = harness.images((2, 3, 8, 8))
    assert torch.equal(model(x), source(x))


def test_copies_pickles_and_checkpoints_of_a_fused_model(zoo):
    model = small_model(zoo).eval()
    fusedtrain.fuse(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    x = harness.images((2, 3, 8, 8))
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        assert classes_of(other) == classes_of(model)
        assert torch.equal(other(x), model(x))
        assert len(fusedtrain.unfuse(other)) == 2


def test_parametrized_fused_layers_are_copied_and_not_pickled_as_in_torch(zoo):
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), zoo.timm.layers.BatchNormAct2d(8)).eval()
    fusedtrain.fuse(model)
    x = harness.images((2, 8, 5, 6))
    for layer, name in ((model[0], "weight"), (model[1], "bias")):
        parametrize.register_parametrization(layer, name, nn.Identity())
        with pytest.raises(RuntimeError, match="only supported through state_dict"):
            pickle.dumps(layer)
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_unfused_models_script_and_export_with_the_trained_weights(zoo):
    model = small_model(zoo).eval()
    classes = classes_of(model)
    fusedtrain.fuse(model)
    with torch.no_grad():
        model[5].fc1.weight.mul_(2)
    x = harness.images((2, 3, 8, 8))
    fused = model(x)
    report = fusedtrain.unfuse(model)
    assert len(report.swapped) == 2 and not report.kept and classes_of(model) == classes
    assert all("stock" not in name for module in model.modules() for name in vars(module))
    stock, truth = model(x), copy.deepcopy(model).double()(x.double())
    harness.assert_as_good_as_torch(fused, stock, truth, "fused")
    assert torch.equal(torch.jit.script(model)(x), stock)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), stock)


# A network of each kind of block: separable with a gate, residual, MBConv, torchvision's.
FAMILIES = ("lcnet_050", "test_resnet", "test_efficientnet", "mobilenet_v3_small")


def of_family(zoo, name, count=4):
    """A network with few of the blocks that the one of this name has, torchvision's with ``count``; without dropout."""
    if name == "mobilenet_v3_small":
        module = zoo.torchvision.models.mobilenetv3
        blocks, _ = module._mobilenet_v3_conf(name)
        return module.MobileNetV3(blocks[:count], last_channel=64, num_classes=10, dropout=0.0)
    return thinned(timm_model(zoo, name, num_classes=10))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_models_are_traced_unfused_ones_scripted_too(zoo, family):
    model = of_family(zoo, family).eval()
    x, other = (harness.images((2, 3, size, size)) for size in (32, 48))
    fusedtrain.fuse(model)
    traced = torch.jit.trace(model, x)  # recording gradients, as a model does by default
    assert "PythonOp" not in str(traced.inlined_graph)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(other), model(other))
    with pytest.raises(
        RuntimeError, match=r"cannot script the fused layer \w+: call fusedtrain.unfuse\(model\) first, whose report"
    ):
        torch.jit.script(model)
    fusedtrain.unfuse(model)
    for other_form in (torch.jit.trace(model, x), torch.jit.script(model)):
        assert torch.equal(other_form(x), model(x))


def randomised(model):
    """Statistics and scales as after some training, so that a layer left out shows."""
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            for t, low, high in ((norm.running_mean, -0.2, 0.2), (norm.running_var, 0.5, 2), (norm.weight, 0.5, 1.5)):
                nn.init.uniform_(t, low, high)
    return model.eval()


@pytest.mark.parametrize("name", ["lcnet_050", "repghostnet_050", "mobileone_s0", "fastvit_t8"])
def test_timms_tools_do_to_fused_models_what_they_do_to_others(zoo, name):
    torch.manual_seed(0)
    model = randomised(thinned(timm_model(zoo, name, num_classes=10)))
    x, utils = harness.images((2, 3, 64, 64)), zoo.timm.utils.model
    fused_model = copy.deepcopy(model)
    assert fusedtrain.fuse(fused_model).swapped
    for tools in (
        [utils.freeze_batch_norm_2d, utils.unfreeze_batch_norm_2d, zoo.timm.layers.convert_sync_batchnorm],
        [utils.reparameterize_model],
    ):
        fused, stock = copy.deepcopy(fused_model), copy.deepcopy(model)
        for tool in tools:  # one after the other
            fused, stock = tool(fused).eval(), tool(stock).eval()
            with torch.no_grad():
                truth = copy.deepcopy(stock).double()(x.double())
                harness.assert_as_good_as_torch(fused(x), stock(x), truth, f"{name} after {tool.__name__}")


def padded(conv):
    conv.padding = (1, 1)


def grown(conv):
    conv.kernel_size, conv.padding, conv.weight = (3, 3), (1, 1), nn.Parameter(harness.normal(8, 8, 3, 3))


def grouped(conv):
    conv.groups, conv.weight = 2, nn.Parameter(harness.normal(8, 4, 1, 1))


def mixing(conv):
    conv.groups, conv.weight = 1, nn.Parameter(harness.normal(8, 8, 3, 3))


@pytest.mark.parametrize("change", [padded, grown, grouped, mixing], ids=lambda change: change.__name__)
def test_convolutions_may_become_others_after_fuse(change, zoo):
    stock = nn.Sequential(
        *(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1)),
        *(nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.ReLU()),
        zoo.timm.layers.Conv2dSame(8, 8, 3, groups=8),
    )
    fused = copy.deepcopy(stock)
    fusedtrain.fuse(fused)
    for model in (fused, stock):
        for i in (4, 7) if change is mixing else (0, 3):
            change(model[i])
    x = harness.images((2, 8, 9, 9))
    harness.assert_as_good_as_torch(fused(x), stock(x), copy.deepcopy(stock).double()(x.double()), change.__name__)


def test_images_of_other_channels_are_no_channel_multiplier():
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.ReLU())
    fusedtrain.fuse(model)
    for layer in (model, model[0]):
        with pytest.raises(ValueError, match=r"x must have 8 channels, got shape \[2, 4, 9, 9\]"):
            layer(harness.images((2, 4, 9, 9)))


def test_fused_models_run_on_the_meta_device(zoo):
    with torch.device("meta"):
        model, x = timm_model(zoo, "lcnet_050", num_classes=10), torch.empty(2, 3, 64, 64)
    fusedtrain.fuse(model)
    y = model(x)
    y.sum().backward()
    assert y.shape == (2, 10) and all(p.grad.is_meta for p in model.parameters())


def test_unfuse_names_the_fused_layers_that_it_cannot_change():
    class Doubled(fusedtrain.nn.BatchNorm2d):
        def forward(self, x):
            return 2 * super().forward(x)

    class Scaled(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.norm, self.scale = nn.BatchNorm2d(c), nn.Parameter(torch.ones(c, 1, 1))

        def forward(self, x):
            return self.norm(x).relu() * self.scale

    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), Doubled(4), Scaled(4))
    fusedtrain.fuse(model[2])
    fusedtrain.fuse(model)
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.orthogonal(model[2], "scale")
    kept = [(c.name, c.reason) for c in fusedtrain.unfuse(model).kept]
    assert kept == [("0", "it is parametrized"), ("1", "its class is a derived one"), ("2", "it is parametrized")]
    model(harness.images((2, 4, 9, 9)))
    for i, name in ((0, "weight"), (2, "scale")):
        nn.utils.parametrize.remove_parametrizations(model[i], name)
    assert [c.name for c in fusedtrain.unfuse(model).swapped] == ["0", "2"]
    assert type(model[0]) is nn.Conv2d and type(model[2]) is Scaled


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_torchs_quantisation_is_refused_before_it_leaves_layers_out(zoo):
    model, one = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    fusedtrain.fuse(model)
    for module in (model, one):
        module.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    with pytest.raises(RuntimeError, match=r"torch.ao.quantization does not know .* DepthwiseConv2d .*unfuse\(model\)"):
        torch.ao.quantization.prepare_qat(model)
    assert not hasattr(model[0], "qconfig")
    model.qconfig = model[0].qconfig = model[1].qconfig = None
    one.append(model)  # which is left out, as the user has said
    prepared = torch.ao.quantization.prepare_qat(one)
    assert type(prepared[0]) is not nn.Linear and type(prepared[1][0]) is type(model[0])
    fusedtrain.unfuse(model)
    model[0].qconfig = one.qconfig
    assert [c.reason for c in fusedtrain.fuse(model).kept] == ["it is prepared for quantisation (qconfig)"]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_dynamic_quantisation_of_a_class_is_refused_before_it_leaves_layers_out():
    model, quantize = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Linear(4, 4)), torch.ao.quantization.quantize_dynamic
    fusedtrain.fuse(model)
    for classes in (None, {nn.Linear}):
        with pytest.raises(RuntimeError, match=r"torch.ao.quantization does not know .* Linear .*unfuse\(model\)"):
            quantize(model, classes)
    assert type(quantize(model, {nn.LSTM})[1]) is type(model[1])
    qconfig = torch.ao.quantization.default_dynamic_qconfig
    assert type(quantize(model, {nn.Linear: qconfig, "1": None})[1]) is type(model[1])
    model[1].qconfig = None  # the user leaves it out
    assert type(quantize(model)[1]) is type(model[1])
    fusedtrain.unfuse(model)
    del model[1].qconfig
    assert type(quantize(model)[1]) is torch.ao.nn.quantized.dynamic.Linear


def replaced_convolution(conv):
    """As done to have images wrap around: the module's own method is another."""
    conv._conv_forward = lambda input, weight, bias: 2 * nn.functional.conv2d(input, weight, bias, groups=conv.groups)


@pytest.mark.parametrize("kernel_size", [1, 3])
@pytest.mark.parametrize("after", [False, True])
def test_a_convolution_replaced_in_its_layer_is_called(after, kernel_size):
    stock = nn.Sequential(
        nn.Conv2d(8, 8, kernel_size, groups=1 if kernel_size == 1 else 8), nn.BatchNorm2d(8), nn.ReLU()
    )
    fused = copy.deepcopy(stock)
    replaced_convolution(stock[0])
    if after:
        fusedtrain.fuse(fused)
    replaced_convolution(fused[0])
    fusedtrain.fuse(fused)
    x = harness.images((2, 8, 9, 9))
    for model in (fused.eval(), stock.eval()):
        nn.init.ones_(model[1].running_mean)
    harness.assert_as_good_as_torch(fused(x), stock(x), copy.deepcopy(stock).double()(x.double()), "replaced")


def test_torch_fx_traces_fused_models(zoo):
    torch.manual_seed(0)
    model = randomised(zoo.torchvision.models.mobilenet_v3_small(num_classes=10))
    x = harness.images((2, 3, 32, 32))
    stock, truth = model(x), copy.deepcopy(model).double()(x.double())
    fusedtrain.fuse(model)
    harness.assert_as_good_as_torch(torch.fx.symbolic_trace(model)(x), stock, truth, "traced")


class Twice(nn.Module):
    """Blocks and layers by themselves, one of them called twice."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8))
        self.shared, self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 3, groups=2)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.norm(self.shared(self.shared(self.stem(x))))
        return self.head(self.grouped(x).mean((2, 3)))


NAMED = ["mobilenet_v2", "shufflenet_v2_x0_5", "twice"]


def _traceable(zoo, name):
    torch.manual_seed(0)
    if name == "efficientnet_pytorch":
        network = pytest.importorskip(name).EfficientNet
        return randomised(thinned(network.from_name("efficientnet-b0", num_classes=10, drop_connect_rate=0.0)))
    model = Twice() if name == "twice" else getattr(zoo.torchvision.models, name)(num_classes=10)
    return randomised(thinned(model))


@pytest.mark.parametrize("name", NAMED)
def test_torch_fx_names_layers_and_their_calls_as_in_the_stock_network(zoo, name):
    names = zoo.torchvision.models.feature_extraction.get_graph_node_names
    model = _traceable(zoo, name)
    stock = names(model)
    fusedtrain.fuse(model)
    assert names(model) == stock


def test_torch_fx_records_fused_layers_as_it_does_torchs():
    layers = [
        fusedtrain.nn.DepthwiseConv2d(8, 8, 3),
        fusedtrain.nn.DepthwiseConv2dSame(8, 8, 3),
        fusedtrain.nn.PointwiseConv2d(8, 8),
        fusedtrain.nn.GroupedConv2d(8, 8, 3, groups=2),
        fusedtrain.nn.BatchNorm2d(8),
        fusedtrain.nn.BatchNormAct2d(8),
        fusedtrain.nn.SyncBatchNormAct(8),
        fusedtrain.nn.DepthwiseBnActSe(8, 4),
        fusedtrain.nn.Linear(8, 8),
    ]
    graph = torch.fx.symbolic_trace(nn.Sequential(*layers)).graph
    assert [(node.op, node.target) for node in graph.nodes][1:-1] == [("call_module", str(i)) for i in range(9)]


# The gates of RegNet and the swishes of efficientnet_pytorch are calls of ops, by whose names nobody asks.
@pytest.mark.parametrize("name", [*NAMED, "regnet_y_400mf", "efficientnet_pytorch"])
@pytest.mark.parametrize("training", [False, True])
def test_traced_models_go_from_training_to_evaluation_and_back(zoo, name, training):
    model, x = _traceable(zoo, name).train(training), harness.images((4, 3, 64, 64))
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    stock, truth = copy.deepcopy(model), copy.deepcopy(model).double()
    fusedtrain.fuse(model)
    mine, theirs, exact = (torch.fx.symbolic_trace(m).train(not training) for m in (model, stock, truth))
    harness.assert_as_good_as_torch(mine(x), theirs(x), exact(x.double()), "output")
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    for key, value in exact.state_dict().items():
        a, b = mine.state_dict()[key], theirs.state_dict()[key]
        if value.is_floating_point():
            harness.assert_as_good_as_torch(a, b, value, key)
        else:
            assert torch.equal(a, b), key


def test_features_of_layers_that_a_block_calls_twice_are_those_of_the_stock_network(zoo):
    """torchvision names what a traced network computes by layers and by how often these were called."""
    model = randomised(zoo.torchvision.models.resnet18(num_classes=10))
    x, names = harness.images((2, 3, 32, 32)), ["layer2.0.relu", "layer2.0.relu_1", "layer3"]
    extract = zoo.torchvision.models.feature_extraction.create_feature_extractor
    stock, truth = extract(model, names)(x), extract(copy.deepcopy(model).double(), names)(x.double())
    fusedtrain.fuse(model)
    for name, features in extract(model, names)(x).items():
        harness.assert_as_good_as_torch(features, stock[name], truth[name], name)


def test_layers_built_fused_get_the_stock_class_of_their_name(zoo):
    layers = [fusedtrain.nn.SEModule(16), fusedtrain.nn.SEBlock(16), fusedtrain.nn.SENetModule(16, 4)]
    layers += [kind(16) for kind in (fusedtrain.nn.GlobalContext, fusedtrain.nn.SplitAttn, fusedtrain.nn.CbamModule)]
    model = nn.Sequential(*layers).eval()
    x = harness.images((2, 16, 4, 4))
    fused = model(x)
    assert [c.after.removeprefix("timm.") for c in fusedtrain.unfuse(model)] == [
        "layers.squeeze_excite.SEModule",
        "models.senet.SEModule",
        "layers.global_context.GlobalContext",
        "layers.split_attn.SplitAttn",
        *(f"layers.cbam.{name}" for name in ("CbamModule", "ChannelAttn", "SpatialAttn")),
        "layers.norm_act.BatchNormAct2d",
    ]
    stock, truth = model(x), copy.deepcopy(model).double()(x.double())
    harness.assert_as_good_as_torch(fused, stock, truth, "layers built fused")


def test_the_whole_model_may_be_one_layer(zoo):
    layer = zoo.timm.layers.EcaModule(16)
    assert str(fusedtrain.fuse(layer)).startswith(
        "(the model)  timm.layers.eca.EcaModule -> fusedtrain.nn.eca.EcaModule"
    )
    assert isinstance(layer, (fusedtrain.nn.EcaModule, zoo.timm.layers.EcaModule))


def test_what_python_adds_to_a_class_does_not_keep_its_layers(monkeypatch):
    """Python 3.14 keeps annotations in a function and what it returned."""
    names = ["__annotate_func__", "__annotations_cache__"]
    for name in names:
        monkeypatch.setattr(nn.Conv2d, name, None, raising=False)
    model = nn.Sequential(type("Conv", (nn.Conv2d,), dict.fromkeys(names))(8, 8, 3, groups=8))
    fusedtrain.fuse(model)
    assert isinstance(model[0], fusedtrain.nn.DepthwiseConv2d)


def derived(zoo, layer):
    class Doubled(type(layer)):
        def forward(self, x):
            return 2 * super().forward(x)

    layer.__class__ = Doubled


def patched(zoo, layer):
    layer.forward = lambda x: x


def quantised(zoo, layer):
    layer.qconfig = object()


def foreign(zoo, layer):
    del layer.gate


def lazy(zoo, layer):
    layer.conv_reduce = nn.LazyConv2d(4, 1)


def parametrized(zoo, layer):
    layer.scale = nn.Parameter(torch.ones(1))
    parametrize.register_parametrization(layer, "scale", nn.Identity())


def compiled(zoo, layer):
    layer.compile()


REASONS = {
    derived: r"its class is not timm\S+SqueezeExcite but derived from it",
    patched: "its forward has been replaced",
    quantised: "prepared for quantisation",
    foreign: r"it has no gate: an unknown version of timm\S+SqueezeExcite",
    lazy: "it holds a UninitializedParameter instead of a plain parameter",
    parametrized: r"it is parametrized \(scale\)",
    compiled: "it is, or stands in, a compiled module",
}


@pytest.mark.parametrize("change", REASONS, ids=lambda change: change.__name__)
def test_what_is_not_sure_to_be_the_same_stays_with_its_reason(change, zoo):
    model = small_model(zoo)
    change(zoo, model[1])
    kind = type(model[1])
    report = fusedtrain.fuse(model)
    assert type(model[1]) is kind and [c.name for c in report.swapped] == ["5"]
    (kept,) = report.kept
    assert kept.name == "1"
    with pytest.raises(AssertionError, match=REASONS[change]):
        raise AssertionError(str(report))


def test_channel_attention_without_a_fused_layer_is_named(zoo):
    model = nn.Sequential(zoo.timm.layers.gather_excite.GatherExcite(16, use_mlp=False), zoo.timm.layers.SEModule(16))
    report = fusedtrain.fuse(model)
    assert [c.reason for c in report.kept] == ["there is no fused layer for it yet"] and len(report.swapped) == 1


def test_wrapped_and_compiled_models_are_refused_or_left_alone(zoo):
    model = small_model(zoo)
    script = torch.jit.script(nn.Sequential(nn.ReLU()))
    for wrapped in (nn.DataParallel(model), torch.compile(model), script):
        for function in (fusedtrain.fuse, fusedtrain.unfuse):
            with pytest.raises(
                ValueError, match=f"{function.__name__}\\(\\) takes a model before it is wrapped or compiled"
            ):
                function(wrapped)
    outer = nn.Sequential(nn.ReLU(), nn.DataParallel(model), copy.deepcopy(model[5]))
    report = fusedtrain.fuse(outer)
    assert [c.name for c in report.swapped] == ["2"]
    assert {c.reason for c in report.kept} == {"it is, or stands in, a DataParallel; fuse before wrapping"}
    with pytest.raises(TypeError, match="takes a module, got OrderedDict"):
        fusedtrain.fuse(model.state_dict())


def test_a_model_in_distributed_data_parallel_is_refused(zoo, tmp_path):
    model = small_model(zoo)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(ValueError, match="this is a DistributedDataParallel"):
            fusedtrain.fuse(wrapped)
        assert len(fusedtrain.fuse(copy.deepcopy(wrapped.module)).swapped) == 2
    finally:
        torch.distributed.destroy_process_group()


def test_sequences_may_hold_empty_ones():
    for layers in ((nn.Sequential(), nn.BatchNorm2d(4)), (nn.BatchNorm2d(4), nn.Sequential())):
        model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), *layers, nn.ReLU())
        stock, x = copy.deepcopy(model), harness.images((2, 4, 8, 8))
        assert fusedtrain.fuse(model).swapped
        harness.assert_as_good_as_torch(model(x), stock(x), copy.deepcopy(stock).double()(x.double()), str(layers))


@pytest.mark.parametrize("shape", [(6, 8), (6, 8, 5), (2, 8, 2, 3, 4)])
@pytest.mark.parametrize("training", [False, True])
def test_synchronised_norms_take_images_of_any_dimension(shape, training):
    norm = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 5: nn.BatchNorm3d}[len(shape)]
    model = nn.Sequential(norm(8), nn.ReLU()).train(training)
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model)).train(training)
    assert fusedtrain.fuse(synchronised).swapped
    x = harness.normal(*shape)
    truth = copy.deepcopy(model).double()(x.double())
    harness.assert_as_good_as_torch(synchronised(x), model(x), truth, f"{shape}")
    assert torch.equal(synchronised[0].num_batches_tracked, model[0].num_batches_tracked)
    with pytest.raises(ValueError, match="expected at least 2D input"):
        synchronised(x.flatten())


def test_activations_that_torchs_conversion_has_dropped_stay_dropped(zoo):
    model = timm_model(zoo, "lcnet_050", num_classes=10)
    stock = nn.SyncBatchNorm.convert_sync_batchnorm(randomised(model))
    fused, x = copy.deepcopy(stock).eval(), harness.images((2, 3, 64, 64))
    report = fusedtrain.fuse(fused)
    reasons = {c.reason for c in report.kept if c.name.endswith(("bn1", "bn2"))}
    assert reasons == {
        "nn.SyncBatchNorm does not call its drop and act; timm.layers.convert_sync_batchnorm makes what does"
    }
    with torch.no_grad():
        truth = copy.deepcopy(stock.eval()).double()(x.double())
        harness.assert_as_good_as_torch(fused(x), stock(x), truth, "lcnet_050")


def test_layers_of_dtypes_that_the_ops_lack_stay():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 8, 1), nn.Linear(6, 6)).to(torch.complex64)
    report = fusedtrain.fuse(model)
    assert [c.reason for c in report.kept] == ["it holds parameters of torch.complex64, which the ops lack"] * 3
    model(torch.zeros(1, 4, 8, 8, dtype=torch.complex64))


def test_images_may_be_given_by_name(zoo):
    ops = zoo.torchvision.ops
    layers = ops.SqueezeExcitation(16, 4), ops.Conv2dNormActivation(16, 16, 1), nn.SyncBatchNorm(16).eval()
    model = nn.ModuleList([*layers, nn.BatchNorm2d(16), zoo.timm.layers.BatchNormAct2d(16)])
    assert len(fusedtrain.fuse(model).swapped) >= 5
    x = harness.images((2, 16, 9, 9))
    for layer, name in zip(model, ("input", "input", "input", "input", "x"), strict=True):
        assert layer(**{name: x}).shape == x.shape and list(inspect.signature(layer.forward).parameters) == [name]


BATCHED = {
    "block": lambda zoo: nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16), nn.SiLU()),
    "depthwise": lambda zoo: nn.Conv2d(16, 16, 3, padding=1, groups=16),
    "gate": lambda zoo: zoo.torchvision.ops.SqueezeExcitation(16, 4),
}


@pytest.mark.parametrize("name", BATCHED)
def test_gradients_of_batches_are_refused_by_name_or_right(name, zoo):
    stock = BATCHED[name](zoo)
    model = copy.deepcopy(stock)
    fusedtrain.fuse(model)
    x = harness.images((2, 16, 32, 32)).contiguous(memory_format=torch.channels_last).requires_grad_()

    def gradients(model, x=x):
        y = model(x)
        return torch.autograd.grad(y, x, torch.stack([y.detach(), y.detach() + 1]), is_grads_batched=True)[0]

    with fusedtrain.use_backend("cpu"), pytest.raises(RuntimeError, match=r"no gradient of a batch .*'reference'"):
        gradients(model)
    with fusedtrain.use_backend("reference"):
        truth = gradients(copy.deepcopy(stock).double(), x.detach().double().requires_grad_())
        harness.assert_as_good_as_torch(gradients(model), gradients(stock), truth, "gradients of a batch")


def test_options_of_convolutions_may_be_integers_of_numpy(zoo):
    one, two, four = map(np.int64, (1, 2, 4))
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(16, 16, 3, two, one, groups=16), nn.BatchNorm2d(16), nn.ReLU()),
        nn.Conv2d(16, 16, 3, padding=one, dilation=one, groups=16),
        nn.Conv2d(16, 16, 3, padding=(one, one), groups=four),
        zoo.timm.layers.Conv2dSame(16, 16, 3, two, groups=16),
        nn.Conv2d(16, 8, 1, two),
    )
    stock = copy.deepcopy(model)
    assert len(fusedtrain.fuse(model).swapped) == 7
    x = harness.images((2, 16, 24, 24)).contiguous(memory_format=torch.channels_last)
    harness.assert_as_good_as_torch(model(x), stock(x), copy.deepcopy(stock).double()(x.double()), "integers of numpy")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("family", "strict"), [*((family, False) for family in FAMILIES), ("mobilenet_v3_small", True)]
)
def test_fused_models_are_exported_for_batches_of_any_size(zoo, family, strict):
    torch.manual_seed(0)
    model = randomised(of_family(zoo, family, 2 if strict else 4))
    fusedtrain.fuse(model)
    batch, file = torch.export.Dim("batch", min=1, max=4096), io.BytesIO()
    exported = torch.export.export(
        model, (harness.images((2, 3, 32, 32)),), dynamic_shapes=({0: batch},), strict=strict
    )
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for size in (1, 40):
        x = harness.images((size, 3, 32, 32))
        truth = copy.deepcopy(model).double()(x.double())
        harness.assert_as_good_as_torch(loaded(x), model(x), truth, f"batch of {size}")


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="dynamo knows no hints of sizes")
@pytest.mark.parametrize(("family", "sizes"), [("test_resnet", (64, 256)), ("test_efficientnet", (256, 64))])
def test_fused_models_compile_once_for_images_that_different_backends_take(zoo, family, sizes):
    """A network has dozens of the sizes by which backends are chosen, and torch.compile gives up after 8 graphs."""
    torch.manual_seed(0)
    model = randomised(of_family(zoo, family))
    stock, truth = copy.deepcopy(model), copy.deepcopy(model).double()
    fusedtrain.fuse(model)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for size in sizes:
        x = harness.images((2, 3, size, size + 32))
        harness.assert_as_good_as_torch(compiled(x), stock(x), truth(x.double()), f"{size} pixels")
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_models_exported_in_training_are_saved_and_loaded(zoo, family, tmp_path):
    torch.manual_seed(0)
    model = of_family(zoo, family).train()
    fusedtrain.fuse(model)
    sizes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    exported = torch.export.export(model, (harness.images((2, 3, 64, 64)),), dynamic_shapes=sizes)
    torch.export.save(exported, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    x = harness.images((5, 3, 64, 64))
    truth = copy.deepcopy(model).double()(x.double())
    harness.assert_as_good_as_torch(loaded(x), model(x), truth, "logits")
    for mine, eager in zip(loaded.buffers(), model.buffers()):
        torch.testing.assert_close(mine, eager)

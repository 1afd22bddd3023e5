"""fuse() and unfuse(): what becomes fused, what stays and why, and that nothing else of a model changes."""

import copy
import io
import pickle

import harness
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import fusedtrain

# One model for every architecture file of timm with channel attention that has a fused layer: model -> how many.
TIMM_MODELS = {
    "cspnext_tiny": 4,
    "eca_botnext26ts_256": 5,
    "eca_resnext26ts": 8,
    "eca_vovnet39b": 4,
    "ecaresnet26t": 8,
    "efficientvim_m2": 2,
    "efficientvit_m2": 2,
    "ese_vovnet19b_slim": 4,
    "fastvit_t8": 1,
    "gcvit_xxtiny": 11,
    "ghostnet_050": 7,
    "hardcorenas_a": 8,
    "lcnet_050": 2,
    "lcnetv2_small": 4,
    "legacy_seresnet18": 8,
    "nf_ecaresnet26": 8,
    "rdnet_tiny": 15,
    "regnety_002": 13,
    "repghostnet_058": 7,
    "repvit_m1_1": 9,
    "rexnetr_130": 13,
    "sebotnet33ts_256": 6,
    "sedarknet21": 7,
    "seresnet18": 8,
    "shvit_s2": 2,
    "test_byobnet": 4,
    "test_coatnet": 2,
    "test_efficientnet_evos": 2,
    "test_nfnet": 4,
    "tresnet_m": 18,
}


def timm_model(zoo, name, **options):
    if not zoo.timm.is_model(name):
        pytest.skip(f"timm {zoo.timm.__version__} has no {name}")
    return zoo.timm.create_model(name, **options)


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


@pytest.mark.parametrize("name", TIMM_MODELS)
def test_every_architecture_of_timm_with_channel_attention(name, zoo):
    with torch.device("meta"):
        model = timm_model(zoo, name)
    before, classes, parameters = layout_of(model), classes_of(model), list(model.parameters())
    planned = fusedtrain.fuse(model, dry_run=True)
    assert classes_of(model) == classes
    report = fusedtrain.fuse(model)
    assert report == planned and attention(report) == TIMM_MODELS[name], report
    assert all(a is b for a, b in zip(model.parameters(), parameters)) and layout_of(model) == before
    for candidate in report.swapped:
        fused = type(model.get_submodule(candidate.name))
        assert f"{fused.__module__}.{fused.__qualname__}" == candidate.after
    assert not fusedtrain.fuse(model).swapped
    assert len(fusedtrain.unfuse(model)) == len(report.swapped)
    assert classes_of(model) == classes and layout_of(model) == before


def step(model, x):
    """Returns the output and all gradients of one training step."""
    model.zero_grad()
    y = model(x)
    y.square().mean().backward()
    return y.detach(), [p.grad.double() for p in model.parameters()]


def assert_model_as_good_as_torch(fused, stock, what):
    """The rule for the output and for all gradients together, each over the largest number of its tensor.

    Gradients are judged in the median of several batches: a value that rounding puts on the other side of a kink of an
    activation changes those of its whole batch, in torch's network as often as in ours.
    """
    outputs, gradients = ([], [], []), ([], [], [])  # of torch in float64, torch, ours
    for seed in range(6):
        x = harness.images((4, 3, 64, 64), seed=seed)
        models = copy.deepcopy(stock).double(), copy.deepcopy(stock), copy.deepcopy(fused)
        results = [step(model, batch) for model, batch in zip(models, (x.double(), x, x))]
        largest = max(gradient.abs().max() for gradient in results[0][1])
        scales = [gradient.abs().max().clamp(min=1e-3 * largest) for gradient in results[0][1]]
        for (y, grads), ys, flats in zip(results, outputs, gradients):
            ys.append(y)
            flats.append(torch.cat([(g / scale).flatten() for g, scale in zip(grads, scales)]))
    truth, theirs, ours = map(torch.stack, outputs)
    harness.assert_as_good_as_torch(ours, theirs, truth, f"{what} y [batch, ...]")
    truth, theirs, ours = map(torch.stack, gradients)
    error, allowed = ((side - truth).abs().amax(1).median() for side in (ours, theirs))
    bound = 2 * allowed + 2 * torch.finfo(torch.float32).eps * truth.abs().max()
    assert error <= bound, f"{what} gradients: error {error:.3e}, torch's own {allowed:.3e}, allowed {bound:.3e}"


@pytest.mark.parametrize(
    "name", ["lcnet_050", "test_byobnet", "test_nfnet", "test_efficientnet_evos", "ese_vovnet19b_slim"]
)
def test_models_of_timm_train_as_well_as_before(name, zoo):
    torch.manual_seed(0)
    model = timm_model(zoo, name, num_classes=10)
    check_training(model, name)


def test_torchvisions_mobilenet_v3_trains_as_well_as_before(zoo):
    torch.manual_seed(0)
    model = zoo.torchvision.models.mobilenet_v3_small(num_classes=10, dropout=0.0)
    report = fusedtrain.fuse(model, dry_run=True)
    kinds = [candidate.after.rpartition(".")[2] for candidate in report.swapped]
    assert attention(report) == 9 and kinds.count("BatchNorm2d") == 34 and kinds.count("DepthwiseConv2d") == 11
    check_training(model, "mobilenet_v3_small")


def check_training(model, what):
    fused = copy.deepcopy(model)
    assert fusedtrain.fuse(fused).swapped
    assert_model_as_good_as_torch(fused.train(), model.train(), f"{what} at the start")
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
    assert model[1] is model[4] is shared and type(shared) is fusedtrain.nn.SqueezeExcite
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
    stock = model(x)
    torch.testing.assert_close(stock, fused)
    assert torch.equal(torch.jit.script(model)(x), stock)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), stock)


def test_layers_built_fused_get_the_stock_class_of_their_name(zoo):
    model = nn.Sequential(fusedtrain.nn.SEModule(16), fusedtrain.nn.SEBlock(16), fusedtrain.nn.SENetModule(16, 4))
    x = harness.images((2, 16, 4, 4))
    fused = model(x)
    assert [c.after for c in fusedtrain.unfuse(model)] == [
        "timm.layers.squeeze_excite.SEModule",
        "timm.models.senet.SEModule",
    ]
    torch.testing.assert_close(model(x), fused)


def test_the_whole_model_may_be_one_layer(zoo):
    layer = zoo.timm.layers.EcaModule(16)
    assert str(fusedtrain.fuse(layer)).startswith(
        "(the model)  timm.layers.eca.EcaModule -> fusedtrain.nn.eca.EcaModule"
    )
    assert type(layer) is fusedtrain.nn.EcaModule


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
    model = nn.Sequential(zoo.timm.layers.GlobalContext(16), zoo.timm.layers.SEModule(16))
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

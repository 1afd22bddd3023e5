"""fuse() on blocks of classes that nobody knows: found by what their forward does, or left alone."""

import builtins
import contextlib
import copy
import functools
import gc
import inspect
import io
import itertools
import logging
import math
import pickle
import random
import sys
import threading
import time
import types
import warnings
import weakref
from math import hypot
from time import monotonic

import harness
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_fuse import assert_model_as_good_as_torch
from torch import fx, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import checkpoint

import fusedtrain
from fusedtrain.nn import _channel_gate, batch_norm_act, depthwise_bn_act_se
from fusedtrain.nn.recorded import Recorded


class LinearGate(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(nn.Linear(c, 4, bias=False), nn.ReLU(), nn.Linear(4, c, bias=False), nn.Sigmoid())

    def forward(self, x):
        n, c, _, _ = x.size()
        y = self.fc(self.avg_pool(x).view(n, c)).view(n, c, 1, 1)
        return x * y.expand_as(x)


class ConvGate(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(c, 4, 1), nn.Conv2d(4, c, 1)

    def forward(self, x):
        return torch.sigmoid(self.expand(F.silu(self.reduce(x.mean((2, 3), keepdim=True))))) * x


class ConvNormAct(nn.Module):
    def __init__(self, c, out, kernel, stride=1, groups=1):
        super().__init__()
        self.conv = nn.Conv2d(c, out, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.norm, self.act = nn.BatchNorm2d(out), nn.SiLU()

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


class Nested(nn.Module):
    """The layers of one pattern stand in three classes and a Sequential."""

    def __init__(self, c):
        super().__init__()
        self.expand = ConvNormAct(c, 32, 1)
        self.rest = nn.Sequential(
            ConvNormAct(32, 32, 5, 2, 32), ConvGate(32), nn.Conv2d(32, 24, 1, bias=False), nn.BatchNorm2d(24)
        )

    def forward(self, x):
        return self.rest(self.expand(x))


class Flat(nn.Module):
    """All layers, also those of the gate, in one forward, with one activation for all and functions in between."""

    def __init__(self, c):
        super().__init__()
        self.conv0, self.norm0 = nn.Conv2d(c, 32, 1, bias=False), nn.BatchNorm2d(32)
        self.depthwise, self.norm1 = nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False), nn.BatchNorm2d(32)
        self.reduce, self.expand = nn.Conv2d(32, 4, 1), nn.Conv2d(4, 32, 1)
        self.conv2, self.norm2 = nn.Conv2d(32, c, 1, bias=False), nn.BatchNorm2d(c)
        self.act, self.skip = nn.SiLU(), True

    def forward(self, inputs, drop=None):
        x = self.act(self.norm0(self.conv0(inputs)))
        x = self.act(self.norm1(self.depthwise(x)))
        pooled = self.expand(self.act(self.reduce(F.adaptive_avg_pool2d(x, 1))))
        x = self.norm2(self.conv2(torch.sigmoid(pooled) * x))
        if drop:
            x = F.dropout(x, drop, self.training)
        return x + inputs if self.skip else x


class Functional(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(c, c, 3, padding=1, groups=c), nn.BatchNorm2d(c)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        x = F.relu6(self.norm(self.conv(x)), inplace=True)
        return self.drop(x) if self.training else x


class Bottleneck(nn.Module):
    """As in ResNet: one ReLU, in place, for all; the sum in place."""

    def __init__(self, c, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, stride, 1, bias=False), nn.BatchNorm2d(8)
        self.conv3, self.bn3 = nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.relu, self.downsample = nn.ReLU(inplace=True), None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(c, 16, 1, stride, bias=False), nn.BatchNorm2d(16))

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class Tied(nn.Module):
    """One activation under four names, and two names of one list, as in Xception and ultralytics' default_act."""

    def __init__(self, c):
        super().__init__()
        self.act = nn.ReLU()
        self.rep = nn.Sequential(self.act, nn.Conv2d(c, c, 3, 1, 1, groups=c), nn.BatchNorm2d(c), self.act)
        self.twice = nn.ModuleList([nn.Conv2d(c, c, 1), nn.BatchNorm2d(c)])
        self.again, self.tail = self.twice, nn.Sequential(self.act)

    def forward(self, x):
        x = self.tail(self.rep(x) + x)
        x = self.act(self.twice[1](self.twice[0](x)))
        return self.again[1](self.again[0](x))


class Strided(Bottleneck):
    def __init__(self, c):
        super().__init__(c, 2)


class SumBehind(nn.Module):
    """The residual is added to what is activated, on the left."""

    def __init__(self, c):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c)

    def forward(self, x):
        return torch.add(x, F.silu(self.norm(self.conv(x))))


class HardSigmoid(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU6(inplace=True)

    def forward(self, x):
        return self.relu(x + 3) / 6


class HardSwish(nn.Module):
    def __init__(self):
        super().__init__()
        self.sigmoid = HardSigmoid()

    def forward(self, x):
        return x * self.sigmoid(x)


class HardSwishAtOnce(nn.Module):
    def forward(self, x):
        return x * F.relu6(x + 3.0, inplace=True) / 6.0


class HardSwishOfAClamp(nn.Module):
    def forward(self, x):
        return (3 + x).clamp(0, max=6).mul(1 / 6).mul(x)


class SwishInPlace(nn.Module):
    def forward(self, x):
        return x.mul_(x.sigmoid())


class ByFormula(nn.Module):
    """The activations, also that of the gate, are written out, as where torch had none."""

    def __init__(self, c, act=HardSwish):
        super().__init__()
        gate = LinearGate(32)
        gate.fc[3] = HardSigmoid()
        self.conv = nn.Sequential(
            *(nn.Conv2d(c, 32, 1, bias=False), nn.BatchNorm2d(32), act()),
            *(nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False), nn.BatchNorm2d(32), act(), gate),
            *(nn.Conv2d(32, c, 1, bias=False), nn.BatchNorm2d(c)),
        )

    def forward(self, x):
        return x + self.conv(x)


class Unskipped(ByFormula):
    """The Sequential is fused by its class, too, which does not know its activations and its gate."""

    def forward(self, x):
        return self.conv(x)


# class -> which modules are found in it, the fused calls of one forward: blocks, gates, normalisations with more than
# themselves, and those of them with a residual
BLOCKS = {
    LinearGate: ([""], 0, 1, 0, 0),
    ConvGate: ([""], 0, 1, 0, 0),
    Nested: (["rest", "expand"], 1, 0, 1, 0),
    Flat: ([""], 1, 0, 2, 1),
    Functional: ([""], 1, 0, 0, 0),
    Bottleneck: ([""], 0, 0, 3, 1),
    Strided: ([""], 0, 0, 3, 1),
    Tied: ([""], 1, 0, 1, 0),
    SumBehind: ([""], 0, 0, 1, 1),
    ByFormula: ([""], 1, 0, 2, 1),
    Unskipped: ([""], 1, 0, 1, 0),
    functools.partial(ByFormula, act=HardSwishAtOnce): ([""], 1, 0, 2, 1),
    functools.partial(ByFormula, act=HardSwishOfAClamp): ([""], 1, 0, 2, 1),
    functools.partial(ByFormula, act=SwishInPlace): ([""], 1, 0, 2, 1),
}


def name_of(kind):
    return kind.keywords["act"].__name__ if isinstance(kind, functools.partial) else kind.__name__


def fused(kind, c=16):
    torch.manual_seed(0)
    block = kind(c)
    return block, copy.deepcopy(block), fusedtrain.fuse(block)


def by_hand(report):
    return [c.name for c in report.swapped if c.after == "fusedtrain.nn.recorded.Recorded"]


@pytest.fixture
def calls(monkeypatch):
    """Which of the ops were called; of normalisations those with an activation, "norm", or a residual, "sum"."""
    made = []

    def spy(module, name):
        real = getattr(module, name)

        def call(*args, **options):
            if "norm" not in name:
                made.append(name)
            elif options.get("residual") is not None:
                made.append("sum")
            elif options["act"] != "identity":
                made.append("norm")
            return real(*args, **options)

        monkeypatch.setattr(module, name, call)

    spy(depthwise_bn_act_se, "depthwise_bn_act_se")
    spy(depthwise_bn_act_se, "pointwise_conv2d_norm")
    spy(batch_norm_act, "batch_norm_act")
    spy(_channel_gate, "squeeze_excite")
    return made


@pytest.mark.parametrize("kind", BLOCKS, ids=name_of)
def test_blocks_compute_as_well_as_before_with_fewer_calls(kind, calls):
    block, stock, report = fused(kind)
    names, blocks, gates, norms, sums = BLOCKS[kind]
    assert by_hand(report) == names and isinstance(block, type(stock)) and not report.kept
    assert list(block.state_dict()) == list(stock.state_dict())
    entry = nn.Conv2d(3, 16, 1)
    for training in (True, False):
        pair = (nn.Sequential(entry, m).train(training) for m in (block, stock))
        assert_model_as_good_as_torch(*pair, f"{name_of(kind)}, training {training}", size=9)
        calls.clear()
        copy.deepcopy(block)(harness.images((2, 16, 9, 9)))
        assert [calls.count(name) for name in ("depthwise_bn_act_se", "squeeze_excite")] == [blocks, gates]
        assert [calls.count("norm") + calls.count("sum"), calls.count("sum")] == [norms, sums]


LISTED = {}


class Listing(nn.Sequential):
    """It lists its classes, as registries of layers do."""

    def __init_subclass__(cls, *, key, **options):
        super().__init_subclass__(**options)
        LISTED[key] = cls


class OfAList(Listing, key="block"):
    pass


def test_new_blocks_of_a_recorded_class_are_stock():
    def layers():
        return nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1)

    block = OfAList(*layers())
    fusedtrain.fuse(block)
    assert isinstance(block, Recorded) and LISTED["block"] is OfAList
    x, stock = harness.images((2, 16, 9, 9)), nn.Sequential(*copy.deepcopy(block)[:3])
    for model in (block[:3], type(block)(*block[:3]), copy.deepcopy(block[:3])):
        assert torch.equal(model(x), stock(x))

    class Further(type(block), key="further"):
        pass

    assert LISTED.keys() == {"block", "further"} and Further(*layers())(x).shape == (2, 8, 7, 7)


@pytest.mark.parametrize("kind", [LinearGate, Flat, Nested, Bottleneck], ids=lambda kind: kind.__name__)
def test_copies_pickles_and_the_way_back(kind):
    block, stock, report = fused(kind)
    x = harness.images((2, 16, 9, 9))
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    block.eval()
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block)), torch.load(file, weights_only=False).eval()):
        assert [type(m) for m in other.modules()] == [type(m) for m in block.modules()]
        assert torch.equal(other(x), block(x))
    assert not fusedtrain.fuse(block).swapped
    assert len(fusedtrain.unfuse(block).swapped) == len(report.swapped)
    assert [type(m) for m in block.modules()] == [type(m) for m in stock.modules()]
    assert all(vars(a).keys() == vars(b).keys() for a, b in zip(block.modules(), stock.modules()))


@pytest.mark.parametrize("kind", [LinearGate, ConvGate])
def test_gates_are_found_on_a_forced_backend(kind, calls):
    model = nn.Sequential(nn.Conv2d(3, 16, 1), kind(16))
    with fusedtrain.use_backend("cpu"):
        report = fusedtrain.fuse(model)
        model(harness.images((2, 3, 9, 9)))
    assert by_hand(report) == ["1"] and calls == ["squeeze_excite"]


def test_threads_may_copy_a_model_that_others_run():
    model = fused(Flat)[0].eval()
    x, failures = harness.images((2, 16, 9, 9)), []
    y = model(x)

    def run():
        try:
            for _ in range(10):
                assert torch.equal(copy.deepcopy(model)(x), y) and torch.equal(model(x), y)
        except Exception as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


class Meanwhile(Flat):
    """While it is recorded another thread does what ``Meanwhile.other`` says."""

    def forward(self, x):
        thread = threading.Thread(target=Meanwhile.other)
        thread.start()
        thread.join()
        return super().forward(x)


def test_threads_may_train_while_another_records():
    model, x = nn.Sequential(ConvNormAct(16, 8, 3), nn.Conv2d(8, 4, 1)), harness.images((2, 16, 9, 9))
    model(x).sum().backward()
    gradients, seen = [p.grad for p in model.parameters()], []

    def train():
        try:
            model.zero_grad()
            model(x).sum().backward()
            same = all(map(torch.equal, [p.grad for p in model.parameters()], gradients))
            seen.append(same and torch.is_grad_enabled() and len(model.state_dict()) == 8)
        except Exception as failure:
            seen.append(failure)

    Meanwhile.other = staticmethod(train)
    block = Meanwhile(16)
    fusedtrain.fuse(block)
    assert isinstance(block, Recorded) and seen and all(passed is True for passed in seen)


def test_other_threads_ask_for_types_as_ever_while_one_records():
    x, seen = harness.images((2, 16, 9, 9)), []

    def ask():
        try:

            class Made(type):
                pass

            proxy = fx.Tracer().proxy(fx.Graph().placeholder("x"))
            answers = isinstance(Made, type), isinstance(x, (type, int)), issubclass(Made, type), issubclass(bool, type)
            answers += type(Made), type(proxy), callable(proxy), type.__name__, type.mro(bool)
            seen.append((*answers, pickle.loads(pickle.dumps(math.sqrt))(4.0)))
        except Exception as failure:
            seen.append(failure)

    Meanwhile.other = staticmethod(ask)
    assert isinstance(fused(Meanwhile)[0], Recorded)
    told = (True, False, True, False, type, fx.Proxy, True, "type", [bool, int, object], 2.0)
    assert seen and seen == [told] * len(seen)


class Squared(ConvNormAct):
    def forward(self, x):
        return super().forward(x) ** 2 if callable(self.act) else x


def test_blocks_fused_while_another_thread_records_stay_fused_while_it_does(calls):
    block, x, threads = Squared(16, 16, 3, 1, 16), harness.images((2, 16, 9, 9)), []

    def fuse():
        if not threads:
            threads.append(threading.Thread(target=fusedtrain.fuse, args=(block,)))
            threads[0].start()
            threads[0].join(0.5)  # it has looked at the block, and waits for its turn

    Meanwhile.other = staticmethod(fuse)
    fusedtrain.fuse(Meanwhile(16))
    threads[0].join()
    assert isinstance(block, Recorded) and not calls
    Meanwhile.other = staticmethod(functools.partial(block, x))
    fusedtrain.fuse(Meanwhile(16))
    assert set(calls) == {"depthwise_bn_act_se"}


def test_threads_may_fuse_at_once():
    models, interval = [Flat(16) for _ in range(8)], sys.getswitchinterval()
    threads = [threading.Thread(target=fusedtrain.fuse, args=(model,)) for model in models]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert all(isinstance(model, Recorded) for model in models) and "__getattribute__" not in vars(nn.Module)


class Rooted(ConvNormAct):
    """It calls functions of math, and looks into its attributes by itself."""

    def forward(self, x):
        return super().forward(x) * math.sqrt(x.shape[2]) / hypot(x.shape[3], 1.0)

    def __getattribute__(self, name):
        return super().__getattribute__(name)


class Interrupted(Rooted):
    def forward(self, x):
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", [Rooted, Interrupted])
def test_nothing_stays_replaced_after_fuse(kind):
    model = nn.Sequential(kind(16, 16, 3, 1, 16), nn.ReLU())
    classes = {cls for module in model.modules() for cls in type(module).__mro__} | {BackwardCFunction}
    owners = *classes, torch, torch.distributed, math, builtins, logging.Logger, time, warnings, sys.modules[__name__]
    scopes = [vars(owner) for owner in owners]
    before = [dict(scope) for scope in scopes]
    with pytest.raises(KeyboardInterrupt) if kind is Interrupted else contextlib.nullcontext():
        fusedtrain.fuse(model)
    assert isinstance(model[0], Recorded) == (kind is Rooted)
    for scope, old in zip(scopes, before):
        assert scope.keys() == old.keys() and all(scope[name] is value for name, value in old.items())


def test_functions_of_math_are_called_anew_in_each_call(calls):
    block, stock, _ = fused(lambda c: Rooted(c, c, 3, 1, c))
    truth = copy.deepcopy(stock).double()
    for size in (9, 5):
        x = harness.images((2, 16, size, 7))
        harness.assert_as_good_as_torch(block(x), stock(x), truth(x.double()), f"y {size}")
    assert calls == ["depthwise_bn_act_se"] * 2


class OfNumpysNumbers(ConvNormAct):
    scale, size = 1 / np.sqrt(2), np.int64(3)

    def forward(self, x):
        return F.avg_pool2d(super().forward(x), self.size, stride=(self.size, 1)) * self.scale


def test_numbers_may_be_numpys(calls):
    block, stock = OfNumpysNumbers(16, 16, 3, 1, 16), OfNumpysNumbers(16, 16, 3, 1, 16)
    stock.load_state_dict(block.state_dict())
    assert by_hand(fusedtrain.fuse(block)) == [""]
    x = harness.images((2, 16, 9, 9))
    harness.assert_as_good_as_torch(block(x), stock(x), copy.deepcopy(stock).double()(x.double()), "numbers of numpy")
    assert calls == ["depthwise_bn_act_se"]


def test_nn_module_changes_once_for_all_recordings():
    """It takes Python a millisecond to go through the classes of all layers."""
    seen = []
    Meanwhile.other = staticmethod(lambda: seen.append((nn.Module.__call__, nn.Module.parameters)))
    fusedtrain.fuse(nn.ModuleList([Meanwhile(16), Meanwhile(16)]))
    assert len(seen) == 4 and len(set(seen)) == 1


def test_recordings_do_not_outlive_their_blocks():
    """torch.fx would keep the names of code that calls functions which it records."""
    block = fused(lambda c: Rooted(c, c, 3, 1, c))[0]
    kept = weakref.ref(block._recording.forwards[1])
    fusedtrain.unfuse(block)
    gc.collect()
    assert kept() is None


class Locked(ConvNormAct):
    """It says itself what is copied of it."""

    def __init__(self, c):
        super().__init__(c, c, 3, 1, c)
        self.lock = threading.Lock()

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.lock = threading.Lock()


def test_what_a_class_says_of_its_copies_counts(calls):
    block = Locked(16).eval()
    fusedtrain.fuse(block)
    x = harness.images((2, 16, 9, 9))
    for made in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        del calls[:]
        assert torch.equal(made(x), block(x)) and calls == 2 * ["depthwise_bn_act_se"]
        assert made.lock is not block.lock and isinstance(made, Recorded)


def itself(block):
    return block


@pytest.mark.parametrize("wrap", [itself, nn.Sequential], ids=name_of)
def test_a_compiled_block_is_one_graph_without_a_warning(wrap, calls, monkeypatch, recwarn):
    monkeypatch.setattr(torch._dynamo.utils, "warn_once_cache", set())
    torch._dynamo.reset()
    block, stock, _ = fused(Flat)
    x = harness.images((2, 16, 9, 9))
    y, truth = torch.compile(wrap(block), fullgraph=True, backend="eager")(x), copy.deepcopy(stock).double()(x.double())
    harness.assert_as_good_as_torch(y, stock(x), truth, "compiled")
    made = list(calls)
    assert block(x).shape == y.shape and calls == 2 * made and "depthwise_bn_act_se" in made
    assert not [str(warning.message) for warning in recwarn if warning.category is UserWarning]


def hooked(block):
    block.fc.register_forward_hook(lambda *_: None)


def replaced(block):
    block.fc[1] = nn.Tanh()


def another_container(block):
    block.fc = nn.Sequential(*block.fc, nn.Dropout(0.0))


def hooked_pool(block):
    block.avg_pool.register_forward_hook(lambda *args: 2 * args[-1])


def another_pool(block):
    block.avg_pool = nn.AdaptiveMaxPool2d(1)


CHANGES = [hooked, replaced, another_container, hooked_pool, another_pool]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_of_a_fused_gate_count(change, calls):
    block, stock, _ = fused(LinearGate)
    change(block)
    if change is not hooked:
        change(stock)
    x = harness.images((2, 16, 9, 9))
    truth = copy.deepcopy(stock).double()(x.double())
    harness.assert_as_good_as_torch(block(x), stock(x), truth, change.__name__)
    assert calls == (["squeeze_excite"] if change is replaced else [])


def test_a_layer_of_a_gate_in_a_wrapper_gets_maps_as_before(calls):
    block, stock, _ = fused(ConvGate)
    for model in (block, stock):
        model.reduce = nn.Sequential(model.reduce, nn.BatchNorm2d(4))
    x = harness.images((2, 16, 9, 9))
    assert torch.equal(block(x), stock(x)) and calls == []


class OfPixels(ConvGate):
    """The gate of an image, or of as many as stand in front."""

    def forward(self, x):
        return torch.sigmoid(self.expand(F.silu(self.reduce(x.mean((-2, -1), keepdim=True))))) * x


class OfPixelsLinear(LinearGate):
    def forward(self, x):
        return x * self.fc(x.mean((-2, -1)))[..., None, None]


@pytest.mark.parametrize(("kind", "shape"), [(OfPixels, (16, 9, 9)), (OfPixelsLinear, (2, 3, 16, 9, 9))])
def test_gates_take_images_of_as_many_dimensions_as_before(kind, shape, calls):
    block, stock, _ = fused(kind)
    x = harness.normal(*shape)
    harness.assert_as_good_as_torch(block(x), stock(x), copy.deepcopy(stock).double()(x.double()), kind.__name__)
    assert calls == ["squeeze_excite"]


def narrow(block, x):
    return x[:, :1]


def wider_dtype(block, x):
    return x.double()


def channels_behind(block, x):
    return x.contiguous(memory_format=torch.channels_last)


def hooked_norm(block, x):
    block.norm.register_forward_hook(lambda *_: None)
    return x


def other_norm(block, x):
    block.norm = nn.GroupNorm(4, 16)
    return x


def outside(x):
    return outside.residual


fx.wrap("outside")


class Joined(nn.Module):
    """What is added comes from outside."""

    def __init__(self, in_place):
        super().__init__()
        self.conv, self.norm, self.in_place = nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), in_place

    def forward(self, x):
        y, r = self.norm(self.conv(x)), outside(x)
        if self.in_place:
            y += r
        else:
            y = r + y
        return F.relu(y)


@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in_place"])
@pytest.mark.parametrize("change", [None, narrow, wider_dtype, channels_behind, hooked_norm, other_norm])
def test_sums_of_other_shapes_formats_dtypes_and_layers_are_torchs(change, in_place, calls):
    torch.manual_seed(0)
    block = Joined(in_place)
    stock = copy.deepcopy(block)
    assert by_hand(fusedtrain.fuse(block)) == [""]
    x, r = harness.images((2, 16, 9, 9)), harness.images((2, 16, 9, 9), seed=1)
    if change is not None:
        r = change(block, r)
        if change is other_norm:
            change(stock, r)
    outside.residual = r.double()
    truth = copy.deepcopy(stock).double()(x.double())
    outside.residual = r
    theirs, ours = stock(x), block(x)
    assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
    harness.assert_as_good_as_torch(ours, theirs, truth, "y")
    assert ("sum" in calls) == (change is None or (change is channels_behind and in_place))


def other_first(block):
    block.rep[0] = nn.Tanh()


def other_last(block):
    block.rep[3] = nn.Tanh()


def other_own(block):
    block.act = nn.Tanh()


def other_tail(block):
    block.tail[0] = nn.Tanh()


def untied(block):
    block.again = copy.deepcopy(block.again)
    with torch.no_grad():
        block.again[0].weight.mul_(-2)


def other_inside(block):
    block.again[0] = nn.Conv2d(16, 16, 1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", [other_first, other_last, other_own, other_tail, untied, other_inside], ids=name_of)
def test_layers_that_stood_in_several_places_may_be_replaced_in_one(change, compiled):
    block, stock, report = fused(Tied)
    assert by_hand(report)
    x = harness.images((2, 16, 9, 9))
    run = block
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(block, fullgraph=True, backend="eager")
    run(x)
    for other in (block, stock):
        torch.manual_seed(1)
        change(other)
    exact = copy.deepcopy(stock).double()(x.double())
    harness.assert_as_good_as_torch(run(x), stock(x), exact, name_of(change))
    run(x).square().sum().backward()
    assert all(p.grad is not None for p in block.parameters())


def test_recording_counts_no_batch():
    """Sequences that are fused already count their batches when they run, not when they are recorded."""
    block = nn.Sequential(nn.Conv2d(16, 16, 3, groups=16), nn.BatchNorm2d(16), nn.ReLU())
    fusedtrain.fuse(block)
    model = Around(block)
    fusedtrain.fuse(model)
    assert isinstance(model, Recorded) and block[1].num_batches_tracked == 0
    model(harness.images((2, 16, 9, 9)))
    assert block[1].num_batches_tracked == 1


def test_fusing_a_sequence_around_blocks_counts_no_batch():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), Bottleneck(16))
    fusedtrain.fuse(model)
    assert isinstance(model[3], Recorded) and model[1].num_batches_tracked == 0


class Around(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside, self.norm = inside, nn.BatchNorm2d(16)

    def forward(self, x):
        return F.relu(self.norm(self.inside(x)))


def test_attributes_and_further_arguments_count(calls):
    block, stock, _ = fused(Flat)
    x = harness.images((2, 16, 9, 9))
    for model in (block, stock):
        model.skip = False
    harness.assert_as_good_as_torch(block(x), stock(x), copy.deepcopy(stock).double()(x.double()), "without skip")
    block.skip = True
    assert calls == [] and block(x, 0.9).eq(x).sum() > 0.8 * x.numel() and calls == []
    block(x)
    assert calls == ["norm", "depthwise_bn_act_se", "sum"]


class Listed(nn.Module):
    """Its blocks stand in a list in a list, and are called together with layers of its own."""

    def __init__(self, c):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleList([ConvNormAct(c, c, 3, 1, c)]), nn.ModuleList()])
        self.conv, self.norm = nn.Conv2d(c, c, 3, padding=1, groups=c), nn.BatchNorm2d(c)

    def forward(self, x):
        for block in [*self.blocks[0], *self.blocks[1]]:
            x = block(x)
        return self.norm(self.conv(x))


class Walked(nn.Module):
    """It walks through a sequence of layers and blocks, as encoders do that hand out what is between them."""

    def __init__(self, c):
        super().__init__()
        inner = nn.Sequential(nn.Conv2d(c, c, 3, padding=1, groups=c), nn.BatchNorm2d(c))
        self.blocks = nn.Sequential(nn.Sequential(inner, ConvNormAct(c, c, 3, 1, c)), nn.Sequential(nn.Identity()))
        self.norm = nn.BatchNorm2d(c)

    def forward(self, x):
        for sequence in self.blocks:
            for block in sequence:
                x = block(x)
        return F.relu(self.norm(x))


@pytest.mark.parametrize("kind", [Listed, Walked])
def test_blocks_that_join_a_list_or_leave_it_count(kind):
    block, stock, _ = fused(kind)
    assert isinstance(block, Recorded)
    x = harness.images((2, 16, 9, 9))

    def assert_same(what):
        truth = copy.deepcopy(stock).double()(x.double())
        harness.assert_as_good_as_torch(block(x), stock(x), truth, what)

    assert_same("as it was")
    another = ConvNormAct(16, 16, 3)
    for model in (block, stock):
        model.blocks[1].append(copy.deepcopy(another))
    assert_same("one more")
    for model in (block, stock):
        model.blocks[0].pop(0)
    assert_same("one less")


def test_parameters_may_be_swapped_after_fuse():
    """As torch does on conversion where it is told so, if nobody keeps a weak reference to them."""
    block, _, _ = fused(LinearGate)
    before = block.fc[0].weight
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        block.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert block.fc[0].weight is before and before.dtype == torch.float64


def test_a_forward_replaced_in_the_class_counts(monkeypatch):
    block, stock, _ = fused(Bottleneck)
    monkeypatch.setattr(Bottleneck, "forward", lambda self, x: 2 * x)
    x = harness.images((2, 16, 9, 9))
    assert torch.equal(block(x), 2 * x) and torch.equal(stock(x), 2 * x)


class Decays(ConvNormAct):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        y = super().forward(x) * self.scale
        self.scale.mul_(0.5)
        return y * self.scale.item()


def test_buffers_are_read_and_written_in_each_call():
    stock = Decays(16, 16, 3, 1, 16)
    block = copy.deepcopy(stock)
    fusedtrain.fuse(block)
    assert isinstance(block, Recorded) and block.scale == 1
    x = harness.images((2, 16, 9, 9))
    for call in range(3):
        truth = copy.deepcopy(stock).double()(x.double())
        harness.assert_as_good_as_torch(block(x), stock(x), truth, f"call {call}")
    assert block.scale == stock.scale == 0.125


class Draws(ConvNormAct):
    def forward(self, x):
        return super().forward(x) if random.random() < 0.5 else self.norm(self.conv(x))


class DrawsOfItsOwn(ConvNormAct):
    """Like stochastic depth, with a generator that torch does not know."""

    def __init__(self, *args):
        super().__init__(*args)
        self.draw = self.generator().random

    @staticmethod
    def generator():
        return random.Random(0)

    def forward(self, x):
        return super().forward(x) if not self.training or self.draw() < 0.5 else self.norm(self.conv(x))


class DrawsOfNumpys(DrawsOfItsOwn):
    generator = staticmethod(functools.partial(np.random.default_rng, 0))


class DrawsOfTorchs(DrawsOfItsOwn):
    def __init__(self, *args):
        super().__init__(*args)
        del self.draw
        self.options = types.SimpleNamespace(generators=[torch.Generator()])

    def draw(self):
        return torch.rand((), generator=self.options.generators[0], device="cpu")


class Iterates(ConvNormAct):
    def __init__(self, *args):
        super().__init__(*args)
        self.steps = itertools.count()

    def forward(self, x):
        return super().forward(x) * next(self.steps)


class Counts(ConvNormAct):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Decides(ConvNormAct):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class Holds(ConvNormAct):
    def forward(self, x):
        return super().forward(x) * torch.ones(())


class Remembers(ConvNormAct):
    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def forward(self, x):
        self.seen.append(x)
        return super().forward(x)


class Replaces(Decays):
    def forward(self, x):
        self.scale = self.scale + 1
        return super().forward(x)


class WarmsUp(ConvNormAct):
    def forward(self, x):
        return super().forward(x) if self.norm.num_batches_tracked < 10 else x


class Detaches(ConvNormAct):
    def forward(self, x):
        with torch.no_grad():
            x = self.conv(x)
        return self.act(self.norm(x))


class BreaksOff(ConvNormAct):
    def forward(self, x):
        torch.set_grad_enabled(False)
        x = self.conv(x)
        torch.set_grad_enabled(True)
        return self.act(self.norm(x))


class KeepsFloat32(ConvNormAct):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


class Narrows(ConvNormAct):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Recomputes(ConvNormAct):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class GradientsAlone(ConvNormAct):
    def forward(self, x):
        return super().forward(x) if torch.is_grad_enabled() else x


class AutocastAlone(ConvNormAct):
    def forward(self, x):
        return super().forward(x) if torch.is_autocast_enabled("cpu") else x


class DecidesByDtype(ConvNormAct):
    def forward(self, x):
        return super().forward(x) if x.dtype is torch.float32 else x


class DecidesByDevice(ConvNormAct):
    def forward(self, x):
        return super().forward(x) if str(x.device) == "cpu" else x


class DecidesByType(ConvNormAct):
    def forward(self, x):
        return super().forward(x) if type(x) is torch.Tensor else x


class DecidesByClass(ConvNormAct):
    def forward(self, x):
        return super().forward(x) if x.__class__.__name__ == "Tensor" else x


class DecidesByCall(ConvNormAct):
    def forward(self, x):
        return super().forward(x() if callable(x) else x)


class OfLimitedNorm(ConvNormAct):
    def forward(self, x):
        self.conv.weight.data = torch.renorm(self.conv.weight.data, 2, 0, 0.1)
        return super().forward(x)


class Marks(ConvNormAct):
    def forward(self, x):
        y = super().forward(x)
        with contextlib.suppress(TypeError):
            y.stride = 2
        return y


SEEN, OPTIONS, LATEST = [], {"scale": 2.0}, None


class Options:
    alpha = 2.0
    calls = 0


class Collects(ConvNormAct):
    def forward(self, x):
        SEEN.append(x)
        return super().forward(x)


class Stores(ConvNormAct):
    def __init__(self, *args):
        super().__init__(*args)
        self.store = types.SimpleNamespace(maps={})

    def forward(self, x):
        self.store.maps["x"] = x
        return super().forward(x)


class Publishes(ConvNormAct):
    def forward(self, x):
        global LATEST
        LATEST = x
        return super().forward(x)


class CountsForAll(ConvNormAct):
    def forward(self, x):
        Options.calls += 1
        return super().forward(x)


class AsksForRanks(ConvNormAct):
    def forward(self, x):
        return super().forward(x) if not torch.distributed.is_initialized() else x


class OfAnArray(ConvNormAct):
    def __init__(self, *args):
        super().__init__(*args)
        self.scales = np.ones(2)

    def forward(self, x):
        return super().forward(x) * float(self.scales[0])


class DecidesAtLast(ConvNormAct):
    def forward(self, x):
        try:
            large = bool(x.abs().max() > 1)
        except Exception:
            large = False
        return super().forward(x) * 2 if large else super().forward(x)


class CountsAtLast(ConvNormAct):
    def forward(self, x):
        with contextlib.suppress(TypeError):
            x = x * float(x.max())
        return super().forward(x)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, dy):
        return -dy


reversed_gradient = Reversed.apply


class Reverses(ConvNormAct):
    def forward(self, x):
        return super().forward(Reversed.apply(x))


class ReversesByName(ConvNormAct):
    def forward(self, x):
        return super().forward(reversed_gradient(x))


class CallsByName(ConvNormAct):
    def forward(self, x):
        return self.act(self.norm(input=self.conv(x)))


class Prints(ConvNormAct):
    def forward(self, x):
        print("a block")
        return super().forward(x)


class Logs(ConvNormAct):
    def forward(self, x):
        logging.getLogger(__name__).warning("a block")
        return super().forward(x)


class Warns(ConvNormAct):
    def forward(self, x):
        warnings.warn("a block", stacklevel=2)
        return super().forward(x)


class Times(ConvNormAct):
    def forward(self, x):
        begin, out = time.perf_counter(), super().forward(x)
        return out if time.perf_counter() > begin else x


class TimesByName(ConvNormAct):
    def forward(self, x):
        return super().forward(x) if monotonic() else x


class Stops(ConvNormAct):
    def forward(self, x):
        breakpoint()
        return super().forward(x)


SWITCHES = "torch.fx cannot record its forward: gradients, autocast or hooks on saved tensors are switched in it"
REASONS = {
    **dict.fromkeys((Detaches, BreaksOff, KeepsFloat32, Narrows, Recomputes), SWITCHES),
    **dict.fromkeys(
        (GradientsAlone, AutocastAlone),
        "torch.fx cannot record its forward: it asks whether gradients or autocast are on",
    ),
    **{
        kind: f"torch.fx cannot record its forward: it decides by the {name} of what it takes or makes"
        for kind, name in ((DecidesByDtype, "dtype"), (DecidesByDevice, "device"))
    },
    **dict.fromkeys(
        (DecidesByType, DecidesByClass, DecidesByCall),
        "torch.fx cannot record its forward: it asks for the types of what it takes or makes",
    ),
    **{
        kind: f"torch.fx cannot record its forward: it sets the {name} of a tensor"
        for kind, name in ((OfLimitedNorm, "data"), (Marks, "stride"))
    },
    **dict.fromkeys(
        (Reverses, ReversesByName), "torch.fx cannot record its forward: it calls a torch.autograd.Function"
    ),
    **dict.fromkeys((Collects, Stores, Publishes, CountsForAll), "its forward changes objects or global values"),
    Prints: "torch.fx cannot record its forward: it prints",
    Logs: "torch.fx cannot record its forward: it writes to a log",
    Warns: "torch.fx cannot record its forward: it warns",
    **dict.fromkeys((Times, TimesByName), "torch.fx cannot record its forward: it reads the clock"),
    Stops: "torch.fx cannot record its forward: it stops in a debugger",
    AsksForRanks: "torch.fx cannot record its forward: it asks for its process group",
    OfAnArray: "it holds more than 64 items in one container, or a numpy array, too many to compare in every call",
    CountsAtLast: "torch.fx cannot record its forward: it asks for the number in a tensor",
    **dict.fromkeys((Remembers, Replaces), "its forward changes its attributes, or holds tensors that are no buffers"),
    **dict.fromkeys(
        (WarmsUp, Decides, DecidesAtLast),
        "torch.fx cannot record its forward: symbolically traced variables cannot be used as inputs to control flow",
    ),
    **dict.fromkeys(
        (Draws, DrawsOfItsOwn, DrawsOfNumpys, DrawsOfTorchs), "its forward draws random numbers outside of layers"
    ),
    Iterates: "it holds an iterator, which a recording would use up",
    CallsByName: "no fused op takes its layers in the way its forward calls them",
    Counts: "its forward changes its attributes, or holds tensors that are no buffers",
    Holds: "its forward changes its attributes, or holds tensors that are no buffers",
}
if torch.__version__ < (2, 12):  # whose checkpoint calls one first
    REASONS[Recomputes] = REASONS[Reverses]


@pytest.mark.parametrize("kind", REASONS, ids=lambda kind: kind.__name__)
def test_what_a_recording_cannot_know_stays_with_its_reason(kind, capsys, caplog, recwarn):
    model = nn.Sequential(kind(16, 16, 3, 1, 16).eval(), nn.ReLU())
    state, before = random.getstate(), [dict(vars(m)) for m in model.modules()]
    buffers = list(model.buffers())
    planned = fusedtrain.fuse(model, dry_run=True)
    assert all(a is b for a, b in zip(model.buffers(), buffers, strict=True)) and torch.is_grad_enabled()
    assert random.getstate() == state and [vars(m) for m in model.modules()] == before
    report = fusedtrain.fuse(model)
    assert report == planned and type(model[0]) is kind and not model[0].training
    assert [(c.name, c.reason) for c in report.kept] == [("0", REASONS[kind])]
    assert not SEEN and LATEST is None and Options.calls == 0 and (kind is not Stores or not model[0].store.maps)
    assert not capsys.readouterr().out and not caplog.records and not recwarn.list
    assert not issubclass(kind, DrawsOfItsOwn) or model[0].draw() == kind(16, 16, 3, 1, 16).draw()


def test_generators_are_set_back_where_a_device_is_in_force():
    model = nn.Sequential(DrawsOfTorchs(16, 16, 3, 1, 16), nn.ReLU())
    with torch.device("meta"):
        report = fusedtrain.fuse(model)
    assert [c.reason for c in report.kept] == [REASONS[DrawsOfTorchs]]
    assert torch.equal(model[0].draw(), DrawsOfTorchs(16, 16, 3, 1, 16).draw())


class LimitedNorm(nn.Conv2d):
    """The convolution of EEGNet."""

    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.1)
        return super().forward(x)


class WithLimitedNorm(ConvNormAct):
    def __init__(self, c):
        super().__init__(c, c, 3)
        self.conv = LimitedNorm(c, c, 3, padding=1, bias=False)


def test_layers_that_limit_their_norm_still_do():
    block, stock, _ = fused(WithLimitedNorm)
    x = harness.images((2, 16, 9, 9))
    harness.assert_as_good_as_torch(block(x), stock(x), copy.deepcopy(stock).double()(x.double()), "limited")
    assert torch.equal(block.conv.weight, stock.conv.weight)


def test_quantised_and_wrapped_blocks_are_left_alone():
    quantised, inside = LinearGate(16), nn.Sequential(nn.ReLU(), nn.DataParallel(LinearGate(16)))
    quantised.qconfig = object()
    assert by_hand(fusedtrain.fuse(quantised)) == by_hand(fusedtrain.fuse(inside)) == []


class OtherOrder(LinearGate):
    """The gate of channel j and image i goes to channel i and image j where both numbers are the same."""

    def forward(self, x):
        n, c, _, _ = x.size()
        return x * self.fc(self.avg_pool(x).view(n, c)).view(c, n, 1, 1)


class OfTheLastChannelsFirst(LinearGate):
    def forward(self, x):
        return x * self.fc(x.mean((2, 3)))[:, list(reversed(range(16))), None, None]


class OfTheFirstImage(LinearGate):
    def forward(self, x):
        return x * self.fc(x.mean((2, 3)))[:1, :, None, None].expand_as(x)


class Transposed(LinearGate):
    def forward(self, x):
        return x * self.fc(x.mean((2, 3)).T.reshape(x.size(0), -1))[..., None, None]


class RowsOnly(ConvGate):
    def forward(self, x):
        return torch.sigmoid(self.expand(F.silu(self.reduce(x.mean((2,), keepdim=True))))) * x


class OfSequences(LinearGate):
    """[N, L, C]: the mean over one dimension."""

    def forward(self, x):
        return x * self.fc(x.mean(1)).unsqueeze(1)


class PooledBy(LinearGate):
    def __init__(self, c, pool):
        super().__init__(c)
        self.pool = pool

    def forward(self, x):
        return x * self.fc(self.pool(x).flatten(1))[..., None, None]


MEANS = {
    "in turn": lambda x: x.mean(3).mean(2),
    "the same dimension twice": lambda x: x.mean(-1, keepdim=True).squeeze(-1).mean(-1),
    "of rows": lambda x: x.view(x.size(0), x.size(1), -1).mean(dim=2),
    "by the shape": lambda x: F.avg_pool2d(x, x.shape[2:]),
    "by sizes": lambda x: F.avg_pool2d(x, kernel_size=[x.size(2), x.size(3)]),
}
OTHER_MEANS = {
    "of squares": lambda x: F.avg_pool2d(x, x.size(2)),
    "of one size": lambda x: F.avg_pool2d(x, (4, 8)),
    "of a corner": lambda x: F.avg_pool2d(x, 8, ceil_mode=True),
    "in another dtype": lambda x: x.mean((2, 3), dtype=torch.float32),
}


@pytest.mark.parametrize("means", MEANS.values(), ids=MEANS)
def test_the_mean_in_a_gate_may_be_written_in_several_ways(means, calls):
    torch.manual_seed(0)
    stock = nn.Sequential(nn.Conv2d(3, 16, 1), PooledBy(16, means))
    fused = copy.deepcopy(stock)
    assert by_hand(fusedtrain.fuse(fused)) == ["1"]
    assert_model_as_good_as_torch(fused, stock, "gate", size=9)
    calls.clear()
    fused(harness.images((2, 3, 9, 7)))
    assert calls == ["squeeze_excite"]


class UsedTwice(ConvGate):
    def forward(self, x):
        hidden = self.reduce(x.mean((2, 3), keepdim=True))
        return torch.sigmoid(self.expand(F.silu(hidden))) * x + hidden.sum()


class OfAnother(ConvGate):
    def forward(self, x):
        return torch.sigmoid(self.expand(F.silu(self.reduce(x.mean((2, 3), keepdim=True))))) * x.relu()


class BetweenIsUsed(ConvNormAct):
    def forward(self, x):
        y = self.norm(self.conv(x))
        return self.act(y) * y


class IntoTheShortcut(ConvNormAct):
    """The sum takes the place of the residual, which others may hold."""

    def forward(self, x):
        y = self.norm(self.conv(x))
        x += y
        return x


class WrittenBetween(ConvNormAct):
    def forward(self, x):
        y = self.norm(x)
        x.mul_(2)
        return self.act(y)


class Scaled(ConvNormAct):
    def forward(self, x):
        return torch.add(self.norm(self.conv(x)), x, alpha=2)


@pytest.mark.parametrize(
    "block",
    [
        *(kind(16) for kind in (OtherOrder, OfTheLastChannelsFirst, OfTheFirstImage, Transposed)),
        *(kind(16) for kind in (RowsOnly, OfSequences, UsedTwice, OfAnother)),
        *(PooledBy(16, means) for means in OTHER_MEANS.values()),
        *(kind(16, 16, 3) for kind in (BetweenIsUsed, IntoTheShortcut, WrittenBetween, Scaled)),
    ],
    ids=lambda block: type(block).__name__,
)
def test_what_only_looks_like_a_pattern_stays(block):
    assert by_hand(fusedtrain.fuse(block)) == [] and not isinstance(block, Recorded)


class FlattensByALayer(LinearGate):
    def __init__(self, c):
        super().__init__(c)
        self.flatten = nn.Flatten()

    def forward(self, x):
        return x * self.fc(self.flatten(self.avg_pool(x)))[..., None, None]


def test_hooks_inside_a_gate_are_called_in_its_calls_alone():
    gate, seen = FlattensByALayer(16), []
    gate.flatten.register_forward_hook(lambda *_: seen.append(True))
    fusedtrain.fuse(gate)
    assert not seen
    gate(harness.images((2, 16, 9, 9)))
    assert len(seen) == 1


class NoActivation(ConvNormAct):
    """What ``act`` makes of the normalised images, and of the block's own, is no activation."""

    def __init__(self, act):
        super().__init__(16, 16, 3, 1, 16)
        self.product = act

    def forward(self, x):
        return self.product(self.norm(self.conv(x)), x)


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda y, x: y * x.sigmoid(), id="of_another"),
        pytest.param(lambda y, x: F.relu6(y + 3) / 5, id="a_fifth"),
        pytest.param(lambda y, x: F.relu6(y + 2) / 6, id="shifted_by_two"),
        pytest.param(lambda y, x: y * (F.relu(y + 3) / 6), id="not_cut"),
        pytest.param(lambda y, x: y * (y + 3).clamp(0, 5) / 6, id="cut_at_five"),
        pytest.param(lambda y, x: 6 / F.relu6(y.tanh() + 3), id="divides_by_it"),
        pytest.param(lambda y, x: torch.stack([y * y.sigmoid(), y], 1), id="used_twice"),
        pytest.param(lambda y, x: (lambda s: s * y + s)(y.sigmoid()), id="the_factor_is_used_twice"),
        pytest.param(lambda y, x: torch.stack([y, y.mul_(y.sigmoid())], 1), id="in_place_and_used_before"),
    ],
)
def test_what_only_looks_like_an_activation_is_computed_as_it_is_written(act, calls):
    block = NoActivation(act)
    stock, x = copy.deepcopy(block), harness.images((2, 16, 9, 9))
    fusedtrain.fuse(block)
    harness.assert_as_good_as_torch(block(x), stock(x), copy.deepcopy(stock).double()(x.double()), "no activation")
    assert "norm" not in calls


def test_layers_of_an_activation_that_is_written_out_count():
    block, stock, _ = fused(ByFormula)
    x = harness.images((2, 16, 9, 9))
    for model in (block, stock):
        model.conv[5].sigmoid.relu = nn.ReLU()
    harness.assert_as_good_as_torch(block(x), stock(x), copy.deepcopy(stock).double()(x.double()), "another layer")


class Configured(ConvNormAct):
    """What its forward reads stands in attributes of all kinds."""

    factor = 2.0

    def __init__(self, c):
        super().__init__(c, c, 3, 1, c)
        self.scale, self.scales, self.by_name = 2.0, [2.0, (2.0,)], {"scale": 2.0}
        self.dtype, self.gain, self.after = torch.float32, nn.Parameter(torch.tensor(2.0)), nn.Tanh()

    def forward(self, x):
        y = super().forward(x).to(self.dtype) * self.scale * self.scales[0] * self.scales[1][0] * self.by_name["scale"]
        y = y if self.gain is None else y * self.gain
        return self.factor * (y if self.after is None else self.after(y))


CHANGES = {
    "number": lambda block: setattr(block, "scale", 3.0),
    "number of the class, hidden": lambda block: setattr(block, "factor", 3.0),
    "list": lambda block: block.scales.__setitem__(0, 3.0),
    "tuple in a list": lambda block: block.scales.__setitem__(1, (3.0,)),
    "dict": lambda block: block.by_name.update(scale=3.0),
    "dtype": lambda block: setattr(block, "dtype", torch.float64),
    "parameter": lambda block: setattr(block, "gain", None),
    "layer": lambda block: setattr(block, "after", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_attributes_of_every_kind_count(change):
    block, stock, _ = fused(Configured)
    assert isinstance(block, Recorded)
    x = harness.images((2, 16, 9, 9))
    for model in (block, stock):
        CHANGES[change](model)
    y = block(x)
    assert y.dtype == stock(x).dtype
    truth = copy.deepcopy(stock).double()
    truth.dtype = torch.float64
    harness.assert_as_good_as_torch(y, stock(x), truth(x.double()), change)


class OfLayers(ConvNormAct):
    """Its forward reads attributes of layers, without calling these."""

    def __init__(self, c):
        super().__init__(c, c, 3, 1, c)
        self.pool, self.last = nn.Conv2d(c, c, 2, groups=c), nn.BatchNorm2d(c)

    def forward(self, x):
        x = F.conv2d(super().forward(x), self.pool.weight, self.pool.bias, self.pool.stride, 1, groups=self.pool.groups)
        x = x if self.pool.bias is None else 2 * x
        last = self.last
        running = last.running_mean, last.running_var
        return F.batch_norm(x, *running, last.weight, last.bias, last.training, last.momentum, last.eps)


SCALE = 2.0


def shifted(x, by=1.0):
    return x + by


def scaled(x):
    return x * OPTIONS["scale"] * Options.alpha


class OfElsewhere(ConvNormAct):
    """It reads its class, a global number and defaults, calls a method and a function, and asks what a layer is."""

    scale = 2.0

    def __init__(self, c):
        super().__init__(c, c, 3, 1, c)
        self.after = nn.Tanh()

    def head(self, x):
        return self.after(x)

    def forward(self, x, gain=2.0):
        x = super().forward(x) * SCALE * self.scale * gain
        return x if isinstance(self.after, nn.Identity) else scaled(shifted(self.head(x)))


READS = {
    "stride": (OfLayers, lambda block, _: setattr(block.pool, "stride", (2, 2))),
    "no bias": (OfLayers, lambda block, _: setattr(block.pool, "bias", None)),
    "held still": (OfLayers, lambda block, _: block.last.eval()),
    "eps": (OfLayers, lambda block, _: setattr(block.last, "eps", 0.5)),
    "class": (OfElsewhere, lambda _, patch: patch.setattr(OfElsewhere, "scale", 3.0)),
    "global": (OfElsewhere, lambda _, patch: patch.setitem(globals(), "SCALE", 3.0)),
    "global dict": (OfElsewhere, lambda _, patch: patch.setitem(OPTIONS, "scale", 3.0)),
    "global class": (OfElsewhere, lambda _, patch: patch.setattr(Options, "alpha", 3.0)),
    "another layer": (OfElsewhere, lambda block, _: setattr(block, "after", nn.Identity())),
    "default": (OfElsewhere, lambda _, patch: patch.setattr(OfElsewhere.forward, "__defaults__", (3.0,))),
    "default of a function": (OfElsewhere, lambda _, patch: patch.setattr(shifted, "__defaults__", (3.0,))),
    "function": (OfElsewhere, lambda _, patch: patch.setitem(globals(), "shifted", torch.exp)),
    "method": (OfElsewhere, lambda _, patch: patch.setattr(OfElsewhere, "head", lambda block, x: x)),
    "code of a method": (
        OfElsewhere,
        lambda _, patch: patch.setattr(OfElsewhere.head, "__code__", (lambda block, x: x).__code__),
    ),
}


@pytest.mark.parametrize("change", READS)
def test_what_a_forward_reads_elsewhere_counts(change, calls, monkeypatch):
    kind, make = READS[change]
    block, stock, _ = fused(kind)
    x = harness.images((2, 16, 9, 9))
    block(x)
    assert calls == ["depthwise_bn_act_se"]
    block, stock, _ = fused(kind)
    for model in (block, stock):
        make(model, monkeypatch)
    truth = copy.deepcopy(stock).double()(x.double())
    harness.assert_as_good_as_torch(block(x), stock(x), truth, change)


class OfItsClass(ConvNormAct):
    """It reads an object of its class, and calls what is no method of the block."""

    options = types.SimpleNamespace(scale=2.0)

    def __init__(self, c):
        super().__init__(c, c, 3, 1, c)

    @staticmethod
    def scaled(x, by):
        return x * by

    def forward(self, x):
        return self.scaled(super().forward(x), self.options.scale)


def test_copies_share_what_their_class_holds(calls):
    block, stock, _ = fused(OfItsClass)
    x = harness.images((2, 16, 9, 9))
    y = copy.deepcopy(block)(x)
    assert calls == ["depthwise_bn_act_se"]
    harness.assert_as_good_as_torch(y, stock(x), copy.deepcopy(stock).double()(x.double()), "copy")


def test_a_block_of_a_zoo_that_a_forward_reads_of_is_fused_too(zoo, calls):
    class Around(Functional):
        def __init__(self, c):
            super().__init__(c)
            self.block = zoo.torchvision.models.resnet.BasicBlock(c, c)

        def forward(self, x):
            return super().forward(self.block(x)) * self.block.stride

    block, stock, report = fused(Around)
    assert by_hand(report) == ["block", ""]
    x = harness.images((2, 16, 9, 9))
    for model in (block, copy.deepcopy(block)):
        for stride, made in ((1, ["norm", "sum", "depthwise_bn_act_se"]), (3, [])):
            model.block.stride = stock.block.stride = stride
            del calls[:]
            truth = copy.deepcopy(stock).double()(x.double())
            harness.assert_as_good_as_torch(model(x), stock(x), truth, f"{stride} times")
            assert calls == made


@pytest.mark.parametrize("hooked", [False, True])
def test_pairs_of_a_zoo_take_in_the_activation_behind_them(hooked, zoo, calls):
    """RepViT's layers are a convolution and its norm each, with an activation that the block calls."""
    from timm.models.repvit import RepVitMlp

    def block_of(c):
        block = RepVitMlp(c, 2 * c, nn.GELU)
        nn.init.ones_(block.conv2.bn.weight)
        if hooked:
            block.conv1.register_forward_hook(lambda *_: None)
        return block

    block, stock, report = fused(block_of)
    assert by_hand(report) == (["conv2", "conv1"] if hooked else [""])
    x = harness.images((2, 16, 9, 9))
    truth = copy.deepcopy(stock).double()(x.double())
    harness.assert_as_good_as_torch(block(x), stock(x), truth, "RepVitMlp")
    assert calls == ([] if hooked else ["norm"])
    fusedtrain.unfuse(block)
    assert [type(m) for m in block.modules()] == [type(m) for m in stock.modules()]


def test_blocks_with_large_containers_stay():
    class Named(ConvNormAct):
        def __init__(self, c):
            super().__init__(c, c, 3, 1, c)
            self.names = [f"class {i}" for i in range(100)]

    block = Named(16)
    report = str(fusedtrain.fuse(block))
    assert not isinstance(block, Recorded) and "more than 64 items in one container" in report


def shifted_by_second(x, shifts=tuple(range(100))):
    return x + shifts[1]


class WithLargeDefaults(ConvNormAct):
    def __init__(self, c):
        super().__init__(c, c, 3, 1, c)

    def forward(self, x, scales=[0.5] * 100):
        return shifted_by_second(super().forward(x)) * scales[1]


@pytest.mark.parametrize("function", [shifted_by_second, WithLargeDefaults.forward])
def test_of_large_defaults_it_counts_which_they_are(function, calls, monkeypatch):
    block, stock, report = fused(WithLargeDefaults)
    x = harness.images((2, 16, 9, 9))
    copy.deepcopy(block)(x)
    assert by_hand(report) == [""] and calls == ["depthwise_bn_act_se"]
    monkeypatch.setattr(function, "__defaults__", ([3.0] * 100,))
    truth = copy.deepcopy(stock).double()(x.double())
    harness.assert_as_good_as_torch(block(x), stock(x), truth, "other defaults")


COMPILED = {  # what is changed -> how the block is compiled
    "number": itself,
    "number of the class, hidden": nn.Sequential,
    "list": nn.Sequential,
    "tuple in a list": itself,
    "dict": nn.Sequential,
}


@pytest.mark.parametrize("change", COMPILED)
def test_attributes_of_compiled_blocks_count(change):
    block, stock, _ = fused(Configured)
    x = harness.images((2, 16, 9, 9))
    torch._dynamo.reset()
    compiled = torch.compile(COMPILED[change](block.eval()), backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), block(x))
        for model in (block, stock.eval()):
            CHANGES[change](model)
        truth = copy.deepcopy(stock).double()
        truth.dtype = torch.float64
        harness.assert_as_good_as_torch(compiled(x), stock(x), truth(x.double()), change)


def test_what_torch_keeps_in_modules_does_not_count(calls):
    """Marks of FSDP, DataParallel and torch.compile, and a full backward hook on the block itself."""
    block, _, _ = fused(Bottleneck)
    marks = ("_is_fsdp_managed_module", "_fsdp_use_orig_params", "_is_replica", "_former_parameters")
    for module in block.modules():
        for mark in (*marks, "_is_torch_compile"):
            setattr(module, mark, True)
    block.register_full_backward_hook(lambda *_: None)
    block(harness.images((2, 16, 9, 9)).requires_grad_())
    assert "sum" in calls


class TakesLists(ConvNormAct):
    """As the layers of DenseNet."""

    def __init__(self, c):
        super().__init__(c, c, 3, 1, c)

    def forward(self, x):
        parts = [x] if isinstance(x, torch.Tensor) else x
        return super().forward(torch.cat(parts, 1))


class UnpacksTuples(TakesLists):
    def forward(self, x):
        if isinstance(x, tuple):
            x = torch.cat(x, 1)
        return self.act(self.norm(self.conv(x)))


@pytest.mark.parametrize("kind", [TakesLists, UnpacksTuples])
def test_blocks_that_ask_for_the_type_of_their_argument_take_each(kind, calls):
    block, stock, _ = fused(kind)
    assert isinstance(block, Recorded)
    x = harness.images((2, 16, 9, 9))
    parts = tuple(x.split(8, 1))
    truth = copy.deepcopy(stock).double()(x.double())
    for argument in (x, parts):
        harness.assert_as_good_as_torch(block(argument), stock(argument), truth, kind.__name__)
    assert calls == ["depthwise_bn_act_se"]


class Probes(ConvNormAct):
    """It asks for attributes that tensors do not have, and takes None."""

    def __init__(self, c):
        super().__init__(c, c, 3, 1, c)
        self.register_buffer("default", torch.ones(1, c, 9, 9))

    def forward(self, x=None):
        x = self.default if x is None else x
        x = x.tensors if hasattr(x, "tensors") else x
        mask = getattr(x, "mask", None)
        y = super().forward(x.to(x.device))
        return y if mask is None else y * mask


def test_attributes_that_tensors_lack_are_found_where_they_are(calls):
    block, stock, _ = fused(Probes)
    assert isinstance(block, Recorded)
    x = harness.images((2, 16, 9, 9))
    truth = copy.deepcopy(stock).eval().double()
    nested = types.SimpleNamespace(tensors=x)
    for argument, tensor in ((x, x), (nested, x), (None, block.default)):
        y, torchs = (model.eval()(argument) for model in (block, stock))
        harness.assert_as_good_as_torch(y, torchs, truth(tensor.double()), "probes")
    assert calls == ["depthwise_bn_act_se"]


class InItsDtype(ConvNormAct):
    def __init__(self, c):
        super().__init__(c, c, 3, 1, c)

    def forward(self, x):
        return super().forward(x.to(next(self.parameters()).dtype))


def test_a_forward_that_looks_through_its_parameters_stays():
    block, _, report = fused(InItsDtype)
    assert type(block) is InItsDtype
    assert [c.reason for c in report.kept] == [
        "torch.fx cannot record its forward: it looks through its parameters or buffers"
    ]
    assert block.double()(harness.images((2, 16, 9, 9))).dtype == torch.float64


class WrittenBehind(ConvNormAct):
    """What the convolution has read is written to before the normalisation runs."""

    def __init__(self, c):
        super().__init__(c, c, 3, 1, c)

    def forward(self, x):
        y = self.conv(x)
        x.relu_()
        return self.act(self.norm(y)) + x


class WrittenInsideGate(LinearGate):
    def forward(self, x):
        n, c, _, _ = x.size()
        y = self.avg_pool(x).view(n, c)
        x.relu_()
        return x * self.fc(y).view(n, c, 1, 1)


class WrittenThroughAView(WrittenBehind):
    def forward(self, x):
        y = self.conv(x)
        x[:, :8].relu_()
        return self.act(self.norm(y))


class WrittenBehindAView(WrittenBehind):
    def forward(self, x):
        y = self.conv(x.view_as(x))
        F.relu(x, True)
        return self.act(self.norm(y))


class WrittenWeights(WrittenBehind):
    def forward(self, x):
        y = self.conv(x)
        self.conv.weight.data.clamp_(-0.1, 0.1)
        return self.act(self.norm(y))


class WrittenOut(WrittenBehind):
    def forward(self, x):
        y = self.conv(x)
        torch.mul(x, 2, out=x)
        return self.act(self.norm(y))


class StatisticsBetween(WrittenBehind):
    def forward(self, x):
        y = self.norm(self.conv(x))
        mean = self.norm.running_mean.sum()
        return self.act(y) + mean


class NormInTurn(WrittenBehind):
    def forward(self, x):
        y, z = self.norm(self.conv(x) + 5), self.norm(x)
        return self.act(z) + self.act(y) + self.norm.running_mean[:, None, None]


class Powers(WrittenBehind):
    def forward(self, x):
        y = super().forward(x)
        z = y
        z **= 2
        return y + z


class GateInPlace(ConvGate):
    def forward(self, x):
        y = x
        x *= torch.sigmoid(self.expand(F.silu(self.reduce(x.mean((2, 3), keepdim=True)))))
        return x + y


WRITERS = [WrittenBehind, WrittenInsideGate, WrittenThroughAView, WrittenBehindAView, WrittenWeights, WrittenOut]


@pytest.mark.parametrize("kind", [*WRITERS, StatisticsBetween, NormInTurn, Powers, GateInPlace])
def test_calls_do_not_move_behind_what_writes_to_their_images(kind):
    block, stock, _ = fused(kind)
    x, exact = harness.images((2, 16, 9, 9)), copy.deepcopy(stock).double()
    with torch.no_grad():
        pair = [model(x.clone()) for model in (block, stock)]
        harness.assert_as_good_as_torch(*pair, exact(x.double()), kind.__name__)


class WritesItsOwn(Bottleneck):
    """What is written to between the layers of a pattern is made there."""

    def forward(self, x):
        y = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))))
        shortcut = x + 1
        shortcut[:, :8].mul_(2)
        return self.relu(y.add_(self.relu(shortcut)))


def test_writes_to_what_is_made_between_calls_keep_none_from_moving(calls):
    block, stock, _ = fused(WritesItsOwn)
    x = harness.images((2, 16, 9, 9))
    harness.assert_as_good_as_torch(block(x), stock(x), copy.deepcopy(stock).double()(x.double()), "writes")
    assert calls == ["norm", "norm", "sum"]


class TakesSizes(ConvNormAct):
    """What it takes of the shape goes to functions of torch, which ask whether it is a number."""

    def __init__(self, c):
        super().__init__(c, c, 3, 1, c)

    def forward(self, x):
        y = super().forward(x)
        n, c, h, w = y.shape
        return torch.reshape(torch.roll(y, h // 2, 2), (n, c, h * w))


def test_sizes_may_be_options_of_functions(calls):
    block, stock, _ = fused(TakesSizes)
    x = harness.images((2, 16, 9, 9))
    harness.assert_as_good_as_torch(block(x), stock(x), copy.deepcopy(stock).double()(x.double()), "sizes")
    assert calls == ["depthwise_bn_act_se"]


class Tapped(ConvNormAct):
    """A layer of which nothing is used but what its hooks see."""

    def __init__(self, c):
        super().__init__(c, c, 3, 1, c)
        self.tap = nn.Identity()

    def forward(self, x):
        y = super().forward(x)
        self.tap(y)
        return y


def test_layers_whose_result_nobody_uses_are_called():
    block, _, _ = fused(Tapped)
    seen = []
    block.tap.register_forward_hook(lambda *_: seen.append(True))
    block(harness.images((2, 16, 9, 9)))
    assert isinstance(block, Recorded) and seen


def test_torch_fx_traces_models_that_are_recorded_blocks():
    block, stock, _ = fused(Flat)
    traced, x = fx.symbolic_trace(block.eval(), {"drop": None}), harness.images((2, 16, 9, 9))
    assert isinstance(block, Recorded)
    truth = copy.deepcopy(stock).eval().double()(x.double())
    harness.assert_as_good_as_torch(traced(x), stock.eval()(x), truth, "traced")


class CallsForwards(ConvNormAct):
    def forward(self, x):
        return self.act.forward(self.norm.forward(self.conv.forward(x)))


def test_a_dry_run_knows_layers_whose_forward_is_called_by_name(calls):
    block, stock, report = fused(lambda c: CallsForwards(c, c, 3, groups=c))
    assert report == fusedtrain.fuse(stock, dry_run=True) and isinstance(block, Recorded)
    block(harness.images((2, 16, 9, 9)))
    assert calls.count("depthwise_bn_act_se") == 1


def test_recorded_blocks_have_the_signature_of_their_own_forward():
    block, stock, _ = fused(Flat)
    assert isinstance(block, Recorded)
    for model in (block, copy.deepcopy(block)):
        assert inspect.signature(model.forward) == inspect.signature(stock.forward)
    x = harness.images((2, 16, 9, 9))
    exported = torch.export.export(block.eval(), (x,), dynamic_shapes={"inputs": {0: torch.export.Dim.AUTO}}).module()
    other = harness.images((3, 16, 9, 9))
    truth = copy.deepcopy(stock).eval().double()(other.double())
    harness.assert_as_good_as_torch(exported(other), stock.eval()(other), truth, "exported")

"""The parts of a diagnosis: statistics, edits, the loop that carries out a plan, remedies, and what the rules say.

Whole diagnoses stand in test_diagnose_whole.py.
"""

import ast
import contextlib
import copy
import ctypes
import dataclasses
import functools
import gc
import itertools
import json
import math
import mmap
import runpy
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections import Counter, UserDict, defaultdict
from pathlib import Path

import forked
import harness
import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.optim import optimizer as optimizer_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import fusedtrain
from fusedtrain import _waits
from fusedtrain._waits import TeamWaits, Waits
from fusedtrain.diagnose import (
    batches,
    drive,
    growth,
    instrument,
    lines,
    machine,
    measure,
    places,
    remedies,
    rules,
    sampling,
    script,
    verify,
)
from fusedtrain.diagnose.constants import Constants
from fusedtrain.diagnose.diagnosis import Diagnosis, ranked
from fusedtrain.diagnose.drive import Driver, Finished
from fusedtrain.diagnose.host import COPIED, MOVED, NUMBERS, HostTensors
from fusedtrain.diagnose.instrument import PARTS, Instrument, Step
from fusedtrain.diagnose.places import Site
from fusedtrain.diagnose.plan import Arm, Run, leave_out_others, spread_waits
from fusedtrain.diagnose.rules import computing, loading, loop
from fusedtrain.diagnose.rules import finding as predictions
from fusedtrain.diagnose.rules.finding import Finding, gain_of_computing, gain_of_loading
from fusedtrain.diagnose.statistics import Paired, bootstrap


@pytest.fixture(autouse=True)
def scripts_are_forks(monkeypatch):
    """The processes of scripts need not import torch each; they are without Triton's interpreter."""

    def start(command, *, env, **options):
        env = {name: value for name, value in env.items() if name != "TRITON_INTERPRET"}
        return forked.Python(command, env=env, **options)

    monkeypatch.setattr(script, "subprocess", types.SimpleNamespace(**vars(subprocess) | {"Popen": start}))


@pytest.fixture(autouse=True)
def what_stands_here_stays():
    """As in conftest.py, with what earlier tests imported: the passes of the garbage collector need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def what_takes_long_is_not_tried():
    """One thread, and nobody probes more: on a busy machine they wait for each other for seconds. Nobody compiles."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for rule_file in (predictions, computing):
            patch.setattr(rule_file, "cores", torch.get_num_threads)
        patch.setattr(remedies.Compile, "why_not", lambda driver: "not in this test")
        for name, seconds in (("BLOCK", 0.03), ("SAMPLING", 0.2), ("LOADING", 0.3)):
            patch.setattr(measure, name, seconds)
        patch.setattr(measure, "PAIRS", 2)
        patch.setattr(verify, "PAIRS", 8)
        yield
    torch.set_num_threads(threads)


# --- statistics -------------------------------------------------------------------------------------------------------


def test_the_interval_holds_the_mean_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(200, 20, generator=generator).tolist()
    held = sum(interval.low <= 0 <= interval.high for interval in (bootstrap(values, 0.9) for values in draws))
    spread = 3 * math.sqrt(200 * 0.9 * 0.1)  # three standard deviations of the count
    assert held >= 180 - 2 * spread and held < 200


def test_the_same_values_give_the_same_interval():
    values = [0.3, 1.2, 0.7, 0.1]
    assert bootstrap(values) == bootstrap(values)
    assert bootstrap([2.0]).low == bootstrap([2.0]).high == 2.0


@pytest.mark.parametrize(("values", "level"), [([], 0.9), ([1.0], 0.0), ([1.0], 1.0)])
def test_bad_values_for_an_interval_are_refused(values, level):
    with pytest.raises(ValueError, match=r"needs at least one value|level must lie in"):
        bootstrap(values, level)


def test_a_run_that_takes_half_the_time_gains_half():
    gain = Paired((2.0, 4.0, 3.0), (1.0, 2.0, 1.5)).gain()
    assert gain.low == gain.high == 0.5


def test_one_disturbed_pair_of_eight_does_not_hide_a_gain():
    four = Paired((2.0, 2.0, 2.0, 2.0), (1.0, 3.0, 1.0, 1.0))
    assert not four.faster() and (four + Paired((2.0,) * 4, (1.0,) * 4)).faster()
    assert not (four + four).faster() and four.share() == 0.5


# --- edits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "line", "keywords", "after"),
    [
        ("DataLoader(data, 4)", 1, {"num_workers": 2}, "DataLoader(data, 4, num_workers=2)"),
        ("DataLoader(data, num_workers=0)", 1, {"num_workers": 8}, "DataLoader(data, num_workers=8)"),
        ("x = f(DataLoader(data), 3)", 1, {"num_workers": 8}, "DataLoader(data, num_workers=8)"),
        ("DataLoader(\n    data,\n    4,\n)", 1, {"num_workers": 2}, "DataLoader(\n    data,\n    4, num_workers=2\n)"),
        ("é = 'ü'; DataLoader('ä', num_workers=1)", 1, {"num_workers": 2}, "DataLoader('ä', num_workers=2)"),
        ("DataLoader()", 1, {"num_workers": 2}, "DataLoader(num_workers=2)"),
    ],
)
def test_a_call_is_shown_with_its_new_arguments(tmp_path, code, line, keywords, after):
    path = tmp_path / "code.py"
    path.write_text(code)
    change = lines.edit_call(Site(str(path), line), ("DataLoader",), DataLoader, **keywords)
    assert change.before in code and ast.dump(ast.parse(change.after)) == ast.dump(ast.parse(after))
    edited = code.replace(change.before, change.after)
    calls = [node for node in ast.walk(ast.parse(edited)) if isinstance(node, ast.Call)]
    assert {k.arg: k.value.value for call in calls for k in call.keywords} == keywords


def test_an_instruction_without_a_line_belongs_to_its_function():
    def function():
        pass

    frame = types.SimpleNamespace(f_code=function.__code__, f_lineno=None)
    assert places.user_frame(frame) == Site(__file__, function.__code__.co_firstlineno)


def test_generated_code_is_not_the_users():
    @dataclasses.dataclass
    class Made:
        site: Site = dataclasses.field(default_factory=places.call_site)

    found = Made().site
    assert found.file == __file__ and "Made()" in lines.source_line(found)
    assert places.is_users("<ipython-input-1-ab>") and not places.is_users("<frozen runpy>")


def test_a_line_is_put_in_front_of_the_optimizer(tmp_path):
    path = tmp_path / "code.py"
    path.write_text("with x:\n    optimizer = torch.optim.SGD(self.net.parameters(),\n        lr=0.1)\nAdam(groups)\n")
    change = lines.before_optimizer(Site(str(path), 2), "SGD", "fusedtrain.fuse({model})")
    first = "optimizer = torch.optim.SGD(self.net.parameters(),"
    assert (change.line, change.before, change.after) == (2, first, f"fusedtrain.fuse(self.net)\n{first}")
    assert lines.before_optimizer(Site(str(path), 4), "Adam", "") is None


@pytest.mark.parametrize(
    ("code", "line", "after"),
    [
        ("m = Net(); o = Adam(m.parameters())", 1, "m = Net(); fuse(m); o = Adam(m.parameters())"),
        ("if x: o = Adam(m.parameters())", 1, "if x: fuse(m); o = Adam(m.parameters())"),
        ("t = fit(\n    o=Adam(m.parameters()))", 2, "fuse(m)\nt = fit(\n    o=Adam(m.parameters()))"),
        ("os = [Adam(m.parameters()) for m in ms]", 1, None),
        ("make = lambda m: Adam(m.parameters())", 1, None),
        ("o = Adam(Net().parameters())", 1, None),
        ("o = Adam((m := Net()).parameters())", 1, None),
    ],
)
def test_a_line_in_front_of_the_optimizer_stands_behind_what_it_needs(tmp_path, code, line, after):
    path = tmp_path / "code.py"
    path.write_text(code)
    change = lines.before_optimizer(Site(str(path), line), "Adam", "fuse({model})")
    assert (change and code.replace(change.before, change.after)) == after


CALLS = """
one = SGD([w], 0.1); other = SGD([w], 0.2)
both = [SGD([w], 0.3), SGD(
    [w], 0.4)]
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python tells where in a line a call stands from 3.11 on")
def test_calls_on_one_line_are_told_apart(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(CALLS)
    with Instrument() as watched:
        made = runpy.run_path(str(path), {"SGD": torch.optim.SGD, "w": nn.Parameter(torch.ones(1))})
        optimizers = [made["one"], made["other"], *made["both"]]
        found = [lines.edit_call(watched.sites[id(o)], ("SGD",), torch.optim.SGD, fused=True) for o in optimizers]
    assert [change.before for change in found] == [
        *("SGD([w], 0.1)", "SGD([w], 0.2)", "SGD([w], 0.3)", "SGD(\n    [w], 0.4)")
    ]


@pytest.mark.parametrize(
    "options",
    [
        *(
            "num_workers=1, persistent_workers=True",
            "persistent_workers=True, num_workers=1",
            "num_workers=1, timeout=9",
        ),
        *(
            "prefetch_factor=(4), num_workers=1, multiprocessing_context='spawn'",
            "num_workers=1,\n  prefetch_factor=4,\n",
        ),
        *(
            "num_workers=1, prefetch_factor=4, persistent_workers=True, timeout=9",
            "False, None, None, 1, None, False, False, 9",
        ),
    ],
)
def test_a_loader_without_workers_keeps_nothing_that_needs_them(tmp_path, options):
    code = f"DataLoader(data, 4, {options})"
    (tmp_path / "train.py").write_text(code)
    data = TensorDataset(torch.arange(12))
    names = {"DataLoader": DataLoader, "data": data}
    driver = types.SimpleNamespace(loader=eval(code, names), instrument=types.SimpleNamespace(sites={}))
    driver.instrument.sites[id(driver.loader)] = Site(str(tmp_path / "train.py"), 1)
    (change,) = remedies.Loader(driver, num_workers=0).changes(driver)
    made = eval(change.after, names)
    assert made.num_workers == 0 and [len(samples) for (samples,) in made] == [4, 4, 4]


@pytest.mark.parametrize("code", ["DataLoader(data, **options)", "DataLoader(*data)", "make(data)", "DataLoader(", ""])
def test_a_call_that_cannot_be_edited_is_left_alone(tmp_path, code):
    path = tmp_path / "code.py"
    path.write_text(code)
    assert lines.edit_call(Site(str(path), 1), ("DataLoader",), DataLoader, num_workers=2) is None


@pytest.mark.parametrize(
    ("code", "function", "keywords", "after"),
    [
        ("opt.zero_grad(False)", torch.optim.Optimizer.zero_grad, {"set_to_none": True}, "opt.zero_grad(True)"),
        (
            "DataLoader(d, 64, True, None, None, 4, f, False)",
            DataLoader,
            {"num_workers": 8, "pin_memory": True, "persistent_workers": True},
            "DataLoader(d, 64, True, None, None, 8, f, True, persistent_workers=True)",
        ),
        ("autocast('cpu', t, True)", torch.autocast, {"enabled": False}, "autocast('cpu', t, False)"),
        ("autocast('cpu', t)", torch.autocast, {"enabled": False}, "autocast('cpu', t, enabled=False)"),
        ("autocast(True)", torch.cuda.amp.autocast, {"enabled": False}, "autocast(False)"),
        ("SGD(net.parameters(), 0.1)", torch.optim.SGD, {"fused": True}, "SGD(net.parameters(), 0.1, fused=True)"),
    ],
)
def test_an_argument_that_is_given_by_position_is_replaced_there(tmp_path, code, function, keywords, after):
    path = tmp_path / "code.py"
    path.write_text(code)
    name = code.partition("(")[0].rpartition(".")[2]
    change = lines.edit_call(Site(str(path), 1), (name,), function, **keywords)
    assert (change.before, change.after) == (code, after)


def test_the_autocast_of_a_device_is_edited_by_its_own_parameters():
    model, driver = nn.Linear(4, 2), types.SimpleNamespace()
    with Instrument() as driver.instrument, pytest.warns(FutureWarning), torch.cpu.amp.autocast(True):
        model(torch.rand(2, 4))
    (change,) = remedies.Float32().changes(driver)
    assert change.after == "torch.cpu.amp.autocast(False)"


# --- a loop that carries out a plan -----------------------------------------------------------------------------------


class Net(nn.Module):
    """A little of everything that a remedy may touch."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def run(plan, make_optimizer=lambda params: torch.optim.AdamW(params, lr=0.01), autocast=False, dtype=torch.float32):
    """Trains a small network under a plan and returns (model, optimizer)."""
    torch.manual_seed(0)
    model, samples = Net().to(dtype), 64
    optimizer = make_optimizer(model.parameters())
    data = TensorDataset(torch.rand(samples, 3, 8, 8), torch.randint(10, (samples,)))
    with Instrument() as instrument:
        driver = Driver(instrument, plan)
        driver.install()
        try:
            for _ in range(100):
                for images, targets in DataLoader(data, 16):
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                        loss = nn.functional.cross_entropy(model(x=images.to(dtype)).float(), targets)
                    optimizer.zero_grad(set_to_none=False)
                    loss.backward()
                    optimizer.step()
        except Finished:
            pass
    return model, optimizer


def step_of(model, optimizer):
    def step(batch):
        images, targets = batch
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


SIMPLE = {
    "threads": lambda: remedies.Threads(2),
    "layout": remedies.ChannelsLast,
    "fused": lambda: remedies.FusedOptimizer(ours=False),
    "ours": lambda: remedies.FusedOptimizer(ours=True),
    "zero_grad": remedies.SetToNone,
    "float32": remedies.Float32,
    "weights": remedies.Float32,
    "float64": remedies.Float32,
    "bfloat16": remedies.BFloat16,
    "compile": lambda: remedies.Compile(backend="eager"),
}


def test_every_remedy_that_holds_within_a_process_is_made_again_in_another():
    loader = DataLoader(TensorDataset(torch.rand(4)), 2)
    driver = types.SimpleNamespace(loader=loader, instrument=types.SimpleNamespace(sites={}))
    made = [make() for make in SIMPLE.values()]
    made += [remedies.NoDebugging(driver), remedies.Fuse(), remedies.CudnnBenchmark(), remedies.PinnedCopies(driver)]
    made += [remedies.Loader(driver, num_workers=1), remedies.WholeBatches(driver)]
    again = [remedies.rebuild(json.loads(json.dumps(remedies.specification(remedy))), driver) for remedy in made]
    assert [remedy.name for remedy in again] == [remedy.name for remedy in made]
    inside = {cls for cls in remedies.Remedy.__subclasses__() if not cls.outside and cls is not remedies.NoExchange}
    assert inside <= {*map(type, made)} | {cls for cls in inside if cls.__module__ != remedies.__name__}


@pytest.mark.parametrize("name", SIMPLE)
def test_a_remedy_keeps_its_class_and_leaves_nothing_behind(name):
    seen = {}

    def state(driver):
        (optimizer,) = driver.instrument.optimizers
        (model,) = driver.instrument.roots
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        return (
            groups,
            "step" in vars(optimizer),
            [(p.stride(), p.dtype) for p in model.parameters()],
            [(v.stride(), v.dtype) for s in optimizer.state.values() for v in s.values()],
            len(model._forward_hooks),
            len(model._forward_pre_hooks),
            torch.get_num_threads(),
            "forward" in vars(model),
        )

    def plan(driver):
        inputs = driver.instrument.inputs
        yield Run(4, collect=2**20, parts=True)
        driver.instrument.settle()
        before = copy.deepcopy(state(driver))
        remedy = SIMPLE[name]()
        assert inputs and verify.rehearse(driver, remedy, inputs) is None
        if isinstance(remedy, remedies.Float32):
            remedy.apply(driver)
            assert {p.dtype for p in driver.instrument.roots[0].parameters()} == {torch.float32}
            remedy.undo(driver)
        check = yield from verify.check_losses(driver, remedy, ())
        seen["check"] = check
        yield Run(1, parts=True)
        assert state(driver) == before

        assert driver.instrument.autocast == ({torch.bfloat16} if name == "float32" else set())

    dtypes = {"weights": torch.bfloat16, "float64": torch.float64}
    run(plan, autocast=name == "float32", dtype=dtypes.get(name, torch.float32))
    assert seen["check"].holds, seen["check"]
    assert seen["check"].kind in remedies.CLASSES


# With options that reach beyond a parameter and its group.
COUNTED = {
    "RMSprop": {"lr": 0.001, "momentum": 0.9, "centered": True},
    "RMSpropTF": {"lr": 0.001, "momentum": 0.9, "weight_decay": 0.1},
    "Lamb": {"lr": 0.01, "eps": 1.0, "weight_decay": 0.1, "max_grad_norm": 0.01},
    "Lion": {"weight_decay": 0.1},
    "Adan": {"weight_decay": 0.1},
    "NvNovoGrad": {"weight_decay": 0.1, "amsgrad": True},
}


def stock_optimizer(zoo, name):
    import timm.optim

    return getattr(torch.optim if name in vars(torch.optim) else timm.optim, name)


@pytest.mark.parametrize("name", COUNTED)
def test_our_counterpart_steps_in_for_an_optimizer_and_leaves_it_as_it_was(zoo, name):
    def form(values):
        return {k: (type(v), v.dtype if isinstance(v, torch.Tensor) else None) for k, v in values.items()}

    def plan(driver):
        (optimizer,), remedy = driver.instrument.optimizers, remedies.FusedOptimizer(ours=True)
        yield Run(4, collect=2**20, parts=True)
        driver.instrument.settle()
        groups, states = optimizer.param_groups, optimizer.state.values()
        before = [*map(form, groups), *map(form, states)]
        assert remedy.why_not(driver) is None
        remedy.apply(driver)
        assert type(optimizer.step.__self__).__name__ == remedies.counterpart(optimizer)
        assert type(optimizer.step.__self__).__module__.startswith("fusedtrain.optim")
        remedy.undo(driver)
        check = yield from verify.check_losses(driver, remedy, ())
        assert check.holds, check
        yield Run(1, Arm((remedy,)))
        snapshot = verify.Snapshot(driver)  # which counts steps as ours does
        yield Run(1, parts=True)
        snapshot.restore()
        assert "step" not in vars(optimizer) and [*map(form, groups), *map(form, states)] == before

    run(plan, lambda params: stock_optimizer(zoo, name)(params, **COUNTED[name]))


def test_a_snapshot_holds_how_many_steps_a_group_took(zoo):
    def plan(driver):
        (optimizer,) = driver.instrument.optimizers
        yield Run(2, collect=2**20, parts=True)
        driver.instrument.settle()
        snapshot, count = verify.Snapshot(driver), optimizer.param_groups[0]["step"]
        yield Run(3)
        assert optimizer.param_groups[0]["step"] == count + 3
        snapshot.restore()
        assert optimizer.param_groups[0]["step"] == count and type(count) is int
        yield Run(1)

    run(plan, stock_optimizer(zoo, "Adan"))


class OwnRMSprop(torch.optim.RMSprop):
    """May step otherwise."""


def optimizers_to_replace(*optimizers):
    watched = types.SimpleNamespace(by_hand=[], roots=[nn.Linear(8, 8)], optimizers=list(optimizers))
    return types.SimpleNamespace(instrument=watched, aside=contextlib.nullcontext, loader=None)


def test_an_optimizer_that_may_step_otherwise_is_left_to_advice(monkeypatch):
    w, ours = [torch.ones(2)], remedies.FusedOptimizer(ours=True)
    known = torch.optim.RMSprop(w)
    assert ours.why_not(optimizers_to_replace(known)) is None
    unknown = torch.optim.RMSprop(w)
    unknown.defaults["warm_up"] = 3
    for optimizer in (OwnRMSprop(w), unknown, torch.optim.RMSprop(w, differentiable=True)):
        driver = optimizers_to_replace(known, optimizer)
        said = ours.why_not(driver)
        assert said == f"there is no fused form of {type(optimizer).__module__}.{type(optimizer).__name__}"
        facts = measure.Facts([], measure.Interval(1.0, 1, 1), {"optimizer": 0.4}, None, {}, fused_step=0.1)
        found = next(rule for rule in rules.RULES if rule.name == "optimizer").look(facts, driver)
        assert not found.remedies and f"{type(optimizer).__name__}.step() takes 400 ms" in found.evidence
        assert "of fusedtrain.optim Adam, AdamW, SGD, RMSprop, RMSpropTF," in found.advice
    mixed = optimizers_to_replace(known, torch.optim.AdamW(w))
    assert ours.why_not(mixed) is None and remedies.FusedOptimizer(ours=False).why_not(mixed) is not None
    fused = optimizers_to_replace(fusedtrain.optim.RMSprop(w))
    assert all(remedies.FusedOptimizer(ours).why_not(fused) == "the optimizer is fused already" for ours in (0, 1))
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    assert ours.why_not(optimizers_to_replace(known)) is None, "timm need not be installed"


def test_debugging_aids_are_off_for_a_trial():
    def state():
        on = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        return *on, torch.utils.deterministic.fill_uninitialized_memory

    with Instrument() as instrument:
        driver = Driver(instrument, lambda driver: iter(()))
        assert "not looked for" in remedies.NoDebugging.why_not(driver)
        with torch.autograd.set_detect_anomaly(True, check_nan=False), harness.poisoned_memory():
            remedy = remedies.NoDebugging(driver)
            assert remedy.why_not(driver) is None and "anomaly" in remedy.how and "fill" in remedy.how
            remedy.apply(driver)
            assert not torch.is_anomaly_enabled() and not torch.utils.deterministic.fill_uninitialized_memory
            remedy.undo(driver)
            assert state() == (True, False, True)


def test_anomalies_that_are_looked_for_within_a_step_are_seen():
    searched = []

    def plan(driver):
        yield Run(2)
        remedy = remedies.NoDebugging(driver)
        assert remedy.why_not(driver) is None and "anomaly" in remedy.how and "fill" not in remedy.how
        remedy.apply(driver)
        searched.clear()
        yield Run(2)
        assert searched == [False, False]
        remedy.undo(driver)
        searched.clear()
        yield Run(2)
        assert searched == [True, True]

    with Instrument() as instrument:
        driver = Driver(instrument, plan)
        driver.install()
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(Finished):
            for (x,) in DataLoader(TensorDataset(torch.rand(64, 4)), 4):
                with torch.autograd.detect_anomaly():
                    searched.append(torch.is_anomaly_enabled())
                    loss = model(x).sum()
                    optimizer.zero_grad()
                    loss.backward()
                optimizer.step()
    assert not torch.is_anomaly_enabled() and len(searched) == 2


def test_a_remedy_that_moves_the_losses_is_refused():
    class Faster(remedies.Remedy):
        """Twice the learning rate; promises the same bits."""

        name, kind = "cheat", "last bit"

        def apply(self, driver):
            for group in driver.instrument.optimizers[0].param_groups:
                group["lr"] *= 2

        def undo(self, driver):
            for group in driver.instrument.optimizers[0].param_groups:
                group["lr"] /= 2

    checks = []

    def plan(driver):
        yield Run(4, collect=2**20, parts=True)
        driver.instrument.settle()
        for remedy in (Faster(), remedies.Remedy()):
            remedy.kind = remedy.kind or "bitwise"
            checks.append((yield from verify.check_losses(driver, remedy, ())))

    run(plan)
    assert [check.holds for check in checks] == [False, True]


def test_a_step_is_the_sum_of_its_parts():
    steps = []

    def plan(driver):
        yield Run(3, parts=True)
        driver.instrument.settle()
        steps.extend((yield Run(5, Arm((), None), parts=True)))

    run(plan)
    for step in steps:
        assert set(step.parts) >= {"loader", "forward", "backward", "optimizer", "zero_grad", "rest"}
        assert sum(step.parts.values()) == pytest.approx(step.seconds) and min(step.parts.values()) >= 0


@pytest.mark.parametrize("how", ["by place", "by name"])
def test_what_an_optimizer_calls_in_its_step_is_not_the_optimizers(how):
    model, seen = nn.Linear(4, 4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def closure():
        with tempfile.TemporaryFile() as file:
            stack = sampling.stack_of(threading.get_ident(), file)
        assert stack[1] == (__file__, closure.__code__.co_firstlineno + 2, "closure")
        seen.append(instrument.running(stack, {}))
        optimizer.zero_grad()
        loss = model(torch.rand(2, 4)).sum()
        loss.backward()
        return loss

    with Instrument() as watched:
        watched.step = step = Step(0.0)
        loss = optimizer.step(closure) if how == "by place" else optimizer.step(closure=closure)
        optimizer.step(None)
    parts = [part for part, *_ in step.spans]
    assert parts == ["optimizer", "zero_grad", "forward", "backward", "optimizer", "optimizer"]
    assert seen == ["rest"] and loss.requires_grad and watched.roots == [model]


@pytest.mark.parametrize(("threads", "fine"), [(1, False), (1, True), (2, False)])
def test_what_other_processes_take_is_left_out_where_no_thread_of_the_run_can_take_it(threads, fine, monkeypatch):
    clock, steps = iter(range(10**6)), []  # seconds: far more than a step takes
    monkeypatch.setattr(Waits, "read", lambda self: float(next(clock)))
    monkeypatch.setattr(TeamWaits, "look", lambda self: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(drive, "cores", lambda: 1)

    def plan(driver):
        yield Run(2)
        if fine:
            driver.instrument.waits = driver._waits
        steps.extend((yield Run(3, parts=True)))
        steps.extend((yield Run(3)))

    run(plan)
    for step in steps:
        assert step.seconds == pytest.approx(0.01 * step.wall if threads == 1 else step.wall)
        assert sum(step.parts.values()) == pytest.approx(step.seconds)


def test_a_wait_between_the_last_two_readings_is_in_both_of_them(monkeypatch):
    now = {"clock": 0.0, "waited": 0.0}
    pauses = iter((0.0, 2.0))  # before the counter is read

    def read(waits):
        pause = next(pauses)
        now.update(clock=now["clock"] + pause, waited=now["waited"] + pause)
        return now["waited"]

    monkeypatch.setattr(Waits, "read", read)
    monkeypatch.setattr(_waits, "time", types.SimpleNamespace(perf_counter=lambda: now["clock"]))
    waits = Waits()
    start = waits.start()
    now["clock"] += 0.5
    assert waits.seconds(start) == 0.5


def test_what_was_waited_over_many_steps_is_taken_off_the_long_ones():
    steps = [a_step({"loader": 1.0, "rest": 1.0}, False) for _ in range(18)]
    steps += [a_step({"loader": 1.0, "rest": 4.0}, False), a_step({"rest": 3.0}, False)]
    spread_waits(steps, 2.0, least=2.0)
    assert [round(step.seconds, 9) for step in steps] == [2.0] * 18 + [3.5, 2.5]
    assert all(sum(step.parts.values()) == step.seconds for step in steps)


def test_what_watched_steps_waited_is_taken_off_down_to_what_bare_ones_take():
    with Instrument() as watched:
        driver = Driver(watched, None)
        driver._every_step, usual = False, []
        for seconds, parts in ((1.0, False), (4.0, True)):  # each watched step was interrupted
            driver._run, driver._counted = Run(20, parts=parts), (0.0, 0, 40.0 * parts, 0.0)
            steps = [Step(0.0, seconds, {"rest": seconds}) for _ in range(20)]
            driver._account(steps)
            usual.append({step.seconds for step in steps})
    assert usual == [{1.0}, {2.0}]


def test_the_kernel_is_asked_for_page_faults_in_steps_of_their_own(monkeypatch):
    asked, found = Counter(), types.SimpleNamespace()
    monkeypatch.setattr(drive, "_faults", lambda: asked.update(["faults"]) or asked["faults"])

    def plan(driver):
        yield Run(8, parts=True)
        found.before = asked["faults"]
        yield from measure.optimizer_faults(driver, found, measure.Sizes(0.01, 1), Arm())
        asked.clear()
        yield Run(8, parts=True)

    run(plan)
    assert found.before == 0 and found.optimizer_faults == 1 and not asked


def test_what_a_team_waits_is_taken_off_as_far_as_a_part_is_unusual():
    def step(backward, team, rest=3.0):
        return Step(0.0, backward + rest, {"backward": backward, "rest": rest}, waits={"backward": (1.0, team)})

    steps = [step(2.0, 0.0), step(4.0, 0.0), step(9.0, 8.0), step(8.0, 5.0), step(8.0, 99.0)]
    leave_out_others(steps)
    assert [s.parts["backward"] for s in steps] == [1.0, 3.0, 1.0, 2.0, 1.0]
    assert [s.waited for s in steps] == [1.0, 1.0, 8.0, 6.0, 7.0] and all(s.parts["rest"] == 3.0 for s in steps)


def calls_of_ours(frame_event_counts):
    """Returns a profiler that counts the Python functions of the diagnosis that are called."""
    folder = str(Path(drive.__file__).parent)

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            frame_event_counts[frame.f_code.co_name] += 1

    return count


@pytest.mark.parametrize("loading", [True, False])
def test_a_bare_step_calls_torchs_own_methods_and_reads_nothing_but_the_clock(loading):
    owners = (torch.Tensor, torch.autograd, torch.optim.Optimizer, nn.Module, torch.autocast)

    def methods():  # a constructor stays wrapped: its place is noted
        return [{name: value for name, value in vars(owner).items() if name != "__init__"} for owner in owners]

    before, counts, seen = methods(), Counter(), {False: set(), True: set()}
    torch.manual_seed(0)
    model, data = Net(), [(torch.rand(4, 3, 8, 8), torch.randint(10, (4,)))] * 400
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step, driver, per_step = step_of(model, optimizer), None, []

    def plan(driver):
        yield from measure.warm_up(driver)
        driver._every_step = False  # as in steps that are too short for it
        for parts in (True, False) * 3:
            driver.watching = parts
            yield Run(12, Arm(), parts=parts)
        driver.watching = None

    def note():
        hooks = (model._forward_hooks, model._forward_pre_hooks, optimizer_hooks._global_optimizer_pre_hooks)
        hooks += () if driver.loader is None else (optimizer_hooks._global_optimizer_post_hooks,)
        seen[driver.watching].add((methods() == before, any(hooks)))

    with Instrument() as watched:
        driver = Driver(watched, plan)
        driver.watching = None
        driver.install()
        with contextlib.suppress(Finished):
            while True:
                for batch in DataLoader(data, batch_size=None) if loading else data:
                    step(batch)
                    if driver.watching is not None:
                        note()
                    if driver.watching is False:
                        if driver._times and 5 < len(driver._times) < 20:
                            per_step.append((len(driver._times), counts.total()))
                        sys.setprofile(calls_of_ours(counts))
                    else:
                        sys.setprofile(None)
    sys.setprofile(None)
    assert seen[True] == {(False, True)} and seen[False] == {(True, False)}
    taken = {calls - c for (times, c), (later, calls) in itertools.pairwise(per_step) if later == times + 2}
    assert taken == {4 if loading else 2}, counts  # __next__ and fetch of the loop, _load and fetch of the source


@pytest.mark.parametrize("share", [0.0, 0.004, 0.01, 0.07, 0.4])
def test_so_many_steps_are_bare_that_watching_the_others_keeps_its_budget(share):
    bare = measure.bare_steps(50, 10, share) + 10
    assert 50 * share / (50 * (1 + share) + bare) <= measure.BUDGET
    assert bare == 10 or 50 * share / (50 * (1 + share) + bare - 1) > measure.BUDGET, "no more than that"


def a_step(parts, watched):
    step = Step(0.0, sum(parts.values()), parts)
    step.spans = [("forward", 0.0, 0.0, None)] * watched
    return step


def test_the_parts_are_those_of_a_bare_step():
    watched = [a_step({"loader": 1.0, "forward": 3.5, "backward": 3.5, "rest": 3.0}, True) for _ in range(4)]
    bare = [a_step({"loader": 3.0, "rest": 8.0}, False) for _ in range(12)]
    steps = [(step, 9.0) for step in watched] + [(step, 11.0) for step in bare]
    parts = measure.parts_of(steps, 2.0, 10.5, alone=True)
    assert sum(parts.values()) == 10.5 and parts["loader"] == 2.5, "of all steps"
    assert parts["forward"] == parts["backward"] == 3.5 * parts["rest"], "watching lies in the rest"


def test_what_holds_bare_steps_up_is_the_scripts_own_where_nothing_else_can():
    watched = [a_step({"forward": 8.0, "rest": 2.0}, True) for _ in range(4)]
    bare = [a_step({"loader": 0.0, "rest": 10.0}, False) for _ in range(15)] + [a_step({"rest": 210.0}, False)]
    steps = [(step, step.wall) for step in watched + bare]
    for alone, rest in ((True, 12.0), (False, 4.0)):
        parts = measure.parts_of(steps, 0.0, 20.0, alone)
        assert parts["rest"] == rest and sum(parts.values()) == 20.0


def test_what_the_loader_delivers_is_measured_wherever_it_may_be_the_cause(monkeypatch):
    def ceiling(driver, facts, sizes, arm):
        facts.cached, facts.waiting = facts.step.value, measure.Interval(0.0, -0.5, 0.5)  # on a busy machine
        facts.parts["loader"] = 0.2 * facts.step.value
        yield Run(1, arm)
        return arm

    monkeypatch.setattr(measure, "ceiling", ceiling)
    diagnosis, found = Diagnosis(), []
    diagnosis.noise, diagnosis.graphs, diagnosis.growth, diagnosis.inputs = (
        measure.Interval(0.0, 0.0, 0.0),
        [],
        None,
        {},
    )

    def plan(driver):
        sizes = yield from measure.warm_up(driver)
        # After a first remedy, that is.
        found.extend((yield from diagnosis._examine(driver, sizes, Arm((remedies.SetToNone(),)), 10)))

    run(plan)
    facts, findings, checked = found
    assert 0 in facts.rates and "loader" in {finding.rule for finding in findings} | checked.keys()


def test_two_arms_take_turns():
    order = []

    class Noted(remedies.Remedy):
        def apply(self, driver):
            order.append("after")

        def undo(self, driver):
            order.append("before")

    def plan(driver):
        yield Run(2)
        yield from measure.trial(driver, measure.Sizes(1.0, 1), Arm(), Arm((Noted(),)), 4)

    run(plan)
    assert order == ["after", "before", "after", "before"], "each switch once: A B, B A, A B, B A"


def test_accumulated_gradients_are_measured_in_whole_groups():
    assert measure.Sizes(1.0, 4).block(Arm()) == (4, 4)
    assert measure.Sizes(0.01, 4).block(Arm())[0] % 4 == 0


class Encoding(UserDict):
    """As tokenizers return it."""

    def __init__(self, data, encodings):
        super().__init__(data)
        self.encodings = encodings


class Output(dict):
    def __init__(self, *, x):
        super().__init__(x=x)


@pytest.mark.parametrize(
    "batch",
    [
        Encoding({"x": torch.rand(2, 3)}, "kept"),
        Output(x=torch.rand(2, 3)),
        defaultdict(list, x=torch.rand(2, 3), names=["a", "b"]),
    ],
)
def test_batches_are_copied_whatever_dictionaries_they_are(batch):
    kept, large = batches.copy_batch(batch), measure.repeat_batch(batch, 4)
    assert type(kept) is type(large) is type(batch)
    assert getattr(kept, "encodings", None) == getattr(batch, "encodings", None)
    assert torch.equal(kept["x"], batch["x"]) and kept["x"] is not batch["x"] and large["x"].shape == (8, 3)
    kept.pop("x")
    assert "x" in batch and batches.batch_bytes(batch) == 24 and batches.batch_bytes([batch, (batch,)]) == 48


def test_batches_that_cannot_be_copied_are_not_kept():
    graph, kept = types.SimpleNamespace(x=torch.ones(2)), []
    assert batches.copy_batch([graph])[0].x is not graph.x
    data = [types.SimpleNamespace(x=torch.rand(4), lock=threading.Lock() if i == 2 else None) for i in range(9)]
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def plan(driver):
        for _ in range(2):
            yield Run(3, collect=2**20)
            kept.append(len(driver.batches))

    with Instrument() as watched, pytest.raises(Finished):
        Driver(watched, plan).install()
        for batch in DataLoader(data, batch_size=None, collate_fn=lambda batch: batch):
            model(batch.x).sum().backward()
            optimizer.step()
    facts = measure.Facts([], measure.Interval(1.0, 1, 1), {"loader": 0.4}, None, {})
    found = loading.loader(facts, types.SimpleNamespace(loader=data))
    assert kept == [0, 0] and found.gain == 0.4 and "cannot be copied" in found.evidence
    facts.parts["loader"] = 0.01
    assert loading.loader(facts, types.SimpleNamespace(loader=data)).startswith("the loader holds the loop up for 1.0%")


def test_page_faults_are_priced_on_this_machine():
    assert 0 <= measure.fault_cost() < 1e-3


def test_a_loop_without_a_loader_is_measured_between_optimizer_steps():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    found = []

    def plan(driver):
        sizes = yield from measure.warm_up(driver)
        found.append((yield from measure.observe(driver, sizes, Arm(), 5, {})))
        remedy = remedies.FusedOptimizer(ours=False)
        assert remedy.why_not(driver) is None
        found.append((yield from measure.trial(driver, sizes, Arm(), Arm((remedy,)), 2)))

    step = step_of(model, optimizer)
    with Instrument() as instrument, pytest.raises(Finished):
        driver = Driver(instrument, plan)
        driver.install()
        for _ in range(2000):
            step((torch.rand(4, 3, 8, 8), torch.randint(10, (4,))))
    facts, pairs = found
    assert facts.parts["loader"] == 0 and facts.parts["optimizer"] > 0 and facts.parts["backward"] > 0
    assert min(pairs.before + pairs.after) > 0 and driver.loader is None
    assert "fused" in optimizer.param_groups[0] and not optimizer.param_groups[0]["fused"]


class ByHand:
    """Descent with momentum; ``at_once``: a step is the whole pass, and not the update alone."""

    def __init__(self, model, at_once=False):
        self.model, self.at_once = model, at_once
        self.momenta = {p: torch.zeros_like(p) for p in model.parameters()}
        self.steps = 0

    def step(self, batch=None):
        if self.at_once:
            self.gradients(batch)
        self.steps += 1
        with torch.no_grad():
            for p in self.model.parameters():
                self.momenta[p] = 0.9 * self.momenta[p] + p.grad
                p -= 0.01 * self.momenta[p]
                p.grad = None

    def gradients(self, batch):
        images, targets = batch
        nn.functional.cross_entropy(self.model(images), targets).backward()


@pytest.mark.parametrize("loading", [True, False])
@pytest.mark.parametrize("update", ["object", "inline", "at once"])
def test_weights_that_are_updated_by_hand_are_trained_all_the_same(update, loading):
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(64, 3, 8, 8), torch.randint(10, (64,)))
    model = Net()
    optimizer = ByHand(model, update == "at once")
    found, wrapped = {}, None

    def train(batch):
        if not optimizer.at_once:
            optimizer.gradients(batch)
        if update == "inline":
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad
                    p.grad = None
        else:
            optimizer.step(batch)

    def plan(driver):
        nonlocal wrapped
        sizes = yield from measure.warm_up(driver)
        found["facts"] = yield from measure.observe(driver, sizes, Arm(), 5, {})
        if loading:
            remedy = remedies.SetToNone()  # which nobody notices here
            found["check"] = yield from verify.check_losses(driver, remedy, ())
        wrapped = set()
        yield Run(3)

    with Instrument() as watched, pytest.raises(Finished):
        driver = Driver(watched, plan)
        driver.install()
        while True:
            for batch in DataLoader(data, 16) if loading else [data[:16]] * 4:
                train(batch)
                if wrapped is not None:
                    wrapped.add("step" in vars(optimizer))
    known = [owner for owner, _ in watched.by_hand]
    assert known == [optimizer] * (update == "object") and not watched.optimizers
    assert (driver.loader is not None) is loading
    if not loading:
        assert driver.optimizer is (optimizer if known else "backward")
    parts = found["facts"].parts
    assert parts["forward"] > 0 and parts["backward"] > 0 and (parts["optimizer"] > 0) is bool(known)
    # Between bare steps nothing is wrapped but what marks their boundaries.
    assert wrapped == {not loading and bool(known)} and "step" not in vars(optimizer)
    if loading:
        # What a pass of one's own keeps besides the weights is not known, and not put back.
        check = found["check"]
        assert check.holds and (check.difference > 0) is (update == "at once"), check
        assert ("do not repeat" in check.note) is (update == "at once")


@pytest.mark.parametrize("way", ["autograd", "func", "per sample"])
def test_gradients_without_a_backward_pass(way):
    torch.manual_seed(0)
    images, targets = torch.rand(4, 3, 8, 8), torch.randint(10, (4,))
    model = Net().eval()
    weights = dict(model.named_parameters())
    optimizer = None if way == "autograd" else torch.optim.SGD(weights.values(), lr=0.01)
    losses, found = [], {}

    def loss(weights, images, targets):
        return nn.functional.cross_entropy(torch.func.functional_call(model, weights, images), targets)

    def one(weights, image, target):
        return loss(weights, image[None], target[None])

    def step():
        if way == "autograd":
            value = loss(weights, images, targets)
            losses.append(value.item())
            grads = torch.autograd.grad(value, tuple(weights.values()))
            with torch.no_grad():
                for weight, grad in zip(weights.values(), grads):
                    weight -= 0.01 * grad
            return
        if way == "func":
            grads, value = torch.func.grad_and_value(loss)(weights, images, targets)
        else:
            each, values = torch.vmap(torch.func.grad_and_value(one), (None, 0, 0))(weights, images, targets)
            grads, value = {name: grad.mean(0) for name, grad in each.items()}, values.mean()
        losses.append(value.item())
        for name, weight in weights.items():
            weight.grad = grads[name].detach()
        optimizer.step()

    def plan(driver):
        sizes = yield from measure.warm_up(driver)
        inputs = watched.inputs
        found["facts"] = yield from measure.observe(driver, sizes, Arm(), 5, {})
        found["error"] = verify.rehearse(driver, remedies.SetToNone(), inputs or {})
        driver.losses = found["losses"] = []
        yield Run(3, parts=True)

    with Instrument() as watched, pytest.raises(Finished):
        driver = Driver(watched, plan)
        driver.install()
        while True:
            step()
    assert driver.optimizer is (optimizer or "grad") and not watched.by_hand and found["error"] is None
    assert found["facts"].parts["forward"] > 0 and found["facts"].parts["backward"] > 0
    assert len(found["losses"]) == 3 and found["losses"] == losses[-3:]


def test_a_gradient_within_the_loss_is_no_step():
    model = Net()
    with Instrument() as watched, pytest.raises(Finished):
        driver = Driver(watched, lambda driver: iter(()))
        driver.install()
        while True:
            images = torch.rand(2, 3, 8, 8, requires_grad=True)
            value = model(images).sum()
            (slope,) = torch.autograd.grad(value, images, create_graph=True)
            (value + slope.square().sum()).backward()
            assert driver.optimizer is None or driver.optimizer == "backward"
    assert driver.optimizer == "backward"


def test_an_optimizer_of_torch_is_waited_for_however_often_gradients_are_accumulated():
    model = Net()
    with Instrument() as watched, pytest.raises(Finished):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        driver = Driver(watched, lambda driver: iter(()))
        driver.install()
        while True:
            for _ in range(4 * drive.BY_HAND):
                model(torch.rand(2, 3, 8, 8)).sum().backward()
            assert driver.optimizer is None
            optimizer.step()
    assert driver.optimizer is optimizer and not watched.by_hand


def test_an_optimizer_that_is_made_and_never_steps_is_not_waited_for_for_ever():
    w = torch.ones(3, requires_grad=True)
    with Instrument() as watched, pytest.raises(Finished):
        torch.optim.SGD([w], lr=0.01)
        driver = Driver(watched, lambda driver: iter(()))
        driver.install()
        for i in range(2 * drive.IDLE):
            assert i <= drive.IDLE
            w.sum().backward()
    assert driver.optimizer == "backward"


def test_an_optimizer_that_is_written_by_hand_is_held_against_a_fused_one():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    watched = types.SimpleNamespace(by_hand=[(ByHand(model), "step")], roots=[model], optimizers=[])
    driver = types.SimpleNamespace(instrument=watched, aside=contextlib.nullcontext, loader=None)
    rule = next(rule for rule in rules.RULES if rule.name == "optimizer")
    facts = measure.Facts([], measure.Interval(1.0, 1, 1), {"optimizer": 0.4}, None, {})
    finding = rule.look(facts, driver)
    assert 0.39 < finding.gain < 0.4 and "ByHand.step() takes 400 ms, 40% of the step" in finding.evidence
    assert all(p.grad is None for p in model.parameters())
    facts.fused_step = 0.39  # for large weights
    assert isinstance(rule.look(facts, driver), str)
    facts.parts["optimizer"] = 0.01
    assert rule.look(facts, driver) == "ByHand.step() takes 1.0% of the step"


def test_an_optimizer_without_a_fused_form_is_held_against_a_fused_one():
    model = nn.Linear(8, 8)
    optimizers = [torch.optim.NAdam(model.parameters())]
    watched = types.SimpleNamespace(by_hand=[], roots=[model], optimizers=optimizers)
    driver = types.SimpleNamespace(instrument=watched, aside=contextlib.nullcontext, loader=None)
    rule = next(rule for rule in rules.RULES if rule.name == "optimizer")
    facts = measure.Facts([], measure.Interval(1.0, 1, 1), {"optimizer": 0.5}, None, {}, fused_step=0.125)
    finding = rule.look(facts, driver)
    assert finding.gain == 0.375 and "NAdam.step() takes 500 ms" in finding.evidence
    watched.optimizers = [torch.optim.Adam(model.parameters())]
    facts.candidates = {"optimizer": "the optimizer is fused already"}
    assert rule.look(facts, driver) == "the optimizer is fused already"


@pytest.mark.parametrize("kept", [True, False])
def test_sparse_gradients_are_left_to_the_optimizers_that_take_them(kept):
    model = nn.EmbeddingBag(8, 4, sparse=True)
    model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    model.sparse = not kept  # whether a gradient is seen, or a layer that will make one
    model.zero_grad(set_to_none=not kept)
    watched = types.SimpleNamespace(by_hand=[], roots=[model], optimizers=optimizers)
    driver = types.SimpleNamespace(instrument=watched, aside=contextlib.nullcontext, loader=None)
    assert all("sparse" in remedies.FusedOptimizer(ours).why_not(driver) for ours in (False, True))
    watched.optimizers = [torch.optim.SparseAdam(model.parameters())]
    facts = measure.Facts([], measure.Interval(1.0, 1, 1), {"optimizer": 0.4}, None, {}, fused_step=0.1)
    rule = next(rule for rule in rules.RULES if rule.name == "optimizer")
    assert rule.look(facts, driver) == "SparseAdam.step() takes 40.0% of the step; gradients are sparse"


def test_a_model_that_is_evaluated_amid_the_training_is_told_from_one_that_trains():
    model, teacher, x = Net(), Net().eval(), torch.rand(2, 3, 8, 8)
    with Instrument() as watched:
        watched.step = step = Step(0.0)
        model.eval()(x)  # before the first step, as a check
        (model.train()(x) - teacher(x)).sum().backward()
        watched.settle()
        with torch.no_grad():
            teacher(x), model(x)
            model.eval()(x)
        assert not watched.records_evaluation
        model(x)
        assert watched.records_evaluation
        model.train()(x)
    parts = [part for part, *_ in step.spans]
    assert parts == ["forward"] * 3 + ["backward"] + ["forward"] * 2 + ["evaluation"] * 2 + ["forward"]


@pytest.mark.parametrize("how", ["mode", "gradients"])
def test_an_evaluation_on_the_loader_of_the_training_is_no_training(how):
    model, loader = nn.Linear(4, 2), DataLoader(TensorDataset(torch.rand(24, 4)), 4)
    optimizer, steps, passes = torch.optim.SGD(model.parameters(), lr=0.1), [], set()

    def plan(driver):
        yield Run(4, parts=True)
        driver.instrument.settle()
        steps.extend((yield Run(8, parts=True)))
        yield Run(8)

    def evaluate():
        model.train(how != "mode")
        with torch.set_grad_enabled(how == "mode"):
            passes.add(sum(len(model(x)) for (x,) in loader))
        model.train()

    with Instrument() as watched:
        driver = Driver(watched, plan)
        driver.install()
        with pytest.raises(Finished):
            for i, (x,) in enumerate(loader):
                assert i <= 20
                model(x).sum().backward()
                optimizer.step()
                evaluate()
    assert passes == {24} and all("optimizer" in step.parts for step in steps)
    assert how != "mode" or all(step.parts["evaluation"] > 0 for step in steps)


def test_a_model_that_is_left_in_evaluation_mode_trains_all_the_same():
    model, loader = nn.Linear(4, 2), DataLoader(TensorDataset(torch.rand(24, 4)), 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Instrument() as watched, pytest.raises(Finished):
        Driver(watched, lambda driver: (Run(3, parts=parts) for parts in (True, False))).install()
        for _ in range(20):
            for (x,) in itertools.islice(loader, 2):
                model(x).sum().backward()
                optimizer.step()
            model.eval()


def test_an_evaluation_amid_the_training_is_named_with_its_lines():
    facts = measure.Facts([], measure.Interval(1.0, 1, 1), {"evaluation": 0.6}, None, {})
    facts.lines = [("forward", Site("a.py", 1), 0.4), ("evaluation", Site("a.py", 2), 0.6)]
    driver = types.SimpleNamespace(instrument=types.SimpleNamespace(records_evaluation=False))
    finding = loop.evaluation(facts, driver)
    assert finding.gain == 0.6 and finding.lines == ((Site("a.py", 2), 0.6),) and "no_grad" not in finding.advice
    driver.instrument.records_evaluation = True
    assert "no_grad" in loop.evaluation(facts, driver).advice
    facts.parts["evaluation"] = 0.09
    assert isinstance(loop.evaluation(facts, driver), str)


def test_a_graph_that_goes_back_into_earlier_steps_grows():
    w, state, sizes = torch.ones(3, requires_grad=True), torch.ones(3), []
    for _ in range(4):
        state = state * w
        loss = state.sum()
        loss = loss + loss
        sizes.append(len(instrument.graph_of(loss)))
        torch.autograd.backward([loss], retain_graph=True)
    assert sizes == [3, 4, 5, 6]  # two sums, and a product of each step


@pytest.mark.parametrize("carry", ["all", "one", "none"])
def test_steps_that_go_back_through_all_earlier_ones_are_told_from_those_that_do_not(carry):
    w, facts = torch.ones(3, requires_grad=True), None

    def plan(driver):
        nonlocal facts
        sizes = yield from measure.graphs(driver)
        facts = measure.Facts([], measure.Interval(1.0, 1, 1), {"backward": 0.9}, None, {}, graphs=sizes)

    with Instrument() as watched, contextlib.suppress(Finished):
        driver = Driver(watched, plan)
        driver.install()
        state = torch.ones(3)
        optimizer = torch.optim.SGD([w], lr=0.0)
        for i in range(20):
            last, state = state, (state if carry == "all" else i) + w
            (state + (last if carry == "one" else 1.0)).sum().backward(retain_graph=True)
            optimizer.step()
            state = state.detach() if carry == "none" else state
    found = loop.growth(facts, None)
    assert isinstance(found, Finding) == (carry == "all"), found
    if carry == "all":
        total, old = facts.graphs[-1]
        assert total - old == 3 and found.gain == 0.9 * old / total


def test_what_comes_out_the_same_in_every_step_is_found():
    samples, model, noise = torch.rand(50, 8), nn.Linear(8, 2), torch.zeros(8)
    outside, hidden = torch.zeros(8), torch.zeros(8)
    optimizer, numbered = torch.optim.SGD(model.parameters(), lr=0.1), Constants()
    for i in range(3):
        with numbered:
            mean = samples.mean(0)
            scale = (mean * mean).sum().sqrt()
            table = torch.zeros(16, 8)
            table[:8].copy_(samples[:8])
            half = table.sum(0)
            batch = samples[torch.randint(50, (16,))]
            rows = table[8:]
            torch.add(rows, batch[:8], out=rows)
            whole = table.sum(0)
            noise.normal_()
            noisy = noise.abs()
            written = outside.abs()
            hidden.data.add_(1)
            uncounted = hidden.abs()
            row = samples[i].abs()
            model((batch - mean) / scale + half + whole + noisy + written + uncounted + row).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        outside.add_(1)
        code = Path(__file__).read_text().splitlines()
        found = {code[site.line - 1].strip().partition(" = ")[0] for site in numbered.seconds}
        if i:
            assert found == {"mean", "scale", "half", "rows", "table[:8].copy_(samples[:8])"}
        numbered.next_step()


def test_what_is_computed_anew_is_the_cause_and_not_the_code_around_it():
    line = Site("train.py", 7)
    facts = measure.Facts([a_step({"rest": 1.0}, True)], measure.Interval(1.0, 1, 1), {"rest": 0.8}, None, {})
    facts.lines, facts.constants = [("rest", line, 0.8)], [(line, 0.7)]
    driver = types.SimpleNamespace(instrument=types.SimpleNamespace(optimizers=[object()], by_hand=[]))
    findings = [loop.own_code(facts, driver), loop.constants(facts, driver)]
    assert [finding.rule for finding in ranked(findings)] == ["recomputed", "own_code"]
    facts.constants = [(line, 0.05)]
    assert isinstance(loop.constants(facts, driver), str)


def test_what_is_made_on_the_host_is_told_by_its_line():
    numbers, made, first = torch.rand(4), HostTensors(), sys._getframe().f_lineno + 1
    with made:
        torch.tensor([1.0, 2.0])
        torch.as_tensor(data=[1, 2])
        torch.tensor(numbers.numpy())
        torch.zeros(3).to("meta")
        torch.rand(3).to(device="meta", dtype=torch.float64)
        # From here on nothing is lost.
        torch.as_tensor(numbers.numpy())
        torch.tensor(1.0)
        torch.zeros(3).to(torch.float64)
        torch.zeros(3, device="meta").to("meta")
        (torch.zeros(3) + 1).to("meta")
        default_collate([(1, 2.0), (3, 4.0)])  # torch's own lines
    found = {(site.line - first, kind) for site, kind in made.seconds}
    assert found == {(1, NUMBERS), (2, NUMBERS), (3, COPIED), (4, MOVED), (5, MOVED)}
    assert {site.file for site, _ in made.seconds} == {__file__} and min(made.seconds.values()) > 0


def test_tensors_made_on_the_host_are_the_cause_and_not_the_code_around_them():
    line, other = Site("train.py", 7), Site("train.py", 8)
    facts = measure.Facts([a_step({"rest": 1.0}, True)], measure.Interval(1.0, 1, 1), {"rest": 0.75}, None, {})
    facts.lines = [("rest", line, 0.75), ("forward", other, 0.01)]
    facts.made = [(line, NUMBERS, 0.5), (other, COPIED, 0.01)]
    driver = types.SimpleNamespace(instrument=types.SimpleNamespace(optimizers=[object()], by_hand=[]))
    found, around = loop.host_tensors(facts, driver), loop.own_code(facts, driver)
    assert (found.gain, found.lines, around.gain) == (0.5, ((line, 0.5),), 0.25)
    assert "Python numbers" in found.cause and "copies" not in found.cause and found.advice == loop.HOST_ADVICE[NUMBERS]
    facts.lines[0] = ("rest", Site("train.py", 9), 0.75)  # no sample saw the line
    assert loop.own_code(facts, driver).gain == 0.25
    facts.made[0] = (line, COPIED, 0.7)
    assert "tensors are made there on the host: 70.0%" in loop.own_code(facts, driver)
    assert "torch.as_tensor" in loop.host_tensors(facts, driver).advice
    facts.made = [(other, COPIED, 0.01)]
    assert loop.host_tensors(facts, driver) == "lines that make tensors on the host take 1.0% of a step"
    facts.made = None
    assert loop.own_code(facts, driver).gain == 0.75
    assert loop.host_tensors(facts, driver) == "not measured: torch.compile is in use"


def test_copies_of_what_the_step_makes_itself_are_no_matter_of_the_loader(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    watched = types.SimpleNamespace(copies={"count": 4, "pageable": 4, "blocking": 4, "bytes": 4})
    driver, line = types.SimpleNamespace(instrument=watched, loader=None), Site("train.py", 7)
    facts = measure.Facts([], measure.Interval(1.0, 1, 1), {"copy": 0.5}, None, {}, made=[(line, MOVED, 0.25)])
    assert loading.copies(facts, driver).gain == 0.25
    found = loop.host_tensors(facts, driver)
    assert found.lines == ((line, 0.25),) and "device=" in found.advice
    facts.parts["copy"] = 0.25
    assert loading.copies(facts, driver).endswith("; 25% of the step are copies of what it makes itself")


def test_the_gpus_that_a_script_uses_need_not_be_the_current_one(monkeypatch):
    memory, waited = [0, 5, 7], []
    told = {"is_initialized": True, "device_count": 3, "current_device": 0}
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda gpu=0: memory[gpu])
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    machine.settle()
    assert waited == [1, 2] and growth._taken() == 12 and measure._device() == torch.device("cuda", 1)
    memory[:] = [0, 0, 0]
    assert machine.gpus() == [0]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert machine.gpus() == [] and measure._device() == torch.device("cpu")


KEEPS = """
import collections, torch
torch.manual_seed(0)
model = torch.nn.Linear(64, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.rand(256, 64), 8)

class Log:
    def __init__(self):
        self.kept = {"outputs": []}

def fit(log):
    kept, total, ring = [], 0.0, collections.deque(maxlen=10_000)
    for epoch in range(1000):
        recent, sums = [], 0.0
        for batch in data:
            outputs = model(batch)
            loss = outputs.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            KEEP

fit(Log())
"""


@pytest.mark.parametrize(
    ("line", "path", "kind", "size", "emptied"),
    [
        ("kept.append(outputs.detach())", "kept", "a list of tensors", 1024, False),
        (
            "log.kept['outputs'].append(outputs.detach().numpy())",
            "log.kept['outputs']",
            "a list of ndarrays",
            1024,
            False,
        ),
        ("kept.append(loss)", "kept", "a list of tensors with their graphs", 0, False),
        ("total = total + loss", "total", "a tensor with the graphs of all steps", 0, False),
        ("recent.append(outputs.detach())", "recent", "a list of tensors", 1024, True),
        ("sums = sums + loss", "sums", "a tensor with the graphs of all steps", 0, True),
        ("ring.append(outputs.detach())", "ring", "a deque of tensors", 1024, False),
        ("recent = [outputs.detach()]", None, None, None, None),
    ],
)
def test_what_grows_from_step_to_step_is_found_by_its_name(tmp_path, line, path, kind, size, emptied, monkeypatch):
    train, found = tmp_path / "train.py", None
    train.write_text(KEEPS.replace("KEEP", line))
    own = str(train)  # and not this file, which runs it and has such lines too
    monkeypatch.setattr(growth, "is_users", lambda file: file == own)

    def plan(driver):
        nonlocal found
        yield Run(4, collect=2**20, parts=True)
        driver.instrument.settle()
        found = yield from measure.growth(driver, measure.Sizes(0.01, 1))

    with Instrument() as watched, contextlib.suppress(Finished):
        driver = Driver(watched, plan)
        driver.install()
        runpy.run_path(str(train), run_name="__main__")
    if path is None:
        assert not found.held and not found.graph
        return
    (held,) = found.held
    assert (held.path, held.kind, held.emptied) == (path, kind, emptied)
    assert 9000 * size < held.most < 20_000 * size if path == "ring" else held.most == math.inf
    assert held.size >= size and (not size or held.size < 2 * size)
    assert (found.graph >= 1) == ("graph" in kind) and found.size > 0
    added = [site.line for site in held.lines]
    assert [train.read_text().splitlines()[i - 1].strip() for i in added] == [line]


def test_of_memory_that_cannot_be_looked_at_nothing_is_said():
    class Odd:
        def __repr__(self):
            raise RuntimeError("it has no name")

    odd = {Odd(): [0]}  # a variable of a running function
    watch, grows = growth.Watch(), []
    for _ in range(3):
        grows.append(0)
        watch.look()
    assert watch.found(1) is None and len(odd) == 1
    facts = types.SimpleNamespace(growth=None, step=types.SimpleNamespace(value=1.0))
    assert loop.memory(facts, None).startswith("not known")


@pytest.mark.parametrize("once", [200_000, 0])
def test_memory_that_no_object_holds_is_seen(once):
    libc, found = ctypes.CDLL(None), None
    libc.malloc.restype = ctypes.c_void_p

    def plan(driver):
        nonlocal found
        yield Run(4, collect=2**20, parts=True)
        driver.instrument.settle()
        found = yield from measure.growth(driver, measure.Sizes(0.01, 1))

    w = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    with Instrument() as watched, contextlib.suppress(Finished):
        driver = Driver(watched, plan)
        driver.install()
        while True:
            w.sum().backward()
            optimizer.step()
            if once:
                ctypes.memset(libc.malloc(once), 1, once)
    within = mmap.PAGESIZE if once else 1  # of a page in every step: the kernel counts in pages
    assert not found.held and abs(found.size - once) < within, found


@pytest.mark.parametrize(
    ("size", "emptied", "most", "named"),
    [
        (1e6, False, math.inf, True),  # a thousand steps
        (1e6, True, math.inf, False),  # a pass is 20 of them
        (1e8, True, math.inf, True),  # which the memory is too small for
        (1e2, False, math.inf, False),  # enough for months
        (1e6, False, 1e8, False),  # it has a length
        (1e6, False, 9e8, True),  # which the memory is too small for
    ],
)
def test_memory_that_grows_is_the_cause_where_it_does_not_last(size, emptied, most, named):
    held = growth.Growing("kept", "a list of tensors", 1.0, size, emptied, (Site("a.py", 3),), most)
    facts = measure.Facts([], measure.Interval(1.0, 1, 1), {}, None, {})
    facts.growth, driver = growth.Growth(size, 0.0, 10**9, (held,)), types.SimpleNamespace(loader=[None] * 20)
    found = loop.memory(facts, driver)
    assert isinstance(found, Finding) == named, found
    if named:
        slow = Finding("own_code", "", "", 0.9)
        assert ranked([slow, found])[0] is found and found.lines == ((Site("a.py", 3), 0.0),)
        assert "kept is a list of tensors, 1 more per step (a.py:3)" in found.evidence


def test_a_frozen_teacher_and_a_loss_are_of_the_forward_pass():
    teacher, student, found = nn.Linear(8, 2), nn.Linear(8, 2), []
    teacher.register_forward_hook(lambda *_: time.sleep(0.02))  # less what other processes took, which is estimated

    def plan(driver):
        yield Run(3, parts=True)
        driver.instrument.settle()
        found.extend((yield Run(3, parts=True)))

    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    with Instrument() as watched, contextlib.suppress(Finished):
        driver = Driver(watched, plan)
        driver.install()
        while True:
            with torch.no_grad():
                target = teacher(torch.ones(4, 8))
            (student(torch.ones(4, 8)) - target).square().sum().backward()
            optimizer.step()
    assert all(step.parts["forward"] > 0.01 for step in found)
    file = nn.functional.__file__
    assert instrument.running([(file, 1, "cross_entropy"), ("train.py", 9, "<module>")], {}) == "loss"
    backward = places.place(torch.Tensor.backward.__code__)
    assert instrument.running([("train.py", 2, "step"), (eval_frame.__file__, 1, "compile_wrapper")], {}) == "loss"
    stack = [(file, 1, "relu"), (backward[0], 1, backward[1]), ("train.py", 9, "<module>")]
    assert instrument.running(stack, {}) == "backward"


def test_looking_for_lines_keeps_nothing_of_the_training_alive():
    class Guard:
        def __del__(self):
            ended.add(threading.get_ident())

    def work():
        guard = Guard()  # noqa: F841 (until the function ends)
        return sum(range(300))

    ended, driver = set(), types.SimpleNamespace(stepping=True, instrument=Instrument())
    with sampling.Sampler(driver) as sampler:
        start = time.perf_counter()
        while time.perf_counter() - start < 0.5:
            work()
    assert ended == {threading.get_ident()}
    assert {site.file for _, site, _ in sampler.lines()} == {__file__}
    assert sum(share for *_, share in sampler.lines()) == pytest.approx(1.0)


class Recurrent(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state = torch.zeros(x.shape[0], 4)
        for position in range(x.shape[1]):
            state = self.cell(x[:, position], state)
        return state


class Cell(nn.Module):
    def forward(self, x, state):
        return torch.tanh(x + state)


def test_a_line_that_a_module_carries_out_again_and_again_is_a_loop():
    model, others = Recurrent(Cell()), [Cell() for _ in range(30)]
    with sampling.LineCounter() as counter:
        model(torch.rand(2, 20, 4))
        for cell in others:
            cell(torch.rand(4), torch.rand(4))
        total = 0
        for i in range(18):
            total += i
    code = Path(__file__).read_text().splitlines()
    assert sys._getframe().f_trace is None
    repeats = {code[site.line - 1].strip(): count for site, count in counter.repeats().items()}
    assert repeats["total += i"] == 18  # of a function that was running before
    assert repeats["state = self.cell(x[:, position], state)"] == 20
    assert repeats["return torch.tanh(x + state)"] == 20  # and not 50: each of the others does it once
    assert repeats["state = torch.zeros(x.shape[0], 4)"] == 1


def test_a_model_that_loops_in_python_is_told_from_a_small_batch():
    loop, layer = Site("model.py", 1), Site("model.py", 2)
    parts = {"forward": 0.4, "backward": 0.4, "loader": 0.0}
    facts = measure.Facts([], measure.Interval(1.0, 1, 1), parts, None, {}, calls=1024, call_cost=2**-11)
    facts.lines = [("forward", loop, 0.375), ("forward", layer, 0.125), ("backward", Site("train.py", 9), 0.4)]
    facts.repeats = {loop: 200, layer: 1}
    finding = computing.python_loop(facts, None)
    assert finding.gain == 0.75 * 0.5 and finding.lines == ((loop, 0.375),)
    small = Finding("batch_size", "", "", 0.6)
    assert [f.rule for f in ranked([small, finding])] == ["python_loop", "batch_size"]
    facts.calls = 100  # large ones
    assert isinstance(computing.python_loop(facts, None), str)
    facts.repeats = {}
    assert "no line of the model" in computing.python_loop(facts, None)
    assert 0 < measure.call_cost() < 1e-3


def test_a_layout_that_a_model_loses_is_told_from_one_that_it_keeps():
    class Loses(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x).contiguous())

    last, x = torch.channels_last, torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last)
    layers = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
    facts = measure.Facts([], measure.Interval(1.0, 1, 1), {"forward": 0.4, "backward": 0.4}, None, {})
    facts.operations, facts.candidates = [("aten::copy_", 0.5, 60)], {"layout": computing.LAST}
    rule = next(rule for rule in rules.RULES if rule.name == "layout")
    for model, names in ((Loses(*layers), ["1"]), (nn.Sequential(*layers), [])):
        model.to(memory_format=last)
        driver = types.SimpleNamespace(instrument=types.SimpleNamespace(roots=[model]))
        with measure.contiguous_inputs(driver) as facts.contiguous:
            model(x)
            model(x)
        model(x.contiguous())
        assert facts.contiguous == names
        found = rule.look(facts, None)
        assert found.gain == 0.4 if names else found == computing.LAST
    facts.contiguous, facts.operations = ["1"], [("aten::copy_", 0.02, 60)]
    assert rule.look(facts, None) == computing.LAST
    compiled = torch.compile(layers[0], backend="eager")
    assert measure.compiled(nn.Sequential(compiled)) and not measure.compiled(nn.Sequential(*layers))


@pytest.mark.parametrize(("pace", "lost"), [(1.5, 0.75), (9.0, 0.25), (15.0, 0.125)])
def test_what_restarts_take_is_what_the_same_workers_do_not_when_they_stay(pace, lost):
    steps = [Step(0.0, 12.0, {"loader": 7.0 if i % 4 == 0 else 1.0}, restart=i % 4 == 0) for i in range(16)]
    facts = measure.Facts(steps, measure.Interval(12.0, 12.0, 12.0), {}, types.SimpleNamespace(num_workers=2), {})
    facts.cached, facts.waiting = 3.0, measure.Interval(0.75, 0.75, 0.75)
    facts.rates = {0: measure.LoaderRate(0, 1.0, 0.0), 2: measure.LoaderRate(2, pace, None)}
    assert loading.lost_to_restarts(facts) == lost
    facts.rates = {}
    assert loading.lost_to_restarts(facts) == 0.125


def test_groups_of_accumulated_gradients_are_compared_and_not_steps():
    seconds = [1.0, 1.0, 1.0, 5.0] * 2  # the optimizer steps in every fourth
    records = [Step(0.0, s, {"rest": s}) for s in seconds]
    driver = types.SimpleNamespace(loader=object(), alone=lambda arm: True)
    plan = measure.block(driver, measure.Sizes(1.0, 4), Arm((), batches.CachedSource([])), wall=False)
    assert next(plan).steps == 4
    with pytest.raises(StopIteration) as done:
        plan.send(records)
    assert done.value.value == 2.0


def test_torch_is_as_before_afterwards():
    owners = (torch.Tensor, torch.autograd, torch.optim.Optimizer, nn.Module, DataLoader, torch.autocast, torch)
    before = [dict(vars(owner)) for owner in owners]

    def plan(driver):
        yield Run(3)

    run(plan)
    assert [dict(vars(owner)) for owner in owners] == before


def test_layers_that_also_cure_the_layout_come_after_it():
    def names(**gains):
        return [f.rule for f in ranked([Finding(name, "", "", gain) for name, gain in gains.items()])]

    assert names(fuse=0.8, layout=0.4, loader=0.5) == ["loader", "layout", "fuse"]
    assert names(loader=0.1, layout=0.07, fuse=0.3) == ["fuse", "loader", "layout"]


def test_what_a_cause_takes_because_of_another_one_does_not_put_it_first():
    waits = Finding("loader", "", "", 0.5, lost=0.55, shared=("loader_restart", 0.35))
    for restarts, first in ((0.35, "loader_restart"), (0.1, "loader")):
        waits = dataclasses.replace(waits, shared=("loader_restart", restarts))
        assert ranked([waits, Finding("loader_restart", "", "", restarts)])[0].rule == first
    other = Finding("optimizer", "", "", 0.3)
    assert [f.rule for f in ranked([waits, other])] == ["loader", "optimizer"]


@pytest.mark.parametrize(
    ("workers", "pace", "left"),
    [
        (0, None, 7.0),  # taken from a step of 10, as the two take turns
        (4, 1.0, 5.0),  # computing took 8 of 10, as workers took cores away
        (4, 6.5, 6.5),  # the workers do not deliver faster
        (4, 12.0, 10.0),  # measured in a bad moment: no gain, and no loss
        (4, None, 7.0),  # unknown, but little waits for the workers now
    ],
)
def test_what_computing_may_gain_ends_where_the_workers_cannot_follow(workers, pace, left):
    facts = measure.Facts([], measure.Interval(10.0, 9, 11), {}, types.SimpleNamespace(num_workers=workers), {})
    facts.cached, facts.cpu_cached = (8.0 if pace else 9.5), 8.0
    facts.rates = {} if pace is None else {0: measure.LoaderRate(0, 4.0, 0.1), 4: measure.LoaderRate(4, pace, None)}
    gain = gain_of_computing(facts, 3.0)
    assert gain == min(0.3, (10 - left) / 10)


def test_workers_that_compute_cost_what_handing_batches_over_takes(monkeypatch):
    monkeypatch.setattr(predictions, "cores", lambda: 1)
    facts = measure.Facts([], measure.Interval(4.5, 4, 5), {}, None, {}, cached=3.0, cpu_cached=3.0)
    facts.rates = {0: measure.LoaderRate(0, 0.4, 0.4), 1: measure.LoaderRate(1, 1.6, None)}
    assert gain_of_loading(facts, 1) < 0  # and not the 25 % that are left of 3.4 s
    facts.rates[0] = measure.LoaderRate(0, 1.5, 0.4)  # what waits takes no core
    assert gain_of_loading(facts, 1) == 1 - 3.4 / 4.5


class Rows(Dataset):
    """Takes a list of indices, too, but gives something else for it."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((2,), float(torch.tensor(index).sum()))


@pytest.mark.parametrize(
    ("dataset", "options", "why"),
    [
        (TensorDataset(torch.rand(8, 2), torch.arange(8)), {}, None),
        (torch.utils.data.Subset(TensorDataset(torch.rand(8, 2)), [5, 2, 3, 7, 1]), {}, None),
        (torch.arange(8), {}, None),
        (TensorDataset(torch.rand(8, 2)), {"collate_fn": lambda samples: samples[0]}, "a collate_fn of its own"),
        (TensorDataset(torch.rand(8, 2)), {"batch_size": None}, "whole batches already"),
        ([(torch.rand(2), i) for i in range(8)], {}, "takes no list of indices: TypeError"),
        (Rows(), {}, "something else for a list"),
    ],
)
def test_samples_are_taken_at_once_where_that_gives_the_same_batch(dataset, options, why):
    loader = DataLoader(dataset, **{"batch_size": 3, "shuffle": True} | options)
    reason = remedies.WholeBatches.why_not(loader)
    assert reason is None if why is None else why in reason
    if why is None:
        orders = []
        for other in (loader, remedies.WholeBatches.make(loader)):
            torch.manual_seed(1)
            orders.append([tensor.tolist() for batch in other for tensor in tree_leaves(batch)])
        assert orders[0] == orders[1]


@pytest.mark.parametrize(
    ("code", "after"),
    [
        (
            "DataLoader(data, 64, shuffle=True, pin_memory=True)",
            "DataLoader(data, sampler=BatchSampler(RandomSampler(data), 64, False), batch_size=None, pin_memory=True)",
        ),
        (
            "u.DataLoader(dataset=data, batch_size=n, drop_last=True)",
            "u.DataLoader(data, sampler=BatchSampler(SequentialSampler(data), n, True), batch_size=None)",
        ),
        (
            "DataLoader(data, batch_size=8, sampler=mine)",
            "DataLoader(data, sampler=BatchSampler(mine, 8, False), batch_size=None)",
        ),
        ("DataLoader(data, batch_sampler=mine)", "DataLoader(data, sampler=mine, batch_size=None)"),
        (
            "DataLoader(data, 8, shuffle=True, sampler=None, generator=g)",
            "DataLoader(data, sampler=BatchSampler(RandomSampler(data, generator=g), 8, False),"
            " batch_size=None, generator=g)",
        ),
        ("DataLoader(data, 8, shuffle=flag)", None),
        ("DataLoader(data, 8, True, generator=Generator().manual_seed(0))", None),
        ("DataLoader(Data(), 8)", None),
        ("DataLoader(data, **options)", None),
        ("DataLoader(*both)", None),
    ],
)
def test_a_loader_of_whole_batches_is_shown(tmp_path, code, after):
    path = tmp_path / "train.py"
    path.write_text(f"loader = {code}\n")
    change = lines.edit_loader(Site(str(path), 1))
    assert (change and change.after) == after


@pytest.mark.parametrize("options", ["", ", generator=g", ", generator=g, drop_last=True", ", sampler=None"])
def test_a_loader_of_whole_batches_keeps_the_order(tmp_path, options):
    code, orders = f"DataLoader(data, 5, shuffle=True{options})", []
    (tmp_path / "train.py").write_text(code)
    change = lines.edit_loader(Site(str(tmp_path / "train.py"), 1))
    for text in (code, change.after):
        torch.manual_seed(1)
        g = torch.Generator().manual_seed(2)
        loader = eval(text, vars(torch.utils.data) | {"data": TensorDataset(torch.arange(12)), "g": g})
        orders.append([[samples.tolist() for (samples,) in loader] for _ in range(2)])
    assert orders[0] == orders[1]


def test_loading_that_nothing_helps_is_the_bottleneck_only_where_it_is_much(monkeypatch):
    monkeypatch.setattr(predictions, "cores", lambda: 1)
    loader = DataLoader(TensorDataset(torch.rand(8, 2)), 2)
    driver = types.SimpleNamespace(loader=loader, instrument=types.SimpleNamespace(sites={}))
    diagnosis = Diagnosis()
    for waited, whole, named, remedy in (
        (0.15, None, False, None),
        (0.4, None, True, None),
        (0.15, 0.03, True, "whole batches"),
        (0.15, 0.14, False, None),  # nothing to gain
    ):
        facts = measure.Facts([], measure.Interval(1.0, 1, 1), {"loader": waited}, loader, {})
        facts.cached = facts.cpu_cached = 1 - waited
        facts.waiting = measure.Interval(waited, waited, waited)
        facts.rates = {0: measure.LoaderRate(0, waited, waited), 1: measure.LoaderRate(1, 0.8, None)}
        facts.whole_batches = whole and measure.LoaderRate(0, whole, whole)
        diagnosis.findings = [loading.loader(facts, driver)]
        assert (diagnosis.bottleneck is not None) == named
        assert [r.name for r in diagnosis.findings[0].remedies] == ([remedy] if remedy else [])
        if remedy:
            assert diagnosis.findings[0].gain == 0.12


@pytest.mark.parametrize(("cost", "option", "named"), [(0.2, False, True), (0.2, True, False), (0.09, False, False)])
def test_what_costs_little_or_is_a_choice_is_no_bottleneck(cost, option, named):
    diagnosis = Diagnosis()
    diagnosis.findings = [Finding("loader", "", "", cost, option=option)]
    assert (diagnosis.bottleneck is not None) == named


def test_what_computing_may_gain_is_shared_out_over_the_cores(monkeypatch):
    monkeypatch.setattr(predictions, "cores", lambda: 2)
    facts = measure.Facts([], measure.Interval(10.0, 9, 11), {}, types.SimpleNamespace(num_workers=4), {})
    facts.cached, facts.cpu_cached = 5.0, 5.0
    facts.rates = {0: measure.LoaderRate(0, 15.0, 15.0), 4: measure.LoaderRate(4, 7.5, None)}
    assert gain_of_computing(facts, 3.0) == 0.15  # 17 seconds of work are left for two cores


def test_computing_on_many_threads_takes_less_of_the_cores_when_it_is_faster(monkeypatch):
    monkeypatch.setattr(predictions, "cores", lambda: 8)
    facts = measure.Facts([], measure.Interval(5.2, 5, 6), {}, types.SimpleNamespace(num_workers=4), {})
    facts.cached, facts.cpu_cached = 5.0, 38.0
    facts.rates = {0: measure.LoaderRate(0, 1.0, 1.0), 4: measure.LoaderRate(4, 0.5, None)}
    assert gain_of_computing(facts, 2.0) == 2.0 / 5.2  # 3 of 5 seconds are left, on all threads


@pytest.mark.parametrize(
    ("before", "after", "noise", "named"),
    [
        ((4.0, 4.4), (4.8, 5.2), 0.1, True),
        ((4.0, 4.4), (4.8, 5.2), 0.75, False),
        ((4.0, 9.0), (15.0, 12.0), 0.1, False),  # the first pair says that a larger batch saves little
    ],
)
def test_a_small_batch_is_named_where_no_noise_explains_it(before, after, noise, named):
    look = next(rule.look for rule in rules.RULES if rule.name == "batch_size")
    parts = dict.fromkeys(PARTS, 0.0) | {"forward": 2.0, "backward": 2.0}
    facts = measure.Facts([], measure.Interval(4.0, 3.9, 4.1), parts, None, {}, cached_noise=noise)
    facts.larger = 4, measure.Paired(before, after)
    found = look(facts, None)
    assert isinstance(found, str) != named
    assert not named or found.gain == 1 - max(a / 4 / b for a, b in zip(after, before))
    facts.larger = 4, measure.Paired((0.0, 4.0), after)
    assert look(facts, None).startswith("not measured: ")


# --- rules for GPUs, on profiles made by hand -------------------------------------------------------------------------


def event(name, start, end, device=DeviceType.CUDA, annotation=False):
    return FunctionEvent(0, name, 1, start, end, device_type=device, is_user_annotation=annotation)


def test_the_device_works_where_any_of_its_streams_does():
    launch = event("aten::mm", 0, 100, DeviceType.CPU)
    launch.append_kernel("gemm", 0, 30)  # the profiler books the kernel here too
    events = [launch, event("gemm", 50, 80), event("copy", 70, 90), event("step", 0, 1000, annotation=True)]
    assert measure.device_work([*events, event("norm", 100, 110)]) == (3, 1e-6 * 50)
    assert measure.device_work([launch]) == (0, 0.0)


def gpu_facts(busy, **parts):
    parts = dict.fromkeys(PARTS, 0.0) | parts
    step = measure.Interval(sum(parts.values()), 0, 1)
    facts = measure.Facts([], step, parts, None, {}, device_busy=busy, launches=(400, busy * step.value))
    return facts


def test_a_device_that_idles_waits_for_what_holds_the_cpu_up():
    look = next(rule.look for rule in rules.RULES if rule.name == "launches")
    found = look(gpu_facts(0.25, forward=2.0, backward=2.0), None)
    assert found.gain == 0.75 and "400 kernels" in found.evidence and "CUDA graph" in found.advice
    assert look(gpu_facts(0.25, forward=1.0, rest=2.0, sync=1.0), None).startswith(
        "with cached batches the device works"
    )
    assert look(gpu_facts(0.95, forward=4.0), None).startswith("with cached batches the device works 95%")
    others = [found, Finding("optimizer", "", "", 0.3), Finding("syncs", "", "", 0.1)]
    assert [f.rule for f in ranked(others)] == ["optimizer", "launches", "syncs"]


@pytest.mark.parametrize(
    ("capability", "matmul", "cudnn", "calls"),
    [
        ("9.0", False, True, 'torch.set_float32_matmul_precision("high")'),
        ("8.0", True, False, "torch.backends.cudnn.allow_tf32 = True"),
        (
            *("12.0", False, False),
            'torch.set_float32_matmul_precision("high") and torch.backends.cudnn.allow_tf32 = True',
        ),
        ("8.6", True, True, None),
        ("7.5", False, False, None),
    ],
)
def test_float32_products_without_tf32_are_an_option_where_the_gpu_has_it(capability, matmul, cudnn, calls):
    found = computing.without_tf32({"capability": capability, "tf32_matmul": matmul, "tf32_cudnn": cudnn})
    assert isinstance(found, Finding) == (calls is not None), found
    if calls is not None:
        assert found.advice == calls and found.option and not found.cost
        assert ("matrix products" in found.cause, "convolutions" in found.cause) == (not matmul, not cudnn)


def test_what_tf32_advice_says_sets_what_it_names(request):
    flags = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    request.addfinalizer(functools.partial(torch.set_float32_matmul_precision, flags[0]))
    request.addfinalizer(functools.partial(setattr, torch.backends.cudnn, "allow_tf32", flags[1]))
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    assert "tf32" not in (matmul.fp32_precision, conv.fp32_precision)
    for _, call in computing.TF32.values():
        exec(call, {"torch": torch})
    assert (matmul.fp32_precision, conv.fp32_precision) == ("tf32", "tf32")


@pytest.mark.parametrize(
    ("args", "kwargs", "given", "forced"),
    [
        (("cuda",), {}, False, (("cuda",), {"non_blocking": True})),
        (("cuda", torch.float32), {"non_blocking": True}, True, None),
        (("cuda", torch.float32, False, True), {}, False, (("cuda", torch.float32, True, True), {})),
        ((0, True), {}, True, None),
    ],
)
def test_copies_that_do_not_wait_are_told_from_those_that_do(args, kwargs, given, forced):
    assert instrument.non_blocking(args, kwargs) is given
    assert forced is None or instrument.with_non_blocking(args, kwargs) == forced


class OnDevice(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True


def test_what_waits_for_the_device_is_counted_where_the_loop_asks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    value = torch.tensor([1.5]).as_subclass(OnDevice)
    with Instrument() as watched:
        watched.step = Step(0.0)
        float(value), value.item(), value.to("cpu"), value.to("cpu", non_blocking=True), bool(value)
        watched.step = None
    assert {what for _, what in watched.reads} == {"cuda __float__", "cuda item", "cuda to", "cuda __bool__"}
    assert {Path(site.file).name for site, _ in watched.reads} == {Path(__file__).name}


def test_without_a_gpu_reading_a_number_costs_what_it_costs_anyway(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    reads = [getattr(torch.Tensor, name) for name in instrument.READS]
    with Instrument():
        assert reads == [getattr(torch.Tensor, name) for name in instrument.READS]


def test_a_script_that_is_watched_may_still_say_which_gpus_it_sees(monkeypatch):
    if not torch.cuda.is_initialized():
        monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
        monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 1)
        initialised = []
        monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: initialised.append(1) or 1, raising=False)
        with Instrument() as watched:
            assert watched.attached and not initialised

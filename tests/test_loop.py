"""The loop on one process and on two: accumulation, precision, schedules, averages, resume."""

import collections
import contextlib
import copy
import dataclasses
import io
import json
import math
import os
import shutil
import signal
import sys
import time
import typing
import warnings
from types import SimpleNamespace

import harness
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

from fusedtrain import data as fdata
from fusedtrain import optim
from fusedtrain.train import (
    Accumulation,
    ActivationCheckpointing,
    Batches,
    Callback,
    Checkpoint,
    Distributed,
    EarlyStopping,
    EpochSampler,
    InputError,
    Logging,
    NonFiniteError,
    Precision,
    Profile,
    Schedule,
    TrainConfig,
    Trainer,
    saving,
)
from fusedtrain.train import precision as train_precision
from fusedtrain.train.cudnn import SIZES
from fusedtrain.train.feed import Feed
from fusedtrain.train.groups import parameter_groups
from fusedtrain.train.meter import Late
from fusedtrain.train.preemption import Preempted
from fusedtrain.train.profile import Spans
from fusedtrain.train.progress import Progress
from fusedtrain.train.saving import Saving
from fusedtrain.train.schedule import join, load
from fusedtrain.train.weights import read_weights


def net(seed: int = 0, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 4))


def samples(count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 4, 4, generator=generator), torch.randint(4, (count,), generator=generator)


def data(count: int = 24, batch_size: int = 8, shuffle: bool = False) -> Batches:
    return Batches(*samples(count), batch_size, shuffle=shuffle)


def make(model: nn.Module, optimizer=None, cls=Trainer, **config) -> Trainer:
    options = {key: config.pop(key) for key in ("callbacks", "loggers", "scheduler") if key in config}
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    defaults = {"epochs": 1, "device": "cpu", "schedule": Schedule("constant", warmup_epochs=0)}
    return cls(model, nn.CrossEntropyLoss(), optimizer, TrainConfig(**defaults | config), **options)


class Gradients(Callback):
    """Keeps the gradients of every update, as the optimizer sees them."""

    def __init__(self, optimizer):
        self.steps = []
        optimizer.register_step_pre_hook(self._keep)

    def _keep(self, optimizer, args, kwargs):
        self.steps.append([p.grad.clone() for group in optimizer.param_groups for p in group["params"]])


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# --- accumulation -----------------------------------------------------------------------------------------------------


class Lists:
    """Batches of any sizes."""

    def __init__(self, sizes):
        self.sizes, self.all = sizes, samples(sum(sizes))

    def __len__(self):
        return len(self.sizes)

    def __iter__(self):
        yield from zip(*(t.split(self.sizes) for t in self.all))


@pytest.mark.parametrize("sizes", [[4, 4, 2], [4, 4, 4, 4], [1, 7, 3, 5, 2], [5]])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_accumulated_gradients_are_those_of_the_union_also_of_short_groups_and_unequal_batches(sizes, accumulate):
    feed = Lists(sizes)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the weights stay: every group starts from the same
    seen = Gradients(optimizer)
    make(model, optimizer, accumulation=accumulate).fit(feed)
    groups = [list(feed)[i : i + accumulate] for i in range(0, len(sizes), accumulate)]
    assert len(seen.steps) == len(groups)
    for got, group in zip(seen.steps, groups):
        inputs, targets = (torch.cat(part) for part in zip(*group))

        def union(dtype, inputs=inputs, targets=targets):
            reference = copy.deepcopy(model).to(dtype)
            nn.functional.cross_entropy(reference(inputs.to(dtype)), targets).backward()
            return torch.cat([p.grad.flatten() for p in reference.parameters()])

        ours, truth = torch.cat([g.flatten() for g in got]), union(torch.float64)
        harness.assert_as_good_as_torch(ours, union(torch.float32), truth, f"gradients of {len(inputs)} samples")


def test_one_process_without_accumulation_is_bitwise_a_plain_loop():
    feed, plain, model = Lists([8, 8, 3]), net(), net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for inputs, targets in feed:
        nn.functional.cross_entropy(plain(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    make(model, torch.optim.AdamW(model.parameters(), lr=0.01)).fit(feed)
    assert torch.equal(weights(model), weights(plain))


def test_weights_of_another_kind_normalise_too():
    class Tokens(Trainer):
        def training_step(self, batch):
            inputs, targets = batch
            return nn.functional.cross_entropy(self.forward(inputs), targets, ignore_index=-1)

        def weight(self, batch):
            return int((batch[1] >= 0).sum())

    inputs, targets = samples(12)
    targets[[0, 1, 2, 9]] = -1
    feed = list(zip(inputs.split(4), targets.split(4)))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = Gradients(optimizer)
    config = TrainConfig(epochs=1, device="cpu", accumulation=3, schedule=Schedule("constant", warmup_epochs=0))
    Tokens(model, nn.CrossEntropyLoss(ignore_index=-1), optimizer, config).fit(feed)

    def union(dtype):
        reference = copy.deepcopy(model).to(dtype)
        nn.functional.cross_entropy(reference(inputs.to(dtype)), targets, ignore_index=-1).backward()
        return torch.cat([p.grad.flatten() for p in reference.parameters()])

    ours = torch.cat([g.flatten() for g in seen.steps[0]])
    harness.assert_as_good_as_torch(ours, union(torch.float32), union(torch.float64), "gradients")


# --- precision and what is not finite ---------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("multiplied", [True, False])
def test_half_precision_on_a_cpu_without_instructions_for_it_is_warned_of(precision, multiplied, monkeypatch):
    monkeypatch.setattr(train_precision, "cpu_multiplies", lambda dtype: multiplied)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(net(), precision=precision)
    name = {"bf16": "bfloat16", "fp16": "float16"}.get(precision)
    expected = [] if multiplied or name is None else [f"no instructions that multiply {name}"]
    told = [str(warning.message) for warning in caught]
    assert len(told) == len(expected) and all(text in message for text, message in zip(expected, told))


@pytest.mark.parametrize("kind", [torch.optim.SGD, optim.SGD])
def test_fp16_skips_steps_that_overflow_and_schedule_and_averages_follow_the_applied_ones(kind):
    model = net()
    optimizer = kind(model.parameters(), lr=0.1)
    scale = 2.0**40  # overflows until it has halved often enough
    run = make(
        model,
        optimizer,
        precision=Precision("fp16", init_scale=scale),
        schedule=Schedule("polynomial", warmup_epochs=0),
        ema_decay=0.5,
        epochs=12,
        max_skipped=40,
    )
    applied = []
    optimizer.register_step_post_hook(lambda *args: applied.append(weights(model)))
    run.fit(data())
    assert 0 < run.skipped < run.step_count == 36
    assert run.scaler.get_scale() == scale / 2**run.skipped
    assert run.schedule.last_epoch == run.step_count - run.skipped
    assert run.history.step_losses[-1] < run.history.step_losses[0]
    different = [w for i, w in enumerate(applied) if i == 0 or not torch.equal(w, applied[i - 1])]
    expected = weights(net())
    exact = expected.double()
    for w in different[different[0].equal(expected) :]:
        expected, exact = expected.lerp(w, 0.5), exact.lerp(w.double(), 0.5)
    with run.averaged_weights():
        harness.assert_as_good_as_torch(weights(model), expected, exact, "averages")


def test_the_scale_of_the_loss_grows_after_an_interval_that_is_a_float():
    run = make(net(), precision=Precision("fp16", init_scale=4.0, growth_interval=1e0), epochs=1)
    run.fit(data())
    assert run.scaler.get_scale() == 4.0 * 2**run.step_count


@pytest.mark.parametrize("kind", [torch.optim.AdamW, optim.AdamW])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_loss_that_is_not_finite_stops_before_the_update_and_names_the_samples(kind, max_grad_norm, accumulate):
    inputs, targets = samples(24)
    inputs[13] = math.inf
    model = net()
    before = weights(model)
    feed = Batches(inputs, targets, 8, shuffle=False)
    run = make(model, kind(model.parameters()), max_grad_norm=max_grad_norm, accumulation=accumulate, epochs=2)
    with pytest.raises(NonFiniteError, match="input 0 of the batch is not finite for samples 5 of the batch"):
        run.fit(feed)
    assert weights(model).isfinite().all() and torch.equal(weights(model), before) == (accumulate == 3)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, optim.AdamW])
def test_a_gradient_that_is_not_finite_is_named_by_its_module_though_the_loss_is_finite(kind):
    class Root(nn.Module):
        def forward(self, x):
            return (x * 0).sqrt() + x  # the slope of the root at 0 is infinite

    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), Root())
    before = weights(model)
    with pytest.raises(NonFiniteError, match=r"step 1 of epoch 1 was not made: the gradient .*1 \(Linear\)"):
        make(model, kind(model.parameters())).fit(data())
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, optim.AdamW])
def test_skipping_leaves_the_state_untouched_and_has_a_limit(kind):
    inputs, targets = samples(24)
    inputs[3] = math.nan
    model = net()
    optimizer = kind(model.parameters())
    run = make(model, optimizer, nonfinite="skip", schedule=Schedule("exponential", warmup_epochs=0))
    run.fit(Batches(inputs, targets, 8, shuffle=False))
    assert run.skipped == 1 and run.schedule.last_epoch == 2
    reference = net()
    make(reference, kind(reference.parameters())).fit(Batches(inputs[8:], targets[8:], 8, shuffle=False))
    harness.assert_as_good_as_torch(weights(model), weights(reference), weights(reference).double(), "weights")
    inputs[:8] = math.nan
    run = make(net(), nonfinite="skip", max_skipped=2)
    with pytest.raises(NonFiniteError, match="3 updates in a row were not finite, up to step 3"):
        run.fit(Batches(torch.full_like(inputs, math.nan), targets, 8, shuffle=False))
    run.fit(Batches(inputs, targets, 8, shuffle=False))  # another run, another row
    assert run.skipped == 4


class Hasty(Trainer):
    """As on a GPU: nothing waits for a number in a step, which here is an error."""

    class NoReading(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert "_local_scalar_dense" not in str(function), "the step waits for the device"
            return function(*args, **kwargs or {})

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.late = self.update.late = True

    def step(self, group):
        with self.NoReading():
            return super().step(group)


def hasty_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), harness.ReplacedMean(), nn.Linear(8, 4)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_where_nobody_waits_for_the_device_skipped_updates_change_as_little(precision, tmp_path):
    inputs, targets = samples(96)
    inputs[[20, 50]] = math.nan  # updates 3 and 7 of 12
    for cls in (Trainer, Hasty):
        model = hasty_net()
        logging = Logging(tmp_path / cls.__name__, log_every=2)
        schedule = Schedule("step", step_epochs=2, warmup_epochs=0)
        options = {"cls": cls, "nonfinite": "skip", "precision": precision, "epochs": 4, "schedule": schedule}
        run = make(model, optim.AdamW(model.parameters(), lr=0.01), logging=logging, **options)
        run.fit(Batches(inputs, targets, 8, shuffle=False), data())
        assert run.skipped == 8 and run.step_count == 48
        assert run.schedule.last_epoch - run.owed == 40  # the updates that were applied
        assert all(t.isfinite().all() for t in model.state_dict().values())
    lines = [[json.loads(x) for x in (tmp_path / c.__name__ / "metrics.jsonl").open()] for c in (Trainer, Hasty)]
    assert lines[0][-1]["epoch"] == lines[1][-1]["epoch"] == 4
    assert ("loss_scale" in lines[1][5]) == (precision == "fp16")
    # One epoch at one rate: bit by bit the same, running statistics too.
    constant = {"nonfinite": "skip", "precision": precision, "ema_decay": 0.75}
    states = []
    for cls in (Trainer, Hasty):
        model = hasty_net()
        run = make(model, optim.AdamW(model.parameters(), lr=0.01), cls=cls, **constant)
        history = run.fit(Batches(inputs, targets, 8, shuffle=False))
        with run.averaged_weights():
            averages = {f"average of {name}": t.clone() for name, t in model.state_dict().items()}
        states.append((model.state_dict() | averages, history.epochs[0].train_loss))
    (a, loss_a), (b, loss_b) = states
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    assert loss_a == pytest.approx(loss_b)  # of the ten updates that were made


@pytest.mark.parametrize("cls", [Trainer, Hasty])
def test_a_loss_may_be_a_list_of_one_number(cls):
    class Listed(cls):
        def training_step(self, batch):
            return super().training_step(batch)[None]

    losses = []
    for kind in (cls, Listed):
        model = hasty_net()
        run = make(model, optim.AdamW(model.parameters()), cls=kind, accumulation=2)
        losses.append(run.fit(data()).step_losses)
    assert losses[0] == losses[1]


def test_where_nobody_waits_for_the_device_the_run_stops_some_steps_later_with_sound_weights():
    inputs, targets = samples(96)
    inputs[20] = math.nan
    model = hasty_net()
    run = make(model, optim.AdamW(model.parameters(), lr=0.01), cls=Hasty, logging=Logging(log_every=2))
    with pytest.raises(NonFiniteError, match=r"step 3 of epoch 1 was not made: .* a GPU tells some steps later"):
        run.fit(Batches(inputs, targets, 8, shuffle=False))
    assert run.step_count in (5, 6) and weights(model).isfinite().all()


class OnSecond(torch.Tensor):
    """Says that it lies on the second GPU."""

    is_cuda, device = True, torch.device("cuda:1")


def test_numbers_are_waited_for_on_their_device_which_need_not_be_the_current_one(monkeypatch):
    calls = []

    class Stream:
        def __init__(self, device):
            calls.append(("stream", str(device)))

        def record_event(self):
            return self

        def synchronize(self):
            calls.append("waited")

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    late = Late()
    late.add(torch.tensor([1.0, 2.0]).as_subclass(OnSecond))
    assert late.collect(wait=True) == [[1.0, 2.0]] and calls == [("stream", "cuda:1"), "waited"]


def test_products_without_tf32_leave_the_settings_readable():
    """Torch refuses to read its setting for cuDNN as a whole where convolutions and recurrent layers differ."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for tf32 in (False, True):
            Precision(tf32=tf32).set_tf32(torch.device("cuda"))
            assert torch.backends.cudnn.allow_tf32 is torch.backends.cuda.matmul.allow_tf32 is tf32
            with torch.backends.cudnn.flags(benchmark=True):
                pass
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch._C._set_cudnn_allow_tf32(before[1])


def test_products_use_tf32_as_torch_says_unless_told():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for products, convolutions in (("high", True), ("highest", True), ("highest", False)):
            torch.set_float32_matmul_precision(products)
            torch._C._set_cudnn_allow_tf32(convolutions)
            Precision().set_tf32(torch.device("cuda"))
            assert torch.get_float32_matmul_precision() == products
            assert torch.backends.cudnn.allow_tf32 is convolutions
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch._C._set_cudnn_allow_tf32(before[1])


def test_cudnn_tries_its_algorithms_while_images_have_few_sizes():
    """The setting can be read without a GPU."""
    cudnn = torch.backends.cudnn
    run, before = make(net()), cudnn.benchmark
    batches = [(torch.zeros(2 + size % 2, 1, size, 4), torch.zeros(2)) for size in (*range(1, SIZES + 1), 1, 2)]
    try:
        for was in (False, True):
            cudnn.benchmark = was
            for on in (False, True):
                with run._benchmark.during(on):
                    for batch in batches:
                        run.to_device(batch)
                        assert cudnn.benchmark is on
                    run.to_device({"images": [torch.zeros(3, 9, 4)], "size": torch.zeros(2, 7)})
                    run.to_device((torch.zeros(2, 1, 99, 4), torch.zeros(2)))
                    assert cudnn.benchmark is (on and was)  # what somebody else has switched on stays on
                assert cudnn.benchmark is was
    finally:
        cudnn.benchmark = before


# --- schedules, averages, the best epoch ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (Schedule("cosine", min_factor=0.1), lambda o, s: s.CosineAnnealingLR(o, 12, eta_min=0.05)),
        (Schedule("step", step_epochs=2, gamma=0.3), lambda o, s: s.StepLR(o, 8, gamma=0.3)),
        (Schedule("multistep", milestones=(1, 2), gamma=0.3), lambda o, s: s.MultiStepLR(o, [4, 8], gamma=0.3)),
        (Schedule("polynomial", power=2.0), lambda o, s: s.PolynomialLR(o, 12, 2.0)),
        (Schedule("constant"), lambda o, s: s.ConstantLR(o, 1.0)),
        (Schedule("onecycle"), lambda o, s: s.OneCycleLR(o, 0.5, total_steps=13)),
        (Schedule("exponential", gamma=0.3, per="epoch"), lambda o, s: s.ExponentialLR(o, 0.3)),
        (Schedule("step", step_epochs=2, gamma=0.3, per="epoch"), lambda o, s: s.StepLR(o, 2, 0.3)),
    ],
)
def test_schedules_by_name_are_those_of_torch(ours, torchs):
    class Rates(Callback):
        def __init__(self):
            self.rates = []

        def on_step_end(self, trainer):
            self.rates.append(trainer.optimizer.param_groups[0]["lr"])

    def rates(**schedule):
        model = net()
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), Rates()
        make(model, optimizer, epochs=3, callbacks=[seen], **schedule).fit(data(32))
        return torch.tensor(seen.rates, dtype=torch.float64)

    ours = Schedule(**vars(ours) | {"warmup_epochs": 0})
    scheduler = lambda optimizer, steps: torchs(optimizer, torch.optim.lr_scheduler)  # noqa: E731
    expected = rates(scheduler=scheduler, schedule=ours)
    harness.assert_as_good_as_torch(rates(schedule=ours), expected, expected, "learning rates")


def test_plateau_lowers_the_rate_when_the_metric_stays_and_warms_up_first():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-40)  # nothing ever improves
    schedule = Schedule("plateau", patience=1, gamma=0.5, warmup_epochs=1)
    run = make(model, optimizer, schedule=schedule, epochs=6)
    run.fit(data(), data())
    assert optimizer.param_groups[0]["lr"] == 2.0**-42  # epochs 2 to 6 count: the first is the best, two pairs follow


@pytest.mark.parametrize(("mode", "values"), [("max", [0.1, 0.2, 0.3, 0.3, 0.3]), ("min", [3.0, 2.0, 1.0, 1.0, 1.0])])
def test_plateau_knows_whether_a_larger_value_is_better(mode, values):
    class Metrics(Trainer):
        def evaluate(self, batches):
            rates.append(self.optimizer.param_groups[0]["lr"])
            return {"accuracy": values[len(rates) - 1]}

    rates, stopping = [], EarlyStopping("accuracy", mode)
    schedule = Schedule("plateau", patience=0, gamma=0.5, warmup_epochs=0)
    make(net(), cls=Metrics, schedule=schedule, epochs=5, early_stopping=stopping).fit(data(), data())
    assert rates == [0.1, 0.1, 0.1, 0.1, 0.05]


def test_a_run_stops_when_nothing_improves_and_keeps_the_best_weights(tmp_path):
    class Losses(Trainer):
        values = iter([3.0, 2.0, 1.95, 2.5, 1.0])

        def evaluate(self, batches):
            self.kept = [*getattr(self, "kept", []), weights(self.model)]
            return {"loss": next(self.values)}

    model = net()
    stopping = EarlyStopping(stop_patience=2, min_delta=0.1)
    run = make(model, cls=Losses, epochs=5, early_stopping=stopping, best_weights=tmp_path / "best.pt")
    history = run.fit(data(), data())
    assert len(history.epochs) == 4 and run.best.epoch == 2
    best = net()
    best.load_state_dict(torch.load(tmp_path / "best.pt"))
    assert torch.equal(weights(best), run.kept[1])


@pytest.mark.parametrize("kind", [torch.optim.SGD, optim.SGD])
def test_averages_are_evaluated_and_saved(kind, tmp_path):
    model = net()
    run = make(model, kind(model.parameters(), lr=0.5), ema_decay=0.9, weights=tmp_path / "w.pt", epochs=2)
    history = run.fit(data(), data())
    own = weights(model)
    averaged = net()
    averaged.load_state_dict(torch.load(tmp_path / "w.pt"))
    assert not torch.equal(weights(averaged), own)
    assert history.epochs[-1].valid_loss == make(averaged).evaluate(data())["loss"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, optim.SGD])
def test_running_statistics_beside_averages_are_those_of_the_model(kind, tmp_path):
    model = hasty_net()
    make(model, kind(model.parameters(), lr=0.5), ema_decay=0.9, weights=tmp_path / "w.pt").fit(data(), data())
    saved, own = torch.load(tmp_path / "w.pt"), model.state_dict()
    assert all(torch.equal(saved[name], own[name]) == name.startswith(("2.running", "2.num", "3.")) for name in own)


# --- resume -----------------------------------------------------------------------------------------------------------


class Stop(Callback):
    """Ends the run as a signal would, while micro-batch ``at`` is waited for."""

    def __init__(self, at):
        self.at = at

    def on_fit_start(self, trainer):
        fetch = trainer.feed.next

        def stopping(ahead=0):
            self.at -= 1
            if self.at < 0:
                trainer._stop.requested = 15
            return fetch(ahead)

        trainer.feed.next = stopping


def resumable(tmp_path, seed=0, kind=torch.optim.AdamW, precision="bf16", **options) -> Trainer:
    model = net(seed, dropout=0.3)
    config = {"epochs": 3, "accumulation": 3, "schedule": Schedule(), "ema_decay": 0.9, "precision": precision}
    checkpoint = Checkpoint(tmp_path)
    return make(model, kind(model.parameters(), lr=0.01), checkpoint=checkpoint, **config | options)


@pytest.mark.parametrize("at", [0, 2, 5, 7, 8, 15])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, optim.AdamW])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_that_is_stopped_anywhere_goes_on_bitwise(tmp_path, at, kind, precision):
    feed = lambda: data(58, 8, shuffle=True)  # noqa: E731  (8 batches: two groups of three and one of two)
    whole = resumable(tmp_path / "whole", kind=kind, precision=precision)
    expected = whole.fit(feed(), data())
    with pytest.raises(SystemExit) as stop:
        resumable(tmp_path / "cut", kind=kind, precision=precision, callbacks=[Stop(at)]).fit(feed(), data())
    assert stop.value.code == 128 + 15
    torch.manual_seed(99)
    again = resumable(tmp_path / "cut", seed=1, kind=kind, precision=precision)
    history = again.fit(feed(), data())
    assert history.step_losses == expected.step_losses
    assert [(e.train_loss, e.metrics) for e in history.epochs] == [(e.train_loss, e.metrics) for e in expected.epochs]
    assert torch.equal(weights(again.model), weights(whole.model))
    with again.averaged_weights(), whole.averaged_weights():
        assert torch.equal(weights(again.model), weights(whole.model))


def test_a_loader_without_a_position_goes_on_by_reading_again(tmp_path):
    feed = Lists([4, 4, 4, 4, 2])
    whole = resumable(tmp_path / "whole", accumulation=1)
    whole.fit(feed)
    with pytest.raises(SystemExit):
        resumable(tmp_path / "cut", accumulation=1, callbacks=[Stop(7)]).fit(feed)
    again = resumable(tmp_path / "cut", seed=1, accumulation=1)
    again.fit(feed)
    assert torch.equal(weights(again.model), weights(whole.model))


class Rates(Callback):
    """The learning rate of every update and the part of the run that lay behind it."""

    def __init__(self):
        self.seen, self.all = {}, []

    def on_epoch_start(self, trainer, epoch):
        self.rate = float(trainer.optimizer.param_groups[0]["lr"])

    def on_step_end(self, trainer):
        done = trainer.feed.epoch + (trainer.feed.used - 1) / len(trainer.feed.batches)
        self.seen[done] = self.rate
        self.all.append(self.rate)
        self.rate = float(trainer.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("name", ["cosine", "polynomial", "onecycle"])
def test_schedules_stay_at_their_end_where_more_batches_come_than_the_length_tells(name):
    class More(list):
        def __len__(self):
            return 2

    seen = Rates()
    make(net(), callbacks=[seen], schedule=Schedule(name, warmup_epochs=0)).fit(More(data(24, 4)))
    assert seen.all[1] > seen.all[2] and len({*seen.all[2:]}) == 1 and len(seen.all) == 6


@pytest.mark.parametrize("per", ["step", "epoch"])
@pytest.mark.parametrize("name", ["cosine", "onecycle", "exponential"])
@pytest.mark.parametrize("sizes", [(4, 8), (8, 4), (8, 2)])
def test_a_run_that_goes_on_with_other_batches_stays_where_it_was_in_its_schedule(tmp_path, name, per, sizes):
    """As another number of processes makes them: so many updates per epoch more or fewer."""
    rates = [Rates() for _ in range(2)]
    options = {"schedule": Schedule(name, warmup_epochs=0, per=per, gamma=0.5)}
    model = net()
    make(model, epochs=6, callbacks=rates[:1], **options).fit(data(48, sizes[1]))
    for epochs, size in zip((3, 6), sizes):
        model = net()
        stop = [Stop(3 * (48 // size + 1))] if epochs == 3 else []
        run = make(model, epochs=6, checkpoint=Checkpoint(tmp_path), callbacks=[*stop, rates[1]], **options)
        if stop:
            with pytest.raises(SystemExit):
                run.fit(data(48, size))
            assert run.feed.epoch == 3
            rates[1].seen.clear()
        else:
            run.fit(data(48, size))
    whole, rest = rates[0].seen, rates[1].seen
    assert list(rest) == [done for done in whole if done >= 3]
    assert rest == {done: pytest.approx(whole[done]) for done in rest}


@pytest.mark.parametrize("name", ["cosine", "onecycle", "step"])
@pytest.mark.parametrize(
    ("first", "second"),
    [(("step", 8), ("epoch", 8)), (("epoch", 8), ("step", 8)), (("step", 8), ("step", 24)), (("step", 8), ("step", 4))],
)
def test_amid_an_epoch_too_a_run_with_other_moves_goes_on_where_it_would_have_been(tmp_path, name, first, second):
    def run(per, size, callbacks, **options):
        schedule = Schedule(name, warmup_epochs=0, per=per, step_epochs=2)
        made = make(net(), epochs=4, callbacks=callbacks, schedule=schedule, **options)
        made.fit(data(48, size))

    whole, rest = Rates(), Rates()
    run(*second, [whole])
    with pytest.raises(SystemExit):
        run(*first, [Stop(10)], checkpoint=Checkpoint(tmp_path))  # half of the second epoch of six updates is over
    run(*second, [rest], checkpoint=Checkpoint(tmp_path))
    left = round(len(whole.all) * 2.5 / 4)
    assert rest.all == pytest.approx(whole.all[-left:])


@pytest.mark.parametrize("sizes", [(8, 8), (4, 8), (8, 4)])
def test_updates_that_were_left_out_do_not_count_where_a_run_goes_on_otherwise(tmp_path, sizes):
    inputs, targets = samples(48)
    inputs[:8] = math.nan  # one update of eight samples in each epoch, or two of four

    def run(size, epochs, callbacks, **options):
        schedule = Schedule("cosine", warmup_epochs=0)
        options |= {"epochs": epochs, "nonfinite": "skip", "schedule": schedule, "callbacks": callbacks}
        made = make(net(), **options)
        made.fit(Batches(inputs, targets, size, shuffle=False))

    whole, rest = Rates(), Rates()
    run(sizes[1], 6, [whole])
    updates = 48 // sizes[0]
    with pytest.raises(SystemExit):
        run(sizes[0], 4, [Stop(updates + 1 + updates // 2)], checkpoint=Checkpoint(tmp_path))
    run(sizes[1], 6, [rest], checkpoint=Checkpoint(tmp_path))
    assert rest.all == pytest.approx(whole.all[-len(rest.all) :]) and len(rest.all) == len(whole.all) * 4.5 / 6


@pytest.mark.parametrize("per", ["step", "epoch"])
@pytest.mark.parametrize("name", ["cosine", "onecycle", "constant"])
def test_a_run_that_is_made_longer_goes_on_at_the_rates_of_the_longer_one(tmp_path, name, per):
    def run(epochs, callbacks=(), **options):
        model, schedule = net(), Schedule(name, warmup_epochs=0, per=per)
        made = make(model, epochs=epochs, callbacks=callbacks, schedule=schedule, **options)
        made.fit(data())
        return made

    whole, rest = Rates(), Rates()
    run(6, [whole])
    run(3, checkpoint=Checkpoint(tmp_path))
    run(6, [rest], checkpoint=Checkpoint(tmp_path))
    assert rest.seen == {done: pytest.approx(rate) for done, rate in whole.seen.items() if done >= 3}
    assert not run(2, checkpoint=Checkpoint(tmp_path)).numbers.last  # a shorter one has nothing left to do


def shuffled(count: int, size: int, **options):
    torch.manual_seed(3)
    return DataLoader(TensorDataset(*samples(count)), size, shuffle=True, **options)


class Inputs(Trainer):
    """Keeps the inputs that it trains on."""

    def training_step(self, batch):
        self.seen = [*getattr(self, "seen", []), *batch[0].flatten(1)[:, 0].tolist()]
        return super().training_step(batch)


@pytest.mark.parametrize(("before", "after", "at"), [(8, 4, 2), (4, 8, 4), (8, 16, 2), (16, 8, 3)])
def test_a_plain_loader_with_other_batches_goes_on_at_the_sample_where_it_was(tmp_path, before, after, at):
    whole = make(net(), cls=Inputs)
    whole.fit(shuffled(44, before))
    options = {"cls": Inputs, "checkpoint": Checkpoint(tmp_path)}
    cut = make(net(), callbacks=[Stop(at)], **options)
    with pytest.raises(SystemExit):
        cut.fit(shuffled(44, before))
    rest = make(net(), **options)
    rest.fit(shuffled(44, after))
    assert cut.seen + getattr(rest, "seen", []) == whole.seen and len(set(whole.seen)) == 44


@pytest.mark.parametrize("at", [2, 3, 5])  # amid an epoch of three batches, and at its end
@pytest.mark.parametrize("owner", ["loader", "sampler", "batch_sampler"])
def test_a_loader_with_a_generator_of_its_own_goes_on_in_the_order_of_it(tmp_path, owner, at):
    def batches():
        dataset, generator = TensorDataset(*samples(12)), torch.Generator().manual_seed(5)
        if owner == "loader":
            return DataLoader(dataset, 4, shuffle=True, generator=generator)
        sampler = RandomSampler(dataset, replacement=True, generator=generator)
        if owner == "sampler":
            return DataLoader(dataset, 4, sampler=sampler)
        return DataLoader(dataset, batch_sampler=BatchSampler(sampler, 4, False))

    whole = make(net(), cls=Inputs, epochs=3)
    whole.fit(batches())
    options = {"cls": Inputs, "checkpoint": Checkpoint(tmp_path), "epochs": 3}
    cut = make(net(), callbacks=[Stop(at)], **options)
    with pytest.raises(SystemExit):
        cut.fit(batches())
    rest = make(net(), **options)
    rest.fit(batches())
    assert cut.seen + rest.seen == whole.seen


class StoppedInEvaluation(Trainer):
    """Ends the run as a signal would, amid the first evaluation."""

    def validation_step(self, batch):
        if self.reading is not None and not self.history.epochs:
            self._stop.requested = signal.SIGTERM
        return super().validation_step(batch)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("count", [12, 14])
def test_a_run_that_is_stopped_while_it_evaluates_goes_on_in_the_order_of_its_generators(
    tmp_path, count, drop_last, shared
):
    def run(cls=Inputs, epochs=3, **options):
        dataset, run = TensorDataset(*samples(count)), make(net(), cls=cls, epochs=epochs, **options)
        generators = torch.Generator().manual_seed(5), torch.Generator().manual_seed(6)
        generators = (generators[0], generators[not shared])
        loaders = [DataLoader(dataset, 4, shuffle=True, drop_last=drop_last, generator=g) for g in generators]
        if cls is StoppedInEvaluation:
            with pytest.raises(Preempted):
                run.fit(*loaders)
        else:
            run.fit(*loaders)
        return run

    whole = run()
    run(StoppedInEvaluation, checkpoint=Checkpoint(tmp_path))
    rest = run(checkpoint=Checkpoint(tmp_path))
    assert rest.seen == whole.seen[len(whole.seen) // 3 :]
    run(epochs=2, checkpoint=Checkpoint(tmp_path / "parts"))
    parts = run(checkpoint=Checkpoint(tmp_path / "parts"))
    metrics = [[epoch.metrics for epoch in run.history.epochs] for run in (whole, rest, parts)]
    assert metrics[0] == metrics[1] == metrics[2]


class Told(TensorDataset):
    epochs = ()

    def set_epoch(self, epoch):
        self.epochs = (*self.epochs, epoch)


def prefetched(*arguments, **options):
    return fdata.DevicePrefetcher(DataLoader(*arguments, **options), "cpu")


@pytest.mark.parametrize("kind", [DataLoader, fdata.loader, prefetched])
@pytest.mark.parametrize("nested", [False, True])
def test_every_sampler_and_dataset_that_wants_to_know_the_epoch_is_told(kind, nested):
    dataset, run = Told(*samples(12)), make(net(), cls=Inputs, epochs=2)
    sampler = DistributedSampler(dataset, 1, 0)
    options = {"batch_sampler": BatchSampler(sampler, 4, False)} if nested else {"batch_size": 4, "sampler": sampler}
    run.fit(kind(dataset, num_workers=0, **options))
    assert run.seen[:12] != run.seen[12:] and sorted(run.seen[:12]) == sorted(run.seen[12:])
    assert sampler.epoch == dataset.epochs[-1] == 2 and 1 in dataset.epochs


def test_a_plain_loader_whose_batches_do_not_end_there_is_refused(tmp_path):
    options = {"checkpoint": Checkpoint(tmp_path)}
    with pytest.raises(SystemExit):
        make(net(), callbacks=[Stop(3)], **options).fit(shuffled(44, 8))
    message = "is of other data: 24 samples of the epoch are used, and batches of 16 do not end there"
    with pytest.raises(InputError, match=message):
        make(net(), **options).fit(shuffled(44, 16))
    with pytest.raises(InputError, match="is of other data: the place in the epoch was kept by other means"):
        make(net(), **options).fit(data(44))


def test_lines_tell_the_progress_of_a_run_that_goes_on_with_other_batches(tmp_path):
    with pytest.raises(SystemExit):
        make(net(), epochs=2, checkpoint=Checkpoint(tmp_path), callbacks=[Stop(10)]).fit(data(64, 8))

    class Look(Callback):
        def on_fit_start(self, trainer):
            seen.append((trainer.progress.done, trainer.progress.steps))

    seen = []
    make(net(), epochs=2, checkpoint=Checkpoint(tmp_path), callbacks=[Look()]).fit(data(64, 4))
    make(net(), epochs=2, checkpoint=Checkpoint(tmp_path), callbacks=[Look()]).fit(data(64, 32))
    assert seen == [(18, 16), (4, 2)]


@pytest.mark.parametrize(
    ("kind", "schedule", "count", "message"),
    [
        (optim.SGD, "cosine", 24, "was made with the optimizer AdamW, not SGD"),
        (torch.optim.AdamW, "onecycle", 24, "is of another schedule: onecycle cannot go on from it"),
        (torch.optim.AdamW, "plateau", 24, "is of another schedule: plateau cannot go on from it"),
        (
            torch.optim.AdamW,
            "cosine",
            25,
            "is of other data: the position belongs to an order with size=24, .* 25",
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_in_one_line(tmp_path, kind, schedule, count, message):
    resumable(tmp_path).fit(data(shuffle=True))
    run = resumable(tmp_path, kind=kind, schedule=Schedule(schedule), epochs=4)
    with pytest.raises(InputError, match=f"the checkpoint in .* {message}") as error:
        run.fit(data(count, shuffle=True))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, optim.AdamW])
def test_hyperparameters_that_a_checkpoint_overrules_are_told(tmp_path, kind):
    def run(epochs, **hyperparameters):
        optimizer = kind((model := net()).parameters(), **hyperparameters)
        make(model, optimizer, epochs=epochs, checkpoint=Checkpoint(tmp_path)).fit(data())

    run(1, lr=0.01, weight_decay=0.1)
    with pytest.warns(UserWarning) as told:
        run(2, lr=0.02, weight_decay=0.0)
    place = f"the run goes on with {{}} of its checkpoint in {tmp_path}; {{}} is without effect"
    expected = [place.format("lr 0.01", "0.02"), place.format("weight_decay 0.1", "0.0")]
    assert [str(one.message) for one in told] == expected
    with pytest.warns(UserWarning) as told:
        run(3, lr=0.01, weight_decay=0.1, betas=(0.8, 0.99), eps=1e-6, amsgrad=False)
    expected = [place.format("betas (0.9, 0.999)", "(0.8, 0.99)"), place.format("eps 1e-08", "1e-06")]
    assert [str(one.message) for one in told] == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(4, lr=0.01, weight_decay=0.1)


def test_torchs_optimizer_of_the_same_name_goes_on(tmp_path):
    resumable(tmp_path, kind=torch.optim.AdamW, epochs=1, ema_decay=None).fit(data())
    assert len(resumable(tmp_path, kind=optim.AdamW, ema_decay=None).fit(data()).epochs) == 3


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    resumable(tmp_path).fit(data())
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), *(nn.Linear(4, 4) for _ in range(20)))
    message = r"the checkpoint in .* is of another model or optimizer: .* (Missing|Unexpected) key\(s\) in state_dict"
    with pytest.raises(InputError, match=message) as error:
        make(model, torch.optim.AdamW(model.parameters()), checkpoint=Checkpoint(tmp_path)).fit(data())
    assert "\n" not in str(error.value) and str(error.value).endswith(" ...") and len(str(error.value)) < 600


@pytest.mark.parametrize("kind", [torch.optim.AdamW, optim.AdamW])
@pytest.mark.parametrize("other", ["groups", "schedule", "head"])
def test_a_checkpoint_that_is_refused_leaves_model_and_optimizer_as_they_were(tmp_path, other, kind):
    def start(seed):
        model = net(seed)
        model[4] = nn.Linear(32, 5) if other == "head" and seed else model[4]
        groups = [{"params": layer.parameters()} for layer in (model[1], model[4])]
        return model, kind(groups if other == "groups" and seed else model.parameters(), lr=0.01)

    make(*start(0), checkpoint=tmp_path / "of another").fit(data())
    results, options = [], {"schedule": "onecycle"} if other == "schedule" else {}
    for refused in (True, False):
        model, optimizer = start(1)
        if refused:
            given = str(optimizer.state_dict())
            with pytest.raises(InputError, match=r"is of another (model or optimizer|schedule): "):
                make(model, optimizer, checkpoint=tmp_path / "of another", **options).fit(data())
            assert str(optimizer.state_dict()) == given
        make(model, optimizer, **options).fit(data())
        results.append(weights(model))
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, optim.AdamW])
def test_parameters_in_another_order_go_on_with_their_own_states(tmp_path, kind):
    def run(folder, epochs, order):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), *(nn.Linear(4, 4) for _ in range(3)))
        groups = [{"params": [getattr(model[i], name) for i in order]} for name in ("weight", "bias")]
        groups = groups if epochs else groups[::-1]
        run = make(model, kind(groups, lr=0.01), epochs=epochs or 3, checkpoint=Checkpoint(tmp_path / folder))
        return run.fit(data()).step_losses, weights(model)

    expected, end = run("whole", 3, (1, 2, 3, 4))
    run("cut", 2, (1, 2, 3, 4))
    losses, other = run("cut", 3, (3, 1, 4, 2))  # as of a set, in another process
    assert losses == expected and torch.equal(other, end)
    message = r"is of another model or optimizer: 1\.weight is in another group of the optimizer now$"
    with pytest.raises(InputError, match=message):
        run("whole", 0, (1, 2, 3, 4))


def test_a_run_that_was_stopped_can_be_evaluated_and_fitted_again():
    stop = Stop(4)
    run = make(net(), epochs=2, callbacks=[stop])
    with pytest.raises(SystemExit):
        run.fit(data())
    assert run.evaluate(data())["loss"] > 0
    stop.at = math.inf
    assert len(run.fit(data()).epochs) == 2


def test_ctrl_c_at_a_prompt_saves_and_leaves_the_prompt(tmp_path, monkeypatch):
    class Stop(Callback):
        def on_step_end(self, trainer):
            if trainer.step_count == 2:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    options = {"epochs": 2, "checkpoint": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        make(net(), callbacks=[Stop()], **options).fit(data())
    whole, run = make(net(), epochs=2), make(net(), **options)
    assert run.fit(data()).step_losses == whole.fit(data()).step_losses


def test_a_second_fit_trains_though_the_first_has_stopped_early():
    class Worse(Trainer):
        def evaluate(self, batches):
            return {"loss": float(self.step_count)}

    run = make(net(), cls=Worse, epochs=5, early_stopping=EarlyStopping(stop_patience=1))
    assert [len(run.fit(data(), data()).epochs) for _ in range(2)] == [2, 2]


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_layers_that_are_held_still_stay_so_in_an_epoch_and_through_an_evaluation():
    class HoldStill(Callback):
        def on_epoch_start(self, trainer, epoch):
            trainer.model[2].eval()

        def on_step_end(self, trainer):
            trainer.evaluate(data())

    model = hasty_net()
    before, others = copy.deepcopy(model[2].state_dict()), weights(model)
    make(model, epochs=2, callbacks=[HoldStill()]).fit(data(), data())
    assert torch.equal(model[2].running_mean, before["running_mean"]) and not model[2].num_batches_tracked
    assert model.training and not torch.equal(weights(model), others)


class Keeping(nn.Module):
    """It makes a tensor once that it trains with, and one for evaluation that it drops when training goes on."""

    def __init__(self):
        super().__init__()
        self.inner, self.grid, self.scale = net(), None, None

    def train(self, mode: bool = True):
        self.scale = None if mode else self.scale
        return super().train(mode)

    def forward(self, x):
        if self.grid is None:
            self.grid = torch.linspace(1, 2, 4)
        if self.scale is None and not self.training:
            self.scale = self.inner[1].bias.sum()
        return self.inner(x) * self.grid * (1 if self.training else self.scale)


@pytest.mark.parametrize("kind", ["torch", "ours", "prefetched"])
def test_the_training_data_are_evaluated_amid_an_epoch_whose_workers_stay(kind):
    class Probe(Callback):
        def on_step_end(self, trainer):
            if trainer.step_count in (1, 3):
                found.append(trainer.evaluate(batches))

    def loader():
        dataset = torch.utils.data.TensorDataset(*samples(32))
        make_one = torch.utils.data.DataLoader if kind == "torch" else fdata.loader
        made = make_one(dataset, batch_size=4, num_workers=1, persistent_workers=True)
        return fdata.DevicePrefetcher(made, "cpu") if kind == "prefetched" else made

    found, batches = [], loader()
    run, plain = make(net(), epochs=2, callbacks=[Probe()]), make(net(), epochs=2)
    losses, own = run.fit(batches).step_losses, getattr(batches, "batches", batches)
    assert losses == plain.fit(loader()).step_losses and len(losses) == 16
    assert len(found) == 2 and found[1] != found[0]
    assert own._iterator is not None  # the workers of the passes have stayed


def test_what_a_model_keeps_in_evaluation_is_no_hindrance_to_training():
    class Evaluating(Callback):
        def on_step_end(self, trainer):
            before = [trainer.evaluate(data())["loss"] for _ in range(2)]
            trainer.model.train()  # and so without what was kept
            assert before == 2 * [trainer.evaluate(data())["loss"]]

    make(Keeping(), epochs=2, callbacks=[Evaluating()]).fit(data(), data())


class Weighted(Trainer):
    """Batches count by the weights of their samples; one of the metrics is one value per sample, one a plain number."""

    def weight(self, batch):
        return float(batch[1].sum())

    def training_step(self, batch):
        return self.forward(batch[0]).square().mean()

    def validation_step(self, batch):
        inputs, counts = batch
        mean = (inputs.flatten(1).square().mean(1) * counts).sum() / counts.sum()  # NaN where nothing counts
        return {"loss": mean, "positive": inputs.flatten(1).mean(1) > 0, "three": 3.0}


def test_metrics_are_means_over_what_counts():
    inputs, counts = samples(16)[0], torch.tensor([2.0] * 4 + [0.0] * 4 + [1.0] * 8)
    feed = list(zip(inputs.split(4), counts.split(4)))
    found = make(net(), cls=Weighted).evaluate(feed)
    own, squares = inputs.flatten(1).mean(1), inputs.double().flatten(1).square().mean(1)
    assert found["loss"] == pytest.approx(((squares * counts).sum() / counts.sum()).item())
    assert found["positive"] == (own > 0).sum().item() / 16 and found["three"] == 3.0
    nothing = make(net(), cls=Weighted).evaluate([(inputs, torch.zeros(16))])
    assert math.isnan(nothing["loss"]) and nothing["positive"] == found["positive"]


def test_labels_that_the_loss_ignores_are_not_counted_as_wrong():
    inputs, targets = samples(16)
    known = net()(inputs).argmax(1) == targets
    targets[::3] = -100
    model = net()
    expected = known[targets >= 0].double().mean().item()
    assert make(model).evaluate([(inputs, targets)])["accuracy"] == expected


class Named(Trainer):
    """Batches begin with the names of their samples."""

    def training_step(self, batch):
        return super().training_step(batch[1:])

    def validation_step(self, batch):
        return super().validation_step(batch[1:])


class ByName(Trainer):
    """Batches are dicts, of which the model takes its arguments by their names."""

    def training_step(self, batch):
        return self.loss_of(self.forward(input=batch["input"]), batch["target"])

    def validation_step(self, batch):
        return {"loss": self.training_step(batch)}


def test_a_model_may_take_its_arguments_by_name():
    feed = [{"input": inputs, "target": targets} for inputs, targets in data()]
    assert make(net(), cls=ByName).fit(feed).step_losses == make(net()).fit(data()).step_losses


def test_what_a_callback_does_may_be_set_on_the_object():
    callback, epochs = Callback(), []
    callback.on_epoch_end = lambda trainer, epoch: epochs.append(epoch.epoch)
    make(net(), callbacks=[callback]).fit(data())
    assert epochs == [1]


def test_what_a_callback_wants_to_do_at_no_point_of_a_run_is_told():
    class Other(Callback):
        on_gpu = False

        def on_epoch_begin(self, trainer, epoch): ...

    message = "Other.on_epoch_begin is never called: the points of a run are on_fit_start, "
    with pytest.warns(UserWarning, match=message) as told:
        make(net(), callbacks=[Other(), Other()])
    assert len(told) == 1


def test_the_samples_of_any_batch_are_counted():
    (inputs, targets), names = samples(12), ["image.png"] * 6
    feed = [(names, inputs[:6], targets[:6]), (names, inputs[6:], targets[6:])]
    plain, named = make(net()), make(net(), cls=Named)
    assert plain.fit([part[1:] for part in feed]).step_losses == named.fit(feed).step_losses
    assert named.evaluate(feed) == plain.evaluate([part[1:] for part in feed])
    assert plain.weight({"a": {"b": [inputs[0, 0, 0, 0], targets]}}) == 12
    with pytest.raises(InputError, match=r"weight\(batch\) finds no samples in tuple\(list\(str\), int\): override it"):
        plain.weight((["a"], 3))


# --- what is seen -----------------------------------------------------------------------------------------------------


def test_json_lines_hold_every_logged_step_and_a_resumed_run_drops_those_it_makes_again(tmp_path):
    logging = Logging(tmp_path, loggers=("jsonl", "tensorboard"), log_every=1)
    run = make(net(), logging=logging, max_grad_norm=1.0, precision="fp16")
    run.fit(data(), data())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 3]
    assert [line["loss"] for line in lines[:3]] == run.history.step_losses
    assert {"lr", "skipped", "grad_norm", "loss_scale", "samples_per_second"} <= lines[0].keys()
    assert lines[3]["valid_loss"] == run.history.epochs[0].valid_loss
    assert any(path.name.startswith("events.out.tfevents") for path in tmp_path.iterdir())
    run.fit(data())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [line["step"] for line in lines if "epoch" in line] == [3, 6]
    for logger in logging.open({}, step=2):
        logger.log(7, {"loss": 1.0})
        logger.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [1, 2, 7]


@pytest.mark.parametrize("every_steps", [2, None])
def test_what_was_logged_before_a_checkpoint_is_on_the_disk_when_the_run_is_killed(tmp_path, every_steps):
    class Look(Callback):
        def on_step_end(self, trainer):
            at, lines = trainer.step_count - 1, (tmp_path / "metrics.jsonl").read_text().splitlines()
            seen.append(sum("loss" in json.loads(line) for line in lines) >= at - at % (every_steps or 3))
            seen.append(sum("epoch" in json.loads(line) for line in lines) == at // 3)

    seen, logging, checkpoint = [], Logging(tmp_path, log_every=1), Checkpoint(tmp_path / "c", every_steps)
    make(net(), epochs=2, logging=logging, checkpoint=checkpoint, callbacks=[Look()]).fit(data(), data())
    assert len(seen) == 12 and all(seen)


def test_json_lines_are_json_where_a_loss_is_not_finite(tmp_path):
    inputs, targets = samples(24)
    inputs[11] = math.nan
    run = make(net(), nonfinite="skip", max_grad_norm=1.0, logging=Logging(tmp_path, log_every=1))
    run.fit(Batches(inputs, targets, 8, shuffle=False))
    no = lambda name: pytest.fail(f"{name} is no JSON")  # noqa: E731
    lines = [json.loads(line, parse_constant=no) for line in (tmp_path / "metrics.jsonl").open()]
    assert [line["loss"] is None for line in lines[:3]] == [False, True, False] and lines[3]["train_loss"] > 0
    assert ["grad_norm" in line for line in lines[:3]] == [True, False, True]  # not that of the update before


def test_the_line_of_an_epoch_that_is_made_again_is_dropped(tmp_path):
    class Killed(Callback):
        def on_validation_end(self, trainer, metrics):
            trainer.saving.after_epoch = lambda better: sys.exit()

    options = {"logging": Logging(tmp_path, log_every=10), "checkpoint": Checkpoint(tmp_path / "c", every_steps=3)}
    with pytest.raises(SystemExit):
        make(net(), callbacks=[Killed()], **options).fit(data(), data())
    make(net(), epochs=2, **options).fit(data(), data())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [(line["step"], line["epoch"]) for line in lines] == [(3, 1), (6, 2)]


class Waves(nn.Module):
    """Complex weights, as those of Fourier layers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 4, dtype=torch.complex64))

    def forward(self, x):
        return (x.flatten(1).to(torch.complex64) @ self.weight).abs()


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_complex_parameters_train_and_what_is_not_finite_of_them_is_left_out(max_grad_norm):
    torch.manual_seed(0)
    model = nn.Sequential(Waves(), nn.Linear(4, 4))
    before, (inputs, targets) = weights(model), samples(24)
    inputs[8:16] = math.inf
    run = make(model, nonfinite="skip", max_grad_norm=max_grad_norm)
    run.fit(Batches(inputs, targets, 8, shuffle=False))
    assert run.skipped == 1 and weights(model).isfinite().all() and not torch.equal(weights(model), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_run_takes_another_default_dtype(dtype):
    before, (inputs, targets) = torch.get_default_dtype(), samples(24)
    torch.set_default_dtype(dtype)
    try:
        run = make(net())
        run.fit(Batches(inputs.to(dtype), targets, 8, shuffle=False))
    finally:
        torch.set_default_dtype(before)
    assert run.step_count == 3 and run.skipped == 0 and weights(run.model).dtype == dtype


def test_metrics_are_as_exact_as_they_are_given():
    class Fixed(Trainer):
        def validation_step(self, batch):
            return {"loss": 0.3, "many": torch.tensor([0.1, 0.3], dtype=torch.float64)}

    run = make(net(), cls=Fixed)
    run.fit(data(8), data(8))
    assert run.history.epochs[0].metrics == {"loss": 0.3, "many": 0.2}


def test_a_run_of_wandb_that_was_open_stays_open(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logging = Logging(tmp_path, ("wandb",), log_every=1)
    with wandb.init(dir=str(tmp_path)) as run:
        make(net(), logging=logging).fit(data())
        assert wandb.run is run and run.summary["loss"] > 0
        run.log({"after": 1.0})
    make(net(), logging=logging).fit(data())
    assert wandb.run is None


def test_a_run_of_mlflow_that_was_active_stays_so(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    logging = Logging(tmp_path, ("mlflow",), log_every=1)
    with mlflow.start_run() as run:
        make(net(), logging=logging).fit(data())
        assert mlflow.active_run().info.run_id == run.info.run_id
    make(net(), logging=logging).fit(data())
    assert mlflow.active_run() is None and "loss" in mlflow.get_run(run.info.run_id).data.metrics


@pytest.mark.parametrize("service", ["wandb", "mlflow"])
def test_a_run_that_goes_on_does_so_under_its_own_name(service, tmp_path, monkeypatch):
    package = pytest.importorskip(service, reason=f"{service} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    if service == "mlflow":
        package.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")

    def name_of(folder, epochs: int, fresh: bool = False) -> str:
        logging = Logging(folder, (service,), log_every=1)
        checkpoint = Checkpoint(folder / "checkpoints", resume=not fresh)
        make(net(), epochs=epochs, logging=logging, checkpoint=checkpoint).fit(data())
        return (folder / f"{service}.id").read_text()

    first = name_of(tmp_path / "a", 1)
    assert name_of(tmp_path / "a", 2) == first  # with another number of epochs in its configuration
    others = name_of(tmp_path / "b", 1), name_of(tmp_path / "a", 1, fresh=True)
    assert len({first, *others}) == 3
    if service == "mlflow":
        losses = package.tracking.MlflowClient().get_metric_history(first, "loss")
        assert [loss.step for loss in losses] == [1, 2, 3, 4, 5, 6]


class Logger:
    """Cannot be closed."""

    def log(self, step, values): ...
    def flush(self): ...

    def close(self):
        raise OSError("the network is gone")


def test_an_error_of_a_run_is_not_hidden_by_what_fails_after_it():
    inputs, targets = samples(24)
    with pytest.raises(NonFiniteError), pytest.warns(UserWarning, match="the network is gone"):
        make(net(), loggers=[Logger()]).fit(Batches(inputs * math.nan, targets, 8, shuffle=False))
    ends, callback = [], Callback()
    callback.on_fit_end = lambda trainer, error: ends.append(error)
    with (
        pytest.raises(OSError, match="the network is gone") as gone,
        pytest.warns(UserWarning, match="the network is gone"),
    ):
        make(net(), loggers=[Logger(), Logger()], callbacks=[callback]).fit(data())
    assert ends == [gone.value]


def test_a_trace_that_the_run_is_too_short_for_is_missed_aloud(tmp_path):
    with pytest.warns(UserWarning, match="no trace was written: the run made 3 updates and profile_wait is 5"):
        make(net(), profile=Profile(tmp_path)).fit(data())


def test_lines_off_a_terminal_tell_how_long_it_will_take(capsys):
    progress = Progress("run", epochs=2, steps=4, done=2)
    progress.step_done(progress._next, lambda: "loss 1")  # 30 s for one step; the two before were another process's
    assert capsys.readouterr().out == "run  step 3/8  loss 1  0:02:30 left\n"


class Tee:
    """What scripts put in the place of the standard output to keep a copy."""

    def __init__(self):
        self.write, self.flush = [].append, int


@pytest.mark.parametrize("output", [None, Tee()])
def test_progress_needs_no_standard_output(monkeypatch, output):
    monkeypatch.setattr(sys, "stdout", output)
    with Progress("run", epochs=1, steps=1) as progress:
        progress.step_done(time.perf_counter(), str)
        progress.line("done")


def test_a_terminal_shows_brackets_as_they_are(monkeypatch):
    pytest.importorskip("rich")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")  # a dumb one is shown whole lines alone
    with Progress("net[/b]", epochs=1, steps=2) as progress:
        progress.line("from runs/[exp]/a")
    assert "net[/b]" in terminal.getvalue() and "from runs/[exp]/a" in terminal.getvalue()


def test_a_trace_and_a_table_show_the_spans(tmp_path):
    run = make(net(), profile=Profile(tmp_path, profile_wait=1, profile_steps=2), epochs=2)
    run.fit(data(), data())
    names = {event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"data", "copy", "forward", "backward", "optimizer"} <= names
    assert "backward" in (tmp_path / "table.txt").read_text()
    seconds = dict(run.spans.seconds)
    assert seconds["forward"] > 0 and seconds["backward"] > 0
    time.sleep(0.01)
    run.spans.enter("other")
    assert run.spans.seconds == seconds  # nothing is counted after the end
    run.spans.seconds |= {"forward": 3 * sum(seconds.values())}
    assert "forward 7" in str(run.spans)


@pytest.mark.parametrize("failing", ["", "the preparation", "a step"])
def test_on_a_gpu_every_span_is_a_range_of_nvtx_that_ends(tmp_path, monkeypatch, failing):
    """The CPU's PyTorch has no NVTX: calls are noted in its place."""
    calls = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append(None))
    run = make(net(), profile=Profile(tmp_path, profile_wait=0, profile_steps=1), epochs=1)
    run.spans = Spans(torch.device("cuda"))

    def fail(*args):
        raise ValueError("it fails")

    if failing:
        owner = (Saving, "resume") if failing == "the preparation" else (run, "training_step")
        monkeypatch.setattr(*owner, fail)
    with pytest.raises(ValueError, match="it fails") if failing else contextlib.nullcontext():
        run.fit(data(), data())
    assert set(calls[1::2]) == {None} and None not in calls[::2] and len(calls) % 2 == 0  # one ends, then one begins
    names, step = calls[::2], ["copy", "forward", "backward", "data", "optimizer"]
    if not failing:
        at = names.index("copy")
        assert names[at : at + len(step)] == step and {"evaluation", "checkpoint"} <= set(names)
    assert make(net()).spans._nvtx is False


def test_a_model_that_is_wrapped_is_refused_with_the_reason():
    with pytest.raises(InputError, match="one process per device instead"):
        make(nn.DataParallel(net()))
    with pytest.raises(InputError, match=r'the Trainer compiles it itself with TrainConfig\(compile="default"\)'):
        make(torch.compile(net()))


@pytest.mark.parametrize(
    ("layer", "kind", "message"),
    [
        (lambda: nn.Linear(16, 4), torch.optim.LBFGS, r"LBFGS.step\(\) asks for more than a gradient \(.*'closure'\)"),
        (lambda: nn.LazyLinear(4), torch.optim.SGD, r"1 \(LazyLinear\) takes its shape from the first batch: run one"),
        (lambda: nn.LazyBatchNorm1d(), torch.optim.SGD, r"1 \(LazyBatchNorm1d\) takes its shape from"),
        (
            lambda: nn.Linear(16, 4, device="meta"),
            torch.optim.SGD,
            r"1 \(Linear\) is on the meta device, .*: make room with model.to_empty\(device='cpu'\) and load",
        ),
        (lambda: nn.Embedding(4, 4, sparse=True), torch.optim.SGD, r"1 \(Embedding\) makes sparse gradients"),
        (lambda: nn.EmbeddingBag(4, 4, sparse=True), optim.SGD, r"1 \(EmbeddingBag\) makes sparse gradients"),
    ],
)
def test_what_the_loop_cannot_train_is_refused_before_the_run(layer, kind, message):
    model = nn.Sequential(nn.Flatten(), layer(), nn.Linear(4, 4))
    with pytest.raises(InputError, match=message) as error:
        make(model, kind(model.parameters(), lr=0.1))
    assert "\n" not in str(error.value)


def test_sparse_gradients_that_nobody_trains_are_no_hindrance():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4)
            self.table.requires_grad_(False)

        def forward(self, x):
            return self.head(self.table((x.flatten(1)[:, :3] > 0).long()).mean(1))

    make(Tokens()).fit(data(), data())


def test_compiling_keeps_the_names(tmp_path):
    model = net()
    make(model, compile="default", weights=tmp_path / "w.pt").fit(data(16), data(16))
    net().load_state_dict(torch.load(tmp_path / "w.pt"))


_COMPILED = """
import torch
from torch import nn
from torch._dynamo.utils import counters
from fusedtrain.nn import SqueezeExcite
from fusedtrain.train import TrainConfig, Trainer

for _ in range(2):
    model = nn.Sequential(SqueezeExcite(4), nn.Flatten())  # nothing that a C++ compiler is needed for
    config = TrainConfig(epochs=1, compile="default")
    trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), config)
    trainer.fit([(torch.randn(4, 4, 1, 1), torch.arange(4))] * 2)
    torch._dynamo.reset()
    print(*(counters["aot_autograd"][name] for name in ("total", "autograd_cache_hit", "autograd_cache_bypass")))
"""


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="PyTorch keeps no graphs with autograd Functions before 2.12")
def test_a_run_compiles_one_graph_and_finds_it_when_it_begins_again(tmp_path):
    done = harness.run_python("-c", _COMPILED, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    counted = [line for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert counted == ["1 0 0", "2 1 0"], done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulation": 0}, "accumulate must be at least 1, got 0"),
        ({"accumulation": 2.5}, "accumulate must be a whole number, got 2.5"),
        ({"epochs": 1.5}, "epochs must be a whole number, got 1.5"),
        ({"schedule": "wave"}, "schedule must be one of cosine, .*, got 'wave'"),
        ({"early_stopping": EarlyStopping("f1")}, "monitor must be one of loss, accuracy, got 'f1'"),
        ({"nonfinite": "ignore"}, "nonfinite must be raise or skip, got 'ignore'"),
        ({"max_grad_norm": -1.0}, "max_grad_norm must be positive, got -1.0"),
        ({"weights": "."}, "weights must name a file, . is a folder"),
        ({"best_weights": "/"}, "best_weights must name a file, / is a folder"),
        ({"weights": 300 * "w"}, "weights must have a name of at most 220 bytes, got wwww"),
        ({"distributed": "fsdp"}, r"distributed must be Distributed\(...\), got 'fsdp'"),
        ({"logging": "logs"}, r"logging must be Logging\(...\), got 'logs'"),
        ({"seed": 2**64}, "seed must be a whole number between .*, got 18446744073709551616"),
        ({"seed": None}, "seed must be a whole number between .*, got None"),
        ({"seed": 1.5}, "seed must be a whole number between .*, got 1.5"),
        ({"epochs": "5"}, "epochs must be a whole number, got '5'"),
        ({"device": None}, "device must be auto, cpu or cuda, got 'None'"),
        ({"scheduler": "cosine"}, "scheduler must be of torch.optim.lr_scheduler, .*, got 'cosine'"),
        ({"scheduler": lambda optimizer, updates: None}, "scheduler must be .* got None"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        make(net(), **options).fit(data(), data())


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        (Checkpoint, "keep", 2.5),
        (Checkpoint, "every_steps", 1.5),
        (Logging, "log_every", 2.5),
        (Precision, "growth_interval", 1.5),
        (Profile, "profile_wait", 0.5),
        (Profile, "profile_steps", 1.5),
        (Schedule, "step_epochs", 1.5),
        (Schedule, "patience", 0.5),
        (EarlyStopping, "stop_patience", 1.5),
        (TrainConfig, "max_skipped", 2.5),
    ],
)
def test_counts_are_whole_numbers(part, name, value):
    with pytest.raises(InputError, match=f"{name} must be a whole number, got {value}"):
        part(**{name: value})


def test_milestones_are_whole_epochs():
    with pytest.raises(InputError, match=r"a milestone must be a whole number, got 1\.5"):
        Schedule("multistep", milestones=(1, 1.5))


@pytest.mark.parametrize(("part", "name"), [(Logging, "loggers"), (ActivationCheckpointing, "checkpoint_modules")])
def test_a_text_is_no_list_of_names(part, name):
    with pytest.raises(InputError, match=f"{name} must be a list of .*, got 'jsonl'"):
        part(**{name: "jsonl"})


@pytest.mark.parametrize("timeout", [0, math.inf, math.nan, 1e12])
def test_a_time_that_no_clock_can_wait_for_is_refused(timeout):
    with pytest.raises(InputError, match=f"timeout must be positive and below 1e9 seconds, got {timeout}"):
        Distributed(timeout=timeout)


def test_a_power_that_would_end_in_a_division_by_zero_is_refused():
    with pytest.raises(InputError, match=r"power must be at least 0, got -1\.0"):
        Schedule("polynomial", power=-1.0)


@pytest.mark.parametrize("kind", [torch.optim.SGD, optim.SGD])
def test_an_optimizer_that_a_scheduler_has_wrapped_is_taken(kind):
    model = net()
    optimizer = kind(model.parameters(), lr=0.5)
    make(model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5), epochs=4).fit(data())
    assert optimizer.param_groups[0]["lr"] == 0.5 * 0.5**6  # 12 updates
    make(model, optimizer).fit(data())


def test_shorthands_are_the_parts():
    config = TrainConfig(precision="bf16", accumulation=4, schedule="step", checkpoint="folder")
    assert config.precision == Precision("bf16") and config.accumulation == Accumulation(4)
    assert config.schedule == Schedule("step") and config.checkpoint == Checkpoint("folder")


# --- what changes while a run goes on, or between two -----------------------------------------------------------------


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", ["plateau", "cosine"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, optim.SGD])
def test_parameters_that_join_the_optimizer_later_train_like_the_others(kind, name, frozen):
    """Also where they had gradients before, which nobody used."""
    factors = [0.5 + 0.5 * math.cos(math.pi * i / 9) if name == "cosine" else 1.0 for i in range(9)]

    def unfreeze(model, optimizer):
        model[1].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[1].parameters())})

    class Unfreeze(Callback):
        def on_epoch_start(self, trainer, epoch):
            if epoch == 1:
                unfreeze(model, optimizer)

    def start():
        model = net()
        model[1].requires_grad_(not frozen)
        return model, kind(model[4].parameters(), lr=0.5)

    plain, stock = start()
    average = {name: p.detach().clone() for name, p in plain.named_parameters()}
    for step, (inputs, targets) in enumerate(3 * list(data())):
        if step == 3:
            unfreeze(plain, stock)
        for group in stock.param_groups:
            group["lr"] = 0.5 * factors[step]
        nn.functional.cross_entropy(plain(inputs), targets).backward()
        stock.step()
        plain.zero_grad()
        for own, p in zip(average.values(), plain.parameters()):
            own.lerp_(p.detach(), 0.25)
    model, optimizer = start()
    schedule = Schedule(name, warmup_epochs=0, patience=0)
    run = make(model, optimizer, epochs=3, callbacks=[Unfreeze()], schedule=schedule, ema_decay=0.75)
    run.fit(data())
    assert torch.equal(weights(model), weights(plain))
    with run.averaged_weights():
        for name, p in model.named_parameters():
            harness.assert_as_good_as_torch(p, average[name], average[name].double(), name)


@pytest.mark.parametrize("at", [3, 4, 6, 8])  # three batches an epoch, and its end; from the second on others learn
@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.Adam, optim.Adam])
def test_parameters_that_have_joined_do_so_again_where_a_run_goes_on(tmp_path, kind, once, at):
    class Unfreeze(Callback):
        def on_epoch_start(self, trainer, epoch):
            groups = trainer.optimizer.param_groups
            seen.append(len(groups))
            if epoch == 1 if once else (epoch >= 1 and len(groups) == 1):
                trainer.model[1].requires_grad_(True)
                trainer.optimizer.add_param_group({"params": list(trainer.model[1].parameters()), "lr": 0.05})

    def run(*callbacks, **options):
        model = net()
        model[1].requires_grad_(False)
        options |= {"schedule": Schedule("cosine", warmup_epochs=0), "ema_decay": 0.75, "epochs": 3}
        run = make(model, kind(model[4].parameters(), lr=0.1), callbacks=[Unfreeze(), *callbacks], **options)
        run.fit(data())
        with run.averaged_weights():
            averages = weights(model)
        return weights(model), averages, [group["lr"] for group in run.optimizer.param_groups]

    seen = []
    whole = run()
    assert seen == [1, 1, 2]
    seen.clear()
    with pytest.raises(SystemExit):
        run(Stop(at), checkpoint=Checkpoint(tmp_path))
    rest = run(checkpoint=Checkpoint(tmp_path))
    assert all(map(torch.equal, rest[:2], whole[:2])) and rest[2] == whole[2]
    again = at // 4
    assert seen == [1, 1, 2][: again + 1] + [1, 1, 2][again:]


def test_parameters_that_have_joined_must_be_the_models(tmp_path):
    class Add(Callback):
        def on_epoch_start(self, trainer, epoch):
            trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})

    make(net(), checkpoint=Checkpoint(tmp_path), callbacks=[Add()]).fit(data())
    with pytest.raises(InputError, match=r"groups joined the optimizer .* parameters that this model does not have"):
        make(net(), checkpoint=Checkpoint(tmp_path), epochs=2).fit(data())


@pytest.mark.parametrize("extras", [{}, {"zero_grads": True}], ids=str)
def test_parameters_that_are_frozen_stay(extras):
    model, seen = net(), []

    class Freeze(Callback):
        def on_epoch_start(self, trainer, epoch):
            model[1].requires_grad_(epoch == 0)
            seen.append(weights(model[1]))

    optimizer = optim.AdamW(model.parameters(), lr=0.1, **extras)
    make(model, optimizer, epochs=3, callbacks=[Freeze()]).fit(data())
    assert torch.equal(seen[1], seen[2]) and not torch.equal(seen[0], seen[1])


def test_gradients_that_the_step_zeroes_are_not_zeroed_again(monkeypatch):
    model, calls = net(), []
    optimizer = optim.AdamW(model.parameters(), zero_grads=True)
    monkeypatch.setattr(optimizer, "zero_grad", lambda set_to_none=True: calls.append(set_to_none))
    make(model, optimizer).fit(data())
    assert False not in calls and all(not p.grad.any() for p in model.parameters())


def test_gradients_of_what_another_optimizer_steps_are_summed_until_it_does():
    class Other(Callback):
        def on_fit_end(self, trainer, error):
            self.gradient = trainer.model[1].weight.grad.clone()

    plain, model, other = net(), net(), Other()
    for inputs, targets in data():
        nn.functional.cross_entropy(plain(inputs), targets).backward()
    make(model, torch.optim.SGD(model[4].parameters(), lr=0.0), callbacks=[other]).fit(data())
    assert torch.equal(other.gradient, plain[1].weight.grad)


def test_a_cycle_peaks_at_the_rate_of_the_cycle_before_or_at_one_that_was_set_since():
    optimizer = torch.optim.SGD(net().parameters(), lr=0.5)
    for rate, peak in ((None, 0.5), (None, 0.5), (0.01, 0.01)):
        if rate is not None:
            optimizer.param_groups[0]["lr"] = rate
        cycle = Schedule("onecycle").build(optimizer, 2, 5)
        rates = [optimizer.param_groups[0]["lr"]]
        for _ in range(10):
            optimizer.step()
            cycle.step()
            rates.append(optimizer.param_groups[0]["lr"])
        assert max(rates) == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize(("reached", "updates", "rate"), [(76, 2, 1.0), (96, 10, 1.0), (40, 10, 0.5), (150, 2, 0.25)])
def test_a_warm_up_that_goes_on_with_other_batches_ends_at_the_peak(reached, updates, rate):
    """Of 100 updates before."""
    schedule, optimizer = Schedule("plateau", warmup_epochs=1), torch.optim.SGD(net().parameters(), lr=1.0)
    before = schedule.build(optimizer, 4, 100)
    for _ in range(reached):
        before.step()
    if reached > 100:
        optimizer.param_groups[0]["lr"] = 0.25  # as a plateau has left it
    state, saved = before.state_dict(), optimizer.param_groups[0]["lr"]
    optimizer = torch.optim.SGD(net().parameters(), lr=1.0)
    scheduler = schedule.build(optimizer, 4, updates)
    optimizer.param_groups[0]["lr"] = saved
    load(scheduler, state, (100, 4), (updates, 4))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_plateau_lowers_the_rates_of_groups_that_have_joined_and_none_below_its_least():
    model = net()
    optimizer = torch.optim.SGD(model[1].parameters(), lr=1.0)
    plateau = Schedule("plateau", patience=0, gamma=0.5, min_factor=0.25, warmup_epochs=1).build(optimizer, 4, 2)
    optimizer.add_param_group({"params": model[4].parameters(), "lr": 8.0})
    join(plateau, optimizer)
    rates = []
    for epoch in range(6):
        rates += [[group["lr"] for group in optimizer.param_groups]]
        plateau.step() if epoch < 2 else plateau.observe(1.0)
    assert rates == [[0.5, 4.0], [1.0, 8.0], [1.0, 8.0], [1.0, 8.0], [0.5, 4.0], [0.25, 2.0]]
    plateau.observe(1.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 2.0]


@pytest.mark.parametrize("before", ["cosine", "onecycle", "plateau"])
@pytest.mark.parametrize("after", ["cosine", "onecycle", "plateau", "step"])
@pytest.mark.parametrize("chosen", [None, 0.02])
def test_the_next_run_peaks_at_the_rate_of_the_run_before_or_at_one_that_was_set_since(before, after, chosen):
    model = net()
    optimizer, rates = torch.optim.SGD(model.parameters(), lr=0.1), Rates()
    make(model, optimizer, epochs=4, schedule=Schedule(before, warmup_epochs=0, patience=0, gamma=0.5)).fit(data())
    if chosen is not None:
        optimizer.param_groups[0]["lr"] = chosen
    make(model, optimizer, epochs=4, callbacks=[rates], schedule=Schedule(after, warmup_epochs=0)).fit(data())
    assert max(rates.seen.values()) == pytest.approx(chosen or 0.1, rel=0.05)


def test_an_optimizer_is_given_back_as_it_was_constructed():
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1, max_grad_norm=5.0)
    given = dict(optimizer._options)
    first = make(model, optimizer, max_grad_norm=1e-3, ema_decay=0.9)
    first.fit(data())
    assert optimizer._options == given | {"ema_decay": 0.9}
    with first.averaged_weights():
        averaged = weights(model).clone()
    assert not torch.equal(averaged, weights(model))
    other = copy.deepcopy(model)
    second = make(model, optimizer)
    assert second.averages is None
    second.fit(data())
    make(other, optim.SGD(other.parameters(), lr=0.1, max_grad_norm=5.0)).fit(data())
    assert torch.equal(weights(model), weights(other))
    assert optimizer._options == given and copy.deepcopy(optimizer)._given == given


def test_a_run_that_is_refused_leaves_its_optimizer_alone():
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    given, options = dict(optimizer._options), {"max_grad_norm": 1e-3}
    with pytest.raises(InputError, match="cuda_graphs needs a GPU"):
        make(model, optimizer, cuda_graphs=True, ema_decay=0.9, **options)
    assert optimizer._options == given
    run = make(model, optimizer, **options)
    assert optimizer._options == given
    with pytest.raises(InputError, match="the training data are an iterator"):
        run.fit(iter(data()))
    assert optimizer._options == given


class Nothing(nn.Module):
    def forward(self, x):
        return 0 * x


@pytest.mark.parametrize("rate", [0.1, 0.01])
def test_a_plateau_that_goes_on_takes_the_options_of_the_run_that_goes_on(tmp_path, rate, recwarn):
    def run(epochs, rate, **options):
        model, rates = nn.Sequential(net(), Nothing()), Rates()
        schedule = Schedule("plateau", warmup_epochs=0, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        kept = Checkpoint(tmp_path)
        make(model, optimizer, epochs=epochs, callbacks=[rates], schedule=schedule, checkpoint=kept).fit(data(8))
        return list(rates.seen.values())

    assert run(2, 0.1, patience=100) == [0.1, 0.1]
    assert run(6, rate, patience=0, gamma=0.5, min_factor=0.25) == pytest.approx([0.1, 0.05, 0.025, 0.025])
    told = [str(warning.message) for warning in recwarn if "is without effect" in str(warning.message)]
    assert bool(told) == (rate != 0.1) and all("goes on with lr 0.1 " in text for text in told)


@pytest.mark.parametrize("kind", [torch.optim.SGD, optim.SGD])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_loss_that_is_not_finite_ends_a_run_whatever_its_precision(kind, precision):
    inputs, targets = samples(24)
    inputs[13] = math.nan
    model = net()
    run = make(model, kind(model.parameters(), lr=0.1), precision=precision)
    message = "step 2 of epoch 1 was not made: input 0 of the batch is not finite for samples 5 of the batch"
    with pytest.raises(NonFiniteError, match=message):
        run.fit(Batches(inputs, targets, 8, shuffle=False))


class Stream(IterableDataset):
    def __iter__(self):
        return zip(*samples(24))


class Again:
    """Batches of a loader, without what else it has."""

    def __init__(self, *arguments, **options):
        self._loader = DataLoader(*arguments, **options)

    def __iter__(self):
        return iter(self._loader)


@pytest.mark.parametrize("kind", [DataLoader, fdata.loader, Again])
def test_data_without_a_length_train_and_are_refused_where_the_rate_depends_on_it(kind):
    assert len(make(net(), epochs=2).fit(kind(Stream(), batch_size=8, num_workers=0)).step_losses) == 6
    for schedule, message in (
        (Schedule("constant"), r"a warm-up of 1.0 epochs needs training data with a length; 0 goes without"),
        (Schedule("cosine", warmup_epochs=0), "the schedule cosine needs training data with a length"),
    ):
        with pytest.raises(InputError, match=message):
            make(net(), schedule=schedule).fit(kind(Stream(), batch_size=8, num_workers=0))
    make(net(), schedule=Schedule("constant", per="epoch")).fit(kind(Stream(), batch_size=8, num_workers=0))


def test_a_schedule_that_takes_no_more_groups_says_so():
    class Add(Callback):
        def on_epoch_start(self, trainer, epoch):
            trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    with pytest.raises(InputError, match="the schedule onecycle takes no groups that join the optimizer"):
        make(net(), callbacks=[Add()], schedule="onecycle").fit(data())


@pytest.mark.parametrize("name", ["cosine", "onecycle", "plateau"])
@pytest.mark.parametrize("fits", [1, 2])
def test_rates_that_are_tensors_move_like_numbers_and_stay_tensors(name, fits):
    seen = []
    for rate in (0.5, torch.tensor(0.5)):
        model, rates = net(), Rates()
        optimizer = optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        run = make(model, optimizer, epochs=4, callbacks=[rates], schedule=Schedule(name))
        for _ in range(fits):
            rates.seen.clear()
            run.fit(data())
        assert type(optimizer.param_groups[0]["lr"]) is type(rate)
        seen.append(list(rates.seen.values()))
    assert seen[1] == pytest.approx(seen[0], rel=2.0**-22) and max(seen[0]) == pytest.approx(0.5, rel=0.05)


class Tokens(Trainer):
    """A mean over the targets that count: of none it is NaN."""

    def training_step(self, batch):
        return nn.functional.cross_entropy(self.forward(batch[0]), batch[1], ignore_index=-1)

    def validation_step(self, batch):
        return {"loss": torch.zeros(())}

    def weight(self, batch):
        return int((batch[1] >= 0).sum())


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("empty", [0, 1, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_batches_of_no_weight_change_nothing(accumulate, empty, precision):
    inputs, targets = samples(24)
    targets[8 * empty : 8 * empty + 8] = -1
    feed = list(zip(inputs.split(8), targets.split(8)))
    without = [batch for index, batch in enumerate(feed) if index != empty]
    runs = []
    for batches in (feed, without):
        run = make(net(), cls=Tokens, accumulation=accumulate, precision=precision)
        history = run.fit(batches)
        assert run.skipped == 0
        runs.append((weights(run.model), history.epochs[0].train_loss))
    harness.assert_as_good_as_torch(runs[0][0], runs[1][0], runs[1][0].double(), "weights")
    assert runs[0][1] == pytest.approx(runs[1][1])


def test_a_class_of_torch_is_made_with_the_number_of_updates():
    run = make(net(), scheduler=torch.optim.lr_scheduler.CosineAnnealingLR, epochs=2)
    run.fit(data())
    assert run.schedule.T_max == 6 and run.optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


def test_a_scheduler_of_another_optimizer_is_refused():
    other = torch.optim.SGD(net().parameters(), lr=0.1)
    with pytest.raises(InputError, match="StepLR moves the rates of another optimizer than the Trainer's"):
        make(net(), scheduler=torch.optim.lr_scheduler.StepLR(other, 1)).fit(data())


def test_a_scheduler_that_asks_for_more_than_torchs_do_is_refused_before_the_first_step():
    class ByEpoch:  # as timm's
        def __init__(self, optimizer, updates):
            pass

        def step(self, epoch, metric=None):
            pass

    with pytest.raises(InputError, match=r"ByEpoch.step\(\) asks for arguments: take one of torch.optim.lr_scheduler"):
        make(net(), scheduler=ByEpoch).fit(data())


def test_an_update_that_is_left_out_after_a_resume_leaves_the_buffers_too(tmp_path):
    class Bad(Trainer):
        def training_step(self, batch):
            return super().training_step(batch) * (math.nan if self.feed.used == 3 else 1.0)

    def run(folder, callbacks=()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        options = {"accumulation": 2, "nonfinite": "skip", "checkpoint": Checkpoint(folder), "callbacks": callbacks}
        made = make(model, cls=Bad, **options)
        made.fit(data(64))
        return made

    whole = run(tmp_path / "whole")
    with pytest.raises(SystemExit):
        run(tmp_path / "cut", [Stop(3)])
    again = run(tmp_path / "cut")
    assert again.skipped == 1
    own, expected = again.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(own[name], expected[name]) for name in expected)


def test_another_number_of_micro_batches_does_not_go_on_amid_an_update(tmp_path):
    with pytest.raises(SystemExit):
        resumable(tmp_path, callbacks=[Stop(2)]).fit(data())
    with pytest.raises(InputError, match="the checkpoint ends amid an update of 3 micro-batches: go on with as many"):
        resumable(tmp_path, accumulation=2).fit(data())


def test_gradients_from_before_the_run_are_not_of_its_first_update():
    losses = []
    for before in (False, True):
        model = net()
        run = make(model, accumulation=2)
        if before:  # of a look at the model, or of a run that failed amid an update
            nn.functional.cross_entropy(model(samples(8)[0]), samples(8)[1]).backward()
            run.group.nominal = 8.0
            run.group.add(8.0)
        losses.append(run.fit(data(), data()).epochs[0].valid_loss)
    assert losses[0] == losses[1]


def test_a_run_that_goes_on_with_another_metric_looks_for_its_best_anew(tmp_path):
    def go_on(epochs: int, stopping: EarlyStopping):
        best = tmp_path / f"{stopping.monitor}.pt"
        run = make(net(), epochs=epochs, early_stopping=stopping, checkpoint=tmp_path / "c", best_weights=best)
        run.fit(data(), data())
        return run.best.state_dict(), best.exists()

    (loss, written) = go_on(2, EarlyStopping())
    assert loss["value"] > 1.0 and written  # more than any accuracy
    assert go_on(2, EarlyStopping())[0] == loss
    accuracy, written = go_on(4, EarlyStopping("accuracy", "max"))
    assert accuracy["value"] <= 1.0 and accuracy["epoch"] >= 3 and written


def test_whether_more_is_better_follows_from_the_name_of_the_metric():
    assert EarlyStopping().direction == EarlyStopping("train_loss").direction == "min"
    assert EarlyStopping("accuracy").direction == EarlyStopping("Acc@5").direction == "max"
    assert EarlyStopping("accuracy", "min").direction == "min" and EarlyStopping("f1", "max").direction == "max"

    class Metrics(Trainer):
        values = iter([0.3, 0.5, 0.4])

        def evaluate(self, batches):
            return {"loss": 1.0, "accuracy": next(self.values)}

    run = make(net(), cls=Metrics, epochs=3, early_stopping=EarlyStopping("accuracy"))
    run.fit(data(), data())
    assert run.best.epoch == 2

    class Named(Trainer):
        def validation_step(self, batch):
            return {"perplexity": torch.ones(())}

    with pytest.raises(InputError, match="mode must be min or max for 'perplexity': its name does not tell"):
        make(net(), cls=Named, early_stopping=EarlyStopping("perplexity")).fit(data(), data())


def test_an_epoch_without_the_monitored_metric_is_not_the_best():
    class Rare(Trainer):
        def validation_step(self, batch):
            named = self.feed is None or self.feed.epoch == 0
            return {"loss": 100.0} if named else {"other": 1.0}

    run = make(net(), cls=Rare, epochs=4, early_stopping=EarlyStopping(stop_patience=2))
    assert len(run.fit(data(), data()).epochs) == 3  # no training loss is taken for the metric
    assert run.best.epoch == 1


class Pair(typing.NamedTuple):
    logits: torch.Tensor
    auxiliary: torch.Tensor


@dataclasses.dataclass(frozen=True)
class FrozenPair:
    logits: torch.Tensor
    auxiliary: torch.Tensor


@pytest.mark.parametrize("kind", [Pair, FrozenPair, lambda **parts: collections.defaultdict(list, parts)])
def test_outputs_with_names_keep_them(kind):
    halves = kind(logits=torch.ones(2, dtype=torch.float16), auxiliary=torch.ones(2, dtype=torch.bfloat16))
    outputs = train_precision.full(halves)
    assert type(outputs) is type(halves)
    parts = outputs if isinstance(outputs, dict) else {name: getattr(outputs, name) for name in Pair._fields}
    assert {name: t.dtype for name, t in parts.items()} == dict.fromkeys(Pair._fields, torch.float32)
    assert (halves["logits"] if isinstance(halves, dict) else halves.logits).dtype == torch.float16  # as it was


def test_the_seconds_before_an_interruption_count(tmp_path):
    class Slow(Trainer):
        def training_step(self, batch):
            time.sleep(0.05)
            return super().training_step(batch)

    with pytest.raises(SystemExit):
        make(net(), cls=Slow, checkpoint=Checkpoint(tmp_path), callbacks=[Stop(10)]).fit(data(96))
    (epoch,) = make(net(), cls=Slow, checkpoint=Checkpoint(tmp_path)).fit(data(96)).epochs
    assert epoch.seconds >= 12 * 0.05


def test_the_best_weights_are_there_when_the_checkpoint_says_so(tmp_path, monkeypatch):
    """A run that is killed while it writes one of them has both in the end."""
    options = {"epochs": 1, "checkpoint": Checkpoint(tmp_path / "c"), "best_weights": tmp_path / "best.pt"}

    class Killed(BaseException):
        pass

    def killed(self, path):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(saving.Saving, "_save_weights", killed)
        make(net(), **options).fit(data(), data())
    run = make(net(), **options)
    history = run.fit(data(), data())
    best = net()
    best.load_state_dict(torch.load(tmp_path / "best.pt"))
    losses = [epoch.metrics["loss"] for epoch in history.epochs]
    assert make(best).evaluate(data())["loss"] == min(losses)


def test_what_a_killed_run_left_of_its_weights_goes(tmp_path):
    left = [tmp_path / name for name in (".w.pt.12-34.tmp", ".best[1].pt.56-7.tmp", ".other.pt.8-9.tmp")]
    for path in left:
        path.touch()
    make(net(), weights=tmp_path / "w.pt", best_weights=tmp_path / "best[1].pt").fit(data())
    assert {path.name for path in tmp_path.iterdir()} == {"w.pt", "best[1].pt", left[2].name}


@pytest.mark.parametrize("kind", [torch.optim.SGD, optim.SGD])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_averages_are_read_from_a_checkpoint(kind, strategy, tmp_path):
    model = net()
    options = {"ema_decay": 0.9, "checkpoint": Checkpoint(tmp_path / "c"), "weights": tmp_path / "w.pt"}
    options["distributed"] = Distributed(strategy)
    make(model, kind(model.parameters(), lr=0.5), **options).fit(data())
    (checkpoint,) = (tmp_path / "c").glob("*-step-3.safetensors")
    found, expected = read_weights(checkpoint), read_weights(tmp_path / "w.pt")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert not torch.equal(found["1.weight"], model[1].weight)


@pytest.mark.parametrize("kind", [torch.optim.SGD, optim.SGD])
def test_averages_that_a_resumed_run_is_the_first_to_keep_begin_with_its_weights(kind, tmp_path):
    trained, model = net(), net(seed=5)
    make(trained, kind(trained.parameters(), lr=0.5), checkpoint=Checkpoint(tmp_path)).fit(data())
    never = math.nextafter(1.0, 0.0)  # such averages stay what they began with, bit by bit
    options = {"epochs": 2, "ema_decay": never, "checkpoint": Checkpoint(tmp_path)}
    run = make(model, kind(model.parameters(), lr=0.5), **options)
    run.fit(data())
    with run.averaged_weights():
        assert torch.equal(weights(model), weights(trained))


@pytest.mark.parametrize("kind", [torch.optim.SGD, optim.SGD])
def test_averages_that_a_run_has_done_without_begin_anew(kind, tmp_path):
    never = math.nextafter(1.0, 0.0)
    for epochs, decay in ((1, 0.9), (2, None), (3, never)):
        model = net()
        options = {"epochs": epochs, "ema_decay": decay, "checkpoint": Checkpoint(tmp_path)}
        run = make(model, kind(model.parameters(), lr=0.5), **options)
        run.fit(data())
        if decay is None:
            trained = weights(model)
    with run.averaged_weights():
        assert torch.equal(weights(model), trained)


class Temperature(nn.Module):
    """A loss that learns."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(self.scale * outputs, targets)


@pytest.mark.parametrize(("at", "strategy"), [(4, "ddp"), (8, "ddp"), (4, "fsdp")])
def test_parameters_of_a_loss_are_saved_too(tmp_path, at, strategy):
    def run(folder, callbacks=()):
        model, loss = net(), Temperature()
        optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.5)
        options = {"epochs": 3, "accumulation": 2, "checkpoint": Checkpoint(folder)}
        options["distributed"] = Distributed(strategy)
        config = TrainConfig(device="cpu", schedule=Schedule("constant", warmup_epochs=0), **options)
        Trainer(model, loss, optimizer, config, callbacks=callbacks).fit(data())
        return loss.scale.item()

    whole = run(tmp_path / "whole")
    with pytest.raises(SystemExit):
        run(tmp_path / "cut", [Stop(at)])
    assert run(tmp_path / "cut") == whole != 1.0


class Centred(nn.Module):
    """A loss that gathers the mean of the outputs, from the first batch on."""

    def __init__(self, weight: float):
        super().__init__()
        self.register_buffer("centre", None)
        self.register_buffer("weight", torch.full((4,), weight))

    def forward(self, outputs, targets):
        centre = 0.0 if self.centre is None else self.centre
        if torch.is_grad_enabled():
            self.centre = 0.9 * centre + outputs.detach().mean(0)
        return self.weight[0] * nn.functional.cross_entropy(outputs - centre, targets, self.weight)


@pytest.mark.parametrize("at", [3, 4])
@pytest.mark.parametrize("options", [{}, {"distributed": Distributed("fsdp")}, {"nonfinite": "skip"}], ids=str)
def test_what_a_loss_gathers_is_saved_too_and_its_options_are_not(tmp_path, at, options):
    def run(folder, weight=0.5, **more):
        model, loss = net(), Centred(weight)
        config = TrainConfig(
            epochs=3, device="cpu", accumulation=2, checkpoint=Checkpoint(tmp_path / folder), **options
        )
        Trainer(model, loss, torch.optim.SGD(model.parameters(), lr=0.5), config, **more).fit(data(40))
        return loss

    whole = run("whole").centre
    with pytest.raises(SystemExit):
        run("cut", callbacks=[Stop(at)])
    assert torch.equal(run("cut").centre, whole) and run("cut", weight=2.0).weight[0] == 2.0
    with pytest.raises(InputError, match=r"is of another model or optimizer: the loss has no buffer centre$"):
        make(net(), epochs=4, accumulation=2, checkpoint=Checkpoint(tmp_path / "cut"), **options).fit(data(40))


def test_an_update_that_is_left_out_leaves_the_loss_as_it_was_too():
    inputs, targets = samples(24)
    inputs[8:16] = math.nan
    model, loss = net(), Centred(0.5)
    config = TrainConfig(epochs=1, device="cpu", nonfinite="skip")
    run = Trainer(model, loss, torch.optim.SGD(model.parameters(), lr=0.5), config)
    run.fit(Batches(inputs, targets, 8, shuffle=False))
    assert run.skipped == 1 and loss.centre.isfinite().all()


def test_the_rate_beside_a_loss_is_that_of_its_update(tmp_path):
    model, schedule = net(), Schedule("polynomial", warmup_epochs=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = make(model, optimizer, schedule=schedule, logging=Logging(tmp_path, log_every=1))
    run.fit(Batches(*samples(32), 8, shuffle=False))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [line["lr"] for line in lines if "lr" in line] == [0.5, 0.375, 0.25, 0.125]
    assert "lr 1.25e-01" in run.numbers.shown()


def test_of_rates_by_layer_the_one_that_was_asked_for_is_logged(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(parameter_groups(model, lr=0.5, layer_decay=0.5))
    schedule = Schedule("polynomial", warmup_epochs=0)
    make(model, optimizer, schedule=schedule, logging=Logging(tmp_path, log_every=1)).fit(data(32))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [line["lr"] for line in lines if "lr" in line] == [0.5, 0.375, 0.25, 0.125]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_learning_rates_that_are_tensors_are_logged_and_shown(tmp_path, shape):
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=torch.full(shape, 0.25))
    run = make(model, optimizer, logging=Logging(tmp_path, log_every=1))
    run.fit(data())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [line["lr"] for line in lines if "lr" in line] == [0.25] * 3
    assert "lr 2.50e-01" in run.numbers.shown()


def test_what_was_logged_is_never_half_rewritten(tmp_path, monkeypatch):
    def log(step: int) -> list[int]:
        (logger,) = Logging(tmp_path, log_every=1).open({}, step)
        logger.log(step + 1, {"loss": 1.0})
        logger.close()
        return [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()]

    assert [log(0), log(1), log(2)] == [[1], [1, 2], [1, 2, 3]]
    with monkeypatch.context() as patch, pytest.raises(OSError, match="killed"):
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        log(1)
    assert log(3) == [1, 2, 3, 4]
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(whole[:-1])  # killed before the end of the line
    assert log(4) == [1, 2, 3, 4, 5]


def test_a_run_that_begins_keeps_what_others_have_logged_there(tmp_path):
    logs = Logging(tmp_path, log_every=1)
    for count in (8, 16, 24):
        make(net(), logging=logs).fit(data(count))
    names = ("metrics-1.jsonl", "metrics-2.jsonl", "metrics.jsonl")
    assert [[json.loads(line)["step"] for line in (tmp_path / name).open()][-1] for name in names] == [1, 2, 3]


def test_batches_in_no_fixed_order_are_told_of_where_a_run_goes_on_amid_an_epoch(tmp_path):
    def run(**config) -> Trainer:
        order = EpochSampler(24, 8, seed=1)
        loader = DataLoader(TensorDataset(*samples(24)), batch_sampler=order, num_workers=2, in_order=False)
        trainer = make(net(), checkpoint=Checkpoint(tmp_path), **config)
        trainer.fit(loader)
        return trainer

    with pytest.raises(Preempted):
        run(callbacks=[Stop(2)])
    with pytest.warns(UserWarning, match=r"training data come in no fixed order \(in_order=False\): of epoch 1, amid"):
        assert run().step_count == 3


def test_batches_in_no_fixed_order_are_refused_where_processes_count_by_it():
    def feed(workers: int) -> Feed:
        order, options = EpochSampler(24, 8, world_size=2), {"num_workers": workers, "in_order": False}
        loader = DataLoader(TensorDataset(*samples(24)), batch_sampler=order, **options)
        return Feed(loader, SimpleNamespace(rank=0, size=2))

    feed(workers=1)
    with pytest.raises(InputError, match=r"the training data come in no fixed order \(in_order=False\), so several"):
        feed(workers=2)


class Between(Callback):
    """Does something between the first epoch and the second."""

    def __init__(self, work):
        self.work = work

    def on_epoch_start(self, trainer, epoch):
        if epoch == 1:
            self.work()


@pytest.mark.parametrize("gone", ["folder", "file"])
def test_results_that_are_removed_in_mid_run_are_written_anew(tmp_path, gone):
    out = tmp_path / "out"
    file, names = out / "metrics.jsonl", {"metrics.jsonl", "checkpoints", "last.pt", "best.pt"}
    out.mkdir()
    files = {"weights": out / "last.pt", "best_weights": out / "best.pt", "checkpoint": out / "checkpoints"}
    callback = Between(file.unlink if gone == "file" else lambda: shutil.rmtree(out))
    run = make(net(), epochs=3, logging=Logging(out, log_every=1), callbacks=[callback], **files)
    with pytest.warns(UserWarning, match=r"out.metrics\.jsonl is gone, with its lines; the run goes on in a new one"):
        run.fit(data())
    assert {path.name for path in out.iterdir()} == names
    assert sorted({json.loads(line)["step"] for line in file.open()}) == [4, 5, 6, 7, 8, 9]


def test_a_log_that_an_editor_has_saved_in_mid_run_goes_on(tmp_path):
    file = tmp_path / "metrics.jsonl"

    def save():
        shutil.copy(file, tmp_path / "new")
        os.replace(tmp_path / "new", file)

    make(net(), epochs=3, logging=Logging(tmp_path, log_every=1), callbacks=[Between(save)]).fit(data())
    assert sorted({json.loads(line)["step"] for line in file.open()}) == list(range(1, 10))


def test_what_layers_save_beside_tensors_is_in_the_weights(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"scale": 2.0}

        def set_extra_state(self, state):
            self.scale = state["scale"]

    model = nn.Sequential(nn.Flatten(), Extra(16, 4))
    make(model, weights=tmp_path / "w.pt", checkpoint=Checkpoint(tmp_path / "c")).fit(data())
    fresh = nn.Sequential(nn.Flatten(), Extra(16, 4))
    fresh.load_state_dict(torch.load(tmp_path / "w.pt", weights_only=True))
    assert fresh[1].scale == 2.0 and torch.equal(weights(fresh), weights(model))


class Scale(nn.Module):
    """A parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.weight * x


def test_one_process_of_fsdp_that_is_stopped_amid_an_update_goes_on(tmp_path):
    def run(folder, callbacks=()):
        model = nn.Sequential(net(), Scale())
        distributed = Distributed("fsdp")
        run = make(model, accumulation=3, distributed=distributed, checkpoint=Checkpoint(folder), callbacks=callbacks)
        run.fit(data(64))
        return weights(model)

    whole = run(tmp_path / "whole")
    with pytest.raises(SystemExit):
        run(tmp_path / "cut", [Stop(4)])
    assert torch.equal(run(tmp_path / "cut"), whole)


def test_a_run_with_shards_says_that_a_checkpoint_was_saved_without(tmp_path):
    make(net(), checkpoint=tmp_path).fit(data())
    with pytest.raises(InputError, match="was saved by the strategy ddp: go on with it, or begin anew"):
        make(net(), checkpoint=tmp_path, distributed=Distributed("fsdp")).fit(data())

"""CUDA graphs of the whole step: everything around the capture on the CPU, the capture itself on a GPU."""

import contextlib
import functools
import math
import weakref

import harness
import pytest
import torch
from torch import nn

from fusedtrain import optim
from fusedtrain.train import (
    ActivationCheckpointing,
    Batches,
    Callback,
    InputError,
    Schedule,
    TrainConfig,
    Trainer,
    graphs,
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def data(spoilt: bool = False) -> Batches:
    """9 batches in an epoch, the last one of 2 samples."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(66, 1, 4, 4, generator=generator), torch.randint(4, (66,), generator=generator)
    if spoilt:
        inputs[[45, 60]] = math.nan
    return Batches(inputs, targets, 8, shuffle=False)


def make(optimizer=None, model=None, **config) -> Trainer:
    model = model or net()
    optimizer = optimizer or optim.AdamW(model.parameters(), lr=2.0**-5)
    schedule = Schedule("exponential", gamma=0.5, warmup_epochs=0)  # rates that float32 holds
    config = {"epochs": 3, "device": "cpu", "schedule": schedule, "nonfinite": "skip", **config}
    callbacks = config.pop("callbacks", ())
    return Trainer(model, nn.CrossEntropyLoss(), optimizer, TrainConfig(**config), callbacks=callbacks)


def outcome(run: Trainer) -> dict[str, torch.Tensor]:
    history = run.fit(data(spoilt=run.config.nonfinite == "skip"), data())
    result = dict(run.model.state_dict()) | {"losses": torch.tensor(history.step_losses, dtype=torch.float64)}
    result |= {f"epoch {e.epoch}": torch.tensor(e.train_loss, dtype=torch.float64) for e in history.epochs}
    if run.averages is not None:
        with run.averaged_weights():
            result |= {f"average of {name}": p.detach().clone() for name, p in run.model.named_parameters()}
    return {name: torch.atleast_1d(t) for name, t in result.items()}


class Fake:
    """A recorder that, like the real one, does not run what it records, and keeps the rates that it was shown."""

    replays = 0

    def __init__(self, groups):
        self.groups = groups

    def aside(self):
        return contextlib.nullcontext()

    def record(self, work):
        seen = [group["lr"] for group in self.groups]
        assert all(isinstance(lr, torch.Tensor) for lr in seen)

        def replay():
            Fake.replays += 1
            own = [group["lr"] for group in self.groups]
            for group, lr in zip(self.groups, seen):
                group["lr"] = lr
            result = work()
            for group, lr in zip(self.groups, own):
                group["lr"] = lr
            return result

        return replay


def faked(monkeypatch, make_run) -> Trainer:
    run = make_run()
    monkeypatch.setattr(graphs, "check", lambda trainer: None)
    monkeypatch.setattr(graphs, "Recorder", lambda device: Fake(run.optimizer.param_groups))
    monkeypatch.setattr(Fake, "replays", 0)
    run.config = make_run(cuda_graphs=True).config
    return run


@pytest.mark.parametrize(
    ("options", "replays", "eager"),
    [
        ({}, 3 * 8 - 3, "1 x (2x1x4x4, 2)"),
        ({"accumulation": 2, "max_grad_norm": 0.5, "ema_decay": 0.5}, 3 * 4 - 3, "1 x (2x1x4x4, 2)"),
        ({"accumulation": 4, "precision": "bf16", "nonfinite": "raise"}, 3 * 2 - 3, "1 x (2x1x4x4, 2)"),
    ],
)
def test_a_run_by_graphs_is_the_run_without(monkeypatch, capsys, options, replays, eager):
    expected = outcome(make(**options))
    capsys.readouterr()
    run = faked(monkeypatch, functools.partial(make, **options))
    harness.assert_bitwise_equal(outcome(run), expected, str(options))
    assert Fake.replays == replays and run.skipped == (0 if "nonfinite" in options else 3 * 2)
    lines = [line for line in capsys.readouterr().out.splitlines() if "cuda_graphs" in line]
    assert len(lines) == 2 and f"captured the step of {run.group.size} x (8x1x4x4, 8)" in lines[0]
    assert lines[1].endswith(f"steps of {eager} run without the graph")


def test_a_graph_is_left_where_parameters_begin_to_learn_or_layers_change_their_mode(monkeypatch):
    class Change(Callback):
        def on_epoch_start(self, trainer, epoch):
            if epoch == 1:
                trainer.model[1].requires_grad_(True)
            elif epoch == 2:
                trainer.model[2].eval()

    def start(**config):
        model = net()
        model[1].requires_grad_(False)
        return make(model=model, nonfinite="raise", callbacks=[Change()], **config)

    expected = outcome(start())
    harness.assert_bitwise_equal(outcome(faked(monkeypatch, start)), expected, "")
    assert Fake.replays == 8 - 3  # of the first epoch


@pytest.mark.parametrize(("accumulate", "empty", "replays"), [(1, [5], 8 - 3 - 1), (2, [1, 3, 5, 7], 4 - 3)])
def test_a_batch_that_does_not_count_is_not_learnt_from(monkeypatch, accumulate, empty, replays):
    """Its loss and gradients are NaN, a mean over nothing."""

    def mean(outputs, targets):
        return (targets[:, None] * outputs.square()).sum() / targets.sum()

    class Masked(Trainer):
        def weight(self, batch):
            return float(batch[1].sum())

    inputs, targets = torch.randn(64, 1, 4, 4), torch.ones(64)
    targets.view(8, 8)[empty] = 0.0
    results = []
    for cuda_graphs in (False, True):
        model = net()
        optimizer = optim.AdamW(model.parameters(), lr=2.0**-5)
        monkeypatch.setattr(graphs, "check", lambda trainer: None)
        monkeypatch.setattr(graphs, "Recorder", lambda device, own=optimizer: Fake(own.param_groups))
        monkeypatch.setattr(Fake, "replays", 0)
        options = {"schedule": Schedule("constant", warmup_epochs=0), "accumulation": accumulate}
        config = TrainConfig(epochs=1, device="cpu", cuda_graphs=cuda_graphs, **options)
        Masked(model, mean, optimizer, config).fit(Batches(inputs, targets, 8, shuffle=False))
        results.append(dict(model.named_parameters()))
    harness.assert_bitwise_equal(*results, "")
    assert Fake.replays == replays


def test_a_graph_keeps_the_gradients_that_it_adds_to_and_no_memory_after_the_run(monkeypatch):
    class Weighed(Trainer):
        def weight(self, batch):
            return 0 if self.step_count == 5 else 1

    class Watch(Fake):
        def record(self, work):
            kept, replay = [weakref.ref(p.grad) for p in model.parameters()], super().record(work)

            def watched():
                assert all(grad() is not None for grad in kept)
                return replay()

            return watched

    model, made = net(), []
    optimizer = optim.AdamW(model.parameters(), zero_grads=True)
    monkeypatch.setattr(graphs, "check", lambda trainer: None)
    monkeypatch.setattr(graphs, "Recorder", lambda device: Watch(optimizer.param_groups))
    monkeypatch.setattr(graphs, "Graphs", lambda trainer, make=graphs.Graphs: made.append(make(trainer)) or made[0])
    monkeypatch.setattr(Fake, "replays", 0)
    run = Weighed(model, nn.CrossEntropyLoss(), optimizer, TrainConfig(epochs=1, device="cpu", cuda_graphs=True))
    run.fit(data())
    assert Fake.replays == 8 - 3 - 1
    held = weakref.ref(made.pop())
    assert held() is None


def test_the_side_stream_is_one_of_the_runs_device_and_waited_for_after_an_error_too(monkeypatch):
    """The device need not be the current one: a capture on another one would hold nothing."""
    calls = []

    class Stream:
        def __init__(self, device=None):
            self.name = f"{device}, {len(calls)}"
            calls.append(str(device))

        def wait_stream(self, other):
            calls.append(f"({self.name}) waits for ({other.name})")

    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    run = make()
    run.device = torch.device("cuda:1")
    with pytest.raises(RuntimeError, match="out of memory"), graphs.Graphs(run)._recorder.aside():
        raise RuntimeError("out of memory")
    side, current = "(cuda:1, 0)", "(cuda:1, 1)"
    assert calls == ["cuda:1", "cuda:1", f"{side} waits for {current}", f"{current} waits for {side}"]


def test_the_current_stream_stays_where_a_capture_fails(monkeypatch):
    current = ["main"]

    @contextlib.contextmanager
    def on(stream):
        before, current[0] = current[0], stream
        yield
        current[0] = before

    @contextlib.contextmanager
    def capture(graph, stream, capture_error_mode):
        current[0] = stream
        yield

    for name, fake in (("device", contextlib.nullcontext), ("stream", on), ("graph", capture)):
        monkeypatch.setattr(torch.cuda, name, fake)
    for name, value in (("Stream", "side"), ("current_stream", "main"), ("CUDAGraph", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    graphs.Recorder(torch.device("cuda:1")).record(lambda: None)
    assert current == ["main"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_steps_are_as_good_as_eager_ones(capsys, accumulate, kind, precision):
    results = []
    for device, cuda_graphs, dtype in (("cuda", True, precision), ("cuda", False, precision), ("cpu", False, "fp64")):
        model = net()
        extra = {"capturable": True} if kind == "AdamW" and device == "cuda" else {}
        optimizer = getattr(optim, kind)(model.parameters(), lr=2.0**-5, **extra)
        options = {"accumulation": accumulate, "max_grad_norm": 0.5, "ema_decay": 0.5}
        run = make(optimizer, model, device=device, cuda_graphs=cuda_graphs, precision=dtype, **options)
        results.append({name: t.cpu() for name, t in outcome(run).items()})
    assert capsys.readouterr().out.count("captured the step of") == 1
    for name, ours in results[0].items():
        if ours.is_floating_point():
            harness.assert_as_good_as_torch(ours, results[1][name], results[2][name].double(), name)
        else:
            assert torch.equal(ours, results[2][name]), name


def test_a_step_that_is_never_the_same_is_made_eagerly_and_the_run_says_so(monkeypatch, capsys):
    class Tokens(Trainer):
        def weight(self, batch):
            return next(weights)

    weights = iter(range(1, 10_000))
    model = net()
    monkeypatch.setattr(graphs, "check", lambda trainer: None)
    monkeypatch.setattr(graphs, "KINDS", 4)
    optimizer = optim.AdamW(model.parameters())
    monkeypatch.setattr(graphs, "Recorder", lambda device: Fake(optimizer.param_groups))
    config = TrainConfig(epochs=2, device="cpu", accumulation=2, cuda_graphs=True)
    Tokens(model, nn.CrossEntropyLoss(), optimizer, config).fit(data())
    out = capsys.readouterr().out
    assert out.count("nothing is captured: steps differ in shapes, weights or hyperparameters") == 1
    assert "captured the step" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "cuda_graphs needs a GPU, and this run is on the cpu"),
        ({"compile": "default"}, 'compile="reduce-overhead" has its own'),
        ({"precision": "fp16"}, "does not go with precision fp16; take bf16"),
        ({"schedule": "onecycle"}, "does not go with onecycle"),
        ({"activation_checkpointing": ActivationCheckpointing(("1",))}, "does not go with activation checkpointing"),
    ],
)
def test_options_that_cannot_be_captured_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        make(cuda_graphs=True, **options)


def test_optimizers_and_processes_that_cannot_be_captured_are_refused():
    model = net()
    run = make(model=model)
    run.device = torch.device("cuda")
    for optimizer, message in [
        (torch.optim.SGD(model.parameters()), "needs an optimizer of fusedtrain.optim, .* got SGD"),
        (optim.AdamW(model.parameters()), "construct AdamW with capturable=True"),
        (optim.SGD(model.parameters(), state_dtype="8bit"), "the host seeds"),
        (optim.Lion(model.parameters(), corrected_weight_decay=True), "corrected_weight_decay of Lion"),
    ]:
        run.optimizer = optimizer
        with pytest.raises(InputError, match=message):
            graphs.check(run)
    for optimizer in (
        optim.RMSprop(model.parameters(), capturable=True),
        optim.Lamb(model.parameters(), corrected_weight_decay=True),  # of decoupled decay alone
    ):
        run.optimizer = optimizer
        graphs.check(run)
    run.world.size = 2
    with pytest.raises(InputError, match="is for one process"):
        graphs.check(run)


def test_a_step_that_fails_to_be_captured_ends_the_run_with_the_reason(monkeypatch):
    class Stuck(Fake):
        def record(self, work):
            try:
                raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors ...")
            finally:  # as torch ends a capture
                raise RuntimeError("operation failed due to a previous error during capture\nCUDA kernel errors ...")

    run = make()
    monkeypatch.setattr(graphs, "check", lambda trainer: None)
    monkeypatch.setattr(graphs, "Recorder", lambda device: Stuck(run.optimizer.param_groups))
    run.config = make(cuda_graphs=True).config
    with pytest.raises(InputError, match=r"this step cannot be captured: operation not permitted .*capturing$"):
        try:
            raise ValueError("of before")
        except ValueError:
            run.fit(data())
    assert [type(group["lr"]) for group in run.optimizer.param_groups] == [float]


class Centred(nn.Module):
    """Subtracts a running mean, in whose place it puts another tensor in every step."""

    def __init__(self, replaces: bool):
        super().__init__()
        self.replaces = replaces
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        if self.training and self.replaces:
            self.mean = torch.lerp(self.mean, x.detach().mean(0), 0.5)
        return x - self.mean


def centred(replaces: bool) -> nn.Sequential:
    model = net()
    return nn.Sequential(*model[:2], Centred(replaces), *model[2:])


def test_a_buffer_that_every_step_replaces_is_refused(monkeypatch):
    run = faked(monkeypatch, functools.partial(make, model=centred(True)))
    with pytest.raises(
        InputError, match=r"cuda_graphs: the step puts .* the buffer 2\.mean, .* copy_\(\) or lerp_\(\)"
    ):
        run.fit(data())
    assert Fake.replays == 0


def test_a_graph_is_left_where_a_buffer_has_been_replaced(monkeypatch, capsys):
    class Replace(Callback):
        def on_epoch_start(self, trainer, epoch):
            trainer.model[2].mean = trainer.model[2].mean + 1.0 if epoch == 1 else trainer.model[2].mean

    def start(**config):
        return make(model=centred(False), nonfinite="raise", callbacks=[Replace()], **config)

    expected = outcome(start())
    harness.assert_bitwise_equal(outcome(faked(monkeypatch, start)), expected, "")
    assert Fake.replays == 8 - 3  # of the first epoch
    assert "steps of 1 x (8x1x4x4, 8) run without the graph" in capsys.readouterr().out

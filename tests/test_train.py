"""The training loop and its parts; the whole run from the command line stands in test_cli.py."""

import copy
import functools
import gc
import io
import itertools
import mmap
import os
import re
import signal
import warnings
from pathlib import Path

import harness
import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

from fusedtrain import optim
from fusedtrain._files import write_atomic
from fusedtrain.data import DevicePrefetcher, loader
from fusedtrain.train import (
    Batches,
    EpochSampler,
    FrozenNorms,
    InputError,
    Logging,
    Profile,
    Schedule,
    SeededDataset,
    SmallNet,
    TrainConfig,
    Trainer,
    check,
    load_digits,
)
from fusedtrain.train.config import resolve_device
from fusedtrain.train.memory import PeakMemory, resident
from fusedtrain.train.model import LAYERS


@functools.cache
def small_net_of(layers: str, seed: int) -> SmallNet:
    torch.manual_seed(seed)
    return SmallNet(10, layers=layers)


def small_net(layers: str = "fused", seed: int = 0) -> SmallNet:
    return copy.deepcopy(small_net_of(layers, seed))  # to fuse one takes longer than most of these tests


def batches(count: int, batch_size: int, dtype=torch.float32, **options) -> Batches:
    digits = load_digits(size=16)
    images, targets = digits.train_images[:count].to(dtype), digits.train_targets[:count]
    return Batches(images, targets, batch_size, **{"shuffle": True, **options})


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name].cpu(), b[name].cpu())] == []


def trainer(model: nn.Module, loss=None, lr: float = 1e-3, **config) -> Trainer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    # On a GPU the errors that are provoked here would end all work on it.
    config = {"epochs": 1, "device": "cpu", **config}
    return Trainer(model, loss or nn.CrossEntropyLoss(), optimizer, TrainConfig(**config))


# --- the model --------------------------------------------------------------------------------------------------------


def test_fused_and_stock_start_from_the_same_weights():
    fused, stock = (small_net(layers).state_dict() for layers in LAYERS)
    assert_same(fused, stock)
    other = small_net("stock", seed=1).state_dict()
    assert not torch.equal(stock["conv_stem.weight"], other["conv_stem.weight"])


@functools.cache
def first_losses(layers: str, dtype: torch.dtype, device: str, precision: str) -> torch.Tensor:
    runs = []
    for seed in range(4):  # the losses of one bf16 run are too few to judge rounding by
        options = {"precision": precision, "device": device, "schedule": Schedule(warmup_epochs=0)}
        run = trainer(small_net(layers, seed).to(dtype), **options)
        runs.append(run.fit(batches(5 * 16, 16, dtype, seed=seed)).step_losses)
    return torch.tensor(runs, dtype=dtype)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_first_losses_of_fused_layers_are_as_good_as_those_of_stock_layers(device, precision):
    ours, stock = (first_losses(layers, torch.float32, device, precision) for layers in ("fused", "stock"))
    truth = first_losses("stock", torch.float64, device, "fp32")
    harness.assert_as_good_as_torch(ours, stock, truth, "losses of the first steps")


# --- the loop ---------------------------------------------------------------------------------------------------------


def test_losses_and_accuracy_are_means_over_samples_with_a_short_last_batch():
    # Batches of 4, 4 and 2 and a loss that is the mean label: every sum below is exact in float32.
    data = batches(10, 4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 10))
    run = trainer(model, lambda logits, targets: targets.float().mean() + 0 * logits.sum())
    epoch = run.fit(data, data).epochs[0]
    assert epoch.train_loss == epoch.valid_loss == data.targets.sum().item() / 10
    with torch.no_grad():
        correct = (model(data.images).argmax(1) == data.targets).sum().item()
    assert epoch.valid_accuracy == correct / 10


def test_a_run_repeats_bitwise_and_another_seed_changes_it(device, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)

    def run(seed):
        model = small_net(seed=seed)
        options = {"seed": seed, "device": device, "epochs": 2, "cudnn_benchmark": False}
        history = trainer(model, **options).fit(batches(100, 32, seed=seed), batches(50, 50))
        return history.step_losses, model.state_dict()

    (losses, weights), (again, weights_again), (other, _) = run(0), run(0), run(1)
    assert losses == again and losses != other
    assert_same(weights, weights_again)


def test_bf16_runs_the_layers_in_bf16_and_keeps_weights_and_loss_in_float32(device):
    model = small_net()
    seen = []
    model.blocks[0].conv_pw.register_forward_hook(lambda module, args, y: seen.append(y.dtype))

    def loss(logits, targets):
        seen.append(logits.dtype)
        return nn.functional.cross_entropy(logits, targets)

    data = batches(32, 32)
    trainer(model, loss, precision="bf16", device=device).fit(data, data)
    assert set(seen) == {torch.bfloat16, torch.float32}
    assert seen.index(torch.bfloat16) < seen.index(torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_evaluation_changes_nothing():
    model = small_net()
    run = trainer(model)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    first = run.evaluate(batches(100, 32, shuffle=False))
    assert first == run.evaluate(batches(100, 32, shuffle=False))
    assert_same(before, model.state_dict())


def test_a_loss_that_is_not_finite_stops_the_run_and_saves_nothing(tmp_path):
    data = batches(64, 16)
    data.images[40] = float("nan")
    run = trainer(small_net(), weights=tmp_path / "weights.pt")
    with pytest.raises(
        RuntimeError, match=r"step \d of epoch 1 was not made: input 0 of the batch is not finite for samples \d+ of"
    ):
        run.fit(data, batches(16, 16))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU runs behind the CPU")
def test_a_step_does_not_wait_for_the_gpu():
    data, model = batches(64, 32), small_net()
    config = TrainConfig(epochs=1, device="cuda", max_grad_norm=1.0)
    run = Trainer(model, nn.CrossEntropyLoss(), optim.AdamW(model.parameters(), lr=1e-3), config)
    run.fit(data, data)
    batch = run.to_device(next(iter(data)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.step([(batch, True, True)])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_peak_memory_of_a_gpu_may_be_the_first_that_is_asked_of_it(monkeypatch):
    called = []
    for name in ("init", "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: called.append(name) or len(called))
    assert PeakMemory(torch.device("cuda", 0)).bytes() == 1
    assert called[:2] == ["init", "reset_peak_memory_stats"]


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("shape", [(2, 1, 4, 4), (2, 3)])
def test_what_comes_from_a_gpu_to_the_cpu_is_waited_for(shape, dtype):
    class OnAGpu(torch.Tensor):
        device = torch.device("cuda", 0)

        def to(self, *args, non_blocking=False, **named):
            assert not non_blocking
            return torch.Tensor.to(self, *args, **named)

    moved = check.to_device([torch.ones(shape).as_subclass(OnAGpu)], torch.device("cpu"), torch.channels_last, dtype)
    assert moved[0].shape == shape


@pytest.mark.parametrize(("rank", "chosen", "index"), [(None, None, 0), (None, 2, 2), ("1", 2, 1), ("5", None, 1)])
def test_the_gpu_of_a_process_is_by_its_rank_or_the_current_one(rank, chosen, index, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    told = {"is_available": True, "device_count": 4, "is_initialized": chosen is not None, "current_device": chosen}
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", index)


def test_warmup_rises_linearly_and_the_cosine_ends_at_zero():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = Schedule(warmup_epochs=1.0).build(optimizer, epochs=3, steps=4)
    rates = []
    for _ in range(13):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[8] == 0.5 and rates[12] == 0.0


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"precision": "fp8"}, "precision must be one of fp32, bf16, fp16, fp64, got 'fp8'"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"schedule": Schedule(warmup_epochs=2.0)}, r"warmup_epochs must lie between 0 and epochs \(1\), got 2.0"),
        ({"weights": "no/such/folder/weights.pt"}, "the folder for the weights does not exist: no/such/folder"),
        ({"weights": "w.pt", "best_weights": "./w.pt"}, "weights and best_weights are one file, w.pt: name two"),
        ({"device": "tpu9"}, "device must be auto, cpu or cuda, got 'tpu9'"),
        ({"device": "meta"}, "device must be auto, cpu or cuda, got 'meta'"),
        ({"device": "cuda:99"}, "device 'cuda:99': "),
    ],
)
def test_a_config_that_cannot_run_is_refused_in_one_line(config, message):
    with pytest.raises(InputError, match=message) as error:
        trainer(small_net(), **config)
    assert "\n" not in str(error.value)


def test_an_optimizer_of_another_model_is_refused():
    optimizer = torch.optim.AdamW(small_net().parameters())
    with pytest.raises(InputError, match="the optimizer holds none of the model's trainable parameters"):
        Trainer(small_net(), nn.CrossEntropyLoss(), optimizer, TrainConfig())


@pytest.mark.parametrize("given", ["adamw", torch.optim.AdamW, None, nn.CrossEntropyLoss()], ids=repr)
def test_what_is_no_optimizer_is_named(given):
    message = f"optimizer must be a torch.optim.Optimizer over the model's parameters, .* got {re.escape(repr(given))}"
    with pytest.raises(TypeError, match=message):
        Trainer(small_net(), nn.CrossEntropyLoss(), given, TrainConfig())


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("model", nn.Identity, "a torch.nn.Module"),
        ("loss", nn.CrossEntropyLoss, "a function or a module, such as"),
        ("loss", "cross_entropy", "a function or a module, such as"),
        ("config", {"epochs": 2}, r"a TrainConfig\(...\)"),
        ("callbacks", [FrozenNorms], "objects, made by calling"),
        ("loggers", [io.StringIO()], r"objects with log\(\), flush\(\) and close\(\)"),
    ],
)
def test_what_stands_in_the_place_of_another_is_named(name, given, wanted):
    model = small_net()
    parts = {"model": model, "loss": nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD(model.parameters())}
    with pytest.raises(TypeError, match=f"^{name} must be {wanted}.*, got "):
        Trainer(**parts | {name: given})


IMAGES, TARGETS = torch.zeros(4, 1, 16, 16), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "the training data hold no batch"),
        ([IMAGES], r"must be a pair of tensors \(inputs, targets\), got float32\[4, 1, 16, 16\]"),
        ([(IMAGES, TARGETS, TARGETS)], r"must be a pair .*, got tuple\(float32\[4, 1, 16, 16\], int64\[4\], int64"),
        ([{"image": IMAGES}], "must be a pair .*, got dict"),
        ([(IMAGES, TARGETS[:3])], r"as many inputs as targets, got tuple\(float32\[4, 1, 16, 16\], int64\[3\]\)"),
        ([(IMAGES, TARGETS.float())], r"the loss cannot take a training batch .*float32\[4\]\): "),
        (TensorDataset(IMAGES, TARGETS), r"as many inputs as targets, got .*; a DataLoader makes batches of a dataset"),
        (
            functools.partial(iter, []),
            "the training data must give batches each time they are iterated over, .* got fun",
        ),
        (iter([(IMAGES, TARGETS)]), "the training data are an iterator, .*; pass a list or a DataLoader"),
        ([(IMAGES[0], TARGETS)], r"as many inputs as targets, got tuple\(float32\[1, 16, 16\]"),
        ([(IMAGES, TARGETS + 10)], "the model has 10 classes, but the training labels go from 10 to 10"),
        ([(IMAGES, TARGETS - 1)], "the model has 10 classes, but the training labels go from -1 to -1"),
        ([(IMAGES.expand(4, 3, 16, 16), TARGETS)], r"the model cannot take training inputs of shape \[4, 3, 16, 16\]"),
    ],
)
def test_data_that_do_not_fit_are_refused_before_the_first_step(data, message):
    model = small_net()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(InputError, match=message) as error:
        trainer(model).fit(data, [(IMAGES, TARGETS)])
    assert "\n" not in str(error.value)
    assert_same(before, model.state_dict())


class ReadTwice:
    """Gives its batch to two passes, the first of which is the look before the run."""

    passes = 0

    def __len__(self):
        return 1

    def __iter__(self):
        self.passes += 1
        return iter([(IMAGES, TARGETS)] if self.passes <= 2 else [])


@pytest.mark.parametrize(("kind", "epoch"), [("training", " in epoch 2"), ("validation", "")])
def test_data_that_end_before_the_run_does_are_refused(kind, epoch):
    data = [ReadTwice() if kind == name else [(IMAGES, TARGETS)] for name in ("training", "validation")]
    run = trainer(small_net(), epochs=3)
    with pytest.raises(InputError, match=f"^the {kind} data hold no batch{epoch}"):
        run.fit(*data)
    assert len(run.history.epochs) == 1


class Frames(Dataset):
    """Reads as many frames as its index says of a film that has three."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        film = iter(IMAGES[:3])
        return [next(film) for _ in range(index % 4 + 1)][-1], TARGETS[0]


class WithoutBroken(DataLoader):
    def __iter__(self):
        return itertools.islice(super().__iter__(), 1)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["training", "validation"])
@pytest.mark.parametrize("order", ["plain", "EpochSampler"])
def test_a_sample_that_ends_an_iteration_does_not_end_the_epoch(kind, order, workers):
    whole, run = [(IMAGES, TARGETS)], trainer(small_net())
    how = {"batch_size": 2} if order == "plain" else {"batch_sampler": EpochSampler(8, 2, shuffle=False)}
    films = DataLoader(Frames(), num_workers=workers, **how)
    message = rf"^the {kind} data ended 3 batches too early: a sample that raises StopIteration, .* ends the pass$"
    with pytest.raises(InputError, match=message):
        run.fit(*[DevicePrefetcher(films, "cpu") if kind == name else whole for name in ("training", "validation")])
    pairs = TensorDataset(IMAGES, TARGETS)
    run.fit(WithoutBroken(pairs, 2), DataLoader(pairs, 2))  # what a loader of one's own leaves out is left out


@pytest.mark.parametrize("kind", ["training", "validation"])
def test_a_batch_that_is_none_does_not_end_the_epoch(kind):
    whole, holed = [(IMAGES, TARGETS)] * 3, [(IMAGES, TARGETS), None, (IMAGES, TARGETS)]
    run = trainer(small_net())
    with pytest.raises(InputError, match=f"^batch 2 of the {kind} data is None, .* pass max_skipped= to fusedtrain"):
        run.fit(*[holed if kind == name else whole for name in ("training", "validation")])
    with pytest.raises(InputError, match=r"^a training batch must be a pair of tensors .* got NoneType; others need"):
        run.fit(holed[1:])


@pytest.mark.parametrize(
    ("loss", "got"), [(nn.CrossEntropyLoss(reduction="none"), r"float32\[4\]"), (lambda *_: 1.0, "float")]
)
def test_a_loss_that_is_no_mean_is_refused_before_the_first_step(loss, got):
    run = trainer(small_net(), loss)
    with pytest.raises(InputError, match=f"^the loss must return the mean over the batch, a tensor .* got {got}$"):
        run.fit([(IMAGES, TARGETS)])


@pytest.mark.parametrize(("metrics", "got"), [(torch.tensor(1.0), r"float32\[\]"), (None, "NoneType")])
def test_metrics_without_names_are_refused_before_the_first_step(metrics, got):
    class Nameless(Trainer):
        def validation_step(self, batch):
            return metrics

    model = small_net()
    run = Nameless(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters()), TrainConfig(device="cpu"))
    with pytest.raises(InputError, match=f"^validation_step must return metrics by name, a dict, got {got}$"):
        run.fit([(IMAGES, TARGETS)], [(IMAGES, TARGETS)])


class Weighted(Trainer):
    """Trains on triples, beside a validation on pairs."""

    def training_step(self, batch):
        images, targets, weights = batch
        losses = nn.functional.cross_entropy(self.forward(images), targets, reduction="none")
        return (losses * weights).mean()


@pytest.mark.parametrize("valid", [None, [(IMAGES, TARGETS)]])
def test_training_batches_of_an_own_step_need_not_be_those_of_the_validation(valid):
    model = small_net()
    run = Weighted(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters()), TrainConfig(1, device="cpu"))
    (epoch,) = run.fit([(IMAGES, TARGETS, torch.ones(4))], valid).epochs
    assert list(epoch.metrics) == ([] if valid is None else ["loss", "accuracy"])
    with pytest.raises(InputError, match=r"a validation batch must be a pair of tensors .*; others need a subclass of"):
        run.fit([(IMAGES, TARGETS, torch.ones(4))], [(IMAGES, TARGETS, torch.ones(4))])


def test_nor_those_of_an_own_validation_step_of_the_training():
    class Named(Trainer):
        def validation_step(self, batch):
            return {"loss": self.loss_of(self.forward(batch["image"]), batch["label"])}

    model = small_net()
    run = Named(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters()), TrainConfig(1, device="cpu"))
    assert run.fit([(IMAGES, TARGETS)], [{"image": IMAGES, "label": TARGETS}]).epochs[0].valid_loss > 0
    with pytest.raises(InputError, match=r"got dict\(image: float32\[4, 1, 16, 16\], label: int64\[4\]\); others need"):
        run.fit([{"image": IMAGES, "label": TARGETS}])
    with pytest.raises(InputError, match=r"^validation_step cannot take a validation batch list\("):
        run.fit([(IMAGES, TARGETS)], [(IMAGES, TARGETS)])


@pytest.mark.parametrize(
    ("given", "got"),
    [(lambda loss: {"loss": loss.mean()}, r"dict\(loss: float32\[\]\)"), (lambda loss: loss, r"float32\[4\]")],
)
def test_a_training_step_that_returns_no_loss_is_named(given, got):
    class Other(Trainer):
        def training_step(self, batch):
            return given(nn.functional.cross_entropy(self.forward(batch[0]), batch[1], reduction="none"))

    model = small_net()
    run = Other(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters()), TrainConfig(1, device="cpu"))
    with pytest.raises(
        InputError, match=f"^training_step must return the mean loss, a tensor of one number, got {got}$"
    ):
        run.fit([(IMAGES, TARGETS)])


def test_a_trainer_that_has_not_run_has_an_empty_history():
    run = trainer(small_net())
    assert run.history.epochs == run.history.step_losses == [] and run.last_loss is None


def test_a_model_that_asserts_the_size_of_its_images_refuses_others_in_one_line():
    class OfOneSize(nn.Module):  # as timm's vision transformers
        def __init__(self):
            super().__init__()
            self.net = small_net()

        def forward(self, x):
            assert x.shape[2] == 32, f"Input height ({x.shape[2]}) doesn't match model (32)."
            return self.net(x)

    message = r"the model cannot take training inputs of shape \[4, 1, 16, 16\]: Input height \(16\) doesn't match"
    with pytest.raises(InputError, match=message):
        trainer(OfOneSize()).fit([(IMAGES, TARGETS)])


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("where", ["model", "loss"])
def test_views_that_channels_last_memory_does_not_give_are_told(where, own):
    flat = lambda x: x.view(len(x), -1)  # noqa: E731

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 6, 3), nn.Linear(6 * 36, 10)

        def forward(self, x):
            return self.fc(flat(self.conv(x))) if where == "model" else self.conv(x)

    class Own(Trainer):
        def training_step(self, batch):
            return super().training_step(batch)

    def run(**options):
        model = Net()
        loss = nn.CrossEntropyLoss() if where == "model" else lambda outputs, targets: flat(outputs).square().mean()
        config = TrainConfig(epochs=1, device="cpu", **options)
        (Own if own else Trainer)(model, loss, torch.optim.SGD(model.parameters()), config).fit([batch])

    batch = torch.randn(4, 3, 8, 8), TARGETS if where == "model" else torch.randn(4, 2)
    with pytest.raises(InputError, match=r"channels_last memory, .* or TrainConfig\(channels_last=False\)"):
        run()
    run(channels_last=False)


def of_nine(kind: str, size: int, **options):
    """Nine images in batches of four; a network of three strides sees 1x1 maps of those of 8x8."""
    images, targets = torch.randn(9, 1, size, size, generator=torch.Generator().manual_seed(0)), torch.arange(9)
    if kind == "batches":
        return Batches(images, targets, 4, shuffle=True)
    if kind == "list":
        return list(zip(images.split(4), targets.split(4)))
    if kind == "sampler":
        batch_sampler = EpochSampler(9, 4, **options)
        return DataLoader(TensorDataset(images, targets), batch_sampler=batch_sampler)
    make = DataLoader if kind == "torch" else functools.partial(loader, num_workers=0)
    return make(TensorDataset(images, targets), 4, shuffle=True, **options)


SINGLE = r"the model cannot train on a batch of a single sample, as the last of an epoch may be{}: Expected more than 1"


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("kind", ["batches", "torch", "sampler", "fusedtrain"])
def test_a_last_batch_of_one_sample_is_refused_before_the_run_where_a_norm_has_nothing_to_average(kind, layers):
    model = small_net(layers)
    before, numbers = {name: t.clone() for name, t in model.state_dict().items()}, torch.get_rng_state()
    message = (
        "^" + SINGLE.format(r" \(the data are 9 samples in batches of 4\)") + ".*drop_last=True.*another batch size"
    )
    with pytest.raises(InputError, match=message) as error:
        trainer(model).fit(of_nine(kind, 8))
    assert "\n" not in str(error.value)
    assert_same(before, model.state_dict())
    if kind == "batches":  # those of torch draw the seed of their workers
        assert torch.equal(numbers, torch.get_rng_state())


@pytest.mark.parametrize("kind", ["torch", "sampler", "fusedtrain"])
def test_one_sample_is_taken_where_a_norm_has_pixels_and_left_out_where_that_is_asked_for(kind):
    assert len(trainer(small_net()).fit(of_nine(kind, 16)).step_losses) == 3
    assert len(trainer(small_net()).fit(of_nine(kind, 8, drop_last=True)).step_losses) == 2


@pytest.mark.parametrize("layers", LAYERS)
def test_a_batch_of_one_sample_that_no_length_foretells_is_named_when_it_comes(layers):
    message = "^step 3 of epoch 1 was not made: " + SINGLE.format("")
    with pytest.raises(InputError, match=message):
        trainer(small_net(layers)).fit(of_nine("list", 8))


def test_a_label_outside_the_classes_is_found_wherever_it_lies():
    data = batches(64, 16, shuffle=False)
    data.targets = data.targets.clone()
    data.targets[-1] = 10
    with pytest.raises(InputError, match="the model has 10 classes, but the validation labels go from 0 to 10"):
        trainer(small_net()).fit(batches(64, 16), data)


class Shifted(Dataset):
    """Gives out other labels than those that it lists."""

    def __init__(self, images, targets):
        self.images, self.given, self.targets = images, targets, (targets + 5).tolist()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.given[index]


@pytest.mark.parametrize(("kind", "seeded"), [(TensorDataset, False), (TensorDataset, True), (Shifted, False)])
def test_so_is_one_of_a_dataset_behind_a_dataloader(kind, seeded):
    targets = torch.tensor([0] * 7 + [9])
    for label in (9, 10):
        targets[5] = label
        dataset = kind(IMAGES[:1].expand(8, 1, 16, 16), targets)
        run = trainer(small_net())
        try:
            run.fit(DataLoader(SeededDataset(dataset) if seeded else dataset, 4))
        except InputError as error:
            assert label == 10 and str(error) == "the model has 10 classes, but the training labels go from 0 to 10"
            assert run.step_count == 0
        else:
            assert label == 9


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_labels_of_samples_that_a_sampler_leaves_out_are_no_hindrance(kind):
    dataset = TensorDataset(IMAGES[:1].expand(8, 1, 16, 16), torch.tensor([0, 1] * 3 + [10, 11]))
    options = {"sampler": {"sampler": SubsetRandomSampler(range(6)), "batch_size": 3}}
    options["batch_sampler"] = {"batch_sampler": [[0, 1, 2], [3, 4, 5]]}
    assert len(trainer(small_net()).fit(DataLoader(dataset, **options[kind])).step_losses) == 2


class Unlisted(Dataset):
    """Tells its labels with its samples only: that of sample 21 is none of ten classes. Its samples have names."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return IMAGES[0], 12 if index == 21 else index % 10

    def sample_name(self, index):
        return f"{index}.png"


OUTSIDE = "has the label 12, but the model has 10 classes (0 to 9)"


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("kind", "loss"), [("sampler", None), ("plain", nn.MultiMarginLoss()), ("shuffled", nn.CrossEntropyLoss())]
)
def test_one_that_only_loading_shows_is_named_before_the_update(kind, loss, accumulate):
    def data():
        if kind == "sampler":
            return DataLoader(Unlisted(), batch_sampler=EpochSampler(32, 4, seed=1))
        return DataLoader(Unlisted(), 4, shuffle=kind == "shuffled", generator=torch.Generator().manual_seed(1))

    loader, weights = data(), []
    next(iter(loader))  # the look at the first batch, before the run
    at, row = next((i, labels.tolist().index(12)) for i, (_, labels) in enumerate(loader) if 12 in labels)
    run = trainer(small_net(), loss, accumulation=accumulate)
    run.callbacks.on_step_end = lambda run: weights.append([p.detach().clone() for p in run.model.parameters()])
    with pytest.raises(InputError) as error:
        run.fit(data())
    name = f"sample {row} of the batch" if kind == "shuffled" else "sample 21 (21.png)"
    assert str(error.value) == f"step {at // accumulate + 1} of epoch 1 was not made: {name} {OUTSIDE}"
    assert run.step_count == len(weights) == at // accumulate > 0
    assert all(map(torch.equal, weights[-1], run.model.parameters()))


def test_so_is_one_of_the_validation_and_other_errors_of_the_loss_stay():
    run, labels = trainer(small_net()), DataLoader(Unlisted(), 4)
    with pytest.raises(InputError) as error:
        run.fit(batches(64, 16), labels)
    assert str(error.value) == f"the evaluation after epoch 1 ended at batch 6: sample 21 (21.png) {OUTSIDE}"
    with pytest.raises(InputError) as error:
        trainer(small_net()).evaluate(labels)
    assert str(error.value) == f"the evaluation ended at batch 6: sample 21 (21.png) {OUTSIDE}"
    failing = lambda outputs, targets: outputs.sum() if run.step_count < 2 else outputs[:, 10]  # noqa: E731
    run = trainer(small_net(), failing)
    with pytest.raises(IndexError, match="index 10 is out of bounds"):
        run.fit(batches(64, 16))


def test_the_look_at_the_data_concerns_no_other_gpu(monkeypatch):
    """torch warns of generators that are kept on several."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(small_net()).fit(batches(16, 16))


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"checkpoint": "file/a"}, "checkpoints"),
        ({"logging": Logging("file/a")}, "logs"),
        ({"profile": Profile("file/a")}, "trace"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused_before_the_first_step(tmp_path, monkeypatch, config, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    run = trainer(small_net(), **config)
    with pytest.raises(InputError, match=f"the folder of the {what} cannot be made: .*file/a"):
        run.fit(batches(64, 16))
    assert run.step_count == 0


def test_a_model_without_logits_is_refused():
    data = batches(16, 16)
    model = nn.Conv2d(1, 10, 3)
    with pytest.raises(
        InputError, match=r"for class indices the model must return logits \[N, classes\], got \[16, 10, 14, 14\]"
    ):
        trainer(model).fit(data, data)


# --- data -------------------------------------------------------------------------------------------------------------


def test_every_epoch_holds_every_sample_once_in_an_order_of_its_own():
    data = Batches(torch.arange(10.0).view(10, 1, 1, 1), torch.arange(10), 4, shuffle=True, seed=3)

    def order(epoch):
        data.set_epoch(epoch)
        images, targets = zip(*data)
        assert [len(batch) for batch in targets] == [4, 4, 2] and len(data) == 3
        assert torch.equal(torch.cat(images).flatten().long(), torch.cat(targets))
        return torch.cat(targets).tolist()

    first, second = order(0), order(1)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second and order(0) == first


def test_unshuffled_batches_keep_the_order():
    data = batches(10, 4, shuffle=False)
    assert torch.equal(torch.cat([targets for _, targets in data]), data.targets)


@pytest.mark.parametrize(
    ("images", "targets", "batch_size", "message"),
    [
        (IMAGES, TARGETS, 0, "batch_size must be an integer of at least 1, got 0"),
        (IMAGES, TARGETS[:3], 2, "images and targets must be equally many, got 4 and 3"),
    ],
)
def test_batches_refuse_what_does_not_fit(images, targets, batch_size, message):
    with pytest.raises(ValueError, match=message):
        Batches(images, targets, batch_size, shuffle=True)


def test_the_digits_are_split_alike_every_time_and_share_no_image():
    one, two = load_digits(), load_digits()
    assert one.train_images.shape == (1437, 1, 32, 32) and one.valid_images.shape == (360, 1, 32, 32)
    assert torch.equal(one.train_images, two.train_images) and torch.equal(one.valid_targets, two.valid_targets)
    assert set(one.train_targets.tolist()) == set(one.valid_targets.tolist()) == set(range(one.CLASSES))
    raw = load_digits(size=8)
    train, valid = ({image.numpy().tobytes() for image in images} for images in (raw.train_images, raw.valid_images))
    assert len(train) == 1437 and not train & valid
    levels = torch.cat([raw.train_images, raw.valid_images]).flatten(1)
    levels = ((levels - levels.min()) * (16 / (levels.max() - levels.min()))).round().int()
    samples = torch.cat([levels, torch.cat([raw.train_targets, raw.valid_targets])[:, None]], 1).tolist()
    original = pytest.importorskip("sklearn.datasets").load_digits()
    expected = numpy.column_stack([original.data, original.target])
    assert sorted(samples) == sorted(expected.astype(int).tolist())


# --- checkpoint and memory --------------------------------------------------------------------------------------------


def test_the_checkpoint_loads_into_the_stock_model(tmp_path, device):
    model = small_net("fused")
    data = batches(64, 32)
    run = trainer(model, weights=tmp_path / "weights.pt", device=device)
    run.fit(data, data)
    state = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert {tensor.device.type for tensor in state.values()} == {"cpu"}
    stock = small_net("stock", seed=1)
    stock.load_state_dict(state, strict=True)
    assert_same(model.state_dict(), stock.state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pt"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write(file):
        file.write(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, write)
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX")
def test_a_process_killed_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    program = """
import os, signal, sys
from pathlib import Path
from fusedtrain._files import write_atomic
from fusedtrain.data import DevicePrefetcher, loader

def write(file):
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

write_atomic(Path(sys.argv[1]), write)
"""
    done = harness.run_python("-c", program, path)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux counts it")
def test_resident_memory_is_told_to_the_page():
    resident(exact=True)
    pages = 5
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as block:
        before = resident(exact=True)
        for page in range(pages):
            block[page * mmap.PAGESIZE] = 1
        assert pages <= (resident(exact=True) - before) / mmap.PAGESIZE < pages + 16


def test_peak_memory_counts_what_was_freed_again(device):
    memory = PeakMemory(torch.device(device))
    if memory.bytes() is None:
        pytest.skip("this system does not tell the peak of resident memory")
    size = 256 * 2**20
    torch.ones(size // 4, device=device)
    assert size / 2 < memory.bytes() < 2 * size
    assert PeakMemory(torch.device(device)).bytes() < size / 2


def test_peak_memory_counts_what_the_heap_keeps_as_free(device):
    size = 16 * 2**20
    for _ in range(2):  # the first time, glibc maps the blocks and learns from it to take such ones from its heap
        blocks = [torch.ones(size // 4, device=device) for _ in range(20)]
        last = blocks.pop()  # the end of the heap: what is before it stays there when it is freed
        del blocks
    memory = PeakMemory(torch.device(device))
    if memory.bytes() is None:
        pytest.skip("this system does not tell the peak of resident memory")
    torch.ones(16 * size // 4, device=device)
    assert memory.bytes() > 8 * size
    assert last.numel() == size // 4


def test_peak_memory_counts_garbage_as_free(device):
    size = 256 * 2**20
    garbage = [torch.ones(size // 4, device=device)]
    garbage.append(garbage)  # nobody holds it, but only the collector frees it
    del garbage
    memory = PeakMemory(torch.device(device))
    if memory.bytes() is None:
        pytest.skip("this system does not tell the peak of resident memory")
    gc.collect()
    torch.ones(size // 4, device=device)
    assert memory.bytes() > size / 2

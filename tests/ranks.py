"""What the processes of test_distributed.py run; torchrun starts them: ``ranks.py CASE FOLDER``."""

import contextlib
import itertools
import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.optim import ZeroRedundancyOptimizer

from fusedtrain import optim
from fusedtrain.train import (
    Batches,
    Callback,
    Checkpoint,
    Distributed,
    EarlyStopping,
    InputError,
    Logging,
    NonFiniteError,
    Precision,
    Schedule,
    TrainConfig,
    Trainer,
)
from fusedtrain.train.distributed import World

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def net(seed: int = 0, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Flatten(), nn.Linear(16, 32), nn.BatchNorm1d(32) if norm else nn.Tanh(), nn.Linear(32, 4)]
    return nn.Sequential(*layers)


def samples(count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 4, 4, generator=generator), torch.randint(4, (count,), generator=generator)


def data(count: int, batch_size: int, shuffle: bool = False, world: int = WORLD) -> Batches:
    return Batches(*samples(count), batch_size, shuffle=shuffle, rank=RANK if world > 1 else 0, world_size=world)


class Gradients:
    """The gradients of every update, as the optimizer sees them, whole."""

    def __init__(self, optimizer):
        self.steps = []
        optimizer.register_step_pre_hook(self._keep)

    def _keep(self, optimizer, args, kwargs):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        grads = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
        self.steps.append(torch.cat([g.flatten() for g in grads]).tolist())


def config(**options) -> TrainConfig:
    defaults = {"epochs": 1, "device": "cpu", "schedule": Schedule("constant", warmup_epochs=0)}
    return TrainConfig(**defaults | options)


def case_joined(folder: Path) -> dict:
    """When this rank had found its partners, and when it went on; rank 1 takes its time."""
    found, new_group = {}, torch.distributed.new_group

    def slow(*args, **options):
        group = new_group(*args, **options)
        time.sleep(0.3 * RANK)
        found["joined"] = time.time()
        return group

    with mock.patch("torch.distributed.new_group", slow):
        World(Distributed(), torch.device("cpu"))
    return found | {"on": time.time()}


def gradients(strategy: str, accumulate: int, count: int, callbacks=(), **options) -> dict:
    """Two ranks on 4 samples each per micro-batch; the weights stay, so that every group starts alike."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = Gradients(optimizer)
    distributed = Distributed(strategy, timeout=60.0, **options)
    settings = config(accumulation=accumulate, distributed=distributed)
    run = Trainer(model, nn.CrossEntropyLoss(), optimizer, settings, callbacks=callbacks)
    history = run.fit(data(count, 4), data(11, 4))
    epoch = history.epochs[0]
    return {"steps": seen.steps, "train_loss": epoch.train_loss, "metrics": epoch.metrics}


def case_gradients(folder: Path) -> dict:
    """DDP and FSDP, groups of 1 and 3 micro-batches; 17 samples leave one rank with none in the last batch."""
    found = {}
    for strategy in ("ddp", "fsdp"):
        for accumulate in (1, 3):
            for count in (16, 17, 22):
                found[f"{strategy} {accumulate} {count}"] = gradients(strategy, accumulate, count)
    for option in ("static_graph", "find_unused_parameters"):
        found[f"{option} 2 22"] = gradients("ddp", 2, 22, **{option: True})

    class Hold(Callback):
        def on_epoch_start(self, trainer, epoch):
            trainer.model.eval()

    found["held 1 22"] = gradients("ddp", 1, 22, callbacks=[Hold()])
    return found


class Unlike(Trainer):
    """Measures the classes that a batch holds, each for itself."""

    def validation_step(self, batch):
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.forward(inputs), targets, reduction="none")
        return {"loss": loss} | {f"class {own}": loss[targets == own] for own in targets.unique().tolist()}


def case_unlike(folder: Path) -> dict:
    """Rank 0 sees the classes 0 and 2, rank 1 the classes 1 and 3."""
    model, targets = net(), torch.arange(4).repeat_interleave(4)
    valid = Batches(samples(16)[0], targets, 4, shuffle=False, rank=RANK, world_size=WORLD)
    return Unlike(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters()), config()).evaluate(valid)


class Late(Trainer):
    """As on a GPU, where a process knows of its own samples alone until the epoch ends; steps take long enough."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.late = True

    def training_step(self, batch):
        time.sleep(0.03)
        return super().training_step(batch)


class Rates:
    """A logger that keeps the samples per second of the steps."""

    def __init__(self):
        self.found = []

    def log(self, step, values):
        self.found += [values["samples_per_second"]] if "samples_per_second" in values else []

    def flush(self):
        pass

    close = flush


def case_rates(folder: Path) -> dict:
    """What is logged amid an epoch, and what is told at its end."""
    found = {}
    for cls in (Trainer, Late):
        model, rates = net(), Rates()
        optimizer, logging = torch.optim.SGD(model.parameters(), lr=0.1), Logging(log_every=4)
        run = cls(model, nn.CrossEntropyLoss(), optimizer, config(logging=logging), loggers=[rates])
        found[cls.__name__] = [rates.found, run.fit(data(32, 4)).epochs[0].images_per_second]
    return found


class Convolutions(nn.Module):
    """All weights are in the outermost unit of shards, which stays gathered after a forward."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Linear(32, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.stem(x)).flatten(1))


def case_images(folder: Path) -> dict:
    """A network of convolutions with either strategy, with and without averages, and without checkpoints."""
    found, (inputs, targets) = {}, samples(16)
    for strategy in ("ddp", "fsdp"):
        for decay in (None, 0.9):
            torch.manual_seed(0)
            model = Convolutions()
            images = Batches(inputs.repeat(1, 3, 1, 1), targets, 4, shuffle=False, rank=RANK, world_size=WORLD)
            settings = config(epochs=2, ema_decay=decay, distributed=Distributed(strategy, timeout=60.0))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            history = Trainer(model, nn.CrossEntropyLoss(), optimizer, settings).fit(images, images)
            found[f"{strategy} {decay}"] = history.step_losses + [epoch.metrics["loss"] for epoch in history.epochs]
    return found


class Uneven:
    """Rank 0 has three batches, rank 1 one."""

    def __len__(self):
        return 3 if RANK == 0 else 1

    def __iter__(self):
        inputs, targets = samples(16)
        first, count = (0, 12) if RANK == 0 else (12, 4)
        yield from zip(inputs[first : first + count].split(4), targets[first : first + count].split(4))


def case_uneven(folder: Path) -> dict:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = Gradients(optimizer)
    run = Trainer(model, nn.CrossEntropyLoss(), optimizer, config(accumulation=3))
    history = run.fit(Uneven(), Uneven())
    return {"steps": seen.steps, "train_loss": history.epochs[0].train_loss, "metrics": history.epochs[0].metrics}


class Labelled(Trainer):
    """Counts the samples whose label is known."""

    def weight(self, batch):
        return int((batch[1] >= 0).sum())


def masked(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over known labels as it is often written: 0/0 where there is none, with gradients that are NaN."""
    known = targets >= 0
    return (nn.functional.cross_entropy(outputs, targets.relu(), reduction="none") * known).sum() / known.sum()


masked.ignore_index = -100


def case_unlabelled(folder: Path) -> dict:
    """Rank 1 has no known label in its first batch: the mean of its loss is that of nothing, NaN."""
    inputs, targets = samples(16)
    targets[4:8] = -100
    batches = list(zip(inputs.split(4), targets.split(4)))[RANK::2]
    found = {}
    losses = {"of torch": nn.CrossEntropyLoss(), "masked": masked}
    for accumulate, (name, loss) in itertools.product((1, 2), losses.items()):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        seen = Gradients(optimizer)
        run = Labelled(model, loss, optimizer, config(accumulation=accumulate))
        epoch = run.fit(batches, batches).epochs[0]
        found[f"{accumulate} {name}"] = {"steps": seen.steps, "train_loss": epoch.train_loss, "metrics": epoch.metrics}
    return found


class Counted(Callback):
    """Stops the run by a signal to one rank only, while micro-batch ``at`` is waited for."""

    def __init__(self, at: int):
        self.left = at

    def on_fit_start(self, trainer):
        fetch = trainer.feed.next

        def stopping(ahead=0):
            self.left -= 1
            if self.left == 0 and RANK == 1:
                trainer._stop.requested = 15
            return fetch(ahead)

        trainer.feed.next = stopping


def train(folder: Path, name: str, strategy: str = "ddp", at: int | None = None, seed: int = 0, callbacks=()):
    model = net(seed, norm=strategy == "ddp")
    kind = optim.AdamW if strategy == "fsdp" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.01)
    options = {
        "epochs": 3,
        "accumulation": 2,
        "ema_decay": 0.9,
        "precision": Precision("bf16"),
        "schedule": Schedule(),
        "checkpoint": Checkpoint(folder / name, asynchronous=strategy == "fsdp"),
        "distributed": Distributed(strategy, timeout=60.0),
        "weights": folder / f"{name}.pt",
        "early_stopping": EarlyStopping(stop_patience=1),
    }
    callbacks = [*callbacks, *([] if at is None else [Counted(at)])]
    run = Trainer(model, nn.CrossEntropyLoss(), optimizer, TrainConfig(device="cpu", **options), callbacks=callbacks)
    try:
        run.fit(data(30, 4, shuffle=True), data(11, 4))
    except SystemExit as stop:
        return stop.code, run
    return 0, run


def case_resume(folder: Path) -> dict:
    """A run of two ranks that is stopped on one of them goes on bitwise."""
    found = {}
    for strategy in ("ddp", "fsdp"):
        code, whole = train(folder, f"{strategy}-whole", strategy)
        stopped, _ = train(folder, f"{strategy}-cut", strategy, at=7 if strategy == "fsdp" else 9)  # amid an update
        if strategy == "fsdp" and RANK == 0:
            shutil.copytree(folder / "fsdp-cut", folder / "fsdp-moved")  # goes on with one process
        again, rest = train(folder, f"{strategy}-cut", strategy, seed=5)
        found[strategy] = {
            "codes": [code, stopped, again],
            "losses": [whole.history.step_losses, rest.history.step_losses],
            "epochs": [[vars(e)["metrics"] for e in run.history.epochs] for run in (whole, rest)],
        }
    return found


def case_spare(folder: Path) -> dict:
    """Stopped before its first update, so that there are no states yet, and amid the second epoch; a weight takes no
    part, so that it never has one."""
    found = {}
    for name, stops in (("whole", [None]), ("early", [1, None]), ("late", [6, None])):
        for at in stops:
            model = net()
            model.spare = nn.Parameter(torch.ones(3))
            options = {"checkpoint": Checkpoint(folder / f"spare-{name}"), "epochs": 2}
            options["distributed"] = Distributed("fsdp", timeout=60.0)
            optimizer, callbacks = torch.optim.AdamW(model.parameters(), lr=0.1), [Counted(at)] if at else []
            run = Trainer(model, nn.CrossEntropyLoss(), optimizer, config(**options), callbacks=callbacks)
            with contextlib.suppress(SystemExit):
                run.fit(data(32, 4))
        found[name] = run.history.step_losses
    return found


def case_nonfinite(folder: Path) -> dict:
    """A sample of rank 1 is NaN; both look for it in passes for which each needs the other."""
    found, (inputs, targets) = {}, samples(16)
    inputs[6] = math.nan
    for strategy in ("ddp", "fsdp"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 4))
        images = Batches(inputs, targets, 4, shuffle=False, rank=RANK, world_size=WORLD)
        options = config(distributed=Distributed(strategy, sync_batchnorm=True, timeout=60.0))
        try:
            Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters()), options).fit(images)
        except NonFiniteError as error:
            found[strategy] = str(error)
    return found


def case_all_data(folder: Path) -> dict:
    """A loader that gives every rank everything is refused, and one that knows its rank is not."""
    dataset = torch.utils.data.TensorDataset(*samples(16))
    halves = [[index + RANK * 2 for index in (at, at + 1)] for at in range(0, 16, 4)]
    loaders = {
        "error": torch.utils.data.DataLoader(dataset, 4, shuffle=True),
        "batches": data(16, 4, world=1),
        "own": torch.utils.data.DataLoader(dataset, batch_sampler=halves),
    }
    found = {}
    for name, loader in loaders.items():
        model = net()
        run = Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters()), config())
        try:
            found[name] = len(run.fit(loader).step_losses)
        except InputError as error:
            found[name] = str(error)
    return found


def case_failing(folder: Path) -> dict:
    class Failing(Callback):
        def on_step_end(self, trainer):
            if RANK == 1:
                raise ValueError("this rank fails")

    model = net()
    run = Trainer(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters()),
        config(epochs=50),
        callbacks=[Failing()],
    )
    run.fit(data(32, 4))
    return {}


def case_hanging(folder: Path) -> dict:
    """Rank 1 never comes to its second update."""

    class Hanging(Callback):
        def on_step_end(self, trainer):
            if RANK == 1:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # else torchrun kills it half a minute later
                time.sleep(1000)

    model = net()
    options = config(epochs=50, distributed=Distributed(timeout=5.0))
    optimizer = torch.optim.SGD(model.parameters())
    Trainer(model, nn.CrossEntropyLoss(), optimizer, options, callbacks=[Hanging()]).fit(data(32, 4))
    return {}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.rest = nn.Sequential(nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16))

    def forward(self, x):
        return x + self.rest(self.linear(x))


def nested() -> nn.Sequential:
    """Lists of lists of blocks, as timm's networks are made."""
    torch.manual_seed(0)
    stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block()))
    return nn.Sequential(nn.Flatten(), stages, nn.Linear(16, 4))


def case_nested(folder: Path) -> dict:
    found = {}
    for strategy in ("ddp", "fsdp"):
        for name, epochs in (("whole", 2), ("cut", 1), ("cut", 2)):
            model, place = nested(), folder / f"nested-{strategy}-{name}"
            options = {"checkpoint": Checkpoint(place), "weights": place.with_suffix(".pt"), "epochs": epochs}
            options |= {"distributed": Distributed(strategy, timeout=60.0), "ema_decay": 0.5}
            optimizer = optim.SGD(model.parameters(), lr=0.1)
            run = Trainer(model, nn.CrossEntropyLoss(), optimizer, config(**options))
            history = run.fit(data(32, 4), data(11, 4))
            epochs = [vars(epoch)["metrics"] for epoch in history.epochs]
            found[f"{strategy} {name}"] = {"losses": history.step_losses, "epochs": epochs}
    return found


def case_sharding(folder: Path) -> dict:
    """Every rank begins with weights and buffers of its own. ``to(device)`` copies, as it does from host to GPU: the
    addresses tell what is on the device when a unit is sharded."""
    found, to, shard = {}, torch.Tensor.to, fsdp.fully_shard

    def copying(t, *args, **kwargs):
        moved = to(t, *args, **kwargs)
        device = bool(args) and isinstance(args[0], torch.device)
        return moved.clone() if device and not hasattr(t, "device_mesh") else moved

    for strategy in ("ddp", "fsdp"):
        model, units = nested(), []
        torch.manual_seed(RANK)
        for t in (*model.parameters(), *model.buffers()):
            nn.init.uniform_(t) if t.is_floating_point() else t.fill_(RANK)
        names, optimizer = {m: name for name, m in model.named_modules()}, torch.optim.SGD(model.parameters(), lr=0.1)
        held = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
        loss = nn.CrossEntropyLoss()
        loss.add_module("model", model)  # as one that looks at the weights

        def sharding(unit, held=held, units=units, names=names, **options):
            units.append((names[unit], [name for name, (p, address) in held.items() if p.data_ptr() != address]))
            return shard(unit, **options)

        with mock.patch.object(torch.Tensor, "to", copying), mock.patch.object(fsdp, "fully_shard", sharding):
            options = config(distributed=Distributed(strategy, timeout=60.0))
            run = Trainer(model, loss, optimizer, options)
        state = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in model.state_dict().items()}
        found[strategy] = {
            "units": units,
            "kept": all(p.data_ptr() == address for p, address in held.values()),
            "state": {name: t.tolist() for name, t in state.items()},
            "losses": run.fit(data(16, 4)).step_losses,
        }
    return found


def case_tied(folder: Path) -> dict:
    """A block shares its weight with a layer outside of the list."""
    found = {}
    for strategy in ("ddp", "fsdp"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Sequential(Block(), Block()), nn.Linear(16, 16), nn.Linear(16, 4))
        model[2].weight = model[1][0].linear.weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = config(distributed=Distributed(strategy, timeout=60.0))
        history = Trainer(model, nn.CrossEntropyLoss(), optimizer, options).fit(data(32, 4))
        found[strategy] = {"losses": history.step_losses, "one": model[2].weight is model[1][0].linear.weight}
    return found


class Direct(Trainer):
    """Calls the model past what averages the gradients."""

    def training_step(self, batch):
        inputs, targets = batch
        return self.loss_of(self.model(inputs), targets)


def case_refused(folder: Path) -> dict:
    """Parameters whose gradients nobody would average: of a loss that learns, and those that begin to learn later; and
    those for whose gradients all would wait, as they learn no longer."""

    class Unfreeze(Callback):
        def on_epoch_start(self, trainer, epoch):
            trainer.model.requires_grad_(True)

    class Freeze(Callback):
        def on_epoch_start(self, trainer, epoch):
            trainer.model[1].requires_grad_(epoch == 0)

    found = {}
    model, scale = net(), nn.Parameter(torch.ones(()))
    try:
        Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD([*model.parameters(), scale]), config())
    except InputError as error:
        found["loss"] = str(error)
    model = net()
    next(model.parameters()).requires_grad_(False)
    try:
        optimizer = torch.optim.SGD(model.parameters())
        Trainer(model, nn.CrossEntropyLoss(), optimizer, config(), callbacks=[Unfreeze()]).fit(data(16, 4))
    except InputError as error:
        found["later"] = str(error)
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    try:
        Trainer(model, nn.CrossEntropyLoss(), optimizer, config(checkpoint=folder / "zero")).fit(data(16, 4))
    except InputError as error:
        found["zero"] = str(error)
    model = net()
    try:
        Direct(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters()), config()).fit(data(16, 4))
    except InputError as error:
        found["direct"] = str(error)
    for unused in (False, True):
        model = net()
        options = config(epochs=2, distributed=Distributed(find_unused_parameters=unused))
        run = Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters()), options, callbacks=[Freeze()])
        try:
            found[f"no longer, {unused}"] = len(run.fit(data(16, 4)).step_losses)
        except InputError as error:
            found[f"no longer, {unused}"] = str(error)
    return found


def main(folder: str, *cases: str) -> None:
    for case in cases:
        result = globals()[f"case_{case}"](Path(folder))
        Path(folder, f"{case}-{RANK}.json").write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

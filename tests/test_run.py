"""``fusedtrain train --model``: options, files and refusals; the processes are real, the images tiny."""

import copy
import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import forked
import harness
import pytest
import torch
from torch import nn

from fusedtrain import optim
from fusedtrain.cli import main
from fusedtrain.train import (
    Batches,
    FrozenNorms,
    InputError,
    SmallNet,
    TrainConfig,
    Trainer,
    checkpoint_file,
    digits,
    freeze,
    options,
    run,
    schedule,
    unfreeze,
)
from fusedtrain.train.distributed import World
from fusedtrain.train.groups import parameter_groups


def command(*arguments: str, cwd) -> subprocess.CompletedProcess:
    env = harness.environment(COLUMNS="200", GLIBC_TUNABLES="")  # no second start
    line = [sys.executable, "-m", "fusedtrain", "train", *arguments]
    return forked.run(line, cwd=cwd, env=env, timeout=300)


# Of stock layers, where the layers are not what is tested: to find what can be fused takes as long as to train them.
DIGITS = ["--model", "smallnet", "--no-fuse", "--size", "8", "--batch-size", "256", "--device", "cpu"]
DIGITS += ["--output", "out"]


def test_a_run_writes_its_options_starts_again_from_them_and_goes_on(tmp_path, monkeypatch, capsys):
    short = [
        *DIGITS,
        "--fuse",
        "--epochs",
        "2",
        "--precision",
        "bf16",
        "--ema-decay",
        "0.9",
        "--log-every",
        "1",
        "--profile",
    ]
    done = command(*short, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    for name in (
        "options.yaml",
        "metrics.jsonl",
        "weights.pt",
        "best.pt",
        "checkpoints/latest",
        "profile/trace.json",
        "profile/table.txt",
    ):
        assert (out / name).exists(), name
    written = options.read_yaml(out / "options.yaml", run.Options)
    assert written.train.precision.precision == "bf16" and written.train.epochs == 2 and written.train.ema_decay == 0.9
    steps = 2 * 6
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, steps + 1))
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", "out/options.yaml", "--epochs", "3"]) == 0
    again = capsys.readouterr().out
    assert "continues with step 12" in again and "epoch 3/3" in again and "epoch 2/3" not in again
    before = (out / "options.yaml").read_bytes()
    assert main(["train", "--config", "out/options.yaml", "--optimizer", "sgd"]) == 2  # refused: the run stays as it is
    assert (out / "options.yaml").read_bytes() == before


@pytest.fixture
def photos(tmp_path):
    """train/ and val/ with two classes of images of several sizes."""
    from PIL import Image

    for part, count in (("train", 5), ("val", 2)):
        for index, name in enumerate(("bright", "dark")):
            folder = tmp_path / "photos" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (40 + i, 50 - i), (200 - 150 * index,) * 3).save(folder / f"{i}.jpg")
    return tmp_path / "photos"


@pytest.mark.parametrize("name", ["efficientnet_b0", "mobilenet_v3_small"])
def test_models_of_timm_and_torchvision_train_on_a_folder_of_images(zoo, photos, tmp_path, monkeypatch, name, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("timm.is_model", lambda model: model == "efficientnet_b0")
    words = ["train", "--model", name, "--data", str(photos), "--size", "32", "--workers", "0", "--batch-size", "4"]
    words += ["--epochs", "1", "--warmup-epochs", "0", "--output", "out", "--mixup", "0.2", "--cutmix", "1.0"]
    words += ["--device", "cpu", "--freeze", "*.bias", "--label-smoothing", "0.1", "--layer-decay", "0.9"]
    words += ["--cache-gib", "0.01"]
    monkeypatch.setenv("FUSEDTRAIN_CACHE", str(tmp_path / "cache"))
    assert main(words) == 0, capsys.readouterr().err
    assert "fused" in capsys.readouterr().out
    stock = {
        "efficientnet_b0": lambda: zoo.timm.create_model(name, num_classes=2),
        "mobilenet_v3_small": lambda: zoo.torchvision.models.get_model(name, num_classes=2),
    }[name]()
    stock.load_state_dict(torch.load(tmp_path / "out" / "weights.pt"))
    # and a run starts from those weights, with other classes
    assert main([*words, "--init-weights", "out/weights.pt", "--output", "again"]) == 0


@pytest.mark.parametrize("names", [("training", "validation"), ("Train", "Val"), ("TRAIN", "testing")])
def test_the_parts_of_a_dataset_are_known_by_their_names(photos, names, capsys):
    for old, new in zip(("train", "val"), names):
        (photos / old).rename(photos / new)
    train, valid, classes, channels = run._datasets(run.Options(data=str(photos), size=8))
    assert (len(train), len(valid), classes, channels) == (10, 4, ["bright", "dark"], 3)
    assert [target for _, target in valid.samples] == [0, 0, 1, 1]
    run.build(run.Options(data=str(photos), size=8, workers="0"), World(TrainConfig().distributed, torch.device("cpu")))
    assert "2 classes: bright, dark\n" in capsys.readouterr().out


def test_a_run_on_the_cpu_pins_no_batches(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    world = World(TrainConfig().distributed, torch.device("cpu"))
    assert not run._loader(torch.arange(8), run.Options(), world, training=True).batches.pin_memory


@pytest.mark.parametrize("augment", [True, False])
@pytest.mark.parametrize("part", ["", "train"])
def test_decoded_images_are_kept_on_the_disk(photos, tmp_path, monkeypatch, augment, part):
    from PIL import Image

    files = sorted(photos.rglob("*.jpg"))
    for i, file in enumerate(files):
        Image.effect_noise((40 + i, 50), 60).convert("RGB").save(file)
    monkeypatch.setenv("FUSEDTRAIN_CACHE", str(tmp_path / "cache"))

    def samples(cache_gib: float) -> list:
        found, options = [], run.Options(data=str(photos / part), size=16, augment=augment, cache_gib=cache_gib)
        for dataset in run._datasets(options)[:2]:
            random.seed(0)
            found += [dataset[i] for i in range(len(dataset))]
        return found

    decoded = samples(0.0)
    assert not (tmp_path / "cache").exists()
    for _ in range(2):
        kept = samples(0.01)
        assert [target for _, target in kept] == [target for _, target in decoded]
        assert all(torch.equal(image, other) for (image, _), (other, _) in zip(kept, decoded))
        for file in files:  # of the same size and time, but no image any more; the first of a folder is looked at
            status = file.stat()
            if file.name != "0.jpg":
                file.write_bytes(bytes(status.st_size))
                os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_class_may_be_called_like_a_part(photos):
    (photos / "train" / "bright").rename(photos / "train" / "train")
    classes = run._datasets(run.Options(data=str(photos / "train"), size=8))[2]
    assert classes == ["dark", "train"]


def test_a_run_does_not_go_on_with_classes_of_other_names(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["train", "--model", "smallnet", "--data", "photos", "--size", "8", "--workers", "0", "--device", "cpu"]
    words += ["--output", "out", "--batch-size", "4"]
    assert main([*words, "--epochs", "1"]) == 0
    for part in ("train", "val"):
        (photos / part / "bright").rename(photos / part / "shiny")
    assert main([*words, "--epochs", "2"]) == 2
    message = "is of other data: of label 0 the class was 'bright', and is 'dark' now\n"
    assert capsys.readouterr().err.endswith(message)
    for part in ("train", "val"):
        (photos / part / "shiny").rename(photos / part / "bright")
    assert main([*words, "--epochs", "2"]) == 0


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_auxiliary_heads_of_torchvision_are_left_out(zoo, monkeypatch, recwarn, name):
    monkeypatch.setattr("timm.is_model", lambda model: False)
    model = run.network(run.Options(model=name), 3, 3).train()
    outputs = model(torch.rand(2, 3, 96, 96))
    assert outputs.shape == (2, 3) and not [w for w in recwarn if "initialization" in str(w.message)]
    with pytest.raises(InputError, match="torchvision has no classifier of this name"):
        run.network(run.Options(model="fcn_resnet50"), 3, 3)


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "levit_128s"])
def test_weights_of_other_classes_start_networks_with_two_heads(zoo, tmp_path, name):
    given = zoo.timm.create_model(name, num_classes=5)
    torch.save(given.state_dict(), tmp_path / "w.pt")
    model = run.network(run.Options(model=name, init_weights=tmp_path / "w.pt"), 3, 3)
    state, own = given.state_dict(), model.state_dict()
    other = {name for name in own if own[name].shape != state[name].shape}
    assert {name.split(".")[0] for name in other} == {"head", "head_dist"}
    assert all(torch.equal(own[name], state[name]) for name in own.keys() - other)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "no_such_net"], "model: there is no 'no_such_net': "),
        (["--data", "nowhere"], "data: there is no folder nowhere"),
        (
            ["--data", "high"],
            "data: high holds one class, flowers, and there is nothing to tell apart; pass high/flo",
        ),
        (
            ["--data", "kaggle"],
            "data: test_set and training_set in kaggle hold the same folders: if these are the class",
        ),
        (["--data", "apart"], "data: test and val in apart hold the same folders: if these are the classes, call the "),
        (["--data", "half"], "data: half has train, but no val, valid, validation, test or testing beside it"),
        (["--data", "alone"], "data: alone/train holds one class, cats, and there is nothing to tell apart"),
        (
            ["--model", "smallnet", "--precision", "fp16", "--init-scale", "inf"],
            "init_scale must be positive and finite, got inf",
        ),
        (
            ["--model", "smallnet", "--activation-budget-gib", "inf"],
            "activation_budget_gib must be at least 0 and finite, got inf",
        ),
        (["--model", "smallnet", "--loggers", "jsonl", "jsonl"], "loggers names one twice: jsonl, jsonl"),
        (["--model", "smallnet", "--epochs", "0"], "epochs must be at least 1, got 0"),
        (
            ["--model", "smallnet", "--per", "epoch", "--warmup-epochs", "0.5"],
            "warmup_epochs must be whole where the ra",
        ),
        (["--model", "smallnet", "--max-skipped=-1"], "max_skipped must be at least 0, got -1"),
        (["--model", "smallnet", "--patience", "3"], "patience is that of the schedule plateau; early stopping has st"),
        (["--model", "smallnet", "--lr", "0"], "lr must be positive and finite, got 0.0"),
        (["--model", "smallnet", "--lr", "inf"], "lr must be positive and finite, got inf"),
        (["--model", "smallnet", "--weight-decay", "inf"], "weight_decay must be at least 0 and finite, got inf"),
        (["--model", "smallnet", "--cutmix", "inf"], "cutmix must be at least 0 and finite, got inf"),
        (["--model", "smallnet", "--workers", "many"], "workers must be auto or a number, got 'many'"),
        (["--model", "smallnet", "--freeze", "nothing.*"], "freeze: no parameter matches 'nothing.*'"),
        (["--model", "smallnet", "--freeze-norms"], "freeze_norms needs patterns of what is frozen, see freeze"),
        (["--model", "smallnet", "--cache-gib", "-1"], "cache_gib must be at least 0 and finite, got -1.0"),
        (["--model", "smallnet", "--cache-gib", "1"], "cache_gib keeps images of a folder on the disk, and digits are"),
        (["--model", "smallnet", "--init-weights", "no.pt"], "no.pt: cannot be read: "),
        (["--model", "smallnet", "--pretrained"], "pretrained: there are no weights of smallnet; it can start from a "),
        (["--model", "smallnet", "--drop-rate", "0.1"], "drop_rate: smallnet takes none"),
        (["--model", "smallnet", "--drop-path-rate", "0.1"], "drop_path_rate: smallnet takes none"),
        (["--model", "resnet18", "--drop-path-rate", "1"], "drop_path_rate must lie in [0, 1), got 1.0"),
        (["--config", "optimizer.yaml"], "optimizer.yaml: optimizer must be one of adamw, adam, sgd, lion, rmsprop, "),
        (["--config=no.yaml"], "no.yaml cannot be read: "),
        (["--config", "newer.yaml"], "newer.yaml was written by a newer version (99); this one reads up to 1"),
        (["--config", "none.yaml"], "none.yaml: version must be a number from 1 on, got None"),
        (["--config", "twice.yaml"], "twice.yaml: epochs is named twice, again in line 3"),
        (["--config", "unknown.yaml"], "unknown.yaml: train: unknown option epoch; known are epochs, "),
        (["--config", "kind.yaml"], "kind.yaml: train: epochs must be int, got 'many'"),
        (["--config", "text.yaml"], "text.yaml: freeze must be a list, got 'blocks.*'"),
    ],
)
def test_bad_input_gets_one_line_before_anything_is_made(tmp_path, monkeypatch, capsys, words, message):
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    (tmp_path / "newer.yaml").write_text("version: 99\n")
    (tmp_path / "none.yaml").write_text("version:\n")
    (tmp_path / "twice.yaml").write_text("train:\n  epochs: 3\n  epochs: 5\n")
    (tmp_path / "unknown.yaml").write_text("version: 1\ntrain: {epoch: 3}\n")
    (tmp_path / "kind.yaml").write_text("train: {epochs: many}\n")
    (tmp_path / "text.yaml").write_text("freeze: blocks.*\n")
    (tmp_path / "optimizer.yaml").write_text("optimizer: adagrad\n")
    folders = ["high/flowers/train/red", "high/flowers/val/red", "alone/train/cats", "alone/val/cats"]
    folders += [f"kaggle/{part}_set/{name}" for part in ("training", "test") for name in ("cats", "dogs")]
    folders += [f"apart/{part}/{name}" for part in ("val", "test") for name in ("cats", "dogs")]
    folders += [f"half/train/{name}" for name in ("cats", "dogs")] + ["kaggle/.cache"]
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (9, 9)).save(tmp_path / folder / f"{i}.png")
    assert main(["train", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"fusedtrain train: {message}") and err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", run.OPTIMIZERS)
def test_every_optimizer_trains_as_timm_makes_it(zoo, tmp_path, monkeypatch, name):
    from timm.optim import create_optimizer_v2

    optim.register_with_timm()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "o.yaml").write_text(f"optimizer: {name}\n")
    own = run._optimizer(options.read_yaml("o.yaml", run.Options), SmallNet(3))
    theirs = create_optimizer_v2(SmallNet(3), f"fusedtrain{name}", lr=1e-3, weight_decay=0.05)
    different = {"params", "weight_decay", "nesterov"}  # groups come in another order
    kept = [{k: v for k, v in o.param_groups[0].items() if k not in different} for o in (own, theirs)]
    assert type(own) is type(theirs) and kept[0] == kept[1]
    assert main(["train", *DIGITS, "--epochs", "1", "--optimizer", name]) == 0
    assert options.read_yaml("out/options.yaml", run.Options).optimizer == name


def test_every_optimizer_of_the_package_is_an_option():
    found = {getattr(optim, name) for name in optim.__all__}
    assert {o for o in found if isinstance(o, type)} == set(run.OPTIMIZERS.values())
    assert get_args(get_type_hints(run.Options)["optimizer"]) == tuple(run.OPTIMIZERS)
    with pytest.raises(InputError, match=r"optimizer must be one of adamw, .*, novograd, got 'adagrad'"):
        run.check(run.Options(optimizer="adagrad"))


@pytest.mark.parametrize("name", run.OPTIMIZERS)
def test_optimizers_that_a_graph_needs_made_for_it_are(name):
    train = TrainConfig(cuda_graphs=True)
    own = run._optimizer(run.Options(optimizer=name, train=train), SmallNet(3))
    assert all(group.get("capturable", True) for group in own.param_groups)


# Models of timm and of torchvision, which alone may be known; the rates that they take.
DROPS = {
    "mobilenetv3_small_050": ("timm", ("drop_rate", "drop_path_rate")),
    "dla46_c": ("timm", ("drop_rate",)),  # raises for the other
    "hrnet_w18_small": ("timm", ("drop_rate",)),  # forgets the other
    "efficientnet_b0": ("torchvision", ("drop_rate", "drop_path_rate")),
    "mobilenet_v3_small": ("torchvision", ("drop_rate",)),  # forgets the other
    "resnet18": ("torchvision", ()),
    "convnext_tiny": ("torchvision", ("drop_path_rate",)),  # forgets the other
}


@pytest.mark.parametrize("name", DROPS)
def test_rates_of_dropout_reach_the_model_or_are_refused(zoo, monkeypatch, name):
    package, takes = DROPS[name]
    if package == "torchvision":
        monkeypatch.setattr("timm.is_model", lambda model: False)
    for option in ("drop_rate", "drop_path_rate"):
        own = run.Options(model=name, **{option: 0.5})
        if option not in takes:
            with pytest.raises(InputError, match=f"^{option}: {name} .*takes "):
                run.network(own, 3, 3)
            continue
        model = run.network(own, 3, 3).train()
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(8, 3, 64, 64, generator=generator)
        runs = []
        for _ in range(2):  # statistics are those of the batch: nothing else differs
            torch.manual_seed(len(runs))
            runs.append(model(images))
        assert not torch.equal(*runs)
        none = run.network(run.Options(model=name, drop_rate=0.0 if "drop_rate" in takes else None), 3, 3)
        assert not any(isinstance(m, nn.Dropout) and m.p for m in none.modules())


def test_no_dropout_is_told_from_dropout_that_a_model_forgets(zoo, monkeypatch):
    """The first has other dropouts that stay; the second holds one, and forgets the keyword."""
    model = run.network(run.Options(model="cpubone_nano", drop_rate=0.0), 3, 3)
    assert any(isinstance(m, nn.Dropout) and m.p for m in model.modules())
    monkeypatch.setattr("timm.is_model", lambda model: False)
    forgets = lambda name, num_classes, **forgotten: nn.Sequential(nn.Dropout(0.1), nn.Linear(4, num_classes))  # noqa: E731
    monkeypatch.setattr("torchvision.models.get_model", forgets)
    with pytest.raises(InputError, match="drop_rate: resnet18 of torchvision takes none"):
        run.network(run.Options(model="resnet18", drop_rate=0.0), 3, 3)


# Names whose files are old (densenet121), of two versions (mnasnet0_5), or hold auxiliary heads (inception_v3).
@pytest.mark.parametrize("name", ["mobilenet_v3_small", "densenet121", "mnasnet0_5", "inception_v3"])
def test_weights_of_torchvision_start_a_run_with_other_classes(zoo, tmp_path, monkeypatch, recwarn, name):
    models = zoo.torchvision.models
    monkeypatch.setattr("timm.is_model", lambda model: False)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    given = models.get_model(name, **({"init_weights": False} if name == "inception_v3" else {}))
    file = tmp_path / "checkpoints" / Path(models.get_model_weights(name).DEFAULT.url).name
    torch.save(given.state_dict(), file)
    own = run.Options(model=name, pretrained=True)
    state = given.state_dict()
    for classes in (5, 1000):
        model = run.network(own, classes, 3)
        loaded = model.state_dict()
        other = {key for key in loaded if not torch.equal(loaded[key], state[key])}
        assert len(other) == (2 if classes == 5 else 0) and not [w for w in recwarn if "left out" in str(w.message)]
        assert model(torch.rand(2, 3, 96, 96)).shape == (2, classes)
        assert not hasattr(model, "transform_input") or model.transform_input  # as these weights want images
    file.write_bytes(b"damaged")
    with pytest.raises(InputError, match=f"pretrained: the weights of {name} cannot be had: "):
        run.network(own, 5, 3)


def test_weights_of_a_model_with_versions_start_a_run(zoo, tmp_path, monkeypatch):
    monkeypatch.setattr("timm.is_model", lambda model: False)
    given = zoo.torchvision.models.mnasnet0_5(num_classes=3).state_dict()
    torch.save(dict(given), tmp_path / "w.pt")
    model = run.network(run.Options(model="mnasnet0_5", init_weights=tmp_path / "w.pt"), 3, 3)
    assert all(torch.equal(t, given[name]) for name, t in model.state_dict().items())


def test_weights_that_do_not_fit_or_are_not_there_say_so(zoo, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trained = {name.partition(".")[0] for name in zoo.timm.list_pretrained()}
    without = next(name for name in zoo.timm.list_models("*net*") if name not in trained)
    assert main(["train", "--model", without, "--pretrained", "--device", "cpu"]) == 2
    assert f"model: {without} of timm: No pretrained weights exist" in capsys.readouterr().err
    torch.save(SmallNet(10, 3).state_dict(), "w.pt")
    assert main(["train", *DIGITS, "--init-weights", "w.pt"]) == 2
    assert "init_weights: w.pt has other shapes of conv_stem.weight of smallnet" in capsys.readouterr().err


def test_a_full_disk_gets_one_line(tmp_path, monkeypatch, capsys):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_file, "write", full)
    assert main(["train", *DIGITS[:-1], str(tmp_path / "out"), "--every-steps", "1"]) == 1
    err = capsys.readouterr().err
    assert re.fullmatch(r"fusedtrain train: the checkpoint of step 1 could not be written .*: No space left .*\n", err)


@pytest.mark.parametrize("full", ["metrics.jsonl", "best.pt", "weights.pt"])
def test_so_does_one_that_is_full_for_another_file(tmp_path, capsys, full):
    out = tmp_path / "out"
    disk = out if full == "metrics.jsonl" else out / "disk"
    disk.mkdir(parents=True)
    size = "4k" if full == "metrics.jsonl" else "64k"
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small disk")
    try:
        words = ["train", *DIGITS[:-1], str(out), "--log-every", "1", "--epochs", "1"]
        elsewhere = {"--weights": tmp_path / "w.pt", "--best-weights": tmp_path / "b.pt", "--directory": tmp_path / "c"}
        option = {"best.pt": "--best-weights", "weights.pt": "--weights"}.get(full)
        elsewhere |= {option: disk / full} if option else {}
        status = main([*words, *(str(part) for pair in elsewhere.items() for part in pair)])
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    err = capsys.readouterr().err
    assert status == 1 and err.startswith("fusedtrain train: ") and err.count("\n") == 1
    assert full in err and "No space left on device" in err


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: form.replace("%Y%m%d-%H%M%S", "now"))
    for _ in range(2):
        assert main(["train", *DIGITS[:-2], "--epochs", "1"]) == 0
    folders = sorted((tmp_path / "runs").iterdir())
    assert [folder.name for folder in folders] == ["smallnet-now", "smallnet-now-2"]
    for folder in folders:
        assert len([line for line in (folder / "metrics.jsonl").open() if "epoch" in json.loads(line)]) == 1
    assert [digits._make_output(None).name for _ in range(2)] == ["digits-now", "digits-now-2"]


def test_a_run_starts_from_weights_that_lack_the_counts_of_batches(tmp_path, monkeypatch):
    """As torch wrote them before version 0.4.1."""
    monkeypatch.chdir(tmp_path)
    state = SmallNet(10).state_dict()
    torch.save({name: t for name, t in state.items() if not name.endswith("num_batches_tracked")}, "old.pt")
    assert main(["train", *DIGITS, "--fuse", "--init-weights", "old.pt", "--epochs", "1"]) == 0


def test_weights_that_the_model_has_no_layer_for_are_named(tmp_path, recwarn):
    state = SmallNet(7).state_dict()
    deeper = {name.replace("blocks.4", "blocks.5"): t for name, t in state.items() if name.startswith("blocks.4")}
    torch.save(state | deeper, tmp_path / "deeper.pt")
    own = run.Options(init_weights=tmp_path / "deeper.pt")
    left_out = (
        r"smallnet lacks, which is left out: blocks.5.bn1.bias, blocks.5.bn1.num_batches_tracked, .* and \d+ more"
    )
    with pytest.warns(UserWarning, match=left_out):
        model = run.network(own, 10, 1)
    assert torch.equal(model.conv_stem.weight, state["conv_stem.weight"])
    torch.save(state, tmp_path / "deeper.pt")
    run.network(own, 10, 1)
    assert not recwarn  # a last layer of other classes is meant to be left out


def test_the_folder_of_a_run_is_verified(tmp_path, capsys):
    assert main(["train", *DIGITS[:-1], str(tmp_path / "out"), "--epochs", "1"]) == 0
    capsys.readouterr()
    assert main(["verify-checkpoint", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: whole\n"
    assert main(["verify-checkpoint", str(tmp_path / "out" / "weights.pt")]) == 1
    assert capsys.readouterr().out == "it is no checkpoint, but a file of torch.save, such as weights\n"


def test_options_are_never_half_written(tmp_path, monkeypatch):
    path = tmp_path / "options.yaml"
    options.write_yaml(path, run.Options(lr=0.5))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="killed"):
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("killed")))
        options.write_yaml(path, run.Options(lr=0.25))
    assert options.read_yaml(path, run.Options).lr == 0.5


def test_options_survive_yaml(tmp_path):
    words = "--model x --milestones 3 5 --schedule multistep --strategy fsdp --loggers jsonl tensorboard --lr 1e-4"
    words += " --tf32 False"
    chosen = run.parse(words.split())
    options.write_yaml(tmp_path / "o.yaml", chosen)
    assert options.read_yaml(tmp_path / "o.yaml", run.Options) == chosen
    assert run.parse(["--config", str(tmp_path / "o.yaml")]) == chosen
    (tmp_path / "w.yaml").write_text("workers: 4\n")
    assert run.parse(["--config", str(tmp_path / "w.yaml")]).workers == "4"
    assert chosen.train.precision.tf32 is False and run.Options().train.precision.tf32 is None
    assert chosen.train.schedule.milestones == (3, 5) and chosen.train.logging.loggers == ("jsonl", "tensorboard")


def test_keys_of_merged_mappings_may_be_named_again(tmp_path):
    (tmp_path / "o.yaml").write_text("a: {b: &b {<<: &c {x: 1, y: 1}, x: 2}}\nd: {<<: *b, x: 3}\n1: 1\n'1': 2\n")
    content = options.load_yaml(tmp_path / "o.yaml")
    assert content == {"a": {"b": {"x": 2, "y": 1}}, "d": {"x": 3, "y": 1}, 1: 1, "1": 2}


def names_of_options() -> list[str]:
    parts = [part for part in (run.Options(), TrainConfig(), *vars(TrainConfig()).values()) if is_dataclass(part)]
    found = [own.name for part in parts for own in fields(part) if not is_dataclass(getattr(part, own.name))]
    return [f"--{name.replace('_', '-')}" for name in found]


def test_every_option_of_the_loop_is_on_the_command_line_with_its_default(capsys):
    with pytest.raises(SystemExit):
        run.parse(["--help"])
    text = capsys.readouterr().out
    assert [name for name in names_of_options() if name not in text] == []
    assert text.count("(default: ") > 50
    assert re.search(r":\w+:`", text) is None  # Sphinx's words, which mean nothing here


def test_the_document_lists_every_option_once_and_no_other():
    text = (Path(__file__).parents[1] / "docs" / "training.md").read_text()
    rows = [line for line in text.partition("### Options")[2].partition("\n## ")[0].splitlines() if line[:3] == "| `"]
    listed = [name for row in rows for name in re.findall(r"`(--[\w-]+)`", row)]
    assert sorted(listed) == sorted(names_of_options())
    assert all(f" {name}" in text for name in (*run.OPTIMIZERS, *schedule.SCHEDULES))


def test_an_option_that_there_is_not_names_the_help_that_lists_the_others():
    with pytest.raises(InputError, match=r"--bogus.*; fusedtrain train --model NAME --help lists the options"):
        run.parse(["--bogus", "3"])


# --- groups -----------------------------------------------------------------------------------------------------------


def small() -> nn.Sequential:
    block = lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))  # noqa: E731
    return nn.Sequential(block(), block(), nn.Linear(4, 2))


def test_biases_and_norms_do_not_decay_and_rates_fall_towards_the_input():
    model = small()
    groups = parameter_groups(model, lr=1.0, weight_decay=0.1, layer_decay=0.5)
    rates = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    found = {name: rates[id(p)] for name, p in model.named_parameters()}
    assert found["0.0.weight"] == (0.25, 0.1) and found["0.0.bias"] == found["0.1.weight"] == (0.25, 0.0)
    assert found["1.1.bias"] == (0.5, 0.0) and found["2.weight"] == (1.0, 0.1) and len(found) == 10
    optim.AdamW(groups)


def test_frozen_parameters_do_not_learn_and_stand_in_no_group():
    model = small()
    assert freeze(model, ["0.*"]) == ["0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias"]
    assert sum(len(group["params"]) for group in parameter_groups(model, 1.0)) == 6
    for everything in (["*"], ["1.*", "2.*"]):
        with pytest.raises(InputError, match="no parameter is left to learn"):
            freeze(model, everything)
    assert all(p.requires_grad for p in model[1:].parameters())  # nothing was changed
    with pytest.raises(InputError, match=r"freeze: patterns must be a list, got '1\.\*'"):
        freeze(model, "1.*")


def test_frozen_parameters_learn_again_where_their_names_match():
    model = small()
    freeze(model, ["0.*", "1.*"])
    assert unfreeze(model, ["1.?.bias", "1.*"]) == ["1.0.bias", "1.1.bias", "1.0.weight", "1.1.weight"]
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == [
        f"0.{layer}.{kind}" for layer in (0, 1) for kind in ("weight", "bias")
    ]
    with pytest.raises(InputError, match=r"unfreeze: no parameter matches '3\.\*'"):
        unfreeze(model, ["3.*"])


@pytest.mark.parametrize("fused", [False, True])
def test_norms_of_frozen_layers_keep_their_statistics_in_a_run(tmp_path, monkeypatch, fused):
    monkeypatch.chdir(tmp_path)
    words = ["train", *DIGITS, "--epochs", "1", "--freeze", "blocks.*", "--fuse" if fused else "--no-fuse"]
    counts = []
    for more in ([], ["--freeze-norms"]):
        shutil.rmtree("out", ignore_errors=True)
        assert main([*words, *more]) == 0
        state = torch.load("out/weights.pt")
        counts.append({name for name, t in state.items() if name.endswith("num_batches_tracked") and t})
    assert {name for name in counts[0] if name.startswith("blocks.")} == counts[0] - counts[1] != set()
    assert counts[1]


@pytest.mark.parametrize("fused", [False, True])
def test_norms_of_frozen_layers_keep_their_statistics(fused):
    model = SmallNet(10, layers="fused" if fused else "stock")
    frozen = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)][:-1]
    freeze(model, [f"{name}.*" for name in frozen])
    before = copy.deepcopy(dict(model.named_buffers()))
    torch.manual_seed(0)
    batches = Batches(torch.randn(16, 1, 16, 16), torch.randint(10, (16,)), 8, shuffle=False)
    config = TrainConfig(epochs=2, device="cpu")
    optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    Trainer(model, nn.CrossEntropyLoss(), optimizer, config, callbacks=[FrozenNorms()]).fit(batches, batches)
    moved = {name.rpartition(".")[0] for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])}
    assert len(moved) == 1 and len(frozen) > 2 and not moved & {*frozen}

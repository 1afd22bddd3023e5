"""The training run of ``fusedtrain train --model``: any timm or torchvision classifier on a folder of images."""

import dataclasses
import functools
import importlib
import pickle
import random
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Literal

import torch
from torch import nn

import fusedtrain
from fusedtrain import data as fdata
from fusedtrain import optim
from fusedtrain._extras import need
from fusedtrain.data import folder
from fusedtrain.train import groups, parity
from fusedtrain.train.callbacks import Callback, Callbacks
from fusedtrain.train.checkpoint import RUN_FOLDER, CheckpointError
from fusedtrain.train.config import TrainConfig, resolve_device
from fusedtrain.train.distributed import World
from fusedtrain.train.errors import InputError, make_folder, new_folder, require, require_count
from fusedtrain.train.logging import Logging
from fusedtrain.train.model import SmallNet
from fusedtrain.train.options import parse_command, read_yaml, write_yaml
from fusedtrain.train.profile import Profile
from fusedtrain.train.records import History
from fusedtrain.train.rng import SeededDataset
from fusedtrain.train.sampler import EpochSampler
from fusedtrain.train.saving import Checkpoint
from fusedtrain.train.schedule import Schedule
from fusedtrain.train.stopping import EarlyStopping
from fusedtrain.train.trainer import Trainer
from fusedtrain.train.weights import read_weights

OPTIMIZERS = {"adamw": optim.AdamW, "adam": optim.Adam, "sgd": optim.SGD, "lion": optim.Lion}
OPTIMIZERS |= {"rmsprop": optim.RMSprop, "rmsproptf": optim.RMSpropTF, "lamb": optim.Lamb, "adan": optim.Adan}
OPTIMIZERS |= {"novograd": optim.NovoGrad}
# As timm's factory makes them.
DEFAULTS = {"sgd": {"momentum": 0.9}, "rmsprop": {"momentum": 0.9, "alpha": 0.9}}
DEFAULTS |= {"rmsproptf": DEFAULTS["rmsprop"]}
CAPTURABLE = ("adamw", "adam", "rmsprop")  # that a CUDA graph holds only where they were made for it
DROPS = {"drop_rate": "dropout", "drop_path_rate": "stochastic_depth_prob"}  # timm's keywords and torchvision's
AUXILIARY = ("googlenet", "inception_v3")  # torchvision's with a second head for training
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as timm takes them


@dataclass(frozen=True)
class Options:
    """Trains a classifier of timm or torchvision on a folder of images.

    The output folder receives options.yaml (``fusedtrain train --config options.yaml`` starts the run again),
    metrics.jsonl, the checkpoints, weights.pt and best.pt. A run whose output folder holds checkpoints goes on.

    Args:
        model: name in timm or torchvision, or smallnet.
        data: folder with train/CLASS/*.jpg and val/CLASS/*.jpg (also training; valid, validation, test), or with
            CLASS/*.jpg, of which a tenth is for validation; or digits, those of scikit-learn.
        size: pixels of a side.
        batch_size: images per step and process.
        workers: processes that load images; auto measures.
        augment: random crops and mirror images.
        cache_gib: GiB on the disk, for each set of a folder, in which decoded images are kept for later epochs and runs
            (``fusedtrain.data.SampleCache``); 0 decodes them every time.
        pretrained: start from the weights that timm or torchvision downloads, of torchvision its best ones.
        init_weights: start from this file: of timm, torchvision or an earlier run; a last layer of other classes is
            left out.
        fuse: put fused layers in the place of stock ones.
        drop_rate: dropout in front of the last layer, or wherever the model has it; None: the model's own.
        drop_path_rate: of blocks that are left out for a sample, the most at the last one (stochastic depth); None: the
            model's own.
        optimizer: of fusedtrain.optim; with momentum 0.9 where timm gives one, and lamb clips to a norm of 1 where
            ``max_grad_norm`` does not say otherwise.
        lr: peak learning rate.
        weight_decay: of weights, not of biases and norms.
        decay_all: biases and norms decay too.
        layer_decay: factor of the rate from each block to the one before it.
        freeze: patterns of parameters that do not learn.
        freeze_norms: normalisations that are frozen as a whole keep their running statistics, and use them.
        label_smoothing: part of the target that is spread over all classes.
        mixup: alpha of mixing two images; 0 does not. Needs torchvision.
        cutmix: alpha of pasting a part of one image into another; 0 does not. Needs torchvision.
        output: folder for the results.
        profile: trace some steps into the folder profile of the results, see ``profile_wait`` and ``profile_steps``.
        train: the loop.
    """

    model: str = "smallnet"
    data: str = "digits"
    size: int = 224
    batch_size: int = 64
    workers: str = "auto"
    augment: bool = True
    cache_gib: float = 0.0
    pretrained: bool = False
    init_weights: Path | None = None
    fuse: bool = True
    drop_rate: float | None = None
    drop_path_rate: float | None = None
    optimizer: Literal["adamw", "adam", "sgd", "lion", "rmsprop", "rmsproptf", "lamb", "adan", "novograd"] = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    decay_all: bool = False
    layer_decay: float | None = None
    freeze: tuple[str, ...] = ()
    freeze_norms: bool = False
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    output: Path | None = None
    profile: bool = False
    train: TrainConfig = field(default_factory=TrainConfig)


def parse(arguments: list[str], prog: str = "fusedtrain train --model NAME") -> Options:
    """Options from the command line, over those of ``--config FILE``, over the defaults."""
    arguments, default = [part for word in arguments for part in _split(word)], None
    if "--config" in arguments:
        at = arguments.index("--config")
        require(len(arguments) > at + 1, "--config needs a file")
        default = read_yaml(Path(arguments[at + 1]), Options)
        del arguments[at : at + 2]
    extra = {} if default is None else {"default": default}
    config = (need("tyro", "train").conf.OmitArgPrefixes,)
    return parse_command(Options, arguments, prog, config=config, **extra)


def _split(word: str) -> list[str]:
    return word.split("=", 1) if word.startswith("--config=") else [word]


def run(options: Options) -> History:
    """Trains as the options say.

    Raises:
        InputError: the options cannot work; nothing is trained then.
    """
    check(options)
    world = World(options.train.distributed, resolve_device(options.train.device))
    trainer, train, valid = build(options, world)
    output = options.output
    if output is None:
        name = Path("runs", time.strftime(f"{options.model}-%Y%m%d-%H%M%S"))
        output = Path(world.decide(str(new_folder(name, "the output folder")) if world.rank == 0 else None))
    make_folder(output, "the output folder")
    written = OptionsFile(output / "options.yaml", dataclasses.replace(options, output=output))
    trainer.callbacks = Callbacks([written, *frozen_norms(options)])
    config = options.train
    checkpoint, logging, profile = config.checkpoint, config.logging, config.profile
    if options.profile and profile.profile_dir is None:
        profile = dataclasses.replace(profile, profile_dir=output / "profile")
    trainer.config = dataclasses.replace(
        config,
        weights=config.weights or output / "weights.pt",
        best_weights=config.best_weights or output / "best.pt",
        checkpoint=dataclasses.replace(checkpoint, directory=checkpoint.directory or output / RUN_FOLDER),
        logging=dataclasses.replace(logging, log_dir=logging.log_dir or output),
        profile=profile,
    )
    return trainer.fit(train, valid)


def compare(options: Options, ranks: int, updates: int) -> parity.Report:
    """Compares ``ranks`` processes with one, see :mod:`fusedtrain.train.parity`."""
    check(options)
    train = steps_alone(
        options.train,
        device="cpu",
        precision="fp64",
        compile=None,
        cuda_graphs=False,
        ema_decay=None,
        distributed=dataclasses.replace(options.train.distributed, bf16_compress=False),
    )
    options = dataclasses.replace(options, workers="0", train=train)
    return parity.compare(functools.partial(_part, options), ranks, updates)


def steps_alone(train: TrainConfig, **changes) -> TrainConfig:
    """Returns the loop without what it writes, and without ends before the last epoch."""
    nothing = {"weights": None, "best_weights": None, "checkpoint": Checkpoint(), "logging": Logging()}
    nothing |= {"profile": Profile(), "early_stopping": EarlyStopping()}
    return dataclasses.replace(train, **nothing, **changes)


def _part(options: Options, factor: int) -> tuple["Classifier", Iterable]:
    options = dataclasses.replace(options, batch_size=factor * options.batch_size)
    return build(options, World(options.train.distributed, torch.device("cpu")))[:2]


def build(options: Options, world: World) -> tuple["Classifier", Iterable, Iterable]:
    """Returns what trains, and the batches for training and for validation."""
    train, valid, names, channels = _datasets(options)
    classes = len(names)
    if world.rank == 0 and options.data != "digits":
        listed = names if classes <= 10 else [*names[:9], "...", names[-1]]
        print(f"{classes} classes: {', '.join(listed)}")
    torch.manual_seed(options.train.seed)
    trainer = classifier(options, network(options, classes, channels), classes, shown=world.rank == 0)
    return trainer, _loader(train, options, world, True), _loader(valid, options, world, False)


def classifier(options: Options, model: nn.Module, classes: int, shown: bool = False) -> "Classifier":
    """Returns what trains a model of stock layers, which it changes in place.

    Args:
        options: all of them, but the data and the name of the model.
        model: takes images, returns logits ``[N, classes]``.
        classes: of the targets.
        shown: print how many layers are fused.
    """
    if options.freeze:
        groups.freeze(model, options.freeze)
    if options.fuse:
        fused = fusedtrain.fuse(model)
        if shown:
            print(f"fused {len(fused.swapped)} of {len(fused)} candidate layers")
    loss = nn.CrossEntropyLoss(label_smoothing=options.label_smoothing)
    optimizer, callbacks = _optimizer(options, model), frozen_norms(options)
    trainer = Classifier(model, loss, optimizer, options.train, callbacks=callbacks, title=options.model)
    trainer.mix = _mix(options, classes)
    return trainer


def frozen_norms(options: Options) -> list[Callback]:
    """Returns what holds frozen normalisations still, if that is wanted."""
    return [groups.FrozenNorms()] if options.freeze_norms else []


class OptionsFile(Callback):
    """Writes the options once the run begins: one that is refused leaves those of the run in that folder alone."""

    def __init__(self, path: Path, options: Options):
        self.path, self.options = path, options

    def on_fit_start(self, trainer) -> None:
        if trainer.world.rank == 0:
            write_yaml(self.path, self.options)


class Classifier(Trainer):
    """A Trainer that mixes images in training."""

    mix = None

    def training_step(self, batch):
        inputs, targets = batch
        if self.mix is not None:
            inputs, targets = self.mix(inputs, targets)
        return self.loss_of(self.forward(inputs), targets)


def check(options: Options) -> None:
    """Raises InputError for values that cannot be."""
    require_count("batch_size", options.batch_size)
    require_count("size", options.size)
    require(0 < options.lr < inf, f"lr must be positive and finite, got {options.lr}")
    names = ", ".join(OPTIMIZERS)
    require(options.optimizer in OPTIMIZERS, f"optimizer must be one of {names}, got {options.optimizer!r}")
    decay = options.weight_decay
    require(0 <= decay < inf, f"weight_decay must be at least 0 and finite, got {decay}")
    smoothing = options.label_smoothing
    require(0 <= smoothing < 1, f"label_smoothing must lie in [0, 1), got {smoothing}")
    for name, alpha in (("mixup", options.mixup), ("cutmix", options.cutmix)):
        require(0 <= alpha < inf, f"{name} must be at least 0 and finite, got {alpha}")
    for name, rate in drops(options).items():
        require(0 <= rate < 1, f"{name} must lie in [0, 1), got {rate}")
        require(options.model != "smallnet", f"{name}: smallnet takes none")
    mixed = options.mixup or options.cutmix
    require(not (options.train.cuda_graphs and mixed), "cuda_graphs does not go with mixup and cutmix")
    has_none = options.pretrained and options.model == "smallnet"
    require(not has_none, "pretrained: there are no weights of smallnet; it can start from a file, see init_weights")
    require(options.freeze or not options.freeze_norms, "freeze_norms needs patterns of what is frozen, see freeze")
    require(0 <= options.cache_gib < inf, f"cache_gib must be at least 0 and finite, got {options.cache_gib}")
    kept = options.cache_gib and options.data == "digits"
    require(not kept, "cache_gib keeps images of a folder on the disk, and digits are none")
    schedule = options.train.schedule
    waits = schedule.schedule == "plateau" or schedule.patience == Schedule.patience
    require(waits, "patience is that of the schedule plateau; early stopping has stop_patience")
    auto = options.workers == "auto"
    require(auto or options.workers.isdecimal(), f"workers must be auto or a number, got {options.workers!r}")


def _datasets(options: Options):
    """Returns training and validation data, the names of the classes and the number of channels."""
    if options.data == "digits":
        train, valid = fdata.digits("train", min(options.size, 32)), fdata.digits("valid", min(options.size, 32))
        return train, valid, list("0123456789"), 1
    root = Path(options.data)
    require(root.is_dir(), f"data: there is no folder {root}")
    crop = RandomCrop(options.size) if options.augment else None
    size = None if options.augment else options.size
    try:
        parts = folder.parts(root)
        if parts is None:
            whole = _images(root, options, options.size)
            augmented = _images(root, options, size, crop)
            order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0)).tolist()
            count = max(1, len(whole) // 10)
            require(len(whole) > 1, f"data: {root} holds a single image")
            classes = _folder_of(whole).classes
            _check_classes(root, classes)
            subset = torch.utils.data.Subset
            return subset(augmented, order[count:]), subset(whole, order[:count]), classes, 3
        names = f"{', '.join(folder.VALIDATION[:-1])} or {folder.VALIDATION[-1]}"
        require(parts[1] is not None, f"data: {root} has {parts[0].name}, but no {names} beside it")
        train = _images(parts[0], options, size, crop)
        valid = _images(parts[1], options, options.size)
    except (ValueError, ModuleNotFoundError) as error:  # the second: of the package that reads images
        raise InputError(f"data: {error}") from None
    classes = _folder_of(train).classes
    _check_classes(parts[0], classes)
    if classes != _folder_of(valid).classes:
        raise InputError(f"data: {parts[0]} and {parts[1]} have different classes")
    return train, valid, classes, 3


def _images(root: Path, options: Options, size: int | None, crop: "RandomCrop | None" = None):
    """Returns the images of a folder, from the disk decoded where they are kept there."""
    if not options.cache_gib:
        return fdata.ImageFolder(root, size=size, transform=crop)
    then = None if crop is None else functools.partial(_crop_kept, crop)
    return fdata.SampleCache(fdata.ImageFolder(root, size=size), then=then, max_bytes=int(options.cache_gib * 2**30))


def _crop_kept(crop: "RandomCrop", sample: tuple) -> tuple:
    from PIL import Image

    image, target = sample
    return crop(Image.fromarray(image.permute(1, 2, 0).numpy())), target


def _folder_of(dataset) -> fdata.ImageFolder:
    """Returns the folder behind a dataset of :func:`_images`."""
    return dataset.dataset if isinstance(dataset, fdata.SampleCache) else dataset


def _check_classes(root: Path, classes: list[str]) -> None:
    """A single class is learnt at once, perfectly, and most often a folder too high."""
    if len(classes) < 2:
        inner = root / classes[0]
        hint = f"; pass {inner}, which has {found[0].name}" if (found := folder.parts(inner)) else ""
        raise InputError(f"data: {root} holds one class, {classes[0]}, and there is nothing to tell apart{hint}")


class RandomCrop:
    """A random part of the image, scaled to ``size``, mirrored in half of the cases; a uint8 tensor.

    Source: Szegedy et al., https://arxiv.org/abs/1409.4842 (area 8 to 100 %, sides 3:4 to 4:3)
    """

    def __init__(self, size: int):
        self.size = size

    def __repr__(self) -> str:
        return f"RandomCrop({self.size})"

    def __call__(self, image):
        import numpy as np
        from PIL import Image

        width, height = image.size
        for _ in range(10):
            area, ratio = width * height * random.uniform(0.08, 1.0), random.uniform(3 / 4, 4 / 3)
            w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
            if 0 < w <= width and 0 < h <= height:
                break
        else:
            w = h = min(width, height)
        left, top = random.randint(0, width - w), random.randint(0, height - h)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, (left, top, left + w, top + h))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def _loader(dataset, options: Options, world: World, training: bool):
    sampler = EpochSampler(
        len(dataset),
        options.batch_size,
        shuffle=training,
        seed=options.train.seed,
        rank=world.rank,
        world_size=world.size,
    )
    seeded = SeededDataset(dataset, options.train.seed) if training else dataset
    images = options.data != "digits"
    workers = int(options.workers) if options.workers.isdecimal() else ("auto" if images else 0)
    pins = world.device.type == "cuda"  # else a GPU that is left alone would lend its context
    loader = fdata.loader(seeded, batch_sampler=sampler, num_workers=workers, pin_memory=pins)
    return fdata.DevicePrefetcher(
        loader, world.device, channels_last=options.train.channels_last, normalize=(MEAN, STD) if images else None
    )


def network(options: Options, classes: int, channels: int) -> nn.Module:
    """Returns the model of that name, of stock layers, with the weights that it starts from.

    Raises:
        InputError: there is none of that name, it takes no such images or rates, or there are no such weights.
    """
    if options.model == "smallnet":
        model = SmallNet(classes, channels, layers="stock")
    else:
        model = _from_zoo(options, classes, channels)
    start(options, model)
    return model


def start(options: Options, model: nn.Module) -> None:
    """Loads ``options.init_weights`` where that is given."""
    if options.init_weights is None:
        return
    try:
        state = read_weights(options.init_weights)
    except CheckpointError as error:
        raise InputError(str(error)) from None
    _start_from(model, state, "init_weights", options.init_weights, options.model)


def _start_from(model: nn.Module, state: dict, option: str, source, name: str) -> None:
    """Loads weights, but for a last layer of other classes; InputError where they lack others, or have other shapes."""
    own = model.state_dict()
    fitting = {name: t for name, t in state.items() if name in own and own[name].shape == t.shape}
    last = _last_layer(model)
    # Old files lack the counts of batches, without which torch loads them too.
    missing = sorted(n for n in own.keys() - fitting.keys() - last if not n.endswith("num_batches_tracked"))
    why = "has other shapes of" if missing and missing[0] in state else "lacks"
    require(not missing, f"{option}: {source} {why} {', '.join(missing[:3])} of {name}")
    own.update(fitting)  # with the versions of its modules, which some of torchvision's ask for
    model.load_state_dict(own)
    if more := sorted(state.keys() - own.keys() - last):
        listed = ", ".join(more[:3]) + (f" and {len(more) - 3} more" if len(more) > 3 else "")
        what = f"{source} holds what {name} lacks"
        warnings.warn(f"{option}: {what}, which is left out: {listed}", stacklevel=3)


def _last_layer(model: nn.Module) -> set[str]:
    """Returns the names in the state_dict of the layers that know the classes: where timm says which, those too."""
    own = model.state_dict(keep_vars=True)
    tops = {name.split(".")[0] for name in list(own)[-2:]}
    heads = model.get_classifier() if hasattr(model, "get_classifier") else ()
    heads = heads if isinstance(heads, (tuple, list, nn.ModuleList)) else (heads,)
    states = [head.state_dict(keep_vars=True) for head in heads if isinstance(head, nn.Module)]
    of_heads = {id(tensor) for state in states for tensor in state.values()}
    return {name for name, tensor in own.items() if name.split(".")[0] in tops or id(tensor) in of_heads}


def _from_zoo(options: Options, classes: int, channels: int) -> nn.Module:
    reasons = []
    for package, make in (("timm", _from_timm), ("torchvision", _from_torchvision)):
        try:
            importlib.import_module(package)
        except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision of another torch
            reasons.append(f"{package} cannot be imported: {_first_line(error)}")
            continue
        model = make(options, classes, channels)
        if model is not None:
            if not _takes_drops(options, model, package):  # none, beside others that stay: tell by another rate
                _from_zoo(dataclasses.replace(options, drop_rate=0.5, pretrained=False), classes, channels)
            return model
        reasons.append(f"{package} has no classifier of this name")
    raise InputError(f"model: there is no {options.model!r}: {'; '.join(reasons)}")


def _from_timm(options: Options, classes: int, channels: int) -> nn.Module | None:
    import timm

    if not timm.is_model(options.model):
        return None
    kind = {"pretrained": options.pretrained, "num_classes": classes, "in_chans": channels}
    try:
        return timm.create_model(options.model, **kind, **drops(options))
    except RuntimeError as error:  # of weights that there are not, for instance
        raise InputError(f"model: {options.model} of timm: {_first_line(error)}") from error
    except TypeError as error:
        _refuse_drops(options, DROPS.keys(), error)
        raise


def _from_torchvision(options: Options, classes: int, channels: int) -> nn.Module | None:
    from torchvision import models

    name = options.model
    if name not in models.list_models(module=models):
        return None
    require(channels == 3, f"model: {name} of torchvision takes 3 channels, not {channels}")
    # With auxiliary heads outputs in training are several; GoogLeNet warns of weights that nobody asked for. Their
    # weights want other images than those of the rest.
    plain = {"aux_logits": False, "init_weights": True, "transform_input": options.pretrained}
    kind = {DROPS[option]: rate for option, rate in drops(options).items()}
    kind |= plain if name in AUXILIARY else {}
    try:
        model = models.get_model(name, num_classes=classes, **kind)
    except TypeError as error:
        _refuse_drops(options, DROPS.values(), error)
        raise
    if options.pretrained:
        try:
            state = models.get_model(name, weights="DEFAULT").state_dict()
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:  # the last two: of a damaged file
            raise InputError(f"pretrained: the weights of {name} cannot be had: {_first_line(error)}") from error
        own = model.state_dict()
        state = {key: t for key, t in state.items() if key in own}  # the auxiliary heads have some too
        _start_from(model, state, "pretrained", "torchvision's file", name)
    return model


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def drops(options: Options) -> dict[str, float]:
    """Returns the rates of dropout that were asked for."""
    return {name: rate for name in DROPS if (rate := getattr(options, name)) is not None}


def _refuse_drops(options: Options, keywords: Iterable[str], error: TypeError) -> None:
    """Raises InputError where a model was not made for one of these keywords that it does not take."""
    for option, keyword in zip(DROPS, keywords):
        require(f"'{keyword}'" not in str(error), f"{option}: {options.model} takes no {keyword}")


def _takes_drops(options: Options, model: nn.Module, package: str) -> bool:
    """Raises InputError for a rate that the model has taken and forgotten, as some do; returns whether that is sure."""
    modules = list(model.modules())
    dropout = [m.p for m in modules if isinstance(m, nn.modules.dropout._DropoutNd)]
    dropout += [m.drop_rate for m in modules if isinstance(getattr(m, "drop_rate", None), float)]
    depth = [m.drop_prob for m in modules if isinstance(getattr(m, "drop_prob", None), float)]
    depth += [m.p for m in modules if type(m).__name__ == "StochasticDepth"]
    for option, rate in drops(options).items():
        if option == "drop_rate":
            taken = rate in dropout or rate == 0
        else:  # blocks have up to the rate, but for what float32 makes of it
            most = max(depth, default=0.0)
            taken = most <= rate * (1 + 1e-6) and bool(most) == bool(rate)
        require(taken, f"{option}: {options.model} of {package} takes none")
    return options.drop_rate != 0 or 0 in dropout or not any(dropout)


def _optimizer(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    own = groups.parameter_groups(model, options.lr, options.weight_decay, not options.decay_all, options.layer_decay)
    name, graphs = options.optimizer, options.train.cuda_graphs
    capturable = {"capturable": True} if graphs and name in CAPTURABLE else {}
    return OPTIMIZERS[name](own, lr=options.lr, **DEFAULTS.get(name, {}), **capturable)


def _mix(options: Options, classes: int):
    if not options.mixup and not options.cutmix:
        return None
    try:
        from torchvision.transforms import v2
    except (ImportError, RuntimeError) as error:
        raise InputError(f"mixup and cutmix need torchvision: {_first_line(error)}") from None
    kinds = ((v2.MixUp, options.mixup), (v2.CutMix, options.cutmix))
    ways = [kind(alpha=alpha, num_classes=classes) for kind, alpha in kinds if alpha]
    return ways[0] if len(ways) == 1 else v2.RandomChoice(ways)

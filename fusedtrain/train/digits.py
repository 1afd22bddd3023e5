"""The training run of ``fusedtrain train``: a small network on handwritten digits, with fused and with stock layers."""

import gc
import os
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from math import inf
from multiprocessing import connection
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import torch
import tyro

from fusedtrain import _allocator, _extension, _info, _processes
from fusedtrain.train import report
from fusedtrain.train.config import TrainConfig, resolve_device
from fusedtrain.train.data import Batches, load_digits
from fusedtrain.train.errors import InputError, make_folder, new_folder, require_count
from fusedtrain.train.memory import PeakMemory
from fusedtrain.train.model import LAYERS, SmallNet
from fusedtrain.train.trainer import Trainer


@dataclass(frozen=True)
class Options:
    """Trains a small squeeze-and-excitation network on scikit-learn's handwritten digits, with fused and with stock
    layers, and compares accuracy, loss, speed and peak memory.

    The output folder receives results.json, the weights of each variant and, where matplotlib is installed, loss.png.

    To train another model on images of yours: fusedtrain train --model NAME --data DIR; its options are shown by
    fusedtrain train --model NAME --help.
    """

    epochs: int = 5
    """Passes over the training images."""
    batch_size: int = 64
    """Images per step."""
    lr: float = 3e-3
    """Peak learning rate of AdamW, after one epoch of warm-up; a cosine brings it to 0."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the layers; bf16 is autocast."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda or cuda:INDEX."""
    seed: int = 0
    """Decides the initial weights and the order of the images, alike for both variants."""
    layers: Literal["both", "fused", "stock"] = "both"
    """Which variant to train; both run one after the other, each in a process of its own."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/digits-<time>)")] = (
        None
    )
    """Folder for the results, made where it is missing."""


def run(options: Options) -> dict[str, report.Result]:
    """Trains the variants, shows a table, fills the output folder and returns what came out, by variant.

    Raises:
        InputError: the options cannot work; nothing is trained or written then.
        ChildProcessError: a process that trained was killed, or crashed.
    """
    _check(options)
    device = resolve_device(options.device)
    output = _make_output(options.output)
    if device.type == "cpu":
        os.environ.update(_allocator.variables())  # read when the server of the processes below starts
    if options.layers != "stock" and not _extension.LOADED:
        print(f"fused layers run without compiled kernels: {_extension.WHY_NOT}")
    results, context = {}, _processes.context(__name__, "torch._dynamo")
    for layers in LAYERS if options.layers == "both" else [options.layers]:
        theirs, ours = context.Pipe(duplex=False)
        # A process of its own: peak memory is that of one variant, and neither warms up the other's allocator.
        with ProcessPoolExecutor(1, context, _begin, (theirs,)) as pool, ours:
            try:
                results[layers] = pool.submit(train_variant, options, layers, output / f"{layers}.pt").result()
            except BrokenProcessPool:
                raise ChildProcessError(
                    f"the process that trained with {layers} layers crashed or was killed; the system kills so when"
                    " memory runs out: try a smaller --batch-size"
                ) from None
    report.write(output, options, device, results)
    report.show(output, results)
    return results


def train_variant(options: Options, layers: str, weights: Path) -> report.Result:
    """Trains one variant in this process and writes its weights."""
    device = resolve_device(options.device)
    digits = load_digits()
    train = Batches(digits.train_images, digits.train_targets, options.batch_size, shuffle=True, seed=options.seed)
    valid = Batches(digits.valid_images, digits.valid_targets, 256, shuffle=False)
    torch.manual_seed(options.seed)
    model = SmallNet(digits.CLASSES, layers=layers)
    config = TrainConfig(
        epochs=options.epochs,
        precision=options.precision,
        device=options.device,
        seed=options.seed,
        weights=weights,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.05)
    memory = PeakMemory(device)  # not before: the optimizer imports 140 MB of torch
    history = Trainer(model, torch.nn.CrossEntropyLoss(), optimizer, config, title=layers).fit(train, valid)
    return report.Result(
        accuracy=history.epochs[-1].valid_accuracy,
        valid_loss=history.epochs[-1].valid_loss,
        train_loss=history.epochs[-1].train_loss,
        images_per_second=median(epoch.images_per_second for epoch in history.epochs),
        peak_memory=memory.bytes(),
        history=history,
        info=_info.collect(),
    )


def _check(options: Options) -> None:
    TrainConfig(epochs=options.epochs, precision=options.precision)
    require_count("batch size", options.batch_size)
    if not 0 < options.lr < inf:
        raise InputError(f"lr must be positive and finite, got {options.lr}")
    if not 0 <= options.seed < 2**32:
        raise InputError(f"seed must lie between 0 and 2**32 - 1, got {options.seed}")


def _begin(wanted: connection.Connection) -> None:
    """Lets this process end when the one that started it is gone, killed for instance, or was interrupted alone."""
    gc.freeze()  # as the command does
    _processes.end_with(wanted)


def _make_output(wanted: Path | None) -> Path:
    if wanted is None:
        return new_folder(Path("runs", time.strftime("digits-%Y%m%d-%H%M%S")), "the output folder")
    if (wanted / report.RESULTS).exists():
        raise InputError(f"{wanted} holds the results of an earlier run; choose another --output")
    return make_folder(wanted, "the output folder")

"""What stays of a comparison of training runs: a table, a JSON file, a picture of the losses."""

import importlib.util
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from fusedtrain._files import json_text, write_atomic
from fusedtrain.train.records import History

RESULTS = "results.json"
FIRST_STEPS = 10


@dataclass(frozen=True)
class Result:
    """One variant's run: values of the last epoch, the median rate of the epochs (training alone), and the peak memory
    of training in bytes, beyond the process with its packages and data (None where it cannot be told). ``info`` is
    :func:`fusedtrain.info` of the process that trained."""

    accuracy: float
    valid_loss: float
    train_loss: float
    images_per_second: float
    peak_memory: int | None
    history: History
    info: dict


def loss_differences(results: dict[str, Result]) -> dict[str, float] | None:
    """Returns the largest difference between two variants' step losses: over the first steps, and over the run.

    Rounding differences grow with every update, so the first steps show whether both compute the same.
    """
    pairs = list(combinations([result.history.step_losses for result in results.values()], 2))
    if not pairs:
        return None
    differences = [abs(a - b) for one, other in pairs for a, b in zip(one, other)]
    return {"first_steps": max(differences[:FIRST_STEPS]), "all_steps": max(differences)}


def show(output: Path, results: dict[str, Result]) -> None:
    """Prints the table."""
    table = Table()
    for name in ("layers", "val accuracy", "val loss", "train loss", "images/s", "peak memory"):
        table.add_column(name, justify="left" if name == "layers" else "right")
    for layers, result in results.items():
        memory = "not measured" if result.peak_memory is None else f"{result.peak_memory / 2**20:,.0f} MiB"
        losses = f"{result.valid_loss:.4f}", f"{result.train_loss:.4f}"
        table.add_row(layers, f"{result.accuracy:.2%}", *losses, f"{result.images_per_second:,.0f}", memory)
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    if {"fused", "stock"} <= results.keys():
        fused, stock = results["fused"], results["stock"]
        differences = loss_differences(results)
        console.print(f"fused trains at {fused.images_per_second / stock.images_per_second:.2f} x the rate of stock")
        console.print(
            f"largest difference of the step losses: {differences['first_steps']:.1e} in the first {FIRST_STEPS} steps,"
            f" {differences['all_steps']:.1e} in all {len(fused.history.step_losses)}"
        )
    console.print(f"written to {output}")


def write(output: Path, options, device: torch.device, results: dict[str, Result]) -> None:
    """Writes results.json and, where matplotlib is installed, loss.png."""
    content = {
        "options": asdict(options),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "results": {layers: asdict(result) for layers, result in results.items()},
        "largest_loss_difference": loss_differences(results),
    }
    text = json_text(content, indent=1, default=str) + "\n"
    write_atomic(output / RESULTS, lambda file: file.write(text.encode()))
    if importlib.util.find_spec("matplotlib"):
        write_atomic(output / "loss.png", lambda file: _plot(file, results))


def _plot(file, results: dict[str, Result]) -> None:
    from matplotlib.figure import Figure  # not pyplot: no window system, no global state

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss", yscale="log", title="training (lines), validation (dots)")
    for (layers, result), style in zip(results.items(), ("-", "--")):
        history = result.history
        (line,) = axes.plot(range(1, len(history.step_losses) + 1), history.step_losses, style, label=layers, lw=1)
        steps = len(history.step_losses) // len(history.epochs)
        ends = [steps * epoch.epoch for epoch in history.epochs]
        axes.plot(ends, [epoch.valid_loss for epoch in history.epochs], "o", color=line.get_color(), ms=4)
    axes.legend()
    figure.savefig(file, format="png", dpi=120)

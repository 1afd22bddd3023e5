"""Runs the benchmarks: `python benchmarks/run.py`, or `--quick` for a handful of shapes.

`--models` measures whole training steps of networks instead of single ops. Every candidate passes a correctness gate
before it gets a number. Writes CSVs per device, prints a table, and renders REPORT.md and the plots from the CSVs.
"""

import argparse
import dataclasses
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import machine
import report
import results
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

OPS = sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", choices=OPS, default=OPS, metavar="OP", help=f"of {', '.join(OPS)}")
    parser.add_argument(
        "--models",
        nargs="*",
        metavar="NAME",
        help="training steps of these networks of timm instead of ops; by default seven of them",
    )
    parser.add_argument("--image", type=int, help="with --models: height and width, 224, or 96 with --quick")
    parser.add_argument(
        "--without",
        nargs="+",
        choices=("compile", "losses"),
        default=(),
        help="leave out torch.compile, or with --models the loss curves, which take minutes; --quick leaves out both",
    )
    parser.add_argument("--batch", type=int, default=16, help="with --models: images per step")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="one shape of each model or class")
    parser.add_argument("--case", nargs="+", default=[""], metavar="TEXT", help="only layers with this in their name")
    parser.add_argument(
        "--missing",
        action="store_true",
        help="go on after a stop: only cases that the CSV does not hold from this commit",
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES["cuda"], help="default: all that the device is good at")
    parser.add_argument("--budget", type=float, help="seconds of timed calls per case, 1, or 60 of whole steps")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument(
        "--allocator",
        choices=("both", *machine.ALLOCATORS),
        help="glibc's, on a CPU; by default both for ops, tuned for models",
    )
    parser.add_argument("--output", type=Path, default=results.FOLDER, metavar="DIR", help="folder of the CSVs")
    options = parser.parse_args()
    options.allocator = options.allocator or ("both" if options.models is None else "tuned")
    options.without = ("compile", "losses") if options.quick and options.models is not None else options.without
    options.image = options.image or (96 if options.quick else 224)
    if options.budget is None:
        options.budget = 1.0 if options.quick or options.models is None else 60.0
    return options


def under_each_allocator(options: argparse.Namespace) -> None:
    """Runs this script again where glibc's settings, which a process reads at its start, are not the wanted ones."""
    if options.device != "cpu" or sys.platform != "linux":
        return
    if options.allocator == "both":
        for name in machine.ALLOCATORS:
            command = [sys.executable, *sys.argv, "--allocator", name]
            code = subprocess.run(command, env=machine.environment(name), check=False).returncode
            if code:
                sys.exit(code)
        sys.exit()
    wanted = machine.environment(options.allocator)
    if wanted != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.argv], wanted)


def in_processes_of_their_own(options: argparse.Namespace) -> None:
    """Runs this script again for each of several networks: under the tuned allocator a process keeps what it frees."""
    if options.models is None:
        return
    import models

    names = options.models or models.NETWORKS
    if len(names) > 1:
        commands = ([sys.executable, *sys.argv, "--models", name] for name in names)  # the last --models counts
        sys.exit(max(abs(subprocess.run(command, check=False).returncode) for command in commands))


def shape_of(case) -> str | None:
    """The shape of a case as the CSV has it; None of lists of tensors."""
    inputs = getattr(case, "inputs", None)
    return "x".join(map(str, inputs(torch.device("meta"))[0].shape)) if inputs else None


def groups(op: str, options: argparse.Namespace, known: set[tuple[str, ...]]) -> Iterator[tuple[str, Iterator[dict]]]:
    """Names for the progress bar and the rows to come, measured together; ``known``: (case, shape, dtype) to skip."""
    import harness

    module = importlib.import_module(f"bench_{op}")
    measure = getattr(module, "measure", harness.measure)
    if hasattr(module, "rows"):
        yield op, module.rows(options.quick)
        return
    benchmark = module.BENCHMARK
    if "compile" in options.without and hasattr(benchmark, "compiled"):
        benchmark = dataclasses.replace(benchmark, compiled=False)
    for name in options.dtype or DTYPES[options.device]:
        dtype = getattr(torch, name)
        for case in benchmark.selected(dtype, options.quick, options.case):
            if known and (case.label, shape_of(case), name) in known:
                continue
            rows = measure(benchmark, case, dtype, torch.device(options.device), options.budget, options.peak)
            yield f"{op} {case.label} {name}", rows


def show(console: Console, rows: list[dict]) -> None:
    """One line per case, dtype, layout and mode: the automatic choice beside the best stock path."""
    table = Table(title="medians; speedup over the best stock path of either layout")
    for column in ("case", "shape", "dtype", "layout", "mode", "us", "best stock, us", "speedup", "GB/s", "% of floor"):
        table.add_column(column, justify="left" if column == "case" else "right")
    best = results.best_stock(rows)
    for row in rows:
        if row["backend"] != "auto" or row["us_p50"] is None or row["mode"] in ("fwd", "bwd"):
            continue
        stock = best.get(results.case_key(row))
        table.add_row(
            *(row[column] for column in ("case", "shape", "dtype", "layout", "mode")),
            report.number(row["us_p50"]),
            f"{report.number(stock['us_p50'])} {stock['backend']}" if stock else "-",
            report.mark(row["speedup"]),
            report.number(row["gb_per_s"]),
            report.number(row["pct_floor"]),
        )
    console.print(table)
    console.print(report.refused(rows))


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def run_ops(options: argparse.Namespace, shared: dict, folder: Path, console: Console) -> None:
    """Measures, writes and shows the ops."""
    work = []
    for op in options.op:
        same = ("threads", "allocator", "commit")
        known = {
            (row["case"], row["shape"], row["dtype"])
            for row in (results.read(folder / f"{op}.csv") if options.missing else ())
            if all(row[column] == str(shared[column]) for column in same)
        }
        work += [(op, name, rows) for name, rows in groups(op, options, known)]
    everything = []
    with progress_bar(console) as progress:
        bar = progress.add_task("", total=len(work))
        for op, name, rows in work:
            progress.update(bar, description=f"{shared['allocator']} {name}")
            measured = [
                {**dict.fromkeys(results.COLUMNS), "note": "", **row, **shared, "load": machine.load()} for row in rows
            ]
            results.merge(folder / f"{op}.csv", measured)  # after each case, so that a stopped run keeps its numbers
            everything += measured
            progress.advance(bar)
    if set(options.op) - report.PYTHON.keys():
        show(console, [row for row in everything if row["op"] not in report.PYTHON])
    for op in report.PYTHON.keys() & set(options.op):
        console.print(report.python_section(op, results.read(folder / f"{op}.csv")))


def run_models(options: argparse.Namespace, shared: dict, folder: Path, console: Console) -> None:
    """Measures, writes and shows whole steps of a network."""
    import models
    import models_report

    setting = models.Setting(
        torch.device(options.device),
        options.image,
        options.batch,
        compiled="compile" not in options.without,
        budget=options.budget,
        dtypes=tuple(d for d in models.DTYPES if d in (options.dtype or models.DTYPES)),
    )
    (name,), steps = options.models, []
    with progress_bar(console) as progress:
        bar = progress.add_task("", total=1)

        def say(what: str) -> None:
            progress.update(bar, description=f"{name}: {what}")

        for kind, rows in models.measure(name, setting, "losses" not in options.without, say):
            form, common = models.FILES[kind], {**shared, "load": machine.load()}
            measured = [{**dict.fromkeys(form.columns), "note": "", **row, **common} for row in rows]
            results.merge(folder / "models" / f"{kind}.csv", measured, form)
            steps += measured if kind == "steps" else []
        progress.advance(bar)
    models_report.show(console, steps)


def main() -> None:
    options = arguments()
    under_each_allocator(options)
    in_processes_of_their_own(options)
    torch.set_num_threads(options.threads)
    torch.backends.cudnn.benchmark = True
    shared = machine.describe(torch.device(options.device))
    options.peak = shared["peak_gflops"]
    folder = options.output / machine.slug(shared["device"])
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(", ".join(f"{name} {value}" for name, value in shared.items()))
    (run_ops if options.models is None else run_models)(options, shared, folder, console)
    report.render(options.output)
    console.print(f"wrote {folder} and {report.path(options.output)}")


if __name__ == "__main__":
    main()

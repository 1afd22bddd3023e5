"""Runs the benchmarks: `python benchmarks/run.py`, or `--quick` for a handful of shapes.

Every candidate passes a correctness gate before it gets a number. Writes one CSV per device and op, prints a table, and
renders REPORT.md and the plots from the CSVs.
"""

import argparse
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

DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ops = sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))
    parser.add_argument("--op", nargs="+", choices=ops, default=ops, metavar="OP", help=f"of {', '.join(ops)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="one shape of each model or class")
    parser.add_argument("--case", nargs="+", default=[""], metavar="TEXT", help="only layers with this in their name")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES["cuda"], help="default: all that the device is good at")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds of timed calls per case")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--allocator", choices=("both", *machine.ALLOCATORS), default="both", help="glibc's, on a CPU")
    parser.add_argument("--output", type=Path, default=results.FOLDER, metavar="DIR", help="folder of the CSVs")
    return parser.parse_args()


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


def groups(op: str, options: argparse.Namespace) -> Iterator[tuple[str, Iterator[dict]]]:
    """What is measured together: a name for the progress bar and the rows to come."""
    import harness

    module = importlib.import_module(f"bench_{op}")
    measure = getattr(module, "measure", harness.measure)
    if op == "dispatch":
        yield op, module.rows()
        return
    for name in options.dtype or DTYPES[options.device]:
        dtype = getattr(torch, name)
        for case in module.BENCHMARK.selected(dtype, options.quick, options.case):
            rows = measure(module.BENCHMARK, case, dtype, torch.device(options.device), options.budget, options.peak)
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


def main() -> None:
    options = arguments()
    under_each_allocator(options)
    torch.set_num_threads(options.threads)
    torch.backends.cudnn.benchmark = True
    shared = machine.describe(torch.device(options.device))
    options.peak = shared["peak_gflops"]
    folder = options.output / machine.slug(shared["device"])
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(", ".join(f"{name} {value}" for name, value in shared.items()))
    work = [(op, name, rows) for op in options.op for name, rows in groups(op, options)]
    everything = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(work))
        for op, name, rows in work:
            progress.update(bar, description=f"{shared['allocator']} {name}")
            measured = [
                {**dict.fromkeys(results.COLUMNS), "note": "", **row, **shared, "load": machine.load()} for row in rows
            ]
            results.merge(folder / f"{op}.csv", measured)  # after each case, so that a stopped run keeps its numbers
            everything += measured
            progress.advance(bar)
    show(console, everything)
    report.render(options.output)
    console.print(f"wrote {folder} and {report.path(options.output)}")


if __name__ == "__main__":
    main()

"""The whole training steps in REPORT.md, in README, on the screen and as plots, from the CSVs that models.py fills."""

import math
import statistics
from pathlib import Path

import models
import plot
import results
from report import mark, number, settings, table
from results import Row
from rich.console import Console
from rich.table import Table

INTRODUCTION = """A step is forward, loss, backward and AdamW over all parameters. All forms of one network take turns
step by step, in random order. **Speedup** is over the fastest stock form of any dtype and layout, **same dtype** over
the fastest stock form of that dtype. **Saved** is what forward keeps for backward beside the parameters (by
`saved_tensors_hooks`), **peak** the most memory that a step holds beyond model and optimizer. No form has a number
whose logits or gradients are not as good as stock PyTorch's in the same dtype, against float64.
"""
HEADER = ("network", "shape", "dtype", "layout", "form", "ms", "images/s", "speedup", "same dtype", "saved", "peak")


def _line(row: Row) -> list[str]:
    numbers = (number(row[column]) for column in ("ms_p50", "images_per_s"))
    memory = (f"{number(row[column])} MiB" for column in ("saved_mib", "peak_mib"))
    speedups = (mark(row[column]) for column in ("speedup", "speedup_same_dtype"))
    return [*(row[c] for c in ("network", "shape", "dtype", "layout", "backend")), *numbers, *speedups, *memory]


def show(console: Console, rows: list[Row]) -> None:
    """The steps just measured."""
    shown = Table(title="medians; speedup over the best stock form, of any dtype and of the same dtype")
    for column in HEADER:
        shown.add_column(column, justify="left" if column in ("network", "form") else "right")
    for row in rows:
        shown.add_row(*_line(row))
    console.print(shown)
    for row in rows:
        if row["note"]:
            console.print(f"{row['network']} {row['dtype']} {row['layout']}: {row['note']}")


def best(rows: list[Row], *, fused: bool, dtype: str | None = None) -> Row | None:
    """The fastest fused or stock row."""
    of = [r for r in rows if r["backend"].startswith("fused") == fused and dtype in (r["dtype"], None) and r["ms_p50"]]
    return min(of, key=lambda r: r["ms_p50"], default=None)


def races(rows: list[Row]) -> list[list[Row]]:
    """The rows by race."""
    grouped: dict[tuple, list[Row]] = {}
    for row in rows:
        grouped.setdefault(models.STEPS.of(row), []).append(row)
    return list(grouped.values())


def overview(rows: list[Row]) -> str:
    """One line per network and dtype: the best fused form against the best stock ones."""
    lines = []
    for race in races(rows):
        for dtype in (d for d in models.DTYPES if any(row["dtype"] == d for row in race)):
            ours, theirs = best(race, fused=True, dtype=dtype), best(race, fused=False)
            same = best(race, fused=False, dtype=dtype)
            if ours is None:
                first = race[0]
                lines.append([first["network"], first["shape"], dtype, "no number", *["-"] * 5])
                continue
            lines.append(
                [
                    *(ours["network"], ours["shape"], dtype, f"{ours['images_per_s']:.1f}, {ours['layout']}"),
                    f"{theirs['images_per_s']:.1f}, {theirs['backend']} {theirs['dtype']} {theirs['layout']}",
                    *(mark(ours["speedup"]), mark(ours["speedup_same_dtype"])),
                    f"{ours['saved_mib'] / same['saved_mib']:.2f}",
                    f"{ours['peak_mib'] / same['peak_mib']:.2f}",
                ]
            )
    header = ("network", "shape", "dtype", "images/s, fused", "images/s, best stock", "speedup", "same dtype")
    return table([*header, "saved / stock's", "peak / stock's"], lines)


def _profiles(rows: list[Row], column: str, most: int) -> str:
    """The milliseconds per ``column``, eager beside fused, the largest first."""
    forms = [(dtype, backend) for dtype in models.DTYPES for backend in ("eager", "fused")]
    spent: dict[str, dict[tuple, float]] = {}
    calls: dict[tuple, float] = {}
    for row in rows:
        key, form = row[column], (row["dtype"], row["backend"])
        spent.setdefault(key, {}).setdefault(form, 0.0)
        spent[key][form] += row["ms"]
        calls[key, form] = row["calls"]
    spent.pop("smaller ones", None)
    wanted = sorted(spent, key=lambda key: -max(spent[key].values()))[:most]

    def cell(key: str, form: tuple) -> str:
        if form not in spent[key]:
            return "-"
        return f"{spent[key][form]:.1f}" + (f" ({calls[key, form]:.0f})" if column == "operator" else "")

    lines = ([key, *(cell(key, form) for form in forms)] for key in wanted)
    return table([column, *(f"{backend} {dtype}, ms" for dtype, backend in forms)], lines)


def _losses(rows: list[Row]) -> str:
    """The mean loss of the last 50 steps, each seed."""
    lines = []
    for name in dict.fromkeys(row["network"] for row in rows):
        for dtype in models.DTYPES:
            line = [name, dtype]
            for backend in ("eager", "fused"):
                of = [r for r in rows if (r["network"], r["dtype"], r["backend"]) == (name, dtype, backend)]
                last = max((row["step"] for row in of), default=0) - 50
                seeds = sorted({row["seed"] for row in of})
                means = (statistics.fmean(r["loss"] for r in of if r["seed"] == s and r["step"] > last) for s in seeds)
                line.append(", ".join(f"{mean:.3f}" for mean in means) or "-")
            lines.append(line)
    return table(("network", "dtype", "stock, per seed", "fused, per seed"), lines)


def section(folder: Path, report: Path) -> str:
    """Whole steps on one device; ``folder`` holds the CSVs."""
    rows, profile, losses = (results.read(folder / f"{kind}.csv", form) for kind, form in models.FILES.items())
    notes = "".join(f"- {r['network']} {r['dtype']} {r['layout']}: {r['note']}\n" for r in rows if r["note"])
    parts = ["### Whole training steps\n", INTRODUCTION, settings(rows), overview(rows), notes]
    pictures = [plot.steps(rows, folder / "steps.png")]
    if losses:
        pictures.append(plot.losses(losses, folder / "losses.png"))
        what = f"Mean loss of the last 50 of {models.LOSS_STEPS} steps on scikit-learn's digits"
        parts.append(f"{what}, enlarged to {models.LOSS_IMAGE} pixels:\n")
        parts.append(_losses(losses))
    parts.append("".join(f"![{p.stem}]({p.relative_to(report.parent).as_posix()})\n" for p in pictures))
    parts.append("<details><summary>Every form</summary>\n")
    parts += [table(HEADER, map(_line, rows)), "</details>\n"]
    for race in races(profile):
        title = f"{race[0]['network']}, {race[0]['shape']}, channels_last"
        parts.append(f"Where a step's time goes, {title} (shares of a profile times the measured step):\n")
        parts.append(_profiles(race, "part", 99))
        parts.append("<details><summary>The largest operators, with calls per step</summary>\n")
        parts += [_profiles(race, "operator", 20), "</details>\n"]
    return "\n".join(part for part in parts if part)


def _cell(races: list[list[Row]], dtype: str) -> str:
    """README's cell of one network: of its races that gave a number, the one with the most pixels."""
    given = [race for race in races if best(race, fused=True, dtype=dtype) and best(race, fused=False, dtype=dtype)]
    if not given:
        measured = any(row["dtype"] == dtype for race in races for row in race)
        return "no number" if measured else "-"
    race = max(given, key=lambda race: math.prod(map(int, race[0]["shape"].split("x"))))
    ours, compiled = best(race, fused=True, dtype=dtype), any(row["backend"] == "compile" for row in race)
    return f"{mark(ours['speedup'])} ({ours['speedup_same_dtype']:.2f}){'*' if compiled else ''}"


def _saved(races: list[list[Row]]) -> str:
    """What a network keeps for backward over what the fastest stock form of the same dtype keeps, least to most."""
    forms = [(race, dtype) for race in races for dtype in models.DTYPES]
    pairs = [(best(race, fused=True, dtype=dtype), best(race, fused=False, dtype=dtype)) for race, dtype in forms]
    shares = sorted(f"{ours['saved_mib'] / same['saved_mib']:.2f}" for ours, same in pairs if ours and same)
    return " to ".join(dict.fromkeys((shares[0], shares[-1]))) if shares else "-"


def readme_block(folder: Path) -> str:
    """README's table of whole steps: one line per device and dtype, on one thread."""
    measured: dict[tuple[str, str], list[list[Row]]] = {}
    for file in sorted(folder.glob("*/models/steps.csv")):
        for race in races([row for row in results.read(file, models.STEPS) if row["threads"] == "1"]):
            measured.setdefault((race[0]["device"], race[0]["network"]), []).append(race)
    if not measured:
        return ""
    devices, found = (list(dict.fromkeys(keys)) for keys in zip(*measured))
    networks = sorted(found, key=lambda name: (*models.NETWORKS, name).index(name))
    lines = [
        [device, dtype, *(_cell(measured.get((device, network), []), dtype) for network in networks)]
        for device in devices
        for dtype in models.DTYPES
    ]
    kept = (
        _saved([race for (_, name), of in measured.items() if name == network for race in of]) for network in networks
    )
    lines = [line for line in lines if set(line[2:]) != {"-"}]
    lines.append(["kept for backward over stock's", "", *kept])
    what = (
        "Whole training steps (forward, loss, backward, AdamW) on one thread after `fuse`: speedup over the fastest"
        " stock form of any dtype (of the same dtype), in either layout; *: `torch.compile` is among these."
    )
    return f"{what}\n\n{table(('device', 'dtype', *networks), lines)}\n"

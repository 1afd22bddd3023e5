"""The CSV files: one per device and op, one row per case, dtype, layout, mode, backend and setting."""

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "results"
COLUMNS = (
    *("op", "family", "case", "shape", "dtype", "layout", "mode", "backend"),
    *("us_p50", "us_p20", "us_p80", "speedup", "speedup_same_layout", "speedup_usual"),
    *("gb_per_s", "pct_copy", "pct_floor", "peak_mib"),
    *("rounds", "note", "device", "torch", "threads", "allocator", "commit", "cache_mib", "peak_gflops", "load"),
)
Row = dict[str, str | float | None]


@dataclass(frozen=True)
class Format:
    """A kind of file: its columns, those that hold numbers, and those in which rows measured together agree.

    A new measurement replaces all rows of its group.
    """

    columns: tuple[str, ...]
    numbers: frozenset[str]
    group: tuple[str, ...]

    def of(self, row: Row) -> tuple[str, ...]:
        """The group of a row."""
        return tuple(_text(row[column]) for column in self.group)


OPS = Format(
    COLUMNS,
    frozenset((*COLUMNS[8:19], "cache_mib", "peak_gflops", "load")),
    ("case", "shape", "dtype", "threads", "allocator"),
)


def _text(value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return "" if value is None else str(value)


def read(path: Path, kind: Format = OPS) -> list[Row]:
    """All rows of a file, numbers as floats, missing ones as None."""

    def value(column: str, text: str):
        return text if column not in kind.numbers else float(text) if text else None

    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            {column: value(column, row.get(column) or "") for column in kind.columns} for row in csv.DictReader(file)
        ]


def merge(path: Path, rows: Iterable[Row], kind: Format = OPS) -> None:
    """Writes rows into a file in place of those of the same group, sorted."""
    rows = list(rows)
    replaced = {kind.of(row) for row in rows}
    rows = [row for row in read(path, kind) if kind.of(row) not in replaced] + rows
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(kind.columns)
        # Stable: within a group the order of measurement stays.
        writer.writerows([_text(row.get(c)) for c in kind.columns] for row in sorted(rows, key=kind.of))
    partial.replace(path)


def whole_mode(rows: Iterable[Row]) -> str:
    """The mode that stands for an op: forward and backward together, or the whole step of an optimizer."""
    return "step" if all(row["mode"] == "step" for row in rows) else "fwd+bwd"


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of no values."""
    logs = [math.log(v) for v in values if v]
    return math.exp(sum(logs) / len(logs)) if logs else None


def case_key(row: Row) -> tuple:
    """What the candidates of one race share."""
    return tuple(row[column] for column in ("case", "shape", "dtype", "mode", "threads", "allocator"))


def is_stock(row: Row) -> bool:
    """True for eager and compiled PyTorch."""
    return str(row["backend"]).startswith(("eager", "compile"))


def best_stock(rows: Iterable[Row]) -> dict[tuple, Row]:
    """:func:`case_key` -> the fastest stock row of either layout."""
    best: dict[tuple, Row] = {}
    for row in rows:
        if is_stock(row) and row["us_p50"] is not None:
            known = best.setdefault(case_key(row), row)
            if row["us_p50"] < known["us_p50"]:
                best[case_key(row)] = row
    return best


def primary_allocator(rows: Iterable[Row]) -> str:
    """The setting that tables and plots show first: the one in which the allocator decides least."""
    present = {row["allocator"] for row in rows}
    return next((name for name in ("tuned", "caching") if name in present), min(present, default=""))

"""The plots of one op on one device, from its CSV rows."""

from pathlib import Path

import matplotlib
import results
from matplotlib import pyplot
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter
from results import Row

matplotlib.use("Agg")
MARKERS = {"contiguous": "o", "channels_last": "s"}
OURS, STOCK, ROOF = "#1769aa", "#d9822b", "#444444"


def _panels(rows: list[Row], width: float, height: float):
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure, axes = pyplot.subplots(
        1, len(dtypes), figsize=(width * len(dtypes), height), sharey=True, squeeze=False, layout="constrained"
    )
    return figure, zip(dtypes, axes[0], strict=True)


def _plain_ticks(*scales) -> None:
    for scale in scales:
        low, high = scale.get_view_interval()
        scale.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if high < 20 * low else (1, 3)))
        scale.set_major_formatter(ScalarFormatter())
        scale.set_minor_formatter(NullFormatter())


def _bytes(row: Row) -> float:
    return row["gb_per_s"] * row["us_p50"] * 1e3


def roofline(rows: list[Row], path: Path) -> Path:
    """Achieved GB/s over counted bytes, forward and backward together or whole steps, under the roof of each case."""
    whole = results.whole_mode(rows)
    rows = [row for row in rows if row["mode"] == whole and row["us_p50"] is not None]
    stock = results.best_stock(rows)
    figure, panels = _panels(rows, 5.5, 4.5)
    for dtype, axis in panels:
        ours = [row for row in rows if row["backend"] == "auto" and row["dtype"] == dtype]
        roof = sorted((_bytes(row) / 2**20, row["gb_per_s"] * 100 / row["pct_floor"]) for row in ours)
        axis.plot(*zip(*roof), linestyle="", marker="_", color=ROOF, label="roof: a copy of that size, or arithmetic")
        best = [row for key, row in stock.items() if key[2] == dtype]
        for layout, marker in MARKERS.items():
            for name, color, points in (("fusedtrain", OURS, ours), ("best stock", STOCK, best)):
                points = [row for row in points if row["layout"] == layout]
                x, y = [_bytes(row) / 2**20 for row in points], [row["gb_per_s"] for row in points]
                axis.plot(x, y, linestyle="", marker=marker, color=color, alpha=0.75, label=f"{name}, {layout}")
        axis.axvline(rows[0]["cache_mib"], color=ROOF, linewidth=0.8, linestyle=":", label="last-level cache")
        axis.set(xscale="log", yscale="log", title=dtype, xlabel=f"MiB counted, {whole}", ylabel="GB/s")
        axis.grid(alpha=0.25, which="both", linewidth=0.5)
        _plain_ticks(axis.xaxis, axis.yaxis)
        axis.label_outer()
    figure.legend(*axis.get_legend_handles_labels(), fontsize=7, loc="outside lower center", ncols=2)
    figure.suptitle(f"{rows[0]['op']}\n{rows[0]['device']}, threads: {rows[0]['threads']}", fontsize=9)
    return _saved(figure, path)


def speedups(rows: list[Row], path: Path) -> Path:
    """Every case's speedup over the best stock path, wins and losses on one axis."""
    whole = results.whole_mode(rows)
    rows = [row for row in rows if row["mode"] == whole and row["backend"] == "auto" and row["speedup"] is not None]
    names = list(dict.fromkeys((row["case"], row["shape"]) for row in rows))
    figure, panels = _panels(rows, 4.5, 1.6 + 0.16 * len(names))
    for dtype, axis in panels:
        for layout, marker in MARKERS.items():
            of = [row for row in rows if row["dtype"] == dtype and row["layout"] == layout]
            y = [names.index((row["case"], row["shape"])) for row in of]
            axis.plot([r["speedup"] for r in of], y, linestyle="", marker=marker, alpha=0.8, markersize=5, label=layout)
        axis.axvline(1.0, color="#b00020", linewidth=1.0)
        axis.set(xscale="log", title=dtype)
        axis.set_xlabel("speedup over the best stock path", fontsize=8)
        axis.set_yticks(range(len(names)), [f"{case}  {shape}" for case, shape in names], fontsize=6)
        _plain_ticks(axis.xaxis)
        axis.tick_params(axis="x", labelsize=7)
        axis.grid(alpha=0.25, which="both", linewidth=0.5)
    axis.invert_yaxis()  # shared: the first case on top
    figure.legend(*axis.get_legend_handles_labels(), fontsize=7, loc="outside lower center", ncols=2)
    figure.suptitle(f"{rows[0]['op']}, {whole}\n{rows[0]['device']}, threads: {rows[0]['threads']}", fontsize=9)
    return _saved(figure, path)


def steps(rows: list[Row], path: Path) -> Path:
    """Images per second of every form of a network, over those of its fastest stock form."""
    races: dict[tuple, list[Row]] = {}
    for row in rows:
        if row["speedup"] is not None:
            races.setdefault((row["network"], row["shape"]), []).append(row)
    figure, axis = pyplot.subplots(figsize=(7.5, 1.4 + 0.5 * len(races)), layout="constrained")
    colors = {"eager": STOCK, "compile": "#8c6bb1", "fused": OURS}
    graphs = {"eager graph": "#303030", "fused graph": "#0b3d2e"}  # on GPUs
    colors |= {name: color for name, color in graphs.items() if any(row["backend"] == name for row in rows)}
    for y, race in enumerate(races.values()):
        for row in race:
            offset, filled = (0.15 if row["dtype"] == "bfloat16" else -0.15), row["dtype"] == "bfloat16"
            color = colors[row["backend"]]
            marker, face = MARKERS[row["layout"]], color if filled else "none"
            axis.plot(row["speedup"], y + offset, linestyle="", marker=marker, color=color, markerfacecolor=face)
    for backend, color in colors.items():
        axis.plot([], [], linestyle="", marker="s", color=color, label=f"{backend}, channels_last, bfloat16")
    axis.plot([], [], linestyle="", marker="o", color=ROOF, markerfacecolor="none", label="contiguous, float32")
    axis.axvline(1.0, color="#b00020", linewidth=1.0)
    axis.set(xscale="log", xlabel="images per second over the fastest stock form, any dtype")
    axis.set_yticks(range(len(races)), [f"{network}\n{shape}" for network, shape in races], fontsize=7)
    axis.invert_yaxis()
    _plain_ticks(axis.xaxis)
    axis.grid(alpha=0.25, which="both", linewidth=0.5)
    figure.legend(fontsize=7, loc="outside lower center", ncols=2)
    figure.suptitle(f"whole training steps\n{rows[0]['device']}, threads: {rows[0]['threads']}", fontsize=9)
    return _saved(figure, path)


def losses(rows: list[Row], path: Path) -> Path:
    """Loss over steps: for each network and dtype the band of the stock seeds, and every fused seed as a line."""
    networks, dtypes = (list(dict.fromkeys(row[column] for row in rows)) for column in ("network", "dtype"))
    size = (4 * len(dtypes), 2.2 * len(networks) + 0.6)
    figure, axes = pyplot.subplots(
        *(len(networks), len(dtypes)), figsize=size, squeeze=False, sharex=True, sharey="row", layout="constrained"
    )
    for network, line in zip(networks, axes):
        for dtype, axis in zip(dtypes, line):
            curves: dict[tuple, list[float]] = {}
            for row in rows:
                if (row["network"], row["dtype"]) == (network, dtype):
                    curves.setdefault((row["backend"], row["seed"]), []).append(row["loss"])
            smooth = {
                key: [sum(part) / len(part) for i in range(len(curve)) if (part := curve[max(0, i - 9) : i + 1])]
                for key, curve in curves.items()
            }
            stock = list(zip(*(curve for (backend, _), curve in smooth.items() if backend == "eager")))
            x = range(1, len(stock) + 1)
            axis.fill_between(x, [min(v) for v in stock], [max(v) for v in stock], color=STOCK, alpha=0.4)
            for (backend, _), curve in smooth.items():
                if backend == "fused":
                    axis.plot(x, curve, color=OURS, linewidth=0.8)
            axis.set_title(f"{network}, {dtype}", fontsize=8)
            axis.grid(alpha=0.25, linewidth=0.5)
            axis.tick_params(labelsize=7)
    figure.suptitle("loss over steps, mean of 10; band: stock seeds, lines: fused seeds", fontsize=9)
    return _saved(figure, path)


def _saved(figure, path: Path) -> Path:
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    return path

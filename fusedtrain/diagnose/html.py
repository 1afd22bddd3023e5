"""The report as one self-contained page: no scripts, no files beside it, nothing fetched."""

from html import escape

from fusedtrain._info import value_text
from fusedtrain.diagnose.report import headline, losses_text, machine_text, overhead_text, passes_text, waited_text
from fusedtrain.diagnose.rules.finding import count_text

COLOURS = {
    "loader": "#e4572e",
    "copy": "#f3a712",
    "forward": "#2e86ab",
    "backward": "#1b4f72",
    "optimizer": "#57a773",
    "zero_grad": "#a8c686",
    "sync": "#c2185b",
    "evaluation": "#8e6c8a",
    "rest": "#b8b8b8",
}
STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #7779; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; line-height: 1.3; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.lead { border-left: .4rem solid #e4572e; padding: .3rem 1rem; } .well { border-color: #57a773; }
.soft { color: #777; } .warn { background: #f3a71233; padding: .4rem .8rem; border-radius: .3rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: #8881; padding: .5rem .8rem; border-radius: .3rem; margin: .4rem 0; white-space: pre-wrap; }
.del { color: #c0392b; } .ins { color: #1e8449; }
svg { width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
.key span { display: inline-block; margin-right: 1rem; }
.key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .3rem; border-radius: .15rem; }
details { border: 1px solid var(--line); border-radius: .4rem; padding: .5rem .9rem; margin: .6rem 0; }
summary { cursor: pointer; }
"""


def page(report: dict) -> str:
    """Returns the page."""
    step = report["step_ms"]
    sections = [
        f"<h1>fusedtrain diagnose <code>{escape(report['script'])}</code></h1>",
        f'<p class="lead{" well" if report["examined"] and not report["bottleneck"] else ""}">'
        f"<b>{escape(headline(report))}</b></p>",
        f'<p class="warn">{escape(report["failure"])}</p>' if report["failure"] else "",
        f"<p>{step['value']:.3g} ms per step (95 % interval {step['low']:.3g} to {step['high']:.3g})."
        f" {overhead_text(report)}.</p>",
        f'<p class="soft">{escape(machine_text(report["machine"]))}</p>',
        f'<p class="soft">{waited_text(report)}</p>' if report["waited"] >= 0.01 else "",
        f'<p class="soft">{passes_text(report)}</p>' if passes_text(report) else "",
        _noise(report),
        "<h2>Where a step goes</h2>",
        _parts(report),
        _ceilings(report),
        "<h2>Timeline of single steps</h2>",
        _timeline(report["timeline"]),
        _rates(report),
        "" if report["bottleneck"] else _lines("Lines that take the most time", report["lines"][:4]),
        "<h2>Causes and remedies, by predicted gain</h2>",
        *(_finding(i, finding) for i, finding in enumerate(report["findings"], 1)),
        "" if report["findings"] else f"<p>{'None.' if report['examined'] else 'They were not looked for.'}</p>",
        _verified(report),
        _operations(report),
        "<h2>Looked at, no finding</h2>",
        _table(("rule", "what was seen"), [(rule, reason) for rule, reason in report["checked"].items()]),
        "<h2>The machine</h2>",
        _table(("what", "value"), [(name, value_text(value)) for name, value in report["machine"].items()]),
    ]
    body = "\n".join(section for section in sections if section)
    title = escape(f"Diagnosis of {report['script']}")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _noise(report: dict) -> str:
    noise = report["noise"]
    said = f"Two equal runs, taking turns, differ by {noise['low']:+.1%} to {noise['high']:+.1%} (99 % interval)."
    if report["noisy"]:
        return f'<p class="warn">{said} The machine is noisy: small gains cannot be told from chance now.</p>'
    return f'<p class="soft">{said}</p>'


def _table(head: tuple, rows: list[tuple], numbers: tuple[int, ...] = ()) -> str:
    def cells(row, tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if i in numbers else ''}>{escape(str(cell))}</{tag}>" for i, cell in enumerate(row)
        )

    return (
        f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>"
        + "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
        + "</tbody></table>"
    )


def _rect(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.3):.2f}" height="{height}" fill="{colour}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _svg(height: float, inner: str, label: str) -> str:
    return f'<svg viewBox="0 0 900 {height:.0f}" role="img" aria-label="{escape(label)}">{inner}</svg>'


def _parts(report: dict) -> str:
    total, x, bars, key = report["step_ms"]["value"], 0.0, "", ""
    for part, ms in report["parts_ms"].items():
        if ms <= 0:
            continue
        width = 900 * ms / total
        text = f"{part}: {ms:.3g} ms, {ms / total:.1%}"
        bars += _rect(x, 0, width, 36, COLOURS[part], text)
        x += width
        key += f'<span><i style="background:{COLOURS[part]}"></i>{escape(text)}</span>'
    return _svg(36, bars, "share of each part of a step") + f'<p class="key">{key}</p>'


def _ceilings(report: dict) -> str:
    ceilings = report["ceilings"]
    rows = [("the step as it is", report["step_ms"]["value"], "#777")]
    if ceilings["cached_ms"] is not None:
        rows.append(("if loading were free", ceilings["cached_ms"], COLOURS["forward"]))
    if ceilings["loader_alone_ms"] is not None:
        rows.append(("if computing were free", ceilings["loader_alone_ms"], COLOURS["loader"]))
    if len(rows) == 1:
        return ""
    return "<h2>Ceilings</h2>" + _bars([(name, ms, f"{ms:.3g} ms", colour) for name, ms, colour in rows], "ceilings")


def _bars(rows: list[tuple[str, float, str, str]], label: str) -> str:
    most = max(value for _, value, _, _ in rows)
    inner = ""
    for i, (name, value, text, colour) in enumerate(rows):
        y, width = 26 * i, 560 * value / most
        inner += f'<text x="0" y="{y + 15}">{escape(name)}</text>' + _rect(200, y + 2, width, 18, colour, text)
        inner += f'<text x="{206 + width:.1f}" y="{y + 15}">{escape(text)}</text>'
    return _svg(26 * len(rows), inner, label)


def _timeline(steps: list) -> str:
    if not steps:
        return "<p>None was recorded.</p>"
    longest = max(step[-1][2] for step in steps)
    inner = ""
    for i, step in enumerate(steps):
        y = 18 * i
        inner += _rect(0, y, 900 * step[-1][2] / longest, 14, COLOURS["rest"], f"step {i + 1}: {step[-1][2]:.3g} ms")
        for part, start, end in step[:-1]:
            title = f"{part}: {end - start:.3g} ms"
            inner += _rect(900 * start / longest, y, 900 * (end - start) / longest, 14, COLOURS[part], title)
    caption = (
        f'<p class="soft">{count_text(len(steps), "step")}, one per line; the longest took {longest:.3g} ms.'
        " Colours as above.</p>"
    )
    return _svg(18 * len(steps), inner, "timeline") + caption


def _rates(report: dict) -> str:
    if not report["loader_rates"]:
        return ""
    rows = []
    for rate in report["loader_rates"]:
        now = " (now)" if rate["workers"] == report["current_workers"] else ""
        speed = rate["batches_per_second"]
        rows.append(
            (f"{count_text(rate['workers'], 'worker')}{now}", speed, f"{speed:.3g} batches/s", COLOURS["loader"])
        )
    return "<h2>What the loader delivers alone</h2>" + _bars(rows, "batches per second by number of workers")


def _finding(number: int, finding: dict) -> str:
    option = " (an option, never called the bottleneck)" if finding["option"] else ""
    parts = [f'<p class="soft">{escape(finding["evidence"])}</p>']
    for remedy in finding["remedies"]:
        parts.append(f"<p>{escape(remedy['how'])} <span class=soft>[{escape(remedy['class'])}]</span></p>")
        for change in remedy["changes"]:
            parts.append(
                f"<pre><span class=soft>{escape(change['file'])}:{change['line']}</span>\n"
                f'<span class="del">- {escape(change["before"])}</span>\n'
                f'<span class="ins">+ {escape(change["after"])}</span></pre>'
            )
    if finding["advice"]:
        parts.append(f"<p>{escape(finding['advice'])}</p>")
    parts.append(_lines("", finding["lines"]))
    predicted = f": predicted {finding['predicted_gain']:.0%}" if finding["predicted_gain"] else ""
    return (
        f"<details{' open' if number <= 2 else ''}><summary><b>{number}. {escape(finding['cause'])}</b>{option}"
        f"{predicted}</summary>{''.join(parts)}</details>"
    )


def _lines(title: str, lines: list[dict]) -> str:
    if not lines:
        return ""
    rows = [
        (f"{line['share']:.0%}" if line["share"] else "", f"{line['file']}:{line['line']}", line["text"])
        for line in lines
    ]
    return (f"<h2>{title}</h2>" if title else "") + _table(("share", "line", "text"), rows, (0,))


def _verified(report: dict) -> str:
    if report["verified"] is None:
        return '<p class="soft">Gains are predictions from probes; <code>--verify</code> tries the remedies.</p>'
    rows = []
    for v in report["verified"]:
        gain, said = v["measured_gain"], losses_text(v)
        interval = f"{gain['low']:.1%} to {gain['high']:.1%}"
        kept = "yes" if v["accepted"] else f"no: {v['reason']}"
        rows.append((v["remedy"], f"{v['predicted_gain']:.1%}", f"{gain['value']:.1%}", interval, said, kept))
    head = ("remedy", "predicted", "measured", "99 % interval", "losses", "kept")
    text = "<h2>Verified</h2>" + _table(head, rows, (1, 2, 3))
    for name, title in (("combined", "all together"), ("fresh", "in fresh processes")):
        if report.get(name):
            before, after = report[name]["ms"]
            text += f"<h2>{title.capitalize()}: {before / after:.2f} times as fast</h2>"
            rows = [
                ("before", before, f"{before:.3g} ms", "#777"),
                ("after", after, f"{after:.3g} ms", COLOURS["optimizer"]),
            ]
            text += _bars(rows, title)
    return text


def _operations(report: dict) -> str:
    if not report["operations"]:
        return ""
    rows = [(o["name"], f"{o['share']:.1%}", o["calls"]) for o in report["operations"]]
    return "<h2>Operations that take the most CPU time</h2>" + _table(
        ("operation", "share", "calls per step"), rows, (1, 2)
    )

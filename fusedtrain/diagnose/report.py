"""The report: a dictionary for JSON, and its text for the terminal."""

from dataclasses import asdict
from statistics import fmean

from fusedtrain.diagnose.lines import source_line
from fusedtrain.diagnose.remedies import specification
from fusedtrain.diagnose.rules.finding import count_text

ENDED = "the script ended before all was measured"


def to_json(diagnosis, script: str) -> dict:
    """Returns everything that was found, of plain types only. Times are milliseconds, gains shares of the step."""
    facts, driver = diagnosis.facts, diagnosis.driver
    rates = sorted(facts.rates.values(), key=lambda rate: rate.workers)
    current = getattr(driver.loader, "num_workers", 0)
    return {
        "script": script,
        "machine": diagnosis.machine,
        "steps": facts.watched,
        "bare_steps": len(facts.steps) - facts.watched,
        "step_ms": _ms_interval(facts.step),
        "overhead": facts.overhead,
        "watched_step_overhead": _interval(facts.cost.over(facts.step.value)),
        "waited": sum(step.waited for step in facts.steps) / sum(step.wall for step in facts.steps),
        "noise": _interval(diagnosis.noise),
        "noisy": diagnosis.noisy,
        "ceilings": {
            "cached_ms": None if facts.cached is None else 1e3 * facts.cached,
            "loader_alone_ms": 1e3 * facts.rates[current].seconds if current in facts.rates else None,
            "loading_share": None if facts.waiting is None else _interval(facts.waiting),
        },
        "parts_ms": {part: 1e3 * seconds for part, seconds in facts.parts.items()},
        "page_faults_per_step": facts.faults,
        "passes": None
        if driver.loader is None
        else {
            "batches": len(driver.loader) if driver.between else None,
            "between_ms": 1e3 * fmean(driver.between) if driver.between else None,
        },
        "loader_rates": [{"workers": rate.workers, "batches_per_second": 1 / rate.seconds} for rate in rates],
        "current_workers": current,
        "operations": [{"name": n, "share": share, "calls": calls} for n, share, calls in facts.operations],
        "device_busy": facts.device_busy,
        "lines": [_line(site, share) | {"part": part} for part, site, share in facts.lines],
        "bottleneck": diagnosis.bottleneck and diagnosis.bottleneck.rule,
        "findings": [_finding(finding, driver) for finding in diagnosis.findings],
        "checked": diagnosis.checked,
        "verified": [_verdict(verdict) for verdict in diagnosis.verdicts] if diagnosis.verifies else None,
        "combined": diagnosis.combined
        and {"gain": _interval(diagnosis.combined.gain(0.99)), "ms": [1e3 * s for s in diagnosis.combined.seconds()]},
        "accepted": [specification(remedy) for remedy in diagnosis.arm.remedies],
        "timeline": [[[part, 1e3 * start, 1e3 * end] for part, start, end in step] for step in diagnosis.timeline],
        "examined": diagnosis.examined,
        "failure": diagnosis.failure,
    }


def _interval(interval) -> dict | None:
    return None if interval is None else asdict(interval)


def _ms_interval(interval) -> dict:
    return {name: 1e3 * value for name, value in asdict(interval).items()}


def _finding(finding, driver) -> dict:
    return {
        "rule": finding.rule,
        "cause": finding.cause,
        "evidence": finding.evidence,
        "predicted_gain": finding.gain,
        "option": finding.option,
        "advice": finding.advice,
        "remedies": [
            {
                "name": remedy.name,
                "class": remedy.kind,
                "how": remedy.how,
                "changes": [asdict(change) for change in remedy.changes(driver)],
            }
            for remedy in finding.remedies
        ],
        "lines": [_line(site, share) for site, share in finding.lines[:4]],
    }


def _line(site, share: float) -> dict:
    return {"file": site.file, "line": site.line, "share": share, "text": source_line(site)}


def _verdict(verdict) -> dict:
    check = verdict.losses
    return {
        "remedy": verdict.remedy.name,
        "class": verdict.remedy.kind,
        "how": verdict.remedy.how,
        "predicted_gain": verdict.predicted,
        "measured_gain": _interval(verdict.measured),
        "ms": [1e3 * seconds for seconds in verdict.seconds],
        "accepted": verdict.accepted,
        "reason": verdict.reason,
        "losses": check
        and {"difference": check.difference, "allowed": check.allowed, "hold": check.holds, "note": check.note},
    }


def losses_text(verified: dict) -> str:
    """Returns what the check of the losses said about a remedy."""
    losses = verified["losses"]
    if losses is None:
        return "not checked"
    return f"{verified['class']}: " + ("holds" if losses["hold"] else losses["note"] or "does not hold")


def machine_text(machine: dict) -> str:
    """Returns what the numbers depend on, in a line."""
    gpu, malloc, on = machine["gpu"], machine["allocator"], ("off", "on")
    threads, cores = count_text(machine["threads"], "thread"), count_text(machine["cores"], "core")
    said = (
        f"{machine['vendor'] or machine['processor']} CPU,"
        f" {'kernels for ' + machine['isa'] if machine['isa'] else 'without our kernels'}, torch's for"
        f" {machine['torch_isa']}, {threads} on {cores}, {malloc['malloc']}"
        f"{' with GLIBC_TUNABLES' * (malloc['tunables'] is not None)}; torch {machine['torch']}"
    )
    if gpu is None:
        return said
    return (
        f"{gpu['name']}, compute capability {gpu['capability']}, {gpu['memory_gib']} GiB, TF32 {on[gpu['tf32_matmul']]}"
        f" for matmuls and {on[gpu['tf32_cudnn']]} for cuDNN, cudnn.benchmark {on[gpu['cudnn_benchmark']]}; {said}"
    )


def waited_text(report: dict) -> str:
    """Returns what was left out of the times, where other processes took the core."""
    return f"Other processes had the core for {report['waited']:.0%} of the time; that is left out of all times."


def overhead_text(report: dict) -> str:
    """Returns what the measuring took itself."""
    watched, cost = report["steps"], report["watched_step_overhead"]
    longer = f"{cost['value']:.1%} [{cost['low']:.1%}, {cost['high']:.1%}] longer" if cost["value"] > 0 else "no longer"
    return (
        f"{watched} of {watched + report['bare_steps']} steps were watched in parts, which took {longer}:"
        f" {report['overhead']:.2%} of the time"
    )


def passes_text(report: dict) -> str:
    """Returns what is known of the time between passes over the data; empty where there is no loader."""
    passes = report["passes"]
    if passes is None:
        return ""
    if passes["between_ms"] is None:
        return "What the script does between passes over its data, such as evaluating and saving, was not looked at."
    between, steps = passes["between_ms"], passes["batches"] * report["step_ms"]["value"]
    return (
        f"Between passes over its data of {count_text(passes['batches'], 'step')} the script takes {between:.3g} ms,"
        f" {between / (between + steps):.0%} of its time; that is in none of the steps."
    )


def headline(report: dict) -> str:
    """Returns the answer in one sentence."""
    if not report["examined"]:
        parts, taken = report["parts_ms"], report["steps"] + report["bare_steps"]
        name = max(parts, key=parts.get)
        said = (
            f"The script ended after {count_text(taken, 'measured step')}; some hundred are needed to tell causes"
            " apart: let it train longer"
        )
        if report["failure"] not in ("", ENDED):
            said = f"{report['failure'][0].upper()}{report['failure'][1:]}"
        return f"{said}. {parts[name] / sum(parts.values()):.0%} of a step goes to: {name}."
    named = next((f for f in report["findings"] if f["rule"] == report["bottleneck"]), None)
    if named is None:
        parts = report["parts_ms"]
        name = max(parts, key=parts.get)
        return f"No bottleneck found. The step is bound by computing, most of it in: {name}."
    gain, where = named["predicted_gain"], ""
    if named["lines"]:
        line = named["lines"][0]
        where = f" Look first at {line['file'].rpartition('/')[2]}:{line['line']}: {line['text']}"
    saved = f" Without that, steps take {gain:.0%} less time." if gain else ""
    return f"{named['cause'][0].upper()}{named['cause'][1:]}.{saved}{where}"


def show(report: dict) -> None:
    """Prints a report."""
    from rich.console import Console
    from rich.markup import escape
    from rich.panel import Panel
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    step, noise = report["step_ms"], report["noise"]
    console.print(
        Panel(f"[bold]{escape(headline(report))}[/bold]", title=escape(f"fusedtrain diagnose {report['script']}")),
        soft_wrap=False,
    )
    console.print(
        f"{step['value']:.3g} ms per step [{step['low']:.3g}, {step['high']:.3g}]; {overhead_text(report)}",
        markup=False,
    )
    console.print(f"  {machine_text(report['machine'])}", markup=False, style="dim")
    if report["waited"] >= 0.01:
        console.print(f"  {waited_text(report)}", markup=False, style="dim")
    if passes_text(report):
        console.print(f"  {passes_text(report)}", markup=False, style="dim")
    if report["noisy"]:
        console.print(
            f"[yellow]This machine is noisy: two equal runs differ by {noise['low']:+.1%} to {noise['high']:+.1%}."
            " Small gains cannot be told from chance now.[/yellow]"
        )
    _show_parts(console, report)
    if report["bottleneck"] is None:
        _show_lines(console, report["lines"][:4])
    for i, finding in enumerate(report["findings"], 1):
        _show_finding(console, i, finding, escape)
    if report["verified"] is not None:
        _show_verified(console, report, Table)
    console.print("\n[bold]Looked at, no finding[/bold]")
    for rule, reason in report["checked"].items():
        console.print(f"  {rule:<15} {reason}", markup=False, style="dim")
    if report["failure"]:
        console.print(f"  {report['failure']}", markup=False, style="yellow")


def _show_parts(console, report: dict) -> None:
    total, width = report["step_ms"]["value"], 40
    for part, ms in report["parts_ms"].items():
        if ms / total >= 0.005:
            bar = "█" * max(1, round(width * ms / total))
            console.print(f"  {part:<10} {ms:9.3f} ms {ms / total:6.1%} {bar}", markup=False)
    ceilings = report["ceilings"]
    if ceilings["cached_ms"] is not None:
        console.print(f"  if loading were free   {ceilings['cached_ms']:9.3f} ms per step", markup=False)
    if ceilings["loader_alone_ms"] is not None:
        console.print(f"  if computing were free {ceilings['loader_alone_ms']:9.3f} ms per batch", markup=False)


def _show_finding(console, number: int, finding: dict, escape) -> None:
    option = " (an option)" if finding["option"] else ""
    predicted = f": predicted {finding['predicted_gain']:.0%}" if finding["predicted_gain"] else ""
    console.print(f"\n[bold]{number}. {escape(finding['cause'])}{option}[/bold]{predicted}")
    console.print(f"   {finding['evidence']}", markup=False, style="dim")
    for remedy in finding["remedies"][:2]:
        console.print(f"   -> {remedy['how']}  [{remedy['class']}]", markup=False)
        for change in remedy["changes"]:
            console.print(f"      {change['file']}:{change['line']}", markup=False, style="dim")
            for sign, name, colour in (("-", "before", "red"), ("+", "after", "green")):
                for line in change[name].splitlines():
                    console.print(f"      {sign} {line}", markup=False, style=colour)
    if finding["advice"]:
        console.print(f"   -> {finding['advice']}", markup=False)
    _show_lines(console, finding["lines"])


def _show_lines(console, lines: list[dict]) -> None:
    for line in lines:
        share = f"{line['share']:4.0%}" if line["share"] else "    "
        console.print(f"      {share} {line['file']}:{line['line']}  {line['text']}", markup=False, style="dim")


def _show_verified(console, report: dict, table_class) -> None:
    table = table_class(title="Verified, taking turns in the running loop; 99 % intervals")
    for name in ("remedy", "predicted", "measured", "interval", "ms per step", "losses", "kept"):
        table.add_column(name, justify="left" if name in ("remedy", "losses", "kept") else "right")
    for v in report["verified"]:
        gain, said = v["measured_gain"], losses_text(v)
        table.add_row(
            v["remedy"],
            f"{v['predicted_gain']:.1%}",
            f"{gain['value']:.1%}",
            f"{gain['low']:.1%} to {gain['high']:.1%}",
            f"{v['ms'][0]:.3g} -> {v['ms'][1]:.3g}",
            said,
            "yes" if v["accepted"] else f"no: {v['reason']}",
        )
    console.print()
    console.print(table) if report["verified"] else console.print("Nothing to verify.")
    for name, title in (("combined", "All together"), ("fresh", "In fresh processes")):
        if report.get(name):
            before, after = report[name]["ms"]
            gain = report[name]["gain"]
            interval = "" if gain is None else f", {gain['low']:.1%} to {gain['high']:.1%} of the time saved"
            console.print(
                f"{title}: {before:.3g} -> {after:.3g} ms per step, {before / after:.2f}x{interval}", markup=False
            )

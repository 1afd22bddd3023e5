"""Diagnoses a script: runs it in processes of its own and gathers what they report."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from fusedtrain import _allocator
from fusedtrain.diagnose.statistics import Paired
from fusedtrain.diagnose.verify import LEAST, LEVEL

PAIRS = 3  # of fresh processes
ALLOCATOR = {"remedy": "Allocator", "arguments": {}}


class ScriptError(Exception):
    """The script cannot be diagnosed; the message says why."""


def diagnose_script(
    script: str,
    arguments: list[str],
    *,
    steps: int | None = None,
    verify: bool = False,
    fresh: bool = True,
    stage: Callable[[str], None] = lambda text: None,
) -> dict:
    """Runs a training script, unchanged, and returns the report.

    Args:
        script: path of the Python file.
        arguments: its command line.
        steps: how many to watch; None: 50 to 200.
        verify: whether to try the remedies.
        fresh: whether to time, after that, the script as it is and with all remedies in new processes that take turns;
            not where several processes train.
        stage: is told what is being done.

    Raises:
        ScriptError: the script fails, ends too early, or no training loop was recognised in it.
    """
    if not Path(script).is_file():
        raise ScriptError(f"there is no file {script}")
    task = {"script": script, "arguments": arguments, "steps": steps, "verify": verify, "do": "diagnose"}
    messages, log = _run(task, {}, stage)
    report = next((m["report"] for m in reversed(messages) if "report" in m), None)
    error = next((m["error"] for m in messages if "error" in m), None)
    if report is None:
        if error is not None:
            raise ScriptError(f"the script failed:\n{error}")
        if any(m.get("seen") for m in messages):
            raise ScriptError("the script ended before enough steps were measured; let it train longer")
        if any("ended" in m for m in messages):
            raise ScriptError("no training loop was recognised: no optimizer of torch.optim took a step")
        raise ScriptError(f"the script's process died; the end of its output:\n{log[-2000:]}")
    if error is not None:
        report["failure"] = (
            f"{report['failure'] or 'the script failed before all was measured'}: {error.splitlines()[-1]}"
        )
    elif any("ended" in m for m in messages):
        report["failure"] = "the script ended before all was measured"
    if verify and fresh and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        stage("in fresh processes")
        _verify_outside(task, report)
    return report


def _verify_outside(task: dict, report: dict) -> None:
    """Tries what holds from the start of a process only, then everything together, and adds both to the report."""
    inside = list(report["accepted"])
    outside = next((f for f in report["findings"] if f["rule"] == "allocator"), None)
    if outside is not None:
        pairs, losses = _fresh(task, inside, [*inside, ALLOCATOR])
        if pairs is not None:
            verdict = _outside_verdict(outside, pairs, losses)
            report["verified"].append(verdict)
            if verdict["accepted"]:
                report["accepted"] = [*inside, ALLOCATOR]
                if not inside:
                    report["fresh"] = _summary(pairs)
    if report["accepted"] and "fresh" not in report:
        pairs, _ = _fresh(task, [], report["accepted"])
        report["fresh"] = pairs and _summary(pairs)


def _summary(pairs: Paired, level: float = 0.95) -> dict:
    return {"ms": [1e3 * seconds for seconds in pairs.seconds()], "gain": asdict(pairs.gain(level))}


def _outside_verdict(finding: dict, pairs: Paired, losses: list[list[float]]) -> dict:
    (remedy,) = finding["remedies"]
    summary = _summary(pairs, LEVEL)
    gain, same = summary["gain"], all(values == losses[0] for values in losses)
    accepted = gain["low"] > 0 and gain["value"] > LEAST
    note = "" if same else "the script's losses differ from run to run: not comparable"
    return {
        "remedy": remedy["name"],
        "class": remedy["class"],
        "how": remedy["how"],
        "predicted_gain": finding["predicted_gain"],
        "measured_gain": gain,
        "ms": summary["ms"],
        "accepted": accepted,
        "reason": f"{len(pairs.before)} pairs of fresh processes" if accepted else "no gain that excludes chance",
        "losses": {"difference": 0.0 if same else None, "allowed": 0.0, "hold": same, "note": note},
    }


def _fresh(task: dict, before: list[dict], after: list[dict]) -> tuple[Paired | None, list[list[float]]]:
    """Times the script with two sets of remedies, in new processes that take turns."""
    found: dict[bool, list[dict]] = {False: [], True: []}
    losses = []
    for i in range(PAIRS):
        for second in (False, True) if i % 2 == 0 else (True, False):
            specs = after if second else before
            variables = _allocator.variables() if ALLOCATOR in specs else {}
            remedies = [spec for spec in specs if spec != ALLOCATOR]
            messages, _ = _run(task | {"do": "time", "remedies": remedies}, variables)
            done = next((m for m in messages if "seconds" in m), None)
            if done is None:
                return None, []
            found[second].append(done)
            losses.append(done["losses"])
    # Both are measured alike: without what other processes took, where that is known of both.
    name = "seconds" if any(done["own"] is None for done in found[False] + found[True]) else "own"
    return Paired(*(tuple(done[name] for done in found[second]) for second in (False, True))), losses


def _run(task: dict, variables: dict[str, str], stage=lambda text: None) -> tuple[list[dict], str]:
    """Runs one task in a process; returns its messages and its output."""
    with tempfile.TemporaryDirectory(prefix="fusedtrain-") as folder:
        output, log, file = Path(folder, "messages"), Path(folder, "log"), Path(folder, "task.json")
        output.touch()
        file.write_text(json.dumps(task | {"output": str(output)}))
        command = [sys.executable, "-m", "fusedtrain.diagnose.runner", str(file)]
        with log.open("wb") as sink, output.open() as source:
            process = subprocess.Popen(
                command, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT
            )
            messages: list[dict] = []
            try:
                _follow(process, source, messages, stage)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return messages, log.read_text(errors="replace")


def _follow(process: subprocess.Popen, source, messages: list[dict], stage) -> None:
    """Reads messages until the process ends."""
    rest, ended = "", False
    while not ended:
        try:
            process.wait(0.1)
            ended = True
        except subprocess.TimeoutExpired:
            pass
        *lines, rest = (rest + source.read()).split("\n")
        for message in map(json.loads, lines):
            messages.append(message)
            if "stage" in message:
                stage(message["stage"])

"""Diagnoses a script: runs it in processes of its own and gathers what they report."""

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from fusedtrain import _allocator
from fusedtrain.diagnose.drive import ELSEWHERE, UNSEEN
from fusedtrain.diagnose.report import ENDED
from fusedtrain.diagnose.rules.finding import count_text
from fusedtrain.diagnose.statistics import Paired
from fusedtrain.diagnose.verify import LEAST, LEVEL

PAIRS = 3  # of fresh processes; twice as many where these show no gain
CLEAR = 0.1  # where both of the first two pairs save more, they are enough
ALLOCATOR = {"remedy": "Allocator", "arguments": {}}


TERMINATED = "SIGTERM ended it before all was measured, as it does where another process of torchrun fails"


class ScriptError(Exception):
    """The script cannot be diagnosed; the message says why."""


class Terminated(BaseException):
    """The process that diagnoses has been told to end; the command raises it for SIGTERM."""


def diagnose_script(
    script: str,
    arguments: list[str],
    *,
    module: bool = False,
    steps: int | None = None,
    verify: bool = False,
    fresh: bool = True,
    stage: Callable[[str], None] = lambda text: None,
) -> dict:
    """Runs a training script, unchanged, and returns the report.

    Args:
        script: path of the Python file.
        arguments: its command line.
        module: ``script`` is the name of a module instead, as ``python -m`` takes it.
        steps: how many to watch; None: 50 to 200.
        verify: whether to try the remedies.
        fresh: whether to time, after that, the script as it is and with all remedies in new processes that take turns;
            not where several processes train.
        stage: is told what is being done.

    Raises:
        ScriptError: the script fails, ends too early, or no training loop was recognised in it.
        Terminated: nothing was measured until then; else the report tells what was.
    """
    if not module and not Path(script).is_file():
        raise ScriptError(f"there is no file {script}")
    task = {"script": script, "arguments": arguments, "module": module, "steps": steps, "verify": verify}
    task["do"] = "diagnose"
    messages: list[dict] = []
    try:
        log = _run(task, {}, messages, stage)
    except Terminated:
        report = _last_report(messages)
        if report is None:
            raise
        return report | {"failure": TERMINATED, "traceback": ""}
    report = _last_report(messages)
    failed = next((m for m in messages if "error" in m), {})
    error, when = failed.get("error"), failed.get("when", "")
    died = next((m["died"] for m in messages if "died" in m), "")
    if report is None:
        if error is not None:
            raise ScriptError(f"the script failed{when}:\n{error}")
        ended = next((m for m in messages if "ended" in m), None)
        if ended is not None and ended["exit"]:  # a text, as of sys.exit("no data"), is what Python would print
            exit, said = ended["exit"], log[-2000:].strip()
            what = f": {exit}" if isinstance(exit, str) else f" with {exit}"
            raise ScriptError(f"the script exited{what}" + (f"; the end of its output:\n{said}" if said else ""))
        seen = next((m for m in messages if m.get("seen")), None)
        if seen is not None:
            took = f"it took {count_text(seen['steps'], 'step')}, and some hundred are needed"
            raise ScriptError(f"the script ended before enough steps were measured: {took}; let it train longer")
        if ended is not None:
            raise ScriptError(ELSEWHERE if ended["elsewhere"] else _unseen(ended["processes"]))
        raise ScriptError(f"the script failed: {died or 'its process ended'}; the end of its output:\n{log[-2000:]}")
    report["traceback"] = ""
    end = died if error is None else error.splitlines()[-1]
    if end:
        if not report["failure"]:
            traceback = error or f"{died}; the end of its output:\n{log[-2000:]}"
            report |= {"failure": f"the script failed before all was measured{when}", "traceback": traceback}
        report["failure"] += f": {end}"
    elif any("ended" in m for m in messages):
        report["failure"] = ENDED
    ranks = max(int(os.environ.get("WORLD_SIZE", "1")), *(m.get("spawned", 1) for m in messages))
    if verify and fresh and ranks == 1:
        stage("in fresh processes")
        try:
            _verify_outside(task, report)
        except Terminated:
            report["failure"] = TERMINATED
    return report


def _last_report(messages: list[dict]) -> dict | None:
    return next((m["report"] for m in reversed(messages) if "report" in m), None)


def _unseen(processes: int) -> str:
    """Says that no optimizer took a step, and in which processes nobody looked."""
    if not processes:
        return UNSEEN
    return (
        f"{UNSEEN}, in the script's own process. It started {processes} more, which are not watched: those of"
        " torch.multiprocessing.spawn would be, and those of torchrun -m fusedtrain diagnose SCRIPT"
    )


def _verify_outside(task: dict, report: dict) -> None:
    """Tries what holds from the start of a process only, times everything together, and adds both to the report."""
    inside = report["accepted"]
    outside = next((f for f in report["findings"] if f["rule"] == "allocator"), None)
    arms = [[], *([inside] if inside else []), *([[*inside, ALLOCATOR]] if outside else [])]
    times, losses = _fresh(task, arms) if len(arms) > 1 else (None, [])
    if times is None:
        return
    kept = times[1] if inside else None
    if outside is not None:
        verdict = _outside_verdict(outside, Paired(times[-2], times[-1]), losses)
        report["verified"].append(verdict)
        if verdict["accepted"]:
            report["accepted"], kept = arms[-1], times[-1]
    if kept is not None:
        report["fresh"] = _summary(Paired(times[0], kept))
        if report["fresh"]["gain"]["value"] <= 0:
            _withdraw(report)


def _withdraw(report: dict) -> None:
    """Takes back what was kept: a script that runs with it from its start is no faster."""
    report["accepted"] = []
    for verdict in report["verified"]:
        if verdict["accepted"]:
            verdict |= {"accepted": False, "reason": "no faster in fresh processes, with all that was kept"}


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


def _fresh(task: dict, arms: list[list[dict]]) -> tuple[list[tuple[float, ...]] | None, list[list[float]]]:
    """Times the script with each set of remedies in new processes that take turns.

    Returns the seconds per step by set, None where a process failed, and the losses of all.
    """
    found: list[list[dict]] = [[] for _ in arms]
    for i in range(2 * PAIRS):
        turns = list(zip(arms, found))
        for remedies, done in turns if i % 2 == 0 else reversed(turns):
            variables = _allocator.variables() if ALLOCATOR in remedies else {}
            inside = [remedy for remedy in remedies if remedy != ALLOCATOR]
            messages: list[dict] = []
            _run(task | {"do": "time", "remedies": inside}, variables, messages)
            done += [message for message in messages if "seconds" in message]
            if len(done) <= i:
                return None, []
        # All are measured alike: without what other processes took, where that is known of all.
        name = "seconds" if any(message["own"] is None for done in found for message in done) else "own"
        times = [tuple(message[name] for message in done) for done in found]
        if i == 1 and all(_clear(before, after) for before, after in itertools.pairwise(times)):
            break
        if i + 1 >= PAIRS and Paired(times[0], times[-1]).gain().value > 0:
            break
    return times, [message["losses"] for done in found for message in done]


def _clear(before: tuple[float, ...], after: tuple[float, ...]) -> bool:
    gains = [1 - b / a for a, b in zip(before, after)]
    return min(gains) > CLEAR


def _run(task: dict, variables: dict[str, str], messages: list[dict], stage=lambda text: None) -> str:
    """Runs one task in a process, which ends with this one; adds its messages to ``messages``, returns its output."""
    with tempfile.TemporaryDirectory(prefix="fusedtrain-") as folder:
        output, log, file = Path(folder, "messages"), Path(folder, "log"), Path(folder, "task.json")
        output.touch()
        file.write_text(json.dumps(task | {"output": str(output), "parent": os.getpid()}))
        # Not -m, which would take the fusedtrain of the folder at hand, such as its source tree, before this one.
        path = [*map(str, sys.path)]
        start = f"import sys; sys.path[:] = {path}; from fusedtrain.diagnose import runner; runner.main()"
        command = [sys.executable, "-c", start, str(file)]
        with log.open("wb") as sink, output.open() as source:
            process = subprocess.Popen(
                command, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT
            )
            try:
                _follow(process, source, messages, stage)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        # What it has to say ends with 0, however the script ends; but so does os._exit(0) in it.
        if process.returncode or not any("left" in message for message in messages):
            messages.append({"died": _how(process.returncode)})
        return log.read_text(errors="replace")


def _how(code: int) -> str:
    """Says how a process ended."""
    how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    return f"its process {how}"


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

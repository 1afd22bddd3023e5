"""Judges ``fusedtrain diagnose`` on scripts with planted faults; writes results/planted.csv and PLANTED.md.

Each script in planted/ says in CAUSES which rules may be named first, and does it right when PLANTED_FIXED is set. It
is diagnosed and verified on one core (CORES in the script: more), as many scripts at a time as there are cores. A
script passes when its cause is named first, what was kept does not make it slower in fresh processes, and at least
90 % of what the script's own fix saves is saved (``of_optimum``). Where the cause is the user's to mend, as an
evaluation in every step, the diagnosis has only advice, and ``promised`` says how much of what the fix saves it told.

    python benchmarks/planted.py                 all scripts, half an hour, and the A/A runs; what is up to date is
                                                 left out: a call that was stopped goes on; what took least comes first
    python benchmarks/planted.py slow_disk       some, in any case
    python benchmarks/planted.py --no-verify     only what is named; writes nothing
    python benchmarks/planted.py --aa 25         false wins in A/A runs beside a process that loads the machine, added
                                                 to those of earlier calls: results/planted_aa.csv

A row is up to date while these are the same: the script, how it is judged, the modules that measure and decide, and
torch. Comments do not count, nor does how a report looks; nor do the kernels that remedies put in, whose speed has
benchmarks of its own: they change what a row measures, not what the diagnosis is worth.
"""

import argparse
import ast
import csv
import functools
import hashlib
import inspect
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import median

import torch

from fusedtrain import _allocator
from fusedtrain.diagnose import script as scripts

HERE = Path(__file__).parent
FOLDER = HERE / "planted"
TABLE = HERE / "results" / "planted.csv"
AA = HERE / "results" / "planted_aa.csv"
KNOWN = ("CAUSES", "CORES", "RANKS", "NEEDS", "FIXED_ENVIRONMENT")
PACKAGE = Path(scripts.__file__).parents[1]
LOOKS = ("command.py", "html.py", "lines.py", "report.py")  # what a report looks like, and not what is found
MODULES = [PACKAGE / "_waits.py", PACKAGE / "data" / "workers.py"]
MODULES += [f for f in sorted((PACKAGE / "diagnose").rglob("*.py")) if f.name not in LOOKS]
RUNS = 50  # A/A
ROUNDS = 3  # of fresh processes
COLUMNS = (
    *("script", "planted", "named", "correct", "ms", "remedies_kept", "ms_before", "ms_after", "ms_fixed"),
    *("of_optimum", "promised", "slower", "noisy", "overhead", "seconds", "code"),
)


def constants(path: Path) -> dict:
    """Returns the constants that a script says about itself."""
    found = {"CAUSES": [], "CORES": 1, "RANKS": 1}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in KNOWN:
            found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


@functools.cache
def common() -> list[str]:
    """Returns what all rows depend on."""
    judging = map(inspect.getsource, (restrict, one, diagnose, optimum))
    return [torch.__version__, *map(program, [*judging, *(module.read_text() for module in MODULES)])]


def code(path: Path) -> str:
    """Returns what a row depends on, in short: a hash."""
    return hashlib.sha256("\0".join([*common(), program(path.read_text())]).encode()).hexdigest()[:8]


def program(text: str) -> str:
    """Returns what Python makes of a text: without comments, docstrings and layout."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
            first.value.value = ""
    return ast.dump(tree)


def restrict(cores: int) -> None:
    """Keeps this process and its children to so many cores."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, allowed[-cores:])
    os.environ["OMP_NUM_THREADS"] = str(min(cores, len(allowed)))


def judge(name: str, verify: bool) -> dict:
    """Diagnoses one script in a process of its own and compares with what was planted."""
    command = [sys.executable, __file__, "--one", name, *(() if verify else ("--no-verify",))]
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        return {"script": name, "correct": False, "named": "the diagnosis failed"}
    seconds = round(time.perf_counter() - start, 1)
    return json.loads(done.stdout) | {"seconds": seconds, "code": code(FOLDER / f"{name}.py")}


def judged(names: list[str], verify: bool, lanes: int):
    """Gives the rows of scripts as they are done: those that need one core side by side, then the others."""
    alone = [name for name in names if constants(FOLDER / f"{name}.py")["CORES"] > 1]
    cores = iter(sorted(os.sched_getaffinity(0))[-lanes:])
    with ThreadPoolExecutor(lanes, initializer=lambda: os.sched_setaffinity(0, {next(cores)})) as pool:
        rows = [pool.submit(judge, name, verify) for name in names if name not in alone]
        yield from (row.result() for row in as_completed(rows))
    yield from (judge(name, verify) for name in alone)


def one(name: str, verify: bool) -> dict:
    path = FOLDER / f"{name}.py"
    planted = constants(path)
    if planted.get("NEEDS") == "cuda" and not torch.cuda.is_available():
        return {"script": name, "planted": "/".join(planted["CAUSES"]), "named": "skipped: needs a GPU", "correct": ""}
    restrict(planted["CORES"])
    report = diagnose(path, planted["RANKS"], verify)
    named = report["bottleneck"]
    row = {
        "script": name,
        "planted": "/".join(planted["CAUSES"]) or "none",
        "named": named or "none",
        "correct": named in planted["CAUSES"] if planted["CAUSES"] else named is None,
        "ms": round(report["step_ms"]["value"], 3),
        "noisy": report["noisy"],
        "overhead": f"{report['overhead']:.2%}",
    }
    if not verify:
        return row | {"findings": [(f["rule"], round(f["predicted_gain"], 3)) for f in report["findings"]]}
    kept = [v["remedy"] for v in report["verified"] if v["accepted"]]
    row |= {"remedies_kept": " + ".join(kept) or "-", "failure": report["failure"]}
    return row | (optimum(path, planted, report) if planted["RANKS"] == 1 else {})


def diagnose(path: Path, ranks: int, verify: bool) -> dict:
    """Returns the report of one process, or of the first of several."""
    if ranks == 1:
        return scripts.diagnose_script(str(path), [], verify=verify)
    os.environ["OMP_NUM_THREADS"] = "1"
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    options = ["--json", *(("--verify",) if verify else ())]
    command = [sys.executable, *launch, "fusedtrain", "diagnose", *options, str(path)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def optimum(path: Path, planted: dict, report: dict) -> dict:
    """Times the script as it is, with what was kept and with its own fix, in fresh processes that take turns; says
    which share of the time that the fix saves was saved, or promised."""
    kept, fix = report["accepted"], {"PLANTED_FIXED": "1"}
    fix |= _allocator.variables() if planted.get("FIXED_ENVIRONMENT") == "GLIBC_TUNABLES" else {}
    arms = {"before": ({}, [])}
    if kept:
        allocator = _allocator.variables() if scripts.ALLOCATOR in kept else {}
        arms["after"] = allocator, [remedy for remedy in kept if remedy != scripts.ALLOCATOR]
    if planted["CAUSES"]:
        arms["fixed"] = fix, []
    times = {name: [] for name in arms}
    for _ in range(ROUNDS if len(arms) > 1 else 0):
        for name, (variables, remedies) in arms.items():
            task = {"script": str(path), "arguments": [], "do": "time", "remedies": remedies}
            messages: list[dict] = []
            scripts._run(task, variables, messages)
            times[name] += [
                1e3 * (message["own"] or message["seconds"]) for message in messages if "seconds" in message
            ]
    ms = {name: median(values) for name, values in times.items() if values}
    found = {f"ms_{name}": round(value, 3) for name, value in ms.items()}
    found["slower"] = "after" in ms and min(times["after"]) > max(times["before"])
    if "fixed" not in ms or ms["fixed"] > 0.9 * ms["before"]:  # the fault costs memory, or time per sample, or stays
        return found
    saved = ms["before"] - ms["fixed"]
    cause = next((f for f in report["findings"] if f["rule"] in planted["CAUSES"]), None)
    if cause is None or cause["remedies"]:
        return found | {"of_optimum": round((ms["before"] - ms.get("after", ms["before"])) / saved, 3)}
    promised = cause["predicted_gain"] * ms["before"] / saved
    return found | ({"promised": round(promised, 3)} if promised else {})


LOAD = """
import time
while True:
    start = time.perf_counter()
    while time.perf_counter() - start < 0.05:
        pass
    time.sleep(0.03)
"""


def false_wins(runs: int) -> dict:
    """Judges a remedy that does nothing, so many times, while another process takes turns with the machine."""
    import runpy

    from fusedtrain.diagnose import measure, verify
    from fusedtrain.diagnose.drive import Driver, Finished
    from fusedtrain.diagnose.instrument import Instrument
    from fusedtrain.diagnose.plan import Arm
    from fusedtrain.diagnose.remedies import Remedy

    restrict(1)
    os.environ["PLANTED_EPOCHS"] = str(10**6)  # the plan ends it
    load = subprocess.Popen([sys.executable, "-c", LOAD])
    verdicts = []

    class Nothing(Remedy):
        name, kind = "nothing", "bitwise"

    def plan(driver):
        sizes = yield from measure.warm_up(driver)
        for _ in range(runs):
            verdicts.append((yield from verify.judge(driver, sizes, Nothing(), 0.0, Arm())))

    try:
        with Instrument() as instrument:
            driver = Driver(instrument, plan)
            driver.install()
            runpy.run_path(str(FOLDER / "healthy.py"), run_name="__main__")
    except Finished:
        pass
    finally:
        load.kill()
    return {
        "runs": len(verdicts),
        "false_wins": sum(v.accepted for v in verdicts),
        "largest_gain_seen": round(max(v.measured.value for v in verdicts), 4),
        "code": code(FOLDER / "healthy.py"),
    }


def read(path: Path) -> list[dict]:
    """Returns the rows of a table."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def save(path: Path, columns: tuple[str, ...], table: list[dict]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


def rows() -> dict[str, dict]:
    """Returns the table by script."""
    return {row["script"]: {name: row[name] for name in COLUMNS if name in row} for row in read(TABLE)}


def aa_runs() -> int:
    """Returns how many A/A runs are of the present version."""
    return sum(int(row["runs"]) for row in read(AA) if row["code"] == code(FOLDER / "healthy.py"))


def write(*new: dict) -> None:
    """Puts rows into the table, and writes it as Markdown too."""
    known = rows() | {row["script"]: {name: str(row[name]) for name in COLUMNS if name in row} for row in new}
    table = [known[name] for name in sorted(known) if (FOLDER / f"{name}.py").exists()]
    save(TABLE, COLUMNS, table)
    ran = [row for row in table if row["correct"]]
    right = sum(row["correct"] == "True" for row in ran)
    verified = [row for row in ran if row.get("ms_after")]
    slower = sum(row["slower"] == "True" for row in verified)
    reached = [float(row["of_optimum"]) >= 0.9 for row in ran if row.get("of_optimum")]
    text = "# Planted faults\n\nWritten by `python benchmarks/planted.py` from results/planted.csv; do not edit.\n\n"
    text += f"The planted cause is named first in {right} of {len(ran)} scripts. Remedies were kept in {len(verified)},"
    text += f" and made {slower} of them slower in fresh processes. Where the cause has a remedy that can be applied,"
    text += f" 90 % of what the script's own fix saves is saved in {sum(reached)} of {len(reached)}; where it is the"
    text += " user's to mend, `promised` says how much of that the diagnosis told. An empty cell was not measured.\n\n"
    present = sum(row.get("code") == code(FOLDER / f"{row['script']}.py") for row in table)
    text += f"{present} of {len(table)} rows are of the version that wrote this page (`code`: of script, judge,"
    text += " diagnosis and torch), the others of earlier ones; the next call measures those again.\n\n"
    aa = read(AA)
    if aa:
        total, won = (sum(int(row[name]) for row in aa) for name in ("runs", "false_wins"))
        text += (
            f"A remedy that does nothing was judged {total} times beside a process that loads the core: it won {won}"
        )
        text += f" times; {aa_runs()} of the runs are of that version."
        text += f" The largest gain seen was {max(float(row['largest_gain_seen']) for row in aa):.1%}.\n\n"
    text += f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}\n"
    text += "".join(f"| {' | '.join(str(row.get(name) or '') for name in COLUMNS)} |\n" for row in table)
    (HERE / "PLANTED.md").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", help="names of scripts in planted/ (default: all)")
    parser.add_argument("--no-verify", action="store_true", help="only judge what is named")
    parser.add_argument("--aa", type=int, metavar="RUNS", help="count false wins instead")
    parser.add_argument(
        "--lanes",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="how many scripts of one core to judge at a time, each on a core of its own (default: all)",
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.pop("GLIBC_TUNABLES", None)  # the allocator of whoever starts this is none of the scripts' business
    if args.one:
        print(json.dumps(one(args.one, not args.no_verify)))
    elif args.aa:
        found = false_wins(args.aa)
        print(json.dumps(found))
        save(AA, tuple(found), [*read(AA), found])
        write()
    else:
        known = {} if args.no_verify else rows()
        paths = sorted(FOLDER.glob("*.py"), key=lambda path: float(known.get(path.stem, {}).get("seconds") or 0))
        old = [path.stem for path in paths if known.get(path.stem, {}).get("code") != code(path)]
        for row in judged(args.scripts or old, not args.no_verify, args.lanes):
            print(*(f"{key}={value}" for key, value in row.items()), flush=True)
            if not args.no_verify:
                write(row)
        while not args.scripts and not args.no_verify and aa_runs() < RUNS:
            subprocess.run([sys.executable, __file__, "--aa", str(RUNS // 2)], check=True)


if __name__ == "__main__":
    main()

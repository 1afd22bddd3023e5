"""Search for the best options with Optuna: in a space from a YAML file, by several processes, resumable."""

import contextlib
import functools
import itertools
import json
import math
import os
import queue
import random
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

from fusedtrain import _files, _processes
from fusedtrain._extras import need, require
from fusedtrain.train.errors import InputError
from fusedtrain.train.options import load_yaml
from fusedtrain.tune.target import TuneError, end_with_parent, load

# The points of a grid are queued: Optuna's own sampler takes that of a trial that was killed for visited.
SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "grid": "RandomSampler", "cmaes": "CmaEsSampler"}
SAMPLERS |= {"qmc": "QMCSampler", "gp": "GPSampler", "nsgaii": "NSGAIISampler"}
PACKAGES = {"cmaes": "cmaes", "gp": "scipy", "qmc": "scipy"}  # that Optuna imports no sooner than it draws with them
PRUNERS = {"median": "MedianPruner", "percentile": "PercentilePruner", "hyperband": "HyperbandPruner"}
PRUNERS |= {"halving": "SuccessiveHalvingPruner", "none": "NopPruner"}
ENDS = (signal.SIGINT, signal.SIGTERM)  # signals that end a worker
GRACE = 5.0  # seconds in which a worker ends the command it runs
BRACES = re.compile(r"\{(\w+)\}")
SHORT_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)e[-+]?\d+", re.IGNORECASE)  # YAML 1.1 wants a point and a sign


@dataclass(frozen=True)
class Space:
    """A search, as its YAML file holds it.

    Args:
        params: name -> list of choices, or ``{low, high}`` with ``log: true`` or ``step`` where wanted; whole numbers
            give whole numbers.
        objective: ``FILE.py:NAME`` of a function ``(params, report) -> value``; ``report(step, value)`` tells an
            intermediate value and ends the trial where the pruner finds it hopeless.
        command: instead of a function, a command line with ``{name}`` for each parameter and ``{trial}`` for a number;
            other braces stay. Each line of its output that is a JSON object with ``metric`` (and, for pruning,
            ``step``) is an intermediate value, the last one the result.
        metric: of the command's lines.
        direction: "minimize" or "maximize".
        trials: how many in all, pruned and failed ones included; a grid has no more than its points.
        sampler, pruner: name, or ``{name: ..., option: ...}`` with options of Optuna's class.

    Raises:
        TuneError: a value is not one of these.
    """

    params: dict
    objective: str | None = None
    command: str | None = None
    metric: str | None = None
    direction: str = "minimize"
    trials: int = 20
    sampler: dict = field(default_factory=lambda: {"name": "tpe"})
    pruner: dict = field(default_factory=lambda: {"name": "median"})

    def __post_init__(self):
        if (self.objective is None) == (self.command is None):
            raise TuneError("the space needs either objective: FILE.py:NAME or command: with metric:")
        if self.command is not None and self.metric is None:
            raise TuneError("command: needs metric:, the name of the value in the command's JSON lines")
        for name in ("objective", "command", "metric"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise TuneError(f"{name} must be text, got {getattr(self, name)!r}")
        if self.command is not None:
            _words(self.command)
        names = {*self.params, "trial"} if isinstance(self.params, dict) else set()
        unknown = [name for name in BRACES.findall(self.command or "") if name not in names]
        if unknown:
            raise TuneError(f"command: holds {{{unknown[0]}}}, and there is no parameter of that name")
        if self.direction not in ("minimize", "maximize"):
            raise TuneError(f"direction must be minimize or maximize, got {self.direction!r}")
        if type(self.trials) is not int or self.trials < 1:
            raise TuneError(f"trials must be a whole number of at least 1, got {self.trials!r}")
        if not isinstance(self.params, dict) or not self.params:
            raise TuneError("params must name at least one parameter")
        for name in self.params:
            if not isinstance(name, str) or (name == "trial" and self.command is not None):
                raise TuneError(f"a parameter cannot be called {name!r}: names are text, and {{trial}} is the number")
        for name in ("sampler", "pruner"):
            value = getattr(self, name)
            if not isinstance(value, (str, dict)):
                raise TuneError(f"{name} must be a name or {{name: ..., option: ...}}, got {value!r}")
            object.__setattr__(self, name, {"name": value} if isinstance(value, str) else dict(value))
            known = SAMPLERS if name == "sampler" else PRUNERS
            if getattr(self, name).get("name") not in known:
                raise TuneError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name).get('name')!r}")
        if not isinstance(self.sampler.get("seed", 0), int):
            raise TuneError(f"sampler: seed must be a whole number, got {self.sampler['seed']!r}")
        object.__setattr__(self, "params", {name: _range(name, value) for name, value in self.params.items()})


def read_space(path: str | Path) -> Space:
    """Returns the space of a YAML file; TuneError names what is wrong in it."""
    try:
        content = load_yaml(path)
    except InputError as error:
        raise TuneError(str(error)) from None
    known = [f.name for f in fields(Space)]
    if not isinstance(content, dict) or "params" not in content:
        raise TuneError(f"{path} must hold params: and of {', '.join(known)}")
    unknown = [name for name in content if name not in known]
    if unknown:
        raise TuneError(f"{path}: {unknown[0]!r} is not one of {', '.join(known)}")
    return Space(**content)


def search(
    space: Space,
    storage: str | Path,
    *,
    workers: int = 1,
    progress: Callable[[str], None] = lambda line: None,
) -> dict:
    """Runs the trials that are still missing in the storage.

    Args:
        space: what is searched.
        storage: an SQLite file; it keeps all trials, so that a search that was killed, or asks for more trials, goes
            on. Trials that were cut off are run again with the same parameters; one whose worker died twice has failed.
        workers: processes that run trials at the same time.
        progress: is called with a line per trial.

    Returns:
        ``best`` (``value``, ``params``, ``trial``), the numbers of trials ``complete``, ``pruned`` and ``failed``, and
        ``trials``: a list of them.

    Raises:
        TuneError: another search runs on the storage, it is no database, it belongs to other parameters, another
            direction or metric, or every trial failed; the message holds the last error.
        ChildProcessError: a worker died, and trials are missing; the same search goes on.
        ModuleNotFoundError: optuna is missing, or what its sampler needs.
    """
    optuna = need("optuna", "tune")
    if workers < 1:
        raise TuneError(f"workers must be at least 1, got {workers}")
    if space.objective is not None:
        load(space.objective)  # a mistake in the name shows here, not in every trial
    storage = Path(storage).resolve()
    storage.parent.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with _files.locked(storage.with_name(f"{storage.name}.lock"), wait=False) as free:
        if not free:
            raise TuneError(f"another search is running on {storage}")
        if storage.exists():
            _check_file(storage)
        study = _study(space, storage)
        _check(study, space)
        _again(study, space)
        points = _points(space) if space.sampler["name"] == "grid" else None
        wanted = space.trials if points is None else min(space.trials, len(points))
        done = _done(study, points)
        if done:
            progress(f"{done} of {wanted} trials are done already")
        if points is not None:
            _queue(study, points)
        begun = len(study.get_trials(deepcopy=False))
        codes = _run_all(space, storage, max(0, wanted - done), workers, begun, progress)
        study = _study(space, storage)
        died = _died(study, codes, progress) or [_ending(code) for code in codes.values() if code]
        if died and (done := _done(study, points)) < wanted:
            raise ChildProcessError(f"{done} of {wanted} trials are done: a worker {died[0]}; the same search goes on")
        return _result(study, storage)


def _study(space: Space, storage: Path, worker: int = 0, begun: int = 0):
    """The study in the storage, for a worker of a search that found so many trials there."""
    optuna = need("optuna", "tune")
    if space.sampler["name"] in PACKAGES:
        require(PACKAGES[space.sampler["name"]], None)
    options = {name: value for name, value in space.sampler.items() if name != "name"}
    if "seed" in options:  # or all workers, and a search that goes on, would begin with the same parameters
        again = 0 if space.sampler["name"] == "qmc" else begun  # its place in the sequence is in the storage
        options["seed"] = (options["seed"] + worker + 2**16 * again) % 2**32
    try:
        sampler = getattr(optuna.samplers, SAMPLERS[space.sampler["name"]])(**options)
        pruner_options = {name: value for name, value in space.pruner.items() if name != "name"}
        pruner = getattr(optuna.pruners, PRUNERS[space.pruner["name"]])(**pruner_options)
    except TypeError as error:
        raise TuneError(f"options of the sampler or pruner: {error}") from None
    # A worker that writes holds the file for a moment; the others wait instead of failing. The file is opened here: in
    # a URL some characters of its path would mean something else.
    connect = functools.partial(sqlite3.connect, str(storage), timeout=60, check_same_thread=False)
    rdb = optuna.storages.RDBStorage("sqlite:///search", engine_kwargs={"creator": connect})
    return optuna.create_study(
        storage=rdb,
        study_name="fusedtrain",
        sampler=sampler,
        pruner=pruner,
        direction=space.direction,
        load_if_exists=True,
    )


def _check_file(storage: Path) -> None:
    """Raises where the storage is a file of something else."""
    with contextlib.closing(sqlite3.connect(str(storage))) as connection:
        try:
            connection.execute("PRAGMA schema_version").fetchone()
        except sqlite3.DatabaseError as error:
            raise TuneError(f"{storage} is no SQLite database: {error}") from None


def _check(study, space: Space) -> None:
    """Raises where the storage holds another search."""
    mine = {"params": space.params, "direction": space.direction, "task": space.objective or space.command}
    mine = json.loads(json.dumps(mine | {"metric": space.command and space.metric}))
    found = study.user_attrs.get("space", {})
    for name, value in mine.items():
        if found.get(name, value) != value:
            raise TuneError(f"the storage belongs to another search: its {name} is {found[name]}, not {value}")
    if found != mine:
        study.set_user_attr("space", mine)  # of an older version, perhaps, which kept less


def _again(study, space: Space) -> None:
    """Puts trials that were cut off back into the queue."""
    optuna = need("optuna", "tune")
    states = optuna.trial.TrialState
    for trial in study.get_trials(deepcopy=False, states=(states.RUNNING,)):
        study.tell(trial.number, state=states.FAIL)
        if set(trial.params) == set(space.params) and space.sampler["name"] != "grid":
            study.enqueue_trial(trial.params)


def _died(study, codes: dict[int, int], progress) -> list[str]:
    """Returns how workers ended that their trials took along, such as one that the system had no memory for. The second
    time it is told for the trial's failure: it would be the first to run in every search that goes on."""
    optuna = need("optuna", "tune")
    trials, found = study.get_trials(deepcopy=False), []
    known = [trial.params for trial in trials if "died" in trial.user_attrs]
    for frozen in trials:
        code = codes.get(frozen.user_attrs.get("process"))
        if frozen.state != optuna.trial.TrialState.RUNNING or code is None or code - 128 in ENDS:
            continue
        found.append(_ending(code))
        trial = optuna.trial.Trial(study, frozen._trial_id)
        trial.set_user_attr("died", found[-1])
        if frozen.params in known:
            error = f"ChildProcessError: its worker {found[-1]}, the second time"
            trial.set_user_attr("error", error)
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            progress(f"trial {trial.number}: failed: {error}")
    return found


def _ending(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _finished(study) -> list:
    """The trials that ran to their end."""
    cut = _cut_off(study)
    return [t for t in study.get_trials(deepcopy=False) if t.state.is_finished() and t.number not in cut]


def _done(study, points: list[dict] | None) -> int:
    """Returns how many trials are done, of a grid how many of its points."""
    finished = [trial.params for trial in _finished(study)]
    return len(finished) if points is None else sum(point in finished for point in points)


def _points(space: Space) -> list[dict]:
    """The points of a grid, in the order in which they are tried."""
    values = itertools.product(*(_grid(name, value) for name, value in space.params.items()))
    points = [dict(zip(space.params, point)) for point in values]
    random.Random(space.sampler.get("seed")).shuffle(points)
    return points


def _queue(study, points: list[dict]) -> None:
    """Puts those points of a grid into the queue that are neither done nor there."""
    optuna = need("optuna", "tune")
    waiting = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.WAITING,))
    known = [trial.params for trial in _finished(study)] + [t.system_attrs.get("fixed_params") for t in waiting]
    for point in points:
        if point not in known:
            study.enqueue_trial(point)


def _cut_off(study) -> set[int]:
    """Numbers of trials that ended with their process: failed, without an error of their own."""
    optuna = need("optuna", "tune")
    failed = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.FAIL,))
    return {trial.number for trial in failed if "error" not in trial.user_attrs}


def _run_all(space: Space, storage: Path, trials: int, workers: int, begun: int, progress) -> dict[int, int]:
    """Lets worker processes run so many trials, and passes their lines on; returns their exit codes."""
    context = _processes.context("fusedtrain.tune", *(["torch._dynamo"] if space.objective else []))
    tickets, lines = context.Value("i", trials), context.Queue()
    processes = [
        context.Process(target=_work, args=(space, storage, i, begun, tickets, lines, dict(os.environ)))
        for i in range(min(workers, trials))
    ]
    for process in processes:
        process.start()
    try:
        while any(process.is_alive() for process in processes):
            with contextlib.suppress(queue.Empty):
                progress(lines.get(timeout=0.2))
        with contextlib.suppress(queue.Empty):
            while True:
                progress(lines.get(timeout=0.2))
        for process in processes:
            process.join()
        return {process.pid: process.exitcode for process in processes}
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(GRACE)
            process.kill()


def _work(space: Space, storage: Path, worker: int, begun: int, tickets, lines, variables: dict) -> None:
    """Runs trials as long as there are tickets."""
    _processes.take_over(variables)
    end_with_parent()
    for number in ENDS:
        signal.signal(number, _leave)
    optuna = need("optuna", "tune")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = _study(space, storage, worker, begun)
    function = None if space.objective is None else load(space.objective)
    while True:
        with tickets.get_lock():
            if tickets.value <= 0:
                return
            tickets.value -= 1
        # One by one: of a queue in SQLite Optuna lets two processes take the same trial. The system lets go of this
        # lock when a worker is killed.
        with _files.locked(storage.with_name(f"{storage.name}.queue.lock")):
            trial = study.ask()
        trial.set_user_attr("process", os.getpid())
        _run(study, trial, lambda trial: _one(trial, space, function, lines))


def _run(study, trial, objective: Callable) -> None:
    """Runs one trial and tells the study how it ended."""
    optuna = need("optuna", "tune")
    try:
        value, state = objective(trial), optuna.trial.TrialState.COMPLETE
    except optuna.TrialPruned:
        value, state = None, optuna.trial.TrialState.PRUNED
    except Ended:
        raise
    except (Exception, SystemExit):  # _one has told it
        value, state = None, optuna.trial.TrialState.FAIL
    study.tell(trial, value, state)


class Ended(SystemExit):
    """A signal ends the worker; its trial runs again."""


def _leave(number: int, frame) -> None:
    """Ends a worker with its command. Optuna takes a KeyboardInterrupt for the end of the trial, which would not run
    again."""
    for one in ENDS:
        signal.signal(one, lambda *_: None)  # the parent sends another one
    raise Ended(128 + number)


def _one(trial, space: Space, objective: Callable | None, lines) -> float:
    """Runs one trial and puts a line about it out."""
    optuna = need("optuna", "tune")
    text = ""

    def report(step: int, value: float) -> None:
        trial.report(float(value), int(step))
        if trial.should_prune():
            raise optuna.TrialPruned

    try:
        params = {name: _suggest(trial, name, values) for name, values in space.params.items()}
        texts = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in params.items()}
        text = "  " + ", ".join(f"{name}={value}" for name, value in texts.items())
        run = objective or _command(space, trial.number)
        value = float(run(params, report))
        if math.isnan(value):  # Optuna would take it for a trial that was cut off, and so would the next search
            raise ValueError("the value is not a number")
    except optuna.TrialPruned:
        lines.put(f"trial {trial.number}: pruned{text}")
        raise
    except (Exception, SystemExit) as error:  # of a script's main(), perhaps
        if isinstance(error, Ended):
            raise
        trial.set_user_attr("error", f"{type(error).__name__}: {error}"[:2000])
        lines.put(f"trial {trial.number}: failed: {type(error).__name__}: {error}{text}")
        raise
    lines.put(f"trial {trial.number}: {value:.6g}{text}")
    return value


def _command(space: Space, number: int) -> Callable:
    """Returns an objective that runs the command and reads its JSON lines."""

    def run(params: dict, report) -> float:
        values = {**params, "trial": number}
        words = [BRACES.sub(lambda m: str(values[m[1]]), word) for word in _words(space.command)]
        words[0] = sys.executable if words[0] == "python" else words[0]
        value, tail, step = None, [], 0
        # A session of its own, so that a pruned command goes with all its processes.
        process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {"PYTHONUNBUFFERED": "1"},  # a value is told when it is known
            start_new_session=True,
            preexec_fn=functools.partial(_processes.kill_with, os.getpid()),
        )
        try:
            for line in process.stdout:
                tail = [*tail[-4:], line.strip()]
                found = _json(line)
                if space.metric in found:
                    known = found[space.metric]
                    # JSON has no other way to write what is not a number.
                    value, step = math.nan if known is None else float(known), int(found.get("step", step + 1))
                    report(step, value)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            process.stdout.close()
            process.wait()
        if process.returncode != 0:
            raise RuntimeError(f"the command ended with {process.returncode}: {' / '.join(tail)}")
        if value is None:
            raise RuntimeError(
                f"the command printed no JSON line with {space.metric!r}; its last lines: {' / '.join(tail)}"
            )
        return value

    return run


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise TuneError(f"command: {error}: {command}") from None
    if not words:
        raise TuneError("command: is empty")
    return words


def _json(line: str) -> dict:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _range(name: str, value):
    """Returns a parameter's choices as a list, or its range with numbers for numbers."""
    if isinstance(value, list) and value:
        try:
            json.dumps(value)
        except TypeError:  # such as a date
            raise TuneError(f"{name}: choices must be numbers, texts, true, false or null, got {value!r}") from None
        return [_number(choice) for choice in value]
    if not isinstance(value, dict) or not {"low", "high"} <= set(value) <= {"low", "high", "log", "step"}:
        raise TuneError(f"{name} must be a list of choices or {{low, high}} with log or step, got {value!r}")
    found = {key: _number(item) for key, item in value.items()}
    low, high = found["low"], found["high"]
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) for x in (low, high))
    if not numbers or low > high:
        raise TuneError(f"{name}: low and high must be finite numbers in order, got {low!r} and {high!r}")
    step = found.get("step", 1)
    if not isinstance(step, (int, float)) or isinstance(step, bool) or not 0 < step < math.inf:
        raise TuneError(f"{name}: step must be a positive, finite number, got {step!r}")
    if not isinstance(found.get("log", False), bool):
        raise TuneError(f"{name}: log must be true or false, got {found['log']!r}")
    if found.get("log") and (low <= 0 or "step" in found):
        raise TuneError(f"{name}: log needs a positive low and no step, got {value!r}")
    return found


def _number(value):
    """YAML reads 1e-4, without a point, as text."""
    return float(value) if isinstance(value, str) and SHORT_FLOAT.fullmatch(value) else value


def _suggest(trial, name: str, values):
    if isinstance(values, list):
        return trial.suggest_categorical(name, values)
    low, high, log, step = values["low"], values["high"], values.get("log", False), values.get("step")
    if isinstance(low, int) and isinstance(high, int) and (step is None or isinstance(step, int)):
        return trial.suggest_int(name, low, high, log=log, step=step or 1)
    return trial.suggest_float(name, low, high, log=log, step=step)


def _grid(name: str, values) -> list:
    if isinstance(values, list):
        return values
    if "step" not in values:
        raise TuneError(f"{name}: the grid sampler needs a list or a step")
    count = int((values["high"] - values["low"]) / values["step"] + 1e-9) + 1
    return [min(values["low"] + i * values["step"], values["high"]) for i in range(count)]  # 0.1 + 2 * 0.1 > 0.3


def _result(study, storage: Path) -> dict:
    optuna = need("optuna", "tune")
    states, trials = optuna.trial.TrialState, _finished(study)
    counts = {
        name: sum(t.state == state for t in trials)
        for name, state in {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}.items()
    }
    if not counts["complete"]:
        errors = [t.user_attrs["error"] for t in trials if "error" in t.user_attrs]
        why = f": {errors[-1]}" if errors else ""
        raise TuneError(f"no trial came to its end{why}; without {storage} they are run again")
    best = study.best_trial
    table = [
        {
            "trial": t.number,
            "state": t.state.name.lower(),
            "value": t.value,
            "params": t.params,
            "intermediate": {str(step): value for step, value in t.intermediate_values.items()},
            **({"error": t.user_attrs["error"]} if "error" in t.user_attrs else {}),
        }
        for t in trials
    ]
    found = {"trial": best.number, "value": best.value, "params": best.params}
    return {"best": found, **counts, "storage": str(storage), "trials": table}

"""Runs a user's script, unchanged, under a plan, in a process of its own: ``main()`` with TASK.json as argument.

The task holds the script, its arguments, what to do and a file that receives one JSON object per line as things happen.
"""

import atexit
import builtins
import contextlib
import functools
import gc
import io
import json
import multiprocessing
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.multiprocessing

from fusedtrain import _processes
from fusedtrain.diagnose import measure
from fusedtrain.diagnose.diagnosis import Diagnosis
from fusedtrain.diagnose.drive import SETTLING, Driver, Finished
from fusedtrain.diagnose.instrument import Instrument, wrap
from fusedtrain.diagnose.plan import Arm, Run
from fusedtrain.diagnose.remedies import rebuild
from fusedtrain.diagnose.remedies.settings import set_threads
from fusedtrain.diagnose.report import to_json

# When a script fails that would not without being measured.
BEYOND = ", in a pass over its loader that goes on beyond the loader's length while it is measured"
AGAIN = ", when it was started again in the same process to measure more: let it train longer"
SHORT = 2 * SETTLING  # a script that takes fewer steps is not started again
GRACE = 5.0  # seconds in which a script's process writes what it has to before it ends


class Task:
    """One process: a diagnosis, or the timing of a script with some remedies in force from its start.

    Args:
        task: see above.
        rank: of a process that the script has spawned to train; the first one reports. None: the script's own.
    """

    def __init__(self, task: dict, rank: int | None = None):
        self.task, self.rank = task, rank
        self.file = open(task["output"], "a", buffering=1)  # noqa: SIM115 (held until the process ends)
        self.failed = False
        self.exit: object = None  # what the script gave sys.exit(), where that is not success
        self.diagnosis: Diagnosis | None = None
        self.spawned = 0  # processes that train
        self.others = 0  # processes that the script started otherwise
        self.frozen = 0  # objects that the garbage collector was to leave alone when the script began

    def tell(self, **message) -> None:
        if not self.rank or "error" in message:
            self.file.write(json.dumps(message) + "\n")

    def plan(self, driver: Driver):
        task = self.task
        if task["do"] == "time":
            return self._time(driver)
        self.diagnosis = Diagnosis(
            steps=task["steps"],
            verify=task["verify"],
            stage=lambda text: self.tell(stage=text),
            checkpoint=lambda diagnosis: self.tell(report=to_json(diagnosis, task["script"])),
        )
        return self.diagnosis.plan(driver)

    def _time(self, driver: Driver):
        driver.losses = losses = []
        sizes = yield from measure.warm_up(driver)
        driver.losses = None
        remedies = tuple(rebuild(spec, driver) for spec in self.task["remedies"])
        sources = [remedy.source for remedy in remedies if remedy.on_loader]
        arm = Arm(remedies, sources[-1] if sources else None)
        steps = min(max(round(2 / sizes.step), 10), 100)
        records = yield Run(steps, arm, max(3, sizes.block(arm)[1]))
        alone = driver.alone(arm)
        own = sum(step.seconds for step in records) / steps if alone else None
        self.tell(seconds=sum(step.wall for step in records) / steps, own=own, losses=losses[:4])

    def run(self, train: Callable[[], None]) -> None:
        alone = self.rank is None and int(os.environ.get("WORLD_SIZE", "1")) == 1
        self.frozen = gc.get_freeze_count()
        with Instrument() as instrument:
            driver = Driver(instrument, self.plan)
            driver.install()
            driver.on_ignored = functools.partial(_leave, self)
            self._watch_processes(driver)
            self._heed_threads()
            while not driver.finished and not self.failed:
                steps = driver.steps
                ends_passes = driver.ends_passes
                self._run(train, driver, alone)
                if (driver.steps - steps < SHORT and driver.ends_passes == ends_passes) or not alone:
                    break
                if not driver.finished:
                    why = "ended" if driver.ends_passes == ends_passes else "fails beyond the length of its loader"
                    self.tell(stage=f"the script {why} after {driver.steps - steps} steps: starting it again")
                    driver.restart()
                    _forget_process_state()
            if self.spawned:
                self.tell(spawned=self.spawned)  # they report
            elif not driver.finished:
                if self.diagnosis is not None and self.diagnosis.cut_short():
                    self.tell(report=to_json(self.diagnosis, self.task["script"]))
                seen = driver.loader is not None or driver.optimizer is not None
                told = {"seen": seen, "steps": driver.steps, "processes": self.others, "exit": self.exit}
                told["elsewhere"] = instrument.elsewhere
                self.tell(ended=True, **told)

    def _run(self, train: Callable[[], None], driver: Driver, alone: bool) -> None:
        steps = driver.steps
        try:
            train()
        except Finished:
            pass
        except SystemExit as error:
            self.exit = error.code if error.code is None or isinstance(error.code, (int, str)) else str(error.code)
        except BaseException as error:
            killed = isinstance(error, torch.multiprocessing.ProcessExitedException)
            if self.spawned and not killed:  # it was told over there
                return
            beyond = driver.beyond_pass and not (self.diagnosis and self.diagnosis.failure)  # of what is tried then
            if beyond and alone and not driver.ends_passes:
                driver.ends_passes = True
                return
            self.failed = True
            again = driver.starts > 1 and driver.steps == steps
            when = BEYOND if beyond and not driver.ends_passes else AGAIN if again else ""
            self.tell(error=traceback.format_exc(limit=-6), when=when)

    def _heed_threads(self) -> None:
        """Has torch take the number of threads that a script puts into the environment before it imports torch."""
        said = _said_threads()

        def importing(original):
            def wrapper(name, *args, **kwargs):
                if name.partition(".")[0] == "torch":
                    undo()
                    if _said_threads() not in (said, None):
                        set_threads(_said_threads())
                return original(name, *args, **kwargs)

            return wrapper

        undo = wrap(builtins, "__import__", importing)

    def _watch_processes(self, driver: Driver) -> None:
        """Has the processes of torch.multiprocessing.spawn diagnosed, and counts those that others start."""
        spawn = sys.modules["torch.multiprocessing.spawn"]  # torch.multiprocessing.spawn is the function

        def spawning(original):
            def wrapper(fn, args=(), nprocs=1, *more, **options):
                self.spawned = nprocs
                return original(spawned, (self.task, fn, args), nprocs, *more, **options)

            return wrapper

        def starting(original):
            def wrapper(process):
                own = (getattr(process._target, "__module__", None) or "").startswith(("torch.", "multiprocessing."))
                self.others += not own  # but workers of a loader, for instance
                return original(process)

            return wrapper

        def once(original):
            return lambda number: original(number) if driver.starts == 1 else None  # torch takes it once in a process

        for owner in (spawn, torch.multiprocessing):
            driver.instrument.patch(owner, "start_processes", spawning)
        driver.instrument.patch(multiprocessing.process.BaseProcess, "start", starting)
        driver.instrument.patch(torch, "set_num_interop_threads", once)


def _said_threads() -> int | None:
    """Returns the number of threads that variables say to torch; None where none does."""
    for name in ("MKL_NUM_THREADS",) * torch.backends.mkl.is_available() + ("OMP_NUM_THREADS",):
        text = os.environ.get(name, "").partition(",")[0].strip()
        if text.isdecimal() and int(text):
            return int(text)
    return None


def run_script(task: dict) -> None:
    """Runs the script as Python would, from where it was started."""
    os.chdir(task.setdefault("folder", os.getcwd()))  # an earlier start may have gone elsewhere
    sys.argv = [task["script"], *task["arguments"]]
    if task.get("module"):
        sys.path[0] = task["folder"]
        runpy.run_module(task["script"], run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(task["script"])
    sys.path[0] = str(Path(path).resolve().parent)
    runpy.run_path(path, run_name="__main__")


def _forget_process_state() -> None:
    """Undoes what a script may do once in a process, and no second time."""
    multiprocessing.set_start_method(None, force=True)
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def spawned(rank: int, task: dict, function: Callable, args: tuple) -> None:
    """Stands in for a function that the script lets several processes run."""
    run(Task(task, rank), lambda: function(rank, *args))


def run(task: Task, train: Callable[[], None]) -> None:
    """Carries a task out and ends the process."""
    gc.freeze()  # what is imported here is not the script's: nobody who looks at all that is alive need look at it
    task.run(train)
    _leave(task)


def _leave(task: Task) -> None:
    """Ends the process: workers of abandoned loaders, and threads, are not waited for."""
    task.tell(left=True)
    settling = threading.Thread(target=_settle, args=(task.frozen,), daemon=True)
    settling.start()
    settling.join(GRACE)
    os._exit(0)


def _settle(frozen: int) -> None:
    """Does what the end of a script does: files write what they buffer, loggers what they keep, which may take long."""
    if gc.get_freeze_count() > frozen:  # the script has frozen its own
        gc.unfreeze()
    _flush()
    atexit._run_exitfuncs()
    _flush()


def _flush() -> None:
    for file in (sys.stdout, sys.stderr, *gc.get_objects()):  # the streams are older than what stands still, see run()
        # isinstance() would ask objects of others for their class: a dead weakref.proxy raises
        if issubclass(type(file), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            with contextlib.suppress(Exception):  # closed, nobody reads it any more, or a class of the script's fails
                file.flush()


def main() -> None:
    content = json.loads(Path(sys.argv[1]).read_text())
    _processes.kill_with(content["parent"])
    run(Task(content), lambda: run_script(content))

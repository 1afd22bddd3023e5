"""Runs a user's script, unchanged, under a plan: ``python -m fusedtrain.diagnose.runner TASK.json``.

The task holds the script, its arguments, what to do and a file that receives one JSON object per line as things happen.
"""

import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path

from fusedtrain.diagnose import measure
from fusedtrain.diagnose.diagnosis import Diagnosis
from fusedtrain.diagnose.drive import SETTLING, Arm, Driver, Finished, Run
from fusedtrain.diagnose.instrument import Instrument
from fusedtrain.diagnose.remedies import rebuild
from fusedtrain.diagnose.report import to_json

SHORT = 2 * SETTLING  # a script that takes fewer steps is not started again


class Task:
    """One process: a diagnosis, or the timing of a script with some remedies in force from its start."""

    def __init__(self, task: dict):
        self.task, self.begin = task, time.perf_counter()
        self.file = open(task["output"], "a", buffering=1)  # noqa: SIM115 (held until the process ends)
        self.failed = False

    def tell(self, **message) -> None:
        self.file.write(json.dumps(message) + "\n")

    def plan(self, driver: Driver):
        task = self.task
        if task["do"] == "time":
            return self._time(driver)
        return Diagnosis(
            steps=task["steps"],
            verify=task["verify"],
            stage=lambda text: self.tell(stage=text),
            checkpoint=lambda diagnosis: self.tell(report=to_json(diagnosis, task["script"])),
        ).plan(driver)

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

    def run(self) -> None:
        script, arguments = self.task["script"], self.task["arguments"]
        sys.path[0] = str(Path(script).resolve().parent)
        with Instrument() as instrument:
            driver = Driver(instrument, self.plan)
            driver.install()
            while not driver.finished and not self.failed:
                steps = driver.steps
                self._run_script(script, arguments)
                if driver.steps - steps < SHORT or int(os.environ.get("WORLD_SIZE", "1")) > 1:
                    break
                if not driver.finished:
                    self.tell(stage=f"the script ended after {driver.steps - steps} steps: starting it again")
                    driver.restart()
            if not driver.finished:
                self.tell(ended=True, seen=driver.loader is not None or driver.optimizer is not None)

    def _run_script(self, script: str, arguments: list[str]) -> None:
        sys.argv = [script, *arguments]
        try:
            runpy.run_path(script, run_name="__main__")
        except (Finished, SystemExit):
            pass
        except BaseException:
            self.failed = True
            self.tell(error=traceback.format_exc(limit=-6))


if __name__ == "__main__":
    Task(json.loads(Path(sys.argv[1]).read_text())).run()
    sys.stdout.flush()
    os._exit(0)  # workers of abandoned loaders are not waited for

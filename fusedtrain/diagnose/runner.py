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
from fusedtrain.diagnose.drive import Arm, Driver, Finished, Run
from fusedtrain.diagnose.instrument import Instrument
from fusedtrain.diagnose.remedies import rebuild
from fusedtrain.diagnose.report import to_json


class Task:
    """One process: a diagnosis, or the timing of a script with some remedies in force from its start."""

    def __init__(self, task: dict):
        self.task, self.begin = task, time.perf_counter()
        self.file = open(task["output"], "a", buffering=1)  # noqa: SIM115 (held until the process ends)
        self.done = False

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
        steps = min(max(round(3 / sizes.step), 20), 100)
        records = yield Run(steps, arm, max(3, sizes.block(arm)[1]))
        alone = driver.alone(arm)
        own = sum(step.seconds for step in records) / steps if alone else None
        self.tell(seconds=sum(step.wall for step in records) / steps, own=own, losses=losses[:4])

    def run(self) -> None:
        script, arguments = self.task["script"], self.task["arguments"]
        sys.argv = [script, *arguments]
        sys.path[0] = str(Path(script).resolve().parent)
        with Instrument() as instrument:
            driver = Driver(instrument, self.plan)
            driver.install()
            try:
                runpy.run_path(script, run_name="__main__")
            except (Finished, SystemExit):
                pass
            except BaseException:
                self.tell(error=traceback.format_exc(limit=-6))
            if not driver.finished:
                self.tell(ended=True, seen=driver.loader is not None or driver.optimizer is not None)


if __name__ == "__main__":
    Task(json.loads(Path(sys.argv[1]).read_text())).run()
    sys.stdout.flush()
    os._exit(0)  # workers of abandoned loaders are not waited for

"""Finds the user's lines that the time goes to, and how often each is carried out."""

import faulthandler
import re
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict

from fusedtrain.diagnose.drive import Driver
from fusedtrain.diagnose.instrument import running
from fusedtrain.diagnose.places import Site, is_users, place


def stack_of(thread: int, file) -> list[tuple[str, int, str]]:
    """Returns (file, line, function) of the frames of a thread, the innermost first; ``file`` is overwritten."""
    file.seek(0)
    file.truncate()
    faulthandler.dump_traceback(file)
    file.seek(0)
    text = file.read().decode(errors="replace")
    found = re.search(rf"hread 0x0*{thread:x}\b.*\n((?:  File .*\n)*)", text)
    frames = re.findall(r'  File "(.*)", line (\d+) in (.*)', found[1]) if found else []
    return [(name, int(line), function) for name, line, function in frames]


class Sampler:
    """Notes from a second thread, every 2 ms, which line of the user's code the training thread is in.

    It reads where that thread is as text. Frames would be kept alive over the end of their functions, and with them
    what these hold: a guard of torch's would then change the state of the training thread from the second one.
    """

    def __init__(self, driver: Driver):
        self.driver, self.times = driver, defaultdict(float)
        self.parts = {place(Driver.fetch.__code__): "loader"} | driver.instrument.own_parts
        self.target, self.stop = threading.get_ident(), threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Sampler":
        # Else Python code keeps the interpreter for 5 ms, and is seen only where it calls what lets go of it.
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(2e-4)
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop.set()
        self.thread.join()
        sys.setswitchinterval(self._interval)

    def _run(self) -> None:
        last = time.perf_counter()
        with tempfile.TemporaryFile() as file:
            while not self.stop.wait(0.002):
                stepping = self.driver.stepping
                stack = stack_of(self.target, file)
                site = next((Site(name, line) for name, line, _ in stack if is_users(name)), None)
                now = time.perf_counter()
                if site is not None and stepping and self.driver.stepping:  # before and after
                    part = "evaluation" if self.driver.instrument.evaluating else running(stack, self.parts)
                    self.times[part, site] += now - last
                last = now

    def lines(self) -> list[tuple[str, Site, float]]:
        total, times = sum(self.times.values()), Counter()
        for (part, site), seconds in self.times.items():
            times["forward" if part == "loss" else part, site] += seconds / total
        return [(part, site, share) for (part, site), share in times.most_common(12)]

    def loss(self) -> float:
        """Returns what share of the time outside of all parts the loss takes."""
        seconds = {part: sum(s for (p, _), s in self.times.items() if p == part) for part in ("loss", "rest")}
        return seconds["loss"] / (sum(seconds.values()) or 1.0)


class LineCounter:
    """Counts how often the user's lines are carried out, for each object whose methods they belong to.

    Another tracer, such as a debugger's, stays in force; nothing is counted then.
    """

    def __init__(self):
        self.counts: Counter[tuple[Site, int]] = Counter()
        self._running: list = []  # frames that were there before: the training loop's own

    def __enter__(self) -> "LineCounter":
        if sys.gettrace() is None:
            sys.settrace(self._call)
            frame = sys._getframe(1)
            while frame is not None:
                frame.f_trace = self._call(frame, "call", None)
                self._running.append(frame)
                frame = frame.f_back
        return self

    def __exit__(self, *_) -> None:
        if sys.gettrace() == self._call:
            sys.settrace(None)
        for frame in self._running:
            frame.f_trace = None
        self._running.clear()

    def _call(self, frame, event: str, _):
        code = frame.f_code
        if not is_users(code.co_filename):
            return None
        owner = id(frame.f_locals.get("self"))

        def line(frame, event: str, _):
            if event == "line":
                self.counts[Site(code.co_filename, frame.f_lineno), owner] += 1
            return line

        return line

    def repeats(self) -> dict[Site, int]:
        most: dict[Site, int] = {}
        for (site, _), count in self.counts.items():
            most[site] = max(most.get(site, 0), count)
        return most

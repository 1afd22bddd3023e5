"""How long threads were ready to run and had no core: what other processes take from a measurement on the clock."""

import contextlib
import os
import threading
import time


class Waits:
    """Reads the counter of a thread: by default of the one that makes it. Linux keeps one; elsewhere it stays at 0.

    Cost: 2 us per reading.
    """

    def __init__(self, path: str = "/proc/thread-self/schedstat"):
        self._file = None
        with contextlib.suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self):
        if self._file is not None:
            os.close(self._file)

    def read(self) -> float:
        """Returns the seconds since the thread began."""
        if self._file is None:
            return 0.0
        try:
            return int(os.pread(self._file, 64, 0).split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    def start(self) -> tuple[float, float]:
        """Returns the clock and the counter of now, for :meth:`seconds`."""
        return time.perf_counter(), self.read()

    def seconds(self, start: tuple[float, float]) -> float:
        """Returns the seconds since ``start`` without what the thread waited.

        What counts as waiting lies within what the clock counts: else a wait between the two readings would be taken
        off a time that it is not in.
        """
        begin, waited = start
        waited = self.read() - waited
        return time.perf_counter() - begin - waited


class TeamWaits:
    """The counters of the thread that makes it and of those that torch's operations share their work with.

    An operation ends with its last thread: besides what the first waits, it loses at most what the others do.
    """

    def __init__(self):
        self._threads = [Waits()]

    def look(self) -> None:
        """Finds the other threads of now. Those that Python started, such as of a progress bar, are nobody's team."""
        python = {thread.native_id for thread in threading.enumerate()}
        with contextlib.suppress(OSError):
            team = [number for number in os.listdir("/proc/self/task") if int(number) not in python]
            self._threads[1:] = [Waits(f"/proc/self/task/{number}/schedstat") for number in team]

    def read(self) -> tuple[float, ...]:
        """Returns the seconds of each thread."""
        return tuple(waits.read() for waits in self._threads)

    def cost(self) -> float:
        """Returns the seconds that reading takes, measured."""
        start = time.perf_counter()
        for _ in range(20):
            self.read()
        return (time.perf_counter() - start) / 20

    def since(self, before: tuple[float, ...]) -> tuple[float, float]:
        """Returns what the first thread waited since ``read()``, and all the others together."""
        own, *team = (now - then for now, then in zip(self.read(), before))
        return own, sum(team)

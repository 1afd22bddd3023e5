"""Signals that ask a run to save and end."""

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))


class Preempted(SystemExit):
    """A signal asked the run to stop. Not caught, it ends the process with status 128 + the number of the signal.

    A SystemExit, so that ``except Exception`` in somebody's dataset does not swallow it.
    """

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.signal = signal.Signals(number)

    def __reduce__(self):  # a SystemExit keeps the status, not the number
        return Preempted, (int(self.signal),)

    def __str__(self) -> str:
        return f"stopped by {self.signal.name}"


class StopSignals(contextlib.AbstractContextManager):
    """Within the ``with`` block SIGTERM, SIGINT and SIGUSR1 are noted instead of ending the process.

    ::

        with StopSignals() as stop:
            while True:
                with stop.interruptible():  # nothing in here changes the state that will be saved
                    batch = next(batches)
                step(batch)
                stop.check()

    The first signal sets :attr:`requested`; inside :meth:`interruptible` it raises :class:`Preempted` at once. A second
    signal ends the process on the spot, by that signal's own default. Processes forked inside the block ignore what
    they get, for Ctrl-C reaches them too; workers of a DataLoader end by SIGTERM, which is no error after a signal.

    Args:
        together: signals within so many seconds of the first are the same request: a terminal and a launcher both pass
            on one Ctrl-C.
    """

    def __init__(self, together: float = 1.0):
        self.requested: int | None = None
        self._together, self._when = together, 0.0
        self._interruptible, self._interruption = False, _Interruptible(self)
        self._previous: dict[int, object] = {}
        self._process = os.getpid()

    def __enter__(self) -> "StopSignals":
        self._process, self.requested = os.getpid(), None
        if threading.current_thread() is not threading.main_thread():
            warnings.warn("signals do not stop this run cleanly: it is not in the main thread", stacklevel=2)
            return self
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind, *exception) -> None:
        if kind is not None and issubclass(kind, Preempted):  # workers may still end
            self._previous.pop(getattr(signal, "SIGCHLD", None), None)
        for number, handler in self._previous.items():
            # None: a handler that was not set from Python, which cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def check(self) -> None:
        """Raises :class:`Preempted` when a signal has come."""
        if self.requested is not None:
            raise Preempted(self.requested)

    def interruptible(self) -> contextlib.AbstractContextManager:
        """Within the block a signal raises :class:`Preempted` at once; so does, at the end of it, one that came before,
        also in the place of an error: workers that were stopped by the same signal make a DataLoader fail."""
        return self._interruption

    def _handle(self, number: int, frame) -> None:
        if os.getpid() != self._process:
            return
        if self.requested is not None:
            if time.monotonic() - self._when < self._together:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested, self._when = number, time.monotonic()
        if hasattr(signal, "SIGCHLD"):
            # A launcher ends the workers of a DataLoader too, whose handler would raise for that amid a step or a save.
            self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        if self._interruptible:
            raise Preempted(number)


class _Interruptible(contextlib.AbstractContextManager):
    """One object for all blocks: it is entered in every step."""

    def __init__(self, stop: StopSignals):
        self._stop = stop

    def __enter__(self) -> None:
        self._stop._interruptible = True
        if self._stop.requested is not None:
            self._stop._interruptible = False
            self._stop.check()

    def __exit__(self, kind, *error) -> None:
        self._stop._interruptible = False
        if kind is None or issubclass(kind, Exception):
            self._stop.check()


class Stops(StopSignals):
    """Stops all processes of a run at the same place, whichever of them got the signal.

    They agree, by one small sum, each time they have waited for data, in training and in evaluation, and after every
    epoch. So nobody is in a collective of the model while another one waits for its data, or has left. A process that
    waits for the data of others hears of a signal to itself alone when these data, or another signal, have come.
    """

    def __init__(self, world):
        super().__init__()
        self.world = world

    def __exit__(self, kind, error, traceback) -> None:
        super().__exit__(kind, error, traceback)
        self.requested = None  # an evaluation after the run is not stopped by it
        if isinstance(error, Preempted) and error.signal == signal.SIGINT and hasattr(sys, "ps1"):
            raise KeyboardInterrupt from error  # a SystemExit would end the prompt, and the model with it

    def wait(self, fetch: Callable, *arguments):
        """Returns ``fetch(*arguments)``, which a signal interrupts; raises :class:`Preempted`, in all processes, where
        one has come to any of them. All call it equally often."""
        if self.world.size == 1:
            with self.interruptible():
                return fetch(*arguments)
        item = None
        try:
            self._interruptible = True
            if self.requested is None:
                item = fetch(*arguments)
            self._interruptible = False
        except Preempted:  # not yet: the others wait to hear of it
            pass
        except Exception:
            self._interruptible = False
            if self.requested is None:  # else it comes of workers that got the signal too
                raise
        self._interruptible = False
        self.together()
        return item

    def together(self) -> None:
        """Agrees and stops; all processes call it."""
        try:
            number = int(self.world.max(self.requested or 0)[0])
        except RuntimeError:
            self.check()  # the others were asked before there was anything to save, and have left
            raise
        if number:
            raise Preempted(number)

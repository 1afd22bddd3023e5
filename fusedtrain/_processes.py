"""Processes that begin at once, and end with the one that wants their results."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import connection


def context(*modules: str):
    """Returns a context of :mod:`multiprocessing` whose processes are as good as new, but have imported ``modules``:
    they are forks of a server that has. Where there are no forks, each imports them itself.

    Besides ``fusedtrain``, ``torch._dynamo`` is worth it, which every optimizer imports.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(list(modules))
    return found


def take_over(variables: dict[str, str]) -> None:
    """Gives this process the environment of the one that wants its results. A server of forks keeps that of its start.

    Args:
        variables: all of them.
    """
    os.environ.clear()
    os.environ.update(variables)


def end_with(wanted) -> None:
    """Ends this process as soon as the other end of ``wanted`` is closed, instead of working on unseen.

    Args:
        wanted: a connection or a sentinel of :mod:`multiprocessing`.
    """

    def watch() -> None:
        connection.wait([wanted])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def kill_with(parent: int) -> None:
    """Lets the system kill this process when its parent is gone, whatever program it runs by then: on Linux."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it was gone before the system knew
        os._exit(1)

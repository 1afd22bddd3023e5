"""Ranks of a process group as forks of one process that has imported torch, which takes seconds otherwise.

For scripts that tests start, not for the test process itself: that one has threads, which a fork does not survive.
"""

import contextlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # which every optimizer and every DTensor imports, once here and not in every fork
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)


def fork(function: Callable[[], None], output: Path | None = None) -> int:
    """Runs ``function`` in a fork, whose streams go to ``output``, and returns the process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setpgid(0, 0)  # with its own children, see :func:`clear`
        if output is not None:
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
        function()
        status = 0
    except SystemExit as error:
        status = error.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def start(world: int, function: Callable[[], None], output: Path | None = None) -> list[int]:
    """Starts ``function`` on ``world`` gloo ranks and returns their process ids; with one, there is no group."""
    store = Path(tempfile.mkdtemp(), "store")

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        if world > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
            dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world, timeout=TIMEOUT)
        function()
        if world > 1:
            dist.destroy_process_group()

    return [fork(lambda rank=rank: run(rank), output) for rank in range(world)]


def clear(children: list[int]) -> None:
    """Ends what killed processes have left: a DataLoader worker that was just starting does not notice it."""
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def send(group: int, number: int) -> None:
    """Sends a signal to a process started here and to its children, from a process that is none of them, for workers
    of a DataLoader tell their parent's signals from others."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.killpg(group, number)
        os._exit(0)
    os.waitpid(child, 0)


def wait(children: list[int]) -> list[int]:
    """Returns the exit statuses, negative for signals."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def run(world: int, function: Callable[[], None]) -> None:
    """:func:`start` and :func:`wait`; a rank that fails is an error here."""
    statuses = wait(start(world, function))
    assert statuses == [0] * world, statuses

"""Signals that stop a run, sent to real processes."""

import os
import pickle
import signal
import subprocess
import threading
import warnings

import harness
import pytest

from fusedtrain.train.preemption import SIGNALS, Preempted, StopSignals

NAMES = [number.name for number in SIGNALS]


@pytest.mark.parametrize("number", SIGNALS, ids=NAMES)
def test_a_signal_is_noted_and_the_handlers_come_back(number):
    before = [signal.getsignal(one) for one in SIGNALS]
    with StopSignals() as stop:
        assert stop.requested is None
        stop.check()
        os.kill(os.getpid(), number)
        assert stop.requested == number
        with pytest.raises(Preempted, match=f"stopped by {number.name}") as error:
            stop.check()
    assert error.value.code == 128 + number and error.value.signal == number
    other = pickle.loads(pickle.dumps(error.value))  # as one that another process has raised
    assert (other.code, other.signal, str(other)) == (128 + number, number, str(error.value))
    assert [signal.getsignal(one) for one in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS, ids=NAMES)
def test_inside_interruptible_a_signal_raises_at_once(number):
    with StopSignals() as stop:
        with pytest.raises(Preempted), stop.interruptible():
            os.kill(os.getpid(), number)
            pytest.fail("the signal did not raise")
        with pytest.raises(Preempted), stop.interruptible():
            pytest.fail("a signal that came before did not raise")


def test_an_error_that_the_signal_caused_becomes_the_signal_and_others_stay():
    with StopSignals() as stop:
        with pytest.raises(ZeroDivisionError), stop.interruptible():
            1 / 0  # noqa: B018
        with pytest.raises(Preempted), stop.interruptible():
            stop.requested = signal.SIGINT  # as where it reached the workers first
            raise RuntimeError("DataLoader worker exited unexpectedly")


def test_outside_the_main_thread_it_says_that_signals_do_not_work():
    def run():
        with warnings.catch_warnings(record=True) as caught, StopSignals() as stop:
            messages.extend(str(one.message) for one in caught)
            stop.check()

    messages: list[str] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert messages == ["signals do not stop this run cleanly: it is not in the main thread"]


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}

PROGRAM = """
import os, sys, time
from fusedtrain.train.preemption import StopSignals

def tell(text):
    os.write(1, text.encode() + b"\\n")

with StopSignals(together=0 if sys.argv[1] == "twice" else 3600) as stop:
    worker = os.fork()
    if worker == 0:
        tell("worker")
        sys.stdin.readline()
        tell(f"worker requested={stop.requested}")
        os._exit(0)
    tell("ready")
    try:
        if sys.argv[1] == "waiting":
            with stop.interruptible():
                time.sleep(5)
        while stop.requested is None:
            time.sleep(0.001)
        tell("noted")
        if sys.argv[1] == "twice":
            time.sleep(60)
        stop.check()
    finally:
        tell("saved")
        os.waitpid(worker, 0)
"""


@pytest.mark.parametrize(
    ("mode", "number", "group"),
    [("waiting", signal.SIGTERM, False), ("polling", signal.SIGUSR1, False), ("polling", signal.SIGINT, True)],
)
def test_the_process_ends_with_128_plus_the_number_and_its_workers_ignore_it(mode, number, group):
    process = harness.start_python("-c", PROGRAM, mode, pipes=PIPES | {"start_new_session": True})
    assert {process.stdout.readline(), process.stdout.readline()} == {"ready\n", "worker\n"}
    (os.killpg if group else os.kill)(process.pid, number)
    process.send_signal(signal.SIGTERM)  # what a launcher passes on of the same request
    lines = [] if mode == "waiting" else [process.stdout.readline()]
    lines.append(process.stdout.readline())
    out, _ = process.communicate("go\n")
    assert lines[-1] == "saved\n" and out == "worker requested=None\n"
    assert process.returncode in (128 + number, 128 + signal.SIGTERM)  # whichever the system delivered first


def test_a_second_signal_ends_the_process_on_the_spot():
    process = harness.start_python("-c", PROGRAM, "twice", pipes=PIPES)
    while process.stdout.readline() != "ready\n":
        pass
    process.send_signal(signal.SIGTERM)
    while process.stdout.readline() != "noted\n":
        pass
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate("go\n")
    assert process.returncode == -signal.SIGINT and "saved" not in out

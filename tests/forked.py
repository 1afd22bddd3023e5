"""Python processes that need not import torch, which takes seconds of each: forks of one process that has.

:class:`Python` is subprocess.Popen for a command of Python's: a process of its own, with its own arguments, environment
and streams, a child of this process, to be waited for and killed like any other. What is not its own is the state of
the interpreter: the modules in IMPORTED are there already. The server of forks that it asks multiprocessing for has
what it has imported by then.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from multiprocessing import forkserver, util
from pathlib import Path

IMPORTED = ("torch", "torch._dynamo")  # every optimizer imports the second one
# What libraries read when they are loaded. A command that is to see another value is started as usual.
_READ_EARLY = ("GLIBC_", "LD_", "MALLOC_", "MKL_", "ONEDNN_", "ATEN_", "OMP_", "PYTHON", "TORCH", "TRITON")
_THREADS, _FOLDERS = "OMP_NUM_THREADS", "PYTHONPATH"  # except for these, see :func:`_follow`
# And for these: torchrun sets them for process groups, and torch._dynamo for inductor, when it is imported.
_READ_LATE = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCHINDUCTOR_CACHE_DIR")
_PR_SET_CHILD_SUBREAPER = 36  # of Linux' prctl


class Python(subprocess.Popen):
    """subprocess.Popen for ``[sys.executable, "-W", "ignore", ...]`` and then ``-c CODE``, ``-m MODULE`` or a path.

    Ctrl-C reaches it as from a terminal. Where it cannot be a fork, because the platform or the environment does not
    allow it, it is started as usual.
    """

    def _execute_child(self, *arguments):
        as_usual = super()._execute_child
        bound = inspect.signature(as_usual).bind(*arguments).arguments
        env = dict(os.environ if bound["env"] is None else bound["env"])
        command, cwd = [os.fspath(word) for word in bound["args"]], os.fspath(bound["cwd"] or os.getcwd())
        if sys.platform != "linux" or not _server().can_fork(env):
            return as_usual(*arguments)
        streams = [bound[end] if bound[end] != -1 else i for i, end in enumerate(("p2cread", "c2pwrite", "errwrite"))]
        self.pid = _server().fork(command, cwd, env, bound["start_new_session"], streams)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(bound[end] for end in pipes))


def run(command: list, *, timeout: float, **popen) -> subprocess.CompletedProcess:
    """As subprocess.run with ``capture_output=True, text=True``."""
    with Python(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


class _Server:
    """The process that has imported IMPORTED, with this process' environment: a new one, or a fork of this process."""

    def __init__(self, forked: bool = False):
        self.environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        self.requests, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        with other:  # the server ends when this process has closed its end of the requests
            if not forked:
                start = [sys.executable, __file__, str(other.fileno())]
                subprocess.Popen(start, pass_fds=[other.fileno()], env=self.environment)
            elif os.fork() == 0:
                self.requests.close()
                _main(other)

    def can_fork(self, env: dict[str, str]) -> bool:
        own = self.environment
        changed = {name for name in env.keys() | own.keys() if env.get(name, "") != own.get(name, "")}
        changed -= {_THREADS, _FOLDERS}
        return not any(name.startswith(_READ_EARLY) and not name.startswith(_READ_LATE) for name in changed)

    def fork(self, command: list[str], cwd: str, env: dict[str, str], new_session: bool, streams: list[int]) -> int:
        """Returns the process id of a child of this process."""
        prctl = ctypes.CDLL(None).prctl
        # The server's child is an orphan at once, and those come to the next process above that asks for them.
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self.requests, [json.dumps([command, cwd, env, new_session]).encode()], streams)
            return int(self.requests.recv(64))
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


_server = functools.cache(_Server)


def fork_from_here() -> None:
    """From now on, commands are forks of this process as it is."""
    global _server
    here = _Server(forked=True)
    _server = lambda: here  # noqa: E731


def _serve(requests: socket.socket) -> list[str]:
    """Forks at every request; returns in the fork, with its command."""
    while True:
        request, streams, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not request:
            os._exit(0)
        command, cwd, env, new_session = json.loads(request)
        receiver, sender = os.pipe()
        between = os.fork()
        if between == 0:
            orphaned_by, child = os.getpid(), os.fork()
            if child:
                os.write(sender, str(child).encode())
                os._exit(0)
            break
        os.close(sender)
        os.waitpid(between, 0)
        with open(receiver) as pid:
            requests.send(pid.read(64).encode())
        for stream in streams:
            os.close(stream)
    requests.close()
    os.close(receiver)
    os.close(sender)
    while os.getppid() == orphaned_by:
        pass
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    if new_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    return command


def _follow(torch) -> None:
    """Does what the interpreter and torch do with variables that differ from the server's."""
    folders = [folder for folder in os.environ.get(_FOLDERS, "").split(os.pathsep) if folder]
    sys.path[1:1] = [folder for folder in folders if folder not in sys.path]
    threads = int(os.environ.get(_THREADS) or len(os.sched_getaffinity(0)))
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def _server_from_here(as_usual, path: str, words: list[str], kept: list[int]) -> int:
    """Does what multiprocessing.util.spawnv_passfds does; a server of forks is a fork of this process as it is, unless
    its memory is to be allocated in another way, which a program is told when it starts."""
    if "forkserver" not in words[-1] or "GLIBC_TUNABLES" in os.environ:
        return as_usual(path, words, kept)
    child = os.fork()
    if child:
        return child
    try:
        for stream in map(int, os.listdir("/proc/self/fd")):
            if stream > 2 and stream not in kept:
                with contextlib.suppress(OSError):  # that of the list itself
                    os.close(stream)
        forkserver._forkserver.__init__()  # this process holds its lock
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(words[-1])
    finally:
        os._exit(0)


def _run(command: list[str], main: types.ModuleType) -> None:
    """Does what the interpreter does with its command line."""
    sys.orig_argv[:] = command
    words = command[1:]
    if words[0] == "-W":
        warnings.simplefilter(words[1])
        sys.warnoptions.append(words[1])
        words = words[2:]
    if words[0] == "-u":
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)
        words = words[1:]
    if words[0] == "-m":
        sys.argv[:], sys.path[0] = words[:1] + words[2:], os.getcwd()
        runpy._run_module_as_main(words[1])
    elif words[0] == "-c":
        sys.argv[:], sys.path[0] = words[:1] + words[2:], ""
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        path = Path(words[0]).absolute()
        sys.argv[:], sys.path[0], main.__file__ = words, str(path.parent), str(path)
        exec(compile(path.read_bytes(), path, "exec"), main.__dict__)


def _live(command: list[str]) -> None:
    """Runs the command and ends as the interpreter does, but for what it need not take apart: what was imported."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    status = 0
    try:
        _run(command, main)
    except SystemExit as error:
        status = error.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException as error:
        trace = error.__traceback__.tb_next.tb_next  # without this function and :func:`_run`
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        status = signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    main.__dict__.clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    if status is signal.SIGINT:
        signal.signal(status, signal.SIG_DFL)
        os.kill(os.getpid(), status)
    os._exit(status & 0xFF)


def _main(requests: socket.socket) -> None:
    """The life of the server and, in its forks, that of their commands; it does not return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all, its forks among them
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is not looked at, also at the end of each fork, need not be copied
    with requests:
        command = _serve(requests)
    _follow(sys.modules["torch"])
    util.spawnv_passfds = functools.partial(_server_from_here, util.spawnv_passfds)
    _live(command)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))

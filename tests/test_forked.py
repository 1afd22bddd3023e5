"""Forks of a process that has imported torch: to be told from new processes by nothing but that."""

import json
import os
import signal
import subprocess
import sys

import forked
import harness
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes start as usual")

TELLS = """
import atexit, json, os, sys, threading, time
left = open("left", "w")  # to be closed by the end of the interpreter
left.write("written")
atexit.register(lambda: print("at exit", flush=True))
threading.Thread(target=lambda: (time.sleep(0.1), print("thread", flush=True))).start()
print(json.dumps({
    "argv": sys.argv[1:], "words": sys.orig_argv[-2:], "name": __name__, "file": globals().get("__file__"),
    "cwd": os.getcwd(), "variables": [os.environ.get(name) for name in ("OWN", "HOME")], "first": sys.path[0],
    "folder": sys.argv[-1] in sys.path, "parent": os.getppid(), "session": os.getsid(0) == os.getpid(),
    "filters": sys.warnoptions, "ctrl_c": "default_int_handler" in str(__import__("signal").getsignal(2)),
}), flush=True)
"""
ENDS = {
    "of its own": ("pass", 0, ""),
    "with a number": ("sys.exit(3)", 3, ""),
    "with words": ("sys.exit('no such file')", 1, "no such file\n"),
    "with an error": ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
    "by Ctrl-C": ("os.kill(os.getpid(), 2); time.sleep(9)", -signal.SIGINT, "KeyboardInterrupt\n"),
    "by a signal": ("os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
}


def run(start, words, folder, **options):
    env = {name: value for name, value in harness.environment(OWN="own").items() if name != "HOME"}
    with start(
        [sys.executable, "-W", "ignore", *words],
        cwd=folder,
        env=env | {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), env.get("PYTHONPATH")]))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    ) as process:
        out, err = process.communicate(timeout=60)
    return process, out, err


@pytest.mark.parametrize("form", ["code", "module", "file"])
@pytest.mark.parametrize("session", [False, True])
def test_a_fork_finds_what_a_new_process_finds(tmp_path, form, session):
    (tmp_path / "tells.py").write_text(TELLS)
    words = {"code": ["-c", TELLS], "module": ["-m", "tells"], "file": ["tells.py"]}[form] + ["a", str(tmp_path)]
    found = []
    for start in (subprocess.Popen, forked.Python):
        process, out, err = run(start, words, tmp_path, start_new_session=session)
        assert process.returncode == 0 and err == "", err
        told, *rest = out.splitlines()
        assert rest == ["thread", "at exit"] and (tmp_path / "left").read_text() == "written"
        (tmp_path / "left").unlink()
        found.append(json.loads(told))
        assert found[-1]["parent"] == os.getpid()
    assert found[0] == found[1]
    assert found[0]["session"] == session and found[0]["folder"] and found[0]["variables"] == ["own", None]


@pytest.mark.parametrize("end", ENDS)
def test_a_fork_ends_as_a_new_process_does(tmp_path, end):
    code, status, last = ENDS[end]
    for start in (subprocess.Popen, forked.Python):
        process, out, err = run(start, ["-c", f"import os, sys, time; print('begun', flush=True); {code}"], tmp_path)
        assert (process.returncode, out) == (status, "begun\n"), err
        assert err.endswith(last) and (last or not err), err


def test_only_a_fork_has_imported_torch(tmp_path):
    code = "import sys; print('torch' in sys.modules)"
    variables = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"}  # which is read before any fork
    inductor = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}  # as torch._dynamo sets it in this process, sooner or later
    options = ({}, inductor, {"fresh": True}, variables)
    found = [harness.run_python("-c", code, **one).stdout for one in options]
    assert found == ["True\n", "True\n", "False\n", "False\n"]


def test_forks_have_the_threads_that_they_are_told():
    code = "import torch; print(torch.get_num_threads())"
    assert [harness.run_python("-c", code, OMP_NUM_THREADS=n).stdout for n in ("1", "2")] == ["1\n", "2\n"]

"""What a process uses, seen from outside and per stage from inside."""

import json
import mmap
import os
import subprocess
import sys
import time
import types

import harness
import pytest
import torch

from fusedtrain import monitor
from fusedtrain.cli import main

psutil = pytest.importorskip("psutil", reason="psutil is not installed")

# Keeps a core busy, touches new memory all the time and holds 64 MiB; a child sleeps; a file of a run is open.
BUSY = """
import mmap, subprocess, sys
run = open(sys.argv[1], "w")
held = b"x" * (64 << 20)
child = subprocess.Popen(
    [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
)
child.stdout.readline()
print(child.pid, flush=True)
while True:
    with mmap.mmap(-1, 1 << 20) as fresh:
        for at in range(0, 1 << 20, 4096):
            fresh[at] = 1
"""


@pytest.fixture
def busy(tmp_path):
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", BUSY, str(tmp_path / "run" / "metrics.jsonl")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    process.child = int(process.stdout.readline())
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)


def test_a_busy_process_and_its_child_are_seen(busy):
    sampler = monitor.Sampler(busy.pid)
    time.sleep(0.5)
    sample = sampler.sample()
    first, child = sorted(sample["processes"], key=lambda p: p["pid"] != busy.pid)
    assert (first["pid"], child["pid"]) == (busy.pid, busy.child)
    assert 0.05 < first["cpu"] < 1.5 and child["cpu"] < 0.05
    assert first["rss"] > 64 * 2**20 > child["rss"] and first["minor_faults"] > 1000 > child["minor_faults"]
    machine = sample["machine"]
    assert first["cpu"] * 0.5 < machine["cpu"] <= machine["cores"] * 1.1
    assert 64 * 2**20 < machine["memory_used"] < machine["memory"]
    names = monitor.scalars(sample)
    assert names["process/cpu"] == first["cpu"] + child["cpu"] and "machine/net_sent" in names
    assert sampler.running()
    busy.kill()
    busy.wait()
    assert not sampler.running() and sampler.sample()["processes"] == []


def test_json_lines_until_the_process_ends(busy, capsys):
    assert main(["monitor", str(busy.pid), "--interval", "0.05", "--count", "3", "--json"]) == 0
    samples = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(samples) == 3 and all(sample["processes"][0]["pid"] == busy.pid for sample in samples)
    busy.kill()
    busy.wait()
    assert main(["monitor", str(busy.pid), "--json"]) == 2
    assert capsys.readouterr().err == f"fusedtrain monitor: there is no process {busy.pid}\n"


def test_a_run_is_found_by_its_folder_and_shown_in_plain_lines_off_a_terminal(busy, tmp_path, capsys, no_gpu):
    logs = tmp_path / "board"
    arguments = ["monitor", str(tmp_path / "run"), "--interval", "0.05", "--count", "2", "--tensorboard", str(logs)]
    assert main(arguments) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"watching {busy.pid} (") and first.endswith("no GPU values: pip install nvidia-ml-py")
    assert len(lines) == 2 and "2 proc  cpu " in lines[0] and " MiB  faults " in lines[0]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(logs)).Reload()
    assert len(board.Scalars("process/rss")) == 2 and board.Scalars("process/rss")[1].value > 64 * 2**20


def test_a_terminal_gets_a_table(busy, no_gpu):
    rich = pytest.importorskip("rich.console", reason="rich is not installed")
    console = rich.Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(monitor._table(monitor.Sampler(busy.pid).sample(), "run"))
    text = console.export_text()
    assert str(busy.pid) in text and str(busy.child) in text and "no GPU values" in text


class FakeNvml(types.ModuleType):
    """NVIDIA's library with two cards, the second of which cannot tell its power."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception):
        pass

    def nvmlInit(self): ...

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return f"card {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(used=3 * 2**30, total=80 * 2**30)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return types.SimpleNamespace(gpu=93)

    def nvmlDeviceGetPowerUsage(self, handle):
        if handle:
            raise self.NVMLError("not supported")
        return 312500

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return 1410

    def nvmlDeviceGetTemperature(self, handle, kind):
        return 61


def test_gpus_are_read_where_the_library_is(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("pynvml"))
    sample = monitor.Sampler(psutil.Process().pid).sample()
    first, second = sample["gpus"]
    assert first == {
        "index": 0,
        "name": "card 0",
        "utilization": 0.93,
        "memory_used": 3 * 2**30,
        "memory": 80 * 2**30,
        "power": 312.5,
        "clock": 1410,
        "temperature": 61,
    }
    assert second["power"] is None and sample["gpu_note"] is None
    assert "gpu0 93% 3.0 GiB of 80.0 GiB 312 W 1,410 MHz" in monitor.line(sample)
    assert "gpu1/power" not in monitor.scalars(sample) and monitor.scalars(sample)["gpu1/clock"] == 1410


def test_gpus_that_belong_to_others_are_left_out(monkeypatch):
    """The driver counts them, but does not give them out."""
    nvml = FakeNvml("pynvml")

    def refused(index):
        if index in others:
            raise FakeNvml.NVMLError("Insufficient Permissions")
        return index

    nvml.nvmlDeviceGetHandleByIndex = refused
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    others = {0}
    gpus, note = monitor.Gpus().read()
    assert [gpu["index"] for gpu in gpus] == [1] and note is None
    others = {0, 1}
    assert monitor.Gpus().read() == ([], "no GPU values: the driver shows none of 2")


def test_a_driver_that_is_missing_is_said(monkeypatch):
    nvml = FakeNvml("pynvml")
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(FakeNvml.NVMLError("Driver Not Loaded"))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert monitor.Gpus().read() == ([], "no GPU values: Driver Not Loaded")


def test_stages_get_what_was_used_in_them():
    usage = monitor.StageUsage()
    for _ in range(5):
        usage.enter("data")
        time.sleep(0.02)
        usage.enter("compute")
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        usage.enter("memory")
        with mmap.mmap(-1, 2**25) as fresh:  # not from malloc, which may still have it mapped
            for page in range(0, 2**25, mmap.PAGESIZE):
                fresh[page] = 1
        usage.enter("other")
    found = usage.summary()
    assert list(found) == ["data", "compute", "memory", "other"]
    assert found["data"]["seconds"] >= 0.1 and found["data"]["cpu"] < 0.5 * found["compute"]["cpu"]
    assert found["memory"]["minor_faults"] > 10 * found["compute"]["minor_faults"]


GROWS = """
import json, mmap
from fusedtrain.monitor import StageUsage
usage = StageUsage()
for stage in ("grow", "again", "other"):
    usage.enter(stage)
    with mmap.mmap(-1, 2**27) as fresh:
        for page in range(0, 2**27, mmap.PAGESIZE):
            fresh[page] = 1
print(json.dumps(usage.summary()))
"""


def test_a_stage_that_lets_the_process_grow_is_told_once():
    # a shell between: Linux counts what the process that starts another one holds as that one's peak
    command = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, GROWS]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    assert 2**26 < found["grow"]["rss_growth"] < 2**28 and found["again"]["rss_growth"] < 2**24


def test_the_log_of_a_run_holds_what_its_stages_use(tmp_path, monkeypatch, no_gpu):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from fusedtrain.train import Batches, InputError, Logging, TrainConfig, Trainer

    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = Batches(torch.rand(12, 8), torch.randint(4, (12,)), 4, shuffle=False)
    logging = Logging(tmp_path, loggers=("jsonl", "tensorboard"), log_every=2, log_usage=True)
    config = TrainConfig(epochs=2, device="cpu", logging=logging)
    Trainer(model, torch.nn.CrossEntropyLoss(), optimizer, config).fit(batches)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [2, 4, 6]
    for line in steps:
        assert {f"stage/{name}/cpu" for name in ("data", "forward", "backward", "optimizer")} <= line.keys()
        assert line["process/rss"] > 2**20 and line["stage/forward/seconds"] > 0 and "machine/net_sent" in line
    assert "stage/checkpoint/cpu" in steps[1] and "stage/checkpoint/cpu" not in steps[2], "since the line before"
    board = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in board.Scalars("stage/backward/minor_faults")] == [2, 4, 6]
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(InputError, match="log_usage needs the package psutil: pip install psutil"):
        Logging(log_usage=True)


def test_a_run_that_keeps_no_file_open_is_found_by_its_arguments(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    code = "import sys; print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": tmp_path}
    ways = [["--output=run"], ["--output", str(folder)]]
    children = [subprocess.Popen([sys.executable, "-c", code, *way], **pipes) for way in ways]
    (tmp_path / "loop").symlink_to("loop")  # what another process was started with must not matter
    others = [subprocess.Popen([sys.executable, "-c", code, *way], **pipes) for way in (["monitor", "run"], ["loop"])]
    try:
        for child in (*children, *others):
            child.stdout.readline()
        for child in children:
            assert monitor.find(str(folder)) == child.pid  # the older one first
            child.kill()
            child.wait()
        with pytest.raises(monitor.MonitorError, match="was started with it"):
            monitor.find(str(folder))
    finally:
        for child in (*children, *others):
            child.kill()
            child.wait()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["²"], "² is neither a process number nor the folder of a run"),
        (["none"], "none is neither a process number nor the folder of a run"),
        (["."], "no process has a file open in . or was started with it: is the run over?"),
        (["1", "--interval", "0"], "--interval must be a positive number of seconds, and --count at least 1"),
        (["1", "--interval", "inf"], "--interval must be a positive number of seconds, and --count at least 1"),
        (["1", "--interval", "nan"], "--interval must be a positive number of seconds, and --count at least 1"),
        (["1", "--count", "0"], "--interval must be a positive number of seconds, and --count at least 1"),
    ],
)
def test_what_cannot_be_watched_is_said_in_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["monitor", *arguments]) == 2
    assert capsys.readouterr().err == f"fusedtrain monitor: {message}\n"


def test_children_that_have_ended_are_forgotten():
    sampler = monitor.Sampler(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    sampler.sample()
    assert child.pid in sampler._last
    child.communicate()
    sampler.sample()
    assert child.pid not in sampler._last


def test_a_process_that_ends_before_the_first_line_is_no_error(monkeypatch, capsys, no_gpu):
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    read = monitor.Gpus.read

    def ending(self):
        child.communicate()
        return read(self)

    monkeypatch.setattr(monitor.Gpus, "read", ending)  # the last that a reading asks for
    assert main(["monitor", str(child.pid), "--interval", "0.01"]) == 0
    assert f"watching {child.pid} (" in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_is_said_in_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["monitor", str(os.getpid()), "--count", "1", "--tensorboard", str(tmp_path / "file" / "board")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("fusedtrain monitor: ") and "board" in err and err.count("\n") == 1


def test_without_psutil_it_names_the_extra():
    code = "import sys; sys.modules['psutil'] = None; from fusedtrain.cli import main; sys.exit(main(['monitor', '1']))"
    done = harness.run_python("-c", code)
    assert done.returncode == 1 and done.stderr == (
        "fusedtrain monitor: needs the package psutil, which is not installed: pip install 'fusedtrain[data]'\n"
    )

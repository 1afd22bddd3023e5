"""Whole diagnoses: what is said of a training in this process, of scripts in theirs, and of several processes.

All scripts with planted faults are judged by ``benchmarks/planted.py``; the faults here have effects so large that a
loaded machine cannot hide them.
"""

import ast
import copy
import functools
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import forked
import harness
import pytest
import torch
from test_diagnose import (  # noqa: F401 (the fixtures count for these tests too)
    Net,
    scripts_are_forks,
    step_of,
    what_stands_here_stays,
    what_takes_long_is_not_tried,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fusedtrain
from fusedtrain import _info
from fusedtrain.diagnose import html, measure, rules, runner, script, verify
from fusedtrain.diagnose import report as report_text
from fusedtrain.diagnose.drive import Driver, Finished
from fusedtrain.diagnose.instrument import Instrument
from fusedtrain.diagnose.machine import gpu_settings, machine
from fusedtrain.diagnose.plan import Run
from fusedtrain.diagnose.rules import computing
from fusedtrain.diagnose.rules.finding import count_text, duration_text

ROOT = Path(__file__).parents[1]
PLANTED = sorted((ROOT / "benchmarks" / "planted").glob("*.py"))


class SlowReader(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        time.sleep(0.003)
        return torch.full((3, 8, 8), index / 256), index % 10


@pytest.fixture(scope="module")
def slow_reader():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    start = copy.deepcopy(model.state_dict())
    step = step_of(model, optimizer)

    def on_a_device(batch):
        step(batch)
        time.sleep(0.01)  # computing elsewhere: a busy machine does not change it, and few workers can follow

    report = fusedtrain.diagnose(on_a_device, DataLoader(SlowReader(), 4), steps=10, verify=True)
    return report, model, start


def test_waiting_for_storage_is_named_and_cured_by_workers(slow_reader):
    report, _, _ = slow_reader
    assert report["bottleneck"] == "loader"
    first = report["findings"][0]
    assert "mostly waiting" in first["cause"] and first["lines"][0]["text"] == "time.sleep(0.003)"
    kept = [v for v in report["verified"] if v["accepted"]]
    assert kept[0]["remedy"].startswith("loader(num_workers=") and kept[0]["measured_gain"]["low"] > 0
    assert kept[0]["losses"]["hold"] and kept[0]["losses"]["difference"] == 0, "workers change no bit"
    assert report["combined"]["gain"]["low"] > 0


def test_a_larger_batch_is_held_against_its_memory(slow_reader):
    report, _, _ = slow_reader
    said = report["checked"].get("batch_size") or next(
        f["evidence"] for f in report["findings"] if f["rule"] == "batch_size"
    )
    assert re.search(r"for 4 times the batch; a step needs [\d,]+ and [\d,]+ MiB", said)


def test_the_model_is_put_back(slow_reader):
    _, model, start = slow_reader
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, start[name])}
    one_step = Net()
    one_step.load_state_dict(start)
    optimizer = torch.optim.SGD(one_step.parameters(), lr=0.01, momentum=0.9, fused=True)
    step_of(one_step, optimizer)(next(iter(DataLoader(SlowReader(), 4))))
    assert moved and all(torch.equal(a, b) for a, b in zip(model.parameters(), one_step.parameters()))
    assert not model._forward_hooks and not model._forward_pre_hooks


class Page(HTMLParser):
    VOID = ("meta",)

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.outside = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.outside += [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_report_is_shown_in_any_encoding(slow_reader, tmp_path, monkeypatch):
    from fusedtrain.diagnose import command

    (tmp_path / "train.py").touch()
    monkeypatch.setattr(command, "diagnose_script", lambda *args, **options: {**slow_reader[0], "traceback": ""})
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    assert command.main([str(tmp_path / "train.py")]) == 0
    sys.stdout.flush()
    assert b"loader" in sys.stdout.buffer.getvalue() and b" ???" in sys.stdout.buffer.getvalue()


def test_the_page_is_whole_and_fetches_nothing(slow_reader):
    report, _, _ = slow_reader
    text = html.page(report)
    page = Page()
    page.feed(text)
    assert page.open == [] and page.outside == [] and "url(" not in text and "script" not in page.seen
    assert page.seen.count("svg") >= 4 and page.seen.count("h1") == 1
    assert all(text.count(f"<{tag}") for tag in ("rect", "table", "details"))


def colour(text):
    return tuple(int(text[i : i + 2], 16) for i in (1, 3, 5))


def test_a_browser_draws_the_page(slow_reader, tmp_path):
    report, _, _ = slow_reader
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("there is no Chromium or Chrome")
    Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    (tmp_path / "page.html").write_text(html.page(report))
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1000,2400")
    folders = (f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={tmp_path / 'page.png'}")
    command = [browser, *options, *folders, (tmp_path / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (tmp_path / "page.png").exists(), done.stderr[-2000:]
    image = Image.open(tmp_path / "page.png").convert("RGB")
    colours = {part: colour(html.COLOURS[part]) for part in html.COLOURS}

    def drawn(y):  # pixels of each part in one row
        row = [image.getpixel((x, y)) for x in range(image.width)]
        return {part: row.count(rgb) for part, rgb in colours.items()}

    bar = next(found for found in map(drawn, range(image.height)) if sum(found.values()) > 0.6 * image.width)
    width, total = sum(bar.values()), report["step_ms"]["value"]
    for part, ms in report["parts_ms"].items():
        assert abs(bar[part] / width - ms / total) < 0.02, (part, bar, report["parts_ms"])


def test_the_report_is_plain_json(slow_reader, capsys):
    report, _, _ = slow_reader
    assert json.loads(json.dumps(report)) == report
    report.show()
    out = capsys.readouterr().out
    assert "waits for the data loader" in out and "num_workers" in out and "All together" in out
    assert "between passes over its data, such as evaluating and saving, was not looked at" in out
    found, info = report["machine"], _info.collect()
    assert {name: found[name] for name in info["cpu"]} == info["cpu"] | {"cores": measure.cores(), "threads": 1}
    assert found["allocator"].items() <= info["allocator"].items() and found["environment"] == info["environment"]
    assert found["gpu"] is None or found["gpu"]["name"] == found["device"]
    assert f"torch's for {found['torch_isa']}, 1 thread on" in out
    page = html.page(report)
    assert html.escape(report_text.machine_text(found)) in page and "<td>torch_isa</td>" in page


@pytest.mark.parametrize("tf32", [True, False])
def test_of_a_gpu_it_is_said_how_it_multiplies(tf32, monkeypatch, request):
    matmul = torch.backends.cuda.matmul
    request.addfinalizer(functools.partial(setattr, matmul, "fp32_precision", matmul.fp32_precision))
    matmul.fp32_precision = "tf32" if tf32 else "ieee"
    of_a_gpu = {"name": "A GPU", "capability": "9.0", "memory_gib": 80.0}
    monkeypatch.setattr(_info, "gpu", lambda index: of_a_gpu)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", tf32)
    settings = gpu_settings(0)
    assert settings == of_a_gpu | {
        **{"tf32_matmul": tf32, "tf32_cudnn": torch.backends.cudnn.conv.fp32_precision == "tf32"},
        **{"cudnn_benchmark": tf32, "allocator": "native"},
    }
    said = report_text.machine_text(machine() | {"gpu": settings})
    on = "on" if tf32 else "off"
    assert said.startswith(f"A GPU, compute capability 9.0, 80.0 GiB, TF32 {on} for matmuls and ")
    assert f"cudnn.benchmark {on}; " in said and said.endswith(f"torch {torch.__version__}")


def test_a_trainer_is_diagnosed_through_its_fit(monkeypatch):
    from fusedtrain.train import Batches, TrainConfig, Trainer

    torch.manual_seed(0)
    images, targets = torch.rand(16, 3, 8, 8), torch.randint(10, (16,))
    model = Net()
    monkeypatch.setattr(measure, "PAIRS", 1)
    monkeypatch.setattr(verify, "PAIRS", 1)
    trainer = Trainer(
        model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()), TrainConfig(epochs=1, device="cpu")
    )
    data = Batches(images, targets, 4, shuffle=True)
    report = fusedtrain.diagnose(trainer, data, Batches(images, targets, 16, shuffle=False), steps=10)
    assert report["steps"] == 10 and report["parts_ms"]["backward"] > 0 and report["parts_ms"]["optimizer"] > 0


TWO_RANKS = """
import gc, json, sys, time, torch
from torch import distributed as dist, nn
import fusedtrain
from fusedtrain.diagnose import measure, remedies, verify
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

def slow(state, bucket):
    time.sleep(0.02)  # the network
    return allreduce_hook(state, bucket)

gc.freeze()  # as for scripts
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
measure.BLOCK, measure.SAMPLING, measure.LOADING, measure.PAIRS, verify.PAIRS = 0.03, 0.1, 0.1, 2, 2
remedies.Compile.why_not = lambda driver: "not in this test"
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 4), find_unused_parameters=True)
model.register_comm_hook(None, slow)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def step(batch):
    rows, targets = batch
    time.sleep(0.002 + 0.004 * rank)  # nothing that they measure is the same
    loss = nn.functional.cross_entropy(model(rows), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

rows = torch.rand(32, 64, generator=torch.Generator().manual_seed(rank))
data = torch.utils.data.TensorDataset(rows, torch.randint(4, (32,)))
report = fusedtrain.diagnose(step, torch.utils.data.DataLoader(data, 8), steps=10, verify=True)
weights = [p.tolist() for p in model.parameters()]
print(json.dumps([report["findings"], report["verified"], weights]), flush=True)
dist.destroy_process_group()
"""


def test_processes_that_wait_for_each_others_gradients_are_told_the_same(tmp_path):
    arguments = [("-c", TWO_RANKS, str(rank), str(tmp_path / "store")) for rank in range(2)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    children = [harness.start_python(*a, pipes=pipes, OMP_NUM_THREADS="1") for a in arguments]
    outputs = [child.communicate(timeout=300) for child in children]
    assert all(child.returncode == 0 for child in children), outputs
    (findings, verified, weights), other = (json.loads(out.splitlines()[-1]) for out, _ in outputs)
    assert [findings, verified, weights] == other
    (found,) = (finding for finding in findings if finding["rule"] == "communication")
    assert found["predicted_gain"] > 0.5 and "between 2 processes" in found["evidence"]
    (remedy,) = found["remedies"]
    assert "gradient_as_bucket_view=True, find_unused_parameters=False" in remedy["name"]


STALLS = """
import time, torch
from fusedtrain.diagnose import measure, verify  # the test's patience
measure.BLOCK, measure.SAMPLING, measure.LOADING, measure.PAIRS, verify.PAIRS = 0.03, 0.2, 0.2, 2, 4
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.rand(64, 4), torch.randint(2, (64,)))
while True:
    for rows, targets in DataLoader(data, 16):
        loss = torch.nn.functional.cross_entropy(model(rows), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)  # the logger
"""


SHORT = """
import sys, time, torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with open(sys.argv[1], "a") as file:
    file.write("started ")
for _ in range(60):
    model(torch.rand(16, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.004)  # the logger
"""


WRITES = """
import atexit, csv, gc, sys, torch
from fusedtrain.diagnose import measure, verify  # the test's patience
measure.BLOCK, measure.SAMPLING, measure.PAIRS, verify.PAIRS = 0.01, 0.1, 2, 2
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
table = csv.writer(open(sys.argv[1] + "/log.csv", "w"))
atexit.register(lambda: open(sys.argv[1] + "/end", "w").write("said"))
step = 0
try:
    while True:
        model(torch.rand(16, 4)).sum().backward()
        optimizer.step()
        step += 1
        table.writerow([step])
        print(step)
finally:
    open(sys.argv[1] + "/steps", "w").write(str(step))
"""


# Objects that raise when others look at them.
ODD = """
import io, weakref
dead = weakref.proxy(set())
hidden = (lambda proxy: lambda: proxy)(dead)
class Failing(io.TextIOWrapper):
    def flush(self):
        raise RuntimeError("it does not flush")
failing = Failing(io.BytesIO())
class Odd:
    def __repr__(self):
        raise RuntimeError("it has no name")
odd = {Odd(): [0]}
"""


@pytest.mark.parametrize("freezes", [False, True])
def test_what_a_script_has_written_is_on_the_disk(tmp_path, monkeypatch, freezes):
    monkeypatch.chdir(tmp_path)  # where the installed package is found, not the sources
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    train = tmp_path / "train.py"
    train.write_text(ODD + (WRITES.replace("step = 0", "gc.freeze(); step = 0") if freezes else WRITES))
    task = {"script": str(train), "arguments": [str(tmp_path)], "steps": 20, "verify": False, "do": "diagnose"}
    messages = []
    log = script._run(task, {}, messages)
    report = next(message["report"] for message in reversed(messages) if "report" in message)
    assert report["examined"] and (tmp_path / "end").read_text() == "said"
    steps = (tmp_path / "steps").read_text()
    assert steps == (tmp_path / "log.csv").read_text().split()[-1] == log.split()[-1]
    assert "Warning" not in log  # of torch, because one of its objects was looked at


def test_a_script_that_ends_soon_is_started_again_until_all_is_measured(tmp_path, monkeypatch):
    train, log, told = tmp_path / "train.py", tmp_path / "starts", tmp_path / "told"
    train.write_text(SHORT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [])
    task = {"script": str(train), "arguments": [str(log)], "steps": 20, "verify": False, "do": "diagnose"}
    task |= {"output": str(told)}
    runner.Task(task).run(lambda: runner.run_script(task))
    messages = list(map(json.loads, told.read_text().splitlines()))
    report = next(message["report"] for message in reversed(messages) if "report" in message)
    assert report["bottleneck"] == "own_code" and report["steps"] == 20 and not report["failure"]
    assert report["findings"][0]["lines"][0]["text"] == "time.sleep(0.004)  # the logger"
    again = sum("starting it again" in message.get("stage", "") for message in messages)
    assert len(log.read_text().split()) == again + 1 > 2 and not any("ended" in message for message in messages)


def test_of_a_script_that_cannot_be_started_again_it_is_said_why_it_fails(tmp_path):
    (tmp_path / "registry.py").write_text(
        "known = set()\ndef add(name):\n    name in known and {}[name]; known.add(name)\n"
    )
    (tmp_path / "train.py").write_text("import registry\nregistry.add('net')\n" + SHORT)
    report = script.diagnose_script(str(tmp_path / "train.py"), [str(tmp_path / "starts")])
    said = "failed before all was measured, when it was started again in the same process to measure more: let it train"
    assert report["failure"] == f"the script {said} longer: KeyError: 'net'" and not report["examined"]


def test_of_processes_that_end_early_it_is_said_what_was_measured(tmp_path, monkeypatch):
    train = tmp_path / "train.py"
    train.write_text(SHORT)
    monkeypatch.setenv("WORLD_SIZE", "2")  # with others a script is not started again
    report = script.diagnose_script(str(train), [str(tmp_path / "starts")], verify=True)
    assert not report["examined"] and report["bottleneck"] is None and not report["findings"]
    assert report["failure"] == "the script ended before all was measured"
    assert report["parts_ms"]["rest"] > 4 and "goes to: rest" in report_text.headline(report)
    page = html.page(report)
    assert "ended after" in page and "lead well" not in page and "not looked for" in page and "None." not in page


FIXED_BATCH = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from fusedtrain.diagnose import measure, verify
measure.BLOCK, measure.SAMPLING, measure.LOADING, measure.PAIRS, verify.PAIRS = 0.01, 0.1, 0.1, 2, 2
model, carried = torch.nn.Linear(64, 64), torch.zeros(16, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    for (x,) in DataLoader(TensorDataset(torch.rand(64, 64)), 16):
        optimizer.zero_grad()
        (model(x) + carried).square().sum().backward()
        optimizer.step()
"""


def test_of_a_loop_that_fails_with_a_larger_batch_all_is_told_on_the_page(tmp_path):
    (tmp_path / "train.py").write_text(FIXED_BATCH)
    report = script.diagnose_script(str(tmp_path / "train.py"), [], steps=10)
    assert report["failure"].startswith("the loop fails with a larger batch: RuntimeError: The size of tensor a (64)")
    assert report["checked"]["batch_size"] == "not measured: the loop fails with a larger batch"
    assert escape(report["failure"]) in html.page(report)
    text = escape(report["lines"][0]["text"])
    assert text in html.page(report | {"bottleneck": None, "findings": []})


def test_of_a_process_that_dies_it_is_told_what_was_measured_and_how_it_ended(tmp_path, capsys):
    from fusedtrain.cli import main

    died, kill = "its process was killed by SIGKILL", "__import__('os').kill(__import__('os').getpid(), 9)"
    (tmp_path / "train.py").write_text(FIXED_BATCH.replace("optimizer.zero_grad()", f"len(x) > 16 and {kill}"))
    report = script.diagnose_script(str(tmp_path / "train.py"), [], steps=10)
    assert report["examined"] and report["failure"] == f"the loop fails with a larger batch: {died}"
    leave = "__import__('os')._exit(0)"
    (tmp_path / "train.py").write_text(FIXED_BATCH.replace("optimizer.zero_grad()", f"len(x) > 16 and {leave}"))
    report = script.diagnose_script(str(tmp_path / "train.py"), [], steps=10)
    left = "its process ended with exit code 0"
    assert report["examined"] and report["failure"] == f"the loop fails with a larger batch: {left}"
    # A remedy is tried when there is a report already.
    (tmp_path / "train.py").write_text(FIXED_BATCH.replace("\nmodel,", f"\nverify.judge = lambda *_: {kill}\nmodel,"))
    assert main(["diagnose", "--json", "--verify", "--steps", "10", str(tmp_path / "train.py")]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["failure"] == f"the script failed before all was measured: {died}"
    assert told.err.startswith(f"fusedtrain diagnose: the script failed:\n{died}; the end of its output:\n")


def test_the_package_that_measures_is_the_one_that_was_called(tmp_path, monkeypatch):
    (tmp_path / "fusedtrain").mkdir()
    (tmp_path / "fusedtrain" / "__init__.py").write_text("raise ImportError('the source tree, which is not built')")
    (tmp_path / "train.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(script.ScriptError, match="the script exited: it ran"):
        script.diagnose_script("train.py", [])


@pytest.mark.parametrize("early", [True, False])
def test_a_number_of_threads_that_a_script_says_before_it_imports_torch_counts(tmp_path, early):
    lines = ["import os; os.environ['OMP_NUM_THREADS'] = os.environ['MKL_NUM_THREADS'] = '7'", "import torch"]
    lines = [*(lines if early else reversed(lines)), "import torch.nn", "raise SystemExit(torch.get_num_threads())"]
    (tmp_path / "train.py").write_text("\n".join(lines))
    with pytest.raises(script.ScriptError, match="the script exited with " + (r"7\b" if early else "[^7]")):
        script.diagnose_script(str(tmp_path / "train.py"), [])


COUNTS_ON_PASSES = """
import time, torch
from torch.utils.data import DataLoader, TensorDataset
from fusedtrain.diagnose import measure, verify
measure.BLOCK, measure.SAMPLING, measure.LOADING, measure.PAIRS, verify.PAIRS = 0.01, 0.1, 0.1, 2, 2
data = TensorDataset(torch.rand(48, 64))
model, make = torch.nn.Linear(64, 64), lambda: DataLoader(data, 4, shuffle=True)
optimizer, loader, held_out = torch.optim.SGD(model.parameters(), lr=0.1), make(), DataLoader(data, 16)
while True:
    losses = torch.zeros(12)
    for i, (x,) in enumerate(LOADER):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        losses[i] = loss.item()
    assert i == 11
    model.eval()
    with torch.no_grad():
        assert len([model(x) for (x,) in held_out]) == 3 and len([model(x) for (x,) in loader]) == 12
    model.train()
    time.sleep(0.02)  # saving
"""


@pytest.mark.parametrize("made", ["loader", "make()"])
def test_a_loop_that_counts_on_the_length_of_a_pass_gets_passes_of_that_length(tmp_path, made):
    (tmp_path / "train.py").write_text(COUNTS_ON_PASSES.replace("LOADER", made))
    report = script.diagnose_script(str(tmp_path / "train.py"), [], steps=20)
    assert report["examined"] and not report["failure"]
    assert report["passes"]["batches"] == 12 and report["passes"]["between_ms"] > 20 > 12 * report["parts_ms"]["rest"]
    assert not any("# saving" in line["text"] for line in report["lines"])
    said = "Between passes over its data of 12 steps the script takes"
    assert said in report_text.passes_text(report) and said in html.page(report)


def test_of_processes_that_count_on_the_length_of_a_pass_it_is_said_why_they_fail(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(COUNTS_ON_PASSES.replace("LOADER", "loader"))
    monkeypatch.setenv("WORLD_SIZE", "2")  # with others a script is not started again
    report = script.diagnose_script(str(tmp_path / "train.py"), [])
    assert "goes on beyond the loader's length while it is measured: IndexError: index 12" in report["failure"]


def test_a_script_that_fails_beyond_a_pass_of_its_own_accord_fails_all_the_same(tmp_path):
    text = COUNTS_ON_PASSES.replace("LOADER", "loader").replace("data =", "steps = 0; data =", 1)
    text = text.replace("losses[i] = loss.item()", "steps += 1; 1 / (steps < 40)")
    (tmp_path / "train.py").write_text(text)
    report = script.diagnose_script(str(tmp_path / "train.py"), [])
    assert report["failure"] == "the script failed before all was measured: ZeroDivisionError: division by zero"


def test_a_module_is_diagnosed_like_a_script(tmp_path, monkeypatch, capsys):
    from fusedtrain.cli import main

    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "model.py").write_text("import torch\nmodel = torch.nn.Linear(4, 2)\n")
    (tmp_path / "package" / "train.py").write_text(f"from .model import model as own\n{WRITES}")
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", "--json", "--steps", "20", "-m", "package.train", "."]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["script"] == "package.train" and report["steps"] == 20
    assert (tmp_path / "steps").exists()
    assert main(["diagnose", "-m", "package.none"]) == 1
    assert "No module named package.none" in capsys.readouterr().err


def test_a_script_whose_logger_stalls_is_diagnosed_unchanged(tmp_path, capsys, monkeypatch):
    from fusedtrain.cli import main

    train = tmp_path / "train.py"
    train.write_text(STALLS)
    monkeypatch.setenv("OMP_NUM_THREADS", str(measure.cores()))
    assert main(["diagnose", "--json", "--steps", "20", "--html", str(tmp_path / "page.html"), str(train)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bottleneck"] == "own_code", report["findings"]
    assert report["findings"][0]["lines"][0]["text"] == "time.sleep(0.02)  # the logger"
    assert all(finding["predicted_gain"] <= 1 for finding in report["findings"])
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")


REPLACED = """
import gc, sys
sys.path.insert(0, sys.argv[1])  # where the tests are
import torch
from fusedtrain.diagnose import measure, remedies, verify  # the test's patience
measure.BLOCK, measure.SAMPLING, measure.LOADING, measure.PAIRS, verify.PAIRS = 0.03, 0.1, 0.2, 2, 8
remedies.Compile.why_not = staticmethod(lambda driver: "not in this test")
from zoo import Zoo
Zoo()
import timm.optim as from_timm
gc.freeze()  # the passes of the garbage collector need not look at it
torch.manual_seed(0)
first, last = ([torch.nn.Linear(8, 8) for _ in range(20)] for _ in range(2))
model = torch.nn.Sequential(*first, *last)
first, last = ([p for layer in layers for p in layer.parameters()] for layers in (first, last))
one = torch.optim.RMSprop(first, lr=1e-5, foreach=False)
other = from_timm.Lamb(last, lr=1e-5, foreach=False)
loader = torch.utils.data.DataLoader(torch.rand(64, 8), 4)
while True:
    for rows in loader:
        one.zero_grad()
        other.zero_grad()
        model(rows).square().sum().backward()
        one.step()
        other.step()
"""


def test_optimizers_that_torch_has_not_fused_are_replaced_by_ours(zoo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the installed package is found, not the sources
    train = tmp_path / "train.py"
    train.write_text(REPLACED)
    for _ in range(3):  # where other processes take the cores, two pairs of trials may not show any gain
        report = script.diagnose_script(str(train), [str(ROOT / "tests")], steps=10, verify=True, fresh=False)
        found = [finding for finding in report["findings"] if finding["rule"] == "optimizer"]
        if found:
            break
    assert len(found) == 1, {name: report[name] for name in ("findings", "checked", "verified", "noise", "failure")}
    ((remedy,),) = (finding["remedies"] for finding in found)
    assert {change["before"]: change["after"] for change in remedy["changes"]} == {
        "torch.optim.RMSprop(first, lr=1e-5, foreach=False)": "fusedtrain.optim.RMSprop(first, lr=1e-5, foreach=False)",
        "from_timm.Lamb(last, lr=1e-5, foreach=False)": "fusedtrain.optim.Lamb(last, lr=1e-5, foreach=False)",
    }
    (verdict,) = [verdict for verdict in report["verified"] if verdict["remedy"] == "fusedtrain.optim"]
    assert verdict["accepted"] and verdict["losses"]["hold"], verdict
    assert {"remedy": "FusedOptimizer", "arguments": {"ours": True}} in report["accepted"]


MADE_OF_LISTS = """
import torch
from fusedtrain.diagnose import measure  # the test's patience
measure.BLOCK, measure.SAMPLING, measure.LOADING, measure.PAIRS = 0.03, 0.2, 0.2, 2
model = torch.nn.Linear(8, 4)
optimizer, table = torch.optim.SGD(model.parameters(), lr=0.01, fused=True), [[0.5] * 64] * 256
loader = torch.utils.data.DataLoader(torch.rand(64, 8), 4)
while True:
    for rows in loader:
        weights = torch.tensor(table)
        optimizer.zero_grad()
        model(rows * weights.mean()).square().sum().backward()
        optimizer.step()
"""


def test_tensors_made_of_lists_are_named_with_their_line(tmp_path):
    (tmp_path / "train.py").write_text(MADE_OF_LISTS)
    report = script.diagnose_script(str(tmp_path / "train.py"), [], steps=10)
    assert report["bottleneck"] == "host_tensors", report["findings"]
    first = report["findings"][0]
    assert first["lines"][0]["text"] == "weights = torch.tensor(table)" and "array from the start" in first["advice"]


SPAWNS = """
import torch
from fusedtrain.diagnose import measure
measure.BLOCK, measure.SAMPLING, measure.PAIRS = 0.03, 0.1, 2

def train(rank, size):
    model = torch.nn.Linear(size, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        optimizer.zero_grad()
        model(torch.rand(8, size)).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    torch.multiprocessing.spawn(train, (64,), nprocs=1)
"""


def test_a_process_that_a_script_spawns_is_diagnosed(tmp_path):
    train = tmp_path / "train.py"
    train.write_text(SPAWNS)
    report = script.diagnose_script(str(train), [], steps=10)
    assert report["steps"] == 10 and report["parts_ms"]["backward"] > 0 and not report["failure"]


CATCHES_ALL = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
model, loader = torch.nn.Linear(4, 2), DataLoader(TensorDataset(torch.rand(64, 4)), 4)
optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.1), iter(loader)
for _ in range(5000):
    try:
        (x,) = next(batches)
    except:
        batches = iter(loader)
        continue
    model(x).sum().backward()
    optimizer.step()
open(sys.argv[1], "w")
"""


def test_a_script_that_catches_everything_ends_when_all_is_measured(tmp_path):
    (tmp_path / "train.py").write_text(CATCHES_ALL)
    task = {"script": str(tmp_path / "train.py"), "arguments": [str(tmp_path / "end")], "do": "time", "remedies": []}
    messages = []
    script._run(task, {}, messages)
    assert [*messages[0]] == ["seconds", "own", "losses"] and not (tmp_path / "end").exists()


ENDLESS = """
import os, sys, time, torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print(os.getpid(), file=open(sys.argv[1], "w"))
while True:
    model(torch.rand(16, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(3)  # measuring it takes longer than anybody waits
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_command_that_is_ended_ends_its_script(tmp_path, number, status):
    (tmp_path / "train.py").write_text(ENDLESS)
    (tmp_path / "temporary").mkdir()
    told, command = tmp_path / "told", ["-m", "fusedtrain", "diagnose", "train.py", "told"]
    options = {"cwd": tmp_path, "env": harness.environment(TMPDIR=str(tmp_path / "temporary"))}
    with forked.Python([sys.executable, *command], stderr=subprocess.PIPE, text=True, **options) as process:
        until(lambda: told.exists() and told.read_text().endswith("\n"))
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    until(lambda: not os.path.exists(f"/proc/{told.read_text().strip()}"))
    assert process.returncode == status
    if number == signal.SIGTERM:
        assert "SIGTERM ended it before all was measured" in said and not list((tmp_path / "temporary").iterdir())


def until(happened, seconds=60):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_of_a_script_that_is_ended_it_is_told_what_was_measured(tmp_path):
    (tmp_path / "train.py").write_text(FIXED_BATCH)

    def stage(text):
        if text == "larger batches":
            raise script.Terminated

    report = script.diagnose_script(str(tmp_path / "train.py"), [], steps=10, stage=stage)
    assert report["examined"] and report["failure"] == script.TERMINATED and not report["traceback"]


@pytest.mark.parametrize(("faster", "kept"), [(0.5, True), (1.0, False)])
def test_the_allocator_is_kept_only_if_fresh_processes_are_faster(monkeypatch, faster, kept):
    finding = {
        "rule": "allocator",
        "predicted_gain": 0.4,
        "remedies": [{"name": "allocator", "class": "bitwise", "how": ""}],
    }
    report = {"accepted": [], "findings": [finding], "verified": []}
    tried = []

    def fresh(task, arms):
        tried.append(arms)
        return [(1.0, 1.1, 0.9), (faster, faster * 1.1, faster * 0.9)], [[2.0, 1.5]] * 6

    monkeypatch.setattr(script, "_fresh", fresh)
    script._verify_outside({}, report)
    (verdict,) = report["verified"]
    assert verdict["accepted"] is kept and verdict["losses"]["hold"]
    assert tried == [[[], [script.ALLOCATOR]]] and report["accepted"] == [script.ALLOCATOR] * kept
    assert ("fresh" in report) is kept


@pytest.mark.parametrize(("after", "kept"), [((1.2, 1.0, 0.9), False), ((1.2, 0.9, 0.8), True)])
def test_what_is_no_faster_in_fresh_processes_is_taken_back(monkeypatch, after, kept):
    report = {"accepted": [{"remedy": "Fuse"}], "findings": [], "verified": [{"remedy": "fuse", "accepted": True}]}
    monkeypatch.setattr(script, "_fresh", lambda task, arms: ([(1.0, 1.1, 0.9), after], []))
    script._verify_outside({}, report)
    (verdict,) = report["verified"]
    assert verdict["accepted"] is kept and report["accepted"] == [{"remedy": "Fuse"}] * kept
    assert kept or "no faster in fresh processes" in verdict["reason"]


def test_what_is_counted_may_be_one(monkeypatch):
    assert [count_text(n, "step") for n in (0, 1, 2, 0.6, 1234.5)] == [
        *("0 steps", "1 step", "2 steps", "1 step", "1,234 steps")
    ]
    assert duration_text(1.2) == "1 second"
    monkeypatch.setattr(computing, "cores", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert computing.threads(None, None) == "1 thread on 1 core"
    rate, timeline = {"workers": 1, "batches_per_second": 2.0}, [[["forward", 0.0, 1.0], ["step", 0.0, 2.0]]]
    assert "1 worker (now)" in html._rates({"loader_rates": [rate], "current_workers": 1})
    assert "1 step, one per line" in html._timeline(timeline)
    report = {"examined": False, "steps": 1, "bare_steps": 0, "parts_ms": {"rest": 1.0}, "failure": report_text.ENDED}
    assert report_text.headline(report).startswith("The script ended after 1 measured step; ")


def test_of_a_script_that_failed_nobody_says_that_it_should_train_longer():
    report = {"examined": False, "steps": 9, "bare_steps": 0, "parts_ms": {"rest": 1.0}}
    report["failure"] = "the script failed before all was measured: ValueError: no"
    said = "The script failed before all was measured: ValueError: no. 100% of a step goes to: rest."
    assert report_text.headline(report) == said


FAILING = """
import torch

weight = torch.ones(64, 64, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
for step in range(100):
    optimizer.zero_grad()
    (weight @ weight).sum().backward()
    optimizer.step()
    if step == 40:
        {}["the label"]
"""


def test_of_a_script_that_fails_amid_training_all_is_told(tmp_path, capsys):
    from fusedtrain.cli import main

    path = tmp_path / "train.py"
    path.write_text(FAILING)
    assert main(["diagnose", "--json", str(path)]) == 1
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert report["failure"] == "the script failed before all was measured: KeyError: 'the label'"
    assert told.err.startswith("fusedtrain diagnose: the script failed:\nTraceback")
    assert 'train.py", line 11' in told.err


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", "ZeroDivisionError"),
        (
            "import multiprocessing as m; p = m.get_context('fork').Process(target=print); p.start(); p.join()",
            "no training loop was recognised: .* It started 1 more, which are not watched",
        ),
        (
            "import threading, torch as t; w = t.ones(2, requires_grad=True); w.grad = w.detach();"
            " t = threading.Thread(target=t.optim.SGD([w]).step); t.start(); t.join()",
            "an optimizer took a step in another thread .* only that one is watched",
        ),
        (
            "import os, torch.multiprocessing as m;"
            " m.start_processes(lambda rank: os.kill(os.getpid(), 9), start_method='fork')",
            "the script failed:(.|\\n)*process 0 terminated with signal SIGKILL",
        ),
        ("import os; os.kill(os.getpid(), 9)", "the script failed: its process was killed by SIGKILL; the end of its"),
        (
            "import torch as t; w = t.ones(2, requires_grad=True); o = t.optim.SGD([w]); w.sum().backward(); o.step()",
            "ended before enough steps were measured: it took (0 steps|1 step), and",
        ),
    ],
)
def test_a_script_that_cannot_be_diagnosed_says_why(tmp_path, code, message):
    path = tmp_path / "train.py"
    path.write_text(code)
    with pytest.raises(script.ScriptError, match=message):
        script.diagnose_script(str(path), [])


def test_bad_arguments_are_refused_before_anything_runs(tmp_path, capsys):
    from fusedtrain.cli import main

    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('ran')")
    for arguments, message in (
        (["--steps", "5", str(path)], "steps must be at least 10, got 5"),
        (["nowhere.py"], "there is no file nowhere.py"),
        (["--html", str(tmp_path / "no" / "page.html"), str(path)], "there is no folder"),
        (["--html", str(tmp_path), str(path)], f"no page can be written to {tmp_path}"),
    ):
        assert main(["diagnose", *arguments]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(TypeError, match="must be a function of a batch or have fit"):
        fusedtrain.diagnose(3, [])
    with pytest.raises(ValueError, match="steps must be at least 10, got 9"):
        fusedtrain.diagnose(print, [], steps=9)
    with pytest.raises(RuntimeError, match="no training loop was recognised"):
        fusedtrain.diagnose(lambda batch: None, [1, 2])


def test_a_row_of_the_planted_faults_outlives_comments_and_nothing_else():
    planted = runpy.run_path(str(ROOT / "benchmarks" / "planted.py"))
    program, package = planted["program"], planted["PACKAGE"]
    modules = {path.relative_to(package).as_posix() for path in planted["MODULES"]}
    text = 'def f(x):\n    """Says."""\n    return x + 1\n'
    assert program(text) == program('def f(x):  # a comment\n    """Says more."""\n    return (x + 1)\n')
    assert program(text) != program(text.replace("1", "2")) and program("x = 'a'") != program("x = 'b'")
    assert {"_waits.py", "diagnose/measure.py", "diagnose/rules/loading.py"} <= modules
    assert "diagnose/report.py" not in modules


def test_a_script_with_a_planted_fault_is_timed_as_it_is_and_with_its_fix(tmp_path):
    optimum = runpy.run_path(str(ROOT / "benchmarks" / "planted.py"))["optimum"]
    optimum.__globals__["ROUNDS"] = 1
    slow = "__import__('os').environ.get('PLANTED_FIXED') or __import__('time').sleep(0.05)"
    (tmp_path / "train.py").write_text(FIXED_BATCH.replace("optimizer.zero_grad()", slow))
    report = {"accepted": [], "findings": [{"rule": "own_code", "remedies": [], "predicted_gain": 0.9}]}
    found = optimum(tmp_path / "train.py", {"CAUSES": ("own_code",)}, report)
    assert found["ms_before"] > 50 > found["ms_fixed"] and not found["slower"] and found["promised"] > 0.8


def test_the_planted_faults_name_rules():
    names = {rule.name for rule in rules.RULES}
    assert len(PLANTED) >= 20
    for path in PLANTED:
        causes = next(
            ast.literal_eval(node.value)
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Assign) and node.targets[0].id == "CAUSES"
        )
        assert set(causes) <= names, path


class Named(DataLoader):
    """Hands out something else than DataLoader makes."""

    def __iter__(self):
        for rows, targets in super().__iter__():
            yield {"rows": rows, "targets": targets}


@pytest.mark.parametrize("derived", ["ours", "users"])
def test_a_loader_that_is_derived_from_torchs_hands_out_the_same_in_every_pass(derived, monkeypatch):
    from fusedtrain import data

    for name, value in {"BLOCK": 0.01, "SAMPLING": 0.02, "PAIRS": 2}.items():
        monkeypatch.setattr(measure, name, value)
    monkeypatch.setattr(verify, "PAIRS", 2)
    samples = TensorDataset(torch.rand(16, 8), torch.randint(4, (16,)))  # four batches, in hundreds of steps
    batches = data.loader(samples, 4, num_workers=0) if derived == "ours" else Named(samples, 4)
    model = nn.Linear(8, 4)
    optimizer, sizes = torch.optim.SGD(model.parameters(), lr=0.1), set()

    def step(batch):
        rows, targets = batch if derived == "ours" else batch.values()
        sizes.add(len(rows))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), targets).backward()
        optimizer.step()

    report = fusedtrain.diagnose(step, batches, steps=10)
    assert report["steps"] == 10 and not report["failure"] and report["ceilings"]["cached_ms"] is not None
    assert 4 in sizes and (16 in sizes or derived == "users"), sizes  # larger batches are larger


def test_a_loop_that_trains_on_one_batch_is_measured_between_optimizer_steps(monkeypatch):
    monkeypatch.setattr(measure, "BLOCK", 0.01)
    with Instrument() as instrument:
        driver = Driver(instrument, lambda driver: iter_runs())

        def iter_runs():
            yield Run(5)

        driver.install()
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (rows,) = next(iter(DataLoader(TensorDataset(torch.rand(16, 8)), 4)))
        with pytest.raises(Finished):
            for _ in range(200):
                model(rows).sum().backward()
                optimizer.step()
        assert driver.loader is None and driver.optimizer is optimizer and driver.steps >= 5


GOES_ELSEWHERE = """
import os, sys, tempfile, time, torch
from pathlib import Path
from fusedtrain.diagnose import measure, verify  # the test's patience
measure.BLOCK, measure.SAMPLING, measure.PAIRS, verify.PAIRS = 0.01, 0.1, 2, 2
torch.multiprocessing.set_start_method("fork")
torch.set_num_interop_threads(1)
torch.distributed.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
Path(sys.argv[1]).exists() or sys.exit("it does not start where it was started")
os.chdir(tempfile.mkdtemp())
assert Path(__file__).exists()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100):
    model(torch.rand(16, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.004)  # the logger
"""


def test_a_script_that_changes_its_process_is_started_again_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(GOES_ELSEWHERE)
    monkeypatch.chdir(tmp_path)
    report = script.diagnose_script("train.py", ["train.py"], steps=10)
    assert not report["failure"] and report["examined"], report["failure"]
    assert report["findings"][0]["lines"][0]["text"] == "time.sleep(0.004)  # the logger"

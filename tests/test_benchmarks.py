"""The benchmarks run for real, on tiny cases, in processes of their own: their modules are scripts, not a package."""

import csv
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import forked
import harness
import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"


# The process of :func:`run_code`, with the allocator of whole steps.
IMPORTED = """
import contextlib, json, os, sys
from pathlib import Path
sys.path.append(sys.argv[1])  # behind the benchmarks' folder, which has a harness of its own
import machine
if os.environ != machine.environment("tuned"):
    os.execve(sys.executable, sys.orig_argv, machine.environment("tuned"))
import forks, layers, models, models_report, report
with contextlib.suppress(ImportError):
    models.Zoo()
for line in sys.stdin:
    code, output, *arguments = json.loads(line)
    sys.argv[1:] = arguments
    print(*forks.wait([forks.fork(lambda: exec(code, {}), Path(output))]), flush=True)
"""


@pytest.fixture(scope="module")
def run_code(tmp_path_factory):
    """Runs a piece of code in the benchmarks' folder and returns what it printed: in forks of one process, in which
    the imports, that take seconds, are made already."""
    outputs = tmp_path_factory.mktemp("outputs")
    command = [sys.executable, "-W", "ignore", "-c", IMPORTED, Path(__file__).parent]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}

    def of(code: str, *arguments: object) -> str:
        output = outputs / f"{len(list(outputs.iterdir()))}.txt"
        print(json.dumps([code, str(output), *map(str, arguments)]), file=imported.stdin, flush=True)
        status, printed = imported.stdout.readline(), output.read_text()
        assert status == "0\n", printed
        return printed

    with subprocess.Popen(command, cwd=FOLDER, env=harness.environment(), **pipes) as imported:
        yield of
        imported.stdin.close()


@pytest.fixture(scope="module")
def run_script(run_code):
    """As :func:`run_code` for one of the scripts."""
    code = "import os, runpy, sys; del sys.argv[0]; runpy.run_path(os.path.abspath(sys.argv[0]), run_name='__main__')"
    return functools.partial(run_code, code)


# A one-layer benchmark whose candidate returns linear times a factor. No graph of it needs a C++ compiler.
TINY = """
import torch, harness
from fusedtrain import ops

def inputs(device):
    return torch.randn(50, 8, device=device), torch.rand(5, 8, device=device)

sizes = {"fwd": 3200, "bwd": 4800, "fwd+bwd": 8000}
case = harness.Case("tiny", "tiny", inputs, sizes, sizes)
for factor in (1.0, 1.001, float("nan")):
    benchmark = harness.Benchmark(
        op="linear",
        cases=lambda dtype: [case],
        ours=lambda x, weight: ops.linear(x, weight) * factor,
        stock={"": torch.nn.functional.linear},
        compiled=factor == 1.0,  # as every time, and slow
    )
    for row in harness.measure(benchmark, case, torch.float32, torch.device("cpu"), 0.0, 100.0):
        if row["mode"] == "fwd+bwd":
            print(factor, row["backend"], row.get("us_p50") is not None, row.get("note", ""), sep="|")
"""


def test_a_wrong_candidate_gets_no_number(run_code):
    rows = [line.split("|") for line in run_code(TINY).splitlines()]
    for factor, passes in (("1.0", True), ("1.001", False), ("nan", False)):
        numbers = {(backend, number == "True") for of, backend, number, _ in rows if of == factor}
        assert {("eager", True), ("copy", True)} <= numbers and (("compile", True) in numbers) is passes
        for backend in ("reference", "auto"):
            assert (backend, passes) in numbers and (backend, not passes) not in numbers
        assert any("no number: y is off by" in note for of, *_, note in rows if of == factor) is not passes


# Candidates that say how long they took.
RACE = """
import forked
import harness

racers = [(harness.Candidate(name, "", None, ()), lambda s=s: (s, s)) for name, s in zip("abc", (1e-4, 1e-3, 1.0))]
harness.race(racers, "bwd", 0.3, "case")
times = [candidate.times["fwd+bwd"] for candidate, _ in racers]
print(*map(len, times), set(times[2]) < set(times[1]) < set(times[0]), round(harness.ratio(times[1], times[0]), 6))
"""


def test_slow_candidates_sit_out_rounds_which_they_share_with_all_others(run_code):
    assert run_code(RACE).split() == ["200", "50", "7", "True", "10.0"]


# torch.compile takes half a minute; test_a_wrong_candidate_gets_no_number races it.
OPTIONS = ("--case", "seresnet50.layer4", "--quick", "--dtype", "float32", "--without", "compile")
OPTIONS += ("--device", "cpu", "--allocator", "tuned", "--budget", 0)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What a real run of one small layer leaves behind."""
    folder = tmp_path_factory.mktemp("results")
    # In a process of its own, which starts again with the allocator.
    command = ["run.py", "--op", "channel_pool", "dispatch", *map(str, OPTIONS), "--output", folder]
    done = forked.run([sys.executable, *command], cwd=FOLDER, env=harness.environment(), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def rows_of(results: Path, op: str) -> list[dict[str, str]]:
    (file,) = results.glob(f"*/{op}.csv")
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_every_row_says_what_was_measured_and_where(results):
    rows = rows_of(results, "channel_pool")
    assert {row["mode"] for row in rows} == {"fwd", "bwd", "fwd+bwd"}
    assert {row["layout"] for row in rows} == {"contiguous", "channels_last"}
    assert {"auto", "reference", "eager", "copy"} <= {row["backend"] for row in rows}
    for row in rows:
        assert row["case"] == "seresnet50.layer4.0.se" and row["shape"] == "16x2048x7x7"
        assert 0 < float(row["us_p20"]) <= float(row["us_p50"]) <= float(row["us_p80"])
        assert row["allocator"] == "tuned" and row["threads"] == "1" and row["torch"] == torch.__version__
        assert row["device"] and row["commit"] and float(row["gb_per_s"]) > 0 and float(row["cache_mib"]) > 0


def test_a_run_goes_on_where_it_stopped(run_script, results, tmp_path):
    (file,) = results.glob("*/channel_pool.csv")
    held = tmp_path / file.parent.name / file.name
    held.parent.mkdir()
    held.write_text(file.read_text())
    run_script("run.py", "--op", "channel_pool", *OPTIONS, "--missing", "--output", tmp_path)
    assert held.read_text() == file.read_text()


def test_the_best_stock_path_has_speedup_one(results):
    for mode in ("fwd", "bwd", "fwd+bwd"):
        rows = [row for row in rows_of(results, "channel_pool") if row["mode"] == mode and row["backend"] != "copy"]
        stock = [row for row in rows if row["backend"].startswith(("eager", "compile"))]
        least = min(float(row["us_p50"]) for row in stock)  # rounded: two may share it
        assert 1.0 in [float(row["speedup"]) for row in stock if float(row["us_p50"]) == least]
        assert all(float(row["speedup"]) > 0 and float(row["pct_floor"]) > 0 for row in rows)


def test_peak_memory_counts_the_gradient(results):
    backward = [r for r in rows_of(results, "channel_pool") if r["mode"] == "bwd" and r["backend"] == "auto"]
    gradient_mib = 16 * 2048 * 7 * 7 * 4 / 2**20
    assert backward and all(float(row["peak_mib"]) >= 0.999 * gradient_mib for row in backward)


def test_dispatch_is_measured_for_every_op(results):
    rows = rows_of(results, "dispatch")
    assert {row["case"] for row in rows} == {"channel_pool", "channel_scale", "squeeze_excite"}
    assert {"select", "checks", "checks+grad", "auto", "eager"} <= {row["mode"] for row in rows}
    assert all(0 < float(row["us_p50"]) < 1000 for row in rows)


LOOPS = """
import importlib, bench_train_loop as bench, report, results, run
for op in run.OPS:
    assert {"rows", "BENCHMARK"} & vars(importlib.import_module(f"bench_{op}")).keys(), op
bench.STEPS, bench.PEERS = 30, {"no_such_package": None}
rows = [{**dict.fromkeys(results.COLUMNS, ""), **row, "load": 0.0} for row in bench.rows(quick=True)]
print(report.python_section("train_loop", rows))
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not count each thread's time")
def test_many_threads_share_few_pixels_of_many_channels():
    if reason := harness.why_not("cpu", "cpu", "batch_norm_act"):
        pytest.skip(reason)
    case = ["batch_norm_act", "--case", "blocks.5.1.bn1", "--layout", "channels_last", "--threads", "32"]
    call = functools.partial(forked.run, cwd=FOLDER, env=harness.environment(), timeout=300)
    done = call([sys.executable, "threads.py", *case[:-1], "1"])
    assert done.returncode == 2 and "--threads must be 2 or more, got 1" in done.stderr
    done = call([sys.executable, "threads.py", *case])
    assert done.returncode == 0, done.stderr
    header, *lines = done.stdout.splitlines()
    assert header.split()[-6:] == ["most", "mean", "fill", "stock", "fill", "ratio"]
    of_b0 = {line.split()[2]: float(line.split()[5]) for line in lines if line.startswith("efficientnet_b0")}
    assert of_b0.keys() == {"forward", "backward"}
    # Four threads of 32 did half of the work of both passes: 0.14.
    assert of_b0["backward"] > 0.3


def test_the_cost_of_the_training_loop_is_measured_and_a_missing_peer_named(run_code):
    text = run_code(LOOPS)
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(("| raw loop", "| Trainer, "))]
    assert len(rows) == 4 and all(0 < float(row[3].rstrip(" |")) < 1e5 for row in rows)
    assert "- Not measured: no_such_package: it could not be imported there." in text


def test_report_and_readme_come_from_the_csvs_alone(run_script, results, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- benchmarks:begin -->\nold\n<!-- benchmarks:end -->\nafter\n")
    (file,) = results.glob("*/channel_pool.csv")
    text = file.read_text()
    changed = tmp_path / "results" / file.parent.name / file.name
    changed.parent.mkdir(parents=True)
    changed.write_text(text.replace("seresnet50.layer4.0.se", "another.network"))
    run_script("report.py", "--results", tmp_path / "results", "--readme", readme)
    report = (tmp_path / "results" / "REPORT.md").read_text()
    assert "another.network" in report and "seresnet50.layer4" not in report
    for picture in ("channel_pool_roofline.png", "channel_pool_speedups.png"):
        assert picture in report and changed.with_name(picture).read_bytes().startswith(b"\x89PNG")
    filled = readme.read_text()
    assert filled.startswith("before\n<!-- benchmarks:begin -->\n") and filled.endswith(
        "<!-- benchmarks:end -->\nafter\n"
    )
    (line,) = (line for line in filled.splitlines() if "| channel_pool |" in line)
    assert "old" not in filled and re.search(r"\| \d\.\d\d / -, \d\.\d\d \(\d of \d\) \|", line)


def test_cases_with_several_numbers_of_threads_have_a_line_each(run_code):
    code = """
import report, results
row = dict.fromkeys(results.COLUMNS, 1.0) | {"case": "c", "layout": "contiguous", "mode": "fwd+bwd", "backend": "auto"}
rows = [{**row, "shape": "8", "dtype": "float32", "threads": n, "us_p50": us} for n, us in (("1", 20.0), ("2", 10.0))]
print(report.every_case(rows) + report.every_case(rows[:1]))
"""
    lines = [line for line in run_code(code).splitlines() if line.startswith("| c |")]
    form = "| c | 8 | float32 | contiguous |{} 1.00 = | {} |"
    for line, start in zip(lines, (form.format(" 1 |", 20), form.format(" 2 |", 10), form.format("", 20)), strict=True):
        assert line.startswith(start)


def test_readme_is_of_one_thread(run_code, tmp_path):
    code = """
import sys; from pathlib import Path; import models, models_report, report, results
file = Path(sys.argv[1], "device", "linear.csv")
common = {"device": "cpu", "dtype": "float32", "layout": "contiguous", "allocator": "tuned", "shape": "8"}
for threads, speedup in (("1", 2.0), ("4", 0.5)):
    row = dict.fromkeys(results.COLUMNS) | common | {"threads": threads, "speedup": speedup}
    results.merge(file, [row | {"op": "linear", "case": "c", "mode": "fwd+bwd", "backend": "auto"}])
    row = dict.fromkeys(models.STEPS.columns, 1.0) | common | {"threads": threads, "speedup": speedup}
    row |= {"network": "net", "images_per_s": 100 * speedup, "shape": {"1": "8", "4": "16"}[threads]}
    of = [row | {"backend": backend, "saved_mib": 4.0} for backend in ("eager", "compile")]
    of += [row | {"backend": "fused", "saved_mib": 1.0}, row | {"backend": "fused", "speedup": 9.0, "shape": "4"}]
    of += [row | {"backend": "eager", "shape": "4"}]
    results.merge(file.parent / "models" / "steps.csv", of, models.STEPS)
print(report.readme_block([file]) + models_report.readme_block(Path(sys.argv[1])))
"""
    lines = run_code(code, tmp_path).splitlines()
    assert "| linear | 2.00 / -, 2.00 (0 of 1) |" in lines and "| cpu | float32 | 2.00 ▲ (1.00)* |" in lines
    assert "| kept for backward over stock's |  | 0.25 to 1.00 |" in lines
    assert "| device | dtype | net |" in lines and not any("bfloat16 |" in line for line in lines)


def test_losses_of_one_dtype_are_reported(run_code):
    code = """
import models_report
form = {"network": "net", "dtype": "float32", "seed": 0.0, "loss": 0.5}
rows = [{**form, "backend": backend, "step": float(step)} for backend in ("eager", "fused") for step in (1, 2)]
print(models_report._losses(rows))
"""
    assert run_code(code).splitlines()[2:4] == ["| net | float32 | 0.500 | 0.500 |", "| net | bfloat16 | - | - |"]


def test_a_new_measurement_replaces_its_own_rows_only(run_code, results, tmp_path):
    (file,) = results.glob("*/channel_pool.csv")
    copy = tmp_path / file.name
    copy.write_text(file.read_text())
    code = """
import sys; from pathlib import Path; import results
path = Path(sys.argv[1])
before = results.read(path)
results.merge(path, [{**before[0], "case": "added"}])
assert len(results.read(path)) == len(before) + 1
results.merge(path, [{**before[0], "commit": "new"}])
after = results.read(path)
assert [row["commit"] for row in after if row["case"] != "added"] == ["new"]
assert [row["case"] for row in after].count("added") == 1
"""
    run_code(code, copy)


def test_layers_are_those_of_the_networks(run_code, zoo):
    layers = run_code("import layers\nfor l in layers.SE_LAYERS: print(l.label, l.c, l.r, l.h, l.act, l.gate)")
    listed = {tuple(line.split()) for line in layers.splitlines()}
    found = set()
    names = {"SiLU": "silu", "ReLU": "relu", "Sigmoid": "sigmoid", "Hardsigmoid": "hard_sigmoid"}
    for model in ("efficientnet_b0", "mobilenetv3_large_100", "regnety_008", "seresnet50"):
        with torch.device("meta"):
            network = zoo.timm.create_model(model)

            def record(name, module, inputs, _output):
                kinds = [names[type(child).__name__] for child in module.children() if type(child).__name__ in names]
                squeezed = next(module.parameters()).shape[0]
                _, c, h, _ = inputs[0].shape
                found.add((name, str(c), str(squeezed), str(h), *kinds))

            for name, module in network.named_modules():
                if name.endswith(".se") and list(module.children()):
                    module.register_forward_hook(functools.partial(record, f"{model}.{name}"))
            network(torch.empty(1, 3, 224, 224))
    assert listed <= found
    assert {layer[1:] for layer in listed} == {layer[1:] for layer in found}


# Steps over lists of tensors: the candidate takes the stock step times a factor.
LISTS = """
import torch, lists, networks
networks.NETWORKS["tiny"] = [(3, 5), (7,), ()]

def sgd(lr):
    return lambda params: torch.optim.SGD(params, lr=lr).step

for factor in (1.0, 1.1, float("nan")):
    case = lists.ListCase("tiny", "sgd", "tiny", (3, 0), sgd(0.1 * factor), {"eager loop": sgd(0.1)})
    benchmark = lists.ListBenchmark("optimizer_step", lambda dtype: [case])
    for row in lists.measure(benchmark, case, torch.float32, torch.device("cpu"), 0.0, 100.0):
        print(factor, row["backend"], row["shape"], row.get("us_p50", 0) > 0, row["note"], sep="|")
"""


def test_a_wrong_step_gets_no_number(run_code):
    rows = [line.split("|") for line in run_code(LISTS).splitlines() if "|" in line]
    numbers = {(factor, backend): number == "True" for factor, backend, _, number, _ in rows}
    assert {shape for _, _, shape, _, _ in rows} == {"23"}
    for factor in ("1.0", "1.1", "nan"):
        assert numbers[factor, "eager loop"] and numbers[factor, "copy"]
        assert numbers[factor, "auto"] == (factor == "1.0")
        assert any(of == factor and note.startswith("no number: off by") for of, *_, note in rows) == (factor != "1.0")


# What gpu_check.sh calls, on a machine without a GPU: each says how it was called.
STUB = """#!/bin/bash
case "$*" in *import*|*info*) exit 0 ;; esac
echo "caching ${PYTORCH_NO_CUDA_MEMORY_CACHING:-on}, $(basename "$0") $*"
[ "$(basename "$0")" != pytest ]
"""


def test_the_check_on_a_gpu_keeps_what_each_stage_says(tmp_path):
    for name in ("python", "pytest", "nvidia-smi", "nvcc", "compute-sanitizer"):
        (tmp_path / name).write_text(STUB)
        (tmp_path / name).chmod(0o755)
    env = harness.environment(PATH=f"{tmp_path}:{os.environ['PATH']}")
    command = ["bash", FOLDER / "gpu_check.sh", tmp_path / "out"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    lines = {line.split()[0]: line for line in (tmp_path / "out" / "summary.txt").read_text().splitlines()}
    stages = ["machine", "build", "tests", "triton", "memcheck", "racecheck", "benchmarks", "steps", "compiled"]
    assert list(lines) == stages, done.stderr
    assert done.returncode == 2 and all(f"{name} exit" in " ".join(lines[name].split()) for name in lines)
    for name in ("tests", "triton"):  # pytest fails here, and the next stage runs all the same
        assert "exit   1" in lines[name] and "-v" in (tmp_path / "out" / f"{name}.log").read_text()
    tests = [f"tests/test_{kernels.stem}.py" for kernels in FOLDER.parent.glob("csrc/cuda/*.cu")]
    tests = {test for test in tests if (FOLDER.parent / test).exists()}
    for name in ("memcheck", "racecheck"):
        log = (tmp_path / "out" / f"{name}.log").read_text()
        assert "tests/test_batch_norm_act.py" in tests <= {*log.split()}
        assert log.startswith("caching 1, compute-sanitizer") and "--kernel-name kns=fusedtrain" in log


# A GPU that needs a hundredth of a second for what was launched; the launches themselves are no work.
ON_GPU = """
import time, torch, lists, timing
torch.set_num_threads(1)
torch.cuda.synchronize = lambda device=None: time.sleep(0.01)
device = torch.device("cuda")
seconds, _ = lists.timed(lambda: None, device)()
clock = timing.clock_of(device)
start = clock()
print(seconds >= 0.01, clock() - start >= 0.01)
"""


def test_steps_on_a_gpu_are_timed_until_they_are_done(run_code):
    assert run_code(ON_GPU).split()[-2:] == ["True", "True"]


def test_the_parameters_are_those_of_the_networks(run_code, zoo):
    listed = run_code("import networks\nfor n, s in networks.NETWORKS.items(): print(n, sorted(s), sep=':')")
    for line in listed.splitlines():
        name, shapes = line.split(":")
        with torch.device("meta"):
            assert shapes == str(sorted(tuple(p.shape) for p in zoo.timm.create_model(name).parameters())), name


# A network whose fused form multiplies its logits, their gradient, or that of its last parameter in one batch.
NETWORK = """
import itertools, torch, models
setting = models.Setting(torch.device("cpu"), image=64, batch=8)
nan = float("nan")

def backward(y, factor):
    y.register_hook(lambda dy: dy * factor)
    return y

def once(model):
    calls = itertools.count()
    list(model.parameters())[-1].register_hook(lambda g: g * (nan if next(calls) == 2 else 1))

breaks = {str(f): lambda m, f=f: m.register_forward_hook(lambda module, inputs, y: y * f) for f in (1.0, 1.001, nan)}
breaks["gradient"] = lambda m: m.register_forward_hook(lambda module, inputs, y: backward(y, 1.001))
breaks["once"] = once
for name, models.fusedtrain.fuse in breaks.items():
    trainees = {(f, "contiguous"): models.network("test_resnet", "contiguous", f, setting) for f in (False, True)}
    found = models.faults(trainees, setting)
    print(name, *(f"{dtype}: {note}" for (_, _, dtype), note in found.items()), sep="|")
"""


def test_a_wrong_network_gets_no_number(run_code, zoo):
    found = dict(line.split("|", 1) if "|" in line else (line, "") for line in run_code(NETWORK).splitlines())
    assert found["1.0"] == ""
    assert "float32: no number: logits are off by" in found["1.001"]
    assert "float32: no number" in found["nan"] and "bfloat16: no number" in found["nan"]
    assert "float32: no number: gradients are off by 0.001, " in found["gradient"]
    assert "no number: gradients are off by nan, " in found["once"]


def test_nan_in_any_parameter_is_an_error_of_an_optimizer(run_code):
    code = "import lists, torch; one = [torch.ones(2)] * 2; print(lists._error([one[0], one[0] * float('nan')], one))"
    assert run_code(code) == "nan\n"


# Gradients of this network: in some batches a value is rounded to the other side of a kink, in stock forms too.
KINKS = """
import torch, models
setting = models.Setting(torch.device("cpu"), image=224, dtypes=("float32",))
trainees = {(f, l): models.network("seresnet50", l, f, setting) for f in (False, True) for l in models.LAYOUTS}
print(models.faults(trainees, setting))
"""


@harness.needs_memory(6)
def test_a_value_at_a_kink_does_not_count(run_code, zoo):
    assert run_code(KINKS).splitlines()[-1] == "{}"


STEPS = """
import os, runpy, sys, models
models.PROFILED_STEPS = 2
runpy.run_path(os.path.abspath("run.py"), run_name="__main__")
"""


def test_whole_steps_of_a_network(run_code, zoo, tmp_path):
    network = "test_efficientnet"
    options = ("--models", network, "--quick", "--image", 64, "--batch", 4, "--budget", 0)
    shown = run_code(STEPS, *options, "--device", "cpu", "--output", tmp_path)
    assert network in shown
    tables = {}
    for file in tmp_path.glob("*/models/*.csv"):
        with file.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
        assert {row["network"] for row in rows} == {network}
        tables[file.stem] = rows
    assert tables.keys() == {"steps", "profile"}
    forms = {(row["backend"], row["dtype"], row["layout"]) for row in tables["steps"]}
    layouts, dtypes = ("contiguous", "channels_last"), ("float32", "bfloat16")
    assert forms == {(b, d, layout) for b in ("eager", "fused") for d in dtypes for layout in layouts}
    for row in tables["steps"]:
        assert row["note"] == "" and row["shape"] == "4x3x64x64" and row["allocator"] == "tuned"
        assert float(row["images_per_s"]) == pytest.approx(4000 / float(row["ms_p50"]), rel=0.01)
        assert 0 < float(row["saved_mib"]) <= float(row["peak_mib"]) and float(row["ms_forward"]) > 0
    best = min((row for row in tables["steps"] if row["backend"] == "eager"), key=lambda row: float(row["ms_p50"]))
    assert float(best["speedup"]) == float(best["speedup_same_dtype"]) == 1.0
    shares = [float(row["percent"]) for row in tables["profile"] if row["dtype"] == "float32"]
    assert sum(shares) == pytest.approx(200, abs=1)  # a stock and a fused step
    assert {"depthwise convolution", "1x1 convolution", "norm", "optimizer"} <= {r["part"] for r in tables["profile"]}
    report = (tmp_path / "REPORT.md").read_text()
    assert "### Whole training steps" in report and "| test_efficientnet | 4x3x64x64 | float32 |" in report
    (picture,) = tmp_path.glob("*/models/steps.png")
    assert picture.name in report and picture.read_bytes().startswith(b"\x89PNG")

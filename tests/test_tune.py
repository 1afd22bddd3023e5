"""Batch size, learning rate, options, workers and backends found by measurement, by processes that are killed."""

import contextlib
import dataclasses
import json
import math
import os
import queue
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
import types

import harness
import pytest
import torch

import fusedtrain
import fusedtrain.data.workers
from fusedtrain import _tuned, backend, tune
from fusedtrain.cli import main
from fusedtrain.train import ActivationCheckpointing, Precision, TrainConfig, run
from fusedtrain.train import options as train_options
from fusedtrain.train.distributed import World
from fusedtrain.tune import backend as backends
from fusedtrain.tune import batch_size as sizes
from fusedtrain.tune import command
from fusedtrain.tune.search import PACKAGES, _check, _one, _points, _study
from fusedtrain.tune.state import State
from fusedtrain.tune.target import load


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDTRAIN_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    monkeypatch.setenv("FUSEDTRAIN_TUNED", "0")
    _tuned.load()


def write(path, text):
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture
def models(tmp_path):
    return write(
        tmp_path / "models.py",
        """
        import os, signal, torch

        class Net(torch.nn.Module):
            def __init__(self, what):
                super().__init__()
                self.what, self.linear = what, torch.nn.Linear(48, 10)

            def forward(self, x):
                if self.what == "hungry":
                    torch.empty(len(x), 32 * 2**18)  # 32 MiB per sample
                if self.what == "killed" and len(x) > 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.what == "broken":
                    raise KeyError("weights")
                return self.linear(x.flatten(1))

        def hungry(): return Net("hungry")
        def killed(): return Net("killed")
        def broken(): return Net("broken")
        def without_ops(): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LayerNorm(48))
        def number(): return 7
        def fused():
            import fusedtrain
            return torch.nn.Sequential(
                torch.nn.Conv2d(3, 64, 1), fusedtrain.nn.SEModule(64), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
            )
        """,
    )


def target(models, name, **options):
    return tune.Target(f"{models}:{name}", **{"image": (3, 4, 4), "device": "cpu", **options})


def ends(pid):
    end = time.monotonic() + 30
    while time.monotonic() < end and os.path.exists(f"/proc/{pid}"):
        time.sleep(0.02)
    return not os.path.exists(f"/proc/{pid}")


# --- batch size -------------------------------------------------------------------------------------------------------


def test_the_largest_batch_that_fits_is_found_and_remembered(models, monkeypatch):
    lines = []
    hungry, memory = target(models, "hungry"), 3 * 2**29
    found = tune.tune_batch_size(hungry, largest=512, memory=memory, steps=1, progress=lines.append)
    good = [size for size, trial in found["trials"].items() if trial["fits"]]
    bad = [size for size, trial in found["trials"].items() if not trial["fits"]]
    assert found["largest"] == max(good) < min(bad) <= max(good) * 17 / 16 + 1
    assert 8 <= found["largest"] < 48 and found["fastest"] in good  # 48 x 32 MiB is all that there is
    assert found["limit"].startswith(f"{min(bad)} does not fit: ") and "allocate memory" in found["limit"]
    assert len(lines) == len(found["trials"])
    monkeypatch.setattr(sizes, "_trial", lambda *args: pytest.fail("measured again"))
    assert tune.tune_batch_size(hungry, largest=512, memory=memory, steps=1) == found
    with pytest.raises(pytest.fail.Exception):
        tune.tune_batch_size(hungry, largest=512, memory=memory, steps=1, fresh=True)


@pytest.mark.parametrize("memory", ["inf", "nan", "0", "-1"])
def test_memory_that_is_no_size_is_refused(capsys, memory):
    assert main(["tune", "batch-size", "--memory", memory]) == 2
    assert "memory must be a positive, finite number of GiB, got " in capsys.readouterr().err


@pytest.mark.parametrize("mib", [1, 50, 150])  # so little that not even the answer would fit
def test_memory_that_is_none_is_too_little(models, mib):
    message = r"a batch of 4 does not fit: MemoryError: \d+ MiB are in use before a model is made"
    with pytest.raises(tune.TuneError, match=message):
        tune.tune_batch_size(target(models, "hungry"), smallest=4, memory=mib << 20, steps=1)


def test_a_process_that_is_killed_does_not_fit_and_one_that_fails_is_an_error(models):
    found = tune.tune_batch_size(target(models, "killed"), smallest=4, steps=1)
    assert found["largest"] == 5 and found["limit"] == "6 does not fit: the process was killed by SIGKILL"
    with pytest.raises(tune.TuneError, match=r"a batch of 2: KeyError: 'weights'"):
        tune.tune_batch_size(target(models, "broken"), steps=1)
    with pytest.raises(tune.TuneError, match=r"a batch of 6 does not fit: the process was killed by SIGKILL"):
        tune.tune_batch_size(target(models, "killed"), smallest=6, steps=1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_trial_ends_with_its_command(tmp_path, number):
    model = write(
        tmp_path / "model.py",
        """
        import os, pathlib, time

        def net():
            new = pathlib.Path(__file__).with_name("new")
            new.write_text(str(os.getpid()))
            new.rename(new.with_name("trial"))
            time.sleep(60)
        """,
    )
    command = ["-m", "fusedtrain", "tune", "batch-size", "--model", f"{model}:net", "--device", "cpu"]
    process = harness.start_python(*command, pipes={"stderr": subprocess.DEVNULL})
    while process.poll() is None and not (tmp_path / "trial").exists():
        time.sleep(0.02)
    process.send_signal(number)
    process.wait()
    assert ends((tmp_path / "trial").read_text())


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_peak_of_memory_is_in_the_unit_of_the_system(models, monkeypatch, platform, unit):
    monkeypatch.setattr(sizes, "sys", types.SimpleNamespace(platform=platform))
    least = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = sizes._run(target(models, "fused"), 2, 1)["peak_bytes"]
    assert unit * least <= peak <= unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize(
    "message",
    [
        "libgomp.so.1: failed to map segment from shared object",
        "libgomp.so.1: cannot map zero-fill pages",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "GET was unable to find an engine to execute this computation",
    ],
)
def test_what_libraries_say_without_memory_is_no_error(models, monkeypatch, message):
    def full(*args):
        raise RuntimeError(message)

    class Results(list):
        send = list.append

    monkeypatch.setattr(sizes, "_run", full)
    monkeypatch.setattr(sizes, "end_with_parent", lambda: None)
    found = Results()
    sizes._child(target(models, "killed"), 8, 1, None, found, dict(os.environ))
    assert found == [{"fits": False, "reason": f"RuntimeError: {message} (out of memory)"}]


def test_what_fits_one_gpu_is_not_known_of_another(models, monkeypatch):
    def trial(target, size, steps, memory):
        trial.sizes.append(size)
        if size > gpu.total_memory:
            return {"fits": False, "reason": "CUDA out of memory"}
        return {"fits": True, "seconds_per_sample": 1.0, "peak_bytes": size}

    monkeypatch.setattr(tune.Target, "resolve_device", lambda target: torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(sizes, "_trial", trial)
    for name, total, known in (("A", 80, False), ("A", 80, True), ("B", 80, False), ("A", 16, False)):
        gpu, trial.sizes = types.SimpleNamespace(name=name, total_memory=total), []
        assert total * 15 / 16 <= tune.tune_batch_size(target(models, "fused"))["largest"] <= total
        assert (not trial.sizes) is known


def test_what_may_be_had_of_a_gpu_is_the_part_of_it_that_tensors_get(monkeypatch):
    parts = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=80))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *args: parts.append(args))
    monkeypatch.setattr(tune.Target, "resolve_device", lambda target: torch.device("cuda", 1))
    monkeypatch.setattr(sizes, "_run", lambda *_: {"fits": True})
    monkeypatch.setattr(sizes, "end_with_parent", lambda: None)
    for memory in (20, 100, None):
        results = types.SimpleNamespace(send=lambda found: parts.append(found["fits"]))
        sizes._child(tune.Target(image=(1, 16, 16)), 8, 1, memory, results, dict(os.environ))
    device = torch.device("cuda", 1)
    assert parts == [(0.25, device), True, (1.0, device), True, True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("memory", "fits"), [(2**30, True), (2**20, False)])
def test_the_batch_size_is_tuned_on_a_gpu(memory, fits):
    options = {"smallest": 4, "largest": 4, "memory": memory, "steps": 1, "fresh": True}
    refusal = pytest.raises(tune.TuneError, match=r"a batch of 4 does not fit: (?i:.*memory)")
    with contextlib.nullcontext() if fits else refusal:
        found = tune.tune_batch_size(tune.Target(image=(1, 64, 64), device="cuda"), **options)
        assert found["largest"] == 4 and found["trials"][4]["peak_bytes"] > 0


# --- learning rate ----------------------------------------------------------------------------------------------------


def test_the_range_test_suggests_a_rate_that_learns_and_goes_on_where_it_stopped():
    small, lines = tune.Target(image=(1, 16, 16), device="cpu"), []
    options = {"steps": 50, "batch_size": 32, "highest": 10.0}
    whole = tune.tune_lr(small, **options, progress=lines.append)
    assert 1e-5 < whole["suggested"] < whole["lowest_loss_at"] < 1
    assert len(whole["lrs"]) == len(whole["losses"]) and whole["lrs"][0] == 1e-6
    assert lines[0].startswith("step 20/50  lr ")

    digits = fusedtrain.data.digits(size=16)
    calls = iter(range(10**9))

    class Killed(torch.utils.data.Dataset):
        def __len__(self):
            return len(digits)

        def __getitem__(self, index):
            if next(calls) == 33 * 32:
                raise KeyboardInterrupt
            return digits[index]

    with pytest.raises(KeyboardInterrupt):
        tune.tune_lr(small, Killed(), **options, data_key="killed")
    again = []
    resumed = tune.tune_lr(small, Killed(), **options, data_key="killed", progress=again.append)
    assert resumed == whole and again[0] == "goes on after step 20"
    assert tune.tune_lr(small, [0] * len(digits), **options, data_key="killed") == whole  # kept: no data are read


def test_a_range_test_needs_samples_and_classes_for_all_of_them(tmp_path, capsys):
    with pytest.raises(tune.TuneError, match="the dataset holds no samples"):
        tune.tune_lr(tune.Target(device="cpu"), [], steps=10)
    with pytest.raises(tune.TuneError, match="a dataset needs data_key, which names it"):
        tune.tune_lr(tune.Target(device="cpu"), [0], steps=10)
    from PIL import Image

    for name in "abc":
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name / "0.png")
    model = write(tmp_path / "model.py", "import torch\ndef net(): return torch.nn.Conv2d(3, 2, 8)\n")
    words = ["--data", str(tmp_path / "photos"), "--model", f"{model}:net", "--image", "3x8x8", "--classes", "2"]
    assert main(["tune", "lr", *words]) == 2
    assert capsys.readouterr().err == f"fusedtrain tune: {tmp_path / 'photos'} has 3 classes, --classes is 2\n"


def test_a_range_test_of_a_folder_takes_its_training_part_and_sees_that_it_has_changed(tmp_path, capsys):
    from PIL import Image

    for index, name in enumerate("ab"):
        for part in ("train", "val"):
            (tmp_path / "photos" / part / name).mkdir(parents=True)
        for i in range(8):
            Image.new("RGB", (8, 8), (30 * i, 200 * index, 9)).save(tmp_path / "photos" / "train" / name / f"{i}.png")
    images = command._images(str(tmp_path / "photos"), 8, command._normalized)
    mean, std = torch.tensor(run.MEAN), torch.tensor(run.STD)
    assert images.classes == ["a", "b"]
    assert torch.equal(images[0][0][:, 3, 3], (torch.tensor([0.0, 0.0, 9.0]) / 255 - mean) / std)
    assert len(command._dataset(str(tmp_path / "photos"), 8)) == 16
    code = """
        import torch
        def net(): return torch.nn.Sequential(torch.nn.Conv2d(3, 2, 8), torch.nn.Flatten())
    """
    model = write(tmp_path / "model.py", code)
    words = ["--data", str(tmp_path / "photos"), "--model", f"{model}:net", "--image", "3x8x8", "--classes", "2"]
    found = []
    for turned in (False, False, True):
        if turned:
            for i in range(8):
                Image.new("RGB", (8, 8), (200, 30 * i, 90)).save(tmp_path / "photos" / "train" / "a" / f"{i}.png")
        assert main(["tune", "lr", "--steps", "20", "--batch-size", "4", "--device", "cpu", "--json", *words]) == 0
        found.append(json.loads(capsys.readouterr().out)["losses"])
    assert found[0] == found[1] != found[2]


def test_a_range_test_that_tells_nothing_says_so(tmp_path):
    flat, empty = tune.Target(image=(1, 8, 8), device="cpu"), [(torch.full((1, 8, 8), float("nan")), 0)] * 8
    for lowest, highest in ((1.0, 0.1), (1.0, math.inf)):
        with pytest.raises(tune.TuneError, match="0 < lowest < highest < inf"):
            tune.tune_lr(flat, empty, lowest=lowest, highest=highest, data_key="empty")
    with pytest.raises(tune.TuneError, match=r"the loss is nan at step 1, with a learning rate of 1\.0e-06"):
        tune.tune_lr(flat, empty, batch_size=4, data_key="empty")
    code = """
        import torch
        class Net(torch.nn.Linear):
            def forward(self, x): return super().forward(x.flatten(1)) + (0 * self.weight).sqrt().sum()  # slope: NaN
        def net(): return Net(64, 10)
    """
    steep, zeros = f"{write(tmp_path / 'steep.py', code)}:net", [(torch.zeros(1, 8, 8), 0)] * 8
    with pytest.raises(tune.TuneError, match=r"step 1 of epoch 1 was not made: the gradient of weight .* not finite"):
        tune.tune_lr(tune.Target(steep, (1, 8, 8), device="cpu"), zeros, batch_size=4, data_key="zeros")


# --- search -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def space(tmp_path):
    """Writes the YAML file and the objective: a parabola with its minimum at x = 0.3 of kind b."""
    write(
        tmp_path / "objective.py",
        """
        import os, pathlib, time
        here = pathlib.Path(__file__).parent

        def parabola(params, report):
            value = (params["x"] - 0.3) ** 2 + (params["kind"] == "a")
            for step in range(3):
                report(step, value)
            with open(here / "ran", "a") as file:
                file.write(f"{os.getpid()} {params['x']!r}\\n")
            if (here / "stop").exists():
                time.sleep(60)
            while (here / "two").exists() and len({line.split()[0] for line in open(here / "ran")}) < 2:
                time.sleep(0.05)
            if params["x"] > 0.9:
                raise ValueError("x is too large")
            return value
        """,
    )

    def make(**changes):
        content = {
            "objective": f"{tmp_path / 'objective.py'}:parabola",
            "params": "{x: {low: 1e-3, high: 1, log: true}, kind: [a, b]}",
            "trials": 12,
            "sampler": "{name: tpe, seed: 1}",
            **changes,
        }
        path = tmp_path / "space.yaml"
        path.write_text("\n".join(f"{name}: {value}" for name, value in content.items() if value is not None))
        return path

    return make


def test_workers_share_a_search_that_prunes_and_goes_on(space, tmp_path, capsys):
    path = space(pruner="{name: median, n_startup_trials: 3, n_warmup_steps: 1}")
    (tmp_path / "two").touch()  # each waits for the other
    assert main(["tune", "search", str(path), "--workers", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert len(found["trials"]) == 12 == found["complete"] + found["pruned"] + found["failed"]
    assert found["best"]["value"] == min(t["value"] for t in found["trials"] if t["state"] == "complete")
    assert found["best"]["params"]["kind"] == "b" and found["pruned"] > 0
    assert err.count("\n") == 12 and "x=" in err
    assert len({line.split()[0] for line in (tmp_path / "ran").read_text().splitlines()}) == 2  # both took part
    assert main(["tune", "search", str(path), "--trials", "14"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("12 of 14 trials are done already\n") and err.count("\n") == 3
    assert out.startswith("best: ")
    assert main(["tune", "search", str(space(direction="maximize"))]) == 2
    assert "the storage belongs to another search: its direction is minimize, not maximize" in capsys.readouterr().err


def test_what_an_objective_prints_is_not_in_the_result(space, tmp_path):
    write(
        tmp_path / "loud.py",
        """
        print("the module is loaded")
        def objective(params, report):
            print("a trial", flush=True)
            return params["x"]
        """,
    )
    path = space(objective=f"{tmp_path / 'loud.py'}:objective", trials=2)
    done = harness.run_python("-m", "fusedtrain", "tune", "search", str(path), "--json")
    assert json.loads(done.stdout)["complete"] == 2
    assert done.stderr.count("a trial\n") == 2 and "the module is loaded" in done.stderr


def test_a_file_that_cannot_be_made_is_said_in_one_line(space, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    assert main(["tune", "search", str(space()), "--storage", str(tmp_path / "file" / "x.db")]) == 1
    monkeypatch.setenv("FUSEDTRAIN_CACHE", str(tmp_path / "file"))
    assert main(["tune", "lr", "--steps", "10"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("fusedtrain tune: [Errno ") and "file" in line for line in lines)


def test_a_process_whose_parent_is_gone_is_killed():
    code = """
        import functools, os, subprocess, sys
        from fusedtrain._processes import kill_with
        start = lambda parent: subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], preexec_fn=functools.partial(kill_with, parent)
        )
        assert start(os.getpid() - 1).wait() == 1  # it was gone before
        child = start(os.getpid())
        print(child.pid, flush=True)
        child.wait()
    """
    process = harness.start_python("-c", textwrap.dedent(code), pipes={"stdout": subprocess.PIPE})
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    assert ends(child)


def test_a_help_shows_a_space_that_is_read(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["tune", "search", "--help"])
    example = capsys.readouterr().out.partition("for instance:\n")[2]
    (tmp_path / "space.yaml").write_text(example)
    space = tune.read_space(tmp_path / "space.yaml")
    assert space.params["lr"] == {"low": 1e-5, "high": 0.1, "log": True} and space.trials == 20


TPE = "{name: tpe, seed: 1}"


# How it is cut off is the processes' matter, what is run again the sampler's: both samplers behind the kill, each other
# cut with one of them.
@pytest.mark.parametrize(("how", "sampler"), [("killed", TPE), ("killed", "grid"), ("Ctrl-C", TPE), ("worker", "grid")])
def test_a_search_that_was_cut_off_runs_its_trial_again(space, tmp_path, how, sampler):
    points = {"params": "{x: [0.2, 0.3, 0.4], kind: [b]}"} if sampler == "grid" else {}
    path = space(trials=3, sampler=sampler, **points)
    (tmp_path / "stop").touch()
    command = ["-m", "fusedtrain", "tune", "search", str(path)]
    process = harness.start_python(*command, pipes={"stderr": subprocess.PIPE, "start_new_session": True})
    while process.poll() is None and not (tmp_path / "ran").exists():
        time.sleep(0.02)
    worker, cut = (tmp_path / "ran").read_text().split()
    if how == "killed":
        process.kill()
    elif how == "worker":
        os.kill(int(worker), signal.SIGINT)
    else:
        os.killpg(process.pid, signal.SIGINT)  # the terminal sends it to all
    err = process.communicate()[1]
    if how == "Ctrl-C":
        assert err == "fusedtrain tune: interrupted; the same command goes on from here\n"
    (tmp_path / "stop").unlink()
    assert ends(worker)  # it goes with its parent
    found = tune.search(tune.read_space(path), tmp_path / "space.db")
    tried = [trial["params"]["x"] for trial in found["trials"]]
    assert len(tried) == len(set(tried)) == 3 and float(cut) in tried


def test_a_grid_has_each_point_once_whatever_was_cut_off(space, tmp_path):
    path = space(sampler="grid", trials=10, params="{x: [0.2, 0.3, 0.4, 0.5], kind: [b]}")
    grid, storage = tune.read_space(path), tmp_path / "space.db"
    study = _study(grid, storage)
    for drawn in (0, 1, 2):  # parameters, when the trial was killed
        trial = study.ask()
        for name in ("x", "kind")[:drawn]:
            trial.suggest_categorical(name, grid.params[name])
    study.enqueue_trial({"x": 0.4, "kind": "b"})  # of a search that did not come to it
    for _ in range(2):
        found = tune.search(grid, storage, workers=2)
        assert sorted(trial["params"]["x"] for trial in found["trials"]) == [0.2, 0.3, 0.4, 0.5]
        assert found["complete"] == 4 and found["best"]["params"]["x"] == 0.3


def test_a_grid_ends_where_its_range_does(space):
    found = _points(tune.read_space(space(sampler="grid", params="{x: {low: 0.1, high: 0.3, step: 0.1}}")))
    assert sorted(point["x"] for point in found) == [0.1, 0.2, 0.3]  # 0.1 + 2 * 0.1 is more


# What dies is the trial that came first. What was cut off comes first again, but for a grid.
@pytest.mark.parametrize(
    ("params", "sampler", "end", "how"),
    [
        ("{x: {low: 0.0, high: 1.0}}", TPE, "_exit(0)", "ended with exit code 0"),
        ("{x: [1, 2]}", "grid", "kill(os.getpid(), 9)", "was killed by SIGKILL"),
    ],
)
def test_a_trial_whose_worker_dies_runs_once_more_and_has_failed(space, tmp_path, capsys, params, sampler, end, how):
    objective = write(
        tmp_path / "objective.py",
        f"""
        import os, pathlib
        def f(params, report):
            with open(pathlib.Path(__file__).with_name("ran"), "a+") as file:
                file.write(f"{{params['x']}}\\n")
                file.seek(0)
                first = file.readline()
            return params["x"] if first != f"{{params['x']}}\\n" else os.{end}
        """,
    )
    path = space(objective=f"{objective}:f", params=params, sampler=sampler, trials=2)
    for done in (0, 1):
        assert main(["tune", "search", str(path)]) == (0 if done and sampler == "grid" else 1)
        err = capsys.readouterr().err
        if sampler != "grid" or not done:
            assert err.endswith(f": {done} of 2 trials are done: a worker {how}; the same search goes on\n")
    assert f": failed: ChildProcessError: its worker {how}, the second time\n" in err
    assert main(["tune", "search", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ran = (tmp_path / "ran").read_text().splitlines()
    assert ran.count(ran[0]) == 2 and len(ran) == 3
    assert (found["complete"], found["failed"]) == (1, 1)


@pytest.mark.parametrize("code", [0, "'no data'"])
def test_an_objective_that_exits_has_failed(tmp_path, capsys, code):
    objective = write(tmp_path / "objective.py", f"import sys\ndef f(params, report):\n    sys.exit({code})\n")
    space = {"objective": f"{objective}:f", "params": {"x": [1]}, "trials": 2}
    path = write(tmp_path / "space.yaml", json.dumps(space))
    for _ in range(2):
        assert main(["tune", "search", str(path)]) == 2
        said = f"no trial came to its end: SystemExit: {str(code).strip(chr(39))}; without {tmp_path / 'space.db'} they"
        assert f"fusedtrain tune: {said} are run again\n" in capsys.readouterr().err
    objective.write_text("def f(params, report):\n    return 3\n")
    (tmp_path / "space.db").unlink()
    assert main(["tune", "search", str(path)]) == 0


def test_a_storage_that_is_no_database_is_refused(space, tmp_path, capsys):
    (tmp_path / "space.db").write_text("a list of shopping" * 100)
    assert main(["tune", "search", str(space())]) == 2
    err = capsys.readouterr().err
    assert err == f"fusedtrain tune: {tmp_path / 'space.db'} is no SQLite database: file is not a database\n"


def test_data_that_cannot_be_loaded_are_named_in_one_line(tmp_path, capsys):
    for name in "ab":
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "0.png").write_bytes(b"not a picture")
    assert main(["tune", "loader", "--data", str(tmp_path / "photos")]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"fusedtrain tune: {tmp_path / 'photos'}: ") and "0.png" in err and err.count("\n") == 1
    model = write(tmp_path / "model.py", "def number():\n    return 3\n")
    assert main(["tune", "loader", "--data", f"{model}:number"]) == 2
    assert capsys.readouterr().err.endswith("model.py:number must return a dataset, got int\n")


def test_a_search_that_is_ended_takes_the_processes_of_its_command_along(space, tmp_path):
    script = write(
        tmp_path / "script.py",
        """
        import os, pathlib, subprocess, sys
        here = pathlib.Path(__file__).parent
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        (here / "new").write_text(f"{os.getppid()} {child.pid}")
        (here / "new").rename(here / "processes")
        child.wait()
        """,
    )
    path = space(objective=None, command=f"python {script} {{x}} {{kind}}", metric="loss")
    process = harness.start_python("-m", "fusedtrain", "tune", "search", str(path), pipes={"stderr": subprocess.PIPE})
    while process.poll() is None and not (tmp_path / "processes").exists():
        time.sleep(0.02)
    worker, child = (tmp_path / "processes").read_text().split()
    os.kill(int(worker), signal.SIGTERM)
    process.communicate()
    assert ends(child)


def test_a_command_is_searched_by_its_json_lines(space, tmp_path):
    script = write(
        tmp_path / "script.py",
        """
        import json, sys
        x = float(sys.argv[1])
        print("starts")
        for step in range(3):
            print(json.dumps({"step": step, "loss": x * x + step}), flush=True)
        if x == 3:
            sys.exit("no such x")
        """,
    )
    grid = {"objective": None, "metric": "loss", "sampler": "grid", "pruner": "none"}
    path = space(**grid, command=f"python {script} {{x}}", params="{x: [1, 2, 3]}")
    found = tune.search(tune.read_space(path), tmp_path / "space.db", workers=2)
    assert (found["complete"], found["failed"]) == (2, 1) and found["best"]["params"] == {"x": 1}
    assert found["best"]["value"] == 3.0
    (failed,) = (trial for trial in found["trials"] if trial["state"] == "fail")
    assert failed["error"] == "RuntimeError: the command ended with 1: {} / no such x".format(
        " / ".join(["starts", *(json.dumps({"step": s, "loss": 9.0 + s}) for s in range(3))])
    )
    code = "python -c \"print(str({'loss': {x}, 'trial': {trial}}).replace(chr(39), chr(34)))\""  # braces of its own
    path = space(**grid, command=json.dumps(code), params="{x: [4]}")
    assert tune.search(tune.read_space(path), tmp_path / "braces.db")["best"]["value"] == 4
    code = "python -c 'import json; print(json.dumps(dict(loss=None)))'"  # as JSON writes what is not a number
    path = space(**grid, command=json.dumps(code), params="{x: [4]}")
    with pytest.raises(tune.TuneError, match="no trial came to its end: ValueError: the value is not a number"):
        tune.search(tune.read_space(path), tmp_path / "null.db")
    path = space(**grid, command=f"python {script} 3", params="{x: [1]}")
    with pytest.raises(tune.TuneError, match="no trial came to its end: RuntimeError: the command ended with 1"):
        tune.search(tune.read_space(path), tmp_path / "other.db")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": None}, "the space needs either objective: FILE.py:NAME or command: with metric:"),
        ({"objective": "nowhere.py:f"}, "nowhere.py is not a file; a function is named FILE.py:NAME"),
        ({"direction": "up"}, "direction must be minimize or maximize, got 'up'"),
        ({"sampler": "magic"}, "sampler must be one of tpe, random, grid"),
        ({"sampler": "{name: tpe, magic: 1}"}, "options of the sampler or pruner: .*magic"),
        ({"params": "{x: 3}"}, r"x must be a list of choices or \{low, high\} with log or step, got 3"),
        ({"params": "{x: {low: 2, high: 1}}"}, "x: low and high must be finite numbers in order, got 2 and 1"),
        ({"params": "{x: {low: 0, high: .inf}}"}, "x: low and high must be finite numbers in order, got 0 and inf"),
        ({"params": "{x: {low: .nan, high: 1}}"}, "x: low and high must be finite numbers in order, got nan and 1"),
        ({"params": "{x: {low: 0, high: 1, log: true}}"}, "x: log needs a positive low and no step"),
        ({"params": "{x: {low: 0, high: 1, step: 0}}"}, "x: step must be a positive, finite number, got 0"),
        ({"params": "{x: {low: 0, high: 1, step: .inf}}"}, "x: step must be a positive, finite number, got inf"),
        ({"params": "{x: {low: 1, high: 2, log: 'no'}}"}, "x: log must be true or false, got 'no'"),
        ({"params": "{x: [2024-01-01]}"}, "x: choices must be numbers, texts, true, false or null"),
        ({"params": "{1: [2]}"}, "a parameter cannot be called 1"),
        ({"objective": 5}, "objective must be text, got 5"),
        ({"objective": None, "command": 5, "metric": "loss"}, "command must be text, got 5"),
        ({"objective": None, "command": "''", "metric": "loss"}, "command: is empty"),
        ({"objective": None, "command": "echo 'a", "metric": "loss"}, "command: No closing quotation: echo 'a"),
        (
            {"objective": None, "command": "run {trial}", "metric": "loss", "params": "{trial: [1]}"},
            "a parameter cannot be called 'trial'",
        ),
        ({"sampler": "{name: tpe, seed: null}"}, "sampler: seed must be a whole number, got None"),
        ({"trials": "true"}, "trials must be a whole number of at least 1, got True"),
        ({"sampler": "[tpe]"}, r"sampler must be a name or {name: ..., option: ...}, got \['tpe'\]"),
        ({"trials": 0}, "trials must be a whole number of at least 1, got 0"),
        ({"color": "red"}, "'color' is not one of params, objective, command"),
        ({"params": "{x: ["}, "is not YAML: "),
        ({"params": "{x: [1], x: [2]}"}, "space.yaml: x is named twice, again in line 2"),
        ({"objective": None, "command": "run {y}", "metric": "loss"}, "command: holds {y}, and there is no parameter"),
    ],
)
def test_a_space_that_makes_no_sense_is_refused_in_one_line(space, tmp_path, capsys, changes, message):
    assert main(["tune", "search", str(space(**changes))]) == 2
    err = capsys.readouterr().err
    assert re.search(f"fusedtrain tune: .*{message}", err) and err.count("\n") == 1
    assert not (tmp_path / "ran").exists()


# --- loader -----------------------------------------------------------------------------------------------------------


def test_a_folder_of_arrow_files_is_a_table(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    table = pa.table({"x": [1, 2]})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert command._dataset(str(tmp_path), 8).rows == 2


def test_the_loader_is_tuned_from_the_command_line_and_goes_on_after_a_kill(tmp_path, capsys, monkeypatch):
    workers = fusedtrain.data.workers
    monkeypatch.setattr(workers, "SECONDS", 0.1)
    path = write(
        tmp_path / "dataset.py",
        """
        import torch
        def digits(): return torch.utils.data.TensorDataset(torch.zeros(100, 3, 8, 8))
        """,
    )
    command = ["tune", "loader", "--data", f"{path}:digits", "--batch-size", "8", "--json"]
    rate, measured = workers._rate, []

    def killed(*args):
        if measured:
            raise KeyboardInterrupt
        measured.append(args[4])
        return rate(*args)

    monkeypatch.setattr(workers, "_rate", killed)
    assert main(command) == 130 and "the same command goes on from here" in capsys.readouterr().err
    monkeypatch.setattr(workers, "_rate", lambda *args: measured.append(args[4]) or rate(*args))
    monkeypatch.setattr(workers, "_one_worker", lambda *args: pytest.fail("measured again"))
    assert main(command) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["sample_bytes"] == 768 and "0" in found["points"] and found["num_workers"] <= found["cores"]
    assert len(measured) == len(set(measured)) == len(found["points"]) and err.count("samples per second") == len(
        measured
    )
    with monkeypatch.context() as patch:
        patch.setattr(workers, "_rate", lambda *args: pytest.fail("measured again"))
        assert main(command) == 0 and json.loads(capsys.readouterr().out) == found
    monkeypatch.setattr(workers, "plan", lambda *args, remember, **options: pytest.fail(f"remembers: {remember}"))
    with pytest.raises(pytest.fail.Exception, match="remembers: True"):
        main(command)
    path.write_text(path.read_text() + "# decodes faster\n")
    with pytest.raises(pytest.fail.Exception, match="remembers: False"):
        main(command)


@pytest.mark.parametrize(
    ("name", "message"),
    [("none", "--data: there is no {}"), ("*.parquet", "no Parquet or Arrow file is found at {}")],
)
def test_data_that_are_not_there_are_said_to_be_missing(tmp_path, capsys, name, message):
    assert main(["tune", "loader", "--data", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err == f"fusedtrain tune: {message.format(tmp_path / name)}\n"


# --- backend ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_kernel(monkeypatch):
    """The CPU kernel of squeeze_excite, made slower than any other backend."""
    impls = backend._OPS["squeeze_excite"]
    kernel = impls["cpu"]

    def slowed(*args):
        end = time.thread_time() + 0.005
        while time.thread_time() < end:
            pass
        return kernel.forward(*args)

    monkeypatch.setitem(impls, "cpu", dataclasses.replace(kernel, forward=slowed))
    monkeypatch.setenv("FUSEDTRAIN_TUNED", "1")


def test_a_backend_that_was_measured_faster_is_taken_by_auto(models, slow_kernel, cache, capsys, monkeypatch):
    arguments = ["tune", "backend", "--model", f"{models}:fused", "--image", "3x32x32", "--classes", "64"]
    arguments += ["--batch-size", "8", "--device", "cpu", "--json"]
    assert main(arguments) == 0
    (entry,) = (e for e in json.loads(capsys.readouterr().out)["entries"] if e["op"] == "squeeze_excite")
    assert (entry["auto"], entry["backend"], entry["shape"]) == ("cpu", "reference", [8, 64, 32, 32])
    impls = backend._OPS["squeeze_excite"]
    x = torch.zeros(8, 64, 32, 32).to(memory_format=torch.channels_last)
    assert backend.select("squeeze_excite", impls, x) is impls["reference"]
    text = fusedtrain.explain("squeeze_excite", x)
    assert text.startswith("squeeze_excite: reference runs, by the table of fusedtrain tune backend: cpu ")
    for other in (x[:7], x.double(), x.contiguous()):
        assert backend.select("squeeze_excite", impls, other) is impls["cpu"]
    with fusedtrain.use_backend("cpu"):
        assert backend.select("squeeze_excite", impls, x) is impls["cpu"]
    torch._dynamo.reset()
    compiled = torch.compile(fusedtrain.ops.channel_pool, backend="eager", fullgraph=True)
    assert compiled(x).shape == (8, 64)
    # A table of another machine or version counts for nothing, nor does a broken one.
    table = cache / "backends.json"
    content = table.read_text()
    for changed in (content.replace(torch.__version__, "0.0"), content[:100], '{"entries": 3}', "[]"):
        table.write_text(changed)
        _tuned.load()
        assert backend.select("squeeze_excite", impls, x) is impls["cpu"]
    # What is in the table is not measured again, so that a killed run goes on.
    table.write_text(content)
    monkeypatch.setattr(backends, "_measure", lambda call: pytest.fail("measured again"))
    assert main(arguments) == 0


@pytest.mark.parametrize(("name", "other"), [("cpu_vendor", "another"), ("cpu_family", 99), ("isa_active", "scalar")])
def test_a_table_is_of_the_processor_that_it_was_measured_on(monkeypatch, name, other):
    here = _tuned.origin("cpu")
    assert _tuned.origin("cpu") == here
    monkeypatch.setitem(_tuned._extension.BUILD_INFO, name, other)
    assert _tuned.origin("cpu") != here


@pytest.mark.parametrize("keys", [[[]], [5]])
def test_a_broken_table_counts_as_none(cache, keys):
    cache.mkdir()
    entry = {"backend": "cpu", "measured": "", "keys": keys}
    (cache / "backends.json").write_text(json.dumps({"origins": [{"device": "cpu"}], "entries": [entry]}))
    done = harness.run_python("-c", "import fusedtrain", FUSEDTRAIN_TUNED="1", FUSEDTRAIN_CACHE=str(cache))
    assert done.returncode == 0, done.stderr


def test_the_gpu_that_is_measured_is_waited_for(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    device = torch.device("cuda", 1)  # not the current one
    backends._seconds(lambda: waited.append("run"), 1, device)
    assert waited == [device, "run", device]


def test_a_tie_and_a_model_without_ops_change_nothing(models, monkeypatch):
    monkeypatch.setattr(backends, "GAIN", 100.0)
    found = tune.tune_backend(target(models, "fused", image=(3, 32, 32)), batch_size=4)
    assert {entry["backend"] for entry in found["entries"]} == {None}
    assert set(found["entries"][0]["microseconds"]) >= {"cpu", "reference"}
    with pytest.raises(tune.TuneError, match="calls none of squeeze_excite, channel_pool"):
        tune.tune_backend(target(models, "without_ops"), batch_size=2)


# --- what all have in common ------------------------------------------------------------------------------------------


@pytest.fixture
def gated(tmp_path):
    """Models and a dataset that stop being measured once something was kept, as long as there is a file ``stop``."""
    return write(
        tmp_path / "gated.py",
        """
        import dataclasses, os, pathlib, time, torch, fusedtrain
        from fusedtrain.data import workers

        here = pathlib.Path(__file__).parent
        workers.SECONDS = 0.1

        def gate():
            while (here / "stop").exists() and any(p.suffix in (".json", ".pt") for p in here.glob("cache/**/*")):
                (here / "stopped").touch()
                time.sleep(0.01)

        class Net(torch.nn.Sequential):
            def forward(self, x):
                gate()
                return super().forward(x)

        def net(): return Net(torch.nn.Flatten(), torch.nn.Dropout(), torch.nn.Linear(256, 10))

        class Zeros(torch.utils.data.Dataset):
            def __len__(self): return 100
            def __getitem__(self, index):
                if torch.utils.data.get_worker_info() is not None:
                    gate()
                return torch.zeros(3, 8, 8)

        def two_calls():
            impls = fusedtrain.backend._OPS["squeeze_excite"]
            kernel = impls["reference"]

            def forward(*args):
                gate()
                return kernel.forward(*args)

            impls["reference"] = dataclasses.replace(kernel, forward=forward)
            layers = [torch.nn.Conv2d(1, 8, 1), fusedtrain.nn.SEModule(8), torch.nn.Conv2d(8, 16, 1)]
            layers += [fusedtrain.nn.SEModule(16), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
            return torch.nn.Sequential(*layers)
        """,
    )


# What is tuned; the file and the entry that keeps what was measured; the same in the result.
KILLED = {
    "batch-size": ("net --largest 8 --steps 1 --memory 4", "tune/*.json", "results", lambda r: {"2": r["trials"]["2"]}),
    "lr": ("net --steps 50", "tune/*.pt", "losses", lambda r: r["losses"][:20]),
    "loader": ("Zeros", "loader/*.json", "points", lambda r: {"0": [r["points"]["0"], r["starts"]["0"]]}),
    "backend": ("two_calls --batch-size 2", "backends.json", "entries", lambda r: r["entries"][:1]),
}


@pytest.mark.parametrize("what", KILLED)
def test_what_was_killed_goes_on_from_what_was_kept(what, gated, cache, capsys, monkeypatch):
    (function, *options), file, name, in_result = KILLED[what][0].split(), *KILLED[what][1:]
    network = ["--image", "1x16x16", "--classes", "10", "--device", "cpu", "--model"]
    command = ["tune", what, *(["--data"] if what == "loader" else network), f"{gated}:{function}", *options, "--json"]
    stop, stopped = gated.with_name("stop"), gated.with_name("stopped")
    stop.touch()
    process = harness.start_python("-m", "fusedtrain", *command)
    while process.poll() is None and not stopped.exists():
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    stop.unlink()
    (path,) = cache.glob(file)
    kept = torch.load(path)[name] if path.suffix == ".pt" else json.loads(path.read_text())[name]
    monkeypatch.setattr(fusedtrain.data.workers, "_one_worker", lambda *args: pytest.fail("measured again"))
    monkeypatch.setitem(backend._OPS["squeeze_excite"], "reference", backend._OPS["squeeze_excite"]["reference"])
    monkeypatch.setattr(fusedtrain.data.workers, "SECONDS", 0.1)
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert kept and kept == in_result(json.loads(out))  # times never repeat
    if what == "lr":
        assert err.startswith("goes on after step 20\n")
        assert main([*command, "--fresh"]) == 0
        assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["batch-size", "--image", "3x32"], "--image must be CxHxW, 3x224x224 for instance, got '3x32'"),
        (["batch-size", "--optimizer", "sgd", "--lr", "-1"], "lr must be positive and finite, got -1.0"),
        (["batch-size", "--bogus", "3"], "Unrecognized options: --bogus"),
        (["lr", "--config", "none.yaml"], "none.yaml cannot be read: "),
        (["lr", "--drop-rate", "0.1"], "drop_rate: smallnet takes none"),
        (["lr", "--model", "net.py:net", "--drop-rate", "0.1"], "rates of dropout are for models by name, net.py:net"),
        (["batch-size", "--device", "tpu"], "device must be auto, cpu or cuda, got 'tpu'"),
        (["batch-size", "--smallest", "9", "--largest", "8"], "smallest and largest must be 1 or more and in order"),
        (["lr", "--image", "3x8x8"], "the digits have one channel and are square"),
        (["lr", "--classes", "3"], "classes must be at least 10, that of the digits, got 3"),
        (["backend", "--layers", "stock"], "--layers stock has no fused ops to choose backends for"),
        (["search", "none.yaml"], "none.yaml cannot be read: "),
        (["lr", "--data", "nowhere"], "--data: there is no folder nowhere"),
        (["lr", "--data", ".", "--image", "3x64x32", "--classes", "2"], "images of a folder become 3xNxN, --image is "),
    ],
)
def test_what_cannot_be_tuned_is_said_in_one_line(capsys, arguments, message):
    assert main(["tune", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("fusedtrain tune: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "image"), [("test_efficientnet", "1x32x32"), ("shufflenet_v2_x0_5", "3x32x32"), ("small", "3x8x8")]
)
def test_networks_are_tuned_by_the_names_that_training_knows(zoo, tmp_path, capsys, name, image):
    from PIL import Image

    network = ["--model", name, "--image", image, "--classes", "10", "--device", "cpu"]
    if image[0] == "3":
        for index in range(2):
            (tmp_path / "photos" / f"{index}").mkdir(parents=True)
            for i in range(8):
                Image.new("RGB", (8, 8), (90 * index, 30 * i, 9)).save(tmp_path / "photos" / f"{index}" / f"{i}.png")
        network += ["--data", str(tmp_path / "photos")]
    assert main(["tune", "lr", *network, "--steps", "10", "--batch-size", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 1e-6 <= found["suggested"] <= 1 and found["lowest_loss_at"] >= found["suggested"]
    with pytest.raises(tune.TuneError, match=r"there is no 'no_such_network': timm has no .*; torchvision has no"):
        tune.Target("no_such_network", (1, 32, 32), device="cpu").build()


# Options of training that make another step, and those that do not.
STEPS = ["--model smallnet --optimizer lamb", "--weight-decay 0.1", "--decay-all", "--layer-decay 0.5", "--no-fuse"]
STEPS += ["--freeze conv_stem.*", "--ema-decay 0.9", "--max-grad-norm 0.5", "--accumulate 2", "--precision fp16"]
STEPS += ["--checkpoint-modules blocks.1", "--activation-budget-gib 1", "--compile default", "--seed 3", "--tf32 True"]
STEPS += ["--label-smoothing 0.1", "--mixup 0.2", "--cutmix 0.2", "--nonfinite skip", "--no-channels-last"]
STEPS += ["--model resnet18 --drop-rate 0.1", "--model resnet18 --drop-path-rate 0.1", "--model resnet18 --pretrained"]
OTHERS = ["--epochs 3", "--lr 0.5", "--batch-size 8", "--workers 2", "--no-augment", "--output o", "--profile"]
OTHERS += ["--schedule constant --warmup-epochs 0", "--stop-patience 3", "--directory d", "--log-every 2"]
OTHERS += ["--strategy fsdp", "--sync-batchnorm", "--no-resume", "--mode max"]


def target_of(words: str) -> tune.Target:
    args, args.others = command._parser().parse_known_args(["batch-size", *words.split()])
    return command._target(args, command._options(args))


def test_what_was_measured_is_known_for_the_same_steps_alone(tmp_path):
    known = json.dumps(target_of("").key())
    assert {json.dumps(target_of(words).key()) for words in OTHERS} == {known}
    keys = [json.dumps(target_of(words).key()) for words in STEPS]
    assert len({known, *keys}) == len(STEPS) + 1
    for width in (4, 8):
        torch.save(torch.nn.Linear(width, 2).state_dict(), tmp_path / "w.pt")
        keys.append(json.dumps(target_of(f"--init-weights {tmp_path / 'w.pt'}").key()))
    assert len({known, *keys}) == len(STEPS) + 3
    assert tune.Target("small").key() == tune.Target().key() == tune.Target("smallnet").key()
    here = tune.Target().resolve_device()
    assert tune.Target(device=str(here)).key() == tune.Target(device="auto").key()


def test_the_options_of_a_run_are_those_that_are_tuned(tmp_path):
    for name in ("cats", "dogs", "owls"):
        (tmp_path / "photos" / "train" / name).mkdir(parents=True)
        (tmp_path / "photos" / "train" / name / "0.png").touch()
    own = run.Options(data=str(tmp_path / "photos"), size=48, optimizer="lion", fuse=False)
    own = dataclasses.replace(own, train=TrainConfig(ema_decay=0.5, precision="bf16", device="cpu"))
    train_options.write_yaml(tmp_path / "o.yaml", own)
    found = target_of(f"--config {tmp_path / 'o.yaml'} --weight-decay 0.1 --optimizer adan")
    options = found.options
    assert (found.image, found.classes, options.optimizer) == ((3, 48, 48), 3, "adan")
    assert (options.train.precision.precision, options.train.device, options.train.ema_decay) == ("bf16", "cpu", 0.5)
    assert options.weight_decay == 0.1 and not options.fuse
    train_options.write_yaml(tmp_path / "o.yaml", run.Options(model="resnet18", size=16))
    found = target_of(f"--config {tmp_path / 'o.yaml'}")
    assert (found.image, found.classes, found.options.model) == ((1, 16, 16), 10, "resnet18")
    assert (target_of("--model resnet18").image, target_of("--model resnet18").classes) == ((3, 224, 224), 1000)


@pytest.mark.parametrize(
    "words",
    [
        "--optimizer lamb --ema-decay 0.9 --accumulate 2 --max-grad-norm 0.1 --layer-decay 0.5 --freeze conv_stem.*",
        "--optimizer rmsproptf --checkpoint-modules blocks.1 --weight-decay 0.5 --precision bf16 --label-smoothing 0.1",
        "--optimizer sgd --decay-all --precision fp16 --no-fuse --mixup 0.2",
    ],
)
def test_what_is_tuned_is_the_step_of_training(zoo, words):
    words += " --lr 1 --schedule constant --warmup-epochs 0 --epochs 1 --device cpu --batch-size 8"
    options = run.parse(words.split())
    theirs = run.build(options, World(options.train.distributed, torch.device("cpu")))[0]
    wanted = target_of(words)
    ours, batch = wanted.build(), None
    for trainer in (theirs, ours):
        batch = batch or wanted.batch(8, trainer)
        trainer.fit([batch] * 4)
    states = []
    for trainer in (theirs, ours):
        averages = trainer.averages.state_dict() if trainer.averages else {}
        states.append(trainer.model.state_dict() | {f"average of {name}": t for name, t in averages.items()})
    assert states[0].keys() == states[1].keys() and len(states[0]) > 50
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_averages_of_the_weights_count_in_the_memory_of_a_batch(tmp_path):
    path = write(
        tmp_path / "wide.py",
        """
        import torch
        layers = [torch.nn.Flatten(), torch.nn.Linear(48, 2**18), torch.nn.Linear(2**18, 10)]
        def net(): return torch.nn.Sequential(*layers)
        """,
    )
    weights, peaks = 4 * (48 + 10) * 2**18, {None: [], 0.9: []}  # bytes
    for decay in 3 * [*peaks]:  # in turns: some take more, for as long as others take memory
        options = run.Options(train=TrainConfig(ema_decay=decay))
        wide = tune.Target(f"{path}:net", (3, 4, 4), device="cpu", options=options)
        peaks[decay].append(sizes._trial(wide, 2, 1, None)["peak_bytes"])
    assert min(peaks[0.9]) - min(peaks[None]) > weights / 2


def test_activations_beyond_their_budget_do_not_fit():
    options = run.Options(
        train=TrainConfig(activation_checkpointing=ActivationCheckpointing(activation_budget_gib=0.01))
    )
    small = tune.Target(image=(1, 32, 32), device="cpu", options=options)
    found = tune.tune_batch_size(small, largest=4096, steps=1)
    assert found["largest"] < 4096 and "activation_budget_gib: 0.01 is too small: with every bl" in found["limit"]


def test_a_range_test_with_dropout_and_a_loss_scale_goes_on_bit_by_bit(zoo, tmp_path):
    path = write(
        tmp_path / "drops.py",
        """
        import torch
        def net(): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(), torch.nn.Linear(64, 10))
        """,
    )
    scaled = Precision("fp16", init_scale=2.0**24)  # which falls at the first steps
    options = run.Options(mixup=0.2, train=TrainConfig(precision=scaled, ema_decay=0.5, accumulation=2))
    drops = tune.Target(f"{path}:net", (1, 8, 8), device="cpu", options=options)
    digits, numbers = fusedtrain.data.digits(size=8), {"steps": 30, "batch_size": 8}
    whole = tune.tune_lr(drops, digits, **numbers, data_key="digits")
    assert len(whole["losses"]) == 30

    class Stopped(Exception):
        pass

    def stop(line):
        raise Stopped

    with pytest.raises(Stopped):
        tune.tune_lr(drops, digits, **numbers, data_key="again", progress=stop)
    lines = []
    assert tune.tune_lr(drops, digits, **numbers, data_key="again", progress=lines.append) == whole
    assert lines == ["goes on after step 20"]
    with pytest.raises(Stopped):  # one that began anew is what goes on, not what was there before
        tune.tune_lr(drops, digits, **numbers, data_key="again", fresh=True, progress=stop)
    assert tune.tune_lr(drops, digits, **numbers, data_key="again", progress=lines.append) == whole
    assert lines == ["goes on after step 20"] * 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_range_test(models, number):
    calls = iter(range(100))

    class Signalled(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            if next(calls) == 9:
                os.kill(os.getpid(), number)
            return torch.zeros(3, 4, 4), 0

    kind = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with pytest.raises(kind):
        tune.tune_lr(target(models, "hungry"), Signalled(), steps=20, batch_size=1, data_key="signalled")


@pytest.mark.parametrize("what", ["loader", "search"])
def test_options_of_training_are_not_for_every_tuner(what, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["tune", what, "x.yaml" if what == "search" else "--data=x", "--ema-decay", "0.9"])
    assert "unrecognized arguments: --ema-decay 0.9" in capsys.readouterr().err


def test_a_function_is_named_by_its_file(models):
    with pytest.raises(tune.TuneError, match="has no function 'none'"):
        load(f"{models}:none")
    with pytest.raises(tune.TuneError, match="number must return a module, got int"):
        target(models, "number").build()


def test_a_broken_state_is_forgotten():
    state = State("x", {"a": 1})
    state.add(3, {"b": 2})
    assert State("x", {"a": 1}).get(3) == {"b": 2}
    assert State("x", {"a": 2}).get(3) is None and State("x", {"a": 1}, fresh=True).get(3) is None
    assert State("x", {"a": 1}).get(3) is None
    state.path.write_text("{")
    assert State("x", {"a": 1}).results == {}


def test_what_is_known_of_a_file_is_known_of_its_content_in_its_place(tmp_path, monkeypatch):
    keys = []
    for folder, width in (("a", 4), ("b", 4), ("b", 8)):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "model.py").write_text(f"import torch\ndef make(): return torch.nn.Linear({width}, 2)\n")
        monkeypatch.chdir(tmp_path / folder)
        keys += [tune.Target("model.py:make", device="cpu").key(), tune.Target("model.py:make", device="cpu").key()]
    assert keys[::2] == keys[1::2] and len({json.dumps(key) for key in keys}) == 3


def test_what_is_known_of_a_file_is_known_of_the_neighbours_that_it_imports(tmp_path):
    make = "def make():\n    from nets.deep import net\n    return net()\n"
    contents = {"make.py": make, "nets/deep.py": "from . import parts\nimport torch\n", "nets/parts.py": ""}
    contents |= {"nets/other.py": "", "broken.py": "def"}
    (tmp_path / "nets").mkdir()
    keys = []
    for changed in (None, "nets/other.py", "broken.py", "nets/deep.py", "nets/parts.py", "make.py"):
        for name, text in contents.items():
            (tmp_path / name).write_text(text + "# changed\n" * (name == changed))
        keys.append(json.dumps(tune.Target(f"{tmp_path / 'make.py'}:make", device="cpu").key()))
    assert keys[0] == keys[1] == keys[2] and len(set(keys)) == 4


def test_a_function_imports_its_neighbours_when_it_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "its_neighbour.py").write_text("value = 3\n")
    path = write(tmp_path / "late.py", "def number():\n    from its_neighbour import value\n    return value\n")
    assert load(f"{path}:number")() == 3


def test_trials_without_a_number_fail_and_count(tmp_path, capsys):
    code = "def f(params, report):\n    report(1, float('nan'))\n    return float(params['x'])\n"
    objective = write(tmp_path / "objective.py", code)
    space = {"objective": f"{objective}:f", "params": {"x": ["nan", 1.0]}, "sampler": "grid", "trials": 2}
    path = write(tmp_path / "space.yaml", json.dumps(space))
    for _ in range(2):
        assert main(["tune", "search", str(path), "--json"]) == 0
        out, err = capsys.readouterr()
        found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert (found["complete"], found["failed"]) == (1, 1)
        (failed,) = (t for t in found["trials"] if t["state"] == "fail")
        assert failed["error"] == "ValueError: the value is not a number"
    assert "2 of 2 trials are done already" in err


def test_a_storage_is_of_one_metric():
    loss, accuracy = (tune.Space({"x": [1, 2]}, command="run {x}", metric=name) for name in ("loss", "accuracy"))
    for known in ({}, {"space": {"params": {"x": [1, 2]}, "direction": "minimize", "task": "run {x}"}}):  # an old one
        study = types.SimpleNamespace(user_attrs=known, set_user_attr=known.__setitem__)
        for _ in range(2):
            _check(study, loss)
        with pytest.raises(tune.TuneError, match="another search: its metric is loss, not accuracy"):
            _check(study, accuracy)


def test_a_trial_whose_parameters_cannot_be_drawn_fails_and_counts():
    class Trial:
        number, user_attrs = 3, {}

        def suggest_float(self, *args, **options):
            raise RuntimeError("no more points")

        def set_user_attr(self, name, value):
            self.user_attrs[name] = value

    lines = queue.SimpleQueue()
    with pytest.raises(RuntimeError, match="no more points"):
        _one(Trial(), tune.Space({"x": {"low": 0.0, "high": 1.0}}, objective="f.py:f"), float, lines)
    assert Trial.user_attrs == {"error": "RuntimeError: no more points"}
    assert lines.get() == "trial 3: failed: RuntimeError: no more points"


def test_the_package_of_a_sampler_is_asked_for_before_a_trial(space, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(PACKAGES, "cmaes", "no_such_package")
    assert main(["tune", "search", str(space(sampler="cmaes"))]) == 1
    assert capsys.readouterr().err.endswith(" is not installed: pip install no_such_package\n")
    assert not (tmp_path / "space.db").exists()


def test_texts_stay_texts_and_numbers_that_yaml_takes_for_texts_do_not():
    choices = ["16", "nan", "1e-4", "2.5E3", "3.10"]
    space = tune.Space({"a": choices, "b": {"low": "1e-5", "high": 1}}, objective="f.py:f")
    assert space.params == {"a": ["16", "nan", 1e-4, 2500.0, "3.10"], "b": {"low": 1e-5, "high": 1}}


def test_a_command_is_pruned_while_it_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    program = write(
        tmp_path / "program.py",
        """
        import json, os, sys, time
        later = os.path.exists(f"{sys.argv[0]}.begun")
        open(f"{sys.argv[0]}.begun", "w").close()
        for step in range(1, 40):
            print(json.dumps({"loss": float(later), "step": step}))  # not flushed
            time.sleep(0.05 * later)
        if later:
            open(f"{sys.argv[0]}.ended", "w").close()
        """,
    )
    path = tmp_path / "space.yaml"
    path.write_text(
        f"command: python {program} {{x}}\nmetric: loss\nparams: {{x: [0, 1]}}\ntrials: 2\n"
        "sampler: {name: grid, seed: 0}\npruner: {name: percentile, percentile: 0.0, n_startup_trials: 1}\n"
    )
    assert main(["tune", "search", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pruned"] == 1 and not program.with_name("program.py.ended").exists()


def test_a_search_is_kept_wherever_its_space_lies(tmp_path):
    name = "a b%20c{d}#e?f"
    folder = tmp_path / name
    folder.mkdir()
    write(folder / "o.py", "def f(params, report):\n    return 1.0\n")
    (folder / "space.yaml").write_text(json.dumps({"objective": f"{folder}/o.py:f", "params": {"x": [1]}, "trials": 1}))
    assert main(["tune", "search", str(folder / "space.yaml")]) == 0
    assert (folder / "space.db").stat().st_size and [p.name for p in tmp_path.iterdir()] == [name]


def test_trials_have_the_environment_that_the_search_has_now(space, tmp_path, monkeypatch):
    """A server of forks keeps the environment that it was started with."""
    own = write(
        tmp_path / "own.py",
        """
        import os

        def number(params, report):
            return float(os.environ["OWN"])

        def net():
            raise RuntimeError(os.environ["OWN"])
        """,
    )
    path = space(objective=f"{own}:number", params="{x: [1]}", trials=1, sampler="grid")
    for value in ("3", "4"):
        monkeypatch.setenv("OWN", value)
        found = tune.search(tune.read_space(path), tmp_path / f"{value}.db")
        assert found["best"]["value"] == float(value)
        with pytest.raises(tune.TuneError, match=f"a batch of 2: RuntimeError: {value}"):
            tune.tune_batch_size(target(own, "net"), smallest=2, steps=1)

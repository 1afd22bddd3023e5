"""The command line: runs in processes of their own, away from the source tree; refusals in this one."""

import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import forked
import harness
import pytest
import torch

import fusedtrain
from fusedtrain.cli import main
from fusedtrain.train import SmallNet


def command(*arguments: str, cwd, **env) -> subprocess.CompletedProcess:
    words = [sys.executable, "-m", "fusedtrain", *arguments]
    return forked.run(words, cwd=cwd, env=harness.environment(COLUMNS="200", **env), timeout=600)  # hangs only


@pytest.fixture(scope="module")
def main_run(tmp_path_factory):
    """``fusedtrain train`` with no arguments: its folder and its output."""
    folder = tmp_path_factory.mktemp("run")
    done = command("train", cwd=folder, GLIBC_TUNABLES=None)
    assert done.returncode == 0, done.stderr
    (output,) = (folder / "runs").iterdir()
    return output, done.stdout


def test_the_digits_are_learnt_to_97_percent_with_fused_and_with_stock_layers(main_run):
    output, _ = main_run
    results = json.loads((output / "results.json").read_text())["results"]
    assert list(results) == ["fused", "stock"]
    for layers, result in results.items():
        assert result["accuracy"] >= 0.97, f"{layers}: {result['accuracy']}"
        assert result["images_per_second"] > 0
        assert len(result["history"]["epochs"]) == 5 and len(result["history"]["step_losses"]) == 5 * 23


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_digits_are_trained_on_a_gpu(tmp_path):
    for package in ("tyro", "sklearn"):
        pytest.importorskip(package)
    done = command("train", "--epochs", "1", "--device", "cuda", "--output", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert all(result["peak_memory"] > 0 for result in results.values())


def test_the_output_ends_in_a_table_of_both_variants(main_run):
    output, text = main_run
    for word in ("layers", "val accuracy", "val loss", "train loss", "images/s", "peak memory"):
        assert word in text
    results = json.loads((output / "results.json").read_text())
    for layers, result in results["results"].items():
        rows = [line for line in text.splitlines() if line.startswith("│") and layers in line]
        assert len(rows) == 1 and f"{result['accuracy']:.2%}" in rows[0] and f"{result['valid_loss']:.4f}" in rows[0]
    assert f"{results['largest_loss_difference']['all_steps']:.1e} in all 115" in text
    assert text.count("val accuracy") == 2 * 5 + 1, "one line per epoch and variant, and the table's head"


def test_the_weights_of_both_variants_load_into_the_stock_model(main_run):
    output, _ = main_run
    for layers in ("fused", "stock"):
        SmallNet(10, layers="stock").load_state_dict(torch.load(output / f"{layers}.pt", weights_only=True))


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_losses_are_drawn(main_run):
    output, _ = main_run
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the run is on the GPU")
def test_training_processes_keep_their_memory(main_run):
    output, _ = main_run
    for result in json.loads((output / "results.json").read_text())["results"].values():
        assert result["info"]["allocator"]["page_faults"].startswith("no")
        assert "mmap_threshold" in result["info"]["environment"]["GLIBC_TUNABLES"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_left_is_no_traceback(unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    env = harness.environment(PYTHONUNBUFFERED=unbuffered)
    with os.fdopen(writer, "wb") as pipe:
        words = [sys.executable, "-m", "fusedtrain", "info"]
        done = subprocess.run(words, cwd=os.sep, stdout=pipe, stderr=subprocess.PIPE, env=env, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")


# Of stock layers only what costs little: their bfloat16 takes minutes on CPUs without instructions for it.
@pytest.mark.parametrize(("layers", "precision"), [("stock", "fp32"), ("fused", "bf16")])
def test_options_reach_the_run_and_the_users_allocator_settings_are_left_alone(
    tmp_path, monkeypatch, capsys, layers, precision
):
    options = {"epochs": 1, "batch_size": 256, "lr": 0.001, "precision": precision, "device": "cpu", "seed": 7}
    options |= {"layers": layers, "output": "here"}
    arguments = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    done = command("train", *arguments, cwd=tmp_path, GLIBC_TUNABLES="")
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "here" / "results.json").read_text())
    assert content["options"] == options
    assert list(content["results"]) == [layers] and content["largest_loss_difference"] is None
    assert len(content["results"][layers]["history"]["step_losses"]) == 6
    assert content["results"][layers]["info"]["environment"]["GLIBC_TUNABLES"] == ""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--output", "here"]) == 2
    err = capsys.readouterr().err
    assert err == "fusedtrain train: here holds the results of an earlier run; choose another --output\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "epochs must be at least 1, got 0"),
        (["--batch-size", "0"], "batch size must be at least 1, got 0"),
        (["--lr", "-1"], "lr must be positive and finite, got -1.0"),
        (["--lr", "inf"], "lr must be positive and finite, got inf"),
        (["--seed", "-1"], "seed must lie between 0 and 2**32 - 1, got -1"),
        (["--device", "tpu9"], "device must be auto, cpu or cuda, got 'tpu9'"),
        (["--output", "file/folder"], "the output folder cannot be made: "),
    ],
)
def test_bad_values_get_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["train", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"fusedtrain train: {message}") and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "arguments", [["--precision", "fp8"], ["--layers", "none"], ["--epoch", "3"], ["extra"], ["--model", "a", "--lrs"]]
)
def test_options_that_do_not_exist_are_refused(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("fusedtrain train: ") and err.count("\n") == 1
    assert arguments[-1] in err.replace(arguments[0], arguments[-1])
    assert list(tmp_path.iterdir()) == []


def test_help_shows_every_option_with_meaning_and_default(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert not stop.value.code
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for option, default in {
        "--epochs": "5",
        "--batch-size": "64",
        "--lr": "0.003",
        "--precision": "fp32",
        "--device": "auto",
        "--seed": "0",
        "--layers": "both",
        "--output": "runs/digits-<time>",
    }.items():
        _, found, rest = text.partition(option + " ")
        assert found, f"{option} is missing"
        meaning, found, rest = rest.partition("(default: ")
        assert found and len(meaning.split()) > 3 and "--" not in meaning, f"{option}: {meaning}"
        assert rest.startswith(default + ")"), f"{option}: {rest[:30]}"


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--help"], 0, "\n  train "),
        (["--help"], 0, "\n  info "),
        (["--version"], 0, f"fusedtrain {fusedtrain.__version__}\n"),
        ([], 2, "usage: fusedtrain"),
        (["fly"], 2, "usage: fusedtrain"),
    ],
)
def test_commands_are_listed_and_required(capsys, arguments, status, text):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == status and text in "".join(capsys.readouterr())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_the_second_start_of_a_command_imports_what_the_first_did(tmp_path):
    """A script looks for modules in its own folder, ``python -m`` in the current one, where others may stand."""
    script, here = tmp_path / "bin" / "fusedtrain", tmp_path / "here"
    script.parent.mkdir()
    here.mkdir()
    script.write_text("import sys; from fusedtrain.cli import main; sys.exit(main())\n")
    (here / "sklearn.py").write_text("raise SystemExit('this is not the one')\n")
    words = ["train", "--model", "smallnet", "--size", "8", "--epochs", "1", "--device", "cpu", "--output", "out"]
    env = harness.environment(GLIBC_TUNABLES=None, PYTHONPATH=str(Path(fusedtrain.__file__).parents[1]))
    done = forked.run([sys.executable, "-W", "ignore", str(script), *words], cwd=here, env=env, timeout=600)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert (here / "out" / "weights.pt").exists()


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def trainer_of(command: int) -> int:
    """The process that trains: a fork of a server, which is a child of the command."""
    (trainer,) = (grandchild for child in children_of(command) for grandchild in children_of(child))
    return trainer


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted alone"])
def test_a_command_that_ends_takes_its_training_process_along(tmp_path, number):
    arguments = ["-m", "fusedtrain", "train", "--epochs", "1000", "--device", "cpu", "--output", str(tmp_path / "run")]
    process = harness.start_python(*arguments, pipes={"stdout": subprocess.PIPE})
    assert "epoch    1/1000" in process.stdout.readline()
    trainer = trainer_of(process.pid)
    process.send_signal(number)
    try:
        process.communicate(timeout=90)  # returns when nobody holds the other end of its output any more
    except subprocess.TimeoutExpired:
        os.kill(trainer, signal.SIGKILL)
        raise AssertionError("the training process goes on without the command") from None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("trainer", "the process that trained with fused layers crashed or was killed; "),
        ("training worker", ".*worker .* killed by .*; the system kills"),
        ("validation worker", ".*worker .* killed by .*; the system kills"),  # of which torch tells wherever the run is
    ],
)
def test_a_process_of_a_run_that_the_system_kills_is_one_line(tmp_path, which, message):
    arguments = [] if which == "trainer" else ["--model", "smallnet", "--size", "8", "--workers", "1"]
    words = [sys.executable, "-m", "fusedtrain", "train", *arguments, "--epochs", "1000", "--device", "cpu"]
    env = harness.environment(GLIBC_TUNABLES="")  # no second start
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with forked.Python(words, cwd=tmp_path, env=env, **pipes) as process:
        try:
            while "1/1000" not in (line := process.stdout.readline()):
                assert line, process.stderr.read()
            if which == "trainer":
                killed = trainer_of(process.pid)
            else:
                killed = children_of(process.pid)[-1 if which == "validation worker" else 0]
            os.kill(killed, signal.SIGKILL)
            err = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    # A thread that hands tensors over to the worker may tell of its own broken connection before.
    assert process.returncode == 1 and re.search(f"^fusedtrain train: {message}.*\\n\\Z", err, re.MULTILINE), err


@pytest.mark.parametrize("package", ["tyro", "rich", "sklearn"])
def test_train_without_its_extra_says_what_to_install(tmp_path, package):
    program = f"import sys; sys.modules[{package!r}] = None; from fusedtrain.cli import main; sys.exit(main(['train']))"
    done = forked.run([sys.executable, "-c", program], cwd=tmp_path, env=harness.environment(), timeout=600)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        f"fusedtrain train: needs the package {package}, which is not installed: pip install 'fusedtrain[train]'\n"
    )


@pytest.mark.parametrize("command", ["train", "check"])
def test_images_without_the_package_that_reads_them_say_what_to_install(tmp_path, command):
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "PIL.py").write_text("raise ModuleNotFoundError(name='PIL')\n")  # for new processes, too
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    words = ["-m", "fusedtrain", command, "--model", "smallnet", "--data", str(tmp_path / "photos")]
    done = harness.run_python(*words, GLIBC_TUNABLES="", PYTHONPATH=path)
    message = "data: needs the package PIL, which is not installed: pip install 'fusedtrain[data]'"
    assert done.returncode == 2 and done.stderr == f"fusedtrain {command}: {message}\n"

"""What fusedtrain.info() and ``fusedtrain info`` tell."""

import json
import os
import platform
import sys

import forked
import harness
import pytest
import torch

import fusedtrain
from fusedtrain import _allocator, _extension, _info

SECTIONS = ["versions", "build", "cpu", "gpus", "backends", "allocator", "environment"]


def info_of_a_process(*arguments: str, without=(), **env) -> str:
    program = f"import sys; sys.modules.update(dict.fromkeys({list(without)!r})); from fusedtrain.cli import main"
    command = [sys.executable, "-c", f"{program}; sys.exit(main(['info', *{list(arguments)!r}]))"]
    done = forked.run(command, cwd=os.sep, env=harness.environment(**env), timeout=60)  # away from the source tree
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_text_and_json_tell_the_same(capsys):
    found = fusedtrain.info(as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed == found and list(found) == SECTIONS
    text = fusedtrain.info()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == SECTIONS
    for entries in (text["versions"], text["backends"]):
        for name, value in entries.items():
            assert any(line.split() == [*name.split(), *str(value or "none").split()] for line in lines), name


def test_versions_are_those_in_use():
    versions = _info.collect()["versions"]
    assert versions["torch"] == torch.__version__
    assert versions["fusedtrain"] == fusedtrain.__version__
    assert versions["python"] == platform.python_version()


def test_build_tells_what_was_built_or_why_not():
    found = _info.collect()
    if not _extension.LOADED:
        assert found["build"] == {"extension": f"not loaded: {_extension.WHY_NOT}"} and found["cpu"]["isa"] is None
        return
    assert found["build"]["extension"] == "loaded" and found["build"]["compiler"]
    isa = found["cpu"]["isa"]
    variant = "avx512" if isa.endswith("_bf16") else isa  # its code, with instructions for bfloat16
    assert variant in found["build"]["isa_variants"]


@pytest.mark.parametrize("name", fusedtrain.backend.BACKENDS)
def test_a_backend_is_called_available_exactly_where_it_can_be_forced(name, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # as outside the tests
    verdict = _info.collect()["backends"][name]
    device = "cuda" if torch.cuda.is_available() and name != "cpu" else "cpu"
    x = torch.randn(1, 4, 3, 3, device=device)
    with fusedtrain.use_backend(name):
        if verdict == "available":
            assert fusedtrain.ops.channel_pool(x).shape == (1, 4)
        else:
            with pytest.raises(RuntimeError, match=f"backend '{name}' is forced"):
                fusedtrain.ops.channel_pool(x)


def test_a_gpu_that_others_have_filled_is_told(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "cuda", full)
    assert _info.collect()["backends"]["cuda"] == "the GPU takes no tensor: CUDA error: out of memory"


def test_info_needs_nothing_but_torch():
    extras = ["tyro", "rich", "sklearn", "numpy", "matplotlib", "tensorboard", "yaml", "triton"]
    found = json.loads(info_of_a_process("--json", without=extras))
    assert list(found) == SECTIONS


def test_overrides_in_force_are_shown():
    found = json.loads(info_of_a_process("--json", FUSEDTRAIN_BACKEND="reference", OMP_NUM_THREADS="1", HOME="/"))
    assert found["environment"]["FUSEDTRAIN_BACKEND"] == "reference"
    assert found["environment"]["OMP_NUM_THREADS"] == "1" and found["cpu"]["threads"] == 1
    assert "HOME" not in found["environment"]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_page_faults_are_measured_and_gone_with_the_tunables():
    def allocator(tunables):
        return json.loads(info_of_a_process("--json", GLIBC_TUNABLES=tunables, LD_PRELOAD=None))["allocator"]

    before, after = allocator(None), allocator(_allocator.TUNABLES)
    assert before["page_faults"].startswith("yes") and before["tunables"] is None
    assert after["page_faults"].startswith("no") and after["tunables"] == _allocator.TUNABLES
    assert after["faults_per_mib"] < before["faults_per_mib"]

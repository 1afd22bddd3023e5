"""Fused layers and optimizers in other people's trainers: the examples, run as their readers would run them.

Lightning, Accelerate and Transformers are not among the tests' requirements: where they are missing, the tests are
skipped.
"""

import importlib.util
import re
import sys
from pathlib import Path

import forked
import harness
import pytest

TESTS = Path(__file__).parent
EXAMPLES = TESTS.parent / "examples"


def run(
    script: str, ranks: int, folder: Path, *options: str, printed: str = "accuracy NUMBER  weights NUMBER"
) -> list[tuple]:
    """What every process printed: accuracy and norm of the weights."""
    command = [sys.executable, "-W", "ignore"]
    if ranks > 1:
        command += [str(TESTS / "torchrun.py"), "--standalone", f"--nproc_per_node={ranks}"]
    command += [str(TESTS / "zoo_child.py"), str(EXAMPLES / script), *options]
    # Two processes need two GPUs, which are not everywhere.
    env = harness.environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    done = forked.run(command, env=env, cwd=folder, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = re.findall(printed.replace("NUMBER", r"([\d.]+)"), done.stdout)
    assert len(found) == ranks, done.stdout[-2000:]
    return [tuple(map(float, numbers)) for numbers in found]


@pytest.mark.parametrize("package", ["lightning", "accelerate", "transformers"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_network_learns_in_the_trainer_of_another_package(package, ranks, tmp_path):
    if importlib.util.find_spec(package) is None:  # not imported here: it may need what zoo_child mends
        pytest.skip(f"{package} is not installed, and no requirement of the tests")
    script = {"lightning": "lightning_trainer", "accelerate": "accelerate_loop", "transformers": "transformers_trainer"}
    found = run(f"{script[package]}.py", ranks, tmp_path)
    assert all(accuracy > 0.9 for accuracy, _ in found)
    assert len({weights for _, weights in found}) == 1  # the ranks agree


def test_a_network_learns_in_timms_script(tmp_path, zoo):
    found = run("timm_script.py", 2, tmp_path)
    assert all(accuracy > 0.5 for accuracy, _ in found)  # chance: 0.1
    assert len({weights for _, weights in found}) == 1


def test_a_trained_network_infers_in_int8(tmp_path):
    pytest.importorskip("torchao", reason="torchao is not installed")
    printed = "accuracy NUMBER  int8 NUMBER  quantized NUMBER"
    ((accuracy, int8, layers),) = run("int8_inference.py", 1, tmp_path, "--epochs", "3", printed=printed)
    assert accuracy > 0.9 and int8 > accuracy - 0.02 and layers >= 10
    assert (tmp_path / "int8.pt2").stat().st_size > 0

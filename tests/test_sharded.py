"""Checkpoints that are spread over ranks; the scenes stand in sharded_ranks.py."""

import platform
from pathlib import Path

import harness
import pytest


@pytest.mark.skipif(platform.system() != "Linux", reason="the ranks are forks, which only Linux supports with torch")
def test_ranks_save_and_any_number_of_ranks_resumes(tmp_path):
    done = harness.run_python(Path(__file__).parent / "sharded_ranks.py", tmp_path)
    assert done.returncode == 0 and done.stdout == "all is well\n", done.stdout + done.stderr

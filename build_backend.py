"""PEP 517 backend: setuptools, but the torch that the extension is built against is the one it will run with.

Build isolation would otherwise fetch another torch. The environment of the interpreter that runs pip is asked for its
torch; setup.py appends that environment's folders behind the isolated ones. Only where there is none is torch required.
"""

import os
import subprocess
import sys

from setuptools import build_meta as _setuptools
from setuptools.build_meta import *  # noqa: F403

_ISOLATION = ("PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE")


def target_site_packages() -> list[str]:
    """Returns the import path of the target environment when it holds torch, else an empty list."""
    probe = (
        "import importlib.util, sys; print('\\n'.join(p for p in sys.path if importlib.util.find_spec('torch') and p))"
    )
    env = {key: value for key, value in os.environ.items() if key not in _ISOLATION}
    result = subprocess.run(
        [sys.executable, "-c", probe], env=env, capture_output=True, text=True, check=False, cwd="/"
    )
    return [path for path in result.stdout.splitlines() if path.endswith(("site-packages", "dist-packages"))]


def _torch_if_missing() -> list[str]:
    return [] if target_site_packages() else ["torch>=2.10"]


def get_requires_for_build_wheel(config_settings=None):
    return _setuptools.get_requires_for_build_wheel(config_settings) + _torch_if_missing()


def get_requires_for_build_editable(config_settings=None):
    return _setuptools.get_requires_for_build_editable(config_settings) + _torch_if_missing()

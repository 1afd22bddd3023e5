"""Runs a script where timm and torchvision can be imported as :class:`harness.Zoo` does: ``zoo_child.py SCRIPT``."""

import contextlib
import runpy
import sys

import harness

if __name__ == "__main__":
    with contextlib.suppress(ImportError):
        harness.Zoo()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")

"""Runs a script where timm and torchvision can be imported as :class:`zoo.Zoo` does: ``zoo_child.py SCRIPT``."""

import contextlib
import runpy
import sys

from zoo import Zoo

if __name__ == "__main__":
    with contextlib.suppress(ImportError):
        Zoo()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")

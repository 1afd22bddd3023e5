"""Places in the user's code: which frames of a call stack are the user's, and where in them a call stands."""

import itertools
import os
import sys
from dataclasses import dataclass, field

import torch

_OWN = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    os.path.dirname(torch.__file__),
    os.path.dirname(os.__file__),
)


@dataclass(frozen=True)
class Site:
    """A place in the user's code.

    Attributes:
        end: line and byte in it where a call ends that is being carried out, which tells calls on one line apart; None:
            not known.
    """

    file: str
    line: int
    end: tuple[int, int] | None = field(default=None, compare=False)


def place(code) -> tuple[str, str]:
    """Returns how a function is found in a stack: its file and its name."""
    return code.co_filename, code.co_name


def is_users(file: str) -> bool:
    """Returns whether code of a file is neither torch's, Python's nor ours, nor generated."""
    if file.startswith("<") and not file.startswith("<ipython-input"):  # of a notebook's cell
        return False
    return not file.startswith(_OWN) and "site-packages" not in file


def _users(frame):
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_frame(frame) -> Site | None:
    """Returns the place of the innermost frame of a call stack that is the user's."""
    frame = _users(frame)
    if frame is None:
        return None
    return Site(frame.f_code.co_filename, frame.f_lineno or frame.f_code.co_firstlineno)  # some belong to no line


def call_site() -> Site | None:
    """Returns the place in the user's code that is being carried out."""
    return user_frame(sys._getframe(1))


def exact_site() -> Site | None:
    """Returns the same with the end of the call: for what is called rarely, as long functions are searched for it."""
    frame = _users(sys._getframe(1))
    site = user_frame(frame)
    if site is None or not hasattr(frame.f_code, "co_positions"):  # from Python 3.11 on
        return site
    _, line, _, column = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    return site if line is None or column is None else Site(site.file, site.line, (line, column))

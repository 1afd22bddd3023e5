"""The error for what a training run cannot be told."""

import itertools
import os
from numbers import Real
from pathlib import Path


class InputError(Exception):
    """The user's options, data or model do not fit together; the message is one line and says what to change."""


def require(condition: bool, message: str) -> None:
    """Raises InputError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise InputError(message)


def require_count(name: str, value, least: int = 1) -> None:
    """Raises InputError unless ``value`` is a whole number of at least ``least``."""
    require(isinstance(value, Real) and value % 1 == 0, f"{name} must be a whole number, got {value!r}")
    require(value >= least, f"{name} must be at least {least}, got {value}")


def make_folder(path: Path | str, what: str) -> Path:
    """Makes a folder that will be written to, where it is missing; InputError where that cannot be."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{what} cannot be made: {error}") from None
    require(os.access(path, os.W_OK), f"{what} cannot be written to: {path}")
    return path


def new_folder(path: Path, what: str) -> Path:
    """Makes a folder that no other run has: ``path``, with a number behind where several start in the same second."""
    for number in itertools.count(1):
        own = path if number == 1 else path.with_name(f"{path.name}-{number}")
        make_folder(own.parent, what)
        try:
            own.mkdir()
        except FileExistsError:
            continue
        return own

"""Files that are either complete or not there."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch
from torch import nn


def write_atomic(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Lets ``write`` fill a file beside ``path``, brings it to the disk, then gives it its name in one step.

    A reader, and whoever starts after a crash, sees the old file or the new one, never a part.
    """
    path = Path(path)
    # In the same folder: only within one file system is the renaming atomic.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the new name lives in the folder, which must reach the disk too
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def save_weights(path: Path, model: nn.Module) -> None:
    """Writes the model's state_dict, which ``torch.load(path, weights_only=True)`` reads on any machine.

    The keys are those of the model with stock layers, which loads it as it is.
    """
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    write_atomic(path, lambda file: torch.save(state, file))

"""Kills a process again and again while it saves, and reads what it left: ``python tests/kill_saving.py FOLDER``.

Every child saves checkpoints in a loop, with keep=1, and tells each one that :meth:`save` returned from. After every
kill there must be a whole checkpoint, and not an older one than the last that was told.
"""

import argparse
import os
import random
import signal
import time
from pathlib import Path

import torch

from fusedtrain.train.checkpoint import CheckpointError, CheckpointStore


def save_forever(folder: Path, asynchronous: bool, tell: int) -> None:
    """The child: never returns."""
    store = CheckpointStore(folder, keep=1, asynchronous=asynchronous)
    step = store.load()[1].step
    while True:
        step += 1
        store.save(step, {"weight": torch.full((100_000,), float(step)), "step": step})
        told = step - asynchronous  # the one before is written when an asynchronous save returns
        os.write(tell, told.to_bytes(8, "little"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    store, draw = CheckpointStore(options.folder, keep=1), random.Random(0)
    store.save(0, {"weight": torch.zeros(100_000), "step": 0})
    lost = older = saves = halves = 0
    for kill in range(options.kills):
        reads, tells = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reads)
            save_forever(options.folder, kill % 2 == 1, tells)
        os.close(tells)
        os.read(reads, 8)  # it is saving from here on
        time.sleep(draw.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        told = b"".join(iter(lambda reads=reads: os.read(reads, 8), b""))
        os.close(reads)
        saves += len(told) // 8
        halves += any(options.folder.glob(".*.tmp"))
        try:
            state, info = CheckpointStore(options.folder).load()
        except CheckpointError as error:
            print(error)
            lost += 1
            continue
        older += bool(told) and info.step < int.from_bytes(told[-8:], "little")
        assert state["step"] == info.step and state["weight"].unique().tolist() == [info.step]
    print(f"{lost} of {options.kills} kills left no usable checkpoint, {older} an older one than was told")
    print(f"{saves} saves; {halves} kills hit a file half written")
    return int(lost > 0 or older > 0 or halves == 0)


if __name__ == "__main__":
    raise SystemExit(main())

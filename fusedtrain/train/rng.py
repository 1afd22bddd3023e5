"""The state of everything random in a process, and randomness that belongs to a sample instead of a worker."""

import hashlib
import random
import sys
from collections.abc import Sequence

import torch
from torch.utils.data import Dataset, get_worker_info


def rng_state() -> dict:
    """Returns the state of Python's, NumPy's (where it is imported), torch's and all CUDA devices' default generators,
    as plain values and tensors that a checkpoint holds."""
    state = cpu_state()
    if torch.cuda.is_initialized():  # is_available() would start the driver
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict) -> None:
    """Continues where :func:`rng_state` was called; CUDA devices that this machine lacks are left out."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        import numpy as np

        kind, key, *rest = state["numpy"]
        np.random.set_state((kind, key.cpu().numpy().astype(np.uint32), *rest))
    for device, value in enumerate(state.get("cuda", ())):  # without one, GPUs are not counted: that asks NVML
        if device < torch.cuda.device_count():
            torch.cuda.set_rng_state(value.cpu(), device)


def cpu_state() -> dict:
    """The same without the CUDA devices."""
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, key, *rest = numpy.random.get_state()
        # int64: torch cannot pickle uint32 tensors, and processes exchange this state.
        state["numpy"] = (kind, torch.from_numpy(key.astype("int64")), *rest)
    return state


def seed_all(seed: int) -> None:
    """Seeds Python's, NumPy's (where it is imported) and torch's default generators on all devices."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def mix(seed: int, epoch: int, index: int) -> int:
    """Returns 64 well-mixed bits that depend on nothing but the three whole numbers."""
    return int.from_bytes(hashlib.blake2b(b"%d %d %d" % (seed, epoch, index), digest_size=8).digest(), "little")


class EpochIndex(int):
    """An index that knows its epoch, so that a worker that lives for many epochs knows it too. Any dataset takes it for
    the plain number."""

    epoch = 0

    def __new__(cls, index: int, epoch: int):
        self = super().__new__(cls, index)
        self.epoch = epoch
        return self

    def __reduce__(self):
        return EpochIndex, (int(self), self.epoch)


class SeededDataset(Dataset):
    """Gives every sample randomness of its own: a function of (seed, epoch, index), whatever worker loads it and what
    was loaded before.

    Before ``dataset[index]`` the default generators of Python, NumPy (where it is imported) and torch on the CPU are
    seeded; in the main process their states come back after the batch. Generators that the dataset keeps for itself
    are not seen: let them draw their seed from one of the three.

    Args:
        dataset: map-style, any.
        seed: of the run.

    Cost: 8 us a sample, and without workers 80 us a batch more, most of it for NumPy's state.
    """

    one_by_one_in_workers = True  # there no states have to come back after a batch

    def __init__(self, dataset: Sequence, seed: int = 0):
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list) -> list:
        if get_worker_info() is not None:  # nothing else in a worker draws numbers
            return [self._sample(index) for index in indices]
        state = cpu_state()
        try:
            return [self._sample(index) for index in indices]
        finally:
            set_rng_state(state)

    def _sample(self, index):
        _seed(mix(self.seed, getattr(index, "epoch", 0), int(index)))
        return self.dataset[index]


# Python's default generator, and what random.seed calls for a whole number: the function around it takes a microsecond.
_PYTHON = random.seed.__self__
_seed_python = super(random.Random, _PYTHON).seed


def _seed(bits: int) -> None:
    """Seeds Python's, NumPy's and torch's CPU generator from 64 bits, quickly: torch.manual_seed costs 75 us."""
    _seed_python(bits)
    _PYTHON.gauss_next = None  # the second of two normal numbers that were drawn at once
    torch.default_generator.manual_seed(bits)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(bits & 0xFFFFFFFF)

"""Remedies that are settings of the whole process: allocator, threads, debugging aids, cuDNN."""

import sys

import torch
import torch.utils.deterministic

from fusedtrain import _allocator
from fusedtrain.diagnose.drive import Driver
from fusedtrain.diagnose.instrument import replace
from fusedtrain.diagnose.lines import Change, edit_argument
from fusedtrain.diagnose.remedies.remedy import Remedy


class Allocator(Remedy):
    """glibc keeps freed memory instead of returning it to the kernel.

    It cannot be tried in a running process: mallopt() turns it on, but what the heap has grown to then stays.
    """

    name, kind, outside = "allocator", "bitwise", True
    how = f'start Python with the environment variable GLIBC_TUNABLES="{_allocator.TUNABLES}"'

    @staticmethod
    def why_not() -> str | None:
        if not sys.platform.startswith("linux") or not _allocator.variables():
            return "not glibc's malloc, or GLIBC_TUNABLES or another malloc is set already"
        return None


class Threads(Remedy):
    """Another number of threads within an operation."""

    kind = "last bit"

    def __init__(self, number: int):
        self.threads, self.name = number, f"threads({number})"
        self.how = f"torch.set_num_threads({number}), or OMP_NUM_THREADS={number} in the environment"

    def apply(self, driver: Driver) -> None:
        self._before = torch.get_num_threads()
        set_threads(self.threads)

    def undo(self, driver: Driver) -> None:
        set_threads(self._before)

    def changes(self, driver: Driver) -> list[Change]:
        change = edit_argument(driver.instrument.sites.get("set_num_threads"), ("set_num_threads",), self.threads)
        return [change] if change else []


def set_threads(number: int) -> None:
    """Sets the number of threads, and not for the script's call."""
    getattr(torch.set_num_threads, "__wrapped__", torch.set_num_threads)(number)


class NoDebugging(Remedy):
    """What looks for bugs is off: anomaly detection, and the NaN that new memory is filled with."""

    name, kind = "debugging off", "bitwise"

    def __init__(self, driver: Driver):
        aids = {
            "torch.autograd.set_detect_anomaly(True) and detect_anomaly() out": looks_for_anomalies(driver),
            "torch.utils.deterministic.fill_uninitialized_memory off": fills_memory(),
        }
        self.how = "leave " + " and ".join(aid for aid, used in aids.items() if used) + " once the bug is found"

    @staticmethod
    def why_not(driver: Driver) -> str | None:
        used = looks_for_anomalies(driver) or fills_memory()
        return None if used else "anomalies are not looked for, and new memory is not filled"

    def apply(self, driver: Driver) -> None:
        fill = torch.utils.deterministic.fill_uninitialized_memory
        self._before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled(), fill
        torch.set_anomaly_enabled(False)
        self._restore = replace(torch, "set_anomaly_enabled", lambda *args, **kwargs: None)
        torch.utils.deterministic.fill_uninitialized_memory = False

    def undo(self, driver: Driver) -> None:
        self._restore()
        *anomaly, torch.utils.deterministic.fill_uninitialized_memory = self._before
        torch.set_anomaly_enabled(*anomaly)


def looks_for_anomalies(driver: Driver) -> bool:
    """Returns whether autograd looks for NaN now, or did within a step."""
    return torch.is_anomaly_enabled() or "anomaly" in driver.instrument.sites


def fills_memory() -> bool:
    """Returns whether torch writes NaN to every new tensor, which deterministic algorithms bring along."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return deterministic and torch.utils.deterministic.fill_uninitialized_memory


class CudnnBenchmark(Remedy):
    """cuDNN tries its algorithms once per shape and keeps the fastest."""

    name, kind = "cudnn.benchmark", "last bit"
    how = "torch.backends.cudnn.benchmark = True, where the shapes stay the same"

    def apply(self, driver: Driver) -> None:
        torch.backends.cudnn.benchmark = True

    def undo(self, driver: Driver) -> None:
        torch.backends.cudnn.benchmark = False

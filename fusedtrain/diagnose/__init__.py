"""Finds out what makes a training slow, proposes remedies, and proves them: ``fusedtrain.diagnose(step, loader)``.

The module itself is the function: see :func:`diagnose`.
"""

import sys
import types

from torch.utils.data import DataLoader

from fusedtrain.diagnose.diagnosis import Diagnosis
from fusedtrain.diagnose.drive import ELSEWHERE, UNSEEN, Driver, Finished, LoopIterator
from fusedtrain.diagnose.instrument import Instrument
from fusedtrain.diagnose.report import show, to_json
from fusedtrain.diagnose.script import ScriptError, diagnose_script

__all__ = ["Report", "ScriptError", "diagnose", "diagnose_script"]


class Report(dict):
    """What a diagnosis found, as the JSON report has it; ``show()`` prints it, ``html()`` draws it."""

    def show(self) -> None:
        show(self)

    def html(self) -> str:
        """Returns one self-contained page."""
        from fusedtrain.diagnose.html import page

        return page(self)


class _Data:
    """An iterable that the training loop gets in the place of its data, so that the diagnosis hands out the batches."""

    def __init__(self, driver: Driver, data):
        self._driver, self._data = driver, data

    def __iter__(self):
        return (
            iter(self._data) if self._driver.own_code else LoopIterator(self._driver, self, lambda _: iter(self._data))
        )

    def __len__(self) -> int:
        return len(self._data)

    def __getattr__(self, name: str):
        return getattr(self._data, name)


def diagnose(training, data, *others, steps: int | None = None, verify: bool = False) -> Report:
    """Measures a training loop, names its bottleneck and ranks remedies by the gain they promise.

    Args:
        training: a function that takes one batch and trains a step on it; or an object with ``fit(data, *others)``,
            such as :class:`fusedtrain.train.Trainer`.
        data: what the batches come from, best a DataLoader; it is iterated over again and again.
        *others: further arguments of ``fit``, such as validation data.
        steps: how many to watch; None: 50 to 200, about five seconds.
        verify: whether to try the remedies in paired trials, keep what is surely faster and report the combined gain.

    Returns:
        A :class:`Report`, a dictionary; ``report["bottleneck"]`` names the rule, None for no bottleneck.

    Raises:
        TypeError: ``training`` is neither callable nor has ``fit``.
        ValueError: ``steps`` is below 10.
        RuntimeError: the training ended before enough steps were measured, or took no step that was recognised.

    The steps really train. Afterwards weights, buffers and optimizer states are put back to where they were after the
    first step; what else the training changes stays changed.
    """
    fit = getattr(training, "fit", None)
    if fit is None and not callable(training):
        raise TypeError(f"training must be a function of a batch or have fit(), got {type(training).__name__}")
    diagnosis = Diagnosis(steps=steps, verify=verify, restore=True)
    name = getattr(training, "__name__", type(training).__name__)
    with Instrument() as instrument:
        driver = Driver(instrument, diagnosis.plan)
        driver.install()
        watched = data if isinstance(data, DataLoader) else _Data(driver, data)
        try:
            if fit is not None:
                fit(watched, *others)
            else:
                for batch in watched:
                    training(batch)
        except Finished:
            pass
        finally:
            driver.finish()
            if diagnosis.before is not None:
                diagnosis.before.restore()
    if diagnosis.facts is None:
        seen = driver.loader is not None or driver.optimizer is not None
        unseen = ELSEWHERE if instrument.elsewhere else UNSEEN
        raise RuntimeError("the training ended before enough steps were measured" if seen else unseen)
    return Report(to_json(diagnosis, name))


class _Callable(types.ModuleType):
    def __call__(self, *args, **kwargs) -> Report:
        return diagnose(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable

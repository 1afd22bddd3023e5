"""Lets the user's own training loop carry out a plan of measurements.

The loop asks its loader for batches. At each request the driver closes one step and opens the next: it decides where
the batch comes from and which remedies are in force, so that two variants of a run take turns step by step, in one
process, in the loop as the user wrote it. The plan is a generator: it yields a :class:`Run`, the loop carries it out,
and the plan receives the :class:`~fusedtrain.diagnose.instrument.Step` records.

A pass over the loader goes on for as long as the plan needs it. Only for a loop that fails beyond the length of its
loader, such as one that fills a tensor of that length, do passes end where they would; what lies between them is no
step.

Steps are bare unless a run asks for their parts: the instrument is detached, and at their boundary the clock is read
twice, before and after the loader.
"""

import contextlib
import math
import os
import random
import resource
import sys
import threading
import time
import weakref
from collections import Counter
from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch.utils.data import DataLoader

from fusedtrain._waits import TeamWaits
from fusedtrain.data.dataloader import Loader
from fusedtrain.data.workers import cores
from fusedtrain.diagnose.batches import CachedSource, LoaderSource, batch_bytes, copy_batch
from fusedtrain.diagnose.instrument import PARTS, Instrument, Step
from fusedtrain.diagnose.machine import settle
from fusedtrain.diagnose.plan import Arm, Plan, Run, leave_out_others, left_alone, spread_waits

_clock = time.perf_counter


def ranks() -> int:
    """Returns how many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def agree(value):
    """Returns the value of rank 0: what was measured decides on what is done next, which must be the same on all."""
    if ranks() == 1:
        return value
    shared = [value]
    dist.broadcast_object_list(shared)
    return shared[0]


class Finished(BaseException):
    """Ends the training loop when the plan is done; not an Exception, so that the loop does not catch it."""


def random_state() -> tuple:
    """Returns the states of torch's, Python's and, where it is in use, NumPy's generators."""
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()


def set_random_state(state: tuple) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        sys.modules["numpy"].random.set_state(state[2])


@dataclass(frozen=True)
class Counters:
    """What the kernel counts of this process: CPU seconds, page faults, and what threads waited for a core."""

    cpu: float
    faults: int
    waits: tuple[float, ...]

    @staticmethod
    def read(waits: TeamWaits) -> "Counters":
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return Counters(usage.ru_utime + usage.ru_stime, usage.ru_minflt, waits.read())


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


SETTLING = 4  # steps of a script that was started again, before it is measured
BY_HAND = 4  # backward passes without an optimizer of torch.optim, after which weights are updated by hand
IDLE = 300  # and with one that was made, but takes no step
UNASKED = 50  # steps in a row for which a loader is not asked: the loop trains on what it got before
IGNORED = 10  # times that a loop is told to end
UNSEEN = "no training loop was recognised: no optimizer of torch.optim took a step, and gradients did not repeat"
ELSEWHERE = (
    "no training loop was recognised: an optimizer took a step in another thread than the script's main one, and only"
    " that one is watched"
)


class Driver:
    """Carries out a plan, one :class:`Run` after the other, in the loop that calls :meth:`fetch`.

    Args:
        instrument: installed already.
        plan: called once with the driver, after the training loop has been recognised by its first optimizer step, or
            by BY_HAND backward passes where no optimizer of torch.optim was made, or IDLE ones where none steps.
    """

    def __init__(self, instrument: Instrument, plan):
        self.instrument, self._make_plan = instrument, plan
        self.plan: Plan | None = None
        self.loader = None  # of the training loop
        self.beginning = None  # a loader that is beginning a pass
        self.source: LoaderSource | None = None  # the script's own
        self.optimizer: object = None  # its steps are the boundaries where no loader is used
        self.batches: list = []
        self._keeps = True  # batches, where a run collects them
        self.finished = False
        self.on_ignored = lambda: None  # the loop goes on, however often it is told that the plan is done
        self._refused = 0
        self.error: BaseException | None = None
        self.losses: list[float] | None = None  # receives the loss of every step
        self.own_code = 0  # > 0: loaders are being iterated over by the plan
        self._last: LoopIterator | None = None
        self._recorded = True  # whether gradients were on when it was asked
        self._current = _nothing  # or a weak reference to the one whose requests are the boundaries
        self._run: Run | None = None
        self._records: list[Step] = []
        self._discard = 0
        self._active: tuple = ()
        self._open: Step | None = None  # that is being watched in parts
        self._times: list[float] | None = None  # of bare steps: start, loaded, start, loaded, ...
        self._full = 0  # how many, with the end of the last step
        self._step_waits: list[tuple[float, ...]] | None = None  # at the start and at the end of each
        self._fast = 0  # how many there may be before what a run needs besides the clock is done
        self._shift = 0.0  # seconds of the run so far that belong to no step
        self._epochs: list[int] = []  # steps among them in which the loader began anew
        self._since: Counters | None = None  # while steps are recorded
        self._counted = (0.0, 0, 0.0, 0.0)  # of the run: CPU, faults, waits of this thread and of its team
        self.counts_faults = False  # of optimizers; asking for them is when the kernel gives the core to others
        self._least: dict[Arm, float] = {}  # what bare steps take when they are left alone
        self.threads = 1  # that the script's operations run on
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._waits = TeamWaits()
        self._every_step = True  # whether waits are read in every step, or once per run
        self._looked = False  # for the threads of the run that is under way
        self._timed_next = instrument.timed("loader")(next)
        self._timed_evaluation = instrument.timed("evaluation")(next)
        self._timed_fetch = instrument.timed("loader")(lambda source: source.fetch())
        self._passes = Counter()  # by name, until the training loop is recognised
        self._taken = 0  # steps, but for bare ones of the run that is under way
        self._unasked = 0  # steps since the loader was recognised, until it is asked again
        self.starts, self._settling = 1, 0  # of the script; steps until its objects are known again
        self.ends_passes = False  # where the loader does
        self.between: list[float] = []  # seconds between such passes
        self._ended: float | None = None  # when the last pass did, until the next one begins
        self._begun = 0  # steps before the pass that is under way

    @property
    def steps(self) -> int:
        """How many the script took under the plan."""
        return self._taken + max(0, len(self._times or ()) - 1) // 2

    @property
    def stepping(self) -> bool:
        """Whether a step is under way, and not the plan."""
        return self._ended is None and (bool(self._times) or self._open is not None)

    @property
    def beyond_pass(self) -> bool:
        """Whether the pass that is under way has given as many batches as the loader has, or more."""
        if self.plan is None or self.plan.gi_frame is None:  # it is the plan that failed
            return False
        with contextlib.suppress(TypeError, AttributeError):  # it may have no length
            return self.steps - self._begun >= len(self.loader) - 1  # the step in which a loop is recognised is none
        return False

    def install(self) -> None:
        def iterate(original):
            def wrapper(loader):
                elsewhere = os.getpid() != self._pid or threading.get_ident() != self._thread
                if self.own_code or elsewhere or loader is self.beginning:
                    return original(loader)
                if self._ended is not None and self._made_again(loader):
                    self.loader, self.source = loader, LoaderSource(loader)
                if self.loader is not None and loader is not self.loader and not self.instrument.attached:
                    return original(loader)  # of a validation, for instance
                return LoopIterator(self, loader, original)

            return wrapper

        for owner in (DataLoader, Loader):  # the second hands out what is within the batches of the first
            self.instrument.patch(owner, "__iter__", iterate)
        # it warns of more workers than cores, whatever the workers wait for
        self.instrument.patch(DataLoader, "check_worker_number_rationality", lambda original: lambda loader: None)
        self.instrument.before_optimizer = self._before_optimizer
        self.instrument.on_optimizer = self._after_optimizer
        self.instrument.on_closure = self._closure
        self.instrument.on_pass = self._after_pass

    @contextlib.contextmanager
    def aside(self):
        """What the plan does here leaves random numbers and the record of the step alone."""
        step, self.instrument.step = self.instrument.step, None
        self.own_code += 1
        state = random_state()
        try:
            yield
        finally:
            set_random_state(state)
            self.own_code -= 1
            self.instrument.step = step

    # --- the loop calls these -----------------------------------------------------------------------------------------

    def fetch(self, iterator: "LoopIterator"):
        """Returns the next batch of one of the loop's loaders."""
        times = self._times
        if times is None or iterator is not self._current() or len(times) >= self._fast:
            return self._fetch(iterator)
        times.append(_clock())
        if self._step_waits is not None:
            self._step_waits += [self._waits.read()] * 2
        return self._load(self.source if self._run.arm.source is None else self._run.arm.source)

    def _load(self, source):
        times = self._times
        self.own_code += 1
        try:
            batch = source.fetch()
        except BaseException:  # the step that asked for it goes on
            del times[-1]
            del (self._step_waits or [])[-2:]
            raise
        finally:
            self.own_code -= 1
        if source.restarted:
            self._epochs.append(len(times) // 2)
        times.append(_clock() - self._shift)
        return batch

    def _fetch(self, iterator: "LoopIterator"):
        if self.finished:
            self._refuse()
        iterator.taken += 1
        if self.loader is None:
            self._last, self._recorded = iterator, torch.is_grad_enabled()
        if self.loader is None or iterator.loader is not self.loader or self._evaluates(iterator):
            timed = self._timed_evaluation if self.instrument.evaluating else self._timed_next
            return timed(iterator.inner) if self.instrument.attached else next(iterator.inner)
        if self.ends_passes and iterator.taken > len(self.loader):
            self._end_pass()
        if iterator.inner is not self.source.iterator and not iterator.adopted:
            self.source.iterator, iterator.adopted = iterator.inner, True
        if iterator is not self._current():
            self._begun = self.steps
        self._current, begun = weakref.ref(iterator), None
        if self._ended is None:
            self._boundary()
        else:
            begun = iterator.seconds
            self.between.append(_clock() - self._ended - begun)
            self._ended = None
        source = self.source if self._settling else self._run.arm.source or self.source
        if isinstance(source, CachedSource):
            self._pause()
            source.prepare()
        self._begin(isinstance(source, CachedSource), 0.0 if begun and source is not self.source else begun)
        if self._times is not None:
            batch = self._load(source)
        else:
            self.own_code += 1
            try:
                batch = self._timed_fetch(source)
            finally:
                self.own_code -= 1
            self._open.restart |= source.restarted
        if self._keeps and len(self.batches) < 8 and self._run.collect > sum(map(batch_bytes, self.batches)):
            self._keep(batch)
        return batch

    def _made_again(self, loader) -> bool:
        """Whether a loader is that of the training, which the script makes anew for every pass."""
        site = self.instrument.sites.get(id(loader))
        evaluates = self.instrument.evaluating or torch.is_grad_enabled() < self._recorded
        return site is not None and site == self.instrument.sites.get(id(self.loader)) and not evaluates

    def _end_pass(self) -> None:
        """Ends a pass and its last step; the loop goes on behind it."""
        self._boundary()
        self._pause()
        self._ended = _clock()
        raise StopIteration

    def _refuse(self) -> None:
        """Ends the loop, or tells that it goes on all the same, as with a bare ``except:`` around its requests."""
        self._refused += 1
        if self._refused == IGNORED:
            self.on_ignored()
        raise Finished

    def _keep(self, batch) -> None:
        """Keeps a copy of a batch, or none at all where one cannot be copied."""
        try:
            self.batches.append(copy_batch(batch))
        except Exception:
            self.batches, self._keeps = [], False

    def _evaluates(self, iterator: "LoopIterator") -> bool:
        """Whether a pass over the loader of the training loop is an evaluation's, within or behind one of the loop."""
        if iterator.adopted or (self._current() is None and self._ended is None):
            return False
        return self.instrument.evaluating or torch.is_grad_enabled() < self._recorded

    def _before_optimizer(self, optimizer) -> None:
        self._recognise(optimizer)
        if self.counts_faults and self._open is not None:
            self._open.optimizer_faults -= _faults()

    def _closure(self, entered: bool) -> None:
        if self.counts_faults and self._open is not None:
            self._open.optimizer_faults += _faults() if entered else -_faults()

    def _recognise(self, optimizer) -> None:
        """The loader that was asked last before the first optimizer step is that of the training loop."""
        if self.loader is not None or self.optimizer is not None or threading.get_ident() != self._thread:
            return
        self.instrument.watch_updates(False)
        if self._last is None:
            self.optimizer = self.instrument.marks = optimizer
            return
        self.loader, self._last.adopted = self._last.loader, True
        self.source = LoaderSource(self.loader, self._last.inner, self._last.begin)
        self._current, self._last = weakref.ref(self._last), None

    @property
    def _waits_for_loader(self) -> bool:
        """Whether a loader was recognised, and has not been asked since."""
        return self.plan is None and self.loader is not None

    def _not_asked(self, owner) -> None:
        """Notes a step after which the loader was not asked for another batch; after some, steps are the boundaries."""
        self._unasked += 1
        if self._unasked == UNASKED:
            self.loader = self.source = None
            self.optimizer = self.instrument.marks = owner

    def _after_pass(self, name: str) -> None:
        if self.optimizer == name:
            self._after_optimizer(name)
        elif self.loader is None and self.optimizer is None:
            self._passes[name] += 1
            if name == "grad" and self._passes["backward"]:
                return  # it is part of the loss
            left = (IDLE if self.instrument.made_optimizer else BY_HAND) - self._passes[name]
            if left > 0:
                self.instrument.watch_updates(left < BY_HAND)
                return
            self.instrument.watch_updates(False)
            self._recognise(next((owner for owner, _ in self.instrument.by_hand), name))
        elif self._waits_for_loader and not (self.instrument.optimizers or self.instrument.by_hand):
            self._not_asked(name)

    def _after_optimizer(self, optimizer) -> None:
        if self.counts_faults and self._open is not None:
            self._open.optimizer_faults += _faults()
        if optimizer is not self.optimizer:
            if self._waits_for_loader:
                self._not_asked(optimizer)
            return
        times = self._times
        if times is not None and len(times) < self._fast:
            times += [_clock()] * 2
            if self._step_waits is not None:
                self._step_waits += [self._waits.read()] * 2
            return
        if self.finished:
            self._refuse()
        self._boundary()
        self._begin(False)
        if self._times is not None:
            self._times.append(self._times[-1])

    def restart(self) -> None:
        """Forgets the objects of a script that has ended: it starts again, and the plan goes on with its new ones."""
        self._taken = self.steps
        if self._times is not None and not self._discard:
            self._records += self._bare_steps()
        self._times = None
        self._pause()
        self.instrument.detach()
        self.use(())
        if self.source is not None:
            self.source.close()
        self.loader = self.source = self.optimizer = self._last = self._open = None
        self._current, self._ended, self._begun = _nothing, None, self._taken
        self._passes.clear()
        self._unasked = 0
        self.instrument.forget()
        self.starts += 1
        self._settling = SETTLING

    def _settle(self) -> None:
        self._settling -= 1
        if not self._settling:
            self.instrument.settle()
            self._discard = self._run.discard
            self._use_arm(None)

    # --- steps --------------------------------------------------------------------------------------------------------

    def alone(self, arm: Arm) -> bool:
        """Whether every thread of an arm may have a core: where one waits, another process has it.

        Workers of a loader, and more threads than cores, take cores from each other. That is for the diagnosis to find.
        The script's own workers idle while cached batches are used.
        """
        source = arm.source or self.source
        workers = source is not None and source.in_flight > 0
        threads = next((r.threads for r in arm.remedies if r.threads is not None), self.threads)
        return threads <= cores() and not workers and not torch.cuda.is_initialized()

    def read_waits(self, step: float) -> None:
        """Has what was waited told apart by the parts of a step of so many seconds, or by steps, or by runs: as reading
        costs below 0.1 %. Behind layers that sweep the caches it costs some times as much as in a row."""
        self._waits.look()
        cost = self._waits.cost()
        self._every_step = cost < 0.001 * step
        self.instrument.waits = self._waits if 2 * len(PARTS) * cost < 0.001 * step else None

    def _begin(self, cached: bool, begun: float | None = None) -> None:
        """Opens a step.

        Args:
            cached: what lies before it was no part of the one before.
            begun: seconds that the loader took to begin a pass behind another, which are the step's; None: it did not.
        """
        if not self._discard and not self._looked:
            self._waits.look()
            self._looked = True
        if self._since is None and not self._discard and not self._settling:
            self._since = Counters.read(self._waits)
        waits = self._waits.read() if self._every_step else None
        times = self._times
        if times is None:
            self._open, self._waited = Step(0.0), waits
            self._open.start = now = _clock()
            if begun:
                self._open.start, self._open.restart = now - begun, True
                self._open.spans.append(("loader", self._open.start, now, None))
            self.instrument.step = self._open
            return
        if self._step_waits is not None:
            self._step_waits.append(waits)
        if not times:
            self._shift = 0.0
            times.append(_clock() - (begun or 0.0))
        elif cached or begun is not None:
            self._shift = _clock() - times[-1] - (begun or 0.0)
        if begun:
            self._epochs.append(len(times) // 2)

    def _pause(self) -> None:
        """Adds to what was counted while steps were recorded."""
        since, self._since = self._since, None
        if since is not None:
            now = Counters.read(self._waits)
            own, *team = (b - a for a, b in zip(since.waits, now.waits))
            found = (now.cpu - since.cpu, now.faults - since.faults, own, sum(team))
            self._counted = tuple(map(sum, zip(self._counted, found)))

    def _end(self) -> None:
        """Closes the step that is open, if any."""
        if self._times is not None:
            self._end_bare()
            return
        step, self._open, self.instrument.step = self._open, None, None
        self.instrument.close()
        if step is None:
            return
        last = len(self._records) + 1 == self._run.steps
        if last or self._discard == 1:
            settle()  # a run pays for all its work and for none of another's
        step.end = _clock()
        if self._waited is not None:
            # A whole switch of threads may lie between the two clocks.
            step.all_waits = self._waits.since(self._waited)
        if self.losses is not None and self.instrument.loss is not None:
            self.losses.append(self.instrument.loss.mean().item())  # of each sample, under vmap
        self._taken += 1
        if self._settling:
            self._settle()
        elif self._discard > 0:
            self._discard -= 1
        else:
            self._records.append(step)

    def _end_bare(self) -> None:
        times = self._times
        if not times:  # nothing is open: the loader failed
            return
        if len(times) + 1 == self._full:
            settle()
        times.append(_clock() - self._shift)
        if self._step_waits is not None:
            self._step_waits.append(self._waits.read())
        if len(times) < self._full:
            return
        self._taken += self._full // 2
        if self._discard:
            self._discard = 0
            self._start_bare()
        else:
            self._records += self._bare_steps()
            self._times = None  # the plan comes next

    def _start_bare(self) -> None:
        steps = self._discard or self._run.steps - len(self._records)
        self._times, self._epochs = [], []
        self._step_waits = [] if self._every_step else None
        self._full = 2 * steps + 1
        simple = not self._run.collect and not isinstance(self._run.arm.source, CachedSource) and not self.ends_passes
        self._fast = 2 * steps if simple else 0

    def _bare_steps(self) -> list[Step]:
        """Returns those that have ended."""
        times, waits, records = self._times, self._step_waits, []
        for i in range((len(times) - 1) // 2):
            start, loaded, end = times[2 * i : 2 * i + 3]
            step = Step(start, end, {"loader": loaded - start, "rest": end - loaded})
            if waits is not None:
                own, *team = (b - a for a, b in zip(*waits[2 * i : 2 * i + 2]))
                step.all_waits = own, sum(team)
            records.append(step)
        for i in self._epochs:
            if i < len(records):
                records[i].restart = True
        return records

    def _boundary(self) -> None:
        self._end()
        if self.plan is None:
            self.threads = torch.get_num_threads()
            self.plan = self._make_plan(self)
            self._advance(None)
        elif len(self._records) >= self._run.steps:
            self._advance(self._records)

    def _advance(self, records: list[Step] | None) -> None:
        self._times = None
        if records is not None:
            self._pause()
            self._account(records)
        try:
            run = next(self.plan) if records is None else self.plan.send(agree(records))
        except StopIteration:
            if ranks() > 1:
                dist.barrier()  # nobody leaves before all have heard the last word
            self.finish()
            raise Finished from None
        before, self._run, self._records, self._discard = self._run, run, [], run.discard
        self._counted = (0.0, 0, 0.0, 0.0)
        self._use_arm(before)

    def _account(self, records: list[Step]) -> None:
        """Gives the steps of a run what was counted, and leaves out what other processes took."""
        cpu, faults, own, team = self._counted
        for step in records:
            step.cpu, step.faults = cpu / len(records), faults / len(records)
        for step in records:
            step.complete()
        if not self.alone(self._run.arm):
            return
        if self._every_step:
            leave_out_others(records)
            return
        arm, walls = self._run.arm, [step.wall for step in records]
        least = min(left_alone(walls), self._least.get(arm, math.inf))
        if not self._run.parts:
            self._least[arm] = least
        if own + team > 0.001 * sum(walls):
            spread_waits(records, own + team, least)

    def _use_arm(self, before: Run | None) -> None:
        """Puts the remedies of the run in force and attaches the instrument, or detaches it."""
        arm, parts = self._run.arm, self._run.parts
        if before is None or before.arm != arm:
            self._looked = False
        if arm.remedies != self._active or parts != self.instrument.attached:
            self.instrument.detach()  # the wrappers lie around those of remedies
            self.use(arm.remedies)
            if parts:
                self.instrument.attach()
        source = arm.source or self.source
        if source is not None and (before is None or (before.arm.source or self.source) is not source):
            with self.aside():
                source.resume()
        self._times = None
        if not parts:
            self._start_bare()

    def use(self, remedies: tuple) -> None:
        """Puts exactly these remedies in force."""
        if remedies == self._active:
            return
        for remedy in reversed(self._active):
            remedy.undo(self)
        self._active = ()
        for remedy in remedies:
            remedy.apply(self)
            self._active += (remedy,)

    def finish(self) -> None:
        """Takes all remedies back; the loop ends at its next request."""
        self.finished, self._times = True, None
        self.instrument.detach()
        self.use(())
        self.instrument.step = None


def _nothing() -> None:
    """What a weak reference gives when its object is gone."""


class LoopIterator:
    """What the training loop gets when it iterates over a DataLoader."""

    def __init__(self, driver: Driver, loader: DataLoader, original):
        self.driver, self.loader, self.adopted = driver, loader, False
        self.taken, start = 0, _clock()  # how often it was asked
        self.begin = lambda: original(loader)
        before, driver.beginning = driver.beginning, loader  # a class derived from DataLoader asks for its iterator
        try:
            self.inner = driver.instrument.timed("loader")(self.begin)()
        finally:
            driver.beginning = before
        self.seconds = _clock() - start

    def __iter__(self):
        return self

    def __next__(self):
        return self.driver.fetch(self)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

"""Where the time goes: spans of every step, always summed up, on a GPU ranges of NVTX, on request traced by
torch.profiler."""

import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from fusedtrain.train.errors import make_folder, require_count

SPANS = ("data", "copy", "forward", "backward", "optimizer", "graph", "evaluation", "checkpoint", "other")


@dataclass(frozen=True)
class Profile:
    """Tracing a few steps.

    Args:
        profile_dir: receives trace.json (chrome://tracing, Perfetto) and table.txt; None traces nothing.
        profile_wait: steps before the trace, which are slower than later ones.
        profile_steps: steps in the trace.

    Raises:
        InputError: a number is no whole one, or too small.
    """

    profile_dir: Path | None = None
    profile_wait: int = 5
    profile_steps: int = 5

    def __post_init__(self):
        require_count("profile_wait", self.profile_wait, 0)
        require_count("profile_steps", self.profile_steps)


class Spans:
    """The stages of a run follow each other; :meth:`enter` ends one and begins the next.

    Seconds are those of the CPU: on a GPU, which runs behind, work shows where the CPU waits for it. There every span
    is also a range of NVTX, which does nothing unless a tool such as Nsight Systems has started the process; while a
    trace is made, one of torch.profiler.

    Args:
        device: of the run.
    """

    def __init__(self, device: torch.device):
        self.seconds = dict.fromkeys(SPANS, 0.0)
        self.tracing = False
        self.usage = None  # a fusedtrain.monitor.StageUsage, where what the stages use is wanted
        self._name, self._start, self._range, self._nvtx = None, 0.0, None, device.type == "cuda"

    def enter(self, name: str | None) -> None:
        """Ends the stage that runs, if any, and begins ``name``; None: time is not counted from here."""
        now = time.perf_counter()
        if self._name is not None:
            self.seconds[self._name] += now - self._start
            if self._nvtx:
                torch.cuda.nvtx.range_pop()
        if self._nvtx and name is not None:
            torch.cuda.nvtx.range_push(name)
        self._name, self._start = name, now
        if self.usage is not None:
            self.usage.enter(name)
        if self.tracing or self._range is not None:
            self._mark(name)

    def _mark(self, name: str | None) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self.tracing and name is not None:
            self._range = torch.profiler.record_function(name)
            self._range.__enter__()

    def __str__(self) -> str:
        total = sum(self.seconds.values()) or 1.0
        parts = [f"{name} {value / total:.0%}" for name, value in self.seconds.items() if value >= 0.005 * total]
        return f"{total:.1f} s: {', '.join(parts)}"


class Tracer:
    """Traces the steps that a :class:`Profile` names; one per run."""

    def __init__(self, config: Profile, spans: Spans):
        self.config, self.spans, self._steps = config, spans, 0
        self._profiler = None
        make_folder(config.profile_dir, "the folder of the trace")

    def step(self) -> None:
        """Called before every update."""
        self._steps += 1
        if self._steps == self.config.profile_wait + 1:
            self._profiler = torch.profiler.profile(record_shapes=True)
            self._profiler.__enter__()
            self.spans.tracing = True
        elif self._profiler is not None and self._steps > self.config.profile_wait + self.config.profile_steps:
            self.close()

    def close(self) -> None:
        """Ends and writes the trace, where one is under way."""
        if self._profiler is None:
            if self._steps <= self.config.profile_wait:
                made = f"the run made {self._steps} updates and profile_wait is {self.config.profile_wait}"
                warnings.warn(f"no trace was written: {made}", stacklevel=2)
            return
        self.spans.tracing = False
        self.spans.enter("other")
        profiler, self._profiler = self._profiler, None
        profiler.__exit__(None, None, None)
        folder = Path(self.config.profile_dir)
        profiler.export_chrome_trace(str(folder / "trace.json"))
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        (folder / "table.txt").write_text(profiler.key_averages().table(sort_by=order, row_limit=40) + "\n")

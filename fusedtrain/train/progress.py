"""What a run shows while it runs: a bar on a terminal, lines elsewhere."""

import importlib.util
import sys
import time
from datetime import timedelta

BAR_SECONDS, LINE_SECONDS = 0.25, 30.0


class Progress:
    """Context manager around a run; nothing it shows makes the CPU wait for the device within an epoch.

    Args:
        title: of the run.
        epochs: of the run.
        steps: per epoch; None where that is not known.
        shown: False prints nothing, for all processes but the first.
    """

    def __init__(self, title: str, epochs: int, steps: int | None, done: int = 0, shown: bool = True):
        self.title, self.epochs, self.steps, self.done, self.shown = title, epochs, steps, done, shown
        self._bar = None
        self._begun, self._start = done, time.perf_counter()
        self._next = self._start + LINE_SECONDS

    def __enter__(self):
        # None: the process was started without one; what scripts put in its place to keep a copy may lack the method.
        terminal = getattr(sys.stdout, "isatty", bool)()
        if self.shown and terminal and importlib.util.find_spec("rich"):
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),  # names and paths may hold brackets
                progress.BarColumn(),
                progress.TaskProgressColumn(),
                progress.MofNCompleteColumn(),
                "steps",
                "{task.fields[values]}",
                progress.TimeElapsedColumn(),
                "left",
                progress.TimeRemainingColumn(),
                refresh_per_second=1 / BAR_SECONDS,
                transient=True,
            )
            total = None if self.steps is None else self.epochs * self.steps
            self._task = self._bar.add_task(self.title, total=total, completed=self.done, values="")
            self._bar.start()
            self._next = 0.0
        return self

    def __exit__(self, *exc_info):
        if self._bar is not None:
            self._bar.stop()

    def step_done(self, now: float, values) -> None:
        """Counts a step.

        Args:
            now: time.perf_counter().
            values: called, now and then, for the text beside the bar.
        """
        self.done += 1
        if now < self._next or not self.shown:
            return
        if self._bar is not None:
            self._next = now + BAR_SECONDS
            self._bar.update(self._task, completed=self.done, values=values())
        else:
            self._next = now + LINE_SECONDS
            total = left = ""
            if self.steps is not None:
                steps = self.epochs * self.steps
                seconds = (steps - self.done) * (now - self._start) / (self.done - self._begun)
                total, left = f"/{steps}", f"  {timedelta(seconds=round(seconds))} left"
            print(f"{self.title}  step {self.done}{total}  {values()}{left}", flush=True)

    def epoch_done(self, epoch) -> None:
        parts = [
            f"{self.title}  epoch {epoch.epoch:>{len(str(self.epochs))}}/{self.epochs}",
            f"loss {epoch.train_loss:.4f}",
            *(f"val {_metric(name, value)}" for name, value in epoch.metrics.items()),
            f"{epoch.images_per_second:,.0f} images/s",
        ]
        self.line("  ".join(parts))

    def line(self, text: str) -> None:
        """Prints a line above the bar."""
        if not self.shown:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)


def _metric(name: str, value: float) -> str:
    return f"{name} {value:7.2%}" if name == "accuracy" else f"{name} {value:.4f}"

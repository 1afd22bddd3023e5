"""What a run shows while it runs: a bar on a terminal, one line per epoch everywhere."""

import importlib.util
import sys


class Progress:
    """Context manager around a run; nothing it shows makes the CPU wait for the device within an epoch."""

    def __init__(self, title: str, epochs: int, steps: int):
        self.title, self.epochs, self.steps = title, epochs, steps
        self._bar = None

    def __enter__(self):
        if sys.stdout.isatty() and importlib.util.find_spec("rich"):
            from rich import progress

            self._bar = progress.Progress(
                "{task.description}",
                progress.BarColumn(),
                progress.TaskProgressColumn(),
                progress.MofNCompleteColumn(),
                "steps",
                progress.TimeElapsedColumn(),
                "left",
                progress.TimeRemainingColumn(),
                transient=True,
            )
            self._task = self._bar.add_task(self.title, total=self.epochs * self.steps)
            self._bar.start()
        return self

    def __exit__(self, *exc_info):
        if self._bar is not None:
            self._bar.stop()

    def step_done(self) -> None:
        if self._bar is not None:
            self._bar.advance(self._task)

    def epoch_done(self, epoch) -> None:
        line = (
            f"{self.title}  epoch {epoch.epoch:>{len(str(self.epochs))}}/{self.epochs}"
            f"  loss {epoch.train_loss:.4f}  val loss {epoch.valid_loss:.4f}"
            f"  val accuracy {epoch.valid_accuracy:7.2%}  {epoch.images_per_second:,.0f} images/s"
        )
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        else:
            print(line, flush=True)

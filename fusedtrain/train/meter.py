"""The numbers of a run: read without making the CPU wait for a GPU, summed up, logged, shown."""

import math
import time

import torch
from torch import Tensor

from fusedtrain.train.memory import memory_text
from fusedtrain.train.nonfinite import NonFiniteError, left_out
from fusedtrain.train.records import History


class Late:
    """Takes numbers that are on a GPU and gives them one :meth:`collect` later, when they have long arrived."""

    def __init__(self):
        self._pending: list[Tensor] = []
        self._flying: tuple[Tensor, object] | None = None

    def add(self, numbers: Tensor) -> None:
        self._pending.append(numbers)

    def collect(self, wait: bool = False) -> list[list[float]]:
        """Returns what is new since the last call; with ``wait`` all there is."""
        ready = self._land()
        if self._pending:
            numbers, event = torch.stack(self._pending), None
            host = numbers.to("cpu", non_blocking=True)
            if numbers.is_cuda:  # of that device, which need not be the current one
                event = torch.cuda.current_stream(numbers.device).record_event()
            self._flying, self._pending = (host, event), []
        return ready + self._land() if wait else ready

    def _land(self) -> list[list[float]]:
        if self._flying is None:
            return []
        (host, event), self._flying = self._flying, None
        if event is not None:
            event.synchronize()  # of the previous call: long over
        return host.tolist()


class Numbers:
    """Losses and means of a run.

    Args:
        trainer: whose run it is.
        late: the losses are on a GPU, and known some steps later; with an optimizer of ``fusedtrain.optim`` so is
            whether an update was applied.
    """

    def __init__(self, trainer, late: bool):
        self.trainer, self.late = trainer, late
        self.history = History()
        self.loss_sum = self.weight = self.seconds = 0.0  # of the epoch: loss times weight, samples
        self.last: Tensor | float | None = None
        self.rate: Tensor | float = 0.0  # of the update under way, after which the schedule moves on
        self.start, self.running = 0.0, False
        self._late, self._new, self._weights = Late(), [], []
        self._fastest = 0  # group of the optimizer
        self._scale: float | None = None

    def begin(self) -> None:
        """The training of an epoch begins, or goes on after so many seconds."""
        self.start, self.running = time.perf_counter() - self.seconds, True
        groups = self.trainer.optimizer.param_groups
        peaks = [float(group.get("initial_lr", group["lr"])) for group in groups]
        self._fastest = peaks.index(max(peaks))

    def end(self) -> None:
        """The training of an epoch is over."""
        self.seconds, self.running = self.spent(), False

    def spent(self) -> float:
        """Returns the seconds that the training of the epoch has taken so far."""
        return time.perf_counter() - self.start if self.running else self.seconds

    # --- steps --------------------------------------------------------------------------------------------------------

    def note_rate(self) -> None:
        """An update is to be made; of groups with rates of their own, such as by layer, the highest is noted."""
        rate = self.trainer.optimizer.param_groups[self._fastest]["lr"]
        self.rate = rate.clone() if isinstance(rate, Tensor) else rate

    def step(self, loss: Tensor | float, weight: float, applied: bool | Tensor) -> None:
        """Takes the summed loss of an update and its weight; a Tensor for ``applied``: that is not known yet."""
        t, unknown = self.trainer, isinstance(applied, Tensor)
        if weight:
            self.last = loss / weight
            if self.late:
                known = applied.double() if unknown else loss.new_full((), float(applied), dtype=torch.float64)
                scale = known if t.scaler is None else t.scaler._get_scale_async().double()
                self._late.add(torch.stack([self.last.double(), known, scale]))
                self._weights.append((weight, unknown))
            else:
                self._new.append(float(self.last))
        counts = applied is not False  # the mean over an epoch is that of its updates
        if t.scaler is not None:  # and of those that wait for a smaller scale
            counts = self.late or math.isfinite(loss)
            loss = torch.where(loss.isfinite(), loss, 0.0) if self.late else loss
        elif unknown:
            loss = torch.where(applied, loss, 0.0)
        if counts:
            self.loss_sum = self.loss_sum + loss
            self.weight += weight

    def read(self, wait: bool = False) -> list[float]:
        """Returns the losses that have become known since the last call.

        Raises:
            NonFiniteError: an update whose outcome has become known was not finite, and may not be left out.
        """
        t = self.trainer
        if not self.late:
            values, self._new = self._new, []
            self.history.step_losses += values
            return values
        values = []
        for loss, applied, scale in self._late.collect(wait):
            weight, unknown = self._weights.pop(0)
            values.append(loss)
            self.history.step_losses.append(loss)
            self._scale = scale
            if t.scaler is not None and not math.isfinite(loss):
                self.weight -= weight
            if unknown:
                self._learnt(bool(applied), weight, loss)
            if applied and not math.isfinite(loss) and t.config.nonfinite == "raise" and t.scaler is None:
                raise NonFiniteError(f"a loss of the steps up to {t.step_count} is {loss}, its gradients were finite")
        return values

    def _learnt(self, applied: bool, weight: float, loss: float) -> None:
        """The outcome of an update that was decided on the device."""
        t = self.trainer
        if applied:
            t.skipped_in_a_row = 0
            return
        t.owed += 1  # the schedule has moved for it
        if t.scaler is None:
            self.weight -= weight
        left_out(t, len(self.history.step_losses), loss, [])

    # --- what is seen -------------------------------------------------------------------------------------------------

    def log_step(self) -> None:
        t, values = self.trainer, self.read()
        if not t.loggers:
            return
        now = {"lr": float(self.rate), "skipped": t.skipped}
        if values:
            now["loss"] = values[-1]
        now["samples_per_second"] = self._speed()
        if not self.late and t.update.norm is not None:
            now["grad_norm"] = float(t.update.norm)
        if t.scaler is not None:
            scale = self._scale if self.late else t.scaler.get_scale()
            now |= {} if scale is None else {"loss_scale": scale}
        if t.usage is not None:
            now |= t.usage.read()
        self.log(now)

    def _speed(self) -> float:
        """Samples per second of all processes, which take equally many, or nearly so."""
        share = self.trainer.world.size if self.late else 1  # the weight is this process's own where nobody waits
        return share * self.weight / max(1e-9, time.perf_counter() - self.start)

    def log(self, values: dict[str, float]) -> None:
        for logger in self.trainer.loggers:
            logger.log(self.trainer.step_count, values)

    def shown(self) -> str:
        """The text beside the bar."""
        t, losses = self.trainer, self.history.step_losses
        loss = f"loss {losses[-1]:.4f}  " if losses else ""
        return f"{loss}lr {float(self.rate):.2e}  {self._speed():,.0f} samples/s{memory_text(t.device)}"

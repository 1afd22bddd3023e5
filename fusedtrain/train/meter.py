"""The losses of the steps, read without making the CPU wait for a GPU."""

import torch
from torch import Tensor


class Losses:
    """Takes the loss of every step and gives the numbers later: on the CPU at once, on a GPU one call later.

    Args:
        device: on which the losses are.
    """

    def __init__(self, device: torch.device):
        self._cpu = device.type == "cpu"
        self._pending: list[Tensor] = []
        self._flying: tuple[Tensor, object] | None = None
        self._ready: list[float] = []

    def add(self, loss: Tensor | float) -> None:
        if self._cpu:
            self._ready.append(float(loss))
        else:
            self._pending.append(loss)

    def collect(self, wait: bool = False) -> list[float]:
        """Returns the numbers that are new since the last call; with ``wait`` all of them."""
        if not self._cpu:
            self._land()
            if self._pending:
                host = torch.stack(self._pending).to("cpu", non_blocking=True)
                event = torch.cuda.Event()
                event.record()
                self._flying, self._pending = (host, event), []
            if wait:
                self._land()
        ready, self._ready = self._ready, []
        return ready

    def _land(self) -> None:
        if self._flying is not None:
            host, event = self._flying
            event.synchronize()  # of the previous call: long over
            self._ready += host.tolist()
            self._flying = None

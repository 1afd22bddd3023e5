"""The correctness gate before every number: a candidate must be as good as PyTorch's own path in the same dtype.

.. math:: \\max|ours - truth| \\le 2 \\max|torch - truth| + 2\\,\\mathrm{eps} \\max|truth|

for the output and every gradient; truth is the stock path in float64 on the rounded inputs.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def run(call: Callable[..., Tensor], inputs: Sequence[Tensor], wrt: Sequence[int], dy: Tensor) -> list[Tensor]:
    """The output and the gradients of the inputs ``wrt``."""
    inputs = [t.detach().requires_grad_(i in wrt) for i, t in enumerate(inputs)]
    y = call(*inputs)
    return [y.detach(), *torch.autograd.grad(y, [inputs[i] for i in wrt], dy)]


class Gate:
    """Compares candidates with float64; :meth:`prepare` first for each set of gradients.

    Args:
        stock: the truth as a function, called with the inputs in float64.
        options: its keyword arguments.
        inputs: the rounded inputs.
    """

    def __init__(self, stock: Callable[..., Tensor], options: dict, inputs: Sequence[Tensor]):
        self._stock, self._options, self._inputs = stock, options, inputs
        with torch.no_grad():
            y = stock(*inputs, **options)
        self.dy = torch.randn(y.shape, device=y.device, dtype=y.dtype)

    def prepare(self, wrt: Sequence[int], stock: Sequence) -> None:
        """Computes the truth and the error that each eager stock candidate itself makes."""
        double = [t.detach().double() for t in self._inputs]
        self._wrt = wrt
        self._truth = run(lambda *inputs: self._stock(*inputs, **self._options), double, wrt, self.dy.double())
        errors = [self._errors(candidate) for candidate in stock]
        eps = torch.finfo(self._inputs[0].dtype).eps
        self._bounds = [
            2 * max(error) + 2 * eps * (truth.abs().max().item() if truth.numel() else 0.0)
            for error, truth in zip(zip(*errors), self._truth)
        ]

    def _errors(self, candidate) -> list[float]:
        memory_format = torch.channels_last if candidate.layout == "channels_last" else torch.contiguous_format
        dy = self.dy.contiguous(memory_format=memory_format) if self.dy.dim() == 4 else self.dy
        results = run(candidate.call, candidate.inputs, self._wrt, dy)
        return [(r.double() - t).abs().max().item() if t.numel() else 0.0 for r, t in zip(results, self._truth)]

    def fault(self, candidate) -> str | None:
        """What is wrong with a candidate's results, or None."""
        names = ["y", *(f"gradient of input {i}" for i in self._wrt)]
        for name, error, bound in zip(names, self._errors(candidate), self._bounds):
            if not error <= bound:  # NaN fails too
                return f"{name} is off by {error:.3g}, {bound:.3g} allowed"
        return None

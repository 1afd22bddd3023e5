"""cuDNN's choice of algorithms by trying them, where that pays."""

import contextlib

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

SIZES = 8  # of images, for which cuDNN may try its algorithms: several stages of a run, and evaluation


class Benchmark:
    """torch.backends.cudnn.benchmark during a run: every new size of the images has all algorithms of every convolution
    tried, so that it is switched off again where more than :data:`SIZES` of them come."""

    def __init__(self):
        self._watches, self._sizes = False, set()

    @contextlib.contextmanager
    def during(self, on: bool):
        """Within the ``with`` block it is on, or off; what was on before stays on."""
        cudnn = torch.backends.cudnn
        before, cudnn.benchmark = cudnn.benchmark, on
        self._watches, self._sizes = on and not before, set()
        try:
            yield
        finally:
            cudnn.benchmark, self._watches = before, False

    def see(self, batch) -> None:
        """Counts the size, all but ``[N, C]``, of the first images in a batch."""
        if not self._watches:
            return
        images = next((t for t in tree_leaves(batch) if isinstance(t, Tensor) and t.dim() > 2), None)
        if images is not None:
            self._sizes.add(images.shape[2:])
        if len(self._sizes) > SIZES:
            torch.backends.cudnn.benchmark = self._watches = False

"""Batches brought to the device ahead of use, and turned there into what the model takes."""

import functools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fusedtrain.data.epochs import set_epoch


class DevicePrefetcher:
    """Iterates over batches on the device, one batch ahead of the training loop.

    On a GPU the next batch is copied on a stream of its own while the current one is computed on; images cross the bus
    as they are (uint8 is a fourth of float32) and are laid out and normalised over there. On the CPU there is nothing
    to copy: batches are laid out and normalised as they come, and :meth:`describe` says so.

    Args:
        batches: gives tensors, or tuples, lists or dicts of them, nested or not; a DataLoader with ``pin_memory=True``
            for a GPU, since copies from pageable memory hold up the CPU.
        device: "cuda", "cuda:1" or "cpu".
        channels_last: give tensors ``[N, C, H, W]`` channels_last memory, the faster one for convolutions.
        normalize: (mean, std), one number per channel, of images in 0 to 1; uint8 images ``[N, C, H, W]`` become
            ``(x / 255 - mean) / std``, and each batch must have some. None leaves them uint8.
        dtype: of normalised images: torch.float32, bfloat16 or float16.

    Raises:
        ValueError: ``device``, ``normalize`` or ``dtype`` make no sense, or the images have another number of channels
            or are not uint8.

    Numerics: normalised in float32 as ``x * (1 / (255 std)) - mean / std``, rounded once more to ``dtype``.
    """

    def __init__(
        self,
        batches: Iterable,
        device: str | torch.device,
        *,
        channels_last: bool = True,
        normalize: tuple[Sequence[float], Sequence[float]] | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        self.batches, self.device, self.channels_last, self.dtype = batches, torch.device(device), channels_last, dtype
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device}")
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"dtype must be torch.float32, bfloat16 or float16, got {dtype}")
        self._scale = self._shift = None
        if normalize is not None:
            try:
                mean, std = (torch.as_tensor(part, dtype=torch.float64) for part in normalize)
                makes_sense = mean.dim() == 1 and mean.shape == std.shape and (mean / std).isfinite().all()
            except (TypeError, ValueError):
                makes_sense = False
            if not makes_sense or not (std > 0).all():
                raise ValueError(f"normalize must be (mean, std) with one number per channel, std > 0, got {normalize}")
            self._scale, self._shift = (
                part.float().view(1, -1, 1, 1).to(self.device) for part in (1 / (255 * std), mean / std)
            )

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator:
        source = iter(self.batches)
        return map(self._convert, source) if self.device.type == "cpu" else self._overlapped(source)

    def set_epoch(self, epoch: int) -> None:
        """Passes the epoch on to the batches, or to their samplers and dataset."""
        set_epoch(self.batches, epoch)

    @property
    def keeps_position(self) -> bool:
        """Whether the batches know their position in the epoch."""
        known = all(hasattr(self.batches, name) for name in ("advance", "state_dict", "load_state_dict"))
        return known and getattr(self.batches, "keeps_position", True)

    def advance(self, steps: int = 1) -> None:
        """Notes that the next batches are used up; the one that is copied ahead does not count before."""
        self.batches.advance(steps)

    def state_dict(self) -> dict:
        """Returns the position of the batches in the epoch."""
        return self.batches.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Lets the next pass continue where :meth:`state_dict` was called."""
        self.batches.load_state_dict(state)

    def describe(self) -> str:
        """Returns in one line what happens to a batch here."""
        steps = ["channels_last"] * self.channels_last + ["normalised"] * (self._scale is not None)
        shape = " and ".join(steps) or "unchanged"
        if self.device.type == "cpu":
            return f"{shape} on the CPU as batches come; there is no copy to overlap"
        pinned = getattr(self.batches, "pin_memory", None)
        note = "; batches are not pinned: the CPU waits for each copy" if pinned is False else ""
        return f"copied one batch ahead on a side stream, {shape} on {self.device}{note}"

    def _overlapped(self, source: Iterator) -> Iterator:
        stream = _side_stream(torch.cuda.current_stream(self.device).device)
        ahead = self._start(source, stream)
        while ahead is not None:
            batch, current = ahead[0], torch.cuda.current_stream(self.device)
            current.wait_stream(stream)
            # The memory belongs to the side stream; without this it could be given away while it is still read.
            _map(lambda tensor, current=current: tensor.record_stream(current), batch)
            ahead = self._start(source, stream)
            yield batch

    def _start(self, source: Iterator, stream) -> tuple | None:
        for batch in source:
            current = torch.cuda.current_stream(self.device)

            def bring(tensor: Tensor, current=current) -> Tensor:
                if tensor.device == stream.device:  # the current stream makes it, and may give its memory away
                    stream.wait_stream(current)
                    tensor.record_stream(stream)
                return tensor.to(self.device, non_blocking=True)

            with torch.cuda.stream(stream):
                return (self._convert(_map(bring, batch)),)
        return None

    def _convert(self, batch):
        if self._scale is not None:
            _check_images(batch)
        return _map(self._tensor, batch)

    def _tensor(self, tensor: Tensor) -> Tensor:
        if tensor.dim() != 4:
            return tensor
        if self.channels_last:
            tensor = tensor.contiguous(memory_format=torch.channels_last)  # before the dtype: uint8 moves least
        if self._scale is None or tensor.dtype != torch.uint8:
            return tensor
        if tensor.shape[1] != self._scale.shape[1]:
            raise ValueError(f"normalize has {self._scale.shape[1]} channels, the images are {list(tensor.shape)}")
        return torch.mul(tensor, self._scale).sub_(self._shift).to(self.dtype)


@functools.cache
def _side_stream(device: torch.device):
    """One for all passes: memory that was freed on a stream is for that stream alone."""
    return torch.cuda.Stream(device)


def _check_images(batch) -> None:
    """Refuses a batch without images to normalise: a network would learn from others than it is meant to."""
    tensors: list[Tensor] = []
    _map(tensors.append, batch)
    if not any(tensor.dim() == 4 and tensor.dtype == torch.uint8 for tensor in tensors):
        found = ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors) or "no tensors"
        raise ValueError(f"normalize takes images [N, C, H, W] of uint8, and a batch has none: it holds {found}")


def _map(function, batch):
    if isinstance(batch, Tensor):
        result = function(batch)
        return batch if result is None else result
    if isinstance(batch, dict):
        return {key: _map(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(function, value) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_map(function, value) for value in batch)
    return batch

"""Batches of indices whose order is a function of (seed, epoch), so that a position is one number."""

import numbers
from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from fusedtrain.train.rng import EpochIndex, mix


class EpochSampler(Sampler[list[int]]):
    """A ``batch_sampler`` for DataLoader that shuffles, shards over ranks and continues anywhere in an epoch.

    One step of all ranks takes the next ``world_size * batch_size`` samples of the epoch's order. The last step takes
    what is left, spread evenly, so that over all ranks every sample comes exactly once per epoch and all ranks take
    equally many steps. Where fewer samples are left than ranks, a rank without one gets a single sample once more:
    :meth:`counts` tells how many samples of a step are real, 0 for such a rank, and the loop must weigh by them.

    DataLoader workers ask for batches ahead of training, so the sampler cannot know which were used: the loop calls
    :meth:`advance` for every batch it has used up, and :meth:`state_dict` is right at any time with any number of
    workers. The state is the same on all ranks and fits any number of them.

    Args:
        size: samples in the dataset.
        batch_size: samples per step and rank.
        shuffle: False keeps the order of the dataset.
        seed: of the order.
        rank, world_size: this process among how many.
        drop_last: leave out a last step that is not full on all ranks.

    Yields:
        Lists of :class:`fusedtrain.train.rng.EpochIndex`, which are the indices for any dataset.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ):
        for name, value in (("size", size), ("batch_size", batch_size), ("world_size", world_size)):
            if not isinstance(value, numbers.Integral) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must lie between 0 and world_size - 1 ({world_size - 1}), got {rank}")
        if drop_last and size < batch_size * world_size:
            raise ValueError(f"drop_last leaves nothing of {size} samples: a step takes {batch_size * world_size}")
        # As Python's: of the position a checkpoint is made.
        self.size, self.batch_size, self.shuffle, self.seed = int(size), int(batch_size), shuffle, seed
        self.rank, self.world_size, self.drop_last = rank, world_size, drop_last
        self.epoch = self.position = 0

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of ``epoch``; where that is the epoch at hand, stays where it is in it."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def advance(self, steps: int = 1) -> None:
        """Notes that the next batches are used up."""
        self.position = min(self.size, self.position + steps * self.batch_size * self.world_size)

    def __len__(self) -> int:
        """Steps of a whole epoch that starts at 0."""
        return self._steps(self.size)

    def remaining(self) -> int:
        """Steps from the position to the end of the epoch."""
        return self._steps(self.size - self.position)

    def counts(self, step: int = 0) -> list[int]:
        """Real samples of each rank in the step that comes ``step`` steps after the position."""
        return self._counts(self.position + step * self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of this rank from the position on; iterating does not move the position."""
        order, epoch, first = self._order(), self.epoch, self.position
        for step in range(self.remaining()):
            position = first + step * self.batch_size * self.world_size
            counts = self._counts(position)
            start = position + sum(counts[: self.rank])
            # A rank that is left without a sample takes the last one along, which does not count.
            indices = order[start : start + counts[self.rank]] if counts[self.rank] else order[-1:]
            yield [EpochIndex(index, epoch) for index in indices.tolist()]

    def state_dict(self) -> dict:
        """Seed, epoch and the number of samples of it that are used up, over all ranks: O(1)."""
        names = ("size", "shuffle", "seed", "epoch", "position")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict) -> None:
        """Continues where :meth:`state_dict` was called, also with another batch size and number of ranks.

        Raises:
            ValueError: the state is that of another dataset or order.
        """
        for name in ("size", "shuffle", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the position belongs to an order with {name}={state[name]}, this is {getattr(self, name)}"
                )
        self.epoch, self.position = state["epoch"], state["position"]

    def _steps(self, samples: int) -> int:
        total = self.batch_size * self.world_size
        return samples // total if self.drop_last else -(-samples // total)

    def _counts(self, position: int) -> list[int]:
        left = max(0, min(self.batch_size * self.world_size, self.size - position))
        return [(left + rank) // self.world_size for rank in reversed(range(self.world_size))]

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.size, device="cpu")
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch, -1))
        return torch.randperm(self.size, generator=generator, device="cpu")

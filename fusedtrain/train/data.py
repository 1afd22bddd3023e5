"""Batches of images held in memory, and the digits that come with scikit-learn."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtrain._extras import need, require
from fusedtrain.train.sampler import EpochSampler


class Batches:
    """Iterates over images and targets in batches; every epoch has an order of its own that only the seed decides.

    Args:
        images: ``[N, C, H, W]``.
        targets: class indices ``[N]``, int64.
        batch_size: images per batch and process; the last one may be shorter, none is dropped.
        shuffle: False keeps the order, as evaluation wants it.
        seed: of the order.
        rank, world_size: this process among how many; each gets its part of every step, see :class:`EpochSampler`.

    Yields:
        Pairs ``(images [B, C, H, W], targets [B])``.

    Raises:
        ValueError: images and targets are not equally many, or a number is out of range.
    """

    def __init__(
        self,
        images: Tensor,
        targets: Tensor,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ):
        if len(images) != len(targets):
            raise ValueError(f"images and targets must be equally many, got {len(images)} and {len(targets)}")
        self.images, self.targets = images, targets
        self.sampler = EpochSampler(
            len(images), batch_size, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size
        )

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.sampler:
            if self.sampler.shuffle:
                yield self.images[batch], self.targets[batch]
            else:
                part = slice(batch[0], batch[-1] + 1)
                yield self.images[part], self.targets[part]


@dataclass(frozen=True)
class Digits:
    """Handwritten digits, normalised: images ``[N, 1, size, size]`` float32, targets ``[N]`` int64."""

    train_images: Tensor
    train_targets: Tensor
    valid_images: Tensor
    valid_targets: Tensor

    CLASSES = 10


def load_digits(size: int = 32) -> Digits:
    """Returns scikit-learn's 1,797 handwritten digits, split 4:1 into training and validation, always alike.

    Args:
        size: the 8x8 images are enlarged to this, bilinearly.

    Raises:
        ModuleNotFoundError: scikit-learn or NumPy is missing.

    Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, https://doi.org/10.24432/C50P49; the part
    that scikit-learn ships.
    """
    # Read as sklearn.datasets.load_digits does, without importing SciPy for it.
    table = need("numpy", "train").loadtxt(require("sklearn", "train") / "datasets/data/digits.csv.gz", delimiter=",")
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    table = torch.from_numpy(table)[order]
    images = table[:, :-1].reshape(-1, 1, 8, 8).float() / 16  # 17 grey levels
    targets = table[:, -1].long()
    train = len(order) * 4 // 5
    images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    images = (images - images[:train].mean()) / images[:train].std()
    return Digits(images[:train], targets[:train], images[train:], targets[train:])

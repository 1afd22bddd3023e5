"""Batches of images held in memory, and the digits that come with scikit-learn."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


class Batches:
    """Iterates over images and targets in batches; every epoch has an order of its own that only the seed decides.

    Args:
        images: ``[N, C, H, W]``.
        targets: class indices ``[N]``, int64.
        batch_size: images per batch; the last one may be shorter, none is dropped.
        shuffle: False keeps the order, as evaluation wants it.
        seed: of the order. Batch ``i`` of epoch ``e`` is a function of (seed, e, i) alone.

    Yields:
        Pairs ``(images [B, C, H, W], targets [B])``.
    """

    def __init__(self, images: Tensor, targets: Tensor, batch_size: int, *, shuffle: bool, seed: int = 0):
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if len(images) != len(targets):
            raise ValueError(f"images and targets must be equally many, got {len(images)} and {len(targets)}")
        self.images, self.targets = images, targets
        self.batch_size, self.shuffle, self.seed, self.epoch = batch_size, shuffle, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if not self.shuffle:
            yield from zip(self.images.split(self.batch_size), self.targets.split(self.batch_size))
            return
        # seed + epoch would give seed 1 the epochs of seed 0, one later; the factor is Knuth's, 2**32 / golden ratio.
        generator = torch.Generator().manual_seed((self.seed * 2654435761 + self.epoch) % 2**32)
        for batch in torch.randperm(len(self.images), generator=generator).split(self.batch_size):
            yield self.images[batch], self.targets[batch]


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

    Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, https://doi.org/10.24432/C50P49; the part
    that scikit-learn ships.
    """
    from sklearn.datasets import load_digits as sklearn_digits

    digits = sklearn_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.images)[order, None].float() / 16  # 17 grey levels
    targets = torch.from_numpy(digits.target)[order].long()
    train = len(order) * 4 // 5
    images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    images = (images - images[:train].mean()) / images[:train].std()
    return Digits(images[:train], targets[:train], images[train:], targets[train:])

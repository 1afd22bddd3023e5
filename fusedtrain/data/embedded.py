"""The data that come with a package, for a first run without any download."""

from torch.utils.data import TensorDataset


def digits(split: str = "train", size: int = 32) -> TensorDataset:
    """Returns scikit-learn's handwritten digits as samples (image ``[1, size, size]`` float32, class).

    Args:
        split: "train" (1,437 images) or "valid" (360).
        size: the 8x8 images are enlarged to this.

    Raises:
        ValueError: another split.
        ModuleNotFoundError: scikit-learn or NumPy is missing.

    See :func:`fusedtrain.train.load_digits` for the source; the images are normalised.
    """
    if split not in ("train", "valid"):
        raise ValueError(f'split must be "train" or "valid", got {split!r}')
    from fusedtrain.train import load_digits

    found = load_digits(size)
    return TensorDataset(getattr(found, f"{split}_images"), getattr(found, f"{split}_targets"))

"""Images in folders, one folder per class."""

import hashlib
import numbers
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fusedtrain._extras import need

EXTENSIONS = (".jpg", ".jpeg", ".png")
TRAINING = ("train", "training")
VALIDATION = ("val", "valid", "validation", "test", "testing")


class ImageFolder(Dataset):
    """Images ``root/class/.../name.jpg`` with the class as target, decoded by Pillow.

    Args:
        root: its subfolders are the classes, in alphabetical order, as torchvision's ImageFolder numbers them. Files
            are found at any depth below them; symbolic links are followed.
        size: scale the shorter side to this many pixels and cut out the middle square, so that images of any size make
            a batch; None keeps them as they are.
        transform: takes the PIL image (RGB, after ``size``), returns the sample; None gives a uint8 tensor
            ``[3, H, W]``, a fourth of what float32 would move between processes and to the device.
        extensions: of the files to take, in lower case, one or many; others are ignored.

    Raises:
        ValueError: ``root`` is no folder or has no class folders, a class has no image, or ``size`` is below 1.
        ModuleNotFoundError: Pillow is missing.

    A file that cannot be decoded raises when its sample is asked for; :func:`fusedtrain.data.loader` adds its name.
    JPEG files much larger than ``size`` are decoded at a half, a quarter or an eighth of their resolution, for a part
    of the cost (Pillow's ``draft``); the image differs slightly from one that is only scaled down.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        size: int | None = None,
        transform: Callable | None = None,
        extensions: str | tuple[str, ...] = EXTENSIONS,
    ):
        need("PIL.Image", "data")
        extensions = (extensions,) if isinstance(extensions, str) else tuple(extensions)
        if size is not None and (not isinstance(size, numbers.Integral) or size < 1):
            raise ValueError(f"size must be an integer of at least 1, got {size!r}")
        self.root, self.size, self.transform = Path(root), size, transform
        if not self.root.is_dir():
            raise ValueError(f"{self.root} is not a folder")
        self.classes = sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir())
        if not self.classes:
            raise ValueError(f"{self.root} has no class folders: images are expected in {self.root}/<class>/")
        self.samples: list[tuple[str, int]] = []
        for target, name in enumerate(self.classes):
            files = sorted(_files(str(self.root / name), extensions))
            if not files:
                raise ValueError(f"{self.root / name} has no file that ends in {', '.join(extensions)}")
            self.samples += [(file, target) for file in files]

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        return f"ImageFolder({str(self.root.resolve())!r}, size={self.size}, transform={self.transform!r})"

    def __getitem__(self, index: int):
        from PIL import Image

        path, target = self.samples[index]
        with Image.open(path) as image:
            if self.size is not None:
                image.draft("RGB", (self.size, self.size))
            image = _rgb(image)
        if self.size is not None:
            image = _middle(image, self.size)
        return (to_tensor(image) if self.transform is None else self.transform(image)), target

    def sample_name(self, index: int) -> str:
        """Returns the file of a sample."""
        return self.samples[index][0]

    def fingerprint(self) -> str:
        """Returns a hash over names, sizes and times of change of all files, and ``size``; one stat call per file."""
        digest = hashlib.sha256(f"{self.root.resolve()} {self.size}".encode(errors="surrogateescape"))
        for path, target in self.samples:
            status = os.stat(path)
            line = f"{path}\0{target}\0{status.st_size}\0{status.st_mtime_ns}\n"
            digest.update(line.encode(errors="surrogateescape"))  # names of files are bytes
        return digest.hexdigest()


def parts(root: str | Path) -> tuple[Path, Path | None] | None:
    """Returns the folders of the images for training and for validation in ``root``, by their names in any case; None
    where the folders in it are classes.

    The second is None where none is for validation. A folder counts as one of the two when it holds folders itself.

    Raises:
        ValueError: the folders hold the same folders and no images, and the name of one says that it is a part.
    """
    root = Path(root)
    folders = _folders(root)
    inner = {name: _folders(root / name) for name in folders}
    known = {name.lower(): root / name for name in folders if inner[name]}
    train, valid = (next((known[n] for n in names if n in known), None) for names in (TRAINING, VALIDATION))
    if train is not None:
        return train, valid
    alike = len(folders) > 1 and all(classes == inner[folders[0]] != [] for classes in inner.values())
    if alike and any(name.lower().startswith(("train", "val", "test")) for name in folders):
        raise ValueError(
            f"{' and '.join(folders[:3])} in {root} hold the same folders: if these are the classes, call the folder"
            " for training train, and the one for validation val"
        )
    return None


def to_tensor(image) -> Tensor:
    """Returns a PIL image in mode RGB as uint8 ``[3, H, W]``, contiguous."""
    data = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return data.view(image.height, image.width, 3).permute(2, 0, 1).contiguous()


def _rgb(image):
    """Pillow would turn all of a grey image of 16 bits that is above 255 into white."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):  # which an older Pillow says
        from PIL import Image

        image = Image.fromarray((need("numpy", "data").asarray(image) >> 8).astype("uint8"))
    return image.convert("RGB")


def _middle(image, size: int):
    """Scales the shorter side to ``size`` and cuts the middle square out, in one resampling."""
    from PIL import Image

    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    return image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))


def _folders(root: Path) -> list[str]:
    """Without hidden ones, which programs leave there."""
    return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))


def _files(folder: str, extensions: tuple[str, ...]):
    for parent, _, names in os.walk(folder, followlinks=True):
        yield from (os.path.join(parent, name) for name in names if name.lower().endswith(extensions))

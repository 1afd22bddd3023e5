"""The arithmetic of a step: full precision, or autocast, with a scaled loss where the numbers are small."""

import contextlib
import copy
import dataclasses
import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fusedtrain.ops._common import cpu_multiplies
from fusedtrain.train.errors import require, require_count

Name = Literal["fp32", "bf16", "fp16", "fp64"]
PRECISIONS = get_args(Name)
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """Which arithmetic the layers use. Weights, sums and the loss stay in float32, but for fp64.

    Args:
        precision: fp32; bf16 or fp16: autocast. fp16 scales the loss, so that small gradients do not become zero, and
            leaves out the steps whose gradients overflow. fp64: weights, batches and all else in float64, slow, to
            compare with.
        tf32: whether, on GPUs that have it, fp32 matrix products and convolutions keep 10 bits of the mantissa, and are
            faster; for the whole process. None leaves torch's settings as they are: its own are convolutions with, and
            products without.
        init_scale: first loss scale of fp16; it halves at every overflow.
        growth_interval: steps without overflow after which the loss scale of fp16 doubles.

    Raises:
        InputError: a value is out of range.
    """

    precision: Name = "fp32"
    tf32: bool | None = None
    init_scale: float = 65536.0
    growth_interval: int = 2000

    def __post_init__(self):
        names = ", ".join(PRECISIONS)
        require(self.precision in PRECISIONS, f"precision must be one of {names}, got {self.precision!r}")
        finite = 0 < self.init_scale < float("inf")
        require(finite, f"init_scale must be positive and finite, got {self.init_scale}")
        require_count("growth_interval", self.growth_interval)

    def set_tf32(self, device: torch.device) -> None:
        """Lets fp32 products use TF32 or not, for the whole process, where that is said."""
        if device.type == "cuda" and self.tf32 is not None:
            torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
            # Of all its ops: after one alone, torch cannot read it. torch.backends.cudnn.allow_tf32 calls this too, but
            # not after disable_global_flags().
            torch._C._set_cudnn_allow_tf32(self.tf32)

    def warn_where_slow(self, device: torch.device) -> None:
        """Warns of autocast on a CPU without instructions for its dtype: float32 is faster there."""
        dtype = _HALF.get(self.precision)
        if device.type == "cpu" and dtype is not None and not cpu_multiplies(dtype):
            name = str(dtype).removeprefix("torch.")
            faster = f"precision='fp32' is likely faster than {self.precision!r}"
            warnings.warn(f"this CPU has no instructions that multiply {name}: {faster}", stacklevel=3)

    @property
    def dtype(self) -> torch.dtype | None:
        """What weights and batches become; None: they stay as they are."""
        return torch.float64 if self.precision == "fp64" else None

    def autocast(self, device: torch.device):
        """Returns the context in which the model runs forward."""
        if self.precision not in _HALF:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=_HALF[self.precision])

    def scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """Returns the scaler of the loss for fp16, else None."""
        if self.precision != "fp16":
            return None
        interval = int(self.growth_interval)  # torch takes no 2e3
        scaler = torch.amp.GradScaler(device.type, init_scale=self.init_scale, growth_interval=interval)
        scaler.scale(torch.zeros((), device=device))  # makes its tensors, which a resumed group needs before a loss
        return scaler


def full(output):
    """``output`` with 16-bit tensors in float32: exponentials and sums of a loss want more bits."""
    if isinstance(output, Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if isinstance(output, (tuple, list)):
        parts = map(full, output)
        return output._make(parts) if hasattr(output, "_make") else type(output)(parts)  # the first: a namedtuple
    if isinstance(output, dict):  # a defaultdict, for instance
        result = copy.copy(output)
        for name, value in output.items():
            result[name] = full(value)
        return result
    if dataclasses.is_dataclass(output):
        result = copy.copy(output)
        for field in dataclasses.fields(output):
            object.__setattr__(result, field.name, full(getattr(output, field.name)))  # frozen or not
        return result
    return output

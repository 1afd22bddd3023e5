"""Whole optimizer steps of a CNN with many small parameters and of a transformer with few large ones."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from lists import ListBenchmark, ListCase, Make, measure  # noqa: F401  (run.py takes measure from here)
from networks import NETWORKS
from torch import Tensor

from fusedtrain import optim

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from zoo import Zoo

MAX_NORM, DECAY = 1.0, 0.999


def _steps(cls: Callable, **arguments) -> Make:
    return lambda params: cls(params, **arguments).step


def _compiled(make: Make) -> Make:
    def compiled(params: list[Tensor]) -> Callable:
        step = make(params)
        return torch.compile(lambda: step())

    return compiled


def _tail(**arguments) -> Make:
    """Clipping, AdamW, averages and zeros, one after the other, as stock code has to."""

    def make(params: list[Tensor]) -> Callable:
        optimizer, averages = torch.optim.AdamW(params, **arguments), [p.detach().clone() for p in params]
        plain, foreach = [p.detach() for p in params], arguments.get("foreach") is not False

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM, foreach=foreach)
            optimizer.step()
            if foreach:
                torch._foreach_lerp_(averages, plain, 1 - DECAY)
            else:
                for average, p in zip(averages, plain, strict=True):
                    average.lerp_(p, 1 - DECAY)
            torch._foreach_zero_([p.grad for p in params])

        return step

    return make


def _stock(cls: Callable, *, fused: bool = False, **arguments) -> dict[str, Make]:
    if "foreach" not in inspect.signature(cls).parameters:  # as with some of timm's, by its version
        return {"eager loop": _steps(cls, **arguments)}
    loop = _steps(cls, **arguments, foreach=False)
    forms = {"eager loop": loop, "eager foreach": _steps(cls, **arguments, foreach=True)}
    return forms | ({"eager fused": _steps(cls, **arguments, fused=True)} if fused else {})


# What is done -> numbers read or written per parameter (in its dtype, in float32), ours, stock.
def _steps_of_torch() -> dict[str, tuple]:
    momentum = {"lr": 0.01, "momentum": 0.9}
    extras = {"max_grad_norm": MAX_NORM, "ema_decay": DECAY, "zero_grads": True}
    tails = {"eager loop": _tail(foreach=False), "eager foreach": _tail(foreach=True), "eager fused": _tail(fused=True)}
    return {
        "AdamW": ((7, 0), _steps(optim.AdamW), _stock(torch.optim.AdamW, fused=True)),
        "clip + AdamW + EMA + zero": ((9, 2), _steps(optim.AdamW, **extras), tails),
        "SGD": ((5, 0), _steps(optim.SGD, **momentum), _stock(torch.optim.SGD, fused=True, **momentum)),
        "RMSprop": ((7, 0), _steps(optim.RMSprop, **momentum), _stock(torch.optim.RMSprop, **momentum)),
    }


def _steps_of_timm() -> dict[str, tuple]:
    """None without timm."""
    try:
        Zoo()
        import timm.optim as stock
    except ImportError:
        return {}
    momentum = {"lr": 0.01, "momentum": 0.9}
    return {
        "RMSpropTF": ((7, 0), _steps(optim.RMSpropTF, **momentum), _stock(stock.RMSpropTF, **momentum)),
        "Lamb": ((11, 0), _steps(optim.Lamb), _stock(stock.Lamb)),
        "Lion": ((5, 0), _steps(optim.Lion), _stock(stock.Lion)),
        "Adan": ((11, 0), _steps(optim.Adan), _stock(stock.Adan)),
        "NovoGrad": ((6, 0), _steps(optim.NovoGrad), _stock(stock.NvNovoGrad)),
    }


def _steps_in_fewer_bits(dtype: torch.dtype) -> dict[str, tuple]:
    """Beside torch's AdamW, which keeps all states in the dtype of the parameters."""
    forms = {
        "states in bfloat16": ((5, 0), torch.float32, {"state_dtype": torch.bfloat16}),
        "states in 8 bits": ((4, 0), torch.float32, {"state_dtype": "8bit"}),
        "stochastic rounding": ((7, 0), torch.bfloat16, {"rounding": "stochastic"}),
        "Kahan": ((9, 0), torch.bfloat16, {"rounding": "kahan"}),
        "master weights": ((3, 6), torch.bfloat16, {"master_weights": True}),
    }
    stock = _stock(torch.optim.AdamW, fused=True)
    return {
        f"AdamW, {name}": (passes, _steps(optim.AdamW, **arguments), stock)
        for name, (passes, of, arguments) in forms.items()
        if of == dtype
    }


def cases(dtype: torch.dtype) -> list[ListCase]:
    found, narrow = [], _steps_in_fewer_bits(dtype)
    for name, (passes, ours, stock) in (_steps_of_torch() | _steps_of_timm() | narrow).items():
        for network in NETWORKS:
            forms = dict(stock)
            if "eager foreach" in forms:
                forms["compile foreach"] = _compiled(forms["eager foreach"])
            found.append(ListCase(f"{name} {network}", name, network, passes, ours, forms, name not in narrow))
    return found


BENCHMARK = ListBenchmark("optimizer_step", cases)

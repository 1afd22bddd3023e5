"""What the Python side of a call costs, on a tiny tensor where nothing else counts.

Rows per op: ``select`` chooses the backend; ``checks`` is the whole public call with the kernel taken out, and
``checks+grad`` with autograd recording; ``auto`` and ``eager`` are the real calls of this package and of plain PyTorch.
"""

import dataclasses
import importlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import bench_channel_pool
import bench_channel_scale
import bench_squeeze_excite
import torch
from harness import Benchmark, quantiles
from timing import host_clock

from fusedtrain.backend import select

SHAPE = (1, 8, 1, 1)
CALLS, ROUNDS = 500, 40


def _inputs(op: str, grad: bool) -> tuple[torch.Tensor, ...]:
    x = torch.randn(SHAPE)
    weights = (torch.randn(4, 8, 1, 1), torch.randn(4), torch.randn(8, 4, 1, 1), torch.randn(8))
    inputs = {"channel_pool": (x,), "channel_scale": (x, torch.rand(1, 8)), "squeeze_excite": (x, *weights)}[op]
    return tuple(t.requires_grad_(grad) for t in inputs)


@contextmanager
def _without_kernel(impls: dict, name: str, call: Callable):
    """The backend ``name`` returns what it computed once, at no cost."""
    impl, results = impls[name], []
    try:
        impls[name] = dataclasses.replace(impl, forward=lambda *args: results.append(impl.forward(*args)) or results[0])
        call()
        impls[name] = dataclasses.replace(impl, forward=lambda *args: results[0])
        yield
    finally:
        impls[name] = impl


def _seconds(call: Callable) -> float:
    clock = host_clock()
    start = clock()
    for _ in range(CALLS):
        call()
    return (clock() - start) / CALLS


def _one(benchmark: Benchmark, options: dict, rounds: int) -> Iterator[dict]:
    impls = importlib.import_module(f"fusedtrain.ops.{benchmark.op}").IMPLS
    plain, recording = _inputs(benchmark.op, False), _inputs(benchmark.op, True)
    chosen = select(benchmark.op, impls, *plain)
    picked = next(name for name, impl in impls.items() if impl is chosen)
    stock = next(iter(benchmark.stock.values()))

    def ours(inputs):
        return lambda: benchmark.ours(*inputs, **options)

    times = {}

    def race(calls: dict[str, Callable]) -> None:
        for _ in range(rounds):
            for mode in random.sample(list(calls), len(calls)):
                times.setdefault(mode, []).append(_seconds(calls[mode]))

    race(
        {
            "select": lambda: select(benchmark.op, impls, *plain),
            "auto": ours(plain),
            "auto+grad": ours(recording),
            "eager": lambda: stock(*plain, **options),
            "eager+grad": lambda: stock(*recording, **options),
        }
    )
    for mode, inputs in (("checks", plain), ("checks+grad", recording)):
        with _without_kernel(impls, picked, ours(inputs)):
            race({mode: ours(inputs)})
    for mode, seconds in times.items():
        p20, p50, p80 = quantiles(seconds)
        yield {
            **{"op": "dispatch", "family": benchmark.op, "case": benchmark.op, "shape": "x".join(map(str, SHAPE))},
            **{"dtype": "float32", "layout": "contiguous", "mode": mode, "note": f"runs {picked}"},
            **{"backend": "eager" if mode.startswith("eager") else "auto", "rounds": rounds},
            **{"us_p50": p50, "us_p20": p20, "us_p80": p80},
        }


def rows(quick: bool) -> Iterator[dict]:
    """Measures every op on the CPU; in fewer rounds where it is to be quick."""
    rounds = 10 if quick else ROUNDS
    yield from _one(bench_channel_pool.BENCHMARK, {}, rounds)
    yield from _one(bench_channel_scale.BENCHMARK, {}, rounds)
    yield from _one(bench_squeeze_excite.BENCHMARK, {"act": "silu", "gate": "sigmoid"}, rounds)

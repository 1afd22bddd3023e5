"""What every benchmark shares: cases, the candidates that race on them, the gate before a number, and the rows after.

All candidates of one case, in both layouts, take turns call by call in random order, so that clock drift and noisy
neighbours hit all alike; every ratio is the median of the ratios within one such round. Slow ones sit out rounds, so
that the fast ones get turns enough for a median. A copy of a tensor as large as
``x`` takes part as one more candidate: the machine's own bandwidth at that size, under the same conditions.
"""

import gc
import importlib
import random
import statistics
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
from gate import Gate
from timing import peak_bytes, timer
from torch import Tensor

from fusedtrain.backend import BACKENDS, select, use_backend

Times = dict[int, float]  # seconds by round
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
MIN_TURNS, MAX_TURNS, WARM_UP = 5, 200, 2


@dataclass(frozen=True)
class Case:
    """One layer's call, as a model makes it.

    Args:
        label: the layer's own name, e.g. "efficientnet_b0.blocks.3.0.se".
        family: the class over which geometric means are taken, e.g. the model or the kernel size.
        inputs: takes a device, returns the op's tensors, contiguous and random; ``x`` stands first.
        bytes_moved: mode -> bytes when every tensor is read or written once.
        flops: mode -> floating-point operations.
        options: the op's keyword arguments.
    """

    label: str
    family: str
    inputs: Callable[[torch.device], tuple[Tensor, ...]]
    bytes_moved: dict[str, int]
    flops: dict[str, int]
    options: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Benchmark:
    """An op and what it races against.

    Args:
        op: the op's name.
        cases: takes a dtype, returns the cases.
        ours: the public function, called with a case's inputs and options.
        stock: name -> the same in plain PyTorch, called alike, run as it is and through ``torch.compile``. The first is
            the form that people use, named "", and in float64 the truth; others are what an expert would write.
        backwards: mode -> the inputs that receive gradients, None for all. Modes beside "bwd" add rows of their own.
        peers: packages that do the same -> why no number of theirs stands here.
        same_as_stock: backends that are left out because they are a stock path themselves.
        compiled: whether the stock paths run through ``torch.compile`` too.
    """

    op: str
    cases: Callable[[torch.dtype], list[Case]]
    ours: Callable[..., Tensor]
    stock: dict[str, Callable[..., Tensor]]
    backwards: dict[str, tuple[int, ...] | None] = field(default_factory=lambda: {"bwd": None})
    peers: dict[str, str] = field(default_factory=dict)
    same_as_stock: tuple[str, ...] = ()
    compiled: bool = True

    def selected(self, dtype: torch.dtype, quick: bool, only: list[str]) -> list[Case]:
        """The cases whose label contains one of ``only``; with ``quick`` the first of each family."""
        cases = [case for case in self.cases(dtype) if any(text in case.label for text in only)]
        return list({case.family: case for case in reversed(cases)}.values())[::-1] if quick else cases


@dataclass(eq=False)
class Candidate:
    """One way to run a case: a backend (or stock path) in one layout."""

    backend: str
    layout: str
    call: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    stock: str | None = None  # the name of the stock form
    forced: str | None = None
    note: str = ""
    times: dict[str, Times] = field(default_factory=dict)  # by mode


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    """A 4-d tensor in that memory format; others as they are."""
    return tensor.contiguous(memory_format=LAYOUTS[layout]) if tensor.dim() == 4 else tensor


def _own_code(call: Callable, options: dict) -> Callable:
    """``call`` with ``options`` bound and a code object of its own, as torch.compile caches graphs per code object."""

    def bound(*inputs):
        return call(*inputs, **options)

    return types.FunctionType(bound.__code__.replace(), bound.__globals__, "bound", None, bound.__closure__)


def _compiled(call: Callable, options: dict, device: torch.device) -> Callable:
    # On a GPU the harness replays every candidate from a CUDA graph, so the compiled code brings none of its own.
    mode = "max-autotune-no-cudagraphs" if device.type == "cuda" else None
    return torch.compile(_own_code(call, options), dynamic=False, mode=mode)


def _ours(benchmark: Benchmark, case: Case, layout: str, inputs: tuple[Tensor, ...]) -> Iterator[Candidate]:
    module = importlib.import_module(f"fusedtrain.ops.{benchmark.op}")
    call = _own_code(benchmark.ours, case.options)
    for name in BACKENDS:
        if name not in benchmark.same_as_stock and module.IMPLS[name].why_not(*inputs) is None:
            yield Candidate(name, layout, call, inputs, forced=name)
    yield Candidate("auto", layout, call, inputs, note=_choice(benchmark.op, module, call, inputs))


def _choice(op: str, module: types.ModuleType, call: Callable, inputs: tuple[Tensor, ...]) -> str:
    """What the automatic choice runs in this call, and in the backward pass where that has a choice of its own."""
    chosen = {}

    def watched(asked: str, impls: dict, *args):
        impl = select(asked, impls, *args)
        chosen.setdefault(asked, next(name for name, each in impls.items() if each is impl))
        return impl

    with use_backend(None), mock.patch.object(module, "select", watched):
        call(*inputs)
    forward = chosen.get(op, "reference")  # an op that does not ask knows
    backward = chosen.get(f"{op}_backward", forward)
    return f"runs {forward}" + (f", backward {backward}" if backward != forward else "")


def candidates(benchmark: Benchmark, case: Case, device: torch.device) -> list[Candidate]:
    """Every backend that can run, the automatic choice, and the stock paths, in both layouts, on the same values."""
    torch.manual_seed(0)
    tensors = case.inputs(device)
    found = []
    for layout in LAYOUTS:
        inputs = tuple(in_layout(t, layout).detach().requires_grad_(t.is_floating_point()) for t in tensors)
        found += _ours(benchmark, case, layout, inputs)
        for name, call in benchmark.stock.items():
            eager = _own_code(call, case.options)
            found.append(Candidate(f"eager {name}".strip(), layout, eager, inputs, stock=name))
            if not benchmark.compiled:
                continue
            compiled = _compiled(call, case.options, device)
            found.append(Candidate(f"compile {name}".strip(), layout, compiled, inputs, stock=name))
    return found


def _copy(x: Tensor) -> Candidate:
    target = torch.empty_like(x)
    return Candidate("copy", "contiguous", target.copy_, (x.detach(),))


def race(racers: list[tuple[Candidate, Callable]], mode: str, budget: float, seed: str) -> None:
    """Times the candidates by turns, in random order: each as often as its share of the ``budget`` of seconds allows,
    ``MIN_TURNS`` at least. Who is slower takes part in every second, fourth, ... round."""
    rng = random.Random(seed)  # of the case: one order for all would favour the same candidates in each

    def one_round(number: int, taking_part: list[tuple[Candidate, Callable]]) -> None:
        for candidate, step in rng.sample(taking_part, len(taking_part)):
            with use_backend(candidate.forced):
                forward, backward = step()
            for name, seconds in (("fwd", forward), (mode, backward), (f"fwd+{mode}", forward + backward)):
                candidate.times.setdefault(name, {})[number] = seconds

    for _ in range(WARM_UP):
        one_round(0, racers)
    share = budget / len(racers)
    spent = [sum(candidate.times[name][0] for name in {"fwd", mode}) for candidate, _ in racers]
    turns = [max(MIN_TURNS, min(MAX_TURNS, round(share / max(seconds, 1e-6)))) for seconds in spent]
    # Powers of two: any two candidates share all the rounds of the slower one.
    every = [1 << (max(turns) // own).bit_length() - 1 for own in turns]
    for candidate, _ in racers:
        candidate.times.clear()
    gc.collect()
    gc.disable()
    try:
        for number in range(max(turns)):
            one_round(number, [racer for racer, pace in zip(racers, every, strict=True) if number % pace == 0])
    finally:
        gc.enable()


def measure(
    benchmark: Benchmark, case: Case, dtype: torch.dtype, device: torch.device, budget: float, peak_gflops: float
) -> Iterator[dict]:
    """Gates and times one case; yields its rows, candidates that failed the gate with the reason and no number.

    Args:
        budget: seconds of timed calls per case and backward mode; each candidate gets ``MIN_TURNS`` at least.
        peak_gflops: the machine's arithmetic peak, for the floor.
    """
    torch._dynamo.reset()
    everyone = candidates(benchmark, case, device)
    gate = Gate(next(iter(benchmark.stock.values())), case.options, everyone[0].inputs)
    for mode, wanted in benchmark.backwards.items():
        wrt = range(len(everyone[0].inputs)) if wanted is None else wanted
        gate.prepare(wrt, [c for c in everyone if c.backend.startswith("eager")])
        copy, racers, peaks = _copy(everyone[0].inputs[0]), [], {}
        for candidate in everyone:
            candidate.times = {}
            with use_backend(candidate.forced):
                fault = gate.fault(candidate)
                if fault is None or candidate.stock is not None:  # dropping a rival would flatter us
                    dy = in_layout(gate.dy, candidate.layout)
                    footprint = case.bytes_moved["fwd"] + case.bytes_moved[mode]
                    racers.append((candidate, timer(candidate.call, candidate.inputs, wrt, dy, footprint)))
                    peaks[candidate] = peak_bytes(candidate.call, candidate.inputs, wrt, dy, mode)
            if fault is not None:
                candidate.note = f"{'no number' if candidate.stock is None else 'less accurate than eager'}: {fault}"
        racers.append((copy, timer(copy.call, copy.inputs, (), None, 2 * copy.inputs[0].nbytes)))
        race(racers, mode, budget, f"{case.label} {dtype} {mode}")
        modes = ("fwd", "bwd", "fwd+bwd") if mode == "bwd" else (mode,)
        yield from _rows(benchmark, case, dtype, everyone, copy, peaks, modes, peak_gflops)


def ratio(numerator: Times, denominator: Times) -> float:
    """The median of the ratio within a round, over the rounds that hold both."""
    return statistics.median(numerator[number] / denominator[number] for number in numerator.keys() & denominator)


def median(times: Times) -> float:
    return statistics.median(times.values())


def _speedups(candidate: Candidate, stock: list[Candidate], usual: str, mode: str) -> dict[str, float]:
    """Over the fastest stock path, the fastest in the same layout, and the fastest of the usual form."""
    rivals = {
        "speedup": stock,
        "speedup_same_layout": [c for c in stock if c.layout == candidate.layout],
        "speedup_usual": [c for c in stock if c.stock == usual],
    }
    best = {name: min(of, key=lambda c: median(c.times[mode])) for name, of in rivals.items()}
    return {name: ratio(c.times[mode], candidate.times[mode]) for name, c in best.items()}


def _rows(benchmark, case, dtype, everyone, copy, peaks, modes, peak_gflops) -> Iterator[dict]:
    x = everyone[0].inputs[0]
    common = {
        "op": benchmark.op,
        "family": case.family,
        "case": case.label,
        "shape": "x".join(map(str, x.shape)),
        "dtype": str(dtype).removeprefix("torch."),
    }
    copy_times, copy_bytes = copy.times["fwd"], 2 * x.nbytes
    for mode in modes:
        ran = [c for c in everyone if mode in c.times]
        stock = [c for c in ran if c.stock is not None]
        moved, flops = case.bytes_moved[mode], case.flops[mode]
        for candidate in everyone:
            row = {**common, "layout": candidate.layout, "mode": mode, "backend": candidate.backend}
            row["note"] = candidate.note
            if candidate in ran:
                times = candidate.times[mode]
                p20, p50, p80 = quantiles(times.values())
                moving = {number: moved * t / copy_bytes for number, t in copy_times.items()}
                floor = {number: max(t, flops / (peak_gflops * 1e9)) for number, t in moving.items()}
                row |= {
                    "us_p50": p50,
                    "us_p20": p20,
                    "us_p80": p80,
                    **_speedups(candidate, stock, next(iter(benchmark.stock)), mode),
                    "gb_per_s": moved / p50 / 1e3,
                    "pct_copy": 100 * ratio(moving, times),
                    "pct_floor": 100 * ratio(floor, times),
                    "peak_mib": peaks[candidate][mode] / 2**20,
                    "rounds": len(times),
                }
            yield row
        p20, p50, p80 = quantiles(copy_times.values())
        yield {**common, "layout": "contiguous", "mode": mode, "backend": "copy", "us_p50": p50, "us_p20": p20} | {
            "us_p80": p80,
            "gb_per_s": copy_bytes / p50 / 1e3,
            "rounds": len(copy_times),
        }


def quantiles(seconds: Iterable[float]) -> tuple[float, float, float]:
    """p20, p50 and p80 in microseconds."""
    deciles = statistics.quantiles(seconds, n=10, method="inclusive")
    return deciles[1] * 1e6, deciles[4] * 1e6, deciles[7] * 1e6

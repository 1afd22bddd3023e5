"""How the ops on lists of tensors are measured: whole steps on the parameters of a network, taking turns.

Every candidate owns its tensors, as an optimizer does; all start from the same numbers. The first steps are the gate:
parameters as good as the first stock form's against float64, or no number. Then the candidates take turns step by step
in random order, and so does a copy of as many elements, the machine's bandwidth.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from harness import BYTES, Times, median, quantiles, race, ratio
from networks import NETWORKS, elements
from timing import clock_of, peak
from torch import Tensor

Make = Callable[[list[Tensor]], Callable[[], Tensor | None]]


@dataclass(frozen=True)
class ListCase:
    """A step over a network's parameters.

    Args:
        label: what is done, and the network.
        family: what is done.
        network: a key of ``networks.NETWORKS``.
        passes: how often a number of each parameter is read or written, in the parameters' dtype and in float32.
        ours: takes parameters with gradients, returns the step; a step that returns a tensor is judged by that.
        stock: name -> the same in PyTorch or timm; the first is also the truth, in float64.
        exact: False where ours is meant to keep fewer bits: the gate then asks for finite numbers only.
    """

    label: str
    family: str
    network: str
    passes: tuple[int, int]
    ours: Make
    stock: dict[str, Make]
    exact: bool = True


@dataclass(frozen=True)
class ListBenchmark:
    """See harness.Benchmark."""

    op: str
    cases: Callable[[torch.dtype], list[ListCase]]
    peers: dict[str, str] = field(default_factory=dict)
    compiled: bool = True

    def selected(self, dtype: torch.dtype, quick: bool, only: list[str]) -> list[ListCase]:
        cases = [case for case in self.cases(dtype) if any(text in case.label for text in only)]
        if self.compiled and not quick:
            return cases
        # Compiling a step of hundreds of tensors takes minutes.
        return [
            replace(case, stock={name: make for name, make in case.stock.items() if not name.startswith("compile")})
            for case in cases
            if not quick or case.network == "efficientnet_b0"
        ]


@dataclass(eq=False)
class Runner:
    """A candidate of one case."""

    backend: str
    make: Make
    step: Callable | None = None
    forced: str | None = None
    note: str = ""
    peak: int = 0
    times: dict[str, Times] = field(default_factory=dict)


def parameters(network: str, dtype: torch.dtype, rounded: torch.dtype, device: torch.device) -> list[Tensor]:
    """The same numbers for every candidate: normal, of the size that weights have, with gradients."""
    generator, params = torch.Generator().manual_seed(0), []
    for shape in NETWORKS[network]:
        p, g = (torch.randn(shape, generator=generator).mul_(0.1).to(rounded).to(device, dtype) for _ in range(2))
        params.append(p.requires_grad_())
        params[-1].grad = g
    return params


def _results(make: Make, case: ListCase, dtype: torch.dtype, rounded: torch.dtype, device: torch.device):
    """The step, and what two steps leave in the parameters; gradients that the step zeroes are set again."""
    params = parameters(case.network, dtype, rounded, device)
    step, grads = make(params), [p.grad.clone() for p in params]
    for _ in range(2):
        torch._foreach_copy_([p.grad for p in params], grads)
        result = step()
    torch._foreach_copy_([p.grad for p in params], grads)
    return step, [result.detach()] if result is not None else [p.detach() for p in params]


def _error(values: list[Tensor], truth: list[Tensor]) -> float:
    """The largest error; NaN for NaN."""
    return torch.stack([(v.double() - t).abs().max() for v, t in zip(values, truth, strict=True)]).max().item()


def timed(step: Callable, device: torch.device) -> Callable:
    """Returns a function that makes one step and returns its seconds: on a GPU until it is done, launches included."""
    clock = clock_of(device)

    def run() -> tuple[float, float]:
        start = clock()
        step()
        return clock() - start, 0.0

    return run


def measure(
    benchmark: ListBenchmark, case: ListCase, dtype: torch.dtype, device: torch.device, budget: float, _peak: float
) -> Iterator[dict]:
    """The rows of one case."""
    torch._dynamo.reset()
    first = next(iter(case.stock.values()))
    _, truth = _results(first, case, torch.float64, dtype, device)
    everyone = [Runner("auto", case.ours, note="ours"), *(Runner(name, make) for name, make in case.stock.items())]
    allowed = None
    for runner in [everyone[1], everyone[0], *everyone[2:]]:
        runner.step, values = _results(runner.make, case, dtype, dtype, device)
        error = _error(values, truth)
        if allowed is None:
            scale = max(t.abs().max().item() for t in truth)
            allowed = 2 * error + 2 * torch.finfo(values[0].dtype).eps * scale
        if not error <= (allowed if case.exact or runner is not everyone[0] else float("inf")):
            runner.note = f"{'no number' if runner is everyone[0] else 'less accurate than eager'}: off by {error:.3g}"
        del values
        runner.peak = peak(runner.step, device)[1]
    copied = torch.randn(elements(NETWORKS[case.network]), device=device).to(dtype)
    target = torch.empty_like(copied)
    copy = Runner("copy", None, lambda: target.copy_(copied))
    racers = [runner for runner in everyone if not runner.note.startswith("no number")]

    race([(r, timed(r.step, device)) for r in [*racers, copy]], "bwd", budget, f"{case.label} {dtype}")
    yield from _rows(benchmark, case, dtype, everyone, racers, copy)


def _rows(benchmark, case, dtype, everyone, racers, copy) -> Iterator[dict]:
    count, itemsize = elements(NETWORKS[case.network]), BYTES[str(dtype).removeprefix("torch.")]
    moved = count * (case.passes[0] * itemsize + case.passes[1] * 4)
    copy_times, copy_bytes = copy.times["fwd"], 2 * count * itemsize
    stock = [runner for runner in racers if runner.backend != "auto"]
    best = min(stock, key=lambda runner: median(runner.times["fwd"]))
    usual = stock[0]
    for runner in [*everyone, copy]:
        row = {
            **{"op": benchmark.op, "family": case.family, "case": case.label, "shape": str(count), "mode": "step"},
            **{"dtype": str(dtype).removeprefix("torch."), "layout": "contiguous"},
            **{"backend": runner.backend, "note": runner.note},
        }
        if "fwd" in runner.times:
            times, bytes_moved = runner.times["fwd"], copy_bytes if runner is copy else moved
            p20, p50, p80 = quantiles(times.values())
            moving = {number: bytes_moved * t / copy_bytes for number, t in copy_times.items()}
            over_best = ratio(best.times["fwd"], times)
            row |= {
                **{"us_p50": p50, "us_p20": p20, "us_p80": p80, "rounds": len(times)},
                **{"gb_per_s": bytes_moved / p50 / 1e3},
                **{"speedup": over_best, "speedup_same_layout": over_best},
                **{"speedup_usual": ratio(usual.times["fwd"], times), "peak_mib": runner.peak / 2**20},
                **dict.fromkeys(("pct_copy", "pct_floor"), 100 * ratio(moving, times)),
            }
        yield row

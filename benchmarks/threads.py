"""How evenly many threads share the work of a call, on a machine of any size.

Torch's threads take equal numbers of items, so who gets how much does not depend on how many of them run at once: the
system's counters of CPU time tell, for 32 threads on two cores too. ``most`` is the busiest thread's time, ``mean``
that of all, in milliseconds of a call; their ratio ``fill`` is the part of the threads that a machine with a core for
each would keep busy. The last column compares the busiest thread of stock PyTorch with ours. What threads take from
each other, caches and memory bandwidth, is not in it. The thread that calls is left out: it runs Python as well.

    python benchmarks/threads.py batch_norm_act --threads 32 --case blocks.5
"""

import argparse
import importlib
import os
import statistics
from collections.abc import Callable
from pathlib import Path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    files = Path(__file__).parent.glob("bench_*.py")
    ops = sorted(path.stem.removeprefix("bench_") for path in files if "\nBENCHMARK = " in path.read_text())
    parser.add_argument("op", choices=ops)
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--case", action="append", default=[], help="only layers whose name contains this")
    parser.add_argument("--layout", choices=["contiguous", "channels_last"], action="append", default=[])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16", "float64"], default="float32")
    parser.add_argument("--calls", type=int, default=50)
    given = parser.parse_args()
    if given.threads < 2:
        parser.error(f"--threads must be 2 or more, got {given.threads}: the thread that calls is left out")
    if not Path("/proc/self/schedstat").exists():
        parser.error("this system does not count the CPU time of each thread (/proc/self/schedstat)")
    return given


ARGS = arguments()
# Read when torch starts. Threads that spin while they wait would count that as work.
os.environ |= {"OMP_NUM_THREADS": str(ARGS.threads), "OMP_WAIT_POLICY": "PASSIVE"}

import torch  # noqa: E402
from harness import LAYOUTS, candidates  # noqa: E402


def times() -> dict[str, int]:
    """Nanoseconds of CPU by thread of this process, but for the calling one."""
    files = Path("/proc/self/task").glob("*/schedstat")
    return {f.parent.name: int(f.read_text().split()[0]) for f in files if f.parent.name != str(os.getpid())}


def shares(call: Callable[[], object], calls: int) -> list[float]:
    """Milliseconds of a call by thread of torch's: of five turns each thread's least."""
    call()
    turns = []
    for _ in range(5):
        before = times()
        for _ in range(max(1, calls // 5)):
            call()
        turns.append({thread: after - before.get(thread, 0) for thread, after in times().items()})
    least = sorted((min(turn.get(thread, 0) for turn in turns) for thread in turns[0]), reverse=True)
    return [nanoseconds / max(1, calls // 5) / 1e6 for nanoseconds in least[: ARGS.threads - 1]]


def main() -> None:
    torch.set_num_threads(ARGS.threads)
    benchmark = importlib.import_module(f"bench_{ARGS.op}").BENCHMARK
    print(f"{'layer, layout, direction':60} {'most':>8} {'mean':>8} {'fill':>5} {'stock':>8} {'fill':>5} {'ratio':>6}")
    for case in benchmark.selected(getattr(torch, ARGS.dtype), False, ARGS.case or [""]):
        everyone = candidates(benchmark, case, torch.device("cpu"))
        for layout in ARGS.layout or LAYOUTS:
            found = [
                next(c for c in everyone if c.backend == name and c.layout == layout) for name in ("auto", "eager")
            ]
            for direction in ("forward", "backward"):
                rows = []
                for candidate in found:
                    y = candidate.call(*candidate.inputs)
                    dy, wrt = torch.ones_like(y), [t for t in candidate.inputs if t.requires_grad]

                    def call(c=candidate, y=y, dy=dy, wrt=wrt, backward=direction == "backward"):
                        torch.autograd.grad(y, wrt, dy, retain_graph=True) if backward else c.call(*c.inputs)

                    rows.append(shares(call, ARGS.calls))
                (most, mean), (stock, stock_mean) = ((max(row), statistics.fmean(row)) for row in rows)
                print(
                    f"{f'{case.label}, {layout}, {direction}':60} {most:8.3f} {mean:8.3f} {mean / most:5.2f} "
                    f"{stock:8.3f} {stock_mean / stock:5.2f} {stock / most:6.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

"""How one call is timed, and how much memory it takes, on the host and on a GPU."""

import os
from collections.abc import Callable, Sequence
from time import get_clock_info, perf_counter, process_time

import torch
from torch import Tensor

Step = Callable[[], tuple[float, float]]


def host_clock() -> Callable[[], float]:
    """The clock for calls on the host: with one thread the CPU time of the process, which others do not stretch.

    It charges all threads, so a call that starts some of its own gains nothing. More threads need the wall clock.
    """
    fine = get_clock_info("process_time").resolution < 1e-6
    return process_time if fine and torch.get_num_threads() == 1 else perf_counter


def clock_of(device: torch.device) -> Callable[[], float]:
    """The clock for work on a device: on a GPU it stands when all that was launched is done."""
    if device.type != "cuda":
        return host_clock()

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return perf_counter()

    return synchronised


def timer(call: Callable, inputs: Sequence[Tensor], wrt: Sequence[int], dy: Tensor | None, bytes_moved: int) -> Step:
    """Returns a function that runs forward and backward once and returns the seconds of each.

    The forward pass records for backward, as in training. Without ``wrt`` there is no backward pass.
    """
    inputs = [t.detach().requires_grad_(i in wrt) for i, t in enumerate(inputs)]
    if inputs[0].device.type == "cuda":
        return _device_timer(call, inputs, wrt, dy, bytes_moved)
    return _host_timer(call, inputs, wrt, dy)


def _host_timer(call, inputs, wrt, dy) -> Step:
    wanted, clock = [inputs[i] for i in wrt], host_clock()

    def step():
        start = clock()
        y = call(*inputs)
        middle = clock()
        if not wanted:
            return middle - start, 0.0
        gradients = torch.autograd.grad(y, wanted, dy)
        end = clock()
        del y, gradients  # releasing them is not part of the op
        return middle - start, end - middle

    return step


def _device_timer(call, inputs, wrt, dy, bytes_moved) -> Step:
    """Forward and backward as two CUDA graphs, timed by events on the device.

    Each graph holds as many calls as it takes to move four times the L2 cache, every call on tensors of its own that
    stay alive through the capture, so that none finds its data in the cache.
    """
    device = inputs[0].device
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    copies = max(1, min(64, -(-4 * cache // max(bytes_moved, 1))))
    sets = [[t.detach().clone().requires_grad_(i in wrt) for i, t in enumerate(inputs)] for _ in range(copies)]
    incoming = [dy.clone() for _ in range(copies)] if wrt else []
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):  # autotuning and lazy initialisation must not happen under capture
            y = call(*sets[0])
            if wrt:
                torch.autograd.grad(y, [sets[0][i] for i in wrt], incoming[0])
            del y
    torch.cuda.synchronize(device)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward, stream=stream):
        outputs = [call(*each) for each in sets]
    gradients = []
    if wrt:
        with torch.cuda.graph(backward, pool=forward.pool(), stream=stream):
            for y, each, grad in zip(outputs, sets, incoming):
                gradients.append(torch.autograd.grad(y, [each[i] for i in wrt], grad))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]

    def step(_alive=(sets, incoming, outputs, gradients)):
        torch.cuda._sleep(1_000_000)  # the host queues everything while the device spins: no launch gap is timed
        events[0].record()
        forward.replay()
        events[1].record()
        if wrt:
            backward.replay()
        events[2].record()
        events[2].synchronize()
        return tuple(events[i].elapsed_time(events[i + 1]) / 1e3 / copies for i in range(2))

    return step


def peak_bytes(
    call: Callable, inputs: Sequence[Tensor], wrt: Sequence[int], dy: Tensor, mode: str = "bwd"
) -> dict[str, int]:
    """Mode -> the most bytes that a call holds beyond its inputs, outputs and what is saved for backward included.

    Counted from every allocation and release of torch's allocator: by the profiler on the host, by the caching
    allocator's own statistics on a GPU. Scratch memory that a vendor library maps by itself is not seen.
    """
    inputs = [t.detach().requires_grad_(i in wrt) for i, t in enumerate(inputs)]
    device = inputs[0].device
    y, forward, kept = peak(lambda: call(*inputs), device)
    _, backward, _ = peak(lambda: torch.autograd.grad(y, [inputs[i] for i in wrt], dy), device)
    return {"fwd": forward, mode: backward, f"fwd+{mode}": max(forward, kept + backward)}


def peak(call: Callable, device: torch.device) -> tuple:
    """What a call returns, the most bytes that it holds, and those that are left."""
    return _peak_device(call) if device.type == "cuda" else _peak_host(call)


def _peak_host(call: Callable):
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # its start and stop notes would tear the progress display
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return result, peak, level


def _peak_device(call: Callable):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before

"""What the op tests share: the rule "as good as torch", runs of an op with all its gradients, inputs of every layout.

The rule, for the output and every gradient:

    max|ours - truth| <= 2 max|stock - truth| + 2 eps(dtype) max|truth|

``truth`` is the reference in float64 on the rounded inputs, ``stock`` the stock path in the dtype of ``ours``. Where
one of these is NaN or infinite (in that dtype), ours must equal one of the two. No test holds a tolerance of its own.

A new op's test reads: ``inputs = {"x": images(...), "w1": normal(...)}``, then
``assert_op_as_good_as_torch(op, reference, inputs, what)`` for every backend that the ``backend`` fixture of conftest
forces.
"""

import contextlib
import copy
import functools
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection

import forked
import pytest
import torch
from torch import Tensor
from torch.utils import deterministic

from fusedtrain import backend as fusedtrain_backend

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
_BACKENDS = {"cpu": ("reference", "cpu", "triton"), "cuda": ("reference", "cuda", "triton")}
_FORMATS = (torch.contiguous_format, torch.channels_last)


# --- backends ---------------------------------------------------------------------------------------------------------


def backends_for(device: str) -> tuple[str, ...]:
    """The backends that are meant to run on ``device``; :func:`why_not` says which of them cannot, here and now."""
    return _BACKENDS[device]


def why_not(backend: str, device: str, op: str = "channel_pool", dtype: torch.dtype = torch.float32) -> str | None:
    """Why ``backend`` cannot run ``op`` on images of this device and dtype, or None."""
    return fusedtrain_backend._OPS[op][backend].why_not(torch.empty(1, 1, 1, 1, device=device, dtype=dtype))


def skip_unless_runs(backend: str, device: str, op: str, dtype: torch.dtype = torch.float32) -> None:
    """Skips the test, with the backend's own reason, when ``backend`` cannot run ``op`` on this dtype."""
    reason = why_not(backend, device, op, dtype)
    if reason is not None:
        pytest.skip(reason)


def interpreted(backend: str, device: str) -> bool:
    """Whether the backend's kernels run in Triton's interpreter, a thousand times as slow as on a GPU."""
    return backend == "triton" and device == "cpu"


def skip_interpreted_rows(backend: str, device: str, channels: int) -> None:
    """For rows whose length only the other backends' kernels tell apart: Triton's take 64 channels at a time."""
    if interpreted(backend, device) and channels > 600:
        pytest.skip("as shorter rows in Triton's kernels, and long in its interpreter")


def skip_copied_layouts(backend: str, device: str, layout: str) -> None:
    """Skips what says nothing new in Triton's interpreter: the ops copy images that are not dense in a memory format
    before any backend sees them."""
    if interpreted(backend, device) and (layout.startswith("sliced") or layout in ("transposed", "expanded")):
        pytest.skip("other backends show what becomes of these strides")


def skip_strides_of_reference(backend: str, layout: str) -> None:
    """Skips what compares torch with itself once more: the reference takes images as the stock path does."""
    if backend == "reference" and layout not in DENSE_LAYOUTS:
        pytest.skip("other backends show what becomes of these strides and addresses")


def skip_all_but_dense_layouts(backend: str, device: str, layout: str) -> None:
    """:func:`skip_copied_layouts`, and those that differ from a dense one in their address, which the interpreter does
    not look at."""
    if interpreted(backend, device) and layout not in DENSE_LAYOUTS:
        pytest.skip("other backends show what becomes of these strides and addresses")


def skip_all_but_channels_last(backend: str, device: str, layout: str) -> None:
    """For tests of what stands in front of the kernels: in Triton's interpreter one layout is enough."""
    if interpreted(backend, device) and layout != "channels_last":
        pytest.skip("the other layout differs in the kernels alone, which other tests run")


# --- inputs -----------------------------------------------------------------------------------------------------------


def normal(*shape: int, dtype=torch.float32, device="cpu", seed: int = 0) -> Tensor:
    """Standard normal numbers, the same on every device, rounded to ``dtype``."""
    size = math.prod(shape)
    drawn = _drawn if size < 1 << 15 else _drawn_large if size < 1 << 19 else _drawn.__wrapped__
    return drawn(shape, seed).to(dtype, copy=True).to(device)


@functools.lru_cache(512)
def _drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


_drawn_large = functools.lru_cache(24)(_drawn.__wrapped__)  # of up to 4 MiB each


def _contiguous(n, c, h, w, make):
    return make(n, c, h, w)


def _channels_last(n, c, h, w, make):
    return make(n, h, w, c).permute(0, 3, 1, 2)


def _unaligned(n, c, h, w, make):
    return make(n * c * h * w + 1)[1:].view(n, c, h, w)


def _unaligned_channels_last(n, c, h, w, make):
    return make(n * c * h * w + 1)[1:].view(n, h, w, c).permute(0, 3, 1, 2)


def _sliced(n, c, h, w, make):
    return make(n + 1, c + 2, h + 3, w + 1)[1:, 1:-1, 1:-2, :-1]


def _sliced_channels_last(n, c, h, w, make):
    return make(n, h + 1, w + 2, c + 3)[:, 1:, 1:-1, 1:-2].permute(0, 3, 1, 2)


def _transposed(n, c, h, w, make):
    return make(c, n, w, h).permute(1, 0, 3, 2)


def _expanded(n, c, h, w, make):
    return make(1, c, h, 1).expand(n, c, h, w)


_LAYOUTS = {
    "contiguous": _contiguous,
    "channels_last": _channels_last,
    "unaligned": _unaligned,  # dense, but no vector of it starts at a multiple of its size
    "unaligned_channels_last": _unaligned_channels_last,
    "sliced": _sliced,  # gaps between rows, planes and samples
    "sliced_channels_last": _sliced_channels_last,
    "transposed": _transposed,  # dense, in neither memory format
    "expanded": _expanded,  # stride 0 over samples and columns
}
LAYOUTS = tuple(_LAYOUTS)
DENSE_LAYOUTS = LAYOUTS[:2]


def images(shape, layout="contiguous", dtype=torch.float32, device="cpu", seed: int = 0) -> Tensor:
    """Standard normal images ``[N, C, H, W]`` in one of LAYOUTS."""
    return _LAYOUTS[layout](*shape, lambda *size: normal(*size, dtype=dtype, device=device, seed=seed))


# --- the rule ---------------------------------------------------------------------------------------------------------


def _largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0


def assert_as_good_as_torch(ours: Tensor, stock: Tensor, truth: Tensor, what: str) -> None:
    """Asserts the rule of this file, the shape and the dtype; the message names the worst element."""
    assert ours.shape == stock.shape == truth.shape, f"{what}: shape {list(ours.shape)}, torch has {list(stock.shape)}"
    assert ours.dtype == stock.dtype, f"{what}: dtype {ours.dtype}, torch has {stock.dtype}"
    assert truth.dtype == torch.float64, f"{what}: the truth must be float64, got {truth.dtype}"
    ours, stock, truth = ours.detach(), stock.detach(), truth.detach()
    if _all_good(ours, stock, truth):
        return
    rounded = truth.to(ours.dtype).double()  # infinite where the dtype cannot hold the truth
    finite = rounded.isfinite()
    sound = finite & stock.isfinite()
    zero = truth.new_zeros(())
    stock_error = _largest(torch.where(sound, stock.double() - truth, zero))
    scale = _largest(torch.where(finite, truth, zero))
    bound = 2 * stock_error + 2 * torch.finfo(ours.dtype).eps * scale
    error = torch.where(finite, (ours.double() - truth).abs(), zero)
    good = error <= bound
    same_as_truth = ~finite & _same(ours.double(), rounded)
    same_as_stock = ~sound & _same(ours, stock)
    good = torch.where(finite, good, same_as_truth) | same_as_stock
    if bool(good.all()):
        return
    worst = torch.where(good, -1.0, error.nan_to_num(nan=float("inf")) + ~finite).argmax()
    index = [int(i) for i in torch.unravel_index(worst, ours.shape)]
    raise AssertionError(
        f"{what}: {int((~good).sum())} of {good.numel()} elements ({ours.dtype}) are worse than torch;"
        f" at {index} ours {ours[tuple(index)].item()!r}, torch {stock[tuple(index)].item()!r},"
        f" truth {truth[tuple(index)].item()!r}; allowed error {bound:.3e}"
        f" (torch's own {stock_error:.3e}, max|truth| {scale:.3e})"
    )


def _all_good(ours: Tensor, stock: Tensor, truth: Tensor) -> bool:
    """The rule where everything is finite, in fewer passes; False says nothing."""
    stock_error, scale = _largest(stock.double() - truth), _largest(truth)
    info = torch.finfo(ours.dtype)
    within = _largest(ours.double() - truth) <= 2 * stock_error + 2 * info.eps * scale
    return within and stock_error < math.inf and scale <= info.max


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def assert_format(ours: Tensor, stock: Tensor, like: Tensor, what: str) -> None:
    """Asserts that ``ours`` has the memory format of the image ``like`` where that is dense, or torch's strides."""
    for memory_format in _FORMATS if ours.dim() == like.dim() == 4 else ():
        if like.is_contiguous(memory_format=memory_format) and ours.stride() != stock.stride():
            assert ours.is_contiguous(memory_format=memory_format), (
                f"{what}: strides {ours.stride()}, but the input is {memory_format} with strides {like.stride()}"
            )


# --- runs -------------------------------------------------------------------------------------------------------------


def evaluate(
    function: Callable,
    inputs: dict,
    *,
    frozen: Collection[str] = (),
    asked: Collection[str] = (),
    dy=None,
    dy_dtype=None,
) -> dict:
    """Runs ``function(*inputs.values())`` and its backward pass.

    Args:
        inputs: name -> Tensor, None or other value; every floating-point tensor not in ``frozen`` gets a gradient.
        asked: those whose gradients the backward pass is asked for; by default all of them.
        dy: the incoming gradient; by default normal numbers rounded to ``dy_dtype`` (that of the output by default).

    Returns:
        {"y": output, "dx": gradient of input "x", ...}; several outputs are "y0", "y1", ...
    """
    leaves = {
        name: value.detach().requires_grad_(value.is_floating_point() and name not in frozen)
        if isinstance(value, Tensor)
        else value
        for name, value in inputs.items()
    }
    y = function(*leaves.values())
    outputs = {"y": y} if isinstance(y, Tensor) else {f"y{i}": t for i, t in enumerate(y)}
    results = {name: t.detach() for name, t in outputs.items()}
    roots = [t for t in outputs.values() if t.requires_grad]
    wanted = {name: t for name, t in leaves.items() if isinstance(t, Tensor) and t.requires_grad}
    wanted = {name: wanted[name] for name in asked or wanted}
    if roots and wanted:
        if dy is None:
            dys = [_incoming(t, i, dy_dtype or t.dtype) for i, t in enumerate(roots)]
        else:
            dys = [dy.to(t.dtype) for t in roots]
        gradients = torch.autograd.grad(roots, list(wanted.values()), dys)
        results |= {f"d{name}": gradient for name, gradient in zip(wanted, gradients)}
    return results


def _incoming(y: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    dy = normal(*y.shape, dtype=dtype, device=y.device, seed=1000 + seed).to(y.dtype)
    return torch.empty_like(y).copy_(dy)  # in the memory format of y


def cast(inputs: dict, dtype: torch.dtype) -> dict:
    """The inputs with every floating-point tensor in ``dtype``."""

    def convert(value):
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return {name: convert(value) for name, value in inputs.items()}


def assert_moments_as_good_as_torch(runs: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """The rule for (y, its mean per channel, its sum of squares), all runs together: the mean counts beside the spread
    that divides it, the sum of squares beside the true one."""
    parts = []
    for y, mean, m2 in runs:
        var, exact = torch.var_mean(y.double(), (0, 2, 3), correction=0)
        std, count = var.sqrt(), y.numel() / y.shape[1]
        stock, unbiased = torch.zeros(2, y.shape[1], device=y.device)
        torch.nn.functional.batch_norm(y, stock, unbiased, training=True, momentum=1.0)
        means = (t / std.to(t.dtype) + 1 for t in (mean, stock, exact))
        squares = (t / (var * count).to(t.dtype) for t in (m2, unbiased * (count - 1), var * count))
        parts.append((*means, *squares))
    results = [torch.cat(vectors) for vectors in zip(*parts)]
    assert_as_good_as_torch(*results[:3], "mean / std + 1")
    assert_as_good_as_torch(*results[3:], "m2 / true m2")


def assert_op_as_good_as_torch(
    function: Callable,
    reference: Callable,
    inputs: dict | list[dict],
    what: str = "",
    *,
    stock=None,
    frozen=(),
    dy=None,
    any_order: bool = False,
) -> dict:
    """Asserts the rule for the output and every gradient of ``function``, and their memory formats.

    Args:
        function: the op; takes the values of ``inputs`` in order.
        reference: takes the same; run in float64 it is the truth.
        inputs: name -> value; or a list of such, draws of the same shapes whose results are judged together. A single
            draw of a few elements says little: torch's own error may be small by chance.
        stock: the stock path in the dtype of the inputs; by default ``reference``.
        frozen: names of inputs without gradient.
        dy: incoming gradient; random by default.
        any_order: the op takes pixels in any order, which tells more of torch's errors in float64.

    Returns:
        What :func:`evaluate` returns for ``function`` on the last draw.
    """
    columns = ([], [], [])  # ours, stock, truth of each draw
    for draw in inputs if isinstance(inputs, list) else [inputs]:
        ours = evaluate(function, draw, frozen=frozen, dy=dy)
        options = {"frozen": frozen, "dy": dy, "dy_dtype": next(iter(ours.values())).dtype}
        truth = evaluate(reference, cast(draw, torch.float64), **options)
        torchs = evaluate(stock or reference, draw, **options)
        x = next(value for value in draw.values() if isinstance(value, Tensor))
        for name, value in ours.items():
            assert_format(value, torchs[name], draw[name[1:]] if name.startswith("d") else x, f"{what} {name}")
        if options["dy_dtype"] == torch.float64:
            errors = _float64_errors(reference, stock or reference, draw, truth, options, any_order)
            torchs = {name: (truth[name] + errors[name]).to(value.dtype) for name, value in torchs.items()}
        for column, results in zip(columns, (ours, torchs, truth)):
            column.append(results)
        assert ours.keys() == torchs.keys() == truth.keys(), f"{what}: ours {list(ours)}, torch {list(torchs)}"
    for name in ours:
        together = (torch.stack([results[name] for results in column]) for column in columns)
        assert_as_good_as_torch(*together, f"{what} {name} [draw, ...]")
    return ours


def draws(make: Callable, device: str, backend: str) -> list[dict]:
    """``make(seed)`` for as many seeds as show torch's typical error; one where the interpreter would take minutes."""
    first = make(0)
    size, interpreter = first["x"].numel(), backend == "triton" and device == "cpu"
    count = 1 if interpreter and size > 1000 else 16 if not interpreter and size == 1 else 4
    return [first, *(make(seed) for seed in range(1, count))]


def _float64_errors(
    reference: Callable, stock: Callable, inputs: dict, truth: dict, options: dict, any_order: bool
) -> dict:
    """Torch's errors in float64, which the truth has itself: those of float32, or what the truth changes by when the
    images are added up in the order of another memory format, or backwards, where that is more."""
    errors = _float32_errors(reference, stock, inputs, options)
    name, x = next((name, value) for name, value in inputs.items() if isinstance(value, Tensor))
    if x.dim() != 4:
        return errors
    other = torch.channels_last if x.is_contiguous() else torch.contiguous_format
    wide = cast(inputs, torch.float64)
    runs = [evaluate(reference, {**wide, name: x.double().contiguous(memory_format=other)}, **options)]
    if any_order:
        runs.append(evaluate(_backwards(reference, x.shape[2:]), wide, **options))
    for run in runs:
        changes = {name: run[name] - truth[name] for name in errors}
        errors = {
            name: torch.where(changes[name].abs() > error.abs(), changes[name], error) for name, error in errors.items()
        }
    return errors


def _backwards(function: Callable, pixels: torch.Size) -> Callable:
    """``function`` of images with so many rows and columns, from the last pixel to the first."""

    def turn(value):
        is_images = isinstance(value, Tensor) and value.dim() == 4 and value.shape[2:] == pixels
        return value.flip(2, 3) if is_images else value

    def backwards(*inputs):
        outputs = function(*map(turn, inputs))
        return turn(outputs) if isinstance(outputs, Tensor) else tuple(map(turn, outputs))

    return backwards


def _float32_errors(reference: Callable, stock: Callable, inputs: dict, options: dict) -> dict:
    """Torch's errors in float32, scaled to float64: they stand for its errors there, which no float64 truth can show.

    The scale is eps(float64) / eps(float32), times two as a vector holds half as many float64 numbers and so each of
    its sums is twice as long.
    """
    dy = options["dy"]
    single = cast(inputs, torch.float32)
    options = {**options, "dy": None if dy is None else dy.float(), "dy_dtype": torch.float32}
    rough = evaluate(stock, single, **options)
    exact = evaluate(reference, cast(single, torch.float64), **options)
    scale = 2 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    errors = {name: (rough[name].double() - exact[name]) * scale for name in exact}
    return {name: torch.where(error.isfinite(), error, 0.0) for name, error in errors.items()}


def assert_module_as_good_as_torch(ours, stock, x: Tensor | list[Tensor], what: str = "", **options) -> dict:
    """:func:`assert_op_as_good_as_torch` for modules: output, gradient of ``x`` and of every parameter.

    Several ``x`` of one shape are draws that are judged together. The modules must name their parameters alike;
    ``ours`` is loaded with the weights of ``stock`` by the caller.
    """

    def function_of(module):
        names = [name for name, _ in module.named_parameters()]

        def function(x, *parameters):
            module_copy = copy.deepcopy(module).to(parameters[0].dtype if parameters else x.dtype)
            return torch.func.functional_call(module_copy, dict(zip(names, parameters)), (x,))

        return function

    parameters = dict(ours.named_parameters())
    theirs = dict(stock.named_parameters())
    assert parameters.keys() == theirs.keys(), f"{what}: parameters {list(parameters)}, torch has {list(theirs)}"
    for name, parameter in parameters.items():
        assert torch.equal(parameter, theirs[name]), f"{what}: {name} was not loaded from the stock module"
    order = {name: parameters[name] for name, _ in stock.named_parameters()}
    assert list(order) == list(parameters), f"{what}: the parameters of both modules must stand in the same order"
    inputs = [{"x": draw, **parameters} for draw in (x if isinstance(x, list) else [x])]
    return assert_op_as_good_as_torch(function_of(ours), function_of(stock), inputs, what, **options)


# --- what a run leaves behind -----------------------------------------------------------------------------------------


def saved_for_backward(function: Callable, *args) -> list[Tensor]:
    """The tensors that ``function(*args)`` keeps for backward, one per storage."""
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(*args)  # noqa: F841  (kept alive, so that no storage is used twice)
    return [tensor for tensor in saved.values() if tensor.numel()]


def extra_saved_bytes(function: Callable, *args) -> int:
    """Bytes that ``function(*args)`` keeps for backward beside its own arguments."""
    own = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
    storages = (tensor.untyped_storage() for tensor in saved_for_backward(function, *args))
    return sum(storage.nbytes() for storage in storages if storage.data_ptr() not in own)


@contextlib.contextmanager
def poisoned_memory():
    """Fills every uninitialised tensor with NaN, so that an element that is never written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = filled


def _bits(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # contiguous() keeps odd strides of size 1


def assert_bitwise_equal(a: dict, b: dict, what: str) -> None:
    """Asserts that two results of :func:`evaluate` hold the same bits."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, f"{what} {name}"
        equal = torch.equal(_bits(a[name]), _bits(b[name]))
        assert equal, f"{what}: {name} differs between runs"


# --- other processes and packages -------------------------------------------------------------------------------------


def environment(**changes: str | None) -> dict[str, str]:
    """The environment for a subprocess: without Triton's interpreter and this package's own variables.

    Args:
        changes: variables to set; None removes one.
    """
    own = ("TRITON_INTERPRET", "FUSEDTRAIN_BACKEND", "FUSEDTRAIN_ISA")
    env = {name: value for name, value in os.environ.items() if name not in own} | changes
    return {name: value for name, value in env.items() if value is not None}


def start_python(*arguments, pipes: dict | None = None, fresh: bool = False, **env: str | None) -> subprocess.Popen:
    """Starts Python in the tests' folder: there the installed package is found, not the sources. Ctrl-C reaches it as
    from a terminal, also where the tests run in the background.

    Args:
        arguments: of the interpreter.
        pipes: further arguments of Popen.
        fresh: as an interpreter that has imported nothing, see forked.py.
        env: as for :func:`environment`.
    """
    command, folder = [sys.executable, "-W", "ignore", *arguments], os.path.dirname(__file__)
    pipes = {"preexec_fn": functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL), **(pipes or {})}
    start = subprocess.Popen if fresh else forked.Python
    return start(command, cwd=folder, env=environment(**env), text=True, **pipes)


def run_python(*arguments, fresh: bool = False, **env: str | None) -> subprocess.CompletedProcess:
    """Runs Python to its end as :func:`start_python` starts it; its output is captured."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_python(*arguments, pipes=pipes, fresh=fresh, **env) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _free_gib() -> float:
    if torch.cuda.is_available():
        return min(torch.cuda.mem_get_info()[0] / 2**30, _available_ram_gib())
    return _available_ram_gib()


def _available_ram_gib() -> float:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20


def needs_memory(gib: float):
    """Marks a test that needs this much free memory and runs only with ``FUSEDTRAIN_SLOW_TESTS=1``."""
    wanted = os.environ.get("FUSEDTRAIN_SLOW_TESTS") == "1"
    reason = f"needs {gib} GiB of free memory" if wanted else "slow; FUSEDTRAIN_SLOW_TESTS=1 runs it"
    return pytest.mark.skipif(not wanted or _free_gib() < gib, reason=reason)


class ReplacedMean(torch.nn.Module):
    """Passes on what it gets; its running mean is a new tensor after every training pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().float().mean()
        return x

"""Which backend is fastest for the calls that a model makes on this machine, kept in a table that auto honours."""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

import fusedtrain
from fusedtrain import _files, _tuned, backend, ops
from fusedtrain.ops import _common
from fusedtrain.tune.target import Target, TuneError, wait

# Those that layers call, but for the two that move running statistics: batch_norm_act and depthwise_bn_act_se.
OPS = (
    "squeeze_excite",
    "channel_pool",
    "channel_scale",
    "depthwise_conv2d",
    "global_response_norm",
    "grouped_conv2d",
    "linear",
    "mlp",
    "pointwise_conv2d",
)
ROUNDS = 9  # in which the backends take turns
SECONDS = 0.01  # of one backend in one round
GAIN = 1.05  # another backend must be faster by this factor, times what noise makes of nothing, and in 8 of 9 rounds
AGAIN = "the automatic choice again"


def tune_backend(
    target: Target,
    *,
    batch_size: int = 32,
    fresh: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> dict:
    """Measures a model's calls of OPS, forward and backward, with every backend that can run them; writes the table.

    Args:
        target: the model, its images, precision and device.
        batch_size: of the images: the table counts for these shapes alone.
        fresh: measure again what is in the table; without it a killed run goes on.
        progress: is called with a line per distinct call.

    Returns:
        ``table`` (its file) and ``entries``: op, shape, ``auto`` (the choice without the table; "mixed"
        where forward and backward choose differently), ``backend`` (None where that choice stays) and ``microseconds``
        by backend.

    Raises:
        TuneError: the model makes no call of the ops: fuse() finds nothing in it.

    Cost: some 0.1 s per distinct call and backend. The backends take turns and medians are compared; numbers that are
    close, or that a busy machine scatters, leave the automatic choice as it is.
    """
    if batch_size < 1:
        raise TuneError(f"batch_size must be at least 1, got {batch_size}")
    trainer = target.build(compile=None, cuda_graphs=False)
    calls = _calls(trainer, target.batch(batch_size, trainer)[0])
    if not calls:
        raise TuneError(f"{target.options.model} calls none of {', '.join(OPS)}: there is nothing to choose")
    origin, found = _tuned.origin(trainer.device.type), []
    for call in calls:
        entry = None if fresh else _known(origin, call.keys)
        if entry is None:
            entry = _measure(call)
            _keep(origin, entry)
        found.append(entry)
        progress(_line(entry))
    _tuned.load()
    return {"table": str(_tuned.path()), "entries": found}


class _Call:
    """One distinct call of an op: what it takes, and the choices of backends that it makes."""

    def __init__(self, op: str, args: tuple, kwargs: dict, choices: list[tuple]):
        self.op, self.keys = op, [key for key, _ in choices]
        rules = {name for _, name in choices}
        self.auto = rules.pop() if len(rules) == 1 else "mixed"  # backward may choose for itself
        self.device, device = args[0].device, args[0].device.type
        self._autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        # Metadata alone: a whole model's activations would not fit beside each other.
        self._args, self._kwargs = [_Blank.of(a) for a in args], {n: _Blank.of(v) for n, v in kwargs.items()}

    def shape(self) -> list[int]:
        return list(self._args[0].shape)

    def prepare(self) -> Callable[[], None]:
        """Returns a function that runs forward and backward on random tensors."""
        args, kwargs = [_Blank.fill(a) for a in self._args], {n: _Blank.fill(v) for n, v in self._kwargs.items()}
        function = getattr(ops, self.op)
        leaves = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.requires_grad]
        device, dtype, enabled = self._autocast

        def forward() -> Tensor:
            with torch.autocast(device, dtype, enabled=enabled):
                return function(*args, **kwargs)

        dy = torch.randn_like(forward().detach())

        def run() -> None:
            y = forward()
            if leaves:
                torch.autograd.grad(y, leaves, dy, allow_unused=True)

        return run


class _Blank:
    """A tensor's metadata."""

    def __init__(self, x: Tensor):
        self.shape, self.dtype, self.device, self.requires_grad = x.shape, x.dtype, x.device, x.requires_grad
        self.layout = _common.format_of(x)

    @staticmethod
    def of(value):
        return _Blank(value) if isinstance(value, Tensor) else value

    @staticmethod
    def fill(value):
        if not isinstance(value, _Blank):
            return value
        x = torch.randn(value.shape, device=value.device).to(value.dtype).contiguous(memory_format=value.layout)
        return x.requires_grad_(value.requires_grad)


def _calls(trainer, images: Tensor) -> list[_Call]:
    """Runs one forward pass and returns the distinct calls of ops in it."""
    found: dict[str, _Call] = {}

    def spy(op: str, function: Callable):
        def call(*args, **kwargs):
            with _tuned.recording() as choices:
                y = function(*args, **kwargs)
            made = _Call(op, args, kwargs, list(choices))
            found.setdefault(json.dumps(made.keys), made)
            return y

        return call

    trainer.model.train()
    spies = _replaced({op: spy(op, getattr(ops, op)) for op in OPS})
    with spies, fusedtrain.use_backend(None), _tuned.recording():  # while which layers leave no images to stock PyTorch
        trainer.forward(images)
    return list(found.values())


@contextlib.contextmanager
def _replaced(functions: dict[str, Callable]):
    """Puts functions in the place of ops wherever fusedtrain's modules hold them."""
    originals = {op: getattr(ops, op) for op in functions}
    places = [
        (module, name, op)
        for module in [m for key, m in sys.modules.items() if key.startswith("fusedtrain.")]
        for name, value in list(vars(module).items())
        for op, original in originals.items()
        if value is original
    ]
    try:
        for module, name, op in places:
            setattr(module, name, functions[op])
        yield
    finally:
        for module, name, op in places:
            setattr(module, name, originals[op])


def _measure(call: _Call) -> dict:
    """Lets the backends that can run a call take turns, the automatic choice twice: what differs then is noise."""
    with _tuned.off():  # an older table must not count
        runs = _runs(call)
        repeats = {name: max(1, int(SECONDS / _seconds(run, 2, call.device))) for name, run in runs.items()}
        rounds: dict[str, list[float]] = {name: [] for name in [*runs, AGAIN]}
        for _ in range(ROUNDS):
            for name, times in rounds.items():
                like = call.auto if name == AGAIN else name
                times.append(_seconds(runs[like], repeats[like], call.device))
    medians = {name: median(times) for name, times in rounds.items()}
    same = sorted((medians[call.auto], medians.pop(AGAIN)))
    best = min(medians, key=medians.get)
    ahead = sum(min(a, b) > c for a, b, c in zip(rounds[call.auto], rounds[AGAIN], rounds[best]))
    wins = same[0] / medians[best] > GAIN * (same[1] / same[0]) and ahead >= ROUNDS - 1
    microseconds = {name: round(1e6 * seconds, 2) for name, seconds in medians.items()}
    return {
        "op": call.op,
        "shape": call.shape(),
        "keys": json.loads(json.dumps(call.keys)),
        "backend": best if wins else None,
        "auto": call.auto,
        "microseconds": microseconds,
        "measured": ", ".join(f"{name} {value:g} us" for name, value in microseconds.items()),
    }


def _runs(call: _Call) -> dict[str, Callable]:
    """Returns what to time: the automatic choice first, then every other backend that does not refuse."""
    run = call.prepare()

    def forced(name: str | None) -> Callable:
        def forced_run() -> None:
            with fusedtrain.use_backend(name):
                run()

        return forced_run

    runs = {call.auto: forced(None)}
    for name in backend.BACKENDS:
        if name in runs or (name == "triton" and _common.triton_interpreted()):
            continue  # the interpreter is never fast
        with contextlib.suppress(RuntimeError):  # a backend that refuses says so before it does anything
            forced(name)()
            runs[name] = forced(name)
    return runs


def _seconds(run: Callable, repeats: int, device: torch.device) -> float:
    # On one thread the time of the core is that of the work, whoever else wants the core.
    alone = torch.get_num_threads() == 1 and device.type != "cuda"
    clock = time.thread_time if alone else time.perf_counter
    wait(device)
    start = clock()
    for _ in range(repeats):
        run()
    wait(device)
    return (clock() - start) / repeats


def _known(origin: dict, keys: list[tuple]) -> dict | None:
    content = _files.read_json(_tuned.path()) or {"origins": [], "entries": []}
    if json.loads(json.dumps(origin)) not in content["origins"]:
        return None
    wanted = json.loads(json.dumps(keys))
    return next((e for e in content["entries"] if e["keys"] == wanted and e["device"] == origin["device"]), None)


def _keep(origin: dict, entry: dict) -> None:
    """Writes one entry into the table; what was measured with another device or version goes."""
    _files.cache_folder()
    with _files.locked(_tuned.path().with_suffix(".lock")):
        content = _files.read_json(_tuned.path()) or {"origins": [], "entries": []}
        device, origin = origin["device"], json.loads(json.dumps(origin))
        entries = [e for e in content["entries"] if e["device"] != device or origin in content["origins"]]
        entries = [e for e in entries if e["device"] != device or e["keys"] != entry["keys"]]
        origins = [o for o in content["origins"] if o["device"] != device]
        entry["device"] = device
        _files.write_json(_tuned.path(), {"origins": [*origins, origin], "entries": [*entries, entry]})


def _line(entry: dict) -> str:
    verdict = f"{entry['backend']} instead of {entry['auto']}" if entry["backend"] else f"{entry['auto']} stays"
    return f"{entry['op']} {entry['shape']}: {verdict} ({entry['measured']})"

"""Whole training steps of timm's networks: stock PyTorch in every form against the same network after ``fuse``.

A step is forward, loss, backward and AdamW over all parameters. One race per network: eager and compiled, both layouts,
float32 and bfloat16 autocast take turns step by step in random order. The stock optimizer is ``AdamW(fused=True)``.

On a GPU a turn is several steps in a row, which the host prepares while the GPU works, as in training. Each form runs a
second time as a CUDA graph of the whole step, where the host does nothing.
"""

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import results
import torch
import torch.nn.functional as F
from harness import LAYOUTS, median, quantiles, race, ratio
from timing import clock_of, peak
from torch import Tensor, nn

import fusedtrain
from fusedtrain import optim
from fusedtrain.train.data import Batches, load_digits
from fusedtrain.train.graphs import Recorder

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from zoo import Zoo

NETWORKS = (
    "efficientnet_b0",
    "mobilenetv2_100",
    "mobilenetv3_large_100",
    "mobilenetv4_conv_medium",
    "convnext_tiny",
    "regnety_008",
    "seresnet50",
)
DTYPES = ("float32", "bfloat16")
LR = 1e-3
GATE_BATCHES, GATE_SHARE = 4, 4  # batches of a fourth of the size: float64 is slow
LOSS_STEPS, LOSS_SEEDS, LOSS_IMAGE, LOSS_BATCH = 200, 2, 48, 32
PROFILED_STEPS = 3
STEPS_IN_A_ROW = 4  # of a turn on a GPU
SMALLEST = 0.002  # share of a step below which operators are summed up

SETTINGS = ("device", "torch", "threads", "allocator", "commit", "load")
FORM = ("network", "shape", "backend", "dtype")
NUMBERS = ("ms_p50", "ms_p20", "ms_p80", "ms_forward", "images_per_s", "speedup_same_dtype", "speedup")
NUMBERS += ("peak_mib", "saved_mib", "rounds")
STEPS = results.Format(
    (*FORM, "layout", *NUMBERS, "note", *SETTINGS),
    frozenset((*NUMBERS, "load")),
    ("network", "shape", "threads", "allocator"),
)
PROFILE = results.Format(
    (*FORM, "operator", "part", "calls", "percent", "ms", *SETTINGS),
    frozenset(("calls", "percent", "ms", "load")),
    ("network", "shape", "threads", "allocator"),
)
LOSSES = results.Format(
    ("network", "backend", "dtype", "seed", "step", "loss", "torch", "threads", "commit"),
    frozenset(("seed", "step", "loss")),
    ("network",),
)
FILES = {"steps": STEPS, "profile": PROFILE, "losses": LOSSES}


@dataclass(frozen=True)
class Setting:
    """How large the steps are, and which forms take part."""

    device: torch.device
    image: int = 224
    batch: int = 16
    compiled: bool = True
    budget: float = 1.0
    dtypes: tuple[str, ...] = DTYPES

    @property
    def shape(self) -> str:
        return f"{self.batch}x3x{self.image}x{self.image}"


@dataclass
class Trainee:
    """A network with its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    layout: str

    def loss(self, images: Tensor, targets: Tensor, dtype: str, forward: Callable | None = None) -> Tensor:
        forward = self.model if forward is None else forward
        with autocast(images.device, dtype):
            return F.cross_entropy(forward(images), targets)

    def update(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(eq=False)
class Candidate:
    """One form of a step in the race."""

    backend: str  # eager, compile or fused, on a GPU also eager graph and fused graph
    dtype: str
    trainee: Trainee
    forward: Callable
    images: Tensor
    targets: Tensor
    forced: str | None = None
    note: str = ""
    times: dict[str, list[float]] = field(default_factory=dict)
    recorder: Recorder | None = None  # of a form that is to run as a graph
    replay: Callable | None = None

    @property
    def stock(self) -> bool:
        return not self.backend.startswith("fused")

    def turn(self) -> tuple[float, float]:
        """Seconds of a step: of forward and loss, and of backward and optimizer; on a GPU all in the second number, for
        the host does not wait between the two."""
        if not self.images.is_cuda:
            return self.step()
        clock = clock_of(self.images.device)
        start = clock()
        for _ in range(STEPS_IN_A_ROW):
            self._launch() if self.replay is None else self.replay()
        return 0.0, (clock() - start) / STEPS_IN_A_ROW

    def loss(self) -> Tensor:
        return self.trainee.loss(self.images, self.targets, self.dtype, self.forward)

    def _launch(self) -> None:
        self.trainee.update(self.loss())

    def aside(self):
        """Where all steps before a capture belong."""
        return contextlib.nullcontext() if self.recorder is None else self.recorder.aside()

    def capture(self) -> None:
        """Makes the graph of a step, which has run before."""
        self.replay = self.recorder.record(self._launch)

    def step(self) -> tuple[float, float]:
        """One step: seconds of forward and loss, seconds of backward and optimizer."""
        clock = clock_of(self.images.device)
        start = clock()
        loss = self.loss()
        middle = clock()
        self.trainee.update(loss)
        return middle - start, clock() - middle


def autocast(device: torch.device, dtype: str):
    """Autocast to bfloat16, or nothing."""
    if dtype != "bfloat16":
        return contextlib.nullcontext()
    # What is cached during a capture would be used outside of it.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=not _is_capturing(device))


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def network(
    name: str, layout: str, fused: bool, setting: Setting, seed: int = 0, classes: int = 1000, capturable: bool = False
) -> Trainee:
    """A network with the weights of a seed, in training mode; ``capturable``: by a CUDA graph."""
    torch.manual_seed(seed)
    model = Zoo().timm.create_model(name, num_classes=classes).to(setting.device).train()
    model = model.to(memory_format=LAYOUTS[layout])
    if fused:
        fusedtrain.fuse(model)
        optimizer = optim.AdamW(model.parameters(), lr=LR, capturable=capturable)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True, capturable=capturable)
    return Trainee(model, optimizer, layout)


def _batch(setting: Setting, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(setting.batch, 3, setting.image, setting.image, generator=generator)
    return images.to(setting.device), torch.randint(1000, (setting.batch,), generator=generator).to(setting.device)


# --- the gate ---------------------------------------------------------------------------------------------------------


def _results(trainee: Trainee, images: Tensor, targets: Tensor, dtype: str) -> list[Tensor]:
    """Logits and the gradient of every parameter, in float64."""
    trainee.model.zero_grad()
    with autocast(images.device, dtype):
        logits = trainee.model(images)
        loss = F.cross_entropy(logits, targets)
    loss.backward()
    results = [logits.detach().double(), *(p.grad.double() for p in trainee.model.parameters())]
    trainee.model.zero_grad()
    return results


def _errors(results: list[Tensor], truth: list[Tensor]) -> tuple[float, float]:
    """The largest error of the logits, and of gradients over the largest number of their tensor; NaN for NaN."""
    largest = max(t.abs().max() for t in truth[1:])
    gradients = torch.stack(
        [(r - t).abs().max() / t.abs().max().clamp(min=1e-3 * largest) for r, t in zip(results[1:], truth[1:])]
    )
    return (results[0] - truth[0]).abs().max().item(), gradients.max().item()


def faults(trainees: dict[tuple[bool, str], Trainee], setting: Setting) -> dict[tuple[bool, str, str], str]:
    """(fused, layout, dtype) -> what is wrong with it, for every form that is not as good as stock PyTorch.

    The rule of gate.py for the logits of every batch, and for the gradients of the batch that they are best in: a value
    that rounding puts on the other side of an activation's kink changes all gradients of its batch, in stock networks
    as in fused ones, a wrong network those of every batch.
    """
    double = copy.deepcopy(next(t for (fused, _), t in trainees.items() if not fused))
    double.model.double()
    errors: dict[tuple[bool, str, str], tuple[list[float], list[float]]] = {}
    scales = []
    small = replace(setting, batch=max(2, setting.batch // GATE_SHARE))
    for seed in range(GATE_BATCHES):
        images, targets = _batch(small, seed)
        truth = _results(double, images.double(), targets, "float64")
        scales.append(truth[0].abs().max().item())
        for (fused, layout), trainee in trainees.items():
            x = images.contiguous(memory_format=LAYOUTS[layout])
            for dtype in setting.dtypes:
                found = _errors(_results(trainee, x, targets, dtype), truth)
                for error, of_all in zip(found, errors.setdefault((fused, layout, dtype), ([], []))):
                    of_all.append(error)
    kept = {
        key: (torch.tensor(logits).max().item(), torch.tensor(gradients).min().item())  # NaN where one of them is
        for key, (logits, gradients) in errors.items()
    }
    wrong = {}
    for (fused, layout, dtype), found in kept.items():
        eps = torch.finfo(getattr(torch, dtype)).eps
        rivals = [error for (other, _, of), error in kept.items() if not other and of == dtype]
        for what, error, stock, scale in zip(("logits", "gradients"), found, zip(*rivals), (max(scales), 1.0)):
            bound = 2 * max(stock) + 2 * eps * scale
            if fused and not error <= bound:  # NaN fails too
                note = f"no number: {what} are off by {error:.3g}, {bound:.3g} allowed"
                wrong.setdefault((fused, layout, dtype), note)
    return wrong


# --- the race ---------------------------------------------------------------------------------------------------------


def saved_mib(candidate: Candidate) -> float:
    """MiB that a forward pass keeps for backward beside parameters, buffers and images, one storage counted once."""
    model = candidate.trainee.model
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), candidate.images)}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = candidate.loss()
    del loss  # until here, so that no storage is used twice
    return sum(saved.values()) / 2**20


def _candidates(name: str, trainees: dict[tuple[bool, str], Trainee], setting: Setting) -> Iterator[Candidate]:
    images, targets = _batch(setting, 0)
    for (fused, layout), trainee in trainees.items():
        x = images.contiguous(memory_format=LAYOUTS[layout])
        for dtype in setting.dtypes:
            yield Candidate("fused" if fused else "eager", dtype, trainee, trainee.model, x, targets)
            if setting.compiled and not fused:
                mode = "max-autotune" if setting.device.type == "cuda" else None
                compiled = torch.compile(trainee.model, dynamic=False, mode=mode)
                yield Candidate("compile", dtype, trainee, compiled, x, targets)
            if setting.device.type == "cuda":
                own = network(name, layout, fused, setting, capturable=True)
                graph = Candidate("fused graph" if fused else "eager graph", dtype, own, own.model, x, targets)
                graph.recorder = Recorder(setting.device)
                yield graph


def steps(name: str, setting: Setting, progress: Callable[[str], None]) -> Iterator[dict]:
    """Gates and times the steps of one network; yields a row per form."""
    torch._dynamo.reset()
    trainees = {(fused, layout): network(name, layout, fused, setting) for fused in (False, True) for layout in LAYOUTS}
    progress("gate")
    with torch.backends.cudnn.flags(enabled=True, benchmark=False):  # nothing is timed
        wrong = faults(trainees, setting)
    everyone = list(_candidates(name, trainees, setting))
    memory: dict[Candidate, dict] = {}
    for candidate in everyone:
        layout = candidate.trainee.layout
        progress(f"{candidate.backend} {candidate.dtype} {layout}")
        candidate.note = wrong.get((not candidate.stock, layout, candidate.dtype), "")
        with candidate.aside():
            candidate.step()  # compiles, and makes the optimizer's state
            candidate.step()
            peak_bytes = peak(candidate.step, setting.device)[1]
            memory[candidate] = {"peak_mib": peak_bytes / 2**20, "saved_mib": saved_mib(candidate)}
        if candidate.recorder is not None:
            candidate.capture()
    progress("race")
    racers = [c for c in everyone if not c.note]
    race([(c, c.turn) for c in racers], "bwd", setting.budget, name)
    best = {
        dtype: min(
            (c for c in racers if c.stock and dtype in (c.dtype, None)),
            key=lambda c: median(c.times["fwd+bwd"]),
        )
        for dtype in (*setting.dtypes, None)
    }
    for candidate in everyone:
        row = {"network": name, "shape": setting.shape, "backend": candidate.backend, "dtype": candidate.dtype}
        row |= {"layout": candidate.trainee.layout, "note": candidate.note, **memory[candidate]}
        if candidate in racers:
            times = candidate.times["fwd+bwd"]
            p20, p50, p80 = (us / 1e3 for us in quantiles(times.values()))
            row |= {
                "ms_p50": p50,
                "ms_p20": p20,
                "ms_p80": p80,
                "ms_forward": median(candidate.times["fwd"]) * 1e3,
                "images_per_s": setting.batch / p50 * 1e3,
                "speedup_same_dtype": ratio(best[candidate.dtype].times["fwd+bwd"], times),
                "speedup": ratio(best[None].times["fwd+bwd"], times),
                "rounds": len(times),
            }
        yield row


# --- where the time goes ----------------------------------------------------------------------------------------------

PARTS = {
    "depthwise_bn_act_se": "depthwise convolution to squeeze-excite as one",
    "batch_norm": "norm",
    "layer_norm": "norm",
    "depthwise": "depthwise convolution",
    "squeeze_excite": "squeeze-excite",
    "channel_": "squeeze-excite",
    **dict.fromkeys(("silu", "relu", "hardswish", "gelu", "hardtanh", "threshold"), "activation"),
    **dict.fromkeys(("mm", "linear"), "matrix product"),
    **dict.fromkeys(("adam", "optimizer", "grad_norm"), "optimizer"),
    **dict.fromkeys(("copy", "empty", "contiguous", "clone", "resize", "fill_", "zero_"), "copies and memory"),
    **dict.fromkeys(("mul", "mean", "sum", "div", "sigmoid", "add", "expand"), "element by element"),
}


def _operator(event) -> tuple[str, str]:
    """An event's operator, convolutions with their kind, and the part of the step that it belongs to."""
    name = event.name.removeprefix("aten::").removeprefix("fusedtrain::")
    if "conv" in name and "depthwise" not in name:  # also aten::_slow_conv2d_forward
        shapes = [shape for shape in event.input_shapes or [] if len(shape) == 4]
        # Forward takes (x, weight), backward (dy, x, weight).
        weight = shapes[2 if "backward" in name else 1] if len(shapes) > ("backward" in name) + 1 else None
        if name.startswith("pointwise"):
            kind = "1x1 convolution"
        elif weight is None:
            kind = "other convolution"
        elif weight[1] == 1 and shapes[1 if "backward" in name else 0][1] > 1:
            kind = "depthwise convolution"
        else:
            kind = "1x1 convolution" if weight[2] == weight[3] == 1 else "other convolution"
        return f"{name}, {kind}", kind
    part = next((part for text, part in PARTS.items() if text in name.lower()), "everything else")
    return event.name, part


def profile(name: str, setting: Setting, ms: dict[tuple[str, str], float]) -> Iterator[dict]:
    """Rows of the operators' shares of an eager and a fused step, both channels_last.

    Args:
        ms: (backend, dtype) -> the step's milliseconds in the race; the shares are of these, as a profile itself
            takes time, and is taken by the wall clock.
    """
    for (backend, dtype), step_ms in ms.items():
        trainee = network(name, "channels_last", backend == "fused", setting)
        images, targets = _batch(setting, 0)
        x = images.contiguous(memory_format=torch.channels_last)
        candidate = Candidate(backend, dtype, trainee, trainee.model, x, targets)
        for _ in range(3):  # until the allocator holds all memory of a step
            candidate.step()
        spent: dict[tuple[str, str], list[float]] = {}
        calls: dict[tuple[str, str], int] = {}
        for index in range(PROFILED_STEPS):
            with torch.profiler.profile(record_shapes=True) as profiler:
                candidate.step()
            for event in profiler.events():
                if event.device_type != torch.autograd.DeviceType.CPU:
                    continue  # a kernel, whose time its operator has, too
                key = _operator(event)
                times = spent.setdefault(key, [0.0] * PROFILED_STEPS)
                times[index] += event.self_device_time_total if x.is_cuda else event.self_cpu_time_total
                calls[key] = calls.get(key, 0) + (index == 0)
        fastest = {key: min(times) for key, times in spent.items()}
        whole = sum(fastest.values())
        shares: dict[tuple[str, str], float] = {}
        for (operator, part), microseconds in fastest.items():
            key = (operator if microseconds >= SMALLEST * whole else "smaller ones", part)
            shares[key] = shares.get(key, 0.0) + microseconds / whole
        for (operator, part), share in sorted(shares.items(), key=lambda item: -item[1]):
            row = {"network": name, "shape": setting.shape, "backend": backend, "dtype": dtype, "operator": operator}
            row |= {"part": part, "calls": calls.get((operator, part)), "percent": 100 * share, "ms": share * step_ms}
            yield row


# --- loss curves ------------------------------------------------------------------------------------------------------


def losses(name: str, setting: Setting, progress: Callable[[str], None]) -> Iterator[dict]:
    """Rows of the loss of each step on scikit-learn's digits, enlarged: stock and fused, several seeds."""
    digits = load_digits(LOSS_IMAGE)
    images = digits.train_images.expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)
    for dtype in setting.dtypes:
        for seed in range(LOSS_SEEDS):
            for fused in (False, True):
                backend = "fused" if fused else "eager"
                progress(f"losses {backend} {dtype} seed {seed}")
                trainee = network(name, "channels_last", fused, setting, seed, digits.CLASSES)
                batches = Batches(images, digits.train_targets, LOSS_BATCH, shuffle=True, seed=seed)
                step = 0
                while step < LOSS_STEPS:
                    batches.set_epoch(step)
                    for x, y in batches:
                        if step == LOSS_STEPS:
                            break
                        x = x.contiguous(memory_format=torch.channels_last)
                        loss = trainee.loss(x.to(setting.device), y.to(setting.device), dtype)
                        trainee.update(loss)
                        step += 1
                        row = {"network": name, "backend": backend, "dtype": dtype, "seed": seed, "step": step}
                        yield row | {"loss": loss.item()}


def measure(name: str, setting: Setting, with_losses: bool, progress: Callable[[str], None]) -> Iterator[tuple]:
    """Yields (a key of FILES, its rows) for one network."""
    rows = list(steps(name, setting, progress))
    yield "steps", rows
    progress("profile")
    ms = {(r["backend"], r["dtype"]): r.get("ms_p50") for r in rows if r["layout"] == "channels_last"}
    wanted = {key: value for key, value in ms.items() if key[0] in ("eager", "fused") and value is not None}
    yield "profile", list(profile(name, setting, wanted))
    if with_losses:
        yield "losses", list(losses(name, setting, progress))

"""Rules on forward, backward and the update of the weights."""

from statistics import fmean

import torch
from torch import nn

from fusedtrain.data.workers import cores
from fusedtrain.diagnose.drive import Driver
from fusedtrain.diagnose.machine import gpu_settings, gpus
from fusedtrain.diagnose.measure import Facts, call_cost, fault_cost, fused_step
from fusedtrain.diagnose.remedies import (
    COUNTERPARTS,
    Allocator,
    BFloat16,
    ChannelsLast,
    Compile,
    CudnnBenchmark,
    Float32,
    Fuse,
    FusedOptimizer,
    NoDebugging,
    Remedy,
    SetToNone,
    Threads,
    models,
    sparse_gradients,
)
from fusedtrain.diagnose.rules.finding import LEAST, Finding, Rule, count_text, gain_of_computing, lines_of, probed

FAULT = 0.2e-6  # seconds that a page fault takes at the very least
LOOP = 16  # times in a step that a module carries out a line of a loop
LAST = "channels_last already"
TF32 = {  # by the name of the setting: what it is on for, and how to set it
    "tf32_matmul": ("matrix products", 'torch.set_float32_matmul_precision("high")'),
    "tf32_cudnn": ("convolutions", "torch.backends.cudnn.allow_tf32 = True"),
}


def allocator(facts: Facts, driver: Driver) -> Finding | str:
    reason = Allocator.why_not()
    if reason or torch.cuda.is_initialized():
        return reason or "n/a: the tensors are on a GPU"
    faults = f"{count_text(facts.faults, 'page fault')} per step"
    if facts.faults * FAULT < 0.01 * facts.step.value:
        return f"{faults}: not worth a change"
    facts.fault_cost = facts.fault_cost or fault_cost()
    seconds = facts.faults * facts.fault_cost
    evidence = f"{faults}, {1e6 * facts.fault_cost:.2g} us each: {1e3 * seconds:.3g} ms"
    gain = gain_of_computing(facts, min(seconds, facts.step.value))
    if gain < LEAST:
        return evidence
    cause = "freed memory goes back to the kernel and is mapped anew, page by page"
    shared = ("optimizer", gain * facts.optimizer_faults / facts.faults)  # what lies between its passes over memory
    return Finding("allocator", cause, evidence, gain, (facts.keep(Allocator()),), shared=shared)


def threads(facts: Facts, driver: Driver) -> list[Remedy] | str:
    now, best = torch.get_num_threads(), cores()
    return threads_text("on") if now == best else [facts.keep(Threads(best))]


def threads_text(between: str) -> str:
    return f"{count_text(torch.get_num_threads(), 'thread')} {between} {count_text(cores(), 'core')}"


def _layout(facts: Facts, driver: Driver) -> list[Remedy] | str:
    weights = [m.weight for model in models(driver) for m in model.modules() if isinstance(m, nn.Conv2d)]
    weights = [w for w in weights if w.shape[2:].numel() > 1]
    if not weights:
        return "no two-dimensional convolutions"
    dense = [w for w in weights if w.shape[1] > 1]  # depthwise and one-channel weights look the same in both layouts
    if dense and all(w.is_contiguous(memory_format=torch.channels_last) for w in dense):
        return LAST
    return [facts.keep(ChannelsLast())]


def layout_rule() -> Rule:
    rule = probed("layout", "convolutions run on contiguous (NCHW) tensors", _layout)

    def look(facts: Facts, driver: Driver) -> Finding | str:
        asked_for = facts.candidates["layout"] == LAST
        return (_lost_layout if asked_for else rule.look)(facts, driver)

    return Rule("layout", look, rule.candidates)


def _lost_layout(facts: Facts, driver: Driver) -> Finding | str:
    copied = sum(share for name, share, _ in facts.operations if name == "aten::copy_")
    gain = gain_of_computing(facts, copied * (facts.parts["forward"] + facts.parts["backward"]))
    if gain < LEAST or not facts.contiguous:
        return LAST
    names = ", ".join(facts.contiguous[:3]) + (", ..." if len(facts.contiguous) > 3 else "")
    return Finding(
        "layout",
        "channels_last is lost within the model, and tensors are copied to and fro",
        f"other tensors get to {count_text(len(facts.contiguous), 'convolution')}: {names}; copies take {copied:.0%} of"
        " computing",
        gain,
        advice="leave out what makes tensors contiguous in front of them: contiguous(), view, reshape; or"
        " .contiguous(memory_format=torch.channels_last) once, behind it",
        lines=lines_of(facts, "forward"),
    )


def fuse(facts: Facts, driver: Driver) -> list[Remedy] | str:
    reason = Fuse.why_not(driver)
    if reason is None:
        facts.fusible = Fuse.layers(driver)
    return reason or [facts.keep(Fuse())]


def optimizer_rule() -> Rule:
    """Some optimizers can be replaced on trial; of others it is only known how long they take."""
    of_torch = probed(
        "optimizer",
        "the optimizer goes over memory many times",
        _optimizer,
        evidence=lambda facts, driver: f"its step takes {facts.parts['optimizer'] / facts.step.value:.0%} of the time",
    )

    def look(facts: Facts, driver: Driver) -> Finding | str:
        lacking = FusedOptimizer.without_form(driver.instrument.optimizers)
        steps = driver.instrument.by_hand or [(optimizer, "step") for optimizer in lacking]
        return _without_fused(facts, driver, *steps[0]) if steps else of_torch.look(facts, driver)

    return Rule("optimizer", look, of_torch.candidates)


def _without_fused(facts: Facts, driver: Driver, owner: object, name: str) -> Finding | str:
    seconds = facts.parts["optimizer"]
    share = seconds / facts.step.value
    if share < LEAST or not models(driver):
        return f"{type(owner).__name__}.{name}() takes {share:.1%} of the step"
    if sparse_gradients(driver):
        return f"{type(owner).__name__}.{name}() takes {share:.1%} of the step; gradients are sparse"
    if facts.fused_step is None:
        with driver.aside():
            facts.fused_step = fused_step(driver)
    evidence = (
        f"{type(owner).__name__}.{name}() takes {1e3 * seconds:.3g} ms, {share:.0%} of the step;"
        f" torch.optim.AdamW(fused=True) takes {1e3 * facts.fused_step:.3g} ms for weights of these sizes"
    )
    gain = gain_of_computing(facts, max(0.0, seconds - facts.fused_step))
    if gain < LEAST:
        return evidence
    return Finding(
        "optimizer",
        "the optimizer carries out many operations, one tensor after the other",
        evidence,
        gain,
        advice="take one that updates all tensors in one pass over memory: "
        f"{', '.join(FusedOptimizer.STOCK)} of torch.optim with fused=True, or of fusedtrain.optim"
        f" {', '.join(COUNTERPARTS.values())}; another rule is another training, and yours to choose",
        lines=lines_of(facts, "optimizer"),
    )


def _optimizer(facts: Facts, driver: Driver) -> list[Remedy] | str:
    share = facts.parts["optimizer"] / facts.step.value
    if share < 0.02:
        return f"it takes {share:.1%} of the step"
    found = [(FusedOptimizer(ours), FusedOptimizer(ours).why_not(driver)) for ours in (False, True)]
    return [facts.keep(r) for r, reason in found if reason is None] or found[0][1]


def zero_grad(facts: Facts, driver: Driver) -> list[Remedy] | str:
    kept = driver.instrument.keeps_zero_grads
    return [facts.keep(SetToNone())] if kept else "gradients are freed, not filled with zeros"


def debugging(facts: Facts, driver: Driver) -> list[Remedy] | str:
    return NoDebugging.why_not(driver) or [facts.keep(NoDebugging(driver))]


def slow_16_bit(facts: Facts, driver: Driver) -> list[Remedy] | str:
    weights = {p.dtype for model in models(driver) for p in model.parameters()}
    used = driver.instrument.autocast or weights & {torch.bfloat16, torch.float16}
    return [facts.keep(Float32())] if used else "no autocast, and no weights of 16 bits"


def float64(facts: Facts, driver: Driver) -> list[Remedy] | str:
    wide = any(p.dtype is torch.float64 for model in models(driver) for p in model.parameters())
    return [facts.keep(Float32())] if wide else "no weights of 64 bits"


def half(facts: Facts, driver: Driver) -> list[Remedy] | str:
    if driver.instrument.autocast:
        return "autocast is in use"
    if not all(p.dtype is torch.float32 for model in models(driver) for p in model.parameters()):
        return "the weights are not float32"
    return [facts.keep(BFloat16())] if models(driver) else "no module was called"


def tf32(facts: Facts, driver: Driver) -> Finding | str:
    if not torch.cuda.is_initialized():
        return "n/a: no GPU is in use"
    if driver.instrument.autocast:
        return "autocast is in use"
    if not any(p.dtype is torch.float32 for model in models(driver) for p in model.parameters()):
        return "no weights are float32"
    return without_tf32(gpu_settings(gpus()[0]))


def without_tf32(gpu: dict) -> Finding | str:
    """What there is to say on float32 products, by :func:`gpu_settings`."""
    if int(gpu["capability"].partition(".")[0]) < 8:
        return f"n/a: compute capability {gpu['capability']} has no TF32"
    off = [both for name, both in TF32.items() if not gpu[name]]
    if not off:
        return "on already"
    things, calls = zip(*off)
    return Finding(
        "tf32",
        f"float32 {' and '.join(things)} run without TF32",
        f"compute capability {gpu['capability']} multiplies float32 faster with 10 bits of the mantissa; not tried",
        0.0,
        advice=" and ".join(calls),
        option=True,
    )


def compiling(facts: Facts, driver: Driver) -> list[Remedy] | str:
    if not facts.thorough:
        return "compiling takes seconds to minutes: --verify tries it, last"
    return Compile.why_not(driver) or [facts.keep(Compile())]


def cudnn(facts: Facts, driver: Driver) -> list[Remedy] | str:
    if not torch.cuda.is_initialized():
        return "n/a: no GPU is in use"
    return "on already" if torch.backends.cudnn.benchmark else [facts.keep(CudnnBenchmark())]


def batch_size(facts: Facts, driver: Driver) -> Finding | str:
    if facts.larger is None:
        return "not measured: no batches to repeat"
    times, pairs = facts.larger
    if not min(pairs.before):
        return "not measured: neither forward nor backward was seen in most steps"
    now, seconds = map(fmean, (pairs.before, pairs.after))
    # As little as either pair says: what else runs on the machine slows one batch down, or the other.
    saved = min(1 - after / times / before for before, after in zip(pairs.before, pairs.after))
    computing = min(facts.parts["forward"] + facts.parts["backward"], now)
    if facts.exchange is not None:
        computing -= max(0.0, facts.exchange.share()) * facts.step.value
    gain = gain_of_computing(facts, saved * computing)
    evidence = f"forward and backward take {1e3 * now:.3g} ms, and {1e3 * seconds:.3g} ms for {times} times the batch"
    peaks = (f"{peak / 2**20:,.0f}" for peak in facts.larger_peaks)
    evidence += f"; a step needs {' and '.join(peaks)} MiB beyond what is held"
    if gain < max(0.25, facts.cached_noise):
        return evidence
    advice = (
        f"a larger batch costs little time, but changes the training: it is yours to choose ({times}x was measured)"
    )
    return Finding(
        "batch_size", "the batch is so small that calls cost more than computing", evidence, gain, advice=advice
    )


def python_loop(facts: Facts, driver: Driver) -> Finding | str:
    forward = lines_of(facts, "forward")
    looped = tuple((site, share) for site, share in forward if facts.repeats.get(site, 0) >= LOOP)
    if not looped:
        return f"no line of the model that takes time is carried out {LOOP} times in a step by the same module"
    facts.call_cost = facts.call_cost or call_cost()
    within = sum(share for _, share in looped) / sum(share for _, share in forward)
    seconds = min(facts.calls * facts.call_cost, facts.parts["forward"] + facts.parts["backward"])
    most = max(facts.repeats[site] for site, _ in looped)
    evidence = (
        f"lines that a module carries out up to {most} times in a step take {within:.0%} of the forward pass; a step is"
        f" {facts.calls:,.0f} operations, and on a few numbers one takes {1e6 * facts.call_cost:.2g} us:"
        f" {1e3 * seconds:.3g} ms"
    )
    gain = gain_of_computing(facts, within * seconds)
    if gain < 0.1:
        return evidence
    return Finding(
        "python_loop",
        "the model loops in Python over operations so small that calling them takes the time",
        evidence,
        gain,
        advice="compute on whole tensors instead of one position or sample at a time, or torch.compile the loop",
        lines=looped,
    )

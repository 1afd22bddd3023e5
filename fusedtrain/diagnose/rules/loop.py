"""Rules on what else the loop does from step to step, and on what stays in memory."""

import contextlib
import itertools
from statistics import fmean

from fusedtrain.diagnose.drive import Driver
from fusedtrain.diagnose.host import COPIED, MOVED, NUMBERS
from fusedtrain.diagnose.measure import Facts
from fusedtrain.diagnose.rules.finding import (
    LEAST,
    Finding,
    count_text,
    duration_text,
    gain_of_computing,
    lines_of,
    size_text,
)

HOST_ADVICE = {
    NUMBERS: "keep numbers in a tensor or an array from the start: of lists every number is converted by itself",
    COPIED: "torch.as_tensor or torch.from_numpy where nothing writes to it: torch.tensor copies",
    MOVED: "make it on the device: device= where it is made, instead of .to() or .cuda()",
}
LASTS = 24 * 3600  # seconds of training that memory has to last for


def evaluation(facts: Facts, driver: Driver) -> Finding | str:
    share = facts.parts["evaluation"] / facts.step.value
    if share < 0.1:
        return f"calls of the model in evaluation mode take {share:.1%} of a step"
    evidence = f"calls of the model in evaluation mode, with their data, take {share:.0%} of the time between updates"
    advice = "evaluate less often, or on fewer samples"
    if driver.instrument.records_evaluation:
        evidence += "; they are recorded for a backward pass that never comes"
        advice = f"evaluate under torch.no_grad(); {advice}"
    lines = lines_of(facts, "evaluation")
    cause = "the model is evaluated amid the training"
    return Finding("evaluation", cause, evidence, share, advice=advice, lines=lines)


def constants(facts: Facts, driver: Driver) -> Finding | str:
    share = sum(share for _, share in facts.constants)
    evidence = f"operations on what does not change from step to step take {share:.1%} of a step"
    if share < 0.1:
        return evidence
    advice = "compute it once, before the loop or in __init__"
    cause = "every step computes anew what comes out the same"
    return Finding("recomputed", cause, evidence, share, advice=advice, lines=tuple(facts.constants))


def host_tensors(facts: Facts, driver: Driver) -> Finding | str:
    if facts.made is None:
        return "not measured: torch.compile is in use"
    shares = {kind: sum(share for _, other, share in facts.made if other == kind) for kind in HOST_ADVICE}
    kinds = [kind for kind in HOST_ADVICE if shares[kind] >= LEAST]
    if not kinds:
        return f"lines that make tensors on the host take {sum(shares.values()):.1%} of a step"
    cause, taken = f"tensors are made {' and '.join(kinds)} in every step", sum(shares[kind] for kind in kinds)
    advice = "; ".join(HOST_ADVICE[kind] for kind in kinds)
    lines = tuple((site, share) for site, kind, share in facts.made if kind in kinds)
    evidence = f"the calls that make them take {taken:.0%} of a step"
    return Finding("host_tensors", cause, evidence, taken, advice=advice, lines=lines)


def growth(facts: Facts, driver: Driver) -> Finding | str:
    earlier = [old for _, old in facts.graphs]
    if not earlier or not earlier[0] or any(b <= a for a, b in itertools.pairwise(earlier)):
        return "backward passes go no further back from step to step"
    total, old = facts.graphs[-1]
    evidence = f"of {total:,} operations of a backward pass {old:,} are of earlier steps, and more from step to step"
    gain = gain_of_computing(facts, facts.parts["backward"] * old / total)
    if gain < LEAST:
        return evidence
    return Finding(
        "growing_graph",
        "the backward pass goes back through all earlier steps, and every step is slower than the last",
        evidence,
        gain,
        advice="detach() what is carried from step to step, and leave retain_graph=True out",
        lines=lines_of(facts, "backward"),
    )


def memory(facts: Facts, driver: Driver) -> Finding | str:
    growth, step = facts.growth, facts.step.value
    if growth is None:
        return "not known: an object of the script cannot be looked at"
    if not growth.size:
        return "memory does not grow from step to step"
    held = [g for g in growth.held if g.size > 0.1 * growth.size or "graphs" in g.kind]
    evidence = f"{size_text(growth.size)} more in every step, of {size_text(growth.free)} that are left"
    for g in held[:3]:
        where = ", ".join(f"{site.file.rpartition('/')[2]}:{site.line}" for site in g.lines[:2])
        more = f", {g.count:.3g} more per step" * (g.count > 0)
        evidence += f"; {g.path} is {g.kind}{more}{where and f' ({where})'}"
    if growth.graph >= 1:
        evidence += f"; {growth.graph:,.0f} more operations of backward passes are kept"
    passes = getattr(driver.loader, "__len__", None)
    if held and all(g.emptied for g in held):
        with contextlib.suppress(TypeError):  # a loader may have no length
            most = growth.size * (passes() if passes else 0)
            if passes and most < 0.5 * growth.free:
                return f"{evidence}: until the pass over the data ends, {size_text(most)} at most"
    most = sum(g.most for g in held)
    if held and most < 0.5 * growth.free:
        return f"{evidence}: until it is full, {size_text(most)} more at most"
    lasts = growth.free / max(growth.size, 1.0) * step
    if lasts > LASTS:
        return f"{evidence}: enough for {duration_text(lasts)}"
    cause = (
        f"memory grows from step to step and is full after {duration_text(lasts)}, {count_text(lasts / step, 'step')}"
    )
    advice = (
        "keep numbers instead of tensors: loss.item(), or detach() where a graph hangs on them; running sums instead of"
        " lists; and empty what has to be kept"
    )
    lines = dict.fromkeys(site for g in held for site in g.lines)
    share = dict(reversed([(site, share) for _, site, share in facts.lines]))
    return Finding(
        "memory", cause, evidence, 0.0, advice=advice, lines=tuple((s, share.get(s, 0.0)) for s in lines), lost=1.0
    )


def own_code(facts: Facts, driver: Driver) -> Finding | str:
    share = facts.parts["rest"] / facts.step.value
    evidence = f"{share:.1%} of the step is outside of loader, forward, backward and optimizer"
    lines = lines_of(facts, "rest")
    within = {site for site, _ in lines}
    # Samples miss calls that hold the interpreter's lock: a line that is seen nowhere is one of these.
    elsewhere = {site for _, site, _ in facts.lines} - within
    made = sum(share for site, kind, share in facts.made or () if site not in elsewhere and kind != MOVED)  # a copy
    if share - made < 0.1:
        return evidence + f"; tensors are made there on the host: {made:.1%}" * (made > 0)
    if facts.items > 10:
        evidence += f"; about {facts.items} .item() per step"
    cause, advice = "the loop's own Python code takes the time", "see the lines below; compute on whole tensors"
    if not driver.instrument.optimizers and not driver.instrument.by_hand:
        cause = "the loop's own Python code takes the time, the update of the weights among it"
        advice += "; take an optimizer of torch.optim with fused=True, or of fusedtrain.optim"
    if fmean(step.cpu for step in facts.steps) < 0.5 * facts.step.value:  # not even half of the step on a core
        cause = "the loop waits in its own code, as for storage"
        advice = "see the lines below; read data in the workers of a DataLoader, write in a thread"
    shared = ("recomputed", sum(share for site, share in facts.constants if site in within))
    return Finding("own_code", cause, evidence, share - made, advice=advice, lines=lines, shared=shared)

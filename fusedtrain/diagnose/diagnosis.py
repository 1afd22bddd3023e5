"""The whole plan of a diagnosis, from warm-up to verified remedies."""

from collections.abc import Callable

from fusedtrain.diagnose import measure, verify
from fusedtrain.diagnose.batches import CachedSource
from fusedtrain.diagnose.drive import SETTLING, Driver, agree
from fusedtrain.diagnose.instrument import Step
from fusedtrain.diagnose.machine import machine
from fusedtrain.diagnose.measure import Facts, Sizes
from fusedtrain.diagnose.plan import Arm, Run
from fusedtrain.diagnose.remedies import replicas
from fusedtrain.diagnose.rules import RULES
from fusedtrain.diagnose.rules.finding import LEAST, Finding
from fusedtrain.diagnose.sampling import Sampler
from fusedtrain.diagnose.statistics import Interval, Paired, bootstrap

SHARED = 4
# What is cured by other means too, and rather by these: they are the cause in the script's own lines.
RATHER = {
    "fuse": ("layout", "slow_16_bit", "float64"),
    "launches": ("own_code", "host_tensors", "python_loop", "syncs", "optimizer", "fuse", "zero_grad", "batch_size"),
    "batch_size": ("python_loop",),
}
BOTTLENECK = 0.1  # of the step: what costs less is listed, and is no bottleneck
NOISY = 0.1  # with A/A runs further apart than this, small gains cannot be told from noise


class Diagnosis:
    """Carries out the measurements and holds what came out.

    Args:
        steps: how many to watch; None: 50 to 200, about five seconds.
        verify: whether to try the remedies.
        restore: whether to keep the state of the training in ``before``.
        stage: is told what is being done.
        checkpoint: is called with this object whenever there is something new to report.
    """

    def __init__(
        self,
        *,
        steps: int | None = None,
        verify: bool = False,
        restore: bool = False,
        stage: Callable[[str], None] = lambda text: None,
        checkpoint: Callable[["Diagnosis"], None] = lambda diagnosis: None,
    ):
        if steps is not None and steps < 10:
            raise ValueError(f"steps must be at least 10, got {steps}")
        self.wanted, self.verifies, self.stage, self.checkpoint = steps, verify, stage, checkpoint
        self.facts: Facts | None = None
        self.findings: list[Finding] = []
        self.checked: dict[str, str] = {}
        self.noise: Interval | None = None
        self.cached_noise: Interval | None = None
        self.verdicts: list[verify.Verdict] = []
        self.combined: Paired | None = None
        self.timeline: list[list[tuple[str, float, float]]] = []
        self.failure = ""
        self.machine: dict = {}  # as the script uses it, before any remedy
        self.examined = True  # whether causes were looked for
        self.early: list[Step] = []  # what was measured of the run as it is before causes are looked for
        self.keep_state, self.before = restore, None
        self.remedies: dict = {}  # all that were considered, by name
        self.arm = Arm()

    @property
    def noisy(self) -> bool:
        """Whether two equal arms differ so much that the machine cannot tell small gains from chance."""
        noise = self.noise
        return noise is not None and (noise.half() > NOISY or (noise.low > 0.02 or noise.high < -0.02))

    @property
    def bottleneck(self) -> Finding | None:
        """The cause that costs most, of those that something can be done about; None: no such cause costs much."""
        return next((f for f in self.findings if not (f.option or f.share) and f.cost >= BOTTLENECK), None)

    def plan(self, driver: Driver):
        """Yields the runs of the diagnosis to the driver."""
        plan, records = self._plan(driver), None
        try:
            while True:
                try:
                    run = plan.send(records)
                except StopIteration:
                    return
                records = yield run
                if self.facts is None and run.arm == Arm():
                    self.early += records
        finally:
            plan.close()
            for remedy in self.remedies.values():
                if remedy.on_loader:
                    remedy.source.close()

    def cut_short(self) -> bool:
        """Takes what was measured before the script ended for a report without causes; returns whether there is any."""
        steps = self.early[SETTLING:]
        watched = [step for step in steps if step.spans]
        if self.facts is not None or not watched:
            return False
        mean = bootstrap([step.seconds for step in steps])
        parts = measure.parts_of([(step, step.seconds) for step in steps], 0.0, mean.value, False)
        none = Interval(0.0, 0.0, 0.0)
        self.facts = Facts(steps, mean, parts, self.driver.loader, {}, watched=len(watched), cost=none)
        self.noise = self.noise or none
        self.examined = False
        return True

    def _plan(self, driver: Driver):
        self.driver, self.inputs, self.machine = driver, driver.instrument.inputs, machine()
        self.before = verify.Snapshot(driver) if self.keep_state else None
        self.stage("warming up")
        sizes = yield from measure.warm_up(driver)
        self.graphs = yield from measure.graphs(driver)
        if self.graphs[-1][1]:
            yield from self._name_growth(driver, sizes)
            if self.findings:
                return
        self.growth = yield from measure.growth(driver, sizes)
        self.stage("A/A: the same run twice, how noisy is the machine?")
        self.noise = (yield from measure.trial(driver, sizes, Arm(), Arm(), verify.PAIRS)).gain(verify.LEVEL)
        self.facts, self.findings, self.checked = yield from self._examine(driver, sizes, Arm(), self.wanted)
        self.checkpoint(self)
        if self.verifies:
            yield from self._verify(driver, sizes)
            self.checkpoint(self)
        if driver.batches:
            self.stage("larger batches")
            self.failure = "the loop fails with a larger batch"
            self.checked |= {"batch_size": f"not measured: {self.failure}"}
            self.checkpoint(self)  # the last one, if so
            cached = Arm((), CachedSource(driver.batches))
            snapshot = verify.Snapshot(driver) if replicas(driver) else None
            yield from measure.larger_batches(driver, self.facts, sizes, cached)
            if snapshot is not None:
                snapshot.restore()  # the processes went their own ways
            self.failure = ""
            self.findings, self.checked = self._look(self.facts, driver)
        self.checkpoint(self)

    def _name_growth(self, driver: Driver, sizes: Sizes):
        """Says that steps get slower and slower, if so, and nothing else: no two of them can be compared."""
        self.noise = Interval(0.0, 0.0, 0.0)
        facts = yield from measure.observe(driver, sizes, Arm(), self.wanted or 50, self.remedies)
        with Sampler(driver) as sampler:
            yield Run(10)
        facts.lines, facts.graphs = agree(sampler.lines()), self.graphs
        found = next(rule.look for rule in RULES if rule.name == "growing_graph")(facts, driver)
        if isinstance(found, Finding):
            self.facts, self.findings = facts, [found]
            self.failure = "every step is slower than the one before: the rest can be measured when that is mended"
            self.checkpoint(self)

    def _examine(self, driver: Driver, sizes: Sizes, arm: Arm, steps: int | None):
        """Measures one variant of the run; returns (facts, findings, what was checked without a finding)."""
        first = not arm.remedies
        self.stage("watching steps")
        facts = yield from measure.observe(driver, sizes, arm, steps, self.remedies)
        facts.noise, facts.graphs, facts.growth = self.noise.half(), self.graphs, self.growth
        yield from measure.optimizer_faults(driver, facts, sizes, arm)
        if first:
            yield from self._timeline(arm)
        cached = arm
        if driver.loader is not None and driver.batches:
            self.stage("ceilings: cached batches")
            cached = yield from measure.ceiling(driver, facts, sizes, arm)
            if first:
                self.cached_noise = (yield from measure.trial(driver, sizes, cached, cached, measure.PAIRS)).gain()
            if first or facts.waiting.high >= LEAST:  # where the loader may be the cause
                self.stage("ceilings: the loader alone")
                measure.loader_rates(driver, facts)
        if first:
            self.stage("sampling lines")
            yield from measure.sample(driver, facts, sizes, arm)
            yield from measure.constants(facts, arm)
            yield from measure.host_tensors(facts, sizes, arm)
            self.stage("torch.profiler")
            yield from measure.profile(facts, cached)
        if replicas(driver):
            self.stage("without exchanging gradients")
            yield from measure.exchange(driver, facts, sizes, cached, verify.Snapshot(driver))
        facts.cached_noise = self.cached_noise.half() if cached is not arm else facts.noise
        yield from self._probe(driver, facts, sizes, arm, cached)
        return facts, *self._look(facts, driver)

    def _probe(self, driver: Driver, facts: Facts, sizes: Sizes, arm: Arm, cached: Arm, rules=RULES):
        """Tries every change that may help, briefly, with cached batches."""
        for rule in rules:
            if rule.candidates is None:
                continue
            found = rule.candidates(facts, driver)
            if isinstance(found, list) and any(remedy in arm.remedies for remedy in found):
                found = "in force"
            facts.candidates[rule.name] = found
            for remedy in found if isinstance(found, list) else ():
                if remedy.rehearsed and remedy.name not in facts.refused:
                    error = verify.rehearse(driver, remedy, self.inputs)
                    if error is not None:
                        facts.refused[remedy.name] = error
                        continue
                self.stage(f"probing {remedy.name}")
                after = Arm((*arm.remedies, remedy), cached.source)
                pairs = yield from measure.trial(driver, sizes, cached, after, measure.PAIRS)
                if not pairs.faster() and pairs.share() > max(LEAST, facts.cached_noise):  # a disturbance of one pair?
                    pairs += yield from measure.trial(driver, sizes, cached, after, measure.PAIRS)
                facts.probes[remedy.name] = pairs

    def _look(self, facts: Facts, driver: Driver) -> tuple[list[Finding], dict[str, str]]:
        findings, checked = [], {}
        for rule in RULES:
            found = rule.look(facts, driver)
            if isinstance(found, str):
                checked[rule.name] = found
            else:
                findings.append(found)
        return ranked(findings), checked

    def _timeline(self, arm: Arm):
        for step in (yield Run(12, arm, parts=True)):
            begin = step.start
            spans = [(part, start - begin, end - begin) for part, start, end, _ in step.spans]
            self.timeline.append([*spans, ("end", 0.0, step.wall)])

    def _verify(self, driver: Driver, sizes: Sizes):
        """Tries the remedies, the most promising first, and looks again after each that is kept."""
        arm, facts, findings, tried = Arm(), self.facts, self.findings, set()
        while True:
            queue = [(f, r) for f in findings for r in f.remedies if r.name not in tried and not r.outside]
            if not queue and not facts.thorough:  # what takes long is tried once, on top of all that was kept
                facts.thorough = True
                cached = Arm(arm.remedies, CachedSource(driver.batches)) if facts.cached else arm
                yield from self._probe(driver, facts, sizes, arm, cached, [r for r in RULES if r.name == "compile"])
                findings, _ = self._look(facts, driver)
                continue
            if not queue:
                break
            finding, remedy = queue[0]
            tried.add(remedy.name)
            self.stage(f"verifying {remedy.name}")
            verdict = yield from verify.judge(driver, sizes, remedy, finding.gain, arm)
            self.verdicts.append(verdict)
            if verdict.accepted:
                tried |= {other.name for other in finding.remedies}
                arm = verify.with_remedy(arm, remedy)
                sizes = Sizes(verdict.seconds[1], sizes.period)
                self.stage("looking again")
                thorough = facts.thorough
                facts, findings, _ = yield from self._examine(driver, sizes, arm, max(10, sizes.block(arm)[0]))
                facts.thorough = thorough
        if arm.remedies:
            self.stage("all together")
            self.combined = yield from measure.trial(driver, sizes, Arm(), arm, verify.PAIRS)
        self.arm = arm


def ranked(findings: list[Finding]) -> list[Finding]:
    """Returns the findings by what they cost, without what they cost because of another one alone.

    Other layers may also cure what a layout or a precision does to the stock ones. The cause in the script's own lines
    then comes first, and the layers after it, unless they bring more than SHARED times as much. So it is with a device
    that waits to be told what to do, and what keeps the CPU from telling it.
    """
    found = {finding.rule for finding in findings}

    def own_cost(finding: Finding) -> float:
        rule, share = finding.shared
        return finding.cost - (share if rule in found else 0.0)

    def rank(finding: Finding) -> tuple[float, bool]:
        cost, rather = own_cost(finding), RATHER.get(finding.rule, ())
        own = max((own_cost(f) for f in findings if f.rule in rather), default=0.0)
        behind = own < cost <= SHARED * own
        return -(own if behind else cost), behind

    return sorted(findings, key=rank)

"""The decision tree as a table: from what was measured to a cause, its remedies and the gain they promise."""

from fusedtrain.diagnose.rules import computing, loading, loop
from fusedtrain.diagnose.rules.finding import Rule, probed

RULES = (
    Rule("loader", loading.loader),
    Rule("loader_restart", loading.restarts),
    Rule("copies", loading.copies),
    Rule("syncs", loading.syncs),
    Rule("launches", loading.launches),
    Rule("communication", loading.communication),
    Rule("evaluation", loop.evaluation),
    Rule("recomputed", loop.constants),
    Rule("host_tensors", loop.host_tensors),
    Rule("growing_graph", loop.growth),
    Rule("memory", loop.memory),
    Rule("own_code", loop.own_code),
    Rule("python_loop", computing.python_loop),
    Rule("allocator", computing.allocator),
    probed(
        "threads",
        "the number of threads does not fit the cores",
        computing.threads,
        evidence=lambda facts, driver: computing.threads_text("for"),
    ),
    computing.layout_rule(),
    probed(
        "fuse",
        "layers run unfused",
        computing.fuse,
        evidence=lambda facts, driver: (
            "fusedtrain.fuse makes of them: " + ", ".join(f"{name} x {n}" for name, n in facts.fusible.items())
        ),
    ),
    computing.optimizer_rule(),
    probed("zero_grad", "gradients are filled with zeros and added to", computing.zero_grad),
    probed("debugging", "every operation is searched for bugs", computing.debugging),
    probed("slow_16_bit", "16-bit arithmetic is slower than float32 here", computing.slow_16_bit),
    probed("float64", "float64 arithmetic, of which float32 takes half the time and memory", computing.float64),
    probed("half_precision", "float32 arithmetic where bfloat16 is faster", computing.half, option=True),
    Rule("tf32", computing.tf32),
    probed("compile", "operations run one by one where torch.compile joins them", computing.compiling, option=True),
    probed("cudnn", "cuDNN takes its first guess of an algorithm", computing.cudnn),
    Rule("batch_size", computing.batch_size),
)

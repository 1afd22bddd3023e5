"""Which backend runs: the automatic choice, forcing one, and what explain() says about it."""

import copy
import dataclasses
from types import SimpleNamespace

import harness
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusedtrain
from fusedtrain import _extension, backend, ops
from fusedtrain.backend import Impl
from fusedtrain.ops import _common

X = torch.ones(2, 3, 4, 4)
CALLS = {
    "channel_pool": (X,),
    "channel_scale": (X, torch.ones(2, 3)),
    "squeeze_excite": (X, torch.ones(2, 3), None, torch.ones(3, 2), None),
}


class OperatorsCalled(TorchDispatchMode):
    """Records the names of this package's operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fusedtrain":
            self.names.append(str(function).removeprefix("fusedtrain."))
        return function(*args, **kwargs or {})


def test_the_cases_of_this_file_are_all_ops():
    assert CALLS.keys() <= backend._OPS.keys()


@pytest.mark.parametrize("op", CALLS)
def test_forced_backend_never_falls_back(op, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name, reason in (
        ("cuda", "x is on cpu, not on a CUDA device"),
        ("triton", "x is on cpu; Triton kernels run on"),
    ):
        with OperatorsCalled() as called, fusedtrain.use_backend(name):
            message = rf"backend '{name}' is forced by use_backend\(\) but cannot run {op}: {reason}"
            with pytest.raises(RuntimeError, match=message):
                getattr(ops, op)(*CALLS[op])
        assert called.names == []


@pytest.mark.parametrize("op", CALLS)
def test_forced_backend_is_the_one_that_runs(op, device, kernels):
    arguments = [t.to(device) if isinstance(t, torch.Tensor) else t for t in CALLS[op]]
    with OperatorsCalled() as called:
        getattr(ops, op)(*arguments)
    assert called.names == [f"{op}.triton" if kernels == "triton" else f"{op}.default"]
    with OperatorsCalled() as called, fusedtrain.use_backend("reference"):
        getattr(ops, op)(*arguments)
    assert called.names == []


def test_backward_runs_where_forward_ran(device, kernels):
    x = X.to(device).requires_grad_()
    y = ops.channel_pool(x)
    with OperatorsCalled() as called, fusedtrain.use_backend("reference"):
        y.sum().backward()
    overload = "triton" if kernels == "triton" else "default"
    assert called.names == [f"channel_pool_backward.{overload}"]


def test_forcing_nests_and_ends():
    assert backend.current_backend() is None
    with fusedtrain.use_backend("reference"):
        with fusedtrain.use_backend("cuda"):
            assert backend.current_backend() == "cuda"
            with fusedtrain.use_backend(None):
                ops.channel_pool(X)
        assert backend.current_backend() == "reference"
        with pytest.raises(ZeroDivisionError), fusedtrain.use_backend("cuda"):
            raise ZeroDivisionError
        assert backend.current_backend() == "reference"
    assert backend.current_backend() is None
    before = fusedtrain.use_backend("reference")  # without a with block: from now on
    try:
        assert backend.current_backend() == "reference"
    finally:
        before.__exit__()


def test_unknown_backend_is_named():
    with pytest.raises(ValueError, match=r"use_backend\(\) must be one of cuda, cpu, triton, reference, got 'gpu'"):
        fusedtrain.use_backend("gpu")
    assert backend.current_backend() is None


CALL = "import torch, fusedtrain; fusedtrain.ops.channel_pool(torch.ones(1, 1, 2, 2));"


def test_environment_variable_forces_a_backend():
    done = harness.run_python("-c", CALL, FUSEDTRAIN_BACKEND="cuda")
    assert "backend 'cuda' is forced by FUSEDTRAIN_BACKEND but cannot run channel_pool: x is on cpu" in done.stderr
    done = harness.run_python(
        "-c", "import fusedtrain; fusedtrain.use_backend('reference');" + CALL, FUSEDTRAIN_BACKEND="cuda"
    )
    assert done.returncode == 0, done.stderr


def test_unknown_name_in_the_environment_is_told_at_the_first_call():
    done = harness.run_python("-c", "import fusedtrain; print('imported')\n" + CALL, FUSEDTRAIN_BACKEND="gpu")
    assert done.stdout == "imported\n"
    assert "ValueError: FUSEDTRAIN_BACKEND must be one of cuda, cpu, triton, reference, got 'gpu'" in done.stderr


def test_explain_tells_what_runs_and_why(device, kernels, capsys):
    # Large enough for the kernels to be worth their call, and to learn from, in which they gain on every CPU.
    x = torch.ones(1, 32, 32, 32, device=device, requires_grad=True)
    text = fusedtrain.explain("channel_pool", x)
    assert capsys.readouterr().out == text + "\n"
    lines = text.splitlines()
    assert lines[0] == f"channel_pool: {kernels} runs, forced by use_backend()"
    assert [line.split()[0] for line in lines[1:]] == list(backend.BACKENDS)
    assert "  reference  can run" in lines
    if (device, kernels) == ("cpu", "triton"):
        assert "  triton     Triton's interpreter is slower than any other backend" in lines
    else:
        assert f"  {kernels:<10} can run" in lines
    if device == "cpu":
        assert "  cuda       x is on cpu, not on a CUDA device" in lines


def test_explain_does_not_say_that_a_forced_backend_runs_where_it_cannot(monkeypatch):
    with fusedtrain.use_backend("cuda"):
        assert "channel_pool: cuda is forced by use_backend() but cannot run\n" in fusedtrain.explain("channel_pool", X)
    monkeypatch.setattr(backend, "_forced", "gpu")
    with pytest.raises(ValueError, match="must be one of cuda, cpu, triton, reference, got 'gpu'"):
        fusedtrain.explain("channel_pool", X)


def test_small_images_are_left_to_stock_by_the_automatic_choice():
    impls = backend._OPS["channel_pool"]
    assert "stock calls cost less" in impls["cpu"].slower(X)
    assert impls["cpu"].slower(torch.ones(1, 32, 32, 32, requires_grad=True)) is None


def test_explain_tells_that_stock_runs_under_transforms():
    x = torch.ones(1, 32, 32, 32)
    said = []
    torch.vmap(lambda x: said.append(fusedtrain.explain("channel_pool", x)) or x)(x[None])
    assert said[0].startswith("channel_pool: reference runs, which alone has the derivatives of torch.func")


def test_flops_are_counted_as_of_stock_layers():
    from torch.utils.flop_counter import FlopCounterMode  # imports much

    layers = [nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 1)]
    stock, counts = nn.Sequential(*layers), []
    fused = copy.deepcopy(stock)
    fusedtrain.fuse(fused)
    for model in (stock, fused):
        with FlopCounterMode(display=False) as counter:
            model(torch.ones(2, 8, 16, 16)).sum().backward()
            said = fusedtrain.explain("channel_pool", X)
        counts.append(counter.get_flop_counts()["Global"])
    assert counts[0] == counts[1]
    assert said.startswith("channel_pool: reference runs, whose operators alone FlopCounterMode knows")


def test_the_counter_of_ptflops_sees_torchs_operators():
    class FlopCounterMode(TorchDispatchMode):  # the name that ptflops has too
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            seen.append(operator.namespace)
            return operator(*args, **kwargs or {})

    layer, seen = nn.Sequential(nn.Conv2d(32, 32, 5, padding=2, groups=32)), []
    fusedtrain.fuse(layer)
    with FlopCounterMode():
        layer(torch.ones(2, 32, 16, 16)).sum().backward()
    assert seen and "fusedtrain" not in seen


def test_counters_that_wrap_convolutions_are_given_what_stock_layers_give(monkeypatch):
    options = ({"kernel_size": 3, "groups": 16}, {"kernel_size": 3, "groups": 2, "dilation": 2}, {"kernel_size": 1})
    stock = nn.Sequential(*(nn.Conv2d(16, 16, stride=stride, **of) for stride in (1, (2, 1)) for of in options))
    fused, given, convolve = copy.deepcopy(stock), [], torch.nn.functional.conv2d

    def counted(x, weight, bias, stride=1, padding=0, dilation=1, groups=1):
        given.append([of if type(of) is tuple else (of, of) for of in (stride, padding, dilation)])
        return convolve(x, weight, bias, stride, padding, dilation, groups)

    monkeypatch.setattr(torch.nn.functional, "conv2d", counted)
    assert len(fusedtrain.fuse(fused).swapped) == len(stock)
    with fusedtrain.use_backend("reference"):
        for model in (stock, fused):
            model(torch.ones(2, 16, 24, 24))
    assert given[: len(stock)] == given[len(stock) :]


def test_explain_agrees_with_the_automatic_choice(capsys):
    for op, arguments in CALLS.items():
        with OperatorsCalled() as called:
            getattr(ops, op)(*arguments)
        assert fusedtrain.explain(getattr(ops, op), *arguments) == fusedtrain.explain(op, *arguments)
        chosen = capsys.readouterr().out.split()[1]
        assert called.names == {"cpu": [f"{op}.default"], "reference": []}[chosen]


ROWS, VECTOR, KERNELS = torch.ones(2, 8), torch.ones(8), torch.ones(8, 1, 3, 3)
IMAGES = torch.ones(2, 8, 9, 9)
ASKED = {  # as users call them: options by position and by name
    "channel_pool": ((IMAGES,), {"in_act": "silu", "pool": "avg_max"}),
    "channel_scale": ((IMAGES, ROWS), {"in_act": "silu"}),
    "squeeze_excite": ((IMAGES, torch.ones(4, 8), None, torch.ones(8, 4), None), {"act": "silu"}),
    "batch_norm_act": ((IMAGES, VECTOR, VECTOR), {"training": True, "residual": IMAGES, "act": "relu"}),
    "depthwise_bn_act_se": ((IMAGES, KERNELS, None, VECTOR, VECTOR), {"stride": 2, "act": "silu"}),
    "depthwise_conv2d": ((IMAGES, KERNELS, VECTOR, 2), {"padding": (0, 1, 0, 1), "act": "silu"}),
    "depthwise_conv2d of one image": ((IMAGES[0], KERNELS), {"padding": "same", "dilation": 2}),
    "pointwise_conv2d": ((IMAGES, torch.ones(4, 8, 1, 1)), {"stride": 2}),
    "grouped_conv2d": ((IMAGES, torch.ones(8, 2, 3, 3)), {"padding": "valid", "groups": 4}),
    "linear": ((ROWS, torch.ones(4, 8)), {"bias": torch.ones(4)}),
    "global_response_norm": ((IMAGES, VECTOR, VECTOR), {"in_act": "gelu"}),
    "mlp": ((ROWS, torch.ones(4, 8), None, torch.ones(6, 4), None), {"scale": torch.ones(6), "act": "silu"}),
    "grad_norm": (([IMAGES, ROWS],), {}),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("case", ASKED)
def test_explain_asks_the_rules_as_the_op_itself_does(case, autocast, monkeypatch):
    op, (args, kwargs), asked = case.split()[0], ASKED[case], []
    impls = backend._OPS[op]
    spy = dataclasses.replace(impls["cuda"], why_not=lambda *args: asked.append(args) or "it is asked only")
    monkeypatch.setitem(impls, "cuda", spy)
    with fusedtrain.use_backend("cuda"), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with pytest.raises(RuntimeError, match="it is asked only"):
            getattr(ops, op)(*args, **kwargs)
        fusedtrain.explain(getattr(ops, op), *(args[0] if op == "grad_norm" else args), **kwargs)
    by_op, *by_explain = asked
    assert by_explain
    for each in by_explain:
        assert len(each) == len(by_op)
        for ours, expected in zip(each, by_op):
            assert type(ours) is type(expected)
            if isinstance(expected, torch.Tensor):
                assert torch.equal(ours, expected) and ours.dtype == expected.dtype
            else:
                assert ours == expected


def test_explain_tells_which_argument_is_wrong():
    with pytest.raises(
        TypeError, match=r"explain\('channel_pool', ...\): got an unexpected keyword argument 'activation'"
    ):
        fusedtrain.explain("channel_pool", X, activation="silu")
    with pytest.raises(ValueError, match=r"in_act must be one of .*, got 'swish'"):
        fusedtrain.explain("channel_pool", X, in_act="swish")
    with pytest.raises(TypeError, match=r"explain\('depthwise_conv2d', ...\): missing a required argument: 'weight'"):
        fusedtrain.explain("depthwise_conv2d", X)
    with pytest.raises(
        TypeError, match=r"explain\('grad_norm', ...\) takes no argument by name, got error_if_nonfinite"
    ):
        fusedtrain.explain("grad_norm", X, error_if_nonfinite=True)


def test_explain_names_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"explain\(\) knows the ops batch_norm_act, .* got 'softmax'"):
        fusedtrain.explain(torch.softmax, X)
    with pytest.raises(ValueError, match=r"explain\('channel_pool', ...\) needs the op's arguments, x first"):
        fusedtrain.explain("channel_pool")


@pytest.fixture
def on_a_gpu(monkeypatch):
    """What stands for a tensor on cuda:1, of compute capability 9.0 and a driver for CUDA 13.0."""
    monkeypatch.setattr(_extension, "HAS_CUDA_KERNELS", True)
    monkeypatch.setitem(_extension.BUILD_INFO, "cuda_archs", ["9.0"])
    monkeypatch.setitem(_extension.BUILD_INFO, "cuda_version", "13.0")
    monkeypatch.setattr(_common, "_GPUS", {})
    monkeypatch.setattr(_common, "_TRITONS_GPUS", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(_extension, "CUDA_OF_DRIVER", 13000)
    device = torch.device("cuda:1")
    return SimpleNamespace(is_cpu=False, is_cuda=True, device=device, dtype=torch.float32, get_device=lambda: 1)


@pytest.mark.parametrize(
    ("built", "driver", "runs"), [("13.2", 13000, True), ("12.8", 13000, True), ("13.0", 12080, False)]
)
def test_kernels_that_are_too_new_for_the_driver_are_not_taken(on_a_gpu, monkeypatch, built, driver, runs):
    monkeypatch.setitem(_extension.BUILD_INFO, "cuda_version", built)
    monkeypatch.setattr(_extension, "CUDA_OF_DRIVER", driver)
    reason = _common.why_not_cuda(on_a_gpu)
    assert reason is None if runs else "kernels of CUDA 13.0, and the driver runs up to 12.8" in reason


@pytest.mark.parametrize(
    ("built", "driver", "runs"),
    [("12.8", 12010, True), ("12.0", 12000, True), ("12.8", None, True), ("12.1", 12000, False)],
)
def test_lists_of_tensors_are_no_arguments_of_drivers_that_take_short_ones(on_a_gpu, monkeypatch, built, driver, runs):
    monkeypatch.setitem(_extension.BUILD_INFO, "cuda_version", built)
    monkeypatch.setattr(_extension, "CUDA_OF_DRIVER", driver)
    assert _common.why_not_cuda(on_a_gpu) is None
    for op in ("grad_norm", "optimizer_step", "optimizer_step_narrow"):
        reason = backend._OPS[op]["cuda"].why_not(on_a_gpu, on_a_gpu)
        assert reason is None if runs else "need a driver of CUDA 12.1, and this one runs up to 12.0" in reason


@pytest.mark.parametrize(
    ("archs", "runs", "runs_not"),
    [
        (["7.5", "8.0", "9.0+PTX"], [(7, 5), (8, 0), (8, 9), (9, 0), (12, 0)], [(7, 0)]),
        (["8.6", "9.0a", "10.0f"], [(8, 6), (8, 9), (9, 0), (10, 3)], [(7, 5), (8, 0), (11, 0), (12, 0)]),
        (["9.0a+PTX"], [(9, 0)], [(8, 0), (10, 0)]),
    ],
)
def test_kernels_that_were_not_built_for_a_gpu_are_not_taken_there(on_a_gpu, monkeypatch, archs, runs, runs_not):
    x = on_a_gpu
    monkeypatch.setitem(_extension.BUILD_INFO, "cuda_archs", archs)
    for gpu in runs + runs_not:
        monkeypatch.setattr(_common, "_GPUS", {})
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, gpu=gpu: gpu if index == 1 else None)
        reason = _common.why_not_cuda(x)
        if gpu in runs:
            assert reason is None
        else:
            assert f"CUDA kernels for {', '.join(archs)}, and cuda:1 has compute capability {gpu[0]}.{gpu[1]}" in reason
            impls = backend._OPS["channel_pool"]
            assert backend.select("channel_pool", impls, x) in (impls["triton"], impls["reference"])
            message = r"backend 'cuda' is forced by use_backend\(\) but cannot run channel_pool: this build has"
            with fusedtrain.use_backend("cuda"), pytest.raises(RuntimeError, match=message):
                backend.select("channel_pool", impls, x)


@pytest.mark.parametrize(("gpu", "chosen"), [((6, 1), "reference"), ((7, 0), "triton")])
def test_gpus_that_triton_compiles_nothing_for_run_stock(on_a_gpu, monkeypatch, gpu, chosen):
    monkeypatch.setattr(_common, "_HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: gpu if index == 1 else None)
    impls = backend._OPS["channel_pool"]
    assert backend.select("channel_pool", impls, on_a_gpu) is impls[chosen]
    if chosen == "reference":
        assert _common.why_not_triton(on_a_gpu) == "Triton needs compute capability 7.0, and cuda:1 has 6.1"


def test_automatic_choice_takes_the_first_that_can_or_stock_where_that_is_faster():
    def table(**reasons):
        return {
            name: Impl(name, None, lambda x, no=no: no, lambda x, slow=slow: slow)
            for name, (no, slow) in reasons.items()
        }

    free = (None, None)
    impls = table(cuda=("no GPU", None), cpu=(None, "2x slower than stock"), triton=free, reference=free)
    assert backend.select("op", impls, X).forward == "reference"
    with fusedtrain.use_backend("cpu"):  # forced: slower or not
        assert backend.select("op", impls, X).forward == "cpu"
    impls = table(cuda=("no GPU", None), cpu=("no compiler", None), triton=free, reference=free)
    assert backend.select("op", impls, X).forward == "triton"
    with pytest.raises(RuntimeError, match=r"no backend can run op:\n(.|\n)*cpu +no compiler"):
        backend.select("op", table(cuda=("no GPU", None), cpu=("no compiler", None)), X)


class _Asked(torch.autograd.Function):
    """The product of ``x`` and ``weight``, which notes what its backward is asked for."""

    @staticmethod
    def forward(ctx, x, option, weight, bias, notes):
        ctx.save_for_backward(x, weight)
        ctx.notes = notes
        return x * weight

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        ctx.notes.append((_common.needed(ctx, 0, 2), _common.needed(ctx, 0)))
        return dy * weight, None, dy * x, None, None


@pytest.mark.parametrize("leaf", [True, False])
def test_ops_know_which_gradients_are_asked_for(leaf):
    """As torch's own do: a gradient of the images alone, as for adversarial examples, costs no gradient of weights."""
    notes = []
    x, weight = (torch.ones(3, requires_grad=True) for _ in range(2))
    given = (x, weight) if leaf else (x * 2, weight * 2)
    y = _Asked.apply(given[0], 1, given[1], None, notes).sum()
    keep = {"retain_graph": True}
    y.backward(**keep)
    torch.autograd.grad(y, (x, weight), **keep)
    for of in (x, given[0]):
        torch.autograd.grad(y, of, **keep)
    torch.autograd.grad(y, weight, **keep)
    y.backward(inputs=[x], **keep)
    y.backward(inputs=[weight])
    images, weights, both = (
        ((of_x, False, of_weight, False, False), (of_x, False, True, False, False))  # the second asks of x alone
        for of_x, of_weight in ((True, False), (False, True), (True, True))
    )
    assert notes == [both, both, images, images, weights, images, weights]

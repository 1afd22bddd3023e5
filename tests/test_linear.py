"""linear: the last dimension times a matrix; and its layer."""

import copy
import sys

import harness
import properties
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusedtrain
from fusedtrain import _extension
from fusedtrain import backend as backends
from fusedtrain.ops import _common, linear
from fusedtrain.ops.linear import IMPLS, reference

STOCK_ON_GPUS = True  # see conftest.py

MODULE = sys.modules["fusedtrain.ops.linear"]
SHAPES = [(7, 13), (1, 1), (33, 17), (2, 5, 7, 24), (3, 64, 96), (40, 200), (5, 700)]


def make(device="cpu", shape=(2, 9, 13), dtype=torch.float32, out=20, bias=True, seed=0) -> dict:
    return {
        "x": harness.normal(*shape, dtype=dtype, device=device, seed=3 * seed),
        "w": harness.normal(out, shape[-1], dtype=dtype, device=device, seed=3 * seed + 1),
        "b": harness.normal(out, dtype=dtype, device=device, seed=3 * seed + 2) if bias else None,
    }


@pytest.mark.parametrize("dtype", harness.DTYPES)
@pytest.mark.parametrize("out", [1, 24, 130])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_are_as_good_as_torch(device, backend, shape, out, dtype):
    draws = harness.draws(lambda seed: make(device, shape, dtype, out, out != 24, seed), device, backend)
    harness.assert_op_as_good_as_torch(linear, reference, draws, "linear")


@pytest.mark.parametrize("sizes", [(512, 96, 384), (512, 384, 96), (128, 1536, 384), (64, 768, 3072), (64, 3072, 768)])
def test_layers_of_real_networks(device, backend, sizes):
    rows, c, d = sizes
    draws = harness.draws(lambda seed: make(device, (rows, c), torch.float32, d, seed=seed), device, backend)
    harness.assert_op_as_good_as_torch(linear, reference, draws, "linear")


def strided(name, t):
    return {
        "transposed": lambda: t.transpose(-1, -2).contiguous().transpose(-1, -2),
        "sliced": lambda: torch.stack([t, t], -1)[..., 0],
        "permuted": lambda: t.transpose(0, 1).contiguous().transpose(0, 1),
        "expanded": lambda: t[:1].expand_as(t),
    }[name]()


@pytest.mark.parametrize("name", ["transposed", "sliced", "permuted", "expanded"])
def test_any_strides_are_as_good_as_torch(device, backend, name):
    inputs = make(device, (4, 9, 13))
    inputs["x"] = strided(name, inputs["x"])
    harness.assert_op_as_good_as_torch(linear, reference, inputs, name)
    inputs["w"] = strided("transposed", inputs["w"])
    harness.assert_op_as_good_as_torch(linear, reference, inputs, name)


def test_images_whose_channels_were_moved_to_the_end_are_not_copied(device):
    x = harness.images((2, 13, 7, 9), "channels_last", device=device).permute(0, 2, 3, 1)
    assert MODULE._rows(x).data_ptr() == x.data_ptr()


@harness.needs_memory(18)
@pytest.mark.parametrize(("channels", "out"), [(64, 8), (8, 64)])
def test_more_than_2_to_the_31_elements(device, backend, channels, out):
    inputs = make(device, (3, 4096, channels), out=out, bias=False)
    inputs["x"][1] = 0
    calls = linear, lambda counts, x, w, b: reference(x, w, b)
    properties.assert_thousands_of_images_are_as_good_as_torch(*calls, inputs, backend, device)


@pytest.mark.parametrize("shape", [(13,), (0, 13), (2, 0, 13)], ids=str)
def test_one_row_and_none(device, backend, shape):
    harness.assert_op_as_good_as_torch(linear, reference, make(device, shape), "linear")


def test_gradients_are_derivatives(device, backend):
    properties.assert_gradients_are_derivatives(linear, make(device, (3, 4, 5), torch.float64, 4))


@pytest.mark.parametrize("dtype", harness.DTYPES[:3])
def test_compiles_as_one_graph_and_once(device, backend, dtype):
    properties.assert_compiles(linear, make(device, dtype=dtype))


def test_keeps_only_its_inputs_for_backward(device, backend):
    leaves = [t.requires_grad_() for t in make(device).values()]
    assert harness.extra_saved_bytes(linear, *leaves) == 0


def test_repeats_bitwise_and_writes_every_element(device, backend):
    properties.assert_repeats_bitwise(linear, make(device, (50, 40)))
    properties.assert_writes_every_element(linear, make(device, (50, 40)))


def test_threads_change_nothing(device, backend):
    if backend == "reference":
        pytest.skip("stock PyTorch's sums depend on them")
    properties.assert_threads_change_nothing(linear, make(device, (900, 96), out=200))


def test_frozen_inputs_change_nothing(device, backend):
    properties.assert_frozen_inputs_change_nothing(linear, make(device))


def test_second_derivative_is_refused(device, backend):
    if backend == "reference":
        pytest.skip("stock PyTorch has one")
    properties.assert_second_derivative_is_refused(linear, make(device))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_spread_as_in_torch(device, backend, value):
    inputs = make(device)
    inputs["x"][1, 2, 4] = value
    harness.assert_op_as_good_as_torch(linear, reference, inputs, "linear")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_for_torchs_layer(device, backend, dtype):
    for x_dtype in harness.DTYPES:
        inputs = make(device, dtype=x_dtype)
        with torch.autocast(device, dtype=dtype):
            assert linear(*inputs.values()).dtype == F.linear(*inputs.values()).dtype


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "x must be a Tensor, got list"),
        ({"x": torch.tensor(1.0)}, ValueError, r"x must have shape \[\.\.\., C\], got a scalar"),
        ({"x": torch.ones(2, 3).int()}, TypeError, r"x must be float32, .* got torch.int32"),
        ({"weight": torch.ones(4, 2)}, ValueError, r"\[D, 3\], got \[4, 2\]"),
        ({"weight": None}, ValueError, r"\[D, 3\], got NoneType"),
        ({"bias": torch.ones(3)}, ValueError, r"bias must have shape \[4\] or be None, got \[3\]"),
        ({"weight": torch.ones(4, 3).double()}, TypeError, r"dtype of x \(torch.float32\), got torch.float64"),
        ({"weight": torch.ones(4, 3, device="meta")}, RuntimeError, "weight is on meta, but x is on cpu"),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    arguments = {"x": torch.ones(2, 3), "weight": torch.ones(4, 3), "bias": torch.ones(4)} | changes
    with pytest.raises(error, match=f"linear: .*{message}"):
        linear(**arguments)


@pytest.mark.parametrize(
    ("vendor", "family", "isa", "shape", "dtype", "name"),
    [
        ("amd", 26, "avx512_bf16", (64, 256), torch.float32, "cpu"),
        ("amd", 26, "avx512_bf16", (2, 32, 256), torch.float32, "cpu"),
        ("amd", 26, "avx512_bf16", (31, 256), torch.float32, "reference"),
        ("amd", 26, "avx512_bf16", (32, 64), torch.float32, "reference"),
        ("amd", 26, "avx512_bf16", (64, 256), torch.bfloat16, "reference"),
        ("amd", 25, "avx512_bf16", (64, 256), torch.bfloat16, "reference"),
        ("amd", 25, "avx512_bf16", (10923, 256), torch.bfloat16, "cpu"),
        ("amd", 26, "avx512_bf16", (10923, 256), torch.bfloat16, "reference"),
        ("amd", 25, "avx512", (8, 256), torch.bfloat16, "cpu"),
        ("intel", 6, "avx2", (7, 256), torch.bfloat16, "reference"),
        ("amd", 26, "avx2", (64, 256), torch.float32, "reference"),
        ("amd", 25, "avx512_bf16", (64, 256), torch.float32, "reference"),
        ("intel", 6, "avx512", (64, 256), torch.float32, "reference"),
    ],
)
def test_kernel_runs_where_it_was_measured_faster(vendor, family, isa, shape, dtype, name, monkeypatch):
    if reason := harness.why_not("cpu", "cpu", "linear"):
        pytest.skip(reason)
    for key, value in (("cpu_vendor", vendor), ("cpu_family", family), ("isa_active", isa)):
        monkeypatch.setitem(_extension.BUILD_INFO, key, value)
    inputs = make(shape=shape, dtype=dtype, out=512)
    assert backends.select("linear", IMPLS, *inputs.values()) is IMPLS[name]
    assert name == "cpu" or "stock" in (why := fusedtrain.explain("linear", *inputs.values())) or "convert" in why


@pytest.fixture
def no_instructions(monkeypatch):
    """The CPU as one that multiplies neither bfloat16 nor float16."""
    if reason := harness.why_not("cpu", "cpu", "linear"):
        pytest.skip(reason)
    monkeypatch.setitem(_extension.BUILD_INFO, "isa_active", "avx2")
    monkeypatch.setattr(_common, "_CPU_MULTIPLIES_FLOAT16", False)
    monkeypatch.setattr(MODULE, "_SMALL_CONVERTED", 0)


@pytest.mark.parametrize("chunk", [1, 400, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_the_cpu_does_not_multiply_runs_in_float32(no_instructions, dtype, chunk, monkeypatch):
    monkeypatch.setattr(MODULE, "_CHUNK", chunk)
    draws = [make(shape=(2, 9, 13), dtype=dtype, seed=seed) for seed in range(4)]
    harness.assert_op_as_good_as_torch(linear, reference, draws, "linear")


@pytest.mark.parametrize("autocast", [True, False])
def test_what_runs_in_float32_is_rounded_once(no_instructions, autocast):
    """Also where autocast would cast the converted products back."""
    x, weight, bias = (t.requires_grad_() for t in make(shape=(300, 64), dtype=torch.bfloat16).values())
    dy = harness.normal(300, 20, dtype=torch.bfloat16, seed=9)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = linear(x, weight, bias)
        y.backward(dy)
    assert torch.equal(y, F.linear(*(t.detach().float() for t in (x, weight, bias))).to(torch.bfloat16))
    assert torch.equal(x.grad, (dy.float() @ weight.detach().float()).to(torch.bfloat16))
    harness.assert_as_good_as_torch(
        weight.grad, dy.t() @ x.detach(), dy.double().t() @ x.detach().double(), "gradient of the weight"
    )


class Products(TorchDispatchMode):
    """The dtypes in which matrices are multiplied."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "mm" in function.overloadpacket.__name__:
            self.dtypes += [t.dtype for t in args if isinstance(t, torch.Tensor)]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_products_of_it_run_in_float32(no_instructions, dtype):
    inputs = [t.requires_grad_() for t in make(shape=(300, 64), dtype=dtype).values()]
    with Products() as products, torch.autocast("cpu", dtype=dtype):
        linear(*inputs).sum().backward()
    assert len(products.dtypes) >= 7 and set(products.dtypes) == {torch.float32}


def test_what_runs_in_float32_compiles_as_one_graph_and_once(no_instructions):
    properties.assert_compiles(linear, make(shape=(9, 13), dtype=torch.bfloat16))


def test_nested_tensors_are_left_to_torch():
    x, weight, bias = make().values()
    ragged = torch.nested.nested_tensor([x[0], x[1, :4]])
    for ours, stock in zip(linear(ragged, weight, bias).unbind(), F.linear(ragged, weight, bias).unbind()):
        assert torch.equal(ours, stock)


class Quantised(torch.Tensor):
    """Stands for the weights of another library: only functions of torch know it."""


def test_weights_of_another_class_are_left_to_torch(monkeypatch):
    if reason := harness.why_not("cpu", "cpu", "linear"):
        pytest.skip(reason)
    for key, value in (("cpu_vendor", "amd"), ("cpu_family", 26), ("isa_active", "avx512_bf16")):
        monkeypatch.setitem(_extension.BUILD_INFO, key, value)
    x, weight, bias = make(shape=(64, 256), out=512).values()
    special = weight.as_subclass(Quantised)
    assert backends.select("linear", IMPLS, x, special, bias) is IMPLS["reference"]
    assert torch.equal(linear(x, special, bias), F.linear(x, weight, bias))
    with fusedtrain.use_backend("cpu"), pytest.raises(RuntimeError, match="a Quantised stands in the place"):
        linear(x, special, bias)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("shape", [(64, 256), (8, 9, 256)], ids=str)
def test_export_takes_the_backend_that_runs(device, backend, shape, strict):
    layer, x = fusedtrain.nn.Linear(256, 512, device=device), harness.normal(*shape, device=device)
    dynamic = {"input": {0: torch.export.Dim("batch", min=2)}}
    exported = torch.export.export(layer, (x,), dynamic_shapes=dynamic, strict=strict)
    assert ("fusedtrain.pointwise_conv2d" in str(exported.graph)) == (backend == "cpu")
    assert torch.equal(exported.module()(x[:5]), layer(x[:5]))


def test_the_layer_is_torchs(device, backend):
    torch.manual_seed(0)
    stock = nn.Linear(13, 20, device=device)
    torch.manual_seed(0)
    ours = fusedtrain.nn.Linear(13, 20, device=device)
    assert isinstance(ours, nn.Linear) and torch.equal(ours.weight, stock.weight)
    assert list(ours.state_dict()) == list(stock.state_dict())
    harness.assert_module_as_good_as_torch(ours, stock, harness.normal(4, 9, 13, device=device))


def test_fuse_takes_it_and_gives_it_back():
    model = nn.Sequential(nn.Linear(13, 20), nn.GELU(), nn.Linear(20, 13))
    assert not fusedtrain.fuse(model)  # it is for networks that convolve
    parameters = list(model.parameters())
    report = fusedtrain.fuse(nn.Sequential(nn.Conv2d(3, 13, 3), nn.Flatten(2), model))
    assert [c.after for c in report] == ["fusedtrain.nn.linear.Linear"] * 2
    assert all(a is b for a, b in zip(model.parameters(), parameters))
    fusedtrain.unfuse(model)
    assert [type(layer) for layer in model] == [nn.Linear, nn.GELU, nn.Linear]


def test_fuse_leaves_the_two_layers_of_a_gate_to_its_op():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.pool = nn.AdaptiveAvgPool2d(1)
            self.fc = nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 16), nn.Sigmoid())

        def forward(self, x):
            n, c = x.shape[:2]
            return x * self.fc(self.pool(x).view(n, c)).view(n, c, 1, 1)

    model = nn.Sequential(nn.Conv2d(3, 16, 3), Gate())
    stock = copy.deepcopy(model)
    fusedtrain.fuse(model)
    assert isinstance(model[1], fusedtrain.nn.recorded.Recorded)
    harness.assert_module_as_good_as_torch(model, stock, harness.images((2, 3, 9, 9)))
    fusedtrain.unfuse(model)
    assert type(model[1]) is Gate

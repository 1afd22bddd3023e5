"""global_response_norm: y = a(x) (1 + weight norm / mean norm) + bias; and its layers."""

import copy

import cases
import harness
import properties
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fusedtrain
from fusedtrain.nn import GlobalResponseNorm, GlobalResponseNormMlp
from fusedtrain.ops import _codes, global_response_norm
from fusedtrain.ops.global_response_norm import IMPLS, reference

EPS = 1e-6
CASES = cases.pairwise(
    shape=list(cases.SHAPES),
    layout=harness.LAYOUTS,
    dtype=harness.DTYPES,
    in_act=_codes.INPUT_ACTIVATIONS,
    vectors=["as x", torch.float32],
)
dense_layouts = pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)


def make(device, shape=(2, 13, 7, 9), layout="contiguous", dtype=torch.float32, vectors="as x", seed=0) -> dict:
    def vector(seed):
        return harness.normal(shape[1], dtype=dtype if vectors == "as x" else vectors, device=device, seed=seed)

    return {"x": harness.images(shape, layout, dtype, device, seed), "w": vector(seed + 100), "b": vector(seed + 200)}


def function(in_act="gelu", eps=EPS):
    return lambda x, w, b: global_response_norm(x, w, b, eps, in_act=in_act)


def reference_of(in_act="gelu", eps=EPS):
    return lambda x, w, b: reference(x, w, b, eps, in_act)


def assert_as_good(ours, stock, draw, shape, device, backend):
    draws, frozen = harness.draws(draw, device, backend), ()
    if shape[1] == 1:  # each draw has one number for the gradient of w; that of b, a sum over dy, is the same in all
        draws, frozen = draws + [draw(seed) for seed in range(len(draws), 16)], ("b",)
    harness.assert_op_as_good_as_torch(ours, stock, draws, "global_response_norm", frozen=frozen, any_order=True)


@pytest.mark.parametrize("case", CASES, ids=cases.label)
def test_output_and_gradients_are_as_good_as_torch(device, backend, case):
    harness.skip_unless_runs(backend, device, "global_response_norm", case["dtype"])
    harness.skip_copied_layouts(backend, device, case["layout"])
    harness.skip_strides_of_reference(backend, case["layout"])
    shape, in_act = cases.SHAPES[case["shape"]], case["in_act"]

    def draw(seed):
        return make(device, shape, case["layout"], case["dtype"], case["vectors"], seed)

    assert_as_good(function(in_act), reference_of(in_act), draw, shape, device, backend)


@given(
    case=cases.strided(),
    dtype=st.sampled_from(harness.DTYPES[:3]),
    in_act=st.sampled_from(_codes.INPUT_ACTIVATIONS),
    eps=st.sampled_from([1e-6, 0.1, 10.0]),
)
def test_any_shape_and_strides(device, backend, case, dtype, in_act, eps):
    def draw(seed):
        x = cases.strided_images(case, dtype, device, seed)
        return make(device, case["shape"], dtype=dtype, seed=seed) | {"x": x}

    assert_as_good(function(in_act, eps), reference_of(in_act, eps), draw, case["shape"], device, backend)


@dense_layouts
@pytest.mark.parametrize("in_act", _codes.INPUT_ACTIVATIONS)
def test_gradients_are_derivatives(device, backend, layout, in_act):
    harness.skip_unless_runs(backend, device, "global_response_norm", torch.float64)
    inputs = make(device, (2, 3, 3, 2), layout, torch.float64)
    properties.assert_gradients_are_derivatives(function(in_act), inputs)


@dense_layouts
def test_operators_agree_with_schema_and_fake(device, kernels, layout):
    x, weight, bias = make(device, layout=layout, dtype=torch.bfloat16, vectors=torch.float32).values()
    gelu = _codes.INPUT_ACTIVATIONS.index("gelu")
    properties.assert_opcheck(IMPLS[kernels].forward, x, weight, bias, EPS, gelu)
    norm = IMPLS[kernels].forward(x, weight, bias, EPS, gelu)[1]
    for need_dx in (True, False):
        args = (torch.ones_like(x), x, weight, norm, EPS, gelu, need_dx)
        properties.assert_opcheck(IMPLS[kernels].backward, *args, symbolic=need_dx)


@dense_layouts
def test_compiles_as_one_graph_and_once(device, backend, layout):
    harness.skip_all_but_channels_last(backend, device, layout)
    properties.assert_compiles(function(), make(device, layout=layout, dtype=torch.bfloat16))


def test_keeps_only_its_inputs_and_the_norms_for_backward(device, kernels):
    for layout in harness.DENSE_LAYOUTS:
        leaves = [t.requires_grad_() for t in make(device, layout=layout, dtype=torch.bfloat16).values()]
        assert harness.extra_saved_bytes(function(), *leaves) == 2 * 13 * 4


@pytest.mark.parametrize("dtype", harness.DTYPES[:2])
@pytest.mark.parametrize("layout", harness.LAYOUTS)
def test_repeats_bitwise_and_writes_every_element(device, backend, layout, dtype):
    harness.skip_all_but_dense_layouts(backend, device, layout)
    harness.skip_strides_of_reference(backend, layout)
    properties.assert_repeats_bitwise(function(), make(device, layout=layout, dtype=dtype))
    properties.assert_writes_every_element(function(), make(device, layout=layout, dtype=dtype))


@dense_layouts
def test_images_do_not_mix(device, kernels, layout):
    properties.assert_images_do_not_mix(function(), make(device, (3, 13, 17, 19), layout))


@dense_layouts
def test_threads_change_nothing(device, kernels, layout):
    properties.assert_threads_change_nothing(function(), make(device, (5, 24, 33, 31), layout))


@dense_layouts
def test_frozen_inputs_change_nothing(device, backend, layout):
    properties.assert_frozen_inputs_change_nothing(function(), make(device, layout=layout))


@pytest.mark.parametrize("layout", harness.LAYOUTS)
def test_any_incoming_gradient(device, kernels, layout):
    harness.skip_all_but_dense_layouts(kernels, device, layout)
    properties.assert_takes_any_incoming_gradient(function(), make(device, layout=layout))


def test_second_derivative_is_refused(device, kernels):
    properties.assert_second_derivative_is_refused(function(), make(device))


@dense_layouts
def test_large_images_are_summed_as_well(device, kernels, layout):
    calls = function(in_act="identity"), reference_of(in_act="identity")
    properties.assert_large_images_are_summed_as_well(*calls, make, kernels, device, layout)


@dense_layouts
@pytest.mark.parametrize("where", [(1,), (1, 2), (slice(None),)], ids=["image", "channel", "all"])
def test_the_gradient_of_a_norm_of_0_is_0(device, backend, layout, where):
    inputs = make(device, layout=layout)
    inputs["x"][where] = 0
    harness.assert_op_as_good_as_torch(function("identity"), reference_of("identity"), [inputs], "global_response_norm")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_image(device, backend, value):
    for layout in harness.DENSE_LAYOUTS:
        clean, spoilt = make(device, layout=layout), make(device, layout=layout)
        spoilt["x"][1, 2, 3, 4] = value
        ours = harness.evaluate(function("identity"), spoilt)
        stock = harness.evaluate(reference_of("identity"), spoilt)
        whole = harness.evaluate(function("identity"), clean)
        for name in ("y", "dx"):
            assert torch.equal(ours[name][0], whole[name][0]), name
            assert torch.equal(ours[name].isnan(), stock[name].isnan()), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_the_dtype_of_x(device, backend, dtype):
    inputs = make(device, dtype=dtype, vectors=torch.float32)
    with torch.autocast(device, dtype=dtype):
        assert function()(**inputs).dtype == dtype


@harness.needs_memory(16)
@dense_layouts
def test_more_than_2_to_the_31_elements(device, kernels, layout):
    properties.assert_last_image_is_as_alone(
        lambda x: global_response_norm(x, *torch.full((2, x.shape[1]), 0.7, device=device), in_act="relu"),
        kernels,
        device,
        layout,
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "global_response_norm: x must be a Tensor, got list"),
        ({"x": torch.ones(2, 3, 4)}, ValueError, r"x must have shape \[N, C, H, W\], got \[2, 3, 4\]"),
        ({"x": torch.ones(2, 3, 4, 4).int()}, TypeError, r"x must be float32, .* got torch.int32"),
        ({"weight": torch.ones(2)}, ValueError, r"weight must have shape \[C\] = \[3\], got \[2\]"),
        ({"bias": torch.ones(1, 3)}, ValueError, r"bias must have shape \[C\] = \[3\], got \[1, 3\]"),
        ({"bias": None}, ValueError, r"bias must have shape \[C\] = \[3\], got NoneType"),
        ({"weight": torch.ones(3).half()}, TypeError, r"weight must have the dtype of x .* got torch.float16"),
        ({"bias": torch.ones(3, device="meta")}, RuntimeError, "bias is on meta, but x is on cpu"),
        ({"in_act": "sigmoid"}, ValueError, "in_act must be one of identity, relu, .* got 'sigmoid'"),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    arguments = {"x": torch.ones(2, 3, 4, 4), "weight": torch.ones(3), "bias": torch.ones(3)} | changes
    with pytest.raises(error, match=message):
        global_response_norm(**arguments)


# --- layers -----------------------------------------------------------------------------------------------------------


def drawn(layer: nn.Module) -> nn.Module:
    """The layer with other vectors than zeros, of which most of the gradient is 0."""
    for i, p in enumerate(layer.parameters()):
        with torch.no_grad():
            p.copy_(harness.normal(*p.shape, seed=i) * (1 if p.dim() == 1 else p.shape[1] ** -0.5))
    return layer


def on(x: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """The images as a layer takes them."""
    return x.permute(0, 2, 3, 1) if channels_last else x


@pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
@pytest.mark.parametrize("channels_last", [True, False])
def test_the_layer_is_as_good_as_timms(device, backend, channels_last, layout, zoo):
    from timm.layers.grn import GlobalResponseNorm as Stock

    stock = drawn(Stock(13, eps=0.01, channels_last=channels_last)).to(device)
    ours = GlobalResponseNorm(13, eps=0.01, channels_last=channels_last).to(device)
    ours.load_state_dict(stock.state_dict())
    draws = [harness.images((2, 13, 7, 9), layout, device=device, seed=seed) for seed in range(4)]
    harness.assert_module_as_good_as_torch(ours, stock, [on(x, channels_last) for x in draws])
    assert ours.wb_shape == stock.wb_shape and ours.spatial_dim == stock.spatial_dim


MLPS = {
    "linear": {},
    "conv": {"use_conv": True},
    "relu": {"act_layer": nn.ReLU, "bias": (True, False)},
    "an activation that the op lacks": {"act_layer": nn.Tanh},
    "gelu by tanh": {"act_layer": lambda: nn.GELU(approximate="tanh")},
    "dropout behind": {"drop": (0.0, 0.5)},
}


@pytest.mark.parametrize("case", MLPS)
def test_the_two_layers_around_it_are_as_good_as_timms(device, backend, case, zoo):
    from timm.layers.mlp import GlobalResponseNormMlp as Stock

    options = MLPS[case]
    stock = drawn(Stock(6, 13, 5, **options)).to(device)
    ours = GlobalResponseNormMlp(6, 13, 5, **options).to(device)
    ours.load_state_dict(stock.state_dict())
    if "drop" in options:
        stock.eval(), ours.eval()
    draws = [harness.images((2, 6, 7, 9), device=device, seed=seed) for seed in range(4)]
    harness.assert_module_as_good_as_torch(ours, stock, [on(x, "use_conv" not in options) for x in draws])


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_the_activation_is_part_of_the_op_where_nothing_is_dropped_behind_it(drop, device, kernels):
    layer, x = drawn(GlobalResponseNormMlp(6, 13, drop=drop)).to(device), torch.ones(2, 7, 9, 6, device=device)
    hidden = 2 * 7 * 9 * 13 * 4
    kept = harness.extra_saved_bytes(layer, x.requires_grad_())
    # What it makes of fc1's result, and of drop1's: beside that, what the op makes of it for fc2.
    assert (kept > 3 * hidden) == (drop > 0)


def test_what_torch_fx_traces_in_evaluation_drops_in_training():
    layer = drawn(GlobalResponseNormMlp(6, 13, drop=(0.5, 0.0))).eval()
    traced, x = torch.fx.symbolic_trace(layer).train(), torch.ones(2, 7, 9, 6)
    assert not torch.equal(traced(x), layer(x))


@pytest.mark.parametrize("inner", ["act", "drop1", "grn"])
def test_hooks_on_the_inner_layers_see_their_calls(inner, device, backend):
    layer, x = drawn(GlobalResponseNormMlp(6, 13)).to(device), torch.ones(2, 7, 9, 6, device=device)
    seen, before = [], layer(x)
    getattr(layer, inner).register_forward_hook(lambda module, args, y: seen.append(y.shape))
    assert layer(x).shape == before.shape and seen == [(2, 7, 9, 13)]


@pytest.mark.parametrize("name", ["convnextv2_atto", "csatv2"])
def test_networks_with_it_are_fused_and_come_back(name, zoo):
    torch.manual_seed(0)
    model = zoo.timm.create_model(name, num_classes=10)
    stock, names = copy.deepcopy(model), list(model.state_dict())
    norms = [n for n, m in stock.named_modules() if type(m).__name__ == "GlobalResponseNorm"]
    fused = {c.name for c in fusedtrain.fuse(model).swapped}
    assert norms and fused.issuperset(norms) and list(model.state_dict()) == names
    kinds = [type(m) for m in model.modules() if isinstance(m, GlobalResponseNorm)]
    assert len(kinds) == len(norms)
    fusedtrain.unfuse(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]

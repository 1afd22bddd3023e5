"""Kernel logic check: the CUDA kernels' own source, run on the CPU by tests/cuda_emu, takes the place of backend cuda.

The public ops run on it in three thread orders and, in a subprocess, under the address and undefined-behaviour
sanitizers. It shows wrong indices, missing barriers and wrong arithmetic; it is no run on a GPU.
"""

import ctypes
import functools
import os
import subprocess
import sys
from pathlib import Path

import cases
import compiler
import emulator
import harness
import properties
import pytest
import test_activation
import test_batch_norm_act as batch_norm
import test_batch_norm_act_se as gated
import test_channel_pool
import test_channel_scale
import test_depthwise_bn_act_se as block
import test_depthwise_conv2d as depthwise
import test_global_response_norm
import test_grad_norm
import test_optimizer_step
import test_squeeze_excite
import torch

import fusedtrain
from fusedtrain import backend as fusedtrain_backend
from fusedtrain import ops

if emulator.WHY_NOT:
    pytest.skip(emulator.WHY_NOT, allow_module_level=True)

ORDERS = ("fwd", "rev", "1")
OPS = {
    "channel_pool": test_channel_pool,
    "channel_scale": test_channel_scale,
    "global_response_norm": test_global_response_norm,
    "squeeze_excite": test_squeeze_excite,
}
# How each of them pools, where it does.
POOLS = {op: ({"pool": "avg"}, {"pool": "avg_max"}) for op in ("channel_pool", "squeeze_excite")}
POOLS |= {op: ({},) for op in ("channel_scale", "global_response_norm")}
# [N, C, H, W] beyond cases.SHAPES, by what the CUDA kernels do with them.
SHAPES = {
    "whole_block_per_plane": (1, 2, 40, 40),
    "many_chunks": (1, 4, 33, 34),
    "two_tiles_of_channels": (2, 160, 3, 3),
    "groups_of_planes": (3, 16, 7, 7),
}
GATE_SHAPES = {"block_per_tile_of_outputs": (9, 600, 1, 2), "inputs_in_pieces": (1, 2052, 1, 2)}


@pytest.fixture(autouse=True, scope="module")
def emulated_cuda():
    """The emulator as backend cuda of every op, forced."""
    patch = pytest.MonkeyPatch()
    for op, impl in emulator.IMPLS.items():
        patch.setitem(fusedtrain_backend._OPS[op], "cuda", impl)
    with fusedtrain.use_backend("cuda"):
        yield
    patch.undo()


def compare(function, reference, draws: list[dict], what: str, monkeypatch, frozen=()) -> None:
    """As good as torch in the first thread order, and the same bits in the others. The sanitizers judge for themselves
    what one run does."""
    monkeypatch.setenv("CUDA_EMU_ORDER", ORDERS[0])
    if emulator.SANITIZED:
        harness.evaluate(function, draws[0], frozen=frozen)
        return
    results = harness.assert_op_as_good_as_torch(function, reference, draws, what, frozen=frozen)
    for order in ORDERS[1:]:
        monkeypatch.setenv("CUDA_EMU_ORDER", order)
        again = harness.evaluate(function, draws[-1], frozen=frozen)
        harness.assert_bitwise_equal(again, results, f"{what}, thread order {order}")


def check(op: str, shape: tuple, form: dict, options: dict, monkeypatch) -> None:
    function, reference = OPS[op].function(**options), OPS[op].reference_of(**options)
    draws = harness.draws(lambda seed: OPS[op].make("cpu", shape, **form, seed=seed), "cpu", "cuda")
    compare(function, reference, draws, f"{op} {options}", monkeypatch)


def check_depthwise(shape: tuple, geometry: str, form: dict, monkeypatch) -> None:
    inputs = depthwise.make("cpu", shape, kernel=depthwise.GEOMETRIES[geometry][0], **form)
    compare(depthwise.function(geometry), depthwise.reference_of(geometry), [inputs], geometry, monkeypatch)


def check_batch_norm(shape: tuple, form: dict, options: dict, monkeypatch) -> None:
    draws = harness.draws(lambda seed: batch_norm.make("cpu", shape, **form, seed=seed), "cpu", "cuda")
    calls = (make(draws[0], **options) for make in (batch_norm.function, batch_norm.reference_of))
    compare(*calls, draws, f"batch_norm_act {form} {options}", monkeypatch)


def check_block(shape: tuple, form: dict, training: bool, options: tuple, monkeypatch) -> None:
    draws = [block.make("cpu", shape, **form, seed=seed) for seed in range(4 if shape[1] > 1 else 32)]
    arguments = draws[0], training, form["form"], options, True
    calls = block.function(*arguments), block.reference_of(*arguments)
    frozen = ("bias",) if training else ()  # its gradient is zero but for rounding
    compare(*calls, draws, f"depthwise_bn_act_se {form}", monkeypatch, frozen)


OPTIONS = ("act", "gate", "pool", "in_act")
CASES = [(op, case) for op, module in OPS.items() for case in module.CASES]


@pytest.mark.parametrize("op, case", CASES, ids=lambda value: value if isinstance(value, str) else cases.label(value))
def test_kernels_are_as_good_as_torch_in_every_thread_order(op, case, monkeypatch):
    options = {name: case[name] for name in OPTIONS if name in case}
    form = {name: value for name, value in case.items() if name not in (*OPTIONS, "shape")}
    check(op, cases.SHAPES[case["shape"]], form, options, monkeypatch)


@pytest.mark.parametrize("dtype", harness.DTYPES)
@pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", OPS)
def test_every_path_through_the_kernels(op, shape, layout, dtype, monkeypatch):
    options = {"in_act": "silu" if op == "channel_scale" else "hard_swish", **POOLS[op][-1]}
    check(op, SHAPES[shape], {"layout": layout, "dtype": dtype}, options, monkeypatch)


@pytest.mark.parametrize("dtype", harness.DTYPES)
@pytest.mark.parametrize("shape", GATE_SHAPES)
def test_every_path_through_the_gate_network(shape, dtype, monkeypatch):
    check("squeeze_excite", GATE_SHAPES[shape], {"layout": "contiguous", "dtype": dtype}, {}, monkeypatch)


# By what the kernels do with them: packs of channels; single elements, images narrower than a run; kernels that share a
# channel.
DEPTHWISE = {
    "packs": ((2, 16, 9, 10), {"multiplier": 1}),
    "singles": ((3, 5, 6, 7), {"multiplier": 1, "bias": False}),
    "multiplier": ((2, 8, 8, 9), {"multiplier": 2}),
}


@pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
@pytest.mark.parametrize("form", DEPTHWISE)
@pytest.mark.parametrize("geometry", [g for g in depthwise.GEOMETRIES if not (emulator.SANITIZED and g == "31x31")])
def test_every_depthwise_geometry(geometry, form, layout, monkeypatch):
    shape, options = DEPTHWISE[form]
    if not depthwise.fits(shape, depthwise.GEOMETRIES[geometry]):
        pytest.skip("the kernel is larger than the padded image")
    dtype = harness.DTYPES[list(depthwise.GEOMETRIES).index(geometry) % len(harness.DTYPES)]
    check_depthwise(shape, geometry, {"layout": layout, "dtype": dtype, **options}, monkeypatch)


@pytest.mark.parametrize("channels", [13, 16])  # with 13 images begin amid 16 bytes
@pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
def test_depthwise_bits_depend_on_nothing_else(layout, channels):
    inputs = depthwise.make("cpu", (3, channels, 17, 19), layout)
    properties.assert_images_do_not_mix(depthwise.function("3x3"), inputs, ("x",))
    properties.assert_frozen_inputs_change_nothing(depthwise.function(), inputs)


@pytest.mark.parametrize("case", batch_norm.CASES, ids=cases.label)
def test_batch_norm_act_is_as_good_as_torch_in_every_thread_order(case, monkeypatch):
    shape = cases.SHAPES[case["shape"]]
    options = {name: case[name] for name in ("training", "act", "residual")} | {"running": True}
    options["training"] &= shape != (1, 1, 1, 1)
    form = {name: case[name] for name in ("layout", "dtype", "residual", "vectors")}
    check_batch_norm(shape, form, options, monkeypatch)


@pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_path_through_the_kernels_of_batch_norm_act(shape, layout, monkeypatch):
    residuals = zip(harness.DTYPES, (*batch_norm.RESIDUALS, "none"))
    for dtype, residual in residuals:
        form = {"layout": layout, "dtype": dtype, "residual": residual}
        check_batch_norm(SHAPES[shape], form, {"residual": residual}, monkeypatch)


@pytest.mark.parametrize("case", batch_norm.FIXED, ids=cases.label)
def test_fixed_norms_are_as_good_as_torch_in_every_thread_order(case, monkeypatch):
    draws = harness.draws(lambda seed: batch_norm.make_fixed("cpu", case, seed), "cpu", "cuda")
    calls = (
        of(draws[0], False, case["act"], case["residual"]) for of in (batch_norm.function, batch_norm.reference_of)
    )
    compare(*calls, draws, f"fixed {case}", monkeypatch, ("weight", "bias"))


@pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
def test_a_large_mean_hides_no_variance(layout):
    batch_norm.test_a_large_mean_hides_no_variance("cpu", "cuda", layout, torch.float32)
    block.test_a_large_mean_hides_no_variance("cpu", "cuda", layout, torch.float32)


@pytest.mark.parametrize("case", block.CASES[::10], ids=cases.label)
def test_depthwise_bn_act_se_is_as_good_as_torch_in_every_thread_order(case, monkeypatch):
    shape, options = cases.SHAPES[case["shape"]], tuple(case[name] for name in ("act", "se_act", "gate"))
    training = case["training"] and shape[:1] + shape[2:] != (1, 1, 1)
    check_block(shape, {name: case[name] for name in ("layout", "dtype", "form")}, training, options, monkeypatch)


@pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_path_through_the_kernels_of_depthwise_bn_act_se(shape, layout, monkeypatch):
    for dtype, name in zip(harness.DTYPES, ("strided", "plain", "bare")):
        form = {"layout": layout, "dtype": dtype, "form": name}
        check_block(SHAPES[shape], form, True, block.OPTIONS, monkeypatch)


@pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
@pytest.mark.parametrize("images", [140, 270])  # up to 128, 256 and more parts: blocks of other sizes add them up
def test_statistics_of_many_parts(images, layout, monkeypatch):
    form = {"layout": layout, "dtype": torch.bfloat16, "form": "no gate"}
    check_block((images, 8, 3, 4), form, True, block.OPTIONS, monkeypatch)


@pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_residual_behind_the_gate(shape, layout, monkeypatch):
    for dtype, act, relu in zip(harness.DTYPES, ("identity", "identity", "silu", "relu"), (True, False, True, True)):
        draws = [gated.make("cpu", SHAPES[shape], layout, dtype, residual=True, seed=seed) for seed in range(4)]
        calls = (
            gated.function(draws[0], True, (act, "relu", "sigmoid", relu), of=of) for of in (gated.ours, gated.stock)
        )
        compare(*calls, draws, f"batch_norm_act_se {dtype} {act}", monkeypatch)


@pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
def test_depthwise_sums_of_several_chunks_blocks_and_tiles(layout, monkeypatch):
    for shape, dtype in (((6, 8, 33, 70), torch.bfloat16), ((1, 264, 5, 6), torch.float32)):
        check_depthwise(shape, "3x3", {"layout": layout, "dtype": dtype}, monkeypatch)


def test_means_far_below_the_deviation_are_as_good_as_torchs():
    """All means judged together, by the root of the mean square: sums about a shift grow with its distance."""
    draws = [harness.images((3, 13, 7, 9), seed=seed) for seed in range(20)]
    truth = torch.stack([x.double().mean((0, 2, 3)) for x in draws])
    ours = torch.stack([emulator.batch_norm_act_stats(x)[0] for x in draws]) - truth
    stock = torch.stack([x.mean((0, 2, 3)) for x in draws]) - truth
    assert ours.norm() <= 2 * stock.norm()


@pytest.mark.parametrize(
    ("shape", "dtype", "geometry"),
    [
        ((1, 136, 20, 37), torch.bfloat16, "3x3"),  # slices of 48 channels, the last of 40; parts of patches
        ((1, 72, 21, 18), torch.float32, "5x5_stride2"),
        ((2, 8, 18, 17), torch.float16, "7x7"),
        ((90, 8, 61, 64), torch.float16, "3x3_stride2"),  # a block takes several tiles for dw
    ],
    ids=str,
)
def test_depthwise_patches_of_several_slices_and_tiles(shape, dtype, geometry, monkeypatch):
    check_depthwise(shape, geometry, {"layout": "channels_last", "dtype": dtype}, monkeypatch)


# Of contiguous images. By what the kernels do with them: bands of rows; two rounds of patches, and rows of an odd
# length; more patches in a row than threads; images smaller than their kernels; several planes of a block, the last of
# them fewer, that begin anywhere.
PLANES = {
    "bands": (1, 3, 75, 150),
    "rounds": (2, 3, 61, 99),
    "wide": (1, 2, 10, 510),
    "too_wide": (1, 1, 4, 516),
    "small": (5, 7, 2, 3),
    "planes": (9, 121, 7, 7),
    "many_planes": (16, 210, 3, 5),
}


PLANE_GEOMETRIES = {name: depthwise.GEOMETRIES[name] for name in ("3x3", "3x3_stride2", "5x5", "5x5_stride2", "7x7")}
PLANE_GEOMETRIES |= {  # more padding on one side than on the other
    "3x3_aside": ((3, 3), (1, 1), (2, 0, 0, 2), (1, 1)),
    "3x3_tf_same": depthwise.GEOMETRIES["3x3_tf_same"],
    "3x3_stride2_aside": ((3, 3), (2, 2), (1, 1, 0, 2), (1, 1)),
    "5x5_stride2_aside": ((5, 5), (2, 2), (2, 1, 3, 0), (1, 1)),
    "5x5_stride2_tf_same": ((5, 5), (2, 2), (1, 2, 1, 2), (1, 1)),
    "7x7_aside": ((7, 7), (1, 1), (6, 1, 0, 5), (1, 1)),
}


@pytest.mark.parametrize("shape", PLANES)
@pytest.mark.parametrize("geometry", PLANE_GEOMETRIES)
def test_depthwise_planes_of_several_bands_and_groups(geometry, shape, monkeypatch):
    dtypes = [torch.bfloat16, torch.float32, torch.float16]
    dtype = dtypes[(list(PLANES).index(shape) + list(PLANE_GEOMETRIES).index(geometry)) % len(dtypes)]
    geometry = PLANE_GEOMETRIES[geometry]
    inputs = depthwise.make("cpu", PLANES[shape], "contiguous", dtype, geometry[0])
    compare(depthwise.function(geometry), depthwise.reference_of(geometry), [inputs], str(geometry), monkeypatch)


def test_depthwise_planes_of_a_block_in_two_rounds(monkeypatch):
    check_depthwise((17, 95, 2, 260), "3x3", {"layout": "contiguous", "dtype": torch.bfloat16}, monkeypatch)


@pytest.mark.parametrize("shape", ["bands", "rounds", "many_planes"])
def test_depthwise_planes_with_their_statistics(shape, monkeypatch):
    for dtype, name in zip((torch.bfloat16, torch.float16), ("strided", "plain")):
        form = {"layout": "contiguous", "dtype": dtype, "form": name}
        check_block(PLANES[shape], form, True, block.OPTIONS, monkeypatch)


@pytest.mark.parametrize("act", depthwise._codes.INPUT_ACTIVATIONS)
def test_depthwise_activation_of_inference(act):
    inputs = depthwise.make("cpu", (2, 16, 7, 9), "channels_last")
    for geometry in ("3x3", "5x5_stride2"):
        inputs |= {"w": depthwise.make("cpu", (2, 16, 7, 9), kernel=depthwise.GEOMETRIES[geometry][0])["w"]}
        function, reference = depthwise.function(geometry, act), depthwise.reference_of(geometry, act)
        harness.assert_op_as_good_as_torch(function, reference, inputs, act, frozen=list(inputs))


@pytest.mark.parametrize("dtype", harness.DTYPES)
def test_activations_are_as_good_as_torch_at_their_ends(dtype):
    for function, act in test_activation.FUNCTIONS:
        test_activation.check_ends(function, act, dtype, "cpu")
    if dtype != torch.float64:
        test_activation.check_gelu_tail(dtype, "cpu")


@pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_images_do_not_mix(op, layout):
    per_image = ("x", "gate") if op == "channel_scale" else ("x",)
    for pool in POOLS[op]:
        for dtype in (torch.float32, torch.bfloat16):
            inputs = OPS[op].make("cpu", (3, 13, 17, 19), layout, dtype)
            properties.assert_images_do_not_mix(OPS[op].function(**pool), inputs, per_image)


@pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
def test_large_images_are_summed_as_well(layout):
    for module in (test_channel_pool, test_channel_scale):
        module.test_large_images_are_summed_as_well("cpu", "cuda", layout)


@pytest.mark.parametrize("act", batch_norm.FLAT)
def test_flat_parts_pass_no_infinity_on(act):
    for layout in harness.DENSE_LAYOUTS:
        batch_norm.test_flat_parts_pass_no_infinity_on("cpu", "cuda", layout, act)
        if act != "hard_sigmoid":
            block.test_flat_parts_pass_no_infinity_on("cpu", "cuda", layout, act)
    if act != "hard_sigmoid":
        test_channel_scale.test_flat_parts_pass_no_infinity_on("cpu", "cuda", act)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("op", [op for op in OPS if op != "global_response_norm"])
def test_nan_and_infinity_stay_in_place(op, value):
    image, plane = (1,), (1, 2)
    region = (*plane, 3, 4) if op == "channel_scale" else plane if op == "channel_pool" else image
    for layout in harness.DENSE_LAYOUTS:
        for in_act in test_channel_scale._codes.INPUT_ACTIVATIONS:
            for pool in POOLS[op]:
                options = {"in_act": in_act, **pool}
                functions = OPS[op].function(**options), OPS[op].reference_of(**options)
                inputs = OPS[op].make("cpu", layout=layout)
                properties.assert_not_finite_stays_in_place(*functions, inputs, value, (1, 2, 3, 4), region)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite_norms_stay_in_their_image(value):
    test_global_response_norm.test_what_is_not_finite_stays_in_its_image("cpu", "cuda", value)


@pytest.mark.parametrize("layout", harness.DENSE_LAYOUTS)
@pytest.mark.parametrize("where", [(1,), (1, 2), (slice(None),)], ids=["image", "channel", "all"])
def test_the_gradient_of_a_norm_of_0_is_0(layout, where):
    test_global_response_norm.test_the_gradient_of_a_norm_of_0_is_0("cpu", "cuda", layout, where)


@pytest.mark.parametrize("act", test_channel_scale._codes.INPUT_ACTIVATIONS)
def test_a_maximum_is_found_again_where_its_gradient_is_not_aligned(act):
    """By its bits, which for 16-bit elements are others where a kernel knows the activation at run time."""
    x = test_channel_pool.make("cpu", (2, 16, 5, 7), "channels_last", torch.float16)["x"]
    dpooled = torch.randn(2, 16)
    shifted = torch.empty(dpooled.numel() + 1)[1:].view_as(dpooled).copy_(dpooled)
    codes = test_channel_scale._codes.POOLS.index("avg_max"), test_channel_scale._codes.ACTIVATIONS.index(act)
    _, peak, ties = emulator.channel_pool(x, *codes)
    results = [{"dx": emulator.channel_pool_backward(dy, x, peak, ties, *codes)} for dy in (dpooled, shifted)]
    harness.assert_bitwise_equal(*results, f"{act}, a gradient that is not aligned")


@pytest.mark.parametrize("rule", test_optimizer_step._codes.RULES)
def test_optimizer_of_every_rule_and_dtype(rule, monkeypatch):
    shapes = test_optimizer_step.SHAPES
    lists = test_optimizer_step.mixed(rule, "cpu", shapes, (harness.DTYPES * len(shapes))[: len(shapes)], with_ema=True)
    results = []
    for order in ORDERS[:1] if emulator.SANITIZED else ORDERS:
        monkeypatch.setenv("CUDA_EMU_ORDER", order)
        results.append(test_optimizer_step.run(ops.optimizer_step_, rule, lists, test_optimizer_step.EVERYTHING))
        harness.assert_bitwise_equal(results[-1], results[0], f"{rule}, thread order {order}")
    test_optimizer_step.assert_as_good_as_reference(rule, lists, test_optimizer_step.EVERYTHING)
    for dtype in (torch.float32, torch.float16) if not emulator.SANITIZED else ():
        for options in ("plain", "l2"):
            test_optimizer_step.test_as_good_as_plain_torch("cpu", "cuda", rule, options, dtype)
    for change in ({"found_inf": 1.0}, {"norm": float("nan"), "skip_nonfinite": True}):
        test_optimizer_step.test_skipped_steps_only_zero_the_gradients("cpu", "cuda", rule, change)
    test_optimizer_step.test_the_learning_rate_may_stand_on_the_device("cpu", "cuda", rule)
    if rule in test_optimizer_step.SUMMED:
        test_optimizer_step.test_parts_of_parameters_step_as_the_whole("cpu", "cuda", rule)


@pytest.mark.parametrize("name", test_optimizer_step.FORMATS)
def test_optimizer_of_every_format(name, monkeypatch):
    test_optimizer_step.test_every_backend_stores_the_same_bits("cpu", "cuda", name)
    formats, rules = list(test_optimizer_step.FORMATS), test_optimizer_step._codes.RULES
    for rule in ("lamb", "adan_cautious", *rules[formats.index(name) :: len(formats)]):
        lists, options = test_optimizer_step.make_narrow(rule, "cpu", name)
        results = []
        for order in ORDERS[:1] if emulator.SANITIZED else ORDERS:
            monkeypatch.setenv("CUDA_EMU_ORDER", order)
            results.append(test_optimizer_step.run_narrow(rule, lists, options))
            harness.assert_bitwise_equal(results[-1], results[0], f"{rule} {name}, thread order {order}")
        if not emulator.SANITIZED:
            test_optimizer_step.test_numbers_in_fewer_bits_are_as_good_as_plain_torch("cpu", "cuda", rule, name)


@pytest.mark.parametrize("rule", ["adam", "lamb", "novograd_amsgrad"])
def test_optimizer_lists_of_several_launches(rule):
    """And neighbours that share a count of steps, on both sides of where the list is cut."""
    shapes = [(3,), (0,), (8200,)] * 30
    lists = test_optimizer_step.make(rule, "cpu", shapes)
    whole = test_optimizer_step.run(ops.optimizer_step_, rule, lists, test_optimizer_step.PLAIN)
    for i in (0, 2, 45, 89):
        alone = {name: tensors[i :: len(shapes)] for name, tensors in lists.items()}
        alone = test_optimizer_step.run(ops.optimizer_step_, rule, alone, test_optimizer_step.PLAIN)
        assert torch.equal(whole[f"params[{i}]"], alone["params[0]"])
    params, grads, states, steps, _ = lists.values()
    steps = [steps[i // 60] for i in range(len(shapes))]
    coefficients = test_optimizer_step.COEFFICIENTS[rule]
    ops.optimizer_step_(params, grads, states, steps, rule=rule, coefficients=coefficients, **test_optimizer_step.PLAIN)
    assert all(step == 8.0 for step in steps)
    assert all(torch.equal(p, whole[f"params[{i}]"]) for i, p in enumerate(params))


def test_optimizer_tensors_that_no_vector_fits():
    aligned = test_optimizer_step.make("adam", "cpu", [(8195,)], with_ema=True)
    for name in ("params", "grads", "states", "ema"):
        shifted = {key: list(tensors) for key, tensors in aligned.items()}
        shifted[name][0] = torch.cat([torch.ones(1), shifted[name][0]])[1:]
        results = []
        for lists in (aligned, shifted):
            arguments = {"rule": "adam", "lr": 0.1, "coefficients": (0.9, 0.999, 1e-8), "ema_decay": 0.9}
            copies = {key: [t if t.data_ptr() % 16 else t.clone() for t in own] for key, own in lists.items()}
            ops.optimizer_step_(*copies.values(), **arguments)
            results.append(test_optimizer_step.by_name(copies))
        harness.assert_bitwise_equal(*results, f"{name} not aligned")


@pytest.mark.parametrize("dtype", harness.DTYPES)
def test_optimizer_norms_of_gradients(dtype):
    for shapes in [(0,)], [(8193,), (3, 5, 7), (300, 500)], [(17,)] * 300:
        test_grad_norm.assert_as_good_as_torch(test_grad_norm.make("cpu", shapes, [dtype] * len(shapes)))


@pytest.mark.skipif(emulator.SANITIZED, reason="already under the sanitizers")
def test_kernels_under_sanitizers():
    env = sanitizer_environment()
    paths = "every_path or several_chunks or images_do_not_mix or optimizer or (depthwise_geometry and not multiplier)"
    paths += " or depthwise_planes"
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-x", "-p", "no:cacheprovider", "-k", paths, __file__]
    result = subprocess.run(command, cwd=emulator.TESTS, env=env, capture_output=True, text=True)
    assert result.returncode == 0, (result.stdout + result.stderr)[-5000:]


def sanitizer_environment() -> dict[str, str]:
    return harness.environment(
        FUSEDTRAIN_TEST_SANITIZED="1",
        LD_PRELOAD=compiler.sanitizer_runtime(emulator.CXX),
        ASAN_OPTIONS="detect_leaks=0:fast_unwind_on_fatal=1",
        OMP_NUM_THREADS="1",
    )


# --- the emulator itself ----------------------------------------------------------------------------------------------


@functools.cache
def faults() -> ctypes.CDLL:
    return emulator.build([emulator.TESTS / "cuda_emu/faults.cu"])


def run_fault(kernel: str) -> torch.Tensor:
    x, y = torch.arange(64.0), torch.full((64,), torch.nan)
    code = getattr(faults(), f"run_{kernel}")(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()))
    assert code == 0
    return y


@pytest.mark.parametrize("order", ORDERS)
def test_emulator_runs_a_right_kernel(order, monkeypatch):
    monkeypatch.setenv("CUDA_EMU_ORDER", order)
    assert torch.equal(run_fault("right"), torch.arange(63.0, -1.0, -1.0))


def test_emulator_shows_a_missing_barrier(monkeypatch):
    results = []
    for order in ("fwd", "rev"):
        monkeypatch.setenv("CUDA_EMU_ORDER", order)
        results.append(run_fault("missing_barrier"))
        assert results[-1].isnan().any()  # what nobody has written yet
    assert not torch.equal(results[0].isnan(), results[1].isnan())


FAULTS = {
    "divergent_barrier": "divergent barrier",
    "shuffle_from_nobody": "shuffle from lane 20",
    "lane_outside_mask": "not in its mask",
    "barrier_inside_warp_operation": "deadlock",
    "shared_out_of_bounds": "heap-buffer-overflow",
    "index_out_of_bounds": "Illegal instruction",
    "misaligned": "Illegal instruction",
}


RUN_FAULT = """
import ctypes, sys
path, kernel = sys.argv[1:]
x, y = (ctypes.c_float * 64)(), (ctypes.c_float * 64)()
getattr(ctypes.CDLL(path), f"run_{kernel}")(x, y)
"""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """Returns the library of faulty kernels, with or without sanitizers, as a path."""
    folder = tmp_path_factory.mktemp("faults")

    @functools.cache
    def path(sanitized: bool) -> Path:
        path = folder / f"faults{sanitized}.so"
        emulator.compile([emulator.TESTS / "cuda_emu/faults.cu"], path, sanitized)
        return path

    return path


@pytest.mark.skipif(emulator.SANITIZED, reason="starts a process under the sanitizers itself")
@pytest.mark.parametrize("fault", FAULTS)
def test_emulator_ends_a_faulty_kernel(fault, faulty):
    sanitized = fault in ("shared_out_of_bounds", "index_out_of_bounds", "misaligned")
    env = sanitizer_environment() if sanitized else dict(os.environ)
    command = [sys.executable, "-X", "faulthandler", "-c", RUN_FAULT, str(faulty(sanitized)), fault]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode != 0 and FAULTS[fault] in result.stderr, result.stderr[-2000:]


@pytest.mark.parametrize("launch", [(0, 64, 0), (1, 0, 0), (1, 1025, 0), (0x80000000, 64, 0), (1, 64, 65537)], ids=str)
def test_emulator_refuses_a_launch_that_no_gpu_takes(launch):
    blocks, threads, shared_bytes = launch
    assert faults().launch_right(blocks, threads, ctypes.c_uint64(shared_bytes)) != 0

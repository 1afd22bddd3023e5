"""What is true of every op, whatever it computes: one assertion each, called by the test files of the ops.

``function`` takes the values of ``inputs`` in order, as in harness.py.
"""

import functools
from collections.abc import Callable

import harness
import pytest
import torch
import torch._dynamo.testing
from torch.utils._pytree import tree_leaves

from fusedtrain.backend import current_backend


def assert_returned_by_one_name(graphs: list[torch.fx.GraphModule]) -> None:
    """No autograd Function returns what a call without effect, such as ``contiguous()``, made of a tensor of its own:
    compiled by torch 2.11 it has no gradient."""
    bodies = [(graph, name) for graph in graphs for name, _ in graph.named_children() if name.startswith("fwd_")]
    for graph, name in bodies:
        forward, backward = (graph.get_submodule(body).graph for body in (name, name.replace("fwd", "bwd")))
        made = [id(node.meta.get("example_value")) for node in forward.nodes if node.op.startswith("call")]
        returned = tree_leaves(forward.output_node().args[0][0])
        for node, gradient in zip(returned, backward.find_nodes(op="placeholder")):
            between = gradient.name.startswith("unused")  # torch 2.11 returns what the Function does not, too
            assert between or made.count(id(node.meta["example_value"])) <= 1, f"{node} has another name"


def assert_compiles(function: Callable, inputs: dict, compiler: str = "aot_eager") -> None:
    """``torch.compile(fullgraph=True)`` gives the same bits both ways, and a second call compiles nothing."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(compiler)
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    eager = harness.evaluate(function, inputs)
    harness.assert_bitwise_equal(harness.evaluate(compiled, inputs), eager, "compiled")
    assert_returned_by_one_name(counter.graphs)
    with torch.compiler.set_stance("fail_on_recompile"):
        harness.assert_bitwise_equal(harness.evaluate(compiled, inputs), eager, "compiled, second call")
        with torch.no_grad():
            leaves = [t.detach() if isinstance(t, torch.Tensor) else t for t in inputs.values()]
    with torch.no_grad():
        assert torch.equal(compiled(*leaves), eager["y"])


def assert_repeats_bitwise(function: Callable, inputs: dict) -> None:
    """Two runs give the same bits."""
    first = harness.evaluate(function, inputs)
    harness.assert_bitwise_equal(harness.evaluate(function, inputs), first, "second run")


def assert_reads_what_hooks_store(function: Callable, inputs: dict) -> None:
    """What a hook keeps for backward in fewer bits is taken for the numbers that it holds. x has 4 samples."""
    if current_backend() == "triton":
        pytest.skip("Triton refuses numbers of two dtypes")
    results = []
    for give in (lambda t: t, lambda t: t.float() if _is_small(t) else t):
        keep = lambda t: t.bfloat16() if _is_small(t) else t  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(keep, give):
            results.append(harness.evaluate(function, inputs))
    harness.assert_bitwise_equal(*results, "numbers in fewer bits")
    assert not torch.equal(results[0]["dx"], harness.evaluate(function, inputs)["dx"])


def assert_takes_what_hooks_lay_out_anew(function: Callable, reference: Callable, inputs: dict) -> None:
    """What a hook stores as contiguous, as in a file, is taken for the images that it was. Those of ``inputs`` are
    channels_last."""

    def stored(operation):
        def call(*tensors):
            with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda t: t):
                return operation(*tensors)

        return call

    harness.assert_op_as_good_as_torch(
        stored(function), reference, inputs, "contiguous in between", stock=stored(reference)
    )


def _is_small(t: torch.Tensor) -> bool:
    return t.dim() == 2 and len(t) == 4


def assert_threads_change_nothing(function: Callable, inputs: dict) -> None:
    """The bits do not depend on the number of threads."""
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(harness.evaluate(function, inputs))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        harness.assert_bitwise_equal(result, results[0], "with more threads")


def assert_writes_every_element(function: Callable, inputs: dict) -> None:
    """No element of a result, or of a tensor it is computed from, is left as the allocator gave it."""
    clean = harness.evaluate(function, inputs)
    assert all(value.isfinite().all() for value in clean.values()), "the inputs of this test must give finite results"
    with harness.poisoned_memory():
        poisoned = harness.evaluate(function, inputs)
    harness.assert_bitwise_equal(poisoned, clean, "with NaN in fresh memory")


def assert_frozen_inputs_change_nothing(function: Callable, inputs: dict) -> None:
    """Whichever inputs want a gradient, output and gradients hold the same bits; with none there is no graph.

    Triton compiles a kernel anew for each set of outputs, and may contract other products and sums: that is a few units
    in the last place.
    """
    full = harness.evaluate(function, inputs)
    contracted = full["y"].is_cuda and current_backend() == "triton"
    assert_equal = _assert_equal_but_for_rounding if contracted else harness.assert_bitwise_equal
    differentiable = [name for name, t in inputs.items() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    for name in differentiable:
        others = [other for other in differentiable if other != name]
        for frozen in ([name], others):
            result = harness.evaluate(function, inputs, frozen=frozen)
            assert result.keys() == full.keys() - {f"d{other}" for other in frozen}
            assert_equal(result, {key: full[key] for key in result}, f"{frozen} frozen")
        result = harness.evaluate(function, inputs, asked=[name])
        assert_equal(result, {"y": full["y"], f"d{name}": full[f"d{name}"]}, f"asked for d{name} alone")
    result = harness.evaluate(function, inputs, frozen=differentiable)
    assert_equal(result, {"y": full["y"]}, "all frozen")
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            y = function(*inputs.values())
        assert not y.requires_grad, context.__name__
        assert_equal({"y": y}, {"y": full["y"]}, context.__name__)


def _assert_equal_but_for_rounding(a: dict, b: dict, what: str) -> None:
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, f"{what} {name}"
        bound = 4 * torch.finfo(b[name].dtype).eps * b[name].abs().max()
        assert (a[name] - b[name]).abs().max() <= bound, f"{what}: {name} differs between runs"


def assert_takes_any_incoming_gradient(function: Callable, inputs: dict) -> None:
    """Expanded (as from ``y.sum()``), channels_last, transposed and sliced dy give the bits of a dense one."""
    y = harness.evaluate(function, inputs)["y"]
    dense = harness.evaluate(function, inputs, dy=torch.ones_like(y))
    expanded = torch.ones((), dtype=y.dtype, device=y.device).expand_as(y)
    harness.assert_bitwise_equal(harness.evaluate(function, inputs, dy=expanded), dense, "expanded dy")
    normal = harness.normal(*y.shape, dtype=y.dtype, device=y.device)
    dense = harness.evaluate(function, inputs, dy=torch.empty_like(y).copy_(normal))
    padded = torch.nn.functional.pad(normal, (1, 2))[..., 1:-2]
    variants = {"sliced": padded, "transposed": normal.mT.contiguous().mT}
    if y.dim() == 4:
        variants["channels_last"] = normal.contiguous(memory_format=torch.channels_last)
        variants["contiguous"] = normal.contiguous()
    for name, dy in variants.items():
        harness.assert_bitwise_equal(harness.evaluate(function, inputs, dy=dy), dense, f"{name} dy")


def assert_second_derivative_is_refused(function: Callable, inputs: dict) -> None:
    """A double backward raises instead of returning something wrong."""
    leaves = [t.detach().requires_grad_() if isinstance(t, torch.Tensor) else t for t in inputs.values()]
    wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    y = function(*leaves)
    losses = [y.square().sum()] if len(wanted) == 1 else [y.square().sum(), y.sum()]  # the latter's gradient: ones
    for loss in losses:
        gradients = torch.autograd.grad(loss, wanted, create_graph=True)
        for derive in (torch.Tensor.backward, lambda penalty: torch.autograd.grad(penalty, wanted)):
            with pytest.raises(RuntimeError, match=r"no second derivative; .*use_backend\('reference'\)"):
                derive(gradients[0].square().sum())


def assert_gradients_are_derivatives(function: Callable, inputs: dict) -> None:
    """``torch.autograd.gradcheck`` in float64."""
    leaves = [t.detach().double().requires_grad_() if isinstance(t, torch.Tensor) else t for t in inputs.values()]
    assert torch.autograd.gradcheck(function, leaves)


def assert_opcheck(operator, *args, symbolic: bool = True) -> None:
    """``torch.library.opcheck``: the schema, the fake and the implementation agree on these arguments.

    ``symbolic``: with sizes that are symbols, too, which takes most of the time; further options of an operator need
    not be.
    """
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    checks += ("test_aot_dispatch_dynamic",) if symbolic else ()
    results = torch.library.opcheck(operator, args, test_utils=checks)
    assert set(results.values()) == {"SUCCESS"}, results


def assert_large_images_are_summed_as_well(
    function: Callable, reference: Callable, make: Callable, backend: str, device: str, layout: str
) -> None:
    """As good as torch on images whose sums have thousands of parts, which a gradient of one sign lets grow;
    ``make(device, shape, layout, seed=)`` as in the ops' tests."""
    if harness.interpreted(backend, device):
        pytest.skip("too much for Triton's interpreter")
    draws = [make(device, (1, 4, 768, 768), layout, seed=seed) for seed in range(2)]
    with torch.no_grad():
        y = function(*draws[0].values())
    dy = harness.normal(*y.shape, dtype=y.dtype, device=y.device).abs()
    harness.assert_op_as_good_as_torch(function, reference, draws, "large images", dy=dy)


def many_images(backend: str, device: str, layout: str) -> torch.Tensor:
    """More than 2^31 elements in bfloat16, 4.4 GB: 129 images of zeros and one of normal numbers."""
    if harness.interpreted(backend, device):
        pytest.skip("too much for Triton's interpreter")
    shape = (130, 64, 512, 512)
    assert torch.Size(shape).numel() > 2**31
    x = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    if layout == "channels_last":
        x = x.view(shape[0], shape[2], shape[3], shape[1]).permute(0, 3, 1, 2)
    x[-1:] = harness.images((1, *shape[1:]), layout, torch.bfloat16, device)
    return x


def assert_last_image_is_as_alone(function: Callable, backend: str, device: str, layout: str) -> None:
    """Beyond 2^31 elements the last image gives the bits it gives alone; the op must treat images one by one."""
    x = many_images(backend, device, layout)
    last = x[-1:].clone()
    one = torch.ones((), dtype=x.dtype, device=device)
    alone = function(last.requires_grad_())
    (dlast,) = torch.autograd.grad(alone, last, one.to(alone.dtype).expand_as(alone))
    y = function(x.requires_grad_())
    assert torch.equal(y[-1:], alone)
    dy, edge = one.to(y.dtype).expand_as(y), torch.autograd.graph.get_gradient_edge(y)
    del y  # the gradients need its room
    (dx,) = torch.autograd.grad(edge, x, dy)
    assert torch.equal(dx[-1:], dlast)


_OFTEN = 8192  # a power of two: exact as a factor in every dtype


def _repeated(t: torch.Tensor) -> torch.Tensor:
    """The three images ``t``, the middle one _OFTEN times."""
    turned = t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if turned else torch.contiguous_format
    many = torch.empty((_OFTEN + 2, *t.shape[1:]), dtype=t.dtype, device=t.device, memory_format=layout)
    many[:1], many[1:-1], many[-1:] = t.split(1)
    return many


def _three(t: torch.Tensor, what: str) -> torch.Tensor:
    """The three images of which ``t`` was made, if all those in the middle are still the same."""
    assert torch.equal(t[1:-1], t[1:2].expand_as(t[1:-1])), f"{what}: images that are alike differ"
    return t[[0, 1, -1]]


def weighted_batch_norm(counts: torch.Tensor, z: torch.Tensor, weight, bias, eps: float) -> torch.Tensor:
    """Batch normalisation of a batch that holds image i ``counts[i]`` times; in float32 as torch's own."""
    x = z.to(torch.promote_types(z.dtype, torch.float32))
    share = (counts / (counts.sum() * x[0, 0].numel())).to(x)[:, None, None, None]
    mean = (share * x).sum((0, 2, 3), keepdim=True)
    rstd = ((share * (x - mean).square()).sum((0, 2, 3), keepdim=True) + eps).rsqrt()
    return ((x - mean) * rstd * weight[:, None, None] + bias[:, None, None]).to(z.dtype)


def assert_thousands_of_images_are_as_good_as_torch(
    function: Callable,
    reference: Callable,
    inputs: dict,
    backend: str,
    device: str,
    per_image: tuple[str, ...] = ("x",),
) -> None:
    """The rule beyond 2^31 elements, for the output and every gradient.

    Args:
        inputs: of three images, of which ``function`` gets the middle one _OFTEN times. Where it is zero, sums over all
            images hold no more rounding errors than those over three.
        reference: takes how often each image counts ``[3]``, and then ``inputs``.
        per_image: the inputs of three images.
    """
    if harness.interpreted(backend, device):
        pytest.skip("too much for Triton's interpreter")
    counts = torch.tensor([1, _OFTEN, 1], dtype=torch.float64, device=device)
    with torch.no_grad():
        y = reference(counts, *inputs.values())
    assert max(t[0].numel() for t in (y, *(inputs[name] for name in per_image))) * (_OFTEN + 2) > 2**31
    dy = torch.empty_like(y).copy_(harness.normal(*y.shape, dtype=y.dtype, device=device, seed=1000))

    def few(dtype):
        factors = counts.to(dtype).view(-1, *[1] * (y.dim() - 1))
        weighted = dy.to(dtype) * factors
        results = harness.evaluate(functools.partial(reference, counts), harness.cast(inputs, dtype), dy=weighted)
        return {key: t / factors if key[1:] in per_image else t for key, t in results.items()}

    truth, stock = few(torch.float64), few(y.dtype)
    given = {name: t for name, t in inputs.items() if t is not None}
    leaves = {n: (_repeated(t) if n in per_image else t.clone()).requires_grad_() for n, t in given.items()}
    many = function(*(leaves.get(name) for name in inputs))
    ours, edge = {"y": _three(many.detach(), "y")}, torch.autograd.graph.get_gradient_edge(many)
    del many  # the gradients need its room
    gradients = torch.autograd.grad(edge, list(leaves.values()), _repeated(dy))
    for name, gradient in zip(leaves, gradients):
        ours[f"d{name}"] = _three(gradient, f"d{name}") if name in per_image else gradient
    for key in ours:
        harness.assert_as_good_as_torch(ours[key], stock[key], truth[key], key)


def assert_images_do_not_mix(function: Callable, inputs: dict, per_image: tuple[str, ...] = ("x",)) -> None:
    """An image gives the same bits alone and in a batch: output and the gradients of the inputs ``per_image``."""
    batch = harness.evaluate(function, inputs)
    dy = harness.normal(*batch["y"].shape, dtype=batch["y"].dtype, device=batch["y"].device)
    batch = harness.evaluate(function, inputs, dy=dy)
    for i in range(inputs["x"].shape[0]):
        one = {name: value[i : i + 1] if name in per_image else value for name, value in inputs.items()}
        alone = harness.evaluate(function, one, dy=dy[i : i + 1])
        for name in ("y", *(f"d{name}" for name in per_image)):
            assert torch.equal(alone[name], batch[name][i : i + 1]), f"{name} of image {i} depends on the batch"


def assert_flat_parts_pass_no_infinity_on(function: Callable, reference: Callable, inputs: dict) -> None:
    """An infinite gradient where the activation is flat, at 0, reaches nothing that it does not reach in torch."""
    y = harness.evaluate(function, inputs)["y"]
    dy = torch.where(y == 0, torch.inf, torch.ones_like(y))
    assert 0 < (y == 0).sum() < y.numel()
    exact = harness.cast(inputs, torch.float64)
    runs = (function, inputs, dy), (reference, inputs, dy), (reference, exact, dy.double())
    ours, stock, truth = (harness.evaluate(f, given, dy=incoming) for f, given, incoming in runs)
    assert truth["dx"].isfinite().all()
    for name in (name for name in ours if truth[name].isfinite().all()):
        harness.assert_as_good_as_torch(ours[name], stock[name], truth[name], f"{name} of infinite gradients")


def assert_not_finite_stays_in_place(
    function: Callable, reference: Callable, inputs: dict, value: float, index: tuple, region: tuple
) -> None:
    """NaN or infinity in ``x[index]`` is never hidden and never leaves ``region``.

    Beyond ``x[region]`` nothing changes by a bit. In it, where torch is not finite ours is not, and what is finite is
    as good as torch. Ours may be NaN where torch has 0 (a slope of 0 times NaN); an infinity need only reach y.
    """
    clean = harness.evaluate(function, inputs)
    touched = inputs | {"x": inputs["x"].clone()}
    touched["x"][index] = value
    ours, stock = harness.evaluate(function, touched), harness.evaluate(reference, touched)
    truth = harness.evaluate(reference, harness.cast(touched, torch.float64), dy_dtype=ours["y"].dtype)
    for name in ours:
        finite = ours[name].isfinite()
        if name == "y" or value != value:
            kept = (torch.where(finite, t, torch.zeros_like(t)) for t in (ours[name], stock[name], truth[name]))
            harness.assert_as_good_as_torch(*kept, f"{value} in x, {name}")
        if ours[name].shape[:2] == inputs["x"].shape[:2]:
            outside = torch.ones_like(finite)
            outside[region[: outside.dim()]] = False
            assert torch.equal(ours[name][outside], clean[name][outside]), f"{value} in x changes {name} elsewhere"

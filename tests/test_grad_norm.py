"""grad_norm: the L2 norm of a list of gradients."""

import math

import harness
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fusedtrain
from fusedtrain.ops import grad_norm
from fusedtrain.ops.grad_norm import IMPLS


def make(device, shapes, dtypes, scale=1.0):
    made = (harness.normal(*shape, device=device, seed=i) for i, shape in enumerate(shapes))
    return [(scale * g).to(dtype) for g, dtype in zip(made, dtypes)]


def assert_as_good_as_torch(grads):
    """In the dtype that torch's norm of these gradients has."""
    stock = torch.nn.utils.get_total_norm(grads)
    exact = math.sqrt(math.fsum(x * x for g in grads for x in g.double().flatten().tolist()))
    exact = torch.tensor(exact, dtype=torch.float64, device=grads[0].device)
    harness.assert_as_good_as_torch(grad_norm(grads).to(stock.dtype), stock, exact, "grad_norm")


@pytest.mark.parametrize("dtype", harness.DTYPES)
@pytest.mark.parametrize("shape", [(0,), (1,), (15,), (3, 5, 7), (8192,), (8193,), (300, 500)])
def test_as_good_as_torch(device, backend, shape, dtype):
    harness.skip_unless_runs(backend, device, "grad_norm", dtype)
    assert_as_good_as_torch(make(device, [shape], [dtype]))


@given(
    shapes=st.lists(st.lists(st.integers(0, 30), max_size=3).map(tuple), min_size=1, max_size=6),
    dtypes=st.lists(st.sampled_from(harness.DTYPES[:3]), min_size=6, max_size=6),
    exponent=st.integers(-4, 3),
)
def test_any_list_is_as_good_as_torch(device, backend, shapes, dtypes, exponent):
    harness.skip_unless_runs(backend, device, "grad_norm")
    assert_as_good_as_torch(make(device, shapes, dtypes, 10.0**exponent))


def test_threads_change_nothing(device, kernels):
    harness.skip_unless_runs(kernels, device, "grad_norm")
    grads = make(device, [(100003,), (17,), (500, 333)], [torch.float32] * 3)
    before, norms = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            norms.add(grad_norm(grads).item())
    finally:
        torch.set_num_threads(before)
    assert len(norms) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_gradients_show(device, backend, value):
    harness.skip_unless_runs(backend, device, "grad_norm")
    grads = make(device, [(9000,), (3,)], [torch.float32] * 2)
    grads[0][8999] = value
    assert str(grad_norm(grads).item()) == str(value)


def test_half_precision_does_not_overflow(device, backend):
    harness.skip_unless_runs(backend, device, "grad_norm")
    assert grad_norm([torch.full((10000,), 6e4, dtype=torch.float16, device=device)]).isfinite()


@harness.needs_memory(5)
def test_more_than_2_to_the_31_elements(device, kernels):
    harness.skip_unless_runs(kernels, device, "grad_norm")
    if harness.interpreted(kernels, device):
        pytest.skip("too much for Triton's interpreter")
    g = torch.zeros(2**31 + 9, dtype=torch.bfloat16, device=device)
    g[0], g[-1] = 3.0, 4.0
    assert grad_norm([g]) == 5.0


def test_operator_agrees_with_schema_and_fake(device, kernels):
    harness.skip_unless_runs(kernels, device, "grad_norm")
    grads = make(device, [(3, 4), (9000,)], [torch.float32] * 2)
    results = torch.library.opcheck(IMPLS[kernels].forward, (grads,))
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("shape, strides", [((3, 3), (0, 4)), ((2, 2), (0, 3)), ((2, 2, 2), (1, 1, 5))])
def test_elements_that_overlap_are_refused_also_where_gaps_make_up_for_them(shape, strides):
    with fusedtrain.use_backend("cpu"), pytest.raises(RuntimeError, match="grads must be dense tensors"):
        grad_norm([torch.arange(10.0).as_strided(shape, strides)])


def test_an_empty_list_is_refused():
    with pytest.raises(ValueError, match="grads must hold at least one tensor"):
        grad_norm([])


def test_tensors_without_memory_are_refused(kernels):
    with pytest.raises(RuntimeError, match="must be on one device, got cpu, meta"):
        grad_norm([torch.ones(3), torch.ones(3, device="meta")])

"""The rule "as good as torch" itself: it must pass what is right and name what is wrong."""

import harness
import pytest
import torch


def rule(ours, stock, truth, dtype=torch.float32):
    ours, stock, truth = (torch.tensor(values, dtype=torch.float64) for values in (ours, stock, truth))
    harness.assert_as_good_as_torch(ours.to(dtype), stock.to(dtype), truth, "values")


def test_rounding_of_the_same_size_as_torchs_passes():
    rule([1.1, 2.2], [1.1, 2.2], [1.1, 2.2])
    rule([1.0, 2.02], [1.0, 1.98], [1.0, 2.0])


def test_twice_torchs_error_is_the_limit():
    with pytest.raises(AssertionError, match=r"values: 1 of 2 elements .* at \[1\] ours 2.0625"):
        rule([1.0, 2.0625], [1.0, 1.98], [1.0, 2.0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_where_torch_is_finite_fails(bad):
    with pytest.raises(AssertionError, match=r"1 of 2 elements .* at \[0\]"):
        rule([bad, 2.0], [1.0, 2.0], [1.0, 2.0])


def test_where_the_truth_is_not_finite_ours_must_agree():
    inf, nan = float("inf"), float("nan")
    rule([nan, inf, -inf, 1.0], [nan, inf, -inf, 1.0], [nan, inf, -inf, 1.0])
    rule([float(2**17)], [float(2**17)], [float(2**17)], torch.float16)  # infinite in float16, as in torch
    for ours in ([1.0], [inf]):
        with pytest.raises(AssertionError, match="worse than torch"):
            rule(ours, [nan], [nan])


def test_an_overflow_of_torch_alone_may_be_shared_or_avoided_but_widens_nothing():
    inf = float("inf")
    rule([inf, 1.0], [inf, 1.0], [3.0, 1.0])
    rule([3.0, 1.0], [inf, 1.0], [3.0, 1.0])
    with pytest.raises(AssertionError, match=r"at \[1\]"):
        rule([3.0, 1.1], [inf, 1.0], [3.0, 1.0])


def test_dtype_and_shape_must_be_torchs():
    one = torch.ones(2)
    with pytest.raises(AssertionError, match=r"dtype torch.float32, torch has torch.bfloat16"):
        harness.assert_as_good_as_torch(one, one.bfloat16(), one.double(), "values")
    with pytest.raises(AssertionError, match=r"shape \[2\], torch has \[1, 2\]"):
        harness.assert_as_good_as_torch(one, one[None], one[None].double(), "values")


@pytest.mark.parametrize("dtype", harness.DTYPES, ids=str)
@pytest.mark.parametrize("fault", ["y", "dx", "dw"])
def test_a_fault_in_output_or_gradient_is_found_in_every_dtype(dtype, fault):
    class Faulty(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            y = x * w
            return y * (1 + faults["y"])

        @staticmethod
        def backward(ctx, dy):
            x, w = ctx.saved_tensors
            return dy * w * (1 + faults["dx"]), (dy * x).sum((0, 2, 3), keepdim=True) * (1 + faults["dw"])

    def check():
        inputs = {"x": harness.images((2, 3, 4, 5), dtype=dtype), "w": harness.normal(1, 3, 1, 1, dtype=dtype)}
        harness.assert_op_as_good_as_torch(Faulty.apply, lambda x, w: x * w, inputs, "product")

    faults = dict.fromkeys(("y", "dx", "dw"), 0.0)
    check()
    faults[fault] = 64 * torch.finfo(dtype).eps
    with pytest.raises(AssertionError, match=rf"product {fault} \[draw, ...\]: "):
        check()


@pytest.mark.parametrize("layout", harness.LAYOUTS)
def test_layouts_hold_the_promised_shape_and_strides(layout):
    x = harness.images((2, 3, 4, 5), layout)
    assert x.shape == (2, 3, 4, 5)
    dense = {"contiguous", "channels_last", "unaligned", "unaligned_channels_last"}
    formats = [x.is_contiguous(memory_format=f) for f in (torch.contiguous_format, torch.channels_last)]
    assert any(formats) == (layout in dense)
    assert (x.data_ptr() % 16 != 0) == (layout.startswith("unaligned") or layout.startswith("sliced"))


def test_saved_bytes_are_counted_once_and_without_the_inputs():
    x = harness.images((2, 3, 4, 5)).requires_grad_()
    assert harness.extra_saved_bytes(lambda x: x * x, x) == 0
    assert harness.extra_saved_bytes(lambda x: torch.sigmoid(x) * x, x) == x.nbytes


def test_poisoned_memory_is_nan_and_restored():
    with harness.poisoned_memory():
        assert torch.empty(3).isnan().all() and torch.empty_like(torch.ones(2, 2, dtype=torch.bfloat16)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_zoo_is_importable_or_skips(zoo):
    assert zoo.timm.create_model("efficientnet_b0", pretrained=False).num_classes == 1000
    assert zoo.torchvision.ops.SqueezeExcitation(8, 2).fc1.in_channels == 8

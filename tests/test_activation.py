"""The activations of csrc/core/activation.h and kernels/_activation.py: where floating point ends, and in the tails."""

import harness
import pytest
import torch

from fusedtrain.ops import _activation, _codes, channel_scale, squeeze_excite

INF, NAN = float("inf"), float("nan")
# Beyond +-87 float32's e^x ends, beyond +-13 the tail of gelu; 3e38 is near the largest float32 and bfloat16.
VALUES = (NAN, INF, -INF, 3e38, -3e38, 1e4, -1e4, 100.0, -100.0, 88.5, -88.5, 87.5, -87.5, 14.5, -14.5, 3.0, -3.0, 0.0)


def in_front(act: str):
    """``x -> act(x)`` on the path of the images: activation in front of channel_scale."""
    return lambda x: channel_scale(x, x.new_ones(x.shape[:2]), in_act=act)


def as_gate(act: str):
    """``x -> act(x)`` on the path of the small vectors: the gate of squeeze_excite, whose logits are ``b2 = x``."""

    def function(x):
        c = x.numel()
        w1, w2, b2 = x.new_zeros(1, c), x.new_zeros(c, 1), x.reshape(c)
        return squeeze_excite(torch.ones_like(x), w1, None, w2, b2, gate=act)

    return function


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy in Triton's interpreter, of infinities
FUNCTIONS = [(in_front, act) for act in _codes.INPUT_ACTIVATIONS] + [(as_gate, act) for act in _codes.ACTIVATIONS]
IDS = [f"{function.__name__}-{act}" for function, act in FUNCTIONS]


def check_ends(function, act: str, dtype, device) -> None:
    """Each value and slope by itself: NaN or infinite where torch's formula in float64 is, as good as torch elsewhere.

    What is no normal number of float32 counts as 0. Finite numbers are not judged in float64, where torch's formula is
    no truth: it cancels.
    """
    x = torch.tensor(VALUES, dtype=torch.float64).to(dtype).to(device).view(1, -1, 1, 1)
    reference = _activation.REFERENCE[act]
    runs = ((function(act), x), (reference, x), (reference, x.double()))
    results = [harness.evaluate(f, {"x": t}, dy=torch.ones_like(t)) for f, t in runs]
    for name in ("y", "dx"):
        columns = (_flushed(result[name]).flatten() for result in results)
        for value, ours, stock, truth in zip(x.flatten().tolist(), *columns):
            what = f"{act}({value}): {name}"
            assert ours.isnan() == truth.isnan(), f"{what} = {ours}, not {truth}"
            if dtype != torch.float64 or not truth.isfinite():
                harness.assert_as_good_as_torch(ours, stock, truth, what)
            assert ours.isfinite() == truth.to(dtype).isfinite(), f"{what} = {ours}, not {truth}"


def _flushed(t):
    return torch.where(t.abs() < torch.finfo(torch.float32).tiny, 0.0, t)


def check_gelu_tail(dtype, device) -> None:
    """Each stretch of the tail by itself, down to values of e^-80, against torch's own erfc in float32."""
    x = -torch.linspace(0, 12.5, 50 * 13, dtype=torch.float64).to(dtype).to(device).view(50, 13, 1, 1)
    runs = ((in_front("gelu"), x), (_gelu_of_erfc, x.float()), (_gelu_of_erfc, x.double()))
    results = [harness.evaluate(f, {"x": t}, dy=torch.ones_like(t)) for f, t in runs]
    for name in ("y", "dx"):
        for row, ours, stock, truth in zip(x, *(result[name] for result in results)):
            what = f"gelu({row[0].item()}..{row[-1].item()}): {name}"
            harness.assert_as_good_as_torch(ours, stock.to(dtype), truth, what)


def _gelu_of_erfc(x):
    return 0.5 * x * torch.erfc(x * -(0.5**0.5))


@pytest.mark.parametrize("dtype", harness.DTYPES)
@pytest.mark.parametrize(("function", "act"), FUNCTIONS, ids=IDS)
def test_ends_as_torch_does(device, kernels, function, act, dtype):
    harness.skip_unless_runs(kernels, device, "squeeze_excite", dtype)
    check_ends(function, act, dtype, device)


@pytest.mark.parametrize("dtype", harness.DTYPES[:3])
def test_gelu_keeps_its_digits_in_the_tail(device, kernels, dtype):
    harness.skip_unless_runs(kernels, device, "squeeze_excite", dtype)
    check_gelu_tail(dtype, device)

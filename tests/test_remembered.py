"""What the rules chose is asked for once, and again where a call differs in what they look at."""

import pytest
import torch
from torch.autograd import forward_ad

import fusedtrain
from fusedtrain import _extension
from fusedtrain import backend as backends
from fusedtrain.ops import _remembered

if _extension.GATHERER is None:
    pytest.skip("nothing is remembered without the compiled half", allow_module_level=True)

X, WEIGHT = torch.zeros(2, 3, 4, 5), torch.zeros(3, 3, 1, 1)
OTHERS = {
    "dtype": (X.double(), WEIGHT, [1, 1]),
    "size": (X[:1], WEIGHT, [1, 1]),
    "strides": (X.contiguous(memory_format=torch.channels_last), WEIGHT, [1, 1]),
    "weight": (X, WEIGHT[:2], [1, 1]),
    "option": (X, WEIGHT, [1, 2]),
    "list": (X, WEIGHT, (1, 1)),
    "float": (X, WEIGHT, [1, 1.0]),
    "bool": (X, WEIGHT, [1, True]),
    "text": (X, WEIGHT, [1, "1"]),
    "nothing": (X, WEIGHT, [1, None]),
    "nested": (X, WEIGHT, [[1], 1]),
    "parts": (X, WEIGHT, [1, 1, 1]),
    "tensor": (X, WEIGHT, [WEIGHT, X]),
    "gradient": (X, WEIGHT.clone().requires_grad_(), [1, 1]),
}


@pytest.fixture
def asked():
    """A function of the rules, and the calls that reached it."""
    calls = []

    @_remembered.remembered
    def choose(x, weight, bias, *options):
        calls.append((x.dtype, options))
        return len(calls)

    return choose, calls


def test_calls_that_are_alike_are_asked_for_once(asked):
    choose, calls = asked
    assert [choose(X, WEIGHT, None, [1, 1]), choose(X + 1, WEIGHT + 1, None, [1, 1])] == [1, 1]
    assert calls == [(torch.float32, ([1, 1],))]


@pytest.mark.parametrize("what", OTHERS)
def test_calls_that_differ_are_asked_for_each(asked, what):
    choose, _ = asked
    (x, weight, option), first = OTHERS[what], choose(X, WEIGHT, None, [1, 1])
    assert [choose(x, weight, None, option), choose(x, weight, None, option), choose(X, WEIGHT, None, [1, 1])] == [
        *(first + 1, first + 1, first)
    ]


@pytest.mark.parametrize(("one", "other"), [("relu", "silu"), (0.1, 0.2), (True, False), (1, 2)])
def test_options_count_by_their_values(asked, one, other):
    choose, _ = asked
    assert [choose(X, WEIGHT, None, option) for option in (one, other, one, other)] == [1, 2, 1, 2]


def test_a_gradient_of_the_bias_alone_is_none_of_the_weight(asked):
    choose, _ = asked
    bias = WEIGHT[:, 0, 0, 0].clone().requires_grad_()
    assert choose(X, WEIGHT, bias, [1, 1]) != choose(X, WEIGHT.clone().requires_grad_(), bias, [1, 1])


class _Subclass(torch.Tensor):
    pass


OUTLIVED = []
torch.func.grad(lambda x: OUTLIVED.append(x) or x.sum())(X)
NOT_DESCRIBED = {
    "subclass": WEIGHT.as_subclass(_Subclass),
    "outlived": OUTLIVED[0],
    "number": torch.tensor(1.0),
    "numbers": torch.tensor([1, 1]),
    "meta": WEIGHT.to("meta"),
    "sparse": WEIGHT.to_sparse(),
    "object": object(),
    "large": 1 << 64,
    "surrogate": "\ud800",
}


@pytest.mark.parametrize("what", NOT_DESCRIBED)
def test_what_is_more_than_its_description_is_asked_for_every_time(asked, what):
    choose, calls = asked
    for option in (NOT_DESCRIBED[what], [1, NOT_DESCRIBED[what]]):
        calls.clear()
        assert [choose(X, WEIGHT, None, option) for _ in range(2)] == [1, 2]


def test_a_gradient_counts_where_it_is_recorded(asked):
    choose, _ = asked
    weight = WEIGHT.clone().requires_grad_()
    first = choose(X, weight, None, [1, 1])
    with torch.no_grad():
        assert choose(X, weight, None, [1, 1]) == choose(X, WEIGHT, None, [1, 1]) == first + 1


def test_what_has_tangents_is_asked_for_every_time(asked):
    choose, _ = asked
    with forward_ad.dual_level():
        assert [choose(X, WEIGHT, None, [1, 1]) for _ in range(2)] == [1, 2]


def test_refusals_are_not_remembered():
    @_remembered.remembered
    def choose(x):
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            choose(X)


def test_calls_of_ops_are_checked_once(monkeypatch):
    """And those that are not like one before are."""
    x, vector = torch.rand(4, 20, 5, 5), torch.ones(20)
    kernels, pixel = torch.ones(20, 1, 3, 3), torch.ones(20, 20, 1, 1)
    calls = {
        "batch_norm_act": (x, vector, vector, vector, vector),
        "depthwise_conv2d": (x, kernels),
        "pointwise_conv2d": (x, pixel),
        "squeeze_excite": (x, pixel, vector, pixel, None),
        "depthwise_bn_act_se": (x, kernels, None, vector, vector, vector, vector, (pixel, None, pixel, None)),
    }
    checked, check = [], fusedtrain.ops._common.check_images
    monkeypatch.setattr(fusedtrain.ops._common, "check_images", lambda op, x: checked.append(op) or check(op, x))
    for name, args in calls.items():
        op = getattr(fusedtrain.ops, name)
        first = op(*args)
        assert name in checked
        checked.clear()
        assert torch.equal(op(*args), first) and not checked
        with pytest.raises(ValueError, match="shape"):
            op(x[0, 0], *args[1:])
        with pytest.raises(ValueError, match="shape"):
            op(x[:, :7], *args[1:])


def test_options_in_tensors_count_by_their_values():
    x, kernels = torch.rand(4, 20, 6, 6), torch.ones(20, 1, 3, 3)
    for stride in (1, 2):
        y = fusedtrain.ops.depthwise_conv2d(x, kernels, None, torch.tensor([stride, stride]), 1)
        assert y.shape == (4, 20, 6 // stride, 6 // stride)


def test_functions_do_not_share_what_they_chose(asked):
    choose, _ = asked
    other = _remembered.remembered(lambda *_: "other")
    assert (choose(X, WEIGHT, None, [1, 1]), other(X, WEIGHT, None, [1, 1])) == (1, "other")


def test_what_more_than_rules_decides_is_not_remembered(asked, monkeypatch):
    choose, calls = asked
    for _ in range(2):
        with backends.use_backend("reference"):
            choose(X, WEIGHT, None, [1, 1])
    assert len(calls) == 2
    choose(X, WEIGHT, None, [1, 1])
    monkeypatch.setattr(backends._tuned, "active", True)  # a table that was measured
    assert choose(X, WEIGHT, None, [1, 1]) == 4


def test_memory_of_calls_is_bounded(asked, monkeypatch):
    choose, calls = asked
    monkeypatch.setattr(_remembered, "_MOST", 8)
    for size in range(1, 100):
        choose(torch.zeros(size, 3, 1, 1), WEIGHT, None, [1, 1])
        assert len(_remembered._chosen) <= 8
    assert len(calls) == 99


def test_threads_that_forget_do_not_disturb_each_other(asked, monkeypatch):
    choose, _ = asked
    monkeypatch.setattr(_remembered, "_MOST", 1)

    class Forgets(dict):
        """As where another thread clears it behind every question."""

        def __contains__(self, key):
            found = super().__contains__(key)
            self.clear()
            return found

        def get(self, key, default=None):
            found = super().get(key, default)
            self.clear()
            return found

    monkeypatch.setattr(_remembered, "_chosen", Forgets())
    assert [choose(X, WEIGHT, None, [1, 1]) for _ in range(3)] == [1, 1, 2]

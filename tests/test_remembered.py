"""What the rules chose is asked for once, and again where a call differs in what they look at."""

import pytest
import torch

from fusedtrain import backend as backends
from fusedtrain.ops import _remembered

X, WEIGHT = torch.zeros(2, 3, 4, 5), torch.zeros(3, 3, 1, 1)
OTHERS = {
    "dtype": (X.double(), WEIGHT, [1, 1]),
    "size": (X[:1], WEIGHT, [1, 1]),
    "strides": (X.contiguous(memory_format=torch.channels_last), WEIGHT, [1, 1]),
    "weight": (X, WEIGHT[:2], [1, 1]),
    "option": (X, WEIGHT, [1, 2]),
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
    assert [choose(X, WEIGHT, None, [1, 1]), choose(X + 1, WEIGHT + 1, WEIGHT[:, 0, 0, 0], [1, 1])] == [1, 1]
    assert calls == [(torch.float32, ([1, 1],))]


@pytest.mark.parametrize("what", OTHERS)
def test_calls_that_differ_are_asked_for_each(asked, what):
    choose, _ = asked
    (x, weight, option), first = OTHERS[what], choose(X, WEIGHT, None, [1, 1])
    assert [choose(x, weight, None, option), choose(x, weight, None, option), choose(X, WEIGHT, None, [1, 1])] == [
        *(first + 1, first + 1, first)
    ]


def test_a_gradient_of_the_bias_alone_is_none_of_the_weight(asked):
    choose, _ = asked
    bias = WEIGHT[:, 0, 0, 0].clone().requires_grad_()
    assert choose(X, WEIGHT, bias, [1, 1]) != choose(X, WEIGHT.clone().requires_grad_(), bias, [1, 1])


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

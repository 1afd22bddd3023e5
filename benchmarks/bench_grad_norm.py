"""The norm of all gradients of a network, as clipping needs it."""

import torch
from lists import ListBenchmark, ListCase, measure  # noqa: F401  (run.py takes measure from here)
from networks import NETWORKS
from torch import Tensor

from fusedtrain.ops import grad_norm


def _norm(function):
    return lambda params: lambda: function([p.grad for p in params])


def _loop(grads: list[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(grads, foreach=False)


def _foreach(grads: list[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(grads, foreach=True)


def cases(dtype: torch.dtype) -> list[ListCase]:
    stock = {"eager loop": _norm(_loop), "eager foreach": _norm(_foreach)}
    return [ListCase(network, "norm", network, (1, 0), _norm(grad_norm), stock) for network in NETWORKS]


BENCHMARK = ListBenchmark("grad_norm", cases)

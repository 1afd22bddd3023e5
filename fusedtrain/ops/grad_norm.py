r"""grad_norm: the L2 norm of a list of gradients, as if they were one vector.

.. math:: \lVert g \rVert = \sqrt{\sum_i \sum_j g_{ij}^2}
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedtrain.backend import Impl, register, select
from fusedtrain.ops import _common, _schema


def reference(grads: Sequence[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads]).norm()


@_schema.register_fake("grad_norm")
def _fake(grads):
    return grads[0].new_empty((), dtype=torch.float64)


_OP = torch.ops.fusedtrain.grad_norm
IMPLS = register(
    "grad_norm",
    {
        "cuda": Impl(_OP.default, None, _common.why_not_cuda_lists),
        "cpu": Impl(_OP.default, None, _common.why_not_cpu),
        "triton": Impl(_OP.triton, None, _common.why_not_triton_lists, _common.triton_slower),
        "reference": Impl(reference, None, _common.never_why_not),
    },
)


def grad_norm(grads: Sequence[Tensor]) -> Tensor:
    r"""Returns the L2 norm of all gradients together, as :func:`torch.nn.utils.get_total_norm` does.

    .. math:: \lVert g \rVert = \sqrt{\sum_i \sum_j g_{ij}^2}

    Args:
        grads: at least one dense tensor of any shape and strides without gaps, on one device; float32, bfloat16,
            float16, float64 or a mixture.

    Returns:
        A float64 tensor of shape ``[]`` on the device of the gradients; inf or NaN where a gradient is. Not
        differentiable: nothing is kept for backward.

    Raises:
        ValueError: the list is empty.
        RuntimeError: a forced backend cannot run, or a tensor is not dense, of another dtype or on another device.

    Cost: reads every gradient once; no temporary but one float64 number per 8192 elements.
    Numerics: squares and sums of 8192 elements in float32 (float64 for float64), the rest in float64; deterministic,
    independent of threads.
    Source: Pascanu et al., On the difficulty of training recurrent neural networks, https://arxiv.org/abs/1211.5063
    """
    if not grads:
        raise ValueError("grad_norm: grads must hold at least one tensor")
    _common.check_one_device("grad_norm", grads)
    impl = select("grad_norm", IMPLS, *grads)
    with torch.no_grad():
        return impl.forward(grads)

"""Linear layers on the fused op."""

import torch
from torch import Tensor, fx, nn

from fusedtrain.nn._traced import node_of
from fusedtrain.ops import linear

torch.fx.wrap("linear")  # recorded as a single node


class Linear(nn.Linear):
    r"""``nn.Linear``, trained faster on some CPUs.

    .. math:: y_o = b_o + \sum_c w_{oc}\, x_c

    Args:
        in_features: C.
        out_features: D.
        bias: whether a bias is learned.
        device: of the parameters.
        dtype: of the parameters.

    Returns:
        From ``[..., C]`` ``[..., D]``. state_dict: ``weight`` ``[D, C]`` and ``bias`` ``[D]``, initialised as
        ``nn.Linear``.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`fusedtrain.ops.linear`.

    Cost and numerics: those of :func:`fusedtrain.ops.linear`.
    Source: ``torch.nn.Linear``
    """

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy) and (node := node_of(self, input)) is not None:
            return node
        return linear(input, self.weight, self.bias)

"""Linear layers on the fused op."""

from torch import Tensor, nn

from fusedtrain import ops


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
        return ops.linear(input, self.weight, self.bias)

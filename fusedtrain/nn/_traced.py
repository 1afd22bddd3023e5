"""Fused layers in graphs of torch.fx: one node each, named by the layer, as of torch's own layers.

torch.fx knows layers that are not to be looked into by their package, which is torch's. Of others it would keep the
mode, training or evaluation, in which it has met them.
"""

from torch import Tensor, fx, nn


def node_of(layer: nn.Module, x: fx.Proxy) -> fx.Proxy | None:
    """Records a call of ``layer``; None where it is by itself what is traced: then its op is to be recorded."""
    root = getattr(x.tracer, "root", None)
    if root is None or root is layer:
        return None
    return x.tracer.create_proxy("call_module", x.tracer.path_of_module(layer), (x,), {})


class Conv2d(nn.Conv2d):
    """``nn.Conv2d``, from which the fused convolutions are made."""

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy) and (node := node_of(self, input)) is not None:
            return node
        return self._conv_forward(input, self.weight, self.bias)

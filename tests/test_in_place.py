"""What the ops return may be written to, as what PyTorch's own return: by an activation in place, or a sum."""

import copy
import sys

import harness
import pytest
import torch
from torch import nn

import fusedtrain
from fusedtrain import _extension, ops

OPS = {
    "batch_norm_act": lambda x, w: ops.batch_norm_act(x, None, None, training=True, act="silu"),
    "channel_pool": lambda x, w: ops.channel_pool(x),
    "channel_scale": lambda x, w: ops.channel_scale(x, x.mean((2, 3))),
    "depthwise_bn_act_se": lambda x, w: ops.depthwise_bn_act_se(x, w((16, 1, 3, 3)), None, None, None, training=True),
    "depthwise_bn_act_se with a projection": lambda x, w: ops.depthwise_bn_act_se(
        x, w((16, 1, 3, 3)), None, None, None, training=True, projection=(w((8, 16, 1, 1)), None)
    ),
    "depthwise_conv2d": lambda x, w: ops.depthwise_conv2d(x, w((16, 1, 3, 3))),
    "depthwise_conv2d of one image": lambda x, w: ops.depthwise_conv2d(x[0], w((16, 1, 3, 3))),
    "global_response_norm": lambda x, w: ops.global_response_norm(x, w((16,)), w((16,))),
    "grouped_conv2d": lambda x, w: ops.grouped_conv2d(x, w((16, 8, 3, 3)), groups=2),
    "linear": lambda x, w: ops.linear(x, w((5, x.shape[-1]))),
    "mlp": lambda x, w: ops.mlp(x, w((8, x.shape[-1])), None, w((5, 8)), None),
    "mlp with a scale": lambda x, w: ops.mlp(x, w((4, 16, 1, 1)), None, w((8, 4, 1, 1)), None, scale=w((8,))),
    "pointwise_conv2d": lambda x, w: ops.pointwise_conv2d(x, w((8, 16, 1, 1))),
    "pointwise_conv2d of one image": lambda x, w: ops.pointwise_conv2d(x[0], w((8, 16, 1, 1))),
    "squeeze_excite": lambda x, w: ops.squeeze_excite(x, w((4, 16)), None, w((16, 4)), None),
}


class Images(torch.Tensor):
    """What libraries make of tensors to know them again; Torch makes its results such, too."""


@pytest.mark.skipif(not _extension.LOADED, reason=str(_extension.WHY_NOT))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [torch.Tensor, Images])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("op", OPS)
def test_results_may_be_written_to(op, layout, kind, dtype, monkeypatch):
    if op.startswith(("linear", "mlp")) and kind is Images:
        pytest.skip("stock PyTorch runs it")
    if op.endswith("projection"):
        monkeypatch.setattr(sys.modules["fusedtrain.ops.depthwise_bn_act_se"], "_LARGE", 1)  # it makes its images again
    x = harness.images((2, 16, 8, 8), dtype=dtype).contiguous(memory_format=layout).as_subclass(kind).requires_grad_()
    results = []
    for in_place in (False, True):
        weights = []

        def weight(shape, weights=weights):
            weights.append(harness.normal(*shape, dtype=dtype, seed=len(weights)).requires_grad_())
            return weights[-1]

        with fusedtrain.use_backend("cpu"):
            y = OPS[op](x, weight)
        assert type(y) is kind
        y = y.mul_(2).relu_() if in_place else y.mul(2).relu()
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, *weights))))
    assert all(map(torch.equal, *results))


LAYERS = {
    "depthwise": lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16),
    "grouped": lambda: nn.Conv2d(16, 32, 3, padding=1, groups=2),
    "pointwise": lambda: nn.Conv2d(16, 32, 1),
}


@pytest.mark.skipif(not _extension.LOADED, reason=str(_extension.WHY_NOT))
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("layer", LAYERS)
def test_results_in_exported_graphs_may_be_written_to(layer, layout):
    """The bare operators stand there, and gradients may be on when the graph runs."""
    model = nn.Sequential(LAYERS[layer](), nn.ReLU(inplace=True)).eval().to(memory_format=layout)
    x = harness.images((2, 16, 8, 8)).contiguous(memory_format=layout)
    expected, truth = model(x), copy.deepcopy(model).double()(x.double())
    fusedtrain.fuse(model)
    with fusedtrain.use_backend("cpu"):
        exported = torch.export.export(model, (x,)).module()
    assert "fusedtrain" in exported.code
    harness.assert_as_good_as_torch(exported(x), expected, truth, layer)

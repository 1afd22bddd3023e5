"""The ops of the CPU backend and their gradients, on random shapes in memory between protected pages: guard_pages.c.

Each case is printed before it runs. ``guarded_child.py begin`` or ``end`` reads beside a tensor instead.
"""

import ctypes
import os
import random
import sys

import harness
import torch
from test_optimizer_step import COEFFICIENTS, EVERYTHING, FORMATS, make, make_narrow, run, run_narrow

import fusedtrain
from fusedtrain import ops
from fusedtrain.ops._windows import output_size
from fusedtrain.ops.batch_norm_act_se import batch_norm_act_se
from fusedtrain.ops.pointwise_conv2d_norm import pointwise_conv2d_norm

DRAWS = 60
FAR = 700  # rows of padding, more than any kernel reaches over
AT_END = ctypes.c_int.in_dll(ctypes.CDLL(os.environ["LD_PRELOAD"]), "guard_at_end")


class Draw(random.Random):
    """Shapes, and tensors of them; ``x`` is the image."""

    def few(self) -> int:
        """One channel, some, about as many as a vector has lanes, or several vectors of them."""
        return self.choice((1, self.randint(2, 9), self.randint(14, 18), self.randint(19, 100)))

    def images(self, channels: int) -> torch.Tensor:
        width = self.choice((self.randint(1, 5), self.randint(6, 40)))
        shape = (self.randint(2, 3), channels, self.randint(1, 20), width)
        self.dtype = self.choice(harness.DTYPES)
        self.x = harness.images(shape, self.choice(harness.DENSE_LAYOUTS), self.dtype)
        return self.x

    def normal(self, *shape: int) -> torch.Tensor:
        return harness.normal(*shape, dtype=self.dtype)

    def window(self) -> tuple:
        """A kernel that fits into the image, and its strides, paddings and dilations."""
        while True:
            k, s = self.choice((3, 5, 7)), self.randint(1, 2)
            kernel, stride, dilation = (k, k), (s, s), (1, 1)
            if self.random() < 0.3:
                kernel, stride, dilation = (k, self.randint(1, 9)), (s, self.randint(1, 3)), (1, self.randint(1, 2))
            left, right, top, bottom = [self.randint(0, 4) for _ in range(4)]
            top = FAR if self.x.shape[3] < 6 and self.random() < 0.5 else top  # where workspaces are small
            padding = (left, right, top, bottom)
            if top != FAR and self.random() < 0.5:  # what networks have, for which there are kernels of their own
                padding = (kernel[1] // 2,) * 2 + (kernel[0] // 2,) * 2
            if min(output_size(self.x.shape[2:], kernel, stride, padding, dilation)) > 0:
                return kernel, (stride, padding, dilation)


def depthwise_conv2d(r: Draw):
    x, m = r.images(r.few()), r.choice((1, 1, 2))
    kernel, options = r.window()
    inputs = x, r.normal(m * x.shape[1], 1, *kernel), r.normal(m * x.shape[1])
    return lambda *tensors: ops.depthwise_conv2d(*tensors, *options), inputs, options


def global_response_norm(r: Draw):
    x, act = r.images(r.few()), r.choice(("identity", "gelu", "silu"))
    inputs = x, r.normal(x.shape[1]), r.normal(x.shape[1])
    return lambda *tensors: ops.global_response_norm(*tensors, in_act=act), inputs, (act,)


def mlp(r: Draw):
    x, k, d, act = r.images(r.few()), r.few(), r.few(), r.choice(("identity", "gelu", "silu"))
    pixel, channels = ((1, 1), x.shape[1]) if r.random() < 0.5 else ((), x.shape[3])
    layers = x, r.normal(k, channels, *pixel), r.normal(k), r.normal(d, k, *pixel), r.normal(d)
    if r.random() < 0.3:
        return lambda *tensors: ops.mlp(*tensors, act=act), layers, (act,)
    residual = r.normal(*((x.shape[0], d, *x.shape[2:]) if pixel else (*x.shape[:3], d)))
    inputs = (*layers, r.normal(d), residual)
    return lambda *tensors: ops.mlp(*tensors[:5], act=act, scale=tensors[5], residual=tensors[6]), inputs, (act,)


def grouped_conv2d(r: Draw):
    groups, ci, co = r.randint(1, 7), r.choice((1, 2, 4, 8, r.few())), r.choice((4, 16, r.few()))
    x = r.images(groups * ci)
    kernel, options = r.window()
    inputs = x, r.normal(groups * co, ci, *kernel), r.normal(groups * co)
    return lambda *tensors: ops.grouped_conv2d(*tensors, *options, groups), inputs, (*options, groups)


def pointwise_conv2d(r: Draw):
    x, o, stride = r.images(r.few()), r.few(), r.randint(1, 2)
    inputs = x, r.normal(o, x.shape[1], 1, 1), r.normal(o)
    return lambda *tensors: ops.pointwise_conv2d(*tensors, stride), inputs, stride


def pointwise_conv2d_norm_(r: Draw):
    (_, inputs, _), act = pointwise_conv2d(r), r.choice(("silu", "gelu"))
    o = len(inputs[2])
    inputs = *inputs, None, None, r.normal(o), r.normal(o)
    return lambda *tensors: pointwise_conv2d_norm(*tensors, True, act=act), inputs, act


def linear(r: Draw):
    x, o = r.images(r.few()), r.few()
    return ops.linear, (x, r.normal(o, x.shape[3]), r.normal(o)), None


def channel_pool(r: Draw):
    options = {"pool": r.choice(("avg", "avg_max")), "in_act": r.choice(("identity", "silu"))}
    return lambda x: ops.channel_pool(x, **options), (r.images(r.few()),), options


def channel_scale(r: Draw):
    x, act = r.images(r.few()), r.choice(("identity", "silu"))
    return lambda *tensors: ops.channel_scale(*tensors, in_act=act), (x, r.normal(*x.shape[:2])), act


def gate(r: Draw, c: int) -> tuple:
    squeezed = r.randint(1, 40)
    return r.normal(squeezed, c), r.normal(squeezed), r.normal(c, squeezed), r.normal(c)


def squeeze_excite(r: Draw):
    x, pool = r.images(r.few()), r.choice(("avg", "avg_max"))
    return lambda *tensors: ops.squeeze_excite(*tensors, pool=pool), (x, *gate(r, x.shape[1])), pool


def batch_norm_act(r: Draw):
    x, act, after = r.images(r.few()), r.choice(("relu", "silu", "gelu")), r.random() < 0.5

    def function(x, gamma, beta, residual):
        return ops.batch_norm_act(x, None, None, gamma, beta, True, act=act, residual=residual, residual_after=after)

    return function, (x, r.normal(x.shape[1]), r.normal(x.shape[1]), x.clone()), (act, after)


def fixed_batch_norm_act(r: Draw):
    x, act, after = r.images(r.few()), r.choice(("identity", "relu")), r.random() < 0.5
    vectors = r.normal(4, x.shape[1]).abs()

    def function(x, residual):
        return ops.batch_norm_act(x, *vectors, act=act, residual=residual, residual_after=after)

    return function, (x, x.clone()), (act, after)


def batch_norm_act_se_(r: Draw):
    x, act = r.images(r.few()), r.choice(("identity", "hard_swish"))

    def function(x, gamma, beta, *rest):
        *se, residual = rest
        return batch_norm_act_se(x, None, None, gamma, beta, se, True, act=act, residual=residual, relu=True)

    return function, (x, r.normal(x.shape[1]), r.normal(x.shape[1]), *gate(r, x.shape[1]), x.clone()), act


def depthwise_bn_act_se(r: Draw):
    x, m = r.images(r.few()), r.choice((1, 1, 2))
    kernel, (stride, padding, dilation) = r.window()
    c, options = m * x.shape[1], {"stride": stride, "padding": padding, "dilation": dilation, "act": "silu"}

    def function(x, w, b, gamma, beta, *se):
        return ops.depthwise_bn_act_se(x, w, b, None, None, gamma, beta, se or None, True, **options)

    inputs = x, r.normal(c, 1, *kernel), r.normal(c), r.normal(c), r.normal(c)
    return function, (*inputs, *(gate(r, c) if r.random() < 0.7 else ())), options


OPS = (
    depthwise_conv2d,
    grouped_conv2d,
    pointwise_conv2d,
    pointwise_conv2d_norm_,
    linear,
    mlp,
    channel_pool,
    channel_scale,
    squeeze_excite,
    global_response_norm,
    batch_norm_act,
    fixed_batch_norm_act,
    batch_norm_act_se_,
    depthwise_bn_act_se,
)


def few_channels(r: Draw):
    """What oneDNN's gradient of the weight writes behind its workspace for, given the strided convolution itself."""
    dtype, c, stride = r.choice((torch.float32, torch.bfloat16)), r.randint(1, 15), r.choice((2, 2, 3))
    x = harness.images((2, c, 160, 160), "channels_last", dtype)
    return (
        lambda *tensors: ops.pointwise_conv2d(*tensors, None, stride),
        (x, harness.normal(48, c, 1, 1, dtype=dtype)),
        stride,
    )


def images_(op, seed: int) -> None:
    function, inputs, options = op(Draw(seed))
    print(op.__name__, *((t.dtype, t.shape, t.stride()) for t in inputs if t is not None), options, flush=True)
    for AT_END.value in (0, 1):
        moved = {str(i): t if t is None else torch.empty_like(t).copy_(t) for i, t in enumerate(inputs)}
        harness.evaluate(function, moved)


def lists(rule: str) -> None:
    """A step on copies of lists in every dtype, and stored in every way."""
    for dtype in harness.DTYPES:
        tensors = make(rule, "cpu", dtype=dtype, with_ema=True)
        for AT_END.value in (0, 1):
            print(rule, dtype, flush=True)
            run(ops.optimizer_step_, rule, tensors, EVERYTHING)
            ops.grad_norm([t.clone() for t in tensors["grads"]])
    for name in FORMATS:
        narrow = make_narrow(rule, "cpu", name)
        for AT_END.value in (0, 1):
            print(rule, name, flush=True)
            run_narrow(rule, *narrow)


def outside(side: str) -> None:
    AT_END.value = side == "end"
    x = torch.ones(5, 3)
    ctypes.c_float.from_address(x.data_ptr() + (4 * x.numel() if side == "end" else -4)).value += 1


if __name__ == "__main__":
    if sys.argv[1:]:
        outside(sys.argv[1])
        sys.exit()
    with fusedtrain.use_backend("cpu"):
        for op in OPS:
            for seed in range(DRAWS):
                images_(op, seed)
        for rule in COEFFICIENTS:
            lists(rule)
    for backend in (None, "reference"):
        with fusedtrain.use_backend(backend):
            for seed in range(10):
                images_(few_channels, seed)

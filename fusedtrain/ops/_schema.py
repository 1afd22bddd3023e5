"""Every operator of the package, one line each.

The schemas stand in Python so that the operators, their fakes and ``opcheck`` exist without a compiler; the compiled
library only adds implementations. Each operator also has a ``.triton`` overload, the same signature on Triton kernels,
but those of ``CPU_ONLY``.

Conventions: ``act``, ``gate``, ``in_act`` and ``pool`` are codes of ``_codes.py``; ``x``, ``dy``, ``y`` and ``dx`` are
dense in contiguous or channels_last format and share it; pooled, hidden, logits, gate, peak, ties, norm, mean, m2, rstd
and sums are float32 (float64 for float64 inputs); a tensor that a mode does not need has shape [0]. Strides and
dilations are (height, width), paddings (left, right, top, bottom).
"""

import functools
import importlib

import torch

BUILT_ON = {"linear": "pointwise_conv2d"}  # ops without operators of their own

_STEP = (
    "int rule, float lr, float weight_decay, bool decoupled, float[] coefficients, bool maximize, float ema_decay,"
    " bool zero_grads, Tensor? norm, float max_norm, bool skip_nonfinite, Tensor? grad_scale, Tensor? found_inf,"
    " Tensor? device_lr, Tensor(h!)? sums, bool sums_only"
)
_NARROW = "int rounding, int? seed"

SCHEMAS = {
    "batch_norm_act": "(Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, Tensor? residual, int act,"
    " bool residual_after) -> Tensor y",
    "batch_norm_act_backward": "(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias,"
    " Tensor? residual, Tensor? sum_dz, Tensor? sum_dz_xhat, float count, int act, bool residual_after, bool need_dx,"
    " bool need_dresidual) -> (Tensor dx, Tensor dresidual)",
    "batch_norm_act_fixed_backward": "(Tensor dy, Tensor y, Tensor scale, int act, bool need_dresidual)"
    " -> (Tensor dx, Tensor dresidual)",
    "batch_norm_act_reduce": "(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias,"
    " Tensor? residual, int act, bool residual_after) -> (Tensor sum_dz, Tensor sum_dz_xhat)",
    "batch_norm_act_stats": "(Tensor x) -> (Tensor mean, Tensor m2)",
    "batch_norm_act_update_": "(Tensor mean, Tensor m2, Tensor(a!)? running_mean, Tensor(b!)? running_var,"
    " float count, float momentum, float eps) -> Tensor rstd",
    "channel_pool": "(Tensor x, int pool, int in_act) -> (Tensor pooled, Tensor peak, Tensor ties)",
    "channel_pool_backward": "(Tensor dpooled, Tensor x, Tensor peak, Tensor ties, int pool, int in_act) -> Tensor dx",
    "channel_scale": "(Tensor x, Tensor gate, int in_act) -> Tensor y",
    "channel_scale_backward": "(Tensor dy, Tensor x, Tensor gate, int in_act, bool need_dx, bool need_dgate)"
    " -> (Tensor dx, Tensor dgate)",
    "depthwise_bn_act_se": "(Tensor z, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, Tensor w1, Tensor? b1,"
    " Tensor w2, Tensor? b2, int act, int se_act, int gate, Tensor? residual=None, bool relu=False)"
    " -> (Tensor y, Tensor pooled, Tensor hidden, Tensor logits)",
    "depthwise_bn_act_se_backward": "(Tensor dy, Tensor z, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias,"
    " Tensor? gate, Tensor? dpooled, Tensor? sum_du, Tensor? sum_du_xhat, float count, int act) -> Tensor dz",
    "depthwise_bn_act_se_conv": "(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation)"
    " -> (Tensor z, Tensor mean, Tensor m2)",
    "depthwise_bn_act_se_conv_backward": "(Tensor dy, Tensor z, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias,"
    " Tensor? gate, Tensor? dpooled, Tensor? sum_du, Tensor? sum_du_xhat, float count, int act, Tensor x,"
    " Tensor kernel, int[] stride, int[] padding, int[] dilation, bool need_dx, bool need_dw, bool need_db)"
    " -> (Tensor dx, Tensor dw, Tensor db)",
    "depthwise_bn_act_se_reduce": "(Tensor dy, Tensor z, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias,"
    " Tensor w1, Tensor w2, Tensor pooled, Tensor hidden, Tensor logits, int act, int se_act, int gate, bool need_dw)"
    " -> (Tensor sum_du, Tensor sum_du_xhat, Tensor gate, Tensor dpooled, Tensor dw1, Tensor db1, Tensor dw2,"
    " Tensor db2)",
    "depthwise_conv2d": "(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, int act)"
    " -> Tensor y",
    "depthwise_conv2d_backward": "(Tensor dy, Tensor x, Tensor weight, int[] stride, int[] padding, int[] dilation,"
    " bool need_dx, bool need_dw, bool need_db) -> (Tensor dx, Tensor dw, Tensor db)",
    "global_response_norm": "(Tensor x, Tensor weight, Tensor bias, float eps, int in_act) -> (Tensor y, Tensor norm)",
    "global_response_norm_backward": "(Tensor dy, Tensor x, Tensor weight, Tensor norm, float eps, int in_act,"
    " bool need_dx) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    "grouped_conv2d": "(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, int groups)"
    " -> Tensor y",
    "grouped_conv2d_dw": "(Tensor dy, Tensor x, Tensor weight, int[] stride, int[] padding, int[] dilation, int groups)"
    " -> Tensor dw",
    "grouped_conv2d_dx": "(Tensor dy, Tensor weight, int h, int w, int[] stride, int[] padding, int[] dilation,"
    " int groups) -> Tensor dx",
    "mlp_act": "(Tensor h, int act) -> Tensor g",
    "mlp_act_backward_": "(Tensor(a!) dg, Tensor h, int act, bool need_g) -> (Tensor g, Tensor db)",
    "mlp_scale": "(Tensor z, Tensor scale, Tensor? residual, bool wide) -> Tensor y",
    "mlp_scale_backward": "(Tensor dy, Tensor z, Tensor scale) -> (Tensor dz, Tensor dscale, Tensor db)",
    "pointwise_conv2d": "(Tensor x, Tensor weight, Tensor? bias, int[] stride) -> Tensor y",
    "pointwise_conv2d_contiguous": "(Tensor x, Tensor weight, Tensor? bias) -> Tensor y",
    "pointwise_conv2d_by_library": "(Tensor x, Tensor weight, Tensor? bias, int[] stride) -> Tensor y",
    "pointwise_conv2d_dw": "(Tensor dy, Tensor x, int[] stride) -> Tensor dw",
    "pointwise_conv2d_norm_backward": "(Tensor dy, Tensor z, Tensor mean, Tensor rstd, Tensor? norm_weight,"
    " Tensor? norm_bias, Tensor? sum_dz, Tensor? sum_dz_xhat, float count, int act, Tensor x, Tensor weight,"
    " bool need_dx) -> (Tensor dx, Tensor dw)",
    "pointwise_conv2d_stats": "(Tensor x, Tensor weight, Tensor? bias, int[] stride)"
    " -> (Tensor y, Tensor mean, Tensor m2)",
    "squeeze_excite": "(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2,"
    " int act, int gate, int pool, int in_act)"
    " -> (Tensor y, Tensor pooled, Tensor hidden, Tensor logits, Tensor peak, Tensor ties)",
    "squeeze_excite_backward": "(Tensor dy, Tensor x, Tensor w1, Tensor w2, Tensor pooled, Tensor hidden,"
    " Tensor logits, Tensor peak, Tensor ties, int act, int gate, int pool, int in_act, bool need_dx, bool need_dw)"
    " -> (Tensor dx, Tensor dw1, Tensor db1, Tensor dw2, Tensor db2)",
    "grad_norm": "(Tensor[] grads) -> Tensor norm",
    "optimizer_step_": f"(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] states, Tensor(d!)[] steps,"
    f" Tensor(e!)[] ema, {_STEP}) -> ()",
    "optimizer_step_narrow_": f"(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] states, Tensor(d!)[] steps,"
    f" Tensor(e!)[] ema, {_STEP}, Tensor(f!)[] exact, Tensor(g!)[] scales, {_NARROW}) -> ()",
}
_CONV, _CODES = "int[] stride, int[] padding, int[] dilation", "int act, int se_act, int gate"
# Compiled only, never traced. Steps on tables of addresses that fusedtrain._host.Gatherer fills, of tensors on the
# device of `like`; several of the operators above in one call, for the dispatcher takes as long as small kernels; and
# what replaces its argument.
UNTRACED = {
    "batch_norm_act_train_": "(Tensor x, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? batches,"
    " Tensor? weight, Tensor? bias, Tensor? residual, float momentum, float eps, int act, bool residual_after)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
    "batch_norm_act_train_backward": "(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias,"
    " Tensor? residual, int act, bool residual_after, bool need_dresidual)"
    " -> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)",
    "depthwise_bn_act_se_scale": "(Tensor z, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, Tensor gate,"
    " int act) -> Tensor y",
    "depthwise_bn_act_se_train_": "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!)? running_mean,"
    " Tensor(b!)? running_var, Tensor(c!)? batches, Tensor? norm_weight, Tensor? norm_bias, Tensor? w1, Tensor? b1,"
    f" Tensor? w2, Tensor? b2, float momentum, float eps, {_CONV}, {_CODES})"
    " -> (Tensor y, Tensor z, Tensor mean, Tensor rstd, Tensor? pooled, Tensor? hidden, Tensor? logits, Tensor? gate)",
    "depthwise_bn_act_se_train_backward": "(Tensor dy, Tensor x, Tensor weight, Tensor z, Tensor mean, Tensor rstd,"
    " Tensor? norm_weight, Tensor? norm_bias, Tensor? w1, Tensor? w2, Tensor? pooled, Tensor? hidden, Tensor? logits,"
    f" {_CONV}, {_CODES}, bool need_dx, bool need_dw, bool need_db, bool need_dse)"
    " -> (Tensor dx, Tensor dw, Tensor db, Tensor dnorm_weight, Tensor dnorm_bias, Tensor? dw1, Tensor? db1,"
    " Tensor? dw2, Tensor? db2)",
    "grad_norm_table": "(Tensor[] tables, Tensor like) -> Tensor norm",
    "mlp_act_": "(Tensor(a!) h, int act) -> ()",
    "optimizer_step_table_": f"(Tensor table, Tensor like, {_STEP}, {_NARROW}) -> ()",
}

# Ops that stock PyTorch runs on a GPU, and those all of whose operators have longer names.
CPU_ONLY = ("grouped_conv2d", "mlp", "pointwise_conv2d")
_FAMILIES = ("mlp",)

LIBRARY = torch.library.Library("fusedtrain", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


@functools.cache
def stem(name: str) -> str:
    """Returns the op that operator ``name`` is a part of: the one whose name it continues."""
    ops = (op for op in (*SCHEMAS, *_FAMILIES) if f"{name}_".startswith(f"{op.removesuffix('_')}_"))
    return min(ops, key=len).removesuffix("_")


def _triton_launcher(name: str):
    """Calls ``fusedtrain.kernels.<stem>.<name>``; Triton is imported at the first call."""
    module = f"fusedtrain.kernels.{stem(name)}"

    def launch(*args):
        return getattr(importlib.import_module(module), name)(*args)

    return launch


for _name, _signature in SCHEMAS.items():
    LIBRARY.define(_name + _signature, tags=_TAGS)
    if stem(_name) in CPU_ONLY:
        continue
    LIBRARY.define(f"{_name}.triton" + _signature, tags=_TAGS)
    for _device in ("CUDA", "CPU"):  # on the CPU Triton's interpreter runs them
        LIBRARY.impl(f"{_name}.triton", _triton_launcher(_name), _device)


for _name, _signature in UNTRACED.items():
    LIBRARY.define(_name + _signature)


def untraced(name: str):
    """Returns what calls an operator of ``UNTRACED``, without the Python around it."""
    return getattr(torch.ops.fusedtrain, name).default._op


def register_fake(name: str):
    """Decorator: the function computes output shapes, dtypes and strides of operator ``name`` and its overloads.

    It is registered as their kernel for the meta device, which fake tensors use too. ``torch.library.register_fake``
    does the same, but reads the source of its caller each time: a third of the time of ``import fusedtrain``.
    """

    def register(fake):
        LIBRARY.impl(name, fake, "Meta")
        if stem(name) not in CPU_ONLY:
            LIBRARY.impl(f"{name}.triton", fake, "Meta")
        return fake

    return register

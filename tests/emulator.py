"""The CUDA kernels' own source, compiled for the CPU by tests/cuda_emu and called on CPU tensors.

``IMPLS[op]`` is a backend for ``fusedtrain.backend``: what csrc/bindings does with CUDA tensors, on the emulator.
"""

import ctypes
import functools
import itertools
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from fusedtrain.backend import Impl
from fusedtrain.ops import _codes, _common, _windows
from fusedtrain.ops.batch_norm_act import _BatchNormImpl
from fusedtrain.ops.depthwise_bn_act_se import _BlockImpl
from fusedtrain.ops.optimizer_step import PLAIN, RULES, SUMS, Options

TESTS = Path(__file__).parent
CSRC = TESTS.parent / "csrc"
SCHEDULER = TESTS / "cuda_emu/cuda_emu.cpp"
CXX = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-O0", "-fPIC", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror"]
FLAGS += ["-ftls-model=initial-exec"]  # threadIdx and its like are read without a call
if "clang" not in CXX:  # g++ takes memory instead of looking for what it can use again: an eighth of its time
    FLAGS += ["--param=ggc-min-expand=10000", "--param=ggc-min-heapsize=4000000"]
# Without two checks of what is read and written: the address sanitizer makes them too, and they cost much time.
SANITIZERS = [
    "-fsanitize=address,undefined",
    "-fno-sanitize=null,object-size",
    "-fno-sanitize-recover=all",
    "-fsanitize-undefined-trap-on-error",  # SIGILL instead of words, which take much of the compiler's time
    "-fno-asynchronous-unwind-tables",
    *([] if "clang" in CXX else ["--param=asan-instrumentation-with-call-threshold=0"]),
]
# See core/visit.h there. The sanitizers follow memory, of which the identity may read less, and not values.
FEWER = [f"-I{TESTS / 'fewer_kernels'}", "-DOWN_KERNELS=kIdentity,kSilu"]
FEWER_SANITIZED = [FEWER[0], "-DOWN_KERNELS=kIdentity", "-DANY_HALF=kBFloat16"]
SANITIZED = os.environ.get("FUSEDTRAIN_TEST_SANITIZED") == "1"  # set by test_cuda_emu.py for its own subprocess
WHY_NOT = None if shutil.which(CXX) else f"no C++ compiler: {CXX}"


def compile(sources: list[Path], path: Path, sanitized: bool = SANITIZED) -> None:
    """Compiles CUDA files into one library."""
    slow = os.environ.get("FUSEDTRAIN_SLOW_TESTS") == "1"
    flags = FLAGS + (FEWER_SANITIZED + SANITIZERS if sanitized else [] if slow else FEWER)
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # no sanitizer in the compiler
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:

        def compile_one(source: Path) -> str:
            out = f"{folder}/{source.stem}.o"
            forms = [f"-I{TESTS / 'cuda_emu'}", f"-I{CSRC}", "-include", "cuda_runtime.h", "-D__CUDA_ARCH__=900"]
            forms += ["-O2"] if source == SCHEDULER else []  # every barrier of every thread goes through it
            subprocess.run([CXX, *flags, *forms, "-x", "c++", "-c", source, "-o", out], env=env, check=True)
            return out

        objects = list(pool.map(compile_one, [SCHEDULER, *sources]))
        subprocess.run([CXX, *flags, "-shared", *objects, "-o", path], env=env, check=True)


def build(sources: list[Path]) -> ctypes.CDLL:
    """Compiles CUDA files into one library and loads it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"kernels{sysconfig.get_config_var('SHLIB_SUFFIX')}")
        compile(sources, path)
        return ctypes.CDLL(str(path))


@functools.cache
def library() -> ctypes.CDLL:
    """The package's CUDA kernels."""
    return build(sorted(CSRC.glob("cuda/*.cu")))


# --- structs of the contract headers ----------------------------------------------------------------------------------


_SIZES = {  # of arrays in these structs
    name: int(size)
    for name, size in re.findall(r"constexpr int (k\w+) = (\d+);", (CSRC / "core/update_rule.h").read_text())
}


@functools.cache
def structs() -> dict[str, type[ctypes.Structure]]:
    """ctypes twins of the structs that CUDA kernels take, read from their headers; enums are 32-bit integers."""
    types = {"int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64}
    types |= {"double": ctypes.c_double, "float": ctypes.c_float, "bool": ctypes.c_bool}
    for header in CSRC.glob("core/*.h"):
        types |= {name: ctypes.c_int32 for name in re.findall(r"enum class (\w+) : int32_t", header.read_text())}
    headers = [CSRC / f"{source.stem}.h" for source in CSRC.glob("cuda/*.cu")]
    headers.sort(key=lambda path: path.stem == "depthwise_bn_act_se")  # it includes others
    for header in [CSRC / "core/types.h", CSRC / "core/update_rule.h", *filter(Path.exists, headers)]:
        text = re.sub(r"//.*", "", header.read_text())
        for name, body in re.findall(r"struct (\w+) \{(.*?)\n\};", text, re.DOTALL):
            body = re.sub(r"static constexpr [^;(]*;", "", body)
            if "(" in body or "static" in body:
                continue  # has functions: not for others to fill
            fields = []
            for declaration in filter(None, map(str.strip, body.split(";"))):
                kind, names = declaration.rsplit("*", 1) if "*" in declaration else declaration.split(None, 1)
                kind = ctypes.c_void_p if "*" in declaration else types[kind]
                for field, size in re.findall(r"(\w+)(?:\[(\w+)\])?(?:,|$)", names):
                    fields.append((field, kind * _SIZES[size] if size else kind))
            types[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return types


def call(name: str, struct: str, **fields) -> None:
    """Calls ``fusedtrain::cuda::name(const struct&, void* stream)``; tensors are passed as pointers."""
    pointers = {key: t.data_ptr() if t.numel() else None for key, t in fields.items() if isinstance(t, Tensor)}
    pointers |= {key: ctypes.addressof(array) for key, array in fields.items() if isinstance(array, ctypes.Array)}
    function = library()[f"_ZN10fusedtrain4cuda{len(name)}{name}ERKNS_{len(struct)}{struct}EPv"]
    code = function(ctypes.byref(structs()[struct](**fields | pointers)), None)
    assert code == 0, f"{name} returned CUDA error {code}"


# --- the ops, as csrc/bindings compose them ---------------------------------------------------------------------------

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_CHUNK = 256
_LIST_CHUNK = 8192


def _images(x: Tensor, in_act: int):
    layout = int(_common.is_channels_last(x))
    return structs()["Images"](x.shape[0], x.shape[1], x.shape[2] * x.shape[3], _DTYPES[x.dtype], layout, in_act)


def _acc(x: Tensor, *shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=_common.acc_dtype(x))


def _partial(x: Tensor, parts: int) -> Tensor:
    chunks = max(1, -(-x.shape[2] * x.shape[3] // _CHUNK)) if _common.is_channels_last(x) else 1
    return _acc(x, x.shape[0], chunks, parts, x.shape[1])


def _small(t: Tensor | None, x: Tensor) -> Tensor | None:
    return None if t is None else t.to(_common.acc_dtype(x)).contiguous()


def channel_pool(x, pool, in_act):
    n, c = x.shape[:2]
    pooled = _acc(x, n, c)
    peak, ties = (_acc(x, n, c), _acc(x, n, c)) if pool == 1 else (_acc(x, 0), _acc(x, 0))
    fields = {"pooled": pooled, "peak": peak, "ties": ties, "partial": _partial(x, 3)}
    call("channel_pool", "ChannelPool", images=_images(x, in_act), pool=pool, x=x, **fields)
    return pooled, peak, ties


def _scale_backward(x, in_act, pool, **tensors):
    dx = torch.empty_like(x).fill_(torch.nan)
    images = _images(x, in_act)
    call("channel_scale_backward", "ChannelScaleBackward", images=images, pool=pool, x=x, dx=dx, **tensors)
    return dx


def channel_pool_backward(dpooled, x, peak, ties, pool, in_act):
    return _scale_backward(x, in_act, pool, dpooled=_small(dpooled, x), peak=peak, ties=ties)


def channel_scale(x, gate, in_act):
    y = torch.empty_like(x).fill_(torch.nan)
    call("channel_scale", "ChannelScale", images=_images(x, in_act), x=x, gate=_small(gate, x), y=y)
    return y


def _scale_dot(dy, x, in_act, **with_dx):
    dgate, partial = _acc(x, *x.shape[:2]), _partial(x, 1)
    images = _images(x, in_act)
    call("channel_scale_dot", "ChannelScaleDot", images=images, dy=dy, x=x, partial=partial, dgate=dgate, **with_dx)
    return dgate


def channel_scale_backward(dy, x, gate, in_act, need_dx, need_dgate):
    gate = _small(gate, x)
    if not need_dgate:
        return _scale_backward(x, in_act, 0, dy=dy, gate=gate) if need_dx else x.new_empty(0), _acc(x, 0)
    dx = torch.empty_like(x).fill_(torch.nan) if need_dx else x.new_empty(0)
    return dx, _scale_dot(dy, x, in_act, gate=gate, dx=dx)


def global_response_norm(x, weight, bias, eps, in_act):
    y, norm = torch.empty_like(x).fill_(torch.nan), _acc(x, *x.shape[:2])
    fields = {"eps": eps, "weight": _small(weight, x), "bias": _small(bias, x), "factor": _acc(x, *x.shape[:2])}
    fields |= {"images": _images(x, in_act), "x": x, "partial": _partial(x, 1), "norm": norm, "y": y}
    call("global_response_norm", "GlobalResponseNorm", **fields)
    return y, norm


def global_response_norm_backward(dy, x, weight, norm, eps, in_act, need_dx):
    dx = torch.empty_like(x).fill_(torch.nan) if need_dx else x.new_empty(0)
    dweight, dbias = _acc(x, x.shape[1]), _acc(x, x.shape[1])
    fields = {name: _acc(x, *x.shape[:2]) for name in ("factor", "slope", "dweights", "dbiases")}
    fields |= {"eps": eps, "weight": _small(weight, x), "norm": norm, "partial": _partial(x, 2)}
    fields |= {"images": _images(x, in_act), "dy": dy, "x": x, "dx": dx, "dweight": dweight, "dbias": dbias}
    call("global_response_norm_backward", "GlobalResponseNormBackward", **fields)
    return dx, dweight, dbias


def _weights(weights: dict[str, Tensor | None]) -> dict:
    """Dense, in their own dtype: that of the first."""
    dtype = next(iter(weights.values())).dtype
    return {"weights": _DTYPES[dtype]} | {
        k: None if t is None else t.to(dtype).contiguous() for k, t in weights.items()
    }


def _excite(pooled, hidden, logits, gates, weights, act, gate):
    (n, c), r = pooled.shape, hidden.shape[1]
    codes = {"n": n, "c": c, "r": r, "dtype": _DTYPES[pooled.dtype], "act": act, "gate_act": gate}
    results = {"hidden": hidden, "activated": torch.full_like(hidden, torch.nan), "logits": logits, "gate": gates}
    call("squeeze_excite", "SqueezeExcite", **codes, pooled=pooled, **_weights(weights), **results)


def squeeze_excite(x, w1, b1, w2, b2, act, gate, pool, in_act):
    n, c, r = *x.shape[:2], w1.shape[0]
    pooled, peak, ties = channel_pool(x, pool, in_act)
    hidden, logits, gates = _acc(x, n, r), _acc(x, n, c), _acc(x, n, c)
    _excite(pooled, hidden, logits, gates, {"w1": w1, "b1": b1, "w2": w2, "b2": b2}, act, gate)
    return channel_scale(x, gates, in_act), pooled, hidden, logits, peak, ties


def _excite_backward(dgate, x, w1, w2, pooled, hidden, logits, act, gate, need_dw):
    """The gradients of the small tensors by name, and those of weights and biases."""
    n, c, r = *x.shape[:2], w1.shape[0]
    small = {name: _acc(x, n, c) for name in ("gate", "dlogits", "dpooled")}
    small |= {name: _acc(x, n, r) for name in ("activated", "dhidden")}
    shapes = {"dw1": w1.shape, "db1": (r,), "dw2": w2.shape, "db2": (c,)}
    dw = {name: torch.full(shape, torch.nan, dtype=w1.dtype) for name, shape in shapes.items()}
    fields = {"n": n, "c": c, "r": r, "dtype": _DTYPES[pooled.dtype], "act": act, "gate_act": gate}
    fields |= {"dgate": dgate, "pooled": pooled, "hidden": hidden, "logits": logits}
    fields |= _weights({"w1": w1, "w2": w2}) | small | dw
    call("squeeze_excite_backward", "SqueezeExciteBackward", **fields)
    if need_dw:
        call("squeeze_excite_weight_backward", "SqueezeExciteBackward", **fields)
    return small, list(dw.values()) if need_dw else [w1.new_empty(0)] * len(dw)


def squeeze_excite_backward(
    dy, x, w1, w2, pooled, hidden, logits, peak, ties, act, gate, pool, in_act, need_dx, need_dw
):
    dgate = _scale_dot(dy, x, in_act)
    small, dw = _excite_backward(dgate, x, w1, w2, pooled, hidden, logits, act, gate, need_dw)
    slopes = {"gate": small["gate"], "dpooled": small["dpooled"], "peak": peak, "ties": ties}
    dx = _scale_backward(x, in_act, pool, dy=dy, **slopes) if need_dx else x.new_empty(0)
    return dx, *dw


def _sizes(x: Tensor, weight: Tensor, stride, padding, dilation):
    (n, c, h, w), (co, _, kh, kw), (left, _, top, _) = x.shape, weight.shape, padding
    ho, wo = _windows.output_size((h, w), (kh, kw), stride, padding, dilation)
    numbers = (n, c, h, w, co // c, ho, wo, kh, kw, *stride, top, left, *dilation)
    return structs()["DepthwiseSizes"](*numbers, _DTYPES[x.dtype], int(_common.is_channels_last(x)))


def depthwise_conv2d(x, weight, bias, stride, padding, dilation, act):
    sizes = _sizes(x, weight, stride, padding, dilation)
    layout = torch.channels_last if sizes.layout else torch.contiguous_format
    shape = (sizes.n, sizes.c * sizes.m, sizes.ho, sizes.wo)
    y = torch.empty(shape, dtype=x.dtype, memory_format=layout).fill_(torch.nan)
    call("depthwise_conv2d", "DepthwiseConv2d", sizes=sizes, act=act, x=x, weight=weight, bias=bias, y=y)
    return y


def depthwise_conv2d_backward(dy, x, weight, stride, padding, dilation, need_dx, need_dw, need_db):
    sizes = _sizes(x, weight, stride, padding, dilation)
    dx = torch.empty_like(x).fill_(torch.nan) if need_dx else x.new_empty(0)
    dw = torch.full_like(weight, torch.nan) if need_dw else x.new_empty(0)
    db = x.new_full((len(weight),), torch.nan) if need_db else x.new_empty(0)
    partial_size = library()["_ZN10fusedtrain4cuda29depthwise_conv2d_partial_sizeERKNS_14DepthwiseSizesE"]
    partial_size.restype = ctypes.c_int64
    partial = _acc(x, partial_size(ctypes.byref(sizes)))
    fields = {"sizes": sizes, "dy": dy, "x": x, "weight": weight, "dx": dx, "dw": dw, "db": db, "partial": partial}
    if need_dx:
        call("depthwise_conv2d_dx", "DepthwiseConv2dBackward", **fields)
    if need_dw or need_db:
        call("depthwise_conv2d_dw", "DepthwiseConv2dBackward", **fields)
    return dx, dw, db


def _list(struct: str, rows: list[dict]) -> dict:
    """The fields of a list of tensors."""
    first = [0, *itertools.accumulate(-(-row["numel"] // _LIST_CHUNK) for row in rows)]
    row_struct, first_chunk = structs()[struct], (ctypes.c_int64 * len(first))(*first)
    tensors = (row_struct * len(rows))(*(row_struct(**row) for row in rows))
    return {"count": len(rows), "tensors": tensors, "first_chunk": first_chunk}


def _doubles(count: int) -> Tensor:
    return torch.full((count,), torch.nan, dtype=torch.float64)


def grad_norm(grads):
    fields = _list("NormTensor", [{"numel": g.numel(), "dtype": _DTYPES[g.dtype], "grad": g.data_ptr()} for g in grads])
    norm, partial = _doubles(1), _doubles(fields["first_chunk"][len(grads)])
    call("grad_norm", "GradNorm", **fields, partial=partial, norm=norm)
    return norm.view(())


def optimizer_step_(params, grads, states, steps, ema, *options):
    options, narrow = options[: len(Options._fields)], options[len(Options._fields) :] or PLAIN
    o, (exact, scales, rounding, seed) = Options(*options), narrow
    count, elementwise = len(params), len(RULES[_codes.RULES[o.rule]].states)
    arrays = dict(structs()["StepTensor"]._fields_)
    rows = []
    for i, p in enumerate(params):
        own = states[i::count]
        lists = {"states": own[:elementwise], "scalars": own[elementwise:], "scales": scales[i::count]}
        row = {name: arrays[name](*(t.data_ptr() or None for t in tensors)) for name, tensors in lists.items()}
        others = {"param": params, "grad": grads, "ema": ema, "step": steps, "exact": exact}
        row |= {name: tensors[i].data_ptr() or None for name, tensors in others.items() if tensors}
        stored = own[0].dtype if elementwise and own[0].dtype in _DTYPES else p.dtype
        rows.append(row | {"numel": p.numel(), "dtype": _DTYPES[p.dtype], "state_dtype": _DTYPES[stored]})
    fields = _list("StepTensor", rows)
    hyper = structs()["Hyper"](o.lr, o.weight_decay, o.decoupled, tuple(o.coefficients))
    same = ("maximize", "zero_grads", "skip_nonfinite", "ema_decay", "max_norm", "norm", "grad_scale", "found_inf")
    same = {name: getattr(o, name) for name in (*same, "rule", "sums", "sums_only")}
    given = {"lr": o.device_lr, "sums_given": o.sums is not None and not o.sums_only}
    given |= {"rounding": rounding, "random": seed is not None, "seed": seed or 0}
    work = {"partial": _doubles(SUMS * fields["first_chunk"][count]), "ratio": _doubles(2 * count)}
    call("optimizer_step", "OptimizerStep", **fields, hyper=hyper, **same, **given, **work)


def _batch(x: Tensor):
    """The images as one sample of rows, or planes."""
    images = _images(x, 0)
    return structs()["Images"](1, images.c, images.n * images.hw, images.dtype, 1, 0) if images.layout else images


def _sums_partial(x: Tensor, parts: int) -> Tensor:
    batch = _batch(x)
    return _acc(x, batch.n * (max(1, -(-batch.hw // _CHUNK)) if batch.layout else 1), parts, batch.c)


def batch_norm_act_stats(x):
    mean, m2 = _acc(x, x.shape[1]), _acc(x, x.shape[1])
    fields = {"images": _batch(x), "fold": 1, "x": x, "partial": _sums_partial(x, 3), "mean": mean, "m2": m2}
    call("batch_norm_act_stats", "BatchNormStats", **fields)
    return mean, m2


def batch_norm_act_update_(mean, m2, running_mean, running_var, count, momentum, eps):
    rstd = torch.full_like(mean, torch.nan)
    running = running_mean if running_mean is not None else mean
    fields = {"c": len(mean), "dtype": _DTYPES[mean.dtype], "running_dtype": _DTYPES[running.dtype]}
    fields |= {"count": count, "momentum": momentum, "eps": eps, "mean": mean, "m2": m2, "rstd": rstd}
    call("batch_norm_act_update", "BatchNormUpdate", **fields, running_mean=running_mean, running_var=running_var)
    return rstd


def _batch_inputs(x, mean, rstd, weight, bias, residual, act, residual_after):
    """The struct, and the tensors it points to."""
    weight = torch.ones_like(mean) if weight is None else _small(weight, x)
    bias = torch.zeros_like(mean) if bias is None else _small(bias, x)
    before = None if residual_after else residual
    tensors = {"x": x, "before": before, "mean": mean, "rstd": rstd, "weight": weight, "bias": bias}
    pointers = {name: None if t is None else t.data_ptr() for name, t in tensors.items()}
    return structs()["BatchNormInputs"](images=_batch(x), act=act, **pointers), tensors


def batch_norm_act(x, mean, rstd, weight, bias, residual, act, residual_after):
    inputs, _alive = _batch_inputs(x, mean, rstd, weight, bias, residual, act, residual_after)
    y = torch.empty_like(x).fill_(torch.nan)
    call("batch_norm_act", "BatchNormAct", **{"in": inputs}, after=residual if residual_after else None, y=y)
    return y


def batch_norm_act_reduce(dy, x, *args):
    inputs, _alive = _batch_inputs(x, *args)
    sums = {"sum_dz": _acc(x, x.shape[1]), "sum_dz_xhat": _acc(x, x.shape[1])}
    fields = {"in": inputs, "fold": 1, "dy": dy, "partial": _sums_partial(x, 2), **sums}
    call("batch_norm_act_reduce", "BatchNormReduce", **fields)
    return tuple(sums.values())


def batch_norm_act_backward(
    dy, x, mean, rstd, weight, bias, residual, sum_dz, sum_dz_xhat, count, act, residual_after, need_dx, need_dresidual
):
    inputs, _alive = _batch_inputs(x, mean, rstd, weight, bias, residual, act, residual_after)
    dx = torch.empty_like(x).fill_(torch.nan) if need_dx else x.new_empty(0)
    dresidual = torch.empty_like(x).fill_(torch.nan) if need_dresidual else x.new_empty(0)
    fields = {"in": inputs, "count": count, "dy": dy, "sum_dz": sum_dz, "sum_dz_xhat": sum_dz_xhat}
    call("batch_norm_act_backward", "BatchNormBackward", **fields, dx=dx, dbefore=dresidual)
    return dx, dresidual


def batch_norm_act_fixed_backward(dy, y, scale, act, need_dresidual):
    dx = torch.empty_like(dy).fill_(torch.nan)
    dresidual = torch.empty_like(dy).fill_(torch.nan) if need_dresidual else dy.new_empty(0)
    fields = {"images": _batch(dy), "act": act, "dy": dy, "y": y if act else None, "scale": scale}
    call("batch_norm_act_fixed_backward", "BatchNormFixedBackward", **fields, dx=dx, dbefore=dresidual)
    return dx, dresidual


def depthwise_bn_act_se_conv(x, weight, bias, stride, padding, dilation):
    sizes = _sizes(x, weight, stride, padding, dilation)
    c, layout = sizes.c * sizes.m, torch.channels_last if sizes.layout else torch.contiguous_format
    z = torch.empty((sizes.n, c, sizes.ho, sizes.wo), dtype=x.dtype, memory_format=layout).fill_(torch.nan)
    partial_size = library()["_ZN10fusedtrain4cuda24bn_act_conv_partial_sizeERKNS_14DepthwiseSizesE"]
    partial_size.restype = ctypes.c_int64
    work = {"partial": _acc(x, partial_size(ctypes.byref(sizes))), "mean": _acc(x, c), "m2": _acc(x, c)}
    call("bn_act_conv", "BnActConv", sizes=sizes, x=x, weight=weight, bias=bias, z=z, **work)
    return z, work["mean"], work["m2"]


def _block_inputs(z, mean, rstd, weight, bias, act):
    """The struct, and the tensors it points to."""
    images = _images(z, act)
    images.layout = images.layout or int(images.hw == 1)
    weight = torch.ones_like(mean) if weight is None else _small(weight, z)
    bias = torch.zeros_like(mean) if bias is None else _small(bias, z)
    tensors = {"z": z, "mean": mean, "rstd": rstd, "weight": weight, "bias": bias}
    return structs()["BnAct"](images=images, **{name: t.data_ptr() for name, t in tensors.items()}), tensors


def depthwise_bn_act_se(z, mean, rstd, weight, bias, w1, b1, w2, b2, act, se_act, gate, residual=None, relu=False):
    inputs, _alive = _block_inputs(z, mean, rstd, weight, bias, act)
    n, c, r = *z.shape[:2], w1.shape[0]
    pooled, hidden, logits, gates = _acc(z, n, c), _acc(z, n, r), _acc(z, n, c), _acc(z, n, c)
    y = torch.empty_like(z).fill_(torch.nan)
    call("bn_act_pool", "BnActPool", **{"in": inputs}, partial=_partial(z, 1), pooled=pooled)
    _excite(pooled, hidden, logits, gates, {"w1": w1, "b1": b1, "w2": w2, "b2": b2}, se_act, gate)
    call("bn_act_scale", "BnActScale", **{"in": inputs}, gate=gates, residual=residual, relu=relu, y=y)
    return y, pooled, hidden, logits


def depthwise_bn_act_se_reduce(
    dy, z, mean, rstd, weight, bias, w1, w2, pooled, hidden, logits, act, se_act, gate, need_dw
):
    inputs, _alive = _block_inputs(z, mean, rstd, weight, bias, act)
    n, c = z.shape[:2]
    sums, dgate = _acc(z, n, 4, c), _acc(z, n, c)
    call("bn_act_reduce", "BnActReduce", **{"in": inputs}, dy=dy, partial=_partial(z, 5), sums=sums, dgate=dgate)
    small, dw = _excite_backward(dgate, z, w1, w2, pooled, hidden, logits, se_act, gate, need_dw)
    totals = {"sum_du": _acc(z, c), "sum_du_xhat": _acc(z, c)}
    sizes = {"n": n, "c": c, "hw": z.shape[2] * z.shape[3], "dtype": _DTYPES[pooled.dtype]}
    gates = {"gate": small["gate"], "dpooled": small["dpooled"]}
    call("bn_act_combine", "BnActCombine", **sizes, sums=sums, rstd=rstd, **gates, **totals)
    return *totals.values(), *gates.values(), *dw


def depthwise_bn_act_se_backward(dy, z, mean, rstd, weight, bias, gate, dpooled, sum_du, sum_du_xhat, count, act):
    inputs, _alive = _block_inputs(z, mean, rstd, weight, bias, act)
    dz = torch.empty_like(z).fill_(torch.nan)
    fields = {"gate": gate, "dpooled": dpooled, "sum_du": sum_du, "sum_du_xhat": sum_du_xhat}
    call("bn_act_backward", "BnActBackward", **{"in": inputs}, count=count, dy=dy, **fields, dz=dz)
    return dz


def depthwise_bn_act_se_conv_backward(*args):
    inputs, (x, kernel, *geometry_and_needs) = args[:12], args[12:]
    return depthwise_conv2d_backward(depthwise_bn_act_se_backward(*inputs), x, kernel, *geometry_and_needs)


_NORM = _BatchNormImpl(
    *(batch_norm_act, batch_norm_act_backward, _common.never_why_not, None),
    *(batch_norm_act_stats, batch_norm_act_update_, batch_norm_act_reduce, batch_norm_act_fixed_backward),
)
IMPLS = {
    "batch_norm_act": _NORM,
    "depthwise_bn_act_se": _BlockImpl(
        *(depthwise_bn_act_se, depthwise_bn_act_se_backward, _common.never_why_not, None),
        *(depthwise_bn_act_se_reduce, depthwise_bn_act_se_conv_backward, depthwise_bn_act_se_conv, _NORM),
    ),
    "grad_norm": Impl(grad_norm, None, _common.never_why_not),
    "optimizer_step": Impl(optimizer_step_, None, _common.never_why_not),
    "optimizer_step_narrow": Impl(optimizer_step_, None, _common.never_why_not),
    "channel_pool": Impl(channel_pool, channel_pool_backward, _common.never_why_not),
    "channel_scale": Impl(channel_scale, channel_scale_backward, _common.never_why_not),
    "global_response_norm": Impl(global_response_norm, global_response_norm_backward, _common.never_why_not),
    "squeeze_excite": Impl(squeeze_excite, squeeze_excite_backward, _common.never_why_not),
    "depthwise_conv2d": Impl(depthwise_conv2d, depthwise_conv2d_backward, _common.never_why_not),
    "depthwise_conv2d_backward": Impl(depthwise_conv2d_backward, None, _common.never_why_not),
}

"""depthwise_conv2d in Triton, for any kernel, stride, dilation, padding and channel multiplier m (co = ci * m + j).

y[co, oy, ox]  = act(bias[co] + sum_{ky, kx} weight[co, ky, kx] x[ci, oy sh + ky dil_h - top, ox sw + kx dil_w - left])
dx[ci, iy, ix] = sum_{j, ky, kx} weight[co, ky, kx] dy[co, oy, ox]  over the taps with oy sh + ky dil_h - top = iy, ...
dw[co, ky, kx] = sum_{n, oy, ox} dy[co, oy, ox] x[ci, oy sh + ky dil_h - top, ox sw + kx dil_w - left]
db[co]         = sum_{n, oy, ox} dy[co, oy, ox]

A program owns BLOCK_C channels x BLOCK_P pixels and meets every tap; neighbouring taps find their pixels in the L1
cache. dw and db are summed over chunks of CHUNK pixels, which a second kernel adds in order.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedtrain.kernels import _activation, _images
from fusedtrain.ops import _common, _windows

CHUNK = 4096  # output pixels, of all samples, in one partial sum of dw
WEIGHT_TILE = 2048  # taps of a kernel row x channels x pixels of the kernel for dw
FINISH_BLOCK = 128


@triton.jit
def _offsets(n, channels, pixels, c, plane, VEC: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """Offsets into images of ``c`` channels of ``plane`` pixels; VEC divides c in channels_last."""
    if CHANNELS_LAST:
        offsets = (n * plane + pixels) * (c // VEC * VEC) + channels
    else:
        offsets = (n * c + channels) * plane + pixels
    return offsets


@triton.jit
def convolved(
    x_ptr,
    weight_ptr,
    bias_ptr,
    n,
    channels,
    pixels,
    c,
    h,
    w,
    ho,
    wo,
    sh,
    sw,
    top,
    left,
    dil_h,
    dil_w,
    M: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    UNROLL: tl.constexpr,
    BIAS: tl.constexpr,
    VEC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
):
    """The convolution at channels x pixels of sample n in float32, their offsets in y, and their mask."""
    oy, ox = pixels // wo, pixels % wo
    inside_c, inside_p = channels < c // VEC * VEC * M, pixels < ho * wo
    y = tl.zeros([channels.shape[0], pixels.shape[0]], tl.float32)
    for ky in range(KH):
        iy = oy * sh + (ky * dil_h - top)
        inside_y = inside_p & (iy >= 0) & (iy < h)
        for kx in tl.range(KW, loop_unroll_factor=UNROLL):
            ix = ox * sw + (kx * dil_w - left)
            mask = inside_c[:, None] & (inside_y & (ix >= 0) & (ix < w))[None, :]
            offsets = _offsets(n, (channels // M)[:, None], (iy * w + ix)[None, :], c, h * w, VEC, CHANNELS_LAST)
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            tap = tl.load(weight_ptr + (channels * KH + ky) * KW + kx, mask=inside_c, other=0.0).to(tl.float32)
            y += x * tap[:, None]
    if BIAS:
        y += tl.load(bias_ptr + channels, mask=inside_c, other=0.0).to(tl.float32)[:, None]
    offsets = _offsets(n, channels[:, None], pixels[None, :], c * M, ho * wo, VEC, CHANNELS_LAST)
    return y, offsets, inside_c[:, None] & inside_p[None, :]


@triton.jit
def depthwise_conv2d_kernel(
    x_ptr,  # [n, c, h, w] or [n, h, w, c]
    weight_ptr,  # [co, KH, KW]
    bias_ptr,  # [co], with BIAS
    y_ptr,  # [n, co, ho, wo] or [n, ho, wo, co]
    c,
    h,
    w,
    ho,
    wo,
    sh,
    sw,
    top,
    left,
    dil_h,
    dil_w,
    M: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    UNROLL: tl.constexpr,
    BIAS: tl.constexpr,
    ACT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    VEC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    blocks_c, blocks_p = tl.cdiv(c * M, BLOCK_C), tl.cdiv(ho * wo, BLOCK_P)
    pid = tl.program_id(0)
    n = tl.cast(pid // blocks_c // blocks_p, INT)
    channels = pid % blocks_c * BLOCK_C + tl.arange(0, BLOCK_C)
    pixels = tl.cast(pid // blocks_c % blocks_p, INT) * BLOCK_P + tl.arange(0, BLOCK_P)
    y, offsets, mask = convolved(
        *(x_ptr, weight_ptr, bias_ptr, n, channels, pixels, c, h, w, ho, wo, sh, sw, top, left, dil_h, dil_w),
        *(M, KH, KW, UNROLL, BIAS, VEC, CHANNELS_LAST),
    )
    tl.store(y_ptr + offsets, _activation.value(y, ACT).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def depthwise_conv2d_dx_kernel(
    dy_ptr,  # [n, co, ho, wo] or [n, ho, wo, co]
    weight_ptr,  # [co, KH, KW]
    dx_ptr,  # [n, c, h, w] or [n, h, w, c]
    c,
    h,
    w,
    ho,
    wo,
    sh,
    sw,
    top,
    left,
    dil_h,
    dil_w,
    M: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    VEC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One program per phase (y mod sh, x mod sw) of the stride: all its pixels meet the same taps."""
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    rows, cols = tl.cdiv(h, sh), tl.cdiv(w, sw)  # of a phase
    blocks_c, blocks_p = tl.cdiv(c, BLOCK_C), tl.cdiv(rows * cols, BLOCK_P)
    pid = tl.program_id(0)
    channels = pid % blocks_c * BLOCK_C + tl.arange(0, BLOCK_C)
    phase = pid // blocks_c % (sh * sw)
    phase_y, phase_x = phase // sw, phase % sw
    pid = pid // blocks_c // (sh * sw)
    n = tl.cast(pid // blocks_p, INT)
    pixels = tl.cast(pid % blocks_p, INT) * BLOCK_P + tl.arange(0, BLOCK_P)
    row, col = pixels // cols, pixels % cols
    inside_c, inside_p = channels < c // VEC * VEC, row < rows
    dx = tl.zeros([BLOCK_C, BLOCK_P], tl.float32)
    for ky in range(KH):
        from_y = phase_y + top - ky * dil_h
        if from_y % sh == 0:
            oy = row + from_y // sh
            inside_y = inside_p & (oy >= 0) & (oy < ho)
            for kx in tl.range(KW, loop_unroll_factor=UNROLL):
                from_x = phase_x + left - kx * dil_w
                if from_x % sw == 0:
                    ox = col + from_x // sw
                    mask = inside_c[:, None] & (inside_y & (ox >= 0) & (ox < wo))[None, :]
                    for j in tl.static_range(M):
                        co = channels * M + j
                        offsets = _offsets(n, co[:, None], (oy * wo + ox)[None, :], c * M, ho * wo, VEC, CHANNELS_LAST)
                        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
                        tap = tl.load(weight_ptr + (co * KH + ky) * KW + kx, mask=inside_c, other=0.0).to(tl.float32)
                        dx += dy * tap[:, None]
    iy, ix = row * sh + phase_y, col * sw + phase_x
    offsets = _offsets(n, channels[:, None], (iy * w + ix)[None, :], c, h * w, VEC, CHANNELS_LAST)
    mask = inside_c[:, None] & (inside_p & (iy < h) & (ix < w))[None, :]
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def depthwise_conv2d_dw_kernel(
    dy_ptr,  # [n, co, ho, wo] or [n, ho, wo, co]
    x_ptr,  # [n, c, h, w] or [n, h, w, c]
    partial_ptr,  # [chunks, last_ky - first_ky, KW, co]
    n,
    c,
    h,
    w,
    ho,
    wo,
    sh,
    sw,
    top,
    left,
    dil_h,
    dil_w,
    first_ky,  # 0, or KH without dw
    last_ky,  # KH, or with db one more: the row that holds db meets ones instead of x
    M: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    BLOCK_KW: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    VEC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One program per row of the kernel, so that its taps share dy; the other rows find both in the L2 cache."""
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    rows, blocks_c = last_ky - first_ky, tl.cdiv(c * M, BLOCK_C)
    pid = tl.program_id(0)
    row, block, chunk = pid % rows, pid // rows % blocks_c, pid // rows // blocks_c
    ky, kx = first_ky + row, tl.arange(0, BLOCK_KW)
    channels = block * BLOCK_C + tl.arange(0, BLOCK_C)
    inside_c = channels < c // VEC * VEC * M
    begin = tl.cast(chunk, INT) * CHUNK
    total = n * tl.cast(ho, INT) * wo
    seen = tl.where(ky < KH, h, 0)  # rows of x
    sums = tl.zeros([BLOCK_KW, BLOCK_C, BLOCK_P], tl.float32)
    for start in range(begin, tl.minimum(begin + CHUNK, total), BLOCK_P):
        at = start + tl.arange(0, BLOCK_P)
        sample, pixel = at // (ho * wo), at % (ho * wo)
        oy, ox = pixel // wo, pixel % wo
        offsets = _offsets(sample[None, :], channels[:, None], pixel[None, :], c * M, ho * wo, VEC, CHANNELS_LAST)
        dy = tl.load(dy_ptr + offsets, mask=inside_c[:, None] & (at < total)[None, :], other=0.0).to(tl.float32)
        iy = oy * sh + (ky * dil_h - top)
        ix = ox[None, :] * sw + (kx * dil_w - left)[:, None]  # [BLOCK_KW, BLOCK_P]
        inside_x = (ix >= 0) & (ix < w) & (kx < KW)[:, None] & ((at < total) & (iy >= 0) & (iy < seen))[None, :]
        offsets = _offsets(
            sample[None, None, :],
            (channels // M)[None, :, None],
            ((iy * w)[None, :] + ix)[:, None, :],
            c,
            h * w,
            VEC,
            CHANNELS_LAST,
        )
        x = tl.load(x_ptr + offsets, mask=inside_x[:, None, :] & inside_c[None, :, None], other=0.0).to(tl.float32)
        sums += dy[None, :, :] * tl.where(ky < KH, x, 1.0)
    offsets = ((chunk * rows + row).to(tl.int64) * KW + kx)[:, None] * (c * M) + channels[None, :]
    tl.store(partial_ptr + offsets, tl.sum(sums, axis=2), mask=(kx < KW)[:, None] & inside_c[None, :])


@triton.jit
def depthwise_conv2d_finish_kernel(
    partial_ptr,  # [chunks, last_ky - first_ky, KW, co]
    dw_ptr,  # [co, KH, KW]
    db_ptr,  # [co]
    co,
    first_ky,
    last_ky,
    chunks,
    KH: tl.constexpr,
    KW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    size = (last_ky - first_ky) * KW * co
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)  # a large batch has thousands of chunks
    for chunk in range(chunks):
        part = tl.load(partial_ptr + chunk * tl.cast(size, tl.int64) + at, mask=at < size, other=0.0)
        total += part.to(tl.float64)
    total = total.to(tl.float32)
    channel, kx, ky = at % co, at // co % KW, at // co // KW + first_ky
    tl.store(dw_ptr + (channel * KH + ky) * KW + kx, total.to(dw_ptr.dtype.element_ty), mask=(at < size) & (ky < KH))
    tl.store(db_ptr + channel, total.to(db_ptr.dtype.element_ty), mask=(at < size) & (ky == KH) & (kx == 0))


def _flags(x: Tensor, weight: Tensor, ho: int, wo: int) -> dict:
    """What all kernels are told of the images."""
    co, _, kh, kw = weight.shape
    c, channels_last = x.shape[1], _common.is_channels_last(x)
    return {
        "M": co // c,
        "KH": kh,
        "KW": kw,
        "VEC": math.gcd(c, 16 // x.element_size()) if channels_last else 1,
        "CHANNELS_LAST": channels_last,
        "WIDE": max(x.numel(), x.shape[0] * co * ho * wo) > _images.INT32_ELEMENTS,
        **_images.OPTIONS,
    }


def _geometry(x: Tensor, ho: int, wo: int, stride: list[int], padding: list[int], dilation: list[int]) -> tuple:
    return *x.shape[1:], ho, wo, *stride, padding[2], padding[0], *dilation


def _unroll(kw: int) -> int:
    return kw if kw <= 7 else 4


def _blocks(c: int, pixels: int, channels_last: bool) -> tuple[int, int]:
    """BLOCK_C, BLOCK_P. Contiguous rows are shifted by every tap: loads are single elements, so tiles are small."""
    if channels_last:
        return _images.blocks(c, pixels, channels_last)
    return (8, 64) if pixels <= 64 else (2, 256)


class Launch(NamedTuple):
    """What the kernels that write y are told."""

    y: Tensor
    block_c: int
    block_p: int
    geometry: tuple
    flags: dict

    def programs(self, chunk: int) -> tuple[int]:
        n, co, ho, wo = self.y.shape
        return (n * triton.cdiv(co, self.block_c) * triton.cdiv(ho * wo, chunk),)


def launch_of(x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> Launch:
    n, co = x.shape[0], weight.shape[0]
    ho, wo = _windows.output_size(x.shape[2:], weight.shape[2:], stride, padding, dilation)
    flags = _flags(x, weight, ho, wo)
    y = torch.empty((n, co, ho, wo), dtype=x.dtype, device=x.device, memory_format=_common.format_of(x))
    block_c, block_p = _blocks(co, ho * wo, flags["CHANNELS_LAST"])
    flags |= {"UNROLL": _unroll(weight.shape[3]), "BLOCK_C": block_c, "BLOCK_P": block_p}
    return Launch(y, block_c, block_p, _geometry(x, ho, wo, stride, padding, dilation), flags)


def depthwise_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    act: int,
) -> Tensor:
    launch = launch_of(x, weight, stride, padding, dilation)
    with _images.on_device(x):
        depthwise_conv2d_kernel[launch.programs(launch.block_p)](
            *(x, weight, weight if bias is None else bias, launch.y, *launch.geometry),
            **launch.flags,
            BIAS=bias is not None,
            ACT=act,
        )
    return launch.y


def _dx(dy: Tensor, x: Tensor, weight: Tensor, stride: list[int], geometry: tuple, flags: dict) -> Tensor:
    dx, (n, c, h, w) = torch.empty_like(x), x.shape
    phase = triton.cdiv(h, stride[0]) * triton.cdiv(w, stride[1])
    block_c, block_p = _blocks(c, phase, flags["CHANNELS_LAST"])
    programs = n * stride[0] * stride[1] * triton.cdiv(c, block_c) * triton.cdiv(phase, block_p)
    depthwise_conv2d_dx_kernel[(programs,)](
        dy, weight, dx, *geometry, UNROLL=_unroll(flags["KW"]), BLOCK_C=block_c, BLOCK_P=block_p, **flags
    )
    return dx


def _dw_db(dy: Tensor, x: Tensor, weight: Tensor, geometry: tuple, flags: dict, need_dw: bool, need_db: bool) -> tuple:
    n, co, ho, wo = dy.shape
    kh, kw = weight.shape[2:]
    rows = first_ky, last_ky = 0 if need_dw else kh, kh + 1 if need_db else kh
    block_kw = triton.next_power_of_2(kw)
    block_c = min(16 if co <= 16 else 32, max(8, WEIGHT_TILE // block_kw // 16)) if flags["CHANNELS_LAST"] else 4
    chunks = max(1, triton.cdiv(n * ho * wo, CHUNK))
    partial = x.new_empty((chunks, last_ky - first_ky, kw, co), dtype=torch.float32)
    dw, db = weight.new_empty(weight.shape if need_dw else (0,)), weight.new_empty(co if need_db else 0)
    depthwise_conv2d_dw_kernel[(chunks * triton.cdiv(co, block_c) * (last_ky - first_ky),)](
        dy,
        x,
        partial,
        n,
        *geometry,
        *rows,
        BLOCK_KW=block_kw,
        CHUNK=CHUNK,
        BLOCK_C=block_c,
        BLOCK_P=WEIGHT_TILE // block_kw // block_c,
        **flags,
    )
    size = partial.numel() // chunks
    depthwise_conv2d_finish_kernel[(triton.cdiv(size, FINISH_BLOCK),)](
        partial, dw, db, co, *rows, chunks, KH=kh, KW=kw, BLOCK=FINISH_BLOCK, **_images.OPTIONS
    )
    return dw, db


def depthwise_conv2d_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    ho, wo = dy.shape[2:]
    flags, geometry = _flags(x, weight, ho, wo), _geometry(x, ho, wo, stride, padding, dilation)
    dx, dw, db = x.new_empty(0), weight.new_empty(0), weight.new_empty(0)
    with _images.on_device(x):
        if need_dx:
            dx = _dx(dy, x, weight, stride, geometry, flags)
        if need_dw or need_db:
            dw, db = _dw_db(dy, x, weight, geometry, flags, need_dw, need_db)
    return dx, dw, db

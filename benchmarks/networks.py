"""The parameters of real networks, as shapes."""

import math

Shapes = list[tuple[int, ...]]


def _norm(c: int) -> Shapes:
    return [(c,), (c,)]


def efficientnet_b0() -> Shapes:
    """5.3 million parameters in 213 tensors, half of them of fewer than a thousand elements."""
    shapes: Shapes = [(32, 3, 3, 3), *_norm(32)]
    # channels, expansion, kernel size, blocks
    stages = (
        (16, 1, 3, 1),
        (24, 6, 3, 2),
        (40, 6, 5, 2),
        (80, 6, 3, 3),
        (112, 6, 5, 3),
        (192, 6, 5, 4),
        (320, 6, 3, 1),
    )
    c = 32
    for out, expansion, k, blocks in stages:
        for _ in range(blocks):
            wide, r = c * expansion, c // 4
            shapes += [(wide, c, 1, 1), *_norm(wide)] if expansion > 1 else []
            shapes += [(wide, 1, k, k), *_norm(wide), (r, wide, 1, 1), (r,), (wide, r, 1, 1), (wide,)]
            shapes += [(out, wide, 1, 1), *_norm(out)]
            c = out
    return [*shapes, (1280, c, 1, 1), *_norm(1280), (1000, 1280), (1000,)]


def vit_base_patch16_224() -> Shapes:
    """86.6 million parameters in 152 tensors."""
    d, hidden = 768, 3072
    block = [*_norm(d), (3 * d, d), (3 * d,), (d, d), (d,), *_norm(d), (hidden, d), (hidden,), (d, hidden), (d,)]
    return [(1, 1, d), (1, 197, d), (d, 3, 16, 16), (d,), *block * 12, *_norm(d), (1000, d), (1000,)]


NETWORKS = {"efficientnet_b0": efficientnet_b0(), "vit_base_patch16_224": vit_base_patch16_224()}


def elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)

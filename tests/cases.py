"""Which cases the image ops are tested on: shapes with their reasons, and a choice that meets every pair of values."""

import itertools
import random

import harness
import torch
from hypothesis import strategies as st

# [N, C, H, W]. 16 is the widest vector in float32, 256 the positions that the kernels add up in one go.
SHAPES = {
    "one_element": (1, 1, 1, 1),
    "one_pixel": (3, 16, 1, 1),  # squeeze-and-excitation after global pooling
    "one_channel": (2, 1, 5, 7),  # channels_last and contiguous are the same memory
    "one_column": (2, 6, 9, 1),
    "odd": (2, 13, 7, 9),  # neither channels nor pixels fill a vector
    "vector_and_one": (2, 17, 4, 4),
    "vectors": (2, 32, 8, 8),  # nothing is left over
    "wide": (1, 67, 3, 3),  # many channels, few pixels, as in a network's last blocks
    "long": (2, 5, 17, 31),  # two whole sums of 256 pixels and a rest
    "empty_batch": (0, 8, 4, 4),
    "no_pixels": (2, 8, 0, 4),  # the mean of nothing is NaN
    "no_channels": (2, 0, 3, 3),
}

# Channels of channels_last images about the ends of what the CPU kernels do in one way: rows of one to six vectors, of
# 8 and 12, rows of 2 KiB and 2304 bytes and a rest of their strips, and rows that take two and three parts.
ROWS = [
    *((torch.float32, c) for c in (8, 16, 24, 32, 40, 48, 64, 72, 96, 128, 511, 512, 575, 577, 642, 2100)),
    *((torch.bfloat16, c) for c in (32, 96, 1023, 1024, 1151, 1153, 4097)),
    *((torch.float64, c) for c in (8, 48, 255, 257, 287, 289)),
]


def pairwise(**choices) -> list[dict]:
    """Cases in which every pair of values of two different choices occurs, far fewer than the full product.

    Greedy: each case starts from the first pair that is still missing and takes, choice by choice, the value that meets
    most of the missing pairs.
    """
    shuffled = random.Random(0)
    names = list(choices)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(choices[names[a]]))
        for j in range(len(choices[names[b]]))
    }
    cases = []
    while missing:
        case = dict(min(missing))
        for index in shuffled.sample(range(len(names)), len(names)):
            if index in case:
                continue
            scores = [
                sum(tuple(sorted([(index, value), other])) in missing for other in case.items())
                for value in range(len(choices[names[index]]))
            ]
            best = max(scores)
            case[index] = shuffled.choice([value for value, score in enumerate(scores) if score == best])
        missing -= set(itertools.combinations(sorted(case.items()), 2))
        cases.append({name: choices[name][case[index]] for index, name in enumerate(names)})
    return cases


def with_relu6(pairs: list[dict]) -> list[dict]:
    """``pairs`` in which relu6 takes every other place of relu: it is relu with one more kink."""
    places = [i for i, case in enumerate(pairs) if case["act"] == "relu"][::2]
    return [case | ({"act": "relu6"} if i in places else {}) for i, case in enumerate(pairs)]


def label(case: dict) -> str:
    """The test id of a case."""
    return "-".join(str(value).removeprefix("torch.") for value in case.values())


@st.composite
def strided(draw) -> dict:
    """Images of any small shape and any strides: dimensions in any order, with gaps, some of them expanded."""
    return {
        "shape": [draw(st.integers(0, largest)) for largest in (3, 20, 6, 6)],
        "order": draw(st.permutations(range(4))),
        "steps": [draw(st.integers(1, 2)) for _ in range(4)],
        "expanded": draw(st.sets(st.integers(0, 3), max_size=2)),
    }


def strided_images(case: dict, dtype, device, seed: int = 0):
    """The images that :func:`strided` describes."""
    shape, order = case["shape"], case["order"]
    stored = [1 if i in case["expanded"] else shape[i] * case["steps"][i] for i in order]
    x = harness.normal(*stored, dtype=dtype, device=device, seed=seed).permute([order.index(i) for i in range(4)])
    x = x[tuple(slice(None, None, 1 if i in case["expanded"] else step) for i, step in enumerate(case["steps"]))]
    return x.expand(shape)

"""The squeeze-and-excitation blocks of real networks at 224 px, as timm names them; equal shapes stand once."""

from dataclasses import dataclass

BATCHES = (16, 64)


@dataclass(frozen=True)
class SELayer:
    """One block: ``c`` channels of ``h`` x ``h`` pixels squeezed to ``r``."""

    label: str
    c: int
    r: int
    h: int
    act: str
    gate: str

    @property
    def model(self) -> str:
        return self.label.split(".")[0]


def _layers(model: str, act: str, gate: str, *blocks: tuple[str, int, int, int]) -> list[SELayer]:
    return [SELayer(f"{model}.{name}.se", c, r, h, act, gate) for name, c, r, h in blocks]


SE_LAYERS = [
    *_layers(
        *("efficientnet_b0", "silu", "sigmoid"),
        ("blocks.0.0", 32, 8, 112),
        ("blocks.1.0", 96, 4, 56),
        ("blocks.1.1", 144, 6, 56),
        ("blocks.2.0", 144, 6, 28),
        ("blocks.2.1", 240, 10, 28),
        ("blocks.3.0", 240, 10, 14),
        ("blocks.3.1", 480, 20, 14),
        ("blocks.4.1", 672, 28, 14),
        ("blocks.5.0", 672, 28, 7),
        ("blocks.5.1", 1152, 48, 7),
    ),
    *_layers(
        *("mobilenetv3_large_100", "relu", "hard_sigmoid"),
        ("blocks.2.0", 72, 24, 28),
        ("blocks.2.1", 120, 32, 28),
        ("blocks.4.0", 480, 120, 14),
        ("blocks.4.1", 672, 168, 14),
        ("blocks.5.0", 672, 168, 7),
        ("blocks.5.1", 960, 240, 7),
    ),
    *_layers(
        *("regnety_008", "relu", "sigmoid"),
        ("s1.b1", 64, 8, 56),
        ("s2.b1", 128, 16, 28),
        ("s2.b2", 128, 32, 28),
        ("s3.b1", 320, 32, 14),
        ("s3.b2", 320, 80, 14),
        ("s4.b1", 768, 80, 7),
        ("s4.b2", 768, 192, 7),
    ),
    *_layers(
        *("seresnet50", "relu", "sigmoid"),
        ("layer1.0", 256, 16, 56),
        ("layer2.0", 512, 32, 28),
        ("layer3.0", 1024, 64, 14),
        ("layer4.0", 2048, 128, 7),
    ),
]

# Pooling and scaling alone see only the images: one layer per (c, h), of the smallest and the largest network.
IMAGE_LAYERS = [
    layer
    for i, layer in enumerate(SE_LAYERS)
    if layer.model in ("efficientnet_b0", "seresnet50")
    and (layer.c, layer.h) not in [(other.c, other.h) for other in SE_LAYERS[:i]]
]

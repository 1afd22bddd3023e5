"""What a run leaves in memory: numbers of its steps and epochs."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Epoch:
    """What one epoch brought. Losses and metrics are means over samples; the training loss is that of the steps, taken
    while the weights move; ``metrics`` are those of the validation. ``seconds`` is the training alone."""

    epoch: int
    train_loss: float
    metrics: dict[str, float]
    seconds: float
    images_per_second: float

    @property
    def valid_loss(self) -> float | None:
        return self.metrics.get("loss")

    @property
    def valid_accuracy(self) -> float | None:
        return self.metrics.get("accuracy")


@dataclass
class History:
    """What a run brought: one entry per epoch, the loss of every step (on several GPUs: of this one's part)."""

    epochs: list[Epoch] = field(default_factory=list)
    step_losses: list[float] = field(default_factory=list)

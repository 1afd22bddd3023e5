r"""Gradient accumulation: one update from several micro-batches, on one process or many, as from their union.

A loss is a mean over its own micro-batch. With weights :math:`w_i` (samples, tokens) the gradient of the union is

.. math:: g = \sum_i w_i g_i \Big/ \sum_i w_i

The sum of the weights is known only when the last micro-batch of the last process has arrived. So each loss is
multiplied by :math:`w_i / (k w_0)`, with :math:`k` micro-batches per group and the weight :math:`w_0` of the first one
of the run: exact for full groups of equal batches. What is left, :math:`k w_0 / \sum_i w_i`, multiplies the gradients
once, and only where it is not 1.
"""

from dataclasses import dataclass

from fusedtrain.train.errors import require_count


@dataclass(frozen=True)
class Accumulation:
    """How many micro-batches make one update.

    Args:
        accumulate: micro-batches per update and process; the last group of an epoch may be shorter.

    Raises:
        InputError: ``accumulate`` is no whole number of at least 1.
    """

    accumulate: int = 1

    def __post_init__(self):
        require_count("accumulate", self.accumulate)


class Group:
    """The bookkeeping of the group under way.

    Args:
        size: micro-batches per group.
        processes: whose gradients are averaged.
    """

    def __init__(self, size: int, processes: int):
        self.size, self.processes = size, processes
        self.nominal: float | None = None  # w_0, the same on all processes
        self.done, self.weight = 0, 0.0
        # A group of one micro-batch on one process is its own union.
        self.alone = size == 1 and processes == 1

    def share(self, weight: float) -> float:
        """Returns the factor of the loss of a micro-batch of this weight."""
        return 1.0 if self.alone else weight / (self.size * self.nominal)

    def add(self, weight: float) -> None:
        """Counts a micro-batch."""
        self.done += 1
        self.weight += weight

    def correction(self, total: float) -> float:
        """Returns the factor of the averaged gradients, given the weight of the group over all processes."""
        return 1.0 if self.alone or not total else self.size * self.nominal * self.processes / total

    def clear(self) -> None:
        """Begins the next group."""
        self.done, self.weight = 0, 0.0

    def state_dict(self) -> dict:
        return {"size": self.size, "nominal": self.nominal, "done": self.done, "weight": self.weight}

    def load_state_dict(self, state: dict) -> None:
        self.nominal, self.done, self.weight = state["nominal"], state["done"], state["weight"]

"""What every remedy is, and what they share."""

from torch import Tensor, nn

from fusedtrain.diagnose.drive import Driver
from fusedtrain.diagnose.lines import Change, before_optimizer

CLASSES = ("bitwise", "last bit", "tolerance")


class Remedy:
    """One change of a run.

    Attributes:
        name: short and unique, as in the JSON report.
        kind: one of CLASSES.
        how: what to do, in one sentence.
    """

    name = kind = how = ""
    on_loader = False
    outside = False  # it holds from the start of a process or not at all: tried in fresh ones
    threads: int | None = None  # that operations then run on, where it changes their number
    rehearsed = False  # tried on the model alone first: it may not be able to run so

    def apply(self, driver: Driver) -> None:
        """Puts the change in force, between two steps."""

    def undo(self, driver: Driver) -> None:
        """Takes it back."""

    def changes(self, driver: Driver) -> list[Change]:
        """The user's lines to edit, where they are known."""
        return []


def models(driver: Driver) -> list[nn.Module]:
    """Returns the outermost modules with parameters: the models, not the losses."""
    return [root for root in driver.instrument.roots if any(True for _ in root.parameters())]


def new_line(driver: Driver, line: str) -> list[Change]:
    """The user's lines that make the optimizers, with a change of the model in front."""
    sites = driver.instrument.sites
    found = [before_optimizer(sites.get(id(o)), type(o).__name__, line) for o in driver.instrument.optimizers]
    return [change for change in found if change]


def change_tensor(driver: Driver, p: Tensor, convert) -> None:
    """Gives a parameter, its gradient and what optimizers keep for it another layout or dtype."""
    grad, p.grad = p.grad, None
    p.data = convert(p.data)
    p.grad = None if grad is None else convert(grad)
    for optimizer in driver.instrument.optimizers:
        state = optimizer.state.get(p, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == p.shape and value.dim() > 0:
                state[name] = convert(value)

"""The tensors of an optimizer step as a table of addresses, gathered in C++: the dispatcher takes longer for a list of
small tensors than their update takes.

A table is filled anew for each step and holds every tensor it points to; nothing is cached that could go stale.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fusedtrain import _extension
from fusedtrain.backend import select
from fusedtrain.ops import _codes
from fusedtrain.ops.grad_norm import IMPLS as NORMS
from fusedtrain.ops.optimizer_step import IMPLS as STEPS
from fusedtrain.ops.optimizer_step import RULES, Options

_GATHERER = _extension.GATHERER


class Table(NamedTuple):
    """Rows of csrc/optimizer_step.h's StepTensor as bytes, and the tensors they point to."""

    rows: Tensor
    params: list[Tensor]
    grads: list[Tensor]


def usable() -> bool:
    """False where nothing can be gathered, and where calls are traced: tracers see lists of tensors, not addresses."""
    return _GATHERER is not None and not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0


def gather(
    params: list,
    state: dict,
    rule: str,
    step: str | Tensor,
    narrow: bool,
    ema: bool,
    exact: str | None = None,
    kahan: bool = False,
) -> Table | None:
    """The table of those of ``params`` that have a gradient, their states by the rule's names.

    ``step`` is the name of the state that counts updates, or one count for all; ``narrow`` takes states of other dtypes
    than their parameter's; ``exact`` is the name of what :func:`optimizer_step_` calls so, in the dtype of the
    parameters with ``kahan``.

    None where neither the CPU nor the CUDA kernels run or a tensor is not what they take: a state is missing, a
    gradient has other strides than its parameter, a tensor has gaps, is a subclass or on another device. The lists then
    make it so, or say what is wrong.
    """
    info = RULES[rule]
    gathered = _GATHERER.gather(
        params, state, info.states, info.scalars, step if info.counts else None, narrow, ema, exact, not kahan
    )
    if gathered is None:
        return None
    rows, params, grads = gathered
    for op, impls in (("grad_norm", NORMS), ("optimizer_step", STEPS)) if params else ():
        if select(op, impls, params[0]) is not impls.get(params[0].device.type):
            return None
    return Table(torch.frombuffer(rows, dtype=torch.uint8) if params else torch.empty(0), params, grads)


def grad_norm(tables: list[Table]) -> Tensor:
    """:func:`fusedtrain.ops.grad_norm` of the gradients of all tables."""
    return torch.ops.fusedtrain.grad_norm_table([table.rows for table in tables], tables[0].params[0])


def optimizer_step_(table: Table, *, rounding: str = "nearest", seed: int | None = None, **options) -> None:
    """:func:`fusedtrain.ops.optimizer_step_` on a table."""
    o = Options.of(**options)
    torch.ops.fusedtrain.optimizer_step_table_(table.rows, table.params[0], *o, _codes.ROUNDINGS.index(rounding), seed)
    torch.autograd.graph.increment_version([*table.params, *table.grads] if o.zero_grads else table.params)

"""Activation checkpointing by a budget: measured on a part of a batch, before the run begins."""

from collections.abc import Iterable

from fusedtrain.train import activation
from fusedtrain.train.nonfinite import untouched


def fit(trainer, train: Iterable) -> None:
    """Lets as many blocks compute their activations again as the budget of the configuration asks for, if any."""
    budget, model = trainer.config.activation_checkpointing.activation_budget_gib, trainer.model
    if not budget:
        return
    activation.unwrap(model)
    batch = trainer.to_device(next(iter(train)))
    model.train()
    with trainer.bare(), untouched(model):
        total, blocks = activation.measure_batch(model, trainer.training_step, batch)
    names = trainer.world.decide(activation.choose(total, blocks, int(budget * 2**30)))
    activation.wrap(model, names)
    if trainer.world.rank == 0:
        kept = f"activations of {total / 2**30:.3g} GiB"
        of = len({block.name for block in blocks})
        print(f"{trainer.title}  {kept}: {len(names)} of {of} blocks are computed again", flush=True)

"""The validation of a run."""

import itertools
from collections.abc import Iterable

from fusedtrain.train.feed import Feed
from fusedtrain.train.rng import rng_state, set_rng_state


def evaluate(trainer, batches: Iterable) -> dict[str, float]:
    """Returns the means of the metrics over all samples of all processes; training goes on as if nothing had been."""
    model, world, state = trainer.model, trainer.world, rng_state()  # before anything asks the loader: it draws a seed
    training, feed, sums, total = model.training, Feed(batches, world, "validation"), {}, 0.0
    position = feed.to_start()
    model.eval()
    world.share_buffers(model)
    try:
        with trainer.averaged_weights(), trainer.no_gradients():
            feed.begin(trainer._stop.wait)
            for index in itertools.count():
                item = trainer._stop.wait(feed.next, index)
                if item is None:
                    break
                trainer.reading = feed, index
                batch, counts = item
                batch = trainer.to_device(batch)
                weight = float(trainer.weight(batch)) if counts else 0.0
                total += weight
                for name, value in trainer.validation_step(batch).items():
                    value = value.double().sum() * bool(counts) if value.dim() else value.double() * weight
                    sums[name] = sums[name] + value if name in sums else value
    finally:
        trainer.reading = None
        set_rng_state(state)
        feed.restore(position)
        model.train(training)
    total, *values = world.sum(total, *map(float, sums.values()))
    return {name: value / total for name, value in zip(sums, values)}

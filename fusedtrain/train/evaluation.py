"""The validation of a run."""

import itertools
import math
from collections.abc import Iterable

import torch

from fusedtrain.train.errors import require
from fusedtrain.train.feed import Feed
from fusedtrain.train.preemption import Preempted
from fusedtrain.train.rng import rng_state, set_rng_state


def evaluate(trainer, batches: Iterable) -> dict[str, float]:
    """Returns the means of the metrics over all samples of all processes, NaN where none counts; training goes on as if
    nothing had been.

    Raises:
        InputError: the data hold no batch.
    """
    model, world, state = trainer.model, trainer.world, rng_state()  # before anything asks the loader: it draws a seed
    modes, feed, sums, counts = {m: m.training for m in model.modules()}, Feed(batches, world, "validation"), {}, {}
    position = feed.to_start()
    model.eval()
    world.share_buffers(model)
    try:
        with feed.apart(getattr(trainer, "feed", None)), trainer.averaged_weights(), trainer.no_gradients():
            feed.begin(trainer._stop.wait)
            for index in itertools.count():
                item = trainer._stop.wait(feed.next, index)
                if item is None:
                    require(index > 0, "the validation data hold no batch")
                    break
                trainer.reading = feed, index
                batch, real = item
                batch = trainer.to_device(batch)
                weight = float(trainer.weight(batch)) if real else 0.0
                for name, value in trainer.validation_step(batch).items():
                    value = torch.as_tensor(value, dtype=torch.float64)
                    is_mean = not value.dim()
                    count = weight if is_mean else value.numel() * bool(real)
                    value = value * weight if is_mean else value.sum()
                    # What does not count may be anything: a mean over nothing is NaN.
                    sums[name] = sums.get(name, 0.0) + (value if count else 0.0)
                    counts[name] = counts.get(name, 0.0) + count
    except Preempted:  # the run that goes on evaluates again
        feed.set_rng_state(feed.at_start)
        raise
    finally:
        trainer.reading = None
        set_rng_state(state)
        feed.restore(position)
        model.train(modes[model])
        for module, training in modes.items():  # layers that are held still stay so
            module.training = training
    # A process may lack some: what is measured per class, for instance, of classes that it has not seen.
    names = list(dict.fromkeys(itertools.chain.from_iterable(world.gather(list(sums)))))
    found = world.sum(*(float(part.get(name, 0.0)) for part in (sums, counts) for name in names))
    return {name: s / n if n else math.nan for name, s, n in zip(names, found, found[len(names) :])}

"""The points of a run at which other code is called."""

import warnings


class Callback:
    """Does nothing at every point of a run; subclass it and override some. ``trainer`` is the running Trainer.

    - ``on_epoch_start`` finds the model in training. Layers that it puts into evaluation, such as normalisations whose
      statistics are to stay, keep that for the epoch. Here parameters may begin to learn, on one process, and groups of
      them may join the optimizer, with the peaks of their rates. A run that goes on from a checkpoint comes to the
      start of its epoch again, with the groups that had joined before it. What else lets parameters learn must do so
      in every epoch from one on (``epoch >= 3``), not in one alone.
    - ``on_step_end`` comes after every update, applied or skipped: ``trainer.step_count`` counts them, and
      ``trainer.last_loss`` is its loss.
    - ``on_validation_end`` gets the metrics of the validation, ``on_epoch_end`` the :class:`~fusedtrain.train.Epoch`.
    - ``on_fit_end`` comes also when the run ends by an error, which it gets.
    """

    def on_fit_start(self, trainer) -> None: ...
    def on_epoch_start(self, trainer, epoch: int) -> None: ...
    def on_step_end(self, trainer) -> None: ...
    def on_validation_end(self, trainer, metrics: dict[str, float]) -> None: ...
    def on_epoch_end(self, trainer, epoch) -> None: ...
    def on_fit_end(self, trainer, error: BaseException | None) -> None: ...


POINTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Callbacks:
    """Calls those callbacks that override a point; the others cost nothing."""

    def __init__(self, callbacks):
        for kind in {type(c) for c in callbacks}:
            names = {name for name in dir(kind) if name.startswith("on_") and callable(getattr(kind, name))}
            for name in sorted(names - {*POINTS}):  # of another trainer's callbacks, or misspelt
                points = f"the points of a run are {', '.join(POINTS)}"
                warnings.warn(f"{kind.__name__}.{name} is never called: {points}", stacklevel=3)
        for point in POINTS:
            own = [getattr(c, point) for c in callbacks]
            own = [f for f in own if getattr(f, "__func__", None) is not getattr(Callback, point)]
            setattr(self, point, _call_all(own) if own else None)

    def call(self, point: str, *args) -> None:
        function = getattr(self, point)
        if function is not None:
            function(*args)


def _call_all(functions):
    def call(*args) -> None:
        for function in functions:
            function(*args)

    return call

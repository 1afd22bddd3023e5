"""Finding by measurement what a training should be run with: batch size, workers, learning rate, options, backends."""

from fusedtrain.tune.backend import tune_backend
from fusedtrain.tune.batch_size import tune_batch_size
from fusedtrain.tune.lr import tune_lr
from fusedtrain.tune.search import Space, read_space, search
from fusedtrain.tune.target import Target, TuneError

__all__ = ["Space", "Target", "TuneError", "read_space", "search", "tune_backend", "tune_batch_size", "tune_lr"]

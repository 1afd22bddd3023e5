"""The training loop and its parts."""

from fusedtrain.train.config import InputError, TrainConfig
from fusedtrain.train.data import Batches, load_digits
from fusedtrain.train.model import SmallNet
from fusedtrain.train.trainer import Epoch, History, Trainer

__all__ = ["Batches", "Epoch", "History", "InputError", "SmallNet", "TrainConfig", "Trainer", "load_digits"]

"""Optimizers whose whole step is one pass over memory, with the arguments and the states of torch's and timm's."""

from fusedtrain.optim.adamw import Adam, AdamW
from fusedtrain.optim.lion import Lion
from fusedtrain.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Lion"]

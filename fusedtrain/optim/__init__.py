"""Optimizers whose whole step is one pass over memory, with the arguments and the states of torch's and timm's."""

from fusedtrain.optim._groups import param_groups_weight_decay
from fusedtrain.optim._timm import register_with_timm
from fusedtrain.optim.adamw import Adam, AdamW
from fusedtrain.optim.adan import Adan
from fusedtrain.optim.lamb import Lamb
from fusedtrain.optim.lion import Lion
from fusedtrain.optim.novograd import NovoGrad
from fusedtrain.optim.rmsprop import RMSprop, RMSpropTF
from fusedtrain.optim.sgd import SGD

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Adan",
    "Lamb",
    "Lion",
    "NovoGrad",
    "RMSprop",
    "RMSpropTF",
    "param_groups_weight_decay",
    "register_with_timm",
]

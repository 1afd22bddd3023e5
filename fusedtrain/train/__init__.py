"""The training loop and its parts."""

from fusedtrain.train.accumulation import Accumulation
from fusedtrain.train.activation import ActivationCheckpointing
from fusedtrain.train.callbacks import Callback
from fusedtrain.train.checkpoint import CheckpointError, CheckpointStore
from fusedtrain.train.config import TrainConfig
from fusedtrain.train.data import Batches, load_digits
from fusedtrain.train.distributed import Distributed
from fusedtrain.train.errors import InputError
from fusedtrain.train.groups import FrozenNorms, freeze, unfreeze
from fusedtrain.train.logging import Logging
from fusedtrain.train.model import SmallNet
from fusedtrain.train.nonfinite import NonFiniteError
from fusedtrain.train.precision import Precision
from fusedtrain.train.preemption import Preempted, StopSignals
from fusedtrain.train.profile import Profile
from fusedtrain.train.records import Epoch, History
from fusedtrain.train.rng import SeededDataset
from fusedtrain.train.sampler import EpochSampler
from fusedtrain.train.saving import Checkpoint
from fusedtrain.train.schedule import Schedule
from fusedtrain.train.stopping import EarlyStopping
from fusedtrain.train.trainer import Trainer

__all__ = [
    "Accumulation",
    "ActivationCheckpointing",
    "Batches",
    "Callback",
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "Distributed",
    "EarlyStopping",
    "Epoch",
    "EpochSampler",
    "FrozenNorms",
    "History",
    "InputError",
    "Logging",
    "NonFiniteError",
    "Precision",
    "Preempted",
    "Profile",
    "Schedule",
    "SeededDataset",
    "SmallNet",
    "StopSignals",
    "TrainConfig",
    "Trainer",
    "freeze",
    "load_digits",
    "unfreeze",
]

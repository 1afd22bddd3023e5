"""Data on their way to the device: datasets, a loader that chooses its workers, sample cache, staging, prefetch."""

from fusedtrain.data.cache import SampleCache
from fusedtrain.data.dataloader import Loader, loader
from fusedtrain.data.embedded import digits
from fusedtrain.data.faults import SampleError, WorkerError
from fusedtrain.data.folder import ImageFolder
from fusedtrain.data.prefetch import DevicePrefetcher
from fusedtrain.data.staging import Staging, StagingError
from fusedtrain.data.table import TableDataset

__all__ = [
    "DevicePrefetcher",
    "ImageFolder",
    "Loader",
    "SampleCache",
    "SampleError",
    "Staging",
    "StagingError",
    "TableDataset",
    "WorkerError",
    "digits",
    "loader",
]

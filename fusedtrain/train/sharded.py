"""Checkpoints of a state that is spread over ranks: every rank writes its own part, any number of ranks reads it.

torch.distributed.checkpoint decides who writes what and which rank reads which part of which file. Its own files are
pickles, which execute code and are not verified, so reading and writing are done here, in the format of
:mod:`fusedtrain.train.checkpoint_file`: one ``.shard-<rank>.safetensors`` per rank, and the usual file, with the hashes
of the shards, that makes the checkpoint valid when it gets its name.
"""

import contextlib
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from fusedtrain._files import write_atomic
from fusedtrain.train import checkpoint_file
from fusedtrain.train.checkpoint import CheckpointStore, Loaded, _not_written
from fusedtrain.train.checkpoint_file import CheckpointError, is_part
from fusedtrain.train.state_tree import DTYPES, NAMES, flatten, unflatten

KINDS = (Tensor, nn.Parameter, DTensor)


class ShardedCheckpointStore(CheckpointStore):
    """A :class:`CheckpointStore` for states with DTensors, as FSDP2 has them. All ranks call every method together.

    The folder must be shared by all ranks. Without torch.distributed it is one rank, so that a run of many ranks goes
    on with one; :meth:`load` of the base class reads it too, every tensor whole.

    Args:
        directory, keep, may_be_nonfinite: as :class:`CheckpointStore`.
        asynchronous: likewise; the threads of all ranks talk over a gloo group of their own.
    """

    def __init__(self, directory: Path | str, keep: int | None = 3, asynchronous: bool = False, may_be_nonfinite=()):
        super().__init__(directory, keep, asynchronous, may_be_nonfinite)
        self._rank, self._world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._writers = dist.new_group(backend="gloo") if asynchronous and self._world > 1 else None

    def save(self, step: int, state: dict) -> Path:
        """Saves ``state`` as the newest checkpoint; tensors that are not DTensors must be alike on all ranks, and other
        values are those of rank 0.

        Raises:
            CheckpointError: on all ranks, when one could not write its part. The earlier checkpoints are as they were.
        """
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        self.wait()
        tree, tensors = flatten(state, KINDS)
        path = self.directory / self._agree(lambda: self._new_name(step))
        if self.asynchronous:
            tensors = {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}
            self._start(path, step, tree, tensors)
        else:
            self._write(path, step, tree, tensors)
        return path

    def check(self) -> None:
        """As in the base class, with a collective call while something is written: all ranks raise at the same step."""
        if self._writing is not None and all(self._gather(self._writing.done())):
            self.wait()

    def _write(self, path: Path, step: int, tree, tensors: dict) -> None:
        writer = _Writer(path, self._rank, step, tree, self.may_be_nonfinite)
        group = {"no_dist": True} if self._world == 1 else {"process_group": self._writers}
        try:
            with _quiet():
                dcp.save(tensors, storage_writer=writer, planner=_save_planner(), **group)
        except dcp.CheckpointException as error:
            raise _not_written(path, step, _reason(error)) from error
        self._agree(lambda: self._finish(path, step), self._writers)

    def load_into(self, state: dict, step: int | None = None, may_lack: str | None = None) -> tuple[dict, Loaded]:
        """Fills the tensors of ``state`` in place from the newest checkpoint that is whole.

        Every rank verifies a part of the shards before anything is changed.

        Args:
            state: nested as it was saved, with the tensors of this run: sharded in any way over any number of ranks.
            step: take the newest of this step instead.
            may_lack: path of a part of the state whose entries need not stand in the file: they are left out.

        Returns:
            ``state`` with the other values from the file, and where it came from with what was passed over and why.

        Raises:
            CheckpointError: there is no checkpoint that is whole, or its tensors are not those of ``state``.
        """
        self.wait()
        passed_over = []
        for path in self._agree(lambda: [one for one in self._newest_first() if step in (None, _step(one))]):
            problems = checkpoint_file.problems(path, self._rank, self._world)
            problems = list(dict.fromkeys(problem for part in self._gather(problems) for problem in part))
            if not problems:
                return self._fill(path, state, may_lack), Loaded(path, _step(path), tuple(passed_over))
            passed_over.append((path, problems[0]))
        raise self._none_is_whole(step, passed_over)

    def _fill(self, path: Path, state: dict, may_lack: str | None) -> dict:
        with open(path, "rb") as file:
            file = checkpoint_file.Reader(file)
        if not file.shards:
            raise CheckpointError(
                f"{path.name} was saved by the strategy ddp: go on with it, or begin anew from this file's weights"
            )
        tensors, stored = flatten(state, KINDS)[1], file.shards["tensors"]
        if may_lack is not None:
            entries = {_entry(name) for name in stored}
            tensors = {n: t for n, t in tensors.items() if not is_part(n, (may_lack,)) or _entry(n) in entries}
        for what, names in (("has no", tensors.keys() - stored.keys()), ("has too", stored.keys() - tensors.keys())):
            if names:
                raise CheckpointError(f"{path.name} {what} {', '.join(sorted(names)[:5])}")
        for name, t in tensors.items():
            if list(t.shape) != stored[name]["shape"]:
                raise CheckpointError(f"{path.name}: {name} has shape {stored[name]['shape']}, not {list(t.shape)}")
        with checkpoint_file.ShardReader(path.parent, file.shards) as shards:
            try:
                with _quiet():
                    dcp.load(tensors, storage_reader=_Reader(file.shards, shards), no_dist=self._world == 1)
            except dcp.CheckpointException as error:
                raise CheckpointError(f"{path.name}: {_reason(error)}") from error
        return unflatten(file.tree, tensors)

    def _new_name(self, step: int) -> str:
        self._make_folder()
        return f"checkpoint-{self._next_number():06d}-step-{step}.safetensors"

    def _finish(self, path: Path, step: int) -> None:
        self._point(path, step)
        self._prune()

    def _agree(self, decide, group: dist.ProcessGroup | None = None):
        """What ``decide`` returns on rank 0, or its error on all ranks."""
        result = [None]
        if self._rank == 0:
            try:
                result = [(decide(), None)]
            except OSError as error:
                result = [(None, error.strerror)]
        if self._world > 1:
            dist.broadcast_object_list(result, group=group)
        value, reason = result[0]
        if reason is not None:
            raise CheckpointError(f"no checkpoint can be written to {self.directory}: {reason}")
        return value

    def _gather(self, value) -> list:
        values = [value] * self._world
        if self._world > 1:
            dist.all_gather_object(values, value)
        return values


@contextlib.contextmanager
def _quiet():
    """torch warns of what no_dist asks for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _step(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _entry(name: str) -> str:
    """What a tensor is a part of, such as the state of one parameter."""
    return name.rpartition("/")[0]


def _reason(error: dcp.CheckpointException) -> str:
    """The first line of the first rank's error."""
    cause = next(iter(error.failures.values()))[0]
    return (cause.strerror if isinstance(cause, OSError) else None) or str(cause).partition("\n")[0]


def _save_planner() -> dcp.DefaultSavePlanner:
    return dcp.DefaultSavePlanner(flatten_state_dict=False)


class _PlansAsTheyAre:
    """What torch asks of a writer and a reader, and both answer alike."""

    def reset(self, checkpoint_id=None) -> None:
        pass

    def prepare_local_plan(self, plan):
        return plan

    def prepare_global_plan(self, plans):
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool:
        return False  # made by ShardedCheckpointStore, never from a path


class _Writer(_PlansAsTheyAre, StorageWriter):
    """One rank's part in one shard, then, on the coordinator, the file that ties them together."""

    def __init__(self, path: Path, rank: int, step: int, tree, may_be_nonfinite: frozenset[str]):
        self._path, self._rank, self._step, self._tree = path, rank, step, tree
        self._may_be_nonfinite = may_be_nonfinite

    def write_data(self, plan, planner) -> Future[list[WriteResult]]:
        tensors, may_be_nonfinite = {}, []
        for item in plan.items:
            name = f"{item.index.fqn}@{','.join(map(str, item.index.offset or ()))}"
            tensors[name] = planner.resolve_data(item).detach()
            if checkpoint_file.is_part(item.index.fqn, self._may_be_nonfinite):
                may_be_nonfinite.append(name)
        shard = self._path.with_name(f"{self._path.stem}.shard-{self._rank:05d}.safetensors")
        digest = ""

        def fill(file) -> None:
            nonlocal digest
            digest = checkpoint_file.write(file, self._step, {}, tensors, may_be_nonfinite=may_be_nonfinite)

        write_atomic(shard, fill)
        results = [
            WriteResult(item.index, tensors[name].nbytes, (shard.name, digest, name))
            for item, name in zip(plan.items, tensors)
        ]
        future: Future = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for part in results for result in part}
        files = {file: digest for file, digest, _ in places.values()}
        missing = [file for file in files if not (self._path.parent / file).exists()]
        if missing:
            raise CheckpointError(f"shard {missing[0]} is not there for rank 0: the folder must be shared by all ranks")
        tensors = {}
        for name, field in metadata.state_dict_metadata.items():
            chunks = []
            for chunk in field.chunks:
                file, _, stored = places[MetadataIndex(name, chunk.offsets)]
                place = {"file": file, "name": stored}
                chunks.append({"offsets": list(chunk.offsets), "shape": list(chunk.sizes), **place})
            tensors[name] = {"dtype": NAMES[field.properties.dtype], "shape": list(field.size), "chunks": chunks}
        shards = {"files": files, "tensors": tensors}
        write_atomic(self._path, lambda file: checkpoint_file.write(file, self._step, self._tree, {}, shards=shards))

    def set_up_storage_writer(self, is_coordinator: bool, *args, **kwargs) -> None:
        pass


class _Reader(_PlansAsTheyAre, StorageReader):
    def __init__(self, shards: dict, reader: checkpoint_file.ShardReader):
        self._tensors, self._reader = shards["tensors"], reader

    def read_metadata(self, *args, **kwargs) -> Metadata:
        fields = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=DTYPES[field["dtype"]]),
                torch.Size(field["shape"]),
                [ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["shape"])) for c in field["chunks"]],
            )
            for name, field in self._tensors.items()
        }
        return Metadata(fields)

    def read_data(self, plan, planner) -> Future[None]:
        for item in plan.items:
            index = item.storage_index
            chunks = self._tensors[index.fqn]["chunks"]
            part = self._reader.chunk(next(c for c in chunks if torch.Size(c["offsets"]) == index.offset))
            for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths)):
                part = part.narrow(dim, start, size)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        future: Future = Future()
        future.set_result(None)
        return future

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args, **kwargs) -> None:
        pass

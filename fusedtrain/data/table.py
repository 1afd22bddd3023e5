"""Rows of Parquet and Arrow files, read in pieces, shuffled, and shared out over ranks and workers."""

import bisect
import glob
import hashlib
import itertools
import numbers
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from fusedtrain._extras import need

ARROW = (".arrow", ".arrows", ".feather")
SUFFIXES = (".parquet", *ARROW)
STREAM = b"\xff\xff\xff\xff"  # what begins a stream; a file begins with its name
OPEN_FILES = 8  # kept open per process: a shuffled order comes back to the same files


class _Piece(NamedTuple):
    """Rows ``[start, stop)`` of one row group (record batch) of one file."""

    file: int
    group: int
    start: int
    stop: int


class TableDataset(IterableDataset):
    """Rows of Parquet (``.parquet``) or Arrow IPC (``.arrow``, ``.arrows``, ``.feather``) files as samples.

    Each row is a dict ``{column: value}``: numbers and booleans as 0-dimensional tensors, lists of them as tensors
    ``[K]``, all else, and lists with a null in them, as Python values (str, bytes, datetime, None).

    Args:
        paths: files, folders, patterns (``"data/*.parquet"``) or fsspec URLs of any of these
            (``"s3://bucket/*.parquet"``), one or many. Streams of Arrow are read from the local disk alone.
        columns: which to read, one or many, and no others from the disk; None reads all.
        batch_rows: rows that are read and decoded at a time.
        batch_size: None gives rows. A number gives dicts of whole batches, of numbers as tensors ``[B]``,
            lists of a fixed size as ``[B, K]`` and all else, columns with a null too, as Python lists, without a Python
            object per row; use ``loader(dataset, batch_size=None)`` then.
        shuffle: every epoch has an order of its own: the row groups are permuted, and their rows within stretches of
            ``shuffle_rows``.
        shuffle_rows: rows held in memory by each worker to shuffle them.
        seed: of the orders; epoch ``e`` is a function of (seed, e) and the number of workers alone.
        staging: a :class:`~fusedtrain.data.Staging` that copies remote files to the local disk ahead of their use; with
            ``shuffle`` the files are permuted and then the row groups within each, so that each is needed once.
        transform: takes the row (or batch), returns the sample.
        rank, world_size: which part of the rows this process gives; None asks torch.distributed, or takes all.

    Raises:
        ValueError: no file matches, a column is missing or has another type than in another file, a file is broken
            (named), or a number is out of range.
        ModuleNotFoundError: pyarrow, or fsspec for a URL, is missing.

    Rows are shared out evenly: the order of an epoch is cut into ``world_size * workers`` stretches of equal length, up
    to one row, whatever the number of rows; none is given twice or lost. Reading costs at most two row groups per
    worker more than the rows asked for. The number of workers changes a rank's order, not the number of its rows.
    """

    epoch_is_shared = True

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        columns: str | Sequence[str] | None = None,
        batch_rows: int = 1000,
        batch_size: int | None = None,
        shuffle: bool = False,
        shuffle_rows: int = 10_000,
        seed: int = 0,
        staging=None,
        transform: Callable | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ):
        need("pyarrow", "data")
        for name, value in {"batch_rows": batch_rows, "batch_size": batch_size, "shuffle_rows": shuffle_rows}.items():
            if value is not None and (not isinstance(value, numbers.Integral) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        self._options = {} if staging is None else staging.storage_options
        self.paths = _expand([paths] if isinstance(paths, (str, Path)) else paths, self._options)
        self.columns = [columns] if isinstance(columns, str) else None if columns is None else list(columns)
        if self.columns == []:
            raise ValueError("columns must name at least one column")
        self.batch_rows, self.batch_size, self.transform = int(batch_rows), batch_size and int(batch_size), transform
        # As Python's: numbers of NumPy have another repr, and orders are made of these.
        self.shuffle, self.shuffle_rows, self.seed = shuffle, int(shuffle_rows), operator.index(seed)
        self.rank, self.world_size = _place(rank, world_size)
        self.staging = staging
        self._files: dict[str, _File] = {}
        self._opened_in = os.getpid()
        self._types: dict = {}  # of the columns, with the file in which they were found
        self.groups = [(i, g, n) for i in range(len(self.paths)) for g, n in enumerate(self._inspect(i))]
        self.rows = sum(rows for _, _, rows in self.groups)
        self.epoch = self.position = 0
        # In shared memory, so that workers that stay alive see it: epoch, batches to pass over, their size, drop_last.
        self._now = torch.tensor([0, 0, 1, 0], device="cpu").share_memory_()

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_files": {}}  # open files stay here

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._now.share_memory_()  # a copy has memory of its own, which its workers are to share

    def __repr__(self) -> str:
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        names = ("columns", "batch_rows", "batch_size", "shuffle", "shuffle_rows", "transform")
        options = [f"{name}={getattr(self, name)!r}" for name in names]
        return f"TableDataset({self.paths[0]}{more}, rows={self.rows}, {', '.join(options)})"

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of ``epoch``; where that is the epoch at hand, stays where it is in it."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0
            self._now[0], self._now[1] = epoch, 0

    def advance(self, steps: int = 1) -> None:
        """Notes that the next batches of the loader are used up."""
        self.position += steps

    def begin_pass(self, batch_size: int | None, drop_last: bool) -> None:
        """Lets the next pass begin at the position; called by the loader, before its workers look."""
        self._now[1], self._now[2], self._now[3] = self.position, batch_size or self.batch_size or 1, drop_last

    def state_dict(self, workers: int, batch_size: int | None = None, drop_last: bool = False) -> dict:
        """Returns the position in the epoch, in batches of a loader with so many workers."""
        order = self._order_of(workers) | self._steps_of(batch_size, drop_last)
        return {**order, "epoch": self.epoch, "position": self.position}

    def load_state_dict(
        self, state: dict, workers: int, batch_size: int | None = None, drop_last: bool = False
    ) -> None:
        """Continues where :meth:`state_dict` was called; ValueError where the order is not the same, or, in the middle
        of an epoch, the batches."""
        order = self._order_of(workers) | (self._steps_of(batch_size, drop_last) if state["position"] else {})
        for name, value in order.items():
            if state.get(name, value) != value:
                raise ValueError(f"the position belongs to an order with {name}={state[name]}, this one has {value}")
        self.set_epoch(state["epoch"])
        self.position = state["position"]

    def _order_of(self, workers: int) -> dict:
        names = ("rows", "shuffle", "shuffle_rows", "seed", "world_size")
        order = {"workers": workers, **{name: getattr(self, name) for name in names}}
        return order | {"file_by_file": self.shuffle and self.staging is not None}

    def _steps_of(self, batch_size: int | None, drop_last: bool) -> dict:
        return {"batch_size": batch_size or self.batch_size or 1, "drop_last": drop_last}

    def shard_sizes(self, workers: int) -> list[int]:
        """Returns the rows that each of so many workers of this rank gives."""
        bounds = [self._bound(self.rank * workers + w, workers) for w in range(workers + 1)]
        return [stop - start for start, stop in itertools.pairwise(bounds)]

    def batches_of(self, rows: int) -> int:
        """Returns the samples that so many rows make."""
        return rows if self.batch_size is None else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        epoch, batches, size, drop_last = self._now.tolist()
        sizes = self.shard_sizes(workers)
        done, turn = _taken(batches, [rows // size if drop_last else -(-rows // size) for rows in sizes])
        worker = (worker + turn) % workers  # the loader asks worker 0 first: it goes on with the part whose turn it is
        skip = min(done[worker] * size, sizes[worker])
        if not self.shuffle:
            return self._samples(self._shard(epoch, worker, workers, skip), lambda tables: tables)
        block, passed = divmod(skip, self.shuffle_rows)
        pieces = self._shard(epoch, worker, workers, skip - passed)
        key = (self.seed, epoch, self.rank * workers + worker)
        return self._samples(pieces, lambda tables: _shuffled(tables, self.shuffle_rows, key, block, passed))

    def _samples(self, pieces: list[_Piece], order: Callable[[Iterator], Iterator]) -> Iterator:
        """The samples that the rows of some pieces make in an order."""
        staged = None
        if self.staging is not None:
            staged = _Staged(self.staging, [self.paths[i] for i, _ in itertools.groupby(p.file for p in pieces)])
        try:
            tables = order(self._read(pieces, self._open if staged is None else staged.open))
            samples = _rows(tables) if self.batch_size is None else _batches(tables, self.batch_size)
            yield from samples if self.transform is None else map(self.transform, samples)
        finally:
            if staged is not None:  # the last copy is in use no more, whoever else waits for room
                staged.close()

    def _bound(self, shard: int, workers: int) -> int:
        return shard * self.rows // (self.world_size * workers)

    def _shard(self, epoch: int, worker: int, workers: int, skip: int = 0) -> list[_Piece]:
        """The pieces of one worker's stretch of the epoch's order, without its first ``skip`` rows."""
        order = range(len(self.groups))
        if self.shuffle:
            order = torch.randperm(len(self.groups), generator=_generator(self.seed, epoch), device="cpu").tolist()
            if self.staging is not None:  # file by file, in the order in which the files come first
                place = {self.groups[i][0]: at for at, i in reversed(list(enumerate(order)))}
                order.sort(key=lambda i: place[self.groups[i][0]])
        shard = self.rank * workers + worker
        return _cut(
            [self.groups[i] for i in order], self._bound(shard, workers) + skip, self._bound(shard + 1, workers)
        )

    def _read(self, pieces: list[_Piece], open_file: Callable[[str], "_File"]) -> Iterator:
        for piece in pieces:
            path = self.paths[piece.file]
            try:
                yield from open_file(path).read(piece, self.columns, self.batch_rows)
            except (OSError, need("pyarrow", "data").ArrowException) as error:
                raise ValueError(f"{path}, row group {piece.group}, cannot be read: {error}") from error

    def _open(self, path: str) -> "_File":
        if self._opened_in != os.getpid():  # a fork would share the position in the file with its parent and siblings
            self._files, self._opened_in = {}, os.getpid()
        file = self._files.pop(path, None) or _File(path, self._options)
        if len(self._files) == OPEN_FILES:
            self._files.pop(next(iter(self._files)))  # the one not used for longest; closed when nobody reads it
        self._files[path] = file
        return file

    def _inspect(self, index: int) -> list[int]:
        """Returns the rows of each row group of a file, whose columns are checked."""
        path = self.paths[index]
        try:
            file = self._open(path)
            types = file.types()
            missing = [column for column in self.columns or () if column not in types]
            if missing:
                raise ValueError(f"{path} has no column {missing[0]!r}; it has {', '.join(types)}")
            rows = file.group_rows()
            if sum(rows):  # who writes no rows need not know their types
                self._check_types(path, {name: types[name] for name in self.columns or types})
            return rows
        except (OSError, need("pyarrow", "data").ArrowException) as error:
            raise ValueError(f"{path} is not a readable Parquet or Arrow file: {error}") from error

    def _check_types(self, path: str, types: dict) -> None:
        """Refuses a file whose rows do not go into one batch with those of the files before. A column of nothing but
        nulls goes with any type."""
        known = self._types = self._types or {name: (kind, path) for name, kind in types.items()}
        null = need("pyarrow", "data").null()
        for name in {**known, **types}:
            if name not in types or name not in known:
                here, there = (path, next(iter(known.values()))[1]) if name in types else (known[name][1], path)
                raise ValueError(f"{here} has a column {name!r}, and {there} has none: pass columns= that all have")
            (kind, where), own = known[name], types[name]
            if kind == null:
                known[name] = own, path
            elif own != null and _wide(own) != _wide(kind):
                raise ValueError(f"the column {name!r} is {kind} in {where}, but {own} in {path}")


class _Staged:
    """Opens remote files one after the other from their local copies."""

    def __init__(self, staging, urls: list[str]):
        self._local, self._urls, self._at, self._file = staging.stage(urls), iter(urls), None, None

    def open(self, url: str) -> "_File":
        while self._at != url:
            if self._file is not None:
                self._file.close()
            self._at, self._file = next(self._urls), _File(str(next(self._local)))
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._local.close()


class _Stream:
    """The record batches of an Arrow stream, by their numbers; those of a mapped file take no memory."""

    def __init__(self, reader):
        self.schema, self._batches = reader.schema, list(reader)
        self.num_record_batches, self.get_batch = len(self._batches), self._batches.__getitem__


class _File:
    """A Parquet or Arrow file; row groups and record batches go by the same name.

    ``options``: of fsspec, for a URL.
    """

    def __init__(self, path: str, options: dict | None = None):
        remote = "://" in path
        self.is_parquet = not (path.split("?")[0] if remote else path).endswith(ARROW)
        source = need("fsspec", "data").open(path, **(options or {})).open() if remote else path
        if self.is_parquet:
            self.file = need("pyarrow.parquet", "data").ParquetFile(source, memory_map=isinstance(source, str))
        else:
            pa = need("pyarrow", "data")
            ipc, source = need("pyarrow.ipc", "data"), pa.memory_map(source) if source is path else source
            begin = source.read(len(STREAM))
            source.seek(0)
            if begin == STREAM and remote:
                raise ValueError(
                    f"{path} is an Arrow stream: copy it to the local disk, or write it by pyarrow.ipc.new_file"
                )
            self.file = _Stream(ipc.open_stream(source)) if begin == STREAM else ipc.open_file(source)

    def types(self) -> dict:
        """Returns the types of the columns by their names."""
        schema = self.file.schema_arrow if self.is_parquet else self.file.schema
        return dict(zip(schema.names, schema.types))

    def group_rows(self) -> list[int]:
        if self.is_parquet:
            metadata = self.file.metadata
            return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        return [self.file.get_batch(i).num_rows for i in range(self.file.num_record_batches)]

    def read(self, piece: _Piece, columns: list[str] | None, batch_rows: int) -> Iterator:
        """Gives the rows of a piece as tables of at most ``batch_rows`` rows."""
        pa = need("pyarrow", "data")
        if self.is_parquet:
            # One thread per worker: the workers are the threads.
            batches = self.file.iter_batches(batch_rows, row_groups=[piece.group], columns=columns, use_threads=False)
        else:
            whole = self.file.get_batch(piece.group)
            whole = whole if columns is None else whole.select(columns)
            batches = (whole.slice(at, batch_rows) for at in range(0, len(whole), batch_rows))
        at = 0
        for batch in batches:
            start, stop = max(piece.start - at, 0), min(piece.stop - at, len(batch))
            at += len(batch)
            if start < stop:
                yield pa.Table.from_batches([batch.slice(start, stop - start)])
            if at >= piece.stop:
                return

    def close(self) -> None:
        if self.is_parquet:
            self.file.close(force=True)


def _expand(paths: Sequence[str | Path], options: dict) -> list[str]:
    found = []
    for path in map(str, paths):
        if "://" in path:
            filesystem, _, names = need("fsspec", "data").get_fs_token_paths(path, storage_options=options)
            names = [name for name in sorted(names) if filesystem.exists(name)]
            if len(names) == 1 and not names[0].endswith(SUFFIXES) and filesystem.info(names[0])["type"] == "directory":
                names = sorted(name for name in filesystem.ls(names[0], detail=False) if name.endswith(SUFFIXES))
            matches = [filesystem.unstrip_protocol(name) for name in names]
        elif os.path.isdir(path):
            matches = sorted(str(p) for p in Path(path).iterdir() if p.suffix in SUFFIXES)
        elif os.path.exists(path):  # its name may hold what stands for others in a pattern
            matches = [path]
        else:
            matches = sorted(glob.glob(path, recursive=True))  # ** is any number of folders, as in a URL
        if not matches:
            raise ValueError(f"no Parquet or Arrow file is found at {path}")
        found += matches
    if not found:
        raise ValueError("paths must name at least one file")
    return found


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size go together, got rank={rank}, world_size={world_size}")
    if rank is None:
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return 0, 1
        return distributed.get_rank(), distributed.get_world_size()
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must lie between 0 and world_size - 1, got rank={rank}, world_size={world_size}")
    return operator.index(rank), operator.index(world_size)


def _generator(*key: int) -> torch.Generator:
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1
    return torch.Generator().manual_seed(seed)


def _cut(groups: list[tuple[int, int, int]], start: int, stop: int) -> list[_Piece]:
    """Returns rows ``[start, stop)`` of the groups (file, group, rows) laid end to end."""
    ends = []
    for _, _, rows in groups:
        ends.append((ends[-1] if ends else 0) + rows)
    pieces = []
    for i in range(bisect.bisect_right(ends, start), len(groups)):
        file, group, rows = groups[i]
        first = ends[i] - rows
        if first >= stop:
            break
        if max(start, first) < min(stop, ends[i]):
            pieces.append(_Piece(file, group, max(start - first, 0), min(stop - first, rows)))
    return pieces


def _taken(batches: int, parts: list[int]) -> tuple[list[int], int]:
    """Returns how many batches were taken from each part, taken in turn, and whose turn is next.

    Args:
        batches: taken in all.
        parts: how many batches each part has; they differ by one at most.
    """
    full, workers = min(parts), len(parts)
    if batches < full * workers or batches == 0:
        return [batches // workers + (w < batches % workers) for w in range(workers)], batches % workers
    longer = [w for w in range(workers) if parts[w] > full]
    last = longer[: batches - full * workers]
    return [full + (w in last) for w in range(workers)], next((w for w in longer if w not in last), 0)


def _shuffled(tables: Iterator, size: int, key: tuple[int, ...], block: int, passed: int) -> Iterator:
    """Gives the rows of tables in blocks of ``size`` rows, each in an order of its own.

    Args:
        tables: their first row is the first one of ``block``.
        key: of the orders.
        passed: rows of the first block that are left out.
    """
    pa = need("pyarrow", "data")

    def mixed(parts: list):
        table = _widened(_joined(parts))
        order = torch.randperm(len(table), generator=_generator(*key, block), device="cpu")
        return table.take(pa.array(order[passed:].numpy()))

    pending, rows = [], 0
    for table in tables:
        while rows + len(table) >= size:
            whole, pending = [*pending, table.slice(0, size - rows)], []
            table, rows = table.slice(size - rows), 0
            yield mixed(whole)
            block, passed = block + 1, 0
        if len(table):
            pending.append(table)
            rows += len(table)
    if rows:
        yield mixed(pending)


def _joined(parts: list):
    """Returns tables as one; files may have their columns in any order, and in types that hold the same."""
    names = parts[0].column_names

    def in_order(part):
        turned = part.column_names != names and sorted(part.column_names) == sorted(names)
        return part.select(names) if turned else part

    parts = [in_order(part) for part in parts]
    if any(part.schema.types != parts[0].schema.types for part in parts):
        parts = [_widened(part) for part in parts]
    return need("pyarrow", "data").concat_tables(parts, promote_options="permissive")


def _widened(table):
    pa = need("pyarrow", "data")
    return table.cast(pa.schema([field.with_type(_wide(field.type)) for field in table.schema]))


def _wide(kind):
    """A type with offsets of 64 bits: arrays of the others hold at most 2 GiB, a block of encoded images holds more.
    Views, which pyarrow takes no rows of, become what they stand for, and whatever holds others may hold nulls."""
    pa = need("pyarrow", "data")
    types = pa.types
    if types.is_dictionary(kind):
        return pa.dictionary(pa.int64(), _wide(kind.value_type))
    if str(kind) in ("string_view", "binary_view"):  # pyarrow < 16 has no function that tells
        return pa.large_string() if str(kind) == "string_view" else pa.large_binary()
    if types.is_binary(kind):
        return pa.large_binary()
    if types.is_string(kind):
        return pa.large_string()
    if types.is_fixed_size_list(kind) and _is_number(kind.value_type):
        return pa.list_(kind.value_type, kind.list_size)
    # Of a slice of lists of a fixed size within such lists, pyarrow takes other rows than it is asked for.
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.large_list(_wide(kind.value_type))
    if types.is_struct(kind):
        return pa.struct([pa.field(field.name, _wide(field.type)) for field in kind])
    return kind


def _rows(tables) -> Iterator[dict]:
    for table in tables:
        names = table.column_names
        yield from (dict(zip(names, row)) for row in zip(*(_each(table.column(name)) for name in names)))


def _batches(tables, size: int) -> Iterator[dict]:
    """Gives batches of exactly ``size`` rows, the last one shorter, across the borders of what was read."""
    pending, rows = [], 0
    for table in tables:
        pending.append(table)
        rows += len(table)
        if rows < size:
            continue
        whole = _joined(pending)
        for at in range(0, rows - rows % size, size):
            yield _batch(whole.slice(at, size))
        rows %= size
        pending = [whole.slice(len(whole) - rows)]
    if rows:
        yield _batch(_joined(pending))


def _batch(table) -> dict:
    return {name: _values(table.column(name)) for name in table.column_names}


def _each(column) -> Tensor | list:
    """Returns the values of a column for its rows, each as if it stood alone: a null in one changes no other."""
    kind, types = column.type, need("pyarrow", "data").types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not _is_number(kind) and not _lists_numbers(kind):
        return _values(column)
    if column.null_count:
        known = iter(_each(column.drop_null()))
        return [next(known) if valid else None for valid in column.is_valid().to_pylist()]
    values = _values(column)
    if isinstance(values, Tensor) or all(isinstance(value, Tensor) for value in values):
        return values
    return [_values(column.slice(at, 1))[0] for at in range(len(column))]


def _values(column) -> Tensor | list:
    """Returns a column as a tensor ``[rows]`` or ``[rows, K]``, or as a list of tensors or Python values."""
    pa = need("pyarrow", "data")
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # pyarrow < 18 returns one for several chunks, or none
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    if pa.types.is_dictionary(array.type) and _is_number(array.type.value_type):
        array = array.dictionary_decode()
    kind = array.type
    if array.null_count:
        return array.to_pylist()
    if _is_number(kind):
        return torch.from_numpy(array.to_numpy(zero_copy_only=False).copy())
    if not _lists_numbers(kind) or array.flatten().null_count:
        return array.to_pylist()
    flat = torch.from_numpy(array.flatten().to_numpy(zero_copy_only=False).copy())
    if pa.types.is_fixed_size_list(kind):
        return flat.view(len(array), kind.list_size)
    return list(flat.split(array.value_lengths().to_pylist()))


def _is_number(kind) -> bool:
    types = need("pyarrow", "data").types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def _lists_numbers(kind) -> bool:
    types = need("pyarrow", "data").types
    nested = types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind)
    return nested and _is_number(kind.value_type)

"""Rows of Parquet and Arrow files: none twice, none lost, for any length, shards and position."""

import collections
import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

from fusedtrain import data
from fusedtrain.data import table
from fusedtrain.train.feed import Feed, InputError

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")


def write(folder, rows_per_file, group=7):
    """Files with column id counting through all of them, a feature of 3 numbers, a name and an unused column."""
    folder.mkdir(exist_ok=True)
    first = 0
    for i, rows in enumerate(rows_per_file):
        ids = list(range(first, first + rows))
        first += rows
        table = pa.table(
            {
                "id": pa.array(ids, pa.int64()),
                "x": pa.array([[j, j / 2, -j] for j in ids], pa.list_(pa.float32(), 3)),
                "name": pa.array([f"row {j}" for j in ids]),
                "unused": pa.array([[0] * (j % 3) for j in ids], pa.list_(pa.int32())),
            }
        )
        if i % 2:
            with pa.OSFile(str(folder / f"{i:02}.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=group)
        else:
            pq.write_table(table, folder / f"{i:02}.parquet", row_group_size=group)
    return folder


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("rows_per_file", [(1,), (0, 3), (20, 5, 13), (50, 51)])
def test_ranks_and_workers_share_rows_evenly_without_duplicates_or_losses(tmp_path, rows_per_file, shuffle):
    folder = write(tmp_path / "t", rows_per_file)
    total = sum(rows_per_file)
    for world, workers in [(1, 1), (1, 3), (2, 1), (3, 2), (5, 4)]:
        seen = []
        for rank in range(world):
            dataset = data.TableDataset(
                folder, columns=["id"], shuffle=shuffle, shuffle_rows=6, batch_rows=4, rank=rank, world_size=world
            )
            sizes = dataset.shard_sizes(workers)
            parts = [_worker(dataset, worker, workers) for worker in range(workers)]
            assert [len(part) for part in parts] == sizes
            assert sum(sizes) in (total // world, -(-total // world))
            seen += [row for part in parts for row in part]
        assert sorted(seen) == list(range(total))


def _worker(dataset, worker, workers):
    """The ids that one worker of a DataLoader gives, without the process."""
    info = torch.utils.data._utils.worker.WorkerInfo(id=worker, num_workers=workers, seed=0, dataset=dataset)
    torch.utils.data._utils.worker._worker_info = info
    try:
        return [int(row["id"]) for row in dataset]
    finally:
        torch.utils.data._utils.worker._worker_info = None


@pytest.mark.parametrize("rows_per_file", [(3,), (50, 33)])
def test_two_ranks_with_two_workers_each_give_every_row_once(tmp_path, monkeypatch, rows_per_file):
    folder, seen = write(tmp_path / "t", rows_per_file), []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)  # what a dataset asks for its place
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        rows = data.TableDataset(folder, columns=["id"], shuffle=True, shuffle_rows=10)
        batches = [batch["id"].tolist() for batch in data.loader(rows, 4, num_workers=2)]
        assert len(batches) == len(data.loader(rows, 4, num_workers=2))
        seen += [row for batch in batches for row in batch]
    assert sorted(seen) == list(range(sum(rows_per_file)))


def test_the_part_of_another_rank_is_refused(tmp_path):
    folder = write(tmp_path / "t", [8])
    for place, (rank, size) in {(0, 1): (1, 2), (1, 2): (0, 1)}.items():  # the first: made before torchrun's group
        batches = data.loader(data.TableDataset(folder, rank=place[0], world_size=place[1]), 2, num_workers=0)
        message = f"are those of rank {place[0]} of {place[1]}, and this process is rank {rank} of {size}: pass rank="
        with pytest.raises(InputError, match=message):
            Feed(data.DevicePrefetcher(batches, "cpu"), SimpleNamespace(rank=rank, size=size))


def test_rows_have_types_and_only_the_chosen_columns(tmp_path):
    dataset = data.TableDataset(write(tmp_path / "t", [9, 4]), columns=["name", "x", "id"])
    row = list(dataset)[11]
    assert list(row) == ["name", "x", "id"] and row["name"] == "row 11"
    assert row["id"].dtype == torch.int64 and row["id"].shape == () and row["x"].dtype == torch.float32
    assert row["x"].tolist() == [11, 5.5, -11]
    assert [list(row["unused"].shape) for row in data.TableDataset(tmp_path / "t", columns=["unused"])][:4] == [
        [0],
        [1],
        [2],
        [0],
    ]


def test_batches_of_rows_are_full_across_files_and_groups(tmp_path):
    dataset = data.TableDataset(write(tmp_path / "t", [9, 4, 20]), columns=["id", "x", "name"], batch_size=10)
    batches = list(data.loader(dataset, None, num_workers=0))
    assert [len(batch["name"]) for batch in batches] == [10, 10, 10, 3]
    assert torch.cat([batch["id"] for batch in batches]).tolist() == list(range(33))
    assert batches[1]["x"].shape == (10, 3) and batches[1]["x"][0, 1] == 5
    with pytest.raises(ValueError, match=r"the dataset gives batches, of 10 rows: pass batch_size=None, got 1"):
        data.loader(dataset, num_workers=0)


def test_every_epoch_has_an_order_of_its_own_that_repeats(tmp_path):
    dataset = data.TableDataset(write(tmp_path / "t", [40, 41]), columns=["id"], shuffle=True, shuffle_rows=30)
    batches = data.loader(dataset, 8, num_workers=2, persistent_workers=True)
    assert len(batches) == 5 + 6
    orders = []
    for epoch in (0, 1, 0):
        batches.set_epoch(epoch)
        orders.append(torch.cat([batch["id"] for batch in batches]).tolist())
    assert orders[0] == orders[2] != orders[1]
    assert all(sorted(order) == list(range(81)) for order in orders)
    near = sum(abs(a - b) == 1 for a, b in zip(orders[0], orders[0][1:]))
    assert near < 20  # rows of one group do not stay together


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_workers", [0, 3])
def test_a_pass_continues_where_it_stopped(tmp_path, num_workers, shuffle):
    folder = write(tmp_path / "t", [40, 41])

    def make():
        dataset = data.TableDataset(folder, columns=["id"], shuffle=shuffle, shuffle_rows=16, seed=3)
        return data.loader(dataset, 4, num_workers=num_workers)

    whole = make()
    whole.set_epoch(2)
    expected = [batch["id"].tolist() for batch in whole]
    for stop in (0, 1, len(expected)) if num_workers == 0 else (8, 20):
        first = make()
        first.set_epoch(2)
        for _, _ in zip(range(stop), first):
            first.advance()
        again = make()
        again.load_state_dict(first.state_dict())
        assert [batch["id"].tolist() for batch in again] == expected[stop:]
        again.set_epoch(3)
        assert sum(len(batch["id"]) for batch in again) == 81
    with pytest.raises(ValueError, match=r"the position belongs to an order with workers=\d, this one has 2"):
        data.loader(data.TableDataset(folder), 4, num_workers=2).load_state_dict(first.state_dict())


@pytest.mark.parametrize("options", [{"shuffle": True}, {"batch_size": 4}])
def test_files_may_have_their_columns_in_any_order(tmp_path, options):
    pq.write_table(pa.table({"x": [1, 2, 3], "y": [1.0, 2.0, 3.0]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"y": [4.0, 5.0, 6.0], "x": [4, 5, 6]}), tmp_path / "b.parquet")
    found = list(data.TableDataset(tmp_path, **options))
    x, y = (torch.cat([row[name].reshape(-1) for row in found]).tolist() for name in "xy")
    assert x == y and sorted(x) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"x": [4.0]}, r"the column 'x' is int64 in .*a\.parquet, but double in .*b\.parquet$"),
        ({"x": [4], "y": [4]}, r"b\.parquet has a column 'y', and .*a\.parquet has none: pass columns= that all have$"),
        ({"z": [4]}, r"a\.parquet has a column 'x', and .*b\.parquet has none: pass columns= that all have$"),
    ],
)
def test_files_whose_rows_make_no_batch_are_refused(tmp_path, columns, message):
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "a.parquet")
    pq.write_table(pa.table(columns), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=message):
        data.TableDataset(tmp_path)
    pq.write_table(pa.table({name: [] for name in columns}), tmp_path / "b.parquet")  # pandas knows no types then
    assert len(list(data.TableDataset(tmp_path))) == 3


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"batch_size": 2}], ids=str)
def test_columns_of_nulls_alone_and_of_other_strings_go_with_the_rest(tmp_path, options):
    for name, x in {"a": pa.nulls(3), "b": pa.array(["b"] * 3), "c": pa.array(["c"] * 3, pa.large_string())}.items():
        pq.write_table(pa.table({"x": x, "y": [1, 2, 3]}), tmp_path / f"{name}.parquet")
    found = [row["x"] for row in data.TableDataset(tmp_path, **options)]
    found = [x for part in found for x in part] if "batch_size" in options else found
    assert sorted(map(str, found)) == ["None"] * 3 + ["b"] * 3 + ["c"] * 3


@pytest.mark.skipif(not hasattr(pa, "string_view"), reason="pyarrow < 16 knows no views")
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize(
    "options", [{}, {"shuffle": True}, {"batch_size": 2}, {"batch_size": 2, "shuffle": True}], ids=str
)
def test_views_and_dictionaries_are_what_they_stand_for(tmp_path, options, suffix):
    """Polars writes strings as views, pandas categories as dictionaries, whose indices are as wide as they are many."""
    for i, other in enumerate((False, True)):
        names, texts = pa.array([f"{i}{j}" for j in range(3)]), pa.string_view() if other else pa.string()
        columns = {
            "x": names.cast(texts),
            "b": names.cast(pa.binary_view() if other else pa.binary()),
            "l": pa.array([["c"]] * 3, pa.large_list(texts) if other else pa.list_(texts)),
            "c": names.dictionary_encode().cast(pa.dictionary(pa.int16() if other else pa.int8(), pa.string())),
            "n": pa.array([i] * 3).dictionary_encode(),
        }
        if suffix == "arrow":  # as Polars writes them there
            columns["c"] = columns["c"].cast(pa.dictionary(columns["c"].type.index_type, texts))
        whole = pa.table(columns)
        if suffix == "parquet":
            pq.write_table(whole, tmp_path / f"{i}.parquet")
            continue
        with pa.OSFile(str(tmp_path / f"{i}.arrow"), "wb") as sink, pa.ipc.new_file(sink, whole.schema) as writer:
            writer.write_table(whole)
    found = list(data.TableDataset(tmp_path, **options))
    assert all(isinstance(row["n"], torch.Tensor) for row in found)
    if "batch_size" in options:
        found = [dict(zip(batch, row)) for batch in found for row in zip(*batch.values())]
    assert sorted(row["x"] for row in found) == ["00", "01", "02", "10", "11", "12"]
    assert all(row["x"] == row["c"] == row["b"].decode() and row["x"][0] == str(int(row["n"])) for row in found)
    assert [row["l"] for row in found] == [["c"]] * 6


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"batch_size": 4}], ids=str)
def test_files_may_differ_in_what_may_be_null(tmp_path, options):
    """As those of Spark and of pandas do."""
    for name in ("a", "b"):
        number = pa.field("item", pa.float32(), nullable=name == "a")
        columns = {
            "list": pa.array([[1, 2]] * 3, pa.list_(number)),
            "pair": pa.array([[3, 4]] * 3, pa.list_(number, 2)),
            "struct": pa.array([{"item": 5}] * 3, pa.struct([number])),
        }
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    found = list(data.TableDataset(tmp_path, **options))
    if "batch_size" in options:
        found = [dict(zip(batch, row)) for batch in found for row in zip(*batch.values())]
    assert [(row["list"].tolist(), row["pair"].tolist()) for row in found] == [([1, 2], [3, 4])] * 6
    assert [row["struct"] for row in found] == [{"item": 5}] * 6


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_shuffled_matrices_stay_with_their_rows(tmp_path, suffix):
    """pyarrow takes other rows than it is asked for of a part of lists of a fixed size within such lists."""
    kind = pa.list_(pa.list_(pa.float32(), 2), 2)
    whole = pa.table({"id": range(24), "m": pa.array([[[i, 1], [2, -i]] for i in range(24)], kind)})
    if suffix == "parquet":
        pq.write_table(whole, tmp_path / "a.parquet")
    else:
        with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, whole.schema) as writer:
            writer.write_table(whole)
    rows = list(data.TableDataset(tmp_path, shuffle=True, shuffle_rows=6, batch_rows=24))
    assert sorted(int(row["id"]) for row in rows) == list(range(24))
    assert all(row["m"] == [[row["id"], 1], [2, -row["id"]]] for row in rows)


def test_blocks_that_are_shuffled_may_hold_more_than_offsets_of_32_bits_reach():
    rows = [{"n": i, "s": f"{i}", "b": b"%d" % i, "v": {"b": b"", "w": [f"{i}"] * i}} for i in range(5)]
    (block,) = table._shuffled(iter([pa.Table.from_pylist(rows[:3]), pa.Table.from_pylist(rows[3:])]), 9, (0,), 0, 0)
    assert sorted(block.to_pylist(), key=lambda row: row["n"]) == rows != block.to_pylist()
    inner = pa.struct({"b": pa.large_binary(), "w": pa.large_list(pa.large_string())})
    assert block.schema.types == [pa.int64(), pa.large_string(), pa.large_binary(), inner]


def test_files_are_found_by_pattern_and_url(tmp_path):
    folder = write(tmp_path / "t", [3, 4, 5])
    for paths in (
        str(folder / "*.parquet"),
        [folder / "00.parquet", folder / "02.parquet"],
        f"file://{folder}/*.parquet",
    ):
        assert data.TableDataset(paths).rows == 8
    assert [row["id"].item() for row in data.TableDataset(f"file://{folder}/02.parquet")] == [7, 8, 9, 10, 11]


@pytest.mark.parametrize("suffix", [".arrow", ".arrows"])
def test_streams_of_arrow_are_read_from_the_local_disk(tmp_path, suffix):
    """Such as those that the package datasets writes."""
    table, path = pa.table({"x": range(10), "y": ["text"] * 10}), tmp_path / f"a{suffix}"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    rows = data.TableDataset(tmp_path)
    assert [group for *_, group in rows.groups] == [4, 4, 2]
    batches = data.loader(rows, 4, num_workers=2)
    assert sorted(int(x) for batch in batches for x in batch["x"]) == list(range(10)) and rows.rows == 10
    with pytest.raises(ValueError, match=f"/a{suffix} is an Arrow stream: copy it to the local disk, or write it by"):
        data.TableDataset(f"file://{path}")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match=f"/a{suffix} is not a readable Parquet or Arrow file: "):
        data.TableDataset(path)


def test_a_url_may_be_that_of_a_folder(tmp_path):
    write(tmp_path, [3, 4])
    (tmp_path / "_SUCCESS").touch()
    for url in (f"file://{tmp_path}", f"file://{tmp_path}/"):
        assert data.TableDataset(url).paths == [f"file://{path}" for path in sorted(tmp_path.glob("*.*"))]
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=f"no Parquet or Arrow file is found at file://{tmp_path}/none"):
        data.TableDataset(f"file://{tmp_path}/none")


def test_nulls_come_as_none(tmp_path):
    pq.write_table(pa.table({"a": [1, None, 3]}), tmp_path / "n.parquet")
    assert [row["a"] for row in data.TableDataset(tmp_path / "n.parquet")] == [1, None, 3]


@pytest.mark.parametrize("batch_rows", [2, 100])
def test_a_null_in_a_row_changes_no_other(tmp_path, batch_rows):
    """A transform that fills nulls would else give batches of tensors and numbers, or of another dtype."""
    columns = {
        "a": pa.array([1.5, 2.5, None, 3.5], pa.float32()),
        "list": pa.array([[1, 2], None, [3, None], [4]], pa.list_(pa.int16())),
        "pair": pa.array([None, [1, 2], [3, None], [4, 5]], pa.list_(pa.int16(), 2)),
        "text": ["a", None, "c", "d"],
        "kind": pa.array([7, None, 8, 7], pa.int8()).dictionary_encode(),
        "none": pa.nulls(4),
        "no numbers": pa.nulls(4, pa.int8()),
    }
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, pa.table(columns).schema) as writer:
        writer.write_table(pa.table(columns))
    rows = list(data.TableDataset(tmp_path, batch_rows=batch_rows))
    found = {name: [row[name] for row in rows] for name in columns}
    expected = {name: pa.table(columns)[name].to_pylist() for name in columns}
    plain = {name: [x.tolist() if isinstance(x, torch.Tensor) else x for x in found[name]] for name in columns}
    assert plain == expected
    tensors = {name: [getattr(x, "dtype", None) for x in found[name]] for name in columns}
    assert tensors == {
        "a": [torch.float32, torch.float32, None, torch.float32],
        "list": [torch.int16, None, None, torch.int16],
        "pair": [None, torch.int16, None, torch.int16],
        "text": [None] * 4,
        "kind": [torch.int8, None, torch.int8, torch.int8],
        "none": [None] * 4,
        "no numbers": [None] * 4,
    }


def test_what_cannot_be_read_is_named(tmp_path):
    folder = write(tmp_path / "t", [30])
    path = folder / "00.parquet"
    with pytest.raises(ValueError, match=r"00\.parquet has no column 'label'; it has id, x, name, unused"):
        data.TableDataset(path, columns=["label"])
    with pytest.raises(ValueError, match="no Parquet or Arrow file is found at nowhere"):
        data.TableDataset("nowhere")
    with pytest.raises(ValueError, match="batch_rows must be an integer of at least 1, got 0"):
        data.TableDataset(path, batch_rows=0)
    with pytest.raises(ValueError, match="rank must lie between 0 and world_size - 1, got rank=2, world_size=2"):
        data.TableDataset(path, rank=2, world_size=2)
    dataset = data.TableDataset(path)
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)  # the first pages, not the footer
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"00\.parquet, row group 0, cannot be read: "):
        list(collections.deque(data.TableDataset(path), 0) or dataset)
    path.write_bytes(b"PAR1 nothing")
    with pytest.raises(ValueError, match=r"00\.parquet is not a readable Parquet or Arrow file: "):
        data.TableDataset(path)


def test_a_row_group_is_decoded_once_for_all_its_blocks(tmp_path, monkeypatch):
    pq.write_table(pa.table({"id": list(range(1000))}), tmp_path / "t.parquet")
    read, decoded = pq.ParquetFile.iter_batches, []

    def counted(*args, **options):
        for batch in read(*args, **options):
            decoded.append(len(batch))
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    dataset = data.TableDataset(tmp_path / "t.parquet", shuffle=True, shuffle_rows=50, batch_rows=20)
    order = [row["id"].item() for row in dataset]
    assert sorted(order) == list(range(1000)) and sum(decoded) == 1000
    assert all(sorted(order[at : at + 50]) == list(range(at, at + 50)) for at in range(0, 1000, 50))


def test_files_are_found_at_any_depth_and_by_names_that_look_like_patterns(tmp_path):
    for i, name in enumerate(("a.parquet", "x/b.parquet", "x/y/c.parquet", "d[1].parquet")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": [i]}), tmp_path / name)
    for pattern in (f"{tmp_path}/**/*.parquet", f"file://{tmp_path}/**/*.parquet"):
        assert sorted(row["id"].item() for row in data.TableDataset(pattern)) == [0, 1, 2, 3]
    assert [row["id"].item() for row in data.TableDataset(tmp_path / "d[1].parquet")] == [3]


def test_workers_read_a_url_without_moving_each_others_position(tmp_path):
    folder = tmp_path / "t"
    folder.mkdir()
    numbers = torch.rand(8000, generator=torch.Generator().manual_seed(0)).tolist()  # too varied for small pages
    for i in range(2):
        ids = list(range(4000 * i, 4000 * (i + 1)))
        pq.write_table(pa.table({"id": ids, "x": numbers[ids[0] : ids[-1] + 1]}), folder / f"{i}.parquet", 100)
    for _ in range(3):
        batches = data.loader(data.TableDataset(f"file://{folder}/*.parquet", batch_size=100), None, num_workers=4)
        assert sorted(i for batch in batches for i in batch["id"].tolist()) == list(range(8000))


def test_a_position_is_one_of_its_batches(tmp_path):
    folder = write(tmp_path / "t", [40])

    def make(size=4, **options):
        return data.loader(data.TableDataset(folder, columns=["id"], shuffle=True), size, num_workers=0, **options)

    start = make().state_dict()
    make(8).load_state_dict(start)  # at the start of an epoch there is nothing to pass over
    middle = make()
    next(iter(middle))
    middle.advance()
    for other, message in (
        (make(8), "an order with batch_size=4, this one has 8"),
        (make(drop_last=True), "an order with drop_last=False, this one has True"),
    ):
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(middle.state_dict())
    old = {name: value for name, value in middle.state_dict().items() if name not in ("batch_size", "drop_last")}
    make().load_state_dict(old)


def test_numbers_of_numpy_count_as_pythons(tmp_path):
    np = pytest.importorskip("numpy")
    folder = write(tmp_path / "t", (20, 5))

    def ids(number):
        options = {"seed": number(3), "rank": number(1), "world_size": number(2), "shuffle_rows": number(6)}
        dataset = data.TableDataset(folder, columns=["id"], shuffle=True, batch_rows=number(4), **options)
        return [row["id"].item() for row in dataset]

    assert ids(np.int64) == ids(int)
    assert len(ids(int)) == 13


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"paths": []}, "paths must name at least one file"),
        ({"columns": []}, "columns must name at least one column"),
        ({"columns": "ix"}, "has no column 'ix'"),
        ({"batch_rows": 2.5}, r"batch_rows must be an integer of at least 1, got 2\.5"),
        ({"batch_size": "4"}, "batch_size must be an integer of at least 1, got '4'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        data.TableDataset(**{"paths": write(tmp_path / "t", (3,))} | options)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))])
def test_workers_of_a_copy_see_the_epoch_too(tmp_path, copied):
    dataset = copied(data.TableDataset(write(tmp_path / "t", (50,)), columns=["id"], shuffle=True))
    batches = data.loader(dataset, 8, num_workers=1, persistent_workers=True)
    orders = []
    for epoch in range(2):
        batches.set_epoch(epoch)
        orders.append([i for batch in batches for i in batch["id"].tolist()])
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(50))


def test_an_empty_table_is_an_empty_pass(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDTRAIN_CACHE", str(tmp_path / "cache"))
    batches = data.loader(data.TableDataset(write(tmp_path / "t", (0,))), 4)
    assert (list(batches), batches.plan.reason) == ([], "the dataset is empty")

"""Samples kept in a file, and remote shards kept on the local disk: by several processes, killed or not."""

import contextlib
import functools
import gc
import hashlib
import multiprocessing
import os
import random
import resource
import signal
import time
import tracemalloc
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fusedtrain import _files, data
from fusedtrain.data import cache as cache_file
from fusedtrain.data import staging
from fusedtrain.train.rng import EpochIndex, seed_all


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path


class Decoded(Dataset):
    """Writes down, in a file that processes share, which sample was decoded."""

    def __init__(self, log, length=40, transform=None, pause=0.0):
        self.log, self.length, self.transform, self.pause = log, length, transform, pause

    def __len__(self):
        return self.length

    def fingerprint(self):
        return "decoded"

    def __getitem__(self, index):
        with open(self.log, "a") as file:
            file.write(f"{index}\n")
        time.sleep(self.pause)
        return sample(index)

    def decoded(self):
        """The samples decoded since the last call."""
        found = [int(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        self.log.write_text("")
        return found


def sample(index):
    """One of everything a sample may hold; some tensors are empty, not contiguous, without dimensions."""
    generator = torch.Generator().manual_seed(index)
    image = torch.randint(256, (6, 5, 3), dtype=torch.uint8, generator=generator).permute(2, 0, 1)
    return {
        "image": image,
        "more": (torch.full((), index / 2, dtype=torch.bfloat16), [torch.empty(0, 3), f"name {index}", None]),
        "array": np.full((2, 3), index, dtype=np.float32).T,
        "leaves": [
            torch.nn.Parameter(torch.ones(2), False),
            torch.nn.Parameter(image.float()),
            torch.ones(1).requires_grad_(),
        ],
        index: (np.int16(index), True, index * 1.5, b"\x00\xff"),
    }


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        assert a.requires_grad == b.requires_grad
        a, b = torch.empty_like(a), torch.empty_like(b)
        assert a.is_contiguous() == b.is_contiguous() and (a.is_contiguous() or a.stride() == b.stride())
    elif isinstance(a, dict):
        assert list(a) == list(b)
        assert_same(list(a.values()), list(b.values()))
    elif isinstance(a, (tuple, list)):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and np.array_equal(a, b) and a.strides == b.strides
    else:
        assert a == b


# --- the sample cache -------------------------------------------------------------------------------------------------


def test_the_second_epoch_decodes_nothing_and_gives_the_same(folder):
    source = Decoded(folder / "log")
    cache = data.SampleCache(source)
    source.decoded()  # the check that samples do not vary
    for expected in (list(range(40)), [], []):
        for index in range(40):
            assert_same(cache[index], sample(index))
        assert source.decoded() == expected
    again = data.SampleCache(source, then=lambda kept: kept["more"][1][1])
    assert source.decoded() == [0]  # to see that the file is of this dataset
    assert [again[i] for i in (-1, 0)] == ["name 39", "name 0"] and source.decoded() == []
    state = again.state()
    assert state["kept"] == state["samples"] == 40 and state["bytes"] == os.path.getsize(state["path"])
    cache[3]["image"].zero_()  # what the loop does to a sample stays out of the file
    assert_same(cache[3], sample(3))
    with pytest.raises(IndexError, match="index 40 is out of range for 40 samples"):
        cache[40]


def test_workers_fill_one_file_together_and_each_sample_is_decoded_once(folder):
    source = Decoded(folder / "log")
    cache = data.SampleCache(source)
    source.decoded()
    for expected in (list(range(40)), []):
        batches = list(DataLoader(cache, 4, num_workers=3, collate_fn=list, shuffle=True))
        assert sorted(s["more"][1][1] for batch in batches for s in batch) == sorted(f"name {i}" for i in range(40))
        assert sorted(source.decoded()) == expected


def _fill(cache, order):
    for index in order:
        assert_same(cache[index], sample(index))


def test_processes_that_want_the_same_samples_do_not_disturb_each_other(folder):
    cache = data.SampleCache(Decoded(folder / "log"))
    processes = [
        multiprocessing.get_context("fork").Process(target=_fill, args=(cache, random.Random(i).sample(range(40), 40)))
        for i in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    size = os.path.getsize(cache.path)
    _fill(cache, range(40))
    assert os.path.getsize(cache.path) == size
    one = data.SampleCache(Decoded(folder / "log"), key="one process")
    _fill(one, range(40))
    assert size == os.path.getsize(one.path)  # no sample stands there twice


def test_a_kill_at_any_moment_leaves_no_wrong_sample(folder):
    source = Decoded(folder / "log", pause=0.002)
    for attempt in range(6):
        cache = data.SampleCache(source)
        source.decoded()
        process = multiprocessing.get_context("fork").Process(target=_fill, args=(cache, range(40)))
        process.start()
        while process.is_alive() and len(source.log.read_text().splitlines()) < 3 + attempt % 2:
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    kept = cache.state()["kept"]
    assert 0 < kept < 40
    source.decoded()
    cache = data.SampleCache(source)
    source.decoded()
    _fill(cache, range(40))
    assert len(source.decoded()) == 40 - kept
    assert data.SampleCache(source).state()["kept"] == 40


def test_a_flipped_bit_is_noticed_and_mended(folder):
    source = Decoded(folder / "log", length=4)
    cache = data.SampleCache(source)
    _fill(cache, range(4))
    content = bytearray(cache.path.read_bytes())
    content[content.index(b"name 2") + 5] ^= 1
    cache.path.write_bytes(content)
    for expected in ([2], []):
        cache = data.SampleCache(source)
        source.decoded()
        _fill(cache, range(4))
        assert source.decoded() == expected


def test_an_entry_that_points_out_of_the_file_is_none(folder):
    source = Decoded(folder / "log", length=4)
    cache = data.SampleCache(source)
    _fill(cache, range(4))
    content = bytearray(cache.path.read_bytes())
    for index, damaged in ((1, b"\xff" * cache_file.ENTRY.size), (2, cache_file.ENTRY.pack(64, 2**40, 0))):
        at = cache_file.HEADER.size + index * cache_file.ENTRY.size
        content[at : at + cache_file.ENTRY.size] = damaged
    cache.path.write_bytes(content)
    for expected in ([1, 2], []):
        cache = data.SampleCache(source)
        source.decoded()
        _fill(cache, range(4))
        assert source.decoded() == expected


def test_a_file_that_ends_within_its_index_is_begun_anew(folder):
    os.truncate(data.SampleCache(Decoded(folder / "log")).path, 100)
    again = data.SampleCache(Decoded(folder / "log"))
    assert_same(again[11], sample(11))
    assert again.state()["kept"] == 1


def test_the_file_stays_below_its_bound(folder):
    source = Decoded(folder / "log")
    whole = data.SampleCache(source, key="whole")
    _fill(whole, range(40))
    bound = os.path.getsize(whole.path) // 2
    cache = data.SampleCache(source, max_bytes=bound)
    source.decoded()
    _fill(cache, range(40))
    _fill(cache, range(40))
    kept = cache.state()["kept"]
    assert os.path.getsize(cache.path) <= bound and 10 < kept < 30
    assert len(source.decoded()) == 40 + (40 - kept)
    with pytest.raises(ValueError, match=r"max_bytes must hold at least the index, \d+ bytes, got 100"):
        data.SampleCache(source, max_bytes=100)


class Shift(nn.Module):
    """A transform whose repr does not tell what it holds."""

    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, image):
        return self.by


class Constant:
    def __init__(self, value):
        self.value = lambda image: value

    def __repr__(self):
        return "Constant()"

    def __call__(self, image):
        return self.value(image)


def test_another_source_or_transform_has_another_file(tmp_path):
    from PIL import Image

    (tmp_path / "images" / "a").mkdir(parents=True)
    for i in range(3):
        Image.new("RGB", (4, 4), (i, 0, 0)).save(tmp_path / "images" / "a" / f"{i}.png")

    def path(**options):
        return data.SampleCache(data.ImageFolder(tmp_path / "images", **options)).path

    def scale(image, factor):
        return factor

    paths = [path(), path(size=2), path(transform=lambda image: 1), path(transform=lambda image: 2)]
    paths += [path(transform=functools.partial(scale, factor=factor)) for factor in (1, 2)]
    paths += [path(transform=make(factor)) for make in (Shift, Constant) for factor in (1, 2)]
    paths += [path(transform=nn.Sequential(Shift(1), Shift(factor))) for factor in (1, 2)]
    assert path() == paths[0] and path(transform=lambda image: 1) == paths[2] and len(set(paths)) == len(paths)
    assert path(transform=Shift(2)) == paths[7]
    Image.new("RGB", (4, 4), (9, 9, 9)).save(tmp_path / "images" / "a" / "0.png")
    os.utime(tmp_path / "images" / "a" / "0.png", ns=(0, 0))
    assert path() not in paths
    with pytest.raises(ValueError, match="cannot be told from another of its kind: give it a repr, or pass key="):
        path(transform=object())
    with pytest.raises(ValueError, match="cannot be told from another of its kind: give it a repr, or pass key="):
        path(transform=Shift(object()))


class Scaled(Dataset):
    """A user's own: what it does stands in its attributes, its loader and its code."""

    def __init__(self, files, size=2, loader=len):
        self.samples, self.size, self.loader = [(file, 0) for file in files], size, loader

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return torch.full((self.size,), self.loader(self.samples[index][0]))


class Doubled(Scaled):
    def __getitem__(self, index):
        return 2 * super().__getitem__(index)


def twice(path):
    return 2 * len(path)


def test_datasets_that_differ_in_what_they_do_have_files_of_their_own(tmp_path):
    files = [str(tmp_path / name) for name in "ab"]
    for file in files:
        open(file, "w").close()
    sources = [Scaled(files), Scaled(files, size=3), Scaled(files, loader=twice), Doubled(files)]
    for _ in range(2):
        caches = [data.SampleCache(source) for source in sources]
        for cache, source in zip(caches, sources):
            assert torch.equal(cache[0], source[0])
    assert len({cache.path for cache in caches}) == 4


def test_a_file_of_another_dataset_is_not_read(folder):
    class By(Decoded):
        def __init__(self, function):
            super().__init__(folder / "log")
            self.function = function

        def __getitem__(self, index):
            return self.function(index)

    def gone(index):
        raise OSError("gone")

    data.SampleCache(By(abs))[7]
    with pytest.raises(ValueError, match=r"sample 7 in .*\.samples is not that of the dataset: pass another key=, or"):
        data.SampleCache(By(str))
    assert data.SampleCache(By(abs))[7] == data.SampleCache(By(gone))[7] == 7  # what was kept outlives its source


@pytest.mark.parametrize(("chance", "draw"), [(0.5, random.random), (0.2, np.random.rand), (0.2, torch.rand)])
def test_samples_that_vary_now_and_then_are_refused(folder, chance, draw):
    class Flipped(Decoded):
        def __getitem__(self, index):
            return index if (draw(1) if draw is torch.rand else draw()) < chance else -index - 1

    refused = 0
    for seed in range(20):
        seed_all(seed)
        states = random.getstate(), torch.get_rng_state()
        try:
            data.SampleCache(Flipped(folder / "log"), folder=folder / str(seed))
        except ValueError as error:
            refused += "differs from call to call" in str(error)
        assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])
    assert refused == 20


def test_samples_whose_random_numbers_are_their_own_are_kept(folder):
    class Seeded(Decoded):
        def __getitem__(self, index):
            torch.manual_seed(index)
            return torch.rand(3)

    source = Seeded(folder / "log")
    assert torch.equal(data.SampleCache(source)[3], source[3])


def test_what_cannot_be_cached_is_refused(folder):
    class Random(Decoded):
        def __getitem__(self, index):
            return torch.rand(3)

    with pytest.raises(ValueError, match="sample 0 differs from call to call: cache what does not vary and pass"):
        data.SampleCache(Random(folder / "log"))
    with pytest.raises(ValueError, match=r"TensorDataset has neither fingerprint\(\) nor samples \(file, target\)"):
        data.SampleCache(torch.utils.data.TensorDataset(torch.zeros(3)))
    with pytest.raises(TypeError, match=r"a cached sample may hold tensors, .* got object"):
        data.SampleCache([object()], key="objects")
    with pytest.raises(ValueError, match=r"key must be a string or None, got PosixPath\('photos'\)"):
        data.SampleCache([1.0], key=Path("photos"))


# --- staging ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def remote(request):
    """Shards of 1,000 bytes each in fsspec's memory file system."""
    memory = fsspec.filesystem("memory")
    urls = [f"memory://{request.node.name}/{i}.bin" for i in range(5)]
    for i, url in enumerate(urls):
        with memory.open(url, "wb") as file:
            file.write(bytes([i]) * 1000)
    yield urls
    memory.rm(f"/{request.node.name}", recursive=True)


def copies(folder):
    return sorted(path.name.split("-")[1] for path in folder.glob("*-*.bin"))


def test_shards_come_in_order_stay_below_the_bound_and_are_used_again(folder, remote):
    shards = data.Staging(folder / "s", max_bytes=3000)
    for i, path in enumerate(shards.stage(remote)):
        assert path.read_bytes() == bytes([i]) * 1000 and path.suffix == ".bin"
        assert len(copies(folder / "s")) <= 3
    assert copies(folder / "s") == ["2.bin", "3.bin", "4.bin"]
    fsspec.filesystem("memory").rm(remote[4])
    with shards.hold(remote[4]) as path:  # known and verified: the remote is not asked
        assert path.read_bytes() == bytes([4]) * 1000


def test_a_shard_in_use_is_not_deleted(folder, remote):
    shards = data.Staging(folder / "s", max_bytes=2000)
    with shards.hold(remote[0]) as first:
        for path in shards.stage(remote[1:]):
            assert path.exists() and first.exists()
    assert list(shards.stage([])) == []
    stopped = shards.stage(remote)
    next(stopped)
    stopped.close()  # frees what was fetched ahead
    with shards.hold(remote[3]), shards.hold(remote[4]):
        assert copies(folder / "s") == ["3.bin", "4.bin"]


def test_a_copy_that_was_changed_or_is_old_is_fetched_anew(folder, remote):
    with data.Staging(folder / "s").hold(remote[0]) as path:
        path.write_bytes(b"x" * 1000)
    with data.Staging(folder / "s").hold(remote[0]) as path:
        assert path.read_bytes() == bytes(1000)
    with fsspec.filesystem("memory").open(remote[0], "wb") as file:
        file.write(b"newer")
    with data.Staging(folder / "s").hold(remote[0]) as path:
        assert path.read_bytes() == b"newer"


class Told(LocalFileSystem):
    """A remote that tells of a change of a file by one thing alone."""

    protocol = "told"
    by = "ETag"

    def info(self, path, **options):
        found = super().info(path, **options)
        return {name: found[name] for name in ("name", "size", "type")} | {Told.by: str(found["mtime"])}


@pytest.mark.parametrize("by", ["ETag", "Last-Modified", "blob_id"])  # of HTTP, and of Hugging Face
def test_a_change_is_seen_by_whatever_the_remote_tells(folder, monkeypatch, by):
    fsspec.register_implementation("told", Told, clobber=True)
    monkeypatch.setattr(Told, "by", by)
    source, url = folder / "a.bin", f"told://{folder}/a.bin"
    for time_of_change in (1, 1000):
        source.write_bytes(bytes([time_of_change % 256]) * 100)
        os.utime(source, (time_of_change, time_of_change))
        with data.Staging(folder / "s").hold(url) as path:
            assert path.read_bytes() == source.read_bytes()


def test_what_is_wrong_with_a_shard_is_said_with_its_url(folder, remote):
    right = hashlib.sha256(bytes(1000)).hexdigest()
    with data.Staging(folder / "s", checksums={remote[0]: right}).hold(remote[0]) as path:
        assert path.exists()
    with pytest.raises(data.StagingError, match=rf"{remote[1]} has SHA-256 \w+, expected {right}"):
        list(data.Staging(folder / "s", checksums={remote[1]: right}).stage(remote[1:]))
    with pytest.raises(data.StagingError, match=rf"{remote[2]} has 1000 bytes, max_bytes is 999"):
        list(data.Staging(folder / "t", max_bytes=999).stage(remote[2:]))
    with pytest.raises(FileNotFoundError, match="none"):
        list(data.Staging(folder / "s").stage(["memory://none.bin"]))
    for ahead in (0, 1.5):
        with pytest.raises(ValueError, match=f"ahead must be an integer of at least 1, got {ahead}"):
            data.Staging(folder / "s", ahead=ahead)


class Slow(LocalFileSystem):
    """A remote that can be interrupted, and that notes what it gave away."""

    protocol = "slow"
    pause = 0.01

    def open(self, path, mode="rb", **options):
        file = super().open(path, mode, **options)
        read = file.read

        def slowly(size=-1):
            time.sleep(Slow.pause)
            with open(f"{path}.log", "a") as log:
                log.write(f"{size}\n")
            return read(size)

        file.read = slowly
        return file


def _take(folder, url, digests):
    with data.Staging(folder).hold(url) as path:
        digests.put(hashlib.sha256(path.read_bytes()).hexdigest())


def test_processes_share_one_copy_and_a_killed_one_goes_on_where_it_stopped(folder, monkeypatch):
    fsspec.register_implementation("slow", Slow, clobber=True)
    monkeypatch.setattr(staging, "CHUNK", 65536)
    monkeypatch.setattr(Slow, "pause", 0.01)
    content = random.Random(0).randbytes(40 * 65536)
    (folder / "shard.bin").write_bytes(content)
    log, url = folder / "shard.bin.log", f"slow://{folder}/shard.bin"
    context = multiprocessing.get_context("fork")
    digests = context.Queue()
    killed = context.Process(target=_take, args=(folder / "s", url, digests))
    killed.start()
    while killed.is_alive() and not any(p.stat().st_size > len(content) // 4 for p in (folder / "s").glob("*.part")):
        time.sleep(0.005)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    log.unlink()
    two = [context.Process(target=_take, args=(folder / "s", url, digests)) for _ in range(2)]
    for process in two:
        process.start()
    expected = hashlib.sha256(content).hexdigest()
    assert [digests.get(timeout=60) for _ in two] == [expected, expected]
    for process in two:
        process.join()
    assert len(log.read_text().splitlines()) <= 31  # the rest, once, for both


def test_tables_are_read_from_staged_copies(folder):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as pq

    memory = fsspec.filesystem("memory")
    for i in range(4):
        with memory.open(f"memory://tables/{i}.parquet", "wb") as file:
            pq.write_table(pa.table({"id": list(range(25 * i, 25 * i + 25))}), file, row_group_size=5)
    size = memory.info("memory://tables/0.parquet")["size"]
    for shuffle in (False, True):
        shards = data.Staging(folder / "s", max_bytes=3 * size, ahead=1)
        rows = data.TableDataset("memory://tables/*.parquet", staging=shards, shuffle=shuffle, shuffle_rows=40)
        for epoch in range(2):
            rows.set_epoch(epoch)
            ids = [row["id"].item() for row in rows]
            assert sorted(ids) == list(range(100)) and (ids == sorted(ids)) != shuffle
            assert len(list((folder / "s").glob("*.parquet"))) <= 3


def test_checksums_are_known_by_any_way_to_write_their_urls(folder):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as pq

    with fsspec.filesystem("memory").open("memory://sums/a.parquet", "wb") as file:
        pq.write_table(pa.table({"id": [1]}), file)
    shards = data.Staging(folder / "s", checksums={"memory://sums/a.parquet": "0" * 64})
    for paths in ("memory://sums/a.parquet", "memory://sums/*.parquet"):  # found as memory:///sums/a.parquet
        with pytest.raises(ValueError, match=r"a\.parquet has SHA-256 \w+, expected 0000"):
            list(data.TableDataset(paths, staging=shards))


class Secret(LocalFileSystem):
    protocol = "secret"

    def __init__(self, token=None, **options):
        super().__init__(**options)
        if token != "x":
            raise PermissionError("no token")


def test_tables_are_found_and_read_with_the_options_of_their_staging(folder):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as pq

    fsspec.register_implementation("secret", Secret, clobber=True)
    pq.write_table(pa.table({"id": [1, 2, 3]}), folder / "a.parquet")
    shards = data.Staging(folder / "s", storage_options={"token": "x"})
    rows = data.TableDataset(f"secret://{folder}/*.parquet", staging=shards)
    assert [row["id"].item() for row in rows] == [1, 2, 3]


def test_a_pass_over_staged_tables_goes_on_within_a_block_of_two_files(folder):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as pq

    for i in range(4):
        pq.write_table(pa.table({"id": list(range(10 * i, 10 * i + 10))}), folder / f"{i}.parquet", row_group_size=5)

    def make():
        shards = data.Staging(folder / "s")
        rows = data.TableDataset(f"file://{folder}/*.parquet", staging=shards, shuffle=True, shuffle_rows=25)
        return data.loader(rows, 5, num_workers=0)

    whole = [batch["id"].tolist() for batch in make()]
    first = make()
    for _ in zip(range(4), first):
        first.advance()
    again = make()
    again.load_state_dict(first.state_dict())
    assert [batch["id"].tolist() for batch in again] == whole[4:]


def test_shards_that_are_json_are_no_notes(folder):
    memory = fsspec.filesystem("memory")
    memory.pipe("/notes/labels.json", b"[1, 2, 3]")
    memory.pipe("/notes/sizes.json", b'{"size": 100000}')
    memory.pipe("/notes/other.bin", bytes(100))
    shards = data.Staging(folder / "s", max_bytes=1000)
    names = ("labels.json", "sizes.json", "other.bin")
    with contextlib.ExitStack() as stack:
        paths = [stack.enter_context(shards.hold(f"memory://notes/{name}")) for name in names]
        assert all(path.exists() for path in paths)
    memory.rm("/notes", recursive=True)


def test_what_was_fetched_ahead_gives_way_to_what_is_needed_now(folder, remote):
    """Two processes that wait for each other's batches: one has fetched as much as there is room for."""
    first, second = (data.Staging(folder / "s", max_bytes=3000, ahead=2) for _ in range(2))
    ahead = first.stage(remote[:3])
    assert next(ahead).read_bytes() == bytes(1000)
    while len(copies(folder / "s")) < 3:
        time.sleep(0.01)
    with second.hold(remote[3]) as path:
        assert path.read_bytes() == bytes([3]) * 1000 and "0.bin" in copies(folder / "s")
    assert [path.read_bytes()[0] for path in ahead] == [1, 2]


def test_the_last_copy_of_a_pass_is_let_go_of(folder):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as pq

    for i in range(4):
        pq.write_table(pa.table({"id": list(range(100))}), folder / f"{i}.parquet")
    size = os.path.getsize(folder / "0.parquet")
    shards = data.Staging(folder / "s", max_bytes=size * 3 // 2)
    train, valid = (
        data.TableDataset([f"file://{folder}/{i}.parquet" for i in part], staging=shards) for part in ((0, 1), (2, 3))
    )
    for _ in range(2):
        assert sum(1 for _ in train) == sum(1 for _ in valid) == 200


def test_a_fork_holds_no_lock_of_its_parent(folder):
    lock = folder / "lock"
    with _files.locked(lock):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        with _files.locked(lock, wait=False) as free:
            assert not free
    try:
        end, free = time.monotonic() + 20, False
        while not free and time.monotonic() < end:  # the child has to begin first
            with _files.locked(lock, wait=False) as free:
                time.sleep(0.01)
        assert free
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


class Stream(LocalFileSystem):
    """A remote without positions, whose connection is lost once, with an error of a library's own."""

    protocol = "stream"
    lost = 1

    def open(self, path, mode="rb", **options):
        file = super().open(path, mode, **options)
        read = file.read

        def reading(size=-1):
            if Stream.lost and file.tell() >= 3000:
                Stream.lost -= 1
                raise KeyError("payload is not completed")
            return read(size)

        def seek(at, whence=0):
            raise ValueError("Cannot seek streaming HTTP file")

        file.read, file.seek = reading, seek
        return file


def test_a_stream_that_breaks_is_read_again_from_its_start(folder, monkeypatch):
    fsspec.register_implementation("stream", Stream, clobber=True)
    monkeypatch.setattr(staging, "CHUNK", 1000)
    content = random.Random(0).randbytes(10_000)
    (folder / "a.bin").write_bytes(content)
    monkeypatch.setattr(Stream, "lost", 1)
    with data.Staging(folder / "s").hold(f"stream://{folder}/a.bin") as path:
        assert path.read_bytes() == content
    monkeypatch.setattr(Stream, "lost", 100)
    with pytest.raises(data.StagingError, match=r"stream://.*a.bin: KeyError: 'payload is not completed'"):
        data.Staging(folder / "t").hold(f"stream://{folder}/a.bin").__enter__()


def test_a_write_that_failed_halfway_is_not_in_the_copy(folder, monkeypatch):
    content = random.Random(0).randbytes(10_000)
    (folder / "a.bin").write_bytes(content)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def more_room(seconds):
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(staging.time, "sleep", more_room)  # between two tries
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with data.Staging(folder / "s").hold(f"file://{folder}/a.bin") as path:
            assert path.read_bytes() == content
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
        monkeypatch.setattr(staging.time, "sleep", lambda seconds: None)
        with pytest.raises(OSError, match=rf"{folder}/t/\w+\.part"):  # which disk it is that has no room
            list(data.Staging(folder / "t").stage([f"file://{folder}/a.bin"]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_urls_that_cannot_be_listed_raise(folder, remote):
    def urls():
        yield remote[0]
        raise RuntimeError("the list is broken")

    with pytest.raises(RuntimeError, match="the list is broken"):
        list(data.Staging(folder / "s").stage(urls()))


class Mask(torch.Tensor):
    """Tells a transform what the numbers are."""


def test_a_sample_leaves_no_cycle_of_references(folder):
    cache = data.SampleCache([{"x": [torch.ones(3)]}], key="cycles")
    assert_same(cache[0], cache[0])
    while gc.collect():  # what goes may leave more
        pass
    gc.disable()
    try:
        assert_same(cache[0], {"x": [torch.ones(3)]})
        assert gc.collect() == 0  # else files stay open until a collection
    finally:
        gc.enable()


def test_an_array_with_a_mask_is_refused(folder):
    with pytest.raises(TypeError, match=r"a cached sample may hold tensors, .* got MaskedArray"):
        data.SampleCache([np.ma.masked_array([1.0, 2.0], [True, False])], key="masks")


def test_views_that_conjugate_or_negate_are_kept_with_their_values(folder):
    conjugate = torch.tensor([1 + 2j]).conj()
    cache = data.SampleCache([(conjugate, conjugate.imag)], key="views")
    assert_same(cache[0], (torch.tensor([1 - 2j]), torch.tensor([-2.0])))
    assert_same(cache[0], (torch.tensor([1 - 2j]), torch.tensor([-2.0])))
    assert cache.state()["kept"] == 1


def test_a_tensor_of_a_class_of_its_own_is_refused(folder):
    with pytest.raises(TypeError, match=r"a cached sample may hold tensors, .* got Mask"):
        data.SampleCache([torch.zeros(2, 2).as_subclass(Mask)], key="masks")


def test_a_broken_first_sample_is_left_out_like_any_other(folder):
    class Broken(Decoded):
        def __getitem__(self, index):
            if index == 0:
                raise OSError("truncated")
            return index

    batches = data.loader(data.SampleCache(Broken(folder / "log", length=5)), 5, num_workers=0, max_skipped=1)
    assert next(iter(batches)).tolist() == [1, 2, 3, 4] and list(batches.skipped) == ["sample 0"]

    class Random(Broken):
        def __getitem__(self, index):
            return super().__getitem__(index) + random.random()

    with pytest.raises(ValueError, match="sample 1 differs from call to call"):
        data.SampleCache(Random(folder / "log"), key="random")


IDENTITY = """
import functools, torch
from fusedtrain.data import cache

def scaled(image):
    return image * SIZE

def known(image):
    return image in {"L", "P", "RGBA", "CMYK", "LA"}

def outer(image):
    return scaled(image)

class Scale:
    def __repr__(self):
        return "Scale()"

    def __call__(self, image):
        return image + SIZE

for SIZE in (1, 2):
    mean = functools.partial(known, mean=torch.tensor([0.485 + SIZE * 1e-6]))
    for transform in (known, scaled, outer, Scale(), mean, {"a", "b", "c", "d"}):
        print(cache._identity(transform))
"""


def test_what_a_transform_reads_is_part_of_its_key_and_the_order_of_sets_is_not():
    import harness

    def identities(seed):
        done = harness.run_python("-c", IDENTITY, PYTHONHASHSEED=str(seed))
        assert not done.returncode, done.stderr
        return done.stdout.splitlines()

    first = identities(1)
    assert first == identities(2)
    assert [a == b for a, b in zip(first[:6], first[6:], strict=True)] == [True, False, False, False, False, True]


def test_names_of_files_are_bytes(tmp_path):
    from PIL import Image

    (tmp_path / "images" / "a").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "images" / "a" / "x.png")
    try:
        os.rename(tmp_path / "images" / "a" / "x.png", os.fsencode(tmp_path) + b"/images/a/caf\xe9.png")
    except OSError:
        pytest.skip("this file system takes UTF-8 alone")
    assert data.SampleCache(data.ImageFolder(tmp_path / "images"))[0][1] == 0


class Numbered(Decoded):
    def __getitem__(self, index):
        return torch.zeros(2), index


def test_a_sample_may_hold_its_index_whoever_asks_for_it(folder):
    cache = data.SampleCache(Numbered(folder / "log"))
    for _ in range(2):
        for asked in (EpochIndex(1, 5), np.int64(2), torch.tensor(3)):
            assert_same(cache[asked], (torch.zeros(2), int(asked)))
    assert cache.state()["kept"] == 3


def test_bytes_that_were_read_do_not_stay_in_memory(folder):
    class Encoded(Decoded):
        def __getitem__(self, index):
            return bytes([index]) * 2**20

    cache = data.SampleCache(Encoded(folder / "log", length=9))
    tracemalloc.start()
    try:
        for _ in range(2):
            assert [cache[index][0] for index in range(9)] == list(range(9))
        assert tracemalloc.get_traced_memory()[0] < 2**20
    finally:
        tracemalloc.stop()


class Listed(Dataset):
    """A user's own, with a list of samples in a form of its own."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return torch.tensor(index)


@pytest.mark.parametrize("samples", [["ab", "cd"], [{"image": "a", "label": 0}], [("a", 0, 1)], [(0, 1)], [("a", 0)]])
def test_samples_that_tell_no_files_ask_for_a_key(folder, samples):
    with pytest.raises(
        ValueError, match=r"(Listed has neither .* nor samples \(file,|samples of Listed: .*'a'; pass key=)"
    ):
        data.SampleCache(Listed(samples))
    assert data.SampleCache(Listed(samples), key="listed")[0] == 0

"""Datasets, the loader with its workers and faults, and the way to the device."""

import contextlib
import copy
import errno
import functools
import io
import json
import math
import os
import pickle
import signal
import sys
import time
from dataclasses import dataclass
from unittest import mock

import harness
import pytest
import torch
from PIL import Image
from test_readme import SNIPPETS
from torch.utils.data import Dataset, Subset

from fusedtrain import data
from fusedtrain.data import faults, prefetch, workers
from fusedtrain.train.rng import SeededDataset
from fusedtrain.train.sampler import EpochSampler


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Squares(Dataset):
    """Sample ``i`` is ``i * i``; some raise, one kills its process, one hangs."""

    def __init__(self, length=20, bad=(), kill=None, hang=None):
        self.length, self.bad, self.kill, self.hang = length, set(bad), kill, hang

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError("image file is truncated")
        if index == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.hang:
            time.sleep(60)
        return torch.tensor(index * index)

    def sample_name(self, index):
        return f"square-{index}.png"


class AtOnce(Squares):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@dataclass
class Rows:
    """A batch that is no list."""

    x: torch.Tensor


class Whole(Squares):
    def __getitems__(self, indices):
        return Rows(torch.tensor(indices))


def rows(batch):
    return batch.x


@pytest.fixture
def images(tmp_path):
    """Two classes of RGB, grey, palette and transparent images, JPEG and PNG, of different sizes."""
    root = tmp_path / "images"
    for i, (mode, name) in enumerate(
        [
            ("RGB", "cat/a.jpg"),
            ("L", "cat/deep/b.JPEG"),
            ("P", "dog/c.png"),
            ("RGBA", "dog/d.png"),
            ("RGB", "dog/e.png"),
        ]
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = torch.randint(256, (40 + i, 30 + i, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(i))
        Image.fromarray(noise.numpy()).convert(mode).save(path)
    (root / "cat" / "notes.txt").write_text("not an image")
    return root


# --- samples that fail, workers that die ------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_corrupt_sample_is_named(num_workers):
    batches = data.loader(Squares(bad=[7]), 4, num_workers=num_workers)
    with pytest.raises(data.SampleError) as error:
        list(batches)
    assert str(error.value) == "sample 7 (square-7.png) cannot be read: OSError: image file is truncated"


def test_the_name_is_found_behind_a_subset():
    batches = data.loader(Subset(Subset(Squares(bad=[7]), range(5, 15)), range(9, -1, -1)), 4, num_workers=0)
    with pytest.raises(data.SampleError, match=r"sample 7 \(square-7.png\) cannot be read"):
        list(batches)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_corrupt_samples_are_left_out_and_counted_up_to_the_limit(num_workers):
    bad = [1, 8, 9, 10, 11]  # the third batch holds nothing else
    batches = data.loader(Squares(bad=bad), 4, num_workers=num_workers, max_skipped=5)
    for _ in range(2):  # the second epoch counts none twice
        assert [len(batch) for batch in batches] == [3, 4, 4, 4]
        assert list(batches.skipped) == [f"sample {i} (square-{i}.png)" for i in bad]
    few = data.loader(Squares(bad=bad), 4, num_workers=num_workers, max_skipped=4)
    with pytest.raises(data.SampleError, match=r"sample 11 .* \(one more than max_skipped=4\): OSError"):
        list(few)


def test_a_worker_that_is_killed_and_one_that_hangs_tell_their_sample():
    with pytest.raises(
        data.WorkerError, match=r"killed by SIGKILL: worker 1 was at sample 6 \(square-6.png\); the system"
    ):
        list(data.loader(Squares(kill=6), 4, num_workers=2))
    with pytest.raises(data.WorkerError, match=r"killed by SIGKILL: worker 0 was at sample 6 \(square-6.png\)"):
        list(data.loader(Subset(Subset(Squares(kill=6), range(5, 9)), range(4)), 4, num_workers=1))
    seeded = data.loader(SeededDataset(Squares(bad=[2], kill=9)), 4, num_workers=1, max_skipped=1)
    with pytest.raises(data.WorkerError, match=r"killed by SIGKILL: worker 0 was at sample 9 \(square-9.png\)"):
        list(seeded)
    with pytest.raises(data.WorkerError, match=r"killed by SIGKILL: worker 0 was at sample 6 \(square-6.png\)"):
        list(data.loader(Squares(kill=6), 4, num_workers=1, sampler=torch.arange(20).numpy()))
    with pytest.raises(data.WorkerError, match=r"killed by SIGKILL; the system"):  # not sample 3, which was before
        list(data.loader(AtOnce(bad=[2], kill=9), 4, num_workers=1, max_skipped=1))
    with pytest.raises(
        data.WorkerError, match=r"no batch came within timeout=2 s: worker 0 was at sample 2 \(square-2.png\)"
    ):
        list(data.loader(Squares(hang=2), 4, num_workers=1, timeout=2))


def test_a_worker_that_stayed_and_died_between_two_passes_tells_so():
    batches = data.loader(Squares(8), 4, num_workers=1, persistent_workers=True)
    assert len(list(batches)) == 2
    previous = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise here
    try:
        os.kill(batches._iterator._workers[0].pid, signal.SIGKILL)
        with pytest.raises(
            data.WorkerError, match=r"^a worker process was killed by SIGKILL: worker 0 was at sample 7"
        ):
            list(batches)
    finally:
        signal.signal(signal.SIGCHLD, previous)
    assert len(list(batches)) == 2  # with a new one


def test_a_pass_after_an_interrupted_one_has_new_workers():
    """Ctrl-C in a terminal ends the workers, too."""
    batches = data.loader(Squares(8), 4, num_workers=2, persistent_workers=True)
    assert len(list(batches)) == 2
    stayed = batches._iterator._workers
    for worker in stayed:
        os.kill(worker.pid, signal.SIGINT)
        worker.join(20)
    assert [worker.exitcode for worker in stayed] == [0, 0]
    assert [len(batch) for batch in batches] == [4, 4] and batches._iterator._workers[0] is not stayed[0]
    stayed = batches._iterator._workers
    interrupted = mock.patch.object(type(batches._iterator), "_next_data", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):  # amid a batch, while they still live
        list(batches)
    assert not any(worker.is_alive() for worker in stayed) and len(list(batches)) == 2


def test_a_worker_that_dies_while_it_hands_a_batch_over_is_named():
    process = torch.multiprocessing.get_context("fork").Process(target=os._exit, args=(9,))
    process.start()
    guarded = faults.Guarded(Squares(10), 1)
    errors = ConnectionResetError(104, "Connection reset by peer"), OSError("disk")
    found = [faults.worker_error(error, [process], guarded, 0) for error in errors]
    assert isinstance(found[0], data.WorkerError) and "a worker process ended with exit code 9" in str(found[0])
    assert found[1] is errors[1] and faults.worker_error(errors[0], [], guarded, 0) is errors[0]


def test_a_death_that_is_told_while_another_error_of_it_is_looked_at_names_the_worker(monkeypatch):
    worker_error, calls = faults.worker_error, iter(range(9))

    def disturbed(error, processes, *known):
        if next(calls) == 0:
            raise RuntimeError(f"DataLoader worker (pid {processes[0].pid}) is killed by signal: Killed. ")
        return worker_error(error, processes, *known)

    monkeypatch.setattr(faults, "worker_error", disturbed)
    with pytest.raises(data.WorkerError, match=r"killed by SIGKILL: worker 0 was at sample 6 \(square-6.png\)"):
        list(data.loader(Squares(kill=6), 4, num_workers=1))


def test_it_is_a_data_loader_of_the_dataset():
    dataset = Squares(10)
    batches = data.loader(dataset, 4, num_workers=0)
    assert isinstance(batches, torch.utils.data.DataLoader) and len(batches) == 3 and len(batches.dataset) == 10
    assert batches.dataset.length == 10
    stored = data.loader([3, 1, 2], 2, num_workers=0).dataset
    assert [x for x, _ in zip(stored, range(9))] == [3, 1, 2]
    assert torch.cat(list(batches)).tolist() == [i * i for i in range(10)]
    single = data.loader(dataset, None, num_workers=0)
    assert [int(x) for x in single] == [i * i for i in range(10)]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_may_give_whole_batches_of_any_kind(num_workers):
    batches = data.loader(Whole(8), 4, num_workers=num_workers, collate_fn=rows)
    assert torch.cat(list(batches)).tolist() == list(range(8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, 'num_workers must be "auto" or an integer of at least 0, got -1'),
        ({"num_workers": "all"}, "got 'all'"),
        ({"num_workers": 1.5}, "num_workers must be .* got 1.5"),
        ({"num_workers": True}, "num_workers must be .* got True"),
        ({"num_workers": 1, "prefetch_factor": 0}, 'prefetch_factor must be "auto" or an integer of at least 1, got 0'),
        ({"num_workers": 0, "pin_memory": "yes"}, "pin_memory must be"),
        ({"num_workers": 0, "max_skipped": -1}, "max_skipped must be an integer of at least 0, got -1"),
        ({"num_workers": 0, "max_skipped": 1.5}, r"max_skipped must be an integer of at least 0, got 1\.5"),
        ({"batch_size": -1}, "batch_size must be None or an integer of at least 1, got -1"),
        ({"batch_size": 2.5}, r"batch_size must be None or an integer of at least 1, got 2\.5"),
        ({"num_workers": 0, "batch_sampler": [[0]]}, "batch_sampler option is mutually exclusive with batch_size"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        data.loader(Squares(), **{"batch_size": 4} | options)
    with pytest.raises(ValueError, match="mutually exclusive"):
        data.loader(Squares(), shuffle=True, batch_sampler=[[0]], num_workers=0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda batches: pickle.loads(pickle.dumps(batches))])
def test_a_loader_can_be_copied(copied):
    batches = copied(data.loader(Squares(bad=[3]), 4, num_workers=1, max_skipped=1))
    assert [len(batch) for batch in batches] == [3, 4, 4, 4, 4]
    assert batches.skipped == {"sample 3 (square-3.png)": "OSError: image file is truncated"}


def test_counts_may_be_numbers_of_numpys(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDTRAIN_CACHE", str(tmp_path / "cache"))
    number = pytest.importorskip("numpy").int64
    assert [len(batch) for batch in data.loader(Squares(), number(8))] == [8, 8, 4]
    batches = data.loader(Squares(), 8, num_workers=number(1), prefetch_factor=number(3))
    assert [len(batch) for batch in batches] == [8, 8, 4]
    assert data.loader(Squares(), 8, num_workers=number(0)).num_workers == 0


def test_a_timeout_is_for_workers_alone():
    assert len(list(data.loader(Squares(), 4, num_workers=0, timeout=5))) == 5


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_pass_continues_in_the_middle_of_an_epoch(num_workers):
    def make():
        sampler = EpochSampler(50, 4, seed=1)
        # Nothing is left of the third batch; it is used up all the same.
        bad = next(batch for i, batch in enumerate(sampler) if i == 2)
        return data.loader(Squares(50, bad=bad), batch_sampler=sampler, num_workers=num_workers, max_skipped=4)

    whole = make()
    expected = [batch.tolist() for batch in whole]
    assert len(expected) == len(whole) - 1
    for stop in (1, 2, 3, 7):
        first = make()
        ahead = data.DevicePrefetcher(first, "cpu")
        for _, _ in zip(range(stop), ahead):
            ahead.advance()
        again = make()
        again.load_state_dict(ahead.state_dict())
        assert [batch.tolist() for batch in again] == expected[stop:]
    with pytest.raises(TypeError, match=r"pass batch_sampler=fusedtrain\.train\.EpochSampler"):
        data.loader(Squares(), 4, num_workers=0).state_dict()


# --- the choice of workers --------------------------------------------------------------------------------------------


class Latent(Squares):
    """Waits for a disk that is not there."""

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.tensor(index)


class Busy(Squares):
    """Computes for some 5 ms."""

    def __getitem__(self, index):
        end = time.thread_time() + 0.005
        while time.thread_time() < end:
            pass
        return torch.tensor(index)


def test_waiting_gets_more_workers_than_cores_and_computing_never(monkeypatch, cache):
    monkeypatch.setattr(workers, "SECONDS", 0.3)
    monkeypatch.setattr(workers, "MOST", 8 * workers.cores())
    waiting = workers.plan(Latent(1000), 8)
    assert waiting.num_workers >= 4 * workers.cores(), waiting
    assert waiting.points[waiting.num_workers] > 2 * min(workers.cores(), 2) / 0.02, waiting  # on one core, too
    computing = workers.plan(Busy(1000), 8)
    assert computing.num_workers <= workers.cores() and max(computing.points) <= workers.cores(), computing
    assert len(waiting.points) in (2, 3) and "% of it on a core" in waiting.reason
    assert waiting.starts.keys() == waiting.points.keys() and 0 < waiting.starts[waiting.num_workers] < 60
    # Remembered per machine and dataset: the same again without measuring, another length measured anew.
    monkeypatch.setattr(workers, "_measure", lambda *args: pytest.fail("measured again"))
    batches = data.loader(Latent(1000), 8)
    assert batches.plan == waiting and batches.num_workers == waiting.num_workers
    assert batches.prefetch_factor == waiting.prefetch_factor and batches.persistent_workers
    with pytest.raises(pytest.fail.Exception):
        workers.plan(Latent(1001), 8)
    keys = [json.loads(path.read_text())["key"] for path in (cache / "loader").glob("*.json")]
    assert sorted(key["dataset"][1] for key in keys) == ["Busy", "Latent"] and all(key["host"] for key in keys)


@pytest.mark.parametrize(
    ("wall", "cpu", "cores", "expected"),
    [
        (0.004, 0.0001, 2, [32, 64]),  # storage latency: as many as are sensible
        (0.004, 0.0010, 2, [4, 8]),  # cores / cpu = 2000 per second needs 8 workers of 250
        (0.004, 0.0040, 8, [4, 8]),  # all of it computing: the cores
        (0.00001, 0.00001, 2, [0, 1, 2]),  # so cheap that sending may cost more
    ],
)
def test_the_candidates_follow_the_model(wall, cpu, cores, expected):
    assert workers._candidates(workers._One(wall, cpu, 0, 1.0), cores) == expected


@pytest.mark.parametrize(
    ("start", "samples", "expected"),
    [
        (0.05, math.inf, [32, 64]),  # the length is unknown: what delivers most
        (0.05, 10**7, [32, 64]),  # a long run pays for any start
        (0.05, 20_000, [20, 40]),  # 80 s of loading, 40 starts of 50 ms
        (0.5, 2000, [2, 4]),  # 8 s of loading
        (0.5, 200, [0, 1, 2]),  # loading takes no longer than starting
    ],
)
def test_the_candidates_are_fewer_where_starting_takes_longer_than_loading(start, samples, expected):
    one = workers._One(0.004, 0.0001, 0, 1.0, start)
    assert workers._candidates(one, 2, samples) == expected


def test_a_short_pass_does_not_pay_for_starting_many_workers():
    points, starts = {0: 250.0, 4: 900.0, 32: 7000.0}, {0: 0.0, 4: 0.4, 32: 3.2}
    chosen = [workers._choose(points, starts, samples) for samples in (100, 1000, 10**6, math.inf)]
    assert chosen == [0, 4, 32, 32]


def test_batches_in_flight_fit_into_memory(monkeypatch):
    monkeypatch.setattr(workers, "_free_memory", lambda: 4 * 100)
    assert workers._fit_memory(8, 2, 6)[:2] == (8, 2)
    assert workers._fit_memory(8, 2, 12)[:2] == (8, 1)
    assert workers._fit_memory(1, 2, 101)[:2] == (0, 1)
    count, prefetch, note = workers._fit_memory(8, 4, 40)
    assert (count, prefetch) == (2, 1) and "8 workers with 4 batches each would not fit" in note


@pytest.mark.parametrize(("room", "counts"), [(3, [0, 1]), (1, [0])])
def test_workers_whose_batches_find_no_room_are_not_even_tried(monkeypatch, room, counts):
    """Such as that of a container, whose /dev/shm has 64 MB: measuring ended in an error."""
    samples = [torch.zeros(1000)] * 200
    monkeypatch.setattr(workers, "SECONDS", 0.1)
    monkeypatch.setattr(workers, "_candidates", lambda *model: [0, 2, 4])
    monkeypatch.setattr(workers, "_free_memory", lambda: 4 * room * 4 * samples[0].nbytes)
    found = workers.plan(samples, 4)
    assert list(found.points) == counts and found.num_workers in counts
    assert "would not fit into 0 MiB of free memory" in found.reason


def test_a_dataset_that_cannot_be_read_at_all_says_so():
    with pytest.raises(data.SampleError, match="while one worker was measured: ValueError: no sample could be read"):
        data.loader(Squares(3, bad=range(3)), 4)
    assert data.loader(Squares(0), 4).num_workers == 0


# --- the way to the device --------------------------------------------------------------------------------------------


def test_batches_arrive_on_the_device_normalised_and_in_order(device):
    generator = torch.Generator().manual_seed(0)
    batches = [
        {
            "x": torch.randint(256, (2, 3, 5, 4), dtype=torch.uint8, generator=generator),
            "y": (torch.tensor([i]), "name"),
        }
        for i in range(5)
    ]
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    ahead = data.DevicePrefetcher(batches, device, normalize=(mean, std))
    assert len(ahead) == 5 and ("no copy" in ahead.describe()) == (device == "cpu")

    def stock(x, dtype):
        shift, scale = (torch.tensor(part, dtype=dtype).view(1, 3, 1, 1) for part in (mean, std))
        return (x.to(dtype) / 255 - shift) / scale

    for _ in range(2):
        for i, (got, sent) in enumerate(zip(ahead, batches, strict=True)):
            assert got["x"].device.type == device and got["x"].is_contiguous(memory_format=torch.channels_last)
            assert got["y"][0].item() == i and got["y"][1] == "name"
            x = sent["x"]
            harness.assert_as_good_as_torch(got["x"].cpu(), stock(x, torch.float32), stock(x, torch.float64), "images")
    left = next(iter(data.DevicePrefetcher(batches, device, channels_last=False)))["x"]
    assert left.dtype == torch.uint8 and left.is_contiguous() and torch.equal(left.cpu(), batches[0]["x"])


class OnGpu(torch.Tensor):
    """Says that it lies on a GPU, and on which streams it is used."""

    device, used = torch.device("cuda:0"), []

    def to(self, device, non_blocking):
        return self

    def record_stream(self, stream):
        self.used.append(stream.name)


def test_the_side_stream_waits_for_batches_that_are_made_on_the_device(monkeypatch):
    """By the current stream, which may not have come to them yet. All passes have the same side stream."""
    calls, made = [], []

    class Stream:
        def __init__(self, device, name="side"):
            self.device, self.name = torch.device("cuda:0"), name
            made.append(name)

        def wait_stream(self, other):
            calls.append(f"{self.name} waits for {other.name}")

    monkeypatch.setattr(OnGpu, "used", calls)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, "current"))
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(prefetch, "_side_stream", functools.cache(prefetch._side_stream.__wrapped__))
    batch = torch.zeros(2).as_subclass(OnGpu)
    ahead = data.DevicePrefetcher([batch], "cuda")
    assert next(iter(ahead)) is batch
    assert calls == ["side waits for current", "side", "current waits for side", "current"]
    assert next(iter(ahead)) is batch and made.count("side") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": ((0.5,), (0.5, 0.5))}, "one number per channel"),
        ({"normalize": ((0.5,), (0.0,))}, "std > 0"),
        ({"normalize": ((math.nan,), (0.5,))}, "one number per channel"),
        ({"normalize": (0.5, 0.5, 0.5)}, r"normalize must be \(mean, std\)"),
        ({"normalize": 0.5}, r"normalize must be \(mean, std\)"),
        ({"dtype": torch.int8}, "dtype must be torch.float32, bfloat16 or float16, got torch.int8"),
        ({"normalize": ((0.5,), (0.5,))}, r"normalize has 1 channels, the images are \[1, 3, 2, 2\]"),
    ],
)
def test_a_prefetcher_that_cannot_work_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        list(data.DevicePrefetcher([torch.zeros(1, 3, 2, 2, dtype=torch.uint8)], "cpu", **options))


@pytest.mark.parametrize("images", [torch.rand(2, 3, 4, 4), torch.zeros(3, 4, 4, dtype=torch.uint8)])
def test_images_that_are_not_normalised_are_refused(images, device):
    """Such as those of ToTensor: a network would learn from other numbers than its evaluation gives it."""
    known = ((0.5,) * 3, (0.5,) * 3)
    with pytest.raises(
        ValueError, match=r"normalize takes images \[N, C, H, W\] of uint8, and a batch has none: .*\d, 4, 4\]"
    ):
        list(data.DevicePrefetcher([{"x": images, "y": (torch.zeros(2), "name")}], device, normalize=known))
    assert torch.equal(next(iter(data.DevicePrefetcher([images], device))).cpu(), images)
    beside = [torch.zeros(2, 3, 4, 4, dtype=torch.uint8), images]
    assert next(iter(data.DevicePrefetcher([beside], device, normalize=known)))[0].dtype == torch.float32


# --- image folders ----------------------------------------------------------------------------------------------------


def test_an_image_folder_gives_what_torchvision_gives(images, zoo):
    from torchvision import datasets, transforms

    ours, theirs = data.ImageFolder(images), datasets.ImageFolder(str(images), transforms.PILToTensor())
    assert ours.classes == theirs.classes and ours.samples == theirs.samples and len(ours) == 5
    for (x, target), (y, truth) in zip(ours, theirs, strict=True):
        assert x.dtype == torch.uint8 and torch.equal(x, y) and target == truth


def test_grey_images_of_16_bits_keep_their_first_8(tmp_path):
    (tmp_path / "grey").mkdir()
    values = torch.arange(0, 65536, 4096, dtype=torch.int32).view(4, 4)
    for name in ("a.png", "b.tif"):
        Image.fromarray(values.numpy().astype("uint16")).save(tmp_path / "grey" / name)
    for image, _ in (found := data.ImageFolder(tmp_path, extensions=(".png", ".tif"))):
        assert torch.equal(image, (values >> 8).to(torch.uint8).expand(3, 4, 4))
    assert len(found) == 2


def test_images_of_any_size_make_a_batch(images):
    ((x, targets),) = data.loader(data.ImageFolder(images, size=16), 8, num_workers=0)
    assert x.shape == (5, 3, 16, 16) and targets.tolist() == [0, 0, 1, 1, 1]
    flat = data.ImageFolder(images, size=16, transform=lambda image: image.size)
    assert flat[0] == ((16, 16), 0)


def test_a_single_extension_is_not_taken_for_its_letters(images):
    found = data.ImageFolder(images.parent, extensions=".png").samples
    assert [os.path.basename(file) for file, _ in found] == ["c.png", "d.png", "e.png"]


def test_a_broken_file_is_named(images):
    for index, name in ((0, "cat/a.jpg"), (2, "dog/c.png")):
        path = images / name
        whole = path.read_bytes()
        for content in (whole[: len(whole) // 2], b"no image", b""):
            path.write_bytes(content)
            with pytest.raises(data.SampleError, match=rf"sample {index} \(.*/{name}\) cannot be read: \w+Error: "):
                list(data.loader(data.ImageFolder(images, size=8), 2, num_workers=0))
        path.write_bytes(whole)
    before = data.ImageFolder(images).fingerprint()
    assert before == data.ImageFolder(images).fingerprint() != data.ImageFolder(images, size=8).fingerprint()
    os.utime(path, ns=(0, 0))
    assert data.ImageFolder(images).fingerprint() != before


@pytest.mark.parametrize("size", [0, 16.0, "16", (16, 16)])
def test_a_size_that_is_no_number_of_pixels_is_refused(images, size):
    with pytest.raises(ValueError, match="size must be an integer of at least 1, got "):
        data.ImageFolder(images, size=size)


def test_folders_without_images_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        data.ImageFolder(tmp_path / "none")
    with pytest.raises(ValueError, match="has no class folders"):
        data.ImageFolder(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no file that ends in .jpg, .jpeg, .png"):
        data.ImageFolder(tmp_path)


def test_a_missing_package_names_the_extra():
    code = """
import sys
for package in ("PIL", "pyarrow", "numpy"):
    sys.modules[package] = None
from fusedtrain import data
for call in (lambda: data.ImageFolder("."), lambda: data.TableDataset("."), data.digits):
    try:
        call()
    except ModuleNotFoundError as error:
        print(error)
"""
    done = harness.run_python("-c", code)
    assert done.stdout.splitlines() == [
        f"needs the package {package}, which is not installed: pip install 'fusedtrain[{extra}]'"
        for package, extra in {"PIL": "data", "pyarrow": "data", "numpy": "train"}.items()
    ], done.stderr


def test_the_readme_snippet_runs(images, monkeypatch, capsys):
    (snippet,) = (code for code in SNIPPETS if "data.loader(" in code)
    images.rename(images.parent / "photos")
    monkeypatch.chdir(images.parent)
    monkeypatch.setattr(workers, "SECONDS", 0.1)
    names = {}
    exec(snippet, names)
    assert names["images"].shape == (5, 3, 224, 224) and "samples per second" in capsys.readouterr().out


def test_the_embedded_digits():
    train, valid = data.digits(size=16), data.digits("valid", size=16)
    assert (len(train), len(valid)) == (1437, 360) and train[0][0].shape == (1, 16, 16)
    with pytest.raises(ValueError, match='split must be "train" or "valid", got \'test\''):
        data.digits("test")


def test_jpeg_is_decoded_at_a_fraction_where_that_is_enough(tmp_path):
    (tmp_path / "a").mkdir()
    buffer = io.BytesIO()
    gradient = torch.arange(1024).view(1, -1, 1).expand(1024, 1024, 3).div(4).byte()
    Image.fromarray(gradient.numpy()).save(buffer, "jpeg", quality=95)
    (tmp_path / "a" / "x.jpg").write_bytes(buffer.getvalue())
    x, _ = data.ImageFolder(tmp_path, size=64)[0]
    expected = (torch.arange(64) * 16 + 7.5) / 4  # the mean of each sixteenth column
    assert (x[0].float().mean(0) - expected).abs().max() < 2  # grey levels, of 256


def test_of_many_samples_that_all_fail_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(workers, "SECONDS", 0.1)
    with pytest.raises(
        data.SampleError, match=r"no sample could be read, of 64: sample \d+ .* image file is truncated"
    ):
        data.loader(Squares(1000, bad=range(1000)), 4)


class Drawn(Dataset):
    """Draws a number for each sample, and opens a file when it is first asked."""

    file = None

    def __len__(self):
        return 200

    def __getitem__(self, index):
        self.file = self.file or open(os.devnull)  # noqa: SIM115
        return torch.rand(2)


def test_measuring_leaves_this_process_as_it_was(monkeypatch):
    monkeypatch.setattr(workers, "SECONDS", 0.1)
    dataset, state = Drawn(), torch.get_rng_state()
    assert 0 in workers.plan(dataset, 4).points
    assert torch.equal(torch.get_rng_state(), state) and dataset.file is None


class Once(torch.utils.data.IterableDataset):
    """Can be read once; with workers it gives nothing."""

    def __init__(self):
        self.numbers = iter(range(10_000))

    def __iter__(self):
        return self.numbers if torch.utils.data.get_worker_info() is None else iter(())


def test_a_stream_is_not_used_up_by_measuring_it(monkeypatch):
    monkeypatch.setattr(workers, "SECONDS", 0.1)
    batches = data.loader(Once(), 4)
    assert batches.num_workers == 0 and next(iter(batches)).tolist() == [0, 1, 2, 3]


class Opened(Dataset):
    """Has its samples from what workers open when they start."""

    table = None

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return self.table[index]


def open_table(worker):
    torch.utils.data.get_worker_info().dataset.table = range(100)


@pytest.mark.parametrize("num_workers", [2, "auto"])
def test_workers_open_what_their_dataset_needs(num_workers, monkeypatch):
    monkeypatch.setattr(workers, "SECONDS", 0.1)
    batches = data.loader(Opened(), 10, num_workers=num_workers, worker_init_fn=open_table)
    assert torch.cat(list(batches)).tolist() == list(range(100))


def test_a_plan_is_that_of_what_a_dataset_stands_on(tmp_path, images):
    def key(dataset):
        return workers.describe(dataset, 4, None, None)

    def folder(**options):
        return data.ImageFolder(images, **options)

    wrapped = [Subset(Squares(20), range(5)), Subset(folder(), range(5)), Subset(folder(size=8), range(5))]
    wrapped += [SeededDataset(Squares(5)), SeededDataset(folder()), data.SampleCache(folder(), folder=tmp_path / "s")]
    wrapped += [torch.utils.data.ConcatDataset([folder()]), folder(), folder(transform=str)]
    assert len({json.dumps(key(dataset)) for dataset in wrapped}) == len(wrapped)
    assert key(Subset(folder(), range(5))) == key(wrapped[1])


MADE = """
import torch
def shrink(x): return x[::2]
class Made(torch.utils.data.Dataset):
    transform = lambda x: x + 1
    def __len__(self): return 8
    def decode(self, index): return shrink(torch.zeros(8))
    def __getitem__(self, index): return self.decode(index)
def collate(samples): return samples[:4]
"""


def test_a_plan_is_that_of_the_code_that_makes_samples():
    keys = []
    for before, after in (("", ""), ("", ""), ("::2", "::4"), ("zeros(8)", "ones(9)"), ("+ 1", "+ 2"), (":4", ":5")):
        names = {"__name__": "made"}
        exec(MADE.replace(before, after), names)
        made = Subset(names["Made"](), range(4))
        keys.append(json.dumps(workers.describe(made, 4, names["collate"], None)))
    assert keys[0] == keys[1] and len(set(keys)) == 5


def test_without_a_place_to_remember_it_in_a_plan_is_made_all_the_same(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSEDTRAIN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(workers, "SECONDS", 0.1)
    with pytest.warns(UserWarning, match="what is measured is not remembered: .*Not a directory"):
        assert data.loader(Squares(), 4).plan.points


def test_a_disk_that_is_full_keeps_no_loader_from_being_made(monkeypatch):
    """Its folder and its lock could still be made: they hold no bytes."""
    monkeypatch.setattr(workers, "SECONDS", 0.1)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(workers._files, "write_json", mock.Mock(side_effect=full))
    with pytest.warns(UserWarning, match="what is measured is not remembered: .*No space left on device") as warned:
        assert data.loader(Squares(), 4).plan.points
    assert sum("not remembered" in str(warning.message) for warning in warned) == 1


def test_a_killed_call_that_was_to_measure_again_leaves_nothing_older(monkeypatch):
    monkeypatch.setattr(workers, "SECONDS", 0.1)
    workers.plan(Squares(), 4)
    with monkeypatch.context() as killed:
        killed.setattr(workers, "_measure", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            workers.plan(Squares(), 4, remember=False)
    lines = []
    workers.plan(Squares(), 4, progress=lines.append)
    assert lines[0].startswith("one worker: ")


def test_the_quota_of_either_version_of_cgroups_counts(monkeypatch, tmp_path):
    for name, text in {"quota": "150000\n", "period": "100000\n", "both": "max 100000\n", "none": "-1\n"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for names, cores in ((("quota", "period"), 2), (("none", "period"), 8), (("both",), 8), (("missing",), 8)):
        monkeypatch.setattr(workers, "QUOTAS", (tuple(str(tmp_path / name) for name in names),))
        assert workers.cores() == cores


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no cgroups")
def test_the_memory_limit_of_either_version_of_cgroups_counts(monkeypatch, tmp_path):
    from fusedtrain.train import memory

    told, (version_2, version_1) = tmp_path / "told", memory.CGROUP_FILES
    for i, (text, group, (limit, used, total)) in enumerate(
        (
            ("0::/job/task\n", "job/task", version_2),
            ("0::/job/task\n", "job", version_2),  # of a group around it
            ("0::/of/the/host\n", "", version_2),  # a container may know itself by the host's name
            ("3:cpu:/\n4:hugetlb,memory:/docker/1\n0::/\n", "memory", version_1),
        )
    ):
        folder = tmp_path / str(i) / group
        (tmp_path / str(i) / "job" / "task").mkdir(parents=True)
        folder.mkdir(exist_ok=True)
        monkeypatch.setattr(memory, "CGROUPS", (told, tmp_path / str(i)))
        told.write_text(text)
        free = workers._free_memory()
        (folder / used).write_text("9000000\n")
        (folder / "memory.stat").write_text(f"file 5000000\n{total}active_file 1000\n{total}inactive_file 3000\n")
        (folder / limit).write_text("max\n" if total == "" else f"{2**63 - 4096}\n")
        assert workers._free_memory() > 0.5 * free > 1004000
        (folder / limit).write_text("10000000\n")
        assert workers._free_memory() == memory.available() == 1004000
        (folder / limit).write_text("8000000\n")
        assert memory.available() == 0


@pytest.mark.skipif(os.name != "posix", reason="the stand-in for vm_stat is a shell script")
def test_macos_tells_its_free_memory(monkeypatch, tmp_path):
    from fusedtrain.train import memory

    tool = tmp_path / "vm_stat"
    tool.write_text(
        """#!/bin/sh
cat <<END
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               12345.
Pages active:                            281230.
Pages inactive:                          279012.
Pages speculative:                         1734.
END
"""
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert workers._free_memory() == memory.available() == 16384 * (12345 + 279012)
    tool.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(OSError, match="vm_stat does not tell how much memory is free: "):
        memory.available()
    assert workers._free_memory() == 2**62


def test_files_that_the_system_keeps_in_memory_take_no_room(monkeypatch):
    from fusedtrain.train import memory

    monkeypatch.setattr(memory, "available", lambda: 7 * 2**30)
    assert workers._free_memory() == 7 * 2**30


@pytest.mark.parametrize("batches", ["loader", "prefetcher", "plain"])
def test_a_trainer_goes_on_with_a_loader_that_keeps_no_position(batches, tmp_path):
    from torch.utils.data import DataLoader, TensorDataset

    from fusedtrain.train import SmallNet, TrainConfig, Trainer

    samples = TensorDataset(torch.rand(16, 1, 8, 8), torch.randint(10, (16,)))
    own = data.loader(samples, 8, shuffle=True, num_workers=0)
    given = {"loader": own, "prefetcher": data.DevicePrefetcher(own, "cpu")}
    given["plain"] = data.DevicePrefetcher(DataLoader(samples, 8), "cpu")
    assert not getattr(given[batches], "keeps_position", True)
    model = SmallNet(10)
    config = TrainConfig(epochs=1, device="cpu", checkpoint=str(tmp_path / "run"))
    Trainer(model, torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), config).fit(given[batches])
    assert list((tmp_path / "run").iterdir())

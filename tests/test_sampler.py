"""The order of samples and the randomness that belongs to each of them, with real DataLoader workers."""

import copy
import math
import pickle
import random
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fusedtrain.train.rng import EpochIndex, SeededDataset, mix, rng_state, set_rng_state
from fusedtrain.train.sampler import EpochSampler

SIZES = [(1, 4), (10, 4), (12, 4), (37, 5)]


def samplers(world: int, size: int, batch: int, **options) -> list[EpochSampler]:
    return [EpochSampler(size, batch, rank=rank, world_size=world, **options) for rank in range(world)]


def real(sampler: EpochSampler, steps: int | None = None) -> list[list[int]]:
    """The batches from the position on, without what was taken only for the company; uses them up."""
    batches = []
    for step, batch in enumerate(sampler):
        if step == steps:
            break
        batches.append(batch[: sampler.counts()[sampler.rank]])
        sampler.advance()
    return batches


# --- the order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize(("size", "batch"), SIZES)
def test_every_sample_comes_once_and_all_ranks_take_equally_many_steps(size, batch, world):
    ranks = samplers(world, size, batch, seed=3)
    shards = [real(sampler) for sampler in ranks]
    assert sorted(index for shard in shards for step in shard for index in step) == list(range(size))
    assert {len(shard) for shard in shards} == {len(ranks[0])} == {-(-size // (world * batch))}
    for step in zip(*shards):
        sizes = [len(indices) for indices in step]
        assert max(sizes) - min(sizes) <= 1 and max(sizes) <= batch


def test_a_rank_that_is_left_without_a_sample_gets_one_that_does_not_count():
    ranks = samplers(4, 5, 1)
    assert [[len(batch) for batch in sampler] for sampler in ranks] == [[1, 1]] * 4
    assert ranks[0].counts(0) == [1, 1, 1, 1] and ranks[3].counts(1) == [1, 0, 0, 0] and ranks[0].counts(2) == [0] * 4


def test_the_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch, **options):
        sampler = EpochSampler(50, 8, seed=seed, **options)
        sampler.set_epoch(epoch)
        return [index for batch in sampler for index in batch]

    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1)]
    assert len({tuple(one) for one in orders}) == 4 and order(1, 1) == orders[3]
    assert order(0, 5, shuffle=False) == list(range(50))
    assert len(order(0, 0, drop_last=True)) == 48
    with torch.device("meta"):  # as by torch.set_default_device
        assert order(1, 1) == orders[3] and order(0, 5, shuffle=False) == list(range(50))


@pytest.mark.parametrize("worlds", [(1, 1), (1, 2), (2, 1), (3, 2), (2, 4)])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_another_number_of_ranks_continues_in_the_middle_of_an_epoch(worlds, steps):
    before, after = (samplers(world, 37, 3, seed=1) for world in worlds)
    for sampler in before:
        sampler.set_epoch(2)
    seen = [index for sampler in before for batch in real(sampler, steps) for index in batch]
    states = [sampler.state_dict() for sampler in before]
    assert all(state == states[0] for state in states)
    for sampler in after:
        sampler.load_state_dict(pickle.loads(pickle.dumps(states[0])))
        sampler.set_epoch(2)  # as the loop does; stays where it is
    seen += [index for sampler in after for batch in real(sampler) for index in batch]
    assert sorted(seen) == list(range(37))
    after[0].set_epoch(3)
    assert after[0].position == 0 and after[0].remaining() == len(after[0])


def test_the_state_is_small_and_of_another_order_refused():
    state = EpochSampler(10**6, 8).state_dict()
    assert state == {"size": 10**6, "shuffle": True, "seed": 0, "epoch": 0, "position": 0}
    with pytest.raises(ValueError, match="the position belongs to an order with size=1000000, this is 9"):
        EpochSampler(9, 8).load_state_dict(state)
    with pytest.raises(ValueError, match="with seed=0, this is 1"):
        EpochSampler(10**6, 8, seed=1).load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size must be an integer of at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"batch_size": 2.5}, r"batch_size must be an integer of at least 1, got 2\.5"),
        ({"world_size": 0}, "world_size must be an integer of at least 1, got 0"),
        ({"rank": 1}, r"rank must lie between 0 and world_size - 1 \(0\), got 1"),
        ({"drop_last": True, "batch_size": 11}, "drop_last leaves nothing of 10 samples: a step takes 11"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        EpochSampler(**{"size": 10, "batch_size": 2, **arguments})


# --- per-sample randomness --------------------------------------------------------------------------------------------


class Noise(Dataset):
    """Each sample: its index and a number from each generator, the normal ones included: they keep a second number."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        numbers = (
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.randn(),
            torch.rand(()),
            torch.randn(()),
        )
        return torch.tensor([float(index), *map(float, numbers)], dtype=torch.float64)


def load(workers: int, epochs=(0, 1), position=0, persistent=False, world=1) -> torch.Tensor:
    parts = []
    for sampler in samplers(world, 23, 4, seed=7):
        loader = DataLoader(
            SeededDataset(Noise(), 7), batch_sampler=sampler, num_workers=workers, persistent_workers=persistent
        )
        for epoch in epochs:
            sampler.set_epoch(epoch)
            sampler.advance(position)
            parts += list(loader)
    return torch.cat(parts)


def test_numbers_of_a_sample_do_not_depend_on_workers_position_or_ranks():
    alone = load(0)
    assert len(alone[:, 1:].unique()) == alone[:, 1:].numel()  # in no two samples, epochs or generators
    assert torch.equal(alone, load(2, persistent=True))
    assert torch.equal(alone[23 + 8 :], load(1, epochs=[1], position=2))
    by_index = load(0, epochs=[1], world=2)
    assert torch.equal(by_index[by_index[:, 0].argsort()], alone[23:][alone[23:, 0].argsort()])


def test_the_generators_of_the_main_process_are_left_alone():
    state = rng_state()
    dataset = SeededDataset(Noise())
    dataset[3]
    next(iter(DataLoader(dataset, batch_size=5)))
    after = rng_state()
    set_rng_state(state)
    # DataLoader itself draws one seed from torch's generator per iterator.
    torch.empty((), dtype=torch.int64).random_()
    assert_rng_equal(rng_state(), after)


class Failing(Dataset):
    def __getitem__(self, index):
        random.random(), torch.rand(3), np.random.randn()
        raise KeyError(index)


def test_a_sample_that_fails_leaves_the_generators_too():
    state = rng_state()
    with pytest.raises(KeyError):
        SeededDataset(Failing())[1]
    assert_rng_equal(state, rng_state())


def assert_rng_equal(a: dict, b: dict) -> None:
    assert a["python"] == b["python"] and torch.equal(a["torch"], b["torch"])
    assert (
        a["numpy"][0] == b["numpy"][0]
        and torch.equal(a["numpy"][1], b["numpy"][1])
        and a["numpy"][2:] == b["numpy"][2:]
    )


def test_an_index_with_an_epoch_is_an_index():
    index = EpochIndex(3, epoch=8)
    again = pickle.loads(pickle.dumps([index, copy.deepcopy(index)]))
    assert [(one, one.epoch) for one in again] == [(3, 8)] * 2
    assert (
        [0, 1, 2, 5][index] == 5 and torch.arange(4)[index] == 3 and np.arange(4)[index] == 3 and {3: "a"}[index] == "a"
    )


def test_mixing_is_stable_and_separates_neighbours():
    assert mix(0, 0, 0) == 0xA2266035BBB0C56B
    assert (
        len({mix(seed, epoch, index) for seed in range(9) for epoch in range(9) for index in range(-1, 50)}) == 81 * 51
    )


def test_a_sample_costs_at_most_10_us():
    dataset, indices = SeededDataset(list(range(256))), [EpochIndex(index, 1) for index in range(256)]

    def seed_three_generators():  # what is left on a processor that needs more than 10 us for this alone
        for index in range(256):
            random.seed(mix(0, 1, index))
            np.random.seed(index)
            torch.default_generator.manual_seed(index)

    def seconds(call) -> float:  # of this thread: what it costs, however many others wait for the core
        start = time.thread_time()
        call()
        return (time.thread_time() - start) / 256

    best = floor = math.inf
    for _ in range(1000):
        best = min(best, seconds(lambda: dataset.__getitems__(indices)))
        floor = min(floor, seconds(seed_three_generators))
        if best < 10e-6:
            return
    assert best < 1.25 * floor


def test_rng_state_brings_every_generator_back(device):
    def draw():
        numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]
        return [*numbers, torch.rand((), device=device).item()]

    draw()
    state = rng_state()
    first = draw()
    assert draw() != first
    set_rng_state(pickle.loads(pickle.dumps(state)))
    assert draw() == first


def test_the_states_of_a_run_on_the_cpu_leave_gpus_alone(monkeypatch):
    for name in ("is_available", "device_count"):
        monkeypatch.setattr(torch.cuda, name, lambda: pytest.fail("a GPU was asked for"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    SeededDataset([1, 2]).__getitems__([0, 1])
    set_rng_state(rng_state())

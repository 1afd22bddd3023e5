"""Checkpoints: the file, the folder of a run, and weights in and out. Kills while saving stand in kill_saving.py."""

import argparse
import errno
import json
import os
import resource
import shutil
import stat
import subprocess
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import harness
import pytest
import torch
from torch import nn

from fusedtrain import cli
from fusedtrain.train import checkpoint_file, weights
from fusedtrain.train.checkpoint import CheckpointError, CheckpointStore, verify
from fusedtrain.train.state_tree import DTYPES

HERE = Path(__file__).parent


def state(value: float = 1.0) -> dict:
    torch.manual_seed(0)
    return {"model": {"fc.weight": torch.randn(3, 5) * value, "steps": torch.tensor(7)}, "epoch": 2, "name": "é"}


def assert_same(a, b) -> None:
    """Equal values of equal types; tensors bit by bit, with dtype and strides."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert bytes(a.contiguous().view(-1).view(torch.uint8)) == bytes(b.contiguous().view(-1).view(torch.uint8))
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b):
            assert_same(one, other)
    else:
        assert a == b or (a != a and b != b)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_what_goes_in_comes_out(tmp_path):
    shared = torch.arange(6.0)
    values = {
        "tensors": [torch.full((2, 2), 3).to(dtype) for dtype in DTYPES.values() if dtype != torch.float32],
        "layouts": {
            "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "transposed": torch.randn(3, 4).t(),
            "scalar": torch.tensor(1.5),
            "empty": torch.empty(0, 3),
            "parameter": nn.Parameter(torch.ones(2)).detach(),
        },
        "shared": (shared, shared),
        "numbers": [0, -1, 2**70, 0.1, 1e300, float("inf"), float("nan"), True, None, "text", '"\\\u2028'],
        "keys": {0: "int", "0": "str", None: 1, (1, "a"): 2, "$tensor": 3, "a/b": torch.ones(1), "": {}},
        "a": {"b/c": torch.zeros(1)},
        "a/b": {"c": torch.ones(1)},
        "__metadata__": torch.ones(2),
        "counter": Counter({3: 2}),
        "$tuple": {"$tuple": 1},
    }
    store = CheckpointStore(tmp_path)
    store.save(5, values)
    loaded, info = store.load()
    assert_same(loaded, values)
    assert info.step == 5 and info.passed_over == ()
    assert loaded["shared"][0] is loaded["shared"][1]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_another_default_device_changes_nothing(tmp_path, asynchronous):
    values = {"plain": torch.arange(6.0), "transposed": torch.randn(3, 4).t()}
    store = CheckpointStore(tmp_path, asynchronous=asynchronous)
    with torch.device("meta"):  # as by torch.set_default_device
        store.save(5, values)
        loaded, _ = store.load()
    assert_same(loaded, values)


def test_gaps_and_expanded_tensors_are_saved_by_value(tmp_path):
    base = torch.arange(24.0).view(4, 6)
    store = CheckpointStore(tmp_path)
    store.save(0, {"sliced": base[:, 1:3], "expanded": base[:1].expand(4, 6), "parameter": nn.Parameter(base)})
    loaded, _ = store.load()
    assert torch.equal(loaded["sliced"], base[:, 1:3]) and torch.equal(loaded["expanded"], base[:1].expand(4, 6))
    assert type(loaded["parameter"]) is torch.Tensor
    assert (tmp_path / "checkpoint-000001-step-0.safetensors").stat().st_size < 2000


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, object()]}, r"a/1: a checkpoint holds tensors, .*, got builtins.object"),
        ({"a": torch.eye(2).to_sparse()}, "a: a checkpoint cannot hold torch.sparse_coo tensors of torch.float32"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "a: a checkpoint cannot hold .* torch.complex128"),
        ({"a": torch.empty(2, device="meta")}, "a: the tensor is on the meta device"),
    ],
)
def test_what_a_file_cannot_hold_is_refused_and_nothing_is_written(tmp_path, value, message):
    store = CheckpointStore(tmp_path / "new")
    with pytest.raises(TypeError, match=message):
        store.save(0, value)
    assert not (tmp_path / "new").exists()


def test_other_programs_read_the_file(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    path = CheckpointStore(tmp_path).save(1, {"model": {"w": images, "half": torch.ones(3).half(), "b": images[0, 0]}})
    read = safetensors.load_file(path)
    assert torch.equal(read["model/w"], images) and torch.equal(read["model/b"], images[0, 0])
    assert torch.equal(read["model/half"], torch.ones(3).half())


def test_every_flipped_bit_is_found(tmp_path):
    path = CheckpointStore(tmp_path).save(3, state())
    whole = path.read_bytes()
    damaged = tmp_path / "damaged"
    with open(damaged, "wb+", buffering=0) as file:
        file.write(whole)
        for byte in range(len(whole)):
            for bit in range(8):
                file.seek(byte)
                file.write(bytes([whole[byte] ^ 1 << bit]))
                assert verify(damaged), f"bit {bit} of byte {byte}"
            file.seek(byte)
            file.write(whole[byte : byte + 1])
    assert verify(damaged) == []


def test_every_cut_and_an_addition_are_found(tmp_path):
    path = CheckpointStore(tmp_path).save(3, state())
    whole, damaged = path.read_bytes(), tmp_path / "damaged"
    damaged.write_bytes(whole)
    for length in reversed(range(len(whole))):
        os.truncate(damaged, length)
        assert verify(damaged), length
    damaged.write_bytes(whole + b"\0")
    assert verify(damaged) == [f"the file has {len(whole) + 1} bytes and should have {len(whole)}"]


def test_a_damaged_tensor_is_named(tmp_path):
    path = CheckpointStore(tmp_path).save(3, state())
    flip(path, -1)
    assert verify(path) == ["tensor model/fc.weight is damaged: its checksum differs"]


def test_a_newer_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_file, "FORMAT", 2)
    path = CheckpointStore(tmp_path).save(3, state())
    monkeypatch.undo()
    assert verify(path) == ["written by a newer fusedtrain, in format 2; known is 1"]


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 16
    path.write_bytes(data)


# --- the folder -------------------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("keep", [1, 2, None])
def test_the_newest_stay(tmp_path, keep, asynchronous):
    store = CheckpointStore(tmp_path, keep=keep, asynchronous=asynchronous)
    for step in range(10, 60, 10):
        store.save(step, state(step))
    store.wait()
    assert store.steps() == [10, 20, 30, 40, 50][-(keep or 5) :]
    assert len(names(tmp_path)) == (keep or 5) + 1
    assert json.loads((tmp_path / "latest").read_text()) == {"file": names(tmp_path)[-2], "step": 50}
    assert_same(store.load()[0], state(50))


def test_a_whole_number_that_is_a_float_is_how_many_stay(tmp_path):
    store = CheckpointStore(tmp_path, keep=2.0)
    for step in range(3):
        store.save(step, state(step))
    assert store.steps() == [1, 2]


def test_loading_walks_back_to_the_newest_that_is_whole_and_says_why(tmp_path):
    store = CheckpointStore(tmp_path, keep=None)
    paths = [store.save(step, state(step)) for step in range(5)]
    paths[4].unlink()
    flip(paths[3], 40)
    flip(paths[2], -1)
    loaded, info = store.load()
    assert_same(loaded, state(1))
    assert (info.path, info.step) == (paths[1], 1)
    assert info.passed_over == (
        (paths[4], "it is missing, but was the latest"),
        (paths[3], "the header is damaged: its hash differs"),
        (paths[2], "tensor model/fc.weight is damaged: its checksum differs"),
    )
    assert "passed over checkpoint-000003-step-2.safetensors: tensor model/fc.weight is damaged" in str(info)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3 in .* is whole:\n.*the header is damaged"):
        store.load(step=3)
    assert_same(store.load(step=0)[0], state(0))


def test_without_a_whole_checkpoint_loading_says_so(tmp_path):
    store = CheckpointStore(tmp_path / "none")
    assert store.steps() == []
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*none$"):
        store.load()
    store.save(7, state()).write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"is whole:\n  checkpoint-000001-step-7.safetensors: the file is cut off"
    ):
        store.load()
    with pytest.raises(CheckpointError, match="no checkpoint of step 8"):
        store.load(step=8)


def test_a_damaged_pointer_costs_nothing(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, state())
    for text in (b"", b"{", b"[]", b'{"file": "../x"}', b'{"file": "latest"}', b"\xff"):
        (tmp_path / "latest").write_bytes(text)
        assert store.load()[1].step == 1
    store.save(2, state())
    assert store.load()[1].step == 2


def test_a_run_that_went_back_knows_its_own_newest(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    for step in (80, 90, 100):
        store.save(step, state(step))
    again = CheckpointStore(tmp_path, keep=3)
    assert_same(again.load(step=80)[0], state(80))
    again.save(90, state(91))
    assert_same(CheckpointStore(tmp_path).load()[0], state(91))
    assert again.steps() == [90, 100, 90]


def test_what_a_killed_run_left_half_written_goes(tmp_path):
    CheckpointStore(tmp_path).save(1, state())
    (tmp_path / ".checkpoint-000002-step-2.safetensors.77.tmp").write_bytes(b"half")
    store = CheckpointStore(tmp_path)
    assert store.load()[1].passed_over == ()
    store.save(3, state())
    assert names(tmp_path) == [
        "checkpoint-000001-step-1.safetensors",
        "checkpoint-000002-step-3.safetensors",
        "latest",
    ]


def test_a_checkpoint_that_was_renamed_is_not_taken_for_another_step(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, state()).rename(tmp_path / "checkpoint-000009-step-9.safetensors")
    with pytest.raises(CheckpointError, match="the file holds step 1: it was renamed"):
        store.load()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_weights_that_are_not_finite_never_replace_a_checkpoint(tmp_path, dtype, value):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, state())
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    bad = torch.ones(40, dtype=dtype)
    bad[17] = value
    with pytest.raises(CheckpointError, match="model/fc holds NaN or infinity: not saved"):
        store.save(2, {"model": {"fc": bad}})
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}
    for part in ("model/f", "fc"):
        with pytest.raises(CheckpointError, match="model/fc holds NaN or infinity"):
            CheckpointStore(tmp_path, may_be_nonfinite=[part]).save(2, {"model": {"fc": bad}})
    for part in ("model/fc", "model"):
        CheckpointStore(tmp_path, may_be_nonfinite=[part]).save(2, {"model": {"fc": bad}})


def test_bad_arguments_are_refused(tmp_path):
    for keep in (0, 2.5):
        with pytest.raises(ValueError, match=f"keep must be a whole number of at least 1 or None, got {keep}"):
            CheckpointStore(tmp_path, keep=keep)
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        CheckpointStore(tmp_path).save(-1, {})


# --- asynchronous saving ----------------------------------------------------------------------------------------------


def test_an_asynchronous_save_writes_the_step_it_names(tmp_path):
    store = CheckpointStore(tmp_path, keep=None, asynchronous=True)
    weight, nested = torch.zeros(300_000), {"count": [0]}
    for step in range(1, 6):
        weight.fill_(step)
        nested["count"][0] = step
        store.save(step, {"weight": weight, "nested": nested})
        weight.fill_(-1)  # while the thread writes
        nested["count"][0] = -1
    for step in range(1, 6):
        loaded, _ = store.load(step=step)
        assert loaded["weight"].unique().tolist() == [step] and loaded["nested"] == {"count": [step]}


def test_a_failed_asynchronous_save_is_reported_at_the_next_step(tmp_path):
    store = CheckpointStore(tmp_path, asynchronous=True)
    store.save(1, state())
    store.wait()
    store.check()
    with file_limit(100):
        store.save(2, state())
        store._executor.submit(lambda: None).result()  # behind the write
    with pytest.raises(CheckpointError, match=r"the checkpoint of step 2 could not be written .*: File too large"):
        store.check()
    store.check()
    assert store.load()[1].step == 1
    store.save(3, state())
    assert store.load()[1].step == 3


# --- a full disk ------------------------------------------------------------------------------------------------------


@contextmanager
def file_limit(size: int):
    """No file of this process grows beyond ``size`` bytes: Python gets EFBIG as it would get ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [1, 1000, 300_000])
def test_a_file_that_cannot_grow_leaves_the_old_checkpoint(tmp_path, limit):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, state())
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with file_limit(limit), pytest.raises(CheckpointError, match=r"step 2 could not be written to .*: File too large"):
        store.save(2, {"weight": torch.ones(100_000)})
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert_same(store.load()[0], state())


@pytest.mark.parametrize("limit", [1, 1000, 300_000])
def test_weights_that_cannot_be_written_leave_the_old_ones(tmp_path, limit):
    model = torch.nn.Linear(300, 300)
    weights.save_weights(tmp_path / "w.pt", model)
    before = (tmp_path / "w.pt").read_bytes()
    with file_limit(limit), pytest.raises(OSError, match="File too large"):
        weights.save_weights(tmp_path / "w.pt", model)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("w.pt", before)]


def test_numbers_of_numpy_are_numbers(tmp_path):
    numpy = pytest.importorskip("numpy")
    store = CheckpointStore(tmp_path)
    store.save(1, {"steps": numpy.int64(3), "rates": [numpy.float32(0.5), numpy.float64("inf")]})
    assert repr(store.load()[0]) == "{'steps': 3, 'rates': [0.5, inf]}"


def test_a_full_disk_stops_with_its_name_and_leaves_the_old_checkpoint(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small disk")
    try:
        store = CheckpointStore(disk, keep=1)
        store.save(1, {"weight": torch.ones(20_000)})
        message = f"step 2 could not be written to {disk}.*: {os.strerror(errno.ENOSPC)}"
        for _ in range(2):
            with pytest.raises(CheckpointError, match=message):
                store.save(2, {"weight": torch.ones(60_000)})
        assert len(names(disk)) == 2
        assert store.load()[0]["weight"].sum() == 20_000
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"no checkpoint can be written to .*file/runs: Not a directory"):
        CheckpointStore(tmp_path / "file" / "runs").save(1, state())


# --- kills ------------------------------------------------------------------------------------------------------------


def test_no_kill_while_saving_leaves_nothing_usable(tmp_path):
    done = harness.run_python(HERE / "kill_saving.py", "--kills", "60", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 60 kills left no usable checkpoint" in done.stdout


# --- the command ------------------------------------------------------------------------------------------------------


def test_verify_checkpoint_on_the_command_line(tmp_path, capsys):
    store = CheckpointStore(tmp_path)
    paths = [store.save(step, state()) for step in (1, 2)]

    def run(path) -> tuple[int, str]:
        status = cli.main(["verify-checkpoint", str(path)])
        return status, "".join(capsys.readouterr())

    assert run(paths[0]) == (0, f"{paths[0]}: whole\n") and run(tmp_path) == (0, f"{tmp_path}: whole\n")
    flip(paths[1], -1)
    assert run(paths[1]) == (1, "tensor model/fc.weight is damaged: its checksum differs\n")
    assert run(tmp_path) == (1, f"{paths[1].name}: tensor model/fc.weight is damaged: its checksum differs\n")
    assert run(tmp_path / "no") == (2, f"fusedtrain verify-checkpoint: there is no {tmp_path / 'no'}\n")


# --- weights ----------------------------------------------------------------------------------------------------------


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        torch.compile,
        Wrapper,  # the names of DistributedDataParallel
        lambda model: torch.compile(Wrapper(torch.compile(model))),
        lambda model: nn.Sequential(torch.compile(model[0]), model[1]),
    ],
    ids=["bare", "compiled", "ddp", "compiled-ddp-compiled", "one layer compiled"],
)
def test_keys_are_those_of_the_bare_model(wrap, tmp_path):
    model, wrapped = net(), wrap(net())
    saved = weights.canonical_keys(wrapped.state_dict())
    assert list(saved) == list(model.state_dict())
    model.load_state_dict(saved)
    weights.load_canonical(wrapped, model.state_dict())
    weights.save_weights(tmp_path / "w.pt", wrapped)
    assert_same(torch.load(tmp_path / "w.pt", weights_only=True), dict(saved))


def test_names_that_become_the_same_are_refused():
    with pytest.raises(ValueError, match="two entries of the state have the same name"):
        weights.canonical_keys({"a": torch.ones(1), "_orig_mod.a": torch.ones(1)})


@pytest.mark.parametrize("key", [None, "state_dict", "model", "state_dict_ema"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_weights_of_other_training_scripts_are_read(tmp_path, key, prefix):
    own = net().state_dict()
    content = {prefix + name: t for name, t in own.items()}
    if key is not None:
        content = {key: content, "epoch": 3, "args": argparse.Namespace(lr=0.1)}
    torch.save(content, tmp_path / "w.pth")
    assert_same(weights.read_weights(tmp_path / "w.pth"), dict(own))


def test_averages_of_torch_are_read(tmp_path):
    """As torchvision's training script saves them."""
    averaged = torch.optim.swa_utils.AveragedModel(net(), use_buffers=True)
    torch.save({"model": {}, "model_ema": averaged.state_dict()}, tmp_path / "w.pth")
    assert_same(weights.read_weights(tmp_path / "w.pth"), dict(averaged.module.state_dict()))


def test_weights_of_a_checkpoint_and_of_safetensors_are_read(tmp_path):
    own = net().state_dict()
    path = CheckpointStore(tmp_path).save(1, {"model": own, "epoch": 1})
    assert_same(weights.read_weights(path), dict(own))
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    safetensors.save_file(own, tmp_path / "w.safetensors")
    read = weights.read_weights(tmp_path / "w.safetensors")
    assert_same({name: read[name] for name in own}, dict(own))


class Malicious:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"state_dict": Malicious()},
            "no file of weights that loads without executing code: Unsupported global: ",
        ),
        ({"epoch": 3}, "holds no weights: expected tensors by name, or such under state_dict_ema"),
        ([1], "holds no weights"),
    ],
)
def test_files_without_weights_are_refused_and_nothing_is_executed(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    torch.save(content, "w.pth")
    with pytest.raises(CheckpointError, match=message) as error:
        weights.read_weights("w.pth")
    assert "\n" not in str(error.value) and not Path("executed").exists()


def test_a_damaged_or_missing_file_of_weights_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no.pth: cannot be read: No such file"):
        weights.read_weights(tmp_path / "no.pth")
    for content in (b"", b"PK\3\4" + bytes(100), b"\0" * 8 + b"{", bytes(60)):
        (tmp_path / "w.pth").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"w.pth: "):
            weights.read_weights(tmp_path / "w.pth")


def test_masks_may_be_infinite_by_design():
    model = net()
    model.register_buffer("mask", torch.full((2, 2), -torch.inf))
    assert weights.nonfinite_names(model) == ["mask"]


def test_views_that_are_read_with_another_sign_are_saved_by_value(tmp_path):
    z = torch.randn(4, dtype=torch.complex64)
    values = {"z": z, "conjugate": z.conj(), "negative": torch.imag(z.conj()), "alone": torch._neg_view(torch.ones(3))}
    store = CheckpointStore(tmp_path)
    for saved in (values, {"conjugate": z.conj()}):
        store.save(1, saved)
        found, _ = store.load()
        assert all(torch.equal(found[name], value) for name, value in saved.items())


@pytest.mark.parametrize(("number", "matters"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_file_systems_that_cannot_sync_folders_hold_checkpoints_too(tmp_path, monkeypatch, number, matters):
    sync = os.fsync

    def refuse(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    store = CheckpointStore(tmp_path)
    if matters:
        with pytest.raises(CheckpointError, match=os.strerror(number)):
            store.save(1, state())
    else:
        store.save(1, state())
        assert store.load()[1].step == 1

"""A checkpoint is whole or refused, whatever happens to it or to the machine."""

import errno
import hashlib
import json
import math
import os
import resource
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from falconet.checkpoint import format
from falconet.checkpoint.manifest import Position
from falconet.errors import CheckpointError


def content(epoch=1, **extra):
    progress = {"epoch": epoch, "images": 100 * epoch, "update": 10 * epoch}
    return {"model": "resnet8-cifar", "classes": 2, "progress": progress, **extra}


def tensors(value=1.0):
    return {"model": {"fc.weight": torch.full((2, 3), value), "fc.bias": torch.arange(2.0)}}


def saved(folder, epoch=1, **extra):
    format.write(folder, tensors(float(epoch)), content(epoch, **extra))
    return folder


def model_of(folder):
    return format.read_tensors(folder, "model", verified=format.verify(folder))


def leftovers(folder):
    return [p.name for p in folder.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool]
)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype):
    original = torch.tensor([0.0, 1.0, -2.5, 3e4]).to(dtype)
    format.write(tmp_path / "a", {"model": {"x": original}}, content())
    read = model_of(tmp_path / "a")["x"]
    assert read.dtype == dtype
    assert torch.equal(read, original)


def test_odd_layouts_and_shared_storage_come_back_as_values(tmp_path):
    base = torch.randn(2, 4, 3, 3)
    odd = {
        "channels-last": base.to(memory_format=torch.channels_last),
        "transposed": base[0, 0].t(),
        "itself": base,
        "the same storage": base,
        "a part of it": base[1:],
        "expanded": torch.tensor(7.0).expand(3),
        "one number": torch.tensor(5),
        "empty": torch.empty(0, 3),
        "also empty": torch.empty(0),
        "a parameter": torch.nn.Parameter(torch.ones(2)),
    }
    format.write(tmp_path / "a", {"model": odd}, content())
    read = model_of(tmp_path / "a")
    assert read.keys() == odd.keys()
    for name, tensor in odd.items():
        np.testing.assert_array_equal(read[name].numpy(), tensor.detach().numpy(), strict=True)


def test_a_checkpoint_can_be_read_without_falconet(tmp_path):
    folder = saved(tmp_path / "a", epoch=3)
    record = json.loads((folder / "manifest.json").read_text())["files"]["model.safetensors"]
    data = (folder / "model.safetensors").read_bytes()
    assert record == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    header = int.from_bytes(data[:8], "little")
    where = json.loads(data[8 : 8 + header])["fc.weight"]["data_offsets"]
    assert np.frombuffer(data[8 + header :][slice(*where)], "<f4").tolist() == [3.0] * 6


def test_manifest_round_trips_its_content(tmp_path):
    given = content(
        2, class_names=["cat", "dog"], metrics={"validation_accuracy": 0.5}, plan=[1, 2], novelty={"a": [1]}
    )
    format.write(tmp_path / "a", tensors(), given)
    manifest = format.read_manifest(tmp_path / "a")
    assert manifest.progress == Position(epoch=2, images=200, update=20)
    assert manifest.class_names == ("cat", "dog")
    assert (manifest.model, manifest.classes, manifest.plan) == ("resnet8-cifar", 2, [1, 2])
    assert (manifest.runtime, manifest.config, manifest.averaged) == ({}, {}, False)
    assert manifest.content["novelty"] == {"a": [1]}


def test_manifest_with_tuples_integer_keys_and_nan_verifies(tmp_path):
    format.write(tmp_path / "a", tensors(), content(metrics={"loss": float("nan")}, plan={1: (2, 3)}))
    assert format.verify(tmp_path / "a").plan == {"1": [2, 3]}


def test_files_are_read_by_stem_and_a_wrong_stem_gets_a_suggestion(tmp_path):
    format.write(tmp_path / "a", {"rank0": {"x": torch.zeros(1)}, "rank1": {"x": torch.ones(1)}}, content())
    manifest = format.verify(tmp_path / "a")
    assert format.read_tensors(tmp_path / "a", "rank1", verified=manifest)["x"].item() == 1
    with pytest.raises(CheckpointError, match=r"holds no 'rank_1'; it holds rank0, rank1; did you mean 'rank1'"):
        format.read_tensors(tmp_path / "a", "rank_1", verified=manifest)


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_a_file_truncated_at_any_byte_is_refused_by_name(tmp_path, name):
    path = saved(tmp_path / "a") / name
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=name) as caught:
            format.verify(tmp_path / "a")
        assert "\n" not in str(caught.value)
    path.write_bytes(data)
    format.verify(tmp_path / "a")


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_a_flipped_bit_anywhere_is_refused_by_name(tmp_path, name):
    path = saved(tmp_path / "a", metrics={"validation_accuracy": 0.5}) / name
    data = path.read_bytes()
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=name):
            format.verify(tmp_path / "a")


def test_wrong_sizes_and_digests_are_explained(tmp_path):
    path = saved(tmp_path / "a") / "model.safetensors"
    data = path.read_bytes()
    cases = {
        data[:-5]: f"{path}: 5 bytes short of {len(data):,} (truncated)",
        data + b"123": f"{path}: 3 bytes more than the expected {len(data):,}",
        data[:-1] + b"\xff": f"{path}: contents changed since it was written (digest mismatch)",
    }
    for damaged, message in cases.items():
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError) as caught:
            format.verify(tmp_path / "a")
        assert str(caught.value) == message
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: missing$"):
        format.verify(tmp_path / "a")


NOT_MANIFESTS = {
    b"": "not JSON",
    b"epochs: 3\n": "not JSON",
    b"\xff\xfe\x00": "not JSON",
    b"[" * 100_000: "not JSON",
    b"[1, 2]": "not the manifest of a Falconet checkpoint",
    b'{"name": "web-app", "files": []}': "not the manifest of a Falconet checkpoint",
    b'{"format": 3, "files": {}}': "has format 3, but this version of Falconet reads at most 2",
    b'{"format": "1", "files": {}}': "'format' is str, expected int",
    b'{"format": 1, "files": {}}': "digest mismatch",
}


@pytest.mark.parametrize(("text", "message"), NOT_MANIFESTS.items(), ids=[str(i) for i in range(len(NOT_MANIFESTS))])
def test_a_file_that_is_not_our_manifest_is_refused_in_one_line(tmp_path, text, message):
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        format.read_manifest(tmp_path)
    assert "\n" not in str(caught.value)


WRONG_TYPES = {
    "model": (7, "'model' is int, expected str"),
    "classes": (True, "'classes' is bool, expected int"),
    "progress": ({"epoch": 1.5, "images": 0, "update": 0}, "'epoch' is float, expected int"),
    "class_names": ([1, 2], "'class_names' holds something other than names"),
    "metrics": ([], "'metrics' is list, expected dict"),
    "config": (["epoch"], "'config' is list, expected dict"),
}
WRONG_VALUES = {
    "a name with NUL": ({"class_names": ["cat", "d\0g"]}, r"holds the text 'd\\x00g'; expected text"),
    "half a character": ({"model": "m\ud800"}, r"holds the text 'm\\ud800'"),
    "half a character as a key": ({"metrics": {"\ud800": 1}}, r"holds the text '\\ud800'"),
    "too few names": ({"class_names": ["cat"]}, "'class_names' holds 1 names, expected 2, one per class"),
    "too many names": ({"class_names": ["a", "b", "c"]}, "'class_names' holds 3 names, expected 2"),
    "no class": ({"classes": 0}, "'classes' is 0, expected 1 to 10,000"),
    "classes without names": ({"classes": 10**8}, "'classes' is 100000000, expected 1 to 10,000"),
    "an update before the first": ({"progress": {"epoch": 0, "images": 0, "update": -1}}, "'update' is -1, expected 0"),
    "an update that no computer reaches": (
        {"progress": {"epoch": 0, "images": 0, "update": 10**40}},
        "'update' is 10000",
    ),
    "an option without a value": ({"config": {"epoch": {}}}, "the option 'epoch' in 'config' has no value"),
    "an option that is a list": ({"config": {"epoch": [1]}}, "the option 'epoch' in 'config' has no value"),
    "a metric that is text": ({"metrics": {"score": "high"}}, "the metric 'score' is str, expected a number"),
    "too many threads": ({"runtime": {"threads": 10**9}}, "'threads' is 1000000000, expected 1 to 65,536"),
    "splits that are numbers": ({"runtime": {"splits": [1]}}, "'splits' holds something other than names of layers"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_a_manifest_with_an_impossible_value_is_refused_in_one_line(tmp_path, changes, message):
    (tmp_path / "a").mkdir()
    format.write_manifest(tmp_path / "a" / "manifest.json", content() | changes, {})
    with pytest.raises(CheckpointError, match=message) as caught:
        format.read_manifest(tmp_path / "a")
    assert "\n" not in str(caught.value)
    str(caught.value).encode()


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * (1 << 24)], ids=["NUL", "half a character", "endless"])
def test_what_could_not_be_read_again_is_not_saved(tmp_path, name):
    before = saved(tmp_path / "a", class_names=["cat", "dog"])
    with pytest.raises(CheckpointError, match=f"^cannot save {before}: (holds the text|not a file of at most)"):
        saved(tmp_path / "a", class_names=["cat", name])
    with pytest.raises(CheckpointError, match=f"^cannot save {before}: "):
        format.amend(before, {"class_names": ["cat", name]})
    assert format.verify(before).class_names == ("cat", "dog")
    assert list(tmp_path.iterdir()) == [before]


def test_names_of_files_that_are_not_utf8_are_kept(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    assert format.read_manifest(saved(tmp_path / "a", class_names=["cat", name])).class_names == ("cat", name)


def test_a_manifest_that_is_a_pipe_or_endless_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(CheckpointError, match="not a file of at most 16,777,216 bytes"):
        format.read_manifest(tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").touch()
    os.truncate(tmp_path / "manifest.json", 1 << 40)
    with pytest.raises(CheckpointError, match="not a file of at most 16,777,216 bytes"):
        format.read_manifest(tmp_path)


@pytest.mark.parametrize("key", WRONG_TYPES)
def test_a_manifest_with_a_wrong_type_names_the_key(tmp_path, key):
    wrong, message = WRONG_TYPES[key]
    (tmp_path / "a").mkdir()
    format.write_manifest(tmp_path / "a" / "manifest.json", content() | {key: wrong}, {})
    with pytest.raises(CheckpointError, match=message):
        format.read_manifest(tmp_path / "a")


def test_a_manifest_cannot_point_outside_its_folder(tmp_path):
    (tmp_path / "a.tmp").mkdir()
    format.write_manifest(
        tmp_path / "a.tmp" / "manifest.json", content(), {"../x.safetensors": format.FileRecord(0, "")}
    )
    with pytest.raises(CheckpointError, match="expected plain file names"):
        format.read_manifest(tmp_path / "a.tmp")


def test_a_missing_folder_a_file_and_an_empty_folder_get_different_errors(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, message in {
        "none": "no such checkpoint",
        "file": "is a file; expected",
        "empty": "has no manifest.json",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            format.read_manifest(tmp_path / name)


def test_saving_under_the_same_name_replaces_the_checkpoint(tmp_path):
    saved(tmp_path / "a", epoch=1)
    saved(tmp_path / "a", epoch=2)
    assert model_of(tmp_path / "a")["fc.weight"][0, 0] == 2
    assert leftovers(tmp_path) == []


def test_saving_over_a_link_keeps_its_target(tmp_path):
    saved(tmp_path / "a", epoch=1)
    (tmp_path / "best").symlink_to("a")
    saved(tmp_path / "best", epoch=2)
    assert not (tmp_path / "best").is_symlink()
    assert format.verify(tmp_path / "a").progress.epoch == 1
    assert leftovers(tmp_path) == []


def test_a_folder_that_is_not_a_checkpoint_is_never_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"cannot save .*home: it holds other files \(thesis.tex\)"):
        saved(tmp_path / "home")
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"


def test_a_file_in_the_way_is_reported_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "a"):
        with pytest.raises(CheckpointError) as caught:
            saved(folder)
        assert str(caught.value) in (f"cannot save {folder}: Not a directory", f"cannot save {folder}: File exists")


def failing(real, call, error):
    """`real` until the given call, which raises."""
    calls = iter(range(1000))

    def fails(*args, **kwargs):
        if next(calls) == call:
            raise OSError(error, os.strerror(error))
        return real(*args, **kwargs)

    return fails


@pytest.mark.parametrize("call", [0, 1, 2])  # the tensors, the manifest, the folder
@pytest.mark.parametrize("there_already", [False, True])
def test_a_full_disk_leaves_existing_checkpoints_alone(tmp_path, monkeypatch, call, there_already):
    saved(tmp_path / "a", epoch=1)
    target = tmp_path / ("a" if there_already else "b")
    monkeypatch.setattr(os, "fsync", failing(os.fsync, call, errno.ENOSPC))
    with pytest.raises(CheckpointError) as caught:
        saved(target, epoch=2)
    assert str(caught.value) == f"cannot save {target}: No space left on device"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert format.verify(tmp_path / "a").progress.epoch == 1


@pytest.mark.parametrize("call", [0, 1])  # the old one aside, the new one in
def test_a_failed_rename_leaves_existing_checkpoints_alone(tmp_path, monkeypatch, call):
    saved(tmp_path / "a", epoch=1)
    monkeypatch.setattr(Path, "rename", failing(Path.rename, call, errno.EROFS))
    with pytest.raises(CheckpointError, match="Read-only file system"):
        saved(tmp_path / "a", epoch=2)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert format.verify(tmp_path / "a").progress.epoch == 1


def test_a_write_that_fails_half_way_leaves_nothing_behind(tmp_path):
    saved(tmp_path / "a")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # bytes a file may have
    try:
        with pytest.raises(CheckpointError, match=r"cannot save .*b: File too large$"):
            format.write(tmp_path / "b", {"model": {"x": torch.zeros(10_000)}}, content())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_checkpoints_are_found_oldest_first_with_unreadable_ones_last(tmp_path):
    home = tmp_path / "run" / "checkpoints"
    for epoch in (10, 9, 2):
        saved(home / f"epoch_{epoch}", epoch)
    saved(home / "a_torn_one", 1)
    (home / "a_torn_one" / "manifest.json").unlink()
    shutil.copytree(home / "epoch_2", home / ".epoch_3.tmp-1-00ff")
    (home / "notes").mkdir()
    names = ["epoch_2", "epoch_9", "epoch_10", "a_torn_one"]
    for path in (home, tmp_path / "run"):
        assert [p.name for p in format.checkpoints_in(path)] == names
    assert format.checkpoints_in(home / "epoch_9") == [home / "epoch_9"]
    assert format.checkpoints_in(home / "a_torn_one") == [home / "a_torn_one"]
    assert format.checkpoints_in(home / "notes") == []


def test_a_mistyped_folder_gets_a_suggestion(tmp_path):
    (tmp_path / "digits-run/checkpoints").mkdir(parents=True)
    (tmp_path / "digit-runs").mkdir()  # as near, but without a checkpoint
    with pytest.raises(CheckpointError, match=rf"no such file or folder; did you mean '{tmp_path}/digits-run'"):
        format.checkpoints_in(tmp_path / "digit-run")


def test_the_newest_complete_checkpoint_is_found_and_damaged_ones_are_noted(tmp_path):
    for epoch in (1, 2, 3, 4):
        saved(tmp_path / f"epoch_{epoch}", epoch)
    (tmp_path / "epoch_4" / "manifest.json").write_text("{")
    (tmp_path / "epoch_3" / "model.safetensors").write_bytes(b"short")
    notes = []
    assert format.newest_whole(tmp_path, notes.append) == tmp_path / "epoch_2"
    assert [("epoch_4" in n, "epoch_3" in n) for n in notes] == [(True, False), (False, True)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch_1", "epoch_2", "epoch_3", "epoch_4"]


def test_an_average_is_chosen_only_when_there_is_nothing_else(tmp_path):
    saved(tmp_path / "averaged", 9, averaged=["epoch_1"])
    assert format.newest_whole(tmp_path, pytest.fail) == tmp_path / "averaged"
    saved(tmp_path / "epoch_1", 1)
    assert format.newest_whole(tmp_path, pytest.fail) == tmp_path / "epoch_1"


def test_a_folder_without_a_complete_checkpoint_is_refused_with_the_reason(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        format.newest_whole(tmp_path, pytest.fail)
    for name in "ab":
        (saved(tmp_path / name) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"none of its 2 .*b/model\.safetensors: missing"):
        format.newest_whole(tmp_path, lambda note: None)


def test_a_damaged_checkpoint_is_refused_and_an_older_one_offered(tmp_path):
    for epoch in (1, 2, 3):
        saved(tmp_path / f"epoch_{epoch}", epoch)
    (tmp_path / "epoch_3" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        format.newest_whole(tmp_path / "epoch_3", pytest.fail)
    whole = tmp_path / "epoch_2"
    assert str(caught.value).endswith(f"epoch_3/model.safetensors: missing; the newest complete one is {whole}")


def test_a_refusal_without_an_alternative_is_unchanged(tmp_path):
    error = CheckpointError("torn")
    assert format.refuse(tmp_path / "a", error) is error


def accuracy(value):
    return {"metrics": {"validation_accuracy": value}}


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    for epoch, value in enumerate([0.1, 0.9, 0.9, 0.4, float("nan"), 0.6], start=1):
        saved(tmp_path / f"epoch_{epoch}", epoch, **accuracy(value))
    removed = format.prune(tmp_path, keep=2)
    assert [p.name for p in removed] == ["epoch_1", "epoch_3", "epoch_4"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch_2", "epoch_5", "epoch_6"]


@pytest.mark.parametrize(("keep", "left"), [(None, 3), (5, 3), (3, 3), (1, 1), (0, 0)])
def test_pruning_without_a_metric_keeps_the_newest(tmp_path, keep, left):
    for epoch in (1, 2, 3):
        saved(tmp_path / f"epoch_{epoch}", epoch)
    format.prune(tmp_path, keep=keep)
    assert [format.verify(p).progress.epoch for p in format.checkpoints_in(tmp_path)] == list(range(4 - left, 4))


def test_pruning_never_removes_damaged_foreign_averaged_or_linked_checkpoints(tmp_path):
    for epoch in range(1, 5):
        saved(tmp_path / f"epoch_{epoch}", epoch)
    (tmp_path / "epoch_1" / "model.safetensors").write_bytes(b"torn")
    (tmp_path / "release").symlink_to("epoch_2")
    (tmp_path / "round").symlink_to("round")
    saved(tmp_path / "swa", 1, averaged=True)
    saved(tmp_path / "epoch_1_averaged", 1)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "manifest.json").write_text('{"format": 9, "files": {}}')
    (tmp_path / "notes").mkdir()
    before = {p.name for p in tmp_path.iterdir()}
    assert [p.name for p in format.prune(tmp_path, keep=1)] == ["epoch_3"]
    assert {p.name for p in tmp_path.iterdir()} == before - {"epoch_3"}


def test_pruning_removes_hidden_folders_older_than_an_hour(tmp_path):
    saved(tmp_path / "epoch_1")
    for name, age in {".a.tmp-12-0a1b": 7200, ".b.old-12-0a1b": 7200, ".c.tmp-12-0a1b": 60, ".mine": 7200}.items():
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    format.prune(tmp_path, keep=1)
    assert sorted(leftovers(tmp_path)) == [".c.tmp-12-0a1b", ".mine"]


def test_checkpoints_of_another_run_and_folders_with_other_things_are_not_removed(tmp_path):
    mine = [saved(tmp_path / f"m_{epoch}", epoch, run="mine") for epoch in (2, 3, 4)]
    other = saved(tmp_path / "other", 1, run="theirs")
    unmarked = saved(tmp_path / "unmarked", 1)
    (mine[0] / "notes.txt").write_text("mine")
    assert format.prune(tmp_path, keep=1, run="mine") == [mine[1]]
    assert [p.exists() for p in (*mine, other, unmarked)] == [True, False, True, True, True]


def test_complex_numbers_are_refused(tmp_path):
    format.write(tmp_path / "a", {"model": {"x": torch.ones(2, dtype=torch.complex64)}}, content())
    with pytest.raises(CheckpointError, match="'x' holds complex numbers; expected real ones"):
        model_of(tmp_path / "a")


def scored(folder, epoch, score=None, **extra):
    progress = {"epoch": epoch, "images": 0, "update": 10 * epoch}
    metrics = {} if score is None else {"score": score, "validation_accuracy": score}
    return saved(folder, epoch, progress=progress, metrics=metrics, **extra)


@pytest.fixture
def run(tmp_path):
    """Four checkpoints, of which the second and the third are equally good."""
    for epoch, score in enumerate((70.0, 90.0, 90.0, 80.0), start=1):
        scored(tmp_path / "run/checkpoints" / f"epoch_{epoch}", epoch, score)
    return tmp_path / "run"


def test_the_best_the_last_or_the_one_of_an_epoch_is_chosen(run):
    chosen = {which: format.choose(run, which, pytest.fail).folder.name for which in ("best", "last", 3)}
    assert chosen == {"best": "epoch_2", "last": "epoch_4", 3: "epoch_3"}
    assert format.choose(run / "checkpoints", "best", pytest.fail).manifest.progress.epoch == 2


@pytest.fixture
def perfect(tmp_path):
    """Four checkpoints that get every photo right, the first of an older version that did not store the loss."""
    for epoch, loss in enumerate((None, 0.5, 0.1, 0.2), start=1):
        metrics = {"score": 100.0, "validation_accuracy": 100.0} | ({} if loss is None else {"score_loss": loss})
        saved(tmp_path / f"epoch_{epoch}", epoch, metrics=metrics)
    return tmp_path


def test_of_equally_accurate_checkpoints_the_lowest_loss_is_chosen(perfect):
    assert format.choose(perfect, "best", pytest.fail).folder.name == "epoch_3"


def test_of_equally_accurate_checkpoints_pruning_keeps_the_lowest_loss(perfect):
    assert [path.name for path in format.prune(perfect, keep=1)] == ["epoch_1", "epoch_2"]


@pytest.mark.parametrize(
    ("best", "read"),
    [
        ([90.0, 4], (90.0, 4, math.inf, 1.0)),
        ([90.0, 4, 0.5], (90.0, 4, 0.5, 1.0)),
        ([90.0, 4, 0.5, 2.0], (90.0, 4, 0.5, 2.0)),
        (None, None),
        (["x", 4], None),
    ],
)
def test_the_best_validation_of_older_checkpoints_is_read_too(tmp_path, best, read):
    """Without its epoch, it is as far as its update is among those of the checkpoint: here 4 of 8, in 2 epochs."""
    progress = {"epoch": 2, "images": 0, "update": 8}
    assert format.read_manifest(saved(tmp_path / "a", best=best, progress=progress)).best == read


def test_a_path_to_one_checkpoint_is_that_checkpoint(run):
    path = run / "checkpoints/epoch_1"
    for which in ("best", "last", 1):
        assert format.choose(path, which, pytest.fail).folder == path
    with pytest.raises(CheckpointError, match=r"epoch_1: holds no checkpoint of epoch 3; the epochs it has: 1$"):
        format.choose(path, 3, pytest.fail)


@pytest.mark.parametrize("file", ["model.safetensors", "manifest.json"])
def test_a_damaged_best_checkpoint_is_noted_and_the_next_best_chosen(run, file):
    (run / "checkpoints/epoch_2" / file).write_bytes(b"{")
    notes = []
    assert format.choose(run, "best", notes.append).folder.name == "epoch_3"
    assert [note.startswith(f"skipped {run}/checkpoints/epoch_2/{file}: ") for note in notes] == [True]


def test_without_a_validation_the_newest_stands_in_for_the_best_with_a_note(tmp_path):
    for epoch, score in ((1, None), (2, float("nan"))):
        scored(tmp_path / f"epoch_{epoch}", epoch, score)
    notes = []
    assert format.choose(tmp_path, "best", notes.append).folder.name == "epoch_2"
    assert notes == [f"note: {tmp_path}: no checkpoint was validated, so the newest is used instead of the best"]


def test_an_epoch_without_a_checkpoint_is_refused_with_those_there_are(run):
    with pytest.raises(CheckpointError, match=r"run: holds no checkpoint of epoch 9; the epochs it has: 1, 2, 3, 4$"):
        format.choose(run, 9, pytest.fail)


def test_a_damaged_checkpoint_of_an_epoch_is_refused(run):
    (run / "checkpoints/epoch_3/model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing; the newest complete one is .*epoch_4$"):
        format.choose(run, 3, pytest.fail)


@pytest.mark.parametrize(
    ("metrics", "stem"),
    [
        ({"validation_accuracy": 80.0, "validation_ema_accuracy": 90.0, "score": 90.0}, "ema"),
        ({"validation_accuracy": 90.0, "validation_ema_accuracy": 80.0, "score": 90.0}, "model"),
        ({"validation_accuracy": 90.0, "validation_loss": 0.5, "score": 90.0}, "model"),
        ({"validation_accuracy": 90.0, "validation_loss": 0.5, "score": 90.0, "score_loss": 0.5}, "model"),
        ({"validation_accuracy": 90.0, "validation_loss": 0.5, "score": 90.0, "score_loss": 0.4}, "ema"),
        ({}, "model"),
    ],
)
def test_the_weights_that_validated_better_are_known(tmp_path, metrics, stem):
    weights = tensors() | {"ema": {"average/fc.weight": torch.zeros(2, 3), "updates": torch.tensor(3)}}
    format.write(tmp_path / "a", weights, content(metrics=metrics))
    manifest = format.verify(tmp_path / "a")
    assert manifest.better_stem == stem
    assert list(format.model_weights(tmp_path / "a", manifest, "ema")) == ["fc.weight"]

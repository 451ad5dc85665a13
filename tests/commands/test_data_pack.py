"""`falconet data pack` and `data verify`, and training on what they made."""

import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import layouts
import odd_photos
from falconet.checkpoint import format
from falconet.data import layout, native, packing
from falconet.data.packing import Packer


@pytest.fixture
def root(tmp_path):
    return layouts.class_folders(tmp_path / "photos")


def digests(target):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(target).iterdir())}


def test_pack_reports_what_it_did_and_verify_finds_it_whole(falconet, root):
    answer = falconet(f"data pack {root} packed --shard-size 5")
    assert answer.code == 0, answer.err
    marked = 0 if native.library() is None else 22
    assert f"packed: 6 shards; 24 images packed now, {marked} of them with restart markers" in answer.out
    again = falconet(f"data pack {root} packed --shard-size 5")
    assert again.out.endswith("packed: nothing to do, 6 shards are already there\n")
    assert falconet("data verify packed").out == "packed: 6 shards, 24 images: all checksums match\n"


def test_a_file_that_is_not_an_image_is_named_counted_and_left_out(falconet, root):
    path = next((root / "train").rglob("*.JPEG"))
    path.write_text("hello")
    answer = falconet(f"data pack {root} packed")
    assert answer.code == 1, answer.err
    assert answer.out.splitlines()[1:] == [
        "left out 1 of 24 photos, which cannot be decoded; packed/broken_photos.txt lists all:",
        f"  {path}: not an image",
    ]
    name = path.relative_to(root)
    assert Path("packed/broken_photos.txt").read_text() == f"# not an image\n{name}\n"
    splits = layout.load_photos(Path("packed"))
    assert (len(splits.train), len(splits.validation)) == (17, 6)
    assert str(name).removeprefix("train/") not in [splits.train.name(index) for index in range(17)]


def test_a_link_that_leads_nowhere_is_named_and_left_out(falconet, root):
    folder = next((root / "train").iterdir())
    (folder / "gone.jpg").symlink_to("nowhere.jpg")
    (folder / "round.jpg").symlink_to("round.jpg")
    checked = falconet(f"data check {root}")
    assert re.search(r"^  broken: missing +2 ", checked.out, re.M)
    answer = falconet(f"data pack {root} packed")
    assert answer.code == 1, answer.err
    left_out = [f"  {folder / name}: missing" for name in ("gone.jpg", "round.jpg")]
    said = "left out 2 of 26 photos, which are missing; packed/broken_photos.txt lists all:"
    assert answer.out.splitlines()[1:] == [said, *left_out]
    again = falconet(f"data pack {root} packed")
    assert (again.code, again.out.splitlines()[0]) == (1, "packed: nothing to do, 2 shards are already there")
    assert len(layout.load_photos(Path("packed")).train) == 18


def test_a_line_break_in_a_name_stays_on_its_line(falconet, root):
    (next((root / "train").iterdir()) / "two\nlines.jpg").write_text("hello")
    assert "two\\nlines.jpg: not an image\n" in falconet(f"data pack {root} packed").out


def test_every_photo_cut_at_256_kib_is_left_out_and_listed_however_often_it_is_packed(falconet, tmp_path):
    root = layouts.class_folders(tmp_path / "photos", train=10)
    whole = odd_photos.large_jpeg(1)
    cut = [path for path in sorted((root / "train").rglob("*.JPEG")) if not path.stem.endswith("_9")]
    for path in cut:
        path.write_bytes(whole[: odd_photos.CUT])
    answer = falconet(f"data pack {root} packed --shard-size 7")
    assert answer.code == 1
    assert "packed: 6 shards; 9 images packed now" in answer.out
    assert "left out 27 of 36 photos" in answer.out
    assert answer.out.endswith("  and 22 more\n")
    listed = Path("packed/broken_photos.txt").read_text().splitlines()
    assert listed == ["# truncated", *(str(path.relative_to(root)) for path in cut)]
    before = digests("packed")
    again = falconet(f"data pack {root} packed --shard-size 7")
    assert again.code == 1
    assert "packed: nothing to do, 6 shards are already there\nleft out 27 of 36 photos" in again.out
    assert digests("packed") == before
    assert falconet("data verify packed").code == 0
    assert (len(layout.load_photos(Path("packed")).train), falconet("data check packed").code) == (3, 0)


def test_listed_photos_are_left_out_before_packing(falconet, root):
    path = next((root / "train").rglob("*.JPEG"))
    path.write_text("hello")
    answer = falconet(f"data check {root} --exclude-list broken.txt")
    assert answer.code == 1, answer.err
    answer = falconet(f"data pack {root} packed --exclude-list broken.txt")
    assert answer.code == 0, answer.err
    assert "left out 1 photo that broken.txt lists" in answer.out
    assert "23 images packed now" in answer.out
    assert not Path("packed/broken_photos.txt").exists()
    gone = falconet(f"data pack {root} other --exclude-list nowhere.txt")
    assert (gone.code, "--exclude-list: nowhere.txt: no such file; expected" in gone.err) == (2, True)


def test_verify_names_a_flipped_bit(falconet, root):
    falconet(f"data pack {root} packed --shard-size 5")
    path = Path("packed/train-00001.falconet")
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    answer = falconet("data verify packed")
    assert answer.code == 2
    assert f"{path}: n01440764/n01440764_5.JPEG: checksum mismatch" in answer.out
    assert "packed: 1 damaged image; the first: " in answer.err


def test_killed_and_restarted_pack_writes_the_same_bytes(falconet, tmp_path):
    root = layouts.class_folders(tmp_path / "many", train=40, validation=3)
    falconet(f"data pack {root} straight --shard-size 8")
    slowed = (
        "import itertools, time, falconet.data.packing as p; plain, numbers = p.prepared, itertools.count()\n"
        "def slow(*a, **k): time.sleep(0.02 if next(numbers) < 40 else 600); return plain(*a, **k)\n"
        "p.prepared = slow\n"  # the sixth shard never comes, however late the kill does
        f"from falconet.cli import main; main(['data', 'pack', '{root}', 'killed', '--shard-size', '8'])"
    )
    process = subprocess.Popen([sys.executable, "-c", slowed], cwd=tmp_path)
    try:
        deadline = time.monotonic() + 300
        while len(list(Path("killed").glob("*.falconet"))) < 3 and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    left = len(list(Path("killed").glob("*.falconet")))
    assert 3 <= left < 17
    assert falconet(f"data pack {root} killed --shard-size 8").code == 0
    assert digests("killed") == digests("straight")


def test_ctrl_c_reports_how_to_continue(falconet, root, monkeypatch):
    plain, packed = Packer.pack, []

    def interrupted(self, shard, *, done):
        if len(packed) == 2:
            raise KeyboardInterrupt
        packed.append(shard)
        plain(self, shard, done=done)

    with monkeypatch.context() as patch:
        patch.setattr(Packer, "pack", interrupted)
        answer = falconet(f"data pack {root} packed --shard-size 5")
    assert answer.code == 130
    assert answer.out.endswith("stopped; 2 of 6 shards are complete, and the same command continues from there\n")
    assert len(digests("packed")) == 2
    assert "6 shards; 14 images packed now" in falconet(f"data pack {root} packed --shard-size 5").out


def test_full_disk_is_one_line(falconet, root, monkeypatch):
    def full(*anything, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packing.os, "fsync", full)
    answer = falconet(f"data pack {root} packed")
    assert answer.code == 2
    assert answer.err == (
        "falconet data pack: packed/train-00000.falconet: the disk is full; the shards before it are whole: make room"
        " and give the same command again\n"
    )
    assert digests("packed") == {}


def test_shards_of_a_larger_set_are_refused(falconet, root):
    falconet(f"data pack {root} packed --shard-size 2")
    answer = falconet(f"data pack {root} packed --shard-size 5")
    assert (answer.code, "belongs to another set, which had more shards" in answer.err) == (2, True)


def test_resize_makes_smaller_readable_shards(falconet, root):
    falconet(f"data pack {root} plain")
    falconet(f"data pack {root} small --resize 24")
    sizes = [sum(path.stat().st_size for path in Path(name).iterdir()) for name in ("plain", "small")]
    assert sizes[1] < 0.8 * sizes[0]
    assert falconet("data verify small").code == 0


TRAIN = "--model resnet8-cifar --image-size 24 --micro-batch-size 6 --warmup-epoch 0 --threads 1 --device cpu"


def losses(run):
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def test_training_is_the_same_from_files_and_shards_and_after_restore(falconet, root, monkeypatch):
    names = [path.name for path, _ in layouts.photos_of(root, "train")]
    (root / "imagenet_2012_bounding_boxes.csv").write_text("".join(f"{name},0,0,0.3,0.3\n" for name in names))
    falconet(f"data pack {root} packed --shard-size 5")
    answer = falconet(
        f"train --data imagenet --imagenet-data-path {root} {TRAIN} --epoch 3 --run-dir files --use-bbox-info"
    )
    assert answer.code == 0, answer.err
    assert (
        "18 training and 6 validation images of 3 classes, 24 x 24, from class folders, 18 of them with boxes"
        in answer.out
    )
    Path("packed/imagenet_2012_bounding_boxes.csv").write_bytes(
        (root / "imagenet_2012_bounding_boxes.csv").read_bytes()
    )
    monkeypatch.setenv("DATA_DIR", "packed")
    answer = falconet(
        f"train --data imagenet {TRAIN} --epoch 3 --run-dir shards --use-bbox-info --checkpoints-kept all"
    )
    assert "from packed shards, 18 of them with boxes" in answer.out
    assert losses("shards") == losses("files")
    first = format.checkpoints_in(Path("shards"))[0]
    answer = falconet(f"restore --checkpoint-input-path {first} --imagenet-data-path {root} --run-dir again")
    assert answer.code == 0, answer.err
    assert losses("again") == losses("files")[-len(losses("again")) :]
    plain = falconet(f"train --data folder --data-dir {root} {TRAIN} --epoch 3 --run-dir plain")
    assert plain.code == 0, plain.err
    assert losses("plain") != losses("files")


def test_boxes_without_effect_are_not_read(falconet, root):
    answer = falconet(f"train --data imagenet --data-dir {root} {TRAIN} --use-bbox-info --augment none --plan")
    assert answer.code == 0, answer.err
    assert (
        "note: --use-bbox-info has no effect without --data imagenet or folder, and --augment crop-flip" in answer.out
    )


def test_validation_reads_no_boxes(falconet, root):
    (root / "bounding_boxes.csv").write_text("n01440764_0.JPEG,0,0,1,1\n")
    falconet(f"train --data imagenet --data-dir {root} {TRAIN} --epoch 1 --run-dir r --use-bbox-info")
    (root / "bounding_boxes.csv").unlink()
    answer = falconet("validate --checkpoint-input-path r")
    assert answer.code == 0, answer.err


def test_missing_box_file_is_one_line(falconet, root):
    answer = falconet(f"train --data imagenet --data-dir {root} {TRAIN} --use-bbox-info")
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert f"falconet train: {root}: no bounding boxes there; expected *bounding_boxes.csv" in answer.err


def test_optional_boxes_are_used_where_they_exist(falconet, root):
    line = f"train --data imagenet --data-dir {root} {TRAIN} --epoch 1 --validation-mode none"

    def trained(name, options):
        answer = falconet(f"{line} {options} --run-dir {name}")
        assert answer.code == 0, answer.err
        return losses(name), "18 of them with boxes" in answer.out

    plain = trained("plain", "")
    assert trained("none", "--use-bbox-info-if-there") == plain == (losses("plain"), False)
    names = [path.name for path, _ in layouts.photos_of(root, "train")]
    (root / "bounding_boxes.csv").write_text("".join(f"{name},0,0,0.3,0.3\n" for name in names))
    expected = trained("boxes", "--use-bbox-info")
    assert trained("there", "--use-bbox-info-if-there") == expected
    assert expected[1]
    assert trained("bounded", "--crop-area 0.9")[0] != plain[0]
    assert trained("larger", "--use-bbox-info --crop-area 0.9")[0] != expected[0]
    assert trained("own", "--use-bbox-info --crop-area 0.9 --object-crop-area 0.08") == expected
    assert (
        "note: --object-crop-area has no effect without --use-bbox-info"
        in falconet(f"{line} --object-crop-area 0.1 --plan").out
    )


def test_imagenet_needs_a_folder(falconet):
    answer = falconet("train --data imagenet")
    assert "--data imagenet: needs --data-dir (or the environment variable DATA_DIR)" in answer.err
